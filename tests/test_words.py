"""Names in the source: pronouns, participles, question words and metaphors are not names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "headwise"
PAGE = ROOT / "page" / "src"
BANNED = frozenset(
    "one another said told tells says met known found kept given seen asked taken here there what how why "
    "who whose".split()
)
METAPHORS = frozenset(
    "counsel desk door doors ear floors house judging loans partings posts rooms running turns answers "
    "kept together".split()
)
PUBLIC = {  # names that users' scripts read
    ("heads/roles.py", "found"),
    ("listeners/role_measurement.py", "found"),
    ("models/specialised_heads.py", "found"),
    ("functional.py", "why"),
}
EXCLUDED = (  # names here are being replaced: remove an entry when it is clean
    "arguments.py", "budget.py", "cli/check_verb.py", "engines/backend", "engines/fused.py", "engines/gpu/",
    "engines/plain.py", "examiner/examine/", "examiner/faults/fault.py", "examiner/report.py",
    "examiner/sandbox/", "examiner/source/promises.py", "functional.py", "map.py", "mask_meaning.py",
    "masks.py", "nn/as_torch/", "nn/cache.py", "nn/module_call.py", "nn/presets.py",
)  # fmt: skip


def bound_names(source: str) -> Iterator[str]:
    """Yield every name that a module binds: assignments, arguments, functions, classes and fields."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def modules() -> list[str]:
    files = (file.relative_to(SOURCE).as_posix() for file in SOURCE.rglob("*.py"))
    return sorted(file for file in files if not file.startswith(EXCLUDED))


@pytest.mark.parametrize(
    "banned", ["one = 1", "def f(said): ...", "self.kept = 1", "class told: ...", "_how: int"]
)
def test_a_banned_name_is_noticed_wherever_it_is_bound(banned: str) -> None:
    assert {name.strip("_") for name in bound_names(banned)} & BANNED


@pytest.mark.parametrize("file", modules())
def test_no_name_is_a_pronoun_a_participle_or_a_question_word(file: str) -> None:
    names = {name for name in bound_names((SOURCE / file).read_text("utf-8")) if name.strip("_") in BANNED}
    assert names - {name for path, name in PUBLIC if path == file} == set()


def test_no_module_is_called_by_a_metaphor() -> None:
    files = [*SOURCE.rglob("*.py"), *PAGE.rglob("*.ts")]
    paths = (file.relative_to(ROOT) for file in files)
    words = {
        path.as_posix(): {part for step in path.parts[2:] for part in Path(step).stem.split("_")}
        for path in paths
    }
    assert {path for path, parts in words.items() if parts & METAPHORS} == set()
