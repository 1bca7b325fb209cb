"""What a checkpoint promises about its exit setting, in words, from the `calibration.json` beside it."""

import hashlib
import json
from pathlib import Path
from typing import Any


def guarantee_of(checkpoint: Path) -> str | None:
    """None: the checkpoint was not calibrated, nothing cheaper than full depth could be promised, or what was promised
    is of other weights or another setting."""
    file, settings = checkpoint / "calibration.json", checkpoint / "generation_config.json"
    if not file.exists():
        return None
    promised = json.loads(file.read_text())
    if any(promise["p_value"] is None for promise in promised["promises"]):
        return None
    if promised.get("weights") != weights_digest(checkpoint):
        return None
    if settings.exists():
        used, chosen = json.loads(settings.read_text()), (promised["exit_policy"], short_loops(promised["num_loops"]))
        if (used.get("exit_policy"), used.get("num_loops")) != chosen:
            return None
    return describe_guarantee(promised)


def weights_digest(checkpoint: Path) -> str | None:
    """Of the weights in a folder; None: it has none."""
    digest, files = hashlib.sha256(), sorted(checkpoint.glob("*.safetensors"))
    for path in files:
        with path.open("rb") as file:
            while block := file.read(2**24):
                digest.update(block)
    return digest.hexdigest() if files else None


def short_loops(loops: list[int]) -> int | list[int]:
    """One number where all groups have the same."""
    return loops[0] if len(set(loops)) == 1 else loops


def describe_guarantee(promised: dict[str, Any]) -> str:
    """What `calibration.json` promises, and what not, in words."""
    full, promises = short_loops(promised["full_loops"]), promised["promises"]
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
