"""Programs: straight lines of arithmetic modulo a small number, and questions for the values of their names.

    x0 = 3
    x1 = 5
    x2 = x0 + x1
    x3 = x2 - x0
    ? x3 5 x0 3

Names are the numbers of lines. Every line is three tokens (`x2 =`, ` x0`, ` + x1` with its line end; or `x0 =`, ` 3`
and a line end), so that a name also says where its line stands: to bind free names is a task of its own.

There are two kinds of answers. Behind a question, ` x3` is followed by its value: this is what `generate` gives. And at
the end of every line the value of the line is asked for too, though it does not stand there: the text goes on with the
next line. These dense answers make training several times faster, and nothing in the context could be copied for them.
"""

import re
from dataclasses import dataclass, replace

import numpy as np

from .task import NO_ANSWER, Task, TaskBatch, register_task

TOKENS_PER_LINE = 3
FULL = 0.75  # the share of programs with all lines: late lines are learned last


@register_task("programs")
@dataclass(frozen=True)
class Programs(Task):
    """
    Args:
        depth: Height of the deepest expression in training, over the digits. A question takes one loop more than the
            line it is for, so lines of this height are not asked for in training.
        lines: Lines of a program.
        modulus: Of the arithmetic; a digit each.
        shortest: A quarter of the programs are shorter than `lines`, but no shorter than this, so that a question may
            stand anywhere; line ends fill what is left.
        queries: Names that are asked for behind the program, in random order.
        literals: Probability that a line holds a digit; the first does, and the next ones do more often than this.
        recent: How much more likely late lines are to be the first operand: it makes programs deep.
    """

    depth: int = 8
    lines: int = 16
    modulus: int = 7
    shortest: int = 1
    queries: int = 3
    literals: float = 0.15
    recent: float = 0.6

    def __post_init__(self):
        super().__post_init__()
        if not 2 <= self.modulus <= 10:
            raise ValueError(f"`modulus` of task programs is {self.modulus}, but must be from 2 to 10: a digit each.")
        for name in ("shortest", "queries"):
            if getattr(self, name) > self.lines:
                raise ValueError(
                    f"`{name}` of task programs is {getattr(self, name)}, more than `lines`, {self.lines}."
                )
        if self.depth >= self.lines:
            raise ValueError(
                f"`depth` of task programs is {self.depth}, but {self.lines} lines, the first a digit, hold at most "
                f"{self.lines - 1}: lower it, or raise `lines`."
            )
        for name in ("literals", "recent"):
            if not 0 <= getattr(self, name) < (1 if name == "literals" else np.inf):
                raise ValueError(f"`{name}` of task programs is {getattr(self, name)!r}, which is out of range.")

    @property
    def tokens(self) -> list[str]:
        names = range(self.lines)
        return [
            *(f" {digit}" for digit in range(self.modulus)),
            *(f"x{name} =" for name in names),
            *(f" x{name}" for name in names),
            *(f" + x{name}\n" for name in names),
            *(f" - x{name}\n" for name in names),
            "\n",
            "?",
        ]

    @property
    def length(self) -> int:
        return TOKENS_PER_LINE * self.lines + 1 + 2 * self.queries

    def sample(self, n: int, depth: int, rng: np.random.Generator) -> TaskBatch:
        shape = (n, self.lines)
        digits, minus = rng.integers(self.modulus, size=shape), rng.integers(2, size=shape)
        is_digit = rng.random(shape) < np.maximum(self.literals, 1 / (1 + np.arange(self.lines)))
        likings = rng.random((2, n, self.lines, self.lines))
        operands = np.zeros((2, n, self.lines), dtype=np.int64)
        rows, heights = np.arange(n), np.zeros(shape, dtype=np.int64)
        for line in range(1, self.lines):
            too_deep = np.where(heights[:, :line] >= depth, np.inf, 0.0)  # the first line never is
            recent = self.recent * np.arange(line) / line
            operands[0, :, line] = (likings[0, :, line, :line] + recent - too_deep).argmax(1)
            # A name minus itself is 0 without looking: seldom, where there is a choice.
            likings[1, rows, line, operands[0, :, line]] -= 0.7 * minus[:, line]
            operands[1, :, line] = (likings[1, :, line, :line] - too_deep).argmax(1)
            height = 1 + np.maximum(*(heights[rows, which] for which in operands[:, :, line]))
            heights[:, line] = np.where(is_digit[:, line], 0, height)
        lengths = np.where(rng.random(n) < FULL, self.lines, rng.integers(self.shortest, self.lines + 1, size=n))
        places = rng.random(shape)
        left_out = (heights >= depth) | (np.arange(self.lines) >= lengths[:, None])
        asked = np.where(left_out, 2.0, places).argsort(1)[:, : self.queries]
        asked = np.where(np.take_along_axis(left_out, asked, 1), asked[:, :1], asked)  # again, where there are too few
        return self._cut(self._solved(np.where(is_digit, digits, -1), minus, *operands, asked), lengths)

    def _cut(self, batch: TaskBatch, lengths: np.ndarray) -> TaskBatch:
        """Takes the lines from `lengths` [n] on out of full programs; what follows them moves up."""
        places = np.arange(self.length)[None]
        left_out = TOKENS_PER_LINE * (self.lines - lengths)[:, None]
        source = np.where(places < TOKENS_PER_LINE * lengths[:, None], places, places + left_out)
        filling = {"ids": self.tokens.index("\n"), "answers": NO_ANSWER, "depths": 0}
        inside = source < self.length
        source = np.minimum(source, self.length - 1)
        return TaskBatch(
            **{name: np.where(inside, np.take_along_axis(getattr(batch, name), source, 1), value)
               for name, value in filling.items()}
        )  # fmt: skip

    def parse(self, text: str) -> TaskBatch:
        program, mark, questions = text.replace(";", "\n").partition("?")
        lines = [line.strip() for line in program.strip().splitlines() if line.strip()]
        if not 1 <= len(lines) <= self.lines:
            raise ValueError(f"the program has {len(lines)} lines, but must have from 1 to {self.lines}.")
        read = [self._read_line(number, line) for number, line in enumerate(lines)]
        digits, minus, first, second = (np.array([column]) for column in zip(*read, strict=True))
        words = questions.split()
        if any(word.isdigit() for word in words[::2]) or not all(word.isdigit() for word in words[1::2]):
            names = words
        else:
            names = words[::2]  # x3 5 x0 3: with their values
        asked = [self._read_question(word, len(lines)) for word in names]
        batch = self._solved(digits, minus, first, second, np.array([asked], dtype=np.int64), ends=bool(mark))
        if names is not words:
            self._check_values(names, words[1::2], batch)
        return batch

    def _read_line(self, number: int, line: str) -> tuple[int, int, int, int]:
        """Digit (-1: none), whether it is a difference, first and second operand."""
        match = re.fullmatch(r"(x\d+) *= *(?:(\d+)|x(\d+) *([+-]) *x(\d+))", line)
        if match is None:
            raise ValueError(f"line {number} is {line!r}, but must read like `x{number} = 3` or `x{number} = x0 + x1`.")
        name, digit, first, sign, second = match.groups()
        if name != f"x{number}":
            raise ValueError(f"line {number} defines {name}, but must define x{number}: names are numbers of lines.")
        if digit is not None:
            if int(digit) >= self.modulus:
                raise ValueError(
                    f"line {number} has the digit {digit}, but arithmetic is modulo {self.modulus}: digits go from 0 "
                    f"to {self.modulus - 1}."
                )
            return int(digit), 0, 0, 0
        for operand in (first, second):
            if int(operand) >= number:
                raise ValueError(f"line {number} refers to x{operand}, which is not defined before it.")
        return -1, int(sign == "-"), int(first), int(second)

    def _read_question(self, word: str, lines: int) -> int:
        match = re.fullmatch(r"x(\d+)", word)
        if match is None or int(match[1]) >= lines:
            raise ValueError(f"the question is for {word!r}, but must be for one of x0 to x{lines - 1}.")
        return int(match[1])

    def _check_values(self, names: list[str], given: list[str], batch: TaskBatch) -> None:
        values = batch.answers[0][batch.asked[0]][-len(names) :]
        for name, word, value in zip(names, given, values, strict=False):
            if int(word) != value:
                raise ValueError(f"{name} is {value}, but the text says {word}.")

    def full(self) -> "Programs":
        return replace(self, shortest=self.lines)

    def deeper(self, depth: int) -> "Programs":
        return replace(self, depth=depth, recent=3.0, literals=0.02)

    def _solved(
        self,
        digits: np.ndarray,
        minus: np.ndarray,
        first: np.ndarray,
        second: np.ndarray,
        asked: np.ndarray,
        ends: bool = True,
    ) -> TaskBatch:
        """`digits` is -1 where a line has operands; all [n, lines], but for `asked` [n, questions]."""
        n, lines = digits.shape
        rows, values, heights = np.arange(n), np.zeros_like(digits), np.zeros_like(digits)
        for line in range(lines):
            left, right = first[:, line], second[:, line]
            sign = 1 - 2 * minus[:, line]
            value = (values[rows, left] + sign * values[rows, right]) % self.modulus
            is_digit = digits[:, line] >= 0
            values[:, line] = np.where(is_digit, digits[:, line], value)
            heights[:, line] = np.where(is_digit, 0, 1 + np.maximum(heights[rows, left], heights[rows, right]))
        is_digit, end_of_line = digits >= 0, self.modulus + 4 * self.lines
        names = np.broadcast_to(self.modulus + np.arange(lines), (n, lines))
        operand = np.where(is_digit, digits, self.modulus + self.lines + first)
        rest = np.where(is_digit, end_of_line, self.modulus + (2 + minus) * self.lines + second)
        program = np.stack([names, operand, rest], -1).reshape(n, -1)
        nothing = np.full((n, lines), NO_ANSWER)
        of_lines = np.stack([nothing, nothing, values], -1).reshape(n, -1)
        of_lines_depths = np.stack([0 * values, 0 * values, heights], -1).reshape(n, -1)
        if not ends:
            return TaskBatch(program, of_lines, of_lines_depths)

        mark, silent = np.full((n, 1), end_of_line + 1), np.full((n, 1), NO_ANSWER)
        results = np.take_along_axis(values, asked, 1)
        depths = np.take_along_axis(heights, asked, 1) + 1
        questions = np.stack([self.modulus + self.lines + asked, results], -1).reshape(n, -1)
        of_questions = np.stack([results, np.full_like(results, NO_ANSWER)], -1).reshape(n, -1)
        of_questions_depths = np.stack([depths, 0 * depths], -1).reshape(n, -1)
        return TaskBatch(
            np.concatenate([program, mark, questions], 1),
            np.concatenate([of_lines, silent, of_questions], 1),
            np.concatenate([of_lines_depths, 0 * mark, of_questions_depths], 1),
        )
