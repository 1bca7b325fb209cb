import json

import pytest
import torch

from evaluation import benchmark
from evaluation.benchmark import Ratio, compare_times, timed_rounds
from recurrent_gpt2 import RecurrentGPT2Config
from tests.helpers import random_ids, tiny_model


@pytest.fixture
def clock(monkeypatch):
    ticks = iter(range(10_000))
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: float(next(ticks)))
    return ticks


def test_ratios_are_of_the_same_rounds(clock):
    slow, fast = (lambda: [next(clock) for _ in range(4)]), (lambda: next(clock))
    result = compare_times(("slow", slow), ("fast", fast), seconds=40)  # a round takes ten ticks
    assert (result.what, result.against) == ("slow", "fast")
    assert result.ratio == result.lowest == result.highest == 5 / 2
    assert result.milliseconds == 5000
    assert result.rounds == 3  # of four: the first is for warming up


@pytest.mark.parametrize(("warm", "calls"), [(True, 2), (False, 1)])
def test_one_round_counts_however_little_time_there_is(warm, calls):
    called = []
    times = timed_rounds("slow", [lambda: called.append(1)], seconds=0, warm=warm)
    assert times.shape == (1, 1)
    assert len(called) == calls


def test_speeds_are_the_inverse_and_count_the_work(clock):
    slow, fast = (lambda: [next(clock) for _ in range(4)]), (lambda: next(clock))
    result = compare_times(("slow", slow), ("fast", fast), seconds=20, is_speed=True, work=(10, 1))
    assert result.ratio == pytest.approx(2 / (5 / 10))
    assert result.milliseconds == 500


@pytest.mark.parametrize(
    ("ratio", "is_speed", "reached"), [(0.9, False, True), (1.1, False, False), (1.1, True, True), (0.9, True, False)]
)
def test_a_time_should_be_below_its_goal_and_a_speed_above(ratio, is_speed, reached):
    assert Ratio("a", "b", ratio, ratio, ratio, 1, 1, 3, 1.0, is_speed).is_reached is reached
    assert Ratio("a", "b", ratio, ratio, ratio, 1, 1, 3, None, is_speed).is_reached is None


def test_decoding_starts_from_the_same_cache_every_time():
    model = tiny_model()
    lengths = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["past_key_values"].get_seq_length()), with_kwargs=True
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "token_ids", random_ids)
        decode = benchmark.decoder(model, 2, 7, tokens=3)
    decode()
    decode()
    assert lengths == [0, 7, 8, 9, 7, 8, 9]


def test_the_bare_matrices_are_all_that_a_token_passes_through(monkeypatch):
    monkeypatch.setattr(benchmark, "LOOPS", 5)
    model, used = tiny_model(num_loops=5), []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, *_: used.append(module))
    with torch.no_grad():
        model(random_ids(1, 1))
    passed = list(map(id, used))
    used.clear()
    benchmark.products_alone(model, 3)()
    assert sorted(passed) == sorted(map(id, used))


def test_prescribed_exits_are_spread_evenly_up_to_the_most():
    model, policy = tiny_model(num_loops=9), benchmark.PrescribedExit(7)
    with torch.no_grad():
        steps = model(random_ids(8, 40), exit_policy=policy).loop_steps
    assert steps.min() == 1
    assert steps.max() == 7
    assert steps.float().mean() == pytest.approx(4, abs=0.3)


def test_the_layers_that_are_counted_are_those_of_the_papers_model():
    config = RecurrentGPT2Config(num_loops=benchmark.LOOPS)
    looped = sum(len(group) for group in config.loop_groups)
    assert config.num_hidden_layers - looped + looped * benchmark.LOOPS == benchmark.APPLICATIONS


def test_the_command_prints_a_table_and_writes_json(tmp_path, monkeypatch, capsys):
    def measurement(seconds):
        assert seconds == benchmark.QUICK_SECONDS
        yield compare_times(("this", lambda: None), ("that", lambda: None), 0, reach=1e9)

    monkeypatch.setattr(benchmark, "MEASUREMENTS", {"one": measurement})
    monkeypatch.setattr(benchmark, "looped", tiny_model)
    benchmark.main(["--quick", "--only", "one", "--output", str(tmp_path / "deep" / "ratios.json")])
    assert "reached" in capsys.readouterr().out
    written = json.loads((tmp_path / "deep" / "ratios.json").read_text())
    assert written["ratios"][0]["against"] == "that"
    assert "threads" in written["machine"]


def test_a_run_that_was_stopped_goes_on_without_what_it_has(tmp_path, monkeypatch):
    file, measured = tmp_path / "ratios.json", []

    def measurement(name, stops=False):
        def measure(seconds):
            measured.append(name)
            yield compare_times((f"{name} 1", lambda: None), ("that", lambda: None), 0, note="a note")
            if stops and measured.count(name) == 1:
                raise KeyboardInterrupt
            yield compare_times((f"{name} 2", lambda: None), ("that", lambda: None), 0)

        return measure

    parts = {"one": measurement("one"), "two": measurement("two", stops=True), "three": measurement("three")}
    monkeypatch.setattr(benchmark, "MEASUREMENTS", parts)
    monkeypatch.setattr(benchmark, "read_bandwidth", lambda: 1.0)
    arguments = ["--quick", "--only", "one", "two", "three", "--output", str(file)]
    with pytest.raises(KeyboardInterrupt):
        benchmark.main(arguments)
    assert [r["what"] for r in json.loads(file.read_text())["ratios"]] == ["one 1", "one 2", "two 1"]  # nothing is lost
    benchmark.main([*arguments, "--resume"])
    assert measured == ["one", "two", "two", "three"]
    written = json.loads(file.read_text())
    assert [r["what"] for r in written["ratios"]] == ["one 1", "one 2", "two 1", "two 2", "three 1", "three 2"]
    assert written["done"] == ["one", "two", "three"]
    with pytest.raises(ValueError, match=r"seconds 1.0, this one has 3.0: start anew"):
        benchmark.main([*arguments[1:], "--seconds", "3", "--resume"])
    with pytest.raises(ValueError, match="needs `--output`"):
        benchmark.main(["--quick", "--only", "one", "--resume"])


def test_drafts_are_counted_and_must_not_change_tokens(monkeypatch):
    model = tiny_model(0.3, num_loops=5, max_position_embeddings=64)
    generation = benchmark.Drafted(model, random_ids(1, 6), 12)
    never = {"name": "acceleration", "threshold": 0.0}
    same, accepted = generation.assisted(3, num_loops=5, exit_policy=never)  # the draft computes what the model does
    assert torch.equal(same(), generation.expected)
    assert accepted > 0.7  # of the last draft, not all are needed
    _, accepted = generation.assisted(3, num_loops=1)
    assert 0 <= accepted < 0.7
    one_group = benchmark.Drafted(tiny_model(0.15, num_loops=7, loop_groups=[[2, 3]]), random_ids(1, 6), 12)
    _, accepted = one_group.assisted(num_loops=1)
    assert 0 < accepted < 1  # tokens that entered and were dropped again count
    with torch.no_grad():
        one_group.model.model.loop_inputs[0].state_proj.weight.zero_()
    one_group.expected = one_group.plain()
    assert one_group.assisted(num_loops=1)[1] == 1
    generation.expected = generation.expected.roll(1)
    with pytest.raises(RuntimeError, match="changed the tokens"):
        generation.assisted(3, num_loops=1)


def test_layers_that_a_token_passes_through_are_counted():
    config = RecurrentGPT2Config(num_hidden_layers=5, loop_groups=[[1, 2], [4]], num_loops=3)
    assert benchmark.applied_layers(config) == 2 + 3 * 3
    assert benchmark.applied_layers(config, 1.5) == 2 + 1.5 * 3


def test_the_shares_of_products_are_shares(monkeypatch):
    model = tiny_model(hidden_size=256, num_attention_heads=4)
    monkeypatch.setattr(benchmark, "looped", lambda: model)
    monkeypatch.setattr(benchmark, "naive", lambda: model)
    monkeypatch.setattr(benchmark, "token_ids", lambda batch, length, most=None: random_ids(batch, min(length, 16)))
    for with_products in (benchmark.PRODUCTS, ()):
        monkeypatch.setattr(benchmark, "PRODUCTS", with_products)
        shares = list(benchmark.shares_of_products())
        assert len(shares) == 4
        assert all(0 < share.products < 1 if with_products else share.products == 0 for share in shares)
        assert all(0 < share.attention < 1 - share.products for share in shares)


def test_decoders_share_a_context_and_leave_it_as_it_was(monkeypatch):
    model = tiny_model(num_loops=6)
    monkeypatch.setattr(benchmark, "token_ids", random_ids)
    past = benchmark.context_cache(model, 2, 7)
    before = [slot.keys.clone() for layer in past.layers for slot in getattr(layer, "slots", [layer])]
    for policy in (benchmark.PrescribedExit(4), benchmark.FixedLoops()):
        benchmark.decoder(model, 2, 7, exit_policy=policy)()
    after = [slot.keys for layer in past.layers for slot in getattr(layer, "slots", [layer])]
    assert benchmark.context_cache(model, 2, 7) is past
    assert all(map(torch.equal, before, after))


def test_fresh_processes_import_load_and_read(tmp_path):
    model = tiny_model(max_position_embeddings=512)
    folders = {name: tmp_path / name for name in ("per_step", "last_step", "GPT-2")}
    for strategy in ("per_step", "last_step"):
        model.config.cache_strategy = strategy
        model.save_pretrained(folders[strategy])
    config = benchmark.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=20, bos_token_id=0, eos_token_id=0)
    benchmark.GPT2LMHeadModel(config).save_pretrained(folders["GPT-2"])
    (imported, loaded), memory = benchmark.loading(2, folders)
    assert (imported.what, loaded.what) == ("import", "load")
    assert imported.rounds == loaded.rounds == 2
    assert imported.milliseconds > 100  # torch and transformers alone
    assert loaded.milliseconds > 0.1
    others = [f"per_step, {name}" for name in ("bfloat16", "int8", "int8, compiled")]
    assert [used.what for used in memory] == ["per_step", "last_step", "GPT-2", *others]
    assert all((used.call_peak > 0) == (used.what != "GPT-2") for used in memory)
    assert memory[2].cache_bytes == 2 * 512 * 8 * 4
    assert memory[0].cache_bytes > memory[1].cache_bytes
    assert all(used.peak_mib > 100 for used in memory)
