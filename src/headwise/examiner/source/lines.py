"""The line of the learner's source where a fault sits.

A fault brings regular expressions for the line it usually is. They are tried on code alone: no comments, no
docstrings, statements over several lines joined into one, and only the code that runs. A line is named when
there is no doubt; otherwise none is.
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
    dotted,
    extent_of,
    methods_of,
    readable,
    text_of,
    tree_of,
)

LONGEST = 110  # characters of a statement that are quoted whole
# strings that are code: the equations of einsum and einops, "-inf"
TELLING = re.compile(r"[-+]?inf(inity)?|nan|[^'\"]*->[^'\"]*|ij|xy", re.IGNORECASE)
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
    """One statement, or the head of one, on a single line."""

    text: str  # spaces as written
    starts: tuple[tuple[int, int], ...]  # offset in `text` -> line of the source, in order
    tokens: tuple[str, ...]
    statement: ast.stmt | None

    @cached_property
    def tidy(self) -> str:
        """The same with spaces as Python's own printer puts them."""
        return self.text if self.statement is None else _head(self.statement)

    @property
    def line(self) -> int:
        return self.starts[0][1]

    def line_at(self, offset: int) -> int:
        """The line of the source that holds this character."""
        return [line for start, line in self.starts if start <= offset][-1]


def line_of(
    fault: Fault, source: str, first_line: int | None = None, last_line: int | None = None
) -> tuple[int, str] | None:
    """The line, counted from 1, and what it says; None where no line, or more than one, could be meant.

    Args:
        fault: its `lines` are tried in order; the first that matches anything decides, and those after it
            only choose among its matches.
        first_line, last_line: of the class or function that was checked; None: the whole file. Functions and
            classes of the file that it uses count, too.
    """
    tree = tree_of(source)
    if tree is None:
        return None
    scope = _scope(tree, first_line, last_line)
    lines = [one for one in code_lines(source) if _in(one, scope.counts) and not _in(one, scope.never_runs)]
    letter = _letter(fault)
    if letter is not None:
        return _of_letter(letter, fault, lines, scope, source)
    lines = [one for one in lines if not isinstance(one.statement, DEFINITIONS)]  # a signature is right
    if fault.key.startswith("causal"):
        lines = [one for one in lines if DIAGONAL.search(one.text)]
    matches: list[CodeLine] | None = None
    for pattern in fault.lines:
        found = [one for one in (lines if matches is None else matches) if _match(pattern, one) is not None]
        if not found:
            continue
        for likelier in (scope.counts, scope.own, scope.running, scope.forward):
            found = [one for one in found if _in(one, likelier)] or found
            if _mean_the_same(found) and (chosen := _which(fault.key, found)) is not None:
                return _answer(pattern, chosen, source)
        matches = found
    return None


def _letter(fault: Fault) -> str | None:
    """Which of q, k and v a fault of the projections is about, where it is about one, or first about one."""
    if fault.step not in ("project", "inputs"):  # of the recipe
        return None
    words = [word for word in re.findall(r"[a-z]+", fault.key) if QKV.fullmatch(word)]
    return words[0][0] if words and "order" not in fault.key else None


def _of_letter(
    letter: str, fault: Fault, lines: list[CodeLine], scope: _Scope, source: str
) -> tuple[int, str] | None:
    """The line that makes these queries, keys or values; where a bias is missing, that of the layer."""
    building = "bias" in fault.key and "used" not in fault.key
    found = []
    for one in lines:
        target = one.statement.targets[0] if isinstance(one.statement, ast.Assign) else None
        names = [target] if not isinstance(target, ast.Tuple) else target.elts
        letters = [QKV.fullmatch(dotted(name).removeprefix("self.")) for name in names if name is not None]
        if any(each is not None and each[2][0].lower() == letter for each in letters):
            found.append(one)
    if building:
        found = [one for one in found if not _in(one, scope.running) and "bias" in one.text]
    else:
        found = [one for one in found if _in(one, scope.running)]
        given = r"\b(k|keys?|v|values?)\b" if letter == "v" else r"\b(q|query|queries|k|keys?|v|values?|x)\b"
        found = [one for one in found if re.search(given, one.text.partition("=")[2])] or found
    return (found[0].line, text_of(source, found[0].line)) if found else None


def _match(pattern: str, line: CodeLine) -> int | None:
    """Where in the line the pattern begins."""
    if found := re.search(pattern, line.text):
        return found.start()
    return 0 if re.search(pattern, line.tidy) else None


def _answer(pattern: str, line: CodeLine, source: str) -> tuple[int, str]:
    if len(line.text) <= LONGEST:
        return line.line, " ".join(line.text.split())
    number = line.line_at(_match(pattern, line) or 0)
    return number, text_of(source, number)


def _which(key: str, lines: list[CodeLine]) -> CodeLine | None:
    """Of lines that mean the same, the one for the projection that the fault is about, else the first."""
    named = {word[0] for word in re.findall(r"[a-z]+", key) if QKV.fullmatch(word)}
    if len(lines) == 1 or len(named) != 1:
        return lines[0]
    letters = ((QKV.fullmatch(one.tokens[0]), one) for one in lines)
    return next((one for match, one in letters if match is not None and match[2][0].lower() in named), None)


def _mean_the_same(lines: list[CodeLine]) -> bool:
    """Whether they differ at most in which of queries, keys and values they are about."""
    first = lines[0].tokens
    return all(
        len(other.tokens) == len(first)
        and all(
            a == b or (QKV.fullmatch(a) and QKV.fullmatch(b))
            for a, b in zip(first, other.tokens, strict=True)
        )
        for other in lines[1:]
    )


def own_code(source: str, first_line: int | None) -> str:
    """The statements of the class or function that begins there, a line each; None: of the whole file."""
    tree = tree_of(source)
    node = None if tree is None or first_line is None else definition_at(tree, first_line)
    extent = (1, 10**9) if node is None else extent_of(node)
    return "\n".join(one.text for one in code_lines(source) if _in(one, [extent]))


Extents = Sequence[tuple[int, int]]  # first and last lines


class _Scope(NamedTuple):
    """The lines that count, and those of them that are likelier, each kind within the one before."""

    counts: Extents
    never_runs: Extents = ()  # methods of a parent that the class has its own of
    own: Extents = ()  # the class or function itself
    running: Extents = ()  # what is called, not what builds
    forward: Extents = ()


def _in(line: CodeLine, extents: Extents) -> bool:
    return any(first <= line.line <= last for first, last in extents)


def _scope(tree: ast.Module, first_line: int | None, last_line: int | None) -> _Scope:
    checked = tree if first_line is None else definition_at(tree, first_line)
    if checked is None:
        return _Scope([(first_line or 1, last_line or 10**9)])
    functions = [node for node in ast.walk(checked) if isinstance(node, FUNCTIONS)]
    running = [extent_of(node) for node in functions if node.name != "__init__"]
    forward = [extent_of(node) for node in functions if node.name in ("forward", "__call__")]
    if isinstance(checked, ast.Module):
        return _Scope([(1, 10**9)], [], [], running, forward)
    used = used_by(tree, checked)
    return _Scope(
        [extent_of(one) for one in used], _overridden(checked, used), [extent_of(checked)], running, forward
    )


def _overridden(checked: Definition, used: list[Definition]) -> Extents:
    """Methods of the parents among `used` that `checked` replaces and does not call."""
    if not isinstance(checked, ast.ClassDef):
        return []
    replaced: set[str] = set()
    found: list[tuple[int, int]] = []
    by_name = {one.name: one for one in used if isinstance(one, ast.ClassDef)}
    line: list[ast.ClassDef] = [checked]
    for owner in line:  # grows: the parents, then theirs
        methods = methods_of(owner).values()
        found += [extent_of(one) for one in methods if one.name in replaced]
        replaced |= {one.name for one in methods if f"super().{one.name}(" not in ast.unparse(one)}
        parents = [by_name.get(dotted(base)) for base in owner.bases]
        line += [one for one in parents if one is not None and one not in line]
    return found


def definition_at(tree: ast.Module, line: int) -> Definition | None:
    """The class or function whose head, decorators counted, is on this line."""
    for node in ast.walk(tree):
        if isinstance(node, DEFINITIONS):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if first <= line <= node.lineno:
                return node
    return None


def used_by(tree: ast.Module, checked: Definition) -> list[Definition]:
    """It, and the functions and classes of the file that it mentions, or that those mention."""
    by_name = {node.name: node for node in tree.body if isinstance(node, DEFINITIONS)}
    used, waiting = [checked], [checked]
    while waiting:
        for node in ast.walk(waiting.pop()):
            other = by_name.get(node.id) if isinstance(node, ast.Name) else None
            if other is not None and other not in used:
                used.append(other)
                waiting.append(other)
    return used


@lru_cache(maxsize=4)
def code_lines(source: str) -> list[CodeLine]:
    """The statements of a source, in order; strings that are not code are empty."""
    text, tree = readable(source), tree_of(source)
    if text is None or tree is None:
        return []
    statements: dict[int, ast.stmt] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            statements.setdefault(node.lineno, node)
    found = (_code_line(tokens, statements) for tokens in _logical_lines(text))
    return [line for line in found if line is not None]


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
    if all(one.type == tokenize.STRING for one in tokens):
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
    """A string literal with nothing in it, unless what is in it says what is computed."""
    inside = string.lstrip("rRbBuUfF").strip("'\"")
    return string if TELLING.fullmatch(inside) else '""'


class _Emptied(ast.NodeTransformer):
    """Strings that are not code become empty."""

    def visit_Constant(self, constant: ast.Constant) -> ast.Constant:
        if isinstance(constant.value, str) and not TELLING.fullmatch(constant.value):
            return ast.copy_location(ast.Constant(""), constant)
        return constant

    def visit_JoinedStr(self, string: ast.JoinedStr) -> ast.Constant:
        return ast.copy_location(ast.Constant(""), string)


def _head(node: ast.stmt) -> str:
    """The statement as Python prints it, without the body it may have."""
    if isinstance(node, DEFINITIONS):
        return ""
    copy = ast.parse(ast.unparse(node)).body[0]  # the transformer writes to what it is given
    return ast.unparse(_Emptied().visit(copy)).partition("\n")[0]


SCORES = re.compile(
    r"scores?|logits?|qk\b|sims?\b|similarit|energy|dots?\b|raw|presoftmax|affinit", re.IGNORECASE
)
WEIGHTS = re.compile(r"weights?|attn|attention|att\b|atts\b|probs?|alphas?|maps?\b", re.IGNORECASE)
TOLD = re.compile(r"(attention|attn)[ _]?(weights?|probabilit\w*|probs?|maps?)", re.IGNORECASE)
ASKED = re.compile(r"(need|return|output|with|get)_?(attn_|attention_)?(weights|probs|attn|attentions?)$")


def says_weights(source: str, first_line: int | None) -> bool:
    """Whether what is returned beside the output is called weights: by its name, by the argument that asks
    for it or by what is written about it. What is called scores is not."""
    for door in _doors(source, first_line):
        if any(SCORES.search(name) is None and WEIGHTS.search(name) for name in _returned(door)):
            return True
        every = (*door.args.args, *door.args.kwonlyargs)
        if any(ASKED.match(one.arg) for one in every) or TOLD.search(ast.get_docstring(door) or ""):
            return True
    return False


def _doors(source: str, first_line: int | None) -> Iterator[ast.FunctionDef]:
    """The function itself, or the class's forward, its own or that of a parent in the same file."""
    tree = tree_of(source)
    node = None if tree is None or first_line is None else definition_at(tree, first_line)
    seen: set[str] = set()
    while tree is not None and isinstance(node, ast.ClassDef) and node.name not in seen:
        seen.add(node.name)
        own = [one for one in node.body if isinstance(one, ast.FunctionDef)]
        forward = [one for one in own if one.name in ("forward", "__call__")]
        if forward:
            yield from forward
            return
        parents = {one.id for one in node.bases if isinstance(one, ast.Name)}
        classes = (one for one in tree.body if isinstance(one, ast.ClassDef))
        node = next((one for one in classes if one.name in parents), None)
    if isinstance(node, ast.FunctionDef):
        yield node


def _returned(door: ast.FunctionDef) -> Iterator[str]:
    """The names of what is returned beside the first: attn of `attn`, of `self.attn`, of `{"attn": ..}`."""
    for one in ast.walk(door):
        if not isinstance(one, ast.Return) or one.value is None:
            continue
        if isinstance(one.value, ast.Tuple):
            yield from (name for part in one.value.elts[1:] if (name := _name(part)))
        elif isinstance(one.value, ast.Dict):
            yield from (str(key.value) for key in one.value.keys[1:] if isinstance(key, ast.Constant))


def _name(part: ast.expr) -> str:
    while isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and not part.args:
        part = part.func.value  # .detach(), .clone()
    if isinstance(part, ast.Name):
        return part.id
    return part.attr if isinstance(part, ast.Attribute) else ""
