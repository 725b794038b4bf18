"""The floors: who may import whom, read from the source; and whether that reading notices what it should."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import headwise

PACKAGE = Path(headwise.__file__).resolve().parent

# The floors, from the top: a room imports from its own floor and from those before it.
FLOORS = (
    (
        "errors",
        "budget",
        "whole_files",
        "indexing",
        "tensor_stand_in",
        "facts",
        "mask_rules",
        "masks",
        "scoring",
        "foreign_masks",
    ),
    ("reference",),
    ("engines",),
    ("arguments", "map", "functional", "pytrees"),
    ("nn",),
    ("heads",),
    ("models",),
    ("listeners",),
    ("show",),
    ("examiner",),
    ("cli", "doctor", "testing", "__main__"),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# Truth judges the fast code, so the fast code must not know it.
ONLY_FOR = {"reference": {"examiner"}}

# Imports downwards, each inside one function: (file, function, room).
DOWNWARD = {
    ("map.py", "AttentionMap.plot", "show"),
    ("heads/collection.py", "Heads.table", "show"),
    ("heads/collection.py", "Heads.plot", "show"),
    ("listeners/robustness.py", "Robustness.plot", "show"),
}

WHOLE_PACKAGE = ""  # stands for `import headwise`, which brings every room along


@dataclass(frozen=True)
class Import:
    """One import of a room of the package: where it stands and what it asks for."""

    file: str  # relative to the package
    line: int
    function: str | None  # the function it is inside, None at the top of the file
    room: str

    @property
    def at(self) -> tuple[str, str | None, str]:
        return self.file, self.function, self.room


def rooms_of(package: Path) -> list[str]:
    """Files and folders with Python in them at the top of the package."""
    files = [path.stem for path in package.glob("*.py") if path.stem != "__init__"]
    folders = [path.name for path in package.iterdir() if path.is_dir() and any(path.rglob("*.py"))]
    return sorted(files + folders)


def imports_of(package: Path) -> Iterator[Import]:
    """Every import of one room by another or by itself; the package's own `__init__` is exempt."""
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package)
        if file != Path("__init__.py"):
            for line, function, target in _targets(ast.parse(path.read_text("utf-8")), file):
                head, *rest = target.split(".")
                if head == "headwise":
                    yield Import(file.as_posix(), line, function, rest[0] if rest else WHOLE_PACKAGE)


def _targets(tree: ast.Module, file: Path) -> Iterator[tuple[int, str | None, str]]:
    """(line, function, dotted name) of every import in a file, relative ones made absolute."""
    here = ["headwise", *file.parent.parts]

    def absolute(level: int, name: str | None) -> str:
        base = here[: len(here) - level + 1] if level else []
        return ".".join([*base, *([name] if name else [])])

    def visit(node: ast.AST, scope: tuple[str, ...], inside: bool) -> Iterator[tuple[int, str | None, str]]:
        for child in ast.iter_child_nodes(node):
            function = ".".join(scope) if inside else None
            match child:
                case ast.Import(names=names):
                    for alias in names:
                        yield child.lineno, function, alias.name
                case ast.ImportFrom(level=level, module=module, names=names):
                    base = absolute(level, module)
                    for alias in names:
                        # From the package itself, a name is a room or else something every room is behind.
                        known = base == "headwise" and alias.name in FLOOR_OF
                        yield child.lineno, function, f"{base}.{alias.name}" if known else base
                case ast.Call(
                    func=ast.Name(id=called) | ast.Attribute(attr=called), args=[ast.Constant(str(name)), *_]
                ):
                    if called in ("import_module", "__import__"):
                        level = len(name) - len(name.lstrip("."))
                        yield child.lineno, function, absolute(level, name.lstrip("."))
            named = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            deeper = (*scope, child.name) if named else scope
            yield from visit(child, deeper, inside or (named and not isinstance(child, ast.ClassDef)))

    return visit(tree, (), False)


def violations(package: Path) -> list[str]:
    """What breaks the floors, a sentence each."""
    found = [
        f"{room}: this room is on no floor; place it in FLOORS here and in DESIGN.md"
        for room in rooms_of(package)
        if room not in FLOOR_OF
    ]
    for each in imports_of(package):
        own = Path(each.file).with_suffix("").parts[0]
        where = f"{each.file}:{each.line}"
        if each.room == own or own not in FLOOR_OF or (each.function and each.at in DOWNWARD):
            continue
        if each.room == WHOLE_PACKAGE:
            if FLOOR_OF[own] != len(FLOORS) - 1:
                found.append(f"{where}: {own} imports the whole package; name the room it needs")
        elif each.room not in FLOOR_OF:
            found.append(f"{where}: {own} imports {each.room}, which is on no floor")
        elif FLOOR_OF[each.room] > FLOOR_OF[own]:
            found.append(f"{where}: {own} imports {each.room}, which is below it")
        elif own not in ONLY_FOR.get(each.room, {own}):
            found.append(
                f"{where}: {own} imports {each.room}, which is only for {', '.join(ONLY_FOR[each.room])}"
            )
    return found


def test_rooms_import_only_their_own_floor_and_those_above() -> None:
    assert violations(PACKAGE) == []


def test_imports_downwards_that_are_allowed_are_still_there() -> None:
    assert {each.at for each in imports_of(PACKAGE)} >= DOWNWARD


PLANTED = {
    "a room below": ("masks.py", "from .map import AttentionMap", "masks imports map, which is below"),
    "by its full name": ("masks.py", "import headwise.show.page", "masks imports show, which is below"),
    "as a name of the package": (
        "engines/walk.py",
        "from .. import nn",
        "engines imports nn, which is below",
    ),
    "in a function": ("nn/rope.py", "def f():\n    from ..show import x", "nn imports show, which is below"),
    "for its types": (
        "nn/rope.py",
        "if TYPES:\n    from ..listeners import x",
        "nn imports listeners, which is below",
    ),
    "as a string": (
        "nn/rope.py",
        "import_module('..listeners', 'headwise.nn')",
        "nn imports listeners, which is below",
    ),
    "truth": (
        "engines/walk.py",
        "from ..reference import x",
        "engines imports reference, which is only for examiner",
    ),
    "everything": ("listeners/capture.py", "import headwise as hw", "listeners imports the whole package"),
    "a name of everything": ("nn/rope.py", "from headwise import attention", "nn imports the whole package"),
    "show at the top": ("map.py", "from .show import heatmaps", "map imports show, which is below"),
    "an unplaced file": ("leftovers.py", "", "leftovers: this room is on no floor"),
    "an unplaced folder": ("leftovers/more.py", "", "leftovers: this room is on no floor"),
    "an unplaced room's import": (
        "nn/rope.py",
        "from ..leftovers import x",
        "imports leftovers, which is on no",
    ),
}


@pytest.mark.parametrize(("file", "source", "verdict"), PLANTED.values(), ids=PLANTED)
def test_a_planted_violation_is_noticed(file: str, source: str, verdict: str, tmp_path: Path) -> None:
    _plant(tmp_path, {file: source})
    (found,) = violations(tmp_path)
    assert verdict in found


def test_the_floors_allow_what_they_should(tmp_path: Path) -> None:
    _plant(
        tmp_path,
        {
            "__init__.py": "from .map import AttentionMap\nfrom .leftovers import x",
            "scoring.py": "from .masks import take\nimport torch",
            "engines/walk.py": "from .. import budget\nfrom . import tiles\nfrom ..errors import ShapeError",
            "map.py": "class AttentionMap:\n    def plot(self):\n        from .show.heatmaps import heatmaps",
            "examiner/report.py": "from ..reference import attention\nfrom headwise.nn.rope import rotate",
            "cli/look.py": "import headwise as hw\nfrom .. import __version__",
        },
    )
    assert violations(tmp_path) == []


def _plant(package: Path, files: dict[str, str]) -> None:
    for file, source in files.items():
        (package / file).parent.mkdir(exist_ok=True)
        (package / file).write_text(source)
