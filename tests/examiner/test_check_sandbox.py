"""Files that do what a checked file must not: each a clear verdict, and no harm."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from headwise.errors import ArgumentError
from headwise.examiner.evidence import Evidence
from headwise.examiner.marking import template
from headwise.examiner.marking.judge import Conversation
from headwise.examiner.marking.template import Copy, Template
from headwise.examiner.sandbox import run, watchdog
from headwise.examiner.sandbox.confine import limits
from headwise.examiner.sandbox.confine.limits import descendants_of
from headwise.examiner.sandbox.learner import choose, load, load_all_the_same
from headwise.examiner.sandbox.run import protections_here, readable, run_file
from headwise.examiner.sandbox.verdicts import Outcome, hidden, of_exception, of_kill, of_status
from headwise.examiner.sandbox.watchdog import Watch

GOOD = """
import math
import torch
from torch import nn

class MultiHeadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, query, key, value):
        def split(x):
            return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, H, T, D]

        q, k, v = split(self.q_proj(query)), split(self.k_proj(key)), split(self.v_proj(value))
        p = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), -1)
        return self.out_proj((p @ v).transpose(1, 2).flatten(2))
"""

FENCED = "namespaces" not in run.WITHOUT and any("namespace" in each for each in protections_here()[0])
LANDLOCKED = any(each.startswith("Landlock") for each in protections_here()[0])
fenced = pytest.mark.skipif(not FENCED, reason="by design: this system grants no namespaces")
landlocked = pytest.mark.skipif(not LANDLOCKED, reason="by design: this kernel has no Landlock")
protected = pytest.mark.skipif(not (FENCED or LANDLOCKED), reason="by design: nothing fences a file in here")


@dataclass
class Workspace:
    """A folder with a learner's file, and things around it that must stay as they are."""

    folder: Path
    secret: Path
    temporary: Path
    port: int
    template: Template

    def run(self, source: str, *, seconds: float = 10.0, memory: int = 2**30, trust: bool = False) -> Outcome:
        file = self.folder / "learner.py"
        secrets = {"SECRET": str(self.secret), "PORT": self.port}
        file.write_text(
            "".join(f"{name} = {value!r}\n" for name, value in secrets.items()) + textwrap.dedent(source)
        )
        return run_file(file, None, seconds=seconds, memory=memory, trust=trust, template=self.template)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_template: Template) -> Iterator[Workspace]:
    """Afterwards: nothing outside was touched, no process is left, no folder, and nobody rang."""
    folder, home, temporary = tmp_path / "learner", tmp_path / "home", tmp_path / "temporary"
    for each in (folder, home, temporary):
        each.mkdir()
    secret = home / "secret.txt"
    secret.write_text("the word is xyzzy")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("HEADWISE_TEST_TOKEN", "xyzzy")
    before = descendants_of(os.getpid())  # the template, and what other tests have running, a browser say
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield Workspace(folder, secret, temporary, server.getsockname()[1], one_template)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert secret.read_text() == "the word is xyzzy"
    assert [each.name for each in home.iterdir()] == ["secret.txt"]
    assert {each.name for each in folder.iterdir()} <= {"learner.py", "beside.py"}
    assert list(temporary.iterdir()) == []
    assert _left(temporary) == []
    assert {each.name for each in one_template.folder.iterdir()} == {"owner", "words.txt"}
    assert one_template.alive() and set(descendants_of(os.getpid())) <= set(before)  # a judge may have gone
    assert os.waitpid(-1, os.WNOHANG) == (0, 0)  # not even a zombie


def _left(temporary: Path) -> list[str]:
    """Processes started with the temporary folder in their environment or on their command line."""
    left = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if str(temporary).encode() in text:
            left.append(process.name)
    return left


def verdict(outcome: Outcome) -> tuple[str, str]:
    assert outcome.evidence is None and outcome.problem is not None, outcome
    assert len(outcome.problem.message) > 20
    return outcome.problem.stage, outcome.problem.kind


def line_of(outcome: Outcome) -> int | None:
    assert outcome.problem is not None
    return outcome.problem.line


@protected
def test_a_file_brings_evidence_and_says_what_protected_it(workspace: Workspace) -> None:
    outcome = workspace.run(GOOD + "print('hello')\n", seconds=40)
    assert outcome.problem is None and outcome.evidence is not None
    assert outcome.evidence.name == "MultiHeadAttention" and outcome.evidence.calls
    assert outcome.output == "hello\n"
    assert (outcome.protections, outcome.missing) == protections_here()


# Before there is anything to examine: cases that end while the file is imported

ENDINGS = {
    "endless loop": ("while True: pass", ("limits", "timeout"), 3),
    "sleep": ("import time\ntime.sleep(1000)", ("limits", "timeout"), 4),
    "deaf to signals": (
        """
        import signal, time
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        while True: time.sleep(1)
        """,
        ("limits", "timeout"),
        None,
    ),
    "fork": ("import os\nwhile True: os.fork()", ("limits", "processes"), None),
    "stubborn fork bomb": (
        """
        import os
        while True:
            try:
                os.fork()
            except OSError:
                pass
        """,
        ("limits", "processes"),
        None,
    ),
    "giant tensor": ("import torch\ntorch.ones(10**12)", ("limits", "memory"), 4),
    "giant bytes": ("x = bytearray(10**12)", ("limits", "memory"), 3),
    "more and more": ("x = []\nwhile True: x.append(bytearray(10**7))", ("limits", "memory"), 4),
    "os._exit": ("import os\nos._exit(0)", ("limits", "exit"), None),
    "segfault": ("import ctypes\nctypes.string_at(0)", ("limits", "segfault"), 4),
    "abort": ("import os\nos.abort()", ("limits", "crash"), 4),
    "kills itself": ("import os\nos.kill(os.getpid(), 9)", ("limits", "killed"), None),
    "sys.exit": ("import sys\nsys.exit('done')", ("import", "SystemExit"), 4),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", ("import", "KeyboardInterrupt"), 3),
    "recursion": ("def f(): f()\nf()", ("import", "RecursionError"), 3),
    "exception": ("x = 1\nx.missing_thing_of_an_int", ("import", "AttributeError"), 4),
    "syntax": ("x = 1\ndef f(:\n", ("import", "SyntaxError"), 4),
    "reads a secret": ("print(open(SECRET).read())", ("limits", "forbidden"), 3),
    "deletes": ("import os\nos.remove(SECRET)", ("limits", "forbidden"), 4),
    "deletes a tree": (
        "import os, shutil\nshutil.rmtree(os.path.dirname(SECRET))",
        ("limits", "forbidden"),
        4,
    ),
    "writes outside": ("open(SECRET + '.new', 'w').write('x')", ("limits", "forbidden"), 3),
    "writes beside itself": ("open(__file__ + '.new', 'w').write('x')", ("limits", "forbidden"), 3),
    "changes itself": ("open(__file__, 'a').write('x')", ("limits", "forbidden"), 3),
    "dials": ("import socket\nsocket.create_connection(('127.0.0.1', PORT))", ("limits", "network"), 4),
    "downloads": (
        "import urllib.request\nurllib.request.urlopen('http://example.org', timeout=5)",
        ("limits", "network"),
        4,
    ),
    "large file": (
        "with open('x', 'wb') as f:\n    while True: f.write(bytes(2**24))",
        ("limits", "files"),
        4,
    ),
    "many files": (
        "i = 0\nwhile True:\n    i += 1\n    open(str(i), 'w').close()",
        ("limits", "files"),
        None,
    ),
    "folders in folders": (
        "import os\nwhile True:\n    os.mkdir('d')\n    os.chdir('d')",
        ("limits", "files"),
        None,
    ),
    "nothing to check": ("x = 1", ("import", "ArgumentError"), None),
}


@pytest.mark.slow
@protected
@pytest.mark.parametrize("name", ENDINGS)
def test_a_clear_verdict_and_no_harm(name: str, workspace: Workspace) -> None:
    source, expected, line = ENDINGS[name]
    waits = "timeout" in expected or "bomb" in name  # the others end by themselves, on a busy machine too
    outcome = workspace.run(source, seconds=2 if waits else 30, memory=2**28)
    assert verdict(outcome) == expected, outcome
    if line is not None:
        assert line_of(outcome) == line
    assert "xyzzy" not in outcome.output


# Harm done on the way, by a file that then behaves


@pytest.mark.slow
@protected
def test_comparisons_are_not_the_learners_to_replace(workspace: Workspace) -> None:
    outcome = workspace.run(GOOD + "torch.allclose = torch.equal = lambda *a, **k: True\n", seconds=40)
    assert outcome.evidence is not None
    assert not torch.allclose(torch.zeros(2), torch.ones(2))


@pytest.mark.slow
@protected
def test_of_a_megabyte_of_prints_the_beginning_and_the_end_are_kept(workspace: Workspace) -> None:
    outcome = workspace.run(
        "print('first')\nfor _ in range(1024): print('x' * 1023)\nprint('last')\n" + GOOD, seconds=40
    )
    assert outcome.evidence is not None
    assert outcome.output.startswith("first\n") and outcome.output.endswith("last\n")
    assert "bytes left out" in outcome.output and len(outcome.output) < 70_000


@pytest.mark.slow
@protected
def test_a_daemon_does_not_outlive_the_file(workspace: Workspace) -> None:
    outcome = workspace.run(
        """
        import os, subprocess, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                while True: time.sleep(1)
            os._exit(0)
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        raise ValueError("on purpose, to go on without the wait")
        """
    )
    assert verdict(outcome) == ("import", "ValueError")
    assert outcome.notes and "processes that it left running" in outcome.notes[0]


TRIES = """
import os, shutil, socket

refused = []

def tried(name, do):
    try:
        do()
    except OSError:
        refused.append(name)

tried("read", lambda: open(SECRET).read())
tried("delete", lambda: os.remove(SECRET))
tried("delete a tree", lambda: shutil.rmtree(os.path.dirname(SECRET)))
tried("write", lambda: open(SECRET + ".new", "w"))
tried("write beside", lambda: open(__file__ + ".new", "w"))
tried("link", lambda: os.link(__file__, __file__ + ".link"))
tried("rename", lambda: os.rename(__file__, "stolen.py"))
tried("chmod", lambda: os.chmod(SECRET, 0o604))
tried("dial", lambda: socket.create_connection(("127.0.0.1", PORT)))
tried("fork", lambda: [os.fork() or os._exit(0) for _ in range(1000)])
raise ValueError(", ".join(refused))
"""
ALL_TRIES = "read, delete, delete a tree, write, write beside, link, rename, chmod, dial, fork"


@pytest.mark.slow
@protected
@pytest.mark.parametrize("without", ["nothing", "landlock", "namespaces", "root"])
def test_each_protection_holds_alone(
    without: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (LANDLOCKED if without == "namespaces" else FENCED):
        pytest.skip("by design: nothing would be left")
    monkeypatch.setattr(run, "WITHOUT", (without,))
    before = workspace.secret.stat()
    outcome = workspace.run(TRIES)
    assert verdict(outcome) == ("import", "ValueError"), outcome
    assert outcome.problem is not None
    # Landlock does not know of rights and owners; without a root of its own the file is there to change.
    own_root = any("root folder" in each for each in outcome.protections)
    expected = ALL_TRIES if own_root else ALL_TRIES.replace("chmod, ", "")
    assert outcome.problem.message == expected
    assert (workspace.secret.stat().st_mode == before.st_mode) == (expected == ALL_TRIES)
    assert (without == "nothing") != any(without in each.lower() for each in outcome.missing), outcome.missing


@pytest.mark.slow
@landlocked
def test_without_namespaces_nothing_is_left_running_either(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "WITHOUT", ("namespaces",))
    source = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\nos._exit(3)"
    assert verdict(workspace.run(source)) == ("limits", "exit")
    assert verdict(workspace.run("import subprocess\nsubprocess.run(['sleep', '1000'])", seconds=2)) == (
        "limits",
        "timeout",
    )


@pytest.mark.parametrize("first", ["namespaces", "root"])
def test_without_protections_nothing_is_run(
    first: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "WITHOUT", (first, "landlock"))
    with pytest.raises(ArgumentError, match=rf"^trust must be True.*{first}.*Landlock.*trust=True"):
        workspace.run("open(SECRET, 'w').close()")


@pytest.mark.slow
def test_with_trust_it_is_run_all_the_same(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "WITHOUT", ("namespaces", "root", "landlock"))
    outcome = workspace.run("raise ValueError(open(SECRET).read())", trust=True)
    assert outcome.problem is not None and outcome.problem.message == "the word is xyzzy"
    assert outcome.missing and not any("namespace" in each for each in outcome.protections)


# What is seen from inside

ENVIRONMENT = """
import os, sys
words = " ".join(f"{k}={v}" for k, v in os.environ.items())
for number in os.listdir("/proc"):
    if number.isdigit():
        try:
            words += open(f"/proc/{number}/environ").read()
        except OSError:
            pass
assert "xyzzy" not in words and "TOKEN" not in words
assert os.path.realpath(os.environ["HOME"]) == os.getcwd() == os.path.realpath(os.environ["TMPDIR"])
assert sys.stdin.read() == ""
assert __name__ != "__main__"
raise ValueError(os.getcwd())
"""


@pytest.mark.slow
@protected
def test_the_environment_holds_nothing_of_the_callers(workspace: Workspace) -> None:
    with Template() as workspace.template:  # started with all that is in ours now
        outcome = workspace.run(ENVIRONMENT)
    assert verdict(outcome) == ("import", "ValueError"), outcome
    assert outcome.problem is not None and str(workspace.temporary) in outcome.problem.message


@pytest.mark.slow
@fenced
def test_nothing_is_inherited_but_its_own_pipes(workspace: Workspace) -> None:
    outcome = workspace.run(
        """
        import os
        ends = [f"/proc/self/fd/{number}" for number in range(256)]
        held = {os.readlink(each).split(":")[0] for each in ends if os.path.lexists(each)}
        raise ValueError(" ".join(sorted(each.rpartition("/")[2] for each in held)))
        """
    )
    assert outcome.problem is not None and outcome.problem.message == "null pipe socket where.txt", outcome


@pytest.mark.slow
@fenced
def test_other_programs_sockets_do_not_exist(workspace: Workspace) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(workspace.secret.parent.parent / "door"))
        server.listen()
        server.setblocking(False)
        outcome = workspace.run(
            """
            import os, socket
            socket.socket(socket.AF_UNIX).connect(os.path.dirname(os.path.dirname(SECRET)) + "/door")
            """
        )
        assert outcome.problem is not None
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.slow
@protected
def test_files_beside_it_can_be_imported(workspace: Workspace) -> None:
    (workspace.folder / "beside.py").write_text("word = 'from beside'\n")
    outcome = workspace.run("from beside import word\nraise ValueError(word)")
    assert outcome.problem is not None and outcome.problem.message == "from beside"


@pytest.mark.slow
@protected
def test_what_is_printed_is_no_result(workspace: Workspace) -> None:
    outcome = workspace.run("""print('{"ended": 0}', flush=True)\nimport os\nos._exit(0)""")
    assert verdict(outcome) == ("limits", "exit")


@pytest.mark.slow
@protected
def test_a_folder_without_rights_is_removed_too(workspace: Workspace) -> None:
    outcome = workspace.run(
        "import os\nos.makedirs('a/b/c')\nos.chmod('a/b', 0)\nos.chmod('a', 0)\nos._exit(1)"
    )
    assert verdict(outcome) == ("limits", "exit")


# Parts that need no other process


@pytest.mark.parametrize(
    "message",
    ["", "[" * 100_000, '{"problem": 1}', "[]", "{}", '{"evidence": "[]"}', '{"evidence": "{}"}'],
    ids=range(7),
)
def test_a_result_that_is_none_is_refused(message: str) -> None:
    conversation = Conversation([])
    assert conversation.reply(message.encode(), b"x" * 100) == b""
    assert verdict(conversation.outcome) == ("limits", "result")


def test_answers_that_nobody_asked_for_are_refused() -> None:
    facts, numbers = Evidence("X", "class").written()
    message = json.dumps({"evidence": facts}).encode()
    conversation = Conversation([])
    assert conversation.reply(message, numbers) == b"" and conversation.outcome.evidence is not None
    conversation.reply(message, numbers)
    assert verdict(conversation.outcome) == ("limits", "result")
    conversation = Conversation([], lambda evidence: [{"a": 1}, {"b": 2}])
    assert conversation.reply(message, numbers) != b""
    conversation.reply(b'[{"output": 1, "mask": null}]', b"")
    assert "2 answers were expected" in getattr(conversation.outcome.problem, "message", "")


def test_a_trace_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo"):
        with pytest.raises(ValueError, match="is not a regular file"):
            run._plain_file(tmp_path / name, 100)
    with pytest.raises(ValueError, match="is too large"):
        run._plain_file(tmp_path / "elsewhere", 1)


def test_an_unreadable_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="file must be readable: "):
        run_file(tmp_path / "absent.py", None)


def test_looking_for_protections_needs_no_torch_and_leaves_nothing(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is quick, for importing torch is what takes long: where that raises, nothing is missed."""
    without = workspace.folder.parent / "without_torch.py"
    then = f"runpy.run_path({str(template.HOST)!r}, run_name='__main__')"
    without.write_text(f"import runpy, sys\nsys.modules['torch'] = None\n{then}\n")
    monkeypatch.setattr(template, "HOST", without)
    protections, missing = protections_here.__wrapped__()
    assert (protections, missing) == protections_here()
    assert protections or missing


def test_a_name_that_is_not_there_is_answered_with_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = _loaded(GOOD, tmp_path, monkeypatch)
    with pytest.raises(ArgumentError, match="did you mean 'MultiHeadAttention'"):
        choose(module, "MultiheadAttention")
    assert choose(module, "MultiHeadAttention.forward") is module.MultiHeadAttention.forward
    with pytest.raises(ArgumentError, match=r"'torch' is module|name must be a class or function: 'torch'"):
        choose(module, "torch")
    with pytest.raises(ArgumentError, match="file must define attention: nothing in it looks like attention"):
        choose(module, None)


def test_a_file_of_a_package_may_import_relative_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package_of_a_learner" / "parts"
    package.mkdir(parents=True)
    for each in (package.parent, package):
        (each / "__init__.py").write_text("")
    (package.parent / "sizes.py").write_text("width = 12\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    source = "from ..sizes import width\n"
    (package / "attention.py").write_text(source)
    assert load(package / "attention.py", source).width == 12


def _loaded(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = folder / f"{folder.name}.py"
    path.write_text(source)
    return load(path, source)


def test_of_a_home_only_the_python_in_it_is_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    (home / "package").mkdir(parents=True)
    for each in ("learner.py", "other.py", "keys.txt", "package/__init__.py"):
        (home / each).write_text("")
    monkeypatch.setenv("HOME", str(home))
    readable_files = {each for each in readable(home / "learner.py", "") if each.startswith(str(home))}
    assert readable_files == {str(home / each) for each in ("learner.py", "other.py", "package")}
    (home / "project").mkdir()
    assert str(home / "project") in readable(home / "project" / "learner.py", "")


def test_a_file_that_is_here_but_not_there_was_out_of_reach(tmp_path: Path) -> None:
    from headwise.examiner.evidence import Problem

    (tmp_path / "here").write_text("")
    for name, reach, kind in (
        (str(tmp_path / "here"), [], "forbidden"),
        (str(tmp_path / "new"), [], "forbidden"),
        (str(tmp_path / "absent" / "file"), [], "FileNotFoundError"),
        (str(tmp_path / "new"), [str(tmp_path)], "FileNotFoundError"),
        ("relative.txt", [], "FileNotFoundError"),
    ):
        assert hidden(Problem("import", "FileNotFoundError", "no such file"), name, reach).kind == kind


@pytest.mark.parametrize(
    ("status", "kind"),
    [(11, "segfault"), (6, "crash"), (9, "killed"), (24, "timeout"), (3 << 8, "exit"), (None, "killed")],
)
def test_every_end_has_a_word(status: int | None, kind: str) -> None:
    assert of_status(status, None, 2**30, "hello\n").kind == kind


def test_a_library_that_gets_no_memory_is_not_the_learners_doing() -> None:
    """OpenBLAS ends the process where it gets no memory; "it ended the process itself", the verdict was."""
    words = "OpenBLAS error: Memory allocation still failed after 10 retries, giving up.\n"
    for status, output in ((1 << 8, words), (6, "terminate called after throwing 'std::bad_alloc'\n")):
        problem = of_status(status, 5, 3 * 2**30, "hello\n" + output)
        assert (problem.stage, problem.kind, problem.line) == ("limits", "memory", 5)
        assert problem.message == (
            f"it used more memory than the limit of 3 GiB (torch itself not counted) ({output.strip()}); "
            "raise the limit with memory= or --memory"
        )
    for status, output in ((0, words), (11, words), (1 << 8, words + 2000 * "x")):
        assert of_status(status, 5, 3 * 2**30, output).kind != "memory"
    assert "the file, or a library it uses" in of_status(1 << 8, None, 1, "").message


def test_the_memory_allowed_is_told_where_it_ended_and_how_to_raise_it() -> None:
    message = "the limit of 0.25 GiB .*raise the limit with memory= or --memory$"
    for confined in (True, False):  # limits hold in either case
        problem = of_exception(MemoryError(), Path("x.py"), "call", 2**28, confined=confined)
        assert problem.kind == "memory" and re.search(message, problem.message)
    assert re.search(message, of_kill("memory", seconds=1.0, memory=2**28, line=None).message)


@pytest.mark.slow
@protected
@pytest.mark.parametrize("memory", [2**26, 2**28, 2**30])
def test_memory_that_is_reserved_and_not_used_is_not_counted(workspace: Workspace, memory: int) -> None:
    """A limit on address space met an allocator's arena of one GiB: with 1 GiB allowed, nothing was left."""
    reserve = "import mmap\narenas = [mmap.mmap(-1, 2**30) for _ in range(5)]\n"
    outcome = workspace.run(reserve + GOOD, seconds=40, memory=memory)
    assert outcome.evidence is not None, outcome
    touch = "import mmap\narena = mmap.mmap(-1, 2**31)\nfor i in range(0, 2**31, 4096):\n    arena[i] = 1\n"
    outcome = workspace.run(touch + GOOD, seconds=40, memory=memory)
    assert verdict(outcome) == ("limits", "memory") and line_of(outcome) in (5, 6)


@pytest.mark.slow
def test_processor_time_ends_with_a_signal_that_tells() -> None:
    """The limit's last second was its first: SIGKILL, which says nothing."""
    source = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(Path(limits.__file__).parents[1])!r})
        from confine.limits import limit_time
        limit_time(0.1)
        while True: pass
        """)
    assert subprocess.run([sys.executable, "-c", source]).returncode == -signal.SIGXCPU


def test_time_spent_waiting_for_a_processor_is_not_the_learners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a right file was told that its loop never ends."""
    lost = [7.0, 9.5, 6.0, 1000.0]
    monkeypatch.setattr(watchdog, "waited", lambda number: lost.pop(0))
    watch = Watch(Copy(Template(), 1, None), -1, -1, -1, tmp_path, 2.0, 1)
    watch.facts["waited"] = 7.0
    assert [watch._starved([1]) for _ in range(4)] == [0.0, 2.5, 0.0, 60.0]  # thirty times its own, at most
    monkeypatch.setattr(watch, "_family", lambda: [1])
    monkeypatch.setattr(watchdog, "waited", lambda number: 8.0)  # one second more than before it began
    used, worked = 0, 0.0
    monkeypatch.setattr(watchdog, "memory_of", lambda number: used)
    monkeypatch.setattr(watchdog, "processor_time", lambda number: worked)
    assert [watch._too_much(elapsed) for elapsed in (1.9, 2.9, 3.1)] == [None, None, "timeout"]
    used = 5  # of one byte; in the time that is added, too
    assert [watch._too_much(elapsed) for elapsed in (1.9, 2.9, 3.1)] == ["memory", "memory", "timeout"]
    monkeypatch.setattr(watch, "_family", lambda: [1] * 33)
    assert watch._too_much(2.1) == "processes"
    monkeypatch.setattr(watch, "_family", lambda: [1])
    used = 0
    for worked, elapsed, expected in (
        (1.9, 4.8, None),  # a second without a processor, 1.9 with one, 1.9 asleep
        (1.9, 5.0, "timeout"),  # asleep for too long
        (2.1, 3.2, "timeout"),  # at work for too long
        (2.1, 2.0, None),  # several threads: there is time on the clock
    ):
        assert watch._too_much(elapsed) == expected, (worked, elapsed)
    worked, watch._own_delay = 0.0, 2.0  # the answer to what it said was late, and it waited for that
    assert [watch._too_much(elapsed) for elapsed in (4.9, 5.1)] == [None, "timeout"]
    assert limits.processor_time("self") > 0.0 and limits.processor_time("nobody") == 0.0
    assert limits.waited("self") >= 0.0 and limits.waited("nobody") == 0.0


@pytest.mark.slow
@protected
@pytest.mark.parametrize("line", ["from not_installed_here.parts import Thing", "from ..far import away"])
def test_a_module_that_is_not_here_is_stood_in_for(workspace: Workspace, line: str) -> None:
    outcome = workspace.run(f"{line}\n{GOOD}")
    assert outcome.problem is None
    assert outcome.evidence is not None and outcome.evidence.weights is not None
    assert any("the check does not need them" in words for words in outcome.evidence.conventions.words)


@pytest.mark.slow
@protected
def test_a_module_that_is_needed_is_missed(workspace: Workspace) -> None:
    outcome = workspace.run(
        f"from not_installed_here import WIDTH\n{GOOD}".replace("nn.Linear(", "nn.Linear(WIDTH or ")
    )
    assert outcome.problem is not None
    assert (outcome.problem.kind, outcome.problem.line) == ("ModuleNotFoundError", 3)


def test_only_what_the_file_asks_for_is_stood_in_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    path = tmp_path / "learner.py"
    path.write_text("import not_here.inside\nfrom not_here import Base\nclass Own(Base):\n    pass\n")
    module, names, _ = load_all_the_same(path, path.read_text())
    assert names == ["not_here", "not_here.inside"]
    assert module.Own(1, a=2).anything() is not None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("nobody_asked_for_this")
