import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import ConvexHull

from evaluation.baselines import (
    bootstrap_interval,
    by_position,
    cheapest,
    hull_cost,
    hull_loss,
    loop_counts,
    lower_hull,
    shuffled,
    take_steps,
)
from tests.helpers import random_ids, tiny_model


def test_the_lower_hull_of_a_known_set():
    costs, losses = [1, 2, 3, 4, 5, 6], [10, 8, 3, 2.5, 2, 2.2]
    hull_costs, hull_losses = lower_hull(np.array(costs), np.array(losses))
    assert hull_costs.tolist() == [1, 3, 5]
    assert hull_losses.tolist() == [10, 3, 2]
    assert hull_loss(costs, losses, 2) == 6.5  # below the point itself
    assert hull_loss(costs, losses, 9) == 2
    assert np.isnan(hull_loss(costs, losses, 0.5))
    assert hull_cost(costs, losses, 6.5) == 2
    assert hull_cost(costs, losses, 1) == np.inf
    assert hull_cost(costs, losses, 11) == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 1000)), min_size=4, max_size=30, unique=True))
def test_the_lower_hull_is_that_of_scipy(points):
    points = np.array(points, dtype=float)
    costs, losses = lower_hull(points[:, 0], points[:, 1])
    for cost, loss in points:  # nothing lies below it
        assert hull_loss(points[:, 0], points[:, 1], cost) <= loss + 1e-9
    assert (np.diff(costs) > 0).all()
    assert (np.diff(losses) < 0).all()
    slopes = np.diff(losses) / np.diff(costs)
    assert (np.diff(slopes) > 0).all()
    if np.linalg.matrix_rank(points - points[0]) == 2:
        vertices = {tuple(points[place]) for place in ConvexHull(points).vertices}
        assert set(zip(costs, losses, strict=True)) <= vertices


def test_one_group_has_all_counts_and_more_groups_a_grid():
    assert loop_counts(1, 3) == [[1], [2], [3]]
    counts = loop_counts(2, 4)
    assert counts[:4] == [[1, 1], [2, 2], [3, 3], [4, 4]]
    assert [4, 1] in counts
    assert len(counts) == len({tuple(count) for count in counts}) == 16


def test_a_shuffle_keeps_the_histogram_and_loses_the_choice():
    steps = np.stack([np.arange(60).reshape(3, 20), 100 + np.arange(60).reshape(3, 20)], -1)
    dealt = shuffled(steps, np.random.default_rng(0))
    assert sorted(dealt[..., 0].flatten()) == list(range(60))
    assert (dealt[..., 1] - dealt[..., 0] == 100).all()  # a token's groups stay together
    assert abs(np.corrcoef(dealt[..., 0].flatten(), np.arange(60))[0, 1]) < 0.5


def test_steps_by_position():
    steps = np.array([[[1], [2]], [[3], [2]], [[2], [8]]])
    assert by_position(steps, 0.5).tolist() == [[2], [2]]
    assert by_position(steps, 1.0).tolist() == [[3], [8]]
    assert by_position(steps, 0.75).tolist() == [[3], [5]]


def test_the_cheapest_that_is_good_enough():
    assert cheapest([3, 1, 2], [0.1, 0.5, 0.2], 0.2) == 2
    assert cheapest([3, 1, 2], [0.1, 0.5, 0.2], 0.05) is None


def test_an_interval_covers_the_mean():
    values = np.random.default_rng(1).normal(2.0, 1.0, 400)
    low, high = bootstrap_interval(lambda places: values[places].mean(), 400)
    assert low < values.mean() < high
    assert high - low == pytest.approx(4 * values.std() / 20, rel=0.15)


def test_tokens_take_the_steps_that_they_are_given():
    model, ids = tiny_model(std=0.3, num_loops=6), random_ids(3, 8)
    steps = np.random.default_rng(0).integers(1, 7, size=(3, 8, 3))
    with torch.no_grad():
        output = model(ids, exit_policy=take_steps(steps))
        assert output.loop_steps.numpy().tolist() == steps.tolist()
        uniform = model(ids, exit_policy=take_steps(np.full_like(steps, 4)))
        torch.testing.assert_close(uniform.logits, model(ids, num_loops=4).logits, atol=1e-4, rtol=1e-4)
