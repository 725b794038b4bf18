"""What those found who tried to have right code accused, or wrong code passed."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from headwise.examiner import check
from headwise.examiner.source.promises import promises_output_projection


class AddedInWords(nn.Module):
    """mask: extended mask (B, 1, 1, S), 0 for tokens, -10000 for padding."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores + mask
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class PrefixSeen(AddedInWords):
    """The first two positions see each other, all others the past."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        T = x.shape[1]
        visible = torch.ones(T, T, dtype=torch.bool).tril()
        visible[:2, :2] = True
        return super().forward(x, torch.zeros(T, T, dtype=x.dtype).masked_fill(~visible, -torch.inf))


class Stateful(AddedInWords):
    """Keys of earlier calls are seen, until reset()."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads)
        self.past: Tensor | None = None

    def reset(self) -> None:
        self.past = None

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        memory = x if self.past is None else torch.cat([self.past, x], 1)
        self.past = memory.detach()
        return super().forward(memory)[:, -x.shape[1] :]


class Warmer(AddedInWords):
    """Scores are divided by a temperature of the caller's choosing."""

    def __init__(self, d_model: int, num_heads: int, temperature: float = 2.0) -> None:
        super().__init__(d_model, num_heads)
        self.temperature = temperature

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        p = (q @ k.mT / (q.shape[-1] ** 0.5 * self.temperature)).softmax(-1)
        return self.o((p @ v).transpose(1, 2).flatten(2))


class ComplexTable(AddedInWords):
    """Rotations kept as complex numbers, as Llama's first code has them."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads)
        angles = torch.outer(torch.arange(32.0), 100.0 ** -torch.linspace(0, 0.8, d_model // num_heads // 2))
        self.register_buffer("table", torch.polar(torch.ones_like(angles), angles))

    def turned(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.table[: x.shape[-2]]).flatten(-2).type_as(x)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        p = (self.turned(q) @ self.turned(k).mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.o((p @ v).transpose(1, 2).flatten(2))


class Config(NamedTuple):
    d_model: int = 24
    num_heads: int = 4
    causal: bool = False


class CausalIfConfigured(AddedInWords):
    """No token sees a later one, where config.causal says so."""

    def __init__(self, config: Config = Config()) -> None:  # noqa: B008 - as learners write it
        super().__init__(config.d_model, config.num_heads)
        self.config = config

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        mask = torch.zeros_like(later, dtype=x.dtype).masked_fill(later, -torch.inf)
        return super().forward(x, mask if self.config.causal else None)


class Looking(AddedInWords):
    """What a position may see is for whoever builds it to say; below, under names that no list has."""

    def hidden(self, T: int) -> Tensor:
        return torch.ones(T, T, dtype=torch.bool).triu(1)

    def visible_scores(self, x: Tensor, alone: bool) -> Tensor:
        T = x.shape[1]
        added = torch.zeros(T, T, dtype=x.dtype)
        if alone:
            added = added.masked_fill(self.hidden(T), -torch.inf)
        return AddedInWords.forward(self, x, added)


class Turned(Looking):
    def hidden(self, T: int) -> Tensor:
        return torch.ones(T, T, dtype=torch.bool).tril(-1)


class LooksBack(Looking):
    def __init__(self, d_model: int, num_heads: int, look_back_only: bool = False) -> None:
        super().__init__(d_model, num_heads)
        self.back = look_back_only

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.visible_scores(x, alone=True) if self.back else self.visible_scores(x, alone=False)


class LooksBackTurned(LooksBack, Turned):
    pass


class BothWays(Looking):
    def __init__(self, d_model: int, num_heads: int, bidirectional: bool = True) -> None:
        super().__init__(d_model, num_heads)
        if not bidirectional:
            self.register_buffer("later", self.hidden(64))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        T = x.shape[1]
        later = self.later[:T, :T] if hasattr(self, "later") else torch.zeros(T, T, dtype=torch.bool)
        return AddedInWords.forward(self, x, torch.zeros(T, T, dtype=x.dtype).masked_fill(later, -torch.inf))


class BothWaysTurned(BothWays, Turned):
    pass


class Directed(Looking):
    def __init__(self, d_model: int, num_heads: int, direction: str) -> None:
        super().__init__(d_model, num_heads)
        self.direction = direction

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if self.direction == "left":
            return self.visible_scores(x, alone=True)
        return self.visible_scores(x, alone=False)


class DirectedTurned(Directed, Turned):
    pass


class Configured(Looking):
    def __init__(self, config: Any) -> None:
        super().__init__(config.d_model, config.num_heads)
        self.config = config

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if self.config.past_only:
            return self.visible_scores(x, alone=True)
        return self.visible_scores(x, alone=False)


class ConfiguredTurned(Configured, Turned):
    pass


class AskedInCall(Looking):
    def forward(self, x: Tensor, both_sides: bool = True) -> Tensor:  # type: ignore[override]
        if not both_sides:
            return self.visible_scores(x, alone=True)
        return self.visible_scores(x, alone=False)


class AskedInCallTurned(AskedInCall, Turned):
    pass


class Flashing(Looking):
    """Whether there is a fast way is no switch: without it the future is hidden, with it it is seen."""

    def __init__(self, d_model: int, num_heads: int, use_flash: bool = True) -> None:
        super().__init__(d_model, num_heads)
        self.use_flash = use_flash

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if self.use_flash:
            return self.visible_scores(x, alone=False)
        return AddedInWords.forward(self, x, torch.zeros(1).masked_fill(self.hidden(x.shape[1]), -torch.inf))


@pytest.mark.thinned(keep=["LooksBack"])
@pytest.mark.parametrize("kind", [LooksBack, BothWays, Directed, Configured, AskedInCall])
def test_a_switch_for_a_causal_mask_may_have_any_name(kind: type) -> None:
    report = check(kind)
    assert report.verdict == "right", report.summary
    if kind is LooksBack:
        assert check(LooksBack(24, 4)).verdict == "right"


@pytest.mark.thinned(keep=["LooksBackTurned"])
@pytest.mark.parametrize(
    "kind", [LooksBackTurned, BothWaysTurned, DirectedTurned, ConfiguredTurned, AskedInCallTurned]
)
def test_a_switch_of_any_name_is_thrown_and_what_it_hides_is_looked_at(kind: type) -> None:
    assert [fault.key for fault in check(kind).faults] == ["causal flipped"]


def test_a_fast_way_without_the_mask_is_no_switch() -> None:
    assert [fault.key for fault in check(Flashing).faults] == ["mask ignored"]


class MatricesInLists(nn.Module):
    """One matrix a head and projection; heads are summed, each through its own part of W_o."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        D = d_model // num_heads
        made = [[torch.randn(d_model, D) for _ in range(num_heads)] for _ in range(3)]
        self.w_q, self.w_k, self.w_v = (nn.ParameterList(map(nn.Parameter, each)) for each in made)
        self.w_o = nn.ParameterList([nn.Parameter(torch.randn(D, d_model)) for _ in range(num_heads)])

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for w_q, w_k, w_v, w_o in zip(self.w_q, self.w_k, self.w_v, self.w_o, strict=True):
            q, k, v = x @ w_q, x @ w_k, x @ w_v  # [B, T, D]
            out = out + (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v @ w_o
        return out


@pytest.mark.parametrize("kind", [AddedInWords, Stateful, ComplexTable, CausalIfConfigured, MatricesInLists])
def test_what_is_right_in_its_own_words_is_not_accused(kind: type) -> None:
    report = check(kind)
    assert report.ok, report.summary


@pytest.mark.slow
def test_a_pattern_of_ones_own_is_never_wrong() -> None:
    report = check(PrefixSeen)
    assert report.verdict != "wrong" and not report.faults


def test_a_number_of_ones_own_for_the_scale_is_a_choice_and_no_fault() -> None:
    report = check(Warmer)
    assert report.verdict == "not judged" and not report.faults
    assert "temperature" in " ".join(report.not_judged)


class CrossedBlock(nn.Module):
    """A Transformer block. x: (batch, seq, d_model)"""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(d_model, num_heads)  # batch_first forgotten
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.ff = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.ReLU(), nn.Linear(4 * d_model, d_model))

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        x = self.norm1(x + self.attention(x, x, x)[0])
        return self.norm2(x + self.ff(x))


def test_a_block_whose_samples_attend_to_each_other_is_not_right() -> None:
    report = check(CrossedBlock)
    assert [fault.key for fault in report.faults] == ["wrong layout"]
    assert any("masks" in reason for reason in report.not_judged)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """One tensor for each head."""
    apart = x.unflatten(-1, (num_heads, -1))  # [B, T, H, D]
    return apart.transpose(1, 2)  # [B, H, T, D]


def test_a_shape_on_the_way_is_no_promise() -> None:
    report = check(split_heads)
    assert report.ok, report.summary


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    e = x.exp()
    return e / e.sum(dim)


def scaled_scores(q: Tensor, k: Tensor) -> Tensor:
    q /= q.shape[-1] ** 0.5
    return q @ k.mT


def crossed_scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k / q.shape[-1] ** 0.5


def test_a_softmax_that_stops_over_a_matrix_is_not_right() -> None:
    report = check(softmax)
    assert not report.ok and "for the test input 'matrix' it raises" in report.summary


def test_scores_that_write_to_their_queries_are_told_so() -> None:
    report = check(scaled_scores)
    assert [fault.key for fault in report.faults] == ["input modified"]


def test_the_first_stop_is_told_and_not_that_of_another_kind_of_array() -> None:
    report = check(crossed_scores)
    assert not report.ok and "gufunc" not in str(report)


class Counting(nn.Module):
    """Counts its calls, and keeps a part of what it was given."""

    divisor = 6

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))
        self.num_heads, self.calls = 4, 0
        self.register_buffer("longest", torch.zeros(1))

    def split_heads(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def attend(self, x: Tensor) -> Tensor:
        self.longest += x.shape[1]
        q, k, v = (self.split_heads(layer(x)) for layer in (self.q, self.k, self.v))
        weights = (q @ k.mT / self.divisor**0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)


class CountingWrong(Counting):
    divisor = 24


@pytest.mark.parametrize("method", ["forward", "attend", "split_heads"])
def test_a_method_is_checked_on_a_copy_of_its_module(method: str) -> None:
    """It was called some hundred times as the user's own: their counters and buffers moved."""
    module = Counting()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    report = check(getattr(module, method))
    assert report.verdict == "right", report.summary
    assert module.calls == 0 and module.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    if method != "split_heads":
        assert [fault.key for fault in check(getattr(CountingWrong(), method)).faults] == ["scale by d_model"]


class Fused(nn.Module):
    """Queries, keys and values of one weight."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.o = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).chunk(3, -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in self.projected(x))
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class FrozenRows(Fused):
    """Its queries are not to learn: their gradients are set to zero once they are there."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads)
        for parameter in self.qkv.parameters():
            parameter.register_hook(lambda grad: torch.cat([grad[:d_model] * 0, grad[d_model:]]))


class FrozenWeight(AddedInWords):
    """What is not to learn says so, whatever else is done to it."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads)
        self.q.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        weight, bias = self.q.weight.detach(), self.q.bias.detach()
        q = nn.functional.linear(x, weight, bias) + 0 * x
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, self.k(x), self.v(x)))
        return self.o(((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))


class DetachedRows(Fused):
    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = super().projected(x)
        return q.detach(), k, v


def test_what_is_frozen_on_purpose_is_not_blocked_and_what_is_detached_is() -> None:
    for kind in (FrozenRows, FrozenWeight):
        assert check(kind).verdict == "right", kind
    assert [fault.key for fault in check(DetachedRows).faults] == ["gradients blocked"]


class OwnTriangle(AddedInWords):
    """Causal, by a buffer as long as the constructor is told, or as long as was asked for."""

    def __init__(self, d_model: int, num_heads: int, max_len: int = 32) -> None:
        super().__init__(d_model, num_heads)
        self.register_buffer("later", torch.ones(max_len, max_len).triu(1).bool())

    def triangle(self, T: int) -> Tensor:
        return self.later[:T, :T]

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        T = x.shape[1]
        added = torch.zeros(T, T, dtype=x.dtype).masked_fill(self.triangle(T), -torch.inf)
        return AddedInWords.forward(self, x, added)


class GrownTriangle(OwnTriangle):
    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads, max_len=4)

    def triangle(self, T: int) -> Tensor:
        if len(self.later) < T:
            self.later = torch.ones(T, T).triu(1).bool()
        return super().triangle(T)


class FirstTriangle(OwnTriangle):
    """Wrong: the buffer is made by the first call, whatever comes later."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads)
        self.register_buffer("later", None)

    def triangle(self, T: int) -> Tensor:
        if self.later is None:
            self.later = torch.ones(T, T).triu(1).bool()
        hidden = torch.zeros(T, T, dtype=torch.bool)
        n = min(T, len(self.later))
        hidden[:n, :n] = self.later[:n, :n]
        return hidden


class FirstPadding(AddedInWords):
    """Wrong: the first mask it is given stays, in a buffer that a state dict holds."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads)
        self.register_buffer("padding", None)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None and self.padding is None:
            self.padding = mask
        return super().forward(x, None if mask is None else self.padding)


class WritesToItsInput(AddedInWords):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x *= 0.5
        return super().forward(x, mask)


def test_what_is_written_to_an_input_is_not_taken_for_state() -> None:
    assert [fault.key for fault in check(WritesToItsInput).faults] == ["input modified"]


@pytest.mark.thinned(keep=["GrownTriangle"])
@pytest.mark.parametrize("kind", [OwnTriangle, GrownTriangle])
def test_buffers_of_a_mask_are_as_an_instance_makes_them_itself(kind: type) -> None:
    """They were loaded into fresh instances with the weights: what a call had kept was kept in those, too."""
    report = check(kind)
    assert report.verdict == "right", report.summary
    assert not any("size mismatch" in reason for reason in report.not_judged)


@pytest.mark.thinned(keep=["FirstTriangle"])
@pytest.mark.parametrize("kind", [FirstTriangle, FirstPadding])
def test_a_mask_kept_from_the_first_call_is_state(kind: type) -> None:
    assert [fault.key for fault in check(kind).faults] == ["state kept between calls"]


class FourAtOnce(Fused):
    """Batches of the size that it is told, 32 by default."""

    root = 1.0

    def __init__(self, d_model: int, num_heads: int, batch_size: int = 32) -> None:
        super().__init__(d_model, num_heads)
        self.batch_size = batch_size

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = super().projected(x.view(self.batch_size, -1, x.shape[-1]))
        return q * self.root, k, v


class FourAtOnceWrong(FourAtOnce):
    root = 0.7


class TenPositions(AddedInWords):
    """Ten positions, as a constant has it: others were never meant."""

    positions = 10

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads)
        self.register_buffer("later", torch.ones(self.positions, self.positions).triu(1).bool())

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        added = torch.zeros(1, dtype=x.dtype).masked_fill(self.later, -torch.inf)
        return super().forward(x, added)


class TenPositionsTurned(TenPositions):
    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads)
        self.later = self.later.T


@pytest.mark.parametrize("kind", [FourAtOnce, TenPositions])
def test_code_is_asked_at_constants_of_its_own(kind: type) -> None:
    report = check(kind)
    assert report.verdict == "right", report.summary
    assert any("meant for" in reason for reason in report.not_judged)


@pytest.mark.thinned(keep=["FourAtOnceWrong-constant scale"])
@pytest.mark.parametrize(
    ("kind", "fault"), [(FourAtOnceWrong, "constant scale"), (TenPositionsTurned, "causal flipped")]
)
def test_what_is_wrong_at_constants_of_its_own_is_named(kind: type, fault: str) -> None:
    assert [named.key for named in check(kind).faults] == [fault]


class OddAndMasked(AddedInWords):
    """Wrong in a way that nobody knows, and right about its mask."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        scores = q @ k.mT / (q.shape[-1] ** 0.5 + 0.3 * x.shape[1])
        scores = scores if mask is None else scores + mask
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_no_fault_of_masks_is_told_where_the_rest_is_unexplained() -> None:
    report = check(OddAndMasked)
    assert report.verdict == "wrong" and not any("mask" in fault.key for fault in report.faults)


class ArraysByName:
    """Weights come in a dict that whoever builds it fills."""

    def __init__(self, d_model: int, num_heads: int, params: Any) -> None:
        self.num_heads, self.params = num_heads, params

    def __call__(self, x: Tensor) -> Tensor:
        q, k, v = (
            (x @ self.params[name]).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for name in ("W_q", "W_k", "W_v")
        )
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2) @ self.params["W_o"]


def test_a_key_that_is_missing_from_a_dict_of_ours_accuses_nobody() -> None:
    """A crash at such a key was called the code's own."""
    assert check(ArraysByName).verdict == "not judged"


def test_a_missing_output_projection_is_a_fault_only_where_one_is_promised() -> None:
    """Names, comments and docstrings of the class are read, and not those of its neighbours."""
    body = "    def forward(self, x):\n        return x\n"
    promised = [
        "class A:\n    def __init__(self):\n        self.out_proj = nn.Identity()\n",
        "class A:\n    # concatenate the heads and project them\n" + body,
        'class A:\n    """After Vaswani et al."""\n' + body,
        "class A(Base):\n" + body + "class Base:\n    def __init__(self):\n        self.W_o = None\n",
    ]
    silent = [
        'class A:\n    """Attention without an output projection."""\n' + body,
        "class A:\n    # q, k and v are linear projections of the input\n" + body,
        "class A:\n"
        + body
        + "class FeedForward:\n    def __init__(self):\n        self.out = nn.Linear(1, 2)\n",
    ]
    assert [promises_output_projection(source, 1) for source in promised] == [True] * 4
    assert [promises_output_projection(source, 1) for source in silent] == [False] * 3
