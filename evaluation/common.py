"""What the commands of evaluation share: loading a checkpoint and its default policy, cutting text into blocks, lines
that outlive a crash."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from recurrent_gpt2 import ExitPolicy, RecurrentGPT2Config, RecurrentGPT2ForCausalLM
from recurrent_gpt2.exit_policies import resolve_exit_policy
from training.data import Packer, Source, is_validation
from training.tasks.task import TaskBatch


def load_checkpoint(
    name: str | Path, optimize: bool = False
) -> tuple[RecurrentGPT2ForCausalLM, PreTrainedTokenizerBase]:
    """Model (in eval mode, fp32) and tokenizer of a folder or a repository on the Hub; to be timed, `optimize` it."""
    try:
        model = RecurrentGPT2ForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)  # never, rather than asked for
    except OSError as error:
        raise FileNotFoundError(f"there is no checkpoint {name}: {str(error).splitlines()[0]}") from error
    if not model.config.loop_groups:
        raise ValueError(f"the model {name} has no loop groups: there is nothing to evaluate.")
    return model.optimize_for_inference() if optimize else model, tokenizer


DEFAULT = "default"  # in the place of a policy: the checkpoint's own. (None is no policy, as in `generate`.)


def loops_of_generate(
    model: RecurrentGPT2ForCausalLM, exit_policy: Any = DEFAULT, num_loops: int | list[int] | None = None
) -> dict[str, Any]:
    """The arguments of the loops that `generate` would use: those given, else the checkpoint's default."""
    own = model.generation_config
    if isinstance(exit_policy, str) and exit_policy == DEFAULT:
        exit_policy = getattr(own, "exit_policy", None)
    if num_loops is None:
        num_loops = getattr(own, "num_loops", None)
    return {"exit_policy": exit_policy, "num_loops": model.config.loops_per_group(num_loops)}


def describe_loops(exit_policy: Any, num_loops: list[int]) -> str:
    """`{"name": "kl"}, at most 24 loops`, or `8 fixed loops`."""
    loops = str(num_loops[0]) if len(set(num_loops)) == 1 else str(num_loops)
    if all(policy is None for policy in resolve_exit_policy(exit_policy, len(num_loops))):
        return f"{loops} fixed loops"
    return f"{json.dumps(exit_policy, default=_policy_to_json)}, at most {loops} loops"


def name_of_policy(policy: Any) -> str:
    """`step_norm/state, 0.1` of a policy or its JSON form, `fixed` of none; of several, one per group."""
    if isinstance(policy, list | tuple):
        return "; ".join(name_of_policy(one) for one in policy)
    if policy is None:
        return "fixed"
    if isinstance(policy, str | dict):
        policy = ExitPolicy.from_dict({"name": policy} if isinstance(policy, str) else policy)
    measure = policy.name if getattr(policy, "normalize", "none") == "none" else f"{policy.name}/{policy.normalize}"
    patience = "" if policy.patience == type(policy).patience else f" x{policy.patience}"
    return f"{measure}{patience}, {policy.threshold:g}" if policy.threshold else measure


def name_of_loops(exit_policy: Any, num_loops: list[int]) -> str:
    """As `describe_loops`, but short: `kl, 0.01, at most 24 loops`."""
    if exit_policy is None:
        return describe_loops(exit_policy, num_loops)
    loops = num_loops[0] if len(set(num_loops)) == 1 else num_loops
    return f"{name_of_policy(exit_policy)}, at most {loops} loops"


def _policy_to_json(policy: Any) -> Any:
    return policy.to_dict() if hasattr(policy, "to_dict") else repr(policy)  # the latter: a callable


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


@dataclass
class Sequences:
    """What is scored: sequences in the entries of a checkpoint's tokenizer, and what should be said where."""

    ids: torch.Tensor  # [n, length]
    answers: torch.Tensor  # [n, length]
    asked: np.ndarray  # [n, length]: where something should be said
    depths: np.ndarray  # [n, length]: loops that it needs, where that is known

    @classmethod
    def of(cls, batch: TaskBatch, entries: np.ndarray) -> "Sequences":
        """Those of a task, whose tokens have these entries."""
        as_entries = [torch.from_numpy(entries[tokens]) for tokens in (batch.ids, batch.answers.clip(0))]
        return cls(*as_entries, batch.asked, batch.depths)

    @classmethod
    def of_text(cls, blocks: torch.Tensor) -> "Sequences":
        """Blocks [n, length]: at every token but the last, the next one is asked for."""
        asked = np.ones(blocks.shape, dtype=bool)
        asked[:, -1] = False
        return cls(blocks, blocks.roll(-1, 1), asked, np.zeros(blocks.shape, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ids)


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
