"""How attention is heard, by family; a model gets all that fit it.

An adapter takes an `Attachment`, changes the model so that its attention is announced, and returns how to
undo that. To add a family, add its function and an entry here.
"""

from __future__ import annotations

from ..attachment import Change
from . import functions, huggingface, modules

__all__ = ["ADAPTERS"]

ADAPTERS: tuple[Change, ...] = (
    huggingface.hear_huggingface,
    modules.hear_torch,
    modules.hear_headwise,
    modules.hear_timm,
    functions.hear_functions,  # the last resort: whatever calls torch's fused function
)
