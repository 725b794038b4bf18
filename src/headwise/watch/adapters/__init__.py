"""How attention is heard, one file a family; a model gets all that fit it.

An adapter takes an `Attachment`, changes the model so that its attention is announced, and returns how to
undo that. To add a family, add a file and an entry here.
"""

from __future__ import annotations

from collections.abc import Callable

from ..attachment import Attachment
from ..holding import Undo
from . import functions, headwise_modules, huggingface, timm_modules, torch_modules

__all__ = ["ADAPTERS"]

ADAPTERS: tuple[Callable[[Attachment], Undo], ...] = (
    huggingface.install,
    torch_modules.install,
    headwise_modules.install,
    timm_modules.install,
    functions.install,  # the last resort: whatever calls torch's fused function
)
