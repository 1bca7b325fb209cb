"""The logit lens over loops: `python -m evaluation.lens CHECKPOINT --text "Return the number of" --token -1`.

What would be said at a token after every loop step of every group, in two readings:

- `head`: the final norm and the head read the state as it is, as logit lenses do. Layers behind the group are skipped.
- `leave`: the token leaves the group's loop at that step, and the rest of the network runs as it always does. Where the
  only group stands at the end of the network, the two are the same.

One pass has all of it. Copies of the token stand behind the text, at the token's own position, and each sees the text
before the token and itself; a copy leaves one group at one step, and every other group when the exit policy says so.
The tokens of the text are what they are without copies. Steps beyond the one at which the token left say what would
have been.
"""

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from transformers import PreTrainedTokenizerBase

from recurrent_gpt2 import LoopView, RecurrentGPT2ForCausalLM
from recurrent_gpt2.exit_policies import resolve_exit_policy

from .common import DEFAULT, describe_loops, load_checkpoint, loops_of_generate

READINGS = ("head", "leave")


@dataclass
class TokenLens:
    """A token's loops. Lists have an entry for each group, whose tensors go from the first step to the cap."""

    place: int
    steps: list[int]  # that the token took
    states: list[torch.Tensor]  # s(0..cap), [cap + 1, hidden]
    head: list[torch.Tensor]  # log-probabilities that the head reads after each step, [cap, vocab]
    leave: list[torch.Tensor]  # those of the model, had the token left there, [cap, vocab]


class _LeaveAt:
    """An exit policy for one row: tokens with a number leave at that step, the others when `policy` says so."""

    def __init__(self, policy: Any, leave_at: torch.Tensor):
        self.policy, self.leave_at = policy, leave_at  # [tokens], 0: no number

    def __call__(self, view: LoopView) -> torch.Tensor:
        if view.step == 0:
            view.memory["leave_at"] = self.leave_at.to(view.state.device)
        leave_at = view.memory.pop("leave_at")  # the policy sees its own memory only
        exits = torch.zeros_like(leave_at, dtype=torch.bool) if self.policy is None else self.policy(view)
        view.memory["leave_at"] = leave_at
        return torch.where(leave_at > 0, leave_at <= view.step + 1, exits)


@torch.no_grad()
def look_at_token(
    model: RecurrentGPT2ForCausalLM, ids: torch.Tensor, place: int, exit_policy: Any, num_loops: list[int]
) -> TokenLens:
    """`ids` [tokens] is a text; what comes behind `place` in it has no influence."""
    if not 0 <= place < len(ids):
        raise ValueError(f"`token` is {place}, but the text has {len(ids)} tokens: from 0 to {len(ids) - 1}.")
    policies = resolve_exit_policy(exit_policy, len(num_loops))
    text = place + 1
    length = text + sum(num_loops)
    leave_at = torch.zeros(len(num_loops), length, dtype=torch.long)
    copies = list(torch.arange(text, length).split(num_loops))
    for group, (of_group, count) in enumerate(zip(copies, num_loops, strict=True)):
        leave_at[group, of_group] = torch.arange(1, count + 1)
    sees = torch.ones(length, length, dtype=torch.bool).tril()
    sees[text:, place:] = False  # a copy sees no other copy, and itself in the place of the token
    sees.fill_diagonal_(True)
    mask = torch.zeros(length, length, dtype=model.dtype).masked_fill(~sees, torch.finfo(model.dtype).min)
    position_ids = torch.cat([torch.arange(text), torch.full((length - text,), place)])
    output = model(
        torch.cat([ids[:text], ids[place].expand(length - text)])[None],
        attention_mask=mask[None, None],
        position_ids=position_ids[None],
        num_loops=num_loops,
        exit_policy=[_LeaveAt(policy, row) for policy, row in zip(policies, leave_at, strict=True)],
        output_loop_trajectory=True,
        use_cache=False,
        logits_to_keep=length - text,
    )
    said = output.logits[0].float().log_softmax(-1).split(num_loops)
    # The last copy of a group stays in its loop up to the cap.
    states = [of[:, 0, places[-1]] for of, places in zip(output.loop_trajectory, copies, strict=True)]
    head = [model.decode_states(of_group[1:]).float().log_softmax(-1) for of_group in states]
    return TokenLens(place, output.loop_steps[0, place].tolist(), states, head, list(said))


def logit_lens(
    model: RecurrentGPT2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    token: int = -1,
    exit_policy: Any = DEFAULT,
    num_loops: int | list[int] | None = None,
    top: int = 5,
    reading: str = "head",
) -> pd.DataFrame:
    """The `top` predictions after every loop step of every group, at a token of a text (from its end if negative).

    Columns: `group`, `step` (from 1), `rank` (from 0), `token`, `id`, `probability`, and `taken`: whether the token
    took this step, or had left. Policy and loops are those of `generate` unless given.
    """
    ids = tokenizer(text, return_tensors="pt").input_ids[0].long()
    loops = loops_of_generate(model, exit_policy, num_loops)
    _check_table(model.config.vocab_size, top, reading)
    seen = look_at_token(model, ids, token + len(ids) if token < 0 else token, **loops)
    return lens_table(seen, tokenizer, top, reading)


def lens_table(
    seen: TokenLens, tokenizer: PreTrainedTokenizerBase, top: int = 5, reading: str = "head"
) -> pd.DataFrame:
    """The table of `logit_lens`, of a token that was looked at."""
    _check_table(seen.head[0].shape[-1], top, reading)
    rows = []
    for group, said in enumerate(getattr(seen, reading)):
        best = said.topk(top)
        for step, (values, entries) in enumerate(
            zip(best.values.exp().tolist(), best.indices.tolist(), strict=True), 1
        ):
            for rank, (probability, entry) in enumerate(zip(values, entries, strict=True)):
                taken = step <= seen.steps[group]
                rows.append((group, step, rank, tokenizer.decode([entry]), entry, probability, taken))
    return pd.DataFrame(rows, columns=["group", "step", "rank", "token", "id", "probability", "taken"])


def _check_table(vocab_size: int, top: int, reading: str) -> None:
    if reading not in READINGS:
        raise ValueError(f"`reading` is {reading!r}, but must be one of {', '.join(READINGS)}.")
    if not 1 <= top <= vocab_size:
        raise ValueError(f"`top` is {top}, but must be from 1 to {vocab_size}.")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder or name on the Hub")
    parser.add_argument("--text", required=True)
    parser.add_argument("--token", type=int, default=-1, help="its number in the text, from the end if negative")
    parser.add_argument("--top", type=int, default=3)
    parser.add_argument("--reading", default="head", help=f"among {', '.join(READINGS)}")
    parser.add_argument("--num_loops", type=int, help="the cap; the checkpoint's when left out")
    options = parser.parse_args(arguments)
    model, tokenizer = load_checkpoint(options.checkpoint)
    loops = loops_of_generate(model, num_loops=options.num_loops)
    table = logit_lens(model, tokenizer, options.text, options.token, **loops, top=options.top, reading=options.reading)
    print(f"{describe_loops(**loops)}; in brackets: steps that the token would have taken, had it not left")
    for (group, step), rows in table.groupby(["group", "step"]):
        said = "  ".join(f"{row.token!r} {row.probability:.2f}" for row in rows.itertuples())
        number = f"{step}" if rows.taken.all() else f"({step})"
        print(f"group {group}  step {number:>5}  {said}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
