"""Text made harmless, and made to fit the letters an encoding has."""

from __future__ import annotations

from ...show.texts import plain

MARKS = {"right": "✓", "wrong": "✗", "unknown": "?", "item": "·", "": " "}

PLAINER = {  # for encodings that lack them; whatever else is missing becomes \u....
    "✓": "ok", "✗": "x", "·": "-", "→": ">", "│": "|", "↵": "\\n", "⇥": "\\t",
    "\N{REPLACEMENT CHARACTER}": "?",
    "√": "sqrt", "×": "x", "−": "-", "ᵀ": "^T", "…": "...", "≠": "!=", "≤": "<=", "≥": ">=", "≈": "~",
    "–": "-", "—": "-", "‘": "'", "’": "'", "“": '"', "”": '"',
}  # fmt: skip
LONGEST = 1_000  # characters of one line: a message may hold all that a program printed
MOST_LINES = 20


def harmless(text: str) -> str:
    """Line by line without control characters; tabs as spaces, what is far too long cut off.

    Example:
        >>> harmless("a\\x1b[31m\\n\\tb")
        'a�[31m\\n    b'
    """
    lines = str(text)[: 2 * LONGEST * MOST_LINES].strip("\r\n").splitlines()
    shown = [plain(line.expandtabs(4).rstrip(), LONGEST) for line in lines[:MOST_LINES]]
    if len(lines) > MOST_LINES:
        shown.append(f"... and {len(lines) - MOST_LINES} more lines")
    return "\n".join(shown)


def one_line(text: str) -> str:
    """`harmless`, with spaces where lines ended."""
    return " ".join(harmless(text).split())


def fitting(text: str, encoding: str | None) -> str:
    """The text in letters that `encoding` has; None is the narrowest, ascii.

    Example:
        >>> fitting("✗ scores / √24", "ascii"), fitting("✗ scores / √24", "utf-8")
        ('x scores / sqrt24', '✗ scores / √24')
    """
    encoding = encoding or "ascii"
    try:
        text.encode(encoding)
        return text
    except LookupError:
        encoding = "ascii"
    except UnicodeEncodeError:
        pass
    plainer = "".join(char if _has(encoding, char) else PLAINER.get(char, char) for char in text)
    return plainer.encode(encoding, "backslashreplace").decode(encoding)


def _has(encoding: str, char: str) -> bool:
    try:
        char.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True
