import json
import tempfile
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import training.train
from evaluation import report
from tests.helpers import REMOTE_CODE, ROOT
from tests.training.runs import tiny_run, write_texts
from training import package


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package")
    write_texts(folder)
    training.train.main(tiny_run(folder, geometry_loops=4, max_steps=4, save_strategy="no"))
    report.main([str(folder / "run"), "--output", str(folder / "report"), "--source", str(folder / "texts.jsonl"),
                 "--num_loops", "3", "--depths", "1", "--blocks", "2", "--rounds", "0", "--rules", "step_norm",
                 "--thresholds", "0.01", "2.0"])  # fmt: skip
    package.main([str(folder / "run"), "--report", str(folder / "report"), "--output", str(folder / "packed")])
    return folder


def test_the_folder_holds_what_a_user_needs_and_nothing_else(folder):
    names = {path.name for path in (folder / "packed").iterdir()}
    assert {"model.safetensors", "tokenizer.json", "config.json", "generation_config.json", "README.md",
            "trainer_state.json", "geometry.jsonl", "results.json", "tradeoff.png"} <= names  # fmt: skip
    assert "training_args.bin" not in names
    assert str(folder) not in "".join(
        path.read_text() for path in (folder / "packed").iterdir() if path.suffix in (".json", ".jsonl", ".md")
    )


def test_the_policy_of_the_report_is_the_default(folder):
    measured = json.loads((folder / "report" / "report.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder / "packed", trust_remote_code=True)
    assert model.generation_config.exit_policy == measured["policy"]
    assert model.generation_config.num_loops == model.config.num_loops == 3  # the run had 2
    ids = AutoTokenizer.from_pretrained(folder / "packed")("The number", return_tensors="pt").input_ids
    output = model.generate(ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    assert output.loop_steps.max() <= 3


def test_the_code_of_a_package_is_in_it(folder):
    assert {path.name for path in (folder / "packed").glob("*.py")} == REMOTE_CODE
    assert not any(path.is_symlink() for path in (folder / "packed").iterdir())


def test_code_can_be_linked_instead_inside_this_repository(folder):
    arguments = [str(folder / "run"), "--report", str(folder / "report"), "--link-code", "--output"]
    with pytest.raises(ValueError, match="`--link-code` is for folders beside the package"):
        package.main([*arguments, str(folder / "elsewhere")])
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".linked-") as inside:
        linked = Path(inside) / "deep" / "packed"
        package.main([*arguments, str(linked)])
        for name in REMOTE_CODE:
            assert not (linked / name).readlink().is_absolute()
            assert (linked / name).resolve() == ROOT / "recurrent_gpt2" / name
        assert AutoModelForCausalLM.from_pretrained(linked, trust_remote_code=True).config.num_loops == 3


def test_what_is_missing_is_named(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no report\.json"):
        package.main([str(folder / "run"), "--report", str(tmp_path), "--output", str(tmp_path / "out")])


def test_a_folder_that_is_there_stays_until_a_new_one_is_made(folder, monkeypatch):
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (folder / "packed").iterdir())

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(package, "check_folder", interrupted)
    arguments = [str(folder / "run"), "--report", str(folder / "report"), "--output"]
    with pytest.raises(KeyboardInterrupt):
        package.main([*arguments, str(folder / "packed")])
    assert sorted((path.name, path.stat().st_mtime_ns) for path in (folder / "packed").iterdir()) == before
    assert {path.name for path in folder.iterdir()} == {"texts.jsonl", "cache", "run", "report", "packed"}
    with pytest.raises(ValueError, match=r"`--output`.* folder of its own"):
        package.main([*arguments, str(folder)])
