import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from recurrent_gpt2 import RecurrentGPT2ForCausalLM
from tests.helpers import random_ids, run_fresh, tiny_model


def test_bfloat16():
    model, ids = tiny_model(), random_ids(2, 9)
    expected = model(ids).logits
    model.to(torch.bfloat16)
    for exit_policy in (None, "acceleration", "step_norm", "kl"):
        output = model(ids, exit_policy=exit_policy)
        assert output.logits.dtype == torch.bfloat16
        assert output.logits.isfinite().all()
    assert (model(ids).logits.float() - expected).abs().max() < 0.3
    assert model.generate(ids, max_new_tokens=3, exit_policy="kl").shape == (2, 12)


def test_loading_with_a_dtype_and_a_device_map(tmp_path):
    model, ids = tiny_model(), random_ids(1, 6)
    model.save_pretrained(tmp_path)
    loaded = RecurrentGPT2ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map="cpu")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(loaded.model.start_noise, model.model.start_noise.to(torch.bfloat16))
    double = RecurrentGPT2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(double(ids).logits.float(), model(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_with_fixed_loops(fullgraph):
    torch._dynamo.reset()
    model, ids = tiny_model(num_loops=2), random_ids(2, 8)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    expected, padded = model(ids, use_cache=False).logits, model(ids, attention_mask=mask, use_cache=False)
    compiled = torch.compile(model, fullgraph=fullgraph, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected)
        output = compiled(ids, attention_mask=mask, use_cache=False)
        torch.testing.assert_close(output.logits[mask == 1], padded.logits[mask == 1])
        assert torch.equal(output.loop_steps, padded.loop_steps)
        if not fullgraph:
            torch.testing.assert_close(compiled(ids, use_cache=True).logits, expected)


def test_resizing_the_vocabulary():
    model, ids = tiny_model(), random_ids(1, 5)
    before = model(ids).logits
    model.resize_token_embeddings(70)
    assert model.config.vocab_size == 70
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(model(ids).logits[..., :61], before)


@pytest.mark.parametrize("targets", [["qkv_proj", "o_proj", "up_proj", "down_proj"], "all-linear"])
def test_lora_adapters_train_save_load_and_merge(tmp_path, targets):
    ids = random_ids(2, 10)
    config = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(tiny_model(), config)
    assert any("loop_inputs" in name for name, _ in model.named_parameters() if "lora" in name) == (
        targets == "all-linear"
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model.train()
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    adapted = model(input_ids=ids).logits
    assert (adapted - tiny_model()(ids).logits).abs().max() > 1e-2
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path).eval()
    torch.testing.assert_close(loaded(input_ids=ids).logits, adapted)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(merged(ids).logits, adapted, atol=1e-4, rtol=1e-4)
    assert torch.equal(loaded.generate(input_ids=ids, max_new_tokens=3), merged.generate(ids, max_new_tokens=3))


@pytest.mark.slow
def test_lora_targets_can_be_left_out(tmp_path):
    """By a checkpoint's own code too, whichever is imported first, the model or PEFT."""
    tiny_model().save_pretrained(tmp_path / "model")
    code = """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("model", trust_remote_code=True)
from peft import LoraConfig, get_peft_model
adapted = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM"))
print(*sorted({name.split(".lora")[0].split(".")[-1] for name, _ in adapted.named_modules() if ".lora_A." in name}))
"""
    assert run_fresh(code, tmp_path).split() == ["down_proj", "o_proj", "qkv_proj", "up_proj"]


def test_adapters_of_the_library_find_the_targets_too():
    model, ids = tiny_model(), random_ids(1, 6)
    model.add_adapter(LoraConfig(r=4, init_lora_weights=False))
    assert (model(ids).logits - tiny_model()(ids).logits).abs().max() > 1e-3


def test_a_lora_target_that_does_not_exist_is_a_sentence():
    with pytest.raises(ValueError, match=r"Target modules \{'c_attn'\} not found in the base model"):
        get_peft_model(tiny_model(), LoraConfig(target_modules=["c_attn"]))


def test_packed_documents_do_not_see_each_other():
    """Of positions that begin anew, as packing without padding has them, transformers makes the mask."""
    model, lengths = tiny_model(std=0.3, dtype=torch.float64), (7, 4, 9)
    texts = [random_ids(1, length, seed=length) for length in lengths]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = model(torch.cat(texts, 1), position_ids=positions, use_cache=False).logits
    for text, logits in zip(texts, packed.split(lengths, dim=1), strict=True):
        torch.testing.assert_close(logits, model(text).logits, atol=1e-10, rtol=0)
