"""Where a wrong output is right all the same, and where it parts from the truth: read off the numbers alone.

Letters: B batch, T query_len, E width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .diagnose import INFORMATION, NEAR, difference
from .evidence import Call, Evidence
from .recipe import State


def beside_truth(evidence: Evidence) -> list[tuple[Call, State]]:
    """Every answered call that has one right answer, with it; none where the recipe cannot be run."""
    found = []
    for call in evidence.calls:
        if call.output is None or call.probe in INFORMATION:
            continue
        truth = evidence.truth(call)
        if truth is None:
            return []
        found.append((call, truth))
    return found


def where_right(evidence: Evidence) -> list[str]:
    """Which positions, samples and heads of a wrong probe are right."""
    said = []
    for call, truth in beside_truth(evidence):
        assert call.output is not None
        if difference(call.output, truth.output) <= NEAR or call.output.shape != truth.output.shape:
            continue
        off = (call.output.double() - truth.output).abs().nan_to_num(torch.inf)  # [B, T, E]
        right = off <= NEAR * float(truth.output.nan_to_num(0).abs().max())
        positions, samples = _numbers(right.all(2).all(0)), _numbers(right.all(2).all(1))
        B, T, _ = right.shape
        if 0 < len(positions) < T:
            said.append(f"probe {call.probe}: right at position{_list(positions)} of {T}")
        elif 0 < len(samples) < B:
            said.append(f"probe {call.probe}: right for sample{_list(samples)} of {B}")
        if call.weights is not None and call.weights.shape == truth.p.shape:
            close = (call.weights.double() - truth.p).abs() <= NEAR
            heads = _numbers(close.all(3).all(2).all(0))
            if 0 < len(heads) < evidence.num_heads:
                said.append(f"probe {call.probe}: the weights of head{_list(heads)} are right")
            elif len(heads) == evidence.num_heads:
                said.append(f"probe {call.probe}: all weights are right, so it goes wrong after the softmax")
    return list(dict.fromkeys(said))


def _numbers(yes: Tensor) -> list[int]:
    return [int(i) for i in yes.nonzero().flatten()]


def _list(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f" {numbers[0]} alone"
    return "s " + ", ".join(map(str, numbers))


def first_by_weights(evidence: Evidence) -> str | None:
    """Without a diagnosis: whether the weights the code returned are right tells on which side to look."""
    for call, truth in beside_truth(evidence):
        if call.weights is None or call.weights.shape != truth.p.shape:
            continue
        if difference(call.output, truth.output) <= NEAR:
            continue
        if difference(call.weights, truth.p) > NEAR:
            return f"the weights (probe: {call.probe})"
        return f"after the weights, which are right (probe: {call.probe})"
    return None


def empty_row(evidence: Evidence) -> str | None:
    """What a query gets that may see nothing, where that was asked."""
    call = evidence.call("empty row")
    if call is None or call.output is None or call.given.mask is None:
        return None
    rows = call.output[~call.given.mask.any(-1)]
    if bool(rows.isnan().all()):
        return "NaN, as a softmax over -inf alone does"
    if bool((rows == 0).all()):
        return "0"
    return "finite numbers: a large negative number in place of -inf makes its weights uniform, or they are 0"
