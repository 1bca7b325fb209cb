"""Tasks of reasoning-gym as sources: what is asked, what is answered, and what is refused."""

import re

import numpy as np
import pytest

from tests.training.runs import tiny_run
from training.tasks import TaskSource, ids_of_tokens, task_tokenizer
from training.tasks.reasoning_gym import DIALS

pytestmark = pytest.mark.slow  # needs the extra `tasks`
SUMS = {"task": "reasoning_gym:chain_sum", "settings": {"min_digits": 1, "max_digits": 1}}


def test_answers_are_what_python_computes_and_depths_the_number_of_terms():
    task = TaskSource.parse(SUMS).task
    batch = task.sample(20, 5, np.random.default_rng(0))
    for ids, answers, depths in zip(batch.ids, batch.answers, batch.depths, strict=True):
        lines = task.text(ids).strip().split("\n")
        said = "".join(task.tokens[place] for place in answers[answers >= 0])
        assert said == "".join(f"{answer}\n" for answer in lines[1::2])
        for question, answer in zip(lines[::2], lines[1::2], strict=True):
            assert str(eval(question.removesuffix("="))) == answer
        terms = [len(question.split()) // 2 for question in lines[::2]]
        counts = [len(answer) + 1 for answer in lines[1::2]]
        assert depths[answers >= 0].tolist() == np.repeat(terms, counts).tolist()
        assert max(terms) <= 5


def test_sequences_are_a_function_of_the_seed_and_read_as_they_are_written():
    task = TaskSource.parse(SUMS).task
    one, same, other = (task.sample(3, 4, np.random.default_rng(seed)).ids for seed in (1, 1, 2))
    assert (one == same).all()
    assert (one != other).any()
    tokenizer = task_tokenizer([task])
    assert tokenizer(task.text(one[0])).input_ids == ids_of_tokens(tokenizer, task)[one[0]].tolist()
    assert task.parse("1 + 6 =\n7").answers[0, 7:10].tolist() == [task.tokens.index("7"), 0, -100]


@pytest.mark.parametrize("name", sorted(DIALS))
def test_every_dial_that_is_known_is_read(name):
    task = TaskSource.parse({"task": f"reasoning_gym:{name}", "characters": 1200, "depth": 4}).task
    batch = task.sample(2, 4, np.random.default_rng(0))
    assert batch.asked.any()
    assert set(np.unique(batch.depths[batch.asked])) <= set(range(1, 5))


def test_a_run_learns_from_them(tmp_path):
    import training.train

    arguments = tiny_run(tmp_path, sources=f"[{SUMS}]", most_loops=6, max_steps=2, save_strategy="no",
                         max_position_embeddings=128)  # fmt: skip
    assert training.train.main(arguments).state.global_step == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"task": "reasoning_gym:sums"}, "`dataset` is 'sums', but must be one of ab,"),
        ({"task": "reasoning_gym:gcd"}, "`reads` and `sets` of task reasoning_gym:gcd are None and None"),
        ({**SUMS, "settings": {"digits": 1}}, "refuses `settings` {'digits': 1} of chain_sum"),
        ({**SUMS, "characters": 8}, "no question of reasoning_gym:chain_sum in 8 fits: `characters` is 8"),
        ({**SUMS, "reads": "terms", "sets": "max_terms"}, "`reads` of task reasoning_gym:chain_sum is 'terms'"),
    ],
)
def test_bad_settings_are_a_sentence(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TaskSource.parse(given).task.sample(1, 6, np.random.default_rng(0))
