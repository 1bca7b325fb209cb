import string

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """60 letters and digits, and an end-of-text token: the vocabulary of the tiny models."""
    alphabet = ["[end]", *(string.ascii_letters + string.digits)[:60]]
    backend = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[end]", pad_token="[end]")
