"""`hw.attention`, full and causal, beside torch's function: the cost of returning a map."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import headwise as hw

from .. import problem as problems
from ..problem import Problem
from ..registry import OURS, Arm, Case, Pinned, Prepared, Sizes, Values, register

SDPA = "SDPA"
PINS = {
    "SDPA cudnn": SDPBackend.CUDNN_ATTENTION,
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def on_rows(problem: Problem, arms: dict[str, Arm]) -> Prepared:
    """Return a case of arms that return the output; some rows of every head are compared."""
    rows = problems.some_rows(problem)

    def part(output: Tensor) -> Values:
        return {"output": output[:, :, rows]}

    return Prepared(arms, lambda: {"output": problem.output(rows)}, part)


def attention(sizes: Sizes, device: torch.device, dtype: torch.dtype, causal: bool, pinned: bool) -> Prepared:
    """Compare hw.attention with scaled_dot_product_attention, and on a GPU with each of its backends."""
    problem = problems.make(sizes, device, dtype, problems.causal if causal else None)
    q, k, v = problem.qkv
    theirs: Callable[[], Tensor] = lambda: sdpa(q, k, v, is_causal=causal)  # noqa: E731
    arms: dict[str, Arm] = {OURS: lambda: hw.attention(q, k, v, causal=causal)[0], SDPA: theirs}
    if pinned:
        arms |= {name: Pinned(theirs, partial(sdpa_kernel, backend)) for name, backend in PINS.items()}
    return on_rows(problem, arms)


# Add a case below.

for kind, is_causal in (("full", False), ("causal", True)):
    for length in (256, 512, 1024, 2048, 4096):
        register(
            Case(
                f"attention_{kind}_L{length}",
                f"attention, {kind}",
                partial(attention, causal=is_causal, pinned=False),
                {"B": 1, "H": 8, "L": length, "D": 64},
                tiny={"H": 2, "L": 37, "D": 16},
                peer=SDPA,
                devices=("cpu",),
                target=1.05,
            )
        )
    for length in (1024, 4096, 16384):
        register(
            Case(
                f"cuda_attention_{kind}_L{length}",
                f"attention, {kind}",
                partial(attention, causal=is_causal, pinned=True),
                {"B": 1, "H": 32, "L": length, "D": 128},
                tiny={"H": 2, "L": 40, "D": 16},
                peer=SDPA,
                devices=("cuda",),
                target=1.05,
                headline=length == 16384 and is_causal,
            )
        )
