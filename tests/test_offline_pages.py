"""Pages of one file: what they may do, and that nothing put into them ends an element early."""

from __future__ import annotations

import re

import pytest

from headwise.errors import ArgumentError
from headwise.show import offline_pages
from headwise.show.offline_pages import built, framed, inline, policy

PAGES = ("heads", "explain")


@pytest.mark.parametrize("name", PAGES)
def test_a_built_page_has_a_place_for_each_of_its_parts(name: str) -> None:
    page = built(name)
    assert all(f"{{{{{mark}}}}}" in page.template for mark in ("POLICY", "TITLE", "STYLE", "DATA", "SCRIPT"))
    assert "--surface" in page.style and "document" in page.script


@pytest.mark.parametrize("text", ["a</script>", "'</SCRIPT\\n'", "x\n<!-- <script>"])
def test_a_script_that_would_end_early_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"script must not end its element early: got '<(/|!)"):
        inline(text, "script")


def test_a_style_that_would_end_early_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"style must not end .*: got '</style' in line 2; write it in"):
        inline("a {}\n/* </style> */", "style")
    assert inline("/* </script> */", "style") == "/* </script> */"
    assert inline('"<" + "/script>"', "script") == '"<" + "/script>"'


def test_what_is_built_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(offline_pages.ENDS, "script", re.compile("use strict"))
    with pytest.raises(ArgumentError, match="got 'use strict' in line 1"):
        built("heads")


def test_a_page_may_do_what_it_says_and_nothing_else() -> None:
    still = policy(style="a", images=True)
    assert "img-src data:;" in still and "script" not in still and "blob" not in still
    alive = policy(style="a", script="b", images=True, wasm=True)
    assert alive.startswith("default-src 'none'; style-src 'sha256-") and "img-src data: blob:;" in alive
    assert "' 'wasm-unsafe-eval';" in alive and "'unsafe" not in alive
    assert "wasm" not in policy(style="a", script="b")
    with pytest.raises(ArgumentError, match="wasm needs a script that runs it: wasm=True, script=None"):
        policy(style="a", wasm=True)


def test_a_frame_in_a_notebook_may_run_scripts_only_where_it_has_some() -> None:
    assert 'sandbox=""' in framed("<p>", "a", height=7)
    assert 'sandbox="allow-scripts allow-downloads"' in framed("<p>", "a", height=7, scripts=True)
