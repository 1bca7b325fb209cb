"""The losses by which tokens move, in doubt, until their answer stands, and rest from then on."""

import math

import pytest
import torch

import training.train
from tests.training.tasks.test_feed import task_run
from training.tasks.rest import MARGIN, answers_of, doubt_loss, rest_loss
from training.tasks.task import NO_ANSWER

RIGHT, WRONG = 5, 6
ONE_LOOPED = {"num_hidden_layers": 1, "loop_groups": "[[0]]"}


def walk(*lengths: float) -> torch.Tensor:
    """States [K + 1, 1, 2, 2] of two tokens, the first of which takes relative steps of these lengths, on a circle."""
    angles = torch.tensor([0.0, *(2 * torch.asin(torch.tensor(length / 2)) for length in lengths)]).cumsum(0)
    first = torch.stack([angles.cos(), angles.sin()], -1)
    return torch.stack([first, torch.ones_like(first)], 1)[:, None]


def loss_of(states: torch.Tensor, *said: int, answer: int = RIGHT, delay: int = 1) -> float:
    says = torch.tensor([[[token, RIGHT]] for token in said])
    labels = torch.tensor([[NO_ANSWER, answer]])  # the second place has the label of the first
    return rest_loss(states, says, answers_of(labels), delay).item()


def test_long_steps_cost_nothing_until_the_answer_stands_and_one_step_more():
    assert loss_of(walk(0.9, 0.8, 0.8, 0.8, 0.0), WRONG, WRONG, RIGHT, RIGHT, RIGHT) == pytest.approx(0, abs=1e-6)


def test_a_token_that_stands_still_before_it_has_its_answer_pays():
    waits = loss_of(walk(0.9, 0.0, 0.8, 0.8, 0.0), WRONG, WRONG, RIGHT, RIGHT, RIGHT)
    assert waits == pytest.approx(MARGIN / 2, abs=1e-6)  # one of the two steps after the first that it needs


def test_a_token_that_moves_after_its_answer_stands_pays():
    # Two tokens rest: at the last step the first, at steps 3 to 5 the second, which is asked for nothing.
    assert loss_of(walk(0.9, 0.8, 0.8, 0.8, 0.4), WRONG, WRONG, RIGHT, RIGHT, RIGHT) == pytest.approx(0.4 / 4, abs=1e-6)


def test_without_a_delay_the_step_after_the_last_needed_one_is_to_be_short():
    states, says = walk(0.9, 0.8, 0.8, 0.4, 0.0), (WRONG, WRONG, RIGHT, RIGHT, RIGHT)
    assert loss_of(states, *says) == pytest.approx(0, abs=1e-6)
    # The first token rests at steps 4 and 5, the second, which is asked for nothing, at steps 2 to 5.
    assert loss_of(states, *says, delay=0) == pytest.approx(0.4 / 6, abs=1e-6)


def test_an_answer_that_is_lost_again_does_not_stand():
    still_searching = loss_of(walk(0.9, 0.8, 0.8, 0.8, 0.8), RIGHT, RIGHT, WRONG, WRONG, RIGHT)
    assert still_searching == pytest.approx(0, abs=1e-6)


def test_tokens_that_are_asked_for_nothing_rest_after_two_steps():
    assert loss_of(walk(0.9, 0.8, 0.0, 0.0, 0.0), *[WRONG] * 5, answer=NO_ANSWER) == pytest.approx(0, abs=1e-6)
    assert loss_of(walk(0.9, 0.8, 0.6, 0.0, 0.0), *[WRONG] * 5, answer=NO_ANSWER) == pytest.approx(0.1, abs=1e-6)


def test_who_does_not_know_does_best_in_doubt():
    """Over tokens whose answers are any of four, as likely each, until the second step brings them."""
    answers = torch.arange(4)
    knows = 20.0 * torch.eye(4)
    guesses, doubts = 20.0 * torch.eye(4).roll(1, 0), torch.zeros(4, 4)
    of_guessing, of_doubting = (doubt_loss(torch.stack([first, knows]), answers).item() for first in (guesses, doubts))
    assert of_doubting == pytest.approx(math.log(4) / 2, abs=1e-6)
    assert of_guessing == pytest.approx(10, abs=1e-3)
    assert doubt_loss(torch.zeros(2, 0, 4), answers[:0]) == 0  # nothing is asked


@pytest.mark.parametrize("name", ["rest_weight", "doubt_weight"])
def test_training_with_it_moves_the_weights_and_repeats_itself(tmp_path, name):
    fields = {"max_steps": 6, "save_strategy": "no", "backprop_loops": "null", **ONE_LOOPED}
    weights = [
        training.train.main(task_run(tmp_path, run, **fields, **{name: weight})).model.state_dict()["lm_head.weight"]
        for run, weight in (("once", 0.5), ("again", 0.5), ("without", 0.0))
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_what_both_add_is_the_sum_of_what_each_adds(tmp_path):
    fields = {"max_steps": 1, "save_strategy": "no", **ONE_LOOPED}
    trainer = training.train.main(task_run(tmp_path, "run", **fields))
    states, labels = torch.randn(4, 2, 7, trainer.model.config.hidden_size), torch.randint(5, (2, 7))
    labels[:, :3] = NO_ANSWER

    def added(rest: float, doubt: float) -> float:
        trainer.args.rest_weight, trainer.args.doubt_weight = rest, doubt
        return trainer._loss_of_steps(states, labels).item()

    assert added(0.3, 0.2) == pytest.approx(added(0.3, 0.0) + added(0.0, 0.2), rel=1e-5)
    every_step = trainer.model.decode_states(states[1:, :, :-1])  # the last place has no answer
    losses = [trainer.model.loss_function(torch.nn.functional.pad(step, (0, 0, 0, 1)), labels, step.shape[-1])
              for step in every_step]  # fmt: skip
    assert added(0.0, 1.0) == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rest_weight": -1}, "`rest_weight` is -1, but must be a number of at least 0"),
        ({"doubt_weight": "much"}, "`doubt_weight` is 'much', but must be a number"),
        ({"rest_delay": -1}, "`rest_delay` is -1, but must be an int of at least 0"),
        ({"rest_weight": 0.1, "loop_groups": "[[0], [1]]"}, "`rest_weight` needs one loop group at the end"),
        ({"doubt_weight": 0.1, "loop_groups": "[[0]]"}, "`doubt_weight` needs one loop group at the end"),
        (
            {"doubt_weight": 0.1, "backprop_loops": 2, **ONE_LOOPED},
            r"`doubt_weight` needs gradients through all loops, .* is 2",
        ),
    ],
)
def test_bad_settings_are_a_sentence(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        training.train.main(task_run(tmp_path, "bad", **fields))
