import copy
import pickle

import pytest
import torch
from torch import nn

from recurrent_gpt2.fast_layers import Linear, RMSNorm, packed_weights
from tests.helpers import random_ids, tiny_model


def is_packed(model: nn.Module) -> list[bool]:
    return [module._packed is not None for module in model.modules() if isinstance(module, Linear)]


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (8, 1), (3, 5), (64,), (2, 100)])
def test_packed_products_are_the_stock_ones(shape):
    layer, x = Linear(48, 80), torch.randn(*shape, 48)
    with torch.no_grad():
        expected = nn.functional.linear(x, layer.weight)
        with packed_weights(layer):
            assert is_packed(layer) == [True]
            torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)
        assert is_packed(layer) == [False]


@pytest.mark.parametrize(("rows", "width", "stock"), [(300, 40, True), (300, 80, False), (100, 40, False)])
def test_many_rows_are_left_to_the_stock_product_where_it_is_faster(rows, width, stock, monkeypatch):
    layer, x, used = Linear(48, width), torch.randn(3, rows // 3, 48), []
    monkeypatch.setattr(nn.functional, "linear", lambda x, weight: used.append(weight) or x @ weight.T)
    with torch.no_grad(), packed_weights(layer):
        torch.testing.assert_close(layer(x), x @ layer.weight.T, atol=1e-5, rtol=1e-5)
    assert len(used) == stock


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.add_(1.0),
        lambda weight: weight.data.add_(1.0),
        lambda weight: weight.data.copy_(weight.data[torch.randperm(80)]),
        lambda weight: setattr(weight, "data", weight.data * 2),
        lambda weight: weight.data[3, 4].add_(1e-3),
    ],
)
def test_changed_weights_are_packed_anew(change):
    torch.manual_seed(0)
    layer, x = Linear(48, 80), torch.randn(2, 48)
    with torch.no_grad():
        with packed_weights(layer):
            layer(x)
        change(layer.weight)
        with packed_weights(layer):
            torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight), atol=1e-5, rtol=1e-5)


def test_unchanged_weights_are_packed_once():
    layer = Linear(48, 80)
    with packed_weights(layer):
        first = layer._packed
    with packed_weights(layer):
        assert layer._packed is first


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_are_left_alone(dtype):
    layer = Linear(16, 16).to(dtype)
    with packed_weights(layer), torch.no_grad():
        assert is_packed(layer) == [False]
        assert layer(torch.randn(2, 16, dtype=dtype)).dtype == dtype


def test_packing_can_be_turned_off_with_onednn():
    layer = Linear(16, 16)
    with torch.backends.mkldnn.flags(enabled=False), packed_weights(layer):
        assert is_packed(layer) == [False]


def test_gradients_flow_inside():
    layer = Linear(16, 16)
    with packed_weights(layer):
        layer(torch.randn(2, 16)).sum().backward()
    assert layer.weight.grad.abs().sum() > 0


def test_copies_and_pickles_come_without_packed_weights():
    model = tiny_model()
    with packed_weights(model):
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model.lm_head))):
            assert not any(is_packed(other))
            assert all(module._kept is None for module in other.modules() if isinstance(module, Linear))


def test_generation_packs_and_gives_the_same_tokens():
    model, ids = tiny_model(0.3), random_ids(3, 6)
    seen = []
    model.lm_head.register_forward_hook(lambda *_: seen.append(all(is_packed(model))))
    packed = model.generate(ids, max_new_tokens=10, do_sample=False, exit_policy="step_norm", pad_token_id=0)
    with torch.backends.mkldnn.flags(enabled=False):
        stock = model.generate(ids, max_new_tokens=10, do_sample=False, exit_policy="step_norm", pad_token_id=0)
    assert torch.equal(packed, stock)
    assert seen == [True] * 10 + [False] * 10
    assert not any(is_packed(model))


def test_an_inner_context_leaves_the_outer_one_packed():
    model, ids = tiny_model(0.3), random_ids(1, 6)
    with packed_weights(model):
        with packed_weights(model.model):
            assert all(is_packed(model))
        assert all(is_packed(model))
    seen = []
    model.lm_head.register_forward_hook(lambda *_: seen.append(all(is_packed(model))))
    model.generate(ids, max_new_tokens=8, do_sample=False, assistant_model=model.draft(num_loops=1), pad_token_id=0)
    assert len(seen) > 2
    assert all(seen)
    assert not any(is_packed(model))


def test_an_error_leaves_nothing_packed():
    model = tiny_model()
    with pytest.raises(ValueError, match="exit_policy"):
        model.generate(random_ids(1, 4), exit_policy="no such", max_new_tokens=2)
    assert not any(is_packed(model))


def test_an_interruption_while_packing_leaves_nothing_packed(monkeypatch):
    model, pack = tiny_model(), Linear.pack

    def interrupted(layer):
        if layer is model.lm_head:
            raise KeyboardInterrupt
        pack(layer)

    monkeypatch.setattr(Linear, "pack", interrupted)
    with pytest.raises(KeyboardInterrupt), packed_weights(model):
        pass
    assert not any(is_packed(model))


def test_weights_that_move_keep_no_copy():
    layer = Linear(16, 16)
    with packed_weights(layer):
        pass
    assert layer._kept is not None
    assert layer.double()._kept is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.0, 1e-4, 1.0, 1e4])
def test_norms_are_the_stock_ones(dtype, scale):
    fast, stock = (norm(24, eps=1e-6).to(dtype) for norm in (RMSNorm, nn.RMSNorm))
    weight = torch.randn(24, dtype=dtype)
    x = scale * torch.randn(2, 5, 24, dtype=dtype)
    with torch.no_grad():
        fast.weight.copy_(weight)
        stock.weight.copy_(weight)
        torch.testing.assert_close(fast(x), stock(x))
    x.requires_grad_()
    assert torch.equal(fast(x), stock(x))
