"""The planted modules themselves: each builds, runs, and is wrong in the way it says, or right.

Every module is given the same weights, so that one fault must give the same numbers in every style. The truth
is written out here; nothing of the examiner is used.
"""

from __future__ import annotations

import inspect
import math
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planted import (
    CRASHES,
    NO_FAULT,
    NOT_POSSIBLE,
    ONLY_WITH_CARRIED_WEIGHTS,
    PLANTED,
    RIGHT_NUMBERS,
    SAME_NUMBERS,
    STYLES,
    Planted,
)
from planted.broken import SOURCES, WHAT
from planted.pairs import LEFT_OUT, PAIRS, Pair
from planted.right import RIGHT, Right

B, T, E, H = 3, 7, 24, 4
D = E // H

Weights = dict[str, Tensor]
FAULTS = sorted({each.fault for each in PLANTED})
TAKES_PADDING = {
    ("mask on queries", "separate"),
    ("mask on queries", "fused"),
    *(("padding mask broadcast", style) for style in STYLES),
}
# What one style does otherwise than the others, on purpose.
STYLES_DIFFER = {"constant scale", "dropout in eval", "heads in a list", "mask on queries", *CRASHES}


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


WEIGHTS: Weights = {
    **{f"w{role}": normal(i, E, E) * E**-0.5 for i, role in enumerate("qkvo")},
    **{f"b{role}": normal(10 + i, E) for i, role in enumerate("qkvo")},
    "wn": 1 + normal(20, E) / 4,
    "bn": normal(21, E),
}
Q, K, V = normal(30, B, T, E), normal(31, B, T, E), normal(32, B, T, E)
PADDING = torch.arange(T) < torch.tensor([4, 7, 5])[:, None]  # [B, S], True for a token
MASK = (normal(40, B, T, T) > 0) | torch.eye(T, dtype=torch.bool) | torch.eye(T, dtype=torch.bool).roll(1, 1)
MASK[0, 0] = True  # where nothing is hidden, "mask plus 1e9" parts from "mask inverted"
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril().expand(B, T, T)


def truth(w: Weights, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Multi-head attention head by head; mask: [B, T, S], True = may attend."""
    heads = []
    for h in range(H):
        rows = slice(h * D, (h + 1) * D)
        q_h, k_h, v_h = (
            x @ w[f"w{role}"][rows].T + w[f"b{role}"][rows] for role, x in zip("qkv", (q, k, v), strict=True)
        )
        scores = q_h @ k_h.mT / math.sqrt(D)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        heads.append(scores.softmax(-1) @ v_h)
    return torch.cat(heads, -1) @ w["wo"].T + w["bo"]


# Giving the same weights to all of them


ROLES = {
    "q": "w_q q_proj query w_query to_q fc_q queries wq q linears.0 linear_q q_linear w_qs b_q bias_q q_bias",
    "k": "w_k k_proj key w_key to_k fc_k keys wk k linears.1 linear_k k_linear w_ks b_k bias_k k_bias",
    "v": "w_v v_proj value w_value to_v fc_v values wv v linears.2 linear_v v_linear w_vs b_v bias_v v_bias",
    "o": "w_o out_proj out w_out to_out fc_o fc_out o dense linears.3 linear_o fc b_o bias_o proj c_proj "
    "o_proj unifyheads",
    "qkv": "qkv c_attn to_qkv qkv_proj in_proj",
    "qk": "qk",
    "n": "norm layer_norm ln",
}
ROLE = {name: role for role, names in ROLES.items() for name in names.split()}


def carried(name: str, parameter: Tensor) -> Tensor:
    """What a parameter of this name and shape gets of `WEIGHTS`."""
    of_a_layer = name.endswith((".weight", ".bias"))
    stem = name.lower().removesuffix(".weight").removesuffix(".bias").removesuffix("_weight")
    stem = stem.removesuffix("_bias") if stem in ("in_proj_bias", "out_proj_bias") else stem
    role, shape = ROLE[stem], tuple(parameter.shape)
    is_bias = name.endswith("bias") or stem.startswith(("b_", "bias_"))
    roles = role if parameter.shape[0] in (3 * E, 3 * D, 2 * E) else role[0]
    if is_bias or role == "n":
        each = [WEIGHTS[f"{'b' if is_bias else 'w'}{r}"] for r in roles]
        width = parameter.numel() // len(roles)
        return torch.cat([x[:width] for x in each]).reshape(shape)
    each = [WEIGHTS[f"w{r}"] for r in roles]
    if len(shape) == 3:  # [H, E, D] or [H, D, E]
        (w,) = each
        return w.view(H, D, E).mT if shape == (H, E, D) else w.T.reshape(H, D, E)
    out_in = of_a_layer or "proj_weight" in name
    height, width = shape if out_in else shape[::-1]
    stacked = torch.cat([w[: height // len(roles), :width] for w in each])
    return stacked if out_in else stacked.T


def with_weights(made: nn.Module) -> nn.Module:
    made = made.double().eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(carried(name, parameter))
    return made


def style_mask(each: Planted, mask: Tensor) -> Tensor:
    """The mask in the shape this module takes."""
    if (each.fault, each.style) in TAKES_PADDING:
        return PADDING.clone()
    if each.style == "fused" and each.fault != "mask repeated in wrong order":
        return mask[:, None].clone()
    return mask.clone()


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def takes(made: nn.Module, name: str) -> bool:
    return name in inspect.signature(made.forward).parameters


def call(each: Planted, made: nn.Module, inputs: tuple[Tensor, ...], mask: Tensor | None = None) -> Tensor:
    inputs = tuple(x.clone() for x in inputs)
    options: dict[str, Any] = {flag: True for flag in ("causal", "is_causal") if takes(made, flag)}
    if mask is not None and takes(made, "mask"):
        options["mask"] = style_mask(each, mask)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Implicit dimension choice")
        return first(made(*(inputs[:1] if each.style == "fused" else inputs), **options))


def same(a: Tensor, b: Tensor, tolerance: float = 1e-7) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def needs_mask(fault: str) -> bool:
    words = ("mask", "fill", "scores times", "first sample", "padding", "overflow", "empty row")
    return fault.startswith(words)


def expected(each: Planted) -> Tensor:
    """What the module should give on the probe its fault shows on."""
    inputs = (Q, Q, Q) if each.style == "fused" else (Q, K, V)
    if each.fault.startswith("causal"):
        return truth(WEIGHTS, *inputs, CAUSAL)
    if not needs_mask(each.fault):
        return truth(WEIGHTS, *inputs)
    padding = (each.fault, each.style) in TAKES_PADDING
    return truth(WEIGHTS, *inputs, PADDING[:, None].expand(B, T, T) if padding else MASK)


def found(each: Planted) -> Tensor:
    return call(each, with_weights(each.make(E, H)), (Q, K, V), MASK if needs_mask(each.fault) else None)


def named(each: Planted) -> str:
    return f"{each.fault} ({each.style})"


def planted(fault: str, style: str) -> Planted:
    (each,) = (p for p in PLANTED if (p.fault, p.style) == (fault, style))
    return each


# The faults


def test_every_fault_is_in_every_style_or_cannot_be() -> None:
    assert len({(each.fault, each.style) for each in PLANTED}) == len(PLANTED)
    there = {(each.fault, each.style) for each in PLANTED} | set(NOT_POSSIBLE)
    assert {(fault, style) for fault in FAULTS for style in STYLES} == there
    for faults in (NO_FAULT, RIGHT_NUMBERS, CRASHES, ONLY_WITH_CARRIED_WEIGHTS, set().union(*SAME_NUMBERS)):
        assert set(faults) <= set(FAULTS)


@pytest.mark.parametrize("style", STYLES)
def test_ten_faults_of_a_style_or_more_stand_alone(style: str) -> None:
    alone = [each.fault for each in PLANTED if each.style == style and each.make.__bases__ == (nn.Module,)]
    assert len(alone) >= 10


@pytest.mark.parametrize(("name", "causal"), [("separate", False), ("separate", True), ("fused", False)])
def test_the_style_without_a_fault_is_right(name: str, causal: bool) -> None:
    room = STYLES[name]
    make = {"separate": room.__dict__.get("CausalSeparate" if causal else "Separate"), "fused": None}[name]
    made = with_weights((make or room.Fused)(E, H))
    each = Planted("", name, type(made), "")
    inputs = (Q, Q, Q) if name == "fused" else (Q, K, V)
    mask = CAUSAL if causal else MASK
    assert same(call(each, made, inputs, mask), truth(WEIGHTS, *inputs, mask))


@pytest.mark.parametrize("make", ["PerHead", "Matrices", "InProjection", "CausalPerHead"])
def test_the_einsum_modules_without_a_fault_are_right(make: str) -> None:
    made = with_weights(getattr(STYLES["einsum"], make)(E, H))
    mask = CAUSAL if "Causal" in make else MASK
    assert same(
        call(Planted("", "einsum", type(made), ""), made, (Q, K, V), mask), truth(WEIGHTS, Q, K, V, mask)
    )


WRONG = [each for each in PLANTED if each.fault not in {*NO_FAULT, *RIGHT_NUMBERS, *CRASHES}]


@pytest.mark.parametrize("each", WRONG, ids=named)
def test_a_fault_shows(each: Planted) -> None:
    torch.manual_seed(0)
    assert not same(found(each), expected(each), tolerance=1e-3)


@pytest.mark.parametrize(
    "each",
    [each for each in PLANTED if each.fault in {*NO_FAULT, *RIGHT_NUMBERS} - {"heads in a list"}],
    ids=named,
)
def test_what_is_right_on_an_ordinary_probe_is_right(each: Planted) -> None:
    assert same(found(each), expected(each))


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in STYLES_DIFFER])
def test_a_fault_is_the_same_in_every_style(fault: str) -> None:
    for mask in (None, MASK):
        if mask is not None and fault in ("attention across heads", "wrong layout"):
            continue  # no room for a mask
        outputs = {
            style: call(
                planted(fault, style), with_weights(planted(fault, style).make(E, H)), (Q, Q, Q), mask
            )
            for style in STYLES
            if (fault, style) not in NOT_POSSIBLE
        }
        one, *others = outputs.values()
        assert all(same(one, other) for other in others), outputs.keys()


@pytest.mark.parametrize("style", STYLES)
def test_faults_differ_from_each_other(style: str) -> None:
    """But for those that are said to have the same numbers."""
    torch.manual_seed(0)
    faults = [
        each
        for each in WRONG
        if each.style == style
        and not each.fault.startswith("causal")
        and each.fault not in ("attention across heads", "wrong layout")
    ]
    seen: list[tuple[str, Tensor, Tensor]] = []
    for each in faults:
        made = with_weights(each.make(E, H))
        plain, masked = call(each, made, (Q, K, V)), call(each, made, (Q, K, V), MASK)
        for other, other_plain, other_masked in seen:
            if any({each.fault, other} <= group for group in SAME_NUMBERS):
                continue
            assert not (same(plain, other_plain, 1e-6) and same(masked, other_masked, 1e-6)), (
                each.fault,
                other,
            )
        seen.append((each.fault, plain, masked))


@pytest.mark.parametrize("group", SAME_NUMBERS, ids=lambda group: min(group))
def test_faults_with_the_same_numbers_have_them(group: set[str]) -> None:
    one, *others = (found(planted(fault, "separate")) for fault in sorted(group))
    assert all(same(one, other) for other in others)


# The faults that do not show in the output of an ordinary probe


@pytest.mark.parametrize("style", STYLES)
def test_crashes_crash(style: str) -> None:
    for fault in CRASHES:
        with pytest.raises(RuntimeError):
            found(planted(fault, style))


@pytest.mark.parametrize("style", STYLES)
def test_a_fill_too_small_leaks_where_scores_are_large(style: str) -> None:
    each = planted("fill too small", style)
    inputs = (Q * 3e3,) * 3
    leaked = call(each, with_weights(each.make(E, H)), inputs, MASK)
    assert not same(leaked, truth(WEIGHTS, *inputs, MASK), tolerance=1e-2)


@pytest.mark.parametrize("style", STYLES)
def test_only_the_overflow_overflows_in_half(style: str) -> None:
    half = tuple(x.half() for x in (Q, K, V))
    for fault in ("overflow in half", "empty row nan", "empty row uniform", "empty row zero", "no scale"):
        each = planted(fault, style)
        made = with_weights(each.make(E, H)).half()
        if fault == "overflow in half":
            with pytest.raises(RuntimeError, match="without overflow"):
                call(each, made, half, MASK)
        else:
            assert call(each, made, half, MASK).isfinite().all()


@pytest.mark.parametrize("style", STYLES)
def test_heads_in_a_list_are_right_and_no_parameters(style: str) -> None:
    each = planted("heads in a list", style)
    torch.manual_seed(0)
    made = each.make(E, H)
    assert sum(p.numel() for p in made.parameters()) <= E * E + E
    w: Weights = {f"b{role}": torch.zeros(E) for role in "qkvo"}
    if style == "separate":
        for role in "qkv":
            w[f"w{role}"] = torch.cat([layer.weight for layer in getattr(made, f"{role}_heads")])
            w[f"b{role}"] = torch.cat([layer.bias for layer in getattr(made, f"{role}_heads")])
    elif style == "fused":
        for i, role in enumerate("qkv"):
            w[f"w{role}"] = torch.cat([layer.weight.chunk(3)[i] for layer in made.heads])
            w[f"b{role}"] = torch.cat([layer.bias.chunk(3)[i] for layer in made.heads])
    else:
        for role in "qkv":
            w[f"w{role}"] = torch.cat(list(getattr(made, f"W_{role}")), dim=1).T
        w["wo"] = made.W_o.T
    if style != "einsum":
        last = made.W_o if style == "separate" else made.proj
        w["wo"], w["bo"] = last.weight, last.bias
    inputs = tuple(x.float() for x in ((Q, Q, Q) if style == "fused" else (Q, K, V)))
    assert same(call(each, made, inputs, MASK), truth(w, *inputs, MASK), tolerance=1e-4)


@pytest.mark.parametrize("style", STYLES)
def test_what_is_changed_in_place_is_changed(style: str) -> None:
    made = with_weights(planted("input modified", style).make(E, H))
    q, k, v = Q.clone(), K.clone(), V.clone()
    with torch.no_grad():
        made(q) if style == "fused" else made(q, k, v)
    assert [torch.equal(*pair) for pair in ((q, Q), (k, K), (v, V))].count(False) == 1
    each = planted("mask modified", style)
    mask = style_mask(each, MASK)
    with torch.no_grad():
        with_weights(each.make(E, H))(*((Q,) if style == "fused" else (Q, K, V)), mask)
    assert torch.equal(mask, ~style_mask(each, MASK))


@pytest.mark.parametrize("style", STYLES)
def test_dropout_in_eval_differs_from_run_to_run(style: str) -> None:
    each = planted("dropout in eval", style)
    made = with_weights(each.make(E, H))
    assert not torch.equal(call(each, made, (Q, K, V)), call(each, made, (Q, K, V)))


@pytest.mark.parametrize("style", STYLES)
def test_empty_rows_give_what_they_say(style: str) -> None:
    mask = MASK.clone()
    mask[1, 2] = False
    for fault in ("nan", "uniform", "zero"):
        each = planted(f"empty row {fault}", style)
        row = call(each, with_weights(each.make(E, H)), (Q, K, V), mask)[1, 2]
        values = (Q if style == "fused" else V)[1] @ WEIGHTS["wv"].T + WEIGHTS["bv"]
        mean = values.mean(0) @ WEIGHTS["wo"].T + WEIGHTS["bo"]
        if fault == "nan":
            assert row.isnan().all()
        else:
            assert same(row, mean if fault == "uniform" else WEIGHTS["bo"])


# Pairs


def test_all_pairs_of_ten_are_there_or_left_out() -> None:
    assert len(PAIRS) + len(LEFT_OUT) == 45
    assert len({pair.faults for pair in PAIRS} | set(LEFT_OUT)) == 45


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " and ".join(pair.faults))
def test_a_pair_differs_from_the_truth_and_from_either_fault(pair: Pair) -> None:
    def both(each: Planted) -> Tensor:
        made = with_weights(each.make(E, H))
        return torch.cat([call(each, made, (Q, K, V)), call(each, made, (Q, K, V), MASK)])

    mine = both(Planted("", "separate", pair.make, ""))
    right = torch.cat([truth(WEIGHTS, Q, K, V), truth(WEIGHTS, Q, K, V, MASK)])
    assert not same(mine, right, tolerance=1e-3)
    for fault in pair.faults:
        assert not same(mine, both(planted(fault, "separate")), tolerance=1e-3)


# Right modules


def of_layers(made: nn.Module, *names: str) -> Weights:
    w: Weights = {}
    for role, name in zip("qkvo", names, strict=True):
        layer = made.get_submodule(name)
        w[f"w{role}"] = layer.weight
        w[f"b{role}"] = torch.zeros(E).double() if layer.bias is None else layer.bias
    return w


def of_fused(weight: Tensor, bias: Tensor | None, out: nn.Module) -> Weights:
    bias = torch.zeros(3 * E).double() if bias is None else bias
    w = {f"w{role}": x for role, x in zip("qkv", weight.chunk(3), strict=True)}
    return (
        w
        | {f"b{role}": x for role, x in zip("qkv", bias.chunk(3), strict=True)}
        | {
            "wo": out.weight,
            "bo": torch.zeros(E).double() if out.bias is None else out.bias,
        }
    )


def of_heads(made: nn.Module) -> Weights:
    """`HeadsSideBySide`, without biases but the last."""
    w = {
        f"w{n[0]}": torch.cat([getattr(head, n).weight for head in made.heads])
        for n in ("query", "key", "value")
    }
    return (
        w | {f"b{r}": torch.zeros(E).double() for r in "qkv"} | {"wo": made.proj.weight, "bo": made.proj.bias}
    )


def of_head_axis(made: nn.Module) -> Weights:
    w = {f"w{r}": getattr(made, f"W_{r.upper()}").mT.reshape(E, E) for r in "qkv"}
    w |= {f"b{r}": getattr(made, f"b_{r.upper()}").reshape(E) for r in "qkv"}
    return w | {"wo": made.W_O.reshape(E, E).T, "bo": made.b_O}


def of_interleaved(made: nn.Module) -> Weights:
    weight = made.qkv_proj.weight.view(H, 3, D, E).transpose(0, 1).reshape(3 * E, E)
    return of_fused(weight, made.qkv_proj.bias.view(H, 3, D).transpose(0, 1).reshape(3 * E), made.o_proj)


def of_lists(made: nn.Module) -> Weights:
    w = {f"w{r}": torch.cat([layer.weight for layer in getattr(made, f"{r}_heads")]) for r in "qkv"}
    w |= {f"b{r}": torch.cat([layer.bias for layer in getattr(made, f"{r}_heads")]) for r in "qkv"}
    return w | {"wo": made.w_concat.weight, "bo": made.w_concat.bias}


def of_in_out(made: nn.Module) -> Weights:
    w = {"wq": made.W_query.T, "wk": made.W_key.T, "wv": made.W_value.T, "wo": made.out_proj.weight}
    return w | {f"b{r}": torch.zeros(E).double() for r in "qkv"} | {"bo": made.out_proj.bias}


def of_in_out_fused(made: nn.Module) -> Weights:
    w = {f"w{r}": x for r, x in zip("qkv", made.c_attn.weight.T.chunk(3), strict=True)}
    w |= {f"b{r}": x for r, x in zip("qkv", made.c_attn.bias.chunk(3), strict=True)}
    return w | {"wo": made.c_proj.weight.T, "bo": made.c_proj.bias}


def of_cross(made: nn.Module) -> Weights:
    k, v = made.to_kv.weight.chunk(2)
    w = {"wq": made.to_q.weight, "wk": k, "wv": v, "wo": made.to_out.weight, "bo": made.to_out.bias}
    return w | {f"b{r}": torch.zeros(E).double() for r in "qkv"}


def layers(*names: str) -> Callable[[nn.Module], Weights]:
    return lambda made: of_layers(made, *names)


def fused(name: str, out: str) -> Callable[[nn.Module], Weights]:
    return lambda m: of_fused(m.get_submodule(name).weight, m.get_submodule(name).bias, m.get_submodule(out))


def torchs(inner: str, out: str) -> Callable[[nn.Module], Weights]:
    def read(made: nn.Module) -> Weights:
        owner = made.get_submodule(inner)
        return of_fused(owner.in_proj_weight, owner.in_proj_bias, made.get_submodule(out))

    return read


def added(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).double().masked_fill(~mask, -math.inf)


# Each with its weights, the mask the truth is given (of the four kinds), and how it is called with that mask.
Run = Callable[[Any, Tensor, Tensor, Tensor, Tensor | None], Any]
NONE: Tensor | None = None
PAD, SHARED = PADDING[:, None].expand(B, T, T), MASK[:1].expand(B, T, T)
SELF = (Q, Q, Q)


def plain(m: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
    return m(q, k, v) if mask is None else m(q, k, v, mask)


def only_x(m: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
    return m(q)


def with_heads(m: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
    return m(q, k, v, None if mask is None else mask[:, None])


def x_with_heads(m: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
    return m(q, mask[:, None])


def sequence_first(m: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return m(query=q, key=k, value=v, mask=mask.permute(1, 2, 0)).transpose(0, 1)


CASES: dict[str, tuple[Callable[[nn.Module], Weights], tuple[Tensor, ...], Tensor | None, Run]] = {
    "four linears in a list": (layers(*(f"linears.{i}" for i in range(4))), (Q, K, V), MASK, plain),
    "config and buffer": (fused("c_attn", "c_proj"), SELF, CAUSAL, only_x),
    "encoder": (
        layers("query", "key", "value", "dense"), SELF, PAD,
        lambda m, q, k, v, mask: m(q, added(mask[:, None, :1])),
    ),
    "fused and split": (fused("c_attn", "c_proj"), SELF, MASK, x_with_heads),
    "heads side by side": (of_heads, SELF, CAUSAL, only_x),
    "head axis": (of_head_axis, SELF, CAUSAL, only_x),
    "values keys query": (
        layers("queries", "keys", "values", "fc_out"), (Q, K, V), MASK,
        lambda m, q, k, v, mask: m(v, k, q, mask[:, None]),
    ),
    "sequence first": (layers("query", "key", "value", "output"), (Q, K, V), MASK, sequence_first),
    "additive mask": (
        layers("q_proj", "k_proj", "v_proj", "o_proj"), (Q, K, V), MASK,
        lambda m, q, k, v, mask: m(q, k, v, added(mask[:, None])),
    ),
    "torch's function": (layers("wq", "wk", "wv", "wo"), (Q, K, V), MASK, with_heads),
    "key padding mask": (
        layers("fc_q", "fc_k", "fc_v", "fc_o"), (Q, K, V), PAD,
        lambda m, q, k, v, mask: m(q, k, v, ~mask[:, 0]),
    ),
    "renormalised": (layers("W_q", "W_k", "W_v", "W_o"), (Q, K, V), MASK, plain),
    "queries scaled first": (layers("linear_q", "linear_k", "linear_v", "linear_o"), (Q, K, V), MASK, plain),
    "last head first": (layers("W_q", "W_k", "W_v", "W_o"), (Q, K, V), MASK, plain),
    "no biases": (layers("q_proj", "k_proj", "v_proj", "output_proj"), (Q, K, V), MASK, with_heads),
    "no key bias": (
        layers("query", "key", "value", "out"), (Q, K, K), SHARED,
        lambda m, q, k, v, mask: m(q, k, added(mask[0])),
    ),
    "fused interleaved": (of_interleaved, SELF, MASK, x_with_heads),
    "widths": (layers("w_qs", "w_ks", "w_vs", "fc"), (Q, K, V), MASK, plain),
    "lazy layers": (layers("W_q", "W_k", "W_v", "W_o"), (Q, K, V), MASK, plain),
    "in_proj_weight": (torchs("", "out_proj"), (Q, K, V), MASK, with_heads),
    "torch's class inside": (
        torchs("mha", "mha.out_proj"), SELF, SHARED, lambda m, q, k, v, mask: m(q, mask[0])
    ),
    "function": (
        lambda m: {**WEIGHTS, **{f"b{r}": torch.zeros(E).double() for r in "qkvo"}}, (Q, K, V), NONE,
        lambda m, q, k, v, mask: m(q, k, v, *(WEIGHTS[f"w{r}"].T for r in "qkvo"), H),
    ),
    "unflatten and move": (fused("to_qkv", "to_out.0"), SELF, NONE, only_x),
    "averaged weights": (layers("W_Q", "W_K", "W_V", "W_O"), (Q, K, V), MASK, plain),
    "scriptable": (
        layers("q", "k", "v", "o"), (Q, K, V), MASK, lambda m, q, k, v, mask: m(q, k, v, ~mask)
    ),
    "extra keywords": (
        layers("q_proj", "k_proj", "v_proj", "out_proj"), SELF, PAD,
        lambda m, q, k, v, mask: m(q, attention_mask=mask[:, 0], use_cache=False),
    ),
    "unified heads": (layers("toqueries", "tokeys", "tovalues", "unifyheads"), SELF, NONE, only_x),
    "unified heads, causal": (layers("toqueries", "tokeys", "tovalues", "unifyheads"), SELF, CAUSAL, only_x),
    "core apart": (
        layers("linear_layers.0", "linear_layers.1", "linear_layers.2", "output_linear"),
        (Q, K, V), MASK, with_heads,
    ),
    "in-out matrices": (of_in_out, SELF, CAUSAL, only_x),
    "cross": (of_cross, (Q, K, K), NONE, lambda m, q, k, v, mask: m(q, k)),
    "one layer per head": (of_lists, (Q, K, V), MASK, plain),
    "softmax by hand": (layers("Q", "K", "V", "W_out"), (Q, K, V), MASK, plain),
    "in-out fused": (of_in_out_fused, SELF, CAUSAL, only_x),
    "queries one by one": (
        layers("qkv_nets.0", "qkv_nets.1", "qkv_nets.2", "out_projection_net"), (Q, K, V), SHARED,
        lambda m, q, k, v, mask: m(q, k, v, mask[0]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("right", RIGHT, ids=lambda right: right.style)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_right_module_is_right(right: Right) -> None:
    weights, inputs, mask, run = CASES[right.style]
    torch.manual_seed(0)
    made = right.build()
    if isinstance(made, nn.Module):
        made = made.double().eval()
        if right.style == "lazy layers":
            made(Q, K, V)
        with torch.no_grad():  # zero biases would hide a mistake
            for i, parameter in enumerate(made.parameters()):
                if parameter.ndim == 1 or parameter.shape == (H, D):
                    parameter.copy_(normal(50 + i, *parameter.shape))
    with torch.no_grad():
        assert same(first(run(made, *inputs, mask)), truth(weights(made), *inputs, mask), tolerance=1e-10)


def test_the_scriptable_one_is() -> None:
    (right,) = (each for each in RIGHT if each.style == "scriptable")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(right.build())
    assert scripted(*(x.float() for x in (Q, K, V))).shape == (B, T, E)


# Scripts that do not run


@pytest.mark.parametrize("name", SOURCES)
def test_a_broken_script_breaks_where_it_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    line, error, _ = WHAT[name]
    room: dict[str, Any] = {"__name__": "learner"}
    x = torch.randn(2, 5, E)

    def use() -> None:
        exec(compile(SOURCES[name], "learner.py", "exec"), room)  # our own text
        classes = [each for each in room.values() if isinstance(each, type) and each.__module__ == "learner"]
        for each in classes[-1:]:
            made = each(E, H)
            needed = [p for p in inspect.signature(made.forward).parameters.values() if p.default is p.empty]
            assert made(*(x for _ in needed)) is None

    if not error:
        use()
        return
    with pytest.raises(Exception) as caught:  # noqa: PT011  which one is looked at below
        use()
    raised = caught.value
    assert type(raised).__name__ == error
    at = raised.lineno if isinstance(raised, SyntaxError) else None
    frames = [f.lineno for f in traceback.extract_tb(raised.__traceback__) if f.filename == "learner.py"]
    assert (at or frames[-1]) == line
