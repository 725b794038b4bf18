"""The engines on a CUDA device: each fused kernel against float64, and the second pass.

Run on a machine with a GPU by pytest, or where there is only torch:

    PYTHONPATH=src:tests python tests/test_cuda.py
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from headwise import Mask
from headwise.engines import kernels
from headwise.engines.kernels import ShapeChurn
from headwise.engines.statistics import STATISTICS
from headwise.errors import BackendUnavailable
from headwise.scoring import Alibi, Relative
from judge import Case, assert_judged, error, inside, largest, sizes, with_inside
from on_gpu import run_all

try:
    import pytest

    pytestmark = pytest.mark.skipif(
        not torch.cuda.is_available(), reason="by design: these need a CUDA device, which CI has not"
    )
except ImportError:  # a bare GPU machine
    pass

BACKENDS = ("triton", "cudnn", "flash", "efficient", "tiles")


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cases() -> Iterator[tuple[str, Case]]:
    """Every rule and option, over shapes that do not fit any block size."""
    for H, Hk, T, S, D, Dv in (
        (4, 4, 67, 67, 64, 64),
        (6, 2, 131, 131, 128, 128),
        (6, 2, 37, 197, 80, 80),
        (4, 1, 101, 101, 24, 56),
        (8, 2, 1, 259, 128, 128),
        (2, 2, 131, 37, 64, 64),
    ):
        B = 2
        case = Case(normal(0, B, H, T, D), normal(1, B, Hk, S, D), normal(2, B, Hk, S, Dv))
        ids = torch.arange(S) // 40 + torch.tensor([[0], [1]])
        lengths = torch.tensor([S // 3, S])
        holes = normal(3, B, S) > -0.5
        pairs = normal(4, B, 1, T, S) > 0.3
        pairs[:, :, T // 2] = False
        masks = {
            "full": Mask(),
            "causal": Mask.causal(),
            "window": Mask.window(29),
            "padding": Mask.padding(lengths, torch.tensor([T // 2, T])),
            "causal padding": Mask.causal() & Mask.padding(lengths),
            "left padding": Mask.causal() & Mask.padding(holes.flip(-1)),
            "dense": Mask.dense(pairs),
            "nothing": Mask.padding(torch.tensor([0, S])),
        }
        if T <= S:
            masks["documents"] = Mask.documents(ids) & Mask.causal()
        for name, mask in masks.items():
            yield f"{name} H{H}-Hk{Hk}-T{T}-S{S}-D{D}-Dv{Dv}", replace(case, mask=mask)
        options: dict[str, dict[str, Any]] = {
            "bias": {"bias": normal(5, H, T, S)},
            "alibi": {"bias": Alibi(normal(6, H).abs())},
            "relative": {"bias": Relative(normal(8, H, 13))},
            "sinks": {"sinks": normal(7, H)},
            "softcap": {"softcap": 3.0},
            "scale": {"scale": 0.05},
        }
        for name, chosen in options.items():
            yield f"causal {name} H{H}-T{T}-S{S}-D{D}", replace(case, mask=Mask.causal(), options=chosen)


def on_gpu(case: Case) -> Case:
    def move(x: Any) -> Any:
        if isinstance(x, (Alibi, Relative)):
            return with_inside(x, inside(x).cuda())
        return x.cuda() if isinstance(x, Tensor) else x

    options = {name: move(value) for name, value in case.options.items()}
    return Case(case.q.cuda(), case.k.cuda(), case.v.cuda(), case.mask.to("cuda"), options)


def run(case: Case, backend: str) -> tuple[Tensor, hw.AttentionMap]:
    return hw.attention(case.q, case.k, case.v, case.mask, **case.options, backend=backend)


def each(dtypes: tuple[torch.dtype, ...]) -> Iterator[tuple[str, str, Case, torch.dtype]]:
    for (name, case), backend, dtype in itertools.product(cases(), BACKENDS, dtypes):
        yield f"{backend} {str(dtype)[6:]} {name}", backend, case.to(dtype), dtype


def test_every_kernel_is_as_exact_as_plain_torch() -> None:
    ran = dict.fromkeys(BACKENDS, 0)
    wrong = []
    for name, backend, low, dtype in each((torch.bfloat16, torch.float16, torch.float32)):
        ours = on_gpu(low).with_gradients()
        try:
            out, w = run(ours, backend)
        except BackendUnavailable:
            continue
        truth = low.to(torch.float64).with_gradients()
        plain = on_gpu(low).with_gradients()  # the same device, the same roundings
        true_out, _, true_lse = truth.reference()
        plain_out, _, plain_lse = plain.reference()
        pull = normal(9, *out.shape).to(dtype)
        out.backward(pull.cuda())
        true_out.backward(pull.double())
        plain_out.backward(pull.cuda())
        size = sizes(low, pull)
        tests: list[tuple[str, Tensor, Tensor, Tensor, float]] = [
            ("output", out, plain_out, true_out, 2),
            ("lse", w.lse, plain_lse, true_lse, 2),
        ]
        for leaf, expected in truth.leaves().items():
            mine, theirs = ours.leaves()[leaf].grad, plain.leaves()[leaf].grad
            assert mine is not None and theirs is not None and expected.grad is not None
            tests.append((leaf, mine, theirs, expected.grad, 3))
        for what, found, theirs, expected, times in tests:
            try:
                assert_judged(
                    found.cpu(), theirs.cpu(), expected, dtype=dtype, size=size[what], times=times, what=what
                )
            except AssertionError as problem:
                wrong.append(f"{name}: {problem}")
        ran[backend] += 1
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:60])
    assert all(ran.values()), ran
    print("   calls judged:", ran)


def test_the_second_pass_agrees_with_float64() -> None:
    for name, case in cases():
        low = case.to(torch.float32)
        gpu = on_gpu(low)
        w = hw.AttentionMap(gpu.q, gpu.k, mask=gpu.mask, **gpu.options)
        _, truth, _ = low.to(torch.float64).reference()
        plain = gpu.reference()[1].cpu()
        assert_judged(w.dense().cpu(), plain, truth, dtype=torch.float32, size=1.0, what=name)
        assert_judged(
            w.mean_heads().cpu(), plain.mean(1), truth.mean(1), dtype=torch.float32, size=1.0, what=name
        )
        cpu = hw.AttentionMap(low.q, low.k, mask=low.mask, **low.options)
        for per, key in itertools.product(("query", "head"), STATISTICS):
            mine, theirs = w.statistics(key, per=per)[key].cpu(), cpu.statistics(key, per=per)[key]
            seen = mine.isfinite() & theirs.isfinite()
            assert error(mine[seen], theirs[seen]) <= 1e-5 * max(1.0, largest(theirs[seen])), (name, per, key)
        assert error(w.pooled(7).cpu(), cpu.pooled(7)) < 1e-3
        assert error(w.top(1).values.cpu(), cpu.top(1).values) < 1e-5


def test_one_query_is_as_exact_as_plain_torch_and_as_wary_as_the_kernels() -> None:
    for (name, case), dtype in itertools.product(cases(), (torch.bfloat16, torch.float16, torch.float32)):
        low = case.to(dtype)
        gpu = on_gpu(low)
        truth, plain = low.to(torch.float64).reference()[1], gpu.reference()[1].cpu()
        made = hw.attention(gpu.q, gpu.k, gpu.v, gpu.mask, **gpu.options)[1]
        for w in (made, hw.AttentionMap(gpu.q, gpu.k, mask=gpu.mask, **gpu.options)):
            for b, h, i in itertools.product((0, 1), (w.shape[1] - 1, slice(None)), (0, w.shape[2] - 1)):
                found = w[b, h, i].cpu()
                what = f"{dtype} {name} {b} {h} {i}"
                assert_judged(found, plain[b, h, i], truth[b, h, i], dtype=dtype, size=1.0, what=what)
    q, k, v = (normal(n, 1, 2, 67, 64).cuda().float() for n in range(3))
    _, w = hw.attention(q, k, v, causal=True)
    k.data.mul_(9.0)
    assert bool(w[0, 1, 50].isnan().any())
    k.mul_(2.0)
    try:
        w[0, 1, 50]
    except hw.errors.ArgumentError:
        return
    raise AssertionError("a map of keys that were written to must refuse")


def test_cudnn_steps_aside_while_shapes_keep_changing() -> None:
    churn = kernels.CUDNN.churn
    kept = dict(vars(churn))
    vars(churn).update(vars(ShapeChurn(window=8, most=3)))
    try:
        names = []
        for length in (64, 64, 64, 72, 80, 88, 96, 64):
            q = torch.randn(1, 2, length, 64, device="cuda", dtype=torch.bfloat16)
            names.append(hw.why(q, q, q).backend)
            hw.attention(q, q, q)
        assert names[:3] == ["cudnn"] * 3 and "flash" in names[4:7] and names[-1] == "cudnn", names
        assert hw.why(torch.randn_like(q[:, :, :13]), *[q[:, :, :13]] * 2).reasons["cudnn"] is not None
    finally:
        vars(churn).update(kept)


def test_compiled_calls_and_gradients_equal_eager_ones() -> None:
    for options in ({}, {"causal": True}, {"window": 40}, {"softcap": 5.0}):
        q, k, v = (torch.randn(2, 4, 96, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        q.requires_grad_()

        def call(q: Tensor, k: Tensor, v: Tensor, options: Any = options) -> Tensor:
            return hw.attention(q, k, v, **options)[0]

        eager = call(q, k, v)
        (expected,) = torch.autograd.grad(eager.sum(), q)
        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True)(q, k, v)
        (found,) = torch.autograd.grad(compiled.sum(), q)
        assert error(compiled, eager) < 0.02 and error(found, expected) < 0.02


def test_the_module_is_as_exact_as_torchs_on_every_device_and_dtype() -> None:
    for kind in ("self", "memory"):
        for causal, dtype in itertools.product((False, True), (torch.bfloat16, torch.float16, torch.float32)):
            theirs = torch.nn.MultiheadAttention(192, 6, batch_first=True, dtype=torch.float64)
            torch.nn.init.normal_(theirs.in_proj_bias)
            x = normal(11, 3, 67, 192)
            memory = x if kind == "self" else normal(12, 3, 131, 192)
            pull = normal(13, 3, 67, 192)
            found = {}
            for arm, where, kept in (
                ("truth", "cpu", torch.float64),
                ("plain", "cuda", dtype),
                ("ours", "cuda", dtype),
            ):
                module: Any = copy.deepcopy(theirs).to(where, kept)
                query = x.to(dtype).to(where, kept).requires_grad_()
                keys = query if kind == "self" else memory.to(dtype).to(where, kept)
                T, S = query.shape[1], keys.shape[1]
                if arm == "ours":
                    module = hw.MultiHeadAttention.from_torch(module)
                    module.causal = causal
                    assert module._packed is not None
                    out, w = module(query, keys, keys)
                    weights = w.dense()
                else:
                    module.to(dtype).to(kept)  # the same numbers as in the low dtype
                    hidden = ~Mask.causal().full(T, S)[0, 0].to(where) if causal else None
                    out, weights = module(query, keys, keys, attn_mask=hidden, average_attn_weights=False)
                (grad,) = torch.autograd.grad(out, query, pull.to(dtype).to(where, kept))
                found[arm] = (out.cpu(), weights.cpu(), grad.cpu())
            for what, mine, plain, truth in zip(
                ("output", "weights", "d query"), found["ours"], found["plain"], found["truth"], strict=True
            ):
                assert_judged(
                    mine, plain, truth, dtype=dtype, size=4.0, times=3 if what == "d query" else 2,
                    what=f"{kind} causal={causal} {dtype} {what}",
                )  # fmt: skip


def test_gradients_do_not_depend_on_the_layout_they_come_in() -> None:
    """torch keeps cuDNN's plan for the backward by the layout of q, k and v alone: of two gradients in two
    layouts the second came out wrong, by more than its size and without an error."""
    x = normal(21, 2, 67, 3, 4, 64).cuda().bfloat16()
    pull = normal(22, 2, 4, 67, 64).cuda().bfloat16()
    layouts = {
        "heads first": pull,
        "tokens first": pull.transpose(1, 2).contiguous().transpose(1, 2),
        "one for all": pull[:, :, :1, :1].expand_as(pull),
    }
    packed = [one.detach() for one in x.permute(2, 0, 3, 1, 4).unbind(0)]
    for q, k, v in (packed, [one.contiguous() for one in packed]):
        for name, grad in layouts.items():
            found, expected = [], []
            for backend, kept in (("cudnn", found), ("tiles", expected)):
                leaves = [one.detach().requires_grad_() for one in (q, k, v)]
                out, _ = hw.attention(*leaves, causal=True, backend=backend)
                kept += torch.autograd.grad(out, leaves, grad)
            for mine, theirs in zip(found, expected, strict=True):
                assert error(mine, theirs) <= 0.02 * max(1.0, largest(theirs)), name


def test_the_module_moves_casts_and_compiles() -> None:
    mha = hw.MultiHeadAttention(192, 6, num_kv_heads=2, causal=True)
    assert mha.cuda()._packed is not None and mha._packed.weight.is_cuda
    x = torch.randn(2, 96, 192, device="cuda")
    expected = mha(x)[0]
    with torch.autocast("cuda", torch.bfloat16):
        cast = mha(x)[0]
    assert cast.dtype == torch.bfloat16 and error(cast.float(), expected) < 0.05
    torch._dynamo.reset()
    compiled = torch.compile(mha, fullgraph=True)
    assert error(compiled(x)[0], expected) < 2e-3
    (found,) = torch.autograd.grad(compiled(x)[0].sum(), mha.k_proj.weight)
    (wanted,) = torch.autograd.grad(mha(x)[0].sum(), mha.k_proj.weight)
    assert error(found, wanted) < 2e-3 * max(1.0, largest(wanted))
    with torch.inference_mode():
        assert error(mha(x)[0], expected) < 2e-3


TESTS: tuple[Callable[[], None], ...] = (
    test_every_kernel_is_as_exact_as_plain_torch,
    test_the_second_pass_agrees_with_float64,
    test_one_query_is_as_exact_as_plain_torch_and_as_wary_as_the_kernels,
    test_cudnn_steps_aside_while_shapes_keep_changing,
    test_compiled_calls_and_gradients_equal_eager_ones,
    test_the_module_is_as_exact_as_torchs_on_every_device_and_dtype,
    test_gradients_do_not_depend_on_the_layout_they_come_in,
    test_the_module_moves_casts_and_compiles,
)

if __name__ == "__main__":
    sys.exit(run_all(TESTS, [k.name for k in kernels.KERNELS]))
