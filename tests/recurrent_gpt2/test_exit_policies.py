import json
import math
import pickle
from dataclasses import dataclass

import pytest
import torch

from recurrent_gpt2 import (
    AccelerationExit,
    AllExit,
    ArgmaxExit,
    ConfidenceExit,
    CosineExit,
    EntropyExit,
    ExitPolicy,
    FixedLoops,
    KLExit,
    LoopView,
    StepNormExit,
    available_exit_policies,
    register_exit_policy,
)
from recurrent_gpt2.exit_policies import resolve_exit_policy
from tests.helpers import random_ids, tiny_model

POLICIES = [
    FixedLoops(),
    StepNormExit(0.5, patience=3),
    StepNormExit(normalize="state"),
    KLExit(1e-3, min_loops=4),
    AccelerationExit(),
    AccelerationExit(0.1, normalize="state", patience=1),
    AccelerationExit(normalize="step"),
    CosineExit(0.1),
    EntropyExit(),
    EntropyExit(0.01, change=True, min_loops=3),
    ConfidenceExit(0.3),
    ConfidenceExit(by="margin", patience=2),
    ArgmaxExit(patience=2),
    AllExit(of=[StepNormExit(0.5, patience=3), "confidence", {"name": "kl", "min_loops": 2}], patience=2),
]


BUILT_IN = ["acceleration", "all", "argmax", "confidence", "cosine", "entropy", "fixed", "kl", "step_norm"]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_policies_survive_json_and_compare_by_their_settings(policy):
    saved = json.loads(json.dumps(policy.to_dict()))
    assert ExitPolicy.from_dict(saved) == policy
    assert type(ExitPolicy.from_dict(saved)) is type(policy)
    assert eval(repr(policy)) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert len({policy, ExitPolicy.from_dict(saved)}) == 1


def test_policies_with_other_settings_or_of_other_classes_differ():
    assert AccelerationExit(0.1) != AccelerationExit(0.2)
    assert AccelerationExit(0.1, patience=1) != StepNormExit(0.1)


def test_documented_defaults():
    assert (StepNormExit().threshold, StepNormExit(normalize="state").threshold) == (1e-3, 0.03)
    assert [AccelerationExit(normalize=how).threshold for how in ("none", "state", "step")] == [1e-2, 0.03, 0.5]
    assert KLExit().threshold == 5e-4
    assert (CosineExit().threshold, EntropyExit().threshold, EntropyExit(change=True).threshold) == (1e-3, 0.1, 1e-3)
    assert (ConfidenceExit().by, ConfidenceExit().threshold) == ("top", 0.1)
    assert [policy().patience for policy in (StepNormExit, KLExit, AccelerationExit, ArgmaxExit)] == [1, 1, 2, 5]
    assert set(BUILT_IN) <= set(available_exit_policies())


@pytest.mark.parametrize(
    "settings",
    [
        {"threshold": -1.0},
        {"threshold": math.nan},
        {"threshold": math.inf},
        {"threshold": 10**400},
        {"threshold": "0.1"},
        {"threshold": True},
        {"threshold": [0.1]},
        {"patience": 0},
        {"patience": 1.5},
        {"patience": 10**30},
        {"min_loops": 0},
        {"min_loops": True},
        {"normalize": "step"},
        {"normalize": None},
        {"normalize": ["state"]},
        {"no_such_setting": 1},
    ],
)
def test_impossible_settings_are_errors_that_name_the_setting(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        ExitPolicy.from_dict({"name": "step_norm", **settings})


@pytest.mark.parametrize(
    ("exit_policy", "message"),
    [
        ("no_such_policy", "acceleration, all, .*, step_norm"),  # and what other tests have registered
        ({"name": "entropy", "change": "yes"}, "`change`.*True or False"),
        ({"name": "confidence", "by": "luck"}, "`by`.*top, margin"),
        ({"name": "all"}, r"`of`.*\(\), but must list 2 to 16"),
        ({"name": "all", "of": "kl"}, "`of`.*must list 2 to 16"),
        ({"name": "all", "of": ["kl"] * 17}, "`of`.*must list 2 to 16"),
        ({"name": "all", "of": ["kl", "no_such_policy"]}, "no_such_policy.*unknown"),
        ({"name": "all", "of": ["kl", None]}, "None.* has no name"),
        ({"name": "all", "of": ["kl", KLExit]}, "has no name"),
        ({"name": "all", "of": ["kl", {"name": "kl", "threshold": -1}]}, "threshold"),
        ("__import__('os').abort()", "unknown"),
        ({"name": "os.system"}, "unknown"),
        ({"threshold": 0.1}, "name"),
        ({"name": ["kl"]}, "name"),
        (0.1, "must be None"),
        (AccelerationExit, "must be None"),
        (["kl", "kl"], "2 policies.*3 loop groups"),
        ([["kl"], "kl", "kl"], "must be None"),
    ],
)
def test_what_is_no_policy_is_an_error_that_says_what_is_allowed(exit_policy, message):
    with pytest.raises(ValueError, match=message):
        tiny_model()(random_ids(1, 3), exit_policy=exit_policy)


def test_resolving():
    policy = KLExit()
    assert resolve_exit_policy(None, 2) == [None, None]
    assert resolve_exit_policy("fixed", 2) == [None, None]
    assert resolve_exit_policy("kl", 2) == [policy, policy]
    assert resolve_exit_policy({"name": "kl"}, 1) == [policy]
    assert resolve_exit_policy([None, "kl", policy], 3) == [None, policy, policy]


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match="already registered"):
        register_exit_policy("kl")(FixedLoops)
    register_exit_policy("kl")(KLExit)  # a module that is run again


def view_of(state, step=5, update=None, previous_update=None, memory=None):
    update = torch.zeros_like(state) if update is None else update
    return LoopView(0, step, state, update, previous_update, {} if memory is None else memory, lambda x: x)


def test_nan_is_never_a_hit():
    nan = torch.full((3, 4), math.nan)
    for policy in (
        StepNormExit(1e6),
        AccelerationExit(1e6, patience=1),
        KLExit(1e6),
        AccelerationExit(1e6, normalize="step"),
        CosineExit(1e6),
        EntropyExit(1e6),
        ConfidenceExit(1e6),
        ConfidenceExit(1e6, by="margin"),
        ArgmaxExit(patience=1),
        AllExit(of=[StepNormExit(1e6), CosineExit(1e6)]),
    ):
        memory = {"log_p": nan, "best": nan.argmax(-1)}
        view = view_of(nan, update=nan, previous_update=nan, memory=memory)
        assert not policy(view).any()


def test_a_threshold_of_zero_never_fires():
    state = torch.randn(3, 4)
    sure = 1e3 * torch.eye(3, 4)  # so that even the rules of confidence measure 0
    for policy in (StepNormExit(0), AccelerationExit(0, patience=1), KLExit(0), CosineExit(0)):
        view = view_of(state, previous_update=torch.zeros_like(state), memory={"log_p": state.log_softmax(-1)})
        assert not policy(view).any()
    for policy in (EntropyExit(0), ConfidenceExit(0), ConfidenceExit(0, by="margin"), ArgmaxExit(0, patience=1)):
        view = view_of(sure, memory={"best": sure.argmax(-1)})
        assert policy.measure(view).max() == 0
        assert not policy(view).any()


def test_patience_counts_hits_in_a_row_and_min_loops_delays():
    policy, memory = StepNormExit(1.0, patience=2, min_loops=5), {}
    sizes = [0.1, 2.0, 0.1, 0.1, 0.1, 2.0, 0.1]
    fired = []
    for step, size in enumerate(sizes):
        update = torch.tensor([[size, 0.0]])
        fired.append(bool(policy(view_of(torch.ones(1, 2), step=step, update=update, memory=memory))))
    assert fired == [False, False, False, False, True, False, False]


@pytest.mark.parametrize("patience", [1, 2, 3])
@pytest.mark.parametrize("rule", ["kl", "argmax", "entropy", "entropy change", "confidence"])
def test_what_cannot_count_is_not_decoded(rule, patience):
    noise = torch.randn(8, 1, 4, generator=torch.Generator().manual_seed(0))
    states = torch.tensor([0.0, 0.0, 0.5, 0.0]) + 0.01 * noise

    def run(policy):
        fired, decoded, memory = [], [], {}
        for step, state in enumerate(states):
            view = view_of(state, step=step, memory=memory)
            view.decode = lambda state: decoded.append(1) or state
            fired.append(bool(policy(view)))
        return fired, len(decoded)

    name, _, change = rule.partition(" ")
    settings = {"name": name, "patience": patience, "min_loops": 6} | ({"change": True} if change else {})
    fired, decoded = run(ExitPolicy.from_dict({**settings, "threshold": 10.0}))
    assert fired == [False] * 5 + [True] * 3
    compares = rule in ("kl", "argmax", "entropy change")  # then the state before the first that counts is decoded too
    assert decoded == 8 - (5 - patience) + compares - 1


@pytest.mark.parametrize(
    ("policy", "first"),
    [
        (CosineExit(3.0), 1),
        (EntropyExit(10.0), 1),
        (EntropyExit(10.0, change=True), 2),
        (ConfidenceExit(2.0), 1),
        (ConfidenceExit(2.0, by="margin"), 1),
        (ArgmaxExit(2.0, patience=1), 2),
        (ArgmaxExit(2.0), 6),
        (AllExit(of=[CosineExit(3.0), AccelerationExit(1e6)]), 3),
        (AllExit(of=[CosineExit(3.0), AccelerationExit(1e6)], patience=2), 4),
    ],
    ids=repr,
)
def test_when_a_rule_can_first_fire(policy, first):
    steps = tiny_model(std=0.3, num_loops=8)(random_ids(2, 5), exit_policy=policy).loop_steps
    assert (steps == first).all()


def test_what_the_rules_measure():
    logits = torch.tensor([[2.0, 1.0, -1.0], [0.0, 0.0, 5.0]], dtype=torch.float64)
    p = logits.softmax(-1)
    torch.testing.assert_close(EntropyExit().measure(view_of(logits)), -(p * p.log()).sum(-1))
    change = EntropyExit(change=True).measure(view_of(logits, memory={"entropy": torch.tensor([1.0, 0.0])}))
    torch.testing.assert_close(change, (-(p * p.log()).sum(-1) - torch.tensor([1.0, 0.0])).abs())
    torch.testing.assert_close(ConfidenceExit().measure(view_of(logits)), 1 - p.max(-1).values)
    margin = torch.tensor([1.0, 5.0], dtype=torch.float64)
    torch.testing.assert_close(ConfidenceExit(by="margin").measure(view_of(logits)), (-margin).exp())
    assert ArgmaxExit().measure(view_of(logits, memory={"best": torch.tensor([0, 1])})).tolist() == [0.0, 1.0]
    turned = view_of(torch.tensor([[1.0, 0.0], [2.0, 0.0]]), update=torch.tensor([[1.0, -1.0], [1.0, 0.0]]))
    torch.testing.assert_close(CosineExit().measure(turned), torch.tensor([1.0, 0.0]))  # from (0, 1), from (1, 0)


def test_a_combination_fires_where_all_of_its_conditions_do():
    model, ids = tiny_model(std=0.3, num_loops=9), random_ids(3, 12)
    conditions = [StepNormExit(4.0, patience=2), ConfidenceExit(0.8, by="margin", min_loops=2), KLExit(3.0)]
    seen = []

    def recorded(view):
        """The conditions side by side, each with its memory under its own name, as a plain function."""
        hits = []
        for place, policy in enumerate(conditions):
            own = {key[1:]: view.memory.pop(key) for key in list(view.memory) if key[0] == str(place)}
            hits.append(policy(LoopView(view.group, view.step, view.state, view.update, None, own, view.decode)))
            view.memory.update({f"{place}{key}": value for key, value in own.items()})
        seen.append(torch.stack(hits))
        return torch.stack(hits).all(0)

    combined = model(ids, exit_policy=AllExit(of=conditions))
    by_hand = model(ids, exit_policy=recorded)
    assert torch.equal(combined.loop_steps, by_hand.loop_steps)
    assert torch.equal(combined.logits, by_hand.logits)
    assert 1 < combined.loop_steps.float().mean() < 9
    assert any((hits.any(0) & ~hits.all(0)).any() for hits in seen)  # the conditions do not say the same
    by_json = model(ids, exit_policy=json.loads(json.dumps(AllExit(of=conditions).to_dict())))
    assert torch.equal(combined.logits, by_json.logits)


def test_conditions_of_a_combination_share_one_pass_through_the_head():
    decoded = []
    view = view_of(torch.randn(3, 4))
    view.decode = lambda state: decoded.append(1) or state
    AllExit(of=["kl", "entropy", "argmax"])(view)
    assert len(decoded) == 1


def test_a_combination_from_a_file_cannot_nest():
    nested = {"name": "kl"}
    for _ in range(100_000):
        nested = {"name": "all", "of": [nested, "kl"]}
    with pytest.raises(ValueError, match="lists a combination"):
        ExitPolicy.from_dict(nested)
    with pytest.raises(ValueError, match="lists a combination"):
        AllExit(of=["kl", AllExit(of=["kl", "cosine"])])


def test_step_normalisation_has_the_documented_floor():
    generator = torch.Generator().manual_seed(0)
    previous, update = torch.randn(2, 1000, 8, generator=generator, dtype=torch.float64)
    view = view_of(torch.ones(1000, 8), update=update, previous_update=previous)
    measured = AccelerationExit(normalize="step").measure(view)
    rho = update.norm(dim=-1) / previous.norm(dim=-1)
    cosine = torch.cosine_similarity(update, previous, dim=-1)
    torch.testing.assert_close(measured, torch.sqrt(1 + rho**2 - 2 * rho * cosine) / (1 + rho))
    assert (measured >= torch.sqrt((1 - cosine) / 2) - 1e-12).all()


def test_a_policy_of_ones_own():
    @register_exit_policy("test_entropy")
    @dataclass(frozen=True)
    class EntropyExit(ExitPolicy):
        """Stops when the model is sure of the next token."""

        temperature: float = 1.0

        def measure(self, view):
            log_p = (view.decode(view.state) / self.temperature).log_softmax(-1)
            return -(log_p.exp() * log_p).sum(-1)

    model, ids = tiny_model(std=0.3), random_ids(2, 8)
    by_name = model(ids, exit_policy={"name": "test_entropy", "threshold": 2.0, "temperature": 0.5})
    by_object = model(ids, exit_policy=EntropyExit(2.0, temperature=0.5))
    assert torch.equal(by_name.logits, by_object.logits)
    assert 1 <= by_name.loop_steps.min() < by_name.loop_steps.max() <= 5
    with pytest.raises(ValueError, match="has no name"):
        type("Nameless", (ExitPolicy,), {})().to_dict()


def test_a_subclass_is_not_what_its_parent_is_saved_as():
    class Mine(AccelerationExit):
        def measure(self, view):
            return None

    with pytest.raises(ValueError, match="has no name"):
        Mine().to_dict()

    class Always(FixedLoops):
        def __call__(self, view):
            return torch.ones(view.state.shape[0], dtype=torch.bool)

    assert (tiny_model()(random_ids(1, 4), exit_policy=Always()).loop_steps == 1).all()

    class KLExit(ExitPolicy):
        pass

    with pytest.raises(ValueError, match="already registered"):
        register_exit_policy("kl")(KLExit)


@pytest.mark.parametrize(
    "answer",
    [True, None, [True] * 4, torch.ones(4), torch.ones(4, dtype=torch.long), torch.ones(3, dtype=torch.bool),
     torch.ones(4, 1, dtype=torch.bool)],
    ids=repr,
)  # fmt: skip
def test_a_wrong_answer_of_a_callable_is_an_error_that_says_what_it_must_be(answer):
    with pytest.raises(ValueError, match=r"must return a bool tensor \[4\]"):
        tiny_model()(random_ids(1, 4), exit_policy=lambda view: answer)

    def forgetful(view):
        view.memory["count"] = 3
        return torch.zeros(4, dtype=torch.bool)

    with pytest.raises(ValueError, match=r"'count' in `memory`"):
        tiny_model()(random_ids(1, 4), exit_policy=forgetful)


def test_a_plain_callable_decides_for_active_tokens_only():
    seen = []

    def leave_in_turn(view):
        seen.append((view.group, view.step, view.state.shape[0], view.previous_update is None))
        age = view.memory.setdefault("age", torch.arange(view.state.shape[0]))
        return age <= view.step

    output = tiny_model()(random_ids(1, 4), exit_policy=[leave_in_turn, None, None])
    assert output.loop_steps[0, :, 0].tolist() == [1, 2, 3, 4]
    assert seen == [(0, 0, 4, True), (0, 1, 3, False), (0, 2, 2, False), (0, 3, 1, False)]
    assert (output.loop_steps[..., 1:] == 5).all()
