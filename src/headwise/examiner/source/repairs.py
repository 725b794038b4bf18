"""A repair in the learner's own names.

A fault's repair is written in names of ours: scores, weights, q, self.d_k, self.W_q. The learner's tree says
what they call each of them; what has no name there is said by an expression, `q.size(-1)`, or in words.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from ..evidence import Evidence
from ..faults.fault import Fault
from .edits import called, mended, plain
from .lines import used_by
from .parsed import (
    DEFINITIONS,
    FUNCTIONS,
    Definition,
    Function,
    bound_in,
    dotted,
    expression,
    extent_of,
    inner_nodes,
    methods_of,
    tree_of,
)

PRODUCTS = {"matmul", "bmm", "mm", "einsum", "dot"}
TURNS = {"transpose", "permute", "swapaxes", "swapdims", "contiguous", "t", "movedim"}
LIBRARIES = {"torch", "F", "nn", "np", "numpy", "functional", "torch.nn.functional", "nn.functional", "math"}
IN_WORDS = {
    "d_k": "the channels of one head",
    "num_heads": "how many heads there are",
    "d_model": "the width of the input",
    "scores": "q k^T, before the softmax",
    "weights": "what the softmax gives",
    "out": "weights times v",
    "B": "the batch",
    "T": "the length of the queries",
    "p": "the probability of dropout",
    **{f"W_{one}": "a layer of its own" for one in "qkvo"},
}
SIZES = {"d_k": "head dim", "num_heads": "heads", "d_model": "width"}


def in_their_names(repair: str, evidence: Evidence, line: int | None, fault: Fault | None = None) -> str:
    """The repair as the learner would write it.

    Args:
        repair: lines of Python in our names; what is no Python stays as it is.
        line: where the fault sits, from 1: names are those of the function around it.
        fault: whose repair it is; where the line itself can be mended, that is the repair.
    """
    step = "" if fault is None else fault.step
    tree = tree_of(evidence.source or "")
    if tree is None:
        return repair
    names = _Names(tree, evidence, line, any(one in repair for one in ("scores", "weights", "q @")))
    if names.home is None:
        return repair
    own = names.statement(line)
    new = None if fault is None or own is None else mended(fault.key, own, names.as_text())
    if new is not None:
        return _with_self(new, names)
    if step == "scale" and (said := names.kept_scale(line)):
        return said
    fused = [role.parameter for one, role in evidence.roles.items() if one in "qkv" and "[" in role.parameter]
    if fused and "self.W_q(" in repair:
        return f"# {fused[0].partition('[')[0]} holds q, k and v: take each from its own third"
    lines = []
    for text in repair.splitlines():
        code, mark, comment = text.partition("  # ")
        try:
            node = ast.parse(code.strip())
        except SyntaxError:
            return repair
        theirs = _Theirs(names, step)
        new = plain(theirs.visit(node))
        words = [comment] if mark else []
        words += [f"{one}: {IN_WORDS[one]}" for one in dict.fromkeys(theirs.unknown) if one in IN_WORDS]
        lines.append(new + (f"  # {'; '.join(words)}" if words else ""))
    return "\n".join(lines)


def _with_self(text: str, names: _Names) -> str:
    """What `self` is where there is none: an argument that is still to be added."""
    if names.me is not None or "self.training" not in text:
        return text
    return text.replace("self.training", "training") + "  # training: an argument, False in eval"


class _Product(NamedTuple):
    """Two tensors multiplied: q with k, or weights with v."""

    node: ast.expr
    left: ast.expr
    right: ast.expr
    turned: bool  # whether the second was transposed, or an equation says how


class _Names:
    """What the learner calls things, in the function where the fault sits."""

    def __init__(self, tree: ast.Module, evidence: Evidence, line: int | None, about_scores: bool) -> None:
        self.tree, self.evidence = tree, evidence
        self.checked = _definition(tree, evidence)
        self.home = self._home(line, about_scores)
        self.found: dict[str, ast.expr] = {}
        self.hides: ast.expr | None = None  # the mask as it meets the scores
        self.product: ast.expr | None = None
        self.maths = any(
            isinstance(one, ast.Import) and any(each.name == "math" for each in one.names)
            for one in tree.body
        )
        if self.home is None:
            return
        arguments = self.home.args.args
        self.me = arguments[0].arg if arguments and arguments[0].arg in ("self", "cls") else None
        self.bound = bound_in(self.home)
        self._read_products()
        self._read_inputs()
        self._read_sizes()

    def _home(self, line: int | None, about_scores: bool) -> Function | None:
        """The function around the line; else the one with the softmax, where that is what it is about."""
        functions = [one for one in ast.walk(self.tree) if isinstance(one, FUNCTIONS)]
        around = [
            one for one in functions if line is not None and one.lineno <= line <= (one.end_lineno or 0)
        ]
        if around:
            return max(around, key=lambda one: one.lineno)
        if about_scores and self.checked is not None:
            extents = [extent_of(one) for one in used_by(self.tree, self.checked)]
            for one in functions:
                within = any(first <= one.lineno <= last for first, last in extents)
                if within and any(_softmaxed(each) is not None for each in inner_nodes(one)):
                    return one
        return self.forward()

    def statement(self, line: int | None) -> ast.stmt | None:
        """The one on this line of the function."""
        assert self.home is not None
        on = [
            one
            for one in inner_nodes(self.home)
            if isinstance(one, ast.stmt) and line is not None and one.lineno <= line <= (one.end_lineno or 0)
        ]
        return min(on, key=lambda one: (one.end_lineno or one.lineno) - one.lineno, default=None)

    def forward(self) -> Function | None:
        """What is called."""
        if not isinstance(self.checked, ast.ClassDef):
            return self.checked
        owners = [one for one in used_by(self.tree, self.checked) if isinstance(one, ast.ClassDef)]
        methods = [methods_of(one) for one in owners]
        return next(
            (each[name] for each in methods for name in ("forward", "__call__") if name in each), None
        )

    def as_text(self) -> dict[str, str]:
        """What they call each, and the projections."""
        texts = {ours: ast.unparse(theirs) for ours, theirs in self.found.items()}
        for letter in "qkvo":
            role = self.evidence.roles.get(letter)
            if role is not None and re.fullmatch(r"[\w.]+\.weight", role.parameter):
                texts[f"W_{letter}"] = f"{self.me or 'self'}.{role.parameter.removesuffix('.weight')}"
        return texts

    # Tensors on the way

    def _read_products(self) -> None:
        assert self.home is not None
        products = sorted(_products(self.home), key=lambda one: (one.node.lineno, one.node.col_offset))
        soft = next((one for one in inner_nodes(self.home) if _softmaxed(one) is not None), None)
        weights: ast.expr | None = None
        if soft is not None:
            self._name("scores", _base(_softmaxed(soft)))
            weights = _target_of(self.home, soft)
            self._name("weights", weights)
        first = next((one for one in products if one.turned), None)
        if first is not None:
            self.product = None if any(_scales(one) for one in (first.left, first.right)) else first.node
            self._name("q", _unturned(first.left))
            self._name("k", _unturned(first.right))
            if soft is None:
                self._name("scores", _target_of(self.home, first.node))
        for one in products:
            if one is first or weights is None:
                continue
            text = ast.unparse(weights)
            if text in {ast.unparse(each) for each in ast.walk(one.left) if isinstance(each, ast.expr)}:
                self._name("v", one.right)
                self._name("out", _target_of(self.home, one.node))
                break
        mask = self.evidence.conventions.mask_argument
        if mask is None or mask not in self.bound:
            mask = next((one for one in sorted(self.bound) if "mask" in one.lower()), None)
        if mask is not None:
            self.found["mask"] = _read(mask)
            axes = {"[B, T, S]": "[:, None]", "[B, S]": "[:, None, None, :]"}
            shape = axes.get(self.evidence.conventions.mask_shape or "", "")
            plain = self.evidence.kind == "class" and mask == self.evidence.conventions.mask_argument
            own = (
                expression(f"{mask}{shape}") if plain and f"{mask} = " not in ast.unparse(self.home) else None
            )
            self.hides = _shaped(self.home, mask) or own

    def _name(self, ours: str, theirs: ast.expr | None) -> None:
        if theirs is not None and ours not in self.found:
            self.found[ours] = theirs

    # What goes in

    def _read_inputs(self) -> None:
        forward = self.forward()
        if forward is None:
            return
        names = [one.arg for one in forward.args.args if one.arg not in ("self", "cls")]
        slots = [one for one in self.evidence.conventions.arguments if one != "mask"]
        for slot, name in zip(slots, [one for one in names if "mask" not in one.lower()], strict=False):
            both = {"x": ("query", "key", "value", "x"), "memory": ("key", "value"), "query": ("query", "x")}
            for ours in both.get(slot, (slot,)):
                if slot != "x" or ours not in self.found:
                    self.found[ours] = _read(name)

    def layer(self, letter: str, given: ast.expr) -> ast.expr | None:
        """What makes q, k or v, or the output, of this; None where it is not one layer."""
        role = self.evidence.roles.get(letter)
        if role is None or " and " in role.parameter or "[" in role.parameter:
            return None
        if any(self.evidence.roles[one].parameter == role.parameter for one in "qkvo"[: "qkvo".index(letter)]
               if one in self.evidence.roles):  # fmt: skip
            return None  # it is to have a layer of its own
        path = re.sub(r"\.(\d+)", r"[\1]", role.parameter)  # as Python writes it
        me = self.me or "self"
        if path.endswith(".weight"):
            return ast.Call(expression(f"{me}.{path.removesuffix('.weight')}"), [given], [])
        if role.transposed:
            return ast.BinOp(given, ast.MatMult(), expression(f"{me}.{path}"))
        return expression(f"F.linear({ast.unparse(given)}, {me}.{path})")

    # Sizes

    def _read_sizes(self) -> None:
        from ..examine.words import size_word

        assert self.home is not None
        owners = used_by(self.tree, self.checked) if isinstance(self.checked, ast.ClassDef) else []
        kept = {
            one.attr: one
            for owner in owners
            for one in ast.walk(owner)
            if isinstance(one, ast.Attribute)
            and isinstance(one.ctx, ast.Store)
            and dotted(one.value) == "self"
        }
        for ours, meaning in SIZES.items():
            of_self = [name for name in kept if size_word(name) == meaning] if self.me else []
            local = [name for name in sorted(self.bound) if size_word(name) == meaning and len(name) > 1]
            if of_self:
                self.found[ours] = expression(f"{self.me}.{of_self[0]}")
            elif local:
                self.found[ours] = _read(local[0])
        for node in inner_nodes(self.home):
            if isinstance(node, ast.Assign) and (of := _sized(node.value)) is not None:
                self._read_shape(node.targets[0], *of)
        x = self.found.get("query") or self.found.get("q")
        if x is not None and self.home is self.forward() and self.evidence.conventions.batch_first:
            self._name("B", expression(f"{ast.unparse(x)}.size(0)"))
            self._name("T", expression(f"{ast.unparse(x)}.size(1)"))
        if self.home.name == "__init__" and {"d_model", "num_heads"} <= set(self.found):
            width, heads = (ast.unparse(self.found[one]) for one in ("d_model", "num_heads"))
            self._name("d_k", expression(f"{width} // {heads}"))
        if "q" in self.found:
            self._name("d_k", expression(f"{_braced(self.found['q'])}.size(-1)"))

    def _read_shape(self, target: ast.expr, of: str, axis: int | None) -> None:
        order = ("B", "T") if self.evidence.conventions.batch_first else ("T", "B")
        inputs = {ast.unparse(self.found[one]) for one in ("query", "x") if one in self.found}
        if inputs and of not in inputs and self.home is self.forward():
            return
        if axis in (0, 1) and isinstance(target, ast.Name):
            self._name(order[axis], _read(target.id))
        if axis is None and isinstance(target, ast.Tuple):
            for ours, one in zip(order, target.elts, strict=False):
                if isinstance(one, ast.Name) and one.id != "_":
                    self._name(ours, _read(one.id))

    def kept_scale(self, line: int | None) -> str | None:
        """Where the fault's line only keeps the scale for later: that line, mended."""
        assert self.home is not None
        for node in inner_nodes(self.home):
            if not isinstance(node, ast.Assign) or node.lineno != line or len(node.targets) != 1:
                continue
            target = ast.unparse(node.targets[0])
            head = self.found.get("d_k")
            if (
                list(_products(node))
                or head is None
                or not isinstance(node.targets[0], (ast.Name, ast.Attribute))
            ):
                return None
            if not dotted(node.targets[0]):
                return None
            around: list[ast.AST] = [self.tree]
            if self.checked is not None:
                around = list(used_by(self.tree, self.checked))
            used = [
                one
                for each in around
                for one in ast.walk(each)
                if isinstance(one, ast.BinOp) and ast.unparse(one.right) == target
            ]
            signs = {type(one.op) for one in used}
            if signs not in ({ast.Mult}, {ast.Div}):
                return None
            power = "0.5" if signs == {ast.Div} else "-0.5"
            return f"{target} = {_braced(head)} ** {power}"
        return None


class _Theirs(ast.NodeTransformer):
    """Our names become theirs."""

    def __init__(self, names: _Names, step: str) -> None:
        self.names, self.step, self.unknown = names, step, list[str]()

    def visit_Name(self, node: ast.Name) -> ast.expr:
        theirs = self.names.found.get(node.id)
        if theirs is None or (isinstance(node.ctx, ast.Store) and not isinstance(theirs, ast.Name)):
            if (
                node.id in IN_WORDS
                and node.id not in self.names.bound
                and not isinstance(node.ctx, ast.Store)
            ):
                self.unknown.append(node.id)
            return node
        return _stored(theirs, node.ctx)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if dotted(node) == f"self.{node.attr}" and node.attr in (*SIZES, "p"):
            theirs = self.names.found.get(node.attr)
            if theirs is None:
                self.unknown.append(node.attr)
                return _read(node.attr)
            return theirs
        self.generic_visit(node)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        scored = isinstance(node.op, ast.MatMult) and ast.unparse(node) == "q @ k.transpose(-2, -1)"
        if scored and self.step in ("scale", "drop", "softmax") and self.names.product is not None:
            return self.names.product
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        name = dotted(node.func)
        if name.startswith("self.W_") and len(node.args) == 1:
            given = self.visit(node.args[0])
            layer = self.names.layer(name[-1], given)
            if layer is None:
                self.unknown.append(f"W_{name[-1]}")
            return layer or ast.Call(node.func, [given], [])
        self.generic_visit(node)
        if name == "math.sqrt" and not self.names.maths:
            return ast.BinOp(node.args[0], ast.Pow(), ast.Constant(0.5))
        reshapes = isinstance(node.func, ast.Attribute) and node.func.attr in ("reshape", "view")
        if reshapes and node.args and "d_model" in self.unknown:
            self.unknown.remove("d_model")
            node.args[-1] = ast.UnaryOp(ast.USub(), ast.Constant(1))
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        mask = (
            self.names.hides
            if isinstance(node.left, ast.Name) and self.names.hides
            else self.visit(node.left)
        )
        hides = ast.unparse(node).endswith("== 0") and "mask" in ast.unparse(node.left)
        told = self.names.evidence.conventions
        if not hides or told.mask_true_attends is None:
            return ast.Compare(mask, node.ops, node.comparators)
        if told.mask_kind == "bool":
            return ast.UnaryOp(ast.Invert(), mask) if told.mask_true_attends else mask
        return ast.Compare(mask, [ast.Eq()], [ast.Constant(0 if told.mask_true_attends else 1)])


def _definition(tree: ast.Module, evidence: Evidence) -> Definition | None:
    every = [one for one in ast.walk(tree) if isinstance(one, DEFINITIONS) and one.name == evidence.name]
    first = evidence.first_line
    near = [one for one in every if first is not None and one.lineno >= first]
    return next(iter(near or every), None)


def _read(name: str) -> ast.expr:
    return ast.Name(name, ast.Load())


def _stored(node: ast.expr, ctx: ast.expr_context) -> ast.expr:
    if isinstance(node, ast.Name):
        return ast.Name(node.id, ctx)
    return ast.Attribute(node.value, node.attr, ctx) if isinstance(node, ast.Attribute) else node


def _braced(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)) else f"({text})"


def _products(node: ast.AST) -> Iterator[_Product]:
    for one in inner_nodes(node):
        if isinstance(one, ast.BinOp) and isinstance(one.op, ast.MatMult):
            if ast.unparse(_unturned(one.right)).startswith("self."):
                continue  # a projection
            yield _Product(one, one.left, one.right, _is_turned(one.right))
        elif isinstance(one, ast.Call) and (name := called(one)) in PRODUCTS:
            given = [
                each
                for each in one.args
                if not (isinstance(each, ast.Constant) and isinstance(each.value, str))
            ]
            if isinstance(one.func, ast.Attribute) and ast.unparse(one.func.value) not in LIBRARIES | {
                "einops"
            }:
                given = [one.func.value, *given]
            if len(given) == 2 and not any(ast.unparse(each).startswith("self.") for each in given):
                yield _Product(one, given[0], given[1], name == "einsum" or _is_turned(given[1]))


def _is_turned(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in ("T", "mT", "mH", "H")
    return isinstance(node, ast.Call) and (called(node) in TURNS or _is_turned(node.func))


def _base(node: ast.expr | None) -> ast.expr | None:
    """The tensor itself, whatever is done to its shape."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if called(node) not in TURNS | {"view", "reshape", "flatten", "unflatten", "squeeze", "float"}:
            break
        node = node.func.value
    return node


def _unturned(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.Attribute) and node.attr in ("T", "mT"):
        return _unturned(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TURNS:
        return _unturned(node.func.value)
    return node


def _scales(node: ast.expr) -> bool:
    """Whether it is multiplied or divided by something on the way into a product."""
    return any(
        isinstance(one, ast.BinOp) and isinstance(one.op, (ast.Mult, ast.Div)) for one in ast.walk(node)
    )


def _softmaxed(node: ast.AST) -> ast.expr | None:
    """What a softmax is taken of."""
    if not isinstance(node, ast.Call) or "softmax" not in ast.unparse(node.func).rpartition(".")[2].lower():
        return None
    if isinstance(node.func, ast.Attribute):
        of = ast.unparse(node.func.value)
        if of not in LIBRARIES and not of.startswith("self"):
            return node.func.value
    return node.args[0] if node.args and not isinstance(node.args[0], ast.Constant) else None


def _shaped(function: Function, mask: str) -> ast.expr | None:
    """The mask in the shape in which it meets the scores: mask.unsqueeze(1) of `mask.unsqueeze(1) == 0`."""
    for one in inner_nodes(function):
        if isinstance(one, ast.Call) and called(one).startswith("masked_fill") and one.args:
            met = [one.args[0]]
        elif isinstance(one, ast.BinOp):
            met = [one.left, one.right]
        else:
            continue
        for given in met:
            while isinstance(given, (ast.Compare, ast.UnaryOp)):
                given = given.left if isinstance(given, ast.Compare) else given.operand
            while isinstance(given, ast.Call) and called(given) in (
                "bool",
                "to",
                "logical_not",
                "eq",
                "float",
            ):
                given = given.func.value if isinstance(given.func, ast.Attribute) else given.args[0]
            text = ast.unparse(given)
            if re.fullmatch(rf"{mask}(\.unsqueeze\(-?\d\)|\[[:, \w]*None[:, \w]*\])+", text):
                return given
    return None


def _target_of(function: Function, node: ast.AST) -> ast.expr | None:
    """The name that is given to what this is part of."""
    for one in inner_nodes(function):
        target = one.targets[0] if isinstance(one, ast.Assign) else None
        if isinstance(target, (ast.Name, ast.Attribute)) and any(each is node for each in ast.walk(one)):
            return _stored(target, ast.Load())
    return None


def _sized(value: ast.expr) -> tuple[str, int | None] | None:
    """(of what, which axis) for x.size(0), x.shape[0], x.shape and x.size(); any slice counts as all."""
    text = ast.unparse(value)
    if (
        isinstance(value, ast.Subscript)
        and isinstance(value.value, ast.Attribute)
        and value.value.attr == "shape"
    ):
        axis = value.slice.value if isinstance(value.slice, ast.Constant) else None
        return ast.unparse(value.value.value), axis if isinstance(axis, int) else None
    if isinstance(value, ast.Attribute) and value.attr == "shape":
        return text.removesuffix(".shape"), None
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "size":
        axis = value.args[0].value if value.args and isinstance(value.args[0], ast.Constant) else None
        return ast.unparse(value.func.value), axis if isinstance(axis, int) else None
    return None
