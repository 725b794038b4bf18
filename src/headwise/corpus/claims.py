"""Who measures which block: alone one after another; under torchrun whoever is free takes the next.

Processes share one counter, torch.distributed's store, and no other word: a block that is finished is seen in
the folder. When the counter has reached the end, those who are done wait for the others; where for a while
nothing more is finished, a worker was lost, and its blocks are measured by who waits. Were it only slow, both
would write the same file. Where the store is lost, each goes on by what is in the folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from time import monotonic, sleep
from typing import TYPE_CHECKING

from ..errors import ArgumentError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from .shards import Shards

__all__ = ["Group", "blocks", "group_here"]

PATIENCE = 10.0  # seconds without a new block, at least, until a worker is thought lost
TIMES = 3  # as long as this worker's own longest block
ASKS = 0.1  # seconds
BEGIN = 3600.0  # seconds for who begins: a large corpus is looked through
READY, NEXT = "headwise survey begun", "headwise survey next"


class Group:
    """Processes of one survey, on one or many machines."""

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self.store: Store | None = store
        self.rank, self.world = rank, world

    def tell(self, said: str) -> None:
        """The first one has begun, or says why not."""
        assert self.store is not None
        self.store.set(READY, said)

    def hear(self) -> None:
        """Wait until the first one has begun.

        Raises:
            ArgumentError: it could not, or nothing was heard of it.
        """
        assert self.store is not None
        end = monotonic() + BEGIN
        while not self.store.check([READY]):
            if monotonic() > end:
                raise ArgumentError(
                    f"rank 0 must begin a survey: nothing was heard of it in {BEGIN:.0f} s; see what it says"
                )
            sleep(ASKS)
        said = self.store.get(READY).decode()
        if said:
            raise ArgumentError(f"rank 0 must begin a survey: it could not: {said}")

    def next(self) -> int | None:
        """The number of a block that nobody has taken; None: the store is lost."""
        if self.store is None:
            return None
        try:
            return int(self.store.add(NEXT, 1)) - 1
        except RuntimeError as error:  # whatever became of it
            self.store = None
            said = str(error).strip().partition("\n")[0]
            sys.stderr.write(f"survey: rank {self.rank} goes on without the store, which is lost: {said}\n")
            return None


def group_here(timeout: float = 60.0) -> Group | None:
    """The processes that torchrun started with this one; None: it is alone.

    Raises:
        ArgumentError: the store that they share cannot be reached.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world < 2 or "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        return None
    from torch.distributed.rendezvous import rendezvous

    rank = int(os.environ["RANK"])
    try:
        store, rank, world = next(rendezvous("env://", rank, world, timeout=timedelta(seconds=timeout)))
    except (RuntimeError, ValueError, OSError) as error:
        said = str(error).strip().partition("\n")[0]
        raise ArgumentError(
            f"processes must reach each other: rank {rank} of {world} does not reach "
            f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '')} ({said}); use torchrun"
        ) from error
    return Group(store, rank, world)


def blocks(count: int, shards: Shards, group: Group | None, patience: float = PATIENCE) -> Iterator[int]:
    """The blocks that this process is to measure, each when it is asked for; ends when all are finished.

    Args:
        count: how many there are.
        patience: seconds without a new block until a worker is thought lost.
    """
    longest = 0.0
    number: int | None
    if group is None:
        for number in range(count):
            if not shards.has(number):
                yield number
        return
    while (number := group.next()) is not None and number < count:
        if shards.has(number):
            continue
        began = monotonic()
        yield number
        longest = max(longest, monotonic() - began)
    known, since = -1, monotonic()
    while True:
        finished = shards.finished()
        missing = [each for each in range(count) if each not in finished]
        if not missing:
            return
        if len(finished) != known:
            known, since = len(finished), monotonic()
        if group.store is None or monotonic() - since > max(patience, TIMES * longest):
            yield missing[group.rank * len(missing) // group.world]
            since = monotonic()
        else:
            with suppress(InterruptedError):
                sleep(ASKS)
