"""Finding good exit settings on a workload: what is scored, what is tried, and at which thresholds.

A workload is sequences with a label at some positions: of text the next token, of a task its answer; the loss is in
nats, or 1 - accuracy. A setting is scored by its loss on every sequence and by its cost: FLOPs of the whole model per
token, with the passes through the head that the rule made, counted.

Thresholds come from what a rule measures on the workload itself, at full depth: for a wanted number of mean steps, the
quantile at which that many steps would be taken. So a rule that nobody has swept before, the user's own for instance,
gets a grid that takes it from never to at once.
"""

import hashlib
import importlib
import importlib.util
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from recurrent_gpt2 import ExitPolicy, RecurrentGPT2ForCausalLM, available_exit_policies, register_exit_policy
from recurrent_gpt2.exit_policies import LoopView, resolve_exit_policy
from training.estimate import forward_flops
from training.tasks import Task, ids_of_tokens

from .common import appended, read_lines
from .exit_tradeoff import Measured, Setting, counting

NO_LABEL = -100
TOKENS_OF_A_BATCH = 4096
# A rule's settings where it is asked for by name alone. Scale-free forms: thresholds are chosen, not taken from others.
# x2: others read a token through its last keys and values, which come from the state before its last step. So a token
# that leaves as soon as it is sure is never read with what it is sure of; with a patience of 2 it is.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "step_norm": {"step_norm/state": {"normalize": "state"}},
    "acceleration": {
        "acceleration/state": {"normalize": "state"},
        "acceleration/step": {"normalize": "step"},
    },
    "confidence": {
        "confidence/margin": {"by": "margin"},
        "confidence/margin x2": {"by": "margin", "patience": 2},
    },
    "entropy": {"entropy": {}, "entropy x2": {"patience": 2}, "entropy/change": {"change": True}},
    "all": {
        "all(confidence, step_norm)": {
            "of": [{"name": "confidence", "by": "margin"}, {"name": "step_norm", "normalize": "state"}]
        },
    },
    "fixed": {},  # no rule: its counts are searched anyway
}
PATIENCES = (12, 8, 6, 5, 4, 3, 2, 1)  # tried where there is no threshold to choose
LEVELS = 48  # thresholds of a rule; they are halved, so that many cost little


@dataclass
class Workload:
    """Sequences [n, length] and their labels, with `NO_LABEL` where there is none."""

    ids: torch.Tensor
    labels: torch.Tensor
    by_accuracy: bool = False  # then the loss is 1 - accuracy, else nats

    @classmethod
    def of_text(cls, blocks: torch.Tensor, by_accuracy: bool = False) -> "Workload":
        end = torch.full_like(blocks[:, :1], NO_LABEL)
        return cls(blocks, torch.cat([blocks[:, 1:], end], dim=1), by_accuracy)

    @classmethod
    def of_task(cls, task: Task, tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> "Workload":
        """Sequences as deep as those of training, judged by the share of right answers."""
        task = task.full()
        batch = task.sample(count, task.depth, np.random.default_rng([seed]))
        entries = ids_of_tokens(tokenizer, task)
        labels = np.where(batch.asked, entries[batch.answers.clip(0)], NO_LABEL)
        return cls(torch.from_numpy(entries[batch.ids]), torch.from_numpy(labels), by_accuracy=True)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: Any) -> "Workload":
        return Workload(self.ids[rows], self.labels[rows], self.by_accuracy)

    def batches(self) -> Iterator["Workload"]:
        size = max(TOKENS_OF_A_BATCH // self.ids.shape[1], 1)
        for first in range(0, len(self), size):
            yield self[first : first + size]

    def losses(self, logits: torch.Tensor) -> torch.Tensor:
        """The mean loss of each sequence, [n]."""
        has_label = self.labels != NO_LABEL
        if self.by_accuracy:
            each = (logits.argmax(-1) != self.labels).double()
        else:
            each = cross_entropy(logits.float().transpose(1, 2), self.labels, reduction="none", ignore_index=NO_LABEL)
        return (each.double() * has_label).sum(1) / has_label.sum(1)


@dataclass
class Score(Measured):
    """A setting on a workload."""

    setting: Setting
    losses: list[float]  # of every sequence
    steps: list[float]  # mean per group
    decodes: float  # passes through the head that the rule made, per token
    flops: float  # per token, those passes included
    code: str = ""  # of the rule, as a digest
    ms_per_token: dict[str, float] = field(default_factory=dict)


@torch.no_grad()
def run(
    model: RecurrentGPT2ForCausalLM, workload: Workload, num_loops: Any, policy_of: Callable[[slice], Any], rule: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """One adaptive pass over every sequence, which is what decoding token by token gives: losses [n] and steps [n,
    length, groups]. `policy_of` gives the exit policy of the rows of a batch."""
    losses, steps, first = [], [], 0
    for batch in workload.batches():
        policy = policy_of(slice(first, first + len(batch)))
        with _named_errors(rule):
            output = model(batch.ids, exit_policy=policy, num_loops=num_loops, use_cache=False)
        losses.append(batch.losses(output.logits))
        steps.append(output.loop_steps)
        first += len(batch)
    return torch.cat(losses), torch.cat(steps)


def score(model: RecurrentGPT2ForCausalLM, workload: Workload, setting: Setting) -> Score:
    config, decoded = model.config, [0]
    policies = resolve_exit_policy(setting.exit_policy, len(config.loop_groups))
    counted = [counting(policy, decoded) for policy in policies]
    losses, steps = run(model, workload, setting.num_loops, lambda rows: counted, setting.rule)
    mean_steps = steps.double().mean((0, 1)).tolist()
    decodes = decoded[0] / workload.ids.numel()
    flops = forward_flops(config, mean_steps, workload.ids.shape[1] // 2)
    flops += decodes * 2 * config.hidden_size * config.vocab_size
    return Score(setting, losses.tolist(), mean_steps, decodes, flops, code_of(setting))


def code_of(setting: Setting) -> str:
    """A digest of the files that a setting's policies are written in: what was scored with other code is stale."""
    policies = setting.exit_policy if isinstance(setting.exit_policy, list) else [setting.exit_policy]
    digest = hashlib.blake2b(digest_size=8)
    for policy in [ExitPolicy.from_dict(policy) for policy in policies if policy is not None]:
        for part in (policy, *getattr(policy, "of", ())):
            with suppress(OSError, TypeError):  # a class that was typed in has no file
                digest.update(Path(inspect.getfile(type(part))).read_bytes())
    return digest.hexdigest()


def _is_fresh(score: Score) -> bool:
    try:
        return score.code == code_of(score.setting)
    except ValueError:  # a rule that is not registered now
        return False


@contextmanager
def _named_errors(rule: str) -> Iterator[None]:
    """An error, as a user's policy may raise, becomes a sentence with the rule's name."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"the rule {rule} failed: {type(error).__name__}: {error}") from error


class Scores:
    """Scores of settings on a workload, each written to a file when it is there and never computed twice."""

    def __init__(self, model: RecurrentGPT2ForCausalLM, workload: Workload, file: Path, description: str):
        self.model, self.workload, self.file = model, workload, file
        written = (Score.from_dict(values) for values in read_lines(file))
        self.known = {score.setting: score for score in written if _is_fresh(score)}
        self.progress = tqdm(desc=description, unit=" settings", initial=len(self.known))

    def __getitem__(self, setting: Setting) -> Score:
        if setting not in self.known:
            self.progress.set_postfix_str(setting.rule)
            self.known[setting] = score(self.model, self.workload, setting)
            with appended(self.file) as lines:
                lines.write(self.known[setting].to_json() + "\n")
            self.progress.update()
        return self.known[setting]

    def close(self) -> None:
        self.progress.close()


@dataclass
class Rule:
    """A rule to try: what it is called in tables, and its settings but for the threshold."""

    label: str
    policy: dict[str, Any]


def find_rules(names: Sequence[str] = (), and_registered: bool = False) -> list[Rule]:
    """Rules by name, `module:Class`, `file.py` (all that it registers), `file.py:Class`, or JSON.

    A class that is not registered yet is, under its own name. `and_registered` puts all others before them.
    """
    rules: list[Rule] = []
    for name in [*(available_exit_policies() if and_registered else []), *names]:
        if name.lstrip().startswith("{"):
            rules.append(_rule_of_json(name))
            continue
        for found in _load_policies(name) if ":" in name or name.endswith(".py") else [name]:
            if found not in available_exit_policies():
                known = ", ".join(available_exit_policies())
                raise ValueError(f"the rule {found!r} is not registered. Known: {known}; or give module:Class.")
            variants = VARIANTS.get(found, {found: {}})
            rules += [Rule(label, {"name": found, **settings}) for label, settings in variants.items()]
    return list({rule.label: rule for rule in rules}.values())


def _rule_of_json(text: str) -> Rule:
    try:
        policy = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the rule {text!r} is not JSON: {error}.") from None
    ExitPolicy.from_dict(policy)  # fails where it is none
    return Rule(text, policy)


def _load_policies(place: str) -> list[str]:
    """Names under which the policies of a file or module are registered, the file being run for it."""
    module, _, class_name = place.partition(":")
    before = set(available_exit_policies())
    try:
        loaded = _run_file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
    except Exception as error:
        raise ValueError(f"the policy file {module} can't be loaded: {type(error).__name__}: {error}") from error
    if not class_name:
        classes = [
            value for value in vars(loaded).values() if _is_policy(value) and value.__module__ == loaded.__name__
        ]
        names = [cls.name for cls in classes if cls.name in available_exit_policies()]
        names += sorted(set(available_exit_policies()) - before - set(names))
        if not names:
            raise ValueError(f"the policy file {module} registers no exit policy: use @register_exit_policy.")
        return names
    cls = getattr(loaded, class_name, None)
    if not _is_policy(cls):
        raise ValueError(f"{module} has no exit policy {class_name}: it must be a subclass of ExitPolicy.")
    if "name" not in vars(cls):
        register_exit_policy(class_name)(cls)
    return [cls.name]


def _run_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def _is_policy(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, ExitPolicy)


@dataclass
class Ladder:
    """Levels of a rule (or of fixed depth), from the dearest to the cheapest, for every group: `rungs[level][group]`.

    A rung is a policy, or for fixed depth a number of loops.
    """

    label: str
    cap: tuple[int, ...]
    rungs: list[list[Any]]

    def setting(self, levels: Sequence[int]) -> Setting:
        chosen = [self.rungs[level][group] for group, level in enumerate(levels)]
        if isinstance(chosen[0], int):
            return Setting(self.label, None, tuple(chosen))
        same = all(policy == chosen[0] for policy in chosen)
        return Setting(self.label, json.dumps(chosen[0] if same else chosen, sort_keys=True), self.cap)

    @property
    def stride(self) -> int:
        """Levels that make a difference worth trying."""
        return max(len(self.rungs) // 16, 1)

    def uniform(self) -> list[Setting]:
        return [self.setting([level] * len(self.cap)) for level in range(len(self.rungs))]


def fixed_ladder(cap: tuple[int, ...]) -> Ladder:
    """Every number of loops up to 8, then fewer of them."""
    counts = sorted({*range(1, 9), 10, 12, 16, 24, 32, 48, 64, *cap}, reverse=True)
    counts = [count for count in counts if count <= max(cap)]
    return Ladder("fixed", cap, [[min(count, most) for most in cap] for count in counts])


def rule_ladders(
    model: RecurrentGPT2ForCausalLM, workload: Workload, rule: Rule, cap: tuple[int, ...], *beside: Workload
) -> list[Ladder]:
    """Levels of a rule: with one threshold for all groups, and with one for each at the same mean steps."""
    conditions = rule.policy.get("of") or [rule.policy]
    few = [next(kind.batches()) for kind in (workload, *beside)]
    measured = [measures(model, few, condition, cap, rule.label) for condition in conditions]
    if any(groups is None for groups in measured):  # it has no threshold to choose
        return [Ladder(rule.label, cap, [[_complete(rule.policy)] * len(cap)])]
    if len(conditions) == 1 and all(set(np.unique(group)) <= {0.0, 1.0, np.inf} for group in measured[0]):
        patient = [_complete({**rule.policy, "patience": p}) for p in PATIENCES if p < max(cap)]
        return [Ladder(rule.label, cap, [[policy] * len(cap) for policy in patient])]
    needed = [[first_below(c, group) for group in groups] for c, groups in zip(conditions, measured, strict=True)]
    shared, own = [], []
    for share in np.geomspace(1, 1.02 / max(cap), LEVELS):  # from never to at once
        shared.append([_with_thresholds(rule.policy, [_threshold(groups, share) for groups in needed])] * len(cap))
        own.append([
            _with_thresholds(rule.policy, [_threshold([groups[group]], share) for groups in needed])
            for group in range(len(cap))
        ])  # fmt: skip
    ladders = [Ladder(rule.label, cap, _distinct(shared))]
    return ladders if len(cap) == 1 else [*ladders, Ladder(rule.label, cap, _distinct(own))]


@torch.no_grad()
def measures(
    model: RecurrentGPT2ForCausalLM, batches: Iterable[Workload], policy: Any, cap: tuple[int, ...], label: str
) -> list[np.ndarray] | None:
    """What a rule measures at full depth, [tokens, steps - 1] for each group; infinity where there is nothing yet.

    (At the last step nothing is decided.) None for a policy that has no `measure`.
    """
    policy = ExitPolicy.from_dict({"name": policy} if isinstance(policy, str) else policy)
    if type(policy).measure is ExitPolicy.measure:
        return None
    policy = replace(policy, min_loops=1)
    seen: list[list[list[torch.Tensor]]] = [[[] for _ in range(most - 1)] for most in cap]

    def record(view: LoopView) -> torch.Tensor:
        measure = policy.measure(view)
        n, device = view.state.shape[0], view.state.device
        measure = torch.full((n,), math.inf, device=device) if measure is None else measure.float()
        seen[view.group][view.step].append(measure.nan_to_num(math.inf, math.inf, math.inf))
        return torch.zeros(n, dtype=torch.bool, device=device)

    for batch in batches:
        with _named_errors(label):
            model(batch.ids, exit_policy=record, num_loops=list(cap), use_cache=False, logits_to_keep=1)
    return [
        torch.stack([torch.cat(step) for step in group], 1).cpu().numpy() if group else np.zeros((0, 0))
        for group in seen
    ]


def first_below(policy: Any, measured: np.ndarray) -> np.ndarray:
    """The least threshold at which each token would have left by each step: with patience, the largest of as many
    measures in a row, and of those the least so far."""
    policy = ExitPolicy.from_dict({"name": policy} if isinstance(policy, str) else policy)
    waited = np.full_like(measured, np.inf)
    for step in range(max(policy.patience, policy.min_loops) - 1, measured.shape[1]):
        waited[:, step] = measured[:, step - policy.patience + 1 : step + 1].max(1)
    return np.minimum.accumulate(waited, axis=1)


def _threshold(needed: list[np.ndarray], share: float) -> float:
    """The threshold at which a share of all steps is taken: mean steps = 1 + sum over steps of P(still in the loop)."""
    values = np.concatenate([group.ravel() for group in needed])
    if not len(values) or share == 1:
        return 0.0  # at which no rule fires
    steps = needed[0].shape[1] + 1
    stay = np.clip((share * steps - 1) / max(steps - 1, 1), 0, 1)
    value = float(np.quantile(values, 1 - stay, method="lower"))
    finite = values[np.isfinite(values)]
    return value if np.isfinite(value) else float(finite.max(initial=0.0)) * 2


def _with_thresholds(policy: dict[str, Any], thresholds: Sequence[float]) -> dict[str, Any]:
    rounded = [float(f"{threshold:.4g}") for threshold in thresholds]
    if "of" not in policy:
        return _complete({**policy, "threshold": rounded[0]})
    of = [{"name": c} if isinstance(c, str) else c for c in policy["of"]]
    return _complete({**policy, "of": [{**c, "threshold": t} for c, t in zip(of, rounded, strict=True)]})


def _complete(policy: dict[str, Any]) -> dict[str, Any]:
    return ExitPolicy.from_dict(policy).to_dict()


def _distinct(rungs: list[list[Any]]) -> list[list[Any]]:
    return [rung for place, rung in enumerate(rungs) if rung not in rungs[:place]]


Evaluate = Callable[[Setting], tuple[float, float]]  # a setting's risk and cost


def cheapest_safe_level(ladder: Ladder, evaluate: Evaluate, target: float) -> int | None:
    """The cheapest level, the same for all groups, whose risk is at most `target`; None where no level's is.

    Found by halving, since risk grows as levels get cheaper.
    """
    settings = ladder.uniform()
    safe, unsafe = -1, len(settings)
    while unsafe - safe > 1:
        middle = (safe + unsafe) // 2
        if evaluate(settings[middle])[0] <= target:
            safe = middle
        else:
            unsafe = middle
    return safe if safe >= 0 else None


def descend(ladder: Ladder, level: int, evaluate: Evaluate, target: float) -> None:
    """From one safe level for all groups, one group after the other goes down a stride, as long as that is safe."""
    groups, levels = range(len(ladder.cap)), [level] * len(ladder.cap)
    while True:
        lower = [[at + ladder.stride * (group == g) for g, at in enumerate(levels)] for group in groups]
        lower = [tried for tried in lower if max(tried) < len(ladder.rungs)]
        tried = [(*evaluate(ladder.setting(down)), down) for down in lower]
        safe = [(cost, down) for risk, cost, down in tried if risk <= target]
        if not safe:
            return
        levels = min(safe)[1]


def climb(ladder: Ladder, evaluate: Evaluate, target: float) -> None:
    """From the cheapest level of every group upwards, each time the group that lowers the risk most for its cost."""
    levels = [len(ladder.rungs) - 1] * len(ladder.cap)
    risk, cost = evaluate(ladder.setting(levels))
    while risk > target and max(levels) > 0:
        groups = [group for group, level in enumerate(levels) if level > 0]
        higher = [[level - (group == g) for g, level in enumerate(levels)] for group in groups]
        tried = [(*evaluate(ladder.setting(up)), up) for up in higher]
        risk, cost, levels = max(tried, key=lambda t: (risk - t[0]) / max(t[1] - cost, 1e-9))


def search(ladders: list[Ladder], evaluate: Evaluate, target: float, within: float) -> None:
    """Tries the settings of a rule, so that those cheap at a risk of at most `target` are among them.

    A rule that costs more than `within` where it fires at once, for what it decodes, is tried no further. The first
    ladder has the same threshold for all groups. The others, and groups at levels of their own, are tried only where
    that costs at most `within`: a rule that is far behind will not win by them.
    """
    if evaluate(ladders[0].uniform()[-1])[1] > within:
        return
    for ladder in ladders:
        level = cheapest_safe_level(ladder, evaluate, target)
        if level is None or evaluate(ladder.uniform()[level])[1] > within:
            return
        for safer in (1, 2, 4):  # to fall back on, where the tuning part was too kind
            evaluate(ladder.uniform()[max(level - safer * ladder.stride, 0)])
        if len(ladder.cap) > 1 and ladder is ladders[-1]:
            descend(ladder, level, evaluate, target)
