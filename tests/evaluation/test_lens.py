import pytest
import torch

from evaluation import lens
from evaluation.baselines import take_steps
from evaluation.lens import logit_lens, look_at_token
from recurrent_gpt2 import KLExit, StepNormExit
from tests.helpers import ROOT, random_ids, tiny_model

LOOPS = [3, 5, 4]


@pytest.fixture(scope="module")
def model():
    return tiny_model(0.3, torch.float64)


@pytest.mark.parametrize("policy", [None, StepNormExit(3.0), KLExit(0.3), [None, StepNormExit(3.0), KLExit(0.3)]])
def test_copies_say_what_the_model_says_of_a_token_that_leaves_there(model, policy):
    """Against a pass for every step, in which nothing but that token's steps in that group is forced."""
    ids, place = random_ids(1, 9), 6
    seen = look_at_token(model, ids[0], place, policy, LOOPS)
    plain = model(ids, num_loops=LOOPS, exit_policy=policy)
    assert seen.steps == plain.loop_steps[0, place].tolist()
    for group, count in enumerate(LOOPS):
        at_exit = seen.leave[group][seen.steps[group] - 1]
        assert torch.allclose(at_exit, plain.logits[0, place].float().log_softmax(-1), atol=1e-5)
        if group == len(LOOPS) - 1:  # no later group, whose steps a policy would choose anew
            for step in range(1, count + 1):
                steps = plain.loop_steps.clone()
                steps[0, place, group] = step
                forced = model(ids, num_loops=LOOPS, exit_policy=take_steps(steps.numpy())).logits[0, place]
                assert torch.allclose(seen.leave[group][step - 1], forced.float().log_softmax(-1), atol=1e-5)


def test_a_lens_reads_the_states_of_the_loop(model):
    ids, place = random_ids(1, 9), 6
    seen = look_at_token(model, ids[0], place, None, LOOPS)
    with torch.no_grad():
        trajectory = model(ids, num_loops=LOOPS, output_loop_trajectory=True).loop_trajectory
        for group, states in enumerate(trajectory):
            assert torch.allclose(seen.states[group], states[:, 0, place], atol=1e-9)
            said = model.decode_states(states[1:, 0, place]).float().log_softmax(-1)
            assert torch.allclose(seen.head[group], said, atol=1e-5)


def test_what_follows_the_token_has_no_influence(model):
    ids = random_ids(1, 9)[0]
    whole, cut = (look_at_token(model, some, 5, StepNormExit(3.0), LOOPS) for some in (ids, ids[:6]))
    assert all(torch.equal(a, b) for a, b in zip(whole.leave, cut.leave, strict=True))


def test_the_table_has_every_step_and_says_which_were_taken(tokenizer):
    model = tiny_model(0.3)
    policy = StepNormExit(3.0)
    table = logit_lens(model, tokenizer, "abcdef", exit_policy=policy, num_loops=LOOPS, top=2, reading="leave")
    assert len(table) == 2 * sum(LOOPS)
    ids = tokenizer("abcdef", return_tensors="pt").input_ids
    with torch.no_grad():
        output = model(ids, exit_policy=policy, num_loops=LOOPS)
    best = tokenizer.decode(output.logits[0, -1].argmax())
    for group, steps in enumerate(output.loop_steps[0, -1].tolist()):
        of_group = table[(table.group == group) & (table["rank"] == 0)]
        assert of_group.taken.sum() == steps
        assert of_group[of_group.step == steps].token.item() == best
    assert (table.groupby(["group", "step"]).probability.sum() <= 1.000001).all()


def test_where_the_only_group_ends_the_network_both_readings_agree():
    model = tiny_model(0.3, torch.float64, loop_groups=[[4, 5]])
    seen = look_at_token(model, random_ids(1, 7)[0], 6, None, [4])
    assert torch.allclose(seen.head[0], seen.leave[0], atol=1e-5)


def test_a_program_of_the_shipped_checkpoint_is_known_after_as_many_loops_as_it_needs(capsys):
    checkpoint = str(ROOT / "checkpoints/recurrent-gpt2-programs")
    program = "x0 = 3\nx1 = 5\nx2 = x0 + x1\nx3 = x2 + x1\nx4 = x3 + x3\nx5 = x4 + x3\nx6 = x5 + x4\n"
    lens.main([checkpoint, "--text", program, "--top", "1"])
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == 24
    assert not all("' 2'" in line for line in lines[:4])  # x6 needs five loops
    assert all("' 2'" in line for line in lines[6:])


def test_bad_arguments_are_named(model, tokenizer):
    with pytest.raises(ValueError, match="`token` is 9, but the text has 3 tokens"):
        logit_lens(model, tokenizer, "abc", token=9)
    with pytest.raises(ValueError, match="`reading` is 'tuned'"):
        logit_lens(model, tokenizer, "abc", reading="tuned")
    with pytest.raises(ValueError, match="`top` is 0"):
        logit_lens(model, tokenizer, "abc", top=0)
