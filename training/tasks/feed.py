"""Feeds tasks to the trainer: rows that are made when their step comes, as deep as the curriculum has come."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from .task import NO_ANSWER, TaskBatch, TaskSource
from .vocabulary import ids_of_tokens

ROWS_OF_AN_EPOCH = 2**20  # tasks have no end
VALIDATION_SEED = 1_000_003


@dataclass
class Curriculum:
    """How deep the sequences of a task are: one loop deeper whenever the running accuracy passes a mark."""

    deepest: int
    depth: int
    accuracy: float = 0.0  # running

    MARK, AFTER, MEMORY = 0.95, 0.8, 0.9  # where it is passed, where it starts again, the weight of what came before

    def update(self, accuracy: float) -> None:
        self.accuracy = self.MEMORY * self.accuracy + (1 - self.MEMORY) * accuracy
        if self.accuracy > self.MARK and self.depth < self.deepest:
            self.depth, self.accuracy = self.depth + 1, self.AFTER


class TaskFeed:
    """The tasks of a run.

    Rows of tasks are made when their step begins (`fill`): a function of seed, step, micro-step, rank and curriculum.
    So batches fetched ahead of a deeper curriculum, or again after a resume, are what they would have been. Without
    text the data loader gives which task each row is of. Beside text it gives the text, and every task adds as many
    rows as its weight says, in a batch of their own: they are shorter, and take other loop counts.
    """

    def __init__(
        self,
        sources: Sequence[TaskSource],
        tokenizer: PreTrainedTokenizerBase,
        seed: int = 0,
        rank: int = 0,
        text_weight: float | None = None,
    ):
        self.tasks = [source.task for source in sources]
        self.weights, self.text_weight = [source.weight for source in sources], text_weight
        self.entries = [ids_of_tokens(tokenizer, task) for task in self.tasks]
        self.end, self.seed, self.rank = tokenizer.eos_token_id, seed, rank
        self.block_size = max(task.length + 1 for task in self.tasks)
        self.curricula = [Curriculum(task.depth, min(task.first_depth, task.depth)) for task in self.tasks]
        self._counts = np.zeros((len(self.tasks), 2))  # right and asked, of this step

    @property
    def depth(self) -> int:
        """The deepest that any task has reached."""
        return max(curriculum.depth for curriculum in self.curricula)

    def rows(self, which: int, batch: TaskBatch) -> dict[str, torch.Tensor]:
        """A batch of task `which` as a language model takes it, `input_ids` and `labels`, filled up with end-of-text.

        The label of a place is what should be said at the place before it.
        """
        n, length = batch.ids.shape
        entries, (ids, labels) = self.entries[which], np.full((2, n, self.block_size), self.end)
        labels[:] = NO_ANSWER
        ids[:, :length] = entries[batch.ids]
        labels[:, 1 : length + 1] = np.where(batch.asked, entries[batch.answers.clip(0)], NO_ANSWER)
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}

    def fill(self, batch: dict[str, Any], step: int, micro_step: int) -> dict[str, Any]:
        """The batch with its rows of tasks, `task` saying which each is of; beside text they are its `tasks`."""
        if "input_ids" not in batch:
            return self._made(
                [int((batch["task"] == which).sum()) for which in range(len(self.tasks))], step, micro_step
            )
        per_text_row = [weight / self.text_weight for weight in self.weights]
        counts = [max(1, round(len(batch["input_ids"]) * share)) for share in per_text_row]
        return {**batch, "tasks": self._made(counts, step, micro_step)}

    def _made(self, counts: Sequence[int], step: int, micro_step: int) -> dict[str, torch.Tensor]:
        parts, of_row = [], []
        for which, (task, n) in enumerate(zip(self.tasks, counts, strict=True)):
            rng = np.random.default_rng([self.seed, step, micro_step, self.rank, which])
            parts.append(self.rows(which, task.sample(n, self.curricula[which].depth, rng)))
            of_row += [which] * n
        rows = {name: torch.cat([part[name] for part in parts]) for name in ("input_ids", "labels")}
        return rows | {"task": torch.tensor(of_row)}

    def validation(self, count: int) -> list[dict[str, torch.Tensor]]:
        """Rows at full depth that training does not see, of all tasks alike."""
        found = []
        for which, task in enumerate(self.tasks):
            rng = np.random.default_rng([VALIDATION_SEED, self.seed, which])
            rows = self.rows(which, task.sample(-(-count // len(self.tasks)), task.depth, rng))
            found += [{name: values[row] for name, values in rows.items()} for row in range(len(rows["labels"]))]
        return found

    def observe(self, logits: torch.Tensor, labels: torch.Tensor, task: torch.Tensor) -> None:
        """Counts the right answers of a batch."""
        asked = labels[:, 1:] != NO_ANSWER
        right = asked & (logits.detach()[:, :-1].argmax(-1) == labels[:, 1:])
        for which in range(len(self.tasks)):
            rows = task == which
            self._counts[which] += int(right[rows].sum()), int(asked[rows].sum())

    def end_step(self, reduce=lambda counts: counts) -> None:
        """Takes the step's accuracies into account; `reduce` adds the counts of all ranks up."""
        counts = reduce(torch.from_numpy(self._counts.copy()))
        for curriculum, (right, asked) in zip(self.curricula, counts.tolist(), strict=True):
            if asked > 0:
                curriculum.update(right / asked)
        self._counts[:] = 0

    def draw_num_loops(self, num_groups: int, most: int, step: int, micro_step: int) -> list[int]:
        """Loops of a micro-step: uniform from what the curriculum's depth takes (two at least) to `most`."""
        digest = hashlib.blake2b(f"{self.seed}/{step}/{micro_step}".encode(), digest_size=7).digest()
        rng = np.random.default_rng(int.from_bytes(digest, "big"))
        return rng.integers(min(max(self.depth, 2), most), most, endpoint=True, size=num_groups).tolist()

    def logs(self) -> dict[str, float]:
        return {
            name: value
            for task, curriculum in zip(self.tasks, self.curricula, strict=True)
            for name, value in (
                (f"{task.name}_depth", curriculum.depth),
                (f"{task.name}_accuracy", round(curriculum.accuracy, 4)),
            )
        }

    def state(self) -> list[dict[str, Any]]:
        return [{"depth": curriculum.depth, "accuracy": curriculum.accuracy} for curriculum in self.curricula]

    def load_state(self, state: list[dict[str, Any]]) -> None:
        for curriculum, saved in zip(self.curricula, state, strict=True):
            curriculum.depth, curriculum.accuracy = saved["depth"], saved["accuracy"]


class TaskRows(torch.utils.data.Dataset):
    """Which task each row of a run without text is of, drawn according to their weights."""

    def __init__(self, sources: Sequence[TaskSource], seed: int):
        weights = np.array([source.weight for source in sources])
        rng = np.random.default_rng(seed)
        self.chosen = rng.choice(len(sources), size=ROWS_OF_AN_EPOCH, p=weights / weights.sum()).astype(np.int32)

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, place: int) -> dict[str, int]:
        return {"task": int(self.chosen[place])}


def accuracy_metrics() -> dict[str, Any]:
    """Arguments of a `Trainer` that make it log the share of right answers when it evaluates."""

    def accuracy(prediction) -> dict[str, float]:
        said, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
        asked = labels != NO_ANSWER
        return {"accuracy": float((said == labels)[asked].mean())}

    return {
        "compute_metrics": accuracy,
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
    }
