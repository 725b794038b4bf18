"""Torch comes with the first use: every door that needs it, each in a process of its own."""

from __future__ import annotations

import ast
import inspect
import io
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise import first_use
from headwise.moved_modules import MOVED

ROOT = Path(hw.__file__).resolve().parents[1]

# What must be known to torch once anything of ours is used.
REGISTERED = """
def registered():
    import sys, torch
    from torch.utils import _pytree
    from headwise.map import AttentionMap
    assert AttentionMap in _pytree.SUPPORTED_NODES
    assert AttentionMap in torch.serialization.get_safe_globals()
    assert torch.ops.headwise.measure is not None
    assert not [finder for finder in sys.meta_path if "headwise" in repr(finder)], sys.meta_path
    import headwise
    assert all(name in vars(headwise) for name in headwise.__all__)
    assert headwise.AttentionMap is AttentionMap and headwise.listeners.capture.watch is headwise.watch

def read(name):
    import sys
    with open(f"{sys.argv[1]}/{name}.pickle", "rb") as file:
        return file.read()
"""


def fresh(source: str, *arguments: str) -> str:
    """What Python prints that is run in a process of its own, where nothing is imported yet."""
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
    """A map saved by torch, pickled, as what an exported program gives; a class pickled by its old path."""
    folder = tmp_path_factory.mktemp("saved")
    q, k, v = torch.randn(3, 2, 3, 7, 5).unbind(0)
    weights = hw.attention(q, k, v)[1]
    torch.save(weights, folder / "map.pt")
    torch.export.save(torch.export.export(GivesAMap(), (q,)), folder / "program.pt2")
    (folder / "map.pickle").write_bytes(pickle.dumps(weights))
    old = {new: path for path, new in MOVED.items()}["headwise.heads.layer_names"]
    name = "headwise.heads.layer_names\nByLayer"
    whole = pickle.dumps(hw.heads.layer_names.ByLayer, protocol=0).decode()
    assert name in whole
    (folder / "old.pickle").write_text(whole.replace(name, f"{old}\nByLayer"))
    return folder


# Before it is used


def test_importing_headwise_and_what_needs_no_torch_loads_none() -> None:
    said = fresh(
        """
        import sys
        import headwise as hw
        from headwise.first_use import LIGHT
        from importlib import import_module, util

        for name in LIGHT - {"show.fitted_tables"}:  # which is made of rich, where a table is made
            if util.find_spec(f"headwise.{name}") is not None:
                import_module(f"headwise.{name}")
        assert hw.__version__ and hw.errors.ArgumentError and hw.nn.presets.PRESETS
        assert set(hw.__all__) <= set(dir(hw)) and "Rope" in dir(hw.nn)
        assert not hasattr(hw, "nothing") and not hasattr(hw, "__wrapped__") and not hasattr(hw.nn, "_x")
        heavy = {"torch", "numpy", "matplotlib", "transformers"}
        print(sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
        """
    )
    assert said == "[]\n"


def test_the_list_of_light_modules_names_modules() -> None:
    at_hand = {name for name in first_use.LIGHT if first_use.is_light(f"headwise.{name}")}
    assert at_hand == first_use.LIGHT
    for name in first_use.LIGHT:
        place = ROOT / "headwise" / name.replace(".", "/")
        assert place.with_suffix(".py").is_file() or (place / "__init__.py").is_file(), name
    assert first_use.is_light("headwise.cli.terminal") and not first_use.is_light("headwise.map")


def test_what_the_package_imports_is_what_it_names() -> None:
    """Type checkers read the imports, users the list: neither may know what the other does not."""
    for package in (hw, hw.nn):
        tree = ast.parse(inspect.getsource(package))
        (block,) = [node for node in tree.body if isinstance(node, ast.If)]
        imported = {
            alias.asname or alias.name
            for node in block.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        assert {name for name in imported if not name.startswith("_")} == set(package.__all__)


def test_an_unknown_name_is_told_by_its_package() -> None:
    with pytest.raises(AttributeError, match="module 'headwise' has no attribute 'atention'"):
        _ = hw.atention  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"module 'headwise\.nn' has no attribute 'Ropes'"):
        _ = hw.nn.Ropes  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="one letter"):
        _ = hw.MultiheadAttention  # type: ignore[attr-defined]


# The doors


@pytest.mark.slow
def test_every_public_name_is_there_on_first_use() -> None:
    fresh(
        """
        from headwise import *
        registered()
        assert attention and nn.Rope and MultiHeadAttention.preset("qwen3-0.6b", device="meta").rope
        """
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "door",
    [
        "import headwise as hw; hw.listeners.capture",
        "from headwise.map import AttentionMap as A; import headwise.map as m; assert m.AttentionMap is A",
        "import headwise.nn.rotary as r; import headwise.nn; assert headwise.nn.Rope is r.Rope",
        "import pickle, sys; assert pickle.loads(read('map')).shape[2] == 7",
        "import pickle, sys, warnings, headwise; warnings.simplefilter('ignore')\n"
        "assert pickle.loads(read('old')).__name__ == 'ByLayer'",
    ],
)
def test_a_door_brings_everything_along(door: str, saved: Path) -> None:
    fresh(f"{door}\nregistered()", str(saved))


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_torch_knows_maps_as_soon_as_it_is_there(saved: Path) -> None:
    """Sorted imports have headwise before torch: nothing that torch reads or compiles may come too early."""
    fresh(
        """
        import sys
        import headwise as hw
        import torch

        assert type(torch.__spec__.loader).__name__ == "SourceFileLoader"
        assert "exec_module" not in vars(torch.__spec__.loader)
        assert torch.load(sys.argv[1] + "/map.pt", weights_only=True).shape == (2, 3, 7, 7)
        registered()

        @torch.compile(fullgraph=True, backend="eager")
        def first(x):
            return hw.attention(x, x, x)[0]

        x = torch.randn(2, 3, 7, 5)
        assert torch.equal(first(x), hw.attention(x, x, x)[0])
        weights = torch.export.load(sys.argv[1] + "/program.pt2").module()(x)
        assert isinstance(weights, hw.AttentionMap)
        assert torch.equal(weights.dense(), hw.attention(x, x, x)[1].dense())
        """,
        str(saved),
    )


@pytest.mark.slow
def test_threads_that_come_together_all_get_a_whole_package() -> None:
    fresh(
        """
        import threading, headwise as hw
        doors = ["import torch; hw.watch", "hw.attention", "hw.nn.Rope", "hw.listeners.capture", "hw.Mask()"]
        failed, start = [], threading.Barrier(3 * len(doors))

        def open_door(door):
            start.wait()
            try:
                exec(door, {"hw": hw})
            except BaseException as error:
                failed.append((door, repr(error)))

        threads = [threading.Thread(target=open_door, args=(door,)) for door in doors * 3]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert failed == [], failed
        registered()
        """
    )


@pytest.mark.slow
def test_a_torch_that_lacks_a_name_stays_usable_and_every_door_tells() -> None:
    fresh(
        """
        import sys, warnings
        import headwise as hw
        from headwise import errors

        class Older:
            def find_spec(self, name, path=None, target=None):
                torch = sys.modules.get("torch")
                if name == "headwise.private_names" and hasattr(torch, "_assert_async"):
                    del torch._assert_async

        sys.meta_path.insert(1, Older())
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            import torch
        assert [str(each.message)[:44] for each in told] == ["headwise cannot be used: torch must have tor"]
        for door in ("hw.attention", "from headwise.map import AttentionMap", "import headwise.nn.rotary"):
            try:
                exec(door, {"hw": hw})
            except errors.VersionUnsupported as error:
                assert "torch._assert_async" in str(error)
            else:
                raise AssertionError(door)
        """
    )


def test_a_pickle_of_today_names_todays_modules() -> None:
    written = io.BytesIO()
    pickle.dump((hw.attention, hw.nn.Rope), written)
    assert pickle.loads(written.getvalue()) == (hw.attention, hw.nn.Rope)
