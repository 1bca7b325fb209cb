"""Text from a checkpoint under each exit policy, every token coloured by the loops that it took.

`python -m evaluation.demo runs/smoke --prompt "Return the number of"`
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoTokenizer

from recurrent_gpt2 import AccelerationExit, ExitPolicy, FixedLoops, KLExit, RecurrentGPT2ForCausalLM, StepNormExit

# From few loops to many; the mean of all groups.
COLORS = ("grey50", "cyan", "green", "yellow", "orange1", "red")
POLICIES = (FixedLoops(), StepNormExit(normalize="state"), AccelerationExit(normalize="state"), KLExit())


def color_of(loops: float, most: int) -> str:
    return COLORS[min(int((loops - 1) / max(most - 1, 1) * len(COLORS)), len(COLORS) - 1)]


@torch.no_grad()
def continue_text(model, tokenizer, prompt: str, policy: ExitPolicy, new_tokens: int) -> tuple[Text, float, float]:
    """The continuation in colours, the mean loops of its tokens, and milliseconds per token."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    started = time.perf_counter()
    output = model.generate(
        ids, max_new_tokens=new_tokens, do_sample=False, repetition_penalty=1.3, exit_policy=policy,
        pad_token_id=tokenizer.eos_token_id, return_dict_in_generate=True,
    )  # fmt: skip
    elapsed = time.perf_counter() - started
    # The loops at a token predict the next one, so a new token has those of the token before it.
    loops = output.loop_steps[0, ids.shape[1] - 1 :].float().mean(-1)
    text, most = Text(prompt, style="bold"), max(model.config.loops_per_group())
    for token, taken in zip(output.sequences[0, ids.shape[1] :], loops, strict=True):
        text.append(tokenizer.decode(token), style=color_of(taken.item(), most))
    return text, loops.mean().item(), 1000 * elapsed / len(loops)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder of a trained model")
    parser.add_argument("--prompt", default="Return the number of")
    parser.add_argument("--new_tokens", type=int, default=40)
    options = parser.parse_args(arguments)
    if not (options.checkpoint / "config.json").exists():
        raise FileNotFoundError(f"there is no checkpoint in {options.checkpoint}: `make smoke` trains one.")
    model = RecurrentGPT2ForCausalLM.from_pretrained(options.checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    console = Console(highlight=False)
    most = max(model.config.loops_per_group())
    legend = Text("loops: ")
    for place, color in enumerate(COLORS):
        legend.append(f"{1 + place * (most - 1) / len(COLORS):.0f}+ ", style=color)
    console.print(legend, "\n")

    table = Table("exit policy", "mean loops", "ms/token", title=f"{options.new_tokens} tokens, at most {most} loops")
    continue_text(model, tokenizer, options.prompt, FixedLoops(), 2)  # the first call is slower
    for policy in POLICIES:
        text, loops, milliseconds = continue_text(model, tokenizer, options.prompt, policy, options.new_tokens)
        console.print(f"[underline]{policy}[/underline]\n", text, "\n", sep="")
        table.add_row(policy.name, f"{loops:.2f}", f"{milliseconds:.1f}")
    console.print(table)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
