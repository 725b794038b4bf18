"""`Report`: the verdict of `check`, printed, shown in a notebook, or as JSON for graders.

This module does not import torch, so a report can be printed in a process without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .faults.fault import Fault


def line_in_words(line: int | None, cell: int | None = None) -> str:
    """Return "line 5", or in a notebook "cell 3, line 5"."""
    return f"line {line}" if cell is None else f"cell {cell}, line {line}"


def largest_difference(error: float) -> str:
    """Return "largest difference 3e-16"; 0 without an exponent."""
    return f"largest difference {error:.0e}" if error else "largest difference 0"


@dataclass
class Problem:
    """An exception of the learner's code, or a reason why it could not be run."""

    stage: str  # "import", "build", "call", "backward", "limits"
    kind: str  # the exception's class, or a word such as "timeout"
    message: str
    line: int | None = None  # the last line of the traceback in the learner's file
    probe: str | None = None
    cell: int | None = None  # of a notebook; then the line is counted in it
    shapes: dict[str, list[int]] = field(default_factory=dict)  # of the tensors at that line, by variable
    no_output: bool = False  # of the kind "shape": heads were not merged, or None was returned


@dataclass
class Role:
    """The parameter of one projection."""

    parameter: str  # "W_q.weight", "heads.0.key.weight and 3 more", "qkv.weight[0:24]"
    how: str  # "names", "calls", "gradients", "given"
    transposed: bool = False  # stored as [in, out]
    path: str = ""  # of the parameter, or the first of several: "qkv.weight"
    start: int | None = None  # its first row in a larger parameter

    def __post_init__(self) -> None:
        self.path = self.path or self.parameter


@dataclass
class Conventions:
    """How the learner's code is called."""

    arguments: tuple[str, ...] = ()  # the roles of forward's parameters in order: query, key, value, x, mask
    self_only: bool = False  # one input for queries, keys and values
    batch_first: bool = True
    mask_argument: str | None = None
    mask_kind: str | None = None  # "bool", "0 and 1", "added"
    mask_true_attends: bool | None = None
    mask_shape: str | None = None  # "[B, 1, T, S]", "[B, T, S]", "[T, S]", "[B, S]", "[B, 1, 1, S]"
    always_causal: bool = False
    returns_weights: bool = False
    words: list[str] = field(default_factory=list)  # the conventions as sentences, for the report


@dataclass
class Finding:
    """The result of one check beside the numbers, such as "input left unmodified"."""

    name: str
    verdict: str  # "right", "wrong", "unknown"; once judged also "remark"
    detail: str  # a sentence
    fault: str | None = None  # the key of the fault, if it is one
    line: int | None = None
    cell: int | None = None
    parts: list[str] = field(default_factory=list)  # the parameters and inputs that it is about


@dataclass
class Named:
    """A fault that explains what the code computes, with its texts."""

    key: str
    title: str
    formula: str
    right: str
    hints: tuple[str, str, str]
    why: str
    repair: str
    detail: str = ""  # the evidence: "your output equals ... (largest difference 3e-16)"
    line: int | None = None
    text: str = ""  # that line
    number: float | None = None  # where a number was fitted
    cell: int | None = None  # of a notebook; then the line is counted in it
    tried: bool | None = None  # whether the file passed with the repair; None if it was not tried

    @classmethod
    def of(cls, fault: Fault, detail: str, line: int | None = None, text: str = "") -> Named:
        """Return a fault with its texts from the library."""
        return cls(
            fault.key, fault.title, fault.formula, fault.right, fault.hints, fault.why, fault.repair, detail,
            line, text,
        )  # fmt: skip


@dataclass
class Other:
    """Another class or function of the same file that looks like attention."""

    name: str
    line: int | None
    cell: int | None = None  # of a notebook; then the line is counted in it
    verdict: str = ""  # "right", "wrong", "not judged"; "" if it was not checked
    summary: str = ""


@dataclass
class Report:
    """The verdict on one class or function."""

    name: str
    ok: bool
    summary: str  # one sentence
    path: str | None = None
    judged: bool = True  # False if neither right nor wrong was proved
    designs: list[str] = field(default_factory=list)  # the variants of attention it contains
    faults: list[Named] = field(default_factory=list)
    remarks: list[Named] = field(default_factory=list)  # known faults that do not make it wrong
    alike: list[str] = field(default_factory=list)  # other explanations with the same output in every probe
    problems: list[Problem] = field(default_factory=list)
    explained: list[str] = field(default_factory=list)  # each problem in plain words
    findings: list[Finding] = field(default_factory=list)
    equal: list[str] = field(default_factory=list)  # differences that are not mistakes
    not_judged: list[str] = field(default_factory=list)  # what could not be judged, and why
    where_right: list[str] = field(default_factory=list)  # positions, heads, samples that are right
    first_wrong: str | None = None  # the first intermediate tensor that differs
    conventions: Conventions = field(default_factory=Conventions)
    roles: dict[str, Role] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)  # probe -> largest difference from torch's class
    protections: list[str] = field(default_factory=list)  # in force while the code ran
    missing_protections: list[str] = field(default_factory=list)  # those this system lacks, with the reason
    facts: list[str] = field(default_factory=list)  # of one of many files: what it shares with others
    seconds: float = 0.0
    beside: str = "torch.nn.MultiheadAttention"  # what it was compared with
    built: str = ""  # how it was built, as Python
    tried: list[str] = field(default_factory=list)  # attempts that failed
    counsel: list[str] = field(default_factory=list)  # if it was not judged: what to do, in Python
    counsel_for_files: list[str] = field(default_factory=list)  # the same for the command line
    on_command_line: bool = False  # whether to show the advice for the command line
    line: int | None = None  # the first line of the code in its file
    cell: int | None = None  # of a notebook; then the line is counted in it
    others: list[Other] = field(default_factory=list)  # other classes of the file, if no name was given

    @property
    def verdict(self) -> str:
        """ "right", "wrong" or "not judged"."""
        return "right" if self.ok else "wrong" if self.judged else "not judged"

    @property
    def exit_code(self) -> int:
        """0: right; 1: wrong; 2: not judged."""
        return ("right", "wrong", "not judged").index(self.verdict)

    def __str__(self) -> str:
        from .report_formats import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from .report_formats import as_html

        return as_html(self)

    def to_json(self) -> str:
        """Return the report as JSON, for graders."""
        from .report_formats import as_json

        return as_json(self)
