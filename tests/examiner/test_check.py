"""`hw.check`: planted faults are named as themselves, right modules pass, reports say where and why."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headwise as hw
import planted
from check_score import judge_pair, judge_right, judge_single, judge_unstyled
from headwise.errors import ArgumentError
from headwise.examiner import check_file
from headwise.examiner.evidence import Conventions, Evidence, Finding, ProbeCall, Problem, Role
from headwise.examiner.marking.judge import Judge
from headwise.examiner.marking.template import Template
from headwise.examiner.recipe import ProbeInputs, Weights
from headwise.examiner.sandbox.verdicts import Outcome
from headwise.examiner.source.likely_classes import Cells
from planted import pairs, right, unstyled


def singles(style: str) -> list[planted.Planted]:
    return [single for single in planted.PLANTED if single.style == style]


@pytest.mark.thinned(99, keep=["no scale", "split by view"], slow=3)
@pytest.mark.parametrize("single", singles("separate"), ids=lambda single: single.fault)
def test_a_planted_fault_is_named_as_itself(single: planted.Planted) -> None:
    verdict = judge_single(single)
    assert verdict.ok, verdict.summary


@pytest.mark.thinned(0, slow=8)
@pytest.mark.parametrize(
    "single", singles("fused") + singles("einsum"), ids=lambda single: f"{single.style}-{single.fault}"
)
def test_a_planted_fault_is_named_as_itself_in_other_styles(single: planted.Planted) -> None:
    verdict = judge_single(single)
    assert verdict.ok, verdict.summary


@pytest.mark.thinned(99, keep=["no v projection", "causal only in evaluation", "heads in a list"], slow=2)
@pytest.mark.parametrize("case", unstyled.UNSTYLED, ids=lambda case: case[0])
def test_a_fault_beside_the_equations_is_named_and_nothing_else(case: tuple[str, type, str]) -> None:
    verdict = judge_unstyled(case)
    assert verdict.ok, verdict.summary


@pytest.mark.slow
@pytest.mark.parametrize("make", unstyled.RIGHT_TWINS)
def test_the_right_twin_of_a_fault_beside_the_equations_passes(make: type) -> None:
    report = hw.check(make, d_model=24, num_heads=4)
    assert report.ok, str(report)
    assert not report.faults


@pytest.mark.thinned(0, slow=3)
@pytest.mark.parametrize("pair", pairs.PAIRS, ids=lambda pair: "-".join(pair.faults))
def test_two_planted_faults_are_named_as_the_pair_or_one_of_them(pair: pairs.Pair) -> None:
    verdict = judge_pair(pair)
    assert verdict.ok, verdict.summary


@pytest.mark.thinned(99, keep=["four linears in a list", "widths"])
@pytest.mark.parametrize("style", right.RIGHT, ids=lambda style: style.style)
def test_a_right_module_passes(style: right.Right) -> None:
    verdict = judge_right(style)
    assert verdict.ok, verdict.summary


@pytest.mark.thinned(keep=["torch's"])
@pytest.mark.parametrize(
    "obj",
    [nn.MultiheadAttention, hw.nn.MultiheadAttention, hw.MultiHeadAttention(24, 4)],
    ids=["torch's", "ours in place of torch's", "ours"],
)
def test_torchs_class_and_ours_pass(obj: Any) -> None:
    assert hw.check(obj).ok


def test_a_report_says_where_it_is_right_and_where_it_parts() -> None:
    single = next(p for p in singles("separate") if p.fault == "scale by d_model")
    report = hw.check(single.make)
    assert not report.ok
    assert report.faults[0].line is not None
    assert "sqrt" in report.faults[0].text or "**" in report.faults[0].text
    assert report.first_wrong is not None
    assert report.first_wrong.startswith("the scaled scores")
    assert any("position 0" in words for words in report.where_right)  # one key needs no scale
    data = json.loads(report.to_json())
    assert data["ok"] is False
    assert "scale by d_model" in str(report)
    assert "scale by d_model" in report._repr_html_()


def test_a_constant_scale_comes_with_its_number() -> None:
    single = next(p for p in singles("einsum") if p.fault == "constant scale")
    (named,) = hw.check(single.make).faults
    assert named.number == pytest.approx(0.3) or named.number == pytest.approx(0.125)


def test_what_cannot_be_told_is_said() -> None:
    style = next(style for style in right.RIGHT if style.style == "unflatten and move")
    report = hw.check(style.build())
    assert any("come from the same input" in words for words in report.not_judged)


def test_something_that_is_no_code_is_refused() -> None:
    with pytest.raises(ArgumentError, match="obj must be a class, a module or a function: got 3"):
        hw.check(3)


def test_assert_attention_fails_with_the_name_of_the_mistake() -> None:
    hw.testing.assert_attention(nn.MultiheadAttention)
    single = next(p for p in singles("separate") if p.fault == "no scale")
    with pytest.raises(AssertionError, match="no scale"):
        hw.testing.assert_attention(single.make)


def test_evidence_comes_back_as_it_went(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = ProbeInputs(
        *(torch.randn(2, 3, 4, dtype=torch.float64) for _ in range(3)), torch.rand(2, 3, 3) < 0.5
    )
    weights = Weights(*(torch.randn(4, 4) for _ in range(4)), *(torch.randn(4) for _ in range(4)))
    evidence = Evidence(
        "M", "class", "m.py", "text", 3, 4, 2,
        Conventions(("x", "mask"), self_only=True, mask_kind="bool", words=["a"]),
        {"q": Role("W.weight", "names", True)}, weights,
        [
            ProbeCall("plain", inputs, inputs.query),
            ProbeCall("causal", inputs, problem=Problem("call", "E", "m", 7)),
        ],
        [Finding("f", "right", "d")], [Problem("import", "E", "m")],
    )  # fmt: skip
    evidence.save(tmp_path)
    back = Evidence.load(tmp_path)
    assert back.conventions == evidence.conventions
    assert back.roles == evidence.roles
    assert back.findings == evidence.findings
    assert back.problems == evidence.problems
    assert back.calls[1].problem == evidence.calls[1].problem
    assert torch.equal(back.calls[0].inputs.mask, inputs.mask)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(back.weights, weights, strict=True))  # type: ignore[arg-type]


def rows_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / q.shape[2] ** 0.5, -1) @ v  # right for [B, T, D] alone


def test_a_function_is_called_in_the_layout_it_is_right_in() -> None:
    assert hw.check(rows_of).ok


class Turned(nn.Module):
    """Attention with a position encoding."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.v_proj, self.o_proj = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def rope(self, x: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None]
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack(
            [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1
        ).flatten(-2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            each(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        heads = nn.functional.scaled_dot_product_attention(self.rope(q), self.rope(k), v)
        return self.o_proj(heads.transpose(1, 2).flatten(2))


@pytest.mark.slow
def test_a_rotation_by_position_is_right_within_its_design() -> None:
    report = hw.check(Turned)
    assert report.ok
    assert report.designs == ["a rotation by position (RoPE, pairs of neighbours, base 1)"]


def test_what_fails_in_half_precision_alone_is_a_remark() -> None:
    single = next(p for p in singles("separate") if p.fault == "overflow in half")
    report = hw.check(single.make)
    assert report.ok
    assert [named.key for named in report.remarks] == ["overflow in half"]
    assert "overflow in half" in str(report)


class Careless(nn.Module):
    """Right, with a layer that is never used."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.W_q, self.W_k = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.W_v, self.W_o = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.norm = nn.LayerNorm(d_model)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (
            each(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for each, x in ((self.W_q, query), (self.W_k, key), (self.W_v, value))
        )
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        weights = scores.softmax(-1)
        return self.W_o((weights @ v).transpose(1, 2).flatten(2)), weights


def test_a_layer_that_is_never_used_is_no_fault() -> None:
    report = hw.check(Careless)
    assert report.ok, str(report)
    assert any("norm" in words for words in report.not_judged)


def test_scores_that_are_returned_as_scores_are_a_remark() -> None:
    report = hw.check(unstyled.ScoresBeside)
    assert report.ok, str(report)
    (named,) = report.remarks
    assert named.key == "scores returned"
    assert "it returns the scaled scores with the output, not the weights" in named.detail


def test_a_cache_that_gives_what_all_at_once_gives_is_said_to() -> None:
    report = hw.check(unstyled.WithACache)
    assert report.ok, str(report)
    (finding,) = (finding for finding in report.findings if finding.name == "cache")
    assert (finding.verdict, finding.detail) == (
        "right",
        "the outputs step by step with its cache equal those of one call",
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (unstyled.CacheOfItsOwnKind, "kv_cache: not tried: besides the output it returned no value"),
        (unstyled.CacheForOneToken, "layer_past: of several new tokens in one call"),
        (
            unstyled.CacheThatCrashes,
            "layer_past: not judged: called with the cache that it returned, it raises",
        ),
    ],
)
def test_a_cache_that_cannot_be_judged_is_said_and_accused_of_nothing(make: type, words: str) -> None:
    report = hw.check(make)
    assert not report.faults
    assert any(reason.startswith(words) for reason in report.not_judged), report.not_judged


# Files

PAGE = """
import torch
import torch.nn as nn

class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.d_k = num_heads, d_model // num_heads
        self.W_q, self.W_k = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.W_v, self.W_o = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def split_heads(self, x):
        batch_size, seq_len, _ = x.size()
        return x.view(batch_size, seq_len, self.num_heads, self.d_k).transpose(1, 2)

    def forward(self, x, mask=None):
        q, k, v = self.split_heads(self.W_q(x)), self.split_heads(self.W_k(x)), self.split_heads(self.W_v(x))
        scores = q @ k.transpose(-2, -1) / self.d_k ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        attention = F.softmax(scores, dim=-1)
        output = attention @ v
        output = output.transpose(1, 2).contiguous().view(batch_size, seq_len, -1)
        return self.W_o(output), attention
"""
MENDED = PAGE.replace(
    "import torch.nn as nn", "import torch.nn as nn\nimport torch.nn.functional as F"
).replace("        q, k, v =", "        batch_size, seq_len, _ = x.size()\n        q, k, v =")


def written(folder: Path, source: str) -> Path:
    path = folder / "mha.py"
    path.write_text(textwrap.dedent(source))
    return path


def test_names_that_nothing_defines_are_found_before_running(tmp_path: Path, one_template: Any) -> None:
    report = check_file(written(tmp_path, PAGE), template=one_template)
    assert not report.ok
    assert {fault.title.split()[0] for fault in report.faults} >= {"F", "batch_size"}
    assert any("import torch.nn.functional as F" in fault.repair for fault in report.faults)
    assert report.protections == []  # nothing was run


@pytest.mark.slow
def test_the_mended_page_passes_and_a_wrong_scale_is_named_with_its_line(
    tmp_path: Path, one_template: Template
) -> None:
    report = check_file(written(tmp_path, MENDED), trust=True, template=one_template)
    assert report.ok, str(report)
    assert report.protections
    source = MENDED.replace("self.d_k ** 0.5", "(self.num_heads * self.d_k) ** 0.5")
    report = check_file(written(tmp_path, source), trust=True, template=one_template)
    assert [fault.key for fault in report.faults] == ["scale by d_model"]
    assert "scores" in report.faults[0].text


def test_what_is_no_python_is_said(tmp_path: Path, one_template: Any) -> None:
    report = check_file(written(tmp_path, "class A(:\n    pass"), template=one_template)
    assert not report.ok
    assert report.problems[0].kind == "SyntaxError"
    assert report.problems[0].line == 1


def test_a_file_that_is_not_there_is_a_users_mistake(tmp_path: Path, one_template: Any) -> None:
    with pytest.raises(ArgumentError, match=r"file must be readable: .*none\.py"):
        check_file(tmp_path / "none.py", template=one_template)
    with pytest.raises(ArgumentError, match=r"nothing in .* looks like attention"):
        check_file(written(tmp_path, "x = 1"), template=one_template)


def _judge(**outcome: Any) -> Judge:
    """Of a file that is right, and has ended like this."""
    judge = Judge("mha.py", None, MENDED, Cells(), None, [])
    assert judge.before_running() == "MultiHeadAttention"
    judge.outcome = Outcome(**outcome)
    return judge


def test_a_name_that_is_not_in_the_file_is_a_users_mistake() -> None:
    lacking = Problem("import", "ArgumentError", "name must be a class or function of mha: 'Nope'")
    with pytest.raises(ArgumentError, match="'Nope'"):
        _judge(problem=lacking).report(None)


def test_evidence_that_does_not_fit_together_is_a_verdict() -> None:
    inputs = ProbeInputs(*(torch.randn(1, 2, 3) for _ in range(3)))
    forged = Evidence(
        "M", "class", embed_dim="wide", num_heads=0, weights=Weights(*(torch.randn(2, 2),) * 8),  # type: ignore[arg-type]
        calls=[ProbeCall("plain", inputs, torch.randn(5))],
    )  # fmt: skip
    assert not _judge(evidence=forged).report(None).ok


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path, one_template: Any) -> None:
    path = tmp_path / "mha.py"
    path.write_bytes(b"\xef\xbb\xbf" + PAGE.encode())
    assert "undefined name" in check_file(path, template=one_template).summary
