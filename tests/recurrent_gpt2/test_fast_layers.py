"""`optimize_for_inference`: the same results from matrices laid out once, and nothing that could be out of date."""

import copy
import pickle
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import peft
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from recurrent_gpt2 import RecurrentGPT2ForCausalLM, fast_layers
from recurrent_gpt2.fast_layers import PRECISIONS, LeanRMSNorm, PackedLinear, SharedLinear
from tests.helpers import random_ids, run_fresh, tiny_model

POLICY = {"name": "step_norm", "normalize": "state", "threshold": 0.3}
GREEDY = {"max_new_tokens": 10, "do_sample": False, "exit_policy": POLICY, "pad_token_id": 0}


@pytest.fixture
def any_size(monkeypatch):
    """Matrices of any size are packed, though small ones gain nothing by it."""
    monkeypatch.setattr(fast_layers, "LEAST_SIZE", 1)


def packed_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, PackedLinear)]


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (8, 1), (3, 5), (64,), (2, 300)])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_products_are_the_stock_ones(shape, bias):
    layer, x = nn.Linear(48, 80, bias=bias), torch.randn(*shape, 48)
    with torch.no_grad():
        torch.testing.assert_close(PackedLinear(layer)(x), layer(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("precision", "bound"), [("bfloat16", 0.01), ("int8", 0.03)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_in_less_precision_are_near_and_depend_on_no_other_row(precision, bound, bias):
    layer, x = nn.Linear(256, 320, bias=bias), torch.randn(5, 9, 256) * torch.logspace(-3, 3, 9)[None, :, None]
    x[0, 0] = 0
    with torch.no_grad():
        packed, stock = PRECISIONS[precision](layer)(x), layer(x)
        error = (packed - stock).norm(dim=-1) / stock.norm(dim=-1).clamp_min(1e-9)
        assert error.max() < bound
        assert error.max() > 1e-4  # it is in less precision
        alone = torch.stack([PRECISIONS[precision](layer)(row[None])[0] for row in x.flatten(0, 1)])
        torch.testing.assert_close(packed.flatten(0, 1), alone, atol=0, rtol=1e-6 if precision == "int8" else 0.01)


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
@pytest.mark.parametrize("policy", [None, POLICY])
def test_a_pass_is_decoding_in_less_precision_too(any_size, precision, policy):
    model, ids = tiny_model(0.3), random_ids(2, 12)
    with torch.no_grad():
        stock = model(ids, exit_policy=policy).logits
        model.optimize_for_inference(weights=precision)
        whole, decoded, cache = model(ids, exit_policy=policy), [], None
        for place in range(ids.shape[1]):
            output = model(ids[:, [place]], past_key_values=cache, use_cache=True, exit_policy=policy)
            cache = output.past_key_values
            decoded.append(output)
    spread = whole.logits.std()
    assert (torch.cat([o.logits for o in decoded], 1) - whole.logits).abs().max() < 1e-3 * spread
    assert torch.equal(torch.cat([o.loop_steps for o in decoded], 1), whole.loop_steps)
    assert 1e-4 * spread < (whole.logits - stock).abs().mean() < 0.2 * spread


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1.0, 1e4])
def test_lean_norms_are_the_stock_ones(scale):
    stock, x = nn.RMSNorm(24, eps=1e-6), scale * torch.randn(2, 5, 24)
    with torch.no_grad():
        stock.weight.copy_(torch.randn(24))
        torch.testing.assert_close(LeanRMSNorm(stock)(x), stock(x))


def test_an_optimised_model_gives_the_same_logits_steps_and_tokens(any_size):
    model, ids = tiny_model(0.3), random_ids(3, 6)
    stock, tokens = model(ids, exit_policy=POLICY), model.generate(ids, **GREEDY)
    assert stock.loop_steps.unique().numel() > 1
    assert model.optimize_for_inference() is model
    fast = model(ids, exit_policy=POLICY)
    torch.testing.assert_close(fast.logits, stock.logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(fast.loop_steps, stock.loop_steps)
    assert torch.equal(model.generate(ids, **GREEDY), tokens)
    assert torch.equal(model.generate(ids[:1], assistant_model=model.draft(num_loops=1), **GREEDY), tokens[:1])


def test_all_matrices_of_the_blocks_and_no_large_shared_one_are_packed(any_size, monkeypatch):
    monkeypatch.setattr(fast_layers, "HELD_TWICE", 61 * 32 * 4 - 1)  # bytes
    model = tiny_model().optimize_for_inference()
    assert type(model.lm_head) is SharedLinear
    assert model.lm_head.weight is model.model.embed_tokens.weight
    matrices = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert set(packed_layers(model)) == {*matrices} - {"lm_head"}
    assert "lm_head" in packed_layers(tiny_model(tie_word_embeddings=False).optimize_for_inference())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (3, 1), (2, 8), (17,), (5, 7), (0, 1)])
def test_products_of_a_shared_head_are_the_stock_ones(shape, bias):
    layer, x = nn.Linear(48, 80, bias=bias), torch.randn(*shape, 48)
    with torch.no_grad():
        torch.testing.assert_close(SharedLinear(layer)(x), layer(x), atol=1e-5, rtol=1e-5)


def test_a_small_shared_head_is_packed_and_its_embedding_kept(any_size):
    model, ids = tiny_model(0.3), random_ids(2, 6)
    expected, looked_up = model(ids).logits, model.model.embed_tokens(ids)
    model.optimize_for_inference()
    assert isinstance(model.lm_head, PackedLinear)
    assert torch.equal(model.model.embed_tokens(ids), looked_up)
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(RuntimeError, match="load it again"):
        model.get_input_embeddings().weight.zero_()


@pytest.mark.parametrize(("precision", "bound"), [("bfloat16", 0.01), ("int8", 0.02)])
def test_a_shared_head_and_its_embedding_are_kept_in_less_precision(any_size, precision, bound):
    model, ids = tiny_model(0.3), random_ids(2, 6)
    shared = model.lm_head.weight.detach().clone()
    assert model.model.embed_tokens.weight is model.lm_head.weight
    model.optimize_for_inference(weights=precision)
    assert isinstance(model.lm_head, PackedLinear)
    with torch.no_grad():
        looked_up, stock = model.model.embed_tokens(ids), nn.functional.embedding(ids, shared)
        read = model.lm_head(torch.eye(shared.shape[1]))
    for found, expected in ((looked_up, stock), (read, shared.T)):
        assert 0 < (found - expected).norm() / expected.norm() < bound
    with pytest.raises(RuntimeError, match="load it again"):
        model.get_input_embeddings().weight.zero_()
    held = sum(p.nbytes for p in model.parameters()) + model.model.embed_tokens._rows.nbytes
    assert held < 0.6 * sum(p.nbytes for p in tiny_model(0.3).parameters())
    # With a hook on either, both stay as they are.
    watched = tiny_model()
    watched.model.embed_tokens.register_forward_hook(lambda *_: None)
    watched.optimize_for_inference(weights=precision)
    assert type(watched.lm_head) is nn.Linear
    assert watched.lm_head.weight is watched.model.embed_tokens.weight


def test_sums_of_the_largest_integers_do_not_overflow():
    layer, x = nn.Linear(512, 8, bias=False), torch.ones(1, 512)
    with torch.no_grad():
        layer.weight.fill_(0.3)
        torch.testing.assert_close(PRECISIONS["int8"](layer)(x), layer(x))
        torch.testing.assert_close(PRECISIONS["int8"](layer)(-x), layer(-x))


def test_layers_that_would_not_get_faster_stay_as_they_are():
    model = tiny_model(hidden_size=256, num_hidden_layers=1, loop_groups=[[0]]).optimize_for_inference()
    assert packed_layers(model) == ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"]
    with torch.backends.mkldnn.flags(enabled=False):
        assert (
            packed_layers(tiny_model(hidden_size=256, num_hidden_layers=1, loop_groups=[]).optimize_for_inference())
            == []
        )


def test_a_layer_with_hooks_keeps_them(any_size):
    model, seen = tiny_model(), []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: seen.append(True))
    model.optimize_for_inference()(random_ids(1, 4))
    assert seen
    assert "model.layers.0.mlp.up_proj" not in packed_layers(model)


def test_a_part_that_is_put_in_afterwards_is_what_runs():
    model, ids = tiny_model().optimize_for_inference(), random_ids(1, 4)
    before = model(ids).logits
    model.model.layers[1].mlp.act_fn = nn.Identity()
    assert not torch.equal(model(ids).logits, before)
    model.set_submodule("model.layers.1.mlp.act_fn", tiny_model().model.layers[1].mlp.act_fn)
    assert torch.equal(model(ids).logits, before)


def test_weights_are_not_held_twice():
    model = tiny_model(hidden_size=512, num_hidden_layers=2, loop_groups=[[1]])
    whole = sum(parameter.nbytes for parameter in model.parameters())
    model.optimize_for_inference()
    left = sum(parameter.nbytes for parameter in model.parameters())
    packed = sum(module._packed.numel() * 4 for module in model.modules() if isinstance(module, PackedLinear))
    norms = sum(module._scaled.nbytes for module in model.modules() if isinstance(module, LeanRMSNorm))
    assert left + packed + norms == whole
    assert packed > 0.9 * whole


def test_weights_are_given_up_one_by_one(any_size, monkeypatch):
    """While one matrix is laid out, those before it are gone already."""
    model = tiny_model()
    weights = [weakref.ref(layer.weight) for layer in model.model.layers.modules() if isinstance(layer, nn.Linear)]
    alive, pack = [], PackedLinear._pack

    def counting(self, weight):
        alive.append(sum(reference() is not None for reference in weights))
        return pack(self, weight)

    monkeypatch.setattr(fast_layers, "_works", lambda packed: True)  # which packs something too
    monkeypatch.setattr(PackedLinear, "_pack", counting)
    model.optimize_for_inference()
    assert alive == sorted(alive, reverse=True)
    assert alive[0] == len(weights)
    assert alive[-1] <= 1


@pytest.mark.parametrize(
    "attempt",
    [
        lambda model, folder: model.train(),
        lambda model, folder: model.model.train(),
        lambda model, folder: model.state_dict(),
        lambda model, folder: model.model.layers[1].state_dict(),
        lambda model, folder: model.load_state_dict(tiny_model().state_dict()),
        lambda model, folder: model.save_pretrained(folder / "saved"),
        lambda model, folder: model.model.save_pretrained(folder / "saved"),
        lambda model, folder: model.half(),
        lambda model, folder: model.to(torch.float64),
        lambda model, folder: model.to("meta"),
        lambda model, folder: copy.deepcopy(model),
        lambda model, folder: pickle.dumps(model),
        lambda model, folder: model.model.layers[1].mlp.up_proj.weight.zero_(),
        lambda model, folder: model.add_adapter(peft.LoraConfig(target_modules="all-linear")),
        lambda model, folder: peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear")),
        lambda model, folder: peft.get_peft_model(model, peft.LoraConfig(target_modules=["up_proj"])),
        lambda model, folder: torch.ao.quantization.quantize_dynamic(model, {nn.Linear}),
        lambda model, folder: model(inputs_embeds=torch.randn(1, 3, 32, requires_grad=True)),
    ],
)
@pytest.mark.parametrize("least_size", [1, fast_layers.LEAST_SIZE])  # all are packed, or none
def test_what_would_need_the_weights_is_refused_with_a_sentence(least_size, tmp_path, attempt, monkeypatch):
    monkeypatch.setattr(fast_layers, "LEAST_SIZE", least_size)
    model, ids = tiny_model(0.3).optimize_for_inference(), random_ids(1, 6)
    tokens = model.generate(ids, **GREEDY)
    with pytest.raises((ValueError, RuntimeError), match=r"optimised for inference.*load it again"):
        attempt(model, tmp_path)
    assert not (tmp_path / "saved").exists()
    assert torch.equal(model.generate(ids, **GREEDY), tokens)
    assert model.eval().to("cpu").float() is model  # which change nothing


def test_a_call_that_cannot_be_right_is_refused_with_a_sentence():
    with pytest.raises(ValueError, match=r"'fp4'.*float32"):
        tiny_model().optimize_for_inference(weights="fp4")
    with pytest.raises(ValueError, match="already"):
        tiny_model().optimize_for_inference().optimize_for_inference()
    with pytest.raises(ValueError, match="float64"):
        tiny_model(dtype=torch.float64).optimize_for_inference()
    with pytest.raises(ValueError, match="whole and on the CPU"), torch.device("meta"):
        RecurrentGPT2ForCausalLM(tiny_model().config).optimize_for_inference()
    adapted = peft.get_peft_model(tiny_model(), peft.LoraConfig(target_modules="all-linear"))
    with pytest.raises(ValueError, match="merge_and_unload"):
        adapted.optimize_for_inference()
    assert adapted.merge_and_unload().optimize_for_inference().is_optimized


def test_a_sharded_model_is_refused_with_a_sentence(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for sharded in (lambda model: fully_shard(model), lambda model: fully_shard(model.model.layers[0]) and model):
            model = tiny_model()
            with pytest.raises(ValueError, match="whole and on the CPU"):
                sharded(model).optimize_for_inference()
            assert not model.is_optimized
    finally:
        torch.distributed.destroy_process_group()


# A model that is not optimised is made of stock modules, and whatever is done to its weights counts at once.


def test_every_matrix_and_norm_is_a_stock_module():
    model = tiny_model()
    model.generate(random_ids(1, 4), max_new_tokens=2)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.RMSNorm):
            assert type(module) in (nn.Linear, nn.RMSNorm)


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.data.copy_(weight.data[:, torch.arange(weight.shape[1] - 1, -1, -1)]),
        lambda weight: weight.data.neg_(),
        lambda weight: setattr(weight, "data", weight.data * 2),
    ],
)
def test_changed_weights_count_in_the_next_generation(change):
    model, ids = tiny_model(0.3), random_ids(1, 6)
    before = model.generate(ids, **GREEDY)
    change(model.model.layers[2].mlp.up_proj.weight)
    after = model.generate(ids, **GREEDY)
    assert not torch.equal(after, before)
    fresh = tiny_model(0.3, seed=1)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(after, fresh.generate(ids, **GREEDY))


def test_disabled_adapters_do_not_count_in_generation_after_a_merge():
    model, ids = tiny_model(0.3), random_ids(1, 6)
    base = model.generate(ids, **GREEDY)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
    adapted.merge_adapter()
    merged = adapted.generate(input_ids=ids, **GREEDY)
    assert not torch.equal(merged, base)
    with adapted.disable_adapter():
        assert torch.equal(adapted.generate(input_ids=ids, **GREEDY), base)


def test_weights_changed_while_another_thread_generates_count_in_the_next_call():
    model, ids = tiny_model(0.3), random_ids(1, 6)
    entered = []

    def hook(*_):
        entered.append(True)

    model.lm_head.register_forward_hook(hook)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(model.generate, ids, **{**GREEDY, "max_new_tokens": 30})
        while not entered:
            pass
        model.model.layers[2].mlp.up_proj.weight.data.neg_()
        mine = model.generate(ids, **GREEDY)
        running.result()
    assert torch.equal(mine, model.generate(ids, **GREEDY))


def test_a_parametrised_layer_can_be_copied_after_a_generation():
    model = tiny_model()
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)
    model.generate(random_ids(1, 4), max_new_tokens=2)
    copy.deepcopy(model.model.layers[0].mlp.up_proj)


def test_dynamic_quantisation_converts_the_matrices():
    quantised = torch.ao.quantization.quantize_dynamic(tiny_model(), {nn.Linear}, dtype=torch.qint8)
    assert not any(type(module) is nn.Linear for module in quantised.modules())
    assert quantised.generate(random_ids(1, 4), max_new_tokens=3).shape == (1, 7)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes_converts_the_matrices_and_adapters_train_on_them(tmp_path, bits):
    tiny_model(hidden_size=64).save_pretrained(tmp_path)
    options = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32} if bits == 4 else {"load_in_8bit": True}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=BitsAndBytesConfig(**options))
    assert [name for name, module in model.named_modules() if type(module) is nn.Linear] == ["lm_head"]
    with pytest.raises(ValueError, match="quantised"):
        model.optimize_for_inference()
    # Training first: on CPU, bitsandbytes gives no gradients after a pass without (of stock models either).
    model = peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")).train()
    adapted(input_ids=random_ids(2, 8), labels=random_ids(2, 8)).loss.backward()
    gradients = [p.grad for name, p in adapted.named_parameters() if "lora_B" in name]
    assert gradients
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)
    assert adapted.generate(input_ids=random_ids(1, 4), max_new_tokens=3).shape == (1, 7)


# Prints the peak of the call, and what is held after it, as multiples of the weights.
PEAK_OF_THE_CALL = """
import gc
from recurrent_gpt2 import RecurrentGPT2Config, RecurrentGPT2ForCausalLM


def memory(name):
    (line,) = (line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024


sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 8, "vocab_size": 64}
model = RecurrentGPT2ForCausalLM(RecurrentGPT2Config(**sizes, loop_groups=[[3]])).eval()
weights = sum(parameter.nbytes for parameter in model.parameters())
for parameter in model.parameters():  # side by side on the heap
    parameter.data = parameter.data.clone()
gc.collect()
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts anew
before = memory("VmRSS")
model.optimize_for_inference(**ARGUMENTS)
print(1 + (memory("VmHWM") - before) / weights, 1 + (memory("VmRSS") - before) / weights)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's record of peaks")
@pytest.mark.parametrize(("arguments", "most"), [({}, 1.15), ({"weights": "int8", "compile": True}, 0.5)])
def test_no_more_than_one_matrix_is_held_twice_while_a_model_is_optimised(arguments, most, tmp_path):
    code = PEAK_OF_THE_CALL.replace("**ARGUMENTS", f"**{arguments}")
    peak, held = map(float, run_fresh(code, tmp_path, hide_package=False).split())
    assert peak < 1.2
    assert held < most
