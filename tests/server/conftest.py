"""Pages of servers: closed behind the test that opened them. They ask only the server that they came from,
and complain of nothing in the console."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from page_requests import check_origin

from browser import Browser

REPLY = "Failed to load resource: "  # what the browser logs of a reply that is an error, or of none


def _closed_behind(browser: Browser, errors_may_come: bool) -> Iterator[Browser]:
    before = len(browser.pages)
    yield browser
    opened = browser.pages[before:]
    loud = [complaint for page in opened for complaint in page.complaints]
    try:
        for page in opened:
            check_origin(page)
    finally:
        for page in opened:
            page.close()
    if errors_may_come:
        loud = [complaint for complaint in loud if not _is_of_a_reply(complaint)]
    assert loud == []


def _is_of_a_reply(complaint: str) -> bool:
    try:
        return str(json.loads(complaint).get("entry", {}).get("text", "")).startswith(REPLY)
    except ValueError:  # a long one is cut
        return False


@pytest.fixture
def browser(running_browser: Browser) -> Iterator[Browser]:
    yield from _closed_behind(running_browser, False)


@pytest.fixture
def browser_of_errors(running_browser: Browser) -> Iterator[Browser]:
    """For pages whose server answers with errors, or not at all."""
    yield from _closed_behind(running_browser, True)
