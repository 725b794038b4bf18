"""How much of one file's code is another's, names and layout aside: a number, and nobody's verdict."""

from __future__ import annotations

import ast
import builtins
import io
import keyword
import re
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass

from ..source.parsed import tree_of

RUN = 16  # tokens in a row that are the same: fewer are in most files of a task
FEWEST = 60  # tokens of a file that says something
TOLD_FROM = 0.8  # independent solutions of a task share less: see tests/examiner/test_likeness.py
MOST_TOLD = 3
LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


@dataclass(frozen=True)
class Alike:
    """A share of one file's tokens that another has, too."""

    other: int
    share: float
    same_text: bool


def tokens_of(source: str) -> list[str]:
    """The tokens of a source: every name that it gives itself is one token, and so is every text and number.

    Comments, docstrings and layout are left out.
    """
    own = _names_given(source)
    result: list[str] = []
    starts_statement = True
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type in LAYOUT:
                starts_statement = True
                continue
            if token.type == tokenize.STRING or "STRING" in tokenize.tok_name[token.type]:
                if not starts_statement:
                    result.append('"')
            elif token.type == tokenize.NUMBER:
                result.append("0")
            elif token.type == tokenize.NAME:
                result.append(_as_token(token.string, own))
            else:
                result.append(token.string)
            starts_statement = False
    except (tokenize.TokenError, SyntaxError, ValueError):  # no Python: as far as it can be read
        return [_as_token(word, own) for word in re.findall(r"\w+|[^\w\s]", source)]
    return result


def _as_token(name: str, own: set[str] | None) -> str:
    if not name.isidentifier() or keyword.iskeyword(name) or hasattr(builtins, name):
        return name
    return "x" if own is None or name in own else name


def _names_given(source: str) -> set[str] | None:
    """Names that the file gives to variables, attributes, functions, classes; None where it is no Python."""
    tree = tree_of(source)
    if tree is None:
        return None
    names = {"self"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.alias) and node.asname:
            names.add(node.asname)
    return names - {"forward", "__init__"}


def alike(sources: Sequence[str]) -> list[list[Alike]]:
    """For each file those that share `TOLD_FROM` of its tokens with it, the most alike first."""
    tokens = [tuple(tokens_of(source)) for source in sources]
    equal: dict[tuple[str, ...], list[int]] = {}  # files of the same tokens are compared once
    for number, each in enumerate(tokens):
        if len(each) >= FEWEST:
            equal.setdefault(each, []).append(number)
    places = [_places(each) for each in equal]
    runs = [frozenset(each) for each in places]
    result: list[list[Alike]] = [[] for _ in sources]
    for mine, numbers in enumerate(equal.values()):
        for theirs, others in enumerate(equal.values()):
            share = 1.0
            if mine != theirs:
                lacking = runs[mine] - runs[theirs]
                if 2 * len(lacking) > len(runs[mine]):
                    continue
                count = len(tokens[numbers[0]])
                share = 1 - _alone([at for run in lacking for at in places[mine][run]], count) / count
            if share < TOLD_FROM:
                continue
            for number in numbers:
                result[number] += [
                    Alike(other, share, sources[other] == sources[number])
                    for other in others
                    if other != number
                ]
    for found in result:
        found.sort(key=lambda each: (-each.same_text, -each.share, each.other))
    return result


def _places(tokens: Sequence[str]) -> dict[int, list[int]]:
    """Where each `RUN` tokens in a row begin, which stand there as one number."""
    places: dict[int, list[int]] = {}
    for at in range(len(tokens) - RUN + 1):
        places.setdefault(hash(tokens[at : at + RUN]), []).append(at)
    return places


def _alone(starts: list[int], count: int) -> int:
    """How many of `count` tokens lie only in runs that another file lacks; these begin at `starts`."""
    lacking = set(starts)
    alone = 0
    for at in starts:
        if at - 1 in lacking:
            continue
        end = at
        while end in lacking:
            end += 1
        first = 0 if at == 0 else at + RUN - 1  # of the tokens that no run before these holds
        last = count if end == count - RUN + 1 else end
        alone += max(0, last - first)
    return alone


def in_words(found: Sequence[Alike], names: Sequence[str]) -> list[str]:
    """One sentence for each of the files that are most alike."""
    sentences = []
    for each in found[:MOST_TOLD]:
        if each.same_text:
            sentences.append(f"the same text as {names[each.other]}")
        else:
            percent = int(100 * each.share)  # 99.9 is not all of it
            sentences.append(f"{percent}% of the tokens are the same as in {names[each.other]}, names aside")
    if len(found) > MOST_TOLD:
        sentences.append(f"and as much as in {len(found) - MOST_TOLD} more files")
    return sentences
