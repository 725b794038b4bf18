"""What the source alone says must have been asked: read here, where no code of the learner's runs."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

import torch

from ..evidence import Evidence
from ..examine.words import input_word, size_word
from ..source.parsed import unwarned

MAKERS = frozenset(("Linear", "Parameter", "Conv1d", "LazyLinear", "Embedding"))
SOFTMAX = frozenset(("softmax", "softmax_", "Softmax", "scaled_dot_product_attention"))
MULTI_HEAD = re.compile(r"multi_?head|mha", re.IGNORECASE)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Refusal:
    """Why a file is not right although its evidence is."""

    words: str
    kind: str = "unproved"
    wrong: bool = False  # numbers were shown to differ; else it is not judged


@dataclass
class Conditions:
    """Of one class or function."""

    takes_heads: bool = False
    takes_width: bool = False
    masks: list[str] = field(default_factory=list)  # arguments that are called masks
    three: bool = False  # queries, keys and values are asked for one by one
    has_parameters: bool = False
    attends: bool = False  # a class with a softmax of its own, or called multi-head

    def another_step(self, evidence: Evidence) -> Refusal | None:
        """Attention as a whole, by its source, that says it is a single step."""
        if not self.attends and not self.three:
            return None
        return Refusal(f"it is attention by its source, and was examined as a {evidence.step}")

    def missing(self, evidence: Evidence, num_heads: int | None) -> Refusal | None:
        """What was not asked although the source takes it."""
        plain = evidence.call("plain")
        if plain is None or plain.output is None:
            return Refusal("it gave no numbers without a mask")
        query = plain.given.query
        if query.ndim != 3 or len(query) < 2 or query.shape[1] < 3 or query.shape[2] < 2:
            return Refusal(f"it was asked with too little: {list(query.shape)}")
        if num_heads is not None and evidence.num_heads != num_heads:
            return Refusal(f"it was to be built with {num_heads} heads, and was with {evidence.num_heads}")
        if self.takes_heads and num_heads is None and evidence.num_heads < 2:
            return Refusal("its constructor takes a number of heads, and it was examined with one")
        if self.three and (evidence.conventions.self_only or torch.equal(plain.given.key, plain.given.value)):
            return Refusal("it takes queries, keys and values, and was examined with one for all")
        masked = [call for call in evidence.calls if call.probe in ("causal", "padding", "random mask")]
        if self.masks and not any(call.output is not None for call in masked):
            return Refusal(f"it takes {self.masks[0]}, and was not examined with a mask")
        return None


def conditions_of(source: str, name: str | None) -> Conditions:
    """Of the class or function of this name; of none where the source has none."""
    try:
        with unwarned():
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Conditions()
    classes = {one.name: one for one in ast.walk(tree) if isinstance(one, ast.ClassDef)}
    first = (name or "").partition(".")[0]
    if first in classes:
        return _of_class(classes, first)
    functions = [one for one in tree.body if isinstance(one, Function) and one.name == first]
    if not functions:
        return Conditions()
    made = Conditions()
    _read_call(made, functions[-1])
    _read_sizes(made, functions[-1])
    return made


def _of_class(classes: dict[str, ast.ClassDef], name: str) -> Conditions:
    made, seen = Conditions(), [name]
    forward = constructor = None
    for each in seen:  # grows by the bases beside it
        node = classes[each]
        methods = {one.name: one for one in node.body if isinstance(one, Function)}
        forward = forward or methods.get("forward") or methods.get("__call__") or methods.get("call")
        constructor = constructor or methods.get("__init__")
        seen += [
            base.id
            for base in node.bases
            if isinstance(base, ast.Name) and base.id in classes and base.id not in seen
        ]
        calls = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
        names = {one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "") for one in calls}
        made.has_parameters = made.has_parameters or bool(names & MAKERS)
        made.attends = made.attends or bool(names & SOFTMAX or MULTI_HEAD.search(each))
    if constructor is not None:
        _read_sizes(made, constructor)
    if forward is not None:
        _read_call(made, forward)
    return made


def _arguments(function: Function) -> list[str]:
    return [one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]


def _read_sizes(made: Conditions, function: Function) -> None:
    words = {size_word(one) for one in _arguments(function)}
    made.takes_heads, made.takes_width = "heads" in words, "width" in words


def _read_call(made: Conditions, function: Function) -> None:
    given = _arguments(function)
    made.masks = [one for one in given if "mask" in one.lower() and input_word(one) == "mask"]
    positional = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    needed = positional[: len(positional) - len(function.args.defaults)]
    made.three = {"query", "key", "value"} <= {input_word(one) for one in needed}
