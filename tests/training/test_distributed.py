import json
import os
import socket
import subprocess
import sys

import pytest

from tests.helpers import ROOT
from tests.training.runs import tiny_run, write_texts


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def launch(script: str, *arguments: str, processes: int = 2, **environment: str) -> str:
    """Runs a script on several ranks, as `torchrun` does; returns what they print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    command += ["--master_addr", "127.0.0.1", "--master_port", str(free_port()), "-m", script, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    return result.stdout + result.stderr


def results(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]


def test_two_processes_train_as_one_does(tmp_path):
    outcomes = {}
    for processes, per_device in ((1, 8), (2, 4)):
        folder = tmp_path / str(processes)
        write_texts(folder)
        arguments = tiny_run(
            folder, max_steps=6, per_device_train_batch_size=per_device, state_init="zeros", save_steps=6, mean_loops=4
        )
        printed = launch("tests.training.runs", str(folder), *arguments, processes=processes)
        assert printed.count("saved to") == printed.count(" parameters, loop groups") == 1
        outcomes[processes] = results(folder)
    (single,), pair = outcomes[1], outcomes[2]
    assert [rank["world_size"] for rank in pair] == [2, 2]
    assert pair[0]["drawn"] == pair[1]["drawn"] == single["drawn"]
    assert len({tuple(counts) for counts in single["drawn"]}) > 3
    assert pair[0]["losses"] == pytest.approx(single["losses"], abs=1e-4)


@pytest.mark.slow
def test_two_processes_stream_one_corpus(tmp_path):
    losses = {}
    for processes, per_device in ((1, 8), (2, 4)):
        folder = tmp_path / str(processes)
        write_texts(folder)
        sources = f"[{{path: {folder / 'texts.jsonl'}, streaming: true}}]"
        arguments = tiny_run(
            folder,
            max_steps=6,
            per_device_train_batch_size=per_device,
            state_init="zeros",
            save_steps=3,
            sources=sources,
        )
        launch("tests.training.runs", str(folder), *arguments, processes=processes)
        losses[processes] = results(folder)[0]["losses"]
    assert losses[2] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.slow
def test_fully_sharded_on_two_processes(tmp_path):
    launch("tests.training.sharded", str(tmp_path))
    first, second = results(tmp_path)
    assert first["drawn"] == second["drawn"]
    assert first["losses"][-1] < first["losses"][0]
    assert first["sharded"]
    assert '"step": 0' in (tmp_path / "geometry.jsonl").read_text()


@pytest.mark.slow
def test_deepspeed_zero_3_on_two_processes(tmp_path):
    pytest.importorskip("deepspeed", reason="`make test-slow` installs it")
    write_texts(tmp_path)
    config = ROOT / "training" / "configs" / "deepspeed_zero3.json"
    arguments = tiny_run(
        tmp_path, max_steps=8, save_steps=8, deepspeed=config, geometry_loops=3, warmup_steps=0, learning_rate=1e-2
    )
    launch("tests.training.runs", str(tmp_path), *arguments, DS_ACCELERATOR="cpu")
    first, second = results(tmp_path)
    assert first["drawn"] == second["drawn"]
    assert len(first["losses"]) == 8
    assert first["losses"][-1] < first["losses"][0]
