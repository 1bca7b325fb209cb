"""What `model.optimize_for_inference(compile=True)` adds: decoding a token by compiled stages.

A small model spends its time between operations, not in them. So the layers of a stage (or one step of a loop) are
compiled as one function of the state, the keys and values, and the length of the text. The loop itself stays outside:
another number of loops needs no other code, nor does a longer text, and a policy looks at the state between steps as it
always does. Compiled is what decodes one text, token by token; prompts and batches run as they did.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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


class RowsOfRooms:
    """The same where every row is a token at a place and a loop step of its own. Rooms [steps, heads, places, head_dim]
    hold all steps of a layer, and rows are at evenly spaced ones, so that what they see is a view.

    `index` [rows, heads]: where they write, in the flattened room.
    """

    def __init__(
        self, rooms: list[tuple[torch.Tensor, torch.Tensor]], index: torch.Tensor, step: int, stride: int, rows: int,
        end: int,
    ):  # fmt: skip
        self.rooms, self.index, self.rows, self.end, self.used = rooms, index, rows, end, 0
        self.step, self.stride = step, stride

    def update(self, key: torch.Tensor, value: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, heads, 1, head_dim] -> [rows, heads, tokens, head_dim]"""
        keys, values = self.rooms[self.used]
        self.used += 1
        return self._write(keys, key), self._write(values, value)

    def _write(self, room: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        # (Into a flat tensor: where it is written to through a view, compiled code would copy all of it.)
        room.view(-1, room.shape[-1])[self.index] = new[:, :, 0]
        return room[self.step :: self.stride][: self.rows, :, : self.end].expand(self.rows, -1, -1, -1)


class CompiledDecoding:
    """The stages of a base model, compiled for one token of one text."""

    def __init__(self, model: Any):
        self.model = model
        self.stages: dict[int, Any] = {}  # by their first layer
        self.rows: dict[int, Any] = {}  # the same, for rows that are tokens of one text
        self.compile_all()

    @torch.no_grad()
    def compile_all(self) -> None:
        """Makes the code of every stage: seconds each."""
        config = self.model.config
        cache = LoopCache(config)
        for layer in range(config.num_hidden_layers):  # a text of some tokens
            empty = torch.zeros(1, config.num_attention_heads, 5, config.hidden_size // config.num_attention_heads)
            cache.update(empty, empty, layer)
        with self._apart(config.stages) as stages:
            for stage in stages:
                # Two tensors: without guards, code that was made for one and the same would take one for the other.
                state, projected_input = (torch.zeros(1, 1, config.hidden_size) for _ in range(2))
                self.stages[stage.layers[0]] = self._make(stage, ReservedRoom)
                self(stage.layers, state, cache, 0, stage.group, projected_input)

    @torch.inference_mode(False)
    @torch.no_grad()
    def compile_rows(self) -> None:
        """The same for rows that are tokens of one text, in a network with one loop group. No number here may be 0 or
        1, or as large as another bound, but where it is always so: it would be taken for a constant."""
        config, end, rows, step, stride = self.model.config, 7, 3, 2, 5
        heads, width = config.num_attention_heads, config.hidden_size
        first = config.loop_groups[0][0]  # layers before it take tokens one at a time
        with self._apart([stage for stage in config.stages if stage.layers[0] >= first]) as stages:
            for stage in stages:
                many = stage.group is not None
                rooms = [
                    tuple(torch.zeros(29 if many else 1, heads, 13, width // heads) for _ in range(2))
                    for _ in stage.layers
                ]
                index = torch.arange(rows * heads).view(rows, heads)
                state, projected_input = (torch.zeros(rows, 1, width) for _ in range(2))
                mask, of_rooms = torch.zeros(rows, 1, 1, end), (rooms, index, step if many else 0, stride, rows, end)
                self.rows[stage.layers[0]] = self._make(stage, RowsOfRooms)
                self.rows[stage.layers[0]](state, projected_input, of_rooms, mask)

    @contextmanager
    def _apart(self, stages: list[Any]) -> Iterator[Iterable[Any]]:
        """With a progress bar. Lengths that happen to be equal while code is made will not stay so."""
        with shapes.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            yield logging.tqdm(stages, "compiling", unit=" stages", leave=False)

    def _make(self, stage: Any, kind: type) -> Callable:
        """Guards are left out: what they would compare is checked by `takes`, or can't change, since an
        optimised model has no weights to change. They would tell apart what is the same to the code, such as tensors
        that were made in inference mode."""
        blocks = [self.model.layers[index] for index in stage.layers]
        entry = None if stage.group is None else self.model.loop_inputs[stage.group]

        def run(state, projected_input, of_rooms, mask=None):
            if entry is not None:
                state = entry(state, projected_input)
            room = kind(*of_rooms)
            for block in blocks:
                state = block(state, attention_mask=mask, past_key_values=room)
            return state

        # Code of its own: what is compiled is kept by code, and without guards the first would do for all.
        run = FunctionType(run.__code__.replace(), run.__globals__, closure=run.__closure__, argdefs=run.__defaults__)
        options: dict[str, Any] = {"guard_filter_fn": lambda guards: [False] * len(guards)}
        return torch.compile(run, fullgraph=True, dynamic=True, options=options)

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
        return self.stages[layers[0]](state, projected_input, (rooms, end))
