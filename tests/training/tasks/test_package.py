"""A model of a task as a checkpoint to share: made by `training.package` from what `evaluation.depth` measured."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import training.train
from evaluation import depth
from tests.training.runs import tiny_run
from training import package
from training.card import check_card


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package")
    arguments = tiny_run(
        folder, sources="[{task: chains, slots: 10, depth: 2, values: 2, chains: 2}]", most_loops=3, max_steps=8,
        num_hidden_layers=1, loop_groups="[[0]]", save_strategy="no", tie_word_embeddings="false",
    )  # fmt: skip
    training.train.main(arguments)
    depth.main([str(folder / "run"), "--num_loops", "12", "--sequences", "16", "--output", str(folder / "depth"),
                "--rules", "step_norm/state"])  # fmt: skip
    package.main([str(folder / "run"), "--report", str(folder / "depth"), "--output", str(folder / "packed")])
    return folder


def test_the_folder_holds_what_a_user_needs_and_nothing_else(folder):
    names = {path.name for path in (folder / "packed").iterdir()}
    assert {"model.safetensors", "tokenizer.json", "config.json", "generation_config.json", "README.md", "depth.json",
            "depth.png", "trainer_state.json"} <= names  # fmt: skip
    assert "training_args.bin" not in names


def test_the_card_says_what_was_measured(folder):
    measured = json.loads((folder / "packed" / "depth.json").read_text())
    card = (folder / "packed" / "README.md").read_text()
    assert f"| 1 fixed loops | 1.00 | {measured['fixed'][0]['accuracy']:.4f} |" in card
    assert 'answer = " ' in card
    check_card(folder / "packed")
    stale = folder / "packed" / "README.md"
    stale.write_text(card.replace("| 1 fixed loops | 1.00 | 0.", "| 1 fixed loops | 1.00 | 7."))
    with pytest.raises(ValueError, match="result files disagree"):
        check_card(folder / "packed")
    stale.write_text(card)


def test_forward_and_generate_have_the_same_cap(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "packed", trust_remote_code=True)
    assert model.config.num_loops == 12
    policy = json.loads((folder / "packed" / "depth.json").read_text())["policy"]
    assert getattr(model.generation_config, "exit_policy", None) == policy
    tokenizer = AutoTokenizer.from_pretrained(folder / "packed", trust_remote_code=True)
    ids = tokenizer("a b @0", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=1).shape == (1, 4)
