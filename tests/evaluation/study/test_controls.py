import json

import pytest

import training.train
from evaluation.study import controls
from tests.training.runs import tiny_run


def test_a_run_and_one_that_was_stopped_are_read_at_the_same_step(trained, tmp_path, capsys):
    arguments = tiny_run(trained, geometry_loops=6, max_steps=4, save_steps=2, eval_strategy="steps", eval_steps=2)
    training.train.main([*arguments, "--output_dir", str(tmp_path / "whole")])
    (tmp_path / "whole").rename(tmp_path / "stopped")
    (tmp_path / "stopped" / "trainer_state.json").unlink()
    (stopped,) = controls.main([f"a=b={tmp_path / 'stopped'}", "--step", "2", "--output", str(tmp_path / "out.json")])
    assert (stopped.name, stopped.step, stopped.tokens, stopped.geometry_step) == ("a=b", 2, 2 * 4 * 32, 2)
    state = json.loads((tmp_path / "stopped" / "checkpoint-4" / "trainer_state.json").read_text())
    losses = [entry["eval_loss"] for entry in state["log_history"] if entry["step"] == 2 and "eval_loss" in entry]
    assert stopped.eval_loss == losses[0]
    assert len(stopped.cosines) == 2
    assert len(stopped.drift_net) == 1
    assert json.loads((tmp_path / "out.json").read_text())[0]["eval_loss"] == losses[0]
    (other,) = controls.main([f"a={tmp_path / 'stopped'}@4", "--step", "2"])
    assert other.step == 4
    with pytest.raises(ValueError, match=r"`--step` is 3, but .* was evaluated at: 2, 4"):
        controls.main([f"a={tmp_path / 'stopped'}", "--step", "3"])


def test_bad_input_is_named(tmp_path):
    with pytest.raises(ValueError, match="not of the form NAME=RUN"):
        controls.main([str(tmp_path), "--step", "1"])
    with pytest.raises(FileNotFoundError, match="neither"):
        controls.main([f"a={tmp_path}", "--step", "1"])
