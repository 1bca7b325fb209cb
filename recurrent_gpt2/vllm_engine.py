"""RecurrentGPT2 in vLLM: its Transformers backend, with exits and with a slot of keys and values per loop step.

The network is the package's own, called with a cache that is vLLM's: [`EngineSlots`]. Tokens that have left a loop are
not computed: projections and MLP take the active tokens, and attention, whose kernels want all tokens of a pass, gets
the last keys and values of the others. `vllm_plugin.py` says how it is started.
"""

import time
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import unified_kv_cache_update
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.model_executor.models.utils import maybe_prefix
from vllm.platforms import current_platform

from .active_tokens import ActiveTokens
from .vllm_plugin import LoopSettings

logger = init_logger("vllm.recurrent_gpt2")

ATTENTION = "recurrent_gpt2_vllm"
SECONDS_BETWEEN_LOGS = 10.0


class EngineSlots:
    """The keys and values of an engine during one pass, as the cache that the model's layers update.

    `of_layer` has the attentions of every layer: one, or one per loop step. Each has a slot in the engine, and writes
    to it what it is called with, for all tokens of the pass.
    """

    is_compileable = False
    takes_active_tokens = True

    def __init__(self, of_layer: list[Any], keep: bool):
        self.of_layer = of_layer
        self.keep = keep  # keys and values of looped layers, for the tokens that will have left
        self.attention: Any = None  # of the last update
        self.active: ActiveTokens | None = None
        self.last: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}  # layer: step, keys and values
        self.loop_steps: Any = None  # [1, tokens, groups], after the pass

    def update(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        loop_step: int = 0,
        active: ActiveTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values [1, heads, tokens, head_dim] of all tokens, given those of the active ones."""
        attentions = self.of_layer[layer]
        self.attention, self.active = attentions[min(loop_step, len(attentions) - 1)], active
        if active is not None:
            _, all_keys, all_values = self.last[layer]
            key, value = (
                active.unpack(new.transpose(1, 2), old.transpose(1, 2)).transpose(1, 2)
                for new, old in ((key, all_keys), (value, all_values))
            )
        if self.keep:
            self.last[layer] = loop_step, key, value
        return key, value

    def fill_deeper_slots(self) -> None:
        """Deeper steps than any token took see all of them through their last."""
        for layer, (step, key, value) in self.last.items():
            deeper = list(self.of_layer[layer])[step + 1 :]
            if deeper:
                key, value = (_flat(x, deeper[0].head_size) for x in (key, value))
            for attention in deeper:
                unified_kv_cache_update(key, value, attention.layer_name)

    def record_loop_steps(self, loop_steps: torch.Tensor) -> None:
        self.loop_steps = loop_steps

    def get_seq_length(self, layer: int = 0) -> int:
        return 0  # the engine counts

    def check_pass(self, *sizes: Any) -> None:
        """The engine has checked it."""


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    slots: EngineSlots,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in the engine, of the slot that was updated last."""
    attention, active = slots.attention, slots.active
    if active is not None:
        query = query.transpose(1, 2)  # [1, n, heads, head_dim]
        query = active.unpack(query, query.new_zeros(1, active.length, *query.shape[2:])).transpose(1, 2)
    states = (_flat(x, attention.head_size).flatten(1) for x in (query, key, value))
    output = attention(*states).view(1, query.shape[2], -1, attention.head_size)[..., : query.shape[-1]]
    return (output if active is None else active.pack(output)), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)


def _flat(states: torch.Tensor, head_size: int) -> torch.Tensor:
    """[1, heads, tokens, head_dim] -> [tokens, heads, head_size]: zeros where the kernel wants larger heads."""
    states = nn.functional.pad(states, (0, head_size - states.shape[-1]))
    return states.squeeze(0).transpose(0, 1).contiguous()


def _supported_head_size(head_dim: int) -> int:
    """The least size of heads that the attention kernel takes. What is added are zeros, which change nothing."""
    if not current_platform.is_cpu():
        return head_dim
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if head_dim > max(sizes):
        raise ValueError(f"the model's heads have {head_dim} dimensions, but vLLM's attention takes {max(sizes)} here.")
    return min(size for size in sizes if size >= head_dim)


class RecurrentGPT2ForVLLM(TransformersForCausalLM):
    """A RecurrentGPT2 checkpoint in vLLM, with the loops that [`LoopSettings`] finds."""

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        self.loops = LoopSettings.of(vllm_config)  # first: attentions are made by it
        self.step_counts = StepCounts(len(self.loops.num_loops))
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    def _patch_config(self) -> None:
        super()._patch_config()
        self.text_config._attn_implementation = ATTENTION

    def recursive_replace(self) -> None:
        super().recursive_replace()
        for name, module in self.model.named_modules():
            if hasattr(module, "qkv_proj"):  # shared out by heads, not by thirds
                module.qkv_proj = QKVParallelLinear(
                    self.text_config.hidden_size,
                    module.head_dim,
                    module.num_heads,
                    bias=self.text_config.use_bias,
                    quant_config=self.quant_config,
                    prefix=f"model.{name}.qkv_proj",
                    return_bias=False,
                )

    def _create_attention_instances(self, prefix: str = "") -> None:
        """One a layer, or one per loop step of a looped layer. vLLM makes a slot for each, and tells them by number."""
        config, parallel = self.text_config, self.parallel_config
        exact = self.loops.cache_strategy == "per_step"
        steps = dict.fromkeys(range(config.num_hidden_layers), 1)
        for group, loops in zip(config.loop_groups, self.loops.num_loops, strict=True):
            steps |= dict.fromkeys(group, loops if exact else 1)
        heads = self.model_config.get_num_attention_heads(parallel)
        self.attentions, number = [], 0
        for layer, count in steps.items():
            module = self.model.layers[layer].attention
            module.attn = nn.ModuleList(
                Attention(
                    num_heads=heads,
                    head_size=_supported_head_size(module.head_dim),
                    scale=module.scaling,
                    num_kv_heads=heads,
                    cache_config=self.cache_config,
                    quant_config=self.quant_config,
                    prefix=maybe_prefix(prefix, f"model.applications.{number + step}.attn"),
                )
                for step in range(count)
            )
            self.attentions.append(module.attn)
            number += count
        backend = self.attentions[0][0].attn_backend
        if exact and self.loops.is_adaptive and backend.forward_includes_kv_cache_update:
            raise ValueError(
                f"{backend.get_name()} can't write keys and values by themselves, as exits need with a slot per loop "
                "step: choose `cache_strategy` 'last_step', no exit policy, or another attention backend."
            )
        logger.info("%d slots of keys and values, for %d layers.", number, config.num_hidden_layers)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        slots = EngineSlots(self.attentions, keep=self.loops.is_adaptive)
        hidden_states = super().forward(
            *args,
            past_key_values=slots,
            slots=slots,
            num_loops=self.loops.num_loops,
            exit_policy=self.loops.policies,
            decode=self.decode_states,
            **kwargs,
        )
        slots.fill_deeper_slots()
        if get_forward_context().attn_metadata is not None:  # else the engine only measures or warms up
            self.step_counts.add(slots.loop_steps)
        return hidden_states

    def decode_states(self, states: torch.Tensor) -> torch.Tensor:
        """Logits that the final norm and the head read from any states [n, hidden]."""
        return self.compute_logits(self.model.norm(states))


class StepCounts:
    """The loop steps that tokens took, prompts included: in all, and in the log from time to time."""

    def __init__(self, groups: int):
        self.tokens, self.steps = 0, [0] * groups  # of each group
        self._logged = time.monotonic()
        self._tokens_before, self._steps_before = 0, list(self.steps)

    def add(self, loop_steps: torch.Tensor) -> None:
        """[1, tokens, groups]"""
        self.tokens += loop_steps.shape[1]
        self.steps = [known + new for known, new in zip(self.steps, loop_steps.sum((0, 1)).tolist(), strict=True)]
        now = time.monotonic()
        if now - self._logged > SECONDS_BETWEEN_LOGS:
            self._log(now)

    @property
    def means(self) -> list[float]:
        return [steps / max(self.tokens, 1) for steps in self.steps]

    def _log(self, now: float) -> None:
        tokens = self.tokens - self._tokens_before
        means = [(now - before) / tokens for now, before in zip(self.steps, self._steps_before, strict=True)]
        logger.info("Loop steps of a token, mean of each group: %s (%d tokens).", [f"{m:.2f}" for m in means], tokens)
        self._logged, self._tokens_before, self._steps_before = now, self.tokens, list(self.steps)


def make_scheduler_without_preemption(*, vllm_config: Any, kv_cache_config: Any, **kwargs: Any) -> Any:
    """vLLM's scheduler, which takes in as many requests as it has room for however long they get: it never has to throw
    a text out and compute it again, in passes other than before."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    of_engine = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    scheduler = of_engine(vllm_config=vllm_config, kv_cache_config=kv_cache_config, **kwargs)
    blocks = -(-vllm_config.model_config.max_model_len // kwargs["block_size"])
    room = max((kv_cache_config.num_blocks - 1) // blocks, 1)  # one block is never handed out
    if room < scheduler.max_num_active_reqs:
        logger.warning(
            "%d requests run at once, not %d: there is room for as many of %d tokens, and none may be computed again.",
            room, scheduler.max_num_active_reqs, vllm_config.model_config.max_model_len,
        )  # fmt: skip
        scheduler.max_num_active_reqs = room
    return scheduler
