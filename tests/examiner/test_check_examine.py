"""Examining: attention in any style is built and called, its projections found, every probe proved."""

from __future__ import annotations

import functools
import math
import random
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from headwise.errors import ArgumentError
from headwise.examiner import check, recipe
from headwise.examiner.dispatch import examine
from headwise.examiner.evidence import Evidence, Finding
from headwise.examiner.examine.environment import by_default, float64_environment, seed
from planted.right import (
    AdditiveMask,
    CausalSelfAttention,
    Config,
    CrossWithFusedKeysAndValues,
    FourLinears,
    FusedInterleaved,
    Head,
    HeadAxisParameters,
    HeadsSideBySide,
    InOutMatrices,
    KeyPaddingMask,
    LazyLayers,
    SequenceFirst,
    TorchFunction,
    UnifiedHeads,
    ValuesKeysQuery,
    multi_head_attention,
)

EXACT = 1e-10
examined = functools.cache(examine)  # for tests that only read what was found: each class is examined once


def split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v


class Four(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.W_q, self.W_k = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.W_v, self.W_o = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def forward(self, q, k, v, mask=None):
        q, k, v = (split(w(x), self.num_heads) for w, x in ((self.W_q, q), (self.W_k, k), (self.W_v, v)))
        return self.W_o(merge(attend(q, k, v, None if mask is None else mask.unsqueeze(1) == 0)))


class Fused(nn.Module):
    def __init__(self, dim, heads=8, qkv_bias=True):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=qkv_bias), nn.Linear(dim, dim)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).reshape(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        return self.proj(merge(attend(q, k, v)))


class ReturnsWeights(Four):
    def forward(self, q, k, v, attn_mask=None):
        q, k, v = (split(w(x), self.num_heads) for w, x in ((self.W_q, q), (self.W_k, k), (self.W_v, v)))
        scores = q @ k.mT * q.size(-1) ** -0.5
        if attn_mask is not None:
            scores = torch.where(attn_mask[:, None], -torch.inf, scores)  # True hides, as in torch's class
        weights = scores.softmax(-1)
        return {"context": self.W_o(merge(weights @ v)), "attention": weights}


class Lengths(Four):
    def forward(self, queries, keys, values, valid_lens):
        inputs = ((self.W_q, queries), (self.W_k, keys), (self.W_v, values))
        q, k, v = (split(w(x), self.num_heads) for w, x in inputs)
        hidden = None
        if valid_lens is not None:
            hidden = (torch.arange(k.size(2)) >= valid_lens[:, None])[:, None, None]
        return self.W_o(merge(attend(q, k, v, hidden)))


class ChannelByChannel(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_all, self.last = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.to_all(x).unflatten(-1, (-1, 3, self.heads)).permute(3, 0, 4, 1, 2)
        return self.last(merge(attend(q, k, v)))


class Nameless(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.b = b
        self.p0, self.p1 = nn.Parameter(torch.randn(a, 3 * a)), nn.Parameter(torch.randn(a, a))
        self.z0, self.z1 = nn.Parameter(torch.zeros(a)), nn.Parameter(torch.zeros(a))
        self.z2, self.z3 = nn.Parameter(torch.zeros(a)), nn.Parameter(torch.zeros(a))

    def forward(self, a):
        v, q, k = (a @ self.p0).chunk(3, -1)
        q, k, v = (split(x, self.b) for x in (q + self.z1, k + self.z0, v + self.z3))
        return merge(attend(q, k, v)) @ self.p1 + self.z2


class OneSequence(nn.Module):
    def __init__(self, d_in, d_out, qkv_bias=False):
        super().__init__()
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)

    def forward(self, x):
        keys = self.W_key(x)
        return torch.softmax(self.W_query(x) @ keys.T / keys.shape[-1] ** 0.5, dim=-1) @ self.W_value(x)


n_embd, block_size = 32, 8


class FixedSizes(nn.Module):
    def __init__(self, num_heads, head_size):
        super().__init__()
        self.heads = nn.ModuleList([Head(n_embd, head_size, block_size) for _ in range(num_heads)])
        self.proj = nn.Linear(head_size * num_heads, n_embd)

    def forward(self, x):
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


def scaled_dot_product(query, key, value, mask=None, dropout=None):
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e30)
    weights = scores.softmax(-1)
    return weights @ value, weights


def in_numpy(Q, K, V):
    scores = Q @ K.T / np.sqrt(Q.shape[1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ V


RIGHT: list[Any] = [
    Four, Fused, FusedInterleaved, HeadAxisParameters, CrossWithFusedKeysAndValues, InOutMatrices,
    HeadsSideBySide, FourLinears, nn.MultiheadAttention, nn.MultiheadAttention(24, 4), TorchFunction,
    ValuesKeysQuery, CausalSelfAttention, SequenceFirst, ReturnsWeights, AdditiveMask, KeyPaddingMask,
    Lengths, ChannelByChannel, Nameless, OneSequence, FixedSizes, LazyLayers, UnifiedHeads,
    UnifiedHeads(24, 4, mask=True), CausalSelfAttention(Config(n_embd=40, n_head=5, block_size=6)),
    scaled_dot_product, multi_head_attention, in_numpy,
]  # fmt: skip


def name_of(obj: Any) -> str:
    return getattr(obj, "__name__", None) or f"{type(obj).__name__} given"


def off(evidence: Evidence) -> dict[str, float]:
    """Probe -> how far the recipe is from the output; rows that see nothing are left out."""
    assert evidence.weights is not None
    errors = {}
    for call in evidence.calls:
        assert call.problem is None and call.output is not None, (call.probe, call.problem)
        truth = recipe.run(call.inputs, evidence.weights, evidence.num_heads)
        visible = torch.ones(truth.output.shape[:2], dtype=torch.bool)
        visible = visible if call.inputs.mask is None else call.inputs.mask.any(-1)
        assert call.output.shape == truth.output.shape, call.probe
        size = truth.output[visible].abs().max()
        errors[call.probe] = float((call.output - truth.output)[visible].abs().max() / size)
        if call.weights is not None:
            assert (call.weights - truth.p)[visible[:, None].expand_as(truth.p[..., 0])].abs().max() < 1e-7, (
                call.probe
            )
    return errors


def finding(evidence: Evidence, name: str) -> Finding:
    return next(finding for finding in evidence.findings if finding.name == name)


@pytest.mark.thinned(8)
@pytest.mark.parametrize("obj", RIGHT, ids=name_of)
def test_right_styles_are_proved_on_every_probe(obj: Any) -> None:
    evidence = examined(obj)
    assert evidence.problems == []
    errors = off(evidence)
    assert {"plain", "batch of one", "non-contiguous input"} <= set(errors)
    loud = errors.pop("scores x1e4 with mask", 0.0)
    assert max(errors.values()) < EXACT, errors
    assert loud < 1e-7  # scores of 1e5 leave so many digits
    wrong = [
        finding
        for finding in evidence.findings
        if finding.verdict != "right" and finding.name not in ("float16", "layer_past")
    ]
    assert not wrong, wrong


MASKED = {"causal", "padding", "random mask", "padding + causal", "empty row", "scores x1e4 with mask"}
PAIRS = {"causal", "random mask", "padding + causal"}


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("obj", "argument", "kind", "attends", "shape", "probes"),
    [
        (Four, "mask", "bool", True, "[B, T, S]", MASKED),
        (FusedInterleaved, "mask", "bool", True, "[B, 1, T, S]", MASKED),
        (FourLinears, "mask", "bool", True, "[B, T, S]", MASKED),
        (ValuesKeysQuery, "mask", "bool", True, "[B, 1, T, S]", MASKED),
        (SequenceFirst, "mask", "bool", True, "[T, S, B]", MASKED),
        (ReturnsWeights, "attn_mask", "bool", False, "[B, T, S]", MASKED),
        (AdditiveMask, "bias", "added", None, "[B, 1, T, S]", MASKED),
        (KeyPaddingMask, "key_padding_mask", "bool", False, "[B, S]", MASKED - PAIRS | {"random mask"}),
        (Lengths, "valid_lens", "lengths", None, "[B]", MASKED - PAIRS),
        (nn.MultiheadAttention, "attn_mask", "bool", False, "[B*H, T, S]", MASKED),
        (TorchFunction, "attn_mask", "bool", True, "[B, 1, T, S]", MASKED),
        (Fused, None, None, None, None, set()),
    ],
    ids=lambda value: name_of(value) if callable(value) else "",
)
def test_masks_are_probed(
    obj: Any,
    argument: str | None,
    kind: str | None,
    attends: bool | None,
    shape: str | None,
    probes: set[str],
) -> None:
    evidence = examined(obj)
    c = evidence.conventions
    assert (c.mask_argument, c.mask_kind, c.mask_true_attends, c.mask_shape) == (
        argument,
        kind,
        attends,
        shape,
    )
    assert {call.probe for call in evidence.calls} & MASKED == probes


def test_conventions() -> None:
    assert examined(HeadAxisParameters).conventions.always_causal
    assert examined(CausalSelfAttention).conventions.always_causal
    assert examined(Fused).conventions.self_only and not examined(Fused).conventions.always_causal
    assert examined(CrossWithFusedKeysAndValues).conventions.arguments == ("x", "memory")
    assert examined(ValuesKeysQuery).conventions.arguments == ("value", "key", "query", "mask")
    assert not examined(SequenceFirst).conventions.batch_first
    assert examined(ReturnsWeights).conventions.returns_weights
    assert examined(FusedInterleaved).conventions.returns_weights  # asked for with its own switch
    assert examined(UnifiedHeads).call("causal") is not None
    assert "it takes one sequence at a time, [T, E]" in examined(OneSequence).conventions.words


@pytest.mark.thinned(keep=["a bias", "nameless"])
@pytest.mark.parametrize(
    ("obj", "role", "parameter", "evidence"),
    [
        (Four, "k_bias", "W_k.bias", None),
        (FourLinears, "v", "linears.2.weight", "gradients"),
        (HeadsSideBySide, "q", "heads.0.query.weight and 3 more", None),
        (nn.MultiheadAttention, "k", "in_proj_weight[24:48]", None),
        (Nameless, "v", "p0[0:24]", None),
    ],
    ids=["a bias", "a list", "side by side", "torch's", "nameless"],
)
def test_where_the_projections_were_found(obj: Any, role: str, parameter: str, evidence: str | None) -> None:
    projection = examined(obj).roles[role]
    assert projection.parameter == parameter
    assert evidence is None or projection.how == evidence


def test_projections_that_have_no_parameter_of_their_own() -> None:
    assert examined(InOutMatrices).roles["q"].transposed
    assert examined(scaled_dot_product).roles == {}
    assert examined(OneSequence).num_heads == 1


def test_roles_that_are_passed_are_used() -> None:
    evidence = examine(
        FourLinears, roles={"q": "linears.0", "k": "linears.1", "v": "linears.2", "o": "linears.3"}
    )
    assert evidence.roles["q"].how == "given" and max(off(evidence).values()) < 1e-7


def test_sizes_asked_for() -> None:
    evidence = examine(Four, embed_dim=32, num_heads=2)
    assert (evidence.embed_dim, evidence.num_heads) == (32, 2)
    assert (examined(FixedSizes).embed_dim, examined(FixedSizes).num_heads) == (32, 4)


class SwappedWiring(Four):
    def forward(self, q, k, v):
        return super().forward(q, v, k)


def test_names_stand_where_the_wiring_is_wrong() -> None:
    """The numbers are to be explained by a fault, not explained away by renaming the weights."""
    evidence = examine(SwappedWiring)
    assert evidence.roles["k"].parameter == "W_k.weight"
    assert off(evidence)["plain"] > 0.1


class Inverted(Four):
    """mask: [B, T, S], 1 where a query may attend."""

    def forward(self, q, k, v, mask=None):
        return super().forward(q, k, v, None if mask is None else 1 - mask.long())


def test_a_mask_is_handed_over_as_its_description_says() -> None:
    evidence = examine(Inverted)
    assert evidence.conventions.mask_true_attends is True
    assert off(evidence)["plain"] < EXACT and off(evidence)["random mask"] > 0.1


class ViewAfterTranspose(Four):
    def forward(self, q, k, v):
        B, T, E = q.shape
        q, k, v = (split(w(x), self.num_heads) for w, x in ((self.W_q, q), (self.W_k, k), (self.W_v, v)))
        out = attend(q, k, v).transpose(1, 2)
        return self.W_o(out.view(B, T, E))


class Quits(Four):
    def forward(self, q, k, v):
        print("bye")  # noqa: T201
        raise SystemExit(3)


class NothingBack(Four):
    def forward(self, q, k, v):
        super().forward(q, k, v)


class CannotBuild(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.w = nn.Linear(d_model, undefined_width)  # noqa: F821


@pytest.mark.parametrize(
    ("obj", "stage", "kind", "message"),
    [
        (ViewAfterTranspose, "call", "RuntimeError", "return self.W_o(out.view(B, T, E))"),
        (Quits, "call", "SystemExit", "raise SystemExit(3)"),
        (NothingBack, "call", "shape", None),
        (CannotBuild, "build", "NameError", "self.w = nn.Linear(d_model, undefined_width)  # noqa: F821"),
    ],
    ids=lambda value: name_of(value) if callable(value) else "",
)
def test_errors_become_problems_at_the_learners_line(
    obj: Any, stage: str, kind: str, message: str | None
) -> None:
    evidence = examine(obj)
    problem = evidence.problems[0]
    assert (problem.stage, problem.kind) == (stage, kind)
    if message is None:
        assert problem.line is None
    else:
        with open(__file__, encoding="utf-8") as file:
            assert file.read().splitlines()[problem.line - 1].strip() == message


class DropsAlways(Fused):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.3)


class Forgets(Fused):
    def __init__(self, dim, heads):
        super().__init__(dim, heads)
        self.gain = float(torch.rand(())) + 0.5

    def forward(self, x):
        return super().forward(x * self.gain)


class Detached(Fused):
    def forward(self, x):
        return super().forward(x.detach())


class Leaks(Four):
    fill = -1e3

    def forward(self, q, k, v, mask=None):
        q, k, v = (split(w(x), self.num_heads) for w, x in ((self.W_q, q), (self.W_k, k), (self.W_v, v)))
        scores = q @ k.mT / math.sqrt(q.size(-1))
        scores = scores if mask is None else scores.masked_fill(mask.unsqueeze(1) == 0, self.fill)
        return self.W_o(merge(scores.softmax(-1) @ v))


class SmallFill(Leaks):
    fill = -1e9


@pytest.mark.parametrize(
    ("obj", "name", "verdict", "fault"),
    [
        (Fused, "deterministic in eval", "right", None),
        (DropsAlways, "deterministic in eval", "wrong", "dropout in eval"),
        (Forgets, "state dict complete", "wrong", "state dict incomplete"),
        (Detached, "gradients", "wrong", "gradients blocked"),
        (SmallFill, "bfloat16", "right", None),
        (Four, "output dtype", "right", None),
        (Four, "train equals eval without dropout", "right", None),
    ],
    ids=lambda value: name_of(value) if callable(value) else "",
)
def test_what_is_looked_at_beside_the_numbers(obj: Any, name: str, verdict: str, fault: str | None) -> None:
    result = finding(examined(obj), name)
    assert (result.verdict, result.fault) == (verdict, fault), result


class KeepsItsScale(Four):
    """A plain tensor that `.to(dtype)` passes by; FloatTensor names its dtype, torch.tensor does not."""

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.scale = torch.sqrt(torch.FloatTensor([d_model // num_heads]))
        self.scales = [torch.tensor([1.0])]

    def forward(self, q, k, v):
        q, k, v = (split(w(x), self.num_heads) for w, x in ((self.W_q, q), (self.W_k, k), (self.W_v, v)))
        return self.W_o(merge((q @ k.mT / self.scale * self.scales[0]).softmax(-1) @ v))


class KeepsADouble(KeepsItsScale):
    """Raises in its author's hands, in float32."""

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.scale = torch.from_numpy(np.sqrt([d_model / num_heads]))


@pytest.mark.parametrize("build", [lambda cls: cls, lambda cls: cls(28, 4)], ids=["class", "instance"])
def test_plain_tensors_go_along_into_another_precision(build: Any) -> None:
    """They are double for the examination, and stayed so in a float32 copy: right code was said to raise.
    One that is double in its author's hands is still told."""
    evidence = examine(build(KeepsItsScale))
    for name in ("output dtype", "bfloat16", "float16"):
        assert finding(evidence, name).verdict == "right", finding(evidence, name)
    assert finding(examine(build(KeepsADouble)), "output dtype").verdict == "wrong"


def test_active_dropout_does_not_hide_the_numbers() -> None:
    errors = off(examined(DropsAlways))
    assert max(errors.values()) < EXACT


def test_a_fill_of_minus_1e4_is_a_remark() -> None:
    class Habit(Leaks):
        fill = -1e4

    report = check(Habit)
    assert report.ok
    assert [remark.key for remark in report.remarks] == ["finite fill"]


def test_a_mask_that_leaks_shows_at_large_scores_alone() -> None:
    errors = off(examined(Leaks))
    assert errors.pop("scores x1e4 with mask") > 0.01
    assert max(errors.values()) < EXACT


def test_nothing_is_left_behind() -> None:
    module = Four(24, 4)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    examine(module)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_default_dtype() == torch.float32 and module.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_the_process_is_left_alone_meanwhile(capsys: pytest.CaptureFixture[str]) -> None:
    """Another thread's tensors became float64, and what it printed was lost, for as long as code was examined
    here: torch's default dtype, stdout and the filters of warnings are the process's."""
    dtypes: set[Any] = set()
    began, done = threading.Event(), threading.Event()
    mine = (sys.stdout, sys.stderr, list(warnings.filters))

    def watch() -> None:
        began.wait()
        while not done.is_set():
            dtypes.add((torch.zeros(1).dtype, (torch.arange(2) / 2).dtype))
            dtypes.add((sys.stdout, sys.stderr, list(warnings.filters)) == mine)

    class Speaks(Four):
        def forward(self, q, k, v):
            if not began.is_set():
                print("here I am")  # noqa: T201
            began.set()
            return super().forward(q, k, v)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        evidence = examine(Speaks)
    finally:
        began.set()
        done.set()
        thread.join()
    assert dtypes == {(torch.float32, torch.float32), True} and evidence.weights is not None
    assert capsys.readouterr().out == "here I am\n"


def test_checks_in_several_threads_leave_the_process_as_it_was() -> None:
    """The first to end put float32 back for all, the last put back the float64 that the first had set."""
    before = list(warnings.filters)
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(examine, [Four, ReturnsWeights, Four]))
    assert torch.get_default_dtype() == torch.float32 and warnings.filters == before
    for evidence in results:
        errors = {name: error for name, error in off(evidence).items() if not name.startswith("scores")}
        assert max(errors.values()) < EXACT


def test_every_generator_that_was_drawn_from_is_put_back() -> None:
    """Python's and NumPy's were not, and seeds were left waiting for GPUs that nobody had used yet."""

    class Draws(Four):
        def forward(self, q, k, v):
            _ = random.random(), np.random.rand(), torch.rand(1)
            return super().forward(q, k, v)

    def drawn() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), float(torch.rand(1))

    def sow() -> None:
        random.seed(5)
        np.random.seed(5)
        torch.default_generator.manual_seed(5)

    sow()
    expected, waiting = drawn(), len(torch.cuda._queued_calls)
    sow()
    assert examine(Draws).weights is not None
    assert drawn() == expected and len(torch.cuda._queued_calls) == waiting


def test_a_warning_that_is_made_an_error_is_no_fault_of_half_precision() -> None:
    """Some processors warn of bfloat16; warnings are not held back, and tests often make errors of them."""

    class Warns(Four):
        def forward(self, q, k, v):
            if q.dtype == torch.bfloat16:
                warnings.warn("slow here", stacklevel=2)
            return super().forward(q, k, v)

    half = {finding.name: finding for finding in examine(Warns).findings}["bfloat16"]
    assert half.verdict == "unknown" and "UserWarning" in half.detail


def test_the_default_dtype_of_one_thread() -> None:
    """As `torch.set_default_dtype(torch.float64)`, which is everybody's."""
    whole, yes = torch.arange(1, 4), torch.tensor([True, False])
    makes = [
        lambda: torch.zeros(2), lambda: torch.tensor([0.1, 2]), lambda: torch.full((2,), 0.1),
        lambda: torch.arange(0, 1, 0.1), lambda: torch.linspace(0, 1, 7), lambda: whole / 3,
        lambda: whole * 0.1, lambda: whole.sqrt(), lambda: 0.1**whole, lambda: yes * -1e9,
        lambda: torch.where(yes, 0.1, 0.0), lambda: torch.tensor(3), lambda: whole // 2, lambda: yes & yes,
        lambda: whole.float(), lambda: torch.zeros(2, dtype=torch.float32), lambda: whole.to(torch.float32),
        lambda: torch.tensor(np.float32(0.1)), lambda: torch.as_tensor(np.ones(2, np.float32)),
        lambda: nn.Linear(2, 3).weight, lambda: nn.init.normal_(torch.empty(2)), lambda: torch.eye(2),
        lambda: torch.softmax(torch.zeros(2), 0), lambda: torch.stack([whole, whole]).div(3),
        lambda: torch.zeros(2, dtype=torch.float16) + 0.1, lambda: torch.exp(-whole), lambda: 1 / whole,
    ]  # fmt: skip

    def made() -> list[Any]:
        seed(3)
        return [make() for make in makes]

    for dtype in (torch.float64, torch.float32):
        with float64_environment(), by_default(dtype):
            results = made()
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(dtype)
            expected = made()
        finally:
            torch.set_default_dtype(before)
        for number, (result, reference) in enumerate(zip(results, expected, strict=True)):
            assert result.dtype is reference.dtype and torch.equal(result, reference), number


class Unscaled(Four):
    def forward(self, q, k, v):
        q, k, v = (split(w(x), self.num_heads) for w, x in ((self.W_q, q), (self.W_k, k), (self.W_v, v)))
        return self.W_o(merge((q @ k.mT).softmax(-1) @ v))


@pytest.mark.thinned(keep=["autocast", "device"])
@pytest.mark.parametrize(
    ("made", "caller"),
    [
        (Four, lambda: torch.autocast("cpu", torch.bfloat16)),
        (Four, torch.inference_mode),
        (Four, lambda: torch.device("meta")),
        (Unscaled, lambda: torch.device("meta")),
    ],
    ids=["autocast", "inference mode", "device", "device, a fault"],
)
def test_the_verdict_is_the_same_wherever_it_is_asked_for(made: type[nn.Module], caller: Any) -> None:
    """Right code was told that it gives bfloat16, by the autocast around the check, and raises, by the
    default device there. What the caller has set is there again afterwards."""

    def state() -> tuple[Any, ...]:
        cast = torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()
        grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return *cast, *grad, torch.zeros(1).device, torch._C._len_torch_function_stack()

    expected = check(made)
    with caller():
        before = state()
        inside = check(made)
        assert state() == before
    for report in (expected, inside):
        report.seconds = 0.0
    assert str(inside) == str(expected) and inside.ok == (made is Four)


def test_something_that_is_no_attention_is_said_to_be_none() -> None:
    evidence = examine(nn.Linear)
    assert evidence.weights is None and evidence.problems[0].kind == "roles"


@pytest.mark.parametrize("made", [Four, TorchFunction])
def test_it_is_quick(made: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes long is to run the learner's code: counted, for a clock on a busy machine says little."""
    calls, forward = [0], made.forward

    @functools.wraps(forward)
    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(made, "forward", counted)
    examine(made)
    assert 10 < calls[0] < 100


# The learner's own terms: their precision, their arguments, their conventions


def heads_of(module: Any, x: Tensor, names: str = "qkv") -> list[Tensor]:
    return [split(getattr(module, name)(x), module.h) for name in names]


class Fours(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h, self.d = num_heads, d_model // num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))


class OnlyFloat32(Fours):
    """`torch.FloatTensor` is float32 whatever the default: in float64 it raises, with its author never."""

    times = 1.0

    def forward(self, x):
        q, k, v = heads_of(self, x)
        scores = q @ k.mT / math.sqrt(self.d) * self.times
        p = torch.FloatTensor(scores.shape).copy_(scores.softmax(-1)).flatten(0, 1)
        return self.o(merge(torch.bmm(p, v.flatten(0, 1)).unflatten(0, (len(x), self.h))))


class MaskOfFloat32(Fours):
    """torch takes a float32 mask beside float64 scores, and computes something else."""

    def forward(self, x):
        q, k, v = heads_of(self, x)
        bias = torch.FloatTensor(x.size(1), x.size(1)).fill_(float("-inf")).triu(1)
        return self.o(merge(F.scaled_dot_product_attention(q, k, v, attn_mask=bias)))


class Conv(nn.Module):
    def __init__(self, channels, n_heads):
        super().__init__()
        self.h = n_heads
        self.q, self.k, self.v, self.o = (nn.Conv1d(channels, channels, 1) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(1, (self.h, -1)).mT for f in (self.q, self.k, self.v))
        return self.o(attend(q, k, v).mT.flatten(1, 2))


class Nested(Fours):
    """A field that no name explains is None until it cannot be, and never changes the numbers."""

    def __init__(self, cfg):
        inner = cfg["model"]["attention"]
        super().__init__(cfg["model"]["width"], inner["heads"])
        self.scale = cfg.some_override or self.d**-0.5

    def forward(self, x):
        q, k, v = heads_of(self, x)
        return self.o(merge((q @ k.mT * self.scale).softmax(-1) @ v))


class Rows(Fours):
    """H and W are numbers, `depth: int = None` gets none, and a required bool a bool."""

    def __init__(self, dim: int, num_heads: int, depth: int = None, *, trace: bool):  # noqa: RUF013
        super().__init__(dim, num_heads)
        assert depth is None and trace in (True, False)

    def forward(self, x, H, W):
        assert H * W == x.size(1)
        return self.o(merge(attend(*heads_of(self, x))))


class ByTemperature(Fours):
    def __init__(self, d_model, num_heads, temperature):
        super().__init__(d_model, num_heads)
        self.temperature = temperature

    def forward(self, x):
        q, k, v = heads_of(self, x)
        p = (q @ k.mT * self.temperature).softmax(-1)
        return p.transpose(0, 1).flatten(0, 1), self.o(merge(p @ v))  # weights first, [H * B, T, S]


class Arrays:
    """NumPy, no call but forward."""

    over = 1.0

    def __init__(self, d_model, num_heads):
        dice = np.random.default_rng(0)
        self.h, self.d = num_heads, d_model // num_heads
        self.w = {name: dice.normal(size=(d_model, d_model)) for name in ("wq", "wk", "wv", "wo")}

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = ((x @ self.w[n]).reshape(B, T, self.h, -1).swapaxes(1, 2) for n in ("wq", "wk", "wv"))
        scores = np.exp(q @ k.swapaxes(2, 3) / np.sqrt(self.d) / self.over)
        self.last = scores / scores.sum(-1, keepdims=True)
        return (self.last @ v).swapaxes(1, 2).reshape(B, T, -1) @ self.w["wo"]


class Tensors:
    """No nn.Module: tensors in a list, computed from leaves."""

    def __init__(self, d_model, num_heads):
        self.h = num_heads
        self.wq, self.wk, self.wv, self.wo = (
            torch.randn(d_model, d_model, requires_grad=True) / d_model for _ in range(4)
        )

    def __call__(self, q, k, v):
        q, k, v = split(q @ self.wq, self.h), split(k @ self.wk, self.h), split(v @ self.wv, self.h)
        return {
            "weights": (q @ k.mT / q.size(-1) ** 0.5).softmax(-1),
            "out": merge(attend(q, k, v)) @ self.wo,
        }


class Grouped(nn.Module):
    interleaved = True

    def __init__(self, d_model, n_heads, n_kv_heads=None):
        super().__init__()
        self.h, self.g, self.d = n_heads, n_kv_heads or n_heads, d_model // n_heads
        self.q, self.o = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.k, self.v = nn.Linear(d_model, self.g * self.d), nn.Linear(d_model, self.g * self.d)

    def forward(self, x):
        q, k, v = split(self.q(x), self.h), split(self.k(x), self.g), split(self.v(x), self.g)
        n = self.h // self.g
        k, v = (t.repeat_interleave(n, 1) if self.interleaved else t.repeat(1, n, 1, 1) for t in (k, v))
        return self.o(merge(attend(q, k, v)))


def of_a_dict(params, x, n_heads):
    q, k, v = x @ params["W_q"], x @ params["W_k"], x @ params["W_v"]
    return merge(attend(split(q, n_heads), split(k, n_heads), split(v, n_heads))) @ params["W_o"]


def per_head(X, M, P_q, P_k, P_v, P_o):
    q = torch.einsum("bne,hed->bhnd", X, P_q)
    k, v = torch.einsum("bne,hed->bhnd", M, P_k), torch.einsum("bne,hed->bhnd", M, P_v)
    return torch.einsum("bhnd,hde->bne", attend(q, k, v), P_o)


HEADS_HERE = 3


class OfGlobals(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(15, 15) for _ in range(4))

    def forward(self, x):
        q, k, v = (split(f(x), HEADS_HERE) for f in (self.q, self.k, self.v))
        return self.o(merge(attend(q, k, v)))


@pytest.mark.parametrize(
    "obj",
    [
        *(OnlyFloat32, Arrays, Tensors, Grouped),
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in (MaskOfFloat32, Conv, Nested, Rows, ByTemperature, of_a_dict, per_head, OfGlobals)
        ),
    ],
    ids=lambda kind: kind.__name__,
)  # fmt: skip
def test_right_code_is_right_on_its_own_terms(obj: Any) -> None:
    evidence = examined(obj)
    assert evidence.weights is not None and not evidence.problems
    for call in evidence.calls:
        truth = evidence.truth(call)
        assert call.output is not None and truth is not None
        assert float((call.output - truth.output).abs().max() / truth.output.abs().max()) < 2e-5, call.probe
        if call.weights is not None:
            assert float((call.weights - truth.p).abs().max()) < 2e-5
    assert not [
        finding
        for finding in evidence.findings
        if finding.verdict == "wrong" and finding.name == "output dtype"
    ]


@pytest.mark.parametrize(
    ("cls", "wrong"),
    [
        (OnlyFloat32, {"times": 1.7}),
        (Arrays, {"over": 1.7}),
        (Grouped, {"interleaved": False}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrong_code_on_the_same_terms_is_not_passed(cls: type, wrong: dict[str, object]) -> None:
    """Heads of keys in another order show only where there are fewer of them than of queries."""
    evidence = examine(type(cls.__name__, (cls,), wrong))
    plain = evidence.call("plain")
    assert plain is not None and plain.output is not None and not evidence.problems
    truth = evidence.truth(plain)
    assert truth is not None
    assert float((plain.output - truth.output).abs().max() / truth.output.abs().max()) > 1e-2


def test_how_it_was_built_is_said() -> None:
    assert examined(Four).built == "Four(d_model=24, num_heads=4)"
    built = examined(Nested).built
    assert built.startswith("Nested(cfg) with ") and "cfg.model.attention.heads=4" in built
    assert "cfg.some_override=None" in built
    assert examined(Grouped).built == "Grouped(d_model=24, n_heads=4, n_kv_heads=2)"


@pytest.mark.slow
def test_what_we_made_up_is_not_the_learners_fault() -> None:
    class Refuses(Four):
        def __init__(self, d_model, num_heads, mode):
            if mode != "full":
                raise ValueError(f"mode must be full: {mode}")
            super().__init__(d_model, num_heads)

    class Bent(Nested):
        """Wrong as built, and it depends on a number of ours."""

        def __init__(self, cfg):
            super().__init__(cfg)
            self.scale = 1.0 + (cfg.wobble_factor or 0)

    evidence = examine(Refuses)
    assert [problem.kind for problem in evidence.problems] == ["guess"] and evidence.weights is None
    assert "mode must be full" in evidence.problems[0].message and evidence.tried
    assert examine(Refuses, arguments={"mode": "full"}).weights is not None
    evidence = examine(Bent)
    assert [problem.kind for problem in evidence.problems] == ["guess"] and not evidence.findings
    assert "cfg.wobble_factor" in evidence.problems[0].message


def test_arguments_are_passed_on_or_refused() -> None:
    evidence = examine(Fused, arguments={"dim": 20, "heads": 5, "qkv_bias": False})
    assert evidence.built == "Fused(dim=20, heads=5, qkv_bias=False)"
    assert (evidence.embed_dim, evidence.num_heads) == (20, 5)
    with pytest.raises(ArgumentError, match=r"arguments must name parameters of Four: got 'bais'"):
        check(Four, arguments={"bais": True})
