"""Compute how similar the code of files is, apart from names and layout. The result is not a verdict."""

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

RUN = 16  # consecutive tokens that count as equal; shorter runs are in most files of a task
FEWEST = 60  # files with fewer tokens are not compared
REPORTED_FROM = 0.8  # independent solutions of a task share less: see tests/examiner/test_marks.py
MOST_REPORTED = 3
LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


@dataclass(frozen=True)
class SimilarFile:
    """Another file, and the share of this file's tokens that it contains."""

    other: int
    share: float
    same_text: bool


def tokens_of(source: str) -> list[str]:
    """Return the tokens of a source, with the same token for all names it defines, all strings, all numbers.

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
    except (tokenize.TokenError, SyntaxError, ValueError):  # not valid Python
        return [_as_token(word, own) for word in re.findall(r"\w+|[^\w\s]", source)]
    return result


def _as_token(name: str, own: set[str] | None) -> str:
    if not name.isidentifier() or keyword.iskeyword(name) or hasattr(builtins, name):
        return name
    return "x" if own is None or name in own else name


def _names_given(source: str) -> set[str] | None:
    """Return the names that a file defines, attributes included; None if it is not Python."""
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


def alike(sources: Sequence[str]) -> list[list[SimilarFile]]:
    """Return for each file those that contain at least `REPORTED_FROM` of its tokens, most similar first."""
    tokens = [tuple(tokens_of(source)) for source in sources]
    equal: dict[tuple[str, ...], list[int]] = {}  # files of the same tokens are compared once
    for number, each in enumerate(tokens):
        if len(each) >= FEWEST:
            equal.setdefault(each, []).append(number)
    places = [_places(each) for each in equal]
    runs = [frozenset(each) for each in places]
    result: list[list[SimilarFile]] = [[] for _ in sources]
    for mine, numbers in enumerate(equal.values()):
        for theirs, others in enumerate(equal.values()):
            share = 1.0
            if mine != theirs:
                lacking = runs[mine] - runs[theirs]
                if 2 * len(lacking) > len(runs[mine]):
                    continue
                count = len(tokens[numbers[0]])
                share = 1 - _alone([at for run in lacking for at in places[mine][run]], count) / count
            if share < REPORTED_FROM:
                continue
            for number in numbers:
                result[number] += [
                    SimilarFile(other, share, sources[other] == sources[number])
                    for other in others
                    if other != number
                ]
    for matches in result:
        matches.sort(key=lambda each: (-each.same_text, -each.share, each.other))
    return result


def _places(tokens: Sequence[str]) -> dict[int, list[int]]:
    """Return the hash of each run of `RUN` tokens, and where such runs begin."""
    places: dict[int, list[int]] = {}
    for at in range(len(tokens) - RUN + 1):
        places.setdefault(hash(tokens[at : at + RUN]), []).append(at)
    return places


def _alone(starts: list[int], count: int) -> int:
    """Return the number of tokens, of `count`, that are only in runs missing from the other file.

    Args:
        starts: where the missing runs begin.
        count: of all tokens.
    """
    lacking = set(starts)
    alone = 0
    for at in starts:
        if at - 1 in lacking:
            continue
        end = at
        while end in lacking:
            end += 1
        first = 0 if at == 0 else at + RUN - 1  # the first token that is in no earlier run
        last = count if end == count - RUN + 1 else end
        alone += max(0, last - first)
    return alone


def in_words(matches: Sequence[SimilarFile], names: Sequence[str]) -> list[str]:
    """Return a sentence for each of the most similar files."""
    sentences = []
    for each in matches[:MOST_REPORTED]:
        if each.same_text:
            sentences.append(f"identical to {names[each.other]}")
        else:
            percent = int(100 * each.share)  # 99.9% is not 100%
            sentences.append(f"{percent}% of its tokens are in {names[each.other]}, apart from names")
    if len(matches) > MOST_REPORTED:
        sentences.append(f"similar to {len(matches) - MOST_REPORTED} more files")
    return sentences
