"""Find names that are undefined where they are used, and names bound only under `__main__`.

A name is reported only if it is certainly undefined, whichever branches run: unless a loop surrounds both, a
binding further down the file comes too late. Sizes that classes read are often set under `__main__`: they
exist if the file is run as a script, and not if it is imported.
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

from ..examine.vocabulary import input_word
from .parsed import (
    DEFINITIONS,
    FUNCTIONS,
    Definition,
    Function,
    dotted,
    imported_names,
    inner_nodes,
    is_main,
    loaded_names,
    nodes,
    parameters_of,
    readable,
    stored_names,
    suggestion_for,
    text_of,
    tree_of,
    unwarned,
)

CAUGHT = {"NameError", "UnboundLocalError", "Exception", "BaseException"}
# the body of an `if` on one of these may never run on this system
SYSTEM = {"version_info", "platform", "hexversion", "PY2", "PY3", "TYPE_CHECKING", "MYPY"}


def catches_names(node: ast.Try | ast.TryStar) -> bool:
    """Return True if the `try` handles a NameError of its body."""
    for handler in node.handlers:
        if handler.type is None or any(name.id in CAUGHT for name in nodes(handler.type, ast.Name)):
            return True
    return False


def may_not_run(test: ast.expr) -> bool:
    """Return True if a condition is constant or depends on the Python version or the system."""
    if isinstance(test, ast.Constant):
        return True
    names = {name.id for name in nodes(test, ast.Name)} | {node.attr for node in nodes(test, ast.Attribute)}
    return bool(names & SYSTEM) or "os.name" in ast.unparse(test)


class Event(NamedTuple):
    """A use or a binding of a name; events are listed in the order of execution."""

    name: str
    binds: bool
    line: int
    loops: frozenset[int]


def used_too_early(tree: ast.Module, predefined: Collection[str]) -> Iterator[tuple[str, int, int]]:
    """Yield (name, line of the use, line of the first binding after it), for the module and each function.

    Args:
        tree: of the file.
        predefined: names that exist in a module without being bound.
    """
    shared = {name for node in nodes(tree, (ast.Global, ast.Nonlocal)) for name in node.names}
    yield from _too_early(tree.body, shared | set(predefined))
    for function in nodes(tree, FUNCTIONS):
        own = {parameter.arg for parameter in parameters_of(function)}
        yield from _too_early(_reachable(function.body), shared | own)


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
    """Collect the uses and bindings of one scope in the order in which they are evaluated."""

    def __init__(self, body: list[ast.stmt]) -> None:
        self.events: list[Event] = []
        self.loops: frozenset[int] = frozenset()
        self.silent = 0  # above 0 in code that may not run or may fail: its bindings count, its uses do not
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
        self.each([default for default in node.args.kw_defaults if default is not None])
        self.bind(node.name, node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.each([*node.decorator_list, *node.bases, *node.keywords])
        inside = _Events(node.body).events
        own = {event.name for event in inside if event.binds}
        if not self.silent:
            self.events += [event._replace(loops=self.loops) for event in inside if event.name not in own]
        self.bind(node.name, node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.each(
            [*node.args.defaults, *(default for default in node.args.kw_defaults if default is not None)]
        )

    def comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        self.visit(node.generators[0].iter)
        for assignment in nodes(node, ast.NamedExpr):  # := binds outside the comprehension
            self.visit(assignment.target)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        for name in imported_names(node):
            self.bind(name, node)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self.generic_visit(node)
        self.bind(node.name, node)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        self.bind(node.name, node)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self.generic_visit(node)
        self.bind(node.rest, node)

    # the names that ast.NodeVisitor requires
    visit_AsyncFor = visit_For  # noqa: N815
    visit_TryStar = visit_Try  # noqa: N815
    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815
    visit_ImportFrom = visit_Import  # noqa: N815
    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = comprehension  # noqa: N815


# names that every module has; those of the last line come from notebooks, profilers and gettext
PREDEFINED = frozenset(dir(builtins)) | frozenset(
    """__name__ __file__ __doc__ __spec__ __package__ __loader__ __builtins__ __annotations__ __path__
    __dict__ __cached__ __debug__ __module__ __qualname__ __class__ __firstlineno__ __classdict__
    __conditional_annotations__ WindowsError exit quit copyright credits license help
    _ __ ___ get_ipython display In Out reveal_type reveal_locals profile""".split()
)
# a comment that silences the same warning of a linter
INTENDED = re.compile(r"#.*(noqa: .*F821|name-defined|undefined-variable)")
# ways to change the names of a module without assigning them
UNSEEN = {"f_globals", "__globals__", "modules", "_convert_"}
UNSEEN_NAMES = {"globals", "exec", "execfile", "__builtins__", "builtins"}
COMPREHENSIONS = {
    ast.ListComp: "listcomp", ast.SetComp: "setcomp", ast.DictComp: "dictcomp", ast.GeneratorExp: "genexpr",
}  # fmt: skip
# From Python 3.12 on the symbol table of a comprehension is merged with that of the scope around it; a
# generator expression still has its own.
INLINED = sys.version_info >= (3, 12)
BEFORE_FOR = re.compile(rb"(?:[\s)\\]|#[^\r\n]*)*")  # between the value of a comprehension and its `for`
Key = tuple[str, int]  # identifies a scope: its name and the line on which it starts


class Undefined(NamedTuple):
    """A name that raises NameError when its line runs."""

    name: str
    line: int
    text: str  # that line, stripped
    suggestion: str  # an import line, or a clause: "assign it first, e.g. batch_size = query.size(0)"

    @property
    def words(self) -> str:
        """The message for the learner."""
        imports = self.suggestion.startswith(("import ", "from "))
        advice = f"add at the top: {self.suggestion}" if imports else self.suggestion
        end = "" if advice.endswith("?") else "."
        return (
            f"`{self.name}` is used on line {self.line} but not defined there: `{self.text}`; {advice}{end}"
        )


def undefined_names(source: str) -> list[Undefined]:
    """Return the names of a file that are undefined where they are used: the first use of each, by line.

    The list is empty if the source does not parse, or may bind names in ways that the tree does not show.
    """
    tree, text = tree_of(source), readable(source)
    if tree is None or text is None or _binds_unseen(tree):
        return []
    try:
        with unwarned():
            tabled = _with_generators(text, tree) if INLINED else text
            unbound = _unbound(symtable.symtable(tabled, "<source>", "exec"))
        uses = _Uses(tree, unbound).uses
        early = list(used_too_early(tree, PREDEFINED))
    except (SyntaxError, RecursionError):
        return []
    first: dict[str, tuple[int, str]] = {}
    lines = source.splitlines()
    for name, node, inside in uses:
        if INTENDED.search(lines[node.lineno - 1]):
            continue
        if name not in first or node.lineno < first[name][0]:
            first[name] = node.lineno, suggestion_for(name, tree, inside, bound=_module_names(tree))
    for name, line, bound_on in early:
        if name not in first:
            first[name] = line, f"it is assigned only later, on line {bound_on}: move that above"
    undefined = [Undefined(name, line, text_of(source, line), do) for name, (line, do) in first.items()]
    return sorted(undefined, key=lambda entry: (entry.line, entry.name))


def _binds_unseen(tree: ast.Module) -> bool:
    """Return True if names may be bound in ways that the tree does not show, such as `import *`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            return True
        if isinstance(node, ast.Name) and node.id in UNSEEN_NAMES:
            return True
        if isinstance(node, ast.Attribute) and node.attr in UNSEEN:
            return True
        if isinstance(node, ast.Call) and not node.args and dotted(node.func) in ("vars", "locals"):
            return True
    return False


def _with_generators(text: str, tree: ast.Module) -> str:
    """Return the text with each comprehension written as a generator: `(x for x in y)` for `[x for x in y]`.

    Both look names up in the same way, and lines stay where they are.
    """
    written = text.encode()  # the tree counts bytes
    starts = [0]
    for line in written.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    edits: list[tuple[int, int, bytes]] = []  # start, end, replacement
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


def _unbound(top: symtable.SymbolTable) -> dict[Key, set[str]]:
    """Return for each scope the global names that it reads and nothing binds."""
    tables = list(_tables(top))
    bound = set(PREDEFINED)
    for table in tables:
        for symbol in table.get_symbols():
            if _binds(symbol) and (table is top or symbol.is_declared_global()):
                bound.add(symbol.get_name())
    unbound: dict[Key, set[str]] = {}
    elsewhere: dict[Key, set[str]] = {}  # two lambdas on one line share a key
    for table in tables:
        key = _key(table.get_name(), 0 if table is top else table.get_lineno())
        for symbol in table.get_symbols():
            name = symbol.get_name()
            # is_global is wrong in a function that is called "top", like the module's table
            own = table is not top and _binds(symbol) and not symbol.is_declared_global()
            if own or not symbol.is_global():
                elsewhere.setdefault(key, set()).add(name)
            elif symbol.is_referenced() and name not in bound:
                unbound.setdefault(key, set()).add(name)
    return {key: names - elsewhere.get(key, set()) for key, names in unbound.items()}


def _key(name: str, line: int) -> Key:
    return name.strip("<>"), line


class _Uses(ast.NodeVisitor):
    """Collect the uses of unbound names, each with the definitions around it."""

    def __init__(self, tree: ast.Module, unbound: dict[Key, set[str]]) -> None:
        self.unbound = unbound
        self.scope: list[Key] = [("top", 0)]
        self.inside: list[Definition] = []
        self.uses: list[tuple[str, ast.Name, tuple[Definition, ...]]] = []
        lazy = any(
            isinstance(node, ast.ImportFrom)
            and node.module == "__future__"
            and any(alias.name == "annotations" for alias in node.names)
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
            self.uses.append((node.id, node, tuple(self.inside)))

    def visit_FunctionDef(self, node: Function) -> None:
        spec = node.args
        self.each(
            [
                *node.decorator_list,
                *spec.defaults,
                *(default for default in spec.kw_defaults if default is not None),
            ]
        )
        if self.eager_annotations:
            self.each(
                [
                    parameter.annotation
                    for parameter in parameters_of(node)
                    if parameter.annotation is not None
                ]
            )
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
        self.each(
            [*node.args.defaults, *(default for default in node.args.kw_defaults if default is not None)]
        )
        self.enter("lambda", node.lineno, [node.body])

    def comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        first, *others = node.generators
        self.visit(first.iter)  # evaluated in the scope outside
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
    """Return the statements up to the first `raise` or `return`; those after it never run."""
    ends = [i for i, node in enumerate(body) if isinstance(node, (ast.Raise, ast.Return))]
    return body[: ends[0] + 1] if ends else body


def _module_names(tree: ast.Module) -> set[str]:
    """Return the names that the module binds outside its functions and classes."""
    names = {node.name for node in tree.body if isinstance(node, DEFINITIONS)}
    for node in inner_nodes(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= imported_names(node)
    return names


# What a file does only when it is run as a script

HARMLESS = frozenset("int float bool str min max len range round dict list tuple set".split())
TENSORS = frozenset("torch np numpy nn F".split())  # what is made with these is data or a module
INNER = frozenset("weights scores attn attention out output qkv".split())  # computed by forward
NOTE = "assigned only under __main__; assigned in the same way before the code was built: {names}"


def names_under_main(source: str) -> set[str]:
    """Return the names that are bound only under `if __name__ == "__main__":`."""
    tree = tree_of(source)
    if tree is None:
        return set()
    inside = {name for body in _bodies(tree) for node in body for name in _bound_by(node)}
    outside = {name for node in tree.body if not is_main(node) for name in _bound_by(node)}
    return inside - outside


def settings_under_main(source: str) -> set[str]:
    """Return the names bound only under `__main__` that are no tensors, inputs or steps of attention."""
    tree = tree_of(source)
    if tree is None:
        return set()
    settings: set[str] = set()
    for body in _bodies(tree):
        for node in body:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                continue
            if not {name.id for name in nodes(node.value, ast.Name)} & TENSORS:
                settings |= _bound_by(node)
    return {
        name for name in settings & names_under_main(source) if input_word(name) is None and name not in INNER
    }


def set_as_under_main(module: ModuleType, source: str) -> list[str]:
    """Run the plain assignments under `__main__` to names that definitions read; return these names.

    An assignment is plain if it uses names, numbers and strings and calls at most harmless builtins.
    """
    tree = tree_of(source)
    wanted = names_under_main(source)
    if tree is None or not wanted:
        return []
    read = set[str]().union(*(loaded_names(top) for top in tree.body if isinstance(top, DEFINITIONS)))
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
            except Exception:  # it needs a name that was not set; the code that reads it reports that
                continue
            done += sorted(names & read)
    return done


def _bodies(tree: ast.Module) -> list[list[ast.stmt]]:
    return [node.body for node in tree.body if isinstance(node, ast.If) and is_main(node)]


def _bound_by(node: ast.stmt) -> set[str]:
    """Return the names that a statement binds; for a definition, its own name only."""
    if isinstance(node, DEFINITIONS):
        return {node.name}
    imported = (imported_names(part) for part in nodes(node, (ast.Import, ast.ImportFrom)))
    return stored_names(node).union(*imported)


def _is_plain(node: ast.stmt) -> bool:
    """Return True for an assignment that calls at most harmless builtins."""
    if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    functions = [call.func for call in nodes(node, ast.Call)]
    return all(isinstance(target, (ast.Name, ast.Tuple)) for target in targets) and all(
        isinstance(function, ast.Name) and function.id in HARMLESS for function in functions
    )
