"""Which exit setting to use on a checkpoint, what it costs and what it saves: the first section of a report.

The setting is, in this order: what `evaluation.calibrate` promised; what `evaluation.mixture` chose on other text and
sequences; the cheapest of the sweep that costs next to nothing on the text of the report, which may be a fixed depth.
What it costs against full depth is measured, on that text and on new sequences of the checkpoint's tasks.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from recurrent_gpt2 import RecurrentGPT2ForCausalLM
from recurrent_gpt2.exit_policies import exit_policy_to_json, resolve_exit_policy
from training.promise import guarantee_of

from .common import loops_of_generate, name_of_loops
from .depth import RULES, tasks_of
from .exit_search import Workload, score
from .exit_tradeoff import Result, Setting, measure_times, recommended
from .mixture import best_of

TASK_SEED = 75  # of new sequences of a task
TASK_SEQUENCES = 64


def choose(checkpoint: str, results: list[Result], cap: int) -> dict[str, Any]:
    """`exit_policy`, `num_loops`, the number of loops that counts as `full`, and `chosen_by` whom."""
    folder = Path(checkpoint)
    if guarantee_of(folder) is not None:
        promised = json.loads((folder / "calibration.json").read_text())
        loops = {name: promised[name] for name in ("exit_policy", "num_loops")}
        return {**loops, "full": promised["full_loops"], "chosen_by": "calibrate"}
    if (folder / "mixture.json").exists():
        found = json.loads((folder / "mixture.json").read_text())
        if best := best_of(found):
            rule, threshold = best
            policy = exit_policy_to_json(RULES[rule][0](threshold))
            return {"exit_policy": policy, "num_loops": found["cap"], "full": found["full"], "chosen_by": "mixture"}
    cheapest = min(recommended(results).values(), key=lambda result: result.flops_per_token).setting
    loops = {"exit_policy": cheapest.exit_policy, "num_loops": cheapest.num_loops}
    return {**loops, "full": cap, "chosen_by": "sweep"}


def advise(
    checkpoint: str,
    model: RecurrentGPT2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    blocks: torch.Tensor,
    results: list[Result],
    cap: int,
) -> dict[str, Any]:
    """The setting, and its scores beside those of full depth: JSON-able."""
    chosen = choose(checkpoint, results, cap)
    loops, full = (model.config.loops_per_group(chosen[name]) for name in ("num_loops", "full"))
    policy = chosen["exit_policy"]
    settings = {
        "with_it": Setting("advised", None if policy is None else json.dumps(policy), tuple(loops)),
        "full": Setting("fixed", None, tuple(full)),
    }
    fewest = recommended(results).get("fixed")
    if fewest is not None and policy is not None:
        settings["fewest"] = fewest.setting
    workloads = {"text": Workload.of_text(blocks)}
    workloads |= {task.name: Workload.of_task(task, tokenizer, TASK_SEQUENCES, TASK_SEED) for task in tasks_of(model)}
    measured = {}
    for name, workload in workloads.items():
        scores = {kind: score(model, workload, setting) for kind, setting in settings.items()}
        measured[name] = {"measure": "accuracy" if workload.by_accuracy else "nats"} | {
            kind: {
                "loss": float(np.mean(found.losses)), "steps": found.steps, "flops": found.flops,
                "mean_steps": float(np.average(found.steps, weights=[len(g) for g in model.config.loop_groups])),
            }
            for kind, found in scores.items()
        }  # fmt: skip
    own = loops_of_generate(model)
    policies = (resolve_exit_policy(given, len(loops)) for given in (own["exit_policy"], policy))
    is_own = own["num_loops"] == loops and len({str(given) for given in policies}) == 1
    return {
        "exit_policy": policy,
        "num_loops": chosen["num_loops"],
        "name": name_of_loops(policy, loops),
        "full": full,
        "chosen_by": chosen["chosen_by"],
        "promise": guarantee_of(Path(checkpoint)) if chosen["chosen_by"] == "calibrate" else None,
        "is_default": is_own,
        "default": name_of_loops(**own),
        "fewest_fixed_loops": settings["fewest"].num_loops if "fewest" in settings else None,
        "measured": measured,
    }


def time_advice(
    model: RecurrentGPT2ForCausalLM, prompts: torch.Tensor, advice: dict[str, Any], file: Path, rounds: int
) -> None:
    """Adds milliseconds a token, one sequence at a time, in interleaved rounds."""
    policy = advice["exit_policy"]
    settings = {
        "with_it": Setting("advised", None if policy is None else json.dumps(policy), advice["num_loops"]),
        "full": Setting("fixed", None, tuple(advice["full"])),
    }
    timed = {kind: Result(setting, 0, 0, [], [], 0, [], []) for kind, setting in settings.items()}
    measure_times(model, prompts, list(timed.values()), file, (1,), rounds=rounds)
    advice["ms_per_token"] = {kind: result.ms_per_token["1"] for kind, result in timed.items()}


CHOSEN_BY = {
    "calibrate": "`evaluation.calibrate` chose it on one part of its text and tested it on another.",
    "mixture": "`evaluation.mixture` chose it on other text and sequences: the furthest ahead of fixed depth of those "
    "that lose nothing. Nothing is promised; `evaluation.calibrate` would.",
    "sweep": "It is the cheapest, in FLOPs, of those within 0.01 nats of the best fixed depth on the text of this "
    "report, on which it was chosen. Nothing is promised; `evaluation.calibrate` would.",
}


def advice_text(advice: dict[str, Any], text: str) -> str:
    """In words; `text` is the name of the text that it was measured on."""
    measured, full = advice["measured"]["text"], _loops(advice["full"])
    cost = measured["with_it"]["loss"] - measured["full"]["loss"]
    sentences = [f"**Use {advice['name']}.**", f"It costs {cost:+.4f} nats on {text} against {full} fixed loops,"]
    saved = {"of the FLOPs of a token": [measured[kind]["flops"] for kind in ("with_it", "full")]}
    if "ms_per_token" in advice:
        saved["of the time"] = [advice["ms_per_token"][kind] for kind in ("with_it", "full")]
    saved = {"of the loop steps": [measured[kind]["mean_steps"] for kind in ("with_it", "full")], **saved}
    shares = [f"{1 - with_it / without:.0%} {of_what}" for of_what, (with_it, without) in saved.items()]
    sentences.append(f"and saves {', '.join(shares)}.")
    if advice["promise"]:
        sentences.append(f"Promised: {advice['promise']}")
    sentences.append(CHOSEN_BY[advice["chosen_by"]])
    if advice["fewest_fixed_loops"] is not None:
        tasks = [f"; on {name} they are right {1 - found['fewest']['loss']:.1%} of the time"
                 for name, found in advice["measured"].items() if found["measure"] == "accuracy"]  # fmt: skip
        fewest = f"For this text alone, {advice['fewest_fixed_loops']} fixed loops are within 0.01 nats as well"
        sentences.append(f"{fewest}{''.join(tasks)}.")
    sentences.append(
        "`generate` does this unless told otherwise:" if advice["is_default"]
        else f"The checkpoint's own setting is another ({advice['default']}). The line:"
    )  # fmt: skip
    return " ".join(sentences)


def advice_line(advice: dict[str, Any]) -> str:
    return f"model.generate(ids, exit_policy={advice['exit_policy']!r}, num_loops={_loops(advice['num_loops'])})"


def advice_rows(advice: dict[str, Any], text: str) -> list[list[str]]:
    """A row for every workload: full depth beside the advice."""
    rows = []
    for name, found in advice["measured"].items():
        is_task = found["measure"] == "accuracy"
        full, with_it = ((1 - found[k]["loss"] if is_task else found[k]["loss"]) for k in ("full", "with_it"))
        steps = ", ".join(f"{step:.2f}" for step in found["with_it"]["steps"])
        flops = [f"{found[kind]['flops'] / 1e6:.2f}" for kind in ("with_it", "full")]
        rows.append([name if is_task else text, "answers right" if is_task else "cross-entropy", f"{full:.4f}",
                     f"{with_it:.4f}", f"{with_it - full:+.4f}", f"{steps} of {_loops(advice['full'])}",
                     " of ".join(flops)])  # fmt: skip
    return rows


def _loops(loops: int | list[int]) -> str:
    return str(loops) if isinstance(loops, int) or len(set(loops)) > 1 else str(loops[0])
