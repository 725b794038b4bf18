"""Scoring: from a raw product q . k to the score that enters the softmax.

    s_ij = cap(scale * q_i . k_j) + bias_ij - slope * |p_i - j| + relative[clamp(j - p_i, -r, r) + r]
    cap(x) = softcap * tanh(x / softcap)

and, with learned sinks, one more column of the softmax with score sink_h and no value: it takes a share of
the weight and adds nothing to the output. Scale, softcap: Gemma 2 (2024) section 2; slopes: ALiBi, Press
2022; relative: T5, Raffel 2020; sinks: gpt-oss (2025), an idea of Xiao 2024 and of "attention is off by one".

Letters: B batch, H num_heads, T query_len, S key_len.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from .errors import ArgumentError, ShapeError
from .indexing import Index, fits, take

__all__ = [
    "HIDDEN",
    "Alibi",
    "Bias",
    "Relative",
    "Scoring",
    "alibi",
    "by_offset",
    "hidden_is_endless",
    "joined",
    "sums_by_offset",
]

# A score this low is hidden. It is finite, unlike -inf, so that no formula computes inf - inf, and so that
# "finfo.min" in other libraries' masks means what it does there: a row of nothing else sees nothing.
HIDDEN = -1e30


@dataclass(frozen=True, eq=False)
class Alibi:
    """A bias of -slope * |distance| with one slope per head, for `bias=`; no [T, S] matrix is stored."""

    slopes: Tensor  # [H]

    def __reduce__(self) -> tuple[type[Alibi], tuple[Tensor]]:
        return Alibi, (self.slopes,)


@dataclass(frozen=True, eq=False)
class Relative:
    """A learned bias by distance, one number per head and offset, for `bias=`; no [T, S] matrix is stored.

        s_ij + values[h, clamp(j - p_i, -r, r) + r],   r = (R - 1) / 2

    For the query at position p_i, the offset of key j is j - p_i; offsets beyond r count as r. Raffel 2020,
    section 2.1 (T5); T5's buckets correspond to values that are equal for several offsets.

    Example:
        >>> values = torch.randn(8, 257, requires_grad=True)  # 8 heads, 128 places before and after
        >>> import headwise as hw
        >>> q, k, v = torch.randn(3, 2, 8, 10, 64)
        >>> output, weights = hw.attention(q, k, v, bias=Relative(values))
    """

    values: Tensor  # [H, R], R odd

    def __reduce__(self) -> tuple[type[Relative], tuple[Tensor]]:
        return Relative, (self.values,)


Bias = Tensor | Alibi | Relative | tuple[Tensor | Alibi | Relative, ...]  # a tuple: their sum


def alibi(num_heads: int, device: torch.device | str | None = None) -> Alibi:
    """Return the slopes of Press 2022: 2^(-8/H), 2^(-16/H), ... if H is a power of two.

    Otherwise: those for the power of two below H, then every second one of those for the power above H.

    Args:
        num_heads: H
        device: the device of the slopes. Default: the CPU, and every call copies them to the device of q. A
            CUDA graph cannot copy from the CPU, so pass the GPU there.

    Example:
        >>> alibi(4).slopes
        tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """
    if num_heads < 1:
        raise ArgumentError(f"num_heads must be at least 1: got {num_heads}; one slope is made for each")
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2 ** (-4 * (2 * h + 1) / power) for h in range(num_heads - power)]
    return Alibi(torch.tensor(slopes, device="cpu" if device is None else device))


@dataclass(frozen=True, eq=False)
class Scoring:
    """How a product q . k becomes a score. `bias` is 4-D, broadcastable to [B, H, T, S]."""

    scale: float
    softcap: float | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None  # [H]
    sinks: Tensor | None = None  # [H]
    relative: Tensor | None = None  # [H, R]; last, for what was pickled without it

    @classmethod
    def of(
        cls,
        head_dim: int,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        bias: Bias | None = None,
        sinks: Tensor | None = None,
    ) -> Scoring:
        """Return the scoring of a user's arguments; `scale` defaults to 1 / sqrt(head_dim).

        Raises:
            ArgumentError: softcap not above 0; bias or sinks that are not floating tensors.
            ShapeError: bias of more than four dimensions; a tuple of them that cannot be added.
        """
        for number, name in ((scale, "scale"), (softcap, "softcap")):
            if isinstance(number, (int, float)) or number is None:
                continue
            if isinstance(number, Tensor) or not hasattr(number, "__float__"):
                shown = repr(number) if isinstance(number, str) else type(number).__name__
                raise ArgumentError(
                    f"{name} must be a plain number: got {shown}; leave it out for the default, or multiply "
                    "q by a learned scale"
                )
        if softcap is not None and not 0 < softcap < math.inf:
            raise ArgumentError(f"softcap must be above 0 and finite: got {softcap}; use None for no cap")
        slopes: Tensor | None = None
        relative: Tensor | None = None
        if bias is not None and not isinstance(bias, Tensor):
            bias, slopes, relative = _apart(bias)
        named = ((bias, "bias"), (slopes, "slopes"), (relative, "relative"), (sinks, "sinks"))
        for value, name in named:
            if value is not None and not (isinstance(value, Tensor) and value.is_floating_point()):
                raise _not_floating(value, name)
        if bias is not None:
            if bias.ndim > 4:
                raise ShapeError(
                    f"bias must broadcast to [B, H, T, S]: got {bias.ndim} dimensions "
                    f"{list(bias.shape)}; use at most four"
                )
            bias = bias[(None,) * (4 - bias.ndim)]
        return cls(head_dim**-0.5 if scale is None else float(scale), softcap, bias, slopes, sinks, relative)

    def check(self, batch: int, num_heads: int, query_len: int, key_len: int) -> None:
        """Raise `ShapeError` if a tensor does not fit [B, H, T, S]."""
        full = (batch, num_heads, query_len, key_len)
        if self.bias is not None and not all(map(fits, self.bias.shape, full)):
            raise ShapeError(
                f"bias must broadcast to [B, H, T, S] = {list(full)}: got {list(self.bias.shape)}; "
                "add dimensions of size 1 where it does not vary"
            )
        for value, name in ((self.slopes, "slopes"), (self.sinks, "sinks")):
            if value is not None and tuple(value.shape) != (num_heads,):
                raise ShapeError(
                    f"{name} must hold one number per head: {list(value.shape)} for {num_heads} heads; "
                    f"give a tensor of shape [{num_heads}]"
                )
        relative = self.relative
        if relative is not None and not (
            relative.ndim == 2 and relative.shape[0] == num_heads and relative.shape[1] % 2 == 1
        ):
            raise ShapeError(
                f"relative must be [H, R] with R odd: {list(relative.shape)} for {num_heads} heads; "
                f"give a tensor of shape [{num_heads}, 2 * r + 1], for keys r places before to r after"
            )

    def __reduce__(self) -> tuple[type[Scoring], tuple[object, ...]]:
        return Scoring, tuple(getattr(self, f.name) for f in fields(self))

    @property
    def adds(self) -> bool:
        """True if anything is added to the product, by position or by distance."""
        return self.bias is not None or self.slopes is not None or self.relative is not None

    @property
    def has_tensors(self) -> bool:
        """True if it holds a tensor."""
        return not (
            self.bias is None and self.slopes is None and self.sinks is None and self.relative is None
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors in it by name: what a gradient can flow to."""
        named = {"bias": self.bias, "slopes": self.slopes, "sinks": self.sinks, "relative": self.relative}
        return {name: value for name, value in named.items() if value is not None}

    def to(self, device: torch.device | str) -> Scoring:
        """Return the same scoring, with its tensors on another device."""
        moved: dict[str, Any] = {name: value.to(device) for name, value in self.tensors.items()}
        return replace(self, **moved)

    def beside(self, device: torch.device) -> Scoring:
        """Return the same scoring, with ALiBi's slopes moved from CPU memory to the device."""
        slopes = self.slopes
        if slopes is None or not slopes.is_cpu or slopes.device == device:
            return self
        return replace(self, slopes=slopes.to(device))

    def select(self, batch: Index, heads: Index, queries: Index) -> Scoring:
        """Return the scoring of some sequences, heads and queries; each index a slice or an index tensor."""
        changed: dict[str, Any] = {
            name: value[heads] for name, value in self.tensors.items() if name != "bias"
        }
        if self.bias is not None:
            changed["bias"] = take(self.bias, (batch, heads, queries, None))
        return replace(self, **changed) if changed else self


def joined(bias: Bias | None, more: Alibi | Relative) -> Bias:
    """Return the sum of both biases, in the form that `bias=` takes."""
    if bias is None:
        return more
    return (*bias, more) if isinstance(bias, tuple) else (bias, more)


def _not_floating(value: object, name: str) -> ArgumentError:
    kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
    return ArgumentError(
        f"{name} must be a floating tensor: got {kind}; pass which keys a query may attend to as mask="
    )


def _apart(bias: object) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Split a bias into (bias, slopes, relative); those of a kind are added."""
    parts: dict[str, Tensor] = {}
    for part in bias if isinstance(bias, tuple) else (bias,):
        name, value = "bias", part
        if isinstance(part, Alibi):
            name, value = "slopes", part.slopes
        elif isinstance(part, Relative):
            name, value = "relative", part.values
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            raise _not_floating(value, name)
        parts[name] = _sum(parts[name], value, name) if name in parts else value
    return parts.get("bias"), parts.get("slopes"), parts.get("relative")


def _sum(a: Tensor, b: Tensor, name: str) -> Tensor:
    alike = a.shape == b.shape
    if name == "bias":
        sizes = zip(reversed(a.shape), reversed(b.shape), strict=False)
        alike = all(fits(m, n) or fits(n, m) for m, n in sizes)
    if not alike:
        raise ShapeError(
            f"{name} tensors of one tuple must have shapes that can be added: {list(a.shape)} and "
            f"{list(b.shape)}; add them before the call"
        )
    if a.device != b.device:
        raise ArgumentError(
            f"{name} tensors of one tuple must be on one device: {a.device} and {b.device}; use .to(q.device)"
        )
    return hidden_is_endless(a) + hidden_is_endless(b)


# By offset


def hidden_is_endless(x: Tensor) -> Tensor:
    """Return the same numbers, but -inf for float16's lowest, which also means "hidden"."""
    if x.dtype != torch.float16:
        return x
    return x.masked_fill(x <= torch.finfo(torch.float16).min / 2, -torch.inf)


def by_offset(values: Tensor, first: int, rows: int, columns: int) -> Tensor:
    """Expand a bias by offset, [H, R], to a tile [H, t, s] of consecutive queries and keys.

    All numbers along a diagonal are equal, so every row is a slice of one vector of t + s - 1 numbers; the
    last query's row is the first slice.

    Args:
        first: the offset j - p_i of the first key to the last query, the smallest there is.
    """
    reach = values.shape[1] // 2
    offsets = torch.arange(first, first + rows + columns - 1, device=values.device)
    line = values.index_select(1, offsets.clamp(-reach, reach) + reach)
    # not flip, which lays queries side by side where there are fewer of them than keys
    return line.unfold(1, columns, 1)[:, torch.arange(rows - 1, -1, -1, device=values.device)]


def sums_by_offset(grad: Tensor, first: int, into: Tensor) -> None:
    """Compute the gradient of `by_offset`: add [H, t, s] to [H, R], each diagonal to its offset.

    It uses only sums and slices, so the result is bitwise the same every time. Rows are shifted by one
    position each, so that diagonals become columns; a few rows at a time, since a shifted row has t + s
    numbers.
    """
    heads, rows, columns = grad.shape
    reach, step = into.shape[1] // 2, max(1, columns // 4)
    if first >= reach or first + rows + columns - 2 <= -reach:
        into[:, -1 if first >= reach else 0] += grad.sum((1, 2))
        return
    for start in range(0, rows, step):
        some = grad[:, start : start + step]
        count = some.shape[1]
        width, smallest = count + columns, first + rows - start - count
        padded = grad.new_zeros(heads, count * width)
        room = padded[:, count - 1 : count - 1 + count * (width - 1)].unflatten(1, (count, width - 1))
        room[..., :columns] = some
        line = padded.view(heads, count, width).sum(1)  # of the offsets from `smallest` on
        low = min(max(1 - reach - smallest, 0), width)  # that many are r places before or farther
        high = min(max(reach - smallest, low), width)  # from here on r places after or farther
        into[:, 0] += line[:, :low].sum(1)
        into[:, smallest + low + reach : smallest + high + reach] += line[:, low:high]
        into[:, -1] += line[:, high:].sum(1)


torch.serialization.add_safe_globals([Alibi, Relative, Scoring])
