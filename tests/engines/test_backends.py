"""Who runs a call, how it is cut into parts, and that the way it is run changes nothing.

Letters: B batch, H num_heads, Hk num_kv_heads, T query_len, S key_len, D head_dim, Dv value_dim; primes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import headwise as hw
from headwise import Mask, reference
from headwise.engines import backends, first_pass, fused, kernels
from headwise.engines import scores as scores_room
from headwise.engines.backend import Backend, Call, Gradients
from headwise.engines.fused import Fused
from headwise.engines.kernels import ShapeChurn
from headwise.engines.plain import TILES
from headwise.engines.plans import PLANS
from headwise.engines.scores import Scores
from headwise.errors import BackendUnavailable
from headwise.nn import one_step
from headwise.scoring import HIDDEN, Alibi, Relative, alibi
from judge import Case, error, inside, masks, scores_from, with_inside

B, H, HK, T, S, D = 2, 6, 3, 5, 7, 11
LATER = "supports this call, but has lower priority"
ON_CUDA = "it supports cuda only; the tensors are on cpu"


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    return (
        normal(0, B, H, T, D, dtype=dtype),
        normal(1, B, HK, S, D, dtype=dtype),
        normal(2, B, HK, S, D, dtype=dtype),
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": 3},
    "band": {"window": (2, 1)},
    "padding": {"mask": Mask.padding([3, S])},
    "holes": {"mask": Mask.padding(normal(3, B, S) > -0.5)},
    "documents": {"mask": Mask.documents([0, 0, 0, 1, 1, 2, 2])},
    "dense": {"mask": normal(4, B, 1, T, S) > -0.5},
    "softcap": {"softcap": 1.5},
    "bias": {"bias": normal(5, H, T, S)},
    "slopes": {"bias": Alibi(normal(6, H).abs())},
    "relative": {"bias": Relative(normal(9, H, 5))},
    "sinks": {"sinks": normal(7, H)},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def case_of(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Case:
    """The same call for the judge: every rule in one mask."""
    rest = dict(options)
    mask = rest.pop("mask", None)
    rules = Mask() if mask is None else mask if isinstance(mask, Mask) else Mask.dense(mask)
    if rest.pop("causal", False):
        rules = rules & Mask.causal()
    window = rest.pop("window", None)
    if window is not None:
        rules = rules & (Mask.window(window) if isinstance(window, int) else Mask.window(left_right=window))
    return Case(q, k, v, rules, rest)


def assert_exact(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], **more: Any) -> None:
    """Output, lse and every gradient in float64 against the reference."""
    given_case = case_of(q, k, v, options)
    ours, truth = given_case.with_gradients(), given_case.with_gradients()
    out, w = hw.attention(ours.q, ours.k, ours.v, ours.mask, **ours.options, **more)
    expected, _, lse = truth.reference()
    assert error(out, expected) < 1e-13 and error(w.lse, lse) < 1e-13
    pull = normal(8, *out.shape)
    out.backward(pull)
    expected.backward(pull)
    for name, leaf in truth.leaves().items():
        mine = ours.leaves()[name].grad
        assert mine is not None and leaf.grad is not None
        assert error(mine, leaf.grad) < 1e-11, name


# Who runs it


CALLS: dict[str, tuple[dict[str, Any], str, str]] = {
    "nothing hidden": ({}, "flash", "in one call"),
    "causal": ({"causal": True}, "flash", "in two calls, the past and the diagonal"),
    "window": ({"window": 3}, "flash", "in one call"),
    "padding": ({"mask": Mask.padding([3, S])}, "flash", "in one call"),
    "bias": ({"bias": normal(5, T, S)}, "flash", "in one call"),
    "sinks": ({"sinks": normal(6, H)}, "flash", "in one call"),
    "softcap": ({"softcap": 30.0}, "tiles", "tile by tile in plain torch"),
    "learned bias": ({"bias": normal(5, T, S).requires_grad_()}, "tiles", "tile by tile in plain torch"),
    "learned slopes": (
        {"bias": Alibi(normal(5, H).requires_grad_())},
        "tiles",
        "tile by tile in plain torch",
    ),
    "relative": ({"bias": Relative(normal(5, H, 5))}, "flash", "in one call"),
    "learned relative": (
        {"bias": Relative(normal(5, H, 5).requires_grad_())},
        "tiles",
        "tile by tile in plain torch",
    ),
    "learned sinks": ({"sinks": normal(6, H).requires_grad_()}, "flash", "in one call"),
    "dropout": ({"dropout": 0.25}, "plain", "as one T x S matrix in plain torch"),
    "tiles by name": ({"backend": "tiles"}, "tiles", "tile by tile in plain torch"),
    "plain by name": ({"backend": "plain"}, "plain", "as one T x S matrix in plain torch"),
}


@pytest.mark.parametrize("name", CALLS, ids=lambda name: name.replace(" ", "-"))
def test_why_names_who_runs_a_call_and_how(name: str) -> None:
    options, backend, way = CALLS[name]
    answer = hw.why(*qkv(), **options)
    assert answer.backend == backend and answer.how == way
    assert str(answer).splitlines()[0] == f"{backend} runs this call, {way}."


def test_why_gives_every_backends_reason_in_the_tables_order() -> None:
    answer = hw.why(*qkv(), softcap=30.0)
    no_cap = "it has no soft cap (softcap=30)"
    assert list(answer.reasons) == ["decode", "triton", "cudnn", "flash", "efficient", "tiles", "plain"]
    assert answer.reasons == {
        "decode": ON_CUDA, "triton": ON_CUDA, "cudnn": ON_CUDA, "flash": no_cap, "efficient": ON_CUDA,
        "tiles": None, "plain": None,
    }  # fmt: skip
    assert str(answer).splitlines() == [
        "tiles runs this call, tile by tile in plain torch.",
        f"  decode: {ON_CUDA}",
        f"  triton: {ON_CUDA}",
        f"  cudnn: {ON_CUDA}",
        f"  flash: {no_cap}",
        f"  efficient: {ON_CUDA}",
        f"  plain: {LATER}",
        "The second pass (weights, statistics, pictures) runs on tiles in plain torch.",
        "  triton: it supports cuda only; the tensors are on cpu",
    ]


def test_why_does_not_call_what_comes_first_later() -> None:
    """With a backend asked for by name, others were passed over because nobody asked for them."""
    text = str(hw.why(*qkv(), backend="plain"))
    assert f"flash: {LATER}" not in text and f"tiles: {LATER}" not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.25}, "dropout 0.25 needs the matrix of weights, which it never computes"),
        ({"bias": normal(5, T, S).requires_grad_()}, "it computes no gradient of bias, slopes or relative"),
        (
            {"bias": Alibi(normal(5, H).requires_grad_())},
            "it computes no gradient of bias, slopes or relative",
        ),
    ],
    ids=["dropout", "bias", "slopes"],
)
def test_why_says_why_not_flash(options: dict[str, Any], message: str) -> None:
    assert hw.why(*qkv(), **options).reasons["flash"] == message
    with pytest.raises(BackendUnavailable, match=message):
        hw.why(*qkv(), **options, backend="flash")


def test_why_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(*_: Any, **__: Any) -> Any:
        raise AssertionError("it ran")

    for backend in backends.BACKENDS:
        monkeypatch.setattr(type(backend), "forward", ran)
    for options, _, _ in CALLS.values():
        hw.why(*qkv(), **options)


@every_option
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
def test_attention_runs_what_why_says(
    options: dict[str, Any], grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: set[str] = set()
    for backend in backends.BACKENDS:
        for name in ("forward", "runner"):
            honest = getattr(backend, name)

            def noted(call: Call, name: str = backend.name, honest: Any = honest) -> Any:
                made = honest(call)
                ran.update([name] if made is not None else [])
                return made

            monkeypatch.setattr(backend, name, noted)
    monkeypatch.setattr(first_pass, "plan_for", lambda key: None)
    q, k, v = qkv()
    hw.attention(q.requires_grad_(grad), k, v, **options)
    assert ran == {hw.why(q, k, v, **options).backend}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, on first use
def test_function_transforms_and_forward_mode_go_to_plain() -> None:
    q, k, v = qkv()
    calls = []

    def output(q: Tensor) -> Tensor:
        calls.append(hw.why(q, k, v))
        return hw.attention(q, k, v)[0].sum()

    torch.func.grad(output)(q)
    with torch.autograd.forward_ad.dual_level():
        output(torch.autograd.forward_ad.make_dual(q, torch.ones_like(q)))
    assert [answer.backend for answer in calls] == ["plain", "plain"]
    assert "function transform" in str(calls[0]) and "forward-mode derivative" in str(calls[1])


# A backend more


class Capped(Backend):
    """All that a backend is: here plain torch, and soft caps alone."""

    name = "capped"

    def cannot(self, call: Call) -> str | None:
        return None if call.scores.scoring.softcap else "it takes soft caps alone"

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        s = call.scores.full()
        return s.softmax(-1) @ call.v.repeat_interleave(call.scores.group, dim=1), s.logsumexp(-1)

    def backward(self, call: Call, out: Tensor, lse: Tensor, grad: Tensor) -> Gradients:
        return TILES.backward(call, out, lse, grad)


@pytest.fixture
def capped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Entered first; what it ran."""
    ran = []

    class Noted(Capped):
        def forward(self, call: Call) -> tuple[Tensor, Tensor]:
            ran.append("forward")
            return super().forward(call)

        def backward(self, call: Call, *rest: Tensor) -> Gradients:
            ran.append("backward")
            return super().backward(call, *rest)

    monkeypatch.setattr(backends, "BACKENDS", (Noted(), *backends.BACKENDS))
    return ran


def test_a_backend_is_added_by_one_entry(capped: list[str]) -> None:
    """Chosen by auto and by name, and every number right: output, lse, gradients."""
    for name in ("auto", "capped"):
        assert_exact(*qkv(), {"softcap": 1.5}, backend=name)
    assert capped == ["forward", "backward"] * 2
    assert_exact(*qkv(), {"softcap": 1.5}, backend="tiles")
    assert_exact(*qkv(), {})
    assert len(capped) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.25}, "dropout 0.25 needs the matrix of weights, which it never computes"),
        ({"bias": normal(5, T, S).requires_grad_()}, "it computes no gradient of bias, slopes or relative"),
    ],
    ids=["dropout", "bias"],
)
def test_a_backend_is_not_given_what_it_never_spoke_of(
    capped: list[str], options: dict[str, Any], message: str
) -> None:
    answer = hw.why(*qkv(), softcap=1.5, **options)
    assert answer.reasons["capped"] == message and answer.backend in ("tiles", "plain")
    hw.attention(*qkv(), softcap=1.5, **options)
    assert capped == []


@pytest.mark.thinned(0)
@pytest.mark.parametrize("name", ["auto", "capped"])
def test_a_backend_that_was_added_runs_in_graphs(capped: list[str], name: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())

    def output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hw.attention(q, k, v, softcap=1.5, backend=name)[0]

    expected = output(q, k, v)
    grads = torch.autograd.grad(expected.sum(), (q, k, v))
    capped.clear()
    actual = torch.compile(output, fullgraph=True, backend="aot_eager")(q, k, v)
    assert torch.equal(actual, expected)
    for mine, theirs in zip(torch.autograd.grad(actual.sum(), (q, k, v)), grads, strict=True):
        assert torch.equal(mine, theirs)
    assert capped == ["forward", "backward"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [({"softcap": 1.5}, "it has no soft cap"), ({"dropout": 0.5}, "dropout 0.5 needs the matrix of weights")],
    ids=["softcap", "dropout"],
)
def test_a_named_backend_gives_way_to_no_other_in_a_graph(options: dict[str, Any], message: str) -> None:
    """flash ran calls with a soft cap there without one, and dropout went to another backend."""

    def output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hw.attention(q, k, v, backend="flash", **options)[0]

    with pytest.raises(BackendUnavailable, match=f'"flash" cannot run this call: {message}'):
        torch.compile(output, backend="aot_eager")(*qkv())


def test_a_plain_call_asks_a_backend_that_was_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU it asked nobody: what `why` named was not what ran."""
    q, k, v = (normal(i, B, H, T, 8) for i in range(3))
    for _ in range(3):  # planned by now
        before = hw.attention(q, k, v, causal=True)[0]

    class All(Capped):
        def cannot(self, call: Call) -> str | None:
            return None

        def forward(self, call: Call) -> tuple[Tensor, Tensor]:
            return torch.full_like(call.v, 7.0), torch.zeros(call.v.shape[:3])

    monkeypatch.setattr(backends, "BACKENDS", (Capped(), *backends.BACKENDS))
    assert torch.equal(hw.attention(q, k, v, causal=True)[0], before)  # who is asked says no
    monkeypatch.setattr(backends, "BACKENDS", (All(), *backends.BACKENDS))
    assert bool((hw.attention(q, k, v, causal=True)[0] == 7.0).all())


FA3 = replace(
    kernels.CUDA_FLASH,
    name="fa3",
    takes_parts=False,
    deterministic=False,
    switch=None,
    churn=ShapeChurn(most=2),
)


def test_the_kernel_that_is_added_brings_its_own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    off, calm = replace(FA3, switch=lambda: False), replace(FA3, capability=None)
    assert cannot(off, half_call()) == "it is switched off in torch.backends.cuda"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert cannot(FA3, half_call()) == "it needs compute capability 8.0 or later"
    assert cannot(calm, half_call()) is None
    backend = Fused("fa3", replace(calm, device="cpu"))
    monkeypatch.setattr(backends, "BACKENDS", (backend, *backends.BACKENDS))
    for length in (5, 7):
        assert backends.verdicts(half_call(S=length))["fa3"] is None
        backends.note(half_call(S=length))
    message = "2 of the last 2 calls had a new shape, and it needs a plan for each"
    assert backends.verdicts(half_call(S=11))["fa3"] == message
    assert backends.verdicts(half_call(S=7))["fa3"] is None
    # changing shapes make it slow, not unable: whoever names it gets it
    assert (
        backends.choose(half_call(S=11)) is not backend and backends.choose(half_call(S=11), "fa3") is backend
    )


@every_option
def test_a_fused_kernel_that_is_added_is_cut_for_and_merged(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    entered(monkeypatch)
    takes_it = "softcap" not in options and "bias" not in options
    assert hw.why(*qkv(), **options).backend == ("fa3" if "softcap" not in options else "tiles")
    assert_exact(*qkv(), options, backend="fa3" if takes_it else "auto")


def entered(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Fused:
    """flash on a CPU with other fields, entered first."""
    backend = Fused("fa3", replace(kernels.CPU_FLASH, name="fa3", **fields))
    monkeypatch.setattr(backends, "BACKENDS", (backend, *backends.BACKENDS))
    return backend


@pytest.mark.slow
@pytest.mark.parametrize("insists", [True, False])
@pytest.mark.parametrize("learns", [True, False])
def test_a_kernel_that_insists_on_its_backward_is_no_kernel_of_a_graph_that_learns(
    insists: bool, learns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered(monkeypatch, insists=insists)
    calls: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        calls.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    x = normal(0, B, H, T, 8).requires_grad_(learns)
    torch._dynamo.reset()
    torch.compile(lambda x: hw.attention(x, x, x)[0], backend=keep)(x)
    assert ("headwise.attend.default" in calls) == (insists and learns)


def test_a_kernel_that_plans_is_remembered_for_a_shape_until_somebody_speaks_against_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    churn, on = ShapeChurn(most=1), [True]
    backend = entered(monkeypatch, churn=churn, deterministic=False, switch=lambda: on[0])
    PLANS.clear()
    requests: list[Call] = []
    monkeypatch.setattr(backend, "cannot", lambda call: requests.append(call) or Fused.cannot(backend, call))

    def chosen() -> kernels.Kernel | None:
        return one_step.kernel_for(normal(0, B, T, 22), None, 2, 0, True, None)

    kernel = backend.kernels["cpu"]
    assert [chosen(), chosen(), chosen()] == [kernel] * 3 and len(requests) == 1
    assert str(churn.reason("another shape")).startswith("1 of the last 3 calls")
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen() is kernels.CPU_FLASH
    finally:
        torch.use_deterministic_algorithms(False)
    on[0] = False
    assert chosen() is kernels.CPU_FLASH and len(requests) == 3
    on[0] = True
    assert chosen() is kernel and len(requests) == 3


# The table


def a_call(**options: Any) -> Call:
    q, k, v = qkv()
    return first_pass.call_of(scores_from(q, k, v, **options), v)


def test_auto_takes_the_first_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake(Capped):
        def __init__(self, name: str, message: str | None) -> None:
            self.name, self.reason = name, message

        def cannot(self, call: Call) -> str | None:
            return self.reason

    monkeypatch.setattr(backends, "BACKENDS", (Fake("a", "no"), Fake("b", None), Fake("c", None)))
    assert backends.choose(a_call()).name == "b"
    assert backends.choose(a_call(), "c").name == "c"
    with pytest.raises(
        BackendUnavailable, match=r'backend="a" cannot run this call: no\. Others that can: b, c;'
    ):
        backends.choose(a_call(), "a")
    assert backends.verdicts(a_call()) == {"a": "no", "b": None, "c": None}


def half_call(
    T: int = 5, S: int = 5, D: int = 64, dtype: torch.dtype = torch.float16, **options: Any
) -> Call:
    q, k, v = (torch.zeros(1, 2, length, D, dtype=dtype) for length in (T, S, S))
    return first_pass.call_of(scores_from(q, k, v, **options), v)


def cannot(kernel: kernels.Kernel, call: Call) -> str | None:
    """What a kernel of a GPU says of a call, were the tensors there."""
    return Fused(kernel.name, replace(kernel, device="cpu")).cannot(call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_a_function_of_torchs_own_gives_the_bits_of_the_operator(
    dtype: torch.dtype, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kernels.CPU_EAGER is not kernels.OF_CPU
    q, k, v = (normal(seed, B, H, T, D, dtype=dtype) for seed in range(3))
    call = (q, k, v, None, kernels.CAUSAL if causal else kernels.FULL, 0.3)
    sooner = kernels.CPU_FLASH.forward(call)
    monkeypatch.setattr(kernels, "_is_eager", lambda q: False)
    assert all(map(torch.equal, sooner, kernels.CPU_FLASH.forward(call)))


def test_tensors_of_other_classes_go_to_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CPU_EAGER", None)
    with FakeTensorMode():
        q, k, v = torch.empty(3, B, H, T, D).unbind(0)
        out, lse = kernels.CPU_FLASH.forward((q, k, v, None, kernels.FULL, 0.3))
    assert out.shape == (B, H, T, D) and lse.shape == (B, H, T)


@pytest.mark.parametrize(
    ("kernel", "call", "message"),
    [
        (kernels.CUDNN, half_call(dtype=torch.float32), "it takes float16, bfloat16, not float32"),
        (kernels.CUDNN, half_call(D=136), "head_dim 136 is over its 128"),
        (kernels.CUDA_FLASH, half_call(D=264), "head_dim 264 is over its 256"),
        (
            kernels.CUDA_EFFICIENT,
            half_call(dtype=torch.float64),
            "it takes float32, float16, bfloat16, not float64",
        ),
        (
            kernels.CUDA_FLASH,
            half_call(mask=Mask.padding([3])),
            "it takes no mask except a band, and no bias",
        ),
        (kernels.CUDA_FLASH, half_call(bias=alibi(2)), "it takes no mask except a band, and no bias"),
        (
            kernels.CUDNN,
            half_call(T=3, S=5, causal=True),
            "it cannot run this call in one part, and would make a new plan for each part",
        ),
        (kernels.CUDNN, half_call(T=1, S=1), "it takes at least 2 keys, not 1"),
        (kernels.CUDNN, half_call(softcap=2.0), r"it has no soft cap \(softcap=2\)"),
    ],
    ids=["dtype", "cudnn-dim", "flash-dim", "double", "padding", "slopes", "parts", "one-key", "softcap"],
)
def test_the_kernels_of_a_gpu_say_what_they_cannot_take(
    kernel: kernels.Kernel, call: Call, message: str
) -> None:
    reason = cannot(kernel, call)
    assert reason is not None
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(reason)


def test_cudnn_steps_back_where_determinism_was_asked_for() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        reason = cannot(kernels.CUDNN, half_call())
    finally:
        torch.use_deterministic_algorithms(False)
    assert reason == "deterministic algorithms are switched on, and it is not deterministic"


def test_a_kernel_switched_off_in_torch_is_off_here() -> None:
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        reason = cannot(kernels.CUDNN, half_call())
    assert reason == "it is switched off in torch.backends.cuda"


# Shapes that keep changing


def test_no_more_shapes_are_remembered_than_told_to() -> None:
    churn = ShapeChurn(window=8, most=3, remembered=5)
    for shape in range(20):
        churn.note(shape)
    assert churn.reason(19) is None and churn.reason(14) is not None


def test_a_shape_used_again_is_not_forgotten_first() -> None:
    churn = ShapeChurn(window=8, most=3, remembered=2)
    for shape in ("a", "b", "a", "c"):
        churn.note(shape)
    assert churn.reason("a") is None and churn.reason("b") is not None


@given(shapes=st.lists(st.integers(0, 5), max_size=40))
def test_the_guard_counts_what_it_says(shapes: list[int]) -> None:
    churn = ShapeChurn(window=7, most=4)
    for shape in shapes:
        churn.note(shape)
    fresh = [shape not in shapes[:i] for i, shape in enumerate(shapes)][-7:]
    expected = None if sum(fresh) < 4 else f"{sum(fresh)} of the last {len(fresh)} calls"
    reason = churn.reason("never seen")
    assert (reason is None) == (expected is None)
    assert expected is None or (reason is not None and reason.startswith(expected))


def test_a_small_plain_call_of_one_query_is_left_to_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, few = backends.Decode(), half_call(T=1, S=11)
    assert (
        backend.reluctance(few)
        == "it is faster only from 16777216 bytes of keys and values on, not with 5632"
    )
    assert (
        backend.reluctance(half_call(T=1, S=11, mask=Mask.padding([3]))) is None
    )  # which flash does not take
    monkeypatch.setattr(backends, "WORTH_IT", 5632)
    assert backend.reluctance(few) is None


def test_no_plan_is_made_for_one_query_before_its_shape_has_come_often_in_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    churn = ShapeChurn(most=2, patience=3)
    entered(monkeypatch, churn=churn)
    q, k = torch.randn(1, 6, 1, 8), torch.randn(1, 2, 13, 8)
    whole = torch.randn(1, 2, 13, 8)
    for past in (13, 12, 11):  # a model that generates: no plan, and no shape counted against others
        for times in range(2):
            reason = hw.why(q, k[:, :, :past], k[:, :, :past])
            assert (
                reason.backend == "flash"
                and f"{times} calls in a row had this number, and a plan pays from 3 on" in str(reason)
            )
            hw.attention(q, k[:, :, :past], k[:, :, :past])
    assert hw.why(whole, k, k).backend == "fa3"
    assert hw.attention(q, k, k, backend="fa3")[0].isfinite().all()  # asked by name it does not wait
    for _ in range(3):
        hw.attention(q, k, k)
    assert hw.why(q, k, k).backend == "fa3"


@pytest.mark.parametrize(
    "options", [{}, {"mask": Mask.padding([7, 3])}, {"bias": hw.scoring.alibi(6)}], ids=str
)
@pytest.mark.parametrize("groups", [True, False])
def test_heads_that_share_keys_are_rows_of_one_query_or_repeated(
    groups: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one query no key is repeated for a kernel without groups, unless each head has its own bias."""
    calls: list[tuple[int, ...]] = []

    def forward(call: kernels.KernelCall) -> kernels.Output:
        calls.append((*call[0].shape[1:3], call[1].shape[1]))
        return kernels.CPU_FLASH.forward(call)

    entered(monkeypatch, takes_groups=groups, forward=forward)
    q, k, v = (torch.randn(2, n, s, 5, dtype=torch.float64) for n, s in ((6, 1), (2, 7), (2, 7)))
    out, weights = hw.attention(q, k, v, **options, backend="fa3")
    expected, _, lse = case_of(q, k, v, options).reference()
    assert error(out, expected) < 1e-13 and error(weights.lse, lse) < 1e-13
    assert calls[0] == ((2, 3, 2) if "bias" not in options else (6, 1, 2 if groups else 6))


# Cutting


@pytest.fixture(params=["as it is", "small blocks"])
def block_sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything twice: small inputs go whole, or cut into many blocks."""
    if request.param == "small blocks":
        monkeypatch.setattr(fused, "CPU", fused.Limits(added=20, most_rows=4, fewest_rows=2))


@st.composite
def requests(draw: st.DrawFn) -> Case:
    """Any mask over a few keys, and perhaps a bias; T above, below and at S."""
    batch, length, keys = draw(st.sampled_from([1, 2])), draw(st.integers(1, 13)), draw(st.integers(1, 13))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = draw(masks(batch, 2, length, keys, random))
    if draw(st.booleans()):
        reach = st.none() | st.integers(0, keys)
        mask = mask & Mask(left=draw(reach), right=draw(reach))
    options: dict[str, Any] = {}
    kind = draw(st.sampled_from(["none", "none", "bias", "slopes", "relative"]))
    if kind == "bias":
        options["bias"] = torch.randn(2, length, keys, generator=random, dtype=torch.float64)
    if kind == "slopes":
        options["bias"] = alibi(2)
    if kind == "relative":
        options["bias"] = Relative(torch.randn(2, 5, generator=random, dtype=torch.float64))
    q, k = (torch.randn(batch, 2, n, 3, generator=random, dtype=torch.float64) for n in (length, keys))
    return Case(q, k, k, mask, options)


def scores_of(case: Case) -> Scores:
    return scores_from(case.q, case.k, case.v, case.mask, **case.options)


def seen_in(part: fused.Part, scores: Scores) -> Tensor:
    """Which pairs of the whole matrix a part lets through, bool [B, H, T, S]."""
    whole = torch.zeros(scores.shape, dtype=torch.bool)
    t, s = part.rows.stop - part.rows.start, part.columns.stop - part.columns.start
    inside = torch.ones(*scores.shape[:2], t, s, dtype=torch.bool)
    i, j = torch.arange(t)[:, None] + s - t, torch.arange(s)
    left, right = part.band
    if left is not None:
        inside &= i - j <= left
    if right is not None:
        inside &= j - i <= right
    added = part.mask_and_bias(scores, torch.float64)
    if added is not None:
        inside &= added > HIDDEN
    whole[:, :, part.rows, part.columns] = inside
    return whole


@pytest.mark.usefixtures("block_sizes")
@pytest.mark.parametrize("any_band", [False, True], ids=["causal-only", "any-band"])
@given(case=requests())
def test_parts_cover_every_visible_pair_exactly_once(any_band: bool, case: Case) -> None:
    scores = scores_of(case)
    actual = fused.cut(scores, any_band)
    times = sum(
        (seen_in(part, scores).int() for part in actual), torch.zeros(scores.shape, dtype=torch.int32)
    )
    assert torch.equal(times, reference.allowed(case.mask, *scores.shape).int())


@pytest.mark.usefixtures("block_sizes")
@given(case=requests())
def test_however_it_is_cut_the_answer_is_the_same(case: Case) -> None:
    loose = case.options.pop("bias", None)
    assert_exact(case.q, case.k, case.v, {"mask": case.mask, **case.options})
    if loose is not None:  # a bias that is not learned goes to the fused kernel, too
        truth = Case(case.q, case.k, case.v, case.mask, {"bias": loose}).reference()
        out, w = hw.attention(case.q, case.k, case.v, case.mask, bias=loose, backend="flash")
        assert error(out, truth[0]) < 1e-13 and error(w.lse, truth[2]) < 1e-13


def test_queries_before_the_first_key_are_left_out() -> None:
    q, k = normal(0, 1, 1, 13, 3), normal(1, 1, 1, 5, 3)
    (only,) = fused.cut(scores_from(q, k, k, Mask.causal()))
    assert (only.rows, only.columns, only.band) == (slice(8, 13), slice(0, 5), kernels.CAUSAL)
    out, w = hw.attention(q, k, k, Mask.causal())
    assert not out[:, :, :8].any() and bool(torch.isneginf(w.lse[:, :, :8]).all())


def test_a_window_over_a_long_sequence_skips_what_it_cannot_see() -> None:
    x = torch.zeros(1, 1, 2048, 2)
    actual = fused.cut(scores_from(x, x, x, window=32))
    covered = sum(
        (part.rows.stop - part.rows.start) * (part.columns.stop - part.columns.start) for part in actual
    )
    assert covered < 2048 * 2048 / 6


# Sizes and strides


@pytest.mark.thinned(4, slow=2)
@every_option
@pytest.mark.parametrize("Dv", [2, 17], ids=["narrow", "wide"])
@pytest.mark.parametrize("backend", ["auto", "tiles"])
def test_values_may_be_narrower_or_wider_than_keys(options: dict[str, Any], Dv: int, backend: str) -> None:
    q, k, _ = qkv()
    assert_exact(q, k, normal(2, B, HK, S, Dv), options, backend=backend)


@pytest.mark.thinned(4, slow=2)
@every_option
@pytest.mark.parametrize(
    ("heads", "key_heads"), [(6, 1), (6, 2), (6, 3), (5, 5)], ids=["6-1", "6-2", "6-3", "5-5"]
)
def test_one_query_of_grouped_heads_is_exact(options: dict[str, Any], heads: int, key_heads: int) -> None:
    """One query takes a way of its own: the heads of a group become the rows of one product."""
    q, k, v = normal(0, B, heads, 1, D), normal(1, B, key_heads, S, D), normal(2, B, key_heads, S, D)
    fitting = dict(options)
    for name in ("bias", "sinks"):
        value = fitting.get(name)
        if isinstance(value, (Alibi, Relative)):
            fitting[name] = with_inside(value, inside(value)[:heads])
        elif value is not None:
            fitting[name] = value[:heads, :1] if name == "bias" else value[:heads]
    if isinstance(fitting.get("mask"), Tensor):
        fitting["mask"] = fitting["mask"][:, :, :1]
    assert_exact(q, k, v, fitting)
    with torch.no_grad():
        case = case_of(q, k, v, fitting)
        out, w = hw.attention(case.q, case.k, case.v, case.mask, **case.options)
        truth = case.reference()
        assert error(out, truth[0]) < 1e-13 and error(w.lse, truth[2]) < 1e-13


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads after length": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "channels first": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "batch last": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "every second channel": lambda x: torch.stack([x, x + 1], -1).flatten(-2)[..., ::2],
    "part of a larger tensor": lambda x: torch.cat([x - 1, x, x + 1], dim=2)[
        :, :, x.shape[2] : 2 * x.shape[2]
    ],
}


@pytest.mark.thinned
@every_option
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=[name.replace(" ", "-") for name in LAYOUTS])
def test_the_layout_in_memory_changes_nothing(
    options: dict[str, Any], layout: Callable[[Tensor], Tensor]
) -> None:
    plain, strided = qkv(), [layout(x) for x in qkv()]
    assert all(torch.equal(x, y) and not y.is_contiguous() for x, y in zip(plain, strided, strict=True))
    results = []
    for tensors in (plain, strided):
        q, k, v = (x.detach().requires_grad_() for x in tensors)
        out, w = hw.attention(q, k, v, **options)
        assert q.stride() == tensors[0].stride()
        grads = torch.autograd.grad((out * normal(8, *out.shape)).sum(), (q, k, v))
        results.append([out, w.lse, w.dense(), w.mean_heads(), w.pooled(3), *w.top(2), *grads])
    for mine, theirs in zip(*results, strict=True):
        assert error(mine, theirs) < 1e-13


def test_expanded_inputs_are_read_as_what_they_show() -> None:
    q, k, v = (x[:1, :1].expand(B, HK, *x.shape[2:]) for x in qkv())
    assert q.stride(0) == q.stride(1) == 0
    out, w = hw.attention(q, k, v, causal=True)
    expected, same = hw.attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    assert error(out, expected) < 1e-14 and error(w.dense(), same.dense()) < 1e-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_any_layout_go_in(dtype: torch.dtype) -> None:
    """A gradient that arrives expanded (from a sum) or transposed is read as what it shows."""
    q, k, v = (x.requires_grad_() for x in qkv(dtype))
    out, _ = hw.attention(q, k, v, causal=True)
    summed = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    whole = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
    turned = torch.autograd.grad(out, (q, k, v), torch.ones_like(out).mT.contiguous().mT)
    for a, b, c in zip(summed, whole, turned, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


# Dropout


def test_dropout_zeroes_weights_or_scales_them_up_and_nothing_else() -> None:
    """With the identity for values the output is the weights as they were used."""
    q, k, _ = qkv()
    torch.manual_seed(0)
    share = 0.25
    v = torch.eye(S, dtype=torch.float64).expand(B, HK, S, S)
    used, w = hw.attention(q, k, v, dropout=share)
    before = w.dense()
    saved = used != 0
    assert error(used, torch.where(saved, before / (1 - share), 0.0)) < 1e-14
    assert 0.6 < saved.double().mean().item() < 0.9


def test_the_map_is_the_one_before_dropout() -> None:
    q, k, v = qkv()
    _, dropped = hw.attention(q, k, v, dropout=0.5, causal=True)
    _, whole = hw.attention(q, k, v, causal=True)
    assert error(dropped.dense(), whole.dense()) < 1e-14 and error(dropped.lse, whole.lse) < 1e-14
    assert not dropped.lse.requires_grad


def test_dropout_repeats_with_the_seed_and_changes_without() -> None:
    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return hw.attention(*qkv(), dropout=0.5)[0]

    assert torch.equal(run(3), run(3)) and not torch.equal(run(3), run(5))


def test_gradients_go_through_what_was_kept() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(7)
        return hw.attention(q, k, v, dropout=0.5, causal=True)[0]

    few = (q[:1, :2, :2, :2], k[:1, :1, :3, :2], v[:1, :1, :3, :2])
    assert torch.autograd.gradcheck(run, [x.detach().clone().requires_grad_() for x in few])


# Memory


class Largest(TorchDispatchMode):
    """Notes the largest tensor any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, Tensor):
                self.elements = max(self.elements, made.untyped_storage().nbytes() // made.element_size())
        return result


LONG = 1024
LONG_MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": 32},
    "band": {"window": (20, 11)},
    "documents": {"mask": Mask.documents(torch.arange(LONG) // 50)},
    "causal documents": {"mask": Mask.documents(torch.arange(LONG) // 50), "causal": True},
    "causal padding": {"mask": Mask.padding([700]), "causal": True},
    "causal holes": {"mask": Mask.padding(torch.arange(LONG)[None] % 3 > 0), "causal": True},
    "window padding": {"mask": Mask.padding([700]), "window": 32},
    "window slopes": {"bias": alibi(2), "window": 32},
    "window relative": {"bias": Relative(torch.zeros(2, 67)), "window": 32},
    "window sinks": {"sinks": torch.zeros(2), "window": 32},
}


def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on every kind of CPU, and far below what would be a matrix here."""
    for name, value in (("CPU_TILE", 2**19), ("CPU_ROWS", 128), ("CPU_COLUMNS", 512)):
        monkeypatch.setattr(scores_room, name, value)


@pytest.mark.thinned(6, slow=2)
@pytest.mark.parametrize("name", LONG_MASKS, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("backend", ["auto", "tiles"])
def test_no_matrix_of_all_pairs_is_ever_made(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _small_tiles(monkeypatch)
    q = normal(0, 1, 2, LONG, 8, dtype=torch.float32).requires_grad_()
    k = normal(1, 1, 1, LONG, 8, dtype=torch.float32).requires_grad_()
    with Largest() as largest:
        out, w = hw.attention(q, k, k, **LONG_MASKS[name], backend=backend)
        out.sum().backward()
    most = LONG * LONG // 6 if backend == "auto" else LONG * LONG // 2  # a tile holds both heads
    assert q.numel() <= largest.elements <= most
    with Largest() as largest:
        assert w[0, 1, 5].shape == (LONG,) and w.statistics("previous", "itself").itself.shape == (1, 2)
    assert largest.elements <= LONG * LONG // 8


def test_all_that_is_measured_takes_no_more_than_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    _small_tiles(monkeypatch)
    length = 2048
    q, k = (normal(i, 1, 1, length, 4, dtype=torch.float32) for i in range(2))
    w = hw.attention(q, k, k, causal=True)[1]
    with Largest() as largest:
        w.statistics()
        w.pooled(16)
        w.top(2)
    assert largest.elements <= length * length // 8


def test_a_learned_bias_by_distance_is_never_made_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    _small_tiles(monkeypatch)
    q, k = (normal(i, 1, 2, 2048, 4, dtype=torch.float32).requires_grad_() for i in range(2))
    values = torch.zeros(2, 67).requires_grad_()
    with Largest() as largest:
        out, w = hw.attention(q, k, k, bias=Relative(values))
        out.sum().backward()
        w.select(heads=[1], queries=slice(0, 500)).statistics("entropy").entropy.sum().backward()
    assert largest.elements <= 2**19 * 5 // 4  # a tile, and on the way back its rows one place apart
    assert values.grad is not None and values.grad.any()


@pytest.mark.slow
def test_statistics_of_8192_tokens_with_a_bias_by_distance_take_a_few_megabytes() -> None:
    """Eight heads: dense, the bias alone is 2 GiB."""
    q, k = (normal(i, 1, 8, 8192, 16, dtype=torch.float32) for i in range(2))
    w = hw.AttentionMap(q, k, bias=Relative(normal(2, 8, 257, dtype=torch.float32)), causal=True)
    with Largest() as largest, hw.budget.limit("64 MiB"):
        w.statistics(pooled=32)
    assert largest.elements <= 2**21


def test_a_plain_call_gives_second_derivatives_and_gradients_in_batches() -> None:
    leaves = [normal(i, 1, h, 3, 4).requires_grad_() for i, h in enumerate((4, 2, 2))]

    def call(*leaves: Tensor) -> Tensor:
        return hw.attention(*leaves, causal=True)[0]

    assert torch.autograd.gradcheck(call, leaves) and torch.autograd.gradgradcheck(call, leaves)
    output = call(*leaves)
    pulls = normal(9, 5, *output.shape)
    together = torch.autograd.grad(output, leaves, pulls, is_grads_batched=True, retain_graph=True)
    for number, pull in enumerate(pulls):
        alone = torch.autograd.grad(output, leaves, pull, retain_graph=True)
        assert all(error(many[number], single) <= 1e-12 for many, single in zip(together, alone, strict=True))
