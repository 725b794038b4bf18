"""`attention` and `why`: one call of attention, and the backend that would run it.

Letters: B batch, T query_len, S key_len, H num_heads, Hk num_kv_heads, D head_dim, Dv value_dim.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .arguments import (
    OF_ATTENTION,
    REQUIRED,
    AttentionOptions,
    check_dropout,
    refuse,
    scores_from,
    under_autocast,
    with_displayed_signature,
)
from .engines import backends, first_pass, plain
from .engines.backend import wanted_now
from .engines.gpu.launches import cannot, interpreted
from .engines.second_pass import without_kernel
from .engines.statistics import ROW_STATISTICS, check_names
from .errors import ArgumentError
from .map import AttentionMap, make
from .mask_rules import can_read, smaller
from .masks import Mask
from .scoring import Alibi, Bias


@with_displayed_signature
def attention(
    q: Tensor = REQUIRED,
    k: Tensor = REQUIRED,
    v: Tensor = REQUIRED,
    mask: Mask | Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Bias | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
    statistics: bool | str | Iterable[str] | None = None,
    **wrong: object,
) -> tuple[Tensor, AttentionMap]:
    """Return softmax(Q K^T / sqrt(D)) V for every head, and a map of the weights, computed only on demand.

    With T queries over S keys the last query is aligned with the last key: query i is at position i + S - T.
    Causal, and window=2, for T = 2 over S = 4:

        query 0   x x x .        . x x .
        query 1   x x x x        . . x x

    Args:
        q: [B, H, T, D]
        k: [B, Hk, S, D]; H must be a multiple of Hk: H / Hk query heads share each key head.
        v: [B, Hk, S, Dv]
        mask: a `Mask`, or a tensor broadcastable to [B, H, T, S], bool or 0 and 1; True or 1 = may attend. A
            tensor whose values suggest another meaning raises (see `Mask`); `Mask.dense(tensor)` does not.
        causal: hide the keys after the query. With T > S the first queries have no key, so the call raises;
            with `mask=Mask.causal()` their output is 0 instead.
        window: the number of keys each query may attend to, its own included; or a pair (before, after).
        scale: the factor of the scores. Default 1 / sqrt(D).
        softcap: limit scores to (-softcap, softcap) by softcap * tanh(score / softcap).
        bias: a tensor added to the scores after scale and softcap, broadcastable to [B, H, T, S]; or a bias
            by distance, `headwise.scoring.alibi(num_heads)` or `headwise.scoring.Relative(values)`; or a
            tuple of several, which are added up. A value of -1e30 or less hides its key.
        sinks: [H], learned sinks: for each head the score of one more column of the softmax, which has no
            value.
        dropout: the share of weights dropped at random, in training and in evaluation alike; the map holds
            the weights before dropout. It needs the whole matrix, so memory grows with T * S, within
            `headwise.budget`.
        backend: "auto", or one of decode, triton, cudnn, flash, efficient, tiles, plain. A backend given by
            name runs or raises.
        statistics: names of row statistics that will be read from the map; True: all. On a GPU they are
            collected during the forward, which is faster than a second pass later; on a CPU the argument has
            no effect.

    Returns:
        output [B, H, T, Dv], and an `AttentionMap` [B, H, T, S]. Queries without a key have output 0.

    Raises:
        ShapeError: sizes that disagree; a size of 0 other than the batch; H not a multiple of Hk.
        ArgumentError: dtypes or devices that differ; softcap or dropout out of range; an unknown backend; a
            keyword of another library.
        MaskError: a mask of the wrong shape or meaning; window below 1; lengths out of range; `causal` or
            `window` would leave queries without a key.
        BackendUnavailable: the backend named cannot run this call.
        BudgetExceeded: the matrix that dropout or higher derivatives need is too large.

    Example:
        >>> import torch, headwise as hw
        >>> q, k, v = torch.randn(3, 2, 8, 10, 64)
        >>> output, weights = hw.attention(q, k, v, causal=True)
        >>> output.shape, weights.shape
        (torch.Size([2, 8, 10, 64]), torch.Size([2, 8, 10, 10]))

    Vaswani 2017, section 3.2.
    """
    if wrong:
        refuse("attention", wrong, OF_ATTENTION, attention)
    options = AttentionOptions(mask, causal, window, scale, softcap, bias, sinks)
    collect = () if statistics is None and not wanted_now() else _collected(q, statistics)
    ordinary = not (
        dropout or backend != "auto" or torch.compiler.is_compiling() or plain.transforms_are_active()
    )
    key = _plan_key(q, k, v, options, collect) if ordinary else None
    plan = None if key is None else first_pass.plan_for(key)
    if plan is not None:  # a call like an earlier one: the checks below would pass again
        scores = plan.scores(q, k, mask, *_added(bias), sinks)
        output, lse, collected = first_pass.run(plan.runner, scores, v)
        return output, make(scores, lse, None, collected)
    q, k, v = under_autocast(q, k, v)
    scores = scores_from(q, k, v, options)
    if dropout:
        check_dropout(dropout)
    if ordinary:
        output, lse, collected = first_pass.compute(scores, v, collect, key)
    else:
        output, lse, collected = first_pass.attend_and_collect(scores, v, dropout, backend, collect)
    return output, make(scores, lse, None, collected)


def _plan_key(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, collect: tuple[str, ...]
) -> first_pass.PlanKey | None:
    """Return the plan key of a call, made from its arguments before any check.

    Calls with equal keys are equal in everything that `scores_from` checks. None if there is no such key:
    `first_pass.compute` may still make one from the checked scores.
    """
    mask, causal, window, scale, softcap, bias, sinks = options
    left = right = None
    tensors: dict[str, Tensor] = {}
    numbers: tuple[Hashable, ...] = ()
    if mask is not None:
        if type(mask) is not Mask:
            return None
        if not mask.is_positional:
            tensors, numbers = mask.tensors, first_pass.further_numbers(mask)
            for x in tensors.values():
                if not first_pass.is_usual(x) or can_read(x):
                    return None  # a value that can be read is read in every call
        left, right = mask.left, mask.right
    if causal is True:
        right = smaller(right, 0)
    elif causal is not False:
        return None
    if window is not None:
        if type(window) is not int or window < 1:
            return None
        left, right = smaller(left, window - 1), smaller(right, 0)
    if (scale is not None and type(scale) is not float) or (
        softcap is not None and type(softcap) is not float
    ):
        return None
    rules: tuple[Hashable, ...] | None = None
    learning = False
    if bias is not None or sinks is not None:
        added, slopes = _added(bias)
        if (bias is not None and added is None and slopes is None) or (
            sinks is not None and not first_pass.is_usual(sinks)
        ):
            return None
        if slopes is not None and slopes.device != q.device:  # `scores_from` moves them to the device
            return None
        rules = tuple([first_pass.tensor_key(x) for x in (added, slopes, sinks)])
        learning = any(x is not None and x.requires_grad for x in (added, slopes, sinks))
    if tensors or numbers:
        rules = (rules, numbers, *tensors, *[first_pass.tensor_key(x) for x in tensors.values()])
    return first_pass.plan_key(q, k, v, left, right, scale, softcap, rules, collect, learning)


def _added(bias: Bias | None) -> tuple[Tensor | None, Tensor | None]:
    """Return (bias, slopes) if only one of them is added to the scores; else (None, None)."""
    if bias is None:
        return None, None
    if type(bias) is Alibi:
        return None, bias.slopes if first_pass.is_usual(bias.slopes) else None
    if not first_pass.is_usual(bias) or bias.ndim != 4 or bias.dtype == torch.float64:
        return None, None  # `scores_from` changes its shape or dtype
    return bias, None


def _collected(q: Tensor, statistics: bool | str | Iterable[str] | None) -> tuple[str, ...]:
    """Return the row statistics to collect with the output; none where no backend can."""
    names = wanted_now() if statistics is None else _names(statistics)
    return () if names and getattr(q, "is_cpu", True) and not interpreted() else names


def _names(statistics: bool | str | Iterable[str]) -> tuple[str, ...]:
    """Return the names of the row statistics requested.

    Raises:
        ArgumentError: an unknown name, or a value that is not a name.
    """
    if isinstance(statistics, bool):
        return tuple(ROW_STATISTICS) if statistics else ()
    if isinstance(statistics, str):
        names: tuple[str, ...] = (statistics,)
    elif isinstance(statistics, Iterable) and not isinstance(statistics, (Tensor, bytes)):
        names = tuple(statistics)
    else:
        raise ArgumentError(
            f"statistics must be True, a name or names: got {statistics!r}; e.g. ('entropy', 'distance')"
        )
    check_names(names)
    return names


@dataclass(frozen=True)
class Why:
    """The backend that would run a call of `attention`, and the reasons against the others; print it.

    Shortcuts of modules (`mha(x)` without options, for one) choose a kernel themselves.
    """

    backend: str
    how: str
    reasons: dict[str, str | None]  # backend -> why "auto" does not take it; None: it would
    asked: str = "auto"
    no_kernels: str | None = None  # why the second pass runs on tiles; None: in kernels

    def __str__(self) -> str:
        lines = [f"{self.backend} runs this call, {self.how}."]
        idle = "has lower priority" if self.asked == "auto" else f"{self.asked} was asked for"
        for name, reason in self.reasons.items():
            if name != self.backend:
                lines.append(f"  {name}: {reason or f'supports this call, but {idle}'}")
        second = "in kernels, by triton" if self.no_kernels is None else "on tiles in plain torch"
        lines.append(f"The second pass (weights, statistics, pictures) runs {second}.")
        if self.no_kernels is not None:
            lines.append(f"  triton: {self.no_kernels}")
        lines += [f"  {name} has no kernel and runs on tiles" for name in self.without_kernel]
        return "\n".join(lines)

    @property
    def without_kernel(self) -> tuple[str, ...]:
        """The statistics that run on tiles though the others have kernels."""
        return () if self.no_kernels is not None else without_kernel()


@with_displayed_signature
def why(
    q: Tensor = REQUIRED,
    k: Tensor = REQUIRED,
    v: Tensor = REQUIRED,
    mask: Mask | Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Bias | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
    statistics: bool | str | Iterable[str] | None = None,
    **wrong: object,
) -> Why:
    """Return which backend would run this call of `attention`, and why not the others; nothing is run.

    Example:
        >>> import torch, headwise as hw
        >>> q, k, v = torch.randn(3, 1, 4, 16, 32)
        >>> print(hw.why(q, k, v, softcap=50.0))
        tiles runs this call, tile by tile in plain torch.
          decode: it supports cuda only; the tensors are on cpu
          triton: it supports cuda only; the tensors are on cpu
          cudnn: it supports cuda only; the tensors are on cpu
          flash: it has no soft cap (softcap=50)
          efficient: it supports cuda only; the tensors are on cpu
          plain: supports this call, but has lower priority
        The second pass (weights, statistics, pictures) runs on tiles in plain torch.
          triton: it supports cuda only; the tensors are on cpu
    """
    if wrong:
        refuse("why", wrong, OF_ATTENTION, why)
    q, k, v = under_autocast(q, k, v)
    options = AttentionOptions(mask, causal, window, scale, softcap, bias, sinks)
    scores = scores_from(q, k, v, options)
    check_dropout(dropout)
    call = first_pass.call_of(scores, v, dropout, () if statistics is None else _names(statistics))
    chosen = backends.choose(call, backend)
    return Why(chosen.name, chosen.description(call), backends.verdicts(call), backend, cannot(scores))
