"""The figures of `evaluation.mixture`: loss against mean steps, and texts in the colours of their loops."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from transformers import PreTrainedTokenizerBase

from recurrent_gpt2 import RecurrentGPT2ForCausalLM

from .baselines import lower_hull
from .common import mean_depth
from .depth_figures import STYLES
from .figures import STYLE

WIDTH = 46  # characters of a line of text


def plot_mixture(result: dict[str, Any]) -> Figure:
    """Left, loss of the mixture against mean steps; right, steps against what an answer needs, and those of text."""
    panels = 2 if any(result["chosen"].values()) else 1  # none without data
    figure, axes = plt.subplots(1, panels, figsize=(4.5 * panels, 3.6), layout="constrained", squeeze=False)
    quality = axes[0, 0]
    fixed = [(row["mean_steps"], row["loss"]) for row in result["fixed"]]
    quality.plot(*lower_hull(*np.array(fixed).T), label="fixed loops", markersize=4, linewidth=1, **STYLES["fixed"])
    shown = [rule for rule in STYLES if any(row["rule"] == rule for row in result["rules"])]
    for rule in shown:
        points = sorted((row["mean_steps"], row["loss"]) for row in result["rules"] if row["rule"] == rule)
        quality.plot(*zip(*points, strict=True), label=rule, markersize=4, linewidth=1, **STYLES[rule])
    best = min(loss for _, loss in fixed)
    second = sorted(fixed)[1][1]  # the one-loop point would squeeze the rest
    quality.set(xlabel="mean loops of a token", ylabel="nats, text and answers", xlim=(1.8, 12))
    quality.set_ylim(best - 0.01, second + 0.02)
    first = min(fixed)
    quality.set_title(f"not shown: {first[0]:g} fixed loop, {first[1]:.3f} nats", fontsize=7, loc="left")
    quality.legend(fontsize=7)
    if panels == 1:
        return figure
    steps = axes[0, 1]
    for rule, row in result["chosen"].items():
        if row is None:
            continue
        taken = np.array(row["steps_by_required"], dtype=float)
        label = f"{rule} {row['threshold']:g} (text {row['text_steps']:.1f})"
        steps.plot(range(len(taken)), taken, label=label, markersize=4, linewidth=1, **STYLES[rule])
    steps.set(xlabel="loops that an answer needs", ylabel="loops that it took")
    steps.legend(fontsize=7)
    return figure


@torch.no_grad()
def plot_loops(
    model: RecurrentGPT2ForCausalLM, tokenizer: PreTrainedTokenizerBase, texts: list[str], policy: Any, cap: int
) -> Figure:
    """Texts side by side, every token on a ground whose colour is its loops."""
    figure, axes = plt.subplots(1, len(texts), figsize=(4.6 * len(texts), 3.8), layout="constrained")
    colours, norm = matplotlib.colormaps["viridis"], plt.Normalize(1, min(cap, 12))
    for ax, text in zip(np.atleast_1d(axes), texts, strict=True):
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        output = model(ids, exit_policy=policy, num_loops=cap, use_cache=False)
        depths = mean_depth(output.loop_steps, model.config)[0].tolist()
        line, column = 0, 0
        for token, depth in zip(ids[0].tolist(), depths, strict=True):
            word = tokenizer.decode([token])
            shown = word.replace("\n", "")
            if column + len(shown) > WIDTH:
                line, column = line + 1, 0
            dark = norm(depth) < 0.6
            ax.text(column, -line, shown or "\u21b5", fontsize=7, family="monospace", va="center",
                    color="white" if dark else "black",
                    bbox={"facecolor": colours(norm(depth)), "edgecolor": "none", "pad": 1.2})  # fmt: skip
            column += max(len(shown), 1)
            if "\n" in word:
                line, column = line + 1, 0
        ax.set(xlim=(0, WIDTH), ylim=(-max(line, 17) - 1, 1))
        ax.axis("off")
    mappable = matplotlib.cm.ScalarMappable(norm, colours)
    figure.colorbar(mappable, ax=axes, label="loops", shrink=0.7)
    return figure


def draw_mixture(result: dict[str, Any], output: Path) -> Path:
    return _saved(lambda: plot_mixture(result), output / "mixture.png")


def draw_loops(model, tokenizer, texts: list[str], policy: Any, cap: int, output: Path) -> Path:
    return _saved(lambda: plot_loops(model, tokenizer, texts, policy, cap), output / "loops.png")


def _saved(draw, path: Path) -> Path:
    with matplotlib.rc_context(STYLE):
        figure = draw()
        figure.savefig(path, dpi=110)
        plt.close(figure)
    return path
