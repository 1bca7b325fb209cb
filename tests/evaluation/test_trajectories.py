import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from evaluation import trajectories
from evaluation.trajectories import load_trajectories, write_trajectories
from recurrent_gpt2 import RecurrentGPT2ForCausalLM, geometry
from tests.helpers import ROOT, tiny_model

TEXT = "TheQuickBrownFoxJumpsOverTheLazyDogAndRunsAwayIntoTheNightWithoutASoundOrATraceOfItself" * 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_files_hold_the_models_own_states(checkpoint, tokenizer, tmp_path):
    write_trajectories(checkpoint, TEXT, tmp_path, num_loops=[4, 3, 5], keep_states=20)
    loaded = load_trajectories(tmp_path)
    model = RecurrentGPT2ForCausalLM.from_pretrained(checkpoint).eval()
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    assert loaded.index["token_ids"] == ids[0].tolist()
    assert loaded.index["text"] == TEXT
    assert loaded.index["groups"] == [[1], [2, 3], [4]]
    chosen = loaded.index["chosen"]
    assert len(chosen) == 20
    assert chosen[-1] == ids.shape[1] - 1
    assert [loaded[f"group_{g}"].shape for g in range(3)] == [(5, 20, 32), (4, 20, 32), (6, 20, 32)]
    assert loaded.index["points"] == ["embeddings", "layer_0", "group_0", "group_1", "group_2", "final_norm"]
    place = 0
    with torch.no_grad():
        for start in range(0, ids.shape[1], 48):
            window = ids[:, start : start + 48]
            states = model(window, num_loops=[4, 3, 5], output_loop_trajectory=True).loop_trajectory
            for token in [token for token in chosen if start <= token < start + 48]:
                for group in range(3):
                    expected = states[group][:, 0, token - start].numpy()
                    np.testing.assert_allclose(loaded[f"group_{group}"][:, place], expected, atol=1e-6)
                    np.testing.assert_allclose(loaded["between"][2 + group, place], expected[-1], atol=1e-6)
                place += 1
    assert place == 20


def test_statistics_are_those_of_the_formulas(checkpoint, tmp_path):
    write_trajectories(checkpoint, TEXT[:30], tmp_path, num_loops=6, keep_states=30)
    loaded = load_trajectories(tmp_path)
    table = loaded.statistics().to_pandas()
    assert len(table) == 30 * 3 * 6
    states = torch.from_numpy(loaded["group_1"])
    of_group = table[table.group == 1].sort_values(["token", "step"])
    norms = of_group.step_norm.to_numpy().reshape(30, 6)
    np.testing.assert_allclose(norms, geometry.step_norms(states).T, rtol=1e-4)
    cosines = of_group.cosine.to_numpy().reshape(30, 6)
    assert np.isnan(cosines[:, 0]).all()
    np.testing.assert_allclose(cosines[:, 1:], geometry.step_cosines(states).T, atol=1e-3)


def test_memory_is_bounded_whatever_the_length_of_the_text(tmp_path, tokenizer):
    """100,000 tokens, in a process of its own, so that what it takes can be told."""
    model = tiny_model(max_position_embeddings=512, hidden_size=16, num_hidden_layers=3, loop_groups=[[1]])
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "long.txt").write_text((TEXT * 800)[:100_000])
    code = """
import resource
from evaluation import trajectories
trajectories.main(["model", "--text", "long.txt", "--num_loops", "5", "--output", "out"])
print("PEAK", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    assert int(result.stdout.split("PEAK")[1]) * 1024 < 1.5 * 2**30
    assert len(load_trajectories(tmp_path / "out").index["token_ids"]) == 100_000


def test_bad_input_is_a_sentence(checkpoint, tmp_path, tokenizer):
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        trajectories.main(["no/such/checkpoint", "--text", "abc", "--output", str(tmp_path / "x")])
    with pytest.raises(ValueError, match=r"1 token\(s\)"):
        trajectories.main([str(checkpoint), "--text", "a", "--output", str(tmp_path / "x")])
    tiny_model(loop_groups=[]).save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="no loop groups"):
        trajectories.main([str(tmp_path / "plain"), "--text", "abc", "--output", str(tmp_path / "x")])
    with pytest.raises(FileNotFoundError, match="cut short"):
        load_trajectories(tmp_path)
