"""Tiny runs for the tests of training, in this process, in others, and on several ranks."""

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
from pathlib import Path

import training.train
import training.trainer

TEXT = "".join(
    f"The number {number} comes before {number + 1}, and {number * 7} is seven times as much.\n"
    for number in range(900)
)


def write_texts(folder: Path, documents: int = 60) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = TEXT.splitlines()
    with (folder / "texts.jsonl").open("w") as file:
        for number in range(documents):
            file.write(json.dumps({"text": "\n".join(lines[number * 15 : number * 15 + 15])}) + "\n")


def tiny_run(folder: Path, **fields) -> list[str]:
    """Arguments of `training.train` for a run of seconds, in a folder with texts."""
    settings = {
        "output_dir": folder / "run",
        "sources": f"[{{path: {folder / 'texts.jsonl'}}}]",
        "data_cache": folder / "cache",
        "tokenizer_vocab_size": 300,
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "loop_groups": "[[1], [2]]",
        "mean_loops": 2,
        "num_loops": 2,
        "max_position_embeddings": 32,
        "max_steps": 12,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_steps": 1,
        "eval_strategy": "no",
        "validation_fraction": 0.1,
        "eval_blocks": 4,
        "geometry_loops": 0,
        "disable_tqdm": "true",
        "use_cpu": "true",
    } | fields
    recipe = Path(training.train.__file__).parent / "recipes" / "smoke.yaml"
    return [str(recipe), *(part for name, value in settings.items() for part in (f"--{name}", str(value)))]


def run_quietly(arguments: list[str], die_after: int | None = None, die_delay: float = 0.0) -> None:
    """Target of a process: its output goes nowhere. It kills itself `die_delay` seconds into step `die_after`."""
    import torch

    torch.set_num_threads(1)
    if die_after is not None:
        steps, training_step = itertools.count(1), training.trainer.RecurrentTrainer.training_step

        def counted(*args, **kwargs):
            if next(steps) == die_after:
                threading.Timer(die_delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            return training_step(*args, **kwargs)

        training.trainer.RecurrentTrainer.training_step = counted
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        training.train.main(arguments)


def main() -> None:
    """A rank of a distributed run: writes what it drew, and the losses, to `rank-N.json`."""
    drawn, draw = [], training.trainer.draw_num_loops

    def recorded(*arguments):
        drawn.append(draw(*arguments))
        return drawn[-1]

    training.trainer.draw_num_loops = recorded
    folder, arguments = Path(sys.argv[1]), sys.argv[2:]
    trainer = training.train.main(arguments)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    result = {"drawn": drawn, "losses": losses, "world_size": trainer.args.world_size}
    (folder / f"rank-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
