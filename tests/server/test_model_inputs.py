"""Texts and images of a live page as inputs of models of many kinds, and what the models predict for them."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from served_models import (
    TEXT,
    OwnImageModel,
    OwnModel,
    OwnModelWithMask,
    bert,
    live,
    llama,
    vit,
    with_end_token,
)

from headwise.errors import ArgumentError
from headwise.models.pretrained import read
from headwise.server import notebook_view
from headwise.server.live_model import LiveModel
from headwise.server.model_inputs import TextInput, _opened, load_model
from headwise.server.predictions import Predictor
from headwise.server.protocol import Read, Reply, request_of
from trained import a_tokenizer

CUT = "The cat that I"


def prepared(model: Any, tokenizer: Any, text: str, appended: tuple[int, ...] = ()) -> Any:
    return TextInput(model, tokenizer, 64).prepare(Read("test", 1, text=text, appended=appended))


# Texts


def test_the_next_token_is_that_of_the_text_and_not_the_one_after_its_end_token() -> None:
    model, tokenizer, _ = with_end_token()
    ids = tokenizer(CUT)["input_ids"]
    assert ids[-1] == tokenizer.sep_token_id
    made = prepared(model, tokenizer, CUT)
    assert made.ids == ids[:-1] and made.names[-1] == "I"
    assert made.prompt == made.all_tokens == len(made.names) == len(ids) - 1
    assert made.inputs["attention_mask"].shape == made.inputs["input_ids"].shape == (1, len(ids) - 1)
    longer = prepared(model, tokenizer, CUT, (70, 71))
    assert longer.ids == [*ids[:-1], 70, 71] and longer.prompt == len(ids) - 1


def test_special_tokens_that_the_text_itself_ends_with_are_read() -> None:
    model, tokenizer, _ = with_end_token()
    assert prepared(model, tokenizer, f"{CUT}[SEP]").ids == tokenizer(CUT)["input_ids"]
    plain = a_tokenizer(special=False)
    plain.add_special_tokens({"eos_token": "z"})  # nothing is added at the end
    assert len(prepared(llama().model, plain, "jazz").ids) == 4


def test_an_encoder_reads_the_tokens_at_the_end_and_an_own_model_goes_on_before_them() -> None:
    model, tokenizer, _ = bert()
    ids = tokenizer(CUT)["input_ids"]
    assert prepared(model, tokenizer, CUT).ids == ids
    own = OwnModel(len(tokenizer))
    assert prepared(own, tokenizer, CUT).ids == ids
    assert prepared(own, tokenizer, CUT, (70,)).ids == [*ids[:-1], 70]


def test_appended_ids_are_bounded_by_the_table_of_an_own_model() -> None:
    tokenizer = a_tokenizer(special=False)
    with pytest.raises(ArgumentError, match=r"appended must be ids of the vocabulary: got 300 of 258"):
        prepared(OwnModel(258), tokenizer, CUT, (300,))


def test_an_appended_id_beyond_the_tokenizer_is_called_by_its_number() -> None:
    tokenizer = a_tokenizer(special=False)
    model = llama(vocab_size=300).model
    made = prepared(model, tokenizer, CUT, (290,))
    assert made.names[-1] == "token 290"
    assert Predictor(model, TextInput(model, tokenizer, 64)).whole_text(CUT, made) == CUT


def test_bytes_of_one_letter_that_were_appended_make_that_letter() -> None:
    model, tokenizer, _ = llama()
    ids = tuple(tokenizer(" café")["input_ids"])
    made = prepared(model, tokenizer, CUT, ids)
    predictor = Predictor(model, TextInput(model, tokenizer, 64))
    assert predictor.whole_text(CUT, made) == f"{CUT} café"
    half = prepared(model, tokenizer, CUT, ids[:-1])
    assert predictor._appended_text(half.ids, [ids[-1]]) == "é"


def test_the_end_of_a_long_text_is_cut_whatever_side_the_tokenizer_cuts() -> None:
    model, tokenizer, _ = llama()
    tokenizer.truncation_side = "left"
    reading = read(TEXT, model, tokenizer, most=7)
    assert "".join(reading.tokens) == "The␣cat" and reading.cut
    assert tokenizer.truncation_side == "left"


# Own models


@pytest.mark.parametrize("kind", [OwnModel, OwnModelWithMask])
def test_an_own_model_predicts_whatever_its_arguments_are_called(kind: type[OwnModel]) -> None:
    tokenizer = a_tokenizer(special=False)
    tokenizer.add_tokens(["unused"])  # the model has fewer or more words than the tokenizer
    model = kind(261).eval()
    page = LiveModel(model, tokenizer, "own", example=CUT)
    assert page.predictor.kind == "next token" and page.predictor.problem == ""
    with torch.no_grad():
        logits = OwnModel.forward(model, torch.tensor([tokenizer(CUT)["input_ids"]]))
    assert page.first["predictions"][0]["id"] == int(logits[0, -1].argmax())


def test_a_model_of_any_named_inputs_gets_input_ids() -> None:
    class AnyInputs(OwnModel):
        def forward(self, **inputs: Any) -> Any:
            return super().forward(inputs["input_ids"])

    model, tokenizer = AnyInputs(258), a_tokenizer(special=False)
    assert list(read(CUT, model, tokenizer).inputs) == ["input_ids"]


def test_a_masked_language_model_predicts_masks_before_the_first_text_with_a_mask() -> None:
    page = LiveModel(*bert(), example=CUT)
    assert page.predictor.kind == "masked token"
    assert page.first["predictions"] == [] and page.predictor.problem == ""


def test_features_of_an_image_are_no_classes() -> None:
    processor = vit().tokenizer
    features = LiveModel(OwnImageModel().eval(), processor, "features")
    assert features.predictor.kind == "" and features.first["predictions"] == []
    classes = LiveModel(OwnImageModel(36).eval(), processor, "classes")
    assert classes.predictor.kind == "class" and len(classes.first["predictions"]) == 10
    assert live("vit").predictor.kind == "class"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nothing_is_predicted_from_numbers_that_are_not_finite(value: float) -> None:
    class Wrong(OwnModel):
        broken = True

        def forward(self, idx: Any) -> Any:
            logits = super().forward(idx)
            logits[..., 5] = value if self.broken else -math.inf
            return logits

    tokenizer = a_tokenizer(special=False)
    model = Wrong(258).eval()
    page = LiveModel(model, tokenizer, "wrong", example=CUT)
    assert page.first["predictions"] == []
    assert page.predictor.problem.startswith("The model's output has NaN or infinite numbers")
    model.broken = False  # a word may have a logit of minus infinity
    reply = page.answer(Read("test", 1, text=f"{CUT} saw")).header
    assert len(reply["predictions"]) == 10 and page.predictor.problem == ""


def test_a_classifier_with_numbers_that_are_not_finite_shows_no_classes() -> None:
    class Wrong(OwnImageModel):
        def forward(self, pixels: Any) -> Any:
            return super().forward(pixels) * math.nan

    page = LiveModel(Wrong(36).eval(), vit().tokenizer, "wrong")
    assert page.first["predictions"] == [] and page.predictor.problem


# Requests


@pytest.mark.parametrize(
    "factors",
    [
        {"2.3": 10**400},
        {"2.3": -(10**4000)},
        {"9" * 5000 + ".3": 0},
        {"2." + "9" * 5000: 0},
        {"1234567.0": 0},
        {"2.3": math.nan},
        {"2.3": math.inf},
        {"2.3.": 0},
        {"٣.3": 0},
        {"2.3\n": 0},
    ],
)
def test_wild_factors_are_refused_in_few_words(factors: dict[str, Any]) -> None:
    ask = {"ask": "read", "client": "c", "number": 1, "slot": 0, "text": TEXT, "factors": factors}
    with pytest.raises(ArgumentError, match="factors must") as caught:
        request_of(ask)
    assert len(str(caught.value)) < 300


def test_factors_are_read() -> None:
    ask = {"ask": "read", "client": "c", "number": 1, "slot": 0, "text": TEXT}
    request = request_of(ask | {"factors": {"2.3": 0, "11.0": -100, "0.1": 1}})
    assert isinstance(request, Read) and request.factors == {(2, 3): 0, (11, 0): -100}


class _Widget:
    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, content: Any, buffers: Any = None) -> None:
        json.dumps(content, allow_nan=False)
        self.messages.append(content)


class _Model:
    """Answers with a reply, or raises an error."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def arrive(self, request: Any) -> None: ...

    def answer(self, request: Any) -> Any:
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


@pytest.mark.parametrize(
    "result", [KeyboardInterrupt(), RuntimeError("a fault"), MemoryError(), Reply({"value": math.nan})]
)
def test_the_page_gets_a_reply_to_every_message_whatever_fails(result: Any) -> None:
    widget, model = _Widget(), _Model(result)
    content = {"id": "x.1", "ask": {"ask": "progress", "client": "c"}}
    if isinstance(result, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            notebook_view.answer(model, widget, content)  # type: ignore[arg-type]
    else:
        notebook_view.answer(model, widget, content)  # type: ignore[arg-type]
    (message,) = widget.messages
    assert message["id"] == "x.1" and message["error"]["kind"] == "failed"
    kind = "ValueError" if isinstance(result, Reply) else type(result).__name__
    assert kind in message["error"]["error"]


# Images


def file_of(image: Any, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def test_pixels_of_16_bits_are_scaled() -> None:
    from PIL import Image

    for form in ("PNG", "TIFF"):
        image = Image.new("I;16", (2, 1))
        image.putpixel((0, 0), 65535)
        image.putpixel((1, 0), 128 * 257)
        opened = _opened(file_of(image, form))
        assert [opened.getpixel((x, 0)) for x in range(2)] == [(255, 255, 255), (128, 128, 128)]
    wide = Image.new("I", (2, 1))
    wide.putpixel((0, 0), 2**30)
    assert _opened(file_of(wide, "TIFF")).getpixel((0, 0)) == (255, 255, 255)


def test_transparent_pixels_are_white() -> None:
    from PIL import Image

    clear = Image.new("RGBA", (2, 2), (0, 0, 0, 0))
    assert _opened(file_of(clear)).getpixel((0, 0)) == (255, 255, 255)
    half = Image.new("LA", (2, 2), (0, 51))
    assert _opened(file_of(half)).getpixel((0, 0)) == (204, 204, 204)
    palette = Image.new("P", (2, 2), 0)
    palette.putpalette([9, 9, 9, 200, 0, 0])
    assert _opened(file_of(palette, "GIF", transparency=0)).getpixel((1, 1)) == (255, 255, 255)
    assert _opened(file_of(Image.new("RGB", (2, 2), "red"))).getpixel((1, 1)) == (255, 0, 0)


def test_a_photograph_stands_upright() -> None:
    from PIL import Image

    image = Image.new("RGB", (8, 4))
    rotation = Image.Exif()
    rotation[0x0112] = 6
    assert _opened(file_of(image, "JPEG", exif=rotation)).size == (4, 8)


def test_images_of_other_formats_and_long_thin_images_are_refused() -> None:
    from PIL import Image

    for size in ((210, 10), (10, 210)):
        with pytest.raises(ArgumentError, match=rf"at most 20 times as .*: got {size[0]} x {size[1]}; cut"):
            _opened(file_of(Image.new("RGB", size)))
    assert _opened(file_of(Image.new("RGB", (200, 10)))).size == (200, 10)
    with pytest.raises(ArgumentError, match="image must be a PNG, JPEG or another image file"):
        _opened(file_of(Image.new("RGB", (9, 9)), "PPM"))


# Files of the MODEL argument


def test_a_file_that_fails_leaves_no_module_and_one_like_a_module_does_not_replace_it(
    tmp_path: Path,
) -> None:
    file = tmp_path / "my_live_models.py"
    file.write_text("raise RuntimeError('not yet')")
    with pytest.raises(ArgumentError, match="load raised RuntimeError: not yet; run it by itself"):
        load_model(f"{file}:load")
    assert file.stem not in sys.modules
    text = "import torch\nx = {}\ndef load(): return torch.nn.Linear(1, 1), (lambda image: image), str(x)"
    try:
        for x in (1, 2):
            file.write_text(text.format(x))
            assert load_model(f"{file}:load").title == str(x)
        assert sys.modules[file.stem].x == 2
        file.write_text("x = 3; raise KeyboardInterrupt")
        with pytest.raises(KeyboardInterrupt):
            load_model(f"{file}:load")
        assert sys.modules[file.stem].x == 2
    finally:
        sys.modules.pop(file.stem, None)
    other = tmp_path / "json.py"
    other.write_text(text.format(4))
    before = set(sys.modules)
    assert load_model(f"{other}:load").title == "4" and sys.modules["json"] is json
    for name in set(sys.modules) - before:
        if name.startswith("json_"):
            del sys.modules[name]
