"""Messages of Python in plain words: names, imports and what is no Python; calls, operators and asserts."""

from __future__ import annotations

import ast
import builtins
import re
import sys

from ..source.names import undefined_names
from ..source.parsed import attributes_of, import_for, nearest
from .about import About, Rule, Said

Match = re.Match[str]
TENSOR_WORDS = """transpose permute reshape view contiguous softmax masked_fill matmul size shape dim
    unsqueeze squeeze expand repeat flatten unflatten chunk split mean sum sqrt float bool""".split()
PACKAGES = (
    "torch einops numpy math matplotlib typing transformers jaxtyping pandas scipy torchvision tqdm".split()
)
INSTALLED_AS = {"cv2": "opencv-python", "sklearn": "scikit-learn", "PIL": "pillow", "yaml": "pyyaml"}


def _syntax(match: Match, about: About) -> Said:
    line = about.text
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


def _name(match: Match, about: About) -> Said:
    name = match[1]
    found = {one.name: one for one in undefined_names(about.source or "")}
    if name in found:
        do = found[name].suggestion
    else:
        do = import_for(name) or ""
        close = nearest(name, about.locals | set(dir(builtins)))
        do = do or (f"did you mean {close}?" if close else "assign or import it before this line")
    if do.startswith(("import ", "from ")):
        return Said(f"{name} is not defined: it was never imported", f"add at the top: {do}")
    return Said(f"{name} is not defined where this line runs", do)


def _too_early(match: Match, about: About) -> Said:
    name = match[1] or match[2]
    return Said(
        f"{name} has no value yet when this line runs: the line that assigns it comes later, or in a branch "
        "that was not taken",
        f"assign {name} before this line, in every case",
    )


def _no_start(match: Match, about: About) -> Said:
    where = about.owner.name if about.owner is not None else "the class"
    return Said(
        f"{where} keeps a layer, parameter or buffer before nn.Module is set up",
        "make super().__init__() the first line of __init__",
    )


def _attribute(match: Match, about: About) -> Said | None:
    kind, name = match.groups()
    node = about.definition(kind)
    if isinstance(node, ast.ClassDef):
        have = attributes_of(node)
        have |= {one.name for one in node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))}
        if name in have:
            return Said(
                f"self.{name} has no value yet: the line that assigns it{about.where_set(name)} has not run",
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


def _module_attribute(match: Match, about: About) -> Said:
    module, name = match.groups()
    loaded = sys.modules.get(module) if module.partition(".")[0] in ("torch", "math") else None
    close = nearest(name, [one for one in dir(loaded) if not one.startswith("_")], 0.6) if loaded else None
    do = f"did you mean {module}.{close}?" if close else f"look for it in the documentation of {module}"
    return Said(f"{module} has no {name}", do)


def _no_forward(match: Match, about: About) -> Said:
    node = about.definition(match[1])
    body = node.body if isinstance(node, ast.ClassDef) else []
    methods = [one.name for one in body if isinstance(one, ast.FunctionDef)]
    close = nearest("forward", methods, 0.6)
    near = f"; {close} is a different name" if close else ""
    return Said(
        f"{match[1]} has no forward, which nn.Module calls{near}",
        "write def forward(self, ...), indented as __init__ is",
    )


def _not_installed(match: Match, about: About) -> Said:
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
    Rule(
        r"'(\w+)' object has no attribute '_(?:\w+_hooks|parameters|modules)'",
        Said("nn.Module was never set up in {1}", "make super().__init__() the first line of its __init__"),
    ),
    Rule(r"module '([\w.]+)' has no attribute '(\w+)'", _module_attribute),
    Rule(r"'(\w+)' object has no attribute '(\w+)'", _attribute),
    Rule(r"Module \[(\w+)\] is missing the required \"forward\"", _no_forward),
    Rule(
        r"attempted relative import|relative import",
        Said(
            "`from .x import y` works inside a package only, and this file is run by itself",
            "put what it needs into the same file, or import it by its full name",
        ),
        "ImportError|ModuleNotFoundError",
    ),
    Rule(r"No module named '([\w.]+)'", _not_installed),
    Rule(
        r"cannot import name '(\w+)' from (?:partially initialized module )?'([\w.]+)'",
        Said("{2} has nothing called {1}", "check the spelling, and the version that is installed"),
    ),
)


def _missing(match: Match, about: About) -> Said:
    function, names = match[1], match[2]
    do = _own(function, about, "pass it, or give it a default")
    return Said(f"{_callee(function)} was called without {names}", do)


def _unexpected(match: Match, about: About) -> Said:
    function, name = match[1], match[2]
    node = about.definition(function.rpartition(".")[0] or function)
    arguments = {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)} if node is not None else set()
    close = nearest(name, arguments - {name}, 0.6)
    if name == "axis":
        close = "dim"
    do = (
        f"did you mean {close}?"
        if close
        else _own(function, about, "leave it out, or add it to the parameters")
    )
    return Said(f"{_callee(function)} has no argument called {name}", do)


def _count(match: Match, about: About) -> Said:
    function, takes, given = match[1], match[2], match[3]
    owner, _, method = function.rpartition(".")
    node = about.definition(owner)
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
        f"{_callee(function)} takes {count}", _own(function, about, "compare the call with the parameters")
    )


def _callee(function: str) -> str:
    """A class is called by its own name, not by __init__."""
    return function.removesuffix(".__init__")


def _own(function: str, about: About, do: str) -> str:
    node = about.definition(function.rpartition(".")[0]) if "." in function else about.definition(function)
    return (
        do
        if node is not None or about.source is None
        else "compare the call with the function's documentation"
    )


def _not_callable(match: Match, about: About) -> Said:
    do = {
        "Parameter": "multiply by it: x @ self.W",
        "ModuleList": "call its members: [layer(x) for layer in self.layers]",
        "Size": "write x.shape[0] or x.size(0)",
    }.get(match[1], "a function of that name was overwritten, or a * is missing before the bracket")
    return Said(f"{_type(match[1])} was called like a function", do)


def _pair_of_torch(match: Match, about: About) -> Said:
    return Said(
        f"{match[1]} along an axis returns two tensors, the values and where they are",
        f"take the values: x.{match[1]}(dim=-1, keepdim=True).values, or x.a{match[1]}(dim=-1, keepdim=True)",
    )


def _operand(match: Match, about: About) -> Said:
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


def _invalid_combination(match: Match, about: About) -> Said:
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


def _recursion(match: Match, about: About) -> Said:
    function = about.function.name if about.function is not None else "a function"
    return Said(f"{function} calls itself without end", "call the other function, or the parent's, super()")


def _divisible(match: Match, about: About) -> Said:
    return Said(
        "the width is not divisible by the number of heads, so heads of equal size are impossible",
        "build it with a width that is a multiple of the number of heads; see that the two are not swapped",
    )


def _assertion(match: Match, about: About) -> Said:
    statement = about.statement
    if isinstance(statement, ast.Assert) and "%" in about.text:
        return _divisible(match, about)
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
    Rule(
        r".*",
        Said("this part is still to be written", "put your own lines in its place"),
        "NotImplementedError",
    ),
    Rule(r".*", _recursion, "RecursionError"),
    Rule(r".*divisible.*", _divisible),
    Rule(r".*", _assertion, "AssertionError"),
    Rule(
        r"division by zero|modulo by zero",
        Said(
            "a number is divided by 0",
            "print the divisor: d_model // num_heads is 0 where there are more heads than d_model",
        ),
    ),
    Rule(
        r"(list|tuple) index out of range",
        Said("a {1} has fewer entries than were asked for", "print its length before this line"),
    ),
    Rule(r".*", Said("there is no entry {0}", "print the keys before this line"), "KeyError"),
)
