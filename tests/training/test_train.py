import json
import multiprocessing
import random
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

import training.train
from recurrent_gpt2 import RecurrentGPT2ForCausalLM
from tests.helpers import ROOT, random_ids, run_fresh, tiny_config, tiny_model
from tests.training.runs import run_quietly, tiny_run, write_texts
from training.card import training_lines
from training.data import collate
from training.trainer import RecurrentTrainer, draw_num_loops, newest_whole_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    write_texts(folder)
    return folder


def losses_of(run):
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    return [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]


def test_a_run_learns_logs_and_leaves_a_checkpoint_that_generates(folder, capsys):
    run = folder / "learns"
    arguments = tiny_run(
        folder, output_dir=run, max_steps=40, save_steps=20, learning_rate=1e-2, geometry_loops=4,
        eval_strategy="steps", eval_steps=20, report_to="tensorboard", disable_tqdm="false",
    )  # fmt: skip
    trainer = training.train.main(arguments)
    losses = [loss for _, loss in losses_of(run)]
    assert sum(losses[-5:]) / 5 < losses[0] - 1
    entry = next(entry for entry in trainer.state.log_history if "loss" in entry)
    logged = "loss perplexity tokens_seen tokens_per_second learning_rate grad_norm loops_group_0 loops_group_1"
    assert entry.keys() >= set(logged.split())
    assert entry["tokens_seen"] == 4 * 32
    assert any("eval_perplexity" in entry for entry in trainer.state.log_history)
    assert "40/40" in capsys.readouterr().err  # the progress bar
    assert list(run.rglob("events.out.tfevents*"))

    steps = [json.loads(line) for line in (run / "geometry.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [0, 1, 2, 4, 8, 16, 32, 40]
    assert len(steps[0]["groups"]) == 2
    assert len(steps[0]["groups"][0]["step_norm"]["mean"]) == 4
    assert steps[0]["drift_to_loop_ratio"][0]["as_printed"]["mean"] > 0

    printed = run_fresh(
        f"""
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = {str(run)!r}
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
ids = tokenizer("The number 7", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=12, do_sample=False, exit_policy="acceleration")[0]))
""",
        folder,
    )
    assert printed.startswith("The number 7")


def test_loop_counts_are_a_function_of_seed_step_and_micro_step():
    config = tiny_config(mean_loops=12)
    draws = {(seed, step, micro): tuple(draw_num_loops(config, seed, step, micro))
             for seed in range(2) for step in range(20) for micro in range(2)}  # fmt: skip
    assert len(set(draws.values())) > 70
    assert all(tuple(draw_num_loops(config, *key)) == counts for key, counts in draws.items())


def trainer_of(model, tmp_path, data, **settings):
    arguments = TrainingArguments(
        tmp_path, max_steps=1, learning_rate=0.0, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
        max_grad_norm=0.0, **settings,
    )  # fmt: skip
    return RecurrentTrainer(model, arguments, train_dataset=data)


def test_gradient_accumulation_gives_the_gradients_of_the_whole_batch(tmp_path):
    data = [{"input_ids": row} for row in random_ids(16, 12)]
    gradients = []
    for per_device, accumulated in ((16, 1), (4, 4)):
        model = tiny_model(dtype=torch.float64, state_init="zeros", loop_sigma=0.0)
        collected = {}
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name, collected=collected: collected.update({name: p.grad.clone()})
            )
        settings = {"per_device_train_batch_size": per_device, "gradient_accumulation_steps": accumulated}
        trainer = trainer_of(model, tmp_path, data, **settings)
        trainer.data_collator = lambda blocks: collate(blocks) | {"num_loops": [3, 2, 4]}
        trainer.train()
        gradients.append(collected)
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-9, rtol=1e-6)


def test_only_matrices_are_decayed(tmp_path):
    model = tiny_model()
    decayed = set(trainer_of(model, tmp_path, []).get_decay_parameter_names(model))
    for name, parameter in model.named_parameters():
        assert (name in decayed) == (parameter.ndim == 2), name


def test_compiled_blocks_do_not_recompile_for_new_loop_counts():
    torch._dynamo.reset()
    model, ids = tiny_model().train(), random_ids(2, 8)
    for layer in model.model.layers:
        layer.compile(dynamic=False, backend="aot_eager")
    model(ids, labels=ids, num_loops=6).loss.backward()
    torch._dynamo.utils.counters.clear()
    for num_loops in ([4, 7, 5], [9, 4, 6], 12):
        model(ids, labels=ids, num_loops=num_loops).loss.backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    torch._dynamo.reset()


def run_in_a_process(arguments, *how_to_die):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.training.runs"])
    process = context.Process(target=run_quietly, args=(arguments, *how_to_die))
    process.start()
    process.join(300)
    return process.exitcode


def check_resume(folder, name, kills, **fields):
    """A run killed at random moments, in the middle of a step or of a checkpoint, ends like one left alone."""
    whole, cut = folder / f"{name}-whole", folder / f"{name}-cut"
    assert run_in_a_process(tiny_run(folder, output_dir=whole, **fields)) == 0
    moments = random.Random(name)
    arguments = tiny_run(folder, output_dir=cut, resume="true", **fields)
    for _ in range(kills):
        assert run_in_a_process(arguments, moments.randint(2, 8), moments.uniform(0, 0.15)) == -signal.SIGKILL
    assert run_in_a_process(arguments) == 0
    assert losses_of(cut) == losses_of(whole)
    assert len(losses_of(whole)) == fields["max_steps"]
    expected, resumed = load_file(whole / "model.safetensors"), load_file(cut / "model.safetensors")
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(resumed[key], expected[key]) for key in expected)
    if fields.get("geometry_loops"):
        assert (cut / "geometry.jsonl").read_text() == (whole / "geometry.jsonl").read_text()


def test_a_killed_run_resumes_bit_for_bit(folder):
    check_resume(folder, "killed", kills=4, max_steps=70, geometry_loops=3, save_total_limit=2)


def test_a_killed_run_on_streamed_data_resumes_bit_for_bit(folder):
    sources = f"[{{path: {folder / 'texts.jsonl'}, streaming: true}}]"
    check_resume(folder, "streamed", kills=3, max_steps=60, sources=sources, save_total_limit=2)


@pytest.mark.slow
def test_runs_killed_twenty_times_resume_bit_for_bit(folder):
    check_resume(folder, "killed-often", kills=20, max_steps=400, geometry_loops=3, save_total_limit=2)
    sources = f"[{{path: {folder / 'texts.jsonl'}, streaming: true}}]"
    check_resume(folder, "streamed-often", kills=20, max_steps=400, sources=sources, save_total_limit=2)


def test_a_broken_checkpoint_is_passed_over_and_earlier_ones_are_left_alone(folder):
    run = folder / "broken"
    training.train.main(tiny_run(folder, output_dir=run, max_steps=4, save_total_limit=10))
    (run / "checkpoint-4" / "trainer_state.json").write_text('{"global_step": 4, "log_his')
    (run / "checkpoint-9").mkdir()
    assert newest_whole_checkpoint(run) == run / "checkpoint-3"
    for damaged, file in (("checkpoint-7", "model.safetensors"), ("checkpoint-8", "optimizer.pt")):
        shutil.copytree(run / "checkpoint-3", run / damaged)
        content = (run / damaged / file).read_bytes()
        (run / damaged / file).unlink()
        if file == "model.safetensors":
            (run / damaged / file).write_bytes(content[: len(content) // 2])
    assert newest_whole_checkpoint(run) == run / "checkpoint-3"
    before = {path: path.read_bytes() for path in (run / "checkpoint-3").iterdir() if path.is_file()}
    trainer = training.train.main(tiny_run(folder, output_dir=run, max_steps=5, resume="true", save_total_limit=10))
    assert trainer.state.global_step == 5
    assert {path: path.read_bytes() for path in before} == before
    for broken in run.glob("checkpoint-*"):
        shutil.rmtree(broken)
    assert newest_whole_checkpoint(run) is None


def test_a_run_is_not_written_over(folder):
    arguments = tiny_run(folder, output_dir=folder / "once", max_steps=2)
    training.train.main(arguments)
    with pytest.raises(FileExistsError, match="--resume"):
        training.train.main(arguments)
    for checkpoint in (folder / "once").glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    with pytest.raises(FileExistsError, match="has a model already"):
        training.train.main(arguments)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sources": "[no/such/file.parquet]"}, "no such file"),
        ({"block_size": 64}, "block_size.* 32 positions"),
        ({"vocab_size": 100}, "300 entries.*vocab_size.* 100"),
        ({"tokenizer": "no/such/tokenizer"}, "can't be loaded"),
        ({"validation_fraction": 0.0}, "no validation block"),
        ({"loop_groups": "[[9]]"}, "layers go from 0 to 3"),
    ],
)
def test_bad_input_is_a_sentence_that_says_what_to_do(folder, fields, message):
    with pytest.raises(Exception, match=message):
        training.train.main(tiny_run(folder, output_dir=folder / "bad", **fields))
    assert not list((folder / "bad").glob("checkpoint-*"))


def test_a_finished_run_is_not_trained_on(folder):
    run = folder / "finished"
    arguments = tiny_run(folder, output_dir=run, max_steps=3, geometry_loops=4)
    training.train.main(arguments)
    before = {name: (run / name).read_bytes() for name in ("geometry.jsonl", "model.safetensors", "trainer_state.json")}
    (run / "model.safetensors").unlink()  # as if it had been stopped after its last checkpoint
    trainer = training.train.main([*arguments, "--resume"])
    assert trainer.state.global_step == 3
    for name in ("config.json", "generation_config.json"):  # the trainer turns the cache off while it trains
        assert json.loads((run / name).read_text())["use_cache"] is True, name
    assert {name: (run / name).read_bytes() for name in before} == before
    training.train.main([*tiny_run(folder, output_dir=run, max_steps=5, geometry_loops=4), "--resume"])
    lines = [json.loads(line) for line in (run / "geometry.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]


def test_what_may_change_on_resume_changes_and_the_rest_is_refused(folder):
    run = folder / "changed"
    training.train.main(tiny_run(folder, output_dir=run, max_steps=2))
    with pytest.raises(ValueError, match=r"hidden_size.* 32.* has 16.*resume"):
        training.train.main(tiny_run(folder, output_dir=run, max_steps=3, resume="true", hidden_size=32))
    trainer = training.train.main(tiny_run(folder, output_dir=run, max_steps=3, resume="true", num_loops=7))
    assert trainer.model.config.num_loops == 7
    assert trainer.state.global_step == 3


def test_the_stock_way_to_resume_finds_the_newest_checkpoint(folder):
    run, task = folder / "stock", "[{task: chains, slots: 8, depth: 3}]"
    fields = {"output_dir": run, "sources": task, "loop_groups": "[[3]]", "most_loops": 4, "save_steps": 2}
    trainer = training.train.main(tiny_run(folder, **fields, max_steps=2))
    trainer.args.max_steps = 4
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4
    shutil.rmtree(run)
    with pytest.raises(ValueError, match="has no whole checkpoint to resume from"):
        trainer.train(resume_from_checkpoint=True)


def test_a_new_run_trains_its_own_tokenizer(folder):
    run = folder / "tokenizers"
    for entries in (300, 310):
        for checkpoint in run.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
        (run / "model.safetensors").unlink(missing_ok=True)
        training.train.main(tiny_run(folder, output_dir=run, max_steps=1, tokenizer_vocab_size=entries))
        assert len(AutoTokenizer.from_pretrained(run)) == entries


def test_tokens_are_counted_over_epochs_and_resumes(folder):
    run = folder / "counted"
    training.train.main(tiny_run(folder, output_dir=run, max_steps=40, save_steps=20, per_device_train_batch_size=60))
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    seen = [entry["tokens_seen"] for entry in history if "tokens_seen" in entry]
    assert seen == sorted(seen)
    assert seen[0] == 60 * 32
    assert seen[-1] < 40 * 60 * 32  # the last batch of an epoch is smaller
    trainer = training.train.main(
        tiny_run(folder, output_dir=run, max_steps=41, resume="true", per_device_train_batch_size=60)
    )
    assert [e["tokens_seen"] for e in trainer.state.log_history if "tokens_seen" in e][:40] == seen


def test_settings_that_would_go_wrong_silently_are_refused(folder):
    with pytest.raises(ValueError, match="label_smoothing_factor"):
        training.train.main(tiny_run(folder, output_dir=folder / "refused", label_smoothing_factor=0.1))
    sources = f"[{{path: {folder / 'texts.jsonl'}, streaming: true}}]"
    with pytest.raises(ValueError, match="dataloader_num_workers"):
        training.train.main(tiny_run(folder, output_dir=folder / "refused", sources=sources, dataloader_num_workers=1))


def test_the_command_prints_a_sentence_and_no_traceback(folder):
    command = [sys.executable, "-m", "training.train", *tiny_run(folder, output_dir=folder / "bad", hidden_size=15)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "`hidden_size` is 15, but must be a multiple of `num_attention_heads`" in result.stderr


def test_a_resumed_run_complains_of_nothing(folder, caplog):
    run = folder / "calm"
    for steps in (2, 3):
        trainer = training.train.main(tiny_run(folder, output_dir=run, max_steps=steps, resume="true"))
    assert len([entry for entry in trainer.state.log_history if "loss" in entry]) == 3  # it was resumed
    assert not [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_weights_that_are_missing_are_still_named(folder, caplog):
    trainer = trainer_of(tiny_model(), folder / "missing", [])
    state = {name: value for name, value in trainer.model.state_dict().items() if not name.startswith("lm_head")}
    del state["model.norm.weight"]
    trainer._issue_warnings_after_load(trainer.model.load_state_dict(state, strict=False))
    assert "['model.norm.weight']" in caplog.text


def test_tokenizers_of_runs_pad_and_know_the_models_length(folder):
    run = folder / "padded"
    training.train.main(tiny_run(folder, output_dir=run, max_steps=1))
    for path in (run, run / "checkpoint-1"):
        tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
        assert (tokenizer.model_max_length, tokenizer.padding_side) == (32, "left")
        assert tokenizer.pad_token_id == model.config.pad_token_id == model.generation_config.pad_token_id == 0
        assert len(tokenizer) == model.config.vocab_size == 300
        assert tokenizer(["The number", "The"], padding=True).attention_mask[1][0] == 0


def test_the_log_says_at_which_loops_it_was_evaluated(folder):
    run = folder / "evaluated"
    training.train.main(tiny_run(folder, output_dir=run, max_steps=2, eval_strategy="steps", eval_steps=2,
                                 num_loops="[3, 2]"))  # fmt: skip
    state = json.loads((run / "trainer_state.json").read_text())
    (entry,) = [entry for entry in state["log_history"] if "eval_loss" in entry]
    assert (entry["eval_loops_group_0"], entry["eval_loops_group_1"]) == (3, 2)
    assert training_lines(state)[1].endswith("at step 2, at 3, 2 fixed loops")


def test_what_is_no_gpt2_does_not_start_a_run(folder, tmp_path):
    tiny_model(vocab_size=300).save_pretrained(tmp_path / "looped")
    with pytest.raises(ValueError, match="is no GPT-2"):
        training.train.main(tiny_run(folder, output_dir=tmp_path / "run", from_gpt2=tmp_path / "looped"))


def test_training_from_a_gpt2(folder, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    run = folder / "learns"  # has a tokenizer of 300 entries
    config = GPT2Config(vocab_size=300, n_embd=16, n_layer=4, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    arguments = tiny_run(folder, output_dir=tmp_path / "run", max_steps=3, from_gpt2=tmp_path / "gpt2", tokenizer=run)
    training.train.main(arguments)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert type(model) is RecurrentGPT2ForCausalLM
    assert model.config.hidden_act == "gelu_new"
    assert len(AutoTokenizer.from_pretrained(tmp_path / "run")) == 300
