"""Structure of a model: paths of modules, places of attention, and which modules need a hook.

Watching begins and ends around single forwards, so the structure is cached for each model, for as long as it
has the same modules, of the same classes, with the same configs.
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

ATTENTION_NAME = re.compile(r"(Attention|Attn)\d*$|Attention(?=[A-Z0-9])")
OTHER_NAME = re.compile(
    r"(Attention|Attn)\w*(Output|Pool|Adapter|Mask|Bias|Gate|Norm|Dropout|Embed|Intermediate)"
)
LINEAR = re.compile(r"(Linear|Lightning|Delta)\w*?(Attention|Attn)")
CROSS = ("cross", "encoder_attn", "encdec", "encoder_decoder")
DISPATCHES, FUSED = "ALL_ATTENTION_FUNCTIONS", "scaled_dot_product_attention"
PLAIN = frozenset("softmax log_softmax softmin Softmax LogSoftmax Softmin".split())
# Functions that attend without calling a torch function that is listened to.
OPAQUE = frozenset(
    "flex_attention flash_attn_func flash_attn_varlen_func flash_attn_qkvpacked_func "
    "flash_attn_kvpacked_func memory_efficient_attention sageattn".split()
)
SOFTMAX = {DISPATCHES, FUSED, "logsumexp", "multi_head_attention_forward", "MultiheadAttention"}
SOFTMAX |= PLAIN | OPAQUE
# Names of classes with a softmax that is not attention.
CHOICE_NAME = re.compile(r"Router|Gat(e|ing)\b|MoE|Moe|Expert|Matcher|Quantizer|HyperConnection")


def likely_places(model: nn.Module) -> list[str]:
    """Return the paths of modules that seem to attend, the innermost only."""
    named = list(model.named_modules())
    likely = _without_parts({path: module for path, module in named if _is_likely(module)})
    parents = {path.rpartition(".")[0] if path else None for path in likely}
    ancestors: set[str] = set()
    for parent in parents:
        while parent:
            ancestors.add(parent)
            parent = parent.rpartition(".")[0]
    certain = {path for path, module in named if _is_certain(module)}
    if any(path for path in likely if path):
        ancestors.add("")
    return [path for path in likely if path not in ancestors or path in certain]


def _without_parts(likely: dict[str, nn.Module]) -> list[str]:
    """Return places without modules named like attention inside a layer that has the softmax itself.

    CvT's layer calls its convolutions `CvtSelfAttentionProjection`; the layer attends, they do not.
    """
    with_softmax = {path for path, module in likely.items() if not SOFTMAX.isdisjoint(_names_around(module))}

    def is_part(path: str, module: nn.Module) -> bool:
        parts = path.split(".")
        ancestors = (".".join(parts[:end]) for end in range(len(parts)))
        return any(
            ancestor in with_softmax for ancestor in ancestors if ancestor != path
        ) and not _may_attend(module)

    return [path for path, module in likely.items() if not is_part(path, module)]


def _is_certain(module: nn.Module) -> bool:
    """Return True if a module certainly attends."""
    return isinstance(module, (nn.MultiheadAttention, MultiHeadAttention)) or bool(
        names_in(type(module)) & {DISPATCHES, FUSED}
    )


def _is_likely(module: nn.Module) -> bool:
    """Return True if a module seems to attend, by its class and its name."""
    kind = type(module)
    if kind.__module__.startswith("torch.nn."):
        return isinstance(module, nn.MultiheadAttention)
    if _is_certain(module):
        return True
    named = ATTENTION_NAME.search(kind.__name__) and not OTHER_NAME.search(kind.__name__)
    if named and LINEAR.search(kind.__name__) and not _may_attend(module):
        return False  # linear attention has no softmax, hence no weights
    return bool(named) and (any(True for _ in module.children()) or any(True for _ in module.parameters()))


def _may_attend(module: nn.Module) -> bool:
    """Return True if the code of a module, or of one inside it, has something that may be a softmax."""
    kinds: set[type] = {type(inner) for inner in module.modules()}
    return any(not SOFTMAX.isdisjoint(_names_reached(kind)) for kind in kinds)


@cache
def _names_reached(kind: type) -> frozenset[str]:
    """Return the names in the methods of a class, and in the functions of its module that they call."""
    module, names = vars(sys.modules.get(kind.__module__, object)), set(names_in(kind))
    visited: set[str] = set()
    while new := [name for name in names - visited if name in module]:
        for name in new:
            visited.add(name)
            function = _unwrapped(module[name])
            if function is not None:
                names.update((function.__name__, *function.__code__.co_names))
    return frozenset(names) | {kind.__name__}


def _names_around(module: nn.Module) -> frozenset[str]:
    """Return the names that the class of a module reaches."""
    kind: type = type(module)
    return _names_reached(kind)


def _unwrapped(value: object) -> FunctionType | None:
    """Return the function inside a wrapper (a cache, a compiler), or None if there is none."""
    if isinstance(value, FunctionType | _lru_cache_wrapper):
        value = inspect.unwrap(value)
    return value if isinstance(value, FunctionType) else None


def opaque_call(module: nn.Module) -> str | None:
    """Return the opaque function that a module's class or attributes name, or None."""
    functions = [_unwrapped(value) for value in vars(module).values()]
    names = _names_around(module) | {function.__name__ for function in functions if function is not None}
    return min(names & OPAQUE, default=None)


@lru_cache(maxsize=4096)
def sounds_cross(path: str | None) -> bool:
    """Return True if the name of a layer, without that of its model, says that it is cross-attention.

    Example:
        >>> sounds_cross("decoder.layers.0.encoder_attn"), sounds_cross("cross_encoder.layer.0.attention")
        (True, False)
    """
    parts = (path or "").lower().split(".")
    numbered = [index for index, part in enumerate(parts) if part.isdigit()]
    layer_parts = parts[numbered[-1] + 1 :] if numbered else parts[-2:]
    return any(word in part for part in layer_parts for word in CROSS)


def names_in(kind: type) -> frozenset[str]:
    """Return the global names and attributes in the code of a class's methods."""
    return _names_in(kind)


@cache
def _names_in(kind: type) -> frozenset[str]:
    names: set[str] = set()
    for base in kind.__mro__:
        if (
            base is nn.Module or base.__module__ == "transformers.modeling_utils"
        ):  # whose methods name the dispatch
            break
        for value in vars(base).values():
            function = inspect.unwrap(value) if callable(value) else None
            code = getattr(function, "__code__", None)
            if code is not None:
                names.update(code.co_names)
    return frozenset(names)


Result = TypeVar("Result")
Kind = TypeVar("Kind", bound=nn.Module)


class Structure:
    """The modules of one model: their paths, which of them attend, and which need a hook."""

    def __init__(self, model: nn.Module) -> None:
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            raise ArgumentError(
                f"model must not be scripted or traced: {type(model).__name__} holds a ScriptModule, which "
                "takes no hooks; watch the model it was made from"
            )
        # Weak references, so that the cache does not keep the model alive.
        self.paths = WeakKeyDictionary({module: path for path, module in model.named_modules()})
        self.places = likely_places(model)
        places = set(self.places)
        self.hooked = WeakKeyDictionary(
            {
                module: (path, path in places)
                for module, path in self.paths.items()
                if not path or path in places or not _never_attends(module)
            }
        )
        self.suspects = WeakKeyDictionary(
            {module: path for module, path in self.paths.items() if self._may_hide_attention(module, path)}
        )
        self._memo: dict[str, Any] = {}

    def _may_hide_attention(self, module: nn.Module, path: str) -> bool:
        """Return True if a Transformers layer that is not named attention has a softmax in its code.

        Routers of experts, which most of these are, are left out by their names, for a hook costs time.
        """
        if module in self.hooked or not type(module).__module__.startswith("transformers."):
            return False
        if PLAIN.isdisjoint(_names_around(module)) or CHOICE_NAME.search(type(module).__name__):
            return False
        return not any(place.startswith(f"{path}.") for place in self.places)

    def of_kind(self, kinds: tuple[type[Kind], ...]) -> list[Kind]:
        """Return the modules of some classes or their subclasses, cached."""
        references = self.once(str(kinds), lambda: [ref(m) for m in self.paths if isinstance(m, kinds)])
        return [module for reference in references if (module := reference()) is not None]

    def once(self, name: str, find: Callable[[], Result]) -> Result:
        """Return the result of `find`, which is called the first time only."""
        if name not in self._memo:
            self._memo[name] = find()
        result: Result = self._memo[name]
        return result


def _never_attends(module: nn.Module) -> bool:
    """Return True for modules that never attend themselves: torch's layers, and Transformers' non-models."""
    origin = type(module).__module__
    if origin.startswith("transformers."):
        return not hasattr(type(module), "from_pretrained")
    return origin.startswith(("torch.nn.", "headwise.parallel.sharded_layers"))


# A module when its structure was read, by weak references: itself, its class, its config
_Snapshot = tuple[Callable[[], object], type[nn.Module], Callable[[], object]]


def _is_same(snapshot: _Snapshot, module: nn.Module) -> bool:
    """Return True if a module is that of a snapshot; ids do not tell, for a new module may reuse one."""
    itself, kind, config = snapshot
    return itself() is module and kind is type(module) and config() is module.__dict__.get("config")


def _modules(model: nn.Module) -> list[nn.Module]:
    """Return what `model.modules()` does, in less time: without a generator for every level."""
    modules: dict[nn.Module, None] = {}
    queue: list[nn.Module | None] = [model]
    while queue:
        module = queue.pop()
        if module is not None and module not in modules:
            modules[module] = None
            children = module._modules
            if children:
                queue.extend(reversed(children.values()))
    return list(modules)


def _weak(value: object) -> Callable[[], object]:
    """Return a weak reference, or a function that returns the value where none is possible."""
    try:
        return ref(value)
    except TypeError:  # None or a dict, which is kept alive so that its id is not reused
        return lambda: value


_structures: WeakKeyDictionary[nn.Module, tuple[list[_Snapshot], Structure]] = WeakKeyDictionary()


def structure_of(model: nn.Module) -> Structure:
    """Return the current structure of a model."""
    return structure_and_modules(model)[0]


def structure_and_modules(model: nn.Module) -> tuple[Structure, list[nn.Module]]:
    """Return the current structure of a model, and all of its modules."""
    cached, modules = _structures.get(model), _modules(model)
    if cached is not None and len(cached[0]) == len(modules) and all(map(_is_same, cached[0], modules)):
        return cached[1], modules
    structure = Structure(model)
    _structures[model] = [(_weak(m), type(m), _weak(m.__dict__.get("config"))) for m in modules], structure
    return structure, modules


def modules_at(model: nn.Module, paths: list[str]) -> list[nn.Module | None]:
    """Return the module at each path, as `get_submodule` does in more time; None where there is none."""
    modules: list[nn.Module | None] = []
    for path in paths:
        module: nn.Module | None = model
        for part in path.split(".") if path else ():
            module = None if module is None else module._modules.get(part)
        if module is None:
            with suppress(AttributeError):
                module = model.get_submodule(path)  # an attribute that is not a child
        modules.append(module)
    return modules
