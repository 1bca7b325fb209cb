"""Speed on the machine it runs on, as ratios within one run: `python -m evaluation.benchmark`.

The model is the paper's (12 layers, d = 768, 12 loops, fp32, random weights), unless said otherwise. Its peers are
`GPT2LMHeadModel` with as many real layers as are applied (56), and the same model done naively: weights that are not
packed, and tokens that are computed on after their exit. Every measurement sets two ways of doing the same beside each
other, in turn, round after round, and reports the median of the rounds' ratios with their range. Absolute times are of
this machine and this moment: nothing else should run on it meanwhile.
"""

import argparse
import copy
import gc
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode
from tqdm.auto import tqdm
from transformers import Cache, DynamicCache, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from recurrent_gpt2 import (
    AccelerationExit,
    FixedLoops,
    KLExit,
    LoopCache,
    LoopView,
    RecurrentGPT2Config,
    RecurrentGPT2ForCausalLM,
)
from recurrent_gpt2.configuration_recurrent_gpt2 import CACHE_STRATEGIES
from recurrent_gpt2.fast_layers import PackedLinearInt8
from training.tasks import ids_of_tokens

from .common import Sequences, load_checkpoint
from .depth import run, tasks_of
from .leaderboard import CHECKPOINTS

LOOPS = 12
APPLICATIONS = 56  # of layers: 8 that are not looped, and 4 that are
SECONDS, QUICK_SECONDS = 8.0, 1.0  # of rounds, for a measurement; those whose rounds take long get more
# What can't be fused away, as the profiler names it.
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn::_linear_pointwise")
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


@dataclass
class Ratio:
    """Time of `what` over time of `against`, or its inverse where `is_speed`."""

    what: str
    against: str
    ratio: float  # median over rounds
    lowest: float
    highest: float
    milliseconds: float  # of `what`, median
    milliseconds_against: float
    rounds: int
    reach: float | None = None  # a time should be at most this, a speed at least
    is_speed: bool = False
    note: str = ""  # what else is to be known
    part: str = ""  # the measurement that it is of

    @property
    def is_reached(self) -> bool | None:
        if self.reach is None:
            return None
        return self.ratio >= self.reach if self.is_speed else self.ratio <= self.reach

    @property
    def goal(self) -> str:
        return "" if self.reach is None else f"{'at least' if self.is_speed else 'at most'} {self.reach:g}"


@dataclass
class Share:
    """Of the time of `what`, the parts in matrix products and in attention: fusing can win the rest at most."""

    what: str
    products: float
    attention: float


Timed = tuple[str, Callable[[], object]]


def compare_times(
    what: Timed,
    against: Timed,
    seconds: float,
    reach: float | None = None,
    is_speed: bool = False,
    work: tuple[float, float] = (1, 1),
    note: str = "",
) -> Ratio:
    """`work`: units of work that a call of either does, where they differ; times are per unit."""
    times = timed_rounds(what[0], [what[1], against[1]], seconds)
    return ratio_of(what[0], against[0], times, reach, is_speed, work, note)


def timed_rounds(name: str, functions: list[Callable[[], object]], seconds: float, warm: bool = True) -> np.ndarray:
    """Seconds that each function took, [rounds, functions], in rounds until `seconds` are over, but one at least.

    `warm`: with a first round that does not count, which fills caches.
    """
    times, started = [], time.perf_counter()
    with tqdm(total=seconds, desc=name, bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}") as progress:
        while len(times) < 1 + warm or progress.n < seconds:
            times.append([_seconds(function) for function in functions])
            progress.update(min(time.perf_counter() - started, seconds) - progress.n)
    return np.array(times[warm:])


def ratio_of(
    what: str,
    against: str,
    times: np.ndarray,
    reach: float | None = None,
    is_speed: bool = False,
    work: tuple[float, float] = (1, 1),
    note: str = "",
) -> Ratio:
    """`times`: seconds that either took in each round, [rounds, 2]."""
    pairs = times * 1000 / np.array(work)
    ratios = pairs[:, 1] / pairs[:, 0] if is_speed else pairs[:, 0] / pairs[:, 1]
    return Ratio(
        what, against, float(np.median(ratios)), float(ratios.min()), float(ratios.max()),
        float(np.median(pairs[:, 0])), float(np.median(pairs[:, 1])), len(pairs), reach, is_speed, note,
    )  # fmt: skip


def _seconds(function: Callable) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


@cache
def naive() -> RecurrentGPT2ForCausalLM:
    """Made of stock modules: what training takes."""
    torch.manual_seed(0)
    return RecurrentGPT2ForCausalLM(RecurrentGPT2Config(num_loops=LOOPS)).eval()


def looped() -> RecurrentGPT2ForCausalLM:
    return looped_in("float32")


@cache
def looped_in(precision: str, compile: bool = False) -> RecurrentGPT2ForCausalLM:
    return copy.deepcopy(naive()).optimize_for_inference(weights=precision, compile=compile)


@cache
def mini() -> tuple[RecurrentGPT2ForCausalLM, PreTrainedTokenizerBase]:
    """The language model that comes with the project."""
    return load_checkpoint(CHECKPOINTS / "recurrent-gpt2-mini", optimize=True)


@cache
def compiled_mini() -> RecurrentGPT2ForCausalLM:
    return load_checkpoint(CHECKPOINTS / "recurrent-gpt2-mini")[0].optimize_for_inference(compile=True)


@cache
def gpt2(layers: int = APPLICATIONS, **settings) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}  # as ours
    return GPT2LMHeadModel(GPT2Config(**{"n_positions": 512, "n_layer": layers, **no_dropout, **settings})).eval()


@cache
@torch.no_grad()
def gpt2_in_int8() -> GPT2LMHeadModel:
    """By the same kernel as ours, its head too."""
    model = copy.deepcopy(gpt2())
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            linear = nn.Linear(*module.weight.shape)
            linear.weight.copy_(module.weight.T)
            linear.bias.copy_(module.bias)
            model.set_submodule(name, PackedLinearInt8(linear))
    model.lm_head = PackedLinearInt8(model.lm_head)
    return model


def token_ids(batch: int, length: int, most: int = 50257) -> torch.Tensor:
    return torch.randint(0, most, (batch, length), generator=torch.Generator().manual_seed(batch + length))


@cache
def context_cache(model, batch: int, context: int, most: int = 50257) -> Cache:
    """A context that has been read. What decodes after it leaves it as it was."""
    past = LoopCache(model.config) if isinstance(model, RecurrentGPT2ForCausalLM) else DynamicCache(config=model.config)
    with torch.inference_mode():
        model(token_ids(batch, context, most), past_key_values=past, use_cache=True, logits_to_keep=1)
    return past


def decoder(model, batch: int, context: int, tokens: int = 1, most: int = 50257, **arguments) -> Callable[[], None]:
    """Decodes `tokens` tokens after a context (of entries below `most`) that is read before the clock starts."""
    past, first = context_cache(model, batch, context, most), token_ids(batch, context, most)[:, -1:]

    @torch.inference_mode()
    def decode() -> None:
        token = first
        for _ in range(tokens):
            logits = model(token, past_key_values=past, use_cache=True, **arguments).logits
            token = logits[:, -1:].argmax(-1)
        past.crop(-tokens)

    return decode


def prefiller(model, ids: torch.Tensor, **arguments) -> Callable[[], None]:
    @torch.inference_mode()
    def prefill() -> None:
        model(ids, use_cache=True, logits_to_keep=1, **arguments)

    return prefill


def matrices(model: RecurrentGPT2ForCausalLM) -> list[nn.Linear]:
    """All that a token passes through, in their order."""
    base, passed = model.model, []

    def of_layers(layers: list[int]) -> list[nn.Linear]:
        blocks = [base.layers[layer] for layer in layers]
        return [m for b in blocks for m in (b.attention.qkv_proj, b.attention.o_proj, b.mlp.up_proj, b.mlp.down_proj)]

    for stage in model.config.stages:
        if stage.group is None:
            passed += of_layers(stage.layers)
        else:
            entry = base.loop_inputs[stage.group]
            passed += [entry.input_proj, *([entry.state_proj, *of_layers(stage.layers)] * LOOPS)]
    return [*passed, model.lm_head]


def products_alone(model: RecurrentGPT2ForCausalLM, batch: int) -> Callable[[], None]:
    """A token's products, back to back."""
    passed = matrices(model)
    rows = {width: torch.randn(batch, 1, width) for width in {matrix.in_features for matrix in passed}}

    @torch.inference_mode()
    def apply() -> None:
        for matrix in passed:
            matrix(rows[matrix.in_features])

    return apply


class PrescribedExit:
    """Tokens leave at random steps, uniform from 1 to `most`, whatever their states: the cost of exits alone."""

    def __init__(self, most: int):
        self.most, self.generator = most, torch.Generator().manual_seed(0)

    def __call__(self, view: LoopView) -> torch.Tensor:
        if "exit_after" not in view.memory:
            shape = (view.state.shape[0],)
            view.memory["exit_after"] = torch.randint(1, self.most + 1, shape, generator=self.generator)
        return view.memory["exit_after"] <= view.step + 1


def decoding_one(seconds: float) -> Iterator[Ratio]:
    for context in (64, 448):
        yield compare_times(
            (f"decode, batch 1, context {context}", decoder(looped(), 1, context)),
            ("GPT-2, 56 layers", decoder(gpt2(), 1, context)), seconds, 0.92,
        )  # fmt: skip
    yield compare_times(
        ("decode, batch 1, context 64", decoder(looped(), 1, 64)),
        ("bare F.linear of the same matrices", products_alone(naive(), 1)), seconds, 1.15,
    )  # fmt: skip


def reading_out(seconds: float) -> Iterator[Ratio]:
    """The head, which shares its weight with the embedding."""
    head = looped().lm_head
    for rows in (1, 6):
        x = torch.randn(rows, 1, head.in_features)

        def read(x: torch.Tensor = x) -> None:
            with torch.inference_mode():
                head(x)

        def read_as_ever(x: torch.Tensor = x) -> None:
            with torch.inference_mode():
                nn.functional.linear(x, head.weight)

        what = f"head, {head.out_features} x {head.in_features}, rows: {rows}"
        yield compare_times((what, read), ("F.linear", read_as_ever), seconds / 2)


def decoding_batches(seconds: float) -> Iterator[Ratio]:
    for batch in (2, 4, 8):
        yield compare_times(
            (f"decode, batch {batch}", decoder(looped(), batch, 64)),
            ("GPT-2, 56 layers", decoder(gpt2(), batch, 64)), seconds, 1.2, True,
        )  # fmt: skip
    yield compare_times(
        ("tokens/s, batch 8", decoder(looped(), 8, 64)),
        ("batch 1", decoder(looped(), 1, 64)), seconds, 5, True, (8, 1),
    )  # fmt: skip
    if seconds > QUICK_SECONDS:
        what, against = ("products alone, batch 8", products_alone(looped(), 8)), products_alone(looped(), 1)
        yield compare_times(what, ("batch 1", against), seconds, is_speed=True, work=(8, 1))
        what, against = decoder(looped(), 8, 64), decoder(naive(), 8, 64)
        yield compare_times(("decode, batch 8", what), ("naive", against), seconds, is_speed=True)


def prefilling(seconds: float) -> Iterator[Ratio]:
    ids = token_ids(1, 512)
    never = prefiller(looped(), ids, exit_policy=AccelerationExit(0.0))
    functions = [prefiller(looped(), ids), prefiller(gpt2(), ids), never]
    times = timed_rounds("prefill, 512 tokens", functions, 3 * seconds)  # a round takes long
    yield ratio_of("prefill, 512 tokens", "GPT-2, 56 layers", times[:, [0, 1]], 1.0)
    yield ratio_of("prefill, 512 tokens, acceleration that never fires", "fixed loops", times[:, [2, 0]], 1.03)


def never_firing(seconds: float) -> Iterator[Ratio]:
    fixed = ("fixed loops", decoder(looped(), 1, 64))
    for name, policy, reach in (("acceleration", AccelerationExit(0.0), 1.03), ("KL", KLExit(0.0), None)):
        what = (f"decode, {name} that never fires", decoder(looped(), 1, 64, exit_policy=policy))
        yield compare_times(what, fixed, seconds, reach)
    ids = token_ids(1, 64)
    what = ("prefill, 64 tokens, KL that never fires", prefiller(looped(), ids, exit_policy=KLExit(0.0)))
    yield compare_times(what, ("fixed loops", prefiller(looped(), ids)), seconds)


def exiting(seconds: float) -> Iterator[Ratio]:
    ids = token_ids(1, 512)
    mean_a_third = {"exit_policy": PrescribedExit(2 * LOOPS // 3 - 1)}
    what = ("prefill, 512 tokens, exits at a third of the cap", prefiller(looped(), ids, **mean_a_third))
    at_the_cap = prefiller(looped(), ids, exit_policy=FixedLoops())
    yield compare_times(what, ("all tokens at the cap", at_the_cap), 2 * seconds, 0.52)
    if seconds > QUICK_SECONDS:
        # Where hidden states are recorded, all tokens are computed, and those that have left are put back.
        all_computed = prefiller(naive(), ids, **mean_a_third, output_hidden_states=True)
        yield compare_times(what, ("naive", all_computed), 2 * seconds)
    yield compare_times(
        ("decode, batch 8, exits up to two thirds of the cap",
         decoder(looped(), 8, 64, exit_policy=PrescribedExit(2 * LOOPS // 3))),
        ("all rows at the cap", decoder(looped(), 8, 64, exit_policy=FixedLoops())), seconds, 0.72,
    )  # fmt: skip


def first_token(seconds: float) -> Iterator[Ratio]:
    ids = token_ids(1, 64)
    what = ("first token, prompt of 64", prefiller(looped(), ids))
    yield compare_times(what, ("GPT-2, 56 layers", prefiller(gpt2(), ids)), seconds, 1.0)


def precisions(seconds: float) -> Iterator[Ratio]:
    fp32 = ("float32", decoder(looped(), 1, 64))
    for precision, reach in (("bfloat16", None), ("int8", 0.5)):
        yield compare_times((f"decode, {precision}", decoder(looped_in(precision), 1, 64)), fp32, seconds, reach)
    what = ("decode, int8", decoder(looped_in("int8"), 1, 64))
    yield compare_times(what, ("GPT-2, 56 layers, in int8 too", decoder(gpt2_in_int8(), 1, 64)), seconds, 0.75)
    compiled, peer = looped_in("int8", compile=True), RecurrentGPT2ForCausalLM.from_gpt2(gpt2(), loop_groups=[])
    peer.optimize_for_inference(weights="int8", compile=True)
    what = ("decode, int8, compiled", decoder(compiled, 1, 64))
    yield compare_times(what, fp32, seconds, 0.5)
    yield compare_times(what, ("int8", decoder(looped_in("int8"), 1, 64)), seconds)
    against = ("GPT-2, 56 layers, in int8, compiled in the same way", decoder(peer, 1, 64))
    yield compare_times(what, against, seconds, 0.75)
    ids = token_ids(1, 64)
    what = ("prefill, 64 tokens, int8, compiled", prefiller(compiled, ids))
    yield compare_times(what, ("int8", prefiller(looped_in("int8"), ids)), seconds)
    ids = token_ids(1, 512)
    what = ("prefill, 512 tokens, int8", prefiller(looped_in("int8"), ids))
    yield compare_times(what, ("float32", prefiller(looped(), ids)), seconds)


def applied_layers(config: RecurrentGPT2Config, loops: float | None = None) -> float:
    """That a token passes through, with as many loops of every group, or with the config's."""
    counts = config.loops_per_group() if loops is None else [loops] * len(config.loop_groups)
    looped = [len(group) * (count - 1) for group, count in zip(config.loop_groups, counts, strict=True)]
    return config.num_hidden_layers + sum(looped)


def small(seconds: float) -> Iterator[Ratio]:
    """The model that comes with the project, at full depth, and a GPT-2 of its size."""
    model, _ = mini()
    config, most = model.config, model.config.vocab_size
    applied = int(applied_layers(config))
    size = {"n_embd": config.hidden_size, "n_head": config.num_attention_heads, "vocab_size": most}
    peer = gpt2(applied, **size)
    against = (f"GPT-2, {applied} layers, d = {config.hidden_size}", decoder(peer, 1, 64, most=most))
    ids = token_ids(1, 64, most)
    for name, measured, reach in (("", model, 0.8), (", compiled", compiled_mini(), 0.8)):
        fixed = decoder(measured, 1, 64, most=most)
        what = f"decode, d = {config.hidden_size}{name}"
        prefill = (f"prefill, 64 tokens, d = {config.hidden_size}{name}", prefiller(measured, ids))
        yield compare_times(prefill, (against[0], prefiller(peer, ids)), seconds)
        yield compare_times((what, fixed), against, seconds, reach)
        never = decoder(measured, 1, 64, most=most, exit_policy=AccelerationExit(0.0))
        yield compare_times((f"{what}, acceleration that never fires", never), ("fixed loops", fixed), seconds, 1.05)
    as_ours = RecurrentGPT2ForCausalLM.from_gpt2(peer, loop_groups=[]).optimize_for_inference(compile=True)
    against = (f"{against[0]}, compiled in the same way", decoder(as_ours, 1, 64, most=most))
    yield compare_times((what, fixed), against, seconds)


def programs(seconds: float) -> Iterator[Ratio]:
    """The policy of the model that comes with the project against the fixed depth that answers as well, on programs."""
    yield from programs_of(mini()[0], "programs", (1,), seconds)
    yield from programs_of(compiled_mini(), "programs, compiled", (1, 8), seconds)


def programs_of(
    model: RecurrentGPT2ForCausalLM, name: str, batches: tuple[int, ...], seconds: float
) -> Iterator[Ratio]:
    tokenizer = mini()[1]
    config, own = model.config, model.generation_config
    task = next((t for t in tasks_of(model) if t.name == "programs"), None)
    policy, cap = getattr(own, "exit_policy", None), getattr(own, "num_loops", None)
    if task is None or policy is None:
        return
    entries, full = ids_of_tokens(tokenizer, task), max(config.loops_per_group())
    count = 64 if seconds > QUICK_SECONDS else 16
    batch = task.full().sample(count, task.depth, np.random.default_rng([0]))
    sequences = Sequences.of(batch, entries)
    under = run(model, sequences, cap or full, policy)
    depths = (run(model, sequences, count) for count in range(1, full + 1))
    loops = next((n for n, fixed in enumerate(depths, 1) if fixed.accuracy >= under.accuracy - 0.001), full)
    against = f"{loops} fixed loops, as many answers right ({under.accuracy:.1%})"
    exits, fixed = {"exit_policy": policy, "num_loops": cap}, {"num_loops": loops}
    for rows in batches:
        part, half = sequences.ids[:rows], sequences.ids.shape[1] // 2
        for way, start in (("prefill", 0), ("decode", half)):
            steps = float(under.depth[:rows, start:].mean())
            work = (applied_layers(config, steps), applied_layers(config, loops))
            if way == "prefill":
                functions = [prefiller(model, part, **arguments) for arguments in (exits, fixed)]
            else:
                functions = [replayer(model, part, half, **arguments) for arguments in (exits, fixed)]
            what = f"{name}, batch {rows}, {way}, under the model's policy"
            times = timed_rounds(what, functions, seconds)
            note = f"loops x {steps / loops:.2f}, layers x {work[0] / work[1]:.2f}"
            yield ratio_of(what, against, times, note=note)
            yield ratio_of(f"{what}, time per layer", against, times, 1.15 if rows == 1 else None, work=work)


def replayer(model, ids: torch.Tensor, start: int, **arguments) -> Callable[[], None]:
    """Reads a text, and then its tokens from `start` on one by one."""

    @torch.inference_mode()
    def replay() -> None:
        past = LoopCache(model.config)
        model(ids[:, :start], past_key_values=past, use_cache=True, logits_to_keep=1, **arguments)
        for place in range(start, ids.shape[1]):
            model(ids[:, [place]], past_key_values=past, use_cache=True, **arguments)

    return replay


@dataclass
class Drafted:
    """A generation, plain and with drafts. If it is greedy, the tokens must be the same."""

    model: RecurrentGPT2ForCausalLM
    prompt: torch.Tensor
    new_tokens: int
    do_sample: bool = False

    def __post_init__(self):
        loops = max(self.model.config.loops_per_group())
        self.arguments = {
            "max_new_tokens": self.new_tokens, "do_sample": self.do_sample, "top_k": 0 if self.do_sample else None,
            "eos_token_id": None, "pad_token_id": 0, "num_loops": loops, "exit_policy": None,
        }  # fmt: skip
        self.expected = self.plain()

    def plain(self) -> torch.Tensor:
        return self.model.generate(self.prompt, **self.arguments)

    def assisted(self, tokens: int | None = None, **draft) -> tuple[Callable[[], torch.Tensor], float]:
        """The generation with drafts of as many tokens, or verified as they are made; and the share of them that was
        accepted."""
        assistant = self.model.draft(**draft, num_tokens=tokens)
        generate = partial(self.model.generate, self.prompt, assistant_model=assistant, **self.arguments)
        drafted, verified, entered = 0, 0, 0

        def count_pass(module, args, kwargs) -> None:
            nonlocal drafted, verified
            full = self.model.config.loops_per_group(self.arguments["num_loops"])
            is_full = kwargs.get("exit_policy") is None and kwargs.get("num_loops") == full
            drafted, verified = drafted + (not is_full), verified + is_full

        def count_token(module, args) -> None:
            nonlocal entered
            entered += args[0].numel() == 1

        base = self.model.model
        hooks = [
            base.register_forward_pre_hook(count_pass, with_kwargs=True),
            base.embed_positions.register_forward_pre_hook(count_token),
        ]
        generated = generate()
        for hook in hooks:
            hook.remove()
        if not self.do_sample and not torch.equal(generated, self.expected):
            raise RuntimeError("a draft changed the tokens of greedy decoding.")
        if tokens is None:  # what enters is the last token that is certain, and then drafted ones
            return generate, (self.new_tokens - 1) / entered
        return generate, max(0.0, self.new_tokens - verified) / max(1, drafted)


def loops_of(count: int) -> str:
    return f"{count} loop{'s' * (count > 1)}"


def speculating(seconds: float) -> Iterator[Ratio]:
    """Drafts of few loops, verified at full depth: by the language model that comes with the project, by the one that
    follows chains, and what the former's acceptance would give at the paper's size."""
    is_quick = seconds <= QUICK_SECONDS
    model, tokenizer = mini()
    prompt = tokenizer("The documentation of this module says that", return_tensors="pt")["input_ids"]
    policy = getattr(model.generation_config, "exit_policy", None)
    text, accepted = Drafted(model, prompt, 128), {}
    for name, generation in (
        ("generation", text),
        ("generation, sampled", Drafted(model, prompt, 128, do_sample=True)),
        ("generation, compiled", Drafted(compiled_mini(), prompt, 128)),
    ):
        for loops in (1, 2, 3) if generation is text and not is_quick else (2,):
            assisted, share = generation.assisted(num_loops=loops)
            accepted[name, loops] = share
            what = f"{name}, drafts of {loops_of(loops)}, verified as they are made"
            goal = 1.8 if not generation.do_sample and loops == 2 else None
            against = ("full depth", generation.plain)
            yield compare_times((what, assisted), against, seconds / 2, goal, True, note=f"accepted {share:.0%}")
    drafts: list[tuple[str, dict]] = [(loops_of(loops), {"num_loops": loops}) for loops in (1, 2, 3)]
    if policy is not None:
        cap = getattr(model.generation_config, "num_loops", None) or text.arguments["num_loops"]
        drafts.append(("its policy", {"num_loops": cap, "exit_policy": policy}))
    full = ("full depth", text.plain)
    for name, draft in drafts[1:2] if is_quick else drafts:
        for tokens in (4,) if is_quick else (4, 8):
            assisted, accepted[name, tokens] = text.assisted(tokens, **draft)
            what = (f"generation, drafts of {tokens} tokens by {name}, then verified", assisted)
            note = f"accepted {accepted[name, tokens]:.0%}"
            yield compare_times(what, full, seconds / 2, is_speed=True, note=note)
    yield from speculating_on_chains(seconds)
    yield from speculating_at_the_papers_size(seconds, accepted)


def speculating_on_chains(seconds: float) -> Iterator[Ratio]:
    chains, tokenizer = load_checkpoint(CHECKPOINTS / "recurrent-gpt2-chains", optimize=True)
    task = tasks_of(chains)[0]
    batch = task.full().sample(1, task.depth, np.random.default_rng([0]))
    ids = Sequences.of(batch, ids_of_tokens(tokenizer, task)).ids
    half = chains.config.max_position_embeddings // 2
    generation = Drafted(chains, ids[:, :half], half)
    for loops in (2,) if seconds <= QUICK_SECONDS else (1, 2, 3):
        for tokens, way in ((None, "verified as they are made"), (4, "4 tokens at a time")):
            assisted, share = generation.assisted(tokens, num_loops=loops)
            what = (f"chains, drafts of {loops_of(loops)}, {way}", assisted)
            against = ("full depth", generation.plain)
            yield compare_times(what, against, seconds / 2, is_speed=True, note=f"accepted {share:.0%}")


@cache
def in_one_group() -> RecurrentGPT2ForCausalLM:
    """Of the paper's size, with its four looped layers in one group, which forgets its state: all drafts are right."""
    torch.manual_seed(0)
    model = RecurrentGPT2ForCausalLM(RecurrentGPT2Config(num_loops=LOOPS, loop_groups=[[4, 5, 6, 7]])).eval()
    with torch.no_grad():
        model.model.loop_inputs[0].state_proj.weight.zero_()
    return model.optimize_for_inference()


def speculating_at_the_papers_size(seconds: float, accepted: dict[tuple[str, int], float]) -> Iterator[Ratio]:
    """Costs are of the size, acceptance is the small model's."""
    generation = Drafted(in_one_group(), token_ids(1, 64), 48)
    for loops in (2,) if seconds <= QUICK_SECONDS else (2, 3):
        times = timed_rounds(
            f"paper's size, drafts of {loops}", [generation.assisted(num_loops=loops)[0], generation.plain], 2 * seconds
        )
        share = accepted["generation", loops]
        what = f"paper's size in one group, drafts of {loops_of(loops)}, verified as they are made"
        yield ratio_of(f"{what}, all right", "full depth", times, is_speed=True)
        note = f"accepted {share:.0%}"
        what = f"{what}, if accepted as those of the small model"
        yield ratio_of(what, "full depth", times / [share, 1], is_speed=True, note=note)
    past = context_cache(looped(), 1, 64)

    @torch.inference_mode()
    def verify() -> None:
        looped()(token_ids(1, 5), past_key_values=past, use_cache=True)
        past.crop(-5)

    for loops in (1, 2, 3):
        if (loops_of(loops), 4) not in accepted:
            continue
        functions = [decoder(looped(), 1, 64, num_loops=loops), verify, decoder(looped(), 1, 64)]
        times = timed_rounds(f"draft of {loops}, verification, full depth", functions, seconds)
        share = min(accepted[loops_of(loops), 4], 0.999)
        tokens = (1 - share**5) / (1 - share)  # expected of a draft of 4 and its verification
        both = np.stack([(4 * times[:, 0] + times[:, 1]) / tokens, times[:, 2]], axis=1)
        what = f"paper's size, drafts of 4 tokens by {loops_of(loops)}, if accepted as those of the small model"
        yield ratio_of(what, "full depth", both, is_speed=True, note=f"accepted {share:.0%}")


def scoring(seconds: float) -> Iterator[Ratio]:
    """256 tokens under a rule, in one pass and token by token; if it must be quick, the middle 16 of these."""
    model, ids, policy = looped(), token_ids(1, 256), AccelerationExit(0.1, normalize="state")
    decoded = 256 if seconds > QUICK_SECONDS else 16
    start, past = 128 - decoded // 2, LoopCache(model.config)

    @torch.inference_mode()
    def one_pass() -> None:
        model(ids, exit_policy=policy, use_cache=False)

    @torch.inference_mode()
    def token_by_token() -> None:
        for place in range(start, start + decoded):
            model(ids[:, place : place + 1], past_key_values=past, use_cache=True, exit_policy=policy)
        past.crop(-decoded)

    with torch.inference_mode():
        if start > 0:
            model(ids[:, :start], past_key_values=past, exit_policy=policy)
    what, against = ("scoring 256 tokens in one adaptive pass", one_pass), ("token by token", token_by_token)
    yield compare_times(what, against, seconds, 5, True, (256, decoded))


def training_step(model, batch: int = 4, length: int = 128, **arguments) -> Callable[[], None]:
    """Ours has gradients through the last 8 of 12 loops."""
    ids = token_ids(batch, length)

    def step() -> None:
        model.train()
        model(ids, labels=ids, use_cache=False, **arguments).loss.backward()
        model.zero_grad()
        model.eval()

    return step


def training(seconds: float) -> Iterator[Ratio]:
    is_quick, matrix = seconds <= QUICK_SECONDS, torch.randn(2048, 2048)
    eager, peer = training_step(naive(), num_loops=LOOPS), training_step(gpt2())

    def multiply() -> None:
        for _ in range(16):
            matrix @ matrix

    functions = [eager, peer, multiply]
    if is_quick:  # a first round that does not count would take too long, and so would compiling
        training_step(naive(), 1, 16, num_loops=LOOPS)()
        training_step(gpt2(), 1, 16)()
    else:
        compiled = copy.deepcopy(naive())
        for layer in compiled.model.layers:
            layer.compile(dynamic=False)
        functions.append(training_step(compiled, num_loops=LOOPS))
        functions[-1]()  # compiles
    times = timed_rounds("training step", functions, 6 * seconds, warm=not is_quick)  # a round takes long
    yield ratio_of("training step, gradients through 8 of 12 loops", "GPT-2, 56 layers", times[:, [0, 1]], 1.0, True)
    if not is_quick:
        yield ratio_of("training step, compiled", "eager", times[:, [3, 0]], 1.25, True)
        with FlopCounterMode(display=False) as counter:  # another step
            eager()
        work = (counter.get_total_flops() / 1e9, 16 * 2 * 2048**3 / 1e9)
        yield ratio_of("training step, per GFLOP", "product of 2048 x 2048", times[:, [0, 2]], work=work)


def shares_of_products() -> Iterator[Share]:
    for name, function in (
        ("training step", training_step(naive(), num_loops=LOOPS)),
        ("prefill, 512 tokens", prefiller(looped(), token_ids(1, 512))),
        ("decode, batch 1, context 64", decoder(looped(), 1, 64, tokens=4)),
        ("decode, batch 8, context 64", decoder(looped(), 8, 64, tokens=4)),
    ):
        function()
        with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("between operators"):
            function()
        times = {event.key: event.self_cpu_time_total for event in profiler.key_averages()}
        products = sum(times.get(product, 0) for product in PRODUCTS)
        attention = times.get(ATTENTION, 0) + times.get(f"{ATTENTION}_backward", 0)
        yield Share(name, products / sum(times.values()), attention / sum(times.values()))


def growing(seconds: float) -> Iterator[Ratio]:
    """Time per layer application (head left out) as loops and text grow."""
    base, is_quick = looped(), seconds <= QUICK_SECONDS

    def decode(num_loops: int, context: int) -> Callable[[], None]:
        past, token = LoopCache(base.config), token_ids(1, 1)
        if num_loops == LOOPS:
            past = context_cache(base, 1, context)
        else:
            with torch.inference_mode():
                base.model(token_ids(1, context), past_key_values=past, num_loops=num_loops)

        @torch.inference_mode()
        def run() -> None:
            base.model(token, past_key_values=past, num_loops=num_loops)
            past.crop(-1)

        return run

    at_12 = ("12 loops", decode(LOOPS, 64))
    for loops in (1, 64) if is_quick else (1, 4, 32, 64):
        work = (8 + 4 * loops, APPLICATIONS)
        yield compare_times((f"time per layer, {loops} loops", decode(loops, 64)), at_12, seconds, 1.1, work=work)
    for context in (448,) if is_quick else (128, 256, 448):
        yield compare_times((f"time per layer, context {context}", decode(LOOPS, context)), ("64", at_12[1]), seconds)


MEASUREMENTS: dict[str, Callable[[float], Iterator[Ratio]]] = {
    "decode": decoding_one,
    "head": reading_out,
    "first": first_token,
    "precision": precisions,
    "small": small,
    "programs": programs,
    "speculation": speculating,
    "batches": decoding_batches,
    "prefill": prefilling,
    "rules": never_firing,
    "exits": exiting,
    "scoring": scoring,
    "training": training,
    "growth": growing,
}

# What a fresh process does: it imports, loads, and reads a text of 512 tokens.
FRESH = """
import json, time
started = time.perf_counter()
{module}
imported = time.perf_counter()
model = Model.from_pretrained({folder!r})
loaded = time.perf_counter()

import gc
import torch


def memory():  # the kernel's own record: `getrusage` would give a child the peak of its parent
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return {{name: int(status[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS")}}


weights, peak, held = sum(parameter.nbytes for parameter in model.parameters()), 0, 0
for parameter in model.parameters():  # in memory, and not only in the file
    parameter.data = parameter.data.clone()
gc.collect()
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts anew
if hasattr(model, "optimize_for_inference"):
    before = memory()["VmRSS"]
    model.optimize_for_inference(**{arguments})
    gc.collect()
    after = memory()
    peak, held = (1 + (after[name] - before) / weights for name in ("VmHWM", "VmRSS"))
with torch.inference_mode():
    past = model(torch.zeros(1, 512, dtype=torch.long), use_cache=True, logits_to_keep=1).past_key_values
slots = [slot for layer in past.layers for slot in getattr(layer, "slots", [layer])]
print(json.dumps({{
    "import": imported - started,
    "load": loaded - imported,
    "peak_mib": memory()["VmHWM"] / 2**20,
    "call_peak": peak,
    "call_held": held,
    "cache_bytes": sum(slot.keys.nbytes + slot.values.nbytes for slot in slots),
}}))
"""
OURS = "from recurrent_gpt2 import RecurrentGPT2ForCausalLM as Model"
THEIRS = "from transformers import GPT2LMHeadModel as Model"


@dataclass
class Memory:
    """Of a text of 512 tokens."""

    what: str
    cache_bytes: int
    peak_mib: float  # of a fresh process after loading, the weights included
    call_peak: float = 0.0  # of that call, over the weights; 0: there was none
    call_held: float = 0.0  # after it


def in_fresh_process(module: str, folder: Path, **arguments: Any) -> dict[str, float]:
    """`arguments`: of `optimize_for_inference`."""
    code = FRESH.format(module=module, folder=str(folder), arguments=arguments)
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return json.loads(output.splitlines()[-1])


def loading(rounds: int, folders: dict[str, Path]) -> tuple[list[Ratio], list[Memory]]:
    """Times and memory of fresh processes, of ours with either cache strategy in turn, and of GPT-2 (12 layers).

    `folders`: of models, by strategy and for `GPT-2, 12 layers`.
    """
    *strategies, peer = folders
    found: dict[str, list[dict[str, float]]] = {name: [] for name in folders}
    times: dict[str, list[tuple[float, float]]] = {"import": [], "load": []}
    for strategy in tqdm((strategies * rounds)[:rounds], desc="import and load", unit=" rounds"):
        ours, theirs = in_fresh_process(OURS, folders[strategy]), in_fresh_process(THEIRS, folders[peer])
        found[strategy].append(ours)
        found[peer].append(theirs)
        for name, pairs in times.items():
            pairs.append((ours[name], theirs[name]))
    ratios = [ratio_of(name, peer, np.array(pairs), 1.1) for name, pairs in times.items()]
    for name in ("bfloat16", "int8", "int8, compiled"):
        precision, *compiled = name.split(", ")
        arguments = {"weights": precision, "compile": bool(compiled)}
        found[f"{strategies[0]}, {name}"] = [in_fresh_process(OURS, folders[strategies[0]], **arguments)]
    memory = [
        Memory(name, int(runs[0]["cache_bytes"]),
               *(float(np.median([run[key] for run in runs])) for key in ("peak_mib", "call_peak", "call_held")))
        for name, runs in found.items()
    ]  # fmt: skip
    return ratios, memory


@dataclass
class Findings:
    seconds: float  # of rounds, for each measurement
    machine: str = field(default_factory=lambda: describe_machine())
    torch_version: str = torch.__version__
    read_gb_per_second: float = 0.0  # of memory, beyond all caches
    cache_mib: float | None = None  # the last level
    ratios: list[Ratio] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    done: list[str] = field(default_factory=list)  # measurements

    @classmethod
    def read(cls, file: Path) -> "Findings":
        """What an interrupted run found, but for measurements that were not at their end."""
        values = json.loads(file.read_text())
        done = values.get("done", [])
        kinds = {"ratios": Ratio, "shares": Share, "memory": Memory}
        parts = {name: [kind(**row) for row in values[name]] for name, kind in kinds.items()}
        parts["ratios"] = [ratio for ratio in parts["ratios"] if ratio.part in done]
        if "shares" not in done:
            parts["shares"] = []
        return cls(**{**values, **parts})

    def write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".part")
        unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n")
        unfinished.replace(file)


def describe_machine() -> str:
    """Processor, instructions and threads."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    processor = models[0] if models else platform.machine()
    return f"{processor}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def read_bandwidth() -> float:
    """GB/s at which memory is read, the best of nine sums over 512 MB."""
    values = torch.ones(2**27)
    return values.nbytes / min(_seconds(values.sum) for _ in range(9)) / 1e9


def last_cache_mib() -> float | None:
    """As Linux tells it."""
    sizes = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return float(sizes[-1].read_text().strip().removesuffix("K")) / 1024 if sizes else None


def measure(found: Findings, names: list[str]) -> Iterator[None]:
    """Adds to the findings what is not among them, with a pause after each addition."""
    if not found.done:
        found.read_gb_per_second, found.cache_mib = read_bandwidth(), last_cache_mib()
    for name in names:
        if name in found.done:
            continue
        if name in MEASUREMENTS:
            for ratio in MEASUREMENTS[name](found.seconds):
                ratio.part = name
                found.ratios.append(ratio)
                yield
        elif name == "shares":
            for share in shares_of_products():
                found.shares.append(share)
                yield
        else:
            ratios, found.memory = measure_loading(2 if found.seconds <= QUICK_SECONDS else 9)
            for ratio in ratios:
                ratio.part = name
            found.ratios += ratios
        found.done.append(name)
        gc.collect()
        yield


def measure_loading(rounds: int) -> tuple[list[Ratio], list[Memory]]:
    with tempfile.TemporaryDirectory() as temporary:
        folders = {name: Path(temporary, name) for name in (*CACHE_STRATEGIES, "GPT-2, 12 layers")}
        for strategy in CACHE_STRATEGIES:
            naive().config.cache_strategy = strategy
            naive().save_pretrained(folders[strategy])
        gpt2(12).save_pretrained(folders["GPT-2, 12 layers"])
        return loading(rounds, folders)


def print_tables(found: Findings) -> None:
    table = Table("measured", "against", "ratio", "range", "rounds", "reach", "", "ms", "ms against")
    marks = {None: "", True: "reached", False: "missed"}
    for r in found.ratios:
        table.add_row(
            f"{r.what} ({r.note})" if r.note else r.what, r.against,
            f"{r.ratio:.3f}", f"{r.lowest:.3f}-{r.highest:.3f}", str(r.rounds), r.goal,
            marks[r.is_reached], f"{r.milliseconds:.1f}", f"{r.milliseconds_against:.1f}",
        )  # fmt: skip
    console = Console(width=160)
    console.print(table)
    cache_size = "" if found.cache_mib is None else f", last cache {found.cache_mib:.0f} MiB"
    console.print(f"{found.machine}, memory read at {found.read_gb_per_second:.1f} GB/s{cache_size}")
    if found.shares:
        table = Table("share of time", "in matrix products", "in attention")
        for share in found.shares:
            table.add_row(share.what, f"{share.products:.0%}", f"{share.attention:.0%}")
        console.print(table)
    if found.memory:
        table = Table("512 tokens", "bytes of the cache", "peak MiB", "peak of the call / weights", "held after it")
        for m in found.memory:
            of_call = [f"{m.call_peak:.3f}", f"{m.call_held:.3f}"] if m.call_peak else []
            table.add_row(m.what, f"{m.cache_bytes:,}", f"{m.peak_mib:.0f}", *of_call)
        console.print(table)


def resumed(file: Path | None, fresh: Findings) -> Findings:
    """What the file has of a run like this one. Rows of two machines do not go into one table."""
    if file is None:
        raise ValueError("`--resume` needs `--output`, the file of the run that was stopped.")
    if not file.exists():
        return fresh
    found = Findings.read(file)
    for name in ("machine", "torch_version", "seconds"):
        if getattr(found, name) != getattr(fresh, name):
            raise ValueError(
                f"{file} is of a run with {name} {getattr(found, name)!r}, this one has {getattr(fresh, name)!r}: "
                "start anew, without `--resume`."
            )
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*MEASUREMENTS, "shares", "loading"]
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of rounds, for each measurement")
    parser.add_argument("--quick", action="store_true", help="a second each, fewer points, no profiles")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--output", type=Path, help="write the ratios to this JSON file too")
    parser.add_argument("--resume", action="store_true", help="go on with what is in the output file, after a stop")
    options = parser.parse_args(arguments)
    chosen = [name for name in names if name in (options.only or names) and not (options.quick and name == "shares")]
    found = Findings(seconds=QUICK_SECONDS if options.quick else options.seconds)
    if options.resume:
        found = resumed(options.output, found)
    try:
        for _ in measure(found, chosen):
            if options.output is not None:  # nothing is lost if it is stopped
                found.write(options.output)
    finally:
        print_tables(found)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
