"""The cheapest exit setting within a budget of quality, with a guarantee.

    python -m evaluation.calibrate CHECKPOINT --source TEXT --budget 0.01 --confidence 0.95 --write

Fixed loops (one count per group) and every registered rule (your own too: `--policy my_policy.py`, `module:Class`) are
tried on one part of the text, the tuning part. What is cheapest there at each risk is put in order, from the safest on,
and tested on the other part, the calibration part, by learn-then-test (see `risk_control.py`): with the stated
probability over the calibration text, the mean excess loss over full depth is within the budget on text like this.

A model of text and a task takes several sources at once, text under `--budget` and a task under `--budget-accuracy`:
the winner keeps every budget, and its cost is the mean over the sources.

`--write` stores the winner in the checkpoint's configs, where `generate` finds it, with `calibration.json` beside it.
All scores are lines of files in `--output`: an interrupted run goes on where it stopped.
"""

import argparse
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import cached_file

from recurrent_gpt2 import RecurrentGPT2ForCausalLM
from training.card import render_card
from training.data import Source
from training.promise import describe_guarantee, short_loops, weights_digest
from training.tasks import available_tasks

from .baselines import lower_hull
from .common import blocks_of, held_out_documents, load_checkpoint
from .depth import task_of
from .exit_search import (
    Rule,
    Score,
    Scores,
    Workload,
    climb,
    find_rules,
    fixed_ladder,
    rule_ladders,
    search,
)
from .exit_tradeoff import Setting, check_fingerprint, describe_threshold, measure_times
from .report import Table, name_of_source
from .risk_control import fixed_sequence, frontier, hoeffding_bentkus, largest_risk, sequences_needed

TASK_SEED = 74  # of new sequences of a task
TESTED = 12  # settings in the sequence of tests, at most
DEFAULT_BUDGET = 0.01  # nats
SURE = 2.0  # the sequence begins with the riskiest setting that is safe by this many standard errors of its risk
REFINED = 1.1  # a rule is refined group by group where it costs at most this much more than the cheapest so far


@dataclass
class Budget:
    """What may be lost: a mean excess loss of `amount`, counted between 0 and `clip` on every sequence."""

    amount: float
    clip: float
    confidence: float
    is_accuracy: bool = False

    def __post_init__(self):
        name = "--budget-accuracy" if self.is_accuracy else "--budget"
        if not 0 < self.amount < math.inf or (self.is_accuracy and self.amount >= 1):
            allowed = "above 0 and below 1" if self.is_accuracy else "a finite number above 0"
            raise ValueError(f"`{name}` is {self.amount}, but must be {allowed}.")
        if not 0 < self.confidence < 1:
            raise ValueError(f"`--confidence` is {self.confidence}, but must be between 0 and 1, such as 0.95.")
        if not self.amount < self.clip < math.inf:
            raise ValueError(f"`--clip` is {self.clip}, but must be above the budget, {self.amount}.")

    @property
    def measure(self) -> str:
        return "accuracy" if self.is_accuracy else "nats"

    @property
    def alpha(self) -> float:
        return self.amount / self.clip

    @property
    def delta(self) -> float:
        return 1 - self.confidence

    def losses(self, score: Score, full: Score) -> np.ndarray:
        """What a setting loses on each sequence, in [0, 1]."""
        return np.clip((np.array(score.losses) - np.array(full.losses)) / self.clip, 0, 1)

    def risk(self, score: Score, full: Score) -> float:
        return float(self.losses(score, full).mean())


@dataclass
class Part:
    """Sequences of one source, some to tune on and some to test on, and what may be lost on them."""

    source: str
    budget: Budget
    tuning: Workload
    calibration: Workload

    @property
    def target(self) -> float:
        """The largest risk that the calibration part can certify."""
        return largest_risk(len(self.calibration), self.budget.alpha, self.budget.delta)

    def p_value(self, score: Score, full: Score) -> float:
        return hoeffding_bentkus(self.budget.risk(score, full), len(self.calibration), self.budget.alpha)


@dataclass
class Tried:
    """A setting, scored on every source."""

    scores: list[Score]

    def with_times_of(self, other: "Tried") -> "Tried":
        for score, timed in zip(self.scores, other.scores, strict=True):
            score.ms_per_token = timed.ms_per_token
        return self

    @property
    def setting(self) -> Setting:
        return self.scores[0].setting

    @property
    def flops(self) -> float:
        """Per token, the mean over sources."""
        return float(np.mean([score.flops for score in self.scores]))

    @property
    def ms_per_token(self) -> float:
        """One sequence at a time, the mean over sources."""
        return float(np.mean([score.ms_per_token["1"] for score in self.scores]))

    @property
    def steps(self) -> list[float]:
        return np.mean([score.steps for score in self.scores], axis=0).tolist()


@dataclass
class Outcome:
    """A setting of the sequence of tests, with what the calibration parts showed."""

    tried: Tried  # on the calibration parts
    p_value: float  # the largest of all sources: every budget is kept, or the test fails
    holds: bool = False


@dataclass
class Calibration:
    """All that a run found out."""

    parts: list[Part]
    cap: tuple[int, ...]
    cost_unit: str  # "flops" or "ms"
    tuning: list[Tried]
    full_on_tuning: Tried
    full: Tried
    tested: list[Outcome]

    def risks(self, tried: Tried, full: Tried) -> list[float]:
        return [p.budget.risk(s, f) for p, s, f in zip(self.parts, tried.scores, full.scores, strict=True)]

    def risk_on_tuning(self, tried: Tried, errors: float = 0.0) -> float:
        """Of all sources the largest, as a multiple of what can be certified: at most 1 where the test would be passed.
        `errors` standard errors are added to it."""
        shares = []
        for part, score, full in zip(self.parts, tried.scores, self.full_on_tuning.scores, strict=True):
            losses = part.budget.losses(score, full)
            shares.append((losses.mean() + errors * losses.std() / math.sqrt(len(losses))) / part.target)
        return float(max(shares))

    def is_within_budget(self, tried: Tried) -> bool:
        """On the tuning parts."""
        risks = self.risks(tried, self.full_on_tuning)
        return all(risk < part.budget.alpha for part, risk in zip(self.parts, risks, strict=True))

    @property
    def runners_up(self) -> list[Tried]:
        """Of every rule, the cheapest on the tuning parts that would pass the test if the others were like them."""
        best: dict[str, Tried] = {}
        for tried in sorted(self.tuning, key=self.cost, reverse=True):
            if self.risk_on_tuning(tried) <= 1:
                best[tried.setting.rule] = tried
        return list(best.values())

    @property
    def winner(self) -> Outcome | None:
        """None: nothing cheaper than full depth is promised."""
        holding = [tested for tested in self.tested if tested.holds]
        return holding[-1] if holding else None

    def cost(self, tried: Tried) -> float:
        return tried.ms_per_token if self.cost_unit == "ms" else tried.flops


def split(workload: Workload, tuning: int, calibration: int, seed: int) -> tuple[Workload, Workload]:
    """A part to tune on and a part to test on, drawn at random: at most as many sequences as asked for."""
    order = torch.randperm(len(workload), generator=torch.Generator().manual_seed(seed))
    tuning = min(tuning, len(workload) // 4)
    return workload[order[:tuning]], workload[order[tuning : tuning + calibration]]


def check_amount(budget: Budget, tuning: int, calibration: int) -> None:
    """Fails where the text can't carry the promise, whatever is measured on it."""
    needed = sequences_needed(budget.alpha, budget.delta)
    if calibration < needed or tuning < 1:
        raise ValueError(
            f"the text has {tuning + calibration} sequences, {calibration} of them to calibrate on, but a promise of "
            f"{budget.amount:g} with confidence {budget.confidence:g} (clipped at {budget.clip:g}) takes at least "
            f"{needed} of them, {math.ceil(needed * 4 / 3)} in all, even if nothing is lost: give more text, a smaller "
            "`--block_size`, or a larger budget."
        )


def calibrate(
    model: RecurrentGPT2ForCausalLM,
    parts: list[Part],
    output: Path,
    rules: list[Rule] | None = None,
    cap: int | list[int] | None = None,
    cost: str = "flops",
) -> Calibration:
    """Tunes on one part of every source, tests on the other. Scores are kept in `output`, and taken from there."""
    for part in parts:
        check_amount(part.budget, len(part.tuning), len(part.calibration))
    cap = tuple(model.config.loops_per_group(cap))
    rules = find_rules(and_registered=True) if rules is None else rules
    kept = [Scores(model, part.tuning, output / f"tuning-{file_of(part)}.jsonl", f"tuning, {part.source}")
            for part in parts]  # fmt: skip
    full = Tried([scores[Setting("fixed", None, cap)] for scores in kept])
    result = Calibration(parts, cap, cost, [], full, full, [])

    def evaluate(setting: Setting) -> tuple[float, float]:
        tried = Tried([scores[setting] for scores in kept])
        return result.risk_on_tuning(tried), tried.flops

    def everything() -> list[Tried]:
        settings = [setting for setting in kept[0].known if all(setting in scores.known for scores in kept)]
        return [Tried([scores[setting] for scores in kept]) for setting in settings]

    climb(fixed_ladder(cap), evaluate, 1)
    search([fixed_ladder(cap)], evaluate, 1, within=math.inf)
    for rule in rules:
        safe = [tried.flops for tried in everything() if result.risk_on_tuning(tried) <= 1]
        first, *others = (part.tuning for part in parts)
        ladders = rule_ladders(model, first, rule, cap, *others)
        search(ladders, evaluate, 1, within=REFINED * min(safe))
    for scores in kept:
        scores.close()
    result.tuning = [tried for tried in everything() if is_candidate(tried.setting, rules, cap)]
    if cost == "ms":
        # Only what may be chosen is timed.
        result.tuning = [tried for tried in result.tuning if result.is_within_budget(tried)]
        take_times(model, result, output)
    walk(model, output, result)
    return result


def file_of(part: Part) -> str:
    return f"{part.source}-{part.budget.measure}"


def take_times(model: RecurrentGPT2ForCausalLM, result: Calibration, output: Path) -> None:
    """Times every setting on every source."""
    for place, part in enumerate(result.parts):
        prompts = part.tuning.ids[:8, : max(part.tuning.ids.shape[1] // 4, 1)]
        scores = [tried.scores[place] for tried in result.tuning]
        measure_times(model, prompts, scores, output / f"times-{file_of(part)}.jsonl", batch_sizes=(1,))


def is_candidate(setting: Setting, rules: list[Rule], cap: tuple[int, ...]) -> bool:
    """Whether this run would try it: an earlier one may have left scores of other rules, or of another full depth."""
    if setting.rule == "fixed":
        return all(loops <= most for loops, most in zip(setting.num_loops, cap, strict=True))
    return setting.num_loops == cap and setting.rule in {rule.label for rule in rules}


def walk(model: RecurrentGPT2ForCausalLM, output: Path, result: Calibration) -> None:
    """Walks the sequence of settings, which the tuning parts alone have put in order, until one fails."""
    kept = [Scores(model, part.calibration, output / f"calibration-{file_of(part)}.jsonl", f"testing, {part.source}")
            for part in result.parts]  # fmt: skip
    full, delta = result.full_on_tuning, result.parts[0].budget.delta
    result.full = Tried([scores[full.setting] for scores in kept]).with_times_of(full)
    for tuned in sequence_of(result):
        tried = Tried([scores[tuned.setting] for scores in kept]).with_times_of(tuned)
        of_parts = zip(result.parts, tried.scores, result.full.scores, strict=True)
        result.tested.append(Outcome(tried, max(part.p_value(score, full) for part, score, full in of_parts)))
        if result.tested[-1].p_value > delta:
            break
    for tested in result.tested[: fixed_sequence([t.p_value for t in result.tested], delta)]:
        tested.holds = True
    for scores in kept:
        scores.close()


def sequence_of(result: Calibration) -> list[Tried]:
    """The settings to test, from the safest on: the frontier of cost and risk on the tuning parts.

    It begins where the test is as good as passed, since a failure there ends it, and is thinned out where it is long.
    """
    candidates = [tried for tried in result.tuning if result.is_within_budget(tried)]
    risks = [result.risk_on_tuning(tried) for tried in candidates]
    ordered = [candidates[place] for place in frontier([result.cost(tried) for tried in candidates], risks)]
    sure = [place for place, tried in enumerate(ordered) if result.risk_on_tuning(tried, errors=SURE) <= 1]
    ordered = ordered[max(sure, default=0) :]
    kept = np.unique(np.linspace(0, len(ordered) - 1, min(TESTED, len(ordered))).round().astype(int))
    return [ordered[place] for place in kept if ordered[place].setting != result.full.setting]


def promise(result: Calibration, seed: int) -> dict[str, Any]:
    """What `calibration.json` says, JSON-able."""
    winner = result.winner
    chosen = result.full if winner is None else winner.tried
    promises = []
    for part, score, full in zip(result.parts, chosen.scores, result.full.scores, strict=True):
        budget, excess = part.budget, np.array(score.losses) - np.array(full.losses)
        promises.append({
            "source": part.source,
            "sequence_length": part.calibration.ids.shape[1],
            "tuning_sequences": len(part.tuning),
            "calibration_sequences": len(part.calibration),
            "measure": budget.measure,
            "budget": budget.amount,
            "clip": budget.clip,
            "p_value": None if winner is None else part.p_value(score, full),
            "mean_excess": float(excess.mean()),
            "mean_clipped_excess": float(np.clip(excess, 0, budget.clip).mean()),
            "mean_steps": score.steps,
        })  # fmt: skip
    return {
        "confidence": result.parts[0].budget.confidence,
        "seed": seed,
        "full_loops": list(result.cap),
        "rule": chosen.setting.rule,
        "exit_policy": chosen.setting.exit_policy,
        "num_loops": list(chosen.setting.num_loops),
        "cost": {"unit": result.cost_unit, "chosen": result.cost(chosen), "full": result.cost(result.full)},
        "promises": promises,
    }


def write(checkpoint: Path, promised: dict[str, Any]) -> None:
    """Puts the setting into the configs and the promise beside them. A card that nobody has edited is made anew."""
    card = checkpoint / "README.md"
    is_as_made = card.exists() and card.read_text() == str(render_card(checkpoint))
    loops = promised["num_loops"]
    num_loops = short_loops(loops)
    configs = {name: json.loads((checkpoint / f"{name}.json").read_text()) for name in ("config", "generation_config")}
    configs["config"]["num_loops"] = num_loops
    # Without `_from_model_config` the fields that are not transformers' own would be lost on load.
    configs["generation_config"] |= {"num_loops": num_loops, "_from_model_config": False}
    configs["generation_config"]["exit_policy"] = promised["exit_policy"]
    promised = {**promised, "weights": weights_digest(checkpoint)}
    for name, values in {**configs, "calibration": promised}.items():
        _replace(checkpoint / f"{name}.json", json.dumps(values, indent=2, sort_keys=True) + "\n")
    if is_as_made:
        _replace(card, str(render_card(checkpoint)))
    elif card.exists():
        print(f"{card} has been edited, and is left as it is: it does not state the promise.")


def _replace(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    os.replace(temporary, path)


def settings_table(result: Calibration) -> Table:
    """The winner, the best of every rule and the hull of fixed depth, with what both parts of the text showed."""
    unit = "ms/token" if result.cost_unit == "ms" else "MFLOP/token"
    tested = {t.tried.setting: t for t in result.tested}
    fixed = [tried for tried in result.tuning if tried.setting.rule == "fixed"]
    points = [(result.cost(tried), result.risk_on_tuning(tried)) for tried in fixed]
    hull = set(zip(*lower_hull(*zip(*points, strict=True)), strict=True))
    rows = []

    def add(kind: str, tried: Tried) -> None:
        outcome = tested.get(tried.setting)
        cost = result.cost(tried) / (1 if result.cost_unit == "ms" else 1e6)
        shown = ["", "", ""]
        if outcome is not None:
            mark = "yes" if outcome.holds else "no"
            shown = [_amounts(result, outcome.tried, result.full), f"{outcome.p_value:.2g}", mark]
        rows.append([kind, tried.setting.rule, describe(tried.setting), _numbers(tried.steps), f"{cost:.2f}",
                     _amounts(result, tried, result.full_on_tuning), *shown])  # fmt: skip

    by_setting = {tried.setting: tried for tried in result.tuning}
    if result.winner is not None:
        add("**winner**", by_setting[result.winner.tried.setting])
    for tried in sorted(result.runners_up, key=result.cost):
        add("best of its rule", tried)
    listed = {tried.setting.rule for tried in result.runners_up}
    for tried in sorted(result.tuning, key=result.cost):
        if tried.setting.rule not in listed:
            listed.add(tried.setting.rule)
            add("too dear or too risky", tried)
    for point, tried in sorted(zip(points, fixed, strict=True), key=lambda pair: pair[0]):
        if point in hull:
            add("fixed hull", tried)
    add("full depth", result.full_on_tuning)
    header = ["", "rule", "setting", "mean steps", unit, "excess, tuning", "excess, calibration", "p", "promised"]
    return Table("Settings", header, rows)


def describe(setting: Setting) -> str:
    """A setting in a cell of a table."""
    policy = setting.exit_policy
    if policy is None:
        return f"{_loops(list(setting.num_loops))} loops"
    return "; ".join(describe_threshold(p) for p in (policy if isinstance(policy, list) else [policy]))


def _loops(loops: list[int]) -> str:
    return str(loops[0] if len(set(loops)) == 1 else loops)


def _numbers(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _amounts(result: Calibration, tried: Tried, full: Tried) -> str:
    """What is lost on every source."""
    risks = zip(result.parts, result.risks(tried, full), strict=True)
    return ", ".join(f"{risk * part.budget.clip:.5f}" for part, risk in risks)


def usage(promised: dict[str, Any]) -> str:
    loops = promised["num_loops"]
    return f"model.generate(ids, exit_policy={promised['exit_policy']!r}, num_loops={_loops(loops)})"


def explain(result: Calibration) -> str:
    """Where nothing cheaper is promised: why, and how much text it would take."""
    if not result.tested:
        return "Nothing cheaper than full depth was within the budget on the tuning part."
    first = result.tested[0]
    of_parts = list(zip(result.parts, first.tried.scores, result.full.scores, strict=True))
    part, score, full = max(of_parts, key=lambda of: of[0].p_value(*of[1:]))
    risk = part.budget.risk(score, full)
    needed = sequences_needed(part.budget.alpha, part.budget.delta, risk)
    more = "no amount of text would promise it" if needed is None else f"to promise it takes {needed} sequences"
    return (
        f"The safest setting that was tested, {score.setting.rule} {describe(score.setting)}, lost "
        f"{risk * part.budget.clip:.5f} on {len(part.calibration)} sequences of {part.source} "
        f"(p = {first.p_value:.2g}): {more}."
    )


def budgets_of(options: argparse.Namespace) -> list[Budget]:
    """One for every source: of accuracy for a task; of nats for text, unless accuracy is all that is asked for."""
    tasks = [source for source in options.source if source in available_tasks()]
    if tasks and options.budget_accuracy is None:
        raise ValueError(f"`--source` is the task {tasks[0]}: give its budget as `--budget-accuracy`, such as 0.001.")
    if not tasks and None not in (options.budget, options.budget_accuracy):
        raise ValueError(
            "`--budget` and `--budget-accuracy` are both given, but no task is among `--source`: drop one."
        )
    budgets = []
    for source in options.source:
        by_accuracy = source in tasks or (not tasks and options.budget_accuracy is not None)
        nats = DEFAULT_BUDGET if options.budget is None else options.budget
        amount = options.budget_accuracy if by_accuracy else nats
        clip = options.clip or (1.0 if by_accuracy else 10 * amount)
        budgets.append(Budget(amount, clip, options.confidence, by_accuracy))
    return budgets


def load_part(
    source: str, budget: Budget, model: RecurrentGPT2ForCausalLM, tokenizer, options: argparse.Namespace
) -> Part:
    """The text of a file, all of it taken to be held out, or of python-docs what was held out in training; of a task,
    new sequences."""
    is_task = source in available_tasks()
    tuning, calibration = options.tuning or (1024 if is_task else 64), options.calibration or (8192 if is_task else 512)
    if is_task:
        workload = Workload.of_task(task_of(model, source), tokenizer, tuning + calibration, TASK_SEED)
    else:
        block_size = options.block_size or model.config.max_position_embeddings
        documents = held_out_documents(Source(source), options.validation_fraction if source == "python-docs" else None)
        blocks = blocks_of(documents, tokenizer, block_size, limit=64 * (tuning + calibration))
        workload = Workload.of_text(blocks, budget.is_accuracy)
    part = Part(name_of_source(source), budget, *split(workload, tuning, calibration, options.seed))
    check_amount(budget, len(part.tuning), len(part.calibration))
    return part


def full_loops(checkpoint: str, model: RecurrentGPT2ForCausalLM) -> list[int]:
    """What the checkpoint takes for full depth: of an earlier calibration, of its generation config, of its config."""
    earlier = cached_file(checkpoint, "calibration.json", _raise_exceptions_for_missing_entries=False)
    if earlier is not None:
        return json.loads(Path(earlier).read_text())["full_loops"]
    return model.config.loops_per_group(getattr(model.generation_config, "num_loops", None))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder or name on the Hub")
    parser.add_argument(
        "--source", required=True, nargs="+", help="text: a file, or python-docs; or a task of the checkpoint's"
    )
    parser.add_argument(
        "--budget", type=float, help=f"mean excess loss over full depth, in nats; {DEFAULT_BUDGET} when left out"
    )
    parser.add_argument(
        "--budget-accuracy", type=float, help="for a task, or instead: accuracy that may be lost, 0.001 of all labels"
    )
    parser.add_argument("--confidence", type=float, default=0.95, help="probability with which the promise holds")
    parser.add_argument("--clip", type=float, help="the most that a sequence counts; 10 x --budget, or 1 for accuracy")
    parser.add_argument(
        "--rules", nargs="+", help="names, module:Class, my_policy.py or JSON; all registered when left out"
    )
    parser.add_argument(
        "--policy", nargs="+", default=[], help="files or module:Class of your own, beside all registered"
    )
    parser.add_argument("--cost", choices=("flops", "ms"), default="flops", help="of the model, or measured ms/token")
    parser.add_argument("--num_loops", type=int, help="full depth; the checkpoint's when left out")
    parser.add_argument("--tuning", type=int, help="sequences to tune on, at most a quarter of all; 64, of tasks 1024")
    parser.add_argument("--calibration", type=int, help="sequences to test on, at most; 512, of tasks 8192")
    parser.add_argument("--block_size", type=int, help="tokens of a sequence; the model's positions when left out")
    parser.add_argument("--validation_fraction", type=float, default=0.01, help="of python-docs, held out in training")
    parser.add_argument("--seed", type=int, default=0, help="of the split")
    parser.add_argument("--output", type=Path, help="folder of the scores; under results/calibration when left out")
    parser.add_argument("--write", action="store_true", help="store the winner in the checkpoint")
    options = parser.parse_args(arguments)
    budgets = budgets_of(options)
    if options.write and not Path(options.checkpoint).is_dir():
        raise ValueError(f"`--write` needs a checkpoint in a folder, but {options.checkpoint} is none.")
    rules = find_rules([*(options.rules or []), *options.policy], and_registered=options.rules is None)
    model, tokenizer = load_checkpoint(options.checkpoint)
    if (getattr(model.generation_config, "cache_strategy", None) or model.config.cache_strategy) == "last_step":
        raise ValueError(
            f"`cache_strategy` of {options.checkpoint} is 'last_step', but must be 'per_step': sequences are scored in "
            "one pass, and with 'last_step' tokens that come one by one see others: nothing could be promised for them."
        )
    parts = [load_part(source, budget, model, tokenizer, options)
             for source, budget in zip(options.source, budgets, strict=True)]  # fmt: skip
    names = [Path(options.checkpoint).resolve().name, *(part.source for part in parts)]
    if len(set(names[1:])) < len(parts):
        raise ValueError(f"`--source` has two of the same name: {', '.join(names[1:])}.")
    output = options.output or Path("results/calibration") / "-".join(names)
    output.mkdir(parents=True, exist_ok=True)
    texts = [workload.ids for part in parts for workload in (part.tuning, part.calibration)]
    shapes = torch.tensor([text.shape for text in texts])  # the same text, split elsewhere, is another
    check_fingerprint(
        model, torch.cat([shapes.flatten(), *(text.flatten() for text in texts)]), output / "fingerprint.json"
    )
    cap = full_loops(options.checkpoint, model) if options.num_loops is None else options.num_loops
    if max(model.config.loops_per_group(cap)) == 1:
        raise ValueError("full depth (`--num_loops`, or the checkpoint's) is one loop: nothing is cheaper.")
    result = calibrate(model, parts, output, rules, cap, options.cost)
    promised = promise(result, options.seed)
    print(settings_table(result).markdown())
    print(f"\n{describe_guarantee(promised)}\n" if result.winner else f"\n{explain(result)}\n")
    print(usage(promised))
    if options.write:
        write(Path(options.checkpoint), promised)
        print(f"written to {options.checkpoint}: `generate` uses it unless told otherwise.")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
