"""torch's fused kernels, one entry each: forward with lse, backward, what it takes, what it requires.

They are called below `F.scaled_dot_product_attention`, because that gives no lse, forbids a mask beside
`is_causal` (the kernels do not), and cannot take an lse for its backward. The last point is what makes parts
and sinks exact: the backward of any part of a softmax, given the *whole* row's output and lse, is that part's
exact share of the gradient.

A kernel that plans (cuDNN, up to 400 ms for each new shape) has a guard against planning again and again. A
run over fixed shapes plans once and is fastest. A run whose shapes keep changing (packed batches, growing
contexts) plans at every step; there torch's flash kernel, which needs no plan, is several times faster.

An operator can be called in two ways: as an overload, which compilers and tensors of other classes support,
and, for some forwards, as a function of torch's own, which reads its arguments some microseconds faster.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

aten = torch.ops.aten
# Each forward twice: the operator, and torch's Python function of it, which is faster in eager calls (the
# operator where there is none).
OF_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
OF_FLASH = aten._scaled_dot_product_flash_attention.default
OF_CUDNN = aten._scaled_dot_product_cudnn_attention.default
OF_EFFICIENT = aten._scaled_dot_product_efficient_attention.default
CPU_EAGER = getattr(torch, "_scaled_dot_product_flash_attention_for_cpu", OF_CPU)
FLASH_EAGER = getattr(torch, "_scaled_dot_product_flash_attention", OF_FLASH)
CUDNN_EAGER = getattr(torch, "_scaled_dot_product_cudnn_attention", OF_CUDNN)
EFFICIENT_EAGER = getattr(torch, "_scaled_dot_product_efficient_attention", OF_EFFICIENT)

HALF = (torch.float16, torch.bfloat16)
FEWEST = 32  # keys; no CPU of today processes more of its narrowest numbers at a time
FLOATS = (torch.float32, torch.float64, *HALF)

Band = tuple[int | None, int | None]  # keys seen before and after the query; None: all of them
FULL: Band = (None, None)
CAUSAL: Band = (None, 0)
MOST_CHANNELS = 256  # of a head: with more, torch's own function computes the full matrix

# The arguments of a kernel: q [B, H, T, D]; k and v [B, Hk, S, D]; mask and bias, a float tensor added to the
# scaled product; the band; the scale. A plain tuple, since a class would cost a microsecond.
KernelCall = tuple[Tensor, Tensor, Tensor, Tensor | None, Band, float]
Output = tuple[Tensor, Tensor]  # output, lse [B, H, T] in natural log
Three = tuple[Tensor, Tensor, Tensor]  # gradients of q, k, v
KernelFunction = Callable[[KernelCall], Output]
Backward = Callable[[KernelCall, Tensor, Tensor, Tensor], Three]  # call, output, lse, output's gradient


class ShapeChurn:
    """Counts how many of the recent calls came with a shape not seen before.

    Example:
        >>> churn = ShapeChurn(window=8, most=3)
        >>> for length in (5, 5, 5, 6, 7):
        ...     churn.note(length)
        >>> churn.reason(5) is None  # planned already
        True
        >>> print(churn.reason(8))
        3 of the last 5 calls had a new shape, and it needs a plan for each
    """

    def __init__(self, window: int = 64, most: int = 16, remembered: int = 4096, patience: int = 128) -> None:
        self.window, self.most, self.remembered, self.patience = window, most, remembered, patience
        self._planned: OrderedDict[Hashable, None] = OrderedDict()
        self._fresh: list[bool] = []
        self._last: Hashable = None
        self._in_a_row = 0

    def note(self, shape: Hashable) -> None:
        """Record a call with this shape."""
        self._fresh.append(shape not in self._planned)
        del self._fresh[: -self.window]
        self._planned[shape] = None
        self._planned.move_to_end(shape)
        while len(self._planned) > self.remembered:
            self._planned.popitem(last=False)

    def again(self, shape: Hashable) -> bool:
        """Record another call with this shape; return False if the shape is no longer stored."""
        if shape not in self._planned:
            return False
        self._fresh.append(False)  # `note`, but the shape, slow to hash, is looked up half as often
        del self._fresh[: -self.window]
        self._planned.move_to_end(shape)
        return True

    def reason(self, shape: Hashable) -> str | None:
        """Return why a call with this shape should use another backend; None if it should not."""
        fresh = sum(self._fresh)
        if shape in self._planned or fresh < self.most:
            return None
        return f"{fresh} of the last {len(self._fresh)} calls had a new shape, and it needs a plan for each"

    def note_one_query(self, shape: Hashable) -> None:
        """Record a call of one query with this shape."""
        self._in_a_row = self._in_a_row + 1 if shape == self._last else 1
        self._last = shape

    def too_early(self, shape: Hashable) -> str | None:
        """Return why a call of one query should wait; None if its shape was so frequent that a plan pays.

        In generation the number of keys grows by one in each step, which has one call per layer.
        """
        times = self._in_a_row if shape == self._last else 0
        if times >= self.patience:
            return None
        return (
            f"it needs a plan for each number of keys of one query: {times} calls in a row had this number, "
            f"and a plan pays from {self.patience} on"
        )


@dataclass(frozen=True)
class Kernel:
    """One fused kernel and what it can take."""

    name: str
    device: str
    dtypes: tuple[torch.dtype, ...]
    forward: KernelFunction
    backward: Backward
    max_head_dim: int | None = None
    channels: int = 8  # head_dim is padded to a multiple of this
    takes_added: bool = True
    takes_groups: bool = True  # fewer key heads than query heads
    takes_bands: bool = False  # any band, not only causal on a square
    takes_parts: bool = True  # a call may be cut for it
    folds: bool = False  # of one query: heads that share a key head are passed as rows of one head
    takes_one_key: bool = True
    deterministic: bool = True  # bitwise the same every time
    insists: bool = False  # its `backward` must be used, not torch's own formula
    capability: tuple[int, int] | None = None  # of a CUDA device, at least
    switch: Callable[[], bool] | None = None  # torch's own, by which users turn it off
    churn: ShapeChurn | None = None  # of a kernel that plans: counts shapes that keep changing

    def is_welcome(self) -> bool:
        """Return True if neither the user's switches nor determinism exclude it, whatever the call."""
        return (self.switch is None or self.switch()) and (
            self.deterministic or not torch.are_deterministic_algorithms_enabled()
        )

    def added_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of mask and bias: the CPU kernel takes float32 beside half precision."""
        return torch.float32 if self.device == "cpu" and dtype in HALF else dtype


def _is_eager(q: Tensor) -> bool:
    """Return True for an eager call on tensors of torch's own class."""
    return type(q) is Tensor and not torch.compiler.is_dynamo_compiling()


def _cpu_forward(call: KernelCall) -> Output:
    q, k, v, added, band, scale = call
    now = not torch.compiler.is_dynamo_compiling()
    run = CPU_EAGER if now and type(q) is Tensor else OF_CPU  # `_is_eager`, written out
    out, lse = run(q, k, v, 0.0, band == CAUSAL, attn_mask=added, scale=scale)
    if now and type(lse) is Tensor and k.shape[2] < FEWEST:
        return _restore_nan(q, k, out, lse)
    return out, lse


def _restore_nan(q: Tensor, k: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Put NaN back where torch's CPU kernel lost it.

    For fewer keys than a vector register holds it returns output 0 and lse 0 for a row of NaN scores.
    """
    if int(lse.count_nonzero()) == lse.numel():  # takes a fifth of the time of any other test
        return out, lse
    rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])  # [B, Hk, G * T, D]
    nan = (rows @ k.transpose(-2, -1)).isnan().all(-1).view(lse.shape) & (lse == 0)  # [B, H, T]
    return out.masked_fill(nan[..., None], torch.nan), lse.masked_fill(nan, torch.nan)


def _cpu_backward(call: KernelCall, out: Tensor, lse: Tensor, grad: Tensor) -> Three:
    q, k, v, added, band, scale = call
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        grad, q, k, v, out, lse, 0.0, band == CAUSAL, attn_mask=added, scale=scale
    )
    return dq, dk, dv


def _flash_forward(call: KernelCall) -> Output:
    q, k, v, added, band, scale = call
    assert added is None
    if band == FULL or (band == CAUSAL and q.shape[2] == k.shape[2]):
        run = FLASH_EAGER if _is_eager(q) else OF_FLASH
        out, lse, *_ = run(q, k, v, 0.0, band == CAUSAL, False, scale=scale)
        return out, lse
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, T, H, D], as the kernel below wants it
    out, lse, *_ = aten._flash_attention_forward.default(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, False, False, scale=scale, **window_of(band)
    )
    return out.transpose(1, 2), torch.where(torch.isposinf(lse), -torch.inf, lse)


def _flash_backward(call: KernelCall, out: Tensor, lse: Tensor, grad: Tensor) -> Three:
    q, k, v, _, band, scale = call
    state, unused = _no_dropout(q, 2)
    grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, q, k, v, out))
    dq, dk, dv = aten._flash_attention_backward.default(
        grad, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, False, state, unused,
        scale=scale, **window_of(band),
    )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def window_of(band: Band) -> dict[str, int]:
    """Return a band as the flash kernel's window: -1 for all; aligned with the last key, as ours is."""
    left, right = (-1 if reach is None else reach for reach in band)
    return {"window_size_left": left, "window_size_right": right}


def _cudnn_forward(call: KernelCall) -> Output:
    q, k, v, added, band, scale = call
    run = CUDNN_EAGER if _is_eager(q) else OF_CUDNN
    out, lse, *_ = run(q, k, v, added, True, 0.0, band == CAUSAL, False, scale=scale)
    return out, lse.squeeze(-1)


def _cudnn_backward(call: KernelCall, out: Tensor, lse: Tensor, grad: Tensor) -> Three:
    q, k, v, added, band, scale = call
    seed, offset = _no_dropout(q, 1)
    # torch caches the plan by q, k and v alone: these two must always have the layout that follows from q's
    grad, out = _with_layout_of(q, grad), _with_layout_of(q, out)
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward.default(
        grad, q, k, v, out, lse.unsqueeze(-1), seed, offset, added, None, None, q.shape[2],
        k.shape[2], 0.0, band == CAUSAL, scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def _efficient_forward(call: KernelCall) -> Output:
    q, k, v, added, band, scale = call
    run = EFFICIENT_EAGER if _is_eager(q) else OF_EFFICIENT
    out, lse, *_ = run(q, k, v, _aligned(added, q, k), True, 0.0, band == CAUSAL, scale=scale)
    return out, lse[..., : q.shape[2]]  # the kernel rounds the length up to a multiple of 32


def _efficient_backward(call: KernelCall, out: Tensor, lse: Tensor, grad: Tensor) -> Three:
    q, k, v, added, band, scale = call
    seed, offset = _no_dropout(q, 1)
    grad = grad.contiguous()
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # it reads [B, T, H, D], whatever the strides say
    rounded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)  # weights of 0 there
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward.default(
        grad, q, k, v, _aligned(added, q, k), out, rounded, seed, offset, 0.0,
        [True, True, True, False], band == CAUSAL, scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def _no_dropout(like: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the random state that the backward operators require; none reads it without dropout."""
    state = _zeros(size, like.device) if type(like) is Tensor else like.new_zeros(size, dtype=torch.int64)
    return state, state


@functools.cache
def _zeros(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.int64, device=device)


def _with_layout_of(q: Tensor, x: Tensor) -> Tensor:
    """Return x with its dimensions in memory in the order of q's, without gaps."""
    order, place = _order(q.stride())
    if _is_dense(x.shape, x.stride(), order):
        return x
    return x.permute(order).contiguous().permute(place)


@functools.lru_cache(maxsize=1024)
def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...], order: tuple[int, ...]) -> bool:
    """Return True if the dimensions in that order are dense in memory."""
    step = 1
    for dim in reversed(order):
        if strides[dim] != step:  # also for size 1: a cached plan depends on every stride
            return False
        step *= shape[dim]
    return True


@functools.lru_cache(maxsize=1024)
def _order(strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the dimensions from the outermost in memory to the innermost, and the place of each in it."""
    order = tuple(sorted(range(4), key=lambda dim: (-strides[dim], dim)))
    return order, tuple(order.index(dim) for dim in range(4))


def _aligned(added: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return a mask or bias as the efficient kernel requires: expanded, with rows that start at 16 bytes."""
    if added is None:
        return None
    S = k.shape[2]
    if added.shape[-1] == 1:
        added = added.expand(*added.shape[:-1], S)
    padded = torch.nn.functional.pad(added, (0, -S % 16))[..., :S]
    return padded.expand(q.shape[0], q.shape[1], q.shape[2], S)


CPU_FLASH = Kernel(
    "flash",
    "cpu",
    FLOATS,
    _cpu_forward,
    _cpu_backward,
    channels=1,
    folds=True,
)
CUDA_FLASH = Kernel(
    "flash",
    "cuda",
    HALF,
    _flash_forward,
    _flash_backward,
    max_head_dim=256,
    takes_added=False,
    takes_bands=True,
    capability=(8, 0),
    switch=torch.backends.cuda.flash_sdp_enabled,
)
CUDNN = Kernel(
    "cudnn",
    "cuda",
    HALF,
    _cudnn_forward,
    _cudnn_backward,
    max_head_dim=128,
    takes_parts=False,  # it would plan each part anew
    takes_one_key=False,
    deterministic=False,
    # torch caches the plan of its own backward without the layout of the gradient it was made for, so that
    # another layout gives wrong numbers: `_cudnn_backward` always passes the same one
    insists=True,
    switch=torch.backends.cuda.cudnn_sdp_enabled,
    churn=ShapeChurn(),
)
CUDA_EFFICIENT = Kernel(
    "efficient",
    "cuda",
    (torch.float32, *HALF),
    _efficient_forward,
    _efficient_backward,
    takes_groups=False,
    folds=True,
    switch=torch.backends.cuda.mem_efficient_sdp_enabled,
)
