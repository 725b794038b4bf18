"""The library of faults: each is itself and no other, says three things, and computes something wrong."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from headwise import Mask, reference
from headwise.examiner import recipe
from headwise.examiner.diagnosis import diagnose, difference
from headwise.examiner.evidence import Evidence, ProbeCall, Role
from headwise.examiner.faults import FAULTS, Fault, computed, pairs
from headwise.examiner.recipe import Design, ProbeInputs, Weights

B, T, E, H = 3, 7, 24, 4


def weights() -> Weights:
    torch.manual_seed(1)
    square = [torch.randn(E, E, dtype=torch.float64) * E**-0.5 for _ in range(4)]
    return Weights(*square, *(torch.randn(E, dtype=torch.float64) for _ in range(4)))


def grouped() -> Weights:
    """Two heads of keys and values, each for two heads of queries."""
    w = weights()

    def shared(x: Tensor) -> Tensor:
        return x.unflatten(0, (H, -1))[::2].repeat_interleave(2, 0).flatten(0, 1)

    return w._replace(**{name: shared(getattr(w, name)) for name in ("k", "v", "k_bias", "v_bias")})


def inputs_of(kind: str) -> ProbeInputs:
    torch.manual_seed(2)
    inputs = [torch.randn(B, 5 if kind == "longer memory" and i == 0 else T, E).double() for i in range(3)]
    lengths = torch.tensor([7, 4, 2])
    padding = (torch.arange(T) < lengths[:, None])[:, None].expand(B, T, T)
    causal = torch.ones(T, T, dtype=torch.bool).tril().expand(B, T, T)
    drawn = torch.rand(B, T, T) < 0.6
    drawn[:, torch.arange(T), torch.randint(T, (T,))] = True
    masks = {
        "plain": None, "longer memory": None, "causal": causal, "padding": padding, "random mask": drawn,
        "padding + causal": causal & padding,
    }  # fmt: skip
    if kind == "large scores":
        return ProbeInputs(inputs[0] * 1e6, *inputs[1:], drawn)
    return ProbeInputs(*inputs, masks[kind], padding if kind == "padding + causal" else None)


PROBES = ("plain", "longer memory", "causal", "padding", "random mask", "padding + causal", "large scores")


def evidence(outputs: dict[str, Tensor | None], own: Weights | None = None) -> Evidence:
    calls = [ProbeCall(probe, inputs_of(probe), output) for probe, output in outputs.items()]
    return Evidence("Learner", "class", embed_dim=E, num_heads=H, weights=own or weights(), calls=calls)


def outputs(*ways: dict[str, recipe.Step], own: Weights | None = None) -> dict[str, Tensor | None]:
    steps: dict[str, recipe.Step] = {}
    for way in ways:
        steps |= way
    by_call: dict[str, Tensor | None] = {}
    for probe in PROBES:
        try:
            by_call[probe] = recipe.run(inputs_of(probe), own or weights(), H, steps).output
        except (RuntimeError, ValueError, IndexError):
            by_call[probe] = None  # it would have crashed
    return by_call


def designs_of(fault: Fault) -> list[Design]:
    """The designs without which a fault cannot be."""
    if fault.key != "mask before heads are mixed":
        return []
    mixer = torch.eye(H, dtype=torch.float64).roll(1, 0) - torch.eye(H, dtype=torch.float64)[:, :1] * 1.5
    return [Design("talking heads", "", {}, {"before": mixer})]


def every_way() -> list[tuple[Fault, int]]:
    return [(fault, i) for fault in computed() for i in range(len(fault.ways))]


@pytest.mark.thinned(40, slow=4)
@pytest.mark.parametrize(
    ("fault", "way"), every_way(), ids=lambda x: x.key if isinstance(x, Fault) else str(x)
)
def test_every_fault_is_named_as_itself(fault: Fault, way: int) -> None:
    own = grouped() if fault.key.startswith("groups") else weights()
    designs = designs_of(fault)
    steps = dict(recipe.steps_of(designs))
    facts = evidence(outputs(steps, dict(fault.ways[way]), own=own), own)
    facts.designs = designs
    diagnosis = diagnose(facts)
    assert diagnosis.faults is not None
    assert [made.fault.key for made in diagnosis.faults] == [fault.key], diagnosis
    assert {made.fault.key for explanation in diagnosis.alike for made in explanation} <= {fault.key}, (
        "and as another"
    )


@pytest.mark.parametrize("number", [0.1, 0.7, 5.0])
def test_a_constant_scale_is_found_with_its_number(number: float) -> None:
    fault = FAULTS["constant scale"]
    assert fault.fit is not None
    diagnosis = diagnose(evidence(outputs(dict(fault.fit(number)))))
    assert diagnosis.faults is not None
    assert [(made.fault.key, made.number) for made in diagnosis.faults] == [("constant scale", number)]


def test_what_is_right_is_explained_by_nothing() -> None:
    diagnosis = diagnose(evidence(outputs()))
    assert diagnosis.faults == ()
    assert max(diagnosis.errors.values()) < 1e-14


def test_noise_of_float32_is_no_fault() -> None:
    rounded = {probe: None if x is None else x.float().double() for probe, x in outputs().items()}
    assert diagnose(evidence(rounded)).faults == ()


@pytest.mark.thinned(20, slow=2)
@pytest.mark.parametrize(
    ("first", "second"),
    [pair for pair in pairs() if pair[0].common and pair[1].common],
    ids=lambda fault: fault.key,
)
def test_two_common_faults_are_named_together(first: Fault, second: Fault) -> None:
    diagnosis = diagnose(evidence(outputs(dict(first.ways[0]), dict(second.ways[0]))))
    assert diagnosis.faults is not None
    names = {made.fault.key for made in diagnosis.faults}
    assert names <= {first.key, second.key} or names == {"split and merge by view"}, names


@pytest.mark.slow
def test_rare_faults_are_named_in_pairs_and_nothing_is_found_where_nothing_is_to_find() -> None:
    first, second = FAULTS["scores of sums"], FAULTS["heads reversed"]
    diagnosis = diagnose(evidence(outputs(dict(second.ways[0]), dict(first.ways[0]))))
    assert diagnosis.faults is not None
    assert {made.fault.key for made in diagnosis.faults} == {first.key, second.key}
    noise = {
        probe: None
        if x is None
        else torch.randn(x.shape, generator=torch.Generator().manual_seed(7)).double()
        for probe, x in outputs().items()
    }
    assert diagnose(evidence(noise)).faults is None


def test_of_explanations_alike_one_is_told_and_the_others_are_kept() -> None:
    x = inputs_of("plain").query
    output = recipe.run(ProbeInputs(x, x, x), weights(), H, dict(FAULTS["scores transposed"].ways[0])).output
    facts = Evidence("L", "class", embed_dim=E, num_heads=H, weights=weights())
    facts.calls = [ProbeCall("plain", ProbeInputs(x, x, x), output)]
    for parameters, named, alternative in (
        (("W_q.weight", "W_k.weight"), "scores transposed", "fused order k q v"),
        (("qkv.weight[0:24]", "qkv.weight[24:48]"), "fused order k q v", "scores transposed"),
    ):
        facts.roles = {name: Role(path, "names") for name, path in zip("qk", parameters, strict=True)}
        diagnosis = diagnose(facts)
        assert diagnosis.faults is not None and [made.fault.key for made in diagnosis.faults] == [named]
        assert alternative in {made.fault.key for explanation in diagnosis.alike for made in explanation}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda fault: fault.key)
def test_every_entry_says_what_a_learner_needs(fault: Fault) -> None:
    assert len({*fault.hints}) == 3
    texts = (fault.title, fault.formula, fault.right, *fault.hints, fault.why, fault.repair)
    assert all(text.strip() for text in texts)
    for pattern in fault.lines:
        re.compile(pattern)


def test_nan_belongs_where_nan_is_wanted() -> None:
    nan = torch.tensor([torch.nan, 1.0])
    assert difference(nan, nan.clone()) == 0
    assert difference(torch.tensor([0.0, 1.0]), nan) == float("inf")
    assert difference(torch.tensor([1.0]), nan) == float("inf")
    assert difference(None, nan) == float("inf")


@pytest.mark.parametrize("kind", ["plain", "longer memory", "random mask"])
def test_the_recipe_and_the_reference_are_two_spellings_of_one_truth(kind: str) -> None:
    inputs = inputs_of(kind)
    w = weights()
    bare = w._replace(**{name: torch.zeros_like(getattr(w, name)) for name in w._fields if "bias" in name})
    mask = None if inputs.mask is None else Mask.dense(inputs.mask[:, None])
    output, p = reference.multi_head(*inputs[:3], w.q, w.k, w.v, w.o, H, mask)
    state = recipe.run(inputs, bare, H)
    assert difference(state.output, output) < 1e-14
    assert difference(state.p, p) < 1e-14
