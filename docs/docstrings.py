"""For the API pages: the house writes `Example:`, which the reader of docstrings knows as `Examples:`."""

from __future__ import annotations

import re
from typing import Any

import griffe

SINGLE = re.compile(r"^( *)Example:$", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Examples of every docstring become a section of code."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = SINGLE.sub(r"\1Examples:", obj.docstring.value)
