"""A stand-in for a tensor that is computed on use: torch's functions, numpy, operators."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

if TYPE_CHECKING:
    import numpy

# Members that would act on, or describe, a tensor that is discarded at once.
NOT_OF_A_MAP = {"backward", "data", "grad", "grad_fn", "is_leaf", "register_hook", "retain_grad", "set_"}

REENTRANT = CheckpointFunction.forward.__code__


def in_reentrant_checkpoint() -> bool:
    """Return True in the forward of `torch.utils.checkpoint(..., use_reentrant=True)`.

    It runs without recording gradients and gives them back to tensors that are returned, not to a stand-in.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is REENTRANT:
            return True
        frame = frame.f_back
    return False


class StandIn:
    """Base of classes that can be made dense, and then support all that a tensor does."""

    _has_lost_gradient = False  # made in a reentrant checkpoint

    def _warn_of_lost_gradient(self) -> None:
        """Warn where a gradient is expected that a reentrant checkpoint did not record."""
        if self._has_lost_gradient and torch.is_grad_enabled() and not self.requires_grad:
            warnings.warn(
                "weights of a reentrant checkpoint have no gradient: the map was made in "
                "checkpoint(use_reentrant=True), where gradients are not recorded; pass use_reentrant=False, "
                "return weights.dense() from the checkpoint, or read the map under torch.no_grad()",
                UserWarning,
                stacklevel=3,
            )

    @property
    def shape(self) -> torch.Size:
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        raise NotImplementedError

    @property
    def requires_grad(self) -> bool:
        raise NotImplementedError

    def dense(self) -> Tensor:
        """Return the tensor itself."""
        raise NotImplementedError

    # Members of a tensor that need none

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Return the shape or a dimension, as `Tensor.size`."""
        return self.shape if dim is None else self.shape[dim]

    def is_floating_point(self) -> bool:
        """Return True, as `Tensor.is_floating_point` does for weights."""
        return True

    def dim(self) -> int:
        """Return the number of dimensions, as `Tensor.dim`."""
        return self.ndim

    def numel(self) -> int:
        """Return the number of weights, whether or not they fit the memory."""
        return self.shape.numel()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map(
            lambda x: x.dense() if isinstance(x, StandIn) else x,
            (args, kwargs or {}),
            is_leaf=lambda x: isinstance(x, StandIn),
        )
        return func(*args, **kwargs)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> numpy.ndarray:
        values = self.dense().detach().cpu()
        if values.dtype == torch.bfloat16:  # numpy has none
            values = values.float()
        array: numpy.ndarray = values.numpy()
        if dtype is not None and array.dtype != dtype:
            return array.astype(dtype)
        return array.copy() if copy else array

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.dense().detach().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0, device=self.device).__dlpack_device__()

    def __getattr__(self, name: str) -> Any:
        """Return any other member of a tensor, applied to the dense weights."""
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"'AttentionMap' object has no attribute {name!r}")
        if name.endswith("_") or name in NOT_OF_A_MAP:
            raise AttributeError(
                f"{name} must be used on a tensor: a map computes a new one each time; use it on w.dense()"
            )
        if not callable(getattr(Tensor, name)):
            return getattr(self.dense(), name)

        def of_dense(*args: Any, **kwargs: Any) -> Any:
            return getattr(self.dense(), name)(*args, **kwargs)

        return of_dense


def _operator(name: str) -> Any:
    def apply(self: StandIn, *others: Any) -> Any:
        others = tuple(x.dense() if isinstance(x, StandIn) else x for x in others)
        return getattr(self.dense(), name)(*others)

    return apply


for _name in (
    "add radd sub rsub mul rmul truediv rtruediv pow rpow matmul rmatmul neg abs eq ne lt le gt ge"
).split():
    setattr(StandIn, f"__{_name}__", _operator(f"__{_name}__"))
StandIn.__hash__ = object.__hash__  # type: ignore[method-assign]
