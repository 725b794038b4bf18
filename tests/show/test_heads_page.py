"""Heads as JSON and as a page: strict, whole, and nothing that users give is more than text."""

from __future__ import annotations

import base64
import html
import json
import re
import time
import zlib
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from browser import Browser
from headwise import AttentionMap, Heads, Mask
from headwise.errors import ArgumentError, ShapeError
from headwise.heads.layer import LABELS, MIXED
from headwise.heads.record import Marks, Record, reduce
from headwise.heads.roles import Role, Roles
from headwise.models import load
from headwise.models.specialised_heads import Specialisation
from headwise.show import heads_page as pages
from headwise.show.heads_page import page_data
from headwise.show.heads_tables import FORMAT, as_json
from headwise.show.offline_pages import levels
from headwise.show.tables import IN_WORDS
from packed_weights import unpacked, weights

ATTACKS = (
    "<script>alert(1)</script>",
    "</style><img src=x onerror=alert(2)>",
    "\" onload='alert(3)' x=\"",
    "-->{{DATA}}{{STYLE}}<!--",
    "</script><img src=x onerror=alert(4)>",
    "\u2028line",
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
        self.scripts: dict[str, str] = {}
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            name = self.tags[-1][1].get("id") or ""
            self.scripts[name] = self.scripts.get(name, "") + data
        self.text += "" if self.open and self.open[-1] in ("style", "script") else data

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
    for entry, head in zip(data["heads"], heads.all(), strict=True):
        assert entry["label"] == head.label.name and (entry["score"] is None) == (head.label.name == MIXED)
        for name, value in head.values.items():
            number = entry["numbers"][name]
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


@dataclass
class Opened:
    """A page as it reads itself."""

    data: dict[str, Any]
    blobs: str
    source: str = ""
    parsed: Parsed = field(init=False)

    def call(self, layer: int = 0, reading: int = 0, source: int = 0) -> dict[str, Any]:
        return self.data["sources"][source]["readings"][reading]["calls"][layer]

    def cells(self, layer: int, head: int, reading: int = 0, source: int = 0) -> Tensor:
        call = self.call(layer, reading, source)
        return weights(self.bytes(call["maps"][head]), call["rows"], call["columns"])

    def bytes(self, blob: Any) -> bytes:
        return unpacked(self.blobs, tuple(blob))

    def numbers(self, blob: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.frombuffer(bytearray(self.bytes(blob)), dtype=dtype)

    def tokens(self, layer: int = 0, reading: int = 0, source: int = 0) -> tuple[Any, Any]:
        call = self.call(layer, reading, source)
        numbers = (call["query_tokens"], call["key_tokens"])
        names = [None if number is None else self.data["texts"][number] for number in numbers]
        return names[0], names[1]


def of(heads: Heads, **options: Any) -> Opened:
    data, blobs = page_data(heads, **options)
    return Opened(json.loads(json.dumps(data, allow_nan=False)), blobs.text)


def read(page: str) -> Opened:
    parsed = Parsed(page)
    opened = Opened(json.loads(parsed.scripts["data"]), parsed.scripts["blobs"], page)
    opened.parsed = parsed
    return opened


def is_near(cells: Tensor, expected: Tensor) -> bool:
    """Within 1% or 1e-4; hidden where there is nothing."""
    shown = cells.nan_to_num(0).double()
    apart = (shown - expected.double()).abs()
    near = (apart <= 1.0001e-4) | (apart <= 0.01 * expected.double())
    return bool(near.all()) and bool((cells.isnan() == (expected == 0)).all())


def record(weights: Tensor, *, mask: Mask | None = None, **options: Any) -> Record:
    settings = {"names": ("entropy", "first", "previous"), "keep": True, "forward": 1} | options
    return reduce(AttentionMap.from_weights(weights, mask), **settings)


@pytest.fixture(scope="module")
def page() -> str:
    return pages.heads_page(watched([2, 3]), text=" ".join(ATTACKS), roles=roles())


def test_nothing_that_users_give_is_more_than_text(page: str) -> None:
    opened = read(page)
    assert [tag for tag, _ in opened.parsed.tags if tag in ("script", "style", "img", "iframe", "b")] == [
        "style", "script", "script", "script"
    ]  # fmt: skip
    assert not [name for _, each in opened.parsed.tags for name in each if name.startswith("on")]
    inside = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert inside is not None and not set("<>&\u2028\u2029") & set(inside[1])
    assert opened.parsed.open == [] and "\ud800" not in page and "\u202e" not in page
    page.encode("utf-8")
    names, _ = opened.tokens()
    assert names[:3] == WORDS[:3] and names[4] == ATTACKS[3] and names[8] == "\N{REPLACEMENT CHARACTER}half"
    assert opened.data["sources"][0]["title"] == "Toy <b>bold</b>"
    assert "<title>Toy &lt;b&gt;bold&lt;/b&gt;" in page
    assert ATTACKS[0] in opened.data["sources"][0]["readings"][0]["text"]


def test_the_page_may_load_nothing_and_run_its_own_script_alone(page: str) -> None:
    parsed = read(page).parsed
    (policy,) = [each["content"] for each in parsed.all("meta") if "http-equiv" in each]
    assert policy is not None
    allowed = [re.sub("sha256-[^']+", "sha256", each) for each in policy.split("; ")]
    assert allowed == [
        "default-src 'none'", "style-src 'sha256'", "script-src 'sha256' 'wasm-unsafe-eval'",
        "img-src data: blob:", "base-uri 'none'", "form-action 'none'",
    ]  # fmt: skip
    kinds = [each.get("type") for each in parsed.all("script")]
    assert kinds == ["application/json", "text/plain", None]
    assert all((each["href"] or "").startswith("#") for each in parsed.all("a"))


def test_every_head_is_told_of_with_its_map_label_and_numbers() -> None:
    heads = watched([2, 3])
    opened = of(heads, roles=roles())
    entries = opened.data["sources"][0]["readings"][0]["heads"]
    assert [(each["layer"], each["head"]) for each in entries] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    assert [each["label"] for each in entries] == [head.label.name for head in heads.all()]
    assert entries[0]["numbers"]["previous"] == pytest.approx(heads[0, 0].values["previous"], rel=1e-4)
    for layer, count in enumerate((2, 3)):
        map = heads[layer].map.dense()[0]
        assert all(is_near(opened.cells(layer, head), map[head]) for head in range(count))
        call = opened.call(layer)
        assert (call["queries"], call["keys"], call["rows"], call["columns"]) == (len(WORDS),) * 4
        assert call["left_out"] == 0 and call["steps"] is None and call["norms"] is None
        expected = hw.diversity(heads[layer]).attention[layer]
        torch.testing.assert_close(torch.tensor(call["distances"]), expected.float(), atol=1e-4, rtol=0)
    (role,) = opened.data["sources"][0]["roles"]["0.1"]
    assert role["share"] == 0.9 and (role["low"], role["high"]) == (0.8, 0.95)
    assert role["sentence"] == "attends from a verb to its <s>object</s>"
    assert (role["rule_share"], role["offset"], role["offset_share"]) == (0.5, "the next word", 0.2)
    assert of(heads).data["sources"][0]["roles"] is None


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("object > verb", "attends from an object to its verb"),
        ("possessed > possessor", "attends from a possessed noun to its possessor"),
        ("reflexive > antecedent", "attends from a reflexive pronoun to its antecedent"),
        ("verb > far subject", "attends from a verb to its subject when other words are between them"),
        ("preposition's noun > preposition", "attends from a noun to its preposition"),
        ("copies", "attends to the copies"),
    ],
)
def test_a_role_is_shown_as_a_sentence(name: str, sentence: str) -> None:
    assert pages._sentence(name) == sentence


def test_labels_and_numbers_come_with_a_sentence_each() -> None:
    data = of(watched([2])).data
    assert [each["name"] for each in data["labels"]] == [*(entry.name for entry in LABELS), MIXED]
    assert all(re.fullmatch("#[0-9a-f]{6}", each["colour"]) for each in data["labels"])
    names = [each["name"] for each in data["statistics"]]
    assert set(names) == set(data["sources"][0]["readings"][0]["heads"][0]["numbers"])
    assert all(each["sentence"].endswith(".") and each["title"] for each in data["statistics"])
    assert not {each["name"]: each["share"] for each in data["statistics"]}["entropy"]
    measurable = {*hw.engines.statistics.ROW_STATISTICS, *hw.heads.record.PATTERNS, *hw.heads.record.WRITTEN}
    assert measurable <= IN_WORDS.keys()


def test_chosen_heads_alone_have_maps() -> None:
    opened = of(watched([2, 3]), chosen=[(1, 2)])
    reading = opened.data["sources"][0]["readings"][0]
    assert [(each["layer"], each["head"]) for each in reading["heads"]] == [(1, 2)]
    assert reading["calls"][0] is None and [each is None for each in opened.call(1)["maps"]] == [
        True,
        True,
        False,
    ]
    assert opened.data["heading"].endswith("what its head attends to")
    with pytest.raises(ArgumentError, match="got head 7 of 3"):
        of(watched([2, 3]), chosen=[(1, 7)])


def test_every_sequence_is_a_reading_without_its_padding() -> None:
    torch.manual_seed(0)
    weights = torch.rand(2, 3, 7, 7)
    real = torch.ones(2, 7, dtype=torch.bool)
    real[0, :2] = False  # padded on the left
    real[1, 5:] = False  # and on the right
    visible = weights * real[:, None, None, :]
    visible = visible / visible.sum(-1, keepdim=True)
    mask = Mask.padding(real) & Mask(queries=real)
    heads = Heads()
    heads.add("a", record(visible, mask=mask, marks=Marks(torch.arange(14).view(2, 7))))
    heads.tokens = [[f"{row}{at}" for at in range(7)] for row in "xy"]
    opened = of(heads, text=["first", "second"])
    readings = opened.data["sources"][0]["readings"]
    assert [(each["name"], each["text"]) for each in readings] == [("text 1", "first"), ("text 2", "second")]
    for number, own in enumerate((slice(2, 7), slice(0, 5))):
        call = opened.call(reading=number)
        assert (call["queries"], call["keys"], call["left_out"]) == (5, 5, 2)
        assert opened.tokens(reading=number)[0] == heads.tokens[number][own]
        assert all(
            is_near(opened.cells(0, head, number), visible[number, head, own, own]) for head in range(3)
        )
        entropy = readings[number]["heads"][1]["numbers"]["entropy"]
        assert entropy == pytest.approx(float(heads["a"].calls[0].rows["entropy"][number, 1]), rel=1e-4)
    alone = of(heads, batch=-1, text="second")
    assert alone.call() == opened.call(reading=1) | {
        "maps": alone.call()["maps"],
        "query_tokens": 0,
        "key_tokens": 0,
    }
    assert torch.equal(alone.cells(0, 2).nan_to_num(), opened.cells(0, 2, 1).nan_to_num())
    with pytest.raises(IndexError, match="batch must be between 0 and 1: got 2; choose one of those"):
        of(heads, batch=2)
    with pytest.raises(
        ArgumentError, match="text must have one entry per sequence: got 1 text for 2 sequences"
    ):
        of(heads, text="first")
    with pytest.raises(
        ArgumentError, match="text must have one entry per sequence: got 3 texts for 2 sequences;"
    ):
        of(heads, text=["a", "b", "c"])
    with pytest.raises(ArgumentError, match=r"query_tokens must name the tokens of one sequence: .* had 2"):
        of(heads, query_tokens=list("abcdefg"))


@pytest.mark.parametrize("real", [slice(2, 7), slice(0, 5)], ids=["left", "right"])
def test_numbers_of_a_padded_sequence_are_those_of_the_sequence_alone(real: slice) -> None:
    """The first word has no word before it, the last none after it, whatever padding stands there."""
    torch.manual_seed(0)
    alone = torch.rand(1, 3, 5, 5).softmax(-1)
    padded = torch.zeros(2, 3, 7, 7)
    padded[:, :, real, real] = alone
    real_tokens = torch.zeros(2, 7, dtype=torch.bool)
    real_tokens[:, real] = True
    names = {"names": ("entropy", "previous", "itself", "next")}
    both = []
    for dense, mask in ((alone, None), (padded, Mask.padding(real_tokens) & Mask(queries=real_tokens))):
        heads = Heads()
        heads.add("a", record(dense, mask=mask, **names))
        both.append(of(heads).data["sources"][0]["readings"][-1]["heads"])
    for mine, theirs in zip(*both, strict=True):
        assert mine["label"] == theirs["label"]
        assert theirs["numbers"] == {
            name: value if value is None else pytest.approx(value, rel=1e-4)
            for name, value in mine["numbers"].items()
        }


def test_a_sequence_with_several_rows_in_some_layers_is_one_reading() -> None:
    """As a search of 3 beams has them: an encoder reads 2 texts, its decoder 6."""
    torch.manual_seed(0)
    texts, beams = torch.rand(2, 3, 5, 5).softmax(-1), torch.rand(6, 3, 7, 5).softmax(-1)
    heads = Heads()
    heads.add("encoder", record(texts))
    heads.add("decoder", record(beams, kind="cross"))
    messages = torch.randn(6, 3, 7, 2)
    opened = of(heads, outputs=hw.listeners.head_outputs.HeadOutputs({"decoder": messages}))
    for number in range(2):
        assert is_near(opened.cells(0, 1, number), texts[number, 1])
        assert is_near(opened.cells(1, 2, number), beams[3 * number, 2])
        outputs = opened.numbers(opened.call(1, number)["outputs"]["data"], torch.float16)
        assert torch.equal(outputs, messages[3 * number].half().flatten())


def test_cross_attention_has_names_of_its_own() -> None:
    heads = Heads()
    heads.add("decoder.0.cross", record(torch.full((1, 2, 3, 5), 0.2), kind="cross"), "cross")
    heads.add("decoder.0.self", record(previous(3).expand(1, 2, 3, 3)), "self")
    opened = of(heads, query_tokens=list("abc"), key_tokens=list("vwxyz"))
    assert opened.tokens(0) == (list("abc"), list("vwxyz")) and opened.tokens(1) == (list("abc"),) * 2
    assert [layer["kind"] for layer in opened.data["sources"][0]["layers"]] == ["cross", "self"]
    assert opened.call(0)["rows"] == 3 and opened.call(0)["columns"] == 5
    with pytest.raises(ShapeError, match="query_tokens must match a layer: 2 tokens"):
        of(heads, query_tokens=list("ab"))


def steps(prompt: int, count: int) -> tuple[Heads, Tensor]:
    """A prompt and steps of one query each; and what they are together."""
    torch.manual_seed(0)
    length = prompt + count
    whole = torch.rand(1, 2, length, length).tril()
    whole = whole / whole.sum(-1, keepdim=True)
    heads = Heads()
    marks = Marks(torch.arange(prompt)[None])
    heads.add("a", record(whole[:, :, :prompt, :prompt], marks=marks))
    for step in range(count):
        at = prompt + step
        heads.add("a", record(whole[:, :, at : at + 1, : at + 1], forward=2 + step))
    heads.tokens = [[f"w{at}" for at in range(prompt)]]
    return heads, whole


def test_steps_of_generation_are_one_map() -> None:
    heads, whole = steps(5, 3)
    opened = of(heads)
    assert opened.call()["steps"] == [5, 6, 7, 8] and opened.call()["queries"] == opened.call()["keys"] == 8
    assert all(is_near(opened.cells(0, head), whole[0, head]) for head in range(2))
    assert opened.tokens()[0] == ["w0", "w1", "w2", "w3", "w4", "+1", "+2", "+3"]
    numbers = opened.data["sources"][0]["readings"][0]["heads"][0]["numbers"]
    assert numbers["entropy"] == pytest.approx(float(heads["a"].statistics.entropy[0]), rel=1e-4)
    heads.tokens = [[f"all{at}" for at in range(8)]]  # as whoever generated may set them
    assert of(heads).tokens()[0] == heads.tokens[0]
    with pytest.raises(ShapeError, match="in 4 steps"):
        of(heads, outputs=hw.listeners.head_outputs.HeadOutputs({"a": torch.zeros(1, 2, 1, 3)}))


def test_a_call_that_does_not_go_on_is_shown_alone() -> None:
    heads, _ = steps(5, 0)
    heads.add("a", record(previous(3).expand(1, 2, 3, 3), forward=2))
    opened = of(heads)
    assert opened.call()["steps"] is None and opened.call()["queries"] == 3
    assert is_near(opened.cells(0, 1), previous(3))


def test_a_weight_too_small_for_a_number_is_not_hidden() -> None:
    """What a key receives is the mean over queries that see it: those that give it nothing are among them."""
    torch.manual_seed(0)
    q, k = 90 * torch.randn(1, 3, 7, 5), torch.randn(1, 3, 7, 5)
    added = torch.zeros(7, 7).index_fill(1, torch.tensor([2]), torch.finfo(torch.float32).min)
    for rules, hidden in (
        ({}, torch.zeros(7, 7)),
        ({"causal": True}, torch.ones(7, 7).triu(1)),
        ({"bias": added}, added),
        ({"mask": Mask.window(left_right=(2, 1))}, torch.ones(7, 7).triu(2) + torch.ones(7, 7).tril(-3)),
    ):
        map = AttentionMap(q, k, **rules)
        heads = Heads()
        heads.add("a", reduce(map, names=("entropy",), keep=True, forward=1))
        assert bool((map.dense()[0, 1][hidden == 0] == 0).any())
        cells = of(heads).cells(0, 1)
        assert torch.equal(cells.isnan(), hidden != 0)
        assert is_near(cells.masked_fill(cells == 0, torch.nan), map.dense()[0, 1].where(cells != 0, 0))


def test_steps_whose_sequences_changed_places_are_not_one_map() -> None:
    """As in a search of several beams: what stands in the cache was read in another row of the batch."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 7, 5), torch.randn(2, 3, 7, 5)
    for order, queries in (([0, 1], 7), ([1, 0], 1)):
        heads = Heads()
        prompt = AttentionMap(q[:, :, :6], k[:, :, :6], causal=True)
        heads.add("a", reduce(prompt, names=("entropy",), keep=True, forward=1))
        last = AttentionMap(q[:, :, 6:], k[order], causal=True)
        heads.add("a", reduce(last, names=("entropy",), keep=True, forward=2))
        opened = of(heads)
        assert (opened.call()["queries"], opened.call()["keys"]) == (queries, 7)
        assert is_near(opened.cells(0, 2)[-1:], last.dense()[0, 2])


def test_long_maps_are_pooled_and_some_heads_can_be_looked_into() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 3, 521, 7).unbind(0)
    map = AttentionMap(q * 2, k, causal=True)
    heads = Heads()
    heads.add("layers.0", reduce(map, names=("entropy", "first"), keep=True, pooled=128, forward=1))
    heads.add("layers.1", reduce(map, names=("entropy", "first"), keep=False, pooled=64, forward=1))
    opened = of(heads)
    p = map.dense()[0]
    for layer, side in ((0, 128), (1, 64)):
        row = torch.arange(521) * side // 521
        mass = torch.zeros(3, side, side).index_put(
            (torch.arange(3)[:, None, None], row[:, None], row), p, True
        )
        shares = mass / torch.bincount(row)[:, None]
        call = opened.call(layer)
        assert (call["rows"], call["columns"], call["queries"]) == (side, side, 521)
        assert all(is_near(opened.cells(layer, head), shares[head]) for head in range(3))
    finer = opened.call(0)["finer"]
    assert list(finer) == ["0"] and opened.call(1)["finer"] == {}  # all of one label
    assert finer["0"]["rows"] == finer["0"]["columns"] == 512
    pairs = opened.call(0)["pairs"]["0"]
    assert len(pairs) == 64
    torch.testing.assert_close(
        torch.tensor([weight for _, _, weight in pairs]), p[0].flatten().topk(64).values, rtol=1e-4, atol=0
    )
    assert all(float(p[0, query, key]) == pytest.approx(weight, rel=1e-4) for query, key, weight in pairs)
    assert list(of(heads, finer=[(0, 2), (0, 1)]).call(0)["finer"]) == ["1", "2"]
    assert of(heads, finer=[]).call(0)["finer"] == {}
    with pytest.raises(
        ArgumentError, match=r"finer must name heads with kept maps: layers\.1 was called with"
    ):
        of(heads, finer=[(1, 0)])
    with pytest.raises(ArgumentError, match=r"finer must name heads that layers\.0 has: got head 9 of 3"):
        of(heads, finer=[(0, 9)])


def test_a_long_map_with_padding_is_pooled_over_what_is_real() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 307, 7).unbind(0)
    real = torch.ones(1, 307, dtype=torch.bool)
    real[:, :37] = False
    map = AttentionMap(q, k, mask=Mask.padding(real) & Mask(queries=real))
    heads = Heads()
    norms = torch.rand(1, 2, 307)
    heads.add("a", reduce(map, names=("first",), keep=True, forward=1))
    heads["a"].calls[0].large["written_norms"] = norms
    opened = of(heads)
    assert opened.call()["queries"] == 270 and opened.call()["left_out"] == 37
    p = map.dense()[0][:, 37:, 37:]
    row = torch.arange(270) * 128 // 270
    most = float(norms[0, :, 37:].max())
    written = opened.call()["written"]
    for factor, cells in (
        (torch.ones(2, 270), [opened.cells(0, head) for head in range(2)]),
        (norms[0, :, 37:] / most, [weights(opened.bytes(blob), 128, 128) for blob in written]),
    ):
        parts = p * factor[:, None]
        mass = torch.zeros(2, 128, 128).index_put(
            (torch.arange(2)[:, None, None], row[:, None], row), parts, True
        )
        assert all(is_near(cells[head], (mass / torch.bincount(row)[:, None])[head]) for head in range(2))
    assert opened.call()["written_most"] == pytest.approx(most, rel=1e-4)
    (pairs,) = opened.call()["pairs"].values()  # of one head: both have the same label
    assert len(pairs) == 64


def test_where_all_maps_have_too_many_cells_they_have_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = Heads()
    heads.add("a", record(previous(131).expand(1, 3, 131, 131)))
    assert of(heads).call()["rows"] == 131
    monkeypatch.setattr(pages, "MOST_CELLS", 3 * 128 * 128)
    assert of(heads).call()["rows"] == 128
    monkeypatch.setattr(pages, "MOST_CELLS", 3 * 128 * 128 - 1)
    assert of(heads).call()["rows"] == 64
    monkeypatch.setattr(pages, "MOST_CELLS", 1)
    assert of(heads).call()["rows"] == 32


def test_a_layer_without_map_or_picture_has_none_and_a_page_needs_one() -> None:
    with pytest.raises(ArgumentError, match=r"was called with \[1, 2, 12, 12\] and kept neither"):
        of(watched([2], keep=False, pooled=None))
    heads = watched([2])
    heads.add("layers.1.<i>attention", record(previous(5).expand(1, 2, 5, 5), keep=False))
    assert of(heads).call(1) is None and len(of(heads).data["sources"][0]["readings"][0]["heads"]) == 4


def test_what_heads_say_and_write_is_in_the_page() -> None:
    torch.manual_seed(0)
    model = hw.MultiHeadAttention(12, 3)
    x = torch.randn(2, 7, 12)
    with torch.no_grad(), hw.watch(model, written=True) as heads, hw.collect(model) as outputs:
        model(x)
    opened = of(heads, outputs=outputs)
    call = opened.call(reading=1)
    norms = opened.numbers(call["norms"]).view(3, 7)
    expected = heads[0].calls[0].written_norms
    assert expected is not None and torch.equal(norms, expected[1])
    assert call["written_most"] == pytest.approx(float(expected[1].max()), rel=1e-4)
    stored = opened.numbers(call["outputs"]["data"], torch.float16).view(3, 7, 4)
    assert call["outputs"]["width"] == 4 and torch.equal(stored, outputs[0][1].half())
    cosines = hw.heads.head_distances.similarity(outputs[0])[1]
    torch.testing.assert_close(torch.tensor(call["cosines"]), cosines, atol=1e-4, rtol=0)
    with torch.no_grad(), hw.collect(model) as short:
        model(x[:, :3])
    with pytest.raises(ShapeError, match=r"\[1, 3, 3, 4\] in .* 3 heads read 7 queries"):
        of(heads, outputs=short)
    with torch.no_grad(), hw.collect(model) as collected:
        model(x[:1])
    with pytest.raises(ShapeError, match=r"got 1 sequences in .* to show sequence 1"):
        of(heads, outputs=collected)


def on_text(words: str, seed: int) -> Heads:
    torch.manual_seed(seed)
    names = words.split()
    length = len(names)
    ids = torch.tensor([[sum(map(ord, name)) for name in names]])
    heads = Heads()
    weights = (torch.randn(1, 2, length, length) * 2).softmax(-1)
    heads.add("a", record(weights, marks=Marks(ids)))
    heads.tokens, heads.title = [names], "toy"
    return heads


def test_two_texts_beside_each_other_can_be_flipped() -> None:
    before, after = on_text("the nurse said he left", 0), on_text("the nurse said she left", 1)
    opened = of(before, beside=after, text=["one", "two"])
    (flip,) = opened.data["flips"]
    assert (flip["before"], flip["after"], flip["words"]) == ([0, 0], [1, 0], ["he", "she"])
    line = flip["layers"][0]["queries"]
    assert [(each["before"], each["after"]) for each in line] == [(at, at) for at in range(5)]
    assert [each["name"] for each in line if each["changed"]] == ["he/she"]
    changes = before.changes(after)
    assert [(each["layer"], each["head"]) for each in flip["heads"]] == [(0, each.head) for each in changes]
    assert flip["heads"][0]["distance"] == pytest.approx(changes.all[0].distance, rel=1e-4)
    assert flip["heads"][0]["places"] == list(changes.all[0].places or ())
    assert [each["readings"][0]["text"] for each in opened.data["sources"]] == ["one", "two"]
    assert of(before, beside=[before]).data["flips"] == []  # nothing differs
    assert of(before, beside=on_text("completely other words", 2)).data["flips"] == []
    assert len(of(before, beside=watched([2]), text="one").data["sources"]) == 2  # another model
    with pytest.raises(ArgumentError, match="beside must be Heads, or a list of them: got str"):
        of(before, beside=["heads"])
    with pytest.raises(ArgumentError, match=r"got 3 texts for 1 sequences \(2 including those of beside=\)"):
        of(before, beside=after, text=["a", "b", "c"])


def test_a_page_opens_on_the_head_with_the_strongest_label() -> None:
    """It opened on the first head, most often one that is "mixed"."""
    itself, even = torch.eye(5), torch.ones(5, 5) / 5
    mostly = 0.7 * previous(5) + 0.3 * even
    heads = Heads()
    first = torch.stack([even, mostly])[None]  # broad: a general label, of score 1
    second = torch.stack([0.6 * itself + 0.4 * even, 0.95 * itself + 0.05 * even])[None]
    for path, dense in (("a", first), ("b", second)):
        heads.add(path, record(dense, names=("entropy", "previous", "itself")))
    assert of(heads).data["start"] == {"layer": 1, "head": 1, "comparison": False}
    assert of(heads, chosen=[("a", 0), ("a", 1)]).data["start"]["head"] == 1
    assert of(heads, chosen=[("b", 0)]).data["start"] == {"layer": 1, "head": 0, "comparison": False}


@pytest.mark.parametrize(("reach", "words"), [(8, "at most 8 positions"), (3, "at most 3 positions")])
def test_the_definition_of_local_names_the_distance_that_was_measured(reach: int, words: str) -> None:
    heads = Heads()
    heads.add("a", record(previous(5)[None, None], names=("local",), reach=reach))
    (local,) = [each for each in of(heads).data["statistics"] if each["name"] == "local"]
    assert words in local["sentence"]


def test_a_page_of_two_texts_opens_on_their_comparison() -> None:
    before, after = on_text("the nurse said he left", 0), on_text("the nurse said she left", 1)
    most = before.changes(after).all[0]
    assert of(before, beside=after).data["start"] == {"layer": 0, "head": most.head, "comparison": True}
    third = on_text("the nurse said they left", 2)
    for beside in ([before], [after, third], on_text("completely other words", 2)):  # not two to compare
        assert not of(before, beside=beside).data["start"]["comparison"]


def test_training_is_told_with_four_digits() -> None:
    numbers = torch.tensor([[[0.123456, float("nan")]], [[0.5, 1.0]]])
    training = Specialisation(
        steps=torch.tensor([0, 100]), tokens=torch.tensor([0, 800]), losses=torch.tensor([float("nan"), 1.0]),
        validation=torch.tensor([3.25, 1.123456]), statistics={"first": numbers},
        labels=(((None, "sink"),), (("self", None),)), roles={"verb > object": numbers},
        found={"verb > object": (False, True)},
    )  # fmt: skip
    data = of(watched([2]), training=training).data["training"]
    assert data["statistics"]["first"] == [[[0.1235, None]], [[0.5, 1.0]]] and data["steps"] == [0, 100]
    assert data["labels"] == [[[None, "sink"]], [["self", None]]] and data["validation"] == [3.25, 1.123]
    assert "verb > object" in data["statistics"] and data["title"] == "mini"
    with pytest.raises(
        ArgumentError, match=r"training must .* 1 layers of 2 heads, the watched model 2 layers of 3;"
    ):
        of(watched([3, 3]), training=training)


def test_a_model_that_runs_is_the_one_that_was_watched() -> None:
    with pytest.raises(
        ArgumentError, match=r"alive must .* 8 layers of 7 heads, the watched model 2 layers of 3, 5"
    ):
        of(watched([3, 5]), alive=load("mini"))


def test_effects_are_told_as_they_tell_themselves() -> None:
    class FakeEffects:
        def to_page(self, heads: Heads, batch: int | None) -> dict[str, Any]:
            rows = [{"layer": 0, "head": head, "effect": 0.5} for head in range(2)]
            return {"of": f"{len(heads)} {batch}", "heads": rows}

    data = FakeEffects().to_page(watched([2]), None)
    assert of(watched([2]), effects=FakeEffects()).data["effects"] == data
    assert data["of"] == "1 None"
    chosen = of(watched([2]), effects=FakeEffects(), chosen=[(0, 1)]).data["effects"]
    assert chosen["heads"] == data["heads"][1:]  # a head that is not in the page cannot be looked at


# An image


def square(tokens: int) -> Heads:
    heads = Heads()
    heads.add("a", record(torch.full((1, 2, tokens, tokens), 1 / tokens)))
    return heads


def test_an_image_comes_with_its_patches() -> None:
    pixels = torch.arange(7 * 5 * 3, dtype=torch.uint8).view(7, 5, 3)
    data = of(square(10), image=pixels).data["sources"][0]["readings"][0]["image"]
    assert (data["rows"], data["columns"], data["first"]) == (3, 3, 1)
    png = base64.b64decode(data["src"].removeprefix("data:image/png;base64,"))
    assert png.startswith(b"\x89PNG") and int.from_bytes(png[16:20], "big") == 5
    start = png.index(b"IDAT")
    size = int.from_bytes(png[start - 4 : start], "big")
    lines = zlib.decompress(png[start + 4 : start + 4 + size])
    assert [lines[at : at + 16] for at in range(0, 112, 16)] == [
        b"\0" + bytes(row) for row in pixels.flatten(1).tolist()
    ]
    grey = of(square(9), image=torch.rand(4, 4)).data["sources"][0]["readings"][0]["image"]
    assert (grey["rows"], grey["first"]) == (3, 0)
    wide = of(square(13), image=torch.rand(4, 4).numpy(), patches=(2, 4))
    assert wide.data["sources"][0]["readings"][0]["image"]["first"] == 5
    assert of(square(9)).data["sources"][0]["readings"][0]["image"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patches": (3, 3)}, r"patches must be given with image: got patches=\(3, 3\)"),
        ({"image": torch.rand(4, 4), "patches": (4, 4)}, "4 x 4 = 16 for 11"),
        ({"image": torch.rand(4, 4), "patches": (1, 2)}, "1 x 2 = 2 for 11"),
        (
            {"image": torch.rand(4, 4), "patches": (0, 2)},
            r"patches must be \(rows, columns\), .*: got \(0, 2\)",
        ),
        ({"image": torch.rand(4, 4)}, "no square: got 11 tokens"),
        ({"image": torch.rand(3, 4, 4)}, r"got \[3, 4, 4\]"),
        ({"image": torch.rand(4, 4) * 2 + 1}, "from 0 to 1 if it has floats: got 1"),
        ({"image": torch.ones(4, 4, dtype=torch.int64)}, "got torch.int64"),
    ],
)
def test_an_image_that_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ArgumentError, ShapeError), match=message):
        of(square(11), **options)


def test_an_image_is_of_one_sequence() -> None:
    heads = Heads()
    heads.add("a", record(torch.full((2, 1, 4, 4), 0.25)))
    with pytest.raises(ArgumentError, match="image must be for one sequence: the last forward had 2"):
        of(heads, image=torch.rand(4, 4))
    assert of(heads, image=torch.rand(4, 4), batch=1).data["sources"][0]["readings"][0]["image"]["rows"] == 2


# Sizes


def report(title: str, began: float, size: int) -> None:
    print(f"{title}: {size / 1e6:.2f} MB in {time.perf_counter() - began:.1f} s")  # noqa: T201 - with pytest -s


@pytest.mark.slow
def test_a_page_of_144_heads_on_256_tokens_is_at_most_9_mb(tmp_path: Path) -> None:
    torch.manual_seed(0)
    heads = Heads()
    sharp = torch.linspace(0.5, 6, 12)[:, None, None]  # from broad heads to sharp ones
    for number in range(12):
        q, k = torch.randn(2, 1, 12, 256, 16).unbind(0)
        map = AttentionMap(q * sharp, k)
        heads.add(f"layers.{number}.attention", reduce(map, names=("entropy",), keep=True, forward=1))
    began = time.perf_counter()
    size = heads.to_html(tmp_path / "heads.html", text="word " * 256).stat().st_size
    report("144 heads, 256 tokens", began, size)
    assert size <= 9e6
    assert of(heads).call()["rows"] == 256


@pytest.mark.slow
def test_a_page_of_1024_heads_on_131072_tokens_is_at_most_30_mb(tmp_path: Path) -> None:
    torch.manual_seed(0)
    L, S = 32, 131_072
    heads = Heads()
    at = torch.arange(128.0)
    for number in range(L):
        apart = (at[:, None] - at).clamp(min=0)
        reach = torch.logspace(-1, 2, 32)[:, None, None]
        scores = -apart / reach + torch.randn(32, 128, 128)
        scores[..., 0] += torch.linspace(-2, 8, 32)[:, None]
        shares = scores.masked_fill(at[:, None] < at, -torch.inf).softmax(-1)
        call = Record((1, 32, S, S), forward=1, rows={"entropy": torch.rand(1, 32)})
        call.counts = {"entropy": torch.full((1, 32), S)}
        call.large["pooled"] = (shares * (S // 128))[None]
        heads.add(f"layers.{number}.attention", call)
    began = time.perf_counter()
    data, blobs = page_data(heads)
    cells = (torch.randn(8, 512, 512) * 1.5).softmax(-1)
    for head in range(8):  # as maps that were kept would add
        place = {"rows": 512, "columns": 512, "map": blobs.pack(levels(cells[head]))}
        data["sources"][0]["readings"][0]["calls"][0]["finer"][str(head)] = place
    place = tmp_path / "heads.html"
    place.write_text(pages.page_of(data, blobs), "utf-8")
    report("1,024 heads, 131,072 tokens", began, place.stat().st_size)
    assert data["sources"][0]["readings"][0]["calls"][0]["rows"] == 128
    assert place.stat().st_size <= 30e6


# Notebooks


def test_a_notebook_shows_the_page_in_a_frame_that_is_kept_apart() -> None:
    shown = watched([2])._repr_html_()
    assert shown is not None
    ((tag, frame),) = [each for each in Parsed(shown).tags if each[0] == "iframe"]
    assert frame["sandbox"] == "allow-scripts allow-downloads"
    assert read(frame["srcdoc"] or "").call()["queries"] == len(WORDS)
    assert shown.count("<") == 2  # the frame's own: the page is inside its attribute


def test_a_page_too_large_for_a_notebook_has_coarser_maps_or_is_a_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads = Heads()
    torch.manual_seed(0)
    heads.add("a", record(torch.randn(1, 3, 97, 97).softmax(-1)))
    letters = len(pages.heads_page(heads)) - 1
    monkeypatch.setattr(pages, "NOTEBOOK", letters)
    frame = Parsed(heads._repr_html_() or "").all("iframe")[0]
    assert read(frame["srcdoc"] or "").call()["rows"] == 64
    monkeypatch.setattr(pages, "NOTEBOOK", 1000)
    bare = watched([2], keep=False, pooled=None)
    for some, rows in ((heads, 3), (bare, 2)):
        frame = Parsed(some._repr_html_() or "").all("iframe")[0]
        inside = Parsed(frame["srcdoc"] or "")
        assert frame["sandbox"] == "" and not inside.all("script") and len(inside.all("tr")) == rows + 1
    assert Heads()._repr_html_() is None


def test_the_table_is_text_and_can_be_read_aloud() -> None:
    parsed = Parsed(pages.table_page(watched([2, 3])))
    assert parsed.open == [] and "Toy <b>bold</b>: 5 heads" in parsed.text and "previous-token" in parsed.text
    assert not parsed.all("script") and parsed.all("html")[0]["lang"] == "en"
    assert all(each["scope"] in ("col", "row") for each in parsed.all("th"))


# In a browser


READY = "document.documentElement.dataset.ready === 'true'"  # once the first picture is drawn


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["attacks", "batch", "cross", "image", "steps", "long", "flip"])
def test_the_page_opens_from_disk_without_a_word(kind: str, browser: Browser, tmp_path: Path) -> None:
    options: dict[str, Any] = {}
    if kind == "attacks":
        heads, options = watched([2, 3]), {"text": " ".join(ATTACKS), "roles": roles()}
    elif kind == "batch":
        heads = Heads()
        heads.add("a", record(torch.full((2, 2, 5, 5), 0.2), mask=Mask.padding(torch.tensor([3, 5]))))
    elif kind == "cross":
        heads = Heads()
        heads.add("a", record(torch.full((1, 2, 3, 5), 0.2), kind="cross"))
    elif kind == "image":
        heads, options = square(10), {"image": torch.rand(9, 9)}
    elif kind == "steps":
        heads, _ = steps(5, 3)
    elif kind == "long":
        heads = Heads()
        map = AttentionMap(*torch.randn(2, 1, 2, 307, 7).unbind(0), causal=True)
        heads.add("a", reduce(map, names=("entropy",), keep=True, forward=1))
    else:
        heads, options = on_text("he left", 0), {"beside": on_text("she left", 1)}
    shown = browser.open(heads.to_html(tmp_path / "heads.html", **options))
    assert shown.wait(READY)
    assert shown.evaluate("document.querySelectorAll('img[src=x]').length") == 0
    assert "attend" in shown.text("#heading")


@pytest.mark.slow
def test_a_notebooks_frame_is_quiet(browser: Browser, tmp_path: Path) -> None:
    notebook = tmp_path / "notebook.html"
    shown = watched([2])._repr_html_()
    notebook.write_text(f"<!doctype html><meta charset=utf-8><title>n</title>{shown}", "utf-8")
    page = browser.open(notebook)
    inside = browser.inside(page)
    assert inside.wait(READY)
    assert html.unescape(inside.text("#heading")) == "Toy <b>bold</b>: what 2 heads attend to"
