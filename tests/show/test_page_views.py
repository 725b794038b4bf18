"""The views below the wall, in a real browser: what they say is what Python says.

A page holds weights within 1% or 1e-4; what is made of them there is judged by the same made of them here.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import axe
import headwise as hw
from browser import Browser, Page
from headwise.heads import layout
from headwise.heads.record import reduce
from headwise.heads.text_changes import Changes
from headwise.models import load
from headwise.models.specialised_heads import specialisation
from headwise.show.offline_pages import levels
from headwise.show.tables import IN_WORDS
from packed_weights import weights

pytestmark = pytest.mark.slow

HE = "The nurse said that he left because he was tired"
SHE = HE.replace(" he ", " she ")
LONGER = HE.replace(" he left", " the surgeon left")  # more tokens: some have no partner


def as_held(w: Tensor) -> Tensor:
    """Weights [T, S] as the page has them, hidden keys 0."""
    return weights(levels(w), *w.shape).nan_to_num(0.0).double()


def apart(p: Tensor, q: Tensor) -> Tensor:
    """The Jensen-Shannon divergence of rows, [T], each made to sum to 1."""
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    entr = torch.special.entr
    return entr((p + q) / 2).sum(-1) - (entr(p).sum(-1) + entr(q).sum(-1)) / 2


class Made:
    """What Python knows of the page: heads of a model on its texts, and of others beside it."""

    def __init__(self) -> None:
        self.heads: list[hw.Heads] = []
        self.texts: list[str] = []
        self.maps: list[list[Tensor]] = []  # per source and layer, [H, T, S]
        self.effects: hw.Effects | None = None

    def add(self, model: Any, tokenizer: Any, title: str, text: str) -> Made:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with (
            torch.no_grad(),
            hw.watch(model, tokenizer=tokenizer, keep=True, patterns=True, diversity=True) as heads,
        ):
            model(ids)
        heads.title = title
        self.heads.append(heads)
        self.texts.append(text)
        calls = [layer.calls[-1].map for layer in heads.values()]
        self.maps.append([map.dense()[0] for map in calls if map is not None])
        return self

    @cached_property
    def changes(self) -> Changes:
        return self.heads[0].changes(self.heads[1])

    def order(self) -> list[tuple[int, int]]:
        """(layer, head), the most changed first."""
        return [(self.heads[0].paths.index(change.path), change.head) for change in self.changes]

    def save(self, path: Path, **more: Any) -> Path:
        return self.heads[0].to_html(path, text=self.texts, beside=self.heads[1:], **more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Made, Path]:
    """Everything: two texts, two models, training, effects."""
    model, tokenizer, title = load("mini")
    torch.manual_seed(0)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.03 * torch.randn_like(parameter)
    made = Made().add(model, tokenizer, title, HE).add(model, tokenizer, title, SHE)
    made.add(other, tokenizer, "shaken", HE)
    ids = tokenizer(HE, return_tensors="pt")["input_ids"]
    made.effects = hw.effects(model, ids, tokenizer=tokenizer, top=7)
    path = tmp_path_factory.mktemp("views") / "whole.html"
    return made, made.save(path, training=specialisation(), effects=made.effects)


def opened(browser: Browser, path: Path, fragment: str, **options: Any) -> Page:
    """The page, at the views."""
    page = browser.open(path, fragment=fragment, **options)
    page.evaluate("document.querySelector('#more').scrollIntoView()")
    page.wait("document.querySelector('[role=tabpanel]:not([hidden])')?.childElementCount > 0")
    return page


def enter(page: Page) -> None:
    """As a keyboard sends it: a letter, too, which presses buttons."""
    for kind in ("keyDown", "keyUp"):
        letter = {"text": "\r"} if kind == "keyDown" else {}
        page.ask(
            "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, **letter
        )


def number(text: str) -> float:
    return float(text.replace("−", "-").replace("+", ""))


def row_read(page: Page, panel: str) -> tuple[int, dict[int, list[str]]]:
    """The row that the table reads, and by key its numbers."""
    room = f"#panel-{panel} .pm:not([hidden]) .pm-row"
    held = page.evaluate(
        f"[document.querySelector('{room} [data-row]').dataset.row, "
        f"[...document.querySelectorAll('{room} tbody tr')].map((r) => "
        "[r.dataset.key, [...r.querySelectorAll('td')].map((c) => c.textContent)])]"
    )
    return int(held[0]), {int(key): cells for key, cells in held[1]}


def close(shown: str, exact: float, weights_of: Sequence[float] = ()) -> bool:
    """Within what a page's weights are: 1% or 1e-4 each, and the four digits that are said."""
    sizes = weights_of or [exact]
    return abs(number(shown) - exact) <= sum(max(0.01 * abs(x), 1e-4) for x in sizes) + 0.5e-4 + 1e-9


# Tabs


def test_tabs_are_those_that_have_data_and_nothing_of_a_closed_one_is_there(
    browser: Browser, whole: tuple[Made, Path], tmp_path: Path
) -> None:
    page = opened(browser, whole[1], "")
    assert page.evaluate("[...document.querySelectorAll('[role=tab]')].map((t) => t.dataset.tab)") == [
        "flip", "compare", "diversity", "training", "effects", "numbers",
    ]  # fmt: skip
    filled_panels = (
        "[...document.querySelectorAll('[role=tabpanel]')].filter((p) => p.childElementCount).length"
    )
    assert page.evaluate(filled_panels) == 1
    model, tokenizer, title = load("mini")
    plain = opened(
        browser, Made().add(model, tokenizer, title, HE).save(tmp_path / "plain.html"), "#tab=training"
    )
    assert plain.evaluate("[...document.querySelectorAll('[role=tab]')].map((t) => t.dataset.tab)") == [
        "compare", "diversity", "numbers",
    ]  # fmt: skip


def test_tabs_are_gone_through_with_the_arrow_keys_and_the_address_remembers_the_open_one(
    browser: Browser, whole: tuple[Made, Path]
) -> None:
    page = opened(browser, whole[1], "")
    page.evaluate("document.querySelector('#tab-flip').focus()")
    tabs = []
    for key, code in [
        ("ArrowRight", 39),
        ("ArrowRight", 39),
        ("End", 35),
        ("ArrowRight", 39),
        ("ArrowLeft", 37),
    ]:
        page.press(key, code)
        tabs.append(page.evaluate("document.activeElement.dataset.tab"))
        assert page.evaluate("new URLSearchParams(location.hash.slice(1)).get('tab')") == tabs[-1]
        assert page.count("[role=tabpanel]:not([hidden])") == 1
    assert tabs == ["compare", "diversity", "numbers", "flip", "numbers"]
    again = opened(browser, whole[1], page.evaluate("location.hash"))
    assert again.evaluate("document.querySelector('[role=tab][aria-selected=true]').dataset.tab") == "numbers"


# Flip


def places(changes: Changes, at: int) -> tuple[Tensor, Tensor]:
    """The weights of the head that is at this place of the order, on the line of both texts."""
    first, second = changes.weights(changes.all[at])
    return first, second


def test_a_flip_lists_heads_as_python_does_and_its_maps_have_the_weights(
    browser: Browser, whole: tuple[Made, Path]
) -> None:
    made, path = whole
    page = opened(browser, path, "#tab=flip&layer=3&head=6")
    order = [f"{layer}.{head}" for layer, head in made.order()]
    page.click("#panel-flip .bars-all")
    assert (
        page.evaluate("[...document.querySelectorAll('#panel-flip .bars button')].map((b) => b.dataset.head)")
        == order
    )
    shown = page.texts("#panel-flip .bar-number")
    assert shown == [f"{change.distance:.3f}" for change in made.changes]
    assert page.texts("#panel-flip mark") == ["he", "he", "she", "she"]
    assert page.texts("#panel-flip .flip-text") == [f"First text: {HE}", f"Second text: {SHE}"]
    for at in (0, 3):
        page.click(f"#panel-flip .bars button[data-head='{order[at]}']")
        layer, head = order[at].split(".")
        page.wait(
            f"document.querySelector('.flip-title')?.textContent.startsWith('Layer {layer}, head {head}')",
        )
        assert f"layer={layer}&head={head}" in page.evaluate("location.hash")
        row, keys = row_read(page, "flip")
        change, (first, second) = made.changes.all[at], places(made.changes, at)
        assert change.places is not None and row == change.places[0]  # the row that moved most is read first
        assert keys
        for key, (before, after, difference) in keys.items():
            p, q = float(first[row, key]), float(second[row, key])
            assert close(before, p) and close(after, q) and close(difference, q - p, [p, q])


def test_a_row_of_a_flip_is_read_by_pointing_at_it_and_by_arrow_keys(
    browser: Browser, whole: tuple[Made, Path]
) -> None:
    made, path = whole
    page = opened(browser, path, "#tab=flip&layer=0&head=6")
    page.wait("document.querySelector('#panel-flip canvas')")
    first, second = places(made.changes, made.order().index((0, 6)))
    box = page.evaluate(
        "(() => { const c = document.querySelectorAll('#panel-flip canvas')[2]; "
        "c.scrollIntoView({block: 'center'}); "
        "const b = c.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
    )
    read = set()
    for share in (0.2, 0.45, 0.7):
        x, y = box[0] + box[2] / 2, box[1] + box[3] * share
        page.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        row, keys = row_read(page, "flip")
        read.add(row)
        for key, (before, after, _) in keys.items():
            assert close(before, float(first[row, key])) and close(after, float(second[row, key]))
    assert len(read) == 3
    page.evaluate("document.querySelector('#panel-flip .pm-figures').focus()")
    start, _ = row_read(page, "flip")
    page.press("ArrowUp", 38)
    row, _ = row_read(page, "flip")
    assert row == start - 1
    moved = made.changes.all[made.order().index((0, 6))]
    assert moved.places is not None
    change = apart(as_held(first)[row], as_held(second)[row])
    expected = moved.largest if row == moved.places[0] else change  # not from rounded weights
    assert f"change {expected:.3f} nats" in page.text("#panel-flip .pm-said")


def test_the_list_of_heads_is_one_stop_of_the_tab_key(browser: Browser, whole: tuple[Made, Path]) -> None:
    """With head 0.0 selected, the 41st of the list, 41 of them had to be passed."""
    made, path = whole
    page = opened(browser, path, "#tab=flip&layer=0&head=0")
    order = [f"{layer}.{head}" for layer, head in made.order()]
    page.wait("document.querySelector('#panel-flip .bars [aria-current]')")
    stops = "[...document.querySelectorAll('#panel-flip .bars button')].filter((b) => b.tabIndex === 0)"
    assert page.evaluate(f"{stops}.map((b) => b.dataset.head)") == ["0.0"]
    page.evaluate(f"{stops}[0].focus()")
    page.press("ArrowUp", 38)
    at = order.index("0.0")
    assert page.evaluate("document.activeElement.dataset.head") == order[at - 1]
    enter(page)
    page.wait(f"location.hash.includes('layer={order[at - 1][0]}&head={order[at - 1][2]}')")
    page.press("Home", 36)
    assert page.evaluate("document.activeElement.dataset.head") == order[0]
    page.press("ArrowUp", 38)  # nothing is above
    assert page.evaluate("document.activeElement.dataset.head") == order[0]
    assert page.evaluate(f"{stops}.map((b) => b.dataset.head)") == [order[0]]


def test_words_without_a_partner_are_not_compared(browser: Browser, tmp_path: Path) -> None:
    model, tokenizer, title = load("mini")
    made = Made().add(model, tokenizer, title, HE).add(model, tokenizer, title, LONGER)
    page = opened(browser, made.save(tmp_path / "longer.html"), "#tab=flip")
    page.wait("document.querySelector('#panel-flip .pm-row td')")
    line = next(iter(made.changes.layers.values())).queries
    alone = [at for at, (before, after) in enumerate(line.places) if before is None or after is None]
    assert alone
    page.evaluate("document.querySelector('#panel-flip .pm-figures').focus()")
    row, _ = row_read(page, "flip")
    while row != alone[-1]:
        page.press(*(("ArrowDown", 40) if row < alone[-1] else ("ArrowUp", 38)))
        row, keys = row_read(page, "flip")
    assert "only one of the two texts, so it has no change" in page.text("#panel-flip .pm-said")
    assert all(
        cells[0] == cells[2] == "no such token" for cells in keys.values()
    )  # the second text alone has it
    page.press("ArrowDown", 40)  # a word after it, which both have: its weight on the others is "elsewhere"
    row, keys = row_read(page, "flip")
    layer, head = (int(x) for x in re.findall(r"\d+", page.text(".flip-title"))[:2])
    at = made.order().index((layer, head))
    first, second = (as_held(each.nan_to_num(0.0)) for each in places(made.changes, at))
    shared = line.shared
    binned = [
        torch.cat([each[row, shared], each[row].sum()[None] - each[row, shared].sum()[None]])
        for each in (first, second)
    ]
    if made.changes.all[at].places != line.places[row]:  # that one is said as it was measured
        assert f"change {apart(*binned):.3f} nats" in page.text("#panel-flip .pm-said")


# Compare


def test_two_heads_of_a_layer_are_as_far_apart_as_python_says(
    browser: Browser, whole: tuple[Made, Path]
) -> None:
    made, path = whole
    page = opened(browser, path, "#tab=compare&layer=1&head=2&beside=0.0.1.5")
    page.wait("document.querySelector('#compare-distance')")
    distances = hw.diversity(made.heads[0][1]).attention
    exact = float(next(iter(distances.values()))[2, 5])
    assert page.text("#compare-distance") == f"{exact:.4f} nats"
    row, keys = row_read(page, "compare")
    for key, (first, second, difference) in keys.items():
        p, q = (float(made.maps[0][1][head, row, key]) for head in (2, 5))
        assert close(first, p) and close(second, q) and close(difference, q - p, [p, q])
    cells = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#panel-compare .table-room tbody tr')]"
        ".map((r) => [r.cells[0].textContent, [...r.cells].slice(1).map((c) => c.textContent)]))"
    )
    start, two = (made.heads[0][1][head].values["entropy"] for head in (2, 5))
    assert [number(x) for x in cells[IN_WORDS["entropy"][0]]] == pytest.approx(
        [start, two, two - start], abs=0.6e-3
    )
    page.click("#beside-swap")
    page.wait("location.hash.includes('head=5') && location.hash.includes('beside=0.0.1.2')")
    page.click("#beside-pin")
    page.wait("document.querySelector('#compare-distance')?.textContent === '0.0000 nats'")


def test_two_models_over_one_text_are_compared(browser: Browser, whole: tuple[Made, Path]) -> None:
    made, path = whole
    page = opened(browser, path, "#tab=compare&layer=2&head=3")
    page.wait("document.querySelector('#compare-distance')")
    page.evaluate(
        "(() => { const s = document.querySelector('#beside-source'); s.value = '2'; "
        "s.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )
    page.wait("location.hash.includes('beside=2.0.2.3')")
    page.wait("document.querySelector('#panel-compare figcaption')?.textContent.startsWith('mini')")
    mine, theirs = (as_held(made.maps[source][2][3]) for source in (0, 2))
    assert page.text("#compare-distance") == f"{apart(mine, theirs).mean():.4f} nats"
    assert page.texts("#panel-compare .pm:not([hidden]) figcaption") == [
        "mini, layer 2, head 3", "shaken, layer 2, head 3", "second − first",
    ]  # fmt: skip


# Diversity


def test_the_matrix_is_that_of_python_and_points_stand_as_its_layout_has_them(
    browser: Browser, whole: tuple[Made, Path]
) -> None:
    made, path = whole
    page = opened(browser, path, "#tab=diversity&layer=2&head=1")
    page.wait("document.querySelector('#panel-diversity circle')")
    shown = hw.diversity(made.heads[0][2])
    exact, cosines = (next(iter(each.values())).double() for each in (shown.attention, shown.outputs))
    for which, matrix in (("first", exact), ("last", cosines)):
        numbers = page.texts(f"#panel-diversity .matrix-room:{which}-child td[data-pair]")
        expected = [
            "" if row == column else f"{matrix[row, column]:.3f}" for row in range(7) for column in range(7)
        ]
        off = [
            (a, b)
            for a, b in zip(numbers, expected, strict=True)
            if a != b and abs(number(a) - number(b)) > 1.1e-3
        ]
        assert not off
    assert f"{shown.number:.3f} nats" in page.text(".diversity-said")
    points = page.evaluate(
        "(() => { const z = Number(document.querySelector('.points').dataset.zoom); "
        "return [...document.querySelectorAll('.points g circle:not(.halo)')]"
        ".map((c) => [c.getAttribute('cx') / z, -c.getAttribute('cy') / z]); })()"
    )
    drawn, ours = torch.tensor(points).double(), layout(exact.sqrt())
    assert torch.allclose(torch.cdist(drawn, drawn), torch.cdist(ours, ours), atol=2e-3)
    assert torch.allclose(drawn - drawn.mean(0), ours - ours.mean(0), atol=2e-3)  # the same side up, too
    page.evaluate("document.querySelector('.points g[data-head=\"4\"]').focus()")
    enter(page)
    page.wait("location.hash.includes('layer=2&head=4')")
    assert page.evaluate("document.querySelector('.points g.chosen').dataset.head") == "4"
    page.click("#panel-diversity td[data-pair='4.6']")
    page.wait("location.hash.includes('tab=compare') && location.hash.includes('beside=0.0.2.6')")


# Training


def test_the_slider_goes_through_training(browser: Browser, whole: tuple[Made, Path]) -> None:
    held = specialisation()
    layer, head = held.best("induction_stripe")
    page = opened(browser, whole[1], f"#tab=training&layer={layer}&head={head}&checkpoint=2")
    page.wait("document.querySelector('#training-said')?.textContent")
    stripes = held.statistics["induction_stripe"]

    def checks(at: int) -> None:
        line = page.text("#training-said")
        assert f"step {int(held.steps[at]):,}" in line and f"training loss {held.losses[at]:.3f} nats" in line
        numbers = page.texts(".training-grid button span")
        assert numbers == [
            f"{x + 0.0:.2f}".replace("-0.00", "0.00")
            for x in stripes[at].double().round(decimals=5).flatten().tolist()
        ]
        names = page.texts(".training-grid button small")
        assert names == [name or "" for layer in held.labels[at] for name in layer]

    checks(2)
    page.evaluate("document.querySelector('#training-step').focus()")
    page.press("ArrowRight", 39)
    checks(3)
    page.press("End", 35)
    checks(len(held.steps) - 1)
    assert "induction" in page.text("#training-head")
    _, L, H = held.shape
    assert page.count(".training-charts .thin") == L * H - 1
    page.click(".training-grid button[data-head='1.5']")
    page.wait("location.hash.includes('layer=1&head=5')")
    assert "1.5" in page.text("#training-head")


def test_nothing_plays_where_motion_is_unwanted(browser: Browser, whole: tuple[Made, Path]) -> None:
    page = opened(browser, whole[1], "#tab=training")
    page.click("#training-play")
    page.wait("/checkpoint=[1-9]/.test(location.hash)")
    page.click("#training-play")
    page.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    page.click("#tab-numbers")
    page.click("#tab-training")
    assert page.evaluate("document.querySelector('#training-play').hidden")


# Effects and numbers


def test_effects_are_sorted_and_words_stand_before_and_after(
    browser: Browser, whole: tuple[Made, Path]
) -> None:
    made, path = whole
    assert made.effects is not None and made.effects.before is not None
    page = opened(browser, path, "#tab=effects&layer=2&head=3")
    shown = page.evaluate(
        "[...document.querySelectorAll('#panel-effects .bars button')].map((b) => b.dataset.head)"
    )
    largest = [f"{effect.layer}.{effect.head}" for effect in made.effects.ranking()]
    assert shown == largest[: len(shown)] and len(shown) >= 16

    def columns() -> list[list[list[str]]]:
        return page.evaluate(
            "[...document.querySelectorAll('.word-bars')].map((t) => [...t.tBodies[0].rows].map((r) => "
            "[r.cells[0].textContent, r.cells[2].firstChild.textContent]))"
        )

    def rows_of(words: Any) -> list[list[str]]:
        return [[word, f"{share:.4f}"] for word, share in words]

    assert columns() == [rows_of(made.effects.before[0]), rows_of(made.effects.after(2, 3))]
    page.click(f"#panel-effects .bars button[data-head='{shown[0]}']")
    page.wait(f"location.hash.includes('layer={shown[0][0]}&head={shown[0][2]}')")
    assert columns()[1] == rows_of(made.effects.after(int(shown[0][0]), int(shown[0][2])))


def test_words_that_are_written_alike_are_not_compared(
    browser: Browser, whole: tuple[Made, Path], tmp_path: Path
) -> None:
    """ "the" with and without a space before it are two tokens: neither rose from what the other had."""

    class FakeEffects:
        def to_page(self, heads: hw.Heads, batch: int | None) -> dict[str, Any]:
            before = [["the", 0.5], ["a", 0.2], ["the", 0.1]]
            after = [["the", 0.4], ["a", 0.3], ["an", 0.2]]
            row = {"layer": 0, "head": 0, "effect": 0.5, "after": after}
            return {"of": "next token", "sentence": "", "before": before, "heads": [row], "unit": "nats"}

    path = whole[0].heads[0].to_html(tmp_path / "alike.html", effects=FakeEffects())
    page = opened(browser, path, "#tab=effects&layer=0&head=0")
    page.wait("document.querySelectorAll('.word-bars').length === 2")
    arrows = page.evaluate("[...document.querySelectorAll('.word-arrow')].map((one) => one.textContent)")
    assert arrows == ["", "▲", "new"]


def test_the_table_sorts_by_what_is_clicked_and_goes_along_as_csv(
    browser: Browser, whole: tuple[Made, Path]
) -> None:
    made, path = whole
    page = opened(browser, path, "#layer=0&head=0&tab=numbers")
    rows = "[...document.querySelectorAll('.all-numbers tbody tr')].map((r) => r.dataset.head)"
    heads = [(number, head) for number, layer in enumerate(made.heads[0].values()) for head in layer]
    value = {f"{number}.{head.head}": head.values["entropy"] for number, head in heads}

    def to_the_last_row() -> None:
        """Rows out of sight are made when one scrolls there."""
        page.evaluate("document.querySelector('.numbers-room').scrollTop = 1e6")
        page.wait(f"{rows}.length === {len(value)}")

    page.click(".all-numbers th[data-name=entropy] button")
    to_the_last_row()
    assert page.evaluate(rows) == sorted(value, key=lambda name: -value[name])
    assert page.evaluate("document.querySelector('th[aria-sort]').dataset.name") == "entropy"
    assert page.evaluate("document.querySelector('th[aria-sort]').getAttribute('aria-sort')") == "descending"
    page.evaluate("document.querySelector('.all-numbers th[data-name=entropy] button').focus()")
    enter(page)
    to_the_last_row()
    assert page.evaluate(rows) == sorted(value, key=lambda name: value[name])
    least = min(value, key=lambda name: value[name])
    page.click(f".all-numbers tr[data-head='{least}'] td:nth-child(3)")
    page.wait(f"location.hash.includes('layer={least[0]}&head={least[2]}')")
    assert page.evaluate("document.querySelector('.all-numbers tr.chosen').dataset.head") == least
    page.ask("Page.setDownloadBehavior", behavior="deny")
    page.evaluate(
        "(() => { const make = URL.createObjectURL; "
        "URL.createObjectURL = (blob) => { window.held = blob; return make.call(URL, blob); }; })()"
    )
    page.click("#csv-save")
    lines = page.evaluate("window.held.text()").strip().split("\n")
    names = lines[0].split(",")
    assert names[:4] == ["layer", "head", "label", "score"] and len(lines) == 1 + len(value)
    row = dict(zip(names, lines[1].split(","), strict=True))
    assert f"{row['layer']}.{row['head']}" == least
    assert float(row["entropy"]) == pytest.approx(value[least], abs=1e-5)
    page.click("#csv-copy")
    page.wait("document.querySelector('#panel-numbers [role=status]').textContent.includes('cop')")


def test_a_thousand_heads_are_drawn_as_they_come_into_sight(browser: Browser, tmp_path: Path) -> None:
    torch.manual_seed(0)
    heads = hw.Heads()
    for layer in range(32):
        map = hw.AttentionMap.from_weights(torch.rand(1, 32, 3, 5).softmax(-1))
        heads.add(f"layers.{layer}", reduce(map, names=("entropy", "distance"), keep=True, forward=1))
    page = opened(browser, heads.to_html(tmp_path / "large.html"), "#tab=numbers")
    count = "document.querySelectorAll('.all-numbers tbody tr').length"
    assert 16 <= page.evaluate(count) <= 200
    page.wait(
        "(() => { const r = document.querySelector('.numbers-room'); r.scrollTop = r.scrollHeight; })() ?? "
        f"{count} === 1024",
    )
    page.click(".all-numbers th[data-name=entropy] button")
    assert page.evaluate(count) <= 200


# Phones, and those who do not see the page


@pytest.mark.parametrize("tab", ["flip", "training", "effects"])  # test_page_whole has the others
def test_no_view_is_wider_than_a_phone_and_axe_finds_no_fault_in_it(
    browser: Browser, whole: tuple[Made, Path], tab: str
) -> None:
    page = opened(browser, whole[1], f"#tab={tab}&layer=1&head=3", size=(390, 844), dark=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    chosen = page.evaluate(
        "(() => { const tab = document.querySelector('[role=tab][aria-selected=true]'); "
        "const b = tab.getBoundingClientRect(); return [b.left, b.right]; })()"
    )
    assert chosen[0] >= 0 and chosen[1] <= 390
    page.evaluate("document.querySelector('main').remove()")  # others look after that
    page.dark(tab in ("flip", "diversity", "effects"))
    assert axe.findings(page) == []
