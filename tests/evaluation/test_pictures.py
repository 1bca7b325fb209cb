from html.parser import HTMLParser
from xml.etree import ElementTree

import pandas as pd
import pytest
import torch

from evaluation.exit_search import find_rules
from evaluation.lens import lens_table
from evaluation.loop_by_loop import Line
from evaluation.pictures import (
    Point,
    ShownToken,
    _styles_of,
    draw_answers,
    draw_curves,
    draw_legend,
    draw_lens,
    draw_path,
    draw_tokens,
    draw_tradeoff,
    escaped,
    shown_token,
    strength,
)
from evaluation.token_path import follow_token
from recurrent_gpt2 import KLExit, StepNormExit
from tests.helpers import random_ids, tiny_model

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)',
    "' autofocus onfocus='alert(1)",
    "</title></svg><svg onload=alert(1)>",
    "${alert(1)}",
    "{{constructor}}",
    "`@children`",
    "&lt;b&gt;",
]


class Seen(HTMLParser):
    """Tags, attributes and text of a page, as a browser would take them."""

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.attributes, self.text = set(), set(), ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_from_a_text_or_a_model_is_markup_or_a_template(text):
    columns = ["group", "step", "rank", "token", "id", "probability", "taken"]
    pages = {}
    for word in (text, "word"):
        pages[word] = [
            draw_tokens([ShownToken(word, [2], 2.0), ShownToken(word, None, None)], 8),
            draw_lens(pd.DataFrame([(0, 1, 0, word, 7, 0.5, True)], columns=columns), word, [word]),
            draw_answers([Line(word, word, 1, 1, [word])], word),
            draw_tradeoff([Point("kl", word, 2.0, 3.0), Point("fixed", word, 2.0, 2.0, True)]),
            draw_tradeoff([Point(word, "", 2.0, 3.0)]),
        ]
    shapes = {"circle", "polygon"}, {"cx", "cy", "r", "points"}  # a rule's own
    for hostile, harmless in zip(pages[text], pages["word"], strict=True):
        seen, expected = Seen(hostile), Seen(harmless)
        assert seen.tags <= expected.tags | shapes[0]
        assert seen.attributes <= expected.attributes | shapes[1]
        assert shown_token(text) in seen.text or text in seen.text  # comes out as it went in
        assert not set("`$@{}") & set(hostile)


def test_escaping_comes_back_as_the_same_text():
    for text in HOSTILE:
        assert Seen(f"<p>{escaped(text)}</p>").text == text


def test_more_loops_are_stronger_up_to_the_cap():
    values = [strength(loops, 24) for loops in (1, 1.5, 2, 3, 8, 24)]
    assert values == sorted(values)
    assert (values[0], values[-1]) == (0.0, 1.0)
    assert strength(1, 1) == 0.0
    assert draw_legend(24).count("lv-chip") == 9
    assert ">5<" in draw_legend(5)


def test_a_text_has_a_button_for_every_token_that_was_predicted():
    tokens = [ShownToken("The", None, None, True), ShownToken(" cat\n", [2, 4], 3.0), ShownToken(" sat", [1, 1], 1.0)]
    page = draw_tokens(tokens, 8, chosen=1, parts_at=2)
    assert page.count("data-token") == 2
    assert 'title="3 loops (group 0: 2, group 1: 4)"' in page
    assert page.count("lv-chosen") == page.count("lv-parts") == 1
    assert Seen(page).text == "The cat⏎\n sat"


def test_a_value_lights_up_when_it_is_known_and_rests_when_it_has_left():
    line = Line("x2 = x0 + x1", "4", needs=2, took=3, said=["1", "4", "4", "4"])
    assert (line.is_right, line.known_after) == (True, 2)
    page = draw_answers([line])
    kinds = [kind for kind in ("lv-guess", "lv-known", "lv-rest") for _ in range(page.count(f"lv-cell {kind}"))]
    assert sorted(kinds) == sorted(
        ["lv-guess", "lv-known", "lv-known", "lv-rest", *("lv-guess", "lv-known", "lv-rest")]
    )
    assert 'data-known="2"' in page
    wrong = Line("x3 = 1", "1", needs=0, took=2, said=["1", "5"])
    assert (wrong.is_right, wrong.known_after) == (False, None)
    assert "✗ (1)" in draw_answers([wrong])


@pytest.mark.parametrize("policy", [None, StepNormExit(3.0), [None, KLExit(0.3), StepNormExit(3.0)]])
def test_drawings_are_well_formed_and_have_every_step(policy, tokenizer):
    model, loops = tiny_model(0.3), [3, 5, 4]
    path, seen = follow_token(model, random_ids(1, 9)[0], 6, policy, loops)
    drawn = ElementTree.fromstring(draw_path(path))
    # Every state, enlarged again but for the start, and the numbers of the first steps.
    assert len(drawn.findall(".//*[@data-k]")) == sum((count + 1) + count + min(count, 3) for count in loops)
    assert f"left after {path.steps[0]}" in "".join(drawn.itertext())
    curves = ElementTree.fromstring(draw_curves(path))
    assert len(curves.findall("figure")) == 3
    assert "".join(curves.itertext()).count("threshold of") == sum(c.threshold is not None for c in path.curves)
    table = lens_table(seen, tokenizer, 2, "leave")
    lens = Seen(draw_lens(table))
    assert lens.text.count("likeliest") == 3
    points = [Point("fixed", "1", 1.0, 3.0), Point("mine", "2", 2.0, 2.0), Point("own", "", 1.5, 2.5, True)]
    assert "the checkpoint's own" in "".join(ElementTree.fromstring(draw_tradeoff(points)).itertext())


def test_no_two_rules_look_the_same():
    rules = [rule.label for rule in find_rules(and_registered=True)] + [f"mine {number}" for number in range(6)]
    styles = _styles_of(["fixed", *rules])
    assert len(set(styles.values())) == len(rules) + 1


def test_a_model_that_moves_no_more_is_drawn_too():
    path, _ = follow_token(tiny_model(num_loops=1), torch.tensor([3]), 0, None, [1, 1, 1])
    ElementTree.fromstring(draw_path(path))
    ElementTree.fromstring(draw_curves(path))
