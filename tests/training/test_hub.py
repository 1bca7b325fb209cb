"""Push and pull against a Hub on loopback, with the real client."""

import hashlib
import json
import os
import shutil

import pytest
import torch
from huggingface_hub import HfApi, ModelCard, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoModelForCausalLM, AutoTokenizer

import training.train
from recurrent_gpt2 import RecurrentGPT2ForCausalLM, StepNormExit
from tests.helpers import REMOTE_CODE, ROOT, random_ids, run_fresh, tiny_model
from tests.hub_server import TOKEN
from tests.training.runs import tiny_run, write_texts
from training import push
from training.card import check_card, check_metadata, render_card

FIXED = {"dataset": "some text", "policy": None, "num_loops": 5, "mean_steps": 5.0, "perplexity": 61.25}
RESULTS = [
    {**FIXED, "ms_per_token": 3.5},
    {**FIXED, "policy": {"name": "step_norm", "threshold": 2.5}, "mean_steps": 3.25, "perplexity": 61.5},
]


@pytest.fixture
def model():
    model = tiny_model(std=0.3)
    model.generation_config.exit_policy = StepNormExit(2.5)
    return model


@pytest.fixture
def checkpoint(tmp_path, model, tokenizer):
    folder = tmp_path / "checkpoint"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "results.json").write_text(json.dumps(RESULTS))
    (folder / "optimizer.pt").write_bytes(b"not for sharing")
    return folder


def pull(tmp_path, repo, **kwargs):
    return RecurrentGPT2ForCausalLM.from_pretrained(repo, cache_dir=tmp_path / "empty_cache", **kwargs).eval()


def test_push_by_python_and_pull_gives_equal_logits(logged_in, tmp_path, model, tokenizer):
    model.push_to_hub("someone/by-python")
    tokenizer.push_to_hub("someone/by-python")
    files = logged_in.files_of("someone/by-python")
    assert files.keys() >= REMOTE_CODE | {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    pulled, ids = pull(tmp_path, "someone/by-python"), random_ids(2, 9)
    assert torch.equal(pulled(ids).logits, model(ids).logits)
    output = pulled.generate(ids, max_new_tokens=3, return_dict_in_generate=True)
    assert output.loop_steps.min() < 5  # the policy from the Hub is active
    assert torch.equal(output.sequences, model.generate(ids, max_new_tokens=3))


def test_push_by_command_and_pull_in_a_fresh_process(logged_in, tmp_path, checkpoint, model, capsys):
    repo, ids = "someone/by-command", random_ids(1, 6)
    push.main([str(checkpoint), repo, "--private", "--datasets", "someone/texts", "--license", "mit"])
    sha = logged_in.repositories[repo].references["main"]
    printed = capsys.readouterr().out
    assert sha in printed
    assert "model.safetensors" in printed
    assert TOKEN not in printed
    card = ModelCard(logged_in.files_of(repo)["README.md"].decode()).data
    assert (card.datasets, card.license) == (["someone/texts"], "mit")
    files = logged_in.files_of(repo)
    assert set(files) == REMOTE_CODE | {
        ".gitattributes", "README.md", "config.json", "generation_config.json", "model.safetensors", "results.json",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert not any(TOKEN.encode() in content for content in files.values())

    code = f"""
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
arguments = dict(revision={sha!r}, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained({repo!r}, **arguments)
ids = torch.tensor({ids.tolist()})
output = model.generate(ids, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
torch.save([model(ids).logits, output.sequences, output.loop_steps], "results.pt")
generate = pipeline("text-generation", model={repo!r}, **arguments)
print(generate("abc", max_new_tokens=3, do_sample=False)[0]["generated_text"])
"""
    printed = run_fresh(code, tmp_path, HF_TOKEN=TOKEN)
    logits, sequences, steps = torch.load(tmp_path / "results.pt")
    expected = model.generate(ids, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(logits, model(ids).logits)
    assert torch.equal(sequences, expected.sequences)
    assert torch.equal(steps, expected.loop_steps)
    assert steps.min() < 5
    assert printed.strip().splitlines()[-1].startswith("abc")


def test_linked_code_is_uploaded_as_code(logged_in, checkpoint):
    for name in REMOTE_CODE:
        (checkpoint / name).unlink()
        (checkpoint / name).symlink_to(ROOT / "recurrent_gpt2" / name)
    push_folder(checkpoint, "someone/linked")
    files = logged_in.files_of("someone/linked")
    for name in REMOTE_CODE:
        assert files[name] == (ROOT / "recurrent_gpt2" / name).read_bytes()


def test_revisions_tags_and_what_was_pushed_before(logged_in, tmp_path, checkpoint, monkeypatch):
    repo, api, ids = "someone/revised", HfApi(), random_ids(1, 5)
    first = push_folder(checkpoint, repo)
    api.create_tag(repo, tag="v1", revision=first)
    changed = tiny_model(std=0.3, seed=1)
    changed.save_pretrained(checkpoint)
    second = push_folder(checkpoint, repo, revision="experiment")
    assert first != second
    expected = {
        first: tiny_model(std=0.3),
        "v1": tiny_model(std=0.3),
        "main": tiny_model(std=0.3),
        "experiment": changed,
    }
    for revision, same in expected.items():
        assert torch.equal(pull(tmp_path, repo, revision=revision)(ids).logits, same(ids).logits), revision


def push_folder(checkpoint, repo, **kwargs):
    """The command without its check in a fresh process, which other tests run."""
    push.write_card(checkpoint, repo)
    return push.push(checkpoint, repo, quick_check(checkpoint, repo), **kwargs)


def quick_check(checkpoint, repo=None):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(push, "LOAD", "pass")
        return check_folder(checkpoint, repo)


check_folder = push.check_folder


def test_private_repositories_and_tokens(hub, tmp_path, checkpoint, monkeypatch):
    repo = "someone/private"
    with pytest.raises(PermissionError, match=r"no Hub token.*hf auth login"):
        push_folder(checkpoint, repo)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong_token")
    with pytest.raises(PermissionError, match="refused the token for someone/private") as refused:
        push_folder(checkpoint, repo)
    assert "hf_wrong" not in str(refused.value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    push_folder(checkpoint, repo, private=True)
    assert hub.repositories[repo].private
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(OSError, match="someone/private"):
        pull(tmp_path, repo)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert pull(tmp_path, repo).num_parameters() > 0


def test_a_push_cut_in_the_middle_can_be_repeated(logged_in, tmp_path, checkpoint, monkeypatch):
    repo = "someone/interrupted"
    sharded = tiny_model(std=0.3)
    for file in checkpoint.glob("*.safetensors"):
        file.unlink()
    sharded.save_pretrained(checkpoint, max_shard_size="100KB")
    shards = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    assert len(shards) > 1
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between its attempts
    logged_in.break_uploads = True
    logged_in.lfs.clear()
    try:
        with pytest.raises(ConnectionError, match="run it again"):
            push_folder(checkpoint, repo)
    finally:
        logged_in.break_uploads = False
    assert set(logged_in.files_of(repo)) == {".gitattributes"}  # nothing half done is visible
    content = (checkpoint / shards[0]).read_bytes()
    logged_in.lfs[hashlib.sha256(content).hexdigest()] = content  # one shard had arrived
    logged_in.requests.clear()
    push_folder(checkpoint, repo)
    assert len([path for method, path in logged_in.requests if method == "PUT"]) == len(shards) - 1
    assert set(shards) <= set(logged_in.files_of(repo))
    ids = random_ids(1, 5)
    assert torch.equal(pull(tmp_path, repo)(ids).logits, sharded(ids).logits)
    folder = snapshot_download(repo, cache_dir=tmp_path / "snapshot")
    assert "optimizer.pt" not in os.listdir(folder)


def test_the_trainer_pushes_a_whole_checkpoint(logged_in, tmp_path):
    write_texts(tmp_path)
    repo = "someone/trained"
    arguments = tiny_run(
        tmp_path, max_steps=4, save_steps=4, eval_strategy="steps", eval_steps=4, push_to_hub="true", hub_model_id=repo
    )
    training.train.main(arguments).push_to_hub()
    files = logged_in.files_of(repo)
    assert files.keys() >= REMOTE_CODE | {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
    card = ModelCard(files["README.md"].decode())
    assert card.data.library_name == "transformers"
    assert "recurrent-depth" in card.data.tags
    assert card.data.eval_results[0].metric_type == "perplexity"
    loaded = AutoModelForCausalLM.from_pretrained(repo, cache_dir=tmp_path / "cache")
    tokenizer = AutoTokenizer.from_pretrained(repo, cache_dir=tmp_path / "cache")
    assert loaded.config.vocab_size == len(tokenizer)


def test_a_run_starts_from_names_on_the_hub(logged_in, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    write_texts(tmp_path)
    trained = training.train.main(tiny_run(tmp_path, output_dir=tmp_path / "base", max_steps=1)).model
    push.main([str(tmp_path / "base"), "someone/start"])
    fields = {"learning_rate": 0.0, "max_steps": 1}
    started = training.train.main(
        tiny_run(tmp_path, output_dir=tmp_path / "on", init_from="someone/start", tokenizer=tmp_path / "base", **fields)
    ).model
    assert all(map(torch.equal, trained.state_dict().values(), started.state_dict().values()))
    card = render_card(tmp_path / "on")
    assert (card.data.base_model, card.data.base_model_relation) == ("someone/start", "finetune")
    check_metadata(card)


def test_the_card_has_the_numbers_of_the_files(checkpoint):
    card = render_card(checkpoint, "someone/model")
    assert [result.metric_value for result in card.data.eval_results] == [61.25, 61.5]
    assert card.data.to_dict()["model-index"][0]["name"] == "model"
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.license == "apache-2.0"
    assert "| some text | step_norm (threshold 2.5) | 3.25 | 61.500 |  |" in card.text
    assert 'repo, revision = "someone/model", "<commit>"' in card.text
    assert '"name": "step_norm"' in card.text
    card.validate()
    for heading in ("Loading", "Exit policies", "Training", "Limits", "Citation"):
        assert f"## {heading}" in card.text
    assert "{{" not in card.content
    assert "{%" not in card.content


def test_a_card_whose_numbers_have_drifted_is_refused(checkpoint):
    render_card(checkpoint, "someone/model").save(checkpoint / "README.md")
    check_card(checkpoint, "someone/model")
    (checkpoint / "results.json").write_text(json.dumps([{**RESULTS[0], "perplexity": 60.0}, RESULTS[1]]))
    with pytest.raises(ValueError, match=r"disagree \(model-index\).*61.25.*60.0"):
        check_card(checkpoint, "someone/model")


def test_a_dry_run_lists_and_uploads_nothing(hub, checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(push, "check_folder", quick_check)
    hub.requests.clear()
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.is_file()}
    push.main([str(checkpoint), "someone/dry", "--dry-run"])
    printed = capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.is_file()} == before
    assert "README.md" in printed
    assert "model.safetensors" in printed
    assert "optimizer.pt" not in printed
    assert not [request for request in hub.requests if request[0] != "GET" and "validate" not in request[1]]
    assert "someone/dry" not in hub.repositories


def test_folders_that_are_not_fit_to_be_shared_are_refused(checkpoint, tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        push.check_folder(tmp_path / "nowhere")
    push.write_card(checkpoint, "someone/model")
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    (broken / "loop_cache.py").write_text("raise RuntimeError('broken on purpose')\n")
    with pytest.raises(ValueError, match=r"does not load by its own remote code.*broken on purpose"):
        push.check_folder(broken)
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no tokenizer.json, model.safetensors"):
        push.check_folder(checkpoint)


def test_a_hub_that_is_not_there_is_no_token_problem(logged_in):
    with pytest.raises(HfHubHTTPError):
        HfApi().model_info("someone/missing")


def test_the_metadata_of_cards_is_what_the_hub_takes(checkpoint):
    options = {"datasets": ["someone/texts", "HuggingFaceFW/fineweb"], "base_model": "someone/base"}
    card = render_card(checkpoint, "someone/model", **options)
    card.save(checkpoint / "README.md")
    written = ModelCard.load(checkpoint / "README.md", ignore_metadata_errors=False)
    check_metadata(written)
    data = written.data.to_dict()
    assert (data["library_name"], data["pipeline_tag"]) == ("transformers", "text-generation")
    assert (data["base_model"], data["base_model_relation"]) == ("someone/base", "finetune")
    assert data["datasets"] == options["datasets"]
    (model,) = data["model-index"]
    (result,) = model["results"]
    assert result["dataset"] == {"name": "some text", "type": "some-text"}
    assert [metric["value"] for metric in result["metrics"]] == [61.25, 61.5]


@pytest.mark.parametrize("folder", sorted((ROOT / "checkpoints").iterdir()), ids=lambda folder: folder.name)
def test_the_metadata_of_shipped_cards_is_what_the_hub_takes(folder):
    check_metadata(ModelCard.load(folder / "README.md", ignore_metadata_errors=False))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("pipeline_tag: text-generation", "pipeline_tag: talking", "`pipeline_tag` is 'talking', but must be"),
        ("license: apache-2.0\n", "", "no `license`"),
        ("library_name: transformers\n", "", "`library_name` is None"),
        ("base_model: someone/base", "base_model: a folder/of/mine", "`base_model` is 'a folder/of/mine'"),
        ("- someone/texts", "- my texts.parquet", "`datasets` is 'my texts.parquet', which can't be a name"),
        ("type: some-text", "type: some text", "`dataset.type` is 'some text'"),
        ("value: 61.25", "value: good", "is 'good', but must be a number"),
    ],
    ids=lambda text: text[:12],
)
def test_metadata_that_the_hub_would_not_take_is_a_sentence(checkpoint, before, after, message):
    card = render_card(checkpoint, "someone/model", datasets=["someone/texts"], base_model="someone/base")
    assert before in card.content
    with pytest.raises(ValueError, match=message):
        check_metadata(ModelCard(card.content.replace(before, after)))
