"""The documents of a corpus: a plan of where they are, made once, and their texts, which are read when
needed.

    a text file (.txt, .text, .md)        one document          "notes/a.txt"
    a line of JSON (.jsonl, .ndjson)      the string in a field "mail.jsonl:17", lines as editors count them
    a row of Parquet (.parquet)           the string in a field "books.parquet:0", rows as data frames do

The files of a folder and its subfolders are read in the order of their paths. Hidden files are left out;
files of other kinds are left out and counted. Blank lines of JSON are skipped. A line that is not JSON, or
bytes that are not UTF-8, make a document with an error. A file or folder that cannot be read is one document
with an error, since the number of documents in it is unknown.

The plan of a corpus is a table of pieces: up to `PIECE` documents of one file, where they are, and a hash of
their bytes. Only the texts of one piece, or of one row group, are in memory at a time. A piece that has
changed since then raises, since a survey is of one corpus.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ArgumentError, needed

if TYPE_CHECKING:
    import pyarrow

ENDINGS = {
    ".txt": "text", ".text": "text", ".md": "text", ".jsonl": "json", ".ndjson": "json",
    ".parquet": "parquet",
}  # fmt: skip
PIECE = 16  # documents
PIECE_BYTES = 2**23
LONGEST = 2**26  # bytes of a document
PIECES = 2**14  # in one batch of the table
BLOCKS = 64  # minimal number in a corpus, so that processes end at about the same time
LARGEST_BLOCK = 256  # documents
NAMED = 5  # names of files of other kinds that are recorded

# What failed: a document for good, a document whose failure may pass, a file or a folder of unknown content.
FOR_GOOD, RETRY, FILE, FOLDER = "document", "retry", "file", "folder"


def arrow() -> Any:
    """Import pyarrow, with its module for Parquet, and return it."""
    with needed("pyarrow", "a survey needs pyarrow"):
        import pyarrow
        import pyarrow.parquet
    return pyarrow


class Document(NamedTuple):
    """One document: its text, or why there is none."""

    name: str  # "mail.jsonl:17"
    path: str  # below the corpus
    number: int | None  # of its line, from 1, or row, from 0; None: the whole file
    position: int  # in the corpus, from 0
    text: str | None
    error: str | None = None
    failure: str = FOR_GOOD  # what failed, if there is an error


@dataclass(frozen=True)
class Piece:
    """Consecutive documents of one file.

    first: the number of the first line, from 1, or row, from 0.
    start, stop: in bytes; of Parquet, the whole file.
    digest: of these bytes.
    error: of a file or folder (`kind`) that could not be read, why.
    """

    path: str
    kind: str
    first: int
    count: int
    start: int
    stop: int
    digest: str
    error: str | None = None


COLUMNS = {name: "string" if "str" in kind else "int64" for name, kind in Piece.__annotations__.items()}


@dataclass(frozen=True)
class LeftOut:
    """Files of other kinds: how many, and the names of the first."""

    count: int = 0
    first: list[str] = field(default_factory=list)


NOTHING = LeftOut()


class Plan:
    """Where the documents of a corpus are: pieces of files, grouped into blocks that are measured as one.

    Args:
        root: the folder that paths are below.
        pieces: a table, a column per field of `Piece`.
        block: documents in a block, about; None: a 64th of the corpus, 16 to 256.
        left_out: files of other kinds.

    Attributes:
        lost: files and folders that could not be read, and why.
    """

    def __init__(
        self, root: Path, pieces: pyarrow.Table, *, block: int | None = None, left_out: LeftOut = NOTHING
    ) -> None:
        self.root, self.pieces, self.left_out = root, pieces, left_out
        counts = pieces.column("count").to_pylist()
        self.documents = sum(counts)
        self.block = block or max(PIECE, min(LARGEST_BLOCK, self.documents // BLOCKS))
        self._before: list[int] = []  # documents before each piece
        self._starts: list[int] = []  # the first piece of each block
        before, last = 0, -1
        for at, count in enumerate(counts):
            if before // self.block > last:
                last = before // self.block
                self._starts.append(at)
            self._before.append(before)
            before += count

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._starts)

    def in_block(self, number: int) -> int:
        """Return the number of documents in a block."""
        end = self._before[self._starts[number + 1]] if number + 1 < len(self) else self.documents
        return end - self._before[self._starts[number]]

    def block_of(self, position: int) -> int:
        """Return the number of the block that contains a document."""
        return bisect_right(self._starts, position, key=self._before.__getitem__) - 1

    def pieces_of(self, number: int) -> Iterator[tuple[int, Piece]]:
        """Yield each piece of a block with the number of documents before it."""
        start = self._starts[number]
        stop = self._starts[number + 1] if number + 1 < len(self) else len(self._before)
        rows = self.pieces.slice(start, stop - start).to_pylist()
        for before, row in zip(self._before[start:stop], rows, strict=True):
            yield before, Piece(**row)

    @property
    def digest(self) -> str:
        """A hash of the names, places and bytes of all documents."""
        hashed = hashlib.blake2b(digest_size=16)
        for batch in self.pieces.to_batches(max_chunksize=2**14):
            hashed.update(json.dumps(batch.to_pylist(), sort_keys=True).encode())
        return hashed.hexdigest()

    def difference(self, other: Plan) -> str | None:
        """Describe the first file that differs in another plan; None if none does.

        Files that could not be read in this plan may have any content in the other.
        """
        files, other_files = self._files(), other._files()
        lost, other_lost = self.lost, other.lost
        for path, digest in files.items():
            if path in lost:
                continue
            if path in other_lost:
                return f"{path!r} cannot be read any more ({other_lost[path]})"
            if path not in other_files:
                return f"{path!r} is missing"
            if other_files[path] != digest:
                return f"{path!r} has changed"
        for path in other_files:
            inside = any(
                _shown_path(path).startswith(_shown_path(folder)) for folder in lost if folder[-1] == "/"
            )
            if path not in files and not inside:
                return f"{path!r} is new"
        return None

    def changed_blocks(self, other: Plan) -> Iterator[int]:
        """Yield the numbers of the blocks whose documents differ in another plan."""
        for number in range(len(self)):
            if number >= len(other) or list(self.pieces_of(number)) != list(other.pieces_of(number)):
                yield number

    @property
    def lost(self) -> dict[str, str]:
        """Files and folders that could not be read, and why."""
        errors = self.pieces.filter(self.pieces.column("error").is_valid())
        return dict(zip(errors.column("path").to_pylist(), errors.column("error").to_pylist(), strict=True))

    def _files(self) -> dict[str, list[Any]]:
        """Return the pieces of every file, by path."""
        files: dict[str, list[Any]] = {}
        for batch in self.pieces.to_batches(max_chunksize=2**14):
            for row in batch.to_pylist():
                files.setdefault(row["path"], []).append((row["first"], row["count"], row["digest"]))
        return files

    # Making and reading plans

    @classmethod
    def of(
        cls,
        corpus: str | os.PathLike[str],
        *,
        field: str = "text",
        block: int | None = None,
        besides: Path | None = None,
    ) -> Plan:
        """Look through a file, or every file of a folder, once.

        Args:
            field: the column of texts, for Parquet.
            besides: a folder that is left out, for the results.
        """
        pyarrow, place = arrow(), Path(os.path.expanduser(corpus))
        if not place.exists():
            raise ArgumentError(
                f"corpus must be a file or folder that exists: got {str(corpus)!r}; check the name"
            )
        root = (place if place.is_dir() else place.parent).resolve()
        place = place.resolve() if place.is_dir() else root / place.name
        files, left_out = _files_of(place, besides)
        batches, rows, count = [], [], 0
        lost: list[Piece] = []
        for file, reason in files:
            for piece in _pieces_of(root, file, reason, field, min(PIECE, block or PIECE)):
                rows.append(vars(piece))
                if piece.error is None:
                    count += piece.count
                else:
                    lost = lost or [piece]
                if len(rows) == PIECES:
                    batches.append(table_of(rows, COLUMNS))
                    rows = []
        if not count and lost:
            raise ArgumentError(
                f"corpus must hold a document that can be read: {_shown_path(lost[0].path)!r}: "
                f"{lost[0].error}; check the file"
            )
        if not count:
            kinds, total = ", ".join(ENDINGS), left_out.count + len(files)
            raise ArgumentError(
                f"corpus must hold a document: found 0 in {str(corpus)!r}, among {total} "
                f"file{'' if total == 1 else 's'}; the endings that are read are {kinds}"
            )
        table = pyarrow.concat_tables([*batches, table_of(rows, COLUMNS)])
        return cls(root, table, block=block, left_out=left_out)

    @classmethod
    def read(cls, file: Path, root: Path, block: int) -> Plan:
        """Read a plan that was saved, with the block size it was made with."""
        return cls(root, arrow().parquet.read_table(file), block=block)


def table_of(rows: list[dict[str, Any]], columns: Mapping[str, str]) -> pyarrow.Table:
    """Return rows as a pyarrow table. columns: name -> type, as pyarrow calls it."""
    pyarrow = arrow()
    fields = [(name, pyarrow.type_for_alias(kind)) for name, kind in columns.items()]
    return pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(fields))


def shown(path: str) -> str:
    """Return a path or a word with the characters that UTF-8 cannot hold written as escapes."""
    return path.encode("utf-8", "backslashreplace").decode()


def _files_of(place: Path, besides: Path | None) -> tuple[list[tuple[Path, str | None]], LeftOut]:
    """Return the files of known kinds in order, and the files of other kinds.

    A file or folder that cannot be read comes with the reason.
    """
    if place.is_file():
        if place.suffix.lower() not in ENDINGS:
            raise ArgumentError(
                f"corpus must end in {', '.join(ENDINGS)}: got {str(place)!r}; rename it, or give a folder"
            )
        return [(place, None)], NOTHING
    files: list[tuple[Path, str | None]] = []
    other_names: list[str] = []
    count = 0
    excluded = None if besides is None else besides.resolve()

    def unreadable(error: OSError) -> None:
        files.append((Path(os.fsdecode(error.filename)), _reason(error)))

    for folder, folders, names in os.walk(place, onerror=unreadable, followlinks=True):
        current = Path(folder)
        ancestors = {current.resolve(), *current.resolve().parents}  # a link to one of these is a cycle
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and (current / name).resolve() not in {*ancestors, excluded}
        ]
        if current.resolve() == excluded:
            raise ArgumentError(
                f"out must not be the corpus itself: got {str(place)!r} for both; choose another folder"
            )
        for name in names:
            if name.startswith("."):
                continue
            if os.path.splitext(name)[1].lower() in ENDINGS:
                files.append((current / name, _why_no_file(current / name)))
            else:
                count += 1
                other_names = sorted([*other_names, shown((current / name).relative_to(place).as_posix())])[
                    :NAMED
                ]
    in_order = sorted(files, key=lambda file: os.fsencode(file[0].relative_to(place).as_posix()))
    return in_order, LeftOut(count, other_names)


def _why_no_file(path: Path) -> str | None:
    """Return why a path cannot be opened (a broken link, a pipe), or None if it can."""
    try:
        return None if stat.S_ISREG(path.stat().st_mode) else "it is not a regular file"
    except OSError as error:
        return _reason(error)


def _reason(error: Exception) -> str:
    """Return the reason of an error as text."""
    return (error.strerror if isinstance(error, OSError) else None) or first_line(error)


# Finding documents


class _Unreadable(Exception):
    """A file cannot be read; the message says why."""


def _pieces_of(root: Path, file: Path, reason: str | None, field: str, most: int) -> Iterator[Piece]:
    """Yield the pieces of a file. If it cannot be read, or a `reason` is given, one piece holds the error."""
    kind = ENDINGS.get(file.suffix.lower(), "")
    path = os.fsencode(file.relative_to(root).as_posix()).decode("utf-8", "surrogateescape")
    try:
        if reason is not None:
            raise _Unreadable(reason)
        if kind == "json":
            yield from _pieces_of_lines(file, path, most)
        elif kind == "text":
            yield Piece(_encoded(path), kind, 0, 1, 0, file.stat().st_size, _digest(file))
        else:
            yield from _pieces_of_row_groups(file, path, field, most)
    except (OSError, _Unreadable) as error:
        is_folder = reason is not None and os.path.isdir(file)
        path, kind = (f"{path}/", FOLDER) if is_folder else (path, FILE)
        yield Piece(_encoded(path), kind, 0, 1, 0, 0, "", shown(_reason(error)))


MARK = "\x01"


def _encoded(path: str) -> str:
    """Encode a path for the table: one with undecodable bytes as Latin-1 behind MARK."""
    is_plain = path.isprintable() and path == shown(path)
    return path if is_plain else MARK + os.fsencode(path).decode("latin-1")


def _decoded(path: str) -> str:
    """Decode a path of the table."""
    return os.fsdecode(path[1:].encode("latin-1")) if path.startswith(MARK) else path


def _shown_path(path: str) -> str:
    """Return a path of the table for output."""
    return shown(_decoded(path))


def _digest(file: Path) -> str:
    """Return a hash of the bytes of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _pieces_of_lines(file: Path, path: str, most: int) -> Iterator[Piece]:
    """Yield the pieces of a file of lines. A line that is too long is a piece of its own, not read whole."""
    first = number = 1
    count = start = at = 0
    hashed = hashlib.blake2b(digest_size=16)

    def piece() -> Piece:
        return Piece(_encoded(path), "json", first, count, start, at, hashed.hexdigest())

    with file.open("rb") as lines:
        while line := lines.readline(LONGEST):
            is_long = len(line) == LONGEST and not line.endswith(b"\n")
            if is_long and count:  # the lines before are a piece
                yield piece()
                first, count, start, hashed = number, 0, at, hashlib.blake2b(digest_size=16)
            count += is_long or not line.isspace()
            while True:
                at += len(line)
                hashed.update(line)
                if len(line) < LONGEST or line.endswith(b"\n"):
                    break
                line = lines.readline(LONGEST)
            number += 1
            if count == most or at - start >= PIECE_BYTES or is_long:
                if count:
                    yield piece()
                first, count, start, hashed = number, 0, at, hashlib.blake2b(digest_size=16)
    if count:
        yield piece()


def _pieces_of_row_groups(file: Path, path: str, field: str, most: int) -> Iterator[Piece]:
    """Yield the pieces of a Parquet file, each within one row group."""
    size, digest = file.stat().st_size, _digest(file)
    try:
        with arrow().parquet.ParquetFile(file) as opened:
            names = opened.schema_arrow.names
            counts = [opened.metadata.row_group(at).num_rows for at in range(opened.num_row_groups)]
    except arrow().lib.ArrowException as error:
        raise _Unreadable(f"it is not a Parquet file ({first_line(error)})") from error
    if field not in names:
        raise _Unreadable(f"it has no column {field!r}; its columns are {', '.join(names)}")
    before = 0
    for rows in counts:
        for first in range(0, rows, most):
            count = min(most, rows - first)
            yield Piece(_encoded(path), "parquet", before + first, count, 0, size, digest)
        before += rows


# Reading texts


Read = tuple[int | None, str | None, str | None]  # number of the line or row, text, or why there is none


class Texts:
    """Reads the texts of a plan, a block at a time; the last row group of Parquet stays in memory."""

    def __init__(self, plan: Plan, field: str = "text") -> None:
        self.plan, self.field = plan, field
        self._row_group: dict[str, Any] = {}  # the row group that was read last

    def block(self, number: int) -> Iterator[Document]:
        """Yield the documents of a block; those of a file that fails twice have an error that may pass."""
        for before, piece in self.plan.pieces_of(number):
            if piece.error is not None:
                path = _shown_path(piece.path)
                yield Document(path, path, None, before, None, piece.error, piece.kind)
                continue
            for _ in range(2):
                try:
                    documents = self._read(before, piece)
                    break
                except OSError as error:
                    documents = _unread_documents(before, piece, _reason(error))
            yield from documents

    def _read(self, before: int, piece: Piece) -> list[Document]:
        """Return the documents of a piece."""
        file, path = self.plan.root / _decoded(piece.path), _shown_path(piece.path)
        read = {"text": self._text, "json": self._json, "parquet": self._parquet}[piece.kind]
        try:
            return [
                Document(_document_name(path, number), path, number, position, text, error)
                for position, (number, text, error) in enumerate(read(file, path, piece), before)
            ]
        except FileNotFoundError as error:
            raise ArgumentError(
                f"corpus must not change during a survey: {path!r} cannot be read "
                f"({error.strerror}); restore it, and run the same command again"
            ) from error

    def _text(self, file: Path, path: str, piece: Piece) -> Iterator[Read]:
        """Yield the text of a text file."""
        if piece.stop > LONGEST:
            yield None, None, _too_long_message(piece.stop)
            return
        data = _read_bytes(file, path, piece)
        if file.stat().st_size != piece.stop:
            raise _changed_error(path)
        try:
            yield None, data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n"), None
        except UnicodeDecodeError as error:
            yield None, None, f"text must be UTF-8: invalid byte at position {error.start}"

    def _json(self, file: Path, path: str, piece: Piece) -> Iterator[Read]:
        """Yield the texts of lines of JSON."""
        size = piece.stop - piece.start
        if size > LONGEST + PIECE_BYTES:
            yield piece.first, None, _too_long_message(size)
            return
        for number, line in enumerate(_read_bytes(file, path, piece).split(b"\n"), piece.first):
            if not line or line.isspace():
                continue
            try:
                yield number, _text_of_line(line, self.field), None
            except ValueError as error:  # of JSON or of UTF-8
                yield number, None, str(error)
            except RecursionError:
                yield number, None, "line must be JSON: it is nested too deeply"

    def _parquet(self, file: Path, path: str, piece: Piece) -> Iterator[Read]:
        """Yield the texts of rows of Parquet."""
        status, group = file.stat(), self._row_group
        state = (file, status.st_size, status.st_mtime_ns)
        if group.get("checked") != state:  # the full file, once
            if status.st_size != piece.stop or _digest(file) != piece.digest:
                raise _changed_error(path)
            group["checked"] = state
        if group.get("file") != file or not group["from"] <= piece.first < group["to"]:
            try:
                group.update(_read_row_group(file, path, piece, self.field))
            except (OSError, arrow().lib.ArrowException) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise  # an error of the disk; Arrow's errors have no errno, and mean wrong bytes
                for number in range(piece.first, piece.first + piece.count):
                    yield number, None, f"row group must be readable: {first_line(error)}"
                return
        values = group["column"].slice(piece.first - group["from"], piece.count).to_pylist()
        for number, value in enumerate(values, piece.first):
            if isinstance(value, str):
                yield number, value, None
            else:
                yield number, None, f"field {self.field!r} must be a string: got {_type_name(value)}"


def _unread_documents(before: int, piece: Piece, reason: str) -> list[Document]:
    """Return the documents of a piece that cannot be read now, each with an error that may pass."""
    path = _shown_path(piece.path)
    numbers = [None] if piece.kind == "text" else range(piece.first, piece.first + piece.count)
    return [
        Document(_document_name(path, number), path, None, position, None, reason, RETRY)
        for position, number in enumerate(numbers, before)
    ]


def _document_name(path: str, number: int | None) -> str:
    """Return the name of a document."""
    return path if number is None else f"{path}:{number}"


def _changed_error(path: str) -> ArgumentError:
    """Return the error for a file that has changed."""
    return ArgumentError(
        f"corpus must not change during a survey: {path!r} has changed; restore it, or start a new survey in "
        "another folder"
    )


def _read_bytes(file: Path, path: str, piece: Piece) -> bytes:
    """Return the bytes of a piece; raise `ArgumentError` if they have changed."""
    with file.open("rb") as opened:
        opened.seek(piece.start)
        data = opened.read(piece.stop - piece.start)
    if hashlib.blake2b(data, digest_size=16).hexdigest() != piece.digest:
        raise _changed_error(path)
    return data


def _text_of_line(line: bytes, field: str) -> str:
    """Return the text of a line of JSON; raise `ValueError` if it has none."""
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"line must be UTF-8: invalid byte at position {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"line must be JSON: {error.msg} at character {error.pos}") from error
    if not isinstance(value, dict):
        raise ValueError(f"line must be an object with a field {field!r}: got {_type_name(value)}")
    if field not in value:
        fields = ", ".join(map(repr, list(value)[:8]))
        raise ValueError(f"line must have a field {field!r}: got {fields or 'no fields'}"[:300])
    if not isinstance(value[field], str):
        raise ValueError(f"field {field!r} must be a string: got {_type_name(value[field])}")
    text: str = value[field]
    return text


def _read_row_group(file: Path, path: str, piece: Piece, field: str) -> dict[str, Any]:
    """Read the row group that holds a piece: its file, its first and last row, and the column of texts."""
    with arrow().parquet.ParquetFile(file) as opened:
        begin = 0
        for group in range(opened.num_row_groups):
            rows = opened.metadata.row_group(group).num_rows
            if begin <= piece.first < begin + rows:
                column = opened.read_row_group(group, columns=[field]).column(0)
                return {"file": file, "from": begin, "to": begin + rows, "column": column}
            begin += rows
    raise _changed_error(path)


def _type_name(value: object) -> str:
    """Return the type of a value as text."""
    return "null" if value is None else type(value).__name__


def _too_long_message(size: int) -> str:
    """Return the error message for a document that is too long."""
    return f"document must be at most {LONGEST} bytes: it has {size}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().partition("\n")[0]
