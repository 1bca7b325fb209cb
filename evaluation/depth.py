"""What exits are worth where the needed loops are known: `python -m evaluation.depth CHECKPOINT --output DIR`.

For a checkpoint trained on a depth task (`training/tasks`): accuracy by required depth and loops, steps by required
depth under every rule, accuracy against mean steps beside fixed depth, the mean loops it takes to reach a given
accuracy, and sequences deeper than any of training. Thresholds are chosen on one set of new sequences, and all numbers
are of another. Beside every rule stand fixed depths (their lower convex hull), a shuffle of the rule's own steps, a
rule that only knows the position, the ideal (as many steps as a token needs), and what the rule's exits would give if
tokens that have left were computed on for the others to read. See `evaluation/baselines.py`.

Writes `depth.json`, `depth.png` and `heat_map.png`. Mean steps are over all tokens, those with no answer included.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from recurrent_gpt2 import (
    AccelerationExit,
    ConfidenceExit,
    EntropyExit,
    ExitPolicy,
    KLExit,
    LoopView,
    RecurrentGPT2ForCausalLM,
    StepNormExit,
)
from recurrent_gpt2.geometry import above_floor, contraction_ratios
from training.tasks import Task, TaskSource, ids_of_tokens

from .baselines import (
    bootstrap_interval,
    by_position,
    cheapest,
    hull_cost,
    hull_loss,
    loop_counts,
    shuffled,
    take_steps,
)
from .common import Sequences, load_checkpoint, mean_depth

TUNING_SEED, TEST_SEED, DEEPER_SEED = 71, 72, 73  # training draws from seeds of four or more numbers
TARGETS = (0.95, 0.98, 0.99, 0.999)
QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.97, 1.0)
MARGINS = (0, 1, 2)


def _rule(make: type[ExitPolicy], thresholds: tuple[float, ...], **settings):
    return (lambda threshold: make(threshold, **settings)), thresholds


# Each from where it fires at once to where it hardly ever does. A rule with patience 3 can first fire at the third step
# (the fourth, for `kl`), as acceleration can with its patience of 2. A rule of confidence with patience 2 fires where a
# token has known its answer for a step: the keys and values of a step come from the state before it.
OF_NORMS = (1.0, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02)
OF_DOUBTS = (0.5, 0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3)
RULES: dict[str, tuple[Callable[[float], ExitPolicy], tuple[float, ...]]] = {
    "acceleration/state": _rule(AccelerationExit, (1.6, 1.3, *OF_NORMS), normalize="state"),
    "step_norm/state": _rule(StepNormExit, OF_NORMS, normalize="state"),
    "step_norm/state x3": _rule(StepNormExit, OF_NORMS, normalize="state", patience=3),
    "kl": _rule(KLExit, (1.0, 0.1, 1e-2, 1e-3, 1e-4, 1e-5)),
    "kl x3": _rule(KLExit, (1.0, 0.1, 1e-2, 1e-3, 1e-4, 1e-5), patience=3),
    "confidence": _rule(ConfidenceExit, OF_DOUBTS),
    "confidence x2": _rule(ConfidenceExit, OF_DOUBTS, patience=2),
    "confidence x3": _rule(ConfidenceExit, OF_DOUBTS, patience=3),
    "entropy": _rule(EntropyExit, (1.0, 0.3, 0.1, 0.03, 0.01)),
    "entropy x2": _rule(EntropyExit, (1.0, 0.3, 0.1, 0.03, 0.01), patience=2),
}


@dataclass
class Run:
    """What a model said of sequences, and the steps that it took."""

    right: np.ndarray  # [n, length], False where nothing is asked
    asked: np.ndarray  # [n, length]
    steps: np.ndarray  # [n, length, groups]
    depth: np.ndarray  # [n, length]: mean steps of a looped layer
    state_error: float | None = None  # mean of |state at exit - state at the cap| / |state at the cap|, if known

    def __post_init__(self):
        self.of_sequence = np.stack([self.right.sum(1), self.asked.sum(1), self.depth.mean(1)])  # [3, n]

    @property
    def accuracy(self) -> float:
        return self.accuracy_of(slice(None))

    @property
    def mean_steps(self) -> float:
        return float(self.depth.mean())

    def accuracy_of(self, places: np.ndarray | slice) -> float:
        """On these sequences."""
        right, asked, _ = self.of_sequence[:, places].sum(1)
        return float(right / asked)

    def by_required(self, values: np.ndarray, required: np.ndarray) -> list[float | None]:
        """Means of `values` [n, length] over asked tokens, for each required depth from 0 on."""
        places = [self.asked & (required == depth) for depth in range(int(required.max()) + 1)]
        return [float(values[place].mean()) if place.any() else None for place in places]


@torch.no_grad()
def run(
    model: RecurrentGPT2ForCausalLM,
    sequences: Sequences,
    num_loops: int | list[int],
    policy: Any = None,
    steps: np.ndarray | None = None,
    batch_size: int = 64,
) -> Run:
    """One pass under a policy, with fixed loops, or with `steps` [n, length, groups] that are given."""
    right, taken = [], []
    for start in range(0, len(sequences), batch_size):
        rows = slice(start, start + batch_size)
        exit_policy = policy if steps is None else take_steps(steps[rows])
        output = model(sequences.ids[rows], num_loops=num_loops, exit_policy=exit_policy, use_cache=False)
        right.append((output.logits.argmax(-1) == sequences.answers[rows]).numpy() & sequences.asked[rows])
        taken.append(output.loop_steps)
    taken = torch.cat(taken)
    depth = mean_depth(taken, model.config).numpy()
    return Run(np.concatenate(right), sequences.asked, taken.numpy(), depth)


@torch.no_grad()
def run_all_depths(model: RecurrentGPT2ForCausalLM, sequences: Sequences, most: int, batch_size: int = 64) -> list[Run]:
    """Runs with 1 to `most` fixed loops. Where the only group stands at the end, one pass has all of them."""
    groups, last = model.config.loop_groups, model.config.num_hidden_layers - 1
    if len(groups) > 1 or groups[0][-1] != last:
        return [run(model, sequences, count) for count in range(1, most + 1)]
    right = [[] for _ in range(most)]
    for start in range(0, len(sequences), batch_size):
        rows = slice(start, start + batch_size)
        output = model(sequences.ids[rows], num_loops=most, output_loop_trajectory=True, use_cache=False)
        for count, state in enumerate(output.loop_trajectory[0][1:]):
            said = model.decode_states(state).argmax(-1)
            right[count].append((said == sequences.answers[rows]).numpy() & sequences.asked[rows])
    shape = sequences.asked.shape
    return [
        Run(
            np.concatenate(right[count - 1]), sequences.asked, np.full((*shape, 1), count), np.full(shape, float(count))
        )
        for count in range(1, most + 1)
    ]


@torch.no_grad()
def run_unfrozen(
    model: RecurrentGPT2ForCausalLM, sequences: Sequences, cap: int, policies: list[ExitPolicy], batch_size: int = 64
) -> list[Run | None]:
    """What is said at each token's exit if tokens that have left go on being computed for the others to read.

    Nothing is saved by that. It tells what a rule loses by its choice from what it loses by freezing states. None where
    the model does more than one loop at its end.
    """
    groups, last = model.config.loop_groups, model.config.num_hidden_layers - 1
    if len(groups) > 1 or groups[0][-1] != last:
        return [None] * len(policies)
    found: list[list[tuple]] = [[] for _ in policies]
    for start in range(0, len(sequences), batch_size):
        rows = slice(start, start + batch_size)
        output = model(sequences.ids[rows], num_loops=cap, output_loop_trajectory=True, use_cache=False)
        states = output.loop_trajectory[0].flatten(1, 2)  # [cap + 1, tokens, hidden]
        for policy, of_policy in zip(policies, found, strict=True):
            steps = first_exits(policy, states, model.decode_states)
            at_exit = states[steps, torch.arange(len(steps))]
            said = model.decode_states(at_exit).argmax(-1).view_as(sequences.answers[rows])
            right = (said == sequences.answers[rows]).numpy() & sequences.asked[rows]
            error = (at_exit - states[-1]).norm(dim=-1) / states[-1].norm(dim=-1)
            of_policy.append((right, steps.view_as(said).numpy(), error.numpy()))
    runs = []
    for of_policy in found:
        right, steps, error = (np.concatenate(parts) for parts in zip(*of_policy, strict=True))
        runs.append(Run(right, sequences.asked, steps[..., None], steps.astype(float), float(error.mean())))
    return runs


def first_exits(policy: ExitPolicy, states: torch.Tensor, decode: Callable) -> torch.Tensor:
    """The steps [tokens] after which a policy would first let go of trajectories [steps + 1, tokens, hidden]."""
    most = len(states) - 1
    steps, memory, previous = torch.full((states.shape[1],), most), {}, None
    for step in range(most):
        update = states[step + 1] - states[step]
        exits = policy(LoopView(0, step, states[step + 1], update, previous, memory, decode))
        steps = torch.where(exits & (steps == most), step + 1, steps)
        previous = update
    return steps


@dataclass
class FixedDepths:
    """Runs with fixed loop counts: what everything else is compared with."""

    counts: list[list[int]]
    runs: list[Run]

    @property
    def costs(self) -> np.ndarray:
        return np.array([run.mean_steps for run in self.runs])

    def errors(self, places: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Error rates on these sequences."""
        return np.array([1 - run.accuracy_of(places) for run in self.runs])

    def accuracy_at(self, cost: float, places: np.ndarray | slice = slice(None)) -> float:
        return 1 - hull_loss(self.costs, self.errors(places), cost)


def against_fixed(adaptive: Run, fixed: FixedDepths) -> dict[str, Any]:
    """The rule's accuracy minus that of fixed depth at its mean steps, with an interval over sequences."""

    def difference(places: np.ndarray | slice) -> float:
        return adaptive.accuracy_of(places) - fixed.accuracy_at(adaptive.of_sequence[2, places].mean(), places)

    low, high = bootstrap_interval(difference, len(adaptive.right), rounds=400)
    return {"fixed_accuracy": fixed.accuracy_at(adaptive.mean_steps), "ahead": difference(slice(None)),
            "low": low, "high": high}  # fmt: skip


def describe(measured: Run, required: np.ndarray) -> dict[str, Any]:
    return {"mean_steps": measured.mean_steps, "accuracy": measured.accuracy,
            "steps_by_depth": measured.by_required(measured.depth, required),
            "accuracy_by_depth": measured.by_required(measured.right, required)}  # fmt: skip


@dataclass
class DepthStudy:
    """All measurements of one checkpoint. `cap` is the most loops of a rule, and of fixed depth."""

    model: RecurrentGPT2ForCausalLM
    task: Task
    entries: np.ndarray
    cap: int
    sequences: int

    def __post_init__(self):
        self.tuning, self.test = (self.draw(self.task.full(), seed) for seed in (TUNING_SEED, TEST_SEED))

    def draw(self, task: Task, seed: int) -> Sequences:
        batch = task.sample(self.sequences, task.depth, np.random.default_rng([seed]))
        return Sequences.of(batch, self.entries)

    def fixed(self, sequences: Sequences) -> FixedDepths:
        counts = loop_counts(len(self.model.config.loop_groups), self.cap)
        others = [run(self.model, sequences, count) for count in counts[self.cap :]]
        return FixedDepths(counts, run_all_depths(self.model, sequences, self.cap) + others)

    def study(self, rules: list[str]) -> dict[str, Any]:
        fixed_tuning, fixed_test = self.fixed(self.tuning), self.fixed(self.test)
        tuned = {rule: self.sweep(rule, self.tuning) for rule in rules}
        measured = {rule: self.sweep(rule, self.test) for rule in rules}
        required = self.test.depths
        return {
            "task": self.task.to_dict(),
            "sequences": self.sequences,
            "cap": self.cap,
            "mean_required": float(required[self.test.asked].mean()),
            "fixed": [{"num_loops": count, **describe(of_count, required)}
                      for count, of_count in zip(fixed_test.counts, fixed_test.runs, strict=True)],
            "rules": {rule: self.describe_rule(rule, measured[rule], fixed_test) for rule in rules},
            "position_only": self.position_only(tuned, fixed_test),
            "ideal": self.ideal(fixed_test),
            "reach": {str(target): self.reach(target, tuned, measured, fixed_tuning, fixed_test)
                      for target in TARGETS},
            "no_loss": (no_loss := self.no_loss(tuned, measured, fixed_tuning, fixed_test)),
            "policy": self.recommended(no_loss, tuned),
            "deeper": self.deeper(tuned, fixed_tuning),
            "contraction": self.contraction(),
            "signals": self.signals(),
        }  # fmt: skip

    def sweep(self, rule: str, sequences: Sequences) -> list[Run]:
        make, thresholds = RULES[rule]
        return [run(self.model, sequences, self.cap, make(threshold)) for threshold in thresholds]

    def describe_rule(self, rule: str, runs: list[Run], fixed: FixedDepths) -> list[dict[str, Any]]:
        rows, rng = [], np.random.default_rng(0)
        make, thresholds = RULES[rule]
        all_unfrozen = run_unfrozen(self.model, self.test, self.cap, [make(threshold) for threshold in thresholds])
        for threshold, adaptive, unfrozen in zip(thresholds, runs, all_unfrozen, strict=True):
            null = run(self.model, self.test, self.cap, steps=shuffled(adaptive.steps, rng))
            asked = self.test.asked
            taken, needed = adaptive.depth[asked], self.test.depths[asked]
            correlation = spearmanr(taken, needed).statistic if len(set(taken)) > 1 else None
            row = {"threshold": threshold, **describe(adaptive, self.test.depths), **against_fixed(adaptive, fixed)}
            if unfrozen is not None:
                by_depth = unfrozen.by_required(unfrozen.right, self.test.depths)
                row["unfrozen"] = {"mean_steps": unfrozen.mean_steps, "accuracy": unfrozen.accuracy,
                                   "state_error": unfrozen.state_error, "accuracy_by_depth": by_depth}  # fmt: skip
            rows.append(row | {"null_accuracy": null.accuracy, "rank_correlation": correlation})
        return rows

    def position_only(self, tuned: dict[str, list[Run]], fixed: FixedDepths) -> list[dict[str, Any]]:
        """Places take quantiles of the steps that the best rule took there on the tuning set."""
        full = min(fixed.errors())
        runs = [adaptive for of_rule in tuned.values() for adaptive in of_rule]
        best = cheapest([r.mean_steps for r in runs], [1 - r.accuracy for r in runs], full + 0.001)
        if best is None:
            return []
        rows = []
        for quantile in QUANTILES:
            steps = np.broadcast_to(by_position(runs[best].steps, quantile), runs[best].steps.shape)
            measured = run(self.model, self.test, self.cap, steps=steps)
            rows.append({"quantile": quantile, "mean_steps": measured.mean_steps, "accuracy": measured.accuracy})
        return rows

    def ideal(self, fixed: FixedDepths) -> list[dict[str, Any]]:
        """Every token takes what it needs, and `margin` steps more.

        Others read a token through the keys and values of its last step, which are made from the state before it. So a
        token that leaves as soon as it has its answer is never read with it: it takes a margin of one.
        """
        groups = len(self.model.config.loop_groups)
        rows = []
        for margin in MARGINS:
            needed = np.maximum(self.test.depths + margin, 1).clip(max=self.cap)
            steps = np.repeat(needed[..., None], groups, axis=-1)
            measured = run(self.model, self.test, self.cap, steps=steps)
            rows.append({"margin": margin, "mean_steps": measured.mean_steps, "accuracy": measured.accuracy})
        return rows

    def reach(
        self,
        target: float,
        tuned: dict[str, list[Run]],
        measured: dict[str, list[Run]],
        fixed_tuning: FixedDepths,
        fixed_test: FixedDepths,
    ) -> dict[str, Any]:
        """For each rule the threshold that reached an accuracy at the least cost on the tuning set, on the test set."""
        reached: dict[str, Any] = {"hull of fixed depths": hull_cost(fixed_test.costs, fixed_test.errors(), 1 - target)}
        if np.isinf(reached["hull of fixed depths"]):
            reached["hull of fixed depths"] = None
        best = cheapest(fixed_tuning.costs, fixed_tuning.errors(), 1 - target)
        if best is not None:
            reached["fixed"] = {"num_loops": fixed_test.counts[best], "mean_steps": fixed_test.runs[best].mean_steps,
                                "accuracy": fixed_test.runs[best].accuracy}  # fmt: skip
        for rule, runs in tuned.items():
            best = cheapest([r.mean_steps for r in runs], [1 - r.accuracy for r in runs], 1 - target)
            reached[rule] = None if best is None else self.at_threshold(rule, best, measured)
        return reached

    def at_threshold(self, rule: str, place: int, measured: dict[str, list[Run]]) -> dict[str, Any]:
        chosen = measured[rule][place]
        return {"threshold": RULES[rule][1][place], "mean_steps": chosen.mean_steps, "accuracy": chosen.accuracy}

    def no_loss(
        self,
        tuned: dict[str, list[Run]],
        measured: dict[str, list[Run]],
        fixed_tuning: FixedDepths,
        fixed_test: FixedDepths,
        tolerance: float = 0.001,
    ) -> dict[str, Any]:
        """Each rule's cheapest threshold that loses at most half of `tolerance` on the tuning set against 12 loops."""
        trained = fixed_tuning.counts.index([min(12, self.cap)] * len(self.model.config.loop_groups))
        goal = 1 - fixed_tuning.runs[trained].accuracy + tolerance / 2
        found: dict[str, Any] = {
            "num_loops": fixed_tuning.counts[trained],
            "accuracy": fixed_test.runs[trained].accuracy,
        }
        for rule, runs in tuned.items():
            best = cheapest([r.mean_steps for r in runs], [1 - r.accuracy for r in runs], goal)
            found[rule] = None if best is None else self.at_threshold(rule, best, measured)
        return found

    def recommended(self, no_loss: dict[str, Any], tuned: dict[str, list[Run]]) -> dict[str, Any] | None:
        """The rule that took the fewest steps on the tuning set at no loss, if it is one that a checkpoint can name."""
        found = {}
        for rule, runs in tuned.items():
            make, thresholds = RULES[rule]
            if no_loss[rule] is not None:
                place = thresholds.index(no_loss[rule]["threshold"])
                found[runs[place].mean_steps] = make(thresholds[place]).to_dict()
        return found[min(found)] if found else None

    def deeper(self, tuned: dict[str, list[Run]], fixed: FixedDepths) -> dict[str, Any] | None:
        """Sequences deeper than those of training, with thresholds chosen on sequences as deep as in training."""
        deepest = min(self.cap - 4, self.task.depth + 8)
        while deepest > self.task.depth:
            try:
                task = self.task.deeper(deepest).full()
                break
            except ValueError:  # more than the sequence holds
                deepest -= 1
        else:
            return None
        sequences = self.draw(task, DEEPER_SEED)
        beyond = sequences.depths > self.task.depth
        found: dict[str, Any] = {"depth": deepest, "rules": {}}

        def row(measured: Run) -> dict[str, Any]:
            asked = beyond & measured.asked
            return {"mean_steps": measured.mean_steps, "accuracy": measured.accuracy,
                    "accuracy_beyond": float(measured.right[asked].mean()),
                    "accuracy_by_depth": measured.by_required(measured.right, sequences.depths)}  # fmt: skip

        groups = len(self.model.config.loop_groups)
        found["fixed"] = [{"num_loops": count, **row(run(self.model, sequences, [count] * groups))}
                          for count in sorted({min(12, self.cap), self.cap})]  # fmt: skip
        full = min(fixed.errors())
        for rule, runs in tuned.items():
            best = cheapest([r.mean_steps for r in runs], [1 - r.accuracy for r in runs], full + 0.001)
            if best is not None:
                make, thresholds = RULES[rule]
                measured = run(self.model, sequences, self.cap, make(thresholds[best]))
                found["rules"][rule] = {"threshold": thresholds[best], **row(measured)}
        return found

    @torch.no_grad()
    def contraction(self) -> list[dict[str, Any]]:
        """Per group, kappa: |D(k)| / |D(k-1)| (medians over tokens), before a token has what it needs, and after."""
        output = self.model(self.test.ids[:128], num_loops=self.cap, output_loop_trajectory=True, use_cache=False)
        required = torch.from_numpy(self.test.depths[:128]).flatten()
        found = []
        for states in output.loop_trajectory:
            flat = states.flatten(1, 2)
            ratios, valid = contraction_ratios(flat), above_floor(flat)
            valid = valid[1:] & valid[:-1]  # [K - 1, tokens]
            step = torch.arange(2, len(flat))[:, None]  # after which the ratio is known
            after = step > required[None] + 1
            medians = [ratios[k][valid[k]].median().item() if valid[k].any() else None for k in range(len(ratios))]
            found.append({"by_step": medians, "before": _median(ratios, valid & ~after),
                          "after": _median(ratios, valid & after)})  # fmt: skip
        return found

    @torch.no_grad()
    def signals(self) -> dict[str, Any] | None:
        """What rules look at, while a token waits for its answer and from the step after that on: the step relative to
        the state, and the top probability, 1 %, 50 % and 99 % quantiles. The further apart, the easier it is to tell.
        None where the model does more than one loop at its end."""
        groups, last = self.model.config.loop_groups, self.model.config.num_hidden_layers - 1
        if len(groups) > 1 or groups[0][-1] != last:
            return None
        some = slice(0, 128)
        output = self.model(self.test.ids[some], num_loops=self.cap, output_loop_trajectory=True, use_cache=False)
        asked = torch.from_numpy(self.test.asked[some])
        states = output.loop_trajectory[0][:, asked]  # [cap + 1, asked, hidden]
        lengths = (states[1:] - states[:-1]).norm(dim=-1) / states[1:].norm(dim=-1)
        sure = torch.stack([self.model.decode_states(state).softmax(-1).amax(-1) for state in states[1:]])
        step = torch.arange(1, self.cap + 1)[:, None]
        required = torch.from_numpy(self.test.depths[some])[asked]
        return {
            name: {"step": _quantiles(lengths[where & (step > 1)]), "probability": _quantiles(sure[where])}
            for name, where in (("waiting", step < required), ("known", step > required))
        }


def _quantiles(values: torch.Tensor) -> list[float] | None:
    return np.quantile(values.numpy(), (0.01, 0.5, 0.99)).tolist() if len(values) else None


def _median(values: torch.Tensor, chosen: torch.Tensor) -> float | None:
    return values[chosen].median().item() if chosen.any() else None


def tasks_of(model: RecurrentGPT2ForCausalLM) -> list[Task]:
    """The tasks that a checkpoint was trained on."""
    return [TaskSource.parse(settings).task for settings in getattr(model.config, "tasks", None) or []]


def task_of(model: RecurrentGPT2ForCausalLM, name: str | None = None) -> Task:
    """The one that a checkpoint was trained on, `name` where there are several."""
    tasks = tasks_of(model)
    if not tasks:
        raise ValueError("the checkpoint was trained on no depth task: see docs/tasks.md for how to train one.")
    names = [task.name for task in tasks]
    if name is not None and name not in names:
        raise ValueError(f"`--task` is {name!r}, but the checkpoint was trained on {', '.join(names)}.")
    return tasks[0 if name is None else names.index(name)]


def study_checkpoint(
    checkpoint: str | Path, cap: int = 24, sequences: int = 512, rules: list[str] | None = None, task: str | None = None
) -> dict[str, Any]:
    model, tokenizer = load_checkpoint(checkpoint)
    for rule in rules or []:
        if rule not in RULES:
            raise ValueError(f"`--rules` has {rule!r}, but must be among {', '.join(RULES)}.")
    if sequences < 2 or cap < 2:
        raise ValueError(f"`--sequences` is {sequences} and `--num_loops` {cap}, but both must be at least 2.")
    chosen = task_of(model, task)
    study = DepthStudy(model, chosen, ids_of_tokens(tokenizer, chosen), cap, sequences)
    return {"checkpoint": Path(checkpoint).name, **study.study(rules or list(RULES))}


def print_tables(result: dict[str, Any]) -> None:
    print(f"task {result['task']}, mean required depth {result['mean_required']:.2f}\n")
    print("| fixed loops | accuracy |\n|---|---|")
    for row in result["fixed"]:
        print(f"| {row['num_loops']} | {row['accuracy']:.4f} |")
    print(
        "\n| rule | threshold | mean steps | accuracy | ahead of fixed depth [95 %] | its steps shuffled | rank corr. |"
    )
    print("|---|---|---|---|---|---|---|")
    for rule, rows in result["rules"].items():
        for row in rows:
            ahead = f"{row['ahead']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]"
            correlation = "" if row["rank_correlation"] is None else f"{row['rank_correlation']:.2f}"
            cells = [rule, f"{row['threshold']:g}", f"{row['mean_steps']:.2f}", f"{row['accuracy']:.4f}", ahead]
            unfrozen = (
                f"{row['unfrozen']['accuracy']:.4f} at {row['unfrozen']['mean_steps']:.2f}" if "unfrozen" in row else ""
            )
            print(f"| {' | '.join([*cells, format(row['null_accuracy'], '.4f'), unfrozen, correlation])} |")
    for name in ("position_only", "ideal"):
        for row in result[name]:
            setting = f"quantile {row['quantile']}" if name == "position_only" else f"margin {row['margin']}"
            print(f"| {name} | {setting} | {row['mean_steps']:.2f} | {row['accuracy']:.4f} | | | | |")
    for name, found in (result["signals"] or {}).items():
        steps, sure = (", ".join(f"{value:.3f}" for value in found[of] or []) for of in ("step", "probability"))
        print(f"\n{name} (1 %, 50 %, 99 %): relative step {steps}; top probability {sure}")
    print("\n| accuracy | " + " | ".join(["fixed", *result["rules"]]) + " |")
    print("|---" * (2 + len(result["rules"])) + "|")
    for target, reached in result["reach"].items():
        cells = []
        for name in ("fixed", *result["rules"]):
            found = reached.get(name)
            cells.append("not reached" if not found else f"{found['mean_steps']:.2f} ({found['accuracy']:.4f})")
        print(f"| {target} | {' | '.join(cells)} |")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder or name on the Hub")
    parser.add_argument("--output", type=Path, help="folder for depth.json and the figures; left out: tables only")
    parser.add_argument("--task", help="which of the checkpoint's tasks, where it has several")
    parser.add_argument("--rules", nargs="+", help=f"among {', '.join(RULES)}; all when left out")
    parser.add_argument("--num_loops", type=int, default=24, help="the cap")
    parser.add_argument("--sequences", type=int, default=512, help="for tuning, and as many for the numbers")
    options = parser.parse_args(arguments)
    result = study_checkpoint(options.checkpoint, options.num_loops, options.sequences, options.rules, options.task)
    print_tables(result)
    if options.output is not None:
        from .depth_figures import draw_depth_figures  # matplotlib is needed for these alone

        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "depth.json").write_text(json.dumps(rounded(result)) + "\n")
        for path in draw_depth_figures(result, options.output):
            print(path)


def rounded(value: Any, digits: int = 5) -> Any:
    """Floats of a JSON-able value, rounded: no measurement here has more digits."""
    if isinstance(value, dict):
        return {name: rounded(item, digits) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    return round(float(value), digits) if isinstance(value, float | np.floating) else value


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
