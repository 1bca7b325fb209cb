"""Sums up what `evaluation.depth` measured of one task over training seeds, for docs/tasks.md.

    python -m evaluation.study.depth_tasks results/chains-0 results/chains-1 --output docs/tasks/chains.json

Takes the folders that `evaluation.depth` wrote, one a seed, keeps what the tables of the document need, and draws the
first of them beside the file.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import pyplot as plt

from ..depth_figures import plot_depth
from ..figures import STYLE
from ..report import Table

OF_RULES = ("threshold", "mean_steps", "accuracy", "fixed_accuracy", "ahead", "low", "high", "null_accuracy",
            "rank_correlation", "unfrozen")  # fmt: skip
DRAWN = ("step_norm/state", "kl", "acceleration/state", "step_norm/state x3", "confidence x2")
SHOWN_LOOPS = (1, 2, 4, 6, 8, 10, 12, 24)


def summary(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """The results of several seeds; of rules without what is by required depth."""
    if any(result["task"] != seeds[0]["task"] or result["cap"] != seeds[0]["cap"] for result in seeds):
        raise ValueError("the results are of different tasks or caps: give those of one.")
    kept = []
    for result in seeds:
        rules = _without_depths({rule: [{name: row[name] for name in OF_RULES if name in row} for row in rows]
                                 for rule, rows in result["rules"].items()})  # fmt: skip
        of_fixed = ("num_loops", "mean_steps", "accuracy", "accuracy_by_depth")
        fixed = [{name: row[name] for name in of_fixed if name in row} for row in result["fixed"]]
        deeper = result["deeper"] and {
            "depth": result["deeper"]["depth"],
            **{part: _without_depths(result["deeper"][part]) for part in ("fixed", "rules")},
        }
        same = ("mean_required", "position_only", "ideal", "reach", "no_loss", "policy", "contraction")
        kept.append({"rules": rules, "fixed": fixed, "deeper": deeper, **{name: result[name] for name in same}})
    return {"task": seeds[0]["task"], "sequences": seeds[0]["sequences"], "cap": seeds[0]["cap"], "seeds": kept}


def _without_depths(part: Any) -> Any:
    if isinstance(part, list):
        return [_without_depths(row) for row in part]
    if isinstance(part, dict):
        return {name: _without_depths(value) for name, value in part.items() if name != "accuracy_by_depth"}
    return part


def fixed_table(study: dict[str, Any]) -> Table:
    """Accuracy of fixed loops, a row for each seed."""
    rows = []
    for number, seed in enumerate(study["seeds"]):
        accuracy = {row["num_loops"][0]: row["accuracy"] for row in seed["fixed"]}
        rows.append([f"seed {number}", *(f"{accuracy[count]:.4f}" for count in SHOWN_LOOPS if count in accuracy)])
    shown = [str(count) for count in SHOWN_LOOPS if count <= study["cap"]]
    return Table("", ["fixed loops", *shown], rows)


def staircase_table(study: dict[str, Any]) -> Table:
    """Accuracy of the first seed with up to eight fixed loops, by what an answer needs."""
    rows = [row for row in study["seeds"][0]["fixed"] if row["num_loops"][0] <= 8]
    depths = [place for place, accuracy in enumerate(rows[0]["accuracy_by_depth"]) if accuracy is not None]
    cells = [[str(row["num_loops"][0]), *(f"{row['accuracy_by_depth'][d]:.3f}" for d in depths)] for row in rows]
    return Table("", ["fixed loops", *(str(depth) for depth in depths)], cells)


def rules_table(study: dict[str, Any]) -> Table:
    """Each rule's cheapest threshold at no loss, as every seed chose it on its tuning set."""
    rows = []
    for rule in study["seeds"][0]["rules"]:
        found = [seed["no_loss"].get(rule) for seed in study["seeds"]]
        if all(one is None for one in found):
            continue
        rows.append([rule, _each(found, "threshold", "g"), _each(found, "mean_steps", ".2f"),
                     _each(found, "accuracy", ".4f"), *_beside(study, rule, found)])  # fmt: skip
    header = ["rule", "threshold", "mean steps", "right", "ahead of fixed depth", "its steps shuffled", "rank corr."]
    return Table("", header, rows)


def _beside(study: dict[str, Any], rule: str, found: list[dict[str, Any] | None]) -> list[str]:
    """What stands beside the chosen thresholds: the lead over fixed depth, the shuffle, the correlation."""
    chosen = []
    for seed, one in zip(study["seeds"], found, strict=True):
        rows = [] if one is None else [r for r in seed["rules"][rule] if r["threshold"] == one["threshold"]]
        chosen.append(rows[0] if rows else None)
    ahead = "; ".join("-" if r is None else f"{r['ahead']:+.3f} [{r['low']:+.3f}, {r['high']:+.3f}]" for r in chosen)
    return [ahead, _each(chosen, "null_accuracy", ".3f"), _each(chosen, "rank_correlation", ".2f")]


def exits_table(studies: dict[str, dict[str, Any]], rules: tuple[str, ...]) -> Table:
    """What a rule takes to do the work of full depth, and what fixed loops make of as many: means over seeds."""
    rows = []
    for task, study in studies.items():
        seeds = study["seeds"]
        depth = seeds[0]["no_loss"]["num_loops"][0]
        full = np.mean([r["accuracy"] for seed in seeds for r in seed["fixed"] if r["num_loops"][0] == depth])
        rows.append([task, f"{depth} fixed loops", f"{depth}", f"{full:.4f}", ""])
        for rule in rules:
            found = [seed["no_loss"].get(rule) for seed in seeds]
            at = [r for seed, one in zip(seeds, found, strict=True) if one
                  for r in seed["rules"][rule] if r["threshold"] == one["threshold"]]  # fmt: skip
            if len(at) == len(seeds):
                means = [np.mean([r[name] for r in at]) for name in ("mean_steps", "accuracy", "fixed_accuracy")]
                rows.append(["", rule, f"{means[0]:.2f}", f"{means[1]:.4f}", f"{means[2]:.3f}"])
    return Table("", ["task", "loops", "mean loops", "right", "fixed loops, as many in the mean"], rows)


def reach_table(study: dict[str, Any]) -> Table:
    """Mean steps to reach an accuracy, thresholds chosen on the tuning set; means over the seeds that reached it."""
    rules = ["fixed", *study["seeds"][0]["rules"]]
    rows = []
    for target in study["seeds"][0]["reach"]:
        cells = []
        for rule in rules:
            found = [seed["reach"][target].get(rule) for seed in study["seeds"]]
            steps = [one["mean_steps"] for one in found if one]
            some = "" if len(steps) == len(found) else f" ({len(steps)} of {len(found)})"
            cells.append(f"{np.mean(steps):.2f}{some}" if steps else "-")
        rows.append([f"{100 * float(target):g} %", *cells])
    return Table("", ["right", *rules], rows)


def frozen_table(study: dict[str, Any]) -> Table:
    """What each rule says with states frozen at exits and with states computed on, at two of its thresholds."""
    rows = []
    for rule, of_first in study["seeds"][0]["rules"].items():
        for place in sorted({1, len(of_first) // 2}):
            at = [seed["rules"][rule][place] for seed in study["seeds"]]
            if "unfrozen" not in at[0]:
                continue
            unfrozen = [row["unfrozen"] for row in at]
            numbers = [
                _each(r, name, form)
                for r in (at, unfrozen)
                for name, form in (("mean_steps", ".2f"), ("accuracy", ".3f"))
            ]
            rows.append([rule, f"{at[0]['threshold']:g}", *numbers])
    return Table("", ["rule", "threshold", "steps", "right", "steps, computed on", "right, computed on"], rows)


def ideal_table(study: dict[str, Any]) -> Table:
    rows = []
    for margin in range(len(study["seeds"][0]["ideal"])):
        at = [seed["ideal"][margin] for seed in study["seeds"]]
        rows.append([f"needed + {margin}", _each(at, "mean_steps", ".2f"), _each(at, "accuracy", ".4f")])
    for place, first in enumerate(study["seeds"][0]["position_only"]):
        at = [seed["position_only"][place] for seed in study["seeds"] if seed["position_only"]]
        rows.append([f"position only, quantile {first['quantile']}", _each(at, "mean_steps", ".2f"),
                     _each(at, "accuracy", ".4f")])  # fmt: skip
    return Table("", ["steps given", "mean steps", "right"], rows)


def deeper_table(study: dict[str, Any]) -> Table:
    """Sequences deeper than in training: right answers among those that need more loops than any did there."""
    seeds = [seed["deeper"] for seed in study["seeds"]]
    rows = []
    for place, row in enumerate(seeds[0]["fixed"]):
        at = [seed["fixed"][place] for seed in seeds]
        rows.append([f"{row['num_loops']} fixed loops", _each(at, "mean_steps", ".1f"),
                     _each(at, "accuracy_beyond", ".4f")])  # fmt: skip
    for rule in dict.fromkeys(rule for seed in seeds for rule in seed["rules"]):
        at = [seed["rules"].get(rule) for seed in seeds]
        rows.append([rule, _each(at, "mean_steps", ".1f"), _each(at, "accuracy_beyond", ".4f")])
    return Table("", ["exit policy", "mean steps", f"right, beyond {study['task']['depth']} loops"], rows)


def _each(rows: list[dict[str, Any] | None], name: str, form: str) -> str:
    """A number of every seed; one if they are all the same."""
    shown = ["-" if row is None or row[name] is None else format(row[name], form) for row in rows]
    return shown[0] if len(set(shown)) == 1 else ", ".join(shown)


def draw(result: dict[str, Any], path: Path) -> None:
    """The rules of convergence beside fixed loops."""
    with matplotlib.rc_context(STYLE):
        figure = plot_depth(result, DRAWN)
        figure.savefig(path, dpi=110)
        plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="folders of `evaluation.depth`, one a seed")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    seeds = [json.loads((folder / "depth.json").read_text()) for folder in options.results]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(summary(seeds)) + "\n")
    draw(seeds[0], options.output.with_suffix(".png"))


if __name__ == "__main__":
    matplotlib.use("Agg")
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
