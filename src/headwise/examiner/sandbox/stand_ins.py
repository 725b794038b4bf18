"""What stands in for what is not here, where the code computes the same without it.

A GPU: what code puts on one lies on the CPU. `torch.cuda.is_available()` stays False, so code that asks first
runs as its author meant it to run without one.

Packages that change nothing about what attention computes: jaxtyping, torchtyping, beartype and typeguard
check types; Lightning trains. An annotation is the type it annotates, a decorator returns what it decorates,
a LightningModule is an nn.Module whose other methods do nothing.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

KINDS = frozenset(("cuda", "mps", "xpu", "hip"))
SPOKEN_OF = re.compile(r"\b(cuda|mps|xpu)\b|\.to\(\s*\d")
WORDS = "it asks for a GPU, and none is used here: what it puts on one lies on the CPU"


def asks_for_gpu(source: str) -> bool:
    """Whether the source speaks of one: what follows costs time at every call of torch's."""
    return SPOKEN_OF.search(source) is not None


class OnCPU(TorchFunctionMode):
    """Devices that are not here are read as the CPU.

    Attributes:
        met: whether any was asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.met = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is torch.device:  # one that is only spoken of
            return func(*args, **kwargs)
        if name in ("cuda", "xpu") and args and isinstance(args[0], Tensor):
            self.met = True
            return args[0]
        if name == "pin_memory" and args:
            return args[0]
        is_move = name == "to" and len(args) > 1
        if any(map(self._is_away, args)):
            args = tuple(self._here(one) for one in args)
        if is_move and type(args[1]) is int:  # x.to(0) is the first GPU
            self.met, args = True, (args[0], "cpu", *args[2:])
        if self._is_away(kwargs.get("device")) or type(kwargs.get("device")) is int:
            self.met, kwargs = True, {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)

    def _is_away(self, one: object) -> bool:
        if isinstance(one, torch.device):
            return one.type in KINDS
        return type(one) is str and one.partition(":")[0] in KINDS

    def _here(self, one: object) -> object:
        if not self._is_away(one):
            return one
        self.met = True
        return torch.device("cpu")


def quieten() -> None:
    """What asks which GPU it is, or waits for it, gets an answer."""
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.set_device = lambda device: None


TYPES = frozenset("jaxtyping torchtyping beartype typeguard".split())
TRAINERS = frozenset("pytorch_lightning lightning lightning_fabric".split())


class Annotation:
    """`Float[Tensor, "batch time width"]` is Tensor."""

    def __class_getitem__(cls, item: Any) -> Any:
        first = item[0] if isinstance(item, tuple) and item else item
        is_annotated = isinstance(first, type) and first not in (int, float, bool, complex)
        return first if is_annotated else torch.Tensor


def decorate(*given: Any, **_: Any) -> Any:
    """`@beartype`, `@jaxtyped(typechecker=beartype)`: what is decorated, as it was."""
    only = given[0] if len(given) == 1 else None
    if inspect.isroutine(only) or isinstance(only, (type, classmethod, staticmethod, property)):
        return only
    return _Decorator()


class _Decorator:
    """Decorates nothing, and can be entered: `with jaxtyped("context"):`."""

    def __call__(self, what: Any) -> Any:
        return what

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


DECORATORS = frozenset(
    """jaxtyped beartype typechecked typeguard_ignore beartype_this_package install_import_hook
    patch_typeguard""".split()
)


CHECKS = frozenset("check_type die_if_unbearable move_data_to_device".split())  # they give back what came


class HyperParameters(dict[str, Any]):
    """What `save_hyperparameters` kept, by key and by attribute."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class LightningModule(nn.Module):
    """An nn.Module with the methods that Lightning gives it."""

    current_epoch = global_step = global_rank = local_rank = 0
    automatic_optimization = True
    trainer = logger = example_input_array = None
    _kept: HyperParameters | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def hparams(self) -> HyperParameters:
        """What was saved."""
        if self._kept is None:
            self._kept = HyperParameters()
        return self._kept

    def save_hyperparameters(self, *given: Any, ignore: Any = (), frame: Any = None, **_: Any) -> None:
        """Keep the constructor's arguments, or those that are named, or a dict or a namespace of them."""
        names = [one for one in given if isinstance(one, str)]
        for one in given:
            if not isinstance(one, str):
                self.hparams.update(one if isinstance(one, dict) else vars(one))
        if given and not names:
            return
        frame = frame or sys._getframe(1)
        called = inspect.getargvalues(frame)
        held = {name: called.locals[name] for name in called.args[1:]} | called.locals.get(
            called.keywords or "", {}
        )
        left = {ignore} if isinstance(ignore, str) else set(ignore or ())
        self.hparams.update(
            {name: one for name, one in held.items() if name in (names or held) and name not in left}
        )

    def _does_nothing(self, *_: Any, **__: Any) -> None:
        """What reports, or steps an optimizer."""

    log = log_dict = print = manual_backward = toggle_optimizer = untoggle_optimizer = _does_nothing
    optimizers = lr_schedulers = freeze = unfreeze = _does_nothing


# The report tells files of the learner's from torch's by this.
LightningModule.__module__ = "torch.lightning"


def named_in(package: str, name: str) -> Any:
    """What `package` has under this name; None: anything."""
    root = package.partition(".")[0]
    if package == "lightning" and name == "pytorch":
        return importlib.import_module("lightning.pytorch")
    if root in TRAINERS:
        return LightningModule if name == "LightningModule" else None
    if name in DECORATORS:
        return decorate
    if name in CHECKS:
        return lambda value, *_, **__: value
    if root in ("jaxtyping", "torchtyping") and name[:1].isupper():
        return Annotation
    if package in ("beartype.typing", "typeguard.typing"):
        import typing

        return getattr(typing, name, None)
    return None


def has_no_effect(package: str) -> bool:
    """Whether code computes the same without it."""
    return package.partition(".")[0] in TYPES | TRAINERS
