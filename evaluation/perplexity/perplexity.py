"""Perplexity of texts under an exit policy, for the `evaluate` library: `evaluate.load("evaluation/perplexity")`."""

from typing import Any

import datasets
import evaluate
import torch
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm
from transformers import AutoTokenizer

from recurrent_gpt2 import RecurrentGPT2ForCausalLM

_DESCRIPTION = """
Perplexity of texts under a RecurrentGPT2 model and one of its exit policies, from one adaptive pass over each text:
exactly what decoding token by token gives. Unless told otherwise, it is what `generate` would use.
"""

_KWARGS_DESCRIPTION = """
Args:
    predictions (list of str): texts.
    model_id (str): a folder or a name on the Hub.
    exit_policy: a name, or a dict such as {"name": "acceleration", "threshold": 0.1}; None: fixed loops; "default", or
        left out: the checkpoint's own, as in `generate`.
    num_loops (int): loops, or with a policy the cap; the checkpoint's own when left out.
    batch_size (int): texts at a time.
    add_start_token (bool): start each text with the end-of-text token, so that its first token counts too.
Returns:
    perplexity: of all tokens together;
    perplexities: of each text;
    mean_steps: loop steps of a token, per group;
    exit_policy, num_loops: what was used.
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class Perplexity(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features({"predictions": datasets.Value("string")}),
        )

    @torch.no_grad()
    def _compute(
        self,
        predictions: list[str],
        model_id: str,
        exit_policy: Any = "default",
        num_loops: int | None = None,
        batch_size: int = 8,
        add_start_token: bool = True,
    ) -> dict[str, Any]:
        model = RecurrentGPT2ForCausalLM.from_pretrained(model_id).eval()
        tokenizer = AutoTokenizer.from_pretrained(model_id)
        own = model.generation_config
        if exit_policy == "default":
            exit_policy = getattr(own, "exit_policy", None)
        loops = model.config.loops_per_group(getattr(own, "num_loops", None) if num_loops is None else num_loops)
        start = [tokenizer.eos_token_id] if add_start_token else []
        texts = [torch.tensor(start + tokenizer(text, verbose=False).input_ids) for text in predictions]
        limit = model.config.max_position_embeddings
        for place, ids in enumerate(texts):
            if not 2 <= len(ids) <= limit:
                raise ValueError(f"text {place} of `predictions` has {len(ids)} tokens, but must have 2 to {limit}.")
        sums, steps, tokens = [], torch.zeros(len(model.config.loop_groups), dtype=torch.float64), 0
        for first in tqdm(range(0, len(texts), batch_size), desc="perplexity", unit=" batches"):
            rows = texts[first : first + batch_size]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            output = model(ids, attention_mask=mask, exit_policy=exit_policy, num_loops=loops, use_cache=False)
            losses = cross_entropy(output.logits[:, :-1].double().transpose(1, 2), ids[:, 1:], reduction="none")
            sums += (losses * mask[:, 1:]).sum(1).tolist()
            steps += output.loop_steps.double().sum((0, 1))  # padding takes none
            tokens += int(mask.sum())
        counts = [len(ids) - 1 for ids in texts]
        each = [total / count for total, count in zip(sums, counts, strict=True)]
        return {
            "perplexity": torch.tensor(sum(sums) / sum(counts)).exp().item(),
            "perplexities": torch.tensor(each).exp().tolist(),
            "mean_steps": (steps / tokens).tolist(),
            "exit_policy": exit_policy,
            "num_loops": loops,
        }
