"""Runs beside each other at the same training step: `python -m evaluation.study.controls NAME=RUN ... --step 400`.

`NAME=RUN@200` reads a run at another step than the rest.

Reads the logs that the runs left (`trainer_state.json`, also of runs that were stopped at a checkpoint, and
`geometry.jsonl`): the validation loss at the step, and the geometry of the last measurement up to it.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training.trainer import newest_whole_checkpoint

from ..figures import read_geometry
from .claims import settled_cosine, steps_to_shrink


@dataclass
class Control:
    name: str
    step: int
    tokens: int
    eval_loss: float
    geometry_step: int | None = None  # and per group or boundary:
    steps_to_shrink: list[int | None] | None = None
    cosines: list[float | None] | None = None
    drift_as_printed: list[float] | None = None
    drift_net: list[float] | None = None


def read_control(name: str, run: Path, step: int) -> Control:
    log = read_log(run)
    losses = {entry["step"]: entry["eval_loss"] for entry in log if "eval_loss" in entry}
    if step not in losses:
        known = ", ".join(str(known) for known in losses) or "none"
        raise ValueError(f"`--step` is {step}, but {run} was evaluated at: {known}.")
    seen = [entry["tokens_seen"] for entry in log if "tokens_seen" in entry and entry["step"] <= step]
    control = Control(name, step, seen[-1] if seen else 0, losses[step])
    history = run / "geometry.jsonl"
    lines = [line for line in read_geometry(history) if line["step"] <= step] if history.exists() else []
    if lines:
        groups, drift = lines[-1]["groups"], lines[-1]["drift_to_loop_ratio"]
        settled = [settled_cosine(group) for group in groups]
        control.geometry_step = lines[-1]["step"]
        control.steps_to_shrink = [steps_to_shrink(group["step_norm"]["mean"]) for group in groups]
        control.cosines = [None if value is None else value[0] for value in settled]
        control.drift_as_printed = [boundary["as_printed"]["mean"] for boundary in drift]
        control.drift_net = [boundary["net"]["mean"] for boundary in drift]
    return control


def read_log(run: Path) -> list[dict[str, Any]]:
    folder = run if (run / "trainer_state.json").exists() else newest_whole_checkpoint(run)
    if folder is None:
        raise FileNotFoundError(f"{run} has neither trainer_state.json nor a whole checkpoint.")
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


def main(arguments: list[str] | None = None) -> list[Control]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN[@STEP]")
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--output", type=Path, help="write the rows to this JSON file too")
    options = parser.parse_args(arguments)
    controls = []
    for given in options.runs:
        name, separator, run = given.rpartition("=")
        if not separator:
            raise ValueError(f"{given!r} is not of the form NAME=RUN.")
        folder, at, step = run.rpartition("@")
        if at and step.isdigit():
            controls.append(read_control(name, Path(folder), int(step)))
        else:
            controls.append(read_control(name, Path(run), options.step))
        print(controls[-1])
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps([asdict(control) for control in controls], indent=1) + "\n")
    return controls


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
