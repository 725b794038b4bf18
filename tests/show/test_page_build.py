"""The pages in the package are what their sources build."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "page"
PACKAGED = ROOT / "src" / "headwise" / "show" / "page"


def tools() -> str:
    """Where node is, which builds the pages; skips, with the remedy, where it or what it needs is missing."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no Node here: install nodejs and npm, then `make page`")
    if not (SOURCES / "node_modules" / "esbuild").is_dir():
        pytest.skip("no esbuild in page/node_modules: `make page` installs it")
    return node


@pytest.mark.slow
def test_the_package_holds_what_the_sources_build(tmp_path: Path) -> None:
    """Built from a copy elsewhere: no path of a machine gets into a page."""
    node = tools()
    copied = tmp_path / "elsewhere" / "page"
    shutil.copytree(SOURCES, copied, ignore=shutil.ignore_patterns("node_modules"))
    (copied / "node_modules").symlink_to((SOURCES / "node_modules").resolve(), target_is_directory=True)
    command = [node, str(copied / "build.mjs"), str(tmp_path / "built")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    built, packaged = (
        {file.name: file.read_bytes() for file in folder.iterdir()}
        for folder in (tmp_path / "built", PACKAGED)
    )
    differing = [name for name in built | packaged if built.get(name) != packaged.get(name)]
    assert differing == [], "run `make page` and commit what it built"


@pytest.mark.slow
def test_a_build_takes_nobodys_files_away(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("kept")
    command = [tools(), str(SOURCES / "build.mjs"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0 and "is not empty: it holds own.txt; name a new folder" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["own.txt"]


def test_every_page_that_is_built_is_in_the_package() -> None:
    """Where there is no Node, at least the names are looked at."""
    listed = re.search(r"const PAGES = \[(.*)\]", (SOURCES / "build.mjs").read_text("utf-8"))
    assert listed is not None
    pages = re.findall(r'"(\w+)"', listed[1])
    wanted = {f"{page}.{ending}" for page in pages for ending in ("html", "css", "js")} | {"README.md"}
    assert {file.name for file in PACKAGED.iterdir()} == wanted
