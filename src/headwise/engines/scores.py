"""`Scores`: everything that determines the score of any query and key, and any tile of scores.

    s_ij = cap(scale q_i . k_j) + bias_ij - slope |p_i - j| + relative[clamp(j - p_i, -r, r) + r]

where the mask allows, else HIDDEN.

A tile is [B, H, t, s] for a block of t queries and s keys, in float32 (float64 for float64 inputs). A group
of query heads that shares a key head is stacked as rows of one product, so keys are never repeated. The way
back is in gradients.py.

Also here is `huge_empty`, memory for large results on a CPU. A new result of 50 MB is 12,000 pages that the
system provides one by one as they are first written to: 12 ms where the numbers in it took 17. In huge pages
it is 25. Linux provides those for memory marked by `madvise` (its usual setting), which is a hint: elsewhere
nothing changes.

Letters: B batch, T query_len, S key_len, H num_heads, Hk num_kv_heads, G = H // Hk, D head_dim.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import mmap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..indexing import Index, positions_of, take
from ..mask_rules import is_traced
from ..masks import BoundMask, Mask
from ..scoring import HIDDEN, Scoring, by_offset, hidden_is_endless

# MKL computes the products of all heads in one call; other libraries take a call per head, each with a wait
# for all threads (75 microseconds of OpenBLAS's).
HAS_MKL = torch.backends.mkl.is_available()
# Elements of one tile: on a CPU it should stay in the second-level cache, elsewhere be worth a launch. Fewer
# heads have larger products without MKL.
if HAS_MKL:
    CPU_TILE, CPU_ROWS, CPU_COLUMNS = 2**19, 128, 512
else:
    CPU_TILE, CPU_ROWS, CPU_COLUMNS = 2**20, 256, 1024
LARGE_PRODUCT = 2**16
FEW_KEYS, FEWEST_QUERIES = 128, 16  # see `turned`
SETTLING = threading.Lock()
GPU_TILE, GPU_ROWS, GPU_COLUMNS = 2**25, 2048, 4096


def tile_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tiles are computed: at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def own_precision(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context without autocast: tiles choose their own precision."""
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def without_graph() -> contextlib.AbstractContextManager[object]:
    """Return torch.no_grad() if gradients are enabled, else a null context, which is faster."""
    return torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext()


@functools.cache
def settle_exponentials() -> None:
    """Call exp, log and tanh once from one thread, before several threads do.

    On a CPU they come from a vector library. When two threads make the very first call at once, the second
    sometimes gets numbers that are wrong in the fifth digit (3 of 20 fresh processes).
    """
    with SETTLING:
        for dtype in (torch.float32, torch.float64):
            ones = torch.ones(64, dtype=dtype, device="cpu")
            ones.exp(), ones.log(), ones.tanh()


class Piece(NamedTuple):
    """Some sequences and heads of a request, few enough to be walked in tiles of a good size."""

    batch: slice
    heads: slice
    kv_heads: slice
    rows: int  # queries in a tile
    columns: int  # keys in a tile


class Tiled:
    """A matrix of scores [B, H, T, S] of which only tiles are computed."""

    mask: Mask  # bound; see `Mask.bind`
    positions: Tensor | None  # int [T] on the CPU; None: aligned with the last key

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[B, H, T, S]"""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        raise NotImplementedError

    @property
    def input_dtype(self) -> torch.dtype:
        """The dtype of the inputs, and of dense weights."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of tiles: at least float32."""
        return tile_dtype(self.input_dtype)

    @property
    def group(self) -> int:
        """G, query heads a key head."""
        return 1

    @property
    def sinks(self) -> Tensor | None:
        """Learned sinks [H], if any."""
        return None

    def tile(self, rows: slice, columns: Index) -> Tensor:
        """Return scores of a block of queries and some keys, [B, H, t, s]; never below HIDDEN."""
        raise NotImplementedError

    def piece(self, piece: Piece) -> Tiled:
        """Return the scores of one piece, as views."""
        raise NotImplementedError

    def pieces(self, one_by_one: bool = False) -> Iterator[Piece]:
        """Yield all sequences and heads, a piece at a time; `one_by_one`: never two sequences together."""
        B, H, T, S = self.shape
        G, Hk = self.group, H // self.group
        if is_traced():  # a graph may be for other lengths: everything is one tile
            yield Piece(slice(0, B), slice(0, H), slice(0, Hk), T, S)
            return
        cpu = self.device.type == "cpu"
        if cpu and not torch.compiler.is_compiling():
            settle_exponentials()
        tile, rows, columns = (CPU_TILE, CPU_ROWS, CPU_COLUMNS) if cpu else (GPU_TILE, GPU_ROWS, GPU_COLUMNS)
        if T < rows:
            rows, columns = T, columns * rows // T
        columns = min(S, columns)
        kv_heads = min(Hk, max(1, tile // (G * rows * columns)))
        batch = min(B, max(1, tile // (H * rows * columns)))
        if one_by_one or (self.mask.keys is not None and S > columns):
            batch = 1  # sequences of different lengths: each skips its own padding
        rows = min(T, max(rows, tile // (batch * kv_heads * G * columns)), 4 * rows)
        for b in range(0, B, batch):
            for h in range(0, Hk, kv_heads):
                stop = min(h + kv_heads, Hk)
                yield Piece(
                    slice(b, min(b + batch, B)), slice(h * G, stop * G), slice(h, stop), rows, columns
                )

    def at(self, rows: slice, device: torch.device | None = None) -> Tensor:
        """Return the positions p_i of a block of queries, int [t]."""
        device = self.device if device is None else device
        if self.positions is not None:
            return self.positions[rows].to(device)
        _, _, T, S = self.shape
        shift = S - T
        return torch.arange(rows.start + shift, rows.stop + shift, device=device)

    def _positions_of(self, queries: Index) -> Tensor | None:
        """Return the positions of chosen queries; None if they are all aligned with the last key."""
        if isinstance(queries, slice) and queries == slice(None):
            return self.positions
        at = self.at(slice(0, self.shape[2]), torch.device("cpu"))
        return at[queries if isinstance(queries, slice) else queries.cpu()]

    def ends(self, rows: slice) -> tuple[int, int]:
        """Return the smallest and largest position in a block of queries."""
        if self.positions is not None:
            at = self.positions[rows]
            return int(at.min()), int(at.max())
        _, _, T, S = self.shape
        shift = S - T
        return rows.start + shift, rows.stop - 1 + shift

    def span(self, rows: slice) -> tuple[int, int]:
        """Return [start, stop): keys outside are hidden from this whole block of queries."""
        return self.mask.span(*self.ends(rows), rows, self.shape[3])


@dataclass(frozen=True, eq=False)
class Scores(Tiled):
    """q, k and the rules between them."""

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, Hk, S, D]
    mask: Mask
    scoring: Scoring
    positions: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.q.shape[0], self.q.shape[1], self.q.shape[2], self.k.shape[2]

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def input_dtype(self) -> torch.dtype:
        return self.q.dtype

    @property
    def group(self) -> int:
        return self.q.shape[1] // max(1, self.k.shape[1])

    @property
    def sinks(self) -> Tensor | None:
        return self.scoring.sinks

    @property
    def may_see_nothing(self) -> bool:
        """True if a query may see no key: not if only positions decide and its own key is always visible."""
        mask = self.mask
        if not mask.is_band:
            return True
        scoring = self.scoring
        if scoring.bias is not None or scoring.relative is not None or self.positions is not None:
            return True
        bounded = mask.left is not None or mask.right is not None
        outside = self.q.shape[2] > self.k.shape[2] or (mask.right or 0) < 0 or (mask.left or 0) < 0
        return bounded and outside

    def __reduce__(self) -> tuple[type[Scores], tuple[object, ...]]:
        return Scores, (self.q, self.k, self.mask, self.scoring, self.positions)

    @property
    def leaves(self) -> tuple[Tensor | None, ...]:
        """The tensors that gradients can flow to, in the order of DIFFERENTIABLE; None if unset."""
        scoring = self.scoring
        return self.q, self.k, scoring.bias, scoring.slopes, scoring.sinks, scoring.relative

    @property
    def wants_gradient(self) -> bool:
        """True if a gradient may flow to any tensor of the scores."""
        if not torch.is_grad_enabled():
            return False
        if self.q.requires_grad or self.k.requires_grad:
            return True
        return self.scoring.has_tensors and any(x.requires_grad for x in self.scoring.tensors.values())

    def versions(self) -> tuple[int, ...] | None:
        """Return how often q, k and the tensors of mask and scoring were written to; None if not counted."""
        if torch.compiler.is_compiling():
            return None
        try:
            # `_version` of an inference tensor raises, and raising takes longer than the rest of a tiny call.
            if self.q.is_inference() or self.k.is_inference():
                return None
            if self.mask.is_positional and not self.scoring.has_tensors:
                return self.q._version, self.k._version
            tensors = [self.q, self.k, *self.scoring.tensors.values(), *self.mask.tensors.values()]
            return tuple([x._version for x in tensors])
        except (RuntimeError, AttributeError):  # inference tensors count no writes; or no tensor
            return None

    def flatten(self) -> tuple[Flat, ...]:
        """Return all parts in the order of FLAT, as an operator's schema can hold them."""
        mask = self.mask
        tensors = [getattr(mask, name) for name in MASK_TENSORS]
        numbers = [getattr(mask, name) for name in MASK_NUMBERS]
        return (*self.leaves, *tensors, self.positions, *numbers, self.scoring.scale, self.scoring.softcap)

    @classmethod
    def restore(cls, *flat: Flat) -> Scores:
        """Return the scores that `flatten` gave."""
        return cls.from_parts(dict(zip(FLAT, flat, strict=True)))

    def parts(self) -> dict[str, Flat]:
        """Return the parts of `flatten` by name."""
        return dict(zip(FLAT, self.flatten(), strict=True))

    @classmethod
    def from_parts(cls, parts: Mapping[str, Any]) -> Scores:
        """Return the scores with these parts; a missing name is None."""
        scoring = Scoring(parts["scale"], *(parts.get(name) for name in SCORING))
        return cls(parts["q"], parts["k"], mask_from(parts), scoring, parts.get("positions"))

    def to(self, device: torch.device) -> Scores:
        """Return the same scores on another device."""
        return replace(
            self,
            q=self.q.to(device),
            k=self.k.to(device),
            mask=self.mask.to(device),
            scoring=self.scoring.to(device),
        )

    def detach(self) -> Scores:
        """Return the same scores, cut from the graph."""
        loose: dict[str, Any] = {name: value.detach() for name, value in self.scoring.tensors.items()}
        return replace(self, q=self.q.detach(), k=self.k.detach(), scoring=replace(self.scoring, **loose))

    def select(self, batch: Index, heads: Index, queries: Index) -> Scores:
        """Return the scores of some sequences, heads and queries; each index a slice or an index tensor.

        Heads picked one by one may break the groups of grouped-query attention; then keys are picked along.
        """
        _, H, T, S = self.shape
        q = take(self.q, (batch, heads, queries), ones_stay=False)
        if isinstance(heads, slice):
            kv_heads = _kv_heads(list(range(H)[heads]), self.group)
        elif torch.compiler.is_compiling():  # the heads are not known yet: one key head for each
            kv_heads = heads // self.group
        else:
            kv_heads = _kv_heads(heads.tolist(), self.group)
        return Scores(
            q,
            take(self.k, (batch, kv_heads), ones_stay=False),
            self.mask.select(batch, heads, queries),
            self.scoring.select(batch, heads, queries),
            self._positions_of(queries),
        )

    def piece(self, piece: Piece) -> Scores:
        everything = slice(None)
        return replace(
            self,
            q=self.q[piece.batch, piece.heads],
            k=self.k[piece.batch, piece.kv_heads],
            mask=self.mask.select(piece.batch, piece.heads, everything),
            scoring=self.scoring.select(piece.batch, piece.heads, everything),
        )

    def mask_tile(self, rows: slice, columns: Index) -> Tensor | None:
        """Return the mask's tile, bool broadcastable to [B, H, t, s]; None where it hides nothing."""
        mask, S = self.mask, self.k.shape[2]
        bounded = mask.left is not None or mask.right is not None
        if bounded and isinstance(columns, slice) and not is_traced():
            first, last = self.ends(rows)
            inside_left = mask.left is None or last - columns.start <= mask.left
            inside_right = mask.right is None or columns.stop - 1 - first <= mask.right
            if inside_left and inside_right:  # inside the band nothing has to be compared
                mask = replace(mask, left=None, right=None)
        return mask.tile(self.at(rows), rows, columns, S)

    def bias(self, rows: slice, columns: Index) -> Tensor | None:
        """Return what is added to the capped product (bias, slopes, relative), like [B, H, t, s]."""
        added = None
        if self.scoring.bias is not None:
            bias = take(self.scoring.bias, (None, None, rows, columns))
            added = bias.to(self.dtype)
            if bias.dtype == torch.float16:  # its lowest number is far from HIDDEN, but means the same
                added = added.masked_fill(bias <= torch.finfo(torch.float16).min / 2, HIDDEN)
        if self.scoring.slopes is not None:
            falling = -self.scoring.slopes.to(self.dtype)[:, None, None] * self.distance(rows, columns)
            added = falling[None] if added is None else added + falling
        if self.scoring.relative is not None:
            learned = self._relative(self.scoring.relative, rows, columns)
            added = learned[None] if added is None else added + learned
        if added is not None and self.device.type == "cuda" and self.dtype != self.q.dtype:
            added = added.to(self.q.dtype).to(self.dtype)  # as the fused kernels there round it
        return added

    def distance(self, rows: slice, columns: Index) -> Tensor:
        """Return |p_i - j|, [t, s]."""
        spots = positions_of(columns, self.k.shape[2], self.device)
        return (self.at(rows)[:, None] - spots).abs()

    def _relative(self, relative: Tensor, rows: slice, columns: Index) -> Tensor:
        """Return relative[clamp(j - p_i, -r, r) + r], [H, t, s]; [H, 1, 1] where all keys are beyond r."""
        values = hidden_is_endless(relative).to(self.dtype)
        reach = values.shape[1] // 2
        if isinstance(columns, slice) and columns.step in (None, 1) and len(self.runs(rows)) == 1:
            t, s = rows.stop - rows.start, columns.stop - columns.start
            first = columns.start - self.ends(rows)[1]
            if not torch.compiler.is_compiling():  # traced sizes are not compared
                if first >= reach:
                    return values[:, -1:, None]
                if first + t + s - 2 <= -reach:
                    return values[:, :1, None]
            return by_offset(values, first, t, s)
        spots = positions_of(columns, self.k.shape[2], self.device)
        places = (spots - self.at(rows)[:, None]).clamp(-reach, reach) + reach
        return values.index_select(1, places.flatten()).unflatten(1, places.shape)

    def runs(self, rows: slice) -> list[slice]:
        """Return the queries as slices of consecutive positions."""
        if self.positions is None:
            return [rows]
        jumps = (self.positions[rows].diff() != 1).nonzero().flatten() + rows.start + 1
        ends = [rows.start, *jumps.tolist(), rows.stop]
        return [slice(start, stop) for start, stop in itertools.pairwise(ends)]

    def additive(self, rows: slice, columns: Index, dtype: torch.dtype) -> Tensor | None:
        """Return mask and bias as one tensor to be added to the scaled product, for fused kernels."""
        added, visible = self.bias(rows, columns), self.mask_tile(rows, columns)
        if visible is None:
            return None if added is None else added.to(dtype)
        if added is None:
            added = torch.zeros((), dtype=dtype, device=self.device)
        joined = torch.where(visible, added.to(dtype), -torch.inf)
        return joined[(None,) * (4 - joined.ndim)]

    def tile(self, rows: slice, columns: Index) -> Tensor:
        return self._finish(self._capped(rows, columns), rows, columns)

    def full(self) -> Tensor:
        """Return all scores, [B, H, T, S], in new memory: faster than `tile` of everything."""
        B, H, T, D = self.q.shape
        Hk, S = self.k.shape[1:3]
        everything = slice(0, T), slice(0, S)
        if self.scoring.softcap is not None or self.q.dtype != self.dtype:
            return self.tile(*everything)
        s = huge_empty((B, H, T, S), self.dtype, self.q.device)
        into = s.view(B, Hk, -1, S)  # [B, Hk, G * T, S]
        # Not as the product's own factor: with one, OpenBLAS takes 22 ms instead of 13.
        scale = self.scoring.scale
        early = _is_power_of_two(scale)
        q = (self.q * scale if early else self.q).reshape(B, Hk, -1, D)
        k = turned(self.k, q.shape[2])
        if H * T * S >= LARGE_PRODUCT:  # worth a call per sequence, which needs no copies of q and k
            for b in range(B):
                torch.bmm(q[b], k[b], out=into[b])
        else:
            torch.bmm(q.flatten(0, 1), k.flatten(0, 1), out=into.flatten(0, 1))
        if not early:
            s = s.mul_(scale)
        scoring = self.scoring
        bare = scoring.bias is None and scoring.slopes is None and scoring.relative is None
        return s if bare and self.mask.hides_nothing else self._finish(s, *everything)

    def tile_and_bend(self, rows: slice, columns: Index) -> tuple[Tensor, Tensor | None]:
        """Return a tile, and the derivative of the cap (None without a cap)."""
        capped = self._capped(rows, columns)
        cap = self.scoring.softcap
        bend = None if cap is None else 1 - (capped / cap) ** 2
        return self._finish(capped, rows, columns), bend

    def _capped(self, rows: slice, columns: Index) -> Tensor:
        scale, cap = self.scoring.scale, self.scoring.softcap
        dtype = self.dtype
        q = self.q[:, :, rows].to(dtype)  # [B, H, t, D]
        k = self.k[:, :, columns].to(dtype)  # [B, Hk, s, D]
        B, H, t, D = q.shape
        # After the product, as the kernels do it, or their lse would not fit; a power of two is exact either
        # way, and cheaper before it.
        early = _is_power_of_two(scale)
        stacked = (q * scale if early else q).reshape(B, k.shape[1], -1, D)
        s = (stacked @ turned(k, stacked.shape[2])).view(B, H, t, k.shape[2])  # from [B, Hk, G * t, s]
        if not early:
            s = s.mul_(scale)
        return s if cap is None else s.div_(cap).tanh_().mul_(cap)

    def _finish(self, s: Tensor, rows: slice, columns: Index) -> Tensor:
        added = self.bias(rows, columns)
        if added is not None:
            s = s.add_(added).clamp_(min=HIDDEN)
        for edge in self._edges(rows, columns):
            visible = self.mask_tile(rows, edge)
            if visible is not None:
                part = s
                if isinstance(edge, slice) and isinstance(columns, slice):
                    part = s[..., edge.start - columns.start : edge.stop - columns.start]
                part.masked_fill_(~visible, HIDDEN)
        return s

    def _edges(self, rows: slice, columns: Index) -> Sequence[Index]:
        """Return the keys that a mask may hide from some of these queries: a band hides at its edges."""
        mask = self.mask
        if not mask.is_band or not isinstance(columns, slice):
            return [columns]
        first, last = self.ends(rows)
        start, stop = columns.start, columns.stop  # of the keys that all of these queries see
        if mask.left is not None:
            start = min(stop, max(start, last - mask.left))
        if mask.right is not None:
            stop = max(columns.start, min(stop, first + mask.right + 1))
        if start >= stop:
            return [columns]
        edges = slice(columns.start, start), slice(stop, columns.stop)
        return [edge for edge in edges if edge.start < edge.stop]


# The one flat form: for operators, for pytrees, for files. Tensors that gradients flow to come first.
Flat = Tensor | float | None  # a part of it
DIFFERENTIABLE = ("q", "k", "bias", "slopes", "sinks", "relative")
# Of those, what is added to the scores: only tiles and triton give its gradient
ADDED = ("bias", "slopes", "relative")
SCORING = ("softcap", "bias", "slopes", "sinks", "relative")  # what may be None, as `Scoring` takes it
MASK_TENSORS = tuple(name for name, dims in Mask.FIELDS.items() if dims)
MASK_NUMBERS = tuple(name for name, dims in Mask.FIELDS.items() if not dims)
FURTHER_NUMBERS = tuple(name for name in MASK_NUMBERS if name not in ("left", "right"))  # beside a band's
FLAT = (*DIFFERENTIABLE, *MASK_TENSORS, "positions", *MASK_NUMBERS, "scale", "softcap")
_TYPES = {"q": "Tensor", "k": "Tensor", "scale": "float", "softcap": "float?"}
_TYPES |= dict.fromkeys(MASK_NUMBERS, "SymInt?")
FLAT_SCHEMA = ", ".join(f"{_TYPES.get(name, 'Tensor?')} {name}" for name in FLAT)  # of an operator


def mask_from(parts: Mapping[str, Any]) -> Mask:
    """Return the bound mask among the parts of scores."""
    return BoundMask(**{name: parts.get(name) for name in Mask.FIELDS})


def blocks(start: int, stop: int, size: int) -> Iterator[slice]:
    """Yield start .. stop in slices of `size`."""
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def turned(keys: Tensor, queries: int) -> Tensor:
    """Return keys [.., S, D] as [.., D, S], in the layout that is fastest for a product with so many queries.

    On CPUs without MKL a product with a transposed matrix goes through a library that takes 70 microseconds a
    head before it begins; to copy a few keys takes a tenth of that.
    """
    across = keys.transpose(-2, -1)
    if HAS_MKL or not keys.is_cpu or keys.dtype != torch.float32:
        return across
    few = queries >= FEWEST_QUERIES and keys.shape[-2] <= FEW_KEYS
    return across.contiguous() if few else across


def _is_power_of_two(scale: float) -> bool:
    return math.frexp(scale)[0] == 0.5


def _kv_heads(heads: list[int], group: int) -> Index:
    """Return the key heads these query heads need: a slice if their groups are complete, else one each."""
    wanted = [head // group for head in heads]
    firsts = heads[::group]
    full_groups = [head + i for head in firsts for i in range(group)]
    if group > 1 and heads == full_groups and all(head % group == 0 for head in firsts):
        wanted = wanted[::group]
    if wanted and wanted == list(range(wanted[0], wanted[0] + len(wanted))):
        return slice(wanted[0], wanted[-1] + 1)
    return torch.tensor(wanted, dtype=torch.int64, device="cpu")


# Memory for large results


HUGE = 2**21
LEAST = 4 * HUGE  # smaller results have few pages, which may be the allocator's own


def huge_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return torch.empty, in memory that is fast to write to."""
    new = torch.empty(shape, dtype=dtype, device=device)
    if not torch.compiler.is_compiling() and type(new) is Tensor and new.is_cpu and new.nbytes >= LEAST:
        advise = _advise()
        if advise is not None:
            start = -(-new.data_ptr() // HUGE) * HUGE
            advise(start, (new.data_ptr() + new.nbytes) // HUGE * HUGE - start)
    return new


@functools.cache
def _advise() -> Callable[[int, int], object] | None:
    """Return the system's `madvise`; None if it does not exist."""
    hint = getattr(mmap, "MADV_HUGEPAGE", None)
    if hint is None:
        return None
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return lambda start, length: madvise(start, length, hint)


torch.serialization.add_safe_globals([Scores])
