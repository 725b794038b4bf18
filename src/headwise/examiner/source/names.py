"""Names that are used and never bound, found before anything runs.

The compiler's own symbol tables say which names are looked up in the module, the tree says on which line.
Where a file could bind names in ways no table shows (star imports, `exec`, `globals()`), nothing is said.
"""

from __future__ import annotations

import ast
import builtins
import re
import symtable
import sys
from collections.abc import Collection, Iterator
from typing import NamedTuple

from .order import catches_names, may_not_run, used_too_early
from .parsed import (
    DEFINITIONS,
    Definition,
    Function,
    dotted,
    inner_nodes,
    readable,
    text_of,
    tree_of,
    unwarned,
)
from .suggestions import suggestion_for

# in every module without being assigned; the last line is what notebooks, profilers and gettext add
GIVEN = frozenset(dir(builtins)) | frozenset(
    """__name__ __file__ __doc__ __spec__ __package__ __loader__ __builtins__ __annotations__ __path__
    __dict__ __cached__ __debug__ __module__ __qualname__ __class__ __firstlineno__ __classdict__
    __conditional_annotations__ WindowsError exit quit copyright credits license help
    _ __ ___ get_ipython display In Out reveal_type reveal_locals profile""".split()
)
MEANT = re.compile(r"#.*(noqa: .*F821|name-defined|undefined-variable)")  # whoever wrote it knows
UNSEEN = {
    "f_globals",
    "__globals__",
    "modules",
    "_convert_",
}  # ways to another module's names, or to one's own
COMPREHENSIONS = {
    ast.ListComp: "listcomp", ast.SetComp: "setcomp", ast.DictComp: "dictcomp", ast.GeneratorExp: "genexpr",
}  # fmt: skip
# From Python 3.12 on the tables show a comprehension as part of the scope around it, its own names and all;
# a generator still has a table.
INLINED = sys.version_info >= (3, 12)
BEFORE_FOR = re.compile(rb"(?:[\s)\\]|#[^\r\n]*)*")  # between the value of a comprehension and its `for`
Key = tuple[str, int]  # a scope: its name and the line it starts on


class Undefined(NamedTuple):
    """A name that will raise NameError when its line runs."""

    name: str
    line: int
    text: str  # that line, stripped
    suggestion: str  # an import line, or a clause: "assign it first, e.g. batch_size = query.size(0)"

    @property
    def words(self) -> str:
        """The whole of it, in one or two sentences."""
        imports = self.suggestion.startswith(("import ", "from "))
        do = f"add at the top: {self.suggestion}" if imports else self.suggestion
        end = "" if do.endswith("?") else "."
        return f"`{self.name}` is used on line {self.line} but not defined there: `{self.text}`; {do}{end}"


def undefined_names(source: str, known: Collection[str] = ()) -> list[Undefined]:
    """Names that nothing binds where they are used, first use of each, in order of lines.

    Args:
        source: Python, a whole file or one class or function.
        known: names bound outside `source`, e.g. the globals of a live class.

    Returns:
        Nothing where the source does not parse or binds names behind our back.
    """
    tree, text = tree_of(source), readable(source)
    if tree is None or text is None or _binds_unseen(tree):
        return []
    given = GIVEN | set(known)
    try:
        with unwarned():
            tabled = _with_generators(text, tree) if INLINED else text
            unbound = _unbound(symtable.symtable(tabled, "<source>", "exec"), given)
        uses = list(_Uses(tree, unbound).found)
        early = list(used_too_early(tree, given))
    except (SyntaxError, RecursionError):
        return []
    first: dict[str, tuple[int, str]] = {}
    lines = source.splitlines()
    for name, node, inside in uses:
        if MEANT.search(lines[node.lineno - 1]):
            continue
        if name not in first or node.lineno < first[name][0]:
            first[name] = node.lineno, suggestion_for(name, tree, inside, bound=_module_names(tree))
    for name, line, bound_on in early:
        if name not in first:
            first[name] = line, f"it is assigned only later, on line {bound_on}: move that above"
    found = [Undefined(name, line, text_of(source, line), do) for name, (line, do) in first.items()]
    return sorted(found, key=lambda one: (one.line, one.name))


def _binds_unseen(tree: ast.Module) -> bool:
    """Whether names may come from where no table shows them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(one.name == "*" for one in node.names):
            return True
        if isinstance(node, ast.Name) and node.id in (
            "globals",
            "exec",
            "execfile",
            "__builtins__",
            "builtins",
        ):
            return True
        if isinstance(node, ast.Attribute) and node.attr in UNSEEN:
            return True
        if isinstance(node, ast.Call) and not node.args and dotted(node.func) in ("vars", "locals"):
            return True
    return False


def _with_generators(text: str, tree: ast.Module) -> str:
    """The text, line by line, with generators for comprehensions: `(x for x in y)` for `[x for x in y]`.

    Names are looked up alike in the two, those around a class included.
    """
    written = text.encode()  # the tree counts bytes
    starts = [0]
    for line in written.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    edits: list[tuple[int, int, bytes]] = []  # from, to, what stands there instead
    for node in ast.walk(tree):
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp):
            assert node.end_lineno is not None and node.end_col_offset is not None
            first = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            opened = b"("
            if isinstance(node, ast.DictComp):  # {k: v for ...} as ({k: v} for ...)
                value = node.value
                assert value.end_lineno is not None and value.end_col_offset is not None
                between = BEFORE_FOR.match(written, starts[value.end_lineno - 1] + value.end_col_offset)
                assert between is not None
                edits.append((between.end(), between.end(), b"} "))
                opened = b"({"
            edits += [(first, first + 1, opened), (end - 1, end, b")")]
    pieces, done = [], 0
    for start, end, new in sorted(edits):
        pieces += [written[done:start], new]
        done = end
    return b"".join([*pieces, written[done:]]).decode()


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


def _binds(symbol: symtable.Symbol) -> bool:
    return symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace() or symbol.is_parameter()


def _unbound(top: symtable.SymbolTable, given: Collection[str]) -> dict[Key, set[str]]:
    """For each scope the names it looks up in the module and nobody puts there."""
    tables = list(_tables(top))
    bound = set(given)
    for table in tables:
        for symbol in table.get_symbols():
            if _binds(symbol) and (table is top or symbol.is_declared_global()):
                bound.add(symbol.get_name())
    unbound: dict[Key, set[str]] = {}
    elsewhere: dict[Key, set[str]] = {}  # two lambdas on one line are one scope to us
    for table in tables:
        key = _key(table.get_name(), 0 if table is top else table.get_lineno())
        for symbol in table.get_symbols():
            name = symbol.get_name()
            # is_global errs in a function that is called "top", as the module's table is
            own = table is not top and _binds(symbol) and not symbol.is_declared_global()
            if own or not symbol.is_global():
                elsewhere.setdefault(key, set()).add(name)
            elif symbol.is_referenced() and name not in bound:
                unbound.setdefault(key, set()).add(name)
    return {key: names - elsewhere.get(key, set()) for key, names in unbound.items()}


def _key(name: str, line: int) -> Key:
    return name.strip("<>"), line


class _Uses(ast.NodeVisitor):
    """Where names are read, each in the scope that reads it."""

    def __init__(self, tree: ast.Module, unbound: dict[Key, set[str]]) -> None:
        self.unbound = unbound
        self.scope: list[Key] = [("top", 0)]
        self.inside: list[Definition] = []
        self.found: list[tuple[str, ast.Name, tuple[Definition, ...]]] = []
        lazy = any(
            isinstance(node, ast.ImportFrom)
            and node.module == "__future__"
            and any(one.name == "annotations" for one in node.names)
            for node in tree.body
        )
        self.eager_annotations = not lazy and sys.version_info < (3, 14)
        self.visit(tree)

    def enter(self, name: str, line: int, nodes: list[ast.AST]) -> None:
        self.scope.append((name, line))
        self.each(nodes)
        self.scope.pop()

    def each(self, nodes: list[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and node.id in self.unbound.get(self.scope[-1], ()):
            self.found.append((node.id, node, tuple(self.inside)))

    def visit_FunctionDef(self, node: Function) -> None:
        spec = node.args
        self.each(
            [*node.decorator_list, *spec.defaults, *(one for one in spec.kw_defaults if one is not None)]
        )
        if self.eager_annotations:
            arguments = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg]
            self.each([one.annotation for one in arguments if one is not None and one.annotation is not None])
            self.each([node.returns] if node.returns is not None else [])
        self.inside.append(node)
        self.enter(node.name, node.lineno, [*node.body])
        self.inside.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 -- ast's own spelling

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.each([*node.decorator_list, *node.bases, *node.keywords])
        self.inside.append(node)
        self.enter(node.name, node.lineno, [*node.body])
        self.inside.pop()

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.each([*node.args.defaults, *(one for one in node.args.kw_defaults if one is not None)])
        self.enter("lambda", node.lineno, [node.body])

    def comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        first, *others = node.generators
        self.visit(first.iter)  # the one part that the scope outside evaluates
        results = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        kind = ast.GeneratorExp if INLINED else type(node)
        self.enter(COMPREHENSIONS[kind], node.lineno, [first.target, *first.ifs, *others, *results])

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = comprehension  # noqa: N815

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        in_function = bool(self.inside) and not isinstance(self.inside[-1], ast.ClassDef)
        if self.eager_annotations and not in_function:
            self.visit(node.annotation)
        self.each([node.target] if node.value is None else [node.value, node.target])

    def visit_Try(self, node: ast.Try) -> None:
        if not catches_names(node):
            self.each([*node.body])
        self.each([*node.handlers, *node.orelse, *node.finalbody])

    def visit_If(self, node: ast.If) -> None:
        if not may_not_run(node.test):
            self.generic_visit(node)


def _module_names(tree: ast.Module) -> set[str]:
    """What the module's own lines bind."""
    names = {node.name for node in tree.body if isinstance(node, DEFINITIONS)}
    for node in inner_nodes(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(one.asname or one.name).partition(".")[0] for one in node.names}
    return names
