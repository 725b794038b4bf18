"""`adopt` and `restore`: torch's attention in a model becomes ours, in place, and back again.

Only the class of a module changes: parameters, hooks, training state and all that refers to the module stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from .module import MultiheadAttention
from .transformer import TransformerEncoder, TransformerEncoderLayer

__all__ = ["Adopted", "adopt", "restore"]

OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.MultiheadAttention: MultiheadAttention,
    nn.TransformerEncoderLayer: TransformerEncoderLayer,
    nn.TransformerEncoder: TransformerEncoder,
}
THEIRS = {ours: theirs for theirs, ours in OURS.items()}
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
    otherwise. Subclasses somebody else wrote are left alone. In training nothing but the speed changes (and
    which numbers a seed drops, where there is dropout); in evaluation results are those of training, where
    torch's native path has others.

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
        elif kind not in THEIRS and isinstance(module, tuple(OURS)):
            report.left[name] = f"{kind.__module__}.{kind.__qualname__} is a class of its own"
    return report


def restore(model: nn.Module) -> int:
    """Give every adopted module its own class back; how many there were."""
    count = 0
    for module in model.modules():
        if module.__dict__.pop(MARK, False):
            module.__class__ = THEIRS[type(module)]
            count += 1
    return count


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
