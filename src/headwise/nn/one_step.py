"""Self-attention and its projections as one step of autograd.

A training step of one layer at the size of GPT-2 small keeps a GPU busy for 0.5 ms, and the twenty nodes
torch records for it keep the CPU that feeds the GPU busy for 1.3. Here is one node, with a way back written
out, and none of the copies between the nodes: the gradients of q, k and v are laid side by side once, where
the products that follow want them.

Letters: N batch, L length, E width, H num_heads, D head_dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..engines import kernels, plain, table, weights
from ..engines.gpu.cannot import cannot
from ..engines.kernels import HALF, Kernel
from ..engines.scores import Scores
from ..masks import CAUSAL, NOTHING_HIDDEN, Mask
from ..scoring import HIDDEN, Scoring

__all__ = ["Parameters", "Step", "chosen", "run"]

MOST_SHAPES = 1024
SEES_NOTHING = -HIDDEN  # the lse of a query that does: all its weights come out as 0


class Parameters(NamedTuple):
    """Of the two projections."""

    in_weight: Tensor  # [3 E, E]
    in_bias: Tensor | None
    out_weight: Tensor | None  # [E, E]; None: there is no second projection
    out_bias: Tensor | None

    def first(self, x: Tensor) -> Tensor:
        """[.., .., E] -> [.., .., 3 E]"""
        return linear(x, self.in_weight, self.in_bias)

    def second(self, joined: Tensor) -> Tensor:
        """[.., .., E] -> [.., .., E]"""
        return joined if self.out_weight is None else linear(joined, self.out_weight, self.out_bias)


class Step(NamedTuple):
    """A call, beside its tensors."""

    num_heads: int
    first: int  # which dimension of x is the batch, 0 or 1
    causal: bool
    nothing: float  # what a query that sees nothing gets: 0 or NaN
    kernel: Kernel

    def heads(self, joint: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v, each [N, H, L, D], from [.., .., 3 E]."""
        a, b, width = joint.shape
        x = joint.view(a, b, 3, self.num_heads, width // (3 * self.num_heads))
        q, k, v = (x.transpose(1, 3) if self.first == 0 else x.permute(1, 3, 2, 0, 4)).unbind(2)
        return q, k, v

    def joined(self, heads: Tensor) -> Tensor:
        """[N, L, E] or [L, N, E] from [N, H, L, D]."""
        return (heads.transpose(1, 2) if self.first == 0 else heads.permute(2, 0, 1, 3)).flatten(2)

    def apart(self, joined: Tensor) -> Tensor:
        """And back."""
        a, b, width = joined.shape
        x = joined.view(a, b, self.num_heads, width // self.num_heads)
        return x.transpose(1, 2) if self.first == 0 else x.permute(1, 2, 0, 3)

    def scores(self, q: Tensor, k: Tensor, padding: Tensor | None) -> Scores:
        """Of q and k; padding: bool [N, L], True = hidden."""
        return Scores(q, k, _mask(self.causal, padding), Scoring(q.shape[-1] ** -0.5))


def _mask(causal: bool, padding: Tensor | None) -> Mask:
    if padding is None:
        return CAUSAL if causal else NOTHING_HIDDEN
    return Mask(right=0 if causal else None, keys=~padding)


_chosen_before: dict[Any, Any] = {}


def chosen(x: Tensor, num_heads: int, first: int, causal: bool, padding: Tensor | None) -> Kernel | None:
    """The kernel for heads of x [.., .., E]; None where it would need help."""
    key = (x.shape, x.dtype, x.device, num_heads, first, causal, padding is not None)
    shape_key = _chosen_before.get(key)
    if shape_key is not None and table.takes_cudnn():
        table.cudnn_churn.note(shape_key)
        return kernels.CUDNN
    N, L = x.shape[first], x.shape[1 - first]
    q = x.detach().as_strided(
        (N, num_heads, L, x.shape[2] // num_heads), (0, 0, 0, 1)
    )  # the table asks for its looks
    call = table.Call(Scores(q, q, _mask(causal, padding), Scoring(1.0)), q)
    backend = table.choose(call)
    if not backend.kernels:
        return None
    kernel = backend.kernel_for(x.device)
    if not kernel.takes_as_is(q, q):
        return None
    if x.is_cuda:
        table.cudnn_churn.note(call.shape_key)
    if kernel is kernels.CUDNN:  # it stays the best for shapes it has planned for
        if len(_chosen_before) >= MOST_SHAPES:
            _chosen_before.clear()
        _chosen_before[key] = call.shape_key
    return kernel


def run(
    x: Tensor, parameters: Parameters, padding: Tensor | None, step: Step, wanted: str | None
) -> tuple[Tensor, Tensor | None]:
    """(what comes out of the last projection, weights).

    Args:
        x: [N, L, E] or [L, N, E]
        padding: bool [N, L], True = hidden.
        wanted: weights of all "heads", their "mean", or None.
    """
    added = None if padding is None else _added(padding, x.dtype)
    given = (x, *parameters)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
        y, joint, lse = _OneStep.apply(*given, padding, added, step, wanted is not None)
    else:
        joint, joined, lse = _attended(x, parameters, added, step)
        y = parameters.second(joined)
    if wanted is None:
        return y, None
    return y, _looked_at(joint, lse, padding, added, step, wanted == "mean")


def _added(padding: Tensor, dtype: torch.dtype) -> Tensor:
    """What hides padding when it is added to scores, [N, 1, 1, L]."""
    return torch.zeros_like(padding, dtype=dtype).masked_fill_(padding, _hiding(dtype))[:, None, None]


def _hiding(dtype: torch.dtype) -> float:
    return max(HIDDEN, torch.finfo(dtype).min)


def _attended(
    x: Tensor, parameters: Parameters, added: Tensor | None, step: Step
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k and v side by side [.., .., 3 E]; heads side by side [.., .., E]; lse [N, H, L])."""
    joint = parameters.first(x)
    q, k, v = step.heads(joint)
    out, lse = step.kernel.forward(q, k, v, added, _band(step), q.shape[-1] ** -0.5)
    if added is not None:
        empty = lse < _hiding(x.dtype) / 2  # [N, H, L]
        out = out.masked_fill_(empty[..., None], step.nothing)
        lse = lse.masked_fill_(empty, SEES_NOTHING)
    return joint, step.joined(out), lse


def _band(step: Step) -> kernels.Band:
    return kernels.CAUSAL if step.causal else kernels.FULL


class _OneStep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        in_weight: Tensor,
        in_bias: Tensor | None,
        out_weight: Tensor | None,
        out_bias: Tensor | None,
        padding: Tensor | None,
        added: Tensor | None,
        step: Step,
        looked_at: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        parameters = Parameters(in_weight, in_bias, out_weight, out_bias)
        joint, joined, lse = _attended(x, parameters, added, step)
        y = parameters.second(joined)
        ctx.save_for_backward(x, *parameters, joint, joined, lse, padding, added)
        ctx.step = step
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*((lse,) if looked_at else (lse, joint)))
        return y, joint, lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, *parameters, joint, joined, lse, padding, added = ctx.saved_tensors
        step, needed, rest = ctx.step, ctx.needs_input_grad, (None,) * 4
        given = [grad for grad in grads[:2] if grad is not None]
        if not given:
            return (None,) * 5 + rest
        if any(map(plain.is_needed_for, given)):

            def forward(*inputs: Any) -> Any:
                found = _plainly(inputs[0], Parameters(*inputs[1:]), padding, step)
                return [one for one, grad in zip(found, grads[:2], strict=True) if grad is not None]

            return *plain.gradients(forward, (x, *parameters), needed[:5], given), *rest
        grad, d_joint = grads[:2]
        d_out_weight = d_out_bias = None
        in_weight, _, out_weight, _ = parameters
        if grad is not None:
            if out_weight is not None:
                flat = grad.reshape(-1, grad.shape[-1])  # [N * L, E]
                d_out_weight = torch.mm(flat.t(), joined.flatten(0, 1)) if needed[3] else None
                d_out_bias = flat.sum(0) if needed[4] else None
                grad = torch.mm(flat, out_weight).view(joined.shape)
            if any(needed[:3]):
                q, k, v = step.heads(joint)
                scale = q.shape[-1] ** -0.5
                found = step.kernel.backward(
                    step.apart(grad), q, k, v, step.apart(joined), lse, added, _band(step), scale
                )
                side_by_side = torch.cat([step.joined(one) for one in found], -1)  # [.., .., 3 E]
                del found, q, k, v
                d_joint = side_by_side if d_joint is None else side_by_side.add_(d_joint)
        if d_joint is None or not any(needed[:3]):
            return None, None, None, d_out_weight, d_out_bias, *rest
        flat = d_joint.reshape(-1, d_joint.shape[-1])  # [N * L, 3 E]
        return (
            torch.mm(flat, in_weight).view(x.shape) if needed[0] else None,
            torch.mm(flat.t(), x.reshape(-1, x.shape[-1])) if needed[1] else None,
            flat.sum(0) if needed[2] else None,
            d_out_weight,
            d_out_bias,
            *rest,
        )


def _plainly(x: Tensor, parameters: Parameters, padding: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
    """The same in operations that can be differentiated again: (y, joint)."""
    joint = parameters.first(x)
    q, k, v = step.heads(joint)
    out, lse = plain.forward(step.scores(q, k, padding), v)
    if step.nothing != 0:
        out = out.masked_fill(torch.isneginf(lse)[..., None], step.nothing)
    return parameters.second(step.joined(out)), joint


def _looked_at(
    joint: Tensor, lse: Tensor, padding: Tensor | None, added: Tensor | None, step: Step, average: bool
) -> Tensor:
    """The weights, [N, H, L, L] or [N, L, L]."""
    q, k, _ = step.heads(joint.detach())
    if q.dtype not in HALF or cannot(step.scores(q, k, padding)) is not None:
        q, k, _ = step.heads(joint)
        found = weights.weights(step.scores(q, k, padding), lse, mean=average)
    elif torch.is_grad_enabled() and joint.requires_grad:
        found = _Weights.apply(joint, lse, padding, added, step, average)
    else:
        found = _in_kernels(joint, lse, added, step, average)
    if padding is None or step.nothing == 0:
        return found
    empty = lse > SEES_NOTHING / 2  # [N, H, L]
    return found.masked_fill((empty[:, 0] if average else empty)[..., None], step.nothing)


def _in_kernels(joint: Tensor, lse: Tensor, added: Tensor | None, step: Step, average: bool) -> Tensor:
    from ..engines.gpu.dense import plainest

    q, k, _ = step.heads(joint)
    return plainest(q, k, lse.contiguous(), added, step.causal, q.shape[-1] ** -0.5, average)


class _Weights(torch.autograd.Function):
    """`_in_kernels` with a way back, for those few who use it."""

    @staticmethod
    def forward(
        ctx: Any,
        joint: Tensor,
        lse: Tensor,
        padding: Tensor | None,
        added: Tensor | None,
        step: Step,
        average: bool,
    ) -> Tensor:
        ctx.save_for_backward(joint, lse, padding)
        ctx.step, ctx.average = step, average
        return _in_kernels(joint, lse, added, step, average)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (grad,), (joint, lse, padding) = grads, ctx.saved_tensors
        step, average = ctx.step, ctx.average
        if plain.is_needed_for(grad):

            def forward(joint: Tensor) -> Tensor:
                q, k, _ = step.heads(joint)
                whole, _ = plain.weights_of(step.scores(q, k, padding))
                return (whole.mean(1) if average else whole).to(joint.dtype)

            return *plain.gradients(forward, (joint,), (True,), grad), *(None,) * 5
        q, k, v = step.heads(joint)
        found = weights.gradients(step.scores(q, k, padding), lse, None, average, grad, bias=False)
        parts = [torch.zeros_like(v) if one is None else one.to(v.dtype) for one in (*found[:2], None)]
        return torch.cat([step.joined(one) for one in parts], -1), *(None,) * 5
