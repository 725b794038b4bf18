"""A small grammar of English, as data: sentences in which it is known which word belongs to which.

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
MOVING = {"pronoun": ("he", "she"), "reflexive": ("himself", "herself"), "possessive pronoun": ("his", "her")}
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
        """Raises `ArgumentError` for words without a class, a third half, a relation to no other word."""
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
    """A sentence while it is made."""

    half: int
    draw: random.Random
    words: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)  # which list each word is from
    relations: list[Relation] = field(default_factory=list)

    def build(self, rule: str) -> int:
        """Add the words of a rule; the number of its head's."""
        slots: list[tuple[set[str], int]] = []
        head = None
        for slot in rule.split():
            if slot.endswith("?") and slot != "?":
                if self.draw.random() < 0.5:
                    continue
                slot = slot[:-1]
            names, _, what = slot.lstrip("*").rpartition("=")
            at = self.add(what)
            called = {name.replace("_", " ") for name in names.split("+")} if names else set()
            if not names and what not in PARTS:
                called = {self.classes[at]}
            slots.append((called, at))
            head = at if slot.startswith("*") or head is None else head
        for number, (called, at) in enumerate(slots):
            for others, other in slots[number + 1 :]:
                self.relate(called, at, others, other)
        assert head is not None
        return head

    def add(self, what: str) -> int:
        """Add a phrase, a word of a list, or this very word; the number of its head."""
        if what in PARTS:
            return self.build(self.draw.choice(PARTS[what]))
        if what in WORDS:
            words = WORDS[what][self.half].split()
            fresh = [word for word in words if what in CLOSED or word not in self.words]
            word, kind = self.draw.choice(fresh or words), CLASSES.get(what, what)
        else:
            word, kind = what, _class_of(what)
        self.words.append(word)
        self.classes.append(kind)
        self.lists.append(what)
        return len(self.words) - 1

    def relate(self, called: set[str], at: int, others: set[str], other: int) -> None:
        """Add both directions of each relation that two slots have the names of."""
        for one, two in RELATIONS:
            if one in called and two in others:
                self.relations += _both_ways(one, at, two, other)
            elif two in called and one in others:
                self.relations += _both_ways(one, other, two, at)

    def sentence(self, pair: int | None = None) -> Sentence:
        """The words as they are written, with the relations that have one answer each."""
        words = list(self.words)
        for at, word in enumerate(words[:-1]):
            if word == "a" and words[at + 1][0] in "aeiou":
                words[at] = "an"
        words[0] = words[0].capitalize()
        answers = Counter(relation[:2] for relation in self.relations)
        clear = tuple(relation for relation in self.relations if answers[relation[:2]] == 1)
        return Sentence(tuple(words), tuple(self.classes), clear, self.half, pair=pair)


def _both_ways(one: str, at: int, two: str, other: int) -> list[Relation]:
    return [(f"{one} > {two}", at, other), (f"{two} > {one}", other, at)]


def _class_of(word: str) -> str:
    """What a word is that stands in a shape by itself."""
    for name, words in CLOSED.items():
        if word in words.split():
            return CLASSES.get(name, name)
    for name, forms in MOVING.items():
        if word in forms:
            return name
    return "noun" if word == ITEM else word


def sentences(count: int = 700, seed: int = 0) -> list[Sentence]:
    """As many sentences as asked for, or a few less: half of them for choosing, half for judging.

    Raises:
        ArgumentError: too few for every shape to have its turn.

    Example:
        >>> len(sentences(120)) <= 120, sentences(120)[0].text == sentences(120)[0].text
        (True, True)
    """
    if count < LEAST:
        raise ArgumentError(f"sentences must be at least {LEAST}: got {count}; 700 is usual")
    draw = random.Random(seed)
    made: list[Sentence] = []
    shapes: set[tuple[str, ...]] = set()  # of the first half: none of them is in the second
    for half in (0, 1):
        for kind, share in MIXED.items():
            room = round(count / 2 * share)
            size = 4 if kind in MOVING else 1
            rules = SHAPES[kind][half]
            for number in range(room // size):
                while True:
                    group = list(_group(kind, rules[number % len(rules)], half, draw))
                    if half == 0 or group[0].classes not in shapes:
                        break
                shapes.update([group[0].classes] if half == 0 else [])
                at, pair = len(made), len(made)
                made += [
                    replace(one, group=at, pair=None if one.pair is None else pair + one.pair)
                    for one in group
                ]
    return made


def _group(kind: str, rule: str, half: int, draw: random.Random) -> Iterator[Sentence]:
    """The sentences that one draw of a shape gives: one, or four of two people."""
    draft = _Draft(half, draw)
    draft.build(rule)
    if kind == "related":
        _fill(draft)
    if kind not in MOVING:
        yield draft.sentence()
        return
    places = draft.lists.index("male"), draft.lists.index("female")
    moving = [at for at, kind_of in enumerate(draft.classes) if kind_of == kind]
    names, plain = [draft.words[at] for at in places], draft.relations
    for order in (0, 1):
        for gender in (0, 1):
            draft.words[places[order]], draft.words[places[1 - order]] = names
            draft.relations = list(plain) if order == gender == 0 else []
            for number, at in enumerate(moving):  # a second pronoun is of the other one
                theirs = (gender + number) % 2
                draft.words[at] = MOVING[kind][theirs]
                antecedent = places[(order + theirs) % 2]
                draft.relations += _both_ways(kind, at, "antecedent", antecedent)
            yield draft.sentence(pair=order)


def _fill(draft: _Draft) -> None:
    """Nouns for the places of a list: two that are related, and one each of other pairs."""
    draw, places = draft.draw, [at for at, word in enumerate(draft.words) if word == ITEM]
    pairs = [pair.split() for pair in PAIRS[draft.half].split(",")]
    chosen, *others = draw.sample(pairs, len(places) - 1)
    draw.shuffle(chosen)
    apart = draw.randrange(1, len(places))  # as often far as near
    start = draw.randrange(len(places) - apart)
    first, second = places[start], places[start + apart]
    words = {first: chosen[0], second: chosen[1]}
    for at in places:
        draft.words[at] = words[at] if at in words else draw.choice(others.pop())
    draft.relations = [(RELATED[0], first, second), (RELATED[1], second, first)]
