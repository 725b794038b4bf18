"""Code around attention: Transformer blocks, and functions of q and k that return scores or weights.

A block is run with hooks that record the inputs and the output of each part; which sums and norms join the
parts is read from these numbers. A function that returns weights is examined as an attention without
projections, by multiplying its weights with v, so the faults of scores, masks and softmax apply. An
attention inside a block is examined like any other.
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

from ..evidence import Evidence, Finding, StepAnswer
from ..examine.construction import GUESS
from ..examine.conventions import layout_words
from ..examine.environment import CAUGHT, files_of, problem_of
from ..examine.examination import examine_attention
from ..examine.subject import widths_of
from ..examine.vocabulary import input_word
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

# Faults of a block

PRE = "x = x + attention(norm1(x)); x = x + feed_forward(norm2(x))"
JOINS = (r"\+=|=\s*\w+\s*\+|return\s+\w+\s*\+|return|\+",)
RESIDUAL = "Without the residual connection the input is lost, and gradients vanish in deep stacks."
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
        "the input of the attention is not added to its output",
        "x = attention(norm1(x))",
        "If the output of the attention were zero, what would be left of x?",
        "Nothing would: x only passes through the attention.",
        "Write x = x + attention(...).",
        RESIDUAL,
        repair="x = x + self.attention(self.norm1(x))", lines=ATTENTION_LINES,
    ),
    _fault(
        "no residual around feed-forward",
        "the input of the feed-forward is not added to its output",
        "x = feed_forward(norm2(x))",
        "If the output of the feed-forward were zero, what would be left of x?",
        "Nothing would: x only passes through the feed-forward.",
        "Write x = x + feed_forward(...).",
        RESIDUAL,
        repair="x = x + self.feed_forward(self.norm2(x))", lines=FEED_LINES,
    ),
    _fault(
        "residual from the wrong place",
        "the wrong tensor is added to the output of the attention or the feed-forward",
        "norm(x) + part(norm(x)), or x + feed_forward(..) with the block's input x",
        "Which tensor is added to the output of each part?",
        "It is the normalised tensor, or the input of the block instead of the result of the attention.",
        "Write x = x + part(norm(x)) for each part in turn.",
        "The output of an earlier part is dropped, or rescaled in every block.",
        repair="x = x + self.attention(self.norm1(x))\nx = x + self.feed_forward(self.norm2(x))",
    ),
    _fault(
        "norm missing in the block",
        "one part of the block has a norm, and the other has none",
        "x + attention(norm1(x)), then x + feed_forward(x)",
        "Count the norms, and count the parts.",
        "A norm is missing, or is built in __init__ and never called.",
        "Give each part a norm of its own, in the same place.",
        "Activations grow from block to block where nothing normalises them.",
        repair="x = x + self.feed_forward(self.norm2(x))",
    ),
    _fault(
        "norm over the wrong axis",
        "the norm takes mean and standard deviation over an axis other than the last",
        "(x - x.mean(1)) / x.std(1)",
        "Take the mean of the norm's output over its last axis: is it 0?",
        "It is 0 over a different axis.",
        "A layer norm is over the channels of each position: dim=-1, or LayerNorm(d_model).",
        "Positions or samples then depend on each other, so a position depends on later ones.",
        repair="mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)",
        lines=(r"mean\(|std\(|var\(", r"Norm\("),
        right="(x - x.mean(-1)) / x.std(-1)",
    ),
    _fault(
        "feed-forward without activation",
        "there is no activation between the two layers of the feed-forward",
        "linear2(linear1(x))",
        "What is the product of two matrices?",
        "It is one matrix: without an activation between them, two linear layers are one linear layer.",
        "Write linear2(relu(linear1(x))).",
        "The feed-forward is the only nonlinear function of a single position in the block.",
        repair="x = self.linear2(F.relu(self.linear1(x)))",
        lines=(r"linear_?2|fc_?2|Linear\(", r"Sequential\("),
        right="linear2(relu(linear1(x)))",
    ),
    _fault(
        "activation after the feed-forward",
        "there is an activation after the last layer of the feed-forward",
        "relu(linear2(..))",
        "Can the feed-forward's output be negative?",
        "An activation after the last layer removes the negative numbers.",
        "Use the activation between the two layers only.",
        "The block can only increase x, never decrease it.",
        repair="x = self.linear2(F.relu(self.linear1(x)))",
        lines=(r"(relu|gelu|silu|act\w*)\(\s*self\.\w*2", r"ReLU|GELU|SiLU|relu|gelu|silu"),
        right="linear2(relu(linear1(x)))",
    ),
    _fault(
        "feed-forward before attention",
        "the feed-forward is called before the attention",
        "x = x + feed_forward(norm1(x)); x = x + attention(norm2(x))",
        "In which order are the two parts called?",
        "The feed-forward is called before the attention.",
        "Attention first, then feed-forward.",
        "Pretrained weights of standard blocks do not fit, and no feed-forward follows the last attention.",
        repair="x = x + self.attention(self.norm1(x))\nx = x + self.feed_forward(self.norm2(x))",
    ),
    _fault(
        "queries from the memory",
        "cross-attention takes its queries from the memory, and its keys and values from the decoder",
        "cross_attention(memory, x, x)",
        "Is the output of cross-attention as long as x, or as long as the memory?",
        "There is one output for each query: queries come from x.",
        "cross_attention(x, memory, memory).",
        "Each position of the decoder must get an output, so the queries come from x.",
        repair="x = x + self.cross_attention(self.norm2(x), memory, memory)",
        lines=(r"(cross|src|enc|memory)\w*\(.*(memory|enc)", r"(memory|enc\w*)"),
        right="cross_attention(x, memory, memory)",
    ),
    _fault(
        "memory not used",
        "no part of the block uses the memory: there is only self-attention",
        "cross_attention(x, x, x)",
        "Change the memory: does the output change?",
        "Nothing reads it.",
        "cross_attention(x, memory, memory).",
        "The decoder has no access to the output of the encoder.",
        repair="x = x + self.cross_attention(self.norm2(x), memory, memory)",
        lines=(r"(cross|src|enc)\w*\(", r"memory|enc"),
        right="cross_attention(x, memory, memory)",
    ),
    _fault(
        "one norm for two parts",
        "one norm, with one set of weights, is used in two places",
        "norm(x) before attention and before feed-forward",
        "How many norms are built in __init__?",
        "The same norm is called twice.",
        "Build two: norm1 and norm2.",
        "It runs, but both parts share one scale and one shift.",
        repair="self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)",
        lines=(r"Norm\(", r"norm"), remark=True,
    ),
    _fault(
        "block without norms",
        "there is no norm in the block",
        "x + attention(x); x + feed_forward(x)",
        "How large are the numbers after ten such blocks?",
        "Each block adds to them, and nothing normalises them.",
        "Write x = x + part(norm(x)), with a norm for each part.",
        "One block works; deep stacks of such blocks are hard to train.",
        repair="x = x + self.attention(self.norm1(x))\nx = x + self.feed_forward(self.norm2(x))", remark=True,
    ),
]  # fmt: skip


# Examining a block

ATTENDS = re.compile(r"att(entio)?n|mha|multi_?head|^sa\d?$|^ca\d?$|^heads?$|^self_?att")
NORM = re.compile(r"norm|^ln_?\w{0,2}$")
Inputs = dict[str, Tensor]


def examine_block(obj: Any, evidence: Evidence, wanted: Wanted) -> None:
    """Build a block, run it, record the inputs and output of each part, and examine its attention."""
    first = None
    for body, widths in itertools.islice(_bodies(obj, evidence, wanted), 6):
        for width in widths:
            for inputs, named in _inputs(body, width):
                try:
                    if _watch(body, inputs, named, evidence):
                        evidence.embed_dim = width
                        _check_samples(body, inputs, named, evidence)
                        _examine_inside(body, evidence)
                        return
                except CAUGHT as error:
                    first = first or problem_of(error, "call", files_of(obj))
    if first is not None:
        first.kind = first.kind if first.kind in CERTAIN else GUESS
        evidence.problems.append(first)
    evidence.tried.append(f"{evidence.name} was called with x [3, 7, width]")


def _bodies(obj: Any, evidence: Evidence, wanted: Wanted) -> Iterator[tuple[nn.Module, list[int]]]:
    """Yield the block and the widths it may have."""
    if isinstance(obj, type):
        for body, sizes in instances(obj, evidence, wanted):
            yield body, [sizes.E]
    else:
        widths = [wanted.embed_dim] if wanted.embed_dim else widths_of(obj)[:6]
        yield copy.deepcopy(obj).double().eval(), widths


def _inputs(body: nn.Module, width: int) -> Iterator[tuple[Inputs, dict[str, object]]]:
    """Yield x and memory, and the arguments by name. Required masks are None, then hide nothing."""
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
    """Return a mask that hides nothing."""
    keys = 11 if has_memory and re.search(r"src|mem|enc|cross", name.lower()) else 7
    shape = {"four": (3, 1, 7, keys), "three": (3, 7, keys), "two": (7, keys)}.get(kind)
    return None if shape is None else torch.ones(shape, dtype=torch.bool)


def _parts(module: nn.Module, path: str = "") -> Iterator[tuple[str, str, nn.Module]]:
    """Yield (kind, path, module) of norms, attentions, feed-forwards, and other linear layers."""
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        kind = _kind(child, name)
        if kind:
            yield kind, child_path, child
        else:
            yield from _parts(child, child_path)


def _kind(module: nn.Module, name: str) -> str:
    """Return the kind of a part, by its names and what it holds; "" for a module that only holds others."""
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
    """Run the block with hooks on every part; return True if its output has the shape of x."""
    log: list[StepAnswer] = []
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
        detail = "in eval mode, two calls with the same input give different outputs"
        evidence.findings.append(Finding("deterministic in eval", "wrong", detail, "dropout in eval"))
    evidence.answers = [StepAnswer("block", dict(inputs), output), *log]
    called = {answer.probe for answer in log}
    unused = [path for kind, path, _ in parts if kind == "norm" and f"norm: {path}" not in called]
    if unused:
        evidence.tried.append(f"built and never called: {', '.join(unused)}")
    evidence.conventions.words.append("it is called with " + ", ".join(named))
    return True


def _hooks(parts: Sequence[tuple[str, str, nn.Module]], log: list[StepAnswer]) -> Iterator[Any]:
    """Add hooks that record the calls of each part, and of the layers of a feed-forward."""

    def note(probe: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        every = (*args, *kwargs.values())
        tensors = [x for x in every if isinstance(x, Tensor) and x.is_floating_point()]
        if tensors:
            inputs = {f"in {number}": x.detach().clone() for number, x in enumerate(tensors[:3])}
            log.append(StepAnswer(probe, dict(inputs), first_array(output).clone()))

    for kind, path, module in parts:
        yield module.register_forward_hook(partial(note, f"{kind}: {path}"), with_kwargs=True)
        for name, layer in module.named_modules() if kind == "feed-forward" else ():
            if isinstance(layer, nn.Linear):
                yield layer.register_forward_hook(partial(note, f"inner: {path}.{name}"), with_kwargs=True)


def _fresh(value: object) -> Any:
    """Return a copy that requires a gradient, so that torch's own layer does not skip the hooks."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.clone().requires_grad_()
    return value


def _check_samples(body: nn.Module, inputs: Inputs, named: dict[str, object], evidence: Evidence) -> None:
    """Add findings if its output is not finite, or if samples of a batch depend on each other."""
    names = {name: role for name, x in named.items() for role in inputs if x is inputs[role]}

    @torch.no_grad()
    def output(changed: Inputs) -> Tensor:
        return first_array(body(**named | {name: changed[role] for name, role in names.items()}))

    def reacts(axis: int) -> bool:
        """Return True if the second element along this axis depends on the first."""
        moved = {role: x.clone() for role, x in inputs.items()}
        dice = torch.Generator().manual_seed(9)
        for x in moved.values():  # adding one number to all channels would be undone by a norm
            first = x.select(axis, 0)
            first.add_(torch.randn(first.shape, generator=dice, dtype=torch.float64).to(x.dtype))
        return apart(output(moved).select(axis, 1), base.select(axis, 1)) > 1e-9

    base = output(inputs)
    if not bool(base.isfinite().all()):
        detail = "it is not finite for ordinary inputs; check whether a mask hides all keys of a query"
        evidence.findings.append(Finding("output", "unknown", detail))
        return
    if not reacts(0):
        return
    detail = "the output of the second sample depends on the first sample"
    if reacts(1):
        evidence.findings.append(Finding("batch", "unknown", detail))
    elif layout_words(evidence.source or "") == "batch first":
        evidence.findings.append(Finding("batch", "wrong", detail, "wrong layout"))
    else:
        evidence.conventions.words.append("its inputs are [T, B, E], length first")


def _examine_inside(body: nn.Module, evidence: Evidence) -> None:
    """Examine each attention of the block like an attention by itself."""
    for kind, path, module in _parts(body):
        if kind != "attention" or isinstance(module, nn.MultiheadAttention):
            continue
        inside, _ = examine_attention(module, evidence.source, evidence.path)
        report = judge_whole(inside)
        name = f"attention inside ({path})"
        if report.faults:
            evidence.findings += [
                Finding(name, "wrong", fault.detail or fault.title, fault.key, fault.line)
                for fault in report.faults
            ]
        else:
            evidence.findings.append(Finding(name, "right" if report.ok else "unknown", report.summary))


# The structure of a block

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
Mistake = tuple[str, str]  # the key of a fault, and the evidence
X = frozenset({"x"})


@dataclass
class _Part:
    kind: str  # "norm", "attention", "feed-forward"
    path: str
    atom: str  # its output, by name
    inputs: list[Tensor]
    output: Tensor
    inner: list[StepAnswer] = field(default_factory=list)


def judge_block(evidence: Evidence) -> Verdict:
    """Return the structure of a block in words, and its faults."""
    if not evidence.answers:
        return Verdict(unjudged=f"{evidence.name} could not be built and called")
    whole, parts = evidence.answers[0], _read(evidence)
    subs = [part for part in parts if part.kind != "norm"]
    feeds = [part for part in parts if part.kind == "feed-forward"]
    verdict = Verdict(words=[words for feed in feeds for words in _feed_words(feed)])
    verdict.faults += [fault for feed in feeds for fault in _feed_faults(feed)]
    verdict.faults += _norm_axes(parts)
    queries = _queries(whole, subs, verdict)
    way = _way(whole, parts, queries) or _way_after_activation(whole, parts, queries, verdict)
    if way is not None:
        verdict.faults += dict(reversed(way.faults)).items()  # each key once, with its first evidence
        verdict.faults += _missing_norms(way, parts, evidence)
        verdict.words = [*_norm_words(way), *verdict.words]
    elif not verdict.faults:
        calls = ", ".join(f"{part.kind} {part.path}" for part in parts)
        verdict.unjudged = f"how its parts are connected was not understood (calls recorded: {calls})"
    kinds = [part.kind for part in subs]
    if kinds.count("feed-forward") == 1 and kinds[0] == "feed-forward" and "attention" in kinds:
        verdict.faults.append(("feed-forward before attention", f"{feeds[0].path} is called first"))
    if not feeds:
        verdict.unjudged = verdict.unjudged or "no feed-forward was found in it"
    if "memory" in whole.inputs and "memory not used" not in dict(verdict.faults):
        verdict.words.append("cross-attention over the memory")
    verdict.right = "; ".join(verdict.words)
    return verdict


def _read(evidence: Evidence) -> list[_Part]:
    """Return the parts in the order of their calls; consecutive linear layers are one feed-forward."""
    parts: list[_Part] = []
    inner: list[StepAnswer] = []
    alone = False  # whether the last part is made of such layers
    for answer in evidence.answers[1:]:
        assert answer.output is not None
        kind, _, path = answer.probe.partition(": ")
        inputs = [value for value in answer.inputs.values() if isinstance(value, Tensor)]
        last = parts[-1] if parts else None
        if kind == "inner":
            inner.append(answer)
        elif kind == "linear" and last is not None and _is_output_projection(inputs[0], last):
            last.output = answer.output
        elif kind == "linear" and last is not None and alone:
            last.output = answer.output
            last.inner.append(answer)
        else:
            alone = kind == "linear"
            made = _Part(
                "feed-forward" if alone else kind, path, f"{kind[0]}{len(parts)}", inputs, answer.output
            )
            if alone:
                made.inner = [answer]
            elif kind == "feed-forward":
                made.inner, inner = [each for each in inner if each.probe.startswith(f"inner: {path}")], []
            parts.append(made)
    return parts


def _is_output_projection(x: Tensor, before: _Part) -> bool:
    """Return True if x is the output of an attention whose output projection is in the block."""
    return before.kind == "attention" and apart(x, before.output) < 1e-9


class _Flow:
    """For each tensor: the earlier tensors whose sum it is."""

    def __init__(self, whole: StepAnswer, parts: Sequence[_Part]) -> None:
        assert whole.output is not None
        self.atoms = {name: x for name, x in whole.inputs.items() if isinstance(x, Tensor)}
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
        """Return the norms of this sum."""
        norms = [atom for atom, part in self.parts.items() if part.kind == "norm"]
        return [frozenset({atom}) for atom in norms if self.into[atom] == wanted]


@dataclass
class _Way:
    """One reading of how the parts are joined."""

    stream: Sum
    cost: float = 0.0
    norms: tuple[str, ...] = ()  # for each part: "before", "after", "inside", "both", ""
    faults: tuple[Mistake, ...] = ()
    parallel: bool = False


def _way(whole: StepAnswer, parts: Sequence[_Part], queries: Mapping[str, Tensor]) -> _Way | None:
    """Return the simplest reading of the block that ends in its output; None if there is none."""
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
    whole: StepAnswer, parts: Sequence[_Part], queries: Mapping[str, Tensor], verdict: Verdict
) -> _Way | None:
    """Return the simplest reading with an activation after the last feed-forward."""
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
    """Yield the readings extended by one part."""
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
    """Yield (norm before the part, cost, whether it runs parallel to the part before)."""
    if into == way.stream:
        yield "", 0.0, False
    if into in flow.normed(way.stream):
        yield "before", 0.0, False
    if not is_first and way.stream != X and (into == X or into in flow.normed(X)):
        yield "" if into == X else "before", 0.3, True


def _residuals(
    flow: _Flow, way: _Way, part: _Part, into: Sum, is_first: bool
) -> Iterator[tuple[Sum, float, list[Mistake]]]:
    """Yield (what is added to the output of the part, cost, faults)."""
    yield way.stream, 0.0, []
    missing = f"no residual around {part.kind}"
    yield frozenset(), 1.0, [(missing, f"the input of {part.path} is not added to its output")]
    wrong = "residual from the wrong place"
    if into != way.stream:
        yield into, 1.0, [(wrong, f"the normalised input of {part.path} is added to its output")]
    if not is_first and way.stream != X:
        yield X, 1.0, [(wrong, f"the block's input is added to the output of {part.path}")]
    for atom in sorted(way.stream - X) if len(way.stream) > 1 else ():
        detail = f"only the output of {flow.parts[atom].path} is added to the output of {part.path}"
        yield frozenset({atom}), 1.1, [(wrong, detail)]


# The parts of a block


def _queries(whole: StepAnswer, subs: Sequence[_Part], verdict: Verdict) -> dict[str, Tensor]:
    """Return the input made from x of each part where it is not the first; name faults of the memory."""
    memory = whole.inputs.get("memory")
    if not isinstance(memory, Tensor):
        return {}
    queries, reads = {}, False
    for part in subs:
        of_memory = [memory.shape[1] in x.shape[:2] for x in part.inputs]
        reads = reads or any(of_memory)
        if of_memory[0] and not all(of_memory):
            verdict.faults.append(
                ("queries from the memory", f"the first input of {part.path} is the memory")
            )
            queries[part.atom] = part.inputs[of_memory.index(False)]
    if not reads:
        verdict.faults.append(("memory not used", "no part of the block gets the memory as an input"))
    return queries


def _activation(output: Tensor, source: Tensor, factor: Tensor | None = None) -> str | None:
    """Return the name of the activation that gives the output from the source (times the factor)."""
    for name, activation in ACTIVATIONS.items():
        wanted = activation(source) if factor is None else activation(source) * factor
        if apart(output, wanted) < 1e-6:
            return name
    return None


def _feed_words(feed: _Part) -> list[str]:
    """Return its widths and its activation in words."""
    if len(feed.inner) < 2:
        return ["the feed-forward is one linear layer"] if feed.inner else []
    (_, first), *_, (into, last) = ((each.inputs["in 0"], each.output) for each in feed.inner)
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
    return [f"feed-forward {widths} with {name or 'an unknown activation'}"]


def _has_no_activation(feed: _Part) -> bool:
    """Return True if the output of the first of two layers is the input of the second."""
    if len(feed.inner) != 2:
        return False
    first, into = feed.inner[0].output, feed.inner[1].inputs["in 0"]
    return first is not None and isinstance(into, Tensor) and apart(into, first) < 1e-9


def _feed_faults(feed: _Part) -> Iterator[Mistake]:
    """Yield a missing activation, and one after the last layer."""
    if _has_no_activation(feed):
        detail = f"the output of the first layer of {feed.path} is the input of the second"
        yield "feed-forward without activation", detail
    last = feed.inner[-1].output if len(feed.inner) > 1 else None
    if last is not None and feed.output.shape == last.shape and apart(feed.output, last) > 1e-9:
        name = _activation(feed.output, last)
        if name is not None:
            yield "activation after the feed-forward", f"{name} follows the last layer of {feed.path}"


def _norm_axes(parts: Sequence[_Part]) -> Iterator[Mistake]:
    """Yield norms that are taken over an axis other than the last."""
    for part in parts:
        x = part.inputs[0]
        if part.kind != "norm" or x.shape != part.output.shape or x.ndim != 3:
            continue
        rms = x / x.square().mean(-1, keepdim=True).sqrt()
        if any(_is_affine(part.output, z) for z in (_normed(x, (-1,)), rms)):
            continue
        for axes, words in OTHER_AXES.items():
            if _is_affine(part.output, _normed(x, axes)) and not _is_affine(part.output, x):
                yield (
                    "norm over the wrong axis",
                    f"{part.path} takes mean and standard deviation over {words}",
                )
                break


def _normed(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    return (x - x.mean(axes, keepdim=True)) / x.std(axes, keepdim=True)


def _is_affine(out: Tensor, z: Tensor) -> bool:
    """Return True if each channel of `out` is a scale and a shift of that channel of `z`."""
    mine, theirs = z.flatten(0, 1), out.flatten(0, 1)  # [B * T, E]
    mine, middle = mine - mine.mean(0), theirs - theirs.mean(0)
    scale = (mine * middle).sum(0) / mine.square().sum(0).clamp_min(1e-30)
    return bool((middle - scale * mine).abs().max() <= 1e-3 * middle.abs().max().clamp_min(1e-12))


def _norm_words(way: _Way) -> list[str]:
    """Return the places of the norms in words."""
    words = ["attention and feed-forward in parallel"] if way.parallel else []
    placed = frozenset(way.norms)
    if placed in PLACES:
        words.append(PLACES[placed])
    elif "" not in placed:
        words.append(f"norms {', '.join(way.norms)} its parts")
    return words


def _missing_norms(way: _Way, parts: Sequence[_Part], evidence: Evidence) -> Iterator[Mistake]:
    """Yield missing norms, and a norm that is used twice."""
    if set(way.norms) == {""}:
        yield "block without norms", "no norm was called between the parts"
    elif "" in way.norms:
        places = f"norms by part, in order: {', '.join(place or 'none' for place in way.norms)}"
        yield "norm missing in the block", "; ".join([places, *evidence.tried])
    paths = [part.path for part in parts if part.kind == "norm"]
    twice = sorted({path for path in paths if paths.count(path) > 1})
    if twice:
        yield "one norm for two parts", f"{twice[0]} is called {paths.count(twice[0])} times"


# Functions of q and k, and reports on a function or on one head

FUNCTION = "torch.nn.functional.scaled_dot_product_attention"
HEAD = "one head of torch.nn.MultiheadAttention"
WHOLE = "torch.nn.MultiheadAttention"


class _TimesValues:
    """The learner's weights, or the softmax of their scores, times v; examined like an attention."""

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
    """Find out whether the function returns weights or scores, and examine it as an attention."""
    slots = {input_word(each.name): each.name for each in callee.parameters}
    callee.roles = {role: slots[role] for role in ("query", "key")}
    needed = callee.missing(*callee.roles.values())
    callee.fixed |= dict.fromkeys(each.name for each in needed if input_word(each.name) == "mask")
    shapes = [(2, 3, 5, 7), (2, 5, 7), (5, 7)]
    probes = [
        ("plain", {"query": numbers(*shape, seed=3), "key": numbers(*shape, seed=4)}) for shape in shapes
    ]
    first = callee.first_answer(probes, lambda answer: answer.output is not None)
    evidence.answers.append(first)
    if first.output is None:
        assert first.problem is not None
        evidence.problems.append(first.problem)
        return
    query, made = first.inputs["query"], list(first.output.shape)
    assert isinstance(query, Tensor)
    if made != [*query.shape[:-1], query.shape[-2]]:
        evidence.tried.append(
            f"for q and k {list(query.shape)} it returns {made}, which are neither scores nor weights"
        )
        return
    _, touched = callee.answer("plain", first.inputs)
    evidence.findings += [] if touched is None else [callee.modified(touched)]
    evidence.step = "scores" if bool((first.output < 0).any()) else "weights"
    _examine_as_attention(callee, evidence, wanted)


def _examine_as_attention(callee: Callee, evidence: Evidence, wanted: Wanted) -> None:
    """Examine the function, times v, as an attention, and merge that into its evidence."""
    whole = _TimesValues(callee.body, evidence.step == "scores")
    whole_evidence, again = examine_attention(
        whole, evidence.source, evidence.path, None, wanted.embed_dim, wanted.num_heads
    )
    conventions = whole_evidence.conventions
    conventions.words = [
        re.sub(r", value\b( \(value\))?", "", words) for words in _without_weights(conventions.words)
    ]
    names = {finding.name for finding in evidence.findings}
    findings = [each for each in whole_evidence.findings if each.name not in names] + evidence.findings
    own_fields = ("name", "first_line", "step", "answers", "kind", "built")
    own = {name: getattr(evidence, name) for name in own_fields}
    vars(evidence).update(vars(whole_evidence) | own | {"again": again, "findings": findings})


def _without_weights(words: list[str]) -> list[str]:
    return [each for each in words if not each.startswith("it has no weights")]


def judge_scores(evidence: Evidence) -> Report:
    """Return the report on a function that returns scores or weights."""
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
        report.equal.append("it returns q k^T without the scale: divide by sqrt(d_k) before the softmax")
        beside = "q k^T"
        report.summary = f"{report.name} computes the same as {WHOLE} (largest difference 0)"
    _beside(report, beside)
    return report


def told_as(evidence: Evidence, report: Report) -> Report:
    """Return the report with the right comparison, for a function without projections or one head."""
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
    """Rename a fitted scale of one head to "scale by d_model" if it is 1 / sqrt(width of the input)."""
    fault, width = OF_WHOLES["scale by d_model"], evidence.embed_dim
    for at, named in enumerate(report.faults):
        near = named.number is not None and abs(named.number - width**-0.5) < 1e-6
        if named.key == "constant scale" and near:
            detail = named.detail + f"; this is 1 / sqrt({width}), where {width} is the width of the input"
            report.faults[at] = Named.of(fault, detail, named.line, named.text)
            report.summary = f"{fault.key}: {fault.title}"


def _beside(report: Report, beside: str) -> None:
    report.beside = beside
    report.summary = report.summary.replace(WHOLE, beside)
    report.summary = report.summary.replace(
        "does not compute multi-head attention", f"does not compute {beside}"
    )
