"""The second pass as torch sees it: its operators, compiled and exported, and the way back from entropy.

Sizes are tiny (B2 H4 Hk2 T5 S7 D3) and in float64 unless precision is what is tested.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.memory import GIVES_BACK
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import headwise as hw
from headwise import Mask
from headwise.engines import first_pass
from headwise.engines import scores as scores_room
from headwise.engines.scores import DIFFERENTIABLE
from headwise.engines.statistics import STATISTICS, Statistics
from headwise.errors import ArgumentError, BudgetExceeded
from headwise.scoring import Alibi, Relative, alibi
from judge import Case, assert_judged, error, inside, largest, scores_from, strategies, with_inside
from second_pass_cases import differentiable_entropy

cases = strategies()
operators = torch.ops.headwise

# torch's own: parts of it use torch.jit.script, which it tells others not to
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

B, H, HK, T, S, D = 2, 4, 2, 5, 7, 3


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qk(query_len: int = T, key_len: int = S) -> tuple[Tensor, Tensor]:
    return normal(0, B, H, query_len, D), normal(1, B, HK, key_len, D)


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": 3},
    "lengths": {"mask": Mask.padding([4, 7], [5, 2]), "scale": 0.3},
    "holes": {"mask": Mask.padding(normal(2, B, S) > 0)},
    "documents": {"mask": Mask.documents(torch.arange(S) // 3), "softcap": 1.5},
    "dense": {"mask": normal(3, T, S) > 0.8},  # some queries see nothing
    "bias": {"bias": normal(4, H, T, S), "causal": True},
    "slopes": {"bias": Alibi(normal(5, H).abs())},
    "relative": {"bias": Relative(normal(5, H, 5)), "mask": Mask.padding([3, 7])},
    "sinks": {"sinks": normal(6, H), "mask": Mask.padding([0, 7])},
    "everything": {"bias": normal(4, H, 1, S), "sinks": normal(6, H), "softcap": 1.5, "window": (3, 1)},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@pytest.fixture
def many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small inputs cut into many tiles."""
    monkeypatch.setattr(scores_room, "CPU_TILE", 40)
    monkeypatch.setattr(scores_room, "CPU_ROWS", 4)
    monkeypatch.setattr(scores_room, "CPU_COLUMNS", 5)


# The operators


def call_of(name: str, flat: tuple[Any, ...], lse: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """An operator and its arguments, by a name for both."""
    pull, rows = normal(7, B, H, T, S), normal(8, B, H, T)
    picked = torch.tensor([6, 0, 0])
    return {
        "lse": (operators.lse, flat),
        "measure": (operators.measure, (*flat, lse, list(STATISTICS), False, 8, None)),
        "measure, a query": (operators.measure, (*flat, lse, ["received", "entropy"], True, 1, [2, 3])),
        "measure, a picture": (operators.measure, (*flat, lse, [], False, 0, [5, 1])),
        "top": (operators.top, (*flat, lse, 3)),
        "weights": (operators.weights, (*flat, lse, None, None, False)),
        "weights, no lse": (operators.weights, (*flat, None, None, None, False)),
        "weights, mean": (operators.weights, (*flat, lse, None, None, True)),
        "weights, picked": (operators.weights, (*flat, lse, picked, None, False)),
        "weights, run": (operators.weights, (*flat, lse, None, [1, 6, 2], True)),
        "entropy": (operators.entropy, (*flat, lse)),
        "weights_backward": (operators.weights_backward, (pull, *flat, lse, None, None, False, True)),
        "weights_backward, picked": (
            operators.weights_backward, (pull[..., :3], *flat, lse, picked, None, False, False),
        ),
        "weights_backward, mean": (
            operators.weights_backward, (pull[:, 0, :, :3], *flat, None, None, [1, 6, 2], True, True),
        ),
        "entropy_backward": (operators.entropy_backward, (rows, *flat, lse, True)),
        "entropy_backward, q and k": (operators.entropy_backward, (rows, *flat, lse, False)),
    }[name]  # fmt: skip


TURNS = {  # every operator, every option
    "lse": ("sinks",),
    "measure": ("lengths", "everything"),
    "measure, a query": ("holes", "slopes"),
    "measure, a picture": ("dense",),
    "top": ("window", "bias"),
    "weights": ("documents", "everything"),
    "weights, no lse": ("slopes",),
    "weights, mean": ("causal", "bias"),
    "weights, picked": ("sinks", "relative"),
    "weights, run": ("holes",),
    "entropy": ("causal", "everything", "slopes"),
    "weights_backward": ("bias", "slopes", "relative"),
    "weights_backward, picked": ("everything",),
    "weights_backward, mean": ("full",),
    "entropy_backward": ("everything", "slopes", "relative"),
    "entropy_backward, q and k": ("bias",),
}


# From 2.15 on opcheck gives copies that are no leaves, and torch reads their .grad: warnings it hides from
# whoever shows them, not from whoever raises them.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.thinned(16, slow=3)
@pytest.mark.parametrize(
    ("name", "chosen"), [(name, chosen) for name, options in TURNS.items() for chosen in options]
)
def test_the_operators_keep_torchs_rules(name: str, chosen: str) -> None:
    q, k = qk()
    scores = scores_from(q, k, k, **OPTIONS[chosen])
    flat, lse = scores.flatten(), first_pass.lse_of(scores)
    if name.partition(",")[0] in ("weights", "entropy"):  # the two with a gradient
        leaves = [
            x if x is None else x.detach().clone().requires_grad_() for x in flat[: len(DIFFERENTIABLE)]
        ]
        flat = (*leaves, *flat[len(DIFFERENTIABLE) :])
    operator, args = call_of(name, flat, lse)
    torch.library.opcheck(operator.default, args)


# torch.compile

Looks = Callable[[hw.AttentionMap], Any]
LOOKS: dict[str, Looks] = {
    "statistics": lambda w: list(w.statistics().values()),
    "a query": lambda w: list(w.statistics("local", "entropy", "received", per="query", reach=2).values()),
    "with a picture": lambda w: list(w.statistics("distance", "effective_keys", pooled=(2, 3)).values()),
    "pooled": lambda w: w.pooled(2),
    "top": lambda w: w.top(2),
    "mean": lambda w: w.mean_heads(),
    "dense": lambda w: w.dense(),
    "a head": lambda w: w[0, 1],
    "a row": lambda w: w[0, 1, -1],
    "rows": lambda w: w.select(queries=[3, 0, 3]).dense(),
    "heads": lambda w: w.select(heads=[3, 0, 1]).dense(),
    "keys": lambda w: w.select(keys=[6, 0, 6]).dense(),
    "a run of keys": lambda w: w.select(keys=slice(2, -1)).dense(),
    "every other key": lambda w: w.select(keys=slice(None, None, 2)).mean_heads(),
    "keys, the last first": lambda w: w.select(keys=slice(None, None, -1), queries=slice(1, 3)).dense(),
    "statistics of rows": lambda w: list(w.select(queries=[3, 0]).statistics("entropy", "first").values()),
    "statistics of heads": lambda w: list(w.select(heads=[2], batch=[1, 1]).statistics(pooled=2).values()),
}


def looked(run: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """What a function gives, and the gradients through whatever of it has one."""
    actual = run(*inputs)
    actual = [actual] if isinstance(actual, Tensor) else list(actual)
    with_gradient = [x for x in actual if x.requires_grad]
    if with_gradient:
        pulls = [normal(9 + i, *x.shape) for i, x in enumerate(with_gradient)]
        actual += torch.autograd.grad(with_gradient, inputs, pulls)
    return actual


def assert_same(actual: list[Tensor], wanted: list[Tensor]) -> None:
    assert [x.requires_grad for x in actual] == [x.requires_grad for x in wanted]
    for mine, theirs in zip(actual, wanted, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        assert torch.equal(torch.isnan(mine), torch.isnan(theirs))
        assert error(mine.nan_to_num(), theirs.nan_to_num()) < 1e-12


@pytest.mark.thinned(8, slow=3)
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_every_way_of_looking_compiles_in_one_graph(look: Looks) -> None:
    def function(q: Tensor, k: Tensor) -> Any:
        return look(hw.AttentionMap(q, k, causal=True))

    inputs = [x.requires_grad_() for x in qk()]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_same(looked(compiled, inputs), looked(function, inputs))


@pytest.mark.thinned(keep=["everything"], slow=2)
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", ["lengths", "documents", "slopes", "relative", "everything"])
def test_every_rule_and_option_compiles_in_one_graph(name: str) -> None:
    """Whatever is learned gets the gradient it gets in eager mode; through entropy, mean and chosen rows."""
    options = dict(OPTIONS[name])
    learned = {n: x for n, x in options.items() if n in ("bias", "sinks")}
    q, k = qk()

    def function(q: Tensor, k: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        for (n, kind), x in zip(learned.items(), rest, strict=True):
            options[n] = with_inside(kind, x)
        w = hw.AttentionMap(q, k, **options)
        stats = w.statistics("entropy", "distance", pooled=2)
        return stats.entropy, stats.distance, stats.pooled, w.mean_heads(), w[0, 1], w.top(1).values

    actual = [inside(x) for x in learned.values()]
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, *actual)]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_same(looked(compiled, inputs), looked(function, inputs))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_a_loss_may_mix_what_has_a_gradient_with_what_has_none() -> None:
    """Compiled, all that is measured was taken for differentiable, and torch warned of having no way back."""

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, w = hw.attention(q, k, v, causal=True)
        stats = w.statistics("entropy", "distance", "received", pooled=2)
        rest = stats.distance.sum() + stats.received.square().sum() + stats.pooled.square().sum()
        return out.sum() + stats.entropy.sum() + rest + w.top(1).values.sum() + w.lse.sum()

    inputs = [x.requires_grad_() for x in (*qk(), normal(2, B, HK, S, D))]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert_same(looked(compiled, inputs), looked(loss, inputs))


ONCE = ["statistics", "with a picture", "top", "dense", "a head", "rows", "keys"]


@pytest.mark.thinned(keep=["rows"])
@pytest.mark.parametrize("name", ONCE)
def test_new_lengths_do_not_compile_anew(name: str, counter: Any) -> None:
    """A graph a length would run into torch's limit of eight, and fullgraph=True turns that into an error."""

    def function(q: Tensor, k: Tensor) -> Any:
        return LOOKS[name](hw.AttentionMap(q, k, causal=True))

    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
    with torch.no_grad():
        for length in (7, 11, 13, 17):
            inputs = qk(length, length)
            assert_same(looked(compiled, inputs), looked(function, inputs))
    assert counter.frame_count == 1


@pytest.mark.thinned(keep=["a query"])
@pytest.mark.parametrize("name", ["a query", "mean"])
def test_new_lengths_do_not_compile_anew_with_gradients_either(name: str, counter: Any) -> None:
    def function(q: Tensor, k: Tensor) -> Any:
        return LOOKS[name](hw.AttentionMap(q, k, window=4, bias=BIASES))

    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
    for length in (7, 11, 13):
        inputs = [x.requires_grad_() for x in qk(length, length)]
        assert_same(looked(compiled, inputs), looked(function, inputs))
    assert counter.frame_count == 1


BIASES = alibi(H)


# torch.export


class Look(torch.nn.Module):
    def __init__(self, look: Looks) -> None:
        super().__init__()
        self.look = look

    def forward(self, q: Tensor, k: Tensor) -> Any:
        return self.look(hw.AttentionMap(q, k, causal=True))


@pytest.mark.thinned(keep=["statistics-True"])
@pytest.mark.parametrize(
    ("name", "strict"),
    [("statistics", False), ("statistics", True), ("with a picture", True), ("top", True), ("mean", True)],
)
def test_an_exported_program_looks_at_any_batch_and_length(name: str, strict: bool) -> None:
    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", min=2, max=512)
    shapes = {"q": {0: batch, 2: length}, "k": {0: batch, 2: length}}
    module = Look(LOOKS[name])

    def inputs(batch: int, length: int) -> tuple[Tensor, ...]:
        return normal(0, batch, H, length, D), normal(1, batch, HK, length, D)

    program = torch.export.export(module, inputs(3, 7), dynamic_shapes=shapes, strict=strict)
    for size in ((3, 7), (2, 13), (5, 4)):
        assert_same(looked(program.module(), inputs(*size)), looked(module, inputs(*size)))


@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
def test_an_exported_program_returns_statistics_by_name(strict: bool) -> None:
    module = Look(lambda w: w.statistics("received", "first", pooled=2))
    program = torch.export.export(module, qk(), strict=strict)
    actual, wanted = program.module()(*qk()), module(*qk())
    assert isinstance(actual, Statistics) and list(actual) == list(wanted)
    assert_same(list(actual.values()), list(wanted.values()))


# A picture in the same walk


@every_option
@pytest.mark.parametrize("per", ["head", "query"])
def test_statistics_with_a_picture_are_both(options: dict[str, Any], per: str) -> None:
    w = hw.AttentionMap(*qk(), **options)
    for cells in (2, (3, 2), (100, 1)):
        together = w.statistics(per=per, pooled=cells)
        assert list(together) == [*STATISTICS, "pooled"] and torch.equal(together.pooled, w.pooled(cells))
        for name, value in w.statistics(per=per).items():
            assert torch.equal(together[name].nan_to_num(), value.nan_to_num())
    only = w.statistics("first", per=per, pooled=2)
    assert list(only) == ["first", "pooled"] and "pooled" not in w.statistics("first")


def test_a_picture_comes_with_the_statistics_of_given_weights() -> None:
    given_weights = normal(0, 1, 2, T, S).softmax(-1)
    w = hw.AttentionMap.from_weights(given_weights)
    together = w.statistics("entropy", pooled=(T, S))
    assert error(together.pooled, given_weights) < 1e-14


@pytest.mark.parametrize("cells", [0, -3, (2, 0), (2, 3, 4), 2.5, True, (), "2"])
def test_a_picture_of_no_such_size_is_refused(cells: Any) -> None:
    w = hw.AttentionMap(*qk())
    with pytest.raises(ArgumentError) as problem:
        w.statistics("entropy", pooled=cells)
    assert f"cells must be a number or a pair, each at least 1: got {cells!r}" in str(problem.value)


# The way back from entropy


def entropies(name: str, per: str) -> Callable[[Case], Tensor]:
    """A statistic with a gradient as plain torch has it, from the dense matrix."""

    def of(case: Case) -> Tensor:
        _, p, lse = case.reference()
        empty = torch.isneginf(lse)
        actual = differentiable_entropy(case, p, lse)
        if name == "effective_keys":
            actual = actual.exp().masked_fill(empty, 0.0)
        if per == "query":
            return actual
        counts = ~empty
        real = case.mask.counted(p.shape[2])
        if real is not None:
            counts = counts & real[:, None]
        return actual.masked_fill(~counts, 0.0).sum(-1) / counts.sum(-1)

    return of


def judge_entropy(case: Case, dtype: torch.dtype, name: str, per: str) -> None:
    low = case.to(dtype)
    ours, plain, truth = low.with_gradients(), low.with_gradients(), low.to(torch.float64).with_gradients()
    w = hw.AttentionMap(ours.q, ours.k, mask=ours.mask, **ours.options)
    actual = w.statistics(name, per=per)[name]
    pull = normal(3, *actual.shape)
    actual.backward(pull.to(actual))
    for arm in (plain, truth):
        values = entropies(name, per)(arm)
        values.backward(pull.to(values))
    terms = 1.0 + torch.tensor(float(case.k.shape[2])).log().item()  # log p + H
    terms *= case.k.shape[2] if name == "effective_keys" else 1
    scale = case.options.get("scale") or case.q.shape[-1] ** -0.5
    flow = 2 * largest(pull) * terms
    size = {"q": flow * scale * largest(case.k), "k": flow * scale * largest(case.q)}
    for leaf, wanted in truth.leaves().items():
        if leaf != "v":
            mine, theirs = ours.leaves()[leaf].grad, plain.leaves()[leaf].grad
            assert mine is not None and theirs is not None and wanted.grad is not None
            extent = size.get(leaf, flow * case.q.shape[2])
            assert_judged(mine, theirs, wanted.grad, dtype=dtype, size=extent, times=3, name=leaf)


DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@pytest.mark.thinned(keep=["effective_keys-head"])
@pytest.mark.parametrize("per", ["query", "head"])
@pytest.mark.parametrize("name", ["entropy", "effective_keys"])
@given(case=cases(), dtype=st.sampled_from(DTYPES))
def test_gradients_through_entropy_are_as_exact_as_plain_torch(
    name: str, per: str, case: Case, dtype: torch.dtype
) -> None:
    judge_entropy(case, dtype, name, per)


@pytest.mark.slow
@pytest.mark.usefixtures("many_tiles")
@given(case=cases(), dtype=st.sampled_from(DTYPES))
def test_gradients_through_entropy_are_added_up_over_tiles(case: Case, dtype: torch.dtype) -> None:
    judge_entropy(case, dtype, "entropy", "query")


def entropy_of(options: dict[str, Any], per: str = "query") -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Entropy as a function of all that may be learned, and inputs for it: B1 H2 Hk1 T2 S3 D2."""
    fixed = {n: x for n, x in options.items() if n not in ("bias", "sinks")}
    kinds = [n for n in ("bias", "sinks") if n in options]

    def function(q: Tensor, k: Tensor, *learned: Tensor) -> Tensor:
        made = dict(zip(kinds, learned, strict=True))
        if "bias" in made:
            made["bias"] = with_inside(options["bias"], made["bias"])
        return hw.AttentionMap(q, k, **fixed, **made).statistics("entropy", per=per).entropy

    values = [inside(options[n]) for n in kinds]
    inputs = [normal(0, 1, 2, 2, 2), normal(1, 1, 1, 3, 2), *values]
    return function, [x.detach().clone().requires_grad_() for x in inputs]


TINY: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"window": 2, "softcap": 1.5},
    "nothing": {"mask": torch.tensor([[True, False, True], [False, False, False]]), "sinks": normal(6, 2)},
    "bias": {"bias": normal(4, 2, 2, 3), "causal": True},
    "slopes": {"bias": Alibi(normal(5, 2).abs()), "sinks": normal(6, 2)},
    "relative": {"bias": Relative(normal(5, 2, 3)), "causal": True},
}
every_tiny = pytest.mark.parametrize("options", TINY.values(), ids=TINY)


@every_tiny
def test_derivatives_of_entropys_gradient_are_what_differences_say(options: dict[str, Any]) -> None:
    function, inputs = entropy_of(options)
    assert torch.autograd.gradgradcheck(function, inputs)


@every_tiny
def test_entropy_is_differentiated_under_transforms_too(options: dict[str, Any]) -> None:
    function, inputs = entropy_of(options)
    wanted = torch.autograd.grad(function(*inputs).sin().sum(), inputs)
    plain = [x.detach() for x in inputs]
    actual = torch.func.grad(lambda *x: function(*x).sin().sum(), argnums=tuple(range(len(plain))))(*plain)
    assert_same(list(actual), list(wanted))
    ways = [normal(10 + i, *x.shape) for i, x in enumerate(plain)]
    along = torch.func.jvp(lambda *x: function(*x).sin().sum(), tuple(plain), tuple(ways))[1]
    across = sum((way * grad).sum() for way, grad in zip(ways, wanted, strict=True))
    assert error(along, torch.as_tensor(across)) < 1e-12


def test_gradients_of_entropy_may_come_in_batches() -> None:
    function, inputs = entropy_of(TINY["bias"])
    actual = function(*inputs)
    pulls = normal(7, 3, *actual.shape)
    together = torch.autograd.grad(actual, inputs, pulls, is_grads_batched=True, retain_graph=True)
    for i, pull in enumerate(pulls):
        alone = torch.autograd.grad(actual, inputs, pull, retain_graph=True)
        assert_same([x[i] for x in together], list(alone))


def test_a_query_that_sees_nothing_sends_nothing_back_from_entropy() -> None:
    function, inputs = entropy_of(TINY["nothing"])
    actual = function(*inputs)
    assert not bool(actual[:, :, 1].any())
    from_nothing = torch.autograd.grad(actual[:, :, 1].sum(), inputs, retain_graph=True)
    assert not any(bool(grad.any()) for grad in from_nothing)
    assert bool(torch.autograd.grad(actual.sum(), inputs)[0][:, :, 0].any())


def test_a_head_without_a_counted_query_sends_nothing_back_from_entropy() -> None:
    q, k = (x.requires_grad_() for x in qk())
    actual = hw.AttentionMap(q, k, mask=Mask.padding([7, 7], [0, 5])).statistics("entropy").entropy
    assert bool(torch.isnan(actual[0]).all()) and not bool(torch.isnan(actual[1]).any())
    dq, dk = torch.autograd.grad(actual[1].sum(), (q, k))
    assert not bool(dq[0].any() or dk[0].any()) and bool(dq[1].any())
    assert bool(torch.isfinite(dq).all() and torch.isfinite(dk).all())


def test_hidden_keys_send_nothing_back_from_entropy_however_large_the_gradient() -> None:
    """log p of a hidden key is -1e30: times a gradient of 1e9 it was infinite in float32, and times p NaN."""
    q, k = (x.float().requires_grad_() for x in qk())
    small, large = (
        torch.autograd.grad(
            hw.AttentionMap(q, k, window=3).statistics("entropy", per="query").entropy.sum() * size, (q, k)
        )
        for size in (1.0, 2.0**40)
    )
    for a, b in zip(small, large, strict=True):
        assert torch.equal(a * 2.0**40, b)


def test_only_what_wants_a_gradient_gets_one_from_entropy() -> None:
    function, _ = entropy_of(TINY["slopes"])
    for wanted in range(4):
        inputs = [x.detach().requires_grad_(i == wanted) for i, x in enumerate(entropy_of(TINY["slopes"])[1])]
        function(*inputs).sum().backward()
        assert [x.grad is not None for x in inputs] == [i == wanted for i in range(4)]
    with torch.no_grad():
        assert not function(*(x.requires_grad_() for x in inputs)).requires_grad


def test_entropy_is_the_same_with_and_without_a_gradient() -> None:
    q, k = qk()
    plain = hw.AttentionMap(q, k, causal=True)
    learned = hw.AttentionMap(q.clone().requires_grad_(), k, causal=True)
    for per in ("head", "query"):
        mine, theirs = learned.statistics(per=per, pooled=2), plain.statistics(per=per, pooled=2)
        assert list(mine) == list(theirs)
        assert all(error(mine[name].nan_to_num(), theirs[name].nan_to_num()) < 1e-14 for name in mine)


@pytest.mark.slow
def test_the_way_back_from_entropy_holds_no_matrix() -> None:
    script = (
        "import torch, headwise as hw; from benchmarks.memory import peak_of; torch.manual_seed(0)\n"
        "def arm(L):\n"
        "    q, k = (x.requires_grad_() for x in torch.randn(2, 1, 8, L, 64))\n"
        "    w = hw.AttentionMap(q, k, causal=True)\n"
        "    return lambda: torch.autograd.grad(w.statistics('entropy').entropy.sum(), (q, k))\n"
        "arm(64)()\n"
        "print(peak_of(arm(4096))['extra_bytes'])"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=root,
        env={**os.environ, **GIVES_BACK},
        capture_output=True,
        text=True,
        check=True,
    )
    matrix = 8 * 4096 * 4096 * 4
    assert int(done.stdout) <= matrix / 8, f"{done.stdout} of {matrix} bytes"


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_dense_weights_stay_inside_the_budget() -> None:
    def dense(q: Tensor, k: Tensor) -> Tensor:
        return hw.AttentionMap(q, k).dense()

    compiled = torch.compile(dense, fullgraph=True, backend="aot_eager")
    with hw.budget.limit("1 KiB"), pytest.raises(BudgetExceeded, match="dense weights"):
        compiled(*qk())


def test_all_keys_are_no_choice_of_keys() -> None:
    q, k = qk()
    w = hw.AttentionMap(q, k)
    assert_same(list(w.select(keys=slice(None)).statistics().values()), list(w.statistics().values()))
