"""Public names are imported when they are first asked for: each way to ask, in a process of its own."""

from __future__ import annotations

import ast
import inspect
import os
import pickle
import subprocess
import sys
import textwrap
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

import headwise as hw
from headwise import examiner

ROOT = Path(hw.__file__).resolve().parents[1]
LAZY = [hw, hw.nn, hw.parallel, hw.models, hw.heads, examiner]

# Modules that the quick verbs of the command line and the start of the sandbox need.
WITHOUT_TORCH = [
    "byte_sizes", "cli.terminal", "course.lesson", "course.study", "errors",
    "examiner.checks", "examiner.marking.submissions", "examiner.marking.template",
    "examiner.sandbox.confine",
    "examiner.sandbox.run", "examiner.several_classes", "examiner.report_formats", "nn.presets",
    "show.tables", "show.texts", "whole_files",
]  # fmt: skip

# What torch must know of a map once its class is imported.
REGISTERED = """
def check_registered():
    import torch
    from torch.utils import _pytree
    from headwise.engines.statistics import Statistics
    from headwise.map import AttentionMap
    assert {AttentionMap, Statistics} <= set(_pytree.SUPPORTED_NODES)
    assert {AttentionMap, Statistics} <= set(torch.serialization.get_safe_globals())
    assert all(hasattr(torch.ops.headwise, name) for name in ("attend", "lse", "measure", "top", "weights"))
"""


def fresh(source: str, *arguments: str) -> str:
    """Run Python in a process of its own, where nothing is imported yet, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", REGISTERED + textwrap.dedent(source), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


class GivesAMap(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> object:
        return hw.attention(x, x, x)[1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a map saved by torch, a map and a module pickled, and an exported program."""
    folder = tmp_path_factory.mktemp("saved")
    q, k, v = torch.randn(3, 2, 3, 7, 5).unbind(0)
    weights = hw.attention(q, k, v)[1]
    torch.save(weights, folder / "map.pt")
    torch.save(weights.statistics(), folder / "statistics.pt")
    torch.export.save(torch.export.export(GivesAMap(), (q,)), folder / "program.pt2")
    (folder / "map.pickle").write_bytes(pickle.dumps(weights))
    (folder / "module.pickle").write_bytes(pickle.dumps(hw.MultiHeadAttention(6, 3)))
    return folder


# Without torch


def test_importing_headwise_and_what_needs_no_torch_loads_none() -> None:
    message = fresh(
        """
        import sys
        from importlib import import_module
        import headwise as hw

        for name in sys.argv[1:]:
            import_module(f"headwise.{name}")
        assert hw.__version__ and hw.errors.ArgumentError and hw.nn.presets.PRESETS
        assert set(hw.__all__) <= set(dir(hw)) and "Rope" in dir(hw.nn)
        assert not hasattr(hw, "nothing") and not hasattr(hw, "__wrapped__") and not hasattr(hw.nn, "_x")
        heavy = {"torch", "numpy", "matplotlib", "transformers"}
        print(sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
        """,
        *WITHOUT_TORCH,
    )
    assert message == "[]\n"


# The table of names


@pytest.mark.parametrize("package", LAZY, ids=lambda package: package.__name__)
def test_a_lazy_package_names_imports_and_finds_the_same(package: ModuleType) -> None:
    """Users read `__all__`, type checkers the imports, and `__getattr__` the table: they must agree."""
    tree = ast.parse(inspect.getsource(package))
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and "TYPE" in ast.unparse(node.test)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name for node in imports for alias in node.names} == set(package.__all__)
    modules = set(package.__all__) - set(package._HOMES)
    assert all(isinstance(getattr(package, name), ModuleType) for name in modules)
    for name, home in package._HOMES.items():
        assert getattr(package, name) is getattr(import_module(home, package.__name__), name)


def test_an_unknown_name_is_told_by_its_package() -> None:
    with pytest.raises(AttributeError, match="module 'headwise' has no attribute 'atention'"):
        _ = hw.atention  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"module 'headwise\.nn' has no attribute 'Ropes'"):
        _ = hw.nn.Ropes  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"module 'headwise\.examiner' has no attribute 'chek'"):
        _ = examiner.chek  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="two classes with opposite masks"):
        _ = hw.MultiheadAttention  # type: ignore[attr-defined]


# The doors


@pytest.mark.slow
def test_every_public_name_is_there_on_first_use() -> None:
    fresh(
        """
        from headwise import *
        import headwise
        check_registered()
        assert all(name in vars(headwise) for name in headwise.__all__)
        assert attention and nn.Rope and MultiHeadAttention.preset("qwen3-0.6b", device="meta").rope
        """
    )


@pytest.mark.slow
def test_with_torch_loaded_already_all_but_the_examiner_is_imported_at_once(saved: Path) -> None:
    fresh(
        """
        import torch, headwise, sys
        later = {name for name in headwise.__all__ if name not in vars(headwise)}
        assert later == {"check", "check_file", "explain"}, later
        check_registered()
        assert headwise.listeners.capture.watch is headwise.watch
        assert torch.load(sys.argv[1] + "/map.pt", weights_only=True).shape == (2, 3, 7, 7)
        """,
        str(saved),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "door",
    [
        "import headwise as hw; hw.attention",
        "from headwise import AttentionMap",
        "from headwise.map import AttentionMap as A; import headwise.map as m; assert m.AttentionMap is A",
        "import headwise.nn; headwise.nn.MultiHeadAttention",
        "import headwise.listeners.capture as c; import headwise; assert c.watch is headwise.watch",
        "import pickle; assert pickle.loads(read('map.pickle')).shape[2] == 7",
        "import pickle; assert pickle.loads(read('module.pickle')).num_heads == 3",
        "import headwise, torch; x = torch.randn(2, 3, 7, 5)\n"
        "def attend(x): return headwise.attention(x, x, x)[0]\n"
        "compiled = torch.compile(attend, fullgraph=True, backend='eager')(x)\n"
        "assert torch.equal(compiled, attend(x))",
    ],
)
def test_whoever_has_a_map_has_it_registered(door: str, saved: Path) -> None:
    read = "import pathlib, sys; read = lambda name: pathlib.Path(sys.argv[1], name).read_bytes()"
    fresh(f"{read}\n{door}\nassert 'torch' in sys.modules\ncheck_registered()", str(saved))


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_torch_reads_a_map_once_headwise_map_is_imported(saved: Path) -> None:
    """With headwise imported before torch and never used, torch does not know maps yet."""
    fresh(
        """
        import pickle, sys
        import headwise as hw
        import torch

        try:
            torch.load(sys.argv[1] + "/map.pt", weights_only=True)
        except pickle.UnpicklingError as error:
            assert "headwise.map.make" in str(error)
        else:
            raise AssertionError("a map was loaded by a torch that knows no map")
        import headwise.map

        check_registered()
        assert torch.load(sys.argv[1] + "/map.pt", weights_only=True).shape == (2, 3, 7, 7)
        assert torch.load(sys.argv[1] + "/statistics.pt", weights_only=True).entropy.shape == (2, 3)
        x = torch.randn(2, 3, 7, 5)
        weights = torch.export.load(sys.argv[1] + "/program.pt2").module()(x)
        assert isinstance(weights, hw.AttentionMap)
        assert torch.equal(weights.dense(), hw.attention(x, x, x)[1].dense())
        """,
        str(saved),
    )


@pytest.mark.slow
def test_threads_that_ask_for_names_at_once_all_get_them() -> None:
    fresh(
        """
        import sys, threading, headwise as hw
        sys.setswitchinterval(1e-6)
        doors = ["import torch; hw.watch", "hw.attention", "hw.nn.Rope", "hw.heads.label", "hw.Mask()",
                 "hw.Heads", "hw.models.load", "hw.adopt", "from headwise.map import AttentionMap"]
        doors += [f"hw.{name}" for name in hw.__all__]
        failed, start = [], threading.Barrier(len(doors))

        def open_door(door):
            start.wait()
            try:
                exec(door, {"hw": hw})
            except BaseException as error:
                failed.append((door, repr(error)))

        threads = [threading.Thread(target=open_door, args=(door,)) for door in doors]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert failed == [], failed
        check_registered()
        """
    )


@pytest.mark.slow
def test_a_torch_that_lacks_a_name_is_told_at_every_door() -> None:
    fresh(
        """
        import headwise as hw
        import torch
        from headwise import errors

        del torch._assert_async
        assert hw.check(torch.nn.MultiheadAttention).ok  # it needs none of these names
        for door in ("hw.attention", "hw.watch", "import headwise.map", "import headwise.nn.multihead"):
            try:
                exec(door, {"hw": hw})
            except errors.VersionUnsupported as error:
                assert "torch._assert_async" in str(error)
            else:
                raise AssertionError(door)
        """
    )
