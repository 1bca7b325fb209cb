"""Drafts that are verified while further ones are made: `generate(..., assistant_model=model.draft(num_loops=2))`.

A looped layer is the same at every step, so tokens at different steps go through it side by side, in one product. With
drafts of 2 loops, of 8, at every tick (the newest token on the left):

    tick 1    a: 0-2
    tick 2    b: 0-2    a: 2-4
    tick 3    c: 0-2    b: 2-4    a: 4-6
    tick 4    d: 0-2    c: 2-4    b: 4-6    a: 6-8    what follows a is certain now
    tick 5    e: 0-2    d: 2-4    c: 4-6    b: 6-8    what follows b is

Each token is read from the state of the one before it after two loops, and looked at again when that has looped on:
so a wrong guess is most often found after two loops more. Then all that were built on it are dropped. A tick takes the
time of a draft, and gives a token of full depth; no loop step is taken twice.

Tokens are those of greedy decoding; sampled ones have its distribution: a guess x, drawn from p, is kept with
probability min(1, q(x) / p(x)) once its distribution turns out to be q, and else drawn anew from (q - p)+; it is then
distributed by q, and looked at again as such.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers.generation import GenerateDecoderOnlyOutput

from .compiled_layers import Rows
from .loop_cache import LoopCache


@dataclass
class InFlight:
    """A token between its entry and the end of its loop, or a gap where one was dropped."""

    place: int | None  # in the text; None: a gap
    drawn_by: torch.Tensor | None = None  # [vocabulary]: the probabilities by which the token after it was drawn

    @property
    def end(self) -> int:
        """The place of the token after it."""
        return cast(int, self.place) + 1


@dataclass
class At:
    """Where the rows of a product are at step 0 of a tick, and what they see: in flat rooms [rows, heads], with a mask
    [rows, 1, 1, tokens]; for compiled layers, at which loop step and which place, [rows] each."""

    rows: int
    where: torch.Tensor | None = None  # None: the newest alone, at its place
    seen: torch.Tensor | None = None

    def without_last(self) -> "At":
        if self.where is None or self.seen is None:
            return self
        return At(self.rows - 1, self.where[:-1], self.seen[:-1])


class RoomOfNewest:
    """In the place of the cache: keys and values of one token go to the room that was made for them."""

    def __init__(self, rooms: list[tuple[torch.Tensor, torch.Tensor]], end: int):
        self.rooms, self.end, self.used = rooms, end, 0

    def update(self, key: torch.Tensor, value: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.rooms[self.used]
        self.used += 1
        keys[:, :, self.end - 1 : self.end] = key
        values[:, :, self.end - 1 : self.end] = value
        return keys[:, :, : self.end], values[:, :, : self.end]


class RoomsOfRows:
    """The same where every row is a token at a place and a loop step of its own. Rooms [steps, heads, places, head_dim]
    hold all steps of a layer, and rows are at evenly spaced ones, so that what they see is a view.

    `where` [rows, heads]: they write, in the flattened room.
    """

    def __init__(
        self, rooms: list[tuple[torch.Tensor, torch.Tensor]], where: torch.Tensor, step: int, stride: int, end: int
    ):
        self.rooms, self.where, self.step, self.stride, self.end, self.used = rooms, where, step, stride, end, 0

    def update(self, key: torch.Tensor, value: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, heads, 1, head_dim] -> [rows, heads, tokens, head_dim]"""
        keys, values = self.rooms[self.used]
        self.used += 1
        return self._write(keys, key), self._write(values, value)

    def _write(self, room: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        room.view(-1, room.shape[-1])[self.where] = new[:, :, 0]
        rows = len(self.where)
        return room[self.step :: self.stride][:rows, :, : self.end].expand(rows, -1, -1, -1)


class Pipeline:
    """The tokens of one text that are on their way through a network with one loop group, the newest first."""

    def __init__(self, model: Any, cache: LoopCache, num_loops: int, draft_loops: int, capacity: int):
        self.base, self.decode = model.base_model, model.decode_states
        self.num_loops, self.draft_loops = num_loops, draft_loops
        self.cache, self.length = cache, cache.get_seq_length()
        layers, self.looped = list(range(len(cache.layers))), self.base.config.loop_groups[0]
        self.before, self.after = layers[: self.looped[0]], layers[self.looped[-1] + 1 :]
        self.blocks = list(self.base.layers)  # found faster in a list
        self.attend, compiled = self.base.attention_kernel(), self.base.compiled_layers
        self.compiled = compiled if compiled is not None and compiled.knows(cache.layers[0].keys) else None
        # One place more than there are tokens: what gaps write goes there.
        self.nowhere = capacity
        self.rooms = [
            layer.gather_steps(num_loops if index in self.looped else 1, capacity + 1)
            for index, layer in enumerate(cache.layers)
        ]
        self.tokens: list[InFlight] = []
        self.states = self.inputs = torch.empty(0)
        self.most_rows = -(-num_loops // draft_loops)
        _, heads, capacity, _ = self.rooms[self.looped[0]][0].shape
        self.step_size = heads * capacity
        self.lane, self.visible = (torch.arange(n, device=self.base.device) for n in (self.most_rows, capacity))
        self.heads = torch.arange(heads, device=self.base.device) * capacity

    def enter(self, token: torch.Tensor | None) -> None:
        """A token [1, 1] that follows all others, or None: a gap."""
        base, place = self.base, self.length
        if token is None:
            start, projected_input = torch.zeros_like(self.states[:1]), torch.zeros_like(self.inputs[:1])
        else:
            position = self.visible[place : place + 1, None]
            self.length += 1
            entry = base.add_positions(base.embed_tokens(token), position)
            if self.before:
                entry = self._run(self.before, entry, self._find([place], self.before))
            start, projected_input = base.start_of_loop(0, entry, base.fixed_noise(0, entry, position))
        if self.tokens:
            start, projected_input = torch.cat([start, self.states]), torch.cat([projected_input, self.inputs])
        self.states, self.inputs = start, projected_input
        self.tokens.insert(0, InFlight(None if token is None else place))

    def advance(self) -> None:
        """All tokens take the next steps of their loops."""
        rows = len(self.tokens)
        at = self._find([token.place for token in self.tokens], self.looped)
        for step in range(self.draft_loops):
            if rows > -(-(self.num_loops - step) // self.draft_loops):  # the oldest is at its end
                rows -= 1
                at = at.without_last()
            states = self._run(self.looped, self.states[:rows], at, step, self.inputs[:rows])
            self.states = states if rows == len(self.tokens) else torch.cat([states, self.states[rows:]])

    def logits_of(self, rows: list[int]) -> torch.Tensor:
        """[rows, vocabulary] of what follows these tokens, none of which may be a gap."""
        states = self.states if len(rows) == len(self.tokens) else self.states[rows]
        if self.after:
            states = self._run(self.after, states, self._find([self.tokens[row].end - 1 for row in rows], self.after))
        return self.decode(states)[:, 0]

    def drop(self, count: int) -> None:
        """The newest tokens, which a wrong one led to. Their rows stay, since those behind them are at fixed steps."""
        self.length = min((t.place for t in self.tokens[:count] if t.place is not None), default=self.length)
        self.tokens[:count] = [InFlight(None) for _ in range(count)]

    def retire(self) -> None:
        """Takes out the oldest token, if it has taken all its steps, and then gaps that nothing follows."""
        del self.tokens[self.most_rows - 1 :]
        while self.tokens and self.tokens[-1].place is None:
            del self.tokens[-1]
        self.states, self.inputs = self.states[: len(self.tokens)], self.inputs[: len(self.tokens)]

    def finish(self, length: int) -> None:
        """Leaves the cache with as many tokens, as if they had been decoded one by one."""
        known = self.cache.get_seq_length()
        for layer, room in zip(self.cache.layers, self.rooms, strict=True):
            layer.take_steps(room, length)
        steps = torch.full((1, length - known, 1), self.num_loops, device=self.base.device)
        self.cache.record_loop_steps(steps)

    def _find(self, places: list[int | None], layers: list[int]) -> At:
        rows, room = len(places), self.rooms[layers[0]][0]
        steps = self.lane[:rows] * (self.draft_loops if room.shape[0] > 1 else 0)
        if self.compiled is not None:
            return At(rows, steps, torch.tensor([-1 if place is None else place for place in places]))
        if places == [self.length - 1]:
            return At(1)
        at = torch.tensor([self.nowhere if place is None else place for place in places], device=self.lane.device)
        mask = torch.zeros(rows, self.length, dtype=room.dtype, device=at.device)
        mask.masked_fill_(self.visible[: self.length] > at[:, None], torch.finfo(room.dtype).min)
        return At(rows, (at + steps * self.step_size)[:, None] + self.heads, mask[:, None, None])

    def _run(
        self, layers: list[int], states: torch.Tensor, at: At, step: int = 0, inputs: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The states [rows, 1, hidden] of tokens behind the layers. Of looped ones, with the `inputs` of their loop:
        the newest token is at this step, those behind it farther."""
        rooms, mask = [self.rooms[index] for index in layers], None
        cache: RoomOfNewest | RoomsOfRows
        if at.where is None:
            newest = [(keys[step : step + 1], values[step : step + 1]) for keys, values in rooms]
            cache = RoomOfNewest(newest, self.length)
        elif self.compiled is not None:
            entry = None if inputs is None else (0, inputs)
            return self.compiled(layers, states, rooms, Rows(at.where + step, at.seen), entry)
        else:
            where, mask = at.where + step * self.step_size, at.seen
            cache = RoomsOfRows(rooms, where, step, self.draft_loops, self.length)
        if inputs is not None:
            states = self.base.loop_inputs[0](states, inputs)
        for layer in layers:
            states = self.blocks[layer](states, attention_mask=mask, past_key_values=cache, attend=self.attend)
        return states


@dataclass
class PipelinedGeneration:
    """What `_assisted_decoding` does, by a pipeline."""

    model: Any
    draft_loops: int
    num_loops: int
    logits_processor: Any
    stopping_criteria: Any
    generation_config: Any
    streamer: Any = None
    scores: list[torch.Tensor] = field(default_factory=list)  # of each new token, [1, vocabulary]
    logits: list[torch.Tensor] = field(default_factory=list)

    def run(self, input_ids: torch.Tensor, first_inputs: dict[str, Any]) -> Any:
        """`first_inputs`: of the pass that reads the prompt."""
        config, cache = self.generation_config, first_inputs["past_key_values"]
        logits = self.model(**first_inputs, return_dict=True).logits[:, -1].float()
        scores = self.logits_processor(input_ids, logits.clone())
        text, is_done = self._put(input_ids, choose(scores[0], config.do_sample)[0], scores, logits)
        if not is_done:
            pipeline = Pipeline(self.model, cache, self.num_loops, self.draft_loops, config.max_length - 1)
            text = self._decode(pipeline, text)
            pipeline.finish(text.shape[1] - 1)
        if self.streamer is not None:
            self.streamer.end()
        if not config.return_dict_in_generate:
            return text
        return GenerateDecoderOnlyOutput(
            sequences=text,
            scores=tuple(self.scores) if config.output_scores else None,
            logits=tuple(self.logits) if config.output_logits else None,
            past_key_values=cache,
        )

    def _decode(self, pipeline: Pipeline, text: torch.Tensor) -> torch.Tensor:
        """`text` ends with a token that is certain, and has not been read."""
        longest, last = self.generation_config.max_length, pipeline.most_rows - 1
        known = text  # and behind it, tokens that are guessed
        while True:
            has_next = pipeline.length < known.shape[1] < longest
            pipeline.enter(known[:, -1:] if has_next else None)
            pipeline.advance()
            tokens = pipeline.tokens
            rows = [row for row, token in enumerate(tokens) if token.place is not None]
            if self.logits_processor:  # which is called for every row: look at the newest, and at what will be certain
                rows = [row for row in rows if row in (0, last)]
            for row, chosen, guess, scores, logits in self._look(pipeline, rows, known):
                if row == last:
                    text, is_done = self._put(text, chosen, scores, logits)
                    if is_done:
                        return text
                if chosen != guess:
                    known = torch.cat([known[:, : tokens[row].end], known.new_tensor([[chosen]])], dim=1)
                    pipeline.drop(row)
                    break
            pipeline.retire()

    def _look(self, pipeline: Pipeline, rows: list[int], known: torch.Tensor) -> Iterator[tuple]:
        """Of each row: itself, the token that follows it, which was guessed before (None: none), scores and logits. The
        oldest is first: a guess is looked at before those that were built on it."""
        if not rows:
            return
        do_sample, all_logits = self.generation_config.do_sample, pipeline.logits_of(rows).float()
        greedy = None if do_sample or self.logits_processor else all_logits.argmax(-1).tolist()
        guesses = [*known[0].tolist(), None]
        for index, row in reversed(list(enumerate(rows))):
            token, logits = pipeline.tokens[row], all_logits[index : index + 1]
            guess = guesses[token.end]
            if greedy is not None:
                yield row, greedy[index], guess, logits, logits
                continue
            scores = self.logits_processor(known[:, : token.end], logits.clone())
            chosen, token.drawn_by = choose(scores[0], do_sample, guess, token.drawn_by)
            yield row, chosen, guess, scores, logits

    def _put(self, text: torch.Tensor, token: int, scores: torch.Tensor, logits: torch.Tensor):
        """The text with a token that is certain, and whether it ends there."""
        text = torch.cat([text, text.new_tensor([[token]])], dim=1)
        if self.streamer is not None:
            self.streamer.put(text[:, -1:].cpu())
        if self.generation_config.output_scores:
            self.scores.append(scores)
        if self.generation_config.output_logits:
            self.logits.append(logits)
        return text, bool(self.stopping_criteria(text, tuple(self.scores) or None).all())


def choose(
    scores: torch.Tensor, do_sample: bool, guess: int | None = None, drawn_by: torch.Tensor | None = None
) -> tuple[int, torch.Tensor | None]:
    """A token by its scores [vocabulary], and the probabilities it is distributed by, if it is drawn. A guess that was
    drawn by other probabilities stays as often as it can."""
    if not do_sample:
        return int(scores.argmax()), None
    probabilities = scores.softmax(-1)
    if guess is None or drawn_by is None:
        return int(torch.multinomial(probabilities, 1)), probabilities
    if torch.rand((), device=scores.device) * drawn_by[guess] >= probabilities[guess]:
        missing = (probabilities - drawn_by).clamp_min(0)
        if missing.sum() > 0:  # else the two are the same, but for rounding
            guess = int(torch.multinomial(missing, 1))
    return guess, probabilities
