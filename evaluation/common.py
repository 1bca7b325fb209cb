"""What the commands of evaluation share: loading a checkpoint, cutting text into blocks, lines that outlive a crash."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from recurrent_gpt2 import RecurrentGPT2Config, RecurrentGPT2ForCausalLM
from training.data import Packer, Source, is_validation


def load_checkpoint(name: str | Path) -> tuple[RecurrentGPT2ForCausalLM, PreTrainedTokenizerBase]:
    """Model (in eval mode, fp32) and tokenizer of a folder or a repository on the Hub."""
    try:
        model = RecurrentGPT2ForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(name)
    except OSError as error:
        raise FileNotFoundError(f"there is no checkpoint {name}: {str(error).splitlines()[0]}") from error
    if not model.config.loop_groups:
        raise ValueError(f"the model {name} has no loop groups: there is nothing to evaluate.")
    return model, tokenizer


def mean_depth(loop_steps: torch.Tensor, config: RecurrentGPT2Config) -> torch.Tensor:
    """[..., groups] -> [...]: the mean steps of a looped layer. Groups count by their layers."""
    layers = torch.tensor([len(group) for group in config.loop_groups], dtype=torch.float64)
    return loop_steps.double() @ (layers / layers.sum())


def held_out_documents(source: Source, validation_fraction: float | None) -> Iterator[str]:
    """Documents of a source: those held out in training, or all of them where no fraction is given."""
    for text in source.documents():
        if validation_fraction is None or is_validation(text, validation_fraction):
            yield text


def spread_blocks(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, block_size: int, count: int
) -> torch.Tensor:
    """`count` blocks [n, block_size], or as many as there are, spread evenly over the first 64 times as much text."""
    blocks = blocks_of(texts, tokenizer, block_size, 64 * count)
    count = min(count, len(blocks))
    return blocks[[place * len(blocks) // count for place in range(count)]]


def blocks_of(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, block_size: int, limit: int) -> torch.Tensor:
    """The first blocks [n, block_size] of the texts, at most `limit`."""
    packer, blocks = Packer(tokenizer, block_size), []
    for text in texts:
        blocks += list(packer.add([text]))
        if len(blocks) >= limit:
            break
    if not blocks:
        raise ValueError(
            f"the text has no full block of {block_size} tokens: give more text or a smaller `--block_size`."
        )
    return torch.from_numpy(np.stack(blocks[:limit])).long()


@contextmanager
def appended(file: Path) -> Iterator[TextIO]:
    """A file of lines, opened to add to it; a line that a crash cut short is ended first."""
    with file.open("a+") as lines:
        lines.seek(0)
        written = lines.read()
        if written and not written.endswith("\n"):
            lines.write("\n")
        yield lines


def read_lines(file: Path) -> list[Any]:
    """The JSON lines of a file, but for one that a crash cut short."""
    values = []
    for line in file.read_text().splitlines() if file.exists() else ():
        with suppress(ValueError):
            values.append(json.loads(line))
    return values
