"""README and the documentation: the code in them runs and says what they show, links lead somewhere, the site
needs no network."""

from __future__ import annotations

import contextlib
import html
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import typer

import browser
import headwise
from headwise.cli import application
from headwise.errors import INSTALLATION
from headwise.examiner.steps import FAULTS
from trained import minilm

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]


# The code


class Block(NamedTuple):
    """A block of code and what stands below it, if that is what it prints."""

    code: str
    printed: str | None


FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples(text: str) -> list[list[Block]]:
    """The Python of a page: a block that imports headwise begins an example, others go on with it."""
    blocks = [(match[1], match[2]) for match in FENCED.finditer(text)]
    messages: list[list[Block]] = []
    for number, (language, code) in enumerate(blocks):
        if language != "python":
            continue
        below = blocks[number + 1] if number + 1 < len(blocks) else ("", "")
        block = Block(code, below[1] if below[0] == "text" else None)
        if re.search(r"^import .*\bheadwise as hw$", code, re.MULTILINE) or not messages:
            messages.append([block])
        else:
            messages[-1].append(block)
    return messages


def commands(text: str) -> list[tuple[str, str]]:
    """The console blocks of a page: the command, and what it prints."""
    blocks = [match[2].partition("\n") for match in FENCED.finditer(text) if match[1] == "console"]
    return [(first.removeprefix("$ "), rest) for first, _, rest in blocks]


def collected(kind: Any) -> list[Any]:
    """What there is of a kind on all pages, as parameters of a test."""
    cases = []
    for page in PAGES:
        for number, each in enumerate(kind(page.read_text("utf-8"))):
            name = f"{page.relative_to(ROOT)}-{number}"
            # a process of its own, fenced in; a training; many pictures; transformers
            takes_long = kind is commands or any(slow in str(each) for slow in ("hw.check", "models.fit("))
            takes_long = takes_long or page.name in (
                "gallery.md",
                "from_others.md",
            )  # many pictures; transformers
            cases.append(pytest.param(each, id=name, marks=[pytest.mark.slow] if takes_long else []))
    return cases


@pytest.fixture
def in_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the example files where the pages say they are; what is written stays in it."""
    shutil.copytree(ROOT / "docs" / "examples", tmp_path / "docs" / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.mark.thinned(3)
@pytest.mark.parametrize("example", collected(examples))
@pytest.mark.usefixtures("in_a_copy")
def test_the_code_on_a_page_runs_as_printed_and_prints_what_is_below_it(example: list[Block]) -> None:
    names: dict[str, Any] = {"__name__": "a_page"}
    if any('"minilm"' in block.code for block in example):
        minilm()  # or skip
    for block in example:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block.code, "a page", "exec"), names)
        if block.printed is not None:
            assert_says(printed.getvalue(), block.printed)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("shown", collected(commands))
def test_a_command_on_a_page_says_what_is_below_it(shown: tuple[str, str], in_a_copy: Path) -> None:
    words = shown[0].split()
    assert words.pop(0) == "headwise"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-m", "headwise", *words],
        env=environment,
        cwd=in_a_copy,
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode in (0, 1), done.stderr
    assert_says(done.stdout, shown[1])


NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]\d+)?")


def assert_says(printed: str, shown: str) -> None:
    """What was printed is what a page shows, up to the last digit of a number and the size of rounding.

    A last line of three dots stands for the rest.
    """
    lines = [[line.rstrip() for line in text.strip("\n").split("\n")] for text in (printed, shown)]
    if lines[1][-1] == "...":
        del lines[1][-1]
        while not lines[1][-1]:
            del lines[1][-1]
        lines[0] = lines[0][: len(lines[1])]
    assert [NUMBER.sub("#", line) for line in lines[0]] == [NUMBER.sub("#", line) for line in lines[1]]
    message, wanted = (NUMBER.findall("\n".join(each)) for each in lines)
    for ours, theirs in zip(message, wanted, strict=True):
        assert _near(ours, theirs), f"{ours} was printed, {theirs} is shown"


def _near(message: str, shown: str) -> bool:
    if "e" in message or "e" in shown:
        return (
            float(message) < 1e-12 and float(shown) < 1e-12
        )  # how far rounding goes is the machine's affair
    ours, theirs = Decimal(message), Decimal(shown)
    last = theirs.as_tuple().exponent  # a whole number is meant as it is
    return ours.as_tuple().exponent == last and abs(ours - theirs) <= (Decimal(1).scaleb(last) if last else 0)


def test_every_page_that_shows_code_is_read() -> None:
    """A fence in another spelling would go unread, and then untested."""
    languages = {"python", "text", "console", "bash"}
    for page in PAGES:
        text = page.read_text("utf-8")
        fences = [line for line in text.split("\n") if line.startswith("```")]
        assert len(fences) == text.count("```"), page.name
        assert {line[3:] for line in fences} <= {*languages, ""}, page.name
    assert len(examples(README.read_text("utf-8"))) == 3


def test_the_options_of_commands_that_are_only_shown_exist() -> None:
    """What needs a folder of submissions is not run here; its options are read by what would run."""
    verbs = typer.main.get_group(application()).commands
    shown = [m[2] for page in PAGES for m in FENCED.finditer(page.read_text("utf-8")) if m[1] == "bash"]
    lines = [line.split() for block in shown for line in block.splitlines() if line.startswith("headwise ")]
    assert len(lines) >= 1
    for _, verb, *rest in lines:
        verbs[verb].make_context(verb, rest, resilient_parsing=False)


# Links

LINK = re.compile(r"\]\(([^)\s]+)\)")


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def _file_of(link: str, source: str) -> str | None:
    """The file of the repository that an absolute link names; None for links that lead elsewhere."""
    raw = source.replace("https://github.com/", "https://raw.githubusercontent.com/")
    for start in (f"{source}/blob/main/", f"{source}/tree/main/", f"{raw}/main/"):
        if link.startswith(start):
            return link.removeprefix(start).partition("#")[0]
    return None


def test_readme_reads_the_same_without_the_repository_around_it() -> None:
    """The package index shows README alone: links are absolute, and those into the repository name a file."""
    source = _project()["urls"]["Source"]
    links = LINK.findall(README.read_text("utf-8"))
    files = [_file_of(link, source) for link in links]
    assert [link for link, file in zip(links, files, strict=True) if file is None] == []
    assert [file for file in files if file is not None and not (ROOT / file).is_file()] == []
    assert any(link.endswith(".png") for link in links)


INSTALL = re.compile(r"<!-- install -->\n(.*?)\n<!-- end install -->", re.DOTALL)


def test_one_sentence_says_how_to_install_headwise() -> None:
    """`headwise.errors.INSTALLATION` and README have the same words. Other pages link to README."""
    readme = README.read_text("utf-8")
    (sentence,) = INSTALL.findall(readme)
    assert " ".join(sentence.split()) == INSTALLATION
    assert "`make wheel`" in INSTALLATION
    assert re.search(r"^wheel:.*## ", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert "\n## Install it\n" in readme
    files = [*PAGES, *(ROOT / "src" / "headwise").rglob("*.py"), *(ROOT / "docs" / "examples").rglob("*")]
    texts = {file: file.read_text("utf-8") for file in files if file.is_file() and file.suffix != ".pyc"}
    texts[README] = INSTALL.sub("", readme)
    texts.pop(ROOT / "src" / "headwise" / "errors.py")
    own_words = re.compile(r"pip install (?:--[\w-]+ )*[\"']?headwise\b")
    assert [file for file, text in texts.items() if own_words.search(text)] == []


def test_project_urls_lead_into_one_repository() -> None:
    urls = _project()["urls"]
    source = urls["Source"]
    assert {"Homepage", "Documentation", "Source", "Changelog", "Issues"} <= set(urls)
    assert [url for url in urls.values() if not url.startswith(source)] == []
    files = [_file_of(url, source) for url in urls.values()]
    assert [file for file in files if file is not None and not (ROOT / file).exists()] == []
    assert f'link: "{source}"' in (ROOT / "mkdocs.yml").read_text("utf-8")


def test_the_changelog_tells_of_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.search(rf"^## \[{re.escape(headwise.__version__)}\] - \d{{4}}-\d\d-\d\d$", text, re.MULTILINE)


# The reading list

READING = (ROOT / "docs" / "reading.md").read_text("utf-8")
ISBN = re.compile(r"ISBN ([\d-]+\d)")


def isbn_is_right(number: str) -> bool:
    """True if the last digit of an ISBN of 13 digits is its check digit."""
    digits = [int(digit) for digit in number.replace("-", "")]
    return (
        len(digits) == 13 and sum(digit * (3 if at % 2 else 1) for at, digit in enumerate(digits)) % 10 == 0
    )


def test_every_isbn_of_the_reading_list_has_its_check_digit() -> None:
    numbers = ISBN.findall(READING)
    assert len(numbers) >= 4 and [number for number in numbers if not isbn_is_right(number)] == []
    assert not isbn_is_right("978-1-63343-716-7") and not isbn_is_right("978-1-63343-176-6")


def test_every_identifier_of_the_reading_list_has_its_form_and_its_own_link() -> None:
    """An arXiv id names a year and month until now; a link leads where its text says."""
    labels = re.findall(r"\[([^\]]+)\]\(https://(arxiv\.org/abs|doi\.org)/([^)\s]+)\)", READING)
    assert READING.count("https://arxiv.org/abs/") + READING.count("https://doi.org/") == len(labels) + 2
    assert [label for label, _, target in labels if label != target] == []
    papers = [target for _, site, target in labels if site == "arxiv.org/abs"]
    assert len(papers) == len(set(papers)) >= 30
    for paper in papers:
        match = re.fullmatch(r"(\d\d)(\d\d)\.(\d{4,5})", paper)
        assert match is not None and 1 <= int(match[2]) <= 12, paper
        assert 7 <= int(match[1]) <= time.localtime().tm_year % 100, paper
        assert len(match[3]) == (5 if int(match[1]) >= 15 else 4), paper  # five digits since January 2015
    works = [target for _, site, target in labels if site == "doi.org"]
    assert [work for work in works if not re.fullmatch(r"10\.\d{4,9}/[-._;()/:\w]+", work)] == []


def test_every_entry_of_the_reading_list_has_an_identifier_or_an_address() -> None:
    entries = re.findall(r"^- \*\*.*?(?=^- |^#|\Z)", READING, re.MULTILINE | re.DOTALL)
    assert len(entries) >= 35
    assert [entry for entry in entries if "](https://" not in entry and not ISBN.search(entry)] == []
    years = re.findall(r"\((\d{4})\), .*?arXiv\s+\[(\d\d)", READING)
    assert len(years) >= 30 and [(year, paper) for year, paper in years if year[2:] != paper] == []


# The site


def _pages_hook() -> Any:
    spec = importlib.util.spec_from_file_location("docs_pages", ROOT / "docs" / "pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_into_the_repository_become_links_of_the_site() -> None:
    hook = _pages_hook()
    source = _project()["urls"]["Source"]
    raw = source.replace("https://github.com/", "https://raw.githubusercontent.com/")
    file = f"{source}/blob/main"
    text = f"![a]({raw}/main/docs/heads.png) [b]({file}/docs/guides/use.md) [c]({file}/DESIGN.md)"

    class Page:
        class file:  # noqa: N801, as mkdocs calls it
            src_uri = "guides/look.md"

    assert hook.on_page_markdown(text, Page) == "![a](../heads.png) [b](use.md) [c](../design.md)"


def test_relative_links_of_a_file_of_the_repository_become_links_of_the_site() -> None:
    text = "[a](docs/log/index.md) [b](CONTRIBUTING.md) `x[1](y)` [c](https://a.org/b.md)"
    assert _pages_hook().relinked(text, "") == (
        "[a](log/index.md) [b](contributing.md) `x[1](y)` [c](https://a.org/b.md)"
    )


def test_the_page_of_faults_says_what_the_catalogue_says() -> None:
    page = _pages_hook().included("faults")
    heads = re.findall(r"^#### (.+)$", page, re.MULTILINE)
    assert heads == list(FAULTS)
    assert page.count("<summary>hint 3</summary>") == len(FAULTS)
    fault = FAULTS["scale by d_model"]
    _, _, rest = page.partition(f"#### {fault.key}\n")
    message = html.unescape(rest.partition("####")[0])
    assert all(
        text in message for text in (fault.formula, fault.right, *fault.hints, fault.why, fault.repair)
    )


def test_the_api_pages_name_every_public_name() -> None:
    named = [
        name
        for page in sorted((ROOT / "docs" / "api").glob("*.md"))
        for name in re.findall(r"^::: headwise\.([\w.]+)$", page.read_text("utf-8"), re.MULTILINE)
    ]
    assert len(set(named)) == len(named)
    tops = {name.partition(".")[0] for name in named}
    assert sorted(set(headwise.__all__) - tops) == []


SITE = ROOT / "site"
OF_THE_SITE = ("mkdocs.yml", "pyproject.toml", "*.md", "docs/**/*", "src/headwise/**/*")


def is_built() -> bool:
    """Whether `make docs` has built the site since the last change of what it is built from."""
    built = SITE / ".built"
    sources = (file for pattern in OF_THE_SITE for file in ROOT.glob(pattern))
    return built.exists() and built.stat().st_mtime > max(
        file.stat().st_mtime for file in sources if file.is_file() and file.suffix != ".pyc"
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All pages, built as `make docs` does, unless it has just done so."""
    pytest.importorskip("mkdocs")
    if is_built():
        return SITE
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(place)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout + done.stderr == "", done.stdout + done.stderr
    return place


FETCHED = re.compile(r"<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=[\"']?([^\"'\s>]+)")


@pytest.mark.slow
def test_no_page_of_the_site_fetches_anything(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    fetched = {
        (page.name, link)
        for page in pages
        for link in FETCHED.findall(page.read_text("utf-8"))
        if re.match(r"(https?:)?//", link)
    }
    assert len(pages) > 10 and fetched == set()
    styles = "".join(page.read_text("utf-8") for page in site.rglob("*.css"))
    assert re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", styles) == []


@pytest.mark.slow
def test_the_api_pages_show_functions_as_functions_and_classes_as_classes(site: Path) -> None:
    """A package with the name of a function once took its place on the page."""
    built = "".join(page.read_text("utf-8") for page in (site / "api").glob("*.html"))
    things = {name: getattr(headwise, name) for name in headwise.__all__}
    kinds = {name: "class" if isinstance(thing, type) else "function" for name, thing in things.items()}
    shown = dict(re.findall(r'id="headwise\.(\w+)"[^>]*>\s*<code class="[^"]*\bdoc-symbol-(\w+)"', built))
    assert {
        name: shown.get(name)
        for name, kind in kinds.items()
        if not isinstance(things[name], ModuleType) and shown.get(name) != kind
    } == {}


@pytest.mark.slow
def test_search_finds_pages_from_disk_without_a_network(site: Path) -> None:
    if browser.chromium_path() is None:
        pytest.skip("no browser")
    ask = (
        "(() => { const field = document.querySelector('input.md-search__input'); field.focus();"
        " field.value = 'entropy'; field.dispatchEvent(new Event('input'));"
        " field.dispatchEvent(new Event('keyup')); })()"
    )
    with browser.Browser() as chromium:
        page = chromium.open(site / "index.html")
        page.evaluate(ask)
        end = time.monotonic() + 30
        while not (actual := page.evaluate("document.querySelectorAll('.md-search-result__item').length")):
            assert time.monotonic() < end, page.complaints
        assert actual > 1
        assert page.complaints == []
        assert [url for url in page.requested if not url.startswith(("file:", "data:"))] == []
