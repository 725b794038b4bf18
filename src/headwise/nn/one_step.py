"""Attention and its projections as one step of autograd: forward, and a backward pass written out.

A training step of one layer at the size of GPT-2 small keeps a GPU busy for 0.5 ms, and the eighteen nodes
torch records for it keep the CPU that feeds the GPU busy for 1.3. Here is one node (none without
gradients), and none of the copies between the nodes: the gradients of q, k and v are laid side by side
once, where the products that follow want them. Torch's class and `MultiHeadAttention` both go this way,
with gradients and without, where no shorter way takes the call (on a GPU without gradients).

In between is a fused kernel; or, where weights are wanted and few, their matrix itself, since the steps
around a second pass would take longer than the pass: two products and a softmax, as torch's class does it,
with its masks as they come.

"Projected" is what comes out of the first projections: q, k and v side by side, [.., .., (H + 2 Hk) D], where
queries and memory are the same; else q, [.., .., H D], and k and v side by side, [.., .., 2 Hk D]. The batch
is the first dimension or the second. It is an output of the step, so that weights computed later, and
derivatives of derivatives, have gradients.

Letters: N batch, L query_len, S key_len, E width, H num_heads, Hk num_kv_heads, D head_dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..engines import backends, kernels, plain, weights
from ..engines.backend import Call
from ..engines.gradients import Context
from ..engines.kernels import HALF, Kernel, KernelCall, Three
from ..engines.plain import TILES
from ..engines.plans import PLANS
from ..engines.scores import HAS_MKL, Scores, turned
from ..engines.walk import REACH
from ..masks import CAUSAL, NOTHING_HIDDEN, Mask
from ..scoring import HIDDEN, Scoring

Projected = tuple[Tensor, ...]
Masks = tuple[Tensor, ...]  # in torch's form: bool, True = hidden, or numbers to add; like [N, H, L, S]

aten = torch.ops.aten
LSE_OF_EMPTY_ROW = -HIDDEN  # lse of a query that sees no key, so that exp(score - lse) is 0


def joined(heads: Tensor, batch_dim: int) -> Tensor:
    """Return [N, L, E] or [L, N, E] from [N, H, L, D]."""
    return (heads.transpose(1, 2) if batch_dim == 0 else heads.permute(2, 0, 1, 3)).flatten(2)


def by_head(x: Tensor, head_dim: int, batch_dim: int) -> Tensor:
    """Return [N, .., L, D] from [N, L, .. D] or [L, N, .. D]."""
    a, b, width = x.shape
    x = x.view(a, b, width // head_dim, head_dim)
    return x.transpose(1, 2) if batch_dim == 0 else x.permute(1, 2, 0, 3)


def _bias_added(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None or not x.is_cpu:
        return functional.linear(x, weight, bias)
    return functional.linear(x, weight).add_(bias)


# On a CPU without MKL a product that begins at the bias is slower than adding it afterwards, and off by two
# to three times as much.
linear = functional.linear if HAS_MKL else _bias_added


class Parameters(NamedTuple):
    """The weights and biases of the projections."""

    in_weight: Tensor  # [(H + 2 Hk) D, E]
    in_bias: Tensor | None
    out_weight: Tensor | None  # [E, H D]; None: there is no second projection
    out_bias: Tensor | None
    parts: tuple[Tensor, ...] = ()  # weights, then biases, stored in in_weight and in_bias

    def project(self, x: Tensor, memory: Tensor | None) -> Projected:
        """Apply the first projections."""
        if memory is None:
            return (linear(x, self.in_weight, self.in_bias),)
        (q, kv), (q_bias, kv_bias) = self._in_two()
        return linear(x, q, q_bias), linear(memory, kv, kv_bias)

    def _in_two(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor | None, Tensor | None]]:
        E, bias = self.in_weight.shape[1], self.in_bias
        biases = (None, None) if bias is None else (bias[:E], bias[E:])
        return (self.in_weight[:E], self.in_weight[E:]), biases

    def finish(self, joined: Tensor) -> Tensor:
        """Apply the last projection, [.., .., H D] -> [.., .., E]."""
        return joined if self.out_weight is None else linear(joined, self.out_weight, self.out_bias)


class CustomKernel(ABC):
    """Attention in place of a `Kernel` where one kernel call is not enough, as for ragged batches."""

    @abstractmethod
    def forward(self, call: KernelCall) -> kernels.Output:
        """Return (output [N, H, L, D], lse [N, H, L])."""

    @abstractmethod
    def backward(self, call: KernelCall, out: Tensor, lse: Tensor, grad: Tensor) -> Three:
        """Return the gradients of q, k and v."""

    @abstractmethod
    def rules(self, causal: bool, shape: Sequence[int]) -> Mask:
        """Return the mask, for q of this shape over as many keys."""


class Step(NamedTuple):
    """The settings of one call, without its tensors."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    batch_dim: int  # which dimension of x is the batch, 0 or 1
    causal: bool
    empty_row_value: float  # the output of a query that sees nothing: 0 or NaN
    kernel: Kernel | CustomKernel | None  # None: by the matrix of weights
    scale: float
    returns_weights: bool = True  # by the matrix: the caller gets the weights, not the output alone

    def heads(self, projected: Projected) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [N, H, L, D], k and v [N, Hk, S, D]."""
        H, Hk = self.num_heads, self.num_kv_heads
        if len(projected) == 1:
            q, k, v = self.by_head(projected[0]).split_with_sizes((H, Hk, Hk), 1)
        else:
            q, (k, v) = self.by_head(projected[0]), self.by_head(projected[1]).split_with_sizes((Hk, Hk), 1)
        return q, k, v

    def by_head(self, x: Tensor) -> Tensor:
        """Return [N, .., L, D] from [N, L, .. D] or [L, N, .. D]."""
        return by_head(x, self.head_dim, self.batch_dim)

    def side_by_side(self, q: Tensor, k: Tensor, v: Tensor, count: int) -> Projected:
        """Return heads side by side as they were projected, in one tensor (`count` 1) or in two."""
        if self.batch_dim == 0:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [N, L, H, D]
        else:
            q, k, v = q.permute(2, 0, 1, 3), k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)  # [L, N, H, D]
        if count == 1:
            return (torch.cat((q, k, v), 2).flatten(2),)
        return q.flatten(2), torch.cat((k, v), 2).flatten(2)

    def call(self, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None) -> KernelCall:
        """Return the arguments of the kernel."""
        return q, k, v, added, kernels.CAUSAL if self.causal else kernels.FULL, self.scale

    def scores(self, q: Tensor, k: Tensor, added: Tensor | None) -> Scores:
        """Return the scores of q and k; added: the additive padding mask, [N, 1, 1, S]."""
        if isinstance(self.kernel, CustomKernel):
            return Scores(q, k, self.kernel.rules(self.causal, q.shape), Scoring(self.scale))
        keys = None if added is None else added[:, 0, 0] == 0
        return Scores(q, k, _mask(self.causal, keys), Scoring(self.scale))


def _mask(causal: bool, keys: Tensor | None) -> Mask:
    if keys is None:
        return CAUSAL if causal else NOTHING_HIDDEN
    return Mask(right=0 if causal else None, keys=keys)


def kernel_for(
    x: Tensor,
    memory: Tensor | None,
    num_heads: int,
    batch_dim: int,
    causal: bool,
    padding: Tensor | None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
) -> Kernel | None:
    """Select the fused kernel for one step, over heads of x [.., .., E] and of memory.

    None: no kernel takes these heads as they are projected, nothing padded or repeated.
    """
    keys = x if memory is None else memory
    Hk, D = num_kv_heads or num_heads, head_dim or x.shape[2] // num_heads
    padded, table = padding is not None, backends.BACKENDS
    key = (
        "one step", x.shape, keys.shape, x.dtype, x.device, num_heads, Hk, D, batch_dim, causal, padded,
        table,
    )  # fmt: skip
    plan: tuple[Kernel, Hashable] | None = PLANS.get(key)
    if plan is not None and plan[0].is_welcome():
        kernel, shape_key = plan
        if kernel.churn is not None:
            kernel.churn.note(shape_key)
        return kernel
    if causal and x.shape != keys.shape:
        return None
    q, k = _empty_heads(x, num_heads, D, batch_dim), _empty_heads(keys, Hk, D, batch_dim)
    call = Call(Scores(q, k, _mask(causal, None if padding is None else ~padding), Scoring(1.0)), k)
    bare, holds = backends.bare_kernel(call, q, k)
    if bare is None:
        return None
    backends.note(call)
    # Stored for cuDNN, which stays the best for shapes it has planned for, and where cuDNN is no option: on a
    # CPU, and for float32 and float64 on a GPU.
    if plan is None and holds and (bare.churn is not None or not x.is_cuda or x.dtype not in HALF):
        PLANS.keep(key, (bare, call.shape_key))
    return bare


def _empty_heads(x: Tensor, num_heads: int, head_dim: int, batch_dim: int) -> Tensor:
    """Return an empty tensor of the shape that heads of x have, which is all the table of backends reads."""
    return x.new_empty(head_dim).expand(x.shape[batch_dim], num_heads, x.shape[1 - batch_dim], head_dim)


def run(
    x: Tensor,
    memory: Tensor | None,
    parameters: Parameters,
    hidden: Tensor | Masks | None,
    step: Step,
) -> tuple[Tensor, Projected, Tensor, Tensor | None]:
    """Return (output, projected, lse, additive padding mask).

    By the matrix, weights [N, H, L, S] are in the place of lse.

    Args:
        x: [N, L, E] or [L, N, E]
        memory: what x attends to, [N, S, E] or [S, N, E]; None: itself.
        hidden: padding of memory, bool [N, S], True = hidden; for the matrix, masks.
    """
    added: Any = hidden
    if isinstance(hidden, Tensor):
        assert isinstance(step.kernel, Kernel)
        added = _added(hidden, step.kernel.added_dtype(x.dtype))
    inputs = (x, memory, *parameters[:4], *parameters.parts)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs):
        y, state, *projected = _OneStep.apply(x, memory, *parameters[:4], (added, step), *parameters.parts)
    else:
        projected, heads, state = _attended(x, memory, parameters, added, step)
        y = parameters.finish(heads)
    if step.kernel is None:
        # A view outside the node: hooks on the weights run only where the loss depends on them.
        state = state.view(-1, step.num_heads, *state.shape[1:])
    return y, tuple(projected), state, added


def _added(padding: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive mask of padding, [N, 1, 1, S]."""
    return torch.zeros_like(padding, dtype=dtype).masked_fill_(padding, _hiding(dtype))[:, None, None]


def _hiding(dtype: torch.dtype) -> float:
    return max(HIDDEN, torch.finfo(dtype).min)


def _attended(
    x: Tensor, memory: Tensor | None, parameters: Parameters, added: Any, step: Step
) -> tuple[Projected, Tensor, Tensor]:
    """Return (projected; heads side by side [.., .., H D]; lse [N, H, L], or weights [N * H, L, S])."""
    projected = parameters.project(x, memory)
    q, k, v = step.heads(projected)
    if step.kernel is None:
        out, p = _by_matrix(q, k, v, added, step)
        return projected, joined(out, step.batch_dim), p
    out, lse = step.kernel.forward(step.call(q, k, v, added))
    # if the first key is real everywhere, every query sees a key and no row is empty
    if added is not None and not (added.is_cpu and bool((added[:, :, :, 0] == 0).all())):
        empty = lse < _hiding(added.dtype) / 2  # [N, H, L]
        out = out.masked_fill_(empty[..., None], step.empty_row_value)
        lse = lse.masked_fill_(empty, LSE_OF_EMPTY_ROW)
    return projected, joined(out, step.batch_dim), lse


def _by_matrix(q: Tensor, k: Tensor, v: Tensor, masks: Masks, step: Step) -> tuple[Tensor, Tensor]:
    """Return (heads [N, H, L, D], weights [N * H, L, S])."""
    N, H, L, D = q.shape
    S, dtype = k.shape[2], q.dtype
    if not step.returns_weights and dtype in HALF:  # float32 inside, as in a fused kernel
        q, k, v = q.float(), k.float(), v.float()
    # on a GPU an additive mask is part of the product, which saves a launch; on a CPU that is slower
    adds = len(masks) > 0 and q.is_cuda and masks[0].dtype is q.dtype and masks[0].ndim == 2
    begun, rest = (masks[0], masks[1:]) if adds else (q.new_empty(1), masks)
    keys = turned(k.reshape(N * H, S, D), L)
    s = torch.baddbmm(begun, q.reshape(N * H, L, D), keys, beta=1 if adds else 0, alpha=step.scale)
    for mask in rest:
        by_head = s.view(N, H, L, S)
        if mask.dtype == torch.bool:
            by_head.masked_fill_(mask, -torch.inf)
        else:
            by_head.add_(mask)
    p = torch.softmax(s, -1)
    if masks and step.empty_row_value == 0:
        p = p.masked_fill_(s.amax(-1, keepdim=True) == -torch.inf, 0.0)
    return torch.bmm(p, v.reshape(N * H, S, D)).view(N, H, L, D).to(dtype), p


class _OneStep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        memory: Tensor | None,
        in_weight: Tensor,
        in_bias: Tensor | None,
        out_weight: Tensor | None,
        out_bias: Tensor | None,
        call: tuple[Any, Step],
        *parts: Tensor,
    ) -> tuple[Tensor, ...]:
        added, step = call
        parameters = Parameters(in_weight, in_bias, out_weight, out_bias, parts)
        projected, heads, state = _attended(x, memory, parameters, added, step)
        if step.kernel is None:
            added = None  # the saved weights already reflect all masks
        needs = _Needs.of(ctx.needs_input_grad, len(parts), in_bias is not None)
        # Only tensors that a gradient needs are saved; all others may be written to. Of a block, whose
        # versions are not counted, the weights that lie in it are saved.
        sources = (x, memory) if needs.weight else (None, None)
        watched = (parts[: needs.weights] or (in_weight,)) if needs.x or needs.memory else ()
        inner: tuple[Tensor | None, ...] = (None,) * (3 + len(projected))
        if needs.heads:
            inner = (out_weight, state, added, *projected)
        ctx.save_for_backward(*sources, heads, *inner, *watched)
        ctx.step, ctx.needs, ctx.finishes = step, needs, out_weight is not None
        ctx.block = in_weight if parts else None
        ctx.sizes = [part.shape[0] for part in parts]
        ctx.shapes = (x.shape,) if memory is None else (x.shape, memory.shape)
        ctx.set_materialize_grads(False)
        if not needs.heads:
            ctx.mark_non_differentiable(state, *projected)
        elif step.kernel is not None or not step.returns_weights:
            ctx.mark_non_differentiable(state)
        y = parameters.finish(heads)
        if y is not heads:
            # Without a bias the product is a view, and callers could not write to an output that is a view.
            y = aten._unsafe_view.default(y, y.shape)
        return y, state, *projected

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        step, needs, shapes = ctx.step, ctx.needs, ctx.shapes
        x, memory, heads, out_weight, state, added, *rest = ctx.saved_tensors
        projected, watched = tuple(rest[: len(shapes)]), rest[len(shapes) :]
        grad, d_shown, *back = grads  # of the output, the weights, the projected tensors
        again = False
        for gradient in grads:
            again = again or (gradient is not None and plain.needs_differentiable_backward(gradient))
        if grad is not None and again and needs.heads:
            heads, _ = _plainly(step, added, projected, state)
        d_out_weight = d_out_bias = None
        if grad is not None and ctx.finishes:
            flat = grad.reshape(-1, grad.shape[-1])  # batched gradients do not support flatten
            d_out_weight = torch.mm(flat.t(), heads.flatten(0, 1)) if needs.out_weight else None
            d_out_bias = flat.sum(0) if needs.out_bias else None
            grad = torch.mm(flat, out_weight).view(heads.shape) if needs.heads else None
        of_inputs: tuple[Tensor | None, ...] = (None,) * 4
        if needs.heads:
            if grad is not None or d_shown is not None:
                gradients = _backward(step, added, projected, heads, state, grad, d_shown, again)
                back = [
                    m if b is None else b if m is None else m + b
                    for m, b in zip(gradients, back, strict=True)
                ]
            parts = [torch.zeros_like(p) if b is None else b for p, b in zip(projected, back, strict=True)]
            weight = ctx.block
            if watched and (weight is None or again):
                weight = watched[0] if weight is None else torch.cat(watched)
            of_inputs = _to_inputs(parts, x, memory, weight, shapes, needs)
        if ctx.block is None:
            return *of_inputs, d_out_weight, d_out_bias, None
        cut: list[Tensor | None] = []
        n, sizes = needs.weights, ctx.sizes
        for block, cuts in ((of_inputs[2], sizes[:n]), (of_inputs[3], sizes[n:])):
            cut += [None] * len(cuts) if block is None else block.split_with_sizes(cuts)
        return *of_inputs[:2], None, None, d_out_weight, d_out_bias, None, *cut


class _Needs(NamedTuple):
    """Which gradients are required."""

    x: bool
    memory: bool
    weight: bool  # any weight of the first projections
    bias: bool
    out_weight: bool
    out_bias: bool
    heads: bool  # of x, memory, weight or bias
    weights: int  # how many parts of a block are weights; the others are biases

    @classmethod
    def of(cls, needed: tuple[bool, ...], parts: int, biased: bool) -> _Needs:
        x, memory, weight, bias, out_weight, out_bias = needed[:6]
        weights = parts // 2 if biased else parts
        weight = weight or True in needed[7 : 7 + weights]
        bias = bias or True in needed[7 + weights :]
        return cls(x, memory, weight, bias, out_weight, out_bias, x or memory or weight or bias, weights)


def _to_inputs(
    parts: Sequence[Tensor],
    x: Tensor,
    memory: Tensor,
    weight: Tensor,
    shapes: Sequence[torch.Size],
    needs: _Needs,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, memory and the first projections' weight and bias, from their outputs'."""
    sources: list[Tensor | None] = [None, None]
    weights: list[Tensor] = []
    biases: list[Tensor] = []
    start = 0
    for i, part in enumerate(parts):
        flat = part.reshape(-1, part.shape[-1])  # [N * L, ..]
        stop = start + flat.shape[1]
        if needs.memory if i else needs.x:
            sources[i] = torch.mm(flat, weight[start:stop]).view(shapes[i])
        if needs.weight:
            weights.append(torch.mm(flat.t(), (memory if i else x).flatten(0, 1)))
        if needs.bias:
            biases.append(flat.sum(0))
        start = stop
    if len(parts) == 1:
        return *sources, weights[0] if weights else None, biases[0] if biases else None
    return *sources, torch.cat(weights) if weights else None, torch.cat(biases) if biases else None


def _backward(
    step: Step,
    added: Tensor | None,
    projected: Projected,
    heads: Tensor,
    state: Tensor,
    grad: Tensor | None,
    d_shown: Tensor | None,
    again: bool,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the projected tensors, from those of heads side by side and of weights."""
    if again:
        return _plain_backward(step, added, projected, state, grad, d_shown)
    q, k, v = step.heads(projected)
    d_out = None if grad is None else step.by_head(grad)
    if step.kernel is None:
        three = _matrix_backward(q, k, v, state, d_out, d_shown, step)
        return step.side_by_side(*three, len(projected))
    out, lse = step.by_head(heads), state
    assert d_out is not None
    if lse.is_cpu and _is_rough(lse):
        lse = lse.masked_fill(lse > LSE_OF_EMPTY_ROW / 2, -torch.inf)
        back, dv, _ = TILES.backward(Call(step.scores(q, k, added), v), out, lse, d_out)
        three = back.q.to(v.dtype), back.k.to(v.dtype), dv.to(v.dtype)
    else:
        three = step.kernel.backward(step.call(q, k, v, added), out, lse, d_out)
    return step.side_by_side(*three, len(projected))


def _is_rough(lse: Tensor) -> bool:
    """Return True if a fused kernel's backward would be too inexact for some query."""
    if lse.dtype == torch.float64 or float(lse.abs().max()) <= REACH:
        return False
    return float(lse.masked_fill(lse > LSE_OF_EMPTY_ROW / 2, 0).abs().max()) > REACH


def _matrix_backward(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor, d_out: Tensor | None, d_shown: Tensor | None, step: Step
) -> Three:
    """Return the gradients of heads, from weights [N * H, L, S] and the gradients of outputs and weights."""
    (N, H, L, D), S, dtype = q.shape, k.shape[2], q.dtype
    if p.dtype != dtype:
        q, k, v = q.to(p.dtype), k.to(p.dtype), v.to(p.dtype)
    if d_out is None:
        dv, dp = torch.zeros_like(v), torch.zeros_like(p)
    else:
        flat = d_out.to(p.dtype).reshape(N * H, L, D)
        dv = torch.bmm(p.transpose(1, 2), flat).view(N, H, S, D)
        dp = torch.bmm(flat, turned(v.reshape(N * H, S, D), L))
    if d_shown is not None:
        dp.add_(d_shown)
    ds = aten._softmax_backward_data.default(dp, p, -1, p.dtype)
    nothing = q.new_empty(1)
    dq = torch.baddbmm(nothing, ds, k.reshape(N * H, S, D), beta=0, alpha=step.scale)
    dk = torch.baddbmm(nothing, ds.transpose(1, 2), q.reshape(N * H, L, D), beta=0, alpha=step.scale)
    return dq.view(N, H, L, D).to(dtype), dk.view(N, H, S, D).to(dtype), dv.to(dtype)


def _plainly(
    step: Step, added: Tensor | None, projected: Projected, state: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return (heads side by side, weights if computed as a matrix) in differentiable operations."""
    q, k, v = step.heads(projected)
    if step.kernel is None:
        near_q, near_k, near_v = q.to(state.dtype), k.to(state.dtype), v.to(state.dtype)
        scores = (near_q @ near_k.transpose(-2, -1)) * step.scale
        before = state.detach().view(scores.shape)  # includes every mask, so none of them has to be saved
        # finite in empty rows, so that no gradient is NaN
        empty = (before == 0).all(-1, keepdim=True) & (step.empty_row_value == 0)
        before = before.masked_fill(empty, 1.0).log()
        p = torch.softmax(before + (scores - scores.detach()), -1).masked_fill(empty, 0.0)
        return joined((p @ near_v).to(v.dtype), step.batch_dim), p.flatten(0, 1)
    out, lse = plain.forward(step.scores(q, k, added), v)
    if step.empty_row_value != 0:
        out = out.masked_fill(torch.isneginf(lse)[..., None], step.empty_row_value)
    return joined(out, step.batch_dim), None


def _plain_backward(
    step: Step,
    added: Tensor | None,
    projected: Projected,
    state: Tensor,
    grad: Tensor | None,
    d_shown: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Compute `_backward` in operations that can be differentiated again."""
    output_grads = (grad, d_shown)

    def forward(*projected: Tensor) -> list[Tensor]:
        outputs = _plainly(step, added, projected, state)
        return [
            x for x, wanted in zip(outputs, output_grads, strict=True) if x is not None and wanted is not None
        ]

    grads = [x for x in output_grads if x is not None]
    return plain.gradients(forward, projected, (True,) * len(projected), grads)


def weights_of_step(
    projected: Projected, lse: Tensor, added: Tensor | None, step: Step, average: bool
) -> Tensor:
    """Return the weights of a step, [N, H, L, S] or, averaged, [N, L, S]."""
    q, k, _ = step.heads(projected)
    row_lse = lse if added is None else lse.masked_fill(lse > LSE_OF_EMPTY_ROW / 2, -torch.inf)
    shown = weights.weights(step.scores(q, k, added), row_lse, mean=average)
    if added is None or step.empty_row_value == 0:
        return shown
    empty = lse > LSE_OF_EMPTY_ROW / 2  # [N, H, L]
    return shown.masked_fill((empty[:, 0] if average else empty)[..., None], step.empty_row_value)
