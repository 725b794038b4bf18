"""The weights of one query, in one head or in all, in as few operations as possible.

One row is a product, the scale, the mask's row and an exponential; on the general path the Python around
them, and on a GPU its launches, take several times as long. So such a row is computed here after the few
checks below. Keys outside a band are sliced off, not compared. Any other call takes the general path, which
computes or refuses it.

A row is exp(s - lse). On a CPU it is divided by its own sum, as softmax does it, which must be 1 but for
rounding: otherwise q, k or the mask have changed since lse was computed, and the general path raises. On a
GPU, as in the kernels: in 16 bits it is not divided, in more it is divided, by NaN where the sum is too far
from 1.

Letters: B batch, H num_heads, Hk num_kv_heads, S key_len, D head_dim, n keys in the band, N labels.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from .. import budget
from ..mask_rules import Band, Dense, Documents, Padding, Rule
from ..scoring import HIDDEN
from .plain import transforms_are_active
from .scores import Scores, own_precision, settle_exponentials, without_graph
from .walk import SLACK

SUPPORTED_RULES = (Band, Padding, Documents, Dense)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
HALF = (torch.bfloat16, torch.float16)
DIRECT = ("cuda",)  # where the general path launches kernels
FEW = 2**22  # weights
STEPS = frozenset(
    "entropy effective_keys confidence distance first previous itself next local max_logit".split()
)
OFF = 2.0**-3  # how far from 0 the logarithm of a row's mass may be on a GPU: TF32 may be that inexact


def row(scores: Scores, lse: Tensor | None, b: int, h: int | None, i: int) -> Tensor | None:
    """Return the weights of query i in head h, [S], or in all heads, [H, S]; None if a check fails."""
    q, k, mask, scoring = scores.q, scores.k, scores.mask, scores.scoring
    if not _takes(scores, lse):
        return None
    (B, H, T, D), S, on_cpu = q.shape, k.shape[2], q.is_cpu
    if not -B <= b < B or not -T <= i < T or (h is not None and not -H <= h < H) or not S or not D:
        return None
    if not budget.surely_fits(S * 8 * (H if h is None else 1)):  # never while compiling
        return None
    b, h, i = b % B, None if h is None else h % H, i % T
    at = i + S - T if scores.positions is None else int(scores.positions[i])
    start = 0 if mask.left is None else max(0, at - mask.left)
    stop = S if mask.right is None else min(S, at + mask.right + 1)
    hides = scoring.bias is not None or not mask.is_band
    if on_cpu and mask.keys is not None and mask.keys.ndim == 1:
        stop = min(stop, int(mask.keys[b]))
        hides = scoring.bias is not None or not mask.is_padded_band
    if start >= stop:  # it sees nothing
        return q.new_zeros(S if h is not None else (H, S))
    more = hides or scoring.has_tensors or scoring.softcap is not None
    if more or h is None or lse is None or (on_cpu and lse.dtype is not q.dtype):
        return _by_rules(scores, lse, b, h, i, at, slice(start, stop), hides, on_cpu)
    return _by_product(scores, lse, b, h, i, slice(start, stop))


def _takes(scores: Scores, lse: Tensor | None) -> bool:
    """Return True if tensors and rules are supported here, and no gradient is wanted."""
    q, k, mask, scoring = scores.q, scores.k, scores.mask, scores.scoring
    if type(q) is not Tensor or type(k) is not Tensor or q.dtype not in DTYPES or k.dtype is not q.dtype:
        return False
    if not (q.is_cpu or q.is_cuda) or scoring.relative is not None or not _knows(mask.hiding):
        return False
    more = scoring.has_tensors
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or (more and scores.wants_gradient)):
        return False
    if scoring.sinks is not None and lse is None:
        return False
    return not (transforms_are_active() or torch.is_autocast_enabled("cpu" if q.is_cpu else "cuda"))


def _by_product(scores: Scores, lse: Tensor, b: int, h: int, i: int, keys: slice) -> Tensor | None:
    """Compute `row` of one head without rules or biases; None if the row does not fit its lse."""
    q, S, scale = scores.q, scores.k.shape[2], scores.scoring.scale
    mine, theirs, row_lse = _views(q, scores.k, lse, b, h, i, keys.start, keys.stop)
    assert row_lse is not None
    n = keys.stop - keys.start
    weights = q.new_empty(S) if n == S else q.new_zeros(S)
    p = weights if n == S else weights.as_strided((n,), (1,), keys.start)
    if q.dtype in HALF:
        torch.exp(_scaled_less(row_lse, theirs, mine, scale), out=p)
        return weights
    x = torch.addmv(row_lse, theirs, mine, beta=-1, alpha=scale)  # scale q k - lse
    if not q.is_cpu:
        x = x.exp_()
        torch.div(x, _or_nan(x.sum(-1, keepdim=True), row_lse), out=p)
        return weights
    settle_exponentials()
    torch.softmax(x, -1, out=p)
    top, heaviest = float(x.max()), float(p.max())
    # the heaviest weight is exp(largest score - its own lse): the difference is the error of lse
    return weights if heaviest > 0 and abs(top - math.log(heaviest)) <= SLACK else None  # False for NaN


def statistics(scores: Scores, names: tuple[str, ...], reach: int) -> dict[str, Tensor] | None:
    """Return row statistics of one query that sees every key, [B, H] each; None if a check fails.

    For a step of generation on a GPU: each step has other sizes, so no launch is planned, and preparing four
    kernels takes six times as long as computing a row and its sums. Only for half precision, whose products
    a GPU computes exactly in float32.
    """
    q, k, mask, scoring = scores.q, scores.k, scores.mask, scores.scoring
    (B, H, T, D), (_, Hk, S, _) = q.shape, k.shape
    if T != 1 or q.dtype not in HALF or k.dtype is not q.dtype or q.device.type not in DIRECT:
        return None
    if type(q) is not Tensor or type(k) is not Tensor or not 0 < B * H * S <= FEW or reach < 0:
        return None
    if scoring.has_tensors or scoring.relative is not None or scoring.softcap is not None:
        return None
    sees_all = mask.is_positional and (mask.left is None or mask.left >= S - 1) and mask.right in (None, 0)
    if not sees_all or scores.positions is not None or not STEPS.issuperset(names):
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        return None
    if torch.compiler.is_compiling() or transforms_are_active():
        return None
    with without_graph(), own_precision(q.device):
        mine = q.view(B, Hk, H // Hk, D) if q.is_contiguous() else q.reshape(B, Hk, H // Hk, D)
        s = (mine.float() @ k.float().transpose(2, 3)).view(B, H, S).mul_(scoring.scale)
        p = torch.softmax(s, -1)
        values: dict[str, Tensor] = {}
        for name in names:
            values[name] = _of_row(name, s, p, reach, values)
        return values


def _of_row(name: str, s: Tensor, p: Tensor, reach: int, values: dict[str, Tensor]) -> Tensor:
    """Return a statistic from scores and weights of all keys, [B, H, S]; the last key is the query's own."""
    S = p.shape[-1]
    if name in ("entropy", "effective_keys"):
        entropy = values.get("entropy")
        if entropy is None:
            entropy = torch.special.entr(p).sum(-1)
        return entropy if name == "entropy" else entropy.exp()
    if name == "confidence":
        return p.amax(-1)
    if name == "distance":
        return p @ torch.arange(S - 1, -1, -1, dtype=p.dtype, device=p.device)
    if name == "first":
        return p[..., 0]
    if name == "itself":
        return p[..., S - 1]
    if name == "previous" and S > 1:
        return p[..., S - 2]
    if name == "local":
        return p[..., max(0, S - 1 - reach) :].sum(-1)
    if name == "max_logit":
        return s.amax(-1)
    return torch.full_like(p[..., 0], torch.nan)  # of a key that does not exist


@functools.cache
def _knows(rules: tuple[Rule, ...]) -> bool:
    return all(type(rule) in SUPPORTED_RULES for rule in rules)


def _views(
    q: Tensor, k: Tensor, lse: Tensor | None, b: int, h: int | None, i: int, start: int, stop: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return views of q, k and lse: [D], [n, D], [1]; of all heads [H, D], [Hk, n, D], [H, 1].

    Each takes one step: an index of three numbers would make three views.
    """
    (_, H, _, D), Hk = q.shape, k.shape[1]
    (n0, n1, n2, step), at = q.stride(), q.storage_offset()
    row_lse = None
    if h is None:
        mine = q.as_strided((H, D), (n1, step), at + b * n0 + i * n2)
        (n0, n1, n2, step), at = k.stride(), k.storage_offset()
        theirs = k.as_strided((Hk, stop - start, D), (n1, n2, step), at + b * n0 + start * n2)
        if lse is not None:
            (n0, n1, n2), at = lse.stride(), lse.storage_offset()
            row_lse = lse.as_strided((H, 1), (n1, 1), at + b * n0 + i * n2)
        return mine, theirs, row_lse
    mine = q.as_strided((D,), (step,), at + b * n0 + h * n1 + i * n2)
    (n0, n1, n2, step), at = k.stride(), k.storage_offset()
    theirs = k.as_strided((stop - start, D), (n2, step), at + b * n0 + h * Hk // H * n1 + start * n2)
    if lse is not None:
        (n0, n1, n2), at = lse.stride(), lse.storage_offset()
        row_lse = lse.as_strided((1,), (1,), at + b * n0 + h * n1 + i * n2)
    return mine, theirs, row_lse


def _by_rules(
    scores: Scores,
    lse: Tensor | None,
    b: int,
    h: int | None,
    i: int,
    at: int,
    keys: slice,
    hides: bool,
    on_cpu: bool,
) -> Tensor | None:
    """Compute `row` with rules or biases, of any heads; None if the row does not fit its lse."""
    q, scoring, (_, H, _, S) = scores.q, scores.scoring, scores.shape
    if on_cpu:
        settle_exponentials()
    mine, theirs, row_lse = _views(q, scores.k, lse, b, h, i, keys.start, keys.stop)
    x = _product(mine, theirs).mul_(scoring.scale)
    if scoring.softcap is not None:
        x = x.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    if scoring.adds:
        x = x.add_(_added(scores, b, h, i, at, keys))
    hidden = None
    if hides:
        hidden = x <= HIDDEN
        for visible in _visible_keys(scores, b, h, i, keys, on_cpu):
            hidden = hidden | ~visible
        x = x.masked_fill_(hidden, HIDDEN)
    p = torch.softmax(x, -1) if row_lse is None else x.sub_(row_lse).exp_()
    if row_lse is not None and (on_cpu or q.dtype not in HALF):
        mass = p.sum(-1, keepdim=True)
        if scoring.sinks is not None:
            sinks = scoring.sinks.to(mass.dtype)
            mass = mass + ((sinks[:, None] if h is None else sinks[h]) - row_lse).exp_()
        if on_cpu and not float(mass.log().abs_().max()) <= SLACK:  # or NaN
            return None
        p = p.div_(mass if on_cpu else _or_nan(mass, row_lse))
    if hidden is not None:  # a row that sees nothing has neither lse nor mass
        p = p.masked_fill_(hidden, 0.0)
    if keys.stop - keys.start == S:
        return p.to(q.dtype)
    weights = q.new_zeros(S if h is not None else (H, S))
    weights[..., keys] = p
    return weights


def _product(q: Tensor, k: Tensor) -> Tensor:
    """Return q k^T in at least float32: [n] of [D] and [n, D], or [H, n] of [H, D] and [Hk, n, D]."""
    if q.dtype in HALF:
        if q.is_cuda and q.shape[-1] % 8 == 0 and _multiplies_into_float32(q.dtype):
            if q.ndim == 1:
                return torch.mm(k, q[:, None], out_dtype=torch.float32)[:, 0]
            folded = q.reshape(k.shape[0], -1, q.shape[-1])
            return torch.bmm(folded, k.mT, out_dtype=torch.float32).view(q.shape[0], -1)
        q, k = q.float(), k.float()
    if q.ndim == 1:
        return torch.mv(k, q)
    return torch.bmm(q.reshape(k.shape[0], -1, q.shape[-1]), k.mT).view(q.shape[0], -1)


def _scaled_less(lse: Tensor, k: Tensor, q: Tensor, scale: float) -> Tensor:
    """Return scale q k^T - lse in float32, [n], of 16-bit q [D] and k [n, D]."""
    if q.is_cuda and q.shape[0] % 8 == 0 and _multiplies_into_float32(q.dtype):
        x = torch.addmm(lse, k, q[:, None], beta=-1, alpha=scale, out_dtype=torch.float32)
        return x[:, 0]
    return _product(q, k).mul_(scale).sub_(lse)


@functools.cache
def _multiplies_into_float32(dtype: torch.dtype) -> bool:
    """Return True if torch can multiply 16-bit numbers on a GPU into float32, without a copy of the keys."""
    ones = torch.ones(8, 8, dtype=dtype, device="cuda")
    added = torch.ones(1, dtype=torch.float32, device="cuda")
    try:
        torch.mm(ones, ones[:, :1], out_dtype=torch.float32)
        torch.bmm(ones[None], ones[None], out_dtype=torch.float32)
        torch.addmm(added, ones, ones[:, :1], beta=-1, alpha=0.5, out_dtype=torch.float32)
    except (TypeError, RuntimeError):  # there is no such product on this GPU
        return False
    return True


def _added(scores: Scores, b: int, h: int | None, i: int, at: int, keys: slice) -> Tensor:
    """Return what is added to the product, in the dtype of scores; see `Scores.bias`."""
    scoring, dtype, added = scores.scoring, scores.dtype, None
    if scoring.bias is not None:
        bias = _of_query(scoring.bias, b, h, i, keys)
        added = bias.to(dtype)
        if bias.dtype == torch.float16:
            added = added.masked_fill(bias <= torch.finfo(torch.float16).min / 2, HIDDEN)
    if scoring.slopes is not None:
        away = (torch.arange(keys.start, keys.stop, device=scores.device) - at).abs()
        slopes = scoring.slopes.to(dtype)
        falling = away * (-slopes[:, None] if h is None else -slopes[h])
        added = falling if added is None else added + falling
    assert added is not None
    if scores.q.is_cuda and dtype != scores.q.dtype:
        added = added.to(scores.q.dtype).to(dtype)
    return added


def _visible_keys(scores: Scores, b: int, h: int | None, i: int, keys: slice, on_cpu: bool) -> list[Tensor]:
    """Return the keys of a slice that rules other than a band show: bool, [n] or [H, n] each."""
    mask, visible = scores.mask, []
    if mask.keys is not None and mask.keys.ndim == 2:
        visible.append(mask.keys[b, keys])
    elif mask.keys is not None and not on_cpu:  # on a CPU the slice ends there
        visible.append(torch.arange(keys.start, keys.stop, device=scores.device) < mask.keys[b])
    if mask.key_ids is not None and mask.query_ids is not None:
        theirs = mask.key_ids[b if mask.key_ids.shape[0] > 1 else 0, keys]  # [n, N]
        mine = mask.query_ids[b if mask.query_ids.shape[0] > 1 else 0, i]  # [N]
        visible.append((theirs == mine).all(-1))
    if mask.allowed is not None:
        visible.append(_of_query(mask.allowed, b, h, i, keys))
    return visible


def _of_query(tensor: Tensor, b: int, h: int | None, i: int, keys: slice) -> Tensor:
    """Return [n or 1], or [H or 1, n or 1], of a tensor that broadcasts to [B, H, T, S]."""
    B, H, T, S = tensor.shape
    head = slice(None) if h is None else h if H > 1 else 0
    return tensor[b if B > 1 else 0, head, i if T > 1 else 0, keys if S > 1 else slice(None)]


def _or_nan(mass: Tensor, lse: Tensor) -> Tensor:
    """Return the sums of rows on a GPU, [1] or [H, 1]; NaN where the error is more than rounding.

    The kernels do the same (gpu/rows.py), since nothing there can raise.
    """
    far = torch.sub(mass.log().abs_(), lse.abs(), alpha=OFF / 64) > OFF
    return mass.masked_fill_(far, torch.nan)
