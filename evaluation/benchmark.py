"""Speed on the machine it runs on, as ratios within one run: `python -m evaluation.benchmark`.

The model is the paper's (12 layers, d = 768, 12 loops, fp32, random weights), unless said otherwise; the peer is
`GPT2LMHeadModel` with as many real layers as are applied (56). Every measurement sets two ways of doing the same beside
each other, in turn, round after round, and reports the median of the rounds' ratios with their range. Absolute times
are of this machine and this moment: nothing else should run on it meanwhile.
"""

import argparse
import gc
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import linear
from torch.profiler import ProfilerActivity, profile, record_function
from tqdm.auto import tqdm
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from recurrent_gpt2 import (
    AccelerationExit,
    FixedLoops,
    KLExit,
    LoopCache,
    LoopView,
    RecurrentGPT2Config,
    RecurrentGPT2ForCausalLM,
)

LOOPS = 12
APPLICATIONS = 56  # of layers: 8 that are not looped, and 4 that are
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
    reach: float | None = None  # a time should be at most this, a speed at least
    is_speed: bool = False

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
    rounds: int,
    reach: float | None = None,
    is_speed: bool = False,
    work: tuple[float, float] = (1, 1),
    warm: bool = True,
) -> Ratio:
    """`work`: units of work that a call of either does, where they differ; times are per unit. `warm`: with a first
    call that does not count, which compiles and fills caches."""
    for _, function in (what, against) if warm else ():
        function()
    times = [(_seconds(what[1]), _seconds(against[1])) for _ in tqdm(range(rounds), desc=what[0], unit=" rounds")]
    pairs = np.array(times) * 1000 / np.array(work)
    ratios = pairs[:, 1] / pairs[:, 0] if is_speed else pairs[:, 0] / pairs[:, 1]
    return Ratio(
        what[0], against[0], float(np.median(ratios)), float(ratios.min()), float(ratios.max()),
        float(np.median(pairs[:, 0])), float(np.median(pairs[:, 1])), reach, is_speed,
    )  # fmt: skip


def _few(rounds: int) -> int:
    """Rounds of what takes long, and is the steadier for it."""
    return max(rounds // 3, 1)


def _seconds(function: Callable) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


@cache
def looped() -> RecurrentGPT2ForCausalLM:
    torch.manual_seed(0)
    return RecurrentGPT2ForCausalLM(RecurrentGPT2Config(num_loops=LOOPS)).eval()


@cache
def gpt2(layers: int = APPLICATIONS) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}  # as ours
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_positions=512, use_cache=True, **no_dropout)).eval()


def new_model() -> RecurrentGPT2ForCausalLM:
    return RecurrentGPT2ForCausalLM(RecurrentGPT2Config()).train()


def token_ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 50257, (batch, length), generator=torch.Generator().manual_seed(batch + length))


def decoder(model, batch: int, context: int, tokens: int = 4, **arguments) -> Callable[[], None]:
    """Decodes `tokens` tokens after a context that is in the cache before the clock starts."""
    past = LoopCache(model.config) if isinstance(model, RecurrentGPT2ForCausalLM) else DynamicCache(config=model.config)
    ids = token_ids(batch, context)
    with torch.inference_mode():
        model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def decode() -> None:
        token = ids[:, -1:]
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


def bare_matrices(model: RecurrentGPT2ForCausalLM) -> Callable[[], None]:
    """All matrices that a token passes through, in their order, each applied to one row."""
    base, config, weights = model.model, model.config, []
    group_of = {group[0]: index for index, group in enumerate(config.loop_groups)}
    looped_layers = {layer for group in config.loop_groups for layer in group}

    def of_layer(layer: int) -> list[torch.Tensor]:
        block = base.layers[layer]
        modules = (block.attention.qkv_proj, block.attention.o_proj, block.mlp.up_proj, block.mlp.down_proj)
        return [module.weight for module in modules]

    for layer in range(config.num_hidden_layers):
        if layer in group_of:
            group = group_of[layer]
            weights.append(base.loop_inputs[group].input_proj.weight)
            step = [base.loop_inputs[group].state_proj.weight]
            step += [weight for index in config.loop_groups[group] for weight in of_layer(index)]
            weights += step * LOOPS
        elif layer not in looped_layers:
            weights += of_layer(layer)
    weights.append(model.lm_head.weight)
    rows = {width: torch.randn(1, 1, width) for width in {weight.shape[1] for weight in weights}}

    @torch.inference_mode()
    def apply() -> None:
        for weight in weights:
            linear(rows[weight.shape[1]], weight)

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


def decoding_one(rounds: int) -> Iterator[Ratio]:
    for context in (64, 448):
        yield compare_times(
            (f"decode, batch 1, context {context}", decoder(looped(), 1, context)),
            ("GPT-2, 56 layers", decoder(gpt2(), 1, context)), rounds, 0.92,
        )  # fmt: skip
    yield compare_times(
        ("decode, batch 1, context 64", decoder(looped(), 1, 64)),
        ("bare F.linear of the same matrices", bare_matrices(looped())), rounds, 1.15, work=(4, 1),
    )  # fmt: skip


def decoding_batches(rounds: int) -> Iterator[Ratio]:
    for batch in (2, 4, 8):
        yield compare_times(
            (f"decode, batch {batch}", decoder(looped(), batch, 64)),
            ("GPT-2, 56 layers", decoder(gpt2(), batch, 64)), rounds, 1.2, True,
        )  # fmt: skip
    yield compare_times(
        ("tokens/s, batch 8", decoder(looped(), 8, 64)), ("batch 1", decoder(looped(), 1, 64)), rounds, 5, True, (8, 1)
    )


def prefilling(rounds: int) -> Iterator[Ratio]:
    ids = token_ids(1, 512)
    yield compare_times(
        ("prefill, 512 tokens", prefiller(looped(), ids)),
        ("GPT-2, 56 layers", prefiller(gpt2(), ids)),
        _few(rounds),
        1.0,
    )


def never_firing(rounds: int) -> Iterator[Ratio]:
    policies = (("acceleration", AccelerationExit(0.0), 512, 1.03), ("KL", KLExit(0.0), 128, None))
    for name, policy, length, reach in policies:
        ids = token_ids(1, length)
        yield compare_times(
            (f"decode, {name} that never fires", decoder(looped(), 1, 64, exit_policy=policy)),
            ("fixed loops", decoder(looped(), 1, 64)), rounds, reach,
        )  # fmt: skip
        yield compare_times(
            (f"prefill, {length} tokens, {name} that never fires", prefiller(looped(), ids, exit_policy=policy)),
            ("fixed loops", prefiller(looped(), ids)), _few(rounds), reach,
        )  # fmt: skip


def exiting(rounds: int) -> Iterator[Ratio]:
    ids = token_ids(1, 512)
    mean_a_third = PrescribedExit(2 * LOOPS // 3 - 1)
    yield compare_times(
        ("prefill, 512 tokens, exits at a third of the cap", prefiller(looped(), ids, exit_policy=mean_a_third)),
        ("all tokens at the cap", prefiller(looped(), ids, exit_policy=FixedLoops())), _few(rounds), 0.52,
    )  # fmt: skip
    yield compare_times(
        ("decode, batch 8, exits up to two thirds of the cap",
         decoder(looped(), 8, 64, exit_policy=PrescribedExit(2 * LOOPS // 3))),
        ("all rows at the cap", decoder(looped(), 8, 64, exit_policy=FixedLoops())), rounds, 0.72,
    )  # fmt: skip


def scoring(rounds: int) -> Iterator[Ratio]:
    """256 tokens under a rule, in one pass and token by token."""
    model, ids, policy = looped(), token_ids(1, 256), AccelerationExit(0.1, normalize="state")

    @torch.inference_mode()
    def one_pass() -> None:
        model(ids, exit_policy=policy, use_cache=False)

    @torch.inference_mode()
    def token_by_token() -> None:
        past = LoopCache(model.config)
        for place in range(256):
            model(ids[:, place : place + 1], past_key_values=past, use_cache=True, exit_policy=policy)

    yield compare_times(
        ("scoring 256 tokens in one adaptive pass", one_pass), ("token by token", token_by_token),
        _few(rounds), 5, True, warm=False,
    )  # fmt: skip


def training(rounds: int) -> Iterator[Ratio]:
    """A step with 4 sequences of 128 tokens; gradients through the last 8 of 12 loops."""
    ids = token_ids(4, 128)

    def step_of(model, **arguments) -> Callable[[], None]:
        def step() -> None:
            model(ids, labels=ids, **arguments).loss.backward()
            model.zero_grad()

        return step

    eager, peer = step_of(new_model(), num_loops=LOOPS), gpt2().train()
    yield compare_times(
        ("training step, gradients through 8 of 12 loops", eager),
        ("GPT-2, 56 layers", step_of(peer, use_cache=False)), _few(rounds), 1.0, True, warm=rounds > 3,
    )  # fmt: skip
    peer.eval()
    compiled = new_model()
    for layer in compiled.model.layers:
        layer.compile(dynamic=False)
    step = step_of(compiled, num_loops=LOOPS)
    yield compare_times(("training step, compiled", step), ("eager", eager), _few(rounds), 1.25, True)


def shares_of_products() -> Iterator[Share]:
    model, ids = new_model(), token_ids(4, 128)

    def step() -> None:
        model(ids, labels=ids, num_loops=LOOPS).loss.backward()

    for name, function in (
        ("training step", step),
        ("prefill, 512 tokens", prefiller(looped(), token_ids(1, 512))),
        ("decode, batch 1, context 64", decoder(looped(), 1, 64)),
        ("decode, batch 8, context 64", decoder(looped(), 8, 64)),
    ):
        function()
        with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("between operators"):
            function()
        times = {event.key: event.self_cpu_time_total for event in profiler.key_averages()}
        products = sum(times.get(product, 0) for product in PRODUCTS)
        attention = times.get(ATTENTION, 0) + times.get(f"{ATTENTION}_backward", 0)
        yield Share(name, products / sum(times.values()), attention / sum(times.values()))


def growing(rounds: int) -> Iterator[Ratio]:
    """Time per layer application (head left out) as loops and text grow."""
    base = looped()

    def decode(num_loops: int, context: int) -> Callable[[], None]:
        past, ids = LoopCache(base.config), token_ids(1, context)
        with torch.inference_mode():
            base.model(ids, past_key_values=past, num_loops=num_loops)

        @torch.inference_mode()
        def run() -> None:
            for _ in range(2):
                base.model(ids[:, -1:], past_key_values=past, num_loops=num_loops)
            past.crop(-2)

        return run

    at_12 = ("12 loops", decode(LOOPS, 64))
    for loops in (1, 4, 32, 64) if rounds > 3 else (1, 64):
        work = (8 + 4 * loops, APPLICATIONS)
        yield compare_times((f"time per layer, {loops} loops", decode(loops, 64)), at_12, rounds, 1.1, work=work)
    for context in (128, 256, 500) if rounds > 3 else (500,):
        yield compare_times((f"time per layer, context {context}", decode(LOOPS, context)), ("64", at_12[1]), rounds)


MEASUREMENTS: dict[str, Callable[[int], Iterator[Ratio]]] = {
    "decode": decoding_one,
    "batches": decoding_batches,
    "prefill": prefilling,
    "rules": never_firing,
    "exits": exiting,
    "scoring": scoring,
    "training": training,
    "growth": growing,
}

# What a fresh process does; it prints seconds, or the peak of its memory in MiB.
IMPORT = "import time; s = time.perf_counter(); {module}; print(time.perf_counter() - s)"
OURS, THEIRS = (
    "from recurrent_gpt2 import RecurrentGPT2ForCausalLM as M",
    "from transformers import GPT2LMHeadModel as M",
)
LOAD = "import time; {module}; s = time.perf_counter(); M.from_pretrained({folder!r}); print(time.perf_counter() - s)"
# The kernel's own record: `getrusage` would give a child the peak of its parent.
PEAK = """
import contextlib, torch
{module}
model = M.from_pretrained({folder!r}).eval()
packed = getattr(model, "packed_weights", contextlib.nullcontext)  # as in `generate`
with torch.inference_mode(), packed():
    model(torch.zeros(1, 512, dtype=torch.long), use_cache=True, logits_to_keep=1{arguments})
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(status["VmHWM"].split()[0]) / 1024)
"""


def in_fresh_process(code: str) -> float:
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return float(output.split()[-1])


def loading(rounds: int, folder: Path) -> list[Ratio]:
    """Import and load time of fresh processes, against GPT-2 (12 layers)."""
    results = []
    for name, template, count in (("import", IMPORT, rounds), ("load", LOAD, _few(rounds))):
        pairs = []
        for _ in tqdm(range(count), desc=name, unit=" rounds"):
            ours = in_fresh_process(template.format(module=OURS, folder=str(folder / "ours")))
            pairs.append((ours, in_fresh_process(template.format(module=THEIRS, folder=str(folder / "gpt2")))))
        seconds = np.array(pairs)
        ratios, medians = seconds[:, 0] / seconds[:, 1], 1000 * np.median(seconds, axis=0)
        spread = (float(np.median(ratios)), float(ratios.min()), float(ratios.max()))
        results.append(Ratio(name, "GPT-2, 12 layers", *spread, *medians.tolist(), reach=1.1))
    return results


@dataclass
class Memory:
    """Of a text of 512 tokens."""

    what: str
    cache_bytes: int
    peak_mib: float  # of a fresh process, the weights included


def memory(folder: Path) -> list[Memory]:
    results, ids = [], token_ids(1, 512)
    for strategy in ("per_step", "last_step"):
        past = LoopCache(looped().config, strategy)
        with torch.inference_mode():
            looped()(ids, past_key_values=past, logits_to_keep=1)
        arguments = f", past_key_values=__import__('recurrent_gpt2').LoopCache(model.config, {strategy!r})"
        code = PEAK.format(module=OURS, folder=str(folder / "ours"), arguments=arguments)
        results.append(Memory(strategy, past.num_bytes(), in_fresh_process(code)))
    with torch.inference_mode():
        past = gpt2(12)(ids, use_cache=True, logits_to_keep=1).past_key_values
    in_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in past.layers)
    code = PEAK.format(module=THEIRS, folder=str(folder / "gpt2"), arguments="")
    results.append(Memory("GPT-2, 12 layers", in_bytes, in_fresh_process(code)))
    return results


@dataclass
class Findings:
    rounds: int
    machine: str = f"{platform.machine()}, {torch.get_num_threads()} threads"
    torch_version: str = torch.__version__
    ratios: list[Ratio] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)

    def write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(self), indent=1) + "\n")


def measure(found: Findings, names: list[str]) -> Iterator[None]:
    """Adds to the findings, with a pause after each addition."""
    with looped().packed_weights():  # as in `generate`
        for name in (name for name in MEASUREMENTS if name in names):
            for ratio in MEASUREMENTS[name](found.rounds):
                found.ratios.append(ratio)
                yield
            gc.collect()
        for share in shares_of_products() if "shares" in names else ():
            found.shares.append(share)
            yield
    if "loading" in names:
        with tempfile.TemporaryDirectory() as temporary:
            looped().save_pretrained(f"{temporary}/ours")
            gpt2(12).save_pretrained(f"{temporary}/gpt2")
            found.ratios += loading(found.rounds, Path(temporary))
            yield
            found.memory += memory(Path(temporary))
            yield


def print_tables(found: Findings) -> None:
    table = Table("measured", "against", "ratio", "range", "reach", "", "ms", "ms against")
    marks = {None: "", True: "reached", False: "missed"}
    for r in found.ratios:
        table.add_row(
            r.what, r.against, f"{r.ratio:.3f}", f"{r.lowest:.3f}-{r.highest:.3f}", r.goal, marks[r.is_reached],
            f"{r.milliseconds:.1f}", f"{r.milliseconds_against:.1f}",
        )  # fmt: skip
    console = Console(width=160)
    console.print(table)
    if found.shares:
        table = Table("share of time", "in matrix products", "in attention")
        for share in found.shares:
            table.add_row(share.what, f"{share.products:.0%}", f"{share.attention:.0%}")
        console.print(table)
    if found.memory:
        table = Table("512 tokens", "bytes of the cache", "peak MiB of the process")
        for m in found.memory:
            table.add_row(m.what, f"{m.cache_bytes:,}", f"{m.peak_mib:.0f}")
        console.print(table)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*MEASUREMENTS, "shares", "loading"]
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="three rounds, one of what takes long, no profiles")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--output", type=Path, help="write the ratios to this JSON file too")
    options = parser.parse_args(arguments)
    found = Findings(rounds=3 if options.quick else options.rounds)
    try:
        for _ in measure(found, options.only or [name for name in names if not options.quick or name != "shares"]):
            if options.output is not None:  # nothing is lost if it is stopped
                found.write(options.output)
    finally:
        print_tables(found)


if __name__ == "__main__":
    main()
