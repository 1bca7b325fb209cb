"""What the components of the page call: values come in, pictures go out, and what is wrong comes out as a sentence."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..common import loops_of_generate
from ..lens import lens_table
from ..loop_by_loop import Line, answer_lines
from ..pictures import (
    Point,
    draw_answers,
    draw_curves,
    draw_legend,
    draw_lens,
    draw_path,
    draw_tokens,
    draw_tradeoff,
    escaped,
    shown_token,
    slider,
)
from ..token_path import follow_token
from .generation import Sampling, Text, parting, stream
from .side_by_side import compare_policies
from .workbench import MOST_LOOPS, Opened, Workbench, describe_briefly

TOP = 5  # predictions of the lens

LoopsOf = Callable[[Opened], dict[str, Any]]  # exit policy and loops for a checkpoint, from the fields of the page


def problem(error: Exception) -> str:
    """What is wrong, in a sentence, for the page."""
    return f'<div class="lv lv-problem" role="alert">{escaped(error)}</div>'


class Page:
    def __init__(self, workbench: Workbench):
        self.workbench = workbench

    # Steps against difficulty

    def answer(self, name: str, text: str, loops_of: LoopsOf | None = None) -> str:
        try:
            opened = self.workbench.open(name)
            if not opened.tasks:
                raise ValueError(f"{name} was trained on no depth task: choose one of {self._task_names()}.")
            loops = loops_of_generate(opened.model) if loops_of is None else loops_of(opened)
            lines = self._answered(opened, text, loops)
        except (ValueError, OSError) as error:
            return problem(error)
        mean = sum(line.took for line in lines) / len(lines)
        return draw_answers(lines, f"{describe_briefly(**loops)}: {mean:.1f} loops a line in the mean.")

    def _answered(self, opened: Opened, text: str, loops: dict[str, Any]) -> list[Line]:
        problems = []
        for task in opened.tasks:
            try:
                return answer_lines(opened.model, opened.tokenizer, task, text, **loops)
            except ValueError as error:
                problems.append(f"{task.name}: {error}" if len(opened.tasks) > 1 else str(error))
        raise ValueError("\n".join(problems))

    def _task_names(self) -> str:
        return ", ".join(self.workbench.with_tasks) or "none of these checkpoints"

    # Generate

    def generate(
        self, name: str, prompt: str, loops_of: LoopsOf, fixed: Any, sampling: dict[str, Any]
    ) -> Iterator[tuple[str, str, Text | None, str, str, Text | None]]:
        """For the policy and then for fixed depth: the text, its numbers, and what a click on it needs."""
        nothing = ("", "", None)
        try:
            opened = self.workbench.open(name)
            loops, ids = loops_of(opened), opened.encode(prompt)
            beside = loops_of_generate(opened.model, None, _whole("the fixed loops", fixed or max(loops["num_loops"])))
            chosen = Sampling(**{key: value for key, value in sampling.items() if value is not None})
            most = max(*loops["num_loops"], *beside["num_loops"])
            text = other = None
            for text in stream(opened, ids, loops, chosen):
                yield *self._shown(opened, text, most), *nothing
            for other in stream(opened, ids, beside, chosen):
                yield *self._shown(opened, text, most), *self._shown(opened, other, most)
            place = parting(text, other)
            yield *self._shown(opened, text, most, place, other), *self._shown(opened, other, most, place, text)
        except (ValueError, OSError) as error:
            yield problem(error), "", None, *nothing

    def _shown(
        self, opened: Opened, text: Text, most: int, parts_at: int | None = None, other: Text | None = None
    ) -> tuple[str, str, Text]:
        return (
            draw_legend(most) + draw_tokens(text.shown(opened), most, parts_at=parts_at),
            self._numbers(opened, text, parts_at, other),
            text,
        )

    def _numbers(self, opened: Opened, text: Text, parts_at: int | None, other: Text | None) -> str:
        parts = [describe_briefly(**text.loops)]
        if (mean := text.mean_steps(opened)) is not None:
            parts.append(f"{mean:.2f} loops in the mean")
        if text.ms_per_token is not None:
            parts.append(f"{text.ms_per_token:.1f} ms/token")
        if other is not None and text.new:
            if parts_at is None:
                parts.append("the same text as beside it")
            else:
                here, there = (shown_token(opened.tokenizer.decode([t.ids[parts_at]])) for t in (text, other))
                parts.append(f"parts at new token {parts_at - text.prompt + 1}: {here} here, {there} beside")
        return f'<p class="lv lv-note lv-numbers">{escaped("; ".join(parts))}</p>'

    # A token's path and lens

    def look(self, text: Text | None, place: int, reading: str) -> str:
        """How the token at `place` was predicted: the path, the curves and the lens of the token before it."""
        if text is None or not 0 < place < len(text.ids):
            return problem(ValueError("choose a token of a text that was generated here."))
        try:
            opened = self.workbench.open(text.checkpoint)
            path, seen = follow_token(opened.model, torch.tensor(text.ids), place - 1, **text.loops)
            said = opened.tokenizer.decode([text.ids[place]])
            table = lens_table(seen, opened.tokenizer, min(TOP, opened.model.config.vocab_size), reading)
        except (ValueError, OSError) as error:
            return problem(error)
        before = shown_token(opened.tokenizer.decode([text.ids[place - 1]]))
        steps = ", ".join(f"{count} in {name}" for count, name in zip(path.steps, opened.group_names, strict=True))
        return (
            f'<div class="lv lv-token-view"><p class="lv-note">How <b>{escaped(shown_token(said))}</b> was predicted, '
            f"at <b>{escaped(before)}</b>: {escaped(steps)} loops, under {escaped(describe_briefly(**text.loops))}.</p>"
            f"{slider(path.most)}<h4>Its path</h4>{draw_path(path)}<h4>Its steps</h4>"
            f"{draw_curves(path, opened.group_names)}<h4>What it would say after every loop</h4>"
            f"{draw_lens(table, said, opened.group_names)}</div>"
        )

    # Policies side by side

    def compare(self, name: str, text: str) -> Iterator[str]:
        try:
            opened = self.workbench.open(name)
            for points in compare_policies(opened, opened.encode(text)):
                yield self._compared(opened, points, len(opened.encode(text)))
        except (ValueError, OSError) as error:
            yield problem(error)

    def _compared(self, opened: Opened, points: list[Point], tokens: int) -> str:
        rows = "".join(
            f"<tr{' class=lv-own-row' * point.is_own}><td>{'★ ' * point.is_own}{escaped(point.rule)}</td>"
            f"<td>{escaped(point.setting)}</td><td>{point.steps:.2f}</td><td>{point.loss:.4f}</td></tr>"
            for point in sorted(points, key=lambda point: (not point.is_own, point.steps))
        )
        own = describe_briefly(**loops_of_generate(opened.model))
        promise = opened.promise or "It was not calibrated with a guarantee."
        head = "".join(f"<th>{name}</th>" for name in ("rule", "setting", "mean steps", "cross-entropy"))
        return (
            f'<div class="lv lv-compared">{draw_tradeoff(points)}<p class="lv-note">{tokens} tokens. The star is the '
            f"checkpoint's own setting ({escaped(own)}). {escaped(promise)} Thresholds of rules are what takes each "
            "from few loops to many on this text. One short text says little.</p><details><summary>All settings"
            f'</summary><div class="lv-scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
            "</details></div>"
        )


def _whole(what: str, value: Any) -> int:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or value != int(value)
        or not 1 <= value <= MOST_LOOPS
    ):
        raise ValueError(f"{what} are {value!r}, but must be a whole number from 1 to {MOST_LOOPS}.")
    return int(value)
