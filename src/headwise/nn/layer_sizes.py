"""The sizes of a layer, checked once, from which the widths of everything follow; a layer in one line.

Letters: H num_heads, Hk num_kv_heads, D head_dim, Dv value_dim, E d_model.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import SupportsIndex

from ..errors import ShapeError

__all__ = ["Sizes", "line"]


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


def line(
    sizes: Sizes,
    causal: bool,
    options: Mapping[str, object],
    sinks: bool,
    others: Iterable[str],
    dropout: float = 0.0,
) -> str:
    """A layer in a line, as its repr has it; of options those that are not None, others in their own words.

    Example:
        >>> line(Sizes.of(512, 8), True, {"window": 7}, False, ["alibi"])
        '8 heads of 64: [B, T, 512] -> [B, 8, T, 64] -> [B, T, 512], causal, window=7, alibi'
    """
    s = sizes
    heads = f"{s.num_heads} heads of {s.head_dim}"
    if s.num_kv_heads != s.num_heads:
        heads += f" over {s.num_kv_heads} key/value heads"
    parts = [f"{heads}: [B, T, {s.d_model}] -> [B, {s.num_heads}, T, {s.value_dim}] -> [B, T, {s.d_model}]"]
    if s.kdim != s.d_model or s.vdim != s.d_model:
        parts.append(f"keys [B, S, {s.kdim}], values [B, S, {s.vdim}]")
    if causal:
        parts.append("causal")
    parts += [f"{name}={value}" for name, value in options.items() if value is not None]
    if sinks:
        parts.append("sinks")
    parts += others
    if dropout:
        parts.append(f"dropout={dropout}")
    return ", ".join(parts)
