"""Calls of torch's class, drawn, made of both classes and compared.

The oracle is torch's slow path, `F.multi_head_attention_forward`, called without the hint `is_causal`: the
mask itself decides. Drawing goes through `choose(options)`, so that hypothesis and a seeded `random.Random`
share one definition.

Letters are torch's: N batch, L query_len, S key_len, E embed_dim, H num_heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from headwise.nn import MultiheadAttention
from headwise.nn.as_torch import answers, torch_projections
from judge import error, largest

T = TypeVar("T")

SMALL, REAL = (5, 1, 2, 3, 7, 11, 13, 17), (131, 257)
PADDINGS = ("none", "none", "bool", "float", "inf", "mixed", "nothing", "low")
MASKS = (
    "none", "none", "bool", "float", "inf", "mixed", "nothing", "zeros", "causal bool", "causal float",
    "causal slope", "low", "lowest",
)  # fmt: skip
LOW = -1e9
BOTH = (False, True)


class Choose(Protocol):
    """Takes one of some options."""

    def __call__(self, options: Sequence[T], /) -> T: ...


@dataclass(frozen=True)
class Case:
    """One call in words and numbers; printed, it can be called again."""

    seed: int  # of all numbers
    dtype: torch.dtype
    N: int | None  # None: unbatched
    L: int
    S: int
    num_heads: int
    head_dim: int
    inputs: str  # self, memory (key is value), three
    kdim: int | None
    vdim: int | None
    batch_first: bool
    bias: bool
    add_bias_kv: bool
    add_zero_attn: bool
    key_padding_mask: str
    attn_mask: str
    mask_per_head: bool  # 3-D
    is_causal: bool
    learned: bool  # float masks want gradients
    need_weights: bool
    average_attn_weights: bool
    training: bool
    gradients: str  # all, none, inference
    frozen: str  # of all: nothing, inputs, parameters, both
    strided: bool  # inputs are views with other strides
    way: str  # "own", "large": that of sizes no test has time for, "one step": that of a GPU

    @property
    def embed_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def is_low(self) -> bool:
        """Whether keys are hidden by finite numbers."""
        return self.key_padding_mask == "low" or self.attn_mask in ("low", "lowest")


def draw_case(choose: Choose, seed: int) -> Case:
    """A case that torch's class takes."""
    lengths = choose((SMALL,) * 40 + (REAL,))
    H, D = choose((2, 1, 3, 4, 5)), choose((3, 1, 2, 5, 7, 8))
    L, S = choose(lengths), choose(lengths)
    inputs, kdim, vdim = choose(("self", "memory", "three")), None, None
    if inputs == "self" or choose(BOTH):
        S = L
    if inputs == "memory":
        kdim = vdim = choose((None, None, 11, 19, H * D))
    if inputs == "three":
        kdim, vdim = choose((None, None, 11, 19)), choose((None, None, 13, H * D))
    attn_mask = choose(MASKS)
    gradients = choose(("all", "all", "none", "inference"))
    return Case(
        seed=seed,
        dtype=choose((torch.float64, torch.float32)),
        N=choose((2, 1, 3, None)),
        L=L,
        S=S,
        num_heads=H,
        head_dim=D,
        inputs=inputs,
        kdim=kdim,
        vdim=vdim,
        batch_first=choose(BOTH),
        bias=choose((True, True, False)),
        add_bias_kv=choose((False, False, False, True)),
        add_zero_attn=choose((False, False, False, True)),
        key_padding_mask=choose(PADDINGS),
        attn_mask=attn_mask,
        mask_per_head=choose(BOTH),
        is_causal=attn_mask != "none" and choose(BOTH),
        learned=gradients == "all" and choose((False, False, False, True)),
        need_weights=choose(BOTH),
        average_attn_weights=choose(BOTH),
        training=choose(BOTH),
        gradients=gradients,
        frozen=choose(("nothing", "nothing", "inputs", "parameters", "both")),
        strided=choose((False, False, True)),
        way=choose(("own", "large", "one step")),
    )


# The numbers of a case


@dataclass
class Numbers:
    """What a case is called with."""

    parameters: dict[str, Tensor]
    inputs: list[Tensor]  # one, two or three
    key_padding_mask: Tensor | None
    attn_mask: Tensor | None
    pulls: tuple[Tensor, Tensor]  # the cotangents of output and weights, both [.., .., ..]

    def exact(self) -> Numbers:
        """The same in float64, strides kept; bool stays bool.

        Float32 rounds a score of -1e9 and something to -1e9, and means that; so must the truth.
        """

        def cast(x: Tensor) -> Tensor:
            if x.dtype in (torch.bool, torch.float64):
                return x
            return x.double().masked_fill(x == LOW, -1e30)

        masks = (self.key_padding_mask, self.attn_mask)
        key_padding_mask, attn_mask = (None if mask is None else cast(mask) for mask in masks)
        return Numbers(
            {name: cast(x) for name, x in self.parameters.items()},
            [cast(x) for x in self.inputs],
            key_padding_mask,
            attn_mask,
            (cast(self.pulls[0]), cast(self.pulls[1])),
        )

    def to(self, device: torch.device) -> Numbers:
        """The same on another device."""
        masks = (self.key_padding_mask, self.attn_mask)
        key_padding_mask, attn_mask = (None if mask is None else mask.to(device) for mask in masks)
        return Numbers(
            {name: x.to(device) for name, x in self.parameters.items()},
            [x.to(device) for x in self.inputs],
            key_padding_mask,
            attn_mask,
            (self.pulls[0].to(device), self.pulls[1].to(device)),
        )


def numbers_of(case: Case, module: nn.MultiheadAttention) -> Numbers:
    """All of a case's numbers, in its dtype; `module` says which parameters there are."""
    random = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=case.dtype)

    def sequence(length: int, width: int) -> Tensor:
        if case.N is None:
            shape: tuple[int, ...] = (length, width)
        else:
            shape = (case.N, length, width) if case.batch_first else (length, case.N, width)
        return (
            normal(*reversed(shape)).permute(*reversed(range(len(shape)))) if case.strided else normal(*shape)
        )

    E, S = case.embed_dim, case.S
    inputs = [sequence(case.L, E)]
    if case.inputs != "self":
        inputs.append(sequence(S, case.kdim or E))
    if case.inputs == "three":
        inputs.append(sequence(S, case.vdim or E))
    parameters = {
        name: normal(*x.shape) * (x.shape[-1] ** -0.5 if x.dim() > 1 else 1.0)
        for name, x in module.named_parameters()
    }
    rows: tuple[int, ...] = (S,) if case.N is None else (case.N, S)
    padding = _mask(case.key_padding_mask, rows, random, case.dtype)
    square: tuple[int, ...] = (case.L, S)
    if case.mask_per_head:
        square = ((case.N or 1) * case.num_heads, *square)
    mask = _mask(case.attn_mask, square, random, case.dtype)
    seen: tuple[int, ...] = (case.L, S + case.add_bias_kv + case.add_zero_attn)
    if not case.average_attn_weights:
        seen = (case.num_heads, *seen)
    if case.N is not None:
        seen = (case.N, *seen)
    return Numbers(parameters, inputs, padding, mask, (normal(*inputs[0].shape), normal(*seen)))


def _mask(kind: str, shape: tuple[int, ...], random: torch.Generator, dtype: torch.dtype) -> Tensor | None:
    if kind == "none":
        return None
    some = torch.rand(shape, generator=random) < 0.3
    later = torch.ones(shape, dtype=torch.bool).triu(1) if len(shape) > 1 else some
    zeros = torch.zeros(shape, dtype=dtype)
    if kind in ("float", "mixed"):
        zeros = torch.randn(shape, generator=random, dtype=dtype)
    if kind == "causal slope":
        zeros = zeros + torch.arange(shape[-1], dtype=dtype) / 8
    return {
        "bool": some,
        "nothing": torch.zeros_like(some),
        "causal bool": later,
        "causal float": zeros.masked_fill(later, -torch.inf),
        "causal slope": zeros.masked_fill(later, -torch.inf),
        "zeros": zeros,
        "float": zeros,
        "inf": zeros.masked_fill(some, -torch.inf),
        "mixed": zeros.masked_fill(some, -torch.inf),
        "low": zeros.masked_fill(some, LOW),
        "lowest": zeros.masked_fill(some, torch.finfo(torch.float32).min),
    }[kind]


# Both classes


Results = dict[str, Tensor]


@contextmanager
def slow_path() -> Iterator[None]:
    """torch's class without its native operators."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


LIMITS: tuple[tuple[Any, str, int], ...] = (
    (answers, "FEW", 0),
    (answers, "SOME", 0),
    (answers, "NEAR", 0),
    (answers, "AT_ONCE", 64),
    (answers, "MANY", 3),
    (answers, "FEWEST", 2),
    (answers, "MORE", 0),
    (torch_projections, "FEW", 0),
    (torch_projections, "FEW_IN_TILES", 0),
    (torch_projections, "FEW_TO_READ", 0),
    (torch_projections, "TINY", 0),
)


@contextmanager
def as_if_large(really: bool = True) -> Iterator[None]:
    """Small calls go the ways of large ones."""
    before = [getattr(module, name) for module, name, _ in LIMITS]
    try:
        for module, name, value in LIMITS if really else ():
            setattr(module, name, value)
        yield
    finally:
        for (module, name, _), value in zip(LIMITS, before, strict=True):
            setattr(module, name, value)


@contextmanager
def always_in_one_step(really: bool = True) -> Iterator[None]:
    """What a GPU does in one step of autograd, a CPU does so, too, and few weights as if they were many."""
    before, few = torch_projections._is_worth_it, torch_projections.FEW
    try:
        if really:
            torch_projections._is_worth_it = lambda *_: True  # type: ignore[assignment]
            torch_projections.FEW = 0
        yield
    finally:
        torch_projections._is_worth_it, torch_projections.FEW = before, few


def made(kind: type[nn.MultiheadAttention], case: Case, dtype: torch.dtype) -> nn.MultiheadAttention:
    """A module for this case."""
    return kind(
        case.embed_dim,
        case.num_heads,
        bias=case.bias,
        add_bias_kv=case.add_bias_kv,
        add_zero_attn=case.add_zero_attn,
        kdim=case.kdim,
        vdim=case.vdim,
        batch_first=case.batch_first,
        dtype=dtype,
    ).train(case.training)


def results(module: nn.MultiheadAttention, case: Case, numbers: Numbers, hint: bool) -> Results:
    """Output, weights, and the gradients of all that may have one."""
    for name, parameter in module.named_parameters():
        parameter.data = numbers.parameters[name]
    wants = case.gradients == "all"
    masks = [None if x is None else x.detach() for x in (numbers.key_padding_mask, numbers.attn_mask)]
    inputs = [x.detach() for x in numbers.inputs]
    query, key, value = (inputs * 3)[:3] if len(inputs) != 2 else (inputs[0], inputs[1], inputs[1])
    leaves: dict[str, Tensor] = {}
    if wants:
        module.requires_grad_(case.frozen not in ("parameters", "both"))
        if case.frozen not in ("inputs", "both"):
            leaves |= {f"d input {i}": x.requires_grad_() for i, x in enumerate(inputs)}
        if case.frozen not in ("parameters", "both"):
            leaves |= {f"d {name}": parameter for name, parameter in module.named_parameters()}
        for name, mask in zip(("d key_padding_mask", "d attn_mask"), masks, strict=True):
            if case.learned and mask is not None and mask.is_floating_point():
                leaves[name] = mask.requires_grad_()
    modes = {"all": nullcontext, "none": torch.no_grad, "inference": torch.inference_mode}
    with modes[case.gradients]():
        output, weights = module(
            query, key, value,
            key_padding_mask=masks[0],
            attn_mask=masks[1],
            need_weights=case.need_weights,
            average_attn_weights=case.average_attn_weights,
            is_causal=hint,
        )  # fmt: skip
    found = {"output": output}
    if weights is not None:
        found["weights"] = weights
    if leaves:
        pulled = [(x * pull).sum() for x, pull in zip(found.values(), numbers.pulls, strict=False)]
        grads = torch.autograd.grad(sum(pulled[1:], pulled[0]), [*leaves.values()], materialize_grads=True)
        found |= dict(zip(leaves, grads, strict=True))
    return {name: x.detach() for name, x in found.items()}


# The comparison


def complaint(case: Case) -> str | None:
    """What is wrong with our answer; None: nothing."""
    theirs = made(nn.MultiheadAttention, case, case.dtype)
    numbers = numbers_of(case, theirs)
    with as_if_large(case.way == "large"), always_in_one_step(case.way == "one step"):
        ours = results(made(MultiheadAttention, case, case.dtype), case, numbers, hint=case.is_causal)
    found = _compared(case, ours, numbers, theirs)
    if found is not None and not case.need_weights and case.is_low:
        # torch's kernel is wrong about gradients of rows masked by finite numbers alone; its formulas are not
        with sdpa_kernel(SDPBackend.MATH):
            found = _compared(case, ours, numbers, theirs)
    return found


def complaint_on(case: Case, device: torch.device) -> str | None:
    """The same on another device."""
    theirs = made(nn.MultiheadAttention, case, case.dtype)
    numbers = numbers_of(case, theirs).to(device)
    ours = results(made(MultiheadAttention, case, case.dtype).to(device), case, numbers, hint=case.is_causal)
    return _compared(case, ours, numbers, theirs.to(device))


def _compared(case: Case, ours: Results, numbers: Numbers, theirs: nn.MultiheadAttention) -> str | None:
    # where the mask alone learns, torch's kernel on a GPU keeps no lse, and its way back raises
    alone = case.learned and case.frozen == "both"
    with slow_path(), sdpa_kernel(SDPBackend.MATH) if alone else nullcontext():
        plain = truth = results(theirs, case, numbers, hint=False)
        if case.dtype != torch.float64:
            exact = made(nn.MultiheadAttention, case, torch.float64).to(numbers.inputs[0].device)
            truth = results(exact, case, numbers.exact(), hint=False)
    if ours.keys() != plain.keys():
        return f"there is {sorted(ours)}, not {sorted(plain)}"
    if case.batch_first and not ours["output"].is_contiguous():
        return f"output is not contiguous: {ours['output'].stride()}"
    size = {grad: _largest_of(truth, grad) for grad in BOTH}
    # a gradient that is 0 is the difference of terms that are not
    size[True] = max(size[True], size[False] * largest(numbers.pulls[0]))
    for name, found in ours.items():
        grad, wanted = name.startswith("d "), plain[name]
        if found.dtype != wanted.dtype or found.shape != wanted.shape:
            return f"{name} is {found.dtype}{list(found.shape)}, not {wanted.dtype}{list(wanted.shape)}"
        wrong = _wrong(case, found, wanted, truth[name], size[grad], grad)
        if wrong is not None:
            return f"{name}: {wrong}"
    return None


def _largest_of(found: Results, grad: bool) -> float:
    return max((largest(x) for name, x in found.items() if name.startswith("d ") == grad), default=0.0)


def _wrong(case: Case, found: Tensor, plain: Tensor, truth: Tensor, size: float, grad: bool) -> str | None:
    missing = truth.isnan()
    if bool(missing.any()):
        if not grad and not found.isnan().equal(missing):
            return f"NaN in {int(found.isnan().sum())} places, not {int(missing.sum())}"
        found, plain, truth = found[~missing], plain[~missing], truth[~missing]
    if case.dtype == torch.float64:
        # scores near -1e9 are rounded to 1e-7, and a row of nothing else shows it
        allowed = (1e-6 if case.is_low else 1e-9) * max(1.0, size)
    else:
        allowed = (3 if grad else 2) * error(plain, truth) + 8 * torch.finfo(case.dtype).eps * size
    ours = error(found, truth)
    return None if ours <= allowed else f"error {ours:.3g} > {allowed:.3g}, torch's {error(plain, truth):.3g}"
