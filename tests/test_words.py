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
PUBLIC = {  # names that users' scripts read, and fakes of them
    ("src/headwise/heads/roles.py", "found"),
    ("src/headwise/listeners/role_measurement.py", "found"),
    ("src/headwise/models/specialised_heads.py", "found"),
    ("src/headwise/functional.py", "Why"),
    ("src/headwise/functional.py", "asked"),
    ("src/headwise/functional.py", "how"),
    ("src/headwise/functional.py", "why"),
    ("src/headwise/examiner/faults/fault.py", "why"),
    ("src/headwise/examiner/report.py", "how"),
    ("src/headwise/examiner/report.py", "why"),
    ("src/headwise/nn/cache.py", "seen"),
    ("tests/listeners/test_role_effects.py", "found"),
    ("tests/routes.py", "taken"),  # other words in test_routes.py would draw other cases
}
FOLDERS = ("src", "tests", "benchmarks", "studies")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
PATTERNS = (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)


def bound_names(source: str) -> Iterator[str]:
    """Yield every name that a module binds: assignments, arguments, functions, classes, fields, aliases."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                yield node.id
        elif isinstance(node, ast.Attribute):
            if isinstance(node.ctx, ast.Store):
                yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, DEFINITIONS):
            yield node.name
        elif isinstance(node, ast.alias) and node.asname is not None:
            yield node.asname
        elif isinstance(node, PATTERNS) and node.name is not None:
            yield node.name


def banned_names(source: str) -> set[str]:
    """Return the names a module binds that are banned, whatever their case and underscores around them."""
    return {name for name in bound_names(source) if name.strip("_").lower() in BANNED}


def modules() -> list[str]:
    return sorted(
        file.relative_to(ROOT).as_posix() for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")
    )


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("one = 1", "one"),
        ("def f(said): ...", "said"),
        ("self.kept = 1", "kept"),
        ("class Told: ...", "Told"),
        ("_how: int", "_how"),
        ("ASKED = ()", "ASKED"),
        ("[found for found in rows]", "found"),
        ("import a as given", "given"),
        ("try: ...\nexcept OSError as known: ...", "known"),
        ("match x:\n    case [*seen]: ...", "seen"),
    ],
)
def test_a_banned_name_is_noticed_wherever_it_is_bound(source: str, name: str) -> None:
    assert banned_names(source) == {name}


def test_every_folder_of_code_is_read() -> None:
    files = modules()
    assert {file.partition("/")[0] for file in files} == set(FOLDERS) and "src/headwise/map.py" in files


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_name_is_a_pronoun_a_participle_or_a_question_word(folder: str) -> None:
    banned = {
        (file, name)
        for file in modules()
        if file.startswith(f"{folder}/")
        for name in banned_names((ROOT / file).read_text("utf-8"))
    }
    assert banned == {entry for entry in PUBLIC if entry[0].startswith(f"{folder}/")}


def test_no_module_is_called_by_a_metaphor() -> None:
    files = [*SOURCE.rglob("*.py"), *PAGE.rglob("*.ts")]
    paths = (file.relative_to(ROOT) for file in files)
    words = {
        path.as_posix(): {part for step in path.parts[2:] for part in Path(step).stem.split("_")}
        for path in paths
    }
    assert {path for path, parts in words.items() if parts & METAPHORS} == set()
