"""Every public call by every route that can answer it: the numbers of reference.py in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import headwise as hw
import routes
import small_models
from headwise import Mask, errors, reference
from judge import Case, assert_judged, sizes, strategies
from routes import Route

PRIMES = st.sampled_from([2, 3, 5, 7, 13])
CASES = strategies()
FLOAT = torch.float32


Made = tuple[hw.MultiHeadAttention, Tensor]


def by_every(listed: list[Route]) -> pytest.MarkDecorator:
    """The test once for each route of a list."""
    cases = [
        pytest.param(route, marks=[pytest.mark.slow] if route.compiled else [], id=route.name)
        for route in listed
    ]
    return pytest.mark.parametrize("route", cases)


def drawn(route: Route) -> settings:
    """A graph is compiled anew for each example."""
    return settings(max_examples=5 if route.compiled else 40)


def close(actual: Tensor, expected: Tensor) -> None:
    """float32 beside float64."""
    torch.testing.assert_close(actual.detach().double(), expected.detach(), rtol=2e-5, atol=2e-5)


def attended(route: Route, case: Case, pull: Tensor) -> dict[str, Tensor]:
    """Output, lse, weights and gradients by a route."""
    call = route.call(hw.attention)
    for _ in range(route.warm_up):
        call(case.q, case.k, case.v, case.mask, **case.options)
    output, weights = call(case.q, case.k, case.v, case.mask, **case.options, backend=route.backend)
    actual = {"output": output, "lse": weights.lse, "weights": weights.dense()}
    return actual | gradients(case, output, pull)


def by_equations(case: Case, pull: Tensor) -> dict[str, Tensor]:
    """The same by reference.py, in the case's own dtype."""
    output, weights, lse = case.reference()
    return {"output": output, "lse": lse, "weights": weights} | gradients(case, output, pull)


def gradients(case: Case, output: Tensor, pull: Tensor) -> dict[str, Tensor]:
    leaves = {name: leaf for name, leaf in case.leaves().items() if leaf.requires_grad}
    if not leaves:
        return {}
    actual = torch.autograd.grad(output, list(leaves.values()), pull.to(output.dtype), allow_unused=True)
    return {
        name: torch.zeros_like(leaves[name]) if g is None else g
        for name, g in zip(leaves, actual, strict=True)
    }


@by_every(routes.ATTENTION)
@pytest.mark.usefixtures("fresh_compiler")
def test_attention(route: Route) -> None:
    @drawn(route)
    @given(CASES(most=13), st.booleans())
    def judge(case: Case, learns: bool) -> None:
        pull = case.v.new_ones(*case.q.shape[:3], case.v.shape[-1])
        ours, plain, truth = case.to(FLOAT), case.to(FLOAT), case
        if learns:
            ours, plain, truth = ours.with_gradients(), plain.with_gradients(), truth.with_gradients()
        with route.taken():
            try:
                actual = attended(route, ours, pull)
            except errors.BackendUnavailable:
                assert route.backend == "flash"  # no soft cap, no gradient of a bias
                return
        beside, exact, size = by_equations(plain, pull), by_equations(truth, pull), sizes(case, pull)
        for name, expected in exact.items():
            times = 3.0 if name in case.leaves() else 2.0
            assert_judged(
                actual[name], beside[name], expected, dtype=FLOAT, size=size[name], times=times, name=name
            )

    judge()


@by_every(routes.ROW)
@given(CASES(most=13), st.data())
def test_one_row_of_a_map(route: Route, case: Case, data: st.DataObject) -> None:
    near = case.to(FLOAT)
    weights = hw.attention(near.q, near.k, near.v, near.mask, **near.options)[1]
    b, h, i = (data.draw(st.integers(0, size - 1)) for size in weights.shape[:3])
    expected = case.reference()[1]
    with route.taken():
        close(weights[b, h, i], expected[b, h, i])
        close(weights[b, :, i], expected[b, :, i])


def of_module(mha: hw.MultiHeadAttention, x: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """(output, weights) of `mha(x)` in float64, by the equations."""
    B, T, _ = x.shape
    weights = {name: tensor.double() for name, tensor in mha.state_dict().items()}

    def heads(name: str, count: int) -> Tensor:
        y = x.double() @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
        return y.view(B, T, count, -1).transpose(1, 2)

    H, Hk = mha.num_heads, mha.num_kv_heads
    message, visible, _ = reference.attention(
        heads("q_proj", H), heads("k_proj", Hk), heads("v_proj", Hk), mask=mask, scale=mha.scale
    )
    joined = message.transpose(1, 2).flatten(2)
    return joined @ weights["out_proj.weight"].T + weights["out_proj.bias"], visible


@st.composite
def modules(draw: st.DrawFn) -> tuple[hw.MultiHeadAttention, Tensor]:
    """A module without options but scale and causal, and its input."""
    Hk, groups, D = draw(PRIMES), draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([8, 16, 5]))
    torch.manual_seed(draw(st.integers(0, 99)))
    mha = hw.MultiHeadAttention(
        Hk * groups * D, Hk * groups, num_kv_heads=Hk, causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.3])),
    )  # fmt: skip
    for parameter in mha.parameters():
        nn.init.normal_(parameter, std=mha.d_model**-0.5)
    return mha, torch.randn(draw(st.integers(1, 3)), draw(PRIMES), mha.d_model)


def causal(mha: hw.MultiHeadAttention) -> Mask:
    return Mask.causal() if mha.causal else Mask()


@by_every(routes.MODULE)
@pytest.mark.usefixtures("fresh_compiler")
def test_the_module(route: Route) -> None:
    @drawn(route)
    @given(modules(), st.booleans(), st.booleans())
    def judge(made: Made, padded: bool, learns: bool) -> None:
        mha, x = made
        lengths = torch.arange(len(x)) % x.shape[1] + 1
        mask = Mask.padding(lengths) if padded else None
        expected, visible = of_module(mha, x, causal(mha) & (Mask.padding(lengths) if padded else Mask()))
        with route.taken(), torch.set_grad_enabled(learns):
            call = route.call(mha)
            for _ in range(route.warm_up):
                call(x, mask=mask)
            output, weights = call(x, mask=mask)
            close(output, expected)
            close(weights.dense(), visible)

    judge()


@by_every(routes.LENGTHS)
@given(modules(), st.booleans())
def test_the_module_with_lengths(route: Route, made: Made, learns: bool) -> None:
    mha, x = made
    lengths = torch.arange(len(x)) % x.shape[1] + 1
    expected, _ = of_module(mha, x, causal(mha) & Mask.padding(lengths))
    real = torch.arange(x.shape[1]) < lengths[:, None]
    with route.taken(), torch.set_grad_enabled(learns):
        output = mha(x, lengths=lengths)[0]
    close(output, expected.masked_fill(~real[..., None], 0.0))


@by_every(routes.STEPS)
@given(modules())
def test_the_module_token_by_token(route: Route, made: Made) -> None:
    mha, x = made
    mha.causal = True
    expected, _ = of_module(mha, x, Mask.causal())
    cache = mha.cache()
    with route.taken(), torch.no_grad():
        steps = [mha(x[:, i : i + 1], cache=cache)[0] for i in range(x.shape[1])]
    close(torch.cat(steps, 1), expected)


@by_every(routes.CLASS)
@pytest.mark.usefixtures("fresh_compiler")
def test_torchs_class(route: Route) -> None:
    """Beside torch's own class in float64, which is judged by reference.py in test_drop_in*.py."""

    @drawn(route)
    @given(
        st.sampled_from([2, 3, 4]), PRIMES, st.integers(1, 3),
        st.sampled_from(["none", "bool", "float"]), st.booleans(), st.sampled_from(["no", "mean", "heads"]),
        st.booleans(), st.integers(0, 99),
    )  # fmt: skip
    def judge(
        H: int, L: int, N: int, mask: str, padded: bool, requested: str, learns: bool, seed: int
    ) -> None:
        torch.manual_seed(seed)
        ours = hw.nn.MultiheadAttention(8 * H, H, batch_first=True).eval()
        theirs = nn.MultiheadAttention(8 * H, H, batch_first=True).double().eval()
        theirs.load_state_dict(ours.state_dict())
        x = torch.randn(N, L, 8 * H)
        options: dict[str, Any] = {
            "need_weights": requested != "no",
            "average_attn_weights": requested == "mean",
        }
        hides = torch.ones(L, L, dtype=torch.bool).triu(1)
        padding = torch.arange(L) >= (torch.arange(N) % L + 1)[:, None]
        if mask != "none":
            options["attn_mask"] = hides
        if padded:
            options["key_padding_mask"] = padding
        expected = theirs(x.double(), x.double(), x.double(), **options)
        if mask == "float":
            options["attn_mask"] = torch.zeros(L, L).masked_fill(hides, -torch.inf)
            if padded:
                options["key_padding_mask"] = torch.zeros(N, L).masked_fill(padding, -torch.inf)
        with route.taken(), torch.set_grad_enabled(learns):
            output, weights = route.call(ours)(x, x, x, **options)
        close(output, expected[0])
        assert (weights is None) is (requested == "no")
        if weights is not None:
            close(weights, expected[1])

    judge()


@by_every(routes.GENERATION)
def test_generation(route: Route) -> None:
    sizes = {"vocab_size": 31, "d_model": 24, "num_heads": 3, "num_layers": 3, "max_length": 40}
    torch.manual_seed(1)
    model = hw.models.Transformer(hw.models.TransformerConfig(**sizes)).eval()
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad(), route.taken():
        new = model.generate(ids, 11, temperature=0)
    whole, exact = ids, model.double()
    with torch.no_grad():
        for _ in range(11):  # the whole text anew for each token
            whole = torch.cat([whole, exact(whole)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(torch.cat([ids, new], 1), whole)


@by_every(routes.WATCHED)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_watched_model(route: Route, family: str) -> None:
    model, ids = getattr(small_models, family)(attn_implementation="eager"), small_models.tokens()
    with torch.no_grad():
        expected = model(ids, output_attentions=True)
        model.set_attn_implementation("sdpa")
        with route.taken(), hw.watch(model, keep=True) as heads:
            actual = model(ids)
    close(actual.logits, expected.logits)
    for number, weights in enumerate(expected.attentions):
        close(heads[number].map.dense(), weights)
