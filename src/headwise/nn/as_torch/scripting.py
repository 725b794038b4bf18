"""What `torch.jit.script` compiles instead of our classes."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["scriptable"]


def scriptable(module: nn.Module, kind: Any) -> Any:
    """torch's own class on the same parts, with its own list of them: scripting replaces children."""
    twin = kind.__new__(kind)
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_modules"] = dict(module._modules)
    return twin
