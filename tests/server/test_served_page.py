"""The page of `headwise serve` in a real browser: what it shows is what Python computes.

The page dispatches "headwise-served" after every reading: text, tokens, predictions, factors, source, flip.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest
import torch
from served_models import TOKEN, live, llama, server
from test_live_model import MASKED, close, inputs_of, watched
from torch import Tensor

import axe
import headwise as hw
from browser import Browser, Page
from headwise.listeners.ablation import scaled_heads
from headwise.server import web_app
from headwise.server.live_model import LiveModel
from headwise.server.protocol import Read, Reply, Request

pytestmark = pytest.mark.slow

TYPED = "The old sailor told the captain that the sea was calm"
LISTEN = """
window.heard = [];
document.addEventListener("headwise-served", ({detail: {source, ...rest}}) =>
  heard.push({...rest, live: source}));
"""
READY = "document.documentElement?.dataset.ready === 'true' && window.heard?.length > 0"
CELLS = """
(async () => Promise.all(%s.map(async ([layer, head]) => {
  const call = heard.at(-1).live.readings[0].calls[layer];
  const {rows, columns, values} = await call.%s(head, %s, new AbortController().signal);
  return {rows, columns, values: [...values].map((value) => Number.isNaN(value) ? null : value)};
})))()
"""
HOSTILE = "<script>window.ran = 1</script><img src=x onerror='window.ran = 2'> & <b>bold</b>"


@pytest.fixture(scope="module")
def address_of() -> Iterator[Callable[[str], str]]:
    """The address of a served model, with its token; a server for each model, for all tests."""
    addresses: dict[str, str] = {}
    with ExitStack() as stack:

        def address(name: str) -> str:
            if name not in addresses:
                addresses[name] = page_of(stack.enter_context(server(live(name))))
            return addresses[name]

        yield address


@pytest.fixture(scope="module")
def red(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image file."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (61, 47), "red")
    ImageDraw.Draw(image).rectangle((7, 5, 29, 31), fill="yellow")
    path = tmp_path_factory.mktemp("images") / "red.png"
    image.save(path)
    return path


def page_of(address: str, token: str = TOKEN) -> str:
    return f"{address}/?token={token}"


def opened(browser: Browser, address: str, **options: Any) -> Page:
    """A page that has drawn its wall and read what its address says."""
    page = browser.open("about:blank", **options)
    page.ask("Page.addScriptToEvaluateOnNewDocument", source=LISTEN)
    page.ask("Page.bringToFront")  # a page behind another draws nothing
    page.ask("Page.navigate", url=address)
    page.wait(READY)
    return page


def type_into(page: Page, text: str, box: str = "#alive-text") -> None:
    """Replace what is in a box, as somebody at the keyboard does."""
    page.evaluate(f"(() => {{ const box = document.querySelector({box!r}); box.focus(); box.select(); }})()")
    page.ask("Input.insertText", text=text)


def reading(page: Page, like: str, seconds: float = 20.0) -> dict[str, Any]:
    """The last reading for which an expression of `e` is true."""
    plain = "(({live, ...rest}) => ({...rest, heads: live?.readings[0].heads}))"
    return page.wait(
        f"((e) => e !== undefined && ({like}) && {plain}(e))(window.heard.at(-1))", seconds=seconds
    )


def read(page: Page, text: str, factors: dict[str, float] | None = None) -> dict[str, Any]:
    """The last reading, once it is of this text and of these factors."""
    names = json.dumps(factors or {}, separators=(",", ":"))
    return reading(page, f"e.text === {json.dumps(text)} && JSON.stringify(e.factors) === {names!r}")


def asks(page: Page, *kinds: str) -> list[dict[str, Any]]:
    """Requests of some kinds that a page sent, in order."""
    sent = [event["params"] for event in page.events if event.get("method") == "Network.requestWillBeSent"]
    bodies = [json.loads(each["request"]["postData"]) for each in sent if "postData" in each["request"]]
    return [body for body in bodies if body["ask"] in kinds]


def cells_in(
    page: Page, places: Sequence[tuple[int, int]], method: str = "cells", region: str = "null"
) -> list[Tensor]:
    """Maps of the last reading, as the page has unpacked them; hidden weights are NaN."""
    maps = page.evaluate(CELLS % (json.dumps(places), method, region))
    numbers = [[float("nan") if x is None else x for x in each["values"]] for each in maps]
    shapes = [(each["rows"], each["columns"]) for each in maps]
    return [torch.tensor(values).view(shape) for values, shape in zip(numbers, shapes, strict=True)]


def upload(page: Page, path: Path) -> None:
    field = page.ask("Runtime.evaluate", expression="document.querySelector('#alive-image')")["result"]
    page.ask("DOM.setFileInputFiles", files=[str(path)], objectId=field["objectId"])


def set_factor(page: Page, factor: float) -> None:
    """Move the slider of the chosen head."""
    page.evaluate(
        f"(() => {{ const slider = document.querySelector('#alive-factor'); slider.value = '{factor}';"
        "slider.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


def choose(page: Page, layer: int, head: int) -> None:
    page.click(f'[data-head="{layer}.{head}"]')
    page.wait(f"document.querySelector('#one-head').dataset.drawn?.endsWith('.{layer}.{head}')")


def shares_of(model: LiveModel, output: Any, place: int = -1) -> Tensor:
    logits = getattr(output, "logits", output)[0]
    return (logits if logits.ndim == 1 else logits[place]).softmax(-1)


def check_predictions(page: Page, rows: list[dict[str, Any]], shares: Tensor) -> None:
    """Assert that the predictions of an event, and those that the page shows, are the model's."""
    best = shares.topk(min(10, len(shares)))
    assert [row["share"] for row in rows] == pytest.approx(best.values.tolist(), rel=1e-3)
    for row in rows:
        assert row["share"] == pytest.approx(float(shares[row["id"]]), rel=1e-3)
    shown = [float(text.rstrip("%")) / 100 for text in page.texts("#alive-words .alive-share")]
    assert shown == pytest.approx(best.values.tolist(), rel=0.006, abs=6e-5)
    assert page.texts("#alive-words .alive-word") == [row["name"] for row in rows]


def wall(page: Page) -> list[str]:
    return page.evaluate("[...document.querySelectorAll('#wall .wall-line canvas')].map(c => c.toDataURL())")


@pytest.mark.parametrize("name", ["mini", "llama", "bert", "vit"])
def test_wall_statistics_and_predictions_are_those_of_python(
    name: str, browser: Browser, address_of: Callable[[str], str], red: Path
) -> None:
    page, model = opened(browser, address_of(name)), live(name)
    before = wall(page)
    image = red.read_bytes() if name == "vit" else None
    text = {"bert": "My dog [MASK] at the moon every night", "vit": ""}.get(name, TYPED)
    if image is None:
        type_into(page, text)
        event = read(page, text)
    else:
        page.evaluate("heard.length = 0")
        upload(page, red)
        event = reading(page, "true")
    inputs = model.input.prepare(Read("test", 1, text=text, image=image)).inputs
    watching = hw.watch(model.model, keep=True, patterns=True, tokenizer=model.input.tokenizer)
    with torch.no_grad(), watching as heads:
        output = model.model(**inputs)
    places = [(layer, head) for layer in range(len(heads)) for head in range(heads[layer].num_heads)]
    draws = random.Random(name).sample(places, 10)
    for (layer, head), cells in zip(draws, cells_in(page, draws), strict=True):
        assert close(cells, heads[layer].map.dense()[0, head].float())
    numbers = {(row["layer"], row["head"]): row for row in event["heads"]}
    assert sorted(numbers) == places
    for layer, head in draws:
        expected = heads[layer][head]
        assert numbers[layer, head]["label"] == expected.label.name
        tile = page.evaluate(f"document.querySelector('[data-head=\"{layer}.{head}\"]').ariaLabel")
        assert f"head {head}, {expected.label.name}" in tile
        for statistic, value in numbers[layer, head]["numbers"].items():
            shown = float("nan") if value is None else value
            assert shown == pytest.approx(expected.values[statistic], rel=0.01, abs=1e-4, nan_ok=True)
    layer, head = draws[0]
    choose(page, layer, head)
    statistics = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('.head-numbers > div')].map((entry) =>"
        " [entry.querySelector('dt').textContent, entry.querySelector('dd').textContent]))"
    )
    values = heads[layer][head].values
    for statistic in ("entropy", "local", "first"):
        if statistic.replace("_", " ") in statistics:
            shown = float(statistics[statistic.replace("_", " ")].replace("−", "-"))
            assert shown == pytest.approx(values[statistic], abs=0.0051)
    assert len(statistics) > 4
    place = -1
    if name == "bert":
        place = inputs["input_ids"][0].tolist().index(model.input.tokenizer.mask_token_id)  # type: ignore[union-attr]
    check_predictions(page, event["predictions"], shares_of(model, output, place))
    if image is None:
        assert page.text("#alive-read").startswith(f"{event['tokens']} tokens, read in ")
        assert page.state("typed") == text
    page.wait("document.querySelectorAll('#wall .thumb[data-drawn]').length > 9")
    assert wall(page) != before


def test_written_weights_and_outputs_are_those_of_python(
    browser: Browser, address_of: Callable[[str], str]
) -> None:
    page, model = opened(browser, address_of("llama")), live("llama")
    type_into(page, TYPED)
    read(page, TYPED)
    watching = hw.watch(model.model, keep=True, written=True)
    with torch.no_grad(), watching as heads, hw.collect(model.model) as outputs:
        model.model(**inputs_of(model, TYPED))
    norms = heads[2].calls[-1].written_norms
    expected = heads[2].map.dense()[0].float() * norms[0, :, None] / norms.max()
    places = [(2, 0), (2, 5)]
    for (_, head), cells, output in zip(
        places, cells_in(page, places, "written"), cells_in(page, places, "output"), strict=True
    ):
        assert close(cells, expected[head])
        assert torch.equal(output, outputs[2][0, head].half().float())


@pytest.mark.parametrize("name", ["mini", "llama"])
def test_heads_that_are_off_or_scaled_change_the_predictions_as_in_python(
    name: str, browser: Browser, address_of: Callable[[str], str]
) -> None:
    page, model = opened(browser, address_of(name)), live(name)
    type_into(page, TYPED)
    plain = read(page, TYPED)
    assert all(row["before"] is None for row in plain["predictions"])
    choose(page, 1, 2)
    page.click("#alive-toggle")
    off = read(page, TYPED, {"1.2": 0})
    _, output = watched(model, TYPED, [(1, 2)])
    check_predictions(page, off["predictions"], shares_of(model, output))
    assert page.state("off") == "1.2" and "Switched off: 1.2" in page.text("#alive-off")
    assert page.count('[data-head="1.2"].off') == 1
    shares = {row["id"]: row["share"] for row in plain["predictions"]}
    for row in off["predictions"]:
        if row["id"] in shares:
            assert row["before"] == pytest.approx(shares[row["id"]], rel=1e-4)
    assert page.text("#alive-before").startswith("With all heads on: “")
    choose(page, 0, 1)
    set_factor(page, 0.5)
    scaled = read(page, TYPED, {"1.2": 0, "0.1": 0.5})
    paths = list(model._paths)
    with torch.no_grad(), scaled_heads(model.model, {(paths[1], 2): 0.0, (paths[0], 1): 0.5}):
        output = model.model(**inputs_of(model, TYPED))
    check_predictions(page, scaled["predictions"], shares_of(model, output))
    assert page.state("off") == "1.2,0.1x0.5" and "0.1 × 0.5" in page.text("#alive-off")
    assert page.text("#alive-before").startswith("With all heads unchanged: “")
    heads, _ = watched_scaled(model, {(paths[1], 2): 0.0, (paths[0], 1): 0.5})
    last = len(paths) - 1
    assert close(cells_in(page, [(last, 0)])[0], heads[last].map.dense()[0, 0].float())
    page.click("#alive-on")
    again = read(page, TYPED)
    assert [row["share"] for row in again["predictions"]] == [row["share"] for row in plain["predictions"]]


@torch.no_grad()
def watched_scaled(model: LiveModel, factors: dict[tuple[str, int], float]) -> tuple[hw.Heads, Any]:
    with scaled_heads(model.model, factors), hw.watch(model.model, keep=True) as heads:
        return heads, model.model(**inputs_of(model, TYPED))


def test_two_texts_are_compared_as_in_changes(browser: Browser, address_of: Callable[[str], str]) -> None:
    page, model = opened(browser, address_of("mini")), live("mini")
    texts = "The nurse said that he left", "The nurse said that she left"
    type_into(page, texts[0])
    read(page, texts[0])
    page.click("#alive-compare")  # the second text is the first, until it is changed
    type_into(page, texts[1], "#alive-other")
    event = reading(page, f"e.flip !== null && location.hash.includes({urlencode({'against': texts[1]})!r})")
    assert event["flip"]["words"] == ["he", "she"]
    before, after = (watched(model, text)[0] for text in texts)
    changes = list(before.changes(after))
    paths = list(before.paths)
    most = event["flip"]["heads"][0]
    assert (most["layer"], most["head"]) == (paths.index(changes[0].path), changes[0].head)
    assert most["distance"] == pytest.approx(changes[0].distance, rel=0.01)
    assert [body["slot"] for body in asks(page, "read")[-1:]] == [1]
    page.click("#tab-flip")
    page.wait("document.querySelector('#panel-flip').childElementCount > 0")
    assert "she" in page.text("#panel-flip")


def test_a_prediction_is_appended_as_its_token(browser: Browser, address_of: Callable[[str], str]) -> None:
    page, model = opened(browser, address_of("mini")), live("mini")
    type_into(page, TYPED)
    before = read(page, TYPED)
    page.click("#alive-words li:nth-child(2) button")
    after = reading(page, f"e.tokens === {before['tokens'] + 1}")
    token = before["predictions"][1]["id"]
    request = Read("test", 1, text=TYPED, appended=(token,))
    inputs = model.input.prepare(request).inputs
    with torch.no_grad():
        output = model.model(**inputs)
    check_predictions(page, after["predictions"], shares_of(model, output))
    whole = page.evaluate("document.querySelector('#alive-text').value")
    assert whole == TYPED + before["predictions"][1]["text"] == after["text"]
    assert page.count("#alive-written mark") == 1
    assert asks(page, "read")[-1]["appended"] == [token]
    for _ in range(3):
        tokens = page.evaluate("heard.at(-1).tokens")
        page.click("#alive-words button")
        reading(page, f"e.tokens === {tokens + 1}")
    assert page.count("#alive-written mark") == 4
    type_into(page, TYPED)
    assert reading(page, f"e.tokens === {before['tokens']}")["predictions"] == before["predictions"]


def test_a_word_is_put_in_place_of_the_mask(browser: Browser, address_of: Callable[[str], str]) -> None:
    page = opened(browser, address_of("bert"))
    type_into(page, MASKED)
    read(page, MASKED)
    page.click("#alive-words button")
    event = reading(page, "!e.text.includes('[MASK]')")
    assert event["predictions"] == [] and "The text has no [MASK]" in page.text("#alive-hint")
    assert page.evaluate("document.querySelector('#alive-hint').hidden") is False
    type_into(page, MASKED)
    assert len(read(page, MASKED)["predictions"]) == 10


def test_only_maps_that_are_in_sight_are_requested(
    browser: Browser, address_of: Callable[[str], str]
) -> None:
    page = opened(browser, address_of("mini"), size=(700, 360))
    assert model_heads(page) == 56
    near = heads_near(page)
    chosen = page.evaluate("document.querySelector('#wall [aria-selected=true]').dataset.head")
    assert requested_maps(page)[0] <= near | {chosen}
    type_into(page, TYPED)
    read(page, TYPED)
    near = heads_near(page)
    page.evaluate("document.querySelector('[data-head=\"1.0\"]').scrollIntoView()")
    page.wait("document.querySelector('[data-head=\"1.0\"] .thumb[data-drawn]')")
    near |= heads_near(page)
    first, second = requested_maps(page)
    (sent,) = asks(page, "read")
    assert {f"{layer}.{head}" for layer, head in sent["maps"]} == first  # no request of their own
    assert second <= near | {chosen} and 7 <= len(second) < 50 > len(near)
    page.evaluate("document.querySelector('[data-head=\"7.6\"]').scrollIntoView()")
    page.wait("document.querySelector('[data-head=\"7.6\"] .thumb[data-drawn]')")
    assert requested_maps(page)[0] == first and "7.6" in requested_maps(page)[1]


def model_heads(page: Page) -> int:
    return page.count("#wall .tile")


def heads_near(page: Page) -> set[str]:
    """Heads of the wall that are in the window, or at most 200 dots beyond it."""
    return set(
        page.evaluate(
            "[...document.querySelectorAll('#wall .wall-line')].flatMap((line) => {"
            " const box = line.getBoundingClientRect();"
            " return box.top < innerHeight + 200 && box.bottom > -200"
            "   ? [...line.querySelectorAll('.tile')].map((tile) => tile.dataset.head) : []; })"
        )
    )


def requested_maps(page: Page) -> list[set[str]]:
    """Heads whose maps were asked for, a set for each reading; none is asked for twice."""
    heads: list[list[str]] = [[]]
    places: dict[str, list[str]] = {}
    for each in asks(page, "read", "maps"):
        is_read = each["ask"] == "read"
        if is_read:
            heads.append([])
        names = heads[-1] if is_read else places.setdefault(each["reading"], heads[-1])
        names += [f"{layer}.{head}" for layer, head in each["maps" if is_read else "heads"]]
    assert all(len(set(names)) == len(names) for names in heads)
    return [set(names) for names in heads]


def test_a_long_text_is_zoomed_into_down_to_its_weights(browser: Browser) -> None:
    text = "".join(random.Random(3).choices("abcdefg hij", k=16384))
    sizes = {"hidden_size": 6, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = LiveModel(*llama(**sizes), max_tokens=16384, example=text)
    weights = model.first_heads[0].map
    with server(model) as address:
        page = opened(browser, page_of(address))
        assert page.text("#alive-read").startswith("16,384 tokens, read in ")
        page.wait("document.querySelector('#one-head .zooms')")
        assert page.evaluate("document.querySelector('#one-head .cells').dataset.region === undefined")
        for _ in range(8):
            page.click("#one-head .zoom-in")
        page.wait("document.querySelector('#one-head .cells').dataset.region === '8160-8224,8160-8224'")
        assert "in 64 × 64 cells" in page.text("#one-head .region")
        last = asks(page, "region")[-1]
        assert (last["queries"], last["keys"]) == ([8160, 8224], [8160, 8224])
        rows = torch.stack([weights[0, 0, query].float() for query in range(8160, 8224)])
        (cells,) = cells_in(page, [(0, 0)], "region", "{queries: [8160, 8224], keys: [8160, 8224]}")
        assert close(cells, rows[:, 8160:8224]) and float(cells.nan_to_num().max()) > 0
        field = page.evaluate(
            "(() => { const field = document.querySelector('#one-head .cells');"
            "field.scrollIntoView({block: 'center'}); const box = field.getBoundingClientRect();"
            "return [box.left, box.top, box.width, box.height]; })()"
        )
        for key in (8162, 8171, 8180, 8181):
            x, y = field[0] + field[2] * (key + 0.5 - 8160) / 64, field[1] + field[3] * 20.5 / 64
            page.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
            line = page.text("#one-head .cell-line")
            assert "8,180" in line and f"{key:,}" in line and ("masked" in line) == (key > 8180), line


def test_two_pages_have_their_own_heads_off(browser: Browser, address_of: Callable[[str], str]) -> None:
    model = live("llama")
    pages = [opened(browser, address_of("llama")) for _ in range(2)]
    places = (0, 3), (2, 1)
    for number, (page, (layer, head)) in enumerate(zip(pages, places, strict=True)):
        page.ask("Page.bringToFront")
        choose(page, layer, head)
        page.click("#alive-toggle")
        read(page, model.first["text"], {f"{layer}.{head}": 0})
        type_into(page, f"{TYPED} {number}")
        read(page, f"{TYPED} {number}", {f"{layer}.{head}": 0})  # below, this process runs the same model
    for number, (page, place) in enumerate(zip(pages, places, strict=True)):
        page.ask("Page.bringToFront")
        event = read(page, f"{TYPED} {number}", {f"{place[0]}.{place[1]}": 0})
        heads, output = watched(model, f"{TYPED} {number}", [place])
        check_predictions(page, event["predictions"], shares_of(model, output))
        assert close(cells_in(page, [(2, 0)])[0], heads[2].map.dense()[0, 0].float())


def test_a_page_goes_on_once_its_server_is_started_again(browser_of_errors: Browser) -> None:
    tiny = llama()
    with server(LiveModel(*tiny)) as address:
        page = opened(browser_of_errors, page_of(address))
        type_into(page, TYPED)
        before = read(page, TYPED)
        port = urlsplit(address).port or 0
    type_into(page, f"{TYPED} again")
    page.wait("!document.querySelector('#alive-wrong').hidden")
    assert page.text("#alive-wrong").startswith("There is no connection to the model")
    assert axe.findings(page, "#alive") == []
    with server(LiveModel(*tiny), port=port) as address:
        assert urlsplit(address).port == port
        read(page, f"{TYPED} again")
        page.wait("document.querySelector('#alive-wrong').hidden")
        choose(page, 2, 4)
        type_into(page, TYPED)
        assert read(page, TYPED)["predictions"] == before["predictions"]
        page.wait("document.querySelector('#alive-wrong').hidden")


def test_a_text_that_the_server_has_no_longer_is_read_again(browser_of_errors: Browser) -> None:
    model = LiveModel(*llama())
    with server(model) as address:
        page = opened(browser_of_errors, page_of(address), size=(1440, 400))
        type_into(page, TYPED)
        read(page, TYPED)
        time.sleep(1.1)  # a reading that is gone sooner is not read again
        model._stored.clear()
        reads = len(asks(page, "read"))
        page.click(".next-head")
        page.click("#tab-diversity")
        page.wait("document.querySelector('#panel-diversity .matrix')")
        assert len(asks(page, "read")) == reads + 1
        assert page.evaluate("document.querySelector('#alive-wrong').hidden")
        heads, _ = watched(model, TYPED)
        label = page.evaluate("document.querySelector('[data-head=\"1.3\"]').ariaLabel")
        assert heads[1][3].label.name in label


def test_the_first_text_is_read_again_where_it_is_gone_when_its_page_is_loaded(
    browser_of_errors: Browser,
) -> None:
    model = LiveModel(*llama())
    drawn = "document.querySelectorAll('#wall .thumb[data-drawn=true]').length"
    with server(model) as address:
        for number in range(13):
            model.answer(Read("another page", number + 1, text=f"{TYPED} {number}"))
        page = opened(browser_of_errors, page_of(address))
        page.wait(f"{drawn} > 9")
        assert len(asks(page, "read")) == 1
        assert page.count("#wall .thumb[data-drawn=empty]") == 0
        assert page.evaluate("document.querySelector('#alive-wrong').hidden")
        model._stored.clear()
        model.seconds = 0.0  # it cannot be read again
        page.ask("Page.navigate", url="about:blank")
        page.ask("Page.navigate", url=page_of(address))
        page.wait("document.querySelectorAll('#wall .thumb[data-drawn=empty]').length > 9")
        page.wait("document.querySelector('#alive-wrong').textContent.includes('at most 0 seconds')")
        title = page.evaluate("document.querySelector('#wall .thumb[data-drawn]').title")
        assert title == "This map could not be loaded."
        model.seconds = 60.0
        type_into(page, TYPED)
        read(page, TYPED)
        page.wait(f"{drawn} > 9")
        page.wait("document.querySelector('#wall .thumb[title]') === null")
        assert page.evaluate("document.querySelector('#alive-wrong').hidden")


def test_a_wrong_token_is_refused_in_words(browser_of_errors: Browser) -> None:
    tiny = llama()
    with server(LiveModel(*tiny)) as address:
        refused = browser_of_errors.open(page_of(address, "wrongtoken"))
        assert refused.text("body").startswith("This address needs the token that headwise serve printed")
        assert refused.count("script") == 0
        page = opened(browser_of_errors, page_of(address))
        port = urlsplit(address).port or 0
    with server(LiveModel(*tiny), token="othertoken", port=port):
        type_into(page, TYPED)
        page.wait("document.querySelector('#alive-wrong').textContent.startsWith('The token of this page')")
        assert page.text("#alive-wrong").endswith("at the address that headwise serve printed.")
    with server(LiveModel(*tiny), port=port):
        type_into(page, f"{TYPED} 2")
        read(page, f"{TYPED} 2")
        assert page.evaluate("document.querySelector('#alive-wrong').hidden")


@pytest.mark.parametrize("name", ["mini", "classifier"])
def test_markup_is_shown_as_text_and_nothing_runs(name: str, browser: Browser) -> None:
    shared = live(name)
    with server(LiveModel(shared.model, shared.input.tokenizer, HOSTILE, example=HOSTILE)) as address:
        page = opened(browser, page_of(address))
        type_into(page, f"{HOSTILE} 2")
        read(page, f"{HOSTILE} 2")
        page.evaluate(f"location.hash = {urlencode({'typed': HOSTILE + ' 3', 'off': HOSTILE})!r}")
        read(page, f"{HOSTILE} 3")
        page.wait("document.querySelectorAll('#wall .thumb[data-drawn]').length > 9")
        for tab in page.evaluate("[...document.querySelectorAll('[role=tab]')].map(e => e.id)"):
            page.click(f"#{tab}")
        assert page.evaluate("window.ran === undefined && document.querySelector('img[src=x]') === null")
        assert "<script>" in page.text("body") and page.count("body b:empty") == 0
        assert page.evaluate("[...document.querySelectorAll('b')].every(e => e.textContent !== 'bold')")
        if name == "classifier":
            assert "<b>neither</b>" in page.texts("#alive-words .alive-word")
            assert page.count("#alive-words button") == 0


def test_a_failing_model_is_reported_and_the_page_lives_on(
    browser_of_errors: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LiveModel(*llama())
    with server(model) as address:
        page = opened(browser_of_errors, page_of(address))

        def fail(**inputs: Any) -> None:
            raise KeyError("<b>no such weight</b>")

        monkeypatch.setattr(model.model, "forward", fail)
        type_into(page, TYPED)
        page.wait("!document.querySelector('#alive-wrong').hidden")
        assert page.text("#alive-wrong") == "the model failed: KeyError: '<b>no such weight</b>'"
        assert page.evaluate("document.querySelector('#alive-wrong').getAttribute('role')") == "alert"
        choose(page, 1, 1)  # maps of what was read before
        monkeypatch.undo()
        type_into(page, f"{TYPED} 2")
        read(page, f"{TYPED} 2")
        assert page.evaluate("document.querySelector('#alive-wrong').hidden")
        monkeypatch.setattr(web_app, "MOST_WAITING", 0)
        type_into(page, f"{TYPED} 3")
        page.wait("document.querySelector('#alive-wrong').textContent.includes('0 requests to answer')")
        monkeypatch.undo()
        model.seconds = 0.0
        type_into(page, TYPED)
        page.wait("document.querySelector('#alive-wrong').textContent.includes('at most 0 seconds')")


class Recording(LiveModel):
    """Notes which texts were read to their end."""

    def __init__(self, *arguments: Any) -> None:
        self.read_texts: list[str] = []
        super().__init__(*arguments)

    def answer(self, request: Request, cancelled: Callable[[], bool] = lambda: False) -> Reply:
        reply = super().answer(request, cancelled)
        if isinstance(request, Read):
            self.read_texts.append(request.text)
        return reply


def test_a_newer_text_cancels_those_before_it(browser_of_errors: Browser) -> None:
    tiny = llama()
    model = Recording(*tiny)
    for layer in tiny.model.model.layers:
        layer.register_forward_pre_hook(lambda *_: time.sleep(0.2))
    texts = [f"{TYPED} {number}" for number in range(8)]
    with server(model) as address:
        page = opened(browser_of_errors, page_of(address))
        assert model.read_texts == []  # the first text is in the page
        for text in texts:
            type_into(page, text)
            time.sleep(0.05)
        read(page, texts[-1])
        time.sleep(0.5)
        events = page.evaluate("heard.map(e => e.text)")
        assert events[-1] == texts[-1] and len(set(events) & set(texts)) <= 2
        assert model.read_texts[-1] == texts[-1] and len(model.read_texts) <= 3


def test_an_address_shows_the_same_again(browser: Browser, address_of: Callable[[str], str]) -> None:
    page = opened(browser, address_of("llama"))
    type_into(page, TYPED)
    read(page, TYPED)
    choose(page, 2, 3)
    page.click("#alive-toggle")
    read(page, TYPED, {"2.3": 0})
    choose(page, 1, 0)
    set_factor(page, 1.5)
    factors = {"2.3": 0, "1.0": 1.5}
    before = read(page, TYPED, factors)
    page.evaluate("window.isOld = true")
    page.ask("Page.reload")
    page.wait("document.readyState === 'complete' && window.isOld === undefined")
    after = read(page, TYPED, factors)
    assert after["predictions"] == before["predictions"] and after["heads"] == before["heads"]
    assert page.evaluate("document.querySelector('#alive-text').value") == TYPED
    assert (page.state("layer"), page.state("head"), page.state("off")) == ("1", "0", "2.3,1.0x1.5")
    assert page.text("#alive-factor-value") == "1.5"


@pytest.mark.parametrize("name", ["mini", "bert", "vit"])
def test_axe_reports_nothing_in_light_and_dark(
    name: str, browser: Browser, address_of: Callable[[str], str]
) -> None:
    page = opened(browser, address_of(name))
    if name == "mini":
        type_into(page, TYPED)
        read(page, TYPED)
        page.click("#alive-toggle")
        reading(page, "Object.keys(e.factors).length === 1")
        page.click("#alive-compare")
        type_into(page, f"{TYPED} again", "#alive-other")
        reading(page, "e.flip !== null")
    elif name == "bert":
        type_into(page, "no mask")
        read(page, "no mask")
    assert axe.findings(page) == []
    page.dark(True)
    page.wait("matchMedia('(prefers-color-scheme: dark)').matches")
    page.evaluate("new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)))")
    time.sleep(0.3)  # colours fade
    assert axe.findings(page) == []
