"""From parameters as they are kept to the four projections as nn.Linear holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..evidence import Role
from ..recipe import Weights

__all__ = ["Guess", "Piece", "is_small", "join", "out_rows", "role_of", "rows_of", "weights_of"]


@dataclass(eq=False)
class Piece:
    """Part of a parameter: which rows of it, once it is [out, in]; of a bias, [n, 1]."""

    name: str
    rows: Tensor
    where: str = ""  # "[0:24]" of a larger one
    transposed: bool = False


@dataclass(eq=False)
class Guess:
    """A proposal: pieces for each projection and bias, which together make the weights."""

    how: str  # "names", "calls", "gradients", "given"
    weights: dict[str, list[Piece]] = field(default_factory=dict)  # q, k, v, o
    biases: dict[str, list[Piece]] = field(default_factory=dict)
    order: str = ""  # of a fused weight
    certain: bool = False  # q, k and v have names of their own
    family: str = ""  # how a fused weight is cut
    spelled: bool = False  # its name says in which order

    @property
    def complete(self) -> bool:
        """Whether q, k and v were all found."""
        return all(self.weights.get(name) for name in "qkv")


def rows_of(tensor: Tensor, in_axis: int) -> Tensor:
    """[out, in] of a parameter of any number of axes."""
    flat = tensor.detach().movedim(in_axis, -1)
    return flat.reshape(-1, flat.shape[-1])


def out_rows(tensor: Tensor, out_axis: int) -> Tensor:
    """The same for an output projection, whose inputs are heads and channels: [out, H * D]."""
    flat = tensor.detach().movedim(out_axis, 0)
    return flat.reshape(flat.shape[0], -1)


def join(pieces: Sequence[Piece]) -> Tensor:
    """One below the other."""
    return torch.cat([one.rows for one in pieces])


def role_of(pieces: Sequence[Piece], how: str) -> Role:
    """Where it was found, in words."""
    first = pieces[0]
    more = f" and {len(pieces) - 1} more" if len(pieces) > 1 else ""
    return Role(f"{first.name}{first.where}{more}", how, first.transposed)


def is_small(guess: Guess, E: int, H: int) -> bool:
    """Whether its projections are [D, D], one for all heads."""
    q = guess.weights.get("q") or guess.weights.get("v")
    return bool(q) and H > 1 and join(q or []).shape[1] * H == E and len(join(q or [])) * H == E


def weights_of(guess: Guess, E: int, H: int) -> tuple[Weights, list[str]] | None:
    """The weights a guess amounts to, and sentences about them; None where the sizes make no sense.

    Missing projections are the identity, missing biases zeros.
    """
    words: list[str] = []
    weight: dict[str, Tensor] = {}
    bias: dict[str, Tensor] = {}
    for name in "qkv":
        pieces, biases = guess.weights.get(name), guess.biases.get(name)
        rows = join(pieces) if pieces else torch.eye(E, dtype=torch.float64)
        more = join(biases).flatten() if biases else torch.zeros(len(rows), dtype=torch.float64)
        if H > 1 and rows.shape[1] * H == E and len(rows) * H == E:  # one small projection for every head
            rows = torch.kron(torch.eye(H, dtype=rows.dtype), rows)
            more = more.repeat(H)
        if rows.shape[1] != E or len(more) != len(rows):
            return None
        weight[name], bias[name] = rows, more
    if len(weight["q"]) % H:
        return None
    D = len(weight["q"]) // H
    for name in "kv":
        n = len(weight[name])
        if n < len(weight["q"]) and n % D == 0 and H % (n // D) == 0:
            times = H // (n // D)
            weight[name] = weight[name].unflatten(0, (n // D, D)).repeat_interleave(times, 0).flatten(0, 1)
            bias[name] = bias[name].unflatten(0, (n // D, D)).repeat_interleave(times, 0).flatten()
            words = [f"{n // D} heads of keys and values serve {H} of queries (grouped-query attention)"]
    if len(weight["k"]) != len(weight["q"]) or len(weight["v"]) % H:
        return None
    pieces, biases = guess.weights.get("o"), guess.biases.get("o")
    out = join(pieces) if pieces else torch.eye(len(weight["v"]), dtype=torch.float64)
    o_bias = join(biases).flatten() if biases else torch.zeros(len(out), dtype=torch.float64)
    whole = out.shape[1] in (len(weight["v"]), len(weight["v"]) // H)  # the second where heads are averaged
    if not whole or len(o_bias) != len(out):
        return None
    made = (*(weight[name] for name in "qkv"), out, *(bias[name] for name in "qkv"), o_bias)
    return Weights(*(one.detach().clone().contiguous() for one in made)), words
