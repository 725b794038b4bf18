"""Finding the plan that works: which inputs, in which layout.

Which argument is the mask, in which shape, kind and polarity: tried, and seen from who still reacts.

A mask of random pairs, other for every sample, is handed over in one convention after another; the one under
which query t reacts to key s exactly where the mask says so is the learner's. Code with a mistake about masks
reacts exactly in no convention: then gentler questions decide, then what the code says.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import permutations

import torch
from torch import Tensor, nn

from .. import recipe
from ..evidence import Problem
from ..recipe import ProbeInputs, Weights
from .call_plan import FULL, LENGTHS, PADDING, SAME_FOR_ALL, MaskConvention, plans
from .caller import Caller, inputs_for, moved, reactions
from .subject import Subject, of_numpy
from .surroundings import CAUGHT, problem_of
from .words import Said, input_word, replaces_causal, said_about


class Doubt(str):
    """Said while it is not clear what the code does with a mask or a layout; a verdict answers it."""


HEADS_FIRST = FULL[-1]


def find_caller(subject: Subject) -> tuple[Caller | None, Problem | None]:
    """The first plan and layout that give an output; else what went wrong with the likeliest.

    A function of q, k and v may take them in several layouts and be meant for one: that in which it is right
    comes before those in which it is not.
    """
    first: Problem | None = None
    found: Caller | None = None
    for layout, as_numpy in _layouts(subject):
        own = _for_layout(subject, layout)
        for plan in plans(own):
            caller = Caller(own, replace(plan, layout=layout, as_numpy=as_numpy))
            problem = _try(caller)
            if problem is None:
                caller = _ordered(caller)
                if _has_projections(subject) or _is_right(caller):
                    return caller, None
                found = found or caller
                break  # the next layout
            if (
                first is None
                or (first.line is None and first.kind != "shape" and problem.line is not None)
                or _further(problem, first, subject)
            ):
                first = problem
    return found, None if found is not None else first


def _further(problem: Problem, first: Problem, subject: Subject) -> bool:
    """Whether more of the code ran, in another layout, before torch stopped it; a refusal comes first."""
    lines = [linecache.getline(file, first.line or 0).strip() for file in subject.files]
    if {problem.kind, first.kind} != {"RuntimeError"} or any(one.startswith("raise") for one in lines):
        return False
    return (problem.line or 0) > (first.line or 0) > 0


def _is_right(caller: Caller) -> bool:
    """Whether a function without weights of its own is attention as it is called here."""
    E, H = caller.subject.sizes.E, caller.subject.sizes.H
    one, zero = torch.eye(E, dtype=torch.float64), torch.zeros(E, dtype=torch.float64)
    inputs = inputs_for(caller, caller.subject.sizes.long, caller.subject.sizes.long)
    try:
        output = caller.call(*inputs).output.detach().double()
        truth = recipe.run(
            ProbeInputs(*(x.double() for x in inputs)), Weights(*(one,) * 4, *(zero,) * 4), H
        ).output
    except CAUGHT:
        return False
    return output.shape == truth.shape and torch.allclose(output, truth, atol=1e-6)


def _layouts(subject: Subject) -> list[tuple[str, bool]]:
    """(layout, whether as numpy arrays), the likeliest first."""
    if _has_projections(subject):
        found = ["batch first", "channels first", "image", "volume", "one sequence", "row by row"]
    else:
        found = ["heads first", "batch first", "heads in the batch", "one sequence"]
        if subject.heads_given:
            found = ["batch first", "heads first", "one sequence"]
    if subject.numpy or of_numpy(subject.body):
        return [(one, True) for one in found]
    return [(one, False) for one in found] + [(one, True) for one in found if subject.is_function]


def _has_projections(subject: Subject) -> bool:
    if any(tensor.ndim >= 2 for tensor in subject.parameters.values()):
        return True
    body = subject.body
    return isinstance(body, nn.Module) and any(True for _ in body.parameters())


def _for_layout(subject: Subject, layout: str) -> Subject:
    """Without projections and without heads in the layout there is one head."""
    if _has_projections(subject) or layout.startswith("heads") or subject.heads_given:
        return subject
    return replace(subject, sizes=subject.sizes.of_width(subject.sizes.E, 1))


def _try(caller: Caller) -> Problem | None:
    """Call it; where a mask is required and None will not do, with one that shows everything."""
    inputs = inputs_for(caller, caller.subject.sizes.long, caller.subject.sizes.long)
    try:
        caller.call(*inputs)
        return None
    except CAUGHT as error:
        problem = problem_of(error, "call", caller.subject.files, "plain")
    for argument in caller.plan.needs_mask:
        for way in any_way(argument):
            try:
                caller.call(*inputs, ways=(way,))
            except CAUGHT:
                continue
            caller.ways = (way,)
            return None
    return problem


def any_way(argument: str) -> list[MaskConvention]:
    """The likeliest ways to give a mask, before anything is known of it."""
    kinds: list[tuple[str, torch.dtype]] = [
        ("bool", torch.bool),
        ("0 and 1", torch.float64),
        ("added", torch.float64),
    ]
    shapes = [*FULL[:2], *SAME_FOR_ALL[:1], *PADDING[:2], *FULL[2:4]]
    if input_word(argument) == "lengths":
        return [MaskConvention(argument, shape, "lengths") for shape in LENGTHS]
    return [MaskConvention(argument, shape, kind, True, number) for shape in shapes for kind, number in kinds]


def _ordered(caller: Caller) -> Caller:
    """Three inputs whose names say nothing, in the order in which the first is as long as the output."""
    slots = caller.plan.slots
    if len(slots) != 3 or any(input_word(name) for name, _ in slots):
        return caller
    inputs = inputs_for(caller, caller.subject.sizes.short, caller.subject.sizes.long)
    for order in permutations(("query", "key", "value")):
        pairs = tuple((name, slot) for (name, _), slot in zip(slots, order, strict=True))
        other = replace(caller, plan=replace(caller.plan, slots=pairs))
        try:
            other.call(*inputs)
        except CAUGHT:
            continue
        return other
    return caller


def _coupled(caller: Caller) -> bool:
    """Whether sample 0 reacts to sample 1."""
    length = caller.subject.sizes.long
    inputs = inputs_for(caller, length, length)
    base = caller.call(*inputs).output.detach()
    moved: list[Tensor] = []
    for one in inputs:
        seen = next((k for k in range(len(moved)) if inputs[k] is one), None)
        if seen is not None:
            moved.append(moved[seen])
            continue
        other = one.clone()
        other[1] += 1.0
        moved.append(other)
    again = caller.call(moved[0], moved[1], moved[2]).output.detach()
    return bool(((again - base)[0].abs() > caller.subject.nothing * base.abs().max()).any())


def find_layout(caller: Caller, text: str) -> tuple[Caller, str | None]:
    """Batch first or sequence first; a sentence where it had to be decided."""
    plan, body = caller.plan, caller.subject.body
    if plan.layout == "heads first":
        return _heads_inside(caller), None
    if plan.layout != "batch first":
        return caller, None
    other = replace(caller, plan=replace(plan, layout="sequence first"))
    try:
        mixes = _coupled(caller)
    except CAUGHT:
        return caller, None
    if not mixes:
        return caller, None
    try:
        if _coupled(other):
            return caller, Doubt("sample 0 reacts to sample 1: something mixes the sequences of a batch")
    except CAUGHT:
        return caller, None
    meant = getattr(body, "batch_first", None)
    if meant is False:
        return other, "inputs are [T, B, E], length first: batch_first is False"
    says = layout_words(text)
    inside = (
        [one for one in body.modules() if isinstance(one, nn.MultiheadAttention)] if _is_module(body) else []
    )
    if says == "batch first" or meant is True or (says is None and inside):
        why = "the code names its axes batch first" if says else "nothing in the code says so"
        return caller, Doubt(f"it computes as if the inputs were [T, B, E], but {why}")
    return other, "inputs are [T, B, E], length first"


def _is_module(body: object) -> bool:
    return isinstance(body, nn.Module)


_BATCH = r"(?:batch\w*|bs|bsz|b|n_?batch\w*)"
_TIME = r"(?:seq\w*|t|l|len\w*|length\w*|time\w*|\w+_len\w*|tgt_len|src_len|n_?seq\w*|q_len|query_len)"


_AXES = r"\s*(?:,|\bx\b|\*)\s*"


def layout_words(text: str) -> str | None:
    """What the code and its words say of its axes: "batch first", "sequence first", or nothing.

    Words come first, then how the shape of an input is taken apart: sizes that are written further on are
    those of tensors inside.
    """
    low = text.lower()
    prose = "\n".join([*re.findall(r"\"{3}.*?\"{3}|'{3}.*?'{3}", low, re.S), *re.findall(r"#.*", low)])
    shapes = "\n".join(re.findall(r"^.*=\s*\w+\.(?:size\(\)|shape)\s*(?:#.*)?$", low, re.M))
    for part in (prose, shapes, low):
        batch = len(re.findall(rf"\b{_BATCH}{_AXES}{_TIME}{_AXES}", part)) + len(
            re.findall(rf"\b{_BATCH}\s*=\s*\w+\.(?:size\(0\)|shape\[0\])", part)
        )
        time = len(re.findall(rf"\b{_TIME}{_AXES}{_BATCH}{_AXES}", part)) + len(
            re.findall(rf"\b{_BATCH}\s*=\s*\w+\.(?:size\(1\)|shape\[1\])", part)
        )
        if batch != time:
            return "batch first" if batch > time else "sequence first"
    return None


def _heads_inside(caller: Caller) -> Caller:
    """[B, T, H, D] where positions do not see each other as [B, H, T, D] but do in this layout."""
    length = caller.subject.sizes.long
    apart = ~torch.eye(length, dtype=torch.bool)
    try:
        inputs = inputs_for(caller, length, length)
        if bool((reactions(caller, inputs, of="value") > caller.subject.nothing)[:, apart].any()):
            return caller
        other = replace(caller, plan=replace(caller.plan, layout="heads inside"))
        if bool((reactions(other, inputs, of="value") > caller.subject.nothing)[:, apart].any()):
            return other
    except CAUGHT:
        return caller
    return caller


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


class _MaskProber:
    """Hands masks over and watches."""

    def __init__(self, caller: Caller, causal: bool, sight: Tensor | None = None) -> None:
        self.caller, self.causal = caller, causal
        sizes = caller.subject.sizes
        self.B, self.L = sizes.B, sizes.long
        self.inputs = inputs_for(caller, self.L, self.L)
        self.triangle = torch.ones(self.L, self.L, dtype=torch.bool).tril()
        eye = torch.eye(self.L, dtype=torch.bool)
        self.look = ~eye if caller.plan.self_only else torch.ones_like(eye)
        self.always = self.triangle if causal else sight  # what it hides by itself
        self._columns: dict[tuple[MaskConvention, str, bool], list[Tensor]] = {}
        self._bases: dict[tuple[MaskConvention, bool], Tensor] = {}
        self.free = caller.call(*self.inputs).output.detach() if not caller.plan.needs_mask else None

    def mask(self, way: MaskConvention, same: bool = False) -> Tensor:
        """bool [B, T, S] that this convention can say."""
        if way.kind == "lengths":
            counts = torch.arange(self.B * self.L).reshape(self.B, self.L) * 3 % (self.L - 1) + 1
            counts = counts if "T" in way.shape else counts[:, :1] + torch.arange(self.B)[:, None] % 2
            return (torch.arange(self.L) < counts[..., None]).expand(self.B, self.L, self.L).contiguous()
        if way.kind == "switch":
            return self.triangle.expand(self.B, self.L, self.L).contiguous()
        if way.shape in PADDING:
            return padding_mask(self.B, self.L, self.L, holes=True, same=same or way.shape == "[S]")
        same = same or way.shape in SAME_FOR_ALL
        if self.caller.plan.layout == "one sequence":
            same = False  # it sees one sample at a time
        return random_mask(self.B, self.L, self.L, self.causal, same=same)

    def runs(self, way: MaskConvention) -> bool:
        """Whether it can be called so, and does not pay the mask no heed."""
        try:
            output = self.caller.call(*self.inputs, self.mask(way), ways=(way,)).output.detach().double()
        except CAUGHT:
            return False
        return True if self.free is None else not torch.equal(output, self.free)

    def column(self, way: MaskConvention, of: str, same: bool, s: int) -> Tensor:
        """How much each query reacts to key s, float [B, T]; each call is made once."""
        columns = self._columns.setdefault((way, of, same), [])
        mask = self.mask(way, same)
        if (way, same) not in self._bases:
            self._bases[way, same] = (
                self.caller.call(*self.inputs, mask, ways=(way,)).output.detach().double()
            )
        base = self._bases[way, same]
        while len(columns) <= s:
            key = self.inputs[1]
            step = torch.zeros_like(key)
            step[:, len(columns)] = self.push[:, len(columns)]
            pushed = moved(*self.inputs, step, self.caller, of)
            change = self.caller.call(*pushed, mask, ways=(way,)).output.detach().double() - base
            columns.append(change.abs().amax(-1) / base.nan_to_num(0).abs().max().clamp_min(1e-30))
        return columns[s]

    @cached_property
    def push(self) -> Tensor:
        dice = torch.Generator().manual_seed(77)
        return torch.randn(self.inputs[1].shape, generator=dice, dtype=torch.float64)

    def wanted(self, way: MaskConvention, same: bool, turned: bool = False, join: str = "and") -> Tensor:
        """Who should react, bool [B, T, S]; join: how the mask meets what it always hides, or "alone"."""
        mask = self.mask(way, same)
        mask = mask.mT if turned else mask
        if self.always is None or join == "alone":
            return mask
        return mask | self.always if join == "or" else mask & self.always

    def react(self, way: MaskConvention, of: str = "both", same: bool = False) -> tuple[Tensor, Tensor]:
        """(who reacts, float [B, T, S]; who should)."""
        every = [self.column(way, of, same, s) for s in range(self.L)]
        return torch.stack(every, -1), self.wanted(way, same)

    def exact(
        self,
        way: MaskConvention,
        of: str = "both",
        same: bool = False,
        turned: bool = False,
        join: str = "and",
    ) -> bool:
        """Whether exactly those react that should; `turned`: with queries and keys exchanged in the mask."""
        wanted = self.wanted(way, same, turned, join)
        try:
            for s in range(self.L):  # most conventions are wrong, and the first key tells
                found, look = self.column(way, of, same, s), self.look[:, s]
                if not bool(found.isfinite().all()):
                    return False
                if not torch.equal((found > self.caller.subject.nothing)[:, look], wanted[:, look, s]):
                    return False
        except CAUGHT:
            return False
        return True

    def ratio(self, way: MaskConvention) -> float:
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


def _conventions(argument: str, layout: str, said: Said) -> Iterator[MaskConvention]:
    """Shapes, kinds and polarities for this argument, the likeliest first."""
    word = argument.lower()
    if input_word(argument) == "lengths":
        yield from (MaskConvention(argument, shape, "lengths") for shape in LENGTHS)
        return
    shapes = [*FULL[:3], HEADS_FIRST, FULL[3], *SAME_FOR_ALL, *PADDING[:3]]
    if "pad" in word:
        shapes = [*PADDING[:3], *FULL[:4]]
    if layout == "sequence first":
        shapes += [*FULL[4:6], PADDING[4]]
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
                yield MaskConvention(argument, shape, kind, True, number)
            else:
                yield from (MaskConvention(argument, shape, kind, attends, number) for attends in polarities)


def _simple(asker: _MaskProber, argument: str) -> MaskConvention | None:
    """A mask argument that takes no mask: True, 1 or "causal" for a causal one, or lengths."""
    ways = (
        [MaskConvention(argument, "", "switch", on=on) for on in (True, "causal")] if not asker.causal else []
    )
    for way in [*ways, *(MaskConvention(argument, shape, "lengths") for shape in LENGTHS)]:
        if asker.runs(way) and asker.exact(way):
            return way
    return None


def _of_queries(argument: str) -> bool:
    """Whether its name says that it is about queries."""
    return re.match(r"q_|qmask|query|queries|tgt_key_padding|target_padding", argument.lower()) is not None


def _find_way(asker: _MaskProber, argument: str, said: Said) -> tuple[MaskConvention | None, str]:
    """(the convention of one argument, a sentence where it was not plain to see)."""
    plan = asker.caller.plan
    running: list[MaskConvention] = []
    for i, way in enumerate(ways := list(_conventions(argument, plan.layout, said))):
        if way.shape == HEADS_FIRST and not any(one.shape == "[B*H, T, S]" for one in running):
            continue  # as large as the one before it
        if asker.runs(way):
            running.append(way)
            if asker.exact(way):
                return way, ""
        if i + 1 == len(ways) or ways[i + 1].shape != way.shape:  # a shape is done with
            mine = [one for one in running if one.shape == way.shape]
            if way.shape == "[B*H, T, S]" and i + 1 < len(ways) and ways[i + 1].shape == HEADS_FIRST:
                continue  # the other order first
            if way.shape == HEADS_FIRST:
                mine = [one for one in running if one.shape == "[B*H, T, S]"] + mine
            if mine and said.shape == way.shape:
                running = mine
                break
            for one in mine if way.shape in FULL else []:
                if said.true_attends in (None, one.true_attends) and asker.exact(one, same=True):
                    return one, Doubt(f"{argument} does not hide exactly what it should")
    if not running or said.shape == "":
        simple = _simple(asker, argument)
        if simple is not None:
            return simple, ""
    if not running:
        return None, Doubt(f"{argument} changes nothing, whatever is given")
    if _of_queries(argument) and any(asker.exact(way, turned=True) for way in running):
        return None, f"{argument} hides queries, no keys: it was left out"
    likely = [
        way
        for way in running
        if said.true_attends in (None, way.true_attends) and (way.kind == "added") == said.added
    ] or running
    if _broken_by_nan(asker, likely):
        return likely[0], Doubt(f"{argument} makes the output NaN")
    questions: list[tuple[str, bool, bool]] = [("both", True, False), ("both", False, True)]
    if not plan.self_only and not plan.memory_only:
        for of in ("key", "value"):
            questions += [(of, False, False), (of, False, True), (of, True, False)]
    for way in likely if asker.always is not None else []:
        if asker.exact(way, join="alone"):
            if asker.causal and way.shape not in PADDING and said.replaces:
                return replace(way, whole=True), f"{argument} is taken in place of its own causal mask"
            return way, f"with {argument}, what is hidden without it is not hidden any more"
        if asker.exact(way, join="or"):
            return way, f"with {argument}, a key is seen where it or the causal mask allows it"
    for of, same, turned in questions:
        for way in likely:
            if asker.exact(way, of, same, turned):
                return way, Doubt(f"{argument} does not hide exactly what it should")
    best = max(likely, key=lambda way: round(asker.ratio(way), 2))
    return best, Doubt(f"{argument} changes the output, but hides nothing exactly")


def _broken_by_nan(asker: _MaskProber, ways: list[MaskConvention]) -> bool:
    """Whether every convention makes all of the output NaN."""
    return all(not bool(asker.react(way)[0].isfinite().any()) for way in ways)


def find_ways(
    caller: Caller, causal: bool, texts: list[str], sight: Tensor | None = None
) -> tuple[tuple[MaskConvention, ...], list[str]]:
    """The conventions of the arguments that take masks, and sentences.

    One for pairs, one for padding, one that switches a causal mask on. `sight`: bool [L, L], what it hides
    by itself is False.
    """
    plan = caller.plan
    try:
        asker = _MaskProber(caller, causal, sight)
    except CAUGHT:
        return caller.ways, []
    sentences: list[str] = []
    pairs: MaskConvention | None = None
    padding: MaskConvention | None = None
    switch: MaskConvention | None = None
    for argument in plan.masks:
        said = replace(said_about(texts, argument), replaces=replaces_causal(texts, argument))
        way, sentence = _find_way(asker, argument, said)
        sentences += [sentence] if sentence else []
        if way is None:
            continue
        if way.kind == "switch":
            switch = switch or way
        elif (way.shape in PADDING or way.shape.startswith("[B]")) and padding is None:
            padding = way
        elif way.shape not in PADDING and (
            pairs is None or (pairs.shape in SAME_FOR_ALL and way.shape in FULL)
        ):
            pairs = way
    if pairs is None and padding is None and switch is None:
        ignored = _ignored(caller, asker, texts)
        return ignored or tuple(
            MaskConvention(name, "", "switch", on=on) for name, on in plan.switches[:1]
        ), sentences
    if pairs is None or padding is None:
        switch = switch or next(
            (MaskConvention(one, "", "switch", on=on) for one, on in plan.switches if not causal), None
        )
    found = tuple(way for way in (pairs, padding) if way is not None)
    if switch is not None and _together(caller, asker, (*found, switch)):
        found = (*found, switch)
    return found, sentences


def _together(caller: Caller, asker: _MaskProber, ways: tuple[MaskConvention, ...]) -> bool:
    """Whether a switch can be thrown beside the masks: torch's own attention takes one or the other."""
    if len(ways) == 1:
        return True
    both = padding_mask(asker.B, asker.L, asker.L) & asker.triangle
    try:
        caller.call(*asker.inputs, both, ways=ways)
    except CAUGHT:
        return False
    return asker.exact(ways[-1])


def _ignored(caller: Caller, asker: _MaskProber, texts: list[str]) -> tuple[MaskConvention, ...]:
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


def sight(caller: Caller) -> Tensor | None:
    """Who sees whom without any mask, bool [L, L]; None where samples differ or it cannot be told."""
    length = caller.subject.sizes.long
    try:
        found = reactions(caller, inputs_for(caller, length, length))
    except CAUGHT:
        return None
    seen = (found > caller.subject.nothing) | ~found.isfinite()
    return seen[0] if bool((seen == seen[:1]).all()) else None


def is_causal(caller: Caller, seen: Tensor | None) -> bool:
    """Whether positions, without any mask, see only one side of themselves."""
    if seen is None:
        return False
    length = len(seen)
    eye = torch.eye(length, dtype=torch.bool)
    ones = torch.ones(length, length, dtype=torch.bool)
    look = ~eye if caller.plan.self_only else ones
    triangles = [ones.tril(d) for d in (0, -1, 1, -2, 2)] + [ones.triu(d) for d in (1, 0)]
    return any(bool((seen == one)[look & one.any(1, keepdim=True)].all()) for one in triangles)
