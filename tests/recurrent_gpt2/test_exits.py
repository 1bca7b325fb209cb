"""What an exit means: design by three rules, from which prefill = decode and batch invariance follow."""

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recurrent_gpt2 import (
    AccelerationExit,
    AllExit,
    ArgmaxExit,
    ConfidenceExit,
    CosineExit,
    EntropyExit,
    KLExit,
    StepNormExit,
)
from tests.helpers import LAYOUTS, random_ids, tiny_model
from tests.recurrent_gpt2 import oracle

POLICIES = {
    "step_norm": lambda threshold: StepNormExit(threshold),
    "step_norm/state": lambda threshold: StepNormExit(threshold, normalize="state"),
    "kl": lambda threshold: KLExit(threshold),
    "acceleration": lambda threshold: AccelerationExit(threshold),
    "acceleration/state": lambda threshold: AccelerationExit(threshold, normalize="state"),
    "acceleration/step": lambda threshold: AccelerationExit(threshold, normalize="step"),
}
# Fractions of all measured values that lie below the threshold.
LEVELS = {"loose": 1.0, "middling": 0.5, "tight": 0.15, "never": None}
NUM_LOOPS = 7


@lru_cache
def model_of(layout="three groups", state_init="noise", large=True):
    if large:
        return tiny_model(0.3, torch.float64, loop_groups=LAYOUTS[layout], state_init=state_init, num_loops=NUM_LOOPS)
    return tiny_model(loop_groups=LAYOUTS[layout], state_init=state_init, num_loops=NUM_LOOPS)


@lru_cache
def policy_of(name, level, layout="three groups", state_init="noise", large=True):
    """The policy with a threshold that does what the level says, on this very model."""
    if LEVELS[level] is None:
        return POLICIES[name](0.0)
    measured = []
    probe = POLICIES[name](0.0)

    def record(view):
        if (measure := probe.measure(view)) is not None:
            measured.append(measure)
        return torch.zeros(view.state.shape[0], dtype=torch.bool)

    with torch.no_grad():
        model_of(layout, state_init, large)(random_ids(4, 20, seed=99), exit_policy=record)
    values = torch.cat(measured)
    threshold = 2 * values.max() if level == "loose" else values.quantile(LEVELS[level])
    return POLICIES[name](float(threshold))


def decode(model, ids, policy, chunks, **kwargs):
    cache, logits, steps = None, [], []
    for chunk in ids.split(chunks, dim=1):
        output = model(chunk, past_key_values=cache, use_cache=True, exit_policy=policy, **kwargs)
        cache = output.past_key_values
        logits.append(output.logits)
        steps.append(output.loop_steps)
    assert torch.equal(cache.loop_steps, torch.cat(steps, 1))
    return torch.cat(logits, 1), torch.cat(steps, 1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", POLICIES)
def test_exit_steps_are_those_of_the_papers_formulas(name, level):
    model, policy = model_of(), policy_of(name, level)
    ids = random_ids(3, 12, seed=1)
    with torch.no_grad():
        output = model(ids, exit_policy=policy, output_loop_trajectory=True)
        steps_seen = set()
        for group, states in enumerate(output.loop_trajectory):
            # The trajectory ends when the last token leaves; a token that has left stays where it is.
            missing = NUM_LOOPS + 1 - len(states)
            states = torch.cat([states, states[-1:].expand(missing, -1, -1, -1)])
            for row in range(3):
                for t in range(12):
                    x = states[:, row, t].numpy()
                    normalize = getattr(policy, "normalize", "none")
                    if name == "kl":
                        expected = oracle.kl_exit(
                            x, policy.threshold, lambda s: model.decode_states(torch.from_numpy(s)).numpy()
                        )
                    elif name.startswith("step_norm"):
                        expected = oracle.step_norm_exit(x, policy.threshold, normalize)
                    else:
                        expected = oracle.acceleration_exit(x, policy.threshold, normalize)
                    assert output.loop_steps[row, t, group] == expected
                    steps_seen.add(expected)
    earliest = {"step_norm": 1, "kl": 2, "acceleration": 3}[name.split("/")[0]]
    assert steps_seen == {"loose": {earliest}, "never": {NUM_LOOPS}}.get(level, steps_seen)
    if level == "middling":
        assert len(steps_seen) > 2


def test_the_newest_state_is_kept_and_it_is_frozen():
    model, policy = model_of(), policy_of("acceleration", "middling")
    ids = random_ids(2, 10, seed=3)
    with torch.no_grad():
        output = model.model(ids, exit_policy=policy, output_loop_trajectory=True, output_hidden_states=True)
    states, steps = output.loop_trajectory[0], output.loop_steps[..., 0]
    assert steps.min() < steps.max()
    for row, t in torch.cartesian_prod(torch.arange(2), torch.arange(10)).tolist():
        path, step = states[:, row, t], steps[row, t]
        assert torch.equal(path[step:], path[step].expand_as(path[step:]))  # s(k+1), and it moves no more
        assert not torch.equal(path[step], path[step - 1])


@pytest.mark.parametrize("state_init", ["noise", "zeros", "input"])
@pytest.mark.parametrize("layout", ["three groups", "first and last layer"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", POLICIES)
def test_prefill_equals_decode_under_every_policy(name, level, layout, state_init):
    model, policy = model_of(layout, state_init), policy_of(name, level, layout, state_init)
    ids = random_ids(2, 10, seed=5)
    with torch.no_grad():
        whole = model(ids, exit_policy=policy, use_cache=False)
        logits, steps = decode(model, ids, policy, [4, 1, 1, 3, 1])
    assert torch.equal(steps, whole.loop_steps)
    torch.testing.assert_close(logits, whole.logits, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    "policy",
    [
        CosineExit(0.3),
        EntropyExit(2.5),
        EntropyExit(0.2, change=True),
        ConfidenceExit(0.5, by="margin"),
        ConfidenceExit(0.6),
        ArgmaxExit(patience=2),
        AllExit(of=[KLExit(0.5, patience=2), CosineExit(0.5), ConfidenceExit(0.9, by="margin")], patience=2),
    ],
    ids=repr,
)
def test_prefill_equals_decode_under_rules_of_direction_and_confidence(policy):
    model, ids = model_of(), random_ids(2, 10, seed=5)
    with torch.no_grad():
        whole = model(ids, exit_policy=policy, use_cache=False)
        logits, steps = decode(model, ids, policy, [4, 1, 1, 3, 1])
    assert len(whole.loop_steps.unique()) > 2
    assert torch.equal(steps, whole.loop_steps)
    torch.testing.assert_close(logits, whole.logits, atol=1e-9, rtol=0)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_chunking_padding_and_batch_mates_change_nothing(data):
    name, level = data.draw(st.sampled_from(sorted(POLICIES))), data.draw(st.sampled_from(sorted(LEVELS)))
    layout, state_init = data.draw(st.sampled_from(sorted(LAYOUTS))), data.draw(st.sampled_from(["noise", "zeros"]))
    model, policy = model_of(layout, state_init), policy_of(name, level, layout, state_init)
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    longest = max(lengths) + data.draw(st.integers(0, 3))
    left = data.draw(st.booleans())
    chunks = []
    while sum(chunks) < longest:
        chunks.append(data.draw(st.integers(1, longest - sum(chunks))))

    ids, mask = (
        torch.zeros(len(lengths), longest, dtype=torch.long),
        torch.zeros(len(lengths), longest, dtype=torch.long),
    )
    texts = [random_ids(1, length, seed=data.draw(st.integers(0, 1000))) for length in lengths]
    for row, text in enumerate(texts):
        columns = slice(longest - lengths[row], longest) if left else slice(0, lengths[row])
        ids[row, columns], mask[row, columns] = text[0], 1
    with torch.no_grad():
        batch = model(ids, attention_mask=mask, exit_policy=policy, use_cache=False)
        cache, logits, steps, seen = None, [], [], 0
        for chunk in ids.split(chunks, dim=1):
            seen += chunk.shape[1]
            output = model(
                chunk, attention_mask=mask[:, :seen], past_key_values=cache, use_cache=True, exit_policy=policy
            )
            cache = output.past_key_values
            logits.append(output.logits)
            steps.append(output.loop_steps)
        logits, steps = torch.cat(logits, 1), torch.cat(steps, 1)
        for row, text in enumerate(texts):
            alone, real = model(text, exit_policy=policy, use_cache=False), mask[row] == 1
            for some_logits, some_steps in ((batch.logits, batch.loop_steps), (logits, steps)):
                assert torch.equal(some_steps[row][real], alone.loop_steps[0])
                assert (some_steps[row][~real] == 0).all()
                torch.testing.assert_close(some_logits[row][real], alone.logits[0], atol=1e-9, rtol=0)


@pytest.mark.parametrize("level", ["middling", "tight"])
@pytest.mark.parametrize("name", POLICIES)
def test_the_same_in_float32_with_default_weights(name, level):
    model, policy = model_of(large=False), policy_of(name, level, large=False)
    ids = random_ids(3, 12, seed=7)
    with torch.no_grad():
        whole = model(ids, exit_policy=policy, use_cache=False)
        logits, steps = decode(model, ids, policy, [5, 1, 1, 1, 3, 1])
        torch.testing.assert_close(logits, whole.logits, atol=1e-4, rtol=0)
        assert torch.equal(steps, whole.loop_steps)
        for row in range(3):
            alone = model(ids[row : row + 1], exit_policy=policy)
            torch.testing.assert_close(whole.logits[row], alone.logits[0], atol=1e-4, rtol=0)
            assert torch.equal(whole.loop_steps[row], alone.loop_steps[0])


@pytest.mark.parametrize("how", ["prefill", "decode", "padded"])
@pytest.mark.parametrize("name", POLICIES)
def test_exited_tokens_cost_nothing(name, how):
    model, policy = model_of(), policy_of(name, "middling")
    ids = random_ids(4, 9, seed=11)
    passed = dict.fromkeys(range(6), 0)

    def count(index):
        def hook(module, arguments):
            passed[index] += arguments[0].shape[0] * arguments[0].shape[1]

        return hook

    hooks = [layer.register_forward_pre_hook(count(index)) for index, layer in enumerate(model.model.layers)]
    try:
        with torch.no_grad():
            if how == "decode":
                _, steps = decode(model, ids, policy, [1] * 9)
            else:
                mask = torch.ones_like(ids)
                if how == "padded":
                    mask[0, :4], mask[2, :7] = 0, 0
                steps = model(ids, attention_mask=mask, exit_policy=policy).loop_steps
    finally:
        for hook in hooks:
            hook.remove()
    assert 0 < steps.float().mean() < NUM_LOOPS
    for group, layers in enumerate(model.config.loop_groups):
        for layer in layers:
            assert passed[layer] == steps[..., group].sum()


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_that_never_fires_gives_fixed_loops_bit_for_bit(name, use_cache):
    model, ids = model_of(large=False), random_ids(3, 12, seed=13)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with torch.no_grad():
        for arguments in ({}, {"attention_mask": mask}):
            fixed = model(ids, use_cache=use_cache, **arguments)
            never = model(ids, use_cache=use_cache, exit_policy=POLICIES[name](0.0), **arguments)
            assert torch.equal(fixed.logits, never.logits)
            assert torch.equal(fixed.loop_steps, never.loop_steps)


@pytest.mark.parametrize("attention", ["eager", "flex_attention", "recording"])
@pytest.mark.parametrize("name", POLICIES)
def test_kernels_that_cannot_gather_give_the_same_results(name, attention):
    settings = {"std": 0.3, "dtype": torch.float64, "hidden_size": 64, "num_loops": NUM_LOOPS}
    if attention == "flex_attention":
        settings |= {"std": 0.1, "dtype": torch.float32}
    model = tiny_model(**settings)
    thresholds = {"kl": 0.05, "step_norm": 3.0, "acceleration": 4.0, "acceleration/step": 0.85}
    policy = POLICIES[name](thresholds.get(name, 0.6))
    ids, mask = random_ids(3, 9, seed=17), torch.ones(3, 9, dtype=torch.long)
    mask[1, :5] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, exit_policy=policy)
        assert 1 < expected.loop_steps[mask == 1].float().mean() < NUM_LOOPS
        if attention != "recording":
            model.set_attn_implementation(attention)
        output = model(ids, attention_mask=mask, exit_policy=policy, output_hidden_states=attention == "recording")
    tolerance = 1e-9 if model.dtype == torch.float64 else 1e-3
    assert torch.equal(output.loop_steps, expected.loop_steps)
    torch.testing.assert_close(output.logits[mask == 1], expected.logits[mask == 1], atol=tolerance, rtol=0)


def test_recorded_hidden_states_of_a_token_that_has_left_stay_what_they_were():
    model, policy = model_of(), policy_of("step_norm", "middling")
    ids = random_ids(1, 8, seed=19)
    with torch.no_grad():
        output = model(ids, exit_policy=policy, output_hidden_states=True, output_loop_trajectory=True)
    states = output.loop_trajectory[0]
    assert all(torch.equal(output.hidden_states[2 + k], states[1 + k]) for k in range(len(states) - 1))


@pytest.mark.parametrize("name", POLICIES)
def test_nan_runs_to_the_cap_and_no_further(name):
    model = tiny_model(num_loops=4)
    model.model.layers[2].mlp.up_proj.weight.data[0, 0] = torch.nan
    output = model(random_ids(2, 5), exit_policy=POLICIES[name](1e6))
    assert (output.loop_steps[..., 1] == 4).all()
    assert (output.loop_steps[..., 0] < 4).all()


def test_one_policy_in_many_threads_gives_what_each_thread_alone_gets():
    model, policy = model_of(), policy_of("acceleration", "middling")
    texts = [random_ids(1 + seed % 3, 6 + seed, seed=seed) for seed in range(8)]

    def score(ids):
        with torch.no_grad():
            output = model(ids, exit_policy=policy)
            return output.logits, output.loop_steps

    alone = [score(ids) for ids in texts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(score, texts * 5))
    for (logits, steps), (expected, expected_steps) in zip(together, alone * 5, strict=True):
        assert torch.equal(steps, expected_steps)
        torch.testing.assert_close(logits, expected, atol=1e-9, rtol=0)


def test_gradients_flow_through_adaptive_scoring():
    model, policy = model_of(), policy_of("acceleration", "middling")
    ids = random_ids(2, 8, seed=23)
    model.zero_grad()
    for use_cache in (True, False):
        model(ids, labels=ids, exit_policy=policy, use_cache=use_cache).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert model.model.loop_inputs[0].state_proj.weight.grad.abs().max() > 0
    model.zero_grad()


def test_a_different_policy_per_group():
    model, ids = model_of(), random_ids(2, 8, seed=29)
    policies = [policy_of("step_norm", "loose"), None, {"name": "acceleration", "threshold": 1e9}]
    with torch.no_grad():
        whole = model(ids, exit_policy=policies)
        logits, steps = decode(model, ids, policies, [3, 1, 4])
    assert (whole.loop_steps == torch.tensor([1, NUM_LOOPS, 3])).all()
    assert torch.equal(steps, whole.loop_steps)
    torch.testing.assert_close(logits, whole.logits, atol=1e-9, rtol=0)
