"""The paper's claims on a depth task, the study's second workload.

    python -m evaluation.study.task_claims checkpoints/recurrent-gpt2-chains RUN RUN --output docs/tasks/claims.json

Takes checkpoints of one task or several, one a training seed, and checks on new sequences of it what
`evaluation.report` checks on text: quality is the cross-entropy of the answers, an interval is over sequences, and a
verdict takes what `claims.py` says it does. Times are of decoding, one sequence at a time, and of eight.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from training.tasks import ids_of_tokens

from ..common import Sequences, load_checkpoint
from ..depth import TEST_SEED, task_of
from ..exit_tradeoff import PAPER_THRESHOLDS, make_settings, measure_times, run_sweep
from ..figures import PAPER_RULES, read_geometry
from ..observations import measure_geometry
from ..report import Table
from .claims import check_claims

GEOMETRY_LOOPS = 30
THRESHOLDS = (*PAPER_THRESHOLDS, 0.1, 0.3, 1.0, 3.0)  # of states of norms about 10


def measure(checkpoint: str | Path, cap: int, count: int, rounds: int) -> dict[str, Any]:
    model, tokenizer = load_checkpoint(checkpoint)
    task = task_of(model).full()
    batch = task.sample(count, task.depth, np.random.default_rng([TEST_SEED]))
    sequences = Sequences.of(batch, ids_of_tokens(tokenizer, task))
    recorded = Path(checkpoint) / "geometry.jsonl"
    history = read_geometry(recorded) if recorded.exists() else []
    geometry = measure_geometry(model, sequences.ids[:64], GEOMETRY_LOOPS)
    settings = make_settings(list(PAPER_RULES), cap, thresholds=list(THRESHOLDS), depths=range(1, cap + 1))
    with tempfile.TemporaryDirectory() as folder:
        results = run_sweep(model, sequences, settings, Path(folder), batch_size=64)
        if rounds > 0:
            prompts = sequences.ids[:8, : sequences.ids.shape[1] // 2]
            fast, _ = load_checkpoint(checkpoint, optimize=True)
            timed = [r for r in results if r.setting.exit_policy and r.setting.exit_policy["threshold"] <= 0.01]
            measure_times(fast, prompts, timed, Path(folder) / "times.jsonl", (1,), rounds=rounds)
    claims = check_claims(geometry, history, results, model.config.state_init)
    return {"task": task.name, "cap": cap, "sequences": count, "claims": [asdict(claim) for claim in claims]}


def claims_table(seeds: list[dict[str, Any]]) -> Table:
    """A row a claim, a column a seed."""
    rows = []
    for of_seeds in zip(*(seed["claims"] for seed in seeds), strict=True):
        verdicts = [claim["verdict"] for claim in of_seeds]
        shown = verdicts[0] if len(set(verdicts)) == 1 else "; ".join(verdicts)
        rows.append([of_seeds[0]["claim"], of_seeds[0]["measured"], f"**{shown}**"])
    return Table("", ["claim", "here (seed 0)", "verdict" + (" (seeds)" if len(seeds) > 1 else "")], rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", help="of depth tasks")
    parser.add_argument("--output", type=Path, required=True, help="a JSON file, by task, in which other tasks stay")
    parser.add_argument("--num_loops", type=int, default=24, help="the cap")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3, help="of measuring times; 0: none")
    options = parser.parse_args(arguments)
    found: dict[str, list[dict[str, Any]]] = {}
    for checkpoint in options.checkpoints:
        measured = measure(checkpoint, options.num_loops, options.sequences, options.rounds)
        found.setdefault(measured["task"], []).append(measured)
    others = json.loads(options.output.read_text()) if options.output.exists() else {}
    options.output.write_text(json.dumps({**others, **found}, indent=1) + "\n")
    for task, seeds in found.items():
        print(f"{task}:\n{claims_table(seeds).markdown()}\n")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
