"""For the site: files of the repository as pages, links to the repository as links to these pages, lists.

A line `--8<-- "DESIGN.md"` stands for that file, Python in a block of code, and `--8<-- "faults"` for what
the examiner's catalogue says. README's links and pictures are absolute, for the package index; those of the
other files are relative to the repository; here both are those of the site. A list may follow a line that is
not blank: Markdown in Python wants a blank one, GitHub does not.
"""

from __future__ import annotations

import functools
import posixpath
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FAULTS = "faults"
INCLUDED = re.compile(r'^--8<-- "([\w./]+)"$', re.MULTILINE)
RELATIVE = re.compile(r"\]\((?P<path>[\w./-]+\.md)\)")
ITEM = re.compile(r"([-*]|\d+\.) ")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs with every page."""
    here = posixpath.dirname(page.file.src_uri)
    whole = INCLUDED.sub(lambda match: relinked(included(match[1]), here), markdown)
    whole = own_links().sub(lambda match: f"]({of_site(match['path'], here)})", whole)
    return "\n".join(spaced(whole.split("\n")))


def included(name: str) -> str:
    """A file of the repository, as Markdown; or the faults."""
    if name == FAULTS:
        return faults()
    text = (ROOT / name).read_text("utf-8")
    return f"```python\n{text}```" if name.endswith(".py") else text


def relinked(text: str, here: str) -> str:
    """The text of a file at the top of the repository, with its relative links as the site has them."""
    return RELATIVE.sub(lambda match: f"]({of_site(match['path'], here)})", text)


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


# The faults


@functools.cache
def faults() -> str:
    """Return the examiner's catalogue: links to the most common faults, then a section for each fault.

    The catalogue is imported, together with torch, because functions compute some of its texts.
    """
    sys.path.insert(0, str(ROOT / "src"))  # these pages are of this tree, whatever is installed
    from headwise.examiner import steps
    from headwise.examiner.faults import SECTIONS

    known = steps.FAULTS
    common = [f"[{key}](#{slug(key)})" for key, fault in known.items() if fault.common]
    told = [
        f"{len(known)} faults have a name. The most common: {', '.join(common)}.",
        "## Of a whole attention",
    ]
    for title, group in SECTIONS.items():
        told += [f"### {title}", *map(section, group)]
    told.append("## Of single steps")
    for title, room in steps.FAULT_GROUPS.items():
        told += [f"### {title}", *map(section, room)]
    return "\n\n".join(told)


def section(fault: Any) -> str:
    """One fault. Its texts are formulas and words, never Markdown."""
    rows = [
        ("You compute", in_code(fault.formula)),
        ("It should be", in_code(fault.right)),
        ("Why it matters", escape(fault.why)),
        ("Hints", in_steps(fault.hints)),
        ("Repair", f"<pre><code>{escape(fault.repair)}</code></pre>"),
    ]
    lines = [f"<dt>{name}</dt><dd>{said}</dd>" for name, said in rows]
    title = escape(f"{fault.title[0].upper()}{fault.title[1:]}.")
    parts = [f"#### {fault.key}", f"<p>{' '.join((title, *notes(fault)))}</p>"]
    return "\n\n".join([*parts, "\n".join(['<dl class="fault">', *lines, "</dl>"])])


def notes(fault: Any) -> Iterator[str]:
    """What else is to be known of it."""
    if fault.remark:
        yield "A remark: code that is right otherwise stays right."
    if fault.design:
        yield escape(f"On purpose it is a design, {fault.design}, and no fault.")
    if fault.needs_mask:
        yield "It shows only where something is hidden."


def in_code(said: str) -> str:
    """A formula."""
    return f"<code>{escape(said)}</code>"


def in_steps(hints: Iterable[str]) -> str:
    """Hints, one behind another: each tells more, so each is opened by itself."""
    inner = ""
    for number, hint in reversed(list(enumerate(hints, 1))):
        inner = f"<details><summary>hint {number}</summary>{escape(hint)}{inner}</details>"
    return inner


def slug(heading: str) -> str:
    """What a heading is linked by, as mkdocs has it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
