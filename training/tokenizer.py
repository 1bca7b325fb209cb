"""The tokenizer of a run: loaded by name or folder, or trained on the corpus."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GPT2TokenizerFast, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from recurrent_gpt2 import RecurrentGPT2ForCausalLM

END_OF_TEXT = "<|endoftext|>"


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """From the Hub or a folder; a folder with nothing but GPT-2's `vocab.json` and `merges.txt` will do."""
    folder = Path(name)
    if folder.is_dir() and (folder / "merges.txt").exists() and not (folder / "tokenizer.json").exists():
        tokenizer = GPT2TokenizerFast(str(folder / "vocab.json"), str(folder / "merges.txt"))
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"`tokenizer` is {name!r}, which can't be loaded: it must be a name on the Hub, a folder with a "
                "tokenizer, or 'train'."
            ) from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer {name!r} has no end-of-text token, which documents are joined by.")
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE like GPT-2's, with `vocab_size` entries, end-of-text among them."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT)


def fit_to_model(tokenizer: PreTrainedTokenizerBase, model: RecurrentGPT2ForCausalLM) -> None:
    """Lets batches be padded and texts be cut at first try, and makes the model's configs say the same.

    Where there is no token for padding, end-of-text is it: no entry is added. Padding goes on the left, where
    generation needs it; the model does not mind on which side it is.
    """
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "left"  # the latter is what is saved
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
