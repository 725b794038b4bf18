"""How texts are shown: on one line, tokens as readers know them, letters that some font here can draw.

What users give as labels is data, never markup, and holds nothing that a terminal or a font stumbles over.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

SYMBOLS = {"\n": "↵", "\r": "↵", "\t": "⇥"}
JOINERS = "\u200c\u200d"  # invisible, yet part of how Persian, Hindi and emoji are spelled
UNSAFE = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # control, format, half characters, line separators
MISSING = "□"  # in the place of what no font of this machine can draw


def plain(text: str, length: int | None = None) -> str:
    """Return the text on one line: control characters made visible, cut to `length` characters.

    Example:
        >>> plain("a\\nb\\x1b[31m"), plain("incomprehensibilities", 8)
        ('a↵b�[31m', 'incompr…')
    """
    harmless = text.isascii() and text.isprintable()  # as nearly every token is: a page may have 131,072
    shown = text if harmless else "".join(map(_visible, text))
    return shown if length is None or len(shown) <= length else shown[: length - 1] + "…"


def encodable(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot hold."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _visible(char: str) -> str:
    unsafe = unicodedata.category(char) in UNSAFE and char not in JOINERS
    return SYMBOLS.get(char, "\N{REPLACEMENT CHARACTER}") if unsafe else char


SPACE, BEGIN, END = "␣", "▁", "</w>"  # a space alone; marks of sentencepiece and of the first byte pairs
EVIDENCE = "ĠĊ"  # a space and a new line, as byte-level vocabularies write them
BRACKETED = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")  # special tokens
BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # as sentencepiece writes a byte of a letter that it lacks


def readable(tokens: Sequence[str]) -> list[str]:
    """Return the tokens of a text without the marks of their tokenizer.

    Bytes are put back together ("Ġthe" is "the", "cafÃ©" is "café"), marks of where a word begins or ends go
    ("▁the", "the</w>"), a space alone is ␣ and a byte that is part of a letter <C3>. "##ing" stays: it says
    that a word goes on. Tokens that hold no such marks are as they were.

    Example:
        >>> readable(["The", "Ġcaf", "Ã©", "Ċ", "Ġ"]), readable(["▁the", "s"]), readable(["play", "##ing"])
        (['The', 'caf', 'é', '\\n', '␣'], ['the', 's'], ['play', '##ing'])
    """
    tokens = [str(token) for token in tokens]
    if _in_bytes(tokens):
        from ..models.byte_pairs import LETTERS, shown_bytes

        return [
            shown_bytes(token) or SPACE if token and set(token) <= LETTERS.keys() else token
            for token in tokens
        ]
    if any(token.startswith(BEGIN) for token in tokens):
        return [
            BYTE.sub(_one_byte, token).replace(BEGIN, " ").strip(" ") or (SPACE if token else token)
            for token in tokens
        ]
    if any(token.endswith(END) for token in tokens):
        return [token.removesuffix(END) or token for token in tokens]
    return tokens


def _one_byte(match: re.Match[str]) -> str:
    byte = int(match[1], 16)
    return chr(byte) if byte < 0x80 else f"<{match[1]}>"


def _in_bytes(tokens: Sequence[str]) -> bool:
    """Return True if tokens are written in the letters of a byte-level vocabulary.

    "Ã©" may be those two letters or the two bytes of é: bytes it is where all tokens are written in letters
    that stand for bytes, and these are a text: with spaces or new lines in it, or letters beyond ASCII.
    """
    text = "".join(token for token in tokens if not BRACKETED.fullmatch(token))
    if text.isascii():
        return False
    from ..models.byte_pairs import LETTERS

    if not set(text) <= LETTERS.keys():
        return False
    data = bytes(LETTERS[letter] for letter in text)
    if any(byte == 0x7F or (byte < 0x20 and byte not in b"\t\n\r\f\v") for byte in data):
        return False
    if any(letter in text for letter in EVIDENCE):
        return True
    try:
        return not data.decode().isascii()
    except UnicodeDecodeError:
        return False


FIRST = "DejaVu Sans"  # comes with matplotlib
WIDE_FONTS = (  # asked first for letters that it lacks, where the machine has them; then any other
    "Noto Sans CJK SC", "Noto Sans CJK JP", "PingFang SC", "Hiragino Sans", "Microsoft YaHei",
    "Malgun Gothic", "Noto Emoji", "Segoe UI Symbol", "Symbola", "Arial Unicode MS", "Noto Sans",
)  # fmt: skip
NO_LETTERS = re.compile(r"colou?r.?emoji|lastresort|last resort|blank", re.IGNORECASE)  # pictures, or boxes
INVISIBLE = re.compile("[\u200c\u200d\ufe00-\ufe0f]")  # joiners and variation selectors: no glyph is missed
_more: list[str] = []  # families that were looked for and found, in the order in which they were needed


def label(text: str, length: int) -> str:
    """Return `plain` text with an empty square for each character in no installed font.

    Right-to-left letters stand in the order in which they are drawn.
    """
    shown = "".join(char if _drawable(char) else MISSING for char in INVISIBLE.sub("", plain(text, length)))
    return shown if _lays_out() else in_drawn_order(shown)


def families(*, bold: bool = False) -> list[str]:
    """Return the installed fonts that the labels so far need, in order of preference.

    bold: those alone that have bold letters, as matplotlib logs a line for every other.
    """
    return [name for name in (FIRST, *_more) if not bold or _has_bold(name)]


def in_bold(text: str) -> bool:
    """Return True if all of a label can be drawn in bold."""
    return all(any(ord(char) in _letters(_file(name)) for name in families(bold=True)) for char in set(text))


@lru_cache(4096)
def _drawable(char: str) -> bool:
    """Return True if a font here can draw a character, and remember that font."""
    if any(ord(char) in _letters(_file(name)) for name in (FIRST, *_more)):
        return True
    for name in _others():
        if ord(char) in _letters(_file(name)) and _has_outline(_file(name), char):
            _more.append(name)
            return True
    return False


@lru_cache(1)
def _faces() -> dict[str, dict[int, str]]:
    """Return the installed upright fonts with letters: family -> weight -> file."""
    from matplotlib.font_manager import fontManager, weight_dict

    faces: dict[str, dict[int, str]] = {}
    for entry in fontManager.ttflist:
        if entry.style == "normal" and not NO_LETTERS.search(f"{entry.name} {entry.fname}"):
            declared = entry.weight
            weight = weight_dict[declared] if isinstance(declared, str) else int(declared)
            faces.setdefault(entry.name, {}).setdefault(weight, entry.fname)
    return faces


@lru_cache(1)
def _others() -> list[str]:
    """Return all font families in the order in which they are tried for missing letters."""
    faces = _faces()
    usual = [name for name in WIDE_FONTS if name in faces]
    rest = sorted(
        faces.keys() - {FIRST, *usual},
        key=lambda name: (400 not in faces[name], "sans" not in name.lower(), name),
    )
    return [*usual, *rest]


def _file(family: str) -> str:
    faces = _faces().get(family, {})
    return faces.get(400) or next(iter(faces.values()), "")


def _has_bold(family: str) -> bool:
    return 700 in _faces().get(family, {})


@lru_cache(512)
def _letters(file: str) -> frozenset[int]:
    """Return the code points that a font has."""
    from matplotlib.font_manager import get_font

    try:
        return frozenset(get_font(file).get_charmap())
    except (OSError, RuntimeError):  # gone or damaged since the list of fonts was made
        return frozenset()


def _has_outline(file: str, char: str) -> bool:
    """Return True if the font has an outline for a character: colour fonts have bitmaps."""
    from matplotlib.font_manager import get_font

    try:
        font = get_font(file)
        font.set_size(10, 72)
        left, low, right, high = font.load_char(ord(char)).bbox
    except (OSError, RuntimeError):
        return False
    return (right > left and high > low) or unicodedata.category(char) in ("Zs", "Mn", "Me")


def as_outlines(text: str) -> bool:
    """Return True if a label must be drawn as shapes: in a PDF, letters of a font without glyph names are all
    drawn as the first."""
    from matplotlib.font_manager import get_font

    for char in {char for char in text if ord(char) not in _letters(_file(FIRST))}:
        file = next((_file(name) for name in _more if ord(char) in _letters(_file(name))), None)
        if file is not None:
            font = get_font(file)
            if not font.get_glyph_name(font.get_char_index(ord(char))):
                return True
    return False


def _lays_out() -> bool:
    """Return True if matplotlib lays out right-to-left text itself (3.11 and later)."""
    from matplotlib import ft2font

    return hasattr(ft2font, "__libraqm_version__")


def in_drawn_order(text: str) -> str:
    """Return text in drawing order: right-to-left runs reversed, Arabic letters joined.

    Enough for a token or a title, not the whole of Unicode's algorithm: numbers and signs inside a run keep
    their own order, and brackets at its end stay where they are.

    Example:
        >>> in_drawn_order("abc שלום 12").encode("unicode_escape")
        b'abc \\\\u05dd\\\\u05d5\\\\u05dc\\\\u05e9 12'
    """
    strong = [_direction(char) for char in text]
    if "R" not in strong:
        return text
    for at, each in enumerate(strong):  # what is neither goes with its neighbours where these agree
        if each == "N":
            before = next((side for side in reversed(strong[:at]) if side != "N"), "L")
            after = next((side for side in strong[at:] if side != "N"), "L")
            strong[at] = before if before == after else "L"
    cuts = [0, *(at + 1 for at, (a, b) in enumerate(pairwise(strong)) if a != b), len(text)]
    runs = [text[a:b] for a, b in pairwise(cuts)]
    return "".join(
        _turned(joined(run)) if strong[cut] == "R" else run for run, cut in zip(runs, cuts[:-1], strict=True)
    )


def _direction(char: str) -> str:
    kind = unicodedata.bidirectional(char)
    return "R" if kind in ("R", "AL") else "L" if kind in ("L", "EN", "AN") else "N"


def _turned(run: str) -> str:
    """Reverse a run, each combining mark still behind its letter."""
    clusters: list[str] = []
    for char in run:
        if clusters and unicodedata.combining(char):
            clusters[-1] += char
        else:
            clusters.append(char)
    return "".join(reversed(clusters))


@lru_cache(1)
def _forms() -> dict[tuple[str, str], str]:
    """Return {(letters, position in a word): presentation form}."""
    forms: dict[tuple[str, str], str] = {}
    for code in (*range(0xFB50, 0xFBFC), *range(0xFE80, 0xFEFD)):
        kind, *letters = unicodedata.decomposition(chr(code)).split() or [""]
        if kind in ("<isolated>", "<final>", "<initial>", "<medial>"):
            base = "".join(chr(int(letter, 16)) for letter in letters)
            forms.setdefault((base, kind[1:-1]), chr(code))
    return forms


def joined(run: str) -> str:
    """Replace Arabic letters by the forms they have beside each other."""
    forms = _forms()
    letters: list[str] = []  # each with what is joined to it for good: lam and alef are one
    for char in run:
        if letters and letters[-1] == "\u0644" and (letters[-1] + char, "isolated") in forms:
            letters[-1] += char
        else:
            letters.append(char)
    solid = [at for at, each in enumerate(letters) if not unicodedata.combining(each[0])]
    shown = list(letters)
    for place, at in enumerate(solid):
        letter = letters[at]
        before = letters[solid[place - 1]] if place else ""
        after = letters[solid[place + 1]] if place + 1 < len(solid) else ""
        leans_back = (before, "initial") in forms and (letter, "final") in forms
        goes_on = (letter, "initial") in forms and (after, "final") in forms
        where = ("isolated", "initial", "final", "medial")[2 * leans_back + goes_on]
        shown[at] = forms.get((letter, where), letter)
    return "".join(
        each if each in letters or all(map(_drawable, each)) else letters[at] for at, each in enumerate(shown)
    )


@lru_cache(8192)
def inches(text: str, size: float, *, bold: bool = False) -> float:
    """Return the width in inches of a label of so many points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    bold = bold and in_bold(text)
    font = FontProperties(family=families(bold=bold), weight="bold" if bold else "normal", size=size)
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return 1.02 * float(width) / 72  # drawn letters stand on dots, a little farther apart


def fitted(text: str, room: float, size: float, least: float, *, bold: bool = False) -> tuple[str, float]:
    """Return a label and its font size that fit into `room` inches: made smaller, then shortened."""
    wide = inches(text, size, bold=bold)
    if wide <= room:
        return text, size
    if inches(text, least, bold=bold) <= room:
        return text, max(least, size * room / wide)
    while len(text) > 1 and inches(f"{text}…", least, bold=bold) > room:
        text = text[:-1]
    return f"{text}…", least


def wrapped(text: str, room: float, size: float, *, bold: bool = False) -> list[str]:
    """Wrap a text between words into lines of at most `room` inches."""
    lines: list[str] = []
    left = text.split()
    while left:
        fits, over = 1, len(left) + 1  # words; halved, for each line that is measured takes a millisecond
        while over - fits > 1:
            some = (fits + over) // 2
            if inches(" ".join(left[:some]), size, bold=bold) <= room:
                fits = some
            else:
                over = some
        lines.append(" ".join(left[:fits]))
        left = left[fits:]
    return lines


def quoted(text: str, room: float, size: float) -> str:
    """Return a text in quotes on one line of this width in inches, shortened with … if it is too long."""
    words = label(" ".join(text[:1000].split()), 400).split(" ")
    for count in range(len(words), 0, -1):
        shown = f"“{' '.join(words[:count])}{'' if count == len(words) else ' …'}”"
        if inches(shown, size) <= room:
            return shown
    word = words[0]
    while word and inches(f"“{word}…”", size) > room:
        word = word[:-1]
    return f"“{word}…”"
