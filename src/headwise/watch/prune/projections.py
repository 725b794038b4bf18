"""Projections made smaller: rows and columns of weights taken out, everything else about them kept.

`nn.Linear` keeps its weight as [out, in], Hugging Face's `Conv1D` (GPT-2) as [in, out].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ...errors import ArgumentError

__all__ = ["channels", "check", "cut_parameter", "is_conv1d", "keep_inputs", "keep_outputs"]


def is_conv1d(layer: object) -> bool:
    """Whether this is Hugging Face's `Conv1D`, told by its name: transformers need not be installed."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")


def channels(heads: Iterable[int], width: int, start: int = 0) -> Tensor:
    """The channels of some heads that lie one after another from `start`, int [n * width].

    Example:
        >>> channels([0, 2], 3).tolist()
        [0, 1, 2, 6, 7, 8]
    """
    found = [start + head * width + i for head in heads for i in range(width)]
    return torch.tensor(found, dtype=torch.int64, device="cpu")


def check(model: nn.Module, path: str, layers: Sequence[tuple[str, nn.Module]]) -> None:
    """Whether these projections can be cut.

    Args:
        layers: names inside the attention layer at `path`, and the projections.

    Raises:
        ArgumentError: a projection of another class; a weight that is wrapped, or that others use, too.
    """
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for end, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(f"{name}.{end}")
    for name, layer in layers:
        if type(layer) is not nn.Linear and not is_conv1d(layer):
            raise ArgumentError(
                f"model must have plain projections to be pruned: {path}.{name} is "
                f"{type(layer).__name__}; merge or unwrap what was put around nn.Linear first"
            )
        for end in ("weight", "bias"):
            parameter = layer._parameters.get(end)
            if parameter is None and end == "bias":
                continue
            if type(parameter) is not nn.Parameter:
                raise ArgumentError(
                    f"model must have plain weights to be pruned: {path}.{name}.{end} is "
                    f"{type(parameter).__name__}; take masks and quantisation off first"
                )
            if len(owners[id(parameter)]) > 1:
                raise ArgumentError(
                    f"model must not share the weights that are pruned: {path}.{name}.{end} is one with "
                    f"{', '.join(owners[id(parameter)])}; give each a copy first"
                )


def keep_outputs(layer: nn.Module, kept: Tensor) -> None:
    """Only these channels come out."""
    dim, name = (1, "nf") if is_conv1d(layer) else (0, "out_features")
    cut_parameter(layer, "weight", dim, kept)
    if layer._parameters.get("bias") is not None:
        cut_parameter(layer, "bias", 0, kept)
    setattr(layer, name, len(kept))


def keep_inputs(layer: nn.Module, kept: Tensor) -> None:
    """Only these channels go in; the bias stays."""
    dim, name = (0, "nx") if is_conv1d(layer) else (1, "in_features")
    cut_parameter(layer, "weight", dim, kept)
    setattr(layer, name, len(kept))


def cut_parameter(layer: nn.Module, name: str, dim: int, kept: Tensor) -> None:
    """A new, smaller parameter in the place of one.

    A new one, because a parameter that changes its shape breaks the next backward pass if anything still
    holds the graph of the last.
    """
    old = layer._parameters[name]
    assert old is not None
    new = old.detach().index_select(dim, kept.to(old.device))
    setattr(layer, name, nn.Parameter(new, requires_grad=old.requires_grad))
