"""Scoring: from a raw product q . k to the number the softmax sees.

    s_ij = cap(scale * q_i . k_j) + bias_ij - slope * |p_i - j|,   cap(x) = softcap * tanh(x / softcap)

and, with learned sinks, one more column of the softmax with score sink_h and no value: it takes a share of
the mass and gives nothing back. Scale, softcap: Gemma 2 (2024) section 2; slopes: ALiBi, Press 2022; sinks:
gpt-oss (2025), an idea of Xiao 2024 and of "attention is off by one".

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

__all__ = ["HIDDEN", "Alibi", "Scoring", "alibi"]

# A score this low is hidden. A finite floor instead of -inf keeps inf - inf out of every formula, and reads
# the "finfo.min" of other libraries' masks as what they mean: a row of nothing else sees nothing.
HIDDEN = -1e30


@dataclass(frozen=True, eq=False)
class Alibi:
    """A bias of -slope * |distance|, one slope a head; goes into `bias=` and is never made dense."""

    slopes: Tensor  # [H]

    def __reduce__(self) -> tuple[type[Alibi], tuple[Tensor]]:
        return Alibi, (self.slopes,)


def alibi(num_heads: int, device: torch.device | str | None = None) -> Alibi:
    """The slopes of Press 2022: 2^(-8/H), 2^(-16/H), ...; for other than powers of two, the paper's mix.

    Example:
        >>> alibi(4).slopes
        tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """
    if num_heads < 1:
        raise ArgumentError(f"num_heads must be at least 1: got {num_heads}; one slope is made for each")
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2 ** (-4 * (2 * h + 1) / power) for h in range(num_heads - power)]
    return Alibi(torch.tensor(slopes, device=device))


@dataclass(frozen=True, eq=False)
class Scoring:
    """How a raw product becomes a score. `bias` is 4-D, broadcastable to [B, H, T, S]."""

    scale: float
    softcap: float | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None  # [H]
    sinks: Tensor | None = None  # [H]

    @classmethod
    def of(
        cls,
        head_dim: int,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        bias: Tensor | Alibi | None = None,
        sinks: Tensor | None = None,
    ) -> Scoring:
        """Scoring from the arguments users give; `scale` defaults to 1 / sqrt(head_dim).

        Raises:
            ArgumentError: softcap not above 0; bias or sinks that are not floating tensors.
            ShapeError: bias of more than four dimensions.
        """
        for number, name in ((scale, "scale"), (softcap, "softcap")):
            if isinstance(number, (int, float)) or number is None:
                continue
            if isinstance(number, Tensor) or not hasattr(number, "__float__"):
                shown = repr(number) if isinstance(number, str) else type(number).__name__
                raise ArgumentError(
                    f"{name} must be a plain number: got {shown}; leave it out for the usual one, and one "
                    "that is learned can multiply q instead"
                )
        if softcap is not None and not 0 < softcap < math.inf:
            raise ArgumentError(f"softcap must be above 0 and finite: got {softcap}; use None for no cap")
        slopes: Tensor | None = None
        if isinstance(bias, Alibi):
            slopes, bias = bias.slopes, None
        for value, name in ((bias, "bias"), (slopes, "slopes"), (sinks, "sinks")):
            if value is not None and not (isinstance(value, Tensor) and value.is_floating_point()):
                kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
                raise ArgumentError(
                    f"{name} must be a floating tensor: got {kind}; who may attend to whom goes in mask="
                )
        if bias is not None:
            if bias.ndim > 4:
                raise ShapeError(
                    f"bias must broadcast to [B, H, T, S]: got {bias.ndim} dimensions "
                    f"{list(bias.shape)}; use at most four"
                )
            bias = bias[(None,) * (4 - bias.ndim)]
        return cls(head_dim**-0.5 if scale is None else float(scale), softcap, bias, slopes, sinks)

    def check(self, batch: int, num_heads: int, query_len: int, key_len: int) -> None:
        """Raise `ShapeError` where a tensor does not fit [B, H, T, S]."""
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

    def __reduce__(self) -> tuple[type[Scoring], tuple[object, ...]]:
        return Scoring, tuple(getattr(self, f.name) for f in fields(self))

    @property
    def has_tensors(self) -> bool:
        """Whether it is more than numbers."""
        return not (self.bias is None and self.slopes is None and self.sinks is None)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors in it by name: what a gradient can flow to."""
        named = {name: getattr(self, name) for name in ("bias", "slopes", "sinks")}
        return {name: value for name, value in named.items() if value is not None}

    def to(self, device: torch.device | str) -> Scoring:
        """The same scoring, with its tensors on another device."""
        moved: dict[str, Any] = {name: value.to(device) for name, value in self.tensors.items()}
        return replace(self, **moved)

    def select(self, batch: Index, heads: Index, queries: Index) -> Scoring:
        """The scoring of some sequences, heads and queries; each index a slice or an index tensor."""
        changed: dict[str, Any] = {
            name: value[heads] for name, value in self.tensors.items() if name != "bias"
        }
        if self.bias is not None:
            changed["bias"] = take(self.bias, (batch, heads, queries, None))
        return replace(self, **changed) if changed else self
