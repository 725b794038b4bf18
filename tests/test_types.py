"""What a user's type checker is told: the package carries its types (`py.typed`), and they say something."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import headwise

ROOT = Path(headwise.__file__).parents[2]
# Options of mypy that pyproject.toml leaves off for our own files. With all others as they are there, what
# `make lint` has found out of torch and headwise is supported, too: it takes a minute.
SOURCE = """
# mypy: disallow-untyped-calls, disallow-untyped-decorators, warn-return-any
from contextlib import AbstractContextManager
from typing import assert_type

import torch
from torch import Tensor, nn

import headwise as hw
from headwise.heads.collection import ShownTable
from headwise.heads.layer import Head, LayerHeads
from headwise.heads.layer_names import ByLayer
from headwise.listeners.chosen_heads import Changing
from headwise.listeners.head_outputs import HeadOutputs
from headwise.listeners.importance import Importance, Robustness
from headwise.listeners.pruning import Pruned

model: nn.Module = hw.MultiHeadAttention(8, 2)

with hw.watch(model) as heads:
    assert_type(heads, hw.Heads)
assert_type(heads[3], LayerHeads)
assert_type(heads["encoder.layer.3"], LayerHeads)
assert_type(heads[3, 1], Head)
assert_type(heads.get(3), LayerHeads | None)
assert_type([layer for layer in heads], list[int | str])
assert_type(heads.find("induction"), list[Head])
assert_type(heads.table(), ShownTable)
assert_type(heads[3].map, hw.AttentionMap)
assert_type(hw.load_heads("heads.safetensors"), hw.Heads)

with hw.collect(model) as outputs:
    assert_type(outputs, HeadOutputs)
assert_type(hw.collect(model), AbstractContextManager[HeadOutputs])
assert_type(outputs[-1], Tensor)
assert_type(outputs.path_of(3), str)
means = hw.head_means(model, [torch.zeros(1, 3, 8)])
assert_type(means, ByLayer[Tensor])

with hw.ablate(model, [(3, 1)], method="mean", means=means) as block:
    assert_type(block, Changing)
with hw.ablate(model, heads.find("induction")), hw.patch(model, {3: None}, {3: torch.zeros(1)}):
    pass
by_number, by_path = {3: torch.zeros(2, 4)}, {"encoder.layer.3": torch.zeros(2, 4)}
hw.ablate(model, {3: [1]}, method="mean", means=by_number)
hw.ablate(model, {"encoder.layer.3": [1]}, method="mean", means=by_path)
hw.patch(model, [(3, None)], by_number)
hw.ablate(model, [(3, 1)], how="mean")  # E: how

scores = hw.importance(model, [torch.zeros(1, 3, 8)])
assert_type(scores, Importance)
assert_type(scores["encoder.layer.3"], Tensor)
curve = hw.robustness(model, [torch.zeros(1, 3, 8)], points=[1, 2])
assert_type(curve, Robustness)
assert_type(curve.single, ByLayer[Tensor] | None)
pruned = hw.prune(model, scores.least(3))
assert_type(pruned, Pruned)
assert_type(pruned.heads[-1], list[int])
assert_type(hw.heads.induction(heads[3].map, torch.arange(3), method="mul"), Tensor)
assert_type(hw.check(nn.MultiheadAttention, d_model=12).ok, bool)
assert_type(hw.explain(model, torch.zeros(1, 3, 8), batch=0).text(batch=0), str)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_type_checker_knows_what_blocks_results_and_indices_are(tmp_path: Path) -> None:
    """`heads[3]`, `heads.table()` and what a block gives were Any to mypy; a dict by numbers was refused."""
    file = tmp_path / "of_a_user.py"
    file.write_text(SOURCE)
    requested = [sys.executable, "-m", "mypy", "--no-error-summary", str(file)]
    actual = subprocess.run(
        requested, cwd=ROOT, env={"MYPYPATH": "src", "PATH": ""}, capture_output=True, text=True,
    )  # fmt: skip
    refused = [number for number, line in enumerate(SOURCE.splitlines(), 1) if "# E:" in line]
    message = [line for line in actual.stdout.splitlines() if "error:" in line]
    assert actual.stderr == "" and len(message) == len(refused) == 1, actual.stdout + actual.stderr
    assert f":{refused[0]}: " in message[0] and '"how"' in message[0]
