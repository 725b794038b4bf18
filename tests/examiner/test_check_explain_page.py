"""The explain page in a real browser, from a file, with the network off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headwise as hw
from axe import findings
from browser import Browser, Page, chromium_path
from headwise.examiner import recipe
from headwise.examiner.evidence import Evidence, ProbeCall
from headwise.examiner.explanations import Explanation, explain, explain_evidence
from headwise.examiner.recipe import ProbeInputs, State, Weights

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        chromium_path() is None, reason="no Chromium here: install chromium, or set HEADWISE_BROWSER"
    ),
]

WORDS = "the cat sat on <b>mat</b>".split()
RIGHT, LEFT, DOWN, ENTER = ("ArrowRight", 39), ("ArrowLeft", 37), ("ArrowDown", 40), ("Enter", 13)


def learner(wrong: dict[str, Any], mask: torch.Tensor | None = None) -> Explanation:
    torch.manual_seed(1)
    weights = Weights(*torch.randn(4, 12, 12).double().div(3), *torch.randn(4, 12).double().div(3))
    inputs = ProbeInputs(*torch.randn(3, 3, 7, 12).double(), mask)
    yours = recipe.run(inputs, weights, 3, wrong)
    evidence = Evidence("Mine", "class", num_heads=3, embed_dim=12, weights=weights)
    evidence.calls = [ProbeCall("plain", inputs, yours.output)]
    return explain_evidence(evidence, yours)


def by_d_model(state: State) -> None:
    state.scaled = state.scores / 12**0.5


def view_only(state: State) -> None:
    state.q, state.k, state.v = (x.reshape(3, 3, 7, 4) for x in state.projected)


class PreNormRotary(nn.Module):
    """A norm, a rotation by position, a bias, two heads of keys for four, a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.h, self.d = heads, width // heads
        self.norm = nn.LayerNorm(width)
        self.W_q, self.W_o = nn.Linear(width, width), nn.Linear(width, width)
        self.W_k, self.W_v = nn.Linear(width, self.d), nn.Linear(width, self.d)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        D = x.shape[-1]
        angle = torch.arange(x.shape[-2])[:, None] * 10_000.0 ** (-torch.arange(0, D, 2) / D)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q = self.W_q(y).unflatten(-1, (self.h, self.d)).transpose(1, 2)
        k, v = (w(y)[:, None].expand(-1, self.h, -1, -1) for w in (self.W_k, self.W_v))
        at = torch.arange(x.shape[1])
        bias = (at - at[:, None]).abs() * -(2.0 ** -torch.arange(1.0, self.h + 1))[:, None, None]
        scores = self.turned(q) @ self.turned(k).mT / self.d**0.5 + bias
        heads = scores.softmax(-1) @ v
        return x + self.W_o(heads.transpose(1, 2).flatten(2))


def made(name: str) -> Explanation:
    torch.manual_seed(0)
    if name == "self":
        return explain(hw.MultiHeadAttention(12, 3), torch.randn(2, 5, 12), causal=True, tokens=WORDS)
    if name == "cross":
        module = nn.MultiheadAttention(12, 3, batch_first=True)
        query, memory = torch.randn(2, 4, 12), torch.randn(2, 6, 12)
        return explain(module, query, memory, memory, mask=hw.Mask.padding([4, 6]))
    if name == "designs":
        return explain(PreNormRotary(12, 3), torch.randn(2, 5, 12), tokens=WORDS)
    if name == "large":
        return explain(hw.MultiHeadAttention(64, 2), torch.randn(1, 70, 64))
    return learner({"scaled wrongly": {"scale": by_d_model}, "split wrongly": {"split": view_only}}[name])


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as running:
        yield running


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pages: dict[str, tuple[Explanation, Path]] = {}

    def get(name: str) -> tuple[Explanation, Path]:
        if name not in pages:
            explanation = made(name)
            pages[name] = (
                explanation,
                explanation.to_html(tmp_path_factory.mktemp("page") / f"{name}.html".replace(" ", "_")),
            )
        return pages[name]

    return get


def cell(row: int, column: int, side: str = "expected", field: str | None = None) -> str:
    inside = "" if field is None else f'[data-field="{field}"] '
    return f'figure[data-side="{side}"] {inside}td[data-row="{row}"][data-column="{column}"]'


def choose(page: Page, selector: str, value: str) -> None:
    """An entry of a drop-down list, which headless browsers do not draw."""
    chosen = f"const list = document.querySelector('{selector}'); list.value = '{value}'"
    page.evaluate(f"(() => {{ {chosen}; list.dispatchEvent(new Event('change')); }})()")


def expected_number(page: Page) -> float:
    return float(page.evaluate("document.querySelector('#expected-number').dataset.value"))


def is_quiet(page: Page) -> bool:
    """Nothing on the console, nothing asked for but the page itself."""
    assert page.complaints == []
    assert [url for url in page.requested if not url.startswith("file://")] == []
    return len(page.requested) == 1


STEPS = (
    "inputs",
    "project",
    "split",
    "score",
    "scale",
    "mask",
    "softmax",
    "weigh",
    "heads",
    "concat",
    "output",
)


@pytest.mark.parametrize("name", ["self", "cross", "scaled wrongly", "designs"])
def test_the_number_under_a_clicked_cell_is_the_tensors_and_its_sum_adds_up(
    name: str, browser: Browser, explained: Any
) -> None:
    explanation, path = explained(name)
    page = browser.open(path, fragment="#step=inputs&head=1&sample=1")
    for step in explanation.steps:
        for field in step.fields if step.key != "weigh" else ():
            tensor = explanation.fields[field]
            matrix = tensor[1, 1] if tensor.ndim == 4 else tensor[1]
            for row, column in ((0, 0), (matrix.shape[0] - 1, 1), (1, matrix.shape[1] - 1)):
                page.click(cell(row, column, field=field))
                assert expected_number(page) == float(matrix[row, column]), (field, row, column)
                total = page.evaluate("document.querySelector('.sum .total')?.textContent ?? null")
                if total is not None:
                    shown = float(total.rsplit("=")[-1].replace("−", "-"))
                    assert shown == pytest.approx(float(matrix[row, column]), abs=1e-5)
        page.click("#next") if step is not explanation.steps[-1] else None
    assert page.evaluate("document.querySelector('#next').disabled")
    assert is_quiet(page)


def test_weighted_values_are_of_the_chosen_query(browser: Browser, explained: Any) -> None:
    explanation, path = explained("cross")
    page = browser.open(path, fragment="#step=weigh&head=2&sample=1")
    p, v = explanation.fields["p"][1, 2], explanation.fields["v"][1, 2]
    choose(page, "#query", "3")
    page.click(cell(5, 2))
    assert expected_number(page) == float(p[3, 5]) * float(v[5, 2])
    assert is_quiet(page)


def test_slider_keys_buttons_and_selectors_move_through_the_page(browser: Browser, explained: Any) -> None:
    explanation, path = explained("self")
    page = browser.open(path)

    def step() -> str:
        return page.text("#step-title").split(".")[0]

    assert step() == "0" and page.evaluate("document.querySelector('#previous').disabled")
    page.press(*RIGHT)
    page.press(*RIGHT)
    page.press(*LEFT)
    assert step() == "1"
    page.click("#next")
    page.click("#next")
    page.click("#previous")
    assert step() == "2"
    page.evaluate("document.querySelector('#slider').focus()")
    for _ in range(4):
        page.press(*RIGHT)
    assert step() == "6" and page.evaluate("document.querySelector('#slider').value") == "6"
    assert page.evaluate("document.querySelector('#steps [aria-current]').textContent") == "6 softmax"
    page.click("#heads button:nth-of-type(3)")
    choose(page, "#sample", "1")
    page.click(cell(4, 2))
    assert expected_number(page) == float(explanation.fields["p"][1, 2, 4, 2])
    assert page.evaluate("location.hash") == "#step=softmax&head=2&sample=1"
    page.press(*LEFT)  # inside a map, arrows move in the map
    assert step() == "6" and expected_number(page) == float(explanation.fields["p"][1, 2, 4, 1])
    page.press("ArrowUp", 38)
    assert expected_number(page) == float(explanation.fields["p"][1, 2, 3, 1])
    assert page.evaluate("document.activeElement.getAttribute('aria-selected')") == "true"
    assert "query 3" in page.text("#said")
    page.click("#steps li:nth-child(9) button")
    page.click(".all-heads button:nth-child(1)")
    assert page.evaluate("document.querySelector('#heads [aria-checked=true]').textContent") == "0"
    assert is_quiet(page)


def test_a_mask_is_told_in_words(browser: Browser, explained: Any) -> None:
    _, path = explained("self")
    page = browser.open(path, fragment="#step=mask")
    page.click(cell(1, 3))
    assert "query 1 “cat” may not attend to key 3 “on”: the key comes later." in page.text(".sum")
    page.click(cell(3, 1))
    assert "query 3 “on” may attend to key 1 “cat”: the mask is True here" in page.text(".sum")
    text = page.text("#step")
    assert (
        "Causal: a query attends to the keys up to its own position" in text
        and "True = may not attend" in text
    )
    _, path = explained("cross")
    page = browser.open(path, fragment="#step=mask&sample=0")
    page.click(cell(0, 5))
    assert "the mask hides this key from every query, like padding" in page.text(".sum")
    assert "Keys 4 and 5 are hidden" in page.text("#step")
    assert is_quiet(page)


def test_where_yours_parts_is_red_and_yours_stands_beside_the_expected(
    browser: Browser, explained: Any
) -> None:
    explanation, path = explained("scaled wrongly")
    page = browser.open(path)
    assert page.text("#step-title").startswith("4. Scale")
    assert page.evaluate("[...document.querySelectorAll('#steps .first')].map(e => e.textContent)") == [
        "4 scale"
    ]
    assert page.evaluate("document.querySelectorAll('#steps .same').length") == 4
    assert page.evaluate("document.querySelectorAll('figure[data-side=yours] td.off').length") == 49
    page.click(cell(2, 3, "yours"))
    number = float(page.evaluate("document.querySelector('#your-number').dataset.value"))
    assert number == float(explanation.yours["scaled"][0, 0, 2, 3])
    assert expected_number(page) == float(explanation.fields["scaled"][0, 0, 2, 3])
    assert "the mistake is in this step" in page.text("#panel")
    page.click("#steps li:nth-child(7) button")
    assert "computes this step correctly, but its input was already wrong" in page.text("#panel")
    page.click("#steps li:nth-child(4) button")
    assert page.evaluate("document.querySelectorAll('figure[data-side=yours]').length") == 0
    assert is_quiet(page)


def test_a_moved_number_is_found_where_it_came_from(browser: Browser, explained: Any) -> None:
    _, path = explained("split wrongly")
    page = browser.open(path)
    page.click(cell(2, 0, "yours", "q"))
    assert "Your number equals the number at query 0, channel 8 of Q." in page.text(
        "#panel"
    )  # 2 * 4 channels on, in one row
    assert is_quiet(page)


def test_large_maps_are_pictures_with_numbers_on_a_click(browser: Browser, explained: Any) -> None:
    explanation, path = explained("large")
    page = browser.open(path, fragment="#step=softmax&head=1")
    size = page.evaluate("document.querySelector('canvas.large').getBoundingClientRect().width") / 70
    page.click("canvas.large", dx=30.5 * size, dy=12.5 * size)
    assert expected_number(page) == float(explanation.fields["p"][0, 1, 12, 30])
    page.press(*DOWN)
    assert expected_number(page) == float(explanation.fields["p"][0, 1, 13, 30])
    title = page.evaluate("document.querySelector('canvas.large').title")
    assert title.startswith("query 12, key 30: 0.0")
    assert is_quiet(page)


def test_light_and_dark(browser: Browser, explained: Any) -> None:
    _, path = explained("self")
    back = "getComputedStyle(document.body).backgroundColor"
    light = browser.open(path)
    assert light.evaluate(back) == "rgb(251, 251, 249)"
    light.click("#theme")
    assert light.evaluate(back) == "rgb(20, 22, 27)"
    dark = browser.open(path, dark=True)
    assert dark.evaluate(back) == "rgb(20, 22, 27)"
    dark.click("#theme")
    assert dark.evaluate(back) == "rgb(251, 251, 249)"
    assert is_quiet(light) and is_quiet(dark)


def test_what_users_write_is_shown_and_not_run(browser: Browser, tmp_path: Path) -> None:
    words = [
        "</script><script>document.title='run'</script>",
        "<img src=x onerror=\"document.title='run'\">",
        "a",
        "\u202eb",
    ]
    explanation = explain(hw.MultiHeadAttention(8, 2), torch.randn(1, 4, 8), tokens=words)
    page = browser.open(explanation.to_html(tmp_path / "nasty.html"), fragment="#step=score")
    assert page.text("table.map tbody th") == words[0]
    assert page.evaluate("document.querySelectorAll('img, table script').length") == 0
    assert page.evaluate("document.title") == "MultiHeadAttention, step by step" and is_quiet(page)
    assert "\ufffdb" in page.text("table.map thead")


def test_a_notebook_shows_it_in_a_frame(browser: Browser, explained: Any, tmp_path: Path) -> None:
    explanation, _ = explained("self")
    notebook = tmp_path / "notebook.html"
    notebook.write_text(
        f"<!doctype html><meta charset=utf-8><title>n</title>{explanation._repr_html_()}", "utf-8"
    )
    page = browser.open(notebook)
    frame = browser.inside(page)
    assert frame.text("#name") == "MultiHeadAttention, step by step"
    frame.evaluate("document.querySelector('#next').click()")
    assert frame.text("#step-title").startswith("1. Project")
    assert frame.evaluate("origin") == "null" and page.complaints == []


def test_it_prints_every_step(browser: Browser, explained: Any) -> None:
    _, path = explained("self")
    page = browser.open(path)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("document.querySelectorAll('#all > section').length") == len(STEPS)
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.querySelectorAll('#all > section').length") == 0
    assert is_quiet(page)


def test_every_control_has_a_name_and_narrow_screens_do_not_overflow(
    browser: Browser, explained: Any
) -> None:
    _, path = explained("scaled wrongly")
    page = browser.open(path, size=(390, 800))
    nameless = page.evaluate(
        "[...document.querySelectorAll('button, input, select, table[role=grid], canvas')].filter(e => "
        "!e.getAttribute('aria-label') && !e.textContent.trim() && !e.closest('label')).length"
    )
    assert nameless == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert is_quiet(page)


def test_axe_notices_what_it_should(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    head = "<title>t</title><style>#pale { color: #ccc; background: #fff }</style>"
    body = "<button></button><p id=pale>pale words</p>"
    path.write_text(f"<!doctype html><html lang=en>{head}{body}", "utf-8")
    page = browser.open(path)
    violations = findings(page)
    assert [each.partition(" (")[0] for each in violations] == [
        "button-name: button",
        "color-contrast: #pale",
    ]
    assert findings(page) == violations


@pytest.mark.parametrize(
    ("name", "steps", "dark"),
    [
        ("self", ["inputs", "mask", "softmax", "heads"], False),
        ("self", ["mask", "softmax"], True),
        ("large", ["softmax"], True),
        ("scaled wrongly", ["scale", "output"], False),
        ("scaled wrongly", ["output"], True),
    ],
    ids=["self, light", "self, dark", "large, dark", "scaled wrongly, light", "scaled wrongly, dark"],
)
def test_axe_finds_no_serious_fault(
    name: str, steps: list[str], dark: bool, browser: Browser, explained: Any
) -> None:
    page = browser.open(explained(name)[1], dark=dark)
    for step in steps:
        page.click(f"#steps li:nth-child({STEPS.index(step) + 1}) button")
        assert findings(page) == [], step
    assert is_quiet(page)
