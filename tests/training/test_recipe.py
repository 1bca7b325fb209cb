from dataclasses import fields
from pathlib import Path

import pytest
import yaml

import training.recipes.__main__
from recurrent_gpt2 import RecurrentGPT2Config
from tests.helpers import ROOT
from training.recipe import (
    MODEL_FIELDS,
    DataArguments,
    RecurrentTrainingArguments,
    load_recipe,
    parse_overrides,
    recipe_parser,
)

RECIPES = sorted((ROOT / "training" / "recipes").glob("*.yaml"))
NEEDS_AN_EXTRA = {"reasoning_gym": pytest.mark.slow}  # which the slow tests install


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=NEEDS_AN_EXTRA.get(path.stem, ()), id=path.stem) for path in RECIPES]
)
def test_recipes_of_the_project_are_whole(path):
    recipe = load_recipe(path)
    if recipe.training.from_gpt2 is None:
        RecurrentGPT2Config(**{"vocab_size": 8192, **recipe.model})
    assert recipe.training.max_steps > 0
    assert recipe.training.save_steps % recipe.training.logging_steps == 0  # else a resumed run logs other means
    assert recipe.sources


def test_the_papers_recipe_is_the_papers_run():
    recipe = load_recipe(ROOT / "training/recipes/paper.yaml")
    config = RecurrentGPT2Config(**recipe.model)
    assert config.to_dict() == RecurrentGPT2Config().to_dict()
    args = recipe.training
    tokens = args.max_steps * args.global_batch_size * 512
    assert args.max_steps == 60_000
    assert abs(tokens / 300e6 - 1) < 0.03
    assert (args.adam_beta1, args.adam_beta2, args.weight_decay, args.max_grad_norm) == (0.9, 0.95, 0.1, 1.0)
    assert args.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
    (source,) = recipe.sources
    assert (source.path, source.name, source.streaming) == ("HuggingFaceFW/fineweb", "sample-10BT", True)


def test_every_field_can_be_overridden(tmp_path):
    recipe = load_recipe(
        RECIPES[0],
        ["--hidden_size", "32", "--learning_rate=1e-3", "--resume", "--sources", "[a.txt, {path: b.jsonl, weight: 2}]",
         "--num_loops", "[1, 2, 3]", "--tokenizer", "some/name", "--output_dir", str(tmp_path)],
    )  # fmt: skip
    assert recipe.model["hidden_size"] == 32
    assert recipe.model["num_loops"] == [1, 2, 3]
    assert recipe.training.learning_rate == 1e-3
    assert recipe.training.resume
    assert [(source.path, source.weight) for source in recipe.sources] == [("a.txt", 1.0), ("b.jsonl", 2)]
    assert recipe.data.tokenizer == "some/name"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--learning_rte", "1"], "learning_rate"),
        (["--loop_group", "[[1]]"], "loop_groups"),
        (["--blok_size", "8"], "block_size"),
        (["--zzzzzz", "8"], "no field 'zzzzzz'"),
        (["--resume_from_checkpoint", "runs/x/checkpoint-5"], "resume_from_checkpoint.* not taken: use --resume"),
        (["8"], "write --field value"),
        (["--seed", "1", "2"], "write --field value"),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest_name(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(RECIPES[0], overrides)


def test_an_unknown_field_in_the_file_is_refused_too(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"output_dir": "x", "hiden_size": 3}))
    with pytest.raises(ValueError, match="hidden_size"):
        load_recipe(path)
    path.write_text("- not\n- a mapping\n")
    with pytest.raises(ValueError, match="mapping"):
        load_recipe(path)
    with pytest.raises(FileNotFoundError, match=r"smoke\.yaml"):
        load_recipe(Path("no/such/recipe.yaml"))


@pytest.mark.parametrize(
    "overrides",
    [["--sources", "[]"], ["--eval_blocks", "0"], ["--block_size", "1"], ["--tokenizer_vocab_size", "100"],
     ["--validation_fraction", "1.5"], ["--geometry_loops", "many"], ["--geometry_blocks", "0"],
     ["--muon_learning_rate", "-0.01"], ["--muon_learning_rate", "fast"], ["--compile", "no"], ["--resume", "1"],
     ["--max_steps", "ten"], ["--max_steps", "2.5"], ["--learning_rate", "high"], ["--seed", "null"],
     ["--save_steps", "true"], ["--global_batch_size", "[8]"]],
    ids=lambda overrides: " ".join(overrides),
)  # fmt: skip
def test_impossible_values_are_errors_that_name_the_field(overrides):
    with pytest.raises(ValueError, match=overrides[0].removeprefix("--")):
        load_recipe(ROOT / "training/recipes/smoke.yaml", overrides)


def test_the_global_batch_is_shared_out():
    smoke = ROOT / "training/recipes/smoke.yaml"
    recipe = load_recipe(smoke, ["--global_batch_size", "12", "--gradient_accumulation_steps", "3"])
    assert recipe.training.per_device_train_batch_size == 4
    with pytest.raises(ValueError, match=r"global_batch_size.* 10.*do not divide"):
        load_recipe(smoke, ["--global_batch_size", "10", "--gradient_accumulation_steps", "3"])


def test_values_are_read_as_yaml_and_numbers_as_numbers():
    given = {
        "a": "1e-4",
        "b": "7",
        "c": "true",
        "d": "text",
        "e": "-3",
        "f": "null",
        "g": "no",
        "h": "0.5",
        "i": "2_000",
    }
    parsed = parse_overrides([part for name, value in given.items() for part in (f"--{name}", value)])
    assert parsed == {"a": 1e-4, "b": 7, "c": True, "d": "text", "e": -3, "f": None, "g": "no", "h": 0.5, "i": 2000}
    assert type(parsed["b"]) is int


def test_a_field_that_is_passed_over_is_not_suggested():
    with pytest.raises(ValueError, match="no field") as refused:
        load_recipe(RECIPES[0], ["--resume_from_checkpont", "x"])
    assert "'resume_from_checkpoint'" not in str(refused.value)


def test_the_help_lists_every_field_with_its_meaning():
    shown = recipe_parser("Trains.").format_help()
    places = [shown.index(f"\n{title}:\n") for title in ("the model", "the data", "training")]
    assert places == sorted(places)
    for part in (DataArguments, RecurrentTrainingArguments):
        for f in fields(part):
            assert (f"--{f.name}" in shown) == (f.init and f.name != "resume_from_checkpoint"), f.name
    for name in MODEL_FIELDS:
        assert f"--{name}" in shown
    assert "--resume (False)\n      Go on from the newest whole checkpoint in `output_dir`." in shown
    assert "--backprop_loops (8)\n      In training, gradients flow through this many last loops" in shown
    assert "text_column (text)\n      The column that holds the text." in shown


def test_recipes_are_listed_with_a_line_each(capsys):
    training.recipes.__main__.main([])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [path.stem for path in RECIPES]
    for line in lines:
        assert line.endswith(".")
        assert len(line.split()) > 4


def test_a_recipe_is_copied_to_a_file_to_change(tmp_path, capsys):
    copy = training.recipes.__main__.main
    copy(["finetune", str(tmp_path / "mine.yaml")])
    assert (tmp_path / "mine.yaml").read_text() == (ROOT / "training/recipes/finetune.yaml").read_text()
    assert f"python -m training.train {tmp_path / 'mine.yaml'}" in capsys.readouterr().out
    copy(["smoke", str(tmp_path)])
    assert load_recipe(tmp_path / "smoke.yaml").training.max_steps > 0
    for given, error, message in (
        (["finetune", str(tmp_path / "mine.yaml")], FileExistsError, "is there already"),
        (["fine", str(tmp_path / "other.yaml")], ValueError, "no recipe 'fine'. The project has: .*finetune"),
        (["finetune"], ValueError, "Name a file"),
    ):
        with pytest.raises(error, match=message):
            copy(given)
