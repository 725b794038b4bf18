"""Rotations by position that code takes as arguments: tables of cos and sin, complex numbers, or an object.

They are passed as half-split RoPE has them, the tables in one shape after another. If the rotation is not
recognised with those, they rotate every position by one angle: code that rotates queries and keys alike then
has the same scores as without, and is judged so. Position embeddings that are added are zeros, since the same
names are usual for them.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .vocabulary import bare

SLOTS = ("cos", "sin", "cos and sin", "turns", "rotation")
ADDED = "[B, T, E]"  # a position embedding, not a table
TABLES = (
    "[T, D]",
    "[B, T, D]",
    "[1, 1, T, D]",
    "[1, T, 1, D]",
    "[T, D/2]",
    "[1, 1, T, D/2]",
    "[1, T, 1, D/2]",
    ADDED,
)
TABLES_PASSED = "{names}: tables {shape} of cos and sin are passed"
STILL = (
    "{names}: tables {shape} that rotate all positions by the same angle are passed; "
    "the rotation was not judged"
)
ZEROS = "{names}: zeros are passed, so the effect of position embeddings was not judged"
OBJECT = "{names}: the check passed a rotation of its own to the constructor"
STILL_OBJECT = (
    "{names}: the check passed a rotation by the same angle at all positions; the rotation was not judged"
)
ANGLE = 0.6435
MAX_LENGTH = 67  # positions in the tables of an object of ours
_COS_OR_SIN = re.compile(
    r"(?:freqs?|rotary|rope|pos(?:ition)?|emb)?(cos|sin)(?:es|ines?|cached?|cache|table|emb|embed|freqs?|pos)?"
)
_BOTH = frozenset("positionembeddings positionembedding rotaryposemb cossin ropecache".split())
_TURNS = frozenset("freqscis freqcis freqscomplex freqsciscomplex".split())
_OBJECT = re.compile(
    r"(?:rope|rotary|rotator|rotation)(?:al)?(?:pos|position|positional)?"
    r"(?:s|fn|func|function|module|layer|obj|object|emb|embed|embedder|embedding|embeddings|encoder|encoding|er)?"
)
# code that unpacks what an object returns as tables
_UNPACKS_TABLES = re.compile(r"\bcos\w*\s*,\s*sin\w*\s*=\s*(?:self\.)?\w*(?:rope|rot|pos|emb)\w*(?:\.\w+)?\(")

_thread = threading.local()


def rotation_word(name: str) -> str | None:
    """Return which part of a rotation a parameter of `forward` takes, one of `SLOTS`, or None."""
    word = bare(name)
    if word in _BOTH:
        return "cos and sin"
    if word in _TURNS:
        return "turns"
    if is_rotation(name):
        return "rotation"
    match = _COS_OR_SIN.fullmatch(word)
    return None if match is None else match[1]


def is_rotation(name: str) -> bool:
    """Return True if a parameter of this name takes an object that rotates queries and keys."""
    return _OBJECT.fullmatch(bare(name)) is not None


@contextlib.contextmanager
def constant_rotations() -> Iterator[None]:
    """Make call plans pass tables that rotate every position by the same angle."""
    _thread.still = True
    try:
        yield
    finally:
        _thread.still = False


def rotations_are_constant() -> bool:
    """Return True if call plans are to pass tables that rotate every position by the same angle."""
    return getattr(_thread, "still", False)


def _angles(T: int, D: int, still: bool) -> Tensor:
    pairs = D // 2
    steps = torch.arange(pairs, dtype=torch.float64) / max(1, pairs)
    angles = torch.arange(T, dtype=torch.float64)[:, None] * 1e4**-steps
    return torch.full_like(angles, ANGLE) if still else angles  # [T, D/2]


def rotation_table(
    slot: str, shape: str, still: bool, query: Tensor, D: int, heads: tuple[int, ...], dtype: torch.dtype
) -> object:
    """Return the argument of a rotation slot for queries [B, T, E] with D channels per head."""
    B, T, _ = query.shape
    if shape == ADDED and slot == "cos and sin":
        return torch.zeros_like(query, dtype=dtype)
    angles = _angles(T, D, still)
    if slot == "turns":
        turns = torch.polar(torch.ones_like(angles), angles)
        return turns if dtype is torch.float64 else turns.to(torch.complex64)
    if slot == "rotation":
        made = Rotation(D, heads, still, length=T)
        return made._apply(lambda x: _shaped(x[:, : D // 2], shape, B).to(dtype))
    cos, sin = (_shaped(wave, shape, B).to(dtype) for wave in (angles.cos(), angles.sin()))
    return {"cos": cos, "sin": sin}.get(slot, (cos, sin))


class Rotation(nn.Module):
    """A rotation that rotates queries and keys in any method called, or returns its tables `cos` and `sin`.

    Args:
        D: channels of a head.
        heads: the head counts that its input may have, by which the axis of positions is recognised.
        still: all positions are rotated by the same angle.
        length: positions in its tables.
        source: of the code that uses it, which may unpack tables.
    """

    def __init__(
        self, D: int, heads: tuple[int, ...], still: bool, length: int = MAX_LENGTH, source: str = ""
    ) -> None:
        super().__init__()
        self.D, self.heads, self.tables = D, heads, _UNPACKS_TABLES.search(source) is not None
        self.still = still
        angles, dtype = (
            _angles(length, D, still).repeat(1, 2),
            torch.ones(()).dtype,
        )  # as the weights beside it
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or name in ("cos", "sin"):
                raise
            return self.forward

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.cos, self.sin))

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """Apply a function as `nn.Module.apply` does, or rotate tensors."""
        first = args[0] if args else None
        return super().apply(first) if callable(first) else self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the tensors rotated, or the tables if no heads are passed or the code unpacks tables."""
        every = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        heads = [x for x in every if x.ndim >= 3 and x.is_floating_point() and x.shape[-1] == self.D]
        if self.tables or not heads:
            numbers = [value for value in (*args, *kwargs.values()) if isinstance(value, int)]
            length = self._positions(heads[0])[1] if heads else numbers[0] if numbers else MAX_LENGTH
            cos, sin = (wave[:length] for wave in self._waves())
            return (cos[None], sin[None]) if heads else (cos, sin)
        turned = tuple(self._rotated(x) for x in heads)
        return turned if len(turned) > 1 else turned[0]

    def _waves(self) -> tuple[Tensor, Tensor]:
        angles = _angles(MAX_LENGTH, self.D, self.still).repeat(1, 2)
        return angles.cos().to(self.cos.dtype), angles.sin().to(self.cos.dtype)

    def _positions(self, x: Tensor) -> tuple[int, int]:
        """Return the axis of positions and their number."""
        inside = x.ndim > 3 and x.shape[-2] in self.heads and x.shape[-3] not in self.heads
        axis = -3 if inside else -2
        return axis, x.shape[axis]

    def _rotated(self, x: Tensor) -> Tensor:
        axis, length = self._positions(x)
        cos, sin = (wave[:length].to(x.dtype) for wave in self._waves())
        if axis == -3:
            cos, sin = cos[:, None], sin[:, None]
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin


def _shaped(wave: Tensor, shape: str, B: int) -> Tensor:
    if not shape.endswith("D/2]"):
        wave = torch.cat((wave, wave), -1)
    if shape.startswith("[B"):
        return wave.expand(B, *wave.shape).contiguous()
    if shape.startswith("[1, 1"):
        return wave[None, None]
    return wave[None, :, None] if shape.startswith("[1, T") else wave
