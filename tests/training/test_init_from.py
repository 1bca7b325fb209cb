import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import training.train
from tests.training.runs import tiny_run, write_texts
from tests.training.test_train import check_resume
from training.card import render_card
from training.tokenizer import train_tokenizer

OF_THE_MODEL = ("hidden_size", "num_hidden_layers", "num_attention_heads", "loop_groups", "max_position_embeddings")


def new_run(folder, **fields):
    """Arguments of a run that says nothing of the model but what is given."""
    arguments = tiny_run(folder, **fields)
    recipe = folder / "finetune.yaml"
    shutil.copy(training.train.__file__.replace("train.py", "recipes/finetune.yaml"), recipe)
    kept = [recipe]
    for name, value in zip(arguments[1::2], arguments[2::2], strict=True):
        field = name.removeprefix("--")
        if field in fields or field not in (*OF_THE_MODEL, "mean_loops", "num_loops", "tokenizer_vocab_size"):
            kept += [name, value]
    return list(map(str, kept))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("init_from")
    write_texts(folder)
    training.train.main(tiny_run(folder, output_dir=folder / "base", max_steps=6, save_steps=6))
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    model.generation_config.exit_policy = {"name": "step_norm", "threshold": 0.2}
    model.generation_config.num_loops = model.config.num_loops
    model.save_pretrained(folder / "base")
    return folder


def test_a_run_starts_from_a_checkpoint_with_a_fresh_optimiser(folder):
    run = folder / "run"
    trainer = training.train.main(
        new_run(folder, output_dir=run, init_from=folder / "base", learning_rate=0.0, max_steps=2, num_loops=3)
    )
    before, after = load_file(folder / "base/model.safetensors"), load_file(run / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)  # at a rate of 0
    assert trainer.state.global_step == 2
    assert AutoTokenizer.from_pretrained(run).get_vocab() == AutoTokenizer.from_pretrained(folder / "base").get_vocab()
    config, generation = (json.loads((run / name).read_text()) for name in ("config.json", "generation_config.json"))
    assert (config["num_loops"], generation["num_loops"]) == (3, 3)
    assert generation["exit_policy"]["name"] == "step_norm"


def test_positions_may_change(folder):
    for positions in (20, 40):
        trainer = training.train.main(
            new_run(folder, output_dir=folder / f"positions-{positions}", init_from=folder / "base", max_steps=1,
                    max_position_embeddings=positions, learning_rate=0.0)
        )  # fmt: skip
        table = trainer.model.model.embed_positions.weight
        old = load_file(folder / "base/model.safetensors")["model.embed_positions.weight"]
        assert torch.equal(table, old[torch.arange(positions) % 32])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 32}, r"hidden_size.* 32.*init_from.* has 16: it can't change from it, only .*num_loops"),
        ({"tokenizer": "train"}, r"tokenizer.*'train'.*vocabulary of its own"),
        ({"block_size": 64}, "block_size.* 64.* 32 positions"),
        ({"init_from": "no/such/checkpoint"}, r"init_from.*no/such/checkpoint.*no such checkpoint"),
        ({"from_gpt2": "gpt2"}, "a run starts from one model"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_may_not_be_is_a_sentence(folder, fields, message):
    with pytest.raises(ValueError, match=message):
        training.train.main(
            new_run(folder, **{"output_dir": folder / "bad", "init_from": folder / "base", "max_steps": 1, **fields})
        )


def test_another_architecture_or_vocabulary_is_refused(folder):
    config = GPT2Config(vocab_size=300, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    GPT2LMHeadModel(config).save_pretrained(folder / "gpt2")
    AutoTokenizer.from_pretrained(folder / "base").save_pretrained(folder / "gpt2")
    with pytest.raises(ValueError, match=r"no RecurrentGPT2 but a model of type 'gpt2'. Give it as `from_gpt2`"):
        training.train.main(new_run(folder, output_dir=folder / "bad", init_from=folder / "gpt2", max_steps=1))
    other = folder / "other"
    training.train.main(tiny_run(folder, output_dir=other, max_steps=1, tokenizer_vocab_size=310))
    with pytest.raises(ValueError, match="vocabulary of its own"):
        training.train.main(
            new_run(folder, output_dir=folder / "bad", init_from=folder / "base", tokenizer=other, max_steps=1)
        )
    with pytest.raises(ValueError, match=r"`max_position_embeddings` is 64, but with `kl_weight`.* which has 32"):
        training.train.main(
            new_run(folder, output_dir=folder / "bad", init_from=folder / "base", kl_weight=0.5,
                    max_position_embeddings=64, max_steps=1)
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"kl_weight.* no `from_gpt2`"):
        training.train.main(tiny_run(folder, output_dir=folder / "bad", kl_weight=0.5))


def test_the_card_says_what_the_model_was_trained_from(folder):
    run = folder / "named"
    training.train.main(new_run(folder, output_dir=run, init_from=folder / "base", max_steps=1))
    card = render_card(run)
    assert "trained on from base" in " ".join(card.text.split())
    assert card.data.base_model is None  # a folder is no name on the Hub
    named = render_card(run, base_model="someone/base")
    assert (named.data.base_model, named.data.base_model_relation) == ("someone/base", "finetune")


def test_healing_from_a_gpt2_with_loops_that_grow(folder):
    run = folder / "healed"
    config = GPT2Config(vocab_size=300, n_embd=16, n_layer=4, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder / "start")
    AutoTokenizer.from_pretrained(folder / "base").save_pretrained(folder / "start")
    fields = {"from_gpt2": folder / "start", "kl_weight": 0.5, "loop_ramp": 0.5, "mean_loops": 6, "max_steps": 12}
    arguments = new_run(folder, output_dir=run, **fields)
    place = arguments.index(str(folder / "finetune.yaml"))
    recipe = folder / "finetune.yaml"
    recipe.write_text("".join(line + "\n" for line in recipe.read_text().splitlines() if "init_from" not in line))
    trainer = training.train.main([arguments[place], *arguments[place + 1 :], "--loop_groups", "[[1, 2]]"])
    drawn = [entry["loops_group_0"] for entry in trainer.state.log_history if "loops_group_0" in entry]
    assert drawn[0] == 1
    assert sum(drawn[6:]) / 6 > sum(drawn[:4]) / 4
    first, *_, last = (entry for entry in trainer.state.log_history if "text_loss" in entry)
    assert first["text_loss"] == pytest.approx(first["loss"], abs=1e-3)  # it is the start itself, without divergence
    assert last["loss"] > last["text_loss"]
    assert last["perplexity"] == pytest.approx(math.exp(last["text_loss"]), rel=1e-3)  # of the text alone


def test_a_killed_run_that_started_from_a_checkpoint_resumes_bit_for_bit(folder):
    fields = {"init_from": folder / "base", "tokenizer": folder / "base", "kl_weight": 0.5, "loop_ramp": 0.5}
    check_resume(folder, "killed", kills=2, max_steps=30, save_total_limit=2, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"from_gpt2": "mamba"}, "is no GPT-2 but a model of type 'mamba'"),
        ({"tokenizer": "train"}, r"tokenizer.*'train'.*from_gpt2.*vocabulary of its own"),
        ({"tokenizer": "other"}, r"tokenizer.*other.*from_gpt2.*vocabulary of its own"),
        ({"block_size": 64}, "block_size.* 64.* 32 positions"),
        ({"max_position_embeddings": 64}, r"max_position_embeddings.*GPT-2's own, 32"),
        ({"from_gpt2": "nothing"}, "nothing"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_a_retrofit_can_not_start_from_is_a_sentence(folder, fields, message):
    own = AutoTokenizer.from_pretrained(folder / "base")
    config = GPT2Config(vocab_size=300, n_embd=16, n_layer=4, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder / "gpt2-to-loop")
    own.save_pretrained(folder / "gpt2-to-loop")
    (folder / "mamba").mkdir(exist_ok=True)
    (folder / "mamba/config.json").write_text(json.dumps({"model_type": "mamba"}))
    own.save_pretrained(folder / "mamba")
    train_tokenizer(["other words"], 300).save_pretrained(folder / "other")
    paths = {name: folder / fields[name] for name in ("from_gpt2", "tokenizer") if fields.get(name, "train") != "train"}
    fields = {"from_gpt2": folder / "gpt2-to-loop", **fields, **paths}
    arguments = new_run(folder, output_dir=folder / "bad", max_steps=1, **fields)
    recipe = folder / "finetune.yaml"
    recipe.write_text("".join(line + "\n" for line in recipe.read_text().splitlines() if "init_from" not in line))
    with pytest.raises((ValueError, OSError), match=message):
        training.train.main(arguments)
