"""What a run will cost: `python -m training.estimate training/recipes/paper.yaml` prints parameters, FLOPs and memory.

Counts are exact for matrix products (a test compares them with torch's own counter); what depends on hardware is an
estimate and marked so.
"""

import sys
from dataclasses import dataclass

import torch
from huggingface_hub.errors import StrictDataclassError

from recurrent_gpt2 import RecurrentGPT2Config, RecurrentGPT2ForCausalLM, sample_num_loops
from recurrent_gpt2.modeling_recurrent_gpt2 import RecurrentGPT2Block

from .recipe import Recipe, load_recipe, recipe_parser

# Peak dense bf16 throughput by the makers' data sheets, and the share of it that a small model trained in plain PyTorch
# may be expected to reach. The share is a guess.
GPUS = {"A100": 312e12, "H100": 989e12}
ASSUMED_UTILISATION = 0.25


def block_flops(config: RecurrentGPT2Config, context: int) -> int:
    """FLOPs of one token in one layer, which attends to `context` tokens."""
    d = config.hidden_size
    matrices = 4 * d * d + 2 * d * config.intermediate_size
    return 2 * matrices + 4 * context * d


def forward_flops(config: RecurrentGPT2Config, num_loops: list[float], context: int) -> float:
    """FLOPs of a forward pass per token, head included."""
    d, groups = config.hidden_size, config.loop_groups
    plain = config.num_hidden_layers - sum(len(group) for group in groups)
    applications = plain + sum(len(group) * loops for group, loops in zip(groups, num_loops, strict=True))
    projections = sum(2 * d * d * (loops + 1) for loops in num_loops)  # the input's half of A_g runs once
    return applications * block_flops(config, context) + projections + 2 * d * config.vocab_size


@dataclass
class TrainingCost:
    mean_loops: list[float]  # of the drawn counts, per group
    mean_backprop_loops: list[float]  # of those, through how many gradients flow
    forward: float  # FLOPs per token
    backward: float
    applications_with_gradient: float  # layer applications whose activations are kept, in the mean
    worst_applications_with_gradient: int


def training_cost(config: RecurrentGPT2Config, block_size: int, draws: int = 20_000) -> TrainingCost:
    """Means over drawn loop counts. An average token attends to half a block."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor([sample_num_loops(config, generator) for _ in range(draws)]).double()
    kept = counts if config.backprop_loops is None else counts.clamp(max=config.backprop_loops)
    loops, backprop = counts.mean(0).tolist(), kept.mean(0).tolist()
    sizes = torch.tensor([len(group) for group in config.loop_groups]).double()
    plain = config.num_hidden_layers - int(sizes.sum())
    context = block_size // 2
    return TrainingCost(
        loops,
        backprop,
        forward=forward_flops(config, loops, context),
        backward=2 * forward_flops(config, backprop, context),
        applications_with_gradient=plain + (kept @ sizes).mean().item(),
        worst_applications_with_gradient=plain + int((kept @ sizes).max()) if len(sizes) else plain,
    )


def saved_bytes_per_token(config: RecurrentGPT2Config, length: int = 64) -> float:
    """Bytes of activations that one layer application keeps for the backward pass, per token, in fp32: measured."""
    config = RecurrentGPT2Config.from_dict(config.to_dict())
    config._attn_implementation = "sdpa"
    block = RecurrentGPT2Block(config, 0).train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = block(torch.randn(1, length, config.hidden_size, requires_grad=True))
    del output
    return sum(saved.values()) / length


def cache_bytes_per_token(
    config: RecurrentGPT2Config, num_loops: list[int], strategy: str, bytes_per_number: int
) -> int:
    looped = sum(len(group) for group in config.loop_groups)
    slots = config.num_hidden_layers
    if strategy == "per_step":
        slots += sum(len(group) * loops for group, loops in zip(config.loop_groups, num_loops, strict=True)) - looped
    return 2 * config.hidden_size * slots * bytes_per_number


def estimate(recipe: Recipe) -> str:
    vocab_size = recipe.data.tokenizer_vocab_size if recipe.data.tokenizer == "train" else 50257
    config = RecurrentGPT2Config(**{"vocab_size": vocab_size, **recipe.model})
    with torch.device("meta"):
        parameters = RecurrentGPT2ForCausalLM(config).num_parameters()
    args, block_size = recipe.training, recipe.data.block_size or config.max_position_embeddings
    sequences = args.per_device_train_batch_size * args.gradient_accumulation_steps
    if args.max_steps < 1:
        raise ValueError(f"`max_steps` is {args.max_steps}, but must be known for an estimate: at least 1.")
    if args.from_gpt2 is not None:
        raise ValueError("`from_gpt2`: the sizes are GPT-2's. Leave it out and give them, --hidden_size and so on.")
    tokens = args.max_steps * sequences * block_size
    cost = training_cost(config, block_size)
    total = tokens * (cost.forward + cost.backward)
    per_token = saved_bytes_per_token(config)
    micro_tokens = args.per_device_train_batch_size * block_size
    layer, groups = per_token * micro_tokens, len(config.loop_groups)
    head = micro_tokens * config.vocab_size * 4 * 3  # logits, their softmax and its gradient, fp32

    lines = [
        f"parameters               {parameters:,}",
        f"tokens on one process    {tokens:,} ({tokens / parameters:.1f} per parameter)",
        f"loops drawn, mean        {_list(cost.mean_loops)}, gradients through {_list(cost.mean_backprop_loops)}",
        "",
        f"FLOPs per token, forward, context {block_size // 2}:",
        *(
            f"  {loops:>2} loops                 {forward_flops(config, [loops] * groups, block_size // 2):.3e}"
            for loops in (1, 4, 8, 12, 32)
        ),
        f"FLOPs per token, training  {cost.forward + cost.backward:.3e} "
        f"(forward {cost.forward:.3e}, backward {cost.backward:.3e})",
        f"FLOPs of the run           {total:.3e}",
        "",
        "memory of training, fp32:",
        f"  weights, gradients, AdamW  {_bytes(16 * parameters)}",
        f"  activations, mean draw     {_bytes(layer * cost.applications_with_gradient + head)} "
        f"({per_token / 1024:.1f} KiB per token and layer application, measured; {_bytes(head)} of it the head)",
        f"  activations, largest draw  {_bytes(layer * cost.worst_applications_with_gradient + head)}",
        "",
        f"cache at {block_size} tokens, {_list(config.loops_per_group())} loops, fp32:",
        *(
            f"  {strategy:<10}               "
            f"{_bytes(block_size * cache_bytes_per_token(config, config.loops_per_group(), strategy, 4))} per sequence"
            for strategy in ("per_step", "last_step")
        ),
        "",
        f"time of the run (an estimate: {ASSUMED_UTILISATION:.0%} of peak bf16 is assumed, not measured):",
        *(
            f"  one {name:<5}                {total / (peak * ASSUMED_UTILISATION) / 3600:.2f} hours"
            for name, peak in GPUS.items()
        ),
    ]
    return "\n".join(lines)


def _list(values: list) -> str:
    return "[" + ", ".join(f"{value:.1f}" if isinstance(value, float) else str(value) for value in values) + "]"


def _bytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def main(arguments: list[str] | None = None) -> None:
    known, overrides = recipe_parser(__doc__).parse_known_args(arguments)
    print(estimate(load_recipe(known.recipe, overrides)))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, StrictDataclassError) as error:
        sys.exit(f"error: {error}")
