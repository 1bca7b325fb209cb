"""What the tests of engines share: a model in which a wrong slot shows, prompts, and what `generate` answers."""

import os

import torch

from tests.helpers import ROOT, tiny_model

MINI = str(ROOT / "checkpoints" / "recurrent-gpt2-mini")
PROGRAMS = str(ROOT / "checkpoints" / "recurrent-gpt2-programs")
LENGTHS = (3, 17, 40, 30, 5, 24, 36, 8, 27, 20, 2, 31, 11, 26, 38, 1)  # a block of the engine has 32
NEW_TOKENS = 20
GREEDY = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def save_tiny(folder) -> str:
    """Three groups, one of two layers, and weights so large that the slots of loop steps differ."""
    model = tiny_model(std=0.08, hidden_size=64, num_attention_heads=2, max_position_embeddings=64)
    model.save_pretrained(folder)
    return str(folder)


def random_prompts(vocab_size: int, lengths=LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def answer(model, prompt: list[int], **arguments):
    """Tokens of `generate`, their log-probabilities, and the mean steps of each group."""
    ids = torch.tensor([prompt])
    outputs = model.generate(
        ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_logits=True,
        **{**GREEDY, "pad_token_id": 0, **arguments},
    )  # fmt: skip
    new = outputs.sequences[0, len(prompt) :]
    logprobs = torch.stack(outputs.logits, dim=1)[0].log_softmax(-1).gather(-1, new[:, None])[:, 0]
    return new.tolist(), logprobs.tolist(), outputs.loop_steps[0].float().sum(0).tolist()


def make_engine(model: str, loops: dict, **settings):
    """vLLM in this process, with its defaults but for sizes."""
    os.environ |= ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    import vllm

    settings = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 16, "disable_log_stats": False, **settings}
    if "tiny" in model:
        settings["skip_tokenizer_init"] = True
    return vllm.LLM(model=model, override_generation_config=loops, block_size=32, seed=0, **settings)


def ask(llm, prompts: list[list[int]], **sampling) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens of an engine, and their log-probabilities."""
    from vllm import SamplingParams

    given = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "detokenize": False, **sampling}
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    answers = llm.generate(asked, SamplingParams(logprobs=0, **given), use_tqdm=False)
    completions = [answer.outputs[0] for answer in answers]
    return [
        (list(out.token_ids), [place[token].logprob for place, token in zip(out.logprobs, out.token_ids, strict=True)])
        for out in completions
    ]


def model_of(llm):
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def counter(llm, name: str) -> int:
    """One of the engine's own counters. They are those of the process, so engines before count too."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}")
