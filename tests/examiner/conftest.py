"""What the tests of the examiner share."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import pytest


@pytest.fixture(scope="package", autouse=True)
def _sources_read_once() -> Iterator[None]:
    """Before Python 3.13 a class is looked for in its file's whole tree, several times a check."""
    cached: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
    find = inspect.findsource

    def source_of(thing: Any) -> Any:
        if not inspect.isclass(thing):
            return find(thing)
        if thing not in cached:
            cached[thing] = find(thing)
        return cached[thing]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect, "findsource", source_of)
        yield
