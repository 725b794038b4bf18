"""Write a repair with the learner's own names.

The repair of a fault uses the names of the recipe: scores, weights, q, self.d_k, self.W_q. The learner's
source tells what each is called there; what has no name is written as an expression, such as `q.size(-1)`,
or explained in a comment.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from ..evidence import Evidence
from ..faults.fault import Fault
from .edits import called, edited, plain
from .lines import used_by
from .parsed import (
    DEFINITIONS,
    FUNCTIONS,
    Definition,
    Function,
    Place,
    bound_in,
    dotted,
    expression,
    extent_of,
    inner_nodes,
    methods_of,
    nodes,
    self_attributes,
    tree_of,
)

PRODUCTS = {"matmul", "bmm", "mm", "einsum", "dot"}
TRANSPOSES = {"transpose", "permute", "swapaxes", "swapdims", "contiguous", "t", "movedim"}
LIBRARIES = {"torch", "F", "nn", "np", "numpy", "functional", "torch.nn.functional", "nn.functional", "math"}
CASTS = {"bool", "to", "logical_not", "eq", "float"}
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
    **{f"W_{letter}": "a layer of its own" for letter in "qkvo"},
}
SIZES = {"d_k": "head dim", "num_heads": "heads", "d_model": "width"}


def in_learners_names(repair: str, evidence: Evidence, line: int | None, fault: Fault | None = None) -> str:
    """Return the repair as the learner would write it.

    Args:
        repair: lines of Python with the names of the recipe; other text is returned unchanged.
        evidence: of the learner's code.
        line: of the fault, counted from 1; names are those of the function around it.
        fault: that is repaired; if the learner's own line can be edited, the edited line is returned.
    """
    step = "" if fault is None else fault.step
    tree = tree_of(evidence.source or "")
    if tree is None:
        return repair
    names = _Names(tree, evidence, line, any(word in repair for word in ("scores", "weights", "q @")))
    if names.function is None:
        return repair
    own = names.statement(line)
    new = None if fault is None or own is None else edited(fault.key, own, names.as_text())
    if new is not None:
        return _with_self(new, names)
    if step == "scale" and (scale_line := names.stored_scale(line)):
        return scale_line
    projections = [evidence.roles[letter].parameter for letter in "qkv" if letter in evidence.roles]
    fused = [parameter for parameter in projections if "[" in parameter]
    if fused and "self.W_q(" in repair:
        return f"# {fused[0].partition('[')[0]} computes q, k and v together: take each from its own third"
    lines = []
    for text in repair.splitlines():
        code, mark, comment = text.partition("  # ")
        try:
            node = ast.parse(code.strip())
        except SyntaxError:
            return repair
        translation = _LearnersNames(names, step)
        new = plain(translation.visit(node))
        words = [comment] if mark else []
        words += [
            f"{name}: {IN_WORDS[name]}" for name in dict.fromkeys(translation.unknown) if name in IN_WORDS
        ]
        lines.append(new + (f"  # {'; '.join(words)}" if words else ""))
    return "\n".join(lines)


def repaired(source: str, line: int | None, repair: str) -> str | None:
    """Return the source with the statement on the line replaced by a repair; None if that is not Python."""
    statement = Place(source, line).statement
    if statement is None or hasattr(statement, "body"):
        return None
    lines = source.splitlines()
    indent = lines[statement.lineno - 1][: statement.col_offset]
    lines[statement.lineno - 1 : statement.end_lineno] = [indent + line for line in repair.splitlines()]
    text = "\n".join(lines) + "\n"
    return text if tree_of(text) is not None and text != source else None


def _with_self(text: str, names: _Names) -> str:
    """Return the repair with an argument `training` for `self.training` if the function has no self."""
    if names.me is not None or "self.training" not in text:
        return text
    return text.replace("self.training", "training") + "  # training: an argument, False in eval"


class _Product(NamedTuple):
    """A product of two tensors: of q and k, or of weights and v."""

    node: ast.expr
    left: ast.expr
    right: ast.expr
    transposed: bool  # the right one is transposed, or the product is an einsum


class _Names:
    """The learner's names for the tensors, layers and sizes of the recipe, in the function with the fault."""

    def __init__(self, tree: ast.Module, evidence: Evidence, line: int | None, about_scores: bool) -> None:
        self.tree, self.evidence = tree, evidence
        self.checked = _definition(tree, evidence)
        self.function = self._function_of(line, about_scores)
        self.expressions: dict[str, ast.expr] = {}
        self.mask: ast.expr | None = None  # the mask in the shape of the scores
        self.product: ast.expr | None = None
        imports = [statement for statement in tree.body if isinstance(statement, ast.Import)]
        self.imports_math = any(alias.name == "math" for statement in imports for alias in statement.names)
        if self.function is None:
            return
        arguments = self.function.args.args
        self.me = arguments[0].arg if arguments and arguments[0].arg in ("self", "cls") else None
        self.bound = bound_in(self.function)
        self._read_products()
        self._read_inputs()
        self._read_sizes()

    def _function_of(self, line: int | None, about_scores: bool) -> Function | None:
        """Return the function around the line; else that with the softmax if the repair is about scores."""
        functions = list(nodes(self.tree, FUNCTIONS))
        around = [each for each in functions if extent_of(each)[0] <= (line or 0) <= extent_of(each)[1]]
        if around:
            return max(around, key=lambda function: function.lineno)
        if about_scores and self.checked is not None:
            extents = [extent_of(definition) for definition in used_by(self.tree, self.checked)]
            for function in functions:
                within = any(first <= function.lineno <= last for first, last in extents)
                if within and any(_softmaxed(each) is not None for each in inner_nodes(function)):
                    return function
        return self.forward()

    def statement(self, line: int | None) -> ast.stmt | None:
        """Return the statement on this line of the function."""
        assert self.function is not None
        statements = [node for node in inner_nodes(self.function) if isinstance(node, ast.stmt)]
        extents = {node: extent_of(node) for node in statements}
        around = [node for node in statements if extents[node][0] <= (line or 0) <= extents[node][1]]
        return min(around, key=lambda node: extents[node][1] - extents[node][0], default=None)

    def forward(self) -> Function | None:
        """Return the function that is called: forward or __call__ of a class, or the function itself."""
        if not isinstance(self.checked, ast.ClassDef):
            return self.checked
        used = used_by(self.tree, self.checked)
        for methods in (methods_of(owner) for owner in used if isinstance(owner, ast.ClassDef)):
            for name in ("forward", "__call__"):
                if name in methods:
                    return methods[name]
        return None

    def as_text(self) -> dict[str, str]:
        """Return the learner's names as text, with those of the projections."""
        texts = {name: ast.unparse(node) for name, node in self.expressions.items()}
        for letter in "qkvo":
            role = self.evidence.roles.get(letter)
            if role is not None and re.fullmatch(r"[\w.]+\.weight", role.parameter):
                texts[f"W_{letter}"] = f"{self.me or 'self'}.{role.parameter.removesuffix('.weight')}"
        return texts

    def _read_products(self) -> None:
        assert self.function is not None
        products = sorted(
            _products(self.function), key=lambda product: (product.node.lineno, product.node.col_offset)
        )
        soft = next((node for node in inner_nodes(self.function) if _softmaxed(node) is not None), None)
        weights: ast.expr | None = None
        if soft is not None:
            self._name("scores", _without_reshapes(_softmaxed(soft)))
            weights = _target_of(self.function, soft)
            self._name("weights", weights)
        first = next((product for product in products if product.transposed), None)
        if first is not None:
            self.product = None if _scales(first.left) or _scales(first.right) else first.node
            self._name("q", _untransposed(first.left))
            self._name("k", _untransposed(first.right))
            if soft is None:
                self._name("scores", _target_of(self.function, first.node))
        for product in products:
            if product is first or weights is None:
                continue
            text = ast.unparse(weights)
            if text in {ast.unparse(each) for each in ast.walk(product.left) if isinstance(each, ast.expr)}:
                self._name("v", product.right)
                self._name("out", _target_of(self.function, product.node))
                break
        mask = self.evidence.conventions.mask_argument
        if mask is None or mask not in self.bound:
            mask = next((name for name in sorted(self.bound) if "mask" in name.lower()), None)
        if mask is not None:
            self.expressions["mask"] = _read(mask)
            axes = {"[B, T, S]": "[:, None]", "[B, S]": "[:, None, None, :]"}
            shape = axes.get(self.evidence.conventions.mask_shape or "", "")
            plain = self.evidence.kind == "class" and mask == self.evidence.conventions.mask_argument
            plain = plain and f"{mask} = " not in ast.unparse(self.function)
            own = expression(f"{mask}{shape}") if plain else None
            self.mask = _shaped(self.function, mask) or own

    def _name(self, name: str, node: ast.expr | None) -> None:
        if node is not None and name not in self.expressions:
            self.expressions[name] = node

    def _read_inputs(self) -> None:
        forward = self.forward()
        if forward is None:
            return
        names = [argument.arg for argument in forward.args.args if argument.arg not in ("self", "cls")]
        slots = [slot for slot in self.evidence.conventions.arguments if slot != "mask"]
        for slot, argument in zip(
            slots, [name for name in names if "mask" not in name.lower()], strict=False
        ):
            both = {"x": ("query", "key", "value", "x"), "memory": ("key", "value"), "query": ("query", "x")}
            for name in both.get(slot, (slot,)):
                if slot != "x" or name not in self.expressions:
                    self.expressions[name] = _read(argument)

    def layer(self, letter: str, value: ast.expr) -> ast.expr | None:
        """Return the call that projects `value` to q, k, v or the output; None if no single layer does."""
        role = self.evidence.roles.get(letter)
        if role is None or " and " in role.parameter or "[" in role.parameter:
            return None
        earlier = [self.evidence.roles.get(each) for each in "qkvo"[: "qkvo".index(letter)]]
        if any(each is not None and each.parameter == role.parameter for each in earlier):
            return None  # the repair is a separate layer
        path = re.sub(r"\.(\d+)", r"[\1]", role.parameter)  # as Python writes it
        me = self.me or "self"
        if path.endswith(".weight"):
            return ast.Call(expression(f"{me}.{path.removesuffix('.weight')}"), [value], [])
        if role.transposed:
            return ast.BinOp(value, ast.MatMult(), expression(f"{me}.{path}"))
        return expression(f"F.linear({ast.unparse(value)}, {me}.{path})")

    def _read_sizes(self) -> None:
        from ..examine.vocabulary import size_word

        assert self.function is not None
        owners = used_by(self.tree, self.checked) if isinstance(self.checked, ast.ClassDef) else []
        attributes = [node.attr for owner in owners for node in self_attributes(owner)]
        for size, meaning in SIZES.items():
            of_self = [name for name in attributes if size_word(name) == meaning] if self.me else []
            local = [name for name in sorted(self.bound) if size_word(name) == meaning and len(name) > 1]
            if of_self:
                self.expressions[size] = expression(f"{self.me}.{of_self[0]}")
            elif local:
                self.expressions[size] = _read(local[0])
        for node in inner_nodes(self.function):
            if isinstance(node, ast.Assign) and (of := _sized(node.value)) is not None:
                self._read_shape(node.targets[0], *of)
        x = self.expressions.get("query") or self.expressions.get("q")
        if x is not None and self.function is self.forward() and self.evidence.conventions.batch_first:
            self._name("B", expression(f"{ast.unparse(x)}.size(0)"))
            self._name("T", expression(f"{ast.unparse(x)}.size(1)"))
        if self.function.name == "__init__" and {"d_model", "num_heads"} <= set(self.expressions):
            width, heads = (ast.unparse(self.expressions[size]) for size in ("d_model", "num_heads"))
            self._name("d_k", expression(f"{width} // {heads}"))
        if "q" in self.expressions:
            self._name("d_k", expression(f"{_braced(self.expressions['q'])}.size(-1)"))

    def _read_shape(self, target: ast.expr, of: str, axis: int | None) -> None:
        order = ("B", "T") if self.evidence.conventions.batch_first else ("T", "B")
        inputs = {ast.unparse(self.expressions[size]) for size in ("query", "x") if size in self.expressions}
        if inputs and of not in inputs and self.function is self.forward():
            return
        if axis in (0, 1) and isinstance(target, ast.Name):
            self._name(order[axis], _read(target.id))
        if axis is None and isinstance(target, ast.Tuple):
            for name, element in zip(order, target.elts, strict=False):
                if isinstance(element, ast.Name) and element.id != "_":
                    self._name(name, _read(element.id))

    def stored_scale(self, line: int | None) -> str | None:
        """Return the repaired line if the line with the fault only stores the scale, else None."""
        assert self.function is not None
        for node in inner_nodes(self.function):
            if not isinstance(node, ast.Assign) or node.lineno != line or len(node.targets) != 1:
                continue
            target, head = dotted(node.targets[0]), self.expressions.get("d_k")
            if not target or head is None or any(_products(node)):
                return None
            used = [self.tree] if self.checked is None else used_by(self.tree, self.checked)
            operations = [operation for part in used for operation in nodes(part, ast.BinOp)]
            signs = {type(each.op) for each in operations if ast.unparse(each.right) == target}
            if signs not in ({ast.Mult}, {ast.Div}):
                return None
            power = "0.5" if signs == {ast.Div} else "-0.5"
            return f"{target} = {_braced(head)} ** {power}"
        return None


class _LearnersNames(ast.NodeTransformer):
    """Replace the names of the recipe by the learner's."""

    def __init__(self, names: _Names, step: str) -> None:
        self.names, self.step, self.unknown = names, step, list[str]()

    def visit_Name(self, node: ast.Name) -> ast.expr:
        replacement = self.names.expressions.get(node.id)
        stored = isinstance(node.ctx, ast.Store)
        if replacement is not None and (isinstance(replacement, ast.Name) or not stored):
            return _stored(replacement, node.ctx)
        if node.id in IN_WORDS and node.id not in self.names.bound and not stored:
            self.unknown.append(node.id)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if dotted(node) == f"self.{node.attr}" and node.attr in (*SIZES, "p"):
            replacement = self.names.expressions.get(node.attr)
            if replacement is None:
                self.unknown.append(node.attr)
                return _read(node.attr)
            return replacement
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
            argument = self.visit(node.args[0])
            layer = self.names.layer(name[-1], argument)
            if layer is None:
                self.unknown.append(f"W_{name[-1]}")
            return layer or ast.Call(node.func, [argument], [])
        self.generic_visit(node)
        if name == "math.sqrt" and not self.names.imports_math:
            return ast.BinOp(node.args[0], ast.Pow(), ast.Constant(0.5))
        reshapes = isinstance(node.func, ast.Attribute) and node.func.attr in ("reshape", "view")
        if reshapes and node.args and "d_model" in self.unknown:
            self.unknown.remove("d_model")
            node.args[-1] = ast.UnaryOp(ast.USub(), ast.Constant(1))
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        shaped = isinstance(node.left, ast.Name) and self.names.mask
        mask = shaped or self.visit(node.left)
        hides = ast.unparse(node).endswith("== 0") and "mask" in ast.unparse(node.left)
        conventions = self.names.evidence.conventions
        if not hides or conventions.mask_true_attends is None:
            return ast.Compare(mask, node.ops, node.comparators)
        if conventions.mask_kind == "bool":
            return ast.UnaryOp(ast.Invert(), mask) if conventions.mask_true_attends else mask
        return ast.Compare(mask, [ast.Eq()], [ast.Constant(0 if conventions.mask_true_attends else 1)])


def _definition(tree: ast.Module, evidence: Evidence) -> Definition | None:
    """Return the definition that was checked: the first of its name from its line on, else the first."""
    named = [node for node in nodes(tree, DEFINITIONS) if node.name == evidence.name]
    first = evidence.first_line
    near = [node for node in named if first is not None and node.lineno >= first]
    return next(iter(near or named), None)


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
    """Yield the products of two tensors in a function or statement; projections are left out."""
    for part in inner_nodes(node):
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.MatMult):
            if ast.unparse(_untransposed(part.right)).startswith("self."):
                continue  # a projection
            yield _Product(part, part.left, part.right, _is_transposed(part.right))
        elif isinstance(part, ast.Call) and called(part) in PRODUCTS:
            operands = [argument for argument in part.args if not isinstance(argument, ast.Constant)]
            function = part.func
            if isinstance(function, ast.Attribute) and ast.unparse(function.value) not in (
                *LIBRARIES,
                "einops",
            ):
                operands = [function.value, *operands]
            if len(operands) == 2 and not any(ast.unparse(each).startswith("self.") for each in operands):
                transposed = called(part) == "einsum" or _is_transposed(operands[1])
                yield _Product(part, operands[0], operands[1], transposed)


def _is_transposed(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in ("T", "mT", "mH", "H")
    return isinstance(node, ast.Call) and (called(node) in TRANSPOSES or _is_transposed(node.func))


def _without_reshapes(node: ast.expr | None) -> ast.expr | None:
    """Return the tensor without the calls that only change its shape."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if called(node) not in TRANSPOSES | {"view", "reshape", "flatten", "unflatten", "squeeze", "float"}:
            break
        node = node.func.value
    return node


def _untransposed(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.Attribute) and node.attr in ("T", "mT"):
        return _untransposed(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TRANSPOSES:
        return _untransposed(node.func.value)
    return node


def _scales(node: ast.expr) -> bool:
    """Return True if the expression multiplies or divides."""
    return any(isinstance(operation.op, (ast.Mult, ast.Div)) for operation in nodes(node, ast.BinOp))


def _softmaxed(node: ast.AST) -> ast.expr | None:
    """Return the argument of a call of softmax; None for any other node."""
    if not isinstance(node, ast.Call) or "softmax" not in ast.unparse(node.func).rpartition(".")[2].lower():
        return None
    if isinstance(node.func, ast.Attribute):
        of = ast.unparse(node.func.value)
        if of not in LIBRARIES and not of.startswith("self"):
            return node.func.value
    return node.args[0] if node.args and not isinstance(node.args[0], ast.Constant) else None


def _shaped(function: Function, mask: str) -> ast.expr | None:
    """Return the mask in the shape of the scores: mask.unsqueeze(1) for `mask.unsqueeze(1) == 0`."""
    for node in inner_nodes(function):
        if isinstance(node, ast.Call) and called(node).startswith("masked_fill") and node.args:
            operands = [node.args[0]]
        elif isinstance(node, ast.BinOp):
            operands = [node.left, node.right]
        else:
            continue
        for operand in operands:
            while isinstance(operand, (ast.Compare, ast.UnaryOp)):
                operand = operand.left if isinstance(operand, ast.Compare) else operand.operand
            while isinstance(operand, ast.Call) and called(operand) in CASTS:
                operand = operand.func.value if isinstance(operand.func, ast.Attribute) else operand.args[0]
            text = ast.unparse(operand)
            if re.fullmatch(rf"{mask}(\.unsqueeze\(-?\d\)|\[[:, \w]*None[:, \w]*\])+", text):
                return operand
    return None


def _target_of(function: Function, node: ast.AST) -> ast.expr | None:
    """Return the name to which the expression around a node is assigned."""
    for statement in inner_nodes(function):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if isinstance(target, (ast.Name, ast.Attribute)) and any(
            each is node for each in ast.walk(statement)
        ):
            return _stored(target, ast.Load())
    return None


def _sized(value: ast.expr) -> tuple[str, int | None] | None:
    """Return (tensor, axis) for x.size(0), x.shape[0], x.shape and x.size(); the axis of a slice is None."""
    index: ast.expr | None = None
    tensor, attribute = value, "shape"
    if isinstance(value, ast.Subscript):
        tensor, index = value.value, value.slice
    elif isinstance(value, ast.Call):
        tensor, index, attribute = value.func, value.args[0] if value.args else None, "size"
    if not isinstance(tensor, ast.Attribute) or tensor.attr != attribute:
        return None
    axis = index.value if isinstance(index, ast.Constant) else None
    return ast.unparse(tensor.value), axis if isinstance(axis, int) else None
