import json
import math

import pytest
from huggingface_hub.errors import StrictDataclassError

from recurrent_gpt2 import RecurrentGPT2Config, RecurrentGPT2ForCausalLM
from tests.helpers import tiny_config


def test_the_defaults_are_the_papers_model():
    config = RecurrentGPT2Config()
    assert (config.num_hidden_layers, config.num_attention_heads, config.hidden_size) == (12, 12, 768)
    assert (config.max_position_embeddings, config.vocab_size, config.intermediate_size) == (512, 50257, 3072)
    assert config.loop_groups == [[4], [5, 6], [7]]
    assert (config.mean_loops, config.loop_sigma, config.backprop_loops, config.num_loops) == (12, 0.5, 8, 12)
    assert (config.state_init, config.loop_noise, config.hidden_act, config.rms_norm_eps) == ("noise", 0, "silu", 1e-6)
    assert config.tie_word_embeddings
    assert config.effective_depth == 56


def test_gpt2_names_work():
    config = RecurrentGPT2Config(n_embd=64, n_layer=10, n_head=4, n_positions=128)
    assert (config.hidden_size, config.num_hidden_layers) == (64, 10)
    assert (config.num_attention_heads, config.max_position_embeddings) == (4, 128)
    assert config.intermediate_size == 256
    assert config.n_embd == 64


def test_round_trips_through_json(tmp_path):
    config = tiny_config(
        num_loops=[1, 2, 3], state_init="zeros", loop_noise=0.1, noise_seed=7, cache_strategy="last_step"
    )
    config.save_pretrained(tmp_path)
    loaded = RecurrentGPT2Config.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "recurrent_gpt2"


@pytest.mark.parametrize("loop_groups", [[], [[0]], [[0, 1], [2, 3], [4, 5]], [[5]]])
def test_any_number_of_groups_is_possible(loop_groups):
    assert RecurrentGPT2ForCausalLM(tiny_config(loop_groups=loop_groups)).config.loop_groups == loop_groups


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loop_groups": [[1, 2], [2, 3]]}, "disjoint and in order"),
        ({"loop_groups": [[3], [1]]}, "disjoint and in order"),
        ({"loop_groups": [[1], []]}, "consecutive"),
        ({"loop_groups": [[1, 3]]}, "consecutive"),
        ({"loop_groups": [[2, 1]]}, "consecutive"),
        ({"loop_groups": [[6]]}, "0 to 5"),
        ({"loop_groups": [[-1]]}, "0 to 5"),
        ({"loop_groups": [4]}, "loop_groups"),
        ({"num_loops": [1, 2]}, "3 groups"),
        ({"num_loops": 0}, "from 1 to 10000"),
        ({"num_loops": [1, -1, 1]}, "from 1 to 10000"),
        ({"num_loops": 1.5}, "num_loops"),
        ({"num_loops": True}, "num_loops"),
        ({"hidden_size": 30}, "num_attention_heads"),
        ({"hidden_size": 0}, "from 1 to"),
        ({"hidden_size": 2**63}, "from 1 to 2147483647"),
        ({"vocab_size": 10**400}, "from 1 to"),
        ({"num_hidden_layers": 10**9}, "from 1 to 10000"),
        ({"num_loops": 10**30}, "from 1 to 10000"),
        ({"loop_noise": 10**30}, "from 0 to 1e\\+06"),
        ({"loop_sigma": 1e9}, "from 0 to 10"),
        ({"hidden_act": "no such activation"}, "hidden_act"),
        ({"backprop_loops": 0}, "backprop_loops"),
        ({"state_init": "random"}, "noise, zeros, input"),
        ({"initializer": "magic"}, "takase, normal"),
        ({"cache_strategy": "none"}, "per_step, last_step"),
        ({"mean_loops": math.nan}, "mean_loops"),
        ({"mean_loops": math.inf}, "mean_loops"),
        ({"mean_loops": 0}, "mean_loops"),
        ({"loop_sigma": -0.5}, "loop_sigma"),
        ({"loop_noise": math.nan}, "loop_noise"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps"),
        ({"resid_dropout": 1.0}, "resid_dropout"),
        ({"attention_dropout": math.nan}, "attention_dropout"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
)
def test_an_impossible_config_is_an_error_that_says_what_is_wrong(settings, message):
    with pytest.raises(StrictDataclassError, match=message):
        tiny_config(**settings)
