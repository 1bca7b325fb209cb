import json
import re
from dataclasses import dataclass

import pytest
import torch

from evaluation.explore.generation import Sampling, parting, stream
from evaluation.explore.page import Page
from evaluation.explore.workbench import (
    AS_JSON,
    OWN,
    Workbench,
    fields_of,
    policy_choices,
    read_loops,
    read_policy,
)
from recurrent_gpt2 import ExitPolicy, StepNormExit, available_exit_policies, register_exit_policy
from tests.conftest import HUB_PORT
from tests.helpers import ROOT, tiny_model
from tests.hub_server import TOKEN, Hub

PROMPT = "abcdef"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    model = tiny_model(0.3)
    model.generation_config.exit_policy = StepNormExit(3.0)
    model.generation_config.num_loops = [3, 5, 4]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def workbench(checkpoint):
    return Workbench([str(checkpoint)])


@pytest.fixture
def opened(workbench):
    return workbench.open("tiny")


@pytest.fixture
def page(workbench):
    return Page(workbench)


def own(opened):
    return read_loops(opened, read_policy(OWN, {}, ""), "")


# Checkpoints


@pytest.mark.parametrize("name", ["/etc", "../tiny", ".", "", "a/../b", "tiny/..", "file:///etc/passwd", "a b/c"])
def test_a_visitor_can_name_no_path(workbench, name):
    with pytest.raises(ValueError, match="must be one of tiny, or owner/name on the Hub"):
        workbench.open(name)


def test_a_relative_folder_that_looks_like_a_name_on_the_hub_is_not_opened(workbench, checkpoint, monkeypatch):
    monkeypatch.chdir(checkpoint.parent.parent)
    with pytest.raises(ValueError, match="can't be had from the Hub"):
        workbench.open(f"{checkpoint.parent.name}/tiny")


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server = Hub(HUB_PORT).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_checkpoint_from_the_hub_opens_by_its_name_and_its_code_stays_there(
    hub, workbench, opened, monkeypatch, tmp_path
):
    opened.tokenizer.push_to_hub("someone/explored")
    tiny_model(0.3).push_to_hub("someone/explored")
    fetched = workbench.open("someone/explored")
    assert fetched is workbench.open(" someone/explored ")
    assert list(own(fetched)["num_loops"]) == [5, 5, 5]
    assert "modeling_recurrent_gpt2.py" in hub.files_of("someone/explored")
    assert not any(path.endswith(".py") for method, path in hub.requests if method == "GET")
    monkeypatch.setattr("evaluation.explore.workbench.MOST_BYTES", 1000)
    with pytest.raises(ValueError, match=r"the weights of someone/explored are 0.0 GB, more than this page opens"):
        Workbench(workbench.paths.values()).open("someone/explored")


def write_foreign(folder, marker):
    """A checkpoint of another kind, with code that leaves a mark where it is run."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "foreign", "auto_map": {
        "AutoConfig": "foreign.ForeignConfig", "AutoModelForCausalLM": "foreign.ForeignModel"}}))  # fmt: skip
    (folder / "foreign.py").write_text(
        f"open({str(marker)!r}, 'w').close()\nfrom transformers import PreTrainedConfig, PreTrainedModel\n"
        "class ForeignConfig(PreTrainedConfig):\n    model_type = 'foreign'\n"
        "class ForeignModel(PreTrainedModel):\n    config_class = ForeignConfig\n"
    )
    return str(folder)


def test_the_code_of_a_checkpoint_of_another_kind_runs_only_where_that_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    marker = tmp_path / "was run"
    folder = write_foreign(tmp_path / "foreign", marker)
    with pytest.raises(ValueError, match="started with --trust-remote-code"):
        Workbench([folder]).open("foreign")
    assert not marker.exists()
    with pytest.raises((ValueError, OSError)):  # its code runs, and then it has no weights
        Workbench([folder], trust_remote_code=True).open("foreign")
    assert marker.exists()


def test_a_tokenizer_that_brings_code_is_refused(checkpoint, tmp_path):
    folder = tmp_path / "clever"
    folder.mkdir()
    for path in checkpoint.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    marker = tmp_path / "was run"
    settings |= {"tokenizer_class": "Clever", "auto_map": {"AutoTokenizer": ["clever.Clever", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "clever.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        Workbench([str(folder)]).open("clever")
    assert not marker.exists()


def test_a_generation_config_that_asks_for_too_much_is_refused(checkpoint, tmp_path):
    folder = tmp_path / "greedy"
    folder.mkdir()
    for path in checkpoint.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    file = folder / "generation_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "num_loops": 5000}))
    with pytest.raises(ValueError, match="greedy takes 5000 loops, but 256 are the most here"):
        Workbench([str(folder)]).open("greedy")
    file.write_text(json.dumps({**settings, "exit_policy": {"name": "os.system"}}))
    with pytest.raises(ValueError, match=r"'os.system' is unknown"):
        Workbench([str(folder)]).open("greedy")


# Policies


def test_every_policy_can_be_made_from_its_fields(opened):
    assert policy_choices() == [OWN, *available_exit_policies(), AS_JSON]
    for name in available_exit_policies():
        values = {field.name: field.default for field in fields_of(name)}
        if name == "all":
            values["of"] = '["kl", {"name": "cosine", "threshold": 0.1}]'
        found = read_loops(opened, read_policy(name, values, ""), "")
        assert found["exit_policy"]["name"] == name
    kinds = {field.name: field.kind for field in fields_of("acceleration")}
    assert kinds == {"threshold": "number", "patience": "count", "min_loops": "count", "normalize": "choice"}
    assert next(f.choices for f in fields_of("acceleration") if f.name == "normalize") == ("none", "state", "step")
    assert fields_of("entropy")[-1].kind == "switch"


def test_a_policy_of_a_user_has_fields_too(opened):
    @register_exit_policy("mine")
    @dataclass(frozen=True)
    class Mine(ExitPolicy):
        share: float = 0.5
        loud: bool = False

        def measure(self, view):
            return view.state.norm(dim=-1) * self.share

    assert [(field.name, field.kind, field.default) for field in fields_of("mine")[-2:]] == [
        ("share", "number", 0.5),
        ("loud", "switch", False),
    ]
    policy = read_policy("mine", {"threshold": 2, "patience": 1.0, "min_loops": 1, "share": 0.25, "loud": True}, "")
    assert ExitPolicy.from_dict(policy) == Mine(2.0, share=0.25, loud=True)


@pytest.mark.parametrize(
    ("choice", "values", "as_json", "sentence"),
    [
        ("step_norm", {"threshold": -1}, "", "`threshold` of StepNormExit is -1"),
        ("kl", {"patience": 0}, "", "`patience` of KLExit is 0"),
        ("confidence", {"by": "guess"}, "", "`by` of ConfidenceExit is 'guess'"),
        ("all", {"of": "[1"}, "", "`of` is not JSON"),
        ("nothing", {}, "", "must be one of"),
        (AS_JSON, {}, "[" * 100_000, "is not JSON"),
        (AS_JSON, {}, '["kl", "kl"]', "lists 2 policies, but the model has 3 loop groups"),
        (AS_JSON, {}, '{"name": "__import__"}', "is unknown"),
    ],
)
def test_a_bad_setting_is_a_sentence(opened, choice, values, as_json, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_loops(opened, read_policy(choice, values, as_json), "")


def test_loops_are_one_number_or_one_per_group(opened):
    assert read_loops(opened, None, "")["num_loops"] == [3, 5, 4]
    assert read_loops(opened, None, " 7 ")["num_loops"] == [7, 7, 7]
    assert (
        read_loops(opened, None, "[2, 3, 4]")["num_loops"]
        == read_loops(opened, None, "2 3 4")["num_loops"]
        == [2, 3, 4]
    )
    for given, sentence in {
        "2 3": "2",
        "0": "from 1 to 256",
        "9999": "from 1 to 256",
        "many": "must be a number",
    }.items():
        with pytest.raises(ValueError, match=sentence):
            read_loops(opened, None, given)


# Text


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_streamed_tokens_and_loops_are_those_of_generate(opened, temperature):
    ids, loops = opened.encode(PROMPT), own(opened)
    sampling = Sampling(12, temperature, seed=3)
    lengths = []
    for text in stream(opened, ids, loops, sampling):
        lengths.append(len(text.ids))
        assert len(text.steps) == len(text.ids) - 1
    torch.manual_seed(3)
    output = opened.model.generate(
        ids[None], max_new_tokens=12, return_dict_in_generate=True, pad_token_id=0, **loops, **sampling.arguments()
    )
    assert text.ids == output.sequences[0].tolist()
    assert text.steps == output.loop_steps[0].tolist()
    assert lengths == list(range(7, len(text.ids) + 1))
    shown = text.shown(opened)
    assert shown[0].loops is None
    assert [token.loops for token in shown[1:]] == text.steps
    assert [token.is_prompt for token in shown] == [True] * 6 + [False] * (len(text.ids) - 6)


def test_a_prompt_alone_has_the_loops_of_one_pass(opened):
    (text,) = stream(opened, opened.encode(PROMPT), own(opened), Sampling(0))
    with torch.no_grad():
        steps = opened.model(opened.encode(PROMPT)[None], **own(opened)).loop_steps[0].tolist()
    assert (text.steps, text.new, text.ms_per_token) == (steps, [], None)


def test_a_stream_that_nobody_reads_on_is_stopped(opened):
    parts = stream(opened, opened.encode(PROMPT), own(opened), Sampling(40))
    text = next(parts)
    parts.close()
    assert len(text.ids) == 7


def test_text_ends_at_the_last_position(opened):
    limit = opened.model.config.max_position_embeddings
    *_, text = stream(opened, opened.encode("ab" * (limit // 2)), own(opened), Sampling(10))
    assert len(text.ids) == limit + 1
    with pytest.raises(ValueError, match=f"the text has {limit + 2} tokens, but tiny has positions for {limit}"):
        opened.encode("ab" * (limit // 2 + 1))
    with pytest.raises(ValueError, match="there is no text"):
        opened.encode(" \n ")


# The page


def generated(page, **sampling):
    given = {"new_tokens": 8, **sampling}
    return list(page.generate("tiny", PROMPT, own, None, given))


def test_the_same_prompt_at_fixed_depth_stands_beside_and_is_compared(page, opened):
    *_, (policy, numbers, text, fixed, fixed_numbers, other) = generated(page)
    assert (text.loops["exit_policy"], other.loops["exit_policy"]) == (opened.model.generation_config.exit_policy, None)
    assert other.steps[0] == [5, 5, 5]
    assert "loops in the mean" in numbers
    assert "ms/token" in fixed_numbers
    place = parting(text, other)
    assert place is not None
    assert f"parts at new token {place - 6 + 1}:" in numbers
    assert policy.count("lv-parts") == fixed.count("lv-parts") == 1
    *_, same = page.generate("tiny", PROMPT, lambda opened: read_loops(opened, None, "4"), 4, {"new_tokens": 8})
    assert "the same text as beside it" in same[1]


def test_what_is_wrong_is_a_sentence_on_the_page(page):
    def bad(opened):
        return read_loops(opened, read_policy("kl", {"threshold": -1}, ""), "")

    for shown in (
        [parts[0] for parts in page.generate("tiny", PROMPT, bad, None, {"new_tokens": 2})],
        [parts[0] for parts in page.generate("tiny", PROMPT, own, None, {"new_tokens": 2, "temperature": -1})],
        [parts[0] for parts in page.generate("tiny", PROMPT, own, 2.5, {"new_tokens": 2})],
        [parts[0] for parts in page.generate("/etc", PROMPT, own, None, {"new_tokens": 2})],
        [page.answer("tiny", "x0 = 1")],
        [page.look(None, 3, "leave")],
        list(page.compare("tiny", "a")),
    ):
        assert len(shown) == 1
        assert shown[0].startswith('<div class="lv lv-problem" role="alert">')


def test_a_click_shows_the_loops_that_predicted_the_token(page, opened):
    *_, (_, _, text, *_) = generated(page)
    view = page.look(text, 9, "leave")
    steps = ", ".join(f"{count} in {name}" for count, name in zip(text.steps[8], opened.group_names, strict=True))
    assert steps in view
    assert view.count("<svg") == 1 + 3
    assert view.count('class="lv-heat"') == 3
    assert page.look(text, 8, "leave") != view
    assert page.look(text, 9, "head") != view


def test_policies_stand_beside_fixed_depth_and_the_own_one_is_marked(page):
    *_, compared = page.compare("tiny", "abcdefghijkl" * 3)
    assert compared.count("★") == 1
    for rule in ("fixed", "step_norm/state", "kl", "argmax"):
        assert f"<td>{rule}</td>" in compared
    assert "It was not calibrated with a guarantee" in compared


def test_tasks_are_answered_by_a_checkpoint_that_knows_them():
    page = Page(Workbench([str(ROOT / "checkpoints/recurrent-gpt2-chains")]))
    answers = page.answer("recurrent-gpt2-chains", "a c @0 @1 @2")
    assert "5 of 5 right" in answers
    assert "must be a letter from a to h" in page.answer("recurrent-gpt2-chains", "a <b>")


def test_the_example_of_the_document_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/explore.md").read_text(), re.MULTILINE | re.DOTALL)
    exec(code, {})
    printed = capsys.readouterr().out
    assert "probability" in printed
    assert " 1 " in printed  # 3 + 5 modulo 7
