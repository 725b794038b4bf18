"""What every kernel shares: loading a block of q or k, its product, the rules, which tiles a block sees.

Kernels walk tiles of M queries and N keys. `Setup` is known when a kernel is compiled, `Rules` is what
decides a score. In key-stationary kernels a tile is turned over: what is kept per query lies along columns.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
HIDDEN = tl.constexpr(-1e30)  # as in scoring.py
BIG = tl.constexpr(1e30)  # the lse of a query that sees nothing or does not count: its weights come out as 0
LOWEST_HALF = tl.constexpr(-32752.0)  # half of float16's lowest number: what such a bias hides with


class Setup(NamedTuple):
    """What a kernel is compiled for."""

    M: int  # rows of a tile
    N: int  # columns of a tile
    D: int  # head_dim, in two parts: a power of two, and what is left of it rounded up to one (or 0)
    D0: int
    D1: int
    G: int  # query heads a key head
    stages: int
    descriptors: bool  # whether q and k come as tensor descriptors, else as pointers and strides
    exact: bool  # float32 inputs: products in three parts
    dtype: tl.dtype  # of q and k
    left: bool  # whether keys too far behind are hidden
    right: bool  # whether keys too far ahead are
    behind: bool  # no key ahead of its query is ever seen
    listed: bool  # whether tiles come from a list: rules kept as tensors
    placed: bool  # whether positions are given, else they are aligned with the last key
    labels: int  # document labels per key
    rough_tanh: bool  # bfloat16: the GPU's own tanh, right to 2^-11, is finer than what it is made of
    masking: bool = False  # the bias is 0 where no rule is asked: a mask that came as one
    chunk: int = 0  # tiles looked at in one go by a program that makes its list itself; 0: it is given one
    each: bool = False  # in the first pass: no list at all, each tile asks the rules


class Channels(NamedTuple):
    """What stands in for `Setup` where values are loaded: their channels, in two parts."""

    D: int
    D0: int
    D1: int
    descriptors: bool


class Rules(NamedTuple):
    """What decides a score, beside q and k: numbers, pointers and their strides; None where there is none.

    Of a mask it is what each rule's `for_kernels` gives, by name.
    """

    scale: float
    scale_log2: float
    softcap: float | None
    slopes: Tensor | None
    relative: Tensor | None  # float32 [H, 2 * reach + 1]
    reach: int
    sinks: Tensor | None
    at: Tensor | None  # int32 [T], the queries' positions
    counted: Tensor | None  # uint8 [B, T]
    bias: Tensor | None = None
    bias_b: int | None = None  # its strides
    bias_h: int | None = None
    bias_t: int | None = None
    bias_s: int | None = None
    lengths: Tensor | None = None  # int32 or int64 [B]
    keys: Tensor | None = None  # uint8 [B, S]
    key_ids: Tensor | None = None  # int64 [B or 1, N, S]
    query_ids: Tensor | None = None  # int64 [B or 1, N, T]
    ids_batch: int = 0  # 0 where all sequences share their labels, else 1
    allowed: Tensor | None = None  # uint8, any strides
    allowed_b: int | None = None  # its strides
    allowed_h: int | None = None
    allowed_t: int | None = None
    allowed_s: int | None = None


@triton.jit
def long(x):
    """A whole number in 64 bits: what an offset must be before it is multiplied."""
    return x + tl.full([], 0, tl.int64)


@triton.jit
def load(X0, X1, strides, b, h, start, stop, SIZE: tl.constexpr, setup: tl.constexpr):
    """A block of q or k from `start` on, [SIZE, D0] and [SIZE, D1]; beyond `stop` and beyond D zeros."""
    if setup.descriptors:
        D0: tl.constexpr = setup.D0
        x0 = tl.reshape(X0.load([b, h, start, 0]), [SIZE, D0])
        x1 = x0
        if setup.D1 > 0:
            D1: tl.constexpr = setup.D1
            x1 = tl.reshape(X1.load([b, h, start, D0]), [SIZE, D1])
    else:
        spots = start + tl.arange(0, SIZE)
        base = X0 + long(b) * strides[0] + long(h) * strides[1]
        row = base + long(spots)[:, None] * strides[2]
        inside = spots[:, None] < stop
        c0 = tl.arange(0, setup.D0)[None, :]
        x0 = tl.load(row + c0, mask=inside & (c0 < setup.D), other=0.0)
        x1 = x0
        if setup.D1 > 0:
            c1 = setup.D0 + tl.arange(0, setup.D1)[None, :]
            x1 = tl.load(row + c1, mask=inside & (c1 < setup.D), other=0.0)
    return x0, x1


@triton.jit
def load_lse(LSE, inside):
    """The lse of some queries as powers of two; BIG for one that sees nothing."""
    lse = tl.load(LSE, mask=inside, other=-float("inf")) * LOG2E
    return tl.where(lse == -float("inf"), BIG, lse)


@triton.jit
def product(a0, a1, b0, b1, setup: tl.constexpr):
    """a b^T over all channels, float32."""
    if setup.exact:
        s = tl.dot(a0, b0.T, input_precision="tf32x3")
        if setup.D1 > 0:
            s = tl.dot(a1, b1.T, acc=s, input_precision="tf32x3")
    else:
        s = tl.dot(a0, b0.T)
        if setup.D1 > 0:
            s = tl.dot(a1, b1.T, acc=s)
    return s


@triton.jit
def tanh(y, ROUGH: tl.constexpr):
    """As exact as float32: a power series near 0, where 1 - 2 / (1 + e^2y) cancels; ROUGH: the GPU's own."""
    if ROUGH:
        bent = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        z = y * y
        near = y + y * z * (
            -3.33332819422e-1
            + z * (1.33314422036e-1 + z * (-5.37397155531e-2 + z * (2.06390887954e-2 - z * 5.70498872745e-3)))
        )
        far = 1.0 - 2.0 / (1.0 + tl.exp2(tl.minimum(y, 40.0) * (2.0 * LOG2E)))
        bent = tl.where(tl.abs(y) < 0.625, near, far)
    return bent


@triton.jit
def finite(sink):
    """A sink in float32, 2e38 at most: its power of two would be infinite. NaN stays NaN."""
    sink = sink.to(tl.float32)
    return tl.where(sink > 2e38, 2e38, sink)


@triton.jit
def factor(rules):
    """What `scores` are multiplied by to become powers of two."""
    if rules.bias is not None or rules.slopes is not None or rules.relative is not None:
        return LOG2E
    elif rules.softcap is not None:
        return rules.softcap * LOG2E
    else:
        return rules.scale_log2


@triton.jit
def scores(s, at, rows, cols, b, h, rules, T, S, EDGE, setup: tl.constexpr):
    """(a tile's scores up to `factor`, what its products were bent to by a soft cap) from its products s.

    What is kept per query (at, rows) is a column vector and cols a row vector, or the other way round. What a
    bias hides is HIDDEN or less; what a mask hides is not looked at.
    """
    bent = s
    if rules.softcap is not None:
        bent = tanh(s * (rules.scale / rules.softcap), setup.rough_tanh)
        s = bent
    if rules.bias is not None or rules.slopes is not None or rules.relative is not None:
        if rules.softcap is not None:
            s = s * rules.softcap
        else:
            s = s * rules.scale
        if rules.bias is not None and (EDGE or not setup.masking):
            base = rules.bias + long(b) * rules.bias_b + long(h) * rules.bias_h
            offsets = long(rows) * rules.bias_t + long(cols) * rules.bias_s
            stored = tl.load(base + offsets, mask=(rows < T) & (cols < S), other=0.0)
            added = stored.to(tl.float32)
            if rules.bias.dtype.element_ty == tl.float16:
                added = tl.where(stored <= LOWEST_HALF, HIDDEN, added)
            elif setup.dtype == tl.float16:  # as torch's fused kernels see it, which know no larger number
                near = tl.minimum(tl.maximum(added, -65504.0), 65504.0).to(tl.float16).to(tl.float32)
                added = tl.where(added <= HIDDEN, HIDDEN, near)
            elif rules.bias.dtype.element_ty != setup.dtype:
                added = added.to(setup.dtype).to(tl.float32)  # likewise
            s += added
        if rules.slopes is not None:
            # whole numbers up to 2^24: see `cannot`
            s -= tl.load(rules.slopes + h) * tl.abs(at.to(tl.float32) - cols.to(tl.float32))
        if rules.relative is not None:
            offset = tl.minimum(tl.maximum(cols - at, -rules.reach), rules.reach)
            s += tl.load(rules.relative + long(h) * (2 * rules.reach + 1) + offset + rules.reach)
    return s, bent


@triton.jit
def log_weights(s, lse, at, rows, cols, b, h, stop, rules, T, S, left, right, EDGE, setup: tl.constexpr):
    """log2 of a tile's weights from its products s; HIDDEN where the rules hide.

    What is kept per query (lse, at, rows) is a column vector and cols a row vector, or the other way round.
    Keys from `stop` on are hidden. EDGE: the rules may hide something here.
    """
    s, _ = scores(s, at, rows, cols, b, h, rules, T, S, EDGE, setup)
    if rules.bias is not None or rules.relative is not None:
        s = tl.maximum(s, HIDDEN)
    x = s * factor(rules) - lse
    if EDGE:
        x = tl.where(seen_by(at, rows, cols, b, h, stop, rules, T, S, left, right, setup), x, HIDDEN)
    return x


@triton.jit
def open_scores(s, at, rows, cols, b, h, stop, rules, T, S, left, right, EDGE, setup: tl.constexpr):
    """`scores` with -inf for whatever is hidden."""
    s, bent = scores(s, at, rows, cols, b, h, rules, T, S, EDGE, setup)
    if rules.bias is not None or rules.relative is not None:
        s = tl.where(s <= HIDDEN, -float("inf"), s)
    if EDGE:
        s = tl.where(seen_by(at, rows, cols, b, h, stop, rules, T, S, left, right, setup), s, -float("inf"))
    return s, bent


@triton.jit
def seen_by(at, rows, cols, b, h, stop, rules, T, S, left, right, setup: tl.constexpr):
    """What all rules allow of a tile."""
    visible = in_band(at, cols, stop, left, right, setup)
    if setup.listed:
        visible = visible & listed_rules(at, rows, cols, b, h, rules, T, S, setup)
    return visible


@triton.jit
def in_band(at, cols, stop, left, right, setup: tl.constexpr):
    """What the rules kept as numbers allow, broadcastable to a tile."""
    visible = cols < stop
    if setup.left:
        visible = visible & (cols >= at - left)
    if setup.right:
        visible = visible & (cols <= at + right)
    return visible


@triton.jit
def listed_rules(at, rows, cols, b, h, rules, T, S, setup: tl.constexpr):
    """What all rules but band and lengths allow, broadcastable to a tile; a new rule is added here.

    at: the queries' positions, rows: their numbers; cols: the keys.
    """
    visible = (rows < T) & (cols < S)
    if rules.keys is not None:
        visible = visible & (tl.load(rules.keys + long(b) * S + cols, mask=cols < S, other=0) != 0)
    if rules.key_ids is not None:
        mine = b * rules.ids_batch * setup.labels
        labels: tl.constexpr = setup.labels
        for n in tl.static_range(labels):
            query = tl.load(rules.query_ids + long(mine + n) * T + rows, mask=rows < T, other=0)
            key = tl.load(rules.key_ids + long(mine + n) * S + cols, mask=cols < S, other=0)
            visible = visible & (query == key)
    if rules.allowed is not None:
        base = rules.allowed + long(b) * rules.allowed_b + long(h) * rules.allowed_h
        offsets = long(rows) * rules.allowed_t + long(cols) * rules.allowed_s
        visible = visible & (tl.load(base + offsets, mask=(rows < T) & (cols < S), other=0) != 0)
    return visible


@triton.jit
def place(rules, rows, T, shift, setup: tl.constexpr):
    """The positions of some queries, int32."""
    if setup.placed:
        return tl.load(rules.at + rows, mask=rows < T, other=0)
    return rows + shift


@triton.jit
def ends(at, rows, start, T, shift, SIZE: tl.constexpr, setup: tl.constexpr):
    """The smallest and largest position in a block of queries that begins with query `start`."""
    if setup.placed:
        first = tl.min(tl.where(rows < T, at, 2147483647), 0)
        last = tl.max(tl.where(rows < T, at, -2147483648), 0)
    else:
        first = start + shift
        last = tl.minimum(start + SIZE, T) - 1 + shift
    return first, last


@triton.jit
def my_queries(rules, H, T, shift, b0, blocks, setup: tl.constexpr):
    """What a query-stationary program is about, longest rows first.

    (block, sequence and head in one, sequence, head, queries, their positions, the smallest and the largest)
    """
    M: tl.constexpr = setup.M
    block = blocks - 1 - tl.program_id(0)
    h = tl.program_id(1)
    b = b0 + tl.program_id(2)
    rows = block * M + tl.arange(0, M)
    at = place(rules, rows, T, shift, setup)
    first, last = ends(at, rows, block * M, T, shift, M, setup)
    return block, b * H + h, b, h, rows, at, first, last


@triton.jit
def list_of(TILES, list_strides, b, h, block):
    """Where a block's list of tiles begins."""
    return TILES + long(b) * list_strides[0] + long(h) * list_strides[1] + long(block) * list_strides[2]


@triton.jit
def length_of(COUNTS, list_strides, b, h, block):
    """How many tiles are on it."""
    return tl.load(COUNTS + long(b) * list_strides[3] + long(h) * list_strides[4] + block)


@triton.jit
def tile_ranges(i0, i1, i2, i3, setup: tl.constexpr):
    """Where a walk's tiles are: those that ask the rules, those that see all, and again those that ask.

    i0 .. i3: the same by position alone. Of a list, what is known of it here is nothing.
    """
    if setup.each:
        return i0, i3, i3, i3, i3, i3
    else:
        return i0, i1, i1, i2, i2, i3


@triton.jit
def key_stop(rules, b, S):
    """Keys from here on are padding."""
    stop = S
    if rules.lengths is not None:
        stop = tl.minimum(long(S), tl.load(rules.lengths + b)).to(tl.int32)
    return stop


@triton.jit
def between(any_from, all_from, all_to, any_to, SIZE: tl.constexpr):
    """Tile numbers a <= b <= c <= d: [a, b) and [c, d) need the rules, [b, c) do not, no other sees anything.

    Something is seen in [any_from, any_to), everything in [all_from, all_to).
    """
    a = tl.maximum(any_from, 0) // SIZE
    d = tl.maximum(tl.cdiv(tl.maximum(any_to, 0), SIZE), a)
    b = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(all_from, 0), SIZE), a), d)
    c = tl.minimum(tl.maximum(tl.maximum(all_to, 0) // SIZE, b), d)
    return a, b, c, d


@triton.jit
def keys_seen(first, last, stop, left, right, setup: tl.constexpr):
    """`between` for a block of queries at positions first .. last."""
    any_from = 0
    all_from = 0
    all_to = stop
    any_to = stop
    if setup.left:
        any_from = first - left
        all_from = last - left
    if setup.right:
        any_to = tl.minimum(stop, last + right + 1)
        all_to = tl.minimum(stop, first + right + 1)
    return between(any_from, all_from, all_to, any_to, setup.N)


@triton.jit
def queries_seeing(first_key, last_key, start, stop, shift, left, right, setup: tl.constexpr):
    """`between` for a block of keys: the queries of [start, stop) that see it."""
    any_from = start
    all_from = start
    all_to = stop
    any_to = stop
    if setup.placed:
        all_to = start  # in any order: each tile asks the rules
    else:
        if setup.right:
            any_from = tl.maximum(start, first_key - right - shift)
            all_from = tl.maximum(start, last_key - right - shift)
        if setup.left:
            any_to = tl.minimum(stop, last_key + left - shift + 1)
            all_to = tl.minimum(stop, first_key + left - shift + 1)
    return between(any_from, all_from, all_to, any_to, setup.N)


@triton.jit
def tile_of(TILES, i, setup: tl.constexpr):
    """The i-th tile of a walk."""
    if setup.listed and not setup.each:
        return tl.load(TILES + i)
    return i


@triton.jit
def fours(x, M: tl.constexpr, N: tl.constexpr):
    """[M, N] as [M, N / 8, 4, 2].

    In the matrix unit's layout four threads share a row, each with two of every eight columns: sums over the
    second and the last stay within a thread. The third is summed once, after the walk.
    """
    return tl.reshape(x, [M, N // 8, 4, 2])


@triton.jit
def added(x, M: tl.constexpr, N: tl.constexpr):
    """Each thread's sum over its columns of a tile, [M, 4]."""
    return tl.sum(tl.sum(fours(x, M, N), 1), 2)  # in this order products before it become multiply-adds


@triton.jit
def largest(x, M: tl.constexpr, N: tl.constexpr):
    """Each thread's largest over its columns of a tile, [M, 4]."""
    return tl.max(tl.max(fours(x, M, N), 1), 2)
