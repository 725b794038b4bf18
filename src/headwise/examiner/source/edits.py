"""Repair a learner's own statement with the smallest change to the line that has the fault.

A table of edits by fault. If a statement does not have what its edit changes, nothing is edited, and the
fault's repair is written in the learner's names instead (repairs.py).
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable

from .parsed import expression, nodes

Edit = Callable[[ast.stmt, dict[str, str]], ast.stmt | None]
TRANSPOSES = ("transpose", "permute", "swapaxes", "swapdims")
JOINS = ("reshape", "view", "flatten")
LIBRARIES = {"torch", "F", "nn", "np", "nn.functional", "torch.nn.functional", "functional"}
MINUS_INFINITY = 'float("-inf")'


def edited(key: str, statement: ast.stmt, names: dict[str, str]) -> str | None:
    """Return the statement without the fault, as text; None if there is no edit or nothing to change.

    Args:
        key: of the fault.
        statement: of the learner.
        names: the learner's names for "query", "key", "value", "num_heads", "W_q", "W_o".
    """
    edit = EDITS.get(key)
    if edit is None or hasattr(statement, "body"):
        return None
    before = ast.unparse(statement)
    after = edit(copy.deepcopy(statement), names)
    text = None if after is None else plain(after)
    return text if text != plain(statement) and text != before else None


def plain(node: ast.AST) -> str:
    """Return the code of a node, without the parentheses that `ast.unparse` puts around tuples."""
    if isinstance(node, ast.Module):
        return "\n".join(map(plain, node.body))
    text = ast.unparse(ast.fix_missing_locations(node))
    if isinstance(node, (ast.Assign, ast.Return)) and isinstance(node.value, ast.Tuple):
        value = ast.unparse(node.value)
        return f"{text[: -len(value)]}{value[1:-1]}"
    return text.replace("float('-inf')", MINUS_INFINITY)


class _Calls(ast.NodeTransformer):
    """Replace the calls of functions with these names by the result of `change`."""

    def __init__(self, names: tuple[str, ...], change: Callable[[ast.Call], ast.expr]) -> None:
        self.names, self.change = names, change

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        return self.change(node) if any(name in called(node).lower() for name in self.names) else node


def called(node: ast.Call) -> str:
    """Return the last part of the name that is called: "softmax" for F.softmax and x.softmax."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _on_calls(*names: str) -> Callable[[Callable[[ast.Call], ast.expr]], Edit]:
    """Make an edit of a statement from a change of the calls with these names."""

    def edit(change: Callable[[ast.Call], ast.expr]) -> Edit:
        def apply(statement: ast.stmt, learners_names: dict[str, str]) -> ast.stmt | None:
            return _Calls(names, change).visit(statement)

        return apply

    return edit


def _is_library(node: ast.expr) -> bool:
    return ast.unparse(node) in LIBRARIES


def _receiver(node: ast.Call) -> ast.expr | None:
    """Return the tensor that a call works on: x for x.softmax(..) and F.softmax(x, ..)."""
    if isinstance(node.func, ast.Attribute) and not _is_library(node.func.value):
        named = ast.unparse(node.func.value)
        if named != "self" and not named.startswith("self."):
            return node.func.value
    return node.args[0] if node.args else None


def _after_receiver(node: ast.Call) -> int:
    """Return the index of the first argument after the tensor that a call works on."""
    return int(_receiver(node) is (node.args[0] if node.args else None))


@_on_calls("softmax")
def _over_keys(node: ast.Call) -> ast.expr:
    minus_one = ast.UnaryOp(ast.USub(), ast.Constant(1))
    for keyword in node.keywords:
        if keyword.arg in ("dim", "axis"):
            keyword.value = minus_one
            return node
    place = _after_receiver(node)
    if called(node) == "softmax" and len(node.args) > place:
        node.args[place] = minus_one
    elif called(node).lower() == "softmax":
        node.keywords.append(ast.keyword("dim", minus_one))
    return node


@_on_calls("sigmoid", "exp", "log_softmax", "logsoftmax")
def _into_softmax(node: ast.Call) -> ast.expr:
    of = _receiver(node)
    return node if of is None else expression(f"torch.softmax({ast.unparse(of)}, dim=-1)")


@_on_calls("relu", "norm", "ln")
def _unwrapped(node: ast.Call) -> ast.expr:
    of = _receiver(node)
    return node if of is None else of


@_on_calls("masked_fill", "where")
def _with_infinity(node: ast.Call) -> ast.expr:
    if called(node).startswith("masked_fill") and len(node.args) == 2:
        node.args[1] = expression(MINUS_INFINITY)
    return node


@_on_calls("masked_fill")
def _other_way_round(node: ast.Call) -> ast.expr:
    condition = node.args[0] if node.args else None
    if isinstance(condition, ast.Compare) and isinstance(condition.comparators[0], ast.Constant):
        number = condition.comparators[0].value
        if number in (0, 1) and isinstance(condition.ops[0], ast.Eq):
            condition.comparators[0] = ast.Constant(
                (not number) if isinstance(number, bool) else 1 - int(number)  # type: ignore[arg-type]
            )
    elif isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Invert):
        node.args[0] = condition.operand
    elif condition is not None:
        node.args[0] = ast.UnaryOp(ast.Invert(), condition)
    return node


@_on_calls("triu", "tril")
def _from_the_diagonal(node: ast.Call) -> ast.expr:
    place = _after_receiver(node)
    node.args = node.args[:place]
    node.keywords = [keyword for keyword in node.keywords if keyword.arg != "diagonal"]
    if "triu" in called(node):
        node.keywords.append(ast.keyword("diagonal", ast.Constant(1)))
    return node


@_on_calls("triu", "tril")
def _the_other_triangle(node: ast.Call) -> ast.expr:
    if isinstance(node.func, ast.Attribute):
        node.func.attr = {"triu": "tril", "tril": "triu"}.get(node.func.attr, node.func.attr)
    place = _after_receiver(node)
    for keyword in node.keywords:
        if keyword.arg == "diagonal":
            keyword.value = _negative(keyword.value)
    node.args = [_negative(argument) if i == place else argument for i, argument in enumerate(node.args)]
    return node


def _negative(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return node.operand
    return node if ast.unparse(node) == "0" else ast.UnaryOp(ast.USub(), node)


@_on_calls("dropout")
def _while_training(node: ast.Call) -> ast.expr:
    if called(node) == "dropout" and isinstance(node.func, ast.Attribute) and _is_library(node.func.value):
        node.keywords = [keyword for keyword in node.keywords if keyword.arg != "training"]
        node.args = node.args[:2]
        node.keywords.append(ast.keyword("training", expression("self.training")))
    return node


def _assigned_result(statement: ast.stmt, names: dict[str, str]) -> ast.stmt | None:
    """Assign the result of `scores.masked_fill(..)`, which changes nothing on a line of its own."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    of = _receiver(call) if isinstance(call, ast.Call) and called(call) == "masked_fill" else None
    return ast.Assign([of], call) if isinstance(of, ast.Name) and call is not None else None


def _projected(statement: ast.stmt, names: dict[str, str]) -> ast.stmt | None:
    """Apply the output projection to what is returned."""
    if not isinstance(statement, ast.Return) or statement.value is None:
        return None
    several = statement.value.elts if isinstance(statement.value, ast.Tuple) else None
    first = statement.value if several is None else several[0]
    made = expression(f"{names.get('W_o', 'self.W_o')}({ast.unparse(first)})")
    if several is None:
        statement.value = made
    else:
        several[0] = made
    return statement


def _named_heads(statement: ast.stmt, names: dict[str, str]) -> ast.stmt | None:
    """Replace a number by the name for the number of heads in calls that reshape."""
    heads = names.get("num_heads")
    if heads is None:
        return None

    class Named(ast.NodeTransformer):
        def visit_Constant(self, node: ast.Constant) -> ast.expr:
            fixed = isinstance(node.value, int) and node.value > 1  # True counts as 1
            return expression(str(heads)) if fixed else node

    def change(node: ast.Call) -> ast.expr:
        node.args = [Named().visit(argument) for argument in node.args]
        return node

    return _Calls(JOINS, change).visit(statement)


def _registered(statement: ast.stmt, names: dict[str, str]) -> ast.stmt | None:
    """Replace a list of layers by a ModuleList, which registers them."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, (ast.List, ast.ListComp)):
        return None
    statement.value = expression(f"nn.ModuleList({ast.unparse(statement.value)})")
    return statement


class _Products(ast.NodeTransformer):
    """Replace the operands of matrix products by the result of `change`."""

    def __init__(self, change: Callable[[ast.expr, ast.expr], tuple[ast.expr, ast.expr]]) -> None:
        self.change = change

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.op, ast.MatMult):
            node.left, node.right = self.change(node.left, node.right)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if called(node) in ("matmul", "bmm") and len(node.args) == 2:
            node.args[0], node.args[1] = self.change(node.args[0], node.args[1])
        return node


def _on_products(change: Callable[[ast.expr, ast.expr], tuple[ast.expr, ast.expr]]) -> Edit:
    def edit(statement: ast.stmt, names: dict[str, str]) -> ast.stmt | None:
        return _Products(change).visit(statement)

    return edit


@_on_products
def _weights_as_they_are(left: ast.expr, right: ast.expr) -> tuple[ast.expr, ast.expr]:
    if isinstance(left, ast.Call) and called(left) in TRANSPOSES and isinstance(left.func, ast.Attribute):
        return left.func.value, right
    return (left.value if isinstance(left, ast.Attribute) and left.attr in ("T", "mT") else left), right


@_on_products
def _softmax_first(left: ast.expr, right: ast.expr) -> tuple[ast.expr, ast.expr]:
    of = left.left if isinstance(left, ast.BinOp) and ".sum(" in ast.unparse(left.right) else left
    return expression(f"torch.softmax({ast.unparse(of)}, dim=-1)"), right


@_on_products
def _weight_turned(left: ast.expr, right: ast.expr) -> tuple[ast.expr, ast.expr]:
    turned = isinstance(right, ast.Attribute) and right.attr not in ("T", "mT")
    return left, ast.Attribute(right, "T", ast.Load()) if turned else right


def _merged(statement: ast.stmt, names: dict[str, str]) -> ast.stmt | None:
    """Transpose the heads next to the channels before they are merged."""

    def change(node: ast.Call) -> ast.expr:
        if called(node) not in JOINS or not isinstance(node.func, ast.Attribute):
            return node
        of = node.func.value
        while (
            isinstance(of, ast.Call)
            and called(of) in (*TRANSPOSES, "contiguous")
            and isinstance(of.func, ast.Attribute)
        ):
            of = of.func.value
        if not isinstance(of, (ast.Name, ast.BinOp)):
            return node  # the order of its axes is not clear
        turned = expression(f"({ast.unparse(of)}).transpose(1, 2)")
        return ast.Call(ast.Attribute(turned, "reshape", ast.Load()), node.args, node.keywords)

    joins = [call for call in nodes(statement, ast.Call) if called(call) in JOINS]
    if len(joins) != 1 or called(joins[0]) == "flatten":
        return None
    return _Calls(JOINS, change).visit(statement)


def _from_input(correct: str, wrong: str) -> Edit:
    """Replace one input by another."""

    def edit(statement: ast.stmt, names: dict[str, str]) -> ast.stmt | None:
        right, other = names.get(correct), names.get(wrong)
        if right is None or other is None or not isinstance(statement, ast.Assign):
            return None
        if not isinstance(statement.targets[0], ast.Name):
            return None
        for node in ast.walk(statement.value):
            if isinstance(node, ast.Name) and node.id == other:
                node.id = right
        return statement

    return edit


def _through(correct: str, wrong: str) -> Edit:
    """Replace one projection by another."""

    def edit(statement: ast.stmt, names: dict[str, str]) -> ast.stmt | None:
        right, other = names.get(correct), names.get(wrong)
        if right is None or other is None or not isinstance(statement, ast.Assign):
            return None
        value = ast.unparse(statement.value)
        statement.value = expression(value.replace(f"{other}(", f"{right}("))
        return statement

    return edit


@_on_calls("linear")
def _with_bias(node: ast.Call) -> ast.expr:
    node.keywords = [keyword for keyword in node.keywords if keyword.arg != "bias"]
    return node


def _without_residual(statement: ast.stmt, names: dict[str, str]) -> ast.stmt | None:
    inputs = {*names.values(), "residual", "identity", "shortcut"}

    class Alone(ast.NodeTransformer):
        def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
            self.generic_visit(node)
            if isinstance(node.op, ast.Add):
                for term, other in ((node.left, node.right), (node.right, node.left)):
                    if isinstance(term, ast.Name) and term.id in inputs:
                        return other
            return node

    return Alone().visit(statement)


EDITS: dict[str, Edit] = {
    "softmax over queries": _over_keys,
    "softmax over heads": _over_keys,
    "softmax over batch": _over_keys,
    "sigmoid": _into_softmax,
    "exp without sum": _into_softmax,
    "log softmax": _into_softmax,
    "relu added": _unwrapped,
    "relu on projections": _unwrapped,
    "layer norm added": _unwrapped,
    "residual added": _without_residual,
    "mask inverted": _other_way_round,
    "fill with zero": _with_infinity,
    "fill too small": _with_infinity,
    "overflow in half": _with_infinity,
    "causal hides itself": _from_the_diagonal,
    "causal shows the next": _from_the_diagonal,
    "dropout in eval": _while_training,
    "merge without transpose": _merged,
    "merge with wrong transpose": _merged,
    "merge interleaved": _merged,
    "value from key": _from_input("value", "key"),
    "key from value": _from_input("key", "value"),
    "keys and values swapped": _from_input("key", "value"),
    "queries and keys swapped": _from_input("query", "key"),
    "queries and values swapped": _from_input("query", "value"),
    "keys through w_q": _through("W_k", "W_q"),
    "values through w_k": _through("W_v", "W_k"),
    "no q bias": _with_bias,
    "no v bias": _with_bias,
    "weights transposed before v": _weights_as_they_are,
    "causal flipped": _the_other_triangle,
    "mask ignored": _assigned_result,
    "no output projection": _projected,
    "hard-coded heads": _named_heads,
    "heads in a list": _registered,
    "no softmax": _softmax_first,
    "divide by sum": _softmax_first,
    "weight not transposed": _weight_turned,
    "output weight not transposed": _weight_turned,
}
