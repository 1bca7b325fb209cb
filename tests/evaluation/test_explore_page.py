"""The page in a real browser, which reaches nothing but this machine."""

import re
import shutil
from urllib.parse import urlparse

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.browser

NAMES = [f"recurrent-gpt2-{kind}" for kind in ("mini", "chains", "programs")]
SLOW = 120_000  # ms, for a machine that does other things too
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
HOSTILE = '<img src=x onerror="window.broken=1"> ${window.broken=1} {{value}} <b>bold</b>'


@pytest.fixture(scope="module")
def address():
    from evaluation.explore.app import launch
    from evaluation.explore.workbench import Workbench

    workbench = Workbench([str(ROOT / "checkpoints" / name) for name in NAMES])
    app, url, _ = launch(workbench, prevent_thread_lock=True, quiet=True)
    yield url
    app.blocks.close()


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


class Visitor:
    """A page of its own, with what went wrong on it and what it asked for elsewhere."""

    def __init__(self, browser, address, viewport=DESKTOP, theme="light"):
        self.context = browser.new_context(viewport=viewport, color_scheme=theme, reduced_motion="reduce")
        self.page = self.context.new_page()
        self.page.set_default_timeout(SLOW)
        self.problems, self.elsewhere = [], []
        self.page.on("console", lambda message: self.problems.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.context.route("**/*", self._only_here)
        self.page.goto(f"{address}?__theme={theme}")
        self.page.wait_for_selector("#answers table")

    def _only_here(self, route):
        if urlparse(route.request.url).hostname in ("127.0.0.1", None):
            return route.continue_()
        self.elsewhere.append(route.request.url)
        return route.abort()

    def tab(self, name):
        self.page.get_by_role("tab", name=name).click()

    def field(self, label):
        return self.page.get_by_label(re.compile(rf"^\s*{label}\b")).locator("visible=true")

    def choose(self, label, option):
        self.field(label).click()
        self.page.get_by_role("option", name=option, exact=True).click()

    def generate(self, prompt, new_tokens=12):
        self.field("Prompt").fill(prompt)
        self.page.get_by_label("number input for New tokens").fill(str(new_tokens))
        self.press("Generate")
        self.wait_until("#numbers-fixed", r"parts at|the same text")

    def press(self, name):
        """A button; what was shown before is gone first, so that nothing old is taken for new."""
        self.page.evaluate("document.querySelectorAll('.lv-numbers, #compared .lv').forEach(old => old.remove())")
        self.page.get_by_role("button", name=name, exact=True).click()

    def wait_until(self, selector, pattern):
        self.page.wait_for_function(
            "([selector, pattern]) => new RegExp(pattern).test(document.querySelector(selector)?.innerText ?? '')",
            arg=[selector, pattern],
        )

    def changed(self, selector, before=None):
        """What is in an element, once that is something else than before; empty where there is no such element yet."""
        if before is not None:
            self.page.wait_for_function(
                "([selector, before]) => ![undefined, before].includes(document.querySelector(selector)?.outerHTML)",
                arg=[selector, before],
            )
        return self.page.evaluate("selector => document.querySelector(selector)?.outerHTML ?? ''", selector)

    def tokens(self, panel="policy"):
        """Text, loops and colour of every token that was predicted."""
        return self.page.evaluate(
            """panel => [...document.querySelectorAll(`#text-${panel} [data-token]`)].map(token =>
               [token.textContent, token.dataset.loops, getComputedStyle(token).backgroundColor])""",
            panel,
        )

    def check(self):
        assert self.problems == []
        assert self.elsewhere == []
        self.context.close()


@pytest.fixture
def visitor(browser, address):
    visitor = Visitor(browser, address)
    yield visitor
    visitor.context.close()


def test_the_page_opens_on_a_program_that_is_answered_loop_by_loop(visitor):
    page = visitor.page
    assert page.title() == "Watch a model think"
    rows = page.locator("#answers tbody tr")
    assert rows.count() == 14
    assert "14 of 14 right" in page.locator("#answers").inner_text()
    lit = []
    slider = page.locator("#answers .lv-slider")
    for loop in range(1, int(slider.get_attribute("max")) + 1):
        slider.fill(str(loop))
        assert page.locator("#answers td[data-k]:visible").count() > 0
        assert page.locator(f"#answers td[data-k='{loop + 1}'].lv-later").count() in (0, 14)
        lit.append(page.locator("#answers tr.lv-now").count())
    assert lit == sorted(lit)  # level by level
    assert lit[0] < 10
    assert lit[-1] == 14
    assert len(set(lit)) > 4
    visitor.field("Program").fill("x0 = 6\nx1 = x0 + x0")
    visitor.press("Answer")
    visitor.wait_until("#answers", "2 of 2 right")
    page.get_by_text("a c @0 @1 @2 @4").click()  # an example, of another checkpoint
    visitor.wait_until("#answers", "13 of 13 right")
    visitor.check()


def test_it_plays_by_itself_unless_motion_is_unwelcome(browser, address):
    visitor = Visitor(browser, address)
    page = visitor.page
    page.locator("#answers .lv-play").click()
    visitor.wait_until("#answers .lv-at", "^2 of")
    visitor.wait_until("#answers .lv-at", r"^(\d+) of \1$")
    visitor.check()


def test_text_streams_with_its_loops_and_a_click_shows_how_a_token_came_about(visitor):
    page = visitor.page
    visitor.tab("Generate")
    page.evaluate(
        """() => { window.lengths = []; new MutationObserver(() => lengths.push(
           document.querySelectorAll('#text-policy .lv-new').length)).observe(
           document.querySelector('#text-policy'), {childList: true, subtree: true}); }"""
    )
    visitor.generate("Return the number of", 24)
    assert len(set(page.evaluate("window.lengths"))) > 3  # it came in parts
    tokens = visitor.tokens()
    assert all(float(loops) >= 1 for _, loops, _ in tokens)
    assert len(visitor.tokens("fixed")) >= 20
    assert re.search(r"loops in the mean; [\d.]+ ms/token", page.locator("#numbers-policy").inner_text())
    views = [visitor.changed("#token-view .lv-token-view")]
    for place in (3, 8):
        page.locator("#text-policy .lv-new").nth(place).click()
        views.append(visitor.changed("#token-view .lv-token-view", views[-1]))
    for pattern in ("lv-drawing.*?</svg>", "lv-heat.*"):
        first, second = (re.search(pattern, view, re.DOTALL)[0] for view in views[1:])
        assert first != second
    slider = page.locator("#token-view .lv-slider")
    shown = page.locator("#token-view svg [data-k]:not(.lv-later)")
    everything = shown.count()
    slider.fill("1")
    assert 0 < shown.count() < everything
    assert page.locator("#token-view tr.lv-at-step th").first.inner_text() == "1"
    page.get_by_label("head", exact=True).check()  # the same here: the looped layer of this model is its last
    page.locator("#text-fixed .lv-new").nth(2).focus()
    before = visitor.changed("#token-view .lv-drawing")
    page.keyboard.press("Enter")
    visitor.changed("#token-view .lv-drawing", before)
    visitor.check()


def test_another_policy_changes_colours_and_steps_and_a_bad_setting_is_a_sentence(visitor):
    page = visitor.page
    visitor.tab("Generate")
    visitor.generate("The first argument is a")
    first = visitor.tokens()
    visitor.choose("Exit policy", "acceleration")
    visitor.field("threshold").fill("0.0001")
    visitor.choose("normalize", "state")
    visitor.field("Most loops").fill("9")
    visitor.generate("The first argument is a")
    second = visitor.tokens()
    for place in (1, 2):
        assert [token[place] for token in first] != [token[place] for token in second]
    visitor.field("threshold").fill("-3")
    visitor.press("Generate")
    problem = page.locator("#text-policy [role=alert]")
    problem.wait_for()
    assert problem.inner_text() == "`threshold` of AccelerationExit is -3, but must be a finite number >= 0."
    visitor.field("threshold").fill("1")
    visitor.field("Most loops").fill("lots")
    visitor.press("Generate")
    visitor.wait_until("#text-policy [role=alert]", "the most loops are 'lots'")
    visitor.choose("Exit policy", "the checkpoint's own")
    visitor.field("Most loops").fill("")
    visitor.field("Checkpoint").fill("/etc")
    page.keyboard.press("Enter")
    visitor.press("Generate")
    visitor.wait_until("#text-policy [role=alert]", "owner/name on the Hub")
    assert "Traceback" not in page.content()
    visitor.check()


def test_nothing_that_is_typed_is_run_or_becomes_markup(visitor):
    page = visitor.page
    visitor.field("Program").fill(HOSTILE)
    visitor.press("Answer")
    visitor.wait_until("#answers", "must read like")
    assert HOSTILE in page.locator("#answers").inner_text()
    visitor.tab("Generate")
    visitor.generate(HOSTILE, 3)
    assert HOSTILE in page.locator("#text-policy .lv-text").inner_text()
    page.locator("#text-policy .lv-prompt[data-token]").nth(4).click()
    page.wait_for_selector("#token-view .lv-drawing")
    visitor.tab("Policies")
    visitor.field("Text").fill(HOSTILE)
    visitor.press("Compare")
    visitor.wait_until("#compared", "the checkpoint's own")
    assert page.evaluate("window.broken") is None
    assert page.locator("#answers img, #text-policy img, #text-policy b, #token-view img, #compared img").count() == 0
    visitor.check()


def test_two_visitors_at_once_get_their_own_results(browser, address):
    visitors = {prompt: Visitor(browser, address) for prompt in ("Return the number of", "If the file does not exist,")}
    for visitor in visitors.values():
        visitor.tab("Generate")
        visitor.page.get_by_label("number input for New tokens").fill("20")
    for prompt, visitor in visitors.items():
        visitor.field("Prompt").fill(prompt)
    for visitor in visitors.values():  # neither waits for the other
        visitor.press("Generate")
    texts = []
    for prompt, visitor in visitors.items():
        visitor.wait_until("#numbers-fixed", r"parts at|the same text")
        texts.append(visitor.page.locator("#text-policy .lv-text").inner_text())
        assert texts[-1].startswith(prompt)
    assert texts[0] != texts[1]
    for visitor in visitors.values():
        token = visitor.page.locator("#text-policy .lv-new").nth(5)
        said = token.inner_text().replace("\n", "").replace(" ", "␣")
        token.click()
        visitor.wait_until("#token-view", re.escape(f"How {said} was predicted"))
        visitor.check()


def test_policies_stand_side_by_side_on_a_pasted_text(visitor):
    page = visitor.page
    visitor.tab("Policies")
    visitor.press("Compare")
    visitor.wait_until("#compared", "step_norm/state")
    assert page.locator("#compared .lv-own").count() == 1
    page.get_by_text("All settings").click()
    assert "★" in page.locator("#compared table").inner_text()
    visitor.check()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("width", "viewport"), [("desktop", DESKTOP), ("phone", PHONE)])
def test_it_fits_and_can_be_read_at_every_width_in_light_and_dark(
    browser, address, tmp_path_factory, width, viewport, theme
):
    visitor = Visitor(browser, address, viewport, theme)
    page, folder = visitor.page, tmp_path_factory.getbasetemp() / "screenshots"
    folder.mkdir(exist_ok=True)

    def look(name):
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
        page.screenshot(path=folder / f"{name}-{width}-{theme}.png", full_page=True)

    look("difficulty")
    visitor.tab("Generate")
    visitor.generate("Return the number of", 24)
    page.locator("#text-policy .lv-new").nth(3).click()
    page.wait_for_selector("#token-view .lv-drawing")
    look("generate")
    visitor.tab("Policies")
    visitor.press("Compare")
    visitor.wait_until("#compared", "step_norm/state")
    look("compare")
    assert page.evaluate("document.body.classList.contains('dark')") == (theme == "dark")
    visitor.tab("Generate")
    for selector in (
        "#text-policy .lv-new",
        "#text-fixed .lv-new",
        ".lv-chip",
        "#token-view .lv-heat tr:not(.lv-untaken) td",
    ):
        assert min(contrasts(page, selector)) >= 4.5, selector
    visitor.tab("Steps against difficulty")
    assert min(contrasts(page, "#answers .lv-known")) >= 4.5
    visitor.check()


def contrasts(page, selector):
    """The contrast (WCAG) of text and what is behind it, for all that match."""
    return page.evaluate(
        """selector => {
          const parse = (color) => {
            const numbers = color.match(/[\\d.]+/g).map(Number);
            return [...numbers.slice(0, 3), numbers[3] ?? 1];
          };
          const over = (top, below) => top.slice(0, 3).map((c, i) => c * top[3] + below[i] * (1 - top[3]));
          const linear = (c) => c <= .03928 * 255 ? c / 255 / 12.92 : ((c / 255 + .055) / 1.055) ** 2.4;
          const light = ([r, g, b]) => .2126 * linear(r) + .7152 * linear(g) + .0722 * linear(b);
          const behind = (element) => {
            if (!element) return [255, 255, 255];
            const color = parse(getComputedStyle(element).backgroundColor);
            return color[3] === 1 ? color : over(color, behind(element.parentElement));
          };
          return [...document.querySelectorAll(selector)].map(element => {
            const below = behind(element);
            const [a, b] = [light(over(parse(getComputedStyle(element).color), below)), light(below)];
            return (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
          });
        }""",
        selector,
    )
