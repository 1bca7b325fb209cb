"""A learned gate beside the rules: what it would save, for docs/exit_policies.md.

    python -m evaluation.study.gate chains=RUN,RUN,RUN programs=RUN text=CHECKPOINT --output docs/gate.json

The model is frozen. A linear probe reads a token's state and last update, both divided by the state's norm, and says
how likely it is that going on pays; below a threshold the token leaves. It is fitted in three ways:

- `later`: on the label "some later loop lowers this token's loss by more than 0.1 nats".
- `last step`: Ouro's second stage, on how much the last step has gained: sigmoid(50 (gain - 0.005)).
- `distribution`: to the expected loss over the depths at which the token may leave, with a penalty on the divergence of
  the *batch's average* distribution from the uniform one (a penalty for every token would drive all to one depth).

Each is played as a rule of the leaderboard: threshold and patience chosen on the tuning set, numbers of the test set,
at the same quality. What the probe is fitted to are other sequences still.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid
from tqdm.auto import tqdm

from recurrent_gpt2 import ExitPolicy, LoopView, RecurrentGPT2ForCausalLM, register_exit_policy
from training.data import Source
from training.tasks import TaskSource

from ..baselines import bootstrap_interval
from ..common import blocks_of, held_out_documents
from ..exit_search import NO_LABEL, Rule, Workload, run
from ..leaderboard import GAMES, SEED, Player
from ..report import Table

FITTED = {"chains": 256, "programs": 256, "text": 16}  # sequences that a probe is fitted to
GAIN = 0.1  # nats by which a later loop must lower the loss to be worth going on
PRIOR_WEIGHT = 0.05  # of the divergence of the average distribution over depths
PROBES: dict[str, torch.Tensor] = {}  # [2 x hidden + 1] by key: a policy holds its settings only


@dataclass(frozen=True)
class GateExit(ExitPolicy):
    """Leaves where a fitted probe does not think that going on pays."""

    threshold: float = 0.5
    key: str = ""

    def measure(self, view: LoopView) -> torch.Tensor:
        return torch.sigmoid(with_one(features(view.state, view.update)) @ PROBES[self.key])


def features(state: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """[..., hidden] twice -> [..., 2 x hidden], of the order of one."""
    scale = math.sqrt(state.shape[-1]) / state.norm(dim=-1, keepdim=True)
    return torch.cat([state * scale, update * scale], dim=-1)


def with_one(values: torch.Tensor) -> torch.Tensor:
    return torch.cat([values, torch.ones_like(values[..., :1])], dim=-1)


@torch.no_grad()
def collect(model: RecurrentGPT2ForCausalLM, workload: Workload, loops: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all tokens that have a label, features after steps 1 to `loops` - 1 [steps, tokens, 2 x hidden] and losses
    with 1 to `loops` fixed loops [loops, tokens], in nats."""
    seen, losses = [], []
    for batch in workload.batches():
        has_label = batch.labels != NO_LABEL
        output = model(batch.ids, num_loops=loops, output_loop_trajectory=True, use_cache=False, logits_to_keep=1)
        states = output.loop_trajectory[0][:, has_label]  # [loops + 1, tokens, hidden]
        seen.append(features(states[1:-1], states[1:-1] - states[:-2]))
        of_depths = []
        for count in range(1, loops + 1):
            logits = model(batch.ids, num_loops=count, use_cache=False).logits[has_label]
            of_depths.append(cross_entropy(logits.float(), batch.labels[has_label], reduction="none"))
        losses.append(torch.stack(of_depths))
    return torch.cat(seen, 1), torch.cat(losses, 1)


def later_gain(stay: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
    """`stay` [steps, tokens], as logits. The least loss of later steps is [steps, tokens] too."""
    best_later = losses.flip(0).cummin(0).values.flip(0)[1:]
    return binary_cross_entropy_with_logits(stay, (best_later < losses[:-1] - GAIN).float())


def last_gain(stay: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
    gain = (losses[:-2] - losses[1:-1]).clamp(min=0)  # of steps 2 on; before the first there is no loss
    return binary_cross_entropy_with_logits(stay[1:], torch.sigmoid(50 * (gain - 0.005)))


def over_depths(stay: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
    reached = torch.cat([torch.zeros_like(stay[:1]), logsigmoid(stay).cumsum(0)])  # [loops, tokens]
    leaves = torch.cat([logsigmoid(-stay), torch.zeros_like(stay[:1])])  # at the last step all do
    share = (reached + leaves).exp()
    average = share.mean(1).clamp(min=1e-9)
    divergence = (average * (average * len(average)).log()).sum()
    return (share * losses).sum(0).mean() + PRIOR_WEIGHT * divergence


OBJECTIVES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "later": later_gain,
    "last step": last_gain,
    "distribution": over_depths,
}


def fit(seen: torch.Tensor, losses: torch.Tensor, objective: Callable, iterations: int = 60) -> torch.Tensor:
    """The probe's weights and, last, its bias."""
    inputs, weights = with_one(seen), torch.zeros(seen.shape[-1] + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=iterations, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = objective(inputs @ weights, losses) + 1e-4 * weights.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return weights.detach()


def other_sequences(player: Player, count: int) -> Workload:
    """Sequences of the player's game that are neither in its tuning nor in its test set."""
    game = player.game
    if game.kept is not None:
        settings = next(s for s in player.model.config.tasks if s["task"] == game.name)
        return Workload.of_task(TaskSource.parse(settings).task, player.tokenizer, count, SEED + 1)
    texts = held_out_documents(Source(game.source), 0.01 if game.source == "python-docs" else None)
    blocks = blocks_of(texts, player.tokenizer, player.model.config.max_position_embeddings, 10**9)
    used = game.tuning + game.test
    order = np.random.default_rng(SEED).permutation(len(blocks))[used : used + count]  # as the player draws the others
    return Workload.of_text(blocks[order])


def candidates(key: str) -> dict[str, list[Rule]]:
    """Rules and gates, each with the patiences among which the tuning set chooses."""

    def patient(label: str, policy: dict[str, Any], patiences: tuple[int, ...]) -> list[Rule]:
        return [Rule(f"{label} x{p}", {**policy, "patience": p}) for p in patiences]

    found = {
        "step_norm/state": patient("step_norm/state", {"name": "step_norm", "normalize": "state"}, (1, 2, 3)),
        "acceleration/state": patient("acceleration/state", {"name": "acceleration", "normalize": "state"}, (2,)),
    }
    for name in OBJECTIVES:
        patiences = (1, 2, 3) if name == "later" else (1, 2)
        found[f"gate, {name}"] = patient(f"gate, {name}", {"name": GateExit.name, "key": f"{key}, {name}"}, patiences)
    return found


@dataclass
class Row:
    """A rule or gate on one model."""

    rule: str
    policy: dict[str, Any]
    steps: float
    flops: float  # per token, what the gate computes included
    lost: float  # accuracy or nats, below full depth
    more_steps: float  # than the best of the rules takes
    more_steps_interval: tuple[float, float]  # 95 %, over sequences


def study(name: str, checkpoint: Path, work: Path) -> dict[str, Any]:
    game = replace(next(game for game in GAMES if game.name == name), checkpoint=checkpoint.name)
    player = Player(game, work, checkpoint.parent)
    seen, losses = collect(player.model, other_sequences(player, FITTED[name]), game.loops)
    for objective, loss in OBJECTIVES.items():
        PROBES[f"{name}, {checkpoint.name}, {objective}"] = fit(seen, losses, loss)
    chosen: dict[str, tuple] = {}
    for rule, variants in tqdm(candidates(f"{name}, {checkpoint.name}").items(), desc=f"{name}, rules and gates"):
        settings = [setting for setting in map(player.choose, variants) if setting is not None]
        if settings:
            setting = min(settings, key=lambda s: player.tune(s)[1])
            _, steps = run(player.model, player.test, setting.num_loops, lambda rows, s=setting: s.exit_policy, rule)
            chosen[rule] = (setting, player.on_test[setting], steps.double().mean((1, 2)).numpy())
    rules = [rule for rule in chosen if not rule.startswith("gate")]
    best = min(rules, key=lambda rule: player.tune(chosen[rule][0])[1])
    rows = []
    for rule, (setting, score, steps) in chosen.items():
        more = steps - chosen[best][2]
        of_gate = 4 * player.model.config.hidden_size * float(steps.mean()) if rule.startswith("gate") else 0
        interval = bootstrap_interval(lambda places, more=more: more[places].mean(), len(more), rounds=400)
        lost = float(np.mean(score.losses) - np.mean(player.full.losses))
        rows.append(Row(rule, setting.exit_policy, float(steps.mean()), score.flops + of_gate, lost,
                        float(more.mean()), interval))  # fmt: skip
    return {"game": name, "run": checkpoint.name, "best_rule": best, "rows": [asdict(row) for row in rows]}


def gate_table(studies: list[dict[str, Any]]) -> Table:
    rows = []
    for found in studies:
        number = [s["run"] for s in studies if s["game"] == found["game"]].index(found["run"]) + 1
        for row in found["rows"]:
            low, high = row["more_steps_interval"]
            more = f"{row['more_steps']:+.2f} [{low:+.2f}, {high:+.2f}]"
            numbers = [f"{row['steps']:.2f}", f"{row['flops'] / 1e6:.2f}", f"{row['lost']:.4f}"]
            rows.append([f"{found['game']} {number}", row["rule"], str(row["policy"]["patience"]), *numbers,
                         "best rule" if row["rule"] == found["best_rule"] else more])  # fmt: skip
    header = ["model", "rule or gate", "patience", "mean steps", "MFLOP/token", "lost", "steps beyond the best rule"]
    return Table("", header, rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="NAME=RUN,RUN with NAME among chains, programs, text")
    parser.add_argument("--work", type=Path, default=Path("results/gate"), help="folder of the scores")
    parser.add_argument("--output", type=Path, required=True, help="a JSON file, in which other games' results stay")
    options = parser.parse_args(arguments)
    register_exit_policy("gate_of_the_study")(GateExit)
    studies = json.loads(options.output.read_text()) if options.output.exists() else []
    for given in options.runs:
        name, _, folders = given.partition("=")
        if name not in FITTED or not folders:
            raise ValueError(f"`runs` has {given!r}, but must be NAME=RUN with NAME among {', '.join(FITTED)}.")
        others = [found for found in studies if found["game"] != name]
        studies = others + [study(name, Path(folder), options.work) for folder in folders.split(",")]
    options.output.write_text(json.dumps(studies, indent=1) + "\n")
    print(gate_table(studies).markdown())


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
