"""Messages about names, attributes, imports and what is no Python, in plain words."""

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


def _never_started(match: Match, about: About) -> Said:
    return Said(
        f"nn.Module was never set up in {match[1]}", "make super().__init__() the first line of its __init__"
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


def _cannot_import(match: Match, about: About) -> Said:
    return Said(
        f"{match[2]} has nothing called {match[1]}", "check the spelling, and the version that is installed"
    )


def _relative(match: Match, about: About) -> Said:
    return Said(
        "`from .x import y` works inside a package only, and this file is run by itself",
        "put what it needs into the same file, or import it by its full name",
    )


RULES = (
    Rule(r".*", _syntax, "SyntaxError|IndentationError|TabError"),
    Rule(r"name '(\w+)' is not defined", _name),
    Rule(r"cannot access (?:local|free) variable '(\w+)'|local variable '(\w+)' referenced", _too_early),
    Rule(r"before Module\.__init__\(\) call", _no_start),
    Rule(r"'(\w+)' object has no attribute '_(?:\w+_hooks|parameters|modules)'", _never_started),
    Rule(r"module '([\w.]+)' has no attribute '(\w+)'", _module_attribute),
    Rule(r"'(\w+)' object has no attribute '(\w+)'", _attribute),
    Rule(r"Module \[(\w+)\] is missing the required \"forward\"", _no_forward),
    Rule(r"attempted relative import|relative import", _relative, "ImportError|ModuleNotFoundError"),
    Rule(r"No module named '([\w.]+)'", _not_installed),
    Rule(r"cannot import name '(\w+)' from (?:partially initialized module )?'([\w.]+)'", _cannot_import),
)
