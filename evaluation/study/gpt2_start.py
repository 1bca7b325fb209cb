"""Which way to turn a GPT-2 into a looped model starts from the lowest loss: `python -m evaluation.study.gpt2_start`.

Trains a small GPT-2 on the documentation strings of this Python installation (a few minutes on two cores) and measures
the loss of looped models made from it, before any further training, on held-out text.
"""

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm.auto import trange
from transformers import GPT2Config, GPT2LMHeadModel

from recurrent_gpt2 import RecurrentGPT2ForCausalLM
from training.data import BlockMaker, Source
from training.tokenizer import train_tokenizer

LOOP_GROUPS = [[2], [3], [4]]
BLOCK_SIZE, WIDTH, VOCABULARY = 128, 128, 1024


def make_blocks(cache: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks for training and validation."""
    source = Source("python-docs", max_documents=1500)
    tokenizer = train_tokenizer(list(source.documents())[:300], VOCABULARY)
    maker = BlockMaker(tokenizer, BLOCK_SIZE, 0.02, cache)
    return tuple(maker.blocks(source, validation)["input_ids"][:].long() for validation in (False, True))


def train_gpt2(blocks: torch.Tensor, steps: int) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=6, n_head=4, n_positions=BLOCK_SIZE, bos_token_id=0,
            eos_token_id=0, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in trange(steps, desc="training a GPT-2"):
        batch = blocks[torch.randint(len(blocks), (16,))]
        model(batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


def without_biases(gpt2: GPT2LMHeadModel) -> GPT2LMHeadModel:
    stripped = copy.deepcopy(gpt2)
    for name, parameter in stripped.named_parameters():
        if name.endswith(".bias"):
            parameter.data.zero_()
    return stripped


def constant_output(block) -> torch.Tensor:
    """What a layer of GPT-2 adds to the residual stream of every token alike, through biases that act linearly."""
    width = block.ln_1.weight.shape[0]
    value_weight, value_bias = block.attn.c_attn.weight[:, 2 * width :], block.attn.c_attn.bias[2 * width :]
    attended = (block.ln_1.bias @ value_weight + value_bias) @ block.attn.c_proj.weight
    return attended + block.attn.c_proj.bias + block.mlp.c_proj.bias


def with_constants(gpt2: GPT2LMHeadModel) -> GPT2LMHeadModel:
    """Without biases, but with what those of the first layer add to every token in the position embeddings."""
    stripped = without_biases(gpt2)
    stripped.transformer.wpe.weight.data += constant_output(gpt2.transformer.h[0])
    return stripped


def changed(model: RecurrentGPT2ForCausalLM, change: Callable[[torch.nn.Module], None], kind: str):
    """A copy of the model with a change made to its loop inputs or blocks."""
    model = copy.deepcopy(model)
    for module in model.model.loop_inputs if kind == "loop input" else model.model.layers:
        change(module)
    return model


def pass_state(share: float) -> Callable[[torch.nn.Module], None]:
    def change(loop_input: torch.nn.Module) -> None:
        loop_input.state_proj.weight.data = share * torch.eye(WIDTH)
        loop_input.input_proj.weight.data = (1 - share) * torch.eye(WIDTH)

    return change


def random_state(loop_input: torch.nn.Module) -> None:
    torch.nn.init.trunc_normal_(loop_input.state_proj.weight, std=(2 / (5 * WIDTH)) ** 0.5)


def unit_norms(block: torch.nn.Module) -> None:
    block.attention_output_norm.weight.data.fill_(1.0)
    block.mlp_output_norm.weight.data.fill_(1.0)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="of training the GPT-2")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/recurrent_gpt2").expanduser())
    parser.add_argument("--output", type=Path, help="write the losses to this JSON file too")
    options = parser.parse_args(arguments)
    train_blocks, validation_blocks = make_blocks(options.cache)
    validation_blocks = validation_blocks[:64]

    @torch.no_grad()
    def loss(model: torch.nn.Module) -> float:
        return model(validation_blocks, labels=validation_blocks, use_cache=False).loss.item()

    gpt2 = train_gpt2(train_blocks, options.steps)
    stripped = without_biases(gpt2)
    chosen = RecurrentGPT2ForCausalLM.from_gpt2(gpt2, LOOP_GROUPS, num_loops=4)
    losses = {
        "GPT-2": loss(gpt2),
        "GPT-2 with its biases set to zero": loss(stripped),
        "**chosen**: calibrated norms, A = [0 ; I]": loss(chosen),
        "… output norms at 1 instead of calibrated": loss(changed(chosen, unit_norms, "block")),
        "… A = [I/4 ; 3I/4]": loss(changed(chosen, pass_state(0.25), "loop input")),
        "… A = [I/2 ; I/2]": loss(changed(chosen, pass_state(0.5), "loop input")),
        "… A = [random ; I]": loss(changed(chosen, random_state, "loop input")),
        "… what the first layer's biases add, in the positions": loss(
            RecurrentGPT2ForCausalLM.from_gpt2(with_constants(gpt2), LOOP_GROUPS, num_loops=4)
        ),
        "from scratch": loss(RecurrentGPT2ForCausalLM(chosen.config).eval()),
    }
    print("| start | validation loss |\n|---|---|")
    for name, value in losses.items():
        print(f"| {name} | {value:.3f} |")
    if options.output is not None:
        options.output.write_text(json.dumps(losses, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
