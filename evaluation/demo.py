"""What a looped model does, in a few minutes: `python -m evaluation.demo checkpoints/recurrent-gpt2-mini`.

With `--programs CHECKPOINT`, first a program: what the model says of every line, the loops that this needs and those
that it took. Then it continues a prompt under each exit policy with every token coloured by the loops that it took,
sets the policies beside each other in a table, and writes the report of the checkpoint to a page for the browser.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm.auto import tqdm

from recurrent_gpt2 import AccelerationExit, ExitPolicy, FixedLoops, KLExit, StepNormExit
from training.tasks import ids_of_tokens

from .common import describe_loops, load_checkpoint, loops_of_generate, mean_depth
from .depth import task_of
from .exit_tradeoff import PAPER_THRESHOLDS, cap_of, score_loops
from .figures import PAPER_RULES
from .report import Settings, blocks_by_seed, make_report

# From few loops to many; the mean of all looped layers.
COLORS = ("grey50", "cyan", "green", "yellow", "orange1", "red")
POLICIES = (FixedLoops(), StepNormExit(normalize="state"), AccelerationExit(normalize="state"), KLExit())

PROGRAM = """
x0 = 3
x1 = 5
x2 = 4
x3 = x0 + x1
x4 = x3 - x2
x5 = x2 + x2
x6 = x4 + x3
x7 = x6 - x5
x8 = x1 + x0
x9 = x7 + x6
x10 = x9 - x8
x11 = x10 + x9
? x11 x5
"""


def color_of(loops: float, most: int) -> str:
    return COLORS[min(int((loops - 1) / max(most - 1, 1) * len(COLORS)), len(COLORS) - 1)]


@torch.no_grad()
def continue_text(
    model, tokenizer, prompt: str, policy: Any, new_tokens: int, num_loops: list[int]
) -> tuple[Text, float, float]:
    """The continuation in colours, the mean loops of its tokens, and milliseconds per token."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    started = time.perf_counter()
    output = model.generate(
        ids, max_new_tokens=new_tokens, do_sample=False, repetition_penalty=1.3, exit_policy=policy,
        num_loops=num_loops, pad_token_id=tokenizer.eos_token_id, return_dict_in_generate=True,
    )  # fmt: skip
    elapsed = time.perf_counter() - started
    # The loops at a token predict the next one, so a new token has those of the token before it.
    loops = mean_depth(output.loop_steps[0, ids.shape[1] - 1 :], model.config)
    text = Text(prompt, style="bold")
    for token, taken in zip(output.sequences[0, ids.shape[1] :], loops, strict=True):
        text.append(tokenizer.decode(token), style=color_of(taken.item(), max(num_loops)))
    return text, loops.mean().item(), 1000 * elapsed / len(loops)


@torch.no_grad()
def show_program(console: Console, checkpoint: str, text: str = PROGRAM) -> None:
    """A program part by part, up to each place where the task has an answer: what the model says there, the loops that
    this needs, and the loops that it took."""
    model, tokenizer = load_checkpoint(checkpoint, optimize=True)
    task, loops = task_of(model), loops_of_generate(model)
    batch = task.parse(text)
    ids = torch.from_numpy(ids_of_tokens(tokenizer, task)[batch.ids])
    output = model(ids, **loops)  # one pass, which is what decoding gives
    said = [tokenizer.decode(token).strip() for token in output.logits[0].argmax(-1)]
    taken = mean_depth(output.loop_steps[0], model.config)
    asked = batch.asked[0].nonzero()[0].tolist()
    most = int(taken[asked].max())
    table = Table("", "the model says", "right", "loops needed", "loops taken", title=f"{task.name}, {checkpoint}")
    start = 0
    for place in asked:
        part, start = task.text(batch.ids[0, start : place + 1]).strip(), place + 1
        answer, needs = task.tokens[batch.answers[0, place]].strip(), int(batch.depths[0, place])
        bar = Text(
            f"{taken[place]:>4.0f} " + "█" * round(taken[place].item()), style=color_of(taken[place].item(), most)
        )
        table.add_row(part, said[place], "yes" if said[place] == answer else f"no, {answer}", str(needs), bar)
    console.print(table)
    console.print(f"{describe_loops(**loops)}: {taken.mean():.2f} loops in the mean over all {len(taken)} tokens\n")


def policies_of(own: Any) -> dict[str, Any]:
    """The policies to show, by name, and first among the adaptive ones the checkpoint's own."""
    own = _as_policy(own)
    shown = [POLICIES[0], *([] if own in (None, POLICIES[0]) else [own]), *(p for p in POLICIES[1:] if p != own)]
    return {name_of(policy) + (" (default)" if policy == own else ""): policy for policy in shown}


def _as_policy(given: Any) -> Any:
    if isinstance(given, list):  # one per group
        return [_as_policy(one) for one in given]
    return ExitPolicy.from_dict({"name": given} if isinstance(given, str) else given) if given else None


def name_of(policy: Any) -> str:
    if isinstance(policy, list):
        return "; ".join(name_of(one) for one in policy)
    if policy is None:
        return "fixed"
    measure = policy.name if getattr(policy, "normalize", "none") == "none" else f"{policy.name}/{policy.normalize}"
    return f"{measure}, {policy.threshold:g}" if policy.threshold else measure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder of a trained model, or name on the Hub")
    parser.add_argument("--programs", help="a model of a depth task, to show a program with")
    parser.add_argument("--prompt", default="Return the number of")
    parser.add_argument("--new_tokens", type=int, default=40)
    parser.add_argument("--source", default="python-docs", help="held-out text: a file, or python-docs")
    parser.add_argument("--blocks", type=int, default=8, help="blocks of held-out text")
    parser.add_argument("--output", type=Path, default=Path("results/demo"), help="folder of the report")
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    model, tokenizer = load_checkpoint(options.checkpoint, optimize=True)
    if options.programs is not None:
        show_program(console, options.programs)
    default = loops_of_generate(model)
    most = cap_of(model)
    legend = Text("loops: ")
    for place, color in enumerate(COLORS):
        legend.append(f"{1 + place * (most - 1) / len(COLORS):.0f}+ ", style=color)
    console.print(legend)
    console.print(f"unless told otherwise: {describe_loops(**default)}\n")

    settings = Settings(
        [options.source], options.output, rules=PAPER_RULES, thresholds=[*PAPER_THRESHOLDS, 0.1, 0.5, 2.0], cap=most,
        depths=(1, 2, 3, 4, 6, 8, 12), blocks=options.blocks, rounds=1, samples=2,
    )  # fmt: skip
    policies = policies_of(default["exit_policy"])
    # Where the checkpoint's own setting is a fixed depth, that is the depth of the row without exits.
    loops_of = {name: model.config.loops_per_group(most) for name in policies} | {"fixed": default["num_loops"]}
    continue_text(model, tokenizer, options.prompt, None, 2, loops_of["fixed"])  # the first call is slower
    continued = []
    for name, policy in policies.items():
        continued.append(continue_text(model, tokenizer, options.prompt, policy, options.new_tokens, loops_of[name]))
        console.print(f"[underline]{name}[/underline]\n", continued[-1][0], "\n", sep="")
    blocks = blocks_by_seed(options.source, tokenizer, settings, model.config.max_position_embeddings)[0]
    table = Table("exit policy", "mean loops", "ms/token", f"perplexity, {options.source}", "mean loops there",
                  title=f"{options.new_tokens} tokens, at most {most} loops")  # fmt: skip
    rows = zip(policies.items(), continued, strict=True)
    for (name, policy), (_, loops, milliseconds) in tqdm(rows, "perplexity", unit=" policies", total=len(policies)):
        scored = score_loops(model, blocks, policy, loops_of[name])
        cells = (f"{loops:.2f}", f"{milliseconds:.1f}", f"{scored['perplexity']:.2f}", f"{scored['mean_depth']:.2f}")
        table.add_row(name, *cells)
    console.print(table)
    page = make_report(options.checkpoint, settings)
    print(f"The report is written: open {page} in a browser.")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
