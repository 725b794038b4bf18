"""adopt and restore: models of torch's classes before, while and after, and what changes besides."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize, prune
from torch.overrides import TorchFunctionMode

import headwise as hw
from as_torch_cases import as_if_large
from headwise.errors import ArgumentError
from headwise.nn.as_torch.adoption import TransformerEncoder
from judge import assert_judged, error, largest

# torch's own encoder, restored or beside ours, says so once a process: whichever test is first.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

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


def cases() -> Iterator[Any]:
    real = lambda m: m(X, src_key_padding_mask=PADDING) * REAL  # noqa: E731
    yield pytest.param(encoder, real, id="encoder, padded")
    yield pytest.param(
        lambda: encoder(norm_first=True), lambda m: m(X, mask=HIDDEN), id="encoder, norm first"
    )
    first = lambda m: m(X.transpose(0, 1), mask=CAUSAL).transpose(0, 1)  # noqa: E731
    yield pytest.param(lambda: encoder(batch_first=False), first, id="encoder, length first")
    yield pytest.param(whole, lambda m: m(X, Y, tgt_mask=HIDDEN[:7, :7]), id="transformer")
    padded = {"src_key_padding_mask": PADDING, "memory_key_padding_mask": PADDING}
    yield pytest.param(whole, lambda m: m(X, Y, tgt_mask=HIDDEN[:7, :7], **padded), id="transformer, padded")
    yield pytest.param(lambda: nn.Sequential(VisionBlock(), VisionBlock()), lambda m: m(X), id="vision")


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize(("build", "call"), list(cases()))
def test_adopted_models_say_the_same_after_training_and_once_restored(
    build: Callable[[], nn.Module], call: Call
) -> None:
    """Layers of every kind, masks and modes are drawn in test_upstream.py."""
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
    calls: list[str] = []
    tied.register_forward_hook(lambda *_: calls.append("called"))
    parameters = {name: id(p) for name, p in model.named_parameters()}
    kinds = [type(module) for module in model.modules()]
    report = hw.adopt(model)
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    assert model.decoder.layers[0].self_attn is tied and type(tied) is hw.nn.MultiheadAttention
    assert tied.in_proj_weight is model.encoder.layers[0].self_attn.in_proj_weight
    assert report.changed["encoder"] == "TransformerEncoder" and not report.left
    assert sum(kind == "MultiheadAttention" for kind in report.changed.values()) == 3
    model(X, Y)
    assert calls == ["called"]
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
        "theirs": f"{__name__}.TheirOwn is not torch's class",
        "replaced": "it has a forward of its own",
    }
    assert "Left 2 modules" in str(report) and "theirs: " in str(report)
    alone = nn.MultiheadAttention(E, H)
    assert str(hw.adopt(alone)) == "Adopted 1 module.\n  the model itself: MultiheadAttention"
    assert str(hw.adopt(nn.Linear(2, 2))).startswith("Nothing to adopt")


def test_layers_get_masks_as_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    model, masks = encoder(), []
    hw.adopt(model)
    for layer in model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, __, arguments: masks.append(arguments), with_kwargs=True
        )
    model(X, mask=HIDDEN, src_key_padding_mask=PADDING)
    assert all(
        arguments["attn_mask"] is HIDDEN and arguments["key_padding_mask"] is PADDING for arguments in masks
    )
    assert [arguments["is_causal"] for arguments in masks] == [True, True]


@pytest.mark.parametrize(
    "mask", [torch.ones(L + 2, L + 2).triu(1).bool(), torch.ones(L).bool()], ids=["longer", "1-D"]
)
def test_an_encoder_refuses_a_causal_mask_of_another_length_as_torch_does(mask: Tensor) -> None:
    """Asked without `is_causal` it took a causal mask of any length for the hint, and answered."""
    model, message = encoder(), []
    for adopted in (False, True):
        if adopted:
            hw.adopt(model)
        with pytest.raises((RuntimeError, AssertionError)) as refused:
            model(X, mask=mask)
        message.append((refused.type, str(refused.value)))
    assert message[0] == message[1]


def test_layers_of_another_class_are_asked_as_torch_asks_them() -> None:
    class Layer(nn.TransformerEncoderLayer):
        """Somebody's layer."""

        def forward(self, src: Tensor, **masks: Any) -> Tensor:  # type: ignore[override]
            arguments.append(masks["src_mask"].dtype)
            return super().forward(src, **masks)

    arguments: list[torch.dtype] = []
    model = nn.TransformerEncoder(Layer(E, H, 2 * E, batch_first=True), 1, enable_nested_tensor=False)
    report = hw.adopt(model)
    assert "is not torch's class" in report.left["layers.0"] and "layers.0.self_attn" in report.changed
    model(X, mask=HIDDEN)
    assert arguments == [torch.float32]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.filterwarnings("ignore:'norm' was found in ScriptModule constants")
def test_adopted_models_are_copied_pickled_and_scripted() -> None:
    model = encoder().eval()
    with torch.no_grad():
        before = model(X, src_key_padding_mask=PADDING)
        hw.adopt(model)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(twin) is TransformerEncoder
            assert error(twin(X, src_key_padding_mask=PADDING) * REAL, before * REAL) < 1e-5
            assert hw.restore(twin) == 5
        scripted = torch.jit.script(copy.deepcopy(model))
        assert error(scripted(X), model(X)) < 1e-5


@pytest.mark.slow
def test_compiled_adopted_models_are_one_graph() -> None:
    model = encoder()
    hw.adopt(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    actual = compiled(X, mask=CAUSAL, is_causal=True)
    assert error(actual, model(X, mask=CAUSAL)) < 1e-5


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_an_adopted_encoder_writes_at_padding_what_torchs_does() -> None:
    """0, where torch goes on with a nested tensor: in evaluation, and watched as well as not."""
    model = encoder().eval()
    with torch.no_grad():
        expected = model(X, src_key_padding_mask=PADDING)
        hw.adopt(model)
        actual = model(X, src_key_padding_mask=PADDING)
        with hw.watch(model):
            watched = model(X, src_key_padding_mask=PADDING)
    trained = model.train()(X, src_key_padding_mask=PADDING)
    assert not bool(expected[PADDING].any()) and not bool(actual[PADDING].any())
    assert error(actual, expected) < 1e-5 and error(watched, expected) < 1e-5
    assert bool(trained[PADDING].any()) and error(trained * REAL, expected) < 1e-5


# What somebody could notice: torch's slow path, each part called as the module it is, is the oracle


class Wider(nn.Module):
    """A low-rank addition beside a linear layer, as peft writes it: the weight it shows is not all of it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = (
            base,
            *(nn.Linear(E, E, bias=False, dtype=torch.float64) for _ in "du"),
        )

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor:
        return self.base.bias

    def merged(self) -> nn.Linear:
        new = copy.deepcopy(self.base)
        new.weight.data += self.up.weight.data @ self.down.weight.data
        return new

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


class Doubling(nn.MultiheadAttention):
    """Somebody's subclass, with a forward."""

    def forward(self, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        assert options["key_padding_mask"] is None or options["key_padding_mask"].is_floating_point()
        output, weights = super().forward(*args, **options)
        return 2 * output, weights


class DoublingNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class DoublingLayer(nn.TransformerEncoderLayer):
    def forward(self, *args: Any, **options: Any) -> Tensor:  # type: ignore[override]
        return 2 * super().forward(*args, **options)


class Quantised(nn.Module):
    """A linear layer whose weight is a method, as in torch.ao's."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    def weight(self) -> Tensor:
        return self.base.weight.round(decimals=1)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight(), self.base.bias)


class Tripling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * x


class Half(nn.Module):
    """A parametrisation."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def in_double(norm: nn.Module | None = None) -> nn.TransformerEncoder:
    """Two layers, no two parameters alike."""
    options: dict[str, Any] = {"batch_first": True, "dropout": 0.0, "dtype": torch.float64}
    norm = nn.LayerNorm(E, dtype=torch.float64) if norm is None else norm
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 2 * E, **options), 2, norm)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / 3)
    return model


def put(path: str, make: Callable[[Any], Any]) -> Callable[[nn.Module], None]:
    """A change: something made of what is there takes its place."""

    def change(model: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        where = model.get_submodule(owner)
        setattr(where, name, make(getattr(where, name)))

    return change


def doubled(path: str) -> Callable[[nn.Module], None]:
    """A change: a forward of its own."""

    def change(model: nn.Module) -> None:
        module: Any = model.get_submodule(path)
        before = module.forward

        def forward(*args: Any, **options: Any) -> Any:
            actual = before(*args, **options)
            return 2 * actual if isinstance(actual, Tensor) else (2 * actual[0], actual[1])

        module.forward = forward

    return change


def hooked(path: str) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        model.get_submodule(path).register_forward_hook(lambda _, __, actual: 3 * actual)

    return change


def tripled(linear: nn.Linear) -> nn.Linear:
    new = copy.deepcopy(linear)
    new.weight.data *= 3
    new.bias.data *= 3
    return new


def dropping(layer: Any) -> Any:
    """Dropout goes on in evaluation, as those do who want to see how sure a model is."""
    layer.dropout1.p = 1.0
    layer.dropout1.train()
    return layer


def with_attention(layer: Any, **options: Any) -> Any:
    for name, value in options.items():
        setattr(layer.self_attn, name, value)
    return layer


def theirs(kind: type[nn.Module]) -> Callable[[Any], nn.Module]:
    """Another class's layer, or attention, with the same parameters."""

    def make(before: nn.Module) -> nn.Module:
        new = copy.deepcopy(before)
        new.__class__ = kind
        new.__dict__.pop("_adopted_by_headwise", None)
        return new

    return make


ATTENTION, LINEAR, NORM = "layers.1.self_attn", "layers.0.linear1", "layers.1.norm1"
OUT = f"{ATTENTION}.out_proj"
F64 = {"dtype": torch.float64}
Change = Callable[[Any], Any]
CHANGES: dict[str, Change] = {
    "forward of a layer": doubled("layers.1"),
    "forward of self_attn": doubled(ATTENTION),
    "forward of a linear layer": doubled(LINEAR),
    "forward of a norm": doubled(NORM),
    "forward of a dropout": doubled("layers.0.dropout"),
    "hook on a linear layer": hooked(LINEAR),
    "hook on the last norm": hooked("norm"),
    "another class's self_attn": put(ATTENTION, theirs(Doubling)),
    "another class's layer": put("layers.1", theirs(DoublingLayer)),
    "another class's first layer": put("layers.0", theirs(DoublingLayer)),
    "torch's own layer among ours": put("layers.1", theirs(nn.TransformerEncoderLayer)),
    "one layer twice": lambda model: model.layers.__setitem__(1, model.layers[0]),
    "linear2 and one more": put("layers.0.linear2", lambda old: nn.Sequential(old, Tripling())),
    "quantised": put(LINEAR, Quantised),
    "a norm's subclass": put(NORM, lambda _: DoublingNorm(E, **F64)),
    "a norm without weights": put(NORM, lambda _: nn.LayerNorm(E, elementwise_affine=False, **F64)),
    "no norm": put(NORM, lambda _: nn.Identity()),
    "another last norm": put("norm", lambda _: DoublingNorm(E, **F64)),
    "a last norm over all tokens": put("norm", lambda _: nn.LayerNorm((L, E), **F64)),
    "another activation": put("layers.0.activation", lambda _: torch.tanh),
    "gelu for relu": put("layers.0.activation", lambda _: functional.gelu),
    "a gelu that is not quite": lambda model: model.layers[0].__dict__.update(
        activation=nn.GELU("tanh"), activation_relu_or_gelu=2
    ),
    "an activation's own block": put("layers.0._ff_block", lambda _: lambda x: 3 * x),
    "norm first in one layer": put("layers.1.norm_first", lambda _: True),
    "dropout in evaluation": put("layers.0", dropping),
    "a zero key": put("layers.1", lambda layer: with_attention(layer, add_zero_attn=True)),
    "in_proj_weight parametrised": lambda model: parametrize.register_parametrization(
        model.layers[1].self_attn, "in_proj_weight", Half()
    ),
    "in_proj_weight in weight norm": lambda model: nn.utils.parametrizations.weight_norm(
        model.layers[1].self_attn, "in_proj_weight"
    ),
    "a linear layer parametrised": lambda model: parametrize.register_parametrization(
        model.layers[0].linear1, "weight", Half()
    ),
    "out_proj parametrised": lambda model: parametrize.register_parametrization(
        model.layers[1].self_attn.out_proj, "weight", Half()
    ),
    "in_proj_weight pruned": lambda model: prune.l1_unstructured(
        model.layers[1].self_attn, "in_proj_weight", 0.5
    ),
    "out_proj pruned": lambda model: prune.l1_unstructured(model.layers[1].self_attn.out_proj, "weight", 0.5),
    "a linear layer pruned": lambda model: prune.l1_unstructured(model.layers[0].linear1, "weight", 0.5),
}  # fmt: skip
IN_TORCH: dict[str, tuple[Change, Change]] = {  # torch never calls out_proj: (ours, the same where it looks)
    "low rank beside out_proj": (put(OUT, Wider), put(OUT, lambda old: Wider(old).merged())),
    "out_proj and one more": (
        put(OUT, lambda old: nn.Sequential(old, Tripling())), put(OUT, tripled)
    ),
    "hook on out_proj": (hooked(OUT), put(OUT, tripled)),
    "a plain out_proj": (put(OUT, lambda _: nn.Linear(E, E, **F64)),) * 2,
}  # fmt: skip


def function_transforms() -> Iterator[tuple[dict[str, Any], Tensor]]:
    """(masks, which outputs count)"""
    yield {}, torch.ones(N, L, 1, dtype=torch.bool)
    yield {"src_key_padding_mask": PADDING}, REAL
    yield {"mask": HIDDEN, "is_causal": False}, torch.ones(N, L, 1, dtype=torch.bool)


@contextmanager
def slowly() -> Iterator[None]:
    """torch's slow path, in evaluation, too."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def assert_as_torchs_slow_path(
    model: nn.Module, plain: nn.Module, masks: dict[str, Any], counts: Tensor, x: Tensor | None = None
) -> None:
    x = X.double() if x is None else x
    with slowly():
        expected = plain(x, **masks) * counts
    assert_judged(model(x, **masks) * counts, expected, expected, dtype=x.dtype, name=str(list(masks)))


@pytest.mark.thinned(4, slow=2)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", [*CHANGES, *IN_TORCH])
def test_whatever_was_changed_counts_in_evaluation_as_in_training(name: str) -> None:
    """Shortcuts of evaluation looked at weights and called no module: a low-rank out_proj was ignored (0.6
    off) or, as an `nn.Sequential`, crashed; a patched forward, a replaced norm or activation were passed
    over; a self_attn that `adopt` had left made padded evaluation crash."""
    ours, in_torch = IN_TORCH[name] if name in IN_TORCH else (CHANGES[name],) * 2
    for first in (True, False):  # adopted before or after
        model, plain = in_double().eval(), in_double()
        plain.load_state_dict(model.state_dict())
        if name == "dropout in evaluation":
            plain.eval()
        if first:
            hw.adopt(model)
        for whole, change in ((model, ours), (plain, in_torch)):
            torch.manual_seed(1)
            change(whole)
        if not first:
            hw.adopt(model)
        with as_if_large(first), torch.no_grad():
            for masks, counts in function_transforms():
                assert_as_torchs_slow_path(model, plain, masks, counts)
                named = {"src_mask" if key == "mask" else key: mask for key, mask in masks.items()}
                assert_as_torchs_slow_path(model.layers[1], plain.layers[1], named, counts)


def test_a_layer_that_nobody_changed_is_torchs_native_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reasons to be slow are reasons, not excuses."""
    layer, visible = in_double().layers[0].eval(), []
    hw.adopt(layer)
    native = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(
        torch, "_transformer_encoder_layer_fwd", lambda *a: visible.append("native") or native(*a)
    )
    for activation in (functional.relu, nn.ReLU(), nn.ReLU(inplace=True)):
        layer.activation = activation  # type: ignore[assignment]
        for padding in (None, PADDING):
            with torch.no_grad():
                layer(X.double(), src_key_padding_mask=padding)
    assert visible == ["native"] * 6
    with (
        pytest.raises(RuntimeError, match="Need attn_mask if specifying the is_causal hint"),
        torch.no_grad(),
    ):
        layer(X.double(), is_causal=True)


def test_whoever_listens_to_operations_hears_each() -> None:
    """A torch-function mode hears the products of all layers, as it does in training."""

    class Listening(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is functional.linear:
                calls.append(args[0].shape)
            return func(*args, **(kwargs or {}))

    calls: list[Any] = []
    model = in_double().eval()
    hw.adopt(model)
    for padding in (None, PADDING):
        with torch.no_grad(), Listening():
            model(X.double(), src_key_padding_mask=padding)
    assert [shape[:2] for shape in calls] == [(N, L)] * 16


def test_function_transforms_take_the_slow_path() -> None:
    model, plain = in_double(), in_double()
    plain.load_state_dict(model.state_dict())
    hw.adopt(model.eval())
    x = torch.stack([X.double(), -X.double()])
    with torch.no_grad(), slowly():
        expected = torch.stack([plain(row, src_key_padding_mask=PADDING) for row in x])
    with torch.no_grad():
        actual = torch.vmap(lambda row: model(row, src_key_padding_mask=PADDING))(x)
    assert_judged(actual * REAL, expected * REAL, expected * REAL, dtype=torch.float64, name="vmap")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_another_out_proj_counts_where_torchs_own_forward_answers() -> None:
    """Nested tensors and traced calls are torch's to answer, and torch takes out_proj's weight: the rest of a
    low-rank one was left out, without a word."""
    model, plain = in_double(), in_double()
    plain.load_state_dict(model.state_dict())
    ours, in_torch = IN_TORCH["low rank beside out_proj"]
    hw.adopt(model.eval())
    for whole, change in ((model, ours), (plain, in_torch)):
        torch.manual_seed(1)
        change(whole)
    x = X.double()
    with torch.no_grad():
        traced = torch.jit.trace(model, (x,))
        assert_as_torchs_slow_path(traced, plain, {}, torch.tensor(True))
        lengths = (~PADDING).sum(1).tolist()
        nested = torch.nested.nested_tensor(
            [whole[:length] for whole, length in zip(x, lengths, strict=True)]
        )
        expected = plain(x, src_key_padding_mask=PADDING) * REAL
        actual = model(nested).to_padded_tensor(0.0)
        assert_judged(actual, expected, expected, dtype=torch.float64, name="nested")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_another_out_proj_is_not_scripted_away() -> None:
    attend = hw.nn.MultiheadAttention(E, H)
    attend.out_proj = Wider(attend.out_proj)  # type: ignore[assignment]
    with pytest.raises(ArgumentError, match=r"out_proj must be torch's own.*: got Wider; .*merge"):
        torch.jit.script(attend)


# Classes that others put over ours


def test_what_was_parametrised_after_adoption_is_restored_underneath() -> None:
    """`register_parametrization` puts a class of its own over a module's: restore raised KeyError after half
    of the model, and the rest could never be restored."""
    model = in_double()
    kinds = [type(module) for module in model.modules()]
    expected = model(X.double())
    hw.adopt(model)
    first, second = (layer.self_attn for layer in model.layers)
    parametrize.register_parametrization(first, "in_proj_weight", Half())
    parametrize.register_parametrization(first, "in_proj_bias", Half())
    assert not hw.adopt(model).left  # it is ours underneath
    halved = model(X.double())
    assert hw.restore(model) == 5 and hw.restore(model) == 0
    assert isinstance(first, nn.MultiheadAttention) and not isinstance(first, hw.nn.MultiheadAttention)
    assert type(first).__name__ == "ParametrizedMultiheadAttention" and type(second) is nn.MultiheadAttention
    assert_judged(model(X.double()), halved, halved, dtype=torch.float64, name="parametrised")
    for name in ("in_proj_weight", "in_proj_bias"):
        parametrize.remove_parametrizations(first, name, leave_parametrized=False)
    assert [type(module) for module in model.modules()] == kinds
    assert torch.equal(model(X.double()), expected)


def test_what_is_parametrised_already_is_left_and_said_so() -> None:
    model = in_double()
    parametrize.register_parametrization(model.layers[0].self_attn, "in_proj_weight", Half())
    report = hw.adopt(model)
    assert report.left == {
        "layers.0.self_attn": "its in_proj_weight is parametrised; call adopt before parametrising"
    }
    assert hw.restore(model) == 4


def test_a_class_that_cannot_do_without_ours_leaves_the_model_as_it_was() -> None:
    class Other(hw.nn.MultiheadAttention):
        def forward(self, *args: Any, **options: Any) -> Any:  # type: ignore[override]
            return super().forward(*args, **options)

    model = in_double()
    hw.adopt(model)
    model.layers[1].self_attn.__class__ = Other
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ArgumentError, match=r"layers\.1\.self_attn is now a .*Other; undo the later"):
        hw.restore(model)
    assert [type(module) for module in model.modules()] == kinds
    model.layers[1].self_attn.__class__ = nn.MultiheadAttention  # or torch's at once
    assert hw.restore(model) == 5
    assert not any(isinstance(module, hw.nn.MultiheadAttention) for module in model.modules())


def test_what_is_sharded_is_restored_underneath_and_left_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fully_shard` puts its own class over a module's, too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    model, sharded = in_double().eval(), in_double()
    sharded.load_state_dict(model.state_dict())
    hw.adopt(model)
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for whole in (model, sharded):
            for layer in whole.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(whole, mesh=mesh)
        report = hw.adopt(sharded)
        assert report.left[""] == "it is sharded (FSDPTransformerEncoder); call adopt before sharding"
        assert list(report.changed) == ["layers.0.self_attn", "layers.1.self_attn"]
        with torch.no_grad():
            for masks, counts in function_transforms():
                assert_as_torchs_slow_path(model, sharded, masks, counts)
            assert hw.restore(model) == 5
            assert not any(type(module).__module__.startswith("headwise") for module in model.modules())
            assert all(isinstance(module, FSDPModule) for module in (model, *model.layers))
            for masks, counts in function_transforms():
                assert_as_torchs_slow_path(model, sharded, masks, counts)
    finally:
        torch.distributed.destroy_process_group()
