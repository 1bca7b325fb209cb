"""What every task promises, and what each parser says of bad input."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from training.tasks import Chains, Depo, Programs, TaskSource, extended_tokenizer, ids_of_tokens, task_tokenizer
from training.tasks.task import NO_ANSWER

TASKS = [Chains(), Depo(), Programs()]
EACH_TASK = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


def sampled(task, n=64, depth=None, seed=0):
    return task.sample(n, depth or task.depth, np.random.default_rng(seed))


@EACH_TASK
def test_sequences_are_a_function_of_the_seed(task):
    first, again, other = sampled(task), sampled(task), sampled(task, seed=1)
    for name in ("ids", "answers", "depths"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
        assert getattr(first, name).shape == (64, task.length)
    assert not np.array_equal(first.ids, other.ids)


@EACH_TASK
def test_a_person_can_read_a_sequence_and_type_it(task):
    """The parser solves what the sampler made on its own, and finds the same answers and depths."""
    batch = sampled(task)
    for row in range(len(batch.ids)):
        parsed = task.parse(task.text(batch.ids[row]).rstrip())
        length = parsed.ids.shape[1]
        for name in ("ids", "answers", "depths"):
            assert np.array_equal(getattr(parsed, name)[0], getattr(batch, name)[row, :length]), name


@EACH_TASK
def test_a_curriculum_keeps_sequences_shallow(task):
    for depth in (1, 3, task.depth):
        assert sampled(task, 512, depth).depths.max() == depth
    deeper = task.deeper(task.depth + 4)
    assert sampled(deeper, 512, deeper.depth).depths.max() == task.depth + 4
    assert (deeper.tokens, deeper.length) == (task.tokens, task.length)


@EACH_TASK
def test_a_tokenizer_of_the_task_is_an_ordinary_one(task, tmp_path):
    task_tokenizer([task]).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = sampled(task).ids[0]
    text = task.text(ids)
    assert tokenizer(text)["input_ids"] == ids_of_tokens(tokenizer, task)[ids].tolist()
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id is not None


@EACH_TASK
def test_a_tokenizer_of_text_learns_to_read_the_task(task, tokenizer):
    import copy

    text_tokenizer = copy.deepcopy(tokenizer)
    before = text_tokenizer("abc")["input_ids"]
    extended = extended_tokenizer(text_tokenizer, [task])
    ids = sampled(task).ids[0]
    assert extended(task.text(ids))["input_ids"] == ids_of_tokens(extended, task)[ids].tolist()
    assert extended("abc")["input_ids"] == before
    with pytest.raises(ValueError, match=f"no entry for .* token of task {task.name}"):
        ids_of_tokens(tokenizer, task)


def test_blanks_and_line_ends_may_be_set_as_one_likes():
    tokenizer = task_tokenizer([Programs()])
    canonical = "x0 = 3\nx1 = x0 + x0\nx2 = x1 - x0\n? x2"
    for typed in ("x0=3;x1=x0+x0;x2=x1-x0 ?x2", " x0  =\t3 ;\n x1 = x0 +x0\n\n\nx2=x1 - x0\n?  x2"):
        assert tokenizer.decode(tokenizer(typed.strip())["input_ids"]) == canonical
    chains = task_tokenizer([Chains()])
    assert chains("a b   @0\n@2")["input_ids"][:3] == chains(" a b @0")["input_ids"]


def test_chains_have_no_shortcut():
    """The most frequent letter, or the last one, says little about where a deep chain ends."""
    batch = sampled(Chains(), 2000)
    is_letter = batch.ids < 8
    counts = np.stack([(np.where(is_letter, batch.ids, -1) == letter).cumsum(1) for letter in range(8)], -1)
    commonest = counts.argmax(-1)
    place = np.maximum.accumulate(np.where(is_letter, np.arange(48), 0), axis=1)
    newest = np.take_along_axis(batch.ids, place, 1)
    deep = batch.depths >= 2
    for guess in (commonest, newest):
        assert (guess == batch.answers)[deep].mean() < 0.45  # four chains: a quarter, and what chance adds
    asked = batch.answers[batch.asked]
    assert np.bincount(asked).max() / asked.size < 0.14


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 10), st.integers(3, 12))
def test_values_of_programs_are_what_python_computes(seed, modulus, lines):
    task = Programs(lines=lines, modulus=modulus, depth=min(3, lines - 1), queries=3)
    batch = task.sample(4, task.depth, np.random.default_rng(seed))
    for ids, answers in zip(batch.ids, batch.answers, strict=True):
        program, _, questions = task.text(ids).partition("?")
        names = {}
        exec(program.strip(), {}, names)
        at_lines = [value % modulus for value in names.values()]
        asked = [names[name] % modulus for name in questions.split()[::2]]
        assert answers[answers != NO_ANSWER].tolist() == at_lines + asked
        assert [int(value) for value in questions.split()[1::2]] == asked


def test_programs_are_of_all_kinds_that_somebody_may_type():
    task = Programs()
    batch = sampled(task, 3000)
    texts = {line for ids in batch.ids for line in task.text(ids).splitlines()}
    assert {"x0 = 3", "x1 = x0 + x0", "x2 = x1 + x0", "x2 = 5", "x5 = x4 + x4", "x3 = x2 - x2"} <= texts
    lines = [task.text(ids).partition("?")[0].count("\n") for ids in batch.ids]
    assert set(lines) == set(range(1, 17))
    assert 0.7 < np.mean(np.array(lines) == 16) < 0.8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x0 = 3\nx1 = x2 + x0\nx2 = 1", "line 1 refers to x2, which is not defined before it"),
        ("x0 = 3\nx1 = x1 + x0", "line 1 refers to x1"),
        ("x0 = 8", "line 0 has the digit 8, but arithmetic is modulo 7"),
        ("x0 = 3\nx2 = 1", "line 1 defines x2, but must define x1"),
        ("x0 = 3 * 2", "line 0 is 'x0 = 3 \\* 2', but must read like `x0 = 3`"),
        ("\n".join(f"x{i} = 1" for i in range(17)), "has 17 lines, but must have from 1 to 16"),
        ("", "has 0 lines"),
        ("x0 = 3 ? x5", "question is for 'x5', but must be for one of x0 to x0"),
        ("x0 = 3 ? x0 4", "x0 is 3, but the text says 4"),
    ],
)
def test_a_bad_program_is_named_in_a_sentence(text, message):
    with pytest.raises(ValueError, match=message):
        Programs().parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a b @2", "slot 2 points to slot 2, which does not come before it"),
        ("a z", "slot 1 is 'z', but must be a letter from a to h"),
        ("a " * 49, "49 slots, but must have from 1 to 48"),
        ("", "0 slots"),
    ],
)
def test_a_bad_chain_is_named_in_a_sentence(text, message):
    with pytest.raises(ValueError, match=message):
        Chains().parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("w0 w1 w1 w0", "the ring has 4 words, but must tell for each of w0 to w2 once which one follows it"),
        ("w0 w2 w2 w1 w1 w3 ? w0 >1", "there is 'w3', where one of w0 to w2 must be"),
        ("w0 w2 w2 w1 w1 w0 ? w0 >3", "there is '>3', where one of >1 to >2 must be"),
        ("w0 w2 w2 w1 w1 w0 ? w0", "a question is 'w0', but must read like"),
        ("w0 w2 w2 w1 w1 w0 ? w0 >2 w2", "the answer to `\\? w0 >2 w2` is w1"),
        ("w0 w2 w2 w1 w1 w0 ? w0 >1 ? w0 >1 ? w0 >1", "there are 3 questions, but must be at most 2"),
    ],
)
def test_a_bad_ring_is_named_in_a_sentence(text, message):
    with pytest.raises(ValueError, match=message):
        Depo(words=3, depth=2, queries=2).parse(text)


def test_programs_are_no_deeper_than_asked_for_however_much_late_lines_are_liked():
    assert sampled(Programs(recent=30.0), depth=3).depths.max() <= 4  # of a question: one more than its line


def test_a_ring_is_followed_word_by_word():
    batch = Depo(words=3, depth=2, queries=2).parse("w0 w2 w2 w1 w1 w0 ? w0 >2 ? w1 >1")
    assert batch.answers[batch.asked].tolist() == [2, 1, 0, 0]  # what follows the start, and what was asked for
    assert batch.depths[batch.asked].tolist() == [1, 2, 1, 1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"task": "chain"}, "`task` is 'chain', but must be one of chains, depo, programs"),
        (
            {"task": "chains", "text_column": "text"},
            "`text_column` is a setting of text, but the source is task chains",
        ),
        ({"task": "chains", "slot": 8}, "no setting 'slot'. Did you mean 'slots'"),
        ({"task": "chains", "slots": 12}, "`depth` of task chains is 12, but 12 slots hold chains of at most 11 hops"),
        ({"task": "chains", "depth": 0}, "`depth` of task chains is 0, but must be an int of at least 1"),
        ({"task": "chains", "values": 99}, "`values` of task chains is 99"),
        ({"task": "chains", "fresh": 1.5}, "`fresh` of task chains is 1.5"),
        ({"task": "chains", "weight": 0}, "`weight` of task chains is 0"),
        ({"task": "depo", "words": 8}, "`depth` of task depo is 8, but a ring of 8 words has at most 7 places"),
        ({"task": "programs", "depth": 16}, "`depth` of task programs is 16, but 16 lines"),
        ({"task": "programs", "modulus": 11}, "`modulus` of task programs is 11"),
        ({"task": "programs", "queries": 0}, "`queries` of task programs is 0, but must be an int of at least 1"),
        ({"task": "programs", "shortest": 17}, "`shortest` of task programs is 17, more than `lines`, 16"),
    ],
)
def test_bad_settings_are_named_in_a_sentence(given, message):
    with pytest.raises(ValueError, match=message):
        TaskSource.parse(given)
