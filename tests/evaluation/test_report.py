import json
import re
import shutil

import numpy as np
import pytest
import torch

from evaluation import exit_tradeoff, report
from evaluation.advice import advice_line, advice_text, choose
from evaluation.common import load_checkpoint
from evaluation.exit_tradeoff import pool, score
from evaluation.figures import read_sources
from evaluation.observations import continue_blocks, depth_headroom, last_step_cost, token_depths
from evaluation.study.claims import check_claims
from recurrent_gpt2 import LoopCache
from tests.evaluation.test_exit_tradeoff import result_of
from tests.helpers import random_ids, tiny_model
from tests.training.runs import TEXT

SMALL = ["--num_loops", "4", "--depths", "1", "2", "--blocks", "2", "--rounds", "1", "--samples", "1", "--rules",
         "step_norm", "acceleration", "kl", "--thresholds", "1e-5", "1e-4", "1e-3", "1e-2", "2.0"]  # fmt: skip


@pytest.fixture(scope="module")
def written(trained, tmp_path_factory):
    output = tmp_path_factory.mktemp("report")
    shutil.copy(trained / "texts.jsonl", output / "other.jsonl")
    sources = ["--source", str(trained / "texts.jsonl"), str(output / "other.jsonl")]
    report.main([str(trained / "run"), "--output", str(output), "--seeds", "2", *sources, *SMALL])
    return output


def test_a_report_has_all_sections_tables_and_figures(written):
    numbers = json.loads((written / "report.json").read_text())
    page, text = (written / "report.html").read_text(), (written / "report.md").read_text()
    figures = {path.stem: path for path in (written / "figures").glob("*.png")}
    for section in report.sections_of(numbers, figures):
        assert f"## {section.title}" in text
        assert f'id="{section.anchor}"' in page
        assert section.title.replace("'", "&#39;") in page
        for table in section.tables:
            assert table.markdown() in text
    assert page.count("data:image/png;base64,") == len(figures) == 8
    for link in re.findall(r"\]\((.*?\.png)\)", text):
        assert (written / link).exists()


def test_two_tokens_are_followed_through_their_loops(written):
    numbers = json.loads((written / "report.json").read_text())
    page, text = (written / "report.html").read_text(), (written / "report.md").read_text()
    groups = len(numbers["groups"])
    assert page.count('class="lv lv-drawing"') == 2 * (1 + groups)  # a path, and the curves of every group
    assert page.count('class="lv-heat"') == 2 * groups
    fewest, most = (sum(token["path"]["steps"]) for token in numbers["followed"])
    assert fewest <= most
    assert text.count("(in brackets: not taken)") == 2
    assert report.followed_section({}, {}) == []


def test_a_page_needs_nothing_else(written):
    page = (written / "report.html").read_text()
    for reference in re.findall(r'(?:src|href)="(.*?)"', page):
        assert reference.startswith(("data:", "#"))
    assert "<script" not in page


def test_a_page_leads_with_advice_and_then_says_what_it_has(written):
    page, text = (written / "report.html").read_text(), (written / "report.md").read_text()
    titles = re.findall(r"^## (.*)", text, re.MULTILINE)
    assert titles[:5] == ["Advice", "Training", "Exit rules", "Samples", "The paper's claims"]
    assert text.index("## Advice") < text.index("Contents:") < text.index("## Training")
    assert page.index("<nav>") > page.index(">Advice<")
    anchors = re.findall(r'href="#(.*?)"', page)
    assert len(anchors) == len(titles) - 1
    assert all(f'<h2 id="{anchor}">' in page for anchor in anchors)
    assert 'class="legend"' in page


def test_the_line_of_the_advice_runs_and_costs_what_it_says(written, trained):
    advice = json.loads((written / "report.json").read_text())["advice"]
    line = advice_line(advice)
    assert line in (written / "report.md").read_text()
    model, _ = load_checkpoint(trained / "run")
    model.generation_config.max_new_tokens = 3
    assert eval(line, {"model": model, "ids": random_ids(1, 5)}).shape[1] > 5
    measured = advice["measured"]["text"]
    assert measured["full"]["mean_steps"] == 4  # the cap
    assert measured["with_it"]["loss"] - measured["full"]["loss"] < 0.02  # what is within 0.01 nats of the best
    assert measured["with_it"]["flops"] <= measured["full"]["flops"]
    assert advice["chosen_by"] == "sweep"
    assert "Nothing is promised" in advice_text(advice, "texts")


def test_a_promise_comes_before_what_was_chosen_without_one(tmp_path):
    results = [result_of("fixed", 4, [1.0]), result_of("kl", 3.0, [1.0], '{"name": "kl"}')]
    assert choose(str(tmp_path), results, 9)["chosen_by"] == "sweep"
    row = {"threshold": 0.1, "difference": -0.02}
    chosen = {"step_norm/state": row, "kl": None, "step_norm/state x3": row | {"difference": -0.01}}
    (tmp_path / "mixture.json").write_text(json.dumps({"chosen": chosen, "cap": 16, "full": 10}))
    found = choose(str(tmp_path), results, 9)
    assert (found["chosen_by"], found["num_loops"], found["full"]) == ("mixture", 16, 10)
    assert found["exit_policy"]["name"] == "step_norm"
    assert found["exit_policy"]["threshold"] == 0.1
    promise = {"source": "a", "sequence_length": 8, "calibration_sequences": 40, "measure": "nats", "budget": 0.01,
               "clip": 0.1, "p_value": 0.01}  # fmt: skip
    promised = {"exit_policy": {"name": "kl", "threshold": 0.2}, "num_loops": [12], "full_loops": [12],
                "confidence": 0.95, "promises": [promise]}  # fmt: skip
    (tmp_path / "calibration.json").write_text(json.dumps(promised))
    assert choose(str(tmp_path), results, 9) == {
        "exit_policy": {"name": "kl", "threshold": 0.2}, "num_loops": [12], "full": [12], "chosen_by": "calibrate",
    }  # fmt: skip
    promise["p_value"] = None  # nothing cheaper could be promised
    (tmp_path / "calibration.json").write_text(json.dumps(promised))
    assert choose(str(tmp_path), results, 9)["chosen_by"] == "mixture"


def test_claims_are_those_of_the_numbers(written):
    numbers = json.loads((written / "report.json").read_text())
    results = pool(next(iter(read_sources(numbers).values())))
    assert [
        vars(claim) for claim in check_claims(numbers["geometry"], numbers["geometry_over_training"], results)
    ] == numbers["claims"]
    assert len(numbers["claims"]) >= 8


def test_seeds_have_their_own_noise_and_their_own_text(written, trained):
    numbers = json.loads((written / "report.json").read_text())
    first, second = list(read_sources(numbers).values())[1]
    assert first[0].sequence_losses != second[0].sequence_losses
    model, tokenizer = load_checkpoint(trained / "run")
    settings = report.Settings([str(trained / "texts.jsonl")], written, blocks=2, seeds=2)
    blocks = report.blocks_by_seed(str(trained / "texts.jsonl"), tokenizer, settings, 32)
    assert not torch.equal(blocks[0], blocks[1])
    before = model(blocks[0], num_loops=1).logits
    report.use_seed(model, 7)
    assert not torch.allclose(model(blocks[0], num_loops=1).logits, before)
    report.use_seed(model, 0)
    assert torch.equal(model(blocks[0], num_loops=1).logits, before)


def test_an_interrupted_report_repeats_no_sweep(written, trained, tmp_path, monkeypatch):
    shutil.copytree(written, tmp_path / "again")

    def scored(model, blocks, setting, batch_size):
        assert setting.rule == "default", "scored again"
        return score(model, blocks, setting, batch_size)

    monkeypatch.setattr(exit_tradeoff, "score", scored)
    sources = ["--source", str(trained / "texts.jsonl"), str(written / "other.jsonl")]
    report.main([str(trained / "run"), "--output", str(tmp_path / "again"), "--seeds", "2", *sources, *SMALL])


def test_what_a_card_is_made_from_is_written(written):
    rows = json.loads((written / "results.json").read_text())
    first = json.loads((written / "report.json").read_text())["sources"][0]["name"]
    assert {row["dataset"] for row in rows} == {first}
    assert (written / "tradeoff.png").read_bytes().startswith(b"\x89PNG")


def test_the_small_cache_is_decoded_and_the_exact_one_is_not_needed():
    model, blocks = tiny_model(0.3, torch.float64), random_ids(2, 12)
    cost = last_step_cost(model, blocks)
    caches, losses = {name: LoopCache(model.config, name) for name in ("per_step", "last_step")}, {}
    with torch.no_grad():
        for name, cache in caches.items():
            logits = [model(blocks[:, t : t + 1], past_key_values=cache).logits for t in range(11)]
            shifted = torch.cat(logits, 1).transpose(1, 2)
            losses[name] = torch.nn.functional.cross_entropy(shifted, blocks[:, 1:]).item()
    assert cost.per_step_loss == pytest.approx(losses["per_step"])
    assert cost.last_step_loss == pytest.approx(losses["last_step"])
    assert cost.last_step_loss != pytest.approx(losses["per_step"], abs=1e-4)
    per_layer = 2 * 11 * model.config.hidden_size * 8
    assert cost.last_step_bytes == 6 * per_layer
    assert cost.per_step_bytes == (2 + 4 * 5) * per_layer


def test_a_perfect_choice_of_depth_is_never_worse_than_fixed_depth_and_costs_nothing_at_full_depth():
    model, blocks = tiny_model(0.3), random_ids(3, 12)
    found = depth_headroom(model, blocks, most=6)
    with torch.no_grad():
        full, two = (model(blocks, num_loops=count).logits.log_softmax(-1) for count in (6, 2))
    expected = torch.nn.functional.kl_div(two, full, log_target=True, reduction="none").sum(-1).mean().item()
    assert found["fixed"][1] == pytest.approx(expected, rel=1e-4)
    assert found["fixed"][-1] == pytest.approx(0, abs=1e-6)
    for point in found["chosen"]:
        fixed = np.interp(point["mean_steps"], range(1, 7), found["fixed"])
        assert point["kl"] <= fixed + 1e-9
    assert [point["mean_steps"] for point in found["chosen"]] == sorted(p["mean_steps"] for p in found["chosen"])


def test_token_types_are_ranked_by_their_own_steps(tokenizer):
    model, blocks = tiny_model(0.3), random_ids(6, 20, vocab_size=12)
    policy = {"name": "step_norm", "threshold": 2.0}
    ranked = token_depths(model, tokenizer, blocks, policy, 5, least_count=1)
    loop_steps = model(blocks, exit_policy=policy, num_loops=5).loop_steps.float()
    layers = [len(group) for group in model.config.loop_groups]
    steps = sum(loop_steps[..., group] * count for group, count in enumerate(layers)) / sum(layers)
    assert [depth.mean_steps for depth in ranked] == sorted(depth.mean_steps for depth in ranked)
    assert sum(depth.count for depth in ranked) == blocks.numel()
    slowest = max(blocks.unique().tolist(), key=lambda token: steps[blocks == token].mean().item())
    assert ranked[-1].mean_steps == pytest.approx(steps[blocks == slowest].mean().item())


def test_what_is_shown_is_what_generate_would_do():
    model = tiny_model(num_loops=4)
    results = [result_of("fixed", 4, [1.0]), result_of("kl", 3.0, [1.0], '{"name": "kl"}')]
    assert report.loops_to_show(model, results, None) == {"exit_policy": {"name": "kl"}, "num_loops": [9, 9, 9]}
    assert report.loops_to_show(model, results[:1], None) == {"exit_policy": None, "num_loops": [4, 4, 4]}
    model.generation_config.exit_policy, model.generation_config.num_loops = "step_norm", [2, 6, 3]
    assert report.loops_to_show(model, results, None) == {"exit_policy": "step_norm", "num_loops": [2, 6, 3]}
    assert report.loops_to_show(model, results, 7) == {"exit_policy": "step_norm", "num_loops": [7, 7, 7]}
    assert exit_tradeoff.cap_of(model) == 6
    assert exit_tradeoff.cap_of(tiny_model(num_loops=4)) == exit_tradeoff.CAP


def test_a_report_says_which_policy_it_was(written):
    numbers, text = json.loads((written / "report.json").read_text()), (written / "report.md").read_text()
    assert "unless told otherwise (2 fixed loops): cross-entropy" in text
    assert text.count(f"nder {numbers['loops']}") == 4  # caches, tokens, samples, two that are followed
    assert numbers["default"]["mean_steps"] == [2, 2]


def test_samples_do_not_share_a_seed(tokenizer):
    """The same prompt twice, continued at random."""
    model, row = tiny_model(), random_ids(1, 12)
    arguments = {"exit_policy": None, "num_loops": 3, "new_tokens": 12}
    first, second = continue_blocks(model, tokenizer, torch.cat([row, row]), **arguments)
    assert first.prompt == second.prompt
    assert first.tokens != second.tokens
    again = continue_blocks(model, tokenizer, torch.cat([row, row]), **arguments)
    assert [sample.tokens for sample in again] == [first.tokens, second.tokens]


def test_bad_input_is_named(trained, tmp_path):
    output = ["--output", str(tmp_path)]
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        report.main([str(tmp_path / "nowhere"), *output])
    with pytest.raises(ValueError, match="`--rules` has 'speed'"):
        report.main([str(trained / "run"), *output, "--rules", "speed", "--source", str(trained / "texts.jsonl")])
    (tmp_path / "short.txt").write_text(TEXT[:20])
    with pytest.raises(ValueError, match="no full block"):
        report.main([str(trained / "run"), *output, "--source", str(tmp_path / "short.txt")])


@pytest.mark.browser
def test_the_page_opens_in_a_browser_without_a_network(written):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        context = browser.new_context(offline=True)
        page, problems, requests = context.new_page(), [], []
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto((written / "report.html").as_uri())
        images = page.locator("img")
        assert images.count() == 8
        for place in range(images.count()):
            image = images.nth(place)
            image.scroll_into_view_if_needed()
            assert image.is_visible()
            assert image.evaluate("image => image.complete && image.naturalWidth") > 300
            assert image.bounding_box()["height"] > 100
        screenshot = written / "screenshot.png"
        page.screenshot(path=screenshot, full_page=True)
        assert screenshot.stat().st_size > 50_000
        assert problems == []
        assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
        browser.close()
