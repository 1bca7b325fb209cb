import json

import pytest
import torch

from evaluation.study import readout
from evaluation.study.readout import fit, last_states, losses_of
from tests.helpers import random_ids, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model(0.3).requires_grad_(False)


@pytest.mark.parametrize("kind", readout.KINDS)
def test_a_fitted_readout_is_no_worse_where_it_was_fitted(model, kind):
    blocks = random_ids(4, 12)
    first, _, last = last_states(model, blocks, 3)
    repair, number = fit(model, kind, last, first, blocks[:, 1:])
    before, after = (losses_of(model, z, blocks[:, 1:]).mean() for z in (last, repair(last, first)))
    assert after < before
    assert (number is None) == (kind == "affine")


def test_the_last_states_are_what_the_head_reads(model):
    blocks = random_ids(2, 10)
    (first, second) = last_states(model, blocks, 2)
    for loops, states in ((1, first), (2, second)):
        logits = model(blocks, num_loops=loops, use_cache=False).logits[:, :-1]
        torch.testing.assert_close(model.lm_head(states), logits)


def test_the_command_writes_a_file_and_tables(tmp_path, tokenizer, capsys):
    tiny_model(0.3).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("TheQuickBrownFoxJumpsOverTheLazyDog" * 40)
    arguments = [
        str(tmp_path / "model"),
        "--source",
        str(tmp_path / "text.txt"),
        "--output",
        str(tmp_path / "out.json"),
    ]
    readout.main([*arguments, "--blocks", "3", "--num_loops", "3"])
    found = json.loads((tmp_path / "out.json").read_text())
    assert [row["loops"] for row in found["depths"]] == [1, 2]
    assert found["oracle"]["depths"]["mean"] >= 0  # full depth is among them
    assert "| 2 | " in capsys.readouterr().out
    with pytest.raises(ValueError, match="`--blocks` is 1"):
        readout.main([*arguments, "--blocks", "1"])
