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
from functools import cache
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode
from tqdm.auto import tqdm
from transformers import Cache, DynamicCache, GPT2Config, GPT2LMHeadModel

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

LOOPS = 12
APPLICATIONS = 56  # of layers: 8 that are not looped, and 4 that are
SECONDS, QUICK_SECONDS = 20.0, 2.0  # of rounds, for a measurement; those whose rounds take long get more
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
) -> Ratio:
    """`work`: units of work that a call of either does, where they differ; times are per unit."""
    times = timed_rounds(what[0], [what[1], against[1]], seconds)
    return ratio_of(what[0], against[0], times, reach, is_speed, work)


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
) -> Ratio:
    """`times`: seconds that either took in each round, [rounds, 2]."""
    pairs = times * 1000 / np.array(work)
    ratios = pairs[:, 1] / pairs[:, 0] if is_speed else pairs[:, 0] / pairs[:, 1]
    return Ratio(
        what, against, float(np.median(ratios)), float(ratios.min()), float(ratios.max()),
        float(np.median(pairs[:, 0])), float(np.median(pairs[:, 1])), len(pairs), reach, is_speed,
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


@cache
def looped() -> RecurrentGPT2ForCausalLM:
    return copy.deepcopy(naive()).optimize_for_inference()


@cache
def gpt2(layers: int = APPLICATIONS) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}  # as ours
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_positions=512, use_cache=True, **no_dropout)).eval()


def token_ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 50257, (batch, length), generator=torch.Generator().manual_seed(batch + length))


@cache
def context_cache(model, batch: int, context: int) -> Cache:
    """A context that has been read. What decodes after it leaves it as it was."""
    past = LoopCache(model.config) if isinstance(model, RecurrentGPT2ForCausalLM) else DynamicCache(config=model.config)
    with torch.inference_mode():
        model(token_ids(batch, context), past_key_values=past, use_cache=True, logits_to_keep=1)
    return past


def decoder(model, batch: int, context: int, tokens: int = 1, **arguments) -> Callable[[], None]:
    """Decodes `tokens` tokens after a context that is in the cache before the clock starts."""
    past, first = context_cache(model, batch, context), token_ids(batch, context)[:, -1:]

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
    is_quick, compiled, matrix = seconds <= QUICK_SECONDS, copy.deepcopy(naive()), torch.randn(2048, 2048)
    for layer in compiled.model.layers:
        layer.compile(dynamic=False)
    eager, peer = training_step(naive(), num_loops=LOOPS), training_step(gpt2())
    fused = training_step(compiled, num_loops=LOOPS)
    fused()  # compiles
    if is_quick:  # a first round that does not count would take too long
        training_step(naive(), 1, 16, num_loops=LOOPS)()
        training_step(gpt2(), 1, 16)()

    def multiply() -> None:
        for _ in range(16):
            matrix @ matrix

    functions = [eager, peer, fused, multiply]
    times = timed_rounds("training step", functions, 6 * seconds, warm=not is_quick)  # a round takes long
    yield ratio_of("training step, gradients through 8 of 12 loops", "GPT-2, 56 layers", times[:, [0, 1]], 1.0, True)
    yield ratio_of("training step, compiled", "eager", times[:, [2, 0]], 1.25, True)
    if not is_quick:  # counting takes another step
        with FlopCounterMode(display=False) as counter:
            eager()
        work = (counter.get_total_flops() / 1e9, 16 * 2 * 2048**3 / 1e9)
        yield ratio_of("training step, per GFLOP", "product of 2048 x 2048", times[:, [0, 3]], work=work)


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

import torch
if hasattr(model, "optimize_for_inference"):
    model.optimize_for_inference()
with torch.inference_mode():
    past = model(torch.zeros(1, 512, dtype=torch.long), use_cache=True, logits_to_keep=1).past_key_values
slots = [slot for layer in past.layers for slot in getattr(layer, "slots", [layer])]
# The kernel's own record: `getrusage` would give a child the peak of its parent.
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({{
    "import": imported - started,
    "load": loaded - imported,
    "peak_mib": int(status["VmHWM"].split()[0]) / 1024,
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
    peak_mib: float  # of a fresh process, the weights included


def in_fresh_process(module: str, folder: Path) -> dict[str, float]:
    code = FRESH.format(module=module, folder=str(folder))
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
    memory = [
        Memory(name, int(runs[0]["cache_bytes"]), float(np.median([run["peak_mib"] for run in runs])))
        for name, runs in found.items()
    ]
    return ratios, memory


@dataclass
class Findings:
    seconds: float  # of rounds, for each measurement
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
    for name in (name for name in MEASUREMENTS if name in names):
        for ratio in MEASUREMENTS[name](found.seconds):
            found.ratios.append(ratio)
            yield
        gc.collect()
    for share in shares_of_products() if "shares" in names else ():
        found.shares.append(share)
        yield
    if "loading" in names:
        with tempfile.TemporaryDirectory() as temporary:
            folders = {name: Path(temporary, name) for name in (*CACHE_STRATEGIES, "GPT-2, 12 layers")}
            for strategy in CACHE_STRATEGIES:
                naive().config.cache_strategy = strategy
                naive().save_pretrained(folders[strategy])
            gpt2(12).save_pretrained(folders["GPT-2, 12 layers"])
            ratios, found.memory = loading(2 if found.seconds <= QUICK_SECONDS else 9, folders)
            found.ratios += ratios
            yield


def print_tables(found: Findings) -> None:
    table = Table("measured", "against", "ratio", "range", "rounds", "reach", "", "ms", "ms against")
    marks = {None: "", True: "reached", False: "missed"}
    for r in found.ratios:
        table.add_row(
            r.what, r.against, f"{r.ratio:.3f}", f"{r.lowest:.3f}-{r.highest:.3f}", str(r.rounds), r.goal,
            marks[r.is_reached], f"{r.milliseconds:.1f}", f"{r.milliseconds_against:.1f}",
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
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of rounds, for each measurement")
    parser.add_argument("--quick", action="store_true", help="two seconds each, fewer points, no profiles")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--output", type=Path, help="write the ratios to this JSON file too")
    options = parser.parse_args(arguments)
    found = Findings(seconds=QUICK_SECONDS if options.quick else options.seconds)
    try:
        for _ in measure(found, options.only or [name for name in names if not options.quick or name != "shares"]):
            if options.output is not None:  # nothing is lost if it is stopped
                found.write(options.output)
    finally:
        print_tables(found)


if __name__ == "__main__":
    main()
