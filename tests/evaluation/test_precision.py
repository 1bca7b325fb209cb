"""What less precision costs is measured on the same sequences in every precision, and calibrated anew in each."""

import json

import pytest
import torch

from evaluation import precision
from evaluation.common import Sequences, load_checkpoint
from evaluation.precision import VARIANTS, floor_of, in_precision, table_of
from recurrent_gpt2.fast_layers import PackedLinear
from tests.helpers import ROOT, random_ids, tiny_model

CHAINS = ROOT / "checkpoints/recurrent-gpt2-chains"


@pytest.fixture(scope="module")
def costs(tmp_path_factory):
    """Of the model of chains, on a few sequences."""
    file = tmp_path_factory.mktemp("precision") / "deep" / "precision.json"
    precision.main([str(CHAINS), "--sequences", "6", "--output", str(file)])
    return json.loads(file.read_text())


def test_every_precision_is_measured_beside_float32(costs):
    assert [cost["precision"] for cost in costs] == list(VARIANTS)
    assert {cost["kind"] for cost in costs} == {"chains"}  # it knows no text
    assert costs[0]["same_steps"] == 1
    floors = {cost["precision"]: cost["floor"] for cost in costs}
    assert floors["float32"] < floors["bfloat16"] < floors["int8"]  # loops that settle, up to noise
    for cost in costs:
        assert cost["right"] > 0.95
        assert cost["new_threshold"] is None or cost["new_steps"] < 24


def test_the_table_shows_differences_from_float32(costs):
    rows = table_of(costs)
    assert rows[0][0] == "chains, chains"
    assert not rows[0][2].startswith(("+", "-"))
    assert all(row[2].startswith(("+", "-")) for row in rows[1:])
    assert len({len(row) for row in [precision.HEADER, *rows]}) == 1


def test_small_matrices_are_packed_too_but_for_those_that_are_kept():
    whole, kept = in_precision(CHAINS, "int8"), in_precision(CHAINS, "int8, loop entry in float32")
    assert isinstance(whole.model.loop_inputs[0].state_proj, PackedLinear)
    assert type(kept.model.loop_inputs[0].state_proj) is torch.nn.Linear
    assert isinstance(kept.model.layers[0].mlp.up_proj, PackedLinear)
    assert not isinstance(load_checkpoint(CHAINS, optimize=True)[0].model.layers[0].mlp.up_proj, PackedLinear)


def test_the_floor_is_the_size_of_the_last_step():
    model, ids = tiny_model(0.3, num_loops=3), random_ids(2, 7)
    with torch.no_grad():
        states = model(ids, num_loops=6, output_loop_trajectory=True).loop_trajectory[-1]
    sizes = (states[6] - states[5]).norm(dim=-1) / states[6].norm(dim=-1)
    assert floor_of(model, Sequences.of_text(ids), 3) == pytest.approx(sizes.median().item(), rel=1e-4)


def test_a_checkpoint_without_a_policy_is_told_to_be_calibrated(tmp_path):
    model, tokenizer = load_checkpoint(CHAINS)
    model.generation_config.exit_policy = None
    model.save_pretrained(tmp_path), tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="calibrate it first"):
        precision.main([str(tmp_path), "--sequences", "2"])
    with pytest.raises(ValueError, match="--sequences` 0"):
        precision.main([str(CHAINS), "--sequences", "0"])
