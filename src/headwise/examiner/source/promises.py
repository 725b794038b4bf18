"""Whether a source promises a projection of the output: without a promise, its absence is no fault."""

from __future__ import annotations

import ast
import re

from .lines import definition_at, used_by
from .parsed import tree_of

PAPER = re.compile(r"attention\s+is\s+all\s+you\s+need|vaswani", re.IGNORECASE)
NAMES = re.compile(  # of a layer, a parameter or a local matrix
    r"\b_?(w_?o(ut)?|o_?w|o_?proj\w*|out(put)?_?(proj\w*|linear|layer|dense|fc|weights?|mat\w*)|c_proj|proj_?o(ut)?"
    r"|(fc|lin|linear|dense|to|w|weights?)_?o(ut)?(put)?|(final|last)_?(linear|proj\w*|dense|layer|fc)"
    r"|unify_?heads|(heads_)?combine\w*|mix_?heads)\b",
    re.IGNORECASE,
)
LAYERS = re.compile(
    r"\.(out|output|o|proj|projection|unify|merge|combine|linear|fc|dense)\s*=(?!=)", re.IGNORECASE
)
PROSE = re.compile(
    r"\bW_?\^?\{?O\b|\b(output|concat\w*|combine[ds]?|combining|mix(es|ed|ing)?|joined|final|last)\b[^.;]{0,80}?"
    r"\b(project\w*|linear\w*|dense|weight matrix)"
    r"|\b(project\w*|linear\w*|dense)\b[^.;]{0,60}?\b(output|out|concat\w*|back|results?|d_model)\b",
    re.IGNORECASE,
)
DENIED = re.compile(r"\b(no|not|without|omit\w*|skip\w*|lack\w*|elsewhere|outside|unlike)\b", re.IGNORECASE)


def promises_output_projection(source: str, first_line: int | None) -> bool:
    """Return True if names, comments or docstrings of the attention that begins on this line promise one.

    The paper may be named anywhere in the file. Where the definition is not in `source`, all of it counts.
    """
    tree = tree_of(source)
    if tree is None:
        return True
    checked = None if first_line is None else definition_at(tree, first_line)
    lines = source.splitlines()
    if checked is None:
        own = source
    else:
        nodes = used_by(tree, checked)
        own = "\n".join("\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in nodes)
    code, prose = _parted(own)
    file_prose = _parted(source)[1]
    if PAPER.search(file_prose):
        return True
    sentences = re.split(r"[.;\n]\s", f"{prose}\n{ast.get_docstring(tree) or ''}\n")
    promised = any(PROSE.search(sentence) and not DENIED.search(sentence) for sentence in sentences)
    return promised or NAMES.search(code) is not None or LAYERS.search(code) is not None


def _parted(text: str) -> tuple[str, str]:
    """Return the code without comments and triple-quoted strings, and these."""
    quoted = re.compile(r"\"\"\".*?\"\"\"|'''.*?'''", re.DOTALL)
    prose = quoted.findall(text)
    code = quoted.sub("", text)
    comment = re.compile(r"#[^\n]*")
    return comment.sub("", code), "\n".join([*prose, *comment.findall(code)])
