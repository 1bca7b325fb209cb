"""What `generate` needs to know about loops: their arguments, their cache, and the steps that tokens took.

Everything else (sampling, beams, assistants, streamers, stopping) is the stock `GenerationMixin`.
"""

import copy
from functools import partial, wraps
from typing import Any, cast

import torch
from transformers.generation import GenerationMixin
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module
from transformers.utils import ModelOutput, logging

from .exit_policies import exit_policy_to_json, resolve_exit_policy
from .loop_cache import LoopCache, check_cache_strategy
from .pipelined_drafts import PipelinedGeneration

logger = logging.get_logger(__name__)

# Arguments of `generate` that may also stand in a generation config, as a checkpoint's default.
LOOP_ARGUMENTS = ("exit_policy", "num_loops", "cache_strategy")
CACHE_IMPLEMENTATIONS = (None, "dynamic", "static")
# Attention kernels that take any set of queries with a mask to match. Others compute all tokens and freeze some.
GATHERING_KERNELS = ("sdpa", "eager")
DRAFTED_TOKENS = 4  # before a verification of its own


class LoopGenerationMixin(GenerationMixin):
    """Goes before `GenerationMixin` among the bases of a looped model."""

    def generate(self, *args, **kwargs):
        """`GenerationMixin.generate` with three more arguments, which may also be set in the generation config:

        exit_policy: When a token leaves a loop: a name, a policy, a dict, a callable, or a list with one per group.
        num_loops: Loops of every group, or one number per group; with an exit policy, the most.
        cache_strategy: `per_step` (exact) or `last_step` (less memory, approximate).

        With `return_dict_in_generate=True` the output has `loop_steps` [rows, tokens - 1, groups]: the steps taken at
        each token to predict the next one, 0 at padding. (The last token generated is not fed to the model again.)
        """
        _check_cache_implementation(kwargs.get("cache_implementation"))
        return super().generate(*args, **kwargs)

    def init_continuous_batching(self, *args, **kwargs):
        raise ValueError(
            "continuous batching (`generate_batch`, the paged cache) has no slots for loop steps and would give wrong "
            "tokens: use `generate`."
        )

    continuous_batching_context_manager = init_continuous_batching
    generate_batch = init_continuous_batching

    def draft(self, num_loops: int | list[int], exit_policy: Any = None, num_tokens: int | None = None):
        """This model with fewer loops and the same weights, to be the `assistant_model` of `generate`.

        Args:
            num_loops: Of a draft; with an exit policy, the most.
            exit_policy: When the tokens of a draft leave their loops.
            num_tokens: That are drafted before they are verified, always as many, however confident the draft is. When
                left out, tokens are verified while further ones are drafted (see `pipelined_drafts.py`), where both
                have fixed loops and the model has one group; else four are drafted at a time.
        """
        if num_tokens is not None and (type(num_tokens) is not int or num_tokens < 1):
            raise ValueError(
                f"`num_tokens` is {num_tokens!r}, but must be a positive number of tokens, or None for a pipeline."
            )
        draft = copy.copy(self)
        draft.generation_config = copy.deepcopy(self.generation_config)
        draft.generation_config.num_loops = self.config.loops_per_group(num_loops)
        draft.generation_config.exit_policy = exit_policy
        draft.generation_config.num_assistant_tokens = num_tokens or DRAFTED_TOKENS
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        draft._is_pipelined = num_tokens is None and exit_policy is None
        return draft

    _is_pipelined = False  # a draft that is verified as it is made

    def _prepare_generation_config(self, generation_config, **kwargs):
        """Takes the arguments of the loops, or their defaults, out of the generation config: they go to `forward`."""
        given = {name: kwargs.pop(name) for name in LOOP_ARGUMENTS if name in kwargs}
        generation_config, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        if generation_config.assistant_early_exit is not None:
            raise ValueError(
                "`assistant_early_exit` cuts layers off, which loops do not survive: use "
                "`assistant_model=model.draft(num_loops=2)`."
            )
        defaults = {name: generation_config.__dict__.pop(name, None) for name in LOOP_ARGUMENTS}
        chosen = {**defaults, **given}
        if chosen["num_loops"] is not None:
            chosen["num_loops"] = self.config.loops_per_group(chosen["num_loops"])
        policies = resolve_exit_policy(chosen["exit_policy"], len(self.config.loop_groups))
        chosen["exit_policy"] = policies if any(policy is not None for policy in policies) else None
        if chosen["exit_policy"] is not None and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(self)):
            raise ValueError(
                "`exit_policy` needs whole weights: with ZeRO-3 or FSDP, processes whose tokens leave at different "
                "steps would wait for each other for ever. Set it to None."
            )
        model_kwargs.update({name: value for name, value in chosen.items() if value is not None})
        return generation_config, model_kwargs

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        model_kwargs.pop("cache_strategy", None)  # not for `forward`: `_prepare_cache_for_generation` takes it
        super()._validate_model_kwargs(model_kwargs)

    @wraps(GenerationMixin.prepare_inputs_for_generation)  # `generate` looks at its parameters
    def prepare_inputs_for_generation(self, *args, attention_mask: torch.Tensor | None = None, **kwargs):
        inputs = super().prepare_inputs_for_generation(*args, attention_mask=attention_mask, **kwargs)
        # For a static cache the mask is made ready here, 4D, and does not tell padding any more.
        if attention_mask is not None and attention_mask.ndim == 2 and inputs["attention_mask"].ndim == 4:
            tokens = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
            inputs["real_tokens"] = attention_mask[:, -tokens.shape[1] :].bool()
        return inputs

    def _prepare_model_inputs(self, *args, **kwargs):
        inputs, name, model_kwargs = super()._prepare_model_inputs(*args, **kwargs)
        if 0 in inputs.shape[:2]:
            raise ValueError(f"`{name}` has {inputs.shape[0]} row(s) of {inputs.shape[1]} tokens: there is no prompt.")
        return inputs, name, model_kwargs

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ) -> None:
        cache_strategy = model_kwargs.pop("cache_strategy", None)
        _check_cache_implementation(generation_config.cache_implementation)
        check_cache_strategy(cache_strategy or self.config.cache_strategy)
        max_cache_length = self._limit_length(generation_config, model_kwargs, max_cache_length)
        if model_kwargs.get("past_key_values") is not None or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            return
        length = None
        if generation_config.cache_implementation == "static":
            # As the stock cache: as long as the longest so far, so that a shorter text needs no new compilation.
            known = (getattr(generation_config, "max_cache_len", None), getattr(self, "_previous_max_cache_length", 0))
            length = self._previous_max_cache_length = max(max_cache_length, *(known or 0 for known in known))
        model_kwargs["past_key_values"] = LoopCache(self.config, cache_strategy, length, model_kwargs.get("num_loops"))

    def _get_logits_processor(self, *args, model_kwargs: dict[str, Any] | None = None, **kwargs):
        """Guidance runs the model once more at every token, without a prompt: with the same loops."""
        processors = super()._get_logits_processor(*args, model_kwargs=model_kwargs, **kwargs)
        for processor in processors:
            if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
                given = model_kwargs or {}
                loops = {name: given.get(name) for name in ("exit_policy", "num_loops")}
                processor.model = partial(self.__call__, **loops)
                if processor.unconditional_context["use_cache"]:
                    strategy = getattr(given.get("past_key_values"), "cache_strategy", None)
                    processor.unconditional_context["past_key_values"] = LoopCache(self.config, strategy)
        return processors

    def _limit_length(self, generation_config, model_kwargs: dict[str, Any], max_cache_length: int) -> int:
        """Ends generation at the last position that the model has, with a warning, instead of failing there."""
        attention_mask = model_kwargs.get("attention_mask")
        padding = 0 if attention_mask is None else int((attention_mask == 0).sum(1).min())
        allowed = self.config.max_position_embeddings + padding
        if max_cache_length > allowed:
            logger.warning(
                f"generation ends at {allowed + 1} tokens, not {generation_config.max_length}: the model has positions "
                f"for {self.config.max_position_embeddings} (`max_position_embeddings`)."
            )
            generation_config.max_length -= max_cache_length - allowed
        return min(max_cache_length, allowed)

    def _get_candidate_generator(self, *args, generation_config, model_kwargs: dict[str, Any], **kwargs):
        # An assistant that is a looped model has loops of its own, set in its own config or generation config.
        model_kwargs = {name: value for name, value in model_kwargs.items() if name not in LOOP_ARGUMENTS}
        generator = super()._get_candidate_generator(
            *args, generation_config=generation_config, model_kwargs=model_kwargs, **kwargs
        )
        make_candidates, longest = generator.get_candidates, generation_config.max_length - 1

        def get_candidates(input_ids: torch.Tensor, *args, **kwargs):
            """Cut where generation will end: prompt lookup would go beyond the model's positions."""
            candidates, logits = make_candidates(input_ids, *args, **kwargs)
            candidates = candidates[:, : max(longest, input_ids.shape[1])]
            return candidates, None if logits is None else logits[:, : candidates.shape[1] - input_ids.shape[1]]

        generator.get_candidates = get_candidates
        return generator

    def _sample(self, input_ids, generation_config, **kwargs):
        outputs = super()._sample(input_ids, generation_config=generation_config, **kwargs)
        return self._add_loop_steps(outputs, input_ids, generation_config, kwargs)

    def _assisted_decoding(self, input_ids, generation_config, **kwargs):
        if self._can_be_pipelined(input_ids, generation_config, kwargs):
            outputs = self._pipelined_decoding(input_ids, generation_config, kwargs)
        else:
            cache = kwargs.get("past_key_values")
            if cache is not None and not cache.is_compileable and cache.get_seq_length() > 0:
                cache.crop(-cache.get_seq_length())  # the stock method reads the whole prompt, cached or not
            outputs = super()._assisted_decoding(input_ids, generation_config=generation_config, **kwargs)
        return self._add_loop_steps(outputs, input_ids, generation_config, kwargs)

    def _can_be_pipelined(self, input_ids: torch.Tensor, generation_config, kwargs: dict[str, Any]) -> bool:
        """Whether the assistant is a draft of this model that can be verified as it is made."""
        config, draft, cache = self.config, kwargs.get("assistant_model"), cast(Any, kwargs.get("past_key_values"))
        if draft is None or not getattr(draft, "_is_pipelined", False) or draft.base_model is not self.base_model:
            return False
        mask = kwargs.get("attention_mask")
        return (
            len(config.loop_groups) == 1
            and draft.generation_config.num_loops[0] < config.loops_per_group(kwargs.get("num_loops"))[0]
            and len(input_ids) == 1
            and kwargs.get("exit_policy") is None
            and kwargs.get("inputs_embeds") is None
            and (mask is None or bool(mask.all()))
            and config._attn_implementation in GATHERING_KERNELS
            and getattr(cache, "cache_strategy", None) == "per_step"
            and not (cache.is_compileable or config.loop_noise > 0 or self.training or kwargs.get("synced_gpus"))
            and not any(
                getattr(settings, name)
                for settings in (config, generation_config)
                for name in ("output_attentions", "output_hidden_states")
            )
            and generation_config.assistant_ensemble_weight is None
            and not any(
                isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor)
                for processor in kwargs["logits_processor"]
            )
        )

    def _pipelined_decoding(self, input_ids: torch.Tensor, generation_config, kwargs: dict[str, Any]):
        """As `_assisted_decoding`."""
        own = ("logits_processor", "stopping_criteria", "assistant_model", "streamer")
        not_needed = ("synced_gpus", "inputs_tensor", "assistant_tokenizer", "tokenizer")
        model_kwargs = {name: value for name, value in kwargs.items() if name not in (*own, *not_needed)}
        generation = PipelinedGeneration(
            self, kwargs["assistant_model"].generation_config.num_loops[0],
            self.config.loops_per_group(kwargs.get("num_loops"))[0],
            kwargs["logits_processor"], kwargs["stopping_criteria"], generation_config, kwargs.get("streamer"),
        )  # fmt: skip
        unread = input_ids.shape[1] - kwargs["past_key_values"].get_seq_length()
        prepare = cast(Any, self.prepare_inputs_for_generation)
        inputs = prepare(input_ids, next_sequence_length=unread, is_first_iteration=True, **model_kwargs)
        return generation.run(input_ids, inputs)

    def _beam_search(self, input_ids, generation_config, **kwargs):
        outputs = super()._beam_search(input_ids, generation_config=generation_config, **kwargs)
        return self._add_loop_steps(outputs, input_ids, generation_config, kwargs)

    def _add_loop_steps(self, outputs, input_ids: torch.Tensor, generation_config, kwargs: dict[str, Any]):
        """Adds `loop_steps` to what `generate` returns, if that is a dict."""
        if not isinstance(outputs, ModelOutput):
            return outputs
        beams = 1 if outputs.get("beam_indices") is None else generation_config.num_beams
        real = self._real_tokens(outputs.sequences[:, :-1], input_ids, beams, generation_config, kwargs)
        cache, policy, num_loops = outputs.past_key_values, kwargs.get("exit_policy"), kwargs.get("num_loops")
        if beams == 1 and cache is not None and cache.loop_steps is not None:
            steps = cache.loop_steps
        elif kwargs.get("inputs_embeds") is not None:
            return outputs  # the prompt is not among the sequences
        elif policy is None:
            steps = real.new_tensor(self.config.loops_per_group(num_loops), dtype=torch.long).expand(*real.shape, -1)
        elif cache is None or cache.cache_strategy == "per_step":
            # The cache, if there is one, holds the beams that ran last, not those returned. But one pass over a text
            # takes the steps that decoding it took.
            arguments = {"attention_mask": real.long(), "use_cache": False, "logits_to_keep": 1}
            scored = self(outputs.sequences[:, :-1], exit_policy=policy, num_loops=num_loops, **arguments)
            steps = scored.loop_steps
        else:
            return outputs
        # Of a prompt that was given as embeddings, the sequences have nothing; its padding has no steps already.
        prompt = steps.shape[1] - real.shape[1]
        outputs["loop_steps"] = torch.cat([steps[:, :prompt], steps[:, prompt:] * real[..., None]], dim=1)
        return outputs

    def _real_tokens(self, sequences, input_ids, beams: int, generation_config, kwargs: dict[str, Any]) -> torch.Tensor:
        """[rows, tokens]: False at padding, before a prompt and behind the end of a generated text."""
        real = torch.ones_like(sequences, dtype=torch.bool)
        prompt_length = input_ids.shape[1]
        if (mask := kwargs.get("attention_mask")) is not None:
            rows = torch.arange(sequences.shape[0], device=sequences.device)
            if beams > 1:
                rows = rows // generation_config.num_return_sequences * beams
            real[:, :prompt_length] = mask[rows, :prompt_length].bool()
        if (end_of_text := generation_config._eos_token_tensor) is not None:
            is_end = torch.isin(sequences[:, prompt_length:], end_of_text.to(sequences.device)).long()
            real[:, prompt_length:] = is_end.cumsum(1) == is_end
        return real

    def save_pretrained(self, *args, **kwargs):
        """`PreTrainedModel.save_pretrained`; arguments of the loops in the generation config are saved with it."""
        saved = self.generation_config
        if any(getattr(saved, name, None) is not None for name in LOOP_ARGUMENTS):
            saved.exit_policy = exit_policy_to_json(getattr(saved, "exit_policy", None))
            resolve_exit_policy(saved.exit_policy, len(self.config.loop_groups))  # fails here rather than at every load
            self.config.loops_per_group(getattr(saved, "num_loops", None))
            saved._from_model_config = False  # else fields that are not transformers' own are lost on load
        return super().save_pretrained(*args, **kwargs)


def _check_cache_implementation(name: str | None) -> None:
    if name not in CACHE_IMPLEMENTATIONS:
        raise ValueError(
            f"`cache_implementation` is {name!r}, which has no slots for loop steps and would give wrong tokens. Leave "
            "it out, or use 'static' with fixed loops; `cache_strategy='last_step'` saves memory."
        )
