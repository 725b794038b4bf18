"""`MultiHeadAttention` against `torch.nn.MultiheadAttention` with the same weights: outputs, weights of every
head, gradients of inputs and parameters; in float64 to 1e-12, in float32 by the judge.

torch's letters for ours: embed_dim = E = d_model, L = T, S = S.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import headwise as hw
from headwise import Mask, foreign_masks, reference
from judge import assert_judged, error, largest


@dataclass(repr=False)
class Twins:
    """One attention in both classes, in float64, and what to call it with."""

    ours: hw.MultiHeadAttention
    theirs: nn.MultiheadAttention
    inputs: list[Tensor]  # one: self-attention; two: query and memory; three: query, key, value
    mask: Mask
    pulls: tuple[Tensor, Tensor]  # the cotangents of output and weights

    def __repr__(self) -> str:
        shapes = " ".join(str(list(x.shape)) for x in self.inputs)
        return f"Twins({self.ours.extra_repr()}; {shapes}; {self.mask!r})"

    def to(self, dtype: torch.dtype) -> Twins:
        return Twins(
            copy.deepcopy(self.ours).to(dtype),
            copy.deepcopy(self.theirs).to(dtype),
            [x.to(dtype) for x in self.inputs],
            self.mask,
            (self.pulls[0].to(dtype), self.pulls[1].to(dtype)),
        )

    def three(self) -> list[Tensor]:
        """query, key and value."""
        x = self.inputs
        return [x[0]] * 3 if len(x) == 1 else [x[0], x[1], x[1]] if len(x) == 2 else x

    def run_ours(self) -> tuple[Tensor, Tensor]:
        arguments = self.inputs if len(self.inputs) == 1 else self.three()
        output, weights = self.ours(*arguments, mask=self.mask)
        assert weights is not None
        return output, weights.dense()

    def run_theirs(self, need_weights: bool = True) -> tuple[Tensor, Tensor | None]:
        query, key, value = self.three()
        masks = foreign_masks.to_torch(
            self.mask,
            batch=query.shape[0],
            num_heads=self.ours.num_heads,
            query_len=query.shape[1],
            key_len=key.shape[1],
        )
        masks["is_causal"] = False  # a hint only: the mask itself says it
        return self.theirs(query, key, value, need_weights=need_weights, average_attn_weights=False, **masks)


def with_gradients(twins: Twins, module: nn.Module, run: Any) -> dict[str, Tensor]:
    """Outputs, weights, and the gradients of inputs and parameters under one set of names."""
    for x in twins.inputs:
        x.requires_grad_()
    output, weights = run()
    pull_output, pull_weights = twins.pulls
    names = [f"d input {i}" for i in range(len(twins.inputs))] + [
        f"d {n}" for n, _ in module.named_parameters()
    ]
    loss = (output * pull_output).sum() + (weights * pull_weights).sum()
    grads = torch.autograd.grad(loss, [*twins.inputs, *module.parameters()])
    actual = {"output": output, "weights": weights} | dict(zip(names, grads, strict=True))
    return {name: value.detach() for name, value in split_packed(actual).items()}


def split_packed(actual: dict[str, Tensor]) -> dict[str, Tensor]:
    """torch's names of gradients as ours."""
    new = {}
    for name, value in actual.items():
        if name.startswith("d in_proj_"):
            for projection, part in zip("qkv", value.chunk(3), strict=True):
                new[f"d {projection}_proj.{name.removeprefix('d in_proj_')}"] = part
        elif name.endswith("_proj_weight"):
            new[name.replace("_proj_weight", "_proj.weight")] = value
        else:
            new[name] = value
    return new


@st.composite
def twins(draw: Any) -> Twins:
    kind = draw(st.sampled_from(["self", "memory", "three"]))
    heads, channels = draw(st.sampled_from([(1, 7), (2, 3), (3, 8), (5, 2)]))
    E, B = heads * channels, draw(st.sampled_from([1, 2, 3]))
    T = draw(st.sampled_from([1, 5, 11]))
    S = T if kind == "self" else draw(st.sampled_from([1, 7, 13]))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    widths = {}
    if kind == "memory" and draw(st.booleans()):
        widths = {"kdim": 17, "vdim": 17}
    elif kind == "three" and draw(st.booleans()):
        widths = {"kdim": 17, "vdim": 19}
    theirs = nn.MultiheadAttention(
        E, heads, bias=draw(st.booleans()), batch_first=True, dtype=torch.float64, **widths
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(normal(*parameter.shape) / max(1, parameter.shape[-1]) ** 0.5)
    inputs = [normal(B, T, E)]
    if kind != "self":
        inputs.append(normal(B, S, widths.get("kdim", E)))
    if kind == "three":
        inputs.append(normal(B, S, widths.get("vdim", E)))
    mask = Mask()
    rules = draw(st.sets(st.sampled_from(["causal", "padding", "per head"]), max_size=2))
    if "causal" in rules and S >= T:  # where every query has a key: without one torch's weights are NaN
        mask = mask & Mask.causal()
    if "padding" in rules:
        lengths = torch.randint(1, S + 1, (B,), generator=random)
        mask = mask & Mask.padding(lengths)
    if "per head" in rules:
        allowed = torch.rand(1, heads, T, S, generator=random) < 0.6
        allowed[..., 0] = True  # the first key is always real
        mask = mask & Mask.dense(allowed)
    ours = hw.MultiHeadAttention.from_torch(theirs)
    return Twins(ours, theirs, inputs, mask, (normal(B, T, E), normal(B, heads, T, S)))


@given(twins())
def test_float64_equals_torch_to_the_twelfth_digit(both: Twins) -> None:
    ours = with_gradients(both, both.ours, both.run_ours)
    theirs = with_gradients(both, both.theirs, both.run_theirs)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert error(ours[name], expected) <= 1e-12 * max(1.0, largest(expected)), name


@torch.no_grad()
def largest_term(both: Twins) -> float:
    """The largest term in the sums behind the gradients, as `judge.sizes` has it, times what comes in.

    dS = P (dP - delta) is a difference that may come to nothing, of terms as large as the flow into P.
    """
    ours, (pull, pull_weights) = both.ours, both.pulls
    q, k, v = ours._project(*both.three())
    d_heads = pull @ ours.out_proj.weight  # [B, T, H * D]
    flow = largest(d_heads) * largest(v) * v.shape[-1] ** 0.5 + largest(pull_weights)
    through_scores = flow * q.shape[-1] ** -0.5 * max(largest(q), largest(k))
    widest = max(largest(x) for x in (*both.inputs, *ours.parameters()))
    return max(1.0, through_scores, largest(d_heads), largest(pull)) * max(1.0, widest)


@given(twins())
def test_float32_is_as_near_the_truth_as_torch_is(both: Twins) -> None:
    truth = with_gradients(both, both.theirs, both.run_theirs)
    single = both.to(torch.float32)
    ours = with_gradients(single, single.ours, single.run_ours)
    theirs = with_gradients(single, single.theirs, single.run_theirs)
    for name, expected in truth.items():
        is_gradient = name.startswith("d ")
        size = largest_term(both) if is_gradient else max(1.0, *(largest(x) for x in both.inputs))
        assert_judged(
            ours[name],
            theirs[name],
            expected,
            dtype=torch.float32,
            size=size,
            times=3 if is_gradient else 2,
            name=name,
        )


@given(twins())
def test_inference_equals_training_and_torchs_own_fast_path(both: Twins) -> None:
    output, weights = both.run_ours()
    both.ours.eval(), both.theirs.eval()
    with torch.no_grad():
        lane, lane_weights = both.run_ours()
        theirs, their_weights = both.run_theirs()
        without = both.ours(*both.three(), mask=both.mask, need_weights=False)
    assert error(lane, output) <= 1e-12 and error(lane_weights, weights) <= 1e-12
    assert error(lane, theirs) <= 1e-12 and their_weights is not None
    assert error(lane_weights, their_weights) <= 1e-12
    assert error(without[0], lane) <= 1e-12 and without[1] is None


def test_the_equation_of_the_paper_gives_what_the_module_gives() -> None:
    """Section 3.2.2 as `reference.multi_head` has it: causal, query and memory of two lengths, no biases."""
    mha = hw.MultiHeadAttention(15, 3, bias=False, causal=True)
    x, memory = torch.randn(2, 11, 15), torch.randn(2, 13, 15)
    matrices = [layer.weight.detach() for layer in (mha.q_proj, mha.k_proj, mha.v_proj, mha.out_proj)]

    def by_the_paper(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        inputs = (y.to(dtype) for y in (x, memory, memory, *matrices))
        return reference.multi_head(*inputs, num_heads=3, mask=Mask.causal())

    output, weights = mha(x, memory, memory)
    plain, truth = by_the_paper(torch.float32), by_the_paper(torch.float64)
    size = max(1.0, largest(x), largest(memory))
    assert_judged(output, plain[0], truth[0], dtype=torch.float32, size=size, name="output")
    assert_judged(weights.dense(), plain[1], truth[1], dtype=torch.float32, name="weights")
