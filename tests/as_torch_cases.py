"""Calls of torch's class, drawn, made of both classes and compared.

`complaint` takes calls that torch answers, of every size and on every way of ours, and holds them against
torch's slow path without the hint `is_causal`: the mask itself decides. `difference` takes calls of any shape
and mode, right or wrong, and holds them against torch's class called in the same way. Drawing goes through
`choose(options)`, so that hypothesis and a seeded `random.Random` share one definition.

Letters are torch's: N batch, L query_len, S key_len, E embed_dim, H num_heads.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from headwise.nn import MultiheadAttention
from headwise.nn.as_torch import module as torchs_class
from headwise.nn.as_torch import torch_call
from judge import error, largest

T = TypeVar("T")
CPU = torch.device("cpu")

SMALL, REAL = (5, 1, 2, 3, 7, 11, 13, 17), (131, 257)
PADDINGS = ("none", "none", "bool", "float", "inf", "mixed", "nothing", "low")
CAUSAL = ("causal bool", "causal float", "causal slope")
MASKS = ("none", "none", "bool", "float", "inf", "mixed", "nothing", "zeros", *CAUSAL, "low", "lowest")
LOW = -1e9
BOTH = (False, True)
MODES: dict[str, Any] = {"all": nullcontext, "none": torch.no_grad, "inference": torch.inference_mode}
HALVES = (torch.bfloat16, torch.float16)
MASK_SHAPES: dict[str, Callable[[int, int, int, int], tuple[int, ...]]] = {  # beside the right ones
    "one number": lambda N, H, L, S: (1, 1),
    "one row": lambda N, H, L, S: (1, S),
    "one column": lambda N, H, L, S: (L, 1),
    "turned": lambda N, H, L, S: (S, L),
    "larger": lambda N, H, L, S: (L + 2, S + 2),
    "a number per head": lambda N, H, L, S: (N * H, 1, 1),
    "one head": lambda N, H, L, S: (1, L, S),
    "a batch": lambda N, H, L, S: (N, L, S),
    "a larger batch": lambda N, H, L, S: (N * H + 1, L, S),
    "1-D": lambda N, H, L, S: (S,),
    "4-D": lambda N, H, L, S: (N, H, L, S),
}
PADDING_SHAPES: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "longer": lambda N, S: (N, S + 1),
    "one row": lambda N, S: (1, S),
    "a larger batch": lambda N, S: (N + 1, S),
    "1-D": lambda N, S: (S,),
    "3-D": lambda N, S: (N, 1, S),
}
FAULTS: dict[str, Callable[[Tensor], Tensor]] = {  # of an input
    "one dimension more": lambda x: x[None],
    "one dimension less": lambda x: x[0],
    "narrower": lambda x: x[..., 1:],
    "shorter": lambda x: x[1:],
    "shorter in the second dimension": lambda x: x[:, 1:],
    "another dtype": lambda x: x.to(torch.float32 if x.dtype == torch.float16 else torch.float16),
}
WRONG_DTYPES = (torch.int64, torch.uint8, torch.complex64)  # of masks


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
    mask_shape: str = "right"  # of MASK_SHAPES
    padding_shape: str = "right"  # of PADDING_SHAPES
    mask_dtype: torch.dtype | None = None  # of float masks; None: that of the module
    padding_dtype: torch.dtype | None = None
    fault: tuple[str, int] | None = None  # of FAULTS, and in which input
    fast_path: bool = True  # torch.backends.mha.set_fastpath_enabled
    autocast: bool = False

    @property
    def embed_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def batch(self) -> int:
        return 1 if self.N is None else self.N

    @property
    def has_other_dtype(self) -> bool:
        """Whether a float mask may have another dtype than the inputs."""
        return not (self.mask_dtype is None and self.padding_dtype is None)

    @property
    def precision(self) -> torch.dtype:
        """The dtype that results are rounded to."""
        return torch.bfloat16 if self.autocast and self.dtype != torch.float64 else self.dtype

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


def draw_call(choose: Choose, seed: int) -> Case:
    """A call of any mode and any shape of its masks, which torch's class takes or refuses."""
    case = draw_case(choose, seed)
    shapes: tuple[str, str] = choose(
        (("right", "right"),) * 50
        + tuple((shape, "right") for shape in MASK_SHAPES)
        + tuple(("right", shape) for shape in PADDING_SHAPES)
    )
    dtype = choose((torch.float64, torch.float64, torch.float32, *HALVES))
    if dtype in HALVES and case.is_low:  # numbers that half precision cannot hold
        case = replace(case, key_padding_mask="inf", attn_mask="mixed")
    sizes: dict[str, Any] = {"N": case.N, "L": min(case.L, 17), "S": min(case.S, 17)}
    sizes |= choose(({},) * 20 + ({"N": 0}, {"L": 0}, {"S": 0}))
    if case.inputs == "self":
        sizes["L"] = sizes["S"] = min(sizes["L"], sizes["S"])
    other = choose((None, None, None, torch.float64, torch.float32, torch.float32, choose(WRONG_DTYPES)))
    others = choose(((other, None), (None, other)))  # the dtypes of attn_mask and key_padding_mask
    faults = () if 0 in sizes.values() else tuple(product(FAULTS, (0, -1)))
    fault = choose((None,) * 150 + faults)
    return replace(
        case,
        **sizes,
        dtype=dtype,
        is_causal=fault is None and choose(BOTH if case.attn_mask != "none" else (False,) * 9 + (True,)),
        mask_shape=shapes[0],
        padding_shape=shapes[1],
        mask_dtype=others[0],
        padding_dtype=others[1],
        learned=case.learned and others == (None, None),
        fault=fault,
        fast_path=choose((True, True, False)),
        autocast=others == (None, None) and dtype != torch.float16 and choose((False, False, True)),
    )


def draw_mistakes(choose: Choose, seed: int) -> Case:
    """A call with several mistakes, of which torch's class names one."""
    case, fault = draw_call(choose, seed), choose((None, *product(FAULTS, (0, -1))))
    return replace(
        case,
        fault=None if 0 in (case.batch, case.L, case.S) else fault,
        attn_mask=choose(("none", "bool", "float")),
        key_padding_mask=choose(("none", "bool", "float")),
        mask_shape=choose(("right", "right", *MASK_SHAPES)),
        padding_shape=choose(("right", "right", *PADDING_SHAPES)),
        mask_dtype=choose((None, None, None, *WRONG_DTYPES)),
        padding_dtype=choose((None, None, None, *WRONG_DTYPES)),
        is_causal=fault is None and choose(BOTH),
        learned=False,
        autocast=False,
    )


def draw_hint(choose: Choose, seed: int) -> Case:
    """A call with the hint `is_causal`, beside no mask or one of any shape and content."""
    case = draw_call(choose, seed)
    return replace(
        case,
        is_causal=True,
        fault=None,
        attn_mask=choose(("none", *CAUSAL, "bool", "float", "zeros", "nothing")),
        key_padding_mask=choose(("none", "none", "none", "bool")),
        mask_shape=choose(("right", "right", "right", *MASK_SHAPES)),
        padding_shape="right",
        mask_dtype=None,
        padding_dtype=None,
        need_weights=choose((False, False, True)),
    )


def draw_fast(choose: Choose, seed: int) -> Case:
    """A call for which torch's class may take its fast path: self-attention in evaluation, no gradients."""
    case = draw_call(choose, seed)
    return replace(
        case,
        num_heads=choose((2, 4)),
        inputs="self",
        S=case.L,
        kdim=None,
        vdim=None,
        batch_first=True,
        bias=True,
        add_bias_kv=False,
        add_zero_attn=False,
        training=False,
        gradients=choose(("none", "inference")),
        learned=False,
        fast_path=True,
        autocast=False,
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

    def each(self, change: Callable[[Tensor], Tensor]) -> Numbers:
        """The same with every tensor changed."""
        masks = (self.key_padding_mask, self.attn_mask)
        padding, mask = (None if x is None else change(x) for x in masks)
        parameters = {name: change(x) for name, x in self.parameters.items()}
        pulls = change(self.pulls[0]), change(self.pulls[1])
        return Numbers(parameters, [change(x) for x in self.inputs], padding, mask, pulls)

    def exact(self) -> Numbers:
        """The same in float64, strides kept; bool stays bool.

        Float32 rounds a score of -1e9 and something to -1e9, and means that; so must the truth.
        """

        def cast(x: Tensor) -> Tensor:
            if x.dtype in (torch.bool, torch.float64):
                return x
            x = x.double()  # before it is compared: in half precision LOW is -inf
            return x.masked_fill(x == LOW, -1e30)

        return self.each(cast)

    def with_masks_in(self, dtype: torch.dtype) -> Numbers:
        """The same with float masks of this dtype."""
        masks = (self.key_padding_mask, self.attn_mask)
        padding, mask = (x if x is None or x.dtype == torch.bool else x.to(dtype) for x in masks)
        return replace(self, key_padding_mask=padding, attn_mask=mask)

    def to(self, device: torch.device) -> Numbers:
        """The same on another device."""
        return self.each(lambda x: x.to(device))


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
    pulls = normal(*inputs[0].shape)
    if case.fault is not None:
        inputs[case.fault[1]] = FAULTS[case.fault[0]](inputs[case.fault[1]])
    parameters = {
        name: normal(*x.shape) * (x.shape[-1] ** -0.5 if x.dim() > 1 else 1.0)
        for name, x in module.named_parameters()
    }
    padding = mask_of(case.key_padding_mask, padding_shape(case), random, case.padding_dtype or case.dtype)
    mask = mask_of(case.attn_mask, mask_shape(case), random, case.mask_dtype or case.dtype)
    visible: tuple[int, ...] = (case.L, S + case.add_bias_kv + case.add_zero_attn)
    if not case.average_attn_weights:
        visible = (case.num_heads, *visible)
    if case.N is not None:
        visible = (case.N, *visible)
    return Numbers(parameters, inputs, padding, mask, (pulls, normal(*visible)))


def mask_shape(case: Case) -> tuple[int, ...]:
    """The shape of attn_mask, right or wrong."""
    N, H, L, S = case.batch, case.num_heads, case.L, case.S
    if case.mask_shape == "right":
        return (N * H, L, S) if case.mask_per_head else (L, S)
    return MASK_SHAPES[case.mask_shape](N, H, L, S)


def padding_shape(case: Case) -> tuple[int, ...]:
    """The shape of key_padding_mask, right or wrong."""
    if case.padding_shape == "right":
        return (case.S,) if case.N is None else (case.N, case.S)
    return PADDING_SHAPES[case.padding_shape](case.batch, case.S)


def mask_of(kind: str, shape: tuple[int, ...], random: torch.Generator, dtype: torch.dtype) -> Tensor | None:
    if kind == "none":
        return None
    if dtype in WRONG_DTYPES:
        mask = mask_of(kind, shape, random, torch.float32)
        return mask if mask is None or mask.dtype == torch.bool else mask.nan_to_num(neginf=-9.0).to(dtype)
    some = torch.rand(shape, generator=random) < 0.3
    later = torch.ones(shape, dtype=torch.bool).triu(1) if len(shape) > 1 else some
    if kind in ("bool", "causal bool", "nothing"):
        return {"bool": some, "causal bool": later, "nothing": torch.zeros_like(some)}[kind]
    numbers = torch.zeros(shape, dtype=dtype)
    if kind in ("float", "mixed"):
        numbers = torch.randn(shape, generator=random, dtype=dtype)
    if kind == "causal slope":
        numbers = numbers + torch.arange(shape[-1], dtype=dtype) / 8
    if kind in ("zeros", "float"):
        return numbers
    if kind in ("low", "lowest"):
        return numbers.masked_fill(some, LOW if kind == "low" else torch.finfo(torch.float32).min)
    return numbers.masked_fill(later if kind.startswith("causal") else some, -torch.inf)


# Both classes


Results = dict[str, Tensor]


@contextmanager
def fast_path(enabled: bool) -> Iterator[None]:
    """torch's class with or without its native operators."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


slow_path = partial(fast_path, False)


LIMITS: tuple[tuple[Any, str, int], ...] = (
    (torch_call, "FEW", 0),
    (torch_call, "AT_ONCE", 64),
    (torch_call, "MANY", 3),
    (torch_call, "FEWEST", 2),
    (torchs_class, "FEW", 0),
    (torchs_class, "SOME", 0),
    (torchs_class, "NEAR", 0),
    (torchs_class, "MORE", 0),
    (torchs_class, "MATRIX", 0),
    (torchs_class, "MATRIX_WITHOUT_GRADIENTS", 0),
    (torchs_class, "READ", 0),
    (torchs_class, "TINY", 0),
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
    before, few = torchs_class._is_worth_it, torchs_class.MATRIX
    try:
        if really:
            torchs_class._is_worth_it = lambda *_: True  # type: ignore[assignment]
            torchs_class.MATRIX = 0
        yield
    finally:
        torchs_class._is_worth_it, torchs_class.MATRIX = before, few


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
    device = inputs[0].device.type
    with MODES[case.gradients](), torch.autocast(device, torch.bfloat16, enabled=case.autocast):
        output, weights = module(
            query, key, value,
            key_padding_mask=masks[0],
            attn_mask=masks[1],
            need_weights=case.need_weights,
            average_attn_weights=case.average_attn_weights,
            is_causal=hint,
        )  # fmt: skip
    actual = {"output": output}
    if weights is not None:
        actual["weights"] = weights
    if leaves:
        pulled = [(x * pull).sum() for x, pull in zip(actual.values(), numbers.pulls, strict=False)]
        grads = torch.autograd.grad(sum(pulled[1:], pulled[0]), [*leaves.values()], materialize_grads=True)
        actual |= dict(zip(leaves, grads, strict=True))
    return {name: x.detach() for name, x in actual.items()}


# The comparison


def _compared(
    case: Case, ours: Results, numbers: Numbers, theirs: nn.MultiheadAttention, hint: bool
) -> str | None:
    # torch's kernel on a CPU misreads a float32 mask beside float64 inputs
    by_formulas = only_masks_learn(case) or case.has_other_dtype
    actual = _compared_with(case, ours, numbers, theirs, hint, by_formulas)
    if actual is not None and not case.need_weights and case.is_low:
        # torch's kernel is wrong about gradients of rows masked by finite numbers alone; its formulas are not
        actual = _compared_with(case, ours, numbers, theirs, hint, by_formulas=True)
    return actual


def only_masks_learn(case: Case) -> bool:
    """Return True if only masks require a gradient: on a GPU torch's kernel keeps no lse for backward."""
    return case.learned and case.frozen == "both"


def _compared_with(
    case: Case,
    ours: Results,
    numbers: Numbers,
    theirs: nn.MultiheadAttention,
    hint: bool,
    by_formulas: bool,
) -> str | None:
    with slow_path(), sdpa_kernel(SDPBackend.MATH) if by_formulas else nullcontext():
        plain = truth = results(theirs, case, numbers, hint)
        if case.dtype != torch.float64:
            exact = made(nn.MultiheadAttention, case, torch.float64).to(numbers.inputs[0].device)
            truth = results(exact, replace(case, autocast=False), numbers.exact(), hint)
    if case.batch_first and not ours["output"].is_contiguous():
        return f"output is not contiguous: {ours['output'].stride()}"
    return results_differ(ours, plain, truth, case.precision, largest(numbers.pulls[0]), case.is_low)


def results_differ(
    ours: Results, plain: Results, truth: Results, precision: torch.dtype, pull: float, is_low: bool = False
) -> str | None:
    """How results differ from torch's by more than rounding; None: they do not.

    `plain` are torch's in the same dtypes, `truth` in float64; `pull` is the largest of the cotangents.
    """
    if ours.keys() != plain.keys():
        return f"there is {sorted(ours)}, not {sorted(plain)}"
    size = {grad: _largest_of(truth, grad) for grad in BOTH}
    # a gradient that is 0 is the difference of terms that are not
    size[True] = max(size[True], size[False] * pull)
    for name, actual in ours.items():
        grad, wanted = name.startswith("d "), plain[name]
        if actual.dtype != wanted.dtype or actual.shape != wanted.shape:
            return f"{name} is {actual.dtype}{list(actual.shape)}, not {wanted.dtype}{list(wanted.shape)}"
        rounded = max((precision, actual.dtype), key=lambda dtype: torch.finfo(dtype).eps)
        wrong = _wrong(actual, wanted, truth[name], rounded, size[grad], grad, is_low)
        if wrong is not None:
            return f"{name}: {wrong}"
    return None


def _largest_of(actual: Results, grad: bool) -> float:
    return max((largest(x) for name, x in actual.items() if name.startswith("d ") == grad), default=0.0)


def _wrong(
    actual: Tensor, plain: Tensor, truth: Tensor, rounded: torch.dtype, size: float, grad: bool, is_low: bool
) -> str | None:
    missing = truth.isnan()
    if bool(missing.any()):
        if not grad and not actual.isnan().equal(missing):
            return f"NaN in {int(actual.isnan().sum())} places, not {int(missing.sum())}"
        actual, plain, truth = actual[~missing], plain[~missing], truth[~missing]
    if rounded == torch.float64:
        # scores near -1e9 are rounded to 1e-7, and a row of nothing else shows it
        allowed = (1e-6 if is_low else 1e-9) * max(1.0, size)
    else:
        allowed = (3 if grad else 2) * error(plain, truth) + 8 * torch.finfo(rounded).eps * size
    ours = error(actual, truth)
    return None if ours <= allowed else f"error {ours:.3g} > {allowed:.3g}, torch's {error(plain, truth):.3g}"


# Results, exceptions and warnings of one call


@dataclass
class Outcome:
    """What came of a call: results or an exception, and warnings."""

    results: Any
    refusal: tuple[type[Exception], str] | None
    is_worded: bool  # the class raised it itself; else an operator did, in words of its own
    warnings: set[tuple[type[Warning], str]]


def outcome_of(call: Callable[[], Any]) -> Outcome:
    """Make a call and note whatever comes of it."""
    results: Any = {}
    refusal, is_worded = None, False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            results = call()
        except Exception as error:
            refusal = type(error), str(error)
            is_worded = (traceback.extract_tb(error.__traceback__)[-1].line or "").startswith("raise ")
    return Outcome(results, refusal, is_worded, {(w.category, str(w.message)) for w in caught})


def refusals_differ(actual: Outcome, wanted: Outcome) -> str | None:
    """How exceptions differ: by type, and where torch's class raises it by its message; None: they do not."""
    same = actual.refusal == wanted.refusal
    if actual.refusal is not None and wanted.refusal is not None and not wanted.is_worded:
        same = actual.refusal[0] is wanted.refusal[0]
    return None if same else f"raised {actual.refusal}, not {wanted.refusal}"


def follows_mask(case: Case, mask: Tensor | None) -> bool:
    """Return True if torch's slow path would read the hint and not the mask, and ours reads the mask.

    That slow path drops the mask where it is hinted, only outputs are wanted and nothing is padded. Ours
    drops it if its shape is wrong: then only the hint can be meant. Else the mask decides, as on torch's fast
    path. (On a GPU masks are not read, and the hint is trusted.)
    """
    if mask is None or not case.is_causal or case.need_weights or case.key_padding_mask != "none":
        return False
    if mask.shape[-2:] != (case.L, case.S) or mask.shape[:-2] not in ((), (case.batch * case.num_heads,)):
        return False
    if case.add_bias_kv or case.add_zero_attn or (case.learned and mask.is_floating_point()):
        return True
    return not is_causal(mask)


def is_causal(mask: Tensor) -> bool:
    """Return True if a mask hides all later keys, and does nothing else."""
    hidden = mask if mask.dtype == torch.bool else mask == -torch.inf
    adds = mask.dtype != torch.bool and bool(mask.masked_fill(hidden, 0).any())
    return not adds and torch.ones_like(hidden).triu(1).equal(hidden)


def _for_gpu(case: Case) -> Case:
    """The same without what differs there by design, a hint that is wrong, and with a GPU's own way."""
    if case.is_low:
        case = replace(case, attn_mask="mixed", key_padding_mask="inf")
    if case.is_causal and case.attn_mask not in ("none", "causal bool"):
        case = replace(case, attn_mask="causal float")
    return replace(case, way="own")


def difference(case: Case, device: torch.device = CPU) -> str | None:
    """How ours differs from torch's class, called in the same way; None: it does not."""
    if device != CPU:
        case = _for_gpu(case)
    theirs = made(nn.MultiheadAttention, case, case.dtype).to(device)
    numbers = numbers_of(case, theirs).to(device)
    ours = made(MultiheadAttention, case, case.dtype).to(device)
    with (
        fast_path(case.fast_path),
        as_if_large(case.way == "large"),
        always_in_one_step(case.way == "one step"),
    ):
        outcome = outcome_of(lambda: results(ours, case, numbers, case.is_causal))
    hint = case.is_causal and not follows_mask(case, numbers.attn_mask)
    with slow_path(), sdpa_kernel(SDPBackend.MATH) if only_masks_learn(case) else nullcontext():
        wanted = outcome_of(lambda: results(theirs, case, numbers, hint))
    if outcome.warnings != wanted.warnings and device == CPU:  # kernels of a GPU explain themselves
        return f"warnings are {outcome.warnings}, not {wanted.warnings}"
    if wanted.refusal is None and outcome.refusal is None:
        return _compared(case, outcome.results, numbers, theirs, hint)
    if outcome.refusal is None and not wanted.is_worded:
        # What operators of torch refuse, ours may take: masks without elements, which torch cannot reshape,
        # and masks of another dtype, as if they had been cast.
        if not all(x.numel() for x in numbers.inputs):
            return None
        if case.has_other_dtype:
            return _compared(case, outcome.results, numbers.with_masks_in(case.dtype), theirs, hint)
    return refusals_differ(outcome, wanted)
