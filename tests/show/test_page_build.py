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


def differences(built: Path, packaged: Path) -> list[str]:
    """What is not alike in two folders, by name and with the remedy."""
    ours, theirs = ({file.name: file.read_bytes() for file in each.iterdir()} for each in (packaged, built))
    said = {name: "is not what the sources build" for name in ours if ours[name] != theirs.get(name)}
    said |= dict.fromkeys(ours.keys() - theirs.keys(), "is built from no source")
    said |= dict.fromkeys(theirs.keys() - ours.keys(), "is missing")
    return [f"{name} {said[name]}; run `make page` and commit it" for name in sorted(said)]


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
    assert differences(tmp_path / "built", PACKAGED) == []


@pytest.mark.slow
def test_a_build_takes_nobodys_files_away(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("kept")
    command = [tools(), str(SOURCES / "build.mjs"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0 and "is not empty: it holds own.txt; name a new folder" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["own.txt"]


def test_a_page_that_differs_is_named_with_the_remedy(tmp_path: Path) -> None:
    built, packaged = tmp_path / "built", tmp_path / "packaged"
    for folder, files in ((built, {"a.js": "1", "b.css": "2", "c.html": "3"}), (packaged, {"a.js": "1"})):
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    (packaged / "b.css").write_text("changed by hand")
    (packaged / "old.js").write_text("of a page that is no more")
    assert [each.partition(";")[0] for each in differences(built, packaged)] == [
        "b.css is not what the sources build",
        "c.html is missing",
        "old.js is built from no source",
    ]
    assert "run `make page`" in differences(built, packaged)[0]


def test_every_page_that_is_built_is_in_the_package() -> None:
    """Where there is no Node, at least the names are looked at."""
    listed = re.search(r"const PAGES = \[(.*)\]", (SOURCES / "build.mjs").read_text("utf-8"))
    assert listed is not None
    pages = re.findall(r'"(\w+)"', listed[1])
    wanted = {f"{page}.{ending}" for page in pages for ending in ("html", "css", "js")} | {"README.md"}
    assert {file.name for file in PACKAGED.iterdir()} == wanted
