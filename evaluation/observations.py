"""What the report shows beside sweeps: geometry, the cost of `last_step`, slow and fast tokens, samples."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from recurrent_gpt2 import LoopCache, RecurrentGPT2ForCausalLM
from recurrent_gpt2.geometry import LoopGeometry

from .common import mean_depth


@torch.no_grad()
def measure_geometry(model: RecurrentGPT2ForCausalLM, blocks: torch.Tensor, num_loops: int) -> dict[str, Any]:
    """Moments of step norms, cosines and drift over all tokens of the blocks [n, length], at fixed loops."""
    geometry = LoopGeometry(len(model.config.loop_groups))
    for row in tqdm(blocks, desc="geometry", unit=" blocks", leave=False):
        output = model.model(row[None], num_loops=num_loops, output_loop_trajectory=True, use_cache=False)
        geometry.update(output.loop_trajectory)
    return geometry.to_dict()


PRICES = (0.1, 0.05, 0.03, 0.02, 0.01, 0.005, 0.003, 0.002, 0.001, 0.0005, 0.0002, 0.0001)  # nats a loop


@torch.no_grad()
def depth_headroom(model: RecurrentGPT2ForCausalLM, blocks: torch.Tensor, most: int = 12) -> dict[str, Any]:
    """How much a perfect choice of each token's depth could gain on text, where the needed depth is not known.

    Quality is the KL divergence from what `most` loops say, which no lucky guess can lower as it lowers a loss. Every
    token takes the depth that minimises its divergence plus a price a loop; all tokens are computed at that same fixed
    depth, so that freezing costs nothing: a bound for every rule.
    """
    divergences = []  # [most, tokens] of each block
    for row in tqdm(blocks, desc="headroom", unit=" blocks", leave=False):
        logits = (model(row[None], num_loops=count, use_cache=False).logits[0].float() for count in range(1, most + 1))
        said = [values.log_softmax(-1) for values in logits]
        divergences.append(torch.stack([(said[-1].exp() * (said[-1] - other)).sum(-1) for other in said]))
    found = torch.cat(divergences, 1).double().clamp_min(0)
    loops = torch.arange(1, most + 1, dtype=torch.float64)[:, None]
    chosen = []
    for price in PRICES:
        places = (found + price * loops).argmin(0)
        kl = found.gather(0, places[None]).mean().item()
        chosen.append({"price": price, "mean_steps": (places + 1).double().mean().item(), "kl": kl})
    return {"most": most, "fixed": found.mean(1).tolist(), "chosen": chosen}


@dataclass
class CacheCost:
    """What keeping only the last step's keys and values costs in nats and saves in bytes."""

    per_step_loss: float
    last_step_loss: float
    per_step_bytes: int  # of one sequence of `tokens`
    last_step_bytes: int
    tokens: int


@torch.no_grad()
def last_step_cost(
    model: RecurrentGPT2ForCausalLM,
    blocks: torch.Tensor,
    exit_policy: Any = None,
    num_loops: int | list[int] | None = None,
) -> CacheCost:
    """Cross-entropy of token-by-token decoding with either cache, on the same text [n, length].

    With `per_step` that is the loss of one pass, so it is computed so; `last_step` has to be decoded.
    """
    rows, length = blocks.shape
    caches = {strategy: LoopCache(model.config, strategy) for strategy in ("per_step", "last_step")}
    loops = {"exit_policy": exit_policy, "num_loops": num_loops, "use_cache": True}
    exact = model(blocks[:, :-1], past_key_values=caches["per_step"], **loops).logits
    decoded = [
        model(blocks[:, [place]], past_key_values=caches["last_step"], **loops).logits
        for place in tqdm(range(length - 1), desc="decoding with last_step", unit=" tokens", leave=False)
    ]
    losses = [
        torch.nn.functional.cross_entropy(logits.double().transpose(1, 2), blocks[:, 1:]).item()
        for logits in (exact, torch.cat(decoded, dim=1))
    ]
    return CacheCost(
        per_step_loss=losses[0],
        last_step_loss=losses[1],
        per_step_bytes=caches["per_step"].num_bytes() // rows,
        last_step_bytes=caches["last_step"].num_bytes() // rows,
        tokens=length - 1,
    )


@dataclass
class TokenDepth:
    """A token type, and the steps that it took on average over its occurrences and looped layers."""

    token: str
    count: int
    mean_steps: float


@torch.no_grad()
def token_depths(
    model: RecurrentGPT2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    blocks: torch.Tensor,
    exit_policy: Any,
    num_loops: int | list[int],
    least_count: int = 10,
) -> list[TokenDepth]:
    """All token types that occur at least `least_count` times, from the fastest to the slowest."""
    steps: dict[int, list[float]] = defaultdict(list)
    for batch in blocks.split(8):
        output = model(batch, exit_policy=exit_policy, num_loops=num_loops, use_cache=False)
        depths = mean_depth(output.loop_steps.flatten(0, 1), model.config)
        for token, depth in zip(batch.flatten().tolist(), depths.tolist(), strict=True):
            steps[token].append(depth)
    depths = [
        TokenDepth(tokenizer.decode([token]), len(taken), sum(taken) / len(taken))
        for token, taken in steps.items()
        if len(taken) >= least_count
    ]
    return sorted(depths, key=lambda depth: depth.mean_steps)


@dataclass
class Sample:
    """A prompt and what the model made of it; `steps` has the mean steps behind each new token."""

    prompt: str
    tokens: list[str]
    steps: list[float]


@torch.no_grad()
def continue_blocks(
    model: RecurrentGPT2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    blocks: torch.Tensor,
    exit_policy: Any,
    num_loops: int | list[int],
    new_tokens: int = 60,
    seed: int = 0,
) -> list[Sample]:
    """Continuations of the first tokens of each block, sampled, none left out."""
    samples = []
    torch.manual_seed(seed)  # once: with one seed for each, all would begin alike
    for row in blocks:
        prompt = row[: min(24, len(row) // 2)][None]
        output = model.generate(
            prompt, max_new_tokens=new_tokens, do_sample=True, temperature=0.8, top_p=0.95, top_k=0,
            exit_policy=exit_policy, num_loops=num_loops, return_dict_in_generate=True,
            pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        new = output.sequences[0, prompt.shape[1] :]
        # The loops at a token predict the next one, so a new token has those of the token before it.
        steps = mean_depth(output.loop_steps[0, prompt.shape[1] - 1 :], model.config)
        samples.append(Sample(tokenizer.decode(prompt[0]), [tokenizer.decode([t]) for t in new], steps.tolist()))
    return samples
