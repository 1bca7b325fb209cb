import json

import pytest

from evaluation import figures
from evaluation.exit_tradeoff import PAPER_THRESHOLDS, Result, make_settings
from evaluation.trajectories import write_trajectories

WITH_TRAINING = {"trajectory", "loop_dynamics", "cosines", "drift", "exit_policies", "fair_comparison", "against_fixed"}


def made_up_results(sequences: int = 4) -> list[Result]:
    """Quality that grows with depth; rules that go deeper the lower their threshold."""
    results = []
    for setting in make_settings(["step_norm", "kl", "acceleration"], cap=24):
        policy = setting.exit_policy
        depth = setting.num_loops if policy is None else 1 + 5 / (1 + 10 * policy["threshold"])
        losses = [5 + 1 / depth + 0.1 * sequence for sequence in range(sequences)]
        mean = sum(losses) / sequences
        times = {"1": 2 * depth, "8": depth}
        results.append(
            Result(setting, mean, 150.0, [depth] * 3, [1.0] * 3, 1e6 * depth, losses, [depth] * len(losses), times)
        )
    return results


def test_every_figure_is_drawn_as_png_and_pdf(trained, tmp_path):
    write_trajectories(trained / "run", "The number 5 comes before 6.", tmp_path / "trajectories", 6)
    drawn = figures.draw_figures(
        tmp_path / "figures",
        tmp_path / "trajectories",
        figures.read_geometry(trained / "run" / "geometry.jsonl"),
        results=made_up_results(),
    )
    assert set(drawn) == WITH_TRAINING
    for path in drawn.values():
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.with_suffix(".pdf").read_bytes().startswith(b"%PDF")


def test_the_exit_figure_has_the_papers_rules_at_its_thresholds():
    figure = figures.plot_exit_policies(made_up_results())
    for ax in figure.axes:
        fixed, rules = ax.get_lines()[:2], ax.get_lines()[2:]
        assert [line.get_label() for line in fixed] == ["24 fixed loops", "2 fixed loops"]
        assert [line.get_label() for line in rules] == ["step_norm", "kl", "acceleration"]
        for line in rules:
            assert tuple(line.get_xdata()) == PAPER_THRESHOLDS
    latency, perplexity, cross_entropy = ({line.get_label(): line.get_ydata()[0] for line in ax.get_lines()}
                                          for ax in figure.axes)  # fmt: skip
    assert latency["kl"] == pytest.approx(2 * (1 + 5 / (1 + 1e-4)))
    assert latency["2 fixed loops"] == 4
    assert perplexity["kl"] == 150.0
    assert cross_entropy["kl"] == pytest.approx(5.15 + 1 / (1 + 5 / (1 + 1e-4)))
    assert cross_entropy["24 fixed loops"] == pytest.approx(5.15 + 1 / 24)


def test_next_to_nothing_looks_like_it():
    results = [result for result in made_up_results() if result.setting.rule != "fixed"]
    for place, result in enumerate(results):
        result.cross_entropy = 4 + 0.008 * place / len(results)
    low, high = figures.plot_exit_policies(results).axes[-1].get_ylim()
    assert high - low >= figures.LEAST_NATS


def test_the_fair_comparison_has_cost_on_its_axes():
    results = made_up_results()
    by_depth, by_time = figures.plot_fair_comparison(results).axes
    lines = {line.get_label(): line for line in by_depth.get_lines()}
    fixed = sorted((r for r in results if r.setting.rule == "fixed"), key=lambda r: r.mean_depth)
    assert lines["fixed"].get_xdata().tolist() == [r.mean_depth for r in fixed]
    assert lines["fixed"].get_ydata().tolist() == [r.cross_entropy for r in fixed]
    assert by_time.get_lines()[0].get_xdata().tolist() == [r.ms_per_token["1"] for r in fixed]


def test_the_fair_comparison_begins_at_two_loops_and_says_what_is_left_out():
    results = made_up_results()
    by_depth, by_time = figures.plot_fair_comparison(results).axes
    assert 1 < by_depth.get_xlim()[0] < 2
    assert 2 < by_time.get_xlim()[0] < 4  # 2 ms a loop
    loss = {r.setting.num_loops: r.cross_entropy for r in results if r.setting.rule == "fixed"}
    low, high = by_depth.get_ylim()
    assert low < loss[64] < loss[2] < high < loss[1]
    assert f"1 fixed loop: {loss[1]:.3f} nats" in by_depth.get_title("left")
    labels = [label.get_text() for label in by_depth.get_xticklabels()]
    assert labels[:4] == ["2", "3", "4", "6"]
    from_two = [r for r in results if r.mean_depth >= 2]
    assert figures.plot_fair_comparison(from_two).axes[0].get_title("left") == ""


def test_loop_dynamics_show_means_and_mark_rounding():
    step_norms = {"mean": [4.0, 2.0, 1e-9], "std": [1.0, 0.5, 1e-9]}
    group = {"step_norm": step_norms, "step_cosine": {"mean": [0.5, None], "std": [0.1, None]}}
    figure = figures.plot_loop_dynamics({"groups": [group | {"above_floor": [1.0, 1.0, 0.0]}]}, [[4]])
    norms, cosines = figure.axes
    assert norms.get_lines()[0].get_ydata().tolist() == step_norms["mean"]
    assert cosines.get_lines()[0].get_xdata().tolist() == [1, 2]
    assert [text.get_text() for text in norms.texts] == ["rounding"]
    assert not norms.collections  # no percentiles were recorded
    step_norms |= {"low": [3.0, 1.0, 1e-10], "high": [5.0, 3.0, 1e-8]}
    line = {"groups": [group | {"above_floor": [1.0, 1.0, 0.0]}] * 2}
    axes = figures.plot_loop_dynamics(line, [[4], [5]]).axes
    band = axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (1e-10, 5.0)
    assert axes[0].get_ylim() == axes[1].get_ylim()


def test_a_colour_bar_says_which_checkpoint_a_line_is_of(trained):
    lines = figures.read_geometry(trained / "run" / "geometry.jsonl")
    *panels, bar = figures.plot_cosines(lines, [[1], [2]]).axes
    assert [ax.get_title() for ax in panels] == ["layer 1", "layer 2"]
    assert bar.get_ylabel() == "training step"
    assert [label.get_text() for label in bar.get_yticklabels()][-1] == f"{lines[-1]['step']:,}"


def test_the_training_curve_has_text_and_answers_apart():
    log = [
        {"step": step, "loss": 5.0 / step, "text_loss": 4.0 / step, "answers_loss": 1.0 / step} for step in (1, 2, 3)
    ]
    log += [
        {"step": step, "eval_text_loss": 4.0, "eval_tasks_accuracy": 0.5, "eval_tasks_loss": 1.0} for step in (2, 3)
    ]
    losses, shares = figures.plot_training(log, has_task=True).axes
    assert [line.get_label() for line in losses.get_lines()] == [
        "training, text", "training, answers", "validation, text", "validation, answers",
    ]  # fmt: skip
    assert shares.get_lines()[0].get_ydata().tolist() == [0.5, 0.5]
    text_alone = [{"step": step, "loss": 5.0 / step, "eval_loss": 4.0, "eval_accuracy": 0.3} for step in (1, 2)]
    (ax,) = figures.plot_training(text_alone, has_task=False).axes
    assert [line.get_label() for line in ax.get_lines()] == ["training, all", "validation"]
    assert figures.plot_training([{"step": 3, "train_runtime": 1.0}], has_task=False) is None


def test_the_command_draws_what_it_is_given(trained, tmp_path, capsys):
    figures.main(["--geometry", str(trained / "run" / "geometry.jsonl"), "--output", str(tmp_path)])
    assert {path.stem for path in tmp_path.glob("*.png")} == {"loop_dynamics", "cosines", "drift"}
    (tmp_path / "sweep").mkdir()
    lines = [result.to_json() for result in made_up_results()]
    (tmp_path / "sweep" / "tradeoff.jsonl").write_text("\n".join(lines) + "\n")
    figures.main(["--tradeoff", str(tmp_path / "sweep"), "--output", str(tmp_path / "more")])
    assert {path.stem for path in (tmp_path / "more").glob("*.png")} == {
        "exit_policies", "fair_comparison", "against_fixed",
    }  # fmt: skip


def test_the_folder_of_a_report_will_do(trained, tmp_path):
    write_trajectories(trained / "run", "The number 5 comes before 6.", tmp_path / "trajectories", 6)
    lines = figures.read_geometry(trained / "run" / "geometry.jsonl")
    results = [json.loads(result.to_json()) for result in made_up_results()]
    report = {"geometry_over_training": lines, "geometry": lines[-1], "groups": [[1], [2]],
              "sources": [{"name": "a", "results": [results, results]}]}  # fmt: skip
    (tmp_path / "report.json").write_text(json.dumps(report))
    figures.main(["--report", str(tmp_path), "--output", str(tmp_path / "all")])
    assert {path.stem for path in (tmp_path / "all").glob("*.png")} == WITH_TRAINING
    figures.main(["--tradeoff", str(tmp_path), "--output", str(tmp_path / "some")])
    assert {path.stem for path in (tmp_path / "some").glob("*.png")} == {
        "exit_policies", "fair_comparison", "against_fixed",
    }  # fmt: skip


def test_what_was_not_measured_has_no_panel(tmp_path):
    results = made_up_results()
    for result in results:
        result.ms_per_token.clear()
    assert [ax.get_ylabel() for ax in figures.plot_exit_policies(results).axes] == [
        "perplexity", "cross-entropy (nats)",
    ]  # fmt: skip
    assert len(figures.plot_fair_comparison(results).axes) == 1
    fixed = [result for result in results if result.setting.rule == "fixed"]
    assert set(figures.draw_figures(tmp_path, results=fixed)) == {"fair_comparison"}
    for figure in (figures.plot_exit_policies(made_up_results()), figures.plot_fair_comparison(made_up_results())):
        assert all(ax.get_lines() for ax in figure.axes)


def test_bad_input_is_named(tmp_path):
    with pytest.raises(ValueError, match="nothing to draw"):
        figures.main(["--output", str(tmp_path)])
    with pytest.raises(FileNotFoundError, match=r"`--tradeoff` is .*nowhere"):
        figures.main(["--tradeoff", str(tmp_path / "nowhere"), "--output", str(tmp_path)])
    with pytest.raises(ValueError, match="has no results"):
        figures.main(["--tradeoff", str(tmp_path), "--output", str(tmp_path)])
    with pytest.raises(FileNotFoundError, match=r"has no report\.json"):
        figures.main(["--report", str(tmp_path), "--output", str(tmp_path)])
    (tmp_path / "geometry.jsonl").write_text("")
    with pytest.raises(ValueError, match="has no measurements"):
        figures.main(["--geometry", str(tmp_path / "geometry.jsonl"), "--output", str(tmp_path)])


def test_geometry_is_read_in_the_order_of_training(tmp_path):
    lines = [json.dumps({"step": step}) for step in (4, 0, 2)]
    (tmp_path / "geometry.jsonl").write_text("\n".join(lines))
    assert [line["step"] for line in figures.read_geometry(tmp_path / "geometry.jsonl")] == [0, 2, 4]
