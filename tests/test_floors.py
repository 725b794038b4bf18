"""The floors: who may import whom, read from the source; and whether that reading notices what it should."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import headwise

PACKAGE = Path(headwise.__file__).resolve().parent

# The floors, from the top: a room imports from its own floor and from those before it.
FLOORS = (
    (
        "errors",
        "lazy_names",
        "byte_sizes",
        "private_names",
        "budget",
        "whole_files",
        "indexing",
        "tensor_stand_in",
        "mask_rules",
        "mask_meaning",
        "masks",
        "scoring",
        "foreign_masks",
    ),
    ("reference",),
    ("engines",),
    ("arguments", "map", "functional"),
    ("nn",),
    ("heads",),
    ("models",),
    ("parallel",),
    ("listeners",),
    ("show",),
    ("circuits",),
    ("corpus",),
    ("server",),
    ("examiner",),
    ("course",),
    ("cli", "doctor", "testing", "__main__"),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# Cells of notebooks: they import headwise as its users do.
CELLS = {"lessons", "interview"}

# Truth judges the fast code, so the fast code must not know it.
ONLY_FOR = {"reference": {"examiner"}}

# Imports downwards, each inside one function: (file, function, what it reaches for). A result knows how to
# show itself; what shows it knows the result.
DOWNWARD = {
    ("map.py", "AttentionMap.plot", "show"),
    ("heads/collection.py", "Heads.table", "show"),
    ("heads/collection.py", "Heads.plot", "show"),
    ("heads/collection.py", "Heads.plot_layers", "show"),
    ("heads/collection.py", "Heads.to_json", "show"),
    ("heads/collection.py", "Heads.to_html", "show"),
    ("heads/collection.py", "Heads._repr_html_", "show"),
    ("heads/text_changes.py", "Changes.table", "show"),
    ("heads/text_changes.py", "Changes.plot", "show"),
    ("models/specialised_heads.py", "Specialisation.table", "show"),
    ("models/specialised_heads.py", "Specialisation.plot", "show"),
    ("heads/roles.py", "Roles.table", "show"),
    ("heads/roles.py", "Roles.plot", "show"),
    ("heads/roles.py", "Roles.__str__", "show"),
    ("listeners/head_outputs.py", "HeadOutputs.plot", "show"),
    ("listeners/importance.py", "Robustness.plot", "show"),
    ("listeners/effects.py", "Effects.__str__", "show"),
    ("examiner/report.py", "Report.__str__", "examiner.report_formats"),
    ("examiner/report.py", "Report._repr_html_", "examiner.report_formats"),
    ("examiner/report.py", "Report.to_json", "examiner.report_formats"),
    ("examiner/explanations/explanation.py", "Explanation.to_html", "examiner.explanations.page"),
    ("examiner/explanations/explanation.py", "Explanation._repr_html_", "examiner.explanations.page"),
    ("examiner/explanations/explanation.py", "Explanation.text", "examiner.explanations.page"),
    ("examiner/explanations/explanation.py", "Explanation.print", "examiner.explanations.page"),
}

ImportRecord = tuple[int, str | None, bool, str, str | None]

LEAVES = (
    ast.Name,
    ast.Constant,
    ast.expr_context,
    ast.operator,
    ast.cmpop,
)  # most of a file, with nothing inside

WHOLE_PACKAGE = ""  # stands for `import headwise`, which brings every room along


@dataclass(frozen=True)
class Import:
    """One import of a room of the package: where it stands and what it asks for."""

    file: str  # relative to the package
    line: int
    function: str | None  # the function it is inside, None at the top of the file
    target: str  # the module, dotted, without the package's own name; WHOLE_PACKAGE for the package itself
    for_types: bool  # under TYPE_CHECKING: read by tools, never run

    @property
    def room(self) -> str:
        return self.target.partition(".")[0]

    @property
    def is_downward(self) -> bool:
        """Whether it is one of those that may reach for what is below."""
        return any(
            (self.file, self.function) == (file, function) and f"{self.target}.".startswith(f"{target}.")
            for file, function, target in DOWNWARD
        )


def rooms_of(package: Path) -> list[str]:
    """Files and folders with Python in them at the top of the package."""
    files = [path.stem for path in package.glob("*.py") if path.stem != "__init__"]
    folders = [path.name for path in package.iterdir() if path.is_dir() and any(path.rglob("*.py"))]
    return sorted(files + folders)


def modules_of(package: Path) -> dict[str, Path]:
    """Every module and package inside, by its dotted name without the package's own."""
    actual = {}
    for path in sorted(package.rglob("*.py")):
        if path.parent.name in CELLS:
            continue
        parts = path.relative_to(package).with_suffix("").parts
        actual[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return actual


@functools.cache
def imports_here() -> tuple[Import, ...]:
    """Those of the package itself: two hundred files are read once for all tests."""
    return tuple(_imports_of(PACKAGE, "headwise"))


def imports_of(package: Path, own: str = "headwise") -> Iterable[Import]:
    """Every import of one room by another or by itself; the package's own `__init__` is exempt."""
    return imports_here() if package == PACKAGE else _imports_of(package, own)


def _imports_of(package: Path, own: str) -> Iterator[Import]:
    modules = modules_of(package)
    for path in modules.values():
        file = path.relative_to(package)
        if file != Path("__init__.py"):
            for line, function, for_types, base, name in _targets(
                ast.parse(path.read_text("utf-8")), file, own
            ):
                head, _, rest = base.partition(".")
                if head == own:
                    whole = ".".join(filter(None, (rest, name)))
                    # a name is a module, or a room that is not there, or something that its module holds
                    expected = whole in modules or (not rest and name in FLOOR_OF)
                    yield Import(file.as_posix(), line, function, whole if expected else rest, for_types)


def _targets(tree: ast.Module, file: Path, own: str) -> Iterator[ImportRecord]:
    """(line, function, for types alone, dotted base, name) of every import, relative ones made absolute."""
    package_parts = [own, *file.parent.parts]

    def absolute(level: int, name: str | None) -> str:
        base = package_parts[: len(package_parts) - level + 1] if level else []
        return ".".join([*base, *([name] if name else [])])

    def visit(node: ast.AST, scope: tuple[str, ...], inside: bool, types: bool) -> Iterator[ImportRecord]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, LEAVES):
                continue
            at = (getattr(child, "lineno", 0), ".".join(scope) if inside else None, types)
            match child:
                case ast.Import(names=names):
                    for alias in names:
                        yield *at, alias.name, None
                case ast.ImportFrom(level=level, module=module, names=names):
                    for alias in names:
                        yield *at, absolute(level, module), alias.name
                case ast.Call(
                    func=ast.Name(id=called) | ast.Attribute(attr=called), args=[ast.Constant(str(name)), *_]
                ):
                    if called in ("import_module", "__import__"):
                        level = len(name) - len(name.lstrip("."))
                        yield *at, absolute(level, name.lstrip(".")), None
            named = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            deeper = (*scope, child.name) if named else scope
            function = inside or (named and not isinstance(child, ast.ClassDef))
            checking = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from visit(child, deeper, function, types or checking)

    return visit(tree, (), False, False)


def circle(package: Path, own: str = "headwise") -> list[str]:
    """A circle of modules that import each other, inside packages, too, at the top or in a function.

    Not those that only tools read, nor those that are listed: a result that shows itself.
    """
    modules = modules_of(package)
    names = {path.relative_to(package).as_posix(): name for name, path in modules.items()}
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for each in imports_of(package, own):
        inside = each.target in modules and each.target not in (WHOLE_PACKAGE, names[each.file])
        if inside and not each.is_downward and not each.for_types:
            graph[names[each.file]].add(each.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def violations(package: Path) -> list[str]:
    """What breaks the floors, a sentence each."""
    actual = [
        f"{room}: this room is on no floor; place it in FLOORS here and in DESIGN.md"
        for room in rooms_of(package)
        if room not in FLOOR_OF
    ]
    for each in imports_of(package):
        own = Path(each.file).with_suffix("").parts[0]
        where = f"{each.file}:{each.line}"
        if each.room == own or own not in FLOOR_OF or (each.function and each.is_downward):
            continue
        if each.room == WHOLE_PACKAGE:
            if FLOOR_OF[own] != len(FLOORS) - 1:
                actual.append(f"{where}: {own} imports the whole package; name the room it needs")
        elif each.room not in FLOOR_OF:
            actual.append(f"{where}: {own} imports {each.room}, which is on no floor")
        elif FLOOR_OF[each.room] > FLOOR_OF[own]:
            actual.append(f"{where}: {own} imports {each.room}, which is below it")
        elif own not in ONLY_FOR.get(each.room, {own}):
            actual.append(
                f"{where}: {own} imports {each.room}, which is only for {', '.join(ONLY_FOR[each.room])}"
            )
    return actual


def test_rooms_import_only_their_own_floor_and_those_above() -> None:
    assert violations(PACKAGE) == []


def test_no_module_imports_itself_round_a_circle() -> None:
    assert circle(PACKAGE) == []
    assert circle(PACKAGE.parents[1] / "benchmarks", "benchmarks") == []


def test_the_floors_know_no_room_that_does_not_exist() -> None:
    assert set(FLOOR_OF) == set(rooms_of(PACKAGE))
    assert set(ONLY_FOR) <= set(FLOOR_OF)


def test_the_table_of_packages_in_the_design_has_the_same_floors_in_the_same_order() -> None:
    design = (Path(__file__).resolve().parents[1] / "DESIGN.md").read_text("utf-8")
    table = design.partition("\n## Packages\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[2] for line in table.splitlines() if line.startswith("| ")][1:]
    documented = [tuple(re.findall(r"`(\w+)(?:\.py|/)`", cell)) for cell in cells]
    assert documented == list(FLOORS)


def test_imports_downwards_that_are_allowed_are_still_there() -> None:
    listed = [each for each in imports_of(PACKAGE) if each.is_downward]
    for file, function, target in DOWNWARD:
        reached = [each.target for each in listed if (each.file, each.function) == (file, function)]
        assert any(f"{module}.".startswith(f"{target}.") for module in reached), (file, function, target)


PLANTED = {
    "a room below": ("masks.py", "from .map import AttentionMap", "masks imports map, which is below"),
    "in a function": ("nn/rope.py", "def f():\n    from ..show import x", "nn imports show, which is below"),
    "truth": (
        "engines/walk.py",
        "from ..reference import x",
        "engines imports reference, which is only for examiner",
    ),
    "everything": ("listeners/capture.py", "import headwise as hw", "listeners imports the whole package"),
    "an unplaced file": ("leftovers.py", "", "leftovers: this room is on no floor"),
}


@pytest.mark.parametrize(("file", "source", "verdict"), PLANTED.values(), ids=PLANTED)
def test_a_planted_violation_is_noticed(file: str, source: str, verdict: str, tmp_path: Path) -> None:
    _plant(tmp_path, {file: source})
    (actual,) = violations(tmp_path)
    assert verdict in actual


@pytest.mark.parametrize(
    "files",
    [
        {"a.py": "from . import b", "b.py": "from .a import x"},
        {"a.py": "import headwise.nn.b", "nn/b.py": "def f():\n    from ..a import x"},
        {"nn/__init__.py": "from .a import x", "nn/a.py": "from .b import y", "nn/b.py": "from . import x"},
    ],
    ids=["two", "in a function", "through a package"],
)
def test_a_planted_circle_is_noticed(files: dict[str, str], tmp_path: Path) -> None:
    _plant(tmp_path, files)
    assert circle(tmp_path)
    _plant(tmp_path, dict.fromkeys(files, ""))
    assert not circle(tmp_path)


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
