"""What a page holds, as one JSON object: every tensor exactly, every word as data."""

from __future__ import annotations

import base64
import ctypes
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import ArgumentError
from .mask_sentences import POLARITY

if TYPE_CHECKING:
    from .explanation import Explanation

LARGEST = 20 * 2**20  # bytes of a page
ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}
PAIRS = 5  # numbers kept for every pair of query and key: scores, scaled, hidden, weights, your weights


def check_size(B: int, H: int, T: int, S: int, E: int) -> None:
    """Raise where a page would be too large.

    Raises:
        ArgumentError: it would be.
    """
    size = _encoded(8 * B * (PAIRS * H * T * S + 6 * (T + S) * E))
    if size > LARGEST:
        raise ArgumentError(
            f"query and key must be short enough for a page of {LARGEST >> 20} MB: batch {B}, {H} heads, "
            f"{T} queries and {S} keys would make {size / 2**20:.0f} MB; slice them first, query[:1, :64] "
            "and key[:1, :64]"
        )


def page_json(explanation: Explanation) -> str:
    """The data of a page, safe inside a script element."""
    text = json.dumps(_contents(explanation), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.translate(ESCAPES)


def _contents(explanation: Explanation) -> dict[str, object]:
    state = explanation.expected
    B, T, E = state.query.shape
    sizes = {
        "B": B, "T": T, "S": state.key.shape[1], "H": state.num_heads, "D": state.q.shape[-1],
        "Dv": state.v.shape[-1], "E": E,
    }  # fmt: skip
    expected = dict(explanation.fields)
    if state.given.mask is not None:
        expected["mask"] = state.given.mask
    weights = {f"w_{name}": getattr(state.weights, name) for name in "qkvo"}
    weights |= {f"b_{name}": getattr(state.weights, f"{name}_bias") for name in "qkvo"}
    yours = explanation.yours
    rest = sum(_bytes(x) for x in [*expected.values(), *yours.values()])
    held = rest + sum(map(_bytes, weights.values())) <= LARGEST
    notes = list(explanation.notes)
    if not held:
        notes.append(
            "The weights are too many for this page, so the sums behind the projections are not shown."
        )
    return {
        "name": explanation.name,
        "sizes": sizes,
        "itself": state.query is state.key and state.key is state.value,
        "scale": explanation.scale,
        "labels": {"query": explanation.query_labels, "key": explanation.key_labels},
        "polarity": POLARITY,
        "masks": None if state.given.mask is None else [asdict(one) for one in explanation.masks],
        "steps": [_step(step) for step in explanation.steps],
        "first": None if explanation.first is None else explanation.steps.index(explanation.first),
        "sample": explanation.batch,
        "head": explanation.head,
        "verdict": explanation.verdict,
        "right": explanation.first is None and explanation.checked is None,
        "faults": [
            {
                "title": one.title,
                "formula": one.formula,
                "right": one.right,
                "line": one.line,
                "text": one.text,
            }
            for one in explanation.faults
        ],
        "notes": notes,
        "allowed": explanation.allowed,
        "expected": _packed(expected | weights if held else expected),
        "yours": _packed(yours),
    }


def _step(step: Any) -> dict[str, Any]:
    plain = {name: getattr(step, name) for name in ("key", "title", "formula", "words", "shapes", "status")}
    return plain | {
        "error": None if step.error is None else f"{step.error:.1e}",
        "flows": [asdict(flow) for flow in step.flows],
    }


def _packed(tensors: dict[str, Tensor]) -> dict[str, object]:
    """Shape, kind and bytes of each; a tensor that is another one is named after it."""
    packed: dict[str, object] = {}
    first: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    for name, tensor in tensors.items():
        same = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if same in first and torch.equal(tensors[first[same]], tensor):
            packed[name] = {"same": first[same]}
            continue
        first.setdefault(same, name)
        kind, numbers = _kind(tensor)
        packed[name] = {
            "shape": list(tensor.shape),
            "kind": kind,
            "base64": base64.b64encode(_memory(numbers.contiguous())).decode(),
        }
    return packed


def _memory(tensor: Tensor) -> bytes:
    """Its bytes as they lie there; numpy, which has a way to say so, need not be installed."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _kind(tensor: Tensor) -> tuple[str, Tensor]:
    """float32 where that loses nothing, float64 otherwise; bytes for a mask."""
    if tensor.dtype == torch.bool:
        return "u1", tensor.to(torch.uint8)
    narrow = tensor.to(torch.float32)
    exact = torch.equal(narrow.to(tensor.dtype).nan_to_num(0.0), tensor.nan_to_num(0.0))
    return ("f4", narrow) if exact else ("f8", tensor.to(torch.float64))


def _bytes(tensor: Tensor) -> int:
    return _encoded(tensor.numel() * (1 if tensor.dtype == torch.bool else _kind(tensor)[1].element_size()))


def _encoded(size: int) -> int:
    return size * 4 // 3
