"""A learner's source as a syntax tree, read and never run."""

from __future__ import annotations

import ast
import difflib
import re
import textwrap
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)


_parsing = threading.Lock()


@contextmanager
def unwarned() -> Iterator[None]:
    """No warnings while a source is parsed: "\\d" in a learner's string is their business.

    One at a time: the filters are the process's, and Python puts them back right only if one comes after the
    other; and Python 3.11 counts the depth of trees for all threads together, and raises where two meet.
    """
    with _parsing, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@lru_cache(maxsize=8)
def readable(source: str) -> str | None:
    """The source as Python takes it, an indented class moved to the left; None if it does not parse."""
    for text in (source, textwrap.dedent(source)):
        try:
            with unwarned():
                ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        return text
    return None


@lru_cache(maxsize=8)
def tree_of(source: str) -> ast.Module | None:
    """The tree, or None where the source is no Python. Lines are those of `source`."""
    text = readable(source)
    if text is None:
        return None
    with unwarned():
        return ast.parse(text)


def text_of(source: str, line: int | None) -> str:
    """One line, stripped; "" where there is none."""
    lines = source.splitlines()
    return lines[line - 1].strip() if line is not None and 0 < line <= len(lines) else ""


def dotted(node: ast.AST) -> str:
    """`torch.nn.Linear` as "torch.nn.Linear"; "" for anything that is not names and dots."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def inner_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function or class without those of functions and classes inside it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, DEFINITIONS):
            yield from inner_nodes(child)


def expression(text: str) -> ast.expr:
    """Python that has a value, as a tree."""
    return ast.parse(text, mode="eval").body


def methods_of(owner: ast.ClassDef) -> dict[str, Function]:
    """The functions of a class by name; of one name the last, which is the one that is bound."""
    return {one.name: one for one in owner.body if isinstance(one, FUNCTIONS)}


def parameters_of(function: Function) -> list[ast.arg]:
    """Every parameter, * and ** last."""
    spec = function.args
    last = [one for one in (spec.vararg, spec.kwarg) if one is not None]
    return [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *last]


def extent_of(node: ast.stmt) -> tuple[int, int]:
    """First and last line."""
    return node.lineno, node.end_lineno or node.lineno


def is_main(node: ast.AST) -> bool:
    """Whether it is `if __name__ == "__main__":`."""
    return isinstance(node, ast.If) and any(
        isinstance(one, ast.Name) and one.id == "__name__" for one in ast.walk(node.test)
    )


def bound_in(function: Function) -> set[str]:
    """Parameters and whatever is assigned in the function itself."""
    names = {one.arg for one in parameters_of(function)} | {
        node.id
        for node in inner_nodes(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return names | {node.name for node in inner_nodes(function) if isinstance(node, DEFINITIONS)}


@dataclass(frozen=True)
class Place:
    """A line of a source, and the statement, function and class around it."""

    source: str | None
    line: int | None
    shapes: Mapping[str, list[int]] = field(default_factory=dict)  # of the tensors there, by variable

    @cached_property
    def tree(self) -> ast.Module | None:
        return None if self.source is None else tree_of(self.source)

    @cached_property
    def statement(self) -> ast.stmt | None:
        """The smallest statement that holds the line."""
        around = [one for one in self._around() if isinstance(one, ast.stmt)]
        return min(around, key=lambda one: (one.end_lineno or one.lineno) - one.lineno, default=None)

    @cached_property
    def text(self) -> str:
        """The learner's line; the whole statement where it goes over a few lines."""
        if self.source is None:
            return ""
        line, node = text_of(self.source, self.line), self.statement
        compound = any(hasattr(node, name) for name in ("body", "cases"))
        if node is None or compound or node.end_lineno == node.lineno:
            return line
        lines = self.source.splitlines()[node.lineno - 1 : node.end_lineno]
        whole = " ".join(one.partition(" #")[0].strip() for one in lines)
        whole = re.sub(r"(?<=[(\[{]) | (?=[)\]}.])|,(?= ?[)\]}])", "", whole)
        return whole if len(whole) <= 110 else line

    @cached_property
    def function(self) -> Function | None:
        """The innermost function that holds the line."""
        around = [one for one in self._around() if isinstance(one, FUNCTIONS)]
        return max(around, key=lambda one: one.lineno, default=None)

    @cached_property
    def owner(self) -> ast.ClassDef | None:
        """The innermost class that holds the line."""
        around = [one for one in self._around() if isinstance(one, ast.ClassDef)]
        return max(around, key=lambda one: one.lineno, default=None)

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
        """A class or function of the file by its name."""
        for node in ast.walk(self.tree) if self.tree is not None else ():
            if isinstance(node, DEFINITIONS) and node.name == name:
                return node
        return None

    @property
    def locals(self) -> set[str]:
        return set() if self.function is None else bound_in(self.function)

    def layers(self) -> list[str]:
        """The parts of self that the statement calls: "W_q" of `self.W_q(x)`."""
        if self.statement is None:
            return []
        calls = [dotted(node.func) for node in ast.walk(self.statement) if isinstance(node, ast.Call)]
        return list(dict.fromkeys(call[5:] for call in calls if re.fullmatch(r"self\.\w+", call)))

    def where_set(self, attribute: str) -> str:
        """Where `self.attribute` is first assigned: " (line 12: `self.W_q = nn.Linear(d, d)`)", or ""."""
        for node in ast.walk(self.owner) if self.owner is not None else ():
            stores = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if stores and dotted(node) == f"self.{attribute}":
                line: int = node.lineno  # type: ignore[attr-defined]
                return f" (line {line}: `{text_of(self.source or '', line)}`)"
        return ""

    def shapes_named(self) -> dict[str, list[int]]:
        """The shapes of the tensors that the statement names, in its order."""
        nodes = ast.walk(self.statement) if self.statement is not None else ()
        names = [node.id for node in nodes if isinstance(node, ast.Name)]
        return {name: self.shapes[name] for name in names if name in self.shapes}

    def assigned(self, name: str) -> ast.expr | None:
        """What the variable was last assigned before the line, in the same function."""
        value = None
        for node in ast.walk(self.function) if self.function is not None else ():
            if not isinstance(node, ast.Assign) or node.lineno >= (self.line or 0):
                continue
            if any(isinstance(target, ast.Name) and target.id == name for target in node.targets):
                value = node.value if value is None or node.lineno > value.lineno else value
        return value

    def says(self, pattern: str) -> bool:
        """Whether the learner's line has this in it."""
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
NOT_TENSORS = {
    "self",
    "cls",
    "mask",
    "attn_mask",
    "attention_mask",
    "key_padding_mask",
    "is_causal",
    "causal",
    "dropout",
}


def import_for(name: str) -> str | None:
    """The line that brings a well-known name."""
    if name in IMPORTS:
        return IMPORTS[name]
    if name in STANDARD:
        return f"import {name}"
    return next(
        (f"from {module} import {name}" for module, names in FROM.items() if name in names.split()), None
    )


def nearest(name: str, others: Collection[str], cutoff: float = 0.75) -> str | None:
    """The name that was probably meant: the same but for capitals and underscores, else the most alike."""
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
    """What to do about `name`, read inside these classes and functions (outermost first).

    Args:
        bound: names that the module binds.
    """
    functions = [one for one in inside if not isinstance(one, ast.ClassDef)]
    owner = next((one for one in reversed(inside) if isinstance(one, ast.ClassDef)), None)
    function = functions[-1] if functions else None
    locals_ = set().union(*(bound_in(one) for one in functions)) if functions else set()
    if name == "self" and function is not None:
        return f"make it the first parameter: def {function.name}(self, ...)"
    if owner is not None and function is not None and (said := _of_class(name, owner, function)):
        return said
    if (line := import_for(name)) is not None:
        return line
    if name in OLD:
        return f"Python 3 calls it {OLD[name]}"
    if close := nearest(name, locals_, 0.8):
        return f"did you mean {close}?"
    if function is not None and (size := _size(name, function)):
        elsewhere = _assigned_elsewhere(name, tree, function)
        return f"assign it first, e.g. {size}" + (
            f" (the one in {elsewhere} is not seen here)" if elsewhere else ""
        )
    if close := nearest(name, bound):
        return f"did you mean {close}?"
    if elsewhere := _assigned_elsewhere(name, tree, function):
        return f"the one in {elsewhere} is not seen here: assign it here, or pass it as an argument"
    return "assign or import it before this line"


def _of_class(name: str, owner: ast.ClassDef, function: Function) -> str | None:
    """Where the class has that name, only not under it."""
    methods = methods_of(owner)
    me = function.args.args[0].arg if function.args.args else "self"
    kept = attributes_of(owner)
    if name in kept or name in methods or name in _class_level(owner):
        return f"did you mean {me}.{name}?"
    start = methods.get("__init__")
    if start is not None and start is not function and name in bound_in(start):
        word = "an argument" if name in {one.arg for one in parameters_of(start)} else "a local name"
        return (
            f"it is {word} of __init__ alone: keep it there, self.{name} = {name}, and use {me}.{name} here"
        )
    return None


def attributes_of(owner: ast.ClassDef) -> set[str]:
    """Names assigned as self.name anywhere in the class, and buffers or parameters registered by name."""
    names = set()
    for node in ast.walk(owner):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and dotted(node.value) == "self"
        ):
            names.add(node.attr)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            first = node.args[0]
            registers = node.func.attr in (
                "register_buffer",
                "register_parameter",
                "add_module",
                "register_module",
            )
            if registers and isinstance(first, ast.Constant) and isinstance(first.value, str):
                names.add(first.value)
    return names


def _class_level(owner: ast.ClassDef) -> set[str]:
    targets = [one.targets for one in owner.body if isinstance(one, ast.Assign)]
    return {target.id for group in targets for target in group if isinstance(target, ast.Name)}


def _size(name: str, function: Function) -> str | None:
    """An assignment that takes a size from the function's first tensor."""
    spec = function.args
    tensors = [one.arg for one in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]
    tensors = [one for one in tensors if one not in NOT_TENSORS]
    if not tensors or tensors[0] == name or function.name == "__init__":
        return None
    source = tensors[0]
    if name.lower().startswith(("k", "src", "source", "s")) and len(tensors) > 1 and LENGTH.fullmatch(name):
        source = next((one for one in tensors if one.lower().startswith("k")), source)
    for pattern, axis in ((BATCH, 0), (LENGTH, 1), (WIDTH, -1)):
        if pattern.fullmatch(name):
            return f"{name} = {source}.size({axis})"
    return None


def _assigned_elsewhere(name: str, tree: ast.Module, function: Function | None) -> str | None:
    """The first other function that has the name for itself."""
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS) and node is not function and name in bound_in(node):
            return node.name
    return None
