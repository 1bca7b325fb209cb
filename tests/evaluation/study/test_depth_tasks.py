import copy
import json

import pytest

from evaluation.study import depth_tasks

ROW = {"threshold": 0.1, "mean_steps": 3.0, "accuracy": 0.99, "fixed_accuracy": 0.7, "ahead": 0.29, "low": 0.28,
       "high": 0.3, "null_accuracy": 0.6, "rank_correlation": 0.9, "steps_by_depth": [1.0],
       "unfrozen": {"mean_steps": 2.9, "accuracy": 0.995}}  # fmt: skip
CHOSEN = {"threshold": 0.1, "mean_steps": 3.0, "accuracy": 0.99}
RESULT = {
    "task": {"task": "chains", "depth": 3}, "sequences": 8, "cap": 2, "mean_required": 1.5,
    "fixed": [{"num_loops": [k], "mean_steps": k, "accuracy": 0.5 * k, "accuracy_by_depth": [1.0]} for k in (1, 2)],
    "rules": {"kl": [{**ROW, "threshold": 0.2}, ROW], "confidence": [ROW, ROW]},
    "position_only": [{"quantile": 0.5, "mean_steps": 4.0, "accuracy": 0.9}],
    "ideal": [{"margin": 0, "mean_steps": 2.0, "accuracy": 0.4}],
    "reach": {"0.95": {"fixed": CHOSEN, "kl": CHOSEN, "confidence": None}},
    "no_loss": {"num_loops": [2], "accuracy": 1.0, "kl": CHOSEN, "confidence": None},
    "policy": None, "contraction": [],
    "deeper": {"depth": 5, "fixed": [{"num_loops": 2, "mean_steps": 2.0, "accuracy_beyond": 0.2,
                                      "accuracy_by_depth": [1.0]}],
               "rules": {"kl": {"threshold": 0.1, "mean_steps": 5.0, "accuracy_beyond": 0.9}}},
}  # fmt: skip


@pytest.fixture
def study():
    other = copy.deepcopy(RESULT)
    other["no_loss"]["kl"] = {"threshold": 0.2, "mean_steps": 3.5, "accuracy": 0.98}
    other["reach"]["0.95"]["kl"] = None
    return depth_tasks.summary([RESULT, other])


def test_a_summary_leaves_out_what_is_by_depth_but_for_fixed_loops(study):
    assert "by_depth" not in json.dumps([{**seed, "fixed": []} for seed in study["seeds"]])
    assert len(study["seeds"]) == 2
    with pytest.raises(ValueError, match="different tasks"):
        depth_tasks.summary([RESULT, {**RESULT, "cap": 9}])


def test_tables_have_the_numbers_of_every_seed(study):
    assert depth_tasks.fixed_table(study).rows == [[f"seed {k}", "0.5000", "1.0000"] for k in (0, 1)]
    of_depths = ([None, 1.0, 0.25], [None, 1.0, 0.75])
    first = [{**row, "accuracy_by_depth": of} for row, of in zip(study["seeds"][0]["fixed"], of_depths, strict=True)]
    beyond = {**first[1], "num_loops": [9]}
    staircase = depth_tasks.staircase_table({"seeds": [{"fixed": [*first, beyond]}, study["seeds"][1]]})
    assert staircase.header == ["fixed loops", "1", "2"]
    assert staircase.rows == [["1", "1.000", "0.250"], ["2", "1.000", "0.750"]]
    (row,) = depth_tasks.rules_table(study).rows  # confidence loses at every threshold
    assert row[:4] == ["kl", "0.1, 0.2", "3.00, 3.50", "0.9900, 0.9800"]
    assert row[4] == "+0.290 [+0.280, +0.300]; +0.290 [+0.280, +0.300]"
    assert depth_tasks.reach_table(study).rows == [["95 %", "3.00", "3.00 (1 of 2)", "-"]]
    assert depth_tasks.frozen_table(study).rows[0] == ["kl", "0.1", "3.00", "0.990", "2.90", "0.995"]
    assert depth_tasks.ideal_table(study).rows[0] == ["needed + 0", "2.00", "0.4000"]
    assert depth_tasks.deeper_table(study).rows == [["2 fixed loops", "2.0", "0.2000"], ["kl", "5.0", "0.9000"]]


def test_the_table_of_exits_has_means_over_seeds_and_only_rules_that_lose_nothing_in_any(study):
    rows = depth_tasks.exits_table({"chains": study}, ("kl", "confidence")).rows
    assert rows == [["chains", "2 fixed loops", "2", "1.0000", ""], ["", "kl", "3.00", "0.9900", "0.700"]]
