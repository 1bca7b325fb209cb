"""What the plugin settles without vLLM; `tests/serving` has it inside."""

import importlib
import tomllib
from types import SimpleNamespace

import pytest

from recurrent_gpt2.vllm_plugin import LoopSettings
from tests.helpers import ROOT, tiny_config

KL = {"name": "kl", "threshold": 0.2}


def settings(generation_config=None, override=None, **config):
    """As of an engine with this generation config in the checkpoint and these overrides on the command line."""
    model_config = SimpleNamespace(
        hf_config=tiny_config(**config),
        try_get_generation_config=lambda: generation_config or {},
        override_generation_config=override or {},
    )
    return LoopSettings.of(SimpleNamespace(model_config=model_config))


def test_the_loops_are_those_that_generate_would_take():
    plain = settings()
    assert (plain.num_loops, plain.is_adaptive, plain.cache_strategy) == ([5, 5, 5], False, "per_step")
    of_checkpoint = settings({"exit_policy": KL, "num_loops": 7}, cache_strategy="last_step")
    assert (of_checkpoint.num_loops, of_checkpoint.cache_strategy) == ([7, 7, 7], "last_step")
    assert [policy.threshold for policy in of_checkpoint.policies] == [0.2] * 3
    given = settings({"exit_policy": KL, "num_loops": 7}, {"exit_policy": None, "num_loops": [1, 2, 3]})
    assert (given.num_loops, given.is_adaptive) == ([1, 2, 3], False)


@pytest.mark.parametrize("override", [{"exit_policy": "kll"}, {"num_loops": 0}, {"cache_strategy": "static"}])
def test_what_is_not_known_is_refused(override):
    with pytest.raises(ValueError, match=next(iter(override))):
        settings(override=override)


def test_the_entry_point_names_the_function():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["recurrent_gpt2"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))
