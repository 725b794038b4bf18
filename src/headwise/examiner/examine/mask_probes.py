"""Which argument is the mask, in which shape, kind and polarity: tried, and seen from who still reacts.

A mask of random pairs, other for every sample, is handed over in one convention after another; the one under
which query t reacts to key s exactly where the mask says so is the learner's. Code with a mistake about masks
reacts exactly in no convention: then gentler questions decide, then what the code says.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .calling import Caller
from .encoding import FULL, PADDING, SAME_FOR_ALL, Way
from .failing import CAUGHT
from .mask_words import Said, said_about
from .reacting import NOTHING, inputs_for, reactions
from .wording import input_word

__all__ = ["find_ways", "is_causal", "padding_mask", "random_mask"]


def random_mask(B: int, T: int, S: int, causal: bool = False, seed: int = 3, same: bool = False) -> Tensor:
    """bool [B, T, S]: rows and columns see something and hide something; `causal`: the diagonal is seen."""
    dice = torch.Generator().manual_seed(seed)
    while True:
        mask = torch.rand(1 if same else B, T, S, generator=dice) < 0.55
        if causal:
            mask |= torch.eye(T, S, dtype=torch.bool)
        if all(bool(m.any(dim).all() and (~m).any(dim).all()) for m in mask for dim in (0, 1)):
            return mask.expand(B, T, S).contiguous()


def padding_mask(B: int, T: int, S: int, holes: bool = False, same: bool = False) -> Tensor:
    """bool [B, T, S], the same for every query: another length for every sample; `holes`: before it, too."""
    keys = torch.ones(B, S, dtype=torch.bool)
    for b in range(B):
        row = 0 if same else b
        keys[b, S - 1 - row % (S - 1) :] = False
        if holes:
            keys[b, 1 + (row + 1) % (S - 3)] = False
    return keys[:, None].expand(B, T, S).contiguous()


class _Asker:
    """Hands masks over and watches."""

    def __init__(self, caller: Caller, causal: bool) -> None:
        self.caller, self.causal = caller, causal
        sizes = caller.subject.sizes
        self.B, self.L = sizes.B, sizes.long
        self.inputs = inputs_for(caller, self.L, self.L)
        self.triangle = torch.ones(self.L, self.L, dtype=torch.bool).tril()
        eye = torch.eye(self.L, dtype=torch.bool)
        self.look = ~eye if caller.plan.self_only else torch.ones_like(eye)
        self.free = caller.call(*self.inputs).output.detach() if not caller.plan.needs_mask else None

    def mask(self, way: Way, same: bool = False) -> Tensor:
        """bool [B, T, S] that this convention can say."""
        if way.kind == "lengths":
            counts = torch.arange(self.B * self.L).reshape(self.B, self.L) * 3 % (self.L - 1) + 1
            counts = counts if way.shape == "[B, T]" else counts[:, :1] + torch.arange(self.B)[:, None] % 2
            return (torch.arange(self.L) < counts[..., None]).expand(self.B, self.L, self.L).contiguous()
        if way.kind == "switch":
            return self.triangle.expand(self.B, self.L, self.L).contiguous()
        if way.shape in PADDING:
            return padding_mask(self.B, self.L, self.L, holes=True, same=same or way.shape == "[S]")
        same = same or way.shape in SAME_FOR_ALL
        if self.caller.plan.layout == "one sequence":
            same = False  # it sees one sample at a time
        return random_mask(self.B, self.L, self.L, self.causal, same=same)

    def runs(self, way: Way) -> bool:
        """Whether it can be called so, and does not pay the mask no heed."""
        try:
            output = self.caller.call(*self.inputs, self.mask(way), ways=(way,)).output.detach()
        except CAUGHT:
            return False
        return True if self.free is None else not torch.equal(output, self.free)

    def react(self, way: Way, of: str = "both", same: bool = False) -> tuple[Tensor, Tensor]:
        """(who reacts, float [B, T, S]; who should)."""
        mask = self.mask(way, same)
        found = reactions(self.caller, self.inputs, mask, (way,), of)
        return found, mask & self.triangle if self.causal else mask

    def exact(self, way: Way, of: str = "both", same: bool = False, turned: bool = False) -> bool:
        """Whether exactly those react that should; `turned`: with queries and keys exchanged in the mask."""
        try:
            found, wanted = self.react(way, of, same)
        except CAUGHT:
            return False
        wanted = wanted.mT if turned else wanted
        if not bool(found.isfinite().all()):
            return False
        return torch.equal((found > NOTHING)[:, self.look], wanted[:, self.look])

    def ratio(self, way: Way) -> float:
        """How much more a seen key counts than a hidden one; 0 where that cannot be told."""
        try:
            found, wanted = self.react(way, same=True)
        except CAUGHT:
            return 0.0
        look = self.look.expand_as(wanted) & found.isfinite()
        seen, unseen = found[wanted & look], found[~wanted & look]
        if not len(seen) or not len(unseen):
            return 0.0
        return float(seen.mean() / unseen.mean().clamp_min(1e-12))


def _conventions(argument: str, layout: str, said: Said) -> Iterator[Way]:
    """Shapes, kinds and polarities for this argument, the likeliest first."""
    word = argument.lower()
    if input_word(argument) == "lengths":
        yield from (Way(argument, shape, "lengths") for shape in ("[B]", "[B, T]"))
        return
    shapes = [*FULL[:4], *SAME_FOR_ALL, *PADDING[:3]]
    if "pad" in word:
        shapes = [*PADDING[:3], *FULL[:4]]
    if layout == "sequence first":
        shapes += [*FULL[4:], PADDING[4]]
    if layout == "one sequence":
        shapes = ["[T, S]", "[1, T, S]", "[S]"]
    elif said.shape:
        shapes = [said.shape] + (
            [one for one in shapes if one != said.shape] if said.shape != "[B, S]" else []
        )
    kinds = [
        ("bool", torch.bool),
        ("0 and 1", torch.float64),
        ("0 and 1", torch.int64),
        ("added", torch.float64),
    ]
    if "bias" in word or said.added:
        kinds.reverse()
    polarities = [True, False]
    if said.in_words and said.true_attends is not None:
        kinds, polarities = kinds[:-1], [said.true_attends]
    for shape in shapes:
        for kind, number in kinds:
            if kind == "added":
                yield Way(argument, shape, kind, True, number)
            else:
                yield from (Way(argument, shape, kind, attends, number) for attends in polarities)


def _find_way(asker: _Asker, argument: str, said: Said) -> tuple[Way | None, str]:
    """(the convention of one argument, a sentence where it was not plain to see)."""
    plan = asker.caller.plan
    running: list[Way] = []
    for i, way in enumerate(ways := list(_conventions(argument, plan.layout, said))):
        if asker.runs(way):
            running.append(way)
            if asker.exact(way):
                return way, ""
        if i + 1 == len(ways) or ways[i + 1].shape != way.shape:  # a shape is done with
            mine = [one for one in running if one.shape == way.shape]
            if mine and said.shape == way.shape:
                running = mine
                break
            for one in mine if way.shape in FULL else []:
                if said.true_attends in (None, one.true_attends) and asker.exact(one, same=True):
                    return one, f"{argument} does not hide exactly what it should"
    if not running:
        return None, f"{argument} changes nothing, whatever is given"
    likely = [
        way for way in running if said.true_attends in (None, way.true_attends) and way.kind != "added"
    ] or running
    if _broken_by_nan(asker, likely):
        return likely[0], f"{argument} makes the output NaN"
    questions: list[tuple[str, bool, bool]] = [("both", True, False), ("both", False, True)]
    if not plan.self_only and not plan.memory_only:
        for of in ("key", "value"):
            questions += [(of, False, False), (of, False, True), (of, True, False)]
    for of, same, turned in questions:
        for way in likely:
            if asker.exact(way, of, same, turned):
                return way, f"{argument} does not hide exactly what it should"
    best = max(likely, key=lambda way: round(asker.ratio(way), 2))
    return best, f"{argument} changes the output, but hides nothing exactly"


def _broken_by_nan(asker: _Asker, ways: list[Way]) -> bool:
    """Whether every convention makes all of the output NaN."""
    return all(not bool(asker.react(way)[0].isfinite().any()) for way in ways)


def find_ways(caller: Caller, causal: bool, texts: list[str]) -> tuple[tuple[Way, ...], list[str]]:
    """The conventions of the arguments that take masks (one for pairs, one for padding), and sentences."""
    plan = caller.plan
    try:
        asker = _Asker(caller, causal)
    except CAUGHT:
        return caller.ways, []
    sentences: list[str] = []
    pairs: Way | None = None
    padding: Way | None = None
    for argument in plan.masks:
        way, sentence = _find_way(asker, argument, said_about(texts, argument))
        sentences += [sentence] if sentence else []
        if way is None:
            continue
        if (way.shape in PADDING or way.shape == "[B]") and padding is None:
            padding = way
        elif way.shape not in PADDING and (
            pairs is None or (pairs.shape in SAME_FOR_ALL and way.shape in FULL)
        ):
            pairs = way
    if pairs is None and padding is None:
        ignored = _ignored(caller, asker, texts)
        return ignored or tuple(Way(argument, "", "switch") for argument in plan.switches[:1]), sentences
    return tuple(way for way in (pairs, padding) if way is not None), sentences


def _ignored(caller: Caller, asker: _Asker, texts: list[str]) -> tuple[Way, ...]:
    """A mask that changes nothing is handed over all the same, in the first convention that runs."""
    for argument in caller.plan.masks:
        said = said_about(texts, argument)
        ways = list(_conventions(argument, caller.plan.layout, said))
        for way in ways:
            if said.true_attends in (None, way.true_attends):
                try:
                    caller.call(*asker.inputs, asker.mask(way), ways=(way,))
                except CAUGHT:
                    continue
                return (way,)
        if said.shape == "[B, S]":
            return (ways[0],)
    return ()


def is_causal(caller: Caller) -> bool:
    """Whether positions, without any mask, see only one side of themselves."""
    length = caller.subject.sizes.long
    try:
        found = reactions(caller, inputs_for(caller, length, length))
    except CAUGHT:
        return False
    seen = (found > NOTHING) | ~found.isfinite()
    if not bool((seen == seen[:1]).all()):
        return False
    eye = torch.eye(length, dtype=torch.bool)
    ones = torch.ones(length, length, dtype=torch.bool)
    look = ~eye if caller.plan.self_only else ones
    triangles = [ones.tril(d) for d in (0, -1, 1, -2, 2)] + [ones.triu(d) for d in (1, 0)]
    return any(bool((seen[0] == one)[look & one.any(1, keepdim=True)].all()) for one in triangles)
