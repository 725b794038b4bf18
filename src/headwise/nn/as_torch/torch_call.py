"""One call of torch's class: its arguments, its heads, their outputs, and back through `out_proj`.

A caller (the class itself, or a listener on a model) opens a `TorchCall`, attends in
its own way, and finishes the call. Batch or length may come first: a product over the last dimension does not
mind, and heads are views of it.

`attend` computes them as the class does: by fused kernels and the second pass where possible; else by the
matrix of weights, in the steps of torch's class.

Letters: N batch, L query_len, S key_len, E embed_dim, H num_heads, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional
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
from ..one_step import by_head, joined
from .torch_arguments import Rules, check_inputs, check_masks, check_widths, rules_of

FEW = 2**16  # weights that take less time than the overhead of a kernel call
AT_ONCE = 2**21  # weights of a tile, 8 MiB
MANY, FEWEST = 256, 64  # queries per tile: more compute too many hidden scores, fewer make slow products
Heads = tuple[Tensor, Tensor, Tensor]
Output = tuple[Tensor, Tensor | None]  # [N, H, L, D]; [N, L, S] or [N, H, L, S]


class TorchCall:
    """A call of torch's class, ours or not: what is refused is refused here, in torch's order and words.

        call = TorchCall(module, query, key, value, ..)   torch's arguments; one sequence is a batch of one
        q, k, v = call.heads()                            projected, with the keys that the module appends
        ..                                                attention, by whoever asked
        output, weights = call.finish(heads, weights)     out_proj; one sequence again

    Raises:
        ValueError, AssertionError, RuntimeError: as torch's class does, when made and in `heads`.
    """

    __slots__ = (
        "_rules", "appended", "attn_mask", "average", "batched", "dropout", "first", "is_causal", "key",
        "key_padding_mask", "module", "need_weights", "query", "value",
    )  # fmt: skip

    def __init__(
        self,
        module: nn.MultiheadAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> None:
        check_inputs(module, query, key, value, key_padding_mask, attn_mask, is_causal)
        self.batched = query.dim() == 3
        if not self.batched:
            same, alike = query is key, key is value
            query = query.unsqueeze(0)
            key = query if same else key.unsqueeze(0)
            value = key if alike else value.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif torch.is_grad_enabled():
            query, key, value = _copied_for_backward(query, key, value, module.batch_first)
        self.module, self.query, self.key, self.value = module, query, key, value
        self.first = 0 if module.batch_first or not self.batched else 1  # which dimension is the batch
        self.key_padding_mask = key_padding_mask  # [N, S]
        self.attn_mask = attn_mask  # [L, S] or [N * H, L, S]
        if is_causal and not need_weights and key_padding_mask is None and not self.mask_fits():
            self.attn_mask = None  # torch uses the hint here, and does not even read the mask's shape
        self.is_causal, self.need_weights, self.average = is_causal, need_weights, average_attn_weights
        self.dropout: float = module.dropout if module.training else 0.0
        self.appended: int | None = None  # keys that the module appends; set once masks have been checked
        self._rules: Rules | None = None

    def mask_fits(self) -> bool:
        """Return True if attn_mask is missing or has the shape of this call."""
        return self.attn_mask is None or tuple(self.attn_mask.shape) == self.mask_shape()

    def mask_shape(self) -> tuple[int, ...]:
        """Return the shape that attn_mask must have, in as many dimensions as it has."""
        N, L = self.query.shape[self.first], self.query.shape[1 - self.first]
        shape = (N * self.module.num_heads, L, self.key.shape[1 - self.first])
        return shape if self.attn_mask is not None and self.attn_mask.dim() == 3 else shape[1:]

    def heads(self) -> Heads:
        """Return q [N, H, L, D], k and v [N, H, S + appended, D]."""
        q, k, v = _heads_of(self.module, self.query, self.key, self.value, self.first)
        if self.appended is None:
            self.appended = check_masks(self, q.shape, k.shape)
        if self.appended:
            k, v = _with_more_keys(self.module, k, v)
        return q, k, v

    def rules(self, query_len: int, key_len: int) -> Rules:
        """Return the masks as rules, once they are checked; `key_len` counts the appended keys."""
        if self._rules is None:
            masks, H = (self.key_padding_mask, self.attn_mask), self.module.num_heads
            self._rules = rules_of(*masks, self.is_causal, H, self.appended or 0, query_len, key_len)
        return self._rules

    def finish(self, heads: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return (output, weights) in the caller's layout, from heads [N, H, L, D] and weights [N, ..]."""
        output: Tensor = self.module.out_proj(joined(heads, self.first))  # so that hooks run
        if self.batched:
            return output, weights
        return output.squeeze(0), None if weights is None else weights.squeeze(0)


def _copied_for_backward(query: Tensor, key: Tensor, value: Tensor, batch_first: bool) -> Heads:
    """Return the inputs as backward needs them: copies where torch's class projects copies.

    It does where the batch comes first, and where an input is not contiguous. Training code that writes to
    its inputs after the call, such as `x += mha(x, x, x)[0]`, works because of that.
    """

    def copied(x: Tensor) -> Tensor:
        return x.clone() if batch_first or not x.is_contiguous() else x

    first = copied(query)
    second = first if key is query else copied(key)
    return first, second, first if value is query else second if value is key else copied(value)


def _heads_of(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, first: int) -> Heads:
    """Return q [N, H, L, D], k and v [N, H, S, D] from 3-D inputs."""
    E, H, weight, bias = module.embed_dim, module.num_heads, module.in_proj_weight, module.in_proj_bias
    if not module._qkv_same_embed_dim:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        check_widths((query, key, value), weights, bias)
        q, k, v = _three(query, key, value, weights, bias)
    elif weight is None:
        raise AssertionError("use_separate_proj_weight is False but in_proj_weight is None")
    elif key is not value:
        q, k, v = _three(query, key, value, weight.chunk(3), bias)
    elif query is key:
        q, k, v = by_head(linear(query, weight, bias), weight.shape[0] // (3 * H), first).chunk(3, 1)
        return q, k, v
    else:
        of_q, of_both = weight.split([E, 2 * E])
        q_bias, both_bias = (None, None) if bias is None else bias.split([E, 2 * E])
        q = linear(query, of_q, q_bias)
        k, v = linear(key, of_both, both_bias).unflatten(-1, (2, E)).unbind(-2)
    q, k, v = (by_head(x, x.shape[2] // H, first) for x in (q, k, v))
    return q, k, v


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return torch's linear, which takes a bias of another dtype only where it does not fuse it.

    On a CPU without MKL a product that begins at the bias is slower than adding it afterwards, and off by
    two to three times as much.
    """
    if bias is None or bias.dtype != weight.dtype:
        product = functional.linear(x, weight)
        return product if bias is None else product + bias
    if HAS_MKL or not x.is_cpu or x.shape[-1] != weight.shape[-1] or bias.shape != weight.shape[:1]:
        return functional.linear(x, weight, bias)
    if torch.compiler.is_compiling() or transforms_are_active() or autocasting(x):
        return functional.linear(x, weight, bias)
    return functional.linear(x, weight).add_(bias)


def _three(
    query: Tensor, key: Tensor, value: Tensor, weights: Sequence[Tensor], bias: Tensor | None
) -> Heads:
    of_q, of_k, of_v = (None, None, None) if bias is None else bias.chunk(3)
    q, k, v = weights
    return linear(query, q, of_q), linear(key, k, of_k), linear(value, v, of_v)


def _with_more_keys(module: nn.MultiheadAttention, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v followed by the keys that a module appends: bias_k and bias_v, then zeros."""
    N, H, _, D = k.shape
    if module.bias_k is not None and module.bias_v is not None:
        k, v = (
            torch.cat([x, bias.view(1, H, 1, D).expand(N, -1, -1, -1)], 2)
            for x, bias in ((k, module.bias_k), (v, module.bias_v))
        )
    if module.add_zero_attn:
        nothing = k.new_zeros(N, H, 1, D)
        k, v = torch.cat([k, nothing], 2), torch.cat([v, nothing], 2)
    return k, v


# Attention of the heads


def attend(
    q: Tensor, k: Tensor, v: Tensor, rules: Rules, dropout: float, weights: bool, average: bool, zero: bool
) -> Output:
    """Return (outputs, weights) of the heads.

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
        check_budget((N, L, S) if average else (N, H, L, S), q)
    options = rules, max(dropout, 0.0), weights, average, zero
    if dropout > 0 or not q.numel() or not k.numel() or transforms_are_active():
        return _step_by_step(q, k, v, *options)
    if weights and autocasting(q):
        return _step_by_step(q, k, v, *options)
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, rules.bias))
    if rules.low and (weights or learns):
        return _step_by_step(q, k, v, *options)
    if torch.compiler.is_compiling():
        return _in_kernels(q, k, v, *options)
    few = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] <= FEW
    if few and q.is_cuda and q.dtype not in HALF and (weights or q.shape[3] % 8):
        # torch's class also takes these steps here; kernels multiply float32 less exactly
        return _step_by_step(q, k, v, *options)
    if q.is_cpu:
        if few and (weights or rules.hides):
            return _step_by_step(q, k, v, *options)
        if weights and not learns:
            return _in_tiles(q, k, v, rules, average, zero)
        if weights and not average and not rules.causal and not zero:
            return _step_by_step(q, k, v, *options)
    return _in_kernels(q, k, v, *options)


def _in_kernels(
    q: Tensor, k: Tensor, v: Tensor, rules: Rules, dropout: float, weights: bool, average: bool, zero: bool
) -> Output:
    """Compute outputs by the fastest kernel, and weights by a second pass over q and k."""
    L, S, bias = q.shape[2], k.shape[2], rules.tame_bias()
    if bias is not None and bias is rules.bias and torch.is_grad_enabled():
        # torch does not need a mask in backward, so its owner may write to it
        bias = bias.clone()
    if rules.causal and rules.padding is None and L == S:
        out, map_ = attention(q, k, v, causal=True, bias=bias)
    else:
        out, map_ = attention(q, k, v, rules.mask(L, S), bias=bias)
    if not weights:
        return out, None
    shown = map_.mean_heads() if average else map_.dense()
    if zero or not rules.hides:
        return out, shown
    empty = torch.isneginf(map_.lse)  # [N, H, L]
    if can_read(empty):
        if not bool(empty.any()):
            return out, shown
        return _step_by_step(q, k, v, rules, dropout, weights, average, zero)
    nan = torch.where(empty, torch.nan, 1.0).to(q.dtype)  # [N, H, L]
    return out * nan[..., None], shown * (nan.mean(1) if average else nan)[..., None]


def _in_tiles(q: Tensor, k: Tensor, v: Tensor, rules: Rules, average: bool, zero: bool) -> Output:
    """Compute some queries of some heads at a time: weights and values are multiplied while in the cache.

    On a CPU this is the cheapest way to outputs and weights both, whatever CPU it is: a score is one product,
    one exponential and one product more, where kernels and a second pass take three products and two
    exponentials; scores that a causal mask hides are never made; and what is kept is written once.
    """
    (N, H, L, D), S = q.shape, k.shape[2]
    weights_dtype = tile_dtype(q.dtype) if average else q.dtype  # more exact for sums over heads
    shape = (N, L, S) if average else (N, H, L, S)
    # if the first key is hidden, some queries see no key, and torch's whole row is NaN
    skips = rules.causal and (rules.padding is None or not bool(rules.padding[:, 0].any()))
    skips = skips and (rules.bias is None or not bool((rules.bias[..., 0] == -torch.inf).any()))
    added = (replace(rules, causal=False) if skips else rules).added(L, S, q.dtype, q.device)
    out, shown = q.new_empty(N, L, H, D), huge_empty(shape, weights_dtype, q.device)
    rows, some = _tile(H, L, S, skips)
    if average or (skips and (rows < L or S > L)):  # otherwise every element is written
        shown.zero_()
    room = q.new_empty(some * rows * S)
    near_q, near_k, near_v = q.new_empty(some, L, D), q.new_empty(some, S, D), q.new_empty(some, S, D)
    corner = q.new_full((rows, rows), -torch.inf).triu_(1) if skips else None
    for n, heads in product(range(N), blocks(0, H, some)):
        count = heads.stop - heads.start
        # Copies, so that rows are contiguous for products. Scaled here: with a factor a product takes 22 ms
        # in OpenBLAS instead of 13.
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
                total = p[0] if count == 1 else p.sum(0, dtype=weights_dtype)
                shown[n, queries, keys].add_(total, alpha=1.0 / H)
            elif place is not None and place is not p:
                place.copy_(p)
    return out.transpose(1, 2), shown.to(q.dtype)


def check_budget(shape: tuple[int, ...], like: Tensor) -> None:
    """Raise `BudgetExceeded` where weights of this shape are more than there is room for."""
    size = math.prod(shape) * like.element_size()
    if not budget.surely_fits(size):
        budget.check(size, like.device, f"weights {list(shape)}", "pass need_weights=False")


def _tile(H: int, L: int, S: int, skips: bool) -> tuple[int, int]:
    """Return (queries, heads) of a tile that fits a cache; fewer queries where hidden keys are skipped."""
    most = min(L, MANY) if skips else L
    rows = min(most, max(AT_ONCE // S, FEWEST))
    return rows, max(1, min(H, AT_ONCE // (rows * S)))


def _dropped(q: Tensor, k: Tensor, v: Tensor, rules: Rules, dropout: float) -> Tensor:
    """Compute outputs by torch's kernels, which drop weights without storing them."""
    L, S = q.shape[2], k.shape[2]
    if rules.causal and not rules.hides:
        return scaled_dot_product_attention(q, k, v, None, dropout, is_causal=True)
    added = rules.added(L, S, q.dtype, q.device)
    if added is not None:
        added = added.expand(*added.shape[:2], L, S)
    return scaled_dot_product_attention(q, k, v, added, dropout)


def _step_by_step(
    q: Tensor, k: Tensor, v: Tensor, rules: Rules, dropout: float, weights: bool, average: bool, zero: bool
) -> Output:
    if not weights and q.dtype in HALF:  # float32 inside, as in torch's fused function
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
    # A view, as in torch: hooks on the weights run only where the loss depends on them.
    return out, p.mean(1) if average else p.view_as(p)
