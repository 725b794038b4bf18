"""`survey`: measure the heads of a model on every document of a corpus; summarise them over all documents.

    corpus ──> plan of pieces (documents.py) ──> blocks, claimed one by one (shards.py)
    model  ──> one document at a time (document_rows.py) ──> shards, written whole (shards.py)
    all shards ──> summary.py ──> Survey: table, page, files

A folder is one survey, whose model, options and corpus are in `survey.json`. A call with the same ones
continues where the survey stopped; a call with others raises an error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import nn

from ..errors import ArgumentError, HeadwiseError
from ..heads.roles import Roles
from ..listeners.role_measurement import roles as roles_of
from ..models.pretrained import Pretrained, load, read
from .document_rows import STATISTICS, Measure, Options, fingerprint
from .documents import Plan, arrow, first_line
from .result import PLAN, ROLES, SURVEY, Survey
from .shards import (
    Group,
    Shards,
    Worker,
    blocks,
    bytes_of,
    check_folder,
    group_here,
    measured_by_ray,
    write_atomic,
)

FORMAT = "headwise survey 1"
ENGINES = ("here", "ray")
PROBE = "The cat sat on the mat."
Progress = Callable[[int, int], None]
ModelSource = str | os.PathLike[str] | nn.Module | Pretrained | None


def survey(
    model: ModelSource,
    corpus: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    tokenizer: Any = None,
    field: str = "text",
    max_tokens: int | None = None,
    roles: bool = True,
    threads: int = 1,
    device: str | None = None,
    block: int | None = None,
    engine: str = "here",
    workers: int | None = None,
    progress: bool | Progress = True,
) -> Survey:
    """Measure every head of a model on every document of a corpus; summarise each head over all documents.

        result = hw.survey("mini", "corpus/", out="survey/")
        result.table()
        result[2, 3].dependence, result[2, 3].movers[0].document

    Results are written to `out` as Parquet files: `measures-*.parquet` has a row per document, layer and
    head, `documents-*.parquet` a row per document, and `summary-*.parquet` the results over all documents. If
    the process is killed, the same call continues where it stopped. A document, file or folder that cannot be
    read is recorded with its error; `Survey.lost` counts and names them. Documents that failed for lack of
    memory or disk are tried again: at once, at the end, and when the same call is repeated.

    Documents are read one by one, each from its beginning up to the largest number of tokens that the model
    reads. Under torchrun all processes share the work, and the first one computes the summary.

    Args:
        model: a name or folder for `headwise.models.load`, or its result; or a model, with `tokenizer`.
        corpus: a file or a folder: texts (.txt, .text, .md; one document per file), JSON Lines (.jsonl,
            .ndjson; one document per line), Parquet (one document per row).
        out: a folder; it is created if it does not exist. With several machines, all must see this folder and
            the corpus.
        field: the name of the field with the text, in JSON and Parquet.
        max_tokens: the largest number of tokens of a document; None: 4,096, or the largest number that the
            model reads.
        roles: also measure once what roles heads have (`headwise.roles`).
        threads: the number of torch threads in each process. Results are bitwise the same only with the same
            number.
        device: if the model is given by name: "cpu", "cuda" (each process uses its own GPU) or e.g. "cuda:1".
        block: the number of documents that are saved together; None: a 64th of the corpus, 16 to 256.
        engine: "here", this process or those of torchrun; "ray", a job of Ray Data.
        workers: the number of Ray processes; None: one per processor of the cluster.
        progress: True shows a bar or prints lines on stderr; or a function that is called with the number of
            documents done and the number of all documents.

    Raises:
        ArgumentError: no such corpus, or an empty one; `out` belongs to another survey, or its disk is full;
            the corpus changed; invalid options; no document could be read; the device failed.
        AttentionBypassed: a model whose attention cannot be intercepted.
        PackageMissing: pyarrow, ray or what a model needs is not installed.

    Example:
        >>> import headwise as hw, pathlib, tempfile
        >>> place = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (place / "a.txt").write_text("The cat sat on the mat because the cat was tired.")
        >>> result = hw.survey("mini", place / "a.txt", out=place / "survey", roles=False, progress=False)
        >>> result
        Survey(1 document, 56 heads)
        >>> result[3, 4].label
        'previous-token'
    """
    arrow()
    options = _check_options(field, max_tokens, threads, block, engine, workers, device, model)
    group = group_here() if engine == "here" else None
    folder = check_folder(out)
    with ExitStack() as stack:
        tell = stack.enter_context(_progress_function(progress, group))
        trained = _load_model(model, tokenizer, device)
        stack.enter_context(_ready_to_measure(trained.model, threads))
        is_first = group is None or group.rank == 0
        if group is None:
            plan = _begin_or_resume(folder, corpus, options, trained, block)
        elif is_first:
            try:
                plan = _begin_or_resume(folder, corpus, options, trained, block)
            except HeadwiseError as error:
                group.tell(str(error))
                raise
            group.tell("")
        else:
            group.hear()
            plan = _join(folder, corpus, trained)
        about = _read_about(folder / SURVEY)
        assert about is not None
        shards = Shards(folder, by_number=about["layers"] == "numbers")
        worker = Worker(trained, plan, shards, options)
        if engine == "ray":
            model_of_workers = trained if isinstance(model, nn.Module) else model
            measured_by_ray(plan, shards, model_of_workers, options, workers, tell)
        else:
            _measure_blocks(worker, plan, group, tell)
        result = Survey(folder)
        result.trained = trained
        if is_first:
            # at the end, when no other process takes memory; includes failures of earlier runs
            for number in sorted(shards.to_retry()):
                worker.retry(number)
            if roles:
                result.roles = _measure_roles(folder, trained)
            result.write()
        return result


def _check_options(
    field: str,
    max_tokens: int | None,
    threads: int,
    block: int | None,
    engine: str,
    workers: int | None,
    device: str | None,
    model: object,
) -> Options:
    """Return the options of a survey, checked."""
    if not isinstance(field, str) or not field:
        raise ArgumentError(f"field must be a name: got {field!r}; the default is 'text'")
    counts = {"max_tokens": max_tokens, "threads": threads, "block": block, "workers": workers}
    for name, count in counts.items():
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ArgumentError(f"{name} must be a whole number of at least 1: got {count!r}; leave it out")
    if engine not in ENGINES:
        raise ArgumentError(f"engine must be {' or '.join(ENGINES)}: got {engine!r}; the default is 'here'")
    if workers is not None and engine != "ray":
        raise ArgumentError(
            f"workers must be given only with engine='ray': got {workers} with {engine!r}; leave it out, or "
            "start several processes with torchrun"
        )
    if device is not None and isinstance(model, nn.Module | Pretrained):
        raise ArgumentError(
            f"device must be given only with the name of a model: got {device!r} and "
            f"{type(model).__name__}; use model.to({device!r})"
        )
    return Options(field, max_tokens, threads)


def _load_model(model: ModelSource, tokenizer: Any, device: str | None) -> Pretrained:
    """Return the model with its tokenizer, loaded if it is a name."""
    if isinstance(model, nn.Module):
        if tokenizer is None:
            raise ArgumentError(
                f"tokenizer must be given with a module: got {type(model).__name__} alone; pass tokenizer="
            )
        return Pretrained(model, tokenizer, type(model).__name__)
    if tokenizer is not None:
        raise ArgumentError(
            f"tokenizer must be given only with a module: got {type(tokenizer).__name__} for a model "
            "that has its own; leave it out"
        )
    if isinstance(model, Pretrained):
        return model
    assert model is None or isinstance(model, str | os.PathLike)
    trained = load(model)
    if device is not None:
        if device == "cuda":
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        try:
            trained.model.to(device)
        except (RuntimeError, AssertionError) as error:
            raise ArgumentError(
                f"device must be available: got {device!r} ({first_line(error)}); try 'cpu'"
            ) from error
    return trained


@contextmanager
def _ready_to_measure(model: nn.Module, threads: int) -> Iterator[None]:
    """Put a model into eval mode and set the number of threads; restore both at the end."""
    before = torch.get_num_threads()
    modes = [module for module in model.modules() if module.training]
    torch.set_num_threads(threads)
    model.eval()
    try:
        yield
    finally:
        torch.set_num_threads(before)
        for module in modes:
            module.training = True


# Beginning and resuming


def _begin_or_resume(
    folder: Path, corpus: str | os.PathLike[str], options: Options, trained: Pretrained, block: int | None
) -> Plan:
    """Begin a survey in a folder, or go on with the one that is there; return its plan."""
    Shards(folder).sweep()
    layers = _layer_naming(trained, options.max_tokens)
    file = folder / SURVEY
    old = _read_about(file)
    if old is None and Shards(folder).finished():
        raise ArgumentError(
            f"out must be a new folder or that of a survey: {str(folder)!r} has files of a survey but no "
            f"{SURVEY}; choose another folder"
        )
    if old is not None and block is not None and block != old["corpus"]["block"]:
        raise ArgumentError(
            f"block must not change: {str(folder)!r} was started with {old['corpus']['block']}, this call "
            f"has {block}; leave it out, or choose another folder"
        )
    plan = Plan.of(
        corpus,
        field=options.field,
        besides=folder,
        block=block if old is None else old["corpus"]["block"],
    )
    about: dict[str, Any] = {
        "format": FORMAT,
        "version": str(sys.modules[__name__.partition(".")[0]].__version__),
        "model": {"title": trained.title, "fingerprint": fingerprint(trained.model, trained.tokenizer)},
        "options": asdict(options),
        "statistics": list(STATISTICS),
        "layers": layers,
        "torch": torch.__version__,  # for readers, as other versions may round differently
        "corpus": {
            "root": str(plan.root.resolve()),
            "documents": plan.documents,
            "block": plan.block,
            "left_out": asdict(plan.left_out),
            "digest": plan.digest,
        },
    }
    if old is None and not write_atomic(file, json.dumps(about, indent=2).encode(), anew=True):
        old = _read_about(file)  # another process was faster
        assert old is not None
    if old is not None:
        _check_same(folder, old, about, plan)
        _update_corpus(folder, old, about["corpus"], plan)
    if plan.lost:
        path, error = next(iter(plan.lost.items()))
        more = f" and {len(plan.lost) - 1} more" if len(plan.lost) > 1 else ""
        sys.stderr.write(f"survey: {path!r}{more} cannot be read: {error}\n")
    if not (folder / PLAN).exists():  # after the checks: a call that is refused writes nothing
        write_atomic(folder / PLAN, bytes_of(plan.pieces))
    return plan


def _layer_naming(trained: Pretrained, max_tokens: int | None) -> str:
    """Return whether layers are named by "numbers" or "paths", from one run of the model.

    A model whose attention cannot be intercepted raises before anything is written.
    """
    special = len(trained.tokenizer("")["input_ids"])
    if max_tokens is not None and max_tokens <= special:
        raise ArgumentError(
            f"max_tokens must be more than the number of special tokens, {special}: got {max_tokens}; try 64"
        )
    measure = Measure(trained, max_tokens=max_tokens)
    heads = measure.watched(read(PROBE, trained.model, trained.tokenizer, most=measure.most))
    return "numbers" if all(isinstance(head.layer, int) for head in heads.all()) else "paths"


def _read_about(file: Path) -> dict[str, Any] | None:
    """Return the contents of `survey.json`; None if there is none."""
    try:
        about: dict[str, Any] = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"out must hold a survey that can be read: cannot read {str(file)!r} ({error}); choose another "
            "folder"
        ) from error
    got = about.get("format") if isinstance(about, dict) else type(about).__name__
    if got != FORMAT:
        raise ArgumentError(
            f"out must hold a survey of this format, {FORMAT!r}: got {got!r}; choose another folder"
        )
    return about


def _check_same(folder: Path, earlier: dict[str, Any], about: dict[str, Any], plan: Plan) -> None:
    """Raise `ArgumentError` if a folder's survey is of another model, options, version or corpus."""
    old, new = earlier["model"], about["model"]
    old_model, new_model = (f"{model['title']!r} ({model['fingerprint'][:8]})" for model in (old, new))
    same_model = old["fingerprint"] == new["fingerprint"]
    for is_same, rule, before, now in (
        (same_model, "of this model", old_model, new_model),
        *(
            (earlier[name] == about[name], f"with these {name}", earlier[name], about[name])
            for name in ("options", "statistics")
        ),
        (
            earlier["version"] == about["version"],
            "of this version of headwise",
            earlier["version"],
            about["version"],
        ),
    ):
        if not is_same:
            raise ArgumentError(
                f"out must hold a survey {rule}: {str(folder)!r} was started with {before}, this call has "
                f"{now}; choose another folder"
            )
    if earlier["corpus"]["digest"] != about["corpus"]["digest"]:
        difference: str | None = "its files differ"
        if (folder / PLAN).exists():
            difference = Plan.read(folder / PLAN, plan.root, earlier["corpus"]["block"]).difference(plan)
        if difference is not None:
            raise ArgumentError(
                f"corpus must be the one that {str(folder)!r} was started with: {difference}; restore it, or "
                "choose another folder"
            )


def _update_corpus(folder: Path, earlier: dict[str, Any], corpus: dict[str, Any], plan: Plan) -> None:
    """Update the corpus of a survey with files that could not be read before and can be read now.

    Blocks whose documents changed are measured again.
    """
    if earlier["corpus"] == corpus:
        return
    if earlier["corpus"]["digest"] != corpus["digest"]:
        before = Plan.read(folder / PLAN, plan.root, plan.block)
        for number in before.changed_blocks(plan):
            Shards(folder).drop(number)
        write_atomic(folder / PLAN, bytes_of(plan.pieces))
    write_atomic(folder / SURVEY, json.dumps(earlier | {"corpus": corpus}, indent=2).encode())


def _join(folder: Path, corpus: str | os.PathLike[str], trained: Pretrained) -> Plan:
    """Read the plan that rank 0 wrote, and check that the model is the same here."""
    about = _read_about(folder / SURVEY)
    if about is None:
        raise ArgumentError(
            f"out must be the same folder for all processes: {str(folder)!r} has no {SURVEY} here; use a "
            "file system that all machines share"
        )
    local = fingerprint(trained.model, trained.tokenizer)
    if local != about["model"]["fingerprint"]:
        raise ArgumentError(
            f"model must be the same in all processes: rank 0 has {about['model']['fingerprint'][:8]}, this "
            f"process {local[:8]}; give all machines the same files"
        )
    place = Path(os.path.expanduser(corpus))
    return Plan.read(folder / PLAN, place if place.is_dir() else place.parent, about["corpus"]["block"])


# Measuring


def _measure_blocks(worker: Worker, plan: Plan, group: Group | None, tell: Progress) -> None:
    """Measure the blocks of this process, and report progress."""
    done = _DoneCounter(plan, worker.shards, tell, alone=group is None)
    for number in blocks(len(plan), worker.shards, group):
        worker.block(number, done.tell)
        done.finish(number)
    done.tell(at_once=True)


class _DoneCounter:
    """Counts the documents that are done, those of other processes by reading the folder."""

    def __init__(self, plan: Plan, shards: Shards, tell: Progress, *, alone: bool) -> None:
        self.plan, self.shards, self._tell, self.alone = plan, shards, tell, alone
        self._finished: set[int] = set()
        self._count, self._looked = 0, 0.0
        self.tell(at_once=True)

    def finish(self, *numbers: int) -> None:
        """Count the documents of these blocks, each block once."""
        for number in {*numbers} - self._finished:
            self._finished.add(number)
            self._count += self.plan.in_block(number)

    def tell(self, more: int = 0, *, at_once: bool = False) -> None:
        """Report how many documents are done; `more`: of a block that is not finished."""
        if at_once or (not self.alone and monotonic() - self._looked > 1):
            self._looked = monotonic()
            self.finish(*(number for number in self.shards.finished() if number < len(self.plan)))
        self._tell(min(self._count + more, self.plan.documents), self.plan.documents)


@contextmanager
def _progress_function(progress: bool | Progress, group: Group | None) -> Iterator[Progress]:
    """Yield the function to report progress to; of several processes only the first reports."""
    if callable(progress):
        yield progress
    elif progress and (group is None or group.rank == 0):
        from ..show.tables import Bar

        with Bar("Surveying", "documents") as bar:
            yield bar.tell
    else:
        yield lambda done, total: None


def _measure_roles(folder: Path, trained: Pretrained) -> Roles | None:
    """Return the roles in the folder, or measure them; None if that is not possible for the model."""
    file = folder / ROLES
    if not file.exists():
        try:
            measured = roles_of(trained.model, trained.tokenizer, progress=False)
        except (ArgumentError, TypeError, NotImplementedError) as error:
            sys.stderr.write(f"survey: roles were not measured: {first_line(error)}\n")
            return None
        write_atomic(file, measured.to_json().encode())
    return Roles.from_json(file.read_text("utf-8"))
