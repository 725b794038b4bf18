"""Designs that are seldom seen: right code that has one is not accused, and its attention is judged."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from headwise.examiner import check
from headwise.examiner.examine.vocabulary import size_word
from headwise.examiner.explanations import explain


class Separate(nn.Module):
    """Plain attention with a layer for each projection; others change one step of it."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def heads(self, x: Tensor) -> list[Tensor]:
        every = (layer(x).unflatten(-1, (self.num_heads, -1)) for layer in (self.q, self.k, self.v))
        return [each.transpose(1, 2) for each in every]

    def root(self, q: Tensor) -> float:
        return float(q.shape[-1] ** 0.5)


class BiasReturned(Separate):
    """Attention as T5 has it: the bias by distance is handed on to the next layer, beside the output."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads)
        self.table = nn.Embedding(63, num_heads)

    def bias(self, T: int) -> Tensor:
        at = torch.arange(T)
        table: Tensor = self.table(at - at[:, None] + 31)
        return table.permute(2, 0, 1)[None]  # [1, H, T, T]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(x)
        bias = self.bias(x.shape[1])
        p = (q @ k.mT + bias).softmax(-1)
        return self.o((p @ v).transpose(1, 2).flatten(2)), bias


class BiasReturnedForAll(BiasReturned):
    """The bias comes once for every sample."""

    def bias(self, T: int) -> Tensor:
        return super().bias(T).expand(self.samples, -1, -1, -1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.samples = len(x)
        return super().forward(x)


class ScoresReturned(BiasReturned):
    """What it calls its weights are the scores with their bias."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(x)
        weights = q @ k.mT + self.bias(x.shape[1])
        return self.o((weights.softmax(-1) @ v).transpose(1, 2).flatten(2)), weights


@pytest.mark.parametrize("kind", [BiasReturned, BiasReturnedForAll])
def test_a_bias_that_is_returned_is_not_taken_for_weights(kind: type) -> None:
    report = check(kind)
    assert report.verdict == "right", report.summary


def test_scores_that_are_returned_as_weights_are_still_named() -> None:
    assert [each.key for each in check(ScoresReturned).faults] == ["other weights returned"]


class QueriesKept(nn.Module):
    """The projected queries are added to what the heads give; whoever calls it goes on from there."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.queries, self.keys, self.values = (nn.Linear(d_model, d_model) for _ in range(3))

    def scale(self, q: Tensor) -> float:
        return float(q.shape[-1] ** -0.5)

    def forward(self, agents: Tensor) -> Tensor:
        projected = self.queries(agents)
        q, k, v = (
            each.unflatten(-1, (self.num_heads, -1))
            for each in (projected, self.keys(agents), self.values(agents))
        )
        p = (torch.einsum("bthd,bshd->bhts", q, k) * self.scale(q)).softmax(-1)
        added: Tensor = projected + torch.einsum("bhts,bshd->bthd", p, v).flatten(2)
        return added


class QueriesKeptUnscaled(QueriesKept):
    def scale(self, q: Tensor) -> float:
        return 1.0


def test_queries_that_are_added_are_a_design() -> None:
    report = check(QueriesKept)
    assert report.verdict == "right", report.summary
    assert any("projected queries are added" in words for words in report.designs)


def test_queries_that_are_added_are_a_step_of_the_explanation() -> None:
    explanation = explain(QueriesKept(12, 3), torch.randn(1, 4, 12))
    shown = next(step for step in explanation.steps if step.key == "residual")
    assert shown.formula.endswith("+ Q")


def test_a_fault_beside_queries_that_are_added_is_named() -> None:
    assert "no scale" in [each.key for each in check(QueriesKeptUnscaled).faults]


class KeysFirst(nn.Module):
    """Keys, queries and values in one weight, and no projection of the output; far keys count for less."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.kqv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.slopes: Tensor
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, num_heads + 1)[:, None, None])

    def root(self, q: Tensor) -> float:
        return float(q.shape[-1] ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        k, q, v = (
            each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in self.kqv(x).chunk(3, -1)
        )
        at = torch.arange(x.shape[1])
        scores = q @ k.mT / self.root(q) - self.slopes * (at - at[:, None]).abs()
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class KeysFirstScaledByWidth(KeysFirst):
    def root(self, q: Tensor) -> float:
        return float((q.shape[-1] * q.shape[1]) ** 0.5)


@pytest.mark.parametrize(("kind", "named"), [(KeysFirst, []), (KeysFirstScaledByWidth, ["scale by d_model"])])
def test_a_fused_weight_in_another_order_is_cut_without_an_output_projection(
    kind: type, named: list[str]
) -> None:
    report = check(kind)
    assert [each.key for each in report.faults if each.key != "no output projection"] == named
    assert "ALiBi" in report.designs[0]


class Rotary(Separate):
    """Queries and keys turned by their positions, by tables that are made once."""

    neighbours = False

    def __init__(self, d_model: int, num_heads: int, longest: int = 32) -> None:
        super().__init__(d_model, num_heads)
        D = d_model // num_heads
        angles = torch.outer(torch.arange(longest), 1e3 ** (-2 * torch.arange(D // 2) / D))
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def tables(self, T: int) -> tuple[Tensor, Tensor]:
        return self.cos[:T], self.sin[:T]

    def pair(self, a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return a * cos - b * sin, a * sin + b * cos

    def turn(self, x: Tensor) -> Tensor:
        cos, sin = self.tables(x.shape[-2])
        if self.neighbours:
            return torch.stack(self.pair(x[..., ::2], x[..., 1::2], cos, sin), -1).flatten(-2)
        a, b = x.chunk(2, -1)
        return torch.cat(self.pair(a, b, cos, sin), -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        p = (self.turn(q) @ self.turn(k).mT / self.root(q)).softmax(-1)
        output: Tensor = self.o((p @ v).transpose(1, 2).flatten(2))
        return output


class CosinesTwice(Rotary):
    neighbours = True

    def tables(self, T: int) -> tuple[Tensor, Tensor]:
        return self.cos[:T], self.cos[:T]


class NoMinus(Rotary):
    def pair(self, a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return a * cos + b * sin, a * sin + b * cos


class TwoMinuses(Rotary):
    def pair(self, a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return a * cos - b * sin, b * cos - a * sin


class OtherWayRound(Rotary):
    """Turned the other way: a rotation like any other."""

    def pair(self, a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return a * cos + b * sin, b * cos - a * sin


@pytest.mark.parametrize("kind", [Rotary, OtherWayRound])
def test_rotations_of_either_direction_are_right(kind: type) -> None:
    assert check(kind).verdict == "right"


@pytest.mark.parametrize("kind", [CosinesTwice, NoMinus, TwoMinuses])
def test_a_rotation_that_is_none_is_named(kind: type) -> None:
    assert [each.key for each in check(kind).faults] == ["rotation that stretches"]


class Voxels(nn.Module):
    """One head over the voxels of a volume, [B, C, depth, height, width], behind a norm of groups."""

    groups = 32

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(min(self.groups, channels), channels)
        self.q, self.k, self.v, self.out = (nn.Conv3d(channels, channels, 1) for _ in range(4))

    def root(self, channels: int) -> float:
        return float(channels**0.5)

    def forward(self, x: Tensor) -> Tensor:
        channels = x.shape[1]
        normed = self.norm(x)
        q, k, v = (layer(normed).flatten(2) for layer in (self.q, self.k, self.v))  # [B, C, N]
        p = (q.mT @ k / self.root(channels)).softmax(-1)
        return x + self.out((v @ p.mT).view_as(x))


class VoxelsOfManyChannels(Voxels):
    """Groups that a narrow module does not have."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.norm = nn.GroupNorm(self.groups, channels)


class VoxelsUnscaled(Voxels):
    def root(self, channels: int) -> float:
        return 1.0


class Frames(Voxels):
    """A film, [B, frames, C, depth, height, width]: no shape of ours."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)).unflatten(0, x.shape[:2])


@pytest.mark.parametrize("kind", [Voxels, VoxelsOfManyChannels])
def test_volumes_and_norms_of_groups_are_known(kind: type) -> None:
    report = check(kind)
    assert report.verdict == "right", report.summary
    assert any("GroupNorm" in words for words in report.designs)
    assert not any(role.transposed for role in report.roles.values())


def test_a_fault_behind_a_norm_of_groups_is_named() -> None:
    assert [each.key for each in check(VoxelsUnscaled).faults] == ["no scale"]


def test_layers_that_want_a_shape_that_we_do_not_have_are_not_judged() -> None:
    report = check(Frames)
    assert report.verdict == "not judged", report.summary


class SpelledOut(Separate):
    """Every size is said in words."""

    def __init__(
        self, how_many_heads: int, dimension_of_query: int, dimension_of_key: int, dimension_of_value: int,
        dimension_of_head: int, dimension_of_output: int,
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        self.num_heads, inner = how_many_heads, how_many_heads * dimension_of_head
        self.q = nn.Linear(dimension_of_query, inner)
        self.k = nn.Linear(dimension_of_key, inner)
        self.v = nn.Linear(dimension_of_value, inner)
        self.o = nn.Linear(inner, dimension_of_output)

    def softmax(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        p = self.softmax(q @ k.mT / self.root(q))
        output: Tensor = self.o((p @ v).transpose(1, 2).flatten(2))
        return output


class SpelledOutOverQueries(SpelledOut):
    def softmax(self, scores: Tensor) -> Tensor:
        return scores.softmax(2)


@pytest.mark.parametrize(
    ("kind", "named"), [(SpelledOut, []), (SpelledOutOverQueries, ["softmax over queries"])]
)
def test_sizes_that_are_spelled_out_are_understood(kind: type, named: list[str]) -> None:
    report = check(kind)
    assert report.judged, report.summary
    assert [each.key for each in report.faults] == named


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("number_of_heads", "heads"),
        ("how_many_heads", "heads"),
        ("size_of_each_head", "head dim"),
        ("dim_of_model", "width"),
        ("token_embed_dim", "width"),
        ("dimension_of_keys", "width"),
        ("dimension_of_feed_forward", None),
    ],
)
def test_a_size_by_its_long_name(name: str, word: str | None) -> None:
    assert size_word(name) == word


class Talking(Separate):
    """Heads talk to each other before the softmax and after it."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads)
        self.before, self.after = (nn.Conv2d(num_heads, num_heads, 1) for _ in range(2))

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        shares = self.before(q @ k.mT / self.root(q)).softmax(-1)
        mixed: Tensor = self.after(shares)
        return mixed

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        output: Tensor = self.o((self.weights(q, k) @ v).transpose(1, 2).flatten(2))
        return output


class TalkingAfterwards(Talking):
    """After the softmax alone, by a bare matrix."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        Separate.__init__(self, d_model, num_heads)
        self.mixing = nn.Parameter(torch.randn(num_heads, num_heads))

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("bhts,hg->bgts", (q @ k.mT / self.root(q)).softmax(-1), self.mixing)


class TalkingUnscaled(Talking):
    def root(self, q: Tensor) -> float:
        return 1.0


class TalkingOverQueries(Talking):
    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        mixed: Tensor = self.after(self.before(q @ k.mT / self.root(q)).softmax(-2))
        return mixed


@pytest.mark.parametrize("kind", [Talking, TalkingAfterwards])
def test_heads_that_talk_to_each_other_are_a_design(kind: type) -> None:
    report = check(kind)
    assert report.verdict == "right", report.summary
    assert "talking heads" in report.designs[0]


def test_a_fault_beside_heads_that_talk_is_named() -> None:
    assert [each.key for each in check(TalkingUnscaled).faults] == ["no scale"]
    assert check(TalkingOverQueries).verdict != "right"


def test_heads_that_talk_are_steps_of_the_explanation() -> None:
    steps = explain(Talking(12, 3), torch.randn(2, 4, 12)).steps
    keys = [step.key for step in steps]
    assert keys.index("scale") < keys.index("mix-heads") < keys.index("softmax")
    assert keys.index("softmax") < keys.index("mix-heads-and-2") < keys.index("weigh")


class Gated(Separate):
    """A gate of the query lets through a part of what the heads give."""

    per_head = False

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads)
        self.gate = nn.Linear(d_model, num_heads if self.per_head else d_model)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        heads = (q @ k.mT / self.root(q)).softmax(-1) @ v
        shares = self.gate(x).sigmoid()
        if self.per_head:
            heads = heads * shares.transpose(1, 2)[..., None]
        joined = heads.transpose(1, 2).flatten(2)
        output: Tensor = self.o(joined if self.per_head else joined * shares)
        return output


class GatedPerHead(Gated):
    per_head = True


class GatedUnscaled(Gated):
    def root(self, q: Tensor) -> float:
        return 1.0


@pytest.mark.parametrize("kind", [Gated, GatedPerHead])
def test_a_gate_of_the_query_is_a_design(kind: type) -> None:
    report = check(kind)
    assert report.verdict == "right", report.summary
    assert any("a gate" in words for words in report.designs)


def test_wrong_attention_behind_a_gate_does_not_pass() -> None:
    assert check(GatedUnscaled).verdict != "right"


def test_a_gate_is_a_step_of_the_explanation() -> None:
    keys = [step.key for step in explain(Gated(12, 3), torch.randn(2, 4, 12)).steps]
    assert keys.index("concat") < keys.index("gate") < keys.index("output")


class RowByRow(Separate):
    """Rows of an alignment, [B, rows, T, E]: each attends to itself, by one bias for all."""

    def forward(self, q_data: Tensor, k_data: Tensor, bias: Tensor | None = None) -> Tensor:
        batch, rows, length, width = q_data.shape
        q = self.q(q_data).view(batch, rows, length, self.num_heads, -1)
        k, v = (layer(k_data).view(batch, rows, k_data.shape[2], *q.shape[3:]) for layer in (self.k, self.v))
        scores = torch.einsum("brthd,brshd->brhts", q, k) / self.root(q)
        scores = scores if bias is None else scores + bias[:, None]
        heads = torch.einsum("brhts,brshd->brthd", scores.softmax(-1), v)
        return self.o(heads.reshape(batch, rows, length, width))


class RowByRowScaled(RowByRow):
    def root(self, q: Tensor) -> float:
        return float(q.shape[-1])


def test_rows_of_sequences_are_a_layout() -> None:
    report = check(RowByRow)
    assert report.verdict == "right", report.summary
    assert [each.key for each in check(RowByRowScaled).faults] == ["scale by d_k"]
