"""The paper's claims, each beside what was measured here and a plain verdict.

What a verdict takes is fixed in this file, and not changed to suit a model that it is then applied to.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..exit_tradeoff import Comparison, Result, compare

HOLDS, IN_PART, DOES_NOT = "holds", "holds in part", "does not hold"
UNTESTABLE = "can't be tested at this size"
NOT_MEASURED = "not measured"

SMALL_STEP = 0.1  # of the first step's norm: a step below it has "shrunk"
SETTLED_RANGE = 0.1  # cosines that vary by less over the last third of the steps have "settled"
PAPER_COSINES = (0.5, 0.65)
LARGE_RATIO = 5  # a drift-to-loop ratio above it is "much larger than 1"
FLAT = 0.01  # nats, about 1 % of perplexity
CLEAR = 0.02  # by which late cosines must vary less to be "steadier"
EARLY = 0.05  # of training: where "over training" starts, since before it little is trained
SLOWER = 1.05  # a time ratio above it is "slower"
LEAST_BLOCKS = 16  # for intervals of differences
# Where all loops but one gain less than this over a single one, flat perplexity is no merit of an exit rule.
LEAST_GAIN = 0.1  # nats


@dataclass
class Claim:
    claim: str
    paper: str
    measured: str
    verdict: str


def check_claims(
    now: dict[str, Any], history: list[dict[str, Any]], results: list[Result], state_init: str = "noise"
) -> list[Claim]:
    """`now`: the geometry of the model; `history`: that of its training, if known; `results`: a sweep of rules."""
    return [
        shrinking(now),
        settling(now),
        strengthening(history),
        *drifting(now, history, state_init),
        accelerating(results),
        step_norm_degrading(results),
        kl_keeping(results),
        *ahead_at_cost(results),
    ]


def steps_to_shrink(norms: list[float]) -> int | None:
    """The first step whose mean norm is below a tenth of the first step's."""
    small = np.flatnonzero(np.array(norms) < SMALL_STEP * norms[0])
    return int(small[0]) if len(small) else None


def settled_cosine(group: dict[str, Any]) -> tuple[float, float] | None:
    """Mean and range of the cosine over the last third of the steps that are above rounding noise for most tokens."""
    above = np.array(group["above_floor"]) > 0.5
    usable = above[1:] & above[:-1]
    cosines = np.array(group["step_cosine"]["mean"], dtype=float)[usable]
    if len(cosines) < 4:
        return None
    last = cosines[-max(len(cosines) // 3, 3) :]
    return float(last.mean()), float(last.max() - last.min())


def shrinking(line: dict[str, Any]) -> Claim:
    norms = [group["step_norm"]["mean"] for group in line["groups"]]
    steps, later = [steps_to_shrink(values) for values in norms], [steps_to_shrink(values[1:]) for values in norms]
    fast = [step is not None and step <= 10 for step in steps]

    def shown(steps: list[int | None]) -> str:
        return ", ".join("never" if step is None else str(step) for step in steps)

    measured = (
        f"the mean step norm is below a tenth of the first after {shown(steps)} steps (per group); below a tenth "
    )
    measured += f"of the second, which no longer starts from s(0), after {shown(later)}"
    return Claim("Step sizes shrink within 5-10 steps", "rapid decay in all three groups", measured, _verdict(fast))


def settling(line: dict[str, Any]) -> Claim:
    settled = [settled_cosine(group) for group in line["groups"]]
    steady = [value is not None and value[1] < SETTLED_RANGE for value in settled]
    low, high = PAPER_COSINES
    in_range = [value is not None and low <= value[0] <= high for value in settled]
    shown = ", ".join("too few steps" if v is None else f"{v[0]:+.2f} (range {v[1]:.2f})" for v in settled)
    if all(steady) and not all(in_range):
        verdict = IN_PART
    else:
        verdict = _verdict([a and b for a, b in zip(steady, in_range, strict=True)], partly=any(steady))
    return Claim("Cosines of consecutive steps settle", f"at {low} to {high}", f"at {shown} (per group)", verdict)


def strengthening(history: list[dict[str, Any]]) -> Claim:
    claim, paper = "Both strengthen over training", "faster decay and steadier angles in later checkpoints"
    if len(history) < 2:
        return Claim(claim, paper, "the checkpoint has no record of its geometry over training", NOT_MEASURED)
    last = history[-1]
    first = next(line for line in history if line["step"] >= min(EARLY * last["step"], history[-2]["step"]))

    def decays(line: dict[str, Any]) -> list[float]:
        norms = [group["step_norm"]["mean"] for group in line["groups"]]
        return [values[min(5, len(values) - 1)] / values[0] for values in norms]

    def spreads(line: dict[str, Any]) -> list[float | None]:
        settled = [settled_cosine(group) for group in line["groups"]]
        return [None if value is None else value[1] for value in settled]

    faster = [late < 0.9 * early for early, late in zip(decays(first), decays(last), strict=True)]
    # A loop that converges in so few steps that there are no late cosines says nothing about them.
    pairs = [pair for pair in zip(spreads(first), spreads(last), strict=True) if None not in pair]
    steadier = [late < early - CLEAR for early, late in pairs]
    measured = (
        f"norm of step 5 over step 0: {_list(decays(first))} at step {first['step']:,}, {_list(decays(last))} at the "
        f"end; range of late cosines: {_list(spreads(first))}, then {_list(spreads(last))}"
    )
    return Claim(claim, paper, measured, _verdict(faster + steadier))


def drifting(now: dict[str, Any], history: list[dict[str, Any]], state_init: str) -> list[Claim]:
    if not now["drift_to_loop_ratio"]:
        return []

    def ratios(line: dict[str, Any], kind: str) -> list[float]:
        return [boundary[kind]["mean"] for boundary in line["drift_to_loop_ratio"]]

    loops = len(now["groups"][0]["step_norm"]["mean"])
    over_training = [ratio for line in history for ratio in ratios(line, "as_printed")]
    printed = f"{_list(ratios(now, 'as_printed'))} with K = {loops}"
    if over_training:
        printed += f"; {min(over_training):.1f} to {max(over_training):.1f} over training"
    if state_init == "noise":
        printed += "; s(0) is noise, which makes it large by construction"
    verdict = _size_verdict(ratios(now, "as_printed") + over_training)
    net = f"{_list(ratios(now, 'net'))} with K = {loops}"
    return [
        Claim(
            "Drift between blocks dwarfs loop steps (eq. 2)", "much larger than 1 at all checkpoints", printed, verdict
        ),
        Claim("The same with the net move of the next group", "not reported", net, _size_verdict(ratios(now, "net"))),
    ]


def accelerating(results: list[Result]) -> Claim:
    claim, paper = "Acceleration cuts latency from 1e-5 to 1e-2 at flat perplexity", "580 to 360 ms/token, -38 %"
    ends = [at_threshold(results, "acceleration", threshold) for threshold in (1e-5, 1e-2)]
    if None in ends or not all("1" in end.ms_per_token for end in ends):
        return Claim(claim, paper, "these thresholds were not timed", NOT_MEASURED)
    slow, fast = ends
    cut = 1 - fast.ms_per_token["1"] / slow.ms_per_token["1"]
    change = fast.cross_entropy - slow.cross_entropy
    measured = (
        f"{slow.ms_per_token['1']:.1f} to {fast.ms_per_token['1']:.1f} ms/token ({-100 * cut:+.0f} %), mean steps "
        f"{slow.mean_depth:.1f} to {fast.mean_depth:.1f} (cap {slow.setting.num_loops}), cross-entropy {change:+.4f}"
    )
    kept = change <= FLAT
    verdict = HOLDS if kept and cut >= 0.3 else IN_PART if kept and cut >= 0.1 else DOES_NOT
    return _unless_loops_do_nothing(Claim(claim, paper, measured, verdict), results)


def step_norm_degrading(results: list[Result]) -> Claim:
    claim, paper = "Step-norm degrades beyond 1e-3", "sharply at 1e-2"
    ends = [at_threshold(results, "step_norm", threshold) for threshold in (1e-3, 1e-2)]
    if None in ends:
        return Claim(claim, paper, "these thresholds were not measured", NOT_MEASURED)
    change = ends[1].cross_entropy - ends[0].cross_entropy
    loosest = max((r for r in results if r.setting.rule == "step_norm"), key=lambda result: result.setting.threshold)
    measured = (
        f"cross-entropy {change:+.4f} from 1e-3 to 1e-2 (mean steps {ends[0].mean_depth:.1f} to "
        f"{ends[1].mean_depth:.1f}); {loosest.cross_entropy - ends[0].cross_entropy:+.4f} at "
        f"{loosest.setting.threshold:g}, the largest threshold, with {loosest.mean_depth:.1f} steps"
    )
    return _unless_loops_do_nothing(Claim(claim, paper, measured, HOLDS if change > FLAT else DOES_NOT), results)


def kl_keeping(results: list[Result]) -> Claim:
    claim, paper = "KL keeps quality but is slower", "flat perplexity, slowest at every threshold"
    losses, ratios = [], {"acceleration": [], "step_norm": []}
    for threshold in (1e-5, 1e-4, 1e-3, 1e-2):
        kl = at_threshold(results, "kl", threshold)
        others = {rule: at_threshold(results, rule, threshold) for rule in ratios}
        if kl is None or any(r is None or "1" not in r.ms_per_token for r in (kl, *others.values())):
            continue
        losses.append(kl.cross_entropy)
        for rule, other in others.items():
            ratios[rule].append(kl.ms_per_token["1"] / other.ms_per_token["1"])
    if len(losses) < 2:
        return Claim(claim, paper, "too few thresholds were timed", NOT_MEASURED)
    spread = max(losses) - min(losses)
    shown = "; ".join(f"over {rule}'s {_list(values)}" for rule, values in ratios.items())
    measured = f"cross-entropy varies by {spread:.4f}; its time at the same threshold, from tight to loose, {shown}"
    slower = all(ratio > SLOWER for values in ratios.values() for ratio in values)
    return _unless_loops_do_nothing(Claim(claim, paper, measured, _verdict([spread <= FLAT, slower])), results)


def ahead_at_cost(results: list[Result]) -> list[Claim]:
    """The fair comparison: rules beside fixed depth at the same mean number of steps."""
    return [ahead_of_fixed(results, rule) for rule in ("acceleration", "step_norm", "kl")]


def ahead_of_fixed(results: list[Result], rule: str) -> Claim:
    claim, paper = f"At the same mean steps, {rule} beats fixed depth", "not compared"
    # At the cap a rule is fixed depth.
    comparisons = [c for c in compare(results) if c.setting.rule == rule and c.mean_depth < c.setting.num_loops - 0.5]
    if not comparisons or len(results[0].sequence_losses) < LEAST_BLOCKS:
        return Claim(claim, paper, f"it takes {LEAST_BLOCKS} blocks and thresholds that fire", NOT_MEASURED)
    better, worse = sum(c.high < 0 for c in comparisons), sum(c.low > 0 for c in comparisons)
    best = min(comparisons, key=lambda c: c.difference)
    measured = (
        f"better at {better}, worse at {worse} of {len(comparisons)} thresholds (95 % intervals); at best "
        f"{_interval(best)} nats, at {best.mean_depth:.1f} steps"
    )
    matters = best.difference < -FLAT and best.high < 0
    verdict = HOLDS if matters and better > len(comparisons) / 2 else IN_PART if matters else DOES_NOT
    return Claim(claim, paper, measured, verdict)


def at_threshold(results: list[Result], rule: str, threshold: float) -> Result | None:
    found = [r for r in results if r.setting.rule == rule and r.setting.exit_policy["threshold"] == threshold]
    return found[0] if found else None


def gain_of_loops(results: list[Result]) -> float | None:
    """Cross-entropy with one loop minus that with the best fixed depth."""
    fixed = {r.setting.num_loops: r.cross_entropy for r in results if r.setting.rule == "fixed"}
    return fixed[1] - min(fixed.values()) if 1 in fixed else None


def _unless_loops_do_nothing(claim: Claim, results: list[Result]) -> Claim:
    gain = gain_of_loops(results)
    if gain is None or gain >= LEAST_GAIN:
        return claim
    measured = f"{claim.measured}; but all loops together gain only {gain:.3f} nats over a single one"
    return Claim(claim.claim, claim.paper, measured, UNTESTABLE)


def _verdict(parts: list[bool], partly: bool = False) -> str:
    return HOLDS if all(parts) else IN_PART if any(parts) or partly else DOES_NOT


def _size_verdict(ratios: list[float]) -> str:
    return HOLDS if min(ratios) >= LARGE_RATIO else IN_PART if min(ratios) > 1 else DOES_NOT


def _interval(comparison: Comparison) -> str:
    return f"{comparison.difference:+.4f} [{comparison.low:+.4f}, {comparison.high:+.4f}]"


def _list(values: list[float | None]) -> str:
    return ", ".join("too few steps" if value is None else f"{value:.2f}" for value in values)
