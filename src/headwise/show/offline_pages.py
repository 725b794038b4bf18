"""Pages of one file: they load nothing, and run nothing but the script that is in them.

What is put into a template is looked at once: a text that looks like one of its marks stays a text.
"""

from __future__ import annotations

import base64
import hashlib
import html
import os
from collections.abc import Mapping
from pathlib import Path

from ..whole_files import place_for, whole_file

__all__ = ["check_page_path", "filled", "framed", "policy", "save_page"]


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


def policy(*, style: str, script: str | None = None, images: bool = False) -> str:
    """The Content-Security-Policy of a page: this very style and script, pictures inside it, no network."""
    parts = ["default-src 'none'", f"style-src {_hash(style)}"]
    if script is not None:
        parts.append(f"script-src {_hash(script)}")
    if images:
        parts.append("img-src data:")
    return "; ".join([*parts, "base-uri 'none'", "form-action 'none'"])


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def framed(page: str, title: str, *, height: int, scripts: bool = False) -> str:
    """A page inside a notebook, kept apart from it."""
    return (
        f'<iframe title="{html.escape(title)}" sandbox="{"allow-scripts" if scripts else ""}" '
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
