import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from recurrent_gpt2 import RecurrentGPT2ForCausalLM
from tests.helpers import random_ids, tiny_model


@pytest.fixture(scope="module")
def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=61, n_embd=32, n_layer=6, n_head=4, n_positions=48, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(150):  # learns to count by threes, from any number
        ids = (random_ids(16, 1, seed=step) + 3 * torch.arange(24)) % 61
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def loss_of(model, **arguments):
    ids = (random_ids(32, 1, seed=1000) + 3 * torch.arange(24)) % 61
    with torch.no_grad():
        return model(ids, labels=ids, **arguments).loss.item()


def without_biases(gpt2):
    stripped = GPT2LMHeadModel(gpt2.config).eval()
    stripped.load_state_dict({n: p * 0 if n.endswith(".bias") else p for n, p in gpt2.state_dict().items()})
    return stripped


def test_it_starts_near_gpt2_and_far_from_scratch(gpt2):
    looped = RecurrentGPT2ForCausalLM.from_gpt2(gpt2, loop_groups=[[2], [3, 4]], num_loops=3)
    scratch = RecurrentGPT2ForCausalLM(looped.config).eval()
    learned = loss_of(scratch) - loss_of(gpt2)
    assert learned > 1
    assert loss_of(looped) - loss_of(gpt2) < 0.3 * learned


def test_all_that_is_lost_is_the_biases(gpt2):
    stripped = without_biases(gpt2)
    looped = RecurrentGPT2ForCausalLM.from_gpt2(stripped, loop_groups=[[2], [3, 4]])
    assert abs(loss_of(looped) - loss_of(stripped)) < 0.1


def test_loops_change_nothing_at_the_start_and_learn_from_there(gpt2):
    looped = RecurrentGPT2ForCausalLM.from_gpt2(gpt2)
    assert looped.config.loop_groups == [[2], [3, 4], [5]]
    assert loss_of(looped, num_loops=1) == pytest.approx(loss_of(looped, num_loops=9), abs=1e-5)
    before = loss_of(looped)
    optimizer = torch.optim.AdamW(looped.parameters(), lr=1e-3)
    looped.train()
    for step in range(20):
        ids = (random_ids(16, 1, seed=step) + 3 * torch.arange(24)) % 61
        looped(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    looped.eval()
    assert loss_of(looped) < before
    assert looped.model.loop_inputs[0].state_proj.weight.abs().max() > 0


def test_every_parameter_is_accounted_for(gpt2):
    looped = RecurrentGPT2ForCausalLM.from_gpt2(gpt2, calibration_ids=random_ids(2, 20))
    report = looped.conversion_report
    assert sorted(report.carried_over + report.initialized) == sorted(n for n, _ in looped.named_parameters())
    carried = len(report.carried_over) + len(report.dropped)
    assert carried == len([name for name, _ in gpt2.named_parameters()])
    assert "dropped (37)" in str(report)


@pytest.mark.parametrize("untie", ["GPT-2", "the new model"])
def test_an_untied_head_is_carried_over(gpt2, untie):
    settings = {"tie_word_embeddings": False}
    if untie == "GPT-2":
        untied = GPT2LMHeadModel(GPT2Config(**{**gpt2.config.to_dict(), **settings})).eval()
        untied.load_state_dict(gpt2.state_dict())
        looped = RecurrentGPT2ForCausalLM.from_gpt2(untied)
    else:
        looped = RecurrentGPT2ForCausalLM.from_gpt2(gpt2, **settings)
    assert not looped.config.tie_word_embeddings
    assert "lm_head.weight" in looped.conversion_report.carried_over
    assert loss_of(looped) == pytest.approx(loss_of(RecurrentGPT2ForCausalLM.from_gpt2(gpt2)), abs=1e-4)


def test_what_cannot_be_carried_over_is_refused():
    config = GPT2Config(
        vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=8, scale_attn_by_inverse_layer_idx=True
    )
    with pytest.raises(ValueError, match="scale_attn"):
        RecurrentGPT2ForCausalLM.from_gpt2(GPT2LMHeadModel(config))


def test_loading_by_folder_and_wrong_sizes(gpt2, tmp_path):
    gpt2.save_pretrained(tmp_path)
    looped = RecurrentGPT2ForCausalLM.from_gpt2(str(tmp_path), loop_groups=[[1]], hidden_size=32)
    assert looped.config.hidden_act == "gelu_new"
    with pytest.raises(ValueError, match=r"hidden_size.*GPT-2's own, 32"):
        RecurrentGPT2ForCausalLM.from_gpt2(gpt2, hidden_size=64)


def test_what_is_no_gpt2_is_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is no GPT-2 but a model of type 'recurrent_gpt2'"):
        RecurrentGPT2ForCausalLM.from_gpt2(str(tmp_path))
    with pytest.raises(ValueError, match="is a RecurrentGPT2ForCausalLM, but must be a GPT2LMHeadModel"):
        RecurrentGPT2ForCausalLM.from_gpt2(tiny_model())


def test_a_small_vocabulary_does_not_need_gpt2s_first_token():
    """The default `bos_token_id` of a GPT2Config is 50256, whatever its vocabulary."""
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=8))
    looped = RecurrentGPT2ForCausalLM.from_gpt2(gpt2)
    assert looped.config.bos_token_id is None
    assert torch.isfinite(looped(random_ids(1, 8)).logits).all()
