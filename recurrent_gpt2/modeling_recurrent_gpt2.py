"""RecurrentGPT2: a GPT-2-like decoder in which groups of layers are looped, each token as long as it needs.

A group g of layers G with input e, its own projection A_g and K steps computes

    s(0)   = start state
    s(k+1) = G( A_g [ s(k) ; e ] )        k = 0 .. K - 1
    output = s(K)

An exit policy may stop the loop of a token early. From then on its state is frozen, the other tokens see it through the
keys and values of its last step, and nothing more is computed for it.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import GPT2LMHeadModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.integrations.fsdp import is_fsdp_managed_module
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, PackedColwiseParallel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel, slice_logits_to_keep
from transformers.processing_utils import Unpack
from transformers.utils import can_return_tuple, logging
from transformers.utils.generic import TransformersKwargs, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .active_tokens import ActiveTokens, LoopState
from .compiled_layers import LAYOUTS, MOST_SIZE, CompiledLayers, CompiledPass, compiled_library, why_not
from .configuration_recurrent_gpt2 import RecurrentGPT2Config
from .exit_policies import LoopView, Policy, check_exits, resolve_exit_policy
from .fast_layers import LOAD_AGAIN, PRECISIONS, give_up_weights, look_up_faster, replace_layers
from .from_gpt2 import config_from_gpt2, load_gpt2, load_gpt2_weights
from .generation_recurrent_gpt2 import GATHERING_KERNELS, LoopGenerationMixin
from .loop_cache import LoopCache

logger = logging.get_logger(__name__)

# Start states (Geiping et al.): truncated at 3 sigma, standard deviation sqrt(2/5) per coordinate.
START_STATE_STD = math.sqrt(2 / 5)
# The attention of vLLM's own Transformers backend, which knows nothing of loops; `vllm_engine.py` has another.
PLAIN_VLLM_ATTENTION = "vllm"
# Where a checkpoint's own copy of the code has the classes.
AUTO_MAP = {
    "AutoConfig": "configuration_recurrent_gpt2.RecurrentGPT2Config",
    "AutoModel": "modeling_recurrent_gpt2.RecurrentGPT2Model",
    "AutoModelForCausalLM": "modeling_recurrent_gpt2.RecurrentGPT2ForCausalLM",
}


@dataclass
class RecurrentModelOutputWithPast(BaseModelOutputWithPast):
    """`BaseModelOutputWithPast` and:

    loop_steps: [batch, seq, groups], the steps that each token took in each group; 0 for padding.
    loop_trajectory: for each group, the states s(0), s(1), ... as [steps + 1, batch, seq, hidden].
    """

    loop_steps: torch.Tensor | None = None
    loop_trajectory: tuple[torch.Tensor, ...] | None = None


@dataclass
class RecurrentCausalLMOutputWithPast(CausalLMOutputWithPast):
    """`CausalLMOutputWithPast` with `loop_steps` and `loop_trajectory`, as in [`RecurrentModelOutputWithPast`]."""

    loop_steps: torch.Tensor | None = None
    loop_trajectory: tuple[torch.Tensor, ...] | None = None


def sample_num_loops(
    config: RecurrentGPT2Config, generator: torch.Generator | None = None, share: float = 1.0
) -> list[int]:
    """Draws the training loop counts: one per group, 1 + Poisson(rate), rate ~ LogNormal(ln r - sigma^2 / 2, sigma).

    The rate has mean r = `config.mean_loops`, so the count has mean r + 1 and variance r + r^2 (exp(sigma^2) - 1).
    Without a sigma nothing is drawn: the count is r. `share`, from 0 (one loop) to 1, is for a beginning with fewer
    loops: the rate is that share of what is drawn.
    """
    if config.loop_sigma is None:
        return [max(1, round(config.mean_loops * share))] * len(config.loop_groups)
    mu = math.log(config.mean_loops) - config.loop_sigma**2 / 2
    normal = torch.randn(len(config.loop_groups), generator=generator)
    rate = share * torch.exp(mu + config.loop_sigma * normal)
    return (1 + torch.poisson(rate, generator=generator)).long().tolist()


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    weights = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = nn.functional.softmax(weights, dim=-1, dtype=torch.promote_types(query.dtype, torch.float32))
    weights = nn.functional.dropout(weights.to(query.dtype), p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def attention_kernel(config: RecurrentGPT2Config) -> Callable:
    return ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager_attention_forward)


def lean_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """What the stock `sdpa` kernel comes to here, without what it does for other models: that is a twentieth of a small
    layer's time."""
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, attention_mask, scale=scaling, is_causal=attention_mask is None and query.shape[2] > 1
    )
    return output.transpose(1, 2), None


class RecurrentGPT2Attention(nn.Module):
    """Causal multi-head attention with one fused projection for queries, keys and values."""

    def __init__(self, config: RecurrentGPT2Config, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = 1
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True

        self.qkv_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=config.use_bias)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.use_bias)
        self.o_proj.is_output_projection = True  # type: ignore[assignment]

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: LoopCache | None = None,
        loop_step: int = 0,
        active: ActiveTokens | None = None,
        attend: Callable | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`attend`: the attention kernel, which a pass looks up once; when left out, it is looked up here."""
        # hidden_states: [batch, length, hidden], or [1, n, hidden] if only the active tokens are here. The number of
        # heads is read off: with tensor parallelism, a process has some of them.
        qkv = self.qkv_proj(hidden_states)
        by_head = qkv.reshape(*qkv.shape[:2], -1, self.head_dim).transpose(1, 2)
        query, key, value = by_head.chunk(3, dim=1)
        if active is not None:
            query = active.pad(query.transpose(1, 2)).transpose(1, 2)
            attention_mask = active.pad_mask(attention_mask)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx, loop_step=loop_step, active=active)

        if attend is None:  # vLLM reads in this source that the kernel is looked up, and where it is called
            name = self.config._attn_implementation
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )  # output: [batch, queries, heads, head_dim]
        if active is not None:
            output = active.unpad(output)
        return self.o_proj(output.reshape(*qkv.shape[:2], qkv.shape[2] // 3)), weights  # vLLM gives [queries, hidden]


class PackedQKVParallel(PackedColwiseParallel):
    """Tensor parallelism of `qkv_proj`: a process has its heads of the queries, of the keys and of the values."""

    def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
        from torch.distributed.tensor import distribute_tensor
        from torch.distributed.tensor.placement_types import _StridedShard

        whole = module._parameters.get(param)
        if whole is None:
            return
        if whole.shape[0] // 3 % mesh.size() != 0:
            raise ValueError(f"a hidden size of {whole.shape[0] // 3} can't be shared out to {mesh.size()} processes.")
        shard = distribute_tensor(whole, mesh, [_StridedShard(dim=0, split_factor=3)], src_data_rank=None)
        module._parameters[param] = nn.Parameter(shard, requires_grad=whole.requires_grad)


ALL_PARALLEL_STYLES.register("packed_qkv", PackedQKVParallel(split_factor=3))


class RecurrentGPT2MLP(nn.Module):
    def __init__(self, config: RecurrentGPT2Config):
        super().__init__()
        width = config.intermediate_size or 4 * config.hidden_size
        self.up_proj = nn.Linear(config.hidden_size, width, bias=config.use_bias)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=config.use_bias)
        self.down_proj.is_output_projection = True  # type: ignore[assignment]
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(hidden_states)))


def make_norm(config: RecurrentGPT2Config) -> nn.Module:
    norm = nn.RMSNorm if config.norm == "rms_norm" else nn.LayerNorm
    return norm(config.hidden_size, eps=config.rms_norm_eps)


class RecurrentGPT2Block(GradientCheckpointingLayer):
    """A sandwich block: a = n2(x + Attention(n1(x))), y = n4(a + MLP(n3(a))). GPT-2's has no n2 and n4."""

    def __init__(self, config: RecurrentGPT2Config, layer_idx: int):
        super().__init__()
        self.attention_input_norm = make_norm(config)
        self.attention = RecurrentGPT2Attention(config, layer_idx)
        self.attention_output_norm = make_norm(config) if config.output_norms else nn.Identity()
        self.mlp_input_norm = make_norm(config)
        self.mlp = RecurrentGPT2MLP(config)
        self.mlp_output_norm = make_norm(config) if config.output_norms else nn.Identity()
        self.resid_dropout = config.resid_dropout

    def forward(
        self,
        hidden_states: torch.Tensor,
        frozen: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """`frozen`: a mask [batch, seq] and an earlier output to keep where the mask is True."""
        attended, _ = self.attention(self.attention_input_norm(hidden_states), **kwargs)
        hidden_states = self.attention_output_norm(hidden_states + self._dropped(attended))
        hidden_states = hidden_states + self._dropped(self.mlp(self.mlp_input_norm(hidden_states)))
        hidden_states = self.mlp_output_norm(hidden_states)
        return hidden_states if frozen is None else torch.where(frozen[0][..., None], frozen[1], hidden_states)

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, self.resid_dropout) if self.training and self.resid_dropout > 0 else x


class RecurrentGPT2LoopInput(nn.Module):
    """A_g [s ; e], a projection from 2d to d without bias, held as its two halves.

    The half for the group's input e is the same at every step, so the loop computes it once.
    """

    def __init__(self, config: RecurrentGPT2Config):
        super().__init__()
        self.state_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.input_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, state: torch.Tensor, projected_input: torch.Tensor) -> torch.Tensor:
        return self.state_proj(state) + projected_input


class RecurrentGPT2PreTrainedModel(PreTrainedModel):
    config_class = RecurrentGPT2Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["RecurrentGPT2Block"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": OutputRecorder(RecurrentGPT2Block), "attentions": RecurrentGPT2Attention}
    # `output_hidden_states=[3, 9]` counts applications of layers. How many there will be is known after the pass only:
    # no field of the config has their number, and indices from the end are refused.
    _can_record_outputs["hidden_states"].num_hidden_layers_key = "number of layer applications"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            self._init_matrix(module.weight, getattr(module, "is_output_projection", False))
            if getattr(module, "bias", None) is not None:
                init.zeros_(module.bias)
        elif isinstance(module, RecurrentGPT2Model):
            init.copy_(module.start_noise, module.make_start_noise())
        else:
            super()._init_weights(module)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """`PreTrainedModel.from_pretrained`, from safetensors only: reading a pickle can run code."""
        if kwargs.setdefault("use_safetensors", True) is not True:
            raise ValueError(f"`use_safetensors` is {kwargs['use_safetensors']!r}, but only safetensors are read.")
        try:
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except OSError as error:
            if "safetensors" not in str(error):
                raise
            raise OSError(
                f"{pretrained_model_name_or_path} has no weights in safetensors format. Pickles (pytorch_model.bin) "
                "are not read, since that can run code: convert them first, where you trust them."
            ) from error

    def save_pretrained(self, save_directory, *args, **kwargs):
        """`PreTrainedModel.save_pretrained`, after which all auto classes find the code, whichever class was saved."""
        if self.is_optimized:
            raise ValueError(LOAD_AGAIN + "save it.")
        self.config.auto_map = dict(AUTO_MAP)
        for file in Path(save_directory).glob("*.py"):
            if file.is_symlink():  # code would be written through it, to where it points
                file.unlink()
        return super().save_pretrained(save_directory, *args, **kwargs)

    is_optimized = False  # for inference

    def optimize_for_inference(self, weights: str = "float32", compile: bool = False):
        """Makes the model faster on CPU and returns it. One call after loading; there is no way back.

        Large matrices are laid out once for products, in place of the stock weights, and norms take fewer operations:
        see `fast_layers.py`. Nothing is held twice, so an optimised model, of any size, can't be trained, adapted,
        quantised, converted or saved: load it again for that.

        Args:
            weights: The precision that the matrices are kept in: "float32" (the same results up to rounding),
                "bfloat16" or "int8" (faster and smaller; calibrate exits again). A large head that shares its weight
                with the embedding stays as it is in float32; in less, both are kept in that precision.
            compile: Compile layers too, in a second, which takes a C++ compiler (see `compiled_layers.py`). For
                small models, whose time goes by between operations, and for models of any size in int8. Others with
                matrices larger than `MOST_SIZE`, which are packed, stay as they are.
        """
        if weights not in PRECISIONS:
            raise ValueError(f"`weights` is {weights!r}, but must be one of {', '.join(PRECISIONS)}.")
        if self.is_optimized:
            raise ValueError("this model is optimised for inference already.")
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        is_sharded = (is_distributed and is_fsdp_managed_module(self)) or any(
            hasattr(p, "placements") for p in self.parameters()
        )  # DTensors
        if is_sharded or any(p.device.type != "cpu" or p.is_meta for p in self.parameters()):
            raise ValueError("`optimize_for_inference` is for models that are whole and on the CPU.")
        if self.dtype != torch.float32 or getattr(self, "hf_quantizer", None) is not None:
            raise ValueError(f"the model is quantised or in {self.dtype}: load it in float32 to optimise it.")
        if any(type(module).__module__.startswith("peft.") for module in self.modules()):
            raise ValueError("the model has adapters: merge and unload them (`merge_and_unload()`) to optimise it.")
        if compile:
            compiled_library()  # fails before anything is given up
            replace_layers(self, weights, MOST_SIZE + 1 if weights == "float32" else None, layouts=LAYOUTS)
        else:
            replace_layers(self, weights)
        give_up_weights(self)
        self.requires_grad_(False)
        look_up_faster(self)
        if compile:
            base = self.base_model
            if reason := why_not(base):
                logger.warning(f"nothing was compiled: {reason}.")
            else:
                base.compiled_layers = CompiledLayers(base)
        for module in self.modules():  # the base model too, which may be saved or trained on its own
            if isinstance(module, RecurrentGPT2PreTrainedModel):
                module.is_optimized = True
        return self.eval()

    def train(self, mode: bool = True):
        if mode and self.is_optimized:
            raise ValueError(LOAD_AGAIN + "train it.")
        return super().train(mode)

    def load_state_dict(self, *args, **kwargs):
        if self.is_optimized:
            raise ValueError(LOAD_AGAIN + "give it other weights.")
        return super().load_state_dict(*args, **kwargs)

    def add_adapter(self, *args, **kwargs):
        if self.is_optimized:
            raise ValueError(LOAD_AGAIN + "adapt it.")
        return super().add_adapter(*args, **kwargs)

    def _apply(self, fn, *args, **kwargs):
        before = torch.zeros(1)
        after = fn(before) if self.is_optimized else before
        if (after.dtype, after.device) != (before.dtype, before.device):
            raise ValueError(LOAD_AGAIN + "move it or change its precision.")
        return super()._apply(fn, *args, **kwargs)

    def _init_matrix(self, weight: torch.Tensor, is_output_projection: bool) -> None:
        """Takase's initialisation, as Geiping et al. use it for loops."""
        if self.config.initializer == "normal":
            init.normal_(weight, std=self.config.initializer_range)
            return
        std = math.sqrt(2 / (5 * self.config.hidden_size))
        if is_output_projection:
            std /= math.sqrt(2 * self.config.effective_depth)
        init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std)


@dataclass
class LoopPlan:
    """How the groups of a pass are to loop."""

    num_loops: list[int]  # of each group; the most, under a policy
    policies: list[Policy | None]
    is_training: bool  # fresh noise, and gradients through the last loops
    keep_trajectory: bool = False
    decode: Callable[[torch.Tensor], torch.Tensor] | None = None  # states to logits, for policies that ask for them

    @property
    def is_adaptive(self) -> bool:
        return any(policy is not None for policy in self.policies)

    def without_exits(self, num_loops: int) -> "LoopPlan":
        groups = len(self.num_loops)
        return replace(self, num_loops=[num_loops] * groups, policies=[None] * groups)


@dataclass
class ForwardPass:
    """What the stages of one pass share, and what they leave behind."""

    plan: LoopPlan
    position_ids: torch.Tensor  # [batch or 1, seq]
    attention_mask: Any  # in the form that the attention kernel takes; None: plain causal
    make_dense_mask: Callable[[], torch.Tensor | None]  # the same as a tensor [batch, 1, seq, keys]
    real_tokens: torch.Tensor | None  # [batch, seq], False at padding; None: none is known
    leaves_padding_out: bool  # of the loops; else padding, if there is any, is looped with the rest
    cache: LoopCache | None
    freeze: bool  # compute all tokens and freeze the inactive, for kernels that can't take the active ones alone
    layer_arguments: dict[str, Any]
    loop_noise: float = 0.0  # at every step
    compiled: CompiledPass | None = None  # to run few rows by
    loop_steps: list[torch.Tensor] = field(default_factory=list)  # of each group, [batch, seq]
    trajectories: list[torch.Tensor] = field(default_factory=list)  # of each group, [steps + 1, batch, seq, hidden]
    _dense_mask: torch.Tensor | None = None

    @property
    def dense_mask(self) -> torch.Tensor | None:
        """Made when some token first leaves its loop."""
        if self._dense_mask is None:
            self._dense_mask = self.make_dense_mask()
        return self._dense_mask

    def cache_arguments(self, **arguments: Any) -> dict[str, Any]:
        return {} if self.cache is None else {"past_key_values": self.cache, **arguments}

    def all_loop_steps(self, like: torch.Tensor) -> torch.Tensor:
        """[batch, seq, groups], for states like these [batch, seq, hidden]."""
        no_groups = torch.zeros(*like.shape[:2], 0, dtype=torch.long, device=like.device)
        steps = torch.stack(self.loop_steps, dim=-1) if self.loop_steps else no_groups
        return steps if self.real_tokens is None else steps * self.real_tokens[..., None]


class RecurrentGPT2Model(RecurrentGPT2PreTrainedModel):
    """The network is a sequence of stages (`config.stages`), run in order for all tokens: layers that are applied once
    (`run_layers`), and loop groups (`run_group`: `enter`, `step` until all tokens have left, `leave`)."""

    compiled_layers: CompiledLayers | None = None  # where `optimize_for_inference` was asked for them

    def __init__(self, config: RecurrentGPT2Config):
        super().__init__(config)
        self.stages, self.loop_groups = config.stages, config.loop_groups  # found much faster here than in the config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.embedding_scale = math.sqrt(config.hidden_size) if config.scale_embeddings else 1.0
        self.dropout = nn.Dropout(config.embd_dropout)
        self.layers = nn.ModuleList(RecurrentGPT2Block(config, index) for index in range(config.num_hidden_layers))
        self.loop_inputs = nn.ModuleList(RecurrentGPT2LoopInput(config) for _ in config.loop_groups)
        self.norm = make_norm(config)
        self.register_buffer("start_noise", self.make_start_noise(), persistent=False)
        self.register_load_state_dict_post_hook(_fill_start_noise)
        self.gradient_checkpointing = False
        if config._attn_implementation == PLAIN_VLLM_ATTENTION:
            _check_plain_vllm()
        self.post_init()

    def make_start_noise(self) -> torch.Tensor:
        """The noise of eval mode, [groups, positions, hidden]: a fixed function of seed, group and position."""
        config = self.config
        noise = torch.empty(len(config.loop_groups), config.max_position_embeddings, config.hidden_size)
        if noise.device.type == "meta":  # while a checkpoint is loaded; `_init_weights` makes it again
            return noise
        for group, of_group in enumerate(noise):
            on_cpu = torch.empty(of_group.shape, dtype=torch.float32, device="cpu")
            seed = config.noise_seed * 1_000_003 + group
            of_group.copy_(_fill_with_noise(on_cpu, torch.Generator().manual_seed(seed)))
        return noise

    def _apply(self, fn, *args, **kwargs):
        super()._apply(fn, *args, **kwargs)
        if not self.start_noise.is_meta:  # `to_empty` leaves it unfilled
            self.start_noise.copy_(self.make_start_noise())
        if self.compiled_layers is not None:  # `share_memory` moves weights
            self.compiled_layers = CompiledLayers(self)
        return self

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: LoopCache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        num_loops: int | list[int] | None = None,
        exit_policy: Any = None,
        output_loop_trajectory: bool = False,
        decode: Callable[[torch.Tensor], torch.Tensor] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> RecurrentModelOutputWithPast:
        """
        Args:
            attention_mask: 2D, 0 at padding, for all tokens cached and new; or a ready-made 4D mask.
            position_ids: Counted from the 2D mask when left out, so that padding on either side changes nothing.
            num_loops: Loops of every group, or one number per group. When left out, the config's; in training mode,
                where gradients are recorded, drawn at random.
            exit_policy: When tokens leave a loop before `num_loops`: see `exit_policies.py`. Not for training.
            output_loop_trajectory: Return the states of all loop steps.
            decode: Maps states to logits, for policies that ask for them; `RecurrentGPT2ForCausalLM` passes its head.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of `input_ids` and `inputs_embeds`.")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        plan = self._plan_loops(num_loops, exit_policy, output_loop_trajectory, decode)
        if past_key_values is None and use_cache and not self.training:
            past_key_values = LoopCache(self.config)
        run = self._prepare(inputs_embeds, attention_mask, position_ids, past_key_values, plan, kwargs)

        hidden_states = self.dropout(self.add_positions(inputs_embeds, run.position_ids))
        for stage in self.stages:
            if stage.group is None:
                hidden_states = self.run_layers(stage.layers, hidden_states, run)
            else:
                hidden_states = self.run_group(stage.group, hidden_states, run)
        hidden_states = self.norm(hidden_states)

        loop_steps = run.all_loop_steps(hidden_states)
        if past_key_values is not None and not past_key_values.is_compileable:
            past_key_values.record_loop_steps(loop_steps)
        return RecurrentModelOutputWithPast(
            last_hidden_state=hidden_states,
            past_key_values=past_key_values,
            loop_steps=loop_steps,
            loop_trajectory=tuple(run.trajectories) if output_loop_trajectory else None,
        )

    def attention_kernel(self) -> Callable:
        """What all layers of a pass take."""
        kernel = attention_kernel(self.config)
        return lean_attention if self.is_optimized and kernel is sdpa_attention_forward else kernel

    def add_positions(self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return (inputs_embeds + self.embed_positions(position_ids)) * self.embedding_scale

    def run_layers(self, layers: list[int], hidden_states: torch.Tensor, run: ForwardPass) -> torch.Tensor:
        """A stage of layers that are applied once."""
        if run.compiled is not None and run.compiled.takes(hidden_states):
            return run.compiled.run_layers(layers, hidden_states)
        arguments = {"attention_mask": run.attention_mask, **run.cache_arguments(), **run.layer_arguments}
        for index in layers:
            hidden_states = self.layers[index](hidden_states, **arguments)
        return hidden_states

    def run_group(self, group: int, hidden_states: torch.Tensor, run: ForwardPass) -> torch.Tensor:
        """A stage that is looped, from its input e [batch, seq, hidden] to every token's last state, the same shape."""
        loop = self.enter(group, hidden_states, run)
        while not loop.is_done:
            if run.compiled is None or not run.compiled.finish(loop, run.plan.policies[group]):
                self.step(loop, run)
        return self.leave(loop, run)

    def enter(self, group: int, entry: torch.Tensor, run: ForwardPass) -> LoopState:
        """All tokens at the start state s(0) of a group."""
        noise = None  # fresh in training
        if not run.plan.is_training:
            noise = self.fixed_noise(group, entry, run.position_ids)
        start, projected_input = self.start_of_loop(group, entry, noise)
        looped_tokens = run.real_tokens if run.leaves_padding_out else None
        loop = LoopState(group, start, projected_input, run.plan.num_loops[group], looped_tokens, noise)
        loop.layers = self.loop_groups[group]
        loop.blocks = [self.layers[index] for index in loop.layers]
        if run.plan.keep_trajectory:
            loop.trajectory = [start]
        return loop

    def step(self, loop: LoopState, run: ForwardPass) -> None:
        """s(k) -> s(k+1) of the tokens that are still looping; then those leave that the policy names."""
        plan = run.plan
        if run.compiled is not None and run.compiled.takes(loop.state):
            new_state = run.compiled.next_state(loop)
        else:
            has_gradient = torch.is_grad_enabled() and loop.steps >= self._loops_without_gradient(loop, plan)
            with torch.set_grad_enabled(has_gradient):
                new_state = self._next_state(loop, run)
        previous_state = loop.advance(new_state)
        policy = plan.policies[loop.group]
        if policy is None or loop.is_done:
            return
        state = new_state.flatten(0, 1)
        update = state - (previous_state.flatten(0, 1) if loop.tokens is None else loop.tokens)
        view = LoopView(
            loop.group, loop.steps - 1, state, update, loop.previous_update, loop.memory, plan.decode or _no_head
        )
        exits = policy(view)
        check_exits(exits, policy, state.shape[0], loop.memory)
        loop.previous_update, loop.tokens = update, state
        loop.leave(exits)

    def leave(self, loop: LoopState, run: ForwardPass) -> torch.Tensor:
        """The last state of every token, [batch, seq, hidden]; that of padding is its first, looped or not."""
        run.loop_steps.append(loop.loop_steps)
        if loop.trajectory is not None:
            run.trajectories.append(torch.stack(loop.trajectory))
        if run.real_tokens is None or run.leaves_padding_out or run.plan.is_training:
            return loop.final
        return torch.where(run.real_tokens[..., None], loop.final, loop.start)

    def _next_state(self, loop: LoopState, run: ForwardPass) -> torch.Tensor:
        """s(k+1) of the active tokens, from `loop.state` = s(k)."""
        state, active = loop.state, loop.active
        if run.loop_noise > 0:
            state = state + run.loop_noise * self._step_noise(loop)
        arguments = run.layer_arguments | run.cache_arguments(loop_step=loop.steps)
        if run.freeze:
            return self._next_frozen_state(state, loop, run.attention_mask, arguments)

        arguments["attention_mask"] = run.attention_mask
        if active is not None:
            arguments |= {"attention_mask": run.dense_mask, "active": active}
        hidden_states = self.loop_inputs[loop.group](state, loop.projected_input)
        for block in loop.blocks:
            hidden_states = block(hidden_states, **arguments)
        return hidden_states

    def _next_frozen_state(
        self, state: torch.Tensor, loop: LoopState, attention_mask: Any, arguments: dict[str, Any]
    ) -> torch.Tensor:
        """The same with all tokens computed. An inactive one keeps what it had at its last step: the input of each
        layer, and with it its keys and values, and the output."""
        active, before = loop.active, loop.layer_values
        if active is not None:
            state = active.unpack(state, loop.final)
        frozen = None if active is None or not before else ~active.as_mask()
        values = [self.loop_inputs[loop.group](state, loop.all_projected_inputs)]
        if frozen is not None:
            values[0] = torch.where(frozen[..., None], before[0], values[0])
        for place, block in enumerate(loop.blocks, start=1):
            keep = None if frozen is None else (frozen, before[place])
            values.append(block(values[-1], attention_mask=attention_mask, frozen=keep, **arguments))
        loop.layer_values = values
        return values[-1] if active is None else active.pack(values[-1])

    def start_of_loop(
        self, group: int, entry: torch.Tensor, noise: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """s(0), and the half of A_g [s ; e] that is the same at every step."""
        return self._start_state(entry, noise), cast(RecurrentGPT2LoopInput, self.loop_inputs[group]).input_proj(entry)

    def fixed_noise(self, group: int, entry: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor | None:
        """That of eval mode, where there is any."""
        if self.config.state_init != "noise" and self.config.loop_noise == 0:
            return None
        return self.start_noise[group][position_ids].expand_as(entry)

    def _start_state(self, entry: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        """s(0). `noise` is the fixed one; in training it is None, and fresh noise is drawn."""
        if self.config.state_init == "input":
            return entry
        if self.config.state_init == "zeros":
            return torch.zeros_like(entry)
        return _fill_with_noise(torch.empty_like(entry)) if noise is None else noise

    def _step_noise(self, loop: LoopState) -> torch.Tensor:
        """Noise of a loop step. Where it is fixed, it is the position's start noise, rotated by a number of places that
        depends on the step: as good as fresh, yet a fixed function of seed, group, position and step."""
        if loop.noise is None:
            return _fill_with_noise(torch.empty_like(loop.state))
        noise = loop.noise if loop.active is None else loop.active.pack(loop.noise)
        return noise.roll(loop.steps + 1, dims=-1)

    def _loops_without_gradient(self, loop: LoopState, plan: LoopPlan) -> int:
        if not plan.is_training or self.config.backprop_loops is None:
            return 0
        return loop.most - self.config.backprop_loops

    def _plan_loops(
        self,
        num_loops: int | list[int] | None,
        exit_policy: Any,
        keep_trajectory: bool,
        decode: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> LoopPlan:
        # Generation and scoring without gradients are inference, whatever the mode: `generate` of a model that is being
        # trained must not draw new loops at every token.
        is_training = self.training and torch.is_grad_enabled()
        policies = resolve_exit_policy(exit_policy, len(self.config.loop_groups))
        if is_training and any(policy is not None for policy in policies):
            raise ValueError("`exit_policy` is for inference: call `model.eval()` first, or leave it out in training.")
        if is_training and num_loops is None:
            num_loops = sample_num_loops(self.config)
        return LoopPlan(self.config.loops_per_group(num_loops), policies, is_training, keep_trajectory, decode)

    def _prepare(
        self,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        cache: LoopCache | None,
        plan: LoopPlan,
        layer_arguments: dict[str, Any],
    ) -> ForwardPass:
        """Positions, masks and cache of a pass."""
        config = self.config
        self._check_cache(cache, inputs_embeds, plan)
        self._check_mask(attention_mask, inputs_embeds, cache)
        if position_ids is None:
            position_ids = self._count_positions(inputs_embeds, attention_mask, cache)
        self._check_positions(inputs_embeds, position_ids, cache)
        mask = create_causal_mask(config, inputs_embeds, attention_mask, cache, position_ids=position_ids)

        def make_dense_mask() -> torch.Tensor | None:
            if mask is not None or inputs_embeds.shape[1] == 1:
                return mask
            # No mask was needed, so these tokens are the first; the cache has grown since and must not be asked.
            return create_causal_mask(config, inputs_embeds, attention_mask, None, allow_is_causal_skip=False)

        real_tokens = layer_arguments.pop("real_tokens", None)  # of `generate`, where the mask is 4D
        if attention_mask is not None and attention_mask.ndim == 2:
            real_tokens = attention_mask[:, -inputs_embeds.shape[1] :].bool()
        leaves_padding_out = self._leaves_padding_out(real_tokens, cache, plan)
        if leaves_padding_out and not real_tokens.any():
            # A chunk of nothing but padding: one loop, for its place in the cache, which nobody sees.
            leaves_padding_out, plan = False, plan.without_exits(num_loops=1)
        some_inactive = plan.is_adaptive or leaves_padding_out
        recorded = ("output_hidden_states", "output_attentions")
        records = any(layer_arguments.get(name) or getattr(config, name) for name in recorded)
        layer_arguments["attend"] = attention_kernel(config) if records else self.attention_kernel()
        gathers = config._attn_implementation in GATHERING_KERNELS or getattr(cache, "takes_active_tokens", False)
        freeze = some_inactive and (records or not gathers)
        if cache is None and some_inactive and not freeze:
            cache = LoopCache(config, "last_step")  # for the chunk's own keys and values, while it loops
        compiled = None
        if self.compiled_layers is not None and layer_arguments["attend"] is lean_attention and mask is None:
            compiled = self.compiled_layers.in_pass(inputs_embeds, cache)
        return ForwardPass(
            plan, position_ids, mask, make_dense_mask, real_tokens, leaves_padding_out, cache, freeze, layer_arguments,
            config.loop_noise, compiled,
        )  # fmt: skip

    def _leaves_padding_out(self, real_tokens: torch.Tensor | None, cache: LoopCache | None, plan: LoopPlan) -> bool:
        """Whether there is padding to leave out of loops. There may be some that stays: in training (whose batches are
        full), compiled code and static caches (whose shapes must not depend on data)."""
        is_static = cache is not None and cache.is_compileable
        if real_tokens is None or plan.is_training or is_static or torch.compiler.is_compiling():
            return False
        return not bool(real_tokens.all())

    def _count_positions(
        self, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None, cache: LoopCache | None
    ) -> torch.Tensor:
        """Positions of the new tokens. Padding is not counted, on whichever side it is."""
        length = inputs_embeds.shape[1]
        if attention_mask is not None and attention_mask.ndim == 2:
            return (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, -length:]
        past = 0 if cache is None else cache.get_seq_length()
        return (torch.arange(length, device=inputs_embeds.device) + past)[None]

    def _check_positions(
        self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor, cache: LoopCache | None
    ) -> None:
        if torch.compiler.is_compiling():
            return
        rows, length = inputs_embeds.shape[:2]
        if 0 in (rows, length):
            raise ValueError(f"the input has {rows} row(s) of {length} tokens: there is nothing to run.")
        past = 0 if cache is None else cache.get_seq_length()
        limit = self.config.max_position_embeddings
        # Reading positions makes a GPU wait: there, only a text that may be too long is looked at.
        if position_ids.device.type != "cpu" and past + length <= limit:
            return
        first, last = int(position_ids.min()), int(position_ids.max())
        if first < 0 or last >= limit:
            raise ValueError(
                f"the text has positions {first} to {last} (`position_ids`), that is, up to {last + 1} tokens, but the "
                f"model has positions for {limit} (`max_position_embeddings`): shorten the text, or generate less."
            )

    def _check_mask(
        self, attention_mask: torch.Tensor | None, inputs_embeds: torch.Tensor, cache: LoopCache | None
    ) -> None:
        if attention_mask is None or attention_mask.ndim != 2 or torch.compiler.is_compiling():
            return
        if cache is not None and cache.is_compileable:  # whose masks are as long as itself
            return
        length, past = inputs_embeds.shape[1], 0 if cache is None else cache.get_seq_length()
        if attention_mask.shape[1] != past + length:
            raise ValueError(
                f"`attention_mask` is for {attention_mask.shape[1]} tokens, but must be for all: {past} in the cache "
                f"and {length} new."
            )

    def _check_cache(self, cache: Cache | None, inputs_embeds: torch.Tensor, plan: LoopPlan) -> None:
        if cache is None:
            return
        # By what it can do, not by its class: remote code and the installed package have a class of their own each.
        if not hasattr(cache, "check_pass"):
            raise ValueError(
                f"`past_key_values` is a {type(cache).__name__}, which has no slots for loop steps. Leave it out, or "
                "pass `LoopCache(model.config)` (from `recurrent_gpt2`)."
            )
        cache.check_pass(*inputs_embeds.shape[:2], plan.num_loops, plan.is_adaptive)


class RecurrentGPT2ForCausalLM(LoopGenerationMixin, RecurrentGPT2PreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: RecurrentGPT2Config):
        super().__init__(config)
        self.model = RecurrentGPT2Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def from_gpt2(
        cls,
        gpt2: GPT2LMHeadModel | str | Path,
        loop_groups: list[list[int]] | None = None,
        allow_pickle: bool = False,
        **settings: Any,
    ) -> "RecurrentGPT2ForCausalLM":
        """A looped model that computes what a pretrained GPT-2 (a model, or a name or folder to load) computes: at one
        loop, and with `state_init="zeros"`, the default here, at any number.

        `allow_pickle` reads weights that are not in safetensors format too, by PyTorch's restricted unpickler
        (`weights_only`). `settings` are fields of the config. See `from_gpt2.py` for what is done.
        """
        if not isinstance(gpt2, GPT2LMHeadModel):
            gpt2 = load_gpt2(gpt2, allow_pickle)
        model = cls(config_from_gpt2(gpt2, loop_groups, **settings)).to(gpt2.dtype)
        load_gpt2_weights(model, gpt2)
        return model.eval()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: LoopCache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_loops: int | list[int] | None = None,
        exit_policy: Any = None,
        output_loop_trajectory: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> RecurrentCausalLMOutputWithPast:
        """See [`RecurrentGPT2Model.forward`] for the arguments of the loops; the rest is as in any causal LM."""
        outputs: RecurrentModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            num_loops=num_loops,
            exit_policy=exit_policy,
            output_loop_trajectory=output_loop_trajectory,
            decode=self.decode_states,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits, labels, vocab_size=self.config.vocab_size, num_items_in_batch=num_items_in_batch, **kwargs
            )
        return RecurrentCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            loop_steps=outputs.loop_steps,
            loop_trajectory=outputs.loop_trajectory,
        )

    def decode_states(self, states: torch.Tensor) -> torch.Tensor:
        """Logits that the final norm and the head read from any states [..., hidden]."""
        return self.lm_head(self.model.norm(states))


def _fill_with_noise(tensor: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Normal numbers, of which those beyond 3 sigma are drawn again. (How `nn.init.trunc_normal_` makes them depends on
    the version of PyTorch, and what a checkpoint says must not.)"""
    std = START_STATE_STD
    noise = tensor.normal_(std=std, generator=generator)
    while (beyond := noise.abs() > 3 * std).any():
        noise = torch.where(beyond, torch.empty_like(noise).normal_(std=std, generator=generator), noise)
    return noise


def _fill_start_noise(model: RecurrentGPT2Model, incompatible_keys: Any) -> None:
    """After `load_state_dict(..., assign=True)` of a model that was made on the meta device: it is no parameter."""
    weight = model.embed_tokens.weight
    if model.start_noise.is_meta and not weight.is_meta:
        model.start_noise = model.make_start_noise().to(weight.device, weight.dtype)


def _no_head(states: torch.Tensor) -> torch.Tensor:
    raise ValueError("this exit policy decodes states, and needs a head: use it with `RecurrentGPT2ForCausalLM`.")


def _check_plain_vllm() -> None:
    """Refuses what would make an answer of vLLM's own Transformers backend depend on what else is asked.

    It keeps one slot of keys and values a layer. Within a pass tokens see each other step by step, across passes
    through last steps only: a prompt that is cut, or partly taken from a cache, would give other tokens.
    """
    settings = sys.modules["vllm.config"].get_current_vllm_config()
    on = {
        "--no-enable-chunked-prefill": settings.scheduler_config.enable_chunked_prefill,
        "--no-enable-prefix-caching": settings.cache_config.enable_prefix_caching,
    }
    advice = (
        "install the package `recurrent-gpt2` beside vLLM and leave out `--model-impl`, for exits, for a slot of keys "
        "and values per loop step, and for several devices"
    )
    if settings.parallel_config.world_size > 1:
        raise ValueError(f"several devices are not for vLLM's own Transformers backend: {advice}.")
    if any(on.values()):
        flags = " ".join(flag for flag, is_on in on.items() if is_on)
        raise ValueError(f"here the answer to a prompt would depend on how it is cut: add {flags}, or {advice}.")
    logger.warning(f"vLLM's Transformers backend runs fixed loops and sees past tokens through last steps: {advice}.")


# A saved model carries the code that it needs.
RecurrentGPT2Config.register_for_auto_class()
RecurrentGPT2Model.register_for_auto_class("AutoModel")
RecurrentGPT2ForCausalLM.register_for_auto_class("AutoModelForCausalLM")

__all__ = [
    "RecurrentGPT2ForCausalLM",
    "RecurrentGPT2Model",
    "RecurrentGPT2PreTrainedModel",
    "sample_num_loops",
]
