"""The second pass, question by question: cases, what the formulas say, and what is wrong with an answer.

Shared by the tests of its kernels: in Triton's interpreter (test_gpu_kernels.py) and on a device
(test_cuda.py, test_cuda_second_pass.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from headwise import Mask
from headwise.engines.gpu.launches import cannot
from headwise.scoring import Alibi, Relative
from judge import Case, assert_judged, largest, sizes

SEED = int(os.environ.get("HEADWISE_SEED", "0"))
PICTURES = ((7, 9), (2, 1), (10**9, 10**9), (130, 140))  # cells of the pictures that are judged
TOGETHER = (7, 9)  # and of the one made with the statistics
MASKS = (
    "full", "causal", "window", "band", "padding", "causal padding", "left padding", "dense", "dense a head",
    "nothing", "labels", "documents",
)  # fmt: skip
OPTIONS = ("bias", "row bias", "alibi", "relative", "sinks", "softcap", "scale", "all")


def normal(seed: int, *shape: int) -> Tensor:
    random = torch.Generator().manual_seed(1000 * SEED + seed)
    return torch.randn(*shape, generator=random, dtype=torch.float64)


def numbers(B: int, H: int, Hk: int, T: int, S: int, D: int, Dv: int | None = None) -> Case:
    """Random q, k and v."""
    return Case(normal(0, B, H, T, D), normal(1, B, Hk, S, D), normal(2, B, Hk, S, Dv or D))


def masks(
    B: int, H: int, T: int, S: int, window: int = 71, band: tuple[int, int] = (37, 11), document: int = 50
) -> dict[str, Mask]:
    """Every kind of mask by name, for two sequences at most."""
    ids = (torch.arange(S) + torch.tensor([[0], [document // 2]])[:B]) // document  # cut elsewhere in each
    lengths = torch.tensor([S // 3, S])[:B]
    holes = normal(3, B, S) > -0.5
    pairs = normal(4, B, 1, T, S) > 0.3
    pairs[:, :, T // 2] = False
    actual = {
        "full": Mask(),
        "causal": Mask.causal(),
        "window": Mask.window(window),
        "band": Mask.window(left_right=band),
        "padding": Mask.padding(lengths, torch.tensor([(T + 1) // 2, T])[:B]),
        "causal padding": Mask.causal() & Mask.padding(lengths),
        "left padding": Mask.causal() & Mask.padding(holes.flip(-1)),
        "dense": Mask.dense(pairs),
        "dense a head": Mask.causal() & Mask.dense(normal(6, 1, H, T, S) > 0.5),
        "nothing": Mask.padding(torch.tensor([0, S])[:B]),
        "labels": Mask.documents(ids[:, :S], ids[:, :1].expand(-1, T) + 1),
    }
    if T <= S:
        actual["documents"] = Mask.documents(ids) & Mask.causal()
    return actual


def options(H: int, T: int, S: int) -> dict[str, dict[str, Any]]:
    """Every way to score by name."""
    return {
        "bias": {"bias": normal(5, H, T, S)},
        "row bias": {"bias": normal(5, 1, 1, 1, S)},
        "alibi": {"bias": Alibi(normal(6, H).abs() / 30)},
        "relative": {"bias": Relative(normal(8, H, 13))},
        "sinks": {"sinks": normal(7, H)},
        "softcap": {"softcap": 3.0},
        "scale": {"scale": 0.3},
        "all": {"bias": normal(5, H, T, S), "sinks": normal(7, H), "softcap": 9.0},
    }


def rule_names(T: int, S: int) -> list[str]:
    """Of every mask, and of every way to score under a causal mask."""
    names = [*MASKS, *(f"causal {name}" for name in OPTIONS)]
    return [name for name in names if name != "documents" or T <= S]


def under(rule: str, B: int, H: int, Hk: int, T: int, S: int, D: int, Dv: int | None = None) -> Case:
    """Random numbers under a rule of `rule_names`."""
    case = numbers(B, H, Hk, T, S, D, Dv)
    actual = masks(B, H, T, S)
    if rule in actual:
        return replace(case, mask=actual[rule])
    return replace(case, mask=Mask.causal(), options=options(H, T, S)[rule.removeprefix("causal ")])


def strided(x: Tensor) -> Tensor:
    """The same numbers laid out as a fused projection leaves them."""
    B, H, T, D = x.shape
    room = torch.empty(B, T, 3, H, D, dtype=x.dtype, device=x.device)
    room[:, :, 1] = x.transpose(1, 2)
    return room[:, :, 1].transpose(1, 2)


def turned(x: Tensor) -> Tensor:
    """The same numbers, channels farthest apart: the last stride is not 1."""
    return x.transpose(2, 3).contiguous().transpose(2, 3)


def misaligned(x: Tensor) -> Tensor:
    """The same numbers, beginning where no descriptor can."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


HIDDEN_TILES: dict[str, tuple[Mask, slice]] = {  # of 16 queries and 48 keys: a mask, keys hidden by tiles
    "lengths": (Mask.padding([16]), slice(16, 48)),
    "window": (Mask.window(3), slice(0, 16)),
    "holes": (Mask.padding((torch.arange(48) // 16 != 1)[None]), slice(16, 32)),
    "documents": (Mask.documents(torch.arange(48) // 16, torch.full((16,), 2)), slice(0, 32)),
    "dense": (Mask.dense((torch.arange(48) // 16 != 1).expand(1, 1, 16, 48)), slice(16, 32)),
}


def map_of(case: Case) -> hw.AttentionMap:
    """A map that the kernels take."""
    w = hw.AttentionMap(case.q, case.k, mask=case.mask, **case.options)
    assert cannot(w._scores) is None, cannot(w._scores)
    return w


# What the formulas say


def counted_weights(case: Case, p: Tensor) -> Tensor:
    """The weights of the queries that count, 0 elsewhere."""
    counted = case.mask.counted(p.shape[2])
    return p if counted is None else p * counted.to(p.device)[:, None, :, None]


def expected(
    case: Case, p: Tensor, lse: Tensor, scores: Tensor | None, pictures: Iterable[tuple[int, int]] = PICTURES
) -> dict[str, Tensor]:
    """Everything the second pass gives, by the formulas, from weights in any dtype, in that dtype's float.

    Statistics a query, [B, H, T]; received, [B, H, S]; and "pooled 7 9", the picture of 7 x 9 cells.
    """
    T, S = p.shape[2:]
    p = p.to(torch.promote_types(p.dtype, torch.float32))
    at = torch.arange(T, device=p.device) + S - T
    keys = torch.arange(S, device=p.device)
    empty = torch.isneginf(lse)
    logs = torch.where(p > 0, p, 1.0).log()
    entropy = -(p * logs).sum(-1)
    if "sinks" in case.options:
        sunk = (case.options["sinks"].to(p.dtype)[:, None] - lse.to(p.dtype)).masked_fill(empty, 0.0)
        entropy = entropy - (sunk.exp() * sunk).masked_fill(empty, 0.0)
    apart = (at[:, None] - keys).abs()
    rows = counted_weights(case, p)
    keep = case.mask.keys
    start = torch.zeros(p.shape[0], dtype=torch.int64)
    if keep is not None and keep.ndim == 2:
        start = keep.int().argmax(-1)
    actual = {
        "entropy": entropy,
        "confidence": p.amax(-1),
        "distance": (p * apart).sum(-1),
        "first": p.gather(-1, start.to(p.device)[:, None, None, None].expand(*p.shape[:3], 1))[..., 0],
        "local": (p * (apart <= 8)).sum(-1),
        "received": rows.sum(-2),
    }
    for name, offset in (("previous", -1), ("itself", 0), ("next", 1)):
        actual[name] = (p * (keys == at[:, None] + offset)).sum(-1)
    actual["effective_keys"] = entropy.exp().masked_fill(empty, 0.0)
    if scores is not None:
        actual["max_logit"] = scores.amax(-1)
    for cells in dict.fromkeys((min(r, T), min(c, S)) for r, c in (*pictures, TOGETHER)):
        by_row, by_column = (
            (torch.arange(n)[:, None] == torch.arange(length) * n // length).to(p)
            for n, length in zip(cells, (T, S), strict=True)
        )
        actual[picture_name(cells)] = by_row @ rows @ by_column.T
    return actual


def picture_name(cells: tuple[int, int]) -> str:
    return f"pooled {cells[0]} {cells[1]}"


def scores_of(p: Tensor, lse: Tensor) -> Tensor:
    """The scores that weights came from, -inf where they are 0."""
    return torch.where(p > 0, p.double().log() + lse.double()[..., None], -torch.inf)


def differentiable_entropy(case: Case, p: Tensor, lse: Tensor) -> Tensor:
    """Entropy a query from weights, in operations torch can differentiate."""
    actual = -(p * torch.where(p > 0, p, 1.0).log()).sum(-1)
    if "sinks" in case.options:
        empty = torch.isneginf(lse)
        sunk = (case.options["sinks"].to(p.dtype)[:, None] - lse.masked_fill(empty, 0.0)).exp()
        rest = torch.where(empty, 1.0, sunk)
        actual = actual - rest * rest.log()
    return actual


# What a gradient flows through: as we look, and as plain torch would

Look = tuple[Callable[[hw.AttentionMap], Tensor], Callable[[Case, Tensor, Tensor], Tensor]]
LOOKS: dict[str, Look] = {
    "dense": (lambda w: w.dense(), lambda case, p, lse: p),
    "mean": (lambda w: w.mean_heads(), lambda case, p, lse: p.mean(1)),
    "keys": (lambda w: w.select(keys=slice(11, 90)).dense(), lambda case, p, lse: p[..., 11:90]),
    "row": (lambda w: w.select(heads=-1, queries=-1).dense(), lambda case, p, lse: p[:, -1:, -1:]),
    "entropy": (lambda w: w.statistics("entropy", per="query").entropy, differentiable_entropy),
}


# What is wrong with an answer


def values(
    low: Case,
    w: hw.AttentionMap,
    plain: tuple[Tensor, Tensor],
    pictures: Iterable[tuple[int, int]] = PICTURES,
    parts: Iterable[str] = ("keys", "picked", "rows"),
    fused: bool = True,
) -> list[str]:
    """What is wrong with what a map says of a case, in words.

    Args:
        low: the case in the map's dtype, on the device where it is judged.
        plain: weights and lse as plain torch gives them on the map's device.
        pictures: cells of the pictures to look at.
        parts: which parts of the weights to look at, beside all of them and their mean.
        fused: whether s - lse is made in one rounding, as GPUs do; else weights may be off by a rounding at
            the size of lse.
    """
    dtype, wrong = low.q.dtype, []
    truth_case = low.to(torch.float64)
    _, truth_p, truth_lse = truth_case.reference()
    plain_p, plain_lse = (x.to(low.q.device) for x in plain)
    size, lse_size = sizes(low), 1.0 if fused else max(1.0, largest(truth_lse))
    T, S = truth_p.shape[2:]
    pictures = tuple(pictures)
    truths = expected(truth_case, truth_p, truth_lse, scores_of(truth_p, truth_lse), pictures)
    plains = expected(low, plain_p, plain_lse, scores_of(plain_p, plain_lse), pictures)

    def check(name: str, actual: Tensor, plain: Tensor, truth: Tensor, extent: float = lse_size) -> None:
        try:
            assert not bool(torch.isnan(actual).any()), f"{name}: NaN"
            assert_judged(actual.to(truth.device), plain, truth, dtype=dtype, size=extent, name=name)
        except AssertionError as problem:
            wrong.append(str(problem))

    check("lse", w.lse, plain_lse, truth_lse, size["lse"])
    check("weights", w.dense(), plain_p, truth_p)
    check("mean", w.mean_heads(), plain_p.mean(1), truth_p.mean(1))
    some, picked, chosen = slice(S // 4, S // 2 + 1), [0, S - 1, S // 2], list(range(0, T, 3))
    looks: dict[str, tuple[dict[str, Any], Any]] = {
        "keys": ({"keys": some}, (..., some)),
        "picked": ({"keys": picked}, (..., picked)),
        "rows": ({"heads": [0], "queries": chosen}, (slice(None), slice(0, 1), chosen)),
    }
    for part in parts:
        selected, where = looks[part]
        check(part, w.select(**selected).dense(), plain_p[where], truth_p[where])
    measured = w.statistics(per="query", pooled=TOGETHER)
    extents = {"max_logit": size["lse"], "distance": S * lse_size}
    together = picture_name((min(TOGETHER[0], T), min(TOGETHER[1], S)))
    for key, truth in truths.items():
        if key in measured:
            check(key, measured[key], plains[key], truth, extents.get(key, lse_size))
        elif key == together:
            check(f"{key}, with the rest", measured.pooled, plains[key], truth)
    for cells in dict.fromkeys((min(r, T), min(c, S)) for r, c in pictures):
        key = picture_name(cells)
        check(key, w.pooled(cells), plains[key], truths[key])
    count = min(5, S)
    top = w.top(count)
    best, plain_best = (p.topk(count, -1).values for p in (truth_p, plain_p))
    check("top", top.values, plain_best, best)
    indices = top.indices.to(truth_p.device)
    listed = truth_p.gather(-1, indices.clamp(min=0)).masked_fill(indices < 0, 0.0)
    check("top keys", listed, plain_best, best)
    return wrong


def gradients(
    low: Case,
    arms: Callable[[Case], tuple[Case, Case]],
    looks: Iterable[str] = tuple(LOOKS),
    learned_bias: bool = True,
) -> list[str]:
    """What is wrong with the gradients through a map of a case, in words.

    Args:
        low: the case in the dtype that is judged, on the device where it is judged.
        arms: makes of it the case we look at and plain torch's, wherever they run.
        learned_bias: whether bias and slopes want gradients: with them, the way back goes tile by tile.
    """
    wrong = []
    for look in looks:
        ours_looks, plain_looks = LOOKS[look]
        ours, plain, truth = (arm.with_gradients() for arm in (*arms(low), low.to(torch.float64)))
        wanted = [name for name in truth.leaves() if name != "v" and (learned_bias or name != "bias")]
        for arm in (ours, plain, truth):
            for name, leaf in arm.leaves().items():
                leaf.requires_grad_(name in wanted)
        actual = ours_looks(map_of(ours))
        pull = normal(9, *actual.shape)
        actual.backward(pull.to(actual))
        for arm in (plain, truth):
            _, p, lse = arm.reference()
            actual = plain_looks(arm, p, lse)
            actual.backward(pull.to(actual))
        scale = low.options.get("scale") or low.q.shape[-1] ** -0.5
        flow = 3 * largest(pull)
        extent = {"q": flow * scale * largest(low.k), "k": flow * scale * largest(low.q)}
        for name in wanted:
            mine, theirs, true = (arm.leaves()[name].grad for arm in (ours, plain, truth))
            assert mine is not None and theirs is not None and true is not None, name
            try:
                assert_judged(
                    mine.to(true.device), theirs.to(true.device), true, dtype=low.q.dtype, times=3,
                    size=extent.get(name, flow * low.q.shape[2]), name=f"{look} d {name}",
                )  # fmt: skip
            except AssertionError as problem:
                wrong.append(str(problem))
    return wrong


def relaid(case: Case, layout: Callable[[Tensor], Tensor]) -> Case:
    """The same numbers, q and k laid out in another way."""
    return replace(case, q=layout(case.q), k=layout(case.k))
