"""What a live page is told of a model: the numbers of `watch`, of `ablate` and of the model itself."""

from __future__ import annotations

import gc
import json
import math
import random
import struct
import threading
import weakref
import zlib
from typing import Any

import pytest
import torch
from served_models import MODELS, TEXT, live, llama, vit
from torch import Tensor, nn

import headwise as hw
from headwise.server.live_model import LiveModel
from headwise.server.protocol import (
    Changes,
    Distances,
    Maps,
    OfHead,
    Progress,
    Read,
    Refusal,
    Reply,
)
from headwise.show.offline_pages import EVEN, LEVELS, RATIO, STEP
from small_models import hooks_on, hugging_face
from trained import a_tokenizer, mini

NAMES = [
    pytest.param(name, marks=pytest.mark.slow) if name in ("minilm", "classifier") else name
    for name in MODELS
]
MASKED = "The cat [MASK] on the mat"


def text_for(name: str) -> str:
    return {"bert": MASKED, "vit": ""}.get(name, TEXT)


def reply_to(model: LiveModel, text: str, number: int = 1, **options: Any) -> dict[str, Any]:
    """The reply to a text, as JSON carries it."""
    reply = model.answer(Read("test", number, text=text, **options))
    return json.loads(json.dumps(reply.header, allow_nan=False))


def decoded(reply: Reply) -> Tensor:
    """The weights in a reply, as the page unpacks them; hidden ones are NaN."""
    packed = reply.packed
    assert packed is not None
    levels = zlib.decompress(packed)
    shape = reply.header["maps"][0] if "maps" in reply.header else reply.header
    rows, columns = shape["rows"], shape["columns"]
    values = [math.nan] + [n * STEP for n in range(EVEN + 1)]
    values += [min(1.0, EVEN * STEP * RATIO**n) for n in range(1, LEVELS)]
    more = rows * columns
    cells = []
    for level in levels[: rows * columns]:
        if level == 255:
            level, more = 255 + levels[more], more + 1
        cells.append(values[level])
    return torch.tensor(cells).view(rows, columns)


def close(cells: Tensor, weights: Tensor) -> bool:
    """Within 1% or 1e-4, as the page promises."""
    return bool(((cells.nan_to_num(0.0) - weights).abs() <= torch.clamp(0.0101 * weights, min=1.01e-4)).all())


def inputs_of(model: LiveModel, text: str) -> dict[str, Any]:
    return model.input.prepare(Read("test", 1, text=text)).inputs


def watched(model: LiveModel, text: str, off: list[tuple[str, int]] | None = None) -> tuple[hw.Heads, Any]:
    """The heads of a text, and the model's output, by the library's own functions."""
    watching = hw.watch(model.model, keep=True, patterns=True, tokenizer=model.input.tokenizer)
    with torch.no_grad():
        if off:
            with hw.ablate(model.model, off), watching as heads:
                output = model.model(**inputs_of(model, text))
        else:
            with watching as heads:
                output = model.model(**inputs_of(model, text))
    return heads, output


@pytest.mark.parametrize("name", NAMES)
def test_maps_and_numbers_of_ten_heads_are_those_of_watch(name: str) -> None:
    model, text = live(name), text_for(name)
    reply = reply_to(model, text)
    heads, _ = watched(model, text)
    places = [(layer, head) for layer in range(len(heads)) for head in range(heads[layer].num_heads)]
    numbers = {(row["layer"], row["head"]): row for row in reply["heads"]}
    assert sorted(numbers) == places
    for layer, head in random.Random(name).sample(places, 10):
        cells = decoded(model.answer(Maps(reply["reading"], ((layer, head),))))
        assert close(cells, heads[layer].map.dense()[0, head].float())
        expected = heads[layer][head]
        assert numbers[layer, head]["label"] == expected.label.name
        for statistic, value in numbers[layer, head]["numbers"].items():
            shown = math.nan if value is None else value
            assert shown == pytest.approx(expected.values[statistic], rel=0.01, abs=1e-4, nan_ok=True)


def test_maps_that_come_with_a_reading_are_those_of_a_request_of_their_own() -> None:
    model = live("llama")
    places = ((2, 3), (0, 0), (99, 0), (0, 99), (2, 0))  # layer 99 and head 99 do not exist
    reply = model.answer(Read("test", 1, text=TEXT, maps=places))
    existing = [(row["layer"], row["head"]) for row in reply.header["maps"]]
    assert existing == [(2, 3), (0, 0), (2, 0)]
    alone = [model.answer(Maps(reply.header["reading"], (place,))) for place in existing]
    assert reply.array == b"".join(each.array or b"" for each in alone)
    sizes = [each.header["maps"][0] for each in alone]
    expected = [
        size | {"layer": place[0], "head": place[1]} for place, size in zip(existing, sizes, strict=True)
    ]
    assert reply.header["maps"] == expected
    assert model.answer(Read("test", 2, text=TEXT)).array is None


def test_pooled_maps_do_not_come_with_a_reading() -> None:
    model = live("llama")
    reply = model.answer(Read("test", 1, text="a" * 300, maps=((0, 0),)))
    assert reply.header["calls"][0]["rows"] < reply.header["tokens"]
    assert reply.header["maps"] == [] and reply.array is None


@pytest.mark.parametrize("name", ["mini", "llama", "bert", pytest.param("minilm", marks=pytest.mark.slow)])
def test_written_weights_and_outputs_are_those_of_watch_and_collect(name: str) -> None:
    model, text = live(name), text_for(name)
    reply = reply_to(model, text)
    with (
        torch.no_grad(),
        hw.watch(model.model, keep=True, written=True) as heads,
        hw.collect(model.model) as outputs,
    ):
        model.model(**inputs_of(model, text))
    for layer in range(len(heads)):
        assert reply["calls"][layer]["has_written"] and reply["calls"][layer]["has_output"]
        norms = heads[layer].calls[-1].written_norms
        written = heads[layer].map.dense()[0].float() * norms[0, :, None] / norms.max()
        for head in (0, heads[layer].num_heads - 1):
            cells = decoded(model.answer(Maps(reply["reading"], ((layer, head),), "written")))
            assert close(cells, written[head])
            made = model.answer(OfHead("output", reply["reading"], layer, head))
            values = torch.frombuffer(bytearray(made.array or b""), dtype=torch.float16)
            expected = outputs[layer][0, head]
            assert torch.equal(values.view(expected.shape), expected.half())


@pytest.mark.parametrize("name", ["mini", "llama", "bert", "classifier", "vit"])
def test_predictions_are_the_models_own(name: str) -> None:
    model, text = live(name), text_for(name)
    reply = reply_to(model, text)
    with torch.no_grad():
        inputs = inputs_of(model, text)
        logits = model.model(**inputs)
    logits = getattr(logits, "logits", logits)[0]
    if model.predictor.kind == "masked token":
        logits = logits[inputs["input_ids"][0].tolist().index(model.input.tokenizer.mask_token_id)]
    elif model.predictor.kind == "next token":
        logits = logits[-1]
    shares = logits.softmax(-1)
    assert [row["id"] for row in reply["predictions"]] == shares.topk(min(10, len(shares))).indices.tolist()
    for row in reply["predictions"]:
        assert row["share"] == pytest.approx(float(shares[row["id"]]), rel=1e-4)
        assert row["before"] is None
    assert reply["before"] is None
    assert model.predictor.kind == {"bert": "masked token", "mini": "next token", "llama": "next token"}.get(
        name, "class"
    )


@pytest.mark.parametrize("name", ["mini", "llama", "bert", "vit"])
def test_heads_that_are_off_are_off_as_in_ablate(name: str) -> None:
    model, text = live(name), text_for(name)
    off = [(0, 1), (1, 2)]
    reply = reply_to(model, text, factors=dict.fromkeys(off, 0.0))
    heads, _ = watched(model, text, off)
    whole, _ = watched(model, text)
    last = len(heads) - 1
    cells = decoded(model.answer(Maps(reply["reading"], ((last, 0),))))
    assert close(cells, heads[last].map.dense()[0, 0].float())
    assert not torch.allclose(heads[last].map.dense(), whole[last].map.dense(), atol=1e-4)
    plain = {row["id"]: row["share"] for row in reply_to(model, text)["predictions"]}
    assert [row["id"] for row in reply["before"]] == list(plain)[:3]
    for row in reply["predictions"]:
        if row["id"] in plain:
            assert row["before"] == pytest.approx(plain[row["id"]], rel=1e-4)


def test_a_factor_scales_the_output_of_a_head() -> None:
    model = live("llama")
    shares = {
        factor: [row["share"] for row in reply_to(model, TEXT, factors={(2, 3): factor})["predictions"]]
        for factor in (0.0, 0.5, 1.0, 2.0)
    }
    assert len(set(map(tuple, shares.values()))) == 4
    assert shares[1.0] == [row["share"] for row in reply_to(model, TEXT)["predictions"]]
    projection = model.model.model.layers[2].self_attn.o_proj
    with torch.no_grad():
        projection.weight[:, 18:24] *= 0.5  # what reads head 3
        by_hand = reply_to(LiveModel(model.model, model.input.tokenizer, "by hand"), TEXT)
        projection.weight[:, 18:24] *= 2
    assert [row["share"] for row in by_hand["predictions"]] == pytest.approx(shares[0.5], rel=1e-5)


def test_regions_of_a_long_text_are_the_exact_weights() -> None:
    model = live("llama")
    text = "".join(random.Random(3).choices("abcdefg hij", k=700))
    reply = reply_to(model, text)
    call = reply["calls"][1]
    assert (call["queries"], call["keys"], call["rows"], call["columns"]) == (700, 700, 128, 128)
    assert call["has_regions"] and not call["has_output"]
    heads, _ = watched(model, text)
    weights = heads[1].map.dense()[0, 4].float()
    region = OfHead("region", reply["reading"], 1, 4, queries=(611, 640), keys=(590, 640))
    cells = decoded(model.answer(region))
    assert cells.shape == (29, 50) and close(cells, weights[611:640, 590:640])
    hidden = torch.arange(590, 640)[None] > torch.arange(611, 640)[:, None]
    assert torch.equal(cells.isnan(), hidden)
    whole = decoded(model.answer(OfHead("region", reply["reading"], 1, 4, queries=(0, 700), keys=(0, 9999))))
    assert whole.shape == (512, 512)
    rows = torch.arange(700) * 512 // 700
    pooled = torch.zeros(512, 700).index_add_(0, rows, weights)
    pooled = torch.zeros(512, 512).index_add_(1, rows, pooled) / torch.bincount(rows)[:, None]
    assert close(whole, pooled)


def test_patterns_of_long_texts_are_left_out_on_a_cpu_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.server.live_model.MOST_WEIGHTS", 6 * 40 * 40)
    model = live("llama")
    short, long = reply_to(model, "a" * 40), reply_to(model, "ab" * 40)
    assert short["note"] == "" and "induction" in short["heads"][0]["numbers"]
    assert long["note"] == "On a CPU, induction and other patterns are measured for up to 40 tokens."
    assert "induction" not in long["heads"][0]["numbers"] and "entropy" in long["heads"][0]["numbers"]


def test_appended_tokens_are_read_after_the_text() -> None:
    for name in ("mini", "llama"):
        model = live(name)
        before = reply_to(model, TEXT)
        first = before["predictions"][0]
        after = reply_to(model, TEXT, appended=(first["id"],))
        assert (after["tokens"], after["prompt"]) == (before["tokens"] + 1, before["tokens"])
        assert after["calls"][0]["steps"] == [before["tokens"], before["tokens"] + 1]
        again = reply_to(model, TEXT + first["text"])
        if again["tokens"] == after["tokens"]:
            assert after["predictions"][0]["share"] == pytest.approx(
                again["predictions"][0]["share"], rel=1e-4
            )


def test_two_readings_are_compared_as_in_changes() -> None:
    model = live("mini")
    texts = "The nurse said that he left", "The nurse said that she left"
    names = [reply_to(model, text)["reading"] for text in texts]
    flip = model.answer(Changes((names[0], names[1]))).header["flip"]
    assert flip["words"] == ("he", "she")
    changes = watched(model, texts[0])[0]
    assert flip["heads"][0]["distance"] > flip["heads"][-1]["distance"]
    assert len(flip["heads"]) == len(changes.all())
    assert model.answer(Changes((names[0], names[0]))).header["flip"] is None


def test_distances_are_those_of_diversity() -> None:
    model = live("mini")
    reading = reply_to(model, TEXT)["reading"]
    header = model.answer(Distances(reading, 2)).header
    assert len(header["distances"]) == len(header["cosines"]) == 7
    assert header["distances"][3][3] == 0 and header["distances"][0][1] == header["distances"][1][0] > 0


def test_a_text_that_is_too_long_is_cut_and_the_reply_tells_it() -> None:
    model = LiveModel(*llama(), max_tokens=16)
    reply = reply_to(model, "a" * 40)
    assert (reply["tokens"], reply["all_tokens"]) == (16, 40)
    with pytest.raises(Refusal, match="at most 16 tokens: got 17") as refused:
        reply_to(model, "a" * 40, appended=(3,))
    assert refused.value.kind == "refused"


@pytest.mark.parametrize(
    ("request_", "kind", "words"),
    [
        (Read("test", 1, text=""), "refused", "text must hold"),
        (Read("test", 1, text="a", image=b"x"), "refused", "image must be left out"),
        (Read("test", 1, text="a", appended=(999,)), "refused", "got 999 of 258"),
        (Read("test", 1, text="a", factors={(9, 0): 0.0}), "refused", "layer must be one of 3: got 9"),
        (Read("test", 1, text="a", factors={(0, 9): 0.0}), "refused", "9"),
        (Maps("unknown", ((0, 0),)), "gone", "no longer kept"),
        (Distances("unknown", 0), "gone", "no longer kept"),
        (Changes(("unknown", "unknown")), "gone", "no longer kept"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value[:12],
)
def test_what_cannot_be_answered_is_refused_in_words(request_: Any, kind: str, words: str) -> None:
    with pytest.raises(Refusal) as refused:
        live("llama").answer(request_)
    assert refused.value.kind == kind and words in str(refused.value)


def test_parts_of_a_reading_that_do_not_exist_are_refused() -> None:
    model = live("llama")
    name = reply_to(model, TEXT)["reading"]
    for request, words in (
        (Maps(name, ((7, 0),)), "layer must be one of 3: got 7"),
        (Maps(name, ((0, 6),)), "head must be one of the 6 of layer 0: got 6"),
        (OfHead("region", name, 0, 0, queries=(99, 100), keys=(0, 1)), "queries must begin within 37"),
        (Distances(name, 3), "layer must be one of 3: got 3"),
    ):
        with pytest.raises(Refusal, match=words):
            model.answer(request)


def test_a_newer_text_of_the_same_page_ends_the_older_one_and_other_pages_go_on() -> None:
    model = live("llama")
    older, newer = Read("page", 1, text="older"), Read("page", 2, text="newer")
    model.arrive(older)
    model.arrive(newer)
    with pytest.raises(Refusal) as superseded:
        model.answer(older)
    assert superseded.value.kind == "superseded"
    assert model.answer(newer).header["text"] == "newer"
    assert model.answer(Read("page", 1, slot=1, text="second text")).header["text"] == "second text"
    assert model.answer(Read("other page", 1, text="other")).header["text"] == "other"
    with pytest.raises(Refusal) as dropped:
        model.answer(Read("page", 3, text="dropped"), lambda: True)
    assert dropped.value.kind == "superseded"


def test_a_reading_that_takes_too_long_is_ended_with_its_numbers() -> None:
    model = LiveModel(*llama())
    model.seconds = 0.0
    with pytest.raises(Refusal, match=r"at most 0 seconds: 1 of 3 layers") as refused:
        reply_to(model, TEXT)
    assert refused.value.kind == "refused"


def test_a_text_beyond_the_memory_limit_is_refused_before_it_is_read() -> None:
    model = LiveModel(*llama(), memory=200_000)
    with pytest.raises(Refusal, match=r"1,000 tokens need .* > 195\.4 KiB"):
        reply_to(model, "a" * 1000)
    for number in range(30):
        reply_to(model, f"{TEXT} {number}", number)
    assert sum(reading.size for reading in model._stored.values()) <= 200_000


def test_what_the_model_predicts_is_not_taken_from_another_text_or_other_factors() -> None:
    model = live("llama")
    texts = [f"{letter} cat" for letter in "abcdefghijklmnop"]
    before = [reply_to(model, text)["predictions"] for text in texts]
    for text, rows in zip(texts, before, strict=True):
        reply = reply_to(model, text, factors={(0, 0): 0.0})
        assert [row["share"] for row in reply["before"]] == pytest.approx(
            [row["share"] for row in rows[:3]], rel=1e-5
        )


class Failing(nn.Module):
    """A model whose second run fails."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama().model
        self.config, self.runs = self.inner.config, 0

    def forward(self, input_ids: Tensor) -> Any:
        self.runs += 1
        if self.runs == 2:
            raise KeyError("no such\nthing")
        return self.inner(input_ids)


def test_a_failing_model_is_told_of_and_answers_again() -> None:
    model = LiveModel(Failing().eval(), a_tokenizer(special=False), "failing")
    with pytest.raises(Refusal, match=r"the model failed: KeyError: 'no such\\nthing'") as failed:
        reply_to(model, TEXT)
    assert failed.value.kind == "failed"
    assert reply_to(model, TEXT)["tokens"] == len(TEXT)


def test_models_that_cannot_be_served_are_refused_at_once() -> None:
    tiny = llama()
    with pytest.raises(hw.errors.ArgumentError, match="model must be in eval mode: LlamaForCausalLM"):
        LiveModel(tiny.model.train(), tiny.tokenizer, "training")
    with pytest.raises(hw.errors.ArgumentError, match=r"tokenizer must be a tokenizer.*got int"):
        LiveModel(tiny.model.eval(), 3, "no tokenizer")
    with pytest.raises(hw.errors.ArgumentError, match="max_tokens must be at least 2: got 1"):
        LiveModel(tiny.model, tiny.tokenizer, "short", max_tokens=1)
    with pytest.raises(hw.errors.ArgumentError, match="seconds must be greater than 0: got 0"):
        LiveModel(tiny.model, tiny.tokenizer, "no time", seconds=0)
    with pytest.raises(hw.errors.ArgumentError, match=r"must return a tensor or a mapping.*got int"):
        LiveModel(vit().model, lambda image: 3, "no pixels")


def test_an_image_is_read_from_its_file_and_damaged_files_are_refused() -> None:
    import io

    from PIL import Image

    model = live("vit")
    file = io.BytesIO()
    Image.new("RGB", (50, 40), "red").save(file, "PNG")
    reply = reply_to(model, "", image=file.getvalue())
    assert reply["image"]["src"].startswith("data:image/png;base64,")
    assert (reply["image"]["rows"], reply["image"]["columns"], reply["image"]["first"]) == (4, 4, 1)
    assert reply["predictions"][0]["share"] != reply_to(model, "")["predictions"][0]["share"]
    with pytest.raises(Refusal, match="image must be a PNG, JPEG or another image file"):
        reply_to(model, "", image=b"no image")
    with pytest.raises(Refusal, match="at most 50,000,000 pixels: got 9000 x 9000"):
        reply_to(model, "", image=_large_png(9000, 9000))


def _large_png(width: int, height: int) -> bytes:
    """The beginning of a picture of that many pixels."""
    inside = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + inside
    return (
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
        + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    )  # fmt: skip


def test_progress_is_told_while_a_text_is_read() -> None:
    model = live("llama")
    counts: list[tuple[int, int]] = []

    def look() -> bool:
        now = model.arrive(Progress("test"))
        assert now is not None
        counts.append((now.header["done"], now.header["of"]))
        other = model.arrive(Progress("another"))
        assert other is not None and other.header == {"done": 0, "of": 0}
        return False

    model.answer(Read("test", 100, text=TEXT), look)
    assert counts == [(1, 3), (2, 3), (3, 3), (3, 3), (3, 3), (3, 3)]  # the last ones while it is measured


@pytest.mark.thinned(0)
@pytest.mark.parametrize("count", [500], ids=["500 texts"])
def test_many_texts_leave_no_memory_threads_or_hooks_and_the_same_model(count: int) -> None:
    leaves_no_trace(count)


def test_some_texts_leave_no_memory_threads_or_hooks_and_the_same_model() -> None:
    leaves_no_trace(40)


def leaves_no_trace(count: int) -> None:
    tiny = llama()
    ids = torch.tensor([[5, 9, 200, 31]])
    with torch.no_grad():
        before = tiny.model(ids).logits
    hooks, threads = hooks_on(tiny.model), threading.active_count()
    state = {name: value.clone() for name, value in tiny.model.state_dict().items()}
    model = LiveModel(*tiny)
    readings: list[weakref.ref[Any]] = []
    for number in range(count):
        factors = {(number % 3, number % 6): 0.5 * (number % 4)} if number % 2 else {}
        reply_to(model, f"{TEXT} {number}", number, factors=factors)
        readings.append(weakref.ref(model.last_heads))
    gc.collect()
    assert sum(reading() is not None for reading in readings) <= 12
    assert (hooks_on(tiny.model), threading.active_count()) == (hooks, threads)
    assert all(torch.equal(value, state[name]) for name, value in tiny.model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(tiny.model(ids).logits, before)


def test_a_text_read_first_is_in_the_page_with_no_map() -> None:
    from headwise.server.web_app import page_of_model

    model = LiveModel(*mini(), example="</script><script>alert(1)</script> cat")
    page = page_of_model(model, "http", "")
    assert "connect-src 'self'" in page and "<script>alert" not in page
    assert "connect-src" not in page_of_model(model, "parent", "channel")


# What a hostile reader of the page asked for


def albert() -> LiveModel:
    """A model that runs one layer three times."""
    hf, tokenizer = hugging_face(), a_tokenizer()
    sizes = {"hidden_size": 36, "embedding_size": 18, "num_attention_heads": 6, "intermediate_size": 41}
    torch.manual_seed(3)
    config = hf.AlbertConfig(**sizes, num_hidden_layers=3, vocab_size=len(tokenizer))
    return LiveModel(hf.AlbertModel(config).eval(), tokenizer, "ALBERT")


def test_a_head_of_a_layer_that_runs_again_is_off_in_that_run_alone() -> None:
    model = albert()
    name = reply_to(model, "the cat", factors={(0, 1): 0.0})["reading"]
    for layer in range(3):
        output = model.answer(OfHead("output", name, layer, 1)).array or b""
        assert any(output) is (layer != 0)


def test_windows_and_encoder_decoders_are_refused() -> None:
    hf = hugging_face()
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 12, "depths": [1], "num_heads": [2]}
    swin = hf.SwinForImageClassification(hf.SwinConfig(**sizes, window_size=4)).eval()
    with pytest.raises(hw.errors.ArgumentError, match=r"attends in 4 windows"):
        LiveModel(swin, vit().tokenizer, "Swin")
    sizes = {"d_model": 12, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 258}
    bart = hf.BartModel(hf.BartConfig(**sizes, encoder_attention_heads=2, decoder_attention_heads=2)).eval()
    with pytest.raises(hw.errors.ArgumentError, match="got BartModel, which is both"):
        LiveModel(bart, a_tokenizer(), "BART")


class Skipping(nn.Module):
    """A model whose first layer runs on long texts alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(258, 12)
        self.layers = nn.ModuleList(hw.MultiHeadAttention(12, 2) for _ in range(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in list(self.layers)[1 if input_ids.shape[1] < 9 else 0 :]:
            x = x + layer(x)[0]
        return x


def test_a_layer_that_does_not_run_leaves_the_numbers_of_the_others_in_place() -> None:
    torch.manual_seed(0)
    tokenizer, module = a_tokenizer(special=False), Skipping().eval()
    model = LiveModel(module, tokenizer, "skips", example="a long text")
    reply = reply_to(model, "cat dog")
    assert [call is None for call in reply["calls"]] == [True, False, False]
    heads, _ = watched(model, "cat dog")
    entropies = {(row["layer"], row["head"]): row["numbers"]["entropy"] for row in reply["heads"]}
    assert sorted(entropies) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert entropies[2, 1] == pytest.approx(float(heads[heads.paths[-1]].entropy[1]), rel=1e-3)
    short = LiveModel(module, tokenizer, "skips", example="cat dog")
    with pytest.raises(Refusal, match="did not run there"):
        reply_to(short, "a long text")


def test_what_a_scaled_head_writes_is_scaled() -> None:
    model = live("llama")
    cells = []
    for factor in (1.0, 0.5, 0.0):
        name = reply_to(model, TEXT, factors={(1, 0): factor} if factor != 1 else {})["reading"]
        cells.append(decoded(model.answer(Maps(name, ((1, 0),), "written"))).nan_to_num(0.0))
    assert cells[2].max() == 0 and cells[1].max() < cells[0].max()


def test_a_model_that_was_set_to_training_is_refused() -> None:
    model = LiveModel(*llama())
    model.model.train()
    with pytest.raises(Refusal, match="model must be in eval mode"):
        reply_to(model, TEXT)


def test_changed_weights_give_other_readings_and_other_predictions_before() -> None:
    model = LiveModel(*llama())
    first = reply_to(model, TEXT, factors={(0, 0): 0.0})
    before = decoded(model.answer(Maps(first["reading"], ((2, 3),))))
    with torch.no_grad():
        model.model.model.layers[0].self_attn.q_proj.weight.data.mul_(-1)
        model.model.lm_head.weight.data.mul_(-1)
    second = reply_to(model, TEXT, factors={(0, 0): 0.0})
    assert first["reading"] != second["reading"]
    assert first["before"][0]["id"] != second["before"][0]["id"]
    again = decoded(model.answer(Maps(first["reading"], ((2, 3),))))
    assert torch.equal(before.nan_to_num(2.0), again.nan_to_num(2.0))


def test_the_last_heads_are_those_of_the_last_text() -> None:
    model = LiveModel(*llama())
    first = reply_to(model, "first")
    reply_to(model, "second text")
    model.answer(Maps(first["reading"], ((0, 0),)))
    assert model.last_heads[0].calls[-1].shape[2] == len("second text")


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [("same", "same", "same"), ("a" * 300, "b" * 300, "long"), ("ab", "xy", "different")],
    ids=["same", "long", "different"],
)
def test_texts_that_cannot_be_compared_have_a_reason(before: str, after: str, reason: str) -> None:
    model = live("llama")
    names = reply_to(model, before)["reading"], reply_to(model, after)["reading"]
    assert model.answer(Changes(names)).header == {"flip": None, "reason": reason}


def test_patches_of_an_oblong_image_are_placed_by_its_shape() -> None:
    hf = hugging_face()
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 9}
    config = hf.ViTConfig(**sizes, image_size=(16, 64), patch_size=8, num_labels=3)
    model = LiveModel(
        hf.ViTForImageClassification(config).eval(), lambda image: torch.rand(3, 16, 64), "oblong"
    )
    image = model.first["image"]
    assert (image["rows"], image["columns"], image["first"]) == (2, 8, 1)


def test_biases_count_towards_the_memory_of_readings() -> None:
    hf, tokenizer = hugging_face(), a_tokenizer(special=False)
    config = hf.T5Config(d_model=24, d_kv=6, num_heads=4, num_layers=2, d_ff=20, vocab_size=len(tokenizer))
    model = LiveModel(hf.T5EncoderModel(config).eval(), tokenizer, "T5", memory=2**20)
    reply_to(model, "a" * 200)
    assert model._last.size > 4 * 200 * 200 * 4
