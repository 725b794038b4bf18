"""Many files: which they are, and a report on each."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...errors import ArgumentError, HeadwiseError
from ..checks import check_file
from ..report import Report
from ..sandbox.run import Unfenced
from .requirements import Requirement, hold_to
from .template import Template

SECONDS = 10.0  # the most one of many may take: an endless loop holds up the rest so long
SUFFIXES = (".py", ".ipynb")
SKIPPED = frozenset(("__pycache__", "site-packages", "node_modules"))
Submission = tuple[Path, str | None]  # the file, and the class or function in it


def collected(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Files as they are given; of folders all Python and notebooks in them, by name, but hidden ones.

    Raises:
        ArgumentError: a folder without any.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            found.append(path)
            continue
        inside = []
        for here, folders, files in os.walk(path):
            folders[:] = sorted(each for each in folders if not (each.startswith(".") or each in SKIPPED))
            inside += [
                Path(here, each)
                for each in sorted(files)
                if each.endswith(SUFFIXES) and not each.startswith(".")
            ]
        if not inside:
            raise ArgumentError(
                f"folder must hold files of Python or notebooks: {path} holds 0; name another, or files"
            )
        found += inside
    return list(dict.fromkeys(found))


def cores() -> int:
    """How many this process may use."""
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
    template: Template | None = None,
    done: Callable[[Report], None] = lambda report: None,
) -> Iterator[Report]:
    """One report a file, in their order; files that cannot be checked have one as well, "not judged".

    Args:
        paths: files, or pairs of a file and the name of what is to be checked in it; folders are for
            `collected`.
        jobs: how many at a time; None: as many as there are cores.
        seconds: the most each may take.
        require: what the task says, see `requirements_of`.
        template: one that is running already.
        done: told of each report as soon as it is there, in whatever order, from another thread.
        memory, trust, d_model, num_heads, roles, arguments: as in `check_file`.

    Raises:
        ArgumentError: jobs that are no positive number; no fences and no trust.
        BackendUnavailable: a system no file can be run on.
    """
    if jobs is not None and jobs < 1:
        raise ArgumentError(f"jobs must be at least 1: got {jobs}; try {cores()}")
    if template is None:
        with Template() as own:
            yield from check_files(
                paths, jobs=jobs, seconds=seconds, memory=memory, trust=trust, d_model=d_model,
                num_heads=num_heads, roles=roles, arguments=arguments, require=require, template=own,
                done=done,
            )  # fmt: skip
        return
    asked = [one if isinstance(one, tuple) else (Path(one), None) for one in paths]
    stopped = threading.Event()

    def one(path: Path, name: str | None) -> Report | None:
        if stopped.is_set():
            return None
        try:
            report = check_file(
                path, name, seconds=seconds, memory=memory, trust=trust, d_model=d_model,
                num_heads=num_heads, roles=roles, arguments=arguments, template=template,
            )  # fmt: skip
            hold_to(report, require, path)
        except Unfenced:  # so are all others
            raise
        except HeadwiseError as error:
            report = not_checked(path, name, error)
        except Exception as error:  # a row of its own, not the end of the others
            report = not_checked(path, name, error)
            report.summary = f"headwise itself failed ({type(error).__name__}): {error}"
        done(report)
        return report

    pool = ThreadPoolExecutor(jobs or cores())
    try:
        for report in pool.map(lambda pair: one(*pair), asked):
            assert report is not None
            yield report
    except BaseException:
        stopped.set()
        template.stop()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def not_checked(path: Path, name: str | None, error: Exception) -> Report:
    """A file nothing could be done with."""
    return Report(name or path.stem, ok=False, summary=str(error), path=str(path), judged=False)
