"""Switches that turn a causal mask on, whatever they are called.

They are found in the source: the conditions under which a triangle is made or used name parameters,
attributes or fields of a configuration. An instance built with the other value shows whether such a name is a
switch.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..source.parsed import source_of_definition, tree_of
from .subject import fields_of
from .vocabulary import FRAMEWORKS

TRIANGLES = frozenset(
    "tril tril_ triu triu_ tril_indices triu_indices generate_square_subsequent_mask".split()
)
TORCH_ARGUMENT = "is_causal"
NO_SWITCH = frozenset(("self", "training"))


def conditions_of(obj: Any) -> dict[str, list[object]]:
    """Return the names that decide about a causal mask -> the constants they are compared with."""
    if not inspect.isroutine(obj) and not isinstance(obj, type):
        obj = type(obj)
    try:
        return _conditions(obj)
    except TypeError:  # not hashable
        return {}


@functools.lru_cache(maxsize=32)
def _conditions(obj: Any) -> dict[str, list[object]]:
    owners = [obj] if not isinstance(obj, type) else obj.__mro__
    trees = []
    for owner in owners:
        if owner is object or (owner.__module__ or "").startswith(FRAMEWORKS):
            continue
        try:
            tree = tree_of(source_of_definition(owner))
        except (OSError, TypeError):
            continue
        trees += [] if tree is None else [tree]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    triangles = _triangle_names(nodes)
    switches: dict[str, list[object]] = {}
    for node in nodes:
        if isinstance(node, ast.If):
            parts: list[ast.AST] = [*node.body, *node.orelse]
        elif isinstance(node, ast.IfExp):
            parts = [node.body, node.orelse]
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg == TORCH_ARGUMENT:
                    _read(keyword.value, switches)
            continue
        else:
            continue
        if any(_mentions(part, triangles) for part in parts):
            _read(node.test, switches)
    for target, value in _copies(nodes):
        if target in switches:
            _read(value, switches)
    return {name: values for name, values in switches.items() if name not in NO_SWITCH}


def _mentions(node: ast.AST, names: set[str]) -> bool:
    """Return True if a variable or attribute inside the node has one of these names."""
    return any(_name(child) in names for child in ast.walk(node))


def _name(node: ast.AST) -> str:
    """Return the name of a variable or attribute, "" for any other node."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _triangle_names(nodes: list[ast.AST]) -> set[str]:
    """Return the names of triangles: functions that make them, variables and methods that use those."""
    names = set(TRIANGLES)
    for _ in range(3):
        before = len(names)
        for node in nodes:
            if isinstance(node, ast.Assign) and _mentions(node.value, names):
                names |= {_name(target) for target in node.targets} - {""}
            elif isinstance(node, ast.Call) and _name(node.func) == "register_buffer":
                first = node.args[0] if node.args else None
                if isinstance(first, ast.Constant) and _mentions(node, names):
                    names.add(str(first.value))
            elif isinstance(node, ast.FunctionDef) and node.name not in ("__init__", "forward", "__call__"):
                names |= {node.name} if _mentions(node, names) else set()
        if len(names) == before:
            break
    return names - {"scores", "attn", "x", "out", "weights"}


def _copies(nodes: list[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """Yield (name, value) of each assignment, the last first."""
    for node in reversed(nodes):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if _name(target):
                    yield _name(target), node.value


def _read(test: ast.expr, switches: dict[str, list[object]]) -> None:
    """Add the names in a condition to `switches`; sizes compared with < and > are none."""
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
    """Return the other values of a switch, from its value and the constants it is compared with."""
    if isinstance(now, bool):
        return [not now]
    others = [value for value in compared if value != now and isinstance(value, (str, bool))]
    if not others and (now is None or now == 0):
        return [True]
    return others


def instance_switches(body: object) -> list[tuple[object, str, object, list[object]]]:
    """Return (owner, name, value, compared constants) of the switches of an instance and its config."""
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
    """Return False for switches between ways to compute the same, such as `use_flash`."""
    return re.search(r"flash|sdpa|fused|compile|return|need|train", name.lower()) is None
