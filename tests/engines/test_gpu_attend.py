"""The Triton kernels of the first pass, run by Triton's interpreter on a CPU in tiles of 16 x 16.

Every rule of a mask and every option against float64, forward and backward; the lists of tiles that are
walked; what is collected on the way; who is refused, and why.

Letters: B batch, H num_heads, Hk num_kv_heads, T query_len, S key_len, D head_dim, Dv value_dim.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import headwise as hw
from headwise import Mask, functional
from headwise.engines import backends, first_pass, second_pass
from headwise.engines.backend import ON_THE_WAY
from headwise.engines.backends import OwnKernels, backend_named
from headwise.engines.gpu import launches
from headwise.engines.plans import PLANS
from headwise.engines.scores import Scores
from headwise.errors import BackendUnavailable
from headwise.scoring import Alibi, Relative
from judge import Case, assert_judged, error, largest, scores_from, sizes, strategies
from second_pass_cases import HIDDEN_TILES, expected, misaligned, normal, relaid, scores_of, strided, turned

pytest.importorskip("triton", reason="by design: triton is made for Linux alone")
if torch.cuda.is_available():
    pytest.skip("by design: with a GPU, the tests named for cuda", allow_module_level=True)


import fast_interpreter
import interpreted_kernels
from headwise.engines.gpu import attend as attend_room
from headwise.engines.gpu import request as request_room
from headwise.engines.gpu.request import Prepared

interpreted, mended = interpreted_kernels.interpreted, interpreted_kernels.mended
poisoned, launched = interpreted_kernels.poisoned, interpreted_kernels.launched
unhurried = interpreted_kernels.unhurried

TILE = 16
LOWEST = torch.finfo(torch.float32).min


class Size(NamedTuple):
    B: int
    H: int
    Hk: int
    T: int
    S: int
    D: int
    Dv: int


# Rules and options; each is a function of the sizes


def coins(seed: int, *shape: int, chance: float = 0.5) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < chance


def labels(seed: int, *shape: int, kinds: int = 3) -> Tensor:
    return torch.randint(kinds, shape, generator=torch.Generator().manual_seed(seed))


def runs(B: int, length: int, document: int = 7) -> Tensor:
    """Contiguous documents, cut elsewhere in each sequence."""
    return (torch.arange(length) + 3 * torch.arange(B)[:, None]) // document


def ends_of(length: int, B: int) -> Tensor:
    return torch.tensor([length, length // 3, 1, 0])[torch.arange(B) % 4]


def an_empty_row(visible: Tensor) -> Tensor:
    visible[..., visible.shape[-2] // 2, :] = False
    return visible


Maker = Callable[[Size], Mask]
RULES: dict[str, Maker] = {
    "full": lambda z: Mask(),
    "causal": lambda z: Mask.causal(),
    "window": lambda z: Mask.window(7),
    "window of one": lambda z: Mask.window(1),
    "wide window": lambda z: Mask.window(23),
    "band": lambda z: Mask.window(left_right=(5, 3)),
    "wide band": lambda z: Mask.window(left_right=(19, 2)),
    "ahead": lambda z: ~Mask.causal(),
    "lengths": lambda z: Mask.padding(ends_of(z.S, z.B)),
    "lengths of both": lambda z: Mask.padding(ends_of(z.S, z.B), ends_of(z.T, z.B)),
    "causal lengths": lambda z: Mask.causal() & Mask.padding(ends_of(z.S, z.B)),
    "window lengths": lambda z: Mask.window(11) & Mask.padding(ends_of(z.S, z.B)),
    "left padding": lambda z: (
        Mask.causal() & Mask.padding(torch.arange(z.S) >= (5 + 13 * torch.arange(z.B)[:, None]) % z.S)
    ),
    "holes": lambda z: Mask.padding(coins(3, z.B, z.S, chance=0.7)),
    "band with holes": lambda z: (
        Mask.window(left_right=(9, 4)) & Mask.padding(coins(3, z.B, z.S, chance=0.7))
    ),
    "documents": lambda z: Mask.documents(runs(z.B, z.S), runs(z.B, z.T)),
    "shared documents": lambda z: Mask.documents(runs(1, z.S)[0], runs(1, z.T)[0]),
    "causal documents": lambda z: Mask.causal() & Mask.documents(runs(z.B, z.S, 19), runs(z.B, z.T, 19)),
    "interleaved": lambda z: Mask.documents(labels(4, z.B, z.S), labels(5, z.B, z.T)),
    "two labels": lambda z: (
        Mask.documents(runs(z.B, z.S), runs(z.B, z.T)) & Mask.documents(labels(4, z.S), labels(5, z.T))
    ),
    "three labels": lambda z: (
        Mask.documents(labels(4, z.B, z.S, kinds=2), labels(5, z.B, z.T, kinds=2))
        & Mask.documents(labels(6, z.S, kinds=2), labels(7, z.T, kinds=2))
        & Mask.documents(runs(z.B, z.S, 23), runs(z.B, z.T, 23))
    ),
    "dense": lambda z: Mask.dense(an_empty_row(coins(8, 1, 1, z.T, z.S))),
    "dense a sequence": lambda z: Mask.dense(an_empty_row(coins(8, z.B, 1, z.T, z.S))),
    "dense a head": lambda z: Mask.causal() & Mask.dense(coins(8, 1, z.H, z.T, z.S)),
    "dense of each": lambda z: Mask.dense(coins(8, z.B, z.H, z.T, z.S, chance=0.1)),
    "dense by key": lambda z: Mask.dense(coins(8, z.B, z.H, 1, z.S)),
    "dense by query": lambda z: Mask.dense(coins(8, z.B, 1, z.T, 1)),
    "blocks": lambda z: Mask.dense(coins(9, 1, z.H, 9, 9)[..., :, None, :, None].expand(
        1, z.H, 9, TILE, 9, TILE).reshape(1, z.H, 9 * TILE, 9 * TILE)[..., : z.T, : z.S]),
    "nothing at all": lambda z: Mask.dense(torch.zeros(1, 1, z.T, z.S, dtype=torch.bool)),
    "everything": lambda z: (
        Mask.window(29) & Mask.padding(coins(3, z.B, z.S, chance=0.9)) & Mask.documents(
            runs(z.B, z.S, 31), runs(z.B, z.T, 31)) & Mask.dense(coins(8, z.B, z.H, z.T, z.S, chance=0.8))
    ),
}  # fmt: skip


def hiding(z: Size) -> Tensor:
    """A bias that hides some, all of one row, and adds to the rest."""
    bias = normal(15, 1, z.H, z.T, z.S).masked_fill(coins(16, 1, 1, z.T, z.S, chance=0.2), LOWEST)
    bias[:, :, z.T // 3] = LOWEST
    return bias


def a_mask(z: Size, B: int = 1) -> Tensor:
    """A mask that came as a bias: 0 and -inf, whole tiles of either."""
    j, i = torch.arange(z.S), torch.arange(z.T)[:, None] + z.S - z.T
    visible = ((j <= i) & (j > i - 37)).expand(B, 1, z.T, z.S).clone()
    visible[-1:, :, :, z.S // 2] = False
    return torch.zeros(B, 1, z.T, z.S, dtype=torch.float64).masked_fill(~visible, -math.inf)


Option = Callable[[Size], dict[str, Any]]
OPTIONS: dict[str, Option] = {
    "plain": lambda z: {},
    "scale": lambda z: {"scale": 0.3},
    "sharp": lambda z: {"scale": 4.0},
    "softcap": lambda z: {"softcap": 3.0},
    "steep softcap": lambda z: {"softcap": 0.7, "scale": 1.0},
    "alibi": lambda z: {"bias": Alibi(normal(6, z.H).abs() / 7)},
    "relative": lambda z: {"bias": Relative(normal(8, z.H, 13))},
    "bias": lambda z: {"bias": normal(5, z.B, z.H, z.T, z.S)},
    "bias a head": lambda z: {"bias": normal(5, z.H, z.T, z.S)},
    "bias a sequence": lambda z: {"bias": normal(5, z.B, 1, z.T, z.S)},
    "bias for all": lambda z: {"bias": normal(5, z.T, z.S)},
    "bias by key": lambda z: {"bias": normal(5, z.B, 1, 1, z.S)},
    "bias by query": lambda z: {"bias": normal(5, z.H, z.T, 1)},
    "bias by head": lambda z: {"bias": normal(5, z.H, 1, 1)},
    "hiding bias": lambda z: {"bias": hiding(z)},
    "mask as bias": lambda z: {"bias": a_mask(z)},
    "masks as bias": lambda z: {"bias": a_mask(z, z.B)},
    "sinks": lambda z: {"sinks": normal(7, z.H)},
    "high sinks": lambda z: {"sinks": normal(7, z.H) + 9},
    "alibi sinks": lambda z: {"bias": Alibi(normal(6, z.H).abs()), "sinks": normal(7, z.H)},
    "all": lambda z: {"bias": normal(5, z.H, z.T, z.S), "sinks": normal(7, z.H), "softcap": 9.0},
}

SIZES = (
    Size(2, 1, 1, 37, 23, 16, 16),
    Size(1, 2, 1, 19, 41, 24, 8),
    Size(2, 2, 1, 17, 19, 5, 17),
    Size(1, 2, 2, 43, 19, 72, 72),
    Size(2, 1, 1, 23, 37, 80, 24),
    Size(1, 2, 1, 37, 37, 8, 5),
)
FEW = (  # few queries over many keys: the keys are cut into parts
    Size(1, 2, 1, 1, 67, 16, 16),
    Size(1, 1, 1, 13, 101, 5, 24),
    Size(2, 2, 1, 1, 53, 24, 5),
    Size(2, 1, 1, 11, 59, 72, 8),
)
LARGEST = Size(2, 2, 1, 19, 23, 8, 8)


def made(z: Size, rule: str = "full", option: str = "plain") -> Case:
    q, k, v = normal(0, z.B, z.H, z.T, z.D), normal(1, z.B, z.Hk, z.S, z.D), normal(2, z.B, z.Hk, z.S, z.Dv)
    return Case(q, k, v, RULES[rule](z), OPTIONS[option](z))


def single(z: Size, rule: str = "full", option: str = "plain") -> Case:
    return made(z, rule, option).to(torch.float32)


def in_turn(rule: str, place: int, among: tuple[Size, ...] = SIZES) -> Size:
    """The next of the sizes with two sequences, or two heads, where the rule is not one for all of them."""
    mask = RULES[rule](LARGEST)
    needed = 2 if mask.differs("b") else 1, 2 if mask.differs("h") else 1
    turn = [*among[place % len(among) :], *among, LARGEST]
    return next(z for z in turn if z.B >= needed[0] and z.H >= needed[1])


def run(case: Case) -> tuple[Tensor, hw.AttentionMap]:
    return hw.attention(case.q, case.k, case.v, case.mask, **case.options, backend="triton")


def learned(case: Case) -> list[str]:
    """What the kernels give a gradient to."""
    names = [name for name in case.leaves() if name != "bias"]
    bias = case.options.get("bias")
    whole = isinstance(bias, Tensor) and bias.shape[-2:] == (case.q.shape[2], case.k.shape[2])
    return [*names, "bias"] if whole or isinstance(bias, Alibi) else names


def judge(case: Case, dtype: torch.dtype = torch.float32) -> None:
    """Output, lse and every gradient within the house's budget."""
    low = case.to(dtype)
    ours, plain, truth = (arm.with_gradients() for arm in (low, low, low.to(torch.float64)))
    names = learned(low)
    for arm in (ours, plain, truth):
        for name, leaf in arm.leaves().items():
            leaf.requires_grad_(name in names)
    out, w = run(ours)
    (plain_out, _, plain_lse), (true_out, _, lse) = plain.reference(), truth.reference()
    pull = normal(9, *out.shape).to(dtype)
    size = sizes(low, pull)
    if largest(lse) > 16:  # sharp scores: the interpreter rounds them before lse is taken off, GPUs do not
        size["output"] *= largest(lse)
        size["v"] *= largest(lse)
    assert out.dtype == dtype and w.lse.dtype == torch.float32
    assert_judged(out, plain_out, true_out, dtype=dtype, size=size["output"], name="output")
    assert_judged(w.lse, plain_lse, lse, dtype=dtype, size=size["lse"], name="lse")
    out.backward(pull)
    plain_out.backward(pull)
    true_out.backward(pull.double())
    for name in names:
        mine, theirs, true = (arm.leaves()[name].grad for arm in (ours, plain, truth))
        assert mine is not None and theirs is not None and true is not None, name
        assert_judged(mine, theirs, true, dtype=dtype, size=size[name], times=3, name=f"d {name}")


def prepared_of(case: Case) -> Prepared:
    return Prepared(scores_from(case.q, case.k, case.v, case.mask, **case.options))


# Everything against float64

EVERY_OPTION = list(OPTIONS)


@pytest.mark.thinned(99, keep=["documents", "left padding"], slow=3)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_as_exact_as_plain_torch(rule: str) -> None:
    place = list(RULES).index(rule)
    judge(made(in_turn(rule, place), rule, EVERY_OPTION[5 * place % len(OPTIONS)]))


@pytest.mark.thinned(99, keep=["masks as bias", "all"], slow=3)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_as_exact_as_plain_torch(option: str) -> None:
    place = EVERY_OPTION.index(option)
    rule = ("causal", "holes", "full", "dense a sequence", "window lengths", "documents", "band")[place % 7]
    judge(made(in_turn(rule, place + 2), rule, option))


FEW_CASES = (
    ("causal", "softcap"), ("lengths", "alibi"), ("documents", "bias"), ("dense of each", "all"),
    ("nothing at all", "sinks"), ("left padding", "relative"),
)  # fmt: skip


@pytest.mark.thinned(99, keep=["lengths-alibi"])
@pytest.mark.parametrize(("rule", "option"), FEW_CASES)
def test_the_keys_of_a_few_queries_are_cut_into_parts(rule: str, option: str) -> None:
    z = in_turn(rule, FEW_CASES.index((rule, option)), FEW)
    case = made(z, rule, option)
    assert attend_room._splits(prepared_of(case.to(torch.float32)), ()) > 1
    judge(case)


@pytest.mark.slow
@settings(max_examples=6)
@given(case=strategies()(most=29))
def test_any_case_is_as_exact_as_plain_torch(case: Case) -> None:
    judge(case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "rule", "option"),
    [
        (torch.bfloat16, "documents", "all"),
        (torch.float16, "causal", "alibi"),
        (torch.bfloat16, "dense", "sinks"),
        (torch.float16, "lengths", "bias"),
        (torch.float16, "full", "masks as bias"),
    ],
    ids=lambda x: str(x).removeprefix("torch."),
)
def test_lower_precision_stays_within_its_budget(dtype: torch.dtype, rule: str, option: str) -> None:
    judge(made(in_turn(rule, 1), rule, option), dtype)


@pytest.mark.parametrize("z", [Size(1, 1, 1, 1, 1, 1, 1), Size(1, 1, 1, 17, 1, 3, 2)], ids=["one", "one key"])
def test_the_smallest_calls_are_right(z: Size) -> None:
    judge(made(z))
    judge(made(z, "causal", "sinks"))


@pytest.mark.slow
def test_several_biases_are_their_sum() -> None:
    z = LARGEST
    case = single(z, "causal")
    dense, slopes = normal(5, z.T, z.S).float(), normal(6, z.H).abs().float()
    values = normal(8, z.H, 5).float()
    offsets = torch.arange(z.S) - (torch.arange(z.T) + z.S - z.T)[:, None]
    total = dense - slopes[:, None, None] * offsets.abs() + values[:, offsets.clamp(-2, 2) + 2]
    actual = []
    for bias in ((dense, Alibi(slopes), Relative(values)), total):
        q = case.q.clone().requires_grad_()
        out, w = run(replace(case, q=q, options={"bias": bias}))
        actual.append((out, w.lse, *torch.autograd.grad(out.square().sum(), q)))
    for apart, together in zip(*actual, strict=True):
        assert error(apart, together) < 1e-5


# Rows that see nothing, and what is not a number


@pytest.mark.thinned(99, keep=["plain"])
@pytest.mark.parametrize("option", ["plain", "sinks", "all"])
def test_a_row_that_sees_nothing_is_0_and_has_no_gradient(option: str) -> None:
    z = Size(2, 2, 1, 17, 19, 5, 8)
    visible = coins(11, z.B, z.H, z.T, z.S)
    visible[0, 1, 7:], visible[1, :, 16] = False, False
    case = replace(made(z, "full", option), mask=Mask.dense(visible)).to(torch.float32).with_gradients()
    out, w = run(case)
    empty = ~visible.any(-1)
    assert torch.equal(torch.isneginf(w.lse), empty) and not bool(out[empty].any())
    pull = torch.zeros_like(out)
    pull[empty] = 1e6  # what comes back to them goes nowhere
    for grad in torch.autograd.grad(out, list(case.leaves().values()), pull):
        assert not bool(grad.any())
    judge(replace(made(z, "full", option), mask=Mask.dense(visible)))


def test_a_value_that_is_not_a_number_is_seen_by_those_who_see_it() -> None:
    """Nobody else: not other channels, heads, sequences, nor queries whose tiles do not hold the key."""
    z, key = Size(2, 4, 2, 67, 67, 8, 5), 20  # the second of five tiles
    case = single(z, "window")
    case.v[0, 1, key, 3] = math.nan
    bad = torch.isnan(run(case)[0])
    sees = (torch.arange(z.T) >= key) & (torch.arange(z.T) < key + 7)
    assert bool(bad[0, 2:, sees, 3].all())
    may = torch.zeros_like(bad)
    may[0, 2:, TILE : 3 * TILE, 3] = True  # the blocks of queries that see anything of its tile
    assert not bool((bad & ~may).any())


@pytest.mark.thinned(99, keep=["1e9"])
@pytest.mark.parametrize(("low", "rule"), [(-1e9, "causal"), (-1e20, "documents")], ids=["1e9", "1e20"])
def test_a_query_whose_keys_are_all_far_below_has_gradients_of_its_size(low: float, rule: str) -> None:
    """Its lse holds no more than the bias: weights made of that alone would be 1 each."""
    z = Size(1, 2, 1, 19, 23, 8, 8)
    actual = []
    for backend in ("triton", "tiles"):
        case = single(z, rule).with_gradients()
        bias = torch.zeros(1, 2, z.T, z.S)
        bias[:, :, 3:7] = low
        out, _ = hw.attention(case.q, case.k, case.v, case.mask, bias=bias.requires_grad_(), backend=backend)
        actual.append((out, *torch.autograd.grad(out.square().sum(), (case.q, case.k, case.v, bias))))
    for mine, theirs in zip(*actual, strict=True):
        assert error(mine, theirs) < 1e-5


@pytest.mark.thinned(99, keep=["shared--inf"])
@pytest.mark.parametrize(
    ("heads", "content"),
    [(1, -math.inf), (2, LOWEST), (1, -1e30)],
    ids=["shared--inf", "a-head-lowest", "-1e30"],
)
def test_a_bias_hides_as_a_mask_does(heads: int, content: float) -> None:
    z = Size(1, 2, 1, 17, 37, 8, 8)
    visible = coins(12, 1, heads, z.T, z.S)
    visible[..., :, 16:32], visible[..., 5, :] = False, False  # a tile, and a row
    bias = torch.zeros(1, heads, z.T, z.S).masked_fill(~visible, content)
    actual = []
    for options in ({"bias": bias.requires_grad_()}, {"mask": Mask.dense(visible)}):
        case = single(z).with_gradients()
        out, w = hw.attention(case.q, case.k, case.v, **options, backend="triton")
        actual.append((out, w.lse, *torch.autograd.grad(out.square().sum(), (case.q, case.k, case.v))))
    for by_bias, by_mask in zip(*actual, strict=True):
        assert torch.equal(torch.isneginf(by_bias), torch.isneginf(by_mask))
        assert error(by_bias, by_mask) < 1e-5
    assert not bool(actual[0][0][:, :, 5].any()) and bool(torch.isneginf(actual[0][1][:, :, 5]).all())


def test_a_bias_in_half_precision_hides_with_its_lowest_number() -> None:
    z = Size(1, 2, 2, 19, 23, 8, 8)
    case, hidden = single(z), coins(13, 1, 2, z.T, z.S)
    hidden[:, :, 4] = True
    bias = normal(5, 1, 2, z.T, z.S).half()
    lowest = bias.masked_fill(hidden, torch.finfo(torch.float16).min)
    out, w = run(replace(case, options={"bias": lowest}))
    same, map_ = run(replace(case, mask=Mask.dense(~hidden), options={"bias": bias}))
    assert error(w.lse, map_.lse) < 1e-6 and error(out, same) < 1e-6


@pytest.mark.thinned(99, keep=["alibi-1e-06"])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 37.0])
@pytest.mark.parametrize("option", ["plain", "alibi", "softcap"])
def test_any_scale_above_0_is_as_exact_as_plain_torch(option: str, scale: float) -> None:
    case = made(Size(1, 2, 1, 17, 19, 5, 8), "causal", option)
    judge(replace(case, options=case.options | {"scale": scale}))


@pytest.mark.thinned(99, keep=["dense"])
@pytest.mark.parametrize("kind", [*HIDDEN_TILES, "bias"])
def test_a_tile_that_shows_nothing_is_not_loaded(kind: str) -> None:
    mask, hidden = HIDDEN_TILES.get(kind, (Mask(), slice(16, 32)))
    bias = None
    if kind == "bias":
        bias = torch.zeros(16, 48)
        bias[:, hidden] = -math.inf
    actual = []
    for content in (0.0, math.nan):
        q, k, v = (normal(i, 1, 1, n, 8).float() for i, n in enumerate((16, 48, 48)))
        k[:, :, hidden] = v[:, :, hidden] = content
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, w = hw.attention(*leaves, mask, bias=bias, softcap=3.0, backend="triton")
        grads = torch.autograd.grad(out.square().sum(), leaves)
        assert not bool(grads[1][:, :, hidden].any()) and not bool(grads[2][:, :, hidden].any())
        actual.append((out, w.lse, *grads))
    for clean, poisoned_ in zip(*actual, strict=True):
        assert torch.equal(poisoned_, clean)


# Lists of tiles


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["holes", "interleaved", "dense"])
def test_more_tiles_than_are_looked_at_at_once(rule: str) -> None:
    """Lists are made 16 tiles at a time in the interpreter: here there are 21."""
    judge(made(Size(1, 1, 1, 67, 331, 1, 1), rule))


@pytest.mark.slow
def test_chosen_queries_see_what_they_see_where_they_stand() -> None:
    z = Size(1, 2, 1, 37, 53, 4, 4)
    chosen = [36, 3, 3, 17, 0, 9, 12, 30, 1, 14, 7, 35, 11, 16, 2, 13, 4, 6, 22]
    for rule in ("causal documents", "band with holes"):
        case = single(z, rule)
        part = hw.AttentionMap(case.q, case.k, mask=case.mask).select(queries=chosen)._scores
        assert isinstance(part, Scores)
        out, lse, _ = attend_room.attend(Prepared(part), case.v)
        truth, _, true_lse = case.to(torch.float64).reference()
        assert error(out, truth[:, :, chosen]) < 1e-5 and error(lse, true_lse[:, :, chosen]) < 1e-5


# Bits, inputs and layouts


def test_a_view_that_overlaps_itself_has_gradients_of_its_own() -> None:
    """Room laid out like such a view would lie across its channels."""
    x = normal(31, 1, 2, 40).float()
    k, v = normal(32, 1, 2, 23, 19).float(), normal(33, 1, 2, 23, 19).float()
    actual = []
    for q in (x.unfold(-1, 19, 1)[:, :, :8].detach(), x.unfold(-1, 19, 1)[:, :, :8].clone()):
        q.requires_grad_()
        out, _ = hw.attention(q, k, v, backend="triton")
        actual.append(torch.autograd.grad(out.square().sum(), q)[0])
    assert actual[0].stride(-1) == 1 and torch.equal(*actual)


BITS = (("documents", "all"), ("window lengths", "alibi sinks"), ("dense a sequence", "bias for all"))


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "option"), BITS)
def test_the_same_bits_every_time_and_nothing_is_written_to(rule: str, option: str) -> None:
    case = single(Size(2, 1, 1, 17, 19, 4, 4), rule, option).with_gradients()
    leaves = list(case.leaves().values())
    before = [x.detach().clone() for x in leaves]
    rules = {name: x.clone() for name, x in case.mask.tensors.items()}
    actual = []
    for _ in range(2):
        out, w = run(case)
        pull = normal(9, *out.shape).float()
        saved = pull.clone(), out.detach().clone()
        grads = torch.autograd.grad(out, leaves, pull)
        assert torch.equal(saved[0], pull) and torch.equal(saved[1], out)
        actual.append((out, w.lse, *grads))
    assert all(torch.equal(a, b) for a, b in zip(*actual, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, leaves, strict=True))
    assert all(torch.equal(x, case.mask.tensors[name]) for name, x in rules.items())


@pytest.mark.slow
@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize(
    ("rule", "option", "dtype"),
    [
        (*both, dtype)
        for both, dtype in zip(BITS, (torch.float32, torch.bfloat16, torch.float16), strict=True)
    ],
)
def test_the_faster_interpreter_gives_the_bits_of_tritons_own(
    rule: str, option: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = made(Size(2, 2, 1, 17, 19, 4, 8), rule, option).to(dtype).with_gradients()
    actual = []
    for faster in (False, True):
        if faster:
            fast_interpreter.quicken(monkeypatch)
        out, w = run(case)
        grads = torch.autograd.grad(out, list(case.leaves().values()), normal(9, *out.shape).to(dtype))
        actual.append((out, w.lse, w.statistics().entropy, *grads))
    assert all(torch.equal(a, b) for a, b in zip(*actual, strict=True))


def by_position(x: Tensor) -> Tensor:
    """[B, T, H, D] in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "by position": by_position,
    "fused": strided,
    "turned": turned,
    "misaligned": misaligned,
}


@pytest.mark.thinned(99, keep=["by position", "turned"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_change_no_bit(layout: str) -> None:
    lay = LAYOUTS[layout]
    actual = []
    for arrange in (lambda x: x, lay):
        case = single(Size(2, 2, 2, 17, 19, 8, 24), "causal lengths", "softcap")
        case = replace(relaid(case, arrange), v=arrange(case.v))
        leaves = [x.requires_grad_() for x in (case.q, case.k, case.v)]
        out, w = run(case)
        pull = arrange(normal(9, *out.shape).float())
        actual.append((out, w.lse, *torch.autograd.grad(out, leaves, pull)))
    for plain, mine in zip(*actual, strict=True):
        assert torch.equal(plain, mine)
    if layout in ("by position", "fused"):
        assert actual[1][0].transpose(1, 2).is_contiguous()  # laid out as q is


@pytest.mark.slow
def test_heads_that_are_one_head_seen_often_give_the_same_bits() -> None:
    z = Size(1, 3, 3, 17, 19, 8, 8)
    actual = []
    for copied in (True, False):
        case = single(z, "holes")
        q, k, v = (x[:, :1].expand(x.shape) for x in (case.q, case.k, case.v))
        leaves = [(x.contiguous() if copied else x).detach().requires_grad_() for x in (q, k, v)]
        out, w = hw.attention(*leaves, case.mask, backend="triton")
        pull = normal(9, z.B, 1, z.T, z.Dv).float().expand(out.shape)  # strides of 0, too
        actual.append((out, w.lse, *torch.autograd.grad(out, leaves, pull)))
    for plain, mine in zip(*actual, strict=True):
        assert torch.equal(plain, mine)


@pytest.mark.slow
def test_a_bias_and_a_mask_of_any_strides() -> None:
    z = Size(2, 2, 1, 5, 17, 8, 8)
    bias = normal(5, z.B, z.H, z.S, z.T).float().transpose(2, 3)
    visible = coins(8, z.H, z.T, z.S, z.B).permute(3, 0, 1, 2)
    actual = []
    for arrange in (lambda x: x.contiguous(), lambda x: x):
        case = replace(single(z), mask=Mask.dense(arrange(visible)))
        given_bias = arrange(bias).detach().requires_grad_()
        out, w = run(replace(case, options={"bias": given_bias}))
        actual.append((out, w.lse, *torch.autograd.grad(out.square().sum(), given_bias)))
    for plain, mine in zip(*actual, strict=True):
        assert torch.equal(plain, mine)


@pytest.mark.parametrize("layout", ["heads", "positions", "one for all heads", "one head", "wide values"])
def test_room_by_plan_is_laid_out_as_room_without(layout: str) -> None:
    q, v = torch.randn(2, 3, 5, 16), torch.randn(2, 3, 7, 16)
    if layout == "positions":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "one for all heads":
        q = q[:, :1].expand(2, 3, 5, 16)
    elif layout == "one head":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)[:, :1]
    elif layout == "wide values":
        v = torch.randn(2, 3, 7, 24, dtype=torch.float64)
    expected_room, room = attend_room.room_like(q, v), attend_room.room_by(q, v)(q)
    assert (room.shape, room.stride(), room.dtype) == (
        expected_room.shape, expected_room.stride(), expected_room.dtype,
    )  # fmt: skip


def test_more_sequences_than_a_grid_is_deep_take_more_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    case = single(Size(3, 1, 1, 5, 7, 4, 4), "lengths", "bias a sequence").with_gradients()
    actual = []
    for deepest in (65535, 2):
        monkeypatch.setattr(request_room, "DEEPEST", deepest)
        out, w = run(case)
        actual.append((out, w.lse, *torch.autograd.grad(out.square().sum(), list(case.leaves().values()))))
    for plain, mine in zip(*actual, strict=True):
        assert torch.equal(plain, mine)


# Statistics on the way


def check_statistics(case: Case, names: tuple[str, ...] = ON_THE_WAY) -> None:
    """What the forward collects is what the second pass measures, and what float64 says."""
    low = case.to(torch.float32)
    prepared = prepared_of(low)
    out, lse, rows = attend_room.attend(prepared, low.v, names)
    bare, bare_lse, none = attend_room.attend(prepared, low.v)
    assert none is None and rows is not None and rows.shape == (len(names), *lse.shape)
    assert error(out, bare) < 1e-5 and error(lse, bare_lse) <= 1e-6 * max(1.0, largest(lse))
    truth_case = low.to(torch.float64)
    arms = []
    for arm in (low, truth_case):
        _, p, arm_lse = arm.reference()
        arms.append(expected(arm, p, arm_lse, scores_of(p, arm_lse), ()))
    measured = second_pass.measured(prepared.scores, lse, second_pass.Measurement(names, per_query=True))
    S, size = low.k.shape[2], sizes(low)["lse"]
    extents = {"distance": float(S), "max_logit": size, "effective_keys": float(S)}
    for name, actual in zip(names, rows, strict=True):
        plain, truth = (arm[name] for arm in arms)
        assert not bool(torch.isnan(actual).any()), name
        assert_judged(actual, plain, truth, dtype=torch.float32, size=extents.get(name, 4.0), name=name)
        assert error(measured[name], actual) <= 1e-5 * max(size, extents.get(name, 1.0)), name


@pytest.mark.thinned(99, keep=["documents"])
@pytest.mark.parametrize("rule", sorted({*list(RULES)[::3], "documents"}))
def test_statistics_of_rules_are_collected_on_the_way(rule: str) -> None:
    place = list(RULES).index(rule)
    check_statistics(made(in_turn(rule, place), rule, EVERY_OPTION[(3 * place + 1) % len(OPTIONS)]))


@pytest.mark.thinned(99, keep=["sinks"])
@pytest.mark.parametrize("option", sorted({*EVERY_OPTION[::3], "sinks"}))
def test_statistics_of_options_are_collected_on_the_way(option: str) -> None:
    place = EVERY_OPTION.index(option)
    rule = ("lengths", "causal", "dense a sequence", "window")[place % 4]
    check_statistics(made(in_turn(rule, place), rule, option))


@pytest.mark.slow
def test_statistics_are_collected_in_any_order_and_alone() -> None:
    case = made(Size(1, 2, 1, 19, 23, 8, 8), "causal", "sinks")
    for names in (("max_logit",), ("distance", "entropy"), ("effective_keys", "confidence"), ("confidence",)):
        check_statistics(case, names)


@pytest.mark.parametrize("sink", [-math.inf, LOWEST], ids=["-inf", "lowest"])
def test_a_sink_that_takes_nothing_is_none(sink: float) -> None:
    case = single(Size(1, 2, 1, 19, 23, 8, 8), "causal")
    without = attend_room.attend(prepared_of(case), case.v, ON_THE_WAY)
    case.options["sinks"] = torch.full((2,), sink)
    actual = attend_room.attend(prepared_of(case), case.v, ON_THE_WAY)
    for mine, plain in zip(actual, without, strict=True):
        assert error(mine, plain) < 1e-6


# Who is refused, and why


def call(**args: Any) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    size = {"B": 1, "H": 2, "T": 5, "S": 7, "D": 8, "Dv": 8, "dtype": torch.float32}
    size |= {name: args.pop(name) for name in size if name in args}
    q, k, v = (
        torch.zeros(size["B"], size["H"], n, d, dtype=size["dtype"])
        for n, d in ((size["T"], size["D"]), (size["S"], size["D"]), (size["S"], size["Dv"]))
    )
    return (q, k, v), args


REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"dropout": 0.25}, "dropout 0.25 needs the matrix of weights, which it never computes"),
    "scale below 0": ({"scale": -0.3}, "it takes a scale above 0, not -0.3"),
    "scale 0": ({"scale": 0.0}, "it takes a scale above 0, not 0"),
    "value_dim": ({"Dv": 257}, "it takes value_dim up to 256, not 257"),
    "head_dim": ({"D": 257, "dtype": torch.bfloat16}, "it takes head_dim up to 256, not 257"),
    "head_dim in float32": ({"D": 129}, "it takes float32 with head_dim and value_dim up to 128, not 129"),
    "value_dim in float32": ({"Dv": 130}, "it takes float32 with head_dim and value_dim up to 128, not 130"),
    "dtype": ({"dtype": torch.float64}, "it takes bfloat16, float16 and float32, not float64"),
    "relative": (
        {"bias": Relative(torch.zeros(2, 5).requires_grad_())},
        "it takes no relative bias if a gradient of a bias is needed",
    ),
    "row bias": (
        {"bias": torch.zeros(1, 1, 1, 7).requires_grad_()},
        "it computes no gradient of a bias [1, 1, 1, 7] that queries or keys share",
    ),
    "column bias": (
        {"bias": torch.zeros(2, 5, 1).requires_grad_()},
        "it computes no gradient of a bias [1, 2, 5, 1] that queries or keys share",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), REASONS.values(), ids=REASONS)
def test_what_the_kernels_cannot_take_is_said_in_words(arguments: dict[str, Any], message: str) -> None:
    tensors, options = call(**arguments)
    answer = hw.why(*tensors, **options)
    assert answer.reasons["triton"] == message and f"  triton: {message}" in str(answer).splitlines()
    with pytest.raises(BackendUnavailable) as caught:
        hw.attention(*tensors, **options, backend="triton")
    assert f'backend="triton" cannot run this call: {message}. ' in str(caught.value)
    out, _ = hw.attention(*tensors, **options)  # somebody else runs it
    assert out.shape == (1, 2, 5, tensors[2].shape[-1])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, of its own files
def test_what_is_refused_by_what_goes_on_around_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = []

    def inside_a_transform(q: Tensor) -> Tensor:
        messages.append(hw.why(q, k, v).reasons["triton"])
        return hw.attention(q, k, v)[0].sum()

    (q, k, v), _ = call()
    torch.func.grad(inside_a_transform)(q)
    assert messages == ["a function transform (torch.func) is active, which only plain operations support"]
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        reason = hw.why(dual, k, v).reasons["triton"]
    assert reason == "a forward-mode derivative is needed, which only plain operations compute"
    nobody, _ = call(B=0)
    assert hw.why(*nobody).reasons["triton"] == "the batch is empty"
    monkeypatch.setattr("headwise.engines.gpu.launches.FARTHEST", 6)
    slopes = Alibi(torch.ones(2))
    reason = hw.why(q, k, v, bias=slopes).reasons["triton"]
    assert reason == "it takes slopes with up to 6 keys, not 7"
    assert hw.why(q, k, v).reasons["triton"] is None
    monkeypatch.setattr(launches, "INTERPRET", False)
    assert hw.why(q, k, v).reasons["triton"] == "it supports cuda only; the tensors are on cpu"


def test_what_learns_is_given_its_gradient_or_refused() -> None:
    """A bias for each query and key, and slopes, are; with nothing to learn, every bias is taken."""
    (q, k, v), _ = call()
    handled = (
        torch.zeros(5, 7).requires_grad_(), torch.zeros(1, 2, 5, 7).requires_grad_(),
        Alibi(torch.ones(2).requires_grad_()), torch.zeros(7), Relative(torch.zeros(2, 5)),
    )  # fmt: skip
    for bias in handled:
        assert hw.why(q, k, v, bias=bias).backend == "triton"
    with torch.no_grad():
        assert hw.why(q, k, v, bias=torch.zeros(7).requires_grad_()).backend == "triton"


def test_torchs_kernels_keep_what_they_do_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "interpreted", lambda: False)
    monkeypatch.setattr(OwnKernels, "devices", ("cpu", "cuda"))
    message = "torch's kernels are faster without a mask and with a causal one"
    half = {"dtype": torch.bfloat16}
    square = half | {"T": 7}
    arguments = {"statistics": "entropy"}
    reluctant: list[dict[str, Any]] = [half, square, square | {"causal": True}, half | arguments]
    willing: list[dict[str, Any]] = [
        {"softcap": 3.0}, {"window": 3}, half | {"causal": True}, square | {"window": 3},
        half | {"softcap": 3.0}, half | {"sinks": torch.zeros(2)}, half | {"bias": torch.zeros(5, 7)},
        half | {"bias": Alibi(torch.ones(2))}, half | {"mask": Mask.padding([3])},
        half | {"mask": Mask.documents([0] * 7)}, half | {"mask": torch.ones(5, 7, dtype=torch.bool)},
        half | {"T": 67, "S": 67} | arguments,
    ]  # fmt: skip
    whole = "torch's efficient kernel takes this float32 call, and compiling ours takes longer"
    reluctant += [half | {"D": 129}, half | {"Dv": 256}, {}, {"mask": Mask.padding([3])}]
    for argv in reluctant:
        tensors, options = call(**argv)
        answer = hw.why(*tensors, **options)
        assert answer.reasons["triton"] == (message if "dtype" in argv else whole)
        assert answer.backend != "triton"
        assert hw.why(*tensors, **options, backend="triton").backend == "triton"
    for argv in willing:
        tensors, options = call(**argv)
        assert hw.why(*tensors, **options).reasons["triton"] is None, argv


def test_why_says_that_and_how_the_kernels_run_a_call() -> None:
    (q, k, v), _ = call()
    answer = hw.why(q, k, v, softcap=3.0)
    assert answer.backend == "triton"
    assert str(answer).splitlines()[0] == "triton runs this call, tile by tile in one kernel."
    assert backend_named("triton").gives_bias_gradient


# torch.compile


COMPILED: dict[str, dict[str, Any]] = {
    "window lengths": {"window": 5, "mask": Mask.padding([7, 23])},
    "documents": {"mask": Mask.documents(torch.arange(23) // 6), "softcap": 3.0},
    "dense": {"mask": coins(8, 2, 1, 19, 23), "sinks": normal(7, 2).float()},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_calls_use_the_same_kernels(name: str, launched: list[str], fresh_compiler: None) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hw.attention(q, k, v, **COMPILED[name])[0]

    case = single(Size(2, 2, 1, 19, 23, 8, 8))
    actual, kernels = [], []
    for function in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        launched.clear()
        fresh = case.with_gradients()
        leaves = [fresh.q, fresh.k, fresh.v]
        out = function(*leaves)
        actual.append((out, *torch.autograd.grad(out, leaves, normal(9, *out.shape).float())))
        kernels.append(launched[:])
    assert kernels[0] == kernels[1] == ["attend_kernel", "attend_dq_kernel", "attend_dkv_kernel"]
    assert all(torch.equal(mine, plain) for mine, plain in zip(*actual, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("rule", "option"),
    [("full", "sinks"), ("holes", "bias a head"), ("dense a head", "plain"), ("window lengths", "alibi")],
)
def test_the_operator_keeps_torchs_rules(rule: str, option: str) -> None:
    case = single(Size(2, 2, 1, 3, 5, 4, 4), rule, option).with_gradients()
    flat = (case.v, *scores_from(case.q, case.k, case.v, case.mask, **case.options).flatten())
    torch.library.opcheck(torch.ops.headwise.attend.default, (*flat, "bias" in case.options, "triton"))


def test_derivatives_of_derivatives_are_taken_through_the_plain_path() -> None:
    actual = []
    for backend in ("triton", "plain"):
        case = single(Size(1, 2, 1, 5, 7, 4, 4)).with_gradients()
        out, _ = hw.attention(case.q, case.k, case.v, window=3, backend=backend)
        (first,) = torch.autograd.grad(out.square().sum(), case.q, create_graph=True)
        actual.append((out, first, *torch.autograd.grad(first.square().sum(), (case.q, case.k, case.v))))
    for mine, plain in zip(*actual, strict=True):
        assert error(mine, plain) <= 1e-4 * max(1.0, largest(plain))


# What is beyond float16


def test_a_bias_beyond_float16_is_no_mask_and_no_infinity() -> None:
    case = single(Size(1, 2, 1, 19, 23, 8, 8))
    low = [x.half() for x in (case.q, case.k, case.v)]
    bias = normal(41, 1, 2, 19, 23).float()
    bias[:, :, 5, :3], bias[:, :, 6] = 7e4, -1e9
    bias[:, :, 7, 4:] = -1e31
    out, w = hw.attention(*low, bias=bias, backend="triton")
    truth = hw.attention(*(x.double() for x in low), bias=bias.double(), backend="plain")[0]
    assert not bool(out.isnan().any()) and bool(torch.isfinite(w.lse).all())
    assert error(out[:, :, 5:8], truth[:, :, 5:8]) < 2e-3


# Chosen queries, shared biases of lower precision


@pytest.mark.parametrize("rule", ["full", "causal"])
def test_queries_in_any_order_have_the_gradients_of_their_places(rule: str) -> None:
    case = single(Size(1, 2, 1, 19, 23, 8, 8), rule).with_gradients()
    scores = prepared_of(case).scores.select(slice(None), slice(None), torch.tensor([5, 1, 17, 3, 18]))
    actual = []
    for backend in ("triton", "tiles"):
        out, _ = first_pass.attend(scores, case.v, backend=backend)
        actual.append(torch.autograd.grad(out.square().sum(), (case.q, case.k, case.v), retain_graph=True))
    for mine, theirs in zip(*actual, strict=True):
        assert error(mine, theirs) < 1e-5


def test_a_bfloat16_bias_for_all_heads_is_looked_at_as_numbers() -> None:
    case = single(Size(1, 2, 1, 19, 37, 8, 8))
    bias = torch.zeros(1, 1, 19, 37).masked_fill(coins(12, 1, 1, 19, 37), -math.inf)
    actual = [
        hw.attention(*(x.to(dtype) for x in (case.q, case.k, case.v)), bias=bias.to(dtype), backend="triton")[
            0
        ]
        for dtype in (torch.bfloat16, torch.float32)
    ]
    assert error(*actual) < 0.05


def test_a_sink_near_the_largest_number_takes_all() -> None:
    case = single(Size(1, 2, 1, 19, 23, 8, 8))
    out, w = hw.attention(case.q, case.k, case.v, sinks=torch.full((2,), 3e38), backend="triton")
    assert not bool(out.any()) and bool(torch.isfinite(w.lse).all())


@pytest.mark.thinned(99, keep=["torch.float64"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_sinks_are_read_in_their_own_dtype(dtype: torch.dtype) -> None:
    """In every pass that reads them, several times, and where they do not lie side by side."""
    case = single(Size(1, 2, 1, 19, 23, 8, 8), "causal")
    for seed in (1, 2, 3):
        arguments = normal(seed, 4).to(dtype)[::2]
        assert not arguments.is_contiguous()
        actual, w = hw.attention(case.q, case.k, case.v, causal=True, sinks=arguments, backend="triton")
        _, truth = hw.attention(
            *(x.double() for x in (case.q, case.k)), case.v.double(), causal=True, sinks=arguments.double()
        )
        assert error(actual, truth.dense() @ case.v.double()) < 1e-6
        assert error(w.lse, truth.lse) < 1e-5
        assert error(w.statistics("entropy").entropy, truth.statistics("entropy").entropy) < 1e-5
        assert error(w.top(3).values, truth.top(3).values) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_planned_kernels_are_given_the_dtype_they_were_compiled_for(dtype: torch.dtype) -> None:
    """Sinks that do not lie side by side went to them as float32, whatever they had been before."""
    case = single(Size(1, 2, 1, 19, 23, 8, 8), "causal")
    arguments = [normal(seed, 4).to(dtype)[::2] for seed in (1, 2)]
    first, second = (scores_from(case.q, case.k, case.v, causal=True, sinks=sinks) for sinks in arguments)
    prepared = Prepared(first)
    compiled, launched = prepared.rules.sinks, request_room.rules_by(prepared)(second).sinks
    assert compiled is not None and launched is not None
    assert launched.dtype == compiled.dtype and launched.stride() == compiled.stride() == (1,)
    assert torch.equal(launched.double(), arguments[1].float().double())


# Calls of a kind that came before


AGAIN: dict[str, Callable[[int], dict[str, Any]]] = {
    "softcap": lambda seed: {"causal": True, "softcap": 3.0},
    "two parts of channels": lambda seed: {"window": 9},
    "alibi": lambda seed: {"causal": True, "bias": Alibi(normal(seed, 2).float().abs().requires_grad_())},
    "sinks": lambda seed: {"causal": True, "sinks": normal(seed, 2).float().requires_grad_()},
    "sinks of more digits": lambda seed: {"causal": True, "sinks": normal(seed, 2).double().requires_grad_()},
    "bias": lambda seed: {"bias": normal(seed, 1, 2, 19, 19).float().requires_grad_()},
    "lengths": lambda seed: {"causal": True, "mask": Mask.padding(torch.tensor([19, 2 + seed % 5]))},
    "own lists": lambda seed: {"causal": True, "mask": Mask.documents(torch.arange(19) // (4 + seed % 3))},
    "each tile asks": lambda seed: {"mask": Mask.dense(normal(seed, 1, 1, 19, 19) > 0)},
    "holes": lambda seed: {"mask": Mask.padding(normal(seed, 2, 19) > -0.5), "softcap": 5.0},
}


@pytest.mark.thinned(99, keep=["own lists", "sinks"], slow=3)
@pytest.mark.parametrize("name", AGAIN)
def test_a_planned_call_is_the_same_launch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    D = 24 if name == "two parts of channels" else 16

    def answered(seed: int) -> list[Tensor]:
        leaves = [normal(seed + i, 2, h, 19, D).float().requires_grad_() for i, h in enumerate((2, 1, 1))]
        options = AGAIN[name](seed)
        learned = [
            getattr(x, "slopes", x) for x in (options.get("bias"), options.get("sinks")) if x is not None
        ]
        output, weights = hw.attention(*leaves, **options)
        pull = normal(seed + 7, *output.shape).float()
        return [output.detach(), weights.lse, *torch.autograd.grad(output, [*leaves, *learned], pull)]

    for seed in (0, 20, 41):
        again = answered(seed)
        with monkeypatch.context() as patch:
            patch.setattr(first_pass, "plan_for", lambda key: None)
            patch.setattr(first_pass, "_make_plan", lambda *_: None)
            ordinary = answered(seed)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(again, ordinary, strict=True))
    assert PLANS.made_by(first_pass.OWNER)


@pytest.mark.slow
def test_statistics_on_the_way_come_by_plan_too() -> None:
    for seed in (0, 20, 40):
        q, k, v = (normal(seed + i, 1, 2, 67, 8).float() for i in range(3))
        _, weights = hw.attention(q, k, v, causal=True, statistics=True)
        assert weights._collected is not None and set(weights._collected.names) == set(ON_THE_WAY)
        truth = hw.attention(q, k, v, causal=True)[1].statistics(*ON_THE_WAY)
        for name, value in weights.statistics(*ON_THE_WAY).items():
            assert error(value, getattr(truth, name)) <= 1e-5, name


@pytest.mark.thinned(99, keep=["documents"])
@pytest.mark.parametrize("kind", ["lengths", "documents"])
def test_a_mask_that_nobody_reads_is_bound_by_plan(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the values of a mask are not looked at."""
    monkeypatch.setattr(functional, "can_read", lambda x: False)
    for seed in (0, 20, 41):
        q, k, v = (normal(seed + i, 2, 2, 19, 8).float() for i in range(3))
        arguments = (
            torch.tensor([19, 2 + seed % 5]) if kind == "lengths" else torch.arange(19) // (4 + seed % 3)
        )
        mask = Mask.padding(arguments) if kind == "lengths" else Mask.documents(arguments)
        output, weights = hw.attention(q, k, v, mask=mask, window=7)
        arguments.zero_()  # the call has its own
        truth = hw.attention(q, k, v, mask=weights.mask, backend="tiles")
        assert error(output, truth[0]) <= 1e-5 and error(weights.dense(), truth[1].dense()) <= 1e-5
        assert weights.mask.left == 6 and weights.mask.right == 0
        if kind == "lengths":
            assert weights.mask.keys is not None and weights.mask.keys.tolist() == [19, 2 + seed % 5]
    assert len(PLANS.made_by(first_pass.OWNER)) >= 1


@pytest.mark.slow
def test_saved_tensors_may_come_back_laid_out_otherwise() -> None:

    def gradients(seed: int, copied: bool) -> list[Tensor]:
        q = normal(seed, 1, 2, 20, 16).float().requires_grad_()
        pair = normal(seed + 1, 1, 20, 2, 2, 16).float().requires_grad_()
        k, v = (x.transpose(1, 2) for x in pair.unbind(2))
        hooks = torch.autograd.graph.saved_tensors_hooks(
            (lambda x: x.contiguous().clone()) if copied else (lambda x: x), lambda x: x
        )
        with hooks:
            output, _ = hw.attention(q, k, v, causal=True, softcap=5.0)
        return list(torch.autograd.grad(output, [q, pair], output.detach()))

    for seed in range(3):
        gradients(seed, False)
    for copied in (True, False, True):
        actual = gradients(9, copied)
        PLANS.clear()
        for mine, theirs in zip(actual, gradients(9, False), strict=True):
            assert torch.equal(mine, theirs)
        for seed in range(3):
            gradients(seed, copied)


def test_the_default_dtype_decides_nothing() -> None:

    def gradients(seed: int) -> list[Tensor]:
        leaves = [normal(seed + i, 1, 2, 19, 16).float().requires_grad_() for i in range(3)]
        slopes = normal(seed, 2).float().abs().requires_grad_()
        output, _ = hw.attention(*leaves, causal=True, bias=Alibi(slopes))
        return list(torch.autograd.grad(output, [*leaves, slopes], output.detach()))

    for seed in range(3):
        expected_now = gradients(seed)
    before = torch.get_default_dtype()
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            actual = gradients(2)
        finally:
            torch.set_default_dtype(before)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual, expected_now, strict=True))


def test_a_plan_keeps_nobodys_tensors() -> None:
    saved = []
    for seed in range(3):
        q, k, v = (normal(seed + i, 1, 2, 19, 16).float().requires_grad_() for i in range(3))
        bias, sinks = normal(seed, 1, 2, 19, 19).float(), normal(seed, 2).float()
        mask = Mask.dense(normal(seed, 1, 1, 19, 19) > 0)
        for options in ({"bias": bias}, {"mask": mask}, {"sinks": sinks}):
            output, _ = hw.attention(q, k, v, **options)  # type: ignore[arg-type]
            output.sum().backward()
        saved += [weakref.ref(x) for x in (q, k, v, bias, sinks, mask.allowed, output)]
        del q, k, v, bias, sinks, mask, output, options, _
    gc.collect()
    assert PLANS.made_by(first_pass.OWNER)
    assert [ref() is not None for ref in saved] == [False] * len(saved)
