"""The recipes of CONTRIBUTING.md, each followed to the letter on a copy of the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text("utf-8")

BLOCK = re.compile(
    r"^(?:In `(?P<file>[^`]+)`, (?P<where>below|above) `(?P<anchor>[^`]+)`"
    r"|New file `(?P<new>[^`]+)`|Try it):\n\n"
    r"```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Step:
    """One instruction: a file to make, or to add to beside a line; or code to be run (no file)."""

    file: str | None
    where: str | None  # "above" or "below" that line
    line: str | None
    code: str


def recipes(text: str) -> dict[str, list[Step]]:
    """The steps of every recipe, by its title."""
    _, _, rest = text.partition("\n## Recipes\n")
    rest, _, _ = rest.partition("\n## ")
    titled = re.split(r"^### (.+)$", rest, flags=re.MULTILINE)[1:]
    return {
        title: [Step(m["file"] or m["new"], m["where"], m["anchor"], m["code"]) for m in BLOCK.finditer(body)]
        for title, body in zip(titled[::2], titled[1::2], strict=True)
    }


RECIPES = recipes(TEXT)
MOST_FILES = {"A rule of the mask": 3, "A backend": 2}  # what they may touch, its test aside


def follow(step: Step, tree: Path) -> None:
    """Do what a step says."""
    assert step.file is not None
    path = tree / step.file
    if step.line is None:
        assert not path.exists(), f"{step.file} is there already"
        path.write_text(step.code, "utf-8")
        return
    lines = path.read_text("utf-8").splitlines(keepends=True)
    places = [i for i, line in enumerate(lines) if line.strip() == step.line]
    assert len(places) == 1, f"{step.file} has {len(places)} lines {step.line!r}"
    lines.insert(places[0] + (step.where == "below"), step.code)
    path.write_text("".join(lines), "utf-8")


def followed(title: str, tree: Path) -> Step:
    """A copy of the tree with a recipe followed; what to try at the end."""
    for folder in ("src", "benchmarks"):
        ignored = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignored)
    *changes, try_it = RECIPES[title]
    for step in changes:
        follow(step, tree)
    return try_it


def run(code: str, tree: Path) -> None:
    """Python in a fresh process, with that tree's package."""
    places = (tree / "src", tree, ROOT / "tests")
    (tree / "try_it.py").write_text(code, "utf-8")
    done = subprocess.run(
        [sys.executable, "try_it.py"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places)), "TRITON_INTERPRET": "1"},
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_works_to_the_letter(title: str, tmp_path: Path) -> None:
    run(followed(title, tmp_path).code, tmp_path)


def test_there_is_a_recipe_for_everything_that_is_added_often() -> None:
    assert list(RECIPES) == [
        "A statistic",
        "A rule of the mask",
        "A backend",
        "A family of models",
        "A fault of the examiner",
        "A verb of the command line",
        "A lesson",
        "A case of the benchmark",
    ]


@pytest.mark.parametrize("title", MOST_FILES)
def test_a_recipe_touches_few_files(title: str) -> None:
    assert len({step.file for step in RECIPES[title] if step.file}) <= MOST_FILES[title]


# What a rule must hold in once its recipe was followed: every engine, every way a map travels, the kernels.
EVERYWHERE = """
import pickle
from dataclasses import replace

import torch
import headwise as hw
from headwise import Mask, reference
from headwise.engines.gpu import launches
from headwise.heads.heads_files import pack, unpack
from judge import assert_judged
from second_pass_cases import numbers
from torch.utils._pytree import tree_map

B, H = 2, 3
for T, S in ((11, 13), (13, 11)):
    masks = (
        Mask.strided(3),
        Mask.strided(2) & Mask.causal() & Mask.padding([7, 11]),
        Mask.strided(2) & Mask.strided(3) & Mask.window(9),
    )
    assert repr(masks[2]) == "Mask(left=8, right=0, stride=6)"
    for mask in masks:
        truth = reference.allowed(mask, B, H, T, S)
        assert torch.equal(mask.full(T, S, B, H).expand(B, H, T, S), truth)
        case = replace(numbers(B, H, 1, T, S, 5), mask=mask)
        expected, p, _ = case.reference()
        for dtype in (torch.float64, torch.float32):
            plain, plain_p, _ = case.to(dtype).reference()
            c = case.to(dtype)
            for backend in ("auto", "tiles", "plain"):
                found, w = hw.attention(c.q, c.k, c.v, mask=mask, backend=backend)
                assert_judged(found, plain, expected, dtype=dtype, size=3.0)
                through_a_tree = tree_map(lambda x: x, w)
                through_a_file = unpack(*pack(w))
                for map in (w, pickle.loads(pickle.dumps(w)), through_a_tree, through_a_file):
                    assert_judged(map.dense(), plain_p, p, dtype=dtype, size=1.0)
                some = w.select(queries=[7, 2], heads=[1])
                mine, truly = (x[:, 1:2, [7, 2]] for x in (plain_p, p))
                assert_judged(some.dense(), mine, truly, dtype=dtype, size=1.0)
            lse = torch.ops.headwise.lse(*w.parts()[0].flatten())
            assert torch.equal(lse, hw.AttentionMap(c.q, c.k, mask=mask).lse)
            assert torch.equal(w.visible().expand(B, H, T), truth.sum(-1))
            on = torch.where(reference.allowed(Mask.strided(2), B, H, T, S), p, 0).sum(-1)
            assert_judged(w.mass(Mask.strided(2), per="query"), on, on, dtype=dtype, size=2.0)
q, k, v = (x.float() for x in (case.q, case.k, case.v))
for _ in range(3):  # the plan of calls with the same band is not for calls with the rule
    hw.attention(q[:, :, :S], k, v, causal=True)
for stride in (2, 3, 2, 3, 2, 3):
    mask = Mask.strided(stride) & Mask.causal()
    found = hw.attention(q[:, :, :S], k, v, mask=mask)[0]
    torch.testing.assert_close(found, reference.attention(q[:, :, :S], k, v, mask=mask)[0])
launches.INTERPRET = True
q, k, v = torch.randn(3, 1, 2, 131, 16).unbind(0)  # several tiles, among them such that see all of the band
for stride in (2, 3, 2, 3, 2, 3):
    mask = Mask.strided(stride) & Mask.causal()
    found = hw.attention(q, k, v, mask=mask, backend="triton")[0]
    torch.testing.assert_close(found, reference.attention(q, k, v, mask=mask)[0])
for T, S in ((11, 13), (13, 11)):  # more queries than keys: positions below 0
    case = replace(numbers(B, H, 1, T, S, 16), mask=masks[1]).to(torch.float32)
    truth, plain = case.to(torch.float64).reference()[1], case.reference()[1]
    w = hw.AttentionMap(case.q, case.k, mask=case.mask)
    assert_judged(w.dense(), plain, truth, dtype=torch.float32, size=1.0)
    assert_judged(w.mean_heads(), plain.mean(1), truth.mean(1), dtype=torch.float32, size=1.0)
"""


@pytest.mark.slow
def test_a_rule_added_by_its_recipe_holds_everywhere(tmp_path: Path) -> None:
    followed("A rule of the mask", tmp_path)
    run(EVERYWHERE, tmp_path)
