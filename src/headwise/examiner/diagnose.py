"""Which fault, or pair of faults, computes what the learner's code computed.

Every fault of the library is a wrong step of the recipe. Run with the learner's own weights on the very
inputs their code was given, it yields the numbers they would have got; the fault whose numbers are theirs,
on every probe, is the one they made. Calls without a mask are explained first, by nothing, one fault or two;
what hides keys is then explained by nothing or one more.

Letters: B batch, T query_len, S key_len, E width, H num_heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from . import recipe
from .evidence import Call, Evidence
from .faults import FAULTS, computed, pairs
from .faults.fault import Fault, Way
from .recipe import State, Step

__all__ = ["INFORMATION", "NEAR", "Diagnosis", "Made", "diagnose", "difference", "first_difference"]

NEAR = 2e-5  # of the size of the numbers: float32 somewhere inside passes, the nearest fault is off by 1e-2
INFORMATION = ("empty row",)  # a probe that has three right answers
STRESS = ("scores x1e4 with mask",)  # one that tells how keys are hidden, where the rest is right
FIELDS = (
    ("projected", "q, k and v as projected"), ("q", "q, split into heads"), ("k", "k, split into heads"),
    ("v", "v, split into heads"), ("scores", "the scores q k^T"), ("scaled", "the scaled scores"),
    ("hidden", "the masked scores"), ("p", "the weights"), ("heads", "the heads' outputs"),
    ("joined", "the heads side by side"), ("output", "the output"),
)  # fmt: skip


@dataclass(frozen=True)
class Made:
    """A fault, the way it was made, and the number it was made with where there is one.

    For hard-coded heads the number is how many there are.
    """

    fault: Fault
    way: int = 0
    number: float | None = None

    @property
    def steps(self) -> Way:
        """What it computes."""
        if self.fault.fit is not None and self.number is not None:
            return self.fault.fit(self.number)
        return self.fault.ways[self.way] if self.fault.ways else {}


Explanation = tuple[Made, ...]


def _made(fault: Fault) -> list[Made]:
    """Every way to make it."""
    return [Made(fault, way) for way in range(len(fault.ways))]


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
    if not bool(found.isfinite().all() and wanted.isfinite().all()):
        return 0.0 if torch.equal(found, wanted) else float("inf")
    return float((found - wanted).abs().max()) / max(1e-3, float(wanted.abs().max()))


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


def _explained(judge: _Judge) -> Diagnosis:
    plain, masked = judge.plain, judge.masked
    errors = {call.probe: judge.off(call, ()) for call in [*plain, *masked]}
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
    if not found:
        found = list(judge.explanations([*plain, *masked], without_mask=False))
    if not found:
        return Diagnosis(None, [], errors, partly=first or ())
    found = _smallest(found, judge)
    return Diagnosis(found[0], found[1:], errors, judge.worst(found[0], [*plain, *masked]))


def _smallest(found: Sequence[Explanation], judge: _Judge) -> list[Explanation]:
    """The explanations of the fewest faults, in the order of the library.

    Where every mask was a causal one, a fault of causal masks comes first.
    """
    nearest: dict[tuple[str, ...], Explanation] = {}  # of several ways to make the same faults
    for one in sorted(found, key=lambda one: judge.worst(one, [*judge.plain, *judge.masked]), reverse=True):
        nearest[tuple(made.fault.key for made in one)] = one
    order = dict.fromkeys(tuple(made.fault.key for made in one) for one in found)
    unique = [nearest[names] for names in order]
    fewest = min(len(one) for one in unique)
    best = [one for one in unique if len(one) == fewest]
    if judge.masked and all(_is_causal(call.given.mask) for call in judge.masked):
        best.sort(key=lambda one: not any(made.fault.key.startswith("causal") for made in one))
    return best


def _is_causal(mask: Tensor | None) -> bool:
    return mask is not None and torch.equal(mask, torch.ones_like(mask).tril())


class _Judge:
    """Runs faults on the inputs of calls, and remembers."""

    def __init__(self, evidence: Evidence, num_heads: int) -> None:
        assert evidence.weights is not None
        self.weights, self.num_heads = evidence.weights, num_heads
        self.all = [call for call in evidence.calls if call.output is not None]
        judged = [call for call in self.all if call.probe not in (*INFORMATION, *STRESS)]
        self.plain = [call for call in judged if call.given.mask is None]
        self.masked = [call for call in judged if call.given.mask is not None]
        self._off: dict[tuple[str, Explanation], float] = {}

    def state(self, call: Call, made: Explanation) -> State | None:
        """What these faults compute; None where they cannot."""
        wrong = _together(made)
        if wrong is None:
            return None
        try:
            return recipe.run(call.given, self.weights, self.num_heads, wrong)
        except (RuntimeError, ValueError, IndexError, AttributeError, TypeError, ZeroDivisionError):
            return None

    def off(self, call: Call, made: Explanation) -> float:
        """How far what these faults compute is from what the learner's code did."""
        key = call.probe, made
        if key not in self._off:
            state = self.state(call, made)
            self._off[key] = float("inf") if state is None else difference(call.output, state.output)
        return self._off[key]

    def explains(self, made: Explanation, calls: Sequence[Call]) -> bool:
        """Whether it does so for all of them."""
        return all(self.off(call, made) <= NEAR for call in calls)

    def worst(self, made: Explanation, calls: Sequence[Call]) -> float:
        """The largest difference over calls."""
        return max((self.off(call, made) for call in calls), default=0.0)

    def singles(self, calls: Sequence[Call]) -> Iterator[Made]:
        """The faults that explain all of these calls alone; one with a free number only if no other does."""
        if not calls:
            return
        found = [made for fault in computed() for made in _made(fault) if self.explains((made,), calls)]
        yield from found
        for fault in computed():
            made = self._fitted(fault, calls) if fault.fit is not None and not found else None
            if made is not None:
                yield made

    def explanations(self, calls: Sequence[Call], without_mask: bool) -> Iterator[Explanation]:
        """Nothing, one fault or two that explain these calls, the fewest first.

        without_mask: faults that show only where something is hidden are left out.
        """
        if self.explains((), calls):
            yield ()
        alone = [one for one in self.singles(calls) if not (without_mask and one.fault.needs_mask)]
        yield from ((one,) for one in alone)
        if alone or self.explains((), calls):
            return
        for first, second in pairs():
            if without_mask and (first.needs_mask or second.needs_mask):
                continue
            for both in product(_made(first), _made(second)):
                if self.explains(both, calls):
                    yield both
                    return  # hundreds of others would take seconds, and be no simpler

    def extended(self, base: Explanation, masked: Sequence[Call]) -> Iterator[Explanation]:
        """This explanation as it is or with one fault more that shows only with a mask."""
        if self.explains(base, masked):
            yield base
            return
        for fault in computed():
            if fault.needs_mask:
                yield from ((*base, one) for one in _made(fault) if self.explains((*base, one), masked))

    def _fitted(self, fault: Fault, calls: Sequence[Call]) -> Made | None:
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
