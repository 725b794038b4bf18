"""The kernels of the second pass on a CUDA device, each against float64 on fresh random inputs.

PYTHONPATH=src:tests python tests/test_cuda_second_pass.py     # HEADWISE_SEED=7 for other numbers
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from headwise import Mask
from headwise.engines.statistics import ROW_STATISTICS
from headwise.map import make
from headwise.scoring import Alibi, Relative
from judge import Case, error, inside, largest, with_inside
from on_gpu import run_all
from second_pass_cases import (
    SEED,
    gradients,
    map_of,
    masks,
    numbers,
    options,
    relaid,
    strided,
    values,
)

try:
    import pytest

    pytestmark = pytest.mark.skipif(
        not torch.cuda.is_available(), reason="by design: these need a CUDA device, which CI has not"
    )
except ImportError:  # a bare GPU machine
    pass

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = (  # H, Hk, T, S, D
    (4, 4, 257, 257, 64),
    (6, 2, 131, 389, 128),
    (4, 1, 397, 197, 80),
    (2, 2, 263, 263, 96),
    (4, 2, 139, 283, 16),
    (2, 1, 149, 211, 256),
    (8, 2, 1, 773, 128),
    (2, 2, 151, 157, 40),
)


def cases(shapes: Any = SHAPES) -> Iterator[tuple[str, Case]]:
    B = 2
    for H, Hk, T, S, D in shapes:
        case = numbers(B, H, Hk, T, S, D)
        where = f"H{H}-Hk{Hk}-T{T}-S{S}-D{D}"
        for name, mask in masks(B, H, T, S).items():
            yield f"{name} {where}", replace(case, mask=mask)
        for name, chosen in options(H, T, S).items():
            yield f"causal {name} {where}", replace(case, mask=Mask.causal(), options=chosen)


def moved(case: Case) -> Case:
    def move(x: Any) -> Any:
        if isinstance(x, (Alibi, Relative)):
            return with_inside(x, inside(x).cuda())
        return x.cuda() if isinstance(x, Tensor) else x

    options = {name: move(value) for name, value in case.options.items()}
    return Case(case.q.cuda(), case.k.cuda(), case.v.cuda(), case.mask.to("cuda"), options)


def judge(case: Case, dtype: torch.dtype, name: str) -> list[str]:
    low = case.to(dtype)
    gpu = moved(low)
    plain = gpu.reference()[1:]
    return values(low, map_of(relaid(gpu, strided) if len(name) % 2 else gpu), plain)


def judge_gradients(case: Case, dtype: torch.dtype, name: str) -> list[str]:
    def arms(low: Case) -> tuple[Case, Case]:
        return moved(low), moved(low)

    wrong = gradients(case.to(dtype), arms)
    return wrong + gradients(case.to(dtype), arms, learned_bias=False) if "bias" in case.options else wrong


Job = tuple[str, str, torch.dtype]  # what is judged, the case's name, the dtype


def jobs(what: str) -> list[Job]:
    """Every rule and option at the first shape, fewer of them, in turn, in other dtypes and at the others.

    Almost all of the time goes into compiling, a minute a case if it were alone.
    """
    found: list[Job] = []
    for i, shape in enumerate(SHAPES):
        names = [name for name, _ in cases([shape])]
        for d, dtype in enumerate(DTYPES):
            step = ((1, 3, 3) if i == 0 else (9, 19, 19))[d] * (1 if what == "values" else 2)
            start = (3 * i + 7 * d) % min(step, len(names))
            found += [(what, name, dtype) for name in names[start::step]]
    return found


def verdict(job: Job) -> list[str]:
    """What is wrong with one job; runs in a process of its own, as most of the time goes into compiling."""
    torch.set_num_threads(1)
    what, name, dtype = job
    case = dict(cases())[name]
    try:
        wrong = (judge if what == "values" else judge_gradients)(case, dtype, name)
    except Exception as problem:
        wrong = [f"{type(problem).__name__} {str(problem)[-300:]}"]
    return [f"{str(dtype)[6:]} {name}: {line}" for line in wrong]


def judged(what: str) -> None:
    work = sorted(jobs(what), key=lambda job: "dense" not in job[1])  # the rarest first
    workers = max(1, min(14, (os.cpu_count() or 2) - 1))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        wrong = []
        for count, done in enumerate(as_completed([pool.submit(verdict, job) for job in work]), 1):
            wrong += done.result()
            print("\n".join([f"   {count} of {len(work)} judged", *done.result()]), flush=True)
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:70])


def test_everything_is_as_exact_as_plain_torch() -> None:
    judged("values")


def test_gradients_are_as_exact_as_plain_torch() -> None:
    judged("gradients")


def everything(w: hw.AttentionMap) -> dict[str, Tensor]:
    found = dict(w.statistics(pooled=16)) | {"lse": w.lse, "narrow": w.pooled(90), "mean": w.mean_heads()}
    return found | {"dense": w.dense(), "top": w.top(8).values, "top keys": w.top(8).indices.double()}


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


def test_a_measurement_by_plan_gives_the_same_bits() -> None:
    from headwise.engines.gpu import heaviest, pictures

    def found(case: Case, lse: Tensor | None) -> dict[str, Tensor]:
        weights = make(map_of(case).parts()[0], lse)
        return {**weights.statistics(*ROW_STATISTICS), "lse": weights.lse}

    for dtype in (torch.bfloat16, torch.float16):
        for name, case in cases(SHAPES[:2] + SHAPES[6:7]):
            low = moved(case).to(dtype)
            first = found(low, None)  # nothing is planned yet
            room = torch.empty(first["lse"].numel() + 1, device="cuda")
            beside = room[1:].view(first["lse"].shape).copy_(first["lse"])  # not where vectors begin
            for lse in (None, first["lse"], beside):
                for _ in range(4):
                    for what, value in found(low, lse).items():
                        assert torch.equal(value.nan_to_num(7.0), first[what].nan_to_num(7.0)), (name, what)
    assert any(heaviest._plans.values()) and any(pictures._plans.values())


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


def test_more_sequences_than_a_grid_is_deep() -> None:
    B, H, L, D = 70_001, 2, 16, 16
    q, k = (torch.randn(B, H, L, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    w = hw.AttentionMap(q, k, causal=True)
    alone = hw.AttentionMap(q[-2:].clone(), k[-2:].clone(), causal=True)
    mine, theirs = everything(w), everything(alone)
    for name, value in theirs.items():
        assert torch.equal(mine[name][-2:], value), name


def test_compiled_functions_use_the_same_kernels() -> None:
    def looks(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        w = hw.AttentionMap(q, k, causal=True)
        stats = w.statistics("distance", "received", pooled=8)
        return stats.distance, stats.received, stats.pooled, w.mean_heads(), w.top(3).values, w.dense()

    def loss(q: Tensor, k: Tensor) -> Tensor:
        w = hw.AttentionMap(q, k, causal=True)
        return w.statistics("entropy").entropy.sum() + (w.mean_heads().float() ** 2).sum()

    q, k = (torch.randn(2, 4, 193, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    torch._dynamo.reset()
    for mine, theirs in zip(torch.compile(looks, fullgraph=True)(q, k), looks(q, k), strict=True):
        assert torch.equal(mine, theirs)
    q.requires_grad_()
    (found,) = torch.autograd.grad(torch.compile(loss, fullgraph=True)(q, k), q)
    (wanted,) = torch.autograd.grad(loss(q, k), q)
    assert error(found, wanted) <= 0.01 * largest(wanted)


def test_a_map_of_a_call_uses_the_lse_of_the_call() -> None:
    q, k, v = (torch.randn(2, 4, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    _, w = hw.attention(q, k, v, causal=True)
    own = hw.AttentionMap(q, k, causal=True)
    assert w._lse is not None and error(w.lse, own.lse) < 1e-5
    for name, value in w.statistics().items():
        assert error(value, own.statistics(name)[name]) <= 1e-4 * max(1.0, largest(value)), name


TESTS: tuple[Callable[[], None], ...] = (
    test_everything_is_as_exact_as_plain_torch,
    test_gradients_are_as_exact_as_plain_torch,
    test_the_same_bits_come_out_every_time,
    test_offsets_beyond_two_billion,
    test_more_sequences_than_a_grid_is_deep,
    test_compiled_functions_use_the_same_kernels,
    test_a_map_of_a_call_uses_the_lse_of_the_call,
    test_a_measurement_by_plan_gives_the_same_bits,
)

if __name__ == "__main__":
    sys.exit(run_all(TESTS, "seed", SEED))
