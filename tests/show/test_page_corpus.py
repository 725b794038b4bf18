"""The page of a survey in a real browser: the wall in the corpus' colours, the documents that move a head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import axe
import headwise as hw
from browser import Browser
from headwise.corpus.result import Survey
from headwise.models.pretrained import load
from trained import an_own_folder

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.slow

EVIL = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Survey:
    """13 documents, in a file whose name is markup."""
    place = tmp_path_factory.mktemp("survey")
    some = [
        f"The cat that I saw {'yesterday ' * (at % 5)}ran away {EVIL if at == 3 else ''}" for at in range(13)
    ]
    corpus = place / "<b>a & b.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
    model = load(an_own_folder(place / "own", title="small"))
    return hw.survey(model, corpus, out=place / "out", roles=False, progress=False)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_wall_has_the_colours_of_the_corpus(measured: Survey, tmp_path: Path, dark: bool) -> None:
    place = measured.to_html(tmp_path / "heads.html")
    with Browser() as browser:
        page = browser.open(place, dark=dark)
        page.wait("document.querySelectorAll('.wall .tile').length === 6")
        assert page.evaluate("document.querySelector('#heading').textContent").endswith("over 13 documents")
        assert page.evaluate("document.querySelector('#wall-colour').value") == "corpus:dependence"
        tints = page.evaluate("[...document.querySelectorAll('.tile .tint')].map(each => each.dataset.text)")
        assert tints == [f"{head.dependence:.2f}" for head in measured]
        page.evaluate("document.querySelector('#tab-corpus').scrollIntoView()")
        page.click(".tile[data-head='1.2']")
        page.wait("document.querySelector('#panel-corpus h3')?.textContent.endsWith('layer 1, head 2')")
        panel = page.evaluate("document.querySelector('#panel-corpus').textContent")
        head = measured[1, 2]
        assert head.movers[0].document in panel and "<b>a & b.jsonl:" in panel
        assert f"{abs(head.movers[0].spreads or 0):.1f} standard deviations" in panel
        assert f"{head.statistics['entropy'].mean:.2f}" in panel
        page.evaluate(
            "(() => { const s = document.querySelector('#wall-sort'); s.value = 'corpus:mean:entropy';"
            " s.dispatchEvent(new Event('change')); })()"
        )
        order = page.evaluate("[...document.querySelectorAll('.tile')].map(each => each.dataset.head)")
        wanted = sorted(measured, key=lambda each: -each.statistics["entropy"].mean)
        assert order == [f"{each.layer}.{each.head}" for each in wanted]
        assert axe.findings(page) == []
