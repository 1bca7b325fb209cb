"""Two processes that share out the heads and the MLP give the tokens of one."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.helpers import ROOT, random_ids, tiny_model

LOOPS = [
    {},
    {"exit_policy": "kl", "num_loops": 6},
    {"exit_policy": {"name": "step_norm", "threshold": 0.5, "normalize": "state"}, "cache_strategy": "last_step"},
]
GENERATE = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
PROGRAM = """
import json, os, sys
import torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
import recurrent_gpt2

given = json.loads(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(given["folder"], distributed_config=DistributedConfig(tp_plan="auto"))
layer = model.model.layers[1]
shapes = [list(m.weight.to_local().shape) for m in (layer.attention.qkv_proj, layer.mlp.down_proj)]
ids = torch.tensor(given["ids"])
texts = [model.generate(ids, **loops, **given["generate"]).tolist() for loops in given["loops"]]
with open(f"{given['folder']}/answer{os.environ['RANK']}.json", "w") as file:
    json.dump({"shapes": shapes, "texts": texts}, file)
"""


def test_the_plan_names_every_matrix_of_a_block():
    model = tiny_model(use_bias=True)
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    blocks = {name for name in linear if ".layers." in name}
    planned = {"attention.qkv_proj", "attention.o_proj", "mlp.up_proj", "mlp.down_proj"}
    assert {name.split(".", 3)[3] for name in blocks} == planned
    assert {key.removeprefix("layers.*.") for key in model.config.base_model_tp_plan} == planned


@pytest.mark.slow
@pytest.mark.parametrize("use_bias", [False, True])
def test_two_processes_give_the_tokens_of_one(use_bias, tmp_path):
    model = tiny_model(std=0.08, use_bias=use_bias)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    ids = random_ids(2, 9)
    expected = [model.generate(ids, **loops, **GENERATE).tolist() for loops in LOOPS]
    given = {"folder": str(tmp_path), "ids": ids.tolist(), "loops": LOOPS, "generate": GENERATE}
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
        str(tmp_path / "program.py"), json.dumps(given),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    for rank in range(2):
        answer = json.loads((tmp_path / f"answer{rank}.json").read_text())
        assert answer["shapes"] == [[48, 32], [32, 64]]
        assert answer["texts"] == expected
