"""One call of torch's class between its arguments and its heads, and back: `TorchCall`, without copies.

Whoever answers such a call (the class itself, or a listener beside a model) opens it here, attends in its own
way, and finishes it here. Batch or length may come first: a product over the last dimension does not mind,
and heads are views of it. Plain calls are one step of autograd, projections, weights and padding included
(`in_one_step`).

Letters: N batch, L query_len, S key_len, E embed_dim, H num_heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ... import budget
from ...arguments import autocasting, device_type
from ...engines.kernels import MOST_CHANNELS
from ...engines.plain import transforms_are_active
from ...engines.scores import HAS_MKL
from ..one_step import Parameters, joined, kernel_for, run, step_of, weights_of_step
from ..packed_weights import OUT_PROJ, PLAIN_TYPES, is_plain_call, is_untouched, parameters_of
from .contract import check_inputs, check_masks, check_widths
from .torch_masks import Rules, rules_of

__all__ = ["TorchCall", "in_one_step"]


# Weights. On a GPU fewer than MANY take less time than the steps around a second pass, fewer than FEW than
# those around a mask that adds numbers; on a CPU, without gradients, beyond these tiles are better, and for
# outputs a mask that was read.
FEW, MANY = 2**22, 2**26
FEW_IN_TILES, FEW_TO_READ, TINY = 2**20, 2**17, 2**14
SERVES = ("cuda",)  # devices that wait for Python: torch's own function, which is quickest to ask, attends
Heads = tuple[Tensor, Tensor, Tensor]


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
            query, key, value = _as_kept(query, key, value, module.batch_first)
        self.module, self.query, self.key, self.value = module, query, key, value
        self.first = 0 if module.batch_first or not self.batched else 1  # which dimension is the batch
        self.key_padding_mask = key_padding_mask  # [N, S]
        self.attn_mask = attn_mask  # [L, S] or [N * H, L, S]
        if is_causal and not need_weights and key_padding_mask is None and not self.mask_fits():
            self.attn_mask = None  # torch reads the hint here, and not even the mask's shape
        self.is_causal, self.need_weights, self.average = is_causal, need_weights, average_attn_weights
        self.dropout: float = module.dropout if module.training else 0.0
        self.appended: int | None = None  # keys of the module's own; known once masks have been checked
        self._rules: Rules | None = None

    def mask_fits(self) -> bool:
        """Return True if attn_mask is missing or has the shape of this call."""
        return self.attn_mask is None or tuple(self.attn_mask.shape) == self.mask_shape()

    def mask_shape(self) -> tuple[int, ...]:
        """The shape that attn_mask must have, in as many dimensions as it has."""
        N, L = self.query.shape[self.first], self.query.shape[1 - self.first]
        shape = (N * self.module.num_heads, L, self.key.shape[1 - self.first])
        return shape if self.attn_mask is not None and self.attn_mask.dim() == 3 else shape[1:]

    def heads(self) -> Heads:
        """q [N, H, L, D], k and v [N, H, S + appended, D]."""
        q, k, v = _heads_of(self.module, self.query, self.key, self.value, self.first)
        if self.appended is None:
            self.appended = check_masks(self, q.shape, k.shape)
        if self.appended:
            k, v = _with_more_keys(self.module, k, v)
        return q, k, v

    def rules(self, query_len: int, key_len: int) -> Rules:
        """The masks as rules, once they are checked; `key_len` counts what is appended."""
        if self._rules is None:
            masks, H = (self.key_padding_mask, self.attn_mask), self.module.num_heads
            self._rules = rules_of(*masks, self.is_causal, H, self.appended or 0, query_len, key_len)
        return self._rules

    def finish(self, heads: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(output, weights) as the caller has them, from heads [N, H, L, D] and weights [N, ..]."""
        output: Tensor = self.module.out_proj(joined(heads, self.first))  # called as the module it is
        if self.batched:
            return output, weights
        return output.squeeze(0), None if weights is None else weights.squeeze(0)


def _as_kept(query: Tensor, key: Tensor, value: Tensor, batch_first: bool) -> Heads:
    """The inputs as backward needs them: copies where torch's class projects copies.

    It does where the batch comes first, and where an input is not contiguous. Training code that writes to
    its inputs after the call, such as `x += mha(x, x, x)[0]`, works because of that.
    """

    def kept(x: Tensor) -> Tensor:
        return x.clone() if batch_first or not x.is_contiguous() else x

    first = kept(query)
    second = first if key is query else kept(key)
    return first, second, first if value is query else second if value is key else kept(value)


def _heads_of(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, first: int) -> Heads:
    """q [N, H, L, D], k and v [N, H, S, D] from 3-D inputs."""
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
        q, k, v = _by_head(linear(query, weight, bias), 3 * H, first).chunk(3, 1)
        return q, k, v
    else:
        of_q, of_both = weight.split([E, 2 * E])
        q_bias, both_bias = (None, None) if bias is None else bias.split([E, 2 * E])
        q = linear(query, of_q, q_bias)
        k, v = linear(key, of_both, both_bias).unflatten(-1, (2, E)).unbind(-2)
    return _by_head(q, H, first), _by_head(k, H, first), _by_head(v, H, first)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's, which takes a bias of another dtype only where it does not fuse it.

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


def _by_head(x: Tensor, H: int, first: int) -> Tensor:
    """[N, L, E] or [L, N, E] -> [N, H, L, D]"""
    a, b, E = x.shape
    x = x.view(a, b, H, E // H)
    return x.transpose(1, 2) if first == 0 else x.permute(1, 2, 0, 3)


def _with_more_keys(module: nn.MultiheadAttention, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v followed by the keys a module brings along: bias_k and bias_v, then zeros."""
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


def in_one_step(call: TorchCall, zero: bool) -> tuple[Tensor, Tensor | None] | None:
    """(output, weights) by one step of autograd; None: not a call for this.

    Args:
        zero: a query that sees nothing gets 0; else, as in torch, NaN where weights are wanted.
    """
    x, memory, wants = call.query, call.key, call.need_weights
    if not call.batched or call.dropout or not _will_project(call):
        return None
    module, first = call.module, call.first
    N, L, S = x.shape[first], x.shape[1 - first], memory.shape[1 - first]
    H, D = module.num_heads, module.head_dim
    few = N * H * L * S
    if not _is_worth_it(call, few):
        return None
    call.appended = check_masks(call, (N, H, L, D), (memory.shape[first], H, S, D))
    if call.appended or not x.numel() or not memory.numel() or not is_plain_call(x) or _is_limited(wants):
        return None
    parameters = _parameters_of(call)
    if parameters is None:
        return None
    nothing = torch.nan if wants and not zero else 0.0
    masks = _as_they_are(call)
    if masks is not None and wants and few <= (MANY if x.is_cuda else FEW):
        return _by_matrix(call, parameters, masks, nothing)
    if masks is not None and not wants:
        as_torch = _is_served(call) and not zero and _is_masked(call) and few <= _most_as_torch()
        if as_torch or (few <= FEW and _adds_numbers(call, few)):
            if as_torch or not torch.is_grad_enabled():
                return _by_torchs_kernel(call, parameters, masks, False), None
            return _by_matrix(call, parameters, masks, nothing)
    return _by_kernel(call, parameters, L, S, nothing)


def _parameters_of(call: TorchCall) -> Parameters | None:
    """The parameters of both projections, of the last only where it need not be called; None: not plain.

    Where weights are returned, out_proj stays outside the node. If the loss depends on the weights alone, a
    hook on the output must not run, and out_proj.weight may have been written to.
    """
    module, x = call.module, call.query
    out_proj: Any = module.__dict__["_modules"]["out_proj"]
    joins = not (call.need_weights and torch.is_grad_enabled()) and is_untouched(out_proj, OUT_PROJ)
    out_weight, out_bias = (parameters_of(out_proj, "weight", "bias") if joins else None) or (None, None)
    # in_proj_weight is not always a parameter: it may be pruned, parametrised, a replica's
    parameters = Parameters(module.in_proj_weight, module.in_proj_bias, out_weight, out_bias)
    for held in parameters[:4]:
        if held is not None and (
            type(held) not in PLAIN_TYPES or held.dtype is not x.dtype or held.device != x.device
        ):
            return None
    return parameters


def _by_matrix(
    call: TorchCall, parameters: Parameters, masks: tuple[Tensor, ...], nothing: float
) -> tuple[Tensor, Tensor | None]:
    """By the matrix of weights, with torch's masks as they come."""
    step = step_of(
        call.module.num_heads, call.module.head_dim, call.first, False, nothing, None, call.need_weights
    )
    y, _, weights, _ = run(call.query, _memory_of(call), parameters, masks, step)
    if not call.need_weights:
        return _finished(call, parameters, y), None
    return _finished(call, parameters, y), weights.mean(1) if call.average else weights


def _by_kernel(
    call: TorchCall, parameters: Parameters, L: int, S: int, nothing: float
) -> tuple[Tensor, Tensor | None] | None:
    """By a fused kernel; None: the masks hide more than what is padded or to come, or no kernel fits."""
    rules, memory = call.rules(L, S), _memory_of(call)
    if rules.hidden is not None or rules.bias is not None:
        return None
    square = L == S or not rules.causal
    if _is_served(call) and rules.padding is None and square and not torch.is_grad_enabled():
        return _by_torchs_kernel(call, parameters, (), rules.causal), None
    H, D = call.module.num_heads, call.module.head_dim
    kernel = kernel_for(call.query, memory, H, call.first, rules.causal, rules.padding)
    if kernel is None:
        return None
    step = step_of(H, D, call.first, rules.causal, nothing, kernel)
    y, projected, lse, added = run(call.query, memory, parameters, rules.padding, step)
    weights = weights_of_step(projected, lse, added, step, call.average) if call.need_weights else None
    return _finished(call, parameters, y), weights


def _memory_of(call: TorchCall) -> Tensor | None:
    """What the query attends to; None: itself."""
    return None if call.key is call.query else call.key


def _finished(call: TorchCall, parameters: Parameters, y: Tensor) -> Tensor:
    """The output: out_proj is called where it was not part of the step."""
    output: Tensor = call.module.out_proj(y) if parameters.out_weight is None else y
    return output


def _is_served(call: TorchCall) -> bool:
    """Return True if the device waits for Python, and torch's function would not make the whole matrix."""
    return (
        device_type(call.query) in SERVES and not call.need_weights and call.module.head_dim <= MOST_CHANNELS
    )


def _is_worth_it(call: TorchCall, few: int) -> bool:
    """Whether the steps between the kernels matter; a CPU has better ways to many weights, `answer`."""
    if call.query.is_cuda or not call.need_weights:
        return True
    return few <= (FEW if torch.is_grad_enabled() else FEW_IN_TILES)


def _most_as_torch() -> int:
    """Weights up to which torch's function takes less time than the steps around our kernels."""
    return 2 * MANY if torch.is_grad_enabled() else MANY


def _is_masked(call: TorchCall) -> bool:
    """Whether there is a mask to be taken as it is; a causal hint alone is trusted in its place."""
    if call.key_padding_mask is None:
        return call.attn_mask is not None and not call.is_causal
    return True


def _adds_numbers(call: TorchCall, few: int) -> bool:
    """Whether, of outputs alone, masks are best taken as they are: where they add numbers, or are tiny."""
    if call.is_causal and call.key_padding_mask is None and (call.attn_mask is None or not call.query.is_cpu):
        return False  # the hint decides
    if call.query.is_cpu:
        if torch.is_grad_enabled():
            return few <= TINY
        if few > FEW_TO_READ:
            return False
    for mask in (call.attn_mask, call.key_padding_mask):
        if mask is not None and mask.dtype != torch.bool:
            return True
    return False


def _by_torchs_kernel(
    call: TorchCall, parameters: Parameters, masks: tuple[Tensor, ...], causal: bool
) -> Tensor:
    """The output as torch's class comes to it, whatever its masks hold; gradients are torch's own."""
    step = step_of(call.module.num_heads, call.module.head_dim, call.first, causal, 0.0, None)
    q, k, v = step.heads(parameters.project(call.query, _memory_of(call)))
    added: Tensor | None = None
    if masks and all(mask.dtype == torch.bool for mask in masks):
        added = ~(masks[0] if len(masks) == 1 else masks[0] | masks[1])  # seen, as torch's function has it
    else:
        for mask in masks:
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, -torch.inf)
            added = mask if added is None else added + mask
        added = None if added is None else added.to(q.dtype)
    if added is not None:
        added = added.expand(*added.shape[:-2], q.shape[2], k.shape[2])
    heads = functional.scaled_dot_product_attention(q, k, v, added, is_causal=causal)
    return _finished(call, parameters, parameters.finish(joined(heads, call.first)))


def _as_they_are(call: TorchCall) -> tuple[Tensor, ...] | None:
    """torch's masks like [N, H, L, S]; None: one of them learns."""
    masks = []
    if call.attn_mask is not None:
        flat = call.attn_mask.dim() == 2
        masks.append(call.attn_mask if flat else call.attn_mask.unflatten(0, (-1, call.module.num_heads)))
    if call.key_padding_mask is not None:
        masks.append(call.key_padding_mask[:, None, None])
    for mask in masks:
        if mask.requires_grad:
            return None
    return tuple(masks)


def _will_project(call: TorchCall) -> bool:
    """Whether there are two projections at most and they will go through: masks may be looked at before."""
    weight, E = call.module.in_proj_weight, call.module.embed_dim
    return (
        call.key is call.value
        and call.module._qkv_same_embed_dim
        and weight is not None
        and tuple(weight.shape) == (3 * E, E)
        and _meets(call.query, weight)
        and (call.query is call.key or _meets(call.key, weight))
    )


def _meets(x: Tensor, weight: Tensor) -> bool:
    return x.shape[-1] == weight.shape[1] and x.dtype is weight.dtype and x.device == weight.device


def _is_limited(need_weights: bool) -> bool:
    """Whether somebody has set a limit that weights must be held against."""
    return need_weights and not budget.surely_fits(0)
