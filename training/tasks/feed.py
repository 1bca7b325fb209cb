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

ROWS_WITHOUT_TEXT = 2**20  # of an epoch; tasks have no end
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

    A batch that the data loader gives has the text rows, and for every other row only which task it is of. `fill` makes
    those rows: a function of seed, step, micro-step, rank and curriculum, so that batches fetched ahead of a deeper
    curriculum, or again after a resume, are what they would have been.
    """

    def __init__(
        self,
        sources: Sequence[TaskSource],
        tokenizer: PreTrainedTokenizerBase,
        seed: int = 0,
        rank: int = 0,
        block_size: int | None = None,
    ):
        self.tasks = [source.task for source in sources]
        self.entries = [ids_of_tokens(tokenizer, task) for task in self.tasks]
        self.end, self.seed, self.rank = tokenizer.eos_token_id, seed, rank
        self.block_size = max([block_size or 0, *(task.length + 1 for task in self.tasks)])
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

    def fill(self, batch: dict[str, torch.Tensor], step: int, micro_step: int) -> dict[str, torch.Tensor]:
        """The batch with its rows of tasks behind those of text; `task` says which task each is of, -1 for text."""
        if "task" not in batch:
            return batch
        parts = [{name: batch[name] for name in ("input_ids", "labels")}] if "input_ids" in batch else []
        of_row = [-1] * (len(batch["input_ids"]) if parts else 0)
        for which, task in enumerate(self.tasks):
            n = int((batch["task"] == which).sum())
            if n == 0:
                continue
            rng = np.random.default_rng([self.seed, step, micro_step, self.rank, which])
            parts.append(self.rows(which, task.sample(n, self.curricula[which].depth, rng)))
            of_row += [which] * n
        device = batch["task"].device
        filled = {name: torch.cat([_padded(part[name].to(device), self.block_size, fill) for part in parts])
                  for name, fill in (("input_ids", self.end), ("labels", NO_ANSWER))}  # fmt: skip
        return filled | {"task": torch.tensor(of_row, device=device)}

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


class MixedRows(torch.utils.data.Dataset):
    """Text blocks and places for rows of tasks, drawn according to the weights of their sources.

    An epoch sees every text block once. Without text all rows are places for tasks.
    """

    def __init__(self, text: Any, text_weight: float, sources: Sequence[TaskSource], seed: int):
        weights = np.array([source.weight for source in sources] + [text_weight if text is not None else 0.0])
        weights = weights / weights.sum()
        self.text, text_rows = text, 0 if text is None else len(text)
        tasks_per_text = (1 - weights[-1]) / weights[-1] if text_rows else 0
        rows = text_rows + round(text_rows * tasks_per_text) if text_rows else ROWS_WITHOUT_TEXT
        chosen = np.random.default_rng(seed).choice(len(sources), size=rows, p=weights[:-1] / weights[:-1].sum())
        self.chosen = chosen.astype(np.int32)
        self.chosen[:text_rows] = -1

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {"task": int(self.chosen[place])} if self.chosen[place] >= 0 else self.text[place]


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


def _padded(rows: torch.Tensor, length: int, value: int) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, length - rows.shape[1]), value=value)
