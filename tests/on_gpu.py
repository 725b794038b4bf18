"""Marks of the tests that need a CUDA device, and how they count what they judged.

`make test` runs a few cases of each test, `make test-gpu` all of them, as many at a time as there are cores:
almost all of their time goes into compiling kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

NEEDS_CUDA = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="by design: these need a CUDA device, which CI has not"
)


def few_are_quick(*keep: str) -> Any:
    """A mark: of a test's cases only these are in `make test`, all are in `make test-gpu`."""
    return pytest.mark.thinned(keep=keep, rest="gpu")


def judged(request: pytest.FixtureRequest, name: str, count: int = 1) -> None:
    """Counted at the end of the run: `judged on the GPU and right: kernel triton 354, ...`."""
    request.node.user_properties.append((f"judged {name}", count))
