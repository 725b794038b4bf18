"""timm's attention layers, which have two ways through one forward: the fused one is taken and heard."""

from __future__ import annotations

from functools import partial

from torch import nn

from ..attachment import Attachment
from ..holding import Undo, hold, undo_all

__all__ = ["install"]

FLAG = "fused_attn"


def install(attachment: Attachment) -> Undo:
    """Turn the flag on wherever there is one."""
    modules = [module for module in attachment.paths if FLAG in module.__dict__]
    return undo_all([hold((FLAG, module), partial(_turn_on, module)) for module in modules])


def _turn_on(module: nn.Module) -> Undo:
    before = getattr(module, FLAG)
    setattr(module, FLAG, True)
    return lambda: setattr(module, FLAG, before)
