import json

from evaluation import benchmark


def test_ratios_are_of_the_same_rounds(monkeypatch):
    ticks = iter(range(10_000))
    slow, fast = (lambda: [next(ticks) for _ in range(4)]), (lambda: next(ticks))
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: float(next(ticks)))
    result = benchmark.compare_times(("slow", slow), ("fast", fast), rounds=3)
    assert (result.what, result.against) == ("slow", "fast")
    assert result.ratio == result.lowest == result.highest == 5 / 2
    assert result.milliseconds == 5000


def test_the_command_prints_a_table_and_writes_json(tmp_path, monkeypatch, capsys):
    def measurement(rounds):
        return benchmark.compare_times(("this", lambda: None), ("that", lambda: None), rounds)

    monkeypatch.setattr(benchmark, "MEASUREMENTS", {"one": measurement})
    benchmark.main(["--quick", "--output", str(tmp_path / "deep" / "ratios.json")])
    assert "this" in capsys.readouterr().out
    (written,) = json.loads((tmp_path / "deep" / "ratios.json").read_text())
    assert written["against"] == "that"
