"""Find the class or function of a file that is to be checked; read notebooks as one Python source.

All parts of the examiner use this module to decide which definition is multi-head attention.
"""

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
    definition_start,
    dotted,
    imported_names,
    is_main,
    loaded_names,
    methods_of,
    nodes,
    readable,
    stored_names,
    tree_of,
    unwarned,
)

ENOUGH = 3.0  # the score of two products and a softmax with nothing else
# What the code does weighs more than its name: names may be in any language, or "Mixer".
NAMED = (
    (r"multi_?head(ed)?|mha(?![a-z])|mhsa|multi_?query|grouped_?query|\bgqa|\bmqa", 2.5),
    (r"attention|attn", 2.0),
)
# what contains attention, shows it, or is a part of it
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
# Exercises often show a wrong or slow version beside the one that is to be checked.
SHOWN = re.compile(r"(?i)buggy|broken|wrong|bad|naive|slow|original|without|no_?scale|unscaled|reference")
MOST_JUDGED = 6  # classes of one file
PART, LARGER = 3.0, 5.0  # points lost by a part of attention, and by what contains a whole one

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
    """A class or function that may be the one to check."""

    name: str
    kind: str  # "class" or "function"
    first_line: int  # decorators included
    last_line: int
    score: float


def candidates(source: str) -> list[Candidate]:
    """Return what looks like multi-head attention, best first; of equals the later, usually the last attempt.

    The score counts what the code does, including the definitions of the file that it uses: a softmax between
    two products, projections, heads; then its name. A part of another candidate (a softmax, one head) and
    what contains another candidate (an encoder layer) come after that candidate. The list is empty if nothing
    in the file looks like attention.
    """
    definitions, works = _read(source)
    scores = {name: works.score(name) for name in definitions}
    matches = [_candidate(definitions[name], score) for name, score in scores.items() if score >= ENOUGH]
    return sorted(
        matches or _steps(definitions), key=lambda candidate: (-candidate.score, -candidate.first_line)
    )


def plausible(source: str) -> tuple[list[Candidate], list[Candidate]]:
    """Return the candidates that are judged if no name is passed, best first, and the remaining candidates.

    Several are judged if each is complete: a class with projections, heads and a softmax that no other
    candidate uses or derives from, and that contains no other candidate.
    """
    matches = candidates(source)
    _, works = _read(source)
    judged = matches[:1]
    if matches and matches[0].kind == "class":
        judged += [
            candidate
            for candidate in matches[1:]
            if works.is_whole(candidate.name) and not SHOWN.search(candidate.name)
        ]
    judged = judged[:MOST_JUDGED]
    return judged, [candidate for candidate in matches if candidate not in judged]


def line_of_name(source: str, name: str) -> int | None:
    """Return the line on which the class, function or method ("MyAttention.split") of this name begins."""
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
    """Return the definitions of a file by name, and what each does; empty if the file does not parse."""
    tree = tree_of(source)
    if tree is None:
        return {}, _File({})
    definitions = {node.name: node for node in _definitions(tree.body)}  # of equal names the last is bound
    imported = [alias for node in nodes(tree, ast.ImportFrom) for alias in node.names]
    aliases = {alias.asname: alias.name for alias in imported if alias.asname}
    return definitions, _File({name: _work_of(node, aliases) for name, node in definitions.items()})


def _candidate(node: Definition, score: float) -> Candidate:
    kind = "class" if isinstance(node, ast.ClassDef) else "function"
    return Candidate(node.name, kind, definition_start(node), node.end_lineno or node.lineno, score)


def _steps(definitions: dict[str, Definition]) -> list[Candidate]:
    """Return single steps of attention, for a file that has no complete attention."""
    return [
        _candidate(node, 1.0)
        for name, node in definitions.items()
        if _runs(node) and STEP.search(_underscored(name))
    ]


def likeliest(path: Path, source: str) -> str:
    """Return the name of the best candidate.

    Raises:
        ArgumentError: the file has no candidate.
    """
    matches = candidates(source)
    if not matches:
        raise ArgumentError(
            f"file must define attention to check: nothing in {path} looks like attention; "
            "name the class or function with FILE:NAME"
        )
    return matches[0].name


def _definitions(body: list[ast.stmt]) -> Iterator[Definition]:
    """Yield what a module defines when imported: also under `if` and `try`, but not under `__main__`."""
    for node in body:
        if isinstance(node, DEFINITIONS):
            yield node
        elif isinstance(node, ast.If):
            yield from _definitions([] if is_main(node) else node.body)
            yield from _definitions(node.orelse)
        elif isinstance(node, ast.Try):
            for part in (
                node.body,
                *(handler.body for handler in node.handlers),
                node.orelse,
                node.finalbody,
            ):
                yield from _definitions(part)
        elif isinstance(node, ast.With):
            yield from _definitions(node.body)


@dataclass(frozen=True)
class _Work:
    """What the code of one class or function does, without the definitions it uses."""

    by_name: float
    is_class: bool
    runs: bool  # can be called with tensors: a class with forward, a function with arguments
    uses: frozenset[str]  # names that it reads and does not bind
    bases: frozenset[str]
    many: frozenset[str]  # names in lists and loops: what they name is made several times
    softmax: bool
    products: int
    torch_attention: bool  # calls torch's attention function or class
    projections: bool
    heads: bool
    joins: bool
    beside: bool  # contains what attention does not need, such as an embedding

    def through(self, part: _Work) -> _Work:
        """Return this work with that of a definition it uses added."""
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
    loaded, assigned = loaded_names(node), stored_names(node)
    bound = assigned | {parameter.arg for parameter in nodes(node, ast.arg)}
    attributes = list(nodes(node, ast.Attribute))
    functions = [dotted(call.func) or getattr(call.func, "attr", "") for call in nodes(node, ast.Call)]
    calls = [aliases.get(name, name) for name in (path.rpartition(".")[2] for path in functions)]
    called, words = set(calls), loaded | bound | {attribute.attr for attribute in attributes}
    is_class = isinstance(node, ast.ClassDef)
    # What a class computes and calls `weights` is the result of a softmax, not the weight of a projection. In
    # a function that takes its projections as arguments the name may be the only sign of them.
    stored = {attribute.attr for attribute in attributes if isinstance(attribute.ctx, ast.Store)}
    computed = {word for word in assigned | stored if is_class and ANY_WEIGHT.fullmatch(word)}
    products = sum(name in PRODUCTS for name in calls)
    products += sum(isinstance(operation.op, ast.MatMult) for operation in nodes(node, ast.BinOp))
    return _Work(
        by_name=_by_name(node.name),
        is_class=is_class,
        runs=_runs(node),
        uses=frozenset(loaded - bound),
        bases=frozenset(dotted(base) for base in node.bases)
        if isinstance(node, ast.ClassDef)
        else frozenset(),
        many=frozenset(name.id for part in nodes(node, SEVERAL) for name in nodes(part, ast.Name)),
        softmax=bool(called & SOFTMAX),
        products=products,
        torch_attention=bool(called & TORCH),
        projections=bool(called & LAYERS or "MultiheadAttention" in called)
        or any(WEIGHT.fullmatch(word) for word in words - computed)
        or (is_class and bool(called & DRAWN)),
        heads=any(HEADS.fullmatch(word) for word in words) or bool(called & CUTS and called & TURNS),
        joins=bool(called & JOINS),
        beside=bool(called & BESIDE),
    )


def _underscored(name: str) -> str:
    """Return the name in lower case with underscores: "multi_head" for "MultiHead"."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _by_name(name: str) -> float:
    plain = _underscored(name)
    worth = max((points for pattern, points in NAMED if re.search(pattern, plain)), default=0.0)
    return worth - sum(points for pattern, points in OTHERWISE if re.search(pattern, plain))


def _runs(node: Definition) -> bool:
    if not isinstance(node, ast.ClassDef):
        parameters = (*node.args.posonlyargs, *node.args.args)
        return bool(parameters) and parameters[0].arg != "self"  # with self it is assigned to a class later
    inherits = any(dotted(base).rpartition(".")[2] not in ("Module", "object", "") for base in node.bases)
    return bool(methods_of(node).keys() & {"forward", "__call__", "call", "step"}) or inherits


class _File:
    """The definitions of a file, and which of them are parts of others."""

    def __init__(self, own: dict[str, _Work]) -> None:
        self.own = own
        self.reach = {name: self._reach(name) for name in own}

    def _reach(self, name: str) -> _Work:
        """Return the work of a definition and of all that it uses, directly or not, each counted once."""
        work, visited, left = self.own[name], {name}, [name]
        while left:
            for part in sorted(self.own[left.pop()].uses & self.own.keys() - visited):
                visited.add(part)
                left.append(part)
                work = work.through(self.own[part])
        return work

    def score(self, name: str) -> float:
        """Return how much a definition looks like multi-head attention; 0 for not at all."""
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
        """Return True if it is complete multi-head attention, and neither a part nor a base of another."""
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
        """Return True if `name` uses `part`, other than as its base class."""
        return self.own[name].runs and part in self.own[name].uses - self.own[name].bases

    def _stands_alone(self, part: str, name: str) -> bool:
        """Return True if `part`, which `name` uses, is complete attention, and no piece of it."""
        piece, whole = self.own[part], self.own[name]
        if not (piece.runs and self.reach[part].whole):
            return self.reach[part].attends and not self.reach[name].whole
        if not self.reach[name].whole or whole.by_name < 0.0 or whole.beside:
            return True
        if whole.is_class and whole.projections and not piece.is_class:
            return False  # the class has the weights and the function the formula
        several = part in whole.many and whole.joins
        return not (several and (not self.reach[part].heads or whole.by_name > piece.by_name))


OTHERS = {
    "tensorflow": "TensorFlow", "tf_keras": "TensorFlow", "keras": "Keras", "jax": "JAX", "flax": "JAX",
    "haiku": "JAX", "equinox": "JAX", "mxnet": "MXNet", "paddle": "Paddle", "mindspore": "MindSpore",
    "mlx": "MLX", "tinygrad": "tinygrad",
}  # fmt: skip
SENTENCE = "headwise check judges PyTorch code; this file uses {}"


def other_framework(source: str, name: str | None = None) -> str | None:
    """Return the framework, other than PyTorch and NumPy, that the code to judge is written for; else None.

    Args:
        source: of the file.
        name: of what is to be judged; None for the best candidate, or the whole file if there is none.
    """
    tree = tree_of(source)
    if tree is None:
        return None
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            each = [((alias.asname or alias.name).partition(".")[0], alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            each = [(alias.asname or alias.name, node.module or "") for alias in node.names]
        else:
            continue
        bound.update((local, package.partition(".")[0]) for local, package in each)
    if "torch" in bound.values() or not set(OTHERS) & set(bound.values()):
        return None
    names = (
        [candidate.name for candidate in candidates(source)[:1]] if name is None else [name.partition(".")[0]]
    )
    meant: list[ast.AST] = [node for node in tree.body if getattr(node, "name", None) in names]
    used = {name.id for top in meant or [tree] for name in nodes(top, ast.Name)}
    packages = [bound[local] for local in sorted(used & bound.keys()) if bound[local] in OTHERS]
    return OTHERS[packages[0]] if packages else None


RUNS_PYTHON = {"time", "timeit", "capture", "prun"}  # magics of cells in Python; others mark other languages
MAGIC = re.compile(r"(\s*)([%!?].*|.*\?\s*)$")
ASSIGNED = re.compile(r"(\s*[\w, ]+=\s*)[%!].*$")
LINE = re.compile(r"\b([Ll])ine (\d+)\b")
PREPARES = {"sys", "os", "torch", "np", "numpy", "random", "warnings", "setattr"}  # calls with side effects


@dataclass(frozen=True)
class Cells:
    """The first line of each code cell in the joined source of a notebook; empty for a Python file."""

    first_lines: tuple[int, ...] = ()

    def place(self, line: int) -> tuple[int, int]:
        """Return the number of the code cell that holds a line, from 1, and the line within it."""
        cell = max((at for at, first in enumerate(self.first_lines) if first <= line), default=0)
        return cell + 1, line - self.first_lines[cell] + 1

    def words(self, line: int) -> str:
        """Return "cell 3, line 5", or "line 5" if the source is no notebook."""
        return "cell {}, line {}".format(*self.place(line)) if self.first_lines else f"line {line}"


def package_root(path: Path, source: str) -> Path | None:
    """Return the folder that contains the outermost package, if the file uses relative imports; else None."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    if not any(node.level for node in nodes(tree, ast.ImportFrom)):
        return None
    folder = path.parent
    while (folder / "__init__.py").is_file() and folder != folder.parent:
        folder = folder.parent
    return None if folder == path.parent else folder


def is_notebook(path: Path) -> bool:
    """Return True if the file is named as a notebook."""
    return path.suffix.lower() == ".ipynb"


def source_of(path: Path) -> tuple[str, Cells]:
    """Return the text of a Python file or the code of a notebook, and where its cells begin.

    Magics, shell commands and cells in other languages are replaced by blank lines.

    Raises:
        ArgumentError: the file cannot be read, is not UTF-8, or is not a notebook.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ArgumentError(f"file must be readable: {path}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise ArgumentError(f"file must be in UTF-8: {path}: {error.reason}; save it as UTF-8") from error
    if not is_notebook(path):
        return text, Cells()
    firsts, lines = list[int](), list[str]()
    for cell in _code_cells(text, path):
        firsts.append(len(lines) + 1)
        lines += _as_python(cell) or [""]
    return "\n".join(lines) + "\n", Cells(tuple(firsts))


def _code_cells(text: str, path: Path) -> list[str]:
    def refused(reason: str) -> ArgumentError:
        return ArgumentError(f"file must be a notebook: {path} {reason}; save it again in Jupyter")

    try:
        book = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refused(f"is not valid JSON ({error})") from None
    if not isinstance(book, dict):
        raise refused(f"contains a JSON {type(book).__name__} instead of an object")
    sheets = book["worksheets"] if isinstance(book.get("worksheets"), list) else [book]  # nbformat 3, and 4
    listed = [sheet.get("cells") for sheet in sheets if isinstance(sheet, dict)]
    cells = [cell for each in listed if isinstance(each, list) for cell in each if isinstance(cell, dict)]
    if not any(isinstance(each, list) for each in listed):
        raise refused("has no cells")
    sources = [cell.get("source", cell.get("input", "")) for cell in cells if cell.get("cell_type") == "code"]
    if not sources:
        raise refused("has no cell with code")
    return ["".join(map(str, each)) if isinstance(each, list) else str(each) for each in sources]


def _as_python(cell: str) -> list[str]:
    """Return the lines of a cell, with magics and shell commands replaced by blank lines."""
    lines = cell.splitlines()
    if readable(cell) == cell:  # a line within a long string may start with %
        return lines
    start = next((at for at, line in enumerate(lines) if line.strip()), 0)
    if lines and lines[start].lstrip().startswith("%%"):
        if re.split(r"\W+", lines[start].lstrip("% "))[0] not in RUNS_PYTHON:
            return [""] * len(lines)
        return [""] * (start + 1) + _as_python("\n".join(lines[start + 1 :]))
    code = list[str]()
    for line in lines:
        goes_on = code and (code[-1].endswith("\\") or _open_brackets(code) > 0)  # then % is an operator
        code.append(line if goes_on else _without_magic(line))
    return code


def _open_brackets(lines: list[str]) -> int:
    return sum((character in "([{") - (character in ")]}") for line in lines for character in line)


def _without_magic(line: str) -> str:
    if magic := ASSIGNED.match(line):
        return f"{magic[1]}None"
    magic = MAGIC.match(line)
    if magic is None or (magic[2].endswith("?") and "#" in line):
        return line
    return f"{magic[1]}pass" if magic[1] else ""  # a block needs a statement


def load_notebook(path: Path, source: str) -> ModuleType:
    """Return the notebook's definitions as a module.

    Only the statements that they need are run: no plots, no training. A statement that raises is skipped, as
    after a failed cell; if the attention needs it, the check of the attention reports that.

    Raises:
        BaseException: what the first failing statement raised, if no class and no function was defined.
    """
    sys.path.insert(0, str(path.parent))
    name = f"checked_{path.stem}"
    spec = importlib.util.spec_from_loader(name, None, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[name] = module
    # `inspect` looks lines up by the file's name, and the notebook file holds none that Python could read
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
            raise error from None  # the caller tries stand-ins for packages that are not installed
        except Exception as error:
            failed = failed or error
    own = [definition for definition in names.values() if getattr(definition, "__module__", None) == name]
    if failed is not None and not own:
        raise failed
    return module


def _nothing(*_: object, **__: object) -> None:
    pass


def _needed(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the definitions, and the statements that assign the names they use, directly or not."""
    wanted = {name for node in body if isinstance(node, DEFINITIONS) for name in (node.name, *_read_in(node))}
    selected: set[int] = set()
    while True:
        more = {
            at
            for at, node in enumerate(body)
            if at not in selected
            and (_binds(node) & wanted or isinstance(node, DEFINITIONS) or _prepares(node))
        }
        if not more:
            return [node for at, node in enumerate(body) if at in selected]
        selected |= more
        wanted |= {name for at in more for name in _read_in(body[at])}


def _read_in(node: ast.AST, bound: frozenset[str] = frozenset()) -> set[str]:
    """Return the names that a node reads and does not bind itself."""
    if isinstance(node, Function):
        bound |= bound_in(node)
    names = {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else set[str]()
    return (names - bound).union(*(_read_in(child, bound) for child in ast.iter_child_nodes(node)))


def _binds(node: ast.stmt) -> set[str]:
    """Return the names a statement assigns or changes: `Attention.forward = f`, `sizes["d"] = 8`."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return imported_names(node)
    changed = [
        part for part in nodes(node, (ast.Attribute, ast.Subscript)) if isinstance(part.ctx, ast.Store)
    ]
    return stored_names(node) | {name for part in changed if (name := _first_name(part))}


def _first_name(node: ast.expr) -> str:
    """Return "sizes" for `sizes["d"].a`, and "" where the expression does not begin with a name."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _prepares(node: ast.stmt) -> bool:
    """Return True for what affects all code (seeds, the default dtype, the import path), and `import *`."""
    if isinstance(node, ast.ImportFrom):
        return any(alias.name == "*" for alias in node.names)
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and _first_name(call.func) in PREPARES


def number_by_cell(report: Any, cells: Cells) -> None:
    """Replace each line number in a report by the cell and the line within it; does nothing without cells."""
    if not cells.first_lines:
        return
    for field in fields(report):
        value = getattr(report, field.name)
        if isinstance(value, str) and field.name not in ("path", "text", "message"):  # the learner's own text
            setattr(report, field.name, _by_cell(value, cells))
        elif isinstance(value, list):
            setattr(report, field.name, [_by_cell(element, cells) for element in value])
            for element in value:
                if is_dataclass(element):
                    number_by_cell(element, cells)
    if getattr(report, "line", None) is not None and hasattr(report, "cell"):
        report.cell, report.line = cells.place(report.line)


def _by_cell(value: Any, cells: Cells) -> Any:
    if not isinstance(value, str):
        return value

    def placed(match: re.Match[str]) -> str:
        words = cells.words(int(match[2]))
        return words.capitalize() if match[1] == "L" else words

    return LINE.sub(placed, value)


def broken_cell(source: str, cells: Cells) -> SyntaxError | None:
    """Return the first syntax error, parsing cell by cell: an open bracket ends with its cell."""
    lines = source.splitlines()
    ends = (*cells.first_lines[1:], len(lines) + 1)
    for first, end in zip(cells.first_lines, ends, strict=False):
        try:
            with unwarned():
                ast.parse("\n" * (first - 1) + "\n".join(lines[first - 1 : end - 1]) + "\n")
        except SyntaxError as error:
            return error
    return None
