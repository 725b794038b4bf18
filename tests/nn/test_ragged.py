"""Ragged batches: `lengths=` and `documents=` are the padded call, without the padding."""

from __future__ import annotations

import gc
import inspect
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import headwise as hw
from headwise import Mask
from headwise.engines import packed_sequences
from headwise.errors import ArgumentError, MaskError, ShapeError
from headwise.nn import Buckets, MultiHeadAttention, QKNorm, Rope, ragged
from judge import assert_judged, largest

E, H, Hk, D, Dv = 22, 6, 3, 8, 5
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": 3},
    "band": {"window": (2, 1)},
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 1.5, "causal": True},
    "sinks": {"sinks": True, "window": (1, 3)},
    "rope": {"rope": Rope(dims=6), "causal": True},
    "alibi": {"alibi": True},
    "relative bias": {"relative_bias": Buckets(8, 16), "causal": True},
    "qk norm": {"qk_norm": "rms"},
    "whole qk norm": {"qk_norm": QKNorm("layer", whole=True), "sinks": True},
    "gate": {"gate": "head"},
    "gate of channels": {"gate": "channel", "softcap": 2.0},
}
WAYS = {"one by one": 0, "side by side": 2**60}  # of attention on a CPU, by what counts as short


def made(dtype: torch.dtype = torch.float64, **options: Any) -> MultiHeadAttention:
    """A module whose every parameter matters."""
    torch.manual_seed(7)
    module = MultiHeadAttention(
        E, H, num_kv_heads=Hk, head_dim=D, value_dim=Dv, dtype=torch.float64, **options
    )
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module.to(dtype)


def drawn(B: int, T: int, dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(B * T)
    return torch.randn(B, T, E, dtype=torch.float64).to(dtype)


def real_of(lengths: list[int], T: int) -> Tensor:
    return torch.arange(T) < torch.tensor(lengths)[:, None]


@st.composite
def lengths(draw: Any) -> tuple[int, list[int]]:
    """T, and lengths of which some may be 0 or T."""
    T = draw(st.sampled_from((1, 5, 11, 17)))
    return T, draw(st.lists(st.integers(0, T), min_size=1, max_size=5))


def same(actual: Tensor, truth: Tensor, name: str = "", times: float = 2.0, size: float = 1.0) -> None:
    size = max(size, largest(truth)) * 8  # sums of a few dozen terms
    assert_judged(actual, truth, truth, dtype=torch.float64, size=size, times=times, name=name)


# Lengths


@settings(max_examples=25)
@given(
    batch=lengths(),
    option=st.sampled_from(sorted(OPTIONS)),
    way=st.sampled_from(sorted(WAYS)),
    given_as=st.sampled_from(["list", "tensor", "int32"]),
)
def test_a_ragged_batch_is_the_padded_one(
    batch: tuple[int, list[int]], option: str, way: str, given_as: str
) -> None:
    T, counts = batch
    module, x, real = made(**OPTIONS[option]), drawn(len(counts), T), real_of(counts, T)
    noise = x.masked_fill(~real[..., None], torch.nan)  # whatever stands there
    lengths: Any = counts if given_as == "list" else torch.tensor(counts)
    lengths = lengths.int() if given_as == "int32" else lengths
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged, "SHORT", WAYS[way])
        output, weights = module(noise, lengths=lengths)
        message = module.head_outputs(noise, lengths=lengths)
        assert module(noise, lengths=lengths, need_weights=False)[1] is None
    expected, theirs = module(x, mask=Mask.padding(counts))
    assert not output[~real].any() and not message.transpose(1, 2)[~real].any()
    same(output[real], expected[real], "output")
    same(
        message.transpose(1, 2)[real], module.head_outputs(x, mask=Mask.padding(counts)).transpose(1, 2)[real]
    )
    assert weights is not None and weights.shape == theirs.shape
    same(weights.dense().transpose(1, 2)[real], theirs.dense().transpose(1, 2)[real], "weights")
    same(weights.lse.transpose(1, 2)[real], theirs.lse.transpose(1, 2)[real], "lse")
    same(weights.pooled(3), theirs.pooled(3), "picture")
    some = real.any(1)
    measured, truth = weights.statistics(), theirs.statistics()
    for name in truth:
        same(measured[name][some].nan_to_num(), truth[name][some].nan_to_num(), name)


@pytest.mark.thinned
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_are_those_of_the_padded_call(
    option: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the output, the weights and their entropy, to the tokens and every parameter."""
    monkeypatch.setattr(ragged, "SHORT", WAYS[way])
    module, x, counts = made(**OPTIONS[option]), drawn(5, 11), [3, 0, 11, 7, 1]
    real = real_of(counts, 11)
    pull, weigh = torch.randn(5, 11, E).double(), torch.randn(5, H, 11, 11).double() * real[:, None, :, None]

    def gradients(**options: Any) -> tuple[Tensor, ...]:
        leaf = x.clone().requires_grad_()
        output, weights = module(leaf, **options)
        entropy = weights.statistics("entropy").entropy[[0, 2, 3, 4]]
        loss = (output * pull)[real].sum() + (weights.dense() * weigh).sum() + entropy.sum()
        return torch.autograd.grad(loss, (leaf, *module.parameters()))

    expected = gradients(mask=Mask.padding(counts))
    size = max(map(largest, expected))  # of what cancels in the gradient of a key's bias
    for actual, truth in zip(gradients(lengths=counts), expected, strict=True):
        same(actual, truth, times=3.0, size=size)


def test_a_mask_of_positions_a_dense_one_and_a_bias_stand_beside_lengths() -> None:
    module, x, counts = made(), drawn(3, 7), [7, 2, 5]
    real, padding = real_of(counts, 7), Mask.padding(counts)
    visible = torch.rand(3, 1, 7, 7) < 0.6
    for mask in (Mask.causal(), Mask.dense(visible), visible):
        actual, expected = module(x, mask=mask, lengths=counts), module(x, mask=padding & mask)
        same(actual[0][real], expected[0][real])
        same(actual[1].dense().transpose(1, 2)[real], expected[1].dense().transpose(1, 2)[real])
    bias = torch.randn(3, H, 7, 7).double()
    same(module(x, bias=bias, lengths=counts)[0][real], module(x, bias=bias, mask=padding)[0][real])
    slopes = hw.scoring.alibi(H)
    same(module(x, bias=slopes, lengths=counts)[0][real], module(x, bias=slopes, mask=padding)[0][real])


def test_positions_are_the_callers_where_they_are_given() -> None:
    module, x, counts = made(rope=Rope()), drawn(3, 7), [7, 2, 5]
    at = torch.randint(0, 99, (3, 7))
    expected = module(x, positions=at, mask=Mask.padding(counts))[0]
    same(module(x, positions=at, lengths=counts)[0][real_of(counts, 7)], expected[real_of(counts, 7)])


def test_dropout_falls_on_the_weights_of_ragged_batches() -> None:
    module, x, counts = made(dropout=0.5), drawn(3, 7), [7, 2, 5]
    still = module.eval()(x, lengths=counts)[0]
    module.train()
    torch.manual_seed(3)
    first = module(x, lengths=counts)[0]
    torch.manual_seed(3)
    assert torch.equal(first, module(x, lengths=counts)[0]) and not torch.equal(first, still)
    assert not first[~real_of(counts, 7)].any()


def test_only_real_tokens_reach_the_projections() -> None:
    module, visible = made(), []
    hooks = [
        layer.register_forward_hook(lambda layer, args, _: visible.append(args[0].shape))
        for layer in (module.q_proj, module.v_proj, module.out_proj)
    ]
    module(drawn(3, 7), lengths=[7, 2, 5])
    assert visible == [(1, 14, E), (1, 14, E), (1, 14, H * Dv)]
    for hook in hooks:
        hook.remove()


def test_a_map_made_later_has_the_gradients_of_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged, "SHORT", 0)
    x = drawn(2, 5).requires_grad_()
    _, weights = made()(x, lengths=[5, 2])
    with torch.inference_mode():
        assert weights.shape == (2, H, 5, 5)
    assert weights.requires_grad and weights.dense().square().sum().backward() is None
    assert x.grad is not None and x.grad.any()
    with torch.inference_mode():
        _, weights = made()(drawn(2, 5), lengths=[5, 2])
    assert weights.dense().shape == (2, H, 5, 5)


def test_a_map_made_later_refuses_what_was_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged, "SHORT", 0)
    module = made(sinks=True)
    _, weights = module(drawn(2, 5), lengths=[5, 2])
    with torch.no_grad():
        module.sinks.add_(1.0)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="one was written to in place"):
            weights.statistics()


def test_what_is_written_to_lengths_later_does_not_reach_the_map() -> None:
    counts = torch.tensor([5, 2])
    module, x = made(), drawn(2, 5)
    _, weights = module(x, lengths=counts)
    counts.fill_(1)
    assert weights.mask == Mask.padding([5, 2], real_of([5, 2], 5))


def test_nothing_is_kept_of_the_tokens() -> None:
    """Places of tokens are kept from call to call, by numbers alone, and can be saved for a backward."""
    module = made()
    with torch.inference_mode():
        module(drawn(2, 5), lengths=[4, 3])
    x = drawn(2, 5).requires_grad_()
    module(x, lengths=[4, 3])[0].sum().backward()
    assert x.grad is not None
    del x
    gc.collect()
    held = packed_sequences._cached_places((0, 5), (4, 3), torch.device("cpu"), 0)
    assert not held.tokens.is_inference() and held.tokens.tolist() == [0, 1, 2, 3, 5, 6, 7]


@pytest.mark.parametrize("counts", [[0, 0], [5, 5], []])
def test_batches_of_nothing_and_of_no_padding(counts: list[int]) -> None:
    module, x = made(causal=True), drawn(len(counts) or 1, 5)[: len(counts)].requires_grad_()
    output, weights = module(x, lengths=counts)
    expected = module(x, mask=Mask.padding(torch.tensor(counts, dtype=torch.int64)))[0]
    same(output, expected.masked_fill(~real_of(counts, 5)[..., None] if counts else expected.bool(), 0))
    assert weights.shape == (len(counts), H, 5, 5)
    output.sum().backward()
    assert all(p.grad is not None for p in module.parameters())


# Documents


@st.composite
def documents(draw: Any) -> Tensor:
    """int [B, T], in runs."""
    B, T = draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from((1, 5, 11, 17)))
    rows = [draw(st.lists(st.booleans(), min_size=T, max_size=T)) for _ in range(B)]
    return torch.tensor(rows).cumsum(1) * 3 - 1


def restarted(ids: Tensor) -> Tensor:
    """Positions that begin anew with each document."""
    spots = torch.arange(ids.shape[1]).expand_as(ids)
    new = torch.ones_like(ids, dtype=torch.bool)
    new[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return spots - (spots * new).cummax(1).values


@settings(max_examples=20)
@given(ids=documents(), option=st.sampled_from(sorted(OPTIONS)), way=st.sampled_from(sorted(WAYS)))
def test_packed_documents_are_masked_ones(ids: Tensor, option: str, way: str) -> None:
    module = made(**OPTIONS[option])
    x = drawn(*ids.shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged, "SHORT", WAYS[way])
        output, weights = module(x, documents=ids)
        message = module.head_outputs(x, documents=ids)
    at = None if module.rope is None else restarted(ids)
    expected, theirs = module(x, mask=Mask.documents(ids), positions=at)
    same(output, expected)
    same(message, module.head_outputs(x, mask=Mask.documents(ids), positions=at))
    assert weights is not None
    same(weights.dense(), theirs.dense())
    measured, truth = weights.statistics(), theirs.statistics()
    for name in truth:
        same(measured[name].nan_to_num(), truth[name].nan_to_num(), name)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_documents_are_those_of_the_masked_call(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ragged, "SHORT", WAYS[way])
    module, ids, pull = made(causal=True), torch.tensor([2, 2, 2, 0, 1, 1, 1]), torch.randn(3, 7, E).double()

    def gradients(**options: Any) -> tuple[Tensor, ...]:
        x = drawn(3, 7).requires_grad_()
        output, weights = module(x, **options)
        loss = (output * pull).sum() + weights.dense().square().sum()
        return torch.autograd.grad(loss, (x, *module.parameters()))

    for actual, truth in zip(gradients(documents=ids), gradients(mask=Mask.documents(ids)), strict=True):
        same(actual, truth, times=3.0)


@pytest.mark.parametrize("option", ["causal", "band", "sinks", "rope", "alibi"])
def test_a_map_of_documents_is_a_batch_of_them(option: str) -> None:
    module, x = made(**OPTIONS[option]), drawn(2, 7).requires_grad_()
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [5, 5, 2, 2, 2, 2, 2]])
    weights = module(x, documents=ids)[1].by_document()
    assert weights.shape == (4, H, 5, 5)
    parts = [x[0, :3], x[0, 3:], x[1, :2], x[1, 2:]]
    for document, part in enumerate(parts):
        alone = module(part[None])[1]
        n = len(part)
        same(weights[document, :, :n, :n], alone.dense()[0])
        truth, measured = alone.statistics("entropy", "distance"), weights.statistics("entropy", "distance")
        for name in truth:
            same(measured[name][document], truth[name][0], name)
    weights.statistics("entropy").entropy.sum().backward()
    assert x.grad is not None and x.grad.any()


def test_maps_that_are_no_batch_of_documents() -> None:
    module, x = made(), drawn(2, 7)
    ids = Mask.documents([0, 0, 0, 4, 4, 4, 4])
    with pytest.raises(MaskError, match=re.escape("got Mask(); make it with mha(x, documents=ids)")):
        module(x)[1].by_document()
    with pytest.raises(MaskError, match="only documents, causal and window: got also keys, queries; read"):
        module(x, mask=ids & Mask.padding([7, 3]))[1].by_document()
    with pytest.raises(MaskError, match="id 0 occurs again at token 3 of sequence 0"):
        module(x, mask=Mask.documents([0, 0, 1, 0, 2, 2, 2]))[1].by_document()
    with pytest.raises(
        ArgumentError, match="by_document must be called on a map of q and k: this map was made from weights"
    ):
        hw.AttentionMap.from_weights(torch.ones(1, 1, 2, 2) / 2).by_document()


# Compiled, heard, vmapped


def test_listeners_hear_the_padded_call_and_change_nothing() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mha = made(causal=True)

        def forward(self, x: Tensor, **options: Any) -> Tensor:
            output: Tensor = self.mha(x, **options)[0]
            return output

    model, x, counts = Layer(), drawn(3, 7), [7, 2, 5]
    for options, mask in (
        ({"lengths": counts}, Mask.padding(counts)),
        ({"documents": torch.tensor([0, 0, 0, 4, 4, 4, 4])}, Mask.documents([0, 0, 0, 4, 4, 4, 4])),
    ):
        plain = model(x, **options)
        with hw.watch(model) as heads:
            same(model(x, **options), plain)
        with hw.watch(model) as expected:
            model(x, mask=mask)
        same(heads[0].entropy, expected[0].entropy)
        with hw.ablate(model, {0: [1]}):
            cut = model(x, **options)
        assert not torch.equal(cut, plain)
        if "lengths" in options:
            assert not cut[~real_of(counts, 7)].any()
    with pytest.raises(ShapeError, match="2 for a batch of 3"), hw.watch(model):
        model(x, lengths=[7, 2])


@pytest.mark.slow
def test_compiled_calls_are_padded_and_say_the_same() -> None:
    module, x, counts = made(causal=True).eval(), drawn(3, 7), torch.tensor([7, 2, 5])
    torch.compiler.reset()
    run = torch.compile(module, backend="eager", fullgraph=True)
    for options in ({"lengths": counts}, {"documents": torch.tensor([0, 0, 0, 4, 4, 4, 4])}):
        same(run(x, need_weights=False, **options)[0], module(x, **options)[0])


def test_function_transforms_pass_ragged_batches() -> None:
    module, x, counts = made(causal=True), drawn(6, 5).view(3, 2, 5, E), [5, 2]
    actual = torch.vmap(lambda subject: module(subject, lengths=counts, need_weights=False)[0])(x)
    same(actual, torch.stack([module(subject, lengths=counts)[0] for subject in x]))


# On a GPU, as far as a CPU can tell


def flash(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, band: tuple[int, int], scale: float) -> Any:
    """What the kernel says of packed rows [N, H, D], by the equations: rows [N, H, D], lse [H, N]."""
    outputs, lse = [], []
    left, right = band
    for a, b in zip(offsets.tolist()[:-1], offsets.tolist()[1:], strict=True):
        heads = [x[a:b].transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], 0) for x in (q, k, v)]
        s = heads[0] @ heads[1].transpose(1, 2) * scale
        far = torch.arange(b - a) - torch.arange(b - a)[:, None]
        hidden = (far > right if right >= 0 else far < -b) | (far < -left if left >= 0 else far < -b)
        s = s.masked_fill(hidden, -torch.inf)
        outputs.append((s.softmax(-1) @ heads[2]).transpose(0, 1))
        lse.append(s.logsumexp(-1))
    return torch.cat(outputs), torch.cat(lse, 1)


def as_torchs(name: str, of: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes exactly what torch's operator of that name takes."""
    wanted = getattr(torch.ops.aten, name).default._schema.arguments
    kinds = inspect.Parameter
    signature = inspect.Signature(
        [
            kinds(
                a.name,
                kinds.KEYWORD_ONLY if a.kwarg_only else kinds.POSITIONAL_OR_KEYWORD,
                default=a.default_value if a.has_default_value() else kinds.empty,
            )
            for a in wanted
        ]
    )
    return lambda *args, **named: of(signature.bind(*args, **named).arguments)


def forward(options: dict[str, Any]) -> Any:
    assert options["cum_seq_q"].dtype == torch.int32 and options["dropout_p"] == 0.0
    counts = options["cum_seq_q"].diff()
    assert options["max_q"] >= int(counts.max()) and options["cum_seq_q"] is options["cum_seq_k"]
    assert all(
        options[name].shape[-1] % 8 == 0 and options[name].stride(-1) == 1 for name in ("query", "value")
    )
    band = (options["window_size_left"], options["window_size_right"])
    assert options["is_causal"] == (band == (-1, 0))
    q, k, v = options["query"], options["key"], options["value"]
    out, lse = flash(q, k, v, options["cum_seq_q"], band, options["scale"])
    return out, lse, torch.zeros(2), torch.zeros(0), torch.zeros(0)


def backward(options: dict[str, Any]) -> Any:
    leaves = [options[name].detach().requires_grad_() for name in ("query", "key", "value")]
    band = (options["window_size_left"], options["window_size_right"])
    with torch.enable_grad():
        out, lse = flash(*leaves, options["cum_seq_q"], band, options["scale"])
    same(options["out"], out)
    same(options["logsumexp"], lse)
    return torch.autograd.grad(out, leaves, options["grad_out"])


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Packed calls go to the kernel, whose part is played by the equations; the calls it had."""
    calls: list[str] = []

    def played(name: str, by: Callable[..., Any]) -> SimpleNamespace:
        op = as_torchs(name, by)
        return SimpleNamespace(default=lambda *args, **named: calls.append(name) or op(*args, **named))

    stage = SimpleNamespace(
        _flash_attention_forward=played("_flash_attention_forward", forward),
        _flash_attention_backward=played("_flash_attention_backward", backward),
    )
    monkeypatch.setattr(packed_sequences, "aten", stage)
    monkeypatch.setattr(packed_sequences, "has_kernel", lambda x: True)
    monkeypatch.setattr(packed_sequences, "why_not", lambda *_: None)
    return calls


@pytest.mark.parametrize("options", [{}, {"causal": True, "num_kv_heads": Hk}, {"scale": 0.7}], ids=str)
def test_a_module_without_options_goes_straight_to_the_kernel(
    options: dict[str, Any], as_on_a_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = MultiHeadAttention(E, H, head_dim=D, dtype=torch.float64, **options)
    counts, x = [3, 0, 11, 1], drawn(4, 11)
    monkeypatch.setattr(packed_sequences, "takes_rows", lambda x, head_dim: True)
    with torch.no_grad():
        output, weights = module(x, lengths=counts)
        expected, theirs = module(x, mask=Mask.padding(counts))
    real = real_of(counts, 11)
    same(output[real], expected[real])
    assert not output[~real].any() and as_on_a_gpu == ["_flash_attention_forward"]
    same(weights.dense().transpose(1, 2)[real], theirs.dense().transpose(1, 2)[real])
    same(weights.statistics("received").received, theirs.statistics("received").received)
    calls: list[Tensor] = []
    module.q_proj.register_forward_hook(lambda _, arguments, actual: calls.append(actual))
    with torch.no_grad():
        same(module(x, lengths=counts)[0][real], expected[real])
    assert len(calls) == 1


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("counts", [[3, 0, 11, 1], [0, 11, 0, 0]], ids=str)
def test_a_module_without_options_learns_straight_from_the_kernel(
    counts: list[int], causal: bool, as_on_a_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = MultiHeadAttention(E, H, head_dim=D, num_kv_heads=Hk, causal=causal, dtype=torch.float64)
    real = real_of(counts, 11)
    monkeypatch.setattr(packed_sequences, "takes_rows", lambda x, head_dim: True)
    actual, truth = [], []
    for answers, arguments in ((actual, {"lengths": counts}), (truth, {"mask": Mask.padding(counts)})):
        x = drawn(4, 11).requires_grad_()
        output, weights = module(x, **arguments)
        answers += [output[real], weights.dense().transpose(1, 2)[real]]
        loss = output[real].square().sum() + answers[1].square().sum()
        answers += torch.autograd.grad(loss, (x, *module.parameters()))
    size = max(map(largest, truth))
    for ours, theirs in zip(actual, truth, strict=True):
        same(ours, theirs, times=3.0, size=size)
    assert as_on_a_gpu == ["_flash_attention_forward", "_flash_attention_backward"]


@pytest.mark.parametrize("option", ["plain", "causal", "window", "band", "scale", "rope", "qk norm", "gate"])
def test_the_kernel_for_packed_sequences_is_given_what_it_takes(option: str, as_on_a_gpu: list[str]) -> None:
    module, counts, ids = made(**OPTIONS[option]), [3, 0, 11, 1], torch.tensor([1] * 4 + [0] * 7)
    real = real_of(counts, 11)
    for options, mask, saved, at in (
        ({"lengths": counts}, Mask.padding(counts), real, None),
        ({"documents": ids}, Mask.documents(ids), torch.ones_like(real), restarted(ids[None])),
    ):
        at = None if module.rope is None else at
        actual, truth = [], []
        for answers, arguments in ((actual, options), (truth, {"mask": mask, "positions": at})):
            x = drawn(4, 11).requires_grad_()
            output, weights = module(x, **arguments)
            answers += [output[saved], weights.dense().transpose(1, 2)[saved]]
            answers += [weights.lse.transpose(1, 2)[saved], weights.statistics("received").received]
            loss = output[saved].square().sum() + answers[1].square().sum()
            answers += torch.autograd.grad(loss, (x, *module.parameters()))
        size = max(map(largest, truth))  # of what cancels in the gradient of a key's bias
        for ours, theirs in zip(actual, truth, strict=True):
            same(ours, theirs, times=3.0, size=size)
    assert as_on_a_gpu == ["_flash_attention_forward", "_flash_attention_backward"] * 2


def test_sequences_of_one_token_do_not_take_the_kernels_short_cut(as_on_a_gpu: list[str]) -> None:
    """Of one query each, with fewer key heads, it would count on a token in every sequence."""
    module, counts = made(), [1, 0, 1]
    real = real_of(counts, 5)
    expected = module(drawn(3, 5), mask=Mask.padding(counts))[0]
    same(module(drawn(3, 5), lengths=counts)[0][real], expected[real])
    assert packed_sequences._longest(packed_sequences.Runs.of_lengths((1, 0, 1), 5)) == 2


def test_second_derivatives_pass_the_kernel_by(as_on_a_gpu: list[str]) -> None:
    module, counts = made(causal=True), [3, 0, 5]

    def twice(**options: Any) -> Tensor:
        x = drawn(3, 5).requires_grad_()
        output = module(x, **options)[0][real_of(counts, 5)]
        (grad,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    same(twice(lengths=counts), twice(mask=Mask.padding(counts)), times=3.0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"sinks": True}, "it takes no sinks"), ({"softcap": 1.5}, "it has no soft cap (softcap=1.5)")],
)
def test_what_the_kernel_cannot_take_goes_side_by_side(
    options: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, counts, reasons = made(**options), [3, 0, 5], []
    why_not = packed_sequences.why_not
    monkeypatch.setattr(packed_sequences, "has_kernel", lambda x: True)
    monkeypatch.setattr(
        packed_sequences, "why_not", lambda *call: reasons.append(why_not(*call)) or reasons[-1]
    )
    actual = module(drawn(3, 5), lengths=counts)[0]
    same(actual[real_of(counts, 5)], module(drawn(3, 5), mask=Mask.padding(counts))[0][real_of(counts, 5)])
    assert reasons == [reason]


# What cannot be


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"lengths": [7, 2]}, ShapeError, "one number per sequence: 2 for a batch of 3"),
        ({"lengths": [7, 8, 1]}, MaskError, "got 8 for 7; cut or pad"),
        ({"lengths": torch.tensor([7, -1, 1])}, MaskError, "got -1 for 7"),
        ({"lengths": [7.0, 2.0, 1.0]}, MaskError, "must be integers [B]: got float32[3]"),
        ({"lengths": [[7], [2], [1]]}, MaskError, "must be integers [B]: got int64[3, 1]"),
        (
            {"lengths": torch.ones(3, 7, dtype=torch.bool)},
            MaskError,
            "got bool[3, 7]; use mask.sum(-1) if padding comes last",
        ),
        (
            {"lengths": [7, 2, 1], "documents": [0] * 7},
            ArgumentError,
            "lengths must not be given with documents",
        ),
        ({"documents": torch.zeros(3, 5).long()}, ShapeError, "got [3, 5] for [3, 7]"),
        ({"documents": torch.zeros(2, 7).long()}, ShapeError, "got [2, 7] for [3, 7]"),
        ({"documents": [0, 0, 1, 1, 0, 2, 2]}, MaskError, "id 0 occurs again at token 4 of sequence 0"),
        ({"documents": torch.zeros(7)}, MaskError, "must be integers [S] or [B, S]: got float32[7]"),
    ],
)
def test_lengths_and_documents_that_do_not_fit(options: Any, error: type[Exception], words: str) -> None:
    module, x = made(), drawn(3, 7)
    with pytest.raises(error, match=re.escape(words)):
        module(x, **options)
    with pytest.raises(error, match=re.escape(words)):
        module.head_outputs(x, **options)


def test_lengths_and_documents_are_for_self_attention() -> None:
    module, x = made(), drawn(3, 7)
    with pytest.raises(ArgumentError, match=re.escape("got key or value float64 [3, 7, 22]; use")):
        module(x, x, x, lengths=[7, 2, 1])
    with pytest.raises(
        ArgumentError, match="documents must not be given in cross-attention: got key or value"
    ):
        module(x, x, x, documents=[0] * 7)
    with pytest.raises(ArgumentError, match="documents must not be given with a cache: got KVCache"):
        module(x, documents=[0] * 7, cache=hw.nn.KVCache())
    with pytest.raises(ShapeError, match=re.escape("query must have 3 dimensions [B, T, d_model]: got 2")):
        module(x[0], lengths=[7])
