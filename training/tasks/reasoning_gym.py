"""Tasks that others wrote: those of reasoning-gym (extra `tasks`), as text, with a dial of theirs as the depth.

    1 + 6 + 7 =
    14

`{task: reasoning_gym:chain_sum, depth: 6}` is a source of a recipe. A token is a character; a sequence is as many
questions, each with its answer on the next line, as it has room for; there is a loss on the answers only. Depth is what
the dial says of a question. Whether it says how many loops that takes, `evaluation.depth` shows.
"""

import string
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .task import NO_ANSWER, Task, TaskBatch, register_task

CHARACTERS = ["\n", *(chr(code) for code in range(32, 127))]
PLACE = {character: place for place, character in enumerate(CHARACTERS)}


@dataclass(frozen=True)
class Dial:
    """How the difficulty of a data set is told and set."""

    reads: str  # where an item's metadata, or their `difficulty`, have it
    sets: str  # the data set's own setting that bounds it
    least: int
    opening: str = ""  # what all questions begin with, and are shown without


DIALS = {
    "ab": Dial("length", "length", 1),
    "basic_arithmetic": Dial("num_terms", "max_terms", 2, "Calculate "),
    "bitwise_arithmetic": Dial("difficulty", "difficulty", 1),
    "chain_sum": Dial("num_terms", "max_terms", 2, "State the final answer to the following arithmetic problem: "),
    "game_of_life": Dial("simulation_steps", "simulation_steps", 1),
    "leg_counting": Dial("num_animals", "max_animals", 1),
    "spell_backward": Dial("word_len", "max_word_len", 1, "Spell this word backward (example: sun -> nus): "),
}


@register_task("reasoning_gym")
@dataclass(frozen=True)
class ReasoningGym(Task):
    """
    Args:
        depth: The dial's most: terms of a sum, letters of a word.
        dataset: Its name; in a recipe what stands behind the colon of `task: reasoning_gym:NAME`.
        characters: Length of a sequence.
        settings: Settings of the data set's own.
        reads: What of an item's metadata is its difficulty; known for the data sets in `DIALS`.
        sets: The setting that bounds it.
    """

    depth: int = 6
    dataset: str = "chain_sum"
    characters: int = 96
    settings: dict[str, Any] = field(default_factory=dict)
    reads: str | None = None
    sets: str | None = None

    def __post_init__(self):
        super().__post_init__()
        names = _library().factory.DATASETS
        if self.dataset not in names:
            raise ValueError(f"`dataset` is {self.dataset!r}, but must be one of {', '.join(sorted(names))}.")
        if (self.reads is None) != (self.sets is None) or (self.reads is None and self.dataset not in DIALS):
            raise ValueError(
                f"`reads` and `sets` of task reasoning_gym:{self.dataset} are {self.reads!r} and {self.sets!r}, but "
                "must say which entry of its metadata is the difficulty, and which setting bounds it. They may be left "
                f"out for {', '.join(DIALS)}."
            )
        self._make(self.depth, 0, 1)  # its own checks of the settings

    @property
    def dial(self) -> Dial:
        if self.reads is not None and self.sets is not None:
            return Dial(self.reads, self.sets, 1)
        return DIALS[self.dataset]

    @property
    def tokens(self) -> list[str]:
        return CHARACTERS

    @property
    def length(self) -> int:
        return self.characters

    @property
    def first_depth(self) -> int:
        return self.dial.least

    def sample(self, n: int, depth: int, rng: np.random.Generator) -> TaskBatch:
        batch = self._empty(n)
        for row in range(n):
            self._fill_row(batch, row, self._make(depth, int(rng.integers(2**31)), self.characters))
        return batch

    def parse(self, text: str) -> TaskBatch:
        """Takes the answer as it is given: the library solves only what it has made."""
        question, line_end, answer = text.strip("\n").rpartition("\n")
        if not line_end or not answer:
            raise ValueError(f"the text is {text!r}, but must be a question and, on a line of its own, its answer.")
        batch = self._empty(1)
        if self._put(batch, 0, 0, (question, answer, 0)) == 0:
            raise ValueError(
                f"the text has {len(text)} characters, but must be of ASCII and have at most {self.characters - 2}."
            )
        return batch

    def _make(self, depth: int, seed: int, size: int) -> Any:
        try:
            given = {**self.settings, self.dial.sets: max(depth, self.dial.least)}
            return _library().create_dataset(self.dataset, seed=seed, size=size, **given)
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(f"reasoning_gym refuses `settings` {self.settings} of {self.dataset}: {error}.") from error

    def _empty(self, n: int) -> TaskBatch:
        shape = (n, self.length)
        return TaskBatch(np.zeros(shape, np.int64), np.full(shape, NO_ANSWER), np.zeros(shape, np.int64))

    def _fill_row(self, batch: TaskBatch, row: int, items: Any) -> None:
        place = 0
        for item in items:
            taken = self._put(batch, row, place, self._read(item))
            if taken == 0 and place > 0:
                return
            place += taken
        if place == 0:
            raise ValueError(
                f"no question of reasoning_gym:{self.dataset} in {len(items)} fits: `characters` is {self.characters}, "
                "but must be more, and they must be of ASCII."
            )

    def _read(self, item: dict[str, Any]) -> tuple[str, str, int]:
        metadata = item["metadata"]
        found = metadata.get(self.dial.reads)
        if not isinstance(found, int | np.integer):
            found = metadata.get("difficulty", {}).get(self.dial.reads)
        if not isinstance(found, int | np.integer):
            raise ValueError(
                f"`reads` of task reasoning_gym:{self.dataset} is {self.dial.reads!r}, but must be an entry of its "
                f"metadata that is an int: {', '.join(item['metadata'])}."
            )
        return item["question"].removeprefix(self.dial.opening).strip(), str(item["answer"]).strip(), int(found)

    def _put(self, batch: TaskBatch, row: int, place: int, item: tuple[str, str, int]) -> int:
        """Writes a question and its answer from `place` on; how many characters it took, none if it does not fit."""
        question, answer, difficulty = item
        text = f"{question}\n{answer}\n"
        if place + len(text) > self.length or not set(text) <= set(string.printable) & set(PLACE):
            return 0
        places = np.array([PLACE[character] for character in text])
        batch.ids[row, place : place + len(text)] = places
        said = slice(place + len(question), place + len(text) - 1)  # from the line end before the answer on
        batch.answers[row, said], batch.depths[row, said] = places[len(question) + 1 :], difficulty
        return len(text)


def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError("tasks of reasoning_gym need that package: `pip install -e '.[tasks]'`.") from error
    return reasoning_gym
