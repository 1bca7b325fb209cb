"""RecurrentGPT2 in the lm-evaluation-harness, scoring and generating under an exit policy.

    python -m evaluation.lm_eval_model --model recurrent-gpt2 --tasks lambada_openai \\
        --model_args pretrained=checkpoints/recurrent-gpt2-mini,exit_policy=acceleration

is the harness's own command line with one more model. `exit_policy` is a name or, in JSON, a policy with its settings;
`num_loops` is the cap; left out, both are what `generate` takes from the checkpoint. The policy and the mean steps per
group over all tokens, those of prompts included, are printed at the end and stand in the results under `config`, as
`loops` and `mean_loop_steps`.
"""

import json
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

import recurrent_gpt2  # noqa: F401, it makes the auto classes know the model

from .common import DEFAULT, describe_loops, loops_of_generate


@register_model("recurrent-gpt2")
class RecurrentGPT2LM(HFLM):
    """`HFLM` for causal models with loops. Further arguments are those of `HFLM`."""

    def __init__(self, pretrained: Any, exit_policy: Any = DEFAULT, num_loops: int | None = None, **kwargs):
        is_json = isinstance(exit_policy, str) and exit_policy.lstrip().startswith(("{", "["))
        self.step_sum: torch.Tensor | int = 0
        self.tokens = 0
        super().__init__(pretrained, backend="causal", **kwargs)
        if not self.model.config.loop_groups:
            raise ValueError(f"`pretrained` is {pretrained}, a model without loop groups: use the model `hf` for it.")
        if isinstance(pretrained, str) and self.model.device.type == "cpu" and self.model.dtype == torch.float32:
            self.model.optimize_for_inference()
        self.loop_arguments = loops_of_generate(
            self.model, json.loads(exit_policy) if is_json else exit_policy, num_loops
        )

    def _model_call(self, inps: torch.Tensor, attn_mask=None, labels=None) -> torch.Tensor:
        with torch.no_grad():
            output = self.model(inps, use_cache=False, **self.loop_arguments)
        # The harness pads on the right, with zeros and without a mask. Nothing before the padding depends on it.
        real = inps.flip(1).ne(0).cumsum(1).flip(1) > 0
        self._count(output.loop_steps[real])
        return output.logits

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **kwargs) -> torch.Tensor:
        arguments = {**self.loop_arguments, **kwargs}  # `--gen_kwargs` may have others
        output = super()._model_generate(context, max_length, stop, return_dict_in_generate=True, **arguments)
        taken = output.loop_steps.flatten(0, 1)
        self._count(taken[taken.sum(-1) > 0])  # padding takes no steps
        return output.sequences

    def _detect_batch_size(self, *args, **kwargs) -> int:
        counted = self.step_sum, self.tokens
        size = super()._detect_batch_size(*args, **kwargs)  # tries sizes on made-up text
        self.step_sum, self.tokens = counted
        return size

    def _count(self, steps: torch.Tensor) -> None:
        """Adds the steps [tokens, groups]."""
        self.step_sum = self.step_sum + steps.double().sum(0).cpu()
        self.tokens += len(steps)

    @property
    def mean_loop_steps(self) -> list[float] | None:
        return (self.step_sum / self.tokens).tolist() if self.tokens else None

    def get_model_info(self) -> dict[str, Any]:
        """What the harness puts under `config`; it asks when all is evaluated."""
        means, loops = self.mean_loop_steps, describe_loops(**self.loop_arguments)
        print(f"loops: {loops}")
        if means is not None:
            print(f"mean loop steps per group over {self.tokens:,} tokens: {', '.join(f'{m:.2f}' for m in means)}")
        return super().get_model_info() | {"loops": loops, "mean_loop_steps": means}


if __name__ == "__main__":
    cli_evaluate()
