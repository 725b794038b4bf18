"""Behaviours: what a causal language model predicts if it knows which words of a sentence belong together.

A behaviour is a list of pairs of prompts that differ in one place, each with two answers: the first is right
after the first prompt, the second after the second.

    The king met the nurse yesterday, and he said: I am the     king, not nurse
    The king met the nurse yesterday, and she said: I am the    nurse, not king

A model that does not attend to that place predicts the same both times, is right once, and so has an accuracy
of exactly one half, whatever its probabilities. `BEHAVIOURS` is the table. To add a behaviour, add its entry.

`RoleEffects` are the effects of switching off the heads of roles:

    margin     log P(right answer) - log P(wrong answer), in nats, mean over prompts; 0: it cannot tell
    accuracy   the share of prompts with a margin above 0
    change     margin without the heads - margin of the whole model
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, overload

from ..errors import ArgumentError, needed
from .layer_names import Layer

if TYPE_CHECKING:
    import pandas

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
        """Return `count` pairs, always the same ones; fewer if there are no more.

        Frames take turns, and so do changes, so that each is there about as often as the others.

        Example:
            >>> behaviour = Behaviour("number", (), ("The *",), (Change(("dog", "dogs"), ("is", "are")),))
            >>> behaviour.pairs()
            (Pair(prompts=('The dog', 'The dogs'), answers=(' is', ' are')),)
        """
        draw = random.Random(self.name)
        pairs: dict[Pair, None] = {}
        order = list(itertools.product(self.changes, self.frames))
        draw.shuffle(order)
        for _ in range(16):  # rounds, with different words in the slots
            for change, frame in order:
                if len(pairs) == count:
                    return tuple(pairs)
                pairs[_filled(frame, change, draw)] = None
        return tuple(pairs)


def behaviours_of(relation: str) -> tuple[Behaviour, ...]:
    """Return the behaviours that may depend on the heads of a relation.

    Example:
        >>> [behaviour.name for behaviour in behaviours_of("verb > auxiliary")]
        ['form after an auxiliary']
    """
    return tuple(behaviour for behaviour in BEHAVIOURS if relation in behaviour.relations)


def _filled(frame: str, change: Change, draw: random.Random) -> Pair:
    """Return the pair of prompts of a frame and a change, with drawn words in the slots."""
    slots = re.findall(r"\{(\w+)\}", "".join((frame, *change.words, *change.answers)))
    used = set(" ".join(change.words).split())
    chosen = {name: draw.choice([word for word in WORDS[name] if word not in used]) for name in slots}
    first, second = (frame.replace(CHANGED, word).format(**chosen) for word in change.words)
    first_answer, second_answer = (f" {text}".format(**chosen) for text in change.answers)
    return Pair((first[0].upper() + first[1:], second[0].upper() + second[1:]), (first_answer, second_answer))


# Words

MEN = "king father boy uncle brother waiter actor prince husband son man monk".split()
WOMEN = "queen mother girl aunt sister waitress actress princess wife daughter woman nun".split()
PEOPLE = "farmer teacher doctor soldier painter driver singer lawyer writer student baker nurse".split()
OBJECTS = "letter bottle window box table book picture key ring bag coat lamp".split()
NOUNS = "dog cat horse bird tree house boat car stone flower road garden".split()
WORDS: dict[str, Sequence[str]] = {
    "man": MEN,
    "woman": WOMEN,
    "person": PEOPLE,
    "thing": OBJECTS,
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
    """Return pairs of words, written as is/are."""
    return tuple((first, second) for first, _, second in (pair.partition("/") for pair in text.split()))


NUMBERS = _words("is/are was/were has/have")  # singular and plural of verbs


def _agreeing(nouns: Sequence[str]) -> tuple[Change, ...]:
    """Return changes from singular to plural nouns, with the verb of each."""
    verbs = itertools.cycle(NUMBERS)
    return tuple(Change((noun, f"{noun}s"), next(verbs)) for noun in nouns)


def _genders(answers: tuple[str, str]) -> tuple[Change, ...]:
    """Return changes from a man to a woman, with the same answers."""
    return tuple(Change(words, answers) for words in zip(MEN, WOMEN, strict=True))


def _listed(text: str) -> tuple[Change, ...]:
    """Return changes written as first words/second words/their answers, with _ for a space."""
    rows = (line.replace("_", " ").split("/") for line in text.split())
    return tuple(
        Change((first, second), (first_answer, second_answer))
        for first, second, first_answer, second_answer in rows
    )


SUBJECT = ("verb > subject", "verb > far subject")

BEHAVIOURS: tuple[Behaviour, ...] = (
    Behaviour(
        "whom a pronoun means",
        ("pronoun > antecedent",),
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
        ("pronoun > antecedent",),
        (
            "the * lost the {thing} {time} because",
            "the * opened the {thing}, and then",
            "{time} the * was sure that",
        ),
        _genders(("he", "she")),
    ),
    Behaviour(
        "whom a reflexive means",
        ("reflexive > antecedent",),
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
        ("reflexive > antecedent",),
        ("the * {time} hurt", "{time} the * killed", "the * who {saw} the {person} only loved"),
        _genders(("himself", "herself")),
    ),
    Behaviour(
        "whom a possessive means",
        ("possessive pronoun > antecedent",),
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
        ("possessive pronoun > antecedent",),
        ("the * {time} sold", "{time} the * lost", "the * who {saw} the {person} came home with"),
        _genders(("his", "her")),
    ),
    Behaviour(
        "whose it is",
        ("possessed > possessor",),
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
        ("noun > determiner",),
        ("we {found} * {adjective}", "{time} we {found} * very {adjective}", "I like *"),
        tuple(
            Change(words, (noun, f"{noun}s"))
            for noun in NOUNS
            for words in _words("this/these that/those every/many each/several")
        ),
    ),
    Behaviour(
        "number of a sheep",
        ("noun > determiner",),
        ("* {adjective} {same}", "I think that * very {adjective} {same}", "{time} * {same}"),
        tuple(
            Change(words, verbs)
            for words in _words("this/these that/those every/many one/two")
            for verbs in NUMBERS
        ),
    ),
    Behaviour(
        "which adjective",
        ("noun > adjective",),
        ("the {person} had *. The {noun} was", "{time} we {found} *. The {noun} was"),
        tuple(
            Change((f"a {a} {{noun}} and a {b} {{thing}}", f"a {b} {{noun}} and a {a} {{thing}}"), (a, b))
            for a, b in _words("red/blue green/white black/brown dirty/clean big/small")
        ),
    ),
    Behaviour(
        "object of a verb",
        ("object > verb",),
        ("the {person} * the", "{time} the {person} * the", "the {adjective} {person} often * the"),
        _listed("""
            drank/read/coffee/book      ate/drove/bread/car         rode/sang/horse/song
            wrote/climbed/letter/tree   cooked/played/dinner/game   wore/crossed/coat/road
            fed/opened/dog/door         lit/spent/fire/money        poured/told/water/story
        """),
    ),
    Behaviour(
        "what became of an object",
        ("object > verb",),
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
        ("preposition's noun > preposition",),
        ("the {person} slept *", "{time} the {person} stood *", "the {adjective} {person} {adverb} worked *"),
        _listed("""
            during_the/inside_the/night/house     until_the/behind_the/morning/door
            since_the/beside_the/war/river        during_the/under_the/winter/bridge
            until_the/near_the/evening/station    during_the/at_the/summer/market
        """),
    ),
    Behaviour(
        "where a thing is",
        ("preposition's noun > preposition",),
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
        ("relative pronoun > antecedent",),
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
        ("verb > auxiliary",),
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
        ("second conjunct > first conjunct",),
        (
            "the {man} * the {woman}",
            "the {adjective} {woman} * the {man}",
            "{time} the {man} * the {adjective} {woman}",
        ),
        tuple(
            Change(("and", other), (plural, singular))
            for other in ("near", "with", "behind", "beside")
            for singular, plural in NUMBERS
        ),
    ),
    Behaviour(
        "related noun",
        ("noun > earlier related noun",),
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


# Effects of switching off the heads of a role


TITLES = {  # of the behaviours whose names do not explain themselves; results are stored under the names
    "whom a pronoun means": "antecedent of a pronoun",
    "whose it is": "possessor",
    "number of a sheep": "number, invariant noun",
    "which adjective": "adjective of a noun",
    "what became of an object": "state of an object",
    "where a thing is": "place of an object",
    "number after who": 'number after "who"',
    "number after and": 'number after "and"',
}
KINDS = {  # kinds of verdicts that need more words
    "not able": "model not able",
    "no others": "no other heads to compare with",
    "no more than others": "no more than other heads",
}
WIDTH = 80  # columns of a terminal
FEWEST = 8  # pairs of prompts needed for a verdict
LEAST = 0.05  # share of the margin: a smaller change is no effect, whatever its interval

Place = tuple[Layer, int]  # layer, head


@dataclass(frozen=True)
class RoleEffect:
    """One behaviour with the heads of one role on and off; numbers as described above.

    Attributes:
        relation, behaviour: the names of the role and of the behaviour.
        heads: (layer, head) of those switched off.
        left_on: heads of the role that stayed on: half of a layer's heads at most is switched off.
        pairs: pairs of prompts that were asked.
        dropped: pairs that were not, since the tokenizer cuts their two answers into unlike numbers of
            tokens, or an answer not apart from its prompt.
        margin, accuracy: of the whole model.
        margin_low, margin_high: the 95% interval of its margin.
        off, off_accuracy: without the heads.
        change, low, high: of the margin, with its 95% interval, paired over the pairs of prompts.
        draws: the change by each draw of as many other heads of the same layers.
        more_low, more_high: the 95% interval of change - mean change of the draws, paired likewise.
        every_draw: whether those are all the draws there are.
    """

    relation: str
    behaviour: str
    heads: tuple[Place, ...]
    left_on: tuple[Place, ...]
    pairs: int
    dropped: int
    margin: float
    margin_low: float
    margin_high: float
    accuracy: float
    off: float
    off_accuracy: float
    change: float
    low: float
    high: float
    draws: tuple[float, ...]
    more_low: float
    more_high: float
    every_draw: bool

    @property
    def title(self) -> str:
        """The name of the behaviour as tables show it."""
        return TITLES.get(self.behaviour, self.behaviour)

    @property
    def as_much(self) -> int:
        """How many of the draws lower the margin at least as much."""
        return sum(change <= self.change for change in self.draws)

    @property
    def kind(self) -> str:
        """The verdict in a word or two.

        "too few prompts", "not able" (the whole model does not behave so), "no effect" (the interval of the
        change holds 0, or the change is less than a twentieth of the margin), "raised", "no others" (the
        layers have none to compare with), "no more than others" (a draw does as much, or the interval of the
        difference from the draws holds 0), or "effect".
        """
        if self.pairs < FEWEST:
            return "too few prompts"
        if not self.margin_low > 0:
            return "not able"
        if not (self.low > 0 or self.high < 0) or abs(self.change) < LEAST * self.margin:
            return "no effect"
        if self.change > 0:
            return "raised"
        if not self.draws:
            return "no others"
        return "no more than others" if self.as_much or not self.more_high < 0 else "effect"

    @property
    def verdict(self) -> str:
        """One sentence."""
        heads = _named(self.heads)
        accuracy = f"accuracy {self.accuracy:.2f} to {self.off_accuracy:.2f}"
        numbers = f"from {self.margin:.2f} to {self.off:.2f} nats ({accuracy})"
        count = len(self.draws)
        draws = (
            f"the {count} other choices of heads" if self.every_draw else f"{count} random choices of heads"
        )
        some = (
            f"{self.as_much} of {draws} lower it as much"
            if self.as_much
            else f"on average, {draws} lower it as much"
        )
        lowers = f"Switching off {heads} lowers the margin {numbers}"
        sentences = {
            "too few prompts": f"{self.pairs} pairs can be used with this tokenizer: too few to measure "
            "an effect.",
            "not able": "With all heads on, the model does not show this behaviour (margin "
            f"{self.margin:.2f} nats, 95% interval {self.margin_low:.2f} to {self.margin_high:.2f}; "
            f"accuracy {self.accuracy:.2f}), so no effect can be measured.",
            "no effect": f"No effect: switching off {heads} changes the margin {numbers}; 95% interval of "
            f"the change: {self.low:+.2f} to {self.high:+.2f}.",
            "raised": f"Switching off {heads} raises the margin {numbers}; "
            f"{self.as_much} of {draws} raise it less.",
            "no others": f"{lowers}; the layer has no other heads to compare with, "
            "so the effect cannot be attributed to this role.",
            "no more than others": f"{lowers}; {some}, so the effect is not specific to this role.",
            "effect": f"{lowers}; none of {draws} lowers it as much.",
        }
        return sentences[self.kind]


class RoleEffects(Sequence[RoleEffect]):
    """What `role_effects` found, a row for each role and behaviour; print it.

    Attributes:
        unasked: roles that were found, and for which there is no behaviour in the table.
        method: how heads were switched off.
    """

    def __init__(self, rows: Sequence[RoleEffect], unasked: Sequence[str], method: str) -> None:
        self.rows, self.unasked, self.method = tuple(rows), tuple(unasked), method

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> RoleEffect: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[RoleEffect, ...]: ...

    def __getitem__(self, index: int | slice) -> RoleEffect | tuple[RoleEffect, ...]:
        return self.rows[index]

    def __repr__(self) -> str:
        kinds = Counter(row.kind for row in self.rows)
        counts = ", ".join(f"{KINDS.get(kind, kind)}: {count}" for kind, count in kinds.items())
        return f"RoleEffects({counts or 'none'})"

    def __str__(self) -> str:
        """Return a table of at most 80 columns, then each row's sentence."""
        if not self.rows and not self.unasked:
            return "No role was found, so there are no heads to switch off."
        lines = []
        if self.rows:
            width = max(len(row.title) for row in self.rows)
            lines.append(
                f"{'behaviour':{width}} {'margin':>6} {'off':>6} {'change, 95%':>20} {'draws':>12} as much"
            )
            for row in self.rows:
                change = f"{row.change:+.2f} {row.low:+.2f} {row.high:+.2f}"
                draws = f"{min(row.draws):+.2f} {max(row.draws):+.2f}" if row.draws else "-"
                share = f"{row.as_much}/{len(row.draws)}"
                lines.append(
                    f"{row.title:{width}} {row.margin:6.2f} {row.off:6.2f} {change:>20} {draws:>12} "
                    f"{share:>7}"
                )
        for row in self.rows:
            text = f"{row.relation}, {row.title} ({2 * row.pairs} prompts): {row.verdict}"
            lines += ["", *textwrap.wrap(text, WIDTH)]
        notes = []
        if self.unasked:
            notes.append(
                f"Not measured: {', '.join(self.unasked)} (no behaviour is defined for these roles)."
            )
        dropped = sum(row.dropped for row in self.rows)
        if dropped:
            notes.append(
                f"{dropped} pairs were left out: their two answers have different numbers of tokens."
            )
        left_on = [f"{_named(row.left_on)} ({row.relation})" for row in self.rows if row.left_on]
        if left_on:
            notes.append(
                f"Left on, since at most half of a layer's heads are switched off: "
                f"{', '.join(dict.fromkeys(left_on))}."
            )
        if self.rows:
            notes.append(
                f"The output of a switched-off head is replaced by its {self.method} over the behaviour's "
                "prompts."
            )
        return "\n".join([*lines, "", *textwrap.wrap(" ".join(notes), WIDTH)]).strip()

    def to_json(self) -> str:
        """Return the results as JSON, with null for NaN; `from_json` reads it back."""
        rows = [asdict(row) | {"kind": row.kind, "verdict": row.verdict} for row in self.rows]
        effects = [{name: None if x != x else x for name, x in row.items()} for row in rows]  # NaN is none
        return json.dumps({"method": self.method, "unasked": self.unasked, "effects": effects}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> RoleEffects:
        """Return the results in a text of `to_json`.

        Raises:
            ArgumentError: something else.
        """
        try:
            data = json.loads(text)
            rows: list[dict[str, Any]] = [
                {name: math.nan if row[name] is None else row[name] for name in RoleEffect.__annotations__}
                for row in data["effects"]
            ]
            for row in rows:
                row |= {name: tuple(map(tuple, row[name])) for name in ("heads", "left_on")}
                row["draws"] = tuple(row["draws"])
            return cls([RoleEffect(**row) for row in rows], data["unasked"], data["method"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ArgumentError(
                f"text must be the output of RoleEffects.to_json: {type(error).__name__}: {error}; measure "
                "the effects again"
            ) from error

    def to_pandas(self) -> pandas.DataFrame:
        """Return a row per role and behaviour.

        Raises:
            PackageMissing: pandas is not installed.
        """
        with needed("pandas", "to_pandas needs pandas"):
            import pandas
        more = ("as_much", "kind", "verdict")
        rows = [asdict(row) | {name: getattr(row, name) for name in more} for row in self.rows]
        return pandas.DataFrame(rows)


def _named(heads: Sequence[Place]) -> str:
    """Return heads as text."""
    return ", ".join(f"{layer}.{head}" for layer, head in heads)
