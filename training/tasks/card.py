"""The card of a model of a depth task, from `depth.json` (what `evaluation.depth` measured) and the template here."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..promise import guarantee_of
from .task import Task, TaskSource

TEMPLATE = Path(__file__).with_name("task_card.md")
FIGURE = "depth.png"


def render_task_card(checkpoint: Path, repo: str | None = None, license: str = "apache-2.0") -> ModelCard:
    config, measured = (json.loads((checkpoint / name).read_text()) for name in ("config.json", "depth.json"))
    name = (repo or checkpoint.resolve().name).rpartition("/")[2]
    task = TaskSource.parse(measured["task"]).task
    data = ModelCardData(
        library_name="transformers",
        license=license,
        tags=["recurrent_gpt2", "recurrent-depth", "looped-transformer", "early-exit", "custom_code"],
        pipeline_tag="text-generation",
        model_name=name,
        eval_results=evaluation_results(measured),
    )
    policy = json.loads((checkpoint / "generation_config.json").read_text()).get("exit_policy")
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        model_name=name,
        repo=repo or name,
        task=task.name,
        settings=", ".join(f"{key} {value}" for key, value in measured["task"].items() if key != "task"),
        example=example_of(task),
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        groups=config["loop_groups"],
        positions=config["max_position_embeddings"],
        cap=measured["cap"],
        sequences=measured["sequences"],
        default_policy=json.dumps(policy) if policy else None,
        guarantee=guarantee_of(checkpoint),
        rows=table_rows(measured),
        deeper=deeper_line(measured["deeper"], measured["task"]["depth"]),
        training=training_line(checkpoint),
        figure=FIGURE if (checkpoint / FIGURE).exists() else None,
    )


def evaluation_results(measured: dict[str, Any]) -> list[EvalResult]:
    """The model index: the accuracies of the card's table."""
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=measured["task"]["task"],
            dataset_name=measured["task"]["task"],
            metric_type="accuracy",
            metric_name=f"accuracy, {row['how']}, {row['mean_steps']:.2f} mean loops",
            metric_value=round(row["accuracy"], 4),
        )
        for row in rows_of(measured)
    ]


def rows_of(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Fixed loops, and each rule's cheapest threshold at no loss."""
    fixed = {row["num_loops"][0]: row for row in measured["fixed"] if len(set(row["num_loops"])) == 1}
    rows = [{"how": f"{count} fixed loops", **fixed[count]} for count in (1, 2, 4, 6, 8, 12, 24) if count in fixed]
    for rule in measured["rules"]:
        if found := measured["no_loss"].get(rule):
            rows.append({"how": f"{rule} {found['threshold']:g}", **found})
    return rows


def table_rows(measured: dict[str, Any]) -> list[str]:
    return [f"| {row['how']} | {row['mean_steps']:.2f} | {row['accuracy']:.4f} |" for row in rows_of(measured)]


def deeper_line(deeper: dict[str, Any] | None, trained: int) -> str | None:
    if deeper is None:
        return None
    fixed = ", ".join(f"{row['accuracy_beyond']:.4f} with {row['num_loops']} loops" for row in deeper["fixed"])
    rules = [f"{row['accuracy_beyond']:.4f} by {rule} at {row['mean_steps']:.1f} mean loops over all tokens"
             for rule, row in deeper["rules"].items()]  # fmt: skip
    return f"Of answers that need {trained + 1} to {deeper['depth']} loops, right: {'; '.join([fixed, *rules])}."


def training_line(checkpoint: Path) -> str | None:
    file = checkpoint / "trainer_state.json"
    if not file.exists():
        return None
    state = json.loads(file.read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    return f"{state['global_step']:,} steps; last training loss {losses[-1]:.4f}"


def example_of(task: Task) -> str:
    """A prompt that the model answers with one token, and the right answer."""
    batch = task.full().sample(1, task.depth, np.random.default_rng(3))
    place = int(np.flatnonzero(batch.asked[0])[-1])
    prompt, answer = task.text(batch.ids[0, : place + 1]), task.tokens[batch.answers[0, place]]
    prompt, answer = (json.dumps(text, ensure_ascii=False) for text in (prompt, answer))
    return f"prompt = {prompt}\nanswer = {answer}  # what it should say"
