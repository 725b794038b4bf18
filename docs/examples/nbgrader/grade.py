"""Writes the points of `headwise check` into an nbgrader gradebook, as scores of one cell.

    nbgrader autograde ps1 --no-execute
    python grade.py COURSE ps1 attention --cell multi_head --rubric rubric.toml --feedback feedback/

Run it in the course's environment, after `nbgrader autograde` has entered the submissions. The cell is one
that is graded by hand, worth as many points as the rubric's full mark. Where a notebook could not be judged,
its score is left for a person. Students' code runs in processes of its own, fenced in, and in no kernel.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def points_of(notebooks: list[Path], options: list[str]) -> dict[Path, float | None]:
    """The points of each notebook; None where a person is to look."""
    # -P: a headwise.py in the folder one happens to be in is not the one that runs
    command = [sys.executable, "-P", "-m", "headwise", "check", *map(str, notebooks), "--json", *options]
    ran = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    reports: list[dict[str, Any]] = [
        json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")
    ]
    if len(reports) != len(notebooks):
        raise SystemExit(f"headwise check said nothing of some notebooks: {ran.stderr.strip()}")
    return {Path(report["path"]): report["points"] for report in reports}


def main() -> int:
    """0, once every score is in the gradebook."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("course", type=Path)
    asked.add_argument("assignment")
    asked.add_argument("notebook", help="its name, without .ipynb")
    asked.add_argument("--cell", required=True, help="the cell that gets the points")
    asked.add_argument("--rubric", required=True, type=Path)
    asked.add_argument("--feedback", type=Path, help="a folder for a Markdown file for each student")
    asked.add_argument("--hint", type=int, choices=(1, 2, 3), help="hints up to this one in these files")
    given = asked.parse_args()
    submitted = given.course / "submitted"
    notebooks = sorted(submitted.glob(f"*/{given.assignment}/{given.notebook}.ipynb"))
    if not notebooks:
        raise SystemExit(f"there is no {given.notebook}.ipynb of {given.assignment} in {submitted}")
    options = ["--rubric", str(given.rubric)]
    options += ["--feedback", str(given.feedback)] if given.feedback else []
    options += ["--hint", str(given.hint)] if given.hint else []
    scores = points_of(notebooks, options)

    from nbgrader.api import Gradebook

    with Gradebook(f"sqlite:///{given.course / 'gradebook.db'}") as book:
        for path, score in scores.items():
            student = path.relative_to(submitted).parts[0]
            grade = book.find_grade(given.cell, given.notebook, given.assignment, student)
            grade.manual_score, grade.needs_manual_grade = score, score is None
            points = "a person is to look" if score is None else format(score, "g")
            sys.stdout.write(f"{student}: {points}\n")
        book.db.commit()
    return 0


if __name__ == "__main__":
    sys.exit(main())
