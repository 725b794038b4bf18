"""mini's training: what is taken of the texts, the words of its vocabulary, what is shipped of a run."""

from __future__ import annotations

import json
import lzma
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from studies.probes import fingerprint
from studies.sources import chapters, nothing

import headwise as hw
from headwise.errors import ArgumentError
from headwise.heads import grammar
from headwise.models import Transformer
from studies import corpus, stories, teacher_files, words_files, words_ship, words_training, words_vocabulary
from trained import a_vocabulary, mini


def test_all_plain_texts_are_taken_and_of_others_as_many_letters_as_their_limit() -> None:
    plain = [("Jane Austen", f"Emma {n}", "x" * 300) for n in range(5)]
    names = [name for name in map(str, range(9)) if not corpus.is_held_out(name)]
    others = [("King James Bible, chapters", name, "y" * 700_000) for name in names]
    documents = words_files.chosen(plain, others)
    assert sorted(d for d in documents if d[0] == "Jane Austen") == [
        each for each in plain if not corpus.is_held_out(each[1])
    ]
    bible = [text for source, _, text in documents if source.startswith("King")]
    assert len(bible) == len(names) and {len(text) for text in bible} == {
        60_000
    }  # cut, and below 1.2 million
    assert documents == words_files.chosen(plain, others)


def test_documentation_and_code_share_their_limits() -> None:
    some = words_files.limits(["A, documentation", "B, documentation", "C, source", "Moby-Dick, chapters"])
    expected = {
        "A, documentation": 3.5,
        "B, documentation": 3.5,
        "C, source": 5.0,
        "Moby-Dick, chapters": 9.0,
    }
    assert some == expected


def test_common_words_are_one_token_each_and_any_text_comes_back() -> None:
    _, tokenizer, _ = mini()
    for text in words_vocabulary.EXAMPLES[:2]:
        assert tokenizer.convert_ids_to_tokens(tokenizer(" " + text)["input_ids"][1:]) == text.split()
    words = sorted(words_vocabulary.of_grammar() | {word for word in stories.words() if word.islower()})
    split = [word for word in words if len(tokenizer(f" {word}")["input_ids"]) != 2]
    assert split == []
    for text in ("def f(x): return 12.5 # é", "Café 😀 שלום 你好", "\t1234567890\n\n", "\u200b\u0301"):
        assert tokenizer.decode(tokenizer(text)["input_ids"][1:]) == text


def test_words_of_the_grammar_and_of_lessons_are_words() -> None:
    words = words_vocabulary.of_grammar()
    assert {"the", "who", "himself"} <= words and all(word.isalpha() for word in words)
    assert {"attention", "head"} <= words_vocabulary.of_lessons()
    assert "run" in words_vocabulary.stems("runs") and "make" in words_vocabulary.stems("making")
    assert not stories.words() & {
        word for halves in grammar.WORDS.values() for half in halves for word in half.split()
    }


def test_prompts_are_grouped_by_length_and_those_with_other_tokens_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(teacher_files, "PROMPTS", 3)
    monkeypatch.setattr(teacher_files, "FEWEST", 1)

    class Questions:
        texts = iter(["ab", "ab", "é"])

        def next(self) -> str:
            return next(self.texts)

    inner = a_vocabulary()
    ids = inner.encode(teacher_files.TURN.format("ab")).ids
    prompts = teacher_files.prompts_of(inner, {token: token + 1 for token in ids}, Questions())  # type: ignore[arg-type]
    assert list(prompts) == [str(len(ids))]
    assert prompts[str(len(ids))].tolist() == [[token + 1 for token in ids]]


def test_an_archive_without_documents_gives_none(tmp_path: Path) -> None:
    assert list(nothing(tmp_path)) == []


def test_chapters_are_paragraphs_without_notes(tmp_path: Path) -> None:
    import io
    import tarfile

    entries = [
        {"type": "paragraph text", "chapterNumber": 1, "value": "In the "},
        {"type": "note", "chapterNumber": 1, "value": "or: a"},
        {"type": "line text", "chapterNumber": 1, "value": "beginning."},
        {"type": "paragraph end"},
        {"type": "paragraph text", "chapterNumber": 2, "value": "Then"},
    ]
    place, data = tmp_path / "web.tgz", json.dumps(entries).encode()
    with tarfile.open(place, "w:gz") as tar:
        member = tarfile.TarInfo("package/json/genesis.json")
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))
    assert list(chapters(place)) == [
        ("web package/json/genesis.json 1", "In the beginning.\n"),
        ("web package/json/genesis.json 2", "Then"),
    ]


def test_nats_per_byte_are_the_loss_of_every_token_once() -> None:
    model, tokenizer, _ = mini()
    text = "The cat that I saw yesterday ran away. " * 3
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(model(ids)[0, :-1].double(), ids[0, 1:], reduction="sum")
    facts = words_ship.nats(model, tokenizer, [("a", "b", text)])
    assert facts["nats per byte"] == pytest.approx(float(losses) / len(text), abs=1e-4)
    assert (facts["bytes"], facts["tokens"], facts["documents"]) == (len(text), ids.shape[1] - 1, 1)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"from studies\.words_training: no results\.json\.xz in "):
        words_ship.results_of(tmp_path)


def test_checkpoints_of_another_training_are_refused() -> None:
    results = {"trainings": {"1_a": {"steps": 7, "losses": []}}, "life": {"step_000005": [{}, ""]}}
    with pytest.raises(ArgumentError, match="belong to 1_a: they end at step 5 instead of 7"):
        words_ship.life_of(results, "1_a", mini().model, 1.0, 13)  # type: ignore[arg-type]


def test_what_is_shipped_is_the_last_checkpoint() -> None:
    life, (model, _, _) = hw.models.specialisation(), mini()
    assert isinstance(model, Transformer) and life.fingerprint == fingerprint(model)
    facts: dict[str, Any] = json.loads(words_ship.TRAINING.read_text("utf-8"))
    assert int(life.steps[-1]) == facts["steps"] and facts["label"] in [t["label"] for t in facts["tried"]]
    assert float(life.validation[-1]) == pytest.approx(facts["validation"]["plain"]["nats per token"])
    assert all(math.isnan(loss) for loss in life.validation[:-1].tolist())
    assert sum(facts["shares"].values()) == pytest.approx(1)


def test_a_run_becomes_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two checkpoints of a tiny model, through `words_ship`."""
    out, data, folder = (tmp_path / name for name in ("out", "data", "mini"))
    out.mkdir()
    data.mkdir()
    monkeypatch.setattr(words_training, "VOCABULARY", a_vocabulary().get_vocab_size())
    monkeypatch.setitem(words_training.SIZES, "2x64", (2, 64))
    monkeypatch.setattr(words_ship, "TRAINING", tmp_path / "mini.json")
    model = Transformer(words_training.config_of("2x64")).half().float().eval()
    save_file(
        {k: v.half().contiguous() for k, v in model.state_dict().items()}, out / "1_2x64_seed0.safetensors"
    )
    a_vocabulary().save(str(data / "tokenizer.json"))
    texts = {
        "train": [("Book", "one", "a text")],
        "val": [("Book", "two", "the cat"), ("C, source", "x", "f(x)")],
    }
    (data / "natural.xz").write_bytes(lzma.compress(json.dumps(texts).encode()))
    roles = hw.roles(*mini()[:2])
    numbers = {name: [[0.1, 0.2]] * 2 for name in (*stored_names(), "induction_stripe")}
    scores = json.loads(roles.to_json())
    scores["scores"] = {name: [[0.1, 0.2]] * 2 for name in scores["scores"]}
    training = {
        "label": "1_2x64_seed0", "size": "2x64", "seed": 0, "steps": 5, "planned": 5, "seconds": 1.0,
        "tokens": 9,
        "losses": [3.0, 2.0, 2.0, 2.0, 1.0], "shares": {"plain": 1.0}, "induction": 0.1, "previous": 0.1,
        "nats a byte, plain": 1.0, "nats a byte, rest": 1.0, "found": [], "roles": {},
    }  # fmt: skip
    results = {
        "trainings": {"1_2x64_seed0": training}, "tokens": {"plain": 9}, "teacher": {"texts": 1},
        "life": {f"step_{step:06d}": [numbers, json.dumps(scores)] for step in (0, 5)},
    }  # fmt: skip
    (out / "results.json.xz").write_bytes(lzma.compress(json.dumps(results).encode()))
    words_ship.main([str(out), str(data), "--folder", str(folder)])
    shipped, _, title = hw.models.load(folder)
    assert title == "mini" and torch.equal(
        shipped.state_dict()["decoder.norm.weight"], model.state_dict()["decoder.norm.weight"]
    )
    life = hw.models.specialisation(folder)
    assert life.steps.tolist() == [0, 5] and float(life.losses[1]) == 2.0
    facts = json.loads((tmp_path / "mini.json").read_text())
    assert facts["sources"] == {"Book": {"documents": 1, "letters": 6}} and facts["steps"] == 5
    assert facts["validation"]["rest"]["bytes"] == 4


def stored_names() -> list[str]:
    """Names of the statistics that labels are told by."""
    return [name for name in hw.models.specialisation().statistics if name != "induction_stripe"]
