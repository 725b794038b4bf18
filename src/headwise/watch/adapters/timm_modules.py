"""timm's attention layers: of the two ways through their forward, the fused one is taken, and heard there."""

from __future__ import annotations

from torch import nn

from ..attachment import Attachment, Undo

__all__ = ["install"]

FLAG = "fused_attn"
_held: dict[nn.Module, int] = {}  # whose flag was off -> how many attachments hold it on


def install(attachment: Attachment) -> Undo:
    """Turn the flag on wherever it is off."""
    taken = [m for m in attachment.paths if m in _held or m.__dict__.get(FLAG) is False]
    for module in taken:
        _held[module] = _held.get(module, 0) + 1
        setattr(module, FLAG, True)

    def undo() -> None:
        for module in taken:
            _held[module] -= 1
            if not _held[module]:
                del _held[module]
                setattr(module, FLAG, False)

    return undo
