"""`optimize_for_inference(compile=True)`: decoding by compiled stages gives what one pass gives, whatever the loops."""

import copy

import peft
import pytest
import torch

from recurrent_gpt2 import LoopCache, RecurrentGPT2ForCausalLM
from tests.helpers import random_ids, tiny_model

SETTINGS = {"num_hidden_layers": 3, "loop_groups": [[1]], "max_position_embeddings": 160}
POLICY = {"name": "step_norm", "normalize": "state", "threshold": 0.3}
GREEDY = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module")
def stock() -> RecurrentGPT2ForCausalLM:
    return tiny_model(0.3, **SETTINGS)


@pytest.fixture(scope="module")
def compiled() -> RecurrentGPT2ForCausalLM:
    return tiny_model(0.3, **SETTINGS).optimize_for_inference(compile=True)


@pytest.mark.parametrize("inference_mode", [False, True])
@pytest.mark.parametrize(
    "loops", [{}, {"num_loops": 1}, {"num_loops": 9}, {"exit_policy": POLICY}, {"exit_policy": POLICY, "num_loops": 12}]
)
def test_compiled_decoding_is_one_pass_and_compiles_nothing_more(stock, compiled, loops, inference_mode):
    """A text that outgrows the room of its cache, by any number of loops, under a rule."""
    ids, logits, steps, cache = random_ids(1, 150), [], [], LoopCache(compiled.config)
    with torch.inference_mode(inference_mode), torch.no_grad():
        expected = stock(ids, **loops)
        with torch.compiler.set_stance("fail_on_recompile"):
            for chunk in (ids[:, :4], *ids[:, 4:].split(1, dim=1)):
                output = compiled(chunk, past_key_values=cache, use_cache=True, **loops)
                logits.append(output.logits)
                steps.append(output.loop_steps)
    torch.testing.assert_close(torch.cat(logits, 1), expected.logits, atol=1e-3, rtol=1e-3)
    assert torch.equal(torch.cat(steps, 1), expected.loop_steps)


def test_compiled_code_is_what_runs(compiled, monkeypatch):
    called, layer = [], compiled.model.layers[1]
    monkeypatch.setattr(type(layer), "forward", lambda *args, **kwargs: called.append(1))
    cache, width = LoopCache(compiled.config), compiled.config.hidden_size
    for index in range(3):
        cache.update(torch.zeros(1, 4, 7, width // 4), torch.zeros(1, 4, 7, width // 4), index)
    with torch.no_grad():
        compiled(random_ids(1, 1), past_key_values=cache, use_cache=True)
    assert not called


@pytest.mark.parametrize("arguments", [{}, {"cache_strategy": "last_step"}, {"exit_policy": POLICY}])
@pytest.mark.parametrize("rows", [1, 3])
def test_generated_tokens_are_the_same(stock, compiled, arguments, rows):
    ids, mask = random_ids(rows, 6), torch.ones(rows, 6, dtype=torch.long)
    mask[0, :2] = 0  # padding, too
    for given in (torch.ones_like(mask), mask):
        expected = stock.generate(ids, attention_mask=given, **GREEDY, **arguments)
        assert torch.equal(compiled.generate(ids, attention_mask=given, **GREEDY, **arguments), expected)


def test_drafts_beams_and_recorded_states_are_the_same(stock, compiled):
    ids = random_ids(1, 6)
    with torch.inference_mode():
        compiled.generate(ids, assistant_model=compiled.draft(num_loops=1), **GREEDY)  # compiles what takes rows
    with torch.compiler.set_stance("fail_on_recompile"):
        for draft, full in ((1, None), (2, None), (3, 4), (1, 12)):
            drafted = compiled.generate(ids, assistant_model=compiled.draft(draft), num_loops=full, **GREEDY)
            assert torch.equal(drafted, stock.generate(ids, num_loops=full, **GREEDY)), (draft, full)
    assert torch.equal(compiled.generate(ids, num_beams=3, **GREEDY), stock.generate(ids, num_beams=3, **GREEDY))
    with torch.no_grad():
        for model in (stock, compiled):
            past = model(ids, use_cache=True).past_key_values
            states = model(ids[:, :1], past_key_values=past, use_cache=True, output_hidden_states=True).hidden_states
            assert len(states) >= 2 + 5  # of every application of a layer


def test_what_compiled_code_would_not_know_of_is_refused(compiled):
    with pytest.raises(RuntimeError, match="load it again"):
        copy.deepcopy(compiled)
    for targets in ("all-linear", ["o_proj"]):
        with pytest.raises(RuntimeError, match="load it again"):
            peft.get_peft_model(compiled, peft.LoraConfig(target_modules=targets))


def test_where_there_is_nothing_to_gain_it_says_so(caplog):
    large = tiny_model(hidden_size=256, num_hidden_layers=1, loop_groups=[])
    assert large.optimize_for_inference(compile=True).model.compiled_decoding is None
    noisy = tiny_model(loop_noise=0.1, **SETTINGS)
    assert noisy.optimize_for_inference(compile=True).model.compiled_decoding is None
