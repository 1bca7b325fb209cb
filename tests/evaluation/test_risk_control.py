import numpy as np
import pytest
from mapie.risk_control import control_fwer
from mapie.risk_control.methods import compute_hoeffding_bentkus_p_value
from scipy.stats import binom, binomtest

from evaluation.risk_control import (
    fixed_sequence,
    frontier,
    hoeffding_bentkus,
    largest_risk,
    sequences_needed,
)


@pytest.mark.parametrize("n", [10, 230, 1000])
@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.5])
def test_p_values_are_those_of_mapie(n, alpha):
    risks = np.array([0.0, 1e-3, 0.004, 0.05, 0.0999, 0.1, 0.3, 0.49, 0.7])
    expected = compute_hoeffding_bentkus_p_value(risks, n, alpha)[:, 0].clip(max=1)
    assert [hoeffding_bentkus(risk, n, alpha) for risk in risks] == pytest.approx(expected.tolist(), rel=1e-12)


def test_the_walk_is_that_of_mapie_and_ends_at_the_first_that_is_not_rejected():
    random = np.random.default_rng(0)
    for _ in range(200):
        p_values = random.beta(0.2, 2, 12)
        assert fixed_sequence(p_values, 0.1) == len(control_fwer(p_values, 0.1, fwer_method="fixed_sequence"))
    assert fixed_sequence([0.01, 0.05, 0.2, 0.0, 0.0], 0.05) == 2
    assert fixed_sequence([0.2, 0.0], 0.05) == 0
    assert fixed_sequence([], 0.05) == 0


def test_known_numbers_of_sequences():
    assert sequences_needed(0.01, 0.1) == 230
    assert sequences_needed(0.05, 0.1) == 45
    assert sequences_needed(0.1, 0.05, risk=0.1) is None
    for alpha, delta, risk in ((0.1, 0.05, 0.04), (0.01, 0.1, 0.002), (0.001, 0.05, 0.0)):
        n = sequences_needed(alpha, delta, risk)
        assert hoeffding_bentkus(risk, n, alpha) <= delta < hoeffding_bentkus(risk, n - 1, alpha)


def test_the_largest_risk_is_where_the_p_value_crosses():
    risk = largest_risk(494, 0.1, 0.05)
    assert hoeffding_bentkus(risk, 494, 0.1) <= 0.05 < hoeffding_bentkus(risk + 1e-3, 494, 0.1)
    assert largest_risk(20, 0.1, 0.05) < 0


def choose(losses, alpha, delta):
    """The setting that learn-then-test returns for losses [sequences, settings]; -1: none."""
    p_values = [hoeffding_bentkus(risk, len(losses), alpha) for risk in losses.mean(0)]
    return fixed_sequence(p_values, delta) - 1


def test_on_a_problem_with_known_risk_the_promise_is_broken_as_often_as_can_be_computed():
    """Losses of 0 and 1, settings whose risks are known; the first beyond alpha is the only way to break it first."""
    n, alpha, delta, runs = 300, 0.1, 0.1, 4000
    risks = np.array([0.0, 0.01, 0.03, 0.1000001, 0.3])
    random = np.random.default_rng(0)
    broken = 0
    for _ in range(runs):
        broken += choose(random.random((n, len(risks))) < risks, alpha, delta) >= 3
    counts = np.arange(n + 1)
    chance = [  # that a setting is rejected, exactly
        binom.pmf(counts, n, risk) @ [hoeffding_bentkus(count / n, n, alpha) <= delta for count in counts]
        for risk in risks
    ]
    exact = float(np.prod(chance[:4]))
    assert 0.01 < exact <= delta
    assert binomtest(broken, runs, exact).pvalue > 0.001


def test_on_losses_between_0_and_1_the_promise_holds_as_often_as_it_says():
    n, alpha, delta, runs = 200, 0.1, 0.1, 2000
    means = np.linspace(0.02, 0.2, 19)
    random = np.random.default_rng(1)
    broken = useful = 0
    for _ in range(runs):
        chosen = choose(random.beta(4 * means, 4 * (1 - means), (n, len(means))), alpha, delta)
        broken += chosen >= 0 and means[chosen] > alpha
        useful += chosen >= 0 and means[chosen] >= alpha / 2
    assert binomtest(int(broken), runs, delta, alternative="greater").pvalue > 0.001
    assert useful > 0.5 * runs  # and it is not kept by choosing nothing


def test_the_frontier_goes_from_the_safest_to_the_cheapest():
    assert frontier([1, 2, 3, 4, 5, 3], [1.0, 0.6, 0.1, 0.3, 0.05, 0.4]) == [4, 2, 1, 0]
    assert frontier([], []) == []
