"""`python -m recurrent_gpt2.serve` answers as `generate` does, one request after the other, and outlives bad ones."""

import json
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers import ROOT
from tests.serving.engines import MINI
from tests.serving.servers import running

pytestmark = pytest.mark.serve

PROMPTS = ["The old house", "She said that", "In the morning the", "a = 3\nb = a + 2\n", "One of the most important"]
LOOPS = [
    {},  # the checkpoint's own
    {"exit_policy": None, "num_loops": 5},
    {"exit_policy": {"name": "step_norm", "threshold": 0.3, "normalize": "state"}},
    {"exit_policy": {"name": "kl", "threshold": 0.01}, "num_loops": 20},
    {"exit_policy": "acceleration", "cache_strategy": "last_step"},
]
NEW_TOKENS = 10


@pytest.fixture(scope="module")
def expected():
    """Of every prompt and setting: the text that `generate` alone gives, and its mean steps."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MINI), AutoTokenizer.from_pretrained(MINI)

    def answer(prompt, loops):
        inputs = tokenizer(prompt, return_tensors="pt")
        outputs = model.generate(**inputs, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, **loops)
        new = outputs.sequences[0, inputs["input_ids"].shape[1] :]
        return tokenizer.decode(new, skip_special_tokens=True), outputs.loop_steps[0].float().mean(0).tolist()

    return {(i, j): answer(prompt, loops) for i, prompt in enumerate(PROMPTS) for j, loops in enumerate(LOOPS)}


@pytest.fixture(scope="module")
def server(tmp_path_factory, expected):
    with running("recurrent_gpt2.serve", MINI, "--device", "cpu", folder=tmp_path_factory.mktemp("serve")) as started:
        yield started


def complete(client, i: int, j: int, stream: bool = False):
    """The text of an answer, and its usage."""
    answer = client.completions.create(
        model="recurrent-gpt2-mini",
        prompt=PROMPTS[i],
        max_tokens=NEW_TOKENS,
        stream=stream,
        extra_body={"generation_config": json.dumps(LOOPS[j]) if j % 2 else LOOPS[j]},
    )
    if not stream:
        return answer.choices[0].text, answer.usage
    chunks = list(answer)
    return "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].usage


def assert_right(answer, right):
    text, usage = answer
    assert text == right[0]
    torch.testing.assert_close(torch.tensor(usage.loop_steps), torch.tensor(right[1]), atol=1e-3, rtol=0)


def test_fifty_requests_of_eight_clients_are_answered_as_if_alone_and_memory_stays(server, expected):
    client, process = server
    memory = psutil.Process(process.pid).memory_info
    requests = [(n % len(PROMPTS), n // 5 % len(LOOPS), n % 3 == 0) for n in range(50)]
    assert len({request[:2] for request in requests}) == 25
    complete(client, 0, 0)
    with ThreadPoolExecutor(8) as clients:
        first = list(clients.map(lambda request: complete(client, *request), requests))
        before = memory().rss
        second = list(clients.map(lambda request: complete(client, *request), requests))
    for (i, j, _), *answers in zip(requests, first, second, strict=True):
        for answer in answers:
            assert_right(answer, expected[i, j])
    assert memory().rss < before + 30 * 2**20


@pytest.mark.parametrize(
    ("request_body", "message"),
    [
        ({"generation_config": {"exit_policy": "stepnorm"}}, "'stepnorm' is unknown"),
        ({"generation_config": {"exit_policy": {"name": "kl", "threshold": -1}}}, "threshold"),
        ({"generation_config": {"num_loops": 5000}}, "at most"),
        ({"generation_config": {"num_loops": 10**9}}, "num_loops"),
        ({"generation_config": {"cache_strategy": "none"}}, "per_step, last_step"),
        ({"generation_config": {"looops": 3}}, "looops"),
        ({"generation_config": "{"}, ""),
        ({"generation_config": "[1]"}, "`generation_config` is [1]"),
        ({"frequency_penalty": -1.5}, "`frequency_penalty` is -1.5"),
        ({"max_tokens": 10_000}, "10000, but the model has positions for"),
        ({"max_tokens": 0}, "at least 1"),
        ({"max_tokens": "many"}, "many"),
        ({"prompt": "word " * 10_000}, "shorten the prompt"),
        ({"prompt": ""}, "empty"),
        ({"prompt": 5}, "string"),
        ({"n": 3}, "`n` is 3"),
        ({"model": "gpt-4"}, "gpt-4"),
        ({"temperature": "hot"}, "hot"),
        ({"bogus": 1}, "bogus"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_cannot_be_answered_gets_a_sentence(server, expected, request_body, message, stream):
    client, _ = server
    body = {"prompt": "The", "max_tokens": 3, "stream": stream, **request_body}
    response = httpx.post(f"{client.base_url}completions", json=body, timeout=60)
    assert 400 <= response.status_code < 500
    assert message in response.json()["error"]["message"]
    assert_right(complete(client, 1, 2), expected[1, 2])


def test_a_model_that_does_not_chat_says_so(server):
    client, _ = server
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="recurrent-gpt2-mini", messages=[{"role": "user", "content": "Hello"}])
    assert "does not chat" in error.value.body["message"]


def test_a_seed_holds_in_company_too(server):
    client, _ = server

    def sample(seed):
        arguments = {"model": "recurrent-gpt2-mini", "prompt": "The", "max_tokens": 30, "temperature": 1.5}
        return client.completions.create(**arguments, seed=seed).choices[0].text

    alone = {seed: sample(seed) for seed in (1, 2)}
    assert alone[1] != alone[2]
    with ThreadPoolExecutor(4) as clients:
        assert list(clients.map(sample, [1, 2, 1, 2])) == [alone[1], alone[2]] * 2


def test_sampling_and_stop_words(server):
    client, _ = server
    arguments = {"model": "recurrent-gpt2-mini", "prompt": "The", "max_tokens": 20}
    sampled = {client.completions.create(**arguments, temperature=1.5).choices[0].text for _ in range(4)}
    assert len(sampled) > 1
    greedy = client.completions.create(**arguments, temperature=0).choices[0].text
    word = greedy.split()[2]
    stopped = client.completions.create(**arguments, temperature=0, stop=[word]).choices[0].text
    assert stopped.rstrip().endswith(word)
    assert len(stopped) < len(greedy)


def test_a_client_that_goes_away_makes_room(server):
    """A long answer takes many times as long as what comes after a client that left it."""
    client, _ = server
    slow = {"exit_policy": None, "num_loops": 64}
    arguments = {"model": "recurrent-gpt2-mini", "prompt": "The", "extra_body": {"generation_config": slow}}
    start = time.monotonic()
    stream = client.completions.create(**arguments, stream=True)
    list(stream)
    whole = time.monotonic() - start
    start = time.monotonic()
    for _ in range(3):
        stream = client.completions.create(**arguments, stream=True)
        next(iter(stream))
        stream.close()
    client.completions.create(**arguments, max_tokens=1)
    assert time.monotonic() - start < whole


def test_the_examples_of_the_page_run(server, capsys):
    client, _ = server
    page = (ROOT / "docs/serving.md").read_text().replace("localhost:8000", f"127.0.0.1:{client.base_url.port}")
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(program, {})
    assert "[" in capsys.readouterr().out  # the steps
    (command,) = re.findall(r"^curl .*?\}\}'$", page, re.MULTILINE | re.DOTALL)
    printed = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
    assert json.loads(printed)["usage"]["completion_tokens"] <= 20


def test_the_one_model_is_listed_and_others_cannot_be_loaded(server):
    client, _ = server
    assert [model.id for model in client.models.list()] == ["recurrent-gpt2-mini"]
    assert httpx.post(f"{client.base_url}../load_model", json={"model": "gpt2"}).status_code == 404
