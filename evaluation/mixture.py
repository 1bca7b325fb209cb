"""Exits on text and a task side by side: `python -m evaluation.mixture CHECKPOINT --source FILE --output DIR`.

For a language model trained on text and on a depth task (`training/recipes/mini.yaml`): its loss over all text tokens
and all answers, five to one, against mean steps over all tokens, for fixed depths and for every exit rule. Thresholds
are chosen on one set of blocks and sequences, and all numbers are of another. What a rule must be ahead of:

- the lower convex hull of fixed depths, one count per group;
- its own steps, shuffled over all tokens, and over the tokens of each kind;
- a rule that only knows whether a token is of text or of the task: one fixed depth for each, the best pair.

Writes `mixture.json`, `mixture.png`, and `loops.png`, a program and a paragraph with the loops of every token.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from recurrent_gpt2 import RecurrentGPT2ForCausalLM
from training.data import Source
from training.tasks import ids_of_tokens

from .baselines import hull_loss, loop_counts, shuffled, take_steps
from .common import Sequences, held_out_documents, load_checkpoint, mean_depth, spread_blocks
from .depth import RULES, TEST_SEED, TUNING_SEED, rounded, task_of

TEXT_PER_ANSWER = 5
MOST_POINTS_LOST, MOST_NATS_LOST = 0.001, 0.01  # of a rule that is chosen: task against full depth, text against fixed
ROUNDS = 1000  # of the bootstrap
FREQUENT, LISTED = 10, 8  # occurrences of an entry that is listed, and how many are


@dataclass
class Scored:
    """Sequences of one kind under one setting, summed up per sequence."""

    losses: np.ndarray  # [n]: sums of cross-entropy where something is predicted
    right: np.ndarray  # [n]: how often the likeliest token was the right one
    asked: np.ndarray  # [n]: how many there were
    depth: np.ndarray  # [n, length]: mean steps of a looped layer
    steps: np.ndarray  # [n, length, groups]

    @property
    def loss(self) -> float:
        return float(self.losses.sum() / self.asked.sum())

    @property
    def accuracy(self) -> float:
        return float(self.right.sum() / self.asked.sum())

    @property
    def mean_steps(self) -> float:
        return float(self.depth.mean())


@torch.no_grad()
def score(
    model: RecurrentGPT2ForCausalLM,
    sequences: Sequences,
    num_loops: int | list[int],
    policy: Any = None,
    steps: np.ndarray | None = None,
    batch_size: int = 16,
) -> Scored:
    """One pass under a policy, with fixed loops, or with `steps` [n, length, groups] that are given."""
    losses, right, taken = [], [], []
    for start in range(0, len(sequences), batch_size):
        rows = slice(start, start + batch_size)
        exit_policy = policy if steps is None else take_steps(steps[rows])
        output = model(sequences.ids[rows], num_loops=num_loops, exit_policy=exit_policy, use_cache=False)
        asked, answers = torch.from_numpy(sequences.asked[rows]), sequences.answers[rows]
        nats = torch.nn.functional.cross_entropy(output.logits.transpose(1, 2), answers, reduction="none")
        losses.append((nats.double() * asked).sum(1))
        right.append(((output.logits.argmax(-1) == answers) & asked).sum(1))
        taken.append(output.loop_steps)
    taken = torch.cat(taken)
    depth = mean_depth(taken, model.config).numpy()
    return Scored(torch.cat(losses).numpy(), torch.cat(right).numpy(), sequences.asked.sum(1), depth, taken.numpy())


@dataclass
class Mixture:
    """One setting on both kinds."""

    text: Scored
    task: Scored

    @property
    def kinds(self) -> tuple[Scored, Scored]:
        return self.text, self.task

    def loss(self, places: tuple[Any, Any] = (slice(None), slice(None))) -> float:
        """Over all text tokens and answers of these sequences, given per kind."""
        sums = [(k.losses[p].sum(), k.asked[p].sum()) for k, p in zip(self.kinds, places, strict=True)]
        return float(sum(nats for nats, _ in sums) / sum(asked for _, asked in sums))

    def mean_steps(self, places: tuple[Any, Any] = (slice(None), slice(None))) -> float:
        """Over all tokens, those at which nothing is asked included."""
        sums = [(k.depth[p].sum(), k.depth[p].size) for k, p in zip(self.kinds, places, strict=True)]
        return float(sum(steps for steps, _ in sums) / sum(tokens for _, tokens in sums))


@dataclass
class Samples:
    """Text and task sequences of which one set of numbers is made."""

    text: Sequences
    task: Sequences

    def score(self, model: RecurrentGPT2ForCausalLM, *args, steps: list[np.ndarray] | None = None) -> Mixture:
        given = steps or [None, None]
        return Mixture(*(score(model, k, *args, steps=s) for k, s in zip((self.text, self.task), given, strict=True)))


@dataclass
class MixtureStudy:
    """All measurements of one checkpoint. `cap` is the most loops of a rule; `full` what counts as full depth."""

    model: RecurrentGPT2ForCausalLM
    tokenizer: PreTrainedTokenizerBase
    tuning: Samples
    test: Samples
    cap: int
    full: int
    rules: list[str]

    def study(self) -> dict[str, Any]:
        counts = loop_counts(len(self.model.config.loop_groups), self.cap)
        points = [(rule, threshold) for rule in self.rules for threshold in RULES[rule][1]]
        with tqdm(total=2 * (len(counts) + len(points)), desc="mixture", unit=" settings") as bar:
            found = []
            for samples in (self.tuning, self.test):
                fixed = [self._run(samples, bar, count) for count in counts]
                swept = {point: self._run(samples, bar, self.cap, self.policy(*point)) for point in points}
                found.append((fixed, swept))
        (tuned_fixed, tuned), (fixed, measured) = found
        chosen = {rule: self.chosen(rule, tuned, counts, tuned_fixed) for rule in self.rules}
        return {
            "cap": self.cap,
            "full": self.full,
            "text_blocks": len(self.test.text),
            "task_sequences": len(self.test.task),
            "text_tokens": int(self.test.text.asked.sum()),
            "answers": int(self.test.task.asked.sum()),
            "fixed": [{"num_loops": count, **self.row(run)} for count, run in zip(counts, fixed, strict=True)],
            "rules": [{"rule": rule, "threshold": threshold, **self.row(run), **against(run, fixed)}
                      for (rule, threshold), run in measured.items()],
            "chosen": {rule: None if threshold is None else self.in_detail(rule, threshold, measured, fixed)
                       for rule, threshold in chosen.items()},
        }  # fmt: skip

    def _run(self, samples: Samples, bar: tqdm, *setting) -> Mixture:
        measured = samples.score(self.model, *setting)
        bar.update()
        return measured

    def policy(self, rule: str, threshold: float) -> Any:
        return RULES[rule][0](threshold)

    def row(self, run: Mixture) -> dict[str, Any]:
        return {
            "mean_steps": run.mean_steps(),
            "loss": run.loss(),
            "text_steps": run.text.mean_steps,
            "text_loss": run.text.loss,
            "task_steps": run.task.mean_steps,
            "task_loss": run.task.loss,
            "task_accuracy": run.task.accuracy,
        }

    def chosen(
        self, rule: str, tuned: dict[tuple[str, float], Mixture], counts: list[list[int]], fixed: list[Mixture]
    ) -> float | None:
        """The threshold furthest ahead of fixed depth on the tuning set that loses nothing on either kind."""
        full = fixed[counts.index([self.full] * len(counts[0]))].task.accuracy
        costs, text = np.array([run.text.mean_steps for run in fixed]), np.array([run.text.loss for run in fixed])
        good = {}
        for threshold in RULES[rule][1]:
            run = tuned[rule, threshold]
            text_lost = run.text.loss - hull_loss(costs, text, run.text.mean_steps)
            if run.task.accuracy >= full - MOST_POINTS_LOST / 2 and text_lost <= MOST_NATS_LOST:
                good[threshold] = ahead_of_hull(run, fixed)
        return min(good, key=good.__getitem__) if good else None

    def in_detail(
        self, rule: str, threshold: float, measured: dict[tuple[str, float], Mixture], fixed: list[Mixture]
    ) -> dict[str, Any]:
        """A chosen rule beside all that it must be ahead of, and what its steps follow."""
        run = measured[rule, threshold]
        required, asked = self.test.task.depths, self.test.task.asked
        of_depth = [run.task.depth[asked & (required == depth)] for depth in range(int(required.max()) + 1)]
        costs, text = np.array([f.text.mean_steps for f in fixed]), np.array([f.text.loss for f in fixed])
        places = np.tile(np.arange(run.text.depth.shape[1]), len(run.text.depth))
        return {
            "threshold": threshold,
            **self.row(run),
            **against(run, fixed),
            "text_against_fixed": run.text.loss - hull_loss(costs, text, run.text.mean_steps),
            "by_kind_loss": by_kind(fixed, run.mean_steps()),
            "shuffled_loss": self.null(run, within_kinds=False).loss(),
            "shuffled_within_kinds_loss": self.null(run, within_kinds=True).loss(),
            "steps_by_required": [float(steps.mean()) if len(steps) else None for steps in of_depth],
            "correlation_with_required": rank_correlation(run.task.depth[asked], required[asked]),
            "correlation_with_position": rank_correlation(run.text.depth.ravel(), places),
            **self.slow_and_fast(run.text),
            "text_steps_histogram": np.bincount(run.text.steps.ravel(), minlength=self.cap + 1).tolist(),
            "task_steps_histogram": np.bincount(run.task.steps.ravel(), minlength=self.cap + 1).tolist(),
        }  # fmt: skip

    def slow_and_fast(self, run: Scored) -> dict[str, list[dict[str, Any]]]:
        """Entries of the vocabulary that are frequent in the text, by the mean steps of their tokens."""
        entries, places, counts = np.unique(self.test.text.ids, return_inverse=True, return_counts=True)
        means = np.bincount(places.ravel(), weights=run.depth.ravel()) / counts
        order = [place for place in np.argsort(-means, kind="stable") if counts[place] >= FREQUENT]
        said = [{"token": self.tokenizer.decode(int(entries[place])), "count": int(counts[place]),
                 "mean_steps": float(means[place])} for place in order]  # fmt: skip
        return {"slowest_text": said[:LISTED], "fastest_text": said[::-1][:LISTED]}

    def null(self, run: Mixture, within_kinds: bool) -> Mixture:
        """The rule's own steps, dealt out anew."""
        rng, kinds = np.random.default_rng(0), [kind.steps for kind in run.kinds]
        if within_kinds:
            dealt = [shuffled(steps, rng) for steps in kinds]
        else:
            flat = [steps.reshape(-1, steps.shape[-1]) for steps in kinds]
            everything = rng.permutation(np.concatenate(flat))
            parts = np.split(everything, [len(flat[0])])
            dealt = [part.reshape(steps.shape) for part, steps in zip(parts, kinds, strict=True)]
        return self.test.score(self.model, self.cap, None, steps=dealt)


def ahead_of_hull(run: Mixture, fixed: list[Mixture], places: tuple[Any, Any] = (slice(None), slice(None))) -> float:
    """The rule's loss minus that of fixed depth at its mean steps: negative where it is better."""
    costs, losses = [f.mean_steps(places) for f in fixed], [f.loss(places) for f in fixed]
    return run.loss(places) - hull_loss(np.array(costs), np.array(losses), run.mean_steps(places))


def against(run: Mixture, fixed: list[Mixture]) -> dict[str, float]:
    """`difference` from the hull of fixed depths, with a 95 % interval over blocks and sequences."""
    rng, counts = np.random.default_rng(0), [len(kind.losses) for kind in run.kinds]
    drawn = [tuple(rng.integers(count, size=count) for count in counts) for _ in range(ROUNDS)]
    low, high = np.nanpercentile([ahead_of_hull(run, fixed, places) for places in drawn], [2.5, 97.5])
    costs, losses = [f.mean_steps() for f in fixed], [f.loss() for f in fixed]
    return {"fixed_loss": hull_loss(np.array(costs), np.array(losses), run.mean_steps()),
            "difference": ahead_of_hull(run, fixed), "low": float(low), "high": float(high)}  # fmt: skip


def rank_correlation(values: np.ndarray, others: np.ndarray) -> float | None:
    constant = len(set(values.tolist())) < 2 or len(set(others.tolist())) < 2
    return None if constant else float(spearmanr(values, others).statistic)


def by_kind(fixed: list[Mixture], cost: float) -> float:
    """The least loss at a mean cost of fixed depths that may differ between text and task."""
    points = [Mixture(a.text, b.task) for a in fixed for b in fixed]
    return hull_loss(np.array([p.mean_steps() for p in points]), np.array([p.loss() for p in points]), cost)


def draw_samples(model, tokenizer, source: str, fraction: float | None, blocks: int, task_name: str | None):
    """Blocks of held-out text, and a fifth as many answers as there are text tokens, for tuning and for the numbers."""
    task = task_of(model, task_name).full()
    entries = ids_of_tokens(tokenizer, task)
    documents = held_out_documents(Source(source), fraction)
    found = spread_blocks(documents, tokenizer, model.config.max_position_embeddings, 2 * blocks)
    if len(found) < 4:
        raise ValueError(f"`--source` {source} has {len(found)} blocks, but it takes at least 4.")
    samples = []
    for seed, part in ((TUNING_SEED, found[::2]), (TEST_SEED, found[1::2])):
        probe = task.sample(64, task.depth, np.random.default_rng([seed, 0]))
        tokens = part.shape[0] * (part.shape[1] - 1)
        count = max(2, round(tokens / TEXT_PER_ANSWER / probe.asked.sum(1).mean()))
        sequences = Sequences.of(task.sample(count, task.depth, np.random.default_rng([seed])), entries)
        samples.append(Samples(Sequences.of_text(part), sequences))
    return samples


def check(rules: list[str] | None, blocks: int, cap: int, full: int) -> None:
    for rule in rules or []:
        if rule not in RULES:
            raise ValueError(f"`--rules` has {rule!r}, but must be among {', '.join(RULES)}.")
    if blocks < 2 or not 1 <= full <= cap:
        raise ValueError(
            f"`--blocks` is {blocks}, `--full` {full} and `--num_loops` {cap}: it takes at least 2 blocks, and a full "
            "depth from 1 to the cap."
        )


def best_of(result: dict[str, Any]) -> tuple[str, float] | None:
    """The chosen rule that is furthest ahead of fixed depth, and its threshold."""
    rows = {rule: row for rule, row in result["chosen"].items() if row is not None}
    if not rows:
        return None
    best = min(rows, key=lambda rule: rows[rule]["difference"])
    return best, rows[best]["threshold"]


def print_tables(result: dict[str, Any]) -> None:
    print("| fixed loops | mean steps | mixture | text | answers right |\n|---|---|---|---|---|")
    for row in result["fixed"]:
        cells = [f"{row['mean_steps']:.2f}", f"{row['loss']:.4f}", f"{row['text_loss']:.4f}",
                 f"{row['task_accuracy']:.4f}"]  # fmt: skip
        print(f"| {' | '.join([str(row['num_loops']), *cells])} |")
    print("\n| rule | mean steps (text, task) | mixture | text | answers right | against fixed depth [95 %] |")
    print("|---|---|---|---|---|---|")
    for row in result["rules"]:
        print(f"| {row['rule']} {row['threshold']:g} | {rule_cells(row)} |")
    print("\nchosen on other sequences:")
    for rule, row in result["chosen"].items():
        if row is None:
            print(f"- {rule}: no threshold loses nothing")
            continue
        print(
            f"- {rule} {row['threshold']:g}: {row['difference']:+.4f} nats [{row['low']:+.4f}, {row['high']:+.4f}] "
            f"from fixed depth at {row['mean_steps']:.2f} mean steps (loss {row['loss']:.4f}; depth by kind "
            f"{row['by_kind_loss']:.4f}, steps shuffled {row['shuffled_loss']:.4f}, within kinds "
            f"{row['shuffled_within_kinds_loss']:.4f}); answers right {row['task_accuracy']:.4f}; text "
            f"{row['text_against_fixed']:+.4f} from fixed depth at as many steps"
        )


def rule_cells(row: dict[str, Any]) -> str:
    return " | ".join([
        f"{row['mean_steps']:.2f} ({row['text_steps']:.2f}, {row['task_steps']:.2f})",
        f"{row['loss']:.4f}", f"{row['text_loss']:.4f}", f"{row['task_accuracy']:.4f}",
        f"{row['difference']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]",
    ])  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder or name on the Hub")
    parser.add_argument("--source", required=True, help="text that was held out: a file, or python-docs")
    parser.add_argument("--validation_fraction", type=float, default=0.01, help="of python-docs, as in training")
    parser.add_argument("--output", type=Path, help="folder for mixture.json and the figures; left out: tables only")
    parser.add_argument("--task", help="which of the checkpoint's tasks, where it has several")
    parser.add_argument("--rules", nargs="+", help=f"among {', '.join(RULES)}; all when left out")
    parser.add_argument("--num_loops", type=int, default=16, help="the cap")
    parser.add_argument("--full", type=int, help="loops that count as full depth; the checkpoint's when left out")
    parser.add_argument("--blocks", type=int, default=96, help="of text for tuning, and as many for the numbers")
    options = parser.parse_args(arguments)
    model, tokenizer = load_checkpoint(options.checkpoint)
    full = options.full or max(model.config.loops_per_group())
    check(options.rules, options.blocks, options.num_loops, full)
    fraction = options.validation_fraction if options.source == "python-docs" else None  # a file is held out as it is
    tuning, test = draw_samples(model, tokenizer, options.source, fraction, options.blocks, options.task)
    study = MixtureStudy(model, tokenizer, tuning, test, options.num_loops, full, options.rules or list(RULES))
    result = {"checkpoint": Path(options.checkpoint).name, "source": Path(options.source).name,
              "task": task_of(model, options.task).to_dict(), **study.study()}  # fmt: skip
    print_tables(result)
    if options.output is None:
        return
    from .mixture_figures import draw_loops, draw_mixture  # matplotlib is needed for these alone

    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "mixture.json").write_text(json.dumps(rounded(result)) + "\n")
    print(draw_mixture(result, options.output))
    if best := best_of(result):
        texts = [tokenizer.decode(test.task.ids[0]), tokenizer.decode(test.text.ids[0, :96])]
        policy = study.policy(*best)
        print(draw_loops(model, tokenizer, texts, policy, options.num_loops, options.output))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
