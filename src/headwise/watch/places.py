"""Where attention happens in a model, told from its modules alone: the paths of the layers to expect."""

from __future__ import annotations

import inspect
import re
import sys
from functools import cache
from typing import Any

from torch import nn

from ..heads.naming import Layer, resolve, stacks
from ..nn import MultiHeadAttention

__all__ = ["Layer", "likely_places", "names_in", "resolve", "sounds_cross", "stacks"]

SOUNDS_LIKE = re.compile(r"(Attention|Attn)\d*$|Attention(?=[A-Z0-9])")
IS_NOT = re.compile(
    r"(Attention|Attn)\w*(Output|Pool|Adapter|Mask|Bias|Gate|Norm|Dropout|Embed|Intermediate)"
)
LINEAR = re.compile(r"(Linear|Lightning|Delta)\w*?(Attention|Attn)")
CROSS = ("cross", "encoder_attn", "encdec", "encoder_decoder")
DISPATCHES, FUSED = "ALL_ATTENTION_FUNCTIONS", "scaled_dot_product_attention"
SOFTMAX = {DISPATCHES, FUSED, *"softmax log_softmax Softmax logsumexp flex_attention".split()} | {
    "multi_head_attention_forward",
    "MultiheadAttention",
}


def likely_places(model: nn.Module) -> list[str]:
    """Where attention seems to happen, told from the modules alone, innermost ones only."""
    named = list(model.named_modules())
    likely = [path for path, module in named if _is_likely(module)]
    within = {path.rpartition(".")[0] if path else None for path in likely}
    outer: set[str] = set()
    for above in within:
        while above:
            outer.add(above)
            above = above.rpartition(".")[0]
    surely = {path for path, module in named if _is_surely(module)}
    if any(path for path in likely if path):
        outer.add("")
    return [path for path in likely if path not in outer or path in surely]


def _is_surely(module: nn.Module) -> bool:
    return isinstance(module, (nn.MultiheadAttention, MultiHeadAttention)) or bool(
        names_in(type(module)) & {DISPATCHES, FUSED}
    )


def _is_likely(module: nn.Module) -> bool:
    kind = type(module)
    if kind.__module__.startswith("torch.nn."):
        return isinstance(module, nn.MultiheadAttention)
    if _is_surely(module):
        return True
    named = SOUNDS_LIKE.search(kind.__name__) and not IS_NOT.search(kind.__name__)
    if named and LINEAR.search(kind.__name__) and not _may_attend(module):
        return False  # linear attention, as it says: sums without a softmax have no weights to look at
    return bool(named) and (any(True for _ in module.children()) or any(True for _ in module.parameters()))


def _may_attend(module: nn.Module) -> bool:
    """Whether there is a softmax, or what may be one, in the code of a module or of those inside it."""
    kinds: set[Any] = {type(each) for each in module.modules()}
    return any(not SOFTMAX.isdisjoint(_reached(kind)) for kind in kinds)


@cache
def _reached(kind: Any) -> frozenset[str]:
    """The names that the methods of a class mention, and the functions beside it that they call."""
    home, found = vars(sys.modules[kind.__module__]), set(names_in(kind))
    seen: set[str] = set()
    while beside := [name for name in found - seen if name in home]:
        for name in beside:
            seen.add(name)
            value: Any = home[name]
            code = getattr(inspect.unwrap(value) if callable(value) else None, "__code__", None)
            found.update(() if code is None else code.co_names)
    return frozenset(found) | {kind.__name__}


def sounds_cross(path: str | None) -> bool:
    """Whether a place is named as one whose keys come from another text; its own name, not its model's.

    Example:
        >>> sounds_cross("decoder.layers.0.encoder_attn"), sounds_cross("cross_encoder.layer.0.attention")
        (True, False)
    """
    parts = (path or "").lower().split(".")
    numbered = [at for at, part in enumerate(parts) if part.isdigit()]
    own = parts[numbered[-1] + 1 :] if numbered else parts[-2:]
    return any(word in part for part in own for word in CROSS)


def names_in(kind: Any) -> frozenset[str]:
    """The global names and attributes that the methods of a class mention."""
    return _names_in(kind)


@cache
def _names_in(kind: Any) -> frozenset[str]:
    found: set[str] = set()
    for base in kind.__mro__:
        if base is nn.Module or base.__module__ == "transformers.modeling_utils":  # which knows the dispatch
            break
        for value in vars(base).values():
            function: Any = inspect.unwrap(value) if callable(value) else None
            code = getattr(function, "__code__", None)
            if code is not None:
                found.update(code.co_names)
    return frozenset(found)
