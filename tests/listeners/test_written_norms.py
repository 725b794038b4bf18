"""What heads write, by the norm of each key's value behind W_O: against float64 by hand, refused by name.

Letters: B batch, T text length, H num_heads, Dv value_dim, E d_model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.errors import ArgumentError
from headwise.heads.record import Marks, measure_written
from headwise.listeners.active import LayerCall, Listener
from headwise.listeners.adapters import attach
from headwise.listeners.head_outputs import output_projection, written
from headwise.listeners.pruning import is_conv1d
from judge import assert_judged
from model_families import FAMILIES, Family

B, T, E, H = 2, 11, 30, 6
REAL = torch.tensor([11, 7])
SPECIAL = torch.zeros(B, T, dtype=torch.bool)
SPECIAL[:, 3] = SPECIAL[0, 7] = True


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "groups of three": {"num_kv_heads": 2, "causal": True},
    "one key head": {"num_kv_heads": 1, "value_dim": 7},
    "sinks and a soft cap": {"sinks": True, "softcap": 3.0, "window": 5, "num_kv_heads": 3},
    "by distance": {"alibi": True, "bias": False},
}


def by_hand(mha: hw.MultiHeadAttention, x: Tensor, dense: Tensor) -> tuple[Tensor, Tensor]:
    """||v_j W_O|| [B, H, T] and p_ij ||v_j W_O|| [B, H, T, T], one product after the other."""
    v = mha.v_proj(x).unflatten(-1, (mha.num_kv_heads, mha.value_dim)).transpose(1, 2)
    v = v.repeat_interleave(H // mha.num_kv_heads, dim=1)
    weight = mha.out_proj.weight.unflatten(1, (H, mha.value_dim))  # [E, H, Dv]
    norms = torch.einsum("bhsd,ehd->bhse", v, weight).norm(dim=-1)
    return norms, dense * norms[:, :, None]


def shares_by_hand(cells: Tensor, weights: Tensor, padded: bool) -> dict[str, Tensor]:
    """The mean share of what is written that falls on the first key and on special ones, [B, H] each."""
    share = cells / cells.sum(-1, keepdim=True)
    real = torch.arange(T) < REAL[:, None] if padded else torch.ones(B, T, dtype=torch.bool)
    sees = (weights * SPECIAL[:, None, None]).sum(-1) > 0
    counts = real[:, None].expand_as(sees)
    on_special = (share * SPECIAL[:, None, None]).sum(-1)
    return {
        "written_first": torch.where(counts, share[..., 0], 0).sum(-1) / counts.sum(-1),
        "written_special": torch.where(counts & sees, on_special, 0).sum(-1) / (counts & sees).sum(-1),
    }


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_norms_cells_and_shares_are_those_made_by_hand(name: str, padded: bool) -> None:
    torch.manual_seed(1)
    mha = hw.MultiHeadAttention(E, H, **LAYERS[name]).double()
    x, mask = numbers(B, T, E), hw.Mask.padding(REAL) if padded else None
    truth: dict[str, Tensor] = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        mha, x = mha.to(dtype), x.to(dtype)
        with torch.no_grad(), hw.watch(mha, written=True, keep=True) as heads:
            _, weights = mha(x, mask=mask)
            norms, cells = by_hand(mha, x, weights.dense())
        (call,) = heads[0].calls
        measured = call.written_norms
        assert measured is not None
        shares, _ = measure_written(weights, measured, Marks(SPECIAL.long(), SPECIAL))
        ours = {"norms": measured, "cells": call.written(0), "last": call.written(1)} | shares
        theirs = {"norms": norms, "cells": cells[0], "last": cells[1]}
        theirs |= shares_by_hand(cells, weights.dense(), padded)
        truth = truth or theirs
        assert torch.equal(call.rows["written_first"], shares["written_first"])
        for label, value in ours.items():
            assert value.dtype == (dtype if dtype != torch.bfloat16 else torch.float32), label
            assert_judged(value, theirs[label], truth[label], dtype=dtype, name=f"{label} {dtype}")


@pytest.mark.parametrize("most", [3, 10])
def test_beyond_so_many_cells_positions_share_them(most: int) -> None:
    mha = hw.MultiHeadAttention(E, H, causal=True).double()
    with torch.no_grad(), hw.watch(mha, written=True) as heads:
        mha(numbers(B, T, E), mask=hw.Mask.padding(REAL))
    call, spots = heads[0].calls[0], torch.arange(T) * most // T
    for batch, length in enumerate(REAL.tolist()):
        fine = call.written(batch)[:, :length]
        expected = torch.zeros(H, most, most, dtype=torch.float64)
        for row in range(most):
            mine = fine[:, spots[:length] == row]  # [H, t, T], those that are real
            for column in range(most):
                expected[:, row, column] = mine[..., spots == column].sum((1, 2)) / max(1, mine.shape[1])
        torch.testing.assert_close(call.written(batch, most), expected)


def test_they_are_the_same_after_a_file_and_older_files_have_none(tmp_path: Path) -> None:
    mha, x = hw.MultiHeadAttention(E, H), numbers(B, T, E).float()
    for requested in (True, False):
        with torch.no_grad(), hw.watch(mha, written=requested) as heads:
            mha(x)
        heads.save(tmp_path / "heads.safetensors")
        call, again = heads[0].calls[0], hw.load_heads(tmp_path / "heads.safetensors")[0].calls[0]
        if requested:
            assert again.written_norms is not None and call.written_norms is not None
            assert torch.equal(again.written_norms, call.written_norms)
            assert torch.equal(again.written(1), call.written(1))
            assert torch.equal(again.rows["written_first"], call.rows["written_first"])
        else:
            assert again.written_norms is None and "written_first" not in again.rows
            with pytest.raises(ArgumentError, match=r"\[2, 6, 11, 11\].*watch\(model, written=True\)"):
                again.written()
            with pytest.raises(AttributeError, match=r"written_first was not measured.*written=True"):
                heads[0].written_first  # noqa: B018


def test_steps_of_generation_are_left_out_unless_all_is_kept() -> None:
    mha, x = hw.MultiHeadAttention(E, H, causal=True).eval(), numbers(B, T, E).float()
    for keep, times in (("auto", 1), (True, 2)):
        cache = mha.cache()
        with torch.no_grad(), hw.watch(mha, written=True, keep=keep) as heads:
            mha(x, cache=cache)
            mha(x[:, :1], cache=cache)
        assert sum(call.written_norms is not None for call in heads[0].calls) == times
    without = heads[0].calls[0]
    without.map = None
    with pytest.raises(ArgumentError, match=r"\[2, 6, 11, 11\].*keep=True"):
        without.written()


# Whose projection it is


class Proof(Listener):
    """Holds what each projection is really given against what the heads said."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.calls = model, list[LayerCall]()
        self.outputs: dict[nn.Module, list[Tensor]] = {}

    def hear(self, call: LayerCall) -> None:
        self.calls.append(call)

    def note(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self.outputs.setdefault(module, []).append(output)


REFUSED = {"qwen3-next": "sigmoid", "hy v4": "gate_proj"}
HOOKED = [family for family in FAMILIES if family.route == "hook"]


def proved(family: Family) -> None:
    """What heads write, with the bias, is what some projection of the model gave."""
    model = family.build(family.finest)
    proof = Proof(model)
    hooks = [
        module.register_forward_hook(proof.note)
        for module in model.modules()
        if isinstance(module, nn.Linear) or is_conv1d(module)
    ]
    with torch.no_grad(), attach(model, proof):
        model(**family.feed(dtype=family.finest))
    for hook in hooks:
        hook.remove()
    outputs = [x for some in proof.outputs.values() for x in some if isinstance(x, Tensor)]
    for call in proof.calls:
        assert call.output is not None
        projection = output_projection(model, call.path, call.num_heads, call.output.shape[-1])
        total = written(call.output, projection).sum(1)  # [B, T, E]
        total = total if projection.bias is None else total + projection.bias
        alike = [x.view_as(total) for x in outputs if x.numel() == total.numel()]
        kind = type(model.get_submodule(call.path.partition("#")[0])).__name__
        # torch's class calls no module for it; Qwen's for images projects once for many calls
        assert kind in ("MultiheadAttention", "VisionAttention") or any(
            torch.allclose(x, total) for x in alike
        ), call.path


@pytest.mark.thinned(7, keep=["gpt2", "bert"], slow=2)
@pytest.mark.parametrize("family", HOOKED, ids=lambda family: family.name)
def test_the_projection_of_a_family_gives_what_its_heads_write(family: Family) -> None:
    if family.name in REFUSED:
        with pytest.raises(ArgumentError, match=rf"\(\w+\) has .*{REFUSED[family.name]}"):
            proved(family)
    else:
        proved(family)


@pytest.mark.parametrize("own", [True, False])
def test_torchs_class_writes_what_it_gives(own: bool) -> None:
    mha = (hw.nn.MultiheadAttention if own else nn.MultiheadAttention)(E, H, batch_first=True).double()
    x = numbers(B, T, E)
    with torch.no_grad(), hw.watch(mha, written=True) as heads:
        output, _ = mha(x, x, x)
    projection = output_projection(mha, "", H, E // H)
    with torch.no_grad(), hw.collect(mha) as message:
        mha(x, x, x)
    torch.testing.assert_close(written(message[0], projection).sum(1) + projection.bias, output)
    assert heads[0].written_first.shape == (H,)


class Attention(nn.Module):
    """As timm's."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.num_heads, self.fused_attn = H, True
        self.qkv, self.norm, self.proj = nn.Linear(E, 3 * E), norm, nn.Linear(E, E)
        self.attn_drop, self.proj_drop = nn.Dropout(), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        heads = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.proj_drop(self.proj(self.norm(heads)))


def test_timms_is_known_unless_a_norm_stands_between(monkeypatch: pytest.MonkeyPatch) -> None:
    x = numbers(B, T, E).float()
    monkeypatch.setattr(Attention, "__module__", "timm.layers.attention")
    model = nn.Sequential(Attention(nn.Identity())).eval()
    with torch.no_grad(), hw.watch(model, written=True) as heads:
        model(x)
    assert heads[0].written_first.shape == (H,)
    model = nn.Sequential(Attention(nn.LayerNorm(E))).eval()
    refused = pytest.raises(ArgumentError, match=r"0 \(Attention\) has norm, which may stand")
    with refused, hw.watch(model, written=True):
        model(x)
    monkeypatch.setattr(Attention, "__module__", "mine")
    refused = pytest.raises(ArgumentError, match=r"0 \(Attention\) is of an unknown family")
    with refused, hw.watch(model, written=True):
        model(x)


class Wrapped(nn.Linear):
    """As what adapters put around a projection."""


class Own(hw.MultiHeadAttention):
    def _finish(self, heads: Tensor, query: Tensor, lengths: Any = None) -> Tensor:
        return super()._finish(heads.flip(1), query, lengths)


def test_layers_whose_heads_do_not_go_straight_into_a_projection_are_refused_by_name() -> None:
    x = numbers(B, T, E).float()
    wrapped, masked = hw.MultiHeadAttention(E, H), hw.MultiHeadAttention(E, H)
    wrapped.out_proj = Wrapped(E, E)
    weight = masked.out_proj.weight.detach()
    del masked.out_proj.weight
    masked.out_proj.weight = weight  # as torch.nn.utils.prune leaves it
    patched, hooked = hw.MultiHeadAttention(E, H), hw.MultiHeadAttention(E, H)
    patched.out_proj.forward = lambda x: 0 * x  # type: ignore[method-assign]
    hooked.out_proj.register_forward_pre_hook(lambda module, args: (0 * args[0],))
    cases: dict[str, hw.MultiHeadAttention] = {
        r"has out_proj with a forward of its own": patched,
        r"has out_proj with 1 forward hook,": hooked,
        r"has gate='head'": hw.MultiHeadAttention(E, H, gate="head"),
        r"has out_proj of Wrapped": wrapped,
        r"has out_proj\.weight of Tensor": masked,
        r"combines its heads in its own way": Own(E, H),
    }
    for reason, mha in cases.items():
        with (
            pytest.raises(ArgumentError, match=rf"0 \(\w+\) {reason}"),
            hw.watch(nn.ModuleList([mha]), written=True),
        ):
            mha(x)
        assert "forward" not in mha.__dict__  # the model is as it was


class WrittenOut(nn.Module):
    """Computes its own weights."""

    num_heads = 1

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT)[:, None].softmax(-1)[:, 0] @ x


class SelfAttention(WrittenOut):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)


def test_weights_without_values_are_refused() -> None:
    model = nn.Sequential(SelfAttention())
    refused = pytest.raises(ArgumentError, match=r"in 0 only the weights \[2, 1, 11, 11\]")
    with refused, hw.watch(model, written=True, fallback="eager"):
        model(numbers(B, T, E))


def test_a_head_that_writes_nothing_has_no_shares() -> None:
    """0 of 0 is no number, and is left out of means."""
    mha = hw.MultiHeadAttention(E, H).double()
    with torch.no_grad():
        mha.out_proj.weight[:, : E // H] = 0
        with hw.watch(mha, written=True) as heads:
            mha(numbers(B, T, E))
    assert heads[0].written_first.isnan().tolist() == [True] + [False] * (H - 1)
    assert heads[0].calls[0].counts["written_first"][:, 0].tolist() == [0, 0]
