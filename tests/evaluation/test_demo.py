import numpy as np
import pytest
from rich.console import Console

from evaluation import demo
from recurrent_gpt2 import FixedLoops, KLExit
from tests.helpers import ROOT


def test_the_demo_shows_every_policy_and_writes_the_report(trained, tmp_path, capsys):
    arguments = ["--prompt", "abc", "--new_tokens", "5", "--source", str(trained / "texts.jsonl"), "--blocks", "2"]
    demo.main([str(trained / "run"), *arguments, "--output", str(tmp_path / "demo")])
    printed = capsys.readouterr().out
    assert printed.count("abc") == 1  # once, and what differs between policies as a table
    for name in ("fixed", "step_norm", "acceleration", "kl"):
        assert name in printed
    assert "continued by run (2 fixed loops)" in printed
    assert "A program" not in printed  # it reads none
    assert "model.generate(ids, exit_policy=" in printed
    page = tmp_path / "demo" / "report.html"
    assert page.exists()
    assert printed.splitlines()[-1] == f"Open {page} in a browser."


def test_a_program_is_shown_with_the_loops_that_its_lines_need_and_took(capsys):
    demo.show_program(Console(width=120), str(ROOT / "checkpoints/recurrent-gpt2-programs"))
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    shown = {cells[1].strip(): [cell.strip() for cell in cells[2:5]] for cells in lines}
    assert shown["x4 = x3 - x2"][:2] == ["4", "2 ░░"]
    assert all(value.isdigit() for value, _, _ in shown.values())  # nothing is wrong
    needed, taken = zip(*((int(needs.split()[0]), int(took.split()[0])) for _, needs, took in shown.values()),
                        strict=True)  # fmt: skip
    assert np.corrcoef(needed, taken)[0, 1] > 0.8


def test_a_program_that_is_wrong_is_a_sentence():
    with pytest.raises(ValueError, match="line 1 refers to x2"):
        demo.show_program(Console(), str(ROOT / "checkpoints/recurrent-gpt2-programs"), "x0 = 3\nx1 = x2 + x0")


def test_the_checkpoints_own_policy_comes_first():
    assert tuple(demo.policies_of(None).values()) == demo.POLICIES
    assert tuple(demo.policies_of("fixed").values()) == demo.POLICIES
    shown = demo.policies_of({"name": "kl", "threshold": 0.5})
    assert list(shown.values())[:2] == [FixedLoops(), KLExit(0.5)]
    assert list(shown)[:3] == ["fixed", "kl, 0.5 (default)", "step_norm/state, 0.03"]
    assert len(shown) == 5
    assert len(demo.policies_of("kl")) == 4
    per_group = demo.policies_of([None, "kl", {"name": "step_norm", "threshold": 2}])
    assert list(per_group)[1] == "fixed; kl, 0.0005; step_norm, 2 (default)"


def test_a_missing_checkpoint_is_a_sentence(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        demo.main([str(tmp_path)])


def test_colours_go_from_few_loops_to_many():
    colours = [demo.color_of(loops, 12) for loops in range(1, 13)]
    assert colours[0] == demo.COLORS[0]
    assert colours[-1] == demo.COLORS[-1]
    assert sorted(colours, key=demo.COLORS.index) == colours
