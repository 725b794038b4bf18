"""Exceptions in plain words: what happened, in which of the learner's lines, why, and what to do.

Here are those of Python: names, imports and what is no Python; calls, operators and asserts.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys

from ..evidence import Problem
from ..source.names import undefined_names
from ..source.parsed import Place, attributes_of, import_for, methods_of, nearest
from .of_torch import OF_SIZES, OF_TYPES, Match, Rule, Said, always

__all__ = ["explain"]

STAGES = {
    "import": "While the file was imported",
    "build": "While it was built",
    "call": "While it was called",
    "backward": "In the backward pass",
}
TENSOR_WORDS = """transpose permute reshape view contiguous softmax masked_fill matmul size shape dim
    unsqueeze squeeze expand repeat flatten unflatten chunk split mean sum sqrt float bool""".split()
PACKAGES = (
    "torch einops numpy math matplotlib typing transformers jaxtyping pandas scipy torchvision tqdm".split()
)
INSTALLED_AS = {"cv2": "opencv-python", "sklearn": "scikit-learn", "PIL": "pillow", "yaml": "pyyaml"}


def _syntax(match: Match, place: Place) -> Said:
    line = place.text
    if line.startswith(("!", "%")):
        return Said("this is a command for notebooks, not Python", "delete the line, or put # before it")
    if line.startswith("```"):
        return Said("this is the frame of a code block, not Python", "delete the line")
    if re.match(r"(>>>|\.\.\.) ", line):
        return Said(
            "this is a copy of a Python prompt", "delete the >>> and ... at the beginning of the lines"
        )
    do = "look at this line and the one before it: a bracket, a colon, an indent"
    return Said(f"Python cannot read the file: {match[0]}", do)


def _name(match: Match, place: Place) -> Said:
    name = match[1]
    found = {one.name: one for one in undefined_names(place.source or "")}
    if name in found:
        do = found[name].suggestion
    else:
        do = import_for(name) or ""
        close = nearest(name, place.locals | set(dir(builtins)))
        do = do or (f"did you mean {close}?" if close else "assign or import it before this line")
    if do.startswith(("import ", "from ")):
        return Said(f"{name} is not defined: it was never imported", f"add at the top: {do}")
    return Said(f"{name} is not defined where this line runs", do)


def _too_early(match: Match, place: Place) -> Said:
    name = match[1] or match[2]
    return Said(
        f"{name} has no value yet when this line runs: the line that assigns it comes later, or in a branch "
        "that was not taken",
        f"assign {name} before this line, in every case",
    )


def _no_start(match: Match, place: Place) -> Said:
    where = place.owner.name if place.owner is not None else "the class"
    return Said(
        f"{where} keeps a layer, parameter or buffer before nn.Module is set up",
        "make super().__init__() the first line of __init__",
    )


def _attribute(match: Match, place: Place) -> Said | None:
    kind, name = match.groups()
    node = place.definition(kind)
    if isinstance(node, ast.ClassDef):
        have = attributes_of(node) | methods_of(node).keys()
        if name in have:
            return Said(
                f"self.{name} has no value yet: the line that assigns it{place.where_set(name)} has not run",
                f"assign self.{name} in __init__, before it is used",
            )
        close = nearest(name, have, 0.6)
        do = f"did you mean self.{close}?" if close else f"assign it in __init__: self.{name} = ..."
        return Said(f"{kind} has no self.{name}: nothing in the class assigns it", do)
    if kind == "NoneType":
        return Said(
            f"something is None where a tensor is needed (.{name} was asked of it)",
            "ask `is not None` before using an optional argument; see that every function returns something",
        )
    if kind in ("tuple", "list"):
        return Said(
            f"a {kind} has no .{name}: several values, e.g. (output, weights), were used as one tensor",
            "unpack it first: output, weights = ...",
        )
    if kind in ("int", "float"):
        return Said(
            f"a plain number has no .{name}: a tensor was expected", "print what comes in before this line"
        )
    if kind == "Tensor":
        close = nearest(name, TENSOR_WORDS, 0.7)
        do = f"did you mean .{close}?" if close else "look it up under torch.Tensor"
        return Said(f"a tensor has no .{name}", do)
    return None


def _module_attribute(match: Match, place: Place) -> Said:
    module, name = match.groups()
    loaded = sys.modules.get(module) if module.partition(".")[0] in ("torch", "math") else None
    close = nearest(name, [one for one in dir(loaded) if not one.startswith("_")], 0.6) if loaded else None
    do = f"did you mean {module}.{close}?" if close else f"look for it in the documentation of {module}"
    return Said(f"{module} has no {name}", do)


def _no_forward(match: Match, place: Place) -> Said:
    node = place.definition(match[1])
    body = node.body if isinstance(node, ast.ClassDef) else []
    methods = [one.name for one in body if isinstance(one, ast.FunctionDef)]
    close = nearest("forward", methods, 0.6)
    near = f"; {close} is a different name" if close else ""
    return Said(
        f"{match[1]} has no forward, which nn.Module calls{near}",
        "write def forward(self, ...), indented as __init__ is",
    )


def _not_installed(match: Match, place: Place) -> Said:
    package = match[1].partition(".")[0]
    close = None if package in PACKAGES else nearest(package, PACKAGES)
    if close is not None:
        return Said(f"there is no package {package} where the code is checked", f"did you mean {close}?")
    return Said(
        f"the package {package} is not installed where the code is checked",
        f"install it there: pip install {INSTALLED_AS.get(package, package)}",
    )


OF_NAMES = (
    Rule(r".*", _syntax, "SyntaxError|IndentationError|TabError"),
    Rule(r"name '(\w+)' is not defined", _name),
    Rule(r"cannot access (?:local|free) variable '(\w+)'|local variable '(\w+)' referenced", _too_early),
    Rule(r"before Module\.__init__\(\) call", _no_start),
    always(
        r"'(\w+)' object has no attribute '_(?:\w+_hooks|parameters|modules)'",
        "nn.Module was never set up in {1}",
        "make super().__init__() the first line of its __init__",
    ),
    Rule(r"module '([\w.]+)' has no attribute '(\w+)'", _module_attribute),
    Rule(r"'(\w+)' object has no attribute '(\w+)'", _attribute),
    Rule(r"Module \[(\w+)\] is missing the required \"forward\"", _no_forward),
    always(
        r"attempted relative import|relative import",
        "`from .x import y` works inside a package only, and this file is run by itself",
        "put what it needs into the same file, or import it by its full name",
        "ImportError|ModuleNotFoundError",
    ),
    Rule(r"No module named '([\w.]+)'", _not_installed),
    always(
        r"cannot import name '(\w+)' from (?:partially initialized module )?'([\w.]+)'",
        "{2} has nothing called {1}",
        "check the spelling, and the version that is installed",
    ),
)


def _missing(match: Match, place: Place) -> Said:
    function, names = match[1], match[2]
    do = _own(function, place, "pass it, or give it a default")
    return Said(f"{_callee(function)} was called without {names}", do)


def _unexpected(match: Match, place: Place) -> Said:
    function, name = match[1], match[2]
    node = place.definition(function.rpartition(".")[0] or function)
    arguments = {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)} if node is not None else set()
    close = nearest(name, arguments - {name}, 0.6)
    if name == "axis":
        close = "dim"
    do = (
        f"did you mean {close}?"
        if close
        else _own(function, place, "leave it out, or add it to the parameters")
    )
    return Said(f"{_callee(function)} has no argument called {name}", do)


def _count(match: Match, place: Place) -> Said:
    function, takes, given = match[1], match[2], match[3]
    owner, _, method = function.rpartition(".")
    node = place.definition(owner)
    if isinstance(node, ast.ClassDef):
        methods = [one.name for one in node.body if isinstance(one, ast.FunctionDef)]
        if method == "__init__" not in methods and (close := nearest(method, methods, 0.7)):
            return Said(
                f"{owner} has no __init__, and nn.Module's takes no arguments",
                f"did you mean __init__ where you wrote {close}?",
            )
        own = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == method]
        first = own[0].args.args[0].arg if own and own[0].args.args else None
        if own and first not in ("self", "cls") and not own[0].decorator_list:
            return Said(
                f"{function} lacks self: Python passes the object itself as the first argument",
                f"write def {method}(self, ...)",
            )
    counting = " (self counted)" if owner else ""
    count = f"{takes} argument{'s' if takes != '1' else ''}{counting} and was given {given}"
    return Said(
        f"{_callee(function)} takes {count}", _own(function, place, "compare the call with the parameters")
    )


def _callee(function: str) -> str:
    """A class is called by its own name, not by __init__."""
    return function.removesuffix(".__init__")


def _own(function: str, place: Place, do: str) -> str:
    node = place.definition(function.rpartition(".")[0]) if "." in function else place.definition(function)
    return (
        do
        if node is not None or place.source is None
        else "compare the call with the function's documentation"
    )


def _not_callable(match: Match, place: Place) -> Said:
    do = {
        "Parameter": "multiply by it: x @ self.W",
        "ModuleList": "call its members: [layer(x) for layer in self.layers]",
        "Size": "write x.shape[0] or x.size(0)",
    }.get(match[1], "a function of that name was overwritten, or a * is missing before the bracket")
    return Said(f"{_type(match[1])} was called like a function", do)


def _pair_of_torch(match: Match, place: Place) -> Said:
    return Said(
        f"{match[1]} along an axis returns two tensors, the values and where they are",
        f"take the values: x.{match[1]}(dim=-1, keepdim=True).values, or x.a{match[1]}(dim=-1, keepdim=True)",
    )


def _operand(match: Match, place: Place) -> Said:
    sign, one, other = match.groups()
    none = "NoneType" in (one, other)
    why = "; an optional argument, e.g. the mask, was not given" if none else ""
    do = "ask `is not None` first" if none else "print both before this line"
    return Said(f"{sign} was asked of {_type(one)} and {_type(other)}{why}", do)


def _type(name: str) -> str:
    plain = {
        "NoneType": "None",
        "Tensor": "a tensor",
        "int": "a number",
        "float": "a number",
        "Size": "a shape",
    }
    return plain.get(name, f"a {name}")


def _invalid_combination(match: Match, place: Place) -> Said:
    function, got = match[1], match[2]
    if function.startswith("masked_fill") and got.startswith("bool"):
        what = "the mask is None here, and None == 0 is a plain False, not a mask"
        return Said(what, "put it under `if mask is not None:`")
    if "NoneType" in got:
        return Said(
            f"{function} was given None: an optional argument was not given", "ask `is not None` first"
        )
    return Said(
        f"{function} was given ({got}), which it does not take", f"look at the arguments of {function}"
    )


def _recursion(match: Match, place: Place) -> Said:
    function = place.function.name if place.function is not None else "a function"
    return Said(f"{function} calls itself without end", "call the other function, or the parent's, super()")


def _divisible(match: Match, place: Place) -> Said:
    return Said(
        "the width is not divisible by the number of heads, so heads of equal size are impossible",
        "build it with a width that is a multiple of the number of heads; see that the two are not swapped",
    )


def _assertion(match: Match, place: Place) -> Said:
    statement = place.statement
    if isinstance(statement, ast.Assert) and "%" in place.text:
        return _divisible(match, place)
    message = f": {match[0]}" if match[0] not in ("", "AssertionError") else ""
    if isinstance(statement, ast.Assert):
        return Said(
            f"your own assert stopped it{message}; `{ast.unparse(statement.test)}` is not true here",
            "print the values in it; either the check or what it checks is wrong",
        )
    return Said(f"an assert stopped it{message}", "print the values that it compares")


OF_CALLS = (
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
        r".*", "this part is still to be written", "put your own lines in its place", "NotImplementedError"
    ),
    Rule(r".*", _recursion, "RecursionError"),
    Rule(r".*divisible.*", _divisible),
    Rule(r".*", _assertion, "AssertionError"),
    always(
        r"division by zero|modulo by zero",
        "a number is divided by 0",
        "print the divisor: d_model // num_heads is 0 where there are more heads than d_model",
    ),
    always(
        r"(list|tuple) index out of range",
        "a {1} has fewer entries than were asked for",
        "print its length before this line",
    ),
    always(r".*", "there is no entry {0}", "print the keys before this line", "KeyError"),
)
RULES = (*OF_SIZES, *OF_TYPES, *OF_NAMES, *OF_CALLS)


def explain(problem: Problem, source: str | None = None) -> str:
    """One problem, in a few sentences.

    Args:
        problem: what was raised, or what kept the code from running.
        source: the text of the learner's file, from which the line is quoted.

    Returns:
        "Line 41, `the line`: what happened and why. What to do." A message not known is quoted as it is.
    """
    place = Place(source, problem.line, problem.shapes)
    message = " ".join(problem.message.split())
    if not problem.kind[:1].isupper():  # no exception, but a limit or the like, in words already
        return f"{_where(problem, place)}: {_ended(message or problem.kind)}"
    said = _said(problem, place)
    if said is None:
        words = f"{problem.kind}: {message}" if message else problem.kind
        return f"{_where(problem, place)}: {_ended(words)}"
    shapes = " and ".join(f"{name} is {shape}" for name, shape in [*place.shapes_named().items()][:4])
    here = f" Here {shapes}." if shapes else ""
    return f"{_where(problem, place)}: {_ended(said.what)}{here} {_ended(said.do[0].upper() + said.do[1:])}"


def _ended(words: str) -> str:
    return words if words.endswith((".", "!", "?")) else f"{words}."


def _said(problem: Problem, place: Place) -> Said | None:
    for rule in RULES:
        if rule.kind and not re.fullmatch(rule.kind, problem.kind):
            continue
        match = re.search(rule.message, problem.message, re.DOTALL)
        said = None if match is None else rule.say(match, place)
        if said is not None:
            return said
    return None


def _where(problem: Problem, place: Place) -> str:
    if problem.line is not None:
        where = f"Line {problem.line}, `{place.text}`" if place.text else f"Line {problem.line}"
    else:
        where = STAGES.get(problem.stage, "While it ran")
    return where + (f" (probe: {problem.probe})" if problem.probe else "")
