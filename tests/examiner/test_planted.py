"""The planted set is complete, and scripts that break are told where; `test_check.py` judges the modules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from headwise.examiner.marking.submissions import check_files
from headwise.examiner.marking.template import Template
from planted import (
    CRASHES,
    NO_FAULT,
    NOT_POSSIBLE,
    ONLY_WITH_CARRIED_WEIGHTS,
    PLANTED,
    RIGHT_NUMBERS,
    SAME_NUMBERS,
    STYLES,
)
from planted.broken import MESSAGES, SOURCES
from planted.pairs import LEFT_OUT, PAIRS

B, T, E, H = 3, 7, 24, 4
FAULTS = {each.fault for each in PLANTED}


def test_every_fault_is_in_every_style_or_cannot_be() -> None:
    assert len({(each.fault, each.style) for each in PLANTED}) == len(PLANTED)
    present = {(each.fault, each.style) for each in PLANTED} | set(NOT_POSSIBLE)
    assert {(fault, style) for fault in FAULTS for style in STYLES} == present
    for faults in (NO_FAULT, RIGHT_NUMBERS, CRASHES, ONLY_WITH_CARRIED_WEIGHTS, set().union(*SAME_NUMBERS)):
        assert set(faults) <= FAULTS


@pytest.mark.parametrize("style", STYLES)
def test_ten_faults_of_a_style_or_more_stand_alone(style: str) -> None:
    alone = [each.fault for each in PLANTED if each.style == style and each.make.__bases__ == (nn.Module,)]
    assert len(alone) >= 10


def test_all_pairs_of_ten_are_there_or_left_out() -> None:
    assert len(PAIRS) + len(LEFT_OUT) == 45
    assert len({pair.faults for pair in PAIRS} | set(LEFT_OUT)) == 45


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("group", SAME_NUMBERS, ids=min)
def test_faults_with_the_same_numbers_have_them(group: set[str]) -> None:
    """The score takes one for another, so no output may tell them apart."""
    inputs = torch.randn(3, B, T, E, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(T, T, dtype=torch.bool).tril().expand(B, T, T)

    def output(make: type[nn.Module], mask: Tensor | None) -> Tensor:
        torch.manual_seed(0)
        result = make(E, H).eval()(*inputs, None if mask is None else mask.clone())
        return result[0] if isinstance(result, tuple) else result

    makes = [each.make for each in PLANTED if each.fault in group and each.style == "separate"]
    assert len(makes) == len(group)
    for case_mask in (None, mask):
        expected = output(makes[0], case_mask)
        for make in makes[1:]:
            torch.testing.assert_close(output(make, case_mask), expected, equal_nan=True)


# Scripts that do not run

# No class is found, or a package is not installed.
NOT_JUDGED = {"no forward", "missing package"}


@pytest.mark.slow
def test_every_broken_script_is_told_the_line_it_breaks_at(tmp_path: Path, one_template: Template) -> None:
    files = [tmp_path / f"{number}.py" for number in range(len(SOURCES))]
    for file, source in zip(files, SOURCES.values(), strict=True):
        file.write_text(source, "utf-8")
    reports = dict(zip(SOURCES, check_files(files, template=one_template), strict=True))
    not_judged = {name: report.summary for name, report in reports.items() if report.verdict == "not judged"}
    assert set(not_judged) == NOT_JUDGED, not_judged
    assert not [name for name, report in reports.items() if report.ok]
    for name, (line, error, _) in MESSAGES.items():
        problems = [(problem.kind, problem.line) for problem in reports[name].problems]
        if error and name != "no forward":
            assert problems == [(error.replace("IndentationError", "SyntaxError"), line)], name
