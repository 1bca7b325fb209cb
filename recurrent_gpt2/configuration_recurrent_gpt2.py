"""Configuration of RecurrentGPT2: a GPT-2-like decoder in which groups of layers are looped independently."""

import math
import sys
from dataclasses import field
from typing import Any, NamedTuple

from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig, strict

STATE_INITS = ("noise", "zeros", "input")
INITIALIZERS = ("takase", "normal")
CACHE_STRATEGIES = ("per_step", "last_step")
NORMS = ("rms_norm", "layer_norm")
GPT2_END_OF_TEXT = 50256
LORA_TARGETS = ("qkv_proj", "o_proj", "up_proj", "down_proj")  # the matrices of the blocks
# Bounds beyond which nothing is meant and much breaks, in ways that do not say why.
MAX_LOOPS = 10_000
MAX_SIZE = 2**31 - 1


class Stage(NamedTuple):
    """A part of the network: layers that are applied once, or those of a loop group."""

    layers: list[int]
    group: int | None = None


@strict
class RecurrentGPT2Config(PreTrainedConfig):
    """Settings of a RecurrentGPT2 model. The defaults are the model of "Two-Scale Latent Dynamics" (Appendix B).

    Args:
        vocab_size, hidden_size, num_hidden_layers, num_attention_heads, max_position_embeddings:
            As in GPT-2, whose names (`n_embd`, `n_layer`, `n_head`, `n_positions`) work too.
        intermediate_size: Width of the MLP; 4 x `hidden_size` when left out.
        hidden_act: Activation of the MLP.
        norm: `rms_norm`, or `layer_norm` (with a bias), as GPT-2 has.
        rms_norm_eps: Epsilon of every norm, of whichever kind.
        output_norms: Whether a block has norms on the sums behind attention and MLP (n2 and n4). GPT-2 has none.
        use_bias: Whether the projections of attention and MLP have biases, as in GPT-2.
        scale_embeddings: Whether embeddings are multiplied by sqrt(`hidden_size`) on the way in. GPT-2's are not.
        embd_dropout, attention_dropout, resid_dropout: Dropout after the embeddings, on the attention weights, and on
            the output of attention and MLP.
        initializer: `takase` (std sqrt(2 / 5d), truncated at 3 sigma, output projections divided by sqrt(2 L_eff)) or
            `normal` (std `initializer_range` everywhere).
        loop_groups: The looped layers: runs of consecutive 0-based layer indices, disjoint and in order. An empty list
            gives a plain GPT.
        num_loops: Loops that inference runs, for all groups or one number per group; the cap under an exit policy.
        mean_loops: r of the training distribution. The count of a group is 1 + Poisson(rate) with
            rate ~ LogNormal(ln r - sigma^2 / 2, sigma), so its true mean is r + 1.
        loop_sigma: sigma of that distribution; `None`: always exactly `mean_loops`.
        backprop_loops: In training, gradients flow through this many last loops of each group; `None`: through all.
        state_init: Start state of a loop: `noise`, `zeros`, or `input` (the output of what comes before the group).
        loop_noise: Scale of noise added to the state before every loop step (the start noise has scale 1).
        noise_seed: In eval mode all noise is a fixed function of this seed, the group and the position.
        cache_strategy: `per_step` (exact) or `last_step` (one slot a layer, an approximation).
    """

    model_type = "recurrent_gpt2"
    keys_to_ignore_at_inference = ["past_key_values", "loop_steps", "loop_trajectory"]
    base_model_tp_plan = {
        "layers.*.attention.qkv_proj": "packed_qkv",
        "layers.*.attention.o_proj": "rowwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    attribute_map = {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "n_inner": "intermediate_size",
        "activation_function": "hidden_act",
        "embd_pdrop": "embd_dropout",
        "attn_pdrop": "attention_dropout",
        "resid_pdrop": "resid_dropout",
    }

    vocab_size: int = 50257
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int | None = None
    max_position_embeddings: int = 512
    hidden_act: str = "silu"
    norm: str = "rms_norm"
    rms_norm_eps: float = 1e-6
    output_norms: bool = True
    use_bias: bool = False
    scale_embeddings: bool = True
    embd_dropout: float | int = 0.0
    attention_dropout: float | int = 0.0
    resid_dropout: float | int = 0.0
    initializer: str = "takase"
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    bos_token_id: int | None = GPT2_END_OF_TEXT
    eos_token_id: int | list[int] | None = GPT2_END_OF_TEXT
    pad_token_id: int | None = None

    loop_groups: list[list[int]] = field(default_factory=lambda: [[4], [5, 6], [7]])
    num_loops: int | list[int] = 12
    mean_loops: float | int = 12
    loop_sigma: float | int | None = 0.5
    backprop_loops: int | None = 8
    state_init: str = "noise"
    loop_noise: float | int = 0.0
    noise_seed: int = 0
    cache_strategy: str = "per_step"

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)  # first: it is what sets the fields given by their GPT-2 names
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        for name in ("bos_token_id", "eos_token_id"):  # GPT-2's token makes no sense in a smaller vocabulary
            if getattr(self, name) == GPT2_END_OF_TEXT >= self.vocab_size:
                setattr(self, name, None)

    def loops_per_group(self, num_loops: int | list[int] | None = None) -> list[int]:
        """`num_loops` (the config's own when left out) as a checked list with one count per group."""
        num_loops = self.num_loops if num_loops is None else num_loops
        counts = list(num_loops) if isinstance(num_loops, list | tuple) else [num_loops] * len(self.loop_groups)
        if len(counts) != len(self.loop_groups):
            raise ValueError(
                f"`num_loops` is {num_loops}: {len(counts)} counts, but `loop_groups` {self.loop_groups} has "
                f"{len(self.loop_groups)} groups. Give one int for all groups or one per group."
            )
        if any(type(count) is not int or not 1 <= count <= MAX_LOOPS for count in counts):
            raise ValueError(f"`num_loops` is {num_loops}: every count must be an int from 1 to {MAX_LOOPS}.")
        return counts

    def to_dict(self) -> dict[str, Any]:
        """As every config's. PEFT asks for it, and then for default targets in a table of its own, by `model_type`:
        where PEFT is in use, they are put there, so that `LoraConfig(target_modules=...)` can be left out."""
        peft = sys.modules.get("peft.utils.constants")  # no import: it is not needed otherwise
        table = getattr(peft, "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING", {})
        table.setdefault(self.model_type, list(LORA_TARGETS))
        return super().to_dict()

    @property
    def stages(self) -> list[Stage]:
        """The network in order: what comes before the first group, a group, what stands between groups, and so on."""
        stages, layer = [], 0
        for index, group in enumerate(self.loop_groups):
            stages += [Stage(list(range(layer, group[0]))), Stage(group, index)]
            layer = group[-1] + 1
        stages.append(Stage(list(range(layer, self.num_hidden_layers))))
        return [stage for stage in stages if stage.layers]

    @property
    def effective_depth(self) -> float:
        """L_eff: layers outside groups + looped layers x mean loops."""
        looped = sum(len(group) for group in self.loop_groups)
        return self.num_hidden_layers - looped + looped * self.mean_loops

    def validate_sizes(self):
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                     "max_position_embeddings"):  # fmt: skip
            most = MAX_LOOPS if name == "num_hidden_layers" else MAX_SIZE
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"`{name}` is {getattr(self, name)}, but must be from 1 to {most}.")
        if self.hidden_size % self.num_attention_heads != 0:
            raise ValueError(
                f"`hidden_size` is {self.hidden_size}, but must be a multiple of `num_attention_heads`, which is "
                f"{self.num_attention_heads}."
            )
        if self.backprop_loops is not None and self.backprop_loops < 1:
            raise ValueError(
                f"`backprop_loops` is {self.backprop_loops}, but must be at least 1, or None for no limit."
            )

    def validate_numbers(self):
        for name in ("embd_dropout", "attention_dropout", "resid_dropout"):
            if not 0 <= getattr(self, name) < 1:  # False for NaN too
                raise ValueError(f"`{name}` is {getattr(self, name)}, but must be in [0, 1).")
        if self.mean_loops > 1e6 or abs(self.noise_seed) > 2**40:
            given = f"`mean_loops` is {self.mean_loops} and `noise_seed` {self.noise_seed}"
            raise ValueError(f"{given}, but they must be at most 1e6 and 2**40.")
        for name in ("rms_norm_eps", "initializer_range", "mean_loops"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"`{name}` is {getattr(self, name)}, but must be a finite number above 0.")
        if self.loop_sigma is None and self.mean_loops != int(self.mean_loops):
            raise ValueError(f"`mean_loops` is {self.mean_loops}, but must be whole where `loop_sigma` is None.")
        for name, most in {"loop_sigma": 10, "loop_noise": 1e6}.items():
            if not 0 <= (getattr(self, name) or 0) <= most:
                raise ValueError(f"`{name}` is {getattr(self, name)}, but must be a number from 0 to {most:g}.")

    def validate_choices(self):
        allowed = {
            "state_init": STATE_INITS,
            "initializer": INITIALIZERS,
            "cache_strategy": CACHE_STRATEGIES,
            "norm": NORMS,
            "hidden_act": ACT2FN,
        }
        for name, choices in allowed.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}, but must be one of {', '.join(choices)}.")

    def validate_loops(self):
        last_layer = -1
        for group in self.loop_groups:
            if not group or group != list(range(group[0], group[0] + len(group))):
                raise ValueError(
                    f"`loop_groups` is {self.loop_groups}: {group} is not a non-empty run of consecutive layers."
                )
            if group[0] < 0 or group[-1] >= self.num_hidden_layers:
                raise ValueError(
                    f"`loop_groups` is {self.loop_groups}: layers go from 0 to {self.num_hidden_layers - 1}."
                )
            if group[0] <= last_layer:
                raise ValueError(f"`loop_groups` is {self.loop_groups}: groups must be disjoint and in order.")
            last_layer = group[-1]
        self.loops_per_group()


__all__ = ["RecurrentGPT2Config"]
