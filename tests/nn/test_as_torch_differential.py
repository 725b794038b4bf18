"""`headwise.nn.MultiheadAttention` against torch's class over calls that nobody thought of."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from as_torch_cases import Case, complaint, draw_case


@st.composite
def cases(draw: Any) -> Case:
    def choose(options: Any, /) -> Any:
        return draw(st.sampled_from(options))

    return draw_case(choose, draw(st.integers(0, 2**31)))


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
@given(cases())
@settings(max_examples=100)
def test_every_call_answers_as_torchs_class_does(case: Case) -> None:
    assert complaint(case) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
@given(cases())
@settings(max_examples=600)
def test_more_calls_answer_as_torchs_class_does(case: Case) -> None:
    assert complaint(case) is None
