"""Finished blocks in a folder: two Parquet files each, whole or not there, and the same whoever writes them.

    measures-000012.parquet      a row per document, layer and head
    documents-000012.parquet     a row per document; it comes last: where it is, the block is finished

A block with failures that may pass (memory, a disk) has other names until it is measured without one:
measures-000012.retry.parquet and documents-000012.retry.parquet.

A file is written beside its place under a hidden name, put on the disk, and then takes its name. What is in
it follows from the corpus, the model and the options alone: a block that is measured twice, by a worker that
was thought lost or in another run, is the same file once more. So nothing has to be agreed on or cleaned up.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING

from ..errors import ArgumentError
from ..whole_files import half_written
from .document_rows import Rows, statistics
from .documents import RETRY, arrow

if TYPE_CHECKING:
    import pyarrow

__all__ = ["DOCUMENTS", "MEASURES", "Shards", "bytes_of", "check_folder", "write_whole"]

DOCUMENTS, MEASURES = "documents", "measures"
FULL = {errno.ENOSPC, errno.EDQUOT}
ENDING = ".part"


class Shards:
    """The finished blocks of a folder.

    Args:
        by_number: whether layers go by numbers, or by paths; the same for all blocks.
    """

    def __init__(self, folder: Path, *, by_number: bool = True) -> None:
        self.folder, self.by_number = folder, by_number

    def place(self, table: str, number: int, *, retry: bool = False) -> Path:
        """Where a block's rows of a table are; `retry`: of one with failures that may pass."""
        return self.folder / f"{table}-{number:06}{'.retry' if retry else ''}.parquet"

    def has(self, number: int) -> bool:
        """Whether a block was measured, with or without failures that may pass."""
        return any(self.place(DOCUMENTS, number, retry=retry).exists() for retry in (False, True))

    def finished(self) -> set[int]:
        """The numbers of all blocks that were measured."""
        return self._numbers(".parquet") | self._numbers(".retry.parquet")

    def to_retry(self) -> set[int]:
        """The numbers of those with failures that may pass."""
        return self._numbers(".retry.parquet") - self._numbers(".parquet")

    def _numbers(self, ending: str) -> set[int]:
        numbers = (
            entry.name.removeprefix(f"{DOCUMENTS}-").removesuffix(ending)
            for entry in os.scandir(self.folder)
            if entry.name.startswith(f"{DOCUMENTS}-") and entry.name.endswith(ending)
        )
        return {int(number) for number in numbers if number.isdecimal()}

    def write(self, number: int, rows: Rows) -> None:
        """A block that was measured. With failures that may pass it never takes the place of one without.

        Raises:
            ArgumentError: it cannot be written; what was finished before stays.
        """
        documents, measures = _tables(rows, self.by_number)
        retry = any(row["failure"] == RETRY for row in rows.documents)
        if retry and self.place(DOCUMENTS, number).exists():
            return
        write_whole(self.place(MEASURES, number, retry=retry), bytes_of(measures))
        write_whole(self.place(DOCUMENTS, number, retry=retry), bytes_of(documents))
        if not retry:
            self._forget(number, retry=True)

    def drop(self, number: int) -> None:
        """Take a block back: it has to be measured again."""
        self._forget(number, retry=False)
        self._forget(number, retry=True)

    def _forget(self, number: int, *, retry: bool) -> None:
        for table in (DOCUMENTS, MEASURES):  # in this order: what has no documents is not finished
            self.place(table, number, retry=retry).unlink(missing_ok=True)

    def read(self, table: str, number: int, columns: list[str] | None = None) -> pyarrow.Table:
        """The rows of a finished block.

        Raises:
            ArgumentError: a file that cannot be read.
        """
        place = self.place(table, number, retry=not self.place(DOCUMENTS, number).exists())
        try:
            return arrow().parquet.ParquetFile(place).read(columns=columns)
        except (OSError, arrow().lib.ArrowException) as error:
            said = str(error).strip().partition("\n")[0]
            raise ArgumentError(
                f"survey must have all its files: {place.name} cannot be read ({said}); delete "
                f"{DOCUMENTS}-{number:06}.parquet and run the survey again"
            ) from error

    def rows(self, number: int) -> Rows:
        """A block that was measured, as it was written."""
        return Rows(*(self.read(table, number).to_pylist() for table in (DOCUMENTS, MEASURES)))

    def sweep(self) -> None:
        """Let go of halves of files whose process is no more, and of failures that passed."""
        for passed in self._numbers(".retry.parquet") - self.to_retry():
            self._forget(passed, retry=True)
        for half in self.folder.glob(f".*{ENDING}"):
            host, _, process = half.name.removesuffix(ENDING).rpartition("@")[2].partition("+")
            number = process.partition("-")[0]
            if host == _host() and number.isdecimal() and not _is_alive(int(number)):
                half.unlink(missing_ok=True)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.finished()))


def _host() -> str:
    return "".join(letter if letter.isalnum() else "." for letter in socket.gethostname())


def _is_alive(process: int) -> bool:
    if process == os.getpid():
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


# Tables


def _tables(rows: Rows, by_number: bool) -> tuple[pyarrow.Table, pyarrow.Table]:
    pa = arrow()
    whole, small, letters, number = pa.int64(), pa.int32(), pa.string(), pa.float32()
    documents = pa.schema(
        [
            ("document", letters), ("path", letters), ("number", whole), ("position", whole),
            ("characters", whole), ("tokens", whole), ("found", whole), ("digest", letters),
            ("error", letters), ("failure", letters),
        ]
    )  # fmt: skip
    measures = pa.schema(
        [("document", letters), ("position", whole)]
        + [("layer", small if by_number else letters), ("head", small)]
        + [("label", letters), ("score", number)]
        + [(name, number) for name in statistics()]
        + [("place", small), ("token", letters), ("moved", number)]
        + [("key", small), ("key_token", letters), ("weight", number)]
    )
    heads = rows.heads if by_number else [row | {"layer": str(row["layer"])} for row in rows.heads]
    return (
        pa.Table.from_pylist(rows.documents, schema=documents),
        pa.Table.from_pylist(heads, schema=measures),
    )


def bytes_of(table: pyarrow.Table) -> bytes:
    """A Parquet file, as bytes: the same for the same table."""
    pa = arrow()
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(table, sink, compression="zstd", compression_level=3)
    held: bytes = sink.getvalue().to_pybytes()
    return held


# Files


def write_whole(place: Path, data: bytes, *, anew: bool = False) -> bool:
    """Write a file: all of it, on the disk, under its name; or nothing. False: it was there, and is left.

    Args:
        anew: only where there is none, whoever else tries the same.

    Raises:
        ArgumentError: there is no room, or it cannot be written.
    """
    half = place.with_name(f".{place.name}@{_host()}+{os.getpid()}-{get_ident()}{ENDING}")
    half_written.add(half)
    try:
        with half.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if anew:
            try:
                os.link(half, place)
            except FileExistsError:
                return False
            except OSError:  # a file system without links
                if place.exists():
                    return False
                half.replace(place)
        else:
            half.replace(place)
        _settle(place.parent)
        return True
    except OSError as error:
        said = error.strerror or str(error)
        if error.errno in FULL:
            raise ArgumentError(
                f"out must have room: {str(place.parent)!r}: {said}; what is finished stays: make room, and "
                "run the same again"
            ) from error
        raise ArgumentError(
            f"out must be writable: {str(place)!r}: {said}; what is finished stays: see to it, and run the "
            "same again"
        ) from error
    finally:
        with suppress(OSError):
            half.unlink(missing_ok=True)
        half_written.discard(half)


def _settle(folder: Path) -> None:
    """See to it that a new name is on the disk, too, where a system can."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def check_folder(out: str | os.PathLike[str]) -> Path:
    """The folder, made if need be.

    Raises:
        ArgumentError: a file of that name; a folder that cannot be made or written to.
    """
    folder = Path(os.path.expanduser(out))
    if folder.exists() and not folder.is_dir():
        raise ArgumentError(f"out must be a folder: {str(out)!r} is a file; choose another name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            f"out must be a folder that can be made: {str(out)!r}: {error.strerror}; choose another"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ArgumentError(f"out must be writable: nothing can be put into {str(out)!r}; choose another")
    return folder
