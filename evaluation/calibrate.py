"""The cheapest exit setting within a budget of quality, with a guarantee.

    python -m evaluation.calibrate CHECKPOINT --source TEXT --budget 0.01 --confidence 0.95 --write

Fixed loops (one count per group) and every registered rule (your own too: `--policy my_policy.py`, `module:Class`) are
tried on one part of the text, the tuning part. What is cheapest there at each risk is put in order, from the safest on,
and tested on the other part, the calibration part, by learn-then-test (see `risk_control.py`): with the stated
probability over the calibration text, the mean excess loss over full depth is within the budget on text like this.

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

from recurrent_gpt2 import RecurrentGPT2ForCausalLM
from training.card import render_card
from training.data import Source
from training.promise import describe_guarantee
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
from .exit_tradeoff import Setting, check_fingerprint, measure_times
from .report import Table, name_of_source
from .risk_control import fixed_sequence, frontier, hoeffding_bentkus, largest_risk, sequences_needed

TASK_SEED = 74  # of new sequences of a task
TESTED = 12  # settings in the sequence of tests, at most
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
            allowed = "between 0 and 1" if self.is_accuracy else "a finite number"
            raise ValueError(f"`{name}` is {self.amount}, but must be {allowed} above 0.")
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
class Outcome:
    """A setting of the sequence of tests, with what the calibration part showed."""

    score: Score  # on the calibration part
    risk: float
    p_value: float
    holds: bool = False


@dataclass
class Calibration:
    """All that a run found out."""

    budget: Budget
    cap: tuple[int, ...]
    cost_unit: str  # "flops" or "ms"
    target: float  # the largest risk that the calibration part can certify
    tuning: list[Score]
    full_on_tuning: Score
    full: Score
    tested: list[Outcome]

    def risk_on_tuning(self, score: Score) -> float:
        return self.budget.risk(score, self.full_on_tuning)

    def error_on_tuning(self, score: Score) -> float:
        """The standard error of that risk."""
        losses = self.budget.losses(score, self.full_on_tuning)
        return float(losses.std() / math.sqrt(len(losses)))

    @property
    def runners_up(self) -> list[Score]:
        """Of every rule, the cheapest on the tuning part that would pass the test if the other part were like it."""
        best: dict[str, Score] = {}
        for score in sorted(self.tuning, key=self.cost, reverse=True):
            if self.risk_on_tuning(score) <= self.target:
                best[score.setting.rule] = score
        return list(best.values())

    @property
    def winner(self) -> Outcome | None:
        """None: nothing cheaper than full depth is promised."""
        holding = [tested for tested in self.tested if tested.holds]
        return holding[-1] if holding else None

    def cost(self, score: Score) -> float:
        return score.ms_per_token["1"] if self.cost_unit == "ms" else score.flops


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
    tuning: Workload,
    calibration: Workload,
    budget: Budget,
    output: Path,
    rules: list[Rule] | None = None,
    cap: int | list[int] | None = None,
    cost: str = "flops",
) -> Calibration:
    """Tunes on one part, tests on the other. Scores are kept in `output`, and taken from there."""
    check_amount(budget, len(tuning), len(calibration))
    cap = tuple(model.config.loops_per_group(cap))
    rules = find_rules(and_registered=True) if rules is None else rules
    scores = Scores(model, tuning, output / f"tuning-{budget.measure}.jsonl", "tuning")
    full_on_tuning = scores[Setting("fixed", None, cap)]
    target = largest_risk(len(calibration), budget.alpha, budget.delta)

    def evaluate(setting: Setting) -> tuple[float, float]:
        return budget.risk(scores[setting], full_on_tuning), scores[setting].flops

    climb(fixed_ladder(cap), evaluate, target)
    search([fixed_ladder(cap)], evaluate, target, within=math.inf)
    for rule in rules:
        safe = [s.flops for s in scores.known.values() if budget.risk(s, full_on_tuning) <= target]
        ladders = rule_ladders(model, tuning, rule, cap)
        search(ladders, evaluate, target, within=REFINED * min(safe))
    scores.close()
    tried = [s for s in scores.known.values() if is_candidate(s.setting, rules, cap)]
    result = Calibration(budget, cap, cost, target, tried, full_on_tuning, full_on_tuning, [])
    if cost == "ms":
        # Only what may be chosen is timed.
        result.tuning = [s for s in tried if budget.risk(s, full_on_tuning) <= budget.alpha]
        prompts = tuning.ids[:8, : max(tuning.ids.shape[1] // 4, 1)]
        measure_times(model, prompts, result.tuning, output / "times.jsonl", batch_sizes=(1,))
    walk(model, calibration, output, result)
    return result


def is_candidate(setting: Setting, rules: list[Rule], cap: tuple[int, ...]) -> bool:
    """Whether this run would try it: an earlier one may have left scores of other rules, or of another full depth."""
    if setting.rule == "fixed":
        return all(loops <= most for loops, most in zip(setting.num_loops, cap, strict=True))
    return setting.num_loops == cap and setting.rule in {rule.label for rule in rules}


def walk(model: RecurrentGPT2ForCausalLM, calibration: Workload, output: Path, result: Calibration) -> None:
    """Walks the sequence of settings, which the tuning part alone has put in order, until one fails."""
    budget, full = result.budget, result.full_on_tuning
    scores = Scores(model, calibration, output / f"calibration-{budget.measure}.jsonl", "calibration")
    result.full = scores[full.setting]
    result.full.ms_per_token = full.ms_per_token
    for tuned in sequence_of(result):
        score = scores[tuned.setting]
        score.ms_per_token = tuned.ms_per_token
        risk = budget.risk(score, result.full)
        p_value = hoeffding_bentkus(risk, len(calibration), budget.alpha)
        result.tested.append(Outcome(score, risk, p_value))
        if p_value > budget.delta:
            break
    for tested in result.tested[: fixed_sequence([t.p_value for t in result.tested], budget.delta)]:
        tested.holds = True
    scores.close()


def sequence_of(result: Calibration) -> list[Score]:
    """The settings to test, from the safest on: the frontier of cost and risk on the tuning part.

    It begins where the test is as good as passed, since a failure there ends it, and is thinned out where it is long.
    """
    risks = [result.risk_on_tuning(score) for score in result.tuning]
    places = frontier([result.cost(score) for score in result.tuning], risks)
    places = [place for place in places if risks[place] < result.budget.alpha]
    errors = [SURE * result.error_on_tuning(score) for score in result.tuning]
    sure = [n for n, place in enumerate(places) if risks[place] + errors[place] <= result.target]
    places = places[max(sure, default=0) :]
    kept = np.unique(np.linspace(0, len(places) - 1, min(TESTED, len(places))).round().astype(int))
    sequence = [result.tuning[places[place]] for place in kept]
    return [score for score in sequence if score.setting != result.full.setting]


def promise(result: Calibration, source: str, calibration: Workload, tuning: Workload, seed: int) -> dict[str, Any]:
    """What `calibration.json` says, JSON-able."""
    budget, winner = result.budget, result.winner
    score = result.full if winner is None else winner.score
    excess = np.array(score.losses) - np.array(result.full.losses)
    return {
        "source": source,
        "sequence_length": calibration.ids.shape[1],
        "tuning_sequences": len(tuning),
        "calibration_sequences": len(calibration),
        "seed": seed,
        "measure": budget.measure,
        "budget": budget.amount,
        "clip": budget.clip,
        "confidence": budget.confidence,
        "full_loops": list(result.cap),
        "rule": score.setting.rule,
        "exit_policy": score.setting.exit_policy,
        "num_loops": list(score.setting.num_loops),
        "p_value": None if winner is None else winner.p_value,
        "mean_excess": float(excess.mean()),
        "mean_clipped_excess": float(np.clip(excess, 0, budget.clip).mean()),
        "mean_steps": score.steps,
        "cost": {"unit": result.cost_unit, "chosen": result.cost(score), "full": result.cost(result.full)},
    }


def write(checkpoint: Path, promised: dict[str, Any]) -> None:
    """Puts the setting into the configs and the promise beside them. A card that nobody has edited is made anew."""
    card = checkpoint / "README.md"
    is_as_made = card.exists() and card.read_text() == str(render_card(checkpoint))
    loops = promised["num_loops"]
    num_loops = loops[0] if len(set(loops)) == 1 else loops
    configs = {name: json.loads((checkpoint / f"{name}.json").read_text()) for name in ("config", "generation_config")}
    configs["config"]["num_loops"] = num_loops
    # Without `_from_model_config` the fields that are not transformers' own would be lost on load.
    configs["generation_config"] |= {"num_loops": num_loops, "_from_model_config": False}
    configs["generation_config"]["exit_policy"] = promised["exit_policy"]
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
    """The winner, the best of every rule and the hull of fixed depth, with what both parts showed."""
    unit = "ms/token" if result.cost_unit == "ms" else "MFLOP/token"
    tested = {t.score.setting: t for t in result.tested}
    fixed = [score for score in result.tuning if score.setting.rule == "fixed"]
    points = [(result.cost(score), result.risk_on_tuning(score)) for score in fixed]
    hull = set(zip(*lower_hull(*zip(*points, strict=True)), strict=True))
    rows = []

    def add(kind: str, score: Score) -> None:
        on_calibration = tested.get(score.setting)
        cost = result.cost(score) / (1 if result.cost_unit == "ms" else 1e6)
        shown = ["", "", ""]
        if on_calibration is not None:
            mark = "yes" if on_calibration.holds else "no"
            shown = [_amount(on_calibration.risk, result.budget), f"{on_calibration.p_value:.2g}", mark]
        rows.append([kind, score.setting.rule, describe(score.setting), _numbers(score.steps), f"{cost:.2f}",
                     _amount(result.risk_on_tuning(score), result.budget), *shown])  # fmt: skip

    by_setting = {score.setting: score for score in result.tuning}
    if result.winner is not None:
        add("**winner**", by_setting[result.winner.score.setting])
    for score in sorted(result.runners_up, key=result.cost):
        add("best of its rule", score)
    listed = {score.setting.rule for score in result.runners_up}
    for score in sorted(result.tuning, key=result.cost):
        if score.setting.rule not in listed:
            listed.add(score.setting.rule)
            add("too dear or too risky", score)
    for point, score in sorted(zip(points, fixed, strict=True), key=lambda pair: pair[0]):
        if point in hull:
            add("fixed hull", score)
    add("full depth", result.full_on_tuning)
    header = ["", "rule", "setting", "mean steps", unit, "excess, tuning", "excess, calibration", "p", "promised"]
    return Table("Settings", header, rows)


def describe(setting: Setting) -> str:
    """A setting in a cell of a table."""
    policy = setting.exit_policy
    if policy is None:
        return f"{_loops(list(setting.num_loops))} loops"
    return "; ".join(_short(p) for p in (policy if isinstance(policy, list) else [policy]))


def _short(policy: dict[str, Any]) -> str:
    if "of" in policy:
        return " and ".join(f"{part['name']} {part['threshold']:g}" for part in policy["of"])
    patience = f", patience {policy['patience']}" if policy["patience"] > 1 else ""
    return f"{policy['threshold']:g}{patience}"


def _loops(loops: list[int]) -> str:
    return str(loops[0] if len(set(loops)) == 1 else loops)


def _numbers(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _amount(risk: float, budget: Budget) -> str:
    return f"{risk * budget.clip:.5f}"


def usage(promised: dict[str, Any]) -> str:
    loops = promised["num_loops"]
    return f"model.generate(ids, exit_policy={promised['exit_policy']!r}, num_loops={_loops(loops)})"


def explain(result: Calibration, calibration: Workload) -> str:
    """Where nothing cheaper is promised: why, and how much text it would take."""
    if not result.tested:
        return "Nothing cheaper than full depth was within the budget on the tuning part."
    first, budget = result.tested[0], result.budget
    needed = sequences_needed(budget.alpha, budget.delta, first.risk)
    more = "no amount of text would promise it" if needed is None else f"to promise it takes {needed} sequences"
    return (
        f"The safest setting that was tested, {first.score.setting.rule} {describe(first.score.setting)}, lost "
        f"{_amount(first.risk, budget)} on {len(calibration)} sequences (p = {first.p_value:.2g}): {more}."
    )


def load_workload(
    source: str, model: RecurrentGPT2ForCausalLM, tokenizer, options: argparse.Namespace, budget: Budget
) -> Workload:
    """The text of a file, all of it taken to be held out, or of python-docs what was held out in training; of a task,
    new sequences."""
    if source in available_tasks():
        if not budget.is_accuracy:
            raise ValueError(f"`--source` is the task {source}: give its budget as `--budget-accuracy`, such as 0.001.")
        return Workload.of_task(task_of(model, source), tokenizer, options.tuning + options.calibration, TASK_SEED)
    block_size = options.block_size or model.config.max_position_embeddings
    documents = held_out_documents(Source(source), options.validation_fraction if source == "python-docs" else None)
    blocks = blocks_of(documents, tokenizer, block_size, limit=64 * (options.tuning + options.calibration))
    return Workload.of_text(blocks, budget.is_accuracy)


def full_loops(checkpoint: str, model: RecurrentGPT2ForCausalLM) -> list[int]:
    """What the checkpoint takes for full depth: of an earlier calibration, of its generation config, of its config."""
    earlier = Path(checkpoint) / "calibration.json"
    if earlier.exists():
        return json.loads(earlier.read_text())["full_loops"]
    return model.config.loops_per_group(getattr(model.generation_config, "num_loops", None))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder or name on the Hub")
    parser.add_argument("--source", required=True, help="text: a file, or python-docs; or a task of the checkpoint's")
    budgets = parser.add_mutually_exclusive_group()
    budgets.add_argument("--budget", type=float, default=0.01, help="mean excess loss over full depth, in nats")
    budgets.add_argument(
        "--budget-accuracy", type=float, help="instead: accuracy that may be lost, 0.001 of all labels"
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
    by_accuracy = options.budget_accuracy is not None
    amount = options.budget_accuracy if by_accuracy else options.budget
    budget = Budget(amount, options.clip or (1.0 if by_accuracy else 10 * amount), options.confidence, by_accuracy)
    if options.write and not Path(options.checkpoint).is_dir():
        raise ValueError(f"`--write` needs a checkpoint in a folder, but {options.checkpoint} is none.")
    rules = find_rules([*(options.rules or []), *options.policy], and_registered=options.rules is None)
    model, tokenizer = load_checkpoint(options.checkpoint)
    sizes = (1024, 8192) if options.source in available_tasks() else (64, 512)
    options.tuning, options.calibration = options.tuning or sizes[0], options.calibration or sizes[1]
    workload = load_workload(options.source, model, tokenizer, options, budget)
    tuning, calibration = split(workload, options.tuning, options.calibration, options.seed)
    check_amount(budget, len(tuning), len(calibration))
    names = Path(options.checkpoint).resolve().name, name_of_source(options.source)
    output = options.output or Path("results/calibration") / "-".join(names)
    output.mkdir(parents=True, exist_ok=True)
    check_fingerprint(model, torch.cat([tuning.ids, calibration.ids]), output / "fingerprint.json")
    cap = options.num_loops or full_loops(options.checkpoint, model)
    result = calibrate(model, tuning, calibration, budget, output, rules, cap, options.cost)
    promised = promise(result, name_of_source(options.source), calibration, tuning, options.seed)
    print(settings_table(result).markdown())
    print(f"\n{describe_guarantee(promised)}\n" if result.winner else f"\n{explain(result, calibration)}\n")
    print(usage(promised))
    if options.write:
        write(Path(options.checkpoint), promised)
        print(f"written to {options.checkpoint}: `generate` uses it unless told otherwise.")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
