"""Text that is generated token by token, with the loops of every token as it comes."""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from recurrent_gpt2 import LoopCache

from ..common import mean_depth
from ..pictures import ShownToken
from .workbench import Opened


@dataclass
class Sampling:
    """How the next token is chosen; at temperature 0 it is the likeliest."""

    new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.new_tokens <= 512:
            raise ValueError(f"the new tokens are {self.new_tokens}, but must be from 0 to 512.")
        if not 0 <= self.temperature <= 10:
            raise ValueError(f"the temperature is {self.temperature}, but must be from 0 (the likeliest token) to 10.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p is {self.top_p}, but must be above 0 and at most 1.")

    def arguments(self) -> dict[str, Any]:
        if self.temperature == 0:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}


@dataclass
class Text:
    """Tokens so far: those of the prompt, then new ones, and the loops at each token but the last."""

    checkpoint: str
    loops: dict[str, Any]  # exit policy and cap
    ids: list[int]
    prompt: int  # tokens of it
    steps: list[list[int]] = field(default_factory=list)  # per token, per group
    times: list[float] = field(default_factory=list)  # at which new tokens came

    def shown(self, opened: Opened) -> list[ShownToken]:
        """A token has the loops of the one before it, which predicted it; the first was given."""
        depths = mean_depth(torch.tensor(self.steps), opened.model.config).tolist() if self.steps else []
        tokens = []
        for place, token in enumerate(self.ids):
            known = 0 < place <= len(self.steps)
            tokens.append(
                ShownToken(
                    opened.tokenizer.decode([token]),
                    self.steps[place - 1] if known else None,
                    round(depths[place - 1], 2) if known else None,
                    place < self.prompt,
                )
            )
        return tokens

    @property
    def new(self) -> list[int]:
        return self.ids[self.prompt :]

    def mean_steps(self, opened: Opened) -> float | None:
        """Over the new tokens, or over those of the prompt where nothing was generated."""
        steps = self.steps[self.prompt - 1 :] if self.new else self.steps
        return mean_depth(torch.tensor(steps), opened.model.config).mean().item() if steps else None

    @property
    def ms_per_token(self) -> float | None:
        """Of decoding: from the first new token to the last."""
        return 1000 * (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else None


class _Stopped(StoppingCriteria):
    def __init__(self):
        self.flag = threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self.flag.is_set(), dtype=torch.bool)


class _Steps(BaseStreamer):
    """Puts into a queue, for every new token: it, the steps at all tokens before it that are new, and the time."""

    def __init__(self, cache: LoopCache):
        self.cache, self.queue = cache, queue.SimpleQueue()
        self.known, self.is_prompt = 0, True

    def put(self, value: torch.Tensor) -> None:
        if self.is_prompt:  # which comes first, and whole
            self.is_prompt = False
            return
        steps = self.cache.loop_steps[0, self.known :].tolist()
        self.known += len(steps)
        self.queue.put((int(value.flatten()[0]), steps, perf_counter()))

    def end(self) -> None:
        pass


def stream(opened: Opened, ids: torch.Tensor, loops: dict[str, Any], sampling: Sampling) -> Iterator[Text]:
    """The text so far, again at every token that `generate` gives. Sampling draws from the global generator: one
    stream at a time."""
    text = Text(opened.name, loops, ids.tolist(), len(ids))
    room = opened.model.config.max_position_embeddings + 1 - len(ids)
    new_tokens = min(sampling.new_tokens, room)
    if new_tokens == 0:
        with torch.no_grad():
            text.steps = opened.model(ids[None], use_cache=False, logits_to_keep=1, **loops).loop_steps[0].tolist()
        yield text
        return
    cache, stopped = LoopCache(opened.model.config), _Stopped()
    streamer = _Steps(cache)

    def run() -> None:
        try:
            torch.manual_seed(sampling.seed)
            opened.model.generate(
                ids[None], attention_mask=torch.ones_like(ids)[None], past_key_values=cache, streamer=streamer,
                stopping_criteria=[stopped], max_new_tokens=new_tokens, pad_token_id=opened.tokenizer.eos_token_id,
                **loops, **sampling.arguments(),
            )  # fmt: skip
            streamer.queue.put(None)
        except Exception as error:
            streamer.queue.put(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        while (came := streamer.queue.get()) is not None:
            if isinstance(came, Exception):
                raise came
            token, steps, time = came
            text.ids.append(token)
            text.steps += steps
            text.times.append(time)
            yield text
    finally:  # the visitor may have gone away
        stopped.flag.set()
        thread.join()


def parting(one: Text, other: Text) -> int | None:
    """The place of the first token at which two texts differ; None: the same as far as both go."""
    for place, (a, b) in enumerate(zip(one.ids, other.ids, strict=False)):
        if a != b:
            return place
    return None
