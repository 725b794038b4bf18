"""Classes that are a part of something, or something around torch's own: what stands beside them says which.

BERT keeps the output projection of its attention in a class of its own; a module that holds one
nn.MultiheadAttention and no weights beside it leaves the work to that.
"""

from __future__ import annotations

import ast
import re

from torch import nn

from ..designs import Design
from ..source.parsed import unwarned
from .pieces import path_role


def torch_inside(body: object) -> Design | None:
    """One nn.MultiheadAttention inside, and no weights beside it but those of norms."""
    if not isinstance(body, nn.Module) or isinstance(body, nn.MultiheadAttention):
        return None
    inside = [(path, one) for path, one in body.named_modules() if isinstance(one, nn.MultiheadAttention)]
    if len(inside) != 1:
        return None
    own = {id(one) for one in inside[0][1].parameters()}
    beside = [one for one in body.parameters() if id(one) not in own and one.ndim > 1]
    if beside:
        return None
    return Design("torch inside", f"a wrapper: nn.MultiheadAttention ({inside[0][0]}) does the work")


ELSEWHERE = re.compile(  # what a docstring says of the projection that is not here
    r"(?is)\b(\w*(?:Self|Attention)Output)\b"
    r"|(?:output|dense|final|last)\W+(?:projection|layer|linear)"
    r"[^.]*?\b(?:outside|elsewhere|lives in|caller|block)\b"
)


def projected_elsewhere(name: str, source: str | None) -> Design | None:
    """Where another class of the file applies the output projection to what this one returns."""
    try:
        with unwarned():
            tree = ast.parse(source or "")
    except SyntaxError:
        return None
    classes = {one.name: one for one in tree.body if isinstance(one, ast.ClassDef)}
    made = {one: _made_in(node) for one, node in classes.items()}
    outs = [one for one in classes if "output" in one.lower() and "Linear" in made[one].values()]
    for owner, parts in made.items():
        holds = {attribute for attribute, what in parts.items() if what == name}
        if owner == name or not holds:
            continue
        for attribute, what in parts.items():
            if what in outs or (what == "Linear" and path_role(attribute) == "o"):
                place = what if what in outs else f"{owner}.{attribute}"
                return _split(place)
    if re.search(r"selfattention", name.lower()) and outs:
        return _split(outs[0])
    said = ELSEWHERE.search(ast.get_docstring(classes[name]) or "") if name in classes else None
    return _split(said[1] or "the code around it") if said else None


def _split(place: str) -> Design:
    words = f"no output projection inside: {place} has it, as BERT splits attention in two classes"
    return Design("split", words)


def _made_in(node: ast.ClassDef) -> dict[str, str]:
    """self.attribute -> the class it is made of."""
    found: dict[str, str] = {}
    for one in ast.walk(node):
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.Call):
            called = one.value.func
            what = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            for target in one.targets:
                if isinstance(target, ast.Attribute):
                    found[target.attr] = what
    return found
