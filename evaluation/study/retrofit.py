"""What loops give a pretrained GPT-2: `python -m evaluation.study.retrofit --text A.parquet --output retrofit.json`.

A small GPT-2 is trained on text, turned into a looped model that computes the same at one loop, and trained on
("healed") in four ways (with and without loops that grow, with and without a divergence from the GPT-2 in the loss),
each from loops that start at zero and from loops that go on from their input (see `from_gpt2.py`). Beside them the same
GPT-2 is trained on without loops, for as many steps. With `--gpt2 FOLDER`, a GPT-2 that is there already is healed
instead, on sequences that it samples itself. What is done is kept: an interrupted study goes on where it was.
"""

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import trange
from transformers import GPT2Config, GPT2LMHeadModel, set_seed
from transformers.utils import logging

from recurrent_gpt2 import RecurrentGPT2ForCausalLM
from recurrent_gpt2.from_gpt2 import load_gpt2
from training.data import BlockMaker, Source
from training.recipe import RecurrentTrainingArguments
from training.tokenizer import train_tokenizer
from training.trainer import RecurrentTrainer

LOOPS = (1, 2, 4, 8, 16)
HEALING = {
    "loops grow, KL": (0.25, 0.5),
    "KL alone": (0.0, 0.5),
    "loops grow alone": (0.25, 0.0),
    "neither": (0.0, 0.0),
}
BLOCK_SIZE, VOCABULARY = 128, 2048


def text_blocks(path: str, cache: Path, documents: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of tokens for training and for validation."""
    source = Source(path, max_documents=documents)
    tokenizer = train_tokenizer(list(source.documents())[:200], VOCABULARY)
    maker = BlockMaker(tokenizer, BLOCK_SIZE, 0.05, cache)
    return tuple(maker.blocks(source, validation)["input_ids"][:].long() for validation in (False, True))


def train_gpt2(blocks: torch.Tensor, steps: int, batch_size: int = 16) -> GPT2LMHeadModel:
    set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_embd=128, n_layer=6, n_head=4, n_positions=BLOCK_SIZE, bos_token_id=0,
            eos_token_id=0, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    for _ in trange(steps, desc="training a GPT-2"):
        batch = blocks[torch.randint(len(blocks), (batch_size,))]
        model(batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def sampled_rows(gpt2: GPT2LMHeadModel, count: int, batch_size: int = 64) -> torch.Tensor:
    """Sequences that a GPT-2 makes up, a row each, filled up behind their end."""
    set_seed(0)
    first, end = gpt2.config.bos_token_id, gpt2.config.eos_token_id
    options = {"do_sample": True, "top_k": 0, "max_length": BLOCK_SIZE, "eos_token_id": end, "pad_token_id": end}
    rows = torch.full((count, BLOCK_SIZE), end)
    for place in trange(0, count, batch_size, desc="sampling", unit="batches"):
        start = torch.full((min(batch_size, count - place), 1), first)
        made = gpt2.generate(start, attention_mask=torch.ones_like(start), **options)
        rows[place : place + len(made), : made.shape[1]] = made
    return rows


def with_labels(rows: torch.Tensor, end: int | None) -> list[dict[str, torch.Tensor]]:
    """What a model is to say: all of a row, or all up to its end (a row may begin with the token that ends others)."""
    is_end = torch.zeros_like(rows) if end is None else (rows == end).long()
    is_end[:, 0] = 0
    labels = rows.masked_fill(is_end.cumsum(1) > is_end, -100)
    return [{"input_ids": row, "labels": of_row} for row, of_row in zip(rows, labels, strict=True)]


@torch.no_grad()
def measure(model: torch.nn.Module, rows: list[dict[str, torch.Tensor]], **loops: Any) -> float:
    """Mean loss of a token."""
    total, tokens = 0.0, 0
    for start in range(0, len(rows), 16):
        batch = rows[start : start + 16]
        ids, labels = (torch.stack([row[name] for row in batch]) for name in ("input_ids", "labels"))
        count = int((labels[:, 1:] != -100).sum())
        total += model(ids, labels=labels, use_cache=False, **loops).loss.item() * count
        tokens += count
    return total / tokens


@torch.no_grad()
def step_sizes(
    model: RecurrentGPT2ForCausalLM, rows: list[dict[str, torch.Tensor]], loops: int = 32
) -> list[list[float]]:
    """|s(k+1) - s(k)| / |s(k+1)| of every group and step, the mean over tokens."""
    ids = torch.stack([row["input_ids"] for row in rows[:4]])
    output = model(ids, num_loops=loops, output_loop_trajectory=True, use_cache=False)
    sizes = []
    for states in output.loop_trajectory:
        steps = (states[1:] - states[:-1]).norm(dim=-1) / states[1:].norm(dim=-1)
        sizes.append([round(size, 5) for size in steps.mean((1, 2)).tolist()])
    return sizes


def heal(
    gpt2: GPT2LMHeadModel,
    rows: list[dict[str, torch.Tensor]],
    groups: list[list[int]],
    start: str,
    how: str | None,
    options: Any,
) -> RecurrentGPT2ForCausalLM:
    set_seed(options.seed)
    ramp, kl = (0.0, 0.0) if how is None else HEALING[how]
    loops = {"mean_loops": 3, "backprop_loops": None, "num_loops": 4, "state_init": start}
    model = RecurrentGPT2ForCausalLM.from_gpt2(gpt2, groups, **loops)
    base = RecurrentGPT2ForCausalLM.from_gpt2(gpt2, []) if kl > 0 else None
    arguments = RecurrentTrainingArguments(
        str(options.work / "trainer"), max_steps=options.steps, per_device_train_batch_size=options.batch_size,
        learning_rate=options.learning_rate, lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1}, warmup_steps=options.steps // 10, adam_beta2=0.95, weight_decay=0.1,
        loop_ramp=ramp, kl_weight=kl, seed=options.seed, use_cpu=True, dataloader_pin_memory=False, logging_steps=20,
        save_strategy="no", report_to="none",
    )  # fmt: skip
    RecurrentTrainer(model, arguments, train_dataset=rows, base=base).train()
    return model.eval()


def study(name: str, gpt2: GPT2LMHeadModel, train: list, held_out: list, options: Any) -> None:
    """Adds to the output file what is not there yet."""
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    given = {name: getattr(options, name) for name in ("steps", "batch_size", "learning_rate", "seed", "groups")}
    found = results.setdefault(name, {"settings": given})
    if found["settings"] != given:
        raise ValueError(
            f"`--name` is {name!r}, of which {options.output} has results with {found['settings']}, but these would be "
            f"with {given}: give another name."
        )
    found["gpt2"] = measure(gpt2, held_out)
    for start in options.starts:
        model = RecurrentGPT2ForCausalLM.from_gpt2(gpt2, options.groups, state_init=start)
        losses = {str(loops): measure(model, held_out, num_loops=loops) for loops in LOOPS}
        found.setdefault("converted", {})[start] = losses
    found.setdefault("healed", {})
    for start, how in product(options.starts, options.ways):
        if (key := f"{start}: {how}") in found["healed"]:
            continue
        model = heal(gpt2, train, options.groups, start, how, options)
        found["healed"][key] = {
            "loss": {str(loops): measure(model, held_out, num_loops=loops) for loops in LOOPS},
            "step_sizes": step_sizes(model, held_out),
        }
        options.output.write_text(json.dumps(results, indent=1) + "\n")
    if options.ways and "no loops" not in found:
        model = heal(gpt2, train, [], "zeros", None, options)
        found["no loops"] = measure(model, held_out)
    options.output.write_text(json.dumps(results, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", default="python-docs", help="a source of text to train a GPT-2 on")
    parser.add_argument("--documents", type=int, default=1500, help="to read of it")
    parser.add_argument("--gpt2_steps", type=int, default=800, help="of training that GPT-2")
    parser.add_argument("--gpt2", help="folder or name of a GPT-2 to heal instead, on its own samples")
    parser.add_argument("--samples", type=int, default=1000, help="sequences to sample from it")
    parser.add_argument("--name", default="text", help="of this part in the output")
    parser.add_argument("--groups", type=json.loads, default=[[2, 3]], help="layers to loop, as JSON")
    parser.add_argument(
        "--ways",
        nargs="*",
        choices=HEALING,
        default=list(HEALING),
        help="of healing; none: what is converted is measured",
    )
    parser.add_argument("--starts", nargs="+", choices=("zeros", "input"), default=["zeros", "input"], help="of loops")
    parser.add_argument("--steps", type=int, default=200, help="of healing")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0, help="of healing")
    parser.add_argument("--work", type=Path, default=Path("runs/retrofit"), help="folder for what is trained")
    parser.add_argument("--output", type=Path, required=True, help="JSON file, which is added to")
    options = parser.parse_args(arguments)
    logging.set_verbosity_warning()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.gpt2:
        gpt2, kept = load_gpt2(options.gpt2, allow_pickle=True).eval(), options.work / f"{options.name}.pt"
        rows = torch.load(kept) if kept.exists() else sampled_rows(gpt2, options.samples)
        torch.save(rows, kept)
        train, held_out, end = rows[: -len(rows) // 4], rows[-len(rows) // 4 :], gpt2.config.eos_token_id
    else:
        train, held_out = text_blocks(options.text, options.work / "cache", options.documents)
        held_out, end = held_out[:128], None
        folder = options.work / "gpt2"
        if not (folder / "config.json").exists():
            train_gpt2(train, options.gpt2_steps).save_pretrained(folder)
        gpt2 = GPT2LMHeadModel.from_pretrained(folder).eval()
    study(options.name, gpt2, with_labels(train, end), with_labels(held_out, end), options)


if __name__ == "__main__":
    main()
