import pytest

from evaluation import demo
from recurrent_gpt2 import FixedLoops, KLExit


def test_the_demo_shows_every_policy_and_writes_the_report(trained, tmp_path, capsys):
    arguments = ["--prompt", "abc", "--new_tokens", "5", "--source", str(trained / "texts.jsonl"), "--blocks", "2"]
    demo.main([str(trained / "run"), *arguments, "--output", str(tmp_path / "demo")])
    printed = capsys.readouterr().out
    assert printed.count("abc") == 4
    for name in ("fixed", "step_norm", "acceleration", "kl"):
        assert name in printed
    assert "perplexity" in printed
    assert "unless told otherwise: 2 fixed loops" in printed
    page = tmp_path / "demo" / "report.html"
    assert page.exists()
    assert printed.splitlines()[-1] == f"The report is written: open {page} in a browser."


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
