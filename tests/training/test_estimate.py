import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers import ROOT, random_ids, tiny_model
from training.estimate import cache_bytes_per_token, estimate, forward_flops, saved_bytes_per_token, training_cost
from training.recipe import load_recipe


@pytest.mark.parametrize("num_loops", [[1, 1, 1], [3, 5, 2]])
def test_flops_are_those_that_torch_counts(num_loops):
    model, length = tiny_model(), 16
    model.set_attn_implementation("eager")  # which torch's counter sees as matrix products
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(random_ids(1, length), num_loops=num_loops, use_cache=False)
    # Eager attention computes the masked half too, so every token attends to the whole block.
    assert counter.get_total_flops() == length * forward_flops(model.config, num_loops, context=length)


def test_cache_bytes_are_those_of_the_cache():
    model, length = tiny_model(), 10
    for strategy in ("per_step", "last_step"):
        model.config.cache_strategy = strategy
        with torch.no_grad():
            cache = model(random_ids(1, length), num_loops=[2, 3, 4]).past_key_values
        assert cache.num_bytes() == length * cache_bytes_per_token(model.config, [2, 3, 4], strategy, 4)


def test_drawn_loops_have_the_stated_mean_and_gradients_are_cut():
    config = tiny_model(mean_loops=12, backprop_loops=8).config
    cost = training_cost(config, 32)
    assert cost.mean_loops == pytest.approx([13] * 3, abs=0.3)
    assert all(6 < loops < 8 for loops in cost.mean_backprop_loops)
    assert cost.worst_applications_with_gradient == 2 + 4 * 8
    assert saved_bytes_per_token(config) > 10 * 32 * 4


def test_the_papers_run():
    printed = estimate(load_recipe(ROOT / "training/recipes/paper.yaml"))
    assert "127,501,824" in printed
    assert "307,200,000" in printed
