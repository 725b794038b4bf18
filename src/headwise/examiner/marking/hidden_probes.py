"""Hidden probes: weights and inputs drawn after the examination, to verify its evidence.

The evidence comes from the process of the learner's code, which could write anything into it. Hidden probes
are drawn and compared in the judge's process, so the code cannot know them in advance.
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
from ..examine.parameters import CONSTANT_ONE
from ..recipe import ProbeInputs, State, Weights
from .requirements import Refusal, SourceFacts

FORGED = "its outputs for hidden inputs differ from those in the examination"
BIASES = 0.5  # the standard deviation of biases; that of weights keeps outputs as large as inputs
PROJECTIONS = ("q", "k", "v", "o")
UNPROBED = ("block",)  # the inputs and outputs of its parts exist in its own process only
LARGE = 1e3  # inputs of a step that are large on purpose
MASKED = ("causal", "padding", "random mask", "padding + causal")


@dataclass
class _Probe:
    name: str
    inputs: tuple[Tensor, Tensor, Tensor]
    masks: list[Tensor]  # bool [B, T, S]; the code gets the first that its arguments can express


class HiddenProbes:
    """Hidden probes for the code of one file, and the verdict on its answers.

    Args:
        source_facts: of the class or function, which the examination must have used.
        num_heads: that the caller requested, if any.
    """

    def __init__(self, source_facts: SourceFacts, num_heads: int | None = None) -> None:
        self.source_facts, self.num_heads = source_facts, num_heads
        self.refusal: Refusal | None = Refusal("it got no hidden inputs")
        self.probes: list[_Probe] = []
        self.weights: Weights | None = None
        self.step: list[StepAnswer] = []
        self._dice = torch.Generator().manual_seed(int.from_bytes(os.urandom(8), "big") >> 1)

    # Questions
    def questions(self, evidence: Evidence) -> list[dict[str, Any]]:
        """Return the probes for this evidence; none, with a reason in `refusal`, if there can be none."""
        if evidence.step is not None and not evidence.calls:
            return self._of_step(evidence)
        self.refusal = self.source_facts.missing(evidence, self.num_heads) or self._draw(evidence)
        if self.refusal is not None:
            return []
        questions = [self._as_sent(probe) for probe in self.probes]
        if len(self._places):  # the first probe uses the weights of the examination
            questions[1] |= {"places": self._places, "values": self._values}
        return questions

    def _as_sent(self, probe: _Probe) -> dict[str, Any]:
        query, key, value = probe.inputs
        names = ["query", "query" if key is query else "key"]
        names.append("query" if value is query else "key" if value is key else "value")
        return {"query": query, "key": key, "value": value, "inputs": names, "masks": probe.masks}

    def _draw(self, evidence: Evidence) -> Refusal | None:
        lost = [name for name in PROJECTIONS if name not in evidence.origin]
        if evidence.weights is None or evidence.call("plain") is None or len(lost) == len(PROJECTIONS):
            return Refusal("its projections were not found, so it could not be tested with other weights")
        if lost:
            return Refusal(
                f"its projection {', '.join(lost)} is not in its parameters, so it could not be tested with "
                "other weights"
            )
        self._draw_values(evidence)
        self.weights = Weights(*(self._made(evidence, name) for name in Weights._fields))
        hollow = self._hollow(evidence)
        if hollow is not None:
            return hollow
        self.probes = list(self._probes(evidence))
        return None

    def _draw_values(self, evidence: Evidence) -> None:
        spread: dict[str, float] = {}
        flat, sizes = [], []
        for name, factors in evidence.origin.items():
            for places in factors:
                spread[name] = BIASES if places.ndim == 1 else places.shape[-1] ** -0.5
                flat.append(places.flatten())
                sizes.append(torch.full((places.numel(),), spread[name], dtype=torch.float64))
        every, size = torch.cat(flat), torch.cat(sizes)
        self._places, inverse = every[every >= 0].unique(return_inverse=True)
        scale = torch.zeros(len(self._places), dtype=torch.float64)
        scale[inverse] = size[every >= 0]
        self._values = (self._normal(len(self._places)) * scale).float().double()

    def _normal(self, *shape: int) -> Tensor:
        """Return normal numbers that float32 can represent, for code that works in float32 only."""
        return torch.randn(*shape, generator=self._dice).double()

    def _made(self, evidence: Evidence, name: str) -> Tensor:
        """Return a projection with the hidden values; a bias that is not a parameter is not changed."""
        if name not in evidence.origin:
            assert evidence.weights is not None
            return getattr(evidence.weights, name).double()
        made = None
        for places in evidence.origin[name]:
            numbers = torch.zeros(places.shape, dtype=torch.float64)
            numbers[places == CONSTANT_ONE] = 1.0
            numbers[places >= 0] = self._values[torch.searchsorted(self._places, places[places >= 0])]
            made = numbers if made is None else numbers @ made
        assert made is not None
        return made

    def _hollow(self, evidence: Evidence) -> Refusal | None:
        """Return a refusal if the projections would make the probes meaningless."""
        assert self.weights is not None
        heads, origin = evidence.num_heads, evidence.origin
        for name in PROJECTIONS:
            weight = getattr(self.weights, name)
            size = max(1, len(self.weights.q) // heads)
            if weight.ndim != 2 or int(torch.linalg.matrix_rank(weight)) < min(size, *weight.shape):
                return Refusal(f"its projection {name} uses almost nothing of its input")
        last = {name: origin[name][-1] for name in PROJECTIONS}
        used = {name: places[places >= 0] for name, places in last.items()}
        for name in ("q", "o"):
            if len(used[name].unique()) < len(used[name]):
                return Refusal(
                    f"a number of its parameters is used in several places of its projection {name}"
                )
        together = torch.cat([places.unique() for places in used.values()])
        if len(together.unique()) < len(together):
            return Refusal("a number of its parameters is used in several projections")
        bare = [name for name in "qkv" if not len(used[name])]
        if bare and self.source_facts.has_parameters:
            return Refusal(f"its projection {', '.join(bare)} uses none of its parameters")
        return None

    def _probes(self, evidence: Evidence) -> Iterator[_Probe]:
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

        yield _Probe("plain", inputs(B, T, T), [])
        first = inputs(B, T, T)
        yield _Probe("plain", first, [])
        if evidence.call("longer memory") is not None and not causal:
            yield _Probe("longer memory", inputs(B, short, T), [])
        for name in MASKED:
            call = evidence.call(name)
            if call is not None and call.inputs.mask is not None and evidence.conventions.mask_argument:
                masks = self._masks_with_keys(evidence, name, B, T)
                if masks:
                    yield _Probe(name, inputs(B, T, T), masks)
        if evidence.call(LONG_PROBE) is not None:
            lengths = [length for length in range(*DRAWN) if length not in (E, evidence.num_heads)]
            length = random.SystemRandom().choice(lengths)
            yield _Probe("plain", inputs(B, length, length), [])
        if evidence.call("batch of one") is not None:
            yield _Probe("another batch", inputs(max(1, B - 1), T, T), [])
        yield _Probe("plain", first, [])  # again: other calls in between must not matter

    def _masks_with_keys(self, evidence: Evidence, name: str, B: int, T: int) -> list[Tensor]:
        """Return masks that leave each query another key than its own, where the code hides that one."""
        hides_own = any(design.numbers.get("without itself") for design in evidence.designs)
        others = ~torch.eye(T, dtype=torch.bool) if hides_own else torch.ones(T, T, dtype=torch.bool)
        for _ in range(20):
            masks = [mask for mask in self._masks(name, B, T) if bool((mask & others).any(-1).all())]
            if masks:
                return masks
        return []

    def _masks(self, name: str, B: int, T: int) -> Iterator[Tensor]:
        """Yield masks, bool [B, T, T], the most specific first, with a visible key for each query."""
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
            visible = (torch.arange(T) < lengths).expand(B, T, T)
            yield (visible & past if name == "padding + causal" else visible).contiguous()

    # Single steps

    def _of_step(self, evidence: Evidence) -> list[dict[str, Any]]:
        """Return the probes of a single step with other numbers; equal tensors stay equal."""
        self.refusal = self.source_facts.another_step(evidence)
        if self.refusal is not None or evidence.step in UNPROBED or not evidence.answers:
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
            replace(answer, inputs={name: other(value) for name, value in answer.inputs.items()})
            for answer in evidence.answers
            if answer.output is not None
        ]
        return [{"probe": call.probe, "inputs": call.inputs} for call in self.step]

    def _like(self, value: Tensor) -> Tensor:
        """Return numbers with the same mean and spread; 0, 1, large and infinite values are not changed."""
        fixed = ~value.isfinite() | (value == 0) | (value == 1) | (value.abs() >= LARGE)
        rest = value[~fixed].double()
        if len(rest) < 2:
            return value
        fresh = self._normal(*value.shape) * rest.std() + rest.mean()
        return torch.where(fixed, value, fresh.to(value.dtype))

    def _verdict_of_step(self, evidence: Evidence, answers: list[Any] | None) -> Refusal | None:
        from ..dispatch import judge

        if answers is None:
            return Refusal("it returned no output for hidden inputs") if self.step else None
        step_answers = []
        for call, answer in zip(self.step, answers, strict=True):
            if isinstance(answer, Problem):
                return Refusal(f"for hidden inputs ({call.probe}) it raised {answer.message}")
            step_answers.append(replace(call, output=answer[0]))
        again = judge(replace(evidence, answers=step_answers, findings=[], problems=[], _truths=[]))
        if again.ok:
            return None
        return Refusal(FORGED, "forged", True) if again.judged else Refusal(again.summary)

    # Verdict
    def verdict(self, evidence: Evidence, answers: list[Any] | None) -> Refusal | None:
        """Return None if the answers to the hidden probes are correct, else a refusal."""
        if self.refusal is not None:
            return self.refusal
        if evidence.step is not None and not evidence.calls:
            return self._verdict_of_step(evidence, answers)
        if answers is None:
            return Refusal("it returned no output for hidden inputs")
        replies: list[tuple[_Probe, Tensor, Tensor | None]] = []  # (probe, output, mask)
        for probe, answer in zip(self.probes, answers, strict=True):
            if isinstance(answer, Problem):
                return Refusal(f"for hidden inputs ({probe.name}) it raised {answer.message}")
            output, chosen = answer
            if probe.masks and not 0 <= chosen < len(probe.masks):
                return Refusal(f"it accepted a mask ({probe.name}) in the examination, but not now")
            replies.append((probe, output, probe.masks[chosen] if probe.masks else None))
        drawn = replace(evidence, weights=self.weights, _truths=[])
        original = replace(evidence, _truths=[])
        before = [call for name in ("plain", *MASKED) if (call := evidence.call(name)) is not None]
        if not all(_agrees(call.output, _output(original.truth(call))) for call in before):
            return self._judged_again(drawn, replies[1:])
        off = [
            i
            for i, (probe, output, mask) in enumerate(replies)
            if not _agrees(output, _output((drawn if i else original).truth(_call(evidence, probe, mask))))
        ]
        if off == list(range(1, len(replies))):
            return Refusal(
                "with other values of the parameters of its projections, the output is wrong: "
                "it does not compute with these parameters"
            )
        if off:
            return Refusal(f"{FORGED} ({self.probes[off[0]].name})", "forged", True)
        if not torch.equal(replies[1][1], replies[-1][1]):
            return Refusal(f"{FORGED}: the same inputs gave two different outputs", "forged", True)
        return None

    def _judged_again(
        self, drawn: Evidence, replies: list[tuple[_Probe, Tensor, Tensor | None]]
    ) -> Refusal | None:
        """Judge the answers in full, for code with a design that the recipe does not have."""
        from ..dispatch import judge

        calls = [
            replace(_call(drawn, probe, mask), output=output.double()) for probe, output, mask in replies
        ]
        again = judge(replace(drawn, calls=calls, findings=[], problems=[], _truths=[]))
        return None if again.ok else Refusal(FORGED, "forged", again.judged)


def _call(evidence: Evidence, probe: _Probe, mask: Tensor | None) -> ProbeCall:
    """Return the probe as a call, with the code's own causal mask if it has one."""
    B, T, S = len(probe.inputs[0]), probe.inputs[0].shape[1], probe.inputs[1].shape[1]
    if evidence.conventions.always_causal:
        past = torch.ones(T, S, dtype=torch.bool).tril().expand(B, T, S)
        mask = past if mask is None else mask & past
    return ProbeCall(probe.name, ProbeInputs(*probe.inputs, mask))


def _output(state: State | None) -> Tensor | None:
    return None if state is None else state.output


def _agrees(output: Tensor | None, wanted: Tensor | None) -> bool:
    """Return True if the output equals the wanted one, relative to its largest number."""
    if output is None or wanted is None or output.shape != wanted.shape or not bool(output.isfinite().all()):
        return False
    return bool((output.double() - wanted).abs().max() <= NEAR * wanted.abs().max())
