"""What can be wrong with a Transformer block."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..evidence import Asked, Evidence
from ..exceptions import explain
from ..faults import FAULTS as OF_WHOLES
from ..report import Report
from ..source.parsed import text_of
from .counterfactuals import CERTAIN, StepFault, apart, named

STEP = "block"
PRE = "x = x + attention(norm1(x)); x = x + feed_forward(norm2(x))"
JOINS = (r"\+=|=\s*\w+\s*\+|return\s+\w+\s*\+|return|\+",)


def _fault(
    key: str, title: str, formula: str, hints: tuple[str, str, str], why: str, repair: str,
    lines: tuple[str, ...] = JOINS, remark: bool = False, right: str = PRE,
) -> StepFault:  # fmt: skip
    return StepFault(key, title, formula, right, hints, why, repair, lines=lines, remark=remark, of=STEP)


RESIDUAL = "Without the way around it, what went in is lost, and gradients of deep stacks fade."
ATTENTION_LINES = (r"=\s*self\.\w*(att|sa\b|mha)\w*\(", r"self\.\w*(att|sa\b|mha)", r"return")
FEED_LINES = (
    r"=\s*self\.\w*(ff|feed|mlp|linear2|fc2)\w*\(",
    r"self\.\w*(ff|feed|mlp|linear2|fc2)",
    r"return",
)
FAULTS = [
    _fault(
        "no residual around attention",
        "what went into the attention is not added to what comes out of it",
        "x = attention(norm1(x))",
        (
            "Set the attention's output to zero: what is left of x?",
            "Nothing is: x only goes on through the attention.",
            "x = x + attention(...).",
        ),
        RESIDUAL, "x = x + self.attention(self.norm1(x))", ATTENTION_LINES,
    ),
    _fault(
        "no residual around feed-forward",
        "what went into the feed-forward is not added to what comes out of it",
        "x = feed_forward(norm2(x))",
        (
            "Set the feed-forward's output to zero: what is left of x?",
            "Nothing is: x only goes on through the feed-forward.",
            "x = x + feed_forward(...).",
        ),
        RESIDUAL, "x = x + self.feed_forward(self.norm2(x))", FEED_LINES,
    ),
    _fault(
        "residual from the wrong place",
        "what is added to a part's output is not what the block had before that part",
        "norm(x) + part(norm(x)), or x + feed_forward(..) with the block's input x",
        (
            "Which tensor is added to the output of each part?",
            "It is the normalised one, or the block's input where the attention's result should be.",
            "Keep x as it runs: x = x + part(norm(x)), for each part in turn.",
        ),
        "The stream is broken: what an earlier part wrote is dropped, or rescaled in every block.",
        "x = x + self.attention(self.norm1(x))\nx = x + self.feed_forward(self.norm2(x))",
    ),
    _fault(
        "norm missing in the block",
        "one part of the block has a norm, another has none",
        "x + attention(norm1(x)), then x + feed_forward(x)",
        (
            "Count the norms, and count the parts.",
            "A norm is missing, or is made and never called.",
            "Give each part a norm of its own, in the same place.",
        ),
        "Numbers grow from block to block where nothing brings them back to one size.",
        "x = x + self.feed_forward(self.norm2(x))",
    ),
    _fault(
        "norm over the wrong axis",
        "the norm takes mean and spread over another axis than the last",
        "(x - x.mean(1)) / x.std(1)",
        (
            "Take the mean of the norm's output over its last axis: is it 0?",
            "It is 0 over another axis.",
            "A layer norm is over the channels of each position: dim=-1, or LayerNorm(d_model).",
        ),
        "Positions, or samples, then depend on one another: the future leaks through the norm.",
        "mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)",
        (r"mean\(|std\(|var\(", r"Norm\("),
        right="(x - x.mean(-1)) / x.std(-1)",
    ),
    _fault(
        "feed-forward without activation",
        "between the two layers of the feed-forward there is nothing: two linear layers are one",
        "linear2(linear1(x))",
        (
            "What is the product of two matrices?",
            "Another matrix: without an activation between, two layers do what one does.",
            "linear2(relu(linear1(x))).",
        ),
        "The block has no other place to compute something that is not linear in a position.",
        "x = self.linear2(F.relu(self.linear1(x)))",
        (r"linear_?2|fc_?2|Linear\(", r"Sequential\("),
        right="linear2(relu(linear1(x)))",
    ),
    _fault(
        "activation after the feed-forward",
        "there is an activation after the last layer of the feed-forward",
        "relu(linear2(..))",
        (
            "Can the feed-forward's output be negative?",
            "An activation cuts it off after the last layer.",
            "The activation belongs between the two layers alone.",
        ),
        "Each block can only add to the stream, never take away.",
        "x = self.linear2(F.relu(self.linear1(x)))",
        (r"(relu|gelu|silu|act\w*)\(\s*self\.\w*2", r"ReLU|GELU|SiLU|relu|gelu|silu"),
        right="linear2(relu(linear1(x)))",
    ),
    _fault(
        "feed-forward before attention",
        "the feed-forward comes first, the attention after it",
        "x = x + feed_forward(norm1(x)); x = x + attention(norm2(x))",
        (
            "In which order are the two parts called?",
            "The feed-forward is called before the attention.",
            "Attention first, then feed-forward.",
        ),
        "A stack of such blocks is shifted by half a block: weights of others do not fit, and the last "
        "attention is never worked on.",
        "x = x + self.attention(self.norm1(x))\nx = x + self.feed_forward(self.norm2(x))",
    ),
    _fault(
        "queries from the memory",
        "cross-attention takes its queries from the memory, and keys and values from the decoder",
        "cross_attention(memory, x, x)",
        (
            "How long is the output of cross-attention: as long as x, or as the memory?",
            "There is one output for each query: queries come from x.",
            "cross_attention(x, memory, memory).",
        ),
        "The decoder asks, the encoder answers: queries from x, keys and values from the memory.",
        "x = x + self.cross_attention(self.norm2(x), memory, memory)",
        (r"(cross|src|enc|memory)\w*\(.*(memory|enc)", r"(memory|enc\w*)"),
        right="cross_attention(x, memory, memory)",
    ),
    _fault(
        "memory not used",
        "no part of the block is given the memory: there is self-attention alone",
        "cross_attention(x, x, x)",
        (
            "Change the memory: does the output change?",
            "Nothing reads it.",
            "cross_attention(x, memory, memory).",
        ),
        "The decoder never sees what is to be decoded.",
        "x = x + self.cross_attention(self.norm2(x), memory, memory)",
        (r"(cross|src|enc)\w*\(", r"memory|enc"),
        right="cross_attention(x, memory, memory)",
    ),
    _fault(
        "one norm for two parts",
        "one norm, with one set of weights, is used in two places",
        "norm(x) before attention and before feed-forward",
        (
            "How many norms are made in __init__?",
            "The same one is called twice.",
            "Make two: norm1 and norm2.",
        ),
        "It computes; but both parts share one scale and one shift.",
        "self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)",
        (r"Norm\(", r"norm"), remark=True,
    ),
    _fault(
        "block without norms",
        "there is no norm in the block",
        "x + attention(x); x + feed_forward(x)",
        (
            "How large are the numbers after ten such blocks?",
            "Each block adds to them, and nothing brings them back to one size.",
            "x = x + part(norm(x)), with a norm for each part.",
        ),
        "One block works; deep stacks of them are hard to train.",
        "x = x + self.attention(self.norm1(x))\nx = x + self.feed_forward(self.norm2(x))", remark=True,
    ),
]  # fmt: skip
BY_KEY = {fault.key: fault for fault in FAULTS}


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "ReLU": functional.relu, "GELU": functional.gelu, "SiLU": functional.silu,
    "GELU (tanh)": lambda x: functional.gelu(x, approximate="tanh"),
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "LeakyReLU": functional.leaky_relu, "ELU": functional.elu,
    "squared ReLU": lambda x: functional.relu(x).square(),
    "GELU (sigmoid)": lambda x: x * torch.sigmoid(1.702 * x), "Mish": functional.mish,
    "softplus": functional.softplus,
}  # fmt: skip

Sum = frozenset[str]


@dataclass
class _Part:
    kind: str  # "norm", "attention", "feed-forward"
    path: str
    atom: str  # its output, by name
    inputs: list[Tensor]
    output: Tensor
    inner: list[Asked] = field(default_factory=list)


@dataclass
class _Way:
    """How the parts are joined, as far as it was followed."""

    stream: Sum
    cost: float = 0.0
    norms: tuple[str, ...] = ()  # for each part: "before", "after", "inside", "both", ""
    faults: tuple[tuple[str, str], ...] = ()  # key, detail
    parallel: bool = False


def _read(evidence: Evidence) -> list[_Part]:
    parts: list[_Part] = []
    alone: _Part | None = None  # linear layers that follow one another are one feed-forward
    inner: list[Asked] = []
    for one in evidence.asked[1:]:
        kind, _, path = one.probe.partition(": ")
        inputs = [value for value in one.given.values() if isinstance(value, Tensor)]
        assert one.output is not None
        if kind == "inner":
            inner.append(one)
            continue
        if kind == "linear":
            last = parts[-1] if parts else None
            if last is not None and last.kind == "attention" and apart(inputs[0], last.output) < 1e-9:
                last.output = one.output  # its output projection, kept by the block
                continue
            if alone is None:
                alone = _Part("feed-forward", path, f"f{len(parts)}", inputs, one.output)
                parts.append(alone)
            alone.output = one.output
            alone.inner.append(one)
            continue
        alone = None
        made = _Part(kind, path, f"{kind[0]}{len(parts)}", inputs, one.output)
        if kind == "feed-forward":
            made.inner, inner = [each for each in inner if each.probe.startswith(f"inner: {path}")], []
        parts.append(made)
    return parts


class _Flow:
    """Which sums of what came before each tensor is."""

    def __init__(self, given: Mapping[str, Any], parts: Sequence[_Part], output: Tensor) -> None:
        self.atoms: dict[str, Tensor] = {name: given[name] for name in ("x", "memory") if name in given}
        self.into: dict[str, Sum | None] = {}
        self.parts = {part.atom: part for part in parts}
        for part in parts:
            self.into[part.atom] = self.sum_of(part.inputs[0])
            self.atoms[part.atom] = part.output
        self.output = self.sum_of(output)

    def sum_of(self, wanted: Tensor) -> Sum | None:
        fitting = {name: one for name, one in self.atoms.items() if one.shape == wanted.shape}
        for many in range(1, min(4, len(fitting)) + 1):
            for names in itertools.combinations(reversed(fitting), many):
                if apart(wanted, sum(fitting[name] for name in names)) < 1e-7:  # type: ignore[arg-type]
                    return frozenset(names)
        return None

    def normed(self, wanted: Sum) -> Iterator[Sum]:
        """The norms of this sum."""
        for atom, part in self.parts.items():
            if part.kind == "norm" and self.into[atom] == wanted:
                yield frozenset({atom})


def _ways(flow: _Flow, subs: Sequence[_Part], queries: Mapping[str, Sum | None]) -> list[_Way]:
    """Every way to read the block that ends in its output, the simplest first."""
    ways = [_Way(frozenset({"x"}))]
    for number, sub in enumerate(subs):
        ways = [new for way in ways for new in _steps(flow, way, sub, queries[sub.atom], number)]
    done = []
    for way in ways:
        if flow.output == way.stream:
            done.append(way)
        elif flow.output is not None and flow.output in set(flow.normed(way.stream)):
            done.append(_Way(way.stream, way.cost + 0.1, way.norms, way.faults, way.parallel))
    return sorted(done, key=lambda way: way.cost + ("" in way.norms and set(way.norms) != {""}))


def _steps(flow: _Flow, way: _Way, sub: _Part, given: Sum | None, number: int) -> Iterator[_Way]:
    """Through one part: what it may have been given, and what the stream may be after it."""
    if given is None:
        return
    stream, own = way.stream, frozenset({sub.atom})
    entry: list[tuple[str, float, tuple[tuple[str, str], ...], bool]] = []
    if given == stream:
        entry.append(("", 0.0, (), False))
    if given in set(flow.normed(stream)):
        entry.append(("before", 0.0, (), False))
    first = frozenset({"x"})
    if number and stream != first and (given == first or given in set(flow.normed(first))):
        entry.append(("before" if given != first else "", 0.3, (), True))
    what = "attention" if sub.kind == "attention" else "feed-forward"
    missing = (f"no residual around {what}", f"after {sub.path}, only its output goes on")
    places: list[tuple[Sum, float, tuple[tuple[str, str], ...]]] = [(stream, 0.0, ())]
    places.append((frozenset(), 1.0, (missing,)))
    wrong = "residual from the wrong place"
    if given != stream:
        places.append((given, 1.0, ((wrong, f"the normalised input of {sub.path} is added to its output"),)))
    if number and stream != first:
        places.append((first, 1.0, ((wrong, f"the block's input is added to the output of {sub.path}"),)))
    for atom in sorted(stream - first):
        if len(stream) > 1:
            said = f"only {flow.parts[atom].path}'s output is added to the output of {sub.path}"
            places.append((frozenset({atom}), 1.1, ((wrong, said),)))
    for norm, cost, faults, parallel in entry:
        for base, more, also in places:
            joined = base | own
            where = norm
            ahead = [(joined, where, 0.0)]
            ahead += [(one, "both" if norm else "after", 0.01) for one in flow.normed(joined)]
            if base:
                ahead += [(base | one, "both" if norm else "inside", 0.05) for one in flow.normed(own)]
            for after, position, little in ahead:
                yield _Way(
                    after, way.cost + cost + more + little, (*way.norms, position),
                    (*way.faults, *faults, *also), way.parallel or parallel,
                )  # fmt: skip


def judge(evidence: Evidence) -> Report:
    """How it is put together, and what is wrong with that."""
    known = {**OF_WHOLES, **{fault.key: fault for fault in FAULTS}}
    report = Report(evidence.name, ok=False, summary="", path=evidence.path)
    report.conventions, report.findings, report.beside = (
        evidence.conventions,
        evidence.findings,
        "a Transformer block",
    )
    report.problems, report.tried, report.built = (
        list(evidence.problems),
        list(evidence.tried),
        evidence.built,
    )
    report.explained = [explain(problem, evidence.source) for problem in report.problems]
    if not evidence.asked:
        report.judged = any(one.kind in CERTAIN for one in report.problems)
        report.summary = (
            report.explained[0] if report.explained else f"{report.name} could not be built and called"
        )
        return report
    found, words, doubt = _structure(evidence)
    report.conventions.words = list(dict.fromkeys((*evidence.conventions.words, *words)))
    for key, detail in found:
        (report.remarks if BY_KEY[key].remark else report.faults).append(named(evidence, BY_KEY[key], detail))
    for finding in evidence.findings:
        if finding.verdict == "unknown":
            report.not_judged.append(f"{finding.name}: {finding.detail}")
        if finding.verdict == "wrong" and finding.fault in known:
            made = named(evidence, known[finding.fault], f"{finding.name}: {finding.detail}")
            if finding.line is not None:
                made.line, made.text = finding.line, text_of(evidence.source or "", finding.line)
            (report.remarks if known[finding.fault].remark else report.faults).append(made)
    if doubt:
        report.not_judged.append(doubt)
    unknown = [one for one in evidence.findings if one.verdict == "unknown"]
    report.not_judged.append("masks: those of a whole block are not asked; check its attention by itself")
    report.ok = not (report.faults or doubt or unknown)
    report.judged = report.ok or bool(report.faults)
    if report.ok:
        report.summary = f"{report.name} is a right Transformer block: {'; '.join(words)}"
    elif report.faults:
        more = f", and {len(report.faults) - 1} more" if len(report.faults) > 1 else ""
        report.summary = f"{report.faults[0].key}: {report.faults[0].title}{more}"
    else:
        report.summary = f"{report.name} was not judged: {doubt or unknown[0].detail}"
    return report


def _structure(evidence: Evidence) -> tuple[list[tuple[str, str]], list[str], str]:
    """Faults with details, the structure in words, and what could not be followed."""
    whole = evidence.asked[0]
    assert whole.output is not None
    parts = _read(evidence)
    found: list[tuple[str, str]] = []
    feeds = [part for part in parts if part.kind == "feed-forward"]
    words: list[str] = []
    for feed in feeds:
        more, said = _feed(feed)
        found += more
        words += said
    found += _norm_axes(parts)
    subs = [part for part in parts if part.kind != "norm"]
    queries, cross = _queries(whole.given, subs, found)
    flow = _Flow(whole.given, parts, whole.output)
    ways = _ways(
        flow,
        subs,
        {
            part.atom: flow.into[part.atom] if part.atom not in queries else flow.sum_of(queries[part.atom])
            for part in subs
        },
    )
    if not ways and feeds:
        for name, act in ACTIVATIONS.items():
            held, feeds[-1].output = feeds[-1].output, act(feeds[-1].output)
            flow = _Flow(whole.given, parts, whole.output)
            ways = _ways(flow, subs, {part.atom: flow.into[part.atom] for part in subs})
            if ways:
                found.append(
                    (
                        "activation after the feed-forward",
                        f"{name} is applied to the output of {feeds[-1].path}",
                    )
                )
                break
            feeds[-1].output = held
    doubt = ""
    if not ways:
        seen = ", ".join(f"{part.kind} {part.path}" for part in parts)
        doubt = "" if found else f"how its parts are put together could not be followed (seen: {seen})"
    else:
        found += dict(reversed(ways[0].faults)).items()  # each once, as it was made first
        words = [*_joined(ways[0], parts, found, evidence), *words]
    kinds = [part.kind for part in subs]
    if (
        "feed-forward" in kinds
        and "attention" in kinds
        and kinds.index("feed-forward") < kinds.index("attention")
        and kinds.count("feed-forward") == 1
    ):
        found.append(("feed-forward before attention", f"{feeds[0].path} is called first"))
    if not feeds:
        doubt = doubt or "no feed-forward was seen in it"
    if cross:
        words.append("cross-attention over the memory")
    return found, words, doubt


def _queries(
    given: Mapping[str, Any], subs: Sequence[_Part], found: list[tuple[str, str]]
) -> tuple[dict[str, Tensor], bool]:  # fmt: skip
    """Which input of each part is the stream, where it is not the first; whether one reads the memory."""
    memory = given.get("memory")
    if memory is None:
        return {}, False
    others: dict[str, Tensor] = {}
    reads = False
    for sub in subs:
        of_memory = [one.shape[1] == memory.shape[1] or one.shape[0] == memory.shape[1] for one in sub.inputs]
        if not any(of_memory):
            continue
        reads = True
        if of_memory[0] and not all(of_memory):
            found.append(("queries from the memory", f"the first input of {sub.path} is the memory"))
            others[sub.atom] = next(one for one, yes in zip(sub.inputs, of_memory, strict=True) if not yes)
    if not reads:
        found.append(("memory not used", "no part of the block is given the memory"))
    return others, reads


def _feed(feed: _Part) -> tuple[list[tuple[str, str]], list[str]]:
    """Its activation and its width."""
    if len(feed.inner) < 2:
        return [], ["the feed-forward is one linear layer"] if feed.inner else []
    first, last = feed.inner[0], feed.inner[-1]
    assert first.output is not None and last.output is not None
    into = last.given["in 0"]
    assert isinstance(into, Tensor)
    found: list[tuple[str, str]] = []
    width = first.output.shape[-1]
    name = next((name for name, act in ACTIVATIONS.items() if apart(into, act(first.output)) < 1e-6), None)
    if len(feed.inner) == 2 and apart(into, first.output) < 1e-9:
        found.append(
            (
                "feed-forward without activation",
                f"what leaves the first layer of {feed.path} enters the second as it is",
            )
        )
        name = "no activation"
    elif len(feed.inner) == 3:
        second = feed.inner[1].output
        assert second is not None
        if second.shape == first.output.shape == into.shape:
            pairs = ((a, b) for a, b in ((first.output, second), (second, first.output)))
            gates = [n for a, b in pairs for n, act in ACTIVATIONS.items() if apart(into, act(a) * b) < 1e-6]
            name = f"a gate, {gates[0]}" if gates else name
    if apart(feed.output, last.output) > 1e-9 and feed.output.shape == last.output.shape:
        acts = [n for n, act in ACTIVATIONS.items() if apart(feed.output, act(last.output)) < 1e-6]
        if acts:
            found.append(
                ("activation after the feed-forward", f"{acts[0]} follows the last layer of {feed.path}")
            )
    return found, [
        f"feed-forward {last.output.shape[-1]} to {width} with {name or 'an activation we do not know'}"
    ]


def _norm_axes(parts: Sequence[_Part]) -> list[tuple[str, str]]:
    """Norms that are right over another axis than the last."""
    found = []
    for part in parts:
        if part.kind != "norm" or part.inputs[0].shape != part.output.shape or part.output.ndim != 3:
            continue
        x = part.inputs[0]
        right = [
            (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True),
            x / x.square().mean(-1, keepdim=True).sqrt(),
        ]
        if any(_is_affine(part.output, one) for one in right):
            continue
        for dims, words in (
            ((1,), "the positions"),
            ((0,), "the samples"),
            ((1, 2), "positions and channels together"),
            ((0, 1), "samples and positions together"),
            ((0, 1, 2), "everything at once"),
        ):
            z = (x - x.mean(dims, keepdim=True)) / x.std(dims, keepdim=True)
            if _is_affine(part.output, z) and not _is_affine(part.output, x):
                found.append(("norm over the wrong axis", f"{part.path} takes mean and spread over {words}"))
                break
    return found


def _is_affine(out: Tensor, z: Tensor) -> bool:
    """Whether each channel of `out` is a scale and a shift of that channel of `z`."""
    mine, theirs = z.flatten(0, 1), out.flatten(0, 1)  # [B * T, E]
    mine, middle = mine - mine.mean(0), theirs - theirs.mean(0)
    scale = (mine * middle).sum(0) / mine.square().sum(0).clamp_min(1e-30)
    return bool((middle - scale * mine).abs().max() <= 1e-3 * middle.abs().max().clamp_min(1e-12))


def _joined(way: _Way, parts: Sequence[_Part], found: list[tuple[str, str]], evidence: Evidence) -> list[str]:
    """Where the norms stand, in words; what is missing among them goes to `found`."""
    words = ["attention and feed-forward side by side"] if way.parallel else []
    placed = set(way.norms)
    paths = [part.path for part in parts if part.kind == "norm"]
    if placed == {""}:
        found.append(("block without norms", "no norm was called between the parts"))
        words.append("no norms")
    elif "" in placed:
        said = "; ".join(evidence.tried)
        found.append(
            (
                "norm missing in the block",
                f"norms by part, in order: {', '.join(one or 'none' for one in way.norms)}"
                + f"; {said}" * bool(said),
            )
        )
    elif placed == {"before"}:
        words.append("pre-norm, x + part(norm(x))")
    elif placed == {"after"}:
        words.append("post-norm, norm(x + part(x))")
    elif placed == {"inside"}:
        words.append("norms inside the residual, x + norm(part(x))")
    else:
        words.append(f"norms {', '.join(way.norms)} its parts")
    twice = sorted({path for path in paths if paths.count(path) > 1})
    if twice:
        found.append(("one norm for two parts", f"{twice[0]} is called {paths.count(twice[0])} times"))
    return words
