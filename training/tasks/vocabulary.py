"""Tokenizers that know the tokens of tasks: a task's own, or one of text to which they are added."""

from collections.abc import Sequence

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from .task import Task

END_OF_TEXT, UNKNOWN = "<|endoftext|>", "<|unknown|>"


def task_tokenizer(tasks: Sequence[Task]) -> PreTrainedTokenizerFast:
    """A tokenizer whose entries are the tokens of tasks, for a model that reads nothing else.

    It forgives how somebody sets blanks, and takes `;` for a line end.
    """
    backend = Tokenizer(models.WordLevel({END_OF_TEXT: 0, UNKNOWN: 1}, unk_token=UNKNOWN))
    backend.decoder = decoders.Fuse()
    tokens = list(dict.fromkeys(token for task in tasks for token in task.tokens))
    backend.normalizer = _one_way_to_set_blanks(tokens)
    backend.add_tokens([AddedToken(token, normalized=True) for token in tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT, unk_token=UNKNOWN
    )


def _one_way_to_set_blanks(tokens: list[str]) -> normalizers.Normalizer:
    """Leaves the tokens themselves as they are, since they go through it too: hence what must follow a sign."""
    if " " in tokens:
        return normalizers.Sequence([])  # characters: text is what it is
    rules = [normalizers.Replace(Regex(r"[ \t]+"), " "), normalizers.Replace(Regex(r"\s*[\n;]\s*"), "\n")]
    rules += [normalizers.Replace(Regex(rf" ?[{sign}] ?(?=\S)"), f" {sign} ") for sign in "+-="]
    if "?" in tokens:
        rules.append(normalizers.Replace(Regex(r"\s*[?] ?(?=\S)"), "\n? "))  # a question ends the line before it
    if all(token.startswith(" ") for token in tokens):
        rules.append(normalizers.Replace(Regex(r"^(?=\S)"), " "))
    return normalizers.Sequence(rules)


def extended_tokenizer(tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task]) -> PreTrainedTokenizerBase:
    """A tokenizer of text that also reads tasks: tokens that it has no single entry for are added to it."""
    tokens = dict.fromkeys(token for task in tasks for token in task.tokens)
    missing = [token for token in tokens if _entry(tokenizer, token) is None]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in missing])
    return tokenizer


def ids_of_tokens(tokenizer: PreTrainedTokenizerBase, task: Task) -> np.ndarray:
    """The entry of each of the task's tokens."""
    entries = [_entry(tokenizer, token) for token in task.tokens]
    if None in entries:
        missing = task.tokens[entries.index(None)]
        raise ValueError(
            f"the tokenizer has no entry for {missing!r}, a token of task {task.name}: it is not the tokenizer that "
            "the task was trained with."
        )
    return np.array(entries)


def _entry(tokenizer: PreTrainedTokenizerBase, token: str) -> int | None:
    added = tokenizer.added_tokens_encoder.get(token)
    if added is not None:
        return added
    ids = tokenizer(token, add_special_tokens=False)["input_ids"]
    return ids[0] if len(ids) == 1 and tokenizer.decode(ids) == token else None
