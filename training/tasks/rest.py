"""A loss that makes loops tell when they are done: a token moves until its answer stands, and rests from then on."""

import torch
from torch.nn.functional import cross_entropy

from recurrent_gpt2 import RecurrentGPT2Config

from .task import NO_ANSWER

MARGIN = 0.6  # the least relative step, |D(k)| / |s(k)|, of a token whose answer does not stand yet


def check_groups(config: RecurrentGPT2Config, setting: str) -> None:
    """Fails where the states of a loop are not what the head decodes, or not what can be trained."""
    if len(config.loop_groups) != 1 or config.loop_groups[0][-1] != config.num_hidden_layers - 1:
        raise ValueError(
            f"`{setting}` needs one loop group at the end of the network, whose states say what a token would answer, "
            f"but `loop_groups` is {config.loop_groups} of {config.num_hidden_layers} layers: leave it out."
        )
    if setting == "doubt_weight" and config.backprop_loops is not None:
        raise ValueError(
            f"`doubt_weight` needs gradients through all loops, but `backprop_loops` is {config.backprop_loops}: make "
            "that null, or leave this out."
        )


def answers_of(labels: torch.Tensor) -> torch.Tensor:
    """What should be said at every place, [batch, seq]: the label of the place after it."""
    answers = labels.new_full(labels.shape, NO_ANSWER)
    answers[:, :-1] = labels[:, 1:]
    return answers


def rest_loss(states: torch.Tensor, said: torch.Tensor, answers: torch.Tensor, delay: int = 1) -> torch.Tensor:
    """Mean of what steps are too short while a token has yet to find its answer, and of their lengths afterwards.

    Which step is the last that a token needs is seen from what it says: its answer stands at step k if it is right at
    k and at all later ones. Required depths play no part. `delay` steps after that one may still be long: with 1 a
    state may settle after it has its answer, with 0 it must have it in its final form at once. Tokens that are asked
    for nothing stand from the first step.

    Args:
        states: s(0) to s(K), [K + 1, batch, seq, hidden].
        said: The token that each of s(1) to s(K) decodes to, [K, batch, seq]; anything where nothing is asked.
        answers: [batch, seq], NO_ANSWER where nothing is asked.
    """
    asked = answers != NO_ANSWER
    stands = ((said == answers) | ~asked).flip(0).cumprod(0).flip(0).bool()
    last_needed = (~stands).sum(0) + 1  # [batch, seq]
    step = torch.arange(1, len(said) + 1, device=answers.device)[:, None, None]
    lengths = (states[1:] - states[:-1]).norm(dim=-1) / states[1:].detach().norm(dim=-1)
    searching = asked & (step <= last_needed) & (step > 1)  # the first step, from noise, is always long
    resting = step > last_needed + delay
    too_short = torch.relu(MARGIN - lengths)
    return _mean(too_short, searching) + _mean(lengths, resting)


def doubt_loss(logits: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Mean loss of the answers after every loop step.

    A token that has yet to find its answer does best by saying how likely each one is. So it is unsure until it knows,
    and a rule of confidence can tell when that is.

    Args:
        logits: After steps 1 to K, [K, asked, vocabulary].
        answers: [asked].
    """
    losses = cross_entropy(logits.flatten(0, 1).float(), answers.repeat(len(logits)), reduction="sum")
    return losses / max(logits.shape[:2].numel(), 1)


def _mean(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    return (values * where).sum() / where.sum().clamp(min=1)
