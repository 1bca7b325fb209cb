import pytest

from evaluation import demo
from tests.helpers import tiny_model


def test_the_demo_shows_every_policy(tmp_path, tokenizer, capsys):
    tiny_model().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    demo.main([str(tmp_path), "--prompt", "abc", "--new_tokens", "5"])
    printed = capsys.readouterr().out
    assert printed.count("abc") == 4
    for name in ("fixed", "step_norm", "acceleration", "kl"):
        assert name in printed


def test_a_missing_checkpoint_is_a_sentence(tmp_path):
    with pytest.raises(FileNotFoundError, match="make smoke"):
        demo.main([str(tmp_path)])


def test_colours_go_from_few_loops_to_many():
    colours = [demo.color_of(loops, 12) for loops in range(1, 13)]
    assert colours[0] == demo.COLORS[0]
    assert colours[-1] == demo.COLORS[-1]
    assert sorted(colours, key=demo.COLORS.index) == colours
