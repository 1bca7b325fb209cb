import json

import pytest
import torch

from evaluation.study import gate
from evaluation.study.gate import OBJECTIVES, fit
from tests.evaluation.test_leaderboard import GAME, checkpoints  # noqa: F401 (a fixture)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_probe_that_can_see_the_need_stays_as_long_as_that(objective):
    """Tokens whose loss falls until step 2 or 5; one feature says whether it is still to fall, the other nothing."""
    needed = torch.tensor([2, 5]).repeat(100)
    steps = torch.arange(1, 8)[:, None]
    losses = (needed - steps).clamp(min=0).float()
    # Ouro's label is what the last step has gained, so that it is seen one step late.
    waits = (steps <= needed if objective == "last step" else steps < needed)[:-1].float()
    seen = torch.stack([waits, torch.randn(waits.shape, generator=torch.Generator().manual_seed(0))], dim=-1)
    weights = fit(seen, losses, OBJECTIVES[objective])
    stay = gate.with_one(seen) @ weights
    assert stay[waits > 0].min() > stay[waits == 0].max()
    if objective != "distribution":  # whose average is drawn to all depths
        assert (stay[1:] > 0).float().equal(waits[1:])


def test_gates_are_played_beside_the_rules(checkpoints, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(gate, "GAMES", (GAME,))
    monkeypatch.setitem(gate.FITTED, "chains", 16)
    file, other = tmp_path / "gate.json", {"game": "text", "run": "a", "rows": []}
    file.write_text(json.dumps([other]))
    gate.main([f"chains={checkpoints / 'tiny-chains'}", "--work", str(tmp_path / "work"), "--output", str(file)])
    kept, found = json.loads(file.read_text())
    assert kept == other
    rows = {row["rule"]: row for row in found["rows"]}
    assert {"step_norm/state", "gate, later", "gate, last step", "gate, distribution"} <= set(rows)
    assert rows[found["best_rule"]]["more_steps"] == 0
    assert all(1 <= row["steps"] <= GAME.loops for row in found["rows"])
    assert f"| chains 1 | {found['best_rule']} |" in capsys.readouterr().out
    with pytest.raises(ValueError, match="has 'chess=a', but must be NAME=RUN"):
        gate.main(["chess=a", "--output", str(file)])
