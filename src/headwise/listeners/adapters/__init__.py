"""How attention is heard, by family; a model gets all that fit it.

An adapter takes an `Attachment` and changes the model so that its attention is announced; how to undo that
goes into `attachment.undo`. To add a family, add its function and an entry here.
"""

from __future__ import annotations

from collections.abc import Callable

from ..attachment import Attachment
from . import huggingface, modules, torch_functions

__all__ = ["ADAPTERS"]

ADAPTERS: tuple[Callable[[Attachment], None], ...] = (
    huggingface.hear_huggingface,
    modules.hear_torch,
    modules.hear_headwise,
    modules.hear_timm,
    torch_functions.hear_functions,  # the last resort: whatever calls torch's fused function
)
