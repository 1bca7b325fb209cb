"""What an exit rule must be ahead of, for tasks and for text alike.

- Fixed depth: the lower convex hull of all fixed loop counts, one count per group. A point between two of them is a
  mixture: some texts get the one count, the rest the other.
- The permutation null: the rule's own steps, shuffled over tokens. It has the rule's histogram, and none of its choice.
- A rule by position only: each place takes what the rule took there on other sequences, and looks at no token.

Losses may be anything that is better when it is lower: nats, error rates. Costs are mean steps.
"""

import itertools

import numpy as np
import torch

from recurrent_gpt2.exit_policies import LoopView


def lower_hull(costs: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The vertices of the lower convex hull of points (cost, loss), from the cheapest to the least loss."""
    hull: list[tuple[float, float]] = []
    for cost, loss in sorted(zip(np.asarray(costs, float), np.asarray(losses, float), strict=True)):
        if hull and loss >= hull[-1][1]:
            continue  # costs more and gains nothing
        while hull and hull[-1][0] == cost:
            hull.pop()
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], (cost, loss)):
            hull.pop()
        hull.append((cost, loss))
    hull_costs, hull_losses = zip(*hull, strict=True)
    return np.array(hull_costs), np.array(hull_losses)


def _is_above(left: tuple[float, float], middle: tuple[float, float], right: tuple[float, float]) -> bool:
    """Whether `middle` lies on or above the line from `left` to `right`."""
    (x0, y0), (x1, y1), (x2, y2) = left, middle, right
    return (y1 - y0) * (x2 - x0) >= (y2 - y0) * (x1 - x0)


def hull_loss(costs: np.ndarray, losses: np.ndarray, cost: float) -> float:
    """The loss of fixed depths at a mean cost; NaN below the cheapest. Beyond the best, the best."""
    hull_costs, hull_losses = lower_hull(costs, losses)
    return float("nan") if cost < hull_costs[0] else float(np.interp(cost, hull_costs, hull_losses))


def hull_cost(costs: np.ndarray, losses: np.ndarray, loss: float) -> float:
    """The least mean cost at which fixed depths reach a loss; infinite where none does."""
    hull_costs, hull_losses = lower_hull(costs, losses)
    if loss < hull_losses[-1]:
        return float("inf")
    return float(np.interp(-loss, -hull_losses, hull_costs))


def loop_counts(num_groups: int, most: int, tried: tuple[int, ...] = (1, 2, 3, 4, 6, 8)) -> list[list[int]]:
    """Fixed loop counts to make a hull of: all up to `most` for one group, a grid of one count per group for more."""
    uniform = [[count] * num_groups for count in range(1, most + 1)]
    if num_groups == 1:
        return uniform
    grid = [list(counts) for counts in itertools.product([t for t in tried if t <= most], repeat=num_groups)]
    return uniform + [counts for counts in grid if counts not in uniform]


def shuffled(steps: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Steps [n, length, groups] dealt out anew among all tokens; a token's steps in all groups stay together."""
    return rng.permutation(steps.reshape(-1, steps.shape[-1])).reshape(steps.shape)


def by_position(steps: np.ndarray, quantile: float) -> np.ndarray:
    """Steps [n, length, groups] -> [length, groups]: a quantile of what was taken at each place, rounded up."""
    return np.ceil(np.quantile(steps, quantile, axis=0) - 1e-9).astype(np.int64)


def cheapest(costs: np.ndarray, losses: np.ndarray, loss: float) -> int | None:
    """The place of the least cost whose loss is at most `loss`, if there is one."""
    costs, losses = np.asarray(costs, float), np.asarray(losses, float)
    good = np.flatnonzero(losses <= loss)
    return int(good[costs[good].argmin()]) if len(good) else None


def bootstrap_interval(statistic, count: int, seed: int = 0, rounds: int = 1000) -> tuple[float, float]:
    """95 % interval of `statistic(places)`, with `places` sequences drawn from `count` with replacement."""
    rng = np.random.default_rng(seed)
    values = [statistic(rng.integers(count, size=count)) for _ in range(rounds)]
    return tuple(float(value) for value in np.nanpercentile(values, [2.5, 97.5]))


class TakeSteps:
    """An exit policy that gives every token the steps it is told to, for one pass over one batch without padding."""

    def __init__(self, steps: torch.Tensor):
        self.steps = steps.flatten()  # [batch, seq], at least 1

    def __call__(self, view: LoopView) -> torch.Tensor:
        if view.step == 0:
            view.memory["steps"] = self.steps.to(view.state.device)
        return view.memory["steps"] <= view.step + 1


def take_steps(steps: np.ndarray) -> list[TakeSteps]:
    """Policies for `exit_policy=` that give the tokens of a batch the steps [batch, seq, groups]."""
    return [TakeSteps(torch.tensor(steps[..., group])) for group in range(steps.shape[-1])]
