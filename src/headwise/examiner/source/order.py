"""Names used before the line that binds them: certain to be unbound, whatever the branches do.

Without a loop around both, a program only moves down the page: what is bound further down is not bound yet.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from .parsed import Function

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
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _too_early(node.body, shared | _parameters(node))


def _parameters(node: Function) -> set[str]:
    spec = node.args
    arguments = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg]
    return {one.arg for one in arguments if one is not None}


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
