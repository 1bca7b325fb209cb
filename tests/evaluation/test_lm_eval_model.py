import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoTokenizer

from recurrent_gpt2 import RecurrentGPT2ForCausalLM
from tests.helpers import ROOT

POLICY = {"name": "step_norm", "threshold": 2.0}
TASKS = {
    "number_choice": """
task: number_choice
dataset_path: json
dataset_kwargs: {data_files: DATA}
test_split: train
output_type: multiple_choice
doc_to_text: "The number {{number}} comes before"
doc_to_choice: ["{{good}}", "{{bad}}"]
doc_to_target: 0
target_delimiter: " "
metric_list: [{metric: acc}]
""",
    "number_writing": """
task: number_writing
dataset_path: json
dataset_kwargs: {data_files: DATA}
test_split: train
output_type: generate_until
doc_to_text: "The number {{number}}"
doc_to_target: " comes"
generation_kwargs: {max_gen_toks: 4, until: ["\\n"]}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def results(trained, tmp_path_factory):
    """What the harness writes about two local tasks, one scored and one generated."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"number": str(n), "good": str(n + 1), "bad": str(n + 57)} for n in range(5)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(task.replace("DATA", str(folder / "data.jsonl")))
    model_args = json.dumps({"pretrained": str(trained / "run"), "exit_policy": POLICY, "num_loops": 5})
    command = [sys.executable, "-m", "evaluation.lm_eval_model", "--model", "recurrent-gpt2",
               "--model_args", model_args,
               "--tasks", "number_choice,number_writing", "--include_path", str(folder), "--device", "cpu",
               "--batch_size", "4", "--output_path", str(folder / "out"), "--log_samples"]  # fmt: skip
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    file = next((folder / "out").rglob("results*.json"))
    samples = next((folder / "out").rglob("samples_number_choice*.jsonl"))
    return json.loads(file.read_text()), [json.loads(line) for line in samples.read_text().splitlines()], process.stdout


def test_the_harness_scores_what_an_adaptive_pass_gives(results, trained):
    _, samples, _ = results
    model = RecurrentGPT2ForCausalLM.from_pretrained(trained / "run").eval()
    tokenizer = AutoTokenizer.from_pretrained(trained / "run")
    assert len(samples) == 5
    for sample in samples:
        for arguments, response in zip(sample["arguments"].values(), sample["resps"], strict=True):
            context, continuation = arguments["arg_0"], arguments["arg_1"]
            whole = tokenizer(context + continuation, return_tensors="pt").input_ids
            start = len(tokenizer(context).input_ids)
            with torch.no_grad():
                logits = model(whole[:, :-1], exit_policy=POLICY, num_loops=5).logits[0].log_softmax(-1)
            expected = logits.gather(1, whole[0, 1:, None])[start - 1 :].sum().item()
            assert float(response[0][0]) == pytest.approx(expected, abs=1e-3)


def test_the_harness_reports_mean_steps(results):
    numbers, _, printed = results
    steps = numbers["config"]["mean_loop_steps"]
    assert len(steps) == 2
    assert all(1 <= mean <= 5 for mean in steps)
    assert any(mean < 5 for mean in steps)
    assert "mean loop steps per group over" in printed
    assert numbers["config"]["loops"] == '{"name": "step_norm", "threshold": 2.0}, at most 5 loops'
    assert "loops: " + numbers["config"]["loops"] in printed
    header = next(line for line in printed.splitlines() if line.startswith("|"))
    assert header.replace(" ", "").startswith("|Tasks|Version|Filter|n-shot|Metric|")
    assert {"number_choice", "number_writing"} <= set(numbers["results"])


def test_padding_is_not_counted(trained):
    from evaluation.lm_eval_model import RecurrentGPT2LM

    lm = RecurrentGPT2LM(str(trained / "run"), exit_policy="step_norm", num_loops=3, device="cpu")
    lm._model_call(torch.tensor([[5, 6, 7, 0, 0], [8, 0, 9, 10, 11]]))
    assert lm.tokens == 8
