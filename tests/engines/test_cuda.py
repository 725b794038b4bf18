"""The first pass on a CUDA device: each fused kernel against float64, one query of a map, the module.

`make test` runs a few of the cases, `make test-gpu` all of them.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise import Mask
from headwise.engines import kernels
from headwise.engines.kernels import ShapeChurn
from headwise.errors import BackendUnavailable
from judge import Case, assert_judged, error, largest, sizes
from on_gpu import NEEDS_CUDA, few_are_quick, judged
from second_pass_cases import normal, rule_names, under

# torch says once a process that cuDNN's backward copies a gradient of another layout
pytestmark = [NEEDS_CUDA, pytest.mark.filterwarnings("ignore::UserWarning")]

BACKENDS = ("triton", "cudnn", "flash", "efficient", "tiles")
DTYPES = ("bfloat16", "float16", "float32")
SHAPES = {  # H, Hk, T, S, D, Dv: sizes that do not fit any block
    "D64": (4, 4, 67, 67, 64, 64),
    "grouped D128": (6, 2, 131, 131, 128, 128),
    "T37 S197 D80": (6, 2, 37, 197, 80, 80),
    "D24 Dv56": (4, 1, 101, 101, 24, 56),
    "T1 S259 D128": (8, 2, 1, 259, 128, 128),
    "T131 S37 D64": (2, 2, 131, 37, 64, 64),
}
CASES = [f"{rule}, {shape}" for shape, sizes in SHAPES.items() for rule in rule_names(sizes[2], sizes[3])]
QUICK = [
    "causal, D64-bfloat16", "causal bias, grouped D128-bfloat16", "causal padding, T37 S197 D80-float32",
    "documents, D24 Dv56-bfloat16", "window, T131 S37 D64-float32", "causal sinks, T1 S259 D128-bfloat16",
]  # fmt: skip


def jobs() -> list[str]:
    """Every rule at every shape in bfloat16 and in one other dtype, in turn; at the first shape in all three.

    Almost all of the time goes into compiling, five kernels a job.
    """
    actual = []
    for i, (shape, (_, _, T, S, _, _)) in enumerate(SHAPES.items()):
        for j, rule in enumerate(rule_names(T, S)):
            others = DTYPES[1:] if i == 0 else DTYPES[1 + (i + j) % 2 :][:1]
            actual += [f"{rule}, {shape}-{dtype}" for dtype in ("bfloat16", *others)]
    return actual


def case_of(name: str) -> Case:
    """One of `CASES`, in float64, on the CPU."""
    rule, shape = name.split(", ")
    case = under(rule, 2, *SHAPES[shape])
    return replace(case, options={"scale": 0.05}) if rule == "causal scale" else case


def on_gpu(job: str) -> Case:
    """One of `jobs`, in its dtype, on the device."""
    name, dtype = job.rsplit("-", 1)
    return case_of(name).on("cuda").to(getattr(torch, dtype))


def run(case: Case, backend: str) -> tuple[Tensor, hw.AttentionMap]:
    return hw.attention(case.q, case.k, case.v, case.mask, **case.options, backend=backend)


@few_are_quick(*QUICK)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("job", jobs())
def test_every_kernel_is_as_exact_as_plain_torch(job: str, request: pytest.FixtureRequest) -> None:
    judge_backends(on_gpu(job), request)


@few_are_quick("80-bfloat16")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 40, 80, 96, 144, 200])
def test_long_calls_are_as_exact_whatever_the_head_dim(
    head_dim: int, dtype: str, request: pytest.FixtureRequest
) -> None:
    """Many programs take larger blocks than a few; channels are cut into two powers of two."""
    low = under("causal", 2, 32, 32, 1031, 1031, head_dim).on("cuda").to(getattr(torch, dtype))
    judge_backends(low, request)


def judge_backends(low: Case, request: pytest.FixtureRequest) -> None:
    truth, plain = low.to(torch.float64).with_gradients(), low.with_gradients()
    pull = normal(9, *low.q.shape[:3], low.v.shape[-1]).to(low.q)
    answers = {}
    for arm, case in (("truth", truth), ("plain", plain)):
        output, _, lse = case.reference()
        output.backward(pull.to(output))
        answers[arm] = {"output": output, "lse": lse, **_gradients(case)}
    size = sizes(low, pull)
    for backend in BACKENDS:
        case = low.with_gradients()
        try:
            output, w = run(case, backend)
        except BackendUnavailable:
            continue
        output.backward(pull)
        actual = {"output": output, "lse": w.lse, **_gradients(case)}
        for name, true in answers["truth"].items():
            assert_judged(
                actual[name], answers["plain"][name], true, dtype=low.q.dtype, size=size[name],
                times=2 if name in ("output", "lse") else 3, name=f"{backend} {name}",
            )  # fmt: skip
        judged(request, f"kernel {backend}")


def _gradients(case: Case) -> dict[str, Tensor]:
    actual = {name: leaf.grad for name, leaf in case.leaves().items()}
    return {name: grad for name, grad in actual.items() if grad is not None}


def test_every_backend_takes_a_plain_call() -> None:
    """Else the test above would pass over a backend without a word."""
    case = case_of("full, D64").on("cuda").to(torch.bfloat16)
    for backend in BACKENDS:
        run(case, backend)


@few_are_quick(*QUICK)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("job", jobs())
def test_one_query_is_as_exact_as_plain_torch(job: str, request: pytest.FixtureRequest) -> None:
    low = on_gpu(job)
    truth, plain = low.to(torch.float64).reference()[1], low.reference()[1]
    made = hw.attention(low.q, low.k, low.v, low.mask, **low.options)[1]
    for w in (made, hw.AttentionMap(low.q, low.k, mask=low.mask, **low.options)):
        for b, h, i in itertools.product((0, 1), (w.shape[1] - 1, slice(None)), (0, w.shape[2] - 1)):
            at = (b, h, i)
            assert_judged(w[at], plain[at], truth[at], dtype=low.q.dtype, size=1.0, name=str(at))
    judged(request, "queries of a map", 16)


def test_a_float64_bias_beside_half_precision_is_read_in_float32() -> None:
    """Tiles of float64 did not fit into shared memory: a kernel raised OutOfResources."""
    q, k, v = normal(5, 3, 2, 4, 37, 16).to("cuda", torch.bfloat16)
    bias = normal(6, 2, 4, 37, 37).float().to("cuda").requires_grad_()
    actual, wanted = (hw.attention(q, k, v, bias=x) for x in (bias.double(), bias.float()))
    for ours, theirs in ((actual[0], wanted[0]), (actual[1].dense(), wanted[1].dense())):
        assert torch.equal(ours, theirs)
    assert torch.equal(actual[1].statistics().entropy, wanted[1].statistics().entropy)
    grads = [torch.autograd.grad(output.sum(), bias)[0] for output, _ in (actual, wanted)]
    assert torch.equal(*grads)


def test_a_map_of_keys_that_were_written_to_refuses() -> None:
    q, k, v = (normal(n, 1, 2, 67, 64).cuda().float() for n in range(3))
    _, w = hw.attention(q, k, v, causal=True)
    k.data.mul_(9.0)
    assert bool(w[0, 1, 50].isnan().any())
    k.mul_(2.0)
    with pytest.raises(hw.errors.ArgumentError):
        w[0, 1, 50]


def test_cudnn_steps_aside_while_shapes_keep_changing() -> None:
    churn = kernels.CUDNN.churn
    saved = dict(vars(churn))
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
        vars(churn).update(saved)


@few_are_quick("causal")
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": 40}, {"softcap": 5.0}],
    ids=["plain", "causal", "window", "softcap"],
)
def test_compiled_calls_and_gradients_equal_eager_ones(options: dict[str, Any]) -> None:
    q, k, v = (torch.randn(2, 4, 96, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q.requires_grad_()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hw.attention(q, k, v, **options)[0]

    eager = call(q, k, v)
    (expected,) = torch.autograd.grad(eager.sum(), q)
    compiled = torch.compile(call, fullgraph=True)(q, k, v)
    (actual,) = torch.autograd.grad(compiled.sum(), q)
    assert error(compiled, eager) < 0.02 and error(actual, expected) < 0.02


@few_are_quick("self-causal-bfloat16")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", ["self", "memory"])
def test_the_module_is_as_exact_as_torchs(kind: str, causal: bool, dtype: str) -> None:
    low = getattr(torch, dtype)
    theirs = torch.nn.MultiheadAttention(192, 6, batch_first=True, dtype=torch.float64)
    torch.nn.init.normal_(theirs.in_proj_bias)
    x, pull = normal(11, 3, 67, 192), normal(13, 3, 67, 192)
    memory = x if kind == "self" else normal(12, 3, 131, 192)
    actual = {}
    for arm, saved in (("truth", torch.float64), ("plain", low), ("ours", low)):
        module: Any = copy.deepcopy(theirs).to("cuda", low).to(saved)  # the same numbers as in the low dtype
        query = x.to("cuda", low).to(saved).requires_grad_()
        keys = query if kind == "self" else memory.to("cuda", low).to(saved)
        T, S = query.shape[1], keys.shape[1]
        if arm == "ours":
            module = hw.MultiHeadAttention.from_torch(module)
            module.causal = causal
            assert module._packed is not None
            out, w = module(query, keys, keys)
            weights = w.dense()
        else:
            hidden = ~Mask.causal().full(T, S)[0, 0].cuda() if causal else None
            out, weights = module(query, keys, keys, attn_mask=hidden, average_attn_weights=False)
        (grad,) = torch.autograd.grad(out, query, pull.to("cuda", low).to(saved))
        actual[arm] = (out, weights, grad)
    for name, mine, plain, truth in zip(
        ("output", "weights", "d query"), actual["ours"], actual["plain"], actual["truth"], strict=True
    ):
        times = 3 if name == "d query" else 2
        assert_judged(mine, plain, truth, dtype=low, size=4.0, times=times, name=name)


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
    packed = [part.detach() for part in x.permute(2, 0, 3, 1, 4).unbind(0)]
    for q, k, v in (packed, [part.contiguous() for part in packed]):
        for name, grad in layouts.items():
            actual, expected = [], []
            for backend, saved in (("cudnn", actual), ("tiles", expected)):
                leaves = [part.detach().requires_grad_() for part in (q, k, v)]
                out, _ = hw.attention(*leaves, causal=True, backend=backend)
                saved += torch.autograd.grad(out, leaves, grad)
            for mine, theirs in zip(actual, expected, strict=True):
                assert error(mine, theirs) <= 0.02 * max(1.0, largest(theirs)), name


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_compiler")
def test_the_module_moves_casts_and_compiles() -> None:
    mha = hw.MultiHeadAttention(192, 6, num_kv_heads=2, causal=True)
    assert mha.cuda()._packed is not None and mha._packed.weight.is_cuda
    x = torch.randn(2, 96, 192, device="cuda")
    expected = mha(x)[0]
    with torch.autocast("cuda", torch.bfloat16):
        cast = mha(x)[0]
    assert cast.dtype == torch.bfloat16 and error(cast.float(), expected) < 0.05
    compiled = torch.compile(mha, fullgraph=True)
    assert error(compiled(x)[0], expected) < 2e-3
    (actual,) = torch.autograd.grad(compiled(x)[0].sum(), mha.k_proj.weight)
    (wanted,) = torch.autograd.grad(mha(x)[0].sum(), mha.k_proj.weight)
    assert error(actual, wanted) < 2e-3 * max(1.0, largest(wanted))
    with torch.inference_mode():
        assert error(mha(x)[0], expected) < 2e-3
