import json
from dataclasses import asdict

import pytest
import torch

from evaluation.pictures import draw_followed
from evaluation.token_path import TokenPath, _states_between, curves_of, follow_token, follow_two
from recurrent_gpt2 import AccelerationExit, CosineExit, KLExit, StepNormExit
from tests.helpers import random_ids, tiny_model

LOOPS = [6, 7, 6]
PLACE = 6


@pytest.fixture(scope="module")
def model():
    return tiny_model(0.3, torch.float64)


@pytest.mark.parametrize(
    "policy",
    [
        StepNormExit(2.0),
        AccelerationExit(3.0),
        KLExit(0.05),
        CosineExit(0.1),
        AccelerationExit(0.9, normalize="step"),
    ],
)
def test_a_token_left_when_what_the_rule_compares_was_below_the_threshold_long_enough(model, policy):
    path, seen = follow_token(model, random_ids(1, 9)[0], PLACE, policy, LOOPS)
    for curve, steps, cap in zip(path.curves, seen.steps, LOOPS, strict=True):
        hits = [value is not None and value < policy.threshold for value in curve.measure]
        fires = [k for k in range(policy.patience, cap + 1) if all(hits[k - policy.patience : k])]
        assert steps == min([*fires, cap])
        assert (curve.policy, curve.threshold) == (policy.name, policy.threshold)
    assert any(steps < cap for steps, cap in zip(seen.steps, LOOPS, strict=True))


def test_curves_are_those_of_the_policies_that_measure_the_same(model):
    ids = random_ids(1, 9)[0]
    steps, _ = follow_token(model, ids, PLACE, StepNormExit(1e-9, normalize="state"), LOOPS)
    turns, _ = follow_token(model, ids, PLACE, AccelerationExit(1e-9, normalize="state"), LOOPS)
    for curve in steps.curves:
        assert curve.measure == pytest.approx(curve.step_norm)
    for curve in turns.curves:
        assert curve.measure[1:] == pytest.approx(curve.acceleration[1:])
        assert curve.measure[0] is curve.acceleration[0] is curve.cosine[0] is None


def test_states_between_loops_are_those_of_a_plain_pass(model):
    ids = random_ids(1, 9)
    with _states_between(model, PLACE) as between, torch.no_grad():
        plain = model.model(ids, num_loops=1, output_hidden_states=True)
    assert list(between) == ["embedding", "layer 0", "layer 5"]
    assert torch.equal(between["embedding"], plain.hidden_states[0][0, PLACE])
    assert torch.equal(between["layer 0"], plain.hidden_states[1][0, PLACE])
    assert torch.allclose(model.model.norm(between["layer 5"]), plain.last_hidden_state[0, PLACE])
    model.model(ids)
    assert len(between) == 3
    assert model.model.dropout._forward_hooks == {}


def test_the_path_goes_through_all_layers_in_order(model):
    path, _ = follow_token(model, random_ids(1, 9)[0], PLACE, None, LOOPS)
    names = [(stretch.name, stretch.group, len(stretch.points)) for stretch in path.stretches]
    assert names == [("embedding", None, 1), ("layer 0", None, 1), ("layer 1", 0, 7), ("layers 2-3", 1, 8),
                     ("layer 4", 2, 7), ("layer 5", None, 1)]  # fmt: skip
    assert path.most == 7
    assert path.curves[0].policy is None


def test_a_loop_that_stands_still_has_no_direction():
    states = torch.zeros(4, 8)
    states[1:] = 1.0
    curve = curves_of(states, 0, None, lambda state: state)
    assert curve.step_norm[1:] == [0.0, 0.0]
    assert curve.cosine == [None, None, None]


def test_the_report_has_the_tokens_with_the_fewest_and_the_most_loops_from_a_file(tokenizer):
    model, ids, policy = tiny_model(0.3), random_ids(1, 12)[0], StepNormExit(2.0)
    written = json.loads(json.dumps(follow_two(model, tokenizer, ids, policy, LOOPS)))
    steps = model(ids[None], exit_policy=policy, num_loops=LOOPS).loop_steps[0].double()
    depth = (steps @ torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64))[1:-1].tolist()
    places = [1 + depth.index(min(depth)), 1 + depth.index(max(depth))]
    assert min(depth) < max(depth)
    for followed, place in zip(written, places, strict=True):
        assert followed["path"]["steps"] == steps[place].tolist()
        assert followed["said"] == tokenizer.decode(ids[place + 1])
        path, _ = follow_token(model, ids, place, policy, LOOPS)
        assert asdict(TokenPath.from_dict(followed["path"])) == asdict(path)
        page = draw_followed(followed)
        assert page.count("<svg") == 1 + 3
        assert page.count('class="lv-heat"') == 3
