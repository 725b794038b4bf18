"""adopt and restore: models of torch's classes before, while and after, and what changes besides."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.nn.as_torch import transformer
from headwise.nn.as_torch.ragged import Ragged
from judge import error, largest

N, L, E, H = 3, 17, 24, 4
PADDING = torch.arange(L) >= torch.tensor([[17], [9], [4]])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(L)
HIDDEN = torch.ones(L, L, dtype=torch.bool).triu(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class VisionBlock(nn.Module):
    """A block of a vision transformer, as torchvision writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(E), nn.LayerNorm(E)
        self.self_attention = nn.MultiheadAttention(E, H, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(E, 2 * E), nn.GELU(), nn.Linear(2 * E, E))

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        y, _ = self.self_attention(y, y, y, need_weights=False)
        x = x + y
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


def encoder(**options: Any) -> nn.TransformerEncoder:
    options = {"batch_first": True, "dropout": 0.0, **options}
    layer = nn.TransformerEncoderLayer(E, H, 2 * E, **options)
    nested = options["batch_first"] and not options.get("norm_first")
    return nn.TransformerEncoder(layer, 2, nn.LayerNorm(E), enable_nested_tensor=nested)


def whole(**options: Any) -> nn.Transformer:
    return nn.Transformer(E, H, 1, 1, 2 * E, batch_first=True, dropout=0.0, **options)


X, Y = torch.randn(N, L, E), torch.randn(N, 7, E)
Call = Callable[[nn.Module], Tensor]
REAL = ~PADDING[..., None]
ENCODERS: dict[str, Callable[[], nn.Module]] = {
    "post-norm": encoder,
    "pre-norm": lambda: encoder(norm_first=True),
    "gelu": lambda: encoder(activation="gelu"),
    "without bias": lambda: encoder(bias=False),
}
CALLS: dict[str, Call] = {
    "no mask": lambda m: m(X),
    "padding": lambda m: m(X, src_key_padding_mask=PADDING) * REAL,
    "causal": lambda m: m(X, mask=CAUSAL),
    "causal, bool": lambda m: m(X, mask=HIDDEN),
    "causal, hinted": lambda m: m(X, mask=CAUSAL, is_causal=True),
    "causal and padding": lambda m: m(X, mask=HIDDEN, src_key_padding_mask=PADDING) * REAL,
}


def cases() -> Iterator[Any]:
    for kind, build in ENCODERS.items():
        for asked, call in CALLS.items():
            yield pytest.param(build, call, id=f"encoder, {kind}, {asked}")
    first = lambda m: m(X.transpose(0, 1), mask=CAUSAL).transpose(0, 1)  # noqa: E731
    yield pytest.param(lambda: encoder(batch_first=False), first, id="encoder, length first")
    yield pytest.param(whole, lambda m: m(X, Y, tgt_mask=HIDDEN[:7, :7]), id="transformer")
    padded = {"src_key_padding_mask": PADDING, "memory_key_padding_mask": PADDING}
    yield pytest.param(whole, lambda m: m(X, Y, tgt_mask=HIDDEN[:7, :7], **padded), id="transformer, padded")
    yield pytest.param(lambda: nn.Sequential(VisionBlock(), VisionBlock()), lambda m: m(X), id="vision")


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("build", "call"), list(cases()))
def test_adopted_models_say_the_same_in_every_mode(build: Callable[[], nn.Module], call: Call) -> None:
    model = build()
    names = list(model.state_dict())
    with torch.no_grad():
        before = call(model.eval())
    optimised = []
    for twin, adopted in ((copy.deepcopy(model), False), (copy.deepcopy(model), True)):
        if adopted:
            hw.adopt(twin)
        optimised.append(_after_steps(twin, call))
    hw.adopt(model)
    with torch.no_grad():
        after, unchanged = call(model.eval()), call(model.train())
    assert list(model.state_dict()) == names
    assert error(after, before) <= 20 * 1.2e-7 * largest(before)
    assert error(unchanged, before) <= 20 * 1.2e-7 * largest(before)
    assert error(optimised[1], optimised[0]) <= 100 * 1.2e-7 * largest(optimised[0])
    hw.restore(model)
    with torch.no_grad():
        assert torch.equal(call(model.eval()), before)


def _after_steps(model: nn.Module, call: Call) -> Tensor:
    """What a model says after five steps of training."""
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(5):
        optimiser.zero_grad()
        call(model).pow(2).mean().backward()
        optimiser.step()
    with torch.no_grad():
        return call(model.eval())


def test_only_classes_change_and_come_back() -> None:
    model = whole()
    tied = model.decoder.layers[0].self_attn
    tied.in_proj_weight = model.encoder.layers[0].self_attn.in_proj_weight
    seen: list[str] = []
    tied.register_forward_hook(lambda *_: seen.append("called"))
    parameters = {name: id(p) for name, p in model.named_parameters()}
    kinds = [type(module) for module in model.modules()]
    report = hw.adopt(model)
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    assert model.decoder.layers[0].self_attn is tied and type(tied) is hw.nn.MultiheadAttention
    assert tied.in_proj_weight is model.encoder.layers[0].self_attn.in_proj_weight
    assert report.changed["encoder"] == "TransformerEncoder" and not report.left
    assert sum(kind == "MultiheadAttention" for kind in report.changed.values()) == 3
    model(X, Y)
    assert seen == ["called"]
    assert hw.restore(model) == 5
    assert [type(module) for module in model.modules()] == kinds
    assert hw.restore(model) == 0


def test_a_module_of_ours_is_not_restored_and_adopting_twice_changes_nothing() -> None:
    model = nn.ModuleList([hw.nn.MultiheadAttention(E, H), nn.MultiheadAttention(E, H)])
    assert list(hw.adopt(model).changed) == ["1"]
    assert not hw.adopt(model).changed
    assert hw.restore(model) == 1
    assert [type(m) for m in model] == [hw.nn.MultiheadAttention, nn.MultiheadAttention]


class TheirOwn(nn.MultiheadAttention):
    """Somebody's subclass."""


def test_the_report_says_what_was_left_and_why() -> None:
    replaced = nn.MultiheadAttention(E, H)
    replaced.forward = lambda *_: None  # type: ignore[method-assign]
    report = hw.adopt(nn.ModuleDict({"theirs": TheirOwn(E, H), "replaced": replaced}))
    assert not report.changed
    assert report.left == {
        "theirs": f"{__name__}.TheirOwn is a class of its own",
        "replaced": "it has a forward of its own",
    }
    assert "Left 2 modules" in str(report) and "theirs: " in str(report)
    alone = nn.MultiheadAttention(E, H)
    assert str(hw.adopt(alone)) == "Adopted 1 module.\n  the model itself: MultiheadAttention"
    assert str(hw.adopt(nn.Linear(2, 2))).startswith("Nothing to adopt")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_ragged_batches_run_without_their_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = encoder().eval(), []
    with torch.no_grad():
        before = model(X, src_key_padding_mask=PADDING)
        hw.adopt(model)
        real = Ragged.real
        monkeypatch.setattr(Ragged, "real", lambda self, x: seen.append(x.shape) or real(self, x))
        after = model(X, src_key_padding_mask=PADDING)
    assert seen[0] == (N, L, E) and len(seen) == 3  # at the door, and after each attention
    assert error(after, before) < 1e-5  # zeros under the padding in both, but for the last norm


def test_padding_that_is_not_at_the_end_hooks_and_gradients_are_not_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Ragged, "of", lambda *_: pytest.fail("packed"))
    model = encoder().eval()
    hw.adopt(model)
    with torch.no_grad():
        model(X, src_key_padding_mask=PADDING.flip(1))
        model(X, mask=CAUSAL, src_key_padding_mask=torch.zeros(N, L).masked_fill(PADDING, -torch.inf))
        handle = model.layers[1].linear1.register_forward_hook(lambda *_: None)
        model(X, src_key_padding_mask=PADDING)
        handle.remove()
        with torch.enable_grad():
            model(X, src_key_padding_mask=PADDING)
        model.train()(X, src_key_padding_mask=PADDING)


def test_layers_get_masks_as_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    model, masks = encoder(), []
    hw.adopt(model)
    for layer in model.layers:
        layer.self_attn.register_forward_pre_hook(lambda _, __, given: masks.append(given), with_kwargs=True)
    model(X, mask=HIDDEN, src_key_padding_mask=PADDING)
    assert all(given["attn_mask"] is HIDDEN and given["key_padding_mask"] is PADDING for given in masks)
    assert [given["is_causal"] for given in masks] == [True, True]


@pytest.mark.parametrize("name", ["src_mask", "src_key_padding_mask"])
def test_masks_are_refused_as_torch_refuses_them(name: str) -> None:
    layer = encoder().layers[0]
    said = []
    for adopted in (False, True):
        if adopted:
            hw.adopt(layer)
        with pytest.raises(AssertionError) as refused:
            layer(X, **{name: torch.zeros(L if name == "src_mask" else N, L, dtype=torch.int64)})
        said.append(str(refused.value))
    assert said[0] == said[1] == f"only bool and floating types of {name} are supported"


def test_layers_of_another_class_are_asked_as_torch_asks_them() -> None:
    class Layer(nn.TransformerEncoderLayer):
        """Somebody's layer."""

        def forward(self, src: Tensor, **masks: Any) -> Tensor:  # type: ignore[override]
            given.append(masks["src_mask"].dtype)
            return super().forward(src, **masks)

    given: list[torch.dtype] = []
    model = nn.TransformerEncoder(Layer(E, H, 2 * E, batch_first=True), 1, enable_nested_tensor=False)
    report = hw.adopt(model)
    assert "class of its own" in report.left["layers.0"] and "layers.0.self_attn" in report.changed
    model(X, mask=HIDDEN)
    assert given == [torch.float32]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.filterwarnings("ignore:'norm' was found in ScriptModule constants")
def test_adopted_models_are_copied_pickled_and_scripted() -> None:
    model = encoder().eval()
    with torch.no_grad():
        before = model(X, src_key_padding_mask=PADDING)
        hw.adopt(model)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(twin) is transformer.TransformerEncoder
            assert error(twin(X, src_key_padding_mask=PADDING), before) < 1e-5
            assert hw.restore(twin) == 5
        scripted = torch.jit.script(copy.deepcopy(model))
        assert error(scripted(X), model(X)) < 1e-5


def test_compiled_adopted_models_are_one_graph() -> None:
    model = encoder()
    hw.adopt(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = compiled(X, mask=CAUSAL, is_causal=True)
    assert error(found, model(X, mask=CAUSAL)) < 1e-5


def test_nothing_ragged_is_lost_on_the_way() -> None:
    sequences = Ragged.of(~PADDING)
    x = sequences.real(X)
    assert x.shape == (30, E) and sequences.lengths.tolist() == [17, 9, 4]
    assert torch.equal(sequences.padded(x), X * REAL)
