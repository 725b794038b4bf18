"""Heads as JSON and as a page: strict, whole, and nothing that users give is more than text."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from browser import Browser, found
from headwise import AttentionMap, Heads
from headwise.errors import ArgumentError
from headwise.heads.labels import MIXED
from headwise.heads.record import reduce
from headwise.heads.roles import Role, Roles

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from headwise.show import heads_page as pages
from headwise.show.heads_data import FORMAT, as_json
from headwise.show.offline_pages import save_page

ATTACKS = (
    "<script>alert(1)</script>",
    "</style><img src=x onerror=alert(2)>",
    "\" onload='alert(3)' x=\"",
    "-->{{MAIN}}{{STYLE}}<!--",
    "\u202egnp.exe",
    "\ud800half",
    "]]>&amp;&#60;b&#62;",
)
WORDS = ["[CLS]", *ATTACKS, "שלום", "🐈"]


def previous(length: int) -> Tensor:
    return torch.eye(length).roll(1, 0).index_put((torch.tensor(0),), torch.eye(length)[0])


def undecided(length: int) -> Tensor:
    return 0.35 * torch.eye(length) + 0.65 / length


def watched(
    heads_of: list[int], length: int = len(WORDS), *, keep: bool = True, pooled: int | None = 128
) -> Heads:
    """A model with so many heads per layer, the first of each a previous-token head."""
    heads = Heads()
    for number, count in enumerate(heads_of):
        weights = torch.stack([previous(length)] + [undecided(length)] * (count - 1))
        map = AttentionMap.from_weights(weights[None])
        names = ("entropy", "distance", "first", "previous", "itself", "next")
        record = reduce(map, names=names, pooled=pooled, with_patterns=True, keep=keep, forward=1)
        heads.add(f"layers.{number}.<i>attention", record)
    heads.title = "Toy <b>bold</b>"
    heads.tokens = [WORDS[:length]] if length <= len(WORDS) else None
    return heads


def roles() -> Roles:
    rules = {"+1 words": 0.2, "the <u>first</u> noun": 0.5}
    role = Role(
        "verb > <s>object</s>", True, 0, 1, 0.9, 0.8, 0.95, 53, rules, {2: (0.9, 53)}, heads=[(0, 1, 0.9)]
    )
    return Roles({role.name: role}, {role.name: torch.zeros(1, 2)}, [0], sentences=101)


class Parsed(HTMLParser):
    """Every tag with its attributes, and all text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += "" if "style" in self.open else data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


# JSON


def test_json_is_strict_and_comes_back_as_it_was(tmp_path: Path) -> None:
    heads = watched([2, 3])
    place = tmp_path / "heads.json"
    data = heads.to_json(place, text=" ".join(ATTACKS), roles=roles())

    def refused(name: str) -> None:
        raise AssertionError(name)

    assert json.loads(place.read_bytes().decode("utf-8"), parse_constant=refused) == data
    assert data["format"] == FORMAT and data["title"] == heads.title
    assert data == heads.to_json(text=" ".join(ATTACKS), roles=roles())


def test_json_holds_the_keys_that_are_promised() -> None:
    heads = watched([2, 3])
    data = heads.to_json(roles=roles())
    promised = "format title text tokens layers heads labels sentences".split()
    assert list(data) == promised and data["text"] is None
    assert [list(layer) for layer in data["layers"]] == ["layer path kind num_heads queries keys".split()] * 2
    assert list(data["heads"][0]) == "layer head path label score sentence roles numbers".split()
    assert [(head["layer"], head["head"]) for head in data["heads"]] == [tuple(head) for head in heads.all()]
    for told, head in zip(data["heads"], heads.all(), strict=True):
        assert told["label"] == head.label.name and (told["score"] is None) == (head.label.name == MIXED)
        for name, value in head.values.items():
            number = told["numbers"][name]
            assert number is None if value != value else number == pytest.approx(value, rel=1e-5)
    assert data["heads"][1]["roles"] == ["verb > <s>object</s>"] and data["heads"][0]["roles"] == []
    assert heads.to_json()["heads"][0]["roles"] is None
    assert data["labels"][0]["heads"] + data["labels"][1]["heads"] == 5


def test_what_is_not_finite_is_null() -> None:
    heads = watched([1], length=1)  # no query has a key before it
    numbers = heads.to_json()["heads"][0]["numbers"]
    assert numbers["previous"] is None
    assert "NaN" not in as_json(heads.to_json())


def test_chosen_heads_alone_are_told_of() -> None:
    data = watched([2, 3]).to_json(chosen=[(1, 2), (1, 0)])
    assert [(head["layer"], head["head"]) for head in data["heads"]] == [(1, 0), (1, 2)]
    assert [layer["layer"] for layer in data["layers"]] == [1]
    with pytest.raises(ArgumentError, match="7"):
        watched([2, 3]).to_json(chosen=[(1, 7)])


@pytest.mark.parametrize(("method", "ending"), [("to_json", ".json"), ("to_html", ".html")])
def test_a_file_is_written_whole_or_not_at_all(
    method: str, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = watched([2])
    with pytest.raises(ArgumentError, match="heads must not be empty: 0 layers"):
        getattr(Heads(), method)(tmp_path / f"heads{ending}")
    monkeypatch.setattr(pages, "heads_page", lambda heads, **_: "a page")  # which takes a while to draw
    with pytest.raises(ArgumentError, match=rf"must end in \{ending}: got 'heads.png'"):
        getattr(heads, method)("heads.png")
    with pytest.raises(ArgumentError, match="nowhere"):
        getattr(heads, method)(tmp_path / "nowhere" / f"heads{ending}")
    place = tmp_path / f"heads{ending}"
    place.write_text("before")

    def full(self: Path, *_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ArgumentError, match="No space left on device"):
        getattr(heads, method)(place)
    assert place.read_text() == "before" and list(tmp_path.iterdir()) == [place]


# The page


@pytest.fixture(scope="module")
def page() -> str:
    return pages.heads_page(watched([2, 3]), text=" ".join(ATTACKS), roles=roles())


def test_nothing_that_users_give_is_more_than_text(page: str) -> None:
    parsed = Parsed(page)
    assert {name for name, _ in parsed.tags} <= set(
        "html head meta title style body header h1 h2 blockquote p nav ul li a main section div table thead "
        "tbody tr th td figure img figcaption small b i bdi br span footer".split()
    )
    assert not [name for _, attributes in parsed.tags for name in attributes if name.startswith("on")]
    assert not any("style" in attributes for _, attributes in parsed.tags)
    assert "<script>alert(1)</script>" in parsed.text and "{{MAIN}}{{STYLE}}" in parsed.text
    assert "Toy <b>bold</b>" in parsed.text and "the <u>first</u> noun" in parsed.text
    assert "\u202e" not in page and "\ud800" not in page
    assert parsed.open == []
    page.encode("utf-8")


def test_the_page_may_load_and_run_nothing(page: str) -> None:
    parsed = Parsed(page)
    (policy,) = [each["content"] for each in parsed.all("meta") if "http-equiv" in each]
    assert policy is not None and "script" not in policy
    allowed = [re.sub("sha256-[^']+", "sha256", each) for each in policy.split("; ")]
    assert allowed == [
        "default-src 'none'", "style-src 'sha256'", "img-src data:", "base-uri 'none'", "form-action 'none'"
    ]  # fmt: skip
    assert all((each["src"] or "").startswith("data:image/png;base64,") for each in parsed.all("img"))
    assert all((each["href"] or "").startswith("#") for each in parsed.all("a"))
    assert "http" not in re.sub(r"http-equiv", "", page) and "url(" not in page


def test_the_page_can_be_read_aloud(page: str) -> None:
    parsed = Parsed(page)
    assert parsed.all("html")[0]["lang"] == "en"
    assert all(each["alt"] for each in parsed.all("img"))
    assert all(each["scope"] in ("col", "row") for each in parsed.all("th"))
    levels = [int(name[1]) for name, _ in parsed.tags if re.fullmatch(r"h\d", name)]
    assert levels[0] == 1 and set(levels[1:]) == {2}
    names = [each["id"] for _, each in parsed.tags if "id" in each]
    assert len(names) == len(set(names))
    assert {(each["href"] or "")[1:] for each in parsed.all("a")} <= set(names)
    named = {each["aria-labelledby"] for _, each in parsed.tags if "aria-labelledby" in each}
    assert named <= set(names)


def test_every_head_has_a_row_and_a_picture_of_its_cells(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = Parsed(page)
    assert len(parsed.all("img")) == 1 + 5
    for row in ("0.0", "0.1", "1.0", "1.1", "1.2"):
        assert f">{row}</a>" in page and f"head {row}</b>" in page
    assert "previous-token" in parsed.text and "verb > <s>object</s>" in parsed.text
    monkeypatch.setattr(pages, "_overview", lambda *_: "")  # is drawn above
    alone = Parsed(pages.heads_page(watched([2, 3]), chosen=[(1, 0)]))
    assert len(alone.all("img")) == 1 and len(alone.all("tr")) == 2


def test_a_pictures_dots_are_the_weights() -> None:
    import io

    import numpy
    from PIL import Image

    weights = torch.tensor([[0.0, 1.0, 0.04], [0.25, 0.0, 0.5]])
    cells = numpy.ma.masked_where(weights.numpy() == 0, weights.numpy())
    with Image.open(io.BytesIO(pages._png(cells))) as image:
        seen = numpy.array(image.convert("RGBA"))
    assert seen.shape == (2, 3, 4)
    assert (seen[..., 3] == 0).tolist() == [[True, False, False], [False, True, False]]
    light = seen[..., :3].astype(int).sum(-1)
    assert light[0, 1] < light[1, 2] < light[1, 0] < light[0, 2]


def test_a_model_without_a_role_says_so_in_one_line() -> None:
    none = Roles({}, {}, [0])
    assert "None of 0 relations between words" in pages.heads_page(watched([2]), roles=none, pictures=False)


def test_a_page_needs_maps_or_pictures() -> None:
    with pytest.raises(ArgumentError, match=r"was called with \[1, 2, 10, 10\] and kept neither"):
        pages.heads_page(watched([2], keep=False, pooled=None))


@pytest.mark.slow
def test_a_page_of_144_heads_on_186_tokens_is_small(tmp_path: Path) -> None:
    heads = Heads()
    torch.manual_seed(0)
    for number in range(12):
        weights = (torch.randn(1, 12, 186, 186) * 2).softmax(-1)  # noise: nothing is harder to pack
        record = reduce(
            AttentionMap.from_weights(weights), names=("entropy",), pooled=128, keep=True, forward=1
        )
        heads.add(f"layers.{number}.attention", record)
    place = heads.to_html(tmp_path / "heads.html", text="word " * 186)
    assert place.stat().st_size < 3 * 2**20


# Notebooks


def test_a_notebook_shows_the_page_in_a_frame_that_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_overview", lambda *_: "")
    shown = watched([2])._repr_html_()
    assert shown is not None
    ((tag, frame),) = [each for each in Parsed(shown).tags if each[0] == "iframe"]
    assert frame["sandbox"] == ""
    assert Parsed(frame["srcdoc"] or "").all("img")
    assert shown.count("<") == 2  # the frame's own: the page is inside its attribute


def test_of_many_heads_or_without_maps_a_notebook_shows_the_table() -> None:
    many, bare = watched([7] * 7), watched([2], keep=False, pooled=None)
    for heads, rows in ((many, 49), (bare, 2)):
        shown = heads._repr_html_()
        assert shown is not None
        inside = Parsed(html.unescape(shown.split('srcdoc="')[1].removesuffix('"></iframe>')))
        assert not inside.all("img") and len(inside.all("tr")) == rows + 1 and len(inside.all("a")) == 2
    assert Heads()._repr_html_() is None


# In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if found() is None:
        pytest.skip("no Chromium here: install chromium, or set HEADWISE_BROWSER")
    with Browser() as running:
        yield running


def quiet(page: Any) -> bool:
    assert page.complaints == []
    return all(url.startswith(("file://", "data:")) for url in page.requested)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(1366, 900), (390, 800)], ids=["laptop", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_fits_any_screen_and_can_be_read_on_it(
    size: tuple[int, int], dark: bool, browser: Browser, page: str, tmp_path: Path
) -> None:
    place = save_page(page, tmp_path / "heads.html", pages.EXAMPLE)
    shown = browser.open(place, dark=dark, size=size)
    assert quiet(shown)
    assert shown.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert shown.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    assert shown.evaluate("[...document.images].every(image => image.width > 100)")
    assert shown.evaluate("document.querySelectorAll('script, b b').length") == 0
    told = shown.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    ink, surface = (sum(map(int, re.findall(r"\d+", each)[:3])) for each in told)
    assert abs(ink - surface) > 500 and (ink > surface) == dark
    shown.click("#table tbody tr:last-child a")
    assert shown.evaluate("document.querySelector('figure:target figcaption b').textContent") == "head 1.2"


@pytest.mark.slow
def test_a_notebooks_frame_is_quiet(browser: Browser, tmp_path: Path) -> None:
    notebook = tmp_path / "notebook.html"
    shown = watched([2])._repr_html_()
    notebook.write_text(f"<!doctype html><meta charset=utf-8><title>n</title>{shown}", "utf-8")
    page = browser.open(notebook)
    assert quiet(page)
    assert browser.inside(page).evaluate("document.images.length") == 3


@pytest.mark.slow
def test_links_of_paths_that_differ_in_a_dot_lead_to_their_own_pictures() -> None:
    """Both were called head-layer-1-0, and both links went to the first."""
    heads = Heads()
    for path in ("layer.1", "layer_1"):
        weights = AttentionMap.from_weights(torch.eye(3)[None, None])
        heads.add(path, reduce(weights, names=["first"], keep=True), path)
    page = pages.heads_page(heads)
    places = re.findall(r'<figure id="([^"]+)"', page)
    assert len(set(places)) == 2
    assert re.findall(r'<a href="#(head-[^"]+)"', page) == places
