"""`adopt` and `restore`: torch's attention in a model becomes ours, in place, and back again.

Only the class of a module changes: parameters, hooks, training state and all that refers to the module stay.
Other tools change classes, too: `torch.nn.utils.parametrize` and `fully_shard` put a class of their own, made
on the spot, over the one they find. What they found is restored underneath theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ...errors import ArgumentError
from .encoder import TransformerEncoder, TransformerEncoderLayer
from .module import MultiheadAttention

__all__ = ["Adopted", "adopt", "restore"]

OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.MultiheadAttention: MultiheadAttention,
    nn.TransformerEncoderLayer: TransformerEncoderLayer,
    nn.TransformerEncoder: TransformerEncoder,
}
THEIRS: dict[type[nn.Module], type[nn.Module]] = {ours: theirs for theirs, ours in OURS.items()}
MARK = "_adopted_by_headwise"  # only what was adopted is restored


@dataclass(frozen=True)
class Adopted:
    """What `adopt` changed, what it left alone, and why; print it."""

    changed: dict[str, str] = field(default_factory=dict)  # name in the model -> torch's class
    left: dict[str, str] = field(default_factory=dict)  # name in the model -> why

    def __str__(self) -> str:
        if not self.changed and not self.left:
            return "Nothing to adopt: there is no torch.nn.MultiheadAttention in this model."
        lines = [f"Adopted {_count(len(self.changed), 'module')}."]
        lines += [f"  {name or 'the model itself'}: {kind}" for name, kind in self.changed.items()]
        if self.left:
            lines.append(f"Left {_count(len(self.left), 'module')} as they were.")
            lines += [f"  {name or 'the model itself'}: {why}" for name, why in self.left.items()]
        return "\n".join(lines)


def adopt(model: nn.Module) -> Adopted:
    """Make every `torch.nn.MultiheadAttention` in a model ours, in place: the same results, faster.

    `torch.nn.TransformerEncoder` and its layers are taken along, as they would not ask their attention
    otherwise. Subclasses somebody else wrote are left alone, and so is what is parametrised or sharded
    already: adopt first. In training nothing but the speed changes (and which numbers a seed drops: dropout
    goes through memory in order, and our output is contiguous where torch's is transposed); in evaluation
    results are those of training, where torch's native path has others. `torch.ao.quantization.prepare` looks
    for torch's very class: `restore` the model before it.

    Returns:
        What was changed, what was left, and why.

    Example:
        >>> import torch, headwise as hw
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, num_layers=1)
        >>> print(hw.adopt(model))
        Adopted 3 modules.
          the model itself: TransformerEncoder
          layers.0: TransformerEncoderLayer
          layers.0.self_attn: MultiheadAttention
        >>> hw.restore(model)
        3
    """
    _check_model(model)
    report = Adopted()
    for name, module in model.named_modules():
        kind = type(module)
        if kind in OURS:
            if "forward" in module.__dict__:
                report.left[name] = "it has a forward of its own"
                continue
            module.__class__ = OURS[kind]
            module.__dict__[MARK] = True
            report.changed[name] = kind.__name__
        elif issubclass(kind, tuple(OURS)) and not issubclass(kind, tuple(THEIRS)):
            report.left[name] = _why_not(module)
    return report


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise ArgumentError(f"model must be a torch.nn.Module: got {kind}; pass the model itself")


def _why_not(module: nn.Module) -> str:
    kind = type(module)
    if is_parametrized(module):
        names = ", ".join(module.get_submodule("parametrizations")._modules)
        return f"its {names} is parametrised; adopt first, parametrise then"
    if kind.__bases__[0].__module__.startswith("torch.distributed."):
        return f"it is sharded, a {kind.__qualname__}; adopt first, shard then"
    return f"{kind.__module__}.{kind.__qualname__} is a class of its own"


def restore(model: nn.Module) -> int:
    """Give every adopted module its own class back; how many there were.

    What was parametrised or sharded meanwhile stays so, over torch's class instead of ours.

    Raises:
        ArgumentError: a module's class was changed for one that cannot do without ours; none is restored.
    """
    _check_model(model)
    made: dict[type, type] = {**THEIRS, **{kind: kind for kind in OURS}}
    adopted = []
    for name, module in model.named_modules():
        if MARK in module.__dict__:
            adopted.append((module, _over_torchs(type(module), made, name)))
    for module, kind in adopted:
        module.__class__ = kind
        del module.__dict__[MARK]
    return len(adopted)


def _over_torchs(kind: type, made: dict[type, type], name: str) -> type:
    """The same class over torch's in place of ours; `made`: those that are known."""
    if kind not in made:
        if not issubclass(kind, tuple(THEIRS)) or any(map(_knows_its_class, vars(kind).values())):
            raise ArgumentError(
                f"model must have the classes that adopt gave it: {name or 'the model itself'} is a "
                f"{kind.__module__}.{kind.__qualname__} now; give it its class back first"
            )
        bases = tuple(
            _over_torchs(base, made, name) if issubclass(base, tuple(THEIRS)) else base
            for base in kind.__bases__
        )
        held = {key: value for key, value in vars(kind).items() if key not in ("__dict__", "__weakref__")}
        made[kind] = type(kind)(kind.__name__, bases, held)  # type: ignore[misc]
    return made[kind]


def _knows_its_class(value: object) -> bool:
    """Whether this is a method that says `super()` or `__class__`: it belongs to one class for good."""
    for function in (value, getattr(value, "__func__", None), getattr(value, "fget", None)):
        if "__class__" in getattr(getattr(function, "__code__", None), "co_freevars", ()):
            return True
    return False


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
