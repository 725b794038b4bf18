"""Behaviours: what a causal language model says next if it knows which words of a sentence belong together.

They are stated before any head is switched off. Each is a list of pairs of prompts that differ in one place,
and of two answers: the first is right after the first prompt, the second after the second.

    The king met the nurse yesterday, and he said: I am the     king, not nurse
    The king met the nurse yesterday, and she said: I am the    nurse, not king

A model that does not look at that place says the same both times, is right once, and so gets exactly one
half, however likely it thinks either answer. `BEHAVIOURS` is the table. To add one, add its entry.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BEHAVIOURS", "COUNT", "WORDS", "Behaviour", "Change", "Pair", "behaviours_of"]

COUNT = 32  # pairs per behaviour
CHANGED = "*"  # where the two prompts of a pair differ, in a frame


@dataclass(frozen=True)
class Pair:
    """Two prompts that differ in one place, and what comes next after each."""

    prompts: tuple[str, str]
    answers: tuple[str, str]  # each with the space before it


@dataclass(frozen=True)
class Change:
    """What stands in the first prompt and in the second, and the answer to each.

    Slots, such as {man}, are filled from `WORDS`, in both alike.
    """

    words: tuple[str, str]
    answers: tuple[str, str]


@dataclass(frozen=True)
class Behaviour:
    """Something a model can do or not.

    Attributes:
        name: for tables.
        relations: whose heads may be what does it, by the names of `headwise.roles`.
        frames: prompts with * where the two of a pair differ and {slots} where both have the same word.
        changes: what to put there.
    """

    name: str
    relations: tuple[str, ...]
    frames: tuple[str, ...]
    changes: tuple[Change, ...]

    def pairs(self, count: int = COUNT) -> tuple[Pair, ...]:
        """So many pairs, the same ones every time; fewer where there are no more.

        Frames take turns, and so do changes, so that each is there about as often as the others.

        Example:
            >>> behaviour = Behaviour("number", (), ("The *",), (Change(("dog", "dogs"), ("is", "are")),))
            >>> behaviour.pairs()
            (Pair(prompts=('The dog', 'The dogs'), answers=(' is', ' are')),)
        """
        draw = random.Random(self.name)
        made: dict[Pair, None] = {}
        order = list(itertools.product(self.changes, self.frames))
        draw.shuffle(order)
        for _ in range(16):  # rounds, in which words of the slots differ
            for change, frame in order:
                if len(made) == count:
                    return tuple(made)
                made[_filled(frame, change, draw)] = None
        return tuple(made)


def behaviours_of(relation: str) -> tuple[Behaviour, ...]:
    """Those that may rest on the heads of a relation.

    Example:
        >>> [behaviour.name for behaviour in behaviours_of("verb > auxiliary")]
        ['form after an auxiliary']
    """
    return tuple(behaviour for behaviour in BEHAVIOURS if relation in behaviour.relations)


def _filled(frame: str, change: Change, draw: random.Random) -> Pair:
    slots = re.findall(r"\{(\w+)\}", "".join((frame, *change.words, *change.answers)))
    used = set(" ".join(change.words).split())
    chosen = {name: draw.choice([word for word in WORDS[name] if word not in used]) for name in slots}
    first, second = (frame.replace(CHANGED, word).format(**chosen) for word in change.words)
    one, other = (f" {answer}".format(**chosen) for answer in change.answers)
    return Pair((first[0].upper() + first[1:], second[0].upper() + second[1:]), (one, other))


# Words

MEN = "king father boy uncle brother waiter actor prince husband son man monk".split()
WOMEN = "queen mother girl aunt sister waitress actress princess wife daughter woman nun".split()
PEOPLE = "farmer teacher doctor soldier painter driver singer lawyer writer student baker nurse".split()
THINGS = "letter bottle window box table book picture key ring bag coat lamp".split()
NOUNS = "dog cat horse bird tree house boat car stone flower road garden".split()
WORDS: dict[str, Sequence[str]] = {
    "man": MEN,
    "woman": WOMEN,
    "person": PEOPLE,
    "thing": THINGS,
    "noun": NOUNS,
    "adjective": "old small quiet strange young tall tired famous".split(),
    "time": ["yesterday", "today", "last week", "this morning", "one day", "long ago"],
    "place": "river bridge market church station school garden road".split(),
    "places": "rivers bridges markets churches stations schools gardens roads".split(),
    "saw": "saw met called helped watched".split(),  # somebody
    "found": "found saw liked noticed wanted".split(),  # something
    "same": "sheep fish deer aircraft salmon".split(),  # one or many
    "large": "table bed chair wall tree house".split(),
    "adverb": "often never always already probably usually".split(),
}


def _words(text: str) -> tuple[tuple[str, str], ...]:
    """Pairs such as is/are."""
    return tuple((one, other) for one, _, other in (pair.partition("/") for pair in text.split()))


NUMBERS = _words("is/are was/were has/have")  # of verbs


def _agreeing(nouns: Sequence[str]) -> tuple[Change, ...]:
    """One and many of each noun, and a verb for each."""
    verbs = itertools.cycle(NUMBERS)
    return tuple(Change((noun, f"{noun}s"), next(verbs)) for noun in nouns)


def _genders(answers: tuple[str, str]) -> tuple[Change, ...]:
    """A man and a woman, as the one who is meant."""
    return tuple(Change(words, answers) for words in zip(MEN, WOMEN, strict=True))


def _listed(text: str) -> tuple[Change, ...]:
    """A line each: first words, second words, their answers, with _ for a space."""
    rows = (line.replace("_", " ").split("/") for line in text.split())
    return tuple(Change((first, second), (one, other)) for first, second, one, other in rows)


# What may rest on the heads of which relation

PRONOUN = ("pronoun > antecedent",)
REFLEXIVE = ("reflexive > antecedent",)
POSSESSIVE = ("possessive pronoun > antecedent",)
POSSESSOR = ("possessed > possessor",)
SUBJECT = ("verb > subject", "verb > far subject")
DETERMINER = ("noun > determiner",)
ADJECTIVE = ("noun > adjective",)
OBJECT = ("object > verb",)
PREPOSITION = ("preposition's noun > preposition",)
RELATIVE = ("relative pronoun > antecedent",)
AUXILIARY = ("verb > auxiliary",)
COORDINATION = ("second conjunct > first conjunct",)
RELATED = ("noun > earlier related noun",)

BEHAVIOURS: tuple[Behaviour, ...] = (
    Behaviour(
        "whom a pronoun means",
        PRONOUN,
        (
            "the {man} {saw} the {woman} {time}, and * said: I am the",
            "the {woman} {saw} the {man} {time}, and * said: I am the",
            "when the {man} {saw} the {woman}, * said that * was the",
            "when the {woman} {saw} the {man}, * said that * was the",
        ),
        (Change(("he", "she"), ("{man}", "{woman}")),),
    ),
    Behaviour(
        "pronoun's gender",
        PRONOUN,
        (
            "the * lost the {thing} {time} because",
            "the * opened the {thing}, and then",
            "{time} the * was sure that",
        ),
        _genders(("he", "she")),
    ),
    Behaviour(
        "whom a reflexive means",
        REFLEXIVE,
        (
            "the {man} told the {woman} a story about *. The story was about the",
            "the {woman} told the {man} a story about *. The story was about the",
            "{time} the {man} showed the {woman} a picture of *. It was a picture of the",
            "{time} the {woman} showed the {man} a picture of *. It was a picture of the",
        ),
        (Change(("himself", "herself"), ("{man}", "{woman}")),),
    ),
    Behaviour(
        "reflexive's gender",
        REFLEXIVE,
        ("the * {time} hurt", "{time} the * killed", "the * who {saw} the {person} only loved"),
        _genders(("himself", "herself")),
    ),
    Behaviour(
        "whom a possessive means",
        POSSESSIVE,
        (
            "the {man} {saw} the {woman} behind * {thing}. The {thing} belonged to the",
            "the {woman} {saw} the {man} behind * {thing}. The {thing} belonged to the",
            "{time} the {man} showed the {woman} * {thing}. The owner of the {thing} is the",
            "{time} the {woman} showed the {man} * {thing}. The owner of the {thing} is the",
        ),
        (Change(("his", "her"), ("{man}", "{woman}")),),
    ),
    Behaviour(
        "possessive's gender",
        POSSESSIVE,
        ("the * {time} sold", "{time} the * lost", "the * who {saw} the {person} came home with"),
        _genders(("his", "her")),
    ),
    Behaviour(
        "whose it is",
        POSSESSOR,
        ("we {found} *. The {noun} belongs to", "{time} we {found} *. The owner of the {noun} is"),
        tuple(
            Change((f"{a}'s {{noun}} and {b}'s {{thing}}", f"{b}'s {{noun}} and {a}'s {{thing}}"), (a, b))
            for a, b in _words("Anna/Peter Mary/John David/Sarah Tom/Jane Paul/Ruth")
        ),
    ),
    Behaviour(
        "verb number, near",
        SUBJECT,
        ("the *", "the {adjective} *", "{time} the {adjective} *", "I know that the *"),
        _agreeing(PEOPLE),
    ),
    Behaviour(
        "verb number, far",
        SUBJECT,
        (
            "the * near the {adjective} {place}",
            "the * near the {adjective} {places}",
            "the * that the {person} {saw} {time}",
            "the * that the {person}s {saw} {time}",
        ),
        _agreeing(PEOPLE),
    ),
    Behaviour(
        "number after a verb",
        SUBJECT,
        (
            "the * quickly sold",
            "{time} the * lost",
            "the * near the {place} forgot",
            "the * near the {places} forgot",
        ),
        tuple(
            Change((noun, f"{noun}s"), ("his", "their"))
            for noun in "boy brother father king actor prince uncle monk".split()
        ),
    ),
    Behaviour(
        "noun number",
        DETERMINER,
        ("we {found} * {adjective}", "{time} we {found} * very {adjective}", "I like *"),
        tuple(
            Change(words, (noun, f"{noun}s"))
            for noun in NOUNS
            for words in _words("this/these that/those every/many each/several")
        ),
    ),
    Behaviour(
        "number of a sheep",
        DETERMINER,
        ("* {adjective} {same}", "I think that * very {adjective} {same}", "{time} * {same}"),
        tuple(
            Change(words, verbs)
            for words in _words("this/these that/those every/many one/two")
            for verbs in NUMBERS
        ),
    ),
    Behaviour(
        "which adjective",
        ADJECTIVE,
        ("the {person} had *. The {noun} was", "{time} we {found} *. The {noun} was"),
        tuple(
            Change((f"a {a} {{noun}} and a {b} {{thing}}", f"a {b} {{noun}} and a {a} {{thing}}"), (a, b))
            for a, b in _words("red/blue green/white black/brown dirty/clean big/small")
        ),
    ),
    Behaviour(
        "object of a verb",
        OBJECT,
        ("the {person} * the", "{time} the {person} * the", "the {adjective} {person} often * the"),
        _listed("""
            drank/read/coffee/book      ate/drove/bread/car         rode/sang/horse/song
            wrote/climbed/letter/tree   cooked/played/dinner/game   wore/crossed/coat/road
            fed/opened/dog/door         lit/spent/fire/money        poured/told/water/story
        """),
    ),
    Behaviour(
        "what became of an object",
        OBJECT,
        ("the {person} *. Now it is", "{time} the {adjective} {person} *. Then it was"),
        _listed("""
            opened_the_door/closed_the_door/open/closed       opened_the_box/closed_the_box/open/closed
            filled_the_bottle/emptied_the_bottle/full/empty   filled_the_bag/emptied_the_bag/full/empty
            heated_the_water/cooled_the_water/hot/cold        heated_the_room/cooled_the_room/hot/cold
            washed_the_coat/soiled_the_coat/clean/dirty       dried_the_coat/soaked_the_coat/dry/wet
            broke_the_lamp/bought_the_lamp/broken/new         raised_the_price/lowered_the_price/high/low
        """),
    ),
    Behaviour(
        "object of a preposition",
        PREPOSITION,
        ("the {person} slept *", "{time} the {person} stood *", "the {adjective} {person} {adverb} worked *"),
        _listed("""
            during_the/inside_the/night/house     until_the/behind_the/morning/door
            since_the/beside_the/war/river        during_the/under_the/winter/bridge
            until_the/near_the/evening/station    during_the/at_the/summer/market
        """),
    ),
    Behaviour(
        "where a thing is",
        PREPOSITION,
        (
            "the {person} put the {thing} * the {large}. It was",
            "{time} the {thing} lay * the {large}. It is still",
        ),
        _listed("""
            under/behind/under/behind     on/under/on/under         behind/on/behind/on
            in/under/in/under             near/behind/near/behind   beside/under/beside/under
        """),
    ),
    Behaviour(
        "number after who",
        RELATIVE,
        (
            "I know the * who",
            "I know the * near the {place} who",
            "I know the * near the {places} who",
            "this is about the {adjective} * from the {place} who",
        ),
        _agreeing(PEOPLE),
    ),
    Behaviour(
        "form after an auxiliary",
        AUXILIARY,
        (
            "the {person} * {adverb}",
            "the {adjective} {person} * {adverb}",
            "{time} I said that the {person} *",
        ),
        tuple(
            Change(words, forms)
            for words in _words("has/will had/would has/can")
            for forms in _words("seen/see gone/go taken/take given/give written/write fallen/fall")
        ),
    ),
    Behaviour(
        "number after and",
        COORDINATION,
        (
            "the {man} * the {woman}",
            "the {adjective} {woman} * the {man}",
            "{time} the {man} * the {adjective} {woman}",
        ),
        tuple(
            Change(("and", other), (many, one))
            for other in ("near", "with", "behind", "beside")
            for one, many in NUMBERS
        ),
    ),
    Behaviour(
        "related noun",
        RELATED,
        (
            "the * talked about the",
            "{time} the * came home and thought of the",
            "the {adjective} * wrote about the",
        ),
        _listed("""
            doctor/farmer/hospital/field    teacher/sailor/school/sea      judge/pilot/court/plane
            soldier/baker/war/bread         priest/doctor/church/patient   farmer/judge/harvest/law
            sailor/teacher/ship/class       pilot/priest/sky/church        baker/soldier/oven/army
        """),
    ),
)
