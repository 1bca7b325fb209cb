"""Pictures of loops as HTML and SVG, in plain text: for the page of `evaluation.explore` and for the report.

They take what other modules have measured, need no network and no script (`SCRIPT` adds the slider over loop steps),
and follow the colour of the text around them, so that they work on light and dark. What comes from a text or a model is
escaped, here and nowhere else. Colours are from Okabe and Ito's palette, which the colour-blind can tell apart, or
one hue from pale to strong; shapes and numbers say the same.
"""

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from .figures import GROUP_STYLES, RULE_STYLES
from .loop_by_loop import Line
from .token_path import LoopCurves, Stretch, TokenPath

STYLE = (Path(__file__).parent / "templates" / "pictures.css").read_text()
SCRIPT = (Path(__file__).parent / "templates" / "pictures.js").read_text()
# What templates of pages read, beside what HTML does: a text with these must come out as it went in.
TEMPLATE_SIGNS = str.maketrans({"{": "&#123;", "}": "&#125;", "$": "&#36;", "`": "&#96;", "@": "&#64;"})
LEGEND_LOOPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
WIDTH, HEIGHT = 640, 300  # of a drawing, in its own units
ENLARGED = 190  # the width of a loop that is enlarged
OTHER_COLORS = ("#0072B2", "#009E73", "#D55E00", "#CC79A7", "#E69F00", "#999999")  # of rules that have no style
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#E69F00", "#009E73", "#CC79A7"


def escaped(text: object) -> str:
    """Text as HTML in which nothing is a tag, an entity or a template's sign."""
    return html.escape(str(text), quote=True).translate(TEMPLATE_SIGNS)


def shown_token(token: str) -> str:
    """A token, so that blanks and line ends can be seen."""
    return token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣") or "∅"


# Tokens coloured by loops


@dataclass
class ShownToken:
    """A token of a text, and the loops that were spent on predicting it, per group; None: nothing predicted it."""

    text: str
    loops: list[int] | None
    depth: float | None  # their mean over looped layers
    is_prompt: bool = False


def strength(loops: float, most: int) -> float:
    """How strong the colour of so many loops is, from 0 to 1: by their logarithm, the cap being the strongest."""
    return min(1.0, math.log(max(loops, 1.0)) / math.log(most)) if most > 1 else 0.0


def draw_tokens(tokens: Sequence[ShownToken], most: int, chosen: int | None = None, parts_at: int | None = None) -> str:
    """A text with every token coloured by its loops; `parts_at` marks where it parts from another, `chosen` a token."""
    spans = []
    for place, token in enumerate(tokens):
        classes = ["lv-token", "lv-prompt" if token.is_prompt else "lv-new"]
        classes += ["lv-chosen"] * (place == chosen) + ["lv-parts"] * (place == parts_at)
        if token.loops is None or token.depth is None:
            spans.append(f'<span class="{" ".join(classes)} lv-first">{_visible(token.text)}</span>')
            continue
        said = ", ".join(f"group {group}: {count}" for group, count in enumerate(token.loops))
        loops = f"{token.depth:g}" if len(token.loops) > 1 else str(token.loops[0])
        title = f"{loops} loops" + (f" ({said})" if len(token.loops) > 1 else "")
        spans.append(
            f'<span class="{" ".join(classes)}" role="button" tabindex="0" data-token="{place}" '
            f'data-loops="{token.depth:g}" title="{escaped(title)}" '
            f'style="--strength: {strength(token.depth, most):.3f}">{_visible(token.text)}</span>'
        )
    return f'<div class="lv lv-text" translate="no">{"".join(spans)}</div>'


def _visible(text: str) -> str:
    return escaped(text).replace("\n", '<span class="lv-end">⏎</span>\n')


def draw_legend(most: int) -> str:
    """The colours of loops, from one to the cap."""
    counts = sorted({count for count in LEGEND_LOOPS if count < most} | {most})
    chips = "".join(f'<span class="lv-chip" style="--strength: {strength(c, most):.3f}">{c}</span>' for c in counts)
    return f'<div class="lv lv-legend"><span>loops:</span>{chips}</div>'


# A task, loop by loop


def draw_answers(lines: Sequence[Line], note: str = "") -> str:
    """Lines of a task from top to bottom, loops from left to right: values light up when they are known."""
    most = max(len(line.said) for line in lines)
    head = "".join(f'<th data-k="{k}" class="lv-loop">{k}</th>' for k in range(1, most + 1))
    rows = "".join(_answer_row(line, most) for line in lines)
    right = sum(line.is_right for line in lines)
    return (
        f'<div class="lv lv-answers" data-most="{most}">{slider(most, plays=True)}'
        '<div class="lv-legend"><span class="lv-cell lv-known">5</span> known from here on '
        '<span class="lv-cell lv-guess">2</span> not yet <span class="lv-cell lv-rest"></span> has left, costs nothing '
        '<span class="lv-cell lv-needs"></span> the loop at which it could be known</div>'
        f'<div class="lv-scroll"><table><thead><tr><th class="lv-line">line</th><th>needs</th>'
        f'<th>took</th><th class="lv-says">says</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        f'<p class="lv-note">{right} of {len(lines)} right. {escaped(note)}</p></div>'
    )


def _answer_row(line: Line, most: int) -> str:
    cells = []
    for loop in range(1, most + 1):
        has_left = loop > line.took
        is_known = line.known_after is not None and loop >= line.known_after
        kind = ("lv-rest" if has_left else "lv-known" if is_known else "lv-guess") + " lv-lit" * (has_left and is_known)
        needs = " lv-needs" if loop == max(line.needs, 1) else ""
        value = "" if has_left else escaped(line.said[loop - 1])
        cells.append(f'<td data-k="{loop}"><span class="lv-cell {kind}{needs}">{value}</span></td>')
    mark = "✓" if line.is_right else f"✗ ({escaped(line.answer)})"
    missed = "" if line.is_right else ' class="lv-missed"'
    return (
        f'<tr data-known="{line.known_after or ""}"{missed}><th class="lv-line" scope="row">{escaped(line.text)}</th>'
        f'<td>{line.needs}</td><td>{line.took}</td><td class="lv-says">{escaped(line.said[-1])} {mark}</td>'
        f"{''.join(cells)}</tr>"
    )


def slider(most: int, plays: bool = False) -> str:
    button = '<button type="button" class="lv-play">▶ play</button>' if plays else ""
    return (
        f'<div class="lv-bar">{button}<label>loop <input type="range" class="lv-slider" min="1" max="{most}" '
        f'value="{most}"></label><output class="lv-at">{most} of {most}</output></div>'
    )


# The logit lens


def draw_lens(table: pd.DataFrame, said: str | None = None, group_names: Sequence[str] = ()) -> str:
    """A heat map of `lens_table`: a row per step, a column per rank, colour by probability. `said` is outlined."""
    parts = []
    for group, rows in table.groupby("group"):
        ranks = int(rows["rank"].max()) + 1
        head = "".join(f"<th>{'likeliest' if rank == 0 else f'{rank + 1}.'}</th>" for rank in range(ranks))
        body = []
        for step, of_step in rows.groupby("step"):
            taken = bool(of_step.taken.all())
            cells = "".join(_lens_cell(row, row.token == said) for row in of_step.itertuples())
            kind = "" if taken else ' class="lv-untaken" title="not taken: the token had left"'
            body.append(f'<tr data-k="{step}"{kind}><th scope="row">{step}</th>{cells}</tr>')
        name = group_names[group] if group_names else f"group {group}"
        parts.append(
            f'<table class="lv-heat"><caption>{escaped(name)}</caption><thead><tr><th>loop</th>{head}</tr></thead>'
            f"<tbody>{''.join(body)}</tbody></table>"
        )
    shades = "".join(
        f'<span class="lv-chip" style="--strength: {share:.2f}">{share:.0%}</span>'
        for share in (0.05, 0.25, 0.5, 0.75, 1)
    )
    legend = f'<div class="lv-legend"><span>probability:</span>{shades}'
    if said is not None:
        legend += f'<span class="lv-sample">{escaped(shown_token(said))}</span><span>the token that came</span>'
    legend += "<span>pale rows: steps not taken, had it stayed</span></div>"
    return f'<div class="lv lv-lens">{legend}<div class="lv-scroll">{"".join(parts)}</div></div>'


def _lens_cell(row, is_said: bool) -> str:
    return (
        f'<td{" class=lv-said" * is_said} style="--strength: {row.probability:.3f}">'
        f"<span>{escaped(shown_token(row.token))}</span> <small>{row.probability:.2f}</small></td>"
    )


# Drawings


def draw_path(path: TokenPath) -> str:
    """The token's states on two principal components: grey between loops, every loop in its colour, from its start.
    To the right, every loop enlarged, from its first step on."""
    points = [point for stretch in path.stretches for point in stretch.points]
    height, wide = HEIGHT + 40, WIDTH - ENLARGED - 20
    across = _Axis.around([x for x, _ in points], 46, wide - 6)
    up = _Axis.around([y for _, y in points], height - 34, 34)
    ends = [_end_of(stretch, path.steps, across, up) for stretch in path.stretches]
    drawn = [_polyline(ends, "currentColor", 'stroke-opacity="0.35" stroke-dasharray="4 3"')]
    for stretch, (x, y) in zip(path.stretches, ends, strict=True):
        if stretch.group is None:
            drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="currentColor" fill-opacity="0.5">'
                         f"<title>{escaped(stretch.name)}</title></circle>")  # fmt: skip
        else:
            drawn.append(_draw_loop(stretch, path.steps[stretch.group], across, up))
    drawn += [_label(*ends[0], "embedding", right=0.7 * wide), _label(*ends[-1], "output", right=0.7 * wide)]
    drawn.append(_text(wide / 2, height - 8, f"component 1 ({path.explained[0]:.0%} of variance)", "middle"))
    drawn.append(_text(14, height / 2, f"component 2 ({path.explained[1]:.0%})", "middle", turned=True))
    loops = [stretch for stretch in path.stretches if stretch.group is not None]
    for place, stretch in enumerate(loops):
        size = (height - 30) / len(loops)
        drawn.append(_enlarge(stretch, path.steps[stretch.group], WIDTH - ENLARGED, 26 + place * size, size - 10))
    entries = [(_marker(0, 0, s.group, 5, _color(s.group)), s.name) for s in loops]
    entries.append((_marker(0, 0, 0, 4, "none", "currentColor"), "not taken"))
    return _figure("".join(drawn) + _key(entries, 50, 14), height, "The token's path on two principal components")


def _enlarge(stretch: Stretch, left_after: int, left: float, top: float, height: float) -> str:
    points = stretch.points[1:]
    across = _Axis.around([x for x, _ in points], left + 14, WIDTH - 14)
    up = _Axis.around([y for _, y in points], top + height - 14, top + 26)
    frame = (
        f'<rect x="{left}" y="{top:.1f}" width="{ENLARGED - 2}" height="{height:.1f}" fill="none" '
        'stroke="currentColor" stroke-opacity="0.3"/>'
    )
    title = _text(left + 6, top + 16, f"{stretch.name}, enlarged")
    spots = [(across(x), up(y)) for x, y in points]
    numbers = [f'<g data-k="{k}">{_label(x, y, k, 7, WIDTH - 40)}</g>' for k, (x, y) in enumerate(spots[:3], 1)]
    return frame + title + _draw_steps(stretch, left_after, spots, 1) + "".join(numbers)


def _end_of(stretch: Stretch, steps: list[int], across: "_Axis", up: "_Axis") -> tuple[float, float]:
    """Where the token leaves a stretch."""
    x, y = stretch.points[0 if stretch.group is None else steps[stretch.group]]
    return across(x), up(y)


def _draw_loop(stretch: Stretch, left_after: int, across: "_Axis", up: "_Axis") -> str:
    spots = [(across(x), up(y)) for x, y in stretch.points]
    x, y = spots[left_after]
    ring = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="none" stroke="currentColor" stroke-width="1.5"/>'
    label = _label(x, y, f"left after {left_after}", 12, right=0.6 * (WIDTH - ENLARGED))
    return _draw_steps(stretch, left_after, spots, 0) + ring + label


def _draw_steps(stretch: Stretch, left_after: int, spots: Sequence[tuple[float, float]], first: int) -> str:
    """The states of a loop from step `first` on, from pale to strong; hollow where they were not taken."""
    group = stretch.group or 0
    color, parts = _color(group), []
    for step, (x, y) in reversed(list(enumerate(spots, first))):  # the first steps on top: later ones crowd
        taken = step <= left_after
        opacity = 0.35 + 0.65 * step / max(left_after, 1) if taken else 0.6
        name = f"{stretch.name}, " + ("start" if step == 0 else f"loop {step}" + ("" if taken else ", not taken"))
        parts.append(
            f'<g data-k="{step}" opacity="{opacity:.2f}"><title>{escaped(name)}</title>'
            f"{_marker(x, y, group, 4.5 if taken else 3, color if taken else 'none', color)}</g>"
        )
    return _polyline(spots[: left_after + 1 - first], color, 'stroke-opacity="0.6"') + "".join(parts)


def draw_curves(path: TokenPath, group_names: Sequence[str] = ()) -> str:
    """Step norms, accelerations and what the policy compares (left, logarithmic), and cosines (right), per group."""
    figures = []
    for group, curve in enumerate(path.curves):
        name = group_names[group] if group_names else f"group {group}"
        figures.append(f"<figure><figcaption>{escaped(name)}</figcaption>"
                       f"{_draw_curve(curve, path.steps[group])}</figure>")  # fmt: skip
    return f'<div class="lv lv-curves">{"".join(figures)}</div>'


def _draw_curve(curve: LoopCurves, left_after: int) -> str:
    most, top, bottom = len(curve.step_norm), 56, HEIGHT - 36
    across = _Axis(1, max(most, 2), 52, WIDTH - 52)
    series = [("what the rule compares", curve.measure, ORANGE, None)] if curve.threshold is not None else []
    series += [("step norm", curve.step_norm, BLUE, 0), ("acceleration", curve.acceleration, GREEN, 3)]
    known = [value for _, values, *_ in series for value in values if value is not None and value > 0]
    known += [curve.threshold] if curve.threshold else []
    up = _Axis(
        math.floor(math.log10(min(known, default=0.1))), math.ceil(math.log10(max(known, default=1))), bottom, top
    )
    cosine = _Axis(-1, 1, bottom, top)
    drawn = []
    for power in range(int(up.low), int(up.high) + 1):
        drawn += [_rule(across.start, up(power), across.end), _text(46, up(power) + 4, f"{10.0**power:g}", "end")]
    drawn += [_text(WIDTH - 46, cosine(value) + 4, f"{value:+d}" if value else "0") for value in (-1, 0, 1)]
    every = max(1, math.ceil(most / 12))
    drawn += [_text(across(k), bottom + 16, k, "middle") for k in range(1, most + 1) if (k - 1) % every == 0]
    entries = []
    for label, values, color, shape in series:
        spots = [(k, across(k), up(math.log10(v))) for k, v in enumerate(values, 1) if v is not None and v > 0]
        if shape is None:  # a band, behind the lines
            drawn.append(_polyline([spot[1:] for spot in spots], color, 'stroke-opacity="0.45"', 8))
            entries.append((f'<rect x="-7" y="-4" width="14" height="8" fill="{color}" fill-opacity="0.45"/>', label))
            continue
        drawn.append(_polyline([spot[1:] for spot in spots], color))
        drawn += [f'<g data-k="{k}">{_marker(x, y, shape, 4, color)}</g>' for k, x, y in spots]
        entries.append((_marker(0, 0, shape, 4, color), label))
    spots = [(k, across(k), cosine(v)) for k, v in enumerate(curve.cosine, 1) if v is not None]
    drawn.append(_polyline([spot[1:] for spot in spots], PURPLE, 'stroke-dasharray="2 3"'))
    drawn += [f'<g data-k="{k}">{_marker(x, y, 1, 4, PURPLE)}</g>' for k, x, y in spots]
    entries.append((_marker(0, 0, 1, 4, PURPLE), "cosine (right)"))
    if curve.threshold:
        y = up(math.log10(curve.threshold))
        drawn.append(_rule(across.start, y, across.end, 'stroke-dasharray="7 4" stroke-opacity="0.9"'))
        drawn.append(_text(across.end - 4, y - 5, f"threshold of {curve.policy}: {curve.threshold:g}", "end"))
    x = across(left_after)
    drawn.append(
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 12}" y2="{bottom}" stroke="currentColor" stroke-width="1.5"/>'
    )
    anchor = "end" if x > WIDTH / 2 else "start"
    said = f"left after {left_after}" if left_after < most or curve.threshold is not None else f"all {left_after} taken"
    drawn.append(_text(x + (-5 if anchor == "end" else 5), top - 4, said, anchor))
    drawn.append(_text(WIDTH / 2, HEIGHT - 4, "loop step (norms over the norm of the state)", "middle"))
    return _figure("".join(drawn) + _key(entries, 52, 16), HEIGHT, "Step norms, accelerations and cosines")


def draw_followed(followed: dict) -> str:
    """A token of `follow_two`: its path, its curves and its lens."""
    path, said = TokenPath.from_dict(followed["path"]), followed["said"]
    names = [stretch.name for stretch in path.stretches if stretch.group is not None]
    return (
        f'<div class="lv"><h3>How {escaped(shown_token(said))} was predicted, at '
        f"{escaped(shown_token(followed['before']))}</h3>{draw_path(path)}{draw_curves(path, names)}"
        f"{draw_lens(pd.DataFrame(followed['lens']), said, names)}</div>"
    )


@dataclass
class Point:
    """A setting on a text."""

    rule: str
    setting: str
    steps: float
    loss: float
    is_own: bool = False  # the checkpoint's own


def draw_tradeoff(points: Sequence[Point]) -> str:
    """Quality against mean steps: fixed depths as a line, rules as points, the checkpoint's own setting with a star."""
    most = max(point.steps for point in points)
    across = _Axis(0, math.log2(max(most, 2)), 60, WIDTH - 20)
    up = _Axis.around([point.loss for point in points], HEIGHT + 20, 20)
    drawn = []
    for power in range(int(math.log2(max(most, 2))) + 1):
        drawn.append(_text(across(power), HEIGHT + 38, 2**power, "middle"))
    for value in up.ticks():
        drawn += [_rule(across.start, up(value), across.end), _text(54, up(value) + 4, f"{value:g}", "end")]
    entries, styles = [], _styles_of(list(dict.fromkeys(point.rule for point in points if not point.is_own)))
    for rule, (color, shape) in styles.items():
        of_rule = sorted((p for p in points if p.rule == rule and not p.is_own), key=lambda point: point.steps)
        spots = [(p, across(math.log2(max(p.steps, 1))), up(p.loss)) for p in of_rule]
        drawn.append(_polyline([spot[1:] for spot in spots], color, 'stroke-opacity="0.5"'))
        for point, x, y in spots:
            title = f"{rule}, {point.setting}: {point.steps:.2f} steps, {point.loss:.4f} nats"
            drawn.append(f"<g><title>{escaped(title)}</title>{_marker(x, y, shape, 5, color)}</g>")
        if spots:
            entries.append((_marker(0, 0, shape, 4.5, color), rule))
    for point in points:
        if point.is_own:
            x, y = across(math.log2(max(point.steps, 1))), up(point.loss)
            title = f"the checkpoint's own: {point.setting}: {point.steps:.2f} steps, {point.loss:.4f} nats"
            drawn.append(f'<g class="lv-own"><title>{escaped(title)}</title>{_star(x, y, 11)}</g>')
            drawn.append(_label(x, y - 4, "the checkpoint's own", 13))
    drawn.append(_text(WIDTH / 2, HEIGHT + 56, "mean loop steps of a looped layer", "middle"))
    drawn.append(_text(12, HEIGHT / 2, "cross-entropy (nats)", "middle", turned=True))
    columns = 3
    lines = math.ceil(len(entries) / columns)
    key = "".join(
        f'<g transform="translate({50 + 205 * (i % columns)},{HEIGHT + 78 + 18 * (i // columns)})">{mark}'
        f"{_text(10, 4, label)}</g>"
        for i, (mark, label) in enumerate(entries)
    )
    return _figure("".join(drawn) + key, HEIGHT + 76 + 18 * lines, "Quality against mean steps")


@dataclass
class _Axis:
    """Values from `low` to `high`, at places from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def around(cls, values: Sequence[float], start: float, end: float) -> "_Axis":
        low, high = min(values), max(values)
        room = 0.06 * (high - low) or 0.5
        return cls(low - room, high + room, start, end)

    def __call__(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1)
        return self.start + share * (self.end - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        raw = (self.high - self.low) / about
        size = 10 ** math.floor(math.log10(raw))
        step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
        first = math.ceil(self.low / step)
        return [round(place * step, 10) for place in range(first, math.floor(self.high / step) + 1)]


def _figure(drawn: str, height: float, name: str) -> str:
    return (
        '<div class="lv-scroll"><svg class="lv lv-drawing" xmlns="http://www.w3.org/2000/svg" role="img" '
        f'viewBox="0 0 {WIDTH} {height:g}" aria-label="{escaped(name)}" font-size="13" '
        f'font-family="system-ui, sans-serif">{drawn}</svg></div>'
    )


def _text(x: float, y: float, text: object, anchor: str = "start", turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor"{turn}>{escaped(text)}</text>'


def _label(x: float, y: float, text: object, away: float = 6, right: float = 0.75 * WIDTH) -> str:
    """Text beside a point, on its left where it is further to the right than `right`."""
    return _text(x - away, y - 5, text, "end") if x > right else _text(x + away, y - 5, text)


def _rule(x1: float, y: float, x2: float, style: str = 'stroke-opacity="0.15"') -> str:
    return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" {style}/>'


def _polyline(spots: Iterable[tuple[float, float]], color: str, style: str = "", width: float = 1.5) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
    return (
        f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="{width}" {style}/>' if places else ""
    )


def _marker(x: float, y: float, shape: int, size: float, fill: str, stroke: str | None = None) -> str:
    """Circle, square, diamond, triangle, and again."""
    style = f'fill="{fill}" stroke="{stroke or fill}"'
    shape %= 4
    if shape == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" {style}/>'
    corners = {
        1: [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)],
        2: [(0, -1.25), (1.25, 0), (0, 1.25), (-1.25, 0)],
        3: [(0, -1.2), (1.1, 0.85), (-1.1, 0.85)],
    }[shape]
    places = " ".join(f"{x + size * dx:.1f},{y + size * dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{places}" {style}/>'


def _star(x: float, y: float, size: float) -> str:
    corners = []
    for corner in range(10):
        length = size if corner % 2 == 0 else 0.42 * size
        corners.append((x + length * math.sin(math.pi * corner / 5), y - length * math.cos(math.pi * corner / 5)))
    places = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
    return f'<polygon points="{places}" fill="#F0E442" stroke="currentColor" stroke-width="1.2"/>'


def _key(entries: Sequence[tuple[str, str]], x: float, y: float) -> str:
    """Marks and what they stand for, in a row."""
    parts, at = [], x
    for mark, label in entries:
        parts.append(f'<g transform="translate({at:.0f},{y})">{mark}{_text(10, 4, label)}</g>')
        at += 34 + 6.6 * len(label)
    return "".join(parts)


def _color(group: int) -> str:
    return GROUP_STYLES[group % len(GROUP_STYLES)]["color"]


def _styles_of(rules: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Colour and shape of every rule, no two the same: the colours of the report's figures where it has the rule."""
    styles = {"fixed": ("currentColor", 1)}
    for place, rule in enumerate(rules):
        known = RULE_STYLES.get(rule)
        colors = [known["color"]] if known else [*OTHER_COLORS[place % len(OTHER_COLORS) :], *OTHER_COLORS]
        shapes = [(place + turn) % 4 for turn in range(4)]
        free = [(c, shape) for shape in shapes for c in colors if (c, shape) not in styles.values()]
        styles.setdefault(rule, free[0] if free else (OTHER_COLORS[-1], place))
    return styles
