"""Which fault, or pair of faults, computes what the learner's code computed.

Every fault of the library is a wrong step of the recipe. Run with the learner's own weights on the very
inputs their code was given, it yields the numbers they would have got; the fault whose numbers are theirs,
on every probe, is the one they made. Calls without a mask are explained first, by nothing, one fault or two;
what hides keys is then explained by nothing or one more.

Two faults are thousands of pairs. What one fault computes is kept step by step, and a pair goes on from where
the second sets in: for one sample, with all first faults stacked as if they were a batch. What explains that
sample is run on every call.

Letters: B batch, T query_len, S key_len, E width, H num_heads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from .evidence import SWITCHED, Evidence, ProbeCall
from .faults import FAULTS, computed, pairs
from .faults.fault import Fault, Way
from .recipe import RIGHT, ProbeInputs, State, Step, Weights, steps_of

NEAR = 2e-5  # of the size of the numbers: float32 somewhere inside passes, the nearest fault is off by 1e-2
INFORMATION = ("empty row",)  # a probe that has three right answers
STRESS = (
    "scores x1e4 with mask",
    "scores x1e4",
)  # one that tells how keys are hidden, where the rest is right
FIELDS = (
    ("projected", "q, k and v as projected"), ("q", "q, split into heads"), ("k", "k, split into heads"),
    ("v", "v, split into heads"), ("scores", "the scores q k^T"), ("scaled", "the scaled scores"),
    ("hidden", "the masked scores"), ("p", "the weights"), ("heads", "the heads' outputs"),
    ("joined", "the heads side by side"), ("output", "the output"),
)  # fmt: skip


P = ParamSpec("P")
R = TypeVar("R")


def _bare(function: Callable[P, R]) -> Callable[P, R]:
    """Without gradients, and without modes of torch that look at every operation: they take half the time,
    and numbers here are float64 on the CPU whatever anybody's defaults are."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return wrapped


PLACE = {name: i for i, name in enumerate(RIGHT)}


@dataclass(frozen=True)
class Made:
    """A fault, the way it was made, and the number it was made with where there is one.

    For hard-coded heads the number is how many there are.
    """

    fault: Fault
    way: int = 0
    number: float | None = None

    @functools.cached_property
    def steps(self) -> Way:
        """What it computes."""
        if self.fault.fit is not None and self.number is not None:
            return self.fault.fit(self.number)
        return self.fault.ways[self.way] if self.fault.ways else {}

    @functools.cached_property
    def start(self) -> int:
        """The place of the first step it changes."""
        return min(PLACE[name] for name in self.steps)

    @functools.cached_property
    def end(self) -> int:
        """The place of the last."""
        return max(PLACE[name] for name in self.steps)


Explanation = tuple[Made, ...]


@functools.cache
def _made(fault: Fault) -> tuple[Made, ...]:
    """Every way to make it."""
    return tuple(Made(fault, way) for way in range(len(fault.ways)))


def _together(made: Explanation) -> dict[str, Step] | None:
    """What they compute; None where two of them change the same step."""
    steps: dict[str, Step] = {}
    for one in made:
        if steps.keys() & one.steps.keys():
            return None
        steps |= one.steps
    return steps


@dataclass
class Diagnosis:
    """What explains the numbers of all calls."""

    faults: Explanation | None  # (): they are right; None: nothing in the library explains them
    alike: list[Explanation]  # others that would compute the same in every probe
    errors: dict[str, float]  # probe -> how far it is from the truth, as a share of the largest number
    fit: float = 0.0  # how far the explanation is from the learner's numbers, at most
    partly: Explanation = ()  # where nothing explains all calls: what explains those without a mask


def difference(found: Tensor | None, wanted: Tensor | None) -> float:
    """The largest difference as a share of the largest number; NaN belongs where NaN is wanted."""
    if found is None or wanted is None or found.shape != wanted.shape:
        return float("inf")
    found, wanted = found.double(), wanted.double()
    missing = wanted.isnan()
    if not torch.equal(found.isnan(), missing):
        return float("inf")
    if bool(missing.all()):
        return 0.0
    found, wanted = found[~missing], wanted[~missing]
    endless = wanted.isinf()
    if not torch.equal(found.isinf(), endless) or not torch.equal(found[endless], wanted[endless]):
        return float("inf")
    found, wanted = found[~endless], wanted[~endless]
    if not len(found):
        return 0.0
    return float((found - wanted).abs().max()) / max(1e-3, float(wanted.abs().max()))


@_bare
def diagnose(evidence: Evidence) -> Diagnosis:
    """Explain the outputs of every probe that gave one."""
    judge = _Judge(evidence, evidence.num_heads)
    found = _explained(judge)
    if found.faults is None:
        E = evidence.embed_dim
        for heads in (n for n in range(2, E // 2 + 1) if E % n == 0 and n != evidence.num_heads):
            other = _Judge(evidence, heads)
            if other.explains((), other.plain) and other.explains((), other.masked):
                made = Made(FAULTS["hard-coded heads"], number=heads)
                return Diagnosis((made,), [], found.errors)
    return found


@_bare
def one_fault_explains(weights: Weights, num_heads: int, given: ProbeInputs, output: Tensor) -> bool:
    """Whether one fault, with these weights, computes this output of this call."""
    call = ProbeCall("plain", given, output)
    asked = Evidence(
        "", "class", embed_dim=len(weights.q), num_heads=num_heads, weights=weights, calls=[call]
    )
    judge, cut = _Judge(asked, num_heads), _first_sample(call)
    for fault in computed():
        if fault.design or (fault.needs_mask and given.mask is None):
            continue
        for made in _made(fault):
            one = call if fault.mixes_samples else cut
            state = judge._run(State(one.inputs, weights, num_heads), 0, made.steps)
            if state is not None and judge._glance(one, state.output) and judge.explains((made,), [call]):
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
    found: list[Explanation] = []
    size = None
    for base in judge.explanations(plain, without_mask=True) if plain else iter([()]):
        if size is not None and len(base) > size:
            break  # the smallest explanation is the one to name
        first = base if first is None else first
        more = list(judge.extended(base, masked))
        found += more
        if more:
            size = len(base)
    if not found:  # faults that show without a mask, and other faults with one
        found = [(one,) for one in judge.singles(masked)] if not plain else []
    if not found and (not plain or first == ()):  # what shows without a mask was looked for with its masks
        found = list(judge.explanations([*plain, *masked], without_mask=False))
    if not found:
        return Diagnosis(None, [], errors, partly=first or ())
    found = _smallest(found, judge)
    return Diagnosis(found[0], found[1:], errors, judge.worst(found[0], [*plain, *masked]))


def _smallest(found: Sequence[Explanation], judge: _Judge) -> list[Explanation]:
    """The explanations of the fewest faults, the commonest first, else in the order of the library.

    Where every mask was a causal one, a fault of causal masks comes first.
    """
    nearest: dict[tuple[str, ...], Explanation] = {}  # of several ways to make the same faults
    for one in sorted(found, key=lambda one: judge.worst(one, [*judge.plain, *judge.masked]), reverse=True):
        nearest[tuple(made.fault.key for made in one)] = one
    order = dict.fromkeys(tuple(made.fault.key for made in one) for one in found)
    unique = [nearest[names] for names in order]
    fewest = min(len(one) for one in unique)
    best = [one for one in unique if len(one) == fewest]
    best.sort(key=lambda one: (_far_fetched(one, judge.evidence), -sum(made.fault.common for made in one)))
    if judge.masked and all(_is_causal(call.inputs.mask) for call in judge.masked):
        best.sort(key=lambda one: not any(made.fault.key.startswith("causal") for made in one))
    return best


def _far_fetched(explanation: Explanation, evidence: Evidence) -> bool:
    """Whether it is about the order in a fused weight where there is none, or about scores where there is.

    From one input, queries and keys that change places are the same numbers wherever they do.
    """
    held = {(role.parameter.split("[")[0]) for name, role in evidence.roles.items() if name in {"q", "k"}}
    fused = len(held) == 1
    keys = {made.fault.key for made in explanation}
    return "scores transposed" in keys if fused else any(key.startswith("fused order") for key in keys)


def _is_causal(mask: Tensor | None) -> bool:
    return mask is not None and torch.equal(mask, torch.ones_like(mask).tril())


def _first_sample(call: ProbeCall) -> ProbeCall:
    if len(call.inputs.query) == 1:
        return call
    given = ProbeInputs(*(None if x is None else x[:1] for x in call.inputs))  # type: ignore[arg-type]
    return ProbeCall(f"{call.probe}, first sample", given, None if call.output is None else call.output[:1])


def _most(fault: Fault) -> int:
    """How many of its ways are tried in pairs: of a design, one number beneath the root."""
    return 3 if fault.design else len(fault.ways)


def _copied(state: State) -> State:
    """A state to go on from; tensors are never written to."""
    made = State.__new__(State)
    made.__dict__.update(state.__dict__)
    return made


def _shapes(value: object) -> object:
    if isinstance(value, Tensor):
        return value.shape
    own = type(value) is tuple
    return tuple(one.shape for one in value) if own else None  # type: ignore[attr-defined]


class _Judge:
    """Runs faults on the inputs of calls, and remembers."""

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
        self._off: dict[tuple[str, Explanation], float] = {}
        self._sizes: dict[str, float] = {}

    def state(self, call: ProbeCall, made: Explanation) -> State | None:
        """What these faults compute; None where they cannot."""
        if not made and self.num_heads == self.evidence.num_heads:
            return self.evidence.truth(call)
        wrong = _together(made)
        if wrong is None:
            return None
        if not made:
            return self._run(State(call.inputs, self.weights, self.num_heads), 0, wrong)
        order = sorted(made, key=lambda one: one.start)
        trail = self._trail(call, order[0])
        start = order[1].start if len(order) > 1 else len(PLACE)
        if start >= len(trail):  # the first cannot run so far
            return None
        return self._run(_copied(trail[start]), start, wrong)

    def _run(
        self, state: State, start: int, wrong: Mapping[str, Step], trail: list[State] | None = None
    ) -> State | None:
        """The steps from this one on; `trail` gets the state before each and after the last."""
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
        """The states before each step with this one fault, and after the last; fewer where it cannot run."""
        key = call.probe, made
        if made.number is not None or key not in self._trails:
            trail: list[State] = []
            self._run(State(call.inputs, self.weights, self.num_heads), 0, made.steps, trail)
            if made.number is not None:
                return trail
            self._trails[key] = trail
        return self._trails[key]

    def off(self, call: ProbeCall, made: Explanation) -> float:
        """How far what these faults compute is from what the learner's code did."""
        key = call.probe, made
        if key not in self._off:
            state = self.state(call, made)
            if state is None or (call.inputs.mask is None and bool(state.output.isnan().all())):
                self._off[key] = float("inf")  # what is NaN everywhere without a mask explains nothing
            else:
                self._off[key] = difference(call.output, state.output)
        return self._off[key]

    def explains(self, made: Explanation, calls: Sequence[ProbeCall]) -> bool:
        """Whether it does so for all of them."""
        return all(self.off(call, made) <= NEAR for call in calls)

    def worst(self, made: Explanation, calls: Sequence[ProbeCall]) -> float:
        """The largest difference over calls."""
        return max((self.off(call, made) for call in calls), default=0.0)

    def singles(self, calls: Sequence[ProbeCall]) -> Iterator[Made]:
        """The faults that explain all of these calls alone; one with a free number only if no other does."""
        if not calls:
            return
        found = [made for fault in computed() for made in _made(fault) if self.explains((made,), calls)]
        yield from found
        for fault in computed():
            made = self._fitted(fault, calls) if fault.fit is not None and not found else None
            if made is not None:
                yield made

    def explanations(self, calls: Sequence[ProbeCall], without_mask: bool) -> Iterator[Explanation]:
        """Nothing, one fault or two that explain these calls, the fewest first.

        without_mask: faults that show only where something is hidden are left out.
        """
        if self.explains((), calls):
            yield ()
        alone = [one for one in self.singles(calls) if not (without_mask and one.fault.needs_mask)]
        yield from ((one,) for one in alone)
        if alone or self.explains((), calls):
            return
        yield from self._pairs(calls, without_mask)

    def _pairs(self, calls: Sequence[ProbeCall], without_mask: bool) -> Iterator[Explanation]:
        """The first two that explain these calls: hundreds of others would be no simpler."""
        tried = [fault for fault in computed() if not (without_mask and fault.needs_mask)]
        near = self._near(calls[0], [one for fault in tried for one in _made(fault)[: _most(fault)]])
        for first, second in pairs():
            for both in product(_made(first), _made(second)):
                if (both in near or both[::-1] in near) and self.explains(both, calls):
                    yield both
                    return

    def _near(self, call: ProbeCall, made: Sequence[Made]) -> set[Explanation]:
        """The pairs that may explain this call, the one that sets in first before the other.

        Of its first sample alone, all first faults that are done when the second sets in are stacked; but for
        those that let samples meet.
        """
        found: set[Explanation] = set()
        stacks: dict[int, list[tuple[list[Made], State]]] = {}
        stacked = {one for one in made if not one.fault.mixes_samples}
        whole, call = call, _first_sample(call)
        for second in made:
            start, steps = second.start, second.steps.keys()
            rest = [one for one in made if one.start < start and not one.steps.keys() & steps]
            if second in stacked:
                if start not in stacks:
                    done = [one for one in made if one in stacked and one.end < start]
                    stacks[start] = list(self._stacks(call, done, start))
                for firsts, state in stacks[start]:
                    ran = self._run(_copied(state), start, second.steps)
                    close = [False] * len(firsts) if ran is None else self._close(call, ran.output)
                    found.update((one, second) for one, yes in zip(firsts, close, strict=True) if yes)
                together = {one for firsts, _ in stacks[start] for one in firsts}
                rest = [one for one in rest if one not in together]
            for one in rest:
                asked = call if one in stacked and second in stacked else whole
                alone = self.state(asked, (one, second))
                if alone is not None and self._glance(asked, alone.output):
                    found.add((one, second))
        return found

    def _stacks(
        self, call: ProbeCall, made: Sequence[Made], start: int
    ) -> Iterator[tuple[list[Made], State]]:
        """What each has computed before this step, those of equal shapes in one state."""
        groups: dict[tuple[object, ...], list[tuple[Made, State]]] = {}
        for one in made:
            trail = self._trail(call, one)
            if start < len(trail):
                state = trail[start]
                shapes = ((name, _shapes(value)) for name, value in vars(state).items())
                groups.setdefault((id(state.inputs), *shapes), []).append((one, state))
        for group in groups.values():
            whole = _copied(group[0][1])
            for name, value in vars(whole).items():
                each = [getattr(state, name) for _, state in group]
                if name == "projected":
                    whole.projected = tuple(map(torch.cat, zip(*each, strict=True)))  # type: ignore[assignment]
                elif isinstance(value, Tensor):
                    setattr(whole, name, torch.cat(each))
            yield [one for one, _ in group], whole

    def _glance(self, call: ProbeCall, found: Tensor) -> bool:
        """`_close` for one output: where its last number is far off, the others need not be looked at."""
        wanted = call.output
        assert wanted is not None
        if found.shape != wanted.shape:
            return False
        off = abs(float(found[-1, -1, -1]) - float(wanted[-1, -1, -1]))
        return not off > 10 * NEAR * self._size(call) and all(self._close(call, found))

    def _size(self, call: ProbeCall) -> float:
        """The largest finite number the learner's code gave."""
        if call.probe not in self._sizes:
            assert call.output is not None
            self._sizes[call.probe] = max(1e-3, float(call.output.nan_to_num(0.0, 0.0, 0.0).abs().max()))
        return self._sizes[call.probe]

    def _close(self, call: ProbeCall, found: Tensor) -> list[bool]:
        """For each sample of these outputs, whether it may be the learner's; NaN where NaN is."""
        wanted = call.output
        assert wanted is not None
        if found.shape[1:] != wanted.shape[1:]:
            return [False] * len(found)
        off = (found - wanted).nan_to_num(0.0, torch.inf, torch.inf).abs()
        same = (found.isfinite() == wanted.isfinite()) & (off <= 10 * NEAR * self._size(call))
        return [bool(yes) for yes in same.flatten(1).all(1)]

    def extended(self, base: Explanation, masked: Sequence[ProbeCall]) -> Iterator[Explanation]:
        """This explanation as it is or with one fault more that shows only with a mask."""
        if self.explains(base, masked):
            yield base
            return
        for fault in computed():
            if fault.needs_mask:
                yield from ((*base, one) for one in _made(fault) if self.explains((*base, one), masked))

    def _fitted(self, fault: Fault, calls: Sequence[ProbeCall]) -> Made | None:
        """The fault with the number that explains the first call, if it explains the others."""
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
    """To the digits a search finds, so that 0.5 is 0.5."""
    return float(f"{number:.6g}")


def first_difference(evidence: Evidence, faults: Explanation) -> tuple[str, str] | None:
    """(probe, which intermediate tensor in words): where these faults part from the truth first."""
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
    """Every answered call that has one right answer, with it; none where the recipe cannot be run."""
    found = []
    for call in evidence.calls:
        if call.output is None or call.probe in INFORMATION:
            continue
        truth = evidence.truth(call)
        if truth is None:
            return []
        found.append((call, truth))
    return found


def where_right(evidence: Evidence) -> list[str]:
    """Which positions, samples and heads of a wrong probe are right."""
    said = []
    for call, truth in beside_truth(evidence):
        assert call.output is not None
        if difference(call.output, truth.output) <= NEAR or call.output.shape != truth.output.shape:
            continue
        off = (call.output.double() - truth.output).abs().nan_to_num(torch.inf)  # [B, T, E]
        right = off <= NEAR * float(truth.output.nan_to_num(0).abs().max())
        positions, samples = _numbers(right.all(2).all(0)), _numbers(right.all(2).all(1))
        B, T, _ = right.shape
        if 0 < len(positions) < T:
            said.append(f"probe {call.probe}: right at position{_list(positions)} of {T}")
        elif 0 < len(samples) < B:
            said.append(f"probe {call.probe}: right for sample{_list(samples)} of {B}")
        if call.weights is not None and call.weights.shape == truth.p.shape:
            close = (call.weights.double() - truth.p).abs() <= NEAR
            heads = _numbers(close.all(3).all(2).all(0))
            if 0 < len(heads) < evidence.num_heads:
                said.append(f"probe {call.probe}: the weights of head{_list(heads)} are right")
            elif len(heads) == evidence.num_heads:
                said.append(f"probe {call.probe}: all weights are right, so it goes wrong after the softmax")
    return list(dict.fromkeys(said))


def _numbers(yes: Tensor) -> list[int]:
    return [int(i) for i in yes.nonzero().flatten()]


def _list(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f" {numbers[0]} alone"
    return "s " + ", ".join(map(str, numbers))


def first_by_weights(evidence: Evidence) -> str | None:
    """Without a diagnosis: whether the weights the code returned are right tells on which side to look."""
    for call, truth in beside_truth(evidence):
        if call.weights is None or call.weights.shape != truth.p.shape:
            continue
        if difference(call.output, truth.output) <= NEAR:
            continue
        if difference(call.weights, truth.p) > NEAR:
            return f"the weights (probe: {call.probe})"
        return f"after the weights, which are right (probe: {call.probe})"
    return None


def empty_row(evidence: Evidence) -> str | None:
    """What a query gets that may see nothing, where that was asked."""
    call = evidence.call("empty row")
    if call is None or call.output is None or call.inputs.mask is None:
        return None
    rows = call.output[~call.inputs.mask.any(-1)]
    if bool(rows.isnan().all()):
        return "NaN, as a softmax over -inf alone does"
    if bool((rows == 0).all()):
        return "0"
    return "finite numbers: a large negative number in place of -inf makes its weights uniform, or they are 0"
