"""The judge: float64 truth, and how far from it an answer may be.

    error(ours, truth) <= 2 * (error(plain torch in the same dtype, truth) + one rounding)    (gradients: 3)

where error is the largest absolute difference, and one rounding is the dtype's, at the size of the largest
term in the sum that was computed (`size`), or of the truth itself. "Plain torch" is the reference's own
equations run in the inputs' dtype, as someone would write them by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from headwise import Mask, arguments, reference
from headwise.engines.scores import Scores
from headwise.scoring import Alibi, Relative

# Distinct primes, so that no two dimensions can be mistaken for each other.
BATCHES, LENGTHS, CHANNELS = (1, 2, 3), (1, 5, 7, 11, 13, 17, 19, 23, 29), (3, 8, 16, 31)


def scores_from(q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None = None, **options: Any) -> Scores:
    """The scores of a call of `attention` with these arguments."""
    return arguments.scores_from(q, k, v, arguments.AttentionOptions(mask, **options))


def inside(args: Any) -> Any:
    """The tensor in what was given as bias."""
    return args.slopes if isinstance(args, Alibi) else args.values if isinstance(args, Relative) else args


def with_inside(args: Any, tensor: Any) -> Any:
    """The same kind of bias of another tensor."""
    return type(args)(tensor) if isinstance(args, (Alibi, Relative)) else tensor


@dataclass(repr=False)
class Case:
    """One call of attention, with everything it takes."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask = field(default_factory=Mask)
    options: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        shapes = " ".join(f"{n}{list(x.shape)}" for n, x in (("q", self.q), ("k", self.k), ("v", self.v)))
        return f"Case({shapes} {self.mask!r} {sorted(self.options)})"

    def to(self, dtype: torch.dtype) -> Case:
        """The same numbers in another dtype."""
        return self._each(lambda x: x.detach().to(dtype))

    def on(self, device: str) -> Case:
        """The same numbers on another device."""
        return replace(self._each(lambda x: x.to(device)), mask=self.mask.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Case:
        def changed(x: Any) -> Any:
            if isinstance(x, (Alibi, Relative)):
                return with_inside(x, change(inside(x)))
            return change(x) if isinstance(x, Tensor) else x

        options = {name: changed(value) for name, value in self.options.items()}
        return replace(self, q=change(self.q), k=change(self.k), v=change(self.v), options=options)

    def leaves(self) -> dict[str, Tensor]:
        """Everything a gradient can flow to."""
        actual = {"q": self.q, "k": self.k, "v": self.v}
        for name in ("bias", "sinks"):
            value = self.options.get(name)
            if value is not None:
                actual[name] = inside(value)
        return actual

    def with_gradients(self) -> Case:
        """The same numbers as new leaves that want gradients."""
        new = self.to(self.q.dtype)
        for leaf in new.leaves().values():
            leaf.requires_grad_()
        return new

    def reference(self) -> tuple[Tensor, Tensor, Tensor]:
        """(output, weights, lse) by the equations, in this case's own dtype."""
        return reference.attention(self.q, self.k, self.v, mask=self.mask, **self.options)


def error(actual: Tensor, truth: Tensor) -> float:
    """The largest absolute difference; NaN and misplaced infinities count as infinite."""
    assert actual.shape == truth.shape, f"{list(actual.shape)} is not {list(truth.shape)}"
    actual, truth = actual.detach().double(), truth.detach().double()
    endless = torch.isinf(truth)
    if not torch.equal(actual[endless], truth[endless]):
        return float("inf")
    difference = (actual - truth)[~endless].abs()
    if not bool(torch.isfinite(difference).all()):
        return float("inf")
    return largest(difference)


def largest(x: Tensor) -> float:
    """The largest finite absolute value, 0 if there is none."""
    finite = x.detach().double().abs()
    finite = finite[torch.isfinite(finite)]
    return finite.max().item() if finite.numel() else 0.0


def assert_judged(
    actual: Tensor,
    plain: Tensor,
    truth: Tensor,
    *,
    dtype: torch.dtype,
    size: float = 0.0,
    times: float = 2.0,
    name: str = "",
) -> None:
    """Our error is within `times` plain torch's, give or take one rounding of the dtype."""
    ours, theirs = error(actual, truth), error(plain, truth)
    rounding = torch.finfo(dtype).eps * max(size, largest(truth))
    if dtype == torch.float64:
        theirs, rounding = 0.0, 32 * rounding  # the truth itself is rounded: a few roundings apart
    allowed = times * (theirs + rounding)
    assert ours <= allowed, f"{name}: error {ours:.3g} > {allowed:.3g} (plain torch: {theirs:.3g})"


def sizes(case: Case, pull: Tensor | None = None) -> dict[str, float]:
    """The largest term in the sums behind each result, for `assert_judged`."""
    truth = case.to(torch.float64)
    scale = case.options.get("scale") or case.q.shape[-1] ** -0.5
    terms = (truth.q.abs().amax() * truth.k.abs().amax()).item() * scale
    bias = case.options.get("bias")
    if isinstance(bias, Alibi):
        terms += largest(bias.slopes) * (case.q.shape[2] + case.k.shape[2])
    elif bias is not None:
        terms += largest(inside(bias))
    actual = {"output": largest(truth.v), "lse": max(1.0, terms), "weights": 1.0}
    if pull is not None:
        flow = largest(pull) * largest(truth.v) * truth.v.shape[-1] ** 0.5  # d loss / d weight
        # A key's gradient is a sum over queries and the heads that share it. With one visible key each term
        # is zero but for its rounding, in torch's fused kernels, too; plain torch's terms are exactly zero.
        queries = max(1, truth.q.shape[1] // max(1, truth.k.shape[1]) * truth.q.shape[2]) ** 0.5
        actual |= {"q": flow * scale * largest(truth.k), "k": flow * scale * largest(truth.q) * queries}
        actual |= {"v": largest(pull), "sinks": flow, "bias": flow * max(truth.q.shape[2], 1)}
    return actual


def strategies() -> Any:
    """hypothesis strategies for cases (imported lazily: hypothesis is a test dependency)."""
    from hypothesis import strategies as st

    # Made once each: making a strategy takes several times as long as drawing from it.
    any_of = lru_cache(None, typed=True)(lambda *options: st.sampled_from(options))

    @st.composite
    def cases(draw: Any, most: int = 29, gradients: bool = False) -> Case:
        lengths = [n for n in LENGTHS if n <= most]
        B = draw(any_of(*BATCHES))
        Hk, G = draw(any_of((1, 1), (1, 4), (2, 1), (2, 3), (5, 1)))
        T, S = draw(any_of(*lengths)), draw(any_of(*lengths))
        if draw(st.booleans()):
            S = T
        D = draw(any_of(*CHANNELS))
        Dv = draw(any_of(D, *CHANNELS))
        random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.float64)

        H = Hk * G
        mask = draw(masks(B, H, T, S, random))
        options: dict[str, Any] = {}
        if draw(st.booleans()):
            options["scale"] = draw(any_of(0.05, 1.0))
        if draw(st.integers(0, 3)) == 0:
            options["softcap"] = draw(any_of(0.7, 20.0))
        kind = draw(any_of("none", "none", "full", "head", "row", "alibi", "relative"))
        shapes = {"full": (B, H, T, S), "head": (H, T, S), "row": (1, 1, 1, S)}
        if kind == "alibi":
            options["bias"] = Alibi(normal(H).abs())
        elif kind == "relative":
            options["bias"] = Relative(normal(H, draw(any_of(1, 5, 13, 67))))
        elif kind != "none":
            options["bias"] = normal(*shapes[kind])
        if draw(st.integers(0, 3)) == 0:
            options["sinks"] = normal(H)
        return Case(normal(B, H, T, D), normal(B, Hk, S, D), normal(B, Hk, S, Dv), mask, options)

    return cases


def masks(B: int, H: int, T: int, S: int, random: torch.Generator) -> Any:
    """Any mask, alone or joined."""
    from hypothesis import strategies as st

    def mask_of_kind(kind: str) -> Mask:
        def integers(high: int, *shape: int) -> Tensor:
            return torch.randint(high, shape, generator=random)

        if kind == "causal":
            return Mask.causal()
        if kind == "window":
            return Mask.window(1 + int(integers(S, 1)))
        if kind == "band":
            return Mask.window(left_right=(int(integers(S, 1)), int(integers(S, 1))))
        if kind == "lengths":
            return Mask.padding(integers(S + 1, B), integers(T + 1, B))
        if kind == "padding":
            return Mask.padding(integers(2, B, S).bool())
        if kind == "documents":
            return Mask.documents(integers(3, B, S), integers(3, B, T))
        if kind == "dense":
            return Mask.dense(integers(2, B, 1, T, S).bool())
        return Mask.dense(integers(3, 1, H, T, S).bool())

    kinds = ["causal", "window", "band", "lengths", "padding", "documents", "dense", "per head"]

    def join(chosen: list[str]) -> Mask:
        mask = Mask()
        for kind in chosen:
            mask = mask & mask_of_kind(kind)
        return mask

    return st.lists(st.sampled_from(kinds), max_size=2, unique=True).map(join)
