"""What running a checkpoint's code may do, and what a hostile checkpoint may not."""

import ast
import json
import sys

import pytest
import torch

from recurrent_gpt2 import RecurrentGPT2ForCausalLM
from tests.helpers import REMOTE_CODE, ROOT, random_ids, run_fresh, tiny_model


@pytest.mark.parametrize("name", sorted(REMOTE_CODE | {"geometry.py"}))
def test_remote_code_imports_torch_and_transformers_only(name):
    path = ROOT / "recurrent_gpt2" / name
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = [node.module]
        else:
            continue
        for module in modules:
            top = module.split(".")[0]
            assert top in {"torch", "transformers"} or top in sys.stdlib_module_names, f"{path.name} imports {module}"
            assert top not in {"os", "subprocess", "socket", "urllib", "http", "pickle", "shutil", "importlib"}


def test_loading_and_generating_opens_no_connection_and_no_file_beyond_the_checkpoint(tmp_path):
    tiny_model().save_pretrained(tmp_path / "checkpoint")
    printed = run_fresh(
        """
import os, sys, sysconfig
import torch, transformers
from transformers import AutoModelForCausalLM
here = os.getcwd()
allowed = [os.path.join(here, "checkpoint"), os.environ["HF_HOME"], sys.prefix, sys.base_prefix, sys.exec_prefix,
           "/proc", "/sys", "/dev", "/etc", "/usr"]
events = []
def watch(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        path, mode = os.path.abspath(arguments[0]), arguments[1] or "r"
        writes = any(letter in mode for letter in "wax+")
        if not any(path.startswith(prefix) for prefix in allowed[:2] if writes) and writes and path != "/dev/null":
            events.append(f"writes {path}")
        elif not any(path.startswith(prefix) for prefix in allowed):
            events.append(f"opens {path}")
    if event in ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system"):
        events.append(f"{event} {arguments}")
sys.addaudithook(watch)
model = AutoModelForCausalLM.from_pretrained("checkpoint", trust_remote_code=True)
model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, exit_policy="kl")
print("EVENTS", events)
""",
        tmp_path,
    )
    assert "EVENTS []" in printed, printed


def test_pickles_are_not_read(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"safetensors.*Pickles.*not read"):
        RecurrentGPT2ForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="use_safetensors"):
        RecurrentGPT2ForCausalLM.from_pretrained(tmp_path, use_safetensors=False)


@pytest.mark.parametrize(
    "exit_policy",
    [
        "__import__('os').system('touch ran')",
        {"name": "exec", "threshold": "open('ran', 'w')"},
        {"name": "__main__.Policy"},
        {"name": "kl", "threshold": 1e308 * 10},
        {"name": "kl", "threshold": "1e-3"},
        {"name": "kl", "patience": 10**400},
        {"name": "kl", "min_loops": -(10**30)},
        {"name": "kl", "__class__": "x"},
        {"name": {"name": "kl"}},
        {"name": "acceleration", "normalize": {"step": 1}},
        [["kl"]] * 3,
        ["kl"] * 10_000,
        True,
        3.5,
    ],
    ids=lambda policy: repr(policy)[:40],
)
def test_a_hostile_generation_config_is_refused_and_runs_nothing(tmp_path, monkeypatch, exit_policy):
    monkeypatch.chdir(tmp_path)
    tiny_model().save_pretrained(tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "exit_policy": exit_policy, "_from_model_config": False})
    )
    model = RecurrentGPT2ForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"exit_policy|threshold|patience|min_loops|normalize") as refused:
        model.generate(random_ids(1, 3), max_new_tokens=2)
    assert len(str(refused.value)) < 500
    assert not (tmp_path / "ran").exists()


def test_deep_nesting_is_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    path = tmp_path / "generation_config.json"
    for depth in (50, 900):
        nested = "[" * depth + "]" * depth
        path.write_text('{"_from_model_config": false, "exit_policy": {"name": ' + nested + "}}")
        with pytest.raises((ValueError, RecursionError)):  # transformers itself gives up on the deeper one
            RecurrentGPT2ForCausalLM.from_pretrained(tmp_path).generate(random_ids(1, 3), max_new_tokens=2)
