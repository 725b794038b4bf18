"""Previous-token, copying and local heads: their presence in a model, and their effect on the loss.

    python -m studies.probes                                   the built-in model
    python -m studies.probes MODEL --out FILE --device cuda    another: what headwise.models.load takes
    python -m studies.probes smollm2                           SmolLM2-135M, as `make test-models` installs it

Three probes, none of them in anybody's training: random tokens, prose and code of `probe_texts.py`, each said
twice. Every head gets its scores on each. A head is of a kind where it passes the kind's threshold on every
probe. Then the heads of a kind are switched off, and beside them as many others of the same layers, drawn at
random: what is lost on the second saying, where all there is to do is to copy? Without the previous-token
heads, do the induction heads still find their place?

Letters: B sequences, P period (tokens that are said twice), L layers, H heads.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw
from headwise.errors import ShapeError
from headwise.models.pretrained import most_tokens
from headwise.whole_files import whole_file

from .probe_texts import CODE, PROSE
from .switched_off import DRAWS, Facts, Place, Probe, ablations, stripe
from .trained_models import load

RESULTS = Path(__file__).parent / "results" / "probes.json"
PERIODS = (50, 100, 200)  # of random tokens
PIECE = 120  # tokens of prose or code that are said twice, at most
SEQUENCES = 4  # of random tokens, per period

Scores = dict[str, Tensor]  # [L, H] each


@dataclass(frozen=True)
class Kind:
    """The measurement for a kind of head."""

    score: str
    threshold: float
    meaning: str


KINDS = {
    "previous-token": Kind("previous", 0.7, "mean weight on the token before"),
    "induction": Kind("induction_stripe", 0.4, "mean weight on what followed when this was said before"),
    "local": Kind("locality", 0.8, "how near it looks; labelled local, so nothing more special"),
}
STATISTICS = ("entropy", "first", "previous", "itself", "local")
SHOWN = ("previous", "induction_stripe", "duplicate_token", "local", "first")


def fingerprint(model: nn.Module) -> str:
    """Return a fingerprint of the weights as they are stored, in float16."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {list(value.shape)} ".encode())
        digest.update(value.half().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


# The probes


def probes_of(
    model: nn.Module,
    tokenizer: Any,
    *,
    periods: Sequence[int] = PERIODS,
    piece: int = PIECE,
    sequences: int = SEQUENCES,
    seed: int = 0,
) -> list[Probe]:
    """Return the probes for this tokenizer: random tokens, prose and code, each repeated once.

    Args:
        periods: how many random tokens are said twice, one batch each.
        piece: prose and code are cut into equal pieces of at most so many tokens, each said twice.
        sequences: how many of each period.

    Raises:
        ShapeError: what is said twice does not fit into the positions that the model has.
    """
    most = most_tokens(model, tokenizer)
    first = getattr(tokenizer, "bos_token_id", None)
    start = 0 if first is None else 1
    longest = max(*periods, piece)
    if most is not None and start + 2 * longest > most:
        raise ShapeError(
            f"periods must fit twice into the input of the model: {start} + 2 x {longest} > {most}; "
            f"{(most - start) // 2} is the longest"
        )
    random = torch.Generator().manual_seed(seed)
    special = set(tokenizer.all_special_ids)
    words = torch.tensor([word for word in range(vocabulary_of(model)) if word not in special])
    drawn = [words[torch.randint(len(words), (sequences, period), generator=random)] for period in periods]

    def twice(ids: Tensor) -> Tensor:
        front = [] if first is None else [torch.full((len(ids), 1), first)]
        return torch.cat([*front, ids, ids], 1)

    made = [Probe("random tokens", tuple(twice(ids) for ids in drawn), start)]
    for name, text in (("prose", PROSE), ("code", CODE)):
        made.append(Probe(name, (twice(pieces(tokenizer, text, piece)),), start))
    return made


def pieces(tokenizer: Any, text: str, most: int) -> Tensor:
    """Return a text in the fewest equal pieces of at most so many tokens, int [B, P], without the rest."""
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"].flatten()
    count = math.ceil(len(ids) / most)
    size = len(ids) // count
    return ids[: count * size].view(count, size)


def vocabulary_of(model: nn.Module) -> int:
    size = getattr(model.config, "vocab_size", None)
    assert isinstance(size, int)
    return size


# Scores


@torch.no_grad()
def scores_on(model: nn.Module, probe: Probe) -> Scores:
    """Return every score of every head, [L, H] each: the mean over sequences."""
    total: Scores = {}
    count = sum(len(ids) for ids in probe.batches)
    for ids in probe.batches:
        with hw.watch(model, statistics=STATISTICS, pooled=None, keep=True) as heads:
            model(ids)
        rows: dict[str, list[Tensor]] = {}
        for layer in heads.values():
            map = layer.map
            numbers = {name: layer.statistics[name] for name in STATISTICS}
            numbers |= {name: layer.statistics[name] for name in ("locality", "spread")}
            numbers["duplicate_token"] = hw.heads.duplicate_token(map, ids).mean(0)
            numbers["induction_stripe"] = stripe(map, probe.period(ids))
            for name, value in numbers.items():
                rows.setdefault(name, []).append(value.double().cpu())
        for name, values in rows.items():
            part = torch.stack(values) * (len(ids) / count)
            total[name] = total[name] + part if name in total else part
    return total


def stripes_by_period(model: nn.Module, probe: Probe) -> Facts:
    """Return the stripe of every head by period: a longer distance is harder."""
    stripes: Facts = {}
    for ids in probe.batches:
        scores = scores_on(model, Probe(probe.name, (ids,), probe.start))["induction_stripe"]
        stripes[str(probe.period(ids))] = [[round(x, 4) for x in row] for row in scores.tolist()]
    return stripes


def labels_of(scores: Scores) -> list[list[hw.heads.Label]]:
    """Return a label per head by the thresholds of `headwise.heads.LABELS`; induction is the stripe."""
    by_name = scores | {"induction": scores["induction_stripe"]}
    layers, heads = scores["previous"].shape
    return [
        [hw.heads.label({name: float(value[i, j]) for name, value in by_name.items()}) for j in range(heads)]
        for i in range(layers)
    ]


def passing(kind: str, scores: Scores) -> Tensor:
    """Return True for heads of a kind on one probe, bool [L, H]."""
    rule = KINDS[kind]
    enough = scores[rule.score] >= rule.threshold
    if kind == "local":  # what is true of a previous-token head, too, says less of it
        enough &= torch.tensor([[label.name == "local" for label in row] for row in labels_of(scores)])
    return enough


def places(which: Tensor, order: Tensor) -> list[Place]:
    """Return (layer, head) where the mask is True, the largest in `order` first."""
    chosen = [(int(i), int(j)) for i, j in which.nonzero()]
    return sorted(chosen, key=lambda at: -float(order[at]))


# All of it


def measured(
    model: nn.Module,
    tokenizer: Any,
    title: str,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    probes: Sequence[Probe] | None = None,
) -> Facts:
    """Return all measurements for JSON."""
    device = next(model.parameters()).device
    probes = probes_of(model, tokenizer, seed=seed) if probes is None else probes
    probes = [Probe(p.name, tuple(ids.to(device) for ids in p.batches), p.start) for p in probes]
    scores = {probe.name: scores_on(model, probe) for probe in probes}
    layers, heads = next(iter(scores.values()))["previous"].shape
    kinds: Facts = {}
    ablated: dict[str, list[Place]] = {}
    for kind, rule in KINDS.items():
        by_probe = torch.stack([passing(kind, each) for each in scores.values()])  # [probes, L, H]
        values = torch.stack([each[rule.score] for each in scores.values()])
        mean = values.mean(0)
        every, some = places(by_probe.all(0), mean), places(by_probe.any(0), mean)
        best = divmod(int(values.amin(0).argmax()), heads)
        kinds[kind] = {
            "score": rule.score,
            "threshold": rule.threshold,
            "found": bool(every),
            "heads": [_head(at, values, by_probe, scores) for at in (some or [best])],
        }
        ablated[kind] = some or [best]
    del ablated["local"]
    return {
        "model": title,
        "fingerprint": fingerprint(model),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "layers": layers,
        "heads": heads,
        "probes": [_described(probe) for probe in probes],
        "kinds": kinds,
        "stripe_by_period": stripes_by_period(model, probes[0]),
        "scores": {
            probe: {
                name: [[round(x, 4) for x in row] for row in value.tolist()] for name, value in each.items()
            }
            for probe, each in scores.items()
        },
        "labels": {
            probe: [[str(x) for x in row] for row in labels_of(each)] for probe, each in scores.items()
        },
        "ablations": list(ablations(model, probes, ablated, heads, draws=draws, seed=seed)),
    }


def _head(at: Place, values: Tensor, passes: Tensor, scores: dict[str, Scores]) -> Facts:
    numbers = {name: round(float(values[(number, *at)]), 4) for number, name in enumerate(scores)}
    return {
        "layer": at[0],
        "head": at[1],
        "scores": numbers,
        "everywhere": bool(passes[(slice(None), *at)].all()),
    }


def _described(probe: Probe) -> Facts:
    periods = [probe.period(ids) for ids in probe.batches]
    return {"name": probe.name, "periods": periods, "sequences": [len(ids) for ids in probe.batches]}


def markdown(results: Facts) -> str:
    """Return the results as tables."""
    names = [probe["name"] for probe in results["probes"]]
    lines = [
        f"Every head of {results['model']} on three probes, each said twice: "
        + "; ".join(
            f"{probe['name']} ({sum(probe['sequences'])} sequences, period "
            f"{', '.join(map(str, probe['periods']))})"
            for probe in results["probes"]
        )
        + ".",
        "",
        f"| kind | score | from | head | {' | '.join(names)} | on every probe |",
        f"|---|---|---|---|{'---|' * len(names)}---|",
    ]
    for kind, entry in results["kinds"].items():
        row_start = f"| {kind} | {entry['score'].replace('_', ' ')} | {entry['threshold']}"
        for head in entry["heads"]:
            numbers = " | ".join(f"{head['scores'][name]:.2f}" for name in names)
            verdict = "yes" if head["everywhere"] else "no"
            lines.append(f"{row_start} | {head['layer']}.{head['head']} | {numbers} | {verdict} |")
    for head in results["kinds"].get("induction", {}).get("heads", []):
        by_period = [
            f"{stripes[head['layer']][head['head']]:.2f} over {period}"
            for period, stripes in results["stripe_by_period"].items()
        ]
        where = f"{head['layer']}.{head['head']}"
        lines += ["", f"The stripe of {where} on random tokens by period: {', '.join(by_period)}."]
    lines += [
        "",
        "Switched off, beside as many other heads of the same layers (mean, and where 95% of the draws "
        "lie). The loss is that of the second saying, in nats per token; the stripe that of the induction "
        "heads.",
        "",
        "| off | how | probe | first saying | loss | without | others | others as bad "
        "| stripe | without | others |",
        f"|{'---|' * 11}",
    ]
    for row in results["ablations"]:
        stripe_share = row.get("stripe")
        stripes = (
            [
                f"{stripe_share['whole']:.2f}",
                f"{stripe_share['without']:.2f}",
                _interval(stripe_share["others"]),
            ]
            if stripe_share
            else ["", "", ""]
        )
        beside = row["others"]
        heads = ", ".join(f"{layer}.{head}" for layer, head in row["heads"])
        cells = [
            f"{row['kind']} ({heads})",
            row["method"],
            row["probe"],
            f"{row['first']['loss']:.2f} → {row['first']['without']:.2f}",
            f"{row['loss']:.2f}",
            f"{row['without']:.2f}",
            _interval(beside),
            f"{beside['as_much']} of {beside['draws']}" if beside["draws"] else "-",
            *stripes,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _interval(interval: Facts) -> str:
    return (
        "-"
        if interval["mean"] is None
        else f"{interval['mean']:.2f} ({interval['low']:.2f} to {interval['high']:.2f})"
    )


# The command


def main(arguments: Sequence[str] | None = None) -> None:
    """`python -m studies.probes`"""
    parser = argparse.ArgumentParser(
        prog="python -m studies.probes", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("model", nargs="?", help="a folder or a name; by default the built-in model")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    model, tokenizer, title = load(options.model)
    model = model.to(options.device).eval()
    results = measured(model, tokenizer, title, draws=options.draws, seed=options.seed)
    with whole_file(options.out) as half:
        half.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    print(markdown(results))


if __name__ == "__main__":
    main()
