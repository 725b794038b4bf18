"""The first pass on a fused kernel: cut into parts it can take, each run in turn, merged by lse.

A part is a rectangle of the score matrix: some queries, some keys, causal or not, with or without a tensor
added. A call that a kernel takes in full is one part. Causal attention over a longer past (T < S) is two, the
past in full and the square on the diagonal. Windows, documents and biases by distance are computed by blocks
of queries, each with the keys it can see at all and its own slice of the mask, so that no T x S mask ever
exists.

Sinks. With z = logaddexp(lse, sink), each row's output is scaled by exp(lse - z), or sigmoid(lse - sink),
which is rounded less, and z is the new lse. The backward of the kernel, given the scaled output and z, is
exact: the sink column has no value, so delta = sum(dO * O) is still the whole row's sum of P dP. The sink's
own gradient is -exp(sink - z) * delta.

Empty rows. Kernels return lse 0, -inf or NaN for them; here they have output 0 and lse -inf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from ..mask_rules import can_read
from ..scoring import HIDDEN
from .backend import NO_BIAS_GRADIENT, Backend, Call, Gradients, Holds, Runner
from .gradients import ScoreGradients
from .kernels import CAUSAL, FULL, HALF, Band, Kernel, Output, Three
from .plain import TILES, sinks_gradient, with_sinks
from .scores import Scores, blocks, tile_dtype
from .walk import REACH, is_rough

# The parts of a call


@dataclass(frozen=True)
class Limits:
    """Limits of a device: elements of a mask in one tensor, queries a block."""

    added: int
    most_rows: int
    fewest_rows: int


CPU = Limits(added=2**22, most_rows=256, fewest_rows=8)  # 16 MiB in float32
GPU = Limits(added=2**26, most_rows=4096, fewest_rows=256)  # 128 MiB in half precision: launches cost more


@dataclass(frozen=True)
class Part:
    """Queries `rows` against keys `columns`; `added`: whether mask or bias must be added.

    A band other than FULL is applied by the kernel; most kernels support CAUSAL on a square alone.
    """

    rows: slice
    columns: slice
    band: Band = FULL
    added: bool = False

    def covers(self, scores: Scores) -> bool:
        """Return True if this part is the full request."""
        _, _, T, S = scores.shape
        return self.rows == slice(0, T) and self.columns == slice(0, S)

    def mask_and_bias(self, scores: Scores, dtype: torch.dtype) -> Tensor | None:
        """Return what the kernel must add to the scaled product in this part, beyond its band."""
        if not self.added:
            return None
        if self.band != FULL:  # the kernel applies the band itself
            scores = replace(scores, mask=replace(scores.mask, left=None, right=None))
        added = scores.additive(self.rows, self.columns, dtype)
        if added is None or added.shape[-1] == 1 or added.stride(-1) == 1:
            return added
        return added.contiguous()  # kernels on a GPU read rows; T5's bias, for one, is laid out head by head


def adds(scores: Scores) -> bool:
    """Return True if a mask or bias must be added to the product, beyond a band."""
    return scores.scoring.adds or not scores.mask.is_band


def band_of(scores: Scores) -> Band:
    """Return the band left and right of the query, without bounds that hide nothing."""
    mask = scores.mask
    _, _, T, S = scores.shape
    if scores.positions is not None:  # not aligned with the last key: any bound may hide keys
        return mask.left, mask.right
    left = None if mask.left is None or mask.left >= S - 1 else mask.left
    right = None if mask.right is None or mask.right >= T - 1 else mask.right
    return left, right


def in_one_call(scores: Scores) -> bool:
    """Return True if a kernel that supports only causal squares takes the request in one call."""
    band, (_, _, T, S) = band_of(scores), scores.shape
    fits_one_call = band == FULL or (band == CAUSAL and T == S and scores.positions is None)
    return fits_one_call and (not adds(scores) or _small(scores))


def cut(scores: Scores, any_band: bool = False) -> list[Part]:
    """Return the parts of a request, in order. Parts that share queries follow each other.

    any_band: the kernel applies any band, aligned with the last key, by itself.
    """
    _, _, T, S = scores.shape
    band, added = band_of(scores), adds(scores)
    if scores.positions is not None and band != FULL:  # no kernel applies a band at other positions
        return _by_rows(scores)
    if any_band and not added and min(band[0] or 0, band[1] or 0) >= 0:
        return [Part(slice(0, T), slice(0, S), band)]
    if band not in (FULL, CAUSAL) or (added and not _small(scores)):
        return _by_rows(scores)
    if band == FULL:
        return [Part(slice(0, T), slice(0, S), FULL, added)]
    past = S - T
    if past < 0:  # the first queries come before the first key
        return [Part(slice(-past, T), slice(0, S), CAUSAL, added)]
    square = Part(slice(0, T), slice(past, S), CAUSAL, added)
    return [Part(slice(0, T), slice(0, past), FULL, added), square] if past else [square]


def _limits(scores: Scores) -> Limits:
    return CPU if scores.device.type == "cpu" else GPU


def _small(scores: Scores) -> bool:
    """Return True if mask and bias may be added in one tensor: they are one already, or small."""
    mask, scoring, limits = scores.mask, scores.scoring, _limits(scores)
    if mask.is_narrow and scores.shape[2] > limits.most_rows:
        return False  # by blocks, most of the other documents' keys are never read
    if scoring.slopes is None and scoring.relative is None and mask.is_band:
        return True
    return math.prod(_added_shape(scores)) <= limits.added


def _added_shape(scores: Scores) -> list[int]:
    """Return the shape of mask and bias in one tensor."""
    scoring, shape = scores.scoring, scores.shape
    shapes = scores.mask.added_shapes(shape)
    if scoring.bias is not None:
        shapes.append(tuple(scoring.bias.shape))
    if scoring.slopes is not None or scoring.relative is not None:
        shapes.append((1, *shape[1:]))
    return [max(sizes, default=1) for sizes in zip(*shapes, strict=True)]


def _by_rows(scores: Scores) -> list[Part]:
    _, _, T, _ = scores.shape
    parts = []
    for rows in blocks(0, T, _rows(scores)):
        start, stop = scores.span(rows)
        if start < stop:
            parts.append(Part(rows, slice(start, stop), added=True))
    return parts


def _rows(scores: Scores) -> int:
    """Return the queries a block: few enough for a small mask, enough to be worth a call."""
    _, _, T, S = scores.shape
    mask = scores.mask
    batch_and_heads = math.prod(_added_shape(scores)[:2])
    reach, limits = S, _limits(scores)
    if mask.left is not None and mask.right is not None:
        reach = min(S, mask.left + mask.right + 1 + limits.most_rows)
    elif mask.is_narrow:
        spans = [scores.span(rows) for rows in blocks(0, T, limits.most_rows)]
        reach = max(stop - start for start, stop in spans)
    fits = limits.added // max(1, batch_and_heads * reach)
    return min(T, max(limits.fewest_rows, min(limits.most_rows, fits)))


# Running the parts


class Fused(Backend):
    """A backend of one fused kernel for each kind of device."""

    def __init__(self, name: str, *kernels: Kernel) -> None:
        self.name = name
        self.kernels = {kernel.device: kernel for kernel in kernels}
        self.devices = tuple(self.kernels)
        self.counts_on = tuple(kernel.device for kernel in kernels if kernel.churn is not None)

    def cannot(self, call: Call) -> str | None:
        """Return why its kernel cannot run the call, in parts either, or is excluded by user or device."""
        kernel, scores, scoring = self.kernels[call.v.device.type], call.scores, call.scores.scoring
        q = scores.q
        if q.dtype not in kernel.dtypes:
            takes = ", ".join(str(dtype).removeprefix("torch.") for dtype in kernel.dtypes)
            return f"it takes {takes}, not {str(q.dtype).removeprefix('torch.')}"
        if call.dropout or call.plain_because:
            return call.matrix_because
        if scoring.softcap is not None:
            return f"it has no soft cap (softcap={scoring.softcap:g})"
        if not scoring.scale > 0:  # it scales hidden scores, too: -inf times 0 or less is not hidden
            return f"it takes a scale above 0, not {scoring.scale:g}"
        widest = max(q.shape[-1], call.v.shape[-1])
        if kernel.max_head_dim is not None and widest > kernel.max_head_dim:
            return f"head_dim {widest} is over its {kernel.max_head_dim}"
        if call.bias_gradient:
            return NO_BIAS_GRADIENT
        if not kernel.takes_added and (
            adds(scores) or min(scores.mask.left or 0, scores.mask.right or 0) < 0
        ):
            return "it takes no mask except a band, and no bias"
        by_distance = scoring.slopes is not None or scoring.relative is not None
        if by_distance and kernel.added_dtype(q.dtype) in HALF:
            return f"it would round biases by distance to {str(q.dtype).removeprefix('torch.')}"
        if not kernel.takes_parts and not in_one_call(scores):
            return "it cannot run this call in one part, and would make a new plan for each part"
        # torch.compile cannot trace switches
        if kernel.switch is not None and not torch.compiler.is_compiling() and not kernel.switch():
            return "it is switched off in torch.backends.cuda"
        least = kernel.capability
        if least is not None and torch.cuda.get_device_capability(call.v.device) < least:
            return f"it needs compute capability {least[0]}.{least[1]} or later"
        if not kernel.deterministic and torch.are_deterministic_algorithms_enabled():
            return "deterministic algorithms are switched on, and it is not deterministic"
        if not kernel.takes_one_key and scores.k.shape[2] == 1:
            return "it takes at least 2 keys, not 1"
        return None

    def reluctance(self, call: Call) -> str | None:
        """Return why changing shapes should use another backend, since each new shape costs a plan.

        The keys of one query grow in each step, so that no plan for them is made at once.
        """
        churn = self.kernels[call.v.device.type].churn
        if churn is None or torch.compiler.is_compiling():  # torch.compile cannot trace counts
            return None
        one_query = call.scores.q.shape[2] == 1
        return (churn.too_early if one_query else churn.reason)(call.shape_key)

    def description(self, call: Call) -> str:
        """Return a phrase on how the call is cut."""
        parts = cut(call.scores, self.kernels[call.v.device.type].takes_bands)
        if not parts:
            return "with nothing to do: no query sees any key"
        if len(parts) == 1:
            return "in one call"
        if len(parts) == 2 and parts[0].rows == parts[1].rows:
            return "in two calls, the past and the diagonal"
        return f"in {len(parts)} blocks of queries, each with its slice of the mask"

    def bare(self, q: Tensor, v: Tensor) -> Kernel | None:
        """Return the kernel of the device if it needs no padded channel and no repeated key head."""
        kernel = self.kernels[v.device.type]
        takes = v.shape[-1] % kernel.channels == 0 and (kernel.takes_groups or q.shape[1] == v.shape[1])
        return kernel if takes else None

    def verdict_holds(self, call: Call) -> Holds:
        """Return True, or, where shapes are counted, a function that counts and checks each call."""
        kernel = self.kernels.get(call.v.device.type)
        if kernel is None or kernel.churn is None:
            return True
        churn, shape = kernel.churn, call.shape_key
        if call.scores.q.shape[2] != 1:
            return lambda: churn.again(shape)
        early = churn.too_early(shape) is not None

        def as_before() -> bool:
            now = churn.too_early(shape) is not None
            churn.note_one_query(shape)
            return now == early

        return as_before

    def runner(self, call: Call) -> Runner | None:
        """Return the kernel itself if it takes heads unchanged and no rule is more than a causal square."""
        scores, v, (_, H, T, S) = call.scores, call.v, call.scores.shape
        mask, scoring, Hk, D = scores.mask, scores.scoring, scores.k.shape[1], v.shape[3]
        if scoring.softcap is not None or scoring.has_tensors or not mask.is_positional:
            return None
        square = mask.right is None or (
            mask.right == 0 and T in (S, 1)
        )  # one query stands beside the last key
        straight = all(
            x.stride(3) == 1 and (x.shape[1] > 1 or x.stride(1) % D == 0) for x in (scores.q, scores.k, v)
        )
        if mask.left is not None or not square or not straight or scores.q.shape[3] != v.shape[3]:
            return None
        kernel = self.bare(scores.q, v)
        if kernel is None or scores.positions is not None:
            return None
        band = CAUSAL if mask.right is not None and T != 1 else FULL
        scale, folds = scoring.scale, T == 1 and H != Hk and kernel.folds

        def forward(scores: Scores, v: Tensor) -> tuple[Tensor, Tensor, None]:
            q = scores.q
            if not folds:
                return *kernel.forward((q, scores.k, v, None, band, scale)), None
            # one query: the heads of a group become the rows of one product, and keys are read once
            rows = q.reshape(q.shape[0], Hk, H // Hk, q.shape[3])
            out, lse = kernel.forward((rows, scores.k, v, None, band, scale))
            return out.reshape(q.shape), lse.reshape(q.shape[:3]), None

        def backward(scores: Scores, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor) -> Gradients:
            if can_read(lse) and is_rough(lse, REACH):
                return TILES.backward(Call(scores, v), out, lse, grad)
            q = scores.q
            if folds:
                q, out, grad = (x.reshape(x.shape[0], Hk, H // Hk, x.shape[3]) for x in (q, out, grad))
                lse = lse.reshape(q.shape[:3])
            grad = grad if grad.stride(-1) == 1 else grad.contiguous()
            dq, dk, dv = kernel.backward((q, scores.k, v, None, band, scale), out, lse, grad)
            return ScoreGradients(dq.reshape(scores.q.shape), dk), dv, None

        return Runner(forward, backward)

    def note(self, call: Call) -> None:
        """Count the shapes for which a kernel that plans would need a plan."""
        churn = self.kernels[call.v.device.type].churn
        if churn is not None:
            one_query = call.scores.q.shape[2] == 1
            (churn.note_one_query if one_query else churn.note)(call.shape_key)

    def forward(self, call: Call) -> Output:
        """Compute part by part; in tiles where merging the parts would be too inexact."""
        scores, v = call.scores, call.v
        kernel = self.kernels[v.device.type]
        q, k, values = _ready(kernel, scores, v, _folds(kernel, scores))
        parts = cut(scores, kernel.takes_bands)
        if parts and parts[0].covers(scores):
            out, lse = _run(kernel, scores, parts[0], q, k, values)
        else:
            out, lse = _merge(kernel, scores, parts, q, k, values)
        sinks = scores.scoring.sinks
        if sinks is not None:
            out, lse = with_sinks(sinks, out, lse)
        # merged by lse, from parts of a row or with a sink
        if (sinks is not None or _share_rows(parts)) and can_read(lse) and is_rough(lse, REACH):
            return TILES.forward(call)
        return _channels(out, v.shape[-1]), lse

    def backward(self, call: Call, out: Tensor, lse: Tensor, grad: Tensor) -> Gradients:
        """Compute part by part, each with the full rows' output and lse; in tiles if that is too inexact."""
        if can_read(lse) and is_rough(lse, REACH):
            return TILES.backward(call, out, lse, grad)
        scores, v = call.scores, call.v
        kernel = self.kernels[v.device.type]
        q, k, values = _ready(kernel, scores, v)
        B, H, T, D = q.shape
        out, grad = _padded(out, D), _padded(grad, D)
        finite = torch.where(torch.isneginf(lse), 0.0, lse)  # an empty row has no gradient
        total = tile_dtype(q.dtype)
        parts = cut(scores, kernel.takes_bands)
        if parts and parts[0].covers(scores):
            dq, dk, dv = _run_backward(kernel, scores, parts[0], q, k, values, out, finite, grad)
        else:
            dq, dk, dv = (torch.zeros(x.shape, dtype=total, device=x.device) for x in (q, k, values))
            for part in parts:
                rows, columns = part.rows, part.columns
                piece = _run_backward(
                    kernel, scores, part, q[:, :, rows], k[:, :, columns], values[:, :, columns],
                    out[:, :, rows], finite[:, :, rows], grad[:, :, rows],
                )  # fmt: skip
                for full_grad, where, share in zip(
                    (dq, dk, dv), (rows, columns, columns), piece, strict=True
                ):
                    full_grad[:, :, where] += share
        groups = scores.group if k.shape[1] == H else 1
        if groups > 1:  # keys were repeated for a kernel without groups
            dk, dv = (x.view(B, -1, groups, *x.shape[2:]).sum(2) for x in (dk, dv))
        dq, dk = _channels(dq, scores.q.shape[-1]), _channels(dk, scores.k.shape[-1])
        sinks = sinks_gradient(scores, out, lse, grad)
        return ScoreGradients(dq, dk), _channels(dv, v.shape[-1]), sinks


def _share_rows(parts: list[Part]) -> bool:
    """Return True if rows are merged from several parts."""
    return len(parts) > 1 and any(a.rows == b.rows for a, b in pairwise(parts))


def _run(kernel: Kernel, scores: Scores, part: Part, q: Tensor, k: Tensor, v: Tensor) -> Output:
    added = part.mask_and_bias(scores, kernel.added_dtype(q.dtype))
    if _folds(kernel, scores):
        # one query: the heads of a group become the rows of one product, and keys are read once
        rows = q.reshape(q.shape[0], k.shape[1], scores.group, -1)
        out, lse = kernel.forward((rows, k, v, added, FULL, scores.scoring.scale))
        out, lse = out.reshape(*q.shape[:3], -1), lse.reshape(q.shape[:3])
    else:
        out, lse = kernel.forward((q, k, v, added, part.band, scores.scoring.scale))
    empty = _empty_rows(scores, part, added, lse)
    if empty is not None:
        out, lse = out.masked_fill(empty[..., None], 0), lse.masked_fill(empty, -torch.inf)
    return out, lse


def _run_backward(
    kernel: Kernel, scores: Scores, part: Part, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, grad: Tensor,
) -> Three:  # fmt: skip
    added = part.mask_and_bias(scores, kernel.added_dtype(q.dtype))
    return kernel.backward((q, k, v, added, part.band, scores.scoring.scale), out, lse, grad)


def _merge(kernel: Kernel, scores: Scores, parts: list[Part], q: Tensor, k: Tensor, v: Tensor) -> Output:
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
            ahead = torch.where(
                torch.isneginf(both), 0.0, old_lse - new_lse
            )  # any value will do for rows without keys
            mine, theirs = ahead.sigmoid()[..., None], (-ahead).sigmoid()[..., None]
            new, new_lse = (old * mine + new * theirs).to(q.dtype), both
        out[:, :, rows], lse[:, :, rows] = new, new_lse
        done = rows
    return out, lse


def _empty_rows(scores: Scores, part: Part, added: Tensor | None, lse: Tensor) -> Tensor | None:
    """Return which rows of a part see no key in it, bool [B or 1, H or 1, t]; None if every row sees one."""
    if added is None:
        return None
    mask, columns = scores.mask, part.columns
    if lse.device.type == "cpu" and not bool(((lse == 0) | ~(lse > HIDDEN / 10)).any()):
        return None  # the kernel's values for an empty row do not occur
    if mask.is_padded_band and scores.scoring.bias is None and scores.scoring.relative is None:
        return ~mask.sees_any(scores.at(part.rows), columns.start, columns.stop)[:, None]
    if part.band == FULL:  # then `added` shows every hidden key
        return (added <= HIDDEN).all(-1)  # [B or 1, H or 1, t or 1]; a NaN hides nothing
    empty = []
    for rows in blocks(part.rows.start, part.rows.stop, 1024):
        joined = scores.additive(rows, columns, scores.dtype)
        assert joined is not None
        empty.append((joined <= HIDDEN).all(-1))  # the band in it makes it [.., .., t]
    return torch.cat(empty, dim=-1)


def _folds(kernel: Kernel, scores: Scores) -> bool:
    """Return True if heads that share keys become rows: one query, and the same added to all of them."""
    if scores.q.shape[2] != 1 or scores.group == 1 or not kernel.folds:
        return False
    return not adds(scores) or _added_shape(scores)[1] == 1


def _ready(kernel: Kernel, scores: Scores, v: Tensor, folded: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v as the kernel takes them: equal head_dim, padded channels, contiguous rows."""
    widest = max(scores.q.shape[-1], v.shape[-1])
    channels = -(-widest // kernel.channels) * kernel.channels
    q, k, v = _padded(scores.q, channels), _padded(scores.k, channels), _padded(v, channels)
    if scores.group > 1 and not kernel.takes_groups and not folded:
        k, v = (x.repeat_interleave(scores.group, dim=1) for x in (k, v))
    return q, k, v


def _padded(x: Tensor, channels: int) -> Tensor:
    if x.shape[-1] != channels:
        x = torch.nn.functional.pad(x, (0, channels - x.shape[-1]))
    elif x.stride(-1) != 1:
        x = x.contiguous()
    if x.shape[1] == 1 and x.stride(1) % channels:  # an unused stride, which a kernel requires aligned
        x = x.as_strided(x.shape, (x.stride(0), channels, *x.stride()[2:]))
    return x


def _channels(x: Tensor, channels: int) -> Tensor:
    return x if x.shape[-1] == channels else x[..., :channels].contiguous()
