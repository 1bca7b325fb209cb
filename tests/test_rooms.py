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
