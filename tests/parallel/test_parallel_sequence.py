"""A sequence over ranks against one process and float64: outputs, gradients, statistics, models, watch.

Tests share groups of processes, in which many cases are looked at; what is wrong comes back in words.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import headwise as hw
from headwise import Mask
from headwise.engines.statistics import STATISTICS
from headwise.errors import ArgumentError, HeadwiseError, MaskError, ShapeError
from headwise.models import Transformer, TransformerConfig
from headwise.nn import Rope
from headwise.parallel import sequence, sharded_map
from headwise.parallel.sequence import KEYS, Layout, Message, Ring
from headwise.scoring import Relative
from judge import Case, assert_judged, sizes
from process_groups import run_ranks
from second_pass_cases import masks, normal, numbers, options, values

B, H, Hk, D, Dv = 2, 6, 3, 8, 5


def right(ranks: int, work: Callable[..., list[str]], *arguments: Any) -> None:
    """Every rank of a group finds nothing wrong."""
    actual = run_ranks(ranks, work, *arguments)
    assert actual == [[]] * ranks


# How tokens lie


@pytest.mark.parametrize("order", ["zigzag", "in order"])
@pytest.mark.parametrize(("length", "ranks"), [(7, 1), (8, 4), (23, 2), (29, 4), (31, 3)])
def test_every_token_is_on_one_rank_and_zigzag_shares_causal_work(
    length: int, ranks: int, order: str
) -> None:
    layout = Layout(length, ranks, order)
    held = [layout.positions(rank).tolist() for rank in range(ranks)]
    assert sorted(token for tokens in held for token in tokens) == list(range(length))
    assert [len(tokens) for tokens in held] == [layout.size(rank) for rank in range(ranks)]
    visible = [sum(token + 1 for token in tokens) for tokens in held]
    if order == "zigzag":
        assert max(visible) - min(visible) <= 2 * length  # of length ** 2 / 2 pairs


@pytest.mark.parametrize("name", list(masks(2, 3, 11, 13)))
def test_a_rectangle_of_a_mask_hides_what_the_mask_hides_there(name: str) -> None:
    T, S = 11, 13
    mask = masks(2, 3, T, S, window=4, band=(2, 3), document=5)[name]
    whole, bound = mask.full(T, S, 2, 3).expand(2, 3, T, S), mask.bind(2, 3, T, S)
    for queries, keys in (
        (slice(0, T), slice(0, S)),
        (slice(3, 7), slice(5, 12)),
        (slice(9, 10), slice(2, 3)),
    ):
        part = bound.rectangle(queries, keys)
        at = torch.arange(queries.start, queries.stop) + S - T - keys.start
        t, s = queries.stop - queries.start, keys.stop - keys.start
        visible = part.tile(at, slice(0, t), slice(0, s), s)
        listed = torch.ones(2, 3, t, s, dtype=torch.bool) if visible is None else visible.expand(2, 3, t, s)
        assert torch.equal(listed, whole[:, :, queries, keys])
        counted = mask.bind(2, 3, T, S).counted(T)
        if counted is not None:
            assert torch.equal(part.counted(t), counted[:, queries])


# One call


def cases(T: int, S: int, some: tuple[int, int] = (1, 0)) -> dict[str, Case]:
    """Every rule of a mask and every way to score; some: one in so many of them, from the so-manieth on."""
    bare = numbers(B, H, Hk, T, S, D)
    bare.v = normal(2, B, Hk, S, Dv)
    actual = {"plain": bare}
    for name, mask in masks(B, H, T, S, window=5, band=(4, 3), document=5).items():
        actual[name] = Case(bare.q, bare.k, bare.v, mask)
    for name, more in options(H, T, S).items():
        actual[name] = Case(bare.q, bare.k, bare.v, Mask.causal() if T == S else Mask(), more)
        if name in ("alibi", "relative"):
            actual[f"{name}, all keys"] = Case(bare.q, bare.k, bare.v, Mask(), more)
    both = {"bias": Relative(normal(8, H, 5)), "sinks": normal(7, H), "softcap": 3.0}
    rules = masks(B, H, T, S, window=5, document=5)
    actual["window, padding, all"] = Case(bare.q, bare.k, bare.v, rules["window"] & rules["padding"], both)
    actual["rough"] = Case(12 * bare.q, 12 * bare.k, bare.v, Mask.causal() if T == S else Mask())
    actual["rough, sinks"] = Case(9 * bare.q, 9 * bare.k, bare.v, rules["dense"], {"sinks": normal(7, H)})
    each, first = some
    return {name: actual[name] for name in list(actual)[first::each]}


def one_call(case: Case, dtype: torch.dtype, order: str) -> list[str]:
    """What is wrong with a call over all ranks: output, lse, every gradient, all that its map says."""
    low = case.to(dtype)
    ours, plain, truth = (arm.with_gradients() for arm in (low, low, low.to(torch.float64)))
    pull = normal(11, *low.q.shape[:3], low.v.shape[3])
    whole = (ours.q, ours.k, ours.v)
    mine = [hw.parallel.split(x.detach(), dim=2, order=order).requires_grad_() for x in whole]
    output, weights = hw.parallel.attention(*mine, ours.mask, **ours.options, order=order)
    output.backward(hw.parallel.split(pull.to(dtype), dim=2, order=order), retain_graph=True)
    once = [x.grad.clone() for x in mine if x.grad is not None]
    for arm in (plain, truth):
        actual = arm.reference()[0]
        actual.backward(pull.to(actual))
    plain_output, plain_p, plain_lse = (x.detach() for x in plain.reference())
    size, wrong = sizes(low, pull), []

    def check(label: str, actual: Tensor, theirs: Tensor, true: Tensor, times: float = 2) -> None:
        try:
            assert_judged(actual, theirs, true, dtype=dtype, size=size[label], times=times, name=label)
        except AssertionError as problem:
            wrong.append(str(problem))

    check("output", hw.parallel.join(output, dim=2, order=order), plain_output, truth.reference()[0])
    actual = dict(zip(("q", "k", "v"), (hw.parallel.join(x, dim=2, order=order) for x in once), strict=True))
    for name, leaf in ours.leaves().items():
        if name not in actual:
            assert leaf.grad is not None
            torch.distributed.all_reduce(leaf.grad)
            actual[name] = leaf.grad
        theirs, true = plain.leaves()[name].grad, truth.leaves()[name].grad
        assert theirs is not None and true is not None
        check(name, actual[name], theirs, true, 3)
    output.backward(hw.parallel.split(pull.to(dtype), dim=2, order=order))  # once more: twice as much
    again = [x.grad for x in mine]
    if any(b is None or not torch.equal(2 * a, b) for a, b in zip(once, again, strict=True)):
        wrong.append("a second backward gives something else")
    pictures = ((7, 9), (2, 1))
    wrong += values(low, weights.detach(), (plain_p, plain_lse), pictures, (), fused=False)
    return wrong


def every_rule(T: int, S: int, dtype: torch.dtype, order: str, some: tuple[int, int]) -> list[str]:
    wrong = []
    for name, case in cases(T, S, some).items():
        if dtype == torch.float64 and name.startswith("rough"):
            continue  # the judge's own numbers are as rough there
        try:
            wrong += [f"{name}: {label}" for label in one_call(case, dtype, order)]
        except HeadwiseError as problem:
            wrong.append(f"{name}: {type(problem).__name__}: {problem}")
    return wrong


@pytest.mark.parametrize(
    ("ranks", "T", "S", "dtype", "order", "some"),
    [
        (2, 23, 23, torch.float32, "zigzag", (5, 3)),
        pytest.param(1, 13, 13, torch.float32, "zigzag", (4, 0), marks=pytest.mark.slow),
        pytest.param(2, 23, 23, torch.float32, "zigzag", (2, 0), marks=pytest.mark.slow),
        pytest.param(2, 23, 23, torch.bfloat16, "in order", (2, 1), marks=pytest.mark.slow),
        pytest.param(2, 11, 19, torch.float32, "zigzag", (2, 1), marks=pytest.mark.slow),
        pytest.param(2, 19, 13, torch.float64, "in order", (3, 1), marks=pytest.mark.slow),
        pytest.param(4, 29, 29, torch.float32, "zigzag", (3, 0), marks=pytest.mark.slow),
        pytest.param(4, 29, 29, torch.float64, "in order", (6, 4), marks=pytest.mark.slow),
        pytest.param(4, 23, 29, torch.float16, "zigzag", (6, 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_rule_over_ranks_is_as_exact_as_plain_torch(
    ranks: int, T: int, S: int, dtype: torch.dtype, order: str, some: tuple[int, int]
) -> None:
    right(ranks, every_rule, T, S, dtype, order, some)


# Rows that see nothing, ranks that see nothing, lengths known beforehand


def empty_rows(some: tuple[int, int]) -> list[str]:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    T, wrong = 8 * ranks + 3, []
    bare = numbers(B, H, Hk, T, T, D)
    mine = Layout(T, ranks).positions(rank)
    nobody = torch.ones(T, T, dtype=torch.bool)
    nobody[Layout(T, ranks).positions(0)] = False  # no query of rank 0 sees anything
    nothing = torch.zeros(T, dtype=torch.bool)
    nothing[Layout(T, ranks).positions(1)] = True  # all real keys are on rank 1
    rules = {
        "a rank sees nothing": Mask.dense(nobody),
        "one rank has all keys": Mask.padding(nothing.expand(B, T)),
        "nothing at all": Mask.padding([0, 0]),
        "one sequence of padding": Mask.padding([0, T], [0, T]) & Mask.causal(),
        "a chunk of padding": Mask.padding([1, T // 2], [1, T // 2]),
        "documents across chunks": Mask.documents(torch.arange(T) // (T // ranks + 2)) & Mask.causal(),
        "only later keys": Mask(left=-1),
    }
    each, first = some
    kinds = [(name, more) for name in rules for more in ({}, {"sinks": 3 * normal(7, H)})]
    for name, more in kinds[first::each]:
        case = Case(bare.q, bare.k, bare.v, rules[name], more)
        wrong += [f"{name}, {list(more)}: {label}" for label in one_call(case, torch.float32, "zigzag")]
    q, k, v = (x[:, :, mine] for x in (bare.q, bare.k, bare.v))
    message = hw.parallel.attention(q, k, v, causal=True)[0]
    expected = hw.parallel.attention(q, k, v, causal=True, length=T)[0]
    if not torch.equal(message, expected):
        wrong.append("a length that is known changes something")
    with torch.no_grad():
        quiet = hw.parallel.attention(q.requires_grad_(), k, v, causal=True)[0]
    with torch.inference_mode():
        quieter, weights = hw.parallel.attention(q, k, v, causal=True)
        weights.statistics()
    if quiet.requires_grad or not torch.equal(quiet, message) or not torch.equal(quieter, message):
        wrong.append("no_grad changes something")
    return wrong


@pytest.mark.parametrize(
    ("ranks", "some"), [(2, (3, 1)), pytest.param(4, (2, 0), marks=pytest.mark.slow)], ids=str
)
def test_what_sees_nothing_is_nothing_over_ranks_too(ranks: int, some: tuple[int, int]) -> None:
    right(ranks, empty_rows, some)


# Modules and models


def apart(name: str, actual: Tensor, true: Tensor, bound: float = 1e-12) -> list[str]:
    """What is wrong with a result over ranks, beside one process's in float64."""
    if actual.shape != true.shape:
        return [f"{name}: {list(actual.shape)}, not {list(true.shape)}"]
    same = torch.allclose(actual.double(), true.double(), rtol=bound, atol=bound, equal_nan=True)
    return (
        [] if same else [f"{name}: off by {(actual.double() - true.double()).abs().nan_to_num().max():.3g}"]
    )


MODULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the constructor, of the call
    "plain": ({}, {}),
    "causal, grouped, rope": ({"causal": True, "num_kv_heads": 3, "rope": Rope(), "qk_norm": "rms"}, {}),
    "window, alibi, sinks": ({"window": 5, "alibi": True, "sinks": True, "value_dim": 5}, {}),
    "relative, gate": ({"relative_bias": hw.nn.Buckets(8, 16), "gate": "head", "softcap": 3.0}, {}),
    "lengths": ({"causal": True, "rope": Rope()}, {"lengths": [23, 6]}),
    "documents": ({"causal": True, "rope": Rope()}, {"documents": torch.arange(23) // 7}),
    "no tokens": ({"causal": True}, {"mask": Mask.padding([0, 23])}),
    "padding": ({}, {"mask": torch.arange(23) < torch.tensor([23, 9])[:, None, None, None]}),
    "bias": ({}, {"bias": normal(3, 6, 23, 23), "mask": Mask.window(left_right=(9, 2))}),
}


def modules(order: str) -> list[str]:
    wrong: list[str] = []
    for name, (made, arguments) in MODULES.items():
        torch.manual_seed(0)
        whole = hw.MultiHeadAttention(24, 6, **made, dtype=torch.float64)
        many = hw.parallel.shard_sequence(copy.deepcopy(whole), order=order)
        x, pull = normal(0, B, 23, 24).requires_grad_(), normal(1, B, 23, 24)
        mine = hw.parallel.split(x.detach(), order=order).requires_grad_()
        output, weights = whole(x, **arguments)
        actual, map_over_ranks = many(mine, **arguments)
        wrong += apart(f"{name}: output", hw.parallel.join(actual, order=order), output.detach())
        output.backward(pull)
        actual.backward(hw.parallel.split(pull, order=order))
        hw.parallel.sum_gradients(many)
        assert mine.grad is not None and x.grad is not None
        wrong += apart(f"{name}: d x", hw.parallel.join(mine.grad, order=order), x.grad)
        for (place, a), b in zip(many.named_parameters(), whole.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None
            wrong += apart(f"{name}: d {place}", a.grad, b.grad, 1e-10)
        mine_too, all_of_it = map_over_ranks.detach().statistics(), weights.detach().statistics()
        for statistic, true in all_of_it.items():
            wrong += apart(f"{name}: {statistic}", mine_too[statistic], true)
        heads = hw.parallel.join(many.head_outputs(mine, **arguments), dim=2, order=order)
        wrong += apart(f"{name}: heads", heads, whole.head_outputs(x, **arguments).detach())
    return wrong


@pytest.mark.parametrize(
    ("ranks", "order"), [(2, "zigzag"), pytest.param(4, "in order", marks=pytest.mark.slow)]
)
def test_a_module_over_ranks_is_the_module(ranks: int, order: str) -> None:
    right(ranks, modules, order)


def transformer(**more: Any) -> Transformer:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "d_model": 24, "num_heads": 6, "num_layers": 2, "d_ff": 31}
    return Transformer(TransformerConfig(**{**sizes, **more}), dtype=torch.float64)


MODELS: dict[str, dict[str, Any]] = {
    "rope": {"rope": Rope(), "num_kv_heads": 2},
    "learned": {"positions": "learned", "max_length": 40, "norm": "layer"},
    "windows": {"alibi": True, "windows": (5, None)},
    "encoder": {"kind": "encoder", "positions": "sinusoidal", "output": None},
}


def models(names: tuple[str, ...]) -> list[str]:
    """Logits, what `watch` says, and weights after optimiser steps."""
    wrong: list[str] = []
    T = 29
    for name in names:
        whole = transformer(**MODELS[name])
        many = hw.parallel.shard_sequence(copy.deepcopy(whole))
        ids = torch.randint(61, (B, T), generator=torch.Generator().manual_seed(3))
        ids[:, T // 2 :] = ids[:, : T - T // 2].clone()  # said twice: there is something to induce
        lengths = torch.tensor([T, T - 6])
        with hw.watch(whole, statistics=STATISTICS) as heads_whole:
            logits = whole(ids, lengths=lengths)
        with hw.watch(many, statistics=STATISTICS) as heads_sharded:
            mine = many(hw.parallel.split(ids), lengths=lengths)
        wrong += apart(f"{name}: logits", hw.parallel.join(mine), logits.detach())
        if torch.distributed.get_rank() == 0:  # nobody is asked: what was watched is whole on every rank
            wrong += [f"{name}, watched: {label}" for label in differences(heads_sharded, heads_whole)]
        pull = normal(1, *logits.shape)
        (logits * pull).sum().backward()
        (mine * hw.parallel.split(pull)).sum().backward()
        hw.parallel.sum_gradients(many)
        for model in (whole, many):
            torch.optim.Adam(model.parameters(), lr=0.01).step()
        for (place, a), b in zip(many.named_parameters(), whole.parameters(), strict=True):
            wrong += apart(f"{name}: {place} after a step", a.detach(), b.detach(), 1e-8)
    return wrong


def differences(actual: hw.Heads, expected: hw.Heads) -> list[str]:
    """Where two records of the same run differ."""
    wrong = []
    for layer in expected:
        ours, theirs = actual[layer].calls[0], expected[layer].calls[0]
        for record in (ours, theirs):
            record.measure_patterns()
        assert ours.shape == theirs.shape and ours.rows.keys() == theirs.rows.keys()
        for name, value in theirs.rows.items():
            wrong += apart(f"{layer} {name}", ours.rows[name], value)
        for name, value in theirs.counts.items():
            wrong += apart(f"{layer} queries of {name}", ours.counts[name], value)
        for name in ("pooled", "received", "pooled_queries"):
            a, b = getattr(ours, name), getattr(theirs, name)
            wrong += apart(f"{layer} {name}", a, b) if b is not None else []
        assert ours.map is not None and theirs.map is not None
        wrong += apart(f"{layer} kept", ours.map.dense(), theirs.map.dense().detach())
    if str(actual.table()) != str(expected.table()):
        wrong.append("tables differ")
    return wrong


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, ("rope",)),
        pytest.param(4, ("rope",), marks=pytest.mark.slow),
        pytest.param(2, tuple(MODELS), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_model_over_ranks_is_the_model_watched_and_trained(ranks: int, names: tuple[str, ...]) -> None:
    right(ranks, models, names)


# What a rank holds, and what it sends


class CountingRing(Ring):
    """A ring that counts the bytes it sends, and how many of the blocks that arrived are still there."""

    def __init__(self, group: torch.distributed.ProcessGroup) -> None:
        super().__init__(group)
        self.sent = self.most = 0
        self.arrived: list[tuple[StorageWeakRef, int]] = []

    def pass_on(self, tensor: Tensor, arriving: Tensor, tag: int = KEYS) -> Message:
        self.sent += tensor.nbytes
        self.arrived = [ref for ref in self.arrived if not ref[0].expired()]
        self.arrived.append((StorageWeakRef(arriving.untyped_storage()), tag))
        self.most = max(self.most, sum(kind == tag for _, kind in self.arrived))
        return super().pass_on(tensor, arriving, tag)


def held(T: int) -> dict[str, int]:
    """Bytes of one rank, in a causal call with gradients and statistics."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    q, k, v = (normal(i, B, heads, T, 16).float() for i, heads in enumerate((H, Hk, Hk)))
    at = Layout(T, ranks).positions(rank)
    q, k, v = (x[:, :, at].requires_grad_() for x in (q, k, v))
    saved = [0]

    def count(x: Tensor) -> Tensor:
        saved[0] += x.nbytes
        return x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_map, "Ring", CountingRing)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            output, weights = hw.parallel.attention(q, k, v, causal=True, length=T)
    shard = weights.shard
    ring: Any = shard.ring
    forward = ring.sent
    output.sum().backward()
    backward = ring.sent - forward
    map_bytes = shard.q.nbytes + shard.k.nbytes + weights.own_lse.nbytes
    weights.detach().statistics(pooled=7)
    row = weights.detach().shard.mine  # what statistics are collected in, a number a query each
    return {
        "saved for backward": saved[0],
        "map": map_bytes,
        "q, k, v": q.nbytes + k.nbytes + v.nbytes,
        "a statistic": math.prod(row.shape[:3]) * 4,
        "sent forward": forward,
        "sent backward": backward,
        "k and v": k.nbytes + v.nbytes,
        "others' blocks": ring.most,
    }


def test_bytes_of_a_rank_fall_with_their_number() -> None:
    T = 64
    by_ranks = {ranks: run_ranks(ranks, held, T) for ranks in (1, 2, 4)}
    (alone,) = by_ranks[1]
    for ranks, all_of_them in by_ranks.items():
        for mine in all_of_them:
            for name in ("saved for backward", "map", "q, k, v", "a statistic"):
                assert mine[name] * ranks == alone[name], (ranks, name)
            block = mine["k and v"]
            assert mine["sent forward"] == (ranks - 1) * block
            assert mine["others' blocks"] <= min(2, ranks - 1)
            assert mine["sent backward"] == 2 * (ranks - 1) * block  # keys and values, and their gradients


# Together with other things


def crossed() -> list[str]:
    """An encoder-decoder, both texts over ranks; checkpointing; a group that is one axis of a mesh."""
    wrong: list[str] = []
    whole = transformer(kind="encoder-decoder", positions="sinusoidal")
    many = hw.parallel.shard_sequence(copy.deepcopy(whole))
    source, target = (torch.randint(61, (B, n), generator=torch.Generator().manual_seed(n)) for n in (17, 23))
    logits = whole(source, target, lengths=[17, 11], target_lengths=[23, 20])
    read = (hw.parallel.split(source), hw.parallel.split(target))
    mine = many(*read, lengths=[17, 11], target_lengths=[23, 20])
    wrong += apart("encoder-decoder", hw.parallel.join(mine), logits.detach())

    layer = transformer(rope=Rope())
    sharded = hw.parallel.shard_sequence(copy.deepcopy(layer))
    ids = target
    layer(ids).square().sum().backward()
    x = hw.parallel.split(ids)
    again = torch.utils.checkpoint.checkpoint(sharded, x, use_reentrant=False)
    again.square().sum().backward()
    hw.parallel.sum_gradients(sharded)
    for (place, a), b in zip(sharded.named_parameters(), layer.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        wrong += apart(f"checkpointed: d {place}", a.grad, b.grad, 1e-10)
    if torch.distributed.get_world_size() == 4:
        wrong += _on_one_axis(layer, ids)
    return wrong


def _on_one_axis(model: Transformer, ids: Tensor) -> list[str]:
    """Two sequences on two pairs of ranks, each pair with one of them: data beside sequence."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    row = mesh.get_local_rank("data")
    sharded = hw.parallel.shard_sequence(copy.deepcopy(model), mesh, "sequence", length=ids.shape[1])
    mine = hw.parallel.split(ids[row : row + 1], mesh, axis="sequence")
    with hw.watch(sharded) as heads:
        logits = hw.parallel.join(sharded(mine), mesh, axis="sequence")
    with hw.watch(model) as alone:
        expected = model(ids[row : row + 1]).detach()
    return apart("on one axis", logits, expected) + differences(heads, alone)


class WithMore(torch.nn.Module):
    """Attention, and a layer that nothing goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = hw.MultiHeadAttention(24, 6, causal=True)
        self.unused = torch.nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.attention(x)[0]
        return output


def corners() -> list[str]:
    """More queries than keys; weights that no token reaches; wrong positions on one rank."""
    torch.manual_seed(0)
    wrong: list[str] = []
    x, y = normal(1, B, 11, 24), normal(2, B, 6, 24)
    whole = hw.MultiHeadAttention(24, 6, rope=Rope(), dtype=torch.float64)
    for order in ("in order", "zigzag"):
        many = hw.parallel.shard_sequence(copy.deepcopy(whole), order=order)
        keys = hw.parallel.split(y, order=order)
        actual = hw.parallel.join(many(hw.parallel.split(x, order=order), keys, keys)[0], order=order)
        wrong += apart(f"more queries than keys, {order}", actual, whole(x, y, y)[0].detach())
    model = hw.parallel.shard_sequence(WithMore())
    model(hw.parallel.split(x.float())).square().sum().backward()
    hw.parallel.sum_gradients(model)
    if model.unused.weight.grad is not None or model.attention.q_proj.weight.grad is None:
        wrong.append("gradients are made up, or lost")  # None is left alone by weight decay, 0 is not
    rank, mine = torch.distributed.get_rank(), hw.parallel.split(x)
    message = "must not be negative: got -5" if rank else "arguments must be valid on every rank"
    with pytest.raises(HeadwiseError, match=message):
        many(mine, positions=torch.arange(mine.shape[1]) - 5 * rank)
    return wrong


@pytest.mark.slow
def test_corners_of_a_module_over_ranks() -> None:
    right(2, corners)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_two_texts_checkpointing_and_a_mesh_of_two_axes(ranks: int) -> None:
    right(ranks, crossed)


def wrapped() -> list[str]:
    """FSDP2 over the ranks that share a sequence: it takes the mean of gradients."""
    from torch.distributed.fsdp import fully_shard

    ranks = torch.distributed.get_world_size()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (ranks,))
    whole = transformer(rope=Rope())
    many = hw.parallel.shard_sequence(copy.deepcopy(whole), mesh)
    for layer in many.decoder.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(many, mesh=mesh)
    ids = torch.randint(61, (B, 23), generator=torch.Generator().manual_seed(5))
    optimisers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (whole, many)]
    whole(ids).square().sum().backward()
    (many(hw.parallel.split(ids, mesh)).square().sum() * ranks).backward()
    wrong = []
    try:
        hw.parallel.sum_gradients(many, mesh)
        wrong.append("gradients are added up twice")
    except ArgumentError as problem:
        if "is sharded over ranks [0, 1], which also" not in str(problem):
            wrong.append(str(problem))
    for optimiser in optimisers:
        optimiser.step()
    for (place, a), b in zip(many.named_parameters(), whole.parameters(), strict=True):
        wrong += apart(f"sharded weights: {place}", a.full_tensor().detach(), b.detach(), 1e-9)  # type: ignore[attr-defined]
    return wrong


@pytest.mark.slow
def test_fsdp_shards_the_weights_of_a_model_whose_sequence_is_sharded() -> None:
    right(2, wrapped)


# What is refused


def refusals() -> list[str]:
    """Each refusal, in words that name the value; every rank raises, and none waits for the others."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    wrong: list[str] = []

    def refused(kind: type[Exception], words: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as problem:
            if not isinstance(problem, kind) or words not in str(problem):
                wrong.append(f"{words!r}: {type(problem).__name__}: {problem}")
        else:
            wrong.append(f"{words!r}: not refused")

    q = normal(rank, B, H, 7, D)
    attend = hw.parallel.attention
    other = q[..., :5] if rank == 0 else q  # wrong on one rank: the others hear of it
    words = "agree in head_dim: 5 and 8" if rank == 0 else f"ranks [0] of {ranks} raised"
    refused(HeadwiseError, words, lambda: attend(other, q, q))
    more = torch.cat([q, q[:, :, :2]], 2) if rank == 1 else q
    refused(ShapeError, "rank 0 has 7 of 16, its share is 8", lambda: attend(more, more, more))
    wider = normal(0, B, H + 2 * rank, 7, D)
    refused(ShapeError, "ranks must pass the same num_heads: ", lambda: attend(wider, wider, wider))
    short = q[:, :, :1]
    refused(ShapeError, "2 tokens for 2 ranks with 4 chunks", lambda: attend(short, short, short))
    refused(ShapeError, "got 0 sequences", lambda: attend(q[:0], q[:0], q[:0]))
    refused(
        ShapeError,
        "rank 0 has 7 of 20" if rank == 0 else "rank 1 has 7 of 20",
        lambda: attend(q, q, q, length=20),
    )
    refused(ArgumentError, "got 'backwards'", lambda: attend(q, q, q, order="backwards"))
    refused(ArgumentError, "got str", lambda: attend(q, q, q, mesh="cpu"))
    refused(MaskError, "[2, 1, 7, 7]", lambda: attend(q, q, q, torch.ones(2, 1, 7, 7).bool()))
    refused(TypeError, "dropout", lambda: attend(q, q, q, dropout=0.1))
    two = torch.distributed.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "sequence"))
    refused(
        ArgumentError, "2 dimensions: got None for ['data', 'sequence']", lambda: attend(q, q, q, mesh=two)
    )
    refused(ArgumentError, "got 'heads'", lambda: attend(q, q, q, mesh=two, axis="heads"))
    refused(ArgumentError, "torch.func", lambda: torch.func.grad(lambda x: attend(x, q, q)[0].sum())(q))

    _, weights = attend(q.requires_grad_(), q, q)
    refused(
        ArgumentError,
        "entropy must be computed without gradients over 2",
        lambda: weights.statistics("entropy"),
    )
    refused(ArgumentError, "dense must be computed without gradients over 2", weights.dense)
    loose = weights.detach()
    refused(ArgumentError, "got 'entropie'", lambda: loose.statistics("entropie"))
    refused(ArgumentError, "got 'row'", lambda: loose.statistics(per="row"))
    refused(ArgumentError, "got 'row'", lambda: loose.mass(Mask.causal(), per="row"))
    refused(ArgumentError, "got -1", lambda: loose.statistics(reach=-1))
    refused(ArgumentError, "got 0", lambda: loose.pooled(0))
    refused(ArgumentError, "got 15 of 14", lambda: loose.top(15))
    refused(MaskError, "got [1, 1, 3, 3]", lambda: loose.mass(torch.ones(3, 3).bool()))
    refused(
        HeadwiseError,
        "got 0 of 14" if rank else "ranks [1] of 2 raised",
        lambda: loose.top(8 if rank == 0 else 0),
    )
    refused(MemoryError, "q and k of all 2 ranks", lambda: loose.whole(limit="1 KiB"))
    refused(MemoryError, "dense weights", lambda: loose.dense(limit="9 KiB"))
    refused(ArgumentError, "got 'cuda'", lambda: loose.to("cuda"))
    refused(ArgumentError, "it is over 2 ranks; save map.whole()", lambda: copy.copy(loose))
    with torch.no_grad():
        q[0, 0, 0, 0] += 1
    refused(ArgumentError, "written to in place", loose.statistics)

    model = hw.parallel.shard_sequence(transformer(rope=Rope()))
    ids = hw.parallel.split(torch.randint(61, (B, 14)))
    refused(ArgumentError, "got KVCache", lambda: model(ids, cache=model.cache()))
    refused(ArgumentError, "got True", lambda: model(ids, last=True))
    refused(
        ArgumentError,
        "last must be False if the sequence is sharded over ranks: got True",
        lambda: model.generate(ids, max_new_tokens=2),
    )
    dropping = hw.parallel.shard_sequence(hw.MultiHeadAttention(24, 6, dropout=0.25))
    refused(ArgumentError, "over ranks: got 0.25", lambda: dropping(normal(rank, B, 7, 24)))
    refused(ArgumentError, "with 2 ranks; measure it", lambda: _watched(model, ids, diversity=True))
    refused(ArgumentError, "with 2 ranks; measure it", lambda: _watched(model, ids, written=True))
    refused(ArgumentError, "is sharded over 2 ranks; use one", lambda: _ablated(model, ids))
    limited = hw.parallel.shard_sequence(transformer(positions="learned", max_length=13))
    refused(ShapeError, "14 over all ranks > 13", lambda: limited(ids))
    refused(
        ArgumentError, "got Linear without one", lambda: hw.parallel.shard_sequence(torch.nn.Linear(2, 2))
    )
    loaded = torch.load(_saved(model), weights_only=False)
    loaded(ids)  # in one process: no rank is asked
    if any(module._sharding is not None for module in loaded.modules() if hasattr(module, "_sharding")):
        wrong.append("a model that was saved is still over ranks")
    return wrong


def _watched(model: Transformer, ids: Tensor, **requested: bool) -> None:
    with hw.watch(model, **requested):  # type: ignore[arg-type]
        model(ids)


def _ablated(model: Transformer, ids: Tensor) -> None:
    with hw.ablate(model, {0: [1]}):
        model(ids)


def _saved(model: Transformer) -> Any:
    import io

    room = io.BytesIO()
    torch.save(model, room)
    room.seek(0)
    return room


def test_what_cannot_be_is_refused_on_every_rank() -> None:
    right(2, refusals)


class InAnother(torch.nn.Module):
    """A user's own model: which of its arguments holds the tokens is its own business."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = hw.MultiHeadAttention(24, 6, causal=True, dtype=torch.float64)

    def forward(self, padding: Tensor, x: Tensor) -> Tensor:
        output: Tensor = self.attention(x, mask=Mask.padding(padding))[0]
        return output


def tokens_laid_out_otherwise() -> list[str]:
    """Tokens in another order, along another dimension, or whole on every rank: each is refused."""
    rank, wrong = torch.distributed.get_rank(), []
    split = hw.parallel.split

    def expect(name: str, words: str | None, call: Callable[[], object]) -> None:
        try:
            call()
            actual = None
        except ArgumentError as problem:
            actual = str(problem)
        if (words is None) != (actual is None) or (words or "") not in (actual or ""):
            wrong.append(f"{name}: {actual}")

    sequence._orders_used.clear()  # as in a group in which nothing was split yet
    ids = torch.randint(61, (B, 64), generator=torch.Generator().manual_seed(3))
    x, q = normal(1, B, 64, 24), normal(2, B, H, 64, D)
    model = transformer(rope=Rope())
    hw.parallel.shard_sequence(model, order="zigzag")
    expect("moved", "split was only called", lambda: model(split(ids, order="in order").clone()))
    other = 'order="zigzag": [2, 32] was split with order="in order"; pass'
    expect("in another order", other, lambda: model(split(ids, order="in order")))
    expect("split", None, lambda: model(split(ids)))
    expect(
        "not split",
        "all 2 ranks passed the same tensor of shape [2, 64]; pass",
        lambda: model(ids),
    )
    expect("moved", None, lambda: model(split(ids).clone()))
    expect("one rank's alone", None, lambda: model(ids[:, 32 * rank : 32 * rank + 32]))
    expect("the same everywhere, and split", None, lambda: model(split(torch.zeros_like(ids))))

    hw.parallel.shard_sequence(model, order="in order", length=64)
    expect("sharded anew", None, lambda: model(split(ids, order="in order")))
    expect("sharded anew", '[2, 32] was split with order="zigzag"', lambda: model(split(ids)))

    mha = hw.parallel.shard_sequence(hw.MultiHeadAttention(24, 6, dtype=torch.float64))
    expect("keys that are not split", "the same tensor of shape [2, 64, 24]", lambda: mha(split(x), x, x))
    expect("along channels", "along dim 1: they were split along dim 2", lambda: mha(split(x, dim=2)))
    expect("queries and keys", None, lambda: mha(split(x), key=split(x), value=split(x)))
    own, all_real = hw.parallel.shard_sequence(InAnother()), torch.ones(B, 64, dtype=torch.bool)
    expect("a model of one's own", None, lambda: own(all_real, split(x).clone()))
    expect(
        "a model of one's own, not split",
        "all 2 ranks passed the same",
        lambda: own(torch.ones(B, 128) > 0, x),
    )

    attend = hw.parallel.attention
    expect(
        "heads instead of tokens", "along dim 2: they were split along dim 1", lambda: attend(*[split(q)] * 3)
    )
    expect("one call", "the same tensor of shape [2, 6, 64, 8]", lambda: attend(q, q, q))
    late = split(q, dim=2, order="in order")
    expect("one call, in another order", 'was split with order="in order"', lambda: attend(*[late] * 3))
    expect("one call", None, lambda: attend(*[split(q, dim=2)] * 3))
    return wrong


def test_tokens_that_are_not_split_as_the_model_is_are_refused() -> None:
    """Each of these once gave numbers, 0.3 off of 0.3, without a word."""
    right(2, tokens_laid_out_otherwise)


def test_without_processes_there_is_nothing_to_lie_over() -> None:
    x = torch.randn(2, 8, 3)
    with pytest.raises(ArgumentError, match=r"torch\.distributed is not initialised"):
        hw.parallel.split(x)
