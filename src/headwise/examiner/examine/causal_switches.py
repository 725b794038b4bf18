"""Switches for a causal mask, under any name: what the source asks before it hides the future.

No list of words says which parameter, attribute or field of a configuration it is. The conditions under which
a triangle is made or used name it; an instance that is built with the switch thrown shows whether it is one.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..source.parsed import tree_of
from .subject import fields_of
from .vocabulary import FRAMEWORKS

TRIANGLES = frozenset(
    "tril tril_ triu triu_ tril_indices triu_indices generate_square_subsequent_mask".split()
)
ASKED_BY_TORCH = "is_causal"
NO_SWITCH = frozenset(("self", "training"))


def conditions_of(obj: Any) -> dict[str, list[object]]:
    """Names that decide whether the future is hidden -> the constants they are compared with."""
    if not inspect.isroutine(obj) and not isinstance(obj, type):
        obj = type(obj)
    try:
        return _conditions(obj)
    except TypeError:  # it cannot be kept
        return {}


@functools.lru_cache(maxsize=32)
def _conditions(obj: Any) -> dict[str, list[object]]:
    owners = [obj] if not isinstance(obj, type) else obj.__mro__
    trees = []
    for owner in owners:
        if owner is object or (owner.__module__ or "").startswith(FRAMEWORKS):
            continue
        try:
            tree = tree_of(inspect.getsource(owner))
        except (OSError, TypeError):
            continue
        trees += [] if tree is None else [tree]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    made = _made_of_triangles(nodes)
    switches: dict[str, list[object]] = {}
    for node in nodes:
        if isinstance(node, ast.If):
            parts: list[ast.AST] = [*node.body, *node.orelse]
        elif isinstance(node, ast.IfExp):
            parts = [node.body, node.orelse]
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg == ASKED_BY_TORCH:
                    _read(keyword.value, switches)
            continue
        else:
            continue
        if any(_speaks_of(part, made) for part in parts):
            _read(node.test, switches)
    for target, value in _copies(nodes):
        if target in switches:
            _read(value, switches)
    return {name: values for name, values in switches.items() if name not in NO_SWITCH}


def _speaks_of(node: ast.AST, names: set[str]) -> bool:
    return any(_name(child) in names for child in ast.walk(node))


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _made_of_triangles(nodes: list[ast.AST]) -> set[str]:
    """Names of triangles: functions that make them, what they are kept as, methods that use those."""
    names = set(TRIANGLES)
    for _ in range(3):
        before = len(names)
        for node in nodes:
            if isinstance(node, ast.Assign) and _speaks_of(node.value, names):
                names |= {_name(target) for target in node.targets} - {""}
            elif isinstance(node, ast.Call) and _name(node.func) == "register_buffer":
                first = node.args[0] if node.args else None
                if isinstance(first, ast.Constant) and _speaks_of(node, names):
                    names.add(str(first.value))
            elif isinstance(node, ast.FunctionDef) and node.name not in ("__init__", "forward", "__call__"):
                names |= {node.name} if _speaks_of(node, names) else set()
        if len(names) == before:
            break
    return names - {"scores", "attn", "x", "out", "weights"}


def _copies(nodes: list[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """(name, value) of each assignment, the last first: what is kept was asked for before."""
    for node in reversed(nodes):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if _name(target):
                    yield _name(target), node.value


def _read(test: ast.expr, switches: dict[str, list[object]]) -> None:
    """Add the names of a condition; those of sizes that are compared by more and less are none."""
    if isinstance(test, ast.Name):
        switches.setdefault(test.id, [])
    elif isinstance(test, ast.Attribute):
        switches.setdefault(test.attr, [])
    elif isinstance(test, ast.Subscript) and isinstance(test.slice, ast.Constant):
        switches.setdefault(str(test.slice.value), [])
    elif isinstance(test, ast.BoolOp):
        for operand in test.values:
            _read(operand, switches)
    elif isinstance(test, ast.UnaryOp):
        _read(test.operand, switches)
    elif isinstance(test, ast.Call):  # bool(x), getattr(config, "x", False), config.get("x")
        for argument in test.args:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                switches.setdefault(argument.value, [])
            elif _name(test.func) == "bool":
                _read(argument, switches)
    elif isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Eq, ast.NotEq, ast.In)):
        constants = [child.value for child in ast.walk(test) if isinstance(child, ast.Constant)]
        names: dict[str, list[object]] = {}
        _read(test.left, names)
        for name in names:
            switches.setdefault(name, []).extend(constants)


def other_values(now: object, compared: list[object]) -> list[bool | str]:
    """Other values for a switch that is this now."""
    if isinstance(now, bool):
        return [not now]
    others = [value for value in compared if value != now and isinstance(value, (str, bool))]
    if not others and (now is None or now == 0):
        return [True]
    return others


def instance_switches(body: object) -> list[tuple[object, str, object, list[object]]]:
    """(what keeps it, its name, what it is, what it is compared with), of an instance and its config."""
    names = conditions_of(body)
    owners = list(body.modules()) if isinstance(body, nn.Module) else [body]
    switches = []
    for owner in owners:
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            inside = fields_of(value) if not isinstance(value, (nn.Module, dict, tuple)) else []
            switches += [(value, field, now) for field, now in inside] + [(owner, name, value)]
    return [
        (*switch, names[switch[1]])
        for switch in switches
        if switch[1] in names and isinstance(switch[2], (bool, str))
    ]


def may_change_output(name: str) -> bool:
    """Whether another value asks for something else, and not for another way to compute the same."""
    return re.search(r"flash|sdpa|fused|compile|return|need|train", name.lower()) is None
