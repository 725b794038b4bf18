"""The syntax tree of a learner's source. The source is parsed here and never run."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import sys
import textwrap
import threading
import warnings
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, TypeVar, overload

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef
BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")  # of statements, as ast.walk orders
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
A = TypeVar("A", bound=ast.AST)
B = TypeVar("B", bound=ast.AST)
C = TypeVar("C", bound=ast.AST)


_parsing = threading.Lock()


@contextmanager
def unwarned() -> Iterator[None]:
    """Silence warnings while a learner's source is parsed, such as the one for "\\d" in a string.

    A lock lets one thread parse at a time: warning filters belong to the whole process and are restored
    correctly only in order, and Python 3.11 counts the depth of trees for all threads together.
    """
    with _parsing, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def readable(source: str) -> str | None:
    """Return the source so that it parses, unindented if it is a pasted method; None if it cannot."""
    return _parsed(source)[0]


def tree_of(source: str) -> ast.Module | None:
    """Return the syntax tree of `source`, or None if it is not valid Python."""
    return _parsed(source)[1]


@lru_cache(maxsize=8)
def _parsed(source: str) -> tuple[str, ast.Module] | tuple[None, None]:
    for text in (source, textwrap.dedent(source)):
        try:
            with unwarned():
                return text, ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return None, None


def find_source(owner: Any) -> tuple[list[str], int]:
    """Return the lines of the file of a class or function and the index of its first line.

    The result is that of `inspect.findsource`. Before Python 3.13 that function parses and walks the whole
    file for each class. Here the classes of a file are listed once; a name that is bound several times goes
    to `inspect`.

    Raises:
        OSError, TypeError: there is no source.
    """
    module = sys.modules.get(getattr(owner, "__module__", None) or "") if inspect.isclass(owner) else None
    if module is None or hasattr(owner, "__firstlineno__"):
        return _inspected(owner)
    try:
        lines, _ = _inspected(module)
    except (OSError, TypeError):
        return _inspected(owner)
    starts = _class_starts("".join(lines)).get(owner.__qualname__, ())
    return (lines, starts[0] - 1) if len(starts) == 1 else _inspected(owner)


def _inspected(owner: Any) -> tuple[list[str], int]:
    with unwarned():
        return inspect.findsource(owner)


def source_of_definition(owner: Any) -> str:
    """Return the text of a class or function, as `inspect.getsource`.

    Raises:
        OSError, TypeError: there is no source.
    """
    lines, start = find_source(inspect.unwrap(owner))
    return "".join(inspect.getblock(lines[start:]))


@lru_cache(maxsize=8)
def _class_starts(source: str) -> dict[str, list[int]]:
    """Return the qualified name of each class of a source -> the first lines of the classes of that name."""
    starts: dict[str, list[int]] = {}

    def read(node: ast.AST, prefix: str) -> None:
        for child in _inner_statements(node):
            if isinstance(child, ast.ClassDef):
                first = child.decorator_list[0].lineno if child.decorator_list else child.lineno
                starts.setdefault(prefix + child.name, []).append(first)
                read(child, f"{prefix}{child.name}.")
            else:
                read(child, f"{prefix}{child.name}.<locals>." if isinstance(child, FUNCTIONS) else prefix)

    tree = tree_of(source)
    if tree is not None:
        read(tree, "")
    return starts


def segment(source: str, node: ast.stmt | ast.expr) -> str:
    """Return the text of a node, as `ast.get_source_segment`, which splits the whole source each time."""
    lines = _lines(source)
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    begin, end = node.col_offset, node.end_col_offset  # in bytes
    if first == last:
        return lines[first].encode()[begin:end].decode()
    head, tail = lines[first].encode()[begin:].decode(), lines[last].encode()[:end].decode()
    return "".join([head, *lines[first + 1 : last], tail])


@lru_cache(maxsize=8)
def _lines(source: str) -> list[str]:
    """Return the lines as Python counts them: a form feed, unlike for `splitlines`, ends none."""
    return re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", source)


def text_of(source: str, line: int | None) -> str:
    """Return line `line` of the source without leading and trailing spaces; "" if there is no such line."""
    lines = source.splitlines()
    return lines[line - 1].strip() if line is not None and 0 < line <= len(lines) else ""


def dotted(node: ast.AST) -> str:
    """Return "torch.nn.Linear" for `torch.nn.Linear`, and "" for anything but names joined by dots."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


@overload
def nodes(tree: ast.AST, kind: type[A]) -> Iterator[A]: ...
@overload
def nodes(tree: ast.AST, kind: tuple[type[A], type[B]]) -> Iterator[A | B]: ...
@overload
def nodes(tree: ast.AST, kind: tuple[type[A], type[B], type[C]]) -> Iterator[A | B | C]: ...
@overload
def nodes(tree: ast.AST, kind: tuple[type[ast.AST], ...]) -> Iterator[ast.AST]: ...
def nodes(tree: ast.AST, kind: type[ast.AST] | tuple[type[ast.AST], ...]) -> Iterator[ast.AST]:
    """Yield the nodes of a tree that are of the given kind, in the order of `ast.walk`."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    walk = _statements if all(issubclass(each, ast.stmt) for each in kinds) else ast.walk
    return (node for node in walk(tree) if isinstance(node, kind))


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what `ast.walk` yields, without expressions: they hold no statements, and are most of a tree."""
    waiting = deque([tree])
    while waiting:
        node = waiting.popleft()
        waiting.extend(_inner_statements(node))
        yield node


def _inner_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements directly inside a node, with handlers of exceptions and cases of a match."""
    if not isinstance(node, ast.expr):
        for name in BLOCKS:
            yield from getattr(node, name, ())


def loaded_names(tree: ast.AST) -> set[str]:
    """Return the names whose values a tree reads."""
    return {name.id for name in nodes(tree, ast.Name) if isinstance(name.ctx, ast.Load)}


def stored_names(tree: ast.AST) -> set[str]:
    """Return the names that a tree assigns."""
    return {name.id for name in nodes(tree, ast.Name) if isinstance(name.ctx, ast.Store)}


def imported_names(statement: ast.Import | ast.ImportFrom) -> set[str]:
    """Return the names that an import binds: "np" for `import numpy as np`, "torch" for `import torch.nn`."""
    return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}


def definition_start(node: Definition) -> int:
    """Return the line on which a class or function begins, its decorators included."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def inner_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function or class, without the contents of nested functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, DEFINITIONS):
            yield from inner_nodes(child)


def expression(text: str) -> ast.expr:
    """Parse a Python expression."""
    return ast.parse(text, mode="eval").body


def methods_of(owner: ast.ClassDef) -> dict[str, Function]:
    """Return the methods of a class by name; of several with one name the last, which is the one bound."""
    return {method.name: method for method in owner.body if isinstance(method, FUNCTIONS)}


def parameters_of(function: Function) -> list[ast.arg]:
    """Return every parameter of a function, with `*args` and `**kwargs` last."""
    spec = function.args
    last = [parameter for parameter in (spec.vararg, spec.kwarg) if parameter is not None]
    return [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *last]


def extent_of(node: ast.stmt) -> tuple[int, int]:
    """Return the first and last line of a statement."""
    return node.lineno, node.end_lineno or node.lineno


def is_main(node: ast.AST) -> bool:
    """Return True if the node is `if __name__ == "__main__":`."""
    return isinstance(node, ast.If) and "__name__" in loaded_names(node.test)


def bound_in(function: Function) -> set[str]:
    """Return the names of the parameters and of everything that is assigned in the function itself."""
    names = {parameter.arg for parameter in parameters_of(function)}
    for node in inner_nodes(function):
        if isinstance(node, DEFINITIONS):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@dataclass(frozen=True)
class Place:
    """A line of a source, with the statement, function and class around it."""

    source: str | None
    line: int | None
    shapes: Mapping[str, list[int]] = field(default_factory=dict)  # of the local tensors, by variable

    @cached_property
    def tree(self) -> ast.Module | None:
        return None if self.source is None else tree_of(self.source)

    @cached_property
    def statement(self) -> ast.stmt | None:
        """The smallest statement that contains the line."""
        around = [node for node in self._around() if isinstance(node, ast.stmt)]
        return min(
            around,
            key=lambda statement: (statement.end_lineno or statement.lineno) - statement.lineno,
            default=None,
        )

    @cached_property
    def text(self) -> str:
        """The learner's line; the whole statement if it spans several lines and is short."""
        if self.source is None:
            return ""
        line, node = text_of(self.source, self.line), self.statement
        compound = any(hasattr(node, name) for name in ("body", "cases"))
        if node is None or compound or node.end_lineno == node.lineno:
            return line
        lines = self.source.splitlines()[node.lineno - 1 : node.end_lineno]
        whole = " ".join(line.partition(" #")[0].strip() for line in lines)
        whole = re.sub(r"(?<=[(\[{]) | (?=[)\]}.])|,(?= ?[)\]}])", "", whole)
        return whole if len(whole) <= 110 else line

    @cached_property
    def function(self) -> Function | None:
        """The innermost function that contains the line."""
        around = [node for node in self._around() if isinstance(node, FUNCTIONS)]
        return max(around, key=lambda function: function.lineno, default=None)

    @cached_property
    def owner(self) -> ast.ClassDef | None:
        """The innermost class that contains the line."""
        around = [node for node in self._around() if isinstance(node, ast.ClassDef)]
        return max(around, key=lambda owner: owner.lineno, default=None)

    def _around(self) -> list[ast.AST]:
        line = self.line
        if self.tree is None or line is None:
            return []
        return [
            node
            for node in ast.walk(self.tree)
            if hasattr(node, "lineno") and node.lineno <= line <= (getattr(node, "end_lineno", None) or 0)
        ]

    def definition(self, name: str) -> Definition | None:
        """Return the class or function of the file that has this name."""
        if self.tree is None:
            return None
        return next((node for node in nodes(self.tree, DEFINITIONS) if node.name == name), None)

    @property
    def locals(self) -> set[str]:
        return set() if self.function is None else bound_in(self.function)

    def layers(self) -> list[str]:
        """Return the attributes of self that the statement calls: "W_q" for `self.W_q(x)`."""
        if self.statement is None:
            return []
        calls = [dotted(call.func) for call in nodes(self.statement, ast.Call)]
        return list(dict.fromkeys(call[5:] for call in calls if re.fullmatch(r"self\.\w+", call)))

    def where_set(self, attribute: str) -> str:
        """Return where `self.attribute` is assigned: " (line 12: `self.W_q = nn.Linear(d, d)`)", or ""."""
        for node in nodes(self.owner, ast.Attribute) if self.owner is not None else ():
            if isinstance(node.ctx, ast.Store) and dotted(node) == f"self.{attribute}":
                return f" (line {node.lineno}: `{text_of(self.source or '', node.lineno)}`)"
        return ""

    def shapes_named(self) -> dict[str, list[int]]:
        """Return the shapes of the tensors that the statement names, in its order."""
        names = [name.id for name in nodes(self.statement, ast.Name)] if self.statement is not None else []
        return {name: self.shapes[name] for name in names if name in self.shapes}

    def assigned(self, name: str) -> ast.expr | None:
        """Return the last value that the function assigns to the variable before the line."""
        value = None
        for node in nodes(self.function, ast.Assign) if self.function is not None else ():
            if node.lineno >= (self.line or 0):
                continue
            if any(isinstance(target, ast.Name) and target.id == name for target in node.targets):
                value = node.value if value is None or node.lineno > value.lineno else value
        return value

    def matches(self, pattern: str) -> bool:
        """Return True if the regular expression is found in the learner's line."""
        return re.search(pattern, self.text) is not None


IMPORTS = {
    "F": "import torch.nn.functional as F",
    "functional": "from torch.nn import functional",
    "nn": "import torch.nn as nn",
    "torch": "import torch",
    "optim": "import torch.optim as optim",
    "init": "from torch.nn import init",
    "np": "import numpy as np",
    "numpy": "import numpy",
    "pd": "import pandas as pd",
    "plt": "import matplotlib.pyplot as plt",
    "sns": "import seaborn as sns",
    "jnp": "import jax.numpy as jnp",
    "jax": "import jax",
    "tf": "import tensorflow as tf",
    "tqdm": "from tqdm import tqdm",
    "partial": "from functools import partial",
    "lru_cache": "from functools import lru_cache",
    "wraps": "from functools import wraps",
    "reduce": "from einops import reduce",
    "sqrt": "from math import sqrt",
    "deepcopy": "from copy import deepcopy",
    "dataclass": "from dataclasses import dataclass",
    "field": "from dataclasses import field",
    "namedtuple": "from collections import namedtuple",
    "defaultdict": "from collections import defaultdict",
    "OrderedDict": "from collections import OrderedDict",
    "Path": "from pathlib import Path",
    "Enum": "from enum import Enum",
    "ABC": "from abc import ABC",
    "abstractmethod": "from abc import abstractmethod",
    "parameter": "from torch.nn import parameter",
    "scaled_dot_product_attention": "from torch.nn.functional import scaled_dot_product_attention",
    "softmax": "from torch.nn.functional import softmax",
    "Variable": "from torch.autograd import Variable",
    "jaxtyping": "import jaxtyping",
    "einops": "import einops",
}
FROM = {
    "einops": "rearrange repeat einsum pack unpack parse_shape",
    "einops.layers.torch": "Rearrange",
    "typing": """Any Optional Union Tuple List Dict Set Callable Iterable Iterator Sequence Mapping Literal
        NamedTuple TypeVar Generic Protocol Type ClassVar Final NoReturn TYPE_CHECKING cast overload""",
    "torch": "Tensor LongTensor FloatTensor BoolTensor",
    "torch.nn": """Module ModuleList ModuleDict Parameter Linear LazyLinear Dropout LayerNorm Sequential
        Embedding MultiheadAttention ReLU GELU Softmax Identity Conv1d Conv2d BatchNorm1d RMSNorm""",
    "jaxtyping": "Float Int Bool",
}
STANDARD = """math copy os sys re random time json functools itertools collections typing warnings logging abc
    inspect""".split()
OLD = {"xrange": "range", "unicode": "str", "long": "int", "raw_input": "input", "basestring": "str"}

BATCH = re.compile(r"(?i)(n_?|num_?)?(batch(_?size|es)?|bsz?|batch_?dim|b|n)")
LENGTH = re.compile(
    r"(?i)(n_?|num_?|max_?)?((src|tgt|target|source|query|key|value|q|k|v|input|seq(uence)?|kv|context|token)_?)?"
    r"(len(gth)?|seq(uence)?|tokens?|time_?steps)|[lts]|seq_?size"
)
WIDTH = re.compile(
    r"(?i)(d|dim)_?(model|embed|in|input|out)|(embed(ding)?|model|emb|hidden|input)_?(dim|size)|[ced]|dim"
)
NOT_TENSORS = set("self cls mask attn_mask attention_mask key_padding_mask is_causal causal dropout".split())
REGISTERS = {"register_buffer", "register_parameter", "add_module", "register_module"}


def import_for(name: str) -> str | None:
    """Return the import statement for a well-known name, or None."""
    if name in IMPORTS:
        return IMPORTS[name]
    if name in STANDARD:
        return f"import {name}"
    return next(
        (f"from {module} import {name}" for module, names in FROM.items() if name in names.split()), None
    )


def nearest(name: str, others: Collection[str], cutoff: float = 0.75) -> str | None:
    """Return the name that was probably meant: equal but for case and underscores, else the most similar."""
    plain = name.lower().replace("_", "")
    alike = sorted(other for other in others if other.lower().replace("_", "") == plain and other != name)
    if alike:
        return alike[0]
    if len(name) < 3:
        return None
    swapped = sorted(other for other in others if sorted(other) == sorted(name) and other != name)
    if swapped:
        return swapped[0]
    close = difflib.get_close_matches(name, sorted(set(others) - {name}), n=1, cutoff=cutoff)
    return close[0] if close and len(close[0]) > 1 else None


def suggestion_for(
    name: str, tree: ast.Module, inside: tuple[Definition, ...], bound: Collection[str]
) -> str:
    """Return what to do about the undefined `name`: an import, an assignment, or the name probably meant.

    Args:
        inside: the classes and functions around its use, outermost first.
        bound: names that the module binds.
    """
    functions = [definition for definition in inside if not isinstance(definition, ast.ClassDef)]
    owner = next(
        (definition for definition in reversed(inside) if isinstance(definition, ast.ClassDef)), None
    )
    function = functions[-1] if functions else None
    locals_ = set().union(*(bound_in(function) for function in functions)) if functions else set()
    if name == "self" and function is not None:
        return f"make it the first parameter: def {function.name}(self, ...)"
    if owner is not None and function is not None and (suggestion := _of_class(name, owner, function)):
        return suggestion
    if (line := import_for(name)) is not None:
        return line
    if name in OLD:
        return f"Python 3 calls it {OLD[name]}"
    if close := nearest(name, locals_, 0.8):
        return f"did you mean {close}?"
    if function is not None and (size := _size(name, function)):
        elsewhere = _assigned_elsewhere(name, tree, function)
        return f"assign it first, e.g. {size}" + (
            f" ({name} of {elsewhere} cannot be used in another function)" if elsewhere else ""
        )
    if close := nearest(name, bound):
        return f"did you mean {close}?"
    if elsewhere := _assigned_elsewhere(name, tree, function):
        return f"{elsewhere} has a local variable of that name: assign it here too, or pass it as an argument"
    return "assign or import it before this line"


def _of_class(name: str, owner: ast.ClassDef, function: Function) -> str | None:
    """Return a suggestion if the class has the name as an attribute or an argument of __init__."""
    methods = methods_of(owner)
    me = function.args.args[0].arg if function.args.args else "self"
    attributes = attributes_of(owner)
    if name in attributes or name in methods or name in _class_level(owner):
        return f"did you mean {me}.{name}?"
    start = methods.get("__init__")
    if start is not None and start is not function and name in bound_in(start):
        word = (
            "an argument" if name in {parameter.arg for parameter in parameters_of(start)} else "a local name"
        )
        return (
            f"it is {word} of __init__ only: store it there, self.{name} = {name}, and use {me}.{name} here"
        )
    return None


def attributes_of(owner: ast.ClassDef) -> set[str]:
    """Return the names assigned as self.name in the class, and buffers or parameters registered by name."""
    names = {node.attr for node in self_attributes(owner)}
    for call in nodes(owner, ast.Call):
        if isinstance(call.func, ast.Attribute) and call.func.attr in REGISTERS and call.args:
            first = call.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                names.add(first.value)
    return names


def self_attributes(owner: ast.AST) -> Iterator[ast.Attribute]:
    """Yield each `self.name` that is assigned in a class."""
    for node in nodes(owner, ast.Attribute):
        if isinstance(node.ctx, ast.Store) and dotted(node.value) == "self":
            yield node


def _class_level(owner: ast.ClassDef) -> set[str]:
    """Return the names of variables that are assigned in the body of the class."""
    targets = [target for line in owner.body if isinstance(line, ast.Assign) for target in line.targets]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _size(name: str, function: Function) -> str | None:
    """Return an assignment that takes a size from the function's first tensor: "B = query.size(0)"."""
    spec = function.args
    tensors = [parameter.arg for parameter in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]
    tensors = [tensor for tensor in tensors if tensor not in NOT_TENSORS]
    if not tensors or tensors[0] == name or function.name == "__init__":
        return None
    source = tensors[0]
    if name.lower().startswith(("k", "src", "source", "s")) and len(tensors) > 1 and LENGTH.fullmatch(name):
        source = next((tensor for tensor in tensors if tensor.lower().startswith("k")), source)
    for pattern, axis in ((BATCH, 0), (LENGTH, 1), (WIDTH, -1)):
        if pattern.fullmatch(name):
            return f"{name} = {source}.size({axis})"
    return None


def _assigned_elsewhere(name: str, tree: ast.Module, function: Function | None) -> str | None:
    """Return the name of the first other function that has a local variable of this name."""
    for node in nodes(tree, FUNCTIONS):
        if node is not function and name in bound_in(node):
            return node.name
    return None
