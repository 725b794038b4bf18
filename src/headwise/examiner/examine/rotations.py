"""Tables of a rotation by position that code takes with its inputs: cos and sin, a pair of them, or complex.

They are given as half-split RoPE has them, in one shape after another. Where the rotation is not recognised
with those, the tables turn every position by one angle: what turns queries and keys alike, and nothing else,
has the scores it would have without, and is judged so.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from .words import bare

SLOTS = ("cos", "sin", "cos and sin", "turns")
TABLES = (
    "[T, D]",
    "[B, T, D]",
    "[1, 1, T, D]",
    "[1, T, 1, D]",
    "[T, D/2]",
    "[1, 1, T, D/2]",
    "[1, T, 1, D/2]",
)
TOLD = "it is given {names} as tables {shape} of cos and sin"
STILL = "it is given {names} as tables {shape} that turn all positions alike: the rotation was not judged"
ANGLE = 0.6435
_ONE = re.compile(
    r"(?:freqs?|rotary|rope|pos(?:ition)?|emb)?(cos|sin)(?:es|ines?|cached?|cache|table|emb|embed|freqs?|pos)?"
)
_BOTH = frozenset("positionembeddings positionembedding rotaryposemb cossin ropecache".split())
_TURNS = frozenset("freqscis freqcis freqscomplex freqsciscomplex".split())

_now = threading.local()


def rotation_word(name: str) -> str | None:
    """What a parameter of forward takes of a rotation, one of `SLOTS`."""
    word = bare(name)
    if word in _BOTH:
        return "cos and sin"
    if word in _TURNS:
        return "turns"
    found = _ONE.fullmatch(word)
    return None if found is None else found[1]


@contextlib.contextmanager
def without_turning() -> Iterator[None]:
    """Plans that are made meanwhile give tables that turn every position alike."""
    _now.still = True
    try:
        yield
    finally:
        _now.still = False


def is_still() -> bool:
    """Whether plans are to give tables that turn every position alike."""
    return getattr(_now, "still", False)


def table(slot: str, shape: str, still: bool, B: int, T: int, D: int, dtype: torch.dtype) -> object:
    """What the parameter is given for T positions and D channels a head."""
    pairs = D // 2
    angles = torch.arange(T, dtype=torch.float64)[:, None] * 1e4 ** -(
        torch.arange(pairs, dtype=torch.float64) / max(1, pairs)
    )
    if still:  # one angle for all: queries and keys that are turned alike have the scores they had
        angles = torch.full_like(angles, ANGLE)  # [T, D/2]
    if slot == "turns":
        turns = torch.polar(torch.ones_like(angles), angles)
        return turns if dtype is torch.float64 else turns.to(torch.complex64)
    cos, sin = (_shaped(wave, shape, B).to(dtype) for wave in (angles.cos(), angles.sin()))
    return {"cos": cos, "sin": sin}.get(slot, (cos, sin))


def _shaped(wave: Tensor, shape: str, B: int) -> Tensor:
    if not shape.endswith("D/2]"):
        wave = torch.cat((wave, wave), -1)
    if shape.startswith("[B"):
        return wave.expand(B, *wave.shape).contiguous()
    if shape.startswith("[1, 1"):
        return wave[None, None]
    return wave[None, :, None] if shape.startswith("[1, T") else wave
