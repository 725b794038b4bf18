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


def alike(sources: Sequence[str], groups: Sequence[object]) -> list[list[Alike]]:
    """For each file those that share `TOLD_FROM` of its tokens with it, the most alike first.

    Args:
        sources: their texts.
        groups: files of one group, as of one writer, are not compared with each other.
    """
    tokens = [tokens_of(source) for source in sources]
    runs = [_runs(each) for each in tokens]
    kinds = [set(each) for each in runs]
    holders: dict[int, list[int]] = {}
    for number, each in enumerate(kinds):
        for run in each:
            holders.setdefault(run, []).append(number)
    result: list[list[Alike]] = [[] for _ in sources]
    for number, own in enumerate(runs):
        if len(tokens[number]) < FEWEST:
            continue
        counts: dict[int, int] = {}
        for run in kinds[number]:
            for other in holders[run]:
                counts[other] = counts.get(other, 0) + 1
        for other, count in counts.items():
            if other == number or groups[other] == groups[number] or 2 * count < len(kinds[number]):
                continue
            share = _covered(own, kinds[other]) / len(tokens[number])
            if share >= TOLD_FROM:
                result[number].append(Alike(other, share, sources[other] == sources[number]))
        result[number].sort(key=lambda one: (-one.same_text, -one.share, one.other))
    return result


def _runs(tokens: list[str]) -> list[int]:
    """Every `RUN` tokens in a row, as one number."""
    return [hash(tuple(tokens[at : at + RUN])) for at in range(len(tokens) - RUN + 1)]


def _covered(runs: list[int], others: set[int]) -> int:
    """How many tokens lie in a run that the other has, too."""
    count = reach = 0
    for at, run in enumerate(runs):
        if run in others:
            count += at + RUN - max(reach, at)
            reach = at + RUN
    return count


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
