"""Every exit rule on one text: quality against steps, beside fixed depth and the checkpoint's own setting."""

from collections.abc import Iterator
from typing import Any

import torch

from ..common import loops_of_generate, mean_depth
from ..exit_search import Rule, Workload, find_rules, fixed_ladder, rule_ladders, run
from ..exit_tradeoff import cap_of
from ..pictures import Point
from .workbench import Opened, describe_briefly

LEVELS = 4  # thresholds of a rule, from cheap to dear


def compare_policies(opened: Opened, ids: torch.Tensor, rules: list[Rule] | None = None) -> Iterator[list[Point]]:
    """The points so far, again after every rule, whose thresholds take it from few loops to many on this text."""
    if len(ids) < 3:
        raise ValueError(f"the text has {len(ids)} tokens, but it takes at least 3 to compare policies.")
    model, workload = opened.model, Workload.of_text(ids[None])
    cap = tuple(model.config.loops_per_group(cap_of(model)))

    def point(rule: str, policy: Any, num_loops: Any, is_own: bool = False) -> Point:
        losses, steps = run(model, workload, num_loops, lambda rows: policy, rule)
        depth = mean_depth(steps, model.config).mean().item()
        return Point(rule, describe_briefly(policy, num_loops), depth, losses.mean().item(), is_own)

    points = [point("fixed", None, list(setting.num_loops)) for setting in fixed_ladder(cap).uniform()]
    own = loops_of_generate(model)
    name = "fixed" if own["exit_policy"] is None else "own"
    points.append(point(name, own["exit_policy"], own["num_loops"], is_own=True))
    yield points
    for rule in find_rules(and_registered=True) if rules is None else rules:
        rungs = rule_ladders(model, workload, rule, cap)[0].uniform()
        spread = sorted({round((place + 1) * len(rungs) / (LEVELS + 1)) for place in range(LEVELS)})
        for setting in [rungs[min(place, len(rungs) - 1)] for place in spread]:
            points.append(point(rule.label, setting.exit_policy, list(cap)))
        yield points
