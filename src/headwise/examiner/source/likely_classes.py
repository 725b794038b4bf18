"""Which class or function of a file is the multi-head attention to check: the one place that decides it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ...errors import ArgumentError
from .parsed import DEFINITIONS, Definition, dotted, tree_of

ENOUGH = 3.0  # two products and a softmax by themselves
# What the code does weighs more than what it is called: names are in any language, or "Mixer".
NAMED = (
    (r"multi_?head(ed)?|mha(?![a-z])|mhsa|multi_?query|grouped_?query|\bgqa|\bmqa", 2.5),
    (r"attention|attn", 2.0),
)
# what holds attention, or looks at it, or is a part of it
OTHERWISE = (
    (r"block|layer(?!ed)|encoder|decoder|transformer|model|gpt|bert|net(work)?$|vit$", 2.5),
    (r"feed_?forward|mlp|embed|posi?tion|norm$|dataset|config|trainer|tokeniz", 4.0),
    (r"^test|main|demo|example|plot|visuali[sz]e|show|check|compare|benchmark|train", 8.0),
    (r"single|scaled_?dot|dot_?product|bahdanau|additive|luong", 1.5),
    (r"mask$|mask_|weights$|scores?$|split_?heads|merge_?heads|combine_?heads", 3.0),
)
STEP = re.compile(
    r"^softmax|_softmax$|(split|merge|combine|join|concat)\w*_heads|(causal|padding|look_?ahead|subsequent|attention)\w*_mask"
)
PART, LARGER = 3.0, 5.0  # what a part of the whole loses, and what has a whole inside

PRODUCTS = {"matmul", "bmm", "einsum", "baddbmm", "mm", "tensordot", "dot"}
SOFTMAX = {"softmax", "Softmax", "softmax_", "log_softmax", "exp", "exp_", "exp2"}
LAYERS = {"Linear", "LazyLinear", "Parameter", "Conv1d", "Conv1D", "Conv2d", "Dense", "linear"}
DRAWN = {
    "randn",
    "rand",
    "normal",
    "uniform",
    "standard_normal",
    "empty",
    "xavier_uniform_",
    "kaiming_uniform_",
}
WEIGHT = re.compile(r"(?i)(w|weights?)(_?(q|k|v|o|qkv|kv|in|out|query|key|value|output)(_?proj)?)?")
ANY_WEIGHT = re.compile(r"(?i)w|weights?")  # of a projection, or of attention
HEADS = re.compile(r"(?i)(n|num|number_of|nb|no_of)?_?(attention_?|attn_?)?heads?|nh|n_?h|h")
CUTS = {"view", "reshape", "unflatten", "rearrange", "chunk", "split", "Rearrange"}
TURNS = {"transpose", "permute", "swapaxes", "movedim", "rearrange", "einsum", "chunk", "split", "Rearrange"}
JOINS = {"cat", "concat", "concatenate", "hstack", "stack", "sum"}
TORCH = {"scaled_dot_product_attention", "MultiheadAttention", "multi_head_attention_forward"}
SEVERAL = (ast.ListComp, ast.GeneratorExp, ast.List, ast.For)
BESIDE = {"Embedding", "CrossEntropyLoss", "ReLU", "GELU", "SiLU", "relu", "gelu", "silu", "cross_entropy"}


class Candidate(NamedTuple):
    """A class or function that may be meant."""

    name: str
    kind: str  # "class" or "function"
    first_line: int  # its decorators counted
    last_line: int
    score: float


def candidates(source: str) -> list[Candidate]:
    """What looks like multi-head attention, best first; of equals the later one, usually the last attempt.

    Judged by what it does, itself and through what it uses of the file: a softmax between two products,
    projections, heads; then by its name. What is a part of another (a softmax, one head) and what has
    another inside (an encoder layer) comes after that other. Empty where nothing comes near.
    """
    definitions, works = _read(source)
    found = []
    for name, node in definitions.items():
        score = works.score(name)
        if score >= ENOUGH:
            found.append(_candidate(node, score))
    return sorted(found or _steps(definitions), key=lambda one: (-one.score, -one.first_line))


def plausible(source: str) -> tuple[list[Candidate], list[Candidate]]:
    """Those that are judged where no name is given, the best first; and the candidates beside them.

    Several are judged where each is a whole of its own: a class with projections, heads and a softmax, which
    no other takes for a part or derives from, and which has no other inside.
    """
    found = candidates(source)
    _, works = _read(source)
    judged = found[:1] + [one for one in found[1:] if found[0].kind == "class" and works.is_whole(one.name)]
    return judged, [one for one in found if one not in judged]


def line_of_name(source: str, name: str) -> int | None:
    """The line on which the class or function of this name begins, or a method: "MyAttention.split"."""
    tree = tree_of(source)
    body: list[ast.stmt] = [] if tree is None else tree.body
    line = None
    for part in name.split("."):
        named = [node for node in _definitions(body) if node.name == part]
        if not named:
            return None
        line, body = named[-1].lineno, named[-1].body
    return line


def _read(source: str) -> tuple[dict[str, Definition], _File]:
    """The definitions of a file by name, and what each does; none where it does not parse."""
    tree = tree_of(source)
    if tree is None:
        return {}, _File({})
    definitions = {node.name: node for node in _definitions(tree.body)}  # of one name the last: it is bound
    aliases = {
        one.asname: one.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for one in node.names
        if one.asname
    }
    return definitions, _File({name: _work_of(node, aliases) for name, node in definitions.items()})


def _candidate(node: Definition, score: float) -> Candidate:
    kind = "class" if isinstance(node, ast.ClassDef) else "function"
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    return Candidate(node.name, kind, first, node.end_lineno or node.lineno, score)


def _steps(definitions: dict[str, Definition]) -> list[Candidate]:
    """Single steps of attention, for a file that has nothing more."""
    plain = {name: re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower() for name in definitions}
    return [
        _candidate(node, 1.0)
        for name, node in definitions.items()
        if _runs(node) and STEP.search(plain[name])
    ]


def likeliest(path: Path, source: str) -> str:
    """The name of the best.

    Raises:
        ArgumentError: nothing comes near.
    """
    found = candidates(source)
    if not found:
        raise ArgumentError(
            f"file must define attention to check: nothing in {path} looks like it; "
            "name the class or function, FILE:NAME"
        )
    return found[0].name


def _definitions(body: list[ast.stmt]) -> Iterator[Definition]:
    """What a module binds when it is imported: also under `if` and `try`, but not what only a script runs."""
    for node in body:
        if isinstance(node, DEFINITIONS):
            yield node
        elif isinstance(node, ast.If):
            script = any(isinstance(one, ast.Name) and one.id == "__name__" for one in ast.walk(node.test))
            yield from _definitions([] if script else node.body)
            yield from _definitions(node.orelse)
        elif isinstance(node, ast.Try):
            for part in (node.body, *(one.body for one in node.handlers), node.orelse, node.finalbody):
                yield from _definitions(part)
        elif isinstance(node, ast.With):
            yield from _definitions(node.body)


@dataclass(frozen=True)
class _Work:
    """What one definition does by itself."""

    by_name: float
    is_class: bool
    runs: bool  # can be called with tensors: a class with forward, a function with arguments
    uses: frozenset[str]  # names of elsewhere in it
    bases: frozenset[str]
    many: frozenset[str]  # those in lists and loops: made several times
    softmax: bool
    products: int
    torch_attention: bool  # torch's function, or its class
    projections: bool
    heads: bool
    joins: bool
    beside: bool  # holds what attention has no use for

    def through(self, part: _Work) -> _Work:
        """With what a part does for it."""
        return replace(
            self,
            softmax=self.softmax or part.softmax,
            products=self.products + part.products,
            torch_attention=self.torch_attention or part.torch_attention,
            projections=self.projections or part.projections,
            heads=self.heads or part.heads,
        )

    @property
    def attends(self) -> bool:
        return self.torch_attention or (self.softmax and self.products >= 2)

    @property
    def whole(self) -> bool:
        return self.attends and self.projections


def _work_of(node: Definition, aliases: dict[str, str]) -> _Work:
    nodes = list(ast.walk(node))
    loaded = {one.id for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
    bound = {one.id for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    bound |= {one.arg for one in nodes if isinstance(one, ast.arg)}
    attributes = {one.attr for one in nodes if isinstance(one, ast.Attribute)}
    calls = [
        (dotted(one.func) or getattr(one.func, "attr", "")).rpartition(".")[2]
        for one in nodes
        if isinstance(one, ast.Call)
    ]
    calls = [aliases.get(one, one) for one in calls]
    called, words = set(calls), loaded | bound | attributes
    is_class = isinstance(node, ast.ClassDef)
    # What a class computes and calls `weights` is a softmax, not a projection's weight. A function whose
    # parameters are given may have no other name that tells of projections.
    stored = {one.id for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    stored |= {one.attr for one in nodes if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)}
    computed = {word for word in stored if is_class and ANY_WEIGHT.fullmatch(word)}
    products = sum(one in PRODUCTS for one in calls)
    products += sum(isinstance(one, ast.BinOp) and isinstance(one.op, ast.MatMult) for one in nodes)
    repeated = [one for one in nodes if isinstance(one, SEVERAL)]
    return _Work(
        by_name=_by_name(node.name),
        is_class=is_class,
        runs=_runs(node),
        uses=frozenset(loaded - bound),
        bases=frozenset(dotted(one) for one in node.bases) if isinstance(node, ast.ClassDef) else frozenset(),
        many=frozenset(one.id for part in repeated for one in ast.walk(part) if isinstance(one, ast.Name)),
        softmax=bool(called & SOFTMAX),
        products=products,
        torch_attention=bool(called & TORCH),
        projections=bool(called & LAYERS or "MultiheadAttention" in called)
        or any(WEIGHT.fullmatch(one) for one in words - computed)
        or (is_class and bool(called & DRAWN)),
        heads=any(HEADS.fullmatch(one) for one in words) or bool(called & CUTS and called & TURNS),
        joins=bool(called & JOINS),
        beside=bool(called & BESIDE),
    )


def _by_name(name: str) -> float:
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    worth = max((points for pattern, points in NAMED if re.search(pattern, plain)), default=0.0)
    return worth - sum(points for pattern, points in OTHERWISE if re.search(pattern, plain))


def _runs(node: Definition) -> bool:
    if not isinstance(node, ast.ClassDef):
        given = (*node.args.posonlyargs, *node.args.args)
        return bool(given) and given[0].arg != "self"  # with it: a method that somebody puts into a class
    methods = {one.name for one in node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))}
    inherits = any(dotted(base).rpartition(".")[2] not in ("Module", "object", "") for base in node.bases)
    return bool(methods & {"forward", "__call__", "call"}) or inherits


class _File:
    """The definitions of a file, and who is a part of whom."""

    def __init__(self, own: dict[str, _Work]) -> None:
        self.own = own
        self.reach = {name: self._reach(name, frozenset({name})) for name in own}

    def _reach(self, name: str, seen: frozenset[str]) -> _Work:
        work = self.own[name]
        for part in sorted(work.uses & self.own.keys() - seen):
            work = work.through(self._reach(part, seen | {part}))
        return work

    def score(self, name: str) -> float:
        """How much it looks like the one that is meant; 0: not at all."""
        own, reach = self.own[name], self.reach[name]
        if not own.runs or not (reach.attends or own.by_name >= 2.0):
            return 0.0
        score = own.by_name + 3.0 * reach.attends + 1.5 * reach.projections + 1.5 * reach.heads
        score += 0.5 * own.is_class - 1.0 * own.beside
        others = [other for other in self.own if other != name]
        if any(self._uses(name, other) and self._stands_alone(other, name) for other in others):
            score -= LARGER
        if any(self._uses(other, name) and not self._stands_alone(name, other) for other in others):
            score -= PART
        return round(score, 2)

    def is_whole(self, name: str) -> bool:
        """Whether it is multi-head attention by itself, and neither a part of another nor its base."""
        own, reach = self.own[name], self.reach[name]
        if not (own.is_class and own.runs and reach.whole and reach.heads) or own.by_name < 0.0 or own.beside:
            return False
        for other in self.own:
            if other == name:
                continue
            is_part = self._uses(other, name) and not self._stands_alone(name, other)
            has_another = self._uses(name, other) and self._stands_alone(other, name)
            if is_part or has_another or (name in self.own[other].bases and self.reach[other].whole):
                return False
        return True

    def _uses(self, name: str, part: str) -> bool:
        """As a part: what a class inherits from is no part of it."""
        return self.own[name].runs and part in self.own[name].uses - self.own[name].bases

    def _stands_alone(self, part: str, name: str) -> bool:
        """Whether what `name` uses is the whole attention already, and not a piece of the one `name` is."""
        piece, whole = self.own[part], self.own[name]
        if not (piece.runs and self.reach[part].whole):
            return not self.reach[name].whole
        if not self.reach[name].whole or whole.by_name < 0.0 or whole.beside:
            return True
        if whole.is_class and whole.projections and not piece.is_class:
            return False  # the weights are the class's, the formula is written as a function
        several = part in whole.many and whole.joins
        return not (several and (not self.reach[part].heads or whole.by_name > piece.by_name))
