import shutil

import evaluate
import pytest
import torch
from transformers import AutoTokenizer

from evaluation.lm_eval_model import RecurrentGPT2LM
from recurrent_gpt2 import RecurrentGPT2ForCausalLM
from tests.helpers import ROOT

POLICY = {"name": "step_norm", "threshold": 2.0}
TEXTS = ["The number 5 comes before 6.", "Seven.", "The number 17 comes before 18, and"]


@pytest.fixture(scope="module")
def metric():
    return evaluate.load(str(ROOT / "evaluation" / "perplexity"))


def test_perplexity_is_that_of_each_text_alone(metric, trained):
    checkpoint = str(trained / "run")
    result = metric.compute(predictions=TEXTS, model_id=checkpoint, exit_policy=POLICY, num_loops=5, batch_size=2)
    model, tokenizer = RecurrentGPT2ForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    sums, steps, tokens = [], 0, 0
    for text, perplexity in zip(TEXTS, result["perplexities"], strict=True):
        ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer(text).input_ids]])
        with torch.no_grad():
            output = model(ids, labels=ids, exit_policy=POLICY, num_loops=5)
        assert perplexity == pytest.approx(output.loss.exp().item(), rel=1e-4)
        sums.append(output.loss.item() * (ids.shape[1] - 1))
        steps, tokens = steps + output.loop_steps.double().sum((0, 1)), tokens + ids.shape[1]
    overall = torch.tensor(sum(sums) / (tokens - len(TEXTS))).exp().item()
    assert result["perplexity"] == pytest.approx(overall, rel=1e-4)
    assert result["mean_steps"] == pytest.approx((steps / tokens).tolist())


def test_the_policy_changes_the_steps(metric, trained):
    results = [
        metric.compute(predictions=TEXTS, model_id=str(trained / "run"), exit_policy=policy, num_loops=5)["mean_steps"]
        for policy in (None, POLICY)
    ]
    assert results[0] == [5, 5]
    assert max(results[1]) < 5


@pytest.mark.parametrize("text", ["", "word " * 200])
def test_texts_that_do_not_fit_are_named(metric, trained, text):
    with pytest.raises(ValueError, match=r"text 1 of `predictions` has \d+ tokens, but must have 2 to 32"):
        metric.compute(predictions=["One text.", text], model_id=str(trained / "run"))


def test_the_default_is_what_generate_and_the_harness_take(metric, trained, tmp_path):
    shutil.copytree(trained / "run", tmp_path / "run")
    checkpoint = str(tmp_path / "run")
    model, tokenizer = RecurrentGPT2ForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    model.generation_config.exit_policy, model.generation_config.num_loops = POLICY, 5
    model.save_pretrained(checkpoint)
    result = metric.compute(predictions=TEXTS[:1], model_id=checkpoint)
    assert (result["exit_policy"], result["num_loops"]) == (POLICY, [5, 5])

    ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer(TEXTS[0]).input_ids]])
    output = model.generate(ids, max_new_tokens=1, return_dict_in_generate=True)
    assert result["mean_steps"] == pytest.approx(output.loop_steps.double().mean((0, 1)).tolist())
    harness = RecurrentGPT2LM(checkpoint, device="cpu")
    harness._model_call(ids)
    assert harness.mean_loop_steps == pytest.approx(result["mean_steps"])
    assert harness.get_model_info()["loops"] == '{"name": "step_norm", "threshold": 2.0}, at most 5 loops'

    fixed = metric.compute(predictions=TEXTS[:1], model_id=checkpoint, exit_policy=None)
    assert (fixed["exit_policy"], fixed["mean_steps"]) == (None, [5, 5])
    harness = RecurrentGPT2LM(checkpoint, device="cpu", exit_policy=None)
    harness._model_call(ids)
    assert harness.mean_loop_steps == [5, 5]
    assert harness.get_model_info()["loops"] == "5 fixed loops"
