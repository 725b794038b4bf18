"""Which class or function of a file is the multi-head attention to check: the one place that decides it."""

from __future__ import annotations

import ast
import importlib.util
import json
import linecache
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ...errors import ArgumentError
from .parsed import (
    DEFINITIONS,
    Definition,
    Function,
    bound_in,
    dotted,
    is_main,
    methods_of,
    readable,
    tree_of,
    unwarned,
)

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
    (r"single|bahdanau|additive|luong", 1.5),
    (r"mask$|mask_|weights$|scores?$|split_?heads|merge_?heads|combine_?heads", 3.0),
)
STEP = re.compile(
    r"^softmax|_softmax$|(split|merge|combine|join|concat)\w*_heads|(causal|padding|look_?ahead|subsequent|attention)\w*_mask"
)
# An exercise shows what is wrong, or slow, beside what is asked for.
SHOWN = re.compile(r"(?i)buggy|broken|wrong|bad|naive|slow|original|without|no_?scale|unscaled|reference")
MOST_JUDGED = 6  # of one file
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
    judged = found[:1]
    if found and found[0].kind == "class":
        judged += [one for one in found[1:] if works.is_whole(one.name) and not SHOWN.search(one.name)]
    judged = judged[:MOST_JUDGED]
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
    return [
        _candidate(node, 1.0)
        for name, node in definitions.items()
        if _runs(node) and STEP.search(_underscored(name))
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
            yield from _definitions([] if is_main(node) else node.body)
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
    assigned = {one.id for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    bound = assigned | {one.arg for one in nodes if isinstance(one, ast.arg)}
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
    kept = {one.attr for one in nodes if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)}
    computed = {word for word in assigned | kept if is_class and ANY_WEIGHT.fullmatch(word)}
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


def _underscored(name: str) -> str:
    """multi_head of MultiHead."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _by_name(name: str) -> float:
    plain = _underscored(name)
    worth = max((points for pattern, points in NAMED if re.search(pattern, plain)), default=0.0)
    return worth - sum(points for pattern, points in OTHERWISE if re.search(pattern, plain))


def _runs(node: Definition) -> bool:
    if not isinstance(node, ast.ClassDef):
        given = (*node.args.posonlyargs, *node.args.args)
        return bool(given) and given[0].arg != "self"  # with it: a method that somebody puts into a class
    inherits = any(dotted(base).rpartition(".")[2] not in ("Module", "object", "") for base in node.bases)
    return bool(methods_of(node).keys() & {"forward", "__call__", "call"}) or inherits


class _File:
    """The definitions of a file, and who is a part of whom."""

    def __init__(self, own: dict[str, _Work]) -> None:
        self.own = own
        self.reach = {name: self._reach(name) for name in own}

    def _reach(self, name: str) -> _Work:
        """With what every definition does that it uses, and that those use: each counted once."""
        work, seen, left = self.own[name], {name}, [name]
        while left:
            for part in sorted(self.own[left.pop()].uses & self.own.keys() - seen):
                seen.add(part)
                left.append(part)
                work = work.through(self.own[part])
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
            return self.reach[part].attends and not self.reach[name].whole
        if not self.reach[name].whole or whole.by_name < 0.0 or whole.beside:
            return True
        if whole.is_class and whole.projections and not piece.is_class:
            return False  # the weights are the class's, the formula is written as a function
        several = part in whole.many and whole.joins
        return not (several and (not self.reach[part].heads or whole.by_name > piece.by_name))


OTHERS = {
    "tensorflow": "TensorFlow", "tf_keras": "TensorFlow", "keras": "Keras", "jax": "JAX", "flax": "JAX",
    "haiku": "JAX", "equinox": "JAX", "mxnet": "MXNet", "paddle": "Paddle", "mindspore": "MindSpore",
    "mlx": "MLX", "tinygrad": "tinygrad",
}  # fmt: skip
SENTENCE = "headwise check judges PyTorch code; this file uses {}"


def other_framework(source: str, name: str | None = None) -> str | None:
    """The framework that what would be judged is written for; None where it is PyTorch, NumPy or none.

    Args:
        source: the file.
        name: what is to be judged; None: the likeliest, or all of it where nothing looks like it.
    """
    tree = tree_of(source)
    if tree is None:
        return None
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            each = [((one.asname or one.name).partition(".")[0], one.name) for one in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            each = [(one.asname or one.name, node.module or "") for one in node.names]
        else:
            continue
        bound.update((local, package.partition(".")[0]) for local, package in each)
    if "torch" in bound.values() or not set(OTHERS) & set(bound.values()):
        return None
    found = [one.name for one in candidates(source)[:1]] if name is None else [name.partition(".")[0]]
    meant: list[ast.AST] = [node for node in tree.body if getattr(node, "name", None) in found]
    used = {one.id for top in meant or [tree] for one in ast.walk(top) if isinstance(one, ast.Name)}
    packages = [bound[one] for one in sorted(used & bound.keys()) if bound[one] in OTHERS]
    return OTHERS[packages[0]] if packages else None


GIVEN = ("display", "get_ipython", "In", "Out")  # what a notebook has without defining it
RUNS_PYTHON = {
    "time",
    "timeit",
    "capture",
    "prun",
}  # cell magics around Python; others are another language's
MAGIC = re.compile(r"(\s*)([%!?].*|.*\?\s*)$")
ASSIGNED = re.compile(r"(\s*[\w, ]+=\s*)[%!].*$")
LINE = re.compile(r"\b([Ll])ine (\d+)\b")
PREPARES = {
    "sys",
    "os",
    "torch",
    "np",
    "numpy",
    "random",
    "warnings",
    "setattr",
}  # a call of theirs may matter


@dataclass(frozen=True)
class Cells:
    """Where each code cell starts in the source they were joined to; none for a file of Python."""

    first_lines: tuple[int, ...] = ()

    def place(self, line: int) -> tuple[int, int]:
        """The cell, counted from 1 among those with code, and the line in it."""
        cell = max((at for at, first in enumerate(self.first_lines) if first <= line), default=0)
        return cell + 1, line - self.first_lines[cell] + 1

    def words(self, line: int) -> str:
        """ "cell 3, line 5"; without cells "line 5"."""
        return "cell {}, line {}".format(*self.place(line)) if self.first_lines else f"line {line}"


def package_root(path: Path, source: str) -> Path | None:
    """The folder the outermost package lies in, if the file imports relative to its package."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    if not any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree)):
        return None
    folder = path.parent
    while (folder / "__init__.py").is_file() and folder != folder.parent:
        folder = folder.parent
    return None if folder == path.parent else folder


def is_notebook(path: Path) -> bool:
    """By its name."""
    return path.suffix.lower() == ".ipynb"


def source_of(path: Path) -> tuple[str, Cells]:
    """The text of a file of Python, or the code of a notebook, with where its cells are.

    Magics, lines for the shell and cells of other languages are blank lines in it.

    Raises:
        ArgumentError: it cannot be read, is not in UTF-8, or is no notebook.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ArgumentError(f"file must be readable: {path}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise ArgumentError(f"file must be Python source in UTF-8: {path}; save it as UTF-8") from error
    if not is_notebook(path):
        return text, Cells()
    firsts, lines = list[int](), list[str]()
    for cell in _code_cells(text, path):
        firsts.append(len(lines) + 1)
        lines += _as_python(cell) or [""]
    return "\n".join(lines) + "\n", Cells(tuple(firsts))


def _code_cells(text: str, path: Path) -> list[str]:
    def refused(why: str) -> ArgumentError:
        return ArgumentError(f"file must be a notebook: {path} {why}; save it again in Jupyter")

    try:
        book = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refused(f"is no JSON ({error})") from None
    if not isinstance(book, dict):
        raise refused(f"is JSON of {type(book).__name__}")
    sheets = book["worksheets"] if isinstance(book.get("worksheets"), list) else [book]  # nbformat 3, and 4
    listed = [sheet.get("cells") for sheet in sheets if isinstance(sheet, dict)]
    cells = [cell for each in listed if isinstance(each, list) for cell in each if isinstance(cell, dict)]
    if not any(isinstance(each, list) for each in listed):
        raise refused("has no cells")
    found = [cell.get("source", cell.get("input", "")) for cell in cells if cell.get("cell_type") == "code"]
    if not found:
        raise refused("has no cell with code")
    return ["".join(map(str, each)) if isinstance(each, list) else str(each) for each in found]


def _as_python(cell: str) -> list[str]:
    """Its lines, with what is for the notebook itself taken out."""
    lines = cell.splitlines()
    if readable(cell) == cell:  # a line of a long string may start with %, too
        return lines
    start = next((at for at, line in enumerate(lines) if line.strip()), 0)
    if lines and lines[start].lstrip().startswith("%%"):
        if re.split(r"\W+", lines[start].lstrip("% "))[0] not in RUNS_PYTHON:
            return [""] * len(lines)
        return [""] * (start + 1) + _as_python("\n".join(lines[start + 1 :]))
    kept = list[str]()
    for line in lines:
        goes_on = kept and (kept[-1].endswith("\\") or _open_brackets(kept) > 0)  # then % is a remainder
        kept.append(line if goes_on else _without_magic(line))
    return kept


def _open_brackets(lines: list[str]) -> int:
    return sum((one in "([{") - (one in ")]}") for line in lines for one in line)


def _without_magic(line: str) -> str:
    if found := ASSIGNED.match(line):
        return f"{found[1]}None"
    found = MAGIC.match(line)
    if found is None or (found[2].endswith("?") and "#" in line):
        return line
    return f"{found[1]}pass" if found[1] else ""  # a block needs a statement


# Running


def load_notebook(path: Path, source: str) -> ModuleType:
    """The notebook's definitions as a module.

    Only what they need is run: no plots, no training. What raises beside them is passed over, as it is in a
    notebook with a cell that failed; what then is missing in the attention itself is told there.

    Raises:
        BaseException: what the first failing statement raised, where no class and no function came of it all.
    """
    sys.path.insert(0, str(path.parent))
    name = f"checked_{path.stem}"
    spec = importlib.util.spec_from_loader(name, None, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[name] = module
    # `inspect` asks for lines by the file's name, where there are none that Python could read
    linecache.cache[str(path)] = (len(source), None, source.splitlines(keepends=True), str(path))
    names = vars(module)
    names.update({"display": _nothing, "get_ipython": _nothing, "In": [], "Out": {}})
    failed: Exception | None = None
    with unwarned():
        statements = _needed(ast.parse(source).body)
    for statement in statements:
        try:
            exec(compile(ast.Module([statement], []), str(path), "exec"), names)
        except ImportError as error:
            raise error from None  # stand-ins are tried for what is not installed
        except Exception as error:
            failed = failed or error
    own = [one for one in names.values() if getattr(one, "__module__", None) == name]
    if failed is not None and not own:
        raise failed
    return module


def _nothing(*_: object, **__: object) -> None:
    pass


def _needed(body: list[ast.stmt]) -> list[ast.stmt]:
    """The definitions, and whatever gives a value to a name that they use, or that such a value uses."""
    wanted = {name for node in body if isinstance(node, DEFINITIONS) for name in (node.name, *_read_in(node))}
    taken: set[int] = set()
    while True:
        more = {
            at
            for at, node in enumerate(body)
            if at not in taken and (_binds(node) & wanted or isinstance(node, DEFINITIONS) or _prepares(node))
        }
        if not more:
            return [node for at, node in enumerate(body) if at in taken]
        taken |= more
        wanted |= {name for at in more for name in _read_in(body[at])}


def _read_in(node: ast.AST, bound: frozenset[str] = frozenset()) -> set[str]:
    """Names it takes from elsewhere; a function's own variables are not among them."""
    if isinstance(node, Function):
        bound |= bound_in(node)
    found = {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else set[str]()
    return (found - bound).union(*(_read_in(one, bound) for one in ast.iter_child_nodes(node)))


def _binds(node: ast.stmt) -> set[str]:
    """Names it gives a value to, or changes: `Attention.forward = f`, `sizes["d"] = 8`."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(one.asname or one.name).partition(".")[0] for one in node.names} | {
            one for one in ("*",) if any(each.name == "*" for each in node.names)
        }
    found = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    return found | {name for one in ast.walk(node) if (name := _changed(one))}


def _changed(node: ast.AST) -> str:
    if not (isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store)):
        return ""
    inner: ast.AST = node
    while isinstance(inner, (ast.Attribute, ast.Subscript)):
        inner = inner.value
    return inner.id if isinstance(inner, ast.Name) else ""


def _prepares(node: ast.stmt) -> bool:
    """Changes what all code runs in: seeds, the default dtype, where to import from; and `import *`."""
    if isinstance(node, ast.ImportFrom):
        return any(each.name == "*" for each in node.names)
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return False
    inner: ast.AST = node.value.func
    while isinstance(inner, (ast.Attribute, ast.Subscript)):
        inner = inner.value
    return isinstance(inner, ast.Name) and inner.id in PREPARES


# Telling


def told_by_cell(report: Any, cells: Cells) -> None:
    """Each line that a report speaks of becomes a cell and a line in it; without cells nothing changes."""
    if cells.first_lines:
        _tell(report, cells)


def _tell(thing: Any, cells: Cells) -> None:
    for one in fields(thing):
        value = getattr(thing, one.name)
        if isinstance(value, str) and one.name not in (
            "path",
            "text",
            "message",
        ):  # those are the learner's words
            setattr(thing, one.name, _by_cell(value, cells))
        elif isinstance(value, list):
            setattr(thing, one.name, [_by_cell(each, cells) for each in value])
            for each in value:
                if is_dataclass(each):
                    _tell(each, cells)
    if getattr(thing, "line", None) is not None and hasattr(thing, "cell"):
        thing.cell, thing.line = cells.place(thing.line)


def _by_cell(value: Any, cells: Cells) -> Any:
    if not isinstance(value, str):
        return value

    def placed(found: re.Match[str]) -> str:
        words = cells.words(int(found[2]))
        return words.capitalize() if found[1] == "L" else words

    return LINE.sub(placed, value)


def broken_cell(source: str, cells: Cells) -> SyntaxError | None:
    """The first syntax error, looked for cell by cell: a bracket left open is no matter of the next one."""
    lines = source.splitlines()
    ends = (*cells.first_lines[1:], len(lines) + 1)
    for first, end in zip(cells.first_lines, ends, strict=False):
        try:
            with unwarned():
                ast.parse("\n" * (first - 1) + "\n".join(lines[first - 1 : end - 1]) + "\n")
        except SyntaxError as error:
            return error
    return None
