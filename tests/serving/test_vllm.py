"""In vLLM a checkpoint gives the tokens of `generate`, with fixed loops and with exits, whatever else is asked."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.serving.engines import (
    NEW_TOKENS,
    PROGRAMS,
    answer,
    ask,
    counter,
    make_engine,
    model_of,
    random_prompts,
    save_tiny,
)

pytestmark = pytest.mark.serve

# The first decodes, and needs the engine's head.
EXITS = [{"name": "kl", "threshold": 0.2}, {"name": "acceleration", "threshold": 0.8, "normalize": "state"}, None]
LOOPS = {
    "exact exits": {"exit_policy": EXITS, "num_loops": 6, "cache_strategy": "per_step"},
    "shared exits": {"exit_policy": EXITS, "num_loops": 6, "cache_strategy": "last_step"},
    "exact": {"exit_policy": None, "num_loops": [3, 4, 3], "cache_strategy": "per_step"},
    "shared": {"exit_policy": None, "num_loops": [3, 4, 3], "cache_strategy": "last_step"},
}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 2}
# Prompts are cut into pieces, and there is room for half of the requests only.
SMALL = {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 9}


# An engine changes its process (threads, attention), so `generate` answers before there is one.
@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = save_tiny(tmp_path_factory.mktemp("checkpoints") / "tiny")
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompts = random_prompts(model.config.vocab_size)
    expected = {name: [answer(model, prompt, **loops) for prompt in prompts] for name, loops in LOOPS.items()}
    tokens = [[tokens for tokens, _, _ in answers] for answers in expected.values()]
    assert all(tokens[i] != tokens[j] for i in range(4) for j in range(i)), "the cases must differ"
    return folder, prompts, expected


@pytest.fixture(scope="module")
def programs():
    model = AutoModelForCausalLM.from_pretrained(PROGRAMS)
    prompts = random_prompts(model.config.vocab_size, (3, 17, 9, 30))
    return prompts, [answer(model, prompt)[0] for prompt in prompts]


def check(llm, prompts, expected):
    """All together, then one after the other, when some of it may be in the engine's cache."""
    together = ask(llm, prompts)
    alone = [ask(llm, [prompt])[0] for prompt in prompts]
    for answers in (together, alone):
        for (tokens, logprobs), (right_tokens, right_logprobs, _) in zip(answers, expected, strict=True):
            assert tokens == right_tokens
            torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(right_logprobs), atol=1e-3, rtol=1e-3)


def test_exits_with_exact_slots_in_chunks_from_the_cache_and_after_preemption(tiny, programs):
    folder, prompts, expected = tiny
    llm = make_engine(folder, LOOPS["exact exits"], **SMALL)
    check(llm, prompts, expected["exact exits"])
    longest = max(range(len(prompts)), key=lambda n: len(prompts[n]))
    again = [ask(llm, [prompts[longest]])[0][0] for _ in range(2)]
    assert again == [expected["exact exits"][longest][0]] * 2
    assert counter(llm, "num_preemptions") > 0
    assert counter(llm, "prefix_cache_hits") > 0
    assert len(model_of(llm).attentions[2]) == 6


def test_exits_with_shared_slots_compute_no_text_again_and_count_their_steps(tiny, programs):
    folder, prompts, expected = tiny
    llm = make_engine(folder, LOOPS["shared exits"], max_num_batched_tokens=64, num_gpu_blocks_override=9)
    check(llm, prompts, expected["shared exits"])
    assert counter(llm, "num_preemptions") == 0
    counts = model_of(llm).step_counts
    tokens = 2 * sum(len(prompt) + NEW_TOKENS - 1 for prompt in prompts)
    steps = 2 * torch.tensor([steps for _, _, steps in expected["shared exits"]]).sum(0)
    assert counts.tokens == tokens
    assert counts.steps == steps.tolist()
    assert all(len(attentions) == 1 for attentions in model_of(llm).attentions)


@pytest.mark.parametrize("slots", ["exact", "shared"])
def test_fixed_loops(tiny, programs, slots):
    folder, prompts, expected = tiny
    check(make_engine(folder, LOOPS[slots]), prompts, expected[slots])


def test_tokens_that_left_are_not_computed(tiny, programs):
    folder, prompts, _ = tiny
    loops = {**LOOPS["exact exits"], "num_loops": 6}
    llm = make_engine(folder, loops)
    model, rows = model_of(llm), []
    for layer in (1, 2, 3):
        mlp = model.model.layers[layer].mlp
        mlp.register_forward_pre_hook(lambda mlp, inputs: rows.append(inputs[0].shape[-2]))
    before = sum(model.step_counts.steps[:1]) + 2 * model.step_counts.steps[1]
    ask(llm, prompts)
    taken = sum(model.step_counts.steps[:1]) + 2 * model.step_counts.steps[1] - before
    assert sum(rows) == taken < 18 * sum(len(prompt) + NEW_TOKENS - 1 for prompt in prompts)


def test_a_checkpoint_brings_its_policy_and_small_heads_are_filled_up(programs):
    prompts, expected = programs
    llm = make_engine(PROGRAMS, {}, max_model_len=56)
    assert [tokens for tokens, _ in ask(llm, prompts)] == expected
    assert model_of(llm).loops.is_adaptive


@pytest.mark.parametrize(
    ("loops", "settings", "message"),
    [
        ({"exit_policy": "stepnorm"}, {}, "'stepnorm' is unknown"),
        ({"num_loops": [1, 2]}, {}, "2 counts"),
        ({"cache_strategy": "first_step"}, {}, "per_step, last_step"),
        ({"cache_strategy": "last_step"}, {"max_num_batched_tokens": 32}, "max_num_batched_tokens"),
        ({"cache_strategy": "last_step"}, {"speculative_config": DRAFTS}, "speculative"),
        ({}, {"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
    ],
)
def test_what_cannot_be_right_ends_the_start_with_a_sentence(tiny, programs, loops, settings, message):
    with pytest.raises(ValueError, match=message):
        make_engine(tiny[0], loops, **settings)


def test_the_stock_backend_runs_fixed_loops_and_refuses_to_cut_prompts(tiny, programs):
    folder, prompts, expected = tiny
    stock = {"model_impl": "transformers", "trust_remote_code": True, "hf_overrides": {"num_loops": [3, 4, 3]}}
    with pytest.raises(ValueError, match="--no-enable-chunked-prefill"):
        make_engine(folder, {}, **stock)
    llm = make_engine(
        folder, {}, enable_chunked_prefill=False, enable_prefix_caching=False, enforce_eager=True, **stock
    )
    check(llm, prompts, expected["shared"])
