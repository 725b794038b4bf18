"""Check many files: collect them, report on each, and print tables. No file can read another submission."""

from __future__ import annotations

import csv
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TextIO

from ...errors import ArgumentError, HeadwiseError
from ...show.texts import plain
from ..checks import check_file
from ..report import Problem, Report
from ..report_formats import as_json
from ..sandbox.run import Unfenced
from ..source.likely_classes import source_of
from . import similarity
from .requirements import Requirement, hold_to
from .submission_files import SKIPPED, OwnFiles, check_plain, own_files
from .template import Template

if TYPE_CHECKING:
    from rich.table import Table

    from .rubric import Mark


SECONDS = 10.0  # the limit for one of many files, so that endless loops do not delay the others
SUFFIXES = (".py", ".ipynb")
Submission = tuple[Path, str | None]  # the file, and the class or function in it


def collected(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Return the files, and in place of folders the Python files and notebooks in them that are not hidden.

    Raises:
        ArgumentError: a folder has no such files.
    """
    submissions: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            submissions.append(path)
            continue
        inside = []
        for parent, folders, files in os.walk(path):
            folders[:] = sorted(each for each in folders if not each.startswith(".") and each not in SKIPPED)
            links = [each for each in folders if os.path.islink(os.path.join(parent, each))]  # refused
            inside += [
                Path(parent, each)
                for each in sorted([*files, *links])
                if (each.endswith(SUFFIXES) or each in links) and not each.startswith(".")
            ]
        if not inside:
            raise ArgumentError(
                f"folder must contain Python files or notebooks: {path} contains 0; name another folder"
            )
        submissions += inside
    return list(dict.fromkeys(submissions))


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_files(
    paths: Sequence[str | os.PathLike[str] | Submission],
    *,
    jobs: int | None = None,
    seconds: float = SECONDS,
    memory: int = 4 * 2**30,
    trust: bool = False,
    d_model: int | None = None,
    num_heads: int | None = None,
    roles: dict[str, str] | None = None,
    arguments: Mapping[str, object] | None = None,
    require: Sequence[Requirement] = (),
    folders: Sequence[Path] = (),
    template: Template | None = None,
    done: Callable[[Report], None] = lambda report: None,
) -> Iterator[Report]:
    """Yield a report for each file, in their order; files that cannot be checked are "not judged".

    Args:
        paths: files, or pairs of a file and the name of a class or function; for folders see `collected`.
        jobs: the number of files checked at a time; None for the number of cores.
        seconds: the time limit for each file.
        require: the requirements of the task, see `requirements_of`.
        folders: folders that are checked as a whole; each folder below one belongs to one author.
        template: a running template to use.
        done: called with each report as soon as it is ready, in any order and from another thread.
        memory, trust, d_model, num_heads, roles, arguments: as in `check_file`.

    Raises:
        ArgumentError: jobs is not positive, or there is no sandbox and trust is False.
        BackendUnavailable: files cannot be run on this system.
    """
    if jobs is not None and jobs < 1:
        raise ArgumentError(f"jobs must be at least 1: got {jobs}; try {cores()}")
    if template is None:
        with Template() as own:
            yield from check_files(
                paths, jobs=jobs, seconds=seconds, memory=memory, trust=trust, d_model=d_model,
                num_heads=num_heads, roles=roles, arguments=arguments, require=require, folders=folders,
                template=own, done=done,
            )  # fmt: skip
        return
    submissions = [entry if isinstance(entry, tuple) else (Path(entry), None) for entry in paths]
    refused, may_read = _own_of([path for path, _ in submissions], folders)
    common = _in_common(may_read)
    rooms = count(1)
    stopped = threading.Event()

    def check_submission(path: Path, name: str | None) -> Report | None:
        if stopped.is_set():
            return None
        try:
            if path in refused:
                raise refused[path]
            with TemporaryDirectory(prefix=f"own-{next(rooms)}-", dir=template.folder) as room:
                files = may_read[path]
                place = _Place(Path(room).resolve(), files)
                left_out = files.copied_to(place.room)
                try:
                    report = check_file(
                        place.file, name, seconds=seconds, memory=memory, trust=trust, d_model=d_model,
                        num_heads=num_heads, roles=roles, arguments=arguments, template=template,
                    )  # fmt: skip
                    hold_to(report, require, place.file)
                    report = place.report_on(path, report)
                except HeadwiseError as error:
                    if isinstance(error, Unfenced):  # so would be all others
                        raise
                    report = not_checked(path, name, type(error)(place.replaced(str(error))))
            report.facts = [*common[path], *left_out]
        except Unfenced:
            raise
        except HeadwiseError as error:
            report = not_checked(path, name, error)
        except Exception as error:  # the other files are still checked
            report = not_checked(path, name, error)
            report.summary = f"headwise failed ({type(error).__name__}): {error}"
        done(report)
        return report

    pool = ThreadPoolExecutor(jobs or cores())
    try:
        for report in pool.map(lambda pair: check_submission(*pair), submissions):
            assert report is not None
            yield report
    except BaseException:
        stopped.set()
        template.stop()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _own_of(
    paths: Sequence[Path], folders: Sequence[Path]
) -> tuple[dict[Path, ArgumentError], dict[Path, OwnFiles]]:
    """Return the refused submissions with their errors, and the files that each of the others may read."""
    refused: dict[Path, ArgumentError] = {}
    absolute: dict[Path, Path] = {}
    for path in paths:
        try:
            check_plain(path)
        except ArgumentError as error:
            refused[path] = error
        else:
            absolute[path] = Path(os.path.realpath(path.parent), path.name)
    own = own_files(
        list(dict.fromkeys(absolute.values())), [Path(os.path.realpath(folder)) for folder in folders]
    )
    return refused, {path: own[place] for path, place in absolute.items()}


def _in_common(own: Mapping[Path, OwnFiles]) -> dict[Path, list[str]]:
    """Return for each file sentences about similar files and about the files beside it that it imports."""
    texts: dict[Path, str] = {}
    for path in own:
        try:
            texts[path] = source_of(path)[0]
        except ArgumentError:
            continue
    paths = list(texts)
    names = _names([str(path) for path in paths])
    similar = similarity.alike([texts[path] for path in paths])
    facts: dict[Path, list[str]] = {path: [] for path in own}
    for path, each in zip(paths, similar, strict=True):
        facts[path] = similarity.in_words(each, names)
    for path, files in own.items():
        facts[path] += [
            f"it imports {plain(each.name)} from the same folder" for each in files.imported if each.suffix
        ]
    return facts


class _Place:
    """The folder to which the files of one submission are copied."""

    def __init__(self, room: Path, files: OwnFiles) -> None:
        self.room, self.files = room, files

        self.file = room / files.files[0].relative_to(files.top)

    def replaced(self, text: str) -> str:
        """Return the text with the original folder in place of that of the copy."""
        return text.replace(str(self.room), str(self.files.top))

    def report_on(self, path: Path, report: Report) -> Report:
        """Return the report on the copy as a report on the submission."""
        for problem in report.problems:
            if problem.kind == "FileNotFoundError" and self._is_out_of_reach(problem):
                words = (
                    f"it reads another file ({problem.message}), but in a shared folder each can read "
                    "only itself and what it imports; give each submission a folder of its own"
                )
                report.ok = report.judged = False
                report.summary, report.explained = words, [words]
                report.problems, report.faults = [Problem("limits", "forbidden", words, problem.line)], []
                break
        report = rewritten(report, self.replaced)
        report.path = str(path)
        return report

    def _is_out_of_reach(self, problem: Problem) -> bool:
        """Return True if a file that was not found is in the folder of the submission."""
        quoted = re.search(r"'(.+)'$", problem.message)
        if quoted is None or not quoted[1].startswith(str(self.room)):
            return False
        return os.path.lexists(self.replaced(quoted[1]))


def rewritten(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of a value in which every string is changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        parts = [rewritten(each, change) for each in value]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, dict):
        return {key: rewritten(each, change) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{each.name: rewritten(getattr(value, each.name), change) for each in fields(value)}
        )
    return value


def not_checked(path: Path, name: str | None, error: Exception) -> Report:
    """Return a report on a file that could not be checked."""
    return Report(name or path.stem, ok=False, summary=str(error), path=str(path), judged=False)


COLUMNS = ("file", "name", "verdict", "exit_code", "faults", "line", "summary", "seconds", "others", "facts")
STYLES = {"right": "green", "wrong": "red", "not judged": "yellow"}
MARKS = {"right": "✓", "wrong": "✗", "not judged": "?"}
FORMULA = ("=", "+", "-", "@", "\t")  # the beginning of a formula in spreadsheets


def exit_code_of(reports: Iterable[Report]) -> int:
    """Return 1 if any file is wrong, else 2 if any was not judged, else 0."""
    codes = {report.exit_code for report in reports}
    return 1 if 1 in codes else 2 if 2 in codes else 0


def names_of(reports: Sequence[Report]) -> list[str]:
    """Return the paths of the files, relative to the folder that contains all of them."""
    return _names([report.path or report.name for report in reports])


def _names(paths: Sequence[str]) -> list[str]:
    folder = os.path.commonpath([os.path.dirname(os.path.abspath(each)) for each in paths]) if paths else ""
    return [plain(os.path.relpath(os.path.abspath(each), folder)) for each in paths]


def what_of(report: Report) -> str:
    """Return the keys of the faults of a file, or the reason why it is not right, or its designs."""
    if report.faults:
        return "; ".join(plain(fault.key) for fault in report.faults)
    if report.ok:
        return "; ".join(plain(design) for design in report.designs)
    return plain(without_folder(report, report.summary))


def without_folder(report: Report, text: str) -> str:
    """Return the text without the folder in the paths of the file and of those beside it."""
    folder = os.path.dirname(report.path or "")
    for each in (os.path.abspath(folder), folder):
        text = text.replace(f"{each}{os.sep}", "") if each else text
    return text


def line_of(report: Report) -> int | None:
    """Return the line of the first fault or problem, if there is one."""
    every = [*(fault.line for fault in report.faults), *(problem.line for problem in report.problems)]
    lines = [line for line in every if line is not None]
    return lines[0] if lines and not report.ok else None


def judged_in(report: Report) -> str:
    """Return the name that was judged, and the other judged names of the file with their verdicts."""
    judged = [f"{plain(other.name)}: {other.verdict}" for other in report.others if other.verdict]
    return ", ".join([plain(report.name), *judged])


def others_of(report: Report) -> str:
    """Return the other names of the file that look like attention, with their verdicts."""
    return "; ".join(f"{other.name}: {other.verdict or 'not checked'}" for other in report.others)


def missing_in_words(reports: Iterable[Report]) -> list[str]:
    """Return the protections that are missing on this system, each once, with the reason."""
    return list(dict.fromkeys(each for report in reports for each in report.missing_protections))


def facts_in_words(reports: Sequence[Report]) -> list[str]:
    """Return a line for each file that is similar to others or imports files beside it."""
    named = zip(names_of(reports), reports, strict=True)
    return [f"{name}: {'; '.join(map(plain, report.facts))}" for name, report in named if report.facts]


def as_table(reports: Sequence[Report], marks: bool = True, points: Sequence[Mark] = ()) -> Table:
    """Return a table with a row for each file.

    Args:
        reports: of the files.
        marks: whether the terminal can print the signs of the verdicts.
        points: of each file, if there is a rubric.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("file", overflow="fold", ratio=3)
    table.add_column("judged", overflow="fold", ratio=3)
    table.add_column("verdict", no_wrap=True)
    if points:
        table.add_column("points", justify="right", no_wrap=True)
    table.add_column("finding", overflow="fold", ratio=5)
    table.add_column("line", justify="right", no_wrap=True)
    table.add_column("s", justify="right", no_wrap=True)
    for number, (name, report) in enumerate(zip(names_of(reports), reports, strict=True)):
        mark = f"{MARKS[report.verdict]} " if marks else ""
        line = line_of(report)
        table.add_row(
            Text(name),
            Text(judged_in(report)),
            Text(f"{mark}{report.verdict}", style=STYLES[report.verdict]),
            *([Text(str(points[number]))] if points else []),
            Text(plain(what_of(report), 160)),
            Text("" if line is None else str(line)),
            Text(f"{report.seconds:.1f}"),
        )
    return table


def in_numbers(reports: Sequence[Report]) -> list[str]:
    """Return the number of files with each verdict and each mistake, the most frequent first."""
    total = len(reports)
    verdicts = Counter(report.verdict for report in reports)
    counted = ", ".join(f"{verdicts[each]} {each}" for each in STYLES if verdicts[each])
    lines = [f"{total} file{'' if total == 1 else 's'}: {counted or 'none'}"]
    faults: Counter[str] = Counter()
    for report in reports:
        faults.update(_kinds(report))
    ordered = sorted(faults.items(), key=lambda pair: (pair[0].startswith("not judged"), -pair[1], pair[0]))
    return lines + [f"{count} of {total} {plain(key)}" for key, count in ordered]


def _kinds(report: Report) -> set[str]:
    """Return the names of what is wrong with a file."""
    if report.ok:
        return set()
    if report.faults:
        return {fault.key for fault in report.faults}
    kind = report.problems[0].kind if report.problems else ""
    if report.verdict == "wrong":
        return {kind or "a mistake that is not in the catalogue"}
    return {f"not judged: {kind}" if kind else "not judged"}


def write_csv(reports: Sequence[Report], file: TextIO, points: Sequence[Mark] = ()) -> None:
    """Write a header, and a line for each file; with a rubric, its points and the full points at the end."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*COLUMNS, *(("points", "full") if points else ())])
    for number, report in enumerate(reports):
        faults = "; ".join(fault.key for fault in report.faults)
        row = (
            report.path or "", report.name, report.verdict, report.exit_code, faults, line_of(report) or "",
            report.summary, f"{report.seconds:.2f}", others_of(report), "; ".join(report.facts),
        )  # fmt: skip
        mark = points[number] if points else None
        scored = () if mark is None else ("" if mark.points is None else f"{mark.points:g}", f"{mark.full:g}")
        writer.writerow([_cell(each) for each in (*row, *scored)])


def _cell(value: object) -> object:
    """Return a text that spreadsheets do not take for a formula; other values unchanged."""
    if not isinstance(value, str):
        return value
    value = plain(value)
    return f"'{value}" if value.startswith(FORMULA) else value


def json_line(report: Report, hint: int | None = None, mark: Mark | None = None) -> str:
    """Return a report as JSON on one line; with a rubric also `points`, `full` and `lost`."""
    beside: dict[str, object] = {}
    if mark is not None:
        beside = {"points": mark.points, "full": mark.full}
        beside |= {} if hint is not None and report.verdict == "wrong" else {"lost": mark.lost}
    return as_json(report, indent=None, hint=hint, beside=beside)
