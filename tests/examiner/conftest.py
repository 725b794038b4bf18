"""What the tests of the examiner share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headwise.examiner.desk.template import Template


@pytest.fixture(scope="session")
def one_template() -> Iterator[Template]:
    """Torch is imported once, and each file runs in a copy of that process."""
    with Template() as running:
        yield running
