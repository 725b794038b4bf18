"""What the examples in the package's docstrings may use without importing it."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _torch_in_examples(doctest_namespace: dict[str, object]) -> None:
    doctest_namespace["torch"] = torch
