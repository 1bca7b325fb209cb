"""Does it help to train with exits? `python -m evaluation.study.exits_in_training --output docs/tasks/exits.json`.

Models of chains, trained with and without `rest_weight` and `doubt_weight`, are trained on for some steps: as before,
and with tokens that leave by their own confidence in two of three steps, so that others learn to read states that
stopped early. `evaluation.depth` then measures every rule on each. About an hour on one core for a seed. What is done
stays in `--output` and `--work`: an interrupted study goes on where it was.
"""

import argparse
import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

from training.train import main as train

from .. import depth
from ..report import Table

RECIPE = Path(__file__).parents[2] / "training/recipes/chains.yaml"
RULES = ("acceleration/state", "step_norm/state", "kl", "confidence", "confidence x2", "confidence x3", "entropy")
LOSSES = ((0.0, 0.0), (0.3, 0.0), (0.0, 0.3), (0.3, 0.3))  # weights of rest and doubt
CONFIDENCES = [{"name": "confidence", "threshold": threshold} for threshold in (0.3, 0.1, 0.03, 0.01)]
FURTHER = {
    "as before": {},
    "with exits": {"exit_policies": json.dumps(CONFIDENCES), "exit_share": 2 / 3},
}


def trained(folder: Path, **settings: Any) -> Path:
    """A run of the recipe with these settings, gone on with where it was cut."""
    if not (folder / "model.safetensors").exists():
        overrides = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
        train([str(RECIPE), "--output_dir", str(folder), "--resume", *overrides])
    return folder


def measured(folder: Path, sequences: int) -> dict[str, Any]:
    """Of every rule, all thresholds and the cheapest at which 99.9 % are right, chosen on the tuning set."""
    found = folder / "depth" / "depth.json"
    if not found.exists():
        depth.main([str(folder), "--output", str(found.parent), "--sequences", str(sequences), "--rules", *RULES])
    results = json.loads(found.read_text())
    sweeps = {
        rule: [{name: row[name] for name in ("threshold", "mean_steps", "accuracy")} for row in rows]
        for rule, rows in results["rules"].items()
    }
    return {"sweeps": sweeps, "reach": results["reach"]["0.999"]}


def study(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = json.loads(options.output.read_text()) if options.output.exists() else []
    for seed, (rest, doubt) in product(range(options.seeds), LOSSES):
        weights = {"seed": seed, "rest_weight": rest, "doubt_weight": doubt}
        folder = options.work / "-".join(f"{name.split('_')[0]}-{value}" for name, value in weights.items())
        for name, settings in {"not trained on": None, **FURTHER}.items():
            if any(weights | {"trained": name} == {key: row[key] for key in (*weights, "trained")} for row in rows):
                continue
            start = trained(folder, **weights)
            if settings is not None:
                further = folder.with_name(f"{folder.name}-{name.replace(' ', '-')}")
                start = trained(further, **weights, init_from=start, max_steps=options.steps, **settings)
            rows.append({**weights, "trained": name, **measured(start, options.sequences)})
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(rows) + "\n")
    return rows


def exits_in_training_table(rows: list[dict[str, Any]]) -> Table:
    """Mean steps at which 99.9 % are right; where a rule has no such threshold, the most that are, and its steps."""
    cells = []
    for (rest, doubt), name in product(LOSSES, ("not trained on", *FURTHER)):
        how = {"rest_weight": rest, "doubt_weight": doubt, "trained": name}
        seeds = [row for row in rows if how.items() <= row.items()]
        if seeds:
            cells.append([f"{rest:g}", f"{doubt:g}", name, *(_cell(seeds, rule) for rule in RULES)])
    return Table("", ["`rest_weight`", "`doubt_weight`", "trained on", *RULES], cells)


def _cell(seeds: list[dict[str, Any]], rule: str) -> str:
    shown = []
    for row in seeds:
        if rule not in row["sweeps"]:
            shown.append("-")
            continue
        reached = row["reach"].get(rule)
        best = max(row["sweeps"][rule], key=lambda at: at["accuracy"])
        shown.append(
            f"{reached['mean_steps']:.2f}" if reached else f"({best['accuracy']:.3f} at {best['mean_steps']:.1f})"
        )
    return shown[0] if set(shown) == {"-"} else ", ".join(shown)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=500, help="of training on")
    parser.add_argument("--sequences", type=int, default=128, help="for tuning, and as many for the numbers")
    parser.add_argument("--work", type=Path, default=Path("runs/exits-in-training"), help="folder for what is trained")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    study(parser.parse_args(arguments))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
