"""`optimize_for_inference(compile=True)`: layers in C++ give what stock layers give, whatever the loops and rows."""

import copy
import platform

import peft
import pytest
import torch

from recurrent_gpt2 import LoopCache, RecurrentGPT2ForCausalLM, compiled_layers, fast_layers
from tests.helpers import random_ids, tiny_model

SETTINGS = {"num_hidden_layers": 4, "loop_groups": [[1, 2]], "max_position_embeddings": 160}
POLICY = {"name": "step_norm", "normalize": "state", "threshold": 0.3}
GREEDY = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
LIKE_GPT2 = {"norm": "layer_norm", "output_norms": False, "use_bias": True}


def pair(
    std: float = 0.3, optimize: dict | None = None, **settings
) -> tuple[RecurrentGPT2ForCausalLM, RecurrentGPT2ForCausalLM]:
    """A model, and the same compiled. What biases and norms have is random too."""
    models = []
    for _ in range(2):
        model = tiny_model(std, **{**SETTINGS, **settings})
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        models.append(model)
    return models[0], models[1].optimize_for_inference(**(optimize or {"compile": True}))


@pytest.fixture(scope="module")
def models() -> tuple[RecurrentGPT2ForCausalLM, RecurrentGPT2ForCausalLM]:
    return pair()


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """The rows of every call of compiled code."""
    rows, take = [], compiled_layers.CompiledLayers.take

    def counted(self, work, rooms):
        rows.append(work.rows)
        take(self, work, rooms)

    monkeypatch.setattr(compiled_layers.CompiledLayers, "take", counted)
    return rows


def assert_same(stock, compiled, ids: torch.Tensor, chunks: list[int], **loops) -> None:
    """One stock pass is compiled ones over chunks, which then go on by single tokens."""
    expected, cache = stock(ids, **loops), LoopCache(compiled.config, loops.pop("cache_strategy", None))
    sizes = chunks + [1] * (ids.shape[1] - sum(chunks))
    outputs = [compiled(chunk, past_key_values=cache, use_cache=True, **loops) for chunk in ids.split(sizes, dim=1)]
    logits = torch.cat([output.logits for output in outputs], 1)
    torch.testing.assert_close(logits, expected.logits, atol=1e-3, rtol=1e-3)
    assert torch.equal(torch.cat([output.loop_steps for output in outputs], 1), expected.loop_steps)


@pytest.mark.parametrize("inference_mode", [False, True])
@pytest.mark.parametrize(
    "loops", [{}, {"num_loops": 1}, {"num_loops": 9}, {"exit_policy": POLICY}, {"exit_policy": POLICY, "num_loops": 12}]
)
def test_decoding_is_one_pass(models, loops, inference_mode, calls):
    """A text that outgrows the room of its cache."""
    with torch.inference_mode(inference_mode), torch.no_grad():
        assert_same(*models, random_ids(1, 150), [40], **loops)
        assert set(calls) >= {1}


@pytest.mark.parametrize(
    "policy",
    [
        {"name": "step_norm", "threshold": 4.0},
        {"name": "step_norm", "normalize": "state", "threshold": 0.4, "patience": 2, "min_loops": 3},
        {"name": "step_norm", "normalize": "state", "threshold": 0.6, "patience": 3},
        {"name": "acceleration", "threshold": 6.0},
        {"name": "acceleration", "normalize": "state", "threshold": 0.7, "patience": 1},
        {"name": "acceleration", "normalize": "step", "threshold": 0.75, "min_loops": 5},
        {"name": "kl", "threshold": 0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("most_rows", [10, 64])
@torch.no_grad()
def test_rules_fire_when_they_should(models, policy, most_rows, calls, monkeypatch):
    """In batches and prompts too, of which some tokens leave before others: where they are many, compiled code goes on
    with the last of them."""
    width = models[0].config.hidden_size
    monkeypatch.setattr(models[1].model.compiled_layers, "most_work", most_rows * width**2)
    ids = random_ids(2, 26)
    steps = models[0](ids, exit_policy=policy, num_loops=9).loop_steps
    assert len(steps.unique()) > 1, steps.unique()
    for chunks in ([12], [24], []):
        calls.clear()
        assert_same(*models, ids, chunks, exit_policy=policy, num_loops=9)
        assert max(calls) <= most_rows
        assert set(calls) - {2, 2 * sum(chunks)}  # some tokens went on without others


@pytest.mark.parametrize(
    ("name", "settings", "first"),
    [
        ("step_norm", {}, 1),
        ("step_norm", {"patience": 3}, 3),
        ("acceleration", {"patience": 1}, 2),
        ("acceleration", {}, 3),
        ("acceleration", {"min_loops": 5}, 5),
    ],
)
@torch.no_grad()
def test_rules_first_fire_when_they_can(models, name, settings, first):
    policy = {"name": name, "threshold": 1e6, **settings}
    for model in models:
        steps = model(random_ids(1, 3), use_cache=True, exit_policy=policy, num_loops=9).loop_steps
        assert steps.unique().tolist() == [first]


@pytest.mark.parametrize(
    "settings",
    [
        {"loop_groups": [[0], [1, 2], [3]], "state_init": "zeros"},
        {"loop_groups": [], "hidden_act": "relu"},
        {"hidden_size": 36, "num_attention_heads": 6, "intermediate_size": 50},  # not what a product takes at once
        {**LIKE_GPT2, "hidden_act": "gelu_new"},
        {**LIKE_GPT2, "hidden_act": "gelu", "output_norms": True, "cache_strategy": "last_step"},
        {"hidden_size": 132, "num_attention_heads": 1, "state_init": "input"},
        {"hidden_size": 256, "std": 0.1},  # matrices as large as they can be
    ],
    ids=str,
)
@torch.no_grad()
def test_models_of_all_kinds_are_the_same(settings, calls):
    stock, compiled = pair(**settings)
    policy = {"exit_policy": POLICY} if stock.config.loop_groups else {}
    for rows in (1, 3):
        ids = random_ids(rows, 12)
        if stock.config.cache_strategy == "per_step":
            for loops in ({}, policy):
                assert_same(stock, compiled, ids, [5 if rows == 1 else 8], **loops)
        generated = [model.generate(ids, **GREEDY) for model in (stock, compiled)]
        assert torch.equal(*generated)
    assert calls


@torch.no_grad()
def test_threads_wait_for_what_they_look_at(models):
    """As many as there are, a row's result is the same to the last bit."""
    ids, found, threads = random_ids(2, 75), [], torch.get_num_threads()
    try:
        for number in (1, *[4] * 20):
            torch.set_num_threads(number)
            found.append(models[1](ids, use_cache=True, exit_policy=POLICY).logits)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(logits, found[0]) for logits in found)


def test_compiled_code_is_what_runs(models, monkeypatch):
    called, layer = [], models[1].model.layers[1]
    monkeypatch.setattr(type(layer), "forward", lambda *args, **kwargs: called.append(1))
    with torch.no_grad():
        models[1](random_ids(1, 20), use_cache=True)
    assert not called


@pytest.mark.parametrize("arguments", [{}, {"cache_strategy": "last_step"}, {"exit_policy": POLICY}])
@pytest.mark.parametrize("rows", [1, 3])
def test_generated_tokens_are_the_same(models, arguments, rows):
    stock, compiled = models
    ids, mask = random_ids(rows, 6), torch.ones(rows, 6, dtype=torch.long)
    mask[0, :2] = 0  # padding, too
    for given in (torch.ones_like(mask), mask):
        expected = stock.generate(ids, attention_mask=given, **GREEDY, **arguments)
        assert torch.equal(compiled.generate(ids, attention_mask=given, **GREEDY, **arguments), expected)


def test_drafts_beams_and_recorded_states_are_the_same(models, calls):
    (stock, compiled), ids = models, random_ids(1, 6)
    for draft, full in ((1, None), (2, None), (3, 4), (1, 12)):
        drafted = compiled.generate(ids, assistant_model=compiled.draft(draft), num_loops=full, **GREEDY)
        assert torch.equal(drafted, stock.generate(ids, num_loops=full, **GREEDY)), (draft, full)
        assert max(calls) > 1  # drafts at different steps
        calls.clear()
    drafted = compiled.generate(ids, assistant_model=compiled.draft(2, num_tokens=3), **GREEDY)
    assert torch.equal(drafted, stock.generate(ids, **GREEDY))
    assert torch.equal(compiled.generate(ids, num_beams=3, **GREEDY), stock.generate(ids, num_beams=3, **GREEDY))
    with torch.no_grad():
        for model in models:
            past = model(ids, use_cache=True).past_key_values
            states = model(ids[:, :1], past_key_values=past, use_cache=True, output_hidden_states=True).hidden_states
            assert len(states) >= 2 + 5  # of every application of a layer


@torch.no_grad()
def test_trajectories_are_the_same(models):
    found = [
        model(random_ids(2, 7), use_cache=True, output_loop_trajectory=True, exit_policy=POLICY).loop_trajectory[0]
        for model in models
    ]
    torch.testing.assert_close(*found, atol=1e-3, rtol=1e-3)


@pytest.fixture
def all_in_int8(monkeypatch) -> None:
    """However small matrices are."""
    monkeypatch.setattr(fast_layers, "LEAST_SIZE", 0)


@pytest.mark.parametrize(
    "settings", [{}, {**LIKE_GPT2, "hidden_act": "gelu_new"}, {"hidden_size": 36, "vocab_size": 70}]
)
@torch.no_grad()
def test_int8_is_what_it_is_without_compiling(settings, all_in_int8, calls):
    """But for numbers that are rounded the other way; in one pass, in several, and token by token."""
    eager, compiled = (
        pair(**settings, optimize={"weights": "int8", "compile": compile})[1] for compile in (False, True)
    )
    assert isinstance(compiled.lm_head, compiled_layers.CompiledLinear)
    ids = random_ids(2, 30)
    for loops in ({}, {"num_loops": 9}):
        expected = eager(ids, **loops).logits
        for chunks in ([30], [17], [6, 9]):
            cache, sizes = LoopCache(compiled.config), chunks + [1] * (30 - sum(chunks))
            logits = [compiled(c, past_key_values=cache, use_cache=True, **loops).logits for c in ids.split(sizes, 1)]
            assert (torch.cat(logits, 1) - expected).abs().mean() < 0.05 * expected.std()
    assert {60, 34, 12, 2} <= set(calls)
    generated = compiled.generate(ids, exit_policy=POLICY, **GREEDY)
    scored = compiled(generated[:, :-1], exit_policy=POLICY).logits[:, 29:]
    assert (scored.argmax(-1) == generated[:, 30:]).float().mean() > 0.9


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@torch.no_grad()
def test_what_is_no_number_stays_none(value, all_in_int8):
    """In the row that it came from, and in none beside it."""
    linear, x = compiled_layers.CompiledLinear(torch.nn.Linear(70, 75)), torch.ones(6, 70)
    x[3, 50] = value
    assert linear(x).isnan().all(1).tolist() == [row == 3 for row in range(6)]
    for arguments in ({}, {"weights": "int8"}):
        for activation in ("silu", "relu"):
            _, compiled = pair(optimize={"compile": True, **arguments}, hidden_act=activation)
            embeds = torch.ones(2, 6, compiled.config.hidden_size)
            embeds[1, 3, 2] = value
            broken = compiled(inputs_embeds=embeds, use_cache=True).logits.isnan().all(-1)
            assert broken.tolist() == [[False] * 6, [False] * 3 + [True] * 3]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are processors of one kind")
@pytest.mark.parametrize("without", ["", "avx512vnni", "avx512f", "avx2", "avx"])
@torch.no_grad()
def test_every_processor_computes_the_same(without, all_in_int8, monkeypatch):
    """Bytes to the last bit, but for how they are scaled."""
    linear, x = torch.nn.Linear(70, 75), torch.randn(7, 70, generator=torch.Generator().manual_seed(0))
    flags = [
        f"-mno-{name}" for name in (["avx512f", without] if without.endswith(("avx2", "avx")) else [without]) if name
    ]
    monkeypatch.setattr(compiled_layers, "FLAGS", [*compiled_layers.FLAGS, *flags])
    compiled_layers.compiled_library.cache_clear()
    try:
        for rows in range(8):
            expected = fast_layers.PackedLinearInt8(linear)(x[:rows]) if rows else torch.zeros(0, 75)
            torch.testing.assert_close(compiled_layers.CompiledLinear(linear)(x[:rows]), expected, atol=2e-2, rtol=0)
        assert_same(*pair(), random_ids(1, 30), [12], exit_policy=POLICY)
    finally:
        compiled_layers.compiled_library.cache_clear()


@torch.no_grad()
def test_other_precisions_are_left_to_pytorch(models, calls):
    """Those of autocast, and of a cache that it has filled."""
    eager, compiled = pair()[0].optimize_for_inference(), models[1]
    ids, autocast = random_ids(1, 20), torch.autocast("cpu", torch.bfloat16)
    with autocast:
        expected = eager.generate(ids, **GREEDY)
        assert torch.equal(compiled.generate(ids, **GREEDY), expected)
        compiled.generate(ids, assistant_model=compiled.draft(1), **GREEDY)
        cache = compiled(ids, use_cache=True, exit_policy=POLICY).past_key_values
    with pytest.raises(RuntimeError, match="same dtype"):
        compiled(ids[:, :1], past_key_values=cache, use_cache=True)
    assert not calls


@torch.no_grad()
def test_weights_that_are_moved_are_found():
    """Norms and biases, which are parameters still."""
    (stock, compiled), ids = pair(**LIKE_GPT2), random_ids(1, 9)
    compiled.share_memory()
    for parameter in (*stock.parameters(), *compiled.parameters()):
        parameter.mul_(2 if parameter.ndim == 1 else 1)
    torch.testing.assert_close(compiled(ids, use_cache=True).logits, stock(ids).logits, atol=1e-3, rtol=1e-3)


def test_what_compiled_code_would_not_know_of_is_refused(models):
    with pytest.raises(RuntimeError, match="load it again"):
        copy.deepcopy(models[1])
    for targets in ("all-linear", ["o_proj"]):
        with pytest.raises(RuntimeError, match="load it again"):
            peft.get_peft_model(models[1], peft.LoraConfig(target_modules=targets))


def test_where_layers_stay_as_they_are_it_says_why(caplog):
    for settings, reason in (
        ({"hidden_size": 320, "num_hidden_layers": 1, "loop_groups": []}, "its matrices are packed"),
        ({"loop_noise": 0.1}, "without `loop_noise`"),
        ({"hidden_act": "tanh"}, "'tanh' is not one of silu"),
    ):
        caplog.clear()
        model = tiny_model(**{**SETTINGS, **settings}).optimize_for_inference(compile=True)
        assert model.model.compiled_layers is None
        assert reason in caplog.text
    hooked = tiny_model(**SETTINGS)
    hooked.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    assert hooked.optimize_for_inference(compile=True).model.compiled_layers is None


def test_without_a_compiler_it_says_so_and_nothing_is_given_up(monkeypatch):
    model = tiny_model(**SETTINGS)
    compiled_layers.compiled_library.cache_clear()
    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(RuntimeError, match=r"needs a C\+\+ compiler.*no-such-compiler"),
    ):
        model.optimize_for_inference(compile=True)
    monkeypatch.setattr(compiled_layers, "SOURCE", "not C++")
    with pytest.raises(RuntimeError, match=r"needs a C\+\+ compiler.*error"):
        model.optimize_for_inference(compile=True)
    assert not model.is_optimized
    model(random_ids(1, 3)).logits.sum().backward()
    monkeypatch.undo()
    assert model.optimize_for_inference(compile=True).model.compiled_layers is not None


def test_how_the_process_rounds_is_left_alone(models):
    assert torch.tensor(1e-40) * 1.5 > 0  # a library that was linked for fast mathematics flushes such numbers to zero
