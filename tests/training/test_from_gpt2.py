import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from recurrent_gpt2 import KLExit, RecurrentGPT2ForCausalLM, StepNormExit
from tests.helpers import random_ids, run_fresh, tiny_model

LOOPS = [1, 2, [3, 1], 7]


def make_gpt2(**settings) -> GPT2LMHeadModel:
    """With weights, biases and norms as large as those of a model that was trained for long."""
    sizes = {"vocab_size": 61, "n_embd": 32, "n_layer": 6, "n_head": 4, "n_positions": 48, "bos_token_id": 0}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**{**sizes, "eos_token_id": 0, **settings})).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for name, parameter in model.named_parameters():
        if "ln_" in name and name.endswith("weight"):
            parameter.data += 1
    return model


@pytest.fixture(scope="module")
def gpt2():
    return make_gpt2()


@pytest.fixture(scope="module")
def looped(gpt2):
    return RecurrentGPT2ForCausalLM.from_gpt2(gpt2, loop_groups=[[2], [3, 4]], num_loops=1)


@pytest.mark.parametrize("num_loops", LOOPS, ids=str)
def test_it_computes_what_gpt2_computes(gpt2, looped, num_loops):
    ids = random_ids(3, 20)
    logits = looped(ids, num_loops=num_loops).logits
    assert logits.dtype == torch.float64
    torch.testing.assert_close(logits, gpt2(ids).logits, atol=1e-10, rtol=0)


@pytest.mark.parametrize("settings", [
    {"tie_word_embeddings": False}, {"n_inner": 40}, {"activation_function": "relu"}, {"layer_norm_epsilon": 1e-2},
], ids=str)  # fmt: skip
def test_whatever_the_gpt2(settings):
    other, ids = make_gpt2(**settings), random_ids(2, 12)
    looped = RecurrentGPT2ForCausalLM.from_gpt2(other)
    assert looped.config.loop_groups == [[2], [3, 4], [5]]
    torch.testing.assert_close(looped(ids, num_loops=1).logits, other(ids).logits, atol=1e-10, rtol=0)


@pytest.mark.parametrize("how", [
    {}, {"num_loops": 3}, {"cache_strategy": "last_step"}, {"cache_implementation": "static"}, {"use_cache": False},
    {"num_beams": 3}, {"exit_policy": {"name": "acceleration", "threshold": 1e-6}, "num_loops": 5},
], ids=str)  # fmt: skip
def test_it_generates_what_gpt2_generates(gpt2, looped, how):
    prompts, mask = random_ids(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[0, :3] = 0  # padding
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True, "min_new_tokens": 12}
    expected = gpt2.generate(prompts, **options, num_beams=how.get("num_beams", 1))
    found = looped.generate(prompts, **options, **how)
    assert torch.equal(found.sequences, expected.sequences)
    for logits, of_gpt2 in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(logits, of_gpt2, atol=1e-10, rtol=0)


def test_one_loop_never_reads_a_state_and_more_loops_learn_to(gpt2):
    looped, ids = RecurrentGPT2ForCausalLM.from_gpt2(gpt2, loop_groups=[[2], [3, 4]]), random_ids(2, 12)
    looped.train()
    looped(ids, labels=ids, num_loops=3).loss.backward()
    looped.eval()
    before = looped(ids, num_loops=2).logits
    with torch.no_grad():
        for loop_input in looped.model.loop_inputs:
            assert loop_input.state_proj.weight.grad.abs().max() > 0
            loop_input.state_proj.weight -= loop_input.state_proj.weight.grad
    torch.testing.assert_close(looped(ids, num_loops=1).logits, gpt2(ids).logits, atol=1e-10, rtol=0)
    assert (looped(ids, num_loops=2).logits - before).abs().max() > 1e-3


def test_loops_that_go_on_from_their_input_are_gpt2_at_one_loop(gpt2):
    looped, ids = RecurrentGPT2ForCausalLM.from_gpt2(gpt2, [[2], [3, 4]], state_init="input"), random_ids(2, 12)
    expected = gpt2(ids).logits
    torch.testing.assert_close(looped(ids, num_loops=1).logits, expected, atol=1e-10, rtol=0)
    # The second loop of the first group, by hand: the layer on the mean of what it gave and what it was given.
    entry = gpt2(ids, output_hidden_states=True).hidden_states
    layer = gpt2.transformer.h[2]
    state = layer((entry[3] + entry[2]) / 2)
    for block in gpt2.transformer.h[3:]:
        state = block(state)
    by_hand = gpt2.lm_head(gpt2.transformer.ln_f(state))
    found = looped(ids, num_loops=[2, 1]).logits
    torch.testing.assert_close(found, by_hand, atol=1e-10, rtol=0)
    assert (found - expected).abs().max() > 1e-2


def test_it_is_saved_with_its_block_and_runs_by_its_own_code(looped, tmp_path):
    looped.save_pretrained(tmp_path / "looped")
    ids = random_ids(1, 9)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "looped", dtype=torch.float64)
    assert torch.equal(loaded(ids, num_loops=2).logits, looped(ids, num_loops=2).logits)
    printed = run_fresh(
        f"""
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("looped", trust_remote_code=True, dtype=torch.float64)
print(model(torch.tensor({ids.tolist()})).logits.sum().item())
""",
        tmp_path,
    )
    assert float(printed) == pytest.approx(looped(ids).logits.sum().item(), abs=1e-9)


def test_a_new_model_may_have_gpt2s_block_too():
    settings = {"norm": "layer_norm", "use_bias": True, "output_norms": False, "scale_embeddings": False}
    model, ids = tiny_model(**settings), random_ids(2, 8)
    assert all(not parameter.any() for name, parameter in model.named_parameters() if name.endswith(".bias"))
    model.train()
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_weights_that_are_a_pickle_are_read_where_that_is_asked_for(gpt2, tmp_path):
    gpt2.config.save_pretrained(tmp_path)
    torch.save(gpt2.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"no weights in safetensors format. `allow_pickle=True`"):
        RecurrentGPT2ForCausalLM.from_gpt2(tmp_path)
    looped, ids = RecurrentGPT2ForCausalLM.from_gpt2(str(tmp_path), allow_pickle=True), random_ids(1, 8)
    torch.testing.assert_close(looped(ids).logits.double(), gpt2(ids).logits, atol=1e-3, rtol=0)


def test_a_pickle_that_is_more_than_tensors_is_not_run(gpt2, tmp_path):
    class Payload:
        def __reduce__(self):
            return (open, (str(tmp_path / "it ran"), "w"))

    gpt2.config.save_pretrained(tmp_path)
    torch.save({**gpt2.state_dict(), "payload": Payload()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"(?i)weights.only|unsupported|unpickl|load"):
        RecurrentGPT2ForCausalLM.from_gpt2(str(tmp_path), allow_pickle=True)
    assert not (tmp_path / "it ran").exists()


def test_what_cannot_be_carried_over_is_refused(gpt2):
    with pytest.raises(ValueError, match="scale_attn"):
        RecurrentGPT2ForCausalLM.from_gpt2(make_gpt2(scale_attn_by_inverse_layer_idx=True))
    assert RecurrentGPT2ForCausalLM.from_gpt2(gpt2, loop_groups=[[1]], hidden_size=32).config.hidden_act == "gelu_new"
    with pytest.raises(ValueError, match=r"hidden_size.*GPT-2's own, 32"):
        RecurrentGPT2ForCausalLM.from_gpt2(gpt2, hidden_size=64)
    with pytest.raises(ValueError, match=r"use_bias.*GPT-2's own, True"):
        RecurrentGPT2ForCausalLM.from_gpt2(gpt2, use_bias=False)


def test_what_is_no_gpt2_is_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is no GPT-2 but a model of type 'recurrent_gpt2'"):
        RecurrentGPT2ForCausalLM.from_gpt2(str(tmp_path))
    with pytest.raises(ValueError, match="is a RecurrentGPT2ForCausalLM, but must be a GPT2LMHeadModel"):
        RecurrentGPT2ForCausalLM.from_gpt2(tiny_model())


def test_a_small_vocabulary_does_not_need_gpt2s_first_token():
    """The default `bos_token_id` of a GPT2Config is 50256, whatever its vocabulary."""
    looped = RecurrentGPT2ForCausalLM.from_gpt2(make_gpt2(bos_token_id=50256, n_layer=2))
    assert looped.config.bos_token_id is None
    assert torch.isfinite(looped(random_ids(1, 8)).logits).all()


@pytest.mark.parametrize("policy", [None, StepNormExit(0.3, normalize="state"), KLExit(0.05)], ids=str)
@pytest.mark.parametrize("chunks", [1, [6, 1, 5]], ids=str)
def test_prefill_equals_decode_where_loops_read_their_state(gpt2, policy, chunks):
    """In GPT-2's block too, once training has moved the state's half of the loop input from zero."""
    looped = RecurrentGPT2ForCausalLM.from_gpt2(gpt2, loop_groups=[[2], [3, 4]], num_loops=6)
    torch.manual_seed(1)
    for loop_input in looped.model.loop_inputs:
        torch.nn.init.normal_(loop_input.state_proj.weight, std=0.1)
    ids = random_ids(3, 12)
    with torch.no_grad():
        whole = looped(ids, exit_policy=policy)
        cache, logits, steps = None, [], []
        for chunk in ids.split(chunks, dim=1):
            output = looped(chunk, past_key_values=cache, use_cache=True, exit_policy=policy)
            cache = output.past_key_values
            logits.append(output.logits)
            steps.append(output.loop_steps)
    assert (whole.logits - gpt2(ids).logits).abs().max() > 0.1  # the state is read
    torch.testing.assert_close(torch.cat(logits, 1), whole.logits, atol=1e-10, rtol=0)
    assert torch.equal(torch.cat(steps, 1), whole.loop_steps)
    if policy is not None:
        assert whole.loop_steps.unique().numel() > 1  # tokens differ in their steps
