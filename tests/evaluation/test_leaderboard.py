import json
import re
import shutil

import numpy as np
import pytest

from evaluation import leaderboard
from evaluation.exit_search import Score, find_rules
from evaluation.exit_tradeoff import Setting
from evaluation.leaderboard import Game, Player, board, from_hull, from_json, to_json
from evaluation.study import exit_comparison
from tests.evaluation.test_exit_search import write_policy
from tests.helpers import tiny_model
from training.tasks import Chains, task_tokenizer

GAME = Game("chains", "tiny-chains", loops=6, tuning=32, test=48, kept=0.95)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A model of chains that has learned nothing: what is scored is real, only not good."""
    folder = tmp_path_factory.mktemp("checkpoints")
    task = Chains(depth=3, slots=10, values=3, chains=2)
    tokenizer = task_tokenizer([task])
    model = tiny_model(0.15, vocab_size=len(tokenizer), loop_groups=[[1, 2]], num_loops=6)
    model.config.tasks = [task.to_dict()]
    model.save_pretrained(folder / "tiny-chains")
    tokenizer.save_pretrained(folder / "tiny-chains")
    return folder


@pytest.fixture
def games(checkpoints, monkeypatch):
    monkeypatch.setattr(leaderboard, "CHECKPOINTS", checkpoints)
    monkeypatch.setattr(leaderboard, "GAMES", (GAME,))


def test_numbers_repeat_to_the_digit_and_ones_own_rule_has_a_row(games, tmp_path, capsys):
    path = write_policy(tmp_path / "mine_for_the_board.py", "OnTheBoard", '@register_exit_policy("on_the_board")')
    boards = []
    for place in ("first", "second"):
        leaderboard.main([str(path), "--output", str(tmp_path / place)])
        boards.append((tmp_path / place / "leaderboard.json").read_text())
        printed = capsys.readouterr().out
    assert boards[0] == boards[1]
    assert "| on_the_board |" in printed
    assert printed.strip() == (tmp_path / "second" / "leaderboard.md").read_text().strip()
    (results,) = from_json(json.loads(boards[0]))
    labels = {rule.label for rule in find_rules(["step_norm", "kl", "acceleration", "cosine", "entropy", "confidence"])}
    assert labels <= {entry.rule for entry in results.entries}
    full = results.fixed.full_loss
    assert all(1 <= entry.steps <= 6 for entry in results.entries)
    assert results.entries[0].flops == min(entry.flops for entry in results.entries)
    assert 0 < results.required < 3
    assert results.ideal is None or 1 - results.ideal.loss >= 0.95 * (1 - full)
    for entry in results.entries:
        decodes = entry.setting["name"] in ("kl", "entropy", "confidence", "argmax", "all")
        assert (entry.decodes > 0) == decodes
    assert to_json(from_json(json.loads(boards[0]))) == json.loads(boards[0])


def test_thresholds_are_chosen_on_the_tuning_set_alone(games, tmp_path, checkpoints):
    player = Player(GAME, tmp_path, checkpoints)
    setting = player.choose(find_rules(["step_norm"])[0])
    assert set(player.on_test.known) == {player.full.setting}
    loss, _ = player.tune(setting)
    full = np.mean(player.full_on_tuning.losses)
    assert loss <= 1 - 0.95 * (1 - full)


def test_a_rule_that_shuffles_itself_is_its_own_null(checkpoints, tmp_path):
    """With the same steps for all tokens there is nothing to shuffle."""
    player = Player(GAME, tmp_path, checkpoints)
    three = Setting("argmax", json.dumps({"name": "argmax", "patience": 2, "threshold": 2.0}), (6,))
    assert player.shuffled_loss(three) == pytest.approx(np.mean(player.on_test[Setting("fixed", None, (3,))].losses))


def test_distance_from_the_hull_is_that_at_the_same_cost():
    texts = np.random.default_rng(0).normal(5, 1, 64)
    fixed = [Score(Setting("fixed", None, (k,)), (texts - 0.1 * k).tolist(), [k], 0, float(k)) for k in (1, 2, 4)]
    better = Score(Setting("kl", "{}", (4,)), (texts - 0.35).tolist(), [2], 1, 3.0)
    distance, (low, high) = from_hull(better, fixed)
    assert [distance, low, high] == pytest.approx([-0.05] * 3)


def test_the_board_puts_the_fewest_steps_first(games, tmp_path, checkpoints):
    results = Player(GAME, tmp_path, checkpoints).play(find_rules(["step_norm", "acceleration"]))
    for entry, steps in zip(results.entries, (5.0, 3.0, 4.0), strict=True):
        entry.steps = steps
    rows = board([results]).rows
    assert [row[1] for row in rows[:3]] == ["3.00", "4.00", "5.00"]
    assert [row[0] for row in rows[3:]] == ["*ideal*", "*fixed*"]


def test_a_comparison_over_runs_has_means_and_ranges(games, checkpoints, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(exit_comparison, "GAMES", (GAME,))
    monkeypatch.setattr(exit_comparison, "find_rules", lambda and_registered: find_rules(["step_norm", "kl"]))
    shutil.copytree(checkpoints / "tiny-chains", tmp_path / "other")
    runs = f"chains={checkpoints / 'tiny-chains'},{tmp_path / 'other'}"
    exit_comparison.main([runs, "--work", str(tmp_path / "work"), "--output", str(tmp_path / "out.json")])
    printed = capsys.readouterr().out
    values = json.loads((tmp_path / "out.json").read_text())
    assert len(values) == 2
    assert values[0]["entries"] == values[1]["entries"]  # the same model
    rows = exit_comparison.comparison_table(values, "chains").rows
    assert {row[0] for row in rows} >= {"step_norm/state", "kl", "*fixed*"}
    mean, low, high = re.fullmatch(r"(.*) \((.*)-(.*)\)", rows[0][1]).groups()
    assert mean == low == high
    assert f"| {rows[0][0]} | {rows[0][1]} |" in printed
    with pytest.raises(ValueError, match="has 'chess=a', but must be NAME=RUN"):
        exit_comparison.main(["chess=a", "--output", str(tmp_path / "none.json")])


def test_bad_input_is_a_sentence(games, tmp_path):
    output = ["--output", str(tmp_path / "out")]
    with pytest.raises(ValueError, match="`--games` has 'chess', but must be among chains"):
        leaderboard.main(["--games", "chess", *output])
    with pytest.raises(ValueError, match="leaves nothing to score"):
        leaderboard.main(["--only", *output])
    (tmp_path / "raises.py").write_text("raise RuntimeError('no')")
    with pytest.raises(ValueError, match=r"raises.py can't be loaded: RuntimeError: no"):
        leaderboard.main([str(tmp_path / "raises.py"), *output])
    assert not (tmp_path / "out").exists()
    path = write_policy(tmp_path / "boom.py", "Boom", '@register_exit_policy("boom")', measure="raise KeyError('no')")
    with pytest.raises(ValueError, match=r"the rule boom failed: KeyError: 'no'"):
        leaderboard.main([str(path), "--only", *output])
    assert not (tmp_path / "out" / "leaderboard.json").exists()
