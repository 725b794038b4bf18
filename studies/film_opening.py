"""The film's opening: the question of lesson 0, with what mini predicts and what its head 5.2 attends to.

All numbers are computed here with the built-in model. Each function draws one scene at time t, from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

import headwise as hw

from .film_stage import FAINT, HEAD, INK, PALE, Stage, eased, width_of

TEXT = "The captain read the letter. Then the captain read the"
LINES = ("The captain read the letter.", "Then the captain read the")
WORD, OTHER, ALONE = "letter", "news", " the"
HEAD_NUMBER = (5, 2)  # layer, head: the head of lesson 0
BARS = 3
LEAST = 0.04  # of the weights that are written above an arc
ACCENT, PLAIN = "#d9601a", "#8a92a3"


@dataclass(frozen=True)
class Prediction:
    """A text and the most probable next tokens."""

    text: str
    tokens: tuple[str, ...]
    probabilities: tuple[float, ...]


@dataclass(frozen=True)
class Opening:
    """What mini computes on the text of the opening."""

    predictions: tuple[Prediction, Prediction, Prediction]  # the text, with another word, its last word alone
    tokens: tuple[str, ...]
    weights: tuple[float, ...]  # of the head, from the last token
    without: float  # the probability of the word if the head is switched off


@cache
def opening() -> Opening:
    """Run mini on the texts, once."""
    model, tokenizer, _ = hw.models.load("mini")

    def ids_of(text: str) -> torch.Tensor:
        ids: torch.Tensor = tokenizer(text, return_tensors="pt")["input_ids"]
        return ids

    def prediction(text: str) -> Prediction:
        best = model(ids_of(text))[0, -1].softmax(dim=-1).topk(BARS)
        names = tokenizer.convert_ids_to_tokens(best.indices.tolist())
        return Prediction(text.strip(), tuple(map(str.strip, names)), tuple(best.values.tolist()))

    layer, head = HEAD_NUMBER
    ids = ids_of(TEXT)
    with torch.no_grad():
        first, second, third = (prediction(text) for text in (TEXT, TEXT.replace(WORD, OTHER), ALONE))
        with hw.watch(model, tokenizer=tokenizer, keep=True) as heads:
            model(ids)
        weights = heads[layer].map.dense()[0, head, -1].tolist()
        tokens = tokenizer.convert_ids_to_tokens(ids[0].tolist())
        target = tokens.index(WORD)
        with hw.ablate(model, [HEAD_NUMBER]):
            without = float(model(ids)[0, -1].softmax(dim=-1)[ids[0, target]])
    return Opening((first, second, third), tuple(map(str.strip, tokens)), tuple(weights), without)


@cache
def facts() -> dict[str, str]:
    """Return the numbers of the captions by name."""
    data = opening()
    whole, other, alone = data.predictions
    return {
        "probability": f"{whole.probabilities[0]:.0%}",
        "other_probability": f"{other.probabilities[0]:.0%}",
        "alone_probability": f"{alone.probabilities[0]:.0%}",
        "weight": f"{data.weights[data.tokens.index(WORD)]:.0%}",
        "without": f"{data.without:.0%}",
    }


# Scenes


def question(stage: Stage, t: float) -> None:
    """Draw the text word by word, with a blank for the next word."""
    shown = 0.0
    for number, line in enumerate(LINES):
        words = line.split()
        x = 480 - width_of(line, 40) / 2 - (60 if number else 0)
        for word in words:
            stage.text(x, 190 + 70 * number, word, 40, at="left", alpha=eased(t, shown, shown + 0.05))
            x += width_of(f"{word} ", 40)
            shown += 0.055
        if number:
            blank = eased(t, shown, shown + 0.06)
            stage.outline(x, 238, 124, 46, ACCENT, line=2.5, alpha=blank, corner=6)
            stage.text(x + 62, 261, "?", 34, ACCENT, bold=True, alpha=blank)
    stage.text(480, 380, "Almost any noun can follow “the”. What helps you to guess?", 22, FAINT,
               alpha=eased(t, 0.72, 0.8))  # fmt: skip


def _marked(stage: Stage, y: float, text: str, marked: str, alpha: float) -> None:
    """Write a text with a marked word."""
    x = 60.0
    for word in f"{text} …".split():
        special = word.strip(".") == marked
        stage.text(x, y, word, 22, ACCENT if special else INK, at="left", bold=special, alpha=alpha)
        x += width_of(f"{word} ", 22, special)


def _bars(stage: Stage, y: float, tokens: Sequence[str], shares: Sequence[float], growth: float) -> None:
    """Draw probabilities as bars."""
    for row, (token, share) in enumerate(zip(tokens, shares, strict=True)):
        top = y + 26 * row
        colour = ACCENT if row == 0 else PLAIN
        stage.text(190, top + 10, token, 18, INK, at="right", bold=row == 0, alpha=growth)
        stage.box(204, top, max(560 * share * growth, 2), 20, colour, growth)
        stage.text(214 + 560 * share * growth, top + 10, f"{share:.0%}", 18, colour, at="left", bold=row == 0,
                   alpha=growth)  # fmt: skip


def predictions(stage: Stage, t: float) -> None:
    """Draw what mini predicts for the text, and with another word in it."""
    data = opening()
    for number, (prediction, marked) in enumerate(zip(data.predictions[:2], (WORD, OTHER), strict=True)):
        start, y = (0.02, 0.48)[number], 96 + 196 * number
        _marked(stage, y, prediction.text, marked, eased(t, start, start + 0.08))
        _bars(stage, y + 30, prediction.tokens, prediction.probabilities, eased(t, start + 0.1, start + 0.26))


def alone(stage: Stage, t: float) -> None:
    """Draw what mini predicts from the last word alone."""
    prediction = opening().predictions[2]
    _marked(stage, 150, prediction.text, "", eased(t, 0.02, 0.12))
    _bars(stage, 190, prediction.tokens, prediction.probabilities, eased(t, 0.15, 0.4))
    stage.text(480, 350, "What the last word needs is at another word, and must be brought to it.", 22, FAINT,
               alpha=eased(t, 0.5, 0.62))  # fmt: skip


def _tokens(stage: Stage, y: float, size: float, alpha: float = 1) -> list[float]:
    """Write the tokens in a row. Return the middle of each."""
    names = ["(start)", *opening().tokens[1:]]
    gap = 14.0
    widths = [width_of(name, size) for name in names]
    x = (960 - sum(widths) - gap * (len(names) - 1)) / 2
    middles = []
    for number, (name, width) in enumerate(zip(names, widths, strict=True)):
        last = number == len(names) - 1
        colour = FAINT if number == 0 else ACCENT if last else INK
        stage.text(x + width / 2, y, name, size, colour, bold=last, alpha=alpha)
        middles.append(x + width / 2)
        x += width + gap
    return middles


def look_back(stage: Stage, t: float) -> None:
    """Draw the weights of head 5.2 from the last token, as arcs."""
    data = opening()
    base = 330.0
    middles = _tokens(stage, base + 26, 23)
    to = middles[-1]
    for number, (x, weight) in enumerate(zip(middles[:-1], data.weights[:-1], strict=True)):
        growth = eased(t, 0.1 + 0.03 * number, 0.3 + 0.03 * number)
        high = 60 + 0.26 * (to - x)
        points = [
            (to + (x - to) * part, base - 4 * high * part * (1 - part))
            for part in (step / 40 for step in range(round(40 * growth) + 1))
        ]
        strong = weight >= LEAST
        colour = PALE if not strong else PLAIN if number == 0 else HEAD[0]
        stage.line(points, colour, 1.5 + 16 * weight, alpha=growth)
        if strong:
            stage.text((x + to) / 2, base - high - 16, f"{weight:.0%}", 22, colour, bold=True,
                       alpha=eased(t, 0.5, 0.6))  # fmt: skip
    note = "One row of weights: how much the last “the” takes from each word. They sum to 100%."
    stage.text(480, 400, note, 20, FAINT, alpha=eased(t, 0.6, 0.7))
    stage.text(480, 432, "What fits no word goes to the start of the text.", 20, FAINT,
               alpha=eased(t, 0.7, 0.8))  # fmt: skip


CARDS = (
    ("query", "of the last “the”", "What followed “read the”", "the last time?"),
    ("key", "of “letter”", "I followed “read the”.", ""),
    ("value", "of “letter”", "letter", ""),
)


def three_lists(stage: Stage, t: float) -> None:
    """Draw query, key and value in words."""
    for number, (name, owner, first, second) in enumerate(CARDS):
        alpha = eased(t, 0.04 + 0.2 * number, 0.14 + 0.2 * number)
        x = 50 + 300 * number
        colour = (ACCENT, HEAD[0], HEAD[1])[number]
        stage.outline(x, 130, 260, 180, colour, line=2.5, alpha=alpha, corner=10)
        stage.text(x + 130, 162, name, 26, colour, bold=True, alpha=alpha)
        stage.text(x + 130, 194, owner, 18, FAINT, alpha=alpha)
        stage.text(x + 130, 244 if second else 256, first, 20, alpha=alpha)
        stage.text(x + 130, 272, second, 20, alpha=alpha)
    late = eased(t, 0.66, 0.76)
    stage.line([(180, 318), (180, 344), (480, 344), (480, 318)], FAINT, 2, alpha=late)
    stage.text(330, 368, f"compared: weight {facts()['weight']}", 20, FAINT, alpha=late)
    stage.arrow(780, 318, 780, 346, FAINT, late)
    stage.text(780, 368, f"{facts()['weight']} of it is passed on", 20, FAINT, alpha=late)
    note = "In a model all three are lists of numbers. Training finds them; the words are our reading."
    stage.text(480, 432, note, 19, FAINT, alpha=eased(t, 0.8, 0.9))


def switched_off(stage: Stage, t: float) -> None:
    """Draw the probability of the word with and without the head."""
    data = opening()
    layer, head = HEAD_NUMBER
    _marked(stage, 120, TEXT, "", 1.0)
    rows = (
        ("all heads on", data.predictions[0].probabilities[0]),
        (f"head {layer}.{head} off", data.without),
    )
    for number, (name, share) in enumerate(rows):
        growth = eased(t, 0.08 + 0.3 * number, 0.26 + 0.3 * number)
        y = 190 + 70 * number
        stage.text(230, y + 18, name, 22, at="right", alpha=growth)
        stage.box(246, y, 560 * share * growth, 36, (ACCENT, PLAIN)[number], growth)
        stage.text(258 + 560 * share * growth, y + 18, f"{share:.0%}", 24, (ACCENT, FAINT)[number], at="left",
                   bold=True, alpha=growth)  # fmt: skip
    stage.text(
        246, 340, f"probability of “{WORD}” as the next word", 20, FAINT, at="left", alpha=eased(t, 0.2, 0.3)
    )
