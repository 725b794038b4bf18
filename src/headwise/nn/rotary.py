"""Rotary positions: queries and keys turned by their positions, so that products know distances alone.

Each pair of channels (a, b) of a head is a point in the plane, turned by an angle that grows with the
position p, fast for the first pair and slowly for the last:

    (a, b) -> (a cos pθ_i - b sin pθ_i,  a sin pθ_i + b cos pθ_i),    θ_i = base^(-2i / dims)

A product of a query turned by p and a key turned by j depends on p - j and on nothing else of the positions.
Su 2021, "RoFormer"; GPT-J, GPT-NeoX, PaLM, Llama and most models since.

The scalings stretch a model to lengths beyond those it was trained on, by other angles.

Letters: B batch, H heads of queries or keys, T length, D head_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import ArgumentError, ShapeError

__all__ = ["Linear", "Llama3", "Ntk", "Rope", "Scaling", "Yarn"]


class Scaling(Protocol):
    """Other angles than a rope's own."""

    def frequencies(self, rope: Rope, dims: int) -> Tensor:
        """θ, float64 [dims / 2]."""
        ...

    @property
    def attention_factor(self) -> float:
        """What the turned queries and keys are multiplied by, each."""
        ...


@dataclass(frozen=True)
class Rope:
    """Positions turned into queries and keys.

    Args:
        base: of the angles; 10,000 in the paper, 500,000 in Llama 3.
        dims: how many channels of each head are turned, from its first on; the others stay as they are.
            Default all of them. A quarter in GPT-NeoX.
        interleaved: whether a pair is two neighbours, channels 2i and 2i + 1, as in the paper and GPT-J; else
            channels i and i + dims / 2, as in GPT-NeoX and Llama.
        scaling: `Linear`, `Ntk`, `Llama3` or `Yarn`.

    Raises:
        ArgumentError: base not above 0.
        ShapeError: an odd number of channels to turn, or more than a head has.

    Example:
        >>> import headwise as hw
        >>> mha = hw.MultiHeadAttention(512, 8, causal=True, rope=hw.nn.Rope(base=500_000.0))
        >>> output, weights = mha(torch.randn(2, 10, 512))

    Su 2021, section 3.
    """

    base: float = 10_000.0
    dims: int | None = None
    interleaved: bool = False
    scaling: Scaling | None = None
    _tables: dict[Any, Tensor] = field(default_factory=dict, repr=False, compare=False, init=False)

    def __post_init__(self) -> None:
        if not self.base > 0:
            raise ArgumentError(f"base must be above 0: got {self.base}; 10000.0 is the usual one")

    def turned(self, head_dim: int) -> int:
        """How many channels of a head are turned."""
        dims = head_dim if self.dims is None else self.dims
        if dims % 2 or not 0 < dims <= head_dim:
            raise ShapeError(
                f"rope must turn an even number of a head's channels: {dims} of {head_dim}; give dims="
            )
        return dims

    def frequencies(self, head_dim: int) -> Tensor:
        """θ, float64 [dims / 2], on the CPU."""
        dims = self.turned(head_dim)
        if self.scaling is not None:
            return self.scaling.frequencies(self, dims)
        return _own(self.base, dims)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, H, T, D] at these positions, int [T] or [B, T]."""
        cos, sin = self.tables(x.shape[-1], positions)  # [T, dims / 2] or [B, 1, T, dims / 2]
        dims = 2 * cos.shape[-1]
        turned, rest = (x, None) if dims == x.shape[-1] else (x[..., :dims], x[..., dims:])
        if self.interleaved:
            a, b = turned.unflatten(-1, (-1, 2)).unbind(-1)
        else:
            a, b = turned.chunk(2, dim=-1)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        pair = (a * cos - b * sin, b * cos + a * sin)
        new = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return new if rest is None else torch.cat((new, rest), -1)

    def tables(self, head_dim: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of every angle, float32 (float64 for float64 positions' sake never)."""
        angles = positions.double()[..., None] * self.frequencies(head_dim).to(positions.device)
        if positions.ndim == 2:
            angles = angles[:, None]  # for every head
        factor = 1.0 if self.scaling is None else self.scaling.attention_factor
        return (angles.cos() * factor).float(), (angles.sin() * factor).float()


def _own(base: float, dims: int) -> Tensor:
    """base^(-2i / dims)"""
    return base ** (-torch.arange(0, dims, 2, dtype=torch.float64, device="cpu") / dims)


@dataclass(frozen=True)
class Linear:
    """Position interpolation: all angles divided by `factor`. Chen 2023."""

    factor: float

    attention_factor = 1.0

    def frequencies(self, rope: Rope, dims: int) -> Tensor:
        return _own(rope.base, dims) / self.factor


@dataclass(frozen=True)
class Ntk:
    """A larger base, base · factor^(dims / (dims - 2)): slow pairs are stretched, fast ones hardly."""

    factor: float

    attention_factor = 1.0

    def frequencies(self, rope: Rope, dims: int) -> Tensor:
        return _own(rope.base * self.factor ** (dims / (dims - 2)), dims)


@dataclass(frozen=True)
class Llama3:
    """Llama 3.1's: pairs slower than one turn in `original_length / low` are divided by `factor`."""

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original_length: int = 8192

    attention_factor = 1.0

    def frequencies(self, rope: Rope, dims: int) -> Tensor:
        own = _own(rope.base, dims)
        turns = self.original_length * own / (2 * math.pi)  # over the original length
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return kept * own + (1 - kept) * own / self.factor


@dataclass(frozen=True)
class Yarn:
    """YaRN: fast pairs stay, slow ones are divided by `factor`, those between by a ramp. Peng 2023."""

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    given_attention_factor: float | None = None

    @property
    def attention_factor(self) -> float:
        if self.given_attention_factor is not None:
            return self.given_attention_factor
        return 1.0 if self.factor <= 1 else 0.1 * math.log(self.factor) + 1.0

    def frequencies(self, rope: Rope, dims: int) -> Tensor:
        def pair(turns: float) -> float:
            """Which pair makes so many turns over the original length."""
            return dims * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.base))

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dims - 1)
        own = _own(rope.base, dims)
        spread = max(high - low, 1e-3)
        ramp = ((torch.arange(dims // 2, dtype=torch.float64, device="cpu") - low) / spread).clamp(0, 1)
        return own * (1 - ramp) + own / self.factor * ramp
