"""Notebooks: their code cells as one source, run cell by cell, and lines told by cell."""

from __future__ import annotations

import ast
import importlib.util
import json
import linecache
import re
import sys
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import ArgumentError
from .parsed import DEFINITIONS, Function, bound_in, unwarned

GIVEN = ("display", "get_ipython", "In", "Out")  # what a notebook has without defining it
RUNS_PYTHON = {
    "time",
    "timeit",
    "capture",
    "prun",
}  # cell magics around Python; others are another language's
MAGIC = re.compile(r"(\s*)([%!?].*|.*\?\s*)$")
ASSIGNED = re.compile(r"(\s*[\w, ]+=\s*)[%!].*$")
LINE = re.compile(r"\b([Ll])ine (\d+)\b")
PREPARES = {
    "sys",
    "os",
    "torch",
    "np",
    "numpy",
    "random",
    "warnings",
    "setattr",
}  # a call of theirs may matter


@dataclass(frozen=True)
class Cells:
    """Where each code cell starts in the source they were joined to; none for a file of Python."""

    first_lines: tuple[int, ...] = ()

    def place(self, line: int) -> tuple[int, int]:
        """The cell, counted from 1 among those with code, and the line in it."""
        cell = max((at for at, first in enumerate(self.first_lines) if first <= line), default=0)
        return cell + 1, line - self.first_lines[cell] + 1

    def words(self, line: int) -> str:
        """ "cell 3, line 5"; without cells "line 5"."""
        return "cell {}, line {}".format(*self.place(line)) if self.first_lines else f"line {line}"


def is_notebook(path: Path) -> bool:
    """By its name."""
    return path.suffix.lower() == ".ipynb"


def source_of(path: Path) -> tuple[str, Cells]:
    """The text of a file of Python, or the code of a notebook, with where its cells are.

    Magics, lines for the shell and cells of other languages are blank lines in it.

    Raises:
        ArgumentError: it cannot be read, is not in UTF-8, or is no notebook.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ArgumentError(f"file must be readable: {path}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise ArgumentError(f"file must be Python source in UTF-8: {path}; save it as UTF-8") from error
    if not is_notebook(path):
        return text, Cells()
    firsts, lines = list[int](), list[str]()
    for cell in _code_cells(text, path):
        firsts.append(len(lines) + 1)
        lines += _as_python(cell) or [""]
    return "\n".join(lines) + "\n", Cells(tuple(firsts))


def _code_cells(text: str, path: Path) -> list[str]:
    def refused(why: str) -> ArgumentError:
        return ArgumentError(f"file must be a notebook: {path} {why}; save it again in Jupyter")

    try:
        book = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refused(f"is no JSON ({error})") from None
    if not isinstance(book, dict):
        raise refused(f"is JSON of {type(book).__name__}")
    sheets = book["worksheets"] if isinstance(book.get("worksheets"), list) else [book]  # nbformat 3, and 4
    listed = [sheet.get("cells") for sheet in sheets if isinstance(sheet, dict)]
    cells = [cell for each in listed if isinstance(each, list) for cell in each if isinstance(cell, dict)]
    if not any(isinstance(each, list) for each in listed):
        raise refused("has no cells")
    found = [cell.get("source", cell.get("input", "")) for cell in cells if cell.get("cell_type") == "code"]
    if not found:
        raise refused("has no cell with code")
    return ["".join(map(str, each)) if isinstance(each, list) else str(each) for each in found]


def _as_python(cell: str) -> list[str]:
    """Its lines, with what is for the notebook itself taken out."""
    lines = cell.splitlines()
    if _is_python(cell):  # a line of a long string may start with %, too
        return lines
    start = next((at for at, line in enumerate(lines) if line.strip()), 0)
    if lines and lines[start].lstrip().startswith("%%"):
        if re.split(r"\W+", lines[start].lstrip("% "))[0] not in RUNS_PYTHON:
            return [""] * len(lines)
        return [""] * (start + 1) + _as_python("\n".join(lines[start + 1 :]))
    kept = list[str]()
    for line in lines:
        goes_on = kept and (kept[-1].endswith("\\") or _open_brackets(kept) > 0)  # then % is a remainder
        kept.append(line if goes_on else _without_magic(line))
    return kept


def _open_brackets(lines: list[str]) -> int:
    return sum((one in "([{") - (one in ")]}") for line in lines for one in line)


def _without_magic(line: str) -> str:
    if found := ASSIGNED.match(line):
        return f"{found[1]}None"
    found = MAGIC.match(line)
    if found is None or (found[2].endswith("?") and "#" in line):
        return line
    return f"{found[1]}pass" if found[1] else ""  # a block needs a statement


def _is_python(text: str) -> bool:
    try:
        with unwarned():
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


# Running


def load_notebook(path: Path, source: str) -> ModuleType:
    """The notebook's definitions as a module.

    Only what they need is run: no plots, no training. What raises beside them is passed over, as it is in a
    notebook with a cell that failed; what then is missing in the attention itself is told there.

    Raises:
        BaseException: what the first failing statement raised, where no class and no function came of it all.
    """
    sys.path.insert(0, str(path.parent))
    name = f"checked_{path.stem}"
    spec = importlib.util.spec_from_loader(name, None, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[name] = module
    # `inspect` asks for lines by the file's name, where there are none that Python could read
    linecache.cache[str(path)] = (len(source), None, source.splitlines(keepends=True), str(path))
    names = vars(module)
    names.update({"display": _nothing, "get_ipython": _nothing, "In": [], "Out": {}})
    failed: Exception | None = None
    with unwarned():
        statements = _needed(ast.parse(source).body)
    for statement in statements:
        try:
            exec(compile(ast.Module([statement], []), str(path), "exec"), names)
        except ImportError as error:
            raise error from None  # stand-ins are tried for what is not installed
        except Exception as error:
            failed = failed or error
    own = [one for one in names.values() if getattr(one, "__module__", None) == name]
    if failed is not None and not own:
        raise failed
    return module


def _nothing(*_: object, **__: object) -> None:
    pass


def _needed(body: list[ast.stmt]) -> list[ast.stmt]:
    """The definitions, and whatever gives a value to a name that they use, or that such a value uses."""
    wanted = {name for node in body if isinstance(node, DEFINITIONS) for name in (node.name, *_read_in(node))}
    taken: set[int] = set()
    while True:
        more = {
            at
            for at, node in enumerate(body)
            if at not in taken and (_binds(node) & wanted or isinstance(node, DEFINITIONS) or _prepares(node))
        }
        if not more:
            return [node for at, node in enumerate(body) if at in taken]
        taken |= more
        wanted |= {name for at in more for name in _read_in(body[at])}


def _read_in(node: ast.AST, bound: frozenset[str] = frozenset()) -> set[str]:
    """Names it takes from elsewhere; a function's own variables are not among them."""
    if isinstance(node, Function):
        bound |= bound_in(node)
    found = {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else set[str]()
    return (found - bound).union(*(_read_in(one, bound) for one in ast.iter_child_nodes(node)))


def _binds(node: ast.stmt) -> set[str]:
    """Names it gives a value to, or changes: `Attention.forward = f`, `sizes["d"] = 8`."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(one.asname or one.name).partition(".")[0] for one in node.names} | {
            one for one in ("*",) if any(each.name == "*" for each in node.names)
        }
    found = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    return found | {name for one in ast.walk(node) if (name := _changed(one))}


def _changed(node: ast.AST) -> str:
    if not (isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store)):
        return ""
    inner: ast.AST = node
    while isinstance(inner, (ast.Attribute, ast.Subscript)):
        inner = inner.value
    return inner.id if isinstance(inner, ast.Name) else ""


def _prepares(node: ast.stmt) -> bool:
    """Changes what all code runs in: seeds, the default dtype, where to import from; and `import *`."""
    if isinstance(node, ast.ImportFrom):
        return any(each.name == "*" for each in node.names)
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return False
    inner: ast.AST = node.value.func
    while isinstance(inner, (ast.Attribute, ast.Subscript)):
        inner = inner.value
    return isinstance(inner, ast.Name) and inner.id in PREPARES


# Telling


def told_by_cell(report: Any, cells: Cells) -> None:
    """Each line that a report speaks of becomes a cell and a line in it; without cells nothing changes."""
    if cells.first_lines:
        _tell(report, cells)


def _tell(thing: Any, cells: Cells) -> None:
    for one in fields(thing):
        value = getattr(thing, one.name)
        if isinstance(value, str) and one.name not in (
            "path",
            "text",
            "message",
        ):  # those are the learner's words
            setattr(thing, one.name, _by_cell(value, cells))
        elif isinstance(value, list):
            setattr(thing, one.name, [_by_cell(each, cells) for each in value])
            for each in value:
                if is_dataclass(each):
                    _tell(each, cells)
    if getattr(thing, "line", None) is not None and hasattr(thing, "cell"):
        thing.cell, thing.line = cells.place(thing.line)


def _by_cell(value: Any, cells: Cells) -> Any:
    if not isinstance(value, str):
        return value

    def placed(found: re.Match[str]) -> str:
        words = cells.words(int(found[2]))
        return words.capitalize() if found[1] == "L" else words

    return LINE.sub(placed, value)


def broken_cell(source: str, cells: Cells) -> SyntaxError | None:
    """The first syntax error, looked for cell by cell: a bracket left open is no matter of the next one."""
    lines = source.splitlines()
    ends = (*cells.first_lines[1:], len(lines) + 1)
    for first, end in zip(cells.first_lines, ends, strict=False):
        try:
            with unwarned():
                ast.parse("\n" * (first - 1) + "\n".join(lines[first - 1 : end - 1]) + "\n")
        except SyntaxError as error:
            return error
    return None
