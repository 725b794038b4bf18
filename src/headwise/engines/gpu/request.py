"""A request for the kernels: descriptors of q and k, the rules, lists of tiles, tensors for results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...scoring import hidden_is_endless
from ..one_query import SUPPORTED_RULES
from ..plans import PLANS
from ..scores import FURTHER_NUMBERS, Scores
from .launches import (
    Arguments,
    Blocks,
    Kernel,
    blocks_for,
    compiled_beside,
    interpreted,
    launch,
    number_of,
    ready,
    specialization,
    takes_descriptors,
)
from .lists import ListPlan, Tables, chunk_of, in_order, list_plan, seen_tiles, tables
from .tile import LOG2E, Channels, Rules, Setup

DEEPEST = 65535  # the largest size of a grid in its third dimension
FAR = 2**30  # farther than any two positions
WORTH_A_LOOK = 2**20  # scores of a head beyond which a mask, or a bias that may be one, is read first
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True, eq=False)
class Prepared:
    """Scores and lse in the form that kernels take; computed once for all kernels of a request."""

    scores: Scores
    input_lse: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.scores.q.device

    @cached_property
    def shape(self) -> tuple[int, int, int, int]:
        """[B, H, T, S]"""
        return self.scores.shape

    @cached_property
    def q(self) -> Tensor:
        return _unit_stride(self.scores.q)

    @cached_property
    def k(self) -> Tensor:
        return _unit_stride(self.scores.k)

    @cached_property
    def lse(self) -> Tensor:
        assert self.input_lse is not None, "this kernel needs lse"
        return self.input_lse.contiguous()

    @cached_property
    def counted(self) -> Tensor | None:
        """Which queries count in means, bool [B, T]; None: all."""
        return self.scores.mask.counted(self.shape[2])

    @cached_property
    def counted_range(self) -> Tensor | None:
        """Each sequence's first counted query and the one after the last, int32 [B, 2]; None: all count."""
        if self.counted is None:
            return None
        T = self.shape[2]
        spots = torch.arange(T, device=self.device, dtype=torch.int32)
        ends = torch.where(self.counted, spots, T).amin(-1), torch.where(self.counted, spots + 1, 0).amax(-1)
        return torch.stack(ends, -1).to(torch.int32)

    @cached_property
    def first_keys(self) -> Tensor | None:
        """The first real key of each sequence, int32 [B]; None: key 0."""
        keys = self.scores.mask.keys
        if keys is None or keys.ndim == 1:
            return None
        return keys.int().argmax(-1).to(torch.int32)

    @cached_property
    def describable(self) -> bool:
        """True if q and k can be passed as tensor descriptors."""
        return takes_descriptors(self.device.index) and _describable(self.q) and _describable(self.k)

    @cached_property
    def may_mask(self) -> bool:
        """True if there is a bias, shared by all heads, that may be a mask: reading its tiles may pay."""
        bias, (_, H, T, S) = self.scores.scoring.bias, self.shape
        if bias is None or bias.shape[1] > 1 or tuple(bias.shape[2:]) != (T, S):
            return False
        return interpreted() or (H > 1 and T * S > WORTH_A_LOOK)

    @property
    def is_listed(self) -> bool:
        """True if the first pass walks lists of tiles."""
        return self.scores.mask.is_listed or self.may_mask

    @cached_property
    def kind(self) -> int:
        """A number for the compiled kernel that this request uses."""
        signature = self.signature
        number = PLANS.get(("kind", signature))
        if number is None:
            parts = self.q, self.k, strides_of(self.q), strides_of(self.k), tuple(self.rules), self.numbers
            number = number_of(specialization(parts))
            PLANS.keep(("kind", signature), number)
        return number

    @cached_property
    def signature(self) -> Hashable:
        """Everything except the values of tensors: faster to compute than what follows from it."""
        scores = self.scores
        mask, scoring, positions = scores.mask, scores.scoring, scores.positions
        rules: Hashable = None
        if scoring.has_tensors or not mask.is_positional:
            tensors = (*scoring.tensors.items(), *mask.tensors.items())
            rules = (
                *[getattr(mask, name) for name in FURTHER_NUMBERS],
                *[(name, signature_of(x)) for name, x in tensors],
            )
        return (
            signature_of(self.q), signature_of(self.k), mask.left, mask.right, scoring.scale, scoring.softcap,
            rules, positions is not None, self.device.index, interpreted(),
        )  # fmt: skip

    @cached_property
    def rules(self) -> Rules:
        scores, scoring, relative = self.scores, self.scores.scoring, self.scores.scoring.relative
        fields: dict[str, Any] = {"bias": scoring.bias, **scores.mask.for_kernels()}
        for name, value in tuple(fields.items()):
            if isinstance(value, Tensor) and value.ndim == 4:
                fields |= _named_strides(name, value)
            if isinstance(value, Tensor) and value.dtype == torch.bool:
                fields[name] = value.view(torch.uint8)  # kernels load bytes
        return Rules(
            scale=scoring.scale,
            scale_log2=scoring.scale * LOG2E.value,
            softcap=None if scoring.softcap is None else float(scoring.softcap),  # always the same type
            slopes=None if scoring.slopes is None else in_float32(scoring.slopes),
            relative=None if relative is None else in_float32(hidden_is_endless(relative)),
            reach=0 if relative is None else relative.shape[1] // 2,
            sinks=None if scoring.sinks is None else as_loaded(scoring.sinks),
            at=None if scores.positions is None else scores.positions.to(self.device, torch.int32),
            counted=None if self.counted is None else self.counted.contiguous().view(torch.uint8),
            **fields,
        )

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """H, T, S, shift, left, right"""
        (_, H, T, S), mask = self.shape, self.scores.mask
        left, right = (
            0 if reach is None else max(-FAR, min(reach, FAR)) for reach in (mask.left, mask.right)
        )
        return H, T, S, S - T, left, right

    def empty(self, *shape: int) -> Tensor:
        """Return an uninitialised tensor for a result, float32."""
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros for a result, float32."""
        return torch.zeros(shape, dtype=torch.float32, device=self.device)


CACHED_STRIDES = 4096
REPLACED = (  # fields of `Rules` that a plan replaces by the tensors of its call, and where they come from
    ("bias", "scoring", "bias"), ("slopes", "scoring", "slopes"), ("sinks", "scoring", "sinks"),
    ("lengths", "mask", "keys"), ("keys", "mask", "keys"), ("key_ids", "mask", "key_ids"),
    ("query_ids", "mask", "query_ids"), ("allowed", "mask", "allowed"),
)  # fmt: skip


def in_float32(x: Tensor) -> Tensor:
    """Return x in float32, contiguous."""
    return x.float().contiguous()


def as_loaded(x: Tensor) -> Tensor:
    """Return x contiguous in a dtype that kernels read: a cast would take as long as a kernel's launch."""
    return x.contiguous() if x.dtype in DTYPES else in_float32(x)


AS_READ = {"slopes": in_float32, "sinks": as_loaded}  # conversions of a field before a kernel gets it


def signature_of(x: Tensor) -> Hashable:
    """Return what kernels may be compiled, or planned, for."""
    return x.shape, x.stride(), x.dtype, x.data_ptr() & 15


def rules_by(prepared: Prepared) -> Callable[[Scores], Rules]:
    """Return a function that gives `Prepared.rules` of all scores with the signature of these."""
    rules, scores = prepared.rules, prepared.scores
    mask, scoring = scores.mask, scores.scoring
    if mask.is_positional and not scoring.has_tensors and scores.positions is None:
        return lambda scores: rules
    # fields whose tensors are passed unchanged: only their memory is new
    as_they_are: list[tuple[str, Callable[[Scores], Tensor | None]]] = []
    for name, owner, attribute in REPLACED:
        mine = getattr(rules, name)
        source = getattr(scoring if owner == "scoring" else mask, attribute)
        if mine is None:
            continue
        getter = attrgetter(f"{owner}.{attribute}")
        if source is not None and source.data_ptr() == mine.data_ptr():
            as_they_are.append((name, partial(_in_bytes, getter) if source.dtype == torch.bool else getter))
        elif name in AS_READ:
            as_they_are.append((name, partial(_changed, AS_READ[name], getter)))
        else:
            return lambda scores: Prepared(scores).rules
    replaced = {name for name, _ in as_they_are} | {"counted"}
    if any(isinstance(x, Tensor) and name not in replaced for name, x in rules._asdict().items()):
        return lambda scores: Prepared(scores).rules  # relative, positions, a rule not in `REPLACED`
    if rules.counted is not None:
        as_they_are.append(("counted", partial(_counted, prepared.shape[2])))

    nothing: dict[str, Any] = dict.fromkeys([name for name, _ in as_they_are])
    numbers = rules._replace(**nothing)  # a plan holds no tensor
    placed = [(Rules._fields.index(name), get) for name, get in as_they_are]

    def again(scores: Scores) -> Rules:
        fields: list[Any] = list(numbers)
        for place, get in placed:
            fields[place] = get(scores)
        return Rules._make(fields)

    return again


def _counted(query_len: int, scores: Scores) -> Tensor:
    counted = scores.mask.counted(query_len)
    assert counted is not None, "its signature says so"
    return counted.contiguous().view(torch.uint8)


def _in_bytes(get: Callable[[Scores], Tensor], scores: Scores) -> Tensor:
    return get(scores).view(torch.uint8)


def _changed(change: Callable[[Tensor], Tensor], get: Callable[[Scores], Tensor], scores: Scores) -> Tensor:
    return change(get(scores))


class Request:
    """A prepared request, cut into the tiles of one kind of kernel.

    Args:
        kind: which blocks to use; see launches.py.
        keys_first: transposed tiles: a program holds a block of keys and walks the queries.
        blocks: instead of the table's.
        keys: chosen keys, copied, in place of k.
        arranged: for a first pass, whose programs make their lists themselves.
    """

    def __init__(
        self,
        prepared: Prepared,
        kind: str,
        keys_first: bool = False,
        blocks: Blocks | None = None,
        keys: Tensor | None = None,
        arranged: bool = False,
    ) -> None:
        self.prepared, self.keys_first = prepared, keys_first
        self.lent: Tensor | None = None  # see `lend`
        self.k = prepared.k if keys is None else keys
        q = prepared.q
        self.tuned = blocks or blocks_for(kind, q.shape[-1], q.dtype, q.device)
        mask, describable = prepared.scores.mask, prepared.describable
        self.setup = _setup(
            self.tuned, q.shape[-1], q.dtype, prepared.scores.group,
            describable and (keys is None or _describable(keys)),
            mask.left is not None, mask.right is not None, mask.right is not None and mask.right <= 0,
            mask.is_listed, prepared.scores.positions is not None, mask.num_labels,
            arranged and prepared.may_mask,
            *(self._lists() if arranged and prepared.is_listed else (0, False)),
        )  # fmt: skip
        self.B, self.H, self.T, self.S = prepared.shape
        self.blocks = -(-(self.S if keys_first else self.T) // self.tuned.M)  # of rows, a head
        self.grid = (self.blocks, self.H)

    def _lists(self) -> tuple[int, bool]:
        """Return `Setup.chunk` and `Setup.each` of the first pass."""
        prepared, (_, _, T, S) = self.prepared, self.prepared.shape
        rules = prepared.rules
        if not all(isinstance(rule, SUPPORTED_RULES) for rule in prepared.scores.mask.hiding):
            return 0, True  # lists do not support this rule
        few = T * S <= (512 if interpreted() else WORTH_A_LOOK)
        if few and rules.allowed is not None and not prepared.may_mask:
            return 0, True  # reading every tile beforehand would take as long
        has_tensor_rules = rules.keys is not None or rules.key_ids is not None
        return chunk_of(-(-(T if self.keys_first else S) // self.tuned.N), has_tensor_rules), False

    def without_tensors(self) -> dict[str, object]:
        """Return the attributes shared by all requests with this signature; see `again`."""
        tensors = ("prepared", "k", "tile_lists", "lent")
        return {name: value for name, value in self.__dict__.items() if name not in tensors}

    @staticmethod
    def again(same: dict[str, object], prepared: Prepared) -> Request:
        """Return a request with the attributes of another one of the same signature."""
        request = object.__new__(Request)
        request.__dict__.update(same)
        request.prepared, request.k, request.lent = prepared, prepared.k, None
        return request

    @cached_property
    def list_plan(self) -> ListPlan:
        """The plan for its lists."""
        return list_plan(self)

    @property
    def has_tables(self) -> bool:
        """True if tables are computed before the lists of a first pass."""
        return self.setup.chunk > 0 and (self.list_plan.shown is not None or self.list_plan.fields > 0)

    @property
    def lists_alike(self) -> Arguments:
        """What `tile_lists` will be except its values: nothing is launched for it."""
        return self._first_pass_lists(filled=False) if self.has_tables else self.tile_lists

    @cached_property
    def tile_lists(self) -> Arguments:
        """(tiles, counts, strides): which tiles each block of rows sees; three times None without a list.

        In the first pass: memory for them, the tables, strides of both.
        """
        if not self.setup.listed or self.setup.each:
            return None, None, None
        return self._first_pass_lists() if self.setup.chunk else as_lists(*in_order(seen_tiles(self)))

    def _first_pass_lists(self, filled: bool = True) -> Arguments:
        plan, device = self.list_plan, self.prepared.device
        table_tensors = tables(self, self.lent, filled)
        return torch.empty(plan.room, dtype=torch.int32, device=device), table_tensors, plan.strides

    def lend(self, other: Request) -> None:
        """Lend the tables of blocks to a request for the same scores that is cut into the same blocks."""
        if self.has_tables and other.has_tables:
            mine, theirs = self.list_plan, other.list_plan
            if (mine.blocks, mine.sizes) == (theirs.blocks, theirs.sizes):
                other.lent = cast(Tables, self.tile_lists[1])[1]

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int],
        *tensors: object,
        sizes: Arguments = (),
        options: Arguments = (),
    ) -> Launch:
        """Run a kernel with q and k, its own tensors, the rules, the numbers, then its constants.

        grid: programs a sequence, in two dimensions. The third one is for the sequences, so that no program
        has to divide to find its sequence.
        """
        planned = self.planned(kernel, grid, *tensors, sizes=sizes, options=options)
        planned(self.prepared.q, self.k, self.prepared.rules, *tensors)
        return planned

    def planned(
        self,
        kernel: Kernel,
        grid: tuple[int, int],
        *tensors: object,
        sizes: Arguments = (),
        options: Arguments = (),
    ) -> Launch:
        """Return the launch without its tensors: it can be used for all others of their kind."""
        prepared, k = self.prepared, self.k
        mine = (tensors, sizes) if k is prepared.k else (tensors, sizes, k, strides_of(k))
        return Launch(
            kernel, grid, self.B, self.setup, self.keys_first, prepared.numbers, sizes, options,
            number_of((prepared.kind, specialization(mine))), prepared.device, self.tuned.warps,
            self.tuned.registers,
        )  # fmt: skip


def lister(request: Request) -> Callable[[Scores, Rules, Tensor | None], Arguments]:
    """Return a function for `tile_lists` in first passes over scores of this signature, with lent tables."""
    if not request.setup.chunk:
        return lambda scores, rules, lent: (None, None, None)
    prepared, room, strides = request.prepared, request.list_plan.room, request.list_plan.strides
    device = prepared.device
    if not request.has_tables:
        nothing, empty, int32 = (None, None), torch.empty, torch.int32
        B, H, rows, columns = room
        return lambda *_: (empty(B, H, rows, columns, dtype=int32, device=device), nothing, strides)
    same = request.without_tensors()
    alike = {name: getattr(prepared, name) for name in ("shape", "kind", "numbers")}

    def lists_of(scores: Scores, rules: Rules, lent: Tensor | None) -> Arguments:
        prepared = Prepared(scores)
        prepared.__dict__.update(alike, rules=rules)
        again = Request.again(same, prepared)
        again.lent = lent
        return again.tile_lists

    return lists_of


def rules_and_lists_by(request: Request) -> Callable[[Prepared], tuple[Rules, Arguments]]:
    """Return a function for `Prepared.rules` and `tile_lists` in second passes of the same signature."""
    rules_of = rules_by(request.prepared)
    if not request.setup.listed:
        nothing = None, None, None
        return lambda prepared: (rules_of(prepared.scores), nothing)
    same = request.without_tensors()

    def again(prepared: Prepared) -> tuple[Rules, Arguments]:
        prepared.__dict__["rules"] = rules_of(prepared.scores)  # the lists are computed from them
        return prepared.rules, Request.again(same, prepared).tile_lists

    return again


class Launch(NamedTuple):
    """All arguments of a launch except q, k, the rules and the kernel's own tensors."""

    kernel: Kernel
    grid: tuple[int, int]
    B: int
    setup: Setup
    keys_first: bool
    numbers: tuple[int, ...]
    sizes: Arguments
    options: Arguments
    kinds: Hashable
    device: torch.device
    warps: int
    registers: int

    def compiling(
        self, q: Tensor, k: Tensor, rules: Rules, *tensors: object
    ) -> AbstractContextManager[object]:
        """Return a context in which the kernel of this launch is compiled in parallel, if it was not."""
        arguments = (*self._before(q, k, rules, *tensors), 0, *self.sizes)
        return compiled_beside(
            self.kernel, (*self.grid, 1), arguments, (*self.options, self.setup), self.kinds, self.device,
            self.warps, self.registers,
        )  # fmt: skip

    def _before(self, q: Tensor, k: Tensor, rules: Rules, *tensors: object) -> Arguments:
        setup = self.setup
        M, N = (setup.N, setup.M) if self.keys_first else (setup.M, setup.N)
        return (
            *described(q, M, setup), *described(k, N, setup), strides_of(q)[:3], strides_of(k)[:3], *tensors,
            rules, *self.numbers,
        )  # fmt: skip

    def ready(self) -> Callable[..., None] | None:
        """Return a function of all arguments that launches a kernel that has run; None for several."""
        if self.B > DEEPEST:
            return None
        grid, constants = (*self.grid, self.B), (*self.options, self.setup)
        return ready(self.kernel, grid, constants, self.kinds, self.device, self.warps, self.registers)

    def again(self, q: Tensor, k: Tensor) -> Callable[..., None] | None:
        """Return `__call__` of one that has run, for all with the signatures of q and k; None as `ready`."""
        go, setup = self.ready(), self.setup
        if go is None:
            return None
        M, N = (setup.N, setup.M) if self.keys_first else (setup.M, setup.N)
        q_of, k_of = describer(q, M, setup), describer(k, N, setup)
        q_steps, k_steps = strides_of(q)[:3], strides_of(k)[:3]
        numbers = (*self.numbers, 0, *self.sizes)

        def run(q: Tensor, k: Tensor, rules: Rules, *tensors: object) -> None:
            go(*q_of(q), *k_of(k), q_steps, k_steps, *tensors, rules, *numbers)

        return run

    def __call__(self, q: Tensor, k: Tensor, rules: Rules, *tensors: object) -> None:
        """Run the kernel on these tensors."""
        before, setup = self._before(q, k, rules, *tensors), self.setup
        for b0 in range(0, self.B, DEEPEST):
            launch(
                self.kernel, (*self.grid, min(DEEPEST, self.B - b0)), (*before, b0, *self.sizes),
                (*self.options, setup), self.kinds, self.device, self.warps, self.registers,
            )  # fmt: skip


@functools.cache
def _setup(
    tuned: Blocks, D: int, dtype: torch.dtype, group: int, descriptors: bool, left: bool, right: bool,
    behind: bool, listed: bool, placed: bool, labels: int, masking: bool, chunk: int,
    each: bool,
) -> Setup:  # fmt: skip
    rough = dtype == torch.bfloat16 and not interpreted()
    return Setup(
        tuned.M, tuned.N, *_in_two(D), group, tuned.stages, descriptors, dtype == torch.float32,
        DTYPES[dtype], left, right, behind, listed or masking, placed, labels, rough, masking, chunk, each,
    )  # fmt: skip


def _in_two(D: int) -> tuple[int, int, int]:
    """Return channels, and the two powers of two that hold them: the second may be 0, others are at least 32.

    Triton 3.6 on Hopper GPUs reads outside of shared memory where the right factor of a product has 16
    columns and is stored by rows, as values and their gradients are.
    """
    D0 = max(32, 2 ** (D.bit_length() - 1))
    return D, D0, 0 if D <= D0 else max(32, triton.next_power_of_2(D - D0))


def channels_of(x: Tensor) -> Channels:
    """Return how the channels of values, or of outputs and their gradients, are loaded."""
    return Channels(*_in_two(x.shape[-1]), takes_descriptors(x.device.index) and _describable(x))


def as_lists(tiles: Tensor, counts: Tensor) -> Arguments:
    """Return lists in the form that kernels take."""
    return tiles, counts, (*strides_of(tiles)[:2], tiles.stride(2), *strides_of(counts)[:2])


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def strides_of(x: Tensor) -> tuple[int, ...]:
    """Return strides, with 0 where a dimension has size 1."""
    return _steps(x.shape, x.stride())


@functools.lru_cache(maxsize=CACHED_STRIDES)
def _steps(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))


def _named_strides(name: str, x: Tensor) -> dict[str, int]:
    """Return strides as separate fields: Triton 3.6 loses a 1 in a tuple that is in a tuple."""
    return {f"{name}_{letter}": step for letter, step in zip("bhts", strides_of(x), strict=True)}


def _describable(x: Tensor) -> bool:
    """Return True if a tensor descriptor can hold x: aligned, rows of 16 bytes, no overlapping dimensions."""
    width = x.element_size()
    if x.data_ptr() % 16 or x.shape[-1] * width < 16:
        return False
    outer = zip(x.shape[:-1], x.stride(), strict=False)
    return all(size == 1 or (stride > 0 and stride * width % 16 == 0) for size, stride in outer)


def described(x: Tensor, size: int, setup: Setup | Channels) -> Arguments:
    """Return x as the kernels load it: twice, for the two parts of its channels."""
    if not setup.descriptors:
        return x, None
    shape, steps, first, second = _frame(x.shape, x.stride(), size, setup.D, setup.D0, setup.D1)
    return _descriptor(x, shape, steps, first), _descriptor(x, shape, steps, second) if setup.D1 else None


def describer(x: Tensor, size: int, setup: Setup | Channels) -> Callable[[Tensor], Arguments]:
    """Return `described` as a function for all tensors with the shape and strides of x."""
    if not setup.descriptors:
        return lambda x: (x, None)
    shape, steps, first, second = _frame(x.shape, x.stride(), size, setup.D, setup.D0, setup.D1)
    if not setup.D1:

        def in_one(x: Tensor) -> Arguments:
            descriptor = object.__new__(TensorDescriptor)  # `_descriptor`, written out
            descriptor.base, descriptor.shape, descriptor.strides, descriptor.block_shape = (
                x,
                shape,
                steps,
                first,
            )
            return descriptor, None

        return in_one
    return lambda x: (_descriptor(x, shape, steps, first), _descriptor(x, shape, steps, second))


@functools.lru_cache(maxsize=CACHED_STRIDES)
def _frame(
    shape: tuple[int, ...], strides: tuple[int, ...], size: int, D: int, D0: int, D1: int
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return a descriptor's fields without its tensor: shape, strides, blocks of both parts."""
    # a dimension of size 1 is never stepped over: any aligned stride will do
    steps = [(D + 7) // 8 * 8 if shape[i] == 1 else strides[i] for i in range(3)] + [1]
    return list(shape), steps, [1, 1, size, D0], [1, 1, size, D1]


def _descriptor(x: Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    """Return a descriptor without its own checks, which `_describable` has made."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.base, descriptor.shape, descriptor.strides, descriptor.block_shape = x, shape, strides, block
    return descriptor
