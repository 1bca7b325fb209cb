"""A rank of a run with FSDP2: every block is sharded, and loop counts vary from step to step."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.helpers import random_ids, tiny_model
from training.trainer import GeometryCallback, draw_num_loops


def main() -> None:
    dist.init_process_group("gloo")
    model = tiny_model(state_init="zeros", mean_loops=4).train()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    geometry = GeometryCallback([{"input_ids": row} for row in random_ids(2, 16)], num_loops=3)
    trainer_state = SimpleNamespace(global_step=0, is_world_process_zero=dist.get_rank() == 0, max_steps=8)
    geometry.on_train_begin(SimpleNamespace(output_dir=sys.argv[1]), trainer_state, None, model=model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = random_ids(4, 16, seed=dist.get_rank())
    drawn, losses = [], []
    for step in range(8):
        drawn.append(draw_num_loops(model.config, 0, step, 0))
        loss = model(ids, labels=ids, num_loops=drawn[-1]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    sharded = all(isinstance(parameter, DTensor) for parameter in model.parameters())
    result = {"drawn": drawn, "losses": losses, "sharded": sharded}
    Path(sys.argv[1], f"rank-{os.environ['RANK']}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
