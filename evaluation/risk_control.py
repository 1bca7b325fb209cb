"""Learn then test: which settings keep a risk, with a probability that can be stated (Angelopoulos et al., 2110.01052).

A risk is the mean over sequences of a loss in [0, 1]. Settings are put in an order before the calibration data is
looked at, from the safest to the riskiest; each is tested against "its risk is above alpha", and the walk ends at the
first that can't be rejected. Then, whatever the losses are, the chance that any rejected setting has a risk above alpha
is at most delta, over the draw of n exchangeable sequences. Pure functions: no model, no files.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import rel_entr
from scipy.stats import binom


def hoeffding_bentkus(risk: float, n: int, alpha: float) -> float:
    """A p-value of "the risk is above `alpha`", where n losses in [0, 1] have the mean `risk`.

    The smaller of Hoeffding's bound in its relative-entropy form and of Bentkus's, which is e times a binomial tail.
    """
    low = min(risk, alpha)
    hoeffding = math.exp(-n * (rel_entr(low, alpha) + rel_entr(1 - low, 1 - alpha)))
    bentkus = math.e * binom.cdf(math.ceil(n * risk), n, alpha)
    return float(min(1.0, hoeffding, bentkus))


def fixed_sequence(p_values: Sequence[float], delta: float) -> int:
    """How many settings, from the first on, are rejected one after the other: the last of them may be used.

    The walk ends at the first that is not rejected, however small the p-values behind it are.
    """
    rejected = 0
    while rejected < len(p_values) and p_values[rejected] <= delta:
        rejected += 1
    return rejected


def sequences_needed(alpha: float, delta: float, risk: float = 0.0) -> int | None:
    """The least n at which a setting that shows this risk is rejected; None where no n will do."""
    if risk >= alpha:
        return None
    # Hoeffding's part falls with n; the binomial tail, because of its ceiling, not always.
    high = math.ceil(math.log(1 / delta) / (rel_entr(risk, alpha) + rel_entr(1 - risk, 1 - alpha)))
    return next((n for n in range(max(high // 4, 1), high) if hoeffding_bentkus(risk, n, alpha) <= delta), high)


def largest_risk(n: int, alpha: float, delta: float) -> float:
    """The largest mean loss of n sequences that is still rejected; negative where not even none at all is."""
    if hoeffding_bentkus(0.0, n, alpha) > delta:
        return -1.0
    low, high = 0.0, alpha
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if hoeffding_bentkus(middle, n, alpha) <= delta else (low, middle)
    return low


def frontier(costs: Sequence[float], risks: Sequence[float]) -> list[int]:
    """Places of the points that no other beats in both, from the safest (and dearest) to the cheapest."""
    order = sorted(range(len(costs)), key=lambda place: (costs[place], risks[place]))
    best, kept = np.inf, []
    for place in order:
        if risks[place] < best:
            best = risks[place]
            kept.append(place)
    return kept[::-1]
