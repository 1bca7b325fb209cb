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

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedTokenizerBase, set_seed

from recurrent_gpt2 import RecurrentGPT2Config, RecurrentGPT2ForCausalLM

from .data import BlockMaker, StreamedBlocks, first_validation_blocks, is_validation, mixed_blocks
from .recipe import Recipe, RecurrentTrainingArguments, load_recipe, recipe_parser
from .tasks import extended_tokenizer, task_tokenizer
from .tasks.feed import MixedRows, TaskFeed, accuracy_metrics
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
    args.dataloader_pin_memory &= args.device.type != "cpu"
    checkpoint = find_checkpoint(recipe)
    set_seed(args.seed)
    with args.main_process_first(desc="data"):
        tokenizer = make_tokenizer(recipe, checkpoint)
        model = make_model(recipe, tokenizer, checkpoint)
        fit_to_model(tokenizer, model)
        feed = make_feed(recipe, tokenizer, model.config)
        train_blocks, validation_blocks = make_blocks(recipe, tokenizer, model.config, feed)
    trainer = RecurrentTrainer(
        model, args, train_dataset=train_blocks, eval_dataset=validation_blocks, processing_class=tokenizer,
        tasks=feed, **(accuracy_metrics() if feed is not None and not recipe.texts else {}),
    )  # fmt: skip
    if args.geometry_loops > 0 and model.config.loop_groups:
        held_out = [validation_blocks[place] for place in range(min(args.geometry_blocks, len(validation_blocks)))]
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
    if found:
        raise FileExistsError(
            f"`output_dir` {output_dir} has checkpoints already: add --resume to go on, or choose another --output_dir."
        )
    return None


def make_tokenizer(recipe: Recipe, checkpoint: Path | None) -> PreTrainedTokenizerBase:
    if checkpoint is not None:
        return load_tokenizer(str(checkpoint))
    tasks = [source.task for source in recipe.tasks]
    if recipe.data.tokenizer != "train":
        return extended_tokenizer(load_tokenizer(recipe.data.tokenizer), tasks)
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
    """A new model, or one that starts from GPT-2. (The weights of a checkpoint are loaded by the trainer.)"""
    settings = dict(recipe.model)
    if checkpoint is not None:
        model = RecurrentGPT2ForCausalLM(resumed_config(checkpoint, settings))
    elif recipe.training.from_gpt2 is not None:
        model = RecurrentGPT2ForCausalLM.from_gpt2(
            recipe.training.from_gpt2, settings.pop("loop_groups", None), **settings
        )
        logger.info(f"from {recipe.training.from_gpt2}:\n{model.conversion_report}")
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


def resumed_config(checkpoint: Path, settings: dict[str, Any]) -> RecurrentGPT2Config:
    """The config of a checkpoint, with what the recipe says now of what may change: the loops, not the weights."""
    config = RecurrentGPT2Config.from_pretrained(checkpoint)
    may_change = {"num_loops", "mean_loops", "loop_sigma", "backprop_loops", "loop_noise", "cache_strategy"}
    changed = {name: value for name, value in settings.items() if getattr(config, name) != value}
    for name, value in changed.items():
        if name not in may_change:
            was = getattr(config, name)
            raise ValueError(
                f"`{name}` is {value}, but the checkpoint {checkpoint} has {was}: it can't change on resume."
            )
        logger.info(f"`{name}` changes from {getattr(config, name)} to {value}")
    # The trainer turned the cache off; the generation config is made from this one, and must not.
    return RecurrentGPT2Config(**{**config.to_dict(), **changed, "use_cache": True})


def make_feed(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, config: RecurrentGPT2Config) -> TaskFeed | None:
    """What makes the rows of tasks, if there are any."""
    args, data = recipe.training, recipe.data
    if not recipe.tasks:
        if args.most_loops is not None:
            raise ValueError(f"`most_loops` is {args.most_loops}, but none of the `sources` is a task: leave it out.")
        return None
    args.remove_unused_columns = False  # they are not the model's: which task a row is of
    block_size = data.block_size or (config.max_position_embeddings if recipe.texts else None)
    feed = TaskFeed(recipe.tasks, tokenizer, args.seed, args.process_index, block_size)
    limit = min(config.max_position_embeddings, block_size or config.max_position_embeddings)
    for task in feed.tasks:
        if task.length + 1 > limit:
            raise ValueError(
                f"a sequence of task {task.name} with {task} has {task.length} tokens and an end, but there are "
                f"{limit} places (`max_position_embeddings`, `block_size`)."
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
    """Training blocks, and the validation blocks that are evaluated. Rows of tasks are left for `feed` to make."""
    if feed is None:
        return make_text_blocks(recipe, tokenizer, config)
    if any(source.streaming for source in recipe.texts):
        raise ValueError("text can't be streamed beside tasks: leave `streaming` out.")
    text, validation = None, feed.validation(recipe.data.eval_blocks)
    if recipe.texts:
        text, of_text = make_text_blocks(recipe, tokenizer, config)
        validation = [*of_text, *validation]
    text_weight = sum(source.weight for source in recipe.texts)
    return MixedRows(text, text_weight, recipe.tasks, recipe.training.seed), validation


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
