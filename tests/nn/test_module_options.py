"""The module's options: norms, rotary positions, biases by distance, gates; alone, together, and elsewhere.

Letters: B batch, T length, S keys, E width, H heads, Hk key/value heads, D head_dim.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm

import headwise as hw
from headwise.errors import ArgumentError, ShapeError
from headwise.nn import Buckets, Linear, QKNorm, RelativeBias, Rope, Yarn
from headwise.scoring import Alibi, alibi
from judge import assert_judged, error, largest
from transformers_layers import (
    SIZES,
    Layer,
    bloom,
    head_by_head,
    judged,
    one_more,
    rotary,
    t5,
    with_gates,
)

B, T, S, E, H, Hk, D = 2, 11, 17, 13, 6, 3, 8

OPTIONS: dict[str, dict[str, Any]] = {
    "rope": {"rope": Rope(100.0)},
    "part of each head, interleaved, yarn": {"rope": Rope(dims=4, interleaved=True, scaling=Yarn(4.0, 32))},
    "alibi": {"alibi": True},
    "relative bias": {"relative_bias": Buckets(8, 7)},
    "one-way buckets, causal": {"relative_bias": Buckets(5, 9, both_ways=False), "causal": True},
    "rms norm": {"qk_norm": "rms"},
    "layer norm": {"qk_norm": QKNorm("layer", 1e-5)},
    "norm of all heads": {"qk_norm": QKNorm(whole=True)},
    "gate of heads": {"gate": "head"},
    "gate of channels": {"gate": "channel", "value_dim": 5},
    "everything": {"rope": Rope(dims=6, scaling=Linear(2.0)), "alibi": True, "relative_bias": Buckets(8, 7),
                   "qk_norm": "rms", "gate": "channel", "causal": True, "window": 7, "softcap": 3.0,
                   "sinks": True, "bias": False},
}  # fmt: skip
each_option = pytest.mark.parametrize("name", OPTIONS)


def made(name: str, dtype: torch.dtype = torch.float64, **more: Any) -> hw.MultiHeadAttention:
    """A module with these options and weights that matter."""
    torch.manual_seed(11)
    mha = hw.MultiHeadAttention(E, H, num_kv_heads=Hk, head_dim=D, **{**OPTIONS[name], **more}).double()
    with torch.no_grad():
        for parameter in mha.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.7 if parameter.ndim > 1 else 1.0))
    return mha.to(dtype)


def inputs(dtype: torch.dtype = torch.float64, length: int = T, seed: int = 3) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(B, length, E, generator=random, dtype=torch.float64).to(dtype)


def by_hand(
    mha: hw.MultiHeadAttention, x: Tensor, bias: Tensor | None = None, positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(output, weights) step by step, in the inputs' dtype, as someone would write it."""

    def heads(y: Tensor, count: int) -> Tensor:
        return y.unflatten(-1, (count, -1)).transpose(1, 2)

    q, k, v = heads(mha.q_proj(x), H), heads(mha.k_proj(x), Hk), heads(mha.v_proj(x), Hk)
    if (norm := mha.qk_norm) is not None:
        q, k = (_normed(y, part, norm) for y, part in ((q, mha.q_norm), (k, mha.k_norm)))
    if mha.rope is not None:
        spots = torch.arange(x.shape[1]) if positions is None else positions
        q, k = (_turned(y, mha.rope, spots) for y in (q, k))
    k, v = k.repeat_interleave(H // Hk, 1), v.repeat_interleave(H // Hk, 1)
    s = q @ k.mT * D**-0.5
    if mha.softcap is not None:
        s = mha.softcap * (s / mha.softcap).tanh()
    i, j = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[1])
    if bias is not None:
        s = s + bias
    if mha.alibi:
        s = s - alibi(H).slopes.to(x.dtype)[:, None, None] * (i - j).abs()
    if mha.relative_bias is not None:
        s = s + mha.relative_bias.weight[mha.relative_bias.buckets.of(j - i)].permute(2, 0, 1)
    visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
    if mha.causal:
        visible &= j <= i
    if mha.window is not None:
        visible &= i - j < mha.window
    s = s.masked_fill(~visible, -torch.inf)
    if mha.sinks is not None:
        s = torch.cat((s, mha.sinks[None, :, None, None].expand(*s.shape[:3], 1)), -1)
    p = s.softmax(-1)[..., : x.shape[1]]
    out = p @ v
    if mha.gate_proj is not None:
        out = out * mha.gate_proj(x).sigmoid().unflatten(-1, (H, -1)).transpose(1, 2)
    return mha.out_proj(out.transpose(1, 2).flatten(2)), p


def _normed(y: Tensor, part: Any, norm: QKNorm) -> Tensor:
    if norm.whole:
        y = y.transpose(1, 2).flatten(2)
    if norm.kind == "rms":
        y = rms_norm(y, y.shape[-1:], part.weight, norm.eps)
    else:
        y = layer_norm(y, y.shape[-1:], part.weight, part.bias, norm.eps)
    return y.unflatten(-1, (-1, D)).transpose(1, 2) if norm.whole else y


def _turned(y: Tensor, rope: Rope, positions: Tensor) -> Tensor:
    dims = rope.dims or D
    angles = positions.double()[..., None] * rope.frequencies(D)
    angles = angles[:, None] if positions.ndim == 2 else angles
    factor = 1.0 if rope.scaling is None else rope.scaling.magnitude
    cos, sin = ((f * factor).to(y.dtype) for f in (angles.cos(), angles.sin()))
    a, b = y[..., :dims].unflatten(-1, (-1, 2)).unbind(-1) if rope.interleaved else y[..., :dims].chunk(2, -1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    new = torch.stack(pair, -1).flatten(-2) if rope.interleaved else torch.cat(pair, -1)
    return torch.cat((new, y[..., dims:]), -1)


# What they compute


@each_option
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_output_weights_and_statistics_are_those_by_hand(name: str, dtype: torch.dtype) -> None:
    mha = made(name, dtype)
    x = inputs(dtype)
    truth, weights = by_hand(copy.deepcopy(mha).double(), x.double())
    plain, plain_weights = by_hand(mha, x)
    output, map = mha(x)
    terms = largest(mha.head_outputs(x)) * largest(mha.out_proj.weight)
    assert_judged(output, plain, truth, dtype=dtype, size=terms, name=name)
    steep = max(1.0, largest(map.lse))  # a weight is off by as much of itself as its score is off
    assert_judged(map.dense(), plain_weights, weights, dtype=dtype, size=steep, name=name)
    if dtype == torch.float64:
        for h in range(H):
            torch.testing.assert_close(map[0, h], weights[0, h])
        statistics = map.statistics()
        own = weights if mha.sinks is None else torch.cat((weights, 1 - weights.sum(-1, keepdim=True)), -1)
        entropy = -(own * own.clamp(min=1e-300).log()).sum(-1).mean(-1)
        torch.testing.assert_close(statistics.entropy, entropy)


@each_option
def test_gradients_are_those_by_hand(name: str) -> None:
    mha, x = made(name), inputs().requires_grad_()
    leaves = [x, *mha.parameters()]
    pull = torch.randn(B, T, E, dtype=torch.float64)
    ours = torch.autograd.grad((mha(x)[0] * pull).sum(), leaves)
    theirs = torch.autograd.grad((by_hand(mha, x)[0] * pull).sum(), leaves)
    for actual, truth in zip(ours, theirs, strict=True):
        assert_judged(actual, truth, truth, dtype=torch.float64, times=3.0, size=10.0, name=name)


def test_a_bias_of_the_call_is_added_to_the_layers_own() -> None:
    """ALiBi once took the place of what the call gave, without a word."""
    bias = torch.randn(B, H, T, T, dtype=torch.float64)
    for name in ("rope", "alibi", "relative bias", "everything"):
        mha = made(name)
        truth, weights = by_hand(mha, inputs(), bias)
        output, map = mha(inputs(), bias=bias)
        torch.testing.assert_close(output, truth)
        torch.testing.assert_close(map.dense(), weights)
    mha, slopes = made("alibi"), alibi(H).slopes.double()
    twice = by_hand(
        mha, inputs(), -slopes[:, None, None] * (torch.arange(T)[:, None] - torch.arange(T)).abs()
    )
    torch.testing.assert_close(mha(inputs(), bias=Alibi(slopes))[0], twice[0])


# Positions


@pytest.mark.parametrize("name", ["rope", "part of each head, interleaved, yarn", "everything"])
def test_positions_may_be_given(name: str) -> None:
    mha, x = made(name), inputs()
    torch.testing.assert_close(mha(x, positions=torch.arange(T))[0], mha(x)[0])
    spots = torch.randint(0, 97, (B, T))
    for positions in (spots[0], spots, spots.int(), spots[:1]):
        truth = by_hand(mha, x, positions=positions)[0]
        torch.testing.assert_close(mha(x, positions=positions)[0], truth)
        torch.testing.assert_close(
            mha.out_proj(mha.head_outputs(x, positions=positions).transpose(1, 2).flatten(2)), truth
        )
        with hw.watch(mha) as heads:
            torch.testing.assert_close(mha(x, positions=positions)[0], truth)
        assert len(heads) == 1


def test_in_cross_attention_the_last_query_stands_beside_the_last_key() -> None:
    mha, x, memory = made("rope"), inputs(), inputs(length=S, seed=5)
    pair = (torch.arange(S - T, S), torch.arange(S))
    own, _ = mha(x, memory, memory)
    torch.testing.assert_close(own, mha(x, memory, memory, positions=pair)[0])
    later = tuple(spots + 31 for spots in pair)
    torch.testing.assert_close(own, mha(x, memory, memory, positions=later)[0])  # distances alone count
    more, _ = mha(memory, x, x)  # more queries than keys: the first stand before the first key
    torch.testing.assert_close(more, mha(memory, x, x, positions=(pair[1], pair[0]))[0])


def test_positions_that_mean_nothing_are_refused() -> None:
    mha, x = made("rope"), inputs()
    for plain in (
        made("alibi"),
        made("rms norm"),
        hw.MultiHeadAttention(E, 1).double().requires_grad_(False),
    ):
        with pytest.raises(
            ArgumentError, match=r"positions must only be given to a module with rope=: got int64 \[11\]"
        ):
            plain(x, positions=torch.arange(T))
    for wrong, words in (
        (torch.arange(T).double(), r"positions must be a tensor of whole numbers: got float64 \[11\]"),
        (torch.ones(T, dtype=torch.bool), r"positions must be a tensor of whole numbers: got bool \[11\]"),
        ([0] * T, r"positions must be a tensor of whole numbers: got \[0, 0"),
        ((torch.arange(T),) * 3, r"positions must be a tensor of whole numbers: got \(tensor"),
        (torch.arange(T) - 2, "positions must not be negative: got -2"),
    ):
        with pytest.raises(ArgumentError, match=words):
            mha(x, positions=wrong)
    with pytest.raises(ShapeError, match=r"positions must be \[T\] or \[B, T\] = \[2, 11\]: got \[7\]"):
        mha(x, positions=torch.arange(7))
    memory = inputs(length=S)
    with pytest.raises(
        ArgumentError, match=r"positions must be a pair in cross-attention.*: got int64 \[11\]"
    ):
        mha(x, memory, memory, positions=torch.arange(T))
    with pytest.raises(ShapeError, match=r"positions\[1\] must be \[T\] or \[B, T\] = \[2, 17\]: got \[11\]"):
        mha(x, memory, memory, positions=(torch.arange(T), torch.arange(T)))


# Where a module goes


@each_option
def test_listeners_hear_a_module_with_options(name: str) -> None:
    mha, x = made(name), inputs()
    plain = mha(x)[0]
    with hw.watch(mha) as heads:
        torch.testing.assert_close(mha(x)[0], plain)
    assert torch.isfinite(heads[0].entropy).all()
    with hw.ablate(mha, [(0, head) for head in range(H)]):
        nothing = mha(x)[0]
    expected = torch.zeros_like(plain) if mha.out_proj.bias is None else mha.out_proj.bias.expand_as(plain)
    torch.testing.assert_close(nothing, expected)


def test_heads_that_attend_evenly_still_pass_their_gates() -> None:
    mha, x = made("gate of channels"), inputs()
    with hw.ablate(mha, [(0, head) for head in range(H)], method="uniform"):
        even = mha(x)[0]
    with torch.no_grad():
        mha.q_proj.weight.zero_()
        mha.q_proj.bias.zero_()
    torch.testing.assert_close(even, mha(x)[0])


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("rope", "eager"),
        pytest.param("norm of all heads", "eager", marks=pytest.mark.slow),
        pytest.param("everything", "eager", marks=pytest.mark.slow),
        pytest.param("everything", "aot_eager", marks=pytest.mark.slow),
    ],
)
def test_compiled_it_is_the_same(name: str, backend: str) -> None:
    mha, x = made(name, torch.float32), inputs(torch.float32)
    compiled = torch.compile(mha, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x)[0], mha(x)[0])
    if name == "everything":
        torch.testing.assert_close(
            compiled(x, positions=torch.arange(T) + 2)[0], mha(x, positions=torch.arange(T) + 2)[0]
        )


@pytest.mark.slow
def test_compiled_for_any_length_it_takes_positions(fresh_compiler: None) -> None:
    """Sizes of such a graph are symbols; right positions were once refused."""
    mha, x = made("rope", torch.float32), inputs(torch.float32)
    compiled = torch.compile(mha, fullgraph=True, backend="eager")
    for length in (3, 5):  # the second makes lengths dynamic
        compiled(x[:, :length])
    for at in (torch.arange(T), torch.arange(T)[None] + 2):
        torch.testing.assert_close(compiled(x, positions=at)[0], mha(x, positions=at)[0])


@each_option
def test_it_travels(name: str) -> None:
    mha, x = made(name), inputs()
    expected = mha(x)[0]
    for new in (copy.deepcopy(mha), pickle.loads(pickle.dumps(mha)), copy.copy(mha)):
        assert torch.equal(new(x)[0], expected)
        assert repr(new) == repr(mha)
    fresh = hw.MultiHeadAttention(E, H, num_kv_heads=Hk, head_dim=D, **OPTIONS[name], dtype=torch.float64)
    fresh.load_state_dict(mha.state_dict())
    assert torch.equal(fresh(x)[0], expected)
    assert mha.to("meta")(x.to("meta"))[0].shape == expected.shape


def test_half_precision_and_autocast_keep_one_dtype() -> None:
    mha, x = made("everything", torch.float32), inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output, map = mha(x)
    assert output.dtype == torch.bfloat16 and map[0, 0].dtype == torch.bfloat16
    assert error(output, mha(x)[0]) < 0.1 * mha(x)[0].abs().max()


def test_the_repr_names_them() -> None:
    message = made("everything").extra_repr()
    assert message.endswith(
        "causal, window=7, softcap=3.0, sinks, rope=Rope(dims=6, scaling=Linear(factor=2.0)), "
        "qk_norm=QKNorm(), gate='channel', alibi, relative_bias"
    )
    assert repr(RelativeBias(3)) == "RelativeBias(3 heads, Buckets())"


# First weights


def test_other_weights_are_drawn_as_without_options() -> None:
    torch.manual_seed(5)
    plain = hw.MultiHeadAttention(12, 3)
    torch.manual_seed(5)
    mha = hw.MultiHeadAttention(
        12, 3, rope=Rope(), alibi=True, relative_bias=Buckets(), qk_norm="layer", gate="head"
    )
    for name, weight in plain.state_dict().items():
        assert torch.equal(mha.state_dict()[name], weight), name
    assert mha.gate_proj.weight.abs().max() <= 12**-0.5 and mha.gate_proj.weight.std() > 0
    before = torch.get_rng_state()
    hw.MultiHeadAttention(12, 3, gate="channel", relative_bias=Buckets(), qk_norm="rms", device="meta")
    assert torch.equal(torch.get_rng_state(), before)


def test_reset_parameters_resets_them_too() -> None:
    mha = made("everything")
    mha.reset_parameters()
    assert not mha.relative_bias.weight.any()
    assert (mha.q_norm.weight == 1).all() and (mha.k_norm.weight == 1).all()
    assert mha.gate_proj.weight.abs().max() <= E**-0.5


def test_a_shared_bias_is_taken_as_it_is() -> None:
    first = made("relative bias")
    learned = first.relative_bias.weight.detach().clone()
    second = hw.MultiHeadAttention(E, H, head_dim=D, relative_bias=first.relative_bias)
    assert second.relative_bias is first.relative_bias
    assert torch.equal(first.relative_bias.weight, learned)
    assert "relative_bias.weight" in second.state_dict()


# What is refused


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"rope": 10_000.0}, ArgumentError, r"rope must be a headwise.nn.Rope: got 10000\.0"),
        ({"rope": True}, ArgumentError, "rope must be a headwise.nn.Rope: got True"),
        ({"alibi": 8}, ArgumentError, "alibi must be True or False: got 8"),
        ({"relative_bias": 32}, ArgumentError, "relative_bias must be Buckets or a RelativeBias: got 32"),
        ({"relative_bias": RelativeBias(5)}, ShapeError, "must have the layer's num_heads: 5, not 6"),
        ({"qk_norm": "rmss"}, ArgumentError, "qk_norm must be a known kind: got 'rmss'; did you mean 'rms'"),
        ({"qk_norm": True}, ArgumentError, "qk_norm must be 'rms', 'layer' or a QKNorm: got True"),
        ({"gate": "channels"}, ArgumentError, "gate must be .*: got 'channels'; did you mean 'channel'"),
        ({"gate": True}, ArgumentError, "gate must be a known kind: got True"),
        ({"rope_theta": 1e4}, ArgumentError, r"rope_theta.*rope=headwise\.nn\.Rope\(base=rope_theta\)"),
        ({"use_alibi": True}, ArgumentError, "use_alibi.*its name is alibi here"),
        ({"qk_layernorm": True}, ArgumentError, "qk_layernorm.*its name is qk_norm here"),
        ({"position_bias": True}, ArgumentError, "position_bias.*its name is relative_bias here"),
        ({"rotary_emb": None}, ArgumentError, "rotary_emb.*its name is rope here"),
    ],
)  # fmt: skip
def test_options_that_are_none_are_refused(options: dict[str, Any], kind: Any, words: str) -> None:
    with pytest.raises((kind, TypeError), match=words):
        hw.MultiHeadAttention(E, H, head_dim=D, **options)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: QKNorm(eps=-1.0), r"eps must be 0 or more and finite: got -1\.0"),
        (lambda: Buckets(3), "count must be a whole number of at least 4: got 3"),
        (lambda: Buckets(1, both_ways=False), "count must be a whole number of at least 2: got 1"),
        (lambda: Buckets(33), "count must be even if both_ways=True: got 33"),
        (lambda: Buckets(32, 8), "max_distance must be a whole number above 8: got 8"),
        (lambda: Buckets(32, 128.0), r"max_distance must be a whole number above 8: got 128\.0"),
    ],
)
def test_settings_that_cannot_be_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        make()


@pytest.mark.parametrize("option", ["rope", "alibi", "relative_bias", "qk_norm", "gate"])
def test_torchs_class_and_explain_refuse_them_by_name(option: str) -> None:
    value = {"rope": Rope(), "alibi": True, "relative_bias": Buckets(), "qk_norm": "rms", "gate": "head"}[
        option
    ]
    mha = hw.MultiHeadAttention(12, 3, **{option: value})
    with pytest.raises(ArgumentError, match=f"{option} must be off: got {option}"):
        mha.to_torch()
    with pytest.raises(ArgumentError, match=f"module must not use {option}"):
        hw.explain(mha, torch.randn(1, T, 12))


def test_words_of_other_libraries_in_a_call_are_answered() -> None:
    with pytest.raises(ArgumentError, match=r"position_ids .*: got int64 \[11\]; its name is positions here"):
        made("rope")(inputs(), position_ids=torch.arange(T))


# Pruning


@each_option
def test_a_pruned_module_computes_what_it_does_without_those_heads(name: str) -> None:
    mha, x, removed = (
        made(name),
        inputs(),
        [(0, head) for head in (0, 1, 4)],
    )  # a group, and one of the last's
    kept_alike = [(0, 0), (0, 3), (0, 4)]  # one of each group of two
    if mha.qk_norm is not None and mha.qk_norm.whole:
        with pytest.raises(ArgumentError, match="model must have norms per head to be pruned"):
            hw.prune(mha, kept_alike)
        return
    for heads in (kept_alike, removed[:2]):
        mha = made(name)
        with hw.ablate(mha, heads):
            expected = mha(x)[0]
        hw.prune(mha, heads)
        torch.testing.assert_close(mha(x)[0], expected)
        again = made(name)
        hw.prune(again, heads)
        again.load_state_dict(mha.state_dict())
        assert torch.equal(again(x)[0], mha(x)[0])


def test_a_bias_that_layers_share_is_not_pruned_in_one() -> None:
    first = made("relative bias")
    second = hw.MultiHeadAttention(E, H, head_dim=D, relative_bias=first.relative_bias)
    with pytest.raises(
        ArgumentError, match=r"must not share .*: 0\.relative_bias is shared with 1\.relative_bias"
    ):
        hw.prune(nn.Sequential(first, second), [(1, 2)])


# Against transformers


@pytest.mark.parametrize("count", [8, 32, 320])
@pytest.mark.parametrize("far", [128, 800])
@pytest.mark.parametrize("both_ways", [True, False])
def test_buckets_are_t5s(count: int, far: int, both_ways: bool) -> None:
    pytest.importorskip("transformers")
    from transformers.models.t5.modeling_t5 import T5Attention

    if count // (4 if both_ways else 2) >= far:
        return
    buckets, offsets = Buckets(count, far, both_ways), torch.arange(-2000, 2001)
    theirs = T5Attention._relative_position_bucket(offsets, both_ways, count, far)
    assert torch.equal(buckets.of(offsets), theirs)
    held = buckets.by_offset(torch.device("cpu"))  # only up to max_distance: beyond all is one bucket
    assert torch.equal(held[offsets.clamp(-far, far) + far], theirs)


FULL = {"layer_types": ["full_attention"], "num_hidden_layers": 1}
NORM = {"qk_norm": QKNorm(eps=1e-6), "bias": False}
NO_BIAS = {"bias": False}
GEMMA3 = {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                              "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
          "query_pre_attn_scalar": 49, "sliding_window": 3}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention"], "num_hidden_layers": 1}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
PARTLY = SIZES | FULL | rotary(partial_rotary_factor=0.6) | {"rms_norm_eps": 1e-6}

DECODER = {"d_model": 30, "d_kv": 10, "num_heads": 6, "is_decoder": True}
ALL_HEADS = {"num_kv_heads": 6, "bias": False}

LAYERS = {
    "linear": Layer("llama", "Llama", SIZES | rotary(rope_type="linear", factor=4.0),
                    {"rope": Rope(scaling=Linear(4.0))} | NO_BIAS),
    "yarn": Layer("llama", "Llama", SIZES | rotary(**YARN) | {"max_position_embeddings": 32},
                  {"rope": Rope(scaling=Yarn(4.0, 8))} | NO_BIAS),
    "Gemma 3": Layer("gemma3", "Gemma3", SIZES | FULL | GEMMA3,
                     {"rope": Rope(1e6, scaling=Linear(8.0)), "scale": 1 / 7} | NORM,
                     state=one_more, config="Gemma3TextConfig", kind=("full_attention",)),
    "Gemma 3, sliding": Layer("gemma3", "Gemma3", SIZES | SLIDING | GEMMA3,
                              {"rope": Rope(), "scale": 1 / 7} | NORM, state=one_more, window=3,
                              config="Gemma3TextConfig", kind=("sliding_attention",)),
    "OLMo 2": Layer("olmo2", "Olmo2", SIZES | rotary() | {"rms_norm_eps": 1e-5},
                    {"rope": Rope(), "qk_norm": QKNorm(eps=1e-5, whole=True)} | NO_BIAS),
    "Cohere": Layer("cohere", "Cohere", SIZES | rotary(), {"rope": Rope(interleaved=True)} | NO_BIAS),
    "Qwen3-Next": Layer("qwen3_next", "Qwen3Next", PARTLY, {"rope": Rope(dims=6), "gate": "channel"} | NORM,
                        state=with_gates),
    "BLOOM": Layer("bloom", "Bloom", {"hidden_size": 60, "n_head": 6},
                   {"alibi": True}, call=bloom, state=head_by_head, turned=False),
    "T5's decoder": Layer("t5", "T5", DECODER,
                          {"relative_bias": Buckets(both_ways=False), "scale": 1.0} | ALL_HEADS,
                          call=t5, turned=False, extra={"has_relative_attention_bias": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_transformers_is_computed_exactly(name: str) -> None:
    pytest.importorskip("transformers")
    judged(LAYERS[name])


# All together


@pytest.mark.slow
def test_options_go_together() -> None:
    from hypothesis import given, settings
    from hypothesis import strategies as st

    ropes = [None, Rope(), Rope(50.0, dims=4), Rope(interleaved=True, scaling=Yarn(4.0, 8))]
    norms = [None, "rms", QKNorm("layer"), QKNorm(whole=True)]
    biases = [None, Buckets(8, 7), Buckets(6, 9, both_ways=False)]

    @settings(max_examples=150, deadline=None)
    @given(
        st.sampled_from(ropes), st.booleans(), st.sampled_from(biases), st.sampled_from(norms),
        st.sampled_from([None, "head", "channel"]), st.booleans(), st.sampled_from([None, 1, 4]),
        st.booleans(), st.sampled_from([None, 2.0]), st.booleans(), st.sampled_from([1, 5, 23]),
        st.sampled_from([torch.float64, torch.float32]),
    )  # fmt: skip
    def check(
        rope: Any, sloped: bool, buckets: Any, norm: Any, gate: Any, causal: bool, window: Any, sinks: bool,
        softcap: Any, bias: bool, length: int, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        OPTIONS["drawn"] = {
            "rope": rope, "alibi": sloped, "relative_bias": buckets, "qk_norm": norm, "gate": gate,
            "causal": causal, "window": window, "sinks": sinks, "softcap": softcap, "bias": bias,
        }  # fmt: skip
        try:
            mha = made("drawn", dtype)
        finally:
            del OPTIONS["drawn"]
        if window is not None:
            mha.causal = True
        x = inputs(dtype, length)
        truth, weights = by_hand(copy.deepcopy(mha).double(), x.double())
        plain, plain_weights = by_hand(mha, x)
        output, map = mha(x)
        terms = largest(mha.head_outputs(x)) * largest(mha.out_proj.weight)
        assert_judged(output, plain, truth, dtype=dtype, size=terms)
        steep = max(1.0, largest(map.lse))
        assert_judged(map.dense(), plain_weights, weights, dtype=dtype, size=steep)

    check()
