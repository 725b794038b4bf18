"""The page of heads in a real browser: its shell and its wall."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from browser import Browser, Page
from headwise.show.heads_page import page_of
from headwise.show.offline_pages import Blobs

pytestmark = pytest.mark.slow

TAB, ENTER, END, ESCAPE = ("Tab", 9), ("Enter", 13), ("End", 35), ("Escape", 27)
LEFT, UP, RIGHT, DOWN = ("ArrowLeft", 37), ("ArrowUp", 38), ("ArrowRight", 39), ("ArrowDown", 40)
LAYERS, HEADS, TOKENS = 3, 5, 11
NASTY = "</script><img src=x onerror=alert(1)>"
LABELS = {"previous-token": "#19289e", "sink": "#9b6e00", "mixed": "#777777"}


def previous(tokens: int) -> bytes:
    """Levels of a head that looks at the token before: 0 is hidden, 1 is no weight; 285 is all of it."""
    cells = [[0 if k > q else 1 for k in range(tokens)] for q in range(tokens)]
    for query in range(tokens):
        cells[query][max(query - 1, 0)] = 255
    return bytes(level for row in cells for level in row) + bytes([30] * tokens)


def head_of(layer: int, head: int, at: random.Random) -> dict[str, Any]:
    label = list(LABELS)[(layer + head) % 3]
    numbers = {"entropy": round(at.uniform(0, 3), 5), "first": None if head == 2 else round(at.random(), 5)}
    return {"layer": layer, "head": head, "label": label, "score": 0.98, "numbers": numbers}


def page_data(layers: int, heads: int, tokens: int) -> tuple[dict[str, Any], Blobs]:
    """What `headwise page 1` holds, written by hand."""
    blobs, at = Blobs(), random.Random(7)
    every = [(layer, head) for layer in range(layers) for head in range(heads)]
    unknown = "steps norms written written_most outputs distances cosines".split()
    sizes = dict.fromkeys(("queries", "keys", "rows", "columns"), tokens)
    call = sizes | dict.fromkeys(unknown) | {"left_out": 2, "finer": {}, "pairs": {}}
    call |= {"query_tokens": 0, "key_tokens": 0}
    calls = [call | {"maps": [blobs.pack(previous(tokens)) for _ in range(heads)]} for _ in range(layers)]
    readings = [
        {"name": f"text {text}", "text": words, "calls": calls, "image": None}
        | {"heads": [head_of(layer, head, at) for layer, head in every]}
        for text, words in enumerate((NASTY, "a long text " * 99))
    ]
    role = {"name": "verb > object", "share": 0.8, "low": 0.7, "high": 0.9, "cases": 101}
    role |= {"rule": "+1 words", "rule_share": 0.4, "offset": "+1 words", "offset_share": 0.4}
    role |= {"sentence": "finds what a verb is done to"}
    named = [
        {"name": f"layer {n}", "path": f"blocks.{n}.attn", "kind": "self", "num_heads": heads}
        for n in range(layers)
    ]
    flip = {"before": [0, 0], "after": [0, 1], "words": ["he", "she"], "layers": [None] * layers}
    moved = {"largest": None, "token": "", "places": None}
    flip["heads"] = [
        moved | {"layer": layer, "head": head, "distance": (layer * 7 + head * 3) % 11 / 11}
        for layer, head in every
    ]
    score = {"score": "", "threshold": 0.5, "queries": 1, "general": False}
    labels = [
        score | {"name": name, "colour": colour, "sentence": f"does what {name} says"}
        for name, colour in LABELS.items()
    ]
    entropy = {"name": "entropy", "title": "entropy (nats)", "sentence": "how widely it looks"}
    first = {"name": "first", "title": "first", "sentence": "how much goes to the first token"}
    data = {
        "format": "headwise page 1", "version": "0",
        "heading": f"{NASTY}: what {layers * heads} heads attend to",
        "start": {"layer": 0, "head": 0, "comparison": False},
        "sources": [{"title": "sample", "layers": named, "roles": {"1.3": [role]}, "readings": readings}],
        "texts": [[f"{NASTY}{n}" for n in range(tokens)]], "labels": labels,
        "statistics": [entropy | {"share": False}, first | {"share": True}], "flips": [flip],
        "effects": None, "training": None, "alive": None, "served": None,
    }  # fmt: skip
    return data, blobs


def written(path: Path, layers: int, heads: int, tokens: int) -> Path:
    path.write_text(page_of(*page_data(layers, heads, tokens)), "utf-8")
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("wall") / "small.html", LAYERS, HEADS, TOKENS)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("wall") / "large.html", 32, 32, 61)


def opened(browser: Browser, path: Path, fragment: str = "", **options: Any) -> Page:
    page = browser.open(path, fragment=fragment, **options)
    page.wait("document.documentElement.dataset.ready === 'true'")
    return page


@pytest.fixture
def page(browser: Browser, small: Path) -> Page:
    return opened(browser, small)


def names(page: Page) -> list[str]:
    """The heads that are there, in the order of the page."""
    return page.evaluate("[...document.querySelectorAll('#wall .tile')].map(e => e.dataset.head)")


def chosen(page: Page) -> list[str]:
    return page.evaluate(
        "[...document.querySelectorAll('#wall [aria-selected=true]')].map(e => e.dataset.head)"
    )


def type_in(page: Page, selector: str, text: str) -> None:
    page.evaluate(f"document.querySelector('{selector}').select()")
    page.ask("Input.insertText", text=text)


ALL = [f"{layer}.{head}" for layer in range(LAYERS) for head in range(HEADS)]


def test_every_head_is_drawn_and_nothing_is_loaded(browser: Browser, small: Path) -> None:
    page = opened(browser, small)
    assert names(page) == ALL
    assert page.count(".thumb[data-drawn=true]") == LAYERS * HEADS
    assert page.evaluate("performance.getEntriesByName('first-picture').length") == 1
    assert page.text("#wall .count") == "15 of 15 heads"
    assert page.text(".sizes") == "3 layers × 5 heads, 11 tokens, 2 padded positions not shown"


def test_a_dot_is_a_cell_in_the_colour_of_its_weight(browser: Browser, small: Path) -> None:
    page = opened(browser, small)
    dots = """(async () => {
      const map = document.querySelector('[data-head="1.2"] .thumb').getBoundingClientRect();
      const canvas = document.querySelector('[data-head="1.2"]').parentElement.querySelector('canvas');
      const box = canvas.getBoundingClientRect();
      const dots = map.width / 11;
      const at = (q, k) => [...canvas.getContext('2d').getImageData(
        map.left - box.left + (k + 0.5) * dots, map.top - box.top + (q + 0.5) * dots, 1, 1).data].slice(0, 3);
      return [map.height - map.width, dots % 1, at(5, 4), at(5, 1), at(5, 9)];
    })()"""
    longer, rest, all_of_it, none_of_it, hidden = page.evaluate(dots)
    assert (longer, rest) == (0, 0)  # a cell is a whole number of dots
    assert all_of_it == [42, 17, 92] and none_of_it == [255, 253, 250] and hidden == [228, 228, 232]
    page.click("#theme")
    page.wait(f"{dots}.then(said => String(said[2]) === '255,246,220')")  # drawn anew, from dark to light
    page.close()  # Chromium warns of a canvas that is read back, as this test does


def test_only_thumbnails_near_the_window_are_drawn(browser: Browser, large: Path) -> None:
    page = opened(browser, large)
    drawn = "[...document.querySelectorAll('.thumb[data-drawn=true]')]"
    assert len(names(page)) == 1024
    count = page.evaluate(f"{drawn}.length")
    assert 20 < count < 500
    near = "b => b.top < innerHeight + 210 && b.bottom > -210"
    assert page.evaluate(f"{drawn}.map(c => c.getBoundingClientRect()).every({near})")
    are_drawn = (
        "[...document.querySelectorAll('#wall .thumb')].filter(c => { const b = c.getBoundingClientRect(); "
        "return b.bottom > 0 && b.top < innerHeight; }).every(c => c.dataset.drawn)"
    )
    assert page.evaluate(are_drawn)
    for layer in range(0, 32, 3):
        page.evaluate(f'''document.querySelector('[data-head="{layer}.7"]').scrollIntoView()''')
        page.wait(are_drawn)
    line = "document.querySelector('#wall .wall-line')"  # the first one is far away by now, and was released
    assert page.evaluate(f"[{line}.querySelector('canvas').width, {line}.querySelector('[data-drawn]')]") == [
        0,
        None,
    ]
    assert page.evaluate(f"{drawn}.length") < 24 * 16 + 2 * count


def test_heads_are_sorted_as_their_numbers_are(page: Page) -> None:
    heads = page_data(LAYERS, HEADS, TOKENS)[0]["sources"][0]["readings"][0]["heads"]
    by = {f"{head['layer']}.{head['head']}": head["numbers"] for head in heads}
    most = sorted(ALL, key=lambda name: -by[name]["entropy"])
    page.choose("#wall-sort", "entropy")
    assert names(page) == most
    assert page.evaluate("document.querySelector('.tile .name').dataset.text") == most[0]
    number = page.evaluate("document.querySelector('.tile .value').dataset.text")
    assert number == f"{by[most[0]]['entropy']:.2f}"
    page.click("#wall-order")
    assert names(page) == most[::-1]
    page.choose("#wall-sort", "first")  # where a head has no such number, it comes last both ways
    measured = [name for name in ALL if by[name]["first"] is not None]
    assert names(page)[: len(measured)] == sorted(measured, key=lambda name: by[name]["first"])
    page.choose("#wall-sort", "moved")
    page.click("#wall-order")
    assert names(page)[0] == "1.1"
    page.choose("#wall-sort", "layer")
    assert names(page) == ALL


def test_colours_stand_for_a_number_that_is_shown(browser: Browser, small: Path) -> None:
    page = opened(browser, small, "#colour=entropy")
    heads = page_data(LAYERS, HEADS, TOKENS)[0]["sources"][0]["readings"][0]["heads"]
    shown = page.evaluate("[...document.querySelectorAll('#wall .tint')].map(e => e.dataset.text)")
    assert shown == [f"{head['numbers']['entropy']:.2f}" for head in heads]
    assert "how widely it looks" in page.text(".wall-scale")
    assert page.count(".thumb[data-drawn=true]") == 0
    page.choose("#wall-colour", "role")
    shown = page.evaluate("[...document.querySelectorAll('#wall .tint')].map(e => e.dataset.text)")
    assert shown == ["0.80" if name == "1.3" else "–" for name in ALL]
    page.choose("#wall-colour", "maps")
    page.wait("document.querySelectorAll('.thumb[data-drawn=true]').length === 15")


def test_labels_and_words_choose_which_heads_are_shown(page: Page) -> None:
    page.click('.chip[data-label="sink"]')
    assert names(page) == [name for name in ALL if (int(name[0]) + int(name[2])) % 3 == 1]
    assert page.text("#wall .count") == "5 of 15 heads" and page.text('.chip[data-label="sink"] .many') == "5"
    page.click('.chip[data-label="sink"]')
    for words, expected in {
        "1.3": ["1.3"],
        "1.": [name for name in ALL if name[0] == "1"],
        "Layer 2": [name for name in ALL if name[0] == "2"],
        "verb > ob": ["1.3"],
        "done to": ["1.3"],
        "does what sink": [name for name in ALL if (int(name[0]) + int(name[2])) % 3 == 1],
        "zebra": [],
    }.items():
        type_in(page, "#wall-search", words)
        assert names(page) == expected, words
    assert page.text("#wall .none").startswith("No head matches “zebra”")
    page.click("#wall .none button")
    assert names(page) == ALL


@pytest.mark.parametrize("has_roles", [True, False])
def test_what_the_search_suggests_is_found(has_roles: bool, browser: Browser, tmp_path: Path) -> None:
    """It suggested "pronoun" in every page, most of which have no head with that role."""
    path = written(tmp_path / "page.html", LAYERS, HEADS, TOKENS)
    if not has_roles:
        path.write_text(path.read_text("utf-8").replace('"1.3":[', '"9.9":['), "utf-8")
    page = opened(browser, path)
    placeholder = page.evaluate("document.querySelector('#wall-search').placeholder")
    name, layer, word = placeholder.removesuffix(" …").split(", ")
    assert word == ("verb" if has_roles else "previous-token")
    for query in (name, layer, word):
        type_in(page, "#wall-search", query)
        assert name in names(page), query


def test_the_keyboard_alone_is_enough(page: Page) -> None:
    for _ in range(20):
        page.press(*TAB)
        if page.evaluate("document.activeElement.matches('.tile')"):
            break
    assert page.evaluate("document.activeElement.dataset.head") == "0.0"
    assert page.evaluate("document.querySelectorAll('.tile[tabindex=\"0\"]').length") == 1
    for key, name in (
        (RIGHT, "0.1"),
        (DOWN, "1.1"),
        (END, "1.4"),
        (RIGHT, "2.0"),
        (UP, "1.0"),
        (LEFT, "0.4"),
    ):
        page.press(*key)
        assert chosen(page) == [name]
        assert page.evaluate("document.activeElement.dataset.head") == name
    label = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert label == "layer 0 head 4, sink 0.98"
    page.press("/", 191)
    assert page.evaluate("document.activeElement.id") == "wall-search"
    page.ask("Input.insertText", text="1.3")
    assert names(page) == ["1.3"] and chosen(page) == []
    page.press(*ESCAPE)
    assert names(page) == ALL


def test_an_address_reopens_the_view(browser: Browser, small: Path) -> None:
    page = opened(browser, small)
    page.click('[data-head="2.1"]')
    page.choose("#wall-sort", "entropy")
    page.click("#wall-order")
    page.click('.chip[data-label="previous-token"]')
    page.choose("#wall-colour", "first")
    before = names(page)
    again = opened(browser, small, page.evaluate("location.hash"))
    assert names(again) == before and chosen(again) == ["2.1"]
    assert again.evaluate("document.querySelector('#wall-colour').value") == "first"
    assert again.evaluate("document.querySelector('#wall-order').textContent") == "smallest first ↑"
    odd = opened(browser, small, "#layer=99&head=x&sort=nonsense&colour=nonsense&order=up")
    assert names(odd) == ALL and chosen(odd) == ["0.0"]


def test_what_was_read_is_shown_as_text_and_can_be_chosen(page: Page) -> None:
    assert page.text("#what blockquote") == NASTY and page.text("h1").startswith(NASTY)
    assert page.count("img") == 0
    page.choose("#choose-text", "1")
    short = page.text("#what blockquote")
    assert short.endswith(" …") and len(short) < 330
    page.click("#what button")
    assert page.text("#what blockquote") == ("a long text " * 99).strip()
    page.wait("document.querySelectorAll('.thumb[data-drawn=true]').length === 15")


def test_heads_that_are_switched_off_say_so(browser: Browser, small: Path) -> None:
    page = opened(browser, small, "#off=1.3,2.0")
    off = page.evaluate("[...document.querySelectorAll('.tile.off')].map(e => e.ariaLabel)")
    assert off == [
        "layer 1 head 3, sink 0.98, role verb > object, switched off",
        "layer 2 head 0, mixed, switched off",
    ]


CONTRASTS = """(() => {
  const numbers = text => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const linear = x => x / 255 <= 0.04045 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const back = element => {
    const found = numbers(getComputedStyle(element).backgroundColor);
    return found.length === 3 || found[3] > 0 ? found : back(element.parentElement);
  };
  const words = e => e.dataset.text || [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
  return [...document.querySelectorAll('body *')]
    .filter(e => e.checkVisibility() && !e.closest('.off, script, option') && words(e))
    .map(e => {
      const [a, b] = [light(numbers(getComputedStyle(e).color)), light(back(e))].sort((x, y) => y - x);
      return [(a + 0.05) / (b + 0.05), e.className, e.textContent.slice(0, 20)];
    })
    .filter(([contrast]) => contrast < 4.5);
})()"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("view", ["#label=sink", "#colour=entropy", "#colour=label", "#sort=entropy"])
def test_every_letter_can_be_read(browser: Browser, small: Path, dark: bool, view: str) -> None:
    assert opened(browser, small, view, dark=dark).evaluate(CONTRASTS) == []


@pytest.mark.parametrize("view", ["", "#colour=entropy", "#sort=entropy"])
def test_a_phone_never_scrolls_sideways(browser: Browser, small: Path, large: Path, view: str) -> None:
    for path in (small, large):
        page = opened(browser, path, view, size=(390, 844))
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.click('[data-head="3.1"]')
    assert page.text(".chosen-bar").startswith("layer 3 · head 1")
    page.click(".chosen-bar button")
    assert page.evaluate("document.activeElement.id") == "one-head"
