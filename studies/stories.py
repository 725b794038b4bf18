# ruff: noqa: E501
"""Plain sentences and short stories written by a grammar of our own, for training mini.

    python -m studies.stories 5              # print five documents

What a person does, has and likes follows from who the person is: "The duke" has his own habits. So what comes
after "he", "his", "who" or a verb can be predicted only by the word that it belongs to, which may stand
far back, behind other people. No noun, verb, adjective or adverb of `headwise.heads.grammar` occurs in it, so
that `headwise.roles` measures a model on words that these sentences never joined.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from headwise.heads import grammar

MALE_NOUNS = (
    "duke lord gentleman nephew grandfather grandson emperor wizard cowboy fisherman policeman bridegroom "
    "shepherd knight merchant gardener butler postman milkman hero gentleman lad stepfather godfather "
    "schoolboy salesman fireman count abbot widower bull rooster grandpa sultan"
).split()
FEMALE_NOUNS = (
    "duchess lady niece grandmother granddaughter empress witch cowgirl bride widow nurse maid "
    "stepmother godmother schoolgirl heroine ballerina countess governess hostess landlady midwife "
    "housewife milkmaid fairy hen grandma mermaid goddess abbess washerwoman stewardess"
).split()
MALE_NAMES = (
    "Tom John Peter Jack Ben Sam James Henry George Paul Max Tim Daniel David Michael Robert William Thomas "
    "Edward Charles Frank Fred Harry Oliver Leo Oscar Simon Martin Adam Alex Andrew Anthony Arthur Billy Bob "
    "Brian Carl Chris Dan Dick Eric Jacob Jim Joe Joseph Kevin Luke Mark Matthew Mike Nick Patrick Philip "
    "Richard Roger Ryan Stephen Steve Walter"
).split()
FEMALE_NAMES = (
    "Anna Mary Lucy Emma Lily Sara Jane Alice Kate Ellen Helen Clara Julia Laura Martha Nancy Susan Amy "
    "Betty Emily Grace Ruth Sophie Mia Ella Eva Elizabeth Margaret Catherine Maria Linda Barbara Karen Lisa "
    "Sandra Ann Annie Carol Diana Dorothy Ellie Fanny Jenny Jessica Judy Kitty Lizzie Maggie Molly Nora "
    "Olivia Polly Rachel Rebecca Sally Sarah Sophia Victoria Zoe"
).split()
# past, base
INTRANSITIVE = (
    "sang sing, jumped jump, swam swim, whistled whistle, sneezed sneeze, shouted shout, prayed pray, "
    "coughed cough, snored snore, wept weep, yawned yawn, trembled tremble, shivered shiver, screamed scream, "
    "whispered whisper, sighed sigh, marched march, rested rest, ran run, fell fall, fished fish, wandered "
    "wander, hummed hum, bowed bow, groaned groan, giggled giggle, blushed blush, hurried hurry, climbed climb, "
    "knelt kneel, sat sit, left leave, spoke speak, thought think, grinned grin, rowed row"
)
MEETINGS = (
    "greeted greet, hugged hug, trusted trust, liked like, loved love, feared fear, invited invite, "
    "teased tease, phoned phone, welcomed welcome, surprised surprise, admired admire, hated hate, "
    "remembered remember, forgot forget, missed miss, recognized recognize, joined join, stopped stop, "
    "chased chase, woke wake, hit hit, caught catch, rescued rescue, heard hear, knew know, needed need, "
    "married marry, scared scare, paid pay"
)
VERBS = (
    "ate eat, brought bring, wanted want, broke break, stole steal, hid hide, opened open, closed close, "
    "washed wash, chose choose, built build, threw throw, picked pick, cooked cook, lifted lift, shook shake, "
    "tied tie, drew draw, held hold, took take, used use, wore wear, counted count, burned burn, filled fill, "
    "fixed fix, baked bake, cut cut, packed pack, borrowed borrow, returned return, found_out find_out"
)
MOVES = (  # past, base, where to
    "pushed push barn, rolled roll cellar, dragged drag yard, delivered deliver shop, threw throw pond, "
    "drove drive airport, took take kitchen's, mailed mail city, raised raise ceiling, lowered lower well, "
    "floated float island, tossed toss corner, swept sweep street's, rushed rush clinic"
)
THINGS = (
    "apple ball toy ring cake egg stick stone's shell kite doll spoon plate pot candle key pillow stamp coin "
    "necklace bottle pie rope broom bucket brush button card cookie crown dress feather flag flute glove jar "
    "jewel lemon map mask medal mug necktie orange peach pear pipe pumpkin puzzle radio ribbon sack saw scissors "
    "seed soap sponge spade suitcase sweater teapot telescope tent ticket towel trumpet tray umbrella vase "
    "wagon watch's whip whistle wallet tomato carrot potato onion cheese sausage biscuit basin cushion parcel "
    "diary photo poster newspaper painting magnet lantern torch hook bowl kettle pan cap belt boot scarf's"
).split()
PLACES = (
    "pond barn cave farm beach park shop cottage cabin desert island garage attic cellar yard meadow bakery "
    "airport stable zoo temple museum bank port square club mill swamp jungle court city town camp cliff shed "
    "tunnel library theater restaurant corner mine canal pool fountain orchard gallery prison"
).split()
STATES = (
    "hungry thirsty sick sleepy afraid glad sad brave rich poor lazy proud busy polite shy cold wet late lost's "
    "calm cruel honest wise foolish curious jealous lucky nervous bored cheerful patient grumpy rude serious "
    "silly stubborn gentle's tidy weak strong deaf blind warm safe free alone ready sorry excited"
).split()
LOOKS = (
    "big little long short round flat soft shiny dirty clean new broken fine tiny huge pretty ugly cheap "
    "expensive sharp thick thin wide plain fresh sweet smooth rough empty full hot wooden golden silver"
).split()
COLOURS = "blue yellow white black brown pink purple gray orange green's scarlet cream violet".split()
STUFFS = "plastic rubber metal brick straw clay wool velvet bamboo paper's birthday garden's silver".split()
ADVERBS = (
    "soon later once again always never already often's sometimes then today happily loudly calmly proudly "
    "sadly bravely kindly politely angrily"
).split()
TIMES = (
    "One day|One morning|One evening|Long ago|Last night|In the morning|In the evening|At noon|At night|"
    "On Monday|On Sunday|After lunch|Before dinner|That day|The next day|Later|Then|At last|Once"
).split("|")
PREPOSITIONS = "near behind in beside by at outside".split()
MODALS = "will can must should could would might".split()

HELD_OUT = {
    word
    for name, halves in grammar.WORDS.items()
    if name not in grammar.CLOSED
    for half in halves
    for word in half.split()
} | {word for half in grammar.PAIRS for pair in half.split(",") for word in pair.split()}


def _allowed(words: list[str]) -> list[str]:
    """Return the words that the grammar of roles does not use, each once."""
    return list(dict.fromkeys(word for word in words if "'" not in word and word not in HELD_OUT))


def _forms(text: str) -> list[tuple[str, ...]]:
    """Return verbs as tuples of their forms."""
    entries = [tuple(entry.split()) for entry in text.split(",")]
    return [
        entry
        for entry in entries
        if not any("'" in word or "_" in word or word in HELD_OUT for word in entry)
    ]


LISTS = {
    "thing": _allowed(THINGS), "place": _allowed(PLACES), "state": _allowed(STATES), "look": _allowed(LOOKS),
    "colour": _allowed(COLOURS), "stuff": _allowed(STUFFS), "adverb": _allowed(ADVERBS),
}  # fmt: skip
ACTS, MEET, DO, MOVE = _forms(INTRANSITIVE), _forms(MEETINGS), _forms(VERBS), _forms(MOVES)
MALE, FEMALE = _allowed(MALE_NOUNS), _allowed(FEMALE_NOUNS)


def words() -> set[str]:
    """Return every word that the grammar can write."""
    lists = [*LISTS.values(), MALE, FEMALE, MALE_NAMES, FEMALE_NAMES]
    return {word for some in lists for word in some} | {
        w for some in (ACTS, MEET, DO, MOVE) for f in some for w in f
    }


@dataclass(frozen=True)
class Person:
    """A person, with typical acts, states, things and places."""

    noun: str
    male: bool
    named: bool
    acts: tuple[tuple[str, ...], ...]
    states: tuple[str, ...]
    things: tuple[str, ...]
    places: tuple[str, ...]
    colour: str
    wishes: tuple[str, ...]

    @property
    def he(self) -> str:
        return "he" if self.male else "she"

    @property
    def his(self) -> str:
        return "his" if self.male else "her"

    @property
    def himself(self) -> str:
        return "himself" if self.male else "herself"


def person(noun: str, male: bool, named: bool, salt: object = "") -> Person:
    """Return the person of a noun or name; its acts and things are drawn by the noun and the salt."""
    draw = random.Random(f"{noun} {salt}")
    return Person(
        noun, male, named, tuple(draw.sample(ACTS, 2)), tuple(draw.sample(LISTS["state"], 2)),
        tuple(draw.sample(LISTS["thing"], 2)), tuple(draw.sample(LISTS["place"], 2)),
        draw.choice(LISTS["colour"]), tuple(draw.sample(LISTS["thing"], 2)),
    )  # fmt: skip


PEOPLE = {
    (male, named): [person(noun, male, named) for noun in nouns]
    for (male, named), nouns in {
        (True, False): MALE, (False, False): FEMALE, (True, True): MALE_NAMES, (False, True): FEMALE_NAMES,
    }.items()
}  # fmt: skip


class Writer:
    """Writes random documents."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def of(self, name: str) -> str:
        return self.draw.choice(LISTS[name])

    def some(self, text: str, share: float = 0.5) -> str:
        """Return the text with a space after it, or "" at random."""
        return f"{text} " if self.draw.random() < share else ""

    def np(self, actor: Person, bare: bool = False) -> str:
        """Return a phrase for a person."""
        if actor.named:
            return actor.noun
        return f"{self.draw.choice(('the', 'the', 'the', 'a', 'this', 'every' if bare else 'the'))} {self.look(0.35)}{actor.noun}"

    def look(self, share: float = 0.5) -> str:
        if self.draw.random() > share:
            return ""
        first = f"{self.of('look')} "
        return first + (f"{self.of('look')} " if self.draw.random() < 0.2 else "")

    def thing(self, noun: str | None = None) -> str:
        """Return a phrase for a thing, with an article."""
        article = self.draw.choice(("the", "the", "a", "this", "every"))
        return f"{article} {self.look(0.4)}{self.some(self.of('stuff'), 0.2)}{noun or self.of('thing')}"

    def where(self, place: str | None = None) -> str:
        return f"{self.draw.choice(PREPOSITIONS)} the {self.look(0.3)}{self.some(self.of('stuff'), 0.12)}{place or self.of('place')}"

    def adverb(self, share: float = 0.25) -> str:
        return self.some(self.of("adverb"), share)

    def act(self, actor: Person) -> str:
        return self.draw.choice(actor.acts)[0]

    def of_person(self, actor: Person, verb: bool = True) -> str:
        """Return a predicate that fits the person."""
        draw = self.draw
        kind = draw.randrange(5)
        if kind == 0:
            return f"{self.adverb()}{self.act(actor)}"
        if kind == 1:
            return f"was {self.some(draw.choice(('truly', 'really', 'not', 'never', 'always')), 0.3)}{draw.choice(actor.states)}"
        if kind == 2:
            return f"{self.adverb()}{draw.choice(DO)[0]} the {self.look(0.3)}{draw.choice(actor.wishes)}"
        if kind == 3:
            return (
                f"{self.adverb()}{draw.choice(DO)[0]} {actor.his} {self.look(0.2)}{draw.choice(actor.things)}"
            )
        return f"{self.act(actor)} {self.where(draw.choice(actor.places))}"

    def aux(self, actor: Person) -> str:
        """Return a predicate with an auxiliary verb."""
        draw = self.draw
        if draw.random() < 0.5:
            modal, act = draw.choice(MODALS), draw.choice(actor.acts)[1]
            if draw.random() < 0.5:
                return f"{modal} {self.adverb()}{act}"
            return f"{modal} {self.adverb()}{draw.choice(DO)[1]} the {draw.choice(actor.wishes)}"
        return f"{draw.choice(('has', 'had'))} {self.adverb()}{draw.choice(('hidden', 'taken', 'wanted', 'chosen', 'used', 'needed'))} the {self.look(0.2)}{draw.choice(actor.wishes)}"

    def subject(self, actor: Person, other: Person) -> str:
        """Return a subject, often with words between it and its verb."""
        draw, np = self.draw, self.np(actor)
        kind = draw.randrange(8)
        if kind == 0:
            return f"{np} {self.where()}"
        if kind == 1:
            return f"{np} who {draw.choice(MEET)[0]} {self.np(other)}"
        if kind == 2:
            return f"{np} who {self.np(other)} {self.adverb(0.2)}{draw.choice(MEET)[0]}"
        if kind == 3:
            return f"{np} that {self.np(other)} {draw.choice(MEET)[0]} {self.where()}"
        if kind == 4:
            return f"{np} {self.where()} who {self.act(actor)}"
        return np

    def sentence(self, a: Person, b: Person) -> str:
        """Return a sentence about a man and a woman."""
        draw, A, B = self.draw, self.np(a), self.np(b)
        actor, other = (a, b) if draw.random() < 0.5 else (b, a)
        meet = draw.choice(MEET)[0]
        front = f"{draw.choice(TIMES)} " if draw.random() < 0.15 else ""
        joint = draw.choice(
            ("because", "when", "before", "after", "while", "until", "since", "as", "and", "but")
        )
        kind = draw.randrange(20)
        if kind <= 3:  # he, she
            text = f"{A} {self.adverb()}{meet} {B} {self.some(self.where(), 0.25)}{joint} {actor.he} {self.of_person(actor)}"
            if draw.random() < 0.35:
                text += f" {draw.choice(('and', 'but', 'while'))} {other.he} {self.of_person(other)}"
        elif kind == 4:
            text = f"{joint if joint not in ('and', 'but') else 'when'} {A} {meet} {B} , {actor.he} {self.of_person(actor)}"
        elif kind == 5:
            text = f"{A} {meet} {B} . {actor.he.capitalize()} {self.of_person(actor)} . {other.he.capitalize()} {self.of_person(other)}"
        elif kind <= 7:  # his, her
            talk = draw.choice(
                (
                    "dreamed of",
                    "argued with {} over",
                    "came to {} with",
                    "went to {} for",
                    "joked with {} about",
                )
            )
            middle = talk.format(B) if "{}" in talk else f"{meet} {B} and {talk}"
            text = f"{A} {middle} {actor.his} {self.look(0.3)}{draw.choice(actor.things)}"
            if draw.random() < 0.3:
                text += f" and {other.his} {draw.choice(other.things)}"
        elif kind == 8:  # himself
            start = draw.choice(
                (
                    f"{A} wrote {B} a story",
                    f"{A} sang {B} a song",
                    f"{A} joked with {B}",
                    f"{A} argued with {B}",
                )
            )
            text = f"{start} {self.some(self.where(), 0.2)}about {actor.himself} {self.where(draw.choice(actor.places))}"
        elif kind == 9:
            start = draw.choice(
                (f"{A} made {B} a doll", f"{A} and {B} drew a map", f"{A} {meet} {B} at a play")
            )
            text = f"{start} {draw.choice(('like', 'for', 'about'))} {actor.himself} and {actor.his} {draw.choice(actor.things)}"
        elif kind <= 13:  # subject and verb
            text = f"{self.subject(actor, other)} {self.of_person(actor) if draw.random() < 0.65 else self.aux(actor)}"
        elif kind == 14:  # possessor
            thing = self.of("thing")
            text = f"{self.np(actor)} 's {self.look(0.4)}{self.some(self.of('stuff'), 0.3)}{thing} {self.some(self.where(), 0.15)}was {actor.colour}"
        elif kind == 15:
            text = f"{A} {meet} {B} and {draw.choice(DO)[0]} {self.np(actor)} 's {self.look(0.4)}{self.some(self.of('stuff'), 0.3)}{self.of('thing')} , the {actor.colour} one"
        elif kind == 16:  # who
            text = f"{draw.choice(('everybody', 'nobody', 'we', 'they', other.noun if other.named else 'I'))} {meet} {self.np(actor)} {self.some(self.where(), 0.6)}who {self.of_person(actor)}"
        elif kind == 17:  # where things go
            past, _, place = draw.choice(MOVE)
            text = f"{self.np(actor)} {self.adverb()}{past} {self.thing()} {self.some('and ' + self.thing(), 0.2)}to the {place}"
        elif kind == 18:  # two subjects, two objects
            text = f"{A} {self.some(self.where(), 0.3)}and {B} {draw.choice(DO)[0]} the {draw.choice(a.wishes)} and the {draw.choice(b.wishes)}"
        else:  # a thing that somebody made
            text = f"{self.np(actor)} {draw.choice(MEET)[0]} {self.np(other)} with the {self.look(0.3)}{draw.choice(actor.wishes)} {actor.he} {draw.choice(DO)[0]} {self.where(draw.choice(actor.places))}"
        return self.written(front + text, "." if draw.random() < 0.95 else "!")

    def written(self, text: str, end: str) -> str:
        """Return the sentence with correct articles, spaces, capital letter and end."""
        words = text.split()
        for at, word in enumerate(words[:-1]):
            if word == "a" and words[at + 1][0] in "aeiou":
                words[at] = "an"
            if word == "." and at + 1 < len(words):
                words[at + 1] = words[at + 1][0].upper() + words[at + 1][1:]
        line = " ".join(words).replace(" 's", "'s").replace(" ,", ",").replace(" .", ".")
        return line[0].upper() + line[1:] + end

    def pair(self, salt: object = "") -> tuple[Person, Person]:
        """Return a male and a female person, in either order."""
        both = []
        for male in (True, False):
            some = PEOPLE[male, self.draw.random() < 0.3]
            actor = self.draw.choice(some)
            both.append(actor if salt == "" else person(actor.noun, male, actor.named, salt))
        self.draw.shuffle(both)
        return both[0], both[1]

    def facts(self, actor: Person) -> Iterator[str]:
        """Yield sentences with facts about a person."""
        np = actor.noun if actor.named else f"the {actor.noun}"
        for line in (
            f"{np} {self.act(actor)} {self.where(actor.places[0])}", f"{np} was {' and '.join(actor.states)}",
            f"{np} had a {actor.things[0]} and a {actor.things[1]}", f"{np} liked every {actor.colour} thing",
            f"{np} wanted the {actor.wishes[0]} and the {actor.wishes[1]}",
        ):  # fmt: skip
            if self.draw.random() < 0.7:
                yield self.written(line, ".")

    def story(self) -> str:
        """Return a story: facts about four new people, then sentences that follow from the facts."""
        draw, salt = self.draw, self.draw.random()
        people = [actor for _ in range(2) for actor in self.pair(salt)]
        lines = [line for actor in people for line in self.facts(actor)]
        if draw.random() < 0.5:
            draw.shuffle(lines)
        for _ in range(draw.randrange(4, 9)):
            men, women = [w for w in people if w.male], [w for w in people if not w.male]
            both = [draw.choice(men), draw.choice(women)]
            draw.shuffle(both)
            lines.append(self.sentence(both[0], both[1]))
        return " ".join(lines)

    def document(self) -> str:
        """Return a story, or one to four sentences."""
        if self.draw.random() < 0.3:
            return self.story()
        return " ".join(self.sentence(*self.pair()) for _ in range(self.draw.choice((1, 1, 2, 3, 4))))


def documents(seed: int, letters: int) -> list[str]:
    """Return documents of about so many letters."""
    writer, result, total = Writer(seed), list[str](), 0
    while total < letters:
        result.append(writer.document())
        total += len(result[-1])
    return result


if __name__ == "__main__":
    for text in documents(0, 300 * int(sys.argv[1] if len(sys.argv) > 1 else 5)):
        print(text, end="\n\n")
