"""The page: sources beside this file, put into one that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
import os
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from ...show.tables import plain
from ...whole_files import place_for, whole_file
from .page_data import page_json

if TYPE_CHECKING:
    from .explanation import Explanation

__all__ = ["check_path", "framed", "page", "save"]

SCRIPTS = ("numbers.js", "sums.js", "maps.js", "panel.js", "controls.js")


def page(explanation: Explanation) -> str:
    """The whole page as text. It may load nothing, and run nothing but its own script."""
    folder = files(__package__) / "page"
    style = (folder / "page.css").read_text("utf-8")
    parts = [(folder / name).read_text("utf-8") for name in SCRIPTS]
    script = '(() => {\n"use strict";\n' + "\n".join(parts) + "\n})();\n"
    allowed = f"style-src {_hash(style)}; script-src {_hash(script)}"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    text = (folder / "page.html").read_text("utf-8")
    fill = {
        "TITLE": html.escape(plain(explanation.name, 80)),
        "POLICY": policy,
        "STYLE": style,
        "DATA": page_json(explanation),
        "SCRIPT": script,
    }
    before, *rest = text.split("{{")
    for piece in rest:  # each mark once, and nothing that was put in is looked at again
        mark, after = piece.split("}}", 1)
        before += fill[mark] + after
    return before


def _hash(text: str) -> str:
    """How a policy names a script or a style it allows."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def framed(text: str) -> str:
    """A page inside a notebook, kept apart from it."""
    return (
        '<iframe title="headwise explain" sandbox="allow-scripts" '
        'style="width: 100%; height: 760px; border: 1px solid #8886; border-radius: 8px" '
        f'srcdoc="{html.escape(text)}"></iframe>'
    )


def save(text: str, out: str | os.PathLike[str]) -> Path:
    """Write a page: all of it or, where anything goes wrong, nothing. Returns where.

    Raises:
        ArgumentError: not an .html; no such folder; a folder that cannot be written to.
    """
    place = check_path(out)
    with whole_file(place) as half:
        half.write_text(text, "utf-8", newline="\n")
    return place


def check_path(out: str | os.PathLike[str]) -> Path:
    """Where a page may be written, links followed; raises `ArgumentError` as `save` does."""
    return place_for(out, (".html", ".htm"), ".html", "explain.html")
