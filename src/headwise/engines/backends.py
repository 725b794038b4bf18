"""The table of backends, in the order in which they are considered for the first pass.

`auto` takes the first that can run a call. A backend requested by name runs or raises; no other replaces it.
Two of them, in our own Triton kernels on a GPU, are here: `decode`, one query over many keys, and `triton`,
which supports every rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ArgumentError, BackendUnavailable, nearest
from .backend import ON_THE_WAY, Backend, Call, Gradients, Runner
from .fused import Fused, adds, in_one_call
from .gpu.launches import FEW_QUERIES, LARGEST_HEAD, cannot, interpreted
from .gradients import ScoreGradients
from .kernels import CPU_FLASH, CUDA_EFFICIENT, CUDA_FLASH, CUDNN, HALF, Kernel
from .plain import PLAIN, TILES, sinks_gradient
from .scores import Scores

WORTH_IT = 2**24  # bytes of keys and values, from which `decode` pays
MOST_ROWS = 64  # query heads that share a key head

LARGEST_FLOAT32_HEAD = 128  # channels of float32: more do not fit the registers


class TritonBackend(Backend):
    """Base of both: they run on a GPU (in tests in Triton's interpreter); sizes and rules decide."""

    devices = ("cuda",)

    def why_not(self, call: Call) -> str | None:
        return self.cannot(call) if interpreted() else super().why_not(call)

    def verdict_holds(self, call: Call) -> bool:
        return True


class Decode(TritonBackend):
    """Keys and values read once, for any length, with padding, windows, soft cap, ALiBi and sinks."""

    name = "decode"

    def cannot(self, call: Call) -> str | None:
        """Return why it cannot run the call, such as rules that are tensors over queries and keys."""
        scores, v = call.scores, call.v
        mask, scoring = scores.mask, scores.scoring
        if scores.q.shape[2] != 1:
            return f"it takes one query, not {scores.q.shape[2]}"
        if call.dropout or call.plain_because:
            return call.matrix_because
        if scoring.bias is not None:
            return "it takes no bias"
        if not mask.is_padded_band or min(mask.left or 0, mask.right or 0) < 0:
            return "it takes no mask except padding and a band that includes the query's own position"
        if v.shape[-1] > LARGEST_HEAD:
            return f"it takes value_dim up to {LARGEST_HEAD}, not {v.shape[-1]}"
        if scores.group > MOST_ROWS:
            return f"it takes up to {MOST_ROWS} heads that share keys, not {scores.group}"
        return cannot(scores)

    def reluctance(self, call: Call) -> str | None:
        """Return why torch's flash kernel is faster: plain calls this small end before ours is launched."""
        scores = call.scores
        mask, scoring = scores.mask, scores.scoring
        plain = mask.is_band and mask.left is None and scoring.softcap is None and not scoring.has_tensors
        if not plain or scores.q.dtype not in HALF or interpreted():
            return None
        size = scores.k.nbytes + call.v.nbytes
        if size >= WORTH_IT:
            return None
        return f"it is faster only from {WORTH_IT} bytes of keys and values on, not with {size}"

    def runner(self, call: Call) -> Runner:
        """Return the functions of its kernels, which store their own plans."""
        from .gpu.single_query import attend

        def backward(scores: Scores, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor) -> Gradients:
            return TILES.backward(Call(scores, v), out, lse, grad)

        return Runner(lambda scores, v: (*attend(scores, v), None), backward)

    def description(self, call: Call) -> str:
        return "the keys cut into parts, by triton"

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        from .gpu.single_query import attend

        return attend(call.scores, call.v)

    def backward(self, call: Call, out: Tensor, lse: Tensor, grad: Tensor) -> Gradients:
        """Compute gradients in tiles: generation needs none."""
        return TILES.backward(call, out, lse, grad)


class OwnKernels(TritonBackend):
    """Any mask, bias, soft cap and sinks; hidden tiles are never loaded, and no T x S tensor is allocated."""

    name = "triton"
    gives_bias_gradient = True
    collects = ON_THE_WAY

    def cannot(self, call: Call) -> str | None:
        scores, scoring, v = call.scores, call.scores.scoring, call.v
        if call.dropout or call.plain_because:
            return call.matrix_because
        if not scoring.scale > 0:  # otherwise the largest product would not be the largest score
            return f"it takes a scale above 0, not {scoring.scale:g}"
        if v.shape[-1] > LARGEST_HEAD:
            return f"it takes value_dim up to {LARGEST_HEAD}, not {v.shape[-1]}"
        widest = max(scores.q.shape[-1], v.shape[-1])
        if scores.q.dtype == torch.float32 and widest > LARGEST_FLOAT32_HEAD:
            return f"it takes float32 with head_dim and value_dim up to {LARGEST_FLOAT32_HEAD}, not {widest}"
        if call.bias_gradient:
            if scoring.relative is not None:
                return "it takes no relative bias if a gradient of a bias is needed"
            if scoring.bias is not None and scoring.bias.shape[2:] != scores.shape[2:]:
                shape = list(scoring.bias.shape)
                return f"it computes no gradient of a bias {shape} that queries or keys share"
        # in a graph the device is unknown: it is checked when the graph runs
        return None if torch.compiler.is_compiling() else cannot(scores)

    def reluctance(self, call: Call) -> str | None:
        """Return where torch's own kernels are faster: full, or causal on a square, without more; float32."""
        scores, scoring = call.scores, call.scores.scoring
        if interpreted() or (call.collect and self.can_collect(call)) or scoring.softcap is not None:
            return None
        if scores.q.dtype not in HALF:
            if call.bias_gradient or not in_one_call(scores):
                return None
            return "torch's efficient kernel takes this float32 call, and compiling ours takes longer"
        if not in_one_call(scores) or adds(scores) or scoring.sinks is not None:
            return None
        return "torch's kernels are faster without a mask and with a causal one"

    def runner(self, call: Call) -> Runner:
        """Return the launches of such calls, with all their arguments but tensors."""
        from .gpu import attend, attend_backward

        names, back_by = self.collected(call), attend_backward.planned(call.bias_gradient)

        def backward(scores: Scores, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor) -> Gradients:
            grads = back_by(scores, v, out, lse, grad)
            back = ScoreGradients(grads.q, grads.k, grads.bias, grads.slopes)
            return back, grads.v, sinks_gradient(scores, out, lse, grad)

        return Runner(attend.planned(call.scores, call.v, names), backward, names)

    def description(self, call: Call) -> str:
        return "tile by tile in one kernel"

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        from .gpu.attend import attend
        from .gpu.request import Prepared

        out, lse, _ = attend(Prepared(call.scores), call.v)
        return out, lse

    def can_collect(self, call: Call) -> bool:
        """Return True for at least one requested statistic, unless a few queries are quickly walked again."""
        return call.scores.shape[2] > FEW_QUERIES and any(name in self.collects for name in call.collect)

    def forward_and_collect(self, call: Call, names: tuple[str, ...]) -> tuple[Tensor, Tensor, Tensor]:
        from .gpu.attend import attend
        from .gpu.request import Prepared

        out, lse, rows = attend(Prepared(call.scores), call.v, names)
        assert rows is not None, "asked for by name"
        return out, lse, rows

    def backward(self, call: Call, out: Tensor, lse: Tensor, grad: Tensor) -> Gradients:
        """Compute gradients without atomics, so that they are bitwise the same every time."""
        from .gpu.attend_backward import backward
        from .gpu.request import Prepared

        grads = backward(Prepared(call.scores, lse), call.v, out, grad, call.bias_gradient)
        back = ScoreGradients(grads.q, grads.k, grads.bias, grads.slopes)
        return back, grads.v, sinks_gradient(call.scores, out, lse, grad)


# The table


BACKENDS: tuple[Backend, ...] = (
    Decode(),
    OwnKernels(),
    Fused("cudnn", CUDNN),
    Fused("flash", CPU_FLASH, CUDA_FLASH),
    Fused("efficient", CUDA_EFFICIENT),
    TILES,
    PLAIN,
)


# the names in torch, and in libraries based on it, for our backends; `SDPBackend.MATH` as well
TORCHS = {
    "math": "plain",
    "eager": "plain",
    "flash_attention": "flash",
    "mem_efficient": "efficient",
    "efficient_attention": "efficient",
    "cudnn_attention": "cudnn",
    "sdpa": "auto",
}


def backend_named(name: str) -> Backend:
    """Return the backend of this name.

    Raises:
        ArgumentError: no such backend.
    """
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    advice = nearest(str(name), ["auto", *(b.name for b in BACKENDS)])
    torchs = TORCHS.get(str(name).rpartition(".")[2].lower())
    if torchs is not None:
        advice = f"use {torchs!r} for torch's {name}"
    raise ArgumentError(f"backend must be auto or a known name: got {name!r}; {advice}")


def verdicts(call: Call) -> dict[str, str | None]:
    """Return every backend's verdict: None if it can run the call and would, else why not."""
    return {backend.name: verdict(backend, call) for backend in BACKENDS}


def verdict(backend: Backend, call: Call) -> str | None:
    """Return why a backend does not run a call unless requested by name; None if it does."""
    reason = backend.why_not(call)
    return backend.reluctance(call) if reason is None else reason


def choose(call: Call, name: str = "auto") -> Backend:
    """Return the backend that runs this call.

    Raises:
        ArgumentError: no backend of that name.
        BackendUnavailable: the backend named cannot run the call.
    """
    if name == "auto":
        for backend in BACKENDS:
            if verdict(backend, call) is None:
                return backend
    backend = backend_named(name)
    reason = backend.why_not(call)
    if reason is not None:
        others = [other for other, why_not in verdicts(call).items() if why_not is None]
        raise BackendUnavailable(
            f'backend="{name}" cannot run this call: {reason}. Others that can: {", ".join(others)}; '
            'use backend="auto" to let headwise choose'
        )
    return backend


def bare_kernel(call: Call, q: Tensor, v: Tensor) -> tuple[Kernel | None, bool]:
    """Return the kernel of the first backend that takes the call without padding or repeated heads.

    And whether that holds for all calls of this kind (`Backend.verdict_holds`).

    Where a step around it takes longer than attention, a kernel without help is worth more than a faster one.
    """
    holds = True
    for backend in BACKENDS:
        holds = holds and backend.verdict_holds(call) is not False
        if verdict(backend, call) is None:
            kernel = backend.bare(q, v)
            if kernel is not None:
                return kernel, holds
    return None, False


def note(call: Call) -> None:
    """Call `note` of the backends that count calls on this device, whichever backend runs the call."""
    device = call.v.device.type
    for backend in BACKENDS:
        if device in backend.counts_on:
            backend.note(call)
