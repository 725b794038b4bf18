"""Wholes that hold an attention: Transformer blocks, and functions of q and k alone.

What each part of a block is given and gives is written down while it runs; which sums and norms join the
parts is read from these numbers. Weights times v are an attention without projections, so what gives weights
is examined as one: every fault of scores, masks and softmax has its name there already. So is the attention
inside a block.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..evidence import Asked, Evidence, Finding
from ..examine.construction import GUESS
from ..examine.conventions import layout_words
from ..examine.examination import understand_whole
from ..examine.subject import widths_of
from ..examine.surroundings import CAUGHT, files_of, problem_of
from ..examine.words import input_word
from ..faults import FAULTS as OF_WHOLES
from ..report import Named, Report
from ..verdict import judge_whole
from .step_engine import (
    CERTAIN,
    Callee,
    Verdict,
    Wanted,
    apart,
    faults_of,
    first_array,
    instances,
    named_parameters,
    numbers,
    words_of,
)

# What can be wrong with a block

PRE = "x = x + attention(norm1(x)); x = x + feed_forward(norm2(x))"
JOINS = (r"\+=|=\s*\w+\s*\+|return\s+\w+\s*\+|return|\+",)


RESIDUAL = "Without the way around it, what went in is lost, and gradients of deep stacks fade."
ATTENTION_LINES = (r"=\s*self\.\w*(att|sa\b|mha)\w*\(", r"self\.\w*(att|sa\b|mha)", r"return")
FEED_LINES = (
    r"=\s*self\.\w*(ff|feed|mlp|linear2|fc2)\w*\(",
    r"self\.\w*(ff|feed|mlp|linear2|fc2)",
    r"return",
)
_fault = faults_of("block", right=PRE, lines=JOINS)
FAULTS = [
    _fault(
        "no residual around attention",
        "what went into the attention is not added to what comes out of it",
        "x = attention(norm1(x))",
        "Set the attention's output to zero: what is left of x?",
        "Nothing is: x only goes on through the attention.",
        "x = x + attention(...).",
        RESIDUAL,
        repair="x = x + self.attention(self.norm1(x))", lines=ATTENTION_LINES,
    ),
    _fault(
        "no residual around feed-forward",
        "what went into the feed-forward is not added to what comes out of it",
        "x = feed_forward(norm2(x))",
        "Set the feed-forward's output to zero: what is left of x?",
        "Nothing is: x only goes on through the feed-forward.",
        "x = x + feed_forward(...).",
        RESIDUAL,
        repair="x = x + self.feed_forward(self.norm2(x))", lines=FEED_LINES,
    ),
    _fault(
        "residual from the wrong place",
        "what is added to a part's output is not what the block had before that part",
        "norm(x) + part(norm(x)), or x + feed_forward(..) with the block's input x",
        "Which tensor is added to the output of each part?",
        "It is the normalised one, or the block's input where the attention's result should be.",
        "Keep x as it runs: x = x + part(norm(x)), for each part in turn.",
        "The stream is broken: what an earlier part wrote is dropped, or rescaled in every block.",
        repair="x = x + self.attention(self.norm1(x))\nx = x + self.feed_forward(self.norm2(x))",
    ),
    _fault(
        "norm missing in the block",
        "one part of the block has a norm, another has none",
        "x + attention(norm1(x)), then x + feed_forward(x)",
        "Count the norms, and count the parts.",
        "A norm is missing, or is made and never called.",
        "Give each part a norm of its own, in the same place.",
        "Numbers grow from block to block where nothing brings them back to one size.",
        repair="x = x + self.feed_forward(self.norm2(x))",
    ),
    _fault(
        "norm over the wrong axis",
        "the norm takes mean and spread over another axis than the last",
        "(x - x.mean(1)) / x.std(1)",
        "Take the mean of the norm's output over its last axis: is it 0?",
        "It is 0 over another axis.",
        "A layer norm is over the channels of each position: dim=-1, or LayerNorm(d_model).",
        "Positions, or samples, then depend on one another: the future leaks through the norm.",
        repair="mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)",
        lines=(r"mean\(|std\(|var\(", r"Norm\("),
        right="(x - x.mean(-1)) / x.std(-1)",
    ),
    _fault(
        "feed-forward without activation",
        "between the two layers of the feed-forward there is nothing: two linear layers are one",
        "linear2(linear1(x))",
        "What is the product of two matrices?",
        "Another matrix: without an activation between, two layers do what one does.",
        "linear2(relu(linear1(x))).",
        "The block has no other place to compute something that is not linear in a position.",
        repair="x = self.linear2(F.relu(self.linear1(x)))",
        lines=(r"linear_?2|fc_?2|Linear\(", r"Sequential\("),
        right="linear2(relu(linear1(x)))",
    ),
    _fault(
        "activation after the feed-forward",
        "there is an activation after the last layer of the feed-forward",
        "relu(linear2(..))",
        "Can the feed-forward's output be negative?",
        "An activation cuts it off after the last layer.",
        "The activation belongs between the two layers alone.",
        "Each block can only add to the stream, never take away.",
        repair="x = self.linear2(F.relu(self.linear1(x)))",
        lines=(r"(relu|gelu|silu|act\w*)\(\s*self\.\w*2", r"ReLU|GELU|SiLU|relu|gelu|silu"),
        right="linear2(relu(linear1(x)))",
    ),
    _fault(
        "feed-forward before attention",
        "the feed-forward comes first, the attention after it",
        "x = x + feed_forward(norm1(x)); x = x + attention(norm2(x))",
        "In which order are the two parts called?",
        "The feed-forward is called before the attention.",
        "Attention first, then feed-forward.",
        "A stack of such blocks is shifted by half a block: weights of others do not fit, and the last "
        "attention is never worked on.",
        repair="x = x + self.attention(self.norm1(x))\nx = x + self.feed_forward(self.norm2(x))",
    ),
    _fault(
        "queries from the memory",
        "cross-attention takes its queries from the memory, and keys and values from the decoder",
        "cross_attention(memory, x, x)",
        "How long is the output of cross-attention: as long as x, or as the memory?",
        "There is one output for each query: queries come from x.",
        "cross_attention(x, memory, memory).",
        "The decoder asks, the encoder answers: queries from x, keys and values from the memory.",
        repair="x = x + self.cross_attention(self.norm2(x), memory, memory)",
        lines=(r"(cross|src|enc|memory)\w*\(.*(memory|enc)", r"(memory|enc\w*)"),
        right="cross_attention(x, memory, memory)",
    ),
    _fault(
        "memory not used",
        "no part of the block is given the memory: there is self-attention alone",
        "cross_attention(x, x, x)",
        "Change the memory: does the output change?",
        "Nothing reads it.",
        "cross_attention(x, memory, memory).",
        "The decoder never sees what is to be decoded.",
        repair="x = x + self.cross_attention(self.norm2(x), memory, memory)",
        lines=(r"(cross|src|enc)\w*\(", r"memory|enc"),
        right="cross_attention(x, memory, memory)",
    ),
    _fault(
        "one norm for two parts",
        "one norm, with one set of weights, is used in two places",
        "norm(x) before attention and before feed-forward",
        "How many norms are made in __init__?",
        "The same one is called twice.",
        "Make two: norm1 and norm2.",
        "It computes; but both parts share one scale and one shift.",
        repair="self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)",
        lines=(r"Norm\(", r"norm"), remark=True,
    ),
    _fault(
        "block without norms",
        "there is no norm in the block",
        "x + attention(x); x + feed_forward(x)",
        "How large are the numbers after ten such blocks?",
        "Each block adds to them, and nothing brings them back to one size.",
        "x = x + part(norm(x)), with a norm for each part.",
        "One block works; deep stacks of them are hard to train.",
        repair="x = x + self.attention(self.norm1(x))\nx = x + self.feed_forward(self.norm2(x))", remark=True,
    ),
]  # fmt: skip


# A block at work

ATTENDS = re.compile(r"att(entio)?n|mha|multi_?head|^sa\d?$|^ca\d?$|^heads?$|^self_?att")
NORM = re.compile(r"norm|^ln_?\w{0,2}$")
Inputs = dict[str, Tensor]


def examine_block(obj: Any, evidence: Evidence, wanted: Wanted) -> None:
    """Build it, run it, write down what each part is given and gives; examine the attention inside."""
    first = None
    for body, widths in itertools.islice(_bodies(obj, evidence, wanted), 6):
        for width in widths:
            for inputs, named in _inputs(body, width):
                try:
                    if _watch(body, inputs, named, evidence):
                        evidence.embed_dim = width
                        _look_at_samples(body, inputs, named, evidence)
                        _examine_inside(body, evidence)
                        return
                except CAUGHT as error:
                    first = first or problem_of(error, "call", files_of(obj))
    if first is not None:
        first.kind = first.kind if first.kind in CERTAIN else GUESS
        evidence.problems.append(first)
    evidence.tried.append(f"{evidence.name} was called with x [3, 7, width]")


def _bodies(obj: Any, evidence: Evidence, wanted: Wanted) -> Iterator[tuple[nn.Module, list[int]]]:
    """A block, and the widths it may have."""
    if isinstance(obj, type):
        for body, sizes in instances(obj, evidence, wanted):
            yield body, [sizes.E]
    else:
        widths = [wanted.embed_dim] if wanted.embed_dim else widths_of(obj)[:6]
        yield copy.deepcopy(obj).double().eval(), widths


def _inputs(body: nn.Module, width: int) -> Iterator[tuple[Inputs, dict[str, object]]]:
    """x and memory, and what is passed by name. Masks that must be passed are absent, then open."""
    words = {each.name: input_word(each.name) for each in named_parameters(body)}
    needed = [each.name for each in named_parameters(body) if each.default is each.empty]
    stream = next((name for name in words if words[name] in {"x", "query"}), needed[0] if needed else None)
    if stream is None:
        return
    memory = next((name for name in words if words[name] in {"memory", "key"} and name != stream), None)
    if memory is None and len(needed) > 1 and words[needed[1]] not in {"mask", "lengths"}:
        memory = needed[1]
    inputs = {"x": numbers(3, 7, width, seed=21)}
    named: dict[str, object] = {stream: inputs["x"]}
    if memory is not None:
        inputs["memory"] = numbers(3, 11, width, seed=22)
        named[memory] = inputs["memory"]
    masks = [name for name in needed if name not in named]
    for kind in ("absent", "four", "three", "two") if masks else ("absent",):
        yield inputs, named | {name: _open_mask(name, kind, memory is not None) for name in masks}
    if memory is not None:  # the length first, as torch's own has it
        turned = {name: x.transpose(0, 1).contiguous() for name, x in inputs.items()}
        yield turned, {stream: turned["x"], memory: turned["memory"]}


def _open_mask(name: str, kind: str, has_memory: bool) -> Tensor | None:
    """A mask that hides nothing."""
    keys = 11 if has_memory and re.search(r"src|mem|enc|cross", name.lower()) else 7
    shape = {"four": (3, 1, 7, keys), "three": (3, 7, keys), "two": (7, keys)}.get(kind)
    return None if shape is None else torch.ones(shape, dtype=torch.bool)


def _parts(module: nn.Module, path: str = "") -> Iterator[tuple[str, str, nn.Module]]:
    """(kind, path, module) of norms, attentions, feed-forwards, and linear layers that stand alone."""
    for name, child in module.named_children():
        here = f"{path}.{name}" if path else name
        kind = _kind(child, name)
        if kind:
            yield kind, here, child
        else:
            yield from _parts(child, here)


def _kind(module: nn.Module, name: str) -> str:
    """What a part of a block is, by its names and what it holds; "" for what only holds others."""
    cls, is_list = words_of(type(module).__name__), isinstance(module, nn.ModuleList)
    if NORM.search(cls) and not any(True for _ in module.children()):
        return "norm"
    inside = [part for part in module.modules() if part is not module]
    within = [words_of(type(part).__name__) for part in inside]
    norms = any(NORM.search(each) for each in within)
    attends = ATTENDS.search(cls) or ATTENDS.search(name.lower())
    if attends and any(True for _ in module.parameters()) and (not norms or re.search(r"multi_?head", cls)):
        return "" if is_list and not ATTENDS.search(cls) else "attention"
    if isinstance(module, nn.Linear):
        return "linear"
    linear = any(isinstance(part, (nn.Linear, nn.Conv1d)) for part in inside)
    if linear and not norms and not is_list and not any(ATTENDS.search(each) for each in within):
        return "feed-forward"
    return ""


def _watch(body: nn.Module, inputs: Inputs, named: dict[str, object], evidence: Evidence) -> bool:
    """Run it with hooks on every part; True where it gave an output of x's shape."""
    log: list[Asked] = []
    parts = list(_parts(body))
    hooks = list(_hooks(parts, log))
    try:
        torch.manual_seed(1)
        output = first_array(body(**{name: _fresh(value) for name, value in named.items()}))
    finally:
        for hook in hooks:
            hook.remove()
    torch.manual_seed(2)
    again = first_array(body(**{name: _fresh(value) for name, value in named.items()}))
    if output.shape != inputs["x"].shape or not any(kind == "attention" for kind, _, _ in parts):
        return False
    if apart(again, output) > 1e-6:
        detail = "in eval, two calls with one input give two outputs"
        evidence.findings.append(Finding("deterministic in eval", "wrong", detail, "dropout in eval"))
    evidence.asked = [Asked("block", dict(inputs), output), *log]
    called = {asked.probe for asked in log}
    unused = [path for kind, path, _ in parts if kind == "norm" and f"norm: {path}" not in called]
    if unused:
        evidence.tried.append(f"made and never called: {', '.join(unused)}")
    evidence.conventions.words.append("it is called with " + ", ".join(named))
    return True


def _hooks(parts: Sequence[tuple[str, str, nn.Module]], log: list[Asked]) -> Iterator[Any]:
    """Each part writes down its calls, and so do the layers of a feed-forward."""

    def note(probe: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        every = (*args, *kwargs.values())
        tensors = [x for x in every if isinstance(x, Tensor) and x.is_floating_point()]
        if tensors:
            inputs = {f"in {number}": x.detach().clone() for number, x in enumerate(tensors[:3])}
            log.append(Asked(probe, dict(inputs), first_array(output).clone()))

    for kind, path, module in parts:
        yield module.register_forward_hook(partial(note, f"{kind}: {path}"), with_kwargs=True)
        for name, layer in module.named_modules() if kind == "feed-forward" else ():
            if isinstance(layer, nn.Linear):
                yield layer.register_forward_hook(partial(note, f"inner: {path}.{name}"), with_kwargs=True)


def _fresh(value: object) -> Any:
    """A copy that needs a gradient: torch's own layer then takes the way that has hooks."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.clone().requires_grad_()
    return value


def _look_at_samples(body: nn.Module, inputs: Inputs, named: dict[str, object], evidence: Evidence) -> None:
    """Whether its output is finite, and samples of a batch keep to themselves."""
    names = {name: role for name, x in named.items() for role in inputs if x is inputs[role]}

    @torch.no_grad()
    def output(changed: Inputs) -> Tensor:
        return first_array(body(**named | {name: changed[role] for name, role in names.items()}))

    def reacts(axis: int) -> bool:
        """Whether the second along this axis reacts to the first."""
        moved = {role: x.clone() for role, x in inputs.items()}
        dice = torch.Generator().manual_seed(9)
        for x in moved.values():  # a norm takes away what is added to all channels alike
            first = x.select(axis, 0)
            first.add_(torch.randn(first.shape, generator=dice, dtype=torch.float64).to(x.dtype))
        return apart(output(moved).select(axis, 1), base.select(axis, 1)) > 1e-9

    base = output(inputs)
    if not bool(base.isfinite().all()):
        detail = "it is not finite for ordinary inputs: does a mask inside hide everything from a query?"
        evidence.findings.append(Finding("output", "unknown", detail))
        return
    if not reacts(0):
        return
    detail = "the second sample reacts to the first"
    if reacts(1):
        evidence.findings.append(Finding("batch", "unknown", detail))
    elif layout_words(evidence.source or "") == "batch first":
        evidence.findings.append(Finding("batch", "wrong", detail, "wrong layout"))
    else:
        evidence.conventions.words.append("its inputs are [T, B, E], length first")


def _examine_inside(body: nn.Module, evidence: Evidence) -> None:
    """Each attention of the block, as one by itself is examined."""
    for kind, path, module in _parts(body):
        if kind != "attention" or isinstance(module, nn.MultiheadAttention):
            continue
        inside, _ = understand_whole(module, evidence.source, evidence.path)
        report = judge_whole(inside)
        name = f"attention inside ({path})"
        if report.faults:
            evidence.findings += [
                Finding(name, "wrong", fault.detail or fault.title, fault.key, fault.line)
                for fault in report.faults
            ]
        else:
            evidence.findings.append(Finding(name, "right" if report.ok else "unknown", report.summary))


# How a block is put together

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "ReLU": functional.relu, "GELU": functional.gelu, "SiLU": functional.silu,
    "GELU (tanh)": lambda x: functional.gelu(x, approximate="tanh"),
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "LeakyReLU": functional.leaky_relu, "ELU": functional.elu,
    "squared ReLU": lambda x: functional.relu(x).square(),
    "GELU (sigmoid)": lambda x: x * torch.sigmoid(1.702 * x), "Mish": functional.mish,
    "softplus": functional.softplus,
}  # fmt: skip
PLACES = {
    frozenset({""}): "no norms",
    frozenset({"before"}): "pre-norm, x + part(norm(x))",
    frozenset({"after"}): "post-norm, norm(x + part(x))",
    frozenset({"inside"}): "norms inside the residual, x + norm(part(x))",
}
OTHER_AXES = {
    (1,): "the positions", (0,): "the samples", (1, 2): "positions and channels together",
    (0, 1): "samples and positions together", (0, 1, 2): "everything at once",
}  # fmt: skip
Sum = frozenset[str]  # names of tensors that are added
Mistake = tuple[str, str]  # a fault's key, and how we know
X = frozenset({"x"})


@dataclass
class _Part:
    kind: str  # "norm", "attention", "feed-forward"
    path: str
    atom: str  # its output, by name
    inputs: list[Tensor]
    output: Tensor
    inner: list[Asked] = field(default_factory=list)


def judge_block(evidence: Evidence) -> Verdict:
    """How it is put together, and what is wrong with that."""
    if not evidence.asked:
        return Verdict(unjudged=f"{evidence.name} could not be built and called")
    whole, parts = evidence.asked[0], _read(evidence)
    subs = [part for part in parts if part.kind != "norm"]
    feeds = [part for part in parts if part.kind == "feed-forward"]
    verdict = Verdict(words=[words for feed in feeds for words in _feed_words(feed)])
    verdict.faults += [fault for feed in feeds for fault in _feed_faults(feed)]
    verdict.faults += _norm_axes(parts)
    queries = _queries(whole, subs, verdict)
    way = _way(whole, parts, queries) or _way_after_activation(whole, parts, queries, verdict)
    if way is not None:
        verdict.faults += dict(reversed(way.faults)).items()  # each once, as it was made first
        verdict.faults += _missing_norms(way, parts, evidence)
        verdict.words = [*_norm_words(way), *verdict.words]
    elif not verdict.faults:
        seen = ", ".join(f"{part.kind} {part.path}" for part in parts)
        verdict.unjudged = f"how its parts are put together could not be followed (seen: {seen})"
    kinds = [part.kind for part in subs]
    if kinds.count("feed-forward") == 1 and kinds[0] == "feed-forward" and "attention" in kinds:
        verdict.faults.append(("feed-forward before attention", f"{feeds[0].path} is called first"))
    if not feeds:
        verdict.unjudged = verdict.unjudged or "no feed-forward was seen in it"
    if "memory" in whole.given and "memory not used" not in dict(verdict.faults):
        verdict.words.append("cross-attention over the memory")
    verdict.right = "; ".join(verdict.words)
    return verdict


def _read(evidence: Evidence) -> list[_Part]:
    """The parts in the order of their calls. Linear layers that follow one another are one feed-forward."""
    parts: list[_Part] = []
    inner: list[Asked] = []
    alone = False  # whether the last part is made of such layers
    for asked in evidence.asked[1:]:
        assert asked.output is not None
        kind, _, path = asked.probe.partition(": ")
        inputs = [value for value in asked.given.values() if isinstance(value, Tensor)]
        last = parts[-1] if parts else None
        if kind == "inner":
            inner.append(asked)
        elif kind == "linear" and last is not None and _is_output_projection(inputs[0], last):
            last.output = asked.output
        elif kind == "linear" and last is not None and alone:
            last.output = asked.output
            last.inner.append(asked)
        else:
            alone = kind == "linear"
            made = _Part(
                "feed-forward" if alone else kind, path, f"{kind[0]}{len(parts)}", inputs, asked.output
            )
            if alone:
                made.inner = [asked]
            elif kind == "feed-forward":
                made.inner, inner = [each for each in inner if each.probe.startswith(f"inner: {path}")], []
            parts.append(made)
    return parts


def _is_output_projection(x: Tensor, before: _Part) -> bool:
    """Whether this goes into the output projection of an attention, which the block keeps itself."""
    return before.kind == "attention" and apart(x, before.output) < 1e-9


class _Flow:
    """Which sums of what came before each tensor is."""

    def __init__(self, whole: Asked, parts: Sequence[_Part]) -> None:
        assert whole.output is not None
        self.atoms = {name: x for name, x in whole.given.items() if isinstance(x, Tensor)}
        self.into: dict[str, Sum | None] = {}
        self.parts = {part.atom: part for part in parts}
        for part in parts:
            self.into[part.atom] = self.sum_of(part.inputs[0])
            self.atoms[part.atom] = part.output
        self.output = self.sum_of(whole.output)

    def sum_of(self, wanted: Tensor) -> Sum | None:
        fitting = {name: x for name, x in self.atoms.items() if x.shape == wanted.shape}
        for many in range(1, min(4, len(fitting)) + 1):
            for names in itertools.combinations(reversed(fitting), many):
                if apart(wanted, torch.stack([fitting[name] for name in names]).sum(0)) < 1e-7:
                    return frozenset(names)
        return None

    def normed(self, wanted: Sum) -> list[Sum]:
        """The norms of this sum."""
        norms = [atom for atom, part in self.parts.items() if part.kind == "norm"]
        return [frozenset({atom}) for atom in norms if self.into[atom] == wanted]


@dataclass
class _Way:
    """How the parts are joined, as far as it was followed."""

    stream: Sum
    cost: float = 0.0
    norms: tuple[str, ...] = ()  # for each part: "before", "after", "inside", "both", ""
    faults: tuple[Mistake, ...] = ()
    parallel: bool = False


def _way(whole: Asked, parts: Sequence[_Part], queries: Mapping[str, Tensor]) -> _Way | None:
    """The simplest way to read the block that ends in its output."""
    flow = _Flow(whole, parts)
    ways = [_Way(X)]
    for number, part in enumerate(part for part in parts if part.kind != "norm"):
        into = flow.sum_of(queries[part.atom]) if part.atom in queries else flow.into[part.atom]
        if into is None:
            return None
        ways = [longer for way in ways for longer in _through(flow, way, part, into, number == 0)]
    done = [way for way in ways if flow.output == way.stream]
    normed = [way for way in ways if flow.output in flow.normed(way.stream)]
    done += [dataclasses.replace(way, cost=way.cost + 0.1) for way in normed]
    return min(done, key=lambda way: way.cost + ("" in way.norms and set(way.norms) != {""}), default=None)


def _way_after_activation(
    whole: Asked, parts: Sequence[_Part], queries: Mapping[str, Tensor], verdict: Verdict
) -> _Way | None:
    """The same where an activation follows the last feed-forward."""
    feeds = [part for part in parts if part.kind == "feed-forward"]
    for name, activation in ACTIVATIONS.items() if feeds else ():
        last = dataclasses.replace(feeds[-1], output=activation(feeds[-1].output))
        way = _way(whole, [last if part is feeds[-1] else part for part in parts], queries)
        if way is not None:
            detail = f"{name} is applied to the output of {last.path}"
            verdict.faults.append(("activation after the feed-forward", detail))
            return way
    return None


def _through(flow: _Flow, way: _Way, part: _Part, into: Sum, is_first: bool) -> Iterator[_Way]:
    """Through one part: what it may have been passed, and what the stream may be after it."""
    own = frozenset({part.atom})
    for norm, cost, parallel in _entries(flow, way, into, is_first):
        for base, more, faults in _residuals(flow, way, part, into, is_first):
            joined = base | own
            ahead = [(joined, norm, 0.0)]
            ahead += [(each, "both" if norm else "after", 0.01) for each in flow.normed(joined)]
            if base:
                ahead += [(base | each, "both" if norm else "inside", 0.05) for each in flow.normed(own)]
            for stream, place, little in ahead:
                yield _Way(
                    stream, way.cost + cost + more + little, (*way.norms, place), (*way.faults, *faults),
                    way.parallel or parallel,
                )  # fmt: skip


def _entries(flow: _Flow, way: _Way, into: Sum, is_first: bool) -> Iterator[tuple[str, float, bool]]:
    """Where a norm stands before the part, what that costs, and whether it is beside the one before."""
    if into == way.stream:
        yield "", 0.0, False
    if into in flow.normed(way.stream):
        yield "before", 0.0, False
    if not is_first and way.stream != X and (into == X or into in flow.normed(X)):
        yield "" if into == X else "before", 0.3, True


def _residuals(
    flow: _Flow, way: _Way, part: _Part, into: Sum, is_first: bool
) -> Iterator[tuple[Sum, float, list[Mistake]]]:
    """What may be added to the part's output, what that costs, and the fault that it is."""
    yield way.stream, 0.0, []
    missing = f"no residual around {part.kind}"
    yield frozenset(), 1.0, [(missing, f"after {part.path}, only its output goes on")]
    wrong = "residual from the wrong place"
    if into != way.stream:
        yield into, 1.0, [(wrong, f"the normalised input of {part.path} is added to its output")]
    if not is_first and way.stream != X:
        yield X, 1.0, [(wrong, f"the block's input is added to the output of {part.path}")]
    for atom in sorted(way.stream - X) if len(way.stream) > 1 else ():
        detail = f"only {flow.parts[atom].path}'s output is added to the output of {part.path}"
        yield frozenset({atom}), 1.1, [(wrong, detail)]


# What is wrong with its parts


def _queries(whole: Asked, subs: Sequence[_Part], verdict: Verdict) -> dict[str, Tensor]:
    """Which input of each part is the stream, where it is not the first."""
    memory = whole.given.get("memory")
    if not isinstance(memory, Tensor):
        return {}
    others, reads = {}, False
    for part in subs:
        of_memory = [memory.shape[1] in x.shape[:2] for x in part.inputs]
        reads = reads or any(of_memory)
        if of_memory[0] and not all(of_memory):
            verdict.faults.append(
                ("queries from the memory", f"the first input of {part.path} is the memory")
            )
            others[part.atom] = part.inputs[of_memory.index(False)]
    if not reads:
        verdict.faults.append(("memory not used", "no part of the block is given the memory"))
    return others


def _activation(output: Tensor, source: Tensor, factor: Tensor | None = None) -> str | None:
    """Which activation of the source, times the factor, it is."""
    for name, activation in ACTIVATIONS.items():
        wanted = activation(source) if factor is None else activation(source) * factor
        if apart(output, wanted) < 1e-6:
            return name
    return None


def _feed_words(feed: _Part) -> list[str]:
    """Its width and its activation."""
    if len(feed.inner) < 2:
        return ["the feed-forward is one linear layer"] if feed.inner else []
    (_, first), *_, (into, last) = ((each.given["in 0"], each.output) for each in feed.inner)
    assert isinstance(first, Tensor) and isinstance(into, Tensor) and isinstance(last, Tensor)
    name = _activation(into, first)
    if len(feed.inner) == 3:
        second = feed.inner[1].output
        assert second is not None
        if second.shape == first.shape == into.shape:
            gate = _activation(into, first, second) or _activation(into, second, first)
            name = f"a gate, {gate}" if gate else name
    if _has_no_activation(feed):
        name = "no activation"
    widths = f"{last.shape[-1]} to {first.shape[-1]}"
    return [f"feed-forward {widths} with {name or 'an activation we do not know'}"]


def _has_no_activation(feed: _Part) -> bool:
    """Whether what leaves the first of two layers enters the second as it is."""
    if len(feed.inner) != 2:
        return False
    first, into = feed.inner[0].output, feed.inner[1].given["in 0"]
    return first is not None and isinstance(into, Tensor) and apart(into, first) < 1e-9


def _feed_faults(feed: _Part) -> Iterator[Mistake]:
    """An activation that is missing, and one that is too many."""
    if _has_no_activation(feed):
        detail = f"what leaves the first layer of {feed.path} enters the second as it is"
        yield "feed-forward without activation", detail
    last = feed.inner[-1].output if len(feed.inner) > 1 else None
    if last is not None and feed.output.shape == last.shape and apart(feed.output, last) > 1e-9:
        name = _activation(feed.output, last)
        if name is not None:
            yield "activation after the feed-forward", f"{name} follows the last layer of {feed.path}"


def _norm_axes(parts: Sequence[_Part]) -> Iterator[Mistake]:
    """Norms that are right over another axis than the last."""
    for part in parts:
        x = part.inputs[0]
        if part.kind != "norm" or x.shape != part.output.shape or x.ndim != 3:
            continue
        rms = x / x.square().mean(-1, keepdim=True).sqrt()
        if any(_is_affine(part.output, z) for z in (_normed(x, (-1,)), rms)):
            continue
        for axes, words in OTHER_AXES.items():
            if _is_affine(part.output, _normed(x, axes)) and not _is_affine(part.output, x):
                yield "norm over the wrong axis", f"{part.path} takes mean and spread over {words}"
                break


def _normed(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    return (x - x.mean(axes, keepdim=True)) / x.std(axes, keepdim=True)


def _is_affine(out: Tensor, z: Tensor) -> bool:
    """Whether each channel of `out` is a scale and a shift of that channel of `z`."""
    mine, theirs = z.flatten(0, 1), out.flatten(0, 1)  # [B * T, E]
    mine, middle = mine - mine.mean(0), theirs - theirs.mean(0)
    scale = (mine * middle).sum(0) / mine.square().sum(0).clamp_min(1e-30)
    return bool((middle - scale * mine).abs().max() <= 1e-3 * middle.abs().max().clamp_min(1e-12))


def _norm_words(way: _Way) -> list[str]:
    """Where the norms stand."""
    words = ["attention and feed-forward side by side"] if way.parallel else []
    placed = frozenset(way.norms)
    if placed in PLACES:
        words.append(PLACES[placed])
    elif "" not in placed:
        words.append(f"norms {', '.join(way.norms)} its parts")
    return words


def _missing_norms(way: _Way, parts: Sequence[_Part], evidence: Evidence) -> Iterator[Mistake]:
    """Norms that are not there, and one that is used twice."""
    if set(way.norms) == {""}:
        yield "block without norms", "no norm was called between the parts"
    elif "" in way.norms:
        places = f"norms by part, in order: {', '.join(place or 'none' for place in way.norms)}"
        yield "norm missing in the block", "; ".join([places, *evidence.tried])
    paths = [part.path for part in parts if part.kind == "norm"]
    twice = sorted({path for path in paths if paths.count(path) > 1})
    if twice:
        yield "one norm for two parts", f"{twice[0]} is called {paths.count(twice[0])} times"


# Functions of q and k, and reports on a part of attention in words of its own

FUNCTION = "torch.nn.functional.scaled_dot_product_attention"
HEAD = "one head of torch.nn.MultiheadAttention"
WHOLE = "torch.nn.MultiheadAttention"


class _TimesValues:
    """The learner's weights, or the softmax of their scores, times v: what the ordinary examination calls."""

    def __init__(self, body: Any, are_scores: bool) -> None:
        self.body, self.are_scores = body, are_scores
        self.__name__, self.__code__ = getattr(body, "__name__", "weights"), getattr(body, "__code__", None)
        ours = list(inspect.signature(body).parameters.values())
        value = inspect.Parameter("value", inspect.Parameter.KEYWORD_ONLY)
        last = [each for each in ours if each.kind is each.VAR_KEYWORD]
        self.__signature__ = inspect.Signature([*(each for each in ours if each not in last), value, *last])

    def __call__(self, *args: Any, value: Tensor, **named: Any) -> Tensor:
        made = self.body(*args, **named)
        made = made[0] if isinstance(made, (list, tuple)) else made
        made = made if isinstance(made, Tensor) else first_array(made)
        return (torch.softmax(made, -1) if self.are_scores else made) @ value


def examine_scores(callee: Callee, evidence: Evidence, wanted: Wanted) -> None:
    """As an attention without projections; first, whether it gives weights or scores."""
    slots = {input_word(each.name): each.name for each in callee.parameters}
    callee.roles = {role: slots[role] for role in ("query", "key")}
    needed = callee.missing(*callee.roles.values())
    callee.fixed |= dict.fromkeys(each.name for each in needed if input_word(each.name) == "mask")
    shapes = [(2, 3, 5, 7), (2, 5, 7), (5, 7)]
    questions = [
        ("plain", {"query": numbers(*shape, seed=3), "key": numbers(*shape, seed=4)}) for shape in shapes
    ]
    first = callee.first_answer(questions, lambda asked: asked.output is not None)
    evidence.asked.append(first)
    if first.output is None:
        assert first.problem is not None
        evidence.problems.append(first.problem)
        return
    query, made = first.given["query"], list(first.output.shape)
    assert isinstance(query, Tensor)
    if made != [*query.shape[:-1], query.shape[-2]]:
        evidence.tried.append(f"for q and k {list(query.shape)} it gives {made}, neither scores nor weights")
        return
    _, touched = callee.answer("plain", first.given)
    evidence.findings += [] if touched is None else [callee.modified(touched)]
    evidence.step = "scores" if bool((first.output < 0).any()) else "weights"
    _examine_as_attention(callee, evidence, wanted)


def _examine_as_attention(callee: Callee, evidence: Evidence, wanted: Wanted) -> None:
    """All that is asked of an attention, beside what was asked of the function itself."""
    whole = _TimesValues(callee.body, evidence.step == "scores")
    seen, again = understand_whole(
        whole, evidence.source, evidence.path, None, wanted.embed_dim, wanted.num_heads
    )
    seen.conventions.words = [
        re.sub(r", value\b( \(value\))?", "", words) for words in _without_weights(seen.conventions.words)
    ]
    names = {finding.name for finding in evidence.findings}
    findings = [*(finding for finding in seen.findings if finding.name not in names), *evidence.findings]
    kept = ("name", "first_line", "step", "asked", "kind", "built")
    own = {name: getattr(evidence, name) for name in kept}
    vars(evidence).update(vars(seen) | own | {"again": again, "findings": findings})


def _without_weights(words: list[str]) -> list[str]:
    return [each for each in words if not each.startswith("it has no weights")]


def judge_scores(evidence: Evidence) -> Report:
    """As an attention without projections, in the words of the step."""
    step = evidence.step or ""
    report = judge_whole(dataclasses.replace(evidence, step=None))
    if evidence.tried and not evidence.calls:
        report.not_judged += evidence.tried
        report.summary = f"{report.name} was not judged: {evidence.tried[0]}"
    report.roles = {}
    beside = "softmax(q k^T / sqrt(d_k))" if step == "weights" else "q k^T / sqrt(d_k)"
    keys = [fault.key for fault in report.faults]
    if step == "scores" and keys == ["no scale"] and "scaled" not in words_of(evidence.name):
        report.faults, report.ok, report.first_wrong, report.where_right = [], True, None, []
        report.errors = dict.fromkeys(report.errors, 0.0)
        report.equal.append("it gives q k^T without the scale: divide by sqrt(d_k) before the softmax")
        beside = "q k^T"
        report.summary = f"{report.name} computes what {WHOLE} computes, to the last digit"
    _beside(report, beside)
    return report


def told_as(evidence: Evidence, report: Report) -> Report:
    """A report on a function without projections, or on one head, in words of its own."""
    if evidence.weights is None:
        return report
    if evidence.kind == "function" and not evidence.roles:
        _beside(report, FUNCTION)
        report.conventions.words = _without_weights(report.conventions.words)
    elif _is_head(evidence):
        _beside(report, HEAD)
        _name_scale(evidence, report)
    return report


def _is_head(evidence: Evidence) -> bool:
    assert evidence.weights is not None
    if evidence.kind != "class" or evidence.num_heads != 1:
        return False
    narrow = evidence.weights.v.shape[0] < evidence.embed_dim
    return narrow or bool(
        re.search(r"(?<!multi_)head$|^head|single_?head|one_?head", words_of(evidence.name))
    )


def _name_scale(evidence: Evidence, report: Report) -> None:
    """In one head the width of the model is not that of the head: a scale by it is found as a number."""
    fault, width = OF_WHOLES["scale by d_model"], evidence.embed_dim
    for at, named in enumerate(report.faults):
        near = named.number is not None and abs(named.number - width**-0.5) < 1e-6
        if named.key == "constant scale" and near:
            detail = named.detail + f": that is 1 / sqrt({width}), the width of the input"
            report.faults[at] = Named.of(fault, detail, named.line, named.text)
            report.summary = f"{fault.key}: {fault.title}"


def _beside(report: Report, beside: str) -> None:
    report.beside = beside
    report.summary = report.summary.replace(WHOLE, beside)
    report.summary = report.summary.replace(
        "something other than multi-head attention", f"something other than {beside}"
    )
