"""The film's second part: mini's heads over its training, from `headwise.models.specialisation()`.

A dot is a head: how many tokens it looks at (entropy) and how near (the weight within 8 tokens). What was
measured at a checkpoint is shown at its step; between two checkpoints dots and lines go straight, over a
logarithmic scale of steps, and a head keeps the label of the checkpoint before.

Letters: C checkpoints, L layers, H heads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from headwise.models import Specialisation, specialisation

from .film_stage import FAINT, INK, PALE, Stage, eased

LEFT, TOP, WIDE, HIGH = 76, 92, 448, 330  # the plane of heads
MOST_NATS = 5.4
PANELS_LEFT, PANELS_WIDE = 606, 282
PANELS = ((92, 88), (218, 88), (344, 88))  # top and height: loss, previous token, induction
COLOURS = {  # brighter than in tables: dots, not letters
    "induction": "#0a9a45",
    "previous-token": "#2348c8",
    "punctuation": "#b07a00",
    "local": "#0a6b78",
    "broad": "#9cc9cd",
    "no label": "#b9bec8",
}
NAMED = ("previous-token", "induction", "punctuation")
TRAIL = 3.0  # checkpoints that a dot's trail goes back
CURVES = (("previous", "previous-token", "weight on the token before"),
          ("induction_stripe", "induction", "weight on what followed before"))  # fmt: skip


@cache
def life() -> Specialisation:
    """Return the measurements of mini's training, loaded once."""
    return specialisation()


Facts = dict[str, str]
Head = tuple[int, int]  # layer, head


@cache
def facts() -> Facts:
    """Return the numbers of the captions by name."""
    history = life()
    before, repeats = history.when("previous", 0.5), history.when("induction_stripe", 0.4)
    assert before is not None and repeats is not None
    then, end = (
        [name for layer in history.labels[at] for name in layer]
        for at in (history.steps.tolist().index(repeats.step), -1)
    )
    _, L, H = history.shape
    return {
        "layers": str(L),
        "heads": str(H),
        "all": str(L * H),
        "last_loss": f"{float(history.losses[-1]):.2f}",
        "last_step": f"{int(history.steps[-1]):,}",
        "before_step": f"{before.step:,}",
        "before_head": f"{before.layer}.{before.head}",
        "before_score": f"{before.score:.2f}",
        "repeat_step": f"{repeats.step:,}",
        "repeat_head": f"{repeats.layer}.{repeats.head}",
        "kept": str(sum(before_training == other for before_training, other in zip(then, end, strict=True))),
        "labelled": str(L * H - end.count(None)),
        "unlabelled": str(end.count(None)),
    }


def _at(values: Tensor, when: float) -> Tensor:
    """Interpolate [C, ..] linearly at a time in checkpoints."""
    low = min(int(when), len(values) - 1)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (when - low)


@cache
def _logs() -> Tensor:
    """Return the x of checkpoints on a log axis, [C], from 0 to 1."""
    steps = life().steps.double()
    return _share(steps.clamp(min=float(steps[1]) / 2))


def _share(steps: Tensor) -> Tensor:
    """Return the x of steps on the axis, 0 to 1."""
    first, last = float(life().steps[1]) / 2, float(life().steps[-1])
    return (steps.double() / first).log() / math.log(last / first)


# The plane of heads


def _spot(entropy: float, local: float) -> tuple[float, float]:
    return LEFT + WIDE * entropy / MOST_NATS, TOP + HIGH * (1 - local)


def _every() -> list[Head]:
    _, L, H = life().shape
    return [(layer, head) for layer in range(L) for head in range(H)]


def _spots(when: float) -> dict[Head, tuple[float, float]]:
    """Return the position of every head at a time."""
    positions: list[list[list[float]]] = [
        _at(life().statistics[name], when).tolist() for name in ("entropy", "local")
    ]
    return {head: _spot(positions[0][head[0]][head[1]], positions[1][head[0]][head[1]]) for head in _every()}


def _seat(layer: int, head: int) -> tuple[float, float]:
    """Return the position of a head in the model: a row for each layer."""
    return LEFT + 60 + 38 * head, TOP + 48 + 34 * layer


@cache
def _sides() -> dict[Head, tuple[float, float]]:
    """Return the offsets of names from their dots: where there is room at the end of training.

    Of the heads that have a label worth a name at the end; others get and lose theirs too fast to be read.
    """
    last = _spots(float(len(life().steps) - 1))
    named = [key for key in last if _label(-1, *key) in NAMED]
    occupied = list(last.values())
    offsets = {}
    for head in named:
        x, y = last[head]

        def free(side: tuple[float, float], x: float = x, y: float = y) -> float:
            return min(
                math.hypot((x + side[0] - a) / 1.6, y + side[1] - b) for a, b in occupied if (a, b) != (x, y)
            )

        sides = [(23.0, 0.0), (0.0, -17.0), (0.0, 17.0)]
        sides += [(-23.0, 0.0)] if x > LEFT + 40 else []  # not over the axis
        best = max(sides, key=lambda side: min(free(side), 16))
        offsets[head] = best
        occupied.append((x + best[0], y + best[1]))
    return offsets


def _label(checkpoint: int, layer: int, head: int) -> str:
    return life().labels[checkpoint][layer][head] or "no label"


def _frame_of_plane(stage: Stage, alpha: float) -> None:
    corner = TOP + HIGH + 8
    stage.line([(LEFT, TOP - 4), (LEFT, corner), (LEFT + WIDE, corner)], PALE, 1.5, alpha=alpha)
    for share in (0.0, 0.5, 1.0):
        stage.text(LEFT - 8, TOP + HIGH * (1 - share), f"{share:.1f}", 13, FAINT, at="right", alpha=alpha)
    for nats in range(6):
        stage.text(LEFT + WIDE * nats / MOST_NATS, TOP + HIGH + 20, str(nats), 13, FAINT, alpha=alpha)
    words = "entropy, nats:  looks at few tokens  →  at many"
    stage.text(LEFT + WIDE / 2, TOP + HIGH + 39, words, 13, FAINT, alpha=alpha)
    stage.text(28, TOP + HIGH / 2, "weight within 8 tokens", 13, FAINT, turned=True, alpha=alpha)


def _dots(stage: Stage, when: float, seated: float) -> None:
    """Draw every head as a dot; seated: how far it has moved to its place in the model."""
    checkpoint = int(when + 1e-6)
    past = [when - TRAIL * (1 - part / 12) for part in range(13)]
    tracks = [_spots(checkpoint_time) for checkpoint_time in past if checkpoint_time >= 0]
    order = sorted(tracks[-1], key=lambda key: (_label(checkpoint, *key) in NAMED, key))
    for head in order:
        label = _label(checkpoint, *head)
        stage.line(
            [track[head] for track in tracks], COLOURS[label], 2, alpha=0.35 * (1 - min(3 * seated, 1))
        )
        (x, y), (to_x, to_y) = tracks[-1][head], _seat(*head)
        radius = 8 if label in NAMED else 7
        stage.disc(x + (to_x - x) * seated, y + (to_y - y) * seated, radius + 4 * seated, COLOURS[label])
    for head in order:
        label = _label(checkpoint, *head)
        if label in NAMED and head in _sides():
            (x, y), (right, down) = tracks[-1][head], _sides()[head]
            name = f"{head[0]}.{head[1]}"
            stage.text(x + right, y + down, name, 13, COLOURS[label], bold=True, alpha=1 - min(3 * seated, 1))


def _seats(stage: Stage, alpha: float) -> None:
    """Label the rows and columns of the model."""
    _, L, H = life().shape
    for layer in range(L):
        x, y = _seat(layer, 0)
        stage.text(x - 26, y, f"layer {layer}", 13, FAINT, at="right", alpha=alpha)
    for head in range(H):
        x, y = _seat(0, head)
        stage.text(x, y - 27, str(head), 13, FAINT, alpha=alpha)


def _legend(stage: Stage, when: float, alpha: float = 1) -> None:
    """Draw the labels, each with the number of heads that have it."""
    count = Counter(_label(int(when + 1e-6), *head) for head in _every())
    x, y = LEFT + WIDE - 132, TOP + 66  # above all dots: a head that attends to many tokens attends far
    for number, (name, colour) in enumerate(COLOURS.items()):
        opacity = alpha * (1.0 if count[name] else 0.35)
        stage.disc(x, y + 21 * number, 6, colour, opacity)
        stage.text(x + 14, y + 21 * number, name, 13, INK, at="left", alpha=opacity)
        stage.text(x + 138, y + 21 * number, str(count[name]), 13, INK, at="right", alpha=opacity)


# Curves


def _panel(
    stage: Stage, number: int, words: str, lines: Sequence[tuple[Tensor, Tensor, str, float]], when: float,
    height: Callable[[float], float], ends: Sequence[str],
) -> None:  # fmt: skip
    """Draw lines (x from 0 to 1, values, colour, width) up to now; `ends` are the axis limits."""
    top, high = PANELS[number]
    now = float(_at(_logs(), when))
    stage.text(PANELS_LEFT, top - 14, words, 13, INK, at="left")
    stage.line(
        [(PANELS_LEFT, top), (PANELS_LEFT, top + high), (PANELS_LEFT + PANELS_WIDE, top + high)], PALE, 1.2
    )
    for place, text in zip((0, 1), ends, strict=True):
        stage.text(PANELS_LEFT - 7, top + high * (1 - place), text, 13, FAINT, at="right")
    for xs, values, colour, width in lines:
        points = [(x, y) for x, y in zip(xs.tolist(), values.tolist(), strict=True) if 0 <= x <= now]
        after = next(((x, y) for x, y in zip(xs.tolist(), values.tolist(), strict=True) if x > now), None)
        if points and after is not None:
            (x, y), (to_x, to_y) = points[-1], after
            points.append((now, y + (to_y - y) * (now - x) / (to_x - x)))
        drawn = [(PANELS_LEFT + PANELS_WIDE * x, top + high * (1 - height(y))) for x, y in points]
        stage.line(drawn, colour, width)
    x = PANELS_LEFT + PANELS_WIDE * now
    stage.line([(x, top - 2), (x, top + high)], INK, 1, alpha=0.35)


def _value(stage: Stage, number: int, when: float, at: float, words: str, colour: str) -> None:
    """Write a number at the end of a line."""
    top, high = PANELS[number]
    x = PANELS_LEFT + PANELS_WIDE * float(_at(_logs(), when))
    stage.disc(x, top + high * (1 - at), 4, colour)
    stage.text(x + 9, max(top + high * (1 - at), top + 8), words, 13, colour, at="left", bold=True)


def _curves(stage: Stage, when: float) -> None:
    history = life()
    logs = _logs()

    def of_loss(value: float) -> float:
        return (value - 2) / 7

    every = (_share(history.curve[:, 0]), history.curve[:, 1], PALE, 2.0)
    losses = torch.cat((history.curve[:1, 1], history.losses[1:]))  # none was taken before the first step
    means = (logs, losses, INK, 2.2)
    _panel(
        stage,
        0,
        "loss: how badly mini predicts (nats per token)",
        (every, means),
        when,
        of_loss,
        ("2.0", "9.0"),
    )
    loss = float(_at(losses, when))
    _value(stage, 0, when, of_loss(loss), f"{loss:.2f}", INK)
    for number, (name, label, words) in enumerate(CURVES, 1):
        scores = history.statistics[name]  # [C, L, H]
        best = history.best(name)
        others = scores.flatten(1).T
        lines = [(logs, each, PALE, 1.0) for each in others] + [(logs, scores[:, *best], COLOURS[label], 2.4)]
        _panel(stage, number, f"{label.replace('-', ' ')}: {words}", lines, when, float, ("0", "1"))
        score = float(_at(scores[:, *best], when))
        if when >= 6:
            _value(stage, number, when, score, f"{best[0]}.{best[1]}", COLOURS[label])
    bottom = sum(PANELS[-1])
    for step in (16, 100, 1000):
        x = PANELS_LEFT + PANELS_WIDE * float(_share(history.steps.new_tensor([step]))[0])
        stage.text(x, bottom + 13, f"{step:,}", 13, FAINT)
    stage.text(PANELS_LEFT + PANELS_WIDE / 2, bottom + 29, "steps of training", 13, FAINT)


# Scenes


def _counter(stage: Stage, when: float, alpha: float = 1) -> None:
    """Write the step, and the number of tokens read until then."""
    history = life()
    low, part = int(when + 1e-6), when - int(when + 1e-6)
    first, last = (float(history.steps[min(at, len(history.steps) - 1)]) for at in (low, low + 1))
    step = first + (last - first) * part if first == 0 else first * (last / first) ** part
    per_step = float(history.tokens[-1]) / float(history.steps[-1])
    stage.text(LEFT + WIDE, TOP + 10, f"step {round(step):,}", 24, at="right", bold=True, alpha=alpha)
    read = f"{step * per_step / 1e6:.1f} million tokens read"
    stage.text(LEFT + WIDE, TOP + 34, read, 13, FAINT, at="right", alpha=alpha)


def _all(stage: Stage, when: float, seated: float = 0, legend: float = 1) -> None:
    _frame_of_plane(stage, 1 - seated)
    _seats(stage, max(2 * seated - 1, 0))
    _legend(stage, when, legend)
    _counter(stage, when, 1 - min(3 * seated, 1))
    _dots(stage, when, seated)
    _curves(stage, when)


def appear(stage: Stage, t: float) -> None:
    """Draw all heads in their layers, then their positions before the first step."""
    _all(stage, 0.0, 1 - eased(t, 0.5, 0.85), eased(t, 0.75, 0.95))


def along(start: int, end: int) -> Callable[[Stage, float], None]:
    """Return a scene that moves from one checkpoint to another and pauses."""

    def draw(stage: Stage, t: float) -> None:
        _all(stage, start + (end - start) * min(max((t - 0.04) / 0.82, 0.0), 1.0))

    return draw


def outcome(stage: Stage, t: float) -> None:
    """Draw the heads after training as they move back into their layers."""
    _all(stage, len(life().steps) - 1, eased(t, 0.08, 0.4))
