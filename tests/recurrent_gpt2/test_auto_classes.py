import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Trainer,
    TrainingArguments,
    pipeline,
)

from recurrent_gpt2 import RecurrentGPT2Config, RecurrentGPT2ForCausalLM, RecurrentGPT2Model
from tests.helpers import REMOTE_CODE, random_ids, run_fresh, tiny_config, tiny_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_after_import_the_auto_classes_know_the_model(checkpoint):
    assert type(AutoConfig.from_pretrained(checkpoint)) is RecurrentGPT2Config
    assert type(AutoModel.from_pretrained(checkpoint)) is RecurrentGPT2Model
    assert type(AutoModelForCausalLM.from_pretrained(checkpoint)) is RecurrentGPT2ForCausalLM
    assert type(AutoModelForCausalLM.from_config(tiny_config())) is RecurrentGPT2ForCausalLM


def test_a_checkpoint_has_the_code_and_safetensors_and_nothing_else(checkpoint):
    files = {path.name for path in checkpoint.iterdir()}
    assert files == REMOTE_CODE | {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip
    assert "start_noise" not in " ".join(load_file(checkpoint / "model.safetensors"))


def test_remote_code_gives_the_same_logits_bit_for_bit_where_the_package_is_not_installed(checkpoint, tmp_path):
    code = f"""
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline
try:
    import recurrent_gpt2
    raise SystemExit("the package can be imported")
except ModuleNotFoundError:
    pass
folder = {str(checkpoint)!r}
ids = torch.tensor({random_ids(2, 9).tolist()})
assert AutoConfig.from_pretrained(folder, trust_remote_code=True).loop_groups == [[1], [2, 3], [4]]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
base = AutoModel.from_pretrained(folder, trust_remote_code=True)
results = [model(ids).logits, model(ids, exit_policy={{"name": "step_norm", "threshold": 1.0}}).logits,
           base(ids).last_hidden_state, model.generate(ids, max_new_tokens=4, do_sample=False)]
torch.save(results, "results.pt")
generate = pipeline("text-generation", model=folder, tokenizer=folder, trust_remote_code=True)
print(generate("abc", max_new_tokens=3, do_sample=False)[0]["generated_text"])
model.save_pretrained("again")
again = AutoModelForCausalLM.from_pretrained("again", trust_remote_code=True)
assert torch.equal(again(ids).logits, results[0])
"""
    printed = run_fresh(code, tmp_path)
    model = RecurrentGPT2ForCausalLM.from_pretrained(checkpoint).eval()
    ids = random_ids(2, 9)
    logits, adaptive, hidden, generated = torch.load(tmp_path / "results.pt")
    assert torch.equal(logits, model(ids).logits)
    assert torch.equal(adaptive, model(ids, exit_policy={"name": "step_norm", "threshold": 1.0}).logits)
    assert torch.equal(hidden, model.model(ids).last_hidden_state)
    assert torch.equal(generated, model.generate(ids, max_new_tokens=4, do_sample=False))
    assert printed.strip().startswith("abc")
    assert {path.name for path in (tmp_path / "again").iterdir()} >= REMOTE_CODE


def test_pipeline_after_import(checkpoint):
    generate = pipeline("text-generation", model=str(checkpoint))
    texts = generate(["ab", "cdefg"], max_new_tokens=4, do_sample=False, batch_size=2)
    alone = [generate(prompt, max_new_tokens=4, do_sample=False) for prompt in ("ab", "cdefg")]
    assert texts == alone


def test_a_checkpoint_of_a_plain_trainer_carries_code_and_learns(tmp_path, tokenizer):
    data = [{"input_ids": row, "labels": row} for row in random_ids(8, 12)]
    arguments = TrainingArguments(
        tmp_path / "run", max_steps=30, per_device_train_batch_size=8, learning_rate=1e-2, logging_steps=1,
        save_steps=30, report_to="none", use_cpu=True, disable_tqdm=True, seed=0,
    )  # fmt: skip
    trainer = Trainer(tiny_model(), arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.5
    saved = tmp_path / "run" / "checkpoint-30"
    assert {path.name for path in saved.iterdir()} >= REMOTE_CODE
    assert json.loads((saved / "config.json").read_text())["auto_map"].keys() >= {"AutoConfig", "AutoModelForCausalLM"}
    printed = run_fresh(
        f"""
from transformers import AutoModelForCausalLM
print(type(AutoModelForCausalLM.from_pretrained({str(saved)!r}, trust_remote_code=True)).__name__)
""",
        tmp_path,
    )
    assert printed.strip() == "RecurrentGPT2ForCausalLM"


def test_a_policy_registered_with_the_package_is_known_to_a_model_of_remote_code(checkpoint, tmp_path):
    code = f"""
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(checkpoint)!r}, trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules")
from recurrent_gpt2 import AccelerationExit, ExitPolicy, available_exit_policies, register_exit_policy
@register_exit_policy("at_once")
class AtOnce(ExitPolicy):
    def measure(self, view):
        return view.state.new_full((len(view.state),), -1.0)
ids = torch.tensor([[1, 2, 3]])
for policy in ("at_once", {{"name": "at_once", "min_loops": 2}}, AtOnce()):
    steps = model.generate(ids, max_new_tokens=2, exit_policy=policy, return_dict_in_generate=True).loop_steps
    print(steps.unique().tolist())
model.generation_config.exit_policy = AtOnce()
model.save_pretrained("saved")
print(model(ids, exit_policy=AccelerationExit()).loop_steps.shape)
assert "at_once" in available_exit_policies()
"""
    printed = run_fresh(code, tmp_path, hide_package=False)
    assert printed.splitlines()[:3] == ["[1]", "[2]", "[1]"]
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert saved["exit_policy"]["name"] == "at_once"


def test_saving_over_a_checkpoint_whose_code_is_linked_writes_files_and_not_through_the_links(tmp_path):
    target = tmp_path / "elsewhere.py"
    target.write_text("# of someone else")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "loop_cache.py").symlink_to(target)
    tiny_model().save_pretrained(folder)
    assert target.read_text() == "# of someone else"
    assert "class LoopCache" in (folder / "loop_cache.py").read_text()
