"""What a model says of every line of a task after each loop, beside what is right and the loops that this needs.

For the page of `evaluation.explore`; the picture of it is in `pictures.py`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from recurrent_gpt2 import RecurrentGPT2ForCausalLM
from training.tasks import ids_of_tokens
from training.tasks.task import Task

from .common import mean_depth


@dataclass
class Line:
    """A place where a task has an answer."""

    text: str  # from the answer before to here
    answer: str  # what is right
    needs: int  # loops
    took: int
    said: list[str]  # after each loop that any line took

    @property
    def is_right(self) -> bool:
        return self.said[-1] == self.answer

    @property
    def known_after(self) -> int | None:
        """The loop from which on the right answer stands; None: it never does."""
        wrong = [loop for loop, said in enumerate(self.said, 1) if said != self.answer]
        return None if not self.is_right else (wrong[-1] + 1 if wrong else 1)


@torch.no_grad()
def answer_lines(
    model: RecurrentGPT2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    text: str,
    exit_policy: Any,
    num_loops: list[int],
) -> list[Line]:
    """The lines of a text that somebody typed. What is said after k loops is what the model says with k as the most."""
    batch = task.parse(text)
    ids = torch.from_numpy(ids_of_tokens(tokenizer, task)[batch.ids])
    if ids.shape[1] > model.config.max_position_embeddings:
        raise ValueError(
            f"the text has {ids.shape[1]} tokens, but the model has positions for "
            f"{model.config.max_position_embeddings}: shorten it."
        )
    output = model(ids, exit_policy=exit_policy, num_loops=num_loops, use_cache=False)
    asked = batch.asked[0].nonzero()[0].tolist()
    deepest = int(output.loop_steps[0, asked].max())  # where nothing is asked, tokens may loop longer
    said = []
    for loop in range(1, deepest + 1):
        most = [min(loop, count) for count in num_loops]
        logits = output.logits if loop == deepest else model(
            ids, exit_policy=exit_policy, num_loops=most, use_cache=False
        ).logits  # fmt: skip
        said.append([tokenizer.decode(token).strip() for token in logits[0].argmax(-1)])
    depth = mean_depth(output.loop_steps[0], model.config).ceil().long().tolist()
    lines, start, before = [], 0, None
    for place in asked:
        if start < place and batch.ids[0, start] == before:  # behind a question stands its answer
            start += 1
        lines.append(
            Line(
                task.text(batch.ids[0, start : place + 1]).strip(),
                task.tokens[batch.answers[0, place]].strip(),
                int(batch.depths[0, place]),
                depth[place],
                [step[place] for step in said],
            )
        )
        start, before = place + 1, batch.answers[0, place]
    return lines
