"""A small grammar of English, as data: sentences with known relations between words.

    words    WORDS: lists of words, in two halves; no word of an open list is in both
    parts    PARTS: how phrases are built, "determiner adjective *thing"; the head is marked *
    shapes   SHAPES: how sentences are built of words and parts, in two halves; none is in both
    pairs    RELATIONS: two slots of one part or shape with these names belong together

A slot is a list of words, a PART or a word itself; a word's name is its class, unless names stand before it
(`object=THING`, or two of them, `noun+possessed=thing`), and `?` behind it says that it may be left out. So
"subject=PERSON verb object=THING" tells that the heads of both phrases belong to the verb. Half A is for
choosing a head, half B for judging it. To extend the grammar, add words to a list, a line to a part, a shape
to both halves.

With a pronoun, one shape gives four sentences: the two people change places, and he becomes she; nothing else
differs. In lists of nouns two are related, as in WordNet, and each of the others is from another pair.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ..errors import ArgumentError

# Words


CLOSED = {
    "determiner": "the the the a a this every",
    "preposition": "near behind in beside under",
    "conjunction": "and or",
    "perfect": "has had",
    "modal": "will can must should",
    "relative pronoun": "who",
    "case": "'s",
    "copula": "was",
}
WORDS: dict[str, tuple[str, str]] = {  # of each list the words of either half
    "person": (
        "farmer teacher doctor soldier painter lawyer singer student captain butcher thief guard",
        "sailor driver writer baker judge hunter artist worker tailor priest spy clerk",
    ),
    "thing": (
        "letter wall box table wheel coat lamp bag window roof blanket clock",
        "book door basket chair engine shirt ladder cup gate floor carpet mirror",
    ),
    "material": (
        "stone garden kitchen silk iron paper school travel army summer copper hospital",
        "wood village winter leather steel glass office factory palace cotton mountain music",
    ),
    "place": (
        "bridge river market house forest church street hill",
        "lake station castle field harbor tower hotel valley",
    ),
    "adjective": (
        "old red small quiet strange heavy bright tired angry clever",
        "young green large loud famous narrow dark happy lonely gentle",
    ),
    "adverb": (
        "suddenly quietly often slowly yesterday finally",
        "quickly carefully rarely gladly secretly recently",
    ),
    "degree": ("very rather so", "quite extremely too"),
    "verb": (
        "found carried followed painted moved watched cleaned bought",
        "lost pulled dropped noticed sold repaired kept touched",
    ),
    "base": (
        "find carry follow paint move watch clean buy",
        "lose pull drop notice sell repair keep touch",
    ),
    "intransitive": ("slept cried waited smiled", "laughed arrived danced stayed"),
    "giving": ("gave sent showed", "offered handed brought"),
    "given": ("given sent shown", "offered handed brought"),
    "meeting": ("saw thanked helped called visited", "met praised blamed warned kissed"),
    "male": (
        "king uncle boy father husband actor",
        "prince brother man son waiter monk",
    ),
    "female": (
        "queen aunt girl mother wife actress",
        "princess sister woman daughter waitress nun",
    ),
}
WORDS |= {name: (words, words) for name, words in CLOSED.items()}

CLASSES = {  # what a list's words are; the others are what they are called
    "person": "noun", "thing": "noun", "material": "noun", "place": "noun", "male": "noun", "female": "noun",
    "base": "verb", "intransitive": "verb", "giving": "verb", "given": "verb", "meeting": "verb",
    "perfect": "auxiliary", "modal": "auxiliary", "degree": "adverb",
}  # fmt: skip

PAIRS = (  # nouns that are related
    "bread butter, hammer nail, moon star, sword shield, shoe sock, horse cow, piano violin, nose mouth, "
    "rain snow, pencil pen, needle thread, father mother",
    "cat dog, salt pepper, knife fork, sun planet, hat scarf, sheep goat, guitar drum, arm leg, "
    "wind storm, bus train, rose tulip, brother sister",
)


# Parts


PARTS: dict[str, tuple[str, ...]] = {
    "PERSON": (
        "determiner *person",
        "determiner adjective *person",
        "determiner adjective adjective modifier=material *person",
        "determiner modifier=material *person",
        "determiner adjective modifier=material *person",
    ),
    "THING": (
        "determiner *thing",
        "determiner adjective adjective *thing",
        "determiner modifier=material *thing",
        "determiner adjective modifier=material *thing",
        "determiner modifier=material modifier=material *thing",
        "determiner adjective modifier=material modifier=material *thing",
    ),
    "PLACE": (
        "determiner *place",
        "determiner adjective *place",
        "determiner modifier=material *place",
        "determiner adjective modifier=material *place",
        "determiner modifier=material modifier=material *place",
        "determiner adjective modifier=material modifier=material *place",
    ),
    "OWNED": (
        "possessor=PERSON 's *noun+possessed=thing",
        "possessor=PERSON 's adjective *noun+possessed=thing",
        "possessor=PERSON 's modifier=material *noun+possessed=thing",
        "possessor=PERSON 's adjective modifier=material *noun+possessed=thing",
        "possessor=PERSON 's adjective adjective modifier=material *noun+possessed=thing",
    ),
    "MADE": (  # the box the farmer painted
        "*THING subject=PERSON verb",
        "*THING subject=PERSON adverb verb",
        "*THING subject=PERSON auxiliary=perfect verb",
    ),
    "WHERE": ("preposition preposition's_noun=PLACE",),
    "WHILE": (
        "while subject=PERSON intransitive",
        "while subject=PERSON adverb intransitive",
        "while subject=PERSON auxiliary=perfect adverb? intransitive",
    ),
    "BESIDE": ("*PERSON WHERE",),
    "GUEST": (
        "*antecedent=PERSON relative_pronoun=who adverb? intransitive",
        "*antecedent=PERSON WHERE relative_pronoun=who intransitive",
        "*antecedent=PERSON WHERE relative_pronoun=who auxiliary=perfect adverb? intransitive",
    ),
    "OWNER": (
        "*antecedent=PERSON relative_pronoun=who verb object=THING",
        "*antecedent=PERSON WHERE relative_pronoun=who verb object=THING",
        "*antecedent=PERSON WHERE relative_pronoun=who auxiliary=perfect verb object=OWNED",
    ),
    "SEEN": (
        "*antecedent=PERSON relative_pronoun=who subject=PERSON meeting",
        "*antecedent=PERSON WHERE relative_pronoun=who subject=PERSON meeting",
        "*antecedent=PERSON WHERE relative_pronoun=who subject=PERSON adverb meeting",
    ),
    "FINDS": ("verb object=THING",),
    "MALE": ("determiner *male", "determiner adjective *male"),
    "FEMALE": ("determiner *female", "determiner adjective *female"),
}


# Shapes


SHAPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "plain": (
        (
            "subject=PERSON adverb? verb object=OWNED WHERE .",
            "WHERE subject=PERSON auxiliary=modal adverb? verb=base object=THING WHILE .",
            "subject+far_subject=BESIDE adverb? verb object=MADE .",
            "subject+far_subject=OWNER auxiliary=perfect adverb? verb object=OWNED .",
            "subject=PERSON adverb? verb=giving GUEST object=THING WHERE .",
            "auxiliary=perfect subject=PERSON adverb? verb object=MADE ?",
            "auxiliary=modal subject+far_subject=SEEN verb=base object=OWNED WHERE ?",
            "subject=PERSON verb object+first_conjunct=THING conjunction second_conjunct=OWNED WHILE .",
            "first_conjunct=BESIDE conjunction second_conjunct=PERSON verb object=THING WHERE .",
            "subject=PERSON adverb? verb=giving SEEN object=OWNED .",
            "auxiliary=modal subject+far_subject=GUEST verb=base object=MADE ?",
            "WHERE subject=PERSON verb=giving OWNER object=THING .",
            "subject=PERSON verb WHERE object+first_conjunct=OWNED conjunction second_conjunct=THING .",
            "subject=PERSON auxiliary=perfect adverb verb=given GUEST object=OWNED .",
        ),
        (
            "adverb subject=PERSON verb object=THING WHERE WHILE .",
            "WHERE subject=PERSON auxiliary=perfect adverb? verb object=OWNED WHILE .",
            "WHERE subject+far_subject=BESIDE auxiliary=perfect adverb? verb object=THING .",
            "adverb subject+far_subject=SEEN verb object=MADE .",
            "WHERE subject=PERSON adverb? verb=giving SEEN object=OWNED .",
            "auxiliary=modal subject=PERSON verb=base object=OWNED WHERE ?",
            "auxiliary=perfect subject+far_subject=GUEST adverb verb object=THING WHERE ?",
            "WHERE subject=PERSON adverb? verb object+first_conjunct=THING or second_conjunct=THING .",
            "adverb first_conjunct=PERSON conjunction second_conjunct=PERSON verb object=OWNED WHERE .",
            "subject+far_subject=OWNER verb=giving GUEST object=MADE .",
            "auxiliary=modal subject+far_subject=OWNER verb=base object=OWNED adverb WHILE ?",
            "adverb subject=PERSON verb=giving OWNER object=THING WHILE .",
            "auxiliary=modal first_conjunct=BESIDE and second_conjunct=PERSON verb=base object=MADE ?",
            "auxiliary=perfect subject=PERSON verb=given GUEST object=THING WHERE ?",
        ),
    ),
    "pronoun": (
        (
            "MALE meeting FEMALE because pronoun=he was adjective .",
            "MALE told FEMALE WHERE that pronoun=he intransitive .",
            "WHERE MALE meeting FEMALE because pronoun=he was adjective and pronoun=she was adjective .",
            "MALE meeting FEMALE when pronoun=he FINDS and pronoun=she intransitive .",
        ),
        (
            "MALE meeting FEMALE WHERE while pronoun=he FINDS .",
            "adverb MALE stood beside FEMALE until pronoun=he intransitive .",
            "adverb MALE meeting FEMALE before pronoun=he intransitive and pronoun=she intransitive .",
            "MALE meeting FEMALE since pronoun=he was degree adjective but pronoun=she was adjective .",
        ),
    ),
    "reflexive": (
        (
            "MALE told FEMALE about reflexive=himself .",
            "MALE giving FEMALE object=THING with a picture of reflexive=himself .",
            "WHERE MALE questioned FEMALE about reflexive=himself .",
        ),
        (
            "adverb MALE asked FEMALE some questions about reflexive=himself .",
            "MALE reminded FEMALE WHERE of reflexive=himself .",
            "MALE giving FEMALE object=THING for reflexive=himself .",
        ),
    ),
    "possessive pronoun": (
        (
            "MALE giving FEMALE possessive_pronoun=his adjective? thing .",
            "WHERE MALE meeting FEMALE with possessive_pronoun=his modifier=material thing .",
            "MALE and FEMALE verb possessive_pronoun=his thing before possessive_pronoun=her thing .",
        ),
        (
            "adverb MALE meeting FEMALE behind possessive_pronoun=his thing .",
            "MALE meeting FEMALE WHERE because of possessive_pronoun=his adjective thing .",
            "MALE talked to FEMALE about possessive_pronoun=his thing and possessive_pronoun=her thing .",
        ),
    ),
    "related": (
        (
            "determiner person drew the item , the item , the item and the item WHERE .",
            "the item , the item and the item lay on the item .",
            "she dreamed of the item , the item , the item , the item and the item .",
            "adverb the item and the item , the item and the item reached determiner person .",
        ),
        (
            "beside the item determiner person put the item , not far from the item and the item .",
            "we asked for the item or the item , not for the item WHERE .",
            "nobody wanted the item after the item , the item , the item or the item .",
            "WHERE he kept the item under the item , the item with the item and determiner thing .",
        ),
    ),
}
MIXED = {"plain": 0.45, "pronoun": 0.16, "reflexive": 0.12, "possessive pronoun": 0.12, "related": 0.15}


# Relations


RELATIONS = (
    ("determiner", "noun"),
    ("adjective", "noun"),
    ("subject", "verb"),
    ("far subject", "verb"),
    ("verb", "object"),
    ("preposition", "preposition's noun"),
    ("relative pronoun", "antecedent"),
    ("pronoun", "antecedent"),
    ("reflexive", "antecedent"),
    ("possessive pronoun", "antecedent"),
    ("possessor", "possessed"),
    ("auxiliary", "verb"),
    ("first conjunct", "second conjunct"),
)
RELATED = ("noun > later related noun", "noun > earlier related noun")
PRONOUNS = {
    "pronoun": ("he", "she"),
    "reflexive": ("himself", "herself"),
    "possessive pronoun": ("his", "her"),
}
ITEM = "item"  # in a list of nouns
LEAST = 60
GLUED = ("'s", ".", ",", "?")  # written without a space before them

Relation = tuple[str, int, int]  # its name, a word, the word it belongs to


@dataclass(frozen=True)
class Sentence:
    """Words, their classes, and which belongs to which.

    Attributes:
        relations: (name "word > related word", number of the word, number of the related one).
        half: 0 for choosing, 1 for judging.
        group: sentences of one group have their words in common, so that they count as one draw; None: it is
            a draw by itself.
        pair: the same in two sentences that differ only in he and she.
    """

    words: tuple[str, ...]
    classes: tuple[str, ...]
    relations: tuple[Relation, ...]
    half: int = 0
    group: int | None = None
    pair: int | None = None

    def __post_init__(self) -> None:
        """Raise `ArgumentError` for words without a class, a third half, or a relation to no other word."""
        count = len(self.words)
        if not count or isinstance(self.words, str) or len(self.classes) != count:
            raise ArgumentError(
                f"classes must be one per word: got {len(self.classes)} for the words {self.words!r}; give a "
                "tuple of each"
            )
        if self.half not in (0, 1):
            raise ArgumentError(
                f"half must be 0 for choosing or 1 for judging: got {self.half!r}; choose one"
            )
        for name, source, target in self.relations:
            if source == target or not (0 <= source < count and 0 <= target < count):
                raise ArgumentError(
                    f"relations must join two words of the sentence: {name!r} joins {source} and {target} of "
                    f"{count}; count from 0"
                )

    @property
    def text(self) -> str:
        """As it is written.

        Example:
            >>> Sentence(("The", "farmer", "'s", "dog", "slept", "."), ("",) * 6, ()).text
            "The farmer's dog slept."
        """
        return "".join(word if word in GLUED or not at else f" {word}" for at, word in enumerate(self.words))

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Where each word begins and ends in the text."""
        spans, end = [], 0
        for at, word in enumerate(self.words):
            start = end + (at > 0 and word not in GLUED)
            end = start + len(word)
            spans.append((start, end))
        return spans


# From shapes to sentences


@dataclass
class _Draft:
    """A sentence that is being built."""

    half: int
    draw: random.Random
    words: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)  # the list of each word
    relations: list[Relation] = field(default_factory=list)

    def build(self, rule: str) -> int:
        """Add the words of a rule; return the number of its head."""
        slots: list[tuple[set[str], int]] = []
        head = None
        for slot in rule.split():
            if slot.endswith("?") and slot != "?":
                if self.draw.random() < 0.5:
                    continue
                slot = slot[:-1]
            names, _, source = slot.lstrip("*").rpartition("=")
            at = self.add(source)
            slot_names = {name.replace("_", " ") for name in names.split("+")} if names else set()
            if not names and source not in PARTS:
                slot_names = {self.classes[at]}
            slots.append((slot_names, at))
            head = at if slot.startswith("*") or head is None else head
        for number, (slot_names, at) in enumerate(slots):
            for other_names, other in slots[number + 1 :]:
                self.relate(slot_names, at, other_names, other)
        assert head is not None
        return head

    def add(self, source: str) -> int:
        """Add a phrase, a word of a list, or a literal word; return the number of its head."""
        if source in PARTS:
            return self.build(self.draw.choice(PARTS[source]))
        if source in WORDS:
            words = WORDS[source][self.half].split()
            unused = [word for word in words if source in CLOSED or word not in self.words]
            word, word_class = self.draw.choice(unused or words), CLASSES.get(source, source)
        else:
            word, word_class = source, _class_of(source)
        self.words.append(word)
        self.classes.append(word_class)
        self.lists.append(source)
        return len(self.words) - 1

    def relate(self, names: set[str], at: int, other_names: set[str], other: int) -> None:
        """Add both directions of each relation between the names of two slots."""
        for first, second in RELATIONS:
            if first in names and second in other_names:
                self.relations += _both_directions(first, at, second, other)
            elif second in names and first in other_names:
                self.relations += _both_directions(first, other, second, at)

    def sentence(self, pair: int | None = None) -> Sentence:
        """Return the sentence, with the relations whose related word is unique."""
        words = list(self.words)
        for at, word in enumerate(words[:-1]):
            if word == "a" and words[at + 1][0] in "aeiou":
                words[at] = "an"
        words[0] = words[0].capitalize()
        counts = Counter(relation[:2] for relation in self.relations)
        unique = tuple(relation for relation in self.relations if counts[relation[:2]] == 1)
        return Sentence(tuple(words), tuple(self.classes), unique, self.half, pair=pair)


def _both_directions(first: str, at: int, second: str, other: int) -> list[Relation]:
    """Return a relation in both directions."""
    return [(f"{first} > {second}", at, other), (f"{second} > {first}", other, at)]


def _class_of(word: str) -> str:
    """Return the class of a literal word of a shape."""
    for name, words in CLOSED.items():
        if word in words.split():
            return CLASSES.get(name, name)
    for name, forms in PRONOUNS.items():
        if word in forms:
            return name
    return "noun" if word == ITEM else word


def sentences(count: int = 700, seed: int = 0) -> list[Sentence]:
    """Return about `count` sentences, half of them for choosing heads, half for judging them.

    Raises:
        ArgumentError: too few for every shape to have its turn.

    Example:
        >>> len(sentences(120)) <= 120, sentences(120)[0].text == sentences(120)[0].text
        (True, True)
    """
    if count < LEAST:
        raise ArgumentError(f"sentences must be at least {LEAST}: got {count}; 700 is usual")
    draw = random.Random(seed)
    result: list[Sentence] = []
    shapes: set[tuple[str, ...]] = set()  # of the first half, which the second must not have
    for half in (0, 1):
        for kind, share in MIXED.items():
            total = round(count / 2 * share)
            size = 4 if kind in PRONOUNS else 1
            rules = SHAPES[kind][half]
            for number in range(total // size):
                while True:
                    group = list(_group(kind, rules[number % len(rules)], half, draw))
                    if half == 0 or group[0].classes not in shapes:
                        break
                shapes.update([group[0].classes] if half == 0 else [])
                at, pair = len(result), len(result)
                result += [
                    replace(sentence, group=at, pair=None if sentence.pair is None else pair + sentence.pair)
                    for sentence in group
                ]
    return result


def _group(kind: str, rule: str, half: int, draw: random.Random) -> Iterator[Sentence]:
    """Yield the sentences of one draw of a shape: one, or four with two people."""
    draft = _Draft(half, draw)
    draft.build(rule)
    if kind == "related":
        _fill_items(draft)
    if kind not in PRONOUNS:
        yield draft.sentence()
        return
    places = draft.lists.index("male"), draft.lists.index("female")
    pronouns = [at for at, word_class in enumerate(draft.classes) if word_class == kind]
    names, plain = [draft.words[at] for at in places], draft.relations
    for order in (0, 1):
        for gender in (0, 1):
            draft.words[places[order]], draft.words[places[1 - order]] = names
            draft.relations = list(plain) if order == gender == 0 else []
            for number, at in enumerate(pronouns):  # a second pronoun refers to the other person
                gender_of_word = (gender + number) % 2
                draft.words[at] = PRONOUNS[kind][gender_of_word]
                antecedent = places[(order + gender_of_word) % 2]
                draft.relations += _both_directions(kind, at, "antecedent", antecedent)
            yield draft.sentence(pair=order)


def _fill_items(draft: _Draft) -> None:
    """Fill the places of a list with nouns: two that are related, and one each of other pairs."""
    draw, places = draft.draw, [at for at, word in enumerate(draft.words) if word == ITEM]
    pairs = [pair.split() for pair in PAIRS[draft.half].split(",")]
    chosen, *rest = draw.sample(pairs, len(places) - 1)
    draw.shuffle(chosen)
    distance = draw.randrange(1, len(places))  # every distance is equally likely
    start = draw.randrange(len(places) - distance)
    first, second = places[start], places[start + distance]
    words = {first: chosen[0], second: chosen[1]}
    for at in places:
        draft.words[at] = words[at] if at in words else draw.choice(rest.pop())
    draft.relations = [(RELATED[0], first, second), (RELATED[1], second, first)]
