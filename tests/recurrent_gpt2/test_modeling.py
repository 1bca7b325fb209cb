import math

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers.cache_utils import DynamicCache

from recurrent_gpt2 import (
    AccelerationExit,
    LoopCache,
    RecurrentGPT2ForCausalLM,
    RecurrentGPT2Model,
    sample_num_loops,
)
from tests.helpers import LAYOUTS, random_ids, tiny_config, tiny_model
from tests.recurrent_gpt2.reference import logits_of

LOOPS = {"three groups": [3, 5, 4], "first and last layer": [6, 2], "one group": [5]}


def start_states(output, row):
    return [trajectory[0, row].detach() for trajectory in output.loop_trajectory]


@pytest.mark.parametrize("state_init", ["noise", "zeros", "input"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_the_reference(layout, state_init):
    model = tiny_model(loop_groups=LAYOUTS[layout], state_init=state_init)
    ids = random_ids(2, 9)
    output = model(ids, num_loops=LOOPS[layout], output_loop_trajectory=True)
    for row in range(2):
        expected = logits_of(ids[row], model.state_dict(), model.config, LOOPS[layout], start_states(output, row))
        torch.testing.assert_close(output.logits[row], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backprop_loops", [None, 1, 3, 100])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_equal_the_reference(layout, backprop_loops):
    model = tiny_model(loop_groups=LAYOUTS[layout], backprop_loops=backprop_loops).train()
    ids = random_ids(1, 8)
    output = model(ids, labels=ids, num_loops=LOOPS[layout], output_loop_trajectory=True)
    output.loss.backward()
    weights = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    logits = logits_of(ids[0], weights, model.config, LOOPS[layout], start_states(output, 0), backprop_loops)
    loss = -logits[:-1].log_softmax(-1)[torch.arange(7), ids[0, 1:]].mean()
    loss.backward()
    torch.testing.assert_close(output.loss, loss, atol=1e-5, rtol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, weights[name].grad, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: n + m
        )


def test_truncation_changes_gradients_so_the_test_above_can_fail():
    gradients = []
    for backprop_loops in (1, 3):
        model = tiny_model(backprop_loops=backprop_loops, state_init="zeros").train()
        model(random_ids(1, 8), labels=random_ids(1, 8), num_loops=5).loss.backward()
        gradients.append(model.model.loop_inputs[1].state_proj.weight.grad)
    assert (gradients[0] - gradients[1]).abs().max() > 1e-4


def test_without_groups_it_is_a_plain_gpt_of_sandwich_blocks():
    model = tiny_model(loop_groups=[])
    ids = random_ids(1, 9)
    output = model(ids, output_hidden_states=True)
    torch.testing.assert_close(output.logits[0], logits_of(ids[0], model.state_dict(), model.config, [], []))
    assert output.loop_steps.shape == (1, 9, 0)
    assert len(output.hidden_states) == 1 + 6
    assert not any("loop" in name for name in model.state_dict())


def test_steps_counted_are_those_asked():
    model = tiny_model()
    calls = dict.fromkeys(range(6), 0)
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, index=index: calls.update({index: calls[index] + 1}))
    output = model(random_ids(2, 7), num_loops=[2, 7, 1])
    assert output.loop_steps.shape == (2, 7, 3)
    assert (output.loop_steps == torch.tensor([2, 7, 1])).all()
    assert list(calls.values()) == [1, 2, 7, 7, 1, 1]
    assert (model(random_ids(2, 7)).loop_steps == 5).all()


def test_states_of_the_trajectory_are_those_of_shorter_loops():
    model = tiny_model()
    ids = random_ids(2, 6)
    trajectory = model(ids, num_loops=[4, 3, 2], output_loop_trajectory=True).loop_trajectory
    assert [tuple(states.shape) for states in trajectory] == [(5, 2, 6, 32), (4, 2, 6, 32), (3, 2, 6, 32)]
    shorter = model(ids, num_loops=[2, 1, 1], output_loop_trajectory=True).loop_trajectory
    torch.testing.assert_close(trajectory[0][:3], shorter[0])


def test_without_a_sigma_training_always_runs_the_same_loops():
    config = tiny_config(loop_sigma=None, mean_loops=4)
    assert sample_num_loops(config) == [4, 4, 4]
    with pytest.raises(StrictDataclassError, match="but must be whole"):
        tiny_config(loop_sigma=None, mean_loops=4.5)


def test_sampled_counts_follow_the_stated_distribution():
    config = tiny_config(mean_loops=12, loop_sigma=0.5)
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor([sample_num_loops(config, generator) for _ in range(20_000)]).double()
    variance = 12 + 12**2 * (math.exp(0.25) - 1)
    assert counts.min() >= 1
    for group in range(3):
        assert abs(counts[:, group].mean() - 13) < 4 * math.sqrt(variance / 20_000)
        assert abs(counts[:, group].var() / variance - 1) < 0.05
    correlations = torch.corrcoef(counts.T) - torch.eye(3)
    assert correlations.abs().max() < 0.03
    # The mixture is wider than a Poisson distribution of the same mean, and starts at 1.
    assert (tiny_counts := torch.tensor([sample_num_loops(tiny_config(mean_loops=0.01)) for _ in range(50)])).min() == 1
    assert tiny_counts.max() <= 2


def test_training_draws_counts_and_noise_afresh_and_eval_is_deterministic():
    model = tiny_model(mean_loops=12)
    ids = random_ids(1, 6)
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    drawn = {tuple(model(ids).loop_steps[0, 0].tolist()) for _ in range(8)}
    assert len(drawn) > 4
    first, second = (model(ids, num_loops=1, output_loop_trajectory=True) for _ in range(2))
    assert (first.loop_trajectory[0][0] - second.loop_trajectory[0][0]).abs().max() > 0.1
    assert (first.loop_trajectory[0][0] - first.loop_trajectory[1][0]).abs().max() > 0.1


def test_without_gradients_nothing_is_drawn_in_training_mode_either():
    """Two log-likelihoods of a text are the same, as those who compare them expect."""
    model, ids = tiny_model(), random_ids(2, 6)
    expected = model(ids)
    model.train()
    with torch.no_grad():
        for _ in range(2):
            output = model(ids)
            assert torch.equal(output.logits, expected.logits)
            assert torch.equal(output.loop_steps, expected.loop_steps)
        assert model(ids, exit_policy={"name": "step_norm", "threshold": 1e9}).loop_steps.max() == 1
    with pytest.raises(ValueError, match="`exit_policy` is for inference"):
        model(ids, exit_policy="kl")


@pytest.mark.parametrize("how", ["assign", "to_empty", "to_empty again"])
def test_a_model_made_on_the_meta_device_has_its_start_noise(how):
    model, ids = tiny_model(), random_ids(1, 6)
    if how == "to_empty again":
        other = tiny_model(seed=1)
    else:
        with torch.device("meta"):
            other = RecurrentGPT2ForCausalLM(model.config).eval()
    if how != "assign":
        other.to_empty(device="cpu")
        for noise in other.model.start_noise:
            assert noise.abs().max() > 1
    other.load_state_dict(model.state_dict(), assign=how == "assign")
    other.tie_weights()
    assert torch.equal(other(ids).logits, model(ids).logits)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("exit_policy", [None, "step_norm"])
def test_a_chunk_of_nothing_but_padding_is_nothing_to_the_rest(attention, exit_policy):
    model, ids = tiny_model(0.3, dtype=torch.float64), random_ids(2, 9)
    model.set_attn_implementation(attention)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[:, :4] = 0
    cache = LoopCache(model.config)
    chunks = []
    for start, end in ((0, 3), (3, 6), (6, 9)):
        arguments = {"attention_mask": mask[:, :end], "past_key_values": cache, "exit_policy": exit_policy}
        chunks.append(model(ids[:, start:end], **arguments))
    alone = model(ids[:, 4:], exit_policy=exit_policy)
    logits = torch.cat([chunk.logits for chunk in chunks], dim=1)[:, 4:]
    torch.testing.assert_close(logits, alone.logits, atol=1e-9, rtol=0)
    steps = torch.cat([chunk.loop_steps for chunk in chunks], dim=1)
    assert (steps[:, :4] == 0).all()
    assert torch.equal(steps[:, 4:], alone.loop_steps)


def test_start_noise_is_truncated_and_depends_on_seed_group_and_position_only():
    noise = tiny_model(max_position_embeddings=512).model.start_noise
    std = math.sqrt(2 / 5)
    assert noise.abs().max() <= 3 * std
    assert abs(noise.std() / (std * 0.9866) - 1) < 0.01  # a normal cut at 3 sigma keeps 0.9866 of its deviation
    assert not torch.equal(noise[0], noise[1])
    assert torch.equal(noise, tiny_model(max_position_embeddings=512, seed=9).model.start_noise)
    assert not torch.equal(noise, tiny_model(max_position_embeddings=512, noise_seed=1).model.start_noise)


def test_start_noise_is_the_same_with_every_version_of_pytorch():
    noise = tiny_model().model.start_noise
    torch.testing.assert_close(noise[0, 0, :3], torch.tensor([-0.7120, -0.7288, -0.1585]), atol=1e-4, rtol=0)
    torch.testing.assert_close(noise[-1, -1, :3], torch.tensor([1.0556, -0.4228, -0.0498]), atol=1e-4, rtol=0)


def test_a_mask_that_is_not_for_all_tokens_is_refused():
    model, ids = tiny_model(), random_ids(2, 12)
    cache = model(ids[:, :8]).past_key_values
    with pytest.raises(ValueError, match=r"`attention_mask` is for 4 tokens, .* 8 in the cache and 4 new"):
        model(ids[:, 8:], attention_mask=torch.ones(2, 4, dtype=torch.long), past_key_values=cache)


def test_loop_noise_is_added_at_every_step_and_is_fixed_in_eval_mode():
    model, ids = tiny_model(loop_noise=0.5), random_ids(1, 6)
    assert torch.equal(model(ids).logits, model(ids).logits)
    assert (model(ids).logits - tiny_model(loop_noise=0.0)(ids).logits).abs().max() > 1e-3
    last_steps = []
    for noise in (0.5, 0.0):
        model.config.loop_noise = noise
        model.model.loop_inputs[0].state_proj.weight.data *= 0.3  # a loop that converges, but for the noise
        states = model(ids, num_loops=30, output_loop_trajectory=True).loop_trajectory[0]
        last_steps.append((states[-1] - states[-2]).norm(dim=-1).mean())
    assert last_steps[0] > 0.1
    assert last_steps[1] < 1e-3
    model.config.loop_noise = 0.5
    model.train()
    assert not torch.equal(model(ids, num_loops=2).logits, model(ids, num_loops=2).logits)


def test_initial_weights_have_the_stated_deviations():
    model = tiny_model(hidden_size=128, vocab_size=500, mean_loops=12)
    std, cut = math.sqrt(2 / (5 * 128)), 0.9866
    assert model.config.effective_depth == 2 + 4 * 12
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            assert (weight == 1).all()
            continue
        is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
        expected = std / math.sqrt(2 * model.config.effective_depth) if is_output else std
        assert abs(weight.std() / (expected * cut) - 1) < 0.05, name
        assert weight.abs().max() <= 3 * expected * 1.0001, name
    embedded = model.model.embed_tokens.weight.std() * model.model.embedding_scale
    assert abs(embedded / (math.sqrt(2 / 5) * cut) - 1) < 0.05
    normal = tiny_model(hidden_size=128, initializer="normal", initializer_range=0.05)
    assert abs(normal.model.layers[0].mlp.down_proj.weight.std() / 0.05 - 1) < 0.05


def test_activations_at_initialisation_stay_finite_at_64_loops():
    model = tiny_model(hidden_size=128)
    output = model(random_ids(2, 20), num_loops=64, output_hidden_states=True)
    assert output.logits.isfinite().all()
    assert max(states.abs().max() for states in output.hidden_states) < 100


def test_hidden_states_and_attentions_have_one_entry_per_layer_application():
    model = tiny_model()
    model.set_attn_implementation("eager")
    ids = random_ids(2, 7)
    output = model(ids, num_loops=[2, 3, 1], output_hidden_states=True, output_attentions=True)
    applications = 2 + 2 + 2 * 3 + 1
    assert len(output.hidden_states) == applications + 1
    assert len(output.attentions) == applications
    assert all(states.shape == (2, 7, 32) for states in output.hidden_states)
    assert all(weights.shape == (2, 4, 7, 7) for weights in output.attentions)
    assert torch.equal(output.hidden_states[-1], model.model(ids, num_loops=[2, 3, 1]).last_hidden_state)


def test_chosen_hidden_states_are_counted_by_layer_applications():
    """Up to transformers 5.22 the first of those that are chosen from is the first layer's output, not its input."""
    model, ids = tiny_model(), random_ids(2, 7)
    everything = model(ids, num_loops=[2, 3, 1], output_hidden_states=True).hidden_states
    chosen = model(ids, num_loops=[2, 3, 1], output_hidden_states=[0, 2, 9]).hidden_states
    assert [index for index, states in enumerate(chosen) if states is not None] == [0, 2, 9]
    first = len(everything) - len(chosen)
    assert all(torch.equal(chosen[index], everything[first + index]) for index in (0, 2, 9))


def test_tuples_instead_of_dicts():
    model, ids = tiny_model(), random_ids(1, 5)
    loss, logits, *_ = model(ids, labels=ids, return_dict=False)
    assert torch.equal(logits, model(ids).logits)
    assert loss.ndim == 0


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_changes_nothing(attention, padding_side):
    model = tiny_model(std=0.3, dtype=torch.float64)
    model.set_attn_implementation(attention)
    texts = [random_ids(1, length, seed=length) for length in (3, 9, 6)]
    ids, mask = torch.zeros(3, 9, dtype=torch.long), torch.zeros(3, 9, dtype=torch.long)
    for row, text in enumerate(texts):
        columns = slice(9 - text.shape[1], 9) if padding_side == "left" else slice(0, text.shape[1])
        ids[row, columns], mask[row, columns] = text[0], 1
    output = model(ids, attention_mask=mask)
    for row, text in enumerate(texts):
        torch.testing.assert_close(output.logits[row][mask[row] == 1], model(text).logits[0], atol=1e-9, rtol=0)
        assert (output.loop_steps[row] == 5 * mask[row, :, None]).all()


@pytest.mark.parametrize("chunks", [[1] * 12, [11, 1], [12], [5, 1, 1, 4, 1], [2, 10], [7, 3, 2]])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cached_decoding_with_fixed_loops_equals_the_full_forward(layout, chunks):
    model = tiny_model(std=0.3, dtype=torch.float64, loop_groups=LAYOUTS[layout], num_loops=LOOPS[layout])
    ids, cache, logits = random_ids(2, 12), None, []
    with torch.no_grad():
        for chunk in ids.split(chunks, dim=1):
            output = model(chunk, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logits.append(output.logits)
        torch.testing.assert_close(torch.cat(logits, 1), model(ids, use_cache=False).logits, atol=1e-9, rtol=0)


def test_cached_decoding_keeps_gradients():
    model, ids = tiny_model(dtype=torch.float64), random_ids(1, 8)
    model(ids, use_cache=False).logits[:, 5:].sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    cache = model(ids[:, :5], use_cache=True).past_key_values
    model(ids[:, 5:], past_key_values=cache).logits.sum().backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)


def test_4d_masks_and_embeddings_give_what_2d_masks_and_ids_give():
    model, ids = tiny_model(), random_ids(2, 6)
    expected = model(ids).logits
    causal = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    torch.testing.assert_close(model(ids, attention_mask=causal).logits, expected)
    torch.testing.assert_close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, expected)
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, expected[:, -2:])
    torch.testing.assert_close(model(ids, position_ids=torch.arange(6)[None]).logits, expected)


@pytest.mark.parametrize("attention", ["eager", "flex_attention"])
def test_attention_kernels_agree(attention):
    model, ids = tiny_model(std=0.1, hidden_size=64), random_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    expected = model(ids).logits, model(ids, attention_mask=mask).logits[mask == 1]
    model.set_attn_implementation(attention)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(model(ids, attention_mask=mask).logits[mask == 1], expected[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(use_reentrant):
    model, ids = tiny_model(state_init="zeros").train(), random_ids(2, 8)
    model(ids, labels=ids, num_loops=5).loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model(ids, labels=ids, num_loops=5).loss.backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)


def test_the_head_is_tied_to_the_embedding_unless_told_otherwise():
    model = tiny_model()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    untied = tiny_model(tie_word_embeddings=False)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_a_text_longer_than_the_positions_is_a_clear_error():
    model = tiny_model()
    with pytest.raises(ValueError, match=r"49 tokens.*positions for 48"):
        model(random_ids(1, 49))
    for position in (-1, 48):
        with pytest.raises(ValueError, match=r"position_ids.*positions for 48"):
            model(random_ids(1, 1), position_ids=torch.tensor([[position]]))
    cache = model(random_ids(1, 48)).past_key_values
    with pytest.raises(ValueError, match=r"max_position_embeddings"):
        model(random_ids(1, 1), past_key_values=cache)
    padded = torch.cat([torch.zeros(1, 10), torch.ones(1, 48)], dim=1).long()
    assert model(random_ids(1, 58), attention_mask=padded).logits.isfinite().all()


def test_wrong_arguments_are_clear_errors():
    model, ids = tiny_model(), random_ids(1, 4)
    with pytest.raises(ValueError, match="exactly one"):
        model(ids, inputs_embeds=torch.zeros(1, 4, 32))
    with pytest.raises(ValueError, match="exactly one"):
        model()
    for num_loops in (0, [1, 2], -3, 2.5, [1, 1, 0]):
        with pytest.raises(ValueError, match="num_loops"):
            model(ids, num_loops=num_loops)
    for shape in ((1, 0), (0, 4)):
        with pytest.raises(ValueError, match=r"row\(s\) of . tokens"):
            model(torch.zeros(shape, dtype=torch.long))
    with pytest.raises(ValueError, match=r"DynamicCache.*LoopCache\(model.config\)"):
        model(ids, past_key_values=DynamicCache())
    model.train()
    with pytest.raises(ValueError, match="inference"):
        model(ids, exit_policy=AccelerationExit())


def test_padding_in_training_is_left_out_of_loss_and_steps():
    model = tiny_model(dtype=torch.float64, state_init="zeros").train()
    ids, mask = random_ids(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[0, 5:] = 0
    output = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), num_loops=3)
    assert torch.equal(output.loop_steps, 3 * mask[..., None].expand(-1, -1, 3))
    logits = torch.cat([model(ids[:1, :5], num_loops=3).logits[0, :-1], model(ids[1:], num_loops=3).logits[0, :-1]])
    targets = torch.cat([ids[0, 1:5], ids[1, 1:]])
    torch.testing.assert_close(
        output.loss.double(), torch.nn.functional.cross_entropy(logits, targets), atol=1e-6, rtol=0
    )


def test_the_base_model_alone():
    base = RecurrentGPT2Model(tiny_config()).eval()
    output = base(random_ids(2, 5))
    assert output.last_hidden_state.shape == (2, 5, 32)
    with pytest.raises(ValueError, match="RecurrentGPT2ForCausalLM"):
        base(random_ids(2, 5), exit_policy="kl")
