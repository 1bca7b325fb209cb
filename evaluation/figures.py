"""The paper's figures from measured files, and the comparison that it did not make: `python -m evaluation.figures`.

    python -m evaluation.figures --report DIR --output figures
    python -m evaluation.figures --trajectories DIR --geometry geometry.jsonl --tradeoff DIR --output figures

draws those figures that the given inputs allow, each as PNG and PDF, without panels for what was not measured:

- `training`: losses over training, and the share of right answers where there is a task;
- `trajectory` (figure 1): a token's path through the model in its two principal components, a loop enlarged;
- `drift` (figure 2): drift-to-loop ratio over training, as printed and with the net move of the next group;
- `loop_dynamics` (figure 3): step norms and cosines per group, with bands from the 10th to the 90th percentile;
- `exit_policies` (figure 4): latency, perplexity and cross-entropy against the threshold, beside fixed depth;
- `cosines` (figure 5): cosines of consecutive steps over training;
- `fair_comparison`: quality against mean steps and against time, beside fixed depth, from two loops on;
- `against_fixed`: each rule's difference from fixed depth at the same mean steps, with 95 % intervals.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from recurrent_gpt2.geometry import Projection

from .exit_tradeoff import PAPER_THRESHOLDS, Result, compare, pool, read_results
from .trajectories import Trajectories, load_trajectories

# Okabe and Ito's palette, which the colour-blind can tell apart; markers and dashes say the same in black and white.
RULE_STYLES = {
    "fixed": {"color": "black", "marker": "s", "linestyle": "--"},
    "step_norm": {"color": "#0072B2", "marker": "o", "linestyle": "-"},
    "step_norm/state": {"color": "#56B4E9", "marker": "v", "linestyle": "-."},
    "kl": {"color": "#E69F00", "marker": "D", "linestyle": "-"},
    "acceleration": {"color": "#009E73", "marker": "^", "linestyle": "-"},
    "acceleration/state": {"color": "#D55E00", "marker": "P", "linestyle": "-."},
    "acceleration/step": {"color": "#CC79A7", "marker": "X", "linestyle": ":"},
}
GROUP_STYLES = [
    RULE_STYLES[rule] | {"linestyle": "-"} for rule in ("step_norm", "kl", "acceleration", "acceleration/step")
]
PAPER_RULES = ("step_norm", "kl", "acceleration")
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}
FLOOR_COLOR = "0.85"
LEAST_NATS = 0.1  # that an axis of cross-entropy spans
DEPTH_TICKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def name_of_group(layers: list[int], group: int) -> str:
    if not layers:
        return f"group {group}"
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"


def plot_trajectory(trajectories: Trajectories, tokens: int = 2) -> Figure:
    """Figure 1. The projection is fitted on all states of all chosen tokens; `tokens` of them are drawn."""
    groups = trajectories.index["groups"]
    between = torch.from_numpy(trajectories["between"])
    loops = [torch.from_numpy(trajectories[f"group_{group}"]) for group in range(len(groups))]
    projection = Projection.fit(torch.cat([between, *loops]))
    chosen = np.linspace(between.shape[1] // 4, between.shape[1] - 1, tokens, dtype=int).tolist()

    size = {"figsize": (4.6 * tokens, 4.2), "layout": "constrained"}
    figure, axes = plt.subplots(1, tokens, sharex=True, sharey=True, squeeze=False, **size)
    for place, token in enumerate(chosen):
        ax: Axes = axes[0, place]
        on_path = projection.apply(between[:, token])
        ax.plot(*on_path.T, color="0.6", linewidth=1, marker=".", markersize=4, zorder=1)
        ax.annotate("embedding", on_path[0], fontsize=7, xytext=(4, 4), textcoords="offset points")
        ax.annotate("output", on_path[-1], fontsize=7, xytext=(4, 4), textcoords="offset points")
        for group, states in enumerate(loops):
            path = projection.apply(states[:, token])
            style = GROUP_STYLES[group % len(GROUP_STYLES)]
            ax.plot(*path.T, color=style["color"], linewidth=0.7, alpha=0.5)
            shade = np.linspace(0.25, 1.0, len(path))  # from light to dark, in the order of iteration
            ax.scatter(*path.T, color=style["color"], alpha=shade, s=14, marker=style["marker"], zorder=2,
                       label=name_of_group(groups[group], group))  # fmt: skip
        text = trajectories.index["tokens"][trajectories.index["chosen"][token]].replace("Ġ", " ")
        ax.set(xlabel=_component(projection, 0), title=f"token {text!r}")
    left, right = axes[0, 0].get_xlim()
    axes[0, 0].set_xlim(left, right + 0.65 * (right - left))  # room for the insets
    for ax, token in zip(axes[0], chosen, strict=True):
        _enlarge_loop(ax, projection.apply(loops[len(loops) // 2][:, token]), len(loops) // 2)
    axes[0, 0].set_ylabel(_component(projection, 1))
    axes[0, 0].legend(fontsize=7, loc="upper right")
    return figure


def _component(projection: Projection, index: int) -> str:
    return f"component {index + 1} ({100 * projection.explained[index]:.0f} % of variance)"


def _enlarge_loop(ax: Axes, path: torch.Tensor, group: int) -> None:
    """An inset with the loop from its third state on: the first steps go from the noise to where the loop settles."""
    style = GROUP_STYLES[group % len(GROUP_STYLES)]
    settled = path[2:]
    inset = ax.inset_axes((0.64, 0.05, 0.34, 0.4))
    inset.plot(*settled.T, color=style["color"], linewidth=0.7)
    inset.scatter(*settled.T, color=style["color"], alpha=np.linspace(0.25, 1.0, len(settled)), s=8)
    inset.set(xticks=[], yticks=[])
    inset.set_title("one loop, enlarged", fontsize=6, pad=2)
    inset.spines[["top", "right"]].set_visible(True)
    ax.indicate_inset_zoom(inset, edgecolor="0.4")


def plot_drift(geometry: list[dict[str, Any]], groups: list[list[int]]) -> Figure:
    """Figure 2."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained", sharex=True, sharey=True)
    steps = [line["step"] for line in geometry]
    titles = {"as_printed": "as printed (eq. 2)", "net": "net move of the next group"}
    for ax, (kind, title) in zip(axes, titles.items(), strict=True):
        for boundary in range(len(groups) - 1):
            moments = [line["drift_to_loop_ratio"][boundary][kind] for line in geometry]
            mean, std = (np.array([m[name] for m in moments], dtype=float) for name in ("mean", "std"))
            style = GROUP_STYLES[boundary % len(GROUP_STYLES)]
            label = (
                f"{name_of_group(groups[boundary], boundary)} to {name_of_group(groups[boundary + 1], boundary + 1)}"
            )
            ax.plot(steps, mean, markersize=4, label=label, **style)
            ax.fill_between(steps, mean - std, mean + std, color=style["color"], alpha=0.15, linewidth=0)
        ax.axhline(1, color="black", linewidth=0.8, linestyle=":")
        ax.set(xlabel="training step", title=title)
        ax.set_xscale("symlog", linthresh=1)
    axes[0].set_ylim(0, None)
    axes[0].set_ylabel("drift-to-loop ratio")
    axes[0].legend(fontsize=7)
    return figure


def plot_loop_dynamics(line: dict[str, Any], groups: list[list[int]]) -> Figure:
    """Figure 3: one measurement of the geometry, steps below rounding noise shaded. Bands are percentiles over tokens;
    older measurements have none."""
    size = {"figsize": (max(3.2 * len(groups), 4), 5), "layout": "constrained"}
    figure, axes = plt.subplots(2, len(groups), sharey="row", squeeze=False, **size)
    for group, measured in enumerate(line["groups"]):
        style = GROUP_STYLES[group % len(GROUP_STYLES)]
        for row, (name, first) in enumerate((("step_norm", 0), ("step_cosine", 1))):
            ax = axes[row, group]
            mean = np.array(measured[name]["mean"], dtype=float)
            mean = cosines_above_floor(measured) if name == "step_cosine" else mean
            steps = np.arange(first, first + len(mean))
            ax.plot(steps, mean, color=style["color"], marker=style["marker"], markersize=3)
            if "low" in measured[name]:
                low, high = (np.where(np.isnan(mean), np.nan, np.array(measured[name][band], dtype=float))
                             for band in ("low", "high"))  # fmt: skip
                ax.fill_between(steps, low, high, color=style["color"], alpha=0.2, linewidth=0)
            below = np.flatnonzero(np.array(measured["above_floor"]) < 0.5)
            if len(below):
                ax.axvspan(below[0], len(measured["above_floor"]), color=FLOOR_COLOR, zorder=0)
                ax.text(below[0] + 0.3, 0.96, "rounding", fontsize=7, va="top", transform=ax.get_xaxis_transform())
            ax.set_xlabel("loop step k")
        axes[0, group].set(title=name_of_group(groups[group], group), yscale="log")
        axes[1, group].set_ylim(-1.05, 1.05)
    axes[0, 0].set_ylabel("step norm")
    axes[1, 0].set_ylabel("cosine to the step before")
    return figure


def cosines_above_floor(group: dict[str, Any]) -> np.ndarray:
    """Mean cosines, NaN where most tokens' steps are rounding noise."""
    above = np.array(group["above_floor"]) > 0.5
    return np.where(above[1:] & above[:-1], np.array(group["step_cosine"]["mean"], dtype=float), np.nan)


def plot_cosines(geometry: list[dict[str, Any]], groups: list[list[int]], most: int = 7) -> Figure:
    """Figure 5: `most` measurements over training, in the colours of their training steps."""
    shown = [geometry[i] for i in sorted({*np.linspace(0, len(geometry) - 1, most).round().astype(int).tolist()})]
    steps = [line["step"] for line in shown]
    norm = matplotlib.colors.SymLogNorm(1, vmin=steps[0], vmax=steps[-1])
    colours = matplotlib.cm.ScalarMappable(norm, matplotlib.colormaps["viridis_r"])
    size = {"figsize": (max(3.2 * len(groups), 4) + 0.8, 3), "layout": "constrained"}
    figure, axes = plt.subplots(1, len(groups), sharey=True, squeeze=False, **size)
    for group, ax in enumerate(axes[0]):
        for line in shown:
            cosines = cosines_above_floor(line["groups"][group])
            ax.plot(np.arange(1, len(cosines) + 1), cosines, color=colours.to_rgba(line["step"]))
        ax.set(xlabel="loop step k", title=name_of_group(groups[group], group), ylim=(-1.05, 1.05))
    axes[0, 0].set_ylabel("cosine to the step before")
    bar = figure.colorbar(colours, ax=axes, label="training step")
    bar.set_ticks(steps, labels=[f"{step:,}" for step in steps])
    bar.minorticks_off()
    return figure


def plot_exit_policies(results: list[Result]) -> Figure | None:
    """Figure 4: the paper's three rules at its thresholds; None where none of them was measured. The lines of fixed
    depth at the cap and at two loops say how much a difference matters."""
    shown = [r for r in results if r.setting.rule in PAPER_RULES and r.setting.threshold in PAPER_THRESHOLDS]
    shown.sort(key=lambda result: result.setting.threshold)
    by_rule = {rule: [r for r in shown if r.setting.rule == rule] for rule in PAPER_RULES}
    by_rule = {rule: points for rule, points in by_rule.items() if points}
    if not by_rule:
        return None
    panels: dict[str, Callable[[Result], float]] = {
        "perplexity": lambda result: result.perplexity,
        "cross-entropy (nats)": lambda result: result.cross_entropy,
    }
    if any("1" in result.ms_per_token for result in shown):
        panels = {"ms/token": lambda result: result.ms_per_token.get("1", np.nan), **panels}
    cap = shown[0].setting.num_loops
    fixed = {r.setting.num_loops: r for r in results if r.setting.rule == "fixed" and r.setting.num_loops in (2, cap)}
    width = 10 * len(panels) / 3
    figure, axes = plt.subplots(1, len(panels), figsize=(width, 3), layout="constrained")
    for ax, (label, measured) in zip(axes, panels.items(), strict=True):
        for loops, linestyle in ((cap, "--"), (2, ":")):
            if loops in fixed and not np.isnan(measured(fixed[loops])):
                ax.axhline(measured(fixed[loops]), color="black", linewidth=1, linestyle=linestyle,
                           label=f"{loops} fixed loops")  # fmt: skip
        for rule, points in by_rule.items():
            style = RULE_STYLES[rule] | {"markersize": 5}
            ax.plot([r.setting.threshold for r in points], [measured(r) for r in points], label=rule, **style)
        ax.set(xscale="log", xlabel="threshold", ylabel=label)
        ax.ticklabel_format(axis="y", useOffset=False)
    for ax, (label, measured) in zip(axes, panels.items(), strict=True):
        values = [measured(result) for result in (*shown, *fixed.values())]
        if label == "ms/token":
            ax.set_ylim(0, None)
        elif label == "perplexity":
            ax.set_ylim(_at_least(min(values), max(values), LEAST_NATS * min(values)))
        else:
            ax.set_ylim(_at_least(min(values), max(values), LEAST_NATS))
    handles = {label: line for ax in axes for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), fontsize=7, loc="outside lower center", ncols=len(handles))
    return figure


def _at_least(low: float, high: float, span: float) -> tuple[float, float]:
    """Limits of an axis on which next to nothing looks like it."""
    margin = max(span - (high - low), 0) / 2 + 0.05 * max(span, high - low)
    return low - margin, high + margin


def plot_fair_comparison(results: list[Result]) -> Figure:
    """Quality against mean steps and against time: rules can be compared where the cost is the same. Axes begin at two
    loops, since a single one would squeeze the rest, and what is left out is said."""
    panels = 2 if any("1" in result.ms_per_token for result in results) else 1
    size = {"figsize": (4.5 * panels, 3.8), "layout": "constrained"}
    figure, axes = plt.subplots(1, panels, sharey=True, squeeze=False, **size)
    axes = axes[0]
    for rule, points in _by_rule(results):
        style = RULE_STYLES[rule] | {"markersize": 4, "linewidth": 1}
        axes[0].plot([r.mean_depth for r in points], [r.cross_entropy for r in points], label=rule, **style)
        timed = sorted((r for r in points if "1" in r.ms_per_token), key=lambda r: r.ms_per_token["1"])
        if timed:
            axes[1].plot([r.ms_per_token["1"] for r in timed], [r.cross_entropy for r in timed], **style)
    axes[0].set(xlabel="mean loop steps of a looped layer", ylabel="cross-entropy (nats)")
    if panels == 2:
        axes[1].set(xlabel="ms/token, batch 1")
    for ax in axes:
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
        ax.xaxis.set_major_formatter(ScalarFormatter())
        ax.xaxis.set_minor_formatter(NullFormatter())
    _clip_at_two_loops(axes, results)
    left, right = axes[0].get_xlim()
    axes[0].set_xticks([tick for tick in DEPTH_TICKS if left <= tick <= right])
    axes[0].legend(fontsize=7, loc="upper right")
    return figure


def _clip_at_two_loops(axes: Iterable[Axes], results: list[Result]) -> None:
    by_depth, *by_time = axes
    shown = [result for result in results if result.mean_depth >= 2]
    two = next((r.cross_entropy for r in shown if r.setting.rule == "fixed" and r.setting.num_loops == 2), None)
    if two is None or len(shown) == len(results):
        return
    best = min(result.cross_entropy for result in shown)
    by_depth.set_ylim(_at_least(best, two, LEAST_NATS / 2))
    by_depth.set_xlim(1.85, 1.08 * max(result.mean_depth for result in shown))
    inside = [r.ms_per_token["1"] for r in shown if "1" in r.ms_per_token]
    for ax in by_time:
        ax.set_xlim(0.93 * min(inside), 1.08 * max(inside))
    one = [r.cross_entropy for r in results if r.setting.rule == "fixed" and r.setting.num_loops == 1]
    left_out = [f"1 fixed loop: {one[0]:.3f} nats"] if one else []
    rules = sum(result.setting.rule != "fixed" and result.mean_depth < 2 for result in results)
    left_out += [f"{rules} setting{'s' if rules > 1 else ''} of rules below 2 loops"] if rules else []
    by_depth.set_title("not shown: " + ", ".join(left_out), fontsize=7, loc="left")


def plot_against_fixed(results: list[Result]) -> Figure | None:
    """Below zero, a rule is better than fixed depth at the same mean number of steps. None without such a pair."""
    comparisons = compare(results)
    if not comparisons:
        return None
    figure, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for rule in RULE_STYLES:
        points = sorted((c for c in comparisons if c.setting.rule == rule), key=lambda c: c.mean_depth)
        if points:
            middle = np.array([c.difference for c in points])
            bars = np.array([[c.difference - c.low, c.high - c.difference] for c in points]).T
            ax.errorbar([c.mean_depth for c in points], middle, np.maximum(bars, 0), label=rule, markersize=4,
                        linewidth=1, elinewidth=0.7, capsize=1.5, **RULE_STYLES[rule])  # fmt: skip
    ax.axhline(0, color="black", linewidth=0.8)
    ax.axhspan(-0.01, 0.01, color=FLOOR_COLOR, alpha=0.5, zorder=0, linewidth=0, label="within 0.01 nats")
    shown = [limit for c in comparisons for limit in (c.low, c.high)]
    ax.set_ylim(_at_least(min(shown), max(shown), LEAST_NATS / 2))
    ax.set(xlabel="mean loop steps of a looped layer", ylabel="cross-entropy minus fixed depth's (nats)")
    ax.legend(fontsize=7)
    return figure


def _by_rule(results: Iterable[Result]) -> list[tuple[str, list[Result]]]:
    results = list(results)
    by_rule = [(rule, sorted((r for r in results if r.setting.rule == rule), key=lambda r: r.mean_depth))
               for rule in RULE_STYLES]  # fmt: skip
    return [(rule, points) for rule, points in by_rule if points]


# Where a run logs several losses they are of the parts of its data.
CURVES = {"loss": "training, all", "text_loss": "training, text", "answers_loss": "training, answers",
          "eval_loss": "validation", "eval_text_loss": "validation, text",
          "eval_tasks_loss": "validation, answers"}  # fmt: skip
SHARES = {"eval_accuracy": "validation", "eval_tasks_accuracy": "validation, answers"}


def plot_training(log: list[dict[str, float]], has_task: bool) -> Figure | None:
    """Losses, and where there is a task the share of its right answers, over training. None without a log."""
    panels = {"cross-entropy (nats)": CURVES, "right answers": SHARES if has_task else {}}
    measured = {label: {kind: points for kind in kinds if len(points := _logged(log, kind)) > 1}
                for label, kinds in panels.items()}  # fmt: skip
    if {"text_loss", "answers_loss"} <= measured["cross-entropy (nats)"].keys():
        del measured["cross-entropy (nats)"]["loss"]  # their sum
    measured = {label: curves for label, curves in measured.items() if curves}
    if not measured:
        return None
    figure, axes = plt.subplots(1, len(measured), figsize=(max(4.5 * len(measured), 6), 3.2), layout="constrained",
                                squeeze=False)  # fmt: skip
    for ax, (label, curves) in zip(axes[0], measured.items(), strict=True):
        for kind, points in curves.items():
            is_text = "task" not in kind and "answers" not in kind
            style = {"color": RULE_STYLES["step_norm" if is_text else "kl"]["color"], "linewidth": 1}
            style |= {"marker": "o", "markersize": 3} if kind.startswith("eval") else {"alpha": 0.45}
            ax.plot(*zip(*points, strict=True), label=(CURVES | SHARES)[kind], **style)
        ax.set(xlabel="training step", ylabel=label, **({"ylim": (0, 1.03)} if curves.keys() <= SHARES.keys() else {}))
        ax.legend(fontsize=7)
    return figure


def _logged(log: list[dict[str, float]], kind: str) -> list[tuple[float, float]]:
    return [(entry["step"], entry[kind]) for entry in log if entry.get(kind) is not None]


def read_geometry(file: Path) -> list[dict[str, Any]]:
    """The lines of `geometry.jsonl`, in the order of training steps; one that a crash cut short is left out."""
    lines = []
    for line in file.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    if not lines:
        raise ValueError(f"{file} has no measurements.")
    return sorted(lines, key=lambda line: line["step"])


def save_figure(figure: Figure, output: Path, name: str) -> Path:
    output.mkdir(parents=True, exist_ok=True)
    figure.savefig(output / f"{name}.pdf", metadata={"CreationDate": None})
    figure.savefig(output / f"{name}.png", dpi=130)
    plt.close(figure)
    return output / f"{name}.png"


def draw_figures(
    output: Path,
    trajectories: Path | None = None,
    geometry: list[dict[str, Any]] | None = None,
    groups: list[list[int]] | None = None,
    results: list[Result] | None = None,
    now: dict[str, Any] | None = None,
    training: list[dict[str, float]] | None = None,
    has_task: bool = False,
) -> dict[str, Path]:
    """Those figures that the inputs allow, by name. `groups` are the layers of the loops, to name them; `now` is the
    geometry to show as the model's, if not the last one of its training; `training` is a trainer's log."""
    figures: dict[str, Figure | None] = {}
    with matplotlib.rc_context(STYLE):
        if training:
            figures["training"] = plot_training(training, has_task)
        if trajectories is not None:
            loaded = load_trajectories(trajectories)
            groups = groups or loaded.index["groups"]
            figures["trajectory"] = plot_trajectory(loaded)
        if geometry and now is None:
            now = geometry[-1]
        if now is not None:
            groups = groups or [[] for _ in now["groups"]]  # not known
            figures["loop_dynamics"] = plot_loop_dynamics(now, groups)
        if geometry and len(geometry) > 1:
            figures["cosines"] = plot_cosines(geometry, groups)
            if len(groups) > 1:
                figures["drift"] = plot_drift(geometry, groups)
        if results:
            figures["exit_policies"] = plot_exit_policies(results)
            figures["fair_comparison"] = plot_fair_comparison(results)
            figures["against_fixed"] = plot_against_fixed(results)
        return {name: save_figure(figure, output, name) for name, figure in figures.items() if figure is not None}


def read_report(folder: Path) -> dict[str, Any]:
    """What `draw_figures` takes, from a folder that `evaluation.report` wrote."""
    file = folder / "report.json"
    if not file.exists():
        raise FileNotFoundError(f"`--report` is {folder}, which has no report.json.")
    report = json.loads(file.read_text())
    return {
        "trajectories": folder / "trajectories",
        "geometry": report["geometry_over_training"],
        "groups": report["groups"],
        "results": pool(next(iter(read_sources(report).values()))),
        "now": report["geometry"],
        "training": report.get("training"),
        "has_task": bool(report.get("tasks")),
    }


def read_tradeoff(folder: Path) -> list[Result]:
    """The results of a sweep, or those of a report on its first text."""
    is_report = (folder / "report.json").exists()
    results = read_report(folder)["results"] if is_report else list(read_results(folder).values())
    if not results:
        raise ValueError(f"`--tradeoff` is {folder}, which has no results.")
    return results


def read_sources(report: dict[str, Any]) -> dict[str, list[list[Result]]]:
    """The results of a report by text and seed."""
    return {
        source["name"]: [[Result.from_dict(r) for r in part] for part in source["results"]]
        for source in report["sources"]
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, help="folder of `evaluation.report`, which has all of it")
    parser.add_argument("--trajectories", type=Path, help="folder of `evaluation.trajectories`")
    parser.add_argument("--geometry", type=Path, help="`geometry.jsonl` of a training run")
    parser.add_argument("--tradeoff", type=Path, help="folder of `evaluation.exit_tradeoff`, or of `evaluation.report`")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    given = {name: path for name, path in vars(options).items() if path is not None and name != "output"}
    if not given:
        raise ValueError("nothing to draw: give `--report`, or `--trajectories`, `--geometry` or `--tradeoff`.")
    for name, path in given.items():
        if not path.exists():
            raise FileNotFoundError(f"`--{name}` is {path}, which does not exist.")
    measured = read_report(options.report) if options.report else {}
    if options.trajectories is not None:
        measured["trajectories"] = options.trajectories
    if options.geometry is not None:
        measured["geometry"] = read_geometry(options.geometry)
    if options.tradeoff is not None:
        measured["results"] = read_tradeoff(options.tradeoff)
    for path in draw_figures(options.output, **measured).values():
        print(path)


if __name__ == "__main__":
    matplotlib.use("Agg")
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
