"""Attention and its projections as one step of autograd: forward, and a way back written out.

A training step of one layer at the size of GPT-2 small keeps a GPU busy for 0.5 ms, and the twenty nodes
torch records for it keep the CPU that feeds the GPU busy for 1.3. Here is one node, and none of the copies
between the nodes: the gradients of q, k and v are laid side by side once, where the products that follow want
them.

"Projected" is what comes out of the first projections: q, k and v side by side, [.., .., 3 E], where queries
and memory are the same; else q, [.., .., E], and k and v side by side, [.., .., 2 E]. The batch is the first
dimension or the second.

Letters: N batch, L query_len, S key_len, E width, H num_heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..engines import backends, kernels, plain, weights
from ..engines.backend import Call
from ..engines.gpu.cannot import cannot
from ..engines.gradients import Context
from ..engines.kernels import HALF, Kernel, KernelCall, ShapeChurn
from ..engines.scores import Scores
from ..masks import CAUSAL, NOTHING_HIDDEN, Mask
from ..scoring import HIDDEN, Scoring

__all__ = ["Parameters", "Step", "chosen", "joined", "run"]

Projected = tuple[Tensor, ...]

MOST_SHAPES = 1024
SEES_NOTHING = -HIDDEN  # the lse of a query that does: all its weights come out as 0


def joined(heads: Tensor, first: int) -> Tensor:
    """[N, L, E] or [L, N, E] from [N, H, L, D]; `first`: which dimension is the batch."""
    return (heads.transpose(1, 2) if first == 0 else heads.permute(2, 0, 1, 3)).flatten(2)


class Parameters(NamedTuple):
    """Of the projections."""

    in_weight: Tensor  # [3 E, E]
    in_bias: Tensor | None
    out_weight: Tensor | None  # [E, E]; None: there is no second projection
    out_bias: Tensor | None

    def project(self, x: Tensor, memory: Tensor | None) -> Projected:
        """The first projections."""
        if memory is None:
            return (linear(x, self.in_weight, self.in_bias),)
        (q, kv), (q_bias, kv_bias) = self._in_two()
        return linear(x, q, q_bias), linear(memory, kv, kv_bias)

    def _in_two(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor | None, Tensor | None]]:
        E, bias = self.in_weight.shape[1], self.in_bias
        biases = (None, None) if bias is None else (bias[:E], bias[E:])
        return (self.in_weight[:E], self.in_weight[E:]), biases

    def finish(self, joined: Tensor) -> Tensor:
        """The last one, [.., .., E] -> [.., .., E]."""
        return joined if self.out_weight is None else linear(joined, self.out_weight, self.out_bias)


class Step(NamedTuple):
    """A call, beside its tensors."""

    num_heads: int
    first: int  # which dimension of x is the batch, 0 or 1
    causal: bool
    nothing: float  # what a query that sees nothing gets: 0 or NaN
    kernel: Kernel

    def heads(self, projected: Projected) -> tuple[Tensor, Tensor, Tensor]:
        """q [N, H, L, D], k and v [N, H, S, D]."""
        if len(projected) == 1:
            q, k, v = self._split(projected[0], 3)
        else:
            (q,), (k, v) = self._split(projected[0], 1), self._split(projected[1], 2)
        return q, k, v

    def _split(self, x: Tensor, count: int) -> tuple[Tensor, ...]:
        a, b, width = x.shape
        x = x.view(a, b, count, self.num_heads, width // (count * self.num_heads))
        return (x.transpose(1, 3) if self.first == 0 else x.permute(1, 3, 2, 0, 4)).unbind(2)

    def joined(self, heads: Tensor) -> Tensor:
        """[N, L, E] or [L, N, E] from [N, H, L, D]."""
        return joined(heads, self.first)

    def apart(self, joined: Tensor) -> Tensor:
        """And back."""
        (heads,) = self._split(joined, 1)
        return heads

    def side_by_side(self, q: Tensor, k: Tensor, v: Tensor, count: int) -> Projected:
        """Heads as they were projected, in one tensor or in two."""
        parts = [self.joined(heads) for heads in (q, k, v)]
        return (torch.cat(parts, -1),) if count == 1 else (parts[0], torch.cat(parts[1:], -1))

    def call(self, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None) -> KernelCall:
        """What the kernel is given."""
        band = kernels.CAUSAL if self.causal else kernels.FULL
        return q, k, v, added, band, q.shape[-1] ** -0.5

    def scores(self, q: Tensor, k: Tensor, padding: Tensor | None) -> Scores:
        """Of q and k; padding: bool [N, S], True = hidden."""
        return Scores(q, k, _mask(self.causal, padding), Scoring(q.shape[-1] ** -0.5))


def _mask(causal: bool, padding: Tensor | None) -> Mask:
    if padding is None:
        return CAUSAL if causal else NOTHING_HIDDEN
    return Mask(right=0 if causal else None, keys=~padding)


_planned_before: dict[Hashable, tuple[Kernel, ShapeChurn, Hashable]] = {}


def chosen(
    x: Tensor, memory: Tensor | None, num_heads: int, first: int, causal: bool, padding: Tensor | None
) -> Kernel | None:
    """The kernel for heads of x [.., .., E] over those of memory; None where it would need help."""
    keys = x if memory is None else memory
    key = (x.shape, keys.shape, x.dtype, x.device, num_heads, first, causal, padding is not None)
    planned = _planned_before.get(key)
    if planned is not None:
        kernel, churn, shape_key = planned
        if kernel.is_welcome():
            churn.note(shape_key)
            return kernel
    if causal and x.shape != keys.shape:
        return None
    q, k = _looks(x, num_heads, first), _looks(keys, num_heads, first)
    call = Call(Scores(q, k, _mask(causal, padding), Scoring(1.0)), k)
    bare = backends.bare_kernel(call, q, k)
    if bare is None:
        return None
    backends.note(call)
    if bare.churn is not None:  # it stays the best for shapes it has planned for
        if len(_planned_before) >= MOST_SHAPES:
            _planned_before.clear()
        _planned_before[key] = bare, bare.churn, call.shape_key
    return bare


def _looks(x: Tensor, num_heads: int, first: int) -> Tensor:
    """Something of the shape that heads of x have: the table asks for no more."""
    shape = x.shape[first], num_heads, x.shape[1 - first], x.shape[2] // num_heads
    return x.detach().as_strided(shape, (0, 0, 0, 1))


def run(
    x: Tensor,
    memory: Tensor | None,
    parameters: Parameters,
    padding: Tensor | None,
    step: Step,
    wanted: str | None,
) -> tuple[Tensor, Tensor | None]:
    """(what comes out of the last projection, weights).

    Args:
        x: [N, L, E] or [L, N, E]
        memory: what x attends to, [N, S, E] or [S, N, E]; None: itself.
        padding: of memory, bool [N, S], True = hidden.
        wanted: weights of all "heads", their "mean", or None.
    """
    added = None if padding is None else _added(padding, x.dtype)
    given = (x, memory, *parameters)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
        y, lse, *projected = _OneStep.apply(*given, padding, added, step, wanted is not None)
    else:
        projected, joined, lse = _attended(x, memory, parameters, added, step)
        y = parameters.finish(joined)
    if wanted is None:
        return y, None
    return y, _looked_at(tuple(projected), lse, padding, added, step, wanted == "mean")


def _added(padding: Tensor, dtype: torch.dtype) -> Tensor:
    """What hides padding when it is added to scores, [N, 1, 1, S]."""
    return torch.zeros_like(padding, dtype=dtype).masked_fill_(padding, _hiding(dtype))[:, None, None]


def _hiding(dtype: torch.dtype) -> float:
    return max(HIDDEN, torch.finfo(dtype).min)


def _attended(
    x: Tensor, memory: Tensor | None, parameters: Parameters, added: Tensor | None, step: Step
) -> tuple[Projected, Tensor, Tensor]:
    """(projected; heads side by side [.., .., E]; lse [N, H, L])."""
    projected = parameters.project(x, memory)
    q, k, v = step.heads(projected)
    out, lse = step.kernel.forward(step.call(q, k, v, added))
    if added is not None:
        empty = lse < _hiding(x.dtype) / 2  # [N, H, L]
        out = out.masked_fill_(empty[..., None], step.nothing)
        lse = lse.masked_fill_(empty, SEES_NOTHING)
    return projected, step.joined(out), lse


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
        padding: Tensor | None,
        added: Tensor | None,
        step: Step,
        looked_at: bool,
    ) -> tuple[Tensor, ...]:
        parameters = Parameters(in_weight, in_bias, out_weight, out_bias)
        projected, joined, lse = _attended(x, memory, parameters, added, step)
        ctx.save_for_backward(x, memory, *parameters, joined, lse, padding, added, *projected)
        ctx.step = step
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*((lse,) if looked_at else (lse, *projected)))
        return parameters.finish(joined), lse, *projected

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, memory, *four, joined, lse, padding, added = ctx.saved_tensors[:10]
        projected = ctx.saved_tensors[10:]
        step, needed, rest = ctx.step, ctx.needs_input_grad, (None,) * 4
        asked = (grads[0], *grads[2:])  # of the output, of what was projected
        given = [grad for grad in asked if grad is not None]
        if not given:
            return (None,) * 6 + rest
        if any(map(plain.is_needed_for, given)):

            def forward(*inputs: Any) -> list[Tensor]:
                made = _plainly(inputs[0], inputs[1], Parameters(*inputs[2:]), padding, step)
                return [x for x, grad in zip(made, asked, strict=True) if grad is not None]

            return *plain.gradients(forward, (x, memory, *four), needed[:6], given), *rest
        grad, back = asked[0], list(asked[1:])
        d_out_weight = d_out_bias = None
        in_weight, _, out_weight, _ = four
        if grad is not None:
            if out_weight is not None:
                flat = _flat(grad)
                d_out_weight = torch.mm(flat.t(), _flat(joined)) if needed[4] else None
                d_out_bias = flat.sum(0) if needed[5] else None
                grad = torch.mm(flat, out_weight).view(joined.shape)
            if any(needed[:4]):
                q, k, v = step.heads(projected)
                call, out = step.call(q, k, v, added), step.apart(joined)
                three = step.kernel.backward(call, out, lse, step.apart(grad))
                to_projected = step.side_by_side(*three, len(projected))
                back = [a if b is None else a.add_(b) for a, b in zip(to_projected, back, strict=True)]
        parts = [part for part in back if part is not None]
        inputs: tuple[Tensor | None, ...] = (None,) * 4
        if any(needed[:4]) and len(parts) == len(back):
            inputs = _to_inputs(parts, x, memory, in_weight, needed)
        return *inputs, d_out_weight, d_out_bias, *rest


def _to_inputs(
    parts: list[Tensor], x: Tensor, memory: Tensor | None, weight: Tensor, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients of x, memory, the first projections' weight and their bias, from those of what they made."""
    E, sources = weight.shape[1], (x,) if memory is None else (x, memory)
    weights = (weight,) if memory is None else (weight[:E], weight[E:])
    flats = [_flat(part) for part in parts]
    d_sources: list[Tensor | None] = [
        torch.mm(flat, weight).view(source.shape) if wanted else None
        for flat, weight, source, wanted in zip(flats, weights, sources, needed[:2], strict=False)
    ]
    d_weight = d_bias = None
    if needed[2]:
        blocks = [torch.mm(flat.t(), _flat(source)) for flat, source in zip(flats, sources, strict=True)]
        d_weight = blocks[0] if memory is None else torch.cat(blocks)
    if needed[3]:
        sums = [flat.sum(0) for flat in flats]
        d_bias = sums[0] if memory is None else torch.cat(sums)
    return *d_sources, *(None,) * (2 - len(d_sources)), d_weight, d_bias


def _flat(x: Tensor) -> Tensor:
    """[N * L, E]"""
    return x.reshape(-1, x.shape[-1])


def _plainly(
    x: Tensor, memory: Tensor | None, parameters: Parameters, padding: Tensor | None, step: Step
) -> tuple[Tensor, ...]:
    """The same in operations that can be differentiated again: (output, *projected)."""
    projected = parameters.project(x, memory)
    q, k, v = step.heads(projected)
    out, lse = plain.forward(step.scores(q, k, padding), v)
    if step.nothing != 0:
        out = out.masked_fill(torch.isneginf(lse)[..., None], step.nothing)
    return parameters.finish(step.joined(out)), *projected


def _looked_at(
    projected: Projected,
    lse: Tensor,
    padding: Tensor | None,
    added: Tensor | None,
    step: Step,
    average: bool,
) -> Tensor:
    """The weights, [N, H, L, S] or [N, L, S]."""
    q, k, _ = step.heads(tuple(x.detach() for x in projected))
    if q.dtype not in HALF or cannot(step.scores(q, k, padding)) is not None:
        q, k, _ = step.heads(projected)
        shown = weights.weights(step.scores(q, k, padding), lse, mean=average)
    elif torch.is_grad_enabled() and any(x.requires_grad for x in projected):
        shown = _Weights.apply(lse, padding, added, step, average, *projected)
    else:
        shown = _in_kernels(projected, lse, added, step, average)
    if padding is None or step.nothing == 0:
        return shown
    empty = lse > SEES_NOTHING / 2  # [N, H, L]
    return shown.masked_fill((empty[:, 0] if average else empty)[..., None], step.nothing)


def _in_kernels(projected: Projected, lse: Tensor, added: Tensor | None, step: Step, average: bool) -> Tensor:
    from ..engines.gpu.dense import plainest

    q, k, _ = step.heads(projected)
    return plainest(q, k, lse.contiguous(), added, step.causal, q.shape[-1] ** -0.5, average)


class _Weights(torch.autograd.Function):
    """`_in_kernels` with a way back, for those few who use it."""

    @staticmethod
    def forward(
        ctx: Context,
        lse: Tensor,
        padding: Tensor | None,
        added: Tensor | None,
        step: Step,
        average: bool,
        *projected: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(lse, padding, *projected)
        ctx.step, ctx.average = step, average
        return _in_kernels(projected, lse, added, step, average)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (lse, padding, *kept) = grads, ctx.saved_tensors
        step, average, projected = ctx.step, ctx.average, tuple(kept)
        if plain.is_needed_for(grad):

            def forward(*projected: Tensor) -> Tensor:
                q, k, _ = step.heads(projected)
                whole, _ = plain.weights_of(step.scores(q, k, padding))
                return (whole.mean(1) if average else whole).to(q.dtype)

            needed = (True,) * len(projected)
            return *(None,) * 5, *plain.gradients(forward, projected, needed, grad)
        q, k, v = step.heads(projected)
        dq, dk, *_ = weights.gradients(step.scores(q, k, padding), lse, None, average, grad, bias=False)
        assert dq is not None and dk is not None
        parts = dq.to(v.dtype), dk.to(v.dtype), torch.zeros_like(v)
        return *(None,) * 5, *step.side_by_side(*parts, len(projected))
