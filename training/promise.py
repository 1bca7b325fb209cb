"""What a checkpoint promises about its exit setting, in words, from the `calibration.json` beside it."""

import json
from pathlib import Path
from typing import Any


def guarantee_of(checkpoint: Path) -> str | None:
    """None: the checkpoint was not calibrated, or nothing cheaper than full depth could be promised."""
    file = checkpoint / "calibration.json"
    promised = json.loads(file.read_text()) if file.exists() else {"promises": [{"p_value": None}]}
    is_kept = all(promise["p_value"] is not None for promise in promised["promises"])
    return describe_guarantee(promised) if is_kept else None


def describe_guarantee(promised: dict[str, Any]) -> str:
    """What `calibration.json` promises, and what not, in words."""
    loops = promised["full_loops"]
    full, promises = loops[0] if len(set(loops)) == 1 else loops, promised["promises"]
    texts = " and ".join(
        f"{p['calibration_sequences']:,} sequences of {p['sequence_length']} tokens of {p['source']}" for p in promises
    )
    kept = "; ".join(_describe(promise, full, len(promises) > 1) for promise in promises)
    return (
        f"With probability {promised['confidence']:g} over the calibration text ({texts}), {kept} on text like this. "
        "Nothing is promised for text of another kind."
    )


def _describe(promise: dict[str, Any], full: int | list[int], is_one_of_several: bool) -> str:
    unit, loss = ("", "loss of accuracy") if promise["measure"] == "accuracy" else (" nats", "excess loss")
    where = f" of {promise['source']}" if is_one_of_several else ""
    return (
        f"the mean {loss} of a sequence{where} against {full} loops, clipped to [0, {promise['clip']:g}]{unit}, is at "
        f"most {promise['budget']:g}{unit}"
    )
