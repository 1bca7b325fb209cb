"""What the documents say is true: their code runs, their numbers are those of the files, their links resolve."""

import ast
import contextlib
import io
import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

import training.estimate
from evaluation.study import documents
from tests.helpers import ROOT, random_ids, tiny_model
from training.card import check_card

TOP = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
DOCUMENTS = [*TOP, *sorted((ROOT / "docs").glob("*.md"))]


def code_blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def run_and_read(code: str, **names) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue()


def test_a_model_of_twenty_lines_learns_its_sentence():
    printed = run_and_read(code_blocks(ROOT / "docs/training.md", "python")[0])
    losses = [float(line.rsplit(maxsplit=1)[1]) for line in printed.splitlines()[:4]]
    assert all(loss < 1 for loss in losses)  # it has learned its sentence
    assert "Think before you speak. Think before you speak." in printed
    mean_steps = re.search(r"tensor\(\[(.*?)\]\)", printed)[1]
    assert all(float(mean) < 12 for mean in mean_steps.split(","))  # the rule fires


def test_the_examples_of_exit_policies_run():
    import recurrent_gpt2

    model, ids = tiny_model(num_loops=6, max_position_embeddings=128), random_ids(1, 5)
    names = {"model": model, "ids": ids, **vars(recurrent_gpt2)}
    blocks = code_blocks(ROOT / "docs/exit_policies.md", "python")
    assert len(blocks) == 4
    for block in blocks:
        if "save_pretrained" not in block:
            run_and_read(block, **names)


def test_the_example_of_evaluate_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    lens, metric = code_blocks(ROOT / "docs/evaluation.md", "python")
    assert "probability" in run_and_read(lens)
    printed = run_and_read(metric)
    own, by_rule = map(ast.literal_eval, printed.splitlines())
    assert own["exit_policy"]["name"] == "step_norm"  # calibrated
    assert by_rule["exit_policy"]["name"] == "kl"
    for found in (own, by_rule):
        assert max(found["mean_steps"]) < max(found["num_loops"])  # the rule fires


def test_a_program_that_somebody_types_is_answered(monkeypatch):
    monkeypatch.chdir(ROOT)
    program, parser = code_blocks(ROOT / "docs/tasks.md", "python")[:2]
    assert run_and_read(program).startswith("x4 is 3\n")  # 2 * 5 modulo 7
    assert "line 1 refers to x2, which is not defined before it." in run_and_read(parser)


def test_the_shipped_language_model_answers_a_program(monkeypatch):
    monkeypatch.chdir(ROOT)
    (program,) = code_blocks(ROOT / "docs/mixture.md", "python")
    printed = run_and_read(program).splitlines()
    assert printed[0] == "x3 is 2"  # 16 modulo 7
    assert len({int(line.rsplit(maxsplit=1)[1]) for line in printed[1:]}) > 1  # tokens differ in their loops


def test_the_third_task_of_the_document_is_one(tmp_path):
    import numpy as np

    import training.train
    from tests.training.runs import tiny_run
    from training.tasks import TaskSource

    block = code_blocks(ROOT / "docs/tasks.md", "python")[2]
    assert "->" in run_and_read(block, __name__="successors")
    task = TaskSource.parse({"task": "successors"}).task
    batch = task.sample(20, 4, np.random.default_rng(1))
    for ids, answers, depths in zip(batch.ids, batch.answers, batch.depths, strict=True):
        parsed = task.parse(task.text(ids))
        for found, expected in ((parsed.ids, ids), (parsed.answers, answers), (parsed.depths, depths)):
            assert found[0].tolist() == expected.tolist()
    with pytest.raises(ValueError, match="the ring must have 18 words"):
        task.parse("a b c")
    arguments = tiny_run(tmp_path, sources="[{task: successors}]", most_loops=4, max_steps=2, save_strategy="no")
    assert training.train.main(arguments).state.global_step == 2


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_resolve(path):
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
        assert (path.parent / link).exists(), link


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_headings_resolve(path):
    for file, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", path.read_text()):
        headings = re.findall(r"^#+ (.*)", (path.parent / file if file else path).read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in anchors, f"{path.name} links to {file}#{anchor}"


def test_files_and_recipes_that_are_named_exist():
    for path in DOCUMENTS:
        for name in re.findall(
            r"(?:tests/)?(?:training|evaluation|recurrent_gpt2|docs)/[\w/]+\.(?:py|yaml|json|md)", path.read_text()
        ):
            assert (ROOT / name).exists(), f"{path.name} names {name}"


def test_the_example_of_a_gpt2_with_loops_runs():
    """Those before it, of fine-tuning, are run in order by `test_finetuning.py`."""
    assert run_and_read(code_blocks(ROOT / "docs/finetuning.md", "python")[-1]) == "True\n"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_those_of_their_files(path):
    assert documents.fill(path.read_text()) == path.read_text(), "run `python -m evaluation.study.documents`"


def test_a_number_that_has_drifted_is_noticed():
    text = (ROOT / "README.md").read_text()
    ratio = json.loads((ROOT / "docs/benchmark.json").read_text())["ratios"][0]["ratio"]
    drifted = text.replace(f"| time x {ratio:.2f} |", f"| time x {ratio + 0.01:.2f} |")
    assert drifted != text
    assert documents.fill(drifted) == text


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_nothing_is_left_to_be_written(path):
    assert "@@" not in path.read_text()


def test_every_table_that_can_be_filled_is_shown():
    shown = {name for path in DOCUMENTS for name in re.findall(r"<!-- table: (\w+) -->", path.read_text())}
    assert shown == set(documents.TABLES)


def test_the_shipped_checkpoint_runs_as_the_readme_says(monkeypatch):
    monkeypatch.chdir(ROOT)
    import recurrent_gpt2

    names = dict(vars(recurrent_gpt2))
    first, second = code_blocks(ROOT / "README.md", "python")[:2]
    printed = run_and_read(first + "\nloaded.append((model, ids))", loaded=(loaded := []))
    assert printed.strip()
    for expected in code_blocks(ROOT / "README.md", "text")[:1]:  # what it prints, where that is said
        assert printed == expected
    model, ids = loaded[0]
    fires = defaultdict(bool)  # whether any token leaves before the cap, for every policy

    def record(module, args, kwargs, output):
        caps = output.loop_steps.new_tensor(model.config.loops_per_group(kwargs.get("num_loops")))
        fires[repr(kwargs.get("exit_policy"))] |= bool((output.loop_steps < caps).any())

    model.register_forward_hook(record, with_kwargs=True)
    run_and_read(second, model=model, ids=ids, **names)
    del fires["None"]
    assert len(fires) >= 3
    assert all(fires.values()), fires


def test_the_shipped_card_says_what_its_files_say():
    check_card(ROOT / "checkpoints/recurrent-gpt2-mini")
    assert sum(path.stat().st_size for path in (ROOT / "checkpoints").rglob("*") if path.is_file()) < 20e6


def test_the_estimate_is_what_the_command_prints(capsys):
    training.estimate.main([str(ROOT / "training/recipes/paper.yaml")])
    assert capsys.readouterr().out.strip() in (ROOT / "docs/training.md").read_text()
