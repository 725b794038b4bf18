"""How the learner's code keeps its parameters: which are weights, which axis meets the input."""

from __future__ import annotations

import re

from torch import Tensor

from .assembling import Piece, out_rows, rows_of
from .fingerprints import Print
from .subject import Subject
from .wording import bare, role_word

__all__ = ["Kept", "alike", "path_role", "spells", "where_of"]


def path_role(path: str) -> str | None:
    """Which projection a parameter's path names, from its last part to its first."""
    parts = path.split(".")
    if bare(parts[-1]) in {"weight", "bias", "kernel", "weightorig"}:
        parts.pop()
    for part in reversed(parts):
        if not part.isdigit():
            found = role_word(part)
            if found:
                return found
    return None


def _is_bias(path: str, tensor: Tensor) -> bool:
    last = path.split(".")[-1].lower()
    return tensor.ndim == 1 or "bias" in last or re.fullmatch(r"b_?[a-z]{1,3}", last) is not None


def _split(subject: Subject) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights, biases) by path, without what belongs to a normalisation and single numbers."""
    weights: dict[str, Tensor] = {}
    biases: dict[str, Tensor] = {}
    for name, tensor in subject.parameters.items():
        if name in subject.norms or tensor.numel() < 2:
            continue
        (biases if _is_bias(name, tensor) else weights)[name] = tensor
    return weights, biases


def alike(names: list[str]) -> bool:
    """Whether paths differ in numbers alone: one a head."""
    return len({re.sub(r"\d+", "#", name) for name in names}) == 1


def spells(path: str) -> bool:
    """Whether a fused weight's name says that it holds q, k, v in this order; torch's in_proj does."""
    return any(word in bare(path) for word in ("qkv", "querykeyvalue", "inproj"))


class Kept:
    """How each parameter is kept, as far as it can be told."""

    def __init__(self, subject: Subject, prints: dict[str, Print]) -> None:
        self.subject, self.prints = subject, prints
        self.weights, self.biases = _split(subject)
        self.E = subject.sizes.E

    def input_axes(self, name: str) -> list[int]:
        """Along which axis a weight meets the input, the likeliest first."""
        tensor = self.weights[name]
        if name in self.subject.linear:
            return [1]
        if tensor.ndim == 2 and tensor.shape[0] != tensor.shape[1]:
            right = [axis for axis in (1, 0) if tensor.shape[axis] == self.E]
            if len(right) == 1:
                return right
        seen = self.prints.get(name)
        if seen is not None and seen.in_axis is not None:
            return [seen.in_axis]
        axes = [axis for axis in range(tensor.ndim) if tensor.shape[axis] == self.E]
        return axes or [1]

    def output_axes(self, name: str) -> list[int]:
        """Along which axis an output projection makes the output."""
        tensor = self.weights[name]
        if name in self.subject.linear:
            return [0]
        seen = self.prints.get(name)
        if seen is not None and seen.out_axis is not None:
            return [seen.out_axis]
        return [axis for axis in reversed(range(tensor.ndim)) if tensor.shape[axis] == self.E] or [
            tensor.ndim - 1
        ]

    def bias_of(self, name: str) -> str | None:
        """The bias kept beside a weight."""
        beside = re.sub(r"weight$", "bias", name)
        return beside if beside != name and beside in self.biases else None

    def piece(self, name: str, axis: int, rows: Tensor | None = None, where: str = "") -> Piece:
        """Rows of an input projection."""
        whole = rows_of(self.weights[name], axis)
        return Piece(name, whole if rows is None else whole[rows], where, axis != self.weights[name].ndim - 1)

    def out_piece(self, name: str, axis: int) -> Piece:
        """An output projection."""
        return Piece(name, out_rows(self.weights[name], axis), "", axis != 0)

    def bias_piece(self, name: str, rows: Tensor | None = None, where: str = "") -> Piece:
        """A bias, or rows of it."""
        whole = self.biases[name].detach().reshape(-1, 1)
        return Piece(name, whole if rows is None else whole[rows], where)


def where_of(rows: Tensor) -> str:
    """[0:24], or [0:6] and so on."""
    jumps = (rows[1:] - rows[:-1] != 1).nonzero().flatten()
    first = f"[{int(rows[0])}:{int(rows[int(jumps[0])]) + 1 if len(jumps) else int(rows[-1]) + 1}]"
    return first if not len(jumps) else f"{first} and so on"
