"""The first pass: one door for eager mode, autograd and torch.compile.

Eager mode calls the backend directly, inside one autograd function where gradients are wanted. torch.compile
sees one operator, `headwise::attend`, whose backward is a second one: two opaque nodes in a graph (or, for
the plainest calls, torch's own kernel). Derivatives of derivatives are taken through the plain path. The lse
is saved, never differentiated: whoever needs gradients through weights goes through the second pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..mask_rules import TRACED, is_traced
from . import backends, plain, tiles
from .backend import Backend, Call
from .fused import adds
from .gpu.cannot import cannot
from .gradients import Context, save, saved, where_needed
from .kernels import CAUSAL, FULL, Band
from .scores import ADDED, DIFFERENTIABLE, FLAT_SCHEMA, Scores, own_precision, tile_dtype, without_graph
from .wanted import Collected

__all__ = ["ANYWHERE", "attend", "attend_and_collect", "call_of", "lse_of"]

LEAVES = ("v", *DIFFERENTIABLE)


def call_of(scores: Scores, v: Tensor, dropout: float = 0.0, collect: tuple[str, ...] = ()) -> Call:
    """A call as the table sees it, with what is going on around it."""
    because = None if torch.compiler.is_compiling() else _plain_because(scores, v)
    return Call(scores, v, dropout, because, _bias_gradient(scores), collect)


def attend(scores: Scores, v: Tensor, dropout: float = 0.0, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """(output [B, H, T, Dv], lse [B, H, T], detached); see `attend_and_collect`."""
    return attend_and_collect(scores, v, dropout, backend)[:2]


def attend_and_collect(
    scores: Scores, v: Tensor, dropout: float = 0.0, backend: str = "auto", collect: tuple[str, ...] = ()
) -> tuple[Tensor, Tensor, Collected | None]:
    """(output [B, H, T, Dv], lse [B, H, T], what was collected of row statistics), both last detached.

    collect: those that will be asked for; a backend may give some of them on the way, or none.

    Raises:
        ArgumentError: no backend of that name.
        BackendUnavailable: the backend named cannot run this call.
        BudgetExceeded: the plain path's matrix is over the memory budget.
    """
    if not scores.q.shape[0]:
        return *_of_nobody(scores, v, backend), None
    if torch.compiler.is_compiling():
        out, lse = _traced(scores, v, dropout, backend)
        return out, lse.detach(), None
    call = Call(scores, v, dropout, _plain_because(scores, v), _bias_gradient(scores), collect)
    chosen = backends.choose(call, backend)
    names = chosen.collected(call)
    collected: Collected | None = None
    if chosen.is_differentiable:
        out, lse = chosen.forward(call)
    elif torch.is_grad_enabled() and _needs_grad(scores, v):
        out, lse, rows = _Attend.apply(*_flat(scores, v), call.bias_gradient, chosen.name, names)
        collected = Collected(names, rows) if names else None
    elif names:
        backends.note(call)
        with own_precision(v.device):
            out, lse, rows = chosen.forward_and_collect(call, names)
        return out, lse, Collected(names, rows)
    else:
        return *_run(chosen, call), None
    return out, lse.detach(), collected


def _of_nobody(scores: Scores, v: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """What an empty batch comes to, on any device: no numbers, and a way back for the gradients of none."""
    if backend != "auto":
        backends.backend_named(backend)
    out = scores.q[..., :1] * (scores.k[:, :1, :1, :1] * v[:, :1, :1])  # [0, H, T, Dv]
    for learned in scores.scoring.tensors.values():
        if learned.requires_grad:
            out = out + learned.sum().to(out.dtype) * 0
    return out, out.new_empty(out.shape[:3], dtype=scores.dtype).detach()


def _traced(scores: Scores, v: Tensor, dropout: float, backend: str) -> tuple[Tensor, Tensor]:
    """What torch.compile and torch.export see: nothing that looks at sizes more than it must."""
    call = Call(scores, v, dropout)
    if dropout or (backend != "auto" and backends.backend_named(backend).is_differentiable):
        return backends.choose(call, backend).forward(call)
    band = _plainest(scores, v)
    if band is not None:
        kernel = backends.choose(call, backend).bare(scores.q, v)
        if kernel is not None and not (kernel.insists and torch.is_grad_enabled() and _needs_grad(scores, v)):
            return kernel.forward((scores.q, scores.k, v, None, band, scores.scoring.scale))
    return torch.ops.headwise.attend.default(*_flat(scores, v), _bias_gradient(scores), backend)


def _plainest(scores: Scores, v: Tensor) -> Band | None:
    """The band of a call that is one kernel call with torch's own backward, no more; else None."""
    mask, scoring = scores.mask, scores.scoring
    if scoring.sinks is not None or scoring.softcap is not None or adds(scores):
        return None
    if mask.left is not None or scores.q.shape[-1] != v.shape[-1]:
        return None
    if mask.right is None:
        return FULL
    square = mask.right == 0 and scores.q.shape[2] == scores.k.shape[2]
    return CAUSAL if square else None


def lse_of(scores: Scores) -> Tensor:
    """The log-sum-exp of every row, [B, H, T], for a map that came without one."""
    if not scores.q.shape[0]:
        return scores.q.new_empty(scores.q.shape[:3], dtype=scores.dtype)
    if torch.compiler.is_compiling():
        with torch.no_grad():
            return torch.ops.headwise.lse.default(*scores.detach().flatten())
    with without_graph(), own_precision(scores.device):
        if cannot(scores) is None:
            from .gpu.heaviest import lse_of as on_gpu

            return on_gpu(scores)
        return tiles.lse_of(scores)  # half the work of a fused forward: no values to mix


def _run(chosen: Backend, call: Call) -> tuple[Tensor, Tensor]:
    backends.note(call)
    with own_precision(call.v.device):
        return chosen.forward(call)


def _bias_gradient(scores: Scores) -> bool:
    """Whether a gradient of bias, slopes or relative is wanted, which fused kernels do not give."""
    scoring = scores.scoring
    bias, slopes, relative = scoring.bias, scoring.slopes, scoring.relative
    learned = (
        (bias is not None and bias.requires_grad)
        or (slopes is not None and slopes.requires_grad)
        or (relative is not None and relative.requires_grad)
    )
    return learned and torch.is_grad_enabled()


def _needs_grad(scores: Scores, v: Tensor) -> bool:
    if scores.q.requires_grad or scores.k.requires_grad or v.requires_grad:
        return True
    return any(tensor.requires_grad for tensor in scores.scoring.tensors.values())


def _plain_because(scores: Scores, v: Tensor) -> str | None:
    if is_traced():
        return TRACED
    if torch._C._are_functorch_transforms_active():
        return "a function transform (torch.func) is active, which only plain operations pass"
    if torch.autograd.forward_ad._current_level >= 0:
        tensors = (scores.q, scores.k, v, *scores.scoring.tensors.values())
        unpack = torch.autograd.forward_ad.unpack_dual
        if any(unpack(tensor).tangent is not None for tensor in tensors):
            return "a forward-mode derivative is wanted, which only plain operations give"
    return None


# The operator. Arguments are flat: what an operator's schema can hold.


def _flat(scores: Scores, v: Tensor) -> tuple[object, ...]:
    return v, *scores.flatten()


SCHEMA = f"Tensor v, {FLAT_SCHEMA}, bool bias_gradient, str backend"
torch.library.define("headwise::attend", f"({SCHEMA}) -> (Tensor, Tensor)")
torch.library.define(
    "headwise::attend_backward",
    f"(Tensor grad, Tensor out, Tensor lse, {SCHEMA}) -> ({', '.join(['Tensor'] * len(LEAVES))})",
)


def _attend(*args: object) -> tuple[Tensor, Tensor]:
    # in a graph nobody has asked yet: sizes, and what a named backend has to say of them, are known only here
    call, backend = _call(args)
    out, lse = _run(backends.choose(call, backend), call)
    return out.contiguous(), lse.contiguous()


def _call(args: Sequence[Any]) -> tuple[Call, str]:
    """The call those arguments came from, and the name of its backend."""
    v, *flat, bias_gradient, backend = args
    return Call(Scores.restore(*flat), v, bias_gradient=bias_gradient), backend


def _attend_fake(v: Tensor, q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:3], v.shape[-1], dtype=v.dtype)
    return out, q.new_empty(q.shape[:3], dtype=tile_dtype(q.dtype))


def _attend_backward(grad: Tensor, out: Tensor, lse: Tensor, *args: object) -> tuple[Tensor, ...]:
    grads = _gradients(grad, out, lse, args)
    # an operator's output is always a tensor, laid out as its fake is: an empty one stands for no gradient
    return tuple(grad.new_empty(0) if g is None else g.contiguous() for g in grads)


def _gradients(grad: Tensor, out: Tensor, lse: Tensor, args: Sequence[object]) -> tuple[Tensor | None, ...]:
    call, backend = _call(args)
    # any backend's backward goes with any forward, so "auto" may well choose another one here
    chosen = backends.choose(call) if backend == "auto" else backends.backend_named(backend)
    with own_precision(call.v.device):
        back, dv, sinks = chosen.backward(call, out, lse, grad)
    grads = (dv, back.q, back.k, back.bias, back.slopes, sinks, back.relative)
    typed = zip(grads, args[: len(grads)], strict=True)
    return tuple([g.to(x.dtype) if g is not None and isinstance(x, Tensor) else None for g, x in typed])


def _attend_backward_fake(grad: Tensor, out: Tensor, lse: Tensor, *args: object) -> tuple[Tensor, ...]:
    bias_gradient = args[-2]
    named = zip(LEAVES, args, strict=False)
    given = [x if bias_gradient or name not in ADDED else None for name, x in named]
    return tuple(x.new_empty(x.shape) if isinstance(x, Tensor) else grad.new_empty(0) for x in given)


def _save(ctx: Context, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    save(ctx, inputs, *output)
    ctx.set_materialize_grads(False)


def _operator_backward(ctx: Context, grad: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    args, (out, lse) = saved(ctx)
    if grad is None:
        return (None,) * len(args)
    return where_needed(ctx, torch.ops.headwise.attend_backward.default(grad, out, lse, *args))


class _Attend(torch.autograd.Function):
    """The operator without the operator: what eager mode uses, a fraction of the cost a call."""

    @staticmethod
    def forward(ctx: Context, *args: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        *flat, names = args
        call, backend = _call(flat)
        chosen, rows = backends.backend_named(backend), None
        if names:
            backends.note(call)
            with own_precision(call.v.device):
                out, lse, rows = chosen.forward_and_collect(call, names)
            ctx.mark_non_differentiable(lse, rows)
        else:
            out, lse = _run(chosen, call)
            ctx.mark_non_differentiable(lse)
        _save(ctx, tuple(flat), (out, lse))
        return out, lse, rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        args, (out, lse) = saved(ctx)
        grad = grads[0]
        if grad is None:
            return (None,) * (len(args) + 1)
        if plain.is_needed_for(grad):
            return where_needed(ctx, _differentiate_twice(args, ctx.needs_input_grad, grad))
        return where_needed(ctx, _gradients(grad, out, lse, args))


def _differentiate_twice(
    args: list[object], needed: tuple[bool, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """The same gradients through the plain path, as a graph that can be differentiated again."""

    def forward(*inputs: object) -> Tensor:
        call, _ = _call([*inputs, *args[len(inputs) :]])
        return plain.forward(call.scores, call.v)[0]

    return plain.gradients(forward, args[: len(LEAVES)], needed, grad)


ANYWHERE = "CompositeExplicitAutograd"
torch.library.impl("headwise::attend", ANYWHERE, _attend)
torch.library.impl("headwise::attend_backward", ANYWHERE, _attend_backward)
torch.library.register_fake("headwise::attend", _attend_fake)
torch.library.register_fake("headwise::attend_backward", _attend_backward_fake)
torch.library.register_autograd("headwise::attend", _operator_backward, setup_context=_save)


def _lse(*flat: Any) -> Tensor:
    return lse_of(Scores.restore(*flat)).contiguous()


def lse_fake(q: Tensor, *rest: object) -> Tensor:
    """A number per query, [B, H, T]."""
    return q.new_empty(q.shape[:3], dtype=tile_dtype(q.dtype))


torch.library.define("headwise::lse", f"({FLAT_SCHEMA}) -> Tensor")
torch.library.impl("headwise::lse", ANYWHERE, _lse)
torch.library.register_fake("headwise::lse", lse_fake)
