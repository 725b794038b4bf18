"""A group of ranks as a ring: what is passed on to the next one, what is added up over all of them.

Every rank does the same in the same order, or all of them wait for ever. So what may be refused is refused
before the first message, or told to everybody with it (`Ring.agree`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ArgumentError, HeadwiseError

__all__ = ["GRADIENTS", "KEYS", "Mesh", "Message", "Ring", "sent_bytes"]

Mesh = DeviceMesh | dist.ProcessGroup | None

KEYS, GRADIENTS = 1, 2  # what two messages between the same ranks are told apart by

_sent = [0]  # bytes that this rank passed on to the next one


def sent_bytes() -> int:
    """How many bytes this process has passed round rings so far."""
    return _sent[0]


class Message:
    """Something on its way: sent to the next rank while its like arrives from the one before."""

    def __init__(self, sent: Tensor, arriving: Tensor, works: Sequence[dist.Work]) -> None:
        self._sent, self._arriving, self._works = (
            sent,
            arriving,
            works,
        )  # what is sent must not go before it is

    def wait(self) -> Tensor:
        """What arrived."""
        for work in self._works:
            work.wait()
        return self._arriving


class Ring:
    """One rank's place among those that share a sequence."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._next, self._before = (
            dist.get_global_rank(group, (self.rank + step) % self.size) for step in (1, -1)
        )
        self._on_cpu = "cpu" in str(dist.get_backend_config(group))

    @classmethod
    def of(cls, mesh: Mesh, axis: str | None = None) -> Ring:
        """The ring that a mesh, one of its dimensions, a group or, without any, all ranks make.

        Raises:
            ArgumentError: no group of processes was begun; a mesh of several dimensions without axis; an axis
                it does not have.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise ArgumentError(
                "mesh must be of running processes: torch.distributed was not initialised; run under "
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
                f"axis must say which dimension of the mesh: it has {mesh.ndim}, {list(names)}; e.g. "
                f"axis={names[-1] if names else 'its name'!r}"
            )
        if axis is not None and axis not in names:
            raise ArgumentError(f"axis must be one of the mesh's: got {axis!r} of {list(names)}; name one")
        return cls(mesh.get_group(axis))

    @property
    def members(self) -> list[int]:
        """The ranks in it, as all processes number them."""
        return dist.get_process_group_ranks(self.group)

    # Round the ring

    def pass_on(self, tensor: Tensor, arriving: Tensor, tag: int = KEYS) -> Message:
        """Send to the next rank, and take what the one before sends into `arriving`; nobody waits."""
        _sent[0] += tensor.nbytes
        operations = [
            dist.P2POp(dist.isend, tensor, self._next, self.group, tag),
            dist.P2POp(dist.irecv, arriving, self._before, self.group, tag),
        ]
        return Message(tensor, arriving, dist.batch_isend_irecv(operations))

    def owner(self, step: int) -> int:
        """Whose block is here after so many steps."""
        return (self.rank - step) % self.size

    def blocks(self, *mine: Tensor, sizes: Sequence[int]) -> Iterator[tuple[int, list[Tensor]]]:
        """(whose they are, its tensors) of every rank in turn, one's own first; the next is on its way.

        The list is empty when the next one comes: keep none of its tensors.

        Args:
            mine: [B, Hk, s, ..] each, of one dtype.
            sizes: s, by rank.
        """
        here = list(mine)
        packed: Tensor | None = None
        for step in range(self.size):
            message: Message | None = None
            shapes = [
                (*x.shape[:2], sizes[self.owner(step + 1)], *x.shape[3:]) for x in mine
            ]  # of what comes next
            if step + 1 < self.size:
                if packed is None:
                    packed = torch.cat([x.reshape(-1) for x in mine])
                arriving = packed.new_empty(sum(math.prod(shape) for shape in shapes))
                message = self.pass_on(packed, arriving)
            yield self.owner(step), here
            here.clear()  # whoever looked at them has: two blocks are here at most beside one's own
            if message is not None:
                packed = message.wait()
                flat = packed.split([math.prod(shape) for shape in shapes])
                here = [part.view(shape) for part, shape in zip(flat, shapes, strict=True)]

    # Among all

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, on each of them."""
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        """The largest over all ranks, number by number."""
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor

    def gather(self, tensor: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Every rank's tensor; those may differ in shape."""
        most = max(math.prod(shape) for shape in shapes)
        mine = tensor.new_zeros(most)
        mine[: tensor.numel()] = tensor.reshape(-1)
        all_of_them = [torch.empty_like(mine) for _ in shapes]
        dist.all_gather(all_of_them, mine, group=self.group)
        pairs = zip(all_of_them, shapes, strict=True)
        return [part[: math.prod(shape)].view(tuple(shape)) for part, shape in pairs]

    def numbers(self, mine: Sequence[float], device: torch.device) -> list[list[float]]:
        """A few numbers of every rank, by rank: a message that is waited for."""
        where = torch.device("cpu") if self._on_cpu else device
        told = torch.tensor(mine, dtype=torch.float64, device=where)
        return [part.tolist() for part in self.gather(told, [(len(mine),)] * self.size)]

    def agree(
        self, mine: Sequence[float], error: BaseException | None, device: torch.device
    ) -> list[list[float]]:
        """`numbers`, unless some rank refuses what it was given: then every one raises.

        Raises:
            error: this rank's own.
            HeadwiseError: that of another rank.
        """
        told = self.numbers([float(error is not None), *mine], device)
        if error is not None:
            raise error
        refusing = [rank for rank, numbers in enumerate(told) if numbers[0]]
        if refusing:
            raise HeadwiseError(
                f"arguments must be right on every rank: refused on {refusing} of {self.size} ranks; what is "
                "wrong stands in what was raised there"
            )
        return [numbers[1:] for numbers in told]

    def __deepcopy__(self, memo: object) -> Ring:
        return self  # a group of processes is not copied
