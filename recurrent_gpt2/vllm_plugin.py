"""What vLLM finds of this package: where it is installed beside vLLM, `vllm serve CHECKPOINT` needs no more.

vLLM calls [`register`] in each of its processes (the entry point `vllm.general_plugins`). It names the model of
`vllm_engine.py` for our checkpoints, and [`LoopSettings`] settles, before an engine starts, what it will run:

- `exit_policy`, `num_loops` and `cache_strategy` are those of `--override-generation-config`, else of the checkpoint's
  generation config, else of its config: what `generate` would take.
- `per_step` gives every loop step its own slot of keys and values, so that an answer is that of `generate`, however a
  prompt is cut, cached or computed again. `last_step` gives a layer one slot. Within a pass tokens see each other step
  by step, across passes through last steps only, so every text must be computed in the same passes: its prompt in one,
  then a token at a time. What would change that is switched off or refused.
"""

from dataclasses import dataclass
from typing import Any

from .exit_policies import Policy, resolve_exit_policy
from .generation_recurrent_gpt2 import LOOP_ARGUMENTS
from .loop_cache import check_cache_strategy

ARCHITECTURE = "RecurrentGPT2ForCausalLM"


def register() -> None:
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    ModelRegistry.register_model(ARCHITECTURE, "recurrent_gpt2.vllm_engine:RecurrentGPT2ForVLLM")
    MODELS_CONFIG_MAP[ARCHITECTURE] = LoopSettings


@dataclass
class LoopSettings:
    """How an engine loops, from its settings (vLLM's `VllmConfig`)."""

    num_loops: list[int]  # of each group; the most, under a policy
    policies: list[Policy | None]
    cache_strategy: str

    @classmethod
    def of(cls, vllm_config: Any) -> "LoopSettings":
        model_config = vllm_config.model_config
        config = model_config.hf_config
        given = {**model_config.try_get_generation_config(), **model_config.override_generation_config}
        chosen = {name: given.get(name) for name in LOOP_ARGUMENTS}
        cache_strategy = chosen["cache_strategy"] or config.cache_strategy
        check_cache_strategy(cache_strategy)
        policies = resolve_exit_policy(chosen["exit_policy"], len(config.loop_groups))
        return cls(config.loops_per_group(chosen["num_loops"]), policies, cache_strategy)

    @property
    def is_adaptive(self) -> bool:
        return any(policy is not None for policy in self.policies)

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Nothing: vLLM calls it before `verify_and_update_config`."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        """Called by vLLM before an engine starts: switches off or refuses what would make answers wrong."""
        from vllm.logger import init_logger

        logger = init_logger("vllm.recurrent_gpt2")
        settings = cls.of(vllm_config)
        shown = [getattr(policy, "name", "none") for policy in settings.policies]
        logger.info(
            "Loops of each group: %s, exit policies: %s, keys and values: %s.",
            settings.num_loops, shown, settings.cache_strategy,
        )  # fmt: skip
        stages = vllm_config.parallel_config.pipeline_parallel_size
        if stages > 1:
            raise ValueError(
                f"`pipeline_parallel_size` is {stages}, but a loop can't be cut between processes: set it to 1, and "
                "use `tensor_parallel_size` or several servers."
            )
        if not vllm_config.model_config.enforce_eager:
            logger.info("Nothing is compiled: how many loops a pass takes is known only while it runs.")
            vllm_config.model_config.enforce_eager = True
        if settings.cache_strategy == "last_step":
            settings._keep_passes(vllm_config, logger)

    @staticmethod
    def _keep_passes(vllm_config: Any, logger: Any) -> None:
        """With one slot a layer: every prompt in one pass, then a token at a time, none computed again."""
        if vllm_config.speculative_config is not None:
            raise ValueError(
                "speculative decoding checks several tokens in one pass, which changes answers where a layer has one "
                "slot of keys and values (`cache_strategy` 'last_step'): leave it out, or choose 'per_step'."
            )
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        if scheduler.enable_chunked_prefill or cache.enable_prefix_caching:
            logger.warning(
                "Chunked prefill and prefix caching are switched off: with one slot of keys and values a layer "
                "(`cache_strategy` 'last_step') answers would depend on them. 'per_step' allows both."
            )
        scheduler.enable_chunked_prefill = cache.enable_prefix_caching = False
        scheduler.long_prefill_token_threshold = 0
        scheduler.verify_max_model_len(vllm_config.model_config.max_model_len)
        if scheduler.scheduler_cls is not None:
            raise ValueError(
                f"`scheduler_cls` is {scheduler.scheduler_cls}, but with `cache_strategy` 'last_step' the scheduler is "
                "one that never computes a text again: leave it out, or choose 'per_step'."
            )
        scheduler.scheduler_cls = "recurrent_gpt2.vllm_engine.make_scheduler_without_preemption"
