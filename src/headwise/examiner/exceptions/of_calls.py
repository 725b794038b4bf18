"""Messages about calls, arguments, operators and asserts, in plain words."""

from __future__ import annotations

import ast
import re

from ..source.parsed import nearest
from .about import About, Rule, Said

Match = re.Match[str]


def _missing(match: Match, about: About) -> Said:
    function, names = match[1], match[2]
    do = _own(function, about, "pass it, or give it a default")
    return Said(f"{_callee(function)} was called without {names}", do)


def _unwritten(match: Match, about: About) -> Said:
    return Said("this part is still to be written", "put your own lines in its place")


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


def _zero(match: Match, about: About) -> Said:
    do = "print the divisor: d_model // num_heads is 0 where there are more heads than d_model"
    return Said("a number is divided by 0", do)


def _index_plain(match: Match, about: About) -> Said:
    return Said(f"a {match[1]} has fewer entries than were asked for", "print its length before this line")


def _key(match: Match, about: About) -> Said:
    return Said(f"there is no entry {match[0]}", "print the keys before this line")


RULES = (
    Rule(r"([\w.]+)\(\) missing \d+ required (?:positional|keyword-only) arguments?: (['\"].*)", _missing),
    Rule(r"([\w.]+)\(\) got an unexpected keyword argument '(\w+)'", _unexpected),
    Rule(
        r"([\w.]+)\(\) takes (?:from \d+ to )?(\d+) positional arguments? but (\d+) (?:was|were) given",
        _count,
    ),
    Rule(r"'(\w+)' object is not callable", _not_callable),
    Rule(r"unsupported operand type\(s\) for (\S+): '(\w+)' and '(\w+)'", _operand),
    Rule(
        r"(\w+)\(\) received an invalid combination of arguments - got \((.*?)\), but", _invalid_combination
    ),
    Rule(r".*", _unwritten, "NotImplementedError"),
    Rule(r".*", _recursion, "RecursionError"),
    Rule(r".*divisible.*", _divisible),
    Rule(r".*", _assertion, "AssertionError"),
    Rule(r"division by zero|modulo by zero", _zero),
    Rule(r"(list|tuple) index out of range", _index_plain),
    Rule(r".*", _key, "KeyError"),
)
