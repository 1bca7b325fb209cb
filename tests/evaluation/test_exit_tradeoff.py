import math
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from evaluation import exit_tradeoff
from evaluation.exit_tradeoff import Result, Setting, compare, make_settings, read_results, run_sweep, score
from recurrent_gpt2 import LoopCache
from tests.evaluation.test_exit_search import write_policy
from tests.helpers import ROOT, random_ids, tiny_model
from tests.training.test_distributed import free_port
from training.card import render_card


@pytest.fixture(scope="module")
def model():
    return tiny_model(0.3, torch.float64, num_loops=6)


def test_adaptive_perplexity_of_one_pass_is_that_of_decoding(model):
    blocks = random_ids(3, 12)
    for setting in make_settings(["step_norm", "kl", "acceleration"], cap=6, thresholds=[0.1, 2.5], depths=(1, 3)):
        result = score(model, blocks, setting, batch_size=2)
        losses, steps = [], []
        with torch.no_grad():
            for row in blocks:
                cache = LoopCache(model.config)
                arguments = {"exit_policy": setting.exit_policy, "num_loops": setting.num_loops}
                for t in range(12):
                    output = model(row[None, t : t + 1], past_key_values=cache, **arguments)
                    steps.append(output.loop_steps[0, 0])
                    if t < 11:
                        losses.append(-output.logits[0, 0].log_softmax(-1)[row[t + 1]])
        assert result.cross_entropy == pytest.approx(torch.stack(losses).mean().item(), abs=1e-6)
        assert result.perplexity == pytest.approx(math.exp(result.cross_entropy))
        assert result.mean_steps == pytest.approx(torch.stack(steps).double().mean(0).tolist())


def test_a_sweep_goes_on_where_it_stopped(model, tmp_path, monkeypatch):
    blocks = random_ids(2, 8)
    settings = make_settings(["step_norm"], cap=4, thresholds=[0.5, 2.5], depths=(1, 2))
    scored = []

    def counted(model, blocks, setting, batch_size):
        if len(scored) == 3:
            raise KeyboardInterrupt
        scored.append(setting)
        return score(model, blocks, setting, batch_size)

    monkeypatch.setattr(exit_tradeoff, "score", counted)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(model, blocks, settings, tmp_path)
    with (tmp_path / "tradeoff.jsonl").open("a") as file:
        file.write('{"setting": {"ru')  # cut short by a crash
    assert len(read_results(tmp_path)) == 3
    monkeypatch.setattr(exit_tradeoff, "score", lambda *args: scored.append(args[2]) or score(*args))
    results = run_sweep(model, blocks, settings, tmp_path)
    assert [result.setting for result in results] == settings
    assert len(scored) == len(set(scored)) == len(settings)


def test_times_that_were_measured_are_not_measured_again(model, tmp_path, monkeypatch):
    settings = make_settings(["step_norm"], cap=2, thresholds=[0.5], depths=())
    results = [result_of(setting.rule, 1.0, [1.0], setting.policy or "{}") for setting in settings]
    for result, setting in zip(results, settings, strict=True):
        result.setting = setting
    runs, generate = [], type(model).generate

    def counted(self, *args, **kwargs):
        if len(runs) == 4:
            raise KeyboardInterrupt
        runs.append(kwargs["num_loops"])
        return generate(self, *args, **kwargs)

    arguments = {"batch_sizes": (1, 2), "new_tokens": 2, "rounds": 2}
    monkeypatch.setattr(type(model), "generate", counted)
    with pytest.raises(KeyboardInterrupt):
        exit_tradeoff.measure_times(model, random_ids(2, 4), results, tmp_path / "times.jsonl", **arguments)
    monkeypatch.setattr(type(model), "generate", lambda self, *a, **k: runs.append(1) or generate(self, *a, **k))
    exit_tradeoff.measure_times(model, random_ids(2, 4), results, tmp_path / "times.jsonl", **arguments)
    # A first call that does not count, twice; batch 1 is two prompts, of which the first setting's were interrupted in
    # the middle and start again.
    assert len(settings) == 2
    assert len(runs) == (1 + 3) + 1 + (2 * 2 - 1) * 2 + 2 * 2
    assert all(result.ms_per_token.keys() == {"1", "2"} for result in results)


def result_of(rule, depth, losses, policy="{}"):
    setting = Setting(rule, None if rule == "fixed" else policy, int(depth) if rule == "fixed" else 9)
    return Result(
        setting, float(np.mean(losses)), 1.0, [depth] * 2, [0.0] * 2, 0.0, list(losses), [depth] * len(losses)
    )


def test_comparison_is_with_fixed_depth_at_the_same_mean():
    random = np.random.default_rng(0)
    easy = random.normal(5, 1, 64)  # what texts differ in, whatever the depth
    fixed = [result_of("fixed", depth, easy - 0.1 * depth) for depth in (1, 2, 4)]
    as_good = result_of("kl", 3.0, easy - 0.3 + random.normal(0, 0.01, 64))
    better = result_of("step_norm", 1.5, easy - 0.35 + random.normal(0, 0.01, 64))
    outside = result_of("acceleration", 6.0, easy)
    first, second = compare([*fixed, as_good, better, outside])
    assert first.difference == pytest.approx(0, abs=0.005)
    assert first.low < 0 < first.high
    assert second.difference == pytest.approx(-0.2, abs=0.005)
    assert second.high < -0.19


def test_intervals_know_that_the_mean_steps_vary_with_the_text():
    random = np.random.default_rng(0)
    depths, texts = random.uniform(1.2, 1.8, 64), random.normal(5, 1, 64)
    fixed = [result_of("fixed", depth, texts - depth) for depth in (1, 2)]
    # Text by text as good as fixed depth at the same steps: no difference, whatever texts are drawn.
    rule = result_of("kl", depths.mean(), texts - depths)
    rule.sequence_depths = depths.tolist()
    (comparison,) = compare([*fixed, rule])
    assert [comparison.difference, comparison.low, comparison.high] == pytest.approx([0, 0, 0], abs=1e-9)
    # As good on average, but steps and losses have nothing to do with each other: the steps' spread is in the interval.
    rule.sequence_losses = (texts - depths.mean()).tolist()
    (comparison,) = compare([*fixed, rule])
    assert comparison.difference == pytest.approx(0, abs=1e-9)
    assert comparison.high - comparison.low == pytest.approx(4 * depths.std() / 8, rel=0.2)


def test_the_command_writes_a_table(tmp_path, tokenizer, capsys):
    tiny_model(std=0.3).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("TheQuickBrownFoxJumpsOverTheLazyDog" * 40)
    arguments = [
        str(tmp_path / "model"), "--source", str(tmp_path / "text.txt"), "--output", str(tmp_path / "out"), "--rules",
        "acceleration", "kl", "--thresholds", "0.01", "3", "--num_loops", "4",
        "--depths", "1", "2", "--blocks", "4", "--rounds", "1", "--block_size", "16",
    ]  # fmt: skip
    exit_tradeoff.main(arguments)
    printed = capsys.readouterr().out
    settings = 3 + 4
    assert len([line for line in printed.splitlines() if line.startswith("| ")]) == settings + 1  # with the header
    results = read_results(tmp_path / "out")
    assert len(results) == settings
    assert all(result.ms_per_token.keys() == {"1", "8"} for result in results.values())
    shutil.copy(tmp_path / "out" / "results.json", tmp_path / "model")
    card = render_card(tmp_path / "model", "someone/model")
    assert len(card.data.eval_results) == settings
    assert "| text.txt | acceleration (" in card.text
    lines = (tmp_path / "out" / "tradeoff.jsonl").read_text()
    exit_tradeoff.main(arguments)  # nothing is left to do
    assert (tmp_path / "out" / "tradeoff.jsonl").read_text() == lines


def test_a_rule_of_ones_own_is_swept_from_never_to_at_once(tmp_path, tokenizer, capsys):
    path = write_policy(tmp_path / "swept.py", "Swept", '@register_exit_policy("swept")')
    tiny_model(std=0.3).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("TheQuickBrownFoxJumpsOverTheLazyDog" * 40)
    exit_tradeoff.main([
        str(tmp_path / "model"), "--source", str(tmp_path / "text.txt"), "--output", str(tmp_path / "out"), "--rules",
        str(path), "entropy", "--num_loops", "6", "--depths", "1", "--blocks", "4", "--rounds", "0",
        "--block_size", "16",
    ])  # fmt: skip
    assert "| swept | " in capsys.readouterr().out
    results = read_results(tmp_path / "out").values()
    own = sorted((r for r in results if r.setting.rule == "swept"), key=lambda r: r.setting.exit_policy["threshold"])
    assert len(own) == exit_tradeoff.MEASURED
    assert own[0].mean_depth == 6
    assert own[-1].mean_depth < 1.5
    config = tiny_model().config
    head = 2 * config.hidden_size * config.vocab_size
    (never,) = (r for r in results if r.setting.rule == "entropy" and r.setting.exit_policy["threshold"] == 0)
    assert never.flops_per_token == pytest.approx(
        own[0].flops_per_token + len(config.loop_groups) * 5 * head
    )  # groups, steps that decide


def test_bad_input_is_a_sentence(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"the rule 'no_such_rule' is not registered\. Known: acceleration"):
        exit_tradeoff.main(["x", "--source", "x.txt", "--output", str(tmp_path / "out"), "--rules", "no_such_rule"])
    with pytest.raises(ValueError, match=r"no_such_rule.*acceleration"):
        make_settings(["no_such_rule"], cap=4)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        exit_tradeoff.main([str(tmp_path / "missing"), "--source", "x.txt", "--output", str(tmp_path)])
    tiny_model().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "short.txt").write_text("ab")
    with pytest.raises(ValueError, match="no full block"):
        exit_tradeoff.main([str(tmp_path), "--source", str(tmp_path / "short.txt"), "--output", str(tmp_path / "out")])


def test_results_of_another_model_or_text_are_not_taken_for_these(model, tmp_path):
    settings = make_settings(["step_norm"], cap=2, thresholds=[0.5], depths=())
    run_sweep(model, random_ids(2, 8), settings, tmp_path)
    for other, blocks in (
        (model, random_ids(2, 8, seed=1)),
        (tiny_model(0.3, torch.float64, seed=1), random_ids(2, 8)),
    ):
        with pytest.raises(ValueError, match="has results of another checkpoint or text"):
            run_sweep(other, blocks, settings, tmp_path)
    run_sweep(model, random_ids(2, 8), settings, tmp_path)


def test_a_sweep_under_accelerate_launch_is_shared_by_the_processes(trained, tmp_path):
    sweep = ["--source", str(trained / "texts.jsonl"), "--rules", "step_norm", "--thresholds", "0.5", "2.0",
             "--num_loops", "3", "--depths", "1", "2", "--blocks", "2", "--rounds", "0"]  # fmt: skip
    launch = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    launch += ["--dynamo_backend", "no", "--main_process_port", str(free_port())]
    command = [sys.executable, "-m", "accelerate.commands.launch", *launch, "-m", "evaluation.exit_tradeoff"]
    arguments = [str(trained / "run"), *sweep, "--output", str(tmp_path / "two")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run([*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    exit_tradeoff.main([str(trained / "run"), *sweep, "--output", str(tmp_path / "one")])
    shares = [len((tmp_path / "two" / f"tradeoff-{rank}.jsonl").read_text().splitlines()) for rank in range(2)]
    shared, alone = read_results(tmp_path / "two"), read_results(tmp_path / "one")
    assert sum(shares) == len(alone)
    assert abs(shares[0] - shares[1]) <= 1
    assert set(shared) == set(alone)
    for setting, result in alone.items():
        assert shared[setting].cross_entropy == pytest.approx(result.cross_entropy, abs=1e-5)
    assert (tmp_path / "two" / "results.json").read_text().count("perplexity") == len(alone)
    assert process.stdout.count("| rule |") == 1
