"""The film's first part: split, attend, concatenate, project, in the numbers of `film_example`.

Each function draws one scene at time t, from 0 to 1, and begins where the scene before it ended.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from .film_example import HEADS, WORDS, Example, example
from .film_stage import FAINT, HEAD, INK, PALE, Place, Stage, between, eased, signed, toned

LARGE = Place(330, 164, 40)  # the words, alone
LEFT, MIDDLE, RIGHT = (
    Place(104, 180, 28),
    Place(404, 138, 28),
    Place(700, 180, 28),
)  # a product of two matrices
CENTRES = (142, 266, 390)  # of q, k and v below each other
SMALL, THIN = 21, 14  # cells of a result and of a weight there
HALF = 480  # dots of a head's part of the stage
VALUES, WEIGHTS, OUT, TOP = signed(1.3), signed(3.4), signed(1.0), signed(4.2)
QKV = ("q", "k", "v")
D = 4


@cache
def numbers() -> Example:
    """Return the example of the film, computed once."""
    return example()


def name_of(head: int) -> str:
    """Return the name of a head, counted from 1."""
    return f"head {head + 1}"


def row_by_row(t: float, start: float, end: float, rows: int = len(WORDS)) -> Callable[[int, int], float]:
    """Return how visible each cell is at time t when rows appear one after another."""
    each = (end - start) / rows
    return lambda row, column: eased(t, start + row * each, start + (row + 0.8) * each)


def _under(stage: Stage, place: Place, columns: int, rows: int, words: str, alpha: float = 1) -> None:
    """Write the name of a grid below it."""
    stage.text(
        place.x + columns * place.size / 2, place.y + rows * place.size + 16, words, 14, FAINT, alpha=alpha
    )


def _over(stage: Stage, place: Place, columns: int, words: str, alpha: float = 1, colour: str = INK) -> None:
    """Write the name of a grid above it."""
    stage.text(place.x + columns * place.size / 2, place.y - 15, words, 15, colour, bold=True, alpha=alpha)


# Words and projections


def title(stage: Stage, t: float) -> None:
    """Draw the title: the name, and two heads of one sentence."""
    stage.text(480, 130, "Multi-head attention", 46, bold=True)
    stage.text(480, 182, "split, attend, concatenate, project", 21, FAINT)
    row = min(int(t * len(WORDS)), 4)
    for head in range(HEADS):
        place = Place(270 + head * 250, 250, 34)
        stage.cells(numbers().weights[head], place, toned(HEAD[head]))
        stage.outline(place.x - 3, place.y + row * 34 - 3, 5 * 34 + 4, 34 + 4, HEAD[head])
        stage.text(place.x + 84, place.y + 188, name_of(head), 15, HEAD[head], bold=True)
    stage.text(480, 250 + (row + 0.47) * 34, WORDS[row], 17, FAINT)


def words(stage: Stage, t: float) -> None:
    """Draw each word with its vector."""
    x = numbers().x
    for row, word in enumerate(WORDS):
        alpha = eased(t, 0.04 + 0.09 * row, 0.1 + 0.09 * row)
        stage.text(LARGE.x - 14, LARGE.y + (row + 0.47) * LARGE.size, word, 22, at="right", alpha=alpha)
    stage.cells(
        x, LARGE, VALUES, numbers=".1f",
        shown=lambda row, column: eased(t - 0.09 * row - 0.012 * column, 0.07, 0.13),
    )  # fmt: skip
    for number, words in enumerate(("what the word is", "where it stands")):
        alpha = eased(t, 0.62 + 0.08 * number, 0.7 + 0.08 * number)
        left = LARGE.x + number * 4 * LARGE.size
        stage.line(
            [(left + 2, 140), (left + 2, 132), (left + 155, 132), (left + 155, 140)], FAINT, alpha=alpha
        )
        stage.text(left + 78, 116, words, 16, FAINT, alpha=alpha)
    stage.text(490, 388, "X  [5, 8]:  5 words, d_model = 8", 17, FAINT, alpha=eased(t, 0.8, 0.88))
    _scale(stage, 418, eased(t, 0.8, 0.88))


def _scale(stage: Stage, y: float, alpha: float) -> None:
    """Draw the colour scale of numbers."""
    place = Place(420, y, 20)
    stage.cells(torch.tensor([[-1.3, -0.8, -0.4, 0.0, 0.4, 0.8, 1.3]]).double(), place, VALUES, alpha=alpha)
    stage.text(place.x - 10, y + 9, "negative", 13, FAINT, at="right", alpha=alpha)
    stage.text(place.x + 148, y + 9, "positive", 13, FAINT, at="left", alpha=alpha)


WRITTEN_OUT = (1, 2)  # the number whose sum is written out: the word, the column of W_q


def _sum(row: int, column: int) -> str:
    """Write a row of X times a column of W_q in numbers, without the products that are 0."""
    e = numbers()
    pairs = [(a, b) for a, b in zip(e.x[row].tolist(), e.w_q[:, column].tolist(), strict=True) if a * b]
    products = " + ".join(f"{a:.1f} × {b:.1f}" for a, b in pairs)
    return f"{products} = {float(e.q[row, column]):.2f}".replace("-", "−")


def project(stage: Stage, t: float) -> None:
    """Draw X times W_q: one number first, then all of them."""
    e = numbers()
    row, column = WRITTEN_OUT
    moved = eased(t, 0, 0.14)
    x = between(LARGE, LEFT, moved)
    alpha = eased(t, 0.12, 0.22)
    stage.words_beside(WORDS, x, 22 - 8 * moved)
    stage.cells(e.x, x, VALUES, numbers=".1f")
    _under(stage, LEFT, 8, 5, "X  [5, 8]", alpha)
    stage.cells(e.w_q, MIDDLE, WEIGHTS, numbers=".1f", alpha=alpha)
    _under(stage, MIDDLE, 8, 8, "W_q  [8, 8]", alpha)
    stage.text(366, 250, "×", 26, FAINT, alpha=alpha)
    stage.text(664, 250, "=", 26, FAINT, alpha=alpha)
    stage.cells(e.q * 0, RIGHT, WEIGHTS, alpha=0.6 * alpha)
    _under(stage, RIGHT, 8, 5, "Q  [5, 8]", alpha)
    marked_in = eased(t, 0.24, 0.3)
    fill = row_by_row(t, 0.62, 0.95)
    stage.cells(
        e.q, RIGHT, WEIGHTS, numbers=".1f",
        shown=lambda r, c: max(fill(r, c), eased(t, 0.42, 0.48) if (r, c) == WRITTEN_OUT else 0.0),
    )  # fmt: skip
    marked = marked_in * (1 - eased(t, 0.9, 0.97))
    s = 28
    stage.outline(LEFT.x - 2, LEFT.y + row * s - 2, 8 * s + 2, s + 2, INK, alpha=marked)
    stage.outline(MIDDLE.x + column * s - 2, MIDDLE.y - 2, s + 2, 8 * s + 2, INK, alpha=marked)
    stage.outline(RIGHT.x + column * s - 2, RIGHT.y + row * s - 2, s + 2, s + 2, INK, alpha=marked)
    stage.text(480, 434, f"{WORDS[row]}:   {_sum(row, column)}", 19, alpha=eased(t, 0.3, 0.38))


def _stack(number: int) -> tuple[Place, Place]:
    """Return the places of a weight and of its result beside it."""
    centre = CENTRES[number]
    return Place(432, centre - 4 * THIN, THIN), Place(640, centre - 2.5 * SMALL, SMALL)


def three_projections(stage: Stage, t: float) -> None:
    """Draw W_q, W_k and W_v beside X."""
    e = numbers()
    moved = eased(t, 0, 0.25)
    x = between(LEFT, Place(120, CENTRES[1] - 55, 22), moved)
    stage.words_beside(WORDS, x, 14)
    stage.cells(e.x, x, VALUES, numbers=".1f" if moved < 1 else "")
    _under(stage, x, 8, 5, "X", moved)
    for number, name in enumerate(QKV):
        weight, result = _stack(number)
        progress = 1.0 if number == 0 else eased(t, 0.12 + 0.14 * number, 0.24 + 0.14 * number)
        if number == 0:
            weight, result = between(MIDDLE, weight, moved), between(RIGHT, result, moved)
        late = moved if number == 0 else progress
        stage.arrow(306, CENTRES[1], 418, CENTRES[number], PALE, late)
        stage.cells(getattr(e, f"w_{name}"), weight, (WEIGHTS, VALUES, VALUES)[number], alpha=progress)
        stage.arrow(556, CENTRES[number], 628, CENTRES[number], PALE, late)
        fill = row_by_row(t, 0.25 + 0.14 * number, 0.5 + 0.14 * number)
        stage.cells(
            getattr(e, name), result, (WEIGHTS, VALUES, VALUES)[number],
            shown=None if number == 0 else fill, alpha=progress,
        )  # fmt: skip
        stage.text(
            weight.x - 8, CENTRES[number] - 42, f"W_{name}", 15, INK, at="right", bold=True, alpha=late
        )
        stage.text(830, CENTRES[number], name.upper(), 24, INK, bold=True, alpha=late)


# Heads


def _row(number: int) -> Place:
    """Return the place of q, k or v in one row."""
    return Place(114 + 270 * number, 104, 24)


def _dealt(head: int, number: int) -> Place:
    """Return the place of a head's columns of q, k or v."""
    return Place(40 + HALF * head + 66 + 116 * number, 326, 24)


def split(stage: Stage, t: float) -> None:
    """Draw how the columns are split into heads."""
    e = numbers()
    moved = eased(t, 0.02, 0.2)
    cut = eased(t, 0.22, 0.32)
    for head in range(HEADS):
        alpha = eased(t, 0.3, 0.42)
        stage.outline(40 + HALF * head, 254, 400, 206, HEAD[head], alpha=alpha, line=1.5, corner=8)
        stage.text(64 + HALF * head, 274, name_of(head), 17, HEAD[head], at="left", bold=True, alpha=alpha)
    stage.words_beside(WORDS, _row(0), 13, alpha=moved)
    for number, name in enumerate(QKV):
        tone = (WEIGHTS, VALUES, VALUES)[number]
        whole = between(_stack(number)[1], _row(number), moved)
        dealt = [
            eased(t, 0.4 + 0.1 * number + 0.04 * head, 0.58 + 0.1 * number + 0.04 * head)
            for head in range(HEADS)
        ]
        stage.cells(getattr(e, name), whole, tone, alpha=1 - 0.72 * max(dealt))
        _over(stage, whole, 8, name.upper(), moved)
        for head in range(HEADS):
            left = whole.x + 4 * head * whole.size
            stage.line([(left + 2, 232), (left + 91, 232)], HEAD[head], 4, alpha=cut)
            place = between(Place(left, whole.y, whole.size), _dealt(head, number), dealt[head])
            if dealt[head] > 0:
                stage.cells(e.of_head(name, head), place, tone)
                _over(stage, _dealt(head, number), 4, f"{name.upper()}{'₁₂'[head]}", dealt[head])
    stage.text(898, 164, "[5, 8]", 15, FAINT, alpha=moved)
    stage.text(898, 184, "each", 13, FAINT, alpha=moved)
    for head in range(HEADS):
        stage.text(418 + HALF * head, 274, "[5, 4] each", 14, FAINT, at="right", alpha=eased(t, 0.8, 0.9))


CELL = 36


def _query(head: int) -> Place:
    return Place(HALF * head + 88, 256, CELL)


def _key(head: int) -> Place:
    return Place(HALF * head + 242, 100, CELL)


def _scores(head: int) -> Place:
    return Place(HALF * head + 242, 256, CELL)


def scores(stage: Stage, t: float) -> None:
    """Draw every query times every key, in both heads at once."""
    e = numbers()
    moved = eased(t, 0.02, 0.2)
    each = 0.62 / 25
    now = min(int(max(t - 0.3, 0) / each), 24)
    row, column = divmod(now, 5)
    working = eased(t, 0.26, 0.3) * (1 - eased(t, 0.93, 0.97))
    for head in range(HEADS):
        for number, name in enumerate(QKV):
            tone = (WEIGHTS, VALUES, VALUES)[number]
            start = _dealt(head, number)
            if name == "v":
                stage.cells(e.of_head(name, head), start, tone, alpha=1 - eased(t, 0, 0.1))
            elif name == "q":
                stage.cells(e.of_head(name, head), between(start, _query(head), moved), tone)
            else:
                stage.cells(
                    e.of_head(name, head), between(start, _key(head), moved), tone,
                    at=lambda r, c: (c + (r - c) * moved, r + (c - r) * moved),
                )  # fmt: skip
        stage.words_beside(WORDS, _query(head), 13, moved)
        stage.words_above(WORDS, _key(head), 12, moved)
        stage.text(HALF * head + 158, 122, name_of(head), 18, HEAD[head], bold=True, alpha=moved)
        stage.text(HALF * head + 158, 154, "q · k / 2", 17, INK, alpha=moved)
        q, k, s = _query(head), _key(head), _scores(head)
        stage.cells(e.scores[head] * 0, s, TOP, alpha=0.6 * moved)
        stage.cells(
            e.scores[head], s, TOP, numbers=".1f",
            shown=lambda r, c: eased(t, 0.3 + (5 * r + c) * each, 0.3 + (5 * r + c + 0.9) * each),
        )  # fmt: skip
        stage.outline(q.x - 2, q.y + row * CELL - 2, 4 * CELL + 2, CELL + 2, HEAD[head], alpha=working)
        stage.outline(k.x + column * CELL - 2, k.y - 2, CELL + 2, 4 * CELL + 2, HEAD[head], alpha=working)
        stage.outline(
            s.x + column * CELL - 2, s.y + row * CELL - 2, CELL + 2, CELL + 2, HEAD[head], alpha=working
        )
        stage.text(HALF * head + 158, 192, f"{WORDS[row]} · {WORDS[column]}", 14, FAINT, alpha=working)
        score_text = f"{float(e.scores[head, row, column]):.2f}".replace("-", "−")
        stage.text(HALF * head + 158, 216, score_text, 17, HEAD[head], bold=True, alpha=working)
        stage.text(q.x + 72, 454, f"Q{'₁₂'[head]}", 15, FAINT, alpha=moved)
        stage.text(s.x + 90, 454, "scores", 15, FAINT, alpha=moved)
        stage.text(k.x + 196, k.y + 70, f"K{'₁₂'[head]}ᵀ", 15, FAINT, alpha=moved)


def _map(head: int) -> Place:
    return Place(HALF * head + 124, 142, 46)


def _headings(stage: Stage, alpha: float = 1) -> None:
    for head in range(HEADS):
        place = _map(head)
        stage.text(place.x + 115, 92, name_of(head), 19, HEAD[head], bold=True, alpha=alpha)
        stage.words_beside(WORDS, place, 15, alpha)
        stage.words_above(WORDS, place, 13, alpha)


def softmax(stage: Stage, t: float) -> None:
    """Draw how rows of scores become weights."""
    e = numbers()
    moved = eased(t, 0.0, 0.16)
    gone = 1 - eased(t, 0.0, 0.1)
    done = row_by_row(t, 0.24, 0.9)
    _headings(stage, moved)
    for head in range(HEADS):
        if gone > 0:
            stage.cells(e.of_head("q", head), _query(head), WEIGHTS, alpha=gone)
            stage.cells(e.of_head("k", head).T, _key(head), VALUES, alpha=gone)
        place = between(_scores(head), _map(head), moved)
        _half_done(stage, e.scores[head], e.weights[head], head, place, done)
        for row in range(len(WORDS)):
            total = float(e.weights[head, row].sum())
            stage.text(
                place.x + 236, place.y + (row + 0.47) * place.size, f"= {total:.2f}", 15, HEAD[head],
                at="left", alpha=done(row, 0),
            )  # fmt: skip
        stage.text(
            place.x + 115,
            396,
            "exp(score), divided by the row's sum of them",
            14,
            FAINT,
            alpha=eased(t, 0.18, 0.28),
        )


def _half_done(
    stage: Stage, before: Tensor, after: Tensor, head: int, place: Place, done: Callable[[int, int], float]
) -> None:
    """Draw scores in the rows that are not finished, and weights in the others."""
    stage.cells(before, place, TOP, numbers=".1f", shown=lambda r, c: 1 - done(r, c))
    stage.cells(after, place, toned(HEAD[head]), numbers=".2f", shown=done)


def strongest(head: int, row: int, least: float = 0.2) -> str:
    """Return the keys a word attends to with this share or more, as text."""
    weights = numbers().weights[head, row]
    largest = [(float(share), WORDS[at]) for at, share in enumerate(weights) if share >= least]
    return ", ".join(f"{word} {share:.2f}" for share, word in sorted(largest, reverse=True))


def read(stage: Stage, t: float) -> None:
    """Draw what the maps of both heads show."""
    e = numbers()
    _headings(stage)
    for head in range(HEADS):
        place = _map(head)
        stage.cells(e.weights[head], place, toned(HEAD[head]), numbers=".2f")
        caption = ("the word before", "the word it goes with")[head]
        stage.text(place.x + 115, 396, caption, 19, HEAD[head], bold=True, alpha=eased(t, 0.08, 0.16))
        for row in range(1 if head == 0 else 0, len(WORDS)):
            column = int(e.weights[head, row].argmax())
            alpha = eased(t, 0.14 + 0.08 * row, 0.2 + 0.08 * row)
            stage.outline(
                place.x + column * 46 - 2, place.y + row * 46 - 2, 48, 48, INK, line=2.5, alpha=alpha
            )
        stage.text(place.x + 115, 426, f"chased → {strongest(head, 2)}", 15, FAINT, alpha=eased(t, 0.5, 0.6))


# Back to one vector per word


def _stacked(head: int, part: int) -> Place:
    """Return the place of a head's weights, values or results; heads are below each other."""
    return Place((206, 446, 654)[part], 98 + 192 * head, 31)


def mix(stage: Stage, t: float) -> None:
    """Draw the weighted sum of values for each row."""
    e = numbers()
    moved = eased(t, 0.0, 0.16)
    alpha = eased(t, 0.12, 0.22)
    start, end = 0.26, 0.94
    each = (end - start) / len(WORDS)
    row = min(int(max(t - start, 0) / each), 4)
    working = eased(t, start - 0.02, start) * (1 - eased(t, end, end + 0.03))
    for head in range(HEADS):
        shares, values, out = (_stacked(head, part) for part in range(3))
        place = between(_map(head), shares, moved)
        stage.cells(e.weights[head], place, toned(HEAD[head]), numbers=".2f")
        stage.words_beside(WORDS, place, 14)
        stage.text(40, shares.y + 77, name_of(head), 19, HEAD[head], at="left", bold=True, alpha=alpha)
        stage.text(380, shares.y + 77, "×", 24, FAINT, alpha=alpha)
        stage.text(612, shares.y + 77, "=", 24, FAINT, alpha=alpha)
        stage.words_beside(WORDS, values, 13, alpha * 0.8)
        stage.cells(
            e.of_head("v", head), values, VALUES, numbers=".1f", alpha=alpha,
            shown=_mixed_in(e.weights[head, row], working),
        )  # fmt: skip
        stage.cells(e.mixed[head] * 0, out, VALUES, alpha=0.6 * alpha)
        stage.cells(e.mixed[head], out, VALUES, numbers=".1f", shown=row_by_row(t, start, end))
        for grid, columns in ((shares, 5), (out, 4)):
            stage.outline(grid.x - 2, grid.y + row * 31 - 2, columns * 31 + 2, 33, INK, alpha=working)
        if head == 0:
            for grid, columns, name in ((shares, 5, "shares"), (values, 4, "values"), (out, 4, "mixed")):
                stage.text(grid.x + columns * 15.5, grid.y - 14, name, 14, FAINT, alpha=alpha)
        stage.text(794, out.y + 58, f"“{WORDS[row]}” takes", 15, INK, at="left", alpha=working)
        for number, line in enumerate(strongest(head, row).split(", ")[:2]):
            word, share = line.split()
            stage.text(
                794, out.y + 84 + 24 * number, f"{share} of “{word}”", 15, HEAD[head], at="left", bold=True,
                alpha=working,
            )  # fmt: skip


def _mixed_in(shares: Tensor, working: float) -> Callable[[int, int], float]:
    """Return how bright each row of values is: as its weight while a row is computed."""
    each = shares.tolist()
    return lambda row, column: 1 - working * 0.88 * (1 - each[row])


APART = 8  # dots between the heads' results


def _joined(head: int) -> Place:
    return Place(348 + head * (4 * 34 + APART), 176, 34)


def concatenate(stage: Stage, t: float) -> None:
    """Draw the heads' results side by side."""
    e = numbers()
    gone = 1 - eased(t, 0.0, 0.14)
    moved = eased(t, 0.08, 0.5)
    together = eased(t, 0.5, 0.62)
    for head in range(HEADS):
        shares, values, out = (_stacked(head, part) for part in range(3))
        stage.cells(
            e.weights[head], shares, toned(HEAD[head]), numbers=".2f" if gone > 0.5 else "", alpha=gone
        )
        stage.cells(e.of_head("v", head), values, VALUES, numbers=".1f" if gone > 0.5 else "", alpha=gone)
        place = between(out, _joined(head), moved)
        stage.cells(e.mixed[head], place, VALUES, numbers=".1f")
        size = place.size
        stage.outline(
            place.x - 3, place.y - 3, 4 * size + 5, 5 * size + 5, HEAD[head], alpha=eased(t, 0.05, 0.15)
        )
        stage.text(place.x + 2 * size, place.y - 20, name_of(head), 16, HEAD[head], bold=True)
    stage.words_beside(WORDS, _joined(0), 17, together)
    stage.text(488, 380, "Concat(head 1, head 2)  [5, 8]", 17, FAINT, alpha=together)


def project_back(stage: Stage, t: float) -> None:
    """Draw the concatenated heads times W_o."""
    e = numbers()
    moved = eased(t, 0.0, 0.2)
    alpha = eased(t, 0.16, 0.28)
    s = 28
    for head in range(HEADS):
        end = Place(LEFT.x - APART + head * (4 * s + APART), LEFT.y, s)
        place = between(_joined(head), end, moved)
        stage.cells(e.mixed[head], place, VALUES, numbers=".1f")
        size = place.size
        stage.outline(place.x - 3, place.y - 3, 4 * size + 4, 5 * size + 5, HEAD[head])
        stage.text(place.x + 2 * size, place.y - 18, name_of(head), 15, HEAD[head], bold=True)
        stage.line(
            [(MIDDLE.x - 7, MIDDLE.y + head * 4 * s + 2), (MIDDLE.x - 7, MIDDLE.y + (head * 4 + 4) * s - 4)],
            HEAD[head], 4, alpha=alpha,
        )  # fmt: skip
    stage.words_beside(WORDS, between(_joined(0), LEFT._replace(x=LEFT.x - APART), moved), 17 - 3 * moved)
    stage.cells(e.w_o, MIDDLE, signed(0.7), numbers=".1f", alpha=alpha)
    stage.text(362, 250, "×", 26, FAINT, alpha=alpha)
    stage.text(664, 250, "=", 26, FAINT, alpha=alpha)
    stage.cells(e.output * 0, RIGHT, OUT, alpha=0.6 * alpha)
    start, end_of = 0.34, 0.9
    stage.cells(e.output, RIGHT, OUT, numbers=".1f", shown=row_by_row(t, start, end_of))
    row = min(int(max(t - start, 0) / ((end_of - start) / 5)), 4)
    working = eased(t, start - 0.03, start) * (1 - eased(t, end_of, end_of + 0.05))
    for grid, more in ((LEFT._replace(x=LEFT.x - APART), APART), (RIGHT, 0)):
        stage.outline(grid.x - 2, grid.y + row * s - 2, 8 * s + 2 + more, s + 2, INK, alpha=working)
    _under(stage, LEFT, 8, 5, "Concat  [5, 8]", alpha)
    _under(stage, MIDDLE, 8, 8, "W_o  [8, 8]", alpha)
    _under(stage, RIGHT, 8, 5, "output  [5, 8]", alpha)


def by_hand(stage: Stage, t: float) -> None:
    """Tell that the weights of the first part were set by hand, unlike those of training."""
    stage.text(480, 190, "These weights were set by hand.", 30, bold=True, alpha=eased(t, 0.02, 0.15))
    stage.text(480, 250, "In training nobody sets them:", 24, FAINT, alpha=eased(t, 0.3, 0.42))
    stage.text(480, 290, "heads become what lowers the loss.", 24, FAINT, alpha=eased(t, 0.45, 0.58))
