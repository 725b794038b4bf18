"""Find the files that a submission may read: its own, and of a shared folder only those it imports."""

from __future__ import annotations

import ast
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

from ...errors import ArgumentError
from ..source.likely_classes import candidates, package_root, source_of
from ..source.parsed import tree_of
from .template import import_roots

SKIPPED = frozenset(("__pycache__", "site-packages", "node_modules"))
SUBMISSION_BYTES = 32 * 2**20  # a notebook with pictures has a few
COPIED_BYTES, COPIED_FILES = 256 * 2**20, 2_000


@dataclass
class OwnFiles:
    """The files that one submission may read.

    Args:
        top: the folder from which its modules are imported, above its package if it is part of one.
        files: every file it may read, including itself.
        imported: files that its source imports, directly or not: all from a shared folder, and those that
            contain attention from its own.
        folder: the folder that belongs to its author; None if several submissions share it.
    """

    top: Path
    files: list[Path]
    imported: list[Path] = field(default_factory=list)
    folder: Path | None = None

    def copied_to(self, room: Path) -> list[str]:
        """Copy the files into an empty folder, each at its path below `top`.

        Returns:
            A sentence if some files were left out, else an empty list.
        """
        size = 0
        left_out = []
        for number, file in enumerate(self.files):
            size += file.lstat().st_size
            if number >= COPIED_FILES or size > COPIED_BYTES:
                left_out = self.files[number:]
                break
            _copy(file, room / file.relative_to(self.top))
        if not left_out:
            return []
        return [
            f"{len(left_out)} of the {len(self.files)} files in its folder were left out: more than "
            f"{COPIED_FILES} files or {COPIED_BYTES >> 20} MiB"
        ]


def _copy(file: Path, place: Path) -> None:
    """Copy a regular file; do nothing if it is not one, or cannot be read."""
    try:
        opened = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    with open(opened, "rb") as source:
        if stat.S_ISREG(os.fstat(source.fileno()).st_mode):
            place.parent.mkdir(parents=True, exist_ok=True)
            with open(place, "wb") as target:
                while piece := source.read(2**20):
                    target.write(piece)


def check_plain(path: Path) -> None:
    """Refuse what is not a regular file of a reasonable size, without reading it.

    Raises:
        ArgumentError: a symbolic link, a pipe, a device, or a file that is too large.
    """
    try:
        state = path.lstat()
    except OSError:  # reported when the file is read
        return
    if stat.S_ISLNK(state.st_mode):
        raise ArgumentError(f"file must not be a symbolic link: {path}; pass the file itself")
    if not stat.S_ISREG(state.st_mode):
        raise ArgumentError(
            f"file must be a regular file: {path} is a pipe, a device or a folder; name a file"
        )
    if state.st_size > SUBMISSION_BYTES:
        raise ArgumentError(
            f"file must be smaller than {SUBMISSION_BYTES >> 20} MiB: {path} has {state.st_size} bytes; "
            "clear its outputs"
        )


def own_files(submissions: Sequence[Path], folders: Sequence[Path]) -> dict[Path, OwnFiles]:
    """Return the files that each submission may read.

    If only one submission of a folder contains attention, the folder belongs to it. A folder below one of
    `folders`, such as the folder of a student, belongs to its submissions, but other submissions in it that
    contain attention are left out. A submission directly in one of `folders`, beside others, may read itself
    and the files that its source imports.

    Args:
        submissions: absolute paths of regular files.
        folders: absolute paths of folders that are checked as a whole.
    """
    sources = {path: _source(path) for path in submissions}
    tops = {path: _top(path, source) for path, source in sources.items()}
    imported = {path: imports_of(path, tops[path]) for path in submissions}
    attends = {path: _holds_attention(source) for path, source in sources.items()}
    above = {path: set(path.parents) for path in submissions}
    result = {}
    for path in submissions:
        home, beside = _home(path, tops[path]), sorted(imported[path])
        others = [each for each in submissions if each != path and attends[each] and home in above[each]]
        if others and not any(folder in home.parents for folder in folders):
            result[path] = OwnFiles(tops[path], [path, *beside], beside)
        else:
            apart = {path, *others, *beside}
            files = [path, *beside, *(each for each in _files_in(home) if each not in apart)]
            result[path] = OwnFiles(tops[path], files, [each for each in beside if each in others], home)
    return result


def _source(path: Path) -> str | None:
    try:
        return source_of(path)[0]
    except ArgumentError:
        return None


def _holds_attention(source: str | None) -> bool:
    """Return True if the source contains attention, or cannot be read."""
    return source is None or tree_of(source) is None or bool(candidates(source))


def _top(path: Path, source: str | None) -> Path:
    return package_root(path, source or "") or path.parent


def _home(path: Path, top: Path) -> Path:
    """Return the folder of the file, or the outermost package it is part of."""
    return path.parent if top == path.parent else top / path.relative_to(top).parts[0]


def _files_in(folder: Path) -> Iterator[Path]:
    """Yield the regular files of a folder at any depth, without hidden ones; no link is followed."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(each for each in folders if not each.startswith(".") and each not in SKIPPED)
        for name in sorted(files):
            path = Path(parent, name)
            if not name.startswith(".") and _is_plain(path):
                yield path


def _is_plain(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


# Imports
def imports_of(path: Path, top: Path) -> set[Path]:
    """Return the files at or below `top` that the source of a file imports, directly or not."""
    reached: set[Path] = set()
    waiting = [path]
    while waiting:
        file = waiting.pop()
        source = _source(file)
        tree = None if source is None else tree_of(source)
        for folder, parts in [] if tree is None else _imports(tree, file, top):
            for module in _modules(folder, parts):
                if module not in reached and module != path:
                    reached.add(module)
                    waiting.append(module)
        around = [folder / "__init__.py" for folder in file.parents if top in folder.parents]
        for package in around:  # these run before the modules in their packages
            if _is_plain(package) and package not in reached and package != path:
                reached.add(package)
                waiting.append(package)
    return reached


def _imports(tree: ast.Module, file: Path, top: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield for each import the folder in which it is searched, and the parts of its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if not _is_installed(alias.name.partition(".")[0]):
                    yield top, alias.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            folder = top
            if node.level:
                above = [file.parent, *file.parent.parents][node.level - 1 : node.level]
                if not above or not (above[0] == top or top in above[0].parents):
                    continue
                folder = above[0]
            parts = node.module.split(".") if node.module else []
            if not node.level and _is_installed(parts[0]):
                continue
            for alias in node.names:
                yield folder, [*parts, alias.name]


def _modules(folder: Path, parts: list[str]) -> Iterator[Path]:
    """Yield the files of a folder that run for `import a.b.c`."""
    for part in parts:
        module, package = folder / f"{part}.py", folder / part / "__init__.py"
        if _is_plain(package):
            yield package
        elif _is_plain(module):
            yield module
            return
        folder = folder / part


@cache
def _is_installed(name: str) -> bool:
    """Return True if a module of this name is installed: an import means that one, not a file beside it."""
    if name in sys.stdlib_module_names:
        return True
    spec = PathFinder.find_spec(name, import_roots())
    return spec is not None and spec.origin is not None
