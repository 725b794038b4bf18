"""What a test of pages opens is closed behind it, and must not have complained in the console, nor asked for
anything but what the page makes itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from browser import Browser


@pytest.fixture
def browser(running_browser: Browser) -> Iterator[Browser]:
    before = len(running_browser.pages)
    yield running_browser
    opened = running_browser.pages[before:]
    loud = [complaint for page in opened for complaint in page.complaints]
    urls = [url for page in opened for url in page.requested]
    for page in opened:
        page.close()
    assert loud == [] and all(url.startswith(("file:", "blob:", "data:")) for url in urls)
