"""The model card of a checkpoint, from the template `model_card.md` and the files that the checkpoint's numbers are in.

- `trainer_state.json`: what was trained, and the validation loss.
- `depth.json`, if it is there: what `evaluation.depth` measured of a model of a depth task; see `tasks/card.py`.
- `calibration.json`, if it is there: the promise that `evaluation.calibrate` made.
- `results.json`, if it is there: a list of measurements, each with `dataset`, `policy` (a dict; null: fixed loops),
  `num_loops`, `mean_steps`, `perplexity`, and perhaps `ms_per_token`.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import safe_open

from .promise import guarantee_of
from .tasks.card import render_task_card

TEMPLATE = Path(__file__).parents[1] / "model_card.md"
FIGURE = "tradeoff.png"


def render_card(
    checkpoint: Path,
    repo: str | None = None,
    license: str = "apache-2.0",
    datasets: list[str] | None = None,
    base_model: str | None = None,
) -> ModelCard:
    """`datasets` are names on the Hub that the model was trained on, `base_model` that of what it was trained from (the
    config's, when left out). A model of a depth task has a card of its own."""
    if (checkpoint / "depth.json").exists():
        return render_task_card(checkpoint, repo, license)
    config = _read(checkpoint / "config.json")
    state = _read(checkpoint / "trainer_state.json") or {}
    measurements = _read(checkpoint / "results.json") or []
    name = (repo or checkpoint.resolve().name).rpartition("/")[2]
    results = evaluation_results(state, measurements)
    base = base_model or config.get("base_model")
    on_hub = base is not None and not base.startswith("./")  # else it is a folder that only its owner has
    data = ModelCardData(
        base_model=base if on_hub else None,
        base_model_relation="finetune" if on_hub else None,
        library_name="transformers",
        license=license,
        tags=["recurrent_gpt2", "recurrent-depth", "looped-transformer", "early-exit", "custom_code"],
        pipeline_tag="text-generation",
        datasets=datasets,
        model_name=name if results else None,
        eval_results=results or None,
    )
    policy = (_read(checkpoint / "generation_config.json") or {}).get("exit_policy")
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        model_name=name,
        repo=repo or name,
        groups=", ".join(f"layers {group[0]}-{group[-1]}" if len(group) > 1 else f"layer {group[0]}"
                         for group in config["loop_groups"]) or "none",
        num_layers=config["num_hidden_layers"],
        parameters=f"{count_parameters(checkpoint):,}",
        positions=config["max_position_embeddings"],
        vocab_size=f"{config['vocab_size']:,}",
        num_loops=config["num_loops"],
        mean_loops=config["mean_loops"] + (config["loop_sigma"] is not None),
        draws_loops=config["loop_sigma"] is not None,
        backprop_loops=config["backprop_loops"],
        default_policy=json.dumps(policy) if policy else None,
        guarantee=guarantee_of(checkpoint),
        tradeoff=[tradeoff_row(row) for row in measurements],
        figure=FIGURE if (checkpoint / FIGURE).exists() else None,
        base_model=base.removeprefix("./") if base else None,
        training=training_lines(state),
        tokens=f"{tokens_seen(state):,}" if tokens_seen(state) else None,
        tasks="".join(f", and beside it on the task `{task['task']}`" for task in config.get("tasks") or []),
    )  # fmt: skip


def evaluation_results(state: dict[str, Any], measurements: list[dict[str, Any]]) -> list[EvalResult]:
    """The model index: the validation perplexity of training, and every measurement."""
    results = []
    if evaluation := last_evaluation(state, "perplexity"):
        how = f"{evaluated_loops(evaluation)}fixed loops"
        results.append(_perplexity("training data, held out", evaluation["eval_perplexity"], how))
    for row in measurements:
        results.append(_perplexity(row["dataset"], row["perplexity"], describe_policy(row)))
    return results


def _perplexity(dataset: str, value: float, how: str) -> EvalResult:
    return EvalResult(
        task_type="text-generation",
        dataset_type=identifier(dataset),
        dataset_name=dataset,
        metric_type="perplexity",
        metric_name=f"perplexity, {how}",
        metric_value=round(value, 4),
    )


def identifier(dataset: str) -> str:
    """As the Hub wants it in a model index: a name that a dataset could have there."""
    return re.sub(r"[^\w./]+", "-", dataset).strip("-./")


def describe_policy(row: dict[str, Any]) -> str:
    policy = row.get("policy")
    if not policy:
        return f"{row['num_loops']} fixed loops"
    settings = ", ".join(f"{name} {value}" for name, value in policy.items() if name != "name")
    return f"{policy['name']} ({settings})" if settings else policy["name"]


def tradeoff_row(row: dict[str, Any]) -> str:
    speed = f"{row['ms_per_token']:.1f}" if row.get("ms_per_token") is not None else ""
    cells = [row["dataset"], describe_policy(row), f"{row['mean_steps']:.2f}", f"{row['perplexity']:.3f}", speed]
    return f"| {' | '.join(cells)} |"


def training_lines(state: dict[str, Any]) -> list[str]:
    losses = [entry for entry in state.get("log_history", []) if "loss" in entry]
    if not losses:
        return []
    lines = [
        f"{state['global_step']:,} steps, {tokens_seen(state):,} tokens; last training loss {losses[-1]['loss']:.4f}"
    ]
    if last := last_evaluation(state, "loss"):
        how = f"at step {last['step']:,}, at {evaluated_loops(last)}fixed loops"
        lines.append(f"validation loss {last['eval_loss']:.4f} {how}")
        answers = [entry for entry in state["log_history"] if "eval_tasks_accuracy" in entry]
        if answers:
            lines.append(f"answers of tasks: {answers[-1]['eval_tasks_accuracy']:.4f} of them right, {how}")
    return lines


def last_evaluation(state: dict[str, Any], measure: str) -> dict[str, Any] | None:
    """What was logged last with this measure, of text where there were tasks beside it, as `eval_{measure}`."""
    for entry in reversed(state.get("log_history", [])):
        for name in (f"eval_{measure}", f"eval_text_{measure}"):
            if name in entry:
                return {**entry, f"eval_{measure}": entry[name]}
    return None


def evaluated_loops(entry: dict[str, Any]) -> str:
    """The loops of a logged evaluation, `8 ` or `2, 8, 2 `, or nothing where they were not logged."""
    counts = [str(entry[name]) for name in sorted(entry) if name.startswith("eval_loops_group_")]
    return f"{', '.join(counts if len(set(counts)) > 1 else counts[:1])} " if counts else ""


def tokens_seen(state: dict[str, Any]) -> int | None:
    counts = [entry["tokens_seen"] for entry in state.get("log_history", []) if "tokens_seen" in entry]
    return counts[-1] if counts else None


def check_card(checkpoint: Path, repo: str | None = None) -> None:
    """Fails where the numbers of the checkpoint's card are not those of its files."""
    written, rendered = ModelCard.load(checkpoint / "README.md"), render_card(checkpoint, repo)

    def numbers(card: ModelCard) -> list[tuple]:
        return [(r.dataset_name, r.metric_name, r.metric_value) for r in card.data.eval_results or []]

    def rows(card: ModelCard) -> list[str]:
        return [line.strip() for line in card.text.splitlines() if line.startswith("|")]

    for kind, found, expected in (
        ("model-index", numbers(written), numbers(rendered)),
        ("table", rows(written), rows(rendered)),
        ("training facts", _facts(written), _facts(rendered)),
        ("promise", _promise(written), _promise(rendered)),
    ):
        if found != expected:
            stale = [entry for entry in found if entry not in expected] or ["nothing"]
            missing = [entry for entry in expected if entry not in found] or ["nothing"]
            raise ValueError(
                f"the card {checkpoint / 'README.md'} and the result files disagree ({kind}): the card has {stale[0]}, "
                f"the files have {missing[0]}. Delete the card to have it written anew."
            )


def check_metadata(card: ModelCard) -> None:
    """Fails where the metadata of a card is not what the Hub takes. (`ModelCard.validate` asks the Hub itself.)"""
    # Reads the model index anew, and fails where it is not whole.
    data = ModelCardData(**card.data.to_dict(), ignore_metadata_errors=False)
    given = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    for name, value in given.items():
        if data.get(name) != value:
            raise ValueError(f"the card's `{name}` is {data.get(name)!r}, but must be {value!r}.")
    if not data.license:
        raise ValueError("the card has no `license`.")
    names = {"base_model": data.base_model, "datasets": data.datasets}
    for field, value in names.items():
        for name in [value] if isinstance(value, str) else value or []:
            _check_name(field, name)
    for result in data.eval_results or []:
        _check_name("dataset.type", result.dataset_type)
        if not isinstance(result.metric_value, int | float) or not math.isfinite(result.metric_value):
            raise ValueError(f"the card's `{result.metric_name}` is {result.metric_value!r}, but must be a number.")


def _check_name(field: str, name: str) -> None:
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(f"the card's `{field}` is {name!r}, which can't be a name on the Hub: {error}") from error


def _facts(card: ModelCard) -> list[str]:
    return [line for line in card.text.splitlines() if line.startswith(("- validation loss", "- ")) and "loss" in line]


def _promise(card: ModelCard) -> list[str]:
    return [line for line in card.text.splitlines() if line.startswith("With probability ")]


def count_parameters(checkpoint: Path) -> int:
    total = 0
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names = tensors.keys()
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
    return total


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None
