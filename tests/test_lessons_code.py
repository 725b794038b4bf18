"""The code of the five course pages headwise grew out of, run with its classes removed and their names
bound to headwise's; and the pages' own maths, in plain torch, beside ours.

Two of the pages have no code, one block is a class alone: what its text promises is tried instead.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from judge import error

# page -> what is left of each code block without its classes, and what it prints
BLOCKS = {
    "assignment: test": (
        """
        # Test
        mha = MultiHeadAttention(d_model=512, num_heads=8)
        x = torch.randn(2, 10, 512)  # batch=2, seq_len=10
        output, attention = mha(x)
        print(f"Output shape: {output.shape}")  # (2, 10, 512)
        """,
        "Output shape: torch.Size([2, 10, 512])",
    ),
    "handbook: example usage": (
        """
        # Example usage
        mha = MultiHeadAttention(d_model=512, num_heads=8)
        x = torch.randn(2, 10, 512)  # batch=2, seq=10
        output, weights = mha(x, x, x)
        print(f"Output: {output.shape}")   # (2, 10, 512)
        print(f"Weights: {weights.shape}") # (2, 8, 10, 10)
        """,
        "Output: torch.Size([2, 10, 512])\nWeights: torch.Size([2, 8, 10, 10])",
    ),
}


@pytest.mark.parametrize("block", BLOCKS)
def test_a_page_s_code_runs_with_our_class_and_prints_what_the_page_says(block: str) -> None:
    code, printed = BLOCKS[block]
    lines = "\n".join(line[8:] for line in code.splitlines())
    message = io.StringIO()
    with contextlib.redirect_stdout(message):
        exec(lines, {"torch": torch, "nn": nn, "MultiHeadAttention": hw.MultiHeadAttention})
    assert message.getvalue().strip() == printed


def as_the_pages_do(
    project: Callable[[str, Tensor], Tensor], x: list[Tensor], heads: int, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The maths of the pages: split, score, mask where it is 0, softmax, weigh, concatenate, project."""
    B = x[0].shape[0]
    q, k, v = (
        project(name, letter).view(B, -1, heads, letter.shape[-1] // heads).transpose(1, 2)
        for name, letter in zip("qkv", x, strict=True)
    )
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    together = (weights @ v).transpose(1, 2).contiguous().view(B, -1, x[0].shape[-1])
    return project("o", together), weights


NAMES = {
    "W": {"q": "W_q", "k": "W_k", "v": "W_v", "o": "W_o"},
    "linear": {"q": "q_linear", "k": "k_linear", "v": "v_linear", "o": "out_linear"},
}

B, H, T, E = 2, 3, 5, 21
LOWER = torch.ones(T, T).tril()
REAL = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
EVERY_SHAPE = {
    "none": None,
    "[T, S]": LOWER,
    "[1, T, S]": LOWER[None],
    "[1, 1, T, S]": LOWER[None, None],
    "[H, T, S]": torch.stack([LOWER, LOWER.T, torch.ones(T, T)]),
    "[1, S]": REAL[1:],
    "[S]": REAL[1],
    "[B, 1, 1, S]": REAL[:, None, None],
    "[B, 1, T, S]": (REAL[:, None, None] * LOWER).contiguous(),
    "[B, H, T, S]": (REAL[:, None, None] * LOWER).expand(B, H, T, T).contiguous(),
    "[B, 1, T, 1]": torch.ones(B, 1, T, 1),
}


@pytest.mark.parametrize(
    "kind", [torch.bool, torch.float32, torch.float64, torch.int64, torch.uint8], ids=str
)
@pytest.mark.parametrize("shape", EVERY_SHAPE)
def test_every_mask_the_pages_could_use_means_what_it_means_there(shape: str, kind: torch.dtype) -> None:
    layers = nn.ModuleDict({name: nn.Linear(E, E, dtype=torch.float64) for name in NAMES["W"].values()})
    mha = hw.MultiHeadAttention(E, H, dtype=torch.float64)
    mha.load_state_dict(layers.state_dict())
    x = torch.randn(B, T, E, dtype=torch.float64)
    arguments = EVERY_SHAPE[shape]
    mask = None if arguments is None else arguments.to(kind)
    expected, their_weights = as_the_pages_do(lambda n, y: layers[NAMES["W"][n]](y), [x] * 3, H, mask)
    for output, weights in (mha(x, mask=mask), mha(x, x, x, mask)):
        assert weights is not None
        assert error(output, expected) <= 1e-12
        assert error(weights.dense(), their_weights) <= 1e-12
    assert mha(x, mask=mask, need_weights=False)[1] is None


@pytest.mark.parametrize("naming", NAMES)
def test_cross_attention_with_weights_under_the_pages_names(naming: str) -> None:
    names = NAMES[naming]
    layers = nn.ModuleDict({name: nn.Linear(E, E, dtype=torch.float64) for name in names.values()})
    mha = hw.MultiHeadAttention(E, H, dtype=torch.float64)
    mha.load_state_dict(layers.state_dict())
    query, memory = (torch.randn(B, length, E, dtype=torch.float64) for length in (T, 7))
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])[:, None, None]
    three = [query, memory, memory]
    expected, their_weights = as_the_pages_do(lambda n, y: layers[names[n]](y), three, H, mask)
    output, weights = mha(query, memory, memory, mask)
    assert weights is not None and weights.shape == (B, H, T, 7)
    assert error(output, expected) <= 1e-12 and error(weights.dense(), their_weights) <= 1e-12
