"""The tokens of a chunk that are still looping, packed side by side so that nothing is computed for the others."""

import torch


class ActiveTokens:
    """A subset of the tokens of a `[batch, length]` chunk.

    Packed tensors are `[1, n, ...]`, in the order of `index`, the tokens' places in the flattened chunk. Attention
    can't take them as they are, since rows hold unequal numbers of active tokens: `pad` spreads packed queries over
    `[batch, queries, ...]`, with as many places as the fullest row needs, and `unpad` packs the result again.
    """

    def __init__(self, index: torch.Tensor, batch: int, length: int):
        self.index, self.batch, self.length = index, batch, length
        self.rows = index // length  # [n]
        self.columns = index % length  # [n]
        self._layout: tuple[torch.Tensor, int] | None = None
        self._mask: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def from_mask(cls, mask: torch.Tensor) -> "ActiveTokens":
        return cls(mask.flatten().nonzero().squeeze(1), *mask.shape)

    def __len__(self) -> int:
        return self.index.shape[0]

    def keep(self, kept: torch.Tensor) -> "ActiveTokens":
        """The tokens at the places `kept` of this set."""
        return ActiveTokens(self.index[kept], self.batch, self.length)

    def pack(self, full: torch.Tensor) -> torch.Tensor:
        """[batch, length, ...] -> [1, n, ...]"""
        return full.flatten(0, 1)[self.index][None]

    def unpack(self, packed: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
        """A copy of `full` [batch, length, ...] with the packed tokens in their places."""
        return full.flatten(0, 1).index_copy(0, self.index, packed[0]).view_as(full)

    def as_mask(self) -> torch.Tensor:
        """[batch, length], True at the active tokens."""
        mask = torch.zeros(self.batch * self.length, dtype=torch.bool, device=self.index.device)
        mask[self.index] = True
        return mask.view(self.batch, self.length)

    @property
    def layout(self) -> tuple[torch.Tensor, int]:
        """Each token's place in the padded queries [n], and their number a row."""
        if self._layout is None:
            per_row = torch.bincount(self.rows, minlength=self.batch)
            first = per_row.cumsum(0) - per_row
            place = torch.arange(len(self), device=self.index.device) - first[self.rows]
            self._layout = place, int(per_row.max())
        return self._layout

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """[1, n, ...] -> [batch, queries, ...]"""
        if self.batch == 1:
            return packed
        place, queries = self.layout
        padded = packed.new_zeros(self.batch, queries, *packed.shape[2:])
        return padded.index_put((self.rows, place), packed[0])

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """[batch, queries, ...] -> [1, n, ...]"""
        if self.batch == 1:
            return padded
        return padded[self.rows, self.layout[0]][None]

    def pad_mask(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """The rows of an attention mask [batch, heads, length, keys] that belong to the padded queries."""
        if mask is None:
            return None
        if self._mask is None or self._mask[0] is not mask:  # the same for all layers until the set changes
            place, queries = self.layout
            column = self.columns.new_zeros(self.batch, queries).index_put((self.rows, place), self.columns)
            rows = torch.arange(self.batch, device=column.device)[:, None]
            full = mask.expand(self.batch, -1, -1, -1).transpose(1, 2)  # [batch, length, heads, keys]
            self._mask = mask, full[rows, column].transpose(1, 2)
        return self._mask[1]


class LoopState:
    """The loop of a group on its way: the tokens that are still looping, and the last states of those that have left.

    As long as all tokens are active, `active` is None and `state` is [batch, seq, hidden]; then it is packed, [1, n,
    hidden]. `steps` counts the steps that have been taken, of at most `most`.
    """

    def __init__(
        self,
        group: int,
        start: torch.Tensor,
        projected_input: torch.Tensor,
        most: int,
        looped_tokens: torch.Tensor | None = None,
        noise: torch.Tensor | None = None,
    ):
        self.group, self.most, self.noise = group, most, noise
        self.layers: list[int] = []  # of the group
        self.blocks: list[torch.nn.Module] = []  # the same
        self.steps, self.is_done = 0, False
        self.start = self.final = start
        self.loop_steps = torch.zeros(start.shape[:2], dtype=torch.long, device=start.device)
        self.active = None if looped_tokens is None else ActiveTokens.from_mask(looped_tokens)
        if self.active is not None:
            self.final = start.clone(memory_format=torch.contiguous_format)  # written to in place, where tokens leave
        self.state = start if self.active is None else self.active.pack(start)
        self.projected_input = projected_input if self.active is None else self.active.pack(projected_input)
        self.all_projected_inputs = projected_input
        self.previous_update: torch.Tensor | None = None  # [n, hidden]
        self.tokens: torch.Tensor | None = None  # `state` as [n, hidden], where a policy has seen it
        self.memory: dict[str, torch.Tensor] = {}  # of the policy, [n, ...] each
        self.layer_values: list[torch.Tensor] = []  # of the last step, where tokens are frozen instead of left out
        self.trajectory: list[torch.Tensor] | None = None  # s(0), s(1), ... [batch, seq, hidden], if they are kept

    def all_states(self) -> torch.Tensor:
        """[batch, seq, hidden]"""
        return self.state if self.active is None else self.active.unpack(self.state, self.final)

    def advance(self, state: torch.Tensor) -> torch.Tensor:
        """Takes a step to the new state, and returns the one before."""
        previous, self.state = self.state, state
        self.steps += 1
        if self.steps == self.most:
            self.end()
        if self.trajectory is not None:
            self.trajectory.append(self.all_states())
        return previous

    def leave(self, exits: torch.Tensor) -> None:
        """Takes the tokens at `exits` [n] out of the loop."""
        count = exits.shape[0]
        leaving = int(exits if count == 1 else exits.count_nonzero())
        if leaving == count:
            self.end()
        if leaving in (0, count):
            return
        if self.active is None:
            batch, length, hidden = self.state.shape
            everything = torch.arange(batch * length, device=exits.device)
            self.active = ActiveTokens(everything, batch, length)
            self.final = self.state.clone(memory_format=torch.contiguous_format)
            self.state = self.state.reshape(1, -1, hidden)
            self.projected_input = self.projected_input.reshape(1, -1, hidden)
        left, stay = exits.nonzero().squeeze(1), (~exits).nonzero().squeeze(1)
        self._keep(self.active.index[left], self.state[0, left])
        self.active = self.active.keep(stay)
        self.state, self.projected_input, self.tokens = self.state[:, stay], self.projected_input[:, stay], None
        if self.previous_update is not None:
            self.previous_update = self.previous_update[stay]
        self.memory = {name: value[stay] for name, value in self.memory.items()}

    def end(self) -> None:
        """Takes all of them out."""
        self.is_done = True
        if self.active is None:
            self.final = self.state
            self.loop_steps.fill_(self.steps)
        else:
            self._keep(self.active.index, self.state[0])

    def _keep(self, index: torch.Tensor, states: torch.Tensor) -> None:
        self.final.flatten(0, 1).index_copy_(0, index, states)
        self.loop_steps.view(-1).index_fill_(0, index, self.steps)
