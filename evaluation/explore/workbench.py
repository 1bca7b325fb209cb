"""Checkpoints that the page may open, and exit policies from what stands in its fields."""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from recurrent_gpt2 import RecurrentGPT2ForCausalLM, available_exit_policies
from recurrent_gpt2.exit_policies import _registered, exit_policy_to_json, resolve_exit_policy
from training.promise import guarantee_of
from training.tasks.task import Task

from ..common import describe_loops, load_checkpoint, loops_of_generate
from ..depth import tasks_of

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
FROM_HUB = ("*.json", "*.safetensors", "*.txt")  # what is fetched of a checkpoint; its code only where it is trusted
MOST_BYTES = 2 * 1024**3  # of the weights of a checkpoint that somebody names on the page
MOST_OPEN = 4  # checkpoints from the Hub that are kept in memory
MOST_LOOPS = 256
OWN, AS_JSON = "the checkpoint's own", "as JSON"


@dataclass
class Opened:
    """A checkpoint that is loaded."""

    name: str
    model: RecurrentGPT2ForCausalLM
    tokenizer: PreTrainedTokenizerBase
    tasks: list[Task]
    promise: str | None = None  # what its calibration promises

    @property
    def group_names(self) -> list[str]:
        layers = [f"layer {g[0]}" if len(g) == 1 else f"layers {g[0]}-{g[-1]}" for g in self.model.config.loop_groups]
        return [f"group {group} ({name})" for group, name in enumerate(layers)]

    def encode(self, text: str) -> torch.Tensor:
        """The tokens [n] of a text, at least one; fails with a sentence where they are more than the positions."""
        if not text.strip():
            raise ValueError("there is no text: type some.")
        ids = self.tokenizer(text, return_tensors="pt", verbose=False).input_ids[0].long()
        limit = self.model.config.max_position_embeddings
        if len(ids) > limit:
            raise ValueError(f"the text has {len(ids)} tokens, but {self.name} has positions for {limit}: shorten it.")
        return ids


class Workbench:
    """Opens checkpoints by name: those that the page was started with, and others from the Hub.

    A visitor names a checkpoint on the page, so a name is never a path: only those given at the start are. Weights are
    safetensors and the code is the installed package; the code of a checkpoint runs only with `trust_remote_code`.
    """

    def __init__(self, checkpoints: Sequence[str], trust_remote_code: bool = False):
        if not checkpoints:
            raise ValueError("there is no checkpoint to show: name one.")
        self.paths = {_name_of(path): path for path in checkpoints}
        self.trust_remote_code = trust_remote_code
        self._given: dict[str, Opened] = {}
        self._from_hub: OrderedDict[str, Opened] = OrderedDict()
        self._lock = threading.Lock()  # two visitors may name the same checkpoint at once

    @property
    def names(self) -> list[str]:
        return list(self.paths)

    @property
    def with_tasks(self) -> list[str]:
        return [name for name in self.names if self.open(name).tasks]

    def open(self, name: str) -> Opened:
        name = (name or "").strip()
        with self._lock:
            if name in self.paths:
                if name not in self._given:
                    path = self.paths[name]
                    self._given[name] = self._load(name, path if Path(path).is_dir() else self._fetch(path))
                return self._given[name]
            if name not in self._from_hub:
                self._from_hub[name] = self._load(name, self._fetch(name, MOST_BYTES))
                if len(self._from_hub) > MOST_OPEN:
                    self._from_hub.popitem(last=False)
            self._from_hub.move_to_end(name)
            return self._from_hub[name]

    def _fetch(self, name: str, most_bytes: int | None = None) -> str:
        """The folder of a checkpoint on the Hub; one that a visitor named, after a look at its size."""
        if not HUB_NAME.fullmatch(name) or ".." in name:
            known = ", ".join(self.names)
            raise ValueError(f"the checkpoint is {name!r}, but must be one of {known}, or owner/name on the Hub.")
        try:
            if most_bytes is not None:
                files = HfApi().model_info(name, files_metadata=True).siblings or []
                size = sum(file.size or 0 for file in files if file.rfilename.endswith(".safetensors"))
                if size > most_bytes:
                    raise ValueError(f"the weights of {name} are {size / 1e9:.1f} GB, more than this page opens.")
            code = ["*.py"] if self.trust_remote_code else []
            return snapshot_download(name, allow_patterns=[*FROM_HUB, *code])
        except ValueError:
            raise
        except Exception as error:  # what the network, the Hub and their clients raise is of many kinds
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"{name} can't be had from the Hub: {reason}") from error

    def _load(self, name: str, path: str) -> Opened:
        if self.trust_remote_code and _model_type(path) != "recurrent_gpt2":
            model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, dtype=torch.float32).eval()
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
            if not hasattr(model, "decode_states") or not getattr(model.config, "loop_groups", None):
                raise ValueError(f"{name} is a {type(model).__name__}, which has no loops that this page knows.")
        else:
            if (kind := _model_type(path)) not in (None, "recurrent_gpt2"):
                raise ValueError(
                    f"{name} is a model of type {kind!r}, not recurrent_gpt2. Its own code is run only where the page "
                    "was started with --trust-remote-code."
                )
            model, tokenizer = load_checkpoint(path, optimize=True)
        own = loops_of_generate(model)
        resolve_exit_policy(own["exit_policy"], len(own["num_loops"]))
        if max(own["num_loops"]) > MOST_LOOPS:
            raise ValueError(f"{name} takes {max(own['num_loops'])} loops, but {MOST_LOOPS} are the most here.")
        return Opened(name, model, tokenizer, tasks_of(model), guarantee_of(Path(path)))


def _name_of(path: str) -> str:
    return Path(path).resolve().name if Path(path).is_dir() else path


def _model_type(path: str) -> str | None:
    """None: it is not known before it is loaded."""
    config = Path(path) / "config.json"
    return json.loads(config.read_text()).get("model_type") if config.is_file() else None


# Exit policies from fields


@dataclass(frozen=True)
class Field:
    """A setting of a policy, and how it is asked for."""

    name: str
    kind: str  # number, count, switch, choice, word or json
    default: Any
    choices: tuple[str, ...] = ()


def policy_choices() -> list[str]:
    return [OWN, *available_exit_policies(), AS_JSON]


def fields_of(name: str) -> list[Field]:
    """The settings of a registered policy, as its class declares them."""
    cls, found = _registered(name), []
    if cls is None or name == "fixed":
        return []
    for declared in fields(cls):
        default = None if declared.default is MISSING else declared.default
        kind, choices = _kind_of(str(declared.type), default), ()
        if declared.name == "normalize" and hasattr(cls, "default_thresholds"):
            kind, choices = "choice", tuple(cls.default_thresholds)
        found.append(Field(declared.name, kind, default, choices))
    return found


def _kind_of(declared: str, default: Any) -> str:
    if isinstance(default, bool) or "bool" in declared:
        return "switch"
    if "float" in declared:
        return "number"
    if isinstance(default, int) or "int" in declared:
        return "count"
    return "word" if isinstance(default, str) else "json"


def read_policy(choice: str, values: dict[str, Any], as_json: str) -> Any:
    """What `loops_of_generate` takes as a policy, from the fields of the page; a ValueError says what is wrong."""
    if choice == OWN:
        return "default"
    if choice == AS_JSON:
        return _read_json("the exit policy", as_json)
    if choice not in available_exit_policies():
        raise ValueError(f"the exit policy is {choice!r}, but must be one of {', '.join(policy_choices())}.")
    settings: dict[str, Any] = {"name": choice}
    for field in fields_of(choice):
        value = values.get(field.name, field.default)
        if value is None or (field.kind == "json" and not value):
            continue  # the default of the class
        if field.kind == "json":
            value = _read_json(f"`{field.name}`", value)
        if field.kind == "count" and isinstance(value, float):
            value = int(value) if value.is_integer() else value
        settings[field.name] = value
    return settings


def _read_json(what: str, text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not JSON: {error}") from error


def read_loops(opened: Opened, choice: Any, loops: str) -> dict[str, Any]:
    """`exit_policy` and `num_loops` for the model, checked; `loops` is empty, a number, or one per group."""
    words = re.split(r"[\s,;]+", str(loops or "").strip("[] \n"))
    counts = [word for word in words if word]
    if not all(re.fullmatch(r"\d{1,6}", word) for word in counts):
        raise ValueError(f"the most loops are {loops!r}, but must be a number, or one per group: 12, or 4 12 4.")
    numbers = [int(word) for word in counts]
    if numbers and not all(1 <= number <= MOST_LOOPS for number in numbers):
        raise ValueError(f"the most loops are {loops!r}, but must be from 1 to {MOST_LOOPS} here.")
    given = None if not numbers else numbers[0] if len(numbers) == 1 else numbers
    found = loops_of_generate(opened.model, choice, given)
    resolve_exit_policy(found["exit_policy"], len(found["num_loops"]))
    return found


def describe_briefly(exit_policy: Any, num_loops: list[int]) -> str:
    """`step_norm (normalize state, threshold 0.1), at most 12 loops`, or `8 fixed loops`."""
    policies = exit_policy_to_json(exit_policy)
    if not isinstance(policies, dict):
        return describe_loops(exit_policy, num_loops)
    usual = {"patience": 1, "min_loops": 1, "normalize": "none", "change": False}
    settings = {key: value for key, value in policies.items() if key != "name" and usual.get(key) != value}
    said = ", ".join(
        f"{key} {value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()
    )
    loops = num_loops[0] if len(set(num_loops)) == 1 else num_loops
    return f"{policies['name']} ({said}), at most {loops} loops"
