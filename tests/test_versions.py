"""The versions headwise runs with: private names of torch and transformers, what is set up to test them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import nn

import headwise
import versions
from headwise import private_names
from headwise.errors import VersionUnsupported
from headwise.private_names import OF_OBJECTS, REPLACEABLE, TESTED, TORCH, TRANSFORMERS, can_reach
from small_models import gpt2

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(headwise.__file__).resolve().parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

# Private names


LISTED = TORCH | TRANSFORMERS | OF_OBJECTS | REPLACEABLE
# Without an underscore, and in nobody's documentation.
UNDOCUMENTED = ("torch.nn.modules.", "transformers.masking_utils.", "transformers.integrations.")
NAMED_TUPLES = {"_asdict", "_fields", "_replace"}  # documented, underscore and all
OURS = {"_adopted_by_headwise", "_convert_", "_initializing", "_layers", "_of", "_wrapping", "_DeadlockError"}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") and part != "_" for part in name.split("."))


Nodes = list[ast.AST]  # of one file


def imported(nodes: Nodes) -> dict[str, str]:
    """Local name -> what it stands for: by imports, and by `aten = torch.ops.aten`."""
    actual: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            actual |= {name.asname: name.name for name in node.names if name.asname}
            actual |= {name.name.partition(".")[0]: name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." if node.level else node.module
            actual |= {name.asname or name.name: f"{module}.{name.name}" for name in node.names}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            value = dotted(node.value)
            if value and value.partition(".")[0] == "torch":
                actual |= {name.id: value for name in node.targets if isinstance(name, ast.Name)}
    return actual


def dotted(node: ast.expr) -> str | None:
    """`a.b.c` as it is written; None where it does not begin with a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def theirs(nodes: Nodes, own: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name of what is not ours: in full where it begins at an import, else the last part alone."""
    names = imported(nodes)
    inside = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    pieces = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if id(node) in pieces:  # the end of a longer name
            continue
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.lineno, f"{node.module}.{name.name}") for name in node.names)
        elif isinstance(node, ast.Attribute):
            root, _, rest = (dotted(node) or "").partition(".")
            if root in names:
                if id(node) not in inside:
                    yield node.lineno, f"{names[root]}.{rest}"
            elif node.attr not in own:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.lineno, "" if node.value in own or node.value in OURS else node.value


def defined(files: Iterable[Nodes]) -> set[str]:
    """What the package itself defines: functions, classes, variables, attributes of self."""
    actual: set[str] = set()
    for node in chain.from_iterable(files):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            actual.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            actual.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            actual |= {node.attr} if dotted(node) in (f"self.{node.attr}", f"cls.{node.attr}") else set()
    return actual


def unlisted(sources: dict[str, str]) -> list[str]:
    """Private names of torch and transformers that are used and not in the list."""
    files = {file: list(ast.walk(ast.parse(source))) for file, source in sources.items()}
    own = defined(files.values())
    last = {name.rpartition(".")[2] for name in LISTED}
    actual = []
    for file, nodes in files.items():
        for line, name in theirs(nodes, own):
            if "." not in name:
                wrong = is_private(name) and name not in last | NAMED_TUPLES
            else:
                theirs_alone = name.startswith(("torch.", "transformers."))
                wrong = theirs_alone and (is_private(name) or name.startswith(UNDOCUMENTED))
                wrong = wrong and not any(
                    f"{name}.".startswith(f"{pattern}.") or pattern.startswith(f"{name}.")
                    for pattern in LISTED
                )
            if wrong:
                actual.append(f"{file}:{line}: {name}")
    return actual


@pytest.mark.slow
def test_every_private_name_that_is_used_is_listed() -> None:
    sources = {str(path.relative_to(PACKAGE)): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}
    assert len(sources) > 100
    assert unlisted(sources) == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\ntorch._C._new_thing()", "torch._C._new_thing"),
        (
            "import torch\naten = torch.ops.aten\naten._new_kernel.default()",
            "torch.ops.aten._new_kernel.default",
        ),
        ("from torch.nn.modules import activation as a\na.new", "torch.nn.modules.activation"),
        (
            "def f():\n    from transformers.masking_utils import new_mask",
            "transformers.masking_utils.new_mask",
        ),
        ("def f(module):\n    return module._hidden_hooks", "_hidden_hooks"),
        ("def f(module):\n    return getattr(module, '_hidden_hooks')", "_hidden_hooks"),
    ],
)
def test_a_new_private_name_is_noticed(source: str, name: str) -> None:
    assert [each.partition(": ")[2] for each in unlisted({"x.py": source})][:1] == [name]


def test_no_name_is_listed_that_nothing_uses() -> None:
    words: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        words |= set(re.findall(r"\w+", path.read_text("utf-8")) if path.stem != "private_names" else ())
    assert [name for name in LISTED if name.rpartition(".")[2] not in words] == []


@pytest.mark.parametrize("name", [*TORCH, *TRANSFORMERS, *REPLACEABLE])
def test_every_private_name_is_there(name: str) -> None:
    assert can_reach(name)


def test_objects_have_their_private_names() -> None:
    import transformers

    assert "_qkv_same_embed_dim" in vars(nn.MultiheadAttention(2, 1))
    assert hasattr(transformers.PretrainedConfig(), "_attn_implementation_internal")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_compiled_and_placed_objects_have_their_private_names() -> None:
    """In the slow run: the compiler and accelerate take seconds to import."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    compiled = torch.compile(nn.Linear(2, 3))
    assert hasattr(compiled, "_orig_mod")
    assert hasattr(torch.compile(lambda x: x), "_torchdynamo_orig_callable")
    alone = torch.compiler.disable(lambda x: x, reason="alone")
    assert alone._torchdynamo_disable is True and alone._torchdynamo_disable_msg == "alone"
    assert hasattr(add_hook_to_module(nn.Linear(2, 3), ModelHook()), "_old_forward")


@pytest.mark.slow
def test_a_name_that_torch_has_no_more_is_told_at_import() -> None:
    name = "torch._C._functorch.is_batchedtensor"
    done = subprocess.run(
        [sys.executable, "-c", f"import torch; del {name}; import headwise"],
        env={"PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    oldest, newest = TESTED["torch"]
    line = f"torch must have {name}, used for {TORCH[name]}: version {version('torch')} does not"
    advice = f"install a version tested with headwise, {oldest} to {newest}, such as"
    command = f'pip install "torch=={newest}.*", or update headwise'
    assert last == f"headwise.errors.VersionUnsupported: {line}; {advice} {command}"


def test_a_name_that_transformers_has_no_more_is_told_when_one_of_its_models_is_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import transformers

    monkeypatch.delattr(transformers.masking_utils, "eager_mask")
    private_names.check_transformers.cache_clear()
    try:
        with (
            pytest.raises(
                VersionUnsupported, match=r"must have transformers\.masking_utils\.eager_mask, used for"
            ),
            headwise.watch(gpt2()),
        ):
            pass
    finally:
        private_names.check_transformers.cache_clear()


# The supported range


def test_the_oldest_versions_tested_are_those_that_are_asked_for() -> None:
    assert versions.floors(PROJECT) == {name: oldest for name, (oldest, _) in TESTED.items()}


def test_the_oldest_versions_go_with_the_oldest_python_and_the_newest_with_every_python() -> None:
    environments_wanted = versions.environments(PROJECT, {"3.11": "a/python", "3.13": "b/python"})
    assert [each.name for each in environments_wanted] == ["oldest-3.11", "newest-3.11", "newest-3.13"]
    assert environments_wanted[0].pins == tuple(f"{name}=={oldest}" for name, (oldest, _) in TESTED.items())
    assert environments_wanted[2] == ("newest-3.13", "b/python", ("torch", "transformers"))
