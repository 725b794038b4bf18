"""A report as JSON, for programs that grade."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from ..report import Report

SCHEMA = 1  # a field may be added under the same number; one that goes or changes its meaning counts it up


def as_json(report: Report, indent: int | None = 2) -> str:
    """Everything the report knows: "schema", "verdict" (right, wrong or not judged) and "exit_code", then its
    fields under their own names.

    JSON has no NaN and no infinities: they are the strings "NaN", "Infinity" and "-Infinity". Only ascii is
    written, so that any terminal and any file can hold it.

    Args:
        report: the verdict.
        indent: spaces a level; None for one line.
    """
    facts = {"schema": SCHEMA, "verdict": report.verdict, "exit_code": report.exit_code}
    return json.dumps(facts | _plain(asdict(report)), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
