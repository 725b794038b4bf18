"""Why many heads? The same Transformer with 1, 2, 4, 8, 16 and 32 heads a layer, several seeds each.

    python -m studies.head_counts --device cuda --out DIR       trains, measures, writes a JSON there
    python -m studies.head_counts --show studies/results/head_counts.json --picture docs/head_counts.png
    python -m studies.head_counts --trial --out DIR             all of it, tiny: the numbers mean nothing

Parameters are equal, head_dim = d_model / heads. Models of one seed begin with the same weights and read the
same tokens in the same order, so that they differ in nothing but how the width is cut into heads; the next
seed has other weights and another order. Every model is a process of its own, several at once on one GPU: of
one small model the host is the bottleneck. What goes wrong in one is reported, and the others go on; results
are written whenever a model ends. `--resume` takes the models of an earlier file as they are.

What is measured of each, in its own process: `head_counts_measures.py`; what it comes to:
`head_counts_table.py` and `head_counts_report.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.machine import describe

from headwise.models import Transformer, fit
from headwise.whole_files import whole_file

from . import corpus, head_counts_models
from .head_counts_measures import (
    TRIAL,
    Job,
    Plan,
    Probes,
    Report,
    attempted,
    diversity_of,
    in_words,
    measured,
    next_token_loss,
)
from .head_counts_report import report

ROOT = Path(__file__).resolve().parents[1]
NAME = "head_counts.json"


# One model


def one_model(plan: Plan, heads: int, seed: int, tokens: corpus.Corpus, device: str) -> Report:
    """Train and measure a model, and return the numbers for JSON."""
    torch.manual_seed(seed)
    model = Transformer(plan.config(heads))  # drawn on the CPU: the same weights on any device
    report: Report = {
        "heads": heads,
        "seed": seed,
        "head_dim": model.config.d_model // heads,
        "rope_pairs": None
        if model.config.rope is None
        else model.config.rope.turned(model.config.d_model // heads) // 2,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "initial_weights": _digest(model),
        "problems": {},
    }
    model.to(device)
    validation = tokens.validation.to(torch.int32)
    probes = Probes(plan, validation, model.config.vocab_size, device)
    with attempted(report, "before"):
        report["before"] = diversity_of(model, probes)
    history = fit(
        model,
        head_counts_models.windows(tokens.train.to(torch.int32).to(device), plan.batch, plan.length, seed),
        next_token_loss,
        steps=plan.steps,
        optimizer=head_counts_models.optimizer(model, plan.lr),
        warmup=plan.warmup,
        schedule=plan.schedule,
        clip=plan.clip,
        autocast=None if device == "cpu" else torch.bfloat16,
        seed=seed,
    )
    report |= {
        "steps": history.steps,
        "seconds": round(history.seconds, 2),
        "training_losses": _stretches(history.losses),
    }
    return report | measured(model, plan, validation, probes, report)


def _digest(model: Transformer) -> str:
    """Return a digest of the weights."""
    digest = hashlib.sha256()
    for weight in model.parameters():
        digest.update(weight.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _stretches(losses: Sequence[float], count: int = 30) -> list[float]:
    """Return the mean over each stretch of steps, as a curve."""
    size = max(1, len(losses) // count)
    some = [losses[start : start + size] for start in range(0, len(losses), size)]
    return [round(sum(each) / len(each), 4) for each in some]


# All of them, several at once


def crew(
    jobs: Sequence[Job],
    start: Callable[[Job], subprocess.Popen[Any]],
    *,
    at_once: int,
    deadline: float,
    ended: Callable[[Job, str | None], None],
    pause: float = 0.2,
) -> None:
    """Run processes, several at once, until all have ended or the time is up; kill the rest.

    Args:
        start: begins the process of a job.
        deadline: on the clock of time.monotonic.
        ended: told of every job, and what went wrong with it.
    """
    waiting, running = list(jobs), dict[Job, subprocess.Popen[Any]]()
    try:
        while (waiting or running) and time.monotonic() < deadline:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                running[job] = start(job)
            for job, process in list(running.items()):
                if process.poll() is not None:
                    del running[job]
                    code = process.returncode
                    ended(job, None if code == 0 else f"its process ended with code {code}")
            time.sleep(pause if running else 0)
    finally:
        for process in running.values():
            process.kill()
        for process in running.values():
            process.wait()
    for job in running:
        ended(job, "out of time while it ran")
    for job in waiting:
        ended(job, "out of time before it began")


def assembled(plan: Plan, about: Report, models: dict[Job, Report], missing: dict[Job, str]) -> Report:
    """Return the results: settings, machine, numbers of every model, and missing models."""
    return {
        "settings": _settings(plan),
        "run": about,
        "models": [models[job] for job in sorted(models)],
        "missing": [
            {"heads": heads, "seed": seed, "why": missing[heads, seed]} for heads, seed in sorted(missing)
        ],
    }


def _settings(plan: Plan) -> Report:
    """Return the settings that all models share, such as their sizes."""
    sizes = plan.config(1)
    model = {name: getattr(sizes, name) for name in ("d_model", "num_layers", "d_ff", "vocab_size")}
    return json.loads(json.dumps(asdict(plan))) | {"model": model}


def written(results: Report) -> str:
    """Return JSON with a line for each model."""
    lists = {
        name: "[\n" + ",\n".join(json.dumps(each) for each in results[name]) + "\n]"
        if results[name]
        else "[]"
        for name in ("models", "missing")
    }
    others = {name: json.dumps(results[name]) for name in results if name not in lists}
    return "{\n" + ",\n".join(f'"{name}": {text}' for name, text in (others | lists).items()) + "\n}\n"


def run_all(plan: Plan, options: argparse.Namespace) -> Report:
    """Train and measure every model without results."""
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    at_once = options.at_once or (6 if options.device == "cuda" else 1)
    about = describe(options.device) | {"device": options.device, "at_once": at_once}
    models: dict[Job, Report] = {}
    if options.resume is not None:
        models = taken_over(plan, json.loads(options.resume.read_text("utf-8")))
    jobs = [job for job in plan.jobs if job not in models]
    missing = dict.fromkeys(jobs, "it has not ended yet")

    def save() -> Report:
        results = assembled(plan, about | {"seconds": round(time.monotonic() - began, 1)}, models, missing)
        with whole_file(options.out / NAME) as half:
            half.write_text(written(results), "utf-8")
        return results

    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        tokens = _random_tokens() if plan.trial else corpus.load()
        torch.save([tokens.train, tokens.validation], directory / "tokens.pt")
        (directory / "plan.json").write_text(json.dumps(asdict(plan)), "utf-8")

        def start(job: Job) -> subprocess.Popen[Any]:
            heads, seed = job
            command = [sys.executable, "-m", "studies.head_counts", "--one", str(heads), str(seed)]
            command += ["--inside", folder, "--device", options.device]
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            threads = {"OMP_NUM_THREADS": str(max(1, cores // at_once))}
            paths = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path]))}
            with (options.out / f"heads{heads}_seed{seed}.log").open("wb") as log:
                return subprocess.Popen(
                    command, cwd=ROOT, env=os.environ | threads | paths, stdout=log, stderr=log
                )

        def ended(job: Job, trouble: str | None) -> None:
            place = directory / "heads{}_seed{}.json".format(*job)
            report = json.loads(place.read_text("utf-8")) if place.exists() else {}
            if "failed" in report or not report:
                missing[job] = report.get("failed") or trouble or "it ended without a result"
            else:
                models[job] = report
                missing.pop(job)
            save()
            message = missing.get(job) or f"loss {report.get('validation_loss')}, {report['seconds']:.0f} s"
            print(
                f"{time.monotonic() - began:5.0f} s  {job[0]:2} heads, seed {job[1]}: {message}", flush=True
            )

        deadline = began + 60 * options.minutes
        crew(jobs, start, at_once=at_once, deadline=deadline, ended=ended)
    return save()


def taken_over(plan: Plan, earlier: Report) -> dict[Job, Report]:
    """Return the models of an earlier run that belong to this plan.

    Raises:
        ValueError: it was run with other settings: its models cannot stand beside these.
    """
    mine = _settings(plan)
    free = ("heads", "seeds")
    differ = [name for name in mine if name not in free and mine[name] != earlier["settings"].get(name)]
    if differ:
        name = differ[0]
        raise ValueError(
            f"resume must have the same settings: {name}={earlier['settings'].get(name)!r}, here "
            f"{mine[name]!r}; give the same options"
        )
    wanted = set(plan.jobs)
    models = {(each["heads"], each["seed"]): each for each in earlier["models"]}
    return {job: each for job, each in models.items() if job in wanted}


def _random_tokens() -> corpus.Corpus:
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 61, (1200,), generator=drawn).to(torch.uint16)
    return corpus.Corpus(ids[:900], ids[900:])


def one_inside(options: argparse.Namespace) -> int:
    """Run the process of one model: write its numbers, or its error, to its own file."""
    (heads, seed), directory = options.one, options.inside
    fields = json.loads((directory / "plan.json").read_text("utf-8"))
    plan = Plan(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    )
    train, validation = torch.load(directory / "tokens.pt")
    try:
        report = one_model(plan, heads, seed, corpus.Corpus(train, validation), options.device)
    except Exception as error:
        traceback.print_exc()
        report = {"failed": in_words(error)}
    with whole_file(directory / f"heads{heads}_seed{seed}.json") as half:
        half.write_text(json.dumps(report), "utf-8")
    return 1 if "failed" in report else 0


# The command


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if every model has results."""
    options = _parser().parse_args(arguments)
    if options.one is not None:
        return one_inside(options)
    if options.show is not None:
        results = json.loads(options.show.read_text("utf-8"))
    else:
        plan = TRIAL if options.trial else Plan()
        changes = {name: getattr(options, name) for name in ("heads", "seeds", "steps", "batch")}
        plan = replace(plan, **{name: value for name, value in changes.items() if value is not None})
        results = run_all(plan, options)
    print(report(results, options.picture))
    return 1 if results["missing"] else 0


def _parser() -> argparse.ArgumentParser:
    numbers = {"type": lambda text: tuple(int(each) for each in text.split(",")), "metavar": "1,2,4"}
    parser = argparse.ArgumentParser(prog="python -m studies.head_counts", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, default=Path("studies/results"), help="a folder for the results")
    parser.add_argument("--minutes", type=float, default=7, help="time limit; finished models are written")
    parser.add_argument("--at-once", type=int, help="models in parallel; default: 6 on a GPU, else 1")
    parser.add_argument("--heads", **numbers, help="heads per layer")
    parser.add_argument("--seeds", **numbers)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, help="sequences per step")
    parser.add_argument("--resume", type=Path, metavar="JSON", help="reuse the models of this file")
    parser.add_argument("--trial", action="store_true", help="tiny models on random tokens")
    parser.add_argument("--show", type=Path, metavar="JSON", help="print tables of these results")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="also write the picture")
    parser.add_argument("--one", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
