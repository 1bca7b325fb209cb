import json

import numpy as np
import pytest
import torch

import training.train
from evaluation import depth
from evaluation.common import Sequences, load_checkpoint
from evaluation.depth import Run, first_exits, run, run_all_depths, run_unfrozen
from recurrent_gpt2 import AccelerationExit, ConfidenceExit, StepNormExit
from tests.helpers import tiny_model
from tests.training.runs import tiny_run
from training.tasks import Chains

TASK = Chains(slots=10, depth=3, values=4, chains=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one looped layer on short chains."""
    folder = tmp_path_factory.mktemp("depth")
    arguments = tiny_run(
        folder, sources="[{task: chains, slots: 10, depth: 3, values: 4, chains: 2}]", most_loops=4, max_steps=10,
        num_hidden_layers=1, loop_groups="[[0]]", save_strategy="no", tie_word_embeddings="false", learning_rate=1e-2,
    )  # fmt: skip
    training.train.main(arguments)
    return folder / "run"


def sequences_of(n=12, seed=0):
    return Sequences.of(TASK.sample(n, 3, np.random.default_rng(seed)), np.arange(len(TASK.tokens)))


def model_of(**settings):
    one_group = {"num_hidden_layers": 2, "loop_groups": [[1]], "vocab_size": len(TASK.tokens)}
    return tiny_model(std=0.3, **{**one_group, **settings})


def test_accuracy_counts_what_is_asked():
    asked = np.array([[True, False, True], [True, True, False]])
    right = np.array([[True, False, False], [True, True, False]])
    measured = Run(right, asked, np.ones((2, 3, 1)), np.array([[1.0, 2, 3], [1, 2, 3]]))
    assert measured.accuracy == 3 / 4
    assert measured.accuracy_of(np.array([0, 0])) == 1 / 2
    assert measured.mean_steps == 2
    required = np.array([[0, 9, 2], [0, 2, 9]])
    assert measured.by_required(measured.right, required)[:3] == [1.0, None, 0.5]


def test_one_pass_has_all_fixed_depths():
    model, sequences = model_of(), sequences_of()
    for count, at_once in enumerate(run_all_depths(model, sequences, 5), start=1):
        alone = run(model, sequences, count)
        assert np.array_equal(at_once.right, alone.right)
        assert np.array_equal(at_once.steps, alone.steps)


@pytest.mark.parametrize("policy", [StepNormExit(0.4, normalize="state"), AccelerationExit(0.5, normalize="state")])
def test_first_exits_are_the_steps_of_a_token_that_nobody_else_froze(policy):
    """The first token reads itself alone, so that it takes the same steps whether others are frozen or not."""
    model, sequences = model_of(), sequences_of(64)
    adaptive, (unfrozen,) = run(model, sequences, 12, policy), run_unfrozen(model, sequences, 12, [policy])
    assert np.array_equal(adaptive.steps[:, 0], unfrozen.steps[:, 0])
    assert np.array_equal(adaptive.right[:, 0], unfrozen.right[:, 0])


def test_a_trajectory_that_never_fires_is_read_at_its_end():
    states = torch.randn(7, 3, 8)
    assert first_exits(StepNormExit(0.0), states, None).tolist() == [6, 6, 6]
    assert first_exits(StepNormExit(1e6), states, None).tolist() == [1, 1, 1]
    assert first_exits(StepNormExit(1e6, patience=3), states, None).tolist() == [3, 3, 3]


def test_confidence_lets_go_of_a_sure_token():
    model, sequences = model_of(), sequences_of()
    assert run(model, sequences, 6, ConfidenceExit(1.0)).mean_steps == 1
    assert run(model, sequences, 6, ConfidenceExit(0.0)).mean_steps == 6


def test_signals_are_those_of_tokens_that_wait_and_of_tokens_that_know():
    model, cap = model_of(), 5
    study = depth.DepthStudy(model, TASK, np.arange(len(TASK.tokens)), cap, 8)
    asked, required = study.test.asked, study.test.depths
    seen = {
        ("waiting", "probability"): [],
        ("known", "probability"): [],
        ("waiting", "step"): [],
        ("known", "step"): [],
    }
    before = None
    for loops in range(1, cap + 1):
        with torch.no_grad():
            output = model(study.test.ids, num_loops=loops, output_loop_trajectory=True)
        state = output.loop_trajectory[0][-1].numpy()
        for name, where in (("waiting", asked & (loops < required)), ("known", asked & (loops > required))):
            seen[name, "probability"].append(output.logits.softmax(-1).amax(-1).numpy()[where])
            if before is not None:  # the first step, from noise, is always long
                step = np.linalg.norm(state - before, axis=-1) / np.linalg.norm(state, axis=-1)
                seen[name, "step"].append(step[where])
        before = state
    found = study.signals()
    for (name, what), values in seen.items():
        expected = np.quantile(np.concatenate(values), (0.01, 0.5, 0.99))
        assert found[name][what] == pytest.approx(expected.tolist(), abs=1e-4)
    assert depth.DepthStudy(model_of(loop_groups=[[0]]), TASK, study.entries, cap, 8).signals() is None


def test_the_command_writes_what_it_measured(trained, tmp_path, capsys):
    arguments = [str(trained), "--num_loops", "6", "--sequences", "8", "--output", str(tmp_path), "--rules", "kl",
                 "acceleration/state"]  # fmt: skip
    depth.main(arguments)
    printed = capsys.readouterr().out
    assert "| acceleration/state | 1.6 |" in printed
    result = json.loads((tmp_path / "depth.json").read_text())
    assert result["task"]["task"] == "chains"
    assert [row["num_loops"] for row in result["fixed"]] == [[count] for count in range(1, 7)]
    assert set(result["rules"]) == {"kl", "acceleration/state"}
    assert len(result["fixed"][0]["accuracy_by_depth"]) == 4
    assert [row["margin"] for row in result["ideal"]] == [0, 1, 2]
    model, _ = load_checkpoint(trained)
    sequences = depth.DepthStudy(model, TASK, np.arange(len(TASK.tokens)) + 2, 6, 8).test
    assert result["fixed"][3]["accuracy"] == pytest.approx(run(model, sequences, 4).accuracy, abs=1e-4)
    for name in ("depth.png", "heat_map.png"):
        assert (tmp_path / name).stat().st_size > 5000


def test_bad_input_is_a_sentence(trained, tmp_path):
    with pytest.raises(ValueError, match=r"`--rules` has 'klx', but must be among"):
        depth.main([str(trained), "--rules", "klx"])
    with pytest.raises(ValueError, match=r"`--task` is 'programs', but the checkpoint was trained on chains"):
        depth.main([str(trained), "--task", "programs"])
    with pytest.raises(ValueError, match="must be at least 2"):
        depth.main([str(trained), "--sequences", "1"])
    with pytest.raises(ValueError, match="trained on no depth task"):
        depth.task_of(tiny_model())
