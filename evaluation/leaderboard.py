"""A leaderboard for exit rules: `python -m evaluation.leaderboard [MY_POLICY.py ...]`.

Every registered rule, and those of your own files, on fixed checkpoints and fixed sequences: two tasks whose tokens
need a known number of loops, and text. For each rule the cheapest threshold that keeps the quality is chosen on a
tuning set, and all numbers are of a test set. Beside the rules stand the ideal (as many steps as a token needs), fixed
depth, and for every rule its own steps shuffled over tokens. docs/leaderboard.md has the rules of the game.

Writes `leaderboard.json` and `leaderboard.md` to `--output`, and keeps scores there: an interrupted run goes on.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from training.data import Source
from training.estimate import forward_flops
from training.tasks import TaskSource

from .baselines import bootstrap_interval, hull_loss, shuffled, take_steps
from .common import appended, blocks_of, held_out_documents, load_checkpoint, mean_depth, read_lines
from .exit_search import (
    Ladder,
    Rule,
    Score,
    Scores,
    Workload,
    cheapest_safe_level,
    climb,
    code_of,
    find_rules,
    fixed_ladder,
    rule_ladders,
    run,
)
from .exit_tradeoff import Setting, fingerprint
from .report import Table

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
SEED = 75  # of new sequences, and of what is shuffled


@dataclass(frozen=True)
class Game:
    """A checkpoint, what it is scored on, and the quality to be kept. None of this is for a player to choose."""

    name: str
    checkpoint: str
    loops: int  # full depth, and the cap of every rule
    tuning: int  # sequences
    test: int
    kept: float | None = None  # of a task: the share of full depth's accuracy
    lost: float | None = None  # of text: nats above full depth
    source: str = "python-docs"  # of text


GAMES = (
    Game("chains", "recurrent-gpt2-chains", loops=16, tuning=256, test=256, kept=0.999),
    Game("programs", "recurrent-gpt2-programs", loops=16, tuning=256, test=256, kept=0.999),
    Game("text", "recurrent-gpt2-mini", loops=12, tuning=12, test=24, lost=0.01),
)


@dataclass
class Entry:
    """A rule in a game."""

    rule: str
    setting: Any  # the policy, or the counts of fixed depth
    steps: float  # of a looped layer, in the mean
    loss: float  # nats, or 1 - accuracy
    full_loss: float
    flops: float  # per token
    decodes: float  # passes through the head, per token
    shuffled_loss: float | None = None  # with the rule's own steps, dealt out at random
    from_hull: float | None = None  # loss minus that of fixed depths at the same FLOPs
    from_hull_interval: tuple[float, float] | None = None


@dataclass
class Results:
    game: Game
    entries: list[Entry] = field(default_factory=list)
    fixed: Entry | None = None  # the cheapest that keeps the quality
    ideal: Entry | None = None  # of a task: as many steps as a token needs, and the least number more that it takes
    margin: int | None = None
    required: float | None = None  # loops that a token needs, in the mean


class Player:
    """Scores rules in a game."""

    def __init__(self, game: Game, output: Path, checkpoints: Path):
        self.game = game
        self.model, self.tokenizer = load_checkpoint(checkpoints / game.checkpoint)
        self.cap = tuple(self.model.config.loops_per_group(game.loops))
        self.required: np.ndarray | None = None
        everything = self._sequences(game.tuning + game.test)
        self.tuning, self.test = everything[: game.tuning], everything[game.tuning :]
        folder = output / f"{game.name}-{fingerprint(self.model, everything.ids)[:12]}"  # of this model and no other
        folder.mkdir(parents=True, exist_ok=True)
        self.on_tuning = Scores(self.model, self.tuning, folder / "tuning.jsonl", f"{game.name}, tuning")
        self.on_test = Scores(self.model, self.test, folder / "test.jsonl", f"{game.name}, test")
        self.nulls = folder / "shuffled.jsonl"
        full = Setting("fixed", None, self.cap)
        self.full_on_tuning, self.full = self.on_tuning[full], self.on_test[full]

    def _sequences(self, count: int) -> Workload:
        if self.game.kept is None:
            texts = held_out_documents(Source(self.game.source), 0.01 if self.game.source == "python-docs" else None)
            length = self.model.config.max_position_embeddings
            blocks = blocks_of(texts, self.tokenizer, length, 10**9)
            order = np.random.default_rng(SEED).permutation(len(blocks))[:count]
            return Workload.of_text(blocks[order])
        settings = next(s for s in self.model.config.tasks if s["task"] == self.game.name)
        task = TaskSource.parse(settings).task.full()
        batch = task.sample(count, task.depth, np.random.default_rng([SEED]))  # as `of_task` draws them
        self.required = batch.depths[self.game.tuning :]
        return Workload.of_task(task, self.tokenizer, count, SEED)

    @property
    def target(self) -> float:
        """The largest loss that is good enough on the tuning set."""
        full = float(np.mean(self.full_on_tuning.losses))
        return full + self.game.lost if self.game.kept is None else 1 - self.game.kept * (1 - full)

    def tune(self, setting: Setting) -> tuple[float, float]:
        score = self.on_tuning[setting]
        return float(np.mean(score.losses)), score.flops

    def choose(self, rule: Rule) -> Setting | None:
        """The cheapest setting of a rule that is good enough on the tuning set; one threshold for all groups."""
        return self.choose_from(self.ladder(rule))

    def ladder(self, rule: Rule) -> Ladder:
        return rule_ladders(self.model, self.tuning, rule, self.cap)[0]

    def choose_from(self, ladder: Ladder) -> Setting | None:
        level = cheapest_safe_level(ladder, self.tune, self.target)
        return None if level is None else ladder.setting([level] * len(self.cap))

    def fixed_settings(self) -> list[Setting]:
        """Fixed depths that were tried on the tuning set, to make a hull of."""
        ladder = fixed_ladder(self.cap)
        climb(ladder, self.tune, self.target)
        if len(self.cap) == 1:
            return ladder.uniform()
        return [setting for setting in self.on_tuning.known if setting.rule == "fixed"]

    def entry(self, score: Score, setting: Any) -> Entry:
        steps = mean_depth(torch.tensor(score.steps), self.model.config).item()
        loss, full = float(np.mean(score.losses)), float(np.mean(self.full.losses))
        return Entry(score.setting.rule, setting, steps, loss, full, score.flops, score.decodes)

    def play(self, rules: list[Rule]) -> Results:
        results = Results(self.game)
        ladders = [self.ladder(rule) for rule in rules]  # a rule that fails does so before anything is scored
        fixed = [self.on_test[setting] for setting in self.fixed_settings()]
        good = [s for s in fixed if self.tune(s.setting)[0] <= self.target]
        cheapest = min(good, key=lambda score: score.flops)
        results.fixed = self.entry(cheapest, list(cheapest.setting.num_loops))
        for ladder in ladders:
            setting = self.choose_from(ladder)
            if setting is None:
                continue
            score = self.on_test[setting]
            entry = self.entry(score, setting.exit_policy)
            entry.from_hull, entry.from_hull_interval = from_hull(score, fixed)
            entry.shuffled_loss = self.shuffled_loss(setting)
            results.entries.append(entry)
        results.entries.sort(key=lambda entry: (entry.flops, entry.rule))
        if self.required is not None:
            results.required = float(self.required[self.test.labels.numpy() >= 0].mean())
            self.add_ideal(results)
        self.on_tuning.close()
        self.on_test.close()
        return results

    def shuffled_loss(self, setting: Setting) -> float:
        """Of the test set, with the steps of the setting dealt out anew; kept in a file, as scores are."""
        known = {(Setting(**line["setting"]), line["code"]): line["loss"] for line in read_lines(self.nulls)}
        code = code_of(setting)
        if (setting, code) in known:
            return known[setting, code]
        _, steps = run(self.model, self.test, setting.num_loops, lambda rows: setting.exit_policy, setting.rule)
        dealt = shuffled(steps.numpy(), np.random.default_rng(SEED))
        losses, _ = run(self.model, self.test, setting.num_loops, lambda rows: take_steps(dealt[rows]), setting.rule)
        with appended(self.nulls) as lines:
            lines.write(json.dumps({"setting": vars(setting), "code": code, "loss": losses.mean().item()}) + "\n")
        return losses.mean().item()

    def add_ideal(self, results: Results) -> None:
        """The least number of steps more than a token needs at which the quality is kept."""
        good = 1 - self.game.kept * (1 - float(np.mean(self.full.losses)))
        for margin in range(self.game.loops):
            steps = np.clip(self.required + margin, 1, self.game.loops)[..., None].repeat(len(self.cap), -1)
            losses, taken = run(self.model, self.test, self.cap, lambda rows, s=steps: take_steps(s[rows]), "ideal")
            if losses.mean() <= good:
                means = taken.double().mean((0, 1)).tolist()
                flops = forward_flops(self.model.config, means, self.test.ids.shape[1] // 2)
                score = Score(Setting("ideal", None, self.cap), losses.tolist(), means, 0, flops)
                results.ideal, results.margin = self.entry(score, None), margin
                return


def from_hull(score: Score, fixed: list[Score]) -> tuple[float, tuple[float, float]]:
    """Loss minus that of the hull of fixed depths at the same FLOPs, with its 95 % interval over sequences."""
    costs = np.array([s.flops for s in fixed])
    losses, of_fixed = np.array(score.losses), np.array([s.losses for s in fixed])

    def difference(places: Any) -> float:
        cost = max(score.flops, costs.min())
        return float(losses[places].mean() - hull_loss(costs, of_fixed[:, places].mean(1), cost))

    return difference(slice(None)), bootstrap_interval(difference, len(losses), rounds=400)


def board(all_results: list[Results]) -> Table:
    """One row a rule, best first: by its mean steps over the tasks, then by its distance from the hull on text."""
    names = dict.fromkeys(entry.rule for results in all_results for entry in results.entries)
    found = {(r.game.name, entry.rule): entry for r in all_results for entry in r.entries}

    def rank(rule: str) -> tuple[float, float]:
        task_steps = [found[r.game.name, rule].steps if (r.game.name, rule) in found else r.game.loops
                      for r in all_results if r.game.kept is not None]  # fmt: skip
        text = [found[r.game.name, rule].from_hull for r in all_results
                if r.game.kept is None and (r.game.name, rule) in found]  # fmt: skip
        return float(np.mean(task_steps or [0])), text[0] if text else np.inf

    def cells(results: Results, entry: Entry | None) -> list[str]:
        if entry is None:
            return ["never", "", ""]
        if results.game.kept is not None:
            null = "" if entry.shuffled_loss is None else f"{1 - entry.shuffled_loss:.3f}"
            return [f"{entry.steps:.2f}", f"{1 - entry.loss:.4f}", null]
        low, high = entry.from_hull_interval or (0.0, 0.0)
        distance = "" if entry.from_hull is None else f"{entry.from_hull:+.4f} [{low:+.4f}, {high:+.4f}]"
        hull = None if entry.from_hull is None else entry.loss - entry.from_hull
        null = "" if entry.shuffled_loss is None or hull is None else f"{entry.shuffled_loss - hull:+.4f}"
        return [f"{entry.steps:.2f}", distance, null]

    header = ["rule"]
    for r in all_results:
        header += [f"{r.game.name}: steps", "accuracy" if r.game.kept else "from hull", "shuffled"]
    header.append("head passes a token")
    rows = []
    for rule in sorted(names, key=rank):
        entries = [found.get((r.game.name, rule)) for r in all_results]
        passes = max((entry.decodes for entry in entries if entry is not None), default=0)
        row = [rule, *(cell for r, entry in zip(all_results, entries, strict=True) for cell in cells(r, entry))]
        rows.append([*row, f"{passes:.1f}"])
    for kind in ("ideal", "fixed"):
        row = [f"*{kind}*"]
        for r in all_results:
            shown = getattr(r, kind)
            row += cells(r, shown) if shown is not None else ["", "", ""]
        rows.append([*row, "0.0"])
    return Table("Leaderboard", header, rows)


def to_json(all_results: list[Results]) -> list[dict[str, Any]]:
    return [asdict(results) for results in all_results]


def from_json(values: list[dict[str, Any]]) -> list[Results]:
    def entry(value: dict[str, Any] | None) -> Entry | None:
        return None if value is None else Entry(**value)

    return [
        Results(Game(**v["game"]), [Entry(**e) for e in v["entries"]], entry(v["fixed"]), entry(v["ideal"]),
                v["margin"], v["required"])
        for v in values
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policies", nargs="*", help="your own rules: my_policy.py or module:Class")
    parser.add_argument("--only", action="store_true", help="score your own alone, not the registered ones beside them")
    parser.add_argument("--games", nargs="+", default=[game.name for game in GAMES], help="among these")
    parser.add_argument("--output", type=Path, default=Path("results/leaderboard"))
    options = parser.parse_args(arguments)
    games = [game for game in GAMES if game.name in options.games]
    if unknown := set(options.games) - {game.name for game in games}:
        raise ValueError(f"`--games` has {sorted(unknown)[0]!r}, but must be among {', '.join(g.name for g in GAMES)}.")
    if options.only and not options.policies:
        raise ValueError("`--only` leaves nothing to score: give a policy file.")
    rules = find_rules(options.policies, and_registered=not options.only)
    all_results = [Player(game, options.output, CHECKPOINTS).play(rules) for game in games]
    table = board(all_results).markdown()
    (options.output / "leaderboard.json").write_text(json.dumps(to_json(all_results), indent=1) + "\n")
    (options.output / "leaderboard.md").write_text(table + "\n")
    print(table)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
