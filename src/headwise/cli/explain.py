"""`headwise explain`: every step of multi-head attention in a file's own numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def explain(
    file: Annotated[
        str, typer.Argument(metavar="FILE[:NAME]", help="A Python file, and which class or function in it.")
    ],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("explain.html"),
    terminal: Annotated[
        bool, typer.Option("--terminal", help="Print the steps instead of writing a page.")
    ] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Run the file even where nothing fences it in.")
    ] = False,
) -> None:
    """See every step of multi-head attention in your code's own numbers.

    Writes one page that needs nothing else: expected beside yours, the first step where they part, and the
    sum behind every number. The file is run in a process of its own, as headwise check runs it.

    Example: headwise explain attention.py:MyAttention --out explain.html
    """
    from ..check.explain import explain_file
    from ..check.explain.page import check_path
    from .source import file_and_name

    path, name = file_and_name(file)
    if not terminal:
        check_path(out)
    explanation = explain_file(path, name, trust=trust)
    if terminal:
        explanation.print()
        return
    explanation.to_html(out)
    typer.echo(explanation.verdict)
    typer.echo(f"Wrote {out}")
