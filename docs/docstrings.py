"""For the API pages: what docstrings of this project mean to Markdown.

The docstrings write `Example:`, the reader of docstrings knows `Examples:`. A name with a gap in it, as in
"heads/<layer>/dead", is code: Markdown would take the gap for a tag, and show nothing.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

SINGLE = re.compile(r"^( *)Example:$", re.MULTILINE)
GAP = re.compile(r'"[^"`\n]*<\w+>[^"`\n]*"')


class Docstrings(griffe.Extension):
    """Changes every docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe with every object."""
        if obj.docstring is not None:
            text = SINGLE.sub(r"\1Examples:", obj.docstring.value)
            obj.docstring.value = GAP.sub(lambda match: f"`{match[0]}`", text)
