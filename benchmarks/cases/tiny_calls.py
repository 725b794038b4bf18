"""Tiny calls of `hw.attention` beside SDPA: the cost of a call before it computes.

SDPA is told a rule as the dense mask it takes, made beforehand. Soft caps and sinks it does not know: there
it runs causal attention alone, for scale, and is judged by its own truth.

Letters: B batch, H num_heads, L length, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import headwise as hw

from .. import problem as problems
from ..problem import Visibility
from ..registry import OURS, Apart, Arm, Pinned, Prepared, Sizes, Values

SDPA, SDPA_CAUSAL = "SDPA", "SDPA, causal alone"
CAP, WINDOW = 20.0, 5


@dataclass(frozen=True)
class SizedRule:
    """A mask rule for one size.

    options: of `hw.attention`, made anew for every call, as in a model's forward.
    visible: the same as a formula; None: every key.
    is_causal: whether SDPA takes it as that word.
    """

    options: Callable[[], Mapping[str, Any]]
    visible: Visibility | None
    is_causal: bool = False
    softcap: float | None = None
    sinks: Tensor | None = None


def _full(q: Tensor) -> SizedRule:
    return SizedRule(dict, None)


def _causal(q: Tensor) -> SizedRule:
    return SizedRule(lambda: {"causal": True}, problems.causal, True)


def _mask_causal(q: Tensor) -> SizedRule:
    return SizedRule(lambda: {"mask": hw.Mask.causal()}, problems.causal, True)


def _window(q: Tensor) -> SizedRule:
    return SizedRule(lambda: {"causal": True, "window": WINDOW}, problems.window(WINDOW))


def _padded(q: Tensor) -> SizedRule:
    lengths = torch.full((q.shape[0],), q.shape[2] - q.shape[2] // 4, device=q.device)
    visible = problems.all_of(problems.causal, problems.padding(lengths))
    return SizedRule(lambda: {"mask": hw.Mask.causal() & hw.Mask.padding(lengths)}, visible)


def _documents(q: Tensor) -> SizedRule:
    ids = torch.arange(q.shape[2], device=q.device) * 3 // q.shape[2]
    visible = problems.all_of(problems.causal, problems.documents(ids))
    return SizedRule(lambda: {"causal": True, "mask": hw.Mask.documents(ids)}, visible)


def _softcap(q: Tensor) -> SizedRule:
    return SizedRule(lambda: {"causal": True, "softcap": CAP}, problems.causal, True, softcap=CAP)


def _sinks(q: Tensor) -> SizedRule:
    column = torch.randn(q.shape[1]).to(q.device, q.dtype)
    return SizedRule(lambda: {"causal": True, "sinks": column}, problems.causal, True, sinks=column)


RULES: dict[str, tuple[str, Callable[[Tensor], SizedRule]]] = {
    "full": ("full", _full),
    "causal": ("causal=True", _causal),
    "mask_causal": ("Mask.causal()", _mask_causal),
    "window": (f"a window of {WINDOW}", _window),
    "padded": ("Mask.causal() & Mask.padding(..)", _padded),
    "documents": ("3 documents, causal", _documents),
    "softcap": ("a soft cap, causal", _softcap),
    "sinks": ("sinks, causal", _sinks),
}


def called(sizes: Sizes, device: torch.device, dtype: torch.dtype, rule: str) -> Prepared:
    """Compare calls with one rule; the returned map is not used."""
    plain = problems.make(sizes, device, dtype)
    call_rule = RULES[rule][1](plain.q)
    problem = replace(plain, visible=call_rule.visible, softcap=call_rule.softcap, sinks=call_rule.sinks)
    (q, k, v), rows = problem.qkv, problems.some_rows(problem)
    mask = None if call_rule.visible is None or call_rule.is_causal else problem.mask()

    def part(output: Tensor) -> Values:
        return {"output": output[:, :, rows]}

    alike = call_rule.softcap is None and call_rule.sinks is None
    peer = SDPA if alike else SDPA_CAUSAL
    arms = {
        OURS: lambda: hw.attention(q, k, v, **call_rule.options())[0],
        peer: lambda: sdpa(q, k, v, attn_mask=mask, is_causal=call_rule.is_causal),
    }
    pinned: dict[str, Arm] = {name: Pinned(arm, torch.inference_mode) for name, arm in arms.items()}
    truth: Callable[[], Values] = lambda: {"output": problem.output(rows)}  # noqa: E731
    if alike:
        return Prepared(pinned, truth, part)
    causal = replace(plain, visible=problems.causal)
    apart = {peer: Apart(lambda: {"output": causal.output(rows)}, part)}
    return Prepared(pinned, truth, part, lambda: {"output": problem.output(rows, dtype)}, apart)
