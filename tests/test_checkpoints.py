"""The checkpoints that come with the project: what their files say, and that they work at first try."""

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    pipeline,
)

from tests.helpers import ROOT

CHECKPOINTS = sorted(path.parent for path in (ROOT / "checkpoints").glob("*/config.json"))
TEXTS = {
    "recurrent-gpt2-chains": ["a c @0 @1", "b @0", "a b @1 @0 @2"],
    "recurrent-gpt2-mini": ["Return the number of", "The file", "Raised when an error is encountered"],
    "recurrent-gpt2-programs": ["x0 = 3; x1 = x0 + x0 ? x1", "x0 = 1 ? x0", "x0 = 2; x1 = 5; x2 = x1 - x0 ? x2"],
}
pytestmark = pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda path: path.name)


def load(checkpoint: Path):
    return AutoModelForCausalLM.from_pretrained(checkpoint).eval(), AutoTokenizer.from_pretrained(checkpoint)


def test_the_cap_is_one(checkpoint):
    config, generation = (
        json.loads((checkpoint / f"{name}.json").read_text()) for name in ("config", "generation_config")
    )
    assert config["num_loops"] == generation["num_loops"]


@pytest.mark.parametrize(
    "policy", ["step_norm", "acceleration", {"name": "step_norm", "normalize": "state", "threshold": 0.2}], ids=str
)
def test_a_policy_takes_the_same_steps_in_a_pass_and_in_generation(checkpoint, policy):
    model, tokenizer = load(checkpoint)
    ids = tokenizer(TEXTS[checkpoint.name][0], return_tensors="pt").input_ids
    output = model.generate(ids, max_new_tokens=12, do_sample=False, exit_policy=policy, return_dict_in_generate=True)
    with torch.no_grad():
        steps = model(output.sequences[:, :-1], exit_policy=policy).loop_steps
    assert torch.equal(steps, output.loop_steps)


def test_batches_are_padded_without_a_word(checkpoint):
    model, tokenizer = load(checkpoint)
    assert tokenizer.model_max_length == model.config.max_position_embeddings
    assert len(tokenizer) == model.config.vocab_size
    texts = TEXTS[checkpoint.name]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    together = model.generate(**batch, max_new_tokens=8, do_sample=False)
    for row, text in zip(together, texts, strict=True):
        alone = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=8, do_sample=False)
        assert tokenizer.decode(row, skip_special_tokens=True) == tokenizer.decode(alone[0], skip_special_tokens=True)


def test_a_pipeline_takes_batches(checkpoint):
    model, tokenizer = load(checkpoint)
    generate, texts = pipeline("text-generation", model=model, tokenizer=tokenizer), TEXTS[checkpoint.name]
    options = {"max_new_tokens": 5, "do_sample": False}
    together = [output[0]["generated_text"] for output in generate(texts, batch_size=2, **options)]
    assert together == [generate(text, **options)[0]["generated_text"] for text in texts]


def test_a_plain_trainer_trains_it(checkpoint, tmp_path):
    model, tokenizer = load(checkpoint)
    arguments = TrainingArguments(
        tmp_path, max_steps=2, per_device_train_batch_size=3, report_to="none", use_cpu=True, disable_tqdm=True,
        save_strategy="no", logging_steps=1,
    )  # fmt: skip
    data = [{"input_ids": ids} for ids in tokenizer(TEXTS[checkpoint.name], truncation=True).input_ids]
    trainer = Trainer(
        model, arguments, train_dataset=data, data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False)
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    # A model of a task has learned its answers, and not what comes next.
    assert all(loss < (10 if checkpoint.name == "recurrent-gpt2-mini" else 100) for loss in losses)
