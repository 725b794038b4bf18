"""`headwise serve` as a command: what it prints, what it refuses, and how it ends."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from urllib.request import urlopen

import pytest
from command_line import PROGRAM, run, started

LOADER = """
from trained import a_small_decoder, a_tokenizer

def load():
    return a_small_decoder(), a_tokenizer(special=False), "my model"

def wrong():
    return 3

NUMBER = 3
"""


@pytest.fixture
def loader(tmp_path: Path) -> Path:
    """A folder with a module of somebody's own."""
    tests = Path(__file__).resolve().parents[1]
    (tmp_path / "my_model.py").write_text(f"import sys\nsys.path.insert(0, {str(tests)!r})\n{LOADER}")
    return tmp_path


def lines_of(process: subprocess.Popen[bytes], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().decode().rstrip() for _ in range(count)]


def wait_for(address: str) -> None:
    """Wait until the page is there."""
    end = time.monotonic() + 60
    while True:
        try:
            with urlopen(address, timeout=10) as response:
                assert response.status == 200
            return
        except ConnectionError:
            assert time.monotonic() < end
            time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["my_model:load", "my_model.py:load"])
def test_a_model_of_ones_own_is_served_until_ctrl_c(loader: Path, name: str) -> None:
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        port = str(occupied.getsockname()[1])
        command = [*PROGRAM, "serve", name, "--no-open", "--port", port, "--token", "letmein12"]
        process = started(*command, cwd=loader)
        title, note, address = lines_of(process, 3)
    assert title == "my model: 2 layers, 6 heads"
    match = re.fullmatch(r"Open (http://127\.0\.0\.1:(\d+)/\?token=letmein12) \(Ctrl-C .*\)", address)
    assert match and note == f"Port {port} is in use; port {match[2]} was taken."
    wait_for(match[1])
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output.decode(), errors.decode()) == (0, "Stopped.\n", "")


@pytest.mark.slow
def test_other_machines_are_let_in_only_with_a_word_of_warning(loader: Path) -> None:
    command = [*PROGRAM, "serve", "my_model:load", "--no-open", "--host", "0.0.0.0", "--text", "the cat"]
    process = started(*command, cwd=loader)
    lines = lines_of(process, 2)
    while not lines[-1].startswith("Open"):
        lines += lines_of(process, 1)
    warning = next(line for line in lines if line.startswith("Every machine"))
    assert "0.0.0.0" in warning and "not encrypted" in warning
    assert re.search(r"token=[\w-]{20,}", lines[-1])
    wait_for(lines[-1].split()[1])
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--token", "short"], "token must be at least 8 letters or digits: got 5 characters"),
        (["--port", "0"], "Invalid value for '--port'"),
        (["--memory", "much"], "got 'much'"),
        pytest.param(["--device", "cuda"], "device must be available: got 'cuda'", marks=pytest.mark.slow),
        pytest.param(["nothing:load"], "there is no 'nothing'", marks=pytest.mark.slow),
        pytest.param(["nothing.py:load"], "there is no 'nothing.py'", marks=pytest.mark.slow),
        pytest.param(["my_model:NUMBER"], "has no function 'NUMBER'", marks=pytest.mark.slow),
        pytest.param(["my_model:wrong"], "must return (model, tokenizer): got int", marks=pytest.mark.slow),
        pytest.param(["--text", ""], "text must", marks=pytest.mark.slow),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_told_in_a_line(loader: Path, options: list[str], words: str) -> None:
    code, output, errors = run(*PROGRAM, "serve", "--no-open", *options, cwd=loader)
    assert code == 2 and output == ""
    assert errors.startswith("headwise: ") and errors.count("\n") == 1 and words in errors
