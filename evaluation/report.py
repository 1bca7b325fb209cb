"""Everything about a checkpoint on one page: `python -m evaluation.report CHECKPOINT_OR_RUN --output DIR`.

Sweeps the exit rules (on several texts and with several seeds, if asked to), finds the setting to advise, measures the
geometry of the loops, decodes with the small cache, looks at slow and fast tokens and writes samples; then draws the
figures, checks the paper's claims, and writes

- `report.html`: one page that needs nothing else, to open in a browser;
- `report.md`: the same in Markdown, beside `figures/`;
- `report.json`: all numbers; `results.json` and `tradeoff.png`: what a model card is made from.

A seed has its own start noise and its own blocks of text. The sweeps, which take most of the time, are written as they
go: a report that was interrupted goes on with them where it stopped.
"""

import argparse
import base64
import json
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
import transformers
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from recurrent_gpt2 import RecurrentGPT2ForCausalLM
from training.data import Source

from .advice import advice_line, advice_rows, advice_text, advise, time_advice
from .common import describe_loops, held_out_documents, load_checkpoint, loops_of_generate, spread_blocks
from .exit_tradeoff import (
    CAP,
    FIXED_DEPTHS,
    SWEEPS,
    Result,
    Setting,
    cap_of,
    card_rows,
    compare,
    describe_default,
    make_settings,
    measure_times,
    pool,
    recommended,
    run_sweep,
    score_loops,
)
from .figures import (
    PAPER_RULES,
    cosines_above_floor,
    draw_figures,
    name_of_group,
    read_geometry,
    read_report,
    read_sources,
)
from .observations import (
    CacheCost,
    Sample,
    continue_blocks,
    depth_headroom,
    last_step_cost,
    measure_geometry,
    token_depths,
)
from .pictures import STYLE, draw_followed
from .study.claims import check_claims, gain_of_loops
from .token_path import follow_two
from .trajectories import write_trajectories

CAPTIONS = {
    "training": "Losses over training; tasks beside text, where there are any, by the share of right answers",
    "trajectory": "Paths of two tokens through the model, on two principal components of all states (paper, fig. 1)",
    "drift": "Drift-to-loop ratio over training (paper, fig. 2); bands are one standard deviation over tokens",
    "loop_dynamics": "Step norms and cosines (paper, fig. 3); bands are the 10th to the 90th percentile of tokens",
    "exit_policies": "Latency and quality against the threshold (paper, fig. 4), beside fixed depth",
    "cosines": "Cosines of consecutive steps over training (paper, fig. 5)",
    "fair_comparison": "Quality against cost: rules beside fixed depth, from two loops on",
    "against_fixed": "Each rule minus fixed depth at the same mean steps; below zero it is better (95 % intervals)",
}


@dataclass
class Settings:
    """How much is measured."""

    sources: list[str]
    output: Path
    validation_fraction: float = 0.01
    rules: tuple[str, ...] = tuple(SWEEPS)
    thresholds: list[float] | None = None
    cap: int | None = None  # None: that of the checkpoint
    depths: Sequence[int] = FIXED_DEPTHS
    blocks: int = 16  # of each source and seed
    block_size: int | None = None
    seeds: int = 1
    rounds: int = 3  # of measuring times
    geometry_loops: int = 30
    samples: int = 4


@dataclass
class Table:
    title: str
    header: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


@dataclass
class Section:
    title: str
    text: str = ""
    code: str = ""  # to copy
    tables: list[Table] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)  # names
    samples: list[Sample] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)  # HTML, for the page

    @property
    def anchor(self) -> str:
        """As GitHub makes it of a heading."""
        return re.sub(r"[^\w\- ]", "", self.title.lower()).replace(" ", "-")


def name_of_source(path: str) -> str:
    """`webtext/validation.parquet` -> `webtext-validation`."""
    parts = Path(path).with_suffix("").parts
    return "-".join(parts[-2:]) if len(parts) > 1 else parts[0]


def use_seed(model: RecurrentGPT2ForCausalLM, seed: int) -> None:
    """Gives the model the start noise of another seed."""
    model.config.noise_seed = seed
    model.model.start_noise.copy_(model.model.make_start_noise())


def blocks_by_seed(source: str, tokenizer, settings: Settings, block_size: int) -> list[torch.Tensor]:
    """As many blocks for every seed, none of them twice."""
    # Of a file, all is taken to be held out; Python's documentation is split as it was for training.
    fraction = settings.validation_fraction if source == "python-docs" else None
    documents = held_out_documents(Source(source), fraction)
    blocks = spread_blocks(documents, tokenizer, block_size, settings.blocks * settings.seeds)
    if len(blocks) < settings.seeds:
        raise ValueError(f"{source} has {len(blocks)} block(s) of {block_size} tokens, too few for the seeds.")
    each = len(blocks) // settings.seeds
    return [blocks[seed :: settings.seeds][:each] for seed in range(settings.seeds)]


def sweep(
    model, every_seed: list[torch.Tensor], source: str, settings: Settings, rules: tuple[str, ...]
) -> list[list[Result]]:
    """Results of every seed, on its blocks of the source."""
    own_seed = model.config.noise_seed
    cap = cap_of(model) if settings.cap is None else settings.cap
    points = make_settings(list(rules), cap, thresholds=settings.thresholds, depths=settings.depths)
    folder, repetitions = folder_of(settings, source), []
    for seed, blocks in enumerate(every_seed):
        use_seed(model, own_seed + seed)
        repetitions.append(run_sweep(model, blocks, points, folder / f"seed-{seed}"))
        if seed == 0 and source == settings.sources[0] and settings.rounds > 0:
            prompts = blocks[:8, : blocks.shape[1] // 4]
            sizes = (1, len(prompts)) if len(prompts) > 1 else (1,)
            fast, _ = load_checkpoint(model.name_or_path, optimize=True)
            measure_times(fast, prompts, repetitions[0], folder / "times.jsonl", sizes, rounds=settings.rounds)
    use_seed(model, own_seed)
    return repetitions


def folder_of(settings: Settings, source: str) -> Path:
    return settings.output / "tradeoff" / name_of_source(source)


def advised(checkpoint: str, model, tokenizer, blocks: torch.Tensor, results: list[Result], settings: Settings):
    """The advice, measured on the blocks of the first source, and timed if anything is."""
    cap = cap_of(model) if settings.cap is None else settings.cap
    advice = advise(checkpoint, model, tokenizer, blocks, results, cap)
    if settings.rounds > 0:
        fast, _ = load_checkpoint(model.name_or_path, optimize=True)
        file = folder_of(settings, settings.sources[0]) / "advice_times.jsonl"
        time_advice(fast, blocks[:2, : blocks.shape[1] // 4], advice, file, settings.rounds)
    return advice


def measure(checkpoint: str, settings: Settings) -> dict[str, Any]:
    """All numbers of the report, JSON-able."""
    model, tokenizer = load_checkpoint(checkpoint)
    block_size = settings.block_size or model.config.max_position_embeddings
    first = settings.sources[0]
    # The first source is swept with all rules and timed; the others with the paper's.
    few = tuple(rule for rule in settings.rules if rule in PAPER_RULES)
    texts = {source: blocks_by_seed(source, tokenizer, settings, block_size) for source in settings.sources}
    sweeps = {
        source: sweep(model, texts[source], source, settings, settings.rules if source == first else few)
        for source in settings.sources
    }
    results, every_seed = pool(sweeps[first]), texts[first]
    blocks = every_seed[0]
    loops = loops_to_show(model, results, settings.cap)
    recorded = Path(checkpoint) / "geometry.jsonl"
    history = read_geometry(recorded) if recorded.exists() else []
    geometry = measure_geometry(model, blocks, settings.geometry_loops)
    write_trajectories(
        checkpoint, tokenizer.decode(blocks[0]), settings.output / "trajectories", settings.geometry_loops, 64
    )
    depths = token_depths(model, tokenizer, torch.cat(every_seed), **loops)
    return {
        "checkpoint": Path(checkpoint).resolve().name if Path(checkpoint).exists() else checkpoint,
        "parameters": model.num_parameters(),
        "groups": model.config.loop_groups,
        "num_loops": model.config.num_loops,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "block_size": block_size,
        "blocks": len(blocks),
        "seeds": settings.seeds,
        "cap": cap_of(model) if settings.cap is None else settings.cap,
        "policy": loops["exit_policy"],
        "advice": advised(checkpoint, model, tokenizer, torch.cat(every_seed), results, settings),
        "tasks": getattr(model.config, "tasks", None) or [],
        "training": read_training(checkpoint),
        "loops": describe_loops(**loops),  # of what is not a sweep: tokens, samples, caches
        "default": score_loops(model, torch.cat(every_seed), **loops_of_generate(model)),
        "sources": [
            {"name": name_of_source(source), "results": [[json.loads(r.to_json()) for r in part] for part in parts]}
            for source, parts in sweeps.items()
        ],
        "geometry": geometry,
        "geometry_over_training": history,
        "headroom": depth_headroom(model, blocks),
        "followed": follow_two(model, tokenizer, blocks[0], **loops),
        "mixture": read_mixture(checkpoint),
        "claims": [asdict(claim) for claim in check_claims(geometry, history, results, model.config.state_init)],
        "cache": asdict(last_step_cost(model, blocks[:8], **loops)),
        "tokens": {"fastest": [asdict(d) for d in depths[:10]], "slowest": [asdict(d) for d in depths[:-11:-1]]},
        "samples": [
            asdict(sample) for sample in continue_blocks(model, tokenizer, blocks[: settings.samples], **loops)
        ],
    }


def read_training(checkpoint: str) -> list[dict[str, float]]:
    """The trainer's log beside the weights, if it is there."""
    file = Path(checkpoint) / "trainer_state.json"
    return json.loads(file.read_text())["log_history"] if file.exists() else []


def read_mixture(checkpoint: str) -> dict[str, Any] | None:
    """What `evaluation.mixture` has measured of this checkpoint, if its file is beside the weights."""
    file = Path(checkpoint) / "mixture.json"
    return json.loads(file.read_text()) if file.exists() else None


def loops_to_show(model: RecurrentGPT2ForCausalLM, results: list[Result], cap: int | None) -> dict[str, Any]:
    """What `generate` does by the checkpoint's own exit policy, or would do by the cheapest rule (in FLOPs) that costs
    no quality, with the cap given, or that of the checkpoint."""
    own = loops_of_generate(model, num_loops=cap)
    rules = [result for rule, result in recommended(results).items() if rule != "fixed"]
    if own["exit_policy"] is not None or not rules:
        return own
    cheapest = min(rules, key=lambda result: result.flops_per_token).setting
    return loops_of_generate(model, cheapest.exit_policy, cheapest.num_loops)


Figures = dict[str, Path]  # those that were drawn, by name


def sections_of(report: dict[str, Any], figures: Figures) -> list[Section]:
    return [section for make in SECTIONS for section in make(report, figures)]


def drawn(figures: Figures, *names: str) -> list[str]:
    return [name for name in names if name in figures]


def first_source(report: dict[str, Any]) -> tuple[str, list[Result]]:
    """Name and results of the text that everything was measured on."""
    name, repetitions = next(iter(read_sources(report).items()))
    return name, pool(repetitions)


def advice_section(report: dict[str, Any], figures: Figures) -> list[Section]:
    if not (advice := report.get("advice")):  # as in older reports
        return []
    text = report["sources"][0]["name"]
    header = ["", "measure", "full depth", "with it", "difference", "mean steps (per group)", "MFLOP/token"]
    table = Table("What it costs, and what it saves", header, advice_rows(advice, text))
    return [Section("Advice", advice_text(advice, text), advice_line(advice), [table])]


def training_section(report: dict[str, Any], figures: Figures) -> list[Section]:
    if "training" not in figures:
        return []
    last = max(entry["step"] for entry in report["training"])
    return [Section("Training", f"{last:,} steps.", figures=["training"])]


def exits_section(report: dict[str, Any], figures: Figures) -> list[Section]:
    name, results = first_source(report)
    text = "Two rules at the same threshold stop at different depths. The fair comparison is at the same cost. "
    if "default" in report:
        text += f"On {name}, {describe_default(report['default'])}."
    tables = [steps_table(report), rules_table(read_sources(report)), tradeoff_table(results)]
    shown = drawn(figures, "fair_comparison", "against_fixed", "exit_policies")
    return [Section("Exit rules", text, tables=tables, figures=shown)]


def samples_section(report: dict[str, Any], figures: Figures) -> list[Section]:
    text = "Continuations of the first blocks of held-out text, at temperature 0.8 (top-p 0.95), none left out, under "
    samples = [Sample(**sample) for sample in report["samples"]]
    return [Section("Samples", f"{text}{report['loops']}.", samples=samples)]


def claims_section(report: dict[str, Any], figures: Figures) -> list[Section]:
    name, results = first_source(report)
    tokens, gain = report["blocks"] * report["block_size"] * report["seeds"], gain_of_loops(results)
    gained = "" if gain is None else f" All loops together gain {gain:.3f} nats over a single one on {name}."
    text = (
        f"Measured on {name}, {tokens:,} tokens in all, {report['seeds']} seed(s), at most {report['cap']} loops; "
        f"times on {report['machine']}.{gained}"
    )
    return [Section("The paper's claims", text, tables=[claims_table(report)])]


def loops_section(report: dict[str, Any], figures: Figures) -> list[Section]:
    text = f"At {len(report['geometry']['groups'][0]['step_norm']['mean'])} fixed loops on held-out text."
    shown = drawn(figures, "trajectory", "loop_dynamics", "cosines", "drift")
    return [Section("The loops", text, tables=[geometry_table(report)], figures=shown)]


def followed_section(report: dict[str, Any], figures: Figures) -> list[Section]:
    if not (followed := report.get("followed")):  # as in older reports
        return []
    text = (
        "The tokens of the first block with the fewest and the most loops: their states on two principal components, "
        f"their steps, and what they would say after every loop, under {report['loops']}. `make explore` shows any "
        "token so."
    )
    return [Section("Two tokens, loop by loop", text, tables=[lens_rows(token) for token in followed],
                    pictures=[draw_followed(token) for token in followed])]  # fmt: skip


def lens_rows(token: dict[str, Any]) -> Table:
    """The likeliest tokens after every loop step."""
    steps: dict[tuple[int, int], list[str]] = {}
    columns = (token["lens"][name] for name in ("group", "step", "token", "probability"))
    for group, step, said, probability in zip(*columns, strict=True):
        cell = f"`` {json.dumps(said, ensure_ascii=False)} `` {probability:.2f}"
        steps.setdefault((group, step), []).append(cell)
    took = token["path"]["steps"]
    rows = [[str(group), f"{step}" if step <= took[group] else f"({step})", *cells]
            for (group, step), cells in steps.items()]  # fmt: skip
    ranks = [f"{rank}." for rank in range(1, len(rows[0]) - 1)]
    before, said = (f"`` {json.dumps(token[name], ensure_ascii=False)} ``" for name in ("before", "said"))
    return Table(f"Said at {before}, where {said} came (in brackets: not taken)", ["group", "loop", *ranks], rows)


def headroom_section(report: dict[str, Any], figures: Figures) -> list[Section]:
    name = report["sources"][0]["name"]
    text = f"Each token at the depth that is best for it: the room that any exit rule has on {name}."
    return [Section("What a perfect choice could gain", text, tables=[headroom_table(report)])]


def depth_section(report: dict[str, Any], figures: Figures) -> list[Section]:
    tables = [depth_table(read_sources(report))]
    return [Section("Loops beyond those trained", "Cross-entropy at fixed depth.", tables=tables)]


def cache_section(report: dict[str, Any], figures: Figures) -> list[Section]:
    text = f"`last_step` keeps one slot a layer, not one a loop step. Under {report['loops']}."
    return [Section("The small cache", text, tables=[cache_table(report)])]


def tokens_section(report: dict[str, Any], figures: Figures) -> list[Section]:
    tables = [token_table(report, kind) for kind in ("slowest", "fastest")]
    return [Section("Slow and fast tokens", f"Token types by mean steps under {report['loops']}.", tables=tables)]


def claims_table(report: dict[str, Any]) -> Table:
    rows = [[c["claim"], c["paper"], c["measured"], f"**{c['verdict']}**"] for c in report["claims"]]
    return Table("Claims", ["claim", "paper", "here", "verdict"], rows)


def geometry_table(report: dict[str, Any]) -> Table:
    """Mean step norms and cosines at some steps."""
    line, rows = report["geometry"], []
    shown = [k for k in (1, 2, 3, 5, 8, 12, 20, 29) if k < len(line["groups"][0]["step_norm"]["mean"])]
    for layers, group in zip(report["groups"], line["groups"], strict=True):
        norms, cosines = group["step_norm"]["mean"], cosines_above_floor(group)
        rows.append([f"layers {layers}", "step norm", *(f"{norms[k]:.3g}" for k in shown)])
        rows.append(["", "cosine", *("" if np.isnan(cosines[k - 1]) else f"{cosines[k - 1]:+.2f}" for k in shown)])
        rows.append(["", "kappa", *(f"{norms[k] / norms[k - 1]:.2f}" for k in shown)])
    return Table("Steps (kappa: a step's norm over the one before)", ["group", "", *(f"k = {k}" for k in shown)], rows)


def headroom_table(report: dict[str, Any]) -> Table:
    """Divergence from full depth of fixed depths, and of each token's best at as many mean steps."""
    found = report["headroom"]
    depths = np.arange(1, found["most"] + 1)
    rows = []
    for point in found["chosen"]:
        fixed = float(np.interp(point["mean_steps"], depths, found["fixed"]))
        if 1.2 < point["mean_steps"] < found["most"] / 2:
            rows.append([f"{point['mean_steps']:.2f}", f"{fixed:.4f}", f"{point['kl']:.4f}"])
    return Table(
        f"KL divergence from {found['most']} loops, in nats",
        ["mean steps", "fixed depth", "best depth of each token"],
        rows,
    )


def mixture_section(report: dict[str, Any], figures: Figures | None = None) -> list[Section]:
    found = report.get("mixture")
    if not found:
        return []
    cells = ("mean_steps", "loss", "text_loss", "task_loss", "task_accuracy")
    header = ["", "mean steps", "text and answers", "text", "answers", "answers right"]
    fixed = [
        [
            f"{row['num_loops'][0] if len(set(row['num_loops'])) == 1 else row['num_loops']} fixed loops",
            f"{row['mean_steps']:.2f}",
            *(f"{row[name]:.4f}" for name in cells[1:]),
        ]
        for row in found["fixed"]
    ]
    rules = [
        [
            f"{row['rule']} {row['threshold']:g}",
            f"{row['mean_steps']:.2f} ({row['text_steps']:.2f}, {row['task_steps']:.2f})",
            *(f"{row[name]:.4f}" for name in cells[1:]),
            f"{row['difference']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]",
        ]
        for row in found["rules"]
    ]
    beside = [
        [
            f"{rule} {row['threshold']:g}",
            f"{row['mean_steps']:.2f}",
            f"{row['loss']:.4f}",
            f"{row['fixed_loss']:.4f}",
            f"{row['by_kind_loss']:.4f}",
            f"{row['shuffled_loss']:.4f}",
            f"{row['shuffled_within_kinds_loss']:.4f}",
            f"{row['task_accuracy']:.4f}",
            f"{row['text_against_fixed']:+.4f}",
        ]
        for rule, row in found["chosen"].items()
        if row is not None
    ]
    task = found["task"]["task"]
    return [Section(
        f"Text and {task} in one model",
        f"Held-out {found['source']} ({found['text_tokens']:,} tokens) and new {task} ({found['answers']:,} answers); "
        "the loss is over all of both, mean steps are over all tokens (in brackets: text, task). Rules "
        f"have at most {found['cap']} loops. Intervals are over blocks and sequences.",
        tables=[
            Table("Thresholds chosen on other text and sequences, beside what they must be ahead of",
                  ["rule", "mean steps", "loss", "fixed depth", "a depth for each kind", "its steps shuffled",
                   "shuffled within kinds", "answers right", "text against fixed depth"], beside),
            Table("Fixed loops", header, fixed),
            Table("All thresholds", [*header, "against fixed depth [95 %]"], rules),
            follows_table(found),
        ],
    )]  # fmt: skip


def follows_table(mixture: dict[str, Any]) -> Table:
    """What the steps of a rule follow: the loops that an answer needs, the place in the text, the token."""
    chosen = {rule: row for rule, row in mixture["chosen"].items() if row is not None}
    needed = range(max((len(row["steps_by_required"]) for row in chosen.values()), default=0))
    rows = []
    for rule, row in chosen.items():
        slowest = ", ".join(
            f"{json.dumps(token['token'], ensure_ascii=False)} {token['mean_steps']:.2f}"
            for token in row.get("slowest_text", [])[:3]
        )
        steps = dict(enumerate(row["steps_by_required"]))
        rows.append([
            f"{rule} {row['threshold']:g}",
            *("" if steps.get(depth) is None else f"{steps[depth]:.1f}" for depth in needed),
            *("-" if row[name] is None else f"{row[name]:.2f}"
              for name in ("correlation_with_required", "correlation_with_position")),
            slowest,
        ])  # fmt: skip
    header = ["rule", *(f"needs {depth}" for depth in needed), "rank corr.", "with place in text", "slowest in text"]
    return Table("Mean steps of answers by the loops they need, and of text", header, rows)


def steps_table(report: dict[str, Any]) -> Table:
    """The steps of every group, at each rule's cheapest setting that costs no quality."""
    _, results = first_source(report)
    best: dict[str, Result] = {}  # of a rule that always costs something
    for result in results:
        known = best.setdefault(result.setting.rule, result)
        best[result.setting.rule] = min(known, result, key=lambda result: result.cross_entropy)
    shown = best | recommended(results)
    rows = [
        [rule, _setting(result), *(f"{mean:.2f} ({std:.2f})" for mean, std in zip(
            result.mean_steps, result.std_steps, strict=True)), f"{result.cross_entropy:.4f}"]
        for rule, result in shown.items()
    ]  # fmt: skip
    title = "Steps of each group (deviation over tokens), at the cheapest setting that costs no more than 0.01 nats"
    groups = [name_of_group(layers, group) for group, layers in enumerate(report["groups"])]
    return Table(title, ["rule", "threshold", *groups, "cross-entropy"], rows)


def rules_table(sources: dict[str, list[list[Result]]]) -> Table:
    """Each rule's cheapest setting that costs no quality, on every source."""
    rows = []
    for name, repetitions in sources.items():
        results = pool(repetitions)
        against = {comparison.setting: comparison for comparison in compare(results)}
        for rule, result in recommended(results).items():
            comparison = against.get(result.setting)
            difference = "" if comparison is None else (
                f"{comparison.difference:+.4f} [{comparison.low:+.4f}, {comparison.high:+.4f}]"
            )  # fmt: skip
            rows.append([name, rule, _setting(result), f"{result.mean_depth:.2f}", _seeds(repetitions, result.setting),
                         difference, _time(result)])  # fmt: skip
    return Table(
        "The cheapest setting of each rule within 0.01 nats of the best fixed depth",
        ["text", "rule", "threshold", "mean steps", "cross-entropy (seeds)", "against fixed depth [95 %]", "ms/token"],
        rows,
    )


def tradeoff_table(results: list[Result]) -> Table:
    rows = [
        [result.setting.rule, _setting(result), f"{result.mean_depth:.2f}", f"{result.cross_entropy:.4f}",
         f"{result.perplexity:.2f}", f"{result.flops_per_token / 1e6:.1f}", _time(result)]
        for result in results
    ]  # fmt: skip
    header = [
        "rule",
        "threshold",
        "mean steps",
        "cross-entropy",
        "perplexity",
        "MFLOP/token",
        "ms/token (batch 1; several)",
    ]
    return Table("All settings", header, rows)


def depth_table(sources: dict[str, list[list[Result]]]) -> Table:
    """Rows are texts, columns are depths; means over seeds with the seeds' range."""
    depths = [r.setting for r in next(iter(sources.values()))[0] if r.setting.rule == "fixed"]
    rows = [[name, *(_seeds(parts, setting) for setting in depths)] for name, parts in sources.items()]
    return Table("Fixed depth", ["text", *(str(setting.num_loops) for setting in depths)], rows)


def cache_table(report: dict[str, Any]) -> Table:
    cost = CacheCost(**report["cache"])
    rows = [
        ["per_step", f"{cost.per_step_loss:.4f}", f"{cost.per_step_bytes:,}"],
        ["last_step", f"{cost.last_step_loss:.4f}", f"{cost.last_step_bytes:,}"],
    ]
    return Table("Caches", ["cache", "cross-entropy", f"bytes at {cost.tokens} tokens"], rows)


def token_table(report: dict[str, Any], kind: str) -> Table:
    rows = [[f"`` {json.dumps(t['token'], ensure_ascii=False)} ``", str(t["count"]), f"{t['mean_steps']:.2f}"]
            for t in report["tokens"][kind]]  # fmt: skip
    return Table(f"The {kind}", ["token", "occurrences", "mean steps"], rows)


def samples_table(report: dict[str, Any]) -> Table:
    def flat(text: str) -> str:
        return re.sub(r"([\\`*_\[\]<>])", r"\\\1", " ".join(text.split()))  # as Markdown

    rows = [[flat(s["prompt"]), flat("".join(s["tokens"])), f"{sum(s['steps']) / len(s['steps']):.2f}"]
            for s in report["samples"]]  # fmt: skip
    return Table("Samples", ["prompt (held-out text)", "continuation", "mean steps"], rows)


def _setting(result: Result) -> str:
    policy = result.setting.exit_policy
    return f"{result.setting.num_loops} loops" if policy is None else f"{policy['threshold']:g}"


def _seeds(repetitions: list[list[Result]], setting: Setting) -> str:
    """Mean over seeds, and their range where there are several."""
    losses = [r.cross_entropy for part in repetitions for r in part if r.setting == setting]
    mean = sum(losses) / len(losses)
    return f"{mean:.4f}" if len(losses) == 1 else f"{mean:.4f} ({min(losses):.4f}-{max(losses):.4f})"


def _time(result: Result) -> str:
    return ", ".join(f"{ms:.1f}" for ms in result.ms_per_token.values())


# The page, from top to bottom. A section is a function of the numbers in report.json and of the figures that were
# drawn; it returns a list, empty where there is nothing to show.
SECTIONS: list[Callable[[dict[str, Any], Figures], list[Section]]] = [
    advice_section,
    training_section,
    exits_section,
    samples_section,
    claims_section,
    mixture_section,
    loops_section,
    followed_section,
    headroom_section,
    depth_section,
    cache_section,
    tokens_section,
]


def inline(text: str) -> Markup:
    """Bold and code of Markdown, as HTML."""
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", marked))


def write_report(report: dict[str, Any], output: Path) -> Path:
    """Figures and pages from the numbers (and the trajectories beside them)."""
    matplotlib.use("Agg")
    measured = read_report(output)
    results, figures = measured["results"], draw_figures(output / "figures", **measured)
    sections = sections_of(report, figures)
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True)
    environment.filters["inline"] = inline
    environment.filters["code"] = lambda cell: cell.removeprefix("`` ").removesuffix(" ``")
    images = {name: path.read_bytes() for name, path in figures.items()}
    most = max((step for sample in report["samples"] for step in sample["steps"]), default=1)
    values = {
        "report": report,
        "sections": sections,
        "style": STYLE,
        "leading": 1 if report.get("advice") else 0,  # sections before the table of contents
        "captions": CAPTIONS,
        "images": {name: base64.b64encode(image).decode() for name, image in images.items()},
        "widths": {name: int.from_bytes(image[16:20]) for name, image in images.items()},  # as PNG has it
        "most": most,
        "legend": np.unique(np.linspace(1, np.ceil(most), 6).round().astype(int)).tolist(),
    }
    page = output / "report.html"
    page.write_text(environment.get_template("report.html").render(values), encoding="utf-8")
    text = Environment(loader=environment.loader, trim_blocks=True, autoescape=False)
    (output / "report.md").write_text(text.get_template("report.md").render(values), encoding="utf-8")
    rows = card_rows(list(recommended(results).values()), report["sources"][0]["name"])
    (output / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
    (output / "tradeoff.png").write_bytes(figures["fair_comparison"].read_bytes())
    return page


def make_report(checkpoint: str, settings: Settings) -> Path:
    names = [name_of_source(source) for source in settings.sources]
    if len(set(names)) < len(names):
        raise ValueError(f"`--source` has two texts of the same name: {', '.join(names)}.")
    settings.output.mkdir(parents=True, exist_ok=True)
    report = measure(checkpoint, settings)
    (settings.output / "report.json").write_text(json.dumps(report) + "\n")
    return write_report(report, settings.output)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder of a checkpoint or a training run, or name on the Hub")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--source", nargs="+", default=["python-docs"], dest="sources", help="held-out text; files, or python-docs"
    )
    parser.add_argument(
        "--validation_fraction", type=float, default=0.01, help="share of python-docs that training held out"
    )
    parser.add_argument("--rules", nargs="+", default=list(SWEEPS), help=f"among {', '.join(SWEEPS)}")
    parser.add_argument("--thresholds", nargs="+", type=float, help="instead of each rule's own")
    parser.add_argument(
        "--num_loops", type=int, help=f"the cap; the checkpoint's when left out, or {CAP} if it has none"
    )
    parser.add_argument(
        "--depths", nargs="+", type=int, default=list(FIXED_DEPTHS), help="fixed depths beside the rules"
    )
    parser.add_argument("--blocks", type=int, default=16, help="blocks of each text and seed")
    parser.add_argument("--block_size", type=int, help="tokens of a block; the model's positions when left out")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="of measuring times; 0: none")
    parser.add_argument("--samples", type=int, default=4)
    options = vars(parser.parse_args(arguments))
    checkpoint, options["cap"] = options.pop("checkpoint"), options.pop("num_loops")
    page = make_report(checkpoint, Settings(**{**options, "rules": tuple(options["rules"])}))
    print(f"wrote {page}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
