"""Explain exceptions: what happened, on which of the learner's lines, why, and what to do.

This module has the rules for Python's exceptions (syntax, names, imports, calls, operators, asserts), and
torch_errors.py those for torch's.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys

from ..evidence import Problem
from ..source.names import undefined_names
from ..source.parsed import FUNCTIONS, Place, attributes_of, import_for, methods_of, nearest
from .torch_errors import SIZES, TYPES, Explanation, Match, Rule, always

__all__ = ["explain"]

STAGES = {
    "import": "During import",
    "build": "During construction",
    "call": "During the call",
    "backward": "In the backward pass",
}
TENSOR_WORDS = """transpose permute reshape view contiguous softmax masked_fill matmul size shape dim
    unsqueeze squeeze expand repeat flatten unflatten chunk split mean sum sqrt float bool""".split()
PACKAGES = (
    "torch einops numpy math matplotlib typing transformers jaxtyping pandas scipy torchvision tqdm".split()
)
INSTALLED_AS = {"cv2": "opencv-python", "sklearn": "scikit-learn", "PIL": "pillow", "yaml": "pyyaml"}


def _syntax(match: Match, place: Place) -> Explanation:
    line = place.text
    if line.startswith(("!", "%")):
        return Explanation("this is a notebook command, not Python", "delete the line, or put # before it")
    if line.startswith("```"):
        return Explanation("this line marks a code block in Markdown; it is not Python", "delete the line")
    if re.match(r"(>>>|\.\.\.) ", line):
        return Explanation(
            "this line was copied with the Python prompt",
            "delete the >>> and ... at the beginning of the lines",
        )
    advice = "check the brackets, colons and indentation of this line and the one before it"
    return Explanation(f"Python cannot read the file: {match[0]}", advice)


def _name(match: Match, place: Place) -> Explanation:
    name = match[1]
    undefined = {missing.name: missing for missing in undefined_names(place.source or "")}
    if name in undefined:
        advice = undefined[name].suggestion
    else:
        advice = import_for(name) or ""
        close = nearest(name, place.locals | set(dir(builtins)))
        advice = advice or (f"did you mean {close}?" if close else "assign or import it before this line")
    if advice.startswith(("import ", "from ")):
        return Explanation(f"{name} is not defined: it was never imported", f"add at the top: {advice}")
    return Explanation(f"{name} is not defined where this line runs", advice)


def _too_early(match: Match, place: Place) -> Explanation:
    name = match[1] or match[2]
    return Explanation(
        f"{name} has no value when this line runs: it is assigned later, or in a branch that did not run",
        f"assign {name} before this line in all branches",
    )


def _no_start(match: Match, place: Place) -> Explanation:
    where = place.owner.name if place.owner is not None else "the class"
    return Explanation(
        f"{where} assigns a layer, parameter or buffer before nn.Module is initialised",
        "make super().__init__() the first line of __init__",
    )


def _attribute(match: Match, place: Place) -> Explanation | None:
    kind, name = match.groups()
    node = place.definition(kind)
    if isinstance(node, ast.ClassDef):
        have = attributes_of(node) | methods_of(node).keys()
        if name in have:
            return Explanation(
                f"self.{name} has no value: the line that assigns it{place.where_set(name)} has not run",
                f"assign self.{name} in __init__, before it is used",
            )
        close = nearest(name, have, 0.6)
        advice = f"did you mean self.{close}?" if close else f"assign it in __init__: self.{name} = ..."
        return Explanation(f"{kind} has no self.{name}: nothing in the class assigns it", advice)
    if kind == "NoneType":
        return Explanation(
            f"`.{name}` is used on None where a tensor is needed",
            "test optional arguments with `is not None`, and check that every function returns a value",
        )
    if kind in ("tuple", "list"):
        return Explanation(
            f"a {kind} has no .{name}: several values, such as (output, weights), are used as one tensor",
            "unpack them first: output, weights = ...",
        )
    if kind in ("int", "float"):
        return Explanation(
            f"a Python number has no .{name}: a tensor was expected", "print the value before this line"
        )
    if kind == "Tensor":
        close = nearest(name, TENSOR_WORDS, 0.7)
        advice = f"did you mean .{close}?" if close else "see the documentation of torch.Tensor"
        return Explanation(f"a tensor has no .{name}", advice)
    return None


def _module_attribute(match: Match, place: Place) -> Explanation:
    module, name = match.groups()
    loaded = sys.modules.get(module) if module.partition(".")[0] in ("torch", "math") else None
    close = (
        nearest(name, [attribute for attribute in dir(loaded) if not attribute.startswith("_")], 0.6)
        if loaded
        else None
    )
    advice = f"did you mean {module}.{close}?" if close else f"see the documentation of {module}"
    return Explanation(f"{module} has no {name}", advice)


def _no_forward(match: Match, place: Place) -> Explanation:
    node = place.definition(match[1])
    body = node.body if isinstance(node, ast.ClassDef) else []
    methods = [method.name for method in body if isinstance(method, ast.FunctionDef)]
    close = nearest("forward", methods, 0.6)
    near = f", but a method {close}" if close else ""
    return Explanation(
        f"{match[1]} has no method forward{near}",
        "write def forward(self, ...), with the same indentation as __init__",
    )


def _not_installed(match: Match, place: Place) -> Explanation:
    package = match[1].partition(".")[0]
    close = None if package in PACKAGES else nearest(package, PACKAGES)
    if close is not None:
        return Explanation(f"the package {package} is not installed on this system", f"did you mean {close}?")
    return Explanation(
        f"the package {package} is not installed on this system, where the code is checked",
        f"install it: pip install {INSTALLED_AS.get(package, package)}",
    )


NAMES = (
    Rule(r".*", _syntax, "SyntaxError|IndentationError|TabError"),
    Rule(r"name '(\w+)' is not defined", _name),
    Rule(r"cannot access (?:local|free) variable '(\w+)'|local variable '(\w+)' referenced", _too_early),
    Rule(r"before Module\.__init__\(\) call", _no_start),
    always(
        r"'(\w+)' object has no attribute '_(?:\w+_hooks|parameters|modules)'",
        "{1} does not initialise nn.Module",
        "make super().__init__() the first line of its __init__",
    ),
    Rule(r"module '([\w.]+)' has no attribute '(\w+)'", _module_attribute),
    Rule(r"'(\w+)' object has no attribute '(\w+)'", _attribute),
    Rule(r"Module \[(\w+)\] is missing the required \"forward\"", _no_forward),
    always(
        r"attempted relative import|relative import",
        "`from .x import y` works inside a package only, and this file is not part of one",
        "move the imported code into this file, or import it by its full name",
        "ImportError|ModuleNotFoundError",
    ),
    Rule(r"No module named '([\w.]+)'", _not_installed),
    always(
        r"cannot import name '(\w+)' from (?:partially initialized module )?'([\w.]+)'",
        "{2} does not define {1}",
        "check the spelling and the installed version",
    ),
)


def _missing(match: Match, place: Place) -> Explanation:
    function, names = match[1], match[2]
    advice = _own(function, place, "pass it, or give it a default")
    return Explanation(f"{_callee(function)} was called without {names}", advice)


def _unexpected(match: Match, place: Place) -> Explanation:
    function, name = match[1], match[2]
    node = place.definition(function.rpartition(".")[0] or function)
    arguments = (
        {argument.arg for argument in ast.walk(node) if isinstance(argument, ast.arg)}
        if node is not None
        else set()
    )
    close = nearest(name, arguments - {name}, 0.6)
    if name == "axis":
        close = "dim"
    advice = (
        f"did you mean {close}?" if close else _own(function, place, "remove it, or add it to the parameters")
    )
    return Explanation(f"{_callee(function)} has no argument called {name}", advice)


def _count(match: Match, place: Place) -> Explanation:
    function, takes, passed = match[1], match[2], match[3]
    owner, _, method = function.rpartition(".")
    node = place.definition(owner)
    if isinstance(node, ast.ClassDef):
        methods = [method.name for method in node.body if isinstance(method, ast.FunctionDef)]
        if method == "__init__" not in methods and (close := nearest(method, methods, 0.7)):
            return Explanation(
                f"{owner} has no __init__, and that of nn.Module takes no arguments",
                f"did you mean __init__ instead of {close}?",
            )
        own = [each for each in node.body if isinstance(each, FUNCTIONS) and each.name == method]
        first = own[0].args.args[0].arg if own and own[0].args.args else None
        if own and first not in ("self", "cls") and not own[0].decorator_list:
            return Explanation(
                f"{function} has no parameter self: Python passes the object itself as the first argument",
                f"write def {method}(self, ...)",
            )
    counting = " (including self)" if owner else ""
    count = f"{takes} argument{'s' if takes != '1' else ''}{counting} and was given {passed}"
    return Explanation(
        f"{_callee(function)} takes {count}", _own(function, place, "compare the call with the parameters")
    )


def _callee(function: str) -> str:
    """Return the name that is called: "A" for "A.__init__"."""
    return function.removesuffix(".__init__")


def _own(function: str, place: Place, advice: str) -> str:
    """Return the advice if the learner's file defines the function, else a hint at its documentation."""
    own = place.definition(function.rpartition(".")[0] or function)
    if own is None and place.source is not None:
        return "compare the call with the documentation of the function"
    return advice


def _not_callable(match: Match, place: Place) -> Explanation:
    advice = {
        "Parameter": "multiply by it instead: x @ self.W",
        "ModuleList": "call its members: [layer(x) for layer in self.layers]",
        "Size": "write x.shape[0] or x.size(0)",
    }.get(
        match[1], "check whether the function's name was assigned again, or a * is missing before the bracket"
    )
    return Explanation(f"{_type(match[1])} was called like a function", advice)


def _pair_of_torch(match: Match, place: Place) -> Explanation:
    return Explanation(
        f"{match[1]} along a dimension returns two tensors, the values and their indices",
        f"take the values: x.{match[1]}(dim=-1, keepdim=True).values, or x.a{match[1]}(dim=-1, keepdim=True)",
    )


def _operand(match: Match, place: Place) -> Explanation:
    sign, left, right = match.groups()
    none = "NoneType" in (left, right)
    reason = ": an optional argument, such as the mask, was not passed" if none else ""
    advice = "test `is not None` first" if none else "print both values before this line"
    return Explanation(f"{sign} is applied to {_type(left)} and {_type(right)}{reason}", advice)


def _type(name: str) -> str:
    plain = {
        "NoneType": "None",
        "Tensor": "a tensor",
        "int": "a number",
        "float": "a number",
        "Size": "a shape",
    }
    return plain.get(name, f"a {name}")


def _invalid_combination(match: Match, place: Place) -> Explanation:
    function, got = match[1], match[2]
    if function.startswith("masked_fill") and got.startswith("bool"):
        reason = "the mask is None, and None == 0 is the value False instead of a mask"
        return Explanation(reason, "move the line under `if mask is not None:`")
    if "NoneType" in got:
        return Explanation(
            f"{function} got None: an optional argument was not passed", "test `is not None` first"
        )
    return Explanation(
        f"{function} does not accept arguments of the types ({got})", f"check the arguments of {function}"
    )


def _recursion(match: Match, place: Place) -> Explanation:
    function = place.function.name if place.function is not None else "a function"
    return Explanation(
        f"{function} calls itself endlessly",
        "call the function you meant, or that of the parent class, super()",
    )


def _divisible(match: Match, place: Place) -> Explanation:
    return Explanation(
        "the width is not divisible by the number of heads",
        "use a width that is a multiple of the number of heads, and check that the two are not swapped",
    )


def _assertion(match: Match, place: Place) -> Explanation:
    statement = place.statement
    if isinstance(statement, ast.Assert) and "%" in place.text:
        return _divisible(match, place)
    message = f": {match[0]}" if match[0] not in ("", "AssertionError") else ""
    if isinstance(statement, ast.Assert):
        return Explanation(
            f"an assert of yours failed{message}: `{ast.unparse(statement.test)}` is not true",
            "print its values; either the assert or the value it tests is wrong",
        )
    return Explanation(f"an assert failed{message}", "print the values that it compares")


CALLS = (
    Rule(r"([\w.]+)\(\) missing \d+ required (?:positional|keyword-only) arguments?: (['\"].*)", _missing),
    Rule(r"([\w.]+)\(\) got an unexpected keyword argument '(\w+)'", _unexpected),
    Rule(
        r"([\w.]+)\(\) takes (?:from \d+ to )?(\d+) positional arguments? but (\d+) (?:was|were) given",
        _count,
    ),
    Rule(r"'(\w+)' object is not callable", _not_callable),
    Rule(r"unsupported operand type.*torch\.return_types\.(max|min)'", _pair_of_torch),
    Rule(r"unsupported operand type\(s\) for (\S+): '(\w+)' and '(\w+)'", _operand),
    Rule(
        r"(\w+)\(\) received an invalid combination of arguments - got \((.*?)\), but", _invalid_combination
    ),
    always(
        r".*", "this part is still to be written", "replace this line by your own code", "NotImplementedError"
    ),
    Rule(r".*", _recursion, "RecursionError"),
    Rule(r".*divisible.*", _divisible),
    Rule(r".*", _assertion, "AssertionError"),
    always(
        r"division by zero|modulo by zero",
        "a number is divided by 0",
        "print the divisor: d_model // num_heads is 0 if num_heads is larger than d_model",
    ),
    always(
        r"(list|tuple) index out of range",
        "the index is larger than the last one of the {1}",
        "print the length of the {1} before this line",
    ),
    always(r".*", "the dictionary has no key {0}", "print its keys before this line", "KeyError"),
)
RULES = (*SIZES, *TYPES, *NAMES, *CALLS)


def explain(problem: Problem, source: str | None = None) -> str:
    """Explain a problem in a few sentences.

    Args:
        problem: the exception, or another reason why the code did not run to its end.
        source: the text of the learner's file, from which the line is quoted.

    Returns:
        "Line 41, `the line`: what happened and why. What to do." A message without a rule is quoted.
    """
    place = Place(source, problem.line, problem.shapes)
    message = " ".join(problem.message.split())
    if not problem.kind[:1].isupper():  # not an exception, but a limit whose message is a sentence
        return f"{_where(problem, place)}: {_ended(message or problem.kind)}"
    explanation = _explanation(problem, place)
    if explanation is None:
        words = f"{problem.kind}: {message}" if message else problem.kind
        return f"{_where(problem, place)}: {_ended(words)}"
    shapes = " and ".join(f"{name} is {shape}" for name, shape in [*place.shapes_named().items()][:4])
    shape_note = f" On this line {shapes}." if shapes else ""
    advice = explanation.advice[0].upper() + explanation.advice[1:]
    return f"{_where(problem, place)}: {_ended(explanation.reason)}{shape_note} {_ended(advice)}"


def _ended(words: str) -> str:
    """Return the words with a full stop, unless they end with another mark."""
    return words if words.endswith((".", "!", "?")) else f"{words}."


def _explanation(problem: Problem, place: Place) -> Explanation | None:
    """Return the explanation of the first rule that applies, or None."""
    for rule in RULES:
        if rule.kind and not re.fullmatch(rule.kind, problem.kind):
            continue
        match = re.search(rule.message, problem.message, re.DOTALL)
        explanation = None if match is None else rule.explain(match, place)
        if explanation is not None:
            return explanation
    return None


def _where(problem: Problem, place: Place) -> str:
    """Return where the problem occurred: a line with its text, or a stage; and the probe."""
    if problem.line is not None:
        where = f"Line {problem.line}, `{place.text}`" if place.text else f"Line {problem.line}"
    else:
        where = STAGES.get(problem.stage, "While it ran")
    return where + (f" (test input: {problem.probe})" if problem.probe else "")
