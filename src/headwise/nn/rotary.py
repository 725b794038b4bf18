"""Rotary positions: queries and keys turned by their positions, so that products know distances alone.

Each pair of channels (a, b) of a head is a point in the plane, turned by an angle that grows with the
position p, fast for the first pair and slowly for the last:

    (a, b) -> (a cos pθ_i - b sin pθ_i,  a sin pθ_i + b cos pθ_i),    θ_i = base^(-2i / dims)

A product of a query turned by p and a key turned by j depends on p - j and on nothing else of the positions.
Su 2021, "RoFormer"; GPT-J, GPT-NeoX, PaLM, Llama and most models since.

The scalings stretch a model to lengths beyond those it was trained on, by other angles. Each depends on its
own numbers alone, never on the length of a text: dynamic NTK, whose angles change as a text grows, is left
out on purpose, since a cache holds keys that were turned long ago.

Angles are made in float64, and their cosines and sines rounded once. In eager mode they are kept in tables
that all calls and layers with the same `Rope` share: a range of positions is a slice of a table. `Settings`,
the base class, keeps them; the other settings of a layer (options.py) have it, too.

Letters: B batch, H heads of queries or keys, T length, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import MISSING, dataclass, fields
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from ..errors import ArgumentError, ShapeError

FEWEST = 64  # positions in a table
Cached = TypeVar("Cached")


def is_recorded() -> bool:
    """Return True if a compiler or a mode of torch records this call, whose tensors are then not cached."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or bool(torch._C._len_torch_dispatch_stack())
    )


class Settings:
    """A frozen dataclass of plain data that caches tensors computed from it.

    They are never stale, since no field can change, and are in no copy, file, comparison or repr. Copies of a
    layer share its settings, and so the cached tensors.
    """

    _cached: dict[Hashable, Any]

    def __new__(cls, *_: object, **__: object) -> Self:
        instance = super().__new__(cls)
        object.__setattr__(instance, "_cached", {})
        return instance

    def keep(self, key: Hashable, make: Callable[[], Cached]) -> Cached:
        """Return the tensors cached under this key, created by `make()` the first time."""
        if is_recorded():
            return make()
        cached: Cached | None = self._cached.get(key)
        return self.keep_anew(key, make) if cached is None else cached

    def keep_anew(self, key: Hashable, make: Callable[[], Cached]) -> Cached:
        """Cache `make()` under this key, replacing an earlier entry."""
        with torch.inference_mode(False), torch.no_grad():  # a normal tensor, so that training can use it
            value = make()
        self._cached[key] = value
        return value

    def __reduce__(self) -> tuple[type[Self], tuple[object, ...]]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _: object) -> Self:
        return self

    def __repr__(self) -> str:
        """Return the settings as they are written in code, without defaults."""
        arguments = []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.default is MISSING or value != field.default:
                arguments.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(arguments)})"


class Scaling(Settings):
    """Base class of the settings that change the angles of a `Rope`."""

    factor: float

    def __post_init__(self) -> None:
        if not _is_number(self.factor) or not 1 <= self.factor < math.inf:
            raise ArgumentError(
                f"factor must be at least 1 and finite: got {self.factor!r}; 4.0 quadruples the length"
            )

    @property
    def magnitude(self) -> float:
        """The factor of the turned channels of queries and of keys."""
        return 1.0

    def frequencies(self, base: float, dims: int) -> Tensor:
        """Return θ, float64 [dims / 2], on the CPU."""
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class Rope(Settings):
    """Rotary position embedding: queries and keys are rotated by angles that grow with their positions.

    Args:
        base: the base of the frequencies; 10,000 in the paper, 500,000 in Llama 3.
        dims: the number of channels of each head that are rotated, counted from the first; the others do not
            change. Default: all. In GPT-NeoX a quarter.
        interleaved: True: a pair is channels 2i and 2i + 1, as in the paper and GPT-J; False: channels i and
            i + dims / 2, as in GPT-NeoX and Llama.
        scaling: `Linear`, `Ntk`, `Llama3` or `Yarn`. Dynamic NTK is not among them: its angles change with
            the length, so keys in a cache would have to be rotated again.

    Raises:
        ArgumentError: base not above 1; an unknown scaling.
        ShapeError: an odd number of channels to rotate, or more than a head has.

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

    def __post_init__(self) -> None:
        if not _is_number(self.base) or not 1 < self.base < math.inf:
            raise ArgumentError(f"base must be above 1 and finite: got {self.base!r}; 10000.0 is usual")
        if not isinstance(self.interleaved, bool):
            raise ArgumentError(f"interleaved must be True or False: got {self.interleaved!r}; try False")
        if self.scaling is not None and not hasattr(self.scaling, "frequencies"):
            raise ArgumentError(
                f"scaling must be Linear, Ntk, Llama3 or Yarn: got {self.scaling!r}; try Linear(4.0)"
            )

    def turned(self, head_dim: int) -> int:
        """Return how many channels of a head are rotated.

        Raises:
            ShapeError: an odd number, or more than head_dim.
        """
        head_dim = int(head_dim)  # torch.jit.trace has sizes as tensors
        dims = head_dim if self.dims is None else self.dims
        if isinstance(dims, bool) or not isinstance(dims, int) or dims % 2 or not 0 < dims <= head_dim:
            raise ShapeError(
                f"rope must rotate an even number of a head's channels: {dims} of {head_dim}; change dims"
            )
        return dims

    def frequencies(self, head_dim: int) -> Tensor:
        """Return θ, float64 [dims / 2], on the CPU."""
        dims = self.turned(head_dim)
        return (
            _base_frequencies(self.base, dims)
            if self.scaling is None
            else self.scaling.frequencies(self.base, dims)
        )

    def rotate(self, x: Tensor, positions: Tensor | int) -> Tensor:
        """Return x [B, H, T, D] rotated by positions, int [T] or [B, T]; an int is the first of them."""
        return self.turn(x, self.factors(x, positions))

    def factors(self, x: Tensor, positions: Tensor | int) -> tuple[Tensor, Tensor]:
        """Return (cosines, sines) for every channel of x [B, H, T, D], for `turn`.

        [T, D], or [B, 1, T, D] if sequences have different positions. The sines include the minus sign of the
        rotation; channels that are not rotated have cosine 1 and sine 0.
        """
        if isinstance(positions, Tensor):
            cos, sin = self._compute_table(positions, x.shape[-1], x.device, x.dtype)
            return (cos[:, None], sin[:, None]) if positions.ndim == 2 else (cos, sin)
        end = positions + x.shape[2]
        if is_recorded():
            spots = torch.arange(positions, end, device=x.device)
            return self._compute_table(spots, x.shape[-1], x.device, x.dtype)
        cos, sin = self._table(x.shape[-1], x.device, x.dtype, end)
        return cos[positions:end], sin[positions:end]

    def turn(self, x: Tensor, factors: tuple[Tensor, Tensor]) -> Tensor:
        """Return x [B, H, T, D] rotated by `factors`: x cos + (x with its pairs swapped) sin."""
        cos, sin = factors
        D = x.shape[-1]
        dims = D if self.dims is None else self.dims
        turned = x if dims == D else x[..., :dims]
        if self.interleaved:
            swapped = turned.reshape(*x.shape[:-1], dims // 2, 2).flip(-1).reshape(turned.shape)
        else:
            swapped = turned.roll(dims // 2, -1)
        if dims != D:
            swapped = torch.cat((swapped, x[..., dims:]), -1)
        return torch.addcmul(x * cos, swapped, sin)

    def _table(
        self, head_dim: int, device: torch.device, dtype: torch.dtype, length: int
    ) -> tuple[Tensor, Tensor]:
        """Return cached cosines and sines of at least so many positions from 0 on."""
        key = (head_dim, device, dtype)
        cached: tuple[Tensor, Tensor] | None = self._cached.get(key)
        room = 0 if cached is None else cached[0].shape[0]
        if cached is not None and room >= length:
            return cached
        spots = torch.arange(max(length, 2 * room, FEWEST), device="cpu")
        return self.keep_anew(key, lambda: self._compute_table(spots, head_dim, device, dtype))

    def _compute_table(
        self, positions: Tensor, head_dim: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Compute cosines and sines at these positions, [.., D]."""
        angles = positions.double()[..., None] * self.frequencies(head_dim).to(positions.device)
        factor = 1.0 if self.scaling is None else self.scaling.magnitude
        cos, sin = angles.cos() * factor, angles.sin() * factor
        if self.interleaved:
            cos, sin = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
        else:
            cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        if cos.shape[-1] != head_dim:
            rest = (*cos.shape[:-1], head_dim - cos.shape[-1])
            cos, sin = torch.cat((cos, cos.new_ones(rest)), -1), torch.cat((sin, sin.new_zeros(rest)), -1)
        return cos.to(device, dtype), sin.to(device, dtype)


def _base_frequencies(base: float, dims: int) -> Tensor:
    """Return the unscaled frequencies, base^(-2i / dims)."""
    return base ** (-torch.arange(0, dims, 2, dtype=torch.float64, device="cpu") / dims)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_length(length: int) -> None:
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ArgumentError(
            f"original_length must be a whole number of at least 1: got {length!r}; use the trained length"
        )


@dataclass(frozen=True, repr=False)
class Linear(Scaling):
    """Position interpolation: all angles divided by `factor`, θ_i / factor. Chen 2023; Vicuna, Gemma 3."""

    factor: float

    def frequencies(self, base: float, dims: int) -> Tensor:
        return _base_frequencies(base, dims) / self.factor


@dataclass(frozen=True, repr=False)
class Ntk(Scaling):
    """A larger base, base · factor^(dims / (dims - 2)): mainly low frequencies become lower.

    This is the fixed variant of "NTK-aware" scaling (bloc97 2023; Code Llama uses a larger base, too). The
    dynamic variant is not supported, see `Rope`.
    """

    factor: float

    def frequencies(self, base: float, dims: int) -> Tensor:
        if dims < 4:
            raise ShapeError(f"rope must rotate at least 4 channels with Ntk: got {dims}; use Linear")
        return _base_frequencies(base * self.factor ** (dims / (dims - 2)), dims)


@dataclass(frozen=True, repr=False)
class Llama3(Scaling):
    """Scaling of Llama 3.1: low frequencies are divided, high ones stay.

    Frequencies with fewer than `low` turns over the original length are divided by `factor`, those with more
    than `high` turns do not change, and those between are interpolated linearly. Llama Team 2024.
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_length(self.original_length)
        if not 0 < self.low < self.high:
            raise ArgumentError(f"low must be above 0, below high: {self.low} and {self.high}; use 1 and 4")

    def frequencies(self, base: float, dims: int) -> Tensor:
        frequencies = _base_frequencies(base, dims)
        turns = self.original_length * frequencies / (2 * math.pi)  # over the original length
        share = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return share * frequencies + (1 - share) * frequencies / self.factor


@dataclass(frozen=True, repr=False)
class Yarn(Scaling):
    """YaRN: high frequencies stay, low ones are divided by `factor`, with a ramp between; scores are larger.

    Args:
        factor: the new length divided by `original_length`.
        original_length: the sequence length of the training.
        beta_fast, beta_slow: a frequency is high with at least beta_fast turns over the original length, and
            low with fewer than beta_slow.
        truncate: whether the ends of the ramp are rounded to whole pairs of channels; False in gpt-oss.
        attention_factor: the factor of rotated queries and keys. Default 0.1 ln(factor) + 1, or with both
            mscales (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1), as in DeepSeek-V2.

    Peng 2023; Qwen2.5 and Qwen3 beyond 32k, DeepSeek-V2 and V3, gpt-oss.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_length(self.original_length)
        if not 0 < self.beta_slow < self.beta_fast:
            raise ArgumentError(
                f"beta_slow must be above 0 and below beta_fast: {self.beta_slow} and {self.beta_fast}; "
                "use 1 and 32"
            )
        if (self.mscale is None) != (self.mscale_all_dim is None) or (
            self.attention_factor is not None and self.mscale is not None
        ):
            raise ArgumentError(
                f"mscale must be given with mscale_all_dim and without attention_factor: got {self.mscale}, "
                f"{self.mscale_all_dim} and {self.attention_factor}; give both scales, or only the factor"
            )

    @property
    def magnitude(self) -> float:
        """The factor of the rotated channels."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is None or self.mscale_all_dim is None:
            return self._stretched(1.0)
        return self._stretched(self.mscale) / self._stretched(self.mscale_all_dim)

    def _stretched(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0

    def frequencies(self, base: float, dims: int) -> Tensor:

        def pair(turns: float) -> float:
            """Return which pair makes so many turns over the original length."""
            return dims * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dims - 1)
        spread = high - low or 1e-3
        frequencies = _base_frequencies(base, dims)
        ramp = ((torch.arange(dims // 2, dtype=torch.float64, device="cpu") - low) / spread).clamp(0, 1)
        return frequencies * (1 - ramp) + frequencies / self.factor * ramp
