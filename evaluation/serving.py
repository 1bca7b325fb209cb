"""Tokens per second of a checkpoint in vLLM and in `generate`, with and without exits, for several requests at once.

    .venv-serve/bin/python -m evaluation.serving CHECKPOINT --output docs/serving.json

It runs where vLLM is installed (`make bench-serve`). There are two kinds of work. `text`: the model goes on with texts
that it wrote itself, and what it writes is counted. A depth task that it was trained on (`programs`): it reads
sequences and answers their last question, and what it reads is counted too. Each engine runs in a process of its own;
beside the checkpoint there are GPT-2s with random weights, with as many layers as the checkpoint applies at its full
loops, and with as many as it has weights for. A machine that does something else meanwhile gives numbers that mean
nothing: the file has the seconds of every round.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import recurrent_gpt2  # noqa: F401  (the auto classes must know the model)
from training.tasks import Task, TaskSource, ids_of_tokens

PROMPT_TOKENS, NEW_TOKENS = 16, 32  # of texts
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
# Of each engine: where it runs, and the arguments of the loops that differ from the checkpoint's own.
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "generate, exits": ("generate", {}),
    "generate, all loops": ("generate", {"exit_policy": None}),
    "vLLM, exits, a slot per loop step": ("vllm", {"cache_strategy": "per_step"}),
    "vLLM, exits, a slot per layer": ("vllm", {"cache_strategy": "last_step"}),
    "vLLM, all loops, a slot per loop step": ("vllm", {"exit_policy": None, "cache_strategy": "per_step"}),
    "vLLM, GPT-2 of as many layers as are applied": ("gpt2-applied", {}),
    "vLLM, GPT-2 of as many layers as have weights": ("gpt2-weights", {}),
}


@dataclass
class Work:
    """What is asked for."""

    name: str
    prompts: list[list[int]]  # all of one length
    new_tokens: int
    counted: int  # tokens of a request


def text_work(model: Any, number: int) -> Work:
    """Texts that the model samples, from the token that ends texts."""
    start = torch.full((number, 1), model.config.bos_token_id or 0)
    torch.manual_seed(0)
    texts = model.generate(
        start, attention_mask=torch.ones_like(start), do_sample=True, max_new_tokens=PROMPT_TOKENS, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    return Work("text", texts[:, 1:].tolist(), NEW_TOKENS, NEW_TOKENS)


def task_work(task: Task, entries: np.ndarray, number: int) -> Work:
    """The longest sequences of a sample, up to their last question."""
    batch = task.sample(8 * number, task.depth, np.random.default_rng(0))
    ends = batch.asked.shape[1] - batch.asked[:, ::-1].argmax(1)  # behind the last place where something is asked
    prompts = entries[batch.ids[ends == ends.max()][:number, : ends.max()]]
    if len(prompts) < number:
        raise ValueError(f"of {8 * number} sequences of task {task.name} only {len(prompts)} are long.")
    return Work(task.name, prompts.tolist(), 1, prompts.shape[1] + 1)


def make_work(checkpoint: str, number: int, kinds: list[str] | None) -> list[Work]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    tasks = [TaskSource.parse(settings).task for settings in getattr(model.config, "tasks", None) or []]
    known: dict[str, Callable[[], Work]] = {"text": lambda: text_work(model, number)}
    known |= {task.name: lambda task=task: task_work(task, ids_of_tokens(tokenizer, task), number) for task in tasks}
    for kind in kinds or []:
        if kind not in known:
            raise SystemExit(f"`--work` has {kind!r}, but for this checkpoint may have: {', '.join(known)}.")
    return [known[kind]() for kind in kinds or known]


def save_gpt2s(checkpoint: str, folder: Path) -> None:
    """GPT-2s as wide as the checkpoint: with a layer for every application of one at full loops, and for every one."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    config, loops = model.config, model.config.loops_per_group(getattr(model.generation_config, "num_loops", None))
    more = sum(len(group) * (count - 1) for group, count in zip(config.loop_groups, loops, strict=True))
    heads = config.num_attention_heads
    while config.hidden_size // heads < 32:  # the least that vLLM's own GPT-2 takes on a CPU
        heads //= 2
    for name, layers in {
        "gpt2-applied": config.num_hidden_layers + more,
        "gpt2-weights": config.num_hidden_layers,
    }.items():
        gpt2 = GPT2Config(
            vocab_size=config.vocab_size, n_embd=config.hidden_size, n_layer=layers, n_head=heads,
            n_positions=config.max_position_embeddings, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        GPT2LMHeadModel(gpt2).save_pretrained(folder / name)


class Generate:
    """Answers requests by `generate`, as one batch, and counts steps."""

    def __init__(self, checkpoint: str, loops: dict[str, Any]):
        self.model, self.loops = AutoModelForCausalLM.from_pretrained(checkpoint), loops
        self.tokens, self.steps = 0, 0.0

    def answer(self, prompts: list[list[int]], new_tokens: int) -> None:
        ids = torch.tensor(prompts)
        outputs = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens, eos_token_id=None,
            pad_token_id=0, return_dict_in_generate=True, **self.loops,
        )  # fmt: skip
        self.tokens += outputs.loop_steps[..., 0].numel()
        self.steps = self.steps + outputs.loop_steps.sum((0, 1)).numpy()

    def counted(self) -> tuple[int, Any]:
        return self.tokens, self.steps


class VLLM:
    def __init__(self, checkpoint: str, loops: dict[str, Any], most_tokens: int):
        os.environ |= VLLM_ENVIRONMENT
        from vllm import LLM

        self.llm = LLM(
            checkpoint, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_num_seqs=32,
            override_generation_config=loops, max_model_len=most_tokens, enable_prefix_caching=False,
        )  # fmt: skip

    def answer(self, prompts: list[list[int]], new_tokens: int) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)

    def counted(self) -> tuple[int, Any]:
        model = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
        counts = getattr(model, "step_counts", None)
        return (0, 0) if counts is None else (counts.tokens, np.array(counts.steps))


def measure(engine: str, model: str, work: list[Work], requests: list[int], repeats: int) -> list[dict[str, Any]]:
    """For each kind of work: the seconds of all rounds, the rates, and the mean steps of a token in each group."""
    kind, loops = ENGINES[engine]
    most_tokens = max(len(w.prompts[0]) + w.new_tokens for w in work)
    runner = Generate(model, loops) if kind == "generate" else VLLM(model, loops, most_tokens)
    found = []
    for w in work:
        runner.answer(w.prompts[:1], w.new_tokens)
        tokens, steps = runner.counted()
        seconds: dict[int, list[float]] = {number: [] for number in requests}
        for _ in range(repeats):
            for number in requests:
                start = time.perf_counter()
                runner.answer(w.prompts[:number], w.new_tokens)
                seconds[number].append(round(time.perf_counter() - start, 5))
        more_tokens, more_steps = runner.counted()
        found.append({
            "engine": engine,
            "work": w.name,
            "tokens_per_second": {n: n * w.counted / statistics.median(taken) for n, taken in seconds.items()},
            "seconds": seconds,
            "mean_steps": None if more_tokens == 0 else ((more_steps - steps) / (more_tokens - tokens)).tolist(),
        })  # fmt: skip
    return found


def run_alone(engine: str, model: str, work: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """`measure` in a process of its own."""
    command = [
        sys.executable, "-m", "evaluation.serving", model, "--engine", engine, "--prompts", str(work),
        "--repeats", str(given.repeats), "--requests", *map(str, given.requests),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(f"{engine} failed:\n{result.stderr[-3000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def measure_all(given: argparse.Namespace) -> dict[str, Any]:
    """The results of all engines, one after the other; written after each."""
    found: dict[str, Any] = {
        "checkpoint": Path(given.checkpoint).name, "requests": given.requests, "repeats": given.repeats,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads", "results": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        save_gpt2s(given.checkpoint, Path(folder))
        work = make_work(given.checkpoint, max(given.requests), given.work)
        prompts = Path(folder, "work.json")
        prompts.write_text(json.dumps([asdict(w) for w in work]))
        for engine, (kind, _) in (progress := tqdm(ENGINES.items())):
            progress.set_description(engine)
            model = f"{folder}/{kind}" if kind.startswith("gpt2") else given.checkpoint
            found["results"] += run_alone(engine, model, prompts, given)
            if given.output is not None:
                given.output.parent.mkdir(parents=True, exist_ok=True)
                given.output.write_text(json.dumps(found, indent=1) + "\n")
    return found


def throughput_rows(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A row an engine; for each kind of work the rates at so many requests, and the mean steps."""
    header = [f"tokens/s ({found['machine']}, rounds: {found['repeats']})"]
    rows = {result["engine"]: [result["engine"]] for result in found["results"]}
    for work in dict.fromkeys(result["work"] for result in found["results"]):
        header += [f"{work}, {number}" for number in found["requests"]] + ["mean steps"]
    for result in found["results"]:
        rows[result["engine"]] += [f"{rate:,.0f}" for rate in result["tokens_per_second"].values()]
        rows[result["engine"]].append(", ".join(f"{mean:.1f}" for mean in result["mean_steps"] or []) or "-")
    return header, list(rows.values())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m evaluation.serving", description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--work", nargs="+", help="text, or tasks of the checkpoint; all where none is named")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    parser.add_argument("--engine", choices=list(ENGINES), help=argparse.SUPPRESS)
    parser.add_argument("--prompts", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.engine is not None:
        work = [Work(**values) for values in json.loads(given.prompts.read_text())]
        print(json.dumps(measure(given.engine, given.checkpoint, work, given.requests, given.repeats)))
        return
    header, rows = throughput_rows(measure_all(given))
    for row in [header, *rows]:
        print(" | ".join(row))


if __name__ == "__main__":
    main()
