"""The way back from entropy: a training loss may use it.

With H_i = -sum_j p_ij log p_ij (a sink counts as one more key) and g_i what is wanted of it,

    d loss / d s_ij = -g_i p_ij (log p_ij + H_i)

which is the gradient of weights for the cotangent -g_i log p_ij: the normalisation brings H_i. Memory is
linear in length; the weights are made again, tile by tile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import plain
from .flat import flatten, leaves
from .gpu.cannot import cannot, prepared
from .scores import Scores, own_precision
from .walk import Block, Tile
from .weights import Rest, score_gradients

__all__ = ["gradients", "with_gradient"]


def with_gradient(scores: Scores, lse: Tensor, value: Tensor | None) -> Tensor:
    """The entropy of each query, [B, H, T], as a function of q, k, bias, slopes and sinks.

    value: the same number, known already; None only while compiling.
    """
    if plain.transforms_are_active():
        return _plainly(scores)
    if torch.compiler.is_compiling():
        return torch.ops.headwise.entropy.default(*flatten(scores), lse)
    found: Tensor = _Entropy.apply(*leaves(scores), Rest(scores), lse, value)
    return found


def gradients(scores: Scores, lse: Tensor, grad: Tensor, bias: bool) -> tuple[Tensor | None, ...]:
    """d loss / d (q, k, bias, slopes, sinks) from d loss / d entropy; `bias`: of bias and slopes, too."""
    with own_precision(grad.device):
        if not bias and cannot(scores) is None:
            from .gpu import backward

            q, k, sinks = backward.of_entropy(prepared(scores, lse), grad)
            return q, k, None, None, sinks
        grad = grad.to(scores.dtype)

        def cotangent(tile: Tile) -> Tensor:
            # a weight below e^-1000 is 0: its logarithm need not be as low as a hidden key's
            return -grad[tile.block.where][..., None] * tile.log_p.clamp(min=-1000)

        def of_sink(block: Block, log_sunk: Tensor) -> Tensor:
            return -grad[block.where] * log_sunk.clamp(min=-1000)

        return score_gradients(scores, lse, cotangent, bias, of_sink)


def _plainly(scores: Scores) -> Tensor:
    """The same from one matrix, for derivatives of derivatives."""
    weights, lse = plain.weights_of(scores)
    found = -(weights * torch.where(weights > 0, weights, 1.0).log()).sum(-1)
    if scores.sinks is not None:
        log_sunk = scores.sinks.to(lse.dtype)[:, None] - lse
        empty = torch.isneginf(lse)
        log_sunk = log_sunk.masked_fill(empty, 0.0)
        found = found - (log_sunk.exp() * log_sunk).masked_fill(empty, 0.0)
    return found


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        bias: Tensor | None,
        slopes: Tensor | None,
        sinks: Tensor | None,
        rest: Any,
        lse: Tensor,
        value: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(q, k, bias, slopes, sinks, lse)
        ctx.rest = rest
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        *inputs, lse = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if plain.is_needed_for(grad):
            found = plain.gradients(lambda *given: _plainly(ctx.rest(*given)), inputs, needed, grad)
        else:
            found = gradients(ctx.rest(*inputs), lse, grad, needed[2] or needed[3])
        typed = [None if g is None else g.to(x.dtype) for g, x in zip(found, inputs, strict=True)]
        return (*typed, None, None, None)
