"""Who may import whom: recurrent_gpt2 <- training <- evaluation, and a checkpoint's code is the package's own."""

import ast
from pathlib import Path

import pytest

from tests.helpers import REMOTE_CODE, ROOT, run_fresh

MAY_IMPORT = {
    "recurrent_gpt2": {"recurrent_gpt2"},
    "training": {"recurrent_gpt2", "training"},
    "evaluation": {"recurrent_gpt2", "training", "evaluation"},
}
CHECKPOINTS = sorted(path.parent for path in (ROOT / "checkpoints").glob("*/config.json"))


def imported_rooms(path: Path) -> set[str]:
    """Rooms of this project that a file imports from, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module)
    return {name.split(".")[0] for name in names} & {*MAY_IMPORT, "tests"}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_nothing_imports_against_the_order_of_the_rooms(room):
    files = list((ROOT / room).rglob("*.py"))
    assert files
    for path in files:
        assert imported_rooms(path) <= MAY_IMPORT[room], path


def functions(room: str) -> list[tuple[Path, ast.FunctionDef]]:
    return [
        (path, node)
        for path in sorted((ROOT / room).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]


def test_each_function_is_written_once():
    places: dict[str, list[str]] = {}
    for room in MAY_IMPORT:
        for path, function in functions(room):
            text = "\n".join(ast.unparse(line) for line in function.body)
            if len(text) > 60:
                places.setdefault(text, []).append(f"{path.relative_to(ROOT)}: {function.name}")
    assert len(places) > 500
    assert [where for where in places.values() if len(where) > 1] == []


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_no_private_function_takes_more_than_six_arguments(room):
    private = [(path, function) for path, function in functions(room) if function.name.startswith("_")]
    assert private
    for path, function in private:
        arguments = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
        names = {argument.arg for argument in arguments} - {"self", "cls"}
        assert len(names) <= 6, (path, function.name)


def test_the_package_imports_hardly_more_than_gpt2_does(tmp_path):
    """So that importing it takes hardly longer."""
    code = """
import sys
import transformers.models.gpt2.modeling_gpt2
known = set(sys.modules)
import recurrent_gpt2
print(*sorted(name for name in set(sys.modules) - known if name.split(".")[0] != "recurrent_gpt2"))
"""
    more = run_fresh(code, tmp_path, hide_package=False).split()
    assert all(name.startswith("transformers.") for name in more), more
    assert len(more) <= 2, more


@pytest.mark.parametrize("path", sorted((ROOT / "evaluation").rglob("[!_]*.py")), ids=lambda path: path.stem)
def test_every_tool_says_at_its_top_what_it_is_for_and_how_it_is_run(path):
    text = path.read_text()
    said = ast.get_docstring(ast.parse(text))
    assert said
    if '__name__ == "__main__"' in text:
        assert f"python -m {'.'.join(path.relative_to(ROOT).with_suffix('').parts)}" in said


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda path: path.name)
def test_the_code_of_a_checkpoint_is_linked_to_the_package(checkpoint):
    assert {path.name for path in checkpoint.glob("*.py")} == REMOTE_CODE
    for name in REMOTE_CODE:
        assert (checkpoint / name).is_symlink(), name
        assert (checkpoint / name).resolve() == ROOT / "recurrent_gpt2" / name


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda path: path.name)
def test_a_shipped_checkpoint_loads_by_its_own_code_where_there_is_no_package(checkpoint, tmp_path):
    code = f"""
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(checkpoint)!r}, trust_remote_code=True)
import torch
print(type(model).__module__.split(".")[0], model.generate(torch.tensor([[5, 6]]), max_new_tokens=3).shape)
"""
    assert "transformers_modules" in run_fresh(code, tmp_path)
