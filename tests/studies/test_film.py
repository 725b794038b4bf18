"""The film: its length, its captions, numbers that are headwise's own, files that are there and small."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import numpy
import pytest
import torch
from studies.film_example import HEADS, WORDS, example

import headwise as hw
from headwise.errors import ArgumentError, PackageMissing
from studies import film, film_attention, film_opening, film_training

DOCS = Path(film.__file__).resolve().parents[1] / "docs"
LESSONS = Path(hw.__file__).parent / "course" / "lessons"
CUE = re.compile(r"(\d\d):(\d\d):(\d\d\.\d{3}) --> (\d\d):(\d\d):(\d\d\.\d{3})\n(.+)")


def cues(text: str) -> list[tuple[float, float, str]]:
    """Start, end and words of every caption."""
    actual = []
    for match in CUE.finditer(text):
        start, end = (60 * (60 * int(match[at]) + int(match[at + 1])) + float(match[at + 2]) for at in (1, 4))
        actual.append((start, end, match[7]))
    return actual


# The example


def test_the_example_is_what_multihead_attention_computes() -> None:
    e = example()
    mha = hw.MultiHeadAttention(8, HEADS, bias=False).double()
    with torch.no_grad():
        for name, weight in (("q", e.w_q), ("k", e.w_k), ("v", e.w_v), ("out", e.w_o)):
            getattr(mha, f"{name}_proj").weight.copy_(weight.T)
        output, weights = mha(e.x[None])
    torch.testing.assert_close(output[0], e.output)
    torch.testing.assert_close(weights.dense()[0], e.weights)


def test_the_example_shows_what_its_captions_say() -> None:
    before, goes_with = example().weights
    assert [int(row.argmax()) for row in before[1:]] == [0, 1, 2, 3]
    looked_at = {word: WORDS[int(row.argmax())] for word, row in zip(WORDS, goes_with, strict=True)}
    assert looked_at == {"the": "cat", "cat": "chased", "chased": "cat", "a": "mouse", "mouse": "chased"}
    row, column = film_attention.WRITTEN_OUT
    products = re.findall(r"([−\d.]+) × ([−\d.]+)", film_attention._sum(row, column))
    total = sum(float(a.replace("−", "-")) * float(b.replace("−", "-")) for a, b in products)
    assert total == pytest.approx(float(example().q[row, column]))  # one decimal is all there is


# The opening


def test_the_opening_shows_the_text_and_the_numbers_of_lesson_0() -> None:
    lesson = (LESSONS / "00_attention.py").read_text("utf-8")
    assert f'text = "{film_opening.TEXT}"' in lesson
    facts = film_opening.facts()
    assert f'predicts "letter" with {facts["probability"]}' in " ".join(lesson.split())
    assert f'"news", {facts["other_probability"]}' in lesson
    assert f"no token gets more than {facts['alone_probability']}" in lesson
    assert f"falls from {facts['probability']} to {facts['without']}" in lesson
    data = film_opening.opening()
    assert data.tokens[max(range(12), key=data.weights.__getitem__)] == film_opening.WORD
    assert data.predictions[0].tokens[0] == "letter" and data.predictions[1].tokens[0] == "news"
    assert sum(data.weights) == pytest.approx(1)
    first = film.scenes()[0]
    assert first.name == "question" and first.part == film.OPENING


# Scenes and captions


def test_the_film_takes_90_to_150_seconds_and_nobody_has_to_read_faster_than_20_letters_a_second() -> None:
    scenes = film.scenes()
    assert 90 <= sum(scene.seconds for scene in scenes) <= 150
    assert len({scene.name for scene in scenes}) == len(scenes)
    hurried = [s.name for s in scenes if len(s.caption) > 20 * s.seconds]
    assert hurried == []
    assert sum(s.seconds for s in film.scenes(110)) == pytest.approx(110)
    with pytest.raises(ArgumentError, match="seconds must be 90 to 150: got 30"):
        film.scenes(30)


def test_captions_cover_the_film_and_are_those_of_its_files() -> None:
    scenes = film.scenes()
    text = (DOCS / "film.vtt").read_text("utf-8")
    assert text == film.captions(scenes) and text.startswith("WEBVTT\n\n")
    actual = cues(text)
    assert [words for _, _, words in actual] == [scene.caption for scene in scenes]
    assert actual[0][0] == 0 and actual[-1][1] == pytest.approx(sum(scene.seconds for scene in scenes))
    assert all(a[1] == b[0] and a[0] < a[1] for a, b in pairwise(actual))
    page = (DOCS / "learn" / "film.md").read_text("utf-8")
    assert film.with_chapters(page, scenes) == page and "(film_transcript.md)" in page
    assert (DOCS / "learn" / "film_transcript.md").read_text("utf-8") == film.transcript(scenes)
    C, L, H = film_training.life().shape
    assert f"The {L * H} heads" in page and f"{C} checkpoints" in page
    with pytest.raises(ArgumentError, match="page must contain the lines <!-- chapters -->"):
        film.with_chapters("nothing", scenes)


def test_chapters_cover_the_film_from_its_beginning() -> None:
    scenes = film.scenes()
    text = (DOCS / "film_chapters.vtt").read_text("utf-8")
    assert text == film.chapters_vtt(scenes)
    listed = film.chapters(scenes)
    assert [(start, end, title) for title, start, end in listed] == cues(text)
    assert listed[0][:2] == ("Why a word needs the others", 0)
    assert listed[-1][0] == "Heads in training" and listed[-1][2] == sum(scene.seconds for scene in scenes)
    assert all(a[2] == b[1] for a, b in pairwise(listed))
    assert len({title for title, _, _ in listed}) == len(listed) == 10


def test_captions_of_training_say_what_was_measured() -> None:
    life, message = hw.models.specialisation(), film_training.facts()
    expected_message = " ".join(scene.caption for scene in film.scenes() if scene.part == film.TRAINING)
    layer, head = map(int, message["before_head"].split("."))
    at = life.steps.tolist().index(int(message["before_step"].replace(",", "")))
    assert f"{float(life.statistics['previous'][at, layer, head]):.2f}" == message["before_score"]
    assert all(value in expected_message for value in message.values())
    assert message["repeat_head"] == "{}.{}".format(*film_opening.HEAD_NUMBER)  # “letter”
    labels = [{name or "no label" for row in each for name in row} for each in life.labels]
    assert labels[0] == {"broad"}  # "at first all are broad"
    first = {
        name: min(at for at, listed in enumerate(labels) if name in listed) for name in film_training.COLOURS
    }
    assert first["punctuation"] < first["local"] < first["previous-token"] < first["induction"]
    assert set.union(*labels) <= set(film_training.COLOURS)


# Frames


@pytest.mark.thinned(6)
@pytest.mark.parametrize("scene", film.scenes(), ids=lambda scene: scene.name)
def test_a_frame_of_every_scene_is_drawn(scene: film.Scene) -> None:
    dots = film.frame(scene, 0.6, 0.5)
    assert dots.shape == (1080, 1920, 4) and dots.dtype == numpy.uint8
    assert dots[200:920, :, :3].std() > 5  # something is there
    band = dots[964:1070, :, :3]  # the caption: white on dark, with room on both sides
    assert band.max() > 240 and band[:, :40].max() < 60 and band[:, -40:].max() < 60


# Files


@pytest.mark.parametrize(
    ("name", "starts", "megabytes"),
    [
        ("film.webm", b"\x1a\x45\xdf\xa3", 8),
        ("film.gif", b"GIF89a", 3),
        ("film.vtt", b"WEBVTT", 0.1),
        ("film_chapters.vtt", b"WEBVTT", 0.1),
    ],
)
def test_the_films_are_there_and_small(name: str, starts: bytes, megabytes: float) -> None:
    file = DOCS / name
    data = file.read_bytes()
    assert data.startswith(starts)
    assert file.stat().st_size <= megabytes * 1e6
    if name == "film.webm":
        width, height = (number.to_bytes(2, "big") for number in (1920, 1080))
        assert b"\xb0\x82" + width in data[:4000] and b"\xba\x82" + height in data[:4000]
        assert b"Heads in training" in data  # a chapter
    assert f"../{name}" in (DOCS / "learn" / "film.md").read_text("utf-8")


def test_without_ffmpeg_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(film.sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(PackageMissing, match=r"the film needs ffmpeg; install with: apt-get install ffmpeg"):
        film.write(film.scenes(), tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ArgumentError, match="out must be a folder"):
        film.write(film.scenes(), tmp_path / "none")
