"""The learner's code made ready: float64, eval, well scaled random weights, all of them in one dict."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .sizes import Sizes
from .surroundings import seed as sow
from .wording import role_word, size_word

__all__ = [
    "Subject", "apart", "attributes_of", "cast_loose", "has_loose", "head_count", "settle", "signature_of",
    "widths_of",
]  # fmt: skip


class _Calm(TorchFunctionMode):
    """No dropout outside of training, and no step down to float32: the numbers behind both can be judged."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in {"dropout", "dropout_", "alpha_dropout", "feature_dropout"}:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            kwargs["dropout_p"] = 0.0
            args = args[:4]
        if name == "float" and isinstance(args[0], Tensor):
            return args[0].double()
        if name in {"to", "type", "softmax"}:
            args = tuple(torch.float64 if one is torch.float32 else one for one in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@dataclass(eq=False)
class Subject:
    """What is examined."""

    body: Any  # an instance, or a function
    files: frozenset[str]
    sizes: Sizes
    is_function: bool = False
    parameters: dict[str, Tensor] = field(
        default_factory=dict
    )  # leaves, by path; a function's weight arguments
    unregistered: list[str] = field(default_factory=list)  # those that state_dict() does not know
    linear: set[str] = field(default_factory=set)  # weights of nn.Linear: [out, in] for certain
    norms: set[str] = field(default_factory=set)  # a normalisation's own
    heads_given: bool = False
    make: Callable[[], Any] | None = None
    apart: dict[str, torch.dtype] = field(default_factory=dict)  # loose tensors of a dtype of their own
    calm: bool = False

    def invoke(self, args: list[object], kwargs: dict[str, object], seed: int = 0) -> object:
        """Call it. The same seed every time: what is random in it is at least the same."""
        sow(seed)
        if not self.calm:
            return self.body(*args, **kwargs)
        with _Calm():
            return self.body(*args, **kwargs)


def signature_of(body: Any) -> inspect.Signature:
    """Of forward, or of the function; without self."""
    target = body.forward if isinstance(body, nn.Module) else body
    if not inspect.isroutine(target) and hasattr(target, "forward"):
        target = target.forward
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):
        return inspect.Signature([inspect.Parameter("inputs", inspect.Parameter.VAR_POSITIONAL)])


def _kept(value: object, path: str, depth: int = 0) -> Iterator[tuple[str, object]]:
    """Modules and tensors in lists, tuples and dicts that torch does not look into."""
    if isinstance(value, (nn.Module, Tensor)):
        yield path, value
    elif isinstance(value, (list, tuple)) and depth < 3:
        for i, one in enumerate(value):
            yield from _kept(one, f"{path}.{i}", depth + 1)
    elif isinstance(value, dict) and depth < 3:
        for key, one in value.items():
            yield from _kept(one, f"{path}.{key}", depth + 1)


def hidden(body: Any) -> Iterator[tuple[str, Any]]:
    """(path, module or tensor) kept where `parameters()` does not see it."""
    owners = list(body.named_modules()) if isinstance(body, nn.Module) else [("", body)]
    skip = set(vars(nn.Module()))
    for prefix, owner in owners:
        for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
            if name in skip:
                continue
            yield from _kept(value, f"{prefix}.{name}" if prefix else name)


def _belongs(body: object) -> tuple[dict[str, nn.Module], list[tuple[str, Tensor]], list[str]]:
    """All modules by path, all learnt tensors by path, and the paths of those that are not registered."""
    modules = dict(body.named_modules()) if isinstance(body, nn.Module) else {}
    tensors: list[tuple[str, Tensor]] = list(body.named_parameters()) if isinstance(body, nn.Module) else []
    known = {id(one) for _, one in tensors} | {id(one) for one in modules.values()}
    buffers = {id(one) for one in body.buffers()} if isinstance(body, nn.Module) else set()
    loose = []
    for path, thing in list(hidden(body)):
        if id(thing) in known or id(thing) in buffers:
            continue
        if isinstance(thing, nn.Module):
            for name, one in thing.named_modules():
                modules[f"{path}.{name}" if name else path] = one
            for name, tensor in thing.named_parameters():
                if id(tensor) not in known:
                    known.add(id(tensor))
                    tensors.append((f"{path}.{name}", tensor))
                    loose.append(f"{path}.{name}")
        elif (
            thing.is_floating_point()
            and thing.is_leaf
            and (thing.requires_grad or role_word(path.split(".")[0]))
        ):
            known.add(id(thing))
            tensors.append((path, thing))
            loose.append(path)
    return modules, tensors, loose


def settle(subject: Subject) -> None:
    """Double, eval, fresh random weights and biases, gradients on."""
    body = subject.body
    modules, _, _ = _belongs(body)
    for module in modules.values():
        module.double().eval()
    cast_loose(body, torch.float64)
    modules, tensors, loose = _belongs(body)
    subject.unregistered = loose
    owners = {name: modules.get(name.rpartition(".")[0]) for name, _ in tensors}
    dice = torch.Generator().manual_seed(20170612)
    D = max(2, subject.sizes.D)
    for name, tensor in tensors:
        owner = owners[name]
        if owner is not None and owner is not body and "norm" in type(owner).__name__.lower():
            subject.norms.add(name)
            continue
        if isinstance(owner, nn.Linear) and name.endswith(".weight"):
            subject.linear.add(name)
        if tensor.is_floating_point() and any(n % D == 0 for n in tensor.shape):
            spread = 0.5 if tensor.ndim == 1 or "bias" in name.lower() else subject.sizes.E**-0.5
            fresh = torch.randn(tensor.shape, generator=dice, dtype=torch.float64) * spread
            with torch.no_grad():
                tensor.copy_(fresh)
        if tensor.is_floating_point() and tensor.is_leaf:
            tensor.requires_grad_(True)
    subject.parameters = dict(tensors)


def _loose(body: object) -> list[tuple[str, Tensor]]:
    """Plain float tensors kept as attributes or in lists, which `Module.to` passes by."""
    return [(path, one) for path, one in hidden(body) if isinstance(one, Tensor) and one.is_floating_point()]


def has_loose(body: object) -> bool:
    """Whether it keeps plain float tensors."""
    return bool(_loose(body))


def apart(body: object) -> dict[str, torch.dtype]:
    """The dtypes of loose tensors that are not of the dtype of its weights: no cast of ours may hide them."""
    weights = body.parameters() if isinstance(body, nn.Module) else ()
    main = next((one.dtype for one in weights if one.is_floating_point()), None)
    return {path: one.dtype for path, one in _loose(body) if main is not None and one.dtype != main}


def cast_loose(body: object, dtype: torch.dtype, but: Mapping[str, torch.dtype] | None = None) -> None:
    """Loose tensors of another dtype in place of its own; those named in `but` of the dtype given there."""
    for path, thing in _loose(body):
        wanted = dtype if but is None else but.get(path, dtype)
        if thing.dtype == wanted:
            continue
        made = thing.detach().to(wanted).requires_grad_(thing.requires_grad)
        *way, last = path.split(".")
        owner: object = body
        try:
            for step in way:
                if isinstance(owner, (list, tuple)):
                    owner = owner[int(step)]
                else:
                    owner = owner[step] if isinstance(owner, dict) else getattr(owner, step)
            if isinstance(owner, list):
                owner[int(last)] = made
            elif isinstance(owner, dict):
                owner[last] = made
            elif not isinstance(owner, tuple):
                setattr(owner, last, made)
        except (AttributeError, KeyError, IndexError, ValueError, TypeError):
            continue


def attributes_of(body: object) -> Iterator[tuple[str, int]]:
    """Whole numbers kept as attributes, the outermost first."""
    owners = list(body.modules()) if isinstance(body, nn.Module) else [body]
    for owner in owners:
        for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
            if isinstance(value, int) and not isinstance(value, bool):
                yield name, value


def head_count(body: object) -> int | None:
    """How many heads it says it has: an attribute, a list with one module a head, parameters [H, E, D]."""
    for name, value in attributes_of(body):
        if size_word(name) == "heads" and value > 0:
            return value
    for path, thing in [*(body.named_modules() if isinstance(body, nn.Module) else ()), *hidden(body)]:
        if isinstance(thing, nn.ModuleList) and "head" in path.lower() and len(thing):
            return len(thing)
    lists = [
        len(v) for _, v in vars(body).items() if isinstance(v, list) and v and isinstance(v[0], nn.Module)
    ]
    if lists:
        return lists[0]
    shapes = [tensor.shape for _, tensor in _belongs(body)[1] if tensor.ndim == 3]
    counts = {shape[0] for shape in shapes if 1 < shape[0] and shape[0] * min(shape[1:]) == max(shape[1:])}
    return counts.pop() if len(counts) == 1 else None


def widths_of(body: object) -> list[int]:
    """Widths its input may have, the likeliest first."""
    found = [value for name, value in attributes_of(body) if size_word(name) == "width"]
    modules = body.modules() if isinstance(body, nn.Module) else ()
    found += [one.in_features for one in modules if isinstance(one, nn.Linear)]
    tensors = [tensor for _, tensor in _belongs(body)[1] if tensor.ndim >= 2]
    found += [n for tensor in tensors for n in reversed(tensor.shape)]
    return [n for n in dict.fromkeys(found) if 1 < n <= 8192]
