"""Attention as one matrix, in operations torch can differentiate as often and in whatever mode it likes.

Quadratic memory, so it is chosen only where nothing else will do: dropout on the weights, forward-mode
derivatives, derivatives of derivatives, function transforms (vmap, jvp), tracers (torch.jit.trace, make_fx).
Its size is checked against the memory budget first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import budget
from ..mask_rules import is_traced
from ..scoring import HIDDEN
from .backend import Backend, Call, Gradients
from .scores import Scores, own_precision
from .tiles import TILES

__all__ = ["PLAIN", "Plain", "forward", "gradients", "is_needed_for", "transforms_are_active", "weights_of"]


class Plain(Backend):
    """Everything, whatever the mode."""

    name = "plain"
    is_differentiable = gives_bias_gradient = True

    def how(self, call: Call) -> str:
        """In a phrase."""
        return "as one T x S matrix in plain torch"

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """By operations torch finds the gradients of."""
        return forward(call.scores, call.v, call.dropout)

    def backward(self, call: Call, out: Tensor, lse: Tensor, grad: Tensor) -> Gradients:
        """Where torch does not find them: inside an operator."""
        return TILES.backward(call, out, lse, grad)


PLAIN = Plain()


def forward(scores: Scores, v: Tensor, dropout: float = 0.0) -> tuple[Tensor, Tensor]:
    """(output [B, H, T, Dv], lse [B, H, T]); dropout falls on the weights, not on lse."""
    weights, lse = weights_of(scores)
    if dropout:
        weights = torch.dropout(weights, dropout, train=True)
    B, H, T, S = weights.shape
    grouped = weights.reshape(B, v.shape[1], -1, S)  # [B, Hk, G * T, S]
    with own_precision(v.device):
        out = grouped @ v.to(weights.dtype)
    return out.reshape(B, H, T, v.shape[-1]).to(v.dtype), lse


def weights_of(scores: Scores) -> tuple[Tensor, Tensor]:
    """(weights [B, H, T, S], lse [B, H, T])."""
    B, H, T, S = scores.shape
    budget.check(
        3 * B * H * T * S * scores.dtype.itemsize,  # scores, weights, and one for the road back
        scores.device,
        f"plain attention over [B, H, T, S] = {[B, H, T, S]}",
        "drop what needs the whole matrix (dropout, forward-mode or second derivatives)",
    )
    scoring, Hk = scores.scoring, scores.k.shape[1]
    q = scores.q.to(scores.dtype).reshape(B, Hk, -1, scores.q.shape[-1])  # [B, Hk, G * T, D]
    with own_precision(scores.device):
        s = (q @ scores.k.to(scores.dtype).transpose(-2, -1)).reshape(B, H, T, S) * scoring.scale
    if scoring.softcap is not None:
        s = scoring.softcap * torch.tanh(s / scoring.softcap)
    added = scores.additive(slice(0, T), slice(0, S), scores.dtype)
    if added is not None:
        s = s + added
    hidden = s <= HIDDEN
    s = s.masked_fill(hidden, -torch.inf)
    empty = hidden.all(-1, keepdim=True)
    s = s.masked_fill(empty, 0.0)  # a finite row, so that its (unused) derivative is no NaN
    if scoring.sinks is not None:
        sink = scoring.sinks.to(s.dtype)[:, None, None].expand(B, H, T, 1)
        weights = torch.softmax(torch.cat([s, sink], -1), -1)[..., :-1]
        lse = torch.logaddexp(s.logsumexp(-1), sink.squeeze(-1))
    else:
        weights, lse = torch.softmax(s, -1), s.logsumexp(-1)
    return weights.masked_fill(empty, 0.0), lse.masked_fill(empty.squeeze(-1), -torch.inf)


def transforms_are_active() -> bool:
    """Return True if torch.func, forward mode or a tracer is at work, which only plain operations pass."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active() or is_traced()


def is_needed_for(grad: Tensor) -> bool:
    """Whether a backward must go this way: a derivative of it may be wanted, or many gradients at once."""
    if torch.is_grad_enabled():
        return True
    if torch.compiler.is_compiling():  # compiled autograd, which knows no batches of gradients
        return False
    return torch._C._functorch.is_legacy_batchedtensor(grad)  # is_grads_batched


def gradients(
    forward: Callable[..., Tensor | Sequence[Tensor]],
    inputs: Sequence[object],
    needed: Sequence[bool],
    grad: Tensor | Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """The gradients of forward(*inputs), as a graph that can be differentiated again; None where not needed.

    Each input is seen through an alias of its own. Without that, an input that is another one, or was made
    from it, would collect the other's share here and once more in the graph outside. Where `forward` returns
    several tensors, `grad` is a list of theirs.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        seen = [x.view_as(x) if isinstance(x, Tensor) else x for x in inputs]
        wanted = {i: x for i, x in enumerate(seen) if needed[i] and isinstance(x, Tensor)}
        grads = torch.autograd.grad(forward(*seen), list(wanted.values()), grad, create_graph=again)
    by_place = dict(zip(wanted, grads, strict=True))
    return tuple(by_place.get(i) for i in range(len(seen)))
