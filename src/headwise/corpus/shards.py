"""The files of measured blocks, and the distribution of blocks over processes.

A block of documents has two files, each of which is written completely or not at all:

    measures-000012.parquet      a row per document, layer and head
    documents-000012.parquet     a row per document; written last: if it is there, the block is finished

A block with failures that may pass (memory, a disk) is named measures-000012.retry.parquet and
documents-000012.retry.parquet until it is measured without one.

A file is written under a hidden name, synced to the disk, and renamed. Its bytes depend only on the corpus,
the model and the options. So a block that is measured twice, by a worker that was considered lost or in
another run, gives the same file, and processes need not coordinate.

A single process measures the blocks in order. Under torchrun the processes share a counter in the store of
torch.distributed, and a free process takes the next block. At the end each waits for the others; if no block
is finished for a while, a worker is considered lost, and the waiting processes measure its blocks. If the
store is lost, each process continues by reading the folder. With Ray Data every block is a row and every
worker an actor; Ray gives a lost block to another worker. All machines must see the corpus and the folder.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import get_ident
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ArgumentError, needed
from ..models.pretrained import Pretrained, load
from ..whole_files import half_written, name_once
from .document_rows import DOCUMENT, HEAD, Measure, Options, Rows
from .documents import RETRY, Plan, Texts, arrow, first_line, table_of

if TYPE_CHECKING:
    import pyarrow
    from torch.distributed.distributed_c10d import Store

DOCUMENTS, MEASURES = "documents", "measures"
DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
ENDING = ".part"

PATIENCE = 10.0  # minimal seconds without a new block until a worker is considered lost
TIMES = 3  # factor of the time of this worker's longest block, likewise
POLL = 0.1  # seconds
BEGIN_TIMEOUT = 3600.0  # seconds for rank 0 to begin, which scans the corpus
READY, NEXT = "headwise survey begun", "headwise survey next"


class Shards:
    """The finished blocks of a folder.

    Args:
        by_number: whether layers go by numbers, or by paths; the same for all blocks.
    """

    def __init__(self, folder: Path, *, by_number: bool = True) -> None:
        self.folder, self.by_number = folder, by_number

    def place(self, table: str, number: int, *, retry: bool = False) -> Path:
        """Return the file of a block's table; `retry`: of a block with failures that may pass."""
        return self.folder / f"{table}-{number:06}{'.retry' if retry else ''}.parquet"

    def has(self, number: int) -> bool:
        """Return True if a block was measured, even with failures that may pass."""
        return any(self.place(DOCUMENTS, number, retry=retry).exists() for retry in (False, True))

    def finished(self) -> set[int]:
        """Return the numbers of all blocks that were measured."""
        return self._numbers(".parquet") | self._numbers(".retry.parquet")

    def to_retry(self) -> set[int]:
        """Return the numbers of the blocks with failures that may pass."""
        return self._numbers(".retry.parquet") - self._numbers(".parquet")

    def _numbers(self, ending: str) -> set[int]:
        """Return the numbers of the blocks whose documents file has this ending."""
        numbers = (
            entry.name.removeprefix(f"{DOCUMENTS}-").removesuffix(ending)
            for entry in os.scandir(self.folder)
            if entry.name.startswith(f"{DOCUMENTS}-") and entry.name.endswith(ending)
        )
        return {int(number) for number in numbers if number.isdecimal()}

    def write(self, number: int, rows: Rows) -> None:
        """Write a block. One with failures that may pass never replaces one without."""
        retry = any(row["failure"] == RETRY for row in rows.documents)
        if retry and self.place(DOCUMENTS, number).exists():
            return
        heads, layer = rows.heads, "int32"
        if not self.by_number:
            heads, layer = [row | {"layer": str(row["layer"])} for row in heads], "string"
        measures = table_of(heads, HEAD | {"layer": layer})
        write_atomic(self.place(MEASURES, number, retry=retry), bytes_of(measures))
        write_atomic(self.place(DOCUMENTS, number, retry=retry), bytes_of(table_of(rows.documents, DOCUMENT)))
        if not retry:
            self._delete(number, retry=True)

    def drop(self, number: int) -> None:
        """Delete the files of a block, so that it is measured again."""
        self._delete(number, retry=False)
        self._delete(number, retry=True)

    def _delete(self, number: int, *, retry: bool) -> None:
        for table in (DOCUMENTS, MEASURES):  # in this order: a block without its documents is not finished
            self.place(table, number, retry=retry).unlink(missing_ok=True)

    def read(self, table: str, number: int, columns: list[str] | None = None) -> pyarrow.Table:
        """Return the rows of a finished block."""
        place = self.place(table, number, retry=not self.place(DOCUMENTS, number).exists())
        try:
            return arrow().parquet.ParquetFile(place).read(columns=columns)
        except (OSError, arrow().lib.ArrowException) as error:
            raise ArgumentError(
                f"survey must have all its files: {place.name} cannot be read ({first_line(error)}); delete "
                f"{DOCUMENTS}-{number:06}.parquet and run the survey again"
            ) from error

    def rows(self, number: int) -> Rows:
        """Return the rows of both tables of a finished block."""
        return Rows(*(self.read(table, number).to_pylist() for table in (DOCUMENTS, MEASURES)))

    def sweep(self) -> None:
        """Delete unfinished files of processes that ended, and retry files of blocks that succeeded since."""
        for passed in self._numbers(".retry.parquet") - self.to_retry():
            self._delete(passed, retry=True)
        for file in self.folder.glob(f".*{ENDING}"):
            host, _, process = file.name.removesuffix(ENDING).rpartition("@")[2].partition("+")
            number = process.partition("-")[0]
            if host == _host() and number.isdecimal() and not _is_alive(int(number)):
                file.unlink(missing_ok=True)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.finished()))


def _host() -> str:
    """Return the name of this machine, for file names."""
    return "".join(letter if letter.isalnum() else "." for letter in socket.gethostname())


def _is_alive(process: int) -> bool:
    """Return True if a process of this machine is running."""
    try:
        os.kill(process, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


# Files


def bytes_of(table: pyarrow.Table) -> bytes:
    """Return a table as the bytes of a Parquet file, the same bytes for the same table."""
    pa = arrow()
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(table, sink, compression="zstd", compression_level=3)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def write_atomic(place: Path, data: bytes, *, anew: bool = False) -> bool:
    """Write a file completely or not at all; return False if it existed and was left unchanged.

    Args:
        anew: write only if there is no such file, also if several processes try.
    """
    partial = place.with_name(f".{place.name}@{_host()}+{os.getpid()}-{get_ident()}{ENDING}")
    half_written.add(partial)
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if not anew:
            partial.replace(place)
        elif not name_once(partial, place):
            return False
        _sync_folder(place.parent)
        return True
    except OSError as error:
        rule, remedy = f"out must be writable: {str(place)!r}", "make it writable"
        if error.errno in DISK_FULL:
            rule, remedy = f"out must have free space: {str(place.parent)!r}", "free some space"
        raise ArgumentError(
            f"{rule}: {error.strerror or error}; finished documents are saved; {remedy}, and run the same "
            "command again"
        ) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        half_written.discard(partial)


def _sync_folder(folder: Path) -> None:
    """Sync a folder, so that a new name is on the disk, too, where the system can."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def check_folder(out: str | os.PathLike[str]) -> Path:
    """Return the folder of a survey; make it if needed."""
    folder = Path(os.path.expanduser(out))
    if folder.exists() and not folder.is_dir():
        raise ArgumentError(f"out must be a folder: {str(out)!r} is a file; choose another name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            f"out must be a folder that can be created: {str(out)!r}: {error.strerror}; choose another"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ArgumentError(f"out must be writable: no permission to write to {str(out)!r}; choose another")
    return folder


# Distribution of blocks


class Group:
    """The processes of one survey, on one or several machines."""

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self.store: Store | None = store
        self.rank, self.world = rank, world

    def tell(self, message: str) -> None:
        """Report to other ranks that the survey has begun, or why it could not (rank 0)."""
        assert self.store is not None
        self.store.set(READY, message)

    def hear(self) -> None:
        """Wait until rank 0 has begun the survey."""
        assert self.store is not None
        end = monotonic() + BEGIN_TIMEOUT
        while not self.store.check([READY]):
            if monotonic() > end:
                raise ArgumentError(
                    f"rank 0 must start the survey: no message from it in {BEGIN_TIMEOUT:.0f} s; "
                    "check its output"
                )
            sleep(POLL)
        message = self.store.get(READY).decode()
        if message:
            raise ArgumentError(f"rank 0 must start the survey: it failed: {message}")

    def next(self) -> int | None:
        """Return the next block that no process has taken; None if the store is lost."""
        if self.store is None:
            return None
        try:
            return int(self.store.add(NEXT, 1)) - 1
        except RuntimeError as error:  # the store is lost
            self.store = None
            text = f"rank {self.rank} continues without the store, which is lost: {first_line(error)}"
            sys.stderr.write(f"survey: {text}\n")
            return None


def group_here(timeout: float = 60.0) -> Group | None:
    """Return the processes that torchrun started with this one; None if it is alone."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world < 2 or "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        return None
    from torch.distributed.rendezvous import rendezvous

    rank = int(os.environ["RANK"])
    try:
        store, rank, world = next(rendezvous("env://", rank, world, timeout=timedelta(seconds=timeout)))
    except (RuntimeError, ValueError, OSError) as error:
        raise ArgumentError(
            f"processes must be able to connect: rank {rank} of {world} cannot connect to "
            f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '')} ({first_line(error)}); use "
            "torchrun"
        ) from error
    return Group(store, rank, world)


def blocks(count: int, shards: Shards, group: Group | None, patience: float = PATIENCE) -> Iterator[int]:
    """Yield the blocks that this process is to measure; end when all are finished.

    Args:
        count: how many there are.
        patience: seconds without a new block until a worker is considered lost.
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
    last_count, since = -1, monotonic()
    while True:
        finished = shards.finished()
        missing = [index for index in range(count) if index not in finished]
        if not missing:
            return
        if len(finished) != last_count:
            last_count, since = len(finished), monotonic()
        if group.store is None or monotonic() - since > max(patience, TIMES * longest):
            yield missing[group.rank * len(missing) // group.world]
            since = monotonic()
        else:
            with suppress(InterruptedError):
                sleep(POLL)


class Worker:
    """Measures blocks and writes them."""

    def __init__(self, trained: Pretrained, plan: Plan, shards: Shards, options: Options) -> None:
        self.measure, self.shards = Measure(trained, max_tokens=options.max_tokens), shards
        self.texts = Texts(plan, options.field)

    def block(self, number: int, tell: Callable[[int], object] = lambda count: None) -> None:
        """Measure all documents of a block; `tell` is called with the number that is done."""
        rows = Rows()
        for document in self.texts.block(number):
            self.measure.add(document, rows)
            tell(len(rows.documents))
        self.shards.write(number, rows)

    def retry(self, number: int) -> None:
        """Measure again the documents of a block whose failure may have passed."""
        before = self.shards.rows(number)
        passed = {row["position"]: row for row in before.documents if row["failure"] != RETRY}
        rows = Rows()
        for document in self.texts.block(number):
            if document.position in passed:
                rows.documents.append(passed[document.position])
                rows.heads += [row for row in before.heads if row["position"] == document.position]
            else:
                self.measure.add(document, rows)
        self.shards.write(number, rows)


class _Actor(Worker):
    """A worker of Ray, which loads the model once."""

    def __init__(
        self, model: str | os.PathLike[str] | Pretrained | None, plan: Plan, shards: Shards, options: Options
    ) -> None:
        torch.set_num_threads(options.threads)
        trained = model if isinstance(model, Pretrained) else load(model)
        trained.model.eval()
        super().__init__(trained, plan, shards, options)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Measure the blocks of a batch; return how many documents each has."""
        numbers = [int(number) for number in batch["block"]]
        for number in numbers:
            if not self.shards.has(number):
                self.block(number)
        return {"documents": [self.texts.plan.in_block(number) for number in numbers]}


def measured_by_ray(
    plan: Plan,
    shards: Shards,
    model: str | os.PathLike[str] | Pretrained | None,
    options: Options,
    workers: int | None,
    tell: Callable[[int, int], None],
) -> None:
    """Measure all blocks that are not finished.

    Args:
        model: a name, and then each worker loads it; or the model itself, and then it is sent to them.
        workers: how many; None: as many as the cluster has processors.
    """
    with needed("ray", "engine='ray' needs ray"):
        import ray
        import ray.data
    is_ours = not ray.is_initialized()
    if is_ours:
        ray.init(log_to_driver=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False  # a progress bar is shown already
    try:
        resolved = Shards(shards.folder.resolve(), by_number=shards.by_number)
        remaining = [number for number in range(len(plan)) if not resolved.has(number)]
        done = plan.documents - sum(map(plan.in_block, remaining))
        tell(done, plan.documents)
        if not remaining:
            return
        count = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        results = ray.data.from_items([{"block": number} for number in remaining]).map_batches(
            _Actor,
            fn_constructor_args=(model, plan, resolved, options),
            batch_size=1,
            num_cpus=1,
            compute=ray.data.ActorPoolStrategy(size=min(count, len(remaining))),
        )
        for row in results.iter_rows():
            done += int(row["documents"])
            tell(done, plan.documents)
    finally:
        if is_ours:
            ray.shutdown()
