"""What is added by one entry, added: each recipe is followed word for word on a copy of the source.

A recipe names its files; this file is the one more in which the addition is tested.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import headwise

PACKAGE = Path(headwise.__file__).resolve().parent
TESTS = Path(__file__).resolve().parent

# file -> steps: where, beside which text that is there once, what; "after" is after its line
Recipe = dict[str, list[tuple[str, str, str]]]

# A mask rule: its entry (class, place in RULES, field, constructor), the truth, the kernels' line.
STRIDE: Recipe = {
    "masks.py": [
        ("before", "from collections.abc import Sequence", "import math\n"),
        (
            "before",
            "class Dense(Rule[",
            '''class Stride(Rule["Mask"]):
    """Only keys a whole number of strides away."""

    fields: ClassVar[Fields] = {"stride": ""}

    def join(self, a: Mask, b: Mask) -> dict[str, Any]:
        if a.stride is None or b.stride is None:
            return {"stride": b.stride if a.stride is None else a.stride}
        return {"stride": math.lcm(a.stride, b.stride)}

    def tile(self, mask: Mask, at: Tensor, rows: Index, columns: Index, spots: Tensor) -> Tensor:
        return (at[:, None] - spots) % mask.stride == 0


''',
        ),
        ("instead", "Documents(), Dense())", "Documents(), Dense(), Stride())"),
        (
            "after",
            "    allowed: Tensor | None = None",
            "    stride: int | None = None  # only its multiples away\n",
        ),
        (
            "before",
            "    @classmethod\n    def dense(",
            '''    @classmethod
    def strided(cls, stride: int) -> Mask:
        """Every `stride`-th key, counted from the query's own position."""
        return cls(stride=whole_number(stride, "stride"))

''',
        ),
    ],
    "reference.py": [
        (
            "before",
            "    if mask.left is not None:",
            "    if mask.stride is not None:\n        seen &= (i - j) % mask.stride == 0\n",
        ),
    ],
    "engines/gpu/tile.py": [
        ("after", "    lengths: Tensor | None = None", "    stride: int | None = None\n"),
        (
            "before",
            "    if rules.allowed is not None:",
            "    if rules.stride is not None:\n        seen = seen & ((at - cols) % rules.stride == 0)\n",
        ),
    ],
}

# A statistic: its entry. One without a kernel runs on tiles, and says so.
SAMENESS: Recipe = {
    "engines/statistics.py": [
        (
            "before",
            'RECEIVED, PICTURE = "received", "pooled"',
            '''@statistic(squares=Accumulator("all", lambda tile, reach: tile.p.square().sum(-1)))
def sameness(block: Block, sums: Sums) -> Tensor:
    """sum_j p_ij^2: the chance that two keys drawn by weight are one."""
    return sums["squares"]


''',
        ),
    ],
}


def followed(recipe: Recipe, folder: Path) -> None:
    """The package with a recipe followed, in a folder."""
    package = folder / "headwise"
    if not package.exists():
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    for file, steps in recipe.items():
        source = (package / file).read_text()
        for where, there, what in steps:
            assert source.count(there) == 1, f"{file} must hold once: {there!r}"
            if where == "after":
                there += source.partition(there)[2].partition("\n")[0] + "\n"
            new = {"before": what + there, "after": there + what, "instead": what}[where]
            source = source.replace(there, new)
        (package / file).write_text(source)


def run(source: str, folder: Path) -> None:
    """Python in a fresh process, with the package of that folder."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        env=dict(os.environ) | {"PYTHONPATH": f"{folder}{os.pathsep}{TESTS}", "TRITON_INTERPRET": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_a_mask_rule_is_an_entry_its_truth_and_its_kernel_line(tmp_path: Path) -> None:
    assert len(STRIDE) + 1 <= 4  # with its test
    followed(STRIDE, tmp_path)
    run(
        """
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

        B, H, T, S = 2, 3, 11, 13
        masks = (
            Mask.strided(3),
            Mask.strided(2) & Mask.causal() & Mask.padding([7, 13]),
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
        launches.INTERPRET = True
        case = replace(numbers(B, H, 1, T, S, 16), mask=masks[1]).to(torch.float32)
        truth, plain = case.to(torch.float64).reference()[1], case.reference()[1]
        w = hw.AttentionMap(case.q, case.k, mask=case.mask)
        assert_judged(w.dense(), plain, truth, dtype=torch.float32, size=1.0)
        assert_judged(w.mean_heads(), plain.mean(1), truth.mean(1), dtype=torch.float32, size=1.0)
        """,
        tmp_path,
    )


def test_a_statistic_is_an_entry(tmp_path: Path) -> None:
    followed(SAMENESS, tmp_path)
    run(
        """
        import torch
        import headwise as hw
        from judge import assert_judged
        from second_pass_cases import numbers

        case = numbers(2, 3, 1, 11, 13, 5)
        truth = case.reference()[1].square().sum(-1)
        w = hw.AttentionMap(case.q, case.k)
        for per, expected in (("query", truth), ("head", truth.mean(-1))):
            found = w.statistics(per=per).sameness
            assert_judged(found, expected, expected, dtype=torch.float64, size=1.0)
        assert w.statistics().formula("sameness").startswith("sum_j p_ij^2")
        """,
        tmp_path,
    )
