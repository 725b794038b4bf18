"""Settings of the tests. With CI set, one that was skipped because something is missing is a failure."""

from __future__ import annotations

import atexit
import gc
import hashlib
import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Generator, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from browser import Browser
    from headwise.examiner.marking.template import Template

BY_DESIGN = "by design:"

# Where there is no GPU, Triton's kernels run in its interpreter. That is decided when triton is imported:
# nothing above does so.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# torch.manual_seed notes for each kind of device that is not there who called, the whole stack as text: 1 ms.
for devices in (torch.cuda, torch.xpu, torch.mtia):
    if hasattr(devices, "traceback") and not devices.is_available():
        devices.traceback = SimpleNamespace(format_stack=list)

# `HEADWISE_EXAMPLES=2000 make test` draws more; the same draws every time, so that a red gate is red again.
settings.register_profile(
    "headwise",
    max_examples=int(os.environ.get("HEADWISE_EXAMPLES", "25")),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("headwise")

# Two processes with two threads each on two cores wait for each other: small tensors take 3.5 times as long.
BESIDE = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
FREE_THREADS = max(1, torch.get_num_threads() // BESIDE)
if BESIDE > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(FREE_THREADS))  # of what tests start

# Inductor compiles in this process: others would import torch first, which takes longer than they save.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Processes that tests start hear Ctrl-C and the like, also where the tests were started by nohup or
# in the background: what is ignored there is ignored by children, too.
if threading.current_thread() is threading.main_thread():
    for name, usual in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


@pytest.fixture(autouse=True)
def _threads_that_are_free(request: pytest.FixtureRequest) -> Iterator[None]:
    """Threads cost more than they bring at test sizes; slow tests are large enough for those left free."""
    before = torch.get_num_threads()
    torch.set_num_threads(FREE_THREADS if "slow" in request.keywords else 1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _faults_of_a_gpu_in_time() -> Iterator[None]:
    """A fault on a GPU is reported by a later call: by this one, so that the right test is blamed."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@pytest.fixture
def _small_models() -> None:
    """For watched models, which are small in slow tests too: one thread, and transformers is quiet."""
    pytest.importorskip("transformers").logging.set_verbosity_error()
    torch.set_num_threads(1)  # put back by the fixture above


@pytest.fixture
def _small_models_at_rest(_small_models: None) -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def one_template() -> Iterator[Template]:
    """For files to check: torch is imported once, and each file runs in a copy of that process."""
    from headwise.examiner.marking.template import Template

    with Template() as running:
        yield running


@pytest.fixture(scope="session")
def running_browser() -> Iterator[Browser]:
    """One browser for all tests of pages, and for pages that several tests share."""
    from browser import Browser, chromium_path

    if chromium_path() is None:
        pytest.skip("no browser: install Chromium, or set HEADWISE_BROWSER")
    with Browser() as running:
        yield running


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    # It flushes the processor's caches for each graph, to log how long the guards take: 40 ms.
    monkeypatch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0, raising=False)
    yield
    torch._dynamo.reset()


@pytest.fixture
def counter(fresh_compiler: None) -> Any:
    """A backend that counts its graphs; imported where it is needed, which takes seconds."""
    from torch._dynamo.testing import CompileCounterWithBackend

    return CompileCounterWithBackend("aot_eager")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Docstrings here hold no examples: looking for some imports every helper, in each process."""
    return [each for each in (yield) if not isinstance(each, DoctestModule)]


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked thinned(n) about one case in n is quick (none for n = 0), of keep=ids those.

    The others are marked slow, or as thinned(rest="gpu") says. Of those that are slow, thinned(slow=m) leaves
    about one in m to the slow run and marks the others full.

    A case's own name decides, whatever stands beside it: a new case moves no other in or out. Where no case
    would be left, the one of the smallest number is.
    """
    tests: dict[str, dict[str, pytest.Function]] = {}
    for item in items:
        if item.get_closest_marker("thinned"):
            assert isinstance(item, pytest.Function)
            test, _, case = item.nodeid.partition("[")
            tests.setdefault(test, {})[case.removesuffix("]")] = item
    whole = not any("[" in argument for argument in config.args)  # no case was asked for by its name
    for test, cases in tests.items():
        # A checksum would do if names were not so alike: that of 32 such names modulo 3 gave 4 zeros.
        numbers = {
            case: int(hashlib.sha256(item.name.encode()).hexdigest(), 16) for case, item in cases.items()
        }
        quick = _quick(test, cases, numbers, whole)
        for case, item in cases.items():
            marker = item.get_closest_marker("thinned")
            if case not in quick and marker:
                item.add_marker(marker.kwargs.get("rest", "slow"))
                if (numbers[case] >> 64) % marker.kwargs.get(
                    "slow", 1
                ):  # the lower digits chose the quick ones
                    item.add_marker("full")


def _quick(test: str, cases: dict[str, pytest.Function], numbers: dict[str, int], whole: bool) -> set[str]:
    first = next(iter(cases.values()))
    marker = first.get_closest_marker("thinned")
    assert marker is not None
    keep = marker.kwargs.get("keep", [])
    if not hasattr(first, "callspec"):
        raise pytest.UsageError(f"thinned needs cases: {test} has none; mark it slow")
    by_place = re.compile("|".join(["<lambda>", *(rf"\b{name}\d+\b" for name in first.callspec.params)]))
    for case in cases:
        if by_place.search(case):
            raise pytest.UsageError(f"thinned needs names, not places: {test} has a case {case!r}; give ids=")
    if whole and not set(keep) <= set(cases):
        raise pytest.UsageError(f"keep must name cases: {test} has no {min(set(keep) - set(cases))!r}")
    quick = set(keep) & set(cases)
    if marker.args == (0,):
        return quick
    if marker.args or not keep:
        n = marker.args[0] if marker.args else 3
        quick |= {case for case, number in numbers.items() if number % n == 0}
    return quick or {min(numbers, key=lambda case: numbers[case])}


# Eight thousand tests and a library like transformers are a million objects. Python's collector would look
# through again and again: what is there to stay is set aside.
_modules_set_aside = 0


def pytest_collection_finish() -> None:
    if not gc.get_freeze_count():  # a session inside a test leaves it at that
        _set_aside()


def pytest_runtest_teardown() -> None:
    if 0 < _modules_set_aside < len(sys.modules) - 200:
        _set_aside()


def pytest_unconfigure() -> None:
    if _modules_set_aside:
        # Libraries that count what is never freed would say so at the end: after pytest's own collections.
        atexit.register(gc.unfreeze)


def _set_aside() -> None:
    global _modules_set_aside
    _modules_set_aside = len(sys.modules)
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(JudgedOnGPU(), "judged-on-gpu")
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        config.pluginmanager.register(NoSilentSkips(), "no-silent-skips")


class JudgedOnGPU:
    """Adds up what the tests on a GPU say they judged (`on_gpu.judged`)."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            for name, count in report.user_properties:
                if name.startswith("judged "):
                    self.counts[name.removeprefix("judged ")] += count

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.counts:
            counts = ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
            terminalreporter.line(f"judged on the GPU and right: {counts}")


class NoSilentSkips:
    """Collects skips whose reason does not start with "by design:", and fails the session if there are any.

    A plugin of its own, because hooks of this file alone would not see the examples in src.
    """

    def __init__(self) -> None:
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = text.removeprefix("Skipped: ")
        if not reason.startswith(BY_DESIGN):
            self.skipped.append(f"{report.nodeid}: {reason}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.skipped and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.skipped:
            terminalreporter.section("skipped tests are failures in CI", red=True, bold=True)
            for line in self.skipped:
                terminalreporter.line(line)
            terminalreporter.line(
                f'Install what is missing; a skip that is meant has a reason starting with "{BY_DESIGN}".'
            )
