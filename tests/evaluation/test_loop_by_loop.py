import pytest
import torch

from evaluation.common import load_checkpoint, loops_of_generate
from evaluation.depth import task_of
from evaluation.loop_by_loop import answer_lines
from tests.helpers import ROOT

PROGRAM = "x0 = 3\nx1 = 5\nx2 = x0 + x1\nx3 = x2 + x1\nx4 = x3 + x3\nx5 = x4 + x3\nx6 = x5 + x4\n? x6 x2"


@pytest.fixture(scope="module")
def programs():
    return load_checkpoint(ROOT / "checkpoints/recurrent-gpt2-programs")


@pytest.fixture(scope="module")
def lines(programs):
    model, tokenizer = programs
    return answer_lines(model, tokenizer, task_of(model), PROGRAM, **loops_of_generate(model))


def test_every_line_has_its_answer_and_the_loops_that_it_needs_and_took(lines):
    assert [line.text for line in lines[-3:]] == ["x6 = x5 + x4", "? x6", "x2"]
    assert [line.answer for line in lines] == ["3", "5", "1", "6", "5", "4", "2", "2", "1"]
    assert [line.needs for line in lines] == [0, 0, 1, 2, 3, 4, 5, 6, 2]
    assert all(line.is_right for line in lines)
    assert len({len(line.said) for line in lines}) == 1
    assert max(line.took for line in lines) == len(lines[0].said)


def test_deeper_values_are_known_later(lines):
    known = [line.known_after for line in lines[:7]]
    assert known == sorted(known)
    assert known[-1] > 2
    assert all(line.known_after <= line.took for line in lines)


def test_what_is_said_after_some_loops_is_what_the_model_says_with_so_many(programs, lines):
    model, tokenizer = programs
    ids = tokenizer(PROGRAM.split("?")[0], return_tensors="pt").input_ids
    with torch.no_grad():
        said = model(ids, num_loops=3).logits[0, 2::3].argmax(-1)
    assert [tokenizer.decode(token).strip() for token in said] == [line.said[2] for line in lines[:7]]


def test_a_program_that_is_none_is_refused_in_a_sentence(programs):
    model, tokenizer = programs
    for text, sentence in {
        "": "0 lines",
        "x0 = 9": "digit 9",
        "x0 = x1 + x1": "not defined",
        "rm -rf": "must read like",
    }.items():
        with pytest.raises(ValueError, match=sentence):
            answer_lines(model, tokenizer, task_of(model), text, **loops_of_generate(model))
