"""Why many heads? The same Transformer with 1, 2, 4, 8, 16 and 32 heads a layer, several seeds each.

    python -m studies.head_counts --device cuda --out DIR       trains, measures, writes a JSON there
    python -m studies.head_counts --show studies/results/head_counts.json --picture docs/head_counts.png
    python -m studies.head_counts --trial --out DIR             all of it, tiny: the numbers mean nothing

Parameters are equal, head_dim = d_model / heads. Models of one seed begin with the same weights and read the
same tokens in the same order, so that they differ in nothing but how the width is cut into heads; the next
seed has other weights and another order. Every model is a process of its own, several at once on one GPU: of
one small model the host is the bottleneck. What goes wrong in one is reported, and the others go on; results
are written whenever a model ends. `--resume` takes the models of an earlier file as they are.

What is measured of each, in its own process: `measured`. Tables and picture: `head_counts_report.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.machine import describe
from torch import Tensor
from torch.nn.functional import cross_entropy

import headwise as hw
from headwise.models import Transformer, TransformerConfig, fit
from headwise.whole_files import whole_file

from . import corpus, mini
from .head_counts_report import FRACTIONS, report

__all__ = ["Plan", "assembled", "crew", "main", "measured", "one_model", "without"]

ROOT = Path(__file__).resolve().parents[1]
NAME = "head_counts.json"

Job = tuple[int, int]  # heads a layer, seed
Report = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What is the same for every model; all of it stands in the results."""

    heads: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 1500
    batch: int = mini.BATCH
    length: int = mini.LENGTH
    lr: float = mini.LR  # of mini's optimizer
    warmup: int = mini.WARMUP
    schedule: str = "cosine"
    clip: float = 1.0
    draws: int = 20  # sets of heads switched off, of each size; all sets where there are no more
    windows: int = 64  # of validation text, on which heads are switched off
    watched: int = 8  # of these, on which heads are compared and labelled
    period: int = 128  # random tokens, said twice
    repeated: int = 8  # such sequences
    trial: bool = False  # a tiny model on random tokens

    @property
    def jobs(self) -> list[Job]:
        """All head counts of a seed before the next seed: whatever time leaves out is a seed."""
        return [(heads, seed) for seed in self.seeds for heads in self.heads]

    def config(self, heads: int) -> TransformerConfig:
        """The model with so many heads a layer."""
        config = mini.config(heads)
        if self.trial:
            config = replace(config, vocab_size=61, d_model=16, num_layers=2, d_ff=0, head_dim=None)
        return config


TRIAL = Plan(
    heads=(1, 2), seeds=(0, 1), steps=3, batch=5, length=23, warmup=2, draws=3, windows=3, watched=2,
    period=11, repeated=2, trial=True,
)  # fmt: skip


# One model


def one_model(plan: Plan, heads: int, seed: int, tokens: corpus.Corpus, device: str) -> Report:
    """Train one and measure it: numbers alone, as JSON takes them."""
    torch.manual_seed(seed)
    model = Transformer(plan.config(heads))  # drawn on the CPU: the same weights on any device
    told: Report = {
        "heads": heads,
        "seed": seed,
        "head_dim": model.config.d_model // heads,
        "rope_pairs": None if model.config.rope is None else model.config.d_model // heads // 2,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "initial_weights": _digest(model),
        "problems": {},
    }
    model.to(device)
    validation = tokens.validation.to(torch.int32)
    probes = Probes(plan, validation, model.config.vocab_size, device)
    with _part(told, "before"):
        told["before"] = diversity_of(model, probes)
    history = fit(
        model,
        mini.windows(tokens.train.to(torch.int32).to(device), plan.batch, plan.length, seed),
        next_token_loss,
        steps=plan.steps,
        optimizer=mini.optimizer(model, plan.lr),
        warmup=plan.warmup,
        schedule=plan.schedule,
        clip=plan.clip,
        autocast=None if device == "cpu" else torch.bfloat16,
        seed=seed,
    )
    told |= {
        "steps": history.steps,
        "seconds": round(history.seconds, 2),
        "training_losses": _stretches(history.losses),
    }
    return told | measured(model, plan, validation, probes, told)


def next_token_loss(model: torch.nn.Module, batch: Tensor) -> Tensor:
    """Nats per token of [B, length + 1]."""
    logits = model(batch[:, :-1]).flatten(0, 1)
    return cross_entropy(logits.float(), batch[:, 1:].flatten())


def _digest(model: Transformer) -> str:
    """The same for the same weights."""
    digest = hashlib.sha256()
    for weight in model.parameters():
        digest.update(weight.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _stretches(losses: Sequence[float], count: int = 30) -> list[float]:
    """The mean of each stretch of steps: a curve."""
    size = max(1, len(losses) // count)
    some = [losses[start : start + size] for start in range(0, len(losses), size)]
    return [round(sum(each) / len(each), 4) for each in some]


@contextmanager
def _part(told: Report, name: str) -> Iterator[None]:
    """A measurement that fails is told of, and costs no other."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        told["problems"][name] = in_words(error)


def in_words(error: BaseException) -> str:
    """The error in one line, without the places in files."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"[:300]


# What is measured


class Probes:
    """The texts that every model is measured on, the same for all."""

    def __init__(self, plan: Plan, validation: Tensor, vocab_size: int, device: str) -> None:
        starts = torch.linspace(0, len(validation) - plan.length - 1, plan.windows).long().tolist()
        text = torch.stack([validation[start : start + plan.length + 1] for start in starts])
        self.text = text.long().to(device)  # [windows, length + 1]
        spread = torch.linspace(0, plan.windows - 1, plan.watched).long()
        self.watched = self.text[spread, :-1]
        drawn = torch.Generator().manual_seed(0)
        once = torch.randint(1, vocab_size, (plan.repeated, plan.period), generator=drawn)  # 0 begins a text
        self.repeated = torch.cat([once, once], dim=1).to(device)  # [repeated, 2 period]


@torch.no_grad()
def measured(model: Transformer, plan: Plan, validation: Tensor, probes: Probes, told: Report) -> Report:
    """Everything that the table tells of a trained model; what fails is added to told["problems"]."""
    began = time.monotonic()
    model.eval()
    found: Report = {}
    with _part(told, "validation_loss"):
        found["validation_loss"] = _number(mini.validation_loss(model, validation, plan.length))
    with _part(told, "after"):
        found["after"] = diversity_of(model, probes)
    with _part(told, "labels"):
        found |= _labels(model, probes)
    with _part(told, "induction"):
        found |= _repetition(model, plan, probes)
    with _part(told, "without"):
        found["without"] = _robustness(model, plan, probes)
    found["measured_in"] = round(time.monotonic() - began, 2)
    return found


@torch.no_grad()
def diversity_of(model: Transformer, probes: Probes) -> Report:
    """How much the heads of a layer differ, mean over pairs and layers; None where a layer has one head.

    attention: Jensen-Shannon divergence of what they look at, nats, 0 to 0.69; outputs: cosine of what they
    say, whose negative is the disagreement of Li 2018.
    """
    with hw.watch(model, keep=False, statistics=(), pooled=None, diversity=True) as heads:
        model(probes.watched)
    found = hw.diversity(heads)
    cosines = [float(hw.heads.one_number(matrix[None])) for matrix in found.outputs.values()]
    return {
        "attention": _number(found.number),
        "outputs": _number(sum(cosines) / len(cosines)),
        "attention_by_layer": [_number(each) for each in found.by_layer.values()],
    }


def _labels(model: Transformer, probes: Probes) -> Report:
    """On validation text: how many heads have which label, and the best previous-token head."""
    with hw.watch(model, pooled=None, patterns=True) as heads:
        model(probes.watched)
    everyone = heads.all()
    best = max(everyone, key=lambda head: head.values["previous"])
    return {
        "labels": dict(Counter(head.label.name for head in everyone)),
        "previous": {"layer": best.layer, "head": best.head, "score": _number(best.values["previous"])},
    }


def _repetition(model: Transformer, plan: Plan, probes: Probes) -> Report:
    """On random tokens said twice: the best induction head, and the loss of the first and second time."""
    with hw.watch(model, keep=True, statistics=(), pooled=None) as heads:
        logits = model(probes.repeated)
    stripes = torch.stack(
        [hw.heads.induction_stripe(layer.map, plan.period).mean(0).cpu() for layer in heads.values()]
    )  # [layers, H]
    layer, head = divmod(int(stripes.argmax()), stripes.shape[1])
    losses = cross_entropy(logits[:, :-1].transpose(1, 2), probes.repeated[:, 1:], reduction="none").mean(0)
    first, second = (
        losses[: plan.period - 1],
        losses[plan.period :],
    )  # between them: the first is unforeseeable
    return {
        "induction": {"layer": layer, "head": head, "score": _number(float(stripes.max()))},
        "said_twice": {"first": _number(float(first.mean())), "second": _number(float(second.mean()))},
    }


def _robustness(model: Transformer, plan: Plan, probes: Probes) -> Report:
    """The loss with every head, without each one, and without fractions of all heads (their outputs 0)."""
    layers, heads = model.config.num_layers, model.config.num_heads
    every = [(layer, head) for layer in range(layers) for head in range(heads)]
    found: Report = {
        "baseline": _number(float(next_token_loss(model, probes.text))),
        "one": without(model, probes.text, [[head] for head in every]),
    }
    for name, share in FRACTIONS.items():
        count = len(every) * share
        if count == int(count):  # an eighth of four heads is none
            found[name] = without(model, probes.text, sets_of(every, int(count), plan.draws))
    return found


def without(model: Transformer, text: Tensor, sets: Iterable[list[tuple[int, int]]]) -> list[float]:
    """The loss without each set of heads."""
    losses = []
    for some in sets:
        with hw.ablate(model, some):
            losses.append(_number(float(next_token_loss(model, text))))
    return losses


def sets_of(heads: list[tuple[int, int]], count: int, draws: int) -> list[list[tuple[int, int]]]:
    """Different sets of so many heads: all there are, or as many as asked for, drawn; the same every time."""
    if math.comb(len(heads), count) <= draws:
        return [list(some) for some in itertools.combinations(heads, count)]
    random, drawn = torch.Generator().manual_seed(0), dict[tuple[int, ...], None]()
    while len(drawn) < draws:
        some = torch.randperm(len(heads), generator=random)[:count].sort().values
        drawn[tuple(some.tolist())] = None
    return [[heads[place] for place in some] for some in drawn]


def _number(value: float) -> float | None:
    """As JSON takes it: five digits behind the point; NaN was not measured."""
    return round(value, 5) if math.isfinite(value) else None


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
    """Run processes, several at once, until all have ended or the time is up; none outlives this.

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
    """What is written: settings, machine, every model's numbers, and what is missing."""
    return {
        "settings": json.loads(json.dumps(asdict(plan))),
        "run": about,
        "models": [models[job] for job in sorted(models)],
        "missing": [
            {"heads": heads, "seed": seed, "why": missing[heads, seed]} for heads, seed in sorted(missing)
        ],
    }


def written(results: Report) -> str:
    """JSON, a line for each model."""
    lists = {
        name: "[\n" + ",\n".join(json.dumps(each) for each in results[name]) + "\n]"
        if results[name]
        else "[]"
        for name in ("models", "missing")
    }
    others = {name: json.dumps(results[name]) for name in results if name not in lists}
    return "{\n" + ",\n".join(f'"{name}": {text}' for name, text in (others | lists).items()) + "\n}\n"


def run_all(plan: Plan, options: argparse.Namespace) -> Report:
    """Train and measure every model that is not there yet."""
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
        here = Path(folder)
        tokens = _random_tokens() if plan.trial else corpus.load()
        torch.save([tokens.train, tokens.validation], here / "tokens.pt")
        (here / "plan.json").write_text(json.dumps(asdict(plan)), "utf-8")

        def start(job: Job) -> subprocess.Popen[Any]:
            heads, seed = job
            command = [sys.executable, "-m", "studies.head_counts", "--one", str(heads), str(seed)]
            command += ["--inside", folder, "--device", options.device]
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            threads = {"OMP_NUM_THREADS": str(max(1, cores // at_once))}
            found = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path]))}
            with (options.out / f"heads{heads}_seed{seed}.log").open("wb") as log:
                return subprocess.Popen(
                    command, cwd=ROOT, env=os.environ | threads | found, stdout=log, stderr=log
                )

        def ended(job: Job, trouble: str | None) -> None:
            place = here / "heads{}_seed{}.json".format(*job)
            told = json.loads(place.read_text("utf-8")) if place.exists() else {}
            if "failed" in told or not told:
                missing[job] = told.get("failed") or trouble or "it ended without a result"
            else:
                models[job] = told
                missing.pop(job)
            save()
            said = (
                missing.get(job) or f"validation loss {told.get('validation_loss')}, {told['seconds']:.0f} s"
            )
            print(f"{time.monotonic() - began:5.0f} s  {job[0]:2} heads, seed {job[1]}: {said}", flush=True)

        deadline = began + 60 * options.minutes
        crew(jobs, start, at_once=at_once, deadline=deadline, ended=ended)
    return save()


def taken_over(plan: Plan, earlier: Report) -> dict[Job, Report]:
    """The models of an earlier run that this plan asks for.

    Raises:
        ValueError: it was run with other settings: its models cannot stand beside these.
    """
    mine = json.loads(json.dumps(asdict(plan)))
    free = ("heads", "seeds")
    differ = [name for name in mine if name not in free and mine[name] != earlier["settings"].get(name)]
    if differ:
        name = differ[0]
        raise ValueError(
            f"resume must be of the same settings: {name}={earlier['settings'].get(name)!r}, here "
            f"{mine[name]!r}; give the same options"
        )
    wanted = set(plan.jobs)
    found = {(each["heads"], each["seed"]): each for each in earlier["models"]}
    return {job: each for job, each in found.items() if job in wanted}


def _random_tokens() -> corpus.Corpus:
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 61, (1200,), generator=drawn).to(torch.uint16)
    return corpus.Corpus(ids[:900], ids[900:])


def one_inside(options: argparse.Namespace) -> int:
    """The process of one model: its numbers, or what went wrong, in a file of its own."""
    (heads, seed), here = options.one, options.inside
    given = json.loads((here / "plan.json").read_text("utf-8"))
    plan = Plan(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})
    train, validation = torch.load(here / "tokens.pt")
    try:
        told = one_model(plan, heads, seed, corpus.Corpus(train, validation), options.device)
    except Exception as error:
        traceback.print_exc()
        told = {"failed": in_words(error)}
    with whole_file(here / f"heads{heads}_seed{seed}.json") as half:
        half.write_text(json.dumps(told), "utf-8")
    return 1 if "failed" in told else 0


# The command


def main(arguments: Sequence[str] | None = None) -> int:
    """0: every model is there."""
    options = _parser().parse_args(arguments)
    if options.one is not None:
        return one_inside(options)
    if options.show is not None:
        results = json.loads(options.show.read_text("utf-8"))
    else:
        plan = TRIAL if options.trial else Plan()
        given = {name: getattr(options, name) for name in ("heads", "seeds", "steps", "batch")}
        plan = replace(plan, **{name: value for name, value in given.items() if value is not None})
        results = run_all(plan, options)
    print(report(results, options.picture))
    return 1 if results["missing"] else 0


def _parser() -> argparse.ArgumentParser:
    numbers = {"type": lambda text: tuple(int(each) for each in text.split(",")), "metavar": "1,2,4"}
    parser = argparse.ArgumentParser(prog="python -m studies.head_counts", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, default=Path("studies/results"), help="a folder for the results")
    parser.add_argument("--minutes", type=float, default=7, help="after which what has ended is written")
    parser.add_argument("--at-once", type=int, help="models side by side; by default 6 on a GPU, else 1")
    parser.add_argument("--heads", **numbers, help="heads a layer")
    parser.add_argument("--seeds", **numbers)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, help="sequences a step")
    parser.add_argument("--resume", type=Path, metavar="JSON", help="take its models as they are")
    parser.add_argument("--trial", action="store_true", help="tiny models on random tokens")
    parser.add_argument("--show", type=Path, metavar="JSON", help="train nothing: tables of these results")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="write the picture, too")
    parser.add_argument("--one", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
