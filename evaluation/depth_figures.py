"""The figures of `evaluation.depth`: accuracy against mean steps, steps against required depth, and a heat map."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from .figures import RULE_STYLES, STYLE

STYLES = {rule: RULE_STYLES[rule] for rule in ("fixed", "step_norm/state", "kl", "acceleration/state")} | {
    "step_norm/state x3": {"color": "#0072B2", "marker": "o", "linestyle": "-"},
    "kl x3": {"color": "#009E73", "marker": "^", "linestyle": "-"},
    "confidence": {"color": "#CC79A7", "marker": "X", "linestyle": ":"},
    "confidence x2": {"color": "#CC79A7", "marker": "P", "linestyle": "-"},
    "confidence x3": {"color": "#CC79A7", "marker": "v", "linestyle": "--"},
    "entropy": {"color": "#999999", "marker": "*", "linestyle": ":"},
    "entropy x2": {"color": "#999999", "marker": "*", "linestyle": "-"},
}


def plot_depth(result: dict[str, Any], rules: tuple[str, ...] | None = None) -> Figure:
    """Left, accuracy against mean steps for every rule and its baselines; right, steps against required depth."""
    shown = [rule for rule in STYLES if rule in result["rules"] and (rules is None or rule in rules)]
    panels = 2 if any(result["no_loss"].get(rule) for rule in shown) else 1  # none without data
    figure, axes = plt.subplots(1, panels, figsize=(4.5 * panels, 3.6), layout="constrained", squeeze=False)
    quality = axes[0, 0]
    fixed = [(row["mean_steps"], row["accuracy"]) for row in result["fixed"]]
    _curve(quality, fixed, "fixed loops", STYLES["fixed"])
    for rule in shown:
        _curve(quality, [(r["mean_steps"], r["accuracy"]) for r in result["rules"][rule]], rule, STYLES[rule])
    _curve(quality, [(r["mean_steps"], r["accuracy"]) for r in result["position_only"]], "position only",
           {"color": "0.6", "marker": "_", "linestyle": "--"})  # fmt: skip
    ideal = result["ideal"][1]  # one step more than it needs, to be read by others
    if ideal["accuracy"] > 0.95 * max(accuracy for _, accuracy in fixed):  # else what tokens need is not known
        quality.plot(ideal["mean_steps"], ideal["accuracy"], "*", color="gold", markeredgecolor="black", markersize=11,
                     label="as needed, and one to be read", zorder=5)  # fmt: skip
    quality.set(xlabel="mean loops of a token", ylabel="right answers", xlim=(0.8, min(result["cap"], 14)))
    quality.legend(fontsize=7, loc="lower right")

    if panels == 1:
        return figure
    steps, most = axes[0, 1], 0
    for rule in shown:
        found = result["no_loss"].get(rule) or {}
        row = next((r for r in result["rules"][rule] if r["threshold"] == found.get("threshold")), None)
        if row is not None:
            taken = np.array(row["steps_by_depth"], dtype=float)
            steps.plot(range(len(taken)), taken, label=f"{rule} {row['threshold']:g}", markersize=4, **STYLES[rule])
            most = max(most, len(taken))
    steps.plot(range(1, most), range(1, most), color="black", linewidth=0.8, label="as needed")
    full = result["no_loss"]["num_loops"][0]
    steps.axhline(full, color="black", linestyle="--", linewidth=0.8, label=f"{full} fixed loops")
    steps.set_ylim(0, None)
    steps.legend(fontsize=7, loc="lower right")
    steps.set(xlabel="loops that a token needs", ylabel="loops that it took")
    return figure


def _curve(ax, points: list[tuple[float, float]], label: str, style: dict[str, Any]) -> None:
    if points:
        ax.plot(*zip(*sorted(points), strict=True), label=label, markersize=4, linewidth=1, **style)


def plot_heat_map(result: dict[str, Any]) -> Figure:
    """Accuracy by required depth and fixed loops."""
    rows = [row for row in result["fixed"] if len(set(row["num_loops"])) == 1]
    values = np.array([row["accuracy_by_depth"] for row in rows], dtype=float).T
    figure, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
    ax.grid(False)
    image = ax.imshow(values, origin="lower", aspect="auto", vmin=0, vmax=1, cmap="viridis",
                      extent=(0.5, len(rows) + 0.5, -0.5, len(values) - 0.5))  # fmt: skip
    ax.set(xlabel="loops", ylabel="loops that a token needs")
    figure.colorbar(image, label="right answers")
    return figure


def draw_depth_figures(result: dict[str, Any], output: Path) -> list[Path]:
    """`depth.png` and `heat_map.png`."""
    paths = []
    with matplotlib.rc_context(STYLE):
        for name, figure in (("depth", plot_depth(result)), ("heat_map", plot_heat_map(result))):
            paths.append(output / f"{name}.png")
            figure.savefig(paths[-1], dpi=110)
            plt.close(figure)
    return paths
