"""The errors headwise raises, in one form: `<argument> <rule>: <the numbers>; <what to do>`.

Each class also derives from a matching built-in exception, so `except ValueError` works, for example.
"""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

__all__ = [
    "ArgumentError",
    "AttentionBypassed",
    "AttentionUnheard",
    "BackendUnavailable",
    "BudgetExceeded",
    "HeadsAlarm",
    "HeadwiseError",
    "MaskError",
    "PackageMissing",
    "ShapeError",
    "VersionUnsupported",
]


class HeadwiseError(Exception):
    """The base class of all errors that headwise raises."""


class ShapeError(HeadwiseError, ValueError):
    """Two sizes that must agree do not."""


class ArgumentError(HeadwiseError, ValueError):
    """A value, dtype or device that cannot be used here."""


class MaskError(HeadwiseError, ValueError):
    """A mask of the wrong shape, or one whose values suggest another meaning."""


class BackendUnavailable(HeadwiseError, RuntimeError):
    """A backend requested by name cannot run this call; no other backend is tried."""


class AttentionBypassed(HeadwiseError, RuntimeError):
    """A model has attention that headwise cannot intercept; the message names its layers."""


class AttentionUnheard(HeadwiseError, UserWarning):
    """A warning of `headwise.watch` and similar functions: some layers could not be intercepted."""


class BudgetExceeded(HeadwiseError, MemoryError):
    """A dense result would not fit the memory budget."""


class HeadsAlarm(HeadwiseError, UserWarning):
    """A warning of `headwise.Monitor`: a number of a head in training passed a threshold of an alarm."""


class PackageMissing(HeadwiseError, ImportError):
    """A package that a part of headwise needs is not installed; the message says how to get it."""


class VersionUnsupported(HeadwiseError, ImportError):
    """The installed torch or transformers lacks a name that headwise uses."""


def outside() -> int:
    """Return the `stacklevel` at which a warning of the calling function points at the user's own line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(INSIDE):
        frame, level = frame.f_back, level + 1
    return level


INSIDE = (__name__.partition(".")[0] + ".", "contextlib")


# Installing headwise, and packages that only a part of it needs

# How to get headwise itself, as Markdown, for notebooks, handouts and messages; README has the same sentence.
# On the day of publication this becomes 'Install it with `pip install "headwise[cli,viz]"`.'
INSTALLATION = (
    "headwise is not on the package index yet. "
    'In a clone, `make look` sets up .venv, and `pip install -e ".[cli,viz]"` installs it elsewhere. '
    'With a wheel in dist/ (`make wheel` writes it), use `pip install --find-links dist "headwise[cli,viz]"`.'
)


def install_command(*extras: str) -> str:
    """Return the command that installs the packages of some extras, where headwise is installed already.

    pip uses the installed headwise, whether it came from a clone, a wheel or a package index, and fetches
    only the packages that are missing.
    """
    return f'pip install "headwise[{",".join(extras)}]"'


REMEDIES = {  # package -> how to get it
    "typer": install_command("cli"),
    "rich": install_command("cli"),
    "matplotlib": install_command("viz"),
    "transformers": install_command("watch"),
    "safetensors": install_command("watch"),
    "tokenizers": install_command("cli"),
    "numpy": "pip install numpy",
    "pandas": "pip install pandas",
    "pyarrow": install_command("survey"),
    "ray": install_command("ray"),
    "starlette": install_command("serve"),
    "uvicorn": install_command("serve"),
    "anywidget": install_command("notebook"),
    "latex2mathml": install_command("teach"),
}


@contextmanager
def needed(package: str, purpose: str, remedy: str | None = None) -> Iterator[None]:
    """Wrap imports from a package that may not be installed, so that the error names their purpose.

    Args:
        purpose: the beginning of the error: "headwise tables need rich".
        remedy: how to get it, where `REMEDIES` does not say.

    Raises:
        PackageMissing: it is not installed, or something that it needs is not.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or package).partition(".")[0]
        behind = "" if missing == package else f", and {package} needs {missing}"
        remedy = remedy or REMEDIES[package]
        raise PackageMissing(f"{purpose}{behind}; install with: {remedy}", name=missing) from error


def are_here(packages: Iterable[str], purpose: str, remedy: str) -> None:
    """Raise one error for all missing packages, before any work.

    Raises:
        PackageMissing: one or more of them are not installed.
    """
    missing = [package for package in packages if importlib.util.find_spec(package.replace("-", "_")) is None]
    if missing:
        *some, last = missing
        listed = f"{', '.join(some)} and {last}" if some else last
        raise PackageMissing(f"{purpose} {listed}; install with: {remedy}", name=missing[0])


# Names


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: the choices, and the likeliest one meant."""
    choices = list(choices)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}choose from {', '.join(choices)}"
