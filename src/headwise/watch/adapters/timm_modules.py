"""timm's attention layers, which have two ways through one forward: the fused one is taken and heard."""

from __future__ import annotations

from ..attachment import Attachment
from ..holding import Undo, undo_all
from .overriding import lend

__all__ = ["install"]

FLAG = "fused_attn"


def install(attachment: Attachment) -> Undo:
    """Turn the flag on wherever there is one."""
    modules = [module for module in attachment.paths if FLAG in module.__dict__]
    return undo_all([lend(module, FLAG, True) for module in modules])
