"""What the examples in the package's docstrings may use without importing it."""

from __future__ import annotations

import gc

import pytest

gc.disable()  # while a million objects are imported and collected, all of which stay

import torch  # noqa: E402


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(autouse=True)
def _torch_in_examples(doctest_namespace: dict[str, object]) -> None:
    doctest_namespace["torch"] = torch
