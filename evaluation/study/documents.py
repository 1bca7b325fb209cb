"""Fills the tables of README.md and docs/ from what the commands wrote: `python -m evaluation.study.documents`.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; what is between them is replaced. The files are
`docs/benchmark.json` (of `evaluation.benchmark`), `docs/finetuning.json` (of `evaluation.study.finetuning`),
`docs/precision.json` (of `evaluation.precision`), `docs/retrofit.json` (of `evaluation.study.retrofit`),
`docs/exit_comparison.json` (of `evaluation.study.exit_comparison`), `docs/leaderboard.json` (of
`evaluation.leaderboard`), `docs/serving.json` (of `evaluation.serving`), `docs/gate.json` (of
`evaluation.study.gate`), `docs/readout.json` (of `evaluation.study.readout`) and, in `docs/reproduction/`,
`report.json` (of `evaluation.report`), `ngrams.json` (of `evaluation.study.ngrams`) and `controls.json` (of
`evaluation.study.controls`); in `docs/tasks/`, `chains.json`, `programs.json` and `chain_sum.json` (of
`evaluation.study.depth_tasks`), `claims.json` (of `evaluation.study.task_claims`) and `exits.json` (of
`evaluation.study.exits_in_training`); `mixture.json` of the shipped model (of `evaluation.mixture`) is beside its
weights, and `docs/mixture/` has those of other seeds.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..benchmark import Ratio
from ..figures import read_sources
from ..leaderboard import GAMES, board, from_json
from ..precision import HEADER, table_of
from ..report import (
    Table,
    cache_table,
    claims_table,
    depth_table,
    geometry_table,
    headroom_table,
    mixture_section,
    rules_table,
    samples_table,
    token_table,
)
from ..serving import throughput_rows
from . import depth_tasks
from .exit_comparison import comparison_table
from .exits_in_training import exits_in_training_table
from .gate import gate_table
from .readout import oracle_table, readout_table
from .retrofit import LOOPS

ROOT = Path(__file__).parents[2]
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def read(name: str) -> Any:
    return json.loads((ROOT / "docs" / name).read_text())


# What a user cares about most, one row each: patterns of "measured / against".
SHORT = (
    r"decode, batch 1, context 64 / GPT-2", r"first token", r"decode, int8, compiled / (float32|GPT-2)",
    r"decode, d = \d+, compiled / GPT-2", r"generation, compiled, drafts of 2 loops, verified as they are made",
    r"prefill, 512 tokens, exits .* / all tokens",
)  # fmt: skip


def short_table() -> Table:
    return benchmark_table(lambda r: any(re.match(pattern, f"{r.what} / {r.against}") for pattern in SHORT))


def benchmark_table(shown: Callable[[Ratio], bool] = lambda ratio: True) -> Table:
    rows = []
    for values in read("benchmark.json")["ratios"]:
        r = Ratio(**values)
        if not shown(r):
            continue
        mark = {None: "", True: "yes", False: "**no**"}[r.is_reached]
        kind = "speed" if r.is_speed else "time"
        spread = f"{r.lowest:.2f}-{r.highest:.2f}"
        what = f"{r.what} ({r.note})" if r.note else r.what
        rows.append([what, r.against, f"{kind} x {r.ratio:.2f}", spread, str(r.rounds), r.goal, mark])
    return Table("", ["measured", "against", "median", "range", "rounds", "goal", "reached"], rows)


def shares_table() -> Table:
    shares = read("benchmark.json")["shares"]
    rows = [[share["what"], f"{share['products']:.0%}", f"{share['attention']:.0%}"] for share in shares]
    return Table("", ["share of time", "in matrix products", "in attention"], rows)


def memory_table() -> Table:
    rows = [
        [m["what"], f"{m['cache_bytes'] / 1e6:.1f}", f"{m['peak_mib']:.0f}",
         *(f"{m[name]:.2f}" if m.get(name) else "" for name in ("call_peak", "call_held"))]
        for m in read("benchmark.json")["memory"]
    ]  # fmt: skip
    of_call = ["peak of the call / weights", "held after it / weights"]
    return Table("", ["512 tokens", "cache (MB)", "peak of the process (MiB)", *of_call], rows)


def machine_table() -> Table:
    found = read("benchmark.json")
    cache_mib, bandwidth = found.get("cache_mib"), found.get("read_gb_per_second")
    cells = ["" if value is None else f"{value:.0f}" for value in (bandwidth, cache_mib)]
    header = ["machine", "memory is read at (GB/s)", "last cache (MiB)", "PyTorch", "seconds a measurement"]
    return Table("", header, [[found["machine"], *cells, found["torch_version"], f"{found['seconds']:g}"]])


def precision_table() -> Table:
    return Table("", HEADER, table_of(read("precision.json")))


def baselines_table() -> Table:
    losses, history = read("reproduction/ngrams.json"), read("reproduction/trainer_state.json")["log_history"]
    final = [entry["eval_loss"] for entry in history if "eval_loss" in entry][-1]
    rows = [
        [f"{kind}s of {part['tokens'] / 1e6:.1f} M tokens", f"{part[kind]:.3f}"]
        for part in losses.values()
        for kind in ("unigram", "bigram")
    ]
    return Table("", ["model", "validation loss (nats)"], [*rows, ["the looped model", f"{final:.3f}"]])


def controls_table() -> Table:
    def shown(values: list[float | None] | None, form: str) -> str:
        return "" if values is None else ", ".join("-" if value is None else form.format(value) for value in values)

    rows = [
        [
            control["name"],
            str(control["step"]),
            f"{control['eval_loss']:.3f}",
            str(control["geometry_step"] or ""),
            shown(control["steps_to_shrink"], "{}"),
            shown(control["cosines"], "{:+.2f}"),
            shown(control["drift_as_printed"], "{:.1f}"),
            shown(control["drift_net"], "{:.1f}"),
        ]
        for control in read("reproduction/controls.json")
    ]
    of_loops = ["geometry of step", "steps to a tenth", "late cosines", "DLR as printed", "DLR, net move"]
    return Table("", ["trained", "steps", "validation loss", *of_loops], rows)


def finetuning_table() -> Table:
    def exits(found: dict[str, Any]) -> str:
        return f"{found['loss']:.3f} at {', '.join(f'{steps:.2f}' for steps in found['steps'])}"

    found = read("finetuning.json")
    (full,) = {tuple(row["full"]["loops"]) for row in found["rows"].values()}
    loops = list(found["rows"]["before"]["loss"])
    rows = []
    for name, row in found["rows"].items():
        answers = row.get("answers", {})  # to programs, where the model was trained on them
        rows.append([
            name, f"{row['trained']:,}", *(f"{row['loss'][n]:.3f}" for n in loops), f"{row['full']['loss']:.3f}",
            exits(row["exits"]), exits(row["calibrated"]), *(f"{answers[how]:.3f}" for how in answers),
        ])  # fmt: skip
    header = [
        f"{found['settings']['steps']} steps, {found['tokens']:,} tokens",
        "weights trained",
        *(f"{n} loops" for n in loops),
    ]
    header += [f"{', '.join(map(str, full))} loops", "own exits: loss at mean steps", "calibrated: loss at mean steps"]
    header += ["programs right", "with own exits"] if answers else []
    return Table("", header, rows)


def retrofit_table(name: str = "text") -> Table:
    found = read("retrofit.json")[name]
    loops = list(map(str, LOOPS))
    rows = [["GPT-2, before", f"{found['gpt2']:.4f}", *[""] * len(loops)]]
    for start, losses in found["converted"].items():
        rows.append([f"{start}: converted", *(f"{loss:.4f}" for loss in losses.values()), ""])
    for how, values in found["healed"].items():
        sizes = ", ".join(f"{size:.2g}" for size in values["step_sizes"][0][1:4])
        rows.append([how, *(f"{loss:.4f}" for loss in values["loss"].values()), sizes])
    if "no loops" in found:
        rows.append(["trained on without loops", f"{found['no loops']:.4f}", *[""] * len(loops)])
    return Table(
        "", [f"{found['settings']['steps']} steps", *(f"{n} loops" for n in loops), "sizes of steps 2 to 4"], rows
    )


def of_report(table: Callable[..., Table], *arguments: Any, by_source: bool = False) -> Callable[[], Table]:
    def make() -> Table:
        report = read("reproduction/report.json")
        return table(read_sources(report) if by_source else report, *arguments)

    return make


# The paper's claims in five rows: what they begin with.
FINDINGS = {
    "Step sizes shrink": "Steps shrink within 5-10 loops",
    "Cosines of consecutive": "Their cosines settle at 0.5 to 0.65",
    "Drift between blocks": "Groups move much farther than loop steps",
    "Step-norm degrades": "Step-norm degrades beyond a threshold of 1e-3",
    "At the same mean steps, acceleration": "(not compared) Acceleration is ahead of fixed loops, as many in the mean",
}


def findings_table() -> Table:
    """A row a claim, a column a workload; of several models of a task, all verdicts."""
    found = {"web text": [read("reproduction/report.json")], **read("tasks/claims.json")}
    rows = []
    for start, claim in FINDINGS.items():
        cells = []
        for models in found.values():
            of_models = [c["verdict"] for model in models for c in model["claims"] if c["claim"].startswith(start)]
            cells.append("; ".join(dict.fromkeys(of_models)) or "has one group")
        rows.append([claim, *cells])
    return Table("", ["the paper says", *found], rows)


def of_mixture(which: int) -> Callable[[], Table]:
    """A table of the report's section on the shipped model."""
    file = ROOT / "checkpoints/recurrent-gpt2-mini/mixture.json"
    return lambda: mixture_section({"mixture": json.loads(file.read_text())})[0].tables[which]


def board_short_table() -> Table:
    """The first rows of the leaderboard beside the ideal and fixed depth, without nulls and accuracies."""
    whole = board(from_json(read("leaderboard.json")))
    shown = [place for place, name in enumerate(whole.header) if name not in ("accuracy", "shuffled")]
    rows = [row for place, row in enumerate(whole.rows) if place < 4 or row[0].startswith("*")]
    return Table("", [whole.header[place] for place in shown], [[row[place] for place in shown] for row in rows])


def mixture_seeds_table() -> Table:
    """The shipped model and those of other training seeds: what must hold for each."""
    files = [ROOT / "checkpoints/recurrent-gpt2-mini/mixture.json", *sorted((ROOT / "docs/mixture").glob("*.json"))]
    rows = []
    for seed, found in enumerate(json.loads(file.read_text()) for file in files):
        full = next(row for row in found["fixed"] if row["num_loops"] == [found["full"]])
        for rule, row in found["chosen"].items():
            if row is not None:
                rows.append([
                    str(seed), f"{full['text_loss']:.3f}, {full['task_accuracy']:.4f}", f"{rule} {row['threshold']:g}",
                    f"{row['mean_steps']:.2f}", f"{row['difference']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]",
                    f"{row['loss'] - row['by_kind_loss']:+.3f}", f"{row['loss'] - row['shuffled_loss']:+.3f}",
                    f"{row['text_against_fixed']:+.4f}", f"{row['task_accuracy']:.4f}",
                ])  # fmt: skip
    header = ["seed", "full depth: text, right", "rule", "mean steps", "against fixed depth [95 %]",
              "against a depth for each kind", "against its steps shuffled", "text against fixed depth",
              "answers right"]  # fmt: skip
    return Table("", header, rows)


def of_task(table: Callable[[dict[str, Any]], Table], task: str) -> Callable[[], Table]:
    return lambda: table(read(f"tasks/{task}.json"))


def of_comparison(game: str) -> Callable[[], Table]:
    return lambda: comparison_table(read("exit_comparison.json"), game)


def exits_table() -> Table:
    studies = {task: read(f"tasks/{task}.json") for task in ("chains", "programs")}
    rules = ("acceleration/state", "step_norm/state", "step_norm/state x3", "kl")
    return depth_tasks.exits_table(studies, rules)


TABLES: dict[str, Callable[[], Table]] = {
    **{f"exits_on_{game.name}": of_comparison(game.name) for game in GAMES},
    "leaderboard": lambda: board(from_json(read("leaderboard.json"))),
    "leaderboard_short": board_short_table,
    "gate": lambda: gate_table(read("gate.json")),
    "readout": lambda: readout_table(read("readout.json")),
    "oracle": lambda: oracle_table(read("readout.json")),
    "benchmark": benchmark_table,
    "benchmark_short": short_table,
    "machine": machine_table,
    "precision": precision_table,
    "throughput": lambda: Table("", *throughput_rows(read("serving.json"))),
    "finetuning": finetuning_table,
    "retrofit": retrofit_table,
    "retrofit_longer": lambda: retrofit_table("text, longer"),
    "retrofit_real": lambda: retrofit_table("microformer-mgm"),
    "shares": shares_table,
    "memory": memory_table,
    "baselines": baselines_table,
    "controls": controls_table,
    "claims": of_report(claims_table),
    "findings": findings_table,
    "geometry": of_report(geometry_table),
    "headroom": of_report(headroom_table),
    "cache": of_report(cache_table),
    "samples": of_report(samples_table),
    "slowest": of_report(token_table, "slowest"),
    "fastest": of_report(token_table, "fastest"),
    "rules": of_report(rules_table, by_source=True),
    "depth": of_report(depth_table, by_source=True),
    "exits": exits_table,
    "mixture_chosen": of_mixture(0),
    "mixture_fixed": of_mixture(1),
    "mixture_rules": of_mixture(2),
    "mixture_follows": of_mixture(3),
    "mixture_seeds": mixture_seeds_table,
    "exits_in_training": lambda: exits_in_training_table(read("tasks/exits.json")),
    "chains_fixed": of_task(depth_tasks.fixed_table, "chains"),
    "chains_rules": of_task(depth_tasks.rules_table, "chains"),
    "chains_reach": of_task(depth_tasks.reach_table, "chains"),
    "chains_frozen": of_task(depth_tasks.frozen_table, "chains"),
    "chains_ideal": of_task(depth_tasks.ideal_table, "chains"),
    "chains_deeper": of_task(depth_tasks.deeper_table, "chains"),
    "chain_sum_staircase": of_task(depth_tasks.staircase_table, "chain_sum"),
    "chain_sum_rules": of_task(depth_tasks.rules_table, "chain_sum"),
    "programs_fixed": of_task(depth_tasks.fixed_table, "programs"),
    "programs_rules": of_task(depth_tasks.rules_table, "programs"),
    "programs_reach": of_task(depth_tasks.reach_table, "programs"),
    "programs_ideal": of_task(depth_tasks.ideal_table, "programs"),
    "programs_deeper": of_task(depth_tasks.deeper_table, "programs"),
}


def fill(text: str) -> str:
    """The text with its tables as the files have them now."""
    return MARKED.sub(lambda match: f"{match[1]}{TABLES[match[2]]().markdown()}\n{match[3]}", text)


def main() -> None:
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        before = path.read_text()
        after = fill(before)
        if after != before:
            path.write_text(after)
            print(f"updated {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
