"""What a file does only when it is run as a script, under `if __name__ == "__main__":`.

Sizes that its classes read are often set there. Whoever runs the file has them; who imports it has not.
"""

from __future__ import annotations

import ast
from types import ModuleType

from ..examine.words import input_word
from .parsed import DEFINITIONS, tree_of

HARMLESS = frozenset("int float bool str min max len range round dict list tuple set".split())
TENSORS = frozenset("torch np numpy nn F".split())  # what is made with these is data, or a module
INNER = frozenset("weights scores attn attention out output qkv".split())  # what forward computes itself
NOTE = "set under __main__, and set so before it was built: {names}"


def names_under_main(source: str) -> set[str]:
    """Names that are bound only there."""
    tree = tree_of(source)
    if tree is None:
        return set()
    inside = {name for body in _bodies(tree) for node in body for name in _bound(node)}
    outside = {name for node in tree.body if not _is_main(node) for name in _bound(node)}
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
                found |= _bound(node)
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
            names = _bound(node)
            if not _is_plain(node) or not names <= wanted:
                continue
            try:
                exec(compile(ast.Module([node], []), "<main>", "exec"), vars(module))
            except Exception:  # it wants what was not set: whoever reads it says so
                continue
            done += sorted(names & read)
    return done


def _bodies(tree: ast.Module) -> list[list[ast.stmt]]:
    return [node.body for node in tree.body if isinstance(node, ast.If) and _is_main(node)]


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and any(
        isinstance(one, ast.Name) and one.id == "__name__" for one in ast.walk(node.test)
    )


def _bound(node: ast.stmt) -> set[str]:
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
