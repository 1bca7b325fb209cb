"""Speed on the machine it runs on, as ratios within one run: `python -m evaluation.benchmark`.

Every measurement sets two ways of doing the same beside each other, in turn, round after round, and reports the median
of the rounds' ratios with their range. Absolute times are of this machine and this moment.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm

from recurrent_gpt2 import AccelerationExit, RecurrentGPT2Config, RecurrentGPT2ForCausalLM


@dataclass
class Ratio:
    """Time of `what` over time of `against`: below 1, `what` is faster."""

    what: str
    against: str
    ratio: float  # median over rounds
    lowest: float
    highest: float
    milliseconds: float  # of `what`, median
    milliseconds_against: float


def compare_times(what: tuple[str, Callable], against: tuple[str, Callable], rounds: int) -> Ratio:
    times: list[tuple[float, float]] = []
    for function in (what[1], against[1]):  # compiles, and fills caches
        function()
    for _ in tqdm(range(rounds), desc=what[0], unit=" rounds"):
        times.append((_seconds(what[1]), _seconds(against[1])))
    pairs = np.array(times) * 1000
    ratios = pairs[:, 0] / pairs[:, 1]
    return Ratio(
        what[0], against[0], float(np.median(ratios)), float(ratios.min()), float(ratios.max()),
        float(np.median(pairs[:, 0])), float(np.median(pairs[:, 1])),
    )  # fmt: skip


def _seconds(function: Callable) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def mini_config() -> RecurrentGPT2Config:
    """The model of `training/recipes/mini.yaml`."""
    return RecurrentGPT2Config(vocab_size=8192, hidden_size=128, num_attention_heads=4, max_position_embeddings=256)


def training_step(rounds: int) -> Ratio:
    """A step of the mini recipe, 8 sequences of 256 tokens, with blocks compiled and without."""
    ids = torch.randint(0, 8192, (8, 256), generator=torch.Generator().manual_seed(0))

    def step_of(compiled: bool) -> Callable[[], None]:
        torch.manual_seed(0)
        model = RecurrentGPT2ForCausalLM(mini_config()).train()
        if compiled:
            for layer in model.model.layers:
                layer.compile(dynamic=False)

        def step() -> None:
            model(ids, labels=ids, num_loops=[11, 14, 13]).loss.backward()
            model.zero_grad()

        return step

    return compare_times(("training, compiled", step_of(True)), ("training, eager", step_of(False)), rounds)


def never_firing(rounds: int, length: int) -> Ratio:
    """The paper's model at 12 loops, with an acceleration rule that never fires and with none."""
    model = RecurrentGPT2ForCausalLM(RecurrentGPT2Config()).eval()
    ids = torch.randint(0, 50257, (1, 64 + length), generator=torch.Generator().manual_seed(0))

    def run_of(policy: AccelerationExit | None) -> Callable[[], None]:
        @torch.no_grad()
        def run() -> None:
            if length > 8:
                model(ids, exit_policy=policy, use_cache=False, logits_to_keep=1)
            else:
                model.generate(
                    ids[:, :64], max_new_tokens=length, min_new_tokens=length, do_sample=False, exit_policy=policy,
                    pad_token_id=0,
                )  # fmt: skip

        return run

    where = f"scoring {64 + length} tokens" if length > 8 else f"decoding {length} tokens"
    never, fixed = run_of(AccelerationExit(0.0)), run_of(None)
    return compare_times((f"{where}, a rule that never fires", never), ("fixed loops", fixed), rounds)


MEASUREMENTS: dict[str, Callable[[int], Ratio]] = {
    "training step": training_step,
    "rule that never fires, scoring": lambda rounds: never_firing(rounds, 192),
    "rule that never fires, decoding": lambda rounds: never_firing(rounds, 8),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="three rounds")
    parser.add_argument("--output", type=Path, help="write the ratios to this JSON file too")
    options = parser.parse_args(arguments)
    results = [measure(3 if options.quick else options.rounds) for measure in MEASUREMENTS.values()]
    table = Table("measured", "against", "ratio", "range", "ms", "ms against")
    for r in results:
        times = (f"{r.milliseconds:.1f}", f"{r.milliseconds_against:.1f}")
        table.add_row(r.what, r.against, f"{r.ratio:.3f}", f"{r.lowest:.3f}-{r.highest:.3f}", *times)
    Console().print(table)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
