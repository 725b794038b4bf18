"""Roles: which head attends from a word to a related word, compared with every simple rule.

For each relation of a grammar (`grammar.py`) the head that is right most often is chosen on one half of the
sentences and judged on the other, which has other words and other shapes. It is compared with two kinds of
rules: fixed offsets, which use positions alone, and rules that use the classes of words (noun, verb), which
the grammar provides and the model does not. The verdict rests on the best of all rules; that rule is chosen
on the judged half itself, which favours it. Clark 2019, "What Does BERT Look At?", compares with offsets, and
uses a treebank.

Letters: L layers, H heads in the largest of them, W words of a sentence.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor

from ..errors import ArgumentError, nearest, needed
from .collection import ShownTable
from .grammar import PRONOUNS, Sentence
from .layer_names import Layer

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

MARGIN = 0.15  # by which every rule must be beaten
ENOUGH = 20  # cases needed in each half for a verdict
MOST = 8  # heads named for one relation
SURE = 1.96  # standard errors: 95% of a normal distribution lies within
MOVES = 0.5  # of pairs in which only the pronoun differs must be right both times
FORMAT = "headwise roles 1"

OF_CLASS = "word of its class"  # in the names of rules, if related words are of several classes
OFFSET = " words"  # the end of the names of rules that are offsets


def rule_in_words(rule: str) -> str:
    """Return the name of a rule as a phrase for a sentence.

    Example:
        >>> rule_in_words("-1 words"), rule_in_words("+4 words")
        ('the previous word', 'the word 4 positions later')
        >>> rule_in_words("the nearest word of its class before")
        "the nearest word of the related word's class before the word"
    """
    if rule.endswith(OFFSET):
        offset = int(rule.removesuffix(OFFSET))
        if abs(offset) == 1:
            return "the previous word" if offset < 0 else "the next word"
        return f"the word {abs(offset)} positions {'earlier' if offset < 0 else 'later'}"
    phrase = rule.replace(OF_CLASS, "word of the related word's class")
    return f"{phrase} the word" if phrase.endswith((" before", " after")) else phrase


Default = TypeVar("Default")


@dataclass(frozen=True)
class Role:
    """What was found of one relation; the head is the best of the first half, the numbers are the second's.

    Attributes:
        found: every rule is beaten by 0.15 and more, and by more than chance; of pronouns, the head moves
            with the pronoun, too.
        share: of the cases in which the head's heaviest word is the related one; low, high: its 95% interval.
        rules: a rule in words -> its share on the same cases: the best fixed offset, and the rules that use
            classes of words.
        by_distance: words between the two, and one -> (share, cases).
        moves: the share of pairs, alike but for he and she, in which both are right; None: no such pairs.
        heads: all heads that are found for it, the best of the first half first: (layer, head, share).
    """

    name: str
    found: bool
    layer: Layer
    head: int
    share: float
    low: float
    high: float
    cases: int
    rules: dict[str, float]
    by_distance: dict[int, tuple[float, int]]
    moves: float | None = None
    heads: list[tuple[Layer, int, float]] = field(default_factory=list)

    @property
    def rule(self) -> str:
        """The best of the rules, in words."""
        return max(self.rules, key=self.rules.__getitem__)

    @property
    def offset(self) -> str:
        """The best of the fixed offsets, which need no classes of words."""
        return next(rule for rule in self.rules if rule.endswith(OFFSET))

    @property
    def class_rule(self) -> str:
        """The best of the rules that use classes of words, such as the nearest verb."""
        return max((rule for rule in self.rules if rule != self.offset), key=self.rules.__getitem__)

    @property
    def beats_offset(self) -> bool:
        """True if the head beats the best fixed offset by 0.15 or more, whatever the other rules do."""
        return self.share - self.rules[self.offset] >= MARGIN

    @property
    def margin(self) -> float:
        """By how much the best rule is beaten."""
        return self.share - self.rules[self.rule]

    @property
    def verdict(self) -> str:
        """What was found, in words, and the rule that the verdict rests on."""
        best = self.rules[self.rule]
        if self.found:
            return "found"
        if best == 1 or self.margin < MARGIN:
            right = "always right" if best == 1 else f"right in {best:.0%} of cases"
            offset = f"; the best fixed offset is right in {self.rules[self.offset]:.0%}"
            return f"not found: {rule_in_words(self.rule)} is {right}{offset * (self.rule != self.offset)}"
        if self.moves is not None and self.moves < MOVES:
            return (
                f"not found: the head is right in both sentences of {self.moves:.0%} of the pairs that "
                "differ only in the pronoun"
            )
        return "not found: the difference from the best rule may be chance"


class Roles(Mapping[str, Role]):
    """Relations and the heads that know them, by name: print it, or ask for `table()`.

    Attributes:
        scores: name -> [L, H], the share of every head on the judged half; NaN where a layer has fewer heads.
        layers: what the rows of scores go by.
        unasked: name -> the reason why it was not measured.
        title: of the model.
        sentences: how many were read; left_out: how many had words that the tokenizer does not know.
        causal: whether the model sees only what came before.
    """

    def __init__(
        self,
        roles: Mapping[str, Role],
        scores: Mapping[str, Tensor],
        layers: Sequence[Layer],
        *,
        unasked: Mapping[str, str] | None = None,
        title: str | None = None,
        sentences: int = 0,
        left_out: int = 0,
        causal: bool = False,
    ) -> None:
        self._roles, self.scores, self.layers = dict(roles), dict(scores), list(layers)
        self.unasked, self.title = dict(unasked or {}), title
        self.sentences, self.left_out, self.causal = sentences, left_out, causal

    def __getitem__(self, name: str) -> Role:
        """Return the role of a relation. Raise `ArgumentError` if it was not measured."""
        if name in self._roles:
            return self._roles[name]
        if name in self.unasked:
            raise ArgumentError(
                f"relation {name!r} was not measured, {self.unasked[name]}; {len(self)} others were"
            )
        raise ArgumentError(f"relation must be a known one: got {name!r}; {nearest(name, self._roles)}")

    @overload
    def get(self, name: str, /) -> Role | None: ...

    @overload
    def get(self, name: str, default: Role | Default, /) -> Role | Default: ...

    def get(self, name: str, default: object = None, /) -> object:
        """Return the role, or the default if it was not measured."""
        return self._roles.get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self._roles

    def __iter__(self) -> Iterator[str]:
        return iter(self._roles)

    def __len__(self) -> int:
        return len(self._roles)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Roles) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]

    @property
    def found(self) -> dict[str, Role]:
        """Those that were found."""
        return {name: role for name, role in self.items() if role.found}

    def of(self, layer: Layer, head: int) -> list[str]:
        """Return names of the relations that a head was found for."""
        return [
            name for name, role in self.found.items() if any(at[:2] == (layer, head) for at in role.heads)
        ]

    # Output

    def table(self) -> ShownTable:
        """Return a table with a row per relation: head, share and interval, cases, rules, verdict.

        The rules are the best fixed offset and the best rule that uses classes of words.

        Raises:
            PackageMissing: rich is not installed.
        """
        from ..show.layers_pictures import roles_table

        return roles_table(self)

    def plot(self) -> Figure:
        """Draw relations by heads, and each relation's best head against the best rule.

        Raises:
            ArgumentError: no relation was asked about.
            PackageMissing: matplotlib is not installed.
        """
        from ..show.layers_pictures import roles_picture

        return roles_picture(self)

    def __str__(self) -> str:
        from ..show.layers_pictures import as_lines

        return "\n".join(as_lines(self))

    def __repr__(self) -> str:
        return f"Roles({len(self.found)} of {len(self)} found)"

    def to_pandas(self) -> pandas.DataFrame:
        """Return a data frame with a row per relation.

        Raises:
            PackageMissing: pandas is not installed.
        """
        with needed("pandas", "headwise tables as pandas need pandas"):
            import pandas
        columns = ("name", "found", "layer", "head", "share", "low", "high", "cases", "moves")
        rows = [
            {column: getattr(role, column) for column in columns}
            | {"rule": role.rule, "rule_share": role.rules[role.rule], "margin": role.margin}
            | {"offset": role.offset, "offset_share": role.rules[role.offset]}
            | {"class_rule": role.class_rule, "class_rule_share": role.rules[role.class_rule]}
            for role in self.values()
        ]
        rules = ("rule", "rule_share", "margin", "offset", "offset_share", "class_rule", "class_rule_share")
        named = [*columns, *rules]  # the columns of an empty table, too
        return pandas.DataFrame(rows, columns=named).set_index("name")

    # As text

    def to_json(self) -> str:
        """Return the roles as JSON; `from_json` reads it back."""
        data = {
            "format": FORMAT,
            "title": self.title,
            "layers": self.layers,
            "sentences": self.sentences,
            "left_out": self.left_out,
            "causal": self.causal,
            "roles": [_as_data(role) for role in self.values()],
            "scores": {
                name: [[None if math.isnan(x) else round(x, 4) for x in row] for row in scores.tolist()]
                for name, scores in self.scores.items()
            },
            "unasked": self.unasked,
        }
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Roles:
        """Return the roles in a text of `to_json`.

        Raises:
            ArgumentError: something else.
        """
        try:
            data = json.loads(text)
            if data["format"] != FORMAT:
                raise ArgumentError(
                    f"text must be the output of Roles.to_json: its format is {data['format']!r}, not "
                    f"{FORMAT!r}; measure the roles again"
                )
            scores = {
                name: torch.tensor([[math.nan if x is None else x for x in row] for row in rows])
                for name, rows in data["scores"].items()
            }
            roles = {role["name"]: _from_data(role) for role in data["roles"]}
            options = {name: data[name] for name in ("unasked", "title", "sentences", "left_out", "causal")}
            return cls(roles, scores, data["layers"], **options)
        except ArgumentError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ArgumentError(
                f"text must be the output of Roles.to_json: {type(error).__name__}: {error}; measure the "
                "roles again"
            ) from error


def _as_data(role: Role) -> dict[str, Any]:
    """Return a role as JSON data, with rounded shares."""
    data = asdict(role)
    for name in ("share", "low", "high", "moves"):
        data[name] = None if data[name] is None else round(data[name], 4)
    data["rules"] = {rule: round(share, 4) for rule, share in role.rules.items()}
    data["by_distance"] = {str(at): [round(share, 4), n] for at, (share, n) in role.by_distance.items()}
    data["heads"] = [[layer, head, round(share, 4)] for layer, head, share in role.heads]
    return data


def _from_data(data: dict[str, Any]) -> Role:
    """Return the role of JSON data."""
    by_distance = {int(at): (share, n) for at, (share, n) in data["by_distance"].items()}
    heads = [(layer, head, share) for layer, head, share in data["heads"]]
    return Role(**data | {"by_distance": by_distance, "heads": heads})


# Simple rules

RULES = ("nearest {} before", "nearest {} after", "nearest {}", "first {}", "last {}")


def _rules(sentence: Sentence, source: int, target: int, causal: bool) -> dict[str, tuple[int, ...]]:
    """Return the word that each rule points at; two words if both are equally near."""
    end = source if causal else len(sentence.words)
    alike = [at for at in range(end) if sentence.classes[at] == sentence.classes[target] and at != source]
    before, after = [at for at in alike if at < source], [at for at in alike if at > source]
    near = min((abs(at - source) for at in alike), default=0)
    places = (before[-1:], after[:1], [at for at in alike if abs(at - source) == near], alike[:1], alike[-1:])
    return {
        rule: tuple(at) for rule, at in zip(RULES, places, strict=True) if not causal or rule in CAUSAL_RULES
    }


CAUSAL_RULES = ("nearest {} before", "first {}")  # for causal models, where the others are the same as these


# Cases


@dataclass(frozen=True, eq=False)
class _Cases:
    """The cases of one relation in one half."""

    hits: Tensor  # bool [N, L, H]
    groups: Tensor  # int [N], cases of one group are not independent
    distances: Tensor  # int [N], of the related word
    rules: dict[str, Tensor]  # float [N], by rule in words: 1 where it is right
    pairs: list[tuple[int | None, int]]  # number of the pair, and of the word in it

    def __len__(self) -> int:
        return len(self.groups)


Place = tuple[int, int, int]  # a sentence, a word of it, the word it belongs to


def _places(sentences: Sequence[Sentence], causal: bool) -> dict[str, tuple[list[Place], list[Place]]]:
    """Return all cases that a model can see, by relation and half."""
    places: dict[str, tuple[list[Place], list[Place]]] = {}
    for number, sentence in enumerate(sentences):
        for name, source, target in sentence.relations:
            halves = places.setdefault(name, ([], []))
            if not causal or target < source:
                halves[sentence.half].append((number, source, target))
    return places


def _cases(places: Sequence[Place], sentences: Sequence[Sentence], hits: Tensor, causal: bool) -> _Cases:
    """Judge heads, by their hits, bool [L, H, N], and rules on these cases."""
    correct: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for number, source, target in places:
        for rule, targets in _rules(sentences[number], source, target, causal).items():
            # of two equally near words, a rule takes always the one before or always the one after
            correct[rule].append((float(target in targets[:1]), float(target in targets[-1:])))
    kinds = {sentences[number].classes[target] for number, _, target in places}
    kind = kinds.pop() if len(kinds) == 1 else OF_CLASS
    offsets = torch.tensor([target - source for _, source, target in places])
    rules = {f"{offset:+d}{OFFSET}": (offsets == offset).float() for offset in offsets.unique().tolist()}
    for rule, results in correct.items():
        both = torch.tensor(results)  # [N, 2]
        rules[f"the {rule.format(kind)}"] = both[:, int(both.sum(0).argmax())]
    drawn = [(sentences[number].group, number) for number, _, _ in places]
    groups = torch.tensor([-1 - number if group is None else group for group, number in drawn])
    pairs = [(sentences[number].pair, source) for number, source, _ in places]
    return _Cases(hits.permute(2, 0, 1), groups, offsets, rules, pairs)


# Intervals


def _spread(values: Tensor, groups: Tensor) -> float:
    """Return the standard error of the mean of cases that are drawn in groups."""
    N, index = len(values), groups.unique(return_inverse=True)[1]
    count = int(index.max()) + 1
    if count == 1:
        return math.inf  # the error of one group is unknown
    deviations = (values - values.mean()).double()
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, index, deviations)
    return math.sqrt(float(sums.square().sum()) * count / max(1, count - 1)) / N


def _interval(hits: Tensor, groups: Tensor) -> tuple[float, float]:
    """Return the 95% interval of a share: Wilson 1927, with the effective number of grouped cases."""
    share, error = float(hits.mean()), _spread(hits, groups)
    independent_error = math.sqrt(share * (1 - share) / len(hits))
    effective = (
        max(1.0, len(hits) * (independent_error / error) ** 2)
        if error > independent_error > 0
        else float(len(hits))
    )
    if independent_error == 0:
        effective = float(len(groups.unique()))
    middle = (share + SURE**2 / (2 * effective)) / (1 + SURE**2 / effective)
    reach = (
        SURE
        * math.sqrt(share * (1 - share) / effective + SURE**2 / (4 * effective**2))
        / (1 + SURE**2 / effective)
    )
    return max(0.0, middle - reach), min(1.0, middle + reach)


# Judging


def judge(
    sentences: Sequence[Sentence],
    heaviest: Sequence[Tensor],
    layers: Sequence[Layer],
    *,
    causal: bool = False,
    title: str | None = None,
    left_out: int = 0,
) -> Roles:
    """Return roles, from the heaviest word of every head.

    heaviest: of each sentence int [L, H, W]: for each word the number of the one that a head looks at most,
    itself and punctuation left out; -1 where there is none, or two alike; -2 where there is no such head.
    layers: what the L layers go by.
    causal: whether words see only what is before them; they are then asked about nothing else.
    """
    roles, scores, unasked = {}, {}, {}
    words = torch.cat([top.flatten(0, 1) for top in heaviest], -1).unflatten(0, heaviest[0].shape[:2])
    starts = [0, *accumulate(top.shape[-1] for top in heaviest)]
    is_head = heaviest[0][:, :, 0] > -2  # [L, H]
    for name, halves in _places(sentences, causal).items():
        counts = [len(half) for half in halves]
        if causal and max(counts) == 0:
            unasked[name] = "since the model does not look ahead"
        elif min(counts) < ENOUGH:
            few = f"{counts[0]} to choose the head, {counts[1]} to test it; each needs {ENOUGH}"
            unasked[name] = f"since there are too few cases ({few})"
        else:
            choosing, judging = (
                _cases(
                    places, sentences, causal=causal,
                    hits=words[:, :, [starts[number] + source for number, source, _ in places]]
                    == torch.tensor([target for _, _, target in places]),
                )
                for places in halves
            )  # fmt: skip
            roles[name] = _judged(name, choosing, judging, layers)
            scores[name] = judging.hits.float().mean(0).masked_fill(~is_head, math.nan)
    return Roles(
        roles, scores, layers, unasked=unasked, title=title, sentences=len(sentences), left_out=left_out,
        causal=causal,
    )  # fmt: skip


def _judged(name: str, choosing: _Cases, judging: _Cases, layers: Sequence[Layer]) -> Role:
    """Return the role of one relation: its best head on one half, judged on the other."""
    H = choosing.hits.shape[2]
    order = choosing.hits.float().mean(0).flatten().sort(descending=True, stable=True).indices.tolist()
    moving = name.partition(" > ")[0] in PRONOUNS
    # only the best of the fixed offsets
    offsets = [rule for rule in judging.rules if rule.endswith(OFFSET)]
    offset = max(offsets, key=lambda rule: float(judging.rules[rule].sum()))
    rest = [rule for rule in judging.rules if rule not in offsets]
    rules = {rule: judging.rules[rule] for rule in (offset, *rest)}

    def is_role_head(cases: _Cases, flat: int) -> bool:
        hits = cases.hits[:, flat // H, flat % H].float()
        moves = _moves(hits, cases.pairs) if moving else 1.0
        return moves >= MOVES and all(_is_beaten(hits, right, cases.groups) for right in cases.rules.values())

    best = order[0]
    hits = judging.hits[:, best // H, best % H].float()
    is_best_found = is_role_head(judging, best)
    heads = [
        at
        for at in order[1:MOST]
        if is_best_found and is_role_head(choosing, at) and is_role_head(judging, at)
    ]
    low, high = _interval(hits, judging.groups)
    distances = Counter(judging.distances.abs().tolist())
    return Role(
        name, is_best_found, layers[best // H], best % H, float(hits.mean()), low, high, len(judging),
        rules={rule: float(right.mean()) for rule, right in rules.items()},
        by_distance={
            at: (float(hits[judging.distances.abs() == at].mean()), distances[at]) for at in sorted(distances)
        },
        moves=_moves(hits, judging.pairs) if moving else None,
        heads=[
            (layers[at // H], at % H, float(judging.hits[:, at // H, at % H].float().mean()))
            for at in ([best, *heads] if is_best_found else [])
        ],
    )  # fmt: skip


def _is_beaten(hits: Tensor, right: Tensor, groups: Tensor) -> bool:
    """Return True if a head beats a rule by MARGIN and by more than chance."""
    ahead = hits - right
    margin = float(ahead.mean())
    return margin >= MARGIN and margin > SURE * _spread(ahead, groups)


def _moves(hits: Tensor, pairs: Sequence[tuple[int | None, int]]) -> float:
    """Return the share of pairs, alike but for he and she, in which the head is right both times."""
    both: dict[tuple[int, int], list[float]] = defaultdict(list)
    for hit, (pair, source) in zip(hits.tolist(), pairs, strict=True):
        if pair is not None:
            both[pair, source].append(hit)
    complete = [min(pair) for pair in both.values() if len(pair) == 2]
    return sum(complete) / len(complete) if complete else 0.0
