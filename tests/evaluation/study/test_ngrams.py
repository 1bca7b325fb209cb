import math
from itertools import pairwise

import numpy as np
import pytest

from evaluation.study import ngrams
from tests.training.runs import tiny_run


def test_probabilities_are_those_of_the_formula_and_sum_to_one():
    ids = np.random.default_rng(0).integers(0, 6, 40)
    counts = ngrams.NgramCounts([ids[:25], ids[25:]], 7)
    pairs = [*pairwise(ids[:25]), *pairwise(ids[25:])]

    def unigram(token):
        return (list(ids).count(token) + 1) / (40 + 7)

    def bigram(before, after):
        seen = [b for a, b in pairs if a == before]
        if not seen:
            return unigram(after)
        return (seen.count(after) + len(set(seen)) * unigram(after)) / (len(seen) + len(set(seen)))

    for before in range(7):
        losses = [counts.bigram_losses(np.array([before, after]))[0] for after in range(7)]
        assert losses == pytest.approx([-math.log(bigram(before, after)) for after in range(7)])
        assert sum(math.exp(-loss) for loss in losses) == pytest.approx(1)
    assert counts.unigram_losses(np.array([0, 3, 6])) == pytest.approx([-math.log(unigram(t)) for t in (3, 6)])


def test_bigrams_of_a_run_beat_its_unigrams(trained, tmp_path):
    recipe, *fields = tiny_run(trained, max_steps=9)
    losses = ngrams.main([recipe, *fields, "--result", str(tmp_path / "ngrams.json")])
    for part in losses.values():
        assert 0 < part["bigram"] < part["unigram"] < math.log(300)
    assert losses["as_much_text"]["tokens"] == 9 * 4 * 32 < losses["all_text"]["tokens"]
    assert losses["all_text"]["bigram"] < losses["as_much_text"]["bigram"]
    assert (tmp_path / "ngrams.json").exists()


def test_a_run_that_is_not_there_is_named(tmp_path):
    recipe, *fields = tiny_run(tmp_path)
    with pytest.raises(FileNotFoundError, match="train the run first"):
        ngrams.main([recipe, *fields])
