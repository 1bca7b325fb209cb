"""RecurrentGPT2: a GPT-2-like decoder in which groups of layers are looped, each token as long as it needs.

A group g of layers G with input e, its own projection A_g and K steps computes

    s(0)   = start state
    s(k+1) = G( A_g [ s(k) ; e ] )        k = 0 .. K - 1
    output = s(K)

An exit policy may stop the loop of a token early. From then on its state is frozen, the other tokens see it through the
keys and values of its last step, and nothing more is computed for it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GPT2LMHeadModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel, slice_logits_to_keep
from transformers.processing_utils import Unpack
from transformers.utils import can_return_tuple
from transformers.utils.generic import TransformersKwargs, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .active_tokens import ActiveTokens, LoopState
from .configuration_recurrent_gpt2 import RecurrentGPT2Config
from .exit_policies import LoopView, Policy, check_exits, resolve_exit_policy
from .fast_layers import Linear, RMSNorm
from .from_gpt2 import config_from_gpt2, load_gpt2_weights
from .generation_recurrent_gpt2 import LoopGenerationMixin
from .loop_cache import LoopCache

# Start states (Geiping et al.): truncated at 3 sigma, standard deviation sqrt(2/5) per coordinate.
START_STATE_STD = math.sqrt(2 / 5)
# Attention kernels that take any set of queries with a mask to match. Others compute all tokens and freeze some.
GATHERING_KERNELS = ("sdpa", "eager")
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

    loop_steps: torch.LongTensor | None = None
    loop_trajectory: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class RecurrentCausalLMOutputWithPast(CausalLMOutputWithPast):
    """`CausalLMOutputWithPast` with `loop_steps` and `loop_trajectory`, as in [`RecurrentModelOutputWithPast`]."""

    loop_steps: torch.LongTensor | None = None
    loop_trajectory: tuple[torch.FloatTensor, ...] | None = None


def sample_num_loops(config: RecurrentGPT2Config, generator: torch.Generator | None = None) -> list[int]:
    """Draws the training loop counts: one per group, 1 + Poisson(rate), rate ~ LogNormal(ln r - sigma^2 / 2, sigma).

    The rate has mean r = `config.mean_loops`, so the count has mean r + 1 and variance r + r^2 (exp(sigma^2) - 1).
    Without a sigma nothing is drawn: the count is r.
    """
    if config.loop_sigma is None:
        return [int(config.mean_loops)] * len(config.loop_groups)
    mu = math.log(config.mean_loops) - config.loop_sigma**2 / 2
    normal = torch.randn(len(config.loop_groups), generator=generator)
    rate = torch.exp(mu + config.loop_sigma * normal)
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

        self.qkv_proj = Linear(config.hidden_size, 3 * config.hidden_size)
        self.o_proj = Linear(config.hidden_size, config.hidden_size)
        self.o_proj.is_output_projection = True

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: LoopCache | None = None,
        loop_step: int = 0,
        active: ActiveTokens | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        batch, length, hidden = hidden_states.shape  # 1, n, hidden if only the active tokens are here
        qkv = self.qkv_proj(hidden_states).view(batch, length, 3, self.num_heads, self.head_dim)
        query, key, value = qkv.unbind(2)
        if active is not None:
            query = active.pad(query)
            attention_mask = active.pad_mask(attention_mask)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx, loop_step=loop_step, active=active)

        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
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
        return self.o_proj(output.reshape(batch, length, hidden)), weights


class RecurrentGPT2MLP(nn.Module):
    def __init__(self, config: RecurrentGPT2Config):
        super().__init__()
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)
        self.down_proj.is_output_projection = True
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(hidden_states)))


class RecurrentGPT2Block(GradientCheckpointingLayer):
    """A sandwich block: a = n2(x + Attention(n1(x))), y = n4(a + MLP(n3(a)))."""

    def __init__(self, config: RecurrentGPT2Config, layer_idx: int):
        super().__init__()
        self.attention_input_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention = RecurrentGPT2Attention(config, layer_idx)
        self.attention_output_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp_input_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = RecurrentGPT2MLP(config)
        self.mlp_output_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
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
        self.state_proj = Linear(config.hidden_size, config.hidden_size)
        self.input_proj = Linear(config.hidden_size, config.hidden_size)

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
    _can_record_outputs = {"hidden_states": RecurrentGPT2Block, "attentions": RecurrentGPT2Attention}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            self._init_matrix(module.weight, getattr(module, "is_output_projection", False))
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

    def save_pretrained(self, *args, **kwargs):
        """`PreTrainedModel.save_pretrained`, after which all auto classes find the code, whichever class was saved."""
        self.config.auto_map = dict(AUTO_MAP)
        return super().save_pretrained(*args, **kwargs)

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
class _LoopContext:
    """What the loops of one forward pass share."""

    position_ids: torch.Tensor  # [batch or 1, seq]
    attention_mask: Any  # in the form that the attention kernel takes; None: plain causal
    make_dense_mask: Callable[[], torch.Tensor | None]  # the same as a tensor [batch, 1, seq, keys]
    real_tokens: torch.Tensor | None  # [batch, seq]; None: all tokens are looped, padding too if there is any
    cache: LoopCache | None
    freeze: bool  # compute all tokens and freeze the inactive, for kernels that can't take the active ones alone
    decode: Callable[[torch.Tensor], torch.Tensor]
    keep_trajectory: bool
    kwargs: dict[str, Any]  # for the layers
    _dense_mask: torch.Tensor | None = None

    def dense_mask(self) -> torch.Tensor | None:
        """Made when some token first leaves its loop."""
        if self._dense_mask is None:
            self._dense_mask = self.make_dense_mask()
        return self._dense_mask


class RecurrentGPT2Model(RecurrentGPT2PreTrainedModel):
    def __init__(self, config: RecurrentGPT2Config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.embedding_scale = math.sqrt(config.hidden_size)
        self.dropout = nn.Dropout(config.embd_dropout)
        self.layers = nn.ModuleList(RecurrentGPT2Block(config, index) for index in range(config.num_hidden_layers))
        self.loop_inputs = nn.ModuleList(RecurrentGPT2LoopInput(config) for _ in config.loop_groups)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.register_buffer("start_noise", self.make_start_noise(), persistent=False)
        self.gradient_checkpointing = False
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
            num_loops: Loops of every group, or one number per group. In training, drawn at random when left out.
            exit_policy: When tokens leave a loop before `num_loops`: see `exit_policies.py`. Eval mode only.
            output_loop_trajectory: Return the states of all loop steps.
            decode: Maps states to logits, for policies that ask for them; `RecurrentGPT2ForCausalLM` passes its head.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of `input_ids` and `inputs_embeds`.")
        policies = resolve_exit_policy(exit_policy, len(self.config.loop_groups))
        adaptive = any(policy is not None for policy in policies)
        if self.training and adaptive:
            raise ValueError("`exit_policy` is for inference: call `model.eval()` first, or leave it out in training.")
        if self.training and num_loops is None:
            num_loops = sample_num_loops(self.config)
        num_loops = self.config.loops_per_group(num_loops)

        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if past_key_values is None and use_cache and not self.training:
            past_key_values = LoopCache(self.config)
        self._check_cache(past_key_values, adaptive)
        if position_ids is None:
            position_ids = self._count_positions(inputs_embeds, attention_mask, past_key_values)
        self._check_length(inputs_embeds, position_ids, past_key_values)
        real_tokens = None  # [batch, seq], where padding is known
        if attention_mask is not None and attention_mask.ndim == 2:
            real_tokens = attention_mask[:, -inputs_embeds.shape[1] :].bool()
        context = self._loop_context(
            inputs_embeds, attention_mask, position_ids, past_key_values, real_tokens, adaptive, kwargs,
            decode or _no_head, output_loop_trajectory,
        )  # fmt: skip

        hidden_states = (inputs_embeds + self.embed_positions(position_ids)) * self.embedding_scale
        hidden_states = self.dropout(hidden_states)
        loop_steps, trajectories = [], []
        group_starting_at = {group[0]: index for index, group in enumerate(self.config.loop_groups)}
        layer = 0
        while layer < len(self.layers):
            group = group_starting_at.get(layer)
            if group is not None:
                hidden_states, steps, trajectory = self._run_group(
                    group, hidden_states, num_loops[group], policies[group], context
                )
                loop_steps.append(steps)
                trajectories.append(trajectory)
                layer += len(self.config.loop_groups[group])
                continue
            cache_arguments = {} if past_key_values is None else {"past_key_values": past_key_values}
            hidden_states = self.layers[layer](
                hidden_states, attention_mask=context.attention_mask, **cache_arguments, **kwargs
            )
            layer += 1
        hidden_states = self.norm(hidden_states)

        if loop_steps:
            loop_steps = torch.stack(loop_steps, dim=-1)
        else:
            loop_steps = torch.zeros(*hidden_states.shape[:2], 0, dtype=torch.long, device=hidden_states.device)
        if real_tokens is not None:
            loop_steps = loop_steps * real_tokens[..., None]  # padding may have been looped with the rest
        if past_key_values is not None and not past_key_values.is_compileable:
            past_key_values.record_loop_steps(loop_steps)
        return RecurrentModelOutputWithPast(
            last_hidden_state=hidden_states,
            past_key_values=past_key_values,
            loop_steps=loop_steps,
            loop_trajectory=tuple(trajectories) if output_loop_trajectory else None,
        )

    def _run_group(
        self, group: int, entry: torch.Tensor, num_loops: int, policy: Policy | None, context: _LoopContext
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The loop of a group, from its input e [batch, seq, hidden] to every token's last state, the same shape; with
        the steps taken [batch, seq] and, if asked for, the states of all steps [steps + 1, batch, seq, hidden]."""
        noise = None  # fresh in training
        if not self.training and (self.config.state_init == "noise" or self.config.loop_noise > 0):
            noise = self.start_noise[group][context.position_ids].expand_as(entry)
        loop = LoopState(
            self._start_state(entry, noise),
            self.loop_inputs[group].input_proj(entry),
            context.real_tokens,
        )
        trajectory = [loop.final]
        first_with_gradient = 0
        if self.training and self.config.backprop_loops is not None:
            first_with_gradient = num_loops - self.config.backprop_loops

        for step in range(num_loops):
            with torch.set_grad_enabled(torch.is_grad_enabled() and step >= first_with_gradient):
                new_state = self._step(group, step, loop, noise, context)
            previous_state, loop.state = loop.state, new_state
            if context.keep_trajectory:
                trajectory.append(loop.all_states())
            if policy is None or step == num_loops - 1:
                continue
            state = new_state.flatten(0, 1)
            update = state - previous_state.flatten(0, 1)
            exits = policy(LoopView(group, step, state, update, loop.previous_update, loop.memory, context.decode))
            check_exits(exits, policy, state.shape[0], loop.memory)
            loop.previous_update = update
            leaving = int(exits.count_nonzero())
            if leaving == state.shape[0]:
                break
            if leaving > 0:
                loop.leave(exits, step + 1)

        loop.finish(step + 1)
        return loop.final, loop.loop_steps, torch.stack(trajectory) if context.keep_trajectory else None

    def _step(
        self, group: int, step: int, loop: LoopState, noise: torch.Tensor | None, context: _LoopContext
    ) -> torch.Tensor:
        """s(k+1) of the active tokens, from `loop.state` = s(k)."""
        state, active = loop.state, loop.active
        if self.config.loop_noise > 0:
            state = state + self.config.loop_noise * self._step_noise(step, state, noise, active)
        arguments = dict(context.kwargs)
        if context.cache is not None:
            arguments |= {"past_key_values": context.cache, "loop_step": step}
        if context.freeze:
            return self._frozen_step(group, state, loop, context.attention_mask, arguments)

        arguments["attention_mask"] = context.attention_mask
        if active is not None:
            arguments |= {"attention_mask": context.dense_mask(), "active": active}
        hidden_states = self.loop_inputs[group](state, loop.projected_input)
        for index in self.config.loop_groups[group]:
            hidden_states = self.layers[index](hidden_states, **arguments)
        return hidden_states

    def _frozen_step(
        self, group: int, state: torch.Tensor, loop: LoopState, attention_mask: Any, arguments: dict[str, Any]
    ) -> torch.Tensor:
        """The same step with all tokens computed. An inactive one keeps what it had at its last step: the input of each
        layer, and with it its keys and values, and the output."""
        active, before = loop.active, loop.layer_values
        if active is not None:
            state = active.unpack(state, loop.final)
        frozen = None if active is None or not before else ~active.as_mask()
        values = [self.loop_inputs[group](state, loop.all_projected_inputs)]
        if frozen is not None:
            values[0] = torch.where(frozen[..., None], before[0], values[0])
        for place, index in enumerate(self.config.loop_groups[group], start=1):
            keep = None if frozen is None else (frozen, before[place])
            values.append(self.layers[index](values[-1], attention_mask=attention_mask, frozen=keep, **arguments))
        loop.layer_values = values
        return values[-1] if active is None else active.pack(values[-1])

    def _start_state(self, entry: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        """s(0). `noise` is that of eval mode; in training it is None, and fresh noise is drawn."""
        if self.config.state_init == "input":
            return entry
        if self.config.state_init == "zeros":
            return torch.zeros_like(entry)
        return _fill_with_noise(torch.empty_like(entry)) if noise is None else noise

    def _step_noise(
        self, step: int, state: torch.Tensor, noise: torch.Tensor | None, active: ActiveTokens | None
    ) -> torch.Tensor:
        """Noise of a loop step. In eval mode it is the position's start noise, rotated by a number of places that
        depends on the step: as good as fresh, yet a fixed function of seed, group, position and step."""
        if noise is None:
            return _fill_with_noise(torch.empty_like(state))
        return (noise if active is None else active.pack(noise)).roll(step + 1, dims=-1)

    def _loop_context(
        self,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor,
        past_key_values: LoopCache | None,
        real_tokens: torch.Tensor | None,
        adaptive: bool,
        kwargs: dict[str, Any],
        decode: Callable[[torch.Tensor], torch.Tensor],
        keep_trajectory: bool,
    ) -> _LoopContext:
        config = self.config
        mask = create_causal_mask(config, inputs_embeds, attention_mask, past_key_values, position_ids=position_ids)

        def make_dense_mask() -> torch.Tensor | None:
            if mask is not None or inputs_embeds.shape[1] == 1:
                return mask
            # No mask was needed, so these tokens are the first; the cache has grown since and must not be asked.
            return create_causal_mask(config, inputs_embeds, attention_mask, None, allow_is_causal_skip=False)

        # Padding is left out of loops, but for training (whose batches are full), and compiled code and static caches
        # (whose shapes must not depend on data).
        is_static = past_key_values is not None and past_key_values.is_compileable
        if (
            self.training
            or is_static
            or torch.compiler.is_compiling()
            or (real_tokens is not None and real_tokens.all())
        ):
            real_tokens = None
        some_inactive = adaptive or real_tokens is not None
        recorded = ("output_hidden_states", "output_attentions")
        records = any(kwargs.get(name) or getattr(config, name) for name in recorded)
        freeze = some_inactive and (records or config._attn_implementation not in GATHERING_KERNELS)
        if past_key_values is None and some_inactive and not freeze:
            past_key_values = LoopCache(config, "last_step")  # for the chunk's own keys and values, while it loops
        return _LoopContext(
            position_ids, mask, make_dense_mask, real_tokens, past_key_values, freeze, decode, keep_trajectory, kwargs
        )

    def _count_positions(
        self, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None, past_key_values: LoopCache | None
    ) -> torch.Tensor:
        """Positions of the new tokens. Padding is not counted, on whichever side it is."""
        length = inputs_embeds.shape[1]
        if attention_mask is not None and attention_mask.ndim == 2:
            return (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, -length:]
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        return (torch.arange(length, device=inputs_embeds.device) + past)[None]

    def _check_length(
        self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor, past_key_values: LoopCache | None
    ) -> None:
        if torch.compiler.is_compiling():
            return
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        limit = self.config.max_position_embeddings
        # Reading positions makes a GPU wait: there, only a text that may be too long is looked at.
        if position_ids.device.type != "cpu" and past + inputs_embeds.shape[1] <= limit:
            return
        first, last = int(position_ids.min()), int(position_ids.max())
        if first < 0 or last >= limit:
            raise ValueError(
                f"the text has positions {first} to {last} (`position_ids`), that is, up to {last + 1} tokens, but the "
                f"model has positions for {limit} (`max_position_embeddings`): shorten the text, or generate less."
            )

    def _check_cache(self, past_key_values: Cache | None, adaptive: bool) -> None:
        # By what it can do, not by its class: remote code and the installed package have a class of their own each.
        if past_key_values is not None and not hasattr(past_key_values, "record_loop_steps"):
            raise ValueError(
                f"`past_key_values` is a {type(past_key_values).__name__}, which has no slots for loop steps. Leave it "
                "out, or pass `LoopCache(model.config)` (from `recurrent_gpt2`)."
            )
        if past_key_values is not None and past_key_values.is_compileable and adaptive:
            raise ValueError("a static cache takes fixed loops only: leave out `exit_policy`, or the static cache.")


class RecurrentGPT2ForCausalLM(LoopGenerationMixin, RecurrentGPT2PreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: RecurrentGPT2Config):
        super().__init__(config)
        self.model = RecurrentGPT2Model(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    @classmethod
    def from_gpt2(
        cls,
        gpt2: GPT2LMHeadModel | str,
        loop_groups: list[list[int]] | None = None,
        calibration_ids: torch.Tensor | None = None,
        **settings: Any,
    ) -> "RecurrentGPT2ForCausalLM":
        """A looped model that starts from a pretrained GPT-2 (a model, or a name or folder to load).

        `calibration_ids` [batch, length] is text to measure GPT-2 on; it samples some where none is given. `settings`
        are fields of the config. `model.conversion_report` says what was carried over, initialized and dropped.
        """
        if isinstance(gpt2, str):
            gpt2 = GPT2LMHeadModel.from_pretrained(gpt2)
        was_training = gpt2.training
        model = cls(config_from_gpt2(gpt2, loop_groups, **settings))
        model.conversion_report = load_gpt2_weights(model, gpt2.eval(), calibration_ids)
        gpt2.train(was_training)
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
    std = START_STATE_STD
    return nn.init.trunc_normal_(tensor, std=std, a=-3 * std, b=3 * std, generator=generator)


def _no_head(states: torch.Tensor) -> torch.Tensor:
    raise ValueError("this exit policy decodes states, and needs a head: use it with `RecurrentGPT2ForCausalLM`.")


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
