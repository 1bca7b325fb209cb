import json
import shutil

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from transformers import AutoModelForCausalLM, AutoTokenizer

from evaluation import calibrate, exit_search
from evaluation.calibrate import Budget, Calibration, Outcome, Part, Tried, sequence_of, split
from evaluation.common import blocks_of, held_out_documents, load_checkpoint
from evaluation.exit_search import Score, Workload, find_rules, score
from evaluation.exit_tradeoff import Setting
from evaluation.risk_control import fixed_sequence, hoeffding_bentkus
from recurrent_gpt2 import ExitPolicy
from tests.evaluation.test_exit_search import write_policy
from tests.helpers import random_ids, tiny_model
from training.card import check_card, render_card
from training.data import Source
from training.promise import guarantee_of
from training.tasks import Chains, task_tokenizer

FEW = ["--tuning", "24", "--calibration", "120", "--block_size", "16", "--num_loops", "5"]


@pytest.fixture
def checkpoint(trained, tmp_path):
    """A copy of a trained run, with a card."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(trained / "run", folder)
    render_card(folder).save(folder / "README.md")
    return folder


def run(checkpoint, trained, *more, budget=("--budget", "0.05")):
    calibrate.main([str(checkpoint), "--source", str(trained / "texts.jsonl"), *budget, *FEW,
                    "--output", str(checkpoint.parent / "scores"), *more])  # fmt: skip


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def read(path):
    return json.loads(path.read_text())


def test_one_command_from_checkpoint_and_text_to_a_stored_and_guaranteed_setting(checkpoint, trained, capsys):
    run(checkpoint, trained, "--write")
    printed = capsys.readouterr().out
    promised = read(checkpoint / "calibration.json")
    (kept,) = promised["promises"]
    assert kept["p_value"] <= 0.05
    assert kept["mean_clipped_excess"] <= 0.05
    assert promised["cost"]["chosen"] < promised["cost"]["full"]
    assert (promised["full_loops"], kept["calibration_sequences"]) == ([5, 5], 120)
    assert "**winner**" in printed
    assert "fixed hull" in printed
    assert "With probability 0.95 over the calibration text (120 sequences of 16 tokens of " in printed
    promise = (
        "the mean excess loss of a sequence against 5 loops, clipped to [0, 0.5] nats, is at most 0.05 nats on text"
    )
    assert promise in printed
    # What is stored is what `generate` uses, and the cap is one.
    model = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True)
    assert model.config.num_loops == model.generation_config.num_loops
    ids = AutoTokenizer.from_pretrained(checkpoint)("The number 5 comes", return_tensors="pt").input_ids
    arguments = {"exit_policy": promised["exit_policy"], "num_loops": promised["num_loops"]}
    output = model.generate(ids, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    said = model.generate(ids, max_new_tokens=5, do_sample=False, return_dict_in_generate=True, **arguments)
    assert torch.equal(output.loop_steps, said.loop_steps)
    assert (output.loop_steps.double().mean((0, 1)) < 5).any()
    line = next(line for line in printed.splitlines() if line.startswith("model.generate("))
    eval(line, {"model": model, "ids": ids})
    # The card says so, and a card that says otherwise is noticed.
    check_card(checkpoint)
    card = (checkpoint / "README.md").read_text()
    assert "is at most 0.05 nats on text like this. Nothing is promised for text of another kind." in card
    (checkpoint / "README.md").write_text(card.replace("at most 0.05 nats", "at most 0.01 nats"))
    with pytest.raises(ValueError, match=r"disagree \(promise\)"):
        check_card(checkpoint)
    # Full depth is still known when it is done again.
    assert calibrate.full_loops(str(checkpoint), model) == [5, 5]


def test_it_goes_on_where_it_stopped(checkpoint, trained, monkeypatch, capsys):
    rules = ("--rules", "step_norm", "kl", "--write")
    before = files_of(checkpoint)
    scored = []

    def counted(*arguments, until=12):
        if len(scored) == until:
            raise KeyboardInterrupt
        scored.append((len(arguments[1]), arguments[2]))
        return score(*arguments)

    monkeypatch.setattr(exit_search, "score", counted)
    with pytest.raises(KeyboardInterrupt):
        run(checkpoint, trained, *rules)
    assert files_of(checkpoint) == before  # nothing half-written
    monkeypatch.setattr(exit_search, "score", lambda *arguments: counted(*arguments, until=None))
    run(checkpoint, trained, *rules)
    assert len(scored) == len(set(scored)) > 12
    first = read(checkpoint / "calibration.json")
    table = capsys.readouterr().out
    done = len(scored)
    run(checkpoint, trained, *rules)  # nothing is left to do
    assert len(scored) == done
    assert capsys.readouterr().out == table
    assert read(checkpoint / "calibration.json") == first


def test_scores_of_another_split_are_not_taken_for_its_own(checkpoint, trained):
    run(checkpoint, trained, "--rules", "step_norm")
    with pytest.raises(ValueError, match="another"):
        run(checkpoint, trained, "--rules", "step_norm", "--tuning", "20", "--calibration", "124")


def test_a_promise_ends_with_the_weights_or_the_setting_that_it_was_made_for(checkpoint, trained):
    run(checkpoint, trained, "--rules", "step_norm", "--write")
    assert guarantee_of(checkpoint) is not None
    settings = checkpoint / "generation_config.json"
    kept = settings.read_text()
    settings.write_text(json.dumps({**json.loads(kept), "exit_policy": "kl"}))
    assert guarantee_of(checkpoint) is None
    settings.write_text(kept)
    assert guarantee_of(checkpoint) is not None
    model, _ = load_checkpoint(str(checkpoint))
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    model.save_pretrained(checkpoint)
    assert guarantee_of(checkpoint) is None


def test_one_loop_leaves_nothing_to_choose(checkpoint, trained):
    with pytest.raises(ValueError, match="is one loop: nothing is cheaper"):
        run(checkpoint, trained, "--num_loops", "1")


def test_a_cache_whose_tokens_see_other_states_is_refused(checkpoint, trained):
    config = checkpoint / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "cache_strategy": "last_step"}))
    with pytest.raises(ValueError, match=r"`cache_strategy` of .* is 'last_step', but must be 'per_step'"):
        run(checkpoint, trained)


def test_a_policy_of_ones_own_is_swept_beside_the_others(checkpoint, trained, tmp_path, capsys):
    path = write_policy(tmp_path / "my_policy.py", "MyStepNorm", '@register_exit_policy("my_step_norm")')
    run(checkpoint, trained, "--rules", "step_norm", "--policy", str(path))
    rows = [line for line in capsys.readouterr().out.splitlines() if "| my_step_norm |" in line]
    assert rows
    assert "best of its rule" in rows[-1]


def test_accuracy_is_a_budget_too(checkpoint, trained, capsys):
    run(checkpoint, trained, "--rules", "cosine", "--write", budget=("--budget-accuracy", "0.1"))
    assert "the mean loss of accuracy of a sequence against 5 loops, clipped to [0, 1], is at most 0.1 on" in (
        capsys.readouterr().out
    )
    (promised,) = read(checkpoint / "calibration.json")["promises"]
    assert promised["measure"] == "accuracy"
    assert promised["mean_clipped_excess"] <= 0.1


def test_a_task_has_new_sequences_and_a_budget_of_accuracy(tmp_path, capsys):
    task = Chains(depth=3, slots=10, values=3, chains=2)
    tokenizer = task_tokenizer([task])
    model = tiny_model(0.15, vocab_size=len(tokenizer), loop_groups=[[1, 2]], num_loops=5)
    model.config.tasks = [task.to_dict()]
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    arguments = [str(tmp_path / "model"), "--output", str(tmp_path / "scores"), "--rules", "step_norm"]
    with pytest.raises(ValueError, match="`--source` is the task chains: give its budget as `--budget-accuracy`"):
        calibrate.main([*arguments, "--source", "chains"])
    with pytest.raises(ValueError, match="trained on chains"):
        calibrate.main([*arguments, "--source", "programs", "--budget-accuracy", "0.1"])
    few = ["--tuning", "40", "--calibration", "160"]
    calibrate.main([*arguments, "--source", "chains", "--budget-accuracy", "0.1", *few, "--write"])
    assert "(160 sequences of 10 tokens of chains)" in capsys.readouterr().out
    assert read(tmp_path / "model" / "calibration.json")["promises"][0]["source"] == "chains"
    # Text beside it has a budget of its own, and the setting keeps both.
    (tmp_path / "text.txt").write_text(
        " ".join(task.text(ids) for ids in task.sample(300, 3, np.random.default_rng(0)).ids)
    )
    both = ["--source", "chains", str(tmp_path / "text.txt"), "--budget-accuracy", "0.1", "--budget", "0.05"]
    scores = ["--output", str(tmp_path / "both"), "--rules", "step_norm"]
    calibrate.main([arguments[0], *both, *few, *scores, "--block_size", "10", "--write"])
    promised = read(tmp_path / "model" / "calibration.json")
    assert [(p["measure"], p["budget"]) for p in promised["promises"]] == [("accuracy", 0.1), ("nats", 0.05)]
    assert all(p["p_value"] <= 0.05 and p["mean_clipped_excess"] <= p["budget"] for p in promised["promises"])
    printed = capsys.readouterr().out
    assert "loss of accuracy of a sequence of chains against 5 loops" in printed
    assert "0.05 nats on text like this" in printed


def test_cost_can_be_measured_time(checkpoint, trained, capsys):
    run(checkpoint, trained, "--rules", "step_norm", "--cost", "ms")
    assert "ms/token" in capsys.readouterr().out


def test_an_edited_card_is_left_alone(checkpoint, trained, capsys):
    with (checkpoint / "README.md").open("a") as card:
        card.write("Mine.\n")
    run(checkpoint, trained, "--rules", "step_norm", "--write")
    assert "has been edited, and is left as it is" in capsys.readouterr().out
    assert (checkpoint / "README.md").read_text().endswith("Mine.\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "0"], "`--budget` is 0.0, but must be a finite number above 0"),
        (["--budget", "-0.01"], "`--budget` is -0.01"),
        (["--budget", "nan"], "`--budget` is nan"),
        (["--budget-accuracy", "1.5"], "`--budget-accuracy` is 1.5, but must be above 0 and below 1"),
        (["--budget", "0.05", "--confidence", "1"], "`--confidence` is 1.0"),
        (["--budget", "0.05", "--clip", "0.05"], "`--clip` is 0.05, but must be above the budget"),
        (["--budget", "0.05", "--rules", "no_such_rule"], "'no_such_rule' is not registered"),
        (["--budget", "0.05", "--policy", "{raises}"], "raises.py can't be loaded: ZeroDivisionError"),
        (["--budget", "0.05", "--source", "{short}"], "no full block"),
        (["--budget", "0.05", "--calibration", "20"], "20 of them to calibrate on.* at least 29 of them, 39 in all"),
    ],
)  # fmt: skip
def test_bad_input_is_a_sentence_and_nothing_is_written(checkpoint, trained, tmp_path, arguments, message):
    (tmp_path / "raises.py").write_text("1 / 0")
    (tmp_path / "short.txt").write_text("ab")
    places = {"{raises}": str(tmp_path / "raises.py"), "{short}": str(tmp_path / "short.txt")}
    before = files_of(checkpoint)
    with pytest.raises(ValueError, match=message):
        run(checkpoint, trained, *(places.get(a, a) for a in arguments), "--write", budget=())
    assert files_of(checkpoint) == before
    assert not (tmp_path / "scores").exists()


def test_only_a_folder_can_be_written_to(trained):
    with pytest.raises(ValueError, match="needs a checkpoint in a folder"):
        calibrate.main(["someone/model", "--source", str(trained / "texts.jsonl"), "--write"])


def test_where_nothing_is_promised_it_says_how_much_text_it_takes():
    full = Score(Setting("fixed", None, (8,)), [1.0] * 60, [8.0], 0, 8.0)
    cheap = Score(Setting("fixed", None, (2,)), [1.04] * 60, [2.0], 0, 2.0)
    budget = Budget(0.05, 0.5, 0.95)
    tested = Outcome(Tried([cheap]), hoeffding_bentkus(0.08, 60, 0.1))
    blocks = Workload.of_text(random_ids(60, 4))
    full, cheap = Tried([full]), Tried([cheap])
    result = Calibration([Part("text", budget, blocks, blocks)], (8,), "flops", [full, cheap], full, full, [tested])
    assert result.winner is None
    text = calibrate.explain(result)
    needed = int(text.split("to promise it takes ")[1].split()[0])
    assert hoeffding_bentkus(0.08, needed, 0.1) <= 0.05 < hoeffding_bentkus(0.08, 60, 0.1)


def known_problem(rng, sequences, settings=30):
    """Scores of settings whose cost falls and whose loss grows, sequence by sequence at random."""
    losses = np.concatenate([[np.zeros(sequences)], [
        rng.exponential(0.002 * place, sequences) - 0.001 for place in range(1, settings)
    ]])  # fmt: skip
    return [
        Score(Setting("fixed", None, (settings - place,)), row.tolist(), [1.0], 0, float(settings - place))
        for place, row in enumerate(losses)
    ]


def chosen_risk(all_losses, full, parts, budget):
    """Tunes on one part, tests on another; the risk of what is chosen on the third. None: nothing is chosen."""
    tuning, calibration, rest = (
        [Score(s.setting, np.array(s.losses)[part].tolist(), s.steps, 0, s.flops) for s in all_losses] for part in parts
    )
    part = Part("text", budget, *(Workload.of_text(torch.zeros(len(places), 2).long()) for places in parts[:2]))
    tried = [Tried([score]) for score in tuning]
    result = Calibration([part], full.num_loops, "flops", tried, tried[0], tried[0], [])
    by_setting = {s.setting: s for s in calibration}
    sequence = sequence_of(result)
    risks = [budget.risk(by_setting[s.setting], calibration[0]) for s in sequence]
    walked = fixed_sequence([hoeffding_bentkus(r, len(parts[1]), budget.alpha) for r in risks], budget.delta)
    if walked == 0:
        return None
    last = sequence[walked - 1].setting
    return budget.risk(next(s for s in rest if s.setting == last), rest[0])


def test_over_many_draws_of_a_known_problem_the_promise_is_kept_as_often_as_it_says():
    rng, budget, runs = np.random.default_rng(0), Budget(0.01, 0.1, 0.9), 200
    parts = np.arange(64), np.arange(64, 364), np.arange(364, 2364)
    risks = [chosen_risk(known_problem(rng, 2364), Setting("fixed", None, (30,)), parts, budget) for _ in range(runs)]
    assert sum(risk is not None and risk > budget.alpha / 2 for risk in risks) > runs / 2  # and not by doing nothing
    broken = sum(risk is not None and risk > budget.alpha for risk in risks)
    assert binomtest(broken, runs, budget.delta, alternative="greater").pvalue > 0.001


@pytest.mark.slow
def test_on_fresh_text_of_the_same_kind_the_promise_holds_as_often_as_it_says(trained):
    """Many random splits of the same blocks into tuning, calibration and fresh text, each setting scored once."""
    model, tokenizer = load_checkpoint(trained / "run")
    documents = held_out_documents(Source(str(trained / "texts.jsonl")), None)
    blocks = Workload.of_text(blocks_of(documents, tokenizer, 16, 1400))
    cap, budget = (5, 5), Budget(0.02, 0.2, 0.9)
    settings = exit_search.fixed_ladder(cap).uniform()
    for rule in find_rules(["step_norm", "kl", "acceleration"]):
        for ladder in exit_search.rule_ladders(model, blocks[:16], rule, cap):
            settings += ladder.uniform()
    settings += [Setting("fixed", None, (a, b)) for a in range(1, 6) for b in range(1, 6) if a != b]
    scores = [score(model, blocks, setting) for setting in dict.fromkeys(settings)]
    generator, risks = torch.Generator().manual_seed(0), []
    for _ in range(300):
        order = torch.randperm(len(blocks), generator=generator).numpy()
        parts = order[:64], order[64:364], order[364:]
        risks.append(chosen_risk(scores, Setting("fixed", None, cap), parts, budget))
    promised = [risk for risk in risks if risk is not None]
    assert len(promised) > 150
    # The fresh part is a sample too: what is chosen to be near the budget may exceed it there by its own error.
    broken = sum(risk > budget.alpha for risk in promised)
    assert binomtest(broken, len(risks), budget.delta, alternative="greater").pvalue > 0.001


def test_parts_are_drawn_at_random_and_do_not_meet():
    workload = Workload.of_text(torch.arange(400).view(100, 4))
    tuning, calibration = split(workload, 64, 50, seed=0)
    assert (len(tuning), len(calibration)) == (25, 50)  # a quarter at most
    assert not set(tuning.ids[:, 0].tolist()) & set(calibration.ids[:, 0].tolist())
    assert not torch.equal(split(workload, 64, 50, seed=1)[0].ids, tuning.ids)
    assert torch.equal(split(workload, 64, 50, seed=0)[0].ids, tuning.ids)


def test_a_written_policy_is_one_that_loads(checkpoint, trained):
    run(checkpoint, trained, "--rules", '{"name": "all", "of": ["cosine", "confidence"]}', "--write")
    policy = read(checkpoint / "generation_config.json")["exit_policy"]
    for one in policy if isinstance(policy, list) else [policy]:
        assert one is None or ExitPolicy.from_dict(one)
