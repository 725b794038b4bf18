"""Rotary positions: the angles of the papers and of transformers, tables that are kept, what is refused."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.errors import ArgumentError, ShapeError
from headwise.nn import Linear, Llama3, Ntk, Rope, Yarn
from headwise.nn.rotary import Scaling
from judge import assert_judged

B, H, T, D = 2, 3, 7, 10
ROPES = [
    Rope(),
    Rope(500_000.0, interleaved=True),
    Rope(dims=6),
    Rope(dims=4, interleaved=True, scaling=Yarn(4.0, 32)),
]


def by_hand(x: Tensor, rope: Rope, positions: list[int]) -> Tensor:
    """Each pair turned as a complex number, in float64."""
    dims = rope.dims or x.shape[-1]
    turned = x.double().clone()
    factor = 1.0 if rope.scaling is None else rope.scaling.magnitude
    for i, frequency in enumerate(rope.frequencies(x.shape[-1]).tolist()):
        a, b = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + dims // 2)
        angles = torch.tensor(positions, dtype=torch.float64) * frequency
        points = torch.complex(x[..., a].double(), x[..., b].double()) * torch.polar(
            torch.full_like(angles, factor), angles
        )
        turned[..., a], turned[..., b] = points.real, points.imag
    return turned


def rows(dtype: torch.dtype, length: int = T) -> Tensor:
    return torch.randn(B, H, length, D, generator=torch.Generator().manual_seed(5)).to(dtype)


# Angles


@pytest.mark.parametrize("rope", ROPES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_pairs_are_turned_like_points_in_the_plane(rope: Rope, dtype: torch.dtype) -> None:
    x = rows(dtype)
    for start in (0, 5):
        truth = by_hand(x, rope, list(range(start, start + T)))
        spots = torch.arange(start, start + T)
        # plain: the same equation in the inputs' dtype, as someone would write it
        cos, sin = (f.to(dtype) for f in rope.factors(x.double(), spots))
        dims = rope.dims or D
        halves = x[..., :dims].unflatten(-1, (-1, 2) if rope.interleaved else (2, -1))
        swapped = halves.flip(-1 if rope.interleaved else -2).flatten(-2)
        plain = x * cos + torch.cat((swapped, x[..., dims:]), -1) * sin
        for positions in (start, spots, spots.expand(B, T)):
            turned = rope.rotate(x, positions)
            assert turned.dtype == dtype
            assert_judged(turned, plain, truth, dtype=dtype, size=2.0, name=f"{rope} {positions}")
    assert torch.equal(rope.rotate(x, 0)[..., rope.dims or D :], x[..., rope.dims or D :])


def test_angles_of_late_positions_are_not_rounded_to_float32() -> None:
    """In float32 the angle at position 100,000 is off by a hundredth, and so are transformers' tables."""
    x = rows(torch.float32)
    truth = by_hand(x, Rope(), list(range(100_000, 100_000 + T)))
    assert_judged(
        Rope().rotate(x, 100_000 + torch.arange(T)), truth.float(), truth, dtype=torch.float32, size=2.0
    )


def test_static_ntk_leaves_the_fastest_pair_and_divides_the_slowest() -> None:
    own, stretched = Rope().frequencies(D), Rope(scaling=Ntk(3.0)).frequencies(D)
    assert own[0] == stretched[0] == 1
    torch.testing.assert_close(stretched[-1], own[-1] / 3)


LINEAR = {"rope_type": "linear", "factor": 3.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 512}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("theirs", "scaling"),
    [
        (LINEAR, Linear(3.0)),
        (LLAMA3, Llama3(8.0, 1.0, 4.0, 512)),
        (YARN, Yarn(40.0, 4096)),
        (YARN | {"truncate": False, "beta_fast": 24.0, "beta_slow": 2.0}, Yarn(40.0, 4096, 24.0, 2.0, False)),
        (YARN | {"attention_factor": 1.5}, Yarn(40.0, 4096, attention_factor=1.5)),
        (YARN | {"mscale": 0.707, "mscale_all_dim": 1.0}, Yarn(40.0, 4096, mscale=0.707, mscale_all_dim=1.0)),
    ],
    ids=lambda value: repr(value) if not isinstance(value, dict) else "",
)
def test_scalings_are_those_of_transformers(theirs: dict[str, Any], scaling: Scaling) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for width, base in ((16, 10_000.0), (64, 150_000.0), (128, 500_000.0)):
        settings = {"rope_theta": base, **theirs}
        config = transformers.LlamaConfig(
            hidden_size=2 * width, num_attention_heads=2, head_dim=width, rope_parameters=settings,
            max_position_embeddings=int(40 * theirs.get("original_max_position_embeddings", 512)),
        )  # fmt: skip
        frequencies, magnitude = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](config)
        ours = Rope(base, scaling=scaling).frequencies(width)
        # theirs are made in float32, in some ten steps from the angles without a scaling
        rounding = 10 * torch.finfo(torch.float32).eps * Rope(base).frequencies(width)
        assert (frequencies.double() - ours).abs().le(rounding).all()
        assert magnitude == pytest.approx(scaling.magnitude, rel=1e-12)


# Tables


def cached_tables(rope: Rope) -> list[int]:
    return [cos.shape[0] for cos, _ in rope._cached.values()]


def test_tables_are_no_part_of_what_a_rope_is() -> None:
    rope = Rope(scaling=Yarn(4.0, 32))
    empty = len(pickle.dumps(rope))
    rope.rotate(rows(torch.float32), 0)
    assert len(pickle.dumps(rope)) == empty
    assert rope == Rope(scaling=Yarn(4.0, 32)) and hash(rope) == hash(Rope(scaling=Yarn(4.0, 32)))
    assert pickle.loads(pickle.dumps(rope)) == rope
    assert copy.deepcopy(rope) is rope is copy.copy(rope)  # it never changes
    assert repr(rope) == "Rope(scaling=Yarn(factor=4.0, original_length=32))"
    assert eval(repr(rope)) == rope
    with pytest.raises(AttributeError):
        rope.base = 3.0  # type: ignore[misc]


def test_tables_made_in_inference_mode_serve_training() -> None:
    mha = hw.MultiHeadAttention(12, 2, rope=Rope())
    x = torch.randn(B, T, 12)
    with torch.inference_mode():
        mha(x)
    mha(x)[0].sum().backward()
    assert mha.q_proj.weight.grad is not None


def test_tables_of_other_modes_are_not_kept() -> None:
    from torch._subclasses import FakeTensorMode

    rope = Rope()
    assert rope.rotate(torch.empty(B, H, T, D, device="meta"), 3).device.type == "meta"
    with FakeTensorMode():
        rope.rotate(torch.empty(B, H, T, D), 3)
    torch.testing.assert_close(rope.rotate(rows(torch.float32), 3), Rope().rotate(rows(torch.float32), 3))


def test_threads_share_a_rope() -> None:
    rope, x = Rope(), rows(torch.float32, 1)
    starts = [(7 * n) % 400 for n in range(200)]
    expected = [Rope().rotate(x, torch.tensor([start])) for start in starts]
    with ThreadPoolExecutor(4) as pool:
        turned = list(pool.map(lambda start: rope.rotate(x, start), starts))
    for ours, wanted in zip(turned, expected, strict=True):
        torch.testing.assert_close(ours, wanted)


# What is refused


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Rope(1.0), r"base must be above 1 and finite: got 1\.0"),
        (lambda: Rope("a"), "base must be above 1 and finite: got 'a'"),
        (lambda: Rope(interleaved=2), "interleaved must be True or False: got 2"),
        (lambda: Rope(scaling={"factor": 2}), "scaling must be Linear, .* or Yarn: got {'factor': 2}"),
        (lambda: Linear(0.5), r"factor must be at least 1 and finite: got 0\.5"),
        (lambda: Ntk(float("nan")), "factor must be at least 1 and finite: got nan"),
        (lambda: Llama3(original_length=0), "original_length must be a whole number of at least 1: got 0"),
        (lambda: Llama3(low=4.0, high=1.0), r"low must be above 0, below high: 4\.0 and 1\.0"),
        (lambda: Yarn(2.0, 8, 1.0, 32.0), r"beta_slow must be above 0 and below beta_fast: 32\.0 and 1\.0"),
        (lambda: Yarn(2.0, 8, mscale=1.0), r"mscale must be given with .*: got 1\.0, None and None"),
    ],
)  # fmt: skip
def test_a_rope_that_cannot_be_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        make()


def test_a_rope_that_does_not_fit_the_heads_is_refused() -> None:
    for dims, message in ((3, "3 of 6"), (8, "8 of 6"), (0, "0 of 6")):
        with pytest.raises(
            ShapeError, match=f"rope must rotate an even number of a head's channels: {message}"
        ):
            hw.MultiHeadAttention(12, 2, rope=Rope(dims=dims))
    with pytest.raises(ShapeError, match="rope must rotate an even number of a head's channels: 7 of 7"):
        hw.MultiHeadAttention(14, 2, rope=Rope())
    with pytest.raises(ShapeError, match="rope must rotate at least 4 channels with Ntk: got 2"):
        hw.MultiHeadAttention(12, 2, rope=Rope(dims=2, scaling=Ntk(2.0)))
