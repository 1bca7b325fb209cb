"""Nothing here reaches the network: the Hub is a port on loopback, where `tests/hub_server.py` may answer."""

import os
import socket
import string

with socket.socket() as _listener:
    _listener.bind(("127.0.0.1", 0))
    HUB_PORT = _listener.getsockname()[1]
# Before anything imports huggingface_hub, which reads these once.
os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{HUB_PORT}"
os.environ["HF_HUB_DISABLE_XET"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ.pop("HF_TOKEN", None)

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from recurrent_gpt2.exit_policies import _OF_USERS

if "PYTEST_XDIST_WORKER" in os.environ:  # two workers on two cores; models here are too small for threads anyway
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """60 letters and digits, and an end-of-text token: the vocabulary of the tiny models."""
    alphabet = ["[end]", *(string.ascii_letters + string.digits)[:60]]
    backend = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[end]", pad_token="[end]")


@pytest.fixture(autouse=True)
def _policies_end_with_their_test():
    """What a test registers is not there for the next one, which may go through all policies."""
    before = dict(_OF_USERS)
    yield
    _OF_USERS.clear()
    _OF_USERS.update(before)
