"""Tiny models and fresh processes for the tests."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from transformers.generation import BaseStreamer

from recurrent_gpt2 import RecurrentGPT2Config, RecurrentGPT2ForCausalLM

ROOT = Path(__file__).parents[1]
# The files of the package that a checkpoint carries: what the model needs to run.
STAYS_BEHIND = {"__init__.py", "geometry.py", "serve.py", "vllm_engine.py", "vllm_plugin.py"}
REMOTE_CODE = {path.name for path in (ROOT / "recurrent_gpt2").glob("*.py")} - STAYS_BEHIND
LAYOUTS = {
    "three groups": [[1], [2, 3], [4]],
    "first and last layer": [[0, 1], [5]],
    "one group": [[2, 3, 4]],
}


def tiny_config(**settings) -> RecurrentGPT2Config:
    defaults = {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "max_position_embeddings": 48,
        "loop_groups": [[1], [2, 3], [4]],
        "num_loops": 5,
        "mean_loops": 4,
        "backprop_loops": 3,
    }
    return RecurrentGPT2Config(**{**defaults, **settings})


def tiny_model(
    std: float | None = None, dtype: torch.dtype = torch.float32, seed: int = 0, **settings
) -> RecurrentGPT2ForCausalLM:
    """A model in eval mode. `std` makes its matrices larger than usual, so that a wrong loop slot shows."""
    torch.manual_seed(seed)
    model = RecurrentGPT2ForCausalLM(tiny_config(**settings)).to(dtype).eval()
    if std is not None:
        for parameter in model.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=std)
    return model


def random_ids(batch: int, length: int, seed: int = 0, vocab_size: int = 61) -> torch.Tensor:
    return torch.randint(1, vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


class Collect(BaseStreamer):
    """The tokens that were streamed, and where the stream ended."""

    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.tokens.append("end")


HIDE_PACKAGE = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"recurrent_gpt2", "training", "evaluation"}:
            raise ModuleNotFoundError(f"{name} is hidden from this process")
sys.meta_path.insert(0, Hide())
"""


def run_fresh(code: str, folder: Path, hide_package: bool = True, **environment: str) -> str:
    """Runs code in a new process where nothing is cached and, unless told otherwise, the package can't be imported;
    returns what it prints."""
    path = "" if hide_package else str(ROOT)
    environment = {**os.environ, "HF_HOME": str(folder / "hf_home"), "PYTHONPATH": path, **environment}
    result = subprocess.run(
        [sys.executable, "-c", HIDE_PACKAGE * hide_package + code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout
