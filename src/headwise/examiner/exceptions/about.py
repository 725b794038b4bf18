"""What is known about a problem: the learner's line, the class and function around it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..evidence import Problem
from ..source.parsed import Definition, Function, bound_in, dotted, text_of, tree_of


class Said(NamedTuple):
    """An exception in plain words."""

    what: str  # what happened and why, as sentences without the last full stop
    do: str  # what to do about it


class Rule(NamedTuple):
    """Which messages it is for, and what it says about one."""

    message: str  # a regular expression
    say: Said | Callable[[re.Match[str], About], Said | None]  # words with {1} for its first group; or made
    kind: str = ""  # a regular expression for the exception's class, "" for any

    def said(self, match: re.Match[str], about: About) -> Said | None:
        """Of this message; None: it is not this rule's after all."""
        if not isinstance(self.say, Said):
            return self.say(match, about)
        found = (match[0], *match.groups())
        return Said(self.say.what.format(*found), self.say.do.format(*found))


@dataclass(frozen=True)
class About:
    """A problem and the source it came from."""

    problem: Problem
    source: str | None

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
        line, node = text_of(self.source, self.problem.line), self.statement
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
        around = [one for one in self._around() if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]
        return max(around, key=lambda one: one.lineno, default=None)

    @cached_property
    def owner(self) -> ast.ClassDef | None:
        """The innermost class that holds the line."""
        around = [one for one in self._around() if isinstance(one, ast.ClassDef)]
        return max(around, key=lambda one: one.lineno, default=None)

    def _around(self) -> list[ast.AST]:
        line = self.problem.line
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
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
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

    @cached_property
    def shapes(self) -> dict[str, list[int]]:
        """The shapes of the tensors that the statement names, in its order."""
        names = (
            [node.id for node in ast.walk(self.statement) if isinstance(node, ast.Name)]
            if (self.statement is not None)
            else []
        )
        return {name: self.problem.shapes[name] for name in names if name in self.problem.shapes}

    def assigned(self, name: str) -> ast.expr | None:
        """What the variable was last assigned before the line, in the same function."""
        found = None
        for node in ast.walk(self.function) if self.function is not None else ():
            if not isinstance(node, ast.Assign) or node.lineno >= (self.problem.line or 0):
                continue
            if any(isinstance(target, ast.Name) and target.id == name for target in node.targets):
                found = node.value if found is None or node.lineno > found.lineno else found
        return found

    def says(self, pattern: str) -> bool:
        """Whether the learner's line has this in it."""
        return re.search(pattern, self.text) is not None


def counted(number: int, word: str) -> str:
    """1 axis, 2 axes."""
    plural = {"axis": "axes"}.get(word, word + "s")
    return f"{number} {word if number == 1 else plural}"
