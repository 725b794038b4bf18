"""Designs: each is recognised and said in a sentence; the attention within it is checked as strictly."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from headwise.examiner import check
from headwise.examiner.dispatch import examine, judge
from headwise.examiner.evidence import Evidence


def split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Plain(nn.Module):
    """Every design is this with one part changed."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.d_k = num_heads, d_model // num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))
        self.more(d_model)

    def more(self, d_model):
        pass

    def divisor(self):
        return math.sqrt(self.d_k)

    def turn(self, q, k):
        return q, k

    def place(self, scores):
        return scores

    def join(self, heads):
        return heads.transpose(1, 2).flatten(2)

    def attend(self, x):
        q, k, v = (split(w(x), self.num_heads) for w in (self.W_q, self.W_k, self.W_v))
        q, k = self.turn(q, k)
        scores = self.place(q @ k.mT / self.divisor())
        return self.W_o(self.join(scores.softmax(-1) @ v))

    def forward(self, x):
        return self.attend(x)


def future(scores):
    return torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)


class PreNorm(Plain):
    def more(self, d_model):
        self.norm = nn.LayerNorm(d_model)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x):
        return x + self.attend(self.norm(x))


class PostNorm(PreNorm):
    def forward(self, x):
        return self.norm(x + self.attend(x))


class NormedResidual(Plain):
    def forward(self, x):
        x = F.layer_norm(x, x.shape[-1:])
        return x + self.attend(x)


class OwnNorm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.g = nn.Parameter(torch.rand(n) + 0.5)

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.g


class QueryKeyNorm(Plain):
    def more(self, d_model):
        self.a, self.b = OwnNorm(self.d_k), OwnNorm(self.d_k)

    def turn(self, q, k):
        return self.a(q), self.b(k)


def halves(x):
    D = x.shape[-1]
    angle = torch.arange(x.shape[-2])[:, None] * 10_000.0 ** (-torch.arange(0, D, 2) / D)
    angle = torch.cat([angle, angle], -1)
    other = torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1)
    return x * angle.cos() + other * angle.sin()


class Rope(Plain):
    def turn(self, q, k):
        return halves(q), halves(k)


class Turner(nn.Module):
    """An object that turns queries and keys."""

    def __init__(self, dim):
        super().__init__()
        self.register_buffer("steps", 500.0 ** (-torch.arange(0, dim, 2) / dim))

    def rotate(self, x):
        angle = torch.arange(x.shape[-2])[:, None] * self.steps
        a, b = x[..., ::2], x[..., 1::2]
        pair = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
        return torch.stack(pair, -1).flatten(-2)


RotaryEmbedding = Turner  # as files call it


class GivenRope(Plain):
    def __init__(self, d_model, num_heads, rope):
        super().__init__(d_model, num_heads)
        self.rope = rope

    def turn(self, q, k):
        return self.rope.rotate(q), self.rope.rotate(k)


class CalledRope(GivenRope):
    def turn(self, q, k):
        return self.rope(q, k)


class RopeWithTables(GivenRope):
    def turn(self, q, k):
        T = q.shape[-2]
        cos, sin = self.rope.cos[:T], self.rope.sin[:T]

        def turned(x):
            a, b = x.chunk(2, -1)
            return x * cos + torch.cat([-b, a], -1) * sin

        return turned(q), turned(k)


class RopeInCall(Plain):
    def forward(self, x, rope):
        self.turn = lambda q, k: (rope.rotate(q), rope.rotate(k))
        return self.attend(x)


class PositionsAdded(Plain):
    """DETR's: what others have cos and sin under, it adds to queries and keys."""

    def forward(self, hidden_states, position_embeddings):
        placed = hidden_states + position_embeddings
        q, k, v = self.W_q(placed), self.W_k(placed), self.W_v(hidden_states)
        q, k, v = (split(x, self.num_heads) for x in (q, k, v))
        return self.W_o(self.join((q @ k.mT / self.divisor()).softmax(-1) @ v))


class PartOfRope(Plain):
    def turn(self, q, k):
        def turned(x):
            angle = torch.arange(x.shape[-2])[:, None] * 500.0 ** (-torch.arange(0, 4, 2) / 4)
            a, b = x[..., 0:4:2], x[..., 1:4:2]
            pair = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
            return torch.cat([torch.stack(pair, -1).flatten(-2), x[..., 4:]], -1)

        return turned(q), turned(k)


class Alibi(Plain):
    def place(self, scores):
        at = torch.arange(scores.shape[-1])
        slopes = 2.0 ** -(torch.arange(self.num_heads) + 1.0)
        return (scores + slopes[:, None, None] * (at - at[:, None])).masked_fill(future(scores), -torch.inf)


class RelativeBias(Plain):
    def more(self, d_model):
        self.table = nn.Parameter(torch.randn(self.num_heads, 63))

    def place(self, scores):
        at = torch.arange(scores.shape[-1])
        return scores + self.table[:, at - at[:, None] + 31]


class T5(RelativeBias):
    def divisor(self):
        return 1.0


class Window(Plain):
    def place(self, scores):
        at = torch.arange(scores.shape[-1])
        away = at - at[:, None]
        return scores.masked_fill((away > 0) | (away < -2), -1e9)


class Latent(Plain):
    def more(self, d_model):
        self.down, self.norm = nn.Linear(d_model, 10, bias=False), OwnNorm(10)
        self.W_k, self.W_v = nn.Linear(10, d_model, bias=False), nn.Linear(10, d_model, bias=False)

    def attend(self, x):
        c = self.norm(self.down(x))
        q, k, v = (split(y, self.num_heads) for y in (self.W_q(x), self.W_k(c), self.W_v(c)))
        q, k = self.turn(q, k)
        return self.W_o(self.join((q @ k.mT / self.divisor()).softmax(-1) @ v))


class Decoupled(Latent):
    def more(self, d_model):
        super().more(d_model)
        self.down, self.rotary = nn.Linear(d_model, 14), nn.Linear(d_model, 4 * self.num_heads)

    def attend(self, x):
        c, shared = self.down(x).split([10, 4], -1)
        c, H = self.norm(c), self.num_heads
        q, k, v = split(self.W_q(x), H), split(self.W_k(c), H), split(self.W_v(c), H)
        q = torch.cat([q, halves(split(self.rotary(x), H))], -1)
        k = torch.cat([k, halves(shared[:, None].expand(-1, H, -1, -1))], -1)
        return self.W_o(self.join((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v))


class Cosine(Plain):
    def turn(self, q, k):
        return F.normalize(q, dim=-1), F.normalize(k, dim=-1)

    def divisor(self):
        return 0.1


class WrongScale:
    def divisor(self):
        return math.sqrt(self.d_k * self.num_heads)


class WrongMerge:
    def join(self, heads):
        return heads.reshape(heads.shape[0], heads.shape[2], -1)


DESIGNS: dict[type[Plain], str] = {
    PreNorm: "a LayerNorm of the input",
    PostNorm: "a LayerNorm of the output",
    NormedResidual: "the normalised input is added",
    QueryKeyNorm: "a RMSNorm of queries and keys",
    Rope: "pairs of halves, base 10000",
    GivenRope: "pairs of neighbours, base 500",
    CalledRope: "pairs of halves, base 10000",  # the class of the file cannot be called: one of ours
    PartOfRope: "pairs of neighbours, base 500, 4 of 6 channels",
    Alibi: "ALiBi, slopes 0.5, 0.25",
    RelativeBias: r"a bias by distance (s - t)",
    T5: "scores without the factor 1 / sqrt(d_k), as in T5",
    Window: "a sliding window of 3 keys",
    Latent: "keys and values through 10 channels (latent attention, RMSNorm between)",
    Cosine: "cosine attention",
}


def words(evidence: Evidence) -> str:
    return "; ".join(design.words for design in evidence.designs)


@pytest.mark.thinned(9)
@pytest.mark.parametrize("design", DESIGNS, ids=lambda cls: cls.__name__)
def test_a_design_is_right_and_said(design: type[Plain]) -> None:
    evidence = examine(design, embed_dim=24, num_heads=4)
    report = judge(evidence)
    assert report.ok, report.summary
    assert DESIGNS[design] in words(evidence)


@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    ("design", "wrong"),
    [
        *((each, WrongScale) for each in (PreNorm, QueryKeyNorm, Rope, Alibi, Window, Latent)),
        (GivenRope, WrongScale),
        *((each, WrongMerge) for each in (PostNorm, NormedResidual, PartOfRope, T5, Cosine, Latent)),
    ],
    ids=lambda cls: cls.__name__,
)
def test_what_is_wrong_within_a_design_is_named(design: type[Plain], wrong: type) -> None:
    evidence = examine(type("Wrong", (wrong, design), {}), embed_dim=24, num_heads=4)
    named = {WrongScale: "scale by d_model", WrongMerge: "merge without transpose"}[wrong]
    assert [fault.key for fault in judge(evidence).faults] == [named]
    assert evidence.designs


@pytest.mark.thinned(keep=["PositionsAdded"])
@pytest.mark.parametrize("cls", [RopeWithTables, RopeInCall, PositionsAdded])
def test_a_rotation_of_ours_is_handed_over_and_said(cls: type[Plain]) -> None:
    report = check(cls)
    assert report.verdict == "right", report.summary
    assert any("are passed" in words or "to the constructor" in words for words in report.conventions.words)
    wrong = check(type("Wrong", (WrongScale, cls), {}))
    assert [fault.key for fault in wrong.faults] == ["scale by d_model"]


def test_a_missing_causal_mask_within_rope_is_named() -> None:
    class CausalRope(Rope):
        def place(self, scores):
            return scores.masked_fill(future(scores).tril(), -torch.inf)

    source = "class CausalRope:\n    def f(self, x):\n        return x.triu(1)\n"
    faults = [fault.key for fault in judge(examine(CausalRope, source=source)).faults]
    assert faults in (["mask ignored"], ["causal mask forgotten"])  # by names the same


def test_no_scale_without_a_bias_is_a_fault() -> None:
    class Unscaled(Plain):
        def divisor(self):
            return 1.0

    assert [fault.key for fault in check(Unscaled).faults] == ["no scale"]


def test_a_triangle_of_ones_added_is_no_bias_by_position() -> None:
    class Added(Plain):
        def place(self, scores):
            return scores + (~future(scores)).double()

    assert examine(Added).designs == []


def test_latent_attention_with_a_rotary_part_of_its_own_is_not_judged() -> None:
    evidence = examine(Decoupled)
    assert [problem.kind for problem in evidence.problems] == ["roles"]
    assert "latent attention with a decoupled rotary part" in evidence.problems[0].message
    assert judge(evidence).faults == []


def test_a_window_longer_than_the_probes_is_seen_in_a_longer_call() -> None:
    class Long(Plain):
        def more(self, d_model):
            self.window_size = 23

        def place(self, scores):
            at = torch.arange(scores.shape[-1])
            away = at - at[:, None]
            return scores.masked_fill((away > 0) | (away <= -self.window_size), -torch.inf)

    evidence = examine(Long)
    assert judge(evidence).ok
    assert "a sliding window of 23 keys" in words(evidence)


BERT = """
class BertSelfAttention: pass
class BertSelfOutput:
    def __init__(self, d): self.dense = nn.Linear(d, d)
class BertAttention:
    def __init__(self, d): self.self, self.output = 0, 0
"""


@pytest.mark.parametrize(("name", "ok"), [("BertSelfAttention", True), ("MultiHeadAttention", False)])
def test_an_output_projection_may_be_in_another_class(name: str, ok: bool) -> None:
    class Half(Plain):
        def more(self, d_model):
            self.W_o = nn.Identity()

    Half.__name__ = name
    report = judge(examine(Half, source=BERT))
    assert report.ok is ok
    assert [fault.key for fault in report.faults] == ([] if ok else ["no output projection"])


def test_a_wrapper_of_torchs_own_is_told_as_one() -> None:
    class Wrapper(nn.Module):
        def __init__(self, d_model, num_heads):
            super().__init__()
            self.inner = nn.MultiheadAttention(d_model, num_heads, batch_first=True)

        def forward(self, x):
            return self.inner(x, x, x)[0]

    assert [design.key for design in examine(Wrapper).designs] == ["torch inside"]


class Masked(Plain):
    """Takes masks in ways of its own."""

    def shown(self, mask, B, T):
        raise NotImplementedError

    def forward(self, x, mask=None):
        q, k, v = (split(w(x), self.num_heads) for w in (self.W_q, self.W_k, self.W_v))
        scores = self.place(q @ k.mT / self.divisor())
        if mask is not None and mask is not False:
            scores = scores.masked_fill(~self.shown(mask, *x.shape[:2]), -torch.inf)
        return self.W_o(self.join(scores.softmax(-1) @ v))


class Switch(Masked):
    def shown(self, mask, B, T):
        if mask is not True:
            raise TypeError("mask must be True or False")
        return torch.ones(T, T, dtype=torch.bool).tril()


class Word(Switch):
    def shown(self, mask, B, T):
        return super().shown(isinstance(mask, str) and mask == "causal", B, T)


class Lengths(Masked):
    def shown(self, mask, B, T):
        if not isinstance(mask, list):
            raise TypeError("mask must be a list of lengths")
        return torch.stack([torch.arange(T) < n for n in mask])[:, None, None]


class HeadsFirst(Masked):
    def shown(self, mask, B, T):
        return mask.view(self.num_heads, B, T, T).transpose(0, 1)


class MaskedWindow(Masked):
    place = Window.place

    def shown(self, mask, B, T):
        return mask.view(B, 1, 1, T)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("cls", "kind", "shape"),
    [
        (Switch, "switch", None),
        (Word, "switch", None),
        (Lengths, "lengths", "[B] as a list"),
        (HeadsFirst, "bool", "[H*B, T, S]"),
        (MaskedWindow, "bool", "[B, S]"),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_masks_of_every_kind_are_understood(cls: type[Masked], kind: str, shape: str | None) -> None:
    evidence = examine(cls)
    assert (evidence.conventions.mask_kind, evidence.conventions.mask_shape) == (kind, shape)
    assert judge(evidence).ok
    assert len([call for call in evidence.calls if call.inputs.mask is not None]) >= 1


def test_a_mask_that_takes_the_place_of_another_is_seen() -> None:
    class Overwrites(Masked):
        def forward(self, x, padding_mask=None, causal=False):
            q, k, v = (split(w(x), self.num_heads) for w in (self.W_q, self.W_k, self.W_v))
            scores, hidden = q @ k.mT / self.divisor(), None
            if causal:
                hidden = future(scores)
            if padding_mask is not None:
                hidden = padding_mask[:, None, None]
            scores = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
            return self.W_o(self.join(scores.softmax(-1) @ v))

    evidence = examine(Overwrites)
    both = evidence.call("padding + causal")
    assert both is not None
    assert both.output is not None
    truth = evidence.truth(both)
    assert truth is not None
    assert not torch.allclose(both.output, truth.output)
