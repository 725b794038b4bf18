"""For the site: files of the repository as pages, links to the repository as links to these pages, lists.

A line `--8<-- "DESIGN.md"` stands for that file, Python in a block of code. README's links and pictures are
absolute, for the package index; here they are those of the site. A list may follow a line that is not blank:
Markdown in Python wants a blank one, GitHub does not.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
INCLUDED = re.compile(r'^--8<-- "([\w./]+)"$', re.MULTILINE)
ITEM = re.compile(r"([-*]|\d+\.) ")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs with every page."""
    whole = INCLUDED.sub(lambda match: included(match[1]), markdown)
    here = posixpath.dirname(page.file.src_uri)
    whole = own_links().sub(lambda match: f"]({of_site(match['path'], here)})", whole)
    return "\n".join(spaced(whole.split("\n")))


def included(name: str) -> str:
    """A file of the repository, as Markdown."""
    text = (ROOT / name).read_text("utf-8")
    return f"```python\n{text}```" if name.endswith(".py") else text


def own_links() -> re.Pattern[str]:
    """The end of a link or picture that leads to a file of the repository, wherever that is said to be."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    source = project["urls"]["Source"]
    raw = source.replace("https://github.com/", "https://raw.githubusercontent.com/")
    return re.compile(rf"\]\((?:{re.escape(source)}/blob|{re.escape(raw)})/main/(?P<path>[\w./-]+)\)")


def of_site(path: str, here: str) -> str:
    """Where the site has a file of the repository, as seen from a folder of the site."""
    place = path.removeprefix("docs/") if path.startswith("docs/") else path.lower()
    return posixpath.relpath(place, here or ".")


def spaced(lines: list[str]) -> list[str]:
    """With a blank line before every list."""
    shown: list[str] = []
    in_code = in_list = False
    for line in lines:
        is_item = not in_code and ITEM.match(line) is not None
        if is_item and not in_list and shown and shown[-1].strip():
            shown.append("")
        if line.startswith("```"):
            in_code = not in_code
        in_list = is_item or (in_list and (not line.strip() or line.startswith(" ")))
        shown.append(line)
    return shown
