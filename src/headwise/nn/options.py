"""What a layer of today's models has besides projections and heads: norms, biases by distance, gates.

Letters: B batch, T query_len, S key_len, H num_heads, D head_dim, Dv value_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..scoring import Relative

__all__ = ["GATES", "Buckets", "QKNorm", "RelativeBias"]

GATES = ("head", "channel")
NORMS = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}


@dataclass(frozen=True)
class QKNorm:
    """Queries and keys normalised after their projections, before positions are turned into them.

        "rms":    q / sqrt(mean(q²) + eps) · g                  Qwen3, Gemma 3, OLMo 2
        "layer":  (q - mean(q)) / sqrt(var(q) + eps) · g + b    ViT-22B (Dehghani 2023)

    Args:
        kind: "rms" or "layer".
        eps: under the root.
        whole: over all heads together, H * D channels, as in OLMo 2; else head by head, with one g for all.
    """

    kind: str = "rms"
    eps: float = 1e-6
    whole: bool = False

    def __post_init__(self) -> None:
        if self.kind not in NORMS:
            raise ArgumentError(f"qk_norm must be one of {', '.join(NORMS)}: got {self.kind!r}; or a QKNorm")

    def make(
        self, heads: int, head_dim: int, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> nn.Module:
        """The norm of queries or keys of so many heads."""
        width = heads * head_dim if self.whole else head_dim
        return NORMS[self.kind](width, eps=self.eps, device=device, dtype=dtype)


@dataclass(frozen=True)
class Buckets:
    """How T5 tells distances apart: one by one up to a quarter or half of the buckets, then by logarithm.

    Args:
        count: buckets in all.
        max_distance: from here on everything is the last bucket.
        both_ways: half of the buckets for keys after the query; else those all share the first one.
    """

    count: int = 32
    max_distance: int = 128
    both_ways: bool = True

    def of(self, offsets: Tensor) -> Tensor:
        """The bucket of each j - p, int64."""
        count, first = self.count, torch.zeros_like(offsets)
        if self.both_ways:
            count //= 2
            first = (offsets > 0).long() * count
            far = offsets.abs()
        else:
            far = (-offsets).clamp(min=0)
        exact = count // 2
        share = torch.log(far.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        large = (exact + (share * (count - exact)).long()).clamp(max=count - 1)
        return first + torch.where(far < exact, far, large)


class RelativeBias(nn.Module):
    """A learned number per head and bucket of distance, added to the scores: s_ij + b_h[bucket(j - p_i)].

    Raffel 2020, section 2.1 (T5).
    """

    def __init__(
        self,
        num_heads: int,
        buckets: Buckets | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.buckets = num_heads, buckets or Buckets()
        self.weight = nn.Parameter(torch.zeros(self.buckets.count, num_heads, device=device, dtype=dtype))

    def forward(self) -> Relative:
        """What `bias=` takes, for any lengths: from max_distance on all is one bucket, on either side."""
        reach = self.buckets.max_distance
        offsets = torch.arange(-reach, reach + 1, device=self.weight.device)
        return Relative(self.weight[self.buckets.of(offsets)].t())
