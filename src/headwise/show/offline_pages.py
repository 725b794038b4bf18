"""Pages of one file: they load nothing, and run nothing but the script that is in them.

What is put into a template is looked at once: a text that looks like one of its marks stays a text.
Templates, styles and scripts lie in page/ beside this file; `make page` builds them from the sources.
"""

from __future__ import annotations

import base64
import hashlib
import html
import os
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from ..errors import ArgumentError
from ..whole_files import place_for, whole_file

__all__ = ["Built", "built", "check_page_path", "filled", "framed", "inline", "policy", "save_page"]

# What a browser reads inside an element as its end, or, in a script, as the start of what hides the end.
ENDS = {"style": re.compile("</style", re.IGNORECASE), "script": re.compile("</script|<!--", re.IGNORECASE)}


class Built(NamedTuple):
    """A page's three files, as they are put together."""

    template: str
    style: str
    script: str


def built(name: str) -> Built:
    """The template, style and script of one of our pages, "heads" or "explain".

    Raises:
        ArgumentError: a style or script that would end its element early.
    """
    folder = files(__package__) / "page"
    texts = {ending: (folder / f"{name}.{ending}").read_text("utf-8") for ending in ("html", "css", "js")}
    return Built(texts["html"], inline(texts["css"], "style"), inline(texts["js"], "script"))


def inline(text: str, element: str) -> str:
    """The same text, which may stand inside an element that a browser reads up to its end, whatever it holds.

    Raises:
        ArgumentError: it would end the element early.
    """
    end = ENDS[element].search(text)
    if end is not None:
        line = text.count("\n", 0, end.start()) + 1
        raise ArgumentError(
            f"{element} must not end its element early: got {end[0]!r} in line {line}; write it in two "
            'parts, as "<" + "/"'
        )
    return text


def filled(template: str, fill: Mapping[str, str]) -> str:
    """The template with {{MARK}} replaced by what belongs there.

    Example:
        >>> filled("<p>{{TEXT}}</p>", {"TEXT": "{{TEXT}}"})
        '<p>{{TEXT}}</p>'
    """
    before, *rest = template.split("{{")
    for piece in rest:
        mark, after = piece.split("}}", 1)
        before += fill[mark] + after
    return before


def policy(*, style: str, script: str | None = None, images: bool = False, wasm: bool = False) -> str:
    """The Content-Security-Policy of a page: this very style and script, pictures inside it, no network.

    Args:
        images: pictures that are in the page, and those that its script makes.
        wasm: the script may compile WebAssembly that it holds; still no text becomes code.

    Raises:
        ArgumentError: WebAssembly without a script.
    """
    if wasm and script is None:
        raise ArgumentError(f"wasm needs a script that runs it: wasm={wasm}, script={script}; give both")
    parts = ["default-src 'none'", f"style-src {_hash(style)}"]
    if script is not None:
        parts.append(f"script-src {_hash(script)}" + " 'wasm-unsafe-eval'" * wasm)
    if images:
        parts.append("img-src data:" + " blob:" * (script is not None))
    return "; ".join([*parts, "base-uri 'none'", "form-action 'none'"])


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def framed(page: str, title: str, *, height: int, scripts: bool = False) -> str:
    """A page inside a notebook, kept apart from it; with scripts, its pictures can be saved, too."""
    allowed = "allow-scripts allow-downloads" if scripts else ""
    return (
        f'<iframe title="{html.escape(title)}" sandbox="{allowed}" '
        f'style="width: 100%; height: {height}px; border: 1px solid #8886; border-radius: 8px" '
        f'srcdoc="{html.escape(page)}"></iframe>'
    )


def save_page(text: str, path: str | os.PathLike[str], example: str) -> Path:
    """Write a page: all of it or, where anything goes wrong, nothing. Returns where.

    Raises:
        ArgumentError: not an .html; no such folder; a folder that cannot be written to.
    """
    place = check_page_path(path, example)
    with whole_file(place) as half:
        half.write_text(text, "utf-8", newline="\n")
    return place


def check_page_path(path: str | os.PathLike[str], example: str) -> Path:
    """Where a page may be written, links followed; raises `ArgumentError` as `save_page` does."""
    return place_for(path, (".html", ".htm"), ".html", example)
