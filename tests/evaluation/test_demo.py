import pytest

from evaluation import demo
from recurrent_gpt2 import FixedLoops, KLExit
from tests.helpers import tiny_model


def test_the_demo_shows_every_policy_and_writes_the_report(trained, tmp_path, capsys):
    arguments = ["--prompt", "abc", "--new_tokens", "5", "--source", str(trained / "texts.jsonl"), "--blocks", "2"]
    demo.main([str(trained / "run"), *arguments, "--output", str(tmp_path / "demo")])
    printed = capsys.readouterr().out
    assert printed.count("abc") == 4
    for name in ("fixed", "step_norm", "acceleration", "kl"):
        assert name in printed
    assert "perplexity" in printed
    page = tmp_path / "demo" / "report.html"
    assert page.exists()
    assert printed.splitlines()[-1] == f"The report is written: open {page} in a browser."


def test_the_checkpoints_own_policy_comes_first():
    model = tiny_model()
    assert demo.policies_of(model) == demo.POLICIES
    model.generation_config.exit_policy = {"name": "kl", "threshold": 0.5}
    assert demo.policies_of(model)[:2] == (FixedLoops(), KLExit(0.5))
    assert len(demo.policies_of(model)) == 5
    model.generation_config.exit_policy = KLExit().to_dict()
    assert len(demo.policies_of(model)) == 4


def test_a_missing_checkpoint_is_a_sentence(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        demo.main([str(tmp_path)])


def test_colours_go_from_few_loops_to_many():
    colours = [demo.color_of(loops, 12) for loops in range(1, 13)]
    assert colours[0] == demo.COLORS[0]
    assert colours[-1] == demo.COLORS[-1]
    assert sorted(colours, key=demo.COLORS.index) == colours
