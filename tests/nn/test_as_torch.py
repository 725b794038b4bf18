"""`headwise.nn.MultiheadAttention` is torch's class to the letter: one test for each line of its contract.

Values over many calls are compared in test_upstream.py. Sizes: N 3, L 5, S 7, H 2 or 3, D 5;
everything is float64 unless the test is about something else.
"""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise.nn
from as_torch_cases import always_in_one_step, as_if_large, slow_path
from headwise.errors import ArgumentError, BudgetExceeded
from headwise.nn import MultiheadAttention

N, L, S, D = 3, 5, 7, 5
Answer = tuple[Tensor, Tensor | None]
Tensors = Sequence[Tensor | None]

with_and_without_weights = pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "alone"])
small_and_large = pytest.mark.parametrize("large", [False, True], ids=["small", "large"])


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


def arguments(options: dict[str, Any]) -> dict[str, Any]:
    H = options.get("num_heads", 2)
    return {"embed_dim": H * D, "num_heads": H, "dtype": torch.float64, **options}


def make(kind: type[nn.MultiheadAttention], seed: int = 0, **options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(seed)
    return kind(**arguments(options))


def twins(**options: Any) -> tuple[MultiheadAttention, nn.MultiheadAttention]:
    """Ours and torch's with the same parameters, none of them 0."""
    ours = MultiheadAttention(**arguments(options))
    options.pop("empty_rows", None)
    theirs = nn.MultiheadAttention(**arguments(options))
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(torch.randn_like(parameter, dtype=torch.float32) * parameter.shape[-1] ** -0.5)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def inputs(module: nn.MultiheadAttention, length: int = L, memory: int = S, batch: int = N) -> list[Tensor]:
    """query, key and value."""
    widths = ((length, module.embed_dim), (memory, module.kdim), (memory, module.vdim))
    dtype = module.out_proj.weight.dtype
    return [
        torch.randn(*((batch, n) if module.batch_first else (n, batch)), width).to(dtype)
        for n, width in widths
    ]


def slow(module: nn.Module, *args: Any, **kwargs: Any) -> Answer:
    """What torch's slow path says."""
    with slow_path():
        actual: Answer = module(*args, **kwargs)
    return actual


def assert_same(actual: Tensors, wanted: Tensors, tolerance: float = 1e-12) -> None:
    for ours, theirs in zip(actual, wanted, strict=True):
        if ours is None or theirs is None:
            assert ours is None and theirs is None
            continue
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


def hidden(*shape: int) -> Tensor:
    """Some hidden, the first key seen by all."""
    mask = torch.rand(*shape) < 0.4
    mask[..., 0] = False
    return mask


def causal(length: int = L, memory: int = L) -> Tensor:
    return torch.ones(length, memory, dtype=torch.bool).triu(1)


def as_float(mask: Tensor, dtype: torch.dtype = torch.float64, value: float = -math.inf) -> Tensor:
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, value)


# What it is


def test_the_constructor_takes_torchs_arguments_and_one_more() -> None:
    ours = inspect.signature(MultiheadAttention.__init__).parameters
    theirs = inspect.signature(nn.MultiheadAttention.__init__).parameters
    assert [*ours] == [*theirs, "empty_rows"]
    assert {name: ours[name].default for name in theirs} == {n: x.default for n, x in theirs.items()}
    assert {name: ours[name].kind for name in theirs} == {name: x.kind for name, x in theirs.items()}
    assert ours["empty_rows"].kind is inspect.Parameter.KEYWORD_ONLY
    assert ours["empty_rows"].default == "nan"


def test_the_call_takes_torchs_arguments() -> None:
    ours = inspect.signature(MultiheadAttention.forward).parameters
    theirs = inspect.signature(nn.MultiheadAttention.forward).parameters
    assert [(n, x.default, x.kind) for n, x in ours.items()] == [
        (n, x.default, x.kind) for n, x in theirs.items()
    ]


# Travelling


@pytest.mark.parametrize("empty_rows", ["nan", "zero"])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_is_the_same_module(copied: Callable[[Any], Any], empty_rows: str) -> None:
    ours, _ = twins(empty_rows=empty_rows, add_bias_kv=True)
    other, arguments = copied(ours), inputs(ours)
    assert type(other) is MultiheadAttention and other.empty_rows == empty_rows
    assert_same(other(*arguments), ours(*arguments), 0.0)


def test_parts_of_torch_take_it_for_their_own() -> None:
    """An encoder layer of torch's with our attention in it, in training, is the same layer."""
    layer = nn.TransformerEncoderLayer(2 * D, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    x, padding = torch.randn(N, L, 2 * D, dtype=torch.float64), hidden(N, L)
    masks = {"src_mask": causal(), "src_key_padding_mask": padding}
    wanted = layer(x, **masks, is_causal=True)
    ours = MultiheadAttention(2 * D, 2, batch_first=True, dtype=torch.float64)
    ours.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = ours
    actual = layer(x, **masks, is_causal=True)
    torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


# Words: every refusal is torch's, type and text


@pytest.mark.parametrize(
    "options",
    [
        {"embed_dim": 0},
        {"num_heads": 0},
        {"embed_dim": -3},
        {"num_heads": -2},
        {"embed_dim": 0, "num_heads": 0},
        {"embed_dim": 10, "num_heads": 3},
        {"dropout": 7.0, "embed_dim": 0},
    ],
    ids=str,
)
def test_sizes_that_cannot_be_are_refused_in_torchs_words(options: dict[str, Any]) -> None:
    messages = refusal(lambda: nn.MultiheadAttention(**{"embed_dim": 8, "num_heads": 2, **options}))
    assert refusal(lambda: MultiheadAttention(**{"embed_dim": 8, "num_heads": 2, **options})) == messages
    assert messages[0] in (ValueError, AssertionError)


def refusal(call: Callable[[], Any]) -> tuple[type[Exception], str]:
    """Its kind and words."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it is, it is compared
        call()
    return type(caught.value), str(caught.value)


KDIM = {"kdim": 11, "vdim": 13}


@pytest.mark.parametrize(
    ("options", "broken", "padding"),
    [
        ({}, {"in_proj_weight": None}, None),
        (KDIM, {"q_proj_weight": None}, None),
        (KDIM, {"k_proj_weight": None}, None),
        (KDIM, {"v_proj_weight": None}, None),
        ({}, {"num_heads": 3}, None),
        ({"add_bias_kv": True}, {"bias_v": None}, None),
        ({"add_bias_kv": True}, {"bias_k": None}, None),
        ({"add_bias_kv": True}, {"bias_v": None}, (N, L)),
        ({"add_bias_kv": True, "add_zero_attn": True}, {"bias_k": None}, None),
    ],
    ids=str,
)
def test_a_module_with_a_part_missing_is_refused_in_torchs_words(
    options: dict[str, Any], broken: dict[str, Any], padding: tuple[int, ...] | None
) -> None:
    messages = []
    for kind in (nn.MultiheadAttention, MultiheadAttention):
        module = make(kind, **options)
        for name, value in broken.items():
            setattr(module, name, value)
        arguments = inputs(module)
        mask = None if padding is None else torch.zeros(padding, dtype=torch.bool)
        messages.append(refusal(lambda: slow(module, *arguments, key_padding_mask=mask)))  # noqa: B023
    assert messages[1] == messages[0]


# Shapes


@with_and_without_weights
@pytest.mark.parametrize(("batch", "length", "memory"), [(0, L, S), (N, 0, S), (N, L, 0)])
def test_empty_sizes_take_every_mask(batch: int, length: int, memory: int, need_weights: bool) -> None:
    """torch's class cannot reshape some of these; ours answers as it does without them."""
    ours, _ = twins()
    arguments = inputs(ours, length, memory, batch)
    wanted = ours(*arguments, need_weights=need_weights)
    padding, mask = (torch.zeros(n, dtype=torch.bool) for n in ((batch, memory), (2 * batch, length, memory)))
    actual = ours(*arguments, key_padding_mask=padding, attn_mask=mask, need_weights=need_weights)
    assert_same(actual, wanted)


# Dropout


@with_and_without_weights
@pytest.mark.parametrize("dropout", [-0.1, 1.0, 1.5])
def test_bad_dropout_is_taken_as_torch_takes_it(dropout: float, need_weights: bool) -> None:
    ours, theirs = twins(dropout=dropout)
    arguments = inputs(ours)
    assert_same(ours.eval()(*arguments), slow(theirs.eval(), *arguments))

    def error_of(module: nn.Module) -> Any:
        try:
            return None, slow(module.train(), *arguments, need_weights=need_weights)
        except (ValueError, RuntimeError) as error:
            return type(error), str(error)

    actual, wanted = error_of(ours), error_of(theirs)
    if wanted[0] is None:
        assert actual[0] is None
        assert_same(actual[1], wanted[1])
    else:
        assert actual == wanted


# Rows that may see nothing


def with_empty_rows() -> dict[str, dict[str, Tensor]]:
    """Row 1 of all, or all rows of sequence 1, see nothing."""
    row, sequence = hidden(L, S), hidden(N, S)
    row[1], sequence[1] = True, True
    together = {"attn_mask": causal(L, S), "key_padding_mask": torch.zeros(N, S, dtype=torch.bool)}
    together["key_padding_mask"][1, 0] = True  # only row 0 of sequence 1
    return {
        "bool": {"attn_mask": row},
        "float": {"attn_mask": as_float(row) + torch.randn(L, S)},
        "padding": {"key_padding_mask": sequence},
        "float padding": {"key_padding_mask": as_float(sequence)},
        "causal and padding": together,
    }


every_empty_row = pytest.mark.parametrize("kind", with_empty_rows())


@every_empty_row
@with_and_without_weights
@small_and_large
def test_a_row_that_sees_nothing_may_be_zero(kind: str, need_weights: bool, large: bool) -> None:
    ours, theirs = twins(empty_rows="zero")
    arguments, masks = [x.requires_grad_() for x in inputs(ours)], with_empty_rows()[kind]
    with as_if_large(large):
        output, weights = ours(*arguments, need_weights=need_weights, **masks)
        (output.square().sum() + (0 if weights is None else weights.square().sum())).backward()
    plain, visible = slow(theirs, *arguments, **masks)
    empty = plain.isnan()
    assert empty.any()
    bias = ours.out_proj.bias.expand_as(output)
    torch.testing.assert_close(output[empty], bias[empty])
    torch.testing.assert_close(output[~empty], plain[~empty])
    if weights is not None and visible is not None:
        torch.testing.assert_close(weights, visible.nan_to_num())
    for tensor in (*arguments, *ours.parameters()):
        assert tensor.grad is not None and tensor.grad.isfinite().all() and tensor.grad.any()


@with_and_without_weights
def test_zero_rows_change_nothing_for_others(need_weights: bool) -> None:
    zero, theirs = twins(empty_rows="zero")
    arguments, mask = [x.requires_grad_() for x in inputs(zero)], hidden(L, S)
    pairs: list[Tensors] = []
    for module in (zero, theirs):
        output, weights = slow(module, *arguments, need_weights=need_weights, attn_mask=mask)
        loss = output.square().sum() + (0 if weights is None else weights.square().sum())
        pairs.append((output, weights, *torch.autograd.grad(loss, [*arguments, *module.parameters()])))
    assert_same(pairs[0], pairs[1], 1e-10)


@pytest.mark.parametrize("value", ["NaN", "zeros", None, 0, True], ids=repr)
def test_another_word_for_empty_rows_is_refused(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"empty_rows must be 'nan' or 'zero'") as caught:
        MultiheadAttention(4, 2, empty_rows=value)
    assert repr(value) in str(caught.value)


# Derivatives of every kind


every_mask = pytest.mark.parametrize("kind", [None, "bool", "float", "causal", "padding"])


def masks_of(kind: str | None) -> dict[str, Tensor]:
    if kind is None:
        return {}
    return {
        "bool": {"attn_mask": hidden(3, 3)},
        "float": {"attn_mask": torch.randn(3, 3, dtype=torch.float64)},
        "causal": {"attn_mask": causal(3, 3)},
        "padding": {"key_padding_mask": hidden(2, 3)},
    }[kind]


def tiny() -> tuple[MultiheadAttention, nn.MultiheadAttention, Tensor]:
    torch.manual_seed(0)
    ours, theirs = twins(embed_dim=4)
    return ours, theirs, torch.randn(3, 2, 4, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@every_mask
@with_and_without_weights
def test_forward_derivatives_are_torchs(kind: str | None, need_weights: bool) -> None:
    ours, theirs, x = tiny()
    masks, direction = masks_of(kind), torch.randn_like(x)

    def along(module: nn.Module, weights: bool) -> Any:
        def call(x: Tensor) -> tuple[Tensor, ...]:
            actual = slow(module, x, x, x, need_weights=weights, **masks)
            return tuple(each for each in actual if each is not None)

        return torch.func.jvp(call, (x,), (direction,))

    (actual, found_along), (wanted, wanted_along) = along(ours, need_weights), along(theirs, True)
    for ours_one, theirs_one in ((actual, wanted), (found_along, wanted_along)):
        assert len(ours_one) == 1 + need_weights
        assert_same(ours_one, theirs_one[: len(ours_one)])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, direction)
        output = ours(dual, dual, dual, need_weights=need_weights, **masks)[0]
        tangent = torch.autograd.forward_ad.unpack_dual(output).tangent
    torch.testing.assert_close(tangent, wanted_along[0])


@with_and_without_weights
def test_vmap_in_evaluation_without_gradients(need_weights: bool) -> None:
    ours = twins(embed_dim=4, batch_first=True)[0].eval()
    x = torch.randn(5, 3, 2, 4, dtype=torch.float64)

    def call(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(each for each in ours(x, x, x, need_weights=need_weights) if each is not None)

    with torch.no_grad():
        actual, wanted = torch.func.vmap(call)(x), [call(each) for each in x]
    for ours_one, theirs_one in zip(actual, zip(*wanted, strict=True), strict=True):
        torch.testing.assert_close(ours_one, torch.stack(theirs_one))


@with_and_without_weights
def test_vmap_over_inputs_masks_and_parameters(need_weights: bool) -> None:
    ours, _, _ = tiny()
    x, mask = torch.randn(5, 3, 2, 4, dtype=torch.float64), hidden(5, 3, 3)

    def call(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        actual = ours(x, x, x, attn_mask=mask, need_weights=need_weights)
        return tuple(each for each in actual if each is not None)

    actual = torch.func.vmap(call)(x, mask)
    wanted = [call(*each) for each in zip(x, mask, strict=True)]
    for ours_one, theirs_one in zip(actual, zip(*wanted, strict=True), strict=True):
        torch.testing.assert_close(ours_one, torch.stack(theirs_one))

    parameters = {name: p.detach() for name, p in ours.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        output: Tensor = torch.func.functional_call(
            ours, parameters, (x, x, x), {"need_weights": need_weights}
        )[0]
        return output.square().sum()

    grads = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    alone = torch.func.grad(loss)(parameters, x[2])
    for name, grad in grads.items():
        torch.testing.assert_close(grad[2], alone[name])


@pytest.mark.thinned(0, slow=2)
@pytest.mark.parametrize("kind", ["none", "bool", "hint", "padding"])
@with_and_without_weights
def test_compiled_whole_it_says_the_same(kind: str, need_weights: bool) -> None:
    torch._dynamo.reset()
    ours, _ = twins(batch_first=True)
    x = torch.randn(N, L, 2 * D, dtype=torch.float64, requires_grad=True)
    kinds: dict[str, dict[str, Any]] = {
        "none": {},
        "bool": {"attn_mask": hidden(L, L)},
        "hint": {"attn_mask": causal(), "is_causal": True},
        "padding": {"key_padding_mask": hidden(N, L)},
    }
    options = kinds[kind]
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    answers = []
    for module in (compiled, ours):
        output, weights = module(x, x, x, need_weights=need_weights, **options)
        answers.append(
            (output, weights, *torch.autograd.grad(output.square().sum(), [x, *ours.parameters()]))
        )
    assert_same(answers[0], answers[1])


@pytest.mark.slow
def test_compiled_whole_a_row_that_sees_nothing_is_nan() -> None:
    torch._dynamo.reset()
    ours, _ = twins(batch_first=True)
    x, mask = torch.randn(N, L, 2 * D, dtype=torch.float64), hidden(L, L)
    mask[1] = True
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_same(compiled(x, x, x, attn_mask=mask), ours(x, x, x, attn_mask=mask))


class Alone(nn.Module):
    """Self-attention of one tensor."""

    def __init__(self, inner: nn.MultiheadAttention) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        output: Tensor = self.inner(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        return output


@pytest.mark.slow
def test_exported_it_takes_other_batches_and_lengths() -> None:
    ours, theirs = (module.eval() for module in twins(batch_first=True))
    sizes = {0: torch.export.Dim("n", min=2), 1: torch.export.Dim("length", min=2)}
    arguments = torch.randn(N, L, 2 * D, dtype=torch.float64), hidden(N, L)
    try:
        exported = torch.export.export(Alone(ours), arguments, dynamic_shapes=(sizes, sizes)).module()
    except torch._dynamo.exc.UserError as error:
        with pytest.raises(torch._dynamo.exc.UserError, match="Constraints violated"):
            torch.export.export(Alone(theirs), arguments, dynamic_shapes=(sizes, sizes))
        pytest.skip(
            f"by design: torch {torch.__version__} cannot do that with its own class, either: {error}"
        )
    x, padding = torch.randn(2, S, 2 * D, dtype=torch.float64), hidden(2, S)
    wanted = slow(theirs, x, x, x, key_padding_mask=padding)[0]
    torch.testing.assert_close(exported(x, padding), wanted, rtol=1e-12, atol=1e-12)


# Masks


@pytest.mark.parametrize("change", ["item", "fill", "copy", "view", "other memory"])
def test_a_mask_changed_in_place_is_read_again(change: str) -> None:
    ours, theirs = twins()
    arguments = inputs(ours, L, L)
    mask = causal()
    assert_same(ours(*arguments, attn_mask=mask), slow(theirs, *arguments, attn_mask=mask))
    if change == "item":
        mask[0, 3] = False
    elif change == "fill":
        mask.fill_(False)
    elif change == "copy":
        mask.copy_(hidden(L, L))
    elif change == "other memory":
        mask.data = hidden(L, L)
    else:
        mask[2:].logical_not_()
    assert_same(ours(*arguments, attn_mask=mask), slow(theirs, *arguments, attn_mask=mask))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64], ids=str)
def test_a_part_of_a_mask_is_read_by_itself(dtype: torch.dtype) -> None:
    """`mask[:L, :L]` is a new tensor in every call; what it says depends on where it is cut."""
    ours, theirs = twins()
    arguments = inputs(ours, L, L)
    whole = causal(2 * L, 2 * L)
    whole = whole if dtype == torch.bool else as_float(whole)
    for _ in range(2):
        parts = (
            whole[:L, :L],
            whole[L:, :L],
            whole[1 : L + 1, :L],
            whole[1 : L + 1, 1 : L + 1],
            whole[::2, ::2],
        )
        for part in (*parts, whole[:L, :L].t(), whole[L : 2 * L, L:].t()):
            actual = ours(*arguments, attn_mask=part, need_weights=False)
            assert_same(actual, slow(theirs, *arguments, attn_mask=part, need_weights=False))
        whole[:, :L] = 0 if dtype == torch.float64 else False  # a change of the whole is one of its parts


def test_a_new_mask_in_an_old_ones_place_is_read() -> None:
    """Another tensor may be made where one died, with the same version."""
    ours, theirs = twins()
    arguments = inputs(ours, L, L)
    for number in range(20):
        mask = causal() if number % 2 else hidden(L, L)
        assert_same(ours(*arguments, attn_mask=mask), slow(theirs, *arguments, attn_mask=mask))
        del mask


# Tensors of other kinds


class Marked(Tensor):
    """A tensor with a class of its own."""


def test_tensors_of_another_class_keep_it() -> None:
    ours, theirs = twins()
    x = torch.randn(L, N, 2 * D, dtype=torch.float64)
    marked = x.as_subclass(Marked)
    actual, wanted = ours(marked, marked, marked), slow(theirs, marked, marked, marked)
    assert type(actual[0]) is type(wanted[0]) is Marked
    torch.testing.assert_close(actual[0].as_subclass(Tensor), wanted[0].as_subclass(Tensor))


# In one step, as on a GPU


def test_one_step_calls_another_out_proj_and_its_hooks() -> None:
    ours = MultiheadAttention(8, 2, batch_first=True)
    x, visible = torch.randn(2, 3, 8), []
    with always_in_one_step():
        wanted = ours(x, x, x)[0]
        handle = ours.out_proj.register_forward_hook(lambda *_: visible.append("hook"))
        assert torch.equal(ours(x, x, x)[0], wanted)
        handle.remove()
        ours.out_proj = nn.Linear(8, 8)  # type: ignore[assignment]
        actual = ours(x, x, x)[0]
    assert visible == ["hook"]
    assert not torch.allclose(actual, wanted)
    with slow_path():
        torch.testing.assert_close(actual, nn.MultiheadAttention.forward(ours, x, x, x)[0])


def test_one_step_leaves_weights_over_a_set_limit_to_the_ordinary_way() -> None:
    ours = MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 30, 8)
    with always_in_one_step(), as_if_large(), headwise.budget.limit("1 KiB"):
        ours(x, x, x, need_weights=False)
        with pytest.raises(BudgetExceeded, match="must fit the memory budget"):
            ours(x, x, x, attn_mask=torch.ones(30, 30, dtype=torch.bool).triu(1), average_attn_weights=False)


@pytest.mark.parametrize("average", [True, False], ids=["mean", "heads"])
@pytest.mark.parametrize("masked", [False, True], ids=["nothing hidden", "causal"])
def test_weights_on_a_cpu_are_held_against_the_budget(average: bool, masked: bool) -> None:
    ours = MultiheadAttention(12, 2, batch_first=True).eval()
    x = torch.randn(1, 37, 12)
    mask = torch.ones(37, 37, dtype=torch.bool).triu(1) if masked else None
    shape = [1, 37, 37] if average else [1, 2, 37, 37]
    for large in (False, True):
        with as_if_large(large), torch.no_grad(), headwise.budget.limit("1 KiB"):
            messages = re.escape(f"weights {shape} must fit the memory budget")
            with pytest.raises(BudgetExceeded, match=messages):
                ours(x, x, x, attn_mask=mask, average_attn_weights=average)
            ours(x, x, x, attn_mask=mask, need_weights=False)
