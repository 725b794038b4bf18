"""What is written to a terminal with rich: tables, their numbers and texts, and how far something long is."""

from __future__ import annotations

import math
import sys
from time import monotonic
from typing import TYPE_CHECKING

from ..errors import needed
from .texts import plain

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.text import Text

    from .fitted_tables import FittedTable

__all__ = ["HEADERS", "IN_WORDS", "WEIGHTS", "Bar", "as_number", "as_text", "empty_table", "table_class"]

HEADERS = {  # name -> what stands above its column: the name, and what the numbers are
    "entropy": "entropy\nnats",
    "effective_keys": "effective\nkeys",
    "confidence": "confi-\ndence",
    "distance": "distance\nkeys",
    "first": "first\nkey",
    "previous": "previous\nkey",
    "itself": "itself",
    "next": "next\nkey",
    "local": "local",
    "max_logit": "max\nlogit",
    "induction": "induc-\ntion",
    "punctuation": "punctu-\nation",
}
WEIGHTS = {  # shares of 1
    "confidence", "first", "previous", "itself", "next", "local", "induction", "duplicate_token", "special",
    "punctuation", "spread", "locality", "streaming", "written_first", "written_special",
}  # fmt: skip
STRONG = 0.5  # a share worth the eye's attention
IN_WORDS = {  # name -> what it is called on a page, and what it says, plainly
    "entropy": ("entropy (nats)", "How widely a head looks: 0 is one word alone, more is many at once."),
    "effective_keys": ("effective keys", "Among how many words, all alike, the head seems to choose."),
    "confidence": ("confidence", "How much of its weight a word gives to the one it looks at most."),
    "distance": ("distance (keys)", "How many words away the weight lies, in the mean."),
    "first": ("first key", "How much of the weight rests on the first token."),
    "previous": ("previous key", "How much of the weight goes to the word just before."),
    "itself": ("itself", "How much of the weight goes to the word itself."),
    "next": ("next key", "How much of the weight goes to the word just after."),
    "local": ("local", "How much of the weight goes to words near by, 8 away at most by default."),
    "max_logit": ("max logit", "The largest score before the softmax; where training goes wrong, it grows."),
    "induction": (
        "induction", "Where a word was said before: how much of the weight goes to what followed it there."
    ),
    "duplicate_token": (
        "duplicate token", "Where a word was said before: how much of the weight goes to those copies."
    ),
    "special": ("special tokens", "How much of the weight goes to marks that are no words, such as [CLS]."),
    "punctuation": ("punctuation", "How much of the weight goes to full stops, commas and the like."),
    "spread": ("spread", "How even the weights are: 1 is the same for every word that can be seen."),
    "locality": ("locality", "How much less weight lies far away than an even look would put there."),
    "streaming": (
        "streaming", "How much of the weight is on the very first and the latest tokens: the others could go."
    ),
    "written_first": (
        "written from the first key", "How much of what the head writes comes from the first token."
    ),
    "written_special": (
        "written from special tokens", "How much of what the head writes comes from marks that are no words."
    ),
}  # fmt: skip


def empty_table(title: str | None = None, *, elsewhere: str | None = None) -> FittedTable:
    """A table as headwise prints them, without columns: it fits any width, and cuts no number.

    Args:
        elsewhere: where all numbers are to be had, for the line that says which columns are left out.

    Raises:
        PackageMissing: rich is not installed.
    """
    table = table_class()
    from rich.box import SIMPLE_HEAD

    shown = None if title is None else as_text(title)
    made = table(box=SIMPLE_HEAD, pad_edge=False, padding=0, title=shown, title_justify="left")
    made.elsewhere = elsewhere
    return made


def table_class() -> type[FittedTable]:
    """rich's tables, fitted.

    Raises:
        PackageMissing: rich is not installed.
    """
    with needed("rich", "headwise tables need rich"):
        import rich.table  # noqa: F401 - fitted_tables may be here without it

        from .fitted_tables import FittedTable
    return FittedTable


def as_text(text: str) -> Text:
    """Names are data: no markup, no escape codes."""
    from rich.text import Text

    return Text(plain(text))


def as_number(name: str, value: float) -> Text:
    """The number of a column; shares from one half on stand out."""
    from rich.text import Text

    if math.isnan(value):  # no query had such a key
        return Text("-", style="dim")
    if name in WEIGHTS:
        return Text(f"{value:.2f}", style="bold" if value >= STRONG else "")
    return Text(f"{value:.2f}" if name == "entropy" else f"{value:.1f}")


# Progress


LINES = 30.0  # seconds between two


class Bar:
    """Things that are done, of how many, how fast, and how long it will take.

    with Bar("Surveying", "documents") as bar:
        bar.tell(1, 2000)
    """

    def __init__(self, words: str, things: str) -> None:
        self.words, self.things = words, things
        self._bar: Progress | None = None
        self._before: int | None = None  # done when it began
        self._began = self._told = monotonic()

    def tell(self, done: int, total: int) -> None:
        """So many are done."""
        now = monotonic()
        if self._before is None:
            self._before, self._began = done, now
            self._bar = _drawn(self.words, self.things, done, total)
        rate = (done - self._before) / max(now - self._began, 1e-9)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, rate=f"{rate:,.3g} {self.things}/s")
        elif now - self._told > LINES and rate:
            self._told = now
            left = _time((total - done) / rate)
            said = f"{done:,} of {total:,} {self.things}, {rate:,.3g} a second, {left} left"
            sys.stderr.write(f"{self.words}: {said}\n")
            sys.stderr.flush()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _time(seconds: float) -> str:
    """Hours, minutes and seconds.

    Example:
        >>> _time(3725)
        '1:02:05'
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _drawn(words: str, things: str, done: int, total: int) -> Progress | None:
    """A bar that has begun; None where there is nobody to see it or nothing to draw it."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ModuleNotFoundError:
        return None
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
        transient=True,
    )
    bar.add_task(words, total=total, completed=done, rate=f"0 {things}/s")
    bar.start()
    return bar
