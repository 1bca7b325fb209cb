"""Chains: slots that hold a letter or point to an earlier slot. What letter does each slot lead to?

    a c @0 @1 @2 @4

Slot 5 points to slot 4, that to slot 2, that to slot 0, which holds `a`: three hops. The answer at every slot is the
letter that its chain ends in, as the next token.
"""

import re
from dataclasses import dataclass, replace

import numpy as np

from .task import Task, TaskBatch, register_task

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@register_task("chains")
@dataclass(frozen=True)
class Chains(Task):
    """
    Args:
        depth: Hops of the deepest chain in training.
        slots: Tokens of a sequence.
        values: Letters that a chain may end in.
        chains: Chains that run side by side; a slot extends one of them. (Were a slot to extend any earlier slot, one
            chain would come to dominate, and its letter could be guessed without following it.)
        fresh: Probability that a slot starts its chain anew, with a letter.
    """

    depth: int = 12
    slots: int = 48
    values: int = 8
    chains: int = 4
    fresh: float = 0.12

    def __post_init__(self):
        super().__post_init__()
        if not 2 <= self.values <= len(LETTERS):
            raise ValueError(f"`values` of task chains is {self.values}, but must be from 2 to {len(LETTERS)}.")
        if self.depth >= self.slots:
            raise ValueError(
                f"`depth` of task chains is {self.depth}, but {self.slots} slots hold chains of at most "
                f"{self.slots - 1} hops: lower it, or raise `slots`."
            )
        if not 0 <= self.fresh < 1:
            raise ValueError(f"`fresh` of task chains is {self.fresh!r}, but must be in [0, 1).")

    @property
    def tokens(self) -> list[str]:
        return [f" {letter}" for letter in LETTERS[: self.values]] + [f" @{slot}" for slot in range(self.slots)]

    @property
    def length(self) -> int:
        return self.slots

    def sample(self, n: int, depth: int, rng: np.random.Generator) -> TaskBatch:
        letters = rng.integers(self.values, size=(n, self.slots))
        starts = rng.random((n, self.slots)) < self.fresh
        which = rng.integers(self.chains, size=(n, self.slots))
        rows, last = np.arange(n), np.full((n, self.chains), -1)  # the newest slot of every chain
        pointers = np.full((n, self.slots), -1)  # -1: a letter
        hops = np.zeros((n, self.slots), dtype=np.int64)
        for slot in range(self.slots):
            before = last[rows, which[:, slot]]
            is_letter = starts[:, slot] | (before < 0) | (hops[rows, before] >= depth)
            pointers[:, slot] = np.where(is_letter, -1, before)
            hops[:, slot] = np.where(is_letter, 0, hops[rows, before] + 1)
            last[rows, which[:, slot]] = slot
        return self._solved(pointers, letters)

    def parse(self, text: str) -> TaskBatch:
        pointers, letters = [], []
        for slot, word in enumerate(text.split()):
            allowed = f"a letter from a to {LETTERS[self.values - 1]}, or @ and the number of an earlier slot"
            if word in LETTERS[: self.values] and len(word) == 1:
                pointers.append(-1)
                letters.append(LETTERS.index(word))
            elif match := re.fullmatch(r"@(\d+)", word):
                if int(match[1]) >= slot:
                    raise ValueError(f"slot {slot} points to slot {match[1]}, which does not come before it.")
                pointers.append(int(match[1]))
                letters.append(0)
            else:
                raise ValueError(f"slot {slot} is {word!r}, but must be {allowed}.")
        if not 1 <= len(pointers) <= self.slots:
            raise ValueError(f"the chain has {len(pointers)} slots, but must have from 1 to {self.slots}.")
        return self._solved(np.array([pointers]), np.array([letters]))

    def deeper(self, depth: int) -> "Chains":
        """Two chains that hardly ever start anew, so that the slots suffice."""
        return replace(self, depth=depth, chains=2, fresh=0.02)

    def _solved(self, pointers: np.ndarray, letters: np.ndarray) -> TaskBatch:
        """`pointers` [n, slots]: where each slot points to, -1 for a letter; `letters` [n, slots]."""
        rows, answers, depths = np.arange(len(pointers)), letters.copy(), np.zeros_like(letters)
        for slot in range(pointers.shape[1]):
            target = pointers[:, slot]
            answers[:, slot] = np.where(target < 0, letters[:, slot], answers[rows, target])
            depths[:, slot] = np.where(target < 0, 0, depths[rows, target] + 1)
        return TaskBatch(np.where(pointers < 0, letters, self.values + pointers), answers, depths)
