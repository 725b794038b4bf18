"""A sequence sharded over the ranks of a group: which rank has which tokens, and the ring of messages.

"in order" gives each of n ranks one run of tokens. "zigzag" divides T tokens into 2 n chunks, of which rank r
has two: chunk r from the start and chunk r from the end:

    zigzag over 3 ranks     0 1 2 2 1 0      rank 0 holds the first and the last sixth

Under a causal mask the first queries see few keys and the last see many, so zigzag gives every rank the same
amount of work. Chunk c begins at floor(c T / 2n), so T can have any value. Adjacent chunks are one run.

Tokens in another order, or a text that was not split, have the right shape and would give wrong numbers. So
`split` marks the tensors it returns; `split_error` checks that mark, and tensors without it are compared over
ranks (`fingerprint`): a tensor that is the same on all of them was not split.

All ranks must send the same messages in the same order, or they would wait forever. So wrong arguments raise
before the first message, or every rank raises with the first message (`Ring.agree`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..errors import ArgumentError, HeadwiseError, ShapeError

Mesh = DeviceMesh | dist.ProcessGroup | None

ORDERS = ("zigzag", "in order")
MARK = "headwise_split"  # attribute of a tensor: how it was split
SAMPLED = 4096  # numbers of a tensor that are compared over ranks
KEYS, GRADIENTS = 1, 2  # tags of messages between the same ranks

# The orders that `split` was called with in each group. An operation on a marked tensor (`.to(device)`)
# returns a tensor without the mark; then only these orders are known.
_orders_used: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of a rank."""

    local: slice  # among the tokens of their rank
    span: slice  # in the sequence

    @property
    def size(self) -> int:
        size: int = self.span.stop - self.span.start
        return size


@dataclass(frozen=True)
class Layout:
    """How a sequence is distributed over the ranks of a group."""

    length: int
    ranks: int
    order: str = "zigzag"

    def runs(self, rank: int) -> list[Run]:
        """Return the runs of tokens that a rank holds, in the order in which it holds them."""
        if self.order == "zigzag":
            chunks, mine = 2 * self.ranks, [rank, 2 * self.ranks - 1 - rank]
        else:
            chunks, mine = self.ranks, [rank]
        runs: list[Run] = []
        for chunk in mine:
            start, stop = (self.length * c // chunks for c in (chunk, chunk + 1))
            before = runs[-1].local.stop if runs else 0
            if runs and runs[-1].span.stop == start:
                previous = runs.pop()
                start, before = previous.span.start, previous.local.start
            runs.append(Run(slice(before, before + stop - start), slice(start, stop)))
        return runs

    def size(self, rank: int) -> int:
        """Return the number of tokens of a rank."""
        return self.runs(rank)[-1].local.stop

    def positions(self, rank: int) -> Tensor:
        """Return the positions of a rank's tokens in the sequence, int64 [t], on the CPU."""
        return torch.cat([torch.arange(r.span.start, r.span.stop, device="cpu") for r in self.runs(rank)])

    def check(self, sizes: Mapping[int, int], name: str) -> None:
        """Raise unless each rank holds as many tokens as it should.

        Args:
            sizes: the number of tokens, by rank.
            name: the name of the tensors in the error.

        Raises:
            ShapeError: the sequence is too short, or a rank has another number of tokens.
        """
        least = self.ranks * (2 if self.order == "zigzag" else 1)
        if self.length < least:
            raise ShapeError(
                f"{name} must have at least one token per chunk: got {self.length} tokens for {self.ranks} "
                f"ranks with {least} chunks; use fewer ranks"
            )
        for rank, size in sizes.items():
            if size != self.size(rank):
                raise ShapeError(
                    f"{name} must hold only the tokens of the rank: rank {rank} has {size} of {self.length}, "
                    f"its share is {self.size(rank)}; use headwise.parallel.split with the same order"
                )


# Tokens to ranks and back


class SplitMark(NamedTuple):
    """How `split` made a tensor."""

    order: str
    dim: int


def check_order(order: str) -> None:
    """Raise `ArgumentError` if the order is unknown."""
    if order not in ORDERS:
        raise ArgumentError(
            f'order must be "zigzag" or "in order": got {order!r}; "zigzag" suits causal masks'
        )


def split(
    tensor: Tensor, mesh: Mesh = None, dim: int = 1, *, order: str = "zigzag", axis: str | None = None
) -> Tensor:
    """Return this rank's tokens of a sequence that every rank has; nothing is communicated.

    The returned tensor remembers its order; a sharded model and `attention` compare it with theirs.
    Operations return tensors without this attribute, so move and convert the tensor before you split it.

    Args:
        tensor: a tensor with the whole sequence along `dim`.
        mesh: a `DeviceMesh`, a process group, or None for all ranks; axis: the dimension of a mesh that has
            several.
        dim: the dimension of the tokens: 1 for [B, T] and [B, T, E], 2 for [B, H, T, D].
        order: "zigzag", which distributes the work of a causal mask evenly, or "in order".

    Raises:
        ArgumentError: an unknown order or mesh.
        ShapeError: fewer tokens than chunks.
    """
    check_order(order)
    ring = Ring.of(mesh, axis)
    layout = Layout(tensor.shape[dim], ring.size, order)
    layout.check({}, "tensor")
    runs = layout.runs(ring.rank)
    mine = torch.cat([tensor.narrow(dim, run.span.start, run.size) for run in runs], dim)
    setattr(mine, MARK, SplitMark(order, dim % tensor.ndim))
    _orders_used.setdefault(ring.group, set()).add(order)
    return mine


def split_error(tokens: Tensor, ring: Ring, order: str, dim: int | None = None) -> ArgumentError | None:
    """Return the error of tokens that are known to be split in another way than `order`, or None.

    Args:
        dim: the dimension of the tokens; None if any is allowed.
    """
    mark: SplitMark | None = getattr(tokens, MARK, None)
    if mark is not None and dim not in (None, mark.dim):
        return ArgumentError(
            f"tokens must be split along dim {dim}: they were split along dim {mark.dim} into "
            f"{list(tokens.shape)}; use split(..., dim={dim})"
        )
    used = _orders_used.get(ring.group, {order}) if mark is None else {mark.order}
    if order in used:
        return None
    (other,) = used
    reason = "split was only called" if mark is None else f"{list(tokens.shape)} was split"
    return ArgumentError(
        f'tokens must be split with order="{order}": {reason} with order="{other}"; pass the same order to '
        "split and to shard_sequence or attention"
    )


def fingerprint(*tokens: Tensor) -> float:
    """Return a hash of tensors, or 0 if they need not be compared.

    They need not be if `split` has marked one of them, or if a function transform hides their values.
    """
    marked = any(hasattr(tensor, MARK) for tensor in tokens)
    if marked or not sum(map(Tensor.numel, tokens)) or torch._C._are_functorch_transforms_active():
        return 0.0
    numbers: list[object] = []
    for tensor in tokens:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        flat = local.detach().reshape(-1)
        numbers += [tuple(tensor.shape), *flat[:: max(1, len(flat) // SAMPLED)].tolist()]
    return float(hash(tuple(numbers)) % 2**52)


def not_split(fingerprints: Sequence[float], tokens: Tensor, order: str) -> ArgumentError | None:
    """Return the error of tokens that are the same on all ranks, or None.

    Args:
        fingerprints: of these tokens, by rank.
    """
    if len(fingerprints) == 1 or not fingerprints[0] or len({*fingerprints}) > 1:
        return None
    return ArgumentError(
        f"tokens must be split over ranks: all {len(fingerprints)} ranks passed the same tensor of shape "
        f'{list(tokens.shape)}; pass headwise.parallel.split(tokens, order="{order}")'
    )


def join(
    tensor: Tensor, mesh: Mesh = None, dim: int = 1, *, order: str = "zigzag", axis: str | None = None
) -> Tensor:
    """Return the whole sequence on every rank from the tokens of all ranks: the inverse of `split`.

    No gradient flows through it: compute a loss on each rank's own tokens.

    Args: as `split`; tensor: this rank's tokens.

    Raises:
        ArgumentError: an unknown order or mesh.
        ShapeError: a rank has another number of tokens than `split` returns.
    """
    check_order(order)
    ring = Ring.of(mesh, axis)
    sizes = [int(number) for (number,) in ring.numbers([tensor.shape[dim]], tensor.device)]
    layout = Layout(sum(sizes), ring.size, order)
    layout.check(dict(enumerate(sizes)), "tensor")
    return joined(tensor, ring, layout, dim)


@torch.no_grad()
def joined(tensor: Tensor, ring: Ring, layout: Layout, dim: int) -> Tensor:
    """Return the full sequence, for a known layout."""
    dim = dim % tensor.ndim
    sizes = [layout.size(rank) for rank in range(ring.size)]
    shapes = [(*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]) for size in sizes]
    parts = ring.gather(tensor, shapes)
    result = tensor.new_empty(*tensor.shape[:dim], layout.length, *tensor.shape[dim + 1 :])
    for rank, part in enumerate(parts):
        for run in layout.runs(rank):
            result.narrow(dim, run.span.start, run.size).copy_(part.narrow(dim, run.local.start, run.size))
    return result


# The ring


class Message:
    """A tensor being sent to the next rank, while one arrives from the rank before."""

    def __init__(self, sent: Tensor, arriving: Tensor, works: Sequence[dist.Work]) -> None:
        self._arriving, self._works = arriving, works
        self._sent = sent  # kept alive until it has been sent

    def wait(self) -> Tensor:
        """Wait for the tensor from the rank before, and return it."""
        for work in self._works:
            work.wait()
        return self._arriving


class RingSums:
    """Sums over queries of all ranks, for each key; they are passed round one step after their keys.

    Every rank adds its share to `current`, the sums of the keys of the current block, and calls `pass_on`.
    The share of this rank in its own keys stays, and is added to the rest at the end.

    Args:
        empty: makes zeros for the keys of a rank.
    """

    def __init__(self, ring: Ring, empty: Callable[[int], Tensor]) -> None:
        self._ring, self._empty = ring, empty
        self._owner = ring.rank  # of the keys of the current block
        self._current: Tensor | None = None
        self._mine: Tensor | None = None
        self._message: Message | None = None

    @property
    def current(self) -> Tensor:
        """The sums of the keys of the current block, zeros at first."""
        if self._current is None:
            self._current = self._empty(self._owner)
        return self._current

    def pass_on(self) -> None:
        """Send the sums of the current block to the next rank, after this rank has added its share."""
        sums, self._current = self.current, None
        self._owner = (self._owner - 1) % self._ring.size  # of the next keys; in the last step, this rank
        if self._mine is None:
            self._mine = sums
            return
        if self._message is not None:
            sums += self._message.wait()
        self._message = self._ring.pass_on(sums, self._empty(self._owner), GRADIENTS)

    def result(self) -> Tensor:
        """Return the sums of this rank's keys, over all ranks."""
        assert self._mine is not None
        return self._mine if self._message is None else self._mine + self._message.wait()


class Ring:
    """The ranks that share a sequence, each of which sends to the next, as this rank sees them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._next, self._before = (
            dist.get_global_rank(group, (self.rank + step) % self.size) for step in (1, -1)
        )
        self._on_cpu = "cpu" in str(dist.get_backend_config(group))

    @classmethod
    def of(cls, mesh: Mesh, axis: str | None = None) -> Ring:
        """Return the ring of a mesh, of one of its dimensions, of a group, or (None) of all ranks."""
        if not dist.is_available() or not dist.is_initialized():
            raise ArgumentError(
                "mesh must consist of running processes: torch.distributed is not initialised; run under "
                "torchrun and call torch.distributed.init_process_group()"
            )
        if mesh is None:
            assert dist.group.WORLD is not None
            return cls(dist.group.WORLD)
        if isinstance(mesh, dist.ProcessGroup):
            return cls(mesh)
        if not isinstance(mesh, DeviceMesh):
            raise ArgumentError(
                f"mesh must be a DeviceMesh, a group or None: got {type(mesh).__name__}; use "
                'torch.distributed.device_mesh.init_device_mesh("cuda", (ranks,))'
            )
        names = mesh.mesh_dim_names or ()
        if axis is None and mesh.ndim > 1:
            raise ArgumentError(
                f"axis must be given for a mesh of {mesh.ndim} dimensions: got None for {list(names)}; e.g. "
                f"axis={names[-1] if names else 'its name'!r}"
            )
        if axis is not None and axis not in names:
            raise ArgumentError(f"axis must be an axis of the mesh: got {axis!r}; choose from {list(names)}")
        return cls(mesh.get_group(axis))

    @property
    def members(self) -> list[int]:
        """The global ranks of its processes."""
        return dist.get_process_group_ranks(self.group)

    # Messages to the next rank

    def pass_on(self, tensor: Tensor, arriving: Tensor, tag: int = KEYS) -> Message:
        """Start sending to the next rank, and receiving into `arriving` from the one before."""
        operations = [
            dist.P2POp(dist.isend, tensor, self._next, self.group, tag),
            dist.P2POp(dist.irecv, arriving, self._before, self.group, tag),
        ]
        return Message(tensor, arriving, dist.batch_isend_irecv(operations))

    def owner(self, step: int) -> int:
        """Return the rank whose block has arrived after `step` steps."""
        return (self.rank - step) % self.size

    def blocks(self, *mine: Tensor, sizes: Sequence[int]) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield (rank, its tensors) for every rank, this one first; the next block is received meanwhile.

        The list is emptied before the next one is yielded: do not store its tensors.

        Args:
            mine: [B, Hk, s, ..] each, of one dtype.
            sizes: s, by rank.
        """
        block = list(mine)
        packed: Tensor | None = None
        for step in range(self.size):
            message: Message | None = None
            following = sizes[self.owner(step + 1)]
            shapes = [(*x.shape[:2], following, *x.shape[3:]) for x in mine]
            if step + 1 < self.size:
                if packed is None:
                    packed = torch.cat([x.reshape(-1) for x in mine])
                arriving = packed.new_empty(sum(math.prod(shape) for shape in shapes))
                message = self.pass_on(packed, arriving)
            yield self.owner(step), block
            block.clear()  # so that at most two blocks of other ranks are in memory
            if message is not None:
                packed = message.wait()
                flat = packed.split([math.prod(shape) for shape in shapes])
                block = [part.view(shape) for part, shape in zip(flat, shapes, strict=True)]

    # Messages to all ranks

    def add_up(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        """Take the elementwise maximum over all ranks, in place."""
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor

    def gather(self, tensor: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return every rank's tensor; shapes may differ."""
        most = max(math.prod(shape) for shape in shapes)
        mine = tensor.new_zeros(most)
        mine[: tensor.numel()] = tensor.reshape(-1)
        parts = [torch.empty_like(mine) for _ in shapes]
        dist.all_gather(parts, mine, group=self.group)
        pairs = zip(parts, shapes, strict=True)
        return [part[: math.prod(shape)].view(tuple(shape)) for part, shape in pairs]

    def numbers(self, mine: Sequence[float], device: torch.device) -> list[list[float]]:
        """Return a few numbers of every rank, by rank; all of them wait for this message."""
        message_device = torch.device("cpu") if self._on_cpu else device
        numbers_tensor = torch.tensor(mine, dtype=torch.float64, device=message_device)
        return [part.tolist() for part in self.gather(numbers_tensor, [(len(mine),)] * self.size)]

    def agree(
        self, mine: Sequence[float], error: BaseException | None, device: torch.device
    ) -> list[list[float]]:
        """Return `numbers`, or raise on every rank if some rank has an error.

        Raises:
            error: this rank's own.
            HeadwiseError: another rank has one.
        """
        by_rank = self.numbers([float(error is not None), *mine], device)
        if error is not None:
            raise error
        refusing = [rank for rank, numbers in enumerate(by_rank) if numbers[0]]
        if refusing:
            raise HeadwiseError(
                f"arguments must be valid on every rank: ranks {refusing} of {self.size} raised; see the "
                "error there"
            )
        return [numbers[1:] for numbers in by_rank]

    def __deepcopy__(self, memo: object) -> Ring:
        return self  # a group of processes is not copied
