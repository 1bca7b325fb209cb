"""Fills the tables of README.md and docs/ from what the commands wrote: `python -m evaluation.study.documents`.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; what is between them is replaced. The files are
`docs/benchmark.json` (of `evaluation.benchmark`), `docs/exit_comparison.json` (of `evaluation.study.exit_comparison`)
and, in `docs/reproduction/`, `report.json` (of `evaluation.report`),
`ngrams.json` (of `evaluation.study.ngrams`) and `controls.json` (of `evaluation.study.controls`); in `docs/tasks/`,
`chains.json` and `programs.json` (of `evaluation.study.depth_tasks`).
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..benchmark import Ratio
from ..figures import read_sources
from ..report import (
    Table,
    cache_table,
    claims_table,
    depth_table,
    geometry_table,
    rules_table,
    samples_table,
    token_table,
)
from . import depth_tasks
from .exit_comparison import comparison_table

ROOT = Path(__file__).parents[2]
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def read(name: str) -> Any:
    return json.loads((ROOT / "docs" / name).read_text())


def benchmark_table() -> Table:
    rows = []
    for values in read("benchmark.json")["ratios"]:
        r = Ratio(**values)
        mark = {None: "", True: "yes", False: "**no**"}[r.is_reached]
        kind = "speed" if r.is_speed else "time"
        spread = f"{r.lowest:.2f}-{r.highest:.2f}"
        rows.append([r.what, r.against, f"{kind} x {r.ratio:.2f}", spread, str(r.rounds), r.goal, mark])
    return Table("", ["measured", "against", "median", "range", "rounds", "goal", "reached"], rows)


def shares_table() -> Table:
    shares = read("benchmark.json")["shares"]
    rows = [[share["what"], f"{share['products']:.0%}", f"{share['attention']:.0%}"] for share in shares]
    return Table("", ["share of time", "in matrix products", "in attention"], rows)


def memory_table() -> Table:
    rows = [
        [m["what"], f"{m['cache_bytes'] / 1e6:.1f}", f"{m['peak_mib']:.0f}"] for m in read("benchmark.json")["memory"]
    ]
    return Table("", ["512 tokens", "cache (MB)", "peak of the process (MiB)"], rows)


def baselines_table() -> Table:
    losses, state = read("reproduction/ngrams.json"), ROOT / "checkpoints/recurrent-gpt2-mini/trainer_state.json"
    history = json.loads(state.read_text())["log_history"]
    final = [entry["eval_loss"] for entry in history if "eval_loss" in entry][-1]
    rows = [
        [f"{kind}s of {part['tokens'] / 1e6:.1f} M tokens", f"{part[kind]:.3f}"]
        for part in losses.values()
        for kind in ("unigram", "bigram")
    ]
    return Table("", ["model", "validation loss (nats)"], [*rows, ["recurrent-gpt2-mini", f"{final:.3f}"]])


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


def of_report(table: Callable[..., Table], *arguments: Any, by_source: bool = False) -> Callable[[], Table]:
    def make() -> Table:
        report = read("reproduction/report.json")
        return table(read_sources(report) if by_source else report, *arguments)

    return make


def of_task(table: Callable[[dict[str, Any]], Table], task: str) -> Callable[[], Table]:
    return lambda: table(read(f"tasks/{task}.json"))


def exits_table() -> Table:
    studies = {task: read(f"tasks/{task}.json") for task in ("chains", "programs")}
    rules = ("acceleration/state", "step_norm/state", "step_norm/state x3", "kl", "kl x3")
    return depth_tasks.exits_table(studies, rules)


TABLES: dict[str, Callable[[], Table]] = {
    "exits_on_chains": lambda: comparison_table(read("exit_comparison.json"), "chains"),
    "benchmark": benchmark_table,
    "shares": shares_table,
    "memory": memory_table,
    "baselines": baselines_table,
    "controls": controls_table,
    "claims": of_report(claims_table),
    "geometry": of_report(geometry_table),
    "cache": of_report(cache_table),
    "samples": of_report(samples_table),
    "slowest": of_report(token_table, "slowest"),
    "fastest": of_report(token_table, "fastest"),
    "rules": of_report(rules_table, by_source=True),
    "depth": of_report(depth_table, by_source=True),
    "exits": exits_table,
    "chains_fixed": of_task(depth_tasks.fixed_table, "chains"),
    "chains_rules": of_task(depth_tasks.rules_table, "chains"),
    "chains_reach": of_task(depth_tasks.reach_table, "chains"),
    "chains_frozen": of_task(depth_tasks.frozen_table, "chains"),
    "chains_ideal": of_task(depth_tasks.ideal_table, "chains"),
    "chains_deeper": of_task(depth_tasks.deeper_table, "chains"),
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
