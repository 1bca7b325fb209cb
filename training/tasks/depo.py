"""Depo: a ring of words, told in pairs, and questions for the word some places on, each with its own number of places.

     a c c b b a ? a >2 b ? c >1 b

c follows a, b follows c, a follows b. What is two places after a? b. After the definition of "Depo" in Physics of
Language Models, part 4, which has words of several tokens; here a word is one. The word that a question starts from is
to be answered too, by the one that follows it. While the curriculum is shallow rings are small, and pairs are told more
than once.
"""

from dataclasses import dataclass

import numpy as np

from .task import NO_ANSWER, Task, TaskBatch, register_task

TOKENS_PER_QUESTION = 4


@register_task("depo")
@dataclass(frozen=True)
class Depo(Task):
    """
    Args:
        depth: Most places that a question goes on. A question takes as many loops.
        words: Words of the ring, in an order of its own for every sequence.
        queries: Questions of a sequence.
    """

    depth: int = 8
    words: int = 16
    queries: int = 8

    def __post_init__(self):
        super().__post_init__()
        if self.words < 2 or self.depth >= self.words:
            raise ValueError(
                f"`depth` of task depo is {self.depth}, but a ring of {self.words} words has at most {self.words - 1} "
                "places to go on: lower it, or raise `words`."
            )

    @property
    def tokens(self) -> list[str]:
        return [*(f" w{word}" for word in range(self.words)), *(f" >{k}" for k in range(1, self.words)), " ?"]

    @property
    def length(self) -> int:
        return 2 * self.words + TOKENS_PER_QUESTION * self.queries

    def sample(self, n: int, depth: int, rng: np.random.Generator) -> TaskBatch:
        size = min(max(3, depth + 1, self.words * depth // self.depth), self.words)  # of the ring
        ring = rng.random((n, self.words)).argsort(1)[:, :size]
        places = rng.random((n, self.words)).argsort(1) % size  # the order in which the pairs are told
        pairs = np.stack([np.take_along_axis(ring, (places + k) % size, 1) for k in (0, 1)], -1)
        starts = np.take_along_axis(ring, rng.integers(size, size=(n, self.queries)), 1)
        return self._solved(pairs, starts, rng.integers(1, depth + 1, size=(n, self.queries)))

    def parse(self, text: str) -> TaskBatch:
        told, *questions = text.split("?")
        words = [self._read(word, "w", self.words, 0) for word in told.split()]
        firsts, seconds = words[::2], words[1::2]
        if sorted(firsts) != list(range(self.words)) or sorted(seconds) != sorted(firsts):
            raise ValueError(
                f"the ring has {len(words)} words, but must tell for each of w0 to w{self.words - 1} once which one "
                "follows it: `w0 w2 w2 w1 w1 w0`."
            )
        if len(questions) > self.queries:
            raise ValueError(f"there are {len(questions)} questions, but must be at most {self.queries}.")
        asked = []
        for question in questions:
            parts = question.split()
            if not 2 <= len(parts) <= 3:
                raise ValueError(f"a question is {question.strip()!r}, but must read like `? w0 >2` or `? w0 >2 w1`.")
            asked.append((self._read(parts[0], "w", self.words, 0), self._read(parts[1], ">", self.words, 1)))
        starts, hops = np.array(asked, dtype=np.int64).reshape(1, -1, 2).transpose(2, 0, 1)
        batch = self._solved(np.array([list(zip(firsts, seconds, strict=True))]), starts, hops)
        for question, value in zip(questions, batch.ids[0, 2 * self.words + 3 :: TOKENS_PER_QUESTION], strict=True):
            given = question.split()[2:]
            if given and self._read(given[0], "w", self.words, 0) != value:
                raise ValueError(f"the answer to `?{question.rstrip()}` is w{value}.")
        return batch

    def _read(self, word: str, sign: str, end: int, start: int) -> int:
        number = word.removeprefix(sign)
        if not word.startswith(sign) or not number.isdigit() or not start <= int(number) < end:
            raise ValueError(f"there is {word!r}, where one of {sign}{start} to {sign}{end - 1} must be.")
        return int(number)

    def _solved(self, pairs: np.ndarray, starts: np.ndarray, hops: np.ndarray) -> TaskBatch:
        """`pairs` [n, words, 2]: a word and the one that follows it; `starts`, `hops` [n, questions]."""
        n = len(starts)
        follows = np.zeros((n, self.words), dtype=np.int64)
        np.put_along_axis(follows, pairs[..., 0], pairs[..., 1], 1)
        found = starts
        for k in range(1, self.words):
            found = np.where(hops >= k, np.take_along_axis(follows, found, 1), found)
        next_one = np.take_along_axis(follows, starts, 1)
        silent = np.full_like(starts, NO_ANSWER)
        mark = np.full_like(starts, len(self.tokens) - 1)
        asked = np.stack([mark, starts, self.words - 1 + hops, found], -1).reshape(n, -1)
        answers = np.stack([silent, next_one, found, silent], -1).reshape(n, -1)
        depths = np.stack([0 * hops, 0 * hops + 1, hops, 0 * hops], -1).reshape(n, -1)
        of_ring = np.zeros((n, 2 * self.words), dtype=np.int64)
        return TaskBatch(
            np.concatenate([pairs.reshape(n, -1), asked], 1),
            np.concatenate([of_ring + NO_ANSWER, answers], 1),
            np.concatenate([of_ring, depths], 1),
        )
