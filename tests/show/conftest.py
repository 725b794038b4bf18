"""One browser for all tests of pages; what a test opens is closed behind it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from browser import Browser, found


@pytest.fixture(scope="session")
def running_browser() -> Iterator[Browser]:
    """For pages that several tests share."""
    if found() is None:
        pytest.skip("no browser: install Chromium, or set HEADWISE_BROWSER")
    with Browser() as running:
        yield running


@pytest.fixture
def browser(running_browser: Browser) -> Iterator[Browser]:
    before = len(running_browser.pages)
    yield running_browser
    for page in running_browser.pages[before:]:
        page.close()
