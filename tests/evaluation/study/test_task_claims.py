import json

import training.train
from evaluation.study import task_claims
from tests.training.runs import tiny_run


def test_the_claims_of_text_are_checked_on_a_task(tmp_path, capsys):
    sources = "[{task: chains, slots: 10, depth: 3, values: 4, chains: 2}]"
    arguments = tiny_run(tmp_path, sources=sources, most_loops=4, max_steps=4, save_strategy="no", geometry_loops=6)
    training.train.main(arguments)
    run, output = str(tmp_path / "run"), tmp_path / "claims.json"
    options = ["--num_loops", "4", "--sequences", "16", "--rounds", "1", "--output", str(output)]
    output.write_text('{"programs": ["measured before"], "chains": []}')
    task_claims.main([run, run, *options])
    found = json.loads(output.read_text())
    assert found["programs"] == ["measured before"]
    first, second = found["chains"]
    claims = {claim["claim"]: claim for claim in first["claims"]}
    assert claims["Both strengthen over training"]["verdict"] != "not measured"
    beats = claims["At the same mean steps, kl beats fixed depth"]
    assert beats == next(
        claim for claim in second["claims"] if claim["claim"] == beats["claim"]
    )  # times apart, the same
    assert "ms/token" in claims["Acceleration cuts latency from 1e-5 to 1e-2 at flat perplexity"]["measured"]
    assert "| At the same mean steps, kl beats fixed depth |" in capsys.readouterr().out
