"""Text and a task side by side."""

import json
import math

import numpy as np
import pytest
import torch

import training.train
from evaluation import mixture
from evaluation.common import Sequences, load_checkpoint
from evaluation.mixture import Mixture, Samples, Scored, against, ahead_of_hull, by_kind, score
from recurrent_gpt2 import KLExit
from tests.helpers import random_ids, tiny_model
from tests.training.runs import tiny_run, write_texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of one looped layer on text and short chains."""
    folder = tmp_path_factory.mktemp("mixture")
    write_texts(folder)
    chains = "{task: chains, slots: 10, depth: 3, values: 4, chains: 2}"
    arguments = tiny_run(
        folder, sources=f"[{{path: {folder / 'texts.jsonl'}}}, {chains}]", most_loops=4, max_steps=4, num_loops=4,
        num_hidden_layers=2, loop_groups="[[1]]", save_strategy="no",
    )  # fmt: skip
    training.train.main(arguments)
    return folder


def scored(loss: float, depth: float, n: int = 6, length: int = 4, right: int = 4) -> Scored:
    asked = np.full(n, length)
    steps = np.full((n, length, 1), round(depth))
    return Scored(asked * loss, np.full(n, right), asked, np.full((n, length), depth), steps)


def test_text_is_asked_for_its_next_token():
    blocks = random_ids(2, 12)
    model = tiny_model(std=0.3)
    found = score(model, Sequences.of_text(blocks), 3)
    expected = model(blocks, labels=blocks, num_loops=3).loss.item()
    assert found.loss == pytest.approx(expected, abs=1e-5)
    assert found.asked.tolist() == [11, 11]
    assert found.mean_steps == 3


def test_given_steps_are_taken_and_a_rule_is_run_as_the_model_runs_it():
    model, sequences = tiny_model(std=0.3), Sequences.of_text(random_ids(3, 12))
    adaptive = score(model, sequences, 6, KLExit(0.5))
    assert 1 < adaptive.mean_steps < 6
    again = score(model, sequences, 6, steps=adaptive.steps)
    assert np.array_equal(again.steps, adaptive.steps)
    assert np.allclose(again.losses, adaptive.losses)


def test_a_mixture_weighs_every_text_token_and_answer_alike_and_steps_by_tokens():
    both = Mixture(scored(4.0, 2.0, n=6), scored(1.0, 5.0, n=3))
    assert both.loss() == pytest.approx((24 * 4 + 12 * 1) / 36)
    assert both.mean_steps() == pytest.approx((24 * 2 + 12 * 5) / 36)
    first = (np.array([0]), np.array([0]))
    assert both.loss(first) == pytest.approx(2.5)


def test_a_rule_on_the_line_of_fixed_depths_is_not_ahead_and_one_below_it_is():
    fixed = [Mixture(scored(5 - k, k), scored(5 - k, k)) for k in (1.0, 2.0, 3.0)]
    on_line = Mixture(scored(3.5, 1.5), scored(3.5, 1.5))
    assert ahead_of_hull(on_line, fixed) == pytest.approx(0)
    below = Mixture(scored(3.5, 1.5), scored(3.1, 1.5))
    found = against(below, fixed)
    assert found["difference"] == pytest.approx(-0.2)
    assert found["low"] <= found["difference"] <= found["high"] < 0


def test_a_depth_for_each_kind_is_the_best_pair():
    """Text gains nothing from loops, the task everything: one loop for the one, three for the other."""
    fixed = [Mixture(scored(4.0, k), scored(4 - k, k)) for k in (1.0, 2.0, 3.0)]
    assert by_kind(fixed, 2.0) == pytest.approx((4.0 + 1.0) / 2)
    assert by_kind(fixed, 1.0) == pytest.approx((4.0 + 3.0) / 2)


def test_shuffled_steps_have_the_rules_histogram():
    model = tiny_model(std=0.3)
    samples = Samples(Sequences.of_text(random_ids(3, 12)), Sequences.of_text(random_ids(4, 9, seed=1)))
    study = mixture.MixtureStudy(model, None, samples, samples, 6, 5, ["kl"])
    run = samples.score(model, 6, KLExit(0.5))
    for within_kinds in (True, False):
        null = study.null(run, within_kinds)
        assert null.mean_steps() == pytest.approx(run.mean_steps())
        assert (null.text.mean_steps == pytest.approx(run.text.mean_steps)) is within_kinds
        assert not np.array_equal(null.text.steps, run.text.steps)


def test_the_command_writes_what_it_measured(folder, tmp_path, capsys):
    checkpoint, source = str(folder / "run"), str(folder / "texts.jsonl")
    options = ["--blocks", "4", "--num_loops", "5", "--rules", "kl", "--output", str(tmp_path)]
    mixture.main([checkpoint, "--source", source, *options])
    assert "| kl 0.1 |" in capsys.readouterr().out
    result = json.loads((tmp_path / "mixture.json").read_text())
    assert result["task"]["task"] == "chains"
    assert result["text_tokens"] / result["answers"] == pytest.approx(5, rel=0.3)  # few sequences, and whole
    assert [row["num_loops"] for row in result["fixed"]] == [[count] for count in range(1, 6)]
    for row in result["rules"]:
        assert row["low"] <= row["high"]
        assert math.isfinite(row["difference"])
    model, tokenizer = load_checkpoint(checkpoint)
    _, test = mixture.draw_samples(model, tokenizer, source, None, 4, None)
    with torch.no_grad():
        logits = model(test.text.ids, num_loops=3).logits[:, :-1].transpose(1, 2)
    expected = torch.nn.functional.cross_entropy(logits, test.text.ids[:, 1:]).item()
    assert result["fixed"][2]["text_loss"] == pytest.approx(expected, abs=1e-4)
    assert (tmp_path / "mixture.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rules", "klx"], "`--rules` has 'klx', but must be among"),
        (["--blocks", "1"], "`--blocks` is 1, `--full` 4 and `--num_loops` 16"),
        (["--full", "20"], "a full depth from 1 to the cap"),
        (["--task", "programs"], "`--task` is 'programs', but the checkpoint was trained on chains"),
    ],
)
def test_bad_input_is_a_sentence(folder, options, message):
    with pytest.raises(ValueError, match=message):
        mixture.main([str(folder / "run"), "--source", str(folder / "texts.jsonl"), *options])
