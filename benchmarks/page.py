"""docs/benchmarks.md from the stored results alone: a section for each machine.

    python -m benchmarks --readme

rewrites what is between the markers. A table is of one commit, the one with the most cases
(`readme.complete`); only the rules, whose cells are measured again when their kernel changes, name several.
"""

from __future__ import annotations

from pathlib import Path

from . import everyday_table, lengths, machine, readme, report, rule_table
from .pages import table as table_of_pages
from .served import table as table_of_served

PAGE = machine.ROOT / "docs" / "benchmarks.md"
MARKERS = ("<!-- machines -->", "<!-- end machines -->")


def write(results: Path = report.RESULTS, page: Path = PAGE) -> None:
    """Rewrite the page from a folder of results; raise `ValueError` if the page has no markers."""
    readme.put(page, sections(results), *MARKERS)


def sections(results: Path = report.RESULTS) -> str:
    """Return the sections of all machines as Markdown, GPUs first."""
    parts: list[str] = []
    everyday = report.of_every_cpu("everyday", results)
    for stored in sorted(everyday, key=lambda stored: str(stored["device"]), reverse=True):
        records = readme.complete(stored["device"], [stored])
        if not records:
            continue
        place = readme.place(stored["device"], records[0]["run"])
        parts += [f"## {place}", *everyday_table.tables(records)]
        parts += _of_the_gpu(results) if stored["device"] == "cuda" else _of_the_pages(results, place)
    return "\n\n".join(parts or ["No results are stored yet."]) + "\n"


def _of_the_gpu(results: Path) -> list[str]:
    rules, sweep = (report.load(results / f"{name}_cuda.json") for name in ("rules", "sweep"))
    tables = [
        readme.statistics_table(report.load_all(results)),
        "" if rules is None else rule_table.table(rules),
        "" if sweep is None else lengths.table(sweep),
    ]
    return [table for table in tables if table]


def _of_the_pages(results: Path, place: str) -> list[str]:
    tables = {"pages": table_of_pages, "served": table_of_served}
    return [
        table(stored)
        for name, table in tables.items()
        for stored in report.of_every_cpu(name, results)
        if readme.place("cpu", stored["run"]) == place
    ]
