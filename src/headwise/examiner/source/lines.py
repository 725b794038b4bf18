"""Find the line of the learner's source that has a fault.

A fault has regular expressions for the line that usually has it. They are tried on code only: without
comments and docstrings, with statements of several lines joined, and without code that never runs. A line
is named only if it is certain.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from ..faults.fault import Fault
from .parsed import (
    DEFINITIONS,
    FUNCTIONS,
    Definition,
    Function,
    definition_start,
    dotted,
    extent_of,
    methods_of,
    nodes,
    readable,
    text_of,
    tree_of,
)

LONGEST = 110  # a statement of at most so many characters is quoted whole
# strings that matter to what is computed: the equations of einsum and einops, "-inf"
CODE_STRING = re.compile(r"[-+]?inf(inity)?|nan|[^'\"]*->[^'\"]*|ij|xy", re.IGNORECASE)
# the three projections are written as three lines that mean the same
QKV = re.compile(
    r"(?i)_*(w|fc|to|linear|proj|lin|b)?_*(q|k|v|query|key|value|querie|val)s?_*(w|fc|proj|linear|lin|layer)?_*"
)
DIAGONAL = re.compile(r"tri[ul]|diagonal|range\(|cumsum|[<>]=?")  # what says which keys come after a query
SKIPPED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


@dataclass(frozen=True, eq=False)
class CodeLine:
    """A statement, or the head of a compound one, written as a single line."""

    text: str  # spaces as the learner wrote them
    starts: tuple[tuple[int, int], ...]  # (offset in `text`, line of the source), in order
    tokens: tuple[str, ...]
    statement: ast.stmt | None

    @cached_property
    def tidy(self) -> str:
        """The text as `ast.unparse` writes it."""
        return self.text if self.statement is None else _head(self.statement)

    @property
    def line(self) -> int:
        return self.starts[0][1]

    def line_at(self, offset: int) -> int:
        """Return the line of the source that contains this character."""
        return [line for start, line in self.starts if start <= offset][-1]


def line_of(
    fault: Fault, source: str, first_line: int | None = None, last_line: int | None = None
) -> tuple[int, str] | None:
    """Return the line with the fault, counted from 1, and its text; None if none or several are possible.

    Args:
        fault: its `lines` are tried in order; the first that matches decides, and later patterns only choose
            among its matches.
        source: of the file.
        first_line, last_line: of the class or function that was checked, None for the whole file. Functions
            and classes of the file that it uses are searched too.
    """
    tree = tree_of(source)
    if tree is None:
        return None
    scope = _scope(tree, first_line, last_line)
    lines = [
        line for line in code_lines(source) if _in(line, scope.counts) and not _in(line, scope.never_runs)
    ]
    letter = _letter(fault)
    if letter is not None:
        return _of_letter(letter, fault, lines, scope, source)
    lines = [
        line for line in lines if not isinstance(line.statement, DEFINITIONS)
    ]  # a signature has no fault
    if fault.key.startswith("causal"):
        lines = [line for line in lines if DIAGONAL.search(line.text)]
    matches: list[CodeLine] | None = None
    for pattern in fault.lines:
        matching = [
            line for line in (lines if matches is None else matches) if _match(pattern, line) is not None
        ]
        if not matching:
            continue
        for likelier in (scope.counts, scope.own, scope.running, scope.forward):
            matching = [line for line in matching if _in(line, likelier)] or matching
            if _mean_the_same(matching) and (chosen := _which(fault.key, matching)) is not None:
                return _answer(pattern, chosen, source)
        matches = matching
    return None


def _letter(fault: Fault) -> str | None:
    """Return which of q, k and v a fault of the projections concerns, or concerns first; None if neither."""
    if fault.step not in ("project", "inputs"):  # of the recipe
        return None
    words = [word for word in re.findall(r"[a-z]+", fault.key) if QKV.fullmatch(word)]
    return words[0][0] if words and "order" not in fault.key else None


def _of_letter(
    letter: str, fault: Fault, lines: list[CodeLine], scope: _Scope, source: str
) -> tuple[int, str] | None:
    """Return the line that computes the queries, keys or values; for a missing bias, that of the layer."""
    building = "bias" in fault.key and "used" not in fault.key
    matching = []
    for line in lines:
        target = line.statement.targets[0] if isinstance(line.statement, ast.Assign) else None
        names = [target] if not isinstance(target, ast.Tuple) else target.elts
        letters = [QKV.fullmatch(dotted(name).removeprefix("self.")) for name in names if name is not None]
        if any(each is not None and each[2][0].lower() == letter for each in letters):
            matching.append(line)
    if building:
        matching = [line for line in matching if not _in(line, scope.running) and "bias" in line.text]
    else:
        matching = [line for line in matching if _in(line, scope.running)]
        inputs = r"\b(k|keys?|v|values?)\b" if letter == "v" else r"\b(q|query|queries|k|keys?|v|values?|x)\b"
        matching = [line for line in matching if re.search(inputs, line.text.partition("=")[2])] or matching
    return (matching[0].line, text_of(source, matching[0].line)) if matching else None


def _match(pattern: str, line: CodeLine) -> int | None:
    """Return the offset in the line at which the pattern matches, or None."""
    if match := re.search(pattern, line.text):
        return match.start()
    return 0 if re.search(pattern, line.tidy) else None


def _answer(pattern: str, line: CodeLine, source: str) -> tuple[int, str]:
    if len(line.text) <= LONGEST:
        return line.line, " ".join(line.text.split())
    number = line.line_at(_match(pattern, line) or 0)
    return number, text_of(source, number)


def _which(key: str, lines: list[CodeLine]) -> CodeLine | None:
    """Return, of equivalent lines, the one for the projection that the fault is about, else the first."""
    named = {word[0] for word in re.findall(r"[a-z]+", key) if QKV.fullmatch(word)}
    if len(lines) == 1 or len(named) != 1:
        return lines[0]
    letters = ((QKV.fullmatch(line.tokens[0]), line) for line in lines)
    return next((line for match, line in letters if match is not None and match[2][0].lower() in named), None)


def _mean_the_same(lines: list[CodeLine]) -> bool:
    """Return True if the lines differ at most in which of queries, keys and values they name."""
    first = lines[0].tokens
    return all(
        len(other.tokens) == len(first)
        and all(
            a == b or (QKV.fullmatch(a) and QKV.fullmatch(b))
            for a, b in zip(first, other.tokens, strict=True)
        )
        for other in lines[1:]
    )


@lru_cache(maxsize=16)
def own_code(source: str, first_line: int | None) -> str:
    """Return the statements, a line each, of the definition on `first_line`, or of the file if None."""
    tree = tree_of(source)
    node = None if tree is None or first_line is None else definition_at(tree, first_line)
    extent = (1, 10**9) if node is None else extent_of(node)
    return "\n".join(line.text for line in code_lines(source) if _in(line, [extent]))


Extents = Sequence[tuple[int, int]]  # first and last lines


class _Scope(NamedTuple):
    """The lines that are searched, and increasingly likely subsets of them."""

    counts: Extents
    never_runs: Extents = ()  # methods of a parent class that the class overrides
    own: Extents = ()  # the class or function itself
    running: Extents = ()  # all functions but __init__
    forward: Extents = ()


def _in(line: CodeLine, extents: Extents) -> bool:
    return any(first <= line.line <= last for first, last in extents)


def _scope(tree: ast.Module, first_line: int | None, last_line: int | None) -> _Scope:
    checked = tree if first_line is None else definition_at(tree, first_line)
    if checked is None:
        return _Scope([(first_line or 1, last_line or 10**9)])
    functions = list(nodes(checked, FUNCTIONS))
    running = [extent_of(node) for node in functions if node.name != "__init__"]
    forward = [extent_of(node) for node in functions if node.name in ("forward", "__call__")]
    if isinstance(checked, ast.Module):
        return _Scope([(1, 10**9)], [], [], running, forward)
    used = used_by(tree, checked)
    return _Scope(
        [extent_of(definition) for definition in used],
        _overridden(checked, used),
        [extent_of(checked)],
        running,
        forward,
    )


def _overridden(checked: Definition, used: list[Definition]) -> Extents:
    """Return the extents of methods of parent classes that `checked` overrides and does not call."""
    if not isinstance(checked, ast.ClassDef):
        return []
    replaced: set[str] = set()
    extents: list[tuple[int, int]] = []
    by_name = {owner.name: owner for owner in used if isinstance(owner, ast.ClassDef)}
    line: list[ast.ClassDef] = [checked]
    for owner in line:  # grows: the parents, then theirs
        methods = methods_of(owner).values()
        extents += [extent_of(method) for method in methods if method.name in replaced]
        replaced |= {
            method.name for method in methods if f"super().{method.name}(" not in ast.unparse(method)
        }
        parents = [by_name.get(dotted(base)) for base in owner.bases]
        line += [parent for parent in parents if parent is not None and parent not in line]
    return extents


def definition_at(tree: ast.Module, line: int) -> Definition | None:
    """Return the class or function whose decorators or head include this line."""
    return next(
        (node for node in nodes(tree, DEFINITIONS) if definition_start(node) <= line <= node.lineno), None
    )


def used_by(tree: ast.Module, checked: Definition) -> list[Definition]:
    """Return a definition and the functions and classes of the file that it uses, directly or not."""
    by_name = {node.name: node for node in tree.body if isinstance(node, DEFINITIONS)}
    used, waiting = [checked], [checked]
    while waiting:
        for name in nodes(waiting.pop(), ast.Name):
            other = by_name.get(name.id)
            if other is not None and other not in used:
                used.append(other)
                waiting.append(other)
    return used


@lru_cache(maxsize=4)
def code_lines(source: str) -> list[CodeLine]:
    """Return the statements of a source in order, a line each; strings that are not code become empty."""
    text, tree = readable(source), tree_of(source)
    if text is None or tree is None:
        return []
    statements: dict[int, ast.stmt] = {}
    for node in nodes(tree, ast.stmt):
        statements.setdefault(node.lineno, node)
    lines = (_code_line(tokens, statements) for tokens in _logical_lines(text))
    return [line for line in lines if line is not None]


def _logical_lines(text: str) -> Iterator[list[tokenize.TokenInfo]]:
    held: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NEWLINE:
            if held:
                yield held
            held = []
        elif token.type not in SKIPPED:
            held.append(token)


def _code_line(tokens: list[tokenize.TokenInfo], statements: dict[int, ast.stmt]) -> CodeLine | None:
    if all(token.type == tokenize.STRING for token in tokens):
        return None  # a docstring
    text, starts, words = "", [(0, tokens[0].start[0])], []
    before: tokenize.TokenInfo | None = None
    for token in tokens:
        if before is not None:
            if token.start[0] != before.end[0]:
                text += "" if text.endswith(("(", "[", "{", ".")) or token.string in ")]}." else " "
                starts.append((len(text), token.start[0]))
            else:
                text += " " * (token.start[1] - before.end[1])
        kind = tokenize.tok_name[token.type]
        word = _plain(token.string) if kind in ("STRING", "FSTRING_MIDDLE") else token.string
        text += word
        words.append(word)
        before = token
    return CodeLine(text, tuple(starts), tuple(words), statements.get(tokens[0].start[0]))


def _plain(string: str) -> str:
    """Return a string literal emptied, unless its text matters to what is computed."""
    inside = string.lstrip("rRbBuUfF").strip("'\"")
    return string if CODE_STRING.fullmatch(inside) else '""'


class _Emptied(ast.NodeTransformer):
    """Empty the strings that are not code."""

    def visit_Constant(self, constant: ast.Constant) -> ast.Constant:
        if isinstance(constant.value, str) and not CODE_STRING.fullmatch(constant.value):
            return ast.copy_location(ast.Constant(""), constant)
        return constant

    def visit_JoinedStr(self, string: ast.JoinedStr) -> ast.Constant:
        return ast.copy_location(ast.Constant(""), string)


def _head(node: ast.stmt) -> str:
    """Return the statement as `ast.unparse` writes it, without its body."""
    if isinstance(node, DEFINITIONS):
        return ""
    copy = ast.parse(ast.unparse(node)).body[0]  # the transformer changes the tree
    return ast.unparse(_Emptied().visit(copy)).partition("\n")[0]


SCORES = re.compile(
    r"scores?|logits?|qk\b|sims?\b|similarit|energy|dots?\b|raw|presoftmax|affinit", re.IGNORECASE
)
WEIGHTS = re.compile(r"weights?|attn|attention|att\b|atts\b|probs?|alphas?|maps?\b", re.IGNORECASE)
DOCUMENTED = re.compile(r"(attention|attn)[ _]?(weights?|probabilit\w*|probs?|maps?)", re.IGNORECASE)
REQUESTED = re.compile(r"(need|return|output|with|get)_?(attn_|attention_)?(weights|probs|attn|attentions?)$")


def says_weights(source: str, first_line: int | None) -> bool:
    """Return True if the code calls what it returns beside the output weights, and not scores.

    The name of the returned value, the argument that requests it and the docstring count.
    """
    for function in _entry_points(source, first_line):
        if any(SCORES.search(name) is None and WEIGHTS.search(name) for name in _returned(function)):
            return True
        parameters = (*function.args.args, *function.args.kwonlyargs)
        requested = any(REQUESTED.match(parameter.arg) for parameter in parameters)
        if requested or DOCUMENTED.search(ast.get_docstring(function) or ""):
            return True
    return False


def _entry_points(source: str, first_line: int | None) -> list[Function]:
    """Return the function itself, or the forward of the class or of its nearest parent."""
    tree = tree_of(source)
    node = None if tree is None or first_line is None else definition_at(tree, first_line)
    visited: set[str] = set()
    while tree is not None and isinstance(node, ast.ClassDef) and node.name not in visited:
        visited.add(node.name)
        methods = [method for method in node.body if isinstance(method, FUNCTIONS)]
        forward = [method for method in methods if method.name in ("forward", "__call__")]
        if forward:
            return forward
        parents = {base.id for base in node.bases if isinstance(base, ast.Name)}
        classes = (statement for statement in tree.body if isinstance(statement, ast.ClassDef))
        node = next((owner for owner in classes if owner.name in parents), None)
    return [node] if isinstance(node, FUNCTIONS) else []


def _returned(function: Function) -> Iterator[str]:
    """Yield the names of the values returned after the first: "attn" for `attn` and `{"attn": ..}`."""
    for node in nodes(function, ast.Return):
        if isinstance(node.value, ast.Tuple):
            yield from (name for part in node.value.elts[1:] if (name := _name(part)))
        elif isinstance(node.value, ast.Dict):
            yield from (str(key.value) for key in node.value.keys[1:] if isinstance(key, ast.Constant))


def _name(part: ast.expr) -> str:
    while isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and not part.args:
        part = part.func.value  # .detach(), .clone()
    if isinstance(part, ast.Name):
        return part.id
    return part.attr if isinstance(part, ast.Attribute) else ""
