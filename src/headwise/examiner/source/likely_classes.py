"""Which class or function of a file is the multi-head attention to check."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import NamedTuple

from .parsed import Definition, dotted, tree_of

__all__ = ["Candidate", "candidates"]

ENOUGH = 4.0  # a softmax alone is a classifier; with a product and projections it is attention
NAMED = (
    (r"multi_?head(ed)?|mha(?![a-z])|multi_?query|grouped_?query|\bgqa|\bmqa", 6.0),
    (r"attention|attn", 4.0),
    (r"self|causal|cross|masked", 0.5),
    (r"(?<!multi)(?<!multi_)(?<![a-z])head(?!s|ed)", 1.0),
)
# what holds attention, or looks at it, or is a part of it
OTHERWISE = (
    (r"block|layer(?!ed)|encoder|decoder|transformer|model|gpt|bert|net(work)?$|vit$", 5.0),
    (r"feed_?forward|mlp|embed|posi?tion|norm$|dataset|config|trainer|tokeniz", 6.0),
    (r"test|main|demo|example|plot|visuali[sz]e|show|check|compare|benchmark|train", 8.0),
    (r"single|scaled_?dot|dot_?product|bahdanau|additive|luong", 2.0),
    (r"mask|weights$|scores?$|split_?heads|merge_?heads|combine_?heads", 3.0),
)
PRODUCTS = {"matmul", "bmm", "einsum", "baddbmm", "mm", "tensordot"}
LAYERS = {"Linear", "LazyLinear", "Parameter", "Conv1d", "Conv1D", "Dense", "NonDynamicallyQuantizableLinear"}
HEADS = re.compile(r"(?i)(n|num|number_of|nb)?_?(attention_?)?heads?|nh|n_?h|h")
INPUTS = re.compile(
    r"(?i)(x|q|k|v|query|key|value|quer(y|ies)|keys|values|inputs?|hidden_states|src|tensor)_?\w{0,3}"
)


class Candidate(NamedTuple):
    """A class or function that may be meant."""

    name: str
    kind: str  # "class" or "function"
    first_line: int  # its decorators counted
    last_line: int
    score: float


def candidates(source: str) -> list[Candidate]:
    """What looks like multi-head attention, best first; of equals the later one, usually the last attempt.

    Judged by its name and by what it does: projections, heads, a product, a softmax or torch's own attention.
    Empty where nothing comes near.
    """
    tree = tree_of(source)
    if tree is None:
        return []
    definitions = {
        node.name: node
        for node in tree.body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    }
    marks = {name: _mark(node) for name, node in definitions.items()}
    used_by = {
        name: {other for other, node in definitions.items() if other != name and _mentions(node, name)}
        for name in marks
    }
    found = []
    for name, node in definitions.items():
        score = _score(name, marks, used_by)
        if score >= ENOUGH:
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            found.append(Candidate(name, kind, first, node.end_lineno or node.lineno, score))
    return sorted(found, key=lambda one: (-one.score, -one.first_line))


class _Mark(NamedTuple):
    """What one definition does by itself."""

    by_name: float
    runs: bool  # can be called with tensors: a class with forward, a function with arguments
    softmax: bool
    product: bool
    torch_attention: bool  # the function
    torch_class: bool
    projections: bool
    heads: bool
    is_class: bool

    @property
    def does(self) -> float:
        weighs = 3.0 if self.torch_attention else 1.5 * self.softmax + 1.0 * self.product
        return weighs + 1.5 * self.projections + 1.5 * self.heads + 1.0 * self.torch_class


def _mark(node: Definition) -> _Mark:
    calls = [
        dotted(one.func) or getattr(one.func, "attr", "")
        for one in ast.walk(node)
        if isinstance(one, ast.Call)
    ]
    last = {call.rpartition(".")[2] for call in calls}
    words = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    words |= {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
    words |= {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}
    matrix = any(isinstance(one, ast.BinOp) and isinstance(one.op, ast.MatMult) for one in ast.walk(node))
    return _Mark(
        by_name=_by_name(node.name),
        runs=_runs(node),
        softmax=bool(last & {"softmax", "Softmax", "log_softmax", "exp"}),
        product=matrix or bool(last & PRODUCTS),
        torch_attention="scaled_dot_product_attention" in last,
        torch_class="MultiheadAttention" in last,
        projections=bool(last & LAYERS)
        or "linear" in last
        or any(re.match(r"(?i)w_?[qkvo]$", one) for one in words),
        heads=any(HEADS.fullmatch(one) for one in words),
        is_class=isinstance(node, ast.ClassDef),
    )


def _by_name(name: str) -> float:
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    points: Callable[[tuple[tuple[str, float], ...]], float] = lambda table: sum(  # noqa: E731
        worth for pattern, worth in table if re.search(pattern, plain)
    )
    return points(NAMED) - points(OTHERWISE)


def _runs(node: Definition) -> bool:
    if not isinstance(node, ast.ClassDef):
        return any(INPUTS.fullmatch(one.arg) for one in (*node.args.posonlyargs, *node.args.args))
    methods = {one.name for one in node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))}
    inherits = any(dotted(base).rpartition(".")[2] not in ("Module", "object", "") for base in node.bases)
    return bool(methods & {"forward", "__call__"}) or inherits


def _mentions(node: Definition, name: str) -> bool:
    return any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(node))


def _score(name: str, marks: dict[str, _Mark], used_by: dict[str, set[str]]) -> float:
    mark = marks[name]
    if not mark.runs:
        return 0.0
    does = mark.does
    for (
        other,
        users,
    ) in used_by.items():  # what a part of it does counts, unless that part is the whole already
        if name in users and "multi" not in other.lower() and marks[other].runs:
            does = max(does, min(marks[other].does, 4.0) + 1.5 * mark.heads + 1.0 * mark.projections)
    if does < 2.0 and mark.by_name < 4.0:
        return 0.0
    helper = 1.5 if not mark.is_class and used_by[name] else 0.0
    return round(mark.by_name + does + 0.5 * mark.is_class - helper, 2)
