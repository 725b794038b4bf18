"""Griffe extension of the API pages: docstrings as Markdown, signatures as users call them.

The docstrings write `Example:`, the reader of docstrings knows `Examples:`. A name with a gap in it, as in
"heads/<layer>/dead", is code: Markdown would take the gap for a tag, and show nothing. Signatures are
displayed as `inspect.signature` has them (`headwise.arguments.with_displayed_signature`).
"""

from __future__ import annotations

import re
from typing import Any

import griffe

SINGLE = re.compile(r"^( *)Example:$", re.MULTILINE)
GAP = re.compile(r'"[^"`\n]*<\w+>[^"`\n]*"')
DECORATOR, REQUIRED, HINTS = "with_displayed_signature", "REQUIRED", "wrong"


class Docstrings(griffe.Extension):
    """Changes every docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe with every object."""
        if obj.docstring is not None:
            text = SINGLE.sub(r"\1Examples:", obj.docstring.value)
            obj.docstring.value = GAP.sub(lambda match: f"`{match[0]}`", text)

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Called by griffe with every function: show required parameters as required, and no hints."""
        if not any(str(decorator.value) == DECORATOR for decorator in func.decorators):
            return
        for parameter in list(func.parameters):
            if parameter.default is not None and str(parameter.default) == REQUIRED:
                parameter.default = None
            elif parameter.name == HINTS:
                del func.parameters[HINTS]
