"""The numbers a `MultiHeadAttention` is made of: sizes, first weights, the line in its repr.

Sizes are checked once, and the widths of everything follow from them.

The first weights are those `torch.nn.MultiheadAttention` of the same sizes draws from the same seed. The
order is torch's: out_proj as every `nn.Linear`, then q, k and v uniformly in the bounds of Glorot 2010, taken
as one matrix where they have the same input and sizes and one by one where not; biases are 0. Sinks start at
0: one more key with an average score. Then what torch's class does not have: a gate as every `nn.Linear`;
norms start at 1, a bias by distance at 0.

Letters: H num_heads, Hk num_kv_heads, D head_dim, Dv value_dim, E d_model.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsIndex

import torch
from torch import Tensor, nn

from ..errors import ShapeError

if TYPE_CHECKING:
    from .multihead import MultiHeadAttention

__all__ = ["Sizes", "in_use", "of", "reset", "undrawn"]


@dataclass(frozen=True)
class Sizes:
    """E, H, Hk, D, Dv and the widths of what comes in, all whole numbers."""

    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    kdim: int
    vdim: int

    @classmethod
    def of(
        cls,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
    ) -> Sizes:
        """Sizes with their defaults: D = E / H, Dv = D, Hk = H, everything coming in E wide.

        Raises:
            ShapeError: not a whole number of at least 1; H that does not divide E; Hk that does not divide H.
        """
        d_model, num_heads = _size("d_model", d_model), _size("num_heads", num_heads)
        num_kv_heads = num_heads if num_kv_heads is None else _size("num_kv_heads", num_kv_heads)
        kdim = d_model if kdim is None else _size("kdim", kdim)
        vdim = d_model if vdim is None else _size("vdim", vdim)
        head_dim = None if head_dim is None else _size("head_dim", head_dim)
        value_dim = None if value_dim is None else _size("value_dim", value_dim)
        if head_dim is None:
            if d_model % num_heads:
                what = f"use {_near(d_model, num_heads)}, or give head_dim"
                if num_heads % d_model == 0:
                    what = f"d_model comes first, as MultiHeadAttention({num_heads}, {d_model})"
                raise ShapeError(f"num_heads must divide d_model: {_division(d_model, num_heads)}; {what}")
            head_dim = d_model // num_heads
        if num_heads % num_kv_heads:
            raise ShapeError(
                f"num_kv_heads must divide num_heads: {_division(num_heads, num_kv_heads)}; "
                f"use {_near(num_heads, num_kv_heads)}"
            )
        return cls(d_model, num_heads, num_kv_heads, head_dim, value_dim or head_dim, kdim, vdim)

    @property
    def query_width(self) -> int:
        """H * D: what q_proj makes."""
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Hk * D"""
        return self.num_kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Hk * Dv"""
        return self.num_kv_heads * self.value_dim

    @property
    def concatenated_width(self) -> int:
        """H * Dv: what out_proj takes."""
        return self.num_heads * self.value_dim

    @property
    def are_torchs(self) -> bool:
        """Whether `torch.nn.MultiheadAttention` can have these sizes."""
        whole = self.num_heads * self.head_dim == self.d_model
        return whole and self.num_kv_heads == self.num_heads and self.value_dim == self.head_dim


def _size(name: str, size: SupportsIndex) -> int:
    """A size as a plain number, of whatever kind of whole number it was."""
    try:
        number = operator.index(size)
    except TypeError:
        number = 0
    if isinstance(size, bool) or number < 1:
        whole = isinstance(size, float) and size >= 1 and size.is_integer()
        what = f"use {size:.0f}, by // where / made it" if whole else "for example 8"
        raise ShapeError(f"{name} must be a whole number of at least 1: got {size!r}; {what}")
    return number


def _division(whole: int, part: int) -> str:
    return f"{whole} = {part} * {whole // part} + {whole % part}"


def _near(whole: int, part: int) -> str:
    """The divisors nearest to what was asked for, as words."""
    divisors = [n for n in range(1, whole + 1) if whole % n == 0]
    below = [n for n in divisors if n < part][-1:]
    above = [n for n in divisors if n > part][:1]
    return " or ".join(map(str, below + above))


# First weights


def undrawn(
    width_in: int, width_out: int, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Linear:
    """An `nn.Linear` whose weights have not been drawn: torch's own would draw them, out of torch's order."""
    layer = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(layer)
    layer.in_features, layer.out_features = width_in, width_out
    layer.weight = nn.Parameter(torch.empty(width_out, width_in, device=device, dtype=dtype))
    empty = torch.empty(width_out, device=device, dtype=dtype) if bias else None
    layer.register_parameter("bias", None if empty is None else nn.Parameter(empty))
    return layer


@torch.no_grad()
def reset(module: MultiHeadAttention) -> None:
    """Draw new weights for all four projections."""
    sizes, out = module.sizes, module.out_proj
    out.reset_parameters()
    three = (module.q_proj, module.k_proj, module.v_proj)
    packed = module._packed
    if sizes.are_torchs and sizes.kdim == sizes.vdim == sizes.d_model:
        drawn: list[Tensor] = [layer.weight for layer in three]
        if packed is not None and packed.holds(three):
            drawn = [packed.weight]  # in one go: on a GPU three draws would be other numbers
        for weight in drawn:
            _glorot(weight, sizes.d_model, 3 * sizes.d_model)
    else:
        for layer in three:
            _glorot(layer.weight, layer.in_features, layer.out_features)
    for layer in (*three, out):
        if layer.bias is not None:
            layer.bias.zero_()
    if module.sinks is not None:
        module.sinks.zero_()
    for more in (module.gate_proj, module.q_norm, module.k_norm, module.relative_bias):
        draw = getattr(more, "reset_parameters", None)
        if callable(draw):  # of whatever may have been put in their place
            draw()


def _glorot(weight: Tensor, fan_in: int, fan_out: int) -> None:
    bound = math.sqrt(3.0) * math.sqrt(2.0 / (fan_in + fan_out))  # sqrt(6 / ..) rounds otherwise than torch
    nn.init.uniform_(weight, -bound, bound)


# The line in the repr


def of(module: MultiHeadAttention) -> str:
    """For example `8 heads of 64: [B, T, 512] -> [B, 8, T, 64] -> [B, T, 512], causal`."""
    s = module.sizes
    heads = f"{s.num_heads} heads of {s.head_dim}"
    if s.num_kv_heads != s.num_heads:
        heads += f" over {s.num_kv_heads} key/value heads"
    parts = [f"{heads}: [B, T, {s.d_model}] -> [B, {s.num_heads}, T, {s.value_dim}] -> [B, T, {s.d_model}]"]
    if s.kdim != s.d_model or s.vdim != s.d_model:
        parts.append(f"keys [B, S, {s.kdim}], values [B, S, {s.vdim}]")
    if module.causal:
        parts.append("causal")
    options = {name: getattr(module, name) for name in ("window", "scale", "softcap")}
    parts += [f"{name}={value}" for name, value in options.items() if value is not None]
    if module.sinks is not None:
        parts.append("sinks")
    parts += in_use(module).values()
    if module.dropout:
        parts.append(f"dropout={module.dropout}")
    return ", ".join(parts)


def in_use(module: MultiHeadAttention) -> dict[str, str]:
    """The options of today's models that a module has, by name, each as the repr says it."""
    said = {
        name: f"{name}={getattr(module, name)!r}" for name in ("rope", "qk_norm", "gate")
        if getattr(module, name) is not None
    }  # fmt: skip
    if module.alibi:
        said["alibi"] = "alibi"
    if module.relative_bias is not None:
        said["relative_bias"] = "relative_bias"
    return said
