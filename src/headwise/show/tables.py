"""What tables and pictures are written with: texts as they can be shown, numbers, an empty table.

What users give as labels is data, never markup, and holds nothing that a terminal or a font stumbles over.
"""

from __future__ import annotations

import math
import unicodedata
from functools import lru_cache
from typing import TYPE_CHECKING

from ..errors import needed

if TYPE_CHECKING:
    from rich.text import Text

    from .fitted_tables import FittedTable

__all__ = ["HEADERS", "as_number", "as_text", "empty_table", "families", "label", "plain", "table_class"]


# Texts


SEEN = {"\n": "↵", "\r": "↵", "\t": "⇥"}
JOINERS = "\u200c\u200d"  # invisible, yet part of how Persian, Hindi and emoji are spelled
UNSAFE = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # control, format, half characters, line separators
WIDE_FONTS = (  # for scripts the first one lacks, where the machine has them
    "DejaVu Sans",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "PingFang SC",
    "Hiragino Sans",
    "Microsoft YaHei",
    "Malgun Gothic",
    "Arial Unicode MS",
    "Noto Sans",
)


def plain(text: str, length: int | None = None) -> str:
    """The text on one line: control characters made visible, the end cut off beyond `length` characters.

    Example:
        >>> plain("a\\nb\\x1b[31m"), plain("incomprehensibilities", 8)
        ('a↵b�[31m', 'incompr…')
    """
    shown = "".join(map(_visible, text))
    return shown if length is None or len(shown) <= length else shown[: length - 1] + "…"


def _visible(char: str) -> str:
    unsafe = unicodedata.category(char) in UNSAFE and char not in JOINERS
    return SEEN.get(char, "\N{REPLACEMENT CHARACTER}") if unsafe else char


def label(text: str, length: int) -> str:
    """`plain`, with an empty square for what no font here can draw: matplotlib would warn of each."""
    return "".join(char if _drawable(char) else "□" for char in plain(text, length))


@lru_cache(1)
def families() -> list[str]:
    """The fonts of this machine that labels are drawn with, first choice first."""
    from matplotlib.font_manager import fontManager

    here = set(fontManager.get_font_names())
    return [name for name in WIDE_FONTS if name in here]


@lru_cache(4096)
def _drawable(char: str) -> bool:
    from matplotlib.font_manager import findfont, get_font

    return any(get_font(findfont(name)).get_char_index(ord(char)) for name in families())


# Tables


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
    "punctuation", "spread", "locality", "streaming",
}  # fmt: skip
STRONG = 0.5  # a share worth the eye's attention


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
