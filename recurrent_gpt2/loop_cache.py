"""Key-value cache of a looped model.

A plain layer has one slot of keys and values, a looped layer one per loop step (`per_step`) or one in all
(`last_step`):

    layer 3   [tokens]                                      plain
    layer 4   [tokens] [tokens] [tokens] ...                step 0, 1, 2, ...
    layer 5   [tokens]                                      last_step

A token that stops looping after step k is seen, at every deeper step, through its keys and values of step k. Deeper
slots are therefore filled lazily: slot k+1 is brought up to date from slot k when some token first gets there.
"""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, StaticLayer

from .active_tokens import ActiveTokens
from .configuration_recurrent_gpt2 import CACHE_STRATEGIES, RecurrentGPT2Config

# Room is made for this many further tokens at a time, or for half as many again as there are.
GROWTH = 64


class Slot(DynamicLayer):
    """Keys and values [batch, heads, tokens, head_dim] of one attention, with room to grow in place.

    While gradients are recorded it grows by concatenation instead, since a tensor saved for the backward pass must not
    be written to.
    """

    def __init__(self):
        super().__init__()
        self.is_initialized = False
        self._room: tuple[torch.Tensor, torch.Tensor] | None = None  # of which `keys` and `values` are the front

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        return self.write(self.get_seq_length(), key_states, value_states)

    def write(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Puts keys and values at tokens `start` and after, in place of what is there, and returns all up to them."""
        if torch.is_grad_enabled():
            self._room = None
            if not self.is_initialized:
                self.lazy_initialization(keys, values)
            if start == 0:
                self.keys, self.values = keys, values
            else:
                self.keys = torch.cat([self.keys[:, :, :start], keys], dim=2)
                self.values = torch.cat([self.values[:, :, :start], values], dim=2)
            return self.keys, self.values
        end = start + keys.shape[2]
        room = self.reserve(start, end, keys)
        room[0][:, :, start:end], room[1][:, :, start:end] = keys, values
        return self.keys, self.values

    def reserve(self, start: int, end: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Counts tokens up to `end`, and returns the room into which those from `start` on must then be written."""
        if not self.is_initialized:  # as `lazy_initialization`, but for empty tensors that nobody would see
            self.dtype, self.device, self.is_initialized = like.dtype, like.device, True
        room = self._room
        # A tensor that was made in inference mode can't be written to once that is left.
        is_read_only = room is not None and room[0].is_inference() and not torch.is_inference_mode_enabled()
        if room is None or room[0].shape[2] < end or is_read_only:
            room = self._room = self._make_room(start, end, like)
        self.keys, self.values = room[0].narrow(2, 0, end), room[1].narrow(2, 0, end)
        return room

    def reserve_next(
        self, tokens: int, like: torch.Tensor, loop_step: int = 0, keep_others: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for further tokens of every row, `like` [batch, heads, _, head_dim]."""
        start = self.get_seq_length()
        return self.reserve(start, start + tokens, like)

    def _make_room(self, start: int, end: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch, heads, _, head_dim = like.shape
        capacity = max(end + GROWTH, start + start // 2)
        keys, values = (like.new_empty(batch, heads, capacity, head_dim) for _ in range(2))
        if start > 0:
            keys[:, :, :start] = self.keys[:, :, :start]
            values[:, :, :start] = self.values[:, :, :start]
        return keys, values

    def catch_up(self, shallower: "Slot", length: int) -> None:
        """Gives tokens that never got as deep as this slot the keys and values of the slot above."""
        known = self.get_seq_length()
        if known < length:
            self.write(known, shallower.keys[:, :, known:length], shallower.values[:, :, known:length])

    def gather_steps(self, num_loops: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies in one tensor each, [steps, heads, capacity, head_dim], zero where there is nothing yet."""
        return _gather([self], self.get_seq_length(), capacity)

    def take_steps(self, rooms: tuple[torch.Tensor, torch.Tensor], length: int) -> None:
        """What `gather_steps` gave, with further tokens, up to this length."""
        _take([self], rooms, length)

    def truncate(self, length: int) -> None:
        if self.get_seq_length() > length:
            self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]

    def crop(self, tokens_to_remove: int) -> None:
        _check_crop(tokens_to_remove)
        self.truncate(max(self.get_seq_length() + tokens_to_remove, 0))

    def reset(self) -> None:
        self._room = None
        super().reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._room = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._room = None

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._room = None


class PerStepLayer(CacheLayerMixin):
    """The exact cache of a looped layer: a slot per loop step, as many as the deepest token has needed."""

    is_croppable = True
    is_sliding = False

    def __init__(self):
        super().__init__()
        self.slots = [Slot()]
        self._chunk_start = 0

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        loop_step: int = 0,
        active: ActiveTokens | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the keys and values of a chunk at a loop step and returns those that its queries see.

        With `active`, the states are packed [1, heads, n, head_dim] and belong to those tokens; the other tokens of the
        chunk keep what they had at the step before.
        """
        if loop_step == 0:
            self._chunk_start = self.get_seq_length()
        start = self._chunk_start
        slot, previous = self._slots_of(loop_step)
        if active is not None:
            key_states = _merge(key_states, previous and previous.keys[:, :, start:], active)
            value_states = _merge(value_states, previous and previous.values[:, :, start:], active)
        return slot.write(start, key_states, value_states)

    def reserve_next(
        self, tokens: int, like: torch.Tensor, loop_step: int = 0, keep_others: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As a slot's, at a loop step. `keep_others`: some of the tokens will not be written, and keep what they had at
        the step before."""
        if loop_step == 0:
            self._chunk_start = self.get_seq_length()
        start = self._chunk_start
        slot, previous = self._slots_of(loop_step)
        room = slot.reserve(start, start + tokens, like)
        if keep_others and previous is not None and previous is not slot:
            slot.keys[:, :, start:] = previous.keys[:, :, start:]
            slot.values[:, :, start:] = previous.values[:, :, start:]
        return room

    def _slots_of(self, loop_step: int) -> tuple[Slot, Slot | None]:
        """The slot to write, and the one that holds the chunk's tokens as of the step before."""
        if loop_step == 0:
            return self.slots[0], None
        if loop_step == len(self.slots):
            self.slots.append(Slot())
        slot, previous = self.slots[loop_step], self.slots[loop_step - 1]
        slot.catch_up(previous, self._chunk_start)
        return slot, previous

    def gather_steps(self, num_loops: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As a slot's, of all steps up to this number."""
        self._chunk_start = self.get_seq_length()
        slots = [self._slots_of(step)[0] for step in range(num_loops)]
        return _gather(slots, self._chunk_start, capacity)

    def take_steps(self, rooms: tuple[torch.Tensor, torch.Tensor], length: int) -> None:
        _take(self.slots, rooms, length)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.slots[0].lazy_initialization(key_states, value_states)

    # Attributes of every cache layer, which its constructor sets; here they are those of the first slot.
    is_initialized = property(lambda self: self.slots[0].is_initialized, lambda self, value: None)
    keys = property(lambda self: self.slots[0].keys, lambda self, value: None)
    values = property(lambda self: self.slots[0].values, lambda self, value: None)

    def get_seq_length(self) -> int:
        return self.slots[0].get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots[0].get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        _check_crop(tokens_to_remove)
        length = max(self.get_seq_length() + tokens_to_remove, 0)  # deeper slots may be shorter than this
        for slot in self.slots:
            slot.truncate(length)

    def reset(self) -> None:
        self.slots = [Slot()]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        for slot in self.slots:
            slot.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        for slot in self.slots:
            slot.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        for slot in self.slots:
            slot.batch_select_indices(indices)


class LastStepLayer(PerStepLayer):
    """One slot: tokens of the past are seen, at every step, through the keys and values of their last step.

    Tokens of one chunk still see each other step by step, since each step overwrites the one before.
    """

    def _slots_of(self, loop_step: int) -> tuple[Slot, Slot | None]:
        return self.slots[0], None if loop_step == 0 else self.slots[0]


class StaticStepsLayer(StaticLayer):
    """A slot of fixed size per loop step, for fixed loops: what `cache_implementation="static"` uses."""

    def __init__(self, max_cache_len: int, num_loops: int):
        super().__init__(max_cache_len)
        self.deeper = [StaticLayer(max_cache_len) for _ in range(num_loops - 1)]  # steps 1, 2, ...

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, loop_step: int = 0, **kwargs):
        if loop_step == 0:
            return super().update(key_states, value_states)
        return self.deeper[loop_step - 1].update(key_states, value_states)

    def reset(self) -> None:
        super().reset()
        for slot in self.deeper:
            slot.reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        for slot in self.deeper:
            slot.reorder_cache(beam_idx)


class LoopCache(Cache):
    """The cache of RecurrentGPT2; `generate` and `forward(use_cache=True)` make it by themselves.

    Args:
        config: The model's config: it says which layers are looped.
        cache_strategy: `per_step` or `last_step`; the config's when left out.
        max_cache_len: Gives a static cache, of this many tokens and for fixed loops.
        num_loops: Loops of that static cache (an int, or one per group); the config's when left out.

    `loop_steps` [batch, tokens, groups] holds the steps that every token in the cache took.
    """

    def __init__(
        self,
        config: RecurrentGPT2Config,
        cache_strategy: str | None = None,
        max_cache_len: int | None = None,
        num_loops: int | list[int] | None = None,
    ):
        strategy = config.cache_strategy if cache_strategy is None else cache_strategy
        check_cache_strategy(strategy)
        if max_cache_len is not None and strategy != "per_step":
            raise ValueError(f"a static cache has a slot per loop step: `cache_strategy` {strategy!r} excludes it.")
        group_of = {layer: index for index, group in enumerate(config.loop_groups) for layer in group}
        loops = config.loops_per_group(num_loops)

        def make_layer(layer: int) -> CacheLayerMixin:
            if max_cache_len is not None:
                if layer in group_of:
                    return StaticStepsLayer(max_cache_len, loops[group_of[layer]])
                return StaticLayer(max_cache_len)
            if layer not in group_of:
                return Slot()
            return PerStepLayer() if strategy == "per_step" else LastStepLayer()

        super().__init__(layers=[make_layer(layer) for layer in range(config.num_hidden_layers)])
        self.cache_strategy = strategy
        self.static_loops = None if max_cache_len is None else loops
        self.loop_steps: torch.Tensor | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        """As every cache's; there is nothing to append and nothing to offload."""
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def check_pass(self, batch: int, length: int, num_loops: list[int], is_adaptive: bool) -> None:
        """Fails with a sentence where a pass over `length` further tokens of `batch` rows can't be right."""
        first = self.layers[0]
        if first.is_initialized and first.keys.shape[0] != batch:
            raise ValueError(f"the cache holds {first.keys.shape[0]} row(s), but the input has {batch}.")
        if self.static_loops is None:
            return
        if is_adaptive:
            raise ValueError("a static cache takes fixed loops only: leave out `exit_policy`, or the static cache.")
        if num_loops != self.static_loops:
            raise ValueError(
                f"this static cache was made for `num_loops` {self.static_loops}, but the call asks for {num_loops}: "
                "what it holds would be wrong for them."
            )
        if not torch.compiler.is_compiling() and first.get_seq_length() + length > first.max_cache_len:
            raise ValueError(
                f"this static cache has room for {first.max_cache_len} tokens and holds {int(first.get_seq_length())}, "
                f"but the input has {length} more: make it larger (`max_cache_len`)."
            )

    def record_loop_steps(self, loop_steps: torch.Tensor) -> None:
        """Appends the steps [batch, tokens, groups] of the tokens that a forward pass has just added."""
        known = self.loop_steps
        self.loop_steps = loop_steps if known is None else torch.cat([known, loop_steps], dim=1)

    def num_bytes(self) -> int:
        """Bytes that the cached keys and values take (room made for further tokens not counted)."""
        slots = [
            slot for layer in self.layers for slot in getattr(layer, "slots", [layer, *getattr(layer, "deeper", ())])
        ]
        slots = [slot for slot in slots if slot.is_initialized]
        return sum(slot.keys.nbytes + slot.values.nbytes for slot in slots)

    def crop(self, tokens_to_remove: int) -> None:
        if self.static_loops is not None:
            raise ValueError("a static cache can't be cropped: reset it, or use a cache without `max_cache_len`.")
        super().crop(tokens_to_remove)
        if self.loop_steps is not None:
            self.loop_steps = self.loop_steps[:, : max(self.loop_steps.shape[1] + tokens_to_remove, 0)]

    def reset(self) -> None:
        super().reset()
        self.loop_steps = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        if self.loop_steps is not None:
            self.loop_steps = self.loop_steps.index_select(0, beam_idx.to(self.loop_steps.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.loop_steps is not None:
            self.loop_steps = self.loop_steps.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        if self.loop_steps is not None:
            self.loop_steps = self.loop_steps[indices]


def _gather(slots: list[Slot], length: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    like, heads, head_dim = slots[0].keys, slots[0].keys.shape[1], slots[0].keys.shape[3]
    keys, values = (like.new_zeros(len(slots), heads, capacity, head_dim) for _ in range(2))
    for step, slot in enumerate(slots):
        keys[step, :, :length], values[step, :, :length] = slot.keys[0, :, :length], slot.values[0, :, :length]
    return keys, values


def _take(slots: list[Slot], rooms: tuple[torch.Tensor, torch.Tensor], length: int) -> None:
    for step, slot in enumerate(slots[: len(rooms[0])]):
        keys, values = slot._room = rooms[0][step : step + 1], rooms[1][step : step + 1]
        slot.keys, slot.values = keys[:, :, :length], values[:, :, :length]


def _merge(packed: torch.Tensor, before: torch.Tensor | None, active: ActiveTokens) -> torch.Tensor:
    """[batch, heads, length, head_dim]: the packed states where a token is active, else those of the step before."""
    packed = packed.transpose(1, 2)  # [1, n, heads, head_dim]
    if before is None:  # the first step, where only padding is not active: nothing that anyone sees
        full = packed.new_zeros(active.batch, active.length, *packed.shape[2:])
    else:
        full = before.transpose(1, 2)
    return active.unpack(packed, full).transpose(1, 2)


def check_cache_strategy(strategy: str) -> None:
    if strategy not in CACHE_STRATEGIES:
        raise ValueError(f"`cache_strategy` is {strategy!r}, but must be one of {', '.join(CACHE_STRATEGIES)}.")


def _check_crop(tokens_to_remove: int) -> None:
    if tokens_to_remove > 0:
        raise ValueError(f"`crop` takes minus the number of tokens to remove, but got {tokens_to_remove}.")
