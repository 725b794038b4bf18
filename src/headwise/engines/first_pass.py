"""The first pass: which backend runs a call, and how its output and log-sum-exp get their gradients.

    attention (functional.py)
      with a plan                    `plan_for` finds it by the call's key, and `run` runs it
      without a plan                 `compute`: backends.py chooses, `run` runs, `_make_plan` plans
      by a backend's name, dropout   `attend_and_collect`
      in a graph of torch.compile    one operator, `headwise::attend` (operators.py), or torch's own kernel

The lse is saved, never differentiated: gradients through weights are computed by the second pass. Derivatives
of derivatives are computed by the plain path.

The key of a call (`plan_key`) holds everything that decides how the call is run: shapes, strides, dtypes,
devices, alignment, the numbers among its options, which tensors there are beside q, k and v, whether
gradients are wanted, torch's switches. The values of tensors are not part of it. A backend returns a
function that runs such calls (`Backend.runner`); calls with a plan go there without argument checks, `Call`
or table. If a backend's verdict can change between calls, its `verdict_holds` returns a function that is
called before each reuse, or no plan is made. No plan is made either for what a key does not cover: a
compiler, autocast, a function transform, tensor subclasses. plans.py says how long plans are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeGuard

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from ..mask_rules import TRACED, is_traced
from ..masks import Mask
from ..scoring import Scoring
from . import backends, plain
from .backend import Backend, Call, Collected, Gradients, Runner
from .fused import adds
from .gpu import launches
from .gpu.launches import cannot
from .gradients import Context, ScoresTemplate
from .kernels import CAUSAL, FULL, Band
from .plans import PLANS
from .scores import FURTHER_NUMBERS, Scores, own_precision, without_graph

PlanKey = tuple[Hashable, ...]
Output = tuple[Tensor, Tensor, Collected | None]

OWNER = "attention"  # of these plans in `PLANS`
UNUSUAL: Hashable = object()  # in place of a key: no plan is made for such a call


# A call


def call_of(scores: Scores, v: Tensor, dropout: float = 0.0, collect: tuple[str, ...] = ()) -> Call:
    """Return a call as the backends see it, with what is active around it."""
    because = None if torch.compiler.is_compiling() else _plain_because(scores, v)
    return Call(scores, v, dropout, because, bias_gradient(scores), collect)


def bias_gradient(scores: Scores) -> bool:
    """Return True if a gradient of bias, slopes or relative is needed, which fused kernels do not compute."""
    scoring = scores.scoring
    added = scoring.bias, scoring.slopes, scoring.relative
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in added)


def _plain_because(scores: Scores, v: Tensor) -> str | None:
    if is_traced():
        return TRACED
    if torch._C._are_functorch_transforms_active():
        return "a function transform (torch.func) is active, which only plain operations support"
    if torch.autograd.forward_ad._current_level >= 0:
        tensors = (scores.q, scores.k, v, *scores.scoring.tensors.values())
        unpack = torch.autograd.forward_ad.unpack_dual
        if any(unpack(tensor).tangent is not None for tensor in tensors):
            return "a forward-mode derivative is needed, which only plain operations compute"
    return None


def attend(scores: Scores, v: Tensor, dropout: float = 0.0, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Return (output [B, H, T, Dv], lse [B, H, T], detached); see `attend_and_collect`."""
    return attend_and_collect(scores, v, dropout, backend)[:2]


def attend_and_collect(
    scores: Scores, v: Tensor, dropout: float = 0.0, backend: str = "auto", collect: tuple[str, ...] = ()
) -> tuple[Tensor, Tensor, Collected | None]:
    """Return (output [B, H, T, Dv], lse [B, H, T], collected row statistics); the last two are detached.

    collect: names of statistics that will be used later; a backend may collect some of them, or none.

    Raises:
        ArgumentError: no backend of that name.
        BackendUnavailable: the backend named cannot run this call.
        BudgetExceeded: the plain path's matrix is over the memory budget.
    """
    if not scores.q.shape[0]:
        return *_attend_empty_batch(scores, v, backend), None
    if torch.compiler.is_compiling():
        out, lse = _traced(scores, v, dropout, backend)
        return out, lse.detach(), None
    call = call_of(scores, v, dropout, collect)
    return _run_by(backends.choose(call, backend), call)


def _attend_empty_batch(scores: Scores, v: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """Return an empty output and lse for an empty batch, on any device, that gradients can flow through."""
    if backend != "auto":
        backends.backend_named(backend)
    out = scores.q[..., :1] * (scores.k[:, :1, :1, :1] * v[:, :1, :1])  # [0, H, T, Dv]
    for learned in scores.scoring.tensors.values():
        if learned.requires_grad:
            out = out + learned.sum().to(out.dtype) * 0
    return out, out.new_empty(out.shape[:3], dtype=scores.dtype).detach()


def _traced(scores: Scores, v: Tensor, dropout: float, backend: str) -> tuple[Tensor, Tensor]:
    """Return output and lse for torch.compile and torch.export; sizes are read only where necessary."""
    call = Call(scores, v, dropout)
    if dropout or (backend != "auto" and backends.backend_named(backend).is_differentiable):
        return backends.choose(call, backend).forward(call)
    band = _plainest(scores, v)
    if band is not None:
        kernel = backends.choose(call, backend).bare(scores.q, v)
        needs_gradient = scores.wants_gradient or (torch.is_grad_enabled() and v.requires_grad)
        if kernel is not None and not (kernel.insists and needs_gradient):
            return kernel.forward((scores.q, scores.k, v, None, band, scores.scoring.scale))
    return torch.ops.headwise.attend.default(v, *scores.flatten(), bias_gradient(scores), backend)


def _plainest(scores: Scores, v: Tensor) -> Band | None:
    """Return the band of a call that is one kernel call with torch's own backward; else None."""
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
    """Return the log-sum-exp of every row, [B, H, T], for a map without one."""
    if not scores.q.shape[0]:
        return scores.q.new_empty(scores.q.shape[:3], dtype=scores.dtype)
    if torch.compiler.is_compiling():
        with torch.no_grad():
            return torch.ops.headwise.lse.default(*scores.detach().flatten())
    with without_graph(), own_precision(scores.device):
        if cannot(scores) is None:
            from .gpu.rows import lse_of as on_gpu

            return on_gpu(scores)
        return plain.lse_of(scores)  # half the work of a fused forward: no values to mix


# Plans


class CallPlan:
    """A plan for calls with one key: their options as numbers, and the backend's function."""

    __slots__ = ("asks", "has_tensors", "lengths", "mask", "numbers", "runner", "scoring", "table")

    def __init__(self, scores: Scores, runner: Runner, asks: tuple[Callable[[], bool], ...]) -> None:
        self.runner, self.asks, self.table = runner, asks, backends.BACKENDS
        # numbers alone: a plan holds no tensor of a call
        mask, scoring = scores.mask, scores.scoring
        self.mask, self.has_tensors = Mask(mask.left, mask.right), not mask.is_positional
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
        """Return the scores of another call with this key, from the tensors that may differ."""
        scoring, rules = self.scoring, self.mask
        if bias is not None or slopes is not None or sinks is not None:
            scoring = Scoring(scoring.scale, scoring.softcap, bias, slopes, sinks)
        if self.has_tensors:
            assert isinstance(mask, Mask), "its key says so"
            rules = mask.bound_alike(self.numbers, *self.lengths)
        return Scores(q, k, rules, scoring)


def plan_key(
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
) -> PlanKey | None:
    """Return the key of a call; None if no plan can be made for it.

    Args:
        scale: None for the default.
        rules: the part of the key for tensors beside q, k and v; see `tensor_key`.
        learning: whether one of these tensors needs a gradient.
    """
    if type(q) is not Tensor or type(k) is not Tensor or type(v) is not Tensor:
        return None
    on_gpu = q.is_cuda  # reading a device's type takes five times as long
    if not (on_gpu or q.is_cpu) or torch._C._is_any_autocast_enabled():
        return None
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return None
    try:
        q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
        layouts = q_shape, q.stride(), k_shape, k.stride(), v_shape, v.stride()
        places = q.data_ptr() & 15, k.data_ptr() & 15, v.data_ptr() & 15
    except RuntimeError:  # other layouts than strided, such as nested ones, lack one of these
        return None
    if len(q_shape) != 4 or len(k_shape) != 4:
        return None
    if 0 in q_shape or 0 in v_shape or q_shape[2] > k_shape[2]:  # empty; or queries that may see nothing
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
        OWNER, layouts, places, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, left, right, scale,
        softcap, rules, collect, learning, switches, launches.INTERPRET,
    )  # fmt: skip


def plan_key_of_scores(scores: Scores, v: Tensor, collect: tuple[str, ...] = ()) -> PlanKey | None:
    """Return the key of a call from its checked scores, whatever their mask; None if no plan can be made.

    It is not the key that `functional` makes of the arguments of the same call.
    """
    mask, scoring, rules = scores.mask, scores.scoring, rules_key(scores)
    if rules is UNUSUAL:
        return None
    learned = scoring.bias, scoring.slopes, scoring.sinks
    learning = any(x is not None and x.requires_grad for x in learned)
    return plan_key(
        scores.q, scores.k, v, mask.left, mask.right, scoring.scale, scoring.softcap, rules, collect, learning
    )


def rules_key(scores: Scores) -> Hashable:
    """Return the part of a key for the tensors beside q, k and v; None: there are none; or `UNUSUAL`."""
    scoring = scores.scoring
    if scoring.relative is not None or scores.positions is not None:
        return UNUSUAL
    if scores.mask.is_positional and not scoring.has_tensors:
        return None
    learned, rule_tensors = (scoring.bias, scoring.slopes, scoring.sinks), scores.mask.tensors
    if not all(x is None or is_usual(x) for x in (*learned, *rule_tensors.values())):
        return UNUSUAL
    return (
        further_numbers(scores.mask),
        tuple(rule_tensors),
        tuple([tensor_key(x) for x in (*learned, *rule_tensors.values())]),
    )


def further_numbers(mask: Mask) -> tuple[Hashable, ...]:
    """Return the numbers of a mask's rules other than a band's two."""
    return tuple([getattr(mask, name) for name in FURTHER_NUMBERS])


def is_usual(x: object) -> TypeGuard[Tensor]:
    """Return True for a plain tensor or parameter with a strided layout on a CPU or GPU."""
    if type(x) is not Tensor and type(x) is not Parameter:
        return False
    return (x.is_cuda or x.is_cpu) and not x.is_nested and x.layout is torch.strided


def tensor_key(x: Tensor | None) -> Hashable:
    """Return the part of a key for one tensor beside q, k and v."""
    if x is None:
        return None
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15, x.requires_grad


def plan_for(key: PlanKey) -> CallPlan | None:
    """Return the plan of a key, or None if there is none that holds now.

    Side effect: each backend of `plan.asks` is asked, and cuDNN's count of shapes notes the call.
    """
    plan: CallPlan | None = PLANS.get(key)
    if plan is None or plan.table is not backends.BACKENDS:
        return None
    for ask in plan.asks:
        if not ask():
            return None
    return plan


def compute(scores: Scores, v: Tensor, collect: tuple[str, ...] = (), key: PlanKey | None = None) -> Output:
    """Return (output, lse, collected statistics) of checked scores, by plan where there is one.

    key: the call's plan key, if the caller has computed it.
    """
    key = plan_key_of_scores(scores, v, collect) if key is None else key
    if key is None:
        return attend_and_collect(scores, v, collect=collect)
    plan = plan_for(key)
    if plan is not None:
        return run(plan.runner, scores, v)
    call = call_of(scores, v, collect=collect)
    backend = backends.choose(call)
    runner = backend.runner(call)
    if runner is None:
        return _run_by(backend, call)
    backends.note(call)
    output = run(runner, scores, v)
    _make_plan(key, call)
    return output


def _make_plan(key: PlanKey, call: Call) -> None:
    """Make a plan for a call that was run, the second time its key occurs."""
    if not PLANS.seen_before(key):
        return
    asks = []
    for backend in backends.BACKENDS:
        holds = backend.verdict_holds(call)
        if holds is False:
            return
        if holds is not True:
            asks.append(holds)
        if backends.verdict(backend, call) is None:
            runner = backend.runner(call)  # once more: our kernels can be launched directly only after a run
            if runner is not None:
                PLANS.keep(key, CallPlan(call.scores, runner, tuple(asks)))
            return


# Running a call


def _run_by(backend: Backend, call: Call) -> Output:
    """Return (output, lse, collected row statistics) of a call by the backend chosen for it."""
    if backend.is_differentiable:
        out, lse = backend.forward(call)
        return out, lse.detach(), None
    names, learns = backend.collected(call), call.bias_gradient

    def forward(scores: Scores, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        backends.note(call)
        with own_precision(v.device):
            if names:
                return backend.forward_and_collect(call, names)
            return *backend.forward(call), None

    def backward(scores: Scores, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor) -> Gradients:
        return backend.backward(Call(scores, v, bias_gradient=learns), out, lse, grad)

    return run(Runner(forward, backward, names), call.scores, call.v)


def run(runner: Runner, scores: Scores, v: Tensor) -> Output:
    """Return (output, lse, collected row statistics) of a call with a known runner."""
    scoring = scores.scoring
    learned = scoring.bias, scoring.slopes, scoring.sinks, scoring.relative
    if torch.is_grad_enabled() and (
        scores.q.requires_grad or scores.k.requires_grad or v.requires_grad
        or (scoring.has_tensors and any(x is not None and x.requires_grad for x in learned))
    ):  # fmt: skip
        out, lse, rows = _Attend.apply(runner, scores, v, scores.q, scores.k, *learned)
        lse = lse.detach()
    else:
        out, lse, rows = runner.forward(scores, v)
    return out, lse, None if rows is None else Collected(runner.names, rows)


class _Attend(torch.autograd.Function):
    """A call and its gradients, with or without a plan: a checkpoint's two runs may differ in that."""

    @staticmethod
    def forward(
        ctx: Context, runner: Runner, scores: Scores, v: Tensor, *leaves: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        out, lse, rows = runner.forward(scores, v)
        mask = scores.mask
        # in backward these must be unchanged
        rule_tensors = () if mask.is_positional else mask.tensors.values()
        ctx.save_for_backward(v, *leaves, *rule_tensors, out, lse)
        # without tensors that gradients flow to: those belong to autograd, which frees them
        ctx.template, ctx.run_backward = ScoresTemplate(scores), runner.backward
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
            return (None,) * 9
        saved = ctx.saved_tensors  # read once: under checkpointing a second read fails
        inputs, (out, lse) = saved[:7], saved[-2:]
        needed, scores_of = ctx.needs_input_grad[2:], ctx.template.fill
        unordered: tuple[Tensor | None, ...]
        if plain.needs_differentiable_backward(grad):

            def forward(v: Tensor, *leaves: Tensor | None) -> Tensor:
                return plain.forward(scores_of(*leaves), v)[0]

            return None, None, *plain.gradients(forward, inputs, needed, grad)
        v, *leaves = inputs
        with own_precision(v.device):
            back, dv, of_sinks = ctx.run_backward(scores_of(*leaves), v, out, lse, grad)
        unordered = (dv, back.q, back.k, back.bias, back.slopes, of_sinks, back.relative)
        typed = [_as(x, g) if want else None for x, g, want in zip(inputs, unordered, needed, strict=True)]
        return None, None, *typed


def _as(x: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Return a gradient in the dtype of its tensor."""
    return grad if grad is None or x is None or grad.dtype is x.dtype else grad.to(x.dtype)
