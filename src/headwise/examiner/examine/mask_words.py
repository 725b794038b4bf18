"""What the code and its comments say about the mask, for what numbers alone cannot decide.

A module that hides where its mask is 1 is right if that is what it says it does, and inverted if it says the
opposite.
"""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass
from typing import Any

from ..source.parsed import unwarned

__all__ = ["Said", "meant_causal", "said_about", "texts_of"]

_SHOWN = (
    r"(?:may|can|allow\w*|keep|kept|attends?|attended|visible|valid|real|seen?|shown?|shows|unmasked|"
    r"not masked|looks? at|participates?|tokens?|take part|unpadded|non-?pad\w*)"
)
_HIDDEN = (
    r"(?:mask(?:ed|s)?(?: out)?|"
    r"hid\w*|ignor\w*|block\w*|not (?:be )?(?:attend\w*|allowed|visible|seen)|pad\w*|"
    r"forbid\w*|exclud\w*|disallow\w*|invalid|cannot|must not|may not|future)"
)
_BETWEEN = (
    r"[\s\"'`]*(?:=+|:|means?|is|are|for|->|marks?|where|indicates?|denotes?|at|in)?[\s\"'`]*"
    r"(?:(?:the|a|an|positions?|keys?|that|which|to|query|queries|be|it|is|are|should|we|you|elements?|entries|where|"
    r"real|token'?s?)[\s\"'`]+)*"
)


@dataclass(frozen=True)
class Said:
    """What is said about a mask."""

    true_attends: bool | None = None
    added: bool = False  # numbers that are added to the scores
    shape: str = ""  # "[B, T, S]", "[B, 1, T, S]", "[B, S]", "[T, S]"
    in_words: bool = False  # in a docstring or comment, not only in code


def texts_of(obj: object, source: str | None) -> list[str]:
    """The source of a class, of those it derives from, of a function; then the file's docstring."""
    if inspect.isroutine(obj):
        owners: list[Any] = [obj]
    else:
        cls = obj if isinstance(obj, type) else type(obj)
        owners = [one for one in cls.__mro__ if not one.__module__.startswith("torch") and one is not object]
        if not owners:
            return []
    texts = []
    tree = None
    try:
        with unwarned():
            tree = ast.parse(source) if source else None
    except SyntaxError:
        tree = None
    for owner in owners:
        name = getattr(owner, "__name__", "")
        named = [n for n in ast.walk(tree) if getattr(n, "name", None) == name] if tree is not None else []
        if named and source is not None:
            texts.append(ast.get_source_segment(source, named[-1]) or "")
            continue
        try:
            with unwarned():
                texts.append(inspect.getsource(owner))
        except (OSError, TypeError):
            continue
    texts.append((ast.get_docstring(tree) or "") if tree is not None else "")
    return texts


def _words(text: str) -> str:
    """The lines of docstrings and comments that speak of masks, in small letters."""
    quoted = re.findall(r"\"\"\"(.*?)\"\"\"|'''(.*?)'''", text, flags=re.S)
    lines = [line for pair in quoted for part in pair for line in part.splitlines()]
    lines += re.findall(r"#(.*)", text)
    if '"""' not in text and "def " not in text:
        lines = text.splitlines()
    kept = []
    for i, line in enumerate(lines):
        if re.search(r"mask|padding|hide", line.lower()):
            kept.append(line)
            if i + 1 < len(lines) and not re.match(r"\s*\w+\s*(?:\([^)]*\))?:", lines[i + 1]):
                kept.append(lines[i + 1])
    return " ".join(kept).lower()


def _polarity_in_words(low: str) -> bool | None:
    found = set()
    for values, flips in ((r"true|1|1s|ones?|non-?zeros?", False), (r"false|0|0s|zeros?", True)):
        if re.search(rf"(?<![\w.\-])(?:{values})(?![\w.]){_BETWEEN}{_HIDDEN}", low):
            found.add(flips)
        elif re.search(rf"(?<![\w.\-])(?:{values})(?![\w.]){_BETWEEN}{_SHOWN}\b", low) or re.search(
            rf"(?<![\w.\-])(?:{values})\s+(?:or\s+\w+\s+)?(?:means?|where)\b[^.;]*?\b{_SHOWN}\b", low
        ):
            found.add(not flips)
    return found.pop() if len(found) == 1 else None


def _polarity_in_code(text: str, argument: str) -> bool | None:
    low = re.sub(r"#.*", "", text.lower())
    found = set()
    name = rf"(?:self\.)?(?:{re.escape(argument.lower())}|\w*mask\w*)"
    after = r"(?:\[[^\]]*\]|\.\w+\([^()]*\))*"
    attends = (
        rf"masked_fill_?\(\s*{name}{after}\s*==\s*(?:0|false)",
        rf"masked_fill_?\(\s*(?:~|torch\.logical_not\(|not)\s*{name}",
        rf"masked_fill_?\(\s*{name}{after}\.logical_not\(",
        rf"where\(\s*{name}{after}\s*==\s*(?:0|false)",
        rf"where\(\s*~\s*{name}",
        rf"where\(\s*{name}{after}\s*,\s*\w*(?:score|attn|att|energy|logit|sim|dot)",
        rf"\(\s*1(?:\.0?)?\s*-\s*{name}",
        rf"attn_mask\s*=\s*{name}\s*[,)]",
    )
    hides = (
        rf"masked_fill_?\(\s*{name}(?:\[[^\]]*\]|\.(?!logical_not)\w+\([^()]*\))*\s*,",
        rf"masked_fill_?\(\s*{name}{after}\s*==\s*(?:1|true)",
        rf"{name}\s*\*\s*\(?-\s*(?:1e|float|torch|np|math)",
    )
    if any(re.search(pattern, low) for pattern in attends):
        found.add(True)
    if any(re.search(pattern, low) for pattern in hides):
        found.add(False)
    return found.pop() if len(found) == 1 else None


_ADDED = r"added to|additive|adds? to the scores|-inf\b|negative infinity|negative number"
_B, _T, _S = (
    r"(?:b|n|bs|batch\w*)",
    r"(?:t|l|q|seq\w*|\w*len\w*|time\w*|n_?q)",
    r"(?:s|t|l|k|seq\w*|\w*len\w*|time\w*|n_?k)",
)
_SHAPES = (
    ("[B, 1, T, S]", rf"[\[(]\s*{_B}\s*,\s*(?:1|h|heads?|num_heads)\s*,\s*{_T}\s*,\s*{_S}\s*[\])]"),
    ("[B, 1, 1, S]", rf"[\[(]\s*{_B}\s*,\s*1\s*,\s*1\s*,\s*{_S}\s*[\])]"),
    ("[B, T, S]", rf"[\[(]\s*{_B}\s*,\s*{_T}\s*,\s*{_S}\s*[\])]"),
    ("[B, S]", rf"[\[(]\s*{_B}\s*,\s*{_S}\s*[\])]"),
    ("[T, S]", rf"[\[(]\s*{_T}\s*,\s*{_S}\s*[\])]"),
)


def _shape_in_words(low: str) -> str:
    """The first shape given for a mask."""
    found = [
        (m.start(), shape) for shape, axes in _SHAPES for m in re.finditer(rf"mask[^.\n]{{0,60}}?{axes}", low)
    ]
    return min(found)[1] if found else ""


def said_about(texts: list[str], argument: str) -> Said:
    """From the class's own words to those of the file; then what the code does with it."""
    shape, added = "", False
    for text in texts:
        low = _words(text)
        if not low:
            continue
        added = added or bool(re.search(_ADDED, low))
        shape = shape or _shape_in_words(low)
        polarity = None if added else _polarity_in_words(low)
        if polarity is not None or added:
            return Said(polarity, added, shape, in_words=polarity is not None)
    for text in texts:
        polarity = _polarity_in_code(text, argument)
        if polarity is not None:
            return Said(polarity, False, shape)
    return Said(None, False, shape)


def meant_causal(texts: list[str], name: str) -> bool:
    """Whether it builds a triangle for itself, or is called causal."""
    code = "\n".join(texts[:-1])
    code = re.sub(r"(\"\"\"|''').*?\1", "", code, flags=re.S)
    code = re.sub(r"#.*", "", code)
    triangle = re.search(
        r"\btril\w*\b|\btriu\w*\b|is_causal\s*=\s*True|generate_square_subsequent_mask", code
    )
    return bool(triangle) or "causal" in name.lower()
