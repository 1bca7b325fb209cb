"""What a looped model does, in a few minutes: `python -m evaluation.demo checkpoints/recurrent-gpt2-mini`.

First a program, where the checkpoint (or another, `--programs`) can read one: every variable with its value, in the
colour of the loops that it took, beside those that it needs. Then a prompt, continued with every token in the colour of
its loops, and the exit policies beside each other. Then the report: its advice, and a page for the browser.
"""

import argparse
import json
import sys
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers.utils import logging

from recurrent_gpt2 import AccelerationExit, ExitPolicy, FixedLoops, KLExit, StepNormExit
from training.tasks import ids_of_tokens

from .advice import advice_line, advice_text
from .common import load_checkpoint, loops_of_generate, mean_depth, name_of_loops, name_of_policy
from .depth import task_of, tasks_of
from .exit_tradeoff import PAPER_THRESHOLDS, cap_of
from .figures import PAPER_RULES
from .report import Settings, make_report

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
    text = Text().append(prompt, style="bold")
    for token, taken in zip(output.sequences[0, ids.shape[1] :], loops, strict=True):
        text.append(tokenizer.decode(token), style=color_of(taken.item(), max(num_loops)))
    return text, loops.mean().item(), 1000 * elapsed / len(loops)


@torch.no_grad()
def show_program(console: Console, checkpoint: str, text: str = PROGRAM) -> None:
    """A program, up to each place where the task has an answer: the value that the model says, in the colour
    of the loops that it took, beside the loops that it needs."""
    model, tokenizer = load_checkpoint(checkpoint, optimize=True)
    task, loops = task_of(model), loops_of_generate(model)
    batch = task.parse(text)
    ids = torch.from_numpy(ids_of_tokens(tokenizer, task)[batch.ids])
    output = model(ids, **loops)  # one pass, which is what decoding gives
    said = [tokenizer.decode(token).strip() for token in output.logits[0].argmax(-1)]
    taken = mean_depth(output.loop_steps[0], model.config)
    asked = batch.asked[0].nonzero()[0].tolist()
    most = int(taken[asked].max())
    table = Table(task.name, "value", "loops needed", "loops taken")
    start = 0
    for place in asked:
        part = task.text(batch.ids[0, start : place + 1]).strip()
        is_told = place + 1 < batch.ids.shape[1] and batch.ids[0, place + 1] == batch.answers[0, place]
        start = place + 1 + is_told  # the answer to a question stands behind it
        answer, needs = task.tokens[batch.answers[0, place]].strip(), int(batch.depths[0, place])
        colour = color_of(taken[place].item(), most)
        value = Text(said[place] if said[place] == answer else f"{said[place]}, but it is {answer}", f"bold {colour}")
        bar = Text(f"{taken[place]:>2.0f} " + "█" * round(taken[place].item()), style=colour)
        table.add_row(part, value, f"{needs:>2} " + "░" * needs, bar)
    console.print(f"[bold]A program[/bold], answered by {Path(checkpoint).name} ({name_of_loops(**loops)})")
    console.print(table)
    console.print(f"{taken.mean():.1f} loops in the mean over all {len(taken)} tokens\n")


def legend(most: int) -> Text:
    """What the colours mean."""
    firsts = [1 + place * (most - 1) / len(COLORS) for place in range(len(COLORS))]
    return Text(" ").join(Text(f"{first:.0f}+", style=color) for first, color in zip(firsts, COLORS, strict=True))


def policies_of(own: Any) -> dict[str, Any]:
    """The policies to show, by name, and first among the adaptive ones the checkpoint's own."""
    own = _as_policy(own)
    shown = [POLICIES[0], *([] if own in (None, POLICIES[0]) else [own]), *(p for p in POLICIES[1:] if p != own)]
    return {name_of_policy(policy) + (" (default)" if policy == own else ""): policy for policy in shown}


def _as_policy(given: Any) -> Any:
    if isinstance(given, list):  # one per group
        return [_as_policy(one) for one in given]
    return ExitPolicy.from_dict({"name": given} if isinstance(given, str) else given) if given else None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder of a trained model, or name on the Hub")
    parser.add_argument("--programs", help="another model, of programs, to show a program with")
    parser.add_argument("--prompt", default="Return the number of")
    parser.add_argument("--new_tokens", type=int, default=40)
    parser.add_argument("--source", default="python-docs", help="held-out text: a file, or python-docs")
    parser.add_argument("--blocks", type=int, default=8, help="blocks of held-out text")
    parser.add_argument("--output", type=Path, default=Path("results/demo"), help="folder of the report")
    options = parser.parse_args(arguments)
    logging.disable_progress_bar()  # of loading, which takes no time
    console = Console(highlight=False)
    model, tokenizer = load_checkpoint(options.checkpoint, optimize=True)
    if options.programs or any(task.name == "programs" for task in tasks_of(model)):
        show_program(console, options.programs or options.checkpoint)
    default, most = loops_of_generate(model), cap_of(model)
    policies = policies_of(default["exit_policy"])
    # Where the checkpoint's own setting is a fixed depth, that is the depth of the row without exits.
    loops_of = {name: model.config.loops_per_group(most) for name in policies} | {"fixed": default["num_loops"]}
    continue_text(model, tokenizer, options.prompt, None, 2, loops_of["fixed"])  # the first call is slower
    continued = {name: continue_text(model, tokenizer, options.prompt, policy, options.new_tokens, loops_of[name])
                 for name, policy in policies.items()}  # fmt: skip
    shown = next((name for name in policies if name.endswith("(default)")), "fixed")
    console.print(f"[bold]Text[/bold], continued by {Path(options.checkpoint).name} ({name_of_loops(**default)})")
    console.print(Text("loops: ").append_text(legend(most)))
    console.print(Text("  ").append_text(continued[shown][0]), "\n", sep="")
    table = Table("the same by", "loops a token", "ms/token", "text as with fixed loops")
    plain = continued["fixed"][0].plain
    for name, (text, loops, milliseconds) in continued.items():
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text.plain, plain, strict=False)))
        same -= len(options.prompt)
        total = len(plain) - len(options.prompt)
        table.add_row(name, f"{loops:.2f}", f"{milliseconds:.1f}", "yes" if text.plain == plain
                      else f"for {same} of {total} letters")  # fmt: skip
    console.print(table)

    console.print("\n[bold]The report[/bold]: every rule on held-out text, beside fixed depth")
    settings = Settings(
        [options.source], options.output, rules=PAPER_RULES, thresholds=[*PAPER_THRESHOLDS, 0.1, 0.5, 2.0], cap=most,
        depths=(1, 2, 3, 4, 6, 8, 12), blocks=options.blocks, rounds=1, samples=2,
    )  # fmt: skip
    page = make_report(options.checkpoint, settings)
    report = json.loads((options.output / "report.json").read_text())
    console.print(Text(advice_text(report["advice"], report["sources"][0]["name"]).replace("**", "").replace("`", "")))
    console.print(Text(f"  {advice_line(report['advice'])}", style="bold"))
    print(f"Open {page} in a browser.")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
