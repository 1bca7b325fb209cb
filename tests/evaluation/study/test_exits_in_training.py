import json

from evaluation.study import exits_in_training
from evaluation.study.exits_in_training import LOSSES, RULES, exits_in_training_table


def test_what_is_done_is_not_done_again_and_what_was_not_measured_is_a_dash(tmp_path, monkeypatch):
    output, trained = tmp_path / "exits.json", []
    measured = {
        "sweeps": {rule: [{"threshold": 0.1, "mean_steps": 3.0, "accuracy": 0.9}] for rule in RULES},
        "reach": {rule: {"mean_steps": 4.5} if rule == "kl" else None for rule in RULES},
    }
    monkeypatch.setattr(exits_in_training, "trained", lambda folder, **settings: trained.append(folder.name) or folder)
    monkeypatch.setattr(exits_in_training, "measured", lambda folder, sequences: measured)
    arguments = ["--seeds", "1", "--work", str(tmp_path / "work"), "--output", str(output)]
    exits_in_training.main(arguments)
    rows, first = json.loads(output.read_text()), list(trained)
    assert len(rows) == 3 * len(LOSSES)
    assert "seed-0-rest-0.3-doubt-0.3-with-exits" in first
    rows[0]["sweeps"] = {"kl": measured["sweeps"]["kl"]}  # of before the other rules were there
    output.write_text(json.dumps([row for row in rows if row["trained"] != "as before"]))
    exits_in_training.main(arguments)
    assert len(trained) == len(first) + 2 * len(LOSSES)  # the start, and what is trained on from it
    table = exits_in_training_table(json.loads(output.read_text()))
    kl, confidence = (table.header.index(rule) for rule in ("kl", "confidence"))
    assert [row[kl] for row in table.rows] == ["4.50"] * len(rows)
    assert table.rows[0][confidence] == "-"
    assert table.rows[1][confidence] == "(0.900 at 3.0)"
