"""Every error is headwise's own, and the built-in one a caller would have expected."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from headwise import errors
from headwise.errors import (
    ArgumentError,
    BackendUnavailable,
    BudgetExceeded,
    HeadwiseError,
    MaskError,
    ShapeError,
    install_command,
    nearest,
)


@pytest.mark.parametrize(
    ("kind", "built_in"),
    [
        (ShapeError, ValueError),
        (ArgumentError, ValueError),
        (MaskError, ValueError),
        (BackendUnavailable, RuntimeError),
        (BudgetExceeded, MemoryError),
    ],
)
def test_an_error_is_also_the_built_in_one(kind: type[Exception], built_in: type[Exception]) -> None:
    for caught in (HeadwiseError, built_in):
        with pytest.raises(caught, match="5 and 7"):
            raise kind("q and k must agree in head_dim: 5 and 7; project one of them")


def test_every_error_here_is_public_and_headwises_own() -> None:
    actual = inspect.getmembers(errors, inspect.isclass)
    classes = {name for name, kind in actual if kind.__module__ == errors.__name__}
    assert classes == set(errors.__all__)
    assert all(issubclass(getattr(errors, name), HeadwiseError) for name in classes)


@pytest.mark.parametrize(
    ("typed", "intended"),
    [("tirton", "triton"), ("sdp", "sdpa"), ("plian", "plain"), ("entropie", "entropy")],
)
def test_a_misspelt_name_is_met_with_the_one_meant(typed: str, intended: str) -> None:
    choices = ["sdpa", "triton", "plain", "entropy"]
    assert nearest(typed, choices) == f"did you mean '{intended}'? choose from sdpa, triton, plain, entropy"


def test_a_name_like_no_other_is_met_with_the_choices_alone() -> None:
    assert nearest("xyzzy", ["sdpa", "triton"]) == "choose from sdpa, triton"


def test_the_command_for_an_extra_works_before_headwise_is_published() -> None:
    """pip takes the installed headwise: without an index it finds that nothing of this extra is missing."""
    command = install_command("cli", "viz")
    assert command == 'pip install "headwise[cli,viz]"'
    requirement = command.partition('"')[2].rstrip('"')
    options = ["--no-index", "--dry-run", "--disable-pip-version-check", "--no-input"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, requirement], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"Requirement already satisfied: {requirement}" in done.stdout
