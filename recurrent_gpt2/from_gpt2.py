"""Turns a pretrained GPT-2 into a looped model that computes the same, to continue training from.

What GPT-2's block has and the paper's has not is set in the config: layer norms, biases, no norms on the outputs, and
embeddings that are not scaled. All weights are then GPT-2's own. How loops begin depends on `state_init`:

- `zeros`: A_g starts as [0 ; I]. It passes the group's input on and ignores the state, so that a loop of any length
  gives what the layers gave that it was made of. One loop never reads a state: whatever is trained, it stays a plain
  pass through the layers, and the state's half of A_g acts from the second loop on.
- `input`: A_g starts as the mean of state and input. The start state is the input, so that one loop gives what the
  layers gave; the next ones go on from there, and loops have something to learn from at once.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel

from .configuration_recurrent_gpt2 import RecurrentGPT2Config

# What GPT-2's block is, in settings of ours.
GPT2_BLOCK = {"norm": "layer_norm", "use_bias": True, "output_norms": False, "scale_embeddings": False}


def load_gpt2(name: str | Path, allow_pickle: bool = False) -> GPT2LMHeadModel:
    """By its name on the Hub or from a folder. A model of another type would load too, with random weights."""
    if not isinstance(name, str | Path):
        raise ValueError(f"`gpt2` is a {type(name).__name__}, but must be a GPT2LMHeadModel, or the name of one.")
    model_type = AutoConfig.from_pretrained(name).model_type
    if model_type != GPT2Config.model_type:
        raise ValueError(f"`gpt2` is {name}, which is no GPT-2 but a model of type {model_type!r}.")
    try:
        return GPT2LMHeadModel.from_pretrained(name, use_safetensors=None if allow_pickle else True, weights_only=True)
    except OSError as error:
        if allow_pickle or "safetensors" not in str(error):
            raise
        raise OSError(
            f"`gpt2` is {name}, which has no weights in safetensors format. `allow_pickle=True` reads its pickle "
            "(pytorch_model.bin), by an unpickler that knows tensors only."
        ) from error


def config_from_gpt2(
    gpt2: GPT2LMHeadModel, loop_groups: list[list[int]] | None, **settings: Any
) -> RecurrentGPT2Config:
    """GPT-2's block and sizes, and the settings of the loops."""
    old = gpt2.config
    if old.model_type != GPT2Config.model_type:  # as its config file has it, whatever class it was loaded by
        raise ValueError(f"`gpt2` is {old.name_or_path}, which is no GPT-2 but a model of type {old.model_type!r}.")
    if not old.scale_attn_weights or old.scale_attn_by_inverse_layer_idx:
        raise ValueError("this GPT-2 scales its attention in its own way (`scale_attn_...`), which has no place here.")
    own = {
        "vocab_size": old.vocab_size,
        "hidden_size": old.n_embd,
        "num_hidden_layers": old.n_layer,
        "num_attention_heads": old.n_head,
        "intermediate_size": old.n_inner or 4 * old.n_embd,
        "max_position_embeddings": old.n_positions,
        "hidden_act": old.activation_function,
        "rms_norm_eps": old.layer_norm_epsilon,
        "tie_word_embeddings": old.tie_word_embeddings,
        **GPT2_BLOCK,
    }
    for name in own.keys() & settings.keys():
        if settings.pop(name) != own[name]:
            raise ValueError(f"`{name}` is GPT-2's own, {own[name]}, and can't be chosen: leave it out.")
    if loop_groups is None:  # the paper's three groups, at the same relative depth
        first = old.n_layer // 3
        loop_groups = [[first], [first + 1, first + 2], [first + 3]] if old.n_layer >= 6 else [[old.n_layer // 2]]
    defaults = {
        "bos_token_id": old.bos_token_id,
        "eos_token_id": old.eos_token_id,
        "pad_token_id": old.pad_token_id,
        "state_init": "zeros",
        "initializer": "normal",
    }
    return RecurrentGPT2Config(loop_groups=loop_groups, **own, **{**defaults, **settings})


@torch.no_grad()
def load_gpt2_weights(model, gpt2: GPT2LMHeadModel) -> None:
    """Sets the weights of a RecurrentGPT2ForCausalLM, all of them, from a GPT-2 of the same size."""
    old = gpt2.transformer
    places = {
        "model.embed_tokens": old.wte,
        "model.embed_positions": old.wpe,
        "model.norm": old.ln_f,
        "lm_head": gpt2.lm_head,
    }
    for index, block in enumerate(old.h):
        prefix = f"model.layers.{index}."
        places |= {
            prefix + "attention_input_norm": block.ln_1,
            prefix + "attention.qkv_proj": block.attn.c_attn,
            prefix + "attention.o_proj": block.attn.c_proj,
            prefix + "mlp_input_norm": block.ln_2,
            prefix + "mlp.up_proj": block.mlp.c_fc,
            prefix + "mlp.down_proj": block.mlp.c_proj,
        }
    weights = {}
    for name, module in places.items():
        for kind, value in module.named_parameters():
            is_conv = type(module).__name__ == "Conv1D" and kind == "weight"  # GPT-2 has its matrices transposed
            weights[f"{name}.{kind}"] = value.T if is_conv else value
    of_state = 0.5 if model.config.state_init == "input" else 0.0
    identity = torch.eye(model.config.hidden_size)
    for group in range(len(model.model.loop_inputs)):
        prefix = f"model.loop_inputs.{group}."
        weights[prefix + "state_proj.weight"] = of_state * identity
        weights[prefix + "input_proj.weight"] = (1 - of_state) * identity
    model.load_state_dict(weights)
