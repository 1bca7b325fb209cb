"""Tasks in training: curricula, rows beside text, and runs that end as if they had not been cut."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import training.train
import training.trainer
from evaluation.baselines import take_steps
from recurrent_gpt2 import ConfidenceExit, KLExit
from tests.helpers import random_ids, tiny_model
from tests.training.runs import tiny_run, write_texts
from tests.training.test_train import check_resume
from training.data import collate
from training.tasks import Chains, Programs, TaskSource, task_tokenizer
from training.tasks.feed import Curriculum, TaskFeed, TaskRows
from training.tasks.task import NO_ANSWER

CHAINS = "{task: chains, slots: 10, depth: 4, values: 3, chains: 2}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    write_texts(folder)
    return folder


def task_run(folder, name, **fields):
    settings = {"sources": f"[{CHAINS}]", "most_loops": 5, "learning_rate": 1e-2} | fields
    return tiny_run(folder, output_dir=folder / name, **settings)


def feed_of(task, **settings):
    return TaskFeed([TaskSource(task)], task_tokenizer([task]), **settings)


def test_a_curriculum_goes_deeper_when_its_mark_is_passed():
    curriculum = Curriculum(deepest=3, depth=1)
    depths = []
    for _ in range(80):
        curriculum.update(1.0)
        depths.append(curriculum.depth)
    assert depths[:28] == [1] * 28  # 1 - 0.9^n passes 0.95 at n = 29
    assert depths[28] == 2
    assert depths[-1] == 3
    for _ in range(80):
        curriculum.update(0.5)
    assert curriculum.depth == 3  # never back


def test_labels_stand_one_place_behind_what_they_answer():
    task = Programs()
    feed = feed_of(task)
    batch = task.sample(4, 3, np.random.default_rng(0))
    rows = feed.rows(0, batch)
    assert rows["input_ids"].shape == rows["labels"].shape == (4, task.length + 1)
    assert (rows["input_ids"][:, -1] == feed.end).all()
    said = rows["labels"][:, 1:].numpy()
    assert np.array_equal(said != NO_ANSWER, batch.asked)
    assert np.array_equal(said[batch.asked], feed.entries[0][batch.answers[batch.asked]])
    questions = batch.asked[:, 3 * 16 :]  # what follows a question is its answer; what follows a line is not
    assert (rows["input_ids"][:, 3 * 16 + 1 :].numpy()[questions] == said[:, 3 * 16 :][questions]).all()


def test_rows_are_a_function_of_seed_step_micro_step_rank_and_depth():
    batch = {"task": torch.zeros(8, dtype=torch.long)}
    task = Chains()

    def filled(step=3, micro_step=0, depth=2, **settings):
        feed = feed_of(task, **settings)
        feed.curricula[0].depth = depth
        return feed.fill(batch, step, micro_step)["input_ids"]

    assert torch.equal(filled(), filled())
    for other in (filled(step=4), filled(micro_step=1), filled(depth=3), filled(seed=1), filled(rank=1)):
        assert not torch.equal(filled(), other)


def test_loop_counts_are_uniform_from_the_depth_of_the_curriculum():
    feed = feed_of(Chains())
    feed.curricula[0].depth = 5
    drawn = np.array([feed.draw_num_loops(1, 12, step, 0)[0] for step in range(800)])
    assert drawn.min() == 5
    assert drawn.max() == 12
    assert np.bincount(drawn)[5:].min() > 60
    assert [feed.draw_num_loops(1, 12, step, 0)[0] for step in range(800)] == drawn.tolist()


def test_tasks_alone_are_drawn_by_their_weights():
    rows = TaskRows([TaskSource(Chains(), 2.0), TaskSource(Programs(), 1.0)], seed=0)
    assert len(rows) == 2**20
    counts = np.bincount([rows[place]["task"] for place in range(3000)])
    assert abs(counts[0] / counts.sum() - 2 / 3) < 0.05


def test_beside_text_tasks_come_in_a_batch_of_their_own_by_weight():
    sources = [TaskSource(Chains(slots=20, depth=4), 3.0), TaskSource(Programs(), 1.0)]
    tasks = [source.task for source in sources]
    feed = TaskFeed(sources, task_tokenizer(tasks), text_weight=2.0)
    text = [{"input_ids": np.full(30, place)} for place in range(4)]
    filled = feed.fill(collate(text), 0, 0)
    assert filled["input_ids"].shape == (4, 30)
    assert filled["labels"].equal(filled["input_ids"])
    made = filled["tasks"]
    assert made["task"].tolist() == [0] * 6 + [1] * 2
    assert made["input_ids"].shape == made["labels"].shape == (8, Programs().length + 1)
    assert (made["labels"][:6, 21:] == NO_ANSWER).all()


def test_the_loss_of_a_mixed_step_is_that_of_its_text_and_of_its_answers(folder):
    sources = f"[{{path: {folder / 'texts.jsonl'}}}, {CHAINS}]"
    fields = {"sources": sources, "max_steps": 2, "logging_steps": 1, "save_strategy": "no", "eval_strategy": "steps"}
    trainer = training.train.main(task_run(folder, "parts", **fields, eval_steps=2))
    logged = trainer.state.log_history
    for entry in logged[:2]:
        assert entry["loss"] == pytest.approx(entry["text_loss"] + entry["answers_loss"], abs=2e-3)
        assert entry["perplexity"] == pytest.approx(np.exp(entry["text_loss"]))
    evaluated = {name for entry in logged for name in entry}
    assert {"eval_text_loss", "eval_text_perplexity", "eval_tasks_loss", "eval_tasks_accuracy"} <= evaluated


def curriculum_of(run, step):
    state = json.loads((run / f"checkpoint-{step}" / "trainer_state.json").read_text())
    return state["stateful_callbacks"]["CurriculumCallback"]["attributes"]["curricula"]


def test_a_run_resumed_in_the_middle_of_its_curriculum_ends_with_the_same_weights(folder, monkeypatch):
    monkeypatch.setattr(Curriculum, "MARK", 0.3)
    monkeypatch.setattr(Curriculum, "AFTER", 0.2)
    whole, cut = folder / "whole", folder / "cut"
    fields = {"max_steps": 24, "save_steps": 8, "logging_steps": 4, "save_total_limit": 9}
    training.train.main(task_run(folder, "whole", **fields))
    assert curriculum_of(whole, 8)[0]["depth"] < curriculum_of(whole, 24)[0]["depth"]
    shutil.copytree(whole, cut)
    for step in (16, 24):
        shutil.rmtree(cut / f"checkpoint-{step}")
    training.train.main([*task_run(folder, "cut", **fields), "--resume"])
    expected, resumed = load_file(whole / "model.safetensors"), load_file(cut / "model.safetensors")
    assert all(torch.equal(resumed[key], expected[key]) for key in expected)
    assert curriculum_of(whole, 24) == curriculum_of(cut, 24)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_killed_run_of_tasks_beside_text_resumes_bit_for_bit(folder, streaming):
    sources = f"[{{path: {folder / 'texts.jsonl'}, streaming: {str(streaming).lower()}}}, {CHAINS}]"
    name = f"mixed-{streaming}"
    check_resume(folder, name, kills=1, max_steps=20, sources=sources, most_loops=5, save_total_limit=2)


def test_a_trained_checkpoint_is_an_ordinary_one_that_knows_its_task(folder):
    """A task that takes seconds to learn: chains of one hop."""
    arguments = task_run(
        folder, "ordinary", sources="[{task: chains, slots: 10, depth: 1, values: 2, chains: 2}]", max_steps=150,
        hidden_size=32, num_hidden_layers=1, loop_groups="[[0]]", save_strategy="no", per_device_train_batch_size=32,
        eval_strategy="steps", eval_steps=150, muon_learning_rate=0.02, tie_word_embeddings="false", logging_steps=50,
    )  # fmt: skip
    trainer = training.train.main(arguments)
    logged = {name: value for entry in trainer.state.log_history for name, value in entry.items()}
    assert logged["eval_accuracy"] > 0.9
    assert logged["chains_depth"] == 1
    model = AutoModelForCausalLM.from_pretrained(folder / "ordinary", trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder / "ordinary", trust_remote_code=True)
    assert model.config.tasks == [Chains(slots=10, depth=1, values=2, chains=2).to_dict()]
    said = []
    for text in ("a b @0", "a b @1", "b b a @2", "b a @0"):
        ids = tokenizer(text, return_tensors="pt").input_ids
        said.append(tokenizer.decode(model.generate(ids, max_new_tokens=1, do_sample=False)[0, -1]).strip())
    assert said == ["a", "b", "a", "b"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sources": "[{task: chains, slots: 40}]", "most_loops": 12}, "40 tokens and an end, but there are 32 places"),
        ({"most_loops": 3}, "`most_loops` is 3, but `depth` of task chains is 4"),
        ({"most_loops": 0}, "`most_loops` is 0"),
        ({"sources": "[{task: chains, text_column: a}]"}, "`text_column` is a setting of text"),
        ({"exit_policies": "[confident]"}, "`exit_policy` 'confident' is unknown"),
        ({"exit_share": 2}, "`exit_share` is 2, but must be a number from 0 to 1"),
        ({"sources": "[texts.jsonl]", "most_loops": 3}, "none of the `sources` is a task"),
    ],
)
def test_bad_settings_are_a_sentence(folder, fields, message, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=message):
        training.train.main(task_run(folder, "bad", **fields))


def test_training_with_exits_draws_policies_and_moves_the_weights(folder, monkeypatch):
    seen, draw = [], training.trainer.draw_exit_policy

    def recorded(*args):
        seen.append(draw(*args))
        return seen[-1]

    monkeypatch.setattr(training.trainer, "draw_exit_policy", recorded)
    policies = "[kl, {name: confidence, threshold: 0.5}]"
    fields = {"max_steps": 12, "save_strategy": "no", "exit_policies": policies, "exit_share": 0.7}
    trainer = training.train.main(task_run(folder, "exits", **fields))
    assert set(seen) == {None, KLExit(), ConfidenceExit(0.5)}
    assert trainer.model.training  # left as the stock trainer expects it
    again = training.train.main(task_run(folder, "exits-again", **fields))
    without = training.train.main(task_run(folder, "without", **fields | {"exit_share": 0.0}))
    first, second, third = (run.model.state_dict()["lm_head.weight"] for run in (trainer, again, without))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_gradients_flow_through_states_that_have_stopped():
    """A token that leaves at once is read by others; what they say still depends on the weights of its step."""
    model = tiny_model(std=0.3, dtype=torch.float64, num_hidden_layers=1, loop_groups=[[0]])
    ids, steps = random_ids(1, 6), np.array([[[1], [4], [2], [4], [1], [4]]])
    weight = model.model.layers[0].mlp.up_proj.weight

    def loss():
        return model(ids, exit_policy=take_steps(steps), num_loops=4, use_cache=False).logits[0, -1, :5].sum()

    (gradient,) = torch.autograd.grad(loss(), weight)
    direction = torch.randn_like(weight)
    with torch.no_grad():
        weight += 1e-6 * direction
        above = loss()
        weight -= 2e-6 * direction
        slope = (above - loss()) / 2e-6
    torch.testing.assert_close(slope, (gradient * direction).sum(), rtol=1e-4, atol=1e-6)
