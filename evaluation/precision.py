"""What less precision costs: `python -m evaluation.precision CHECKPOINT ... --output precision.json`.

A checkpoint as it is and with its matrices in bfloat16 and in int8, as `optimize_for_inference(weights=...)` packs
them (here whatever their size: in a small model it leaves them as they are, since they would not get faster). On
held-out text, where the model knows text, and on its depth tasks:

- loss and right answers at full depth, and under the checkpoint's own exit policy;
- the loops that tokens take under it, and how many tokens take as many as in float32;
- the policy's threshold after calibrating it again: the cheapest on tuning sequences that loses no more than 0.01 nats
  and 0.1 points against full depth in float32, and what it does on others;
- the floor: how large a step still is, relative to the state, at twice the full depth.

int8 is measured twice: with everything in int8, and with the projection at the entry of loops, which no residual path
goes around, in float32.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from recurrent_gpt2 import RecurrentGPT2ForCausalLM
from recurrent_gpt2.exit_policies import ExitPolicy, resolve_exit_policy
from recurrent_gpt2.fast_layers import replace_layers
from training.data import Source
from training.tasks import ids_of_tokens

from .common import Sequences, held_out_documents, load_checkpoint, spread_blocks
from .depth import TEST_SEED, TUNING_SEED, rounded, tasks_of
from .leaderboard import CHECKPOINTS
from .mixture import Scored, score

NATS, POINTS = 0.01, 0.1  # that less precision, and a threshold, may cost
AROUND = 2.0 ** (np.arange(-6, 5) / 2)  # thresholds that are tried, over the checkpoint's own
VARIANTS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "float32": ("float32", lambda name: False),
    "bfloat16": ("bfloat16", lambda name: False),
    "int8": ("int8", lambda name: False),
    "int8, loop entry in float32": ("int8", lambda name: "loop_inputs" in name),
}


@dataclass
class Cost:
    """One kind of sequences in one precision."""

    checkpoint: str
    kind: str  # text, or the name of a task
    precision: str
    loss: float  # at full depth, in nats
    right: float  # at full depth: share of tokens or answers
    policy_loss: float
    policy_right: float
    steps: float  # mean, under the checkpoint's policy
    same_steps: float  # share of tokens that take as many as in float32
    threshold: float
    new_threshold: float | None  # after calibrating again; None: none keeps within the budget
    new_loss: float | None
    new_right: float | None
    new_steps: float | None
    floor: float  # median over tokens of the relative size of a step at twice the full depth


def in_precision(checkpoint: str | Path, variant: str) -> RecurrentGPT2ForCausalLM:
    precision, keep = VARIANTS[variant]
    model, _ = load_checkpoint(checkpoint)
    replace_layers(model, precision, least_size=0, keep=keep)
    return model.requires_grad_(False)


def draw(model, tokenizer, source: str, fraction: float | None, blocks: int, sequences: int):
    """Sequences for tuning and for the numbers, of each kind that the model knows."""
    kinds: dict[str, tuple[Sequences, Sequences]] = {}
    known = 0  # entries of the vocabulary that are for tasks
    for task in tasks_of(model):
        entries = ids_of_tokens(tokenizer, task)
        known += len(entries)
        full = task.full()
        batches = [full.sample(sequences, task.depth, np.random.default_rng([s])) for s in (TUNING_SEED, TEST_SEED)]
        kinds[task.name] = tuple(Sequences.of(batch, entries) for batch in batches)  # type: ignore[assignment]
    if model.config.vocab_size > 2 * known:
        texts = held_out_documents(Source(source), fraction)
        found = spread_blocks(texts, tokenizer, model.config.max_position_embeddings, 2 * blocks)
        kinds["text"] = Sequences.of_text(found[::2]), Sequences.of_text(found[1::2])
    return kinds


@torch.no_grad()
def floor_of(model: RecurrentGPT2ForCausalLM, sequences: Sequences, full: int) -> float:
    """Of the last group, over the first sixteen sequences."""
    states = model(
        sequences.ids[:16], num_loops=2 * full, output_loop_trajectory=True, use_cache=False, logits_to_keep=1
    ).loop_trajectory[-1]
    return float(((states[-1] - states[-2]).norm(dim=-1) / states[-1].norm(dim=-1)).median())


def is_within(found: Scored, reference: Scored) -> bool:
    return found.loss <= reference.loss + NATS and found.accuracy >= reference.accuracy - POINTS / 100


def measure(checkpoint: str | Path, kinds: dict[str, tuple[Sequences, Sequences]], bar: tqdm) -> Iterator[Cost]:
    references: dict[str, tuple[Scored, Scored, Scored]] = {}  # in float32, of each kind
    for variant in VARIANTS:
        model = in_precision(checkpoint, variant)
        policy, cap, full = own_policy(model)
        for kind, (tuning, test) in kinds.items():
            at_full, under = score(model, test, full), score(model, test, cap, policy)
            if variant == "float32":
                references[kind] = score(model, tuning, full), at_full, under
            tuned_reference, _, steps_reference = references[kind]
            new, again = None, None
            for threshold in policy.threshold * AROUND[::-1]:  # from the cheapest
                tried = replace(policy, threshold=float(threshold))
                if is_within(score(model, tuning, cap, tried), tuned_reference):
                    new, again = float(threshold), score(model, test, cap, tried)
                    break
            bar.update()
            yield Cost(
                Path(checkpoint).name, kind, variant, at_full.loss, at_full.accuracy, under.loss, under.accuracy,
                under.mean_steps, float((under.steps == steps_reference.steps).mean()), policy.threshold, new,
                *((again.loss, again.accuracy, again.mean_steps) if again else (None, None, None)),
                floor_of(model, test, full),
            )  # fmt: skip


def own_policy(model: RecurrentGPT2ForCausalLM) -> tuple[ExitPolicy, int, int]:
    """The checkpoint's policy, its cap, and its full depth."""
    own, groups = model.generation_config, len(model.config.loop_groups)
    policy = resolve_exit_policy(getattr(own, "exit_policy", None), groups)[0]
    if not isinstance(policy, ExitPolicy):
        raise ValueError("the checkpoint has no exit policy of its own (`generation_config.json`): calibrate it first.")
    full = max(model.config.loops_per_group())
    return policy, max(model.config.loops_per_group(getattr(own, "num_loops", None))), full


def table_of(costs: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of a table: differences from float32."""
    rows = []
    kinds = list(dict.fromkeys((cost["checkpoint"], cost["kind"]) for cost in costs))
    for cost in sorted(costs, key=lambda cost: kinds.index((cost["checkpoint"], cost["kind"]))):
        base = next(c for c in costs if all(c[k] == cost[k] for k in ("checkpoint", "kind")))
        shown = cost is base
        name = cost["checkpoint"].removeprefix("recurrent-gpt2-")
        recalibrated = cost["new_threshold"]
        rows.append([
            f"{name}, {cost['kind']}" if shown else "",
            cost["precision"],
            f"{cost['loss']:.4f}" if shown else f"{cost['loss'] - base['loss']:+.4f}",
            f"{100 * cost['right']:.2f}" if shown else f"{100 * (cost['right'] - base['right']):+.2f}",
            f"{100 * cost['policy_right']:.2f}" if shown
            else f"{100 * (cost['policy_right'] - base['policy_right']):+.2f}",
            f"{cost['steps']:.2f}",
            "" if shown else f"{cost['same_steps']:.1%}",
            "none" if recalibrated is None else f"{recalibrated:.2g} (own {cost['threshold']:.2g})",
            "" if recalibrated is None else f"{cost['new_steps']:.2f}",
            f"{cost['floor']:.1e}",
        ])  # fmt: skip
    return rows


HEADER = ["model, sequences", "matrices in", "loss (nats)", "right (%)", "right under the policy (%)", "mean loops",
          "as many as in float32", "threshold calibrated again", "mean loops then", "floor of steps"]  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shipped = [CHECKPOINTS / f"recurrent-gpt2-{name}" for name in ("mini", "programs", "chains")]
    parser.add_argument("checkpoints", nargs="*", default=shipped, help="folders; those of the project when left out")
    parser.add_argument("--source", default="python-docs", help="text that was held out: a file, or python-docs")
    parser.add_argument("--validation_fraction", type=float, default=0.01, help="of python-docs, as in training")
    parser.add_argument("--blocks", type=int, default=24, help="of text for tuning, and as many for the numbers")
    parser.add_argument("--sequences", type=int, default=256, help="of a task for tuning, and as many for the numbers")
    parser.add_argument("--output", type=Path, help="write the numbers to this JSON file too")
    options = parser.parse_args(arguments)
    if options.blocks < 1 or options.sequences < 1:
        raise ValueError(f"`--blocks` is {options.blocks}, `--sequences` {options.sequences}: both must be positive.")
    fraction = options.validation_fraction if options.source == "python-docs" else None
    found: list[dict[str, Any]] = []
    with tqdm(desc="precision", unit=" measurements") as bar:
        for checkpoint in options.checkpoints:
            model, tokenizer = load_checkpoint(checkpoint)
            kinds = draw(model, tokenizer, options.source, fraction, options.blocks, options.sequences)
            for cost in measure(checkpoint, kinds, bar):
                found.append(rounded(asdict(cost), 6))
                if options.output is not None:  # nothing is lost if it is stopped
                    options.output.parent.mkdir(parents=True, exist_ok=True)
                    options.output.write_text(json.dumps(found, indent=1) + "\n")
    for row in [HEADER, ["---"] * len(HEADER), *table_of(found)]:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
