"""The doctor: what is said of a machine, what a fault looks like, and that being examined changes nothing."""

from __future__ import annotations

import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch

import headwise
from headwise import doctor
from headwise.doctor import EXTRAS, Line, examine
from headwise.engines.backends import BACKENDS
from headwise.errors import REMEDIES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def by_name(lines: list[Line]) -> dict[str, Line]:
    lines_by_name = {line.name: line for line in lines}
    assert len(lines_by_name) == len(lines)
    return lines_by_name


def run(capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code, and what the command says on lines as long as they need to be."""
    pytest.importorskip("rich")
    pytest.importorskip("typer")
    from headwise.cli import main

    code = main(["doctor"])
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "Traceback" not in printed.out
    return code, printed.out


def test_a_healthy_machine_has_no_problem() -> None:
    lines = by_name(examine())
    assert [line for line in lines.values() if not line.ok] == []
    assert lines["headwise"].value == headwise.__version__
    assert lines["torch"].value.startswith(torch.__version__)
    assert "1 thread" in lines["CPU"].value
    assert "iB free" in lines["budget on cpu"].value
    assert {f"backend {backend.name}" for backend in BACKENDS} <= set(lines)
    assert set(EXTRAS) <= set(lines)
    assert lines["check module on cpu"].value.startswith("ok: ")
    assert lines["check attention on cpu"].value.startswith("ok: auto, flash, tiles, plain ")


def test_backends_are_told_by_device(without_gpus) -> None:
    lines = by_name(examine())
    assert lines["GPU"].value == "none available to torch"
    assert lines["backend flash"].value == lines["backend plain"].value == "on cpu"
    assert lines["backend cudnn"].value == "not on cpu: it supports cuda only"


def test_the_command_is_content_with_a_healthy_machine(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, output = run(capsys)
    assert code == 0
    for line in examine():
        assert line.name in output
    assert output.splitlines()[-1] == "All checks passed."


def test_the_command_fits_80_columns(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, output = run(capsys)
    assert max(map(len, output.splitlines())) <= 80
    assert "…" not in output


# Faults, planted


def test_a_wrong_module_is_noticed(capsys, monkeypatch, without_gpus) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    right = headwise.MultiHeadAttention.forward

    def a_little_wrong(self, *args, **options):
        output, weights = right(self, *args, **options)
        return output + 1e-5, weights

    monkeypatch.setattr(headwise.MultiHeadAttention, "forward", a_little_wrong)
    code, printed = run(capsys)
    assert code == 1
    assert "output of the module and of torch.nn.MultiheadAttention differ by 1e-05" in printed
    assert printed.splitlines()[-1].startswith("1 of ")


@pytest.mark.parametrize("backend", ["auto", "flash", "tiles", "plain"])
@pytest.mark.parametrize("wrong", [1e-4, float("nan")])
def test_a_wrong_backend_is_named(monkeypatch, backend: str, wrong: float) -> None:
    right = doctor.attention

    def a_little_wrong(*args, **options):
        output, weights = right(*args, **options)
        return (output + wrong if options["backend"] == backend else output), weights

    monkeypatch.setattr(doctor, "attention", a_little_wrong)
    line = by_name(examine())["check attention on cpu"]
    assert not line.ok
    assert f"output of backend {backend} and of a plain softmax differ by " in line.problem


def test_wrong_weights_are_noticed(monkeypatch) -> None:
    right = headwise.AttentionMap.dense
    monkeypatch.setattr(headwise.AttentionMap, "dense", lambda self: right(self).roll(1, dims=-1))
    lines = by_name(examine())
    assert (
        "weights of the module and of torch.nn.MultiheadAttention differ by"
        in lines["check module on cpu"].problem
    )
    assert (
        "weights of backend auto and of a plain softmax differ by" in lines["check attention on cpu"].problem
    )


def test_a_check_that_breaks_is_a_line_not_a_traceback(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")

    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("no kernel image is available\nand many lines more")

    monkeypatch.setattr(doctor, "attention", broken)
    code, output = run(capsys)
    assert code == 1
    assert "RuntimeError: no kernel image is available" in output
    assert "many lines more" not in output


def test_a_gpu_that_is_not_well_does_not_hide_the_rest(monkeypatch) -> None:
    """torch may count a GPU that it then cannot use."""
    absent = torch.cuda.device_count()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: absent + 1)
    lines = by_name(examine())
    troubled = {name for name, line in lines.items() if not line.ok}
    checks = {f"check module on cuda:{absent}", f"check attention on cuda:{absent}"}
    assert checks | {f"GPU {absent}", f"budget on cuda:{absent}"} <= troubled
    assert lines["check module on cpu"].ok
    assert lines["check attention on cpu"].ok


def test_what_torch_warns_of_gpus_is_a_problem(monkeypatch) -> None:
    def old_driver() -> bool:
        warnings.warn("CUDA initialization: the driver is too old\nupdate it", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", old_driver)
    assert by_name(examine())["GPU"].problem == "CUDA initialization: the driver is too old"


def test_a_missing_extra_is_no_problem_and_says_how_to_get_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = by_name(examine())["matplotlib"]
    assert line == Line("matplotlib", 'not installed (for pictures): pip install "headwise[viz]"')


def test_without_rich_the_command_says_how_to_get_it(capsys, monkeypatch) -> None:
    pytest.importorskip("typer")
    from headwise.cli import main

    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["doctor"]) == 1
    printed = capsys.readouterr()
    assert printed.err == 'headwise: headwise doctor needs rich; install with: pip install "headwise[cli]"\n'


# What it leaves alone


def test_examining_changes_no_random_numbers() -> None:
    before = torch.get_rng_state()
    examine()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_extras_are_those_of_the_package() -> None:
    """Each library of an extra is told with one that brings it."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    brought = {
        extra: {each.partition(">")[0] for each in declared[extra]} for extra in ("viz", "cli", "watch")
    }
    for library in set().union(*brought.values()):
        ways = [f'pip install "headwise[{extra}]"' for extra in brought if library in brought[extra]]
        assert library in EXTRAS and REMEDIES[library] in ways
