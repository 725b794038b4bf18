"""The first pass on a fused kernel: every part in turn, merged by lse, then sinks and empty rows.

Sinks. With z = logaddexp(lse, sink), each row's output is scaled by exp(lse - z), and z is the new lse. The
backward of the kernel, given the scaled output and z, is exact: the sink column has no value, so
delta = sum(dO * O) is still the whole row's sum of P dP. The sink's own gradient is -exp(sink - z) * delta.

Empty rows. Kernels answer them with lse 0, -inf or NaN, each its own way; here output 0 and lse -inf.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ..scoring import HIDDEN
from .gradients import ScoreGradients
from .kernels import FULL, Kernel
from .parts import Part, cut
from .scores import Scores, blocks, tile_dtype

__all__ = ["backward", "forward", "merges"]


def forward(kernel: Kernel, scores: Scores, v: Tensor) -> tuple[Tensor, Tensor]:
    """(output [B, H, T, Dv], lse [B, H, T])."""
    q, k, values = _ready(kernel, scores, v)
    parts = cut(scores, kernel.takes_bands)
    if parts and parts[0].is_whole(scores):
        out, lse = _run(kernel, scores, parts[0], q, k, values)
    else:
        out, lse = _merge(kernel, scores, parts, q, k, values)
    if scores.scoring.sinks is not None:
        out, lse = with_sinks(scores.scoring.sinks, out, lse)
    return _channels(out, v.shape[-1]), lse


def merges(scores: Scores, kernel: Kernel) -> bool:
    """Whether what comes of a call is put together by lse: from parts of a row, or with a sink."""
    if scores.scoring.sinks is not None:
        return True
    rows = [part.rows for part in cut(scores, kernel.takes_bands)]
    return any(a == b for a, b in pairwise(rows))


def backward(
    kernel: Kernel, scores: Scores, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor
) -> tuple[ScoreGradients, Tensor, Tensor | None]:
    """(gradients of q and k, of v, of sinks), from the output, the lse and the output's gradient."""
    q, k, values = _ready(kernel, scores, v)
    B, H, T, D = q.shape
    out, grad = _padded(out, D), _padded(grad, D)
    finite = torch.where(torch.isneginf(lse), 0.0, lse)  # an empty row has nothing to send back
    total = tile_dtype(q.dtype)
    parts = cut(scores, kernel.takes_bands)
    if parts and parts[0].is_whole(scores):
        dq, dk, dv = _run_backward(kernel, scores, parts[0], q, k, values, out, finite, grad)
    else:
        dq, dk, dv = (torch.zeros(x.shape, dtype=total, device=x.device) for x in (q, k, values))
        for part in parts:
            rows, columns = part.rows, part.columns
            piece = _run_backward(
                kernel, scores, part, q[:, :, rows], k[:, :, columns], values[:, :, columns],
                out[:, :, rows], finite[:, :, rows], grad[:, :, rows],
            )  # fmt: skip
            for whole, where, share in zip((dq, dk, dv), (rows, columns, columns), piece, strict=True):
                whole[:, :, where] += share
    groups = scores.group if k.shape[1] == H else 1
    if groups > 1:  # keys were repeated for a kernel without groups
        dk, dv = (x.view(B, -1, groups, *x.shape[2:]).sum(2) for x in (dk, dv))
    found = ScoreGradients(_channels(dq, scores.q.shape[-1]), _channels(dk, scores.k.shape[-1]), None, None)
    return found, _channels(dv, v.shape[-1]), sinks_gradient(scores, out, lse, grad)


def _run(
    kernel: Kernel, scores: Scores, part: Part, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    added = part.mask_and_bias(scores, kernel.added_dtype(q.dtype))
    groups = q.shape[1] // k.shape[1]
    one_query = q.shape[2] == 1 and part.band == FULL
    if one_query and groups > 1 and (added is None or added.shape[1] == 1):
        # one query: the heads of a group become the rows of one product, and keys are read once
        rows = q.reshape(q.shape[0], k.shape[1], groups, -1)
        out, lse = kernel.forward(rows, k, v, added, FULL, scores.scoring.scale)
        out, lse = out.reshape(*q.shape[:3], -1), lse.reshape(q.shape[:3])
    else:
        out, lse = kernel.forward(q, k, v, added, part.band, scores.scoring.scale)
    empty = _empty_rows(scores, part, added, lse)
    if empty is not None:
        out, lse = out.masked_fill(empty[..., None], 0), lse.masked_fill(empty, -torch.inf)
    return out, lse


def _run_backward(
    kernel: Kernel, scores: Scores, part: Part, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    added = part.mask_and_bias(scores, kernel.added_dtype(q.dtype))
    return kernel.backward(grad, q, k, v, out, lse, added, part.band, scores.scoring.scale)


def _merge(
    kernel: Kernel, scores: Scores, parts: list[Part], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    B, H, T, D = q.shape
    total = tile_dtype(q.dtype)
    out = torch.zeros(B, H, T, D, dtype=q.dtype, device=q.device)
    lse = torch.full((B, H, T), -torch.inf, dtype=total, device=q.device)
    done: slice | None = None
    for part in parts:
        rows, columns = part.rows, part.columns
        new, new_lse = _run(kernel, scores, part, q[:, :, rows], k[:, :, columns], v[:, :, columns])
        if rows == done:  # the same queries over more keys
            old, old_lse = out[:, :, rows], lse[:, :, rows]
            both = torch.logaddexp(old_lse, new_lse)
            finite = torch.where(torch.isneginf(both), 0.0, both)
            mine, theirs = ((x - finite).exp()[..., None] for x in (old_lse, new_lse))
            new, new_lse = (old * mine + new * theirs).to(q.dtype), both
        out[:, :, rows], lse[:, :, rows] = new, new_lse
        done = rows
    return out, lse


def _empty_rows(scores: Scores, part: Part, added: Tensor | None, lse: Tensor) -> Tensor | None:
    """Which rows of a part see nothing in it, bool [B or 1, H or 1, t]; None where none can."""
    if added is None:
        return None
    mask, columns = scores.mask, part.columns
    if lse.device.type == "cpu" and not bool(((lse == 0) | ~(lse > HIDDEN / 10)).any()):
        return None  # what the kernel gives an empty row does not occur
    if mask.key_ids is None and mask.allowed is None and scores.scoring.bias is None:
        return ~mask.sees_any(scores.at(part.rows), columns.start, columns.stop)[:, None]
    if part.band == FULL:  # then everything hidden is in what was added
        return (added <= HIDDEN).all(-1)  # [B or 1, H or 1, t or 1]; a NaN hides nothing
    found = []
    for rows in blocks(part.rows.start, part.rows.stop, 1024):
        whole = scores.additive(rows, columns, scores.dtype)
        assert whole is not None
        found.append((whole <= HIDDEN).all(-1))  # the band in it makes it [.., .., t]
    return torch.cat(found, dim=-1)


def with_sinks(sinks: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Let the sink take its share; rows that see nothing stay as they are."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    total = torch.where(torch.isneginf(lse), lse, total)
    share = torch.where(torch.isneginf(lse), 0.0, (lse - total).exp())
    return (out * share[..., None]).to(out.dtype), total


def sinks_gradient(scores: Scores, out: Tensor, lse: Tensor, grad: Tensor) -> Tensor | None:
    """The gradient of the sinks, [H]."""
    sinks = scores.scoring.sinks
    if sinks is None:
        return None
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)  # [B, H, T]
    mass = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -torch.where(torch.isneginf(lse), 0.0, mass * delta).sum((0, 2))


def _ready(kernel: Kernel, scores: Scores, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as the kernel takes them: equal head_dim, channels that fill its units, rows contiguous."""
    widest = max(scores.q.shape[-1], v.shape[-1])
    channels = -(-widest // kernel.channels) * kernel.channels
    q, k, v = _padded(scores.q, channels), _padded(scores.k, channels), _padded(v, channels)
    if scores.group > 1 and not kernel.takes_groups:
        k, v = (x.repeat_interleave(scores.group, dim=1) for x in (k, v))
    return q, k, v


def _padded(x: Tensor, channels: int) -> Tensor:
    if x.shape[-1] != channels:
        x = torch.nn.functional.pad(x, (0, channels - x.shape[-1]))
    elif x.stride(-1) != 1:
        x = x.contiguous()
    if x.shape[1] == 1 and x.stride(1) % channels:  # no step at all, and yet a kernel wants it aligned
        x = x.as_strided(x.shape, (x.stride(0), channels, *x.stride()[2:]))
    return x


def _channels(x: Tensor, channels: int) -> Tensor:
    return x if x.shape[-1] == channels else x[..., :channels].contiguous()
