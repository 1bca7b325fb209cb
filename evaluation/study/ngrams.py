"""Unigrams and bigrams on the text of a run: `python -m evaluation.study.ngrams RECIPE --output_dir RUN ...`.

Takes the recipe and the overrides that the run was trained with, counts its training text (a random part of it that is
as large as what the run goes through, and all of it) and scores its own validation blocks, with its tokenizer: the
losses can be compared with the run's `eval_loss`.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from huggingface_hub.errors import StrictDataclassError
from tqdm.auto import tqdm

from recurrent_gpt2 import RecurrentGPT2Config
from training.recipe import Recipe, load_recipe
from training.tokenizer import load_tokenizer
from training.train import make_blocks


class NgramCounts:
    """Counts of tokens and of pairs, smoothed: unigrams by adding one, bigrams by Witten and Bell's interpolation.

    P(b | a) = (c(a, b) + t(a) P(b)) / (c(a) + t(a)), with t(a) the number of different tokens seen after a.
    """

    def __init__(self, blocks: list[np.ndarray], vocab_size: int):
        counts = np.bincount(np.concatenate(blocks), minlength=vocab_size)
        self.vocab_size, self.training_tokens = vocab_size, int(counts.sum())
        self.unigrams = (counts + 1) / (counts.sum() + vocab_size)
        pairs = np.concatenate([block[:-1] * vocab_size + block[1:] for block in blocks])
        self.pairs, self.pair_counts = np.unique(pairs, return_counts=True)
        firsts = self.pairs // vocab_size
        self.followers = np.bincount(firsts, minlength=vocab_size)  # t(a)
        self.followed = np.bincount(firsts, weights=self.pair_counts, minlength=vocab_size)  # c(a)

    def unigram_losses(self, ids: np.ndarray) -> np.ndarray:
        """Of every token but the first, in nats."""
        return -np.log(self.unigrams[ids[1:]])

    def bigram_losses(self, ids: np.ndarray) -> np.ndarray:
        before, after = ids[:-1], ids[1:]
        wanted = before * self.vocab_size + after
        place = np.minimum(np.searchsorted(self.pairs, wanted), len(self.pairs) - 1)
        seen = np.where(self.pairs[place] == wanted, self.pair_counts[place], 0)
        total = self.followed[before] + self.followers[before]
        interpolated = (seen + self.followers[before] * self.unigrams[after]) / np.maximum(total, 1)
        return -np.log(np.where(total > 0, interpolated, self.unigrams[after]))


def blocks_of_run(recipe: Recipe) -> int | None:
    """Blocks that the run goes through; None: all there are."""
    args = recipe.training
    return (
        args.max_steps * args.per_device_train_batch_size * args.gradient_accumulation_steps
        if args.max_steps > 0
        else None
    )


def score(counts: NgramCounts, blocks: list[np.ndarray]) -> dict[str, float]:
    return {
        "tokens": counts.training_tokens,
        "unigram": float(np.mean([counts.unigram_losses(block).mean() for block in blocks])),
        "bigram": float(np.mean([counts.bigram_losses(block).mean() for block in blocks])),
    }


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, epilog="Any field of the recipe: --field value",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("recipe", help="a YAML file")
    parser.add_argument("--result", type=Path, help="write the losses to this JSON file too")
    known, overrides = parser.parse_known_args(arguments)
    recipe = load_recipe(known.recipe, [*overrides, "--resume", "true"])  # the run's own tokenizer and blocks
    run = Path(recipe.training.output_dir)
    if any(source.streaming for source in recipe.sources):
        raise ValueError("`streaming`: streamed text has no end, and is not counted.")
    if not (run / "tokenizer.json").exists():
        raise FileNotFoundError(f"`output_dir` {run} has no tokenizer: train the run first.")
    tokenizer = load_tokenizer(str(run))
    config = RecurrentGPT2Config(**{"vocab_size": len(tokenizer), **recipe.model})
    train_blocks, validation_blocks = make_blocks(recipe, tokenizer, config)
    ids = train_blocks.with_format("numpy")["input_ids"]
    reading = tqdm(range(len(train_blocks)), desc="reading", unit=" blocks")
    training = [np.asarray(ids[place], dtype=np.int64) for place in reading]
    validation = [np.asarray(block["input_ids"], dtype=np.int64) for block in validation_blocks]
    order = np.random.default_rng(recipe.training.seed).permutation(len(training))
    seen = [training[place] for place in order[: blocks_of_run(recipe)]]
    losses = {"as_much_text": score(NgramCounts(seen, config.vocab_size), validation)}
    losses["all_text"] = score(NgramCounts(training, config.vocab_size), validation)
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
