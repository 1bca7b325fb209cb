"""What a unigram and a bigram model make of a run's text: `python -m evaluation.ngrams RECIPE --output_dir RUN ...`.

Takes the recipe and the overrides that the run was trained with, counts on the run's own training blocks and scores its
own validation blocks, with its tokenizer: the losses can be compared with the run's `eval_loss`. A language model that
does not beat the bigrams has learnt nothing from context.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from huggingface_hub.errors import StrictDataclassError
from tqdm.auto import tqdm

from recurrent_gpt2 import RecurrentGPT2Config
from training.recipe import load_recipe
from training.tokenizer import load_tokenizer
from training.train import make_blocks


class NgramCounts:
    """Counts of tokens and of pairs, smoothed: unigrams by adding one, bigrams by Witten and Bell's interpolation.

    P(b | a) = (c(a, b) + t(a) P(b)) / (c(a) + t(a)), with t(a) the number of different tokens seen after a.
    """

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.tokens = np.zeros(vocab_size, dtype=np.int64)
        self.pairs = np.zeros((vocab_size, vocab_size), dtype=np.int32)

    def add(self, ids: np.ndarray) -> None:
        np.add.at(self.tokens, ids, 1)
        np.add.at(self.pairs, (ids[:-1], ids[1:]), 1)

    def unigram_losses(self, ids: np.ndarray) -> np.ndarray:
        """Of every token but the first, in nats."""
        return -np.log(self._unigrams()[ids[1:]])

    def bigram_losses(self, ids: np.ndarray) -> np.ndarray:
        before, after = ids[:-1], ids[1:]
        rows = self.pairs[before]
        total, kinds = rows.sum(1, dtype=np.int64), (rows > 0).sum(1)
        interpolated = self.pairs[before, after] + kinds * self._unigrams()[after]
        unseen = total == 0
        return -np.log(np.where(unseen, self._unigrams()[after], interpolated / np.maximum(total + kinds, 1)))

    def _unigrams(self) -> np.ndarray:
        return (self.tokens + 1) / (self.tokens.sum() + self.vocab_size)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, epilog="Any field of the recipe: --field value",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("recipe", help="a YAML file")
    parser.add_argument("--result", type=Path, help="write the losses to this JSON file too")
    known, overrides = parser.parse_known_args(arguments)
    recipe = load_recipe(known.recipe, [*overrides, "--resume", "true"])  # the run's own tokenizer and blocks
    run = Path(recipe.training.output_dir)
    if not (run / "tokenizer").exists():
        raise FileNotFoundError(f"`output_dir` {run} has no tokenizer: train the run first.")
    tokenizer = load_tokenizer(str(run / "tokenizer"))
    config = RecurrentGPT2Config(**{"vocab_size": len(tokenizer), **recipe.model})
    train_blocks, validation_blocks = make_blocks(recipe, tokenizer, config)
    counts = NgramCounts(config.vocab_size)
    # As many blocks as the run was trained on, in its order of sources; all of them where it went through them all.
    steps = recipe.training.max_steps * recipe.training.per_device_train_batch_size
    steps *= recipe.training.gradient_accumulation_steps
    for place in tqdm(range(min(steps, len(train_blocks))), desc="counting", unit=" blocks"):
        counts.add(np.asarray(train_blocks[place]["input_ids"]))
    blocks = [np.asarray(block["input_ids"]) for block in validation_blocks]
    losses = {
        "unigram": float(np.mean([counts.unigram_losses(ids).mean() for ids in blocks])),
        "bigram": float(np.mean([counts.bigram_losses(ids).mean() for ids in blocks])),
        "training_tokens": int(counts.tokens.sum()),
    }
    print(json.dumps(losses))
    if known.result is not None:
        known.result.parent.mkdir(parents=True, exist_ok=True)
        known.result.write_text(json.dumps(losses) + "\n")
    return losses


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, StrictDataclassError) as error:
        sys.exit(f"error: {error}")
