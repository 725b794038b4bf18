"""What PyTorch's own tests of its attention cover, drawn, and made of torch's classes and ours side by side.

torch's class in the same process says what is right: results, exceptions, warnings and calls of hooks. Nothing
it says is written down here, so a new version of torch shows where it differs. Ours follows torch's slow path
(`torch.backends.mha.set_fastpath_enabled(False)`), with two exceptions that these tests know by name:
`follows_mask` (a hint that contradicts a mask) and what only an operator of torch refuses (`difference`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from as_torch_cases import Case, difference, draw_call, draw_fast, draw_hint

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
on_every_device = pytest.mark.parametrize("device", DEVICES)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Support for mismatched"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


def drawn(draw: Any) -> Any:
    """A strategy of cases, from a function that draws one with `choose` and a seed."""

    @st.composite
    def cases(sample: Any) -> Any:
        return draw(lambda options: sample(st.sampled_from(options)), sample(st.integers(0, 2**31)))

    return cases()


# Calls of torch's class


@on_every_device
@given(drawn(draw_call))
@settings(max_examples=200)
def test_calls_are_answered_refused_and_warned_of_as_in_torch(device: str, case: Case) -> None:
    assert difference(case, device) is None


@on_every_device
@given(drawn(draw_hint))
@settings(max_examples=200)
def test_hints_beside_masks_of_every_shape_are_taken_as_in_torch(device: str, case: Case) -> None:
    """With `is_causal=True`, a mask of another shape was broadcast, or refused."""
    assert difference(case, device) is None


@on_every_device
@given(drawn(draw_fast))
@settings(max_examples=100)
def test_calls_for_torchs_fast_path_are_answered_as_on_its_slow_path(device: str, case: Case) -> None:
    assert difference(case, device) is None
