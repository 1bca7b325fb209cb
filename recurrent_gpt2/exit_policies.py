"""Exit policies: when does a token's loop stop?

A policy is a callable that gets a [`LoopView`] of the tokens still looping and returns a boolean tensor: which of them
stop now. It holds settings only; whatever varies during a loop is handed to it, so one object serves many calls and
threads at once.

With s(k) the state after k steps and D(k) = s(k+1) - s(k) the update of step k (paper, eq. 1):

| name           | class               | fires when                               | cost of a step |
|----------------|---------------------|------------------------------------------|----------------|
| `fixed`        | `FixedLoops`        | never                                    | none           |
| `step_norm`    | `StepNormExit`      | norm D(k) < threshold (eq. 3)            | O(d)           |
| `kl`           | `KLExit`            | KL(p(k+1) \\|\\| p(k)) < threshold (eq. 4) | O(d V)         |
| `acceleration` | `AccelerationExit`  | norm(D(k) - D(k-1)) < threshold (eq. 5)  | O(d)           |
| `cosine`       | `CosineExit`        | 1 - cos(s(k+1), s(k)) < threshold        | O(d)           |
| `entropy`      | `EntropyExit`       | H(p(k+1)), or its change, < threshold    | O(d V)         |
| `confidence`   | `ConfidenceExit`    | 1 - best probability < threshold         | O(d V)         |
| `argmax`       | `ArgmaxExit`        | the best token has not changed           | O(d V)         |
| `all`          | `AllExit`           | all of its conditions hold               | that of all    |
"""

import reprlib
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any, ClassVar, cast

import torch
import transformers

# A count no loop reaches: larger ones would overflow the tensors that they are compared with.
MAX_COUNT = 1_000_000
# Conditions of a combination: more than anyone needs, few enough for a file from elsewhere.
MAX_CONDITIONS = 16


@dataclass
class LoopView:
    """What a policy sees after a loop step, for the n tokens that are still active (and for them only)."""

    group: int  # index of the loop group
    step: int  # k: 0 after the first step of the loop
    state: torch.Tensor  # s(k+1), [n, hidden]
    update: torch.Tensor  # D(k) = s(k+1) - s(k), [n, hidden]
    previous_update: torch.Tensor | None  # D(k-1); None at the first step
    memory: dict[str, torch.Tensor]  # the policy's own [n, ...] tensors, kept across steps and cut to the active tokens
    decode: Callable[[torch.Tensor], torch.Tensor]  # state -> logits [n, vocab]; costs something only when called


# The policies of this file, and those of users. A checkpoint's own copy of this file is a module of its own, with the
# first dictionary to itself; the second is kept where every copy finds it, so that a policy registered with any of
# them is known to all.
_BUILT_IN: dict[str, type["ExitPolicy"]] = {}
_OF_USERS: dict[str, type["ExitPolicy"]] = vars(transformers).setdefault("_recurrent_gpt2_exit_policies", {})


def register_exit_policy(name: str) -> Callable[[type["ExitPolicy"]], type["ExitPolicy"]]:
    """Class decorator: makes a policy available as `exit_policy=name` and loadable from a generation config."""

    def register(cls: type["ExitPolicy"]) -> type["ExitPolicy"]:
        known = _registered(name)
        same = known is not None and (known.__module__, known.__qualname__) == (cls.__module__, cls.__qualname__)
        if known is not None and not same:
            raise ValueError(f"exit policy {name!r} is already registered, by {known.__qualname__}.")
        cls.name = name
        (_BUILT_IN if cls.__module__ == __name__ else _OF_USERS)[name] = cls
        return cls

    return register


def available_exit_policies() -> list[str]:
    """Names that `exit_policy=` accepts."""
    return sorted({*_BUILT_IN, *_OF_USERS})


def _registered(name: str) -> type["ExitPolicy"] | None:
    return _BUILT_IN.get(name) or _OF_USERS.get(name)


@dataclass(frozen=True)
class ExitPolicy:
    """Base class. A subclass says what it measures; a token stops when that has been below `threshold` long enough.

    Args:
        threshold: The measure must be below it. `None` takes the default of the class.
        patience: Hits in a row that it takes to stop.
        min_loops: No token stops before this many steps. (Hits before that count towards `patience`.)
    """

    threshold: float | None = None
    patience: int = 1
    min_loops: int = 1

    name: ClassVar[str] = ""
    default_threshold: ClassVar[float] = 0.0

    def __post_init__(self):
        threshold = self._default_threshold() if self.threshold is None else self.threshold
        is_number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
        if not is_number or not 0 <= threshold <= sys.float_info.max:
            raise ValueError(
                f"`threshold` of {type(self).__name__} is {_shown(threshold)}, but must be a finite number >= 0."
            )
        object.__setattr__(self, "threshold", float(threshold))
        for setting in ("patience", "min_loops"):
            value = getattr(self, setting)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_COUNT:
                name = type(self).__name__
                raise ValueError(f"`{setting}` of {name} is {_shown(value)}, but must be an int from 1 to {MAX_COUNT}.")

    def _default_threshold(self) -> float:
        return self.default_threshold

    def measure(self, view: LoopView) -> torch.Tensor | None:
        """The number [n] that is compared with the threshold, or None where there is nothing to compare yet."""
        raise NotImplementedError(f"{type(self).__name__} must define `measure`.")

    def __call__(self, view: LoopView) -> torch.Tensor:
        measure = self.measure(view)
        if measure is None:
            return torch.zeros(view.state.shape[0], dtype=torch.bool, device=view.state.device)
        threshold = _constant(cast(float, self.threshold), measure.dtype, measure.device)
        if is_one := measure.numel() == 1:  # as in decoding, where numbers are faster than tensors
            hits = _answer(measure.item() < threshold.item(), measure.device)  # False for NaN
        else:
            hits = measure < threshold
        if self.patience > 1:
            hits_in_a_row = view.memory.pop("hits_in_a_row", 0)
            if not (hits if is_one else hits.any()):  # as most often, at most of the steps
                return hits
            view.memory["hits_in_a_row"] = hits_in_a_row = (hits_in_a_row + 1) * hits
            hits = hits_in_a_row >= self.patience
        return hits if view.step + 1 >= self.min_loops else torch.zeros_like(hits)

    def to_dict(self) -> dict[str, Any]:
        """The policy as a JSON-able dict; `from_dict` is the way back."""
        if _registered(self.name) is not type(self):  # a subclass inherits the name, but is not what it stands for
            raise ValueError(
                f"{type(self).__name__} has no name to be saved under: @register_exit_policy gives it one."
            )
        return {"name": self.name, **asdict(self)}

    @staticmethod
    def from_dict(settings: dict[str, Any]) -> "ExitPolicy":
        """Looks the name up in the registry and passes the rest as settings. Runs no code from `settings`."""
        if not isinstance(settings, dict) or not isinstance(settings.get("name"), str):
            raise ValueError(f"`exit_policy` {_shown(settings)} has no name, such as {{'name': 'acceleration'}}.")
        settings = dict(settings)
        name = settings.pop("name")
        cls = _registered(name)
        if cls is None:
            raise ValueError(f"`exit_policy` {_shown(name)} is unknown. Known: {', '.join(available_exit_policies())}.")
        allowed = {field.name for field in fields(cls)}
        if unknown := [key for key in settings if key not in allowed]:
            raise ValueError(
                f"`exit_policy` {name!r} has no setting {_shown(unknown[0])}. It has: {', '.join(sorted(allowed))}."
            )
        return cls(**settings)


@register_exit_policy("fixed")
@dataclass(frozen=True)
class FixedLoops(ExitPolicy):
    """Never stops early: every token takes `num_loops` steps. The same as `exit_policy=None`."""

    def measure(self, view: LoopView) -> None:
        return None


@dataclass(frozen=True)
class _NormalizedExit(ExitPolicy):
    normalize: str = "none"

    default_thresholds: ClassVar[dict[str, float]] = {}

    def _default_threshold(self) -> float:
        self._check_normalize()
        return self.default_thresholds[self.normalize]

    def __post_init__(self):
        super().__post_init__()
        self._check_normalize()

    def _check_normalize(self) -> None:
        if not isinstance(self.normalize, str) or self.normalize not in self.default_thresholds:
            raise ValueError(
                f"`normalize` of {type(self).__name__} is {_shown(self.normalize)}, but must be one of "
                f"{', '.join(self.default_thresholds)}."
            )


@register_exit_policy("step_norm")
@dataclass(frozen=True)
class StepNormExit(_NormalizedExit):
    """Stops when the update is small: norm D(k) < threshold (paper, eq. 3).

    `normalize="state"` divides by the norm of the new state. Default thresholds: 1e-3 (`none`: the largest that the
    paper finds harmless), 0.03 (`state`: the default of Geiping et al.). It can first fire at the first step.
    """

    default_thresholds: ClassVar[dict[str, float]] = {"none": 1e-3, "state": 0.03}

    def measure(self, view: LoopView) -> torch.Tensor:
        step_norm = _norm(view.update)
        return step_norm / _norm(view.state) if self.normalize == "state" else step_norm


@register_exit_policy("acceleration")
@dataclass(frozen=True)
class AccelerationExit(_NormalizedExit):
    """Stops when the update stops changing: norm(D(k) - D(k-1)) < threshold, twice in a row (paper, eq. 5, Alg. 1).

    With the default patience of 2 it can first fire at the third step. The state kept is the newest, s(k+1), which has
    been computed already; the paper's listing returns s(k).

    `normalize="state"` divides by the norm of the new state; `"step"` by norm D(k) + norm D(k-1) (eq. 6). The latter is
    scale-free and does **not** go to zero as a loop converges: with rho = |D(k)| / |D(k-1)| and c the cosine between
    the two updates it equals sqrt(1 + rho^2 - 2 rho c) / (1 + rho), which is never below sqrt((1 - c) / 2). At cosines
    of 0.5 to 0.65 no threshold under 0.42 ever fires. Default thresholds: 1e-2 (`none`: the paper's loosest, with flat
    perplexity there), 0.03 (`state`), 0.5 (`step`).
    """

    patience: int = 2

    default_thresholds: ClassVar[dict[str, float]] = {"none": 1e-2, "state": 0.03, "step": 0.5}

    def measure(self, view: LoopView) -> torch.Tensor | None:
        if view.previous_update is None:
            return None
        acceleration = _norm(view.update - view.previous_update)
        if self.normalize == "state":
            return acceleration / _norm(view.state)
        if self.normalize == "step":
            return acceleration / _positive(_norm(view.update) + _norm(view.previous_update))
        return acceleration


@register_exit_policy("kl")
@dataclass(frozen=True)
class KLExit(ExitPolicy):
    """Stops when the decoded distribution stops changing: KL(p(k+1) || p(k)) < threshold (paper, eq. 4).

    p(k) = softmax(head(final norm(s(k)))), so every step decodes every active token. The start state is not decoded:
    it can first fire at the second step. Default threshold: 5e-4 (Geiping et al.).
    """

    default_threshold: ClassVar[float] = 5e-4

    def measure(self, view: LoopView) -> torch.Tensor | None:
        if view.step + 1 < self.min_loops - self.patience:
            return None  # what is compared so early can't count
        log_p = _at_least_fp32(view.decode(view.state)).log_softmax(-1)
        previous_log_p = view.memory.get("log_p")
        view.memory["log_p"] = log_p
        if previous_log_p is None:
            return None
        return torch.linalg.vecdot(log_p.exp(), log_p - previous_log_p).clamp_min(0)  # rounding can take it below


@register_exit_policy("cosine")
@dataclass(frozen=True)
class CosineExit(ExitPolicy):
    """Stops when the state stops turning: 1 - cos(s(k+1), s(k)) < threshold.

    It can first fire at the first step. Default threshold: 1e-3 (Geiping et al.).
    """

    default_threshold: ClassVar[float] = 1e-3

    def measure(self, view: LoopView) -> torch.Tensor:
        state, previous = _at_least_fp32(view.state), _at_least_fp32(view.state - view.update)
        cosine = torch.linalg.vecdot(state, previous) / _positive(_norm(state) * _norm(previous))
        return (1 - cosine).clamp_min(0)  # rounding can take it below


@register_exit_policy("entropy")
@dataclass(frozen=True)
class EntropyExit(ExitPolicy):
    """Stops when the decoded distribution is sharp: H(p(k+1)) < threshold, in nats.

    `change=True` is the rule of Geiping et al.: |H(p(k+1)) - H(p(k))| < threshold. Every step decodes every active
    token. The level can first fire at the first step, the change at the second. Default thresholds: 0.1 for the level
    (nobody's: it depends on the text), 1e-3 for the change (Geiping et al.).
    """

    change: bool = False

    def __post_init__(self):
        if not isinstance(self.change, bool):
            raise ValueError(f"`change` of EntropyExit is {_shown(self.change)}, but must be True or False.")
        super().__post_init__()

    def _default_threshold(self) -> float:
        return 1e-3 if self.change else 0.1

    def measure(self, view: LoopView) -> torch.Tensor | None:
        if _is_too_early(self, view, states=1 + self.change):
            return None
        log_p = _at_least_fp32(view.decode(view.state)).log_softmax(-1)
        entropy = -torch.linalg.vecdot(log_p.exp(), log_p).clamp_max(0)
        if not self.change:
            return entropy
        previous = view.memory.get("entropy")
        view.memory["entropy"] = entropy
        return None if previous is None else (entropy - previous).abs()


@register_exit_policy("confidence")
@dataclass(frozen=True)
class ConfidenceExit(ExitPolicy):
    """Stops when one token is likely enough in the decoded distribution. As for all rules, less is surer:

    `by="top"` measures 1 - p(best); `by="margin"` measures p(second) / p(best), which is exp(-margin of the two best
    logits). Every step decodes every active token. It can first fire at the first step. Default threshold: 0.1 (a top
    probability of 0.9; nobody's: it depends on the text).
    """

    by: str = "top"

    default_threshold: ClassVar[float] = 0.1

    def __post_init__(self):
        super().__post_init__()
        if self.by not in ("top", "margin"):
            raise ValueError(f"`by` of ConfidenceExit is {_shown(self.by)}, but must be one of top, margin.")

    def measure(self, view: LoopView) -> torch.Tensor | None:
        if _is_too_early(self, view):
            return None
        logits = _at_least_fp32(view.decode(view.state))
        if self.by == "top":
            return 1 - logits.softmax(-1).amax(-1)
        best, second = logits.topk(2, dim=-1).values.unbind(-1)
        return (second - best).exp()


@register_exit_policy("argmax")
@dataclass(frozen=True)
class ArgmaxExit(ExitPolicy):
    """Stops when the most likely token has not changed for `patience` steps in a row.

    Every step decodes every active token. The start state is not decoded, so with the default patience of 5 (Geiping et
    al.) it can first fire at the sixth step. What is measured is 0 or 1; `threshold` is between them.
    """

    patience: int = 5

    default_threshold: ClassVar[float] = 0.5

    def measure(self, view: LoopView) -> torch.Tensor | None:
        if _is_too_early(self, view, states=2):
            return None
        logits, best = view.decode(view.state).max(-1)
        previous = view.memory.get("best")
        view.memory["best"] = best
        return None if previous is None else ((best != previous) | logits.isnan()).float()


@register_exit_policy("all")
@dataclass(frozen=True)
class AllExit(ExitPolicy):
    """Stops when all conditions hold at the same step, each with its own threshold, patience and `min_loops`.

    `of` lists 2 to 16 policies: names, dicts or objects, of registered classes and not combinations themselves. Several
    that decode cost one pass through the head. It can first fire when the last of them can. What is measured is 0 where
    all hold, else 1; `patience` counts the steps in a row at which they do.
    """

    of: tuple[ExitPolicy, ...] = ()

    default_threshold: ClassVar[float] = 0.5

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.of, list | tuple) or not 2 <= len(self.of) <= MAX_CONDITIONS:
            raise ValueError(f"`of` of AllExit is {_shown(self.of)}, but must list 2 to {MAX_CONDITIONS} policies.")
        object.__setattr__(self, "of", tuple(self._condition(policy) for policy in self.of))

    @staticmethod
    def _condition(policy: Any) -> ExitPolicy:
        if hasattr(policy, "to_dict") and not isinstance(policy, type):
            policy = policy.to_dict()
        settings = {"name": policy} if isinstance(policy, str) else policy
        if isinstance(settings, dict) and settings.get("name") == "all":  # else a file could nest without end
            raise ValueError("`of` of AllExit lists a combination, but must list plain policies.")
        return ExitPolicy.from_dict(settings)

    def measure(self, view: LoopView) -> torch.Tensor:
        hits, decode = [], _decode_once(view.decode)
        for place, policy in enumerate(self.of):
            prefix = f"{place}."
            names = [name for name in view.memory if name.startswith(prefix)]
            memory = {name.removeprefix(prefix): view.memory.pop(name) for name in names}
            hits.append(policy(replace(view, memory=memory, decode=decode)))
            view.memory.update({prefix + name: value for name, value in memory.items()})
        return (~torch.stack(hits).all(0)).float()

    def to_dict(self) -> dict[str, Any]:
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"name": self.name, **settings, "of": [policy.to_dict() for policy in self.of]}


def _is_too_early(policy: ExitPolicy, view: LoopView, states: int = 1) -> bool:
    """Whether what is decoded at this step can't count: a hit of `min_loops` and `patience` needs `states` of them."""
    return view.step + states < policy.min_loops - policy.patience + 1


def _decode_once(decode: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """`decode` that remembers the last state and its logits."""
    last: list[torch.Tensor] = []

    def remembered(state: torch.Tensor) -> torch.Tensor:
        if not last or last[0] is not state:
            last[:] = state, decode(state)
        return last[1]

    return remembered


def _shown(value: Any) -> str:
    """A value for an error message: short, however long or deep what a file had there."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an int of too many digits
        return f"a {type(value).__name__} that is too long to show"


@lru_cache
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A number as a tensor, which it would be turned into at every use. Never to be written to."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device=device)


@lru_cache
def _answer(hit: bool, device: torch.device) -> torch.Tensor:
    """[1]. Never to be written to."""
    with torch.inference_mode(False):
        return torch.tensor([hit], device=device)


def _at_least_fp32(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _norm(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(_at_least_fp32(x), dim=-1)


def _positive(x: torch.Tensor) -> torch.Tensor:
    return x.clamp_min(torch.finfo(x.dtype).tiny)


Policy = Callable[[LoopView], torch.Tensor]


def resolve_exit_policy(exit_policy: Any, num_groups: int) -> list[Policy | None]:
    """What `exit_policy=` was given, as one policy (or None: no exits) per group.

    Takes None, a name, a policy, a callable, a dict with a name, or a list with one of these per group.
    """
    if not isinstance(exit_policy, list | tuple):
        return [_resolve_one(exit_policy)] * num_groups
    if len(exit_policy) != num_groups:
        raise ValueError(
            f"`exit_policy` lists {len(exit_policy)} policies, but the model has {num_groups} loop groups."
        )
    return [_resolve_one(policy) for policy in exit_policy]


def _resolve_one(policy: Any) -> Policy | None:
    if isinstance(policy, str):
        policy = ExitPolicy.from_dict({"name": policy})
    elif isinstance(policy, dict):
        policy = ExitPolicy.from_dict(policy)
    if policy is None or (type(policy).__name__, getattr(policy, "name", None)) == ("FixedLoops", "fixed"):
        return None
    if isinstance(policy, type) or not callable(policy):
        raise ValueError(
            f"`exit_policy` is {_shown(policy)}, but must be None, a name ({', '.join(available_exit_policies())}), a "
            "policy object, a callable, a dict with a name, or a list with one of these per group."
        )
    return policy


def check_exits(exits: Any, policy: Policy, n: int, memory: dict[str, Any]) -> None:
    """Fails with a sentence where a policy did not answer as it must."""
    if not isinstance(exits, torch.Tensor) or exits.dtype != torch.bool or exits.shape != (n,):
        got = f"{exits.dtype} {list(exits.shape)}" if isinstance(exits, torch.Tensor) else _shown(exits)
        raise ValueError(f"the exit policy {_shown(policy)} returned {got}, but must return a bool tensor [{n}].")
    for name, value in memory.items():
        if not isinstance(value, torch.Tensor) or value.shape[:1] != (n,):
            raise ValueError(
                f"the exit policy {_shown(policy)} keeps {_shown(value)} as {name!r} in `memory`, but must keep "
                f"tensors with a row for each of the {n} active tokens."
            )


def exit_policy_to_json(exit_policy: Any) -> Any:
    """`exit_policy` with every policy object replaced by its dict, for a generation config."""
    if isinstance(exit_policy, list | tuple):
        return [exit_policy_to_json(policy) for policy in exit_policy]
    if exit_policy is None or isinstance(exit_policy, str | dict):
        return exit_policy
    if not hasattr(exit_policy, "to_dict"):
        raise ValueError(
            f"`exit_policy` {_shown(exit_policy)} cannot be saved: a plain callable has no JSON form. Make it an "
            "`ExitPolicy` with @register_exit_policy."
        )
    return exit_policy.to_dict()
