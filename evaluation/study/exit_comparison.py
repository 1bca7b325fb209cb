"""Every exit rule on tasks and texts, over several trained models: the comparison of docs/exit_policies.md.

    python -m evaluation.study.exit_comparison chains=RUN,RUN,RUN programs=RUN,RUN,RUN text=CHECKPOINT \\
        --texts web.parquet wiki.jsonl python-docs --output docs/exit_comparison.json

Each run or text is played as a game of the leaderboard: thresholds chosen on a tuning set, numbers of a test set.
Means are over runs, with their range. What is there already in `--work`, the leaderboard's own scores among it, is not
computed again.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..exit_search import find_rules
from ..leaderboard import GAMES, Entry, Game, Player, Results, from_json, to_json
from ..report import Table, name_of_source


def games_of(name: str, run: Path, texts: list[str]) -> list[Game]:
    """The leaderboard's game of this name with another checkpoint; for text, one for each text."""
    game = replace(next(game for game in GAMES if game.name == name), checkpoint=run.name)
    if game.kept is not None:
        return [game]
    return [replace(game, source=text) for text in texts]


def play_all(runs: dict[str, list[Path]], texts: list[str], work: Path) -> list[Results]:
    rules, played = find_rules(and_registered=True), []
    for name, folders in runs.items():
        for run in folders:
            for game in games_of(name, run, texts):
                results = Player(game, work, run.parent).play(rules)
                played.append(replace(results, game=replace(game, source=name_of_source(game.source))))
    return played


def comparison_table(values: list[dict[str, Any]], name: str) -> Table:
    """Rules of one game, over its runs (of a task) or texts: the cheapest that keep the quality, cheapest first."""
    played = [results for results in from_json(values) if results.game.name == name]
    is_task = played[0].game.kept is not None
    rows = []
    for rule in dict.fromkeys(entry.rule for results in played for entry in results.entries):
        entries = [entry for results in played for entry in results.entries if entry.rule == rule]
        if len(entries) == len(played):
            rows.append((np.mean([entry.flops for entry in entries]), _row(rule, entries, is_task)))
    fixed, ideal = ([getattr(r, kind) for r in played if getattr(r, kind)] for kind in ("fixed", "ideal"))
    rows = [row for _, row in sorted(rows, key=lambda row: row[0])]
    rows += [_row(f"*{kind}*", entries, is_task) for kind, entries in (("fixed", fixed), ("ideal", ideal)) if entries]
    last = "accuracy with its steps shuffled" if is_task else "against the hull at equal FLOPs [95 %], each text"
    lost = "accuracy lost" if is_task else "nats lost"
    return Table("", ["rule", "mean steps", "MFLOP/token", lost, "head passes a token", last], rows)


def _row(rule: str, entries: list[Entry], is_task: bool) -> list[str]:
    lost = [entry.loss - entry.full_loss for entry in entries]
    nulls = [1 - entry.shuffled_loss for entry in entries if entry.shuffled_loss is not None]
    last = (
        _range(nulls, 3) if is_task else "; ".join(_distance(entry) for entry in entries if entry.from_hull is not None)
    )
    return [rule, _range([entry.steps for entry in entries], 2), _range([entry.flops / 1e6 for entry in entries], 2),
            _range(lost, 4), _range([entry.decodes for entry in entries], 1), last]  # fmt: skip


def _distance(entry: Entry) -> str:
    low, high = entry.from_hull_interval
    return f"{entry.from_hull:+.4f} [{low:+.4f}, {high:+.4f}]"


def _range(values: list[float], digits: int) -> str:
    """The mean, and where there are several, the least and the largest."""
    if not values:
        return ""
    mean = f"{np.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="NAME=RUN,RUN with NAME among chains, programs, text")
    parser.add_argument("--texts", nargs="+", default=["python-docs"], help="files, or python-docs")
    parser.add_argument("--work", type=Path, default=Path("results/leaderboard"), help="folder of the scores")
    parser.add_argument("--output", type=Path, required=True, help="a JSON file")
    options = parser.parse_args(arguments)
    runs = {}
    for given in options.runs:
        name, _, folders = given.partition("=")
        if name not in {game.name for game in GAMES} or not folders:
            raise ValueError(f"`runs` has {given!r}, but must be NAME=RUN with NAME among chains, programs, text.")
        runs[name] = [Path(folder) for folder in folders.split(",")]
    played = to_json(play_all(runs, options.texts, options.work))
    options.output.write_text(json.dumps(played, indent=1) + "\n")
    for name in runs:
        print(f"{name}\n\n{comparison_table(played, name).markdown()}\n")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
