"""The house from outside: what importing it needs, touches and costs, what is public, what is shipped."""

from __future__ import annotations

import json
import os
import pkgutil
import re
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import headwise
from bare_environments import make, torch_alone

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(headwise.__file__).resolve().parent

# In a fresh process


# All that a fresh process inherits: importing headwise here may have changed the rest, which would hide it.
INHERITED = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")


def fresh(source: str, *, path: Path = PACKAGE.parent, cwd: Path | None = None) -> Any:
    """Run Python that ends with `answer(something)`; only that may be printed."""
    prelude = "import json\ndef answer(x):\n    print(json.dumps(x))\n"
    done = subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(source)],
        env={name: os.environ[name] for name in INHERITED if name in os.environ} | {"PYTHONPATH": str(path)},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


IMPORT = """
    from time import process_time as now  # of this process alone, however busy the machine is

    start = now()
    import torch
    torch_seconds = now() - start

    import gc, locale, logging, os, random, signal, sys, threading, warnings

    def state():
        cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
        return {
            "default dtype": str(torch.get_default_dtype()),
            "default device": str(torch.get_default_device()),
            "threads of torch": [torch.get_num_threads(), torch.get_num_interop_threads()],
            "grad mode": [torch.is_grad_enabled(), torch.is_inference_mode_enabled()],
            "anomaly mode": torch.is_anomaly_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "matmul precision": torch.get_float32_matmul_precision(),
            "print options": vars(torch._tensor_str.PRINT_OPTS),
            "sdpa": [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
                     cuda.cudnn_sdp_enabled()],
            "cudnn": [cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32],
            "module fast path": torch.backends.mha.get_fastpath_enabled(),
            "cuda started": torch.cuda.is_initialized(),
            "torch random": torch.get_rng_state().tolist(),
            "python random": repr(random.getstate()),
            "environment": dict(os.environ),
            "directory": os.getcwd(),
            "path": list(sys.path),
            "finders": [repr(finder) for finder in sys.meta_path],
            "hooks": [repr(hook) for hook in (sys.excepthook, sys.displayhook, threading.excepthook)],
            "warnings": [repr(each) for each in warnings.filters],
            "logging": [logging.root.level, repr(logging.root.handlers), logging.root.disabled],
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "signals": [repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
            "collector": [gc.isenabled(), gc.get_threshold()],
            "locale": locale.setlocale(locale.LC_ALL),
        }

    before, modules = state(), set(sys.modules)
    start = now()
    import headwise
    seconds = now() - start
    answer({
        "before": before,
        "after": state(),
        "brought": sorted(set(sys.modules) - modules),
        "share": seconds / torch_seconds,
    })
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, Any]:
    """What one import of headwise after torch did."""
    return fresh(IMPORT)


def test_importing_headwise_changes_nothing(imported: dict[str, Any]) -> None:
    before, after = imported["before"], imported["after"]
    assert {name: value for name, value in after.items() if value != before[name]} == {}


def test_importing_headwise_brings_few_modules_and_none_that_are_heavy(imported: dict[str, Any]) -> None:
    others = [name for name in imported["brought"] if name.partition(".")[0] != "headwise"]
    heavy = r"(matplotlib|numpy|pandas|rich|sympy|torch\._(dynamo|inductor)|transformers|triton|typer)(\.|$)"
    assert [name for name in others if re.match(heavy, name)] == []
    assert len(others) <= 20, others


def test_importing_headwise_takes_little_beside_torch(imported: dict[str, Any]) -> None:
    """A ratio of processor time within one process, the best of three: a cold disk can only make it worse."""
    share = imported["share"]
    for _ in range(2):
        if share > 0.2:
            share = min(share, fresh(IMPORT)["share"])
    assert share <= 0.2


# Public names


def documented_names(text: str) -> list[str]:
    """The names between the markers: in a bullet up to its colon, in a table row the first cell with any."""
    between = re.search(r"<!-- public names -->(.*?)<!-- end -->", text, re.DOTALL)
    assert between, "no <!-- public names --> ... <!-- end -->"
    names = []
    for line in between[1].splitlines():
        cells = []
        if row := re.match(r"\s*\|(.*)", line):
            cells = row[1].split("|")
        elif bullet := re.match(r"\s*[-*] (.*)", line):
            cells = [bullet[1].partition(":")[0]]
        names += next(
            filter(None, (re.findall(r"`(?:hw\.|headwise\.)?([A-Za-z_]\w*)`", cell) for cell in cells)), []
        )
    return names


def test_public_names_are_exactly_those_in_the_design() -> None:
    documented = documented_names((ROOT / "DESIGN.md").read_text("utf-8"))
    assert sorted(documented) == sorted(headwise.__all__)


def test_every_public_name_exists_and_has_a_docstring() -> None:
    assert len(set(headwise.__all__)) == len(headwise.__all__)
    without = [name for name in headwise.__all__ if not _own_docstring(getattr(headwise, name))]
    assert without == []


def _own_docstring(thing: object) -> bool:
    if not isinstance(thing, type | ModuleType) and not callable(thing):
        return True  # a constant has nowhere to put one
    words = (vars(thing).get("__doc__") if isinstance(thing, type) else thing.__doc__) or ""
    return bool(words.strip()) and not words.startswith(
        f"{getattr(thing, '__name__', '')}("
    )  # as dataclass writes it


# What is shipped


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("built")
    _run("-m", "build", "--wheel", "--no-isolation", "--outdir", built, ROOT)
    (made,) = built.glob("*.whl")
    return made


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_wheel_holds_the_package_alone_and_works(wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {
        "headwise",
        f"headwise-{headwise.__version__}.dist-info",
    }
    assert "headwise/py.typed" in names
    pages = {f"headwise/show/page/{file.name}" for file in (PACKAGE / "show" / "page").iterdir()}
    assert {"headwise/show/page/heads.js", "headwise/show/page/explain.js"} <= pages <= set(names)
    assert any(re.fullmatch(r"[^/]*\.dist-info/licenses/LICENSE", name) for name in names)
    assert not [name for name in names if re.search(r"(^|/)(tests?|conftest\.py|__pycache__)(/|$)", name)]

    _run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", installed, wheel)
    where, version, requires, shape = fresh(
        """
        import importlib.metadata as metadata
        import torch
        import headwise as hw

        output, weights = hw.attention(*torch.randn(3, 1, 2, 5, 8))
        version, requires = metadata.version("headwise"), metadata.requires("headwise")
        answer([hw.__file__, version, requires, weights[0, 1].shape])
        """,
        path=installed,
        cwd=tmp_path,
    )
    assert Path(where).is_relative_to(installed)
    assert version == headwise.__version__
    assert [each for each in requires if "extra ==" not in each] == ["torch>=2.11"]
    assert shape == [5, 5]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_source_archive_holds_the_pages_sources_and_none_of_their_tools(tmp_path: Path) -> None:
    _run("-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, ROOT)
    (made,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "page" / "src").rglob("*") if path.is_file()}
    assert "page/src/explain/main.ts" in sources <= names
    assert {"page/build.mjs", "page/package.json", "src/headwise/show/page/explain.js"} <= names
    assert not [name for name in names if "node_modules" in name]


@pytest.mark.slow
def test_the_wheel_holds_the_built_in_model_and_is_small(wheel: Path) -> None:
    """In MB: its weights at most 14, all else of it 1.5."""
    room = "headwise/models/mini/"
    sizes = {
        file.filename.removeprefix(room): file.file_size / 1e6
        for file in zipfile.ZipFile(wheel).infolist()
        if file.filename.startswith(room)
    }
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= sizes.keys()
    assert sizes.pop("model.safetensors") <= 14 and sum(sizes.values()) <= 1.5
    assert wheel.stat().st_size / 1e6 <= 16


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_wheel_and_two_extras_draw_a_trained_model_without_a_network(wheel: Path, tmp_path: Path) -> None:
    """What a newcomer has after `pip install "headwise[cli,viz]"`, and nothing else."""
    torch_folder = torch_alone(tmp_path / "torch")
    environment = make(tmp_path / "bare", torch_folder, ["cli", "viz"], wheel=wheel)
    (place,) = environment.folder.glob("lib/python*/site-packages")
    (place / "sitecustomize.py").write_text(
        "import socket\n"
        "def refuse(*args, **options): raise SystemExit('the network was used')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
    )
    (home := tmp_path / "home").mkdir()
    done = environment.run("-I", str(environment.folder / "bin" / "headwise"), "look", cwd=home)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert done.stdout.startswith("mini reads") and done.stdout.endswith("Wrote heads.png\n")
    assert (home / "heads.png").read_bytes().startswith(b"\x89PNG")
    for code, message in (
        ("import socket; socket.getaddrinfo('localhost', 1)", "the network was used"),
        ("import transformers", "No module named 'transformers'"),
    ):
        assert message in environment.run("-I", "-c", code, cwd=home).stderr, "it would have been noticed"


def _run(*arguments: str | Path) -> None:
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# What the repository carries

PATHS_OF_A_MACHINE = re.compile(r"/(?<![\w.~-]/)(work|root|home|Users)(?=[/\s\"'`])")
TEMPORARY_PATHS = re.compile(r"/(?<![\w.~-]/)tmp/")
NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "common", "misc"}


def complaints(name: str, text: str) -> list[str]:
    """What is wrong with a file of the repository, by its name and by what it holds."""
    actual = [f"{name}: this name does not say what the file holds"] * any(
        part.partition(".")[0].strip("_").lower() in NAMES_THAT_SAY_NOTHING for part in Path(name).parts
    )
    patterns = [PATHS_OF_A_MACHINE] if name.startswith("tests/") else [PATHS_OF_A_MACHINE, TEMPORARY_PATHS]
    if not any(pattern.search(text) for pattern in patterns):  # nearly every file, at a tenth of the time
        return actual
    for number, line in enumerate(text.splitlines(), 1):
        if any(pattern.search(line) for pattern in patterns):
            actual.append(f"{name}:{number}: a path of one machine: {line.strip()[:80]}")
    return actual


def test_no_tracked_file_names_a_machine_or_says_nothing() -> None:
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("by design: what is tracked is only known in a git checkout")
    names = [name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]
    actual = [
        each for name in names for each in complaints(name, (ROOT / name).read_text("utf-8", errors="ignore"))
    ]
    assert actual == []


# Paths


MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(headwise.__path__, "headwise.")
    if not module.name.endswith("__main__")
)


def test_every_module_is_imported_by_its_path_both_ways() -> None:
    """`import headwise.check.report as r` once raised: the function `check` stood in the package's place."""
    for name in MODULES:
        parent, _, leaf = name.rpartition(".")
        names: dict[str, object] = {}
        exec(f"import {name} as by_path\nfrom {parent} import {leaf} as by_name", names)
        assert names["by_path"] is names["by_name"] is sys.modules[name], name


def test_no_two_modules_share_a_base_name() -> None:
    names = [name.rpartition(".")[2] for name in MODULES]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_no_package_has_the_name_of_a_public_function() -> None:
    functions = {name for name in headwise.__all__ if not isinstance(getattr(headwise, name), ModuleType)}
    folders = {path.parent.name for path in PACKAGE.rglob("__init__.py")} - {PACKAGE.name}
    assert sorted(functions & folders) == []


# Texts


def test_texts_name_only_files_that_are_there() -> None:
    """DESIGN drew rooms that had moved, and lists of rooms in packages outlived them."""
    listed = {
        path.name
        for folder in ("src", "tests", "benchmarks", "docs")
        for path in (ROOT / folder).rglob("*.py")
    }
    texts = {name: (ROOT / name).read_text("utf-8") for name in ("DESIGN.md", "README.md")}
    texts["CONTRIBUTING.md"] = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("\n## Recipes\n")[0]
    for path in (ROOT / "docs" / "log").glob("*.md"):  # how it works; what was tried may name files that went
        texts[path.name] = path.read_text("utf-8").partition("\n## What was tried")[0]
    texts |= {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in PACKAGE.rglob("__init__.py")}
    named = {(text, name) for text in texts for name in re.findall(r"[a-z_]+\.py\b", texts[text])}
    assert sorted((text, name) for text, name in named if name not in listed) == []


# The gate

# Importing hypothesis takes longest; pytest-benchmark, where a machine has it, warns of other processes.
ALONE = ("-p", "no:hypothesispytest", "-p", "no:benchmark")
SKIPS = {
    "missing": "import pytest\ndef test_it(): pytest.skip('no GPU here')",
    "missing_library": "import pytest\npytest.importorskip('a_library_nobody_has')\ndef test_it(): pass",
    "meant": "import pytest\ndef test_it(): pytest.skip('by design: CUDA only')",
    "known": "import pytest\n@pytest.mark.xfail(reason='known')\ndef test_it(): assert False",
    "fine": "def test_it(): pass",
}


@pytest.mark.parametrize(
    ("ci", "files", "listed"),
    [
        ("true", SKIPS, ["*test_missing.py::test_it: no GPU here", "*a_library_nobody_has*"]),
        ("true", ("meant", "known", "fine"), []),
        ("", SKIPS, []),
    ],
    ids=["CI-missing", "CI-meant", "at-home"],
)
def test_in_ci_a_skip_is_a_failure_unless_by_design(
    ci: str,
    files: Iterable[str],
    listed: list[str],
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CI", ci)
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text("utf-8"))
    pytester.makepyfile(**{f"test_{name}": SKIPS[name] for name in files})
    result = pytester.runpytest(*ALONE)
    assert result.ret == (pytest.ExitCode.TESTS_FAILED if listed else pytest.ExitCode.OK)
    if listed:
        result.stdout.fnmatch_lines_random(["*skipped tests are failures in CI*", *listed])
        result.stdout.no_fnmatch_line("*test_meant.py*by design*")


def chosen(pytester: pytest.Pytester, marker: str, ids: Iterable[str], run: str = "not slow") -> set[str]:
    """Return the cases that a test with that marker has in a run, by default the quick one."""
    pytester.makepyfile(
        f"import pytest\n@{marker}\n@pytest.mark.parametrize('x', {list(ids)})\ndef test_it(x): pass"
    )
    result = pytester.runpytest("--collect-only", "-q", "-m", run, *ALONE)
    return {line.partition("[")[2][:-1] for line in result.outlines if "::" in line}


@pytest.fixture
def _as_here(pytester: pytest.Pytester) -> None:
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text("utf-8"))
    pytester.makeini(
        "[pytest]\nmarkers =\n    slow: takes longer\n    full: one of many\n    thinned: by name"
    )


WORDS = [f"{word} {other}" for word in "causal padded windowed sparse".split() for other in "abcdefgh"]


@pytest.mark.usefixtures("_as_here")
def test_a_new_case_moves_no_other_in_or_out_of_the_quick_run(pytester: pytest.Pytester) -> None:
    """Every n-th case once stayed, by place: a case added in front exchanged all of them."""
    before = chosen(pytester, "pytest.mark.thinned", WORDS)
    assert 0.15 * len(WORDS) < len(before) < 0.55 * len(WORDS)  # about a third
    assert chosen(pytester, "pytest.mark.thinned", ["new", *reversed(WORDS)]) - {"new"} == before


@pytest.mark.usefixtures("_as_here")
def test_a_thinned_test_keeps_the_cases_it_names_and_never_loses_all(pytester: pytest.Pytester) -> None:
    assert chosen(pytester, "pytest.mark.thinned(keep=['padded b'])", WORDS) == {"padded b"}
    both = chosen(pytester, "pytest.mark.thinned(4, keep=['padded b'])", WORDS)
    assert both == chosen(pytester, "pytest.mark.thinned(4)", WORDS) | {"padded b"}
    assert len(chosen(pytester, "pytest.mark.thinned(10**9)", WORDS)) == 1


@pytest.mark.usefixtures("_as_here")
def test_the_slow_run_takes_its_share_of_the_cases_that_are_not_quick(pytester: pytest.Pytester) -> None:
    marker = "pytest.mark.thinned(4, slow=3)"
    runs = [chosen(pytester, marker, WORDS, run) for run in ("not slow", "slow and not full", "full")]
    assert set.union(*runs) == set(WORDS) and sum(map(len, runs)) == len(WORDS)
    slow, full = len(runs[1]), len(runs[2])
    assert 0.15 * (slow + full) < slow < 0.55 * (slow + full)  # about a third
