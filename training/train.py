"""Trains a model by a recipe: `python -m training.train training/recipes/smoke.yaml --max_steps 100`.

`torchrun` and `accelerate launch` run the same command on more processes or machines.
"""

import logging
import shutil
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, GenerationConfig, GPT2Config, PretrainedConfig, PreTrainedTokenizerBase, set_seed

from recurrent_gpt2 import RecurrentGPT2Config, RecurrentGPT2ForCausalLM

from .data import BlockMaker, StreamedBlocks, first_validation_blocks, is_validation, mixed_blocks
from .recipe import Recipe, RecurrentTrainingArguments, load_recipe, recipe_parser
from .tasks import extended_tokenizer, task_tokenizer
from .tasks.feed import TaskFeed, TaskRows, accuracy_metrics
from .tokenizer import fit_to_model, load_tokenizer, train_tokenizer
from .trainer import GeometryCallback, RecurrentTrainer, is_whole, newest_whole_checkpoint, steps_of

logger = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> RecurrentTrainer:
    known, overrides = recipe_parser(__doc__).parse_known_args(arguments)
    recipe = load_recipe(known.recipe, overrides)
    is_first = recipe.training.process_index == 0  # what goes well is said once, not by every rank
    logging.basicConfig(level=logging.INFO if is_first else logging.WARNING, format="%(message)s")
    transformers.utils.logging.set_verbosity_warning()
    return run(recipe)


def run(recipe: Recipe) -> RecurrentTrainer:
    args = recipe.training
    if args.kl_weight > 0 and args.from_gpt2 is None and args.init_from is None:
        raise ValueError(f"`kl_weight` is {args.kl_weight}, but there is no `from_gpt2` or `init_from` to stay near.")
    if args.init_from is not None:
        check_start("init_from", args.init_from, RecurrentGPT2Config, other="from_gpt2")
    if args.from_gpt2 is not None:
        check_start("from_gpt2", args.from_gpt2, GPT2Config, other="init_from")
    args.dataloader_pin_memory &= args.device.type != "cpu"
    checkpoint = find_checkpoint(recipe)
    set_seed(args.seed)
    with args.main_process_first(desc="data"):
        tokenizer = make_tokenizer(recipe, checkpoint)
        model = make_model(recipe, tokenizer, checkpoint)
        fit_to_model(tokenizer, model)
        feed = make_feed(recipe, tokenizer, model.config)
        train_blocks, validation_blocks = make_blocks(recipe, tokenizer, model.config, feed)
        base = make_base(recipe, tokenizer)
    trainer = RecurrentTrainer(
        model, args, train_dataset=train_blocks, eval_dataset=validation_blocks, processing_class=tokenizer,
        tasks=feed, base=base, **(accuracy_metrics() if feed is not None else {}),
    )  # fmt: skip
    if args.geometry_loops > 0 and model.config.loop_groups:
        text = validation_blocks["text"] if isinstance(validation_blocks, dict) else validation_blocks
        held_out = [text[place] for place in range(min(args.geometry_blocks, len(text)))]
        trainer.add_callback(GeometryCallback(held_out, args.geometry_loops))
    if args.compile:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    describe(model, args)
    if checkpoint is not None and steps_of(checkpoint) >= args.max_steps > 0:  # the stock trainer would add a step
        logger.info(f"{checkpoint} is of the last step already: raise `max_steps` to train on.")
        trainer.take_up(checkpoint)
    else:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    model.config.use_cache = True  # the trainer turns it off for training
    trainer.save_model()
    trainer.save_state()
    logger.info(f"saved to {args.output_dir}")
    return trainer


def find_checkpoint(recipe: Recipe) -> Path | None:
    """The checkpoint to go on from; refuses to write over a run unless it is resumed."""
    output_dir = Path(recipe.training.output_dir)
    if recipe.training.resume:
        checkpoint = newest_whole_checkpoint(output_dir)
        if checkpoint is None:
            logger.info(f"{output_dir} has no whole checkpoint: starting from the beginning.")
        else:
            logger.info(f"resuming from {checkpoint}")
        return checkpoint
    found = [folder for folder in output_dir.glob("checkpoint-*") if is_whole(folder)]
    if found or (output_dir / "model.safetensors").exists():
        raise FileExistsError(
            f"`output_dir` {output_dir} has a model already: add --resume to go on, or choose another --output_dir."
        )
    return None


def make_tokenizer(recipe: Recipe, checkpoint: Path | None) -> PreTrainedTokenizerBase:
    if checkpoint is not None:
        return load_tokenizer(str(checkpoint))
    tasks = [source.task for source in recipe.tasks]
    name, start = recipe.data.tokenizer, recipe.training.init_from or recipe.training.from_gpt2
    if start is not None and name is not None:
        check_vocabulary(name, start, "from_gpt2" if recipe.training.init_from is None else "init_from")
    if name not in (None, "train") or (start is not None and name is None):
        return extended_tokenizer(load_tokenizer(name or start), tasks)
    if not recipe.texts:
        return task_tokenizer(tasks)
    # Kept beside the checkpoints from the start: every process, and a run that is resumed before its first
    # checkpoint, must get the same one.
    folder = Path(recipe.training.output_dir) / "tokenizer"
    if not recipe.training.resume and recipe.training.process_index == 0:
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
    if not (folder / "tokenizer.json").exists():
        logger.info(f"training a tokenizer of {recipe.data.tokenizer_vocab_size} entries")
        texts = training_texts(recipe)
        train_tokenizer(texts, recipe.data.tokenizer_vocab_size).save_pretrained(folder)
    return extended_tokenizer(load_tokenizer(str(folder)), tasks)


def check_vocabulary(name: str, start: str, field: str) -> None:
    """Fails where a tokenizer that is asked for is not the one that the weights of the start are for."""
    try:
        own = load_tokenizer(start).get_vocab()
    except ValueError:
        own = {}
    # A GPT-2 without a tokenizer: transformers finds none, or makes one that has nothing but the end of text.
    if name == "train" or (len(own) > 1 and load_tokenizer(name).get_vocab() != own):
        raise ValueError(
            f"`tokenizer` is {name!r}, but `{field}` {start} has a vocabulary of its own, which its weights are for: "
            "leave `tokenizer` out."
        )


def training_texts(recipe: Recipe) -> Iterator[str]:
    """Training documents of all sources in turn, until there are enough characters for a tokenizer."""
    budget = recipe.data.tokenizer_characters // len(recipe.texts)
    for source in recipe.texts:
        taken = 0
        for text in source.documents():
            if not is_validation(text, recipe.data.validation_fraction):
                yield text
                taken += len(text)
            if taken >= budget:
                break


def make_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, checkpoint: Path | None) -> RecurrentGPT2ForCausalLM:
    """A new model, or one that starts from another. (The weights of a checkpoint are loaded by the trainer.)"""
    settings, args = dict(recipe.model), recipe.training
    if checkpoint is not None:
        model = RecurrentGPT2ForCausalLM(resumed_config(checkpoint, settings))
        if (checkpoint / "generation_config.json").exists():  # has exits, if the start had
            model.generation_config = GenerationConfig.from_pretrained(checkpoint, use_cache=True)
    elif args.init_from is not None:
        model = initialized_model(args.init_from, settings, len(tokenizer) if recipe.tasks else 0)
    elif args.from_gpt2 is not None:
        model = RecurrentGPT2ForCausalLM.from_gpt2(
            args.from_gpt2, settings.pop("loop_groups", None), args.allow_pickle, **settings
        )
        model.config.base_model = name_of_base(args.from_gpt2)
        loops = "one loop" if model.config.state_init == "input" else "any number of loops"
        logger.info(f"starting from the GPT-2 {args.from_gpt2}: at {loops}, it computes the same.")
    else:
        settings.setdefault("vocab_size", len(tokenizer))
        settings.setdefault("eos_token_id", tokenizer.eos_token_id)
        settings.setdefault("bos_token_id", tokenizer.bos_token_id)
        model = RecurrentGPT2ForCausalLM(RecurrentGPT2Config(**settings))
    if recipe.tasks:
        model.config.tasks = [source.task.to_dict() for source in recipe.tasks]  # `evaluation.depth` reads them
    config, block_size = model.config, recipe.data.block_size
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} entries, but `vocab_size` is {config.vocab_size}: leave that out, or "
            "make it at least as large."
        )
    if block_size is not None and block_size > config.max_position_embeddings:
        raise ValueError(
            f"`block_size` is {block_size}, but the model has {config.max_position_embeddings} positions "
            "(`max_position_embeddings`)."
        )
    return model


# What of the config may change when training goes on: the loops, not the weights. A new run may change more.
ON_RESUME = {"num_loops", "mean_loops", "loop_sigma", "backprop_loops", "loop_noise", "cache_strategy"}
OF_A_NEW_RUN = ON_RESUME | {"max_position_embeddings", "embd_dropout", "attention_dropout", "resid_dropout"}


def resumed_config(checkpoint: Path, settings: dict[str, Any]) -> RecurrentGPT2Config:
    """The config of a checkpoint, with what the recipe says now of what may change."""
    config = RecurrentGPT2Config.from_pretrained(checkpoint)
    changed = changed_settings(config, settings, ON_RESUME, f"the checkpoint {checkpoint} has", "on resume")
    # The trainer turned the cache off; the generation config is made from this one, and must not.
    return RecurrentGPT2Config(**{**config.to_dict(), **changed, "use_cache": True})


def changed_settings(
    config: RecurrentGPT2Config, settings: dict[str, Any], may_change: set[str], who_has: str, when: str
) -> dict[str, Any]:
    """The settings that differ from a config; fails where one of them must not."""
    changed = {name: value for name, value in settings.items() if getattr(config, name) != value}
    for name, value in changed.items():
        was = getattr(config, name)
        if name not in may_change:
            raise ValueError(
                f"`{name}` is {value}, but {who_has} {was}: it can't change {when}, only "
                f"{', '.join(sorted(may_change))} can."
            )
        logger.info(f"`{name}` changes from {was} to {value}")
    return changed


def check_start(field: str, name: str, wanted: type[PretrainedConfig], other: str) -> None:
    """Fails where the model to start from is nothing, or another architecture: before a tokenizer is trained for it."""
    try:
        model_type = AutoConfig.from_pretrained(name).model_type
    except (OSError, ValueError) as error:
        raise ValueError(f"`{field}` is {name!r}, but there is no such checkpoint: {error}") from error
    if model_type != wanted.model_type:
        kinds = {RecurrentGPT2Config.model_type: "RecurrentGPT2", GPT2Config.model_type: "GPT-2"}
        advice = f" Give it as `{other}`." if model_type in kinds else ""
        raise ValueError(
            f"`{field}` is {name!r}, which is no {kinds[wanted.model_type]} but a model of type {model_type!r}.{advice}"
        )


def initialized_model(name: str, settings: dict[str, Any], vocab_size: int = 0) -> RecurrentGPT2ForCausalLM:
    """A trained model to start from, with the settings of a new run, and entries for new words of tasks."""
    model = RecurrentGPT2ForCausalLM.from_pretrained(name)
    changed = changed_settings(model.config, settings, OF_A_NEW_RUN, f"`init_from` {name} has", "from it")
    if changed:
        old, state = model, model.state_dict()
        positions = changed.get("max_position_embeddings", old.config.max_position_embeddings)
        table = state["model.embed_positions.weight"]
        # Of positions that are new, the embeddings of those before them, over again.
        state["model.embed_positions.weight"] = table[torch.arange(positions) % len(table)]
        model = RecurrentGPT2ForCausalLM(RecurrentGPT2Config(**{**old.config.to_dict(), **changed}))
        model.load_state_dict(state)
        model.generation_config = old.generation_config
    if getattr(model.generation_config, "num_loops", None) is not None:
        model.generation_config.num_loops = model.config.num_loops  # a policy's cap and the config's loops are one
    if vocab_size > model.config.vocab_size:
        model.resize_token_embeddings(vocab_size)
    model.config.base_model = name_of_base(name)
    policy = getattr(model.generation_config, "exit_policy", None)
    logger.info(
        f"starting from {name}: its weights, tokenizer and config, with a fresh optimiser. Its exits "
        f"({policy or 'fixed'}, {model.config.num_loops} loops) are kept; what was promised "
        "for them is not: run `evaluation.calibrate`."
    )
    return model


def name_of_base(name: str) -> str:
    """A name on the Hub, or `./folder` where the base is a folder here."""
    return f"./{Path(name).resolve().name}" if Path(name).exists() else name


def make_base(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> RecurrentGPT2ForCausalLM | None:
    """The model that a run starts from, where it is to be kept near it. Also after a resume: the start, as it was."""
    args = recipe.training
    if args.kl_weight == 0:
        return None
    if args.from_gpt2 is not None:
        return RecurrentGPT2ForCausalLM.from_gpt2(args.from_gpt2, [], args.allow_pickle)
    base = initialized_model(args.init_from, {}, len(tokenizer) if recipe.tasks else 0)
    asked = recipe.model.get("max_position_embeddings", base.config.max_position_embeddings)
    if asked > base.config.max_position_embeddings:
        raise ValueError(
            f"`max_position_embeddings` is {asked}, but with `kl_weight` the model is kept near {args.init_from}, "
            f"which has {base.config.max_position_embeddings}: leave out the one or the other."
        )
    return base


def make_feed(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, config: RecurrentGPT2Config) -> TaskFeed | None:
    """What makes the rows of tasks, if there are any."""
    args = recipe.training
    if not recipe.tasks:
        if args.most_loops is not None:
            raise ValueError(f"`most_loops` is {args.most_loops}, but none of the `sources` is a task: leave it out.")
        return None
    args.remove_unused_columns = False  # they are not the model's: which task a row is of
    text_weight = sum(source.weight for source in recipe.texts) or None
    feed = TaskFeed(recipe.tasks, tokenizer, args.seed, args.process_index, text_weight)
    for task in feed.tasks:
        if task.length + 1 > config.max_position_embeddings:
            raise ValueError(
                f"a sequence of task {task.name} with {task} has {task.length} tokens and an end, but there are "
                f"{config.max_position_embeddings} places (`max_position_embeddings`)."
            )
        if args.most_loops is not None and args.most_loops < task.depth:
            raise ValueError(
                f"`most_loops` is {args.most_loops}, but `depth` of task {task.name} is {task.depth}, and a loop does "
                "one step of it: raise the one, or lower the other."
            )
    return feed


def make_blocks(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, config: RecurrentGPT2Config, feed: TaskFeed | None = None
):
    """Training blocks, and the validation blocks that are evaluated: of text and of tasks, where there are both."""
    if feed is None:
        return make_text_blocks(recipe, tokenizer, config)
    of_tasks = feed.validation(recipe.data.eval_blocks)
    if not recipe.texts:
        return TaskRows(recipe.tasks, recipe.training.seed), of_tasks
    text, of_text = make_text_blocks(recipe, tokenizer, config)
    return text, {"text": of_text, "tasks": of_tasks}


def make_text_blocks(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, config: RecurrentGPT2Config):
    sources, data = recipe.texts, recipe.data
    block_size = data.block_size or config.max_position_embeddings
    record = Path(recipe.training.output_dir) / "blocks.json"
    if not recipe.training.resume and recipe.training.process_index == 0:
        record.unlink(missing_ok=True)
    maker = BlockMaker(tokenizer, block_size, data.validation_fraction, Path(data.data_cache).expanduser(), record)
    if any(source.streaming for source in sources):
        stream = StreamedBlocks(sources, tokenizer, block_size, data.validation_fraction, recipe.training.seed)
        per_source = -(-data.eval_blocks // len(sources))
        return stream, list(chain(*(first_validation_blocks(source, maker, per_source) for source in sources)))
    train_blocks = mixed_blocks(maker, sources, validation=False, seed=recipe.training.seed)
    validation = mixed_blocks(maker, sources, validation=True, seed=recipe.training.seed)
    count = min(data.eval_blocks, len(validation))
    # Spread over the whole, so that every source is there.
    return train_blocks, validation.select([place * len(validation) // count for place in range(count)])


def describe(model: RecurrentGPT2ForCausalLM, args: RecurrentTrainingArguments) -> None:
    per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    mean = model.config.mean_loops
    loops = f"always {mean}" if model.config.loop_sigma is None else f"drawn with mean {mean + 1}"
    loops = loops if args.most_loops is None else f"up to {args.most_loops}"
    logger.info(
        f"{model.num_parameters():,} parameters, loop groups {model.config.loop_groups}, loops {loops}; "
        f"{per_step} sequences a step, {args.world_size} process(es) on {args.device}"
    )


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, StrictDataclassError) as error:
        sys.exit(f"error: {error}")
