"""`vllm serve` finds the package by its entry point, and answers concurrent clients as `generate` does."""

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.serving.engines import MINI
from tests.serving.servers import running

pytestmark = pytest.mark.serve
PROMPTS = ["The old house", "She said that", "In the morning the", "One of the most important"]
NEW_TOKENS = 12
LOOPS = {"exit_policy": {"name": "kl", "threshold": 0.01}, "num_loops": 16}


@pytest.fixture(scope="module")
def expected():
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MINI), AutoTokenizer.from_pretrained(MINI)
    texts = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        text = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, **LOOPS)
        texts.append(tokenizer.decode(text[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def server(request, expected, tmp_path_factory):
    arguments = [
        "vllm.entrypoints.openai.api_server", "--model", MINI, "--served-model-name", "mini", "--dtype", "float32",
        "--override-generation-config", json.dumps(LOOPS), "--max-model-len", "128", "--max-num-batched-tokens", "32",
        "--tensor-parallel-size", str(request.param),
    ]  # fmt: skip
    folder = tmp_path_factory.mktemp("vllm")
    with running(*arguments, folder=folder) as (client, _):
        yield client, folder


def complete(client, prompt: str, stream: bool) -> str:
    arguments = {"model": "mini", "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0}
    answer = client.completions.create(**arguments, stream=stream)
    return "".join(chunk.choices[0].text for chunk in answer) if stream else answer.choices[0].text


def test_clients_get_what_generate_gives_and_the_log_has_the_loops(server, expected):
    client, folder = server
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="mini", prompt="The", max_tokens=10_000)
    with ThreadPoolExecutor(8) as clients:
        texts = list(clients.map(lambda n: complete(client, PROMPTS[n % 4], stream=n % 2 == 0), range(16)))
    assert texts == expected * 4
    assert (
        "Loops of each group: [16], exit policies: ['kl'], keys and values: per_step."
        in (folder / "server.log").read_text()
    )
