"""docs/finetuning.md, as somebody follows it who has a fresh clone; and what TRL does with loops."""

import copy
import json
import math
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import requires, version

import pytest
import torch
from datasets import Dataset
from packaging.requirements import Requirement

from tests.helpers import ROOT, tiny_model

DOCUMENT = ROOT / "docs/finetuning.md"
# Runs what it is given in one Python session, and commands in a shell of their own.
SESSION = """
import json, subprocess, sys
names = {"__name__": "__main__"}
for language, block in json.load(sys.stdin):
    print("----", language, flush=True)
    if language == "bash":
        subprocess.run(["bash", "-e", "-c", block], check=True)
    else:
        exec(compile(block, "docs/finetuning.md", "exec"), names)
"""


def blocks() -> list[tuple[str, str]]:
    return re.findall(r"^```(bash|python)\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)


def test_the_extra_has_pinned_versions():
    """The first block installs it."""
    assert ".[finetune]" in blocks()[0][1]
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    pinned = {name.lower(): number for name, number in pinned.items()}
    extra = [Requirement(text) for text in requires("recurrent-gpt2")]
    extra = [needed for needed in extra if needed.marker and needed.marker.evaluate({"extra": "finetune"})]
    needed = {each.name.lower(): each for each in extra if each.name != "recurrent-gpt2"}
    assert needed.keys() >= {"bitsandbytes", "peft", "trl"}
    for name, requirement in needed.items():
        assert pinned[name] in requirement.specifier, requirement


@pytest.mark.slow
def test_every_block_runs_in_the_order_written(tmp_path):
    for name in ("bitsandbytes", "peft", "trl"):
        assert f"{name}=={version(name)}" in (ROOT / "constraints.txt").read_text().splitlines(), name
    left_out = shutil.ignore_patterns(".*", "runs", "results", "__pycache__", "*.egg-info")
    clone = shutil.copytree(ROOT, tmp_path / "clone", symlinks=True, ignore=left_out)
    _, *others = blocks()  # the first installs
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SESSION], input=json.dumps(others), cwd=clone, capture_output=True,
        env={**environment, "PYTHONPATH": str(clone)}, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("----") == len(others)
    assert done.stdout.count("Return the number of") >= 3  # after training, after a merge, in four bits
    assert done.stdout.endswith("True\n")  # of GPT-2
    for run in ("finetune/calibration.json", "trainer/modeling_recurrent_gpt2.py", "lora/adapter_model.safetensors",
                "qlora/adapter_model.safetensors"):  # fmt: skip
        assert (clone / "runs" / run).exists(), run
    for run in ("sft", "dpo", "grpo"):
        assert list((clone / "runs" / run).glob("checkpoint-*")), run


SHORT = {
    "max_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 1, "report_to": "none", "use_cpu": True,
    "bf16": False, "disable_tqdm": True, "save_strategy": "no", "learning_rate": 1e-3,
}  # fmt: skip
NUM_LOOPS = 5
FIXED = {"loop_sigma": None, "mean_loops": NUM_LOOPS}


def watch(model) -> list[tuple[bool, set[int], bool]]:
    """Of every pass: whether it recorded gradients, which loop counts it took, whether it had an exit policy."""
    seen = []

    def record(module, args, kwargs, output):
        counts = set(output.loop_steps.unique().tolist()) - {0}  # of padding
        seen.append((torch.is_grad_enabled(), counts, kwargs.get("exit_policy") is not None))

    model.model.register_forward_hook(record, with_kwargs=True)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
def test_sft_draws_loops_in_training_and_evaluates_at_fixed_ones(tmp_path, tokenizer, packing):
    from trl import SFTConfig, SFTTrainer

    model = tiny_model(num_loops=NUM_LOOPS, mean_loops=9)
    seen = watch(model)
    texts = Dataset.from_dict({"text": ["abcdefg" * 3, "hijk" * 2, "lmnop" * 4, "xyz" * 5] * 4})
    arguments = SFTConfig(str(tmp_path), packing=packing, max_length=40, eval_strategy="steps", eval_steps=1, **SHORT)
    SFTTrainer(model, arguments, train_dataset=texts, eval_dataset=texts, processing_class=tokenizer).train()
    drawn = [counts for has_gradients, counts, _ in seen if has_gradients]
    assert len(drawn) == 2
    assert drawn[0] != drawn[1]
    assert all(counts == {NUM_LOOPS} for has_gradients, counts, _ in seen if not has_gradients)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_dpo_compares_like_with_like_where_loops_and_start_are_fixed(tmp_path, tokenizer, lora):
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    words = {"prompt": ["abc", "bcd", "cde", "efg"], "chosen": ["ddd", "eee", "fff", "ggg"]}
    pairs = Dataset.from_dict({**words, "rejected": ["zz", "yy", "xx", "ww"]})
    losses = {}
    for name, settings in {"drawn": {}, "fixed": {**FIXED, "state_init": "zeros"}}.items():
        model = tiny_model(num_loops=NUM_LOOPS, **settings)
        reference = None if lora else copy.deepcopy(model)
        seen = watch(model if lora else reference)
        trainer = DPOTrainer(
            model, ref_model=reference, args=DPOConfig(str(tmp_path), **SHORT), train_dataset=pairs,
            processing_class=tokenizer, peft_config=LoraConfig(r=4) if lora else None,
        )  # fmt: skip
        trainer.train()
        assert all(counts == {NUM_LOOPS} for has_gradients, counts, _ in seen if not has_gradients)  # the reference
        losses[name] = trainer.state.log_history[0]["loss"]
    assert losses["fixed"] == pytest.approx(math.log(2), abs=1e-5)  # no margin before the first step
    assert abs(losses["drawn"] - math.log(2)) > 1e-3


@pytest.mark.slow
def test_grpo_samples_with_the_exits_of_the_checkpoint_unless_they_are_taken_away(tmp_path, tokenizer):
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions, **columns):
        return [float(text.count("a")) for text in completions]

    prompts = Dataset.from_dict({"prompt": ["abc", "bcd", "cde", "efg"]})
    for exits in (True, False):
        model = tiny_model(num_loops=NUM_LOOPS, **FIXED)
        if exits:
            model.generation_config.exit_policy = {"name": "step_norm", "threshold": 0.5, "normalize": "state"}
        seen = watch(model)
        arguments = GRPOConfig(str(tmp_path), num_generations=2, max_completion_length=6, **SHORT)
        GRPOTrainer(
            model, reward_funcs=reward, args=arguments, train_dataset=prompts, processing_class=tokenizer
        ).train()
        sampled = [(counts, has_policy) for has_gradients, counts, has_policy in seen if not has_gradients]
        assert sampled
        assert all(has_policy is exits for _, has_policy in sampled)
        assert all((counts == {NUM_LOOPS}) is not exits for counts, _ in sampled)
        assert all(counts == {NUM_LOOPS} for has_gradients, counts, _ in seen if has_gradients)
