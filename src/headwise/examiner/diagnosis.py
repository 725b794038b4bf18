"""Find the fault, or the pair of faults, that computes what the learner's code computed.

Every fault is a wrong step of the recipe. The recipe with that step is run with the learner's weights on the
inputs of each probe; the fault whose outputs equal the learner's on every probe explains them. Calls without
a mask are explained first, by no fault, one or two; calls with a mask by at most one more.

There are thousands of pairs. The state before each step is stored for every single fault, and a pair
continues from the state before the step of its second fault: for one sample, with all first faults stacked as
a batch. Pairs that explain that sample are run on every call.

Letters: B batch, T query_len, S key_len, E width, H num_heads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import isfinite

import torch
from torch import Tensor

from .evidence import SWITCHED, Evidence, ProbeCall
from .faults import FAULTS, computed, pairs
from .faults.fault import Fault, Way
from .recipe import RIGHT, ProbeInputs, State, Step, Weights, steps_of, without_modes

NEAR = 2e-5  # relative to the largest number: float32 inside passes; the nearest fault differs by 1e-2
INFORMATION = ("empty row",)  # a probe with three right answers
STRESS = ("scores x1e4 with mask", "scores x1e4")  # probes that show how keys are hidden
FIELDS = (
    ("projected", "q, k and v as projected"), ("q", "q, split into heads"), ("k", "k, split into heads"),
    ("v", "v, split into heads"), ("scores", "the scores q k^T"), ("scaled", "the scaled scores"),
    ("hidden", "the masked scores"), ("p", "the weights"), ("heads", "the heads' outputs"),
    ("joined", "the concatenated heads"), ("output", "the output"),
)  # fmt: skip


PLACE = {name: i for i, name in enumerate(RIGHT)}


@dataclass(frozen=True)
class Made:
    """One form of a fault, with its fitted number where there is one (of hard-coded heads, the heads)."""

    fault: Fault
    way: int = 0
    number: float | None = None

    @functools.cached_property
    def steps(self) -> Way:
        """The steps it replaces."""
        if self.fault.fit is not None and self.number is not None:
            return self.fault.fit(self.number)
        return self.fault.ways[self.way] if self.fault.ways else {}

    @functools.cached_property
    def start(self) -> int:
        """The index of the first step it replaces."""
        return min(PLACE[name] for name in self.steps)

    @functools.cached_property
    def end(self) -> int:
        """The index of the last step it replaces."""
        return max(PLACE[name] for name in self.steps)


Explanation = tuple[Made, ...]


@functools.cache
def _made(fault: Fault) -> tuple[Made, ...]:
    """Return every form of a fault."""
    return tuple(Made(fault, way) for way in range(len(fault.ways)))


def _together(made: Explanation) -> dict[str, Step] | None:
    """Return the steps they replace; None if two of them replace the same step."""
    steps: dict[str, Step] = {}
    for each in made:
        if steps.keys() & each.steps.keys():
            return None
        steps |= each.steps
    return steps


@dataclass
class Diagnosis:
    """What explains the outputs of all calls."""

    faults: Explanation | None  # (): they are right; None: nothing in the library explains them
    alike: list[Explanation]  # others with the same outputs in every probe
    errors: dict[str, float]  # probe -> largest difference from the truth, relative to the largest number
    fit: float = 0.0  # the largest difference of the explanation from the learner's outputs
    partly: Explanation = ()  # if nothing explains all calls: what explains those without a mask


def difference(output: Tensor | None, wanted: Tensor | None) -> float:
    """Return the largest difference relative to the largest number; NaN and infinities must be equal."""
    if output is None or wanted is None or output.shape != wanted.shape:
        return float("inf")
    output, wanted = output.double(), wanted.double()
    finite = wanted.isfinite()
    special = [x[~finite].nan_to_num(0.0, posinf=1.0, neginf=-1.0) for x in (output, wanted)]
    if not torch.equal(output.isfinite(), finite) or not torch.equal(*special):
        return float("inf")
    output, wanted = output[finite], wanted[finite]
    if not len(output):
        return 0.0
    return float((output - wanted).abs().max()) / max(1e-3, float(wanted.abs().max()))


@without_modes
def diagnose(evidence: Evidence) -> Diagnosis:
    """Return the diagnosis of the outputs of all probes."""
    judge = _Judge(evidence, evidence.num_heads)
    diagnosis = _explained(judge)
    if diagnosis.faults is None:
        E = evidence.embed_dim
        for heads in (n for n in range(2, E // 2 + 1) if E % n == 0 and n != evidence.num_heads):
            other = _Judge(evidence, heads)
            if other.explains((), other.plain) and other.explains((), other.masked):
                made = Made(FAULTS["hard-coded heads"], number=heads)
                return Diagnosis((made,), [], diagnosis.errors)
    return diagnosis


@without_modes
def one_fault_explains(weights: Weights, num_heads: int, inputs: ProbeInputs, output: Tensor) -> bool:
    """Return True if one fault, with these weights, computes this output."""
    call = ProbeCall("plain", inputs, output)
    evidence = Evidence(
        "", "class", embed_dim=len(weights.q), num_heads=num_heads, weights=weights, calls=[call]
    )
    judge, cut = _Judge(evidence, num_heads), _first_sample(call)
    for fault in computed():
        if fault.design or (fault.needs_mask and inputs.mask is None):
            continue
        for made in _made(fault):
            part = call if fault.mixes_samples else cut
            state = judge._run(State(part.inputs, weights, num_heads), 0, made.steps)
            if state is not None and judge._glance(part, state.output) and judge.explains((made,), [call]):
                return True
    return False


def _explained(judge: _Judge) -> Diagnosis:
    plain, masked = judge.plain, judge.masked
    errors = {call.probe: judge.off(call, ()) for call in [*plain, *masked]}
    switched = [call for call in masked if call.probe == SWITCHED]
    others = [call for call in masked if call.probe != SWITCHED]
    if switched and judge.explains((), [*plain, *others]) and not judge.explains((), switched):
        alone = [made for made in judge.singles(switched) if made.fault.needs_mask]
        alone.sort(key=lambda made: not made.fault.key.startswith("causal"))
        return Diagnosis(tuple(alone[:1]) or None, [], errors)
    if judge.explains((), [*plain, *masked]):
        leaks = [call for call in judge.all if call.probe in STRESS and judge.off(call, ()) > NEAR]
        alone = (
            [made for made in judge.singles([*plain, *masked, *leaks]) if made.fault.needs_mask]
            if leaks
            else []
        )
        return Diagnosis(tuple(alone[:1]), [], errors, judge.worst((), [*plain, *masked]))
    first: Explanation | None = None
    explanations: list[Explanation] = []
    size = None
    for base in judge.explanations(plain, without_mask=True) if plain else iter([()]):
        if size is not None and len(base) > size:
            break  # the smallest explanation is the one to name
        first = base if first is None else first
        more = list(judge.extended(base, masked))
        explanations += more
        if more:
            size = len(base)
    if not explanations:  # faults that show without a mask, and other faults with one
        explanations = [(made,) for made in judge.singles(masked)] if not plain else []
    if not explanations and (
        not plain or first == ()
    ):  # what shows without a mask was looked for with its masks
        explanations = list(judge.explanations([*plain, *masked], without_mask=False))
    if not explanations:
        return Diagnosis(None, [], errors, partly=first or ())
    explanations = _smallest(explanations, judge)
    return Diagnosis(
        explanations[0], explanations[1:], errors, judge.worst(explanations[0], [*plain, *masked])
    )


def _smallest(explanations: Sequence[Explanation], judge: _Judge) -> list[Explanation]:
    """Return the explanations with the fewest faults, the commonest first, then in the order of the library.

    If every mask is causal, faults of causal masks come first.
    """
    calls = [*judge.plain, *judge.masked]
    nearest: dict[tuple[str, ...], Explanation] = {}  # of several forms of the same faults
    for explanation in sorted(explanations, key=lambda each: judge.worst(each, calls), reverse=True):
        nearest[_keys(explanation)] = explanation
    unique = [nearest[keys] for keys in dict.fromkeys(map(_keys, explanations))]
    fewest = min(map(len, unique))
    best = [explanation for explanation in unique if len(explanation) == fewest]
    best.sort(key=lambda each: (_far_fetched(each, judge.evidence), -sum(made.fault.common for made in each)))
    if judge.masked and all(_is_causal(call.inputs.mask) for call in judge.masked):
        best.sort(key=lambda each: not any(key.startswith("causal") for key in _keys(each)))
    return best


def _keys(explanation: Explanation) -> tuple[str, ...]:
    return tuple(made.fault.key for made in explanation)


def _far_fetched(explanation: Explanation, evidence: Evidence) -> bool:
    """Return True if it names the order of a fused weight where none is fused, or else "scores transposed".

    With one input, exchanging queries and keys gives the same numbers in either place.
    """
    held = {(role.parameter.split("[")[0]) for name, role in evidence.roles.items() if name in {"q", "k"}}
    fused = len(held) == 1
    keys = _keys(explanation)
    return "scores transposed" in keys if fused else any(key.startswith("fused order") for key in keys)


def _is_causal(mask: Tensor | None) -> bool:
    return mask is not None and torch.equal(mask, torch.ones_like(mask).tril())


def _first_sample(call: ProbeCall) -> ProbeCall:
    if len(call.inputs.query) == 1:
        return call
    inputs = ProbeInputs(*(None if x is None else x[:1] for x in call.inputs))  # type: ignore[arg-type]
    return ProbeCall(f"{call.probe}, first sample", inputs, None if call.output is None else call.output[:1])


def _most(fault: Fault) -> int:
    """Return how many forms of a fault are tried in pairs."""
    return 3 if fault.design else len(fault.ways)


def _copied(state: State) -> State:
    """Return a copy of a state that shares its tensors, which are never written to."""
    made = State.__new__(State)
    made.__dict__.update(state.__dict__)
    return made


def _shapes(value: object) -> object:
    if isinstance(value, Tensor):
        return value.shape
    own = type(value) is tuple
    return tuple(tensor.shape for tensor in value) if own else None  # type: ignore[attr-defined]


class _Judge:
    """Runs faults on the inputs of calls, and caches the states."""

    def __init__(self, evidence: Evidence, num_heads: int) -> None:
        assert evidence.weights is not None
        self.evidence, self.weights, self.num_heads = evidence, evidence.weights, num_heads
        self.all = [call for call in evidence.calls if call.output is not None]
        judged = [call for call in self.all if call.probe not in (*INFORMATION, *STRESS)]
        judged.sort(key=lambda call: call.inputs.query.numel())  # the smallest rules out most
        self.plain = [call for call in judged if call.inputs.mask is None]
        self.masked = [call for call in judged if call.inputs.mask is not None]
        self.steps = tuple({**RIGHT, **steps_of(evidence.designs)}.items())
        self._trails: dict[tuple[str, Made], list[State]] = {}
        self._right: dict[str, list[State]] = {}
        self._off: dict[tuple[str, Explanation], float] = {}
        self._apart: set[tuple[str, Explanation]] = set()  # outputs whose last numbers differ
        self._sizes: dict[str, float] = {}

    def state(self, call: ProbeCall, made: Explanation) -> State | None:
        """Return the state with these faults; None if they cannot be run."""
        if not made and self.num_heads == self.evidence.num_heads:
            return self.evidence.truth(call)
        wrong = _together(made)
        if wrong is None:
            return None
        if not made:
            return self._run(State(call.inputs, self.weights, self.num_heads), 0, wrong)
        order = sorted(made, key=lambda each: each.start)
        trail = self._trail(call, order[0])
        start = order[1].start if len(order) > 1 else len(PLACE)
        if start >= len(trail):  # the first cannot run so far
            return None
        return self._run(_copied(trail[start]), start, wrong)

    def _run(
        self, state: State, start: int, wrong: Mapping[str, Step], trail: list[State] | None = None
    ) -> State | None:
        """Run the steps from `start`; `trail` gets the state before each step and after the last."""
        try:
            for name, right in self.steps[start:]:
                if trail is not None:
                    trail.append(_copied(state))
                wrong.get(name, right)(state)
        except (RuntimeError, ValueError, IndexError, AttributeError, TypeError, ZeroDivisionError):
            return None
        if trail is not None:
            trail.append(state)
        return state

    def _trail(self, call: ProbeCall, made: Made) -> list[State]:
        """Return the states before each step with one fault, and after the last; fewer if it fails."""
        key = call.probe, made
        if made.number is not None or key not in self._trails:
            right = self._right_trail(call)[: made.start + 1]  # the steps before the first it replaces
            trail = right[:-1]
            self._run(_copied(right[-1]), len(right) - 1, made.steps, trail)
            if made.number is not None:
                return trail
            self._trails[key] = trail
        return self._trails[key]

    def _right_trail(self, call: ProbeCall) -> list[State]:
        """Return the states before each step without a fault, and after the last; fewer if a step fails."""
        if call.probe not in self._right:
            trail: list[State] = []
            self._run(State(call.inputs, self.weights, self.num_heads), 0, {}, trail)
            self._right[call.probe] = trail
        return self._right[call.probe]

    def off(self, call: ProbeCall, made: Explanation) -> float:
        """Return the difference between the output with these faults and the learner's."""
        key = call.probe, made
        if key not in self._off:
            state = self.state(call, made)
            if state is None or (call.inputs.mask is None and bool(state.output.isnan().all())):
                self._off[key] = float("inf")  # an output of NaN alone, without a mask, explains nothing
            else:
                self._off[key] = difference(call.output, state.output)
        return self._off[key]

    def explains(self, made: Explanation, calls: Sequence[ProbeCall]) -> bool:
        """Return True if these faults compute the learner's output of every call."""
        return all(self._explains_call(made, call) for call in calls)

    def _explains_call(self, made: Explanation, call: ProbeCall) -> bool:
        """Return whether `off` is small; the last number of the outputs is compared first: it is cheap."""
        key = call.probe, made
        if key not in self._off:
            if key in self._apart:
                return False
            state, wanted = self.state(call, made), call.output
            if state is not None and wanted is not None and state.output.shape == wanted.shape:
                last = (-1,) * wanted.ndim
                if abs(float(state.output[last]) - float(wanted[last])) > 2 * NEAR * self._size(call):
                    self._apart.add(key)
                    return False
        return self.off(call, made) <= NEAR

    def worst(self, made: Explanation, calls: Sequence[ProbeCall]) -> float:
        """Return the largest difference over the calls for which the faults can be computed.

        A fault that needs a mask has no output for a call without a mask; its difference is infinite.
        """
        return max((off for call in calls if isfinite(off := self.off(call, made))), default=0.0)

    def singles(self, calls: Sequence[ProbeCall]) -> Iterator[Made]:
        """Yield single faults that explain all calls; faults with a free number only if no other does."""
        if not calls:
            return
        singles = [made for fault in computed() for made in _made(fault) if self.explains((made,), calls)]
        yield from singles
        for fault in computed() if not singles else ():
            made = None if fault.fit is None else self._fitted(fault, calls)
            if made is not None:
                yield made

    def explanations(self, calls: Sequence[ProbeCall], without_mask: bool) -> Iterator[Explanation]:
        """Yield explanations by no fault, one or two, the fewest first.

        without_mask: leave out faults that need a mask.
        """
        if self.explains((), calls):
            yield ()
        alone = [single for single in self.singles(calls) if not (without_mask and single.fault.needs_mask)]
        yield from ((single,) for single in alone)
        if alone or self.explains((), calls):
            return
        yield from self._pairs(calls, without_mask)

    def _pairs(self, calls: Sequence[ProbeCall], without_mask: bool) -> Iterator[Explanation]:
        """Yield the first pair that explains these calls."""
        tried = [fault for fault in computed() if not (without_mask and fault.needs_mask)]
        near = self._near(calls[0], [form for fault in tried for form in _made(fault)[: _most(fault)]])
        for first, second in pairs():
            for both in product(_made(first), _made(second)):
                if (both in near or both[::-1] in near) and self.explains(both, calls):
                    yield both
                    return

    def _near(self, call: ProbeCall, made: Sequence[Made]) -> set[Explanation]:
        """Return the pairs that may explain this call, in the order of their steps.

        They are run on the first sample, with all first faults stacked, except those that mix samples.
        """
        near: set[Explanation] = set()
        stacks: dict[int, list[tuple[list[Made], State]]] = {}
        stacked = {first for first in made if not first.fault.mixes_samples}
        whole, call = call, _first_sample(call)
        for second in made:
            start, steps = second.start, second.steps.keys()
            rest = [first for first in made if first.start < start and not first.steps.keys() & steps]
            if second in stacked:
                if start not in stacks:
                    done = [first for first in made if first in stacked and first.end < start]
                    stacks[start] = list(self._stacks(call, done, start))
                for firsts, state in stacks[start]:
                    ran = self._run(_copied(state), start, second.steps)
                    close = [False] * len(firsts) if ran is None else self._close(call, ran.output)
                    near.update((first, second) for first, yes in zip(firsts, close, strict=True) if yes)
                together = {first for firsts, _ in stacks[start] for first in firsts}
                rest = [first for first in rest if first not in together]
            for first in rest:
                part = call if first in stacked and second in stacked else whole
                alone = self.state(part, (first, second))
                if alone is not None and self._glance(part, alone.output):
                    near.add((first, second))
        return near

    def _stacks(
        self, call: ProbeCall, made: Sequence[Made], start: int
    ) -> Iterator[tuple[list[Made], State]]:
        """Yield the states before this step, those of equal shapes stacked to one."""
        groups: dict[tuple[object, ...], list[tuple[Made, State]]] = {}
        for form in made:
            trail = self._trail(call, form)
            if start < len(trail):
                state = trail[start]
                shapes = ((name, _shapes(value)) for name, value in vars(state).items())
                groups.setdefault((id(state.inputs), *shapes), []).append((form, state))
        for group in groups.values():
            whole = _copied(group[0][1])
            for name, value in vars(whole).items():
                each = [getattr(state, name) for _, state in group]
                if name == "projected":
                    whole.projected = tuple(map(torch.cat, zip(*each, strict=True)))  # type: ignore[assignment]
                elif isinstance(value, Tensor):
                    setattr(whole, name, torch.cat(each))
            yield [form for form, _ in group], whole

    def _glance(self, call: ProbeCall, output: Tensor) -> bool:
        """Return `_close` for one output; its last number is compared first, because it is cheap."""
        wanted = call.output
        assert wanted is not None
        if output.shape != wanted.shape:
            return False
        off = abs(float(output[-1, -1, -1]) - float(wanted[-1, -1, -1]))
        return not off > 10 * NEAR * self._size(call) and all(self._close(call, output))

    def _size(self, call: ProbeCall) -> float:
        """Return the largest finite number of the learner's output."""
        if call.probe not in self._sizes:
            assert call.output is not None
            self._sizes[call.probe] = max(1e-3, float(call.output.nan_to_num(0.0, 0.0, 0.0).abs().max()))
        return self._sizes[call.probe]

    def _close(self, call: ProbeCall, output: Tensor) -> list[bool]:
        """Return for each sample of an output whether it may equal the learner's."""
        wanted = call.output
        assert wanted is not None
        if output.shape[1:] != wanted.shape[1:]:
            return [False] * len(output)
        off = (output - wanted).nan_to_num(0.0, torch.inf, torch.inf).abs()
        same = (output.isfinite() == wanted.isfinite()) & (off <= 10 * NEAR * self._size(call))
        return [bool(yes) for yes in same.flatten(1).all(1)]

    def extended(self, base: Explanation, masked: Sequence[ProbeCall]) -> Iterator[Explanation]:
        """Yield this explanation, or the explanation with one more fault that needs a mask."""
        if self.explains(base, masked):
            yield base
            return
        for fault in computed():
            if fault.needs_mask:
                yield from ((*base, form) for form in _made(fault) if self.explains((*base, form), masked))

    def _fitted(self, fault: Fault, calls: Sequence[ProbeCall]) -> Made | None:
        """Return the fault with the number fitted to the first call, if it explains all calls."""
        call = calls[0]

        def off(exponent: float) -> float:
            made = Made(fault, number=10.0**exponent)
            state = self.state(call, (made,))
            if state is None or call.output is None or state.output.shape != call.output.shape:
                return float("inf")
            return float((state.output - call.output.double()).square().mean())

        grid = [i / 8 - 3.0 for i in range(49)]  # 1e-3 .. 1e3
        values = [off(x) for x in grid]
        best = min(range(len(grid)), key=values.__getitem__)
        if values[best] == float("inf"):
            return None
        low, high = grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]
        golden = (5**0.5 - 1) / 2
        a, b = high - golden * (high - low), low + golden * (high - low)
        fa, fb = off(a), off(b)
        for _ in range(60):
            if fa < fb:
                high, b, fb = b, a, fa
                a = high - golden * (high - low)
                fa = off(a)
            else:
                low, a, fa = a, b, fb
                b = low + golden * (high - low)
                fb = off(b)
        made = Made(fault, number=_round(10 ** ((low + high) / 2)))
        return made if self.explains((made,), calls) else None


def _round(number: float) -> float:
    """Return the number with the digits that the search determines: 0.4999999 becomes 0.5."""
    return float(f"{number:.6g}")


def first_difference(evidence: Evidence, faults: Explanation) -> tuple[str, str] | None:
    """Return (probe, tensor in words) of the first intermediate tensor that differs with these faults."""
    judge = _Judge(evidence, evidence.num_heads)
    for call in judge.all:
        right, wrong = judge.state(call, ()), judge.state(call, faults)
        if right is None or wrong is None:
            continue
        for name, words in FIELDS:
            ours, theirs = getattr(wrong, name, None), getattr(right, name, None)
            if ours is None or theirs is None:
                continue
            both = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
            if any(difference(a, b) > NEAR for a, b in both):
                return call.probe, words
    return None


def beside_truth(evidence: Evidence) -> list[tuple[ProbeCall, State]]:
    """Return each call that has one right answer, with its true state; empty if the recipe cannot be run."""
    pairs_of_calls = []
    for call in evidence.calls:
        if call.output is None or call.probe in INFORMATION:
            continue
        truth = evidence.truth(call)
        if truth is None:
            return []
        pairs_of_calls.append((call, truth))
    return pairs_of_calls


def where_right(evidence: Evidence) -> list[str]:
    """Return which positions, samples and heads of wrong outputs are right, a sentence for several probes."""
    probes: dict[str, list[str]] = {}
    for call, truth in beside_truth(evidence):
        assert call.output is not None
        if difference(call.output, truth.output) <= NEAR or call.output.shape != truth.output.shape:
            continue
        off = (call.output.double() - truth.output).abs().nan_to_num(torch.inf)  # [B, T, E]
        right = off <= NEAR * float(truth.output.nan_to_num(0).abs().max())
        positions, samples = _numbers(right.all(2).all(0)), _numbers(right.all(2).all(1))
        B, T, _ = right.shape
        if 0 < len(positions) < T:
            message = f"the output at {_list('position', positions)} (positions run from 0 to {T - 1})"
            probes.setdefault(message, []).append(call.probe)
        elif 0 < len(samples) < B:
            message = f"the output of {_list('sample', samples)} (samples run from 0 to {B - 1})"
            probes.setdefault(message, []).append(call.probe)
        if call.weights is not None and call.weights.shape == truth.p.shape:
            close = (call.weights.double() - truth.p).abs() <= NEAR
            heads = _numbers(close.all(3).all(2).all(0))
            if 0 < len(heads) < evidence.num_heads:
                probes.setdefault(f"the attention weights of {_list('head', heads)}", []).append(call.probe)
            elif len(heads) == evidence.num_heads:
                message = "all attention weights, so the mistake is in the values or after the softmax"
                probes.setdefault(message, []).append(call.probe)
    return [
        f"test input{'s' * (len(names) > 1)} {_quoted(names)}: {message}"
        for message, names in ((message, list(dict.fromkeys(all_))) for message, all_ in probes.items())
    ]


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _numbers(yes: Tensor) -> list[int]:
    return [int(i) for i in yes.nonzero().flatten()]


def _list(noun: str, numbers: list[int]) -> str:
    return f"{noun}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def first_by_weights(evidence: Evidence) -> str | None:
    """Return whether the first difference is in the returned weights or after them; None if unknown."""
    for call, truth in beside_truth(evidence):
        if call.weights is None or call.weights.shape != truth.p.shape:
            continue
        if difference(call.output, truth.output) <= NEAR:
            continue
        if difference(call.weights, truth.p) > NEAR:
            return f"the attention weights (test input: {call.probe})"
        return f"after the attention weights, which are right (test input: {call.probe})"
    return None


def empty_row(evidence: Evidence) -> str | None:
    """Return what the output is for a query whose keys are all hidden; None if that was not tried."""
    call = evidence.call("empty row")
    if call is None or call.output is None or call.inputs.mask is None:
        return None
    rows = call.output[~call.inputs.mask.any(-1)]
    if bool(rows.isnan().all()):
        return "the output is NaN, as is the softmax of scores that are all -inf"
    if bool((rows == 0).all()):
        return "the output is 0"
    return (
        "the output is finite: the weights of such a query are all 0, or all equal since its scores are one "
        "finite number"
    )
