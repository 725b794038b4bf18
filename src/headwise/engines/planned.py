"""Calls of a kind that came before: what was found out about the first is not found out again.

A kind is all that decides how a call is run: shapes, strides, dtypes, devices, alignment, the numbers among
its options, which tensors there are beside q, k and v, whether gradients are wanted, torch's switches.
Nothing of what tensors hold is part of it. A backend says how it answers such calls in one stroke
(`Backend.ways`); they go there without checks, `Call` or table. Where the table's answer may change from one
call to the next, whoever may change it is asked each time (`Backend.lasts`), or there is no plan; nor for
what a kind does not cover: a compiler, autocast, a function transform, tensors of other classes.

Plans of every kind, on a CPU as well, are kept in `gpu.launches.PLANS`, which says when they are thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeGuard

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from ..masks import Mask
from ..scoring import Scoring
from . import backends, first_pass, plain
from .backend import Call, Ways
from .gpu import launches
from .gpu.launches import PLANS
from .gradients import Context
from .scores import FURTHER_NUMBERS, Scores, own_precision
from .wanted import Collected

__all__ = [
    "UNUSUAL",
    "Kind",
    "Planned",
    "added_kind",
    "answer",
    "further_numbers",
    "is_usual",
    "kind_of",
    "kind_of_scores",
    "known",
    "rules_kind",
    "run",
]

Kind = tuple[Hashable, ...]
Answer = tuple[Tensor, Tensor, Collected | None]

OWNER = "attention"  # of these plans in `PLANS`
UNUSUAL: Hashable = object()  # no kind is made of that


class Planned:
    """A kind of call: what stands for its options, and who answers it."""

    __slots__ = ("asks", "held", "lengths", "mask", "numbers", "scoring", "table", "ways")

    def __init__(self, scores: Scores, ways: Ways, asks: tuple[Callable[[], bool], ...]) -> None:
        self.ways, self.asks, self.table = ways, asks, backends.BACKENDS
        # numbers alone: no tensor of anybody's is kept
        mask, scoring = scores.mask, scores.scoring
        self.mask, self.held = Mask(mask.left, mask.right), not mask.is_positional
        self.numbers = mask.numbers_alone()
        self.scoring, self.lengths = Scoring(scoring.scale, scoring.softcap), scores.shape[2:]

    def scores(
        self,
        q: Tensor,
        k: Tensor,
        mask: Mask | Tensor | None,
        bias: Tensor | None,
        slopes: Tensor | None,
        sinks: Tensor | None,
    ) -> Scores:
        """Those of another call of this kind, from what may be new in it."""
        scoring, rules = self.scoring, self.mask
        if bias is not None or slopes is not None or sinks is not None:
            scoring = Scoring(scoring.scale, scoring.softcap, bias, slopes, sinks)
        if self.held:
            assert isinstance(mask, Mask), "its kind says so"
            rules = mask.bound_alike(self.numbers, *self.lengths)
        return Scores(q, k, rules, scoring)


def kind_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    left: int | None,
    right: int | None,
    scale: float | None,
    softcap: float | None,
    rules: Hashable = None,
    collect: tuple[str, ...] = (),
    learning: bool = False,
) -> Kind | None:
    """The kind of a call; None: none that is ever planned.

    Args:
        scale: None for the usual one.
        rules: all that is to be known of tensors beside q, k and v; see `added_kind`.
        learning: one of them wants a gradient.
    """
    if type(q) is not Tensor or type(k) is not Tensor or type(v) is not Tensor:
        return None
    on_gpu = q.is_cuda  # asking a device for its type takes five times as long
    if not (on_gpu or q.is_cpu) or torch._C._is_any_autocast_enabled():
        return None
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return None
    try:
        q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
        laid = q_shape, q.stride(), k_shape, k.stride(), v_shape, v.stride()
        places = q.data_ptr() & 15, k.data_ptr() & 15, v.data_ptr() & 15
    except RuntimeError:  # of any layout but strides, nested ones among them, one of the three is not there
        return None
    if len(q_shape) != 4 or len(k_shape) != 4:
        return None
    if 0 in q_shape or 0 in v_shape or q_shape[2] > k_shape[2]:  # nothing there; queries that may see nothing
        return None
    scale = q_shape[3] ** -0.5 if scale is None else scale
    learning = torch.is_grad_enabled() and (learning or q.requires_grad or k.requires_grad or v.requires_grad)
    switches: Hashable = None
    if on_gpu:
        switches = (
            torch._C._get_cudnn_sdp_enabled(), torch._C._get_flash_sdp_enabled(),
            torch._C._get_mem_efficient_sdp_enabled(), torch._C._get_deterministic_algorithms(),
        )  # fmt: skip
    return (
        OWNER, laid, places, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, left, right, scale,
        softcap, rules, collect, learning, switches, launches.INTERPRET,
    )  # fmt: skip


def kind_of_scores(scores: Scores, v: Tensor, collect: tuple[str, ...] = ()) -> Kind | None:
    """A kind from scores that have been checked, whatever their mask; None likewise.

    It is not the key that `functional` makes of the arguments of the same call.
    """
    mask, scoring, rules = scores.mask, scores.scoring, rules_kind(scores)
    if rules is UNUSUAL:
        return None
    learned = scoring.bias, scoring.slopes, scoring.sinks
    learning = any(x is not None and x.requires_grad for x in learned)
    return kind_of(
        scores.q, scores.k, v, mask.left, mask.right, scoring.scale, scoring.softcap, rules, collect, learning
    )


def rules_kind(scores: Scores) -> Hashable:
    """What of the tensors beside q, k and v is part of a kind, None where there are none; or `UNUSUAL`."""
    scoring = scores.scoring
    if scoring.relative is not None or scores.positions is not None:
        return UNUSUAL
    if scores.mask.is_positional and not scoring.has_tensors:
        return None
    learned, held = (scoring.bias, scoring.slopes, scoring.sinks), scores.mask.tensors
    if not all(x is None or is_usual(x) for x in (*learned, *held.values())):
        return UNUSUAL
    return (
        further_numbers(scores.mask),
        tuple(held),
        tuple([added_kind(x) for x in (*learned, *held.values())]),
    )


def further_numbers(mask: Mask) -> tuple[Hashable, ...]:
    """What a mask's rules hold in numbers beside a band's two."""
    return tuple([getattr(mask, name) for name in FURTHER_NUMBERS])


def is_usual(x: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor of torch's own class, with strides that lead to numbers."""
    if type(x) is not Tensor and type(x) is not Parameter:
        return False
    return (x.is_cuda or x.is_cpu) and not x.is_nested and x.layout is torch.strided


def added_kind(x: Tensor | None) -> Hashable:
    """What of a tensor beside q, k and v is part of a kind."""
    if x is None:
        return None
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15, x.requires_grad


def known(kind: Kind) -> Planned | None:
    """The plan of a kind, where there is one and it may be used now; where shapes are counted, it counts."""
    plan: Planned | None = PLANS.get(kind)
    if plan is None or plan.table is not backends.BACKENDS:
        return None
    for ask in plan.asks:
        if not ask():
            return None
    return plan


def answer(scores: Scores, v: Tensor, collect: tuple[str, ...] = (), kind: Kind | None = None) -> Answer:
    """(output, lse, what was collected) of scores that have been checked, by plan where there is one.

    kind: of the call, where it is known.
    """
    kind = kind_of_scores(scores, v, collect) if kind is None else kind
    plan = None if kind is None else known(kind)
    if plan is not None:
        return run(plan.ways, scores, v)
    call = first_pass.call_of(scores, v, collect=collect)
    ways = None if kind is None else backends.choose(call).ways(call)
    if kind is None or ways is None:
        return first_pass.attend_and_collect(scores, v, 0.0, "auto", collect)
    backends.note(call)
    made = run(ways, scores, v)
    _remember(kind, call)
    return made


def _remember(kind: Kind, call: Call) -> None:
    """A call of this kind has been run; the second time it is planned."""
    if not PLANS.is_back(kind):
        return
    asks = []
    for backend in backends.BACKENDS:
        lasts = backend.lasts(call)
        if lasts is False:
            return
        if lasts is not True:
            asks.append(lasts)
        if backends.takes(backend, call):
            ways = backend.ways(call)  # once more: kernels of ours can be launched at once only after a run
            if ways is not None:
                PLANS.keep(kind, Planned(call.scores, ways, tuple(asks)))
            return


def run(ways: Ways, scores: Scores, v: Tensor) -> Answer:
    """(output, lse, what was collected of row statistics) of a call whose ways are known."""
    scoring = scores.scoring
    learned = scoring.bias, scoring.slopes, scoring.sinks
    if torch.is_grad_enabled() and (
        scores.q.requires_grad or scores.k.requires_grad or v.requires_grad
        or (scoring.has_tensors and any(x is not None and x.requires_grad for x in learned))
    ):  # fmt: skip
        out, lse, rows = _ThereAndBack.apply(ways, scores, scores.q, scores.k, v, *learned)
        lse = lse.detach()
    else:
        out, lse, rows = ways.forward(scores, v)
    return out, lse, None if rows is None else Collected(ways.names, rows)


class _ThereAndBack(torch.autograd.Function):
    """A planned call, and its gradients."""

    @staticmethod
    def forward(
        ctx: Context, ways: Ways, scores: Scores, *leaves: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        q, k, v, *learned = leaves
        assert v is not None
        out, lse, rows = ways.forward(scores, v)
        mask = scores.mask
        held = () if mask.is_positional else mask.tensors.values()  # on the way back they must be unchanged
        # in the order of the ordinary way, which may be the one a checkpoint goes again
        ctx.save_for_backward(v, q, k, *learned, *held, out, lse)
        ctx.ways, ctx.mask = ways, mask
        ctx.numbers = scores.scoring.scale, scores.scoring.softcap
        if rows is None:
            ctx.mark_non_differentiable(lse)
        else:
            ctx.mark_non_differentiable(lse, rows)
        ctx.set_materialize_grads(False)
        return out, lse, rows

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        if grad is None:
            return (None,) * 8
        v, q, k, bias, slopes, sinks, *_, out, lse = ctx.saved_tensors
        needed, numbers, mask = ctx.needs_input_grad[2:], ctx.numbers, ctx.mask

        def scores_of(q: Tensor, k: Tensor, *learned: Tensor | None) -> Scores:
            return Scores(q, k, mask, Scoring(*numbers, *learned))

        found: tuple[Tensor | None, ...]
        if plain.is_needed_for(grad):

            def forward(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor | None) -> Tensor:
                return plain.forward(scores_of(q, k, *learned), v)[0]

            found = plain.gradients(forward, (q, k, v, bias, slopes, sinks), needed, grad)
            return None, None, *found
        scores = scores_of(q, k, bias, slopes, sinks)
        with own_precision(v.device):
            back, dv, of_sinks = ctx.ways.backward(scores, v, out, lse, grad)
        found = (back.q, back.k, dv, back.bias, back.slopes, of_sinks)
        given = (q, k, v, bias, slopes, sinks)
        return (
            None,
            None,
            *[_as(x, g) if wanted else None for x, g, wanted in zip(given, found, needed, strict=True)],
        )


def _as(x: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """A gradient in the dtype of what it belongs to."""
    return grad if grad is None or x is None or grad.dtype is x.dtype else grad.to(x.dtype)
