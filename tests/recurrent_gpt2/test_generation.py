import copy
import json

import pytest
import torch
from transformers import GenerationConfig, TextIteratorStreamer

from recurrent_gpt2 import (
    AccelerationExit,
    LoopCache,
    RecurrentGPT2ForCausalLM,
    StepNormExit,
    generation_recurrent_gpt2,
)
from tests.helpers import Collect, random_ids, run_fresh, tiny_model

POLICY = StepNormExit(2.5)
POLICIES = [None, POLICY, AccelerationExit(4.0), {"name": "kl", "threshold": 0.05}, [POLICY, None, "acceleration"]]


@pytest.fixture(scope="module")
def model():
    model = tiny_model(0.3, torch.float64, num_loops=6)
    model.generation_config.pad_token_id = 0
    return model


def greedy_by_hand(model, ids, new_tokens, **arguments):
    """Without a cache and without `generate`."""
    with torch.no_grad():
        for _ in range(new_tokens):
            output = model(ids, use_cache=False, **arguments)
            ids = torch.cat([ids, output.logits[:, -1:].argmax(-1)], dim=1)
    return ids


@pytest.mark.parametrize("exit_policy", POLICIES, ids=repr)
def test_greedy(model, exit_policy):
    ids = random_ids(3, 6)
    output = model.generate(ids, max_new_tokens=8, exit_policy=exit_policy, return_dict_in_generate=True)
    assert torch.equal(output.sequences, greedy_by_hand(model, ids, 8, exit_policy=exit_policy))
    scored = model(output.sequences[:, :-1], exit_policy=exit_policy)
    assert torch.equal(output.loop_steps, scored.loop_steps)
    without_cache = model.generate(
        ids, max_new_tokens=8, exit_policy=exit_policy, use_cache=False, return_dict_in_generate=True
    )
    assert torch.equal(without_cache.sequences, output.sequences)
    assert torch.equal(without_cache.loop_steps, output.loop_steps)


def test_loop_counts_are_the_cap(model):
    ids = random_ids(2, 5)
    output = model.generate(ids, max_new_tokens=4, num_loops=[1, 2, 3], return_dict_in_generate=True)
    assert (output.loop_steps == torch.tensor([1, 2, 3])).all()
    assert torch.equal(output.sequences, greedy_by_hand(model, ids, 4, num_loops=[1, 2, 3]))
    capped = model.generate(ids, max_new_tokens=4, num_loops=3, exit_policy=POLICY, return_dict_in_generate=True)
    assert capped.loop_steps.max() == 3
    for num_loops in (0, [1, 2], "many"):
        with pytest.raises(ValueError, match="num_loops"):
            model.generate(ids, num_loops=num_loops)


def test_sampling_and_several_sequences(model):
    ids, arguments = random_ids(2, 5), {"max_new_tokens": 6, "do_sample": True, "num_return_sequences": 3}
    results = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        results.append(
            model.generate(ids, exit_policy=POLICY, use_cache=use_cache, return_dict_in_generate=True, **arguments)
        )
    assert results[0].sequences.shape == (6, 11)
    assert len({tuple(row) for row in results[0].sequences[:3].tolist()}) > 1
    assert torch.equal(results[0].sequences, results[1].sequences)
    assert torch.equal(results[0].loop_steps, results[1].loop_steps)


@pytest.mark.parametrize("exit_policy", POLICIES, ids=repr)
def test_beam_search_returns_the_steps_of_the_returned_texts(model, exit_policy):
    ids = random_ids(2, 5)
    arguments = {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 7, "return_dict_in_generate": True}
    cached = model.generate(ids, exit_policy=exit_policy, **arguments)
    plain = model.generate(ids, exit_policy=exit_policy, use_cache=False, **arguments)
    assert torch.equal(cached.sequences, plain.sequences)
    scored = model(cached.sequences[:, :-1], exit_policy=exit_policy)
    assert torch.equal(cached.loop_steps, scored.loop_steps)
    last_step = model.generate(ids, exit_policy=POLICY, cache_strategy="last_step", **arguments)
    assert "loop_steps" not in last_step  # its rows are the running beams: not at all, rather than of another beam


def test_beam_search_with_padding(model):
    ids, mask = random_ids(2, 6), torch.ones(2, 6, dtype=torch.long)
    ids[0, :3], mask[0, :3] = 0, 0
    arguments = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 5, "return_dict_in_generate": True}
    batch = model.generate(ids, attention_mask=mask, exit_policy=POLICY, **arguments)
    alone = model.generate(ids[:1, 3:], exit_policy=POLICY, **arguments)
    assert torch.equal(batch.sequences[:2, 3:], alone.sequences)
    assert torch.equal(batch.loop_steps[:2, 3:], alone.loop_steps)
    assert (batch.loop_steps[:2, :3] == 0).all()


@pytest.mark.parametrize("exit_policy", POLICIES, ids=repr)
def test_assisted_decoding_and_prompt_lookup_give_the_tokens_of_greedy(model, exit_policy):
    ids = random_ids(1, 6).repeat(1, 2)  # a text with something to look up
    arguments = {"max_new_tokens": 12, "exit_policy": exit_policy, "return_dict_in_generate": True}
    greedy = model.generate(ids, **arguments)
    for helper in ({"assistant_model": model.draft(2)}, {"prompt_lookup_num_tokens": 3}):
        output = model.generate(ids, **arguments, **helper)
        assert torch.equal(output.sequences, greedy.sequences)
        assert torch.equal(output.loop_steps, greedy.loop_steps)


def test_a_draft_has_its_own_loops_and_shares_the_weights(model):
    draft = model.draft(2)
    assert draft.model is model.model
    ids = random_ids(1, 5)
    assert (draft.generate(ids, max_new_tokens=3, return_dict_in_generate=True).loop_steps == 2).all()
    assert (model.generate(ids, max_new_tokens=3, return_dict_in_generate=True).loop_steps == 6).all()
    steps = []
    hook = model.model.layers[1].register_forward_hook(lambda *_: steps.append(1))
    model.generate(ids, max_new_tokens=1, exit_policy=POLICY, num_loops=5, assistant_model=draft)
    hook.remove()
    assert len(steps) < 5 * 5  # the draft did not inherit the loops of the call


def test_a_draft_has_as_many_tokens_as_it_is_told():
    model = tiny_model()
    assert model.draft(2, num_tokens=7).generation_config.num_assistant_tokens == 7
    for given in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match=rf"`num_tokens` is {given}"):
            model.draft(2, num_tokens=given)


def test_left_padded_batches(model):
    texts = [random_ids(1, length, seed=length) for length in (2, 7, 4)]
    ids, mask = torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, 7, dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, 7 - text.shape[1] :], mask[row, 7 - text.shape[1] :] = text[0], 1
    arguments = {"max_new_tokens": 6, "exit_policy": POLICY, "return_dict_in_generate": True}
    batch = model.generate(ids, attention_mask=mask, **arguments)
    for row, text in enumerate(texts):
        alone = model.generate(text, **arguments)
        start = 7 - text.shape[1]
        assert torch.equal(batch.sequences[row, start:], alone.sequences[0])
        assert torch.equal(batch.loop_steps[row, start:], alone.loop_steps[0])
        assert (batch.loop_steps[row, :start] == 0).all()


def test_padding_behind_the_end_of_a_text_has_no_steps(model):
    ids = random_ids(3, 5, seed=3)
    free = model.generate(ids, max_new_tokens=6, eos_token_id=None)
    end = int(free[0, 6])  # the second new token of the first row ends a text
    arguments = {"max_new_tokens": 6, "eos_token_id": end, "return_dict_in_generate": True}
    for beams in (1, 2):
        output = model.generate(ids, num_beams=beams, exit_policy=POLICY, **arguments)
        for row, tokens in enumerate(output.sequences.tolist()):
            ends = [place for place, token in enumerate(tokens) if place >= 5 and token == end]
            last = ends[0] if ends else len(tokens) - 1
            assert (output.loop_steps[row, : last + 1] >= 1).all()
            assert (output.loop_steps[row, last + 1 :] == 0).all()


def test_streamers_and_stop_strings(model, tokenizer):
    ids, streamer = random_ids(1, 5), Collect()
    output = model.generate(ids, max_new_tokens=6, exit_policy=POLICY, streamer=streamer)
    assert streamer.tokens == [*output[0].tolist(), "end"]
    text_streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    model.generate(ids, max_new_tokens=6, exit_policy=POLICY, streamer=text_streamer)
    assert "".join(text_streamer).split() == tokenizer.decode(output[0, 5:]).split()
    stop = tokenizer.decode(output[0, 5:7])
    stopped = model.generate(ids, max_new_tokens=6, exit_policy=POLICY, stop_strings=[stop], tokenizer=tokenizer)
    assert torch.equal(stopped, output[:, :7])


def test_generation_up_to_the_last_position_and_not_beyond(model, caplog):
    ids = random_ids(1, 40)
    full = model.generate(ids, max_length=49, exit_policy=POLICY, eos_token_id=None)  # the 49th token is not fed back
    assert full.shape == (1, 49)
    assert torch.equal(model.generate(ids, max_length=48, exit_policy=POLICY, eos_token_id=None), full[:, :48])
    assert not caplog.records
    assert torch.equal(model.generate(ids, max_new_tokens=100, exit_policy=POLICY, eos_token_id=None), full)
    with pytest.raises(ValueError, match="positions for 48"):
        model.generate(random_ids(1, 60), max_new_tokens=2)
    for helper in ({"prompt_lookup_num_tokens": 5}, {"assistant_model": model.draft(2)}, {"num_beams": 2}):
        longest = model.generate(ids, max_new_tokens=100, exit_policy=POLICY, eos_token_id=None, **helper)
        assert longest.shape == (1, 49)
        assert "num_beams" in helper or torch.equal(longest, full)


def test_static_caches_take_fixed_loops(model):
    ids = random_ids(2, 5)
    for arguments in ({}, {"num_loops": [1, 3, 2]}, {"num_beams": 3}):
        static = model.generate(ids, max_new_tokens=6, cache_implementation="static", **arguments)
        assert torch.equal(static, model.generate(ids, max_new_tokens=6, **arguments))
    output = model.generate(ids, max_new_tokens=3, cache_implementation="static", return_dict_in_generate=True)
    assert (output.loop_steps == 6).all()
    assert output.loop_steps.shape == (2, 7, 3)
    with pytest.raises(ValueError, match="fixed loops only"):
        model.generate(ids, max_new_tokens=2, cache_implementation="static", exit_policy=POLICY)


def test_a_shorter_text_takes_a_static_cache_of_the_length_before(model):
    """So that compiled code need not be compiled again."""
    ids, arguments = random_ids(1, 5), {"cache_implementation": "static", "return_dict_in_generate": True}
    lengths = [
        model.generate(ids, max_new_tokens=new, **arguments).past_key_values.layers[0].max_cache_len for new in (9, 4)
    ]
    assert lengths[0] == lengths[1] >= 13


@pytest.mark.parametrize("name", ["paged", "quantized", "offloaded", "offloaded_static"])
def test_caches_that_cannot_be_right_are_refused(model, name):
    with pytest.raises(ValueError, match="no slots for loop steps"):
        model.generate(random_ids(1, 3), cache_implementation=name)
    with pytest.raises(ValueError, match="no slots for loop steps"):
        model.generate(random_ids(1, 3), generation_config=GenerationConfig(cache_implementation=name))
    with pytest.raises(ValueError, match="no slots for loop steps"):
        model.generate_batch([[1, 2, 3]])


def test_a_cache_of_ones_own_continues_a_conversation(model):
    ids = random_ids(1, 6)
    cache = LoopCache(model.config)
    first = model.generate(ids, max_new_tokens=3, past_key_values=cache, exit_policy=POLICY, eos_token_id=None)
    longer = torch.cat([first, random_ids(1, 4, seed=5)], dim=1)
    second = model.generate(
        longer, max_new_tokens=3, past_key_values=cache, exit_policy=POLICY, eos_token_id=None,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert torch.equal(
        second.sequences, model.generate(longer, max_new_tokens=3, exit_policy=POLICY, eos_token_id=None)
    )
    assert torch.equal(second.loop_steps, model(second.sequences[:, :-1], exit_policy=POLICY).loop_steps)


def test_cache_strategy_from_argument_and_config(model):
    ids = random_ids(1, 6)
    arguments = {"max_new_tokens": 5, "return_dict_in_generate": True}
    assert model.generate(ids, **arguments).past_key_values.cache_strategy == "per_step"
    output = model.generate(ids, cache_strategy="last_step", **arguments)
    assert output.past_key_values.cache_strategy == "last_step"
    assert output.past_key_values.num_bytes() == 6 * 10 * 32 * 2 * 8
    small = tiny_model(cache_strategy="last_step")
    assert small.generate(ids, **arguments).past_key_values.cache_strategy == "last_step"
    for arguments in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        with pytest.raises(ValueError, match="per_step, last_step"):
            model.generate(ids, cache_strategy="no_step", **arguments)
    for wants_last_step, arguments in ((model, {"cache_strategy": "last_step"}), (small, {})):
        with pytest.raises(ValueError, match="a slot per loop step"):
            wants_last_step.generate(ids, cache_implementation="static", **arguments)
    assert small.generate(ids, cache_implementation="static", cache_strategy="per_step", max_new_tokens=2).shape == (
        1,
        8,
    )


@pytest.mark.parametrize(
    "policy", [POLICY, "acceleration", {"name": "kl", "threshold": 0.05}, [POLICY, None, "kl"]], ids=repr
)
def test_a_policy_in_the_generation_config_is_the_default_and_survives_saving(tmp_path, policy):
    model, ids = tiny_model(0.3, torch.float64, num_loops=6), random_ids(1, 6)
    model.generation_config.exit_policy = policy
    model.generation_config.num_loops = [6, 5, 4]
    model.save_pretrained(tmp_path)
    assert '_from_model_config": true' not in (tmp_path / "generation_config.json").read_text()
    loaded = RecurrentGPT2ForCausalLM.from_pretrained(tmp_path)
    arguments = {"max_new_tokens": 4, "return_dict_in_generate": True}
    expected = model.generate(ids, exit_policy=policy, num_loops=[6, 5, 4], **arguments)
    assert expected.loop_steps.max() <= 6
    for some_model in (model, loaded):
        output = some_model.generate(ids, **arguments)
        assert torch.equal(output.sequences, expected.sequences)
        assert torch.equal(output.loop_steps, expected.loop_steps)
        assert (some_model.generate(ids, exit_policy=None, **arguments).loop_steps == torch.tensor([6, 5, 4])).all()
        assert (some_model.generate(ids, exit_policy=None, num_loops=2, **arguments).loop_steps == 2).all()
    by_config = GenerationConfig(exit_policy={"name": "step_norm", "threshold": 1e9}, max_new_tokens=4)
    output = loaded.generate(ids, generation_config=by_config, return_dict_in_generate=True)
    assert (output.loop_steps == 1).all()


def test_a_saved_policy_is_active_by_remote_code_in_a_fresh_process(tmp_path):
    model, ids = tiny_model(0.3, torch.float64, num_loops=6), random_ids(1, 6)
    model.generation_config.exit_policy = POLICY
    model.save_pretrained(tmp_path / "checkpoint")
    printed = run_fresh(
        f"""
import torch, json
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("checkpoint", trust_remote_code=True)
output = model.generate(torch.tensor({ids.tolist()}), max_new_tokens=4, return_dict_in_generate=True)
print(json.dumps([output.sequences.tolist(), output.loop_steps.tolist()]))
""",
        tmp_path,
    )
    expected = model.generate(ids, max_new_tokens=4, return_dict_in_generate=True)
    assert json.loads(printed.splitlines()[-1]) == [expected.sequences.tolist(), expected.loop_steps.tolist()]
    assert expected.loop_steps.min() < 6


def test_a_callable_works_in_generate_and_cannot_be_saved(tmp_path, model):
    ids = random_ids(1, 4)

    def after_two(view):
        return torch.full((view.state.shape[0],), view.step >= 1)

    output = model.generate(ids, max_new_tokens=3, exit_policy=after_two, return_dict_in_generate=True)
    assert (output.loop_steps == 2).all()
    saved = tiny_model()
    saved.generation_config.exit_policy = after_two
    with pytest.raises(ValueError, match="cannot be saved"):
        saved.save_pretrained(tmp_path)
    saved.generation_config.exit_policy = {"name": "nonsense"}
    with pytest.raises(ValueError, match="unknown"):
        saved.save_pretrained(tmp_path)


def test_prompts_given_as_embeddings(model):
    ids = random_ids(2, 5)
    expected = model.generate(ids, max_new_tokens=4, exit_policy=POLICY, return_dict_in_generate=True)
    output = model.generate(
        inputs_embeds=model.get_input_embeddings()(ids),
        max_new_tokens=4,
        exit_policy=POLICY,
        return_dict_in_generate=True,
    )
    assert torch.equal(output.sequences, expected.sequences[:, 5:])
    assert torch.equal(output.loop_steps, expected.loop_steps)


def test_padding_behind_the_end_has_no_steps_after_embeddings_either(model):
    arguments = {"max_new_tokens": 6, "exit_policy": POLICY, "return_dict_in_generate": True}
    compared = 0
    for seed in range(6):
        ids = random_ids(3, 5, seed=seed)
        end = int(model.generate(ids, eos_token_id=None, **arguments).sequences[0, 6])
        expected = model.generate(ids, eos_token_id=end, **arguments)
        embeddings = model.get_input_embeddings()(ids)
        output = model.generate(inputs_embeds=embeddings, eos_token_id=end, **arguments)
        assert torch.equal(output.loop_steps, expected.loop_steps)
        compared += int((expected.loop_steps == 0).any())
    assert compared > 0  # some row ended before the others


def test_what_would_break_the_loops_is_refused(model, monkeypatch):
    ids = random_ids(1, 4)
    in_config = copy.deepcopy(model.generation_config)
    in_config.assistant_early_exit = 2
    for arguments in ({"assistant_early_exit": 2}, {"generation_config": in_config}):
        with pytest.raises(ValueError, match=r"`assistant_early_exit`.*draft"):
            model.generate(ids, max_new_tokens=2, **arguments)
        assert model.config.num_hidden_layers == tiny_model().config.num_hidden_layers
    assert model.generate(ids, max_new_tokens=2).shape == (1, 6)
    monkeypatch.setattr(generation_recurrent_gpt2, "is_fsdp_managed_module", lambda module: True)
    with pytest.raises(ValueError, match=r"`exit_policy`.*FSDP"):
        model.generate(ids, max_new_tokens=2, exit_policy="acceleration")


def test_one_token_that_leaves_takes_no_more_than_its_steps(model):
    applied = []
    hook = model.model.layers[model.config.loop_groups[0][0]].register_forward_hook(lambda *_: applied.append(1))
    output = model(random_ids(1, 1), exit_policy=[StepNormExit(1e6), None, None])
    hook.remove()
    assert output.loop_steps.tolist() == [[[1, 6, 6]]]
    assert len(applied) == 1


@pytest.mark.parametrize("loops", [{"num_loops": 2}, {"exit_policy": POLICY}, {"exit_policy": POLICY, "num_loops": 3}])
def test_guidance_runs_both_branches_with_the_loops_of_the_call(model, loops):
    ids, scale, new = random_ids(1, 5), 1.7, 4
    output = model.generate(ids, max_new_tokens=new, guidance_scale=scale, do_sample=False, **loops)
    expected = ids
    for _ in range(new):
        given, free = (model(t, **loops).logits[:, -1].log_softmax(-1) for t in (expected, expected[:, 4:]))
        expected = torch.cat([expected, (scale * (given - free) + free).argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(output, expected)


def test_generation_in_training_mode_is_that_of_eval_mode(model):
    """As trainers that sample from the model in training do it."""
    ids = random_ids(2, 5)
    for arguments in ({}, {"exit_policy": POLICY}):
        expected = model.generate(ids, max_new_tokens=8, return_dict_in_generate=True, **arguments)
        model.train()
        try:
            output = model.generate(ids, max_new_tokens=8, return_dict_in_generate=True, **arguments)
        finally:
            model.eval()
        assert torch.equal(output.sequences, expected.sequences)
        assert torch.equal(output.loop_steps, expected.loop_steps)


def test_a_prompt_of_nothing_is_a_clear_error(model):
    for shape in ((1, 0), (0, 4)):
        with pytest.raises(ValueError, match=r"`input_ids` has \d row\(s\) of \d tokens"):
            model.generate(torch.zeros(shape, dtype=torch.long), max_new_tokens=2)


def test_right_padded_prompts_are_warned_of_and_give_the_same_with_both_caches(model, caplog):
    """What comes out is of little use, as of every model: the next token is read from a padding position."""
    ids, mask = random_ids(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0
    arguments = {"attention_mask": mask, "max_new_tokens": 5, "pad_token_id": 0, "output_logits": True}
    logits = []
    for kind in (None, "static"):
        caplog.clear()
        output = model.generate(ids, cache_implementation=kind, return_dict_in_generate=True, **arguments)
        logits.append(torch.stack(output.logits))
        assert "right-padding" in caplog.text
    torch.testing.assert_close(*logits)
