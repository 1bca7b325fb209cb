"""A recipe: all that a run depends on, in one flat YAML file, any field of which the command line may override."""

import argparse
import difflib
import inspect
import math
import re
import textwrap
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

import yaml
from transformers import HfArgumentParser, TrainingArguments

from recurrent_gpt2 import RecurrentGPT2Config
from recurrent_gpt2.exit_policies import resolve_exit_policy

from .data import Source
from .tasks import TaskSource


class YamlLoader(yaml.SafeLoader):
    """YAML 1.2 scalars: `no` is a word (PyYAML's YAML 1.1 has it false) and 1e-3 is a number (there, a word)."""


YamlLoader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern) for tag, pattern in resolvers if tag not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
YamlLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|false)$", re.IGNORECASE), list("tTfF"))
YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?$|^[-+]?\.inf$|^\.nan$", re.IGNORECASE),
    list("-+.0123456789"),
)


def read_yaml(text: str) -> Any:
    return yaml.load(text, Loader=YamlLoader)


@dataclass
class DataArguments:
    """
    Args:
        sources: Paths or mappings, see `training.data.Source`, and depth tasks, see `training.tasks`.
        tokenizer: Name on the Hub, folder, or `train`: train one on the corpus. Left out: that of the model that the
            run starts from, and else `train`. Tasks alone bring their own.
        tokenizer_vocab_size: Entries of a tokenizer that is trained.
        tokenizer_characters: Characters of text that it is trained on.
        block_size: Tokens of a training sequence; all positions of the model when left out.
        validation_fraction: Share of documents held out.
        eval_blocks: Blocks that the loss is evaluated on.
        data_cache: Folder for tokenized text.
    """

    sources: list[Any] = field(default_factory=lambda: ["python-docs"])
    tokenizer: str | None = None
    tokenizer_vocab_size: int = 8192
    tokenizer_characters: int = 20_000_000
    block_size: int | None = None
    validation_fraction: float = 0.01
    eval_blocks: int = 64
    data_cache: str = "~/.cache/recurrent_gpt2"

    def __post_init__(self):
        if not isinstance(self.sources, list) or not self.sources:
            raise ValueError(f"`sources` is {self.sources!r}, but must list at least one source.")
        least = {"tokenizer_vocab_size": 257, "tokenizer_characters": 1, "eval_blocks": 1, "block_size": 2}
        for name, bound in least.items():
            value = getattr(self, name)
            if not (isinstance(value, int) and value >= bound) and not (name == "block_size" and value is None):
                raise ValueError(f"`{name}` is {value!r}, but must be an int of at least {bound}.")
        if isinstance(self.validation_fraction, str) or not 0 <= self.validation_fraction < 1:
            raise ValueError(f"`validation_fraction` is {self.validation_fraction!r}, but must be in [0, 1).")


@dataclass
class RecurrentTrainingArguments(TrainingArguments):
    """`TrainingArguments` and:

    Args:
        global_batch_size: Sequences a step on all processes together; `per_device_train_batch_size` follows from it.
        compile: Compile each block (not the loop, so that new loop counts need no new compilation).
        resume: Go on from the newest whole checkpoint in `output_dir`.
        from_gpt2: Name or folder of a GPT-2 that the model starts from, computing what it computes.
        allow_pickle: Read a GPT-2 that is not in safetensors format too, by PyTorch's restricted unpickler.
        init_from: Name or folder of a RecurrentGPT2 that the model starts from: weights, tokenizer and config, but no
            optimiser, schedule or place in the data (which is what `resume` goes on with).
        kl_weight: Of the divergence from the model that the run starts from (of GPT-2: from one loop) in the loss.
        kl_temperature: At which that is measured.
        loop_ramp: Share of the steps in which the loops that are drawn grow from one to what the config says.
        muon_learning_rate: Train the matrices of blocks and loop inputs by Muon, at this rate; `learning_rate` is then
            that of AdamW for embeddings and norms. Left out: AdamW for all.
        most_loops: With tasks, the loops of a step are uniform between the depth of the curriculum and this. Left out:
            as the config has it (`mean_loops`, `loop_sigma`).
        exit_policies: Exit policies (names or mappings) to train with: in a share of
            the micro-steps one of them lets tokens leave their loops early, with gradients, so that others learn to
            read states that have stopped.
        exit_share: That share.
        rest_weight: With tasks, the weight of a loss by which tokens take long steps until their answer stands, and
            rest from then on, so that exit rules can tell. 0: without.
        rest_delay: Steps after its answer stands that may still be long.
        doubt_weight: With tasks, the weight of the loss of the answers after every loop step, by which a token is
            unsure until it has its answer, so that exit rules of confidence can tell. 0: without.
        geometry_loops: Fixed loops at which the geometry is measured while training; 0: it is not.
        geometry_blocks: Held-out blocks that it is measured on.
    """

    global_batch_size: int | None = None
    compile: bool = False
    resume: bool = False
    from_gpt2: str | None = None
    allow_pickle: bool = False
    init_from: str | None = None
    kl_weight: float = 0.0
    kl_temperature: float = 2.0
    loop_ramp: float = 0.0
    muon_learning_rate: float | None = None
    most_loops: int | None = None
    exit_policies: list[Any] = field(default_factory=list)
    exit_share: float = 0.5
    rest_weight: float = 0.0
    rest_delay: int = 1
    doubt_weight: float = 0.0
    geometry_loops: int = 0
    geometry_blocks: int = 4

    def __post_init__(self):
        super().__post_init__()
        for name, least in {"geometry_loops": 0, "geometry_blocks": 1, "rest_delay": 0}.items():
            if not isinstance(getattr(self, name), int) or getattr(self, name) < least:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}, but must be an int of at least {least}.")
        if self.most_loops is not None and (not isinstance(self.most_loops, int) or self.most_loops < 1):
            raise ValueError(f"`most_loops` is {self.most_loops!r}, but must be an int of at least 1.")
        resolve_exit_policy(list(self.exit_policies), len(self.exit_policies))  # fails here rather than in a run
        for name in ("rest_weight", "doubt_weight"):
            value = getattr(self, name)
            if isinstance(value, str | bool) or not 0 <= value < math.inf:
                raise ValueError(f"`{name}` is {value!r}, but must be a number of at least 0.")
        for name, most in {"exit_share": 1, "loop_ramp": 1, "kl_weight": 1e6, "kl_temperature": 1e6}.items():
            value = getattr(self, name)
            if isinstance(value, str | bool) or not 0 <= value <= most or (name == "kl_temperature" and value == 0):
                raise ValueError(f"`{name}` is {value!r}, but must be a number from 0 to {most:g}.")
        if self.from_gpt2 is not None and self.init_from is not None:
            raise ValueError(
                f"`from_gpt2` is {self.from_gpt2!r} and `init_from` {self.init_from!r}: a run starts from one model."
            )
        if self.muon_learning_rate is not None and not (
            isinstance(self.muon_learning_rate, int | float) and 0 < self.muon_learning_rate < math.inf
        ):
            raise ValueError(f"`muon_learning_rate` is {self.muon_learning_rate!r}, but must be a number above 0.")
        if self.global_batch_size is not None:
            parts = self.world_size * self.gradient_accumulation_steps
            if self.global_batch_size % parts != 0:
                raise ValueError(
                    f"`global_batch_size` is {self.global_batch_size}, which {self.world_size} process(es) x "
                    f"{self.gradient_accumulation_steps} `gradient_accumulation_steps` do not divide: change one."
                )
            self.per_device_train_batch_size = self.global_batch_size // parts


# `use_cache` is a field of TrainingArguments too, and says nothing about the model.
MODEL_FIELDS = tuple(name for name in RecurrentGPT2Config.__annotations__ if name != "use_cache")


# Fields of TrainingArguments that would be passed over in silence, and what to do instead.
REFUSED = {
    "resume_from_checkpoint": "use --resume, which goes on from the newest whole checkpoint in `output_dir`.",
}


@dataclass
class Recipe:
    model: dict[str, Any]  # fields of RecurrentGPT2Config
    data: DataArguments
    training: RecurrentTrainingArguments

    @property
    def sources(self) -> list[Source | TaskSource]:
        return [
            TaskSource.parse(given) if isinstance(given, dict) and "task" in given else Source.parse(given)
            for given in self.data.sources
        ]

    @property
    def texts(self) -> list[Source]:
        return [source for source in self.sources if isinstance(source, Source)]

    @property
    def tasks(self) -> list[TaskSource]:
        return [source for source in self.sources if isinstance(source, TaskSource)]


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Reads a recipe and applies overrides of the form `--field value` (or `--field` alone, for true)."""
    path = Path(path)
    if not path.is_file():
        known = ", ".join(str(file) for file in sorted(Path(__file__).parent.glob("recipes/*.yaml")))
        raise FileNotFoundError(f"there is no recipe {path}. The project has: {known}.")
    settings = read_yaml(path.read_text(encoding="utf-8")) or {}
    if not isinstance(settings, dict):
        raise ValueError(f"recipe {path} must be a mapping of fields to values.")
    settings.update(parse_overrides(overrides or []))
    return make_recipe(settings)


def make_recipe(settings: dict[str, Any]) -> Recipe:
    parts = {part: {f.name for f in fields(part) if f.init} for part in (DataArguments, RecurrentTrainingArguments)}
    known = {*MODEL_FIELDS, *(name for names in parts.values() for name in names)} - REFUSED.keys()
    for name in settings:
        if name in REFUSED:
            raise ValueError(f"`{name}` is not taken: {REFUSED[name]}")
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            raise ValueError(f"a recipe has no field {name!r}." + (f" Did you mean {nearest[0]!r}?" if nearest else ""))
    for f in (f for part in parts for f in fields(part) if f.name in settings):
        check_type(f, settings[f.name])
    if isinstance(settings.get("sources"), str | dict):
        settings = {**settings, "sources": [settings["sources"]]}
    data, training = (
        HfArgumentParser(part).parse_dict({k: v for k, v in settings.items() if k in names})[0]
        for part, names in parts.items()
    )
    return Recipe({name: settings[name] for name in MODEL_FIELDS if name in settings}, data, training)


def check_type(f: Field, value: Any) -> None:
    """Fails where a field takes a truth value or a number, and is given something else."""
    kinds = set(get_args(f.type)) or {f.type}
    if kinds == {bool}:
        if not isinstance(value, bool):  # a word would count as true
            raise ValueError(f"`{f.name}` is {value!r}, but must be true or false.")
    elif kinds <= {int, float, type(None)} and not (value is None and type(None) in kinds):
        takes = (int, float) if float in kinds else (int,)
        if isinstance(value, bool) or not isinstance(value, takes):
            raise ValueError(f"`{f.name}` is {value!r}, but must be {'a number' if float in kinds else 'an int'}.")


def recipe_parser(description: str) -> argparse.ArgumentParser:
    """The command line of what takes a recipe; its help lists every field, by what it belongs to."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [-h] recipe [--field value ...]",
        description=description,
        epilog=describe_fields(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", help="a YAML file; any field of it can be given as --field value, too")
    return parser


def describe_fields() -> str:
    ours = {f.name for f in fields(RecurrentTrainingArguments)} - {f.name for f in fields(TrainingArguments)}
    groups = {
        "the model": (RecurrentGPT2Config, MODEL_FIELDS),
        "the data": (DataArguments, {f.name for f in fields(DataArguments)}),
        "a source, where it is a mapping": (Source, {f.name for f in fields(Source)}),
        "training": (RecurrentTrainingArguments, ours),
        "training, as in transformers": (TrainingArguments, {f.name for f in fields(TrainingArguments)}),
    }
    parts = []
    for title, (part, names) in groups.items():
        said, heads = meanings(part), {}  # fields with one meaning stand together
        for f in fields(part):
            if f.name in names and f.init and f.name not in REFUSED:
                meaning = said.get(f.name) or f.metadata.get("help") or "As in every config of transformers."
                heads.setdefault(meaning, []).append(("" if part is Source else "--") + f.name + _default(f))
        lines = [_indented(", ".join(shown), 2) + "\n" + _indented(meaning, 6) for meaning, shown in heads.items()]
        parts.append("\n".join([f"{title}:", *lines]))
    return "\n\n".join(parts)


def _default(f: Field) -> str:
    default = f.default_factory() if f.default_factory is not MISSING else f.default
    return "" if default is MISSING or default is None else f" ({default})"


def _indented(text: str, places: int) -> str:
    return textwrap.indent(textwrap.fill(text, 112 - places), " " * places)


def meanings(part: type) -> dict[str, str]:
    """What the docstring of a class says of its fields: `name: meaning`, or `name, name: meaning`."""
    entries = re.findall(r"^ {4}(\w+(?:, \w+)*):(.*(?:\n {8}.*)*)", inspect.getdoc(part) or "", re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}


def parse_overrides(arguments: list[str]) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    name = None
    for argument in arguments:
        if argument.startswith("--"):
            name, _, value = argument[2:].partition("=")
            name = name.replace("-", "_")
            overrides[name] = read_yaml(value) if value else True
        elif name is None or overrides[name] is not True:
            raise ValueError(f"{argument!r} does not follow the name of a field: write --field value.")
        else:
            overrides[name] = read_yaml(argument)
    return overrides
