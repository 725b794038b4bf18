"""What a page asked for."""

from __future__ import annotations

from urllib.parse import urlsplit

from browser import Page


def check_origin(page: Page) -> None:
    """Assert that a page asked for nothing but its own server, and what it makes itself."""
    addresses = [urlsplit(url) for url in page.requested]
    first, *others = (address for address in addresses if address.scheme != "about")
    for address in others:
        assert address.scheme in ("blob", "data") or address[:2] == first[:2], address
