"""Grades a folder of submitted files with `headwise check`; writes results.json, as course platforms read it.

    python grade.py SUBMISSION results.json --task attention.py=6 --task steps.py:split_heads=2 --hint 1

Each task is FILE[:NAME]=POINTS; without one, every Python file and notebook of the folder is worth 10. Points
are given where the code is right. Where it is wrong, its writer is told up to the hint that --hint allows.
With --rubric, wrong code gets the share of a task's points that the rubric gives it.
Where it could not be judged, there are no points yet, and the text asks for a person to look.

This file trusts nothing that is submitted: it reads what `headwise check --json` says, which runs the code in
a process of its own, fenced in, and asks it with numbers that it cannot know.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

POINTS = 10.0
SECONDS = 60  # a file


def grade(folder: Path, task: str, points: float, hint: int, rubric: Path | None = None) -> dict[str, Any]:
    """One test of results.json."""
    file = task.partition(":")[0]
    if not (folder / file).is_file():
        return told(task, 0.0, points, f"{file} was not submitted.", "failed")
    if (folder / file).resolve() != folder.resolve() / file:  # what it leads to is not the student's
        return told(
            task, 0.0, points, f"{file} is a link, and is not read: submit the file itself.", "failed"
        )
    # -P: a submitted headwise.py in the folder one happens to be in is not the one that runs
    command = [sys.executable, "-P", "-m", "headwise", "check", str(folder / task), "--json"]
    ran = subprocess.run(
        [*command, "--seconds", str(SECONDS), *(["--rubric", str(rubric)] if rubric else [])],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    report = read(ran.stdout)
    if ran.returncode == 0 and report.get("ok") is True:
        return told(task, points, points, "Right.", "passed")
    if ran.returncode == 1:
        share = report["points"] / report["full"] if rubric and report.get("points") else 0.0
        return told(task, round(points * share, 2), points, words(report, hint), "failed")
    why = report.get("summary") or ran.stderr.strip() or "nothing was said"
    return told(task, 0.0, points, f"Not judged: {why}\nPlease ask for somebody to look at it.", "failed")


def read(output: str) -> dict[str, Any]:
    """The report; empty where there is none."""
    try:
        found = json.loads(output)
    except ValueError:
        return {}
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    return found if isinstance(found, dict) else {}


def words(report: dict[str, Any], hint: int) -> str:
    """What its writer is told: hints up to this one, or all of it."""
    faults = report.get("faults", [])
    if not faults or hint > 3:
        said = [str(report.get("summary", "Something is wrong."))]
    else:
        said = ["Not right yet."]
    for fault in faults:
        if hint > 3:
            cell = f"cell {fault['cell']}, " if fault.get("cell") else ""
            place = f"{cell}line {fault['line']}: " if fault.get("line") else ""
            said += [f"{place}{fault['title']}", f"Instead: {fault['repair']}"]
        else:
            said += [str(one) for one in fault.get("hints", [])[:hint]]
    return "\n".join(dict.fromkeys(said))


def told(name: str, score: float, most: float, output: str, status: str) -> dict[str, Any]:
    """As platforms read it."""
    return {
        "name": name,
        "score": score,
        "max_score": most,
        "output": output,
        "status": status,
        "visibility": "visible",
    }


def main() -> int:
    """Always writes results.json; 0 unless that itself fails."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("submission", type=Path)
    asked.add_argument("results", type=Path)
    asked.add_argument("--task", action="append", default=[], metavar="FILE[:NAME]=POINTS")
    asked.add_argument("--hint", type=int, choices=range(5), default=1, help="0: none; 4: the answer")
    asked.add_argument("--rubric", type=Path, help="a rubric of headwise check: points for wrong code, too")
    given = asked.parse_args()
    start = time.monotonic()
    tasks = [one.rpartition("=")[::2] for one in given.task] or [
        (path.name, POINTS) for path in sorted(given.submission.iterdir()) if path.suffix in (".py", ".ipynb")
    ]
    tests = [
        grade(given.submission, str(name), float(points), given.hint, given.rubric) for name, points in tasks
    ]
    results = {
        "score": sum(one["score"] for one in tests),
        "execution_time": round(time.monotonic() - start),
        "output": "" if tests else "There is no Python file and no notebook in what was submitted.",
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": tests,
    }
    given.results.parent.mkdir(parents=True, exist_ok=True)
    given.results.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
