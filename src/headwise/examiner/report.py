"""`Report`: what was found, in words; printed, drawn in a notebook, or as JSON for graders."""

from __future__ import annotations

from dataclasses import dataclass, field

from .evidence import Conventions, Finding, Problem, Role
from .faults.fault import Fault

__all__ = ["Named", "Report"]


@dataclass
class Named:
    """A fault that explains what the code computes, with all there is to say about it."""

    key: str
    title: str
    formula: str
    right: str
    hints: tuple[str, str, str]
    why: str
    repair: str
    detail: str = ""  # how well it fits: "your output equals ... to 3e-16"
    line: int | None = None
    text: str = ""  # that line
    number: float | None = None  # where a number was fitted

    @classmethod
    def of(cls, fault: Fault, detail: str, line: int | None = None, text: str = "") -> Named:
        """What the library says of a fault."""
        return cls(
            fault.key, fault.title, fault.formula, fault.right, fault.hints, fault.why, fault.repair, detail,
            line, text,
        )  # fmt: skip


@dataclass
class Report:
    """The verdict on one class or function."""

    name: str
    ok: bool
    summary: str  # one sentence
    path: str | None = None
    faults: list[Named] = field(default_factory=list)
    remarks: list[Named] = field(default_factory=list)  # named, and no reason to fail
    problems: list[Problem] = field(default_factory=list)
    explained: list[str] = field(default_factory=list)  # problems in plain words, one each
    findings: list[Finding] = field(default_factory=list)
    equal: list[str] = field(default_factory=list)  # different, but equal: what was noticed and is no fault
    not_judged: list[str] = field(default_factory=list)  # what could not be judged, and why
    where_right: list[str] = field(default_factory=list)  # positions, heads, samples that are right
    first_wrong: str | None = None  # the first intermediate tensor that parts from the truth
    conventions: Conventions = field(default_factory=Conventions)
    roles: dict[str, Role] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)  # probe -> largest difference from torch's class
    protections: list[str] = field(default_factory=list)  # in force while the code ran
    seconds: float = 0.0

    def __str__(self) -> str:
        from .showing import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from .showing import as_html

        return as_html(self)

    def to_json(self) -> str:
        """For graders."""
        from .showing import as_json

        return as_json(self)
