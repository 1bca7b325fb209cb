"""Drafts that are verified as they are made: tokens, logits, steps and cache are those of decoding at full depth."""

import pytest
import torch

from recurrent_gpt2 import LoopCache, RecurrentGPT2ForCausalLM, pipelined_drafts
from recurrent_gpt2.pipelined_drafts import choose
from tests.helpers import Collect, random_ids, tiny_model

PLACES = {"first": [[0]], "in the middle": [[2, 3]], "last": [[3, 4, 5]]}
DICT = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True, "eos_token_id": None}


def model_with(loop_groups: list[list[int]], **settings) -> RecurrentGPT2ForCausalLM:
    """Its tokens differ between depths, so that drafts are often wrong."""
    return tiny_model(0.15, torch.float64, loop_groups=loop_groups, num_loops=7, **settings)


@pytest.fixture(scope="module")
def model() -> RecurrentGPT2ForCausalLM:
    return model_with(PLACES["in the middle"])


@pytest.fixture
def ticks(monkeypatch) -> list[int]:
    """The rows of every tick."""
    rows, advance = [], pipelined_drafts.Pipeline.advance

    def counted(self) -> None:
        rows.append(sum(token.place is not None for token in self.tokens))
        advance(self)

    monkeypatch.setattr(pipelined_drafts.Pipeline, "advance", counted)
    return rows


@pytest.mark.parametrize("state_init", ["noise", "input"])
@pytest.mark.parametrize("groups", PLACES.values(), ids=PLACES)
def test_all_that_is_left_is_that_of_full_depth(groups, state_init, ticks):
    model = model_with(groups, state_init=state_init)
    ids = random_ids(1, 5)
    full = model.generate(ids, max_new_tokens=20, **DICT)
    for loops in (1, 2, 3, 6):
        ticks.clear()
        drafted = model.generate(ids, max_new_tokens=20, assistant_model=model.draft(loops), **DICT)
        assert max(ticks) > 1
        assert torch.equal(drafted.sequences, full.sequences)
        assert torch.equal(drafted.loop_steps, full.loop_steps)
        torch.testing.assert_close(torch.stack(drafted.logits), torch.stack(full.logits))
        torch.testing.assert_close(torch.stack(drafted.scores), torch.stack(full.scores))
        assert drafted.past_key_values.get_seq_length() == full.past_key_values.get_seq_length()
        continued = [goes_on(model, full.sequences, output.past_key_values) for output in (drafted, full)]
        torch.testing.assert_close(*continued)


@torch.no_grad()
def goes_on(model, text: torch.Tensor, cache: LoopCache) -> torch.Tensor:
    logits = model(text[:, -1:], past_key_values=cache).logits
    cache.crop(-1)
    return logits


def test_a_tick_gives_a_token_where_drafts_are_right(ticks):
    model, ids = tiny_model(loop_groups=[[5]], num_loops=8), random_ids(1, 5)
    with torch.no_grad():
        for name in ("state_proj", "input_proj"):  # the loop forgets its state: one step is as good as all
            getattr(model.model.loop_inputs[0], name).weight.copy_(torch.eye(32) * (name == "input_proj"))
    applied = []
    hooks = [model.model.layers[layer].register_forward_hook(lambda *_, n=layer: applied.append(n)) for layer in (0, 5)]
    drafted = model.generate(ids, max_new_tokens=20, assistant_model=model.draft(2), eos_token_id=None)
    for hook in hooks:
        hook.remove()
    assert torch.equal(drafted, model.generate(ids, max_new_tokens=20, eos_token_id=None))
    assert ticks == [1, 2, 3, *[4] * 16, 3, 2, 1]
    assert applied.count(0) == 1 + 19  # the prompt, and every token once
    assert applied.count(5) == 8 + 2 * len(ticks)


@pytest.mark.parametrize(
    "arguments",
    [
        {"repetition_penalty": 1.5, "min_new_tokens": 9, "eos_token_id": list(range(1, 30))},
        {"no_repeat_ngram_size": 1},
        {"eos_token_id": list(range(1, 61, 4))},
        {"max_new_tokens": 1},
        {"max_new_tokens": 200},
        {"num_loops": 9},
    ],
    ids=repr,
)
def test_processors_and_ends_are_those_of_generate(model, arguments, ticks):
    ids, arguments = random_ids(1, 6), {"max_new_tokens": 15, "eos_token_id": None, **arguments}
    expected = model.generate(ids, **arguments)
    for loops in (1, 3):
        assert torch.equal(model.generate(ids, assistant_model=model.draft(loops), **arguments), expected)
    assert ticks or arguments["max_new_tokens"] == 1


@pytest.mark.parametrize("num_tokens", [None, 3])
def test_a_text_goes_on_from_a_cache_and_streams(model, num_tokens, ticks):
    ids, cache, streamer = random_ids(1, 8), LoopCache(model.config), Collect()
    with torch.no_grad():  # of fewer steps: what is deeper is seen through them
        model(ids[:, :5], past_key_values=cache, exit_policy={"name": "step_norm", "threshold": 1e9, "min_loops": 3})
    arguments = {"max_new_tokens": 12, "eos_token_id": None}
    expected = model.generate(ids, past_key_values=model_cache(model, cache), **arguments)
    if num_tokens is not None:  # which reads the whole prompt, at full depth
        expected = model.generate(ids, **arguments)
    draft = model.draft(2, num_tokens=num_tokens)
    drafted = model.generate(ids, past_key_values=cache, assistant_model=draft, streamer=streamer, **arguments)
    assert bool(ticks) == (num_tokens is None)
    assert torch.equal(drafted, expected)
    assert streamer.tokens == [*expected[0].tolist(), "end"]


def model_cache(model, cache: LoopCache) -> LoopCache:
    """A copy."""
    made = LoopCache(model.config)
    for layer, source in zip(made.layers, cache.layers, strict=True):
        for step, slot in enumerate(getattr(source, "slots", [source])):
            layer.update(slot.keys.clone(), slot.values.clone(), loop_step=step)
    made.loop_steps = cache.loop_steps
    return made


def test_what_a_pipeline_does_not_take_is_drafted_as_ever(model, ticks):
    ids, arguments = random_ids(1, 6), {"max_new_tokens": 8, "eos_token_id": None}
    policy = {"name": "step_norm", "normalize": "state", "threshold": 0.3}
    several = model_with([[1], [3]])
    for owner, draft, given in (
        (model, {"num_tokens": 3}, {}),
        (model, {"exit_policy": policy}, {}),
        (model, {}, {"exit_policy": policy}),
        (model, {}, {"num_loops": 2}),
        (model, {}, {"output_hidden_states": True, "return_dict_in_generate": True}),
        (model, {}, {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]])}),
        (several, {}, {}),
    ):
        helpers = (owner.draft(2, **draft), None)
        outputs = [owner.generate(ids, assistant_model=helper, **arguments, **given) for helper in helpers]
        drafted, plain = (output if torch.is_tensor(output) else output.sequences for output in outputs)
        assert torch.equal(drafted, plain), (draft, given)
    assert not ticks


def test_a_guess_that_is_looked_at_again_is_distributed_as_it_should_be():
    torch.manual_seed(0)
    before, after = torch.randn(5), torch.randn(5)
    count, counts = 20_000, torch.zeros(5)
    stayed = 0
    for _ in range(count):
        guess, drawn_by = choose(before, do_sample=True)
        token, drawn_by = choose(after, True, guess, drawn_by)
        counts[token] += 1
        stayed += token == guess
    assert torch.equal(drawn_by, after.softmax(-1))
    torch.testing.assert_close(counts / count, after.softmax(-1), atol=0.015, rtol=0)
    overlap = float(torch.minimum(before.softmax(-1), after.softmax(-1)).sum())
    assert stayed / count == pytest.approx(overlap, abs=0.015)


@pytest.mark.parametrize("top_k", [0, 3])
def test_sampled_texts_are_distributed_as_those_of_full_depth(top_k, ticks):
    """Of two tokens after a prompt, by what the model says of all texts that there are."""
    model = tiny_model(0.3, vocab_size=6, num_hidden_layers=1, loop_groups=[[0]], num_loops=4, hidden_size=16)
    ids, draft, runs = torch.tensor([[1, 4]]), model.draft(1), 1500
    arguments = {"do_sample": True, "top_k": top_k, "max_new_tokens": 3, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    counts = torch.zeros(6, 6)
    for _ in range(runs):
        text = model.generate(ids, assistant_model=draft, **arguments)
        counts[text[0, 3], text[0, 4]] += 1
    texts = torch.cartesian_prod(torch.arange(6), torch.arange(6), torch.arange(6))
    with torch.no_grad():
        logits = model(torch.cat([ids.expand(len(texts), 2), texts], dim=1)).logits[:, 1:4]
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -torch.inf)
    likely = logits.softmax(-1).gather(2, texts[..., None]).prod(1)[:, 0]
    expected = torch.zeros(6, 6).index_put((texts[:, 1], texts[:, 2]), likely, accumulate=True)
    spread = (expected * (1 - expected) / runs).sqrt()
    assert ((counts / runs - expected).abs() <= 4.5 * spread + 1e-6).all()
    assert max(ticks) > 1
