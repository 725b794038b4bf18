"""Measurements of the claims of the course pages: a function per kind returns the rows of its claims.

Letters: H heads of a layer, D channels of a head, E d_model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw
from headwise.heads.roles import Role, Roles
from headwise.models import Transformer

from .claimed_sentence import CLAIMED, OFFSETS, SAME, SENTENCE, Drawn, judge, word_weights

PROSE = (
    "The old farmer walked down to the river before the sun came up. He carried a small lamp and a basket of "
    "bread, because his sister had told him that the boats would be late. When the first boat came, a tall "
    "woman stood in it and called his name. She had seen the lamp from far away. They talked for a long time "
    "about the price of salt, the new bridge and the people who had left the village. In the end the farmer "
    "gave her the bread, and she gave him a letter that nobody had opened."
)
FAR = 5  # words away, from where on a relation is long-range


@dataclass(frozen=True)
class Claim:
    """One row of the table of claims: the claim, its measurement and the verdict.

    Attributes:
        about: the claim, in our words.
        head: "layer.head" of the best one, "-" where it is about all.
        number, rule: what was measured, and what the simplest rule or chance gives, in words with numbers.
        verdict: "holds", "holds in part", "not found", "wrong", "cannot be asked", "not asked here".
        note: what else should be known.
    """

    about: str
    head: str
    number: str
    rule: str
    verdict: str
    note: str = ""


@dataclass(eq=False)
class Subject:
    """A model and its measurements, each computed once."""

    model: nn.Module
    tokenizer: Any
    roles: Roles
    seed: int = 0
    sentences: int = 280  # of roles with random weights

    @cached_property
    def untrained(self) -> nn.Module:
        """The same model with random weights."""
        return drawn_anew(self.model, self.seed)

    def ids(self, text: str) -> Tensor:
        """The token ids of the prose, [1, T]."""
        place = next(self.model.parameters()).device
        return torch.tensor([list(self.tokenizer(text)["input_ids"])], device=place)

    def watched(self, model: nn.Module) -> hw.Heads:
        """Return the heads of a model that reads the prose."""
        with torch.no_grad(), hw.watch(model, pooled=None, tokenizer=self.tokenizer) as heads:
            model(self.ids(PROSE))
        return heads

    @cached_property
    def heads(self) -> hw.Heads:
        """The heads of the trained model, watched while it reads the prose."""
        return self.watched(self.model)

    def every_head(self) -> list[tuple[int, int]]:
        """(layer, head) of every head."""
        return [(head.layer, head.head) for head in self.heads.all()]


def drawn_anew(model: nn.Module, seed: int) -> nn.Module:
    """Return a model of the same shape with random weights; the state of the random generators is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        new = Transformer(model.config) if isinstance(model, Transformer) else type(model)(model.config)  # type: ignore[call-arg]
    first = next(model.parameters())
    return new.to(first.device, first.dtype).eval()


# The page's sentence


def of_the_sentence(subject: Subject) -> Iterator[Claim]:
    """Yield the claims about the sentence "The cat that I saw yesterday ran away"."""
    weights = word_weights(subject.model, subject.tokenizer, SENTENCE)
    untrained = word_weights(subject.untrained, subject.tokenizer, SENTENCE)
    for about, arrows in CLAIMED.items():
        drawn = judge(weights, untrained, arrows, seed=subject.seed)
        if not drawn.arrows:
            yield Claim(
                f"in its own sentence, {about}", "-", "-", "-", "cannot be asked", "the model is causal"
            )
            continue
        offset = "the same as the claim" if about in OFFSETS else f"one offset {drawn.offset}"
        elsewhere = [
            f"{name} {float(subject.roles.scores[name][drawn.layer, drawn.head]):.2f}"
            for name in SAME.get(about, ())
            if name in subject.roles.scores
        ]
        heads = weights.shape[0] * weights.shape[1]
        note = f"the best head is chosen among {heads} heads: P = {drawn.chance:.2f}"
        yield Claim(
            f"in its own sentence, {about}",
            f"{drawn.layer}.{drawn.head}",
            f"{drawn.hits} of {drawn.arrows} arrows, weight {drawn.weight:.2f}",
            f"shuffled {drawn.by_chance:.1f}, random weights {drawn.untrained} (weight "
            f"{drawn.untrained_weight:.2f}), {offset}",
            _by_offset(drawn) if about in OFFSETS else drawn.verdict,
            note + (f"; in other sentences it has {', '.join(elsewhere)}" if elsewhere else ""),
        )


def _by_offset(drawn: Drawn) -> str:
    """Return the verdict of a claim about an offset, which may hold for a head that follows an offset."""
    return "holds" if drawn.hits == drawn.arrows and drawn.verdict != "not found" else drawn.verdict


# In general: roles


GENERAL: dict[str, tuple[str, ...]] = {
    "a head joins subject and verb": (
        "verb > subject",
        "subject > verb",
        "verb > far subject",
        "far subject > verb",
    ),
    "a head joins adjective and noun": ("adjective > noun", "noun > adjective"),
    "a head resolves pronouns (coreference)": (
        "pronoun > antecedent",
        "reflexive > antecedent",
        "possessive pronoun > antecedent",
    ),
    "a head joins a relative clause to its noun": (
        "relative pronoun > antecedent",
        "antecedent > relative pronoun",
    ),
    "a head joins related meanings (semantic)": ("noun > earlier related noun", "noun > later related noun"),
}


def both_rules(role: Role) -> str:
    """Return the best rule with word classes and the best fixed offset, the better rule first.

    Example:
        >>> rules = {"+1 words": 0.42, "the nearest verb after": 0.81}
        >>> both_rules(Role("subject > verb", False, 2, 3, 0.72, 0.66, 0.77, 239, rules, {}))
        'the nearest verb after 0.81; +1 words 0.42'
    """
    ordered = sorted((role.class_rule, role.offset), key=role.rules.__getitem__, reverse=True)
    return "; ".join(f"{rule} {role.rules[rule]:.2f}" for rule in ordered)


def of_roles(subject: Subject) -> Iterator[Claim]:
    """Yield the claims about relations between words: grammar, meaning and distance."""
    roles = subject.roles
    for about, names in GENERAL.items():
        measured = [roles[name] for name in names if name in roles]
        if not measured:
            yield Claim(about, "-", "-", "-", "cannot be asked", "no such relation points backward")
            continue
        best = max(measured, key=lambda role: (role.found, role.share - max(role.rules.values())))
        present = [role.name for role in measured if role.found]
        yield Claim(
            about,
            f"{best.layer}.{best.head}",
            f"{best.name}: {best.share:.2f} ({best.low:.2f} to {best.high:.2f})",
            both_rules(best),
            "holds" if len(present) == len(measured) else "holds in part" if present else "not found",
            f"{len(present)} of {len(measured)} relations found"
            + (f": {', '.join(present)}" if present else ""),
        )
    yield _grammar(subject)
    yield _far(roles)
    yield _one_kind(roles)


def _grammar(subject: Subject) -> Claim:
    """Return the claim that one head serves grammar and another serves meaning."""
    roles = subject.roles
    meaning = {name for name in roles if "related noun" in name}
    grammar = {name: role for name, role in roles.found.items() if name not in meaning}
    heads = {(role.layer, role.head) for role in grammar.values()}
    own = [role for name, role in roles.found.items() if name in meaning]
    apart = not {place[:2] for role in own for place in role.heads} & {
        place[:2] for role in grammar.values() for place in role.heads
    }
    verdict = "holds" if grammar and own and apart else "holds in part" if grammar or own else "not found"
    drawn = hw.roles(
        subject.untrained, subject.tokenizer, sentences=subject.sentences, keep=False, progress=False
    )
    return Claim(
        "one head for grammar, another for meaning",
        ", ".join(f"{role.layer}.{role.head}" for role in own) or "-",
        f"{len(grammar)} of {len(roles) - len(meaning)} relations of grammar found, in {len(heads)} heads",
        f"random weights: {len(drawn.found)} relations found",
        verdict,
        f"{'no' if apart else 'a'} head has a role in both" if own else "",
    )


def _far(roles: Roles) -> Claim:
    """Return the claim that heads find relations over a distance."""
    best = ("-", 0.0, 0, "")
    for name, role in roles.found.items():
        far = [
            (share, cases) for distance, (share, cases) in role.by_distance.items() if abs(distance) >= FAR
        ]
        cases = sum(count for _, count in far)
        share = sum(part * count for part, count in far) / cases if cases else 0.0
        if cases >= 10 and share > best[1]:
            best = (f"{role.layer}.{role.head}", share, cases, name)
    head, share, cases, name = best
    rule = max(roles[name].rules.values()) if name else 0.0
    return Claim(
        f"a head reaches far ({FAR} words and more)",
        head,
        f"{name}: {share:.2f} of {cases}" if name else "-",
        f"{both_rules(roles[name])} at all distances" if name else "-",
        "holds" if share > rule + 0.15 else "holds in part" if share > 0.5 else "not found",
    )


def _one_kind(roles: Roles) -> Claim:
    """Return the claim that a single head learns only one kind of relation."""
    by_head = Counter((layer, head) for role in roles.found.values() for layer, head, *_ in role.heads)
    (place, count), *_ = by_head.most_common(1) or [(("-", "-"), 0)]
    several = sum(number > 1 for number in by_head.values())
    return Claim(
        "a single head learns only one kind of relation",
        f"{place[0]}.{place[1]}" if count else "-",
        f"{several} of {len(by_head)} heads with a role have two or more",
        "-",
        "wrong" if several else "holds" if by_head else "not found",
        f"{place[0]}.{place[1]}: {', '.join(roles.of(*place))}" if several else "",
    )


# In general: positions, difference


def of_positions(subject: Subject) -> Iterator[Claim]:
    """Yield the claims about heads that look at neighbouring positions."""
    heads, drawn = subject.heads, subject.watched(subject.untrained)
    for about in ("previous", "next"):
        best, other = (watched.find(about, top=1) for watched in (heads, drawn))
        if about == "next" and subject.roles.causal:
            yield Claim(
                "a head attends to the next word", "-", "-", "-", "cannot be asked", "the model is causal"
            )
            continue
        score, chance = float(best[0].score or 0), float(other[0].score or 0)
        yield Claim(
            f"a head attends to the {about} word (positional)",
            f"{best[0].layer}.{best[0].head}",
            f"weight {score:.2f}",
            f"random weights {chance:.2f}",
            "holds" if score >= 0.5 else "holds in part" if score > 2 * chance else "not found",
        )
    labels = Counter(head.label.name for head in heads.all())
    counts_text = ", ".join(f"{name} {count}" for name, count in labels.most_common())
    idle = sum(labels[name] for name in ("mixed", "sink", "special-token", "broad"))
    yield Claim(
        "every head has a pattern that can be named",
        "-",
        f"{sum(labels.values()) - idle} of {sum(labels.values())} have a label for what they attend to",
        "-",
        "wrong" if idle > 0.2 * sum(labels.values()) else "holds",
        counts_text,
    )


def of_difference(subject: Subject) -> Iterator[Claim]:
    """Yield the claims that heads learn different patterns in subspaces of their own."""
    numbers = [hw.diversity(heads).number for heads in (subject.heads, subject.watched(subject.untrained))]
    yield Claim(
        "different heads attend to different things",
        "-",
        f"mean divergence of two heads of a layer {numbers[0]:.3f} nats",
        f"random weights, nearly uniform attention: {numbers[1]:.3f}; at most 0.693",
        "holds" if numbers[0] > 2 * numbers[1] else "holds in part" if numbers[0] > numbers[1] else "wrong",
    )
    overlaps = list(_overlaps(subject.model))
    if overlaps:
        mean, expected = (sum(values) / len(overlaps) for values in zip(*overlaps, strict=True))
        yield Claim(
            "each head reads its own subspace",
            "-",
            f"queries of two heads of a layer share {mean:.2f} of their subspace",
            f"random subspaces of that size {expected:.2f}",
            "holds" if mean < 1.5 * expected else "holds in part",
            "all are learned from the same input, without a constraint",
        )


def _overlaps(model: nn.Module) -> Iterator[tuple[float, float]]:
    """Yield by layer how much of a head's query subspace lies in another's, and in a random one's."""
    ours = model if isinstance(model, Transformer) else hw.models.load(model)
    for attention in (module for module in ours.modules() if isinstance(module, hw.MultiHeadAttention)):
        rows = (
            attention.q_proj.weight.detach().float().cpu().unflatten(0, (attention.num_heads, -1))
        )  # [H, D, E]
        bases = torch.linalg.qr(rows.mT).Q  # [H, E, D]
        H, E, D = bases.shape
        shared = torch.einsum("aed,bef->abdf", bases, bases).square().sum((-2, -1)) / D
        yield float(shared[~torch.eye(H, dtype=torch.bool)].mean()), D / E
