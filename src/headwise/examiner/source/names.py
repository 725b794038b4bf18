"""Names that nothing binds where they are used, and names that only `if __name__ == "__main__":` binds.

Certain to be unbound, whatever the branches do: without a loop around both, a program only moves down the
page, and what is bound further down is not bound yet. Sizes that classes read are often set under
`__main__`; whoever runs the file has them, who imports it has not.
"""

from __future__ import annotations

import ast
import builtins
import re
import symtable
import sys
from collections.abc import Collection, Iterator, Sequence
from types import ModuleType
from typing import NamedTuple

from ..examine.words import input_word
from .parsed import (
    DEFINITIONS,
    FUNCTIONS,
    Definition,
    Function,
    dotted,
    inner_nodes,
    is_main,
    parameters_of,
    readable,
    suggestion_for,
    text_of,
    tree_of,
    unwarned,
)

CAUGHT = {"NameError", "UnboundLocalError", "Exception", "BaseException"}
# an `if` on one of these may keep its body from ever running here
HERE = {"version_info", "platform", "hexversion", "PY2", "PY3", "TYPE_CHECKING", "MYPY"}


def catches_names(node: ast.Try | ast.TryStar) -> bool:
    """Whether a missing name in the body is expected."""
    for handler in node.handlers:
        if handler.type is None or any(
            isinstance(n, ast.Name) and n.id in CAUGHT for n in ast.walk(handler.type)
        ):
            return True
    return False


def may_not_run(test: ast.expr) -> bool:
    """Whether a condition asks for the Python or the machine, or is never true."""
    if isinstance(test, ast.Constant):
        return True
    named = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    named |= {node.attr for node in ast.walk(test) if isinstance(node, ast.Attribute)}
    return bool(named & HERE) or "os.name" in ast.unparse(test)


class Event(NamedTuple):
    """One use or binding of a name, as it would happen."""

    name: str
    binds: bool
    line: int
    loops: frozenset[int]


def used_too_early(tree: ast.Module, given: Collection[str]) -> Iterator[tuple[str, int, int]]:
    """Name, line of the use, line of the first binding after it; for the module and each function.

    Args:
        given: names that a module has without binding them.
    """
    shared = {
        name for node in ast.walk(tree) if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names
    }
    yield from _too_early(tree.body, shared | set(given))
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            own = {one.arg for one in parameters_of(node)}
            yield from _too_early(_reachable(node.body), shared | own)


def _too_early(body: list[ast.stmt], leave_out: set[str]) -> Iterator[tuple[str, int, int]]:
    events = _Events(body).events
    first_bind: dict[str, int] = {}
    bound_in_loops: dict[str, set[int]] = {}
    for at, event in enumerate(events):
        if event.binds:
            first_bind.setdefault(event.name, at)
            bound_in_loops.setdefault(event.name, set()).update(event.loops)
    for at, (name, binds, line, loops) in enumerate(events):
        if binds or name in leave_out or name.startswith("__") or at > first_bind.get(name, -1):
            continue
        if not loops & bound_in_loops[name]:
            yield name, line, events[first_bind[name]].line


class _Events(ast.NodeVisitor):
    """The uses and bindings of one scope in the order in which they are evaluated."""

    def __init__(self, body: list[ast.stmt]) -> None:
        self.events: list[Event] = []
        self.loops: frozenset[int] = frozenset()
        self.silent = 0  # inside what may not run, or may fail: bindings count, uses do not
        self.each(body)

    def each(self, nodes: Sequence[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def bind(self, name: str | None, node: ast.AST) -> None:
        if name is not None:
            self.events.append(Event(name, True, getattr(node, "lineno", 0), self.loops))

    def loop(self, node: ast.AST, parts: Sequence[ast.AST]) -> None:
        before, self.loops = self.loops, self.loops | {id(node)}
        self.each(parts)
        self.loops = before

    def quietly(self, nodes: Sequence[ast.AST]) -> None:
        self.silent += 1
        self.each(nodes)
        self.silent -= 1

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.bind(node.id, node)
        elif not self.silent:
            self.events.append(Event(node.id, False, node.lineno, self.loops))

    def visit_Assign(self, node: ast.Assign) -> None:
        self.each([node.value, *node.targets])

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name) and not self.silent:
            self.events.append(Event(node.target.id, False, node.lineno, self.loops))
        self.each([node.value, node.target])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.each([node.target] if node.value is None else [node.value, node.target])

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.each([node.value, node.target])

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            self.each([value] if key is None else [key, value])

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.each([node.test, node.body, node.orelse])

    def visit_If(self, node: ast.If) -> None:
        if may_not_run(node.test):
            self.quietly([node.test, *node.body, *node.orelse])
        else:
            self.generic_visit(node)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        self.loop(node, [node.target, *node.body])
        self.each(node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self.loop(node, [node.test, *node.body])
        self.each(node.orelse)

    def visit_Try(self, node: ast.Try | ast.TryStar) -> None:
        (self.quietly if catches_names(node) else self.each)(node.body)
        for handler in node.handlers:
            self.each([handler.type] if handler.type is not None else [])
            self.bind(handler.name, handler)
            self.each(handler.body)
        self.each([*node.orelse, *node.finalbody])

    def visit_FunctionDef(self, node: Function) -> None:
        self.each([*node.decorator_list, *node.args.defaults])
        self.each([one for one in node.args.kw_defaults if one is not None])
        self.bind(node.name, node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.each([*node.decorator_list, *node.bases, *node.keywords])
        inside = _Events(node.body).events
        own = {event.name for event in inside if event.binds}
        if not self.silent:
            self.events += [event._replace(loops=self.loops) for event in inside if event.name not in own]
        self.bind(node.name, node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.each([*node.args.defaults, *(one for one in node.args.kw_defaults if one is not None)])

    def comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        self.visit(node.generators[0].iter)
        for inner in ast.walk(node):  # := inside binds outside
            if isinstance(inner, ast.NamedExpr):
                self.visit(inner.target)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        for one in node.names:
            self.bind(one.asname or one.name.partition(".")[0], node)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self.generic_visit(node)
        self.bind(node.name, node)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        self.bind(node.name, node)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self.generic_visit(node)
        self.bind(node.rest, node)

    # ast's own spelling of the names
    visit_AsyncFor = visit_For  # noqa: N815
    visit_TryStar = visit_Try  # noqa: N815
    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815
    visit_ImportFrom = visit_Import  # noqa: N815
    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = comprehension  # noqa: N815


# in every module without being assigned; the last line is what notebooks, profilers and gettext add
GIVEN = frozenset(dir(builtins)) | frozenset(
    """__name__ __file__ __doc__ __spec__ __package__ __loader__ __builtins__ __annotations__ __path__
    __dict__ __cached__ __debug__ __module__ __qualname__ __class__ __firstlineno__ __classdict__
    __conditional_annotations__ WindowsError exit quit copyright credits license help
    _ __ ___ get_ipython display In Out reveal_type reveal_locals profile""".split()
)
MEANT = re.compile(r"#.*(noqa: .*F821|name-defined|undefined-variable)")  # whoever wrote it knows
# ways to another module's names, or to one's own
UNSEEN = {"f_globals", "__globals__", "modules", "_convert_"}
UNSEEN_NAMES = {"globals", "exec", "execfile", "__builtins__", "builtins"}
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
        if isinstance(node, ast.Name) and node.id in UNSEEN_NAMES:
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
            self.each([one.annotation for one in parameters_of(node) if one.annotation is not None])
            self.each([node.returns] if node.returns is not None else [])
        self.inside.append(node)
        self.enter(node.name, node.lineno, [*_reachable(node.body)])
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


def _reachable(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements up to the first `raise` or `return`: what follows is never run."""
    ends = [i for i, node in enumerate(body) if isinstance(node, (ast.Raise, ast.Return))]
    return body[: ends[0] + 1] if ends else body


def _module_names(tree: ast.Module) -> set[str]:
    """What the module's own lines bind."""
    names = {node.name for node in tree.body if isinstance(node, DEFINITIONS)}
    for node in inner_nodes(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(one.asname or one.name).partition(".")[0] for one in node.names}
    return names


# What a file does only when it is run as a script

HARMLESS = frozenset("int float bool str min max len range round dict list tuple set".split())
TENSORS = frozenset("torch np numpy nn F".split())  # what is made with these is data, or a module
INNER = frozenset("weights scores attn attention out output qkv".split())  # what forward computes itself
NOTE = "set under __main__, and set so before it was built: {names}"


def names_under_main(source: str) -> set[str]:
    """Names that are bound only there."""
    tree = tree_of(source)
    if tree is None:
        return set()
    inside = {name for body in _bodies(tree) for node in body for name in _bound_by(node)}
    outside = {name for node in tree.body if not is_main(node) for name in _bound_by(node)}
    return inside - outside


def settings_under_main(source: str) -> set[str]:
    """Of those, names that are settings: no tensors, and no inputs or steps of attention."""
    tree = tree_of(source)
    if tree is None:
        return set()
    found: set[str] = set()
    for body in _bodies(tree):
        for node in body:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                continue
            made_of = {one.id for one in ast.walk(node.value) if isinstance(one, ast.Name)}
            if not made_of & TENSORS:
                found |= _bound_by(node)
    return {
        name for name in found & names_under_main(source) if input_word(name) is None and name not in INNER
    }


def set_as_under_main(module: ModuleType, source: str) -> list[str]:
    """Run the plain assignments there to names that functions and classes read; the names that were set.

    An assignment is plain where it computes with names, numbers and texts alone, and calls nothing that could
    do anything else.
    """
    tree = tree_of(source)
    wanted = names_under_main(source)
    if tree is None or not wanted:
        return []
    read = {
        node.id
        for top in tree.body
        if isinstance(top, DEFINITIONS)
        for node in ast.walk(top)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    if not wanted & read:
        return []
    done: list[str] = []
    for body in _bodies(tree):
        for node in body:
            names = _bound_by(node)
            if not _is_plain(node) or not names <= wanted:
                continue
            try:
                exec(compile(ast.Module([node], []), "<main>", "exec"), vars(module))
            except Exception:  # it wants what was not set: whoever reads it says so
                continue
            done += sorted(names & read)
    return done


def _bodies(tree: ast.Module) -> list[list[ast.stmt]]:
    return [node.body for node in tree.body if isinstance(node, ast.If) and is_main(node)]


def _bound_by(node: ast.stmt) -> set[str]:
    """Names that a statement binds, those of functions inside left out."""
    if isinstance(node, DEFINITIONS):
        return {node.name}
    found = {
        (one.asname or one.name).partition(".")[0]
        for part in ast.walk(node)
        if isinstance(part, (ast.Import, ast.ImportFrom))
        for one in part.names
    }
    return found | {
        one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
    }


def _is_plain(node: ast.stmt) -> bool:
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        calls = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
        named = all(isinstance(one, (ast.Name, ast.Tuple)) for one in targets) and node.value is not None
        return named and all(isinstance(one, ast.Name) and one.id in HARMLESS for one in calls)
    return False
