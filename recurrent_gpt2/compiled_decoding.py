"""What `model.optimize_for_inference(compile=True)` adds: decoding a token by compiled stages.

A small model spends its time between operations, not in them. So the layers of a stage (or one step of a loop) are
compiled as one function of the state, the keys and values, and the length of the text. The loop itself stays outside:
another number of loops needs no other code, nor does a longer text, and a policy looks at the state between steps as it
always does. Compiled is what decodes one text, token by token; prompts and batches run as they did.
"""

from types import FunctionType
from typing import Any

import torch
from torch.fx.experimental import _config as shapes
from transformers.utils import logging

from .loop_cache import LoopCache


class ReservedRoom:
    """In the place of the cache, while layers are traced: keys and values go to the room that was made for them."""

    def __init__(self, rooms: list[tuple[torch.Tensor, torch.Tensor]], end: int):
        self.rooms, self.end, self.used = rooms, end, 0

    def update(self, key: torch.Tensor, value: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.rooms[self.used]
        self.used += 1
        keys[:, :, self.end - 1 : self.end] = key
        values[:, :, self.end - 1 : self.end] = value
        return keys[:, :, : self.end], values[:, :, : self.end]


class CompiledDecoding:
    """The stages of a base model, compiled for one token of one text."""

    def __init__(self, model: Any):
        self.model = model
        self.stages: dict[int, Any] = {}  # by their first layer
        self.compile_all()

    @torch.no_grad()
    def compile_all(self) -> None:
        """Makes the code of every stage: seconds each."""
        config = self.model.config
        stages, heads = config.stages, config.num_attention_heads
        cache = LoopCache(config)
        for layer in range(config.num_hidden_layers):  # a text of some tokens
            empty = torch.zeros(1, heads, 5, config.hidden_size // heads)
            cache.update(empty, empty, layer)
        # Lengths that happen to be equal now will not stay so.
        apart = shapes.patch(use_duck_shape=False)  # type: ignore[attr-defined]
        with apart, logging.tqdm(stages, "compiling", unit=" stages", leave=False) as bar:
            for stage in bar:
                # Two tensors: without guards, code that was made for one and the same would take one for the other.
                state, projected_input = (torch.zeros(1, 1, config.hidden_size) for _ in range(2))
                self._make(stage.layers, stage.group)
                self(stage.layers, state, cache, 0, stage.group, projected_input)

    def _make(self, layers: list[int], group: int | None) -> None:
        """Guards are left out: what they would compare is checked by `takes`, or can't change, since an
        optimised model has no weights to change. They would tell apart what is the same to the code, such as tensors
        that were made in inference mode."""
        blocks = [self.model.layers[index] for index in layers]
        entry = None if group is None else self.model.loop_inputs[group]

        def run(state, projected_input, rooms, end):
            if entry is not None:
                state = entry(state, projected_input)
            room = ReservedRoom(rooms, end)
            for block in blocks:
                state = block(state, attention_mask=None, past_key_values=room)
            return state

        # Code of its own: what is compiled is kept by code, and without guards the first would do for all.
        run = FunctionType(run.__code__.replace(), run.__globals__, closure=run.__closure__)
        options: dict[str, Any] = {"guard_filter_fn": lambda guards: [False] * len(guards)}
        self.stages[layers[0]] = torch.compile(run, fullgraph=True, dynamic=True, options=options)

    def takes(self, state: torch.Tensor, cache: Any, attention_mask: Any) -> bool:
        """Whether a stage can be run by compiled code."""
        return (
            state.shape[:2] == (1, 1)
            and attention_mask is None
            and cache is not None
            and not cache.is_compileable  # a static one
            and cache.layers[0].is_initialized
            and not torch.is_grad_enabled()
            and self.model.config._attn_implementation == "sdpa"
        )

    def __call__(
        self,
        layers: list[int],
        state: torch.Tensor,
        cache: Any,
        loop_step: int = 0,
        group: int | None = None,
        projected_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        of_layers = [cache.layers[index] for index in layers]
        rooms = [layer.reserve_next(loop_step) for layer in of_layers]
        end = of_layers[0].get_seq_length()
        return self.stages[layers[0]](state, projected_input, rooms, end)
