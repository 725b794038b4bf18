"""Find how the learner's code is called: the layout of its inputs, and how each argument takes a mask.

A mask of random pairs, different for every sample, is passed in one convention (shape, kind, polarity) after
another. The convention under which the output of query t changes with key s exactly where the mask allows it
is the learner's. Code with a mistake about masks fits no convention exactly; then weaker conditions are
tried, then what the code says.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, zip_longest

import torch
from torch import Tensor, nn

from .. import recipe
from ..evidence import Problem
from ..recipe import ProbeInputs, Weights
from .call_plan import FULL, INPUTS, LENGTHS, PADDING, SAME_FOR_ALL, MaskConvention, plans
from .caller import GRIDS, Caller, inputs_for, map_inputs, reaction_columns, reactions, shift_second_sample
from .environment import CAUGHT, problem_of
from .subject import Subject, of_numpy
from .vocabulary import MaskDescription, describe_mask, input_word, replaces_causal


class Doubt(str):
    """A sentence about a mask or a layout that could not be determined with certainty."""


OWN_MASK = "the mask that the code creates itself"
SAMPLES_FIRST, HEADS_FIRST = "[B*H, T, S]", FULL[-1]  # two orders of one size


def find_caller(subject: Subject) -> tuple[Caller | None, Problem | None]:
    """Return a caller for the first plan and layout that give an output, else the likeliest one's problem.

    A function of q, k and v may run in several layouts and be meant for one. A layout in which its numbers
    are right comes before those in which they are not.
    """
    first: Problem | None = None
    first_caller: Caller | None = None
    for layout, as_numpy in _likely_layouts(subject):
        own = _for_layout(subject, layout)
        for plan in plans(own):
            caller = Caller(own, replace(plan, layout=layout, as_numpy=as_numpy))
            problem = _first_problem(caller)
            if problem is None:
                caller = _with_ordered_inputs(caller)
                if _has_projections(subject) or _is_attention(caller):
                    return caller, None
                first_caller = first_caller or caller
                break  # the next layout
            if (
                first is None
                or (first.line is None and first.kind != "shape" and problem.line is not None)
                or _stopped_later(problem, first, subject)
            ):
                first = problem
    return first_caller, None if first_caller is not None else first


def _stopped_later(problem: Problem, first: Problem, subject: Subject) -> bool:
    """Return True if torch stopped the code at a later line than in the first layout."""
    lines = [linecache.getline(file, first.line or 0).strip() for file in subject.files]
    if {problem.kind, first.kind} != {"RuntimeError"} or any(line.startswith("raise") for line in lines):
        return False
    return (problem.line or 0) > (first.line or 0) > 0


def _is_attention(caller: Caller) -> bool:
    """Return True if a function without weights computes attention when it is called in this layout."""
    E, H = caller.subject.sizes.E, caller.subject.sizes.H
    identity, zero = torch.eye(E, dtype=torch.float64), torch.zeros(E, dtype=torch.float64)
    inputs = inputs_for(caller)
    try:
        output = caller.output(*inputs)
        truth = recipe.run(ProbeInputs(*inputs), Weights(*(identity,) * 4, *(zero,) * 4), H).output
    except CAUGHT:
        return False
    return output.shape == truth.shape and torch.allclose(output, truth, atol=1e-6)


def _likely_layouts(subject: Subject) -> list[tuple[str, bool]]:
    """Return pairs (layout, True if inputs are NumPy arrays), the likeliest first."""
    if _has_projections(subject):
        layouts = ["batch first", "channels first", "image", "volume", "one sequence", *GRIDS]
    else:
        layouts = ["heads first", "batch first", "heads in the batch", "one sequence"]
        if subject.heads_given:
            layouts = ["batch first", "heads first", "one sequence"]
    if subject.numpy or of_numpy(subject.body):
        return [(layout, True) for layout in layouts]
    return [(layout, False) for layout in layouts] + [
        (layout, True) for layout in layouts if subject.is_function
    ]


def _has_projections(subject: Subject) -> bool:
    """Return True if the code has parameters with at least two axes, or a module with any."""
    if any(tensor.ndim >= 2 for tensor in subject.parameters.values()):
        return True
    body = subject.body
    return isinstance(body, nn.Module) and any(True for _ in body.parameters())


def _for_layout(subject: Subject, layout: str) -> Subject:
    """Return the subject with a single head if nothing in the code or the layout says how many there are."""
    if _has_projections(subject) or layout.startswith("heads") or subject.heads_given:
        return subject
    return replace(subject, sizes=subject.sizes.of_width(subject.sizes.E, 1))


def _first_problem(caller: Caller) -> Problem | None:
    """Call the code and return the problem, None if it runs; a required mask is one that hides nothing."""
    inputs = inputs_for(caller)
    try:
        caller.call(*inputs)
        return None
    except CAUGHT as error:
        problem = problem_of(error, "call", caller.subject.files, "plain")
    for argument in caller.plan.needs_mask:
        for convention in likely_conventions(argument):
            try:
                caller.call(*inputs, conventions=(convention,))
            except CAUGHT:
                continue
            caller.conventions = (convention,)
            return None
    return problem


def likely_conventions(argument: str) -> list[MaskConvention]:
    """Return the likeliest conventions of a mask argument, before anything is measured."""
    kinds: list[tuple[str, torch.dtype]] = [
        ("bool", torch.bool),
        ("0 and 1", torch.float64),
        ("added", torch.float64),
    ]
    shapes = [*FULL[:2], *SAME_FOR_ALL[:1], *PADDING[:2], *FULL[2:4]]
    if input_word(argument) == "lengths":
        return [MaskConvention(argument, shape, "lengths") for shape in LENGTHS]
    return [MaskConvention(argument, shape, kind, True, number) for shape in shapes for kind, number in kinds]


def _with_ordered_inputs(caller: Caller) -> Caller:
    """Order inputs whose names do not say all, so that the output is as long as the queries."""
    slots = caller.plan.slots
    named = [name for name, _ in slots if input_word(name)]
    are_inputs = {slot for _, slot in slots} <= {*INPUTS}
    if not are_inputs or (len(slots), len(named)) not in ((3, 0), (2, 0), (2, 1)):
        return caller
    inputs = inputs_for(caller, caller.subject.sizes.short, caller.subject.sizes.long)
    for order in permutations([slot for _, slot in slots]):
        pairs = tuple((name, slot) for (name, _), slot in zip(slots, order, strict=True))
        other = replace(caller, plan=replace(caller.plan, slots=pairs))
        try:
            other.call(*inputs)
        except CAUGHT:
            continue
        return other
    return caller


def _mixes_samples(caller: Caller) -> bool:
    """Return True if the output of sample 0 changes with sample 1."""
    inputs = inputs_for(caller)
    before = caller.output(*inputs)
    after = caller.output(*map_inputs(inputs, shift_second_sample))
    return bool(((after - before)[0].abs() > caller.subject.tolerance * before.abs().max()).any())


def find_layout(caller: Caller, text: str) -> tuple[Caller, str | None]:
    """Return the caller for batch first or sequence first, and a sentence where that had to be decided."""
    plan, body = caller.plan, caller.subject.body
    if plan.layout == "heads first":
        return _with_heads_inside(caller), None
    if plan.layout != "batch first":
        return caller, None
    other = replace(caller, plan=replace(plan, layout="sequence first"))
    try:
        mixes = _mixes_samples(caller)
    except CAUGHT:
        return caller, None
    if not mixes:
        return caller, None
    try:
        if _mixes_samples(other):
            return caller, Doubt(
                "the output of sample 0 depends on sample 1: the code mixes the sequences of a batch"
            )
    except CAUGHT:
        return caller, None
    meant = getattr(body, "batch_first", None)
    if meant is False:
        return other, "inputs are [T, B, E], with the sequence dimension first: batch_first is False"
    named_layout = layout_words(text)
    inside = isinstance(body, nn.Module) and any(isinstance(m, nn.MultiheadAttention) for m in body.modules())
    if named_layout == "batch first" or meant is True or (named_layout is None and inside):
        reason = (
            "the names of the axes in the code put the batch first"
            if named_layout
            else "nothing in the code says so"
        )
        return caller, Doubt(f"its output is that of attention over inputs [T, B, E], but {reason}")
    return other, "inputs are [T, B, E], with the sequence dimension first"


_BATCH = r"(?:batch\w*|bs|bsz|b|n_?batch\w*)"
_TIME = r"(?:seq\w*|t|l|len\w*|length\w*|time\w*|\w+_len\w*|tgt_len|src_len|n_?seq\w*|q_len|query_len)"
_AXES = r"\s*(?:,|\bx\b|\*)\s*"
_OF_WEIGHTS = re.compile(r"mask|score|weights|logits|energy")  # [B, T, S], in whatever layout the inputs are


def layout_words(text: str) -> str | None:
    """Return "batch first" or "sequence first" if the text of the code names its axes so, else None.

    Comments and docstrings come first, then the lines that unpack the shape of an input, then everything:
    sizes written elsewhere are those of tensors inside.
    """
    low = text.lower()
    inputs = "\n".join(line for line in low.splitlines() if not _OF_WEIGHTS.search(line))
    return _axes_of(inputs) or _axes_of(low)


def _axes_of(low: str) -> str | None:
    """Return the order of the axes in this text, in small letters."""
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


def _with_heads_inside(caller: Caller) -> Caller:
    """Return a caller for [B, T, H, D] if positions interact in that layout and not as [B, H, T, D]."""
    different = ~torch.eye(caller.subject.sizes.long, dtype=torch.bool)
    heads_inside = replace(caller, plan=replace(caller.plan, layout="heads inside"))

    def mixes_positions(caller: Caller) -> bool:
        strengths = reactions(caller, inputs_for(caller), of="value")
        return bool((strengths > caller.subject.tolerance)[:, different].any())

    try:
        return heads_inside if not mixes_positions(caller) and mixes_positions(heads_inside) else caller
    except CAUGHT:
        return caller


def random_mask(B: int, T: int, S: int, causal: bool = False, seed: int = 3, same: bool = False) -> Tensor:
    """Return a random mask, bool [B, T, S]: every row and every column allows some pairs and hides some.

    Args:
        causal: the diagonal is allowed.
        same: one mask for all samples.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        mask = torch.rand(1 if same else B, T, S, generator=generator) < 0.55
        if causal:
            mask |= torch.eye(T, S, dtype=torch.bool)
        if all(bool(part.any(dim).all()) for part in (mask, ~mask) for dim in (1, 2)):
            return mask.expand(B, T, S).contiguous()


def padding_mask(B: int, T: int, S: int, holes: bool = False, same: bool = False) -> Tensor:
    """Return a padding mask, bool [B, T, S]: another length for every sample, the same for every query.

    Args:
        holes: one key before the padding is hidden, too.
        same: the length of the first sample for all.
    """
    keys = torch.ones(B, S, dtype=torch.bool)
    for b in range(B):
        row = 0 if same else b
        keys[b, S - 1 - row % (S - 1) :] = False
        if holes:
            keys[b, 1 + (row + 1) % (S - 3)] = False
    return keys[:, None].expand(B, T, S).contiguous()


class _MaskProbe:
    """Calls of the code with masks in many conventions, and which queries react to which keys in each."""

    def __init__(self, caller: Caller, causal: bool, pattern: Tensor | None = None) -> None:
        self.caller, self.causal = caller, causal
        self.B, self.L = caller.subject.sizes.B, caller.subject.sizes.long
        self.inputs = inputs_for(caller)
        self.triangle = torch.ones(self.L, self.L, dtype=torch.bool).tril()
        eye = torch.eye(self.L, dtype=torch.bool)
        self.compared = ~eye if caller.plan.self_only else torch.ones_like(eye)  # pairs that say something
        self.own_mask = self.triangle if causal else pattern  # applied without any argument
        self.unmasked_output = None if caller.plan.needs_mask else caller.output(*self.inputs)
        self._masks: dict[tuple[MaskConvention, bool], Tensor] = {}
        self._columns: dict[tuple[MaskConvention, str, bool], tuple[list[Tensor], Iterator[Tensor]]] = {}

    def mask(self, convention: MaskConvention, same: bool = False) -> Tensor:
        """Return a mask that this convention can express, bool [B, T, S]; `same`: one for all samples."""
        if (convention, same) not in self._masks:
            self._masks[convention, same] = self._new_mask(convention, same)
        return self._masks[convention, same]

    def _new_mask(self, convention: MaskConvention, same: bool) -> Tensor:
        B, L = self.B, self.L
        if convention.kind == "lengths":
            counts = torch.arange(B * L).reshape(B, L) * 3 % (L - 1) + 1
            counts = counts if "T" in convention.shape else counts[:, :1] + torch.arange(B)[:, None] % 2
            return (torch.arange(L) < counts[..., None]).expand(B, L, L).contiguous()
        if convention.kind == "switch":
            return self.triangle.expand(B, L, L).contiguous()
        if convention.shape in PADDING:
            return padding_mask(B, L, L, holes=True, same=same or convention.shape == "[S]")
        same = same or convention.shape in SAME_FOR_ALL
        if self.caller.plan.layout == "one sequence":
            same = False  # it is called with one sample at a time
        return random_mask(B, L, L, self.causal, same=same)

    def has_effect(self, convention: MaskConvention) -> bool:
        """Return True if the code runs with a mask in this convention, and the mask changes the output."""
        try:
            output = self.caller.output(*self.inputs, self.mask(convention), (convention,))
        except CAUGHT:
            return False
        return self.unmasked_output is None or not torch.equal(output, self.unmasked_output)

    def reaction_to(self, convention: MaskConvention, of: str, same: bool, s: int) -> Tensor:
        """Return how much each query reacts to key s, float [B, T]; every call is made once."""
        case = convention, of, same
        if case not in self._columns:
            mask = self.mask(convention, same)
            self._columns[case] = [], reaction_columns(self.caller, self.inputs, mask, (convention,), of)
        columns, remaining = self._columns[case]
        try:
            while len(columns) <= s:
                columns.append(next(remaining))
        except BaseException:
            del self._columns[case]  # an iterator that raised has ended
            raise
        return columns[s]

    def expected(
        self, convention: MaskConvention, same: bool, transposed: bool = False, join: str = "and"
    ) -> Tensor:
        """Return which queries should react to which keys, bool [B, T, S].

        Args:
            join: how the mask meets the one the code always applies: "and", "or", or "alone" (not at all).
        """
        mask = self.mask(convention, same)
        mask = mask.mT if transposed else mask
        if self.own_mask is None or join == "alone":
            return mask
        return mask | self.own_mask if join == "or" else mask & self.own_mask

    def reactions_of(
        self, convention: MaskConvention, of: str = "both", same: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return how much queries react to keys, float [B, T, S], and which should, bool [B, T, S]."""
        every = [self.reaction_to(convention, of, same, s) for s in range(self.L)]
        return torch.stack(every, -1), self.expected(convention, same)

    def is_exact(
        self,
        convention: MaskConvention,
        of: str = "both",
        same: bool = False,
        transposed: bool = False,
        join: str = "and",
    ) -> bool:
        """Return True if exactly those queries react that should.

        Args:
            transposed: queries and keys are exchanged in the mask.
        """
        expected = self.expected(convention, same, transposed, join)
        try:
            for s in range(self.L):  # most conventions are wrong, and the first key tells
                reaction, compared = self.reaction_to(convention, of, same, s), self.compared[:, s]
                if not bool(reaction.isfinite().all()):
                    return False
                if not torch.equal(
                    (reaction > self.caller.subject.tolerance)[:, compared], expected[:, compared, s]
                ):
                    return False
        except CAUGHT:
            return False
        return True

    def ratio(self, convention: MaskConvention) -> float:
        """Return how much stronger queries react to visible keys than to hidden ones; 0 if unknown."""
        try:
            reactions, expected = self.reactions_of(convention, same=True)
        except CAUGHT:
            return 0.0
        compared = self.compared.expand_as(expected) & reactions.isfinite()
        visible, hidden = reactions[expected & compared], reactions[~expected & compared]
        if not len(visible) or not len(hidden):
            return 0.0
        return float(visible.mean() / hidden.mean().clamp_min(1e-12))


def _candidates(argument: str, layout: str, description: MaskDescription) -> Iterator[MaskConvention]:
    """Yield conventions of one mask argument, the likeliest first."""
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
    elif description.shape:
        shapes = [description.shape] + (
            [shape for shape in shapes if shape != description.shape] if description.shape != "[B, S]" else []
        )
    kinds = [
        ("bool", torch.bool),
        ("0 and 1", torch.float64),
        ("0 and 1", torch.int64),
        ("added", torch.float64),
    ]
    if "bias" in word or description.added:
        kinds.reverse()
    polarities = [True, False]
    if description.in_words and description.true_attends is not None:
        kinds, polarities = kinds[:-1], [description.true_attends]
    if description.counted:
        kinds = [kind for kind in kinds if kind[0] != "added"]
    for shape in shapes:
        for kind, number in kinds:
            if kind == "added":
                yield MaskConvention(argument, shape, kind, True, number)
            else:
                yield from (MaskConvention(argument, shape, kind, attends, number) for attends in polarities)


def _find_simple_convention(probe: _MaskProbe, argument: str) -> MaskConvention | None:
    """Return the convention of an argument that takes True, "causal" or lengths, None if it takes a mask."""
    conventions = (
        [MaskConvention(argument, "", "switch", on=on) for on in (True, "causal")] if not probe.causal else []
    )
    for convention in [*conventions, *(MaskConvention(argument, shape, "lengths") for shape in LENGTHS)]:
        if probe.has_effect(convention) and probe.is_exact(convention):
            return convention
    return None


def _is_about_queries(argument: str) -> bool:
    """Return True if an argument's name says that it hides queries."""
    return re.match(r"q_|qmask|query|queries|tgt_key_padding|target_padding", argument.lower()) is not None


def _find_convention(
    probe: _MaskProbe, argument: str, description: MaskDescription
) -> tuple[MaskConvention | None, str]:
    """Return the convention of one mask argument, and a sentence where it was not certain."""
    plan = probe.caller.plan

    def agrees(convention: MaskConvention) -> bool:
        """Return True if the words about the argument do not contradict the polarity."""
        return description.true_attends in (None, convention.true_attends)

    candidates = list(_candidates(argument, plan.layout, description))
    running: list[MaskConvention] = []
    for candidate, following in zip_longest(candidates, candidates[1:]):
        shape, next_shape = candidate.shape, following and following.shape
        if shape == HEADS_FIRST and not any(convention.shape == SAMPLES_FIRST for convention in running):
            continue  # as large as SAMPLES_FIRST, which did not run
        if probe.has_effect(candidate):
            running.append(candidate)
            if probe.is_exact(candidate):
                return candidate, ""
        if shape == next_shape or (shape, next_shape) == (SAMPLES_FIRST, HEADS_FIRST):
            continue
        of_shape = [convention for convention in running if convention.shape == shape]
        if shape == HEADS_FIRST:
            of_shape = [convention for convention in running if convention.shape == SAMPLES_FIRST] + of_shape
        if of_shape and description.shape == shape:
            running = of_shape
            break
        for convention in of_shape if shape in FULL else []:
            if agrees(convention) and probe.is_exact(convention, same=True):
                return convention, Doubt(
                    f"with {argument}, other keys are hidden than those that the mask hides"
                )
    if not running or description.shape == "":
        simple = _find_simple_convention(probe, argument)
        if simple is not None:
            return simple, ""
    if not running:
        return None, Doubt(f"{argument} has no effect on the output, whatever mask is passed")
    if _is_about_queries(argument) and any(
        probe.is_exact(convention, transposed=True) for convention in running
    ):
        return None, f"{argument} hides queries and no keys, so the check does not pass it"
    likely = [x for x in running if agrees(x) and (x.kind == "added") == description.added] or running
    if _always_nan(probe, likely):
        return likely[0], Doubt(f"{argument} makes the output NaN")
    questions: list[tuple[str, bool, bool]] = [("both", True, False), ("both", False, True)]
    if not plan.self_only and not plan.memory_only:
        for of in ("key", "value"):
            questions += [(of, False, False), (of, False, True), (of, True, False)]
    for convention in likely if probe.own_mask is not None else []:
        if probe.is_exact(convention, join="alone"):
            if probe.causal and convention.shape not in PADDING and description.replaces:
                return replace(convention, whole=True), f"if {argument} is passed, it replaces {OWN_MASK}"
            return convention, f"if {argument} is passed, {OWN_MASK} is not applied"
        if probe.is_exact(convention, join="or"):
            return (
                convention,
                f"if {argument} is passed, a key is visible where {argument} or {OWN_MASK} allows it",
            )
    for of, same, transposed in questions:
        for convention in likely:
            if probe.is_exact(convention, of, same, transposed):
                return convention, Doubt(
                    f"with {argument}, other keys are hidden than those that the mask hides"
                )
    best = max(likely, key=lambda convention: round(probe.ratio(convention), 2))
    return best, Doubt(f"{argument} changes the output, but no known meaning of a mask gives that output")


def _always_nan(probe: _MaskProbe, conventions: list[MaskConvention]) -> bool:
    """Return True if every one of these conventions makes the whole output NaN."""
    return all(not bool(probe.reactions_of(convention)[0].isfinite().any()) for convention in conventions)


def find_conventions(
    caller: Caller, causal: bool, texts: list[str], pattern: Tensor | None = None
) -> tuple[tuple[MaskConvention, ...], list[str]]:
    """Return the conventions of all arguments that take masks, and sentences about them.

    There is at most one for pairs, one for padding, one for a switch that makes the code causal.

    Args:
        pattern: bool [L, L], False where the code hides a key without any mask.
    """
    plan = caller.plan
    try:
        probe = _MaskProbe(caller, causal, pattern)
    except CAUGHT:
        return caller.conventions, []
    sentences: list[str] = []
    pairs: MaskConvention | None = None
    padding: MaskConvention | None = None
    switch: MaskConvention | None = None
    for argument in plan.masks:
        description = replace(describe_mask(texts, argument), replaces=replaces_causal(texts, argument))
        convention, sentence = _find_convention(probe, argument, description)
        sentences += [sentence] if sentence else []
        if convention is None:
            continue
        if convention.kind == "switch":
            switch = switch or convention
        elif (convention.shape in PADDING or convention.shape.startswith("[B]")) and padding is None:
            padding = convention
        elif convention.shape not in PADDING and (
            pairs is None or (pairs.shape in SAME_FOR_ALL and convention.shape in FULL)
        ):
            pairs = convention
    if pairs is None and padding is None and switch is None:
        ignored = _convention_without_effect(caller, probe, texts)
        return ignored or tuple(
            MaskConvention(name, "", "switch", on=on) for name, on in plan.switches[:1]
        ), sentences
    if pairs is None or padding is None:
        switch = switch or next(
            (MaskConvention(name, "", "switch", on=on) for name, on in plan.switches if not causal), None
        )
    conventions = tuple(convention for convention in (pairs, padding) if convention is not None)
    if switch is not None and _switch_combines(caller, probe, (*conventions, switch)):
        conventions = (*conventions, switch)
    return conventions, sentences


def _switch_combines(caller: Caller, probe: _MaskProbe, conventions: tuple[MaskConvention, ...]) -> bool:
    """Return True if a switch can be set beside the masks; torch's own attention takes one or the other."""
    if len(conventions) == 1:
        return True
    both = padding_mask(probe.B, probe.L, probe.L) & probe.triangle
    try:
        caller.call(*probe.inputs, both, conventions=conventions)
    except CAUGHT:
        return False
    return probe.is_exact(conventions[-1])


def _convention_without_effect(
    caller: Caller, probe: _MaskProbe, texts: list[str]
) -> tuple[MaskConvention, ...]:
    """Return the first convention that runs, for a mask argument that changes nothing."""
    for argument in caller.plan.masks:
        description = describe_mask(texts, argument)
        conventions = list(_candidates(argument, caller.plan.layout, description))
        for convention in conventions:
            if description.true_attends in (None, convention.true_attends):
                try:
                    caller.call(*probe.inputs, probe.mask(convention), conventions=(convention,))
                except CAUGHT:
                    continue
                return (convention,)
        if description.shape == "[B, S]":
            return (conventions[0],)
    return ()


def visible_keys(caller: Caller) -> Tensor | None:
    """Return which keys each query reacts to without a mask, bool [L, L]; None if samples differ."""
    length = caller.subject.sizes.long
    try:
        strengths = reactions(caller, inputs_for(caller, length, length))
    except CAUGHT:
        return None
    visible = (strengths > caller.subject.tolerance) | ~strengths.isfinite()
    return visible[0] if bool((visible == visible[:1]).all()) else None


def is_causal(caller: Caller, visible: Tensor | None) -> bool:
    """Return True if positions, without any mask, depend on one side of themselves only."""
    if visible is None:
        return False
    length = len(visible)
    eye = torch.eye(length, dtype=torch.bool)
    ones = torch.ones(length, length, dtype=torch.bool)
    compared = ~eye if caller.plan.self_only else ones
    triangles = [ones.tril(d) for d in (0, -1, 1, -2, 2)] + [ones.triu(d) for d in (1, 0)]
    return any(
        bool((visible == triangle)[compared & triangle.any(1, keepdim=True)].all()) for triangle in triangles
    )
