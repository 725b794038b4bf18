"""One head, large: its map, what every key receives, and beside it what the head writes.

Letters: T query_len, S key_len.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..heads.collection import Heads
from ..heads.labels import LABELS, NOTHING_CLEAR
from ..heads.layer import Head
from ..heads.layer_names import Layer
from .heatmaps import CELLS
from .pictured_heads import cells_of, label_of, layer_name, meaning_of, names_of, queries_in, tint
from .sheet import (
    FAINT,
    INK,
    PALE,
    Page,
    drawing,
    dress,
    frame,
    in_letters,
    named,
    room,
    scale_bar,
    sharpness,
    whole,
    words,
)
from .texts import MISSING, fitted, inches, label, quoted, wrapped

if TYPE_CHECKING:
    import numpy
    from matplotlib.figure import Figure

    from .heatmaps import Cells

__all__ = ["head_picture"]

WEIGHTS, WRITES = "Weights", "Weights × norm of what is written"
STRIP, GAP = 0.55, 0.5  # inches: of what keys receive, and between two maps
LARGE, LEAST, PITCH = 5.0, 3.2, 0.15  # inches: without names, the least with names, from one name to the next


def head_picture(
    heads: Heads,
    layer: Layer,
    head: int,
    *,
    batch: int = 0,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    written: bool = False,
    text: str | None = None,
) -> Figure:
    """One head, large: its map with words on both sides, and above it how much every key receives.

    Words are written for up to 60 tokens, else positions; beyond 256 of them positions share cells. Above a
    key stands its share of all the weight: the mean over queries.

    Args:
        batch: which sequence.
        query_tokens: names of the queries, instead of `heads.tokens`; and key_tokens, of the keys.
        written: beside it the weights times the norm of what is written there (Kobayashi 2020), relative to
            the largest norm of the layer; needs `watch(model, written=True)`.
        text: what the model read, for the title.

    Raises:
        ArgumentError: no such layer or head; neither a map nor a picture was kept; nothing measured of what
            is written.
        ShapeError: names that do not fit.
        IndexError: no such sequence.
        PackageMissing: matplotlib is not installed.

    Example:
        >>> import torch, headwise as hw
        >>> mha = hw.MultiHeadAttention(64, 4, causal=True)
        >>> with hw.watch(mha) as heads:
        ...     output, _ = mha(torch.randn(2, 7, 64))
        >>> head_picture(heads, 0, 3, key_tokens="a b c d e f g".split()).get_suptitle()[:15]
        'Layer 0, head 3'
    """
    (one,) = heads.chosen([(layer, head)])
    shown = heads[layer]
    drawing()
    every, lengths, call = cells_of(shown, batch, CELLS)
    pictures = [every[one.head]]
    if written:
        pictures.append(cells_of(shown, batch, CELLS, written=True)[0][one.head])
    names = names_of(heads, batch, call, query_tokens, key_tokens)
    queries = queries_in(call, batch, every.shape[1]).numpy()
    return _drawn(heads, one, pictures, queries, lengths, names, text)


def _drawn(
    heads: Heads,
    one: Head,
    pictures: list[Cells],
    queries: numpy.ndarray,
    lengths: tuple[int, int],
    names: tuple[list[str] | None, list[str] | None],
    text: str | None,
) -> Figure:
    (T, S), (rows, columns) = lengths, pictures[0].shape
    down, across = named(names[0], T, 1), named(names[1], S, 1)
    count = len(pictures)
    tall, wide = (
        max(LEAST, PITCH * length) if kept else LARGE if length > 24 else LEAST
        for length, kept in ((T, down), (S, across))
    )
    if T == S:
        tall = wide = max(tall, wide)
    dpi = sharpness(count * (wide + GAP) + 2, tall + 2)
    wide, tall = whole(wide, columns, dpi), whole(tall, rows, dpi)
    left = 0.35 + room(down, tall / T, T)
    below = 0.4 + room(across, wide / S, None)
    width = left + count * (wide + GAP) + 0.45
    title, sentence = _said(heads, one)
    heading, size = fitted(title, max(width, 6.0) - 0.3, 13, 9, bold=True)
    width = max(width, inches(heading, size, bold=True) + 0.3)
    lines = wrapped(sentence, width - 0.3, 9)
    if text is not None:
        lines.append(quoted(text, width - 0.3, 9))
    lines += wrapped(_how(count > 1, (*down, *across)), width - 0.3, 9)
    top = 0.4 + 0.17 * len(lines)
    under = 0.26 + STRIP + 0.1  # a line that says what a map shows, what keys receive
    page = Page(width, top + under + tall + below, dpi)
    page.head(heading, size, tint(one) or INK)
    for number, line in enumerate(lines):
        at = 1 - (0.46 + 0.17 * number) / page.height
        page.figure.text(0.15 / page.width, at, line, size=9, va="center", **words(FAINT))
    pooled = (rows, columns) != (T, S)
    for number, picture in enumerate(pictures):
        x = left + number * (wide + GAP)
        _strip(page, picture, queries, x, top + 0.26, wide, WRITES if number else WEIGHTS)
        ax = page.heat(picture, lengths, x, top + under, wide, tall)
        frame(ax, lengths, (wide, tall), tint(one))
        dress(ax, lengths, (wide, tall), (down, across), left=number == 0, bottom=True)
    end = left + count * (wide + GAP) - GAP
    some = next((picture for picture in pictures if picture.mask.any()), pictures[0])
    meaning = meaning_of(pooled, False) + (", at the right times norm" if count > 1 else "")
    scale_bar(page, end + 0.08, top + under, min(tall, 5.0), meaning, some)
    page.explain_axes(lengths, (rows, columns), (left, end), (top + under, top + under + tall))
    return in_letters(page.figure)


def _how(written: bool, names: Sequence[str]) -> str:
    how = "Bars above the map: what each key receives, in the mean over queries."
    if written:
        how += " Norms are relative to the largest of the layer."
    if any(MISSING in name for name in names):
        how += f" {MISSING}: a character that no font of this machine has."
    return how


def _said(heads: Heads, one: Head) -> tuple[str, str]:
    """The title, and the sentence that explains the label."""
    where = f"{layer_name(heads[one.path])}, head {one.head}"
    title = f"{heads.title}, {where}" if heads.title else where[0].upper() + where[1:]
    known = {entry.name: entry.meaning for entry in LABELS}
    sentence = known.get(one.label.name, NOTHING_CLEAR)
    return label(f"{title}: {label_of(one) or one.label.name}", 120), sentence[0].upper() + sentence[1:] + "."


def _strip(
    page: Page, picture: Cells, queries: numpy.ndarray, x: float, y: float, wide: float, title: str
) -> None:
    """What every key receives, in the mean over queries that see anything, as bars above the map."""
    filled = picture.filled(0)
    queries = queries * (filled.sum(-1) > 0)
    received = queries @ filled / max(queries.sum(), 1)
    ax = page.axes(x, y, wide, STRIP)
    ax.stairs(received, [key - 0.5 for key in range(len(received) + 1)], fill=True, color=FAINT, linewidth=0)
    highest = float(received.max()) or 1.0
    ax.set_xlim(-0.5, len(received) - 0.5)
    ax.set_ylim(0, highest)
    ax.set_xticks([])
    ax.set_yticks([highest], [f"{highest:.2g}"], **words(FAINT))
    ax.tick_params(length=0, labelsize=7, labelcolor=FAINT, pad=3)
    for name, line in ax.spines.items():
        line.set_visible(name == "bottom")
        line.set_color(PALE)
    said, size = fitted(title, wide, 9, 5)
    ax.set_title(said, loc="left", size=size, pad=4, **words(INK))
