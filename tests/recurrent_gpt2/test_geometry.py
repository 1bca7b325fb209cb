import math

import numpy as np
import pytest
import torch

from recurrent_gpt2 import geometry
from recurrent_gpt2.geometry import LoopGeometry, RunningMoments


def random_states(steps=6, tokens=5, width=7, seed=0):
    return torch.randn(steps + 1, tokens, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spiral(steps=20, turn=0.7, shrink=1.0):
    """A walk whose steps turn by a constant angle and shrink by a constant factor."""
    angles = turn * torch.arange(steps).double()
    sizes = shrink ** torch.arange(steps).double()
    moves = torch.stack([sizes * angles.cos(), sizes * angles.sin()], dim=-1)
    return torch.cat([torch.zeros(1, 2, dtype=torch.float64), moves.cumsum(0)])[:, None]


def test_formulas_against_slow_loops():
    states = random_states()
    x = states.numpy()
    steps, tokens = x.shape[0] - 1, x.shape[1]
    expected = {name: np.full((steps - 1, tokens), np.nan) for name in ("cosine", "ratio", "none", "state", "step")}
    norms = np.full((steps, tokens), np.nan)
    for t in range(tokens):
        for k in range(steps):
            d = x[k + 1, t] - x[k, t]
            norms[k, t] = math.sqrt(sum(value**2 for value in d))
            if k > 0:
                before = x[k, t] - x[k - 1, t]
                size, size_before = np.sqrt((d**2).sum()), np.sqrt((before**2).sum())
                expected["cosine"][k - 1, t] = (d * before).sum() / size / size_before
                expected["ratio"][k - 1, t] = size / size_before
                a = np.sqrt(((d - before) ** 2).sum())
                expected["none"][k - 1, t] = a
                expected["state"][k - 1, t] = a / np.sqrt((x[k + 1, t] ** 2).sum())
                expected["step"][k - 1, t] = a / (size + size_before)
    np.testing.assert_allclose(geometry.step_norms(states), norms)
    np.testing.assert_allclose(geometry.step_cosines(states), expected["cosine"])
    np.testing.assert_allclose(geometry.contraction_ratios(states), expected["ratio"])
    for normalize in ("none", "state", "step"):
        np.testing.assert_allclose(geometry.accelerations(states, normalize), expected[normalize])
    following = random_states(seed=1)
    for t in range(tokens):
        mean = norms[:, t].mean()
        y = following.numpy()
        printed = np.linalg.norm(y[0, t] - x[-1, t]) / mean
        net = np.linalg.norm(y[-1, t] - x[-1, t]) / mean
        assert geometry.drift_to_loop_ratio(states, following)[t] == pytest.approx(printed)
        assert geometry.net_drift_to_loop_ratio(states, following)[t] == pytest.approx(net)
    with pytest.raises(ValueError, match="none, state, step"):
        geometry.accelerations(states, "no such")


def test_a_perfect_spiral_has_constant_norm_and_cosine():
    states = spiral(turn=0.7)
    torch.testing.assert_close(geometry.step_norms(states), torch.ones(20, 1, dtype=torch.float64))
    torch.testing.assert_close(geometry.step_cosines(states), torch.full((19, 1), math.cos(0.7), dtype=torch.float64))
    expected = torch.full((19, 1), 2 * math.sin(0.35), dtype=torch.float64)  # a chord of the unit circle
    torch.testing.assert_close(geometry.accelerations(states), expected)


def test_a_straight_contraction_has_cosine_one():
    states = spiral(turn=0.0, shrink=0.5)
    torch.testing.assert_close(geometry.step_cosines(states), torch.ones(19, 1, dtype=torch.float64))
    torch.testing.assert_close(geometry.contraction_ratios(states), torch.full((19, 1), 0.5, dtype=torch.float64))
    # The acceleration is then a constant multiple of the step norm.
    torch.testing.assert_close(geometry.accelerations(states), geometry.step_norms(states)[1:])


def test_a_two_cycle_has_cosine_minus_one():
    states = torch.tensor([[0.0, 1.0], [1.0, 0.0]] * 4, dtype=torch.float64)[:, None]
    torch.testing.assert_close(geometry.step_cosines(states), -torch.ones(6, 1, dtype=torch.float64))


def test_running_moments_equal_those_of_all_values_at_once():
    generator = torch.Generator().manual_seed(0)
    values = 1e6 + torch.randn(1000, 3, generator=generator, dtype=torch.float64)
    values[::7, 1] = torch.nan
    moments = RunningMoments()
    for part in values.split([1, 10, 500, 489]):
        moments.update(part, torch.ones_like(part, dtype=torch.bool))
    valid = [column[~column.isnan()] for column in values.T]
    torch.testing.assert_close(moments.mean, torch.stack([column.mean() for column in valid]), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        moments.std, torch.stack([column.std(correction=0) for column in valid]), rtol=1e-7, atol=0
    )
    assert moments.to_dict()["count"] == [1000, 857, 1000]
    empty = RunningMoments()
    empty.update(torch.full((4, 2), torch.nan))
    assert empty.to_dict() == {"mean": [None, None], "std": [None, None], "count": [0, 0]}


def test_rounding_noise_is_found_and_left_out():
    exact = spiral(steps=40, turn=0.5, shrink=0.3) + 3.0
    rounded = exact.float()  # after some 15 steps nothing but rounding is left
    valid = geometry.above_floor(rounded)[:, 0]
    assert valid[:8].all()
    assert not valid[16:].any()
    moments = LoopGeometry(1)
    moments.update((rounded[:, :, None],))
    report = moments.to_dict()["groups"][0]
    assert report["step_cosine"]["mean"][:6] == pytest.approx([math.cos(0.5)] * 6, abs=1e-2)
    assert report["step_cosine"]["mean"][20] is None
    assert report["above_floor"][:8] == [1.0] * 8


def test_principal_components_find_the_plane_that_states_lie_in():
    generator = torch.Generator().manual_seed(0)
    plane = torch.linalg.qr(torch.randn(9, 2, generator=generator, dtype=torch.float64))[0].T
    flat = torch.randn(50, 4, 2, generator=generator, dtype=torch.float64) * torch.tensor([5.0, 1.0])
    states = flat @ plane + 7
    projection = geometry.Projection.fit(states)
    assert projection.explained.sum() == pytest.approx(1)
    assert projection.explained[0] > 0.9
    projected = projection.apply(states)
    torch.testing.assert_close(projected.diff(dim=0).norm(dim=-1), states.diff(dim=0).norm(dim=-1))


def test_padding_is_left_out():
    states = random_states(tokens=6).view(7, 2, 3, 7)
    real = torch.tensor([[True, True, False], [True, False, False]])
    all_tokens, real_tokens = LoopGeometry(1), LoopGeometry(1)
    all_tokens.update((states,))
    real_tokens.update((states,), real)
    norms = geometry.step_norms(states)[:, real]
    assert real_tokens.to_dict()["groups"][0]["step_norm"]["mean"] == pytest.approx(norms.mean(1).tolist())
    assert all_tokens.to_dict()["groups"][0]["step_norm"]["count"] == [6] * 6


def test_bands_are_percentiles_of_all_tokens_however_they_came():
    states = random_states(tokens=60).view(7, 4, 15, 7)
    measured = LoopGeometry(1)
    for row in range(4):
        measured.update((states[:, row : row + 1],))
    found = measured.to_dict()["groups"][0]
    for name, values in (("step_norm", geometry.step_norms(states)), ("step_cosine", geometry.step_cosines(states))):
        low, high = values.flatten(1).quantile(torch.tensor([0.1, 0.9], dtype=torch.float64), dim=1)
        assert found[name]["low"] == pytest.approx(low.tolist())
        assert found[name]["high"] == pytest.approx(high.tolist())
