"""Quality against cost of every exit rule: `python -m evaluation.exit_tradeoff CHECKPOINT --source FILE --output DIR`.

For each policy and threshold, and for fixed depths beside them: cross-entropy and perplexity on held-out text (one
adaptive pass, which is exactly what decoding gives), steps per group, FLOPs, and ms/token of real generation at batch 1
and 8 on the same prompts, in interleaved rounds. Every result is a line of `tradeoff.jsonl`, written when it is there,
so that an interrupted sweep goes on where it stopped; `results.json` has them in the form that a model card is made
from. `accelerate launch` spreads the sweep over processes; times are measured by one of them, afterwards.

Two rules at the same threshold are at different depths. `compare` therefore sets every adaptive result beside fixed
depth at the same mean number of steps, sequence by sequence, with bootstrap intervals.

`--rules` takes rules of your own too (`my_policy.py`, `module:Class`): their thresholds come from what they measure.
"""

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from accelerate import PartialState
from scipy.stats import bootstrap
from tqdm.auto import tqdm

from recurrent_gpt2 import ExitPolicy, RecurrentGPT2ForCausalLM
from recurrent_gpt2.exit_policies import LoopView, exit_policy_to_json, resolve_exit_policy
from training.data import Source
from training.estimate import forward_flops

from .common import (
    Sequences,
    appended,
    describe_loops,
    held_out_documents,
    load_checkpoint,
    loops_of_generate,
    mean_depth,
    read_lines,
    spread_blocks,
)

PAPER_THRESHOLDS = (1e-5, 1e-4, 1e-3, 1e-2)
# A rule is swept over a range that takes it from never to at once: the paper's thresholds and a denser grid.
OF_NORMS = (*PAPER_THRESHOLDS, 0.03, 0.1, 0.2, 0.4, 0.7, 1.0, 2.0, 4.0, 8.0)
OF_RATIOS = (1e-4, 1e-3, 3e-3, 1e-2, 0.03, 0.06, 0.1, 0.2, 0.4)
SWEEPS = {
    "step_norm": ({"name": "step_norm"}, OF_NORMS),
    "step_norm/state": ({"name": "step_norm", "normalize": "state"}, OF_RATIOS),
    "kl": ({"name": "kl"}, (*PAPER_THRESHOLDS, 0.03, 0.1, 0.3, 1.0)),
    "acceleration": ({"name": "acceleration"}, OF_NORMS),
    "acceleration/state": ({"name": "acceleration", "normalize": "state"}, OF_RATIOS),
    "acceleration/step": ({"name": "acceleration", "normalize": "step"}, (0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8)),
}
CAP = 24  # where the checkpoint has none
FIXED_DEPTHS = (*range(1, 9), 10, 12, 16, 24, 32, 48, 64)
MEASURED = 10  # thresholds of a rule that has none in `SWEEPS`


@dataclass(frozen=True)
class Setting:
    """One point of the sweep: a rule with a threshold, or a fixed depth (`rule` "fixed", no policy)."""

    rule: str
    policy: str | None  # JSON, so that settings can be compared and saved
    num_loops: int | tuple[int, ...]  # the cap, or the fixed depth; for all groups or one per group

    def __post_init__(self):
        if isinstance(self.num_loops, list):  # as JSON has it
            object.__setattr__(self, "num_loops", tuple(self.num_loops))

    @property
    def exit_policy(self) -> Any:
        return None if self.policy is None else json.loads(self.policy)

    @property
    def threshold(self) -> float:
        return self.exit_policy["threshold"]


def make_settings(
    rules: list[str],
    cap: int,
    min_loops: int = 1,
    thresholds: list[float] | None = None,
    depths: Sequence[int] = FIXED_DEPTHS,
) -> list[Setting]:
    """The sweep: fixed depths up to the cap and beyond, and every rule at every threshold."""
    settings = [Setting("fixed", None, depth) for depth in sorted({*depths, cap})]
    for rule in rules:
        if rule not in SWEEPS:
            raise ValueError(f"`--rules` has {rule!r}, but must be among {', '.join(SWEEPS)}.")
        policy, defaults = SWEEPS[rule]
        for threshold in thresholds or defaults:
            full = ExitPolicy.from_dict({**policy, "threshold": threshold, "min_loops": min_loops}).to_dict()
            settings.append(Setting(rule, json.dumps(full, sort_keys=True), cap))
    return settings


def measured_settings(
    model: RecurrentGPT2ForCausalLM,
    blocks: torch.Tensor,
    rules: list[Any],
    cap: int,
    min_loops: int = 1,
    thresholds: list[float] | None = None,
) -> list[Setting]:
    """The sweep of rules (of `exit_search.find_rules`) that have no thresholds here: of those that take the rule from
    never to at once on these blocks, a few."""
    from .exit_search import Workload, rule_ladders  # which is made of this module's settings

    settings = []
    for rule in rules:
        of_rule = replace(rule, policy={**rule.policy, "min_loops": min_loops})
        loops = tuple([cap] * len(model.config.loop_groups))
        rungs = [rung[0] for rung in rule_ladders(model, Workload.of_text(blocks), of_rule, loops)[0].rungs]
        if thresholds is not None and "of" not in rule.policy:
            rungs = [{**rungs[0], "threshold": threshold} for threshold in thresholds]
        places = np.unique(np.linspace(0, len(rungs) - 1, min(MEASURED, len(rungs))).round().astype(int))
        settings += [Setting(rule.label, json.dumps(rungs[place], sort_keys=True), cap) for place in places]
    return settings


class Measured:
    """What was measured at a `setting`, in fields of a dataclass: a line of JSON, and back."""

    def to_json(self) -> str:
        return json.dumps({**vars(self), "setting": vars(self.setting)})

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return cls(**{**values, "setting": Setting(**values["setting"])})


@dataclass
class Result(Measured):
    setting: Setting
    cross_entropy: float
    perplexity: float
    mean_steps: list[float]  # per group
    std_steps: list[float]
    flops_per_token: float  # decoding for the rule included
    sequence_losses: list[float]  # mean cross-entropy of every block, for paired comparisons
    sequence_depths: list[float]  # and mean steps of a looped layer
    ms_per_token: dict[str, float] = field(default_factory=dict)  # batch size -> median
    group_sizes: list[int] | None = None  # layers of each group

    @property
    def mean_depth(self) -> float:
        """Mean steps of a looped layer: groups count by their layers. The x-axis of the fair comparison."""
        return float(np.average(self.mean_steps, weights=self.group_sizes))


@torch.no_grad()
def score(
    model: RecurrentGPT2ForCausalLM, blocks: torch.Tensor | Sequences, setting: Setting, batch_size: int = 8
) -> Result:
    """Quality and steps of a setting, in one adaptive pass over each block of text, or over sequences of a task."""
    sequences = Sequences.of_text(blocks) if isinstance(blocks, torch.Tensor) else blocks
    losses, steps, depths, decoded = [], [], [], [0]
    policies = resolve_exit_policy(setting.exit_policy, len(model.config.loop_groups))
    counted = [counting(policy, decoded) for policy in policies]
    for start in range(0, len(sequences), batch_size):
        rows = slice(start, start + batch_size)
        ids, answers = (values[rows].to(model.device) for values in (sequences.ids, sequences.answers))
        asked = torch.from_numpy(sequences.asked[rows]).to(model.device)
        output = model(ids, exit_policy=counted, num_loops=setting.num_loops, use_cache=False)
        logits = output.logits.float().transpose(1, 2)
        nats = torch.nn.functional.cross_entropy(logits, answers, reduction="none").double()
        losses.append((nats * asked).sum(1) / asked.sum(1))
        steps.append(output.loop_steps.flatten(0, 1).double())
        depths.append(mean_depth(output.loop_steps, model.config).mean(1))
    losses, steps = torch.cat(losses), torch.cat(steps)
    mean, mean_steps = losses.mean().item(), steps.mean(0).tolist()
    flops = forward_flops(model.config, mean_steps, sequences.ids.shape[1] // 2)
    flops += decoded[0] / sequences.ids.numel() * 2 * model.config.hidden_size * model.config.vocab_size
    return Result(
        setting,
        cross_entropy=mean,
        perplexity=float(np.exp(mean)),
        mean_steps=mean_steps,
        std_steps=steps.std(0, correction=0).tolist(),
        flops_per_token=flops,
        sequence_losses=losses.tolist(),
        sequence_depths=torch.cat(depths).tolist(),
        group_sizes=[len(group) for group in model.config.loop_groups],
    )


def cap_of(model: RecurrentGPT2ForCausalLM) -> int:
    """The cap of the checkpoint's default policy, or `CAP` where it has none."""
    own = model.generation_config
    if getattr(own, "exit_policy", None) is None:
        return CAP  # the loops of a checkpoint without a policy are a depth, and no cap
    return max(model.config.loops_per_group(getattr(own, "num_loops", None)))


def score_loops(
    model: RecurrentGPT2ForCausalLM, blocks: torch.Tensor, exit_policy: Any, num_loops: list[int], batch_size: int = 8
) -> dict[str, Any]:
    """What a policy gives, in words and numbers: for the one that `generate` uses unless told otherwise."""
    policy = None if exit_policy is None else json.dumps(exit_policy_to_json(exit_policy))
    result = score(model, blocks, Setting("default", policy, num_loops), batch_size)
    measured = {name: getattr(result, name) for name in ("cross_entropy", "perplexity", "mean_depth", "mean_steps")}
    return {"loops": describe_loops(exit_policy, num_loops), **measured}


def counting(policy: Callable | None, decoded: list[int]) -> Callable | None:
    """The policy, with the tokens that it decodes added up."""
    if policy is None:
        return None

    def counted(view: LoopView) -> torch.Tensor:
        def decode(states: torch.Tensor) -> torch.Tensor:
            decoded[0] += states.shape[0]
            return view.decode(states)

        return policy(replace(view, decode=decode))

    return counted


def measure_times(
    model: RecurrentGPT2ForCausalLM,
    prompts: torch.Tensor,
    results: list[Result],
    file: Path,
    batch_sizes: tuple[int, ...] = (1, 8),
    new_tokens: int = 8,
    rounds: int = 3,
) -> None:
    """Sets `ms_per_token`: all settings in turn, round after round, on the same prompts; medians. Each time is a line
    of `file`, and what is there already is not measured again. Batch 1 takes the first prompts one by one."""
    times = {(size, turn, Setting(**setting)): ms for size, turn, setting, ms in read_lines(file)}
    places = [(size, turn, r.setting) for size in batch_sizes for turn in range(rounds) for r in results]
    todo = [place for place in places if place not in times]

    def generate(batch: torch.Tensor, setting: Setting) -> None:
        model.generate(
            batch, attention_mask=torch.ones_like(batch), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
            do_sample=False, pad_token_id=0, exit_policy=setting.exit_policy, num_loops=setting.num_loops,
        )  # fmt: skip

    if todo:
        generate(prompts[:1], results[0].setting)  # the first call is slower
    with appended(file) as lines:
        for size, turn, setting in tqdm(todo, desc="generation", unit=" runs", leave=False):
            batches = prompts[:2].split(1) if size == 1 else [prompts[:size]]
            started = time.perf_counter()
            for batch in batches:
                generate(batch, setting)
            tokens = new_tokens * sum(len(batch) for batch in batches)
            times[size, turn, setting] = 1000 * (time.perf_counter() - started) / tokens
            lines.write(json.dumps([size, turn, vars(setting), times[size, turn, setting]]) + "\n")
            lines.flush()
    for size in batch_sizes:
        for result in results:
            rounds_of = [times[size, turn, result.setting] for turn in range(rounds)]
            result.ms_per_token[str(size)] = float(np.median(rounds_of))


def pool(repetitions: list[list[Result]]) -> list[Result]:
    """The same settings measured on several sets of sequences, as if on all of them at once. Times are the first's."""
    pooled = []
    for results in zip(*repetitions, strict=True):
        losses = [loss for result in results for loss in result.sequence_losses]
        means, spreads = (np.array([getattr(r, name) for r in results]) for name in ("mean_steps", "std_steps"))
        mean = float(np.mean(losses))
        pooled.append(
            Result(
                results[0].setting,
                cross_entropy=mean,
                perplexity=float(np.exp(mean)),
                mean_steps=means.mean(0).tolist(),
                std_steps=np.sqrt((spreads**2).mean(0) + means.var(0)).tolist(),
                flops_per_token=float(np.mean([r.flops_per_token for r in results])),
                sequence_losses=losses,
                sequence_depths=[depth for result in results for depth in result.sequence_depths],
                ms_per_token=results[0].ms_per_token,
                group_sizes=results[0].group_sizes,
            )
        )
    return pooled


def recommended(results: list[Result], tolerance: float = 0.01) -> dict[str, Result]:
    """For each rule, its cheapest setting within `tolerance` nats of the best fixed depth up to the cap, if any."""
    cap = max((r.setting.num_loops for r in results if r.setting.rule != "fixed"), default=math.inf)
    best = min(r.cross_entropy for r in results if r.setting.rule == "fixed" and r.setting.num_loops <= cap)
    good = [result for result in results if result.cross_entropy <= best + tolerance]
    rules = dict.fromkeys(result.setting.rule for result in good)
    return {rule: min((r for r in good if r.setting.rule == rule), key=lambda r: r.mean_depth) for rule in rules}


def read_results(output: Path) -> dict[Setting, Result]:
    """All results of a sweep so far, whichever process wrote them."""
    results = {}
    for file in sorted(output.glob("tradeoff*.jsonl")):
        for values in read_lines(file):
            result = Result.from_dict(values)
            known = results.get(result.setting)
            if known is None or result.ms_per_token:
                results[result.setting] = result
    return results


@dataclass
class Comparison:
    """A rule against fixed depth at the same mean steps: the difference in cross-entropy, and its 95 % interval."""

    setting: Setting
    mean_depth: float
    difference: float  # negative: the rule is better
    low: float
    high: float


def compare(results: list[Result], seed: int = 0) -> list[Comparison]:
    """Every adaptive result beside fixed depth at its mean steps, sequence by sequence.

    Fixed depth between two whole depths is the line between them, as if a share of the texts had the one and the rest
    the other. Intervals are of a bootstrap over sequences, in which the rule's mean steps vary as its losses do.
    """
    fixed = sorted((r for r in results if r.setting.rule == "fixed"), key=lambda r: r.mean_depth)
    everything, comparisons = np.arange(len(fixed[0].sequence_losses)), []
    for result in results:
        if result.setting.rule == "fixed" or not fixed[0].mean_depth <= result.mean_depth <= fixed[-1].mean_depth:
            continue
        difference = partial(difference_from_fixed, result=result, fixed=fixed)
        mean = low = high = float(difference(everything))
        if len(everything) > 1:
            how = {"n_resamples": 2000, "method": "percentile", "rng": np.random.default_rng(seed)}
            low, high = bootstrap((everything,), difference, vectorized=True, **how).confidence_interval
        comparisons.append(Comparison(result.setting, result.mean_depth, mean, float(low), float(high)))
    return comparisons


def difference_from_fixed(sequences: np.ndarray, result: Result, fixed: list[Result], axis: int = -1) -> np.ndarray:
    """Of sets of sequences [..., n]: a rule's mean loss minus that of fixed depth at the rule's mean steps there."""
    depths = np.array([r.mean_depth for r in fixed])
    losses = np.array([r.sequence_losses for r in fixed])  # [depths, sequences]
    mean_depths = np.array(result.sequence_depths)[sequences].mean(axis)
    upper = np.clip(np.searchsorted(depths, mean_depths), 1, len(depths) - 1)
    share = (mean_depths - depths[upper - 1]) / (depths[upper] - depths[upper - 1])
    below, above = (losses[place[..., None], sequences].mean(axis) for place in (upper - 1, upper))
    return np.array(result.sequence_losses)[sequences].mean(axis) - (1 - share) * below - share * above


def processes() -> PartialState:
    """This process among those that were launched."""
    return PartialState(cpu=not torch.accelerator.is_available())


def fingerprint(model: RecurrentGPT2ForCausalLM, blocks: torch.Tensor | Sequences) -> str:
    """A digest of a model and a text."""
    elsewhere = ("_name_or_path", "num_loops")  # a setting says its own loops
    config = {name: value for name, value in model.config.to_dict().items() if name not in elsewhere}
    ids = blocks.ids if isinstance(blocks, Sequences) else blocks
    digest = hashlib.blake2b(str(config).encode() + ids.numpy().tobytes())
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def check_fingerprint(model: RecurrentGPT2ForCausalLM, blocks: torch.Tensor | Sequences, file: Path) -> None:
    """Writes down which model and text a folder's results are of, or fails where they are of others."""
    digest = fingerprint(model, blocks)
    if not file.exists():
        file.write_text(json.dumps(digest))
    elif json.loads(file.read_text()) != digest:
        raise ValueError(
            f"`--output` {file.parent} has results of another checkpoint or text: delete it, or choose another folder."
        )


def run_sweep(
    model, blocks: torch.Tensor | Sequences, settings: list[Setting], output: Path, batch_size: int = 8
) -> list[Result]:
    """Scores all settings that are not there yet, this process its share of them, and returns all results."""
    state = processes()
    output.mkdir(parents=True, exist_ok=True)
    if state.is_main_process:
        check_fingerprint(model, blocks, output / "fingerprint.json")
    done = read_results(output)
    state.wait_for_everyone()  # all have read the same before one of them writes
    mine = [setting for setting in settings if setting not in done][state.process_index :: state.num_processes]
    file = output / (f"tradeoff-{state.process_index}.jsonl" if state.num_processes > 1 else "tradeoff.jsonl")
    with appended(file) as lines:
        for setting in tqdm(mine, desc="scoring", unit=" settings", leave=False, disable=not state.is_main_process):
            lines.write(score(model, blocks, setting, batch_size).to_json() + "\n")
            lines.flush()
    state.wait_for_everyone()
    done = read_results(output)
    return [done[setting] for setting in settings]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder or name on the Hub")
    parser.add_argument("--source", required=True, help="text: a file, or python-docs")
    parser.add_argument("--validation_fraction", type=float, help="use only the documents held out with this fraction")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--rules",
        nargs="+",
        default=list(SWEEPS),
        help=f"among {', '.join(SWEEPS)}; or any registered, my_policy.py, module:Class or JSON",
    )
    parser.add_argument("--thresholds", nargs="+", type=float, help="instead of each rule's own")
    parser.add_argument(
        "--num_loops", type=int, help=f"the cap; the checkpoint's when left out, or {CAP} if it has none"
    )
    parser.add_argument(
        "--depths", nargs="+", type=int, default=list(FIXED_DEPTHS), help="fixed depths beside the rules"
    )
    parser.add_argument("--min_loops", type=int, default=1, help="least steps of every rule")
    parser.add_argument("--blocks", type=int, default=32, help="blocks of text to score")
    parser.add_argument("--block_size", type=int, help="tokens of a block; the model's positions when left out")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="of measuring times; 0: none")
    options = parser.parse_args(arguments)
    from .exit_search import find_rules  # which is made of this module's settings

    others = find_rules([rule for rule in options.rules if rule not in SWEEPS])
    swept = [rule for rule in options.rules if rule in SWEEPS]
    model, tokenizer = load_checkpoint(options.checkpoint)
    cap = cap_of(model) if options.num_loops is None else options.num_loops
    settings = make_settings(swept, cap, options.min_loops, options.thresholds, options.depths)
    block_size = options.block_size or model.config.max_position_embeddings
    documents = held_out_documents(Source(options.source), options.validation_fraction)
    blocks = spread_blocks(documents, tokenizer, block_size, options.blocks)
    settings += measured_settings(model, blocks, others, cap, options.min_loops, options.thresholds)
    results = run_sweep(model, blocks, settings, options.output, options.batch_size)
    untimed = [result for result in results if not result.ms_per_token]
    if processes().is_main_process and options.rounds > 0 and untimed:
        prompts = blocks[:, : max(block_size // 4, 1)].repeat(-(-8 // len(blocks)), 1)[:8]
        fast, _ = load_checkpoint(options.checkpoint, optimize=True)
        measure_times(fast, prompts, results, options.output / "times.jsonl", rounds=options.rounds)
        with appended(options.output / "tradeoff.jsonl") as lines:
            lines.writelines(result.to_json() + "\n" for result in results)
        (options.output / "times.jsonl").unlink()
    if processes().is_main_process:
        rows = card_rows(results, Path(options.source).name)
        (options.output / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
        print_table(results)
        default = score_loops(model, blocks, **loops_of_generate(model), batch_size=options.batch_size)
        print(f"rules: at most {cap} loops\n{describe_default(default)}")


def card_rows(results: list[Result], dataset: str) -> list[dict[str, Any]]:
    """The results as `results.json` of a checkpoint, which its model card is made from."""
    rows = []
    for result in results:
        row = {"dataset": dataset, "policy": result.setting.exit_policy, "num_loops": result.setting.num_loops}
        row |= {"mean_steps": result.mean_depth, "perplexity": result.perplexity}
        rows.append(row | {"ms_per_token": result.ms_per_token.get("1")})
    return rows


def describe_default(default: dict[str, Any]) -> str:
    numbers = f"cross-entropy {default['cross_entropy']:.4f} at {default['mean_depth']:.2f} mean steps"
    return f"what `generate` uses unless told otherwise ({default['loops']}): {numbers}"


def describe_threshold(policy: dict[str, Any]) -> str:
    """A policy's threshold, and its patience where that is more than one, in a cell of a table."""
    if "of" in policy:
        return " and ".join(f"{part['name']} {part['threshold']:g}" for part in policy["of"])
    patience = f", patience {policy['patience']}" if policy["patience"] > 1 else ""
    return f"{policy['threshold']:g}{patience}"


def print_table(results: list[Result]) -> None:
    against_fixed = {comparison.setting: comparison for comparison in compare(results)}
    print(
        "| rule | threshold | mean steps | cross-entropy | against fixed depth [95 %] | ms/token (1) | ms/token (8) |"
    )
    print("|---|---|---|---|---|---|---|")
    for result in results:
        policy, comparison = result.setting.exit_policy, against_fixed.get(result.setting)
        threshold = describe_threshold(policy) if policy else f"{result.setting.num_loops} loops"
        difference = ""
        if comparison is not None:
            difference = f"{comparison.difference:+.4f} [{comparison.low:+.4f}, {comparison.high:+.4f}]"
        times = [f"{result.ms_per_token[size]:.2f}" if size in result.ms_per_token else "" for size in ("1", "8")]
        cells = [result.setting.rule, threshold, f"{result.mean_depth:.2f}", f"{result.cross_entropy:.4f}", difference]
        print(f"| {' | '.join([*cells, *times])} |")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
