"""What a checkpoint promises about its exit setting, in words, from the `calibration.json` beside it."""

import json
from pathlib import Path
from typing import Any


def guarantee_of(checkpoint: Path) -> str | None:
    """None: the checkpoint was not calibrated, or nothing cheaper than full depth could be promised."""
    file = checkpoint / "calibration.json"
    promised = json.loads(file.read_text()) if file.exists() else {"p_value": None}
    return None if promised["p_value"] is None else describe_guarantee(promised)


def describe_guarantee(promised: dict[str, Any]) -> str:
    """What `calibration.json` promises, and what not, in words."""
    unit, loss = ("", "loss of accuracy") if promised["measure"] == "accuracy" else (" nats", "excess loss")
    full = promised["full_loops"]
    return (
        f"With probability {promised['confidence']:g} over the calibration text ({promised['calibration_sequences']:,} "
        f"sequences of {promised['sequence_length']} tokens of {promised['source']}), the mean {loss} of a sequence "
        f"against {full[0] if len(set(full)) == 1 else full} loops, clipped to [0, {promised['clip']:g}]{unit}, is at "
        f"most {promised['budget']:g}{unit} on text like this. Nothing is promised for text of another kind."
    )
