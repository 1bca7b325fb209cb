import json

import pytest

from evaluation.exit_tradeoff import Result, Setting
from evaluation.study import claims
from evaluation.study.claims import DOES_NOT, HOLDS, IN_PART, NOT_MEASURED, UNTESTABLE


def group(norms, cosines, above=None):
    return {
        "step_norm": {"mean": norms},
        "step_cosine": {"mean": cosines},
        "above_floor": above or [1.0] * len(norms),
    }


def line(step, groups, drift=None):
    return {"step": step, "groups": groups, "drift_to_loop_ratio": drift or []}


def result(rule, threshold, losses, depth, ms=None, num_loops=24):
    policy = None if rule == "fixed" else json.dumps({"name": rule, "threshold": threshold})
    mean = sum(losses) / len(losses)
    times = {} if ms is None else {"1": ms}
    return Result(
        Setting(rule, policy, num_loops), mean, 1.0, [depth], [0.0], 1.0, losses, [depth] * len(losses), times
    )


FIXED = [result("fixed", None, [6.0, 6.2], 1, num_loops=1), result("fixed", None, [5.0, 5.2], 24)]
FLAT_FIXED = [result("fixed", None, [5.02, 5.22], 1, num_loops=1), result("fixed", None, [5.0, 5.2], 24)]
SHRINKING = [1.0 * 0.5**k for k in range(12)]
SLOW = [1.0 * 0.95**k for k in range(12)]


@pytest.mark.parametrize(
    ("norms", "verdict"),
    [([SHRINKING, SHRINKING], HOLDS), ([SHRINKING, SLOW], IN_PART), ([SLOW, SLOW], DOES_NOT)],
)
def test_shrinking_takes_a_tenth_by_step_ten(norms, verdict):
    assert claims.shrinking(line(0, [group(n, [0.5] * 11) for n in norms])).verdict == verdict


def test_the_step_that_shrinks_is_counted_from_zero():
    assert claims.steps_to_shrink([1.0, 0.5, 0.05]) == 2
    assert claims.steps_to_shrink([1.0, 0.5, 0.2]) is None


@pytest.mark.parametrize(
    ("cosines", "verdict"),
    [([0.55, 0.6], HOLDS), ([-0.9, 0.6], IN_PART), ([-0.9, 0.1], IN_PART)],
)
def test_cosines_settle_at_the_papers_values_or_elsewhere(cosines, verdict):
    assert claims.settling(line(0, [group(SHRINKING, [c] * 11) for c in cosines])).verdict == verdict


def test_cosines_that_swing_do_not_settle():
    swinging = [(-1.0) ** k for k in range(11)]
    assert claims.settling(line(0, [group(SHRINKING, swinging)])).verdict == DOES_NOT


def test_cosines_in_rounding_noise_do_not_count():
    cosines = [0.6] * 5 + [-0.3, 0.7, -0.2, 0.1, 0.5, -0.5]
    above = [1.0] * 6 + [0.0] * 6
    assert claims.settled_cosine(group(SHRINKING, cosines, above)) == pytest.approx((0.6, 0.0))
    assert claims.settled_cosine(group(SHRINKING, cosines, [1.0] * 3 + [0.0] * 9)) is None


def test_strengthening_needs_a_history():
    late = line(100, [group(SHRINKING, [0.6] * 11)])
    early = line(5, [group(SLOW, [0.1 * k for k in range(11)])])
    assert claims.strengthening([late]).verdict == NOT_MEASURED
    assert claims.strengthening([early, late]).verdict == HOLDS
    assert claims.strengthening([late | {"step": 5}, early | {"step": 100}]).verdict == DOES_NOT


def test_strengthening_starts_where_something_is_trained():
    untrained = line(0, [group(SLOW, [0.1 * k for k in range(11)])])
    trained = [line(step, [group(SHRINKING, [0.6] * 11)]) for step in (8, 100)]
    assert claims.strengthening([untrained, *trained]).verdict == DOES_NOT


def test_drift_is_judged_as_printed_and_net():
    drift = [{"as_printed": {"mean": 20.0}, "net": {"mean": 0.5}}]
    now = line(0, [group(SHRINKING, [0.5] * 11)] * 2, drift)
    printed, net = claims.drifting(now, [], "noise")
    assert (printed.verdict, net.verdict) == (HOLDS, DOES_NOT)
    assert "by construction" in printed.measured
    small = [{"as_printed": {"mean": 2.0}, "net": {"mean": 0.5}}]
    printed, _ = claims.drifting(now, [now | {"drift_to_loop_ratio": small}], "input")
    assert printed.verdict == IN_PART
    assert "by construction" not in printed.measured


@pytest.mark.parametrize(
    ("times", "loss", "verdict"),
    [((10, 6), 5.001, HOLDS), ((10, 8), 5.001, IN_PART), ((10, 9.5), 5.001, DOES_NOT), ((10, 6), 5.1, DOES_NOT)],
)
def test_acceleration_must_be_fast_and_flat(times, loss, verdict):
    ends = [result("acceleration", 1e-5, [5.0], 20, times[0]), result("acceleration", 1e-2, [loss], 9, times[1])]
    assert claims.accelerating([*FIXED, *ends]).verdict == verdict
    assert claims.accelerating(FIXED).verdict == NOT_MEASURED


def test_flatness_says_nothing_where_loops_do_nothing():
    ends = [result("acceleration", 1e-5, [5.0], 20, 10), result("acceleration", 1e-2, [5.0], 9, 6)]
    claim = claims.accelerating([*FLAT_FIXED, *ends])
    assert claim.verdict == UNTESTABLE
    assert "0.020 nats" in claim.measured


def test_step_norm_degrades_where_its_loss_rises():
    good, bad = result("step_norm", 1e-3, [5.0], 9), result("step_norm", 1e-2, [5.2], 3)
    assert claims.step_norm_degrading([*FIXED, good, bad]).verdict == HOLDS
    assert claims.step_norm_degrading([*FIXED, good, result("step_norm", 1e-2, [5.0], 3)]).verdict == DOES_NOT


def test_kl_keeps_quality_but_is_slower():
    def trio(threshold, loss, ms):
        others = [result(rule, threshold, [5.0], 5, 10) for rule in ("acceleration", "step_norm")]
        return [result("kl", threshold, [loss], 5, ms), *others]

    assert claims.kl_keeping([*FIXED, *trio(1e-3, 5.0, 20), *trio(1e-2, 5.001, 15)]).verdict == HOLDS
    assert claims.kl_keeping([*FIXED, *trio(1e-3, 5.0, 20), *trio(1e-2, 5.001, 10.1)]).verdict == IN_PART
    assert claims.kl_keeping([*FIXED, *trio(1e-3, 5.0, 20), *trio(1e-2, 5.2, 9)]).verdict == DOES_NOT
    assert claims.kl_keeping(FIXED).verdict == NOT_MEASURED


def of_many(setting, differences=None):
    """The result with 16 sequences; those of a rule differ from fixed depth at 12.5 steps by `differences`."""
    middle = [5.5 if differences is None else 5.5 + differences + 0.001 * place for place in range(16)]
    losses = middle if differences is not None else [setting.sequence_losses[0]] * 16
    depths = [setting.sequence_depths[0]] * 16
    return Result(**{**vars(setting), "sequence_losses": losses, "sequence_depths": depths})


def test_the_fair_comparison_is_with_fixed_depth_at_the_same_mean():
    fixed = [of_many(r) for r in FIXED]  # 6.0 at one step and 5.0 at 24: 5.5 at 12.5
    better = of_many(result("acceleration", 0.1, [0], 12.5), -0.1)
    worse = of_many(result("acceleration", 0.2, [0], 12.5), 0.1)
    tiny = of_many(result("acceleration", 0.3, [0], 12.5), -0.02 + 0.001)
    assert claims.ahead_of_fixed([*fixed, better], "acceleration").verdict == HOLDS
    assert claims.ahead_of_fixed([*fixed, better, worse], "acceleration").verdict == IN_PART
    assert claims.ahead_of_fixed([*fixed, worse], "acceleration").verdict == DOES_NOT
    assert claims.ahead_of_fixed([*fixed, tiny], "acceleration").verdict == HOLDS
    assert claims.ahead_of_fixed([*fixed, of_many(result("acceleration", 0.3, [0], 12.5), -0.012)],
                                 "acceleration").verdict == DOES_NOT  # fmt: skip
    assert claims.ahead_of_fixed(FIXED, "acceleration").verdict == NOT_MEASURED


def test_an_improvement_is_not_held_against_a_rule():
    ends = [result("acceleration", 1e-5, [5.0], 20, 10), result("acceleration", 1e-2, [4.9], 9, 6)]
    assert claims.accelerating([*FIXED, *ends]).verdict == HOLDS


def test_the_loosest_threshold_is_the_largest():
    rows = [result("step_norm", t, [5.0], depth) for t, depth in ((1e-3, 9), (1e-2, 3), (4.0, 1), (8.0, 1))]
    assert "at 8, the largest threshold" in claims.step_norm_degrading([*FIXED, *rows]).measured
