"""The Trainer of looped models: loop counts that every rank and every resumed run draws alike, and what to log."""

import hashlib
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from recurrent_gpt2 import sample_num_loops
from recurrent_gpt2.exit_policies import resolve_exit_policy
from recurrent_gpt2.geometry import LoopGeometry

from .card import render_card
from .data import StreamedBlocks, collate
from .muon import Muon
from .tasks.feed import TaskFeed
from .tasks.rest import answers_of, check_groups, doubt_loss, rest_loss
from .tasks.task import NO_ANSWER


def draw_num_loops(config, seed: int, step: int, micro_step: int, share: float = 1.0) -> list[int]:
    """Loop counts of a micro-step: a function of seed, step and micro-step within it, and of nothing else. `share` as
    in `sample_num_loops`."""
    digest = hashlib.blake2b(f"{seed}/{step}/{micro_step}".encode(), digest_size=7).digest()
    return sample_num_loops(config, torch.Generator().manual_seed(int.from_bytes(digest, "big")), share)


def divergence(logits: torch.Tensor, of_base: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
    """T^2 KL(base || model) at temperature T, the mean over predictions that have a label."""
    has_label = labels[:, 1:] != -100
    predicted, expected = (
        torch.log_softmax(values[:, :-1][has_label].float() / temperature, dim=-1) for values in (logits, of_base)
    )
    return temperature**2 * torch.nn.functional.kl_div(predicted, expected, reduction="batchmean", log_target=True)


def draw_exit_policy(args, step: int, micro_step: int) -> Any:
    """The exit policy of a micro-step, or None: again a function of seed, step and micro-step alone."""
    policies = getattr(args, "exit_policies", None)
    if not policies:
        return None
    digest = hashlib.blake2b(f"exits/{args.seed}/{step}/{micro_step}".encode(), digest_size=8).digest()
    share, place = (int.from_bytes(half, "big") / 2**32 for half in (digest[:4], digest[4:]))
    return resolve_exit_policy(policies[int(place * len(policies))], 1)[0] if share < args.exit_share else None


class RecurrentTrainer(Trainer):
    """`Trainer` for RecurrentGPT2.

    Draws loop counts by step, the same on every rank (FSDP and ZeRO-3 would hang otherwise) and after a resume; decays
    matrices only; logs perplexity, tokens, speed and loops. `tasks` makes the rows of depth tasks, if there are any;
    `base` is the model that `kl_weight` keeps this one near, run with the loops of its own config.
    """

    def __init__(self, *args, tasks: TaskFeed | None = None, base: torch.nn.Module | None = None, **kwargs):
        kwargs.setdefault("data_collator", collate)
        super().__init__(*args, **kwargs)
        self.tasks = tasks
        self.base = None if base is None else base.requires_grad_(False).eval().to(self.args.device)
        if self.args.label_smoothing_factor:
            raise ValueError(
                "`label_smoothing_factor` is not supported: the stock trainer would smooth unshifted labels."
            )
        if isinstance(self.train_dataset, StreamedBlocks) and self.args.dataloader_num_workers:
            raise ValueError(
                "`dataloader_num_workers` must be 0 for streamed sources: the place to resume from is kept here."
            )
        if getattr(self.args, "exit_policies", None) and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise ValueError(
                "`exit_policies` need whole weights: with FSDP or DeepSpeed, processes whose tokens leave at different "
                "steps would wait for each other for ever. Leave them out."
            )
        for name in ("rest_weight", "doubt_weight"):
            if self._weight(name) > 0:
                check_groups(self.model.config, name)
        self._micro_step = (-1, 0)  # the current step, and the micro-step within it
        self._drawn: list[list[int]] = []  # since the last log
        self._parts: list[tuple[float, ...]] = []  # losses of text, and of answers if there are tasks, since then
        self._last_log: float | None = None  # when
        self._tokens_since_log = 0
        self._random_state_of: str | None = None  # a checkpoint, until its random state is taken up
        if isinstance(self.train_dataset, StreamedBlocks):
            self.add_callback(StreamPosition(self.train_dataset))
        if tasks is not None:
            self.add_callback(CurriculumCallback(tasks, self.accelerator))

    def _weight(self, name: str) -> float:
        return getattr(self.args, name, 0.0)  # plain `TrainingArguments` have none

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs):
        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest_whole_checkpoint(Path(self.args.output_dir))
            if resume_from_checkpoint is None:
                raise ValueError(f"`output_dir` {self.args.output_dir} has no whole checkpoint to resume from.")
        resume_from_checkpoint = str(resume_from_checkpoint) if resume_from_checkpoint else None
        if resume_from_checkpoint is not None and isinstance(self.train_dataset, StreamedBlocks):
            # The stream starts where the checkpoint left it, so there are no batches to skip. With that the stock
            # trainer would also leave out the random state.
            self.train_dataset.start_at(stream_position(Path(resume_from_checkpoint)))
            self.args.ignore_data_skip = True
            self._random_state_of = resume_from_checkpoint
        if resume_from_checkpoint is not None and self.tasks is not None:
            self.tasks.load_state(saved_attribute(Path(resume_from_checkpoint), CurriculumCallback, "curricula"))
        return super().train(resume_from_checkpoint, **kwargs)

    def take_up(self, checkpoint: Path) -> None:
        """Weights and log of a run's last checkpoint, as if the run had just ended there."""
        self._load_from_checkpoint(str(checkpoint))
        run = Path(self.args.output_dir)  # its log has a few lines more, if it came to be written
        is_whole = (run / TRAINER_STATE_NAME).exists() and steps_of(run) == steps_of(checkpoint)
        self.state = TrainerState.load_from_json(str((run if is_whole else checkpoint) / TRAINER_STATE_NAME))

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        step, micro_step = self._micro_step
        self._micro_step = (step, micro_step + 1) if step == self.state.global_step else (self.state.global_step, 0)
        if self._random_state_of is not None:
            self._load_rng_state(self._random_state_of)
            self._random_state_of = None
        if self._last_log is None:
            self._last_log = time.monotonic()
        self._tokens_since_log += inputs["input_ids"].numel() * self.args.world_size
        if self.model.config.loop_groups and "num_loops" not in inputs:
            policy = draw_exit_policy(self.args, *self._micro_step)
            inputs = {**inputs, **self._loops("task" in inputs, policy)}
            if "tasks" in inputs:
                inputs["tasks"] = {**inputs["tasks"], **self._loops(True, policy)}
            if policy is None:
                self._drawn.append(inputs["num_loops"])
        return super().training_step(model, inputs, num_items_in_batch)

    def _loops(self, of_task: bool, policy: Any) -> dict[str, Any]:
        """The loops of a micro-step: as the curriculum has it (up to `most_loops`), or the config; or by a policy."""
        config, most = self.model.config, getattr(self.args, "most_loops", None)
        if policy is not None:
            return {"exit_policy": policy, "num_loops": most or config.num_loops}
        if of_task and most is not None:
            return {"num_loops": self.tasks.draw_num_loops(len(config.loop_groups), most, *self._micro_step)}
        ramp = getattr(self.args, "loop_ramp", 0) * self.state.max_steps  # steps in which loops grow
        share = min(1.0, self._micro_step[0] / ramp) if ramp else 1.0
        return {"num_loops": draw_num_loops(config, self.args.seed, *self._micro_step, share)}

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Leaves tied weights out of what is missing: a file has them once."""
        missing = [name for name in load_result.missing_keys if name not in self.model.all_tied_weights_keys]
        super()._issue_warnings_after_load(type(load_result)(missing, load_result.unexpected_keys))

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """With the rows of tasks, which are made here: when the step begins, and the last one's accuracy is known."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.tasks is not None:
            batches = [self.tasks.fill(batch, self.state.global_step, place) for place, batch in enumerate(batches)]
            items = self._get_num_items_in_batch(batches, device)
        return batches, items

    def compute_loss(self, model, inputs, return_outputs: bool = False, num_items_in_batch=None):
        """Beside text, the mean loss of the tasks' answers is added to that of the text."""
        inputs = dict(inputs)
        of_tasks = inputs.pop("tasks", None)
        loss, outputs = self._loss_of_part(model, inputs, num_items_in_batch)
        of_text = loss.detach()
        if self.base is not None and model.training:
            text = {name: inputs[name] for name in ("input_ids", "attention_mask", "position_ids") if name in inputs}
            with torch.no_grad():
                of_base = self.base(**text, use_cache=False).logits
            kl = divergence(outputs.logits, of_base, inputs["labels"], self.args.kl_temperature)
            shares = 1 if num_items_in_batch is None else self.args.gradient_accumulation_steps
            loss = loss + self.args.kl_weight * kl / shares
            if of_tasks is None:
                self._parts.append((float(of_text),))
        if of_tasks is not None:
            answers, _ = self._loss_of_part(model, of_tasks, None)
            self._parts.append((float(of_text), float(answers.detach())))
            loss = loss + answers / self.args.gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss

    def _loss_of_part(self, model, inputs, num_items_in_batch):
        inputs = dict(inputs)
        task = inputs.pop("task", None)
        with_exits = inputs.get("exit_policy") is not None
        if with_exits:
            model.eval()  # policies are for that mode: noise of the start is fixed by position, dropout is off
        of_steps = self._weight("rest_weight") + self._weight("doubt_weight") > 0
        of_steps = of_steps and task is not None and not with_exits
        if of_steps:
            inputs["output_loop_trajectory"] = True
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if of_steps:
            # What is divided by the answers of all micro-steps sums up over them; a mean over these answers does not.
            parts = 1 if num_items_in_batch is None else self.args.gradient_accumulation_steps
            loss = loss + self._loss_of_steps(outputs.loop_trajectory[0], inputs["labels"]) / parts
        if with_exits:
            model.train()
        elif task is not None:
            self.tasks.observe(outputs.logits, inputs["labels"], task)  # what exits lose does not hold a curriculum up
        return loss, outputs

    def _loss_of_steps(self, states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """What `rest_weight` and `doubt_weight` add, from the states of all loop steps."""
        rest_weight, doubt_weight = self._weight("rest_weight"), self._weight("doubt_weight")
        answers = answers_of(labels)
        asked = answers != NO_ANSWER
        with torch.set_grad_enabled(torch.is_grad_enabled() and doubt_weight > 0):
            logits = self.model.decode_states(states[1:, asked])  # [K, asked, vocabulary]
        loss = states.new_zeros(())
        if doubt_weight > 0:
            loss = loss + doubt_weight * doubt_loss(logits, answers[asked])
        if rest_weight > 0:
            said = answers.repeat(len(states) - 1, 1, 1)
            said[:, asked] = logits.detach().argmax(-1)
            loss = loss + rest_weight * rest_loss(states, said, answers, self.args.rest_delay)
        return loss

    def create_model_card(self, *args, **kwargs) -> None:
        """The project's card instead of the stock one, beside the weights that are pushed."""
        output_dir = Path(self.args.output_dir)
        if self.is_world_process_zero() and (output_dir / "config.json").exists():
            self.state.save_to_json(str(output_dir / "trainer_state.json"))
            render_card(output_dir, self.args.hub_model_id).save(output_dir / "README.md")

    def get_decay_parameter_names(self, model) -> list[str]:
        return [name for name, parameter in model.named_parameters() if parameter.ndim >= 2]

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        args = self.args
        muon_rate = getattr(args, "muon_learning_rate", None)  # plain `TrainingArguments` have none
        if muon_rate is None or self.optimizer is not None:
            return super().create_optimizer(model)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError(
                "`muon_learning_rate` needs whole matrices, and FSDP and DeepSpeed split them: leave it out."
            )
        # The head is an embedding too, tied or not.
        embedding_ids = {id(module.weight) for module in self.model.modules() if isinstance(module, torch.nn.Embedding)}
        embedding_ids.add(id(self.model.get_output_embeddings().weight))
        parameters = [value for value in self.model.parameters() if value.requires_grad]
        vectors = [value for value in parameters if value.ndim != 2]
        embeddings = [value for value in parameters if value.ndim == 2 and id(value) in embedding_ids]
        matrices = [value for value in parameters if value.ndim == 2 and id(value) not in embedding_ids]
        adam = {"lr": args.learning_rate}
        groups = [
            {"params": matrices, "weight_decay": args.weight_decay, "lr": muon_rate, "orthogonal": True},
            {"params": embeddings, "weight_decay": args.weight_decay, **adam},
            {"params": vectors, "weight_decay": 0.0, **adam},
        ]
        self.optimizer = Muon(groups, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon)
        return self.optimizer

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            now, then = time.monotonic(), self._last_log
            before = [entry["tokens_seen"] for entry in self.state.log_history if "tokens_seen" in entry]
            if self._parts:
                micro_steps = self.args.gradient_accumulation_steps
                of_text, *of_answers = (sum(losses) / len(self._parts) for losses in zip(*self._parts, strict=True))
                logs["text_loss"] = of_text * micro_steps
                if of_answers:  # with what is added for `rest_weight` and `doubt_weight`
                    (logs["answers_loss"],) = of_answers
            logs["perplexity"] = _perplexity(logs.get("text_loss", logs["loss"]))
            logs["tokens_seen"] = (before[-1] if before else 0) + self._tokens_since_log
            logs["tokens_per_second"] = self._tokens_since_log / (now - then)
            if self.optimizer.param_groups[0].get("orthogonal"):  # the stock trainer logs the rate of the first group
                logs["muon_learning_rate"], logs["learning_rate"] = (g["lr"] for g in self.optimizer.param_groups[:2])
            for group, counts in enumerate(zip(*self._drawn, strict=True)):
                logs[f"loops_group_{group}"] = sum(counts) / len(counts)
            logs |= self.tasks.logs() if self.tasks is not None else {}
            self._drawn, self._parts, self._last_log, self._tokens_since_log = [], [], now, 0
        for of_what in ("eval", "eval_text", "eval_tasks"):  # one, or text and tasks in turn
            if f"{of_what}_loss" not in logs:
                continue
            logs[f"{of_what}_perplexity"] = _perplexity(logs[f"{of_what}_loss"])
            for group, count in enumerate(self.model.config.loops_per_group()):  # fixed, and what it was measured at
                logs[f"eval_loops_group_{group}"] = count
        super().log(logs, start_time)


class StreamPosition(TrainerCallback, ExportableState):
    """Saves with every checkpoint where in its stream of blocks the run is."""

    def __init__(self, blocks: StreamedBlocks):
        self.blocks, self.blocks_used = blocks, 0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.blocks_used = self.blocks.start_block

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.blocks_used += args.train_batch_size * args.gradient_accumulation_steps * args.world_size

    def state(self) -> dict[str, Any]:
        self.blocks_used = max(self.blocks_used, self.blocks.start_block)  # before training has begun
        return {"args": {}, "attributes": {"position": self.blocks.position_at(self.blocks_used)}}


class CurriculumCallback(TrainerCallback, ExportableState):
    """Moves the curricula of tasks on after every step, and saves them with every checkpoint."""

    def __init__(self, tasks: TaskFeed, accelerator):
        self.tasks, self.accelerator = tasks, accelerator

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.tasks.end_step(self._sum_over_ranks if args.world_size > 1 else lambda counts: counts)

    def _sum_over_ranks(self, counts: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(counts.to(self.accelerator.device), "sum").cpu()

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"curricula": self.tasks.state()}}


class GeometryCallback(TrainerCallback):
    """Measures step norms, cosines and drift on fixed held-out text with fixed loops, at steps 0, 1, 2, 4, 8, ...

    Each measurement is a line of `geometry.jsonl` in the output folder.
    """

    def __init__(self, blocks: list[dict[str, Any]], num_loops: int):
        self.input_ids, self.num_loops = collate(blocks)["input_ids"], num_loops

    def on_train_begin(self, args, state, control, model=None, **kwargs) -> None:
        self.file = Path(args.output_dir) / "geometry.jsonl"
        # States come back in fp32, also where they were computed in less. What is rounding depends on it.
        self.precision = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        if state.is_world_process_zero:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            # A resumed run measures again what came after its checkpoint.
            lines = self.file.read_text().splitlines() if self.file.exists() and state.global_step > 0 else []
            kept = [line for line in lines if _step_of(line) <= state.global_step]
            self.file.write_text("".join(line + "\n" for line in kept))
        if state.global_step == 0:
            self._measure(state, model)

    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        if _is_log_spaced(state.global_step) or state.global_step == state.max_steps:
            self._measure(state, model)

    @torch.no_grad()
    def _measure(self, state, model) -> None:
        """On every rank, since the weights may be sharded over them; one writes."""
        training, geometry = model.training, LoopGeometry(len(model.config.loop_groups))
        model.eval()
        for row in self.input_ids:
            arguments = {"num_loops": self.num_loops, "output_loop_trajectory": True, "use_cache": False}
            output = model(row[None].to(model.device), logits_to_keep=1, **arguments)
            geometry.update(tuple(states.cpu().to(self.precision or states.dtype) for states in output.loop_trajectory))
        model.train(training)
        if state.is_world_process_zero:
            with self.file.open("a") as file:
                file.write(json.dumps({"step": state.global_step, **geometry.to_dict()}) + "\n")


def newest_whole_checkpoint(output_dir: str | Path) -> Path | None:
    """The last checkpoint that was written to its end. The trainer's state is the last file written, so a checkpoint
    without a readable one was cut short."""
    folders = Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    folders = [folder for folder in folders if folder.name.rpartition("-")[2].isdigit()]
    for folder in sorted(folders, key=lambda folder: -int(folder.name.rpartition("-")[2])):
        if is_whole(folder):
            return folder
    return None


def is_whole(checkpoint: Path) -> bool:
    """Whether the last file is there and readable, and with it the weights, the optimiser and the random states."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text())
        for file in checkpoint.glob("*.safetensors"):
            with safe_open(file, "pt"):  # reads the header, and compares it with the size of the file
                pass
    except (OSError, ValueError, SafetensorError):
        return False
    has_optimizer = any(checkpoint.glob("optimizer*")) or any(checkpoint.glob("global_step*"))  # the latter: DeepSpeed
    return has_optimizer and any(checkpoint.glob("rng_state*.pth"))


def steps_of(folder: Path) -> int:
    return json.loads((folder / TRAINER_STATE_NAME).read_text())["global_step"]


def stream_position(checkpoint: Path) -> dict[str, Any] | None:
    return saved_attribute(checkpoint, StreamPosition, "position")


def saved_attribute(checkpoint: Path, callback: type, name: str) -> Any:
    """What a callback has saved with a checkpoint; None where it has saved nothing."""
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    saved = state.get("stateful_callbacks", {}).get(callback.__name__)
    return saved["attributes"][name] if saved else None


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def _is_log_spaced(step: int) -> bool:
    return step & (step - 1) == 0


def _step_of(line: str) -> int:
    try:
        return json.loads(line)["step"]
    except ValueError:  # a line cut short by a crash
        return sys.maxsize
