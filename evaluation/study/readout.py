"""What a readout repairs is not depth: controls on text, for docs/exit_policies.md.

    python -m evaluation.study.readout CHECKPOINT --source TEXT --output docs/readout.json

For every fixed depth, the loss above full depth as it is, and with a readout fitted at that depth on other blocks: a
temperature; an affine map of every coordinate before the head; and the extrapolation z + w (z - z at one loop). Full
depth has the same repair beside it, so that what remains is due to depth.

And a control of oracles: the mean over tokens of the least loss among depths, beside that among as many random
perturbations of full depth, each as far from it as the depth that it stands for. Where the latter is lower, "choose the
best depth for every token" says nothing about depth.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm

from recurrent_gpt2 import RecurrentGPT2ForCausalLM
from training.data import Source

from ..baselines import bootstrap_interval
from ..common import held_out_documents, load_checkpoint, spread_blocks
from ..report import Table, name_of_source

CHUNK = 2048  # tokens that pass through the head at once
Readout = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # last states at this depth and at one loop -> repaired


@torch.no_grad()
def last_states(model: RecurrentGPT2ForCausalLM, blocks: torch.Tensor, loops: int) -> torch.Tensor:
    """What the head reads with 1 to `loops` fixed loops, [loops, blocks, length - 1, hidden]."""
    found = []
    for count in tqdm(range(1, loops + 1), desc="fixed loops"):
        of_blocks = [model.model(part, num_loops=count, use_cache=False).last_hidden_state for part in blocks.split(8)]
        found.append(torch.cat(of_blocks)[:, :-1])
    return torch.stack(found)


def losses_of(model: RecurrentGPT2ForCausalLM, states: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Of every token, [blocks, length - 1]."""
    pairs = zip(states.flatten(0, 1).split(CHUNK), answers.flatten().split(CHUNK), strict=True)
    losses = [cross_entropy(model.lm_head(part).float(), right, reduction="none") for part, right in pairs]
    return torch.cat(losses).view_as(answers)


def fit(
    model: RecurrentGPT2ForCausalLM, kind: str, states: torch.Tensor, first: torch.Tensor, answers: torch.Tensor
) -> tuple[Readout, float | None]:
    """The readout of a kind with the least loss on these blocks; and its number, where it has one."""
    number = torch.ones(1) if kind == "temperature" else torch.zeros(1)
    scale, shift = torch.ones(states.shape[-1]), torch.zeros(states.shape[-1])
    fitted = [scale, shift] if kind == "affine" else [number]
    readouts: dict[str, Readout] = {
        "temperature": lambda z, z_first: z / number,
        "affine": lambda z, z_first: z * scale + shift,
        "extrapolated": lambda z, z_first: z + number * (z - z_first),
    }
    readout, parameters = readouts[kind], [value.requires_grad_() for value in fitted]
    optimizer = torch.optim.LBFGS(parameters, max_iter=8 if kind == "affine" else 5, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        rows = zip(*(part.flatten(0, 1).split(CHUNK) for part in (states, first)), answers.flatten().split(CHUNK),
                   strict=True)  # fmt: skip
        for z, z_first, right in rows:
            loss = cross_entropy(model.lm_head(readout(z, z_first)).float(), right, reduction="sum") / answers.numel()
            loss.backward()
            total += loss.detach()
        return total

    optimizer.step(closure)
    for value in parameters:
        value.requires_grad_(False)
    return readout, None if kind == "affine" else number.item()


KINDS = ("temperature", "affine", "extrapolated")


def study(model: RecurrentGPT2ForCausalLM, tuning: torch.Tensor, test: torch.Tensor, loops: int) -> dict[str, Any]:
    """Losses at every depth above those of full depth with the same repair, with 95 % intervals over blocks."""
    model.requires_grad_(False)
    answers = {"tuning": tuning[:, 1:], "test": test[:, 1:]}
    of_tuning, of_test = (last_states(model, blocks, loops) for blocks in (tuning, test))
    depths = [k for k in (1, 2, 3, 4, 6, 8) if k < loops]
    plain = torch.stack([losses_of(model, states, answers["test"]) for states in of_test])  # [loops, blocks, tokens]
    repaired: dict[str, dict[int, tuple[torch.Tensor, float | None]]] = {kind: {} for kind in KINDS}
    for count in tqdm([*depths, loops], desc="readouts"):
        for kind in KINDS:
            if kind == "extrapolated" and count == 1:
                continue
            readout, number = fit(model, kind, of_tuning[count - 1], of_tuning[0], answers["tuning"])
            losses = losses_of(model, readout(of_test[count - 1], of_test[0]), answers["test"])
            repaired[kind][count] = losses.mean(1), number
    rows = []
    for count in depths:
        row = {"loops": count, "plain": above(plain[count - 1].mean(1), plain[-1].mean(1))}
        for kind in KINDS:
            if count in repaired[kind]:
                losses, number = repaired[kind][count]
                row[kind] = {**above(losses, repaired[kind][loops][0]), "number": number,
                             "gain": above(plain[count - 1].mean(1), losses)}  # fmt: skip
        rows.append(row)
    return {
        "loops": loops,
        "full_loss": plain[-1].mean().item(),
        "gain_at_full": {kind: above(plain[-1].mean(1), repaired[kind][loops][0]) for kind in KINDS},
        "depths": rows,
        "oracle": oracle(model, of_test, plain, answers["test"]),
    }


def oracle(
    model: RecurrentGPT2ForCausalLM, states: torch.Tensor, plain: torch.Tensor, answers: torch.Tensor
) -> dict[str, Any]:
    """The mean of the least loss of every token among depths, and among perturbations of full depth as large."""
    rng = torch.Generator().manual_seed(0)
    perturbed = [plain[-1]]
    for of_depth in states[:-1]:
        noise = torch.randn(of_depth.shape, generator=rng)
        noise *= (of_depth - states[-1]).norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
        perturbed.append(losses_of(model, states[-1] + noise, answers))
    full = plain[-1].mean(1)
    return {"depths": above(full, plain.min(0).values.mean(1)),
            "perturbations": above(full, torch.stack(perturbed).min(0).values.mean(1))}  # fmt: skip


def above(losses: torch.Tensor, others: torch.Tensor) -> dict[str, float]:
    """The mean difference of losses [blocks], with its 95 % interval over blocks."""
    difference = (losses - others).double().numpy()
    low, high = bootstrap_interval(lambda places: difference[places].mean(), len(difference), rounds=400)
    return {"mean": float(difference.mean()), "low": low, "high": high}


def readout_table(found: dict[str, Any]) -> Table:
    def shown(row: dict[str, Any], kind: str) -> str:
        if kind not in row:
            return ""
        is_gain, number = kind == "extrapolated", row[kind].get("number")
        value = row[kind]["gain"] if is_gain else row[kind]
        setting = "" if number is None else f" ({'w' if is_gain else 'T'} = {number:.2f})"
        return f"{value['mean']:+.4f} [{value['low']:+.4f}, {value['high']:+.4f}]{setting}"

    rows = [[str(row["loops"]), *(shown(row, kind) for kind in ("plain", *KINDS))] for row in found["depths"]]
    header = ["both with a temperature", "both with an affine map", "gained by extrapolating"]
    return Table("", ["loops", f"loss above {found['loops']} loops", *header], rows)


def oracle_table(found: dict[str, Any]) -> Table:
    rows = []
    for what, name in (("depths", "1 to {} loops"), ("perturbations", "{} random perturbations, as large")):
        gain = found["oracle"][what]
        rows.append([name.format(found["loops"]), f"{gain['mean']:.4f} [{gain['low']:.4f}, {gain['high']:.4f}]"])
    return Table("", ["the best for every token, of", "nats gained on full depth"], rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder or name on the Hub")
    parser.add_argument("--source", required=True, help="held-out text: a file, or python-docs")
    parser.add_argument("--num_loops", type=int, default=12, help="full depth")
    parser.add_argument("--blocks", type=int, default=24, help="to fit on, and as many for the numbers")
    parser.add_argument("--output", type=Path, required=True, help="a JSON file")
    options = parser.parse_args(arguments)
    if options.blocks < 2 or options.num_loops < 2:
        raise ValueError(f"`--blocks` is {options.blocks} and `--num_loops` {options.num_loops}: it takes 2 of each.")
    model, tokenizer = load_checkpoint(options.checkpoint)
    texts = held_out_documents(Source(options.source), 0.01 if options.source == "python-docs" else None)
    blocks = spread_blocks(texts, tokenizer, model.config.max_position_embeddings, 2 * options.blocks)
    found = study(model, blocks[::2], blocks[1::2], options.num_loops)
    found = {"checkpoint": Path(options.checkpoint).name, "source": name_of_source(options.source),
             "blocks": len(blocks) // 2, **found}  # fmt: skip
    options.output.write_text(json.dumps(found, indent=1) + "\n")
    print(readout_table(found).markdown(), oracle_table(found).markdown(), sep="\n\n")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
