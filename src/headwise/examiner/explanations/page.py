"""The page: sources beside this file, put into one that needs nothing else."""

from __future__ import annotations

import html
from importlib.resources import files
from typing import TYPE_CHECKING

from ...show.offline_pages import filled, policy
from ...show.texts import plain
from .page_data import page_json

if TYPE_CHECKING:
    from .explanation import Explanation

__all__ = ["EXAMPLE", "page"]

EXAMPLE = "explain.html"
SCRIPTS = ("numbers.js", "sums.js", "maps.js", "panel.js", "controls.js")


def page(explanation: Explanation) -> str:
    """The whole page as text. It may load nothing, and run nothing but its own script."""
    folder = files(__package__) / "page"
    style = (folder / "page.css").read_text("utf-8")
    parts = [(folder / name).read_text("utf-8") for name in SCRIPTS]
    script = '(() => {\n"use strict";\n' + "\n".join(parts) + "\n})();\n"
    fill = {
        "TITLE": html.escape(plain(explanation.name, 80)),
        "POLICY": policy(style=style, script=script),
        "STYLE": style,
        "DATA": page_json(explanation),
        "SCRIPT": script,
    }
    return filled((folder / "page.html").read_text("utf-8"), fill)
