"""The whole page as people get it: `headwise look --html` of the built-in model and of MiniLM.

What a panel does is asked in test_page_wall, test_page_head, test_page_views and test_page_alive; here,
whether they do it together, and what hostile addresses and texts do to them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import axe
import headwise as hw
from browser import Browser, Page
from headwise.cli import application
from headwise.models import Pretrained
from trained import mini, minilm

pytestmark = pytest.mark.slow

HE, SHE = (f"The nurse said that {pronoun} left because {pronoun} was tired" for pronoun in ("he", "she"))
NASTY = "</script><img src=x onerror=alert(1)>"
TAB, RIGHT, DOWN = ("Tab", 9), ("ArrowRight", 39), ("ArrowDown", 40)
PAINTED = "new Promise(go => requestAnimationFrame(() => setTimeout(go, 100)))"  # anew, in other colours
SIZES = {"laptop": (1440, 900), "phone": (390, 844), "enlarged": (320, 640)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """As `look` writes them."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("pages")
    written = {name: folder / f"{name}.html" for name in ("mini", "minilm")}
    for name, path in written.items():
        outcome = CliRunner().invoke(application(), ["look", HE, SHE, "--model", name, "--html", str(path)])
        assert outcome.exit_code == 0, outcome.output
    return written


def opened(browser: Browser, path: Path, fragment: str = "", **options: Any) -> Page:
    page = browser.open(path, fragment=fragment, **options)
    page.wait("document.documentElement.dataset.ready === 'true'")
    if path.stem == "mini":
        page.wait("document.querySelectorAll('#alive-words button').length === 10")
    return page


def names(page: Page) -> list[str]:
    return page.evaluate("[...document.querySelectorAll('#wall .tile')].map(tile => tile.dataset.head)")


@torch.no_grad()
def watched(model: Pretrained, text: str) -> hw.Heads:
    inputs = model.tokenizer(text, return_tensors="pt")
    with hw.watch(model.model, tokenizer=model.tokenizer, keep=True, patterns=True) as heads:
        model.model(**inputs) if model is minilm() else model.model(inputs["input_ids"])
    return heads


def weights(heads: hw.Heads, layer: int, head: int) -> Tensor:
    call_record = heads[layer].calls[-1]
    assert call_record.map is not None
    return call_record.map.dense()[0, head]


def read_cell(page: Page, row: int, column: int, shape: tuple[int, int]) -> float:
    """The number that the page tells when the mouse stands there."""
    box = page.evaluate(
        "(() => { const cells = document.querySelector('#one-head .stage .cells'); "
        "cells.scrollIntoView({block: 'center'}); const b = cells.getBoundingClientRect(); "
        "return [b.left, b.top, b.width, b.height]; })()"
    )
    x, y = box[0] + box[2] * (column + 0.5) / shape[1], box[1] + box[3] * (row + 0.5) / shape[0]
    page.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    page.wait(f"document.querySelector('#one-head .cell-line').textContent.includes('({row}) →')")
    return float(page.evaluate("[...document.querySelectorAll('#one-head .cell-line b')].at(-1).title"))


def check_cell(page: Page, row: int, column: int, exact: Tensor) -> None:
    shown = read_cell(page, row, column, (exact.shape[0], exact.shape[1]))
    assert abs(shown - float(exact[row, column])) <= max(0.01 * float(exact[row, column]), 1e-4)


@pytest.mark.thinned(0, slow=2)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_page_of_two_texts_opens_on_their_comparison(
    size: tuple[int, int], browser: Browser, files: dict[str, Path]
) -> None:
    """It opened on head 0.0 of the first text; the second stood in a menu, the comparison below all heads."""
    most = watched(mini(), HE).changes(watched(mini(), SHE)).all[0]
    page = opened(browser, files["mini"], size=size)
    page.wait("document.querySelector('#panel-flip .flip-title')?.textContent")
    assert page.text("#panel-flip .flip-title").startswith(f"Layer {most.layer}, head {most.head}: ")
    assert page.text("#head-title").startswith(f"Layer {most.layer}, head {most.head}")
    places = page.evaluate(
        "['#more', '#wall', '#one-head'].map(one => document.querySelector(one).getBoundingClientRect().top)"
    )
    assert places[0] < places[1] <= places[2]
    assert axe.findings(page) == []
    page.dark(True)
    page.evaluate(PAINTED)
    assert axe.findings(page) == []


def test_an_address_wins_over_what_a_page_opens_on(browser: Browser, files: dict[str, Path]) -> None:
    page = opened(browser, files["mini"], "#layer=3&head=2&tab=numbers")
    assert page.text("#head-title").startswith("Layer 3, head 2")
    assert page.evaluate("document.querySelector('#tab-numbers').getAttribute('aria-selected')") == "true"


@pytest.mark.parametrize("name", ["mini", "minilm"])
def test_from_the_wall_to_one_number_and_through_every_view(
    name: str, browser: Browser, files: dict[str, Path]
) -> None:
    model = {"mini": mini, "minilm": minilm}[name]()
    heads = watched(model, HE)
    page = opened(browser, files[name])
    everything = [f"{number}.{head.head}" for number, layer in enumerate(heads.values()) for head in layer]
    assert names(page) == everything
    page.evaluate("document.querySelector('#wall').scrollIntoView()")
    page.wait("document.querySelectorAll('#wall .thumb[data-drawn=true]').length > 8")
    page.click('[data-head="2.3"]')
    page.wait("document.querySelector('#head-title').textContent.includes('Layer 2, head 3')")
    check_cell(page, 7, 3, weights(heads, 2, 3))
    page.click('#one-head [data-value="lines"]')
    page.wait("document.querySelectorAll('#one-head .lines path').length > 9")
    page.choose("#wall-sort", "entropy")
    by = {at: head.values["entropy"] for at, head in zip(everything, heads.all(), strict=True)}
    numbers = [by[at] for at in names(page)]
    assert numbers == sorted(numbers, reverse=True)
    page.choose("#wall-sort", "layer")
    page.click('#wall .chip[data-label="previous-token"]')
    labels = {at: head.label.name for at, head in zip(everything, heads.all(), strict=True)}
    assert names(page) == [at for at in everything if labels[at] == "previous-token"]
    page.click('#wall .chip[data-label=""]')
    for tab in page.evaluate("[...document.querySelectorAll('[role=tab]')].map(tab => tab.dataset.tab)"):
        page.click(f"#tab-{tab}")
        page.wait(f"document.querySelector('#panel-{tab}').childElementCount > 0")
        assert page.state("tab") == tab
        if tab == "flip":
            assert page.text("#panel-flip").count("she") > 1
        if tab == "compare":
            page.wait("document.querySelector('#compare-distance')")
            assert float(page.text("#compare-distance").split()[0]) > 0


def test_a_live_head_is_not_compared_with_its_own_copy(browser: Browser, files: dict[str, Path]) -> None:
    page = opened(browser, files["mini"], "#layer=2&head=3&tab=compare")
    page.click("#alive-toggle")  # what runs here is looked at from now on
    page.wait("document.querySelector('#alive-off button')")
    page.click("#alive-on")
    page.wait("!document.querySelector('#alive-off button')")
    page.click("#tab-compare")
    page.wait("parseFloat(document.querySelector('#compare-distance')?.textContent) > 0")


def test_the_keyboard_alone_types_switches_chooses_and_reads_a_row(
    browser: Browser, files: dict[str, Path]
) -> None:
    page = opened(browser, files["mini"], "#layer=0&head=0")

    def tab_to(selector: str) -> None:
        for _ in range(60):
            page.press(*TAB)
            if page.evaluate(f"document.activeElement.matches({selector!r})"):
                return
        raise AssertionError(f"no way to {selector}")

    tab_to("#alive-text")
    page.ask("Input.insertText", text=", and slept")
    page.wait("new URLSearchParams(location.hash.slice(1)).get('typed')?.endsWith(', and slept')")
    text = page.evaluate("document.querySelector('#alive-text').value")
    before = page.text("#alive-words")
    tab_to("#wall .tile")
    for key in (DOWN, DOWN, RIGHT):
        page.press(*key)
    assert (page.state("layer"), page.state("head")) == ("2", "1")
    page.press("o", 79)
    page.wait(f"document.querySelector('#alive-words').textContent !== {json.dumps(before)}")
    assert page.state("off") == "2.1"
    page.press("o", 79)
    page.wait("!document.querySelector('#alive-off button')")
    tab_to("#one-head .stage [role=application]")
    for _ in range(5):
        page.press(*DOWN)
    row = int(page.state("token") or -1)
    assert row == 4 and page.text("#said").strip() != ""
    tab_to("#one-head .row-details summary")
    for kind in ("keyDown", "keyUp"):
        more = {"text": "\r"} if kind == "keyDown" else {}
        page.ask("Input.dispatchKeyEvent", type=kind, key="Enter", windowsVirtualKeyCode=13, **more)
    page.wait("document.querySelector('.row-table tbody tr')")
    exact = weights(watched(mini(), text), 2, 1)[row]
    rows = page.evaluate(
        "[...document.querySelectorAll('.row-table tbody tr')].map(r => "
        "[Number(r.cells[1].textContent), Number(r.cells[2].firstChild.title)])"
    )
    assert len(rows) == row + 1
    for position, number in rows:
        assert abs(number - float(exact[position])) <= max(0.01 * float(exact[position]), 1e-4)
    tab_to("#more [role=tab]")
    page.press(*RIGHT)
    assert page.state("tab") == "compare"


@pytest.mark.parametrize(("name", "size"), [("mini", "laptop"), ("mini", "phone"), ("minilm", "phone")])
def test_nothing_keeps_anybody_out_in_any_tab(
    name: str, size: str, browser: Browser, files: dict[str, Path]
) -> None:
    page = opened(browser, files[name], "#layer=2&head=3", size=SIZES[size], dark=size == "laptop")
    if name == "mini":
        page.click("#alive-toggle")
        page.wait("document.querySelector('#alive-off button') && document.querySelector('.alive-down')")
    for tab in page.evaluate("[...document.querySelectorAll('[role=tab]')].map(tab => tab.dataset.tab)"):
        page.click(f"#tab-{tab}")
        page.wait(f"document.querySelector('#panel-{tab}').childElementCount > 0")
        assert axe.findings(page, "#more") == [], tab
        for width, height in (SIZES["enlarged"], SIZES[size]):  # 320: a laptop's letters four times as large
            page.resize(width, height)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (tab, width)
    if name == "mini":
        assert axe.findings(page) == []
    page.dark(size != "laptop")
    page.evaluate(PAINTED)
    assert axe.findings(page) == []


HOSTILE = {
    "places": "layer=99999&head=-1&source=7&text=7&token=1e9&step=99999999&checkpoint=99999",
    "words": "colour=__proto__&sort=constructor&label=__proto__&order=valueOf&view=toString&tab=<b>",
    "names": "constructor=1&toString=2&hasOwnProperty=3&__proto__=4&layer=1&head=2",
    "second": "beside=0.0.__proto__.length&tab=compare&search=((((",
    "typed": f"typed={NASTY}&against={NASTY}&off=9.9,1.1,,.,1.1&tab=flip",
}


@pytest.mark.parametrize("address", HOSTILE.values(), ids=HOSTILE.keys())
def test_an_address_that_nobody_wrote_breaks_nothing(
    address: str, browser: Browser, files: dict[str, Path]
) -> None:
    page = opened(browser, files["mini"], f"#{address}")
    page.evaluate("document.querySelector('#more').scrollIntoView()")
    page.wait("[...document.querySelectorAll('[role=tabpanel]')].some(p => !p.hidden && p.firstChild)")
    page.evaluate("document.querySelector('.next-head').click()")
    assert re.search("layer=[0-7]&head=[0-6]", page.evaluate("location.hash"))
    assert "hasOwnProperty" not in page.evaluate("location.hash")
    assert page.count("img[src=x]") == 0


def test_a_link_in_an_open_page_shows_what_it_shows_in_a_new_one(
    browser: Browser, files: dict[str, Path]
) -> None:
    page = opened(browser, files["mini"])
    for link in ("layer=2&head=1&token=3&sort=entropy", "layer=1&head=0"):
        page.evaluate(f"location.hash = {link!r}")
        page.wait(f"location.hash === '#{link}'")
    assert page.evaluate("document.querySelector('#wall-sort').value") == "layer"
    page.evaluate("history.back()")
    page.wait("document.querySelector('#wall-sort').value === 'entropy'")
    page.evaluate("location.hash = 'layer=0&head=0&typed=hello&against=hallo'")
    page.wait("document.querySelector('#alive-text').value === 'hello'")
    page.evaluate("location.hash = 'layer=0&head=0'")
    page.wait(f"document.querySelector('#alive-text').value === {HE!r}")
    assert page.evaluate("document.querySelector('.alive-compared').hidden")
    longer = (
        "#layer=5&head=2&token=12&typed=The+cat+sat+on+the+mat.+The+cat+sat+on+the"  # than what was measured
    )
    again = opened(browser, files["mini"], longer)
    again.wait("document.querySelector('#one-head .row-line').textContent.includes('(12) attends to: “mat”')")
    assert again.state("token") == "12"


def test_a_text_of_lines_and_markup_is_read_alive_as_it_was_measured(
    browser: Browser, tmp_path: Path
) -> None:
    text = f"  Two  spaces,\n\na line: {NASTY} \u202eabc שלום 😀\u200b"
    path = watched(mini(), text).to_html(tmp_path / "mini.html", text=text, alive=mini())
    page = opened(browser, path, "#layer=1&head=1")
    count = len(mini().tokenizer(text)["input_ids"])
    assert page.text("#alive-read").startswith(f"{count} of 512 tokens")
    assert page.evaluate("document.querySelector('#alive-text').value") == text
    assert page.count("img[src=x]") == 0
