"""What the learner's own names say of the second thing a call returns."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .lines import definition_at
from .parsed import tree_of

SCORES = re.compile(
    r"scores?|logits?|qk\b|sims?\b|similarit|energy|dots?\b|raw|presoftmax|affinit", re.IGNORECASE
)
WEIGHTS = re.compile(r"weights?|attn|attention|att\b|atts\b|probs?|alphas?|maps?\b", re.IGNORECASE)
TOLD = re.compile(r"(attention|attn)[ _]?(weights?|probabilit\w*|probs?|maps?)", re.IGNORECASE)
ASKED = re.compile(r"(need|return|output|with|get)_?(attn_|attention_)?(weights|probs|attn|attentions?)$")


def says_weights(source: str, first_line: int | None) -> bool:
    """Whether what is returned beside the output is called weights: by its name, by the argument that asks
    for it or by what is written about it. What is called scores is not."""
    for door in _doors(source, first_line):
        if any(SCORES.search(name) is None and WEIGHTS.search(name) for name in _returned(door)):
            return True
        every = (*door.args.args, *door.args.kwonlyargs)
        if any(ASKED.match(one.arg) for one in every) or TOLD.search(ast.get_docstring(door) or ""):
            return True
    return False


def _doors(source: str, first_line: int | None) -> Iterator[ast.FunctionDef]:
    """The function itself, or the class's forward, its own or that of a parent in the same file."""
    tree = tree_of(source)
    node = None if tree is None or first_line is None else definition_at(tree, first_line)
    seen: set[str] = set()
    while tree is not None and isinstance(node, ast.ClassDef) and node.name not in seen:
        seen.add(node.name)
        own = [one for one in node.body if isinstance(one, ast.FunctionDef)]
        forward = [one for one in own if one.name in ("forward", "__call__")]
        if forward:
            yield from forward
            return
        parents = {one.id for one in node.bases if isinstance(one, ast.Name)}
        classes = (one for one in tree.body if isinstance(one, ast.ClassDef))
        node = next((one for one in classes if one.name in parents), None)
    if isinstance(node, ast.FunctionDef):
        yield node


def _returned(door: ast.FunctionDef) -> Iterator[str]:
    """The names of what is returned beside the first: attn of `attn`, of `self.attn`, of `{"attn": ..}`."""
    for one in ast.walk(door):
        if not isinstance(one, ast.Return) or one.value is None:
            continue
        if isinstance(one.value, ast.Tuple):
            yield from (name for part in one.value.elts[1:] if (name := _name(part)))
        elif isinstance(one.value, ast.Dict):
            yield from (str(key.value) for key in one.value.keys[1:] if isinstance(key, ast.Constant))


def _name(part: ast.expr) -> str:
    while isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and not part.args:
        part = part.func.value  # .detach(), .clone()
    if isinstance(part, ast.Name):
        return part.id
    return part.attr if isinstance(part, ast.Attribute) else ""
