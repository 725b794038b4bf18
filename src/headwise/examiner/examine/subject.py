"""The class or function that is examined, made ready: float64, eval, random weights, all in one dict.

Its sizes are all different, so that no two axes can be confused. Code that runs only in float32 is examined
in float32, with larger tolerances.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .environment import by_default
from .environment import seed as sow
from .vocabulary import FRAMEWORKS, role_word, size_word


@dataclass(frozen=True)
class Sizes:
    """Sizes of an examination: B batch, T and S long or short, E width, H num_heads, D head_dim."""

    E: int = 24
    H: int = 4
    D: int = 6
    B: int = 3
    long: int = 7
    short: int = 5
    block: int = 16  # the longest sequence that the module is built for
    value: int | None = None  # channels of a head's values, if not D

    def of_width(self, E: int, H: int | None = None) -> Sizes:
        """Return these sizes with another width, and the head_dim that follows from it."""
        H = self.H if H is None else H
        return replace(self, E=E, H=H, D=max(1, E // max(1, H)))

    def shorter(self, length: int) -> Sizes:
        """Return these sizes for code that takes sequences up to this length."""
        return replace(self, long=length, short=max(2, length - 2), block=length)


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
USUAL = ((24, 4), (32, 4), (64, 8), (512, 8), (768, 12))


_thread = threading.local()


@contextlib.contextmanager
def recorded_dropout() -> Iterator[list[Tensor]]:
    """Record the inputs of dropout in this thread."""
    _thread.dropped = []
    try:
        yield _thread.dropped
    finally:
        _thread.dropped = None


class _ExactNumbers(TorchFunctionMode):
    """Leave out dropout, and compute in float64 where the code casts to float32."""

    def __init__(self, exact: bool = True) -> None:
        super().__init__()
        self.exact = exact

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in {"dropout", "dropout_", "alpha_dropout", "feature_dropout"}:
            undropped = args[0] if args else kwargs["input"]
            if (noted := getattr(_thread, "dropped", None)) is not None:
                noted.append(undropped.detach().clone())
            return undropped
        if name == "scaled_dot_product_attention":
            kwargs["dropout_p"] = 0.0
            args = args[:4]
        if not self.exact:
            return func(*args, **kwargs)
        if name == "float" and isinstance(args[0], Tensor):
            return args[0].double()
        if name in {"to", "type", "softmax"}:
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@dataclass(eq=False)
class Subject:
    """The class or function that is examined, and what is known about it."""

    body: Any  # an instance, or a function
    files: frozenset[str]
    sizes: Sizes
    is_function: bool = False
    parameters: dict[str, Tensor] = field(default_factory=dict)  # by path, or a function's weight arguments
    unregistered: list[str] = field(default_factory=list)  # paths that are not in state_dict()
    linear: set[str] = field(default_factory=set)  # weights of nn.Linear, which are [out, in]
    norms: set[str] = field(default_factory=set)  # parameters of norms
    frozen: set[str] = field(default_factory=set)  # parameters without requires_grad
    heads_given: bool = False
    make: Callable[[], Any] | None = None
    fresh: Callable[[], Any] | None = (
        None  # builds an instance with dtypes and weights as its author has them
    )
    loose_dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # loose tensors of another dtype
    calm: bool = False  # called without dropout and without casts to float32
    dtype: torch.dtype = torch.float64  # float32 for code that runs in nothing else
    numpy: bool = False  # it works on arrays of NumPy
    holders: dict[str, str] = field(default_factory=dict)  # arguments with several weights: "dict", "list"
    first_paths: frozenset[str] | None = None  # of loose tensors before the first call
    arguments: Mapping[str, object] = field(
        default_factory=dict
    )  # values of its parameters, as the user passed them

    def invoke(self, args: list[object], kwargs: dict[str, object], seed: int = 0) -> object:
        """Call it, with random generators seeded, so that random code is at least repeatable."""
        sow(seed)
        clear = reset_method(self.body)
        if clear is not None:  # state that is kept on purpose starts empty
            getattr(self.body, clear)()
        call = entry_of(self.body)
        with by_default(self.dtype) if self.dtype is torch.float32 else contextlib.nullcontext():
            if not self.calm:
                return call(*args, **kwargs)
            with _ExactNumbers(self.dtype is torch.float64):
                return call(*args, **kwargs)

    @property
    def weight_arguments(self) -> set[str]:
        """The names of a function's arguments that are weights."""
        return {path.partition(".")[0] for path in self.parameters} if self.is_function else set()

    def weights(self) -> dict[str, object]:
        """Return a function's weights by argument, collected into dicts and lists where it takes these."""
        weights: dict[str, Any] = {}
        for path, tensor in self.parameters.items():
            name, _, key = path.partition(".")
            kind = self.holders.get(name)
            if kind is None:
                weights[name] = tensor
            elif kind == "list":
                weights.setdefault(name, []).append(tensor)
            else:
                weights.setdefault(name, {} if kind == "dict" else types.SimpleNamespace())
                if kind == "dict":
                    weights[name][key] = tensor
                else:
                    setattr(weights[name], key, tensor)
        return weights

    @property
    def exact(self) -> bool:
        """True if it runs in float64, so that differences in the last digits count."""
        return self.dtype is torch.float64

    @property
    def tolerance(self) -> float:
        """Differences below this share of the output count as none."""
        return 1e-9 if self.exact else 1e-5

    @property
    def gradient_tolerance(self) -> float:
        """Gradients below this share of the largest one count as zero."""
        return 1e-13 if self.exact and not self.numpy else 1e-6


METHODS = ("forward", "call", "attend", "attention", "compute", "apply", "run", "step")


def entry_of(body: Any) -> Any:
    """Return what is called: the object itself, or a method of it such as `forward`."""
    if callable(body):
        return body
    return next((getattr(body, name) for name in METHODS if callable(getattr(body, name, None))), body)


def signature_of(body: Any) -> inspect.Signature:
    """Return the signature of `forward` or of the function, without self."""
    target = body.forward if isinstance(body, nn.Module) else entry_of(body)
    if not inspect.isroutine(target) and hasattr(target, "forward"):
        target = target.forward
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):
        return inspect.Signature([inspect.Parameter("inputs", inspect.Parameter.VAR_POSITIONAL)])


def is_array(value: object) -> bool:
    """Return True for a NumPy array of floats, without importing NumPy."""
    return (
        type(value).__module__ == "numpy"
        and type(value).__name__ == "ndarray"
        and getattr(value, "dtype", None) in ("float64", "float32", "float16")
    )


def of_numpy(body: object) -> bool:
    """Return True if its file uses NumPy and not torch, so that it is called with arrays."""
    file = getattr(body, "__globals__", None)
    if file is None:
        file = vars(sys.modules.get(type(body).__module__, types.SimpleNamespace()))
    names = [
        member.__name__ if isinstance(member, types.ModuleType) else getattr(member, "__module__", None) or ""
        for member in list(file.values())
    ]
    packages = {name.partition(".")[0] for name in names}
    return "numpy" in packages and "torch" not in packages and not isinstance(body, nn.Module)


def _nested_members(value: object, path: str, depth: int = 0) -> Iterator[tuple[str, object]]:
    """Yield (path, value) of the modules, tensors and arrays in lists, tuples and dicts."""
    if isinstance(value, (nn.Module, Tensor)) or is_array(value):
        yield path, value
    elif isinstance(value, (list, tuple)) and depth < 3:
        for i, item in enumerate(value):
            yield from _nested_members(item, f"{path}.{i}", depth + 1)
    elif isinstance(value, dict) and depth < 3:
        for key, item in value.items():
            yield from _nested_members(item, f"{path}.{key}", depth + 1)


def loose_members(body: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of modules, tensors and arrays that are not registered with torch."""
    owners = list(body.named_modules()) if isinstance(body, nn.Module) else [("", body)]
    skip = set(vars(nn.Module()))
    for prefix, owner in owners:
        for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
            if name in skip:
                continue
            yield from _nested_members(value, f"{prefix}.{name}" if prefix else name)


def _is_weight(path: str, tensor: Tensor, in_module: bool) -> bool:
    """Return True if an unregistered tensor is a weight, by `requires_grad` or by its name.

    In a class that is no nn.Module, where nothing is registered, all tensors with two axes but masks are.
    """
    if not tensor.is_floating_point():
        return False
    if tensor.requires_grad or any(role_word(part) for part in path.split(".") if not part.isdigit()):
        return True
    name = path.split(".")[-1].lower()
    if in_module or "pos" in name or name in {"pe", "mask", "tril", "bias_mask"}:
        return False
    return tensor.ndim >= 2 and len(tensor.unique()) > 2


def _members(
    body: object, first_paths: frozenset[str] | None = None
) -> tuple[dict[str, nn.Module], list[tuple[str, Tensor]], list[str]]:
    """Return all modules by path, all weights by path, and the paths of the weights not registered."""
    in_module = isinstance(body, nn.Module)
    modules = dict(body.named_modules()) if isinstance(body, nn.Module) else {}
    tensors: list[tuple[str, Tensor]] = list(body.named_parameters()) if isinstance(body, nn.Module) else []
    ids = {id(thing) for _, thing in tensors} | {id(thing) for thing in modules.values()}
    buffers = {id(buffer) for buffer in body.buffers()} if isinstance(body, nn.Module) else set()
    loose = []
    for path, thing in list(loose_members(body)):
        if id(thing) in ids or id(thing) in buffers or (first_paths is not None and path not in first_paths):
            continue
        if isinstance(thing, nn.Module):
            for name, module in thing.named_modules():
                modules[f"{path}.{name}" if name else path] = module
            for name, tensor in thing.named_parameters():
                if id(tensor) not in ids:
                    ids.add(id(tensor))
                    tensors.append((f"{path}.{name}", tensor))
                    loose.append(f"{path}.{name}")
            continue
        plain = _as_tensor(thing)
        if plain.is_leaf and _is_weight(path, plain, in_module):
            ids.add(id(thing))
            tensors.append((path, plain))
            loose.append(path)
    return modules, tensors, loose


def _as_tensor(thing: Any) -> Tensor:
    """Return the tensor, or a tensor that shares the memory of an array."""
    return torch.from_numpy(thing) if is_array(thing) else thing


_RESET_METHODS: weakref.WeakKeyDictionary[nn.Module, str | None] = weakref.WeakKeyDictionary()


def reset_method(body: object) -> str | None:
    """Return the name of a method that clears the state between calls and leaves the weights, or None."""
    names = [name for name in ("reset", "reset_state", "reset_cache", "clear_cache") if hasattr(body, name)]
    if not names or not isinstance(body, nn.Module):
        return None
    if body not in _RESET_METHODS:
        _RESET_METHODS[body] = next((name for name in names if _only_clears(body, name)), None)
    return _RESET_METHODS[body]


def _only_clears(body: nn.Module, name: str) -> bool:
    """Return True if a method without arguments leaves the parameters as they are."""
    try:
        copied = copy.deepcopy(body)
        method = getattr(copied, name)
        if not inspect.ismethod(method) or inspect.signature(method).parameters:
            return False
        method()
        before, after = dict(body.named_parameters()), dict(copied.named_parameters())
    except Exception:  # it cannot be copied, or not called now
        return False
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def in_precision(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast real numbers of the module to this dtype, and leave complex ones, which `Module.to` would cut."""
    return module._apply(lambda x: x.to(dtype) if x.is_floating_point() else x)


def with_parameters_of(subject: Subject, body: nn.Module) -> nn.Module:
    """Give `body` the precision and parameters of `subject`, and return it; its buffers stay."""
    in_precision(body, subject.dtype).load_state_dict(dict(subject.body.named_parameters()), strict=False)
    return body


def settle(subject: Subject) -> None:
    """Make the subject ready: its dtype, eval, new random weights and biases, gradients on."""
    body = subject.body
    if subject.first_paths is None:
        subject.first_paths = frozenset(path for path, _ in loose_members(body))
        _as_leaves(body)
    modules, _, _ = _members(body, subject.first_paths)
    for module in modules.values():
        in_precision(module, subject.dtype).eval()
    subject.numpy = subject.numpy or any(is_array(thing) for _, thing in loose_members(body))
    cast_loose(body, subject.dtype)
    modules, tensors, loose = _members(body, subject.first_paths)
    subject.unregistered = loose
    owners = {name: modules.get(name.rpartition(".")[0]) for name, _ in tensors}
    dice = torch.Generator().manual_seed(20170612)
    D = max(2, subject.sizes.D)
    for name, tensor in tensors:
        owner = owners[name]
        if owner is not None and owner is not body and "norm" in type(owner).__name__.lower():
            subject.norms.add(name)
            continue
        one_wide = isinstance(owner, CONVOLUTIONS) and set(owner.kernel_size) == {1}
        if (isinstance(owner, nn.Linear) or one_wide) and name.endswith(".weight"):
            subject.linear.add(name)
        if tensor.is_floating_point() and any(n % D == 0 for n in tensor.shape):
            spread = 0.5 if tensor.ndim == 1 or "bias" in name.lower() else subject.sizes.E**-0.5
            fresh = torch.randn(tensor.shape, generator=dice, dtype=torch.float64) * spread
            with torch.no_grad():
                tensor.copy_(fresh)
        if tensor.is_floating_point() and tensor.is_leaf:
            if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
                subject.frozen.add(name)
            tensor.requires_grad_(True)
    subject.parameters = dict(tensors)


def _loose(body: object) -> list[tuple[str, Any]]:
    """Return (path, value) of unregistered float tensors and arrays, which `Module.to` does not cast."""
    return [
        (path, thing)
        for path, thing in loose_members(body)
        if is_array(thing) or (isinstance(thing, Tensor) and thing.is_floating_point())
    ]


def has_loose(body: object) -> bool:
    """Return True if it keeps unregistered float tensors or arrays."""
    return bool(_loose(body))


def loose_dtypes(body: object) -> dict[str, torch.dtype]:
    """Return the dtypes of unregistered tensors that differ from that of its weights."""
    weights = body.parameters() if isinstance(body, nn.Module) else ()
    main = next((weight.dtype for weight in weights if weight.is_floating_point()), None)
    return {
        path: thing.dtype
        for path, thing in _loose(body)
        if main is not None and isinstance(thing, Tensor) and thing.dtype != main
    }


def cast_loose(body: object, dtype: torch.dtype, but: Mapping[str, torch.dtype] | None = None) -> None:
    """Cast unregistered tensors to `dtype`, or to the dtype that `but` has for their path."""
    for path, thing in _loose(body):
        wanted = dtype if but is None else but.get(path, dtype)
        if is_array(thing):
            number = str(wanted).removeprefix("torch.")
            if thing.dtype != number or not thing.flags.writeable or min(thing.strides, default=0) < 0:
                _replace_member(body, path, thing.astype(number).copy())  # writeable
        elif thing.dtype != wanted:
            _replace_member(body, path, thing.detach().to(wanted).requires_grad_(thing.requires_grad))


def _as_leaves(body: object) -> None:
    """Make leaves of tensors computed from leaves, such as `torch.randn(d, d, requires_grad=True) / d`."""
    for path, thing in _loose(body):
        if isinstance(thing, Tensor) and not thing.is_leaf:
            _replace_member(body, path, thing.detach().requires_grad_())


def _replace_member(body: object, path: str, value: object) -> None:
    """Put a value in place of the one at this path, where it can be set."""
    *steps, last = path.split(".")
    owner: object = body
    try:
        for step in steps:
            if isinstance(owner, (list, tuple)):
                owner = owner[int(step)]
            else:
                owner = owner[step] if isinstance(owner, dict) else getattr(owner, step)
        if isinstance(owner, list):
            owner[int(last)] = value
        elif isinstance(owner, dict):
            owner[last] = value
        elif not isinstance(owner, tuple):
            setattr(owner, last, value)
    except (AttributeError, KeyError, IndexError, ValueError, TypeError):
        return


def globals_of(cls: type) -> dict[str, int]:
    """Return the sizes that a class reads from globals of its file: meaning -> number."""
    sizes: dict[str, int] = {}
    for owner in cls.__mro__:
        module = sys.modules.get(owner.__module__)
        if module is None or owner.__module__.startswith((*FRAMEWORKS, "builtins")):
            continue
        for method in vars(owner).values():
            code = getattr(method, "__code__", None)
            for name in code.co_names if isinstance(code, types.CodeType) else ():
                value, word = vars(module).get(name), size_word(name)
                if isinstance(value, int) and not isinstance(value, bool) and word and value > 0:
                    sizes.setdefault(word, value)
    return sizes


def fields_of(config: object) -> list[tuple[str, object]]:
    """Return (name, value) of the fields of a configuration: a dict, a named tuple or any object."""
    if isinstance(config, Mapping):
        return [(str(name), value) for name, value in config.items()]
    if isinstance(config, tuple) and hasattr(config, "_fields"):
        return list(zip(config._fields, config, strict=True))
    return list(vars(config).items()) if hasattr(config, "__dict__") else []


def attributes_of(body: object) -> Iterator[tuple[str, int]]:
    """Yield (name, value) of the integers kept as attributes, the outermost first."""
    owners = list(body.modules()) if isinstance(body, nn.Module) else [body]
    for owner in owners:
        for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
            if isinstance(value, int) and not isinstance(value, bool):
                yield name, value
            elif size_word(name) == "config":  # the whole configuration is an attribute
                for field, number in fields_of(value):
                    if isinstance(number, int) and not isinstance(number, bool):
                        yield field, number


def head_count(body: object) -> int | None:
    """Return the number of heads, by an attribute, a list of one module per head, or parameters [H, E, D]."""
    for name, value in attributes_of(body):
        if size_word(name) == "heads" and value > 0:
            return value
    heads = globals_of(type(body)).get("heads")
    if heads:
        return heads
    for path, thing in [*(body.named_modules() if isinstance(body, nn.Module) else ()), *loose_members(body)]:
        if isinstance(thing, nn.ModuleList) and "head" in path.lower() and len(thing):
            return len(thing)
    if not hasattr(body, "__dict__"):
        return None
    lists = [
        len(v) for _, v in vars(body).items() if isinstance(v, list) and v and isinstance(v[0], nn.Module)
    ]
    if lists:
        return lists[0]
    shapes = [tensor.shape for _, tensor in _members(body)[1] if tensor.ndim == 3]
    counts = {shape[0] for shape in shapes if 1 < shape[0] and shape[0] * min(shape[1:]) == max(shape[1:])}
    return counts.pop() if len(counts) == 1 else None


def batch_of(body: object) -> int | None:
    """Return the batch size that it keeps as an attribute, or reads from its file."""
    batches = [value for name, value in attributes_of(body) if size_word(name) == "batch"]
    return batches[0] if batches else globals_of(type(body)).get("batch")


def widths_of(body: object) -> list[int]:
    """Return the widths that its input may have, the likeliest first."""
    widths = [value for name, value in attributes_of(body) if size_word(name) == "width"]
    widths += [value for word, value in globals_of(type(body)).items() if word == "width"]
    modules = body.modules() if isinstance(body, nn.Module) else ()
    for module in modules:
        widths += [module.in_features] if isinstance(module, nn.Linear) else []
        widths += [module.in_channels] if isinstance(module, CONVOLUTIONS) else []
    tensors = [tensor for _, tensor in _members(body)[1] if tensor.ndim >= 2]
    widths += [n for tensor in tensors for n in reversed(tensor.shape)]
    return [n for n in dict.fromkeys(widths) if 1 < n <= 8192]
