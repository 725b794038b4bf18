"""Environments that hold what an extra of headwise brings and nothing else, made of the packages of this one.

No network and no pip: what an extra needs is read from pyproject.toml and from the packages' own metadata,
and those packages are put into a new virtual environment, file by file, as hard links. A link to a folder
would not do: what runs in a fenced process resolves it, and finds all of this environment behind it.
"""

from __future__ import annotations

import importlib.metadata as metadata
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


class BareEnvironment:
    """A Python in which headwise is installed with some extras."""

    def __init__(self, folder: Path, packages: set[str]) -> None:
        self.folder, self.packages = folder, packages

    def run(self, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Python with these arguments, knowing nothing of this process's environment."""
        saved = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        return subprocess.run(
            [str(self.folder / "bin" / "python"), *arguments],
            env=saved | {"PATH": "/usr/bin:/bin", "HOME": str(cwd), "NO_COLOR": "1", "COLUMNS": "120"},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=100,
        )


def closure(extras: Iterable[str]) -> set[str]:
    """The packages that `pip install headwise[extras]` brings, by pyproject.toml and their own metadata.

    Raises:
        importlib.metadata.PackageNotFoundError: one of them is not installed here.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    requested = [*project["dependencies"]]
    requested += [each for extra in extras for each in project["optional-dependencies"][extra]]
    actual: set[str] = set()
    pending = [Requirement(each) for each in requested]
    done: set[tuple[str, frozenset[str]]] = set()
    while pending:
        requirement = pending.pop()
        key = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if key in done:
            continue
        done.add(key)
        actual.add(key[0])
        wanted = {"", *requirement.extras}
        for text in metadata.requires(requirement.name) or ():
            inner = Requirement(text)
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in wanted):
                pending.append(inner)
    return actual


def torch_alone(folder: Path) -> Path:
    """A folder with torch and what it needs: the larger part, shared by all environments of a run."""
    _put(closure([]), folder)
    return folder


def make(
    folder: Path, torch: Path, extras: Iterable[str], more: Iterable[str] = (), wheel: Path | None = None
) -> BareEnvironment:
    """An environment with headwise, these extras of it, and `more` packages without what they ask for.

    headwise is this checkout's, or installed from a wheel, with its command.
    """
    venv.create(folder, symlinks=True)
    (place,) = folder.glob("lib/python*/site-packages")
    (place / "torch_alone.pth").write_text(f"{torch}\n", "utf-8")
    packages = closure(extras) | set(more)
    _put(packages - closure([]), place)
    if wheel is None:
        half_written = shutil.ignore_patterns("*.pyc.*")
        shutil.copytree(ROOT / "src" / "headwise", place / "headwise", ignore=half_written)
    else:
        pip = f"-m pip -qq --disable-pip-version-check --python {folder / 'bin' / 'python'} install".split()
        subprocess.run([sys.executable, *pip, "--no-deps", "--no-index", str(wheel)], check=True)
    return BareEnvironment(folder, packages)


def _put(packages: Iterable[str], folder: Path) -> None:
    for package in packages:
        for source, inside in _files(package):
            target = folder / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            _link(source, target)


@cache
def _files(package: str) -> list[tuple[Path, Path]]:
    """A package's files, and their places inside site-packages; no scripts, which name another Python.

    Bytecode written since the package was installed comes along: torch takes seconds to compile.
    """
    actual = []
    for each in metadata.files(package) or []:
        source, inside = Path(each.locate()), Path(each)
        if ".." in inside.parts:
            continue
        actual.append((source, inside))
        if inside.suffix == ".py":
            bytecode = Path(cache_from_source(source))
            actual.append((bytecode, inside.parent / "__pycache__" / bytecode.name))
    return actual


def _link(source: Path, target: Path) -> None:
    if not source.is_file():  # bytecode that was listed and not written
        return
    try:
        os.link(source, target)
    except FileExistsError:  # two packages with one file, as parts of a namespace may have
        return
    except OSError:  # another file system
        shutil.copy2(source, target)
