"""The page's benchmark: what is weighed, what is said where something is missing. No test looks at a time."""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import browser
from benchmarks import pages, report


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LAYERS": 2, "HEADS": 3, "WIDTH": 12, "LONG_LAYERS": 2, "LONG_HEADS": 3}.items():
        monkeypatch.setattr(pages, name, value)
    monkeypatch.setattr(pages.long_heads, "__defaults__", (1024, 2, 3, 128))


PEER = """
from IPython.display import HTML, Javascript

def model_view(attention, tokens, html_action):
    assert html_action == "return" and len(tokens) == attention[0].shape[3]
    return HTML(Javascript("x" * len(attention)).data)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_every_page_is_weighed_beside_the_other_and_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bertviz").mkdir()
    (tmp_path / "bertviz" / "__init__.py").write_text(PEER)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = "IPython" in sys.modules
    messages: list[str] = []
    try:
        stored = pages.run(
            (5, 7), long=1024, out=tmp_path, commit="abc", in_browser=False, say=messages.append
        )
    finally:
        sys.modules.pop("bertviz", None)
    assert ("IPython" in sys.modules) == (before or find_spec("IPython") is not None)  # no stand-in is left
    first, second, long = stored["records"]
    assert (first["heads"], first["tokens"], second["tokens"]) == (6, 5, 7)
    assert first["bytes"] > 10_000 and first["bertviz"]["bytes"] == 2
    assert (long["tokens"], long["cells"], "bertviz" in long) == (1024, 128, False)
    assert long["browser"] == {"missing": "not opened"}
    assert report.load(pages.file_in(tmp_path)) == json.loads(json.dumps(stored))
    table = pages.table(stored)
    assert all(row in table for row in messages) and len(messages) == 3
    assert "| 6 heads, 1,024 tokens, 128 × 128 cells | " in table


def test_without_the_other_or_a_browser_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    actual = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bertviz" else actual(name))
    monkeypatch.setattr(pages, "_browser", lambda: None)
    monkeypatch.setattr(pages, "run", lambda *args, **options: {})
    assert pages.bertviz([], [], tmp_path / "x") == {"missing": pages.MISSING}
    assert pages.main(["--out", str(tmp_path)]) == 0
    err = capsys.readouterr().err
    assert "bertviz is not installed: pip install bertviz" in err and "no browser: install chromium" in err
    for arguments, message in (
        (["--longest", "63"], "at least 64: got 63"),
        (["--show"], "--show needs results of this kind of CPU"),
    ):
        with pytest.raises(SystemExit):
            pages.main([*arguments, "--out", str(tmp_path)])
        assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(
    browser.chromium_path() is None, reason="no browser: install chromium, or set HEADWISE_BROWSER"
)
def test_a_browser_tells_the_first_picture_and_the_frames_of_scrolling(tmp_path: Path) -> None:
    heads = pages.long_heads(256, 5, 7, 128)
    record = pages.measured("page", heads.to_html, tmp_path, pages._browser())
    assert record["browser"]["first_picture_s"] > 0 and record["browser"]["longest_frame_ms"] > 0, record
    assert record["browser"]["complaints"] == []
