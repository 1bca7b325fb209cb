"""What fine-tuning does to a checkpoint and to its exits: `python -m evaluation.study.finetuning --output F.json`.

The shipped language model is trained on, on the source code of Python's standard library: all its weights, and beside
it by LoRA, for as many steps on the same blocks. Measured before and after, on files that were not trained on: the loss
at fixed loops, what the exit setting of the checkpoint does there, what it does after a new calibration (on other files
again), and whether programs are still answered, where the model can that. Minutes on one core. What is done is kept in
`--work`: an interrupted study goes on where it was.
"""

import argparse
import hashlib
import json
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedTokenizerBase, set_seed
from transformers.utils import logging

from recurrent_gpt2 import RecurrentGPT2ForCausalLM
from training.data import Source
from training.recipe import RecurrentTrainingArguments
from training.trainer import RecurrentTrainer

from .. import calibrate
from ..common import load_checkpoint, loops_of_generate, spread_blocks
from ..depth import task_of
from ..exit_search import Score, Workload, score
from ..exit_tradeoff import Setting

LOOPS = (1, 2, 4, 8)
BLOCK_SIZE, LORA_RANK = 128, 16
PROGRAMS, PROGRAM_SEED = 64, 91


def write_texts(work: Path, files: int) -> None:
    """Modules of the standard library: one in ten to measure on, one in ten to calibrate on, the others to train on."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:files]
    parts: dict[str, list[str]] = {"train": [], "measured": [], "calibration": []}
    for place, module in enumerate(modules):
        part = {0: "measured", 5: "calibration"}.get(place % 10, "train")
        parts[part].append(json.dumps({"text": module.read_text(encoding="utf-8", errors="replace")}))
    for part, lines in parts.items():
        (work / f"{part}.jsonl").write_text("\n".join(lines) + "\n")


def blocks(work: Path, part: str, tokenizer: PreTrainedTokenizerBase, limit: int) -> torch.Tensor:
    return spread_blocks(Source(str(work / f"{part}.jsonl")).documents(), tokenizer, BLOCK_SIZE, limit)


def finetune(checkpoint: str, target: Path, lora: bool, options: argparse.Namespace) -> int:
    """Trains, saves a checkpoint in `target`, and returns how many weights were trained."""
    model, tokenizer = load_checkpoint(checkpoint)
    set_seed(0)
    trained = get_peft_model(model, LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK)) if lora else model
    arguments = RecurrentTrainingArguments(
        str(options.work / "trainer"), max_steps=options.steps, per_device_train_batch_size=options.batch_size,
        learning_rate=options.lora_rate if lora else options.learning_rate, lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1}, warmup_steps=options.steps // 10, adam_beta2=0.95, weight_decay=0.1,
        use_cpu=True, dataloader_pin_memory=False, logging_steps=10, save_strategy="no", report_to="none",
    )  # fmt: skip
    rows = [{"input_ids": row} for row in blocks(options.work, "train", tokenizer, options.steps * options.batch_size)]
    RecurrentTrainer(trained, arguments, train_dataset=rows).train()
    count = sum(parameter.numel() for parameter in trained.parameters() if parameter.requires_grad)
    if lora:
        model = trained.merge_and_unload()
    model.config.use_cache = True
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return count


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Losses at fixed loops and with the exit setting of a checkpoint, and its answers to programs."""
    model, tokenizer = load_checkpoint(folder)
    text, exits = Workload.of_text(blocks(options.work, "measured", tokenizer, options.blocks)), own_setting(model)
    full = Setting("fixed", None, exits.num_loops)
    fixed = {n: Setting("fixed", None, (n,) * len(model.config.loop_groups)) for n in LOOPS}
    found: dict[str, Any] = {
        "loss": {str(n): mean_loss(score(model, text, setting)) for n, setting in fixed.items()},
        "full": {"loops": list(full.num_loops), "loss": mean_loss(score(model, text, full))},
        "exits": described(score(model, text, exits)),
    }
    if getattr(model.config, "tasks", None):
        programs = Workload.of_task(task_of(model), tokenizer, PROGRAMS, PROGRAM_SEED)
        wrong = {how: score(model, programs, setting) for how, setting in (("full", full), ("exits", exits))}
        found["answers"] = {how: 1 - mean_loss(scored) for how, scored in wrong.items()}
    return found


def own_setting(model: RecurrentGPT2ForCausalLM) -> Setting:
    """What `generate` would do."""
    own = loops_of_generate(model)
    policy = None if own["exit_policy"] is None else json.dumps(own["exit_policy"])
    return Setting("default", policy, tuple(own["num_loops"]))


def mean_loss(scored: Score) -> float:
    return sum(scored.losses) / len(scored.losses)


def described(scored: Score) -> dict[str, Any]:
    return {"policy": scored.setting.exit_policy, "loss": mean_loss(scored), "steps": scored.steps}


def calibrated(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What the exits of a checkpoint do after a calibration on text of the new kind, which is written into it."""
    calibrate.main([
        str(folder), "--source", str(options.work / "calibration.jsonl"), "--rules", "step_norm", "--block_size",
        str(BLOCK_SIZE), "--budget", str(options.budget), "--confidence", str(options.confidence), "--tuning",
        str(options.calibration // 4), "--calibration", str(options.calibration), "--output", str(folder / "scores"),
        "--write",
    ])  # fmt: skip
    model, tokenizer = load_checkpoint(folder)
    text = Workload.of_text(blocks(options.work, "measured", tokenizer, options.blocks))
    return described(score(model, text, own_setting(model)))


def study(options: argparse.Namespace) -> dict[str, Any]:
    write_texts(options.work, options.files)
    weights = hashlib.blake2b((Path(options.checkpoint) / "model.safetensors").read_bytes(), digest_size=8).hexdigest()
    settings = {name: value for name, value in vars(options).items() if name not in ("work", "output")}
    settings = {**settings, "checkpoint": Path(options.checkpoint).name, "weights": weights}
    ways = {"before": None, "all weights": False, f"LoRA, rank {LORA_RANK}": True}
    rows = {}
    for name, lora in ways.items():
        folder = options.work / name.split(",")[0].replace(" ", "-")
        kept = options.work / f"{folder.name}.json"
        done = json.loads(kept.read_text()) if kept.exists() else {}
        if done.get("settings") != settings:
            shutil.rmtree(folder, ignore_errors=True)
            if lora is None:
                shutil.copytree(options.checkpoint, folder)
                row: dict[str, Any] = {"trained": 0}
            else:
                row = {"trained": finetune(options.checkpoint, folder, lora, options)}
            row |= measure(folder, options)
            row["calibrated"] = calibrated(folder, options)
            done = {"settings": settings, "row": row}
            kept.write_text(json.dumps(done))
        rows[name] = done["row"]
    return {"settings": settings, "tokens": options.steps * options.batch_size * BLOCK_SIZE, "rows": rows}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="checkpoints/recurrent-gpt2-mini", help="folder of the start")
    parser.add_argument("--files", type=int, default=160, help="of the standard library")
    parser.add_argument("--steps", type=int, default=200, help="of training")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=1e-3, help="where all weights are trained")
    parser.add_argument("--lora_rate", type=float, default=5e-3, help="where LoRA's are")
    parser.add_argument("--blocks", type=int, default=96, help="to measure on")
    parser.add_argument("--calibration", type=int, default=256, help="blocks to calibrate on")
    parser.add_argument("--budget", type=float, default=0.02, help="of the calibration, in nats")
    parser.add_argument("--confidence", type=float, default=0.9, help="of the calibration")
    parser.add_argument("--work", type=Path, default=Path("runs/study-finetuning"), help="folder for what is trained")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    options = parser.parse_args(arguments)
    logging.set_verbosity_warning()
    options.work.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(study(options), indent=1) + "\n")


if __name__ == "__main__":
    main()
