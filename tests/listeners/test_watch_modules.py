"""Modules of torch, of headwise and of nobody in particular through `attach`."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import headwise as hw
from headwise.errors import AttentionBypassed
from headwise.listeners.active import LayerCall
from headwise.listeners.adapters import attach
from heard import Heard
from judge import error

DOUBLE = torch.float64
EXACT = 1e-10
B, T, E, H = 2, 7, 16, 4


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def hooks(model: nn.Module) -> Any:
    return [
        (
            len(m._forward_pre_hooks),
            len(m._forward_hooks),
            len(m._forward_hooks_always_called),
            sorted(m.__dict__),
        )
        for m in model.modules()
    ]


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Any:
    before = torch._C._len_torch_function_stack()
    yield
    assert torch._C._len_torch_function_stack() == before


def listen(
    model: nn.Module, *args: Any, fallback: str | None = None, **kwargs: Any
) -> tuple[Any, list[LayerCall]]:
    """(output, calls); the output is that without listening, and nothing stays on the model."""
    outside, marks, listener = model(*args, **kwargs), hooks(model), Heard()
    with attach(model, listener, fallback):
        inside = model(*args, **kwargs)
    assert hooks(model) == marks
    for a, b, c in zip(*(leaves(x) for x in (outside, inside, model(*args, **kwargs))), strict=True):
        assert error(b, a) < 1e-9
        assert torch.equal(c, a)
    return inside, listener.calls


def leaves(output: Any) -> list[Tensor]:
    if isinstance(output, (Tensor, hw.AttentionMap)):
        return [output if isinstance(output, Tensor) else output.dense()]
    return [x for part in output or () for x in leaves(part)]


# Whoever calls torch's fused function


class Fused(nn.Module):
    """Someone's own attention."""

    def __init__(
        self, num_kv_heads: int = H, lead: tuple[int, ...] = (B,), heads: int = H, **options: Any
    ) -> None:
        super().__init__()
        self.q, self.k, self.v = (
            nn.Linear(E, n * 8, dtype=DOUBLE) for n in (heads, num_kv_heads, num_kv_heads)
        )
        self.counts, self.lead, self.options = (heads, num_kv_heads, num_kv_heads), lead, options
        self.fused_attn = True

    def qkv(self, x: Tensor) -> list[Tensor]:
        parts = (
            layer(x).unflatten(-1, (n, 8))
            for layer, n in zip((self.q, self.k, self.v), self.counts, strict=True)
        )
        return [part.transpose(-2, -3) for part in parts]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        return functional.scaled_dot_product_attention(q, k, v, **self.options)


def expected_weights(model: Fused, x: Tensor) -> Tensor:
    q, k, _ = model.qkv(x)
    options, rows, columns = model.options, x.shape[-2], x.shape[-2]
    k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    scores = q @ k.mT * (options.get("scale") or 8**-0.5)
    mask = options.get("attn_mask")
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if options.get("is_causal"):
        scores = scores.masked_fill(torch.ones(rows, columns).triu(1).bool(), -torch.inf)
    return scores.softmax(-1)


PAD = torch.ones(B, 1, 1, T, dtype=torch.bool)
PAD[0, ..., 5:] = False
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.7},
    "padded": {"attn_mask": PAD},
    "bool mask": {"attn_mask": torch.ones(T, T).tril(2).bool()},
    "float mask": {"attn_mask": numbers(B, H, T, T, seed=3)},
    "float mask that hides": {
        "attn_mask": numbers(T, T).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    },
    "grouped": {"num_kv_heads": 2, "enable_gqa": True, "is_causal": True},
}


@pytest.mark.parametrize("name", list(CASES))
def test_modules_that_call_the_fused_function(name: str) -> None:
    model, x = Fused(**CASES[name]), numbers(B, T, E)
    _, (call,) = listen(model, x)
    assert call.path == "" and call.kind == "self"
    assert error(call.weights.dense(), expected_weights(model, x)) < EXACT
    if name == "padded":
        assert torch.equal(call.weights.mask.counted(T), PAD[:, 0, 0])


class InThree(Fused):
    def qkv(self, x: Tensor) -> list[Tensor]:
        return [part.flatten(0, 1) for part in super().qkv(x)]  # [B * H, T, D]


def test_inputs_of_three_and_of_five_dimensions() -> None:
    x = numbers(B, T, E)
    model = InThree()
    _, (call,) = listen(model, x)
    assert error(call.weights.dense().squeeze(1), expected_weights(model, x)) < EXACT
    x = numbers(2, 3, T, E)
    model = Fused(is_causal=True)
    output, (call,) = listen(model, x)
    assert output.shape == (2, 3, H, T, 8)
    assert error(call.weights.dense(), expected_weights(model, x).flatten(0, 1)) < EXACT


def test_calls_inside_other_modules_are_named_by_the_innermost() -> None:
    model = nn.Sequential(nn.Linear(E, E, dtype=DOUBLE), Fused(), nn.Flatten(2))
    _, calls = listen(model, numbers(B, T, E))
    assert [call.path for call in calls] == ["1"]


class TwoWays(Fused):
    """As timm's: fused or not by a flag."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused_attn = fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        if self.fused_attn:
            return functional.scaled_dot_product_attention(q, k, v)
        return (q * 8**-0.5 @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize("fused", [True, False])
def test_a_flag_that_chooses_the_fused_way_is_turned_on_for_a_while(fused: bool) -> None:
    model, x = TwoWays(fused), numbers(B, T, E)
    outside, listener = model(x), Heard()
    with attach(model, listener):
        assert model.fused_attn
        assert error(model(x), outside) < EXACT
    assert model.fused_attn is fused
    assert error(listener.calls[0].weights.dense(), expected_weights(model, x)) < EXACT


class OwnAttention(TwoWays):
    def __init__(self, heads: int = H) -> None:
        super().__init__(False)
        del self.fused_attn
        self.num_heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        return (q * 8**-0.5 @ k.mT).softmax(-1) @ v


class SplitAttention(OwnAttention):
    """Two softmaxes, neither of which is the weights."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        near = (q * 8**-0.5 @ k[:, :, :3].mT).softmax(-1) @ v[:, :, :3]
        return near + (q * 8**-0.5 @ k[:, :, 3:].mT).softmax(-1) @ v[:, :, 3:]


class PartialAttention(OwnAttention):
    """One softmax for some of the rows; the others are as they were."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        first = (q[:, :, :3] * 8**-0.5 @ k.mT).softmax(-1) @ v
        return torch.cat([first, v[:, :, 3:]], 2)


class FirstAttention(OwnAttention):
    """The class token attends, as CrossViT's and VOLO's does: one query, and one row comes out."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        first = (q[:, :, :1] * 8**-0.5 @ k.mT).softmax(-1) @ v
        return first.transpose(1, 2).flatten(2)


class ShiftedWindowAttention(OwnAttention):
    """As torchvision's Swin writes it: windows of `side` x `side`, shifted, filled up at the edges."""

    def __init__(self, side: int, heads: int = H) -> None:
        super().__init__(heads)
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        (batch, height, width, _), side = x.shape, self.side
        x = functional.pad(x, (0, 0, 0, -width % side, 0, -height % side)).roll((-1, -1), (1, 2))
        rows, columns = x.shape[1] // side, x.shape[2] // side
        x = x.view(batch, rows, side, columns, side, E).transpose(2, 3).reshape(-1, side * side, E)
        q, k, v = self.qkv(x)
        self.weights = (q * 8**-0.5 @ k.mT).softmax(-1)  # [batch * rows * columns, heads, side * side, ...]
        out = self.weights @ v
        out = out.transpose(1, 2).reshape(batch, rows, columns, side, side, -1).transpose(2, 3)
        out = out.reshape(batch, rows * side, columns * side, -1).roll((1, 1), (1, 2))
        return out[:, :height, :width]


class GridAttention(OwnAttention):
    """As torchvision's MaxViT writes it: windows in a dimension of their own, [B, windows, H, T, S]."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        return (q * 8**-0.5 @ k.mT).softmax(-1) @ v


def test_attention_written_out_is_refused_by_name_or_read() -> None:
    model, x = nn.Sequential(OwnAttention()), numbers(B, T, E)
    with pytest.raises(AttentionBypassed, match=r"OwnAttention \(0\)"), attach(model, Heard()):
        model(x)
    _, (call,) = listen(model, x, fallback="eager")
    assert error(call.weights.dense(), expected_weights(model[0], x)) < EXACT  # type: ignore[arg-type]
    assert call.output is None and call.value is None
    _, calls = listen(model, x, fallback="skip")
    assert not calls


def test_layers_with_fewer_queries_than_positions_are_read() -> None:
    """LeViT, MViTv2 and CrossViT were advised fallback="eager", which then refused them."""
    model, x = FirstAttention(), numbers(B, T, E)
    _, (call,) = listen(model, x, fallback="eager")
    assert error(call.weights.dense(), expected_weights(model, x)[:, :, :1]) < EXACT
    assert call.kind == "cross"  # one query, which stands nowhere among the keys


def test_attention_inside_windows_is_read() -> None:
    """torchvision's Swin was advised fallback="eager", which then refused it: its rows are not positions."""
    model, x = ShiftedWindowAttention(3), numbers(B, 6, 9, E)
    _, (call,) = listen(model, x, fallback="eager")
    assert tuple(call.weights.shape) == (B * 6, H, 9, 9)
    assert torch.equal(call.weights.dense(), model.weights)
    grid = GridAttention()
    _, (call,) = listen(grid, numbers(B, 3, T, E), fallback="eager")
    assert error(call.weights.dense(), expected_weights(grid, numbers(B, 3, T, E)).flatten(0, 1)) < EXACT


@pytest.mark.parametrize(("side", "sizes"), [(3, (5, 7)), (5, (3, 4))])
def test_windows_that_are_filled_up_are_not_read(side: int, sizes: tuple[int, int]) -> None:
    """What fills a window up would count as queries."""
    model, x = ShiftedWindowAttention(side), numbers(B, *sizes, E)
    with (
        pytest.raises(AttentionBypassed, match=f"whose {side**2} queries are not all positions"),
        attach(model, Heard(), "eager"),
    ):
        model(x)


def test_windows_that_cannot_be_told_from_heads_are_not_read() -> None:
    """HaloNet's softmax is [B * H, windows, T, S]: with as many windows as heads it looks like Swin's."""
    message = r"\[8, 4, 9, 9\], in which windows and heads cannot be told apart"
    with (
        pytest.raises(AttentionBypassed, match=message),
        attach(model := ShiftedWindowAttention(3), Heard(), "eager"),
    ):
        model(numbers(B, 6, 6, E))


@pytest.mark.parametrize("kind", [SplitAttention, PartialAttention])
def test_parts_of_attention_are_not_taken_for_weights(kind: type[OwnAttention]) -> None:
    """What is advised works: fallback="eager" is named only where it reads the layer."""
    model = kind()
    with pytest.raises(AttentionBypassed, match=kind.__name__), attach(model, Heard(), "eager"):
        model(numbers(B, T, E))
    with pytest.raises(AttentionBypassed, match=kind.__name__) as refused, attach(model, Heard()):
        model(numbers(B, T, E))
    assert "fallback='eager'" not in str(refused.value) and "fallback='skip'" in str(refused.value)


class Broadcast(Fused):
    """One sequence of queries for all of the keys, as learned queries are."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        return functional.scaled_dot_product_attention(q[:1], k, v)


class Sequences(nn.Module):
    """Queries or keys of one sequence for all, in three dimensions."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.which = which

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (q[:1], k, v) if self.which == 0 else (q, k[:1], v[:1])
        return functional.scaled_dot_product_attention(q, k, v)


def test_queries_broadcast_over_the_batch_are_heard() -> None:
    """q [1, ...] beside k [5, ...] raised a RuntimeError of `expand` inside the model."""
    model, x = Broadcast(), numbers(5, T, E)
    _, (call,) = listen(model, x)
    q, k, _ = model.qkv(x)
    assert error(call.weights.dense(), (q[:1] @ k.mT * 8**-0.5).softmax(-1)) < EXACT
    for which in range(2):  # and without heads, whichever of the two is one for all
        q, k, v = Fused(1, heads=1).qkv(numbers(5, T, E))
        _, (call,) = listen(Sequences(which), q[:, 0], k[:, 0], v[:, 0])
        q, k = (q[:1], k) if which == 0 else (q, k[:1])
        assert error(call.weights.dense(), (q @ k.mT * 8**-0.5).softmax(-1)) < EXACT
    module, x = (
        Fused(heads=1, num_kv_heads=H),
        numbers(B, T, E),
    )  # and one head of queries for several of keys
    _, (call,) = listen(module, x)
    q, k, _ = module.qkv(x)
    assert error(call.weights.dense(), (q @ k.mT * 8**-0.5).softmax(-1)) < EXACT


# torch.nn.MultiheadAttention


HIDDEN = torch.zeros(B, T, dtype=torch.bool)
HIDDEN[0, 5:] = True
TRIU = torch.ones(T, T).triu(1).bool()
MHA: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "without biases": ({"bias": False}, {}),
    "appended keys": ({"add_bias_kv": True, "add_zero_attn": True}, {}),
    "appended and masked": ({"add_zero_attn": True}, {"attn_mask": TRIU, "key_padding_mask": HIDDEN}),
    "causal": ({}, {"attn_mask": TRIU, "is_causal": True}),
    "causal in floats": ({}, {"attn_mask": torch.zeros(T, T, dtype=DOUBLE).masked_fill(TRIU, -torch.inf)}),
    "any mask": ({}, {"attn_mask": numbers(B * H, T, T)}),
    "padding": ({}, {"key_padding_mask": HIDDEN}),
    "padding in floats": (
        {},
        {"key_padding_mask": torch.zeros(B, T, dtype=DOUBLE).masked_fill(HIDDEN, -torch.inf)},
    ),
    "padding that adds": ({}, {"key_padding_mask": numbers(B, T)}),
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", list(MHA))
def test_multihead_attention(name: str, batch_first: bool) -> None:
    made, masks = MHA[name]
    torch.manual_seed(0)
    model = nn.MultiheadAttention(E, H, batch_first=batch_first, dtype=DOUBLE, **made).eval()
    x = numbers(B, T, E) if batch_first else numbers(T, B, E)
    for options in ({"need_weights": False}, {"average_attn_weights": False}, {}):
        _, (call,) = listen(model, x, x, x, **masks, **options)
        _, weights = model(x, x, x, **masks, average_attn_weights=False)
        assert error(call.weights.dense(), weights) < EXACT
        assert (call.path, call.kind) == ("", "self")
    if name.startswith("padding") and "adds" not in name:
        assert torch.equal(call.weights.mask.counted(T), ~HIDDEN)


def test_multihead_attention_across_and_unbatched() -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(E, H, kdim=5, vdim=6, dtype=DOUBLE).eval()
    query, key, value = numbers(3, B, E), numbers(T, B, 5), numbers(T, B, 6)
    _, (call,) = listen(model, query, key, value)
    assert call.kind == "cross" and call.weights.shape == (B, H, 3, T)
    assert error(call.weights.dense(), model(query, key, value, average_attn_weights=False)[1]) < EXACT
    plain = nn.MultiheadAttention(E, H, dtype=DOUBLE).eval()
    x = numbers(T, E)
    _, (call,) = listen(plain, x, x, x)
    assert error(call.weights.dense()[0], plain(x, x, x, average_attn_weights=False)[1]) < EXACT


# torch.nn.Transformer*


def encoder(norm_first: bool = False) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 24, batch_first=True, norm_first=norm_first, dtype=DOUBLE)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()


@pytest.mark.parametrize("padded", [False, True])
def test_an_encoder_on_its_native_path(padded: bool) -> None:
    model, x = encoder(), numbers(B, T, E)
    mask = HIDDEN if padded else None
    listener, expected = Heard(), []

    def keep(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        weights = nn.MultiheadAttention.forward(
            module, *args, **kwargs | {"need_weights": True, "average_attn_weights": False}
        )[1]
        expected.append(weights)
        return args, kwargs

    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*nested tensors.*")
        outside = model(x, src_key_padding_mask=mask)
        marks = hooks(model)
        with attach(model, listener):
            inside = model(x, src_key_padding_mask=mask)
        assert hooks(model) == marks and model.use_nested_tensor
        after = model(x, src_key_padding_mask=mask)
        handles = [m.register_forward_pre_hook(keep, with_kwargs=True) for m in model.modules()
                   if isinstance(m, nn.MultiheadAttention)]  # fmt: skip
        model(x, src_key_padding_mask=mask)
        for handle in handles:
            handle.remove()
    real = ~HIDDEN if padded else torch.ones(B, T, dtype=torch.bool)
    assert error(inside[real], outside[real]) < 1e-9 and torch.equal(after, outside)
    assert listener.paths == ["layers.0.self_attn", "layers.1.self_attn"]
    for call, truth in zip(listener.calls, expected, strict=True):
        assert error(call.weights.dense().movedim(1, -1)[real], truth.movedim(1, -1)[real]) < EXACT


def test_decoders_and_whole_transformers() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(E, H, 1, 2, 24, batch_first=True, dtype=DOUBLE).eval()
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=DOUBLE)
    _, calls = listen(model, numbers(B, T, E), numbers(B, 5, E), tgt_mask=mask, tgt_is_causal=True)
    assert [(call.path, call.kind) for call in calls] == [
        ("encoder.layers.0.self_attn", "self"),
        *((f"decoder.layers.{n}.{name}", kind) for n in range(2)
          for name, kind in (("self_attn", "self"), ("multihead_attn", "cross"))),
    ]  # fmt: skip
    assert calls[1].weights.dense().triu(1).abs().max() == 0
    hw.adopt(model)
    _, again = listen(model, numbers(B, T, E), numbers(B, 5, E), tgt_mask=mask, tgt_is_causal=True)
    for first, other in zip(calls, again, strict=True):
        assert first.path == other.path and error(other.weights.dense(), first.weights.dense()) < EXACT


# Ours


@pytest.mark.parametrize("settings", [{}, {"num_kv_heads": 2, "causal": True}, {"causal": True, "window": 3}])
def test_our_own(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = hw.MultiHeadAttention(E, H, **settings).double()
    x = numbers(B, T, E)
    (_, weights), (call,) = listen(model, x)
    assert error(call.weights.dense(), model(x)[1].dense()) < EXACT
    _, (across,) = listen(model, numbers(B, 3, E), x, x)
    assert across.kind == "cross" and across.weights.shape == (B, H, 3, T)


# How modules are run


def test_a_part_called_without_the_whole() -> None:
    model, x, listener = encoder(norm_first=True), numbers(B, T, E), Heard()
    with attach(model, listener):
        model.layers[1](x)
        model.layers[1].self_attn(x, x, x)
    assert listener.paths == ["layers.1.self_attn"] * 2
    assert [call.forward.number for call in listener.calls] == [1, 2]


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError("on purpose")


def test_an_exception_in_the_forward_leaves_nothing() -> None:
    for model in (nn.Sequential(Fused(), Fails()), nn.Sequential(nn.Sequential(Fails())), Fails()):
        marks = hooks(model)
        with pytest.raises(ZeroDivisionError), attach(model, Heard()):
            model(numbers(B, T, E))
        assert hooks(model) == marks
    # ... and the block goes on where the user catches it
    model, listener = nn.Sequential(Fused(), Fails()), Heard()
    with attach(model, listener):
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                model(numbers(B, T, E))
    assert listener.paths == ["0", "0"]
    assert [call.forward.number for call in listener.calls] == [1, 2]


def test_training_with_dropout_runs_and_gradients_flow() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 24, dropout=0.5, batch_first=True)
    model = nn.Sequential(
        nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), Fused(dropout_p=0.5).float()
    )
    listener = Heard()
    with attach(model.train(), listener):
        model(numbers(B, T, E).float()).sum().backward()
    assert listener.paths == ["0.layers.0.self_attn", "1"]
    for call in listener.calls:
        assert error(call.weights.dense().sum(-1), torch.ones(B, H, T)) < 1e-5, "maps are before dropout"
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_gradients_are_those_without_listening() -> None:
    for model in (
        encoder(norm_first=True),
        nn.Sequential(Fused(num_kv_heads=2, enable_gqa=True, is_causal=True)),
    ):
        x = numbers(B, T, E).requires_grad_()
        (plain,) = torch.autograd.grad(model(x).square().sum(), x)
        with attach(model, Heard()):
            (actual,) = torch.autograd.grad(model(x).square().sum(), x)
        assert error(actual, plain) < 1e-8


def test_autocast() -> None:
    model = nn.Sequential(encoder(norm_first=True), Fused()).float()
    x, listener = numbers(B, T, E).float(), Heard()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        outside = model(x)
        with attach(model, listener):
            inside = model(x)
    assert inside.dtype == outside.dtype
    assert error(inside, outside) < 0.05 * float(outside.abs().max())
    assert [call.weights.dtype for call in listener.calls] == [torch.bfloat16] * 3


@pytest.mark.parametrize("kind", [nn.MultiheadAttention, hw.nn.MultiheadAttention])
@pytest.mark.parametrize(
    ("shapes", "masks", "message"),
    [
        ((T, T), {"key_padding_mask": (B + 1, T)}, r"shape\[0\] to be 2, but got 3"),
        ((T, T), {"key_padding_mask": (B, T + 1)}, r"shape\[1\] to be 7, but got 8"),
        (
            (T, T),
            {"attn_mask": (T, T + 1)},
            r"2D attn_mask is torch.Size\(\[7, 8\]\), but should be \(7, 7\)",
        ),
        ((T, T), {"attn_mask": (5, T, T)}, r"3D attn_mask .*\[5, 7, 7\]\), but should be \(8, 7, 7\)"),
        ((T, 11), {"attn_mask": (T, T)}, r"\[7, 7\]\), but should be \(7, 11\)"),
    ],
)
def test_what_torchs_class_refuses_is_refused_in_its_words_while_somebody_listens(
    kind: Any, shapes: tuple[int, int], masks: dict[str, tuple[int, ...]], message: str
) -> None:
    """A listener had words of its own for masks of another shape, and another exception."""
    model = nn.ModuleList([kind(E, H, batch_first=True)])
    query, memory = (torch.randn(B, length, E) for length in shapes)
    options = {name: torch.zeros(*shape, dtype=torch.bool) for name, shape in masks.items()}
    with pytest.raises((AssertionError, RuntimeError), match=message) as unheard:
        model[0](query, memory, memory, **options)
    with pytest.raises(unheard.type, match=message) as output, attach(model, Heard()):
        model[0](query, memory, memory, **options)
    assert str(output.value) == str(unheard.value)
