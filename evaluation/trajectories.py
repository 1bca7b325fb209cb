"""Hidden-state trajectories of a text: `python -m evaluation.trajectories CHECKPOINT --text FILE --output DIR`.

Writes, as it goes, so that memory does not grow with the text:

- `states-*.safetensors`: for the chosen tokens, the states s(0..K) of every group (`group_0`, ... [steps + 1, tokens,
  hidden]) and the states between blocks (`between` [points, tokens, hidden]);
- `statistics.parquet`: for every token, group and step: step norm, cosine to the step before, contraction ratio,
  acceleration (raw and in both normalised forms), norm of the state, and whether the step is above rounding noise;
- `index.json`: tokens, text, groups, steps, points, checkpoint and versions.

`load_trajectories(DIR)` gives them back as named arrays.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file
from tqdm.auto import tqdm

from recurrent_gpt2 import geometry

from .common import load_checkpoint

STATISTICS = pa.schema(
    [("token", pa.int64()), ("group", pa.int16()), ("step", pa.int16())]
    + [(name, pa.float32()) for name in ("step_norm", "cosine", "contraction", "acceleration", "acceleration_state")]
    + [("acceleration_step", pa.float32()), ("state_norm", pa.float32()), ("above_floor", pa.bool_())]
)


def points_between(config, num_loops: list[int]) -> dict[str, int]:
    """Names of the states between blocks, and their places among `hidden_states` (one per layer application)."""
    points, place = {"embeddings": 0}, 0
    for stage in config.stages:
        if stage.group is not None:
            place += len(stage.layers) * num_loops[stage.group]
            points[f"group_{stage.group}"] = place
            continue
        for layer in stage.layers:
            place += 1
            points[f"layer_{layer}"] = place
    points.popitem()
    return points | {"final_norm": place}  # transformers gives the last hidden state behind it


def statistics_of(states: torch.Tensor, group: int, first_token: int) -> pa.RecordBatch:
    """Rows for the states [K + 1, tokens, hidden] of a group, step by step; the first step has no step before it."""
    steps, tokens = states.shape[0] - 1, states.shape[1]

    def flat(values: torch.Tensor) -> np.ndarray:
        missing = torch.full((steps - values.shape[0], tokens), torch.nan, dtype=torch.float64)
        return torch.cat([missing, values]).T.reshape(-1).numpy().astype(np.float32)

    columns = {
        "token": np.repeat(np.arange(first_token, first_token + tokens), steps),
        "group": np.full(tokens * steps, group, dtype=np.int16),
        "step": np.tile(np.arange(steps, dtype=np.int16), tokens),
        "step_norm": flat(geometry.step_norms(states)),
        "cosine": flat(geometry.step_cosines(states)),
        "contraction": flat(geometry.contraction_ratios(states)),
        "acceleration": flat(geometry.accelerations(states)),
        "acceleration_state": flat(geometry.accelerations(states, "state")),
        "acceleration_step": flat(geometry.accelerations(states, "step")),
        "state_norm": flat(states[1:].double().norm(dim=-1)),
        "above_floor": geometry.above_floor(states).T.reshape(-1).numpy(),
    }
    return pa.record_batch(columns, schema=STATISTICS)


@torch.no_grad()
def write_trajectories(
    checkpoint: str | Path, text: str, output: Path, num_loops: int | list[int] = 30, keep_states: int = 256
) -> None:
    """`keep_states`: how many tokens, spread evenly over the text, have their states written beside the statistics."""
    model, tokenizer = load_checkpoint(checkpoint)
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    if len(ids) < 2:
        raise ValueError(f"`--text` has {len(ids)} token(s), but a trajectory needs at least 2.")
    loops = model.config.loops_per_group(num_loops)
    points = points_between(model.config, loops)
    chosen = set(np.linspace(0, len(ids) - 1, min(keep_states, len(ids)), dtype=int).tolist()) if keep_states else set()
    output.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {
        "checkpoint": str(checkpoint),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "groups": model.config.loop_groups,
        "num_loops": loops,
        "points": list(points),
        "token_ids": ids.tolist(),
        "tokens": tokenizer.convert_ids_to_tokens(ids),
        "text": text,
        "chosen": sorted(chosen),
        "files": [],
    }
    window = model.config.max_position_embeddings  # texts longer than the positions are read window by window
    with pq.ParquetWriter(output / "statistics.parquet", STATISTICS) as writer:
        for start in tqdm(range(0, len(ids), window), desc="trajectories", unit=" windows", leave=False):
            part = ids[start : start + window]
            outputs = model.model(
                part[None], num_loops=loops, output_loop_trajectory=True, output_hidden_states=True, use_cache=False
            )
            places = [token - start for token in sorted(chosen) if start <= token < start + len(part)]
            for group, states in enumerate(outputs.loop_trajectory):
                writer.write_batch(statistics_of(states[:, 0], group, start))
            if places:
                arrays = {
                    f"group_{g}": states[:, 0, places].numpy() for g, states in enumerate(outputs.loop_trajectory)
                }
                between = [outputs.hidden_states[place][0, places] for place in points.values()]
                arrays["between"] = torch.stack(between).numpy()
                file = f"states-{len(index['files']):05}.safetensors"
                save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, output / file)
                index["files"].append({"file": file, "tokens": [start + place for place in places]})
    (output / "index.json").write_text(json.dumps(index))  # last: a folder without it was cut short


@dataclass
class Trajectories:
    """A folder of trajectories: `index` (what `index.json` has), and arrays that are read when asked for."""

    folder: Path

    @cached_property
    def index(self) -> dict[str, Any]:
        path = self.folder / "index.json"
        if not path.exists():
            raise FileNotFoundError(
                f"{self.folder} has no index.json: there are no trajectories, or they were cut short."
            )
        return json.loads(path.read_text())

    def __getitem__(self, name: str) -> np.ndarray:
        """`group_0`, ... [steps + 1, chosen tokens, hidden], or `between` [points, chosen tokens, hidden]."""
        parts = []
        for entry in self.index["files"]:
            with safe_open(self.folder / entry["file"], "np") as tensors:
                if name not in tensors.keys():  # noqa: SIM118
                    raise KeyError(f"{name!r} is not among {', '.join(sorted(tensors.keys()))}.")
                parts.append(tensors.get_tensor(name))
        return np.concatenate(parts, axis=1)

    def statistics(self, columns: list[str] | None = None) -> pa.Table:
        return pq.read_table(self.folder / "statistics.parquet", columns=columns)


def load_trajectories(folder: str | Path) -> Trajectories:
    """Fails where there are none."""
    trajectories = Trajectories(Path(folder))
    assert trajectories.index
    return trajectories


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder or name on the Hub")
    parser.add_argument("--text", required=True, help="a file, or the text itself")
    parser.add_argument("--num_loops", type=int, default=30)
    parser.add_argument("--keep_states", type=int, default=256, help="tokens whose states are written, spread evenly")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    is_file = len(options.text) < 4096 and Path(options.text).is_file()
    text = Path(options.text).read_text(encoding="utf-8") if is_file else options.text
    write_trajectories(options.checkpoint, text, options.output, options.num_loops, options.keep_states)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
