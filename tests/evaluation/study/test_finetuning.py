"""The studies behind docs/finetuning.md, from start to table, with models of seconds."""

import json

import pytest
from transformers import AutoModelForCausalLM

import training.train
from evaluation.study import documents, finetuning, retrofit
from tests.training.runs import tiny_run, write_texts

pytestmark = pytest.mark.slow


def test_fine_tuning_is_measured_before_and_after(tmp_path, monkeypatch):
    write_texts(tmp_path)
    start = tmp_path / "start"
    training.train.main(
        tiny_run(tmp_path, output_dir=start, max_steps=2, save_steps=2, max_position_embeddings=128, mean_loops=3,
                 num_loops=4, loop_groups="[[1, 2]]")
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(start)
    model.generation_config.exit_policy = {"name": "step_norm", "threshold": 0.3, "normalize": "state"}
    model.generation_config.num_loops = 4
    model.save_pretrained(start)
    output = tmp_path / "finetuning.json"
    arguments = ["--checkpoint", str(start), "--files", "24", "--steps", "30", "--batch_size", "4", "--blocks", "8"]
    arguments += ["--learning_rate", "1e-2", "--calibration", "24", "--budget", "0.5", "--work", str(tmp_path / "work")]
    finetuning.main([*arguments, "--output", str(output)])
    found = json.loads(output.read_text())
    before, whole, lora = found["rows"].values()
    assert whole["full"]["loss"] < before["full"]["loss"] - 0.1
    assert lora["full"]["loss"] < before["full"]["loss"]
    assert 0 < lora["trained"] < whole["trained"]
    for row in (before, whole, lora):
        assert row["calibrated"]["steps"][0] <= 4
        assert row["exits"]["policy"]["name"] == "step_norm"

    def fail(*given):
        raise AssertionError("what is done is not done again")

    monkeypatch.setattr(finetuning, "finetune", fail)
    finetuning.main([*arguments, "--output", str(output)])
    assert json.loads(output.read_text()) == found
    monkeypatch.setattr(documents, "read", {"finetuning.json": found}.__getitem__)
    table = documents.finetuning_table()
    assert [row[0] for row in table.rows] == list(found["rows"])
    assert all(len(row) == len(table.header) for row in table.rows)


def test_a_retrofit_is_measured_beside_its_controls(tmp_path, monkeypatch):
    write_texts(tmp_path)
    output = tmp_path / "retrofit.json"
    arguments = ["--text", str(tmp_path / "texts.jsonl"), "--gpt2_steps", "2", "--steps", "2", "--batch_size", "2"]
    arguments += ["--work", str(tmp_path / "work"), "--output", str(output)]
    retrofit.main([*arguments, "--ways", "neither"])
    retrofit.main([*arguments, "--ways", "loops grow, KL", "--starts", "input"])
    gpt2 = str(tmp_path / "work/gpt2")
    retrofit.main([*arguments, "--gpt2", gpt2, "--name", "sampled", "--samples", "70", "--ways", "KL alone",
                   "--starts", "zeros"])  # fmt: skip
    found = json.loads(output.read_text())
    assert list(found["text"]["healed"]) == ["zeros: neither", "input: neither", "input: loops grow, KL"]
    assert list(found["sampled"]["healed"]) == ["zeros: KL alone"]
    for losses in found["text"]["converted"].values():
        assert losses["1"] == pytest.approx(found["text"]["gpt2"], abs=1e-5)
    for part in found.values():
        assert part["no loops"] > 0
        for values in part["healed"].values():
            assert list(values["loss"]) == ["1", "2", "4", "8", "16"]
            assert len(values["step_sizes"][0]) == 32
    monkeypatch.setattr(documents, "read", {"retrofit.json": found}.__getitem__)
    assert documents.retrofit_table().rows[-1][0] == "trained on without loops"
