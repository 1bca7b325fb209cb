"""The geometry of loops: every formula that training and evaluation measure, in one place.

Notation of the paper: x(0), ..., x(K) are the states of a token in a group, D(k) = x(k+1) - x(k) its updates (eq. 1).
Functions take the states of a group as [K + 1, ..., hidden] and return one value per step and token, in float64.
"""

from dataclasses import dataclass, field

import torch

# A step below this many rounding errors of the state is noise, and so are its direction and its ratio to the next.
# Measured on a mini model (800 steps of training) at 100 loops: once converged, steps of all groups are 0.7 to 1.2
# rounding errors (medians), 2.5 at most, with cosines of -0.5, as differences of independent noise have. Six times the
# most is out of its reach.
FLOOR_IN_ROUNDING_ERRORS = 16


def updates(states: torch.Tensor) -> torch.Tensor:
    """D(k), [K, ..., hidden]."""
    return states[1:].double() - states[:-1].double()


def step_norms(states: torch.Tensor) -> torch.Tensor:
    """|D(k)|, [K, ...]."""
    return updates(states).norm(dim=-1)


def step_cosines(states: torch.Tensor) -> torch.Tensor:
    """cos(D(k), D(k-1)) for k = 1 .. K - 1, [K - 1, ...]; NaN where an update is zero."""
    steps = updates(states)
    return (steps[1:] * steps[:-1]).sum(-1) / (steps[1:].norm(dim=-1) * steps[:-1].norm(dim=-1))


def contraction_ratios(states: torch.Tensor) -> torch.Tensor:
    """|D(k)| / |D(k-1)| for k = 1 .. K - 1, [K - 1, ...]."""
    norms = step_norms(states)
    return norms[1:] / norms[:-1]


def accelerations(states: torch.Tensor, normalize: str = "none") -> torch.Tensor:
    """|D(k) - D(k-1)| for k = 1 .. K - 1 (eq. 5), [K - 1, ...].

    `normalize`: "state" divides by |x(k+1)|, "step" by |D(k)| + |D(k-1)| (eq. 6).
    """
    steps = updates(states)
    acceleration = (steps[1:] - steps[:-1]).norm(dim=-1)
    if normalize == "none":
        return acceleration
    if normalize == "state":
        return acceleration / states[2:].double().norm(dim=-1)
    if normalize == "step":
        return acceleration / (steps[1:].norm(dim=-1) + steps[:-1].norm(dim=-1))
    raise ValueError(f"`normalize` is {normalize!r}, but must be one of none, state, step.")


def drift_to_loop_ratio(states: torch.Tensor, next_states: torch.Tensor) -> torch.Tensor:
    """Eq. 2 as printed: |x_{g+1}(0) - x_g(K)| over the mean step norm of group g, [...].

    With a noise start x_{g+1}(0) is noise, so the ratio is large by construction: see `net_drift_to_loop_ratio`.
    """
    drift = (next_states[0].double() - states[-1].double()).norm(dim=-1)
    return drift / step_norms(states).mean(0)


def net_drift_to_loop_ratio(states: torch.Tensor, next_states: torch.Tensor) -> torch.Tensor:
    """The same with the net move of the next group, from the end of g to the end of g + 1, above the line, [...]."""
    drift = (next_states[-1].double() - states[-1].double()).norm(dim=-1)
    return drift / step_norms(states).mean(0)


def rounding_floor(states: torch.Tensor) -> torch.Tensor:
    """The step norm [K, ...] below which a step is rounding noise, given the precision that the states came in."""
    return FLOOR_IN_ROUNDING_ERRORS * torch.finfo(states.dtype).eps * states[1:].double().norm(dim=-1)


def above_floor(states: torch.Tensor) -> torch.Tensor:
    """[K, ...], True at steps that are more than rounding noise."""
    return step_norms(states) > rounding_floor(states)


@dataclass
class Projection:
    """Principal components of a set of states: fitted once on all states of a sequence, then applied to any of them."""

    mean: torch.Tensor  # [hidden]
    basis: torch.Tensor  # [components, hidden], orthonormal
    explained: torch.Tensor  # [components], share of the variance

    @classmethod
    def fit(cls, states: torch.Tensor, components: int = 2) -> "Projection":
        """`states` is [..., hidden]: the union over tokens, depth and loop steps, as in the paper's figure 1."""
        flat = states.flatten(0, -2).double()
        mean = flat.mean(0)
        _, sizes, basis = torch.linalg.svd(flat - mean, full_matrices=False)
        variance = sizes**2
        return cls(mean, basis[:components], variance[:components] / variance.sum())

    def apply(self, states: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., components]"""
        return (states.double() - self.mean) @ self.basis.T


@dataclass
class RunningMoments:
    """Mean and standard deviation over tokens, in float64, however many there are (Chan's parallel update).

    Values are [n, ...] with one row per token; those that are NaN or not `valid` are left out.
    """

    count: torch.Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    mean: torch.Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    squares: torch.Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    def update(self, values: torch.Tensor, valid: torch.Tensor | None = None) -> None:
        values = values.double()
        valid = ~values.isnan() if valid is None else valid & ~values.isnan()
        values = torch.where(valid, values, 0.0)
        count = valid.sum(0).double()
        mean = values.sum(0) / count.clamp_min(1)
        squares = torch.where(valid, (values - mean) ** 2, 0.0).sum(0)
        total = self.count + count
        delta = mean - self.mean
        self.squares = self.squares + squares + delta**2 * self.count * count / total.clamp_min(1)
        self.mean = self.mean + delta * count / total.clamp_min(1)
        self.count = total

    @property
    def std(self) -> torch.Tensor:
        return (self.squares / self.count.clamp_min(1)).sqrt()

    def to_dict(self) -> dict[str, list]:
        """Lists, with None where no value was counted."""
        empty = self.count == 0
        as_list = {"mean": self.mean, "std": self.std}
        result = {name: torch.where(empty, torch.nan, values).tolist() for name, values in as_list.items()}
        return {name: _nan_to_none(values) for name, values in result.items()} | {"count": self.count.long().tolist()}


def _nan_to_none(values):
    if isinstance(values, list):
        return [_nan_to_none(value) for value in values]
    return None if values != values else values


class LoopGeometry:
    """Moments of everything above, per group and step, over any number of batches of trajectories."""

    PER_STEP = ("step_norm", "step_cosine", "contraction_ratio", "acceleration", "acceleration_step")
    BANDS = {"low": 0.1, "high": 0.9}  # percentiles over tokens, of step norms and cosines

    def __init__(self, num_groups: int):
        self.values: list[dict[str, list]] = [
            {name: [] for name in ("step_norm", "step_cosine")} for _ in range(num_groups)
        ]
        self.per_step = [{name: RunningMoments() for name in self.PER_STEP} for _ in range(num_groups)]
        self.above_floor = [RunningMoments() for _ in range(num_groups)]
        boundaries = range(max(num_groups - 1, 0))
        self.drift = [{name: RunningMoments() for name in ("as_printed", "net")} for _ in boundaries]

    def update(self, trajectories: tuple[torch.Tensor, ...], real_tokens: torch.Tensor | None = None) -> None:
        """Adds trajectories [K + 1, batch, seq, hidden], one per group; `real_tokens` [batch, seq]: not padding."""
        flat = [states.flatten(1, 2) for states in trajectories]
        if real_tokens is not None:
            flat = [states[:, real_tokens.flatten()] for states in flat]
        for group, states in enumerate(flat):
            valid = above_floor(states).T  # [tokens, K]
            pairs = valid[:, 1:] & valid[:, :-1]
            moments = self.per_step[group]
            moments["step_norm"].update(step_norms(states).T)
            moments["step_cosine"].update(step_cosines(states).T, pairs)
            moments["contraction_ratio"].update(contraction_ratios(states).T, pairs)
            moments["acceleration"].update(accelerations(states).T)
            moments["acceleration_step"].update(accelerations(states, "step").T, pairs)
            self.above_floor[group].update(valid)
            self.values[group]["step_norm"].append(step_norms(states).T)
            self.values[group]["step_cosine"].append(step_cosines(states).T.where(pairs, torch.nan))
        for group, moments in enumerate(self.drift):
            moments["as_printed"].update(drift_to_loop_ratio(flat[group], flat[group + 1]))
            moments["net"].update(net_drift_to_loop_ratio(flat[group], flat[group + 1]))

    def to_dict(self) -> dict:
        """JSON-able: lists over steps per group, and numbers per boundary between groups."""
        return {
            "groups": [
                {name: moments.to_dict() | self._bands(group, name) for name, moments in of_group.items()}
                | {"above_floor": self.above_floor[group].mean.tolist()}
                for group, of_group in enumerate(self.per_step)
            ],
            "drift_to_loop_ratio": [
                {name: moments.to_dict() for name, moments in of_boundary.items()} for of_boundary in self.drift
            ],
        }

    def _bands(self, group: int, name: str) -> dict[str, list]:
        """On a log axis percentiles can be drawn, and a mean minus a deviation, which may be negative, can't."""
        kept = self.values[group].get(name)
        if not kept:
            return {}
        steps = torch.cat(kept).unbind(-1)  # one by one, since a quantile takes 16 M values at most
        return {band: [_nan_to_none(step.nanquantile(share).item()) for step in steps]
                for band, share in self.BANDS.items()}  # fmt: skip
