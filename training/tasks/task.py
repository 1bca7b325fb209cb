"""What a depth task is: sequences of tokens, what should be said at some of them, and the loops that this takes.

A task is a frozen dataclass: its fields are the settings that a recipe may give beside `task: NAME`. A third one takes
a page of code; docs/tasks.md writes one.
"""

import difflib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np

NO_ANSWER = -100  # what the loss leaves out
TEXT_SETTINGS = ("path", "name", "split", "text_column", "streaming", "max_documents")


@dataclass
class TaskBatch:
    """Sequences of a task, in the task's own token numbers (places in `Task.tokens`)."""

    ids: np.ndarray  # [n, length]
    answers: np.ndarray  # [n, length]: the token to be said at each place (as the next one), or NO_ANSWER
    depths: np.ndarray  # [n, length]: loops that each token needs; 0 where nothing is to be said

    @property
    def asked(self) -> np.ndarray:
        """[n, length], True where there is an answer."""
        return self.answers != NO_ANSWER


@dataclass(frozen=True)
class Task:
    """Base class.

    Args:
        depth: Loops that the deepest sequences of training need.
    """

    depth: int

    name: ClassVar[str] = ""

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in (int, "int") and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"`{field.name}` of task {self.name} is {value!r}, but must be an int of at least 1.")

    @property
    def tokens(self) -> list[str]:
        """The vocabulary: token i is how `ids` i reads, blanks and line ends included. Texts are these, joined."""
        raise NotImplementedError

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        raise NotImplementedError

    @property
    def first_depth(self) -> int:
        """Where a curriculum starts."""
        return 1

    def sample(self, n: int, depth: int, rng: np.random.Generator) -> TaskBatch:
        """`n` sequences, none of which needs more than `depth` loops."""
        raise NotImplementedError

    def parse(self, text: str) -> TaskBatch:
        """A text that somebody has typed, solved, as a batch of one; a ValueError says in a sentence what is wrong."""
        raise NotImplementedError

    def text(self, ids: Any) -> str:
        """How a sequence reads."""
        return "".join(self.tokens[index] for index in ids)

    def full(self) -> "Task":
        """The same task with nothing but sequences of full length, in which no padding is measured."""
        return self

    def deeper(self, depth: int) -> "Task":
        """The same task with deeper sequences, to see how far a model goes beyond what it was trained on."""
        return replace(self, depth=depth)

    def to_dict(self) -> dict[str, Any]:
        return {"task": self.name, **asdict(self)}


_REGISTRY: dict[str, type[Task]] = {}


def register_task(name: str) -> Callable[[type[Task]], type[Task]]:
    """Class decorator: makes a task available as `{task: NAME}` among the sources of a recipe."""

    def register(cls: type[Task]) -> type[Task]:
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return register


def available_tasks() -> list[str]:
    return sorted(_REGISTRY)


@dataclass
class TaskSource:
    """A task among the sources of a recipe, and how often its sequences are drawn, relative to the other sources."""

    task: Task
    weight: float = 1.0

    @classmethod
    def parse(cls, given: dict[str, Any]) -> "TaskSource":
        """From a recipe: a mapping with `task`, perhaps `weight`, and settings of the task."""
        settings = dict(given)
        name, weight = settings.pop("task"), settings.pop("weight", 1.0)
        if isinstance(name, str) and name.startswith("reasoning_gym:"):
            name, settings["dataset"] = name.split(":", 1)
        if name not in _REGISTRY:
            raise ValueError(f"`task` is {name!r}, but must be one of {', '.join(available_tasks())}.")
        known = [field.name for field in fields(_REGISTRY[name])]
        for setting in settings:
            if setting in known:
                continue
            has = f"Task {name} has: {', '.join([*known, 'weight'])}."
            if setting in TEXT_SETTINGS:
                raise ValueError(f"`{setting}` is a setting of text, but the source is task {name}. {has}")
            nearest = difflib.get_close_matches(setting, known, n=1)
            raise ValueError(
                f"task {name} has no setting {setting!r}. "
                + (f"Did you mean {nearest[0]!r}? " if nearest else "")
                + has
            )
        if isinstance(weight, str | bool) or not weight > 0:
            raise ValueError(f"`weight` of task {name} is {weight!r}, but must be a number above 0.")
        return cls(_REGISTRY[name](**settings), weight)
