"""One head in the page, in a real browser: what is pointed at, pinned, zoomed into, played and taken away.

The pages hold weights that are known here, written as the page's data format has them.
"""

from __future__ import annotations

import base64
import functools
import json
import math
import struct
import zlib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

import axe
import headwise as hw
from browser import Browser, Page
from headwise.show.heads_page import page_of
from headwise.show.offline_pages import Blobs, as_bytes, levels

pytestmark = pytest.mark.slow

HOSTILE = '</script><img src=x onerror="document.title=1">'
WORDS = ["<s>", "The", "cat", "sat", "because", HOSTILE, "it & she", "slept", "\n", "tired", "."]


# Pages


@functools.cache
def causal(heads: int = 3, length: int = len(WORDS)) -> Tensor:
    """Weights [heads, length, length] of queries that see what is before them."""
    generator = torch.Generator().manual_seed(7)
    scores = torch.randn(heads, length, length, generator=generator) * 2
    return scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf).softmax(-1)


def an_image(side: int = 8) -> str:
    """A ring, grey on black, as a page holds images."""
    middle = (side - 1) / 2
    ring = [
        [abs(math.hypot(x - middle, y - middle) - side / 3.5) < 1 for x in range(side)] for y in range(side)
    ]
    dots = zlib.compress(b"".join(bytes([0, *(230 * dot for dot in row)]) for row in ring))
    parts = ((b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)), (b"IDAT", dots), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(held)) + kind + held + struct.pack(">I", zlib.crc32(kind + held))
        for kind, held in parts
    )
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()


def a_call(
    blobs: Blobs, weights: Tensor, tokens: tuple[int | None, int | None], **more: Any
) -> dict[str, Any]:
    _, rows, columns = weights.shape
    call = {
        "queries": rows, "keys": columns, "rows": rows, "columns": columns, "query_tokens": tokens[0],
        "key_tokens": tokens[1], "left_out": 0, "steps": None,
        "maps": [blobs.pack(levels(each)) for each in weights],
        "norms": None, "written": None, "written_most": None, "finer": {}, "pairs": {}, "outputs": None,
        "distances": None, "cosines": None,
    }  # fmt: skip
    return call | more


def a_page(
    folder: Path,
    texts: list[list[str]],
    readings: list[dict[str, Any]],
    blobs: Blobs,
    kind: str = "self",
) -> Path:
    """A page of one layer, 2 as it counts, whose readings are given: calls, and what else is known."""
    count = len(readings[0]["call"]["maps"])
    head = {
        "layer": 0,
        "label": "previous-token",
        "score": 0.83,
        "numbers": {"entropy": 1.25, "first": 0.125},
    }
    held = [
        {
            "name": "", "text": None, "image": each.get("image"),
            "heads": [head | {"head": h} for h in range(count)], "calls": [each["call"]],
        }
        for each in readings
    ]  # fmt: skip
    role = {"name": "verb > object", "share": 0.75, "low": 0.6, "high": 0.85, "cases": 101,
            "rule": "+1 words", "rule_share": 0.5, "offset": "+1 words", "offset_share": 0.5,
            "sentence": "finds the object of a verb"}  # fmt: skip
    always = role | {"share": 1.0, "low": 0.964, "high": 1.0, "rule_share": 0.0}
    nearly = role | {"share": 0.998, "low": None, "high": None, "rule_share": 0.002}
    nearly |= {"rule": "the nearest verb", "offset": "the next word", "offset_share": 0.001}
    source = {
        "title": "mini", "roles": {"0.1": [role], "0.2": [always, nearly]}, "readings": held,
        "layers": [{"name": "layer 2", "path": "layers.2", "kind": kind, "num_heads": count}],
    }  # fmt: skip
    label = {"name": "previous-token", "colour": "#2f5bd0", "score": "previous", "threshold": 0.5,
             "queries": 1, "general": True,
             "sentence": "attends to the token just before the current one"}  # fmt: skip
    statistics = [
        {"name": "entropy", "title": "entropy (nats)", "sentence": "how widely it looks", "share": False},
        {"name": "first", "title": "first", "sentence": "how much the first token gets", "share": True},
    ]
    data = {
        "format": "headwise page 1", "version": "0", "heading": "mini: what its heads attend to",
        "start": {"layer": 0, "head": 0, "comparison": False},
        "sources": [source], "texts": texts, "labels": [label], "statistics": statistics, "flips": [],
        "effects": None, "training": None, "alive": None, "served": None,
    }  # fmt: skip
    path = folder / "heads.html"
    path.write_text(page_of(data, blobs), "utf-8")
    return path


def plain(folder: Path, **more: Any) -> Path:
    blobs = Blobs()
    norms = torch.rand(3, len(WORDS), generator=torch.Generator().manual_seed(5)) + 0.5
    call = a_call(blobs, causal(), (0, 0), norms=blobs.pack(as_bytes(norms)), written_most=float(norms.max()))
    outputs = torch.randn(3, len(WORDS), 5, generator=torch.Generator().manual_seed(3)).half()
    call["outputs"] = {"width": 5, "data": blobs.pack(as_bytes(outputs))}
    return a_page(folder, [WORDS], [{"call": call | more}], blobs)


# What tests do with them


def opened(browser: Browser, path: Path, fragment: str = "", **options: Any) -> Page:
    page = browser.open(path, fragment=fragment, **options)
    page.wait("document.querySelector('#one-head').dataset.drawn !== undefined")
    return page


def point(page: Page, selector: str, x: float, y: float, kind: str = "mouseMoved", **options: Any) -> None:
    """The mouse, at a share of what the selector finds."""
    box = page.evaluate(
        f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
        "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
        "return [b.left, b.top, b.width, b.height]; })()"
    )
    at = {"x": box[0] + box[2] * x, "y": box[1] + box[3] * y}
    page.ask("Input.dispatchMouseEvent", type=kind, button=options.pop("button", "none"), **at, **options)


def cell(page: Page, row: int, column: int, shape: tuple[int, int]) -> None:
    point(page, "#one-head .stage .cells", (column + 0.5) / shape[1], (row + 0.5) / shape[0])


def number(page: Page, selector: str) -> float:
    """The exact number that stands behind the last short one."""
    return float(page.evaluate(f"[...document.querySelectorAll('{selector} b')].at(-1).title"))


def near(number: float, weight: Tensor) -> bool:
    return abs(number - float(weight)) <= max(0.01 * float(weight), 1e-4)


def key(page: Page, name: str, code: int) -> None:
    page.evaluate("document.querySelector('#one-head .stage [role=application]').focus()")
    page.press(name, code)


def saved(page: Page, button: str, kind: str) -> str:
    """What a button hands to the reader: base64 of the file."""
    page.evaluate(
        "URL.made ??= URL.createObjectURL; window.held = null;"
        f"URL.createObjectURL = blob => {{ if (blob.type.startsWith('{kind}')) window.held = blob;"
        " return URL.made.call(URL, blob); }"
    )
    page.click(button)
    page.wait("window.held !== null")
    return page.evaluate(
        "held.arrayBuffer().then(b => Array.from(new Uint8Array(b), c => String.fromCharCode(c)).join(''))"
        ".then(btoa)"
    )


@pytest.fixture(scope="module")
def plain_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain(tmp_path_factory.mktemp("head"))


@pytest.fixture
def page(browser: Browser, plain_page: Path) -> Page:
    return opened(browser, plain_page, "#layer=0&head=1")


# Exact maps


def test_title_label_role_and_statistics_stand_above_with_their_sentences(page: Page) -> None:
    assert page.text("#head-title") == "Layer 2, head 1"
    assert page.text("#one-head .label-chip") == "previous-token 0.83"
    shown = page.text("#one-head")
    for words in (
        "attends to the token just before the current one", "finds the object of a verb in 75% of 101 cases",
        "(95% interval 60–85%)", "“+1 words”, is right in 50% of them.", "how widely it looks",
        "how much the first token gets",
    ):  # fmt: skip
        assert words in shown
    page.click("#one-head .next-head")
    page.wait("document.querySelector('#one-head').dataset.drawn === '0.0.0.2'")
    assert page.text("#head-title") == "Layer 2, head 2"
    assert page.evaluate("document.querySelector('.next-head').disabled")
    always, nearly = page.evaluate(
        "[...document.querySelectorAll('.roles li')].map(item => item.textContent)"
    )
    assert "in 100% of 101 cases (95% interval 96–100%);" in always and "is right in 0% of them." in always
    assert "in >99% of 101 cases;" in nearly and "“the nearest verb”, is right in <1% of them, and" in nearly
    assert "the best fixed offset, “the next word”, in <1%." in nearly and "offset" not in always


def test_pointing_at_a_cell_tells_its_number_and_its_row(page: Page) -> None:
    height = page.evaluate("document.querySelector('.stage').getBoundingClientRect().top + scrollY")
    for row, column in ((3, 2), (7, 0), (9, 5)):
        cell(page, row, column, (11, 11))
        assert near(number(page, "#one-head .cell-line"), causal()[1, row, column])
        assert f"({row}) attends to: " in page.text("#one-head .row-line")
    assert "“sat” (3)" not in page.text("#one-head .cell-line")
    cell(page, 3, 9, (11, 11))
    assert page.text("#one-head .cell-line") == "“sat” (3) → “tired” (9): masked"
    after = page.evaluate("document.querySelector('.stage').getBoundingClientRect().top + scrollY")
    assert after == height  # nothing jumps


def test_a_token_that_looks_like_markup_is_shown_as_text(browser: Browser, plain_page: Path) -> None:
    page = opened(browser, plain_page, "#layer=0&head=0&token=5")
    assert HOSTILE in page.text("#one-head .down")
    assert HOSTILE in page.text("#one-head .across")
    assert f"“{HOSTILE}” (5) attends to" in page.text("#one-head .row-line")
    assert page.count("#one-head img") == 0
    assert page.evaluate("document.title") == "mini: what its heads attend to"


def test_the_keyboard_pins_a_token_moves_it_and_lets_go(page: Page) -> None:
    for _ in range(4):
        key(page, "ArrowDown", 40)
    assert page.state("token") == "3"
    assert page.text("#said").startswith("“sat” (3) attends to: ")
    for _ in range(3):
        key(page, "ArrowRight", 39)
    assert page.text("#one-head .cell-line").startswith("“sat” (3) → “cat” (2): ")
    assert near(number(page, "#one-head .cell-line"), causal()[1, 3, 2])
    key(page, "ArrowUp", 38)
    assert page.text("#one-head .cell-line").startswith("“cat” (2) → “cat” (2): ")
    key(page, "Escape", 27)
    assert page.state("token") is None
    assert page.evaluate("document.querySelector('.row-mark.pinned').hidden")
    page.click("#one-head .stage .cells", 20, 20)
    assert page.state("token") == "0"


def test_the_chosen_row_is_a_table(browser: Browser, plain_page: Path) -> None:
    page = opened(browser, plain_page, "#layer=0&head=1&token=4")
    page.click("#one-head .row-details summary")
    page.wait("document.querySelectorAll('.row-table tbody tr').length === 5")
    rows = page.evaluate(
        "[...document.querySelectorAll('.row-table tbody tr')].map(r => "
        "[r.cells[0].textContent, Number(r.cells[1].textContent), Number(r.cells[2].firstChild.title)])"
    )
    assert [row[2] for row in rows] == sorted((row[2] for row in rows), reverse=True)
    for token, position, weight in rows:
        assert token == WORDS[position]
        assert near(weight, causal()[1, 4, position])
    assert "6 masked" in page.text(".row-table caption")
    assert page.count(".row-table th[scope]") == 3 + 5
    key(page, "ArrowDown", 40)
    page.wait("document.querySelectorAll('.row-table tbody tr').length === 6")


def test_lines_are_as_opaque_as_weights_and_show_the_chosen_token_alone(page: Page) -> None:
    page.click('#one-head [data-value="lines"]')
    page.wait("document.querySelector('.lines path')")
    assert page.count(".lines path") == 66
    assert page.state("view") == "lines"
    key(page, "End", 35)
    opacities = page.evaluate(
        "[...document.querySelectorAll('.lines path')].map(p => Number(p.getAttribute('stroke-opacity')))"
    )
    expected = causal()[1, 10].sort(descending=True).values
    assert len(opacities) == 11
    assert all(near(opacity, weight) for opacity, weight in zip(opacities, expected, strict=True))


def test_weights_times_norm_is_another_map_with_a_sentence(page: Page) -> None:
    norms = torch.rand(3, len(WORDS), generator=torch.Generator().manual_seed(5)) + 0.5
    page.click('#one-head [data-value="written"]')
    page.wait("document.querySelector('#one-head').textContent.includes('Kobayashi')")
    cell(page, 7, 2, (11, 11))
    assert near(number(page, "#one-head .cell-line"), causal()[1, 7, 2] * norms[1, 2] / norms.max())
    assert "receives most from: " in page.text("#one-head .row-line")
    assert page.state("measure") == "written"


def test_the_text_is_coloured_and_a_click_pins_its_token(page: Page) -> None:
    title = page.evaluate("document.querySelector('.read-text [data-position=\"2\"]').title")
    mean = causal()[1, 2:, 2].mean()
    assert abs(float(title.split(": ")[-1]) - float(mean)) < 0.01
    page.click('.read-text [data-position="6"]')
    assert page.state("token") == "6"
    assert "weight that “it & she” (6) gives to a token" in page.text("#one-head .text")
    assert page.count(".read-text .unseen") == 4


def test_strongest_pairs_with_and_without_the_first_token_and_itself(page: Page) -> None:
    page.wait("document.querySelector('.pairs button')")
    assert page.text(".pairs button") == "<s> → <s> 1.00"
    page.click("#bare-pairs")
    page.wait("!document.querySelector('.pairs button').textContent.startsWith('<s>')")
    bare = causal()[1].clone()
    bare[:, 0] = 0
    bare.fill_diagonal_(0)
    query, at = divmod(int(bare.argmax()), len(WORDS))
    assert near(number(page, ".pairs li:first-child"), bare.max())
    page.click(".pairs button")
    assert page.state("token") == str(query)
    assert f"({at}): " in page.text("#one-head .cell-line")


def test_output_before_the_projection_is_drawn_when_it_is_opened(page: Page) -> None:
    assert page.evaluate("document.querySelector('.output canvas')") is None
    page.click(".output summary")
    page.wait("document.querySelector('.output canvas')")
    outputs = torch.randn(3, len(WORDS), 5, generator=torch.Generator().manual_seed(3)).half()
    point(page, ".output .cells", 3.5 / 5, 4.5 / 11)
    line = page.text(".output-line")
    assert line.startswith("“because” (4), channel 3: ")
    assert abs(float(line.split(": ")[-1].replace("−", "-")) - float(outputs[1, 4, 3])) < 0.006


def test_cross_attention_has_other_tokens_on_each_side(browser: Browser, tmp_path: Path) -> None:
    asks, keys = ["le", "chat", "dort"], ["the", "cat", "is", "sleeping", "."]
    mha = hw.MultiHeadAttention(14, 2)
    with torch.no_grad(), hw.watch(mha, keep=True) as heads:
        memory = torch.randn(1, 5, 14)
        mha(torch.randn(1, 3, 14), memory, memory)
    weights = next(iter(heads.values())).calls[-1].map.dense()[0]
    path = heads.to_html(tmp_path / "heads.html", query_tokens=asks, key_tokens=keys)
    page = opened(browser, path, "#layer=0&head=0")
    assert page.evaluate("[...document.querySelectorAll('.down span')].map(s => s.textContent)") == asks
    assert page.evaluate("[...document.querySelectorAll('.across span')].map(s => s.textContent)") == keys
    cell(page, 1, 3, (3, 5))
    assert page.text("#one-head .cell-line").startswith("“chat” (1) → “sleeping” (3): ")
    assert near(number(page, "#one-head .cell-line"), weights[0, 1, 3])
    page.click('[aria-label="queries"] [data-position="2"]')
    assert "weight that “dort” (2) gives to a token" in page.text("#one-head .text")


def test_a_left_padded_text_of_a_batch_is_drawn_without_its_padding(browser: Browser, tmp_path: Path) -> None:
    mha = hw.MultiHeadAttention(12, 3, causal=True)
    real = torch.ones(2, 11, dtype=torch.bool)
    real[1, :4] = False
    with torch.no_grad(), hw.watch(mha, keep=True) as heads:
        mha(torch.randn(2, 11, 12), mask=hw.Mask.dense(real[:, None, None]))
    heads.tokens = [[f"w{i}" for i in range(11)]] * 2
    weights = next(iter(heads.values())).calls[-1].map.dense()
    page = opened(browser, heads.to_html(tmp_path / "heads.html"), "#text=1&layer=0&head=2")
    assert "4 padded positions are not shown" in page.text("#one-head")
    assert page.count(".down span") == 7
    cell(page, 6, 1, (7, 7))
    assert page.text("#one-head .cell-line").startswith("“w10” (6) → “w5” (1): ")
    assert near(number(page, "#one-head .cell-line"), weights[1, 2, 10, 5])


def test_a_generation_is_revealed_step_by_step(browser: Browser, tmp_path: Path) -> None:
    page = opened(browser, plain(tmp_path, steps=[7, 8, 9, 10, 11]), "#layer=0&head=1&step=1")
    assert page.text(".steps output") == "1 of 4: “slept”, 8 tokens"
    assert page.count(".prompt-end") == 2
    cell(page, 8, 2, (11, 11))
    assert page.text("#one-head .cell-line").endswith("masked")
    page.evaluate("document.querySelector('#step').focus()")
    page.press("ArrowRight", 39)
    page.wait("document.querySelector('.steps output').textContent.startsWith('2 of 4')")
    assert page.state("step") == "2"
    cell(page, 8, 2, (11, 11))
    assert near(number(page, "#one-head .cell-line"), causal()[1, 8, 2])
    page.click(".steps .play")
    page.wait("document.querySelector('.steps output').textContent.startsWith('4 of 4')")
    assert page.state("step") is None


def test_many_tokens_stand_around_the_pointer(browser: Browser, tmp_path: Path) -> None:
    length = 127
    words = [f"w{i}" for i in range(length)]
    blobs = Blobs()
    path = a_page(tmp_path, [words], [{"call": a_call(blobs, causal(1, length), (0, 0))}], blobs)
    page = opened(browser, path)
    assert page.count(".down span") == 0
    cell(page, 80, 41, (length, length))
    assert page.text(".down .now") == "w80"
    assert page.text(".across .now") == "w41"
    assert near(number(page, "#one-head .cell-line"), causal(1, length)[0, 80, 41])


# Long texts


def pooled(folder: Path) -> tuple[Path, Tensor, Tensor]:
    """4,096 tokens in 32 x 32 cells, and 128 x 128 for head 0."""
    generator = torch.Generator().manual_seed(11)
    coarse = torch.rand(2, 32, 32, generator=generator).softmax(-1)
    finer = torch.rand(128, 128, generator=generator).softmax(-1)
    blobs = Blobs()
    call = a_call(blobs, coarse, (0, 0), queries=4096, keys=4096)
    call["finer"] = {"0": {"rows": 128, "columns": 128, "map": blobs.pack(levels(finer))}}
    call["pairs"] = {"0": [[4000, 17, 0.71], [12, 12, 0.5], [9, 0, 0.25]]}
    words = [f"word{i}" for i in range(4096)]
    return a_page(folder, [words], [{"call": call}], blobs), coarse, finer


def test_a_pooled_cell_says_which_positions_it_covers_and_their_tokens(
    browser: Browser, tmp_path: Path
) -> None:
    path, coarse, _ = pooled(tmp_path)
    page = opened(browser, path)
    cell(page, 24, 3, (32, 32))
    line = page.text("#one-head .cell-line")
    assert line.startswith("queries 3,072–3,199 → keys 384–511: ")
    assert " of their weight" in line
    assert "word3072 word3073" in line
    assert "word511" in line
    assert near(number(page, "#one-head .cell-line"), coarse[0, 24, 3])
    assert page.evaluate("document.querySelector('[data-value=lines]')") is None
    page.click("#bare-pairs")
    page.wait("document.querySelectorAll('.pairs li').length === 1")
    assert page.text(".pairs button") == "word4000 → word17 0.71"
    rendered = page.count(".read-text span")
    assert rendered == 2000
    assert "of 4,096" in page.text("#one-head .text")


def test_what_a_cell_receives_is_the_mean_over_queries_not_over_rows(
    browser: Browser, tmp_path: Path
) -> None:
    """5 queries in 3 rows: 2, 2 and 1 of them."""
    coarse = torch.tensor([[[0.1, 0.2, 0.7], [0.1, 0.2, 0.7], [0.9, 0.05, 0.05]]])
    blobs = Blobs()
    call = a_call(blobs, coarse, (0, 0), queries=5, keys=5)
    page = opened(browser, a_page(tmp_path, [list("abcde")], [{"call": call}], blobs))
    page.wait("document.querySelectorAll('.read-text span').length === 5")
    titles = page.evaluate("[...document.querySelectorAll('.read-text span')].map((one) => one.title)")
    numbers = [float(title.split(": ")[1]) for title in titles]
    expected = [0.26, 0.26, 0.17, 0.17, 0.57]
    assert all(abs(x - y) <= 0.01 * y + 0.005 for x, y in zip(numbers, expected, strict=True)), numbers


def test_zooming_unpacks_finer_cells_and_says_what_is_seen(browser: Browser, tmp_path: Path) -> None:
    path, _, finer = pooled(tmp_path)
    page = opened(browser, path)
    for name, code in (("+", 187), ("+", 187)):
        key(page, name, code)
    page.wait("document.querySelector('.region').textContent.includes('128 × 128')")
    assert page.text(".region").startswith("Shown: queries 1,536–2,559, keys 1,536–2,559 of 4,096")
    point(page, "#one-head .stage .cells", 0.51 / 32, 31.51 / 32)
    assert page.text("#one-head .cell-line").startswith("queries 2,528–2,559 → keys 1,536–1,567: ")
    assert near(number(page, "#one-head .cell-line"), finer[79, 48])
    assert "word2528" in page.text("#one-head .cell-line")
    key(page, "ArrowLeft", 37)
    assert "keys 1,280–2,303" in page.text(".region")
    key(page, "0", 48)
    assert "keys 0–4,095" in page.text(".region")
    stage = "#one-head .stage .cells"
    point(page, stage, 0.25, 0.5, "mousePressed", button="left", clickCount=1)
    point(page, stage, 0.4, 0.7, "mouseMoved", button="left", buttons=1)
    point(page, stage, 0.5, 0.75, "mouseReleased", button="left", clickCount=1)
    assert "queries 2,04" in page.text(".region")
    assert page.state("token") is None  # a frame is no click
    page.click(".zoom-out")
    page.click(".zoom-all")
    point(page, stage, 0.5, 0.5, "mouseWheel", deltaX=0, deltaY=-240, modifiers=2)
    page.wait("!document.querySelector('.region').textContent.includes('keys 0–4,095')")


# Images


def test_a_patch_of_an_image_shows_what_it_looks_at(browser: Browser, tmp_path: Path) -> None:
    names = ["[CLS]", *(f"{i // 4},{i % 4}" for i in range(16))]
    weights = torch.rand(2, 17, 17, generator=torch.Generator().manual_seed(13)).softmax(-1)
    image = {"src": an_image(), "rows": 4, "columns": 4, "first": 1}
    blobs = Blobs()
    path = a_page(tmp_path, [names], [{"call": a_call(blobs, weights, (0, 0)), "image": image}], blobs)
    page = opened(browser, path)
    assert page.evaluate("document.querySelector('[data-value=image]').ariaPressed") == "true"
    page.wait("document.querySelector('.image-field img').naturalWidth === 8")
    point(page, ".image-field", 2.5 / 4, 1.5 / 4)
    assert page.text("#one-head .row-line").startswith("“1,2” (7) attends to: ")
    assert not page.evaluate("document.querySelector('.over').hidden")
    for name, code in (("ArrowRight", 39), ("ArrowDown", 40), ("ArrowRight", 39)):
        key(page, name, code)
    assert page.state("token") == "6"
    point(page, ".image-field", 3.5 / 4, 3.5 / 4)
    assert near(number(page, "#one-head .cell-line"), weights[0, 6, 16])
    page.click("#one-head .others button")
    assert page.text("#one-head .row-line").startswith("“[CLS]” (0)")
    drawn = base64.b64decode(saved(page, ".take-svg", "image/svg")).decode()
    assert an_image() in drawn
    page.click('#one-head [data-value="map"]')
    page.wait("document.querySelector('#one-head .down')")
    assert page.state("view") == "map"


# Files and links


@pytest.mark.parametrize("view", ["map", "lines"])
def test_an_svg_is_xml_and_holds_title_and_tokens_as_text(
    browser: Browser, plain_page: Path, view: str
) -> None:
    page = opened(browser, plain_page, f"#layer=0&head=1&view={view}")
    tree = ElementTree.fromstring(base64.b64decode(saved(page, ".take-svg", "image/svg")))
    kinds = {each.tag.split("}")[1] for each in tree.iter()}
    assert kinds <= {"svg", "g", "rect", "path", "text", "title"}
    texts = [each.text for each in tree.iter() if each.tag.endswith("}text")]
    assert "Layer 2, head 1" in texts
    assert "it & she" in texts
    assert any(each.startswith("</script><img") for each in texts if each)
    assert "⏎" in texts
    assert page.evaluate("document.querySelector('.take-svg').title") == "mini_layer2_head1.svg"
    if view == "map":
        assert sum(each.tag.endswith("}rect") for each in tree.iter()) >= 121


def test_a_png_is_the_same_picture_in_twice_the_dots(page: Page) -> None:
    drawn = ElementTree.fromstring(base64.b64decode(saved(page, ".take-svg", "image/svg")))
    held = base64.b64decode(saved(page, ".take-png", "image/png"))
    assert held[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(held[16:20]) == int(2 * float(drawn.attrib["width"]))


def test_a_link_reopens_the_same_view(browser: Browser, plain_page: Path) -> None:
    path = plain_page
    page = opened(browser, path, "#layer=0&head=2&token=7&view=lines&measure=written")
    page.evaluate("navigator.clipboard.writeText = () => Promise.reject(new Error('no'))")
    page.click(".copy-link")
    page.wait("!document.querySelector('.link').hidden")
    link = page.evaluate("document.querySelector('.link').value")
    again = opened(browser, path, link[link.index("#") :])
    assert again.text("#head-title") == "Layer 2, head 2"
    assert again.text(".row-line") == page.text(".row-line")
    assert again.evaluate("document.querySelector('[data-value=lines]').ariaPressed") == "true"
    assert again.evaluate("document.querySelector('[data-value=written]').ariaPressed") == "true"


def test_dark_and_a_phone_draw_the_same_head_without_scrolling_sideways(
    browser: Browser, plain_page: Path
) -> None:
    page = opened(browser, plain_page, "#layer=0&head=1&token=5", dark=True, size=(390, 844))
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.click("#theme")
    page.wait("document.querySelector('#one-head .cells')")
    assert page.text(".row-line").startswith(f"“{HOSTILE}” (5)")


@pytest.mark.parametrize(("fragment", "dark"), [("#head=1&token=5", False), ("#head=1&view=lines", True)])
def test_nothing_keeps_anybody_from_reading_a_head(
    browser: Browser, tmp_path: Path, fragment: str, dark: bool
) -> None:
    page = opened(browser, plain(tmp_path, steps=[7, 9, 11]), fragment, dark=dark)
    page.evaluate("document.querySelectorAll('#one-head details').forEach(each => { each.open = true; })")
    page.wait("document.querySelector('.row-table') && document.querySelector('.output canvas')")
    assert axe.findings(page) == []
