"""Code that is right at one set of sizes and wrong at others; and code that only looks so."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from headwise.examiner import check, check_file
from headwise.examiner.examine import generality
from headwise.examiner.marking.template import Template
from headwise.examiner.source.likely_classes import plausible


class Plain(nn.Module):
    """Right. What follows changes one line of it."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.h, self.d = num_heads, d_model // num_heads
        self.q, self.k, self.v = (nn.Linear(d_model, d_model) for _ in range(3))
        self.out = nn.Linear(d_model, d_model)

    def split(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, self.h, self.d).transpose(1, 2)

    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(self.q(query)), self.split(self.k(key)), self.split(self.v(value))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d)
        if mask is not None:
            scores = scores.masked_fill(mask[:, None] == 0, -torch.inf)
        return self.out((self.weigh(scores) @ v).transpose(1, 2).flatten(2))


class FourHeads(Plain):
    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads)
        self.h, self.d = 4, d_model // 4


class LouderWithManyHeads(Plain):
    def weigh(self, scores: Tensor) -> Tensor:
        return (1.0 if self.h <= 4 else 1.3) * scores.softmax(-1)


class MaskOfFew(Plain):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(query, key, value, mask if key.shape[1] <= 8 else None)


class SeedInForward(Plain):
    def weigh(self, scores: Tensor) -> Tensor:
        torch.manual_seed(0)
        return scores.softmax(-1)


class PythonSeedInForward(Plain):
    def weigh(self, scores: Tensor) -> Tensor:
        random.seed(7)
        return scores.softmax(-1)


class WideWindow(Plain):
    """Right in its way: no key farther than 16 is seen."""

    def forward(self, x: Tensor, window_size: int = 16) -> Tensor:  # type: ignore[override]
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        at = torch.arange(x.shape[1])
        far = (at[:, None] - at).abs() >= window_size
        scores = (q @ k.transpose(-2, -1) / math.sqrt(self.d)).masked_fill(far, -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class FarAway(Plain):
    """Right in its way: what is farther than 20 positions counts less. No name says so."""

    def weigh(self, scores: Tensor) -> Tensor:
        at = torch.arange(scores.shape[-1])
        return torch.where((at[:, None] - at).abs() > 20, scores - 1.5, scores).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x)


class LateKeys(FarAway):
    """Wrong: from key 20 on, whichever query asks."""

    def weigh(self, scores: Tensor) -> Tensor:
        at = torch.arange(scores.shape[-1])
        return torch.where(at > 20, scores - 1.5, scores).softmax(-1)


class DrawsWhenBuilt(Plain):
    """Right, but for numbers of its own, drawn by Python in the constructor."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads)
        self.far = sorted(random.sample(range(8, 16), 4))

    def weigh(self, scores: Tensor) -> Tensor:
        shown = torch.zeros_like(scores, dtype=torch.bool)
        shown[..., [at for at in self.far if at < scores.shape[-1]]] = True
        return scores.masked_fill(shown, -torch.inf).softmax(-1)


class TurnsQueriesOnly(Plain):
    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        scores = self.turn(q, cos, sin) @ k.transpose(-2, -1) / math.sqrt(self.d)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.thinned(keep=["FourHeads-hard-coded heads", "LateKeys-wrong at other lengths"])
@pytest.mark.parametrize(
    ("made", "fault"),
    [
        (FourHeads, "hard-coded heads"),
        (LouderWithManyHeads, None),
        (MaskOfFew, "wrong at other lengths"),
        (SeedInForward, "seed set in forward"),
        (PythonSeedInForward, "seed set in forward"),
        (TurnsQueriesOnly, None),
        (LateKeys, "wrong at other lengths"),
    ],
)
def test_what_is_wrong_at_other_sizes_alone_is_wrong(made: type[nn.Module], fault: str | None) -> None:
    report = check(made)
    assert report.verdict == "wrong"
    assert fault is None or [named.key for named in report.faults] == [fault]


@pytest.mark.parametrize("made", [Plain, WideWindow])
@pytest.mark.parametrize("row", [*generality.FEWER_HEADS, *generality.MORE_HEADS])
def test_what_is_right_is_right_at_each_of_the_sizes_that_are_drawn(
    made: type[nn.Module], row: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generality, "FEWER_HEADS", (row,))
    monkeypatch.setattr(generality, "MORE_HEADS", (row,))
    report = check(made)
    assert report.verdict == "right", report.summary
    assert (made is WideWindow) == any("sliding window of 31" in words for words in report.not_judged)


def test_a_bias_by_distance_that_begins_far_away_is_no_fault() -> None:
    report = check(FarAway)
    assert report.verdict == "right", report.summary
    assert any("a bias by distance" in words for words in report.not_judged)


def test_what_a_constructor_draws_is_not_taken_for_state() -> None:
    report = check(DrawsWhenBuilt)
    assert "state kept between calls" not in [named.key for named in report.faults]


def test_a_function_takes_values_of_another_size_than_keys() -> None:
    def right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1) @ v

    def by_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1) / math.sqrt(v.shape[-1])).softmax(-1) @ v

    def as_wide(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1) @ v).reshape(q.shape)

    assert check(right).verdict == "right" and not check(right).remarks
    assert [named.key for named in check(by_values).faults] == ["wrong with wider values"]
    report = check(as_wide)
    assert report.verdict == "right" and [remark.key for remark in report.remarks] == [
        "values as wide as keys only"
    ]


def test_gradients_leave_what_a_function_closes_over_alone() -> None:
    layer = nn.Linear(24, 24)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return layer((q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1) @ v)

    check(attend)
    assert layer.weight.grad is None


HEAD = "import math\nimport torch\nfrom torch import nn\n\n\n"
CLASS = """class {name}(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h, self.d = num_heads, d_model // num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = (one.view(len(x), -1, {heads}, self.d).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        weights = (q @ k.transpose(-2, -1) / {scale}).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))
"""
UNDER_MAIN = """

if __name__ == "__main__":
    {}
"""


def written(name: str, heads: str = "self.h", scale: str = "math.sqrt(self.d)") -> str:
    return CLASS.format(name=name, heads=heads, scale=scale)


FROM_MAIN = written("MultiHeadAttention", "n").replace("self.d)", "x.shape[-1] // n)")


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (written("BuggyMultiHeadAttention", scale="1") + "\n\n" + written("MultiHeadAttention"), "right"),
        (written("MultiHeadAttention", scale="roott") + UNDER_MAIN.format("roott = torch.ones(1)"), "wrong"),
        (FROM_MAIN + UNDER_MAIN.format("n = 4"), "wrong"),
    ],
    ids=["a wrong one to compare with", "a tensor under main", "a size under main that is no argument"],
)  # fmt: skip
def test_a_file_is_judged_by_what_is_asked_for(
    text: str, verdict: str, tmp_path: Path, one_template: Template
) -> None:
    path = tmp_path / "mha.py"
    path.write_text(HEAD + text)
    assert check_file(path, template=one_template).verdict == verdict


def test_definitions_that_all_use_each_other_are_read_at_once() -> None:
    names = [f"f{i}" for i in range(14)]
    source = "\n".join(
        f"def {name}(x): return {' + '.join(f'{each}(x)' for each in names)}" for name in names
    )
    start = time.process_time()
    plausible(source)
    assert time.process_time() - start < 60  # by every path it would take years
