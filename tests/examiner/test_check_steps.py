"""Single steps: found by what they are, right in every habit, and each mistake by its own name."""

import inspect
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as learners write it
from torch import Tensor, nn

import planted.steps
from headwise.examiner import Report, check
from headwise.examiner.dispatch import examine, judge
from headwise.examiner.evidence import Evidence
from headwise.examiner.steps import FAULT_GROUPS, FAULTS, step_of
from planted.steps import (
    RIGHT,
    WRONG,
    Parts,
    PreBlock,
    Unscaled,
    Whole,
    causal_mask,
    softmax_over_rows,
    softmax_without_maximum,
    split_heads,
    split_heads_viewed,
    transpose_qkv,
)


def checked(code: Any) -> Report:
    """The same as `check`, which would read all of this file each time."""
    definitions = vars(planted.steps) | globals()
    owner: Any = (
        code if isinstance(code, type) else definitions.get(code.__qualname__.partition(".")[0], code)
    )
    parts = owner.__mro__ if isinstance(owner, type) else (owner,)
    own = [part for part in parts if part.__module__ in (__name__, planted.steps.__name__)]
    return judge(examine(code, source="\n".join(inspect.getsource(part) for part in own)))


QUICK = {"PreBlock", "DecoderLayer", "LostBlock", "NormedBlock", "OwnSoftmax", "attention_weights"}


def cases(table: list[tuple[Any, str]]) -> list[Any]:
    """Blocks, and what is examined as a whole attention, take a tenth of a second and more: most are slow."""
    cases_of_all = []
    for code, words in table:
        name = code.__qualname__
        heavy = isinstance(code, type) or {"q", "k"} <= set(inspect.signature(code).parameters)
        marks = [pytest.mark.slow] if heavy and name not in QUICK else []
        cases_of_all.append(pytest.param(code, words, id=name, marks=marks))
    return cases_of_all


@pytest.mark.parametrize(("code", "words"), cases(RIGHT))
def test_a_right_step_passes_and_is_told_what_it_is(code: Any, words: str) -> None:
    report = checked(code)
    assert report.ok and report.verdict == "right", str(report)
    texts = [report.summary, *report.conventions.words, report.beside]
    assert any(words in each for each in texts), texts


@pytest.mark.parametrize(("code", "fault"), cases(WRONG))
def test_a_wrong_step_is_named(code: Any, fault: str) -> None:
    report = checked(code)
    assert [named.key for named in report.faults] == [fault], str(report)
    assert not report.ok and report.judged


def test_every_fault_of_a_step_is_planted() -> None:
    own = {fault.key for group in FAULT_GROUPS.values() for fault in group if not fault.remark}
    assert own <= {fault for _, fault in WRONG}
    assert own <= set(FAULTS)


def softmax_of_far_rows(x):
    e = torch.exp(x - x.max())
    return e / e.sum(-1, keepdim=True)


class OnceBlock(Parts):
    """attn, ff"""

    def forward(self, x):
        x = x + self.attend(self.ln1(x))
        return x + self.ff(self.ln1(x))


class BareBlock(Parts):
    """attn, ff"""

    def forward(self, x):
        x = x + self.attend(x)
        return x + self.ff(x)


@pytest.mark.parametrize(
    ("code", "remark"),
    [
        (softmax_of_far_rows, "own softmax subtracts one maximum for all"),
        pytest.param(OnceBlock, "one norm for two parts", marks=pytest.mark.slow),
        (BareBlock, "block without norms"),
    ],
)
def test_what_works_and_is_unwise_is_a_remark(code: Any, remark: str) -> None:
    report = checked(code)
    assert report.ok and [named.key for named in report.remarks] == [remark]


def masked_softmax(x, valid_lens):
    return x


def split_heads_of_another_width(x, num_heads):
    return x.view(x.size(0), -1, num_heads, 64).transpose(1, 2)


def make_mask(thing, other, third):
    return torch.ones(2, 2)


class StrangeBlock(Parts):
    """attn, ff"""

    def forward(self, x):
        x = 0.5 * x + self.attend(self.ln1(x)).sin()
        return x + self.ff(self.ln2(x))


@pytest.mark.parametrize(
    "code",
    [
        masked_softmax,
        split_heads_of_another_width,
        make_mask,
        pytest.param(StrangeBlock, marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_called_or_followed_is_not_judged(code: Any) -> None:
    report = checked(code)
    assert report.verdict == "not judged" and not report.faults
    assert report.tried or report.problems or report.not_judged


def test_several_explanations_are_told_as_one_and_the_others_beside_it() -> None:
    def causal_mask_below(n: int) -> Tensor:
        return torch.tril(torch.ones(n, n), -1).bool()

    report = check(causal_mask_below)
    assert [fault.key for fault in report.faults] == ["mask hides the position itself"]
    assert report.alike == ["mask shows the future"]


def test_a_repair_speaks_the_learners_names_and_repairs() -> None:
    report = checked(transpose_qkv)
    assert report.ok
    repair = checked(Whole.split_heads_viewed).faults[0].repair
    assert repair.startswith("return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)")
    space: dict[str, Any] = {"torch": torch}
    body = checked(softmax_without_maximum).faults[0].repair.replace("\n", "\n    ")
    exec(f"def softmax_mended(x):\n    {body}", space)
    assert check(space["softmax_mended"]).ok


@pytest.mark.parametrize(
    ("obj", "name", "step"),
    [
        (split_heads, "split_heads", "split heads"),
        (Whole.merge_heads, "merge_heads", "merge heads"),
        (PreBlock, "PreBlock", "block"),
        (Unscaled, "Unscaled", None),
        (Parts, "Parts", None),
        (F.scaled_dot_product_attention, "scaled_dot_product_attention", None),
        (F.softmax, "softmax", "softmax"),
        (torch.nn.TransformerEncoderLayer, "TransformerEncoderLayer", "block"),
    ],
)
def test_a_step_is_found_by_its_name_and_what_it_takes(obj: Any, name: str, step: str | None) -> None:
    assert step_of(obj, name, Path(planted.steps.__file__).read_text("utf-8")) == step


@pytest.mark.slow
def test_torchs_own_layers_are_right_blocks() -> None:
    assert check(nn.TransformerEncoderLayer(24, 4)).ok
    assert check(nn.TransformerDecoderLayer(24, 4, norm_first=True)).ok


@pytest.mark.slow
def test_the_verdict_needs_nothing_but_what_was_written_down(tmp_path: Path) -> None:
    for number, code in enumerate((split_heads_viewed, PreBlock, causal_mask, softmax_over_rows)):
        evidence = examine(code, source=inspect.getsource(code) + inspect.getsource(Parts))
        folder = tmp_path / str(number)
        folder.mkdir()
        evidence.save(folder)
        direct, reloaded = judge(evidence), judge(Evidence.load(folder))
        assert (direct.ok, direct.summary) == (reloaded.ok, reloaded.summary)


class Head(nn.Module):
    def __init__(self, n_embd, head_size, block_size):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))

    def scale(self, C, D):
        return D**-0.5

    def forward(self, x):
        B, T, C = x.shape
        q, k = self.query(x), self.key(x)
        w = q @ k.transpose(-2, -1) * self.scale(C, k.shape[-1])
        return F.softmax(w.masked_fill(self.tril[:T, :T] == 0, float("-inf")), -1) @ self.value(x)


class WideHead(Head):
    def scale(self, C, D):
        return C**-0.5


@pytest.mark.slow
def test_one_head_is_told_as_one_head() -> None:
    report = checked(Head)
    assert report.ok and "one head" in report.summary and "always causal" in str(report)
    assert [fault.key for fault in checked(WideHead).faults] == ["scale by d_model"]


def test_a_function_of_q_k_v_is_compared_with_torchs_function() -> None:
    def scaled_dot_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).softmax(-1) @ v

    report = check(scaled_dot_product)
    assert report.ok and re.search(r"functional\.scaled_dot_product_attention", report.summary)
    assert "MultiheadAttention" not in str(report)


@pytest.mark.slow
def test_forward_of_a_class_is_the_class() -> None:
    assert [fault.key for fault in checked(Unscaled.forward).faults] == ["no scale"]


def test_a_method_whose_class_is_out_of_reach_is_not_judged() -> None:
    class Hidden:
        def split_heads(self, x: Tensor) -> Tensor:
            return x

    report = check(Hidden.split_heads)
    assert report.verdict == "not judged" and "pass instance.split_heads" in str(report)
    assert [fault.key for fault in check(Whole(24, 4).split_heads_viewed).faults] == ["heads split by view"]
