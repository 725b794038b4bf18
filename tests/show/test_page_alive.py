"""The model that runs inside the page, in a real browser: what it computes is what Python computes.

The page tells of every reading by an event "headwise-alive": ids, logits, heads that are off, milliseconds,
the source and the flip that its panels were given.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from browser import Browser, Page
from headwise.heads.record import reduce
from headwise.models import Pretrained, load

pytestmark = pytest.mark.slow

HE = "The nurse said that he left because he was tired"
TEXTS = {
    "a sentence": "My uncle, who was a sailor, told me that the sea is never the same.",
    "said twice": "one two, three four; one two, three four; one two, three four; one two, three four.",
    "letters": "Café 😀 שלום 你好\n\n    def f(x): return x ** 2  # it's 3.14",
    "nothing": "",
    "long": " ".join(
        f"{number} sheep jumped over the {'old' if number % 3 else 'new'} wall." for number in range(37)
    ),
}
OFF = [(1, 5), (2, 3), (3, 0)]
LISTEN = """
window.heard = [];
document.addEventListener("headwise-alive", ({detail}) => heard.push({...detail, logits: [...detail.logits],
  source: null, heads: detail.source && detail.source.readings[0].heads, live: detail.source}));
"""


@pytest.fixture(scope="module")
def mini() -> Pretrained:
    return load("mini")


@pytest.fixture(scope="module")
def file(mini: Pretrained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return watched(mini, HE).to_html(tmp_path_factory.mktemp("alive") / "mini.html", text=HE, alive=mini)


@pytest.fixture
def page(browser: Browser, file: Path) -> Page:
    """As somebody opens it."""
    opened = browser.open(file)
    opened.evaluate(LISTEN)
    return opened


@pytest.fixture(scope="module")
def shared_page(running_browser: Browser, file: Path) -> Page:
    opened = running_browser.open(file)
    opened.evaluate(LISTEN)
    return opened


@pytest.fixture
def used(shared_page: Page) -> Iterator[Page]:
    """One page for many texts, one after another."""
    shared_page.ask("Page.bringToFront")  # a page behind another draws nothing
    shared_page.evaluate("heard.length = 0")
    yield shared_page
    assert shared_page.complaints == []


@torch.no_grad()
def watched(mini: Pretrained, text: str, off: Sequence[tuple[int, int]] = ()) -> hw.Heads:
    model, tokenizer, _ = mini
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with (
        hw.ablate(model, off),
        hw.watch(model, tokenizer=tokenizer, keep=True, patterns=True, diversity=True, written=True) as heads,
    ):
        model(ids)
    return heads


@torch.no_grad()
def logits_of(mini: Pretrained, text: str, off: Sequence[tuple[int, int]] = ()) -> torch.Tensor:
    model, tokenizer, _ = mini
    with hw.ablate(model, off):
        return model(tokenizer(text, return_tensors="pt")["input_ids"])[0, -1]


def type_into(page: Page, box: str, text: str) -> None:
    """What was there is replaced, as by somebody at the keyboard."""
    page.evaluate(f"(() => {{ const box = document.querySelector({box!r}); box.focus(); box.select(); }})()")
    if text:
        page.ask("Input.insertText", text=text)
    else:
        page.press("Backspace", 8)


def heard(page: Page, text: str, off: Sequence[tuple[int, int]] = ()) -> dict[str, Any]:
    """What the page told of this text."""
    names = sorted(f"{layer}.{head}" for layer, head in off)
    like = f"(e) => e.text === {json.dumps(text)} && [...e.off].sort().join() === {','.join(names)!r}"
    last = f"(({{live, flip, ...rest}}) => rest)(heard.filter({like}).at(-1))"
    return page.wait(f"heard.some({like}) && {last}")


def log(line: str) -> None:
    sys.stdout.write(f"{line}\n")  # seen with -s


def apart(page: Sequence[float], truth: torch.Tensor) -> float:
    return float((torch.tensor(page, dtype=torch.float64) - truth.double()).abs().max())


def check_heads(entries: list[dict[str, Any]], heads: hw.Heads) -> None:
    """Every number of every head, and its label."""
    expected = [(number, head) for number, layer in enumerate(heads.values()) for head in layer]
    assert len(entries) == len(expected)
    for entry, (layer, head) in zip(entries, expected, strict=True):
        assert (entry["layer"], entry["head"], entry["label"]) == (layer, head.head, head.label.name)
        assert entry["numbers"].keys() == head.values.keys()
        for name, value in head.values.items():
            mine = entry["numbers"][name]
            assert (mine is None) == math.isnan(value), name
            assert mine is None or mine == pytest.approx(value, rel=1e-4, abs=1e-4), (layer, head.head, name)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_a_typed_text_has_the_logits_numbers_and_labels_of_python(
    text: str, used: Page, mini: Pretrained
) -> None:
    type_into(used, "#alive-text", text)
    result = heard(used, text)
    assert result["kind"] == "WebAssembly"
    assert result["ids"] == mini.tokenizer(text)["input_ids"]
    error = apart(result["logits"], logits_of(mini, text))
    log(f"{len(result['ids'])} tokens: {result['milliseconds']:.0f} ms, logits within {error:.1e}")
    assert error < 1e-3
    check_heads(result["heads"], watched(mini, text))


def test_any_text_has_the_ids_of_python(used: Page, mini: Pretrained) -> None:
    pieces = [
        "😀", "👩‍👩‍👧", "שלום", " עולם", "你好", "。", "\n", "\t", "  ", "   ", "0", "12", "3.14",
        "def f(x):", "\n    return x", "it's", "we'll", "I'VE", "é", "e\u0301", "\u00a0", "\u0085", "\ufeff",
        "\u2028", "½", "²", "ß", "_", "--", "…", "a", "The", " cat", "\u200b", "٣", "ﬁ", "<|start|>",
        "<|", "</script>",
    ]  # fmt: skip
    draw = random.Random(11)
    for _ in range(11):
        text = "".join(draw.choices(pieces, k=draw.randint(5, 43)))
        type_into(used, "#alive-text", text)
        assert heard(used, text)["ids"] == mini.tokenizer(text)["input_ids"], repr(text)


def test_typing_on_and_taking_back_gives_what_reading_at_once_gives(used: Page, mini: Pretrained) -> None:
    text = TEXTS["a sentence"]
    type_into(used, "#alive-text", text[:20])
    for start, end in itertools.pairwise((20, 21, 26, 40, len(text))):
        used.ask("Input.insertText", text=text[start:end])
        result = heard(used, text[:end])
        assert apart(result["logits"], logits_of(mini, text[:end])) < 1e-3
    for _ in range(3):
        used.press("Backspace", 8)
    result = heard(used, text[:-3])
    assert apart(result["logits"], logits_of(mini, text[:-3])) < 1e-3
    check_heads(result["heads"], watched(mini, text[:-3]))


def test_heads_are_switched_off_by_button_key_and_address(
    page: Page, browser: Browser, file: Path, mini: Pretrained
) -> None:
    heard(page, HE)  # read once when the page was drawn, before anybody asked
    assert page.evaluate("location.hash.includes('source')") is False
    for number, (layer, head) in enumerate(OFF):
        page.evaluate(
            f"document.querySelector('[data-head=\"{layer}.{head}\"]').scrollIntoView({{block: 'center'}})"
        )
        page.click(f'[data-head="{layer}.{head}"]')
        if number == 0:
            page.click("#alive-toggle")
        else:
            page.press("o", 79)
        result = heard(page, HE, OFF[: number + 1])
        assert apart(result["logits"], logits_of(mini, HE, OFF[: number + 1])) < 1e-3
    check_heads(result["heads"], watched(mini, HE, OFF))
    now, whole = logits_of(mini, HE, OFF).softmax(-1), logits_of(mini, HE).softmax(-1)
    shown = page.evaluate(
        "[...document.querySelectorAll('#alive-words button')].map(b => [Number(b.dataset.token), "
        "b.querySelector('.alive-share').textContent, b.querySelector('.alive-up, .alive-down').textContent])"
    )
    assert [token for token, *_ in shown] == now.topk(10).indices.tolist()
    for token, share, moved in shown:
        assert float(share.removesuffix("%")) == pytest.approx(100 * float(now[token]), abs=0.06)
        points = float(moved.replace("−", "-").replace("±", ""))
        assert points == pytest.approx(100 * float(now[token] - whole[token]), abs=0.06)
    link = page.evaluate("location.hash")
    page.click("#alive-on")
    assert page.wait("heard.at(-1).off.length === 0")
    assert page.evaluate("document.querySelector('#alive-on').hidden")
    again = browser.open(file, fragment=link)
    again.evaluate(LISTEN)
    assert apart(heard(again, HE, OFF)["logits"], logits_of(mini, HE, OFF)) < 1e-3
    assert "2.3" in again.text("#alive-off")


def test_wall_and_head_show_what_was_typed(page: Page, mini: Pretrained) -> None:
    heard(page, HE)
    drawn = "document.querySelector('div:has(> canvas):has([data-head=\"2.3\"]) > canvas').toDataURL()"
    before = page.evaluate(drawn)
    text = TEXTS["said twice"]
    type_into(page, "#alive-text", text)
    heard(page, text)
    page.wait(f"{drawn} !== {before!r}")
    heads = watched(mini, text)
    call_record = heads[2].calls[-1]
    assert call_record.map is not None
    call = "heard.at(-1).live.readings[0].calls[2]"
    cells = page.evaluate(f"{call}.cells(3).then(c => [...c.values].map(x => Number.isNaN(x) ? 0 : x))")
    assert apart(cells, call_record.map.dense()[0, 3].flatten()) < 1e-4
    norms = call_record.written_norms
    assert norms is not None
    written = page.evaluate(f"{call}.written(3).then(c => [...c.values].map(x => Number.isNaN(x) ? 0 : x))")
    assert apart(written, (call_record.map.dense()[0, 3] * norms[0, 3] / norms[0].max()).flatten()) < 1e-4
    distances, cosines = (call_record.pairs[name][0].flatten() for name in ("attention", "outputs"))
    assert apart(page.evaluate(f"{call}.distances().then(d => d.flat())"), distances) < 1e-4
    assert apart(page.evaluate(f"{call}.cosines().then(d => d.flat())"), cosines) < 1e-4
    model, tokenizer, _ = mini
    with torch.no_grad(), hw.collect(model) as outputs:
        model(tokenizer(text, return_tensors="pt")["input_ids"])
    drawn_output = page.evaluate(f"{call}.output(3).then(c => [...c.values])")
    assert apart(drawn_output, outputs[2][0, 3].flatten()) < 1e-3


def test_words_are_appended_one_after_another(page: Page, mini: Pretrained) -> None:
    heard(page, HE)
    ids = mini.tokenizer(HE)["input_ids"]
    for step in range(1, 4):
        with torch.no_grad():
            ids.append(int(mini.model(torch.tensor([ids]))[0, -1].argmax()))
        page.click("#alive-words button")
        assert page.wait(f"heard.at(-1).ids.length === {len(ids)} && heard.at(-1).ids") == ids
        assert page.count("#alive-written mark") == step
    steps = page.evaluate("heard.at(-1).live.readings[0].calls[0].steps")
    assert steps == list(range(len(ids) - 3, len(ids) + 1))


def test_another_text_beside_it_is_compared_as_python_compares(page: Page, mini: Pretrained) -> None:
    page.click("#alive-compare")
    for other in (
        HE.replace(" he ", " she "),
        HE.replace(" he left", " the old surgeon left"),
        HE + " and left",
    ):
        type_into(page, "#alive-other", other)
        parameter = f"new URLSearchParams({{against: {other!r}}}).toString()"
        page.wait(f"location.hash.includes({parameter}) && heard.at(-1).flip !== null")
        flip = page.evaluate("heard.at(-1).flip")
        changes = watched(mini, HE).changes(watched(mini, other))
        assert flip["words"] == list(changes.text.words)
        line = flip["layers"][0]["queries"]
        assert [(place["before"], place["after"]) for place in line] == list(changes.text.places)
        assert [place["name"] for place in line] == changes.text.names
        found_there = {(head["layer"], head["head"]): head for head in flip["heads"]}
        for change in changes:
            entry = found_there[change.layer, change.head]  # type: ignore[index]
            assert entry["distance"] == pytest.approx(change.distance, abs=1e-4)
            assert entry["largest"] == pytest.approx(change.largest, abs=1e-4)
    type_into(page, "#alive-other", "xyz")
    assert page.wait("document.querySelector('#alive-wrong').textContent").startswith(
        "The texts have no token"
    )


def test_a_text_that_is_too_long_is_said_and_not_cut(used: Page, mini: Pretrained) -> None:
    page = used
    text = "a b c d e f " * 101
    count = len(mini.tokenizer(text)["input_ids"])
    type_into(page, "#alive-text", text)
    assert page.wait("document.querySelector('#alive-wrong').textContent").startswith(
        f"The text has {count} tokens"
    )
    type_into(page, "#alive-text", "a b c")
    heard(page, "a b c")
    assert page.evaluate("document.querySelector('#alive-wrong').hidden")


def test_without_webassembly_the_same_is_computed_more_slowly(
    browser: Browser, file: Path, mini: Pretrained, tmp_path: Path
) -> None:
    whole = file.read_text("utf-8")
    assert whole.count("'wasm-unsafe-eval'") == 1
    without = tmp_path / "without.html"
    without.write_text(whole.replace(" 'wasm-unsafe-eval'", ""), "utf-8")
    text = " ".join(["word"] * 63)
    seconds = {}
    for where in (file, without):
        page = browser.open(where)
        page.evaluate(LISTEN)
        for typed in (text, "x", text):  # warm the second time
            type_into(page, "#alive-text", typed)
            last = heard(page, typed)
            page.evaluate("heard.length = 0")
        seconds[last["kind"]] = last["milliseconds"]
        assert apart(last["logits"], logits_of(mini, text)) < 1e-3
        check_heads(last["heads"], watched(mini, text))
        read = page.text("#alive-read")
        page.close()  # its console says that WebAssembly was refused
    assert "blocks WebAssembly" in read
    log(f"64 tokens, milliseconds: { {kind: round(took) for kind, took in seconds.items()} }")
    assert seconds["WebAssembly"] < seconds["TypeScript"]


def test_what_is_typed_is_text_and_a_link_reopens_it(page: Page, browser: Browser, file: Path) -> None:
    text = "</textarea><img src=x onerror=alert(1)> & <b>bold</b>"
    type_into(page, "#alive-text", text)
    heard(page, text)
    page.wait("location.hash.includes('typed')")
    assert page.count("main img, #alive img, #alive b") == 0
    again = browser.open(file, fragment=page.evaluate("location.hash"))
    again.evaluate(LISTEN)
    assert again.evaluate("document.querySelector('#alive-text').value") == text
    again.wait("location.hash.includes('source=1')")


def test_a_head_that_only_the_model_beside_it_has_cannot_be_switched_off(
    browser: Browser, mini: Pretrained, tmp_path: Path
) -> None:
    other = hw.Heads()
    count = mini.model.config.num_layers  # the model beside has one layer more
    for layer in range(count + 1):
        map = hw.AttentionMap(torch.randn(1, 3, 7, 5), torch.randn(1, 3, 7, 5), causal=True)
        other.add(f"layers.{layer}", reduce(map, names=("entropy",), keep=True, forward=1))
    path = watched(mini, HE).to_html(tmp_path / "beside.html", text=HE, alive=mini, beside=other)
    page = browser.open(path, fragment=f"#source=1&layer={count}&head=2")
    page.wait("document.documentElement.dataset.ready === 'true'")
    assert page.text("#alive-toggle") == f"{mini.title} has no layer {count}, head 2 to switch off"
    page.click("#alive-toggle")
    assert page.evaluate("document.querySelector('#alive-toggle').disabled")
    assert "off=" not in page.evaluate("location.hash")
    page.evaluate("location.hash = '#source=1&layer=3&head=2'")
    page.wait("!document.querySelector('#alive-toggle').disabled")
    assert page.text("#alive-toggle") == "Switch layer 3, head 2 off"
