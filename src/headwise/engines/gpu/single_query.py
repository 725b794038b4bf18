"""One query per sequence over many keys: a step of generation.

All there is to do is to read the keys and values once. The query heads that share a key head are the rows of
one small product, so nothing is read twice; a long past is cut into parts until every multiprocessor has one,
and the parts are put together by their log-sum-exp. Keys that padding or a window hides are not read, and
nothing is planned for a length: the next step has another.

Dao 2023, "Flash-Decoding".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...scoring import hidden_is_endless
from ..scores import Scores
from .launches import interpreted, launch, multiprocessors, specialization
from .request import as_loaded, in_float32
from .tile import BIG, HIDDEN, LN2, LOG2E, finite, long, tanh

# Of the arguments, numbers that a kernel is not compiled anew for.
CHANGING = ("H", "S", "left", "splits", "part", "reach", "scale", "cap")


@triton.jit(do_not_specialize=CHANGING)
def one_query_kernel(
    Q, K, V, OUT, LSE, VISIBLE, LENGTHS, SLOPES, RELATIVE, SINKS, qb, qh, kb, kh, ks, vb, vh, vs, visible_b,
    H, S, left, splits, part, reach, scale, cap,
    G: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDE: tl.constexpr,
    WIDE_V: tl.constexpr, N: tl.constexpr, CAPPED: tl.constexpr, BANDED: tl.constexpr, WHOLE: tl.constexpr,
    ROUGH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    b = long(tl.program_id(0) // splits)
    split = tl.program_id(0) % splits
    hk = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    heads = hk * G + rows
    mine = rows < G
    channels = tl.arange(0, WIDE)
    of_values = tl.arange(0, WIDE_V)
    q = tl.load(
        Q + b * qb + heads[:, None] * qh + channels[None, :],
        mask=mine[:, None] & (channels[None, :] < D), other=0.0,
    )  # fmt: skip
    stop = S
    if LENGTHS is not None:
        stop = tl.minimum(S, tl.load(LENGTHS + b))
    first = 0
    if BANDED:
        first = tl.maximum(S - 1 - left, 0)
    if SLOPES is not None:
        slopes = tl.load(SLOPES + heads, mask=mine, other=0.0)
    start = tl.maximum(split * part, first // N * N)
    stop = tl.minimum((split + 1) * part, stop)
    top = tl.full([ROWS], HIDDEN, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDE_V], tl.float32)
    K += b * kb + long(hk) * kh
    V += b * vb + long(hk) * vh
    for at in tl.range(start, stop, N, num_stages=STAGES):
        cols = at + tl.arange(0, N)
        ok = cols < stop
        if BANDED:
            ok = ok & (cols >= first)
        any_seen = True
        if VISIBLE is not None:
            ok = ok & (tl.load(VISIBLE + b * visible_b + cols, mask=ok, other=0) != 0)
            any_seen = tl.max(ok.to(tl.int32), 0) > 0
        if any_seen:
            k = tl.load(
                K + long(cols)[:, None] * ks + channels[None, :],
                mask=ok[:, None] & (channels[None, :] < D), other=0.0,
            )  # fmt: skip
            if WHOLE:
                x = tl.dot(q, k.T, input_precision="ieee")
            else:
                x = tl.dot(q, k.T)
            if CAPPED:
                x = tanh(x * (scale / cap), ROUGH) * cap
            else:
                x = x * scale
            if SLOPES is not None or RELATIVE is not None:
                added = tl.zeros_like(x)
                if SLOPES is not None:
                    added -= slopes[:, None] * (S - 1 - cols).to(tl.float32)[None, :]
                if RELATIVE is not None:
                    spot = tl.maximum(cols - (S - 1), -reach) + reach  # the query stands beside the last key
                    number = heads[:, None] * (2 * reach + 1) + spot[None, :]
                    added += tl.load(RELATIVE + number, mask=mine[:, None] & ok[None, :], other=0.0)
                x += added
            x = tl.where(ok[None, :], tl.maximum(x, HIDDEN) * LOG2E, BIG * -1.0)
            higher = tl.maximum(top, tl.max(x, 1))
            p = tl.exp2(x - higher[:, None])
            shrunk = tl.exp2(top - higher)
            total = total * shrunk + tl.sum(p, 1)
            v = tl.load(
                V + long(cols)[:, None] * vs + of_values[None, :],
                mask=ok[:, None] & (of_values[None, :] < DV), other=0.0,
            )  # fmt: skip
            mixed = mixed * shrunk[:, None]
            if WHOLE:
                mixed = tl.dot(p, v, acc=mixed, input_precision="ieee")
            else:
                mixed = tl.dot(p.to(v.dtype), v, acc=mixed)
            top = higher
    empty = top <= HIDDEN
    if SINKS is not None:  # one more column of the softmax, but for rows without a key
        sink = finite(tl.load(SINKS + heads, mask=mine, other=0.0)) * LOG2E
        higher = tl.maximum(top, sink)
        shrunk = tl.exp2(top - higher)
        total = total * shrunk + tl.exp2(sink - higher)
        mixed = mixed * shrunk[:, None]
        top = higher
    lse = tl.where(empty, -float("inf"), (top + tl.log2(total)) * LN2)
    mixed = mixed / tl.where(empty, 1.0, total)[:, None]
    mixed = tl.where(empty[:, None], 0.0, mixed)
    offsets = (b * splits + split) * H + heads
    tl.store(LSE + offsets, lse, mask=mine)
    tl.store(
        OUT + offsets[:, None] * DV + of_values[None, :], mixed,
        mask=mine[:, None] & (of_values[None, :] < DV),
    )  # fmt: skip


@triton.jit(do_not_specialize=["H", "splits"])
def merge_kernel(
    PARTS, PARTS_LSE, OUT, LSE, SINKS, H, splits,
    DV: tl.constexpr, WIDE_V: tl.constexpr, MOST: tl.constexpr, SUNK: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    b = long(tl.program_id(1))
    parts = tl.arange(0, MOST)
    channels = tl.arange(0, WIDE_V)
    offsets = (b * splits + parts) * H + h
    lse = tl.load(PARTS_LSE + offsets, mask=parts < splits, other=-float("inf"))
    top = tl.max(lse, 0)
    empty = top == -float("inf")
    if SUNK:
        sink = finite(tl.load(SINKS + h))
        top = tl.maximum(top, sink)
    top = tl.where(empty, 0.0, top)
    weights = tl.exp2((lse - top) * LOG2E)
    total = tl.sum(weights, 0)
    if SUNK:
        total += tl.exp2((sink - top) * LOG2E)
    out = tl.load(
        PARTS + offsets[:, None] * DV + channels[None, :],
        mask=(parts[:, None] < splits) & (channels[None, :] < DV), other=0.0,
    )  # fmt: skip
    mixed = tl.sum(out * weights[:, None], 0) / tl.where(empty, 1.0, total)
    mixed = tl.where(empty, 0.0, mixed)
    tl.store(LSE + b * H + h, tl.where(empty, -float("inf"), top + tl.log2(total) * LN2))
    tl.store(OUT + (b * H + h) * DV + channels, mixed, mask=channels < DV)


def _parts(batch: int, key_heads: int, keys: int, block: int, device: torch.device) -> tuple[int, int]:
    """Return (number of parts, keys in each): at most one part a multiprocessor, none too small to pay."""
    wanted = multiprocessors(device) // (batch * key_heads)
    blocks = -(-keys // block)
    splits = max(1, min(wanted, blocks // 4 if blocks < 16 else blocks // 2, 64))
    part = -(-blocks // splits) * block
    return -(-keys // part), part


def attend(scores: Scores, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return (output [B, H, 1, Dv], lse [B, H, 1]) of a request of one query that `cannot` accepts."""
    q, k, mask, scoring = scores.q, scores.k, scores.mask, scores.scoring
    (B, H, _, D), (_, Hk, S, _), Dv = q.shape, k.shape, v.shape[-1]
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    G, device, is_float32 = H // Hk, q.device, q.dtype == torch.float32
    block = 16 if interpreted() else 64 if is_float32 or max(D, Dv) > 128 else 128
    splits, part = _parts(B, Hk, S, block, device)
    key_bytes = lengths = None
    if mask.keys is not None and mask.keys.ndim == 2:
        key_bytes = (mask.keys if mask.keys.stride(-1) == 1 else mask.keys.contiguous()).view(torch.uint8)
    elif mask.keys is not None:
        lengths = mask.keys.to(torch.int32).contiguous()
    out = torch.empty(B, H, 1, Dv, dtype=q.dtype, device=device)
    lse = torch.empty(B, H, 1, dtype=torch.float32, device=device)
    parts, parts_lse = out, lse
    if splits > 1:
        parts = torch.empty(B, splits, H, Dv, dtype=torch.float32, device=device)
        parts_lse = torch.empty(B, splits, H, dtype=torch.float32, device=device)
    slopes = None if scoring.slopes is None else in_float32(scoring.slopes)
    relative = scoring.relative
    if relative is not None:
        relative = in_float32(hidden_is_endless(relative))
    reach = 0 if relative is None else relative.shape[1] // 2
    sinks = None if scoring.sinks is None else as_loaded(scoring.sinks)
    tensors = (q, k, v, parts, parts_lse, key_bytes, lengths, slopes, relative, None if splits > 1 else sinks)
    strides = (
        *q.stride()[:2],
        *k.stride()[:3],
        *v.stride()[:3],
        0 if key_bytes is None else key_bytes.stride(0),
    )
    left = mask.left if mask.left is not None else S
    cap = scoring.softcap or 1.0
    wide, wide_v = max(16, triton.next_power_of_2(D)), max(16, triton.next_power_of_2(Dv))
    constants = (
        G, max(16, triton.next_power_of_2(G)), D, Dv, wide, wide_v, block, scoring.softcap is not None,
        mask.left is not None, is_float32, q.dtype == torch.bfloat16 and not interpreted(),
        1 if key_bytes is not None or interpreted() else 3,
    )  # fmt: skip
    numbers = (H, S, left, splits, part, reach, float(scoring.scale), float(cap))
    kinds = specialization((*tensors, *strides))
    launch(one_query_kernel, (B * splits, Hk, 1), (*tensors, *strides, *numbers), constants, kinds, device)
    if splits > 1:
        arguments = (parts, parts_lse, out, lse, sinks)
        options = (Dv, wide_v, max(2, triton.next_power_of_2(splits)), sinks is not None)
        launch(merge_kernel, (H, B, 1), (*arguments, H, splits), options, specialization(arguments), device)
    return out, lse
