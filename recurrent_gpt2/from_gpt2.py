"""Turns a pretrained GPT-2 into a looped model to continue training from.

What GPT-2 has and RecurrentGPT2 has not, and what is done about it:

- LayerNorm subtracts the mean, RMSNorm does not. The mean is taken out of everything that writes to the residual stream
  instead (embeddings and output projections), after which the two agree exactly. (A head that is tied to the
  embeddings changes with them, by a little: the mean of every token's row is missing in its logit.)
- Embeddings are multiplied by sqrt(d) on the way in: they are divided by it, and the final norm multiplied.
- The sandwich norms n2 and n4 rescale the residual stream. Their weights are set to the size that the stream has at
  that place in GPT-2, measured on text that GPT-2 itself samples (or that is given), so that they change little.
- Loops: A_g passes the group's input on and ignores the state, so that a group starts as the layers it was.
- Biases have no place here and are dropped. That is nearly all that the loss rises by at the start.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

from .configuration_recurrent_gpt2 import RecurrentGPT2Config

logger = logging.get_logger(__name__)


@dataclass
class ConversionReport:
    """Names of the new model's parameters that were carried over or set, and of GPT-2's that were dropped."""

    carried_over: list[str] = field(default_factory=list)
    initialized: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = {name: getattr(self, name) for name in ("carried_over", "initialized", "dropped")}
        return "\n".join(f"{name} ({len(names)}): {', '.join(names)}" for name, names in parts.items())


def check_is_gpt2(gpt2: Any) -> None:
    """Fails where it is another model. One of another type that was loaded as a GPT-2 has random weights."""
    if not isinstance(gpt2, GPT2LMHeadModel):
        raise ValueError(f"`gpt2` is a {type(gpt2).__name__}, but must be a GPT2LMHeadModel, or the name of one.")
    if gpt2.config.model_type != GPT2Config.model_type:  # as its config file has it
        raise ValueError(
            f"`gpt2` is {gpt2.config.name_or_path}, which is no GPT-2 but a model of type "
            f"{gpt2.config.model_type!r}: its weights have no place here."
        )


def config_from_gpt2(
    gpt2: GPT2LMHeadModel, loop_groups: list[list[int]] | None, **settings: Any
) -> RecurrentGPT2Config:
    """GPT-2's sizes, activation and epsilon, and the settings of the loops."""
    check_is_gpt2(gpt2)
    old = gpt2.config
    sizes = {
        "vocab_size": old.vocab_size,
        "hidden_size": old.n_embd,
        "num_hidden_layers": old.n_layer,
        "num_attention_heads": old.n_head,
        "intermediate_size": old.n_inner or 4 * old.n_embd,
        "max_position_embeddings": old.n_positions,
    }
    for name in sizes.keys() & settings.keys():
        if settings.pop(name) != sizes[name]:
            raise ValueError(f"`{name}` is GPT-2's own, {sizes[name]}, and can't be chosen: leave it out.")
    if loop_groups is None:  # the paper's three groups, at the same relative depth
        first = old.n_layer // 3
        loop_groups = [[first], [first + 1, first + 2], [first + 3]] if old.n_layer >= 6 else [[old.n_layer // 2]]
    defaults = {
        "hidden_act": old.activation_function,
        "rms_norm_eps": old.layer_norm_epsilon,
        "bos_token_id": old.bos_token_id,
        "eos_token_id": old.eos_token_id,
        "tie_word_embeddings": old.tie_word_embeddings,
    }
    if not old.scale_attn_weights or old.scale_attn_by_inverse_layer_idx:
        raise ValueError("this GPT-2 scales its attention in its own way (`scale_attn_...`), which has no place here.")
    return RecurrentGPT2Config(loop_groups=loop_groups, **sizes, **{**defaults, **settings})


@torch.no_grad()
def load_gpt2_weights(model, gpt2: GPT2LMHeadModel, calibration_ids: torch.Tensor | None = None) -> ConversionReport:
    """Sets the weights of a RecurrentGPT2ForCausalLM from a GPT-2 of the same size."""
    scale = model.config.hidden_size**0.5
    if calibration_ids is None:
        calibration_ids = sample_text(gpt2)
    sizes = residual_sizes(gpt2, calibration_ids)
    report = ConversionReport()

    def carry(name: str, value: torch.Tensor) -> None:
        model.get_parameter(name).copy_(value)
        report.carried_over.append(name)

    old = gpt2.transformer
    carry("model.embed_tokens.weight", _centered(old.wte.weight) / scale)
    carry("model.embed_positions.weight", _centered(old.wpe.weight) / scale)
    carry("model.norm.weight", old.ln_f.weight * scale)
    if not model.config.tie_word_embeddings:  # the final norm is scaled for a head that is
        carry("lm_head.weight", gpt2.lm_head.weight / scale)
    for index, block in enumerate(old.h):
        prefix = f"model.layers.{index}."
        carry(prefix + "attention_input_norm.weight", block.ln_1.weight)
        carry(prefix + "attention.qkv_proj.weight", block.attn.c_attn.weight.T)
        carry(prefix + "attention.o_proj.weight", _centered(block.attn.c_proj.weight).T)
        carry(prefix + "mlp_input_norm.weight", block.ln_2.weight)
        carry(prefix + "mlp.up_proj.weight", block.mlp.c_fc.weight.T)
        carry(prefix + "mlp.down_proj.weight", _centered(block.mlp.c_proj.weight).T)
        for name, size in zip(("attention_output_norm", "mlp_output_norm"), sizes[index], strict=True):
            model.get_parameter(f"{prefix}{name}.weight").fill_(size)
            report.initialized.append(f"{prefix}{name}.weight")
    for group, loop_input in enumerate(model.model.loop_inputs):
        loop_input.state_proj.weight.zero_()
        torch.nn.init.eye_(loop_input.input_proj.weight)
        report.initialized += [f"model.loop_inputs.{group}.{half}.weight" for half in ("state_proj", "input_proj")]
    report.dropped = [name for name, _ in gpt2.named_parameters() if name.endswith(".bias")]
    logger.info(f"from GPT-2:\n{report}")
    return report


def sample_text(gpt2: GPT2LMHeadModel, rows: int = 8, length: int = 64) -> torch.Tensor:
    """Text that GPT-2 makes up, for calibration where none is given."""
    length = min(length, gpt2.config.n_positions)
    first = gpt2.config.bos_token_id
    if first is None or first >= gpt2.config.vocab_size:  # the default is GPT-2's own, whatever the vocabulary
        first = 0
    start = torch.full((rows, 1), first, device=gpt2.device)
    options = {"do_sample": True, "top_k": 0, "min_length": length, "max_length": length}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return gpt2.generate(start, attention_mask=torch.ones_like(start), eos_token_id=None, **options)


def residual_sizes(gpt2: GPT2LMHeadModel, ids: torch.Tensor) -> list[tuple[float, float]]:
    """Root mean square of GPT-2's residual stream, without its mean, behind attention and MLP of every layer: the
    median over tokens, since the first token of a text is often far off."""
    sizes: list[float] = []

    def measure(hidden: torch.Tensor) -> None:
        sizes.append(_centered(hidden).pow(2).mean(-1).sqrt().median().item())

    hooks = []
    for block in gpt2.transformer.h:  # the stream behind attention is what the second norm reads
        hooks.append(block.ln_2.register_forward_pre_hook(lambda module, inputs: measure(inputs[0])))
        hooks.append(block.register_forward_hook(lambda module, inputs, output: measure(_first(output))))
    try:
        gpt2.transformer(ids[:, : gpt2.config.n_positions], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return list(zip(sizes[::2], sizes[1::2], strict=True))


def _first(output):
    return output[0] if isinstance(output, tuple) else output


def _centered(weight: torch.Tensor) -> torch.Tensor:
    return weight - weight.mean(-1, keepdim=True)
