"""Stand-ins for a GPU and for packages that do not change what the code computes.

Tensors that code moves to a GPU stay on the CPU. `torch.cuda.is_available()` stays False, so code that tests
it runs as its author intended without a GPU.

jaxtyping, torchtyping, beartype and typeguard check types, and Lightning trains. Here an annotation is the
type it annotates, a decorator returns what it decorates, and a LightningModule is an nn.Module whose other
methods do nothing.
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
WORDS = "it uses a GPU; it was checked on the CPU instead"


def asks_for_gpu(source: str) -> bool:
    """Return True if the source mentions a GPU; only then is `OnCPU` used, which slows all calls of torch."""
    return SPOKEN_OF.search(source) is not None


class OnCPU(TorchFunctionMode):
    """Replaces GPU devices by the CPU.

    Attributes:
        used: whether a GPU was used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is torch.device:  # creating a device does not use it
            return func(*args, **kwargs)
        if name in ("cuda", "xpu") and args and isinstance(args[0], Tensor):
            self.used = True
            return args[0]
        if name == "pin_memory" and args:
            return args[0]
        is_move = name == "to" and len(args) > 1
        if any(map(self._is_away, args)):
            args = tuple(self._on_cpu(argument) for argument in args)
        if is_move and type(args[1]) is int:  # x.to(0) is the first GPU
            self.used, args = True, (args[0], "cpu", *args[2:])
        if self._is_away(kwargs.get("device")) or type(kwargs.get("device")) is int:
            self.used, kwargs = True, {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)

    def _is_away(self, value: object) -> bool:
        if isinstance(value, torch.device):
            return value.type in KINDS
        return type(value) is str and value.partition(":")[0] in KINDS

    def _on_cpu(self, value: object) -> object:
        if not self._is_away(value):
            return value
        self.used = True
        return torch.device("cpu")


def quieten() -> None:
    """Replace functions that query a GPU or wait for it."""
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


def decorate(*functions: Any, **_: Any) -> Any:
    """Return what `@beartype` or `@jaxtyped(typechecker=beartype)` decorates, unchanged."""
    only = functions[0] if len(functions) == 1 else None
    if inspect.isroutine(only) or isinstance(only, (type, classmethod, staticmethod, property)):
        return only
    return _Decorator()


class _Decorator:
    """A decorator without effect, and a context manager: `with jaxtyped("context"):`."""

    def __call__(self, annotation: Any) -> Any:
        return annotation

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


DECORATORS = frozenset(
    """jaxtyped beartype typechecked typeguard_ignore beartype_this_package install_import_hook
    patch_typeguard""".split()
)


CHECKS = frozenset("check_type die_if_unbearable move_data_to_device".split())  # these return their argument


class HyperParameters(dict[str, Any]):
    """The arguments stored by `save_hyperparameters`, by key and by attribute."""

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
    _hyperparameters: HyperParameters | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def hparams(self) -> HyperParameters:
        """The stored arguments."""
        if self._hyperparameters is None:
            self._hyperparameters = HyperParameters()
        return self._hyperparameters

    def save_hyperparameters(self, *arguments: Any, ignore: Any = (), frame: Any = None, **_: Any) -> None:
        """Store the constructor's arguments, or those that are named, or a dict or namespace of them."""
        names = [argument for argument in arguments if isinstance(argument, str)]
        for argument in arguments:
            if not isinstance(argument, str):
                self.hparams.update(argument if isinstance(argument, dict) else vars(argument))
        if arguments and not names:
            return
        frame = frame or sys._getframe(1)
        called = inspect.getargvalues(frame)
        held = {name: called.locals[name] for name in called.args[1:]} | called.locals.get(
            called.keywords or "", {}
        )
        left = {ignore} if isinstance(ignore, str) else set(ignore or ())
        self.hparams.update(
            {name: value for name, value in held.items() if name in (names or held) and name not in left}
        )

    def _does_nothing(self, *_: Any, **__: Any) -> None:
        """Stand in for methods that report or step an optimizer."""

    log = log_dict = print = manual_backward = toggle_optimizer = untoggle_optimizer = _does_nothing
    optimizers = lr_schedulers = freeze = unfreeze = _does_nothing


# The report distinguishes the learner's files from torch's by this.
LightningModule.__module__ = "torch.lightning"


def named_in(package: str, name: str) -> Any:
    """Return the stand-in for a name of a package; None if any object will do."""
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
    """Return True if code computes the same without the package."""
    return package.partition(".")[0] in TYPES | TRAINERS
