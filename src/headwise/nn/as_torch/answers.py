"""What comes out of the heads of torch's class: outputs, and weights if they are wanted.

`answer`: by fused kernels and the second pass where they can go; else by the matrix itself, in the steps
torch's class takes.

`native`: by torch's own operator, projections and all, for the calls it is best at: without gradients, small
on a CPU, or on a GPU while their weights are fewer than the steps around a kernel would take. At a few tokens
the products take less time than the steps between them, and the operator takes all of them in C++; on a GPU,
with nothing hidden or wanted, it goes to the same kernels as we do. On a CPU, where weights are
wanted and nothing is hidden, it makes the products and exponentials that we would make, with nothing to skip:
it is taken for weights of every head, for their mean while all are near, with a mask while they are some. Of
what it is known to get wrong nothing is let through: rows that see nothing (on a GPU, where masks are not
read, what it says of them is replaced), odd numbers of heads, odd widths of heads in half precision. It takes
the weight of `out_proj` and does not call it, so it is used only where nobody could notice.

Letters: N batch, L query_len, S key_len, H num_heads, D head_dim.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention

from ... import budget
from ...arguments import autocasting
from ...engines.kernels import HALF
from ...engines.plain import transforms_are_active
from ...engines.scores import HAS_MKL, blocks, huge_empty, own_precision, tile_dtype, turned
from ...engines.weights import softmax
from ...functional import attention
from ...indexing import take
from ...mask_rules import can_read
from ..packed_weights import OUT_PROJ, is_unobserved, is_untouched, parameters_of
from .torch_masks import Rules, as_hidden

if TYPE_CHECKING:
    from .module import MultiheadAttention

__all__ = ["FEW", "answer", "leaves_some", "native"]


# Without MKL a fused kernel takes less time than the operator from the first token on; masked weights of our
# own up to a tenth less while there are 128 tokens, and as much more at 256.
FEW = 2**16  # weights: what stands around them takes longer than they do
# Weights, wanted and masked, or with a float mask: beyond, the operator's softmax is too slow.
SOME = 2**14 if HAS_MKL else 2**19
# Weights of which none is wanted or hidden: here the operator is as fast as a fused kernel.
MORE = 2**18 if HAS_MKL else 0
NEAR = 2**23  # weights, 32 MiB: all of them stay in the last cache, and a mean of them costs no more
ON_A_GPU = 2**26  # weights that are wanted or masked: beyond, our kernels are faster
AT_ONCE = 2**21  # weights of a tile, 8 MiB
MANY, FEWEST = 256, 64  # queries a tile: more make too much that is hidden, fewer too thin a product
SQUARE, PADDING, BOTH = 0, 1, 2  # the operator's numbers for [L, L], [N, L], [N, H, L, L]
Answer = tuple[Tensor, Tensor | None]  # [N, H, L, D]; [N, L, S] or [N, H, L, S]


def native(
    module: MultiheadAttention,
    x: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    need_weights: bool,
    average: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor | None] | None:
    """(output, weights) of self-attention; None: not a call for the operator."""
    held: dict[str, Any] = module.__dict__  # past nn.Module.__getattr__, which is slow
    masks, masked = (key_padding_mask, attn_mask), key_padding_mask is not None or attn_mask is not None
    if is_causal and not need_weights and key_padding_mask is None and x.is_cuda:
        return None  # the hint is trusted there, and a kernel skips what it hides
    if not _is_plain(held, x) or not _is_small(held, x, masks, need_weights, average):
        return None
    parameters = _parameters_like(module, x)
    if parameters is None:
        return None
    (N, L, E), H = x.shape, held["num_heads"]
    mask, kind = None, None
    if masked:
        if x.is_cuda and need_weights and module.empty_rows == "zero":
            return None
        mask, kind = (_unread if x.is_cuda else _for_operator)(*masks, N, L, H)
        if mask is None or mask.device != x.device:
            return None
    if need_weights:
        _check_budget((N, L, L) if average else (N, H, L, L), x)
    in_weight, in_bias, out_weight, out_bias = parameters
    output, weights = torch._native_multi_head_attention(
        x, x, x, E, H, in_weight, in_bias, out_weight, out_bias, mask, need_weights, average, kind
    )
    if mask is not None and x.is_cuda and not need_weights:
        # NaN of queries that see nothing: their heads say 0, as everywhere where no weights are wanted
        nothing = (mask[:, 0] if kind == BOTH else mask).all(-1, keepdim=True)  # [N, 1], [L, 1] or [N, L, 1]
        output = torch.where(nothing.unsqueeze(2) if kind == PADDING else nothing, out_bias, output)
    return output, weights


def _is_plain(held: dict[str, Any], x: Tensor) -> bool:
    """Return True if a module of this __dict__ and its input are what the operator takes."""
    if not held["batch_first"] or not held["_qkv_same_embed_dim"] or held["add_zero_attn"]:
        return False
    if x.dim() != 3 or held["num_heads"] % 2 or (held["training"] and held["dropout"]):
        return False
    if x.shape[2] != held["embed_dim"] or not x.numel() or not is_unobserved(x):
        return False
    return bool(torch.backends.mha.get_fastpath_enabled())


def _is_small(
    held: dict[str, Any],
    x: Tensor,
    masks: tuple[Tensor | None, Tensor | None],
    need_weights: bool,
    average: bool,
) -> bool:
    """Return True if the operator, which computes all weights, takes less time than a kernel."""
    masked = masks[0] is not None or masks[1] is not None
    count = x.shape[0] * x.shape[1] ** 2 * held["num_heads"]
    if x.is_cuda:
        many = count > ON_A_GPU or not budget.surely_fits(0)
        return not (held["head_dim"] % 8 or ((masked or need_weights) and many))
    if not x.is_cpu:
        return False
    if not masked:
        if need_weights and not average:
            return True  # there is nothing to gain
        return bool(count <= (NEAR if need_weights else MORE))
    if need_weights:
        return bool(count <= SOME)
    if not HAS_MKL:  # whatever a bool mask holds: to look takes as long as it brings
        return bool(masks[1] is not None and masks[1].dtype == torch.bool and count <= 2 * FEW)
    return bool(count <= (FEW if _is_bool(*masks) else SOME))


def _parameters_like(module: MultiheadAttention, x: Tensor) -> list[Tensor] | None:
    """Weights and biases of both projections; None: one of them is missing, learns, or lies elsewhere."""
    out_proj = module.__dict__["_modules"]["out_proj"]
    if module.bias_k is not None or module.bias_v is not None or not is_untouched(out_proj, OUT_PROJ):
        return None
    mine = parameters_of(module, "in_proj_weight", "in_proj_bias")
    theirs = parameters_of(out_proj, "weight", "bias")
    learns = torch.is_grad_enabled()
    if mine is None or theirs is None or (learns and x.requires_grad):
        return None
    found: list[Tensor] = []
    for parameter in (*mine, *theirs):
        if parameter is None or parameter.dtype is not x.dtype or parameter.device != x.device:
            return None
        if learns and parameter.requires_grad:
            return None
        found.append(parameter)
    return found if tuple(found[2].shape) == (x.shape[2], x.shape[2]) else None


def _is_bool(*masks: Tensor | None) -> bool:
    return all(mask is None or mask.dtype == torch.bool for mask in masks)


def _for_operator(
    padding: Tensor | None, attn_mask: Tensor | None, N: int, L: int, H: int
) -> tuple[Tensor | None, int]:
    """(the mask as the operator takes it, its number for that kind); None: not one for it."""
    if padding is not None:
        if attn_mask is not None and attn_mask.dtype != padding.dtype:
            return None, 0  # torch's class warns of that
        padding = as_hidden(padding)
        if padding is None or not leaves_some(padding, N, L):
            return None, 0
    if attn_mask is None:
        return padding, PADDING
    if tuple(attn_mask.shape) != (L, L) or not can_read(attn_mask):
        return None, 0
    attn_mask = as_hidden(attn_mask)
    if attn_mask is None:
        return None, 0
    mask = attn_mask if padding is None else attn_mask | padding[:, None, None]  # [L, L] or [N, 1, L, L]
    if bool(mask.all(-1).any()):
        return None, 0
    return (mask, SQUARE) if padding is None else (mask.expand(N, H, L, L), BOTH)


def _unread(
    padding: Tensor | None, attn_mask: Tensor | None, N: int, L: int, H: int
) -> tuple[Tensor | None, int]:
    """Likewise for masks on a GPU, which nobody reads."""
    if not _is_bool(padding, attn_mask) or (padding is not None and tuple(padding.shape) != (N, L)):
        return None, 0
    if attn_mask is None:
        return padding, PADDING
    if tuple(attn_mask.shape) != (L, L) or (padding is not None and padding.device != attn_mask.device):
        return None, 0
    if padding is None:
        return attn_mask, SQUARE
    return (attn_mask | padding.view(N, 1, 1, L)).expand(N, H, L, L), BOTH


def leaves_some(padding: Tensor, N: int, L: int) -> bool:
    """Whether every sequence has a key that is none."""
    if padding.dtype != torch.bool or not padding.is_cpu or tuple(padding.shape) != (N, L):
        return False
    return not bool(padding.all(1).any())


def answer(
    q: Tensor, k: Tensor, v: Tensor, rules: Rules, dropout: float, weights: bool, average: bool, zero: bool
) -> Answer:
    """(outputs, weights).

    Args:
        dropout: the share dropped, here and now.
        weights: whether they are wanted, else None.
        average: over heads.
        zero: rows that see nothing are 0; else, as in torch, NaN where weights are wanted.
    """
    if dropout and not weights:
        return _dropped(q, k, v, rules, dropout), None
    if weights and q.is_cpu:
        (N, H, L, _), S = q.shape, k.shape[2]
        _check_budget((N, L, S) if average else (N, H, L, S), q)
    how = rules, max(dropout, 0.0), weights, average, zero
    if dropout > 0 or not q.numel() or not k.numel() or transforms_are_active():
        return _step_by_step(q, k, v, *how)
    if weights and autocasting(q):
        return _step_by_step(q, k, v, *how)
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, rules.bias))
    if rules.low and (weights or learns):
        return _step_by_step(q, k, v, *how)
    if torch.compiler.is_compiling():
        return _in_kernels(q, k, v, *how)
    few = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] <= FEW
    if few and q.is_cuda and q.dtype not in HALF and (weights or q.shape[3] % 8):
        # where torch's class takes these steps, too; kernels multiply float32 more roughly
        return _step_by_step(q, k, v, *how)
    if q.is_cpu:
        if few and (weights or rules.hides):
            return _step_by_step(q, k, v, *how)
        if weights and not learns:
            return _in_tiles(q, k, v, rules, average, zero)
        if weights and not average and not rules.causal and not zero:
            return _step_by_step(q, k, v, *how)
    return _in_kernels(q, k, v, *how)


def _in_kernels(
    q: Tensor, k: Tensor, v: Tensor, rules: Rules, dropout: float, weights: bool, average: bool, zero: bool
) -> Answer:
    """Outputs from the fastest kernel there is, weights from a second pass over q and k."""
    L, S, bias = q.shape[2], k.shape[2], rules.tame_bias()
    if bias is not None and bias is rules.bias and torch.is_grad_enabled():
        # torch has no use for a mask on the way back, and whoever owns it may write to it
        bias = bias.clone()
    if rules.causal and rules.padding is None and L == S:
        out, seen = attention(q, k, v, causal=True, bias=bias)
    else:
        out, seen = attention(q, k, v, rules.mask(L, S), bias=bias)
    if not weights:
        return out, None
    shown = seen.mean_heads() if average else seen.dense()
    if zero or not rules.hides:
        return out, shown
    empty = torch.isneginf(seen.lse)  # [N, H, L]
    if can_read(empty):
        if not bool(empty.any()):
            return out, shown
        return _step_by_step(q, k, v, rules, dropout, weights, average, zero)
    nan = torch.where(empty, torch.nan, 1.0).to(q.dtype)  # [N, H, L]
    return out * nan[..., None], shown * (nan.mean(1) if average else nan)[..., None]


def _in_tiles(q: Tensor, k: Tensor, v: Tensor, rules: Rules, average: bool, zero: bool) -> Answer:
    """Some queries of some heads at a time: their weights are made once, and meet the values while near.

    On a CPU this is the cheapest way to outputs and weights both, whatever CPU it is: a score is one product,
    one exponential and one product more, where kernels and a second pass take three products and two
    exponentials; scores that a causal mask hides are never made; and what is kept is written once.
    """
    (N, H, L, D), S = q.shape, k.shape[2]
    kept = tile_dtype(q.dtype) if average else q.dtype  # of many half-precision heads a sum would lose some
    shape = (N, L, S) if average else (N, H, L, S)
    # a hidden first key leaves queries with nothing, and those have NaN in all of torch's row
    skips = rules.causal and (rules.padding is None or not bool(rules.padding[:, 0].any()))
    skips = skips and (rules.bias is None or not bool((rules.bias[..., 0] == -torch.inf).any()))
    added = (replace(rules, causal=False) if skips else rules).added(L, S, q.dtype, q.device)
    out, shown = q.new_empty(N, L, H, D), huge_empty(shape, kept, q.device)
    rows, some = _tile(H, L, S, skips)
    if average or (skips and (rows < L or S > L)):  # else every place is written to
        shown.zero_()
    room = q.new_empty(some * rows * S)
    near_q, near_k, near_v = q.new_empty(some, L, D), q.new_empty(some, S, D), q.new_empty(some, S, D)
    corner = q.new_full((rows, rows), -torch.inf).triu_(1) if skips else None
    for n, heads in product(range(N), blocks(0, H, some)):
        count = heads.stop - heads.start
        # Copies, so that products find rows side by side. Scaled here: a product that is given a factor goes
        # another way in OpenBLAS, and takes 22 ms instead of 13.
        torch.mul(q[n, heads], math.sqrt(1.0 / D), out=near_q[:count])
        near_k[:count], near_v[:count] = k[n, heads], v[n, heads]
        for queries in blocks(0, L, rows):
            keys = slice(0, min(queries.stop, S) if skips else S)
            t, s = queries.stop - queries.start, keys.stop
            place = None if average else shown[n, heads, queries, keys]
            p = place
            if p is None or not p.is_contiguous():
                p = room[: count * t * s].view(count, t, s)
            torch.bmm(near_q[:count, queries], turned(near_k[:count, keys], t), out=p)
            if added is not None:
                p += take(added, (slice(n, n + 1), heads, queries, keys))[0]
            if corner is not None and queries.start < s:
                at = p[..., queries.start :]  # [heads, t, keys from the first query's own on]
                at += corner[:t, : at.shape[2]]
            softmax(p, None, zero and rules.hides)
            out[n, queries, heads] = torch.bmm(p, near_v[:count, keys]).transpose(0, 1)
            if average:
                total = p[0] if count == 1 else p.sum(0, dtype=kept)
                shown[n, queries, keys].add_(total, alpha=1.0 / H)
            elif place is not None and place is not p:
                place.copy_(p)
    return out.transpose(1, 2), shown.to(q.dtype)


def _check_budget(shape: tuple[int, ...], like: Tensor) -> None:
    """Raise `BudgetExceeded` where weights of this shape are more than there is room for."""
    size = math.prod(shape) * like.element_size()
    if not budget.surely_fits(size):
        budget.check(size, like.device, f"weights {list(shape)}", "pass need_weights=False")


def _tile(H: int, L: int, S: int, skips: bool) -> tuple[int, int]:
    """(queries, heads) a tile: as many as stay near; where hidden keys are skipped, fewer queries."""
    most = min(L, MANY) if skips else L
    rows = min(most, max(AT_ONCE // S, FEWEST))
    return rows, max(1, min(H, AT_ONCE // (rows * S)))


def _dropped(q: Tensor, k: Tensor, v: Tensor, rules: Rules, dropout: float) -> Tensor:
    """By torch's kernels, which drop weights without keeping them."""
    L, S = q.shape[2], k.shape[2]
    if rules.causal and not rules.hides:
        return scaled_dot_product_attention(q, k, v, None, dropout, is_causal=True)
    added = rules.added(L, S, q.dtype, q.device)
    if added is not None:
        added = added.expand(*added.shape[:2], L, S)
    return scaled_dot_product_attention(q, k, v, added, dropout)


def _step_by_step(
    q: Tensor, k: Tensor, v: Tensor, rules: Rules, dropout: float, weights: bool, average: bool, zero: bool
) -> Answer:
    if not weights and q.dtype in HALF:  # as torch's fused function has it inside
        with own_precision(q.device):
            exact = q.float(), k.float(), v.float()
            return _step_by_step(*exact, rules, dropout, weights, average, zero)[0].to(v.dtype), None
    scores = (q * math.sqrt(1.0 / q.shape[-1])) @ turned(k, q.shape[2])
    added = rules.added(q.shape[2], k.shape[2], scores.dtype, q.device)
    empty = None
    if added is not None:
        if zero or not weights:
            empty = (added == -torch.inf).all(-1, keepdim=True)  # [N or 1, H or 1, L or 1, 1]
            added = added.masked_fill(empty, 0.0)
        scores = scores + added
    p = torch.softmax(scores, -1)
    if empty is not None:
        p = p.masked_fill(empty, 0.0)
    if dropout:
        p = drop(p, p=dropout)
    out = p @ v
    if not weights:
        return out, None
    # As in torch a view: hooks on the weights run only where the loss depends on them.
    return out, p.mean(1) if average else p.view_as(p)
