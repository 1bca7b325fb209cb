import json
import math
import pickle
from dataclasses import dataclass

import pytest
import torch

from recurrent_gpt2 import (
    AccelerationExit,
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
]


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
    assert [policy().patience for policy in (StepNormExit, KLExit, AccelerationExit)] == [1, 1, 2]
    assert available_exit_policies() == ["acceleration", "fixed", "kl", "step_norm"]


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
        ("no_such_policy", "acceleration, fixed, kl, step_norm"),
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
    ):
        view = view_of(nan, update=nan, previous_update=nan, memory={"log_p": nan})
        assert not policy(view).any()


def test_a_threshold_of_zero_never_fires():
    state = torch.randn(3, 4)
    for policy in (StepNormExit(0), AccelerationExit(0, patience=1), KLExit(0)):
        view = view_of(state, previous_update=torch.zeros_like(state), memory={"log_p": state.log_softmax(-1)})
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
def test_kl_decodes_only_what_can_count(patience):
    states = 0.1 * torch.randn(8, 1, 4, generator=torch.Generator().manual_seed(0))

    def run(policy):
        fired, decoded, memory = [], [], {}
        for step, state in enumerate(states):
            view = view_of(state, step=step, memory=memory)
            view.decode = lambda state: decoded.append(1) or state
            fired.append(bool(policy(view)))
        return fired, len(decoded)

    fired, decoded = run(KLExit(10.0, patience=patience, min_loops=6))
    assert fired == [False] * 5 + [True] * 3
    assert decoded == 8 - (5 - patience)


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
