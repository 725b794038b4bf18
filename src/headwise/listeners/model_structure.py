"""What a model is made of: paths, places of attention, told from its modules alone, and which need a hook.

Watching begins and ends around single forwards, so what does not change between them is worked out once and
kept beside the model, for as long as it has the same modules, of the same classes, with the same configs.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import _lru_cache_wrapper, cache, lru_cache
from types import FunctionType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from ..errors import ArgumentError
from ..nn import MultiHeadAttention

SOUNDS_LIKE = re.compile(r"(Attention|Attn)\d*$|Attention(?=[A-Z0-9])")
IS_NOT = re.compile(
    r"(Attention|Attn)\w*(Output|Pool|Adapter|Mask|Bias|Gate|Norm|Dropout|Embed|Intermediate)"
)
LINEAR = re.compile(r"(Linear|Lightning|Delta)\w*?(Attention|Attn)")
CROSS = ("cross", "encoder_attn", "encdec", "encoder_decoder")
DISPATCHES, FUSED = "ALL_ATTENTION_FUNCTIONS", "scaled_dot_product_attention"
PLAIN = frozenset("softmax log_softmax softmin Softmax LogSoftmax Softmin".split())
# Functions that attend without anything that torch's functions would tell of.
OPAQUE = frozenset(
    "flex_attention flash_attn_func flash_attn_varlen_func flash_attn_qkvpacked_func "
    "flash_attn_kvpacked_func memory_efficient_attention sageattn".split()
)
SOFTMAX = {DISPATCHES, FUSED, "logsumexp", "multi_head_attention_forward", "MultiheadAttention"}
SOFTMAX |= PLAIN | OPAQUE
# Classes with a softmax of other things.
CHOOSES = re.compile(r"Router|Gat(e|ing)\b|MoE|Moe|Expert|Matcher|Quantizer|HyperConnection")


def likely_places(model: nn.Module) -> list[str]:
    """Where attention seems to happen, told from the modules alone, innermost ones only."""
    named = list(model.named_modules())
    likely = _without_parts({path: module for path, module in named if _is_likely(module)})
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


def _without_parts(likely: dict[str, nn.Module]) -> list[str]:
    """Places without those that only sound like attention inside a layer that has the softmax itself.

    CvT's layer calls its convolutions `CvtSelfAttentionProjection`; they do not attend, the layer does.
    """
    whole = {path for path, module in likely.items() if not SOFTMAX.isdisjoint(_names_around(module))}

    def is_part(path: str, module: nn.Module) -> bool:
        around = path.split(".")
        above = (".".join(around[:end]) for end in range(len(around)))
        return any(outer in whole for outer in above if outer != path) and not _may_attend(module)

    return [path for path, module in likely.items() if not is_part(path, module)]


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
    kinds: set[type] = {type(inner) for inner in module.modules()}
    return any(not SOFTMAX.isdisjoint(_reached(kind)) for kind in kinds)


@cache
def _reached(kind: type) -> frozenset[str]:
    """The names that the methods of a class mention, and the functions beside it that they call."""
    home, names = vars(sys.modules.get(kind.__module__, object)), set(names_in(kind))
    seen: set[str] = set()
    while beside := [name for name in names - seen if name in home]:
        for name in beside:
            seen.add(name)
            function = _function_behind(home[name])
            if function is not None:
                names.update((function.__name__, *function.__code__.co_names))
    return frozenset(names) | {kind.__name__}


def _names_around(module: nn.Module) -> frozenset[str]:
    kind: type = type(module)
    return _reached(kind)


def _function_behind(value: object) -> FunctionType | None:
    """A function, out of what may be wrapped around it (a cache, a compiler); None: there is none."""
    if isinstance(value, FunctionType | _lru_cache_wrapper):
        value = inspect.unwrap(value)
    return value if isinstance(value, FunctionType) else None


def opaque_call(module: nn.Module) -> str | None:
    """The function by which a module attends unheard, by its class's code or its attributes; None: none."""
    held = [_function_behind(value) for value in vars(module).values()]
    names = _names_around(module) | {function.__name__ for function in held if function is not None}
    return min(names & OPAQUE, default=None)


@lru_cache(maxsize=4096)
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


def names_in(kind: type) -> frozenset[str]:
    """The global names and attributes that the methods of a class mention."""
    return _names_in(kind)


@cache
def _names_in(kind: type) -> frozenset[str]:
    names: set[str] = set()
    for base in kind.__mro__:
        if base is nn.Module or base.__module__ == "transformers.modeling_utils":  # which knows the dispatch
            break
        for value in vars(base).values():
            function = inspect.unwrap(value) if callable(value) else None
            code = getattr(function, "__code__", None)
            if code is not None:
                names.update(code.co_names)
    return frozenset(names)


Found = TypeVar("Found")
Kind = TypeVar("Kind", bound=nn.Module)


class Structure:
    """The parts of one model."""

    def __init__(self, model: nn.Module) -> None:
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            raise ArgumentError(
                f"model must not be scripted or traced: {type(model).__name__} holds a ScriptModule, which "
                "takes no hooks; watch the model it was made from"
            )
        # Weakly: what is kept beside a model must not keep the model.
        self.paths = WeakKeyDictionary({module: path for path, module in model.named_modules()})
        self.places = likely_places(model)
        places = set(self.places)
        self.hooked = WeakKeyDictionary(
            {
                module: (path, path in places)
                for module, path in self.paths.items()
                if not path or path in places or not _is_bystander(module)
            }
        )
        self.suspects = WeakKeyDictionary(
            {module: path for module, path in self.paths.items() if self._may_hide_attention(module, path)}
        )
        self._memo: dict[str, Any] = {}

    def _may_hide_attention(self, module: nn.Module, path: str) -> bool:
        """Whether a layer of Transformers that is not called attention has a softmax of its own in its code.

        Most are routers of experts, whose names say so: they would cost time and never be attention.
        """
        if module in self.hooked or not type(module).__module__.startswith("transformers."):
            return False
        if PLAIN.isdisjoint(_names_around(module)) or CHOOSES.search(type(module).__name__):
            return False
        return not any(place.startswith(f"{path}.") for place in self.places)

    def of_kind(self, kinds: tuple[type[Kind], ...]) -> list[Kind]:
        """The modules of some classes, or of classes made of them; looked for the first time."""
        kept = self.once(str(kinds), lambda: [ref(m) for m in self.paths if isinstance(m, kinds)])
        return [module for weak in kept if (module := weak()) is not None]

    def once(self, name: str, find: Callable[[], Found]) -> Found:
        """What `find` returns, worked out the first time."""
        if name not in self._memo:
            self._memo[name] = find()
        known: Found = self._memo[name]
        return known


def _is_bystander(module: nn.Module) -> bool:
    """Whether a module surely does not attend by itself: torch's layers; in Transformers, all but models."""
    home = type(module).__module__
    if home.startswith("transformers."):
        return not hasattr(type(module), "from_pretrained")
    return home.startswith(("torch.nn.", "headwise.parallel.sharded_layers"))


# A module as it was looked at, without keeping it: itself, its class, its config
_Seen = tuple[Callable[[], object], type[nn.Module], Callable[[], object]]


def _is_still(seen: _Seen, module: nn.Module) -> bool:
    """Whether this is the very module: not by its id, which a new one may have of one that is gone."""
    itself, kind, config = seen
    return itself() is module and kind is type(module) and config() is module.__dict__.get("config")


def _modules(model: nn.Module) -> list[nn.Module]:
    """As `model.modules()`, which goes through a generator for every level of depth."""
    found: dict[nn.Module, None] = {}
    ahead: list[nn.Module | None] = [model]
    while ahead:
        module = ahead.pop()
        if module is not None and module not in found:
            found[module] = None
            inside = module._modules
            if inside:
                ahead.extend(reversed(inside.values()))
    return list(found)


def _weak(thing: object) -> Callable[[], object]:
    try:
        return ref(thing)
    except TypeError:  # None, or a dict: kept, so that nothing else can come to be in its place
        return lambda: thing


_known: WeakKeyDictionary[nn.Module, tuple[list[_Seen], Structure]] = WeakKeyDictionary()


def structure_of(model: nn.Module) -> Structure:
    """The model's structure, as it is now."""
    return structure_and_modules(model)[0]


def structure_and_modules(model: nn.Module) -> tuple[Structure, list[nn.Module]]:
    """The same, and all modules that the model has now."""
    kept, modules = _known.get(model), _modules(model)
    if kept is not None and len(kept[0]) == len(modules) and all(map(_is_still, kept[0], modules)):
        return kept[1], modules
    structure = Structure(model)
    _known[model] = [(_weak(m), type(m), _weak(m.__dict__.get("config"))) for m in modules], structure
    return structure, modules


def modules_at(model: nn.Module, paths: list[str]) -> list[nn.Module | None]:
    """What `get_submodule` finds at each path, in less time; None: nothing is there."""
    found: list[nn.Module | None] = []
    for path in paths:
        module: nn.Module | None = model
        for part in path.split(".") if path else ():
            module = None if module is None else module._modules.get(part)
        if module is None:
            with suppress(AttributeError):
                module = model.get_submodule(path)  # an attribute that is no child
        found.append(module)
    return found
