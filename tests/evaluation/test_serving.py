"""What engines are measured with, and the table of it. vLLM itself is measured by `make bench-serve`."""

import pytest
from transformers import AutoConfig, AutoTokenizer

from evaluation.serving import ENGINES, Work, make_work, measure, save_gpt2s, throughput_rows
from evaluation.study.documents import ROOT

MINI = str(ROOT / "checkpoints/recurrent-gpt2-mini")


def test_a_checkpoint_gets_texts_and_whole_programs_of_one_length():
    text, programs = make_work(MINI, 4, None)
    assert (text.name, programs.name) == ("text", "programs")
    for work in (text, programs):
        assert len(work.prompts) == 4
        assert len({len(prompt) for prompt in work.prompts}) == 1
        assert len(set(map(tuple, work.prompts))) == 4
    written = AutoTokenizer.from_pretrained(MINI).batch_decode(programs.prompts)
    assert all(program.startswith("x0 = ") and "\n? x" in program for program in written)
    assert programs.counted == len(programs.prompts[0]) + programs.new_tokens


def test_work_that_a_checkpoint_was_not_trained_on_is_refused():
    with pytest.raises(SystemExit, match="'chains', but for this checkpoint may have: text, programs"):
        make_work(MINI, 2, ["chains"])


def test_rates_and_mean_steps_are_those_of_their_own_work():
    work = [Work("short", [[1, 2], [3, 4]], 2, 2), Work("long", [[1] * 9, [2] * 9], 1, 10)]
    exits, whole = (
        measure(name, MINI, work, requests=[1, 2], repeats=2) for name in ("generate, exits", "generate, all loops")
    )
    for result, w in zip(whole, work, strict=True):
        assert result["work"] == w.name
        for number, rate in result["tokens_per_second"].items():
            first, second = result["seconds"][number]
            assert rate == pytest.approx(number * w.counted * 2 / (first + second))
    (cap,) = {mean for result in whole for mean in result["mean_steps"]}
    assert all(1 <= mean < cap for result in exits for mean in result["mean_steps"])


def test_the_gpt2s_have_the_layers_that_are_applied_and_those_that_there_are(tmp_path):
    save_gpt2s(MINI, tmp_path)
    config = AutoConfig.from_pretrained(MINI)
    applied, own = (AutoConfig.from_pretrained(tmp_path / f"gpt2-{kind}") for kind in ("applied", "weights"))
    assert own.n_layer == config.num_hidden_layers < applied.n_layer
    assert own.n_embd == applied.n_embd == config.hidden_size


def test_the_table_has_a_row_an_engine_and_a_column_a_number_of_requests():
    results = [
        {"engine": engine, "work": work, "tokens_per_second": {"1": 10.0, "8": 2000.0}, "mean_steps": steps}
        for engine, steps in (("a", [2.25]), ("b", None))
        for work in ("text", "programs")
    ]
    header, rows = throughput_rows({"requests": [1, 8], "repeats": 7, "machine": "it", "results": results})
    assert header[0] == "tokens/s (it, rounds: 7)"
    assert header[1:] == ["text, 1", "text, 8", "mean steps", "programs, 1", "programs, 8", "mean steps"]
    assert rows == [["a", *["10", "2,000", "2.2"] * 2], ["b", *["10", "2,000", "-"] * 2]]


def test_the_page_has_the_engines_that_are_measured():
    assert len({kind for kind, _ in ENGINES.values()}) == 4
    page = (ROOT / "docs/serving.md").read_text()
    assert all(f"| {engine} |" in page for engine in ENGINES)
