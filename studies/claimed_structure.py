"""Measurements of the claims about the structure of heads and about losing one."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

import headwise as hw
from headwise.nn.presets import PRESETS

from .claim_measures import PROSE, Claim, Subject
from .claimed_sentence import SENTENCE

HEAD_COUNTS = Path(__file__).parent / "results" / "head_counts.json"
SIZES = {  # what a page's table says: d_model, heads, d_k
    "bert-base": (768, 12, 64),
    "bert-large": (1024, 16, 64),
    "gpt2-small": (768, 12, 64),
    "gpt2-large": (1280, 20, 64),
    "gpt3": (12288, 96, 128),
}
ALONE = 48  # heads that are switched off one by one, at most
TOGETHER = 0.1  # of the heads, switched off at once
SMALL = 0.01  # of the loss, or of a cosine: a change that nobody would notice
DRAWS = 10  # of heads switched off at once


# If one head fails


def of_failure(subject: Subject) -> Iterator[Claim]:
    """Yield the claims about compensation: whether several heads cost more together than one by one."""
    loss, unit, small = _loss(subject)
    draw = random.Random(subject.seed)
    every = subject.every_head()
    some = sorted(draw.sample(every, min(ALONE, len(every))))
    whole = loss()
    alone = {}
    for head in some:
        with hw.ablate(subject.model, [head]):
            alone[head] = loss() - whole
    count = min(max(2, round(TOGETHER * len(every))), len(some))
    sums, joints = [], []
    for _ in range(DRAWS):
        chosen = draw.sample(some, count)
        with hw.ablate(subject.model, chosen):
            joints.append(loss() - whole)
        sums.append(sum(alone[head] for head in chosen))
    little = sum(change <= small for change in alone.values())
    worst = max(alone, key=alone.__getitem__)
    joint, added = sum(joints) / DRAWS, sum(sums) / DRAWS
    more = sum(both > each for both, each in zip(joints, sums, strict=True))
    made_up = more > 0.8 * DRAWS  # several gone cost more than each: what was left had made up for the one
    enough = little > 0.9 * len(some)
    yield Claim(
        "if one head fails, others compensate",
        f"{worst[0]}.{worst[1]}",
        f"{little} of {len(some)} heads alone raise {unit} by at most {small:.2g}, "
        f"the worst by {alone[worst]:.2g}",
        f"{count} heads off together: {joint:+.2g}; sum of their single rises: {added:+.2g}; "
        f"the joint rise was larger in {more} of {DRAWS} draws",
        "holds" if enough and made_up else "holds in part" if enough or made_up else "wrong",
        f"heads set to zero; with all heads on it is {whole:.2f}"
        + ("" if more > DRAWS / 2 else "; the costs add up"),
    )


def _loss(subject: Subject) -> tuple[Callable[[], float], str, float]:
    """Return a loss function, its name and a small amount: of next tokens, else of the text's direction."""
    ids = subject.ids(PROSE)

    @torch.no_grad()
    def hidden() -> Tensor:
        output: Any = subject.model(ids)
        logits = getattr(output, "logits", None)
        return getattr(output, "last_hidden_state", output) if logits is None else logits

    if subject.roles.causal:

        def next_token() -> float:
            return float(cross_entropy(hidden()[0, :-1].float(), ids[0, 1:]))

        return next_token, "the loss", SMALL * next_token()
    whole = hidden().mean(1)

    def turned() -> float:
        return float(1 - cosine_similarity(hidden().mean(1), whole).mean())

    return turned, "1 - cosine of the text", SMALL


# How they are built


def of_structure(subject: Subject) -> Iterator[Claim]:
    """Yield the claims that follow from the structure of heads and models."""
    counts = Counter(preset.num_heads for preset in PRESETS.values())
    usual, often = counts.most_common(1)[0]
    yield _at_once(subject)
    yield Claim(
        "8 heads is common",
        "-",
        f"{counts[8]} of {len(PRESETS)} presets have 8 heads, {counts[16]} have 16",
        f"most have {usual}: {often}",
        "holds" if usual == 8 else "holds in part" if counts[8] > 1 else "wrong",
        ", ".join(f"{heads}: {number}" for heads, number in sorted(counts.items())),
    )
    split = [
        p for p in PRESETS.values() if (p.head_dim or p.d_model // p.num_heads) * p.num_heads == p.d_model
    ]
    others = [p.title for p in PRESETS.values() if p not in split]
    yield Claim(
        "each head works in d_model / h dimensions",
        "-",
        f"{len(split)} of {len(PRESETS)} presets",
        "-",
        "holds in part" if others else "holds",
        f"not {', '.join(others)}" if others else "",
    )
    right = sum(
        (PRESETS[name].d_model, PRESETS[name].num_heads, PRESETS[name].d_model // PRESETS[name].num_heads)
        == sizes
        for name, sizes in SIZES.items()
    )
    yield Claim(
        "sizes of BERT-Base, BERT-Large, GPT-2 Small, GPT-2 Large, GPT-3",
        "-",
        f"{right} of {len(SIZES)} rows as published",
        "-",
        "holds" if right == len(SIZES) else "wrong",
    )
    yield more_heads(HEAD_COUNTS)


def more_heads(stored: Path) -> Claim:
    """Yield the claims about 1 to 32 heads a layer, from the models of `studies.head_counts`."""
    about = "more heads, richer representations"
    if not stored.exists():
        return Claim(about, "-", "-", "-", "not asked here", "python -m studies.head_counts trains them")
    losses: dict[int, list[float]] = {}
    for model in json.loads(stored.read_text("utf-8"))["models"]:
        losses.setdefault(model["heads"], []).append(model["validation_loss"])
    means = {heads: sum(some) / len(some) for heads, some in sorted(losses.items())}
    best, most = min(means, key=means.__getitem__), max(means)
    spread = max(max(some) - min(some) for some in losses.values())
    return Claim(
        about,
        "-",
        f"of equal models the best has {best} heads per layer: loss {means[best]:.3f}",
        ", ".join(f"{heads}: {loss:.3f}" for heads, loss in means.items() if heads != best),
        "holds" if best == most else "wrong" if best == min(means) else "holds in part",
        f"up to {best}, and not beyond; seeds of one count differ by {spread:.3f} at most",
    )


def _at_once(subject: Subject) -> Claim:
    """Measure that heads of a layer are independent: one is ablated, the outputs of the others stay."""
    ids = subject.ids(SENTENCE)
    with torch.no_grad(), hw.collect(subject.model) as whole:
        subject.model(ids)
    with torch.no_grad(), hw.ablate(subject.model, [(0, 0)]), hw.collect(subject.model) as off:
        subject.model(ids)
    layers = list(whole)
    same = (
        float((whole[layers[0]] - off[layers[0]])[:, 1:].abs().max())
        if whole[layers[0]].shape[1] > 1
        else 0.0
    )
    later = max((float((whole[layer] - off[layer]).abs().max()) for layer in layers[1:]), default=0.0)
    return Claim(
        "all heads compute simultaneously",
        "-",
        f"without head 0.0 the others of its layer change by {same:.1g}",
        f"those of later layers by {later:.2g}",
        "holds" if same == 0 and not later else "holds in part" if same == 0 else "wrong",
        "within a layer; each layer needs the one before",
    )
