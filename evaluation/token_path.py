"""A token's way through the network: its states between layers and at every loop step, and what its exit rule saw.

For the page of `evaluation.explore` and for the report; the pictures of it are in `pictures.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from recurrent_gpt2 import ExitPolicy, LoopView, RecurrentGPT2ForCausalLM, geometry
from recurrent_gpt2.exit_policies import resolve_exit_policy

from .common import mean_depth
from .lens import TokenLens, lens_table, look_at_token


@dataclass
class LoopCurves:
    """One group, a value per step from the first to the cap; None where there is nothing to compare yet, and where a
    step is rounding noise, which has no direction."""

    step_norm: list[float | None]  # |D(k)| / |s(k+1)|
    acceleration: list[float | None]  # |D(k) - D(k-1)| / |s(k+1)|
    cosine: list[float | None]  # cos(D(k), D(k-1))
    measure: list[float | None]  # what the exit policy compares with its threshold
    policy: str | None  # its name; None: no exits
    threshold: float | None


@dataclass
class Stretch:
    """A part of the way: the states of a layer that is applied once, or those of a group's loop."""

    name: str
    group: int | None
    points: list[list[float]]  # of every state, on the principal components


@dataclass
class TokenPath:
    """A token's states on two principal components, and the curves of every group."""

    steps: list[int]  # that the token took, per group
    stretches: list[Stretch]
    explained: list[float]  # share of the variance of each component
    curves: list[LoopCurves]

    @property
    def most(self) -> int:
        """Loop steps of the longest loop that is shown."""
        return max(len(curve.step_norm) for curve in self.curves)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TokenPath":
        """From what `asdict` gives, which is JSON-able."""
        stretches = [Stretch(**stretch) for stretch in values["stretches"]]
        return cls(values["steps"], stretches, values["explained"], [LoopCurves(**curve) for curve in values["curves"]])


def follow_token(
    model: RecurrentGPT2ForCausalLM, ids: torch.Tensor, place: int, exit_policy: Any, num_loops: list[int]
) -> tuple[TokenPath, TokenLens]:
    """The way of the token at `place` of a text `ids` [tokens], and what it would say after every step of it. Steps
    beyond its exit are what would have been."""
    with _states_between(model, place) as between:
        seen = look_at_token(model, ids, place, exit_policy, num_loops)
    parts: list[tuple[str, int | None, torch.Tensor]] = [("embedding", None, between["embedding"][None])]
    for stage in model.config.stages:
        if stage.group is not None:
            parts.append((name_of_layers(stage.layers), stage.group, seen.states[stage.group]))
            continue
        parts += [(f"layer {layer}", None, between[f"layer {layer}"][None]) for layer in stage.layers]
    # The start state of a loop is noise, and would take a component for itself.
    fitted = [states if group is None else states[1:] for _, group, states in parts]
    projection = geometry.Projection.fit(torch.cat(fitted))
    stretches = [Stretch(name, group, projection.apply(states).tolist()) for name, group, states in parts]
    policies = resolve_exit_policy(exit_policy, len(num_loops))
    curves = [
        curves_of(states, group, policy, model.decode_states)
        for group, (states, policy) in enumerate(zip(seen.states, policies, strict=True))
    ]
    return TokenPath(seen.steps, stretches, projection.explained.tolist(), curves), seen


@torch.no_grad()
def curves_of(states: torch.Tensor, group: int, policy: Any, decode: Callable) -> LoopCurves:
    """Of the states s(0..K) [K + 1, hidden] of a group."""
    sizes = states[1:].double().norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
    above = geometry.above_floor(states)
    both = above[1:] & above[:-1]
    return LoopCurves(
        (geometry.step_norms(states) / sizes).tolist(),
        [None, *geometry.accelerations(states, "state").tolist()],
        [None, *(c if ok else None for c, ok in zip(geometry.step_cosines(states).tolist(), both, strict=True))],
        measures(policy, states, group, decode) if isinstance(policy, ExitPolicy) else [None] * len(sizes),
        None if policy is None else getattr(policy, "name", None) or "callable",
        getattr(policy, "threshold", None),
    )


def measures(policy: ExitPolicy, states: torch.Tensor, group: int, decode: Callable) -> list[float | None]:
    """What a policy compares with its threshold at every step of the states s(0..K) [K + 1, hidden] of a token."""
    values, memory, previous = [], {}, None
    for step in range(len(states) - 1):
        state = states[step + 1][None]
        update = state - states[step][None]
        value = policy.measure(LoopView(group, step, state, update, previous, memory, decode))
        values.append(None if value is None else value.item())
        previous = update
    return values


def follow_two(
    model: RecurrentGPT2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    ids: torch.Tensor,
    exit_policy: Any,
    num_loops: list[int],
) -> list[dict[str, Any]]:
    """The tokens of a text `ids` [tokens] with the fewest and the most loops, JSON-able: `said`, the token that came,
    and of the token `before` it, at which that was predicted, `path` and `lens` (the table, by columns)."""
    with torch.no_grad():
        steps = model(ids[None], exit_policy=exit_policy, num_loops=num_loops, use_cache=False).loop_steps[0]
    depth = mean_depth(steps, model.config)[1:-1]  # the first stands for itself, and behind the last nothing came
    followed = []
    for place in (1 + int(depth.argmin()), 1 + int(depth.argmax())):
        path, seen = follow_token(model, ids, place, exit_policy, num_loops)
        table = lens_table(seen, tokenizer, min(4, model.config.vocab_size), "leave")
        before, said = (tokenizer.decode([token]) for token in ids[place : place + 2].tolist())
        followed.append({"before": before, "said": said, "path": asdict(path), "lens": table.to_dict("list")})
    return followed


def name_of_layers(layers: list[int]) -> str:
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"


@contextmanager
def _states_between(model: RecurrentGPT2ForCausalLM, place: int) -> Iterator[dict[str, torch.Tensor]]:
    """Fills a dict, while the model runs, with the states of a token behind the embeddings and layers outside loops."""
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable:
        def hook(module: nn.Module, given: Any, output: torch.Tensor) -> None:
            seen[name] = output[0, place].detach()

        return hook

    plain = [layer for stage in model.config.stages if stage.group is None for layer in stage.layers]
    modules = {"embedding": model.model.dropout, **{f"layer {layer}": model.model.layers[layer] for layer in plain}}
    handles = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
