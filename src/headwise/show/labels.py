"""Text that users give, as labels: data, never markup, nothing a terminal or a font stumbles over."""

from __future__ import annotations

import unicodedata
from functools import lru_cache

__all__ = ["families", "label", "plain"]

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
