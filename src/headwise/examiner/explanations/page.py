"""The page of one call: template, style and script are built from page/src/explain, the data goes in here."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from ...show.offline_pages import built, filled, policy
from ...show.texts import plain
from .page_data import page_json

if TYPE_CHECKING:
    from .explanation import Explanation

EXAMPLE = "explain.html"


def page(explanation: Explanation) -> str:
    """The whole page as text. It may load nothing, and run nothing but its own script."""
    template, style, script = built("explain")
    fill = {
        "TITLE": html.escape(plain(explanation.name, 80)),
        "POLICY": policy(style=style, script=script),
        "STYLE": style,
        "DATA": page_json(explanation),
        "SCRIPT": script,
    }
    return filled(template, fill)
