"""Checking what users hand over, once, at the door: from loose arguments to `Scores`.

Letters: B batch, T query_len, S key_len, H num_heads, Hk num_kv_heads, D head_dim, Dv value_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .engines.scores import Scores
from .errors import ArgumentError, MaskError, ShapeError
from .masks import CAUSAL, Mask, mask_of_call
from .scoring import Alibi, Scoring

__all__ = ["autocasting", "check_dropout", "scores_from", "under_autocast", "window_rule"]

SHAPES = {"q": "[B, H, T, D]", "k": "[B, Hk, S, D]", "v": "[B, Hk, S, Dv]"}


def scores_from(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | Alibi | None = None,
    sinks: Tensor | None = None,
) -> Scores:
    """The scores these arguments describe.

    Raises:
        ShapeError: wrong number of dimensions, sizes that disagree, an empty tensor.
        ArgumentError: dtypes or devices that differ; a bad softcap, bias or sinks.
        MaskError: a mask that does not fit, or cannot mean what it seems to mean; causal or window with so
            many more queries than keys that some see none.
    """
    _check_tensors(q, k, v)
    B, H, T, D = q.shape
    S = k.shape[2]
    rules = mask_of_call(mask, B, T)
    if causal:
        rules = CAUSAL if mask is None else rules & CAUSAL
    if window is not None:
        rules = rules & window_rule(window)
    if (causal or window is not None) and not torch.compiler.is_compiling() and T > S:
        _check_sight(T, S, causal, window)  # traced sizes are not compared: a graph is for all lengths
    rules = rules.bind(B, H, T, S)
    scoring = Scoring.of(D, scale=scale, softcap=softcap, bias=bias, sinks=sinks)
    if bias is not None or sinks is not None:
        scoring.check(B, H, T, S)
    if mask is not None or bias is not None or sinks is not None:
        _check_devices(q, rules, scoring)
    return Scores(q, k, rules, scoring)


def window_rule(window: int | tuple[int, int]) -> Mask:
    """The argument `window`: a number of keys, or a pair (before, after)."""
    if isinstance(window, (tuple, list)):
        return Mask.window(left_right=window)
    return Mask.window(window)


def _check_sight(T: int, S: int, causal: bool, window: int | tuple[int, int] | None) -> None:
    """Raise `MaskError` where queries stand so far before the first of fewer keys that they see none."""
    pair = isinstance(window, (tuple, list))
    blind = T - S - (window[1] if isinstance(window, (tuple, list)) and not causal else 0)
    if blind <= 0:
        return
    which = "query 0 sees" if blind == 1 else f"queries 0 to {blind - 1} see"
    name, rule, other = f"window={window}", f"Mask.window({'left_right=' if pair else ''}{window})", ""
    if causal:
        name, rule = "causal=True", "Mask.causal()"
        other = f", or mask=torch.ones({T}, {S}).tril() to begin at the first key, as torch's is_causal does"
    raise MaskError(
        f"{name} must show every query a key: {which} none of {S} keys, for the last of {T} queries stands "
        f"beside the last key; use mask={rule} in its place if their output shall be 0{other}"
    )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ArgumentError(f"{name} must be a tensor: got {type(x).__name__}; use torch.as_tensor")
        if x.ndim != 4:
            raise ShapeError(
                f"{name} must have 4 dimensions {SHAPES[name]}: got {x.ndim}, {list(x.shape)}; "
                "add batch and head dimensions of size 1 where there are none"
            )
        if not x.is_floating_point():
            raise ArgumentError(f"{name} must be floating point: got {x.dtype}; use {name}.float()")
        if 0 in x.shape:
            raise ShapeError(
                f"{name} must not be empty: got {list(x.shape)} for {SHAPES[name]}; "
                "skip the call where there is nothing to attend to"
            )
        if x.dtype != q.dtype:
            raise ArgumentError(
                f"{name} must have the dtype of q: {x.dtype} and {q.dtype}; use {name}.to(q.dtype)"
            )
        if x.device != q.device:
            raise ArgumentError(
                f"{name} must be on the device of q: {x.device} and {q.device}; use {name}.to(q.device)"
            )
    _agree("q", "k", "batch", q.shape[0], k.shape[0])
    _agree("q", "k", "head_dim", q.shape[3], k.shape[3])
    _agree("k", "v", "batch", k.shape[0], v.shape[0])
    _agree("k", "v", "num_kv_heads", k.shape[1], v.shape[1])
    _agree("k", "v", "key_len", k.shape[2], v.shape[2])
    H, Hk = q.shape[1], k.shape[1]
    if H % Hk:
        fitting = [n for n in range(1, H + 1) if H % n == 0]
        raise ShapeError(
            f"num_heads must be a multiple of num_kv_heads: {H} = {H // Hk} * {Hk} + {H % Hk}; "
            f"use one of {', '.join(map(str, fitting))} key heads"
        )


def _agree(a: str, b: str, what: str, size_a: int, size_b: int) -> None:
    if size_a != size_b:
        raise ShapeError(
            f"{a} and {b} must agree in {what}: {size_a} and {size_b}; "
            f"shapes are {a} {SHAPES[a]}, {b} {SHAPES[b]}"
        )


def _check_devices(q: Tensor, mask: Mask, scoring: Scoring) -> None:
    for name, value in (*mask.tensors.items(), *scoring.tensors.items()):
        if value.device != q.device:
            kind = ArgumentError if name in scoring.tensors else MaskError
            name = {"keys": "lengths", "queries": "query_lengths", "allowed": "mask"}.get(name, name)
            raise kind(f"{name} must be on the device of q: {value.device} and {q.device}; use .to(q.device)")


def check_dropout(dropout: float) -> None:
    """Raise `ArgumentError` unless 0 <= dropout < 1."""
    if isinstance(dropout, Tensor) or not hasattr(dropout, "__float__") or not 0 <= dropout < 1:
        raise ArgumentError(
            f"dropout must be at least 0 and below 1: got {dropout}; it is the share of weights dropped"
        )


def autocasting(x: Tensor) -> bool:
    """Whether autocast is on where x is."""
    kind = "cpu" if x.is_cpu else x.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def under_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype where autocast is on, as torch's own attention takes them."""
    if not all(isinstance(x, Tensor) for x in tensors):
        return tensors  # the checks that follow say so
    if not autocasting(tensors[0]):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)
