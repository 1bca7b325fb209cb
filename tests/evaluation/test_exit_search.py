import json

import numpy as np
import pytest
import torch

from evaluation import exit_search
from evaluation.exit_search import (
    Rule,
    Scores,
    Workload,
    cheapest_safe_level,
    climb,
    descend,
    find_rules,
    first_below,
    fixed_ladder,
    measures,
    rule_ladders,
    score,
)
from evaluation.exit_tradeoff import Setting
from recurrent_gpt2 import ExitPolicy, available_exit_policies
from tests.helpers import random_ids, tiny_model
from training.estimate import forward_flops

OWN_POLICY = """
from dataclasses import dataclass
from recurrent_gpt2 import ExitPolicy, register_exit_policy

{decorator}
@dataclass(frozen=True)
class {name}(ExitPolicy):
    def measure(self, view):
        {measure}
"""


def write_policy(path, name="Shortest", decorator="", measure="return view.update.norm(dim=-1)"):
    path.write_text(OWN_POLICY.format(name=name, decorator=decorator, measure=measure))
    return path


@pytest.fixture(scope="module")
def model():
    return tiny_model(0.3, num_loops=8)


@pytest.fixture(scope="module")
def workload():
    return Workload.of_text(random_ids(6, 20))


def setting_of(policy, cap=(8, 8, 8)):
    return Setting("a rule", json.dumps(policy), cap)


def test_losses_are_of_labels_alone_in_nats_or_as_errors(model):
    ids = random_ids(3, 9)
    labels = torch.full_like(ids, exit_search.NO_LABEL)
    labels[:, 4:7] = random_ids(3, 3, seed=1)
    logits = model(ids).logits
    labels[0, 4] = logits[0, 4].argmax()
    nats, errors = Workload(ids, labels).losses(logits), Workload(ids, labels, by_accuracy=True).losses(logits)
    expected = [-logits[row].log_softmax(-1)[[4, 5, 6], labels[row, 4:7]].mean().item() for row in range(3)]
    assert nats.tolist() == pytest.approx(expected, abs=1e-5)
    right = logits[:, 4:7].argmax(-1) == labels[:, 4:7]
    assert errors.tolist() == pytest.approx((1 - right.double().mean(1)).tolist())
    assert errors[0] < 1


def test_the_cost_has_the_passes_through_the_head_that_were_made(model, workload):
    config, head = model.config, 2 * 32 * 61
    fixed = score(model, workload, Setting("fixed", None, (3, 1, 2)))
    assert (fixed.steps, fixed.decodes) == ([3, 1, 2], 0)
    assert fixed.flops == forward_flops(config, [3, 1, 2], 10)
    never = score(model, workload, setting_of({"name": "entropy", "threshold": 0.0}))
    assert never.decodes == 3 * 7  # at the last step nothing is decided
    both = {"name": "all", "of": [{"name": "kl", "threshold": 0.0}, "entropy"]}
    assert score(model, workload, setting_of(both)).decodes == 3 * 7
    at_once = score(model, workload, setting_of({"name": "entropy", "threshold": 100.0}))
    assert (at_once.steps, at_once.decodes) == ([1, 1, 1], 3)
    assert at_once.flops == forward_flops(config, [1, 1, 1], 10) + 3 * head


@pytest.mark.parametrize("patience", [1, 2])
@pytest.mark.parametrize("min_loops", [1, 4])
def test_what_was_measured_says_when_tokens_would_leave(model, workload, patience, min_loops):
    """In the first group, whose inputs do not depend on exits, up to the tokens that others leave behind."""
    policy = {"name": "step_norm", "threshold": 3.0, "patience": patience, "min_loops": min_loops}
    one_token = Workload.of_text(workload.ids[:, :1])  # nobody to read
    measured = measures(model, [one_token], policy, (8, 8, 8), "step_norm")[0]
    left_by = first_below(policy, measured) < 3.0
    simulated = np.where(left_by.any(1), left_by.argmax(1) + 1, 8)
    taken = model(one_token.ids, exit_policy=[policy, None, None]).loop_steps[:, 0, 0]
    assert simulated.tolist() == taken.tolist()


@pytest.mark.parametrize("rule", find_rules(and_registered=True), ids=lambda rule: rule.label)
def test_every_rule_has_levels_from_many_steps_to_few(model, workload, rule):
    ladders = rule_ladders(model, workload, rule, (8, 8, 8))
    for ladder in ladders:
        some = ladder.uniform()[:: -max(len(ladder.rungs) // 6, 1)][::-1]
        steps = [np.mean(score(model, workload, setting).steps) for setting in some]
        assert steps[-1] < 3.5
        assert steps[0] > 5
        assert max(np.diff(steps)) < 0.5  # they fall, but for what exits do to the tokens that are left
    if rule.label != "argmax":
        assert isinstance(ladders[1].setting([3, 3, 3]).exit_policy, list)  # one threshold per group


def test_levels_of_fixed_depth_are_counts_per_group():
    ladder = fixed_ladder((4, 2))
    assert ladder.rungs == [[4, 2], [3, 2], [2, 2], [1, 1]]
    assert ladder.setting([1, 3]) == Setting("fixed", None, (3, 1))


def test_the_search_finds_what_is_cheapest_on_a_problem_that_is_known():
    """Risk is a sum over groups; the second group needs much, the first nothing."""
    ladder = fixed_ladder((8, 8, 8))
    tried = {}

    def evaluate(setting):
        a, b, c = setting.num_loops
        tried[setting.num_loops] = (8 - b) / 8 + (8 - c) / 80, a + 2 * b + c
        return tried[setting.num_loops]

    level = cheapest_safe_level(ladder, evaluate, 0.3)
    assert ladder.rungs[level] == [6, 6, 6]
    descend(ladder, level, evaluate, 0.3)
    assert len(tried) < 30
    assert min((cost, counts) for counts, (risk, cost) in tried.items() if risk <= 0.3)[1][0] == 1
    climb(ladder, evaluate, 0.3)
    assert min((cost, counts) for counts, (risk, cost) in tried.items() if risk <= 0.3) == (16, (1, 7, 1))
    assert cheapest_safe_level(ladder, lambda setting: (1.0, 1.0), 0.3) is None


def test_scores_are_computed_once_and_not_taken_from_other_code(model, workload, tmp_path, monkeypatch):
    path = write_policy(tmp_path / "once_policy.py", "Once")
    (rule,) = find_rules([f"{path}:Once"])
    settings = [Setting("fixed", None, (1, 1, 1)), setting_of({**rule.policy, "threshold": 2.0})]
    scored = []

    def counted(model, workload, setting):
        scored.append(setting)
        return score(model, workload, setting)

    monkeypatch.setattr(exit_search, "score", counted)
    for _ in range(2):
        scores = Scores(model, workload, tmp_path / "scores.jsonl", "test")
        assert [scores[setting].setting for setting in settings] == settings
    assert scored == settings
    path.write_text(path.read_text() + "\n# changed\n")
    scores = Scores(model, workload, tmp_path / "scores.jsonl", "test")
    assert [scores[setting].setting for setting in settings] == settings
    assert scored == [*settings, settings[1]]


def test_rules_of_ones_own_by_file_by_class_and_by_module(tmp_path, monkeypatch):
    registered = write_policy(tmp_path / "mine.py", "Mine", '@register_exit_policy("mine")')
    assert find_rules([str(registered)]) == [Rule("mine", {"name": "mine"})]
    assert find_rules([str(registered)]) == [Rule("mine", {"name": "mine"})]  # once more
    assert find_rules([f"{registered}:Mine"]) == [Rule("mine", {"name": "mine"})]
    write_policy(tmp_path / "my_module.py", "Unregistered")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_rules(["my_module:Unregistered"]) == [Rule("Unregistered", {"name": "Unregistered"})]
    assert {"mine", "Unregistered"} <= set(available_exit_policies())
    assert ExitPolicy.from_dict({"name": "mine", "threshold": 0.5}).threshold == 0.5
    given = '{"name": "acceleration", "normalize": "none"}'
    assert find_rules([given, "kl"]) == [Rule(given, json.loads(given)), Rule("kl", {"name": "kl"})]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_rule", "'no_such_rule' is not registered. Known: .*acceleration, all"),
        ("no_such_module:Class", "no_such_module can't be loaded: ModuleNotFoundError"),
        ("missing.py", "missing.py can't be loaded: FileNotFoundError"),
        ("{raises}", "can't be loaded: ZeroDivisionError"),
        ("{empty}", "registers no exit policy"),
        ("{empty}:Nobody", "has no exit policy Nobody"),
        ("json:loads", "has no exit policy loads"),
        ('{"name": "kl"', "is not JSON"),
        ('{"name": "kl", "threshold": -1}', "threshold"),
    ],
)
def test_what_is_no_rule_is_a_sentence(name, message, tmp_path):
    (tmp_path / "raises.py").write_text("1 / 0")
    (tmp_path / "empty.py").write_text("")
    for place in ("raises", "empty"):
        name = name.replace(f"{{{place}}}", str(tmp_path / f"{place}.py"))
    with pytest.raises(ValueError, match=message):
        find_rules([name])


def test_a_rule_that_raises_while_it_runs_is_a_sentence_with_its_name(model, workload, tmp_path):
    path = write_policy(tmp_path / "breaks.py", "Breaks", measure="raise KeyError('nothing here')")
    rules = find_rules([f"{path}:Breaks"])
    with pytest.raises(ValueError, match="the rule Breaks failed: KeyError: 'nothing here'"):
        rule_ladders(model, workload, rules[0], (8, 8, 8))
    with pytest.raises(ValueError, match="the rule a rule failed: KeyError"):
        score(model, workload, setting_of({"name": "Breaks", "threshold": 0.1}))


def test_a_rule_without_a_measure_is_tried_as_it_is(model, workload, tmp_path):
    path = tmp_path / "callable.py"
    path.write_text(
        OWN_POLICY.format(name="Third", decorator="", measure="").replace(
            "def measure(self, view):\n        ",
            "def __call__(self, view):\n        return view.state[:, 0] < view.step - 2",
        )
    )
    (ladder,) = rule_ladders(model, workload, find_rules([f"{path}:Third"])[0], (8, 8, 8))
    assert len(ladder.rungs) == 1
    assert 1 < np.mean(score(model, workload, ladder.setting([0, 0, 0])).steps) < 8
