"""Patches: how far a head of a vision Transformer looks, on the grid its tokens were cut from.

Letters: B batch, H num_heads, T query_len, S key_len.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..engines.scores import tile_dtype
from ..errors import ArgumentError, ShapeError
from ..map import AttentionMap
from .queries import counted_queries, mean_over, positions, weights_in_blocks

__all__ = ["grid_distance"]


def grid_distance(map: AttentionMap, height: int, width: int, patch: float = 1.0, prefix: int = 1) -> Tensor:
    """The mean attention distance of a vision Transformer's head: mean_i sum_j p_ij |x_i - x_j|.

    x is where a patch lies on the grid, times its size (in pixels, say). The tokens before the patches
    (class, registers) are left out, as queries and as keys, and what remains is not scaled up.
    Dosovitskiy 2021, appendix D.7; Raghu 2021; the left-out class token as in Keras' "probing ViTs".

    Args:
        map: [B, H, T, S], S = prefix + height * width; a block of rows is made at a time.
        height, width: patches down and across.
        patch: the side of a patch.
        prefix: how many tokens stand before the patches.

    Returns:
        [B, H], in units of `patch`.

    Raises:
        ArgumentError: a size below 1, prefix below 0, a patch not above 0; a map of chosen keys.
        ShapeError: the grid does not cover the keys.

    Example:
        >>> w = AttentionMap(torch.zeros(1, 1, 5, 8), torch.zeros(1, 1, 5, 8))
        >>> grid_distance(w, 2, 2, patch=16)         # 16 (0 + 1 + 1 + sqrt 2) / 5
        tensor([[10.9255]])
    """
    if height < 1 or width < 1 or prefix < 0 or not patch > 0:
        raise ArgumentError(
            f"height and width must be at least 1, prefix at least 0, patch above 0: got {height}, {width}, "
            f"{prefix}, {patch}; e.g. 14, 14, 1, 16"
        )
    map._whole_rows("grid_distance")
    B, H, T, S = map.shape
    if S != prefix + height * width:
        raise ShapeError(
            f"grid must cover the keys: {prefix} + {height} * {width} = {prefix + height * width} for {S}; "
            "prefix is the number of tokens before the patches"
        )
    at, dtype = positions(map), tile_dtype(map.dtype)
    place = torch.arange(height * width, device=map.device)
    place = torch.stack([place // width, place % width], -1).to(dtype) * patch  # [S - prefix, 2]
    counts = counted_queries(map) & (at >= prefix) & (at < S)
    found = torch.zeros(B, H, T, dtype=dtype, device=map.device)
    for rows, p in weights_in_blocks(map, torch.arange(T)):  # [B, H, t, S]
        mine = place[(at[rows] - prefix).clamp(0, len(place) - 1)]
        away = (mine[:, None] - place).square().sum(-1).sqrt()  # [t, S - prefix]
        found[:, :, rows] = (p[..., prefix:] * away).sum(-1)
    return mean_over(found, counts)
