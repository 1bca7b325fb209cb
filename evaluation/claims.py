"""The paper's claims, each beside what was measured here and a plain verdict.

What a verdict takes is fixed in this file, before any number is seen.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .exit_tradeoff import Comparison, Result, compare

HOLDS, IN_PART, DOES_NOT = "holds", "holds in part", "does not hold"
UNTESTABLE = "can't be tested at this size"
NOT_MEASURED = "not measured"

SMALL_STEP = 0.1  # of the first step's norm: a step below it has "shrunk"
SETTLED_RANGE = 0.1  # cosines that vary by less over the last third of the steps have "settled"
PAPER_COSINES = (0.5, 0.65)
LARGE_RATIO = 5  # a drift-to-loop ratio above it is "much larger than 1"
FLAT = 0.01  # nats, about 1 % of perplexity
# Where all loops but one gain less than this over a single one, flat perplexity is no merit of an exit rule.
LEAST_GAIN = 0.1  # nats


@dataclass
class Claim:
    claim: str
    paper: str
    measured: str
    verdict: str


def check_claims(geometry: list[dict[str, Any]] | None, results: list[Result]) -> list[Claim]:
    """`geometry`: measurements over training, the last one of the finished model; `results`: a sweep of exit rules."""
    claims = []
    if geometry:
        claims += [shrinking(geometry[-1]), settling(geometry[-1]), strengthening(geometry), *drifting(geometry)]
    return [*claims, accelerating(results), step_norm_degrading(results), kl_keeping(results), *ahead_at_cost(results)]


def steps_to_shrink(norms: list[float]) -> int | None:
    """The first step whose mean norm is below a tenth of the first step's."""
    small = np.flatnonzero(np.array(norms) < SMALL_STEP * norms[0])
    return int(small[0]) if len(small) else None


def settled_cosine(group: dict[str, Any]) -> tuple[float, float] | None:
    """Mean and range of the cosine over the last third of the steps that are above rounding noise for most tokens."""
    above = np.array(group["above_floor"]) > 0.5
    usable = above[1:] & above[:-1]
    cosines = np.array(group["step_cosine"]["mean"], dtype=float)[usable]
    if len(cosines) < 3:
        return None
    last = cosines[-max(len(cosines) // 3, 2) :]
    return float(last.mean()), float(last.max() - last.min())


def shrinking(line: dict[str, Any]) -> Claim:
    steps = [steps_to_shrink(group["step_norm"]["mean"]) for group in line["groups"]]
    fast = [step is not None and step <= 10 for step in steps]
    shown = ", ".join("never" if step is None else str(step) for step in steps)
    return Claim(
        "Step sizes shrink within 5-10 steps", "rapid decay in all three groups",
        f"the mean step norm is below a tenth of the first at step {shown} (per group)", _verdict(fast),
    )  # fmt: skip


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


def strengthening(geometry: list[dict[str, Any]]) -> Claim:
    claim, paper = "Both strengthen over training", "faster decay and steadier angles in later checkpoints"
    if len(geometry) < 2:
        return Claim(claim, paper, "the checkpoint has no record of its geometry over training", NOT_MEASURED)
    first, last = geometry[0], geometry[-1]

    def decay(line: dict[str, Any]) -> list[float]:
        return [group["step_norm"]["mean"][min(5, len(group["step_norm"]["mean"]) - 1)] / group["step_norm"]["mean"][0]
                for group in line["groups"]]  # fmt: skip

    def spread(line: dict[str, Any]) -> list[float]:
        settled = [settled_cosine(group) for group in line["groups"]]
        return [np.nan if value is None else value[1] for value in settled]

    faster = [late < early for early, late in zip(decay(first), decay(last), strict=True)]
    steadier = [late < early for early, late in zip(spread(first), spread(last), strict=True)]
    measured = (
        f"norm of step 5 over step 0: {_list(decay(first))} at step {first['step']:,}, {_list(decay(last))} at last; "
        f"range of late cosines: {_list(spread(first))}, then {_list(spread(last))}"
    )
    return Claim(claim, paper, measured, _verdict(faster + steadier))


def drifting(geometry: list[dict[str, Any]]) -> list[Claim]:
    if not geometry[-1]["drift_to_loop_ratio"]:
        return []

    def ratios(kind: str) -> list[float]:
        return [boundary[kind]["mean"] for boundary in geometry[-1]["drift_to_loop_ratio"]]

    loops = len(geometry[-1]["groups"][0]["step_norm"]["mean"])
    paper = "much larger than 1 at all checkpoints"
    over_training = [boundary["as_printed"]["mean"] for line in geometry for boundary in line["drift_to_loop_ratio"]]
    printed = f"{_list(ratios('as_printed'))} with K = {loops}; over training {min(over_training):.1f} to "
    printed += f"{max(over_training):.1f}; a noise start makes it large by construction"
    net = f"{_list(ratios('net'))} with K = {loops}"
    return [
        Claim("Drift between blocks dwarfs loop steps (eq. 2)", paper, printed, _size_verdict(over_training)),
        Claim("The same with the net move of the next group", "not reported", net, _size_verdict(ratios("net"))),
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
        f"{slow.mean_depth:.1f} to {fast.mean_depth:.1f}, cross-entropy {change:+.4f}"
    )
    kept = abs(change) <= FLAT
    verdict = HOLDS if kept and cut >= 0.3 else IN_PART if kept and cut >= 0.1 else DOES_NOT
    return _unless_loops_do_nothing(Claim(claim, paper, measured, verdict), results)


def step_norm_degrading(results: list[Result]) -> Claim:
    claim, paper = "Step-norm degrades beyond 1e-3", "sharply at 1e-2"
    ends = [at_threshold(results, "step_norm", threshold) for threshold in (1e-3, 1e-2)]
    if None in ends:
        return Claim(claim, paper, "these thresholds were not measured", NOT_MEASURED)
    change = ends[1].cross_entropy - ends[0].cross_entropy
    later = sorted((r for r in results if r.setting.rule == "step_norm"), key=lambda r: r.mean_depth)[0]
    measured = (
        f"cross-entropy {change:+.4f} from 1e-3 to 1e-2 (mean steps {ends[0].mean_depth:.1f} to "
        f"{ends[1].mean_depth:.1f}); {later.cross_entropy - ends[0].cross_entropy:+.4f} at "
        f"{later.setting.exit_policy['threshold']:g}, the largest threshold, with {later.mean_depth:.1f} steps"
    )
    return _unless_loops_do_nothing(Claim(claim, paper, measured, HOLDS if change > FLAT else DOES_NOT), results)


def kl_keeping(results: list[Result]) -> Claim:
    claim, paper = "KL keeps quality but is slower", "flat perplexity, slowest at every threshold"
    pairs = [
        (at_threshold(results, "kl", t), at_threshold(results, "acceleration", t)) for t in (1e-5, 1e-4, 1e-3, 1e-2)
    ]
    pairs = [
        (kl, other) for kl, other in pairs if kl and other and "1" in kl.ms_per_token and "1" in other.ms_per_token
    ]
    if len(pairs) < 2:
        return Claim(claim, paper, "too few thresholds were timed", NOT_MEASURED)
    losses = [kl.cross_entropy for kl, _ in pairs]
    flat = max(losses) - min(losses) <= FLAT
    ratios = [kl.ms_per_token["1"] / other.ms_per_token["1"] for kl, other in pairs]
    thresholds = [kl.setting.exit_policy["threshold"] for kl, _ in pairs]
    measured = (
        f"cross-entropy varies by {max(losses) - min(losses):.4f}; time over acceleration's at the same threshold "
        + ", ".join(f"{ratio:.2f} ({threshold:g})" for ratio, threshold in zip(ratios, thresholds, strict=True))
    )
    verdict = _verdict([flat, *(ratio > 1 for ratio in ratios)])
    return _unless_loops_do_nothing(Claim(claim, paper, measured, verdict), results)


def ahead_at_cost(results: list[Result]) -> list[Claim]:
    """The fair comparison: rules at the same mean number of steps."""
    comparisons = [c for c in compare(results) if c.setting.rule == "acceleration"]
    claims = []
    if comparisons:
        better = [c.high < 0 for c in comparisons]
        worse = [c.low > 0 for c in comparisons]
        best = min(comparisons, key=lambda c: c.difference)
        measured = (
            f"better at {sum(better)}, worse at {sum(worse)} of {len(comparisons)} thresholds (95 % intervals); best "
            f"{_interval(best)} at {best.mean_depth:.1f} steps"
        )
        verdict = HOLDS if any(better) and not any(worse) else IN_PART if any(better) else DOES_NOT
        claim = "Acceleration beats fixed depth at the same mean steps"
        claims.append(Claim(claim, "not compared", measured, verdict))
    return claims


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
    return HOLDS if min(ratios) >= LARGE_RATIO else IN_PART if max(ratios) > 1 else DOES_NOT


def _interval(comparison: Comparison) -> str:
    return f"{comparison.difference:+.4f} [{comparison.low:+.4f}, {comparison.high:+.4f}]"


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)
