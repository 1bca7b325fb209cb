import copy
import gc
import weakref

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.cache_utils import Cache, DynamicCache, StaticCache

from recurrent_gpt2 import LoopCache, StepNormExit
from tests.helpers import random_ids, tiny_config, tiny_model

POLICY = StepNormExit(2.5)  # leaves early, and at different steps, in a model with weights of std 0.3


@pytest.fixture
def model():
    return tiny_model(0.3, torch.float64, num_loops=6)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def filled(model, ids, policy=POLICY, **kwargs):
    cache = LoopCache(model.config, **kwargs)
    model(ids, past_key_values=cache, exit_policy=policy)
    return cache


def next_logits(model, cache, ids, policy=POLICY):
    output = model(ids, past_key_values=copy.deepcopy(cache), exit_policy=policy)
    return output.logits


def test_it_is_a_cache_with_as_many_layers_as_the_model(model):
    cache = LoopCache(model.config)
    assert isinstance(cache, Cache)
    assert len(cache) == model.config.num_hidden_layers == 6
    assert cache.get_seq_length() == 0
    assert not cache.is_compileable
    model(random_ids(2, 7), past_key_values=cache)
    assert [cache.get_seq_length(layer) for layer in range(6)] == [7] * 6
    assert cache.get_mask_sizes(3, 2) == (10, 0)
    assert cache.loop_steps.shape == (2, 7, 3)


def test_slots_grow_to_the_deepest_step_in_use(model):
    cache = LoopCache(model.config)
    for num_loops in ([2, 1, 3], [4, 2, 1], [1, 1, 1]):
        model(random_ids(1, 3), past_key_values=cache, num_loops=num_loops)
    slots = [len(getattr(layer, "slots", [layer])) for layer in cache.layers]
    assert slots == [1, 4, 2, 2, 3, 1]


def test_a_prompt_with_few_loops_continues_with_many(model):
    """Its last keys and values stand for the deeper steps, as for a token that has left early."""
    ids = random_ids(1, 9)
    exits = {"early": 2, "late": 5}

    def prescribed(view):
        limit = view.memory.setdefault("limit", torch.tensor([2] * 5 + [5] * 4))
        return limit <= view.step + 1

    whole = model(ids, exit_policy=prescribed)
    cache = LoopCache(model.config)
    first = model(ids[:, :5], past_key_values=cache, num_loops=exits["early"])
    second = model(ids[:, 5:], past_key_values=cache, num_loops=exits["late"])
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole.logits, atol=1e-9, rtol=0)


def test_crop_puts_the_cache_back(model):
    ids = random_ids(2, 12)
    cache, longer = filled(model, ids[:, :6]), filled(model, ids[:, :10])
    longer.crop(-4)
    longer.crop(0)
    assert longer.get_seq_length() == 6
    assert torch.equal(longer.loop_steps, cache.loop_steps)
    expected = next_logits(model, cache, ids[:, 6:])
    torch.testing.assert_close(next_logits(model, longer, ids[:, 6:]), expected, atol=1e-9, rtol=0)
    with pytest.raises(ValueError, match="minus the number"):
        longer.crop(3)
    longer.crop(-100)
    assert longer.get_seq_length() == 0
    assert longer.loop_steps.shape == (2, 0, 3)
    expected = model(ids, exit_policy=POLICY).logits
    torch.testing.assert_close(next_logits(model, longer, ids), expected, atol=1e-9, rtol=0)


def test_a_cache_made_in_inference_mode_can_be_used_outside(model):
    ids = random_ids(2, 9)
    with torch.inference_mode():
        cache = filled(model, ids[:, :5])
    logits = model(ids[:, 5:], past_key_values=cache, exit_policy=POLICY).logits
    torch.testing.assert_close(logits, model(ids, exit_policy=POLICY).logits[:, 5:], atol=1e-9, rtol=0)


def test_layers_have_the_attributes_of_cache_layers(model):
    for layer in filled(model, random_ids(1, 4)).layers:
        assert layer.is_initialized
        assert layer.keys.shape == layer.values.shape == (1, 4, 4, 8)


@pytest.mark.parametrize("strategy", ["per_step", "last_step"])
def test_rows_can_be_reordered_repeated_and_selected(model, strategy):
    ids = random_ids(3, 8)
    cache = filled(model, ids[:, :5], cache_strategy=strategy)
    following = next_logits(model, cache, ids[:, 5:])
    order = torch.tensor([2, 0, 0])
    reordered, repeated, selected = (copy.deepcopy(cache) for _ in range(3))
    reordered.reorder_cache(order)
    repeated.batch_repeat_interleave(2)
    selected.batch_select_indices(torch.tensor([1]))
    for changed, rows in (
        (reordered, order),
        (repeated, torch.tensor([0, 0, 1, 1, 2, 2])),
        (selected, torch.tensor([1])),
    ):
        torch.testing.assert_close(next_logits(model, changed, ids[rows, 5:]), following[rows], atol=1e-9, rtol=0)
        assert torch.equal(changed.loop_steps, cache.loop_steps[rows])
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.loop_steps is None
    torch.testing.assert_close(next_logits(model, cache, ids), model(ids, exit_policy=POLICY).logits, atol=1e-9, rtol=0)


def test_last_step_takes_the_bytes_of_a_plain_model_and_per_step_those_of_its_steps():
    model, ids = tiny_model(num_loops=6), random_ids(2, 10)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_head=4, n_layer=6, n_positions=48)).eval()
    plain = gpt2(ids).past_key_values
    plain_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in plain.layers)
    assert filled(model, ids, None, cache_strategy="last_step").num_bytes() == plain_bytes
    assert filled(model, ids, None).num_bytes() == plain_bytes // 6 * (2 + 4 * 6)
    assert filled(model, ids, "step_norm").num_bytes() == plain_bytes // 6 * (2 + 4 * 6)


def test_last_step_is_exact_within_a_prompt_and_an_approximation_after_it(model):
    ids = random_ids(2, 10)
    exact = model(ids, exit_policy=POLICY)
    cache = LoopCache(model.config, "last_step")
    prompt = model(ids[:, :7], past_key_values=cache, exit_policy=POLICY)
    torch.testing.assert_close(prompt.logits, exact.logits[:, :7], atol=1e-9, rtol=0)
    after = model(ids[:, 7:], past_key_values=cache, exit_policy=POLICY)
    assert (after.logits - exact.logits[:, 7:]).abs().max() > 1e-3
    # What it approximates: a past token is seen, at every step, through the keys and values of its last.
    for layer, of_prompt in zip(cache.layers, filled(model, ids[:, :7]).layers, strict=True):
        kept = getattr(layer, "slots", [layer])[0].keys[:, :, :7]
        slots = getattr(of_prompt, "slots", [of_prompt])
        torch.testing.assert_close(kept, slots[-1].keys, atol=1e-9, rtol=0)


def test_static_slots_hold_fixed_loops(model):
    ids = random_ids(2, 9)
    cache = LoopCache(model.config, max_cache_len=16, num_loops=[3, 2, 4])
    assert cache.is_compileable
    logits = [model(chunk, past_key_values=cache, num_loops=[3, 2, 4]).logits for chunk in ids.split([4, 1, 3, 1], 1)]
    torch.testing.assert_close(torch.cat(logits, 1), model(ids, num_loops=[3, 2, 4]).logits, atol=1e-9, rtol=0)
    for other in ([4, 2, 4], [3, 2, 3]):  # deeper slots would be empty, or of other tokens
        with pytest.raises(ValueError, match="made for `num_loops`"):
            model(ids[:, :1], past_key_values=cache, num_loops=other)
    with pytest.raises(ValueError, match="fixed loops only"):
        model(ids[:, :1], past_key_values=cache, exit_policy="kl")
    with pytest.raises(ValueError, match="room for 16 tokens and holds 9"):
        model(random_ids(2, 8), past_key_values=cache, num_loops=[3, 2, 4])
    with pytest.raises(ValueError, match="can't be cropped"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="a slot per loop step"):
        LoopCache(model.config, "last_step", max_cache_len=16)


def test_a_cache_of_other_rows_is_refused(model):
    for cache in (LoopCache(model.config), LoopCache(model.config, max_cache_len=16)):
        model(random_ids(1, 4), past_key_values=cache)
        with pytest.raises(ValueError, match="holds 1 row"):
            model(random_ids(2, 1), past_key_values=cache)


def test_static_slots_hold_padded_batches(model):
    ids, mask = random_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    cache, logits = LoopCache(model.config, max_cache_len=16), []
    for end in (6, 7, 9):
        start = cache.get_seq_length()
        logits.append(model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache).logits)
    expected = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(torch.cat(logits, 1)[mask == 1], expected[mask == 1], atol=1e-9, rtol=0)


def test_static_slots_are_freed_with_the_cache(model):
    cache = LoopCache(model.config, max_cache_len=8)
    layers = [weakref.ref(layer) for layer in cache.layers]
    gc.disable()
    try:
        del cache
        assert all(layer() is None for layer in layers)
    finally:
        gc.enable()


@pytest.mark.parametrize("make", [DynamicCache, lambda: DynamicCache(config=tiny_config())])
def test_other_caches_are_refused_with_a_sentence_that_says_what_to_pass(model, make):
    for attempt in (
        lambda cache: model(random_ids(1, 3), past_key_values=cache),
        lambda cache: model.generate(random_ids(1, 3), past_key_values=cache),
    ):
        with pytest.raises(ValueError, match=r"LoopCache\(model.config\)"):
            attempt(make())
    with pytest.raises(ValueError, match=r"StaticCache.*LoopCache"):
        model(random_ids(1, 3), past_key_values=StaticCache(config=tiny_config(), max_cache_len=8))
    with pytest.raises(ValueError, match="per_step, last_step"):
        LoopCache(model.config, "first_step")
