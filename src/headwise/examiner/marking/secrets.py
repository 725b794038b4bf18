"""Weights and inputs drawn once the learner's code has said its piece, and whether it then still computes
attention.

What an examination brings back was gathered where the learner's code runs, and that code can write into it
what it likes. These numbers cannot be known before: they are drawn where the judge is, and compared there.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..diagnosis import NEAR
from ..evidence import Evidence, ProbeCall, Problem, StepAnswer
from ..examine.generality import DRAWN, LONG_PROBE
from ..examine.parameters import ONE
from ..recipe import ProbeInputs, State, Weights
from .conditions import Conditions, Refusal

FORGED = "what it answered to inputs drawn afterwards is not what it answered before"
BIASES = 0.5  # their spread; that of weights makes outputs as large as inputs
PROJECTIONS = ("q", "k", "v", "o")
UNASKED = ("block",)  # what goes in and out of its parts is known to its own process only
LARGE = 1e3  # numbers that a step is asked with because they are large
MASKED = ("causal", "padding", "random mask", "padding causal")


@dataclass
class _Asked:
    probe: str
    inputs: tuple[Tensor, Tensor, Tensor]
    masks: list[Tensor]  # bool [B, T, S], the first of them that its arguments can say


class Secrets:
    """Questions to one file's code, and what its answers are worth.

    Args:
        conditions: what the source says must have been asked.
        num_heads: as the caller asked for; None: whatever suits.
    """

    def __init__(self, conditions: Conditions, num_heads: int | None = None) -> None:
        self.conditions, self.num_heads = conditions, num_heads
        self.refusal: Refusal | None = Refusal("it was not asked again")
        self.asked: list[_Asked] = []
        self.weights: Weights | None = None
        self.step: list[StepAnswer] = []
        self._dice = torch.Generator().manual_seed(int.from_bytes(os.urandom(8), "big") >> 1)

    # What is asked

    def questions(self, evidence: Evidence) -> list[dict[str, Any]]:
        """Drawn for this evidence; none where it cannot be asked again, and `refusal` says why."""
        if evidence.step is not None and not evidence.calls:
            return self._of_step(evidence)
        self.refusal = self.conditions.missing(evidence, self.num_heads) or self._draw(evidence)
        if self.refusal is not None:
            return []
        asked = [self._as_sent(one) for one in self.asked]
        if len(self._places):  # the first is asked with the weights there were
            asked[1] |= {"places": self._places, "values": self._values}
        return asked

    def _as_sent(self, one: _Asked) -> dict[str, Any]:
        query, key, value = one.inputs
        names = ["query", "query" if key is query else "key"]
        names.append("query" if value is query else "key" if value is key else "value")
        return {"query": query, "key": key, "value": value, "inputs": names, "masks": one.masks}

    def _draw(self, evidence: Evidence) -> Refusal | None:
        lost = [name for name in PROJECTIONS if name not in evidence.origin]
        if evidence.weights is None or evidence.call("plain") is None or len(lost) == len(PROJECTIONS):
            return Refusal("its projections were not found, so it could not be asked again with others")
        if lost:
            return Refusal(
                f"the numbers of its projection {', '.join(lost)} are none of its parameters', so it could "
                "not be asked again with others"
            )
        self._secret_values(evidence)
        self.weights = Weights(*(self._made(evidence, name) for name in Weights._fields))
        hollow = self._hollow(evidence)
        if hollow is not None:
            return hollow
        self.asked = list(self._probes(evidence))
        return None

    def _secret_values(self, evidence: Evidence) -> None:
        spread: dict[str, float] = {}
        flat, sizes = [], []
        for name, factors in evidence.origin.items():
            for one in factors:
                spread[name] = BIASES if one.ndim == 1 else one.shape[-1] ** -0.5
                flat.append(one.flatten())
                sizes.append(torch.full((one.numel(),), spread[name], dtype=torch.float64))
        every, size = torch.cat(flat), torch.cat(sizes)
        self._places, inverse = every[every >= 0].unique(return_inverse=True)
        scale = torch.zeros(len(self._places), dtype=torch.float64)
        scale[inverse] = size[every >= 0]
        self._values = (self._normal(len(self._places)) * scale).float().double()

    def _normal(self, *shape: int) -> Tensor:
        """Numbers that float32 has, for code that works in nothing else."""
        return torch.randn(*shape, generator=self._dice).double()

    def _made(self, evidence: Evidence, name: str) -> Tensor:
        """A projection of the secret numbers; a bias that is none of the parameters' is as it was told."""
        if name not in evidence.origin:
            assert evidence.weights is not None
            return getattr(evidence.weights, name).double()
        made = None
        for places in evidence.origin[name]:
            numbers = torch.zeros(places.shape, dtype=torch.float64)
            numbers[places == ONE] = 1.0
            numbers[places >= 0] = self._values[torch.searchsorted(self._places, places[places >= 0])]
            made = numbers if made is None else numbers @ made
        assert made is not None
        return made

    def _hollow(self, evidence: Evidence) -> Refusal | None:
        """Projections under which next to nothing would be asked."""
        assert self.weights is not None
        heads, origin = evidence.num_heads, evidence.origin
        for name in PROJECTIONS:
            weight = getattr(self.weights, name)
            size = max(1, len(self.weights.q) // heads)
            if weight.ndim != 2 or int(torch.linalg.matrix_rank(weight)) < min(size, *weight.shape):
                return Refusal(f"its projection {name} takes next to nothing of its input")
        last = {name: origin[name][-1] for name in PROJECTIONS}
        used = {name: one[one >= 0] for name, one in last.items()}
        for name in ("q", "o"):
            if len(used[name].unique()) < len(used[name]):
                return Refusal(f"one number of its parameters is used in more than one place of {name}")
        together = torch.cat([one.unique() for one in used.values()])
        if len(together.unique()) < len(together):
            return Refusal("one number of its parameters is used in more than one of its projections")
        bare = [name for name in "qkv" if not len(used[name])]
        if bare and self.conditions.has_parameters:
            return Refusal(f"no parameter of its has a part in {', '.join(bare)}")
        return None

    def _probes(self, evidence: Evidence) -> Iterator[_Asked]:
        plain = evidence.call("plain")
        assert plain is not None
        B, T, E = plain.inputs.query.shape
        short = 2 * T // 3
        causal = evidence.conventions.always_causal

        def inputs(B: int, T: int, S: int) -> tuple[Tensor, Tensor, Tensor]:
            query = self._normal(B, T, E)
            if evidence.conventions.self_only:
                return query, query, query
            key = self._normal(B, S, E)
            shared = torch.equal(plain.inputs.key, plain.inputs.value)
            return query, key, key if shared else self._normal(B, S, E)

        yield _Asked("plain", inputs(B, T, T), [])
        first = inputs(B, T, T)
        yield _Asked("plain", first, [])
        if evidence.call("longer memory") is not None and not causal:
            yield _Asked("longer memory", inputs(B, short, T), [])
        for name in MASKED:
            call = evidence.call(name)
            if call is not None and call.inputs.mask is not None and evidence.conventions.mask_argument:
                yield _Asked(name, inputs(B, T, T), list(self._masks(name, B, T)))
        if evidence.call(LONG_PROBE) is not None:
            lengths = [one for one in range(*DRAWN) if one not in (E, evidence.num_heads)]
            length = random.SystemRandom().choice(lengths)
            yield _Asked("plain", inputs(B, length, length), [])
        if evidence.call("batch of one") is not None:
            yield _Asked("another batch", inputs(max(1, B - 1), T, T), [])
        yield _Asked("plain", first, [])  # again: what it was asked meanwhile must not matter

    def _masks(self, name: str, B: int, T: int) -> Iterator[Tensor]:
        """bool [B, T, T], the most telling first; every query sees a key at or before itself."""
        past = torch.ones(T, T, dtype=torch.bool).tril()
        if name == "causal":
            yield past.expand(B, T, T).contiguous()
            return
        if name == "random mask":
            for count in (B, 1):
                drawn = torch.rand(count, T, T, generator=self._dice) < 0.6
                yield (drawn | torch.eye(T, dtype=torch.bool)).expand(B, T, T).contiguous()
            keys = torch.rand(B, 1, T, generator=self._dice) < 0.6
            keys[..., 0] = True
            yield keys.expand(B, T, T).contiguous()
        for count in (B, 1):
            lengths = torch.randint(1, T, (count, 1, 1), generator=self._dice)
            seen = (torch.arange(T) < lengths).expand(B, T, T)
            yield (seen & past if name == "padding causal" else seen).contiguous()

    # Single steps

    def _of_step(self, evidence: Evidence) -> list[dict[str, Any]]:
        """The same questions about other numbers; what was one tensor in two questions stays one."""
        self.refusal = self.conditions.another_step(evidence)
        if self.refusal is not None or evidence.step in UNASKED or not evidence.answers:
            return []
        drawn: dict[bytes, Tensor] = {}

        def other(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            key = bytes(value.contiguous().view(torch.uint8).numpy()) + str(value.shape).encode()
            if key not in drawn:
                drawn[key] = self._like(value)
            return drawn[key]

        self.step = [
            replace(one, inputs={name: other(value) for name, value in one.inputs.items()})
            for one in evidence.answers
            if one.output is not None
        ]
        return [{"probe": one.probe, "inputs": one.inputs} for one in self.step]

    def _like(self, value: Tensor) -> Tensor:
        """As large and as spread as it was; what stands for yes and no, or for nothing, stays."""
        kept = ~value.isfinite() | (value == 0) | (value == 1) | (value.abs() >= LARGE)
        rest = value[~kept].double()
        if len(rest) < 2:
            return value
        fresh = self._normal(*value.shape) * rest.std() + rest.mean()
        return torch.where(kept, value, fresh.to(value.dtype))

    def _step_verdict(self, evidence: Evidence, answers: list[Any] | None) -> Refusal | None:
        from ..dispatch import judge

        if answers is None:
            return Refusal("it did not answer to inputs drawn afterwards") if self.step else None
        step_answers = []
        for call, answer in zip(self.step, answers, strict=True):
            if isinstance(answer, Problem):
                return Refusal(f"to inputs drawn afterwards ({call.probe}) it raised {answer.message}")
            step_answers.append(replace(call, output=answer[0]))
        again = judge(replace(evidence, answers=step_answers, findings=[], problems=[], _truths=[]))
        if again.ok:
            return None
        return Refusal(FORGED, "forged", True) if again.judged else Refusal(again.summary)

    # What the answers are worth

    def verdict(self, evidence: Evidence, answers: list[Any] | None) -> Refusal | None:
        """None: it computed attention with numbers it could not have known."""
        if self.refusal is not None:
            return self.refusal
        if evidence.step is not None and not evidence.calls:
            return self._step_verdict(evidence, answers)
        if answers is None:
            return Refusal("it did not answer to inputs drawn afterwards")
        found: list[tuple[_Asked, Tensor, Tensor | None]] = []  # what was asked, the output, the mask
        for one, answer in zip(self.asked, answers, strict=True):
            if isinstance(answer, Problem):
                return Refusal(f"to inputs drawn afterwards ({one.probe}) it raised {answer.message}")
            output, chosen = answer
            if one.masks and not 0 <= chosen < len(one.masks):
                return Refusal(f"it had a mask of the kind '{one.probe}' before, and cannot say one now")
            found.append((one, output, one.masks[chosen] if one.masks else None))
        drawn = replace(evidence, weights=self.weights, _truths=[])
        known = replace(evidence, _truths=[])
        before = [call for name in ("plain", *MASKED) if (call := evidence.call(name)) is not None]
        if not all(_agrees(call.output, _output(known.truth(call))) for call in before):
            return self._judged_again(drawn, found[1:])
        off = [
            i
            for i, (one, output, mask) in enumerate(found)
            if not _agrees(output, _output((drawn if i else known).truth(_call(evidence, one, mask))))
        ]
        if off == list(range(1, len(found))):
            return Refusal(
                "with other numbers in the parameters that its projections were found in, it computes "
                "something else: they are not what it computes with"
            )
        if off:
            return Refusal(f"{FORGED} ({self.asked[off[0]].probe})", "forged", True)
        if not torch.equal(found[1][1], found[-1][1]):
            return Refusal(f"{FORGED}: the same inputs twice, and two answers", "forged", True)
        return None

    def _judged_again(
        self, drawn: Evidence, found: list[tuple[_Asked, Tensor, Tensor | None]]
    ) -> Refusal | None:
        """Where it is right with something around it that the recipe does not have: so it must be again."""
        from ..dispatch import judge

        calls = [replace(_call(drawn, one, mask), output=output.double()) for one, output, mask in found]
        again = judge(replace(drawn, calls=calls, findings=[], problems=[], _truths=[]))
        return None if again.ok else Refusal(FORGED, "forged", again.judged)


def _call(evidence: Evidence, one: _Asked, mask: Tensor | None) -> ProbeCall:
    """With what it hides by itself."""
    B, T, S = len(one.inputs[0]), one.inputs[0].shape[1], one.inputs[1].shape[1]
    if evidence.conventions.always_causal:
        past = torch.ones(T, S, dtype=torch.bool).tril().expand(B, T, S)
        mask = past if mask is None else mask & past
    return ProbeCall(one.probe, ProbeInputs(*one.inputs, mask))


def _output(state: State | None) -> Tensor | None:
    return None if state is None else state.output


def _agrees(found: Tensor | None, wanted: Tensor | None) -> bool:
    """To the same share of the largest number as everywhere, with no floor below which all is alike."""
    if found is None or wanted is None or found.shape != wanted.shape or not bool(found.isfinite().all()):
        return False
    return bool((found.double() - wanted).abs().max() <= NEAR * wanted.abs().max())
