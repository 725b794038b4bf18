"""torch's fused kernels, each as a pair of plain functions: forward with lse, and backward.

Called below `F.scaled_dot_product_attention`, because that gives no lse, forbids a mask beside `is_causal`
(the kernels do not), and cannot be told the lse to go backward with. The last point is what makes parts and
sinks exact: the backward of any part of a softmax, given the *whole* row's output and lse, is that part's
exact share of the gradient.

`added` is a float tensor added to the scaled product (mask and bias), or None. Shapes: q [B, H, T, D],
k, v [B, Hk, S, D], lse [B, H, T] in natural log.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["CAUSAL", "CPU_FLASH", "CUDA_EFFICIENT", "CUDA_FLASH", "CUDNN", "FULL", "KERNELS", "Kernel"]

aten = torch.ops.aten

HALF = (torch.float16, torch.bfloat16)
FEWEST = 32  # keys; no CPU of today takes more of its narrowest numbers at a time
FLOATS = (torch.float32, torch.float64, *HALF)

Band = tuple[int | None, int | None]  # keys seen before and after the query; None: all of them
FULL: Band = (None, None)
CAUSAL: Band = (None, 0)

Forward = Callable[[Tensor, Tensor, Tensor, Tensor | None, Band, float], tuple[Tensor, Tensor]]
Backward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Band, float],
    tuple[Tensor, Tensor, Tensor],
]


@dataclass(frozen=True)
class Kernel:
    """One fused kernel and what it can take."""

    name: str
    device: str
    dtypes: tuple[torch.dtype, ...]
    max_head_dim: int | None
    channels: int  # head_dim is padded to a multiple of this
    takes_added: bool
    takes_groups: bool  # fewer key heads than query heads
    takes_bands: bool  # any band, not only causal on a square
    forward: Forward
    backward: Backward

    def takes_as_is(self, q: Tensor, v: Tensor) -> bool:
        """Whether it takes these with no channel padded and no key head repeated."""
        return v.shape[-1] % self.channels == 0 and (self.takes_groups or q.shape[1] == v.shape[1])

    def added_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What mask and bias are handed over in: the CPU kernel takes float32 beside half precision."""
        return torch.float32 if self.device == "cpu" and dtype in HALF else dtype


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, band: Band, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, band == CAUSAL, attn_mask=added, scale=scale
    )
    if not torch.compiler.is_compiling() and type(lse) is Tensor and k.shape[2] < FEWEST:
        return _with_nan(q, k, out, lse)
    return out, lse


def _with_nan(q: Tensor, k: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Over a few keys, fewer than the CPU takes at a time, a row of NaN is answered like one without keys."""
    if not bool((lse == 0).any()):
        return out, lse
    rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])  # [B, Hk, G * T, D]
    nan = (rows @ k.transpose(-2, -1)).isnan().all(-1).view(lse.shape) & (lse == 0)  # [B, H, T]
    return out.masked_fill(nan[..., None], torch.nan), lse.masked_fill(nan, torch.nan)


def _cpu_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    added: Tensor | None,
    band: Band,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        grad, q, k, v, out, lse, 0.0, band == CAUSAL, attn_mask=added, scale=scale
    )
    return dq, dk, dv


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, band: Band, scale: float
) -> tuple[Tensor, Tensor]:
    assert added is None
    if band == FULL or (band == CAUSAL and q.shape[2] == k.shape[2]):
        out, lse, *_ = aten._scaled_dot_product_flash_attention.default(
            q, k, v, 0.0, band == CAUSAL, False, scale=scale
        )
        return out, lse
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, T, H, D], as the kernel below wants it
    out, lse, *_ = aten._flash_attention_forward.default(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, False, False, scale=scale, **_window(band)
    )
    return out.transpose(1, 2), torch.where(torch.isposinf(lse), -torch.inf, lse)


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    added: Tensor | None,
    band: Band,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    state, unused = _no_dropout(q, 2)
    grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, q, k, v, out))
    dq, dk, dv = aten._flash_attention_backward.default(
        grad, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, False, state, unused,
        scale=scale, **_window(band),
    )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _window(band: Band) -> dict[str, int]:
    """A band as the flash kernel's window: -1 for all; aligned with the last key, as ours is."""
    left, right = (-1 if reach is None else reach for reach in band)
    return {"window_size_left": left, "window_size_right": right}


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, band: Band, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention.default(
        q, k, v, added, True, 0.0, band == CAUSAL, False, scale=scale
    )
    return out, lse.squeeze(-1)


def _cudnn_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    added: Tensor | None,
    band: Band,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    seed, offset = _no_dropout(q, 1)
    # torch keeps the plan by q, k and v alone: these two must always come in the layout that follows from q
    grad, out = _laid_out_like(q, grad), _laid_out_like(q, out)
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward.default(
        grad, q, k, v, out, lse.unsqueeze(-1), seed, offset, added, None, None, q.shape[2],
        k.shape[2], 0.0, band == CAUSAL, scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def _efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, band: Band, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_efficient_attention.default(
        q, k, v, _aligned(added, q, k), True, 0.0, band == CAUSAL, scale=scale
    )
    return out, lse[..., : q.shape[2]]  # the kernel rounds the length up to a multiple of 32


def _efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    added: Tensor | None,
    band: Band,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
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
    """The random state the backward ops insist on; read by none of them without dropout."""
    state = _zeros(size, like.device) if type(like) is Tensor else like.new_zeros(size, dtype=torch.int64)
    return state, state


@functools.cache
def _zeros(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.int64, device=device)


def _laid_out_like(q: Tensor, x: Tensor) -> Tensor:
    """x with its dimensions in memory in the order of q's, without gaps."""
    order, place = _order(q.stride())
    return x.permute(order).contiguous().permute(place)


@functools.lru_cache(maxsize=1024)
def _order(strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Dimensions from the outermost in memory to the innermost, and where each is in that order."""
    order = tuple(sorted(range(4), key=lambda dim: (-strides[dim], dim)))
    return order, tuple(order.index(dim) for dim in range(4))


def _aligned(added: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The efficient kernel wants every dimension spelled out and rows that start on 16 bytes."""
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
    max_head_dim=None,
    channels=1,
    takes_added=True,
    takes_groups=True,
    takes_bands=False,
    forward=_cpu_forward,
    backward=_cpu_backward,
)
CUDA_FLASH = Kernel(
    "flash",
    "cuda",
    HALF,
    max_head_dim=256,
    channels=8,
    takes_added=False,
    takes_groups=True,
    takes_bands=True,
    forward=_flash_forward,
    backward=_flash_backward,
)
CUDNN = Kernel(
    "cudnn",
    "cuda",
    HALF,
    max_head_dim=128,
    channels=8,
    takes_added=True,
    takes_groups=True,
    takes_bands=False,
    forward=_cudnn_forward,
    backward=_cudnn_backward,
)
CUDA_EFFICIENT = Kernel(
    "efficient",
    "cuda",
    (torch.float32, *HALF),
    max_head_dim=None,
    channels=8,
    takes_added=True,
    takes_groups=False,
    takes_bands=False,
    forward=_efficient_forward,
    backward=_efficient_backward,
)

KERNELS = (CUDNN, CUDA_FLASH, CUDA_EFFICIENT, CPU_FLASH)
