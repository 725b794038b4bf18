"""Half precision, and whether an output has the dtype of its input."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from ..evidence import Finding
from .calling import Caller
from .comparing import cast, plain, share_off, some_mask
from .failing import CAUGHT, problem_of
from .subject import cast_loose
from .surroundings import by_default

__all__ = ["dtype_kept", "half"]


def _in(dtype: torch.dtype, caller: Caller) -> object:
    """A copy in another precision, with the plain tensors it keeps, which `Module.to` leaves in float64."""
    other = copy.deepcopy(caller.subject.body).to(dtype)
    cast_loose(other, dtype, caller.subject.apart)
    return other


def half(caller: Caller, right: bool) -> Iterator[Finding]:
    """bfloat16 and float16 run, stay finite and come near."""
    body = caller.subject.body
    if caller.plan.as_numpy or caller.subject.unregistered:
        return
    mask = some_mask(caller)
    inputs = plain(caller)
    with torch.no_grad():
        exact = caller.call(*inputs, mask).output.detach()
    for dtype, name, near in ((torch.bfloat16, "bfloat16", 0.1), (torch.float16, "float16", 0.02)):
        other = _in(dtype, caller) if isinstance(body, nn.Module) else body
        weights = {k: p.detach().to(dtype) for k, p in caller.subject.parameters.items()}
        small = replace(caller, subject=replace(caller.subject, body=other, parameters=weights, calm=False))
        query, key, value = cast(inputs, dtype)
        try:
            with torch.no_grad(), by_default(torch.float32):
                output = small.call(query, key, value, mask).output.detach()
        except Warning as error:  # a filter makes errors of them: nothing is known of the code itself
            yield Finding(name, "unknown", f"a warning was raised as an error: {type(error).__name__}")
            continue
        except CAUGHT as error:
            problem = problem_of(error, "call", caller.subject.files)
            overflow = "overflow" in problem.message
            detail = f"raises {problem.kind}: {problem.message}"
            fault = "overflow in half" if overflow else "wrong in half precision"
            yield Finding(name, "wrong", detail, fault, problem.line)
            continue
        if not right:
            continue
        off = share_off(output, exact)
        if not bool(output.isfinite().all()):
            yield Finding(name, "wrong", "the output is not finite", "wrong in half precision")
        elif off > near:
            yield Finding(
                name, "wrong", f"the output is off by {off:.0%} of its size", "wrong in half precision"
            )
        else:
            yield Finding(name, "right", f"within {off:.1%} of float64")


def dtype_kept(caller: Caller) -> Iterator[Finding]:
    """float32 in, float32 out."""
    body = caller.subject.body
    if not isinstance(body, nn.Module) or caller.plan.as_numpy or caller.subject.unregistered:
        return
    other = _in(torch.float32, caller)
    small = replace(caller, subject=replace(caller.subject, body=other, calm=False))
    query, key, value = cast(plain(caller), torch.float32)
    try:
        with torch.no_grad(), by_default(torch.float32):
            output = small.call(query, key, value).output
    except CAUGHT as error:
        problem = problem_of(error, "call", caller.subject.files)
        yield Finding("output dtype", "wrong", f"in float32 it raises {problem.message}", None, problem.line)
        return
    if output.dtype == torch.float32:
        yield Finding("output dtype", "right", "float32 in, float32 out")
    else:
        yield Finding("output dtype", "wrong", f"float32 in, {str(output.dtype).removeprefix('torch.')} out")
