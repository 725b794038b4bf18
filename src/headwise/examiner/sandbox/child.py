"""What runs in the other process: `python -I -B child.py REQUEST_FOLDER`.

It is run by its path, for headwise itself imports torch, and the fences come first. What this process can do,
the learner's file can do: forge the evidence, too. It cannot touch what judges the evidence, which is
elsewhere; nor is anything it prints read as a result.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent


def main(folder: Path) -> NoReturn:
    request = json.loads((folder / "request.json").read_text("utf-8-sig"))
    confine = _package("headwise_confine", HERE / "confine")
    status = request["status"]

    def tell(fact: dict[str, object]) -> None:
        os.write(status, json.dumps(fact).encode() + b"\n")

    fence = confine.Fence(**request["fence"])
    standing = confine.enter(fence, tell)  # forks: what follows is in the confined process
    refused = not (standing.essential or request["trust"])
    tell({"protections": standing.protections, "missing": standing.missing, "refused": refused})
    if refused or request["probe"]:
        os._exit(0)
    os.chdir(folder / "work")
    sys.path += [each for each in request["path"] if each not in sys.path]
    request["confined"] = standing.essential
    _examine(request, folder / "result", confine, tell, status)


def _package(name: str, folder: Path) -> ModuleType:
    """A package by its place: whatever else is called headwise or lies beside it is not looked at."""
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _examine(request: dict[str, Any], result: Path, confine: ModuleType, tell: Any, status: int) -> NoReturn:
    # All of it before the learner's file runs: `examine` and what follows it here keep their own references
    # to what they need of torch, whatever that file replaces; what compares numbers is in another process.
    import torch

    _package("headwise", HERE.parents[1])
    from headwise.examiner.examine import examine
    from headwise.examiner.examine.surroundings import silently
    from headwise.examiner.sandbox.learner import choose, load
    from headwise.examiner.sandbox.stand_ins import load_all_the_same
    from headwise.examiner.sandbox.verdicts import of_exception

    torch.set_num_threads(1)
    limits = sys.modules[f"{confine.__name__}.limits"]
    own, end, rename, dumps = os.getpid(), os._exit, os.rename, json.dumps
    confined = request["confined"]
    path, source = Path(request["file"]), Path(request["file"]).read_text("utf-8-sig")

    where = open(result / "where.txt", "w")  # noqa: SIM115 - for as long as the process lives
    faulthandler.enable(where)
    # Whoever ends this process for its time or memory sends this first: it tells the line, and ends.
    faulthandler.register(signal.SIGXCPU, where, chain=True)
    limits.limit_memory(request["memory"])
    limits.limit_time(request["seconds"])
    tell({"ready": True, "memory": limits.memory_of("self"), "waited": limits.waited("self")})
    os.close(status)

    stage = "import"
    facts: dict[str, object] = {}
    part = result / "part"
    try:
        lacking: ImportError | None = None
        stood_in: list[str] = []
        try:
            module = load(path, source)
        except ImportError as error:
            lacking = error
            try:
                module, stood_in = load_all_the_same(path, source)
            except Exception:
                raise error from None
        obj, facts["name"], facts["others"] = choose(module, request["name"])
        if os.getpid() != own:
            end(1)
        stage = "call"
        with silently():  # this process is ours, and what is printed now has been printed before
            evidence = examine(obj, source=source, path=str(path), **request["options"])
        if os.getpid() != own:
            end(1)
        if lacking is not None:
            if evidence.weights is None or evidence.problems:  # it could not do without
                stage = "import"
                raise lacking
            names = ", ".join(dict.fromkeys(stood_in)) or str(lacking)
            evidence.conventions.words.append(f"not here, and not needed for this: {names}")
        part.mkdir()
        evidence.save(part)
    except BaseException as error:
        if os.getpid() != own:  # a copy the learner's file made of this process
            end(1)
        facts["problem"] = asdict(of_exception(error, path, stage, request["memory"], confined=confined))
        filename = getattr(error, "filename", None)
        facts["filename"] = filename if isinstance(filename, str) else ""
        part.mkdir(exist_ok=True)
    (part / "facts.json").write_text(dumps(facts))
    with suppress(Exception):  # they may be the learner's by now
        sys.stdout.flush()
        sys.stderr.flush()
    rename(part, result / "done")
    end(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
