"""The kernels of the second pass on a CUDA device, each against float64 on random inputs.

`make test` runs a few of the cases, `make test-gpu` all of them; HEADWISE_SEED=7 draws other numbers.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise import Mask
from headwise.engines.statistics import ROW_STATISTICS, STATISTICS
from headwise.map import make
from judge import Case, error, largest
from on_gpu import NEEDS_CUDA, few_are_quick, judged
from second_pass_cases import PICTURES, gradients, map_of, relaid, rule_names, strided, under, values

pytestmark = NEEDS_CUDA

DTYPES = ("bfloat16", "float16", "float32")
SHAPES = {  # H, Hk, T, S, D
    "D64": (4, 4, 257, 257, 64),
    "D128": (6, 2, 131, 389, 128),
    "D80": (4, 1, 397, 197, 80),
    "D96": (2, 2, 263, 263, 96),
    "D16": (4, 2, 139, 283, 16),
    "D256": (2, 1, 149, 211, 256),
    "T1": (8, 2, 1, 773, 128),
    "D40": (2, 2, 151, 157, 40),
    "D144": (3, 1, 157, 223, 144),
}

PLANNED = [
    f"{rule}, {shape}-{dtype}"
    for shape, dtype in (("D64", "bfloat16"), ("D128", "float16"), ("T1", "float16"))
    for rule in rule_names(*SHAPES[shape][2:4])
]


def case_of(rule: str, shape: str) -> Case:
    return under(rule, 2, *SHAPES[shape]).on("cuda")


def jobs(often: int = 1) -> list[str]:
    """Every rule and option at the first shape, fewer of them, in turn, in other dtypes and at the others.

    Almost all of the time goes into compiling, half a minute a job: the longest come first. With 256 channels
    shared memory is scarce: what takes most of it is tried in any case.
    """
    actual = []
    for i, (shape, (_, _, T, S, _)) in enumerate(SHAPES.items()):
        rules = rule_names(T, S)
        for d, dtype in enumerate(DTYPES):
            step = ((1, 3, 1) if i == 0 else (9, 19, 19))[d] * often
            start = (3 * i + 7 * d) % min(step, len(rules))
            chosen = rules[start::step]
            if shape == "D256" and dtype == "bfloat16" and often == 1:
                chosen = [rule for rule in rules if rule in chosen or is_long(rule)]
            actual += [f"{rule}, {shape}-{dtype}" for rule in chosen]
    return sorted(actual, key=lambda job: not is_long(job))


def is_long(job: str) -> bool:
    """Whether tiles of numbers for every pair are loaded."""
    return any(word in job for word in ("dense", "bias", "relative", "all"))


def low_case(job: str) -> tuple[Case, bool]:
    """In the job's dtype on the device; and whether it is one of every other job."""
    name, dtype = job.split("-")
    rule, shape = name.split(", ")
    return case_of(rule, shape).to(getattr(torch, dtype)), len(name) % 2 == 1


@few_are_quick("causal, D64-bfloat16", "causal relative, D256-bfloat16")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("job", jobs())
def test_everything_is_as_exact_as_plain_torch(job: str, request: pytest.FixtureRequest) -> None:
    low, is_odd = low_case(job)
    laid_out = relaid(low, strided) if is_odd else low  # as a fused projection leaves q and k
    pictures = [PICTURES[0], PICTURES[1], PICTURES[2 + is_odd]]  # the cells of the last are a pair, or a few
    assert values(low, map_of(laid_out), low.reference()[1:], pictures) == []
    judged(request, "maps")


@few_are_quick("entropy")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", STATISTICS)
def test_a_statistic_alone_is_what_it_is_among_all(name: str) -> None:
    """By other kernels than all at once: for each query, and for each head."""
    for rule in ("causal", "left padding"):
        low = case_of(rule, "D64").to(torch.float32)
        w = map_of(low)
        for per in ("query", "head"):
            actual, expected = w.statistics(name, per=per)[name], w.statistics(*STATISTICS, per=per)[name]
            assert torch.equal(actual.isnan(), expected.isnan())
            assert error(actual.nan_to_num(), expected.nan_to_num()) <= 1e-5 * max(1.0, largest(expected)), (
                rule
            )


@few_are_quick("window, D64-bfloat16")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("job", jobs(often=2))
def test_gradients_are_as_exact_as_plain_torch(job: str, request: pytest.FixtureRequest) -> None:
    low, _ = low_case(job)
    assert gradients(low, lambda case: (case, case)) == []
    if "bias" in low.options:
        assert gradients(low, lambda case: (case, case), learned_bias=False) == []
    judged(request, "gradients of maps")


def everything(w: hw.AttentionMap) -> dict[str, Tensor]:
    actual = dict(w.statistics(pooled=16)) | {"lse": w.lse, "narrow": w.pooled(90), "mean": w.mean_heads()}
    return actual | {"dense": w.dense(), "top": w.top(8).values, "top keys": w.top(8).indices.double()}


@pytest.mark.gpu
def test_the_same_bits_come_out_every_time() -> None:
    q, k = (torch.randn(2, 4, 1537, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for mask in (Mask.causal(), Mask.documents(torch.arange(1537, device="cuda") // 300)):
        first = everything(hw.AttentionMap(q, k, mask=mask))
        for _ in range(3):
            again = everything(hw.AttentionMap(q, k, mask=mask))
            assert all(torch.equal(again[name], value) for name, value in first.items())
    grads = []
    for _ in range(3):
        x = q.clone().requires_grad_()
        (grad,) = torch.autograd.grad(
            hw.AttentionMap(x, x, causal=True).statistics("entropy").entropy.sum(), x
        )
        grads.append(grad)
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


@few_are_quick("causal, D64-bfloat16")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("job", PLANNED)
def test_a_measurement_by_plan_gives_the_same_bits(job: str, request: pytest.FixtureRequest) -> None:
    from headwise.engines.plans import PLANS

    def measured_with(lse: Tensor | None) -> dict[str, Tensor]:
        weights = make(map_of(low).parts()[0], lse)
        return {**weights.statistics(*ROW_STATISTICS), "lse": weights.lse}

    low, _ = low_case(job)
    expected = measured_with(None)["lse"]
    room = torch.empty(expected.numel() + 1, device="cuda")
    beside = room[1:].view(expected.shape).copy_(expected)  # not where vectors begin
    for lse in (None, expected, beside):
        first = measured_with(lse)  # nothing is planned yet
        for _ in range(3):
            for name, value in measured_with(lse).items():
                assert torch.equal(value.nan_to_num(7.0), first[name].nan_to_num(7.0)), name
    if job == "causal, D64-bfloat16":
        assert PLANS.made_by("lse") and PLANS.made_by("measure")
    judged(request, "measurements by plan")


@pytest.mark.gpu
def test_offsets_beyond_two_billion() -> None:
    """The last of many heads lies beyond 2^31 elements, and its weights beyond 2^32."""
    B, H, L, D = 1, 130, 131072, 128
    assert B * H * L * D > 2**31
    q = torch.randn(B, H, L, D, device="cuda", dtype=torch.bfloat16)
    window = Mask.window(200)
    w = hw.AttentionMap(q, q, mask=window)
    alone = hw.AttentionMap(q[:, -1:].clone(), q[:, -1:].clone(), mask=window)
    mine, theirs = w.statistics(pooled=64), alone.statistics(pooled=64)
    for name, value in theirs.items():
        assert torch.equal(mine[name][:, -1:], value), name
    assert torch.equal(w.top(2).indices[:, -1:], alone.top(2).indices)
    few = slice(L - 300, L)
    part = w.select(queries=few, heads=slice(100, None)).dense()
    assert part.numel() > 2**30 and torch.equal(part[:, -1:], alone.select(queries=few).dense())


@pytest.mark.gpu
def test_more_sequences_than_a_grid_is_deep() -> None:
    B, H, L, D = 70_001, 2, 16, 16
    q, k = (torch.randn(B, H, L, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    w = hw.AttentionMap(q, k, causal=True)
    alone = hw.AttentionMap(q[-2:].clone(), k[-2:].clone(), causal=True)
    mine, theirs = everything(w), everything(alone)
    for name, value in theirs.items():
        assert torch.equal(mine[name][-2:], value), name


def test_a_thread_that_has_not_used_the_gpu_may_begin_with_a_kernel_of_ours() -> None:
    """Triton makes descriptors before it launches: "invalid device context" in such a thread."""
    low = case_of("causal", "D64").to(torch.bfloat16)
    expected = map_of(low).lse
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(lambda: map_of(low).lse).result(), expected)


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_functions_use_the_same_kernels() -> None:
    def looks(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        w = hw.AttentionMap(q, k, causal=True)
        stats = w.statistics("distance", "received", pooled=8)
        return stats.distance, stats.received, stats.pooled, w.mean_heads(), w.top(3).values, w.dense()

    def loss(q: Tensor, k: Tensor) -> Tensor:
        w = hw.AttentionMap(q, k, causal=True)
        return w.statistics("entropy").entropy.sum() + (w.mean_heads().float() ** 2).sum()

    q, k = (torch.randn(2, 4, 193, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for mine, theirs in zip(torch.compile(looks, fullgraph=True)(q, k), looks(q, k), strict=True):
        assert torch.equal(mine, theirs)
    q.requires_grad_()
    (actual,) = torch.autograd.grad(torch.compile(loss, fullgraph=True)(q, k), q)
    (wanted,) = torch.autograd.grad(loss(q, k), q)
    assert error(actual, wanted) <= 0.01 * largest(wanted)


def test_a_map_of_a_call_uses_the_lse_of_the_call() -> None:
    q, k, v = (torch.randn(2, 4, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    _, w = hw.attention(q, k, v, causal=True)
    own = hw.AttentionMap(q, k, causal=True)
    assert w._lse is not None and error(w.lse, own.lse) < 1e-5
    for name, value in w.statistics().items():
        assert error(value, own.statistics(name)[name]) <= 1e-4 * max(1.0, largest(value)), name
