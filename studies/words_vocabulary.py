"""mini's vocabulary: byte pairs in which every common word is one token.

The words are those of the grammar of roles, of the stories and the lessons, and the 4,000 most common ones.
Byte pairs are learned from the texts, and from a line of these words that is read many times over: so each
word is merged from its letters, and any other text still works by bytes.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.heads import grammar

from . import corpus, stories
from .sources import FREQUENCIES, SOURCES, data_of_deb

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SIZE = 8192
COMMON, LOOKED_AT = 4000, 12_000  # words; of the list of frequencies
REPEATS = 3000  # of the line of words
STORIES = 3_000_000  # letters of stories that byte pairs are learned from
LESSONS = Path(__file__).parents[1] / "src" / "headwise" / "course" / "lessons"
EXAMPLES = (
    "the cat that i saw yesterday ran away",
    "the quick brown fox jumps over the lazy dog",
    "the animal didn't cross the street because it was too tired",
)
CLAUSES = "because when before after while until since everybody nobody they"
FIRST = (
    "The A An In He She It They I We You But And When What One There This That My His Her If So Then At On "
    "For No Yes Once"
).split()

Document = tuple[str, str, str]


@dataclass(frozen=True)
class Words:
    """Words that get one token each."""

    lower: tuple[str, ...]
    names: tuple[str, ...]
    common: tuple[str, ...]  # of `lower`, the most common first


@cache
def parts_of_speech() -> dict[str, frozenset[str]]:
    """Return WordNet's words by part of speech, in small letters."""
    archive = corpus.fetch(next(each for each in SOURCES if each.package == "wordnet-base"))
    result = {}
    with tarfile.open(fileobj=io.BytesIO(data_of_deb(archive))) as tar:
        for part in ("noun", "verb", "adj", "adv"):
            stream = tar.extractfile(f"./usr/share/wordnet/data.{part}")
            assert stream is not None
            words: set[str] = set()
            for line in stream.read().decode("latin-1").splitlines():
                if not line.startswith("  "):
                    fields = line.split()
                    words.update(word.lower() for word in fields[4 : 4 + 2 * int(fields[3], 16) : 2])
            result[part] = frozenset(words)
    return result


def by_frequency() -> list[str]:
    """Return the most frequent words of the web."""
    with tarfile.open(corpus.fetch(FREQUENCIES)) as tar:
        name = next(each for each in tar.getnames() if each.endswith("unigrams.txt"))
        stream = tar.extractfile(name)
        assert stream is not None
        return [line.split("\t")[0] for line in stream.read().decode().splitlines()[:LOOKED_AT]]


def stems(word: str) -> tuple[str, ...]:
    """Return the word, and its possible forms without an ending."""
    ends = (word[:-2] + "e", word[:-3] + "e", word[:-3] + "y", word[:-4])
    return (word, word[:-1], word[:-2], word[:-3], word[:-1] + "e", *ends)


def words_of(text: str) -> set[str]:
    """Return the runs of small letters."""
    return set(re.findall(r"[a-z]+", text))


def of_grammar() -> set[str]:
    """Return every word of the sentences that measure roles."""
    texts = [half for halves in grammar.WORDS.values() for half in halves]
    texts += [*grammar.CLOSED.values(), *grammar.PAIRS]
    texts += [text for kinds in grammar.SHAPES.values() for half in kinds for text in half]
    words = {word.lower() for text in texts for word in re.split(r"[\s,]+", text)}
    words |= {word for forms in grammar.PRONOUNS.values() for word in forms}
    return {word for word in words if re.fullmatch("[a-z]+", word)}


def of_lessons() -> set[str]:
    """Return the words of the course's text, without code and formulas."""
    words: set[str] = set()
    for file in sorted(LESSONS.glob("*.py")):
        for line in file.read_text("utf-8").splitlines():
            if line.startswith("# ") and not line.startswith("# %%"):
                prose = re.sub(r"`[^`]*`|\$[^$]*\$", "", line)
                words |= set(re.findall(r"(?<![`\w./_])[a-z]{2,}(?![\w`(/_])", prose))
    return words


def wanted(documents: Sequence[Document]) -> Words:
    """Return the words that get one token each, from the training documents."""
    prose = " ".join(
        text for source, _, text in documents if "source" not in source and "documentation" not in source
    )
    counts = Counter(re.findall(r"[a-z]+", prose))
    listed = {word for words in parts_of_speech().values() for word in words}

    def is_word(word: str) -> bool:
        return counts[word] > 0 or any(stem in listed for stem in stems(word))

    common = [
        word
        for word in by_frequency()
        if (len(word) > 1 or word in "ai")
        and counts[word] >= 3
        and any(stem in listed or counts[stem] > 300 for stem in stems(word))
    ][:COMMON]
    written = {word for word in stories.words() | set(CLAUSES.split()) if word.islower()}
    shown = {word for text in EXAMPLES for word in words_of(text)} | of_lessons()
    rest = sorted(of_grammar() | written) + sorted(word for word in shown if is_word(word))
    names = (*stories.MALE_NAMES, *stories.FEMALE_NAMES, "Sunday", "Monday", "I")
    return Words(tuple(dict.fromkeys([*common, *rest])), names, tuple(common))


def lines(documents: Sequence[Document], words: Words) -> Iterator[str]:
    """Yield the texts from which byte pairs are learned."""
    line = " ".join(["", *words.lower, *words.names])
    for _ in range(REPEATS):
        yield line
    for word in FIRST:
        for _ in range(REPEATS):
            yield word + " "
    for _, _, text in documents:
        yield text
    yield from stories.documents(0, STORIES)


def trained(documents: Sequence[Document], words: Words) -> Tokenizer:
    """Return the tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=[corpus.START],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines(documents, words), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{corpus.START} $A",
        pair=f"{corpus.START} $A $B",
        special_tokens=[(corpus.START, 0)],
    )
    return tokenizer


def missing(tokenizer: Tokenizer, words: Words) -> list[str]:
    """Return the words that are more than one token after a space."""
    vocabulary = tokenizer.get_vocab()
    return [word for word in (*words.lower, *words.names) if f"Ġ{word}" not in vocabulary]
