"""Attention that cannot be heard is named: nothing is missed in silence, and what is advised works."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

import headwise as hw
from headwise.errors import AttentionBypassed, AttentionUnheard
from model_families import GROUPED, SEEING, _draw_wide, not_before, text_and_answer

pytestmark = [
    pytest.mark.usefixtures("_small_models_at_rest"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

B, T, E, H = 2, 7, 16, 4


class Mixer(nn.Module):
    """Attends by a function of a test, in a class that nobody would take for attention."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.num_heads, self.attend = nn.Linear(E, 3 * E), H, attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.attend(q, k, v).transpose(1, 2).flatten(2)


class SelfAttention(Mixer):
    """The same in a class that says what it is."""


def beside(mixer: nn.Module) -> nn.Module:
    """A mixer, and a layer that is heard."""
    return nn.Sequential(mixer, Mixer(scaled_dot_product_attention)).eval()


def x() -> Tensor:
    return torch.randn(B, T, E, generator=torch.Generator().manual_seed(0))


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * q.shape[-1] ** -0.5


def by_logarithm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).log_softmax(-1).exp() @ v


def by_columns(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(k, q).softmax(-2).mT @ v


def watched(model: nn.Module, fallback: str | None = None) -> hw.Heads:
    with torch.no_grad(), hw.watch(model, fallback=fallback) as heads:
        model(x())
    return heads


# Beside a layer that is heard


@pytest.mark.parametrize("attend", [by_logarithm, by_columns])
def test_a_softmax_that_may_be_attention_is_counted(attend: Any) -> None:
    """`log_softmax().exp()` and a softmax over columns were missed beside a layer that was heard."""
    model = beside(Mixer(attend))
    with pytest.warns(AttentionUnheard, match=r"1 softmax operation that may be .* 1 layer of Mixer \(0\)"):
        heads = watched(model)
    assert heads.paths == ["1"] and repr(heads) == "Heads(1 layer, 4 heads; 1 layer not measured)"
    (missed,) = heads.unheard
    assert (missed.path, missed.kind, missed.softmaxes) == ("0", "Mixer", 1)
    assert "Layers without measurements: 0 (Mixer, 1 softmax operation" in str(heads.table())
    assert watched(model, "skip").unheard == heads.unheard  # which gives no warning


def test_logarithms_of_weights_are_read() -> None:
    model = beside(Mixer(by_logarithm))
    heads = watched(model, "eager")
    assert heads.paths == ["0", "1"] and not heads.unheard
    q, k, _ = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in model[0].qkv(x()).chunk(3, -1))
    torch.testing.assert_close(heads["0"].map.dense(), scores(q, k).softmax(-1))


class Flexible(Mixer):
    """Mentions the function in its code, as those who import it do."""

    def __init__(self) -> None:
        from torch.nn.attention.flex_attention import flex_attention

        super().__init__(flex_attention)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention_is_counted() -> None:
    """It runs as one operator that only torch's compiler sees: no function of torch's tells of it."""
    message = r"Flexible \(0\), where flex_attention is called, which gives no weights"
    with pytest.warns(AttentionUnheard, match=message):
        heads = watched(beside(Flexible()))
    assert heads.paths == ["1"] and [missed.path for missed in heads.unheard] == ["0"]


def test_torchs_operators_are_heard_or_refused_by_name() -> None:
    """Called by `torch.ops.aten`, they were missed beside a layer that was heard."""
    aten = torch.ops.aten
    for function in (aten.scaled_dot_product_attention, aten.scaled_dot_product_attention.default):
        heads = watched(beside(Mixer(function)))
        assert heads.paths == ["0", "1"] and not heads.unheard
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    model = beside(Mixer(lambda q, k, v: kernel(q, k, v)[0]))
    with pytest.raises(AttentionBypassed, match=r"Mixer \(0\), where _scaled_dot_product_flash") as refused:
        watched(model)
    assert "fallback='eager'" not in str(refused.value)
    with pytest.warns(AttentionUnheard, match=r"_scaled_dot_product_flash_attention_for_cpu is called"):
        heads = watched(model, "eager")
    assert heads.paths == ["1"]


class Packed(nn.Module):
    """torch's function behind its module, called directly."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(E, H)

    def forward(self, x: Tensor) -> Tensor:
        own, x = self.inner, x.transpose(0, 1)
        return functional.multi_head_attention_forward(
            x, x, x, E, H, own.in_proj_weight, own.in_proj_bias, None, None, False, 0.0, own.out_proj.weight,
            own.out_proj.bias, training=False, need_weights=False,
        )[0].transpose(0, 1)  # fmt: skip


def test_torchs_function_behind_its_module_is_refused_by_name_or_read() -> None:
    """`F.multi_head_attention_forward` in a class of another name was missed beside a layer that is heard."""
    model = beside(Packed())
    with pytest.raises(AttentionBypassed, match=r"1 layer of Packed \(0\) computes.*fallback='eager'"):
        watched(model)
    heads = watched(model, "eager")
    assert heads.paths == ["0", "1"]
    every_head = {"need_weights": True, "average_attn_weights": False}
    truth = model[0].inner(*[x().transpose(0, 1)] * 3, **every_head)[1]
    torch.testing.assert_close(heads["0"].map.dense(), truth)


class Gate(nn.Module):
    """Experts chosen by a softmax, and probabilities of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(E, 3)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).softmax(-1)  # [B, T, 3]
        flat = self.gate(x.flatten(0, 1)).log_softmax(-1)  # [B * T, 3]
        return x * (chosen.sum(-1, keepdim=True) + flat.view(B, T, 3).sum(-1, keepdim=True))


def test_gates_and_probabilities_of_classes_are_no_attention() -> None:
    heads = watched(beside(Gate()))
    assert heads.paths == ["1"] and not heads.unheard


class Tagger(nn.Module):
    """Probabilities of as many classes as there are tokens look like weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(E, 2, batch_first=True)
        self.classes = nn.Linear(E, 11)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.classes(x + self.attention(x, x, x, need_weights=False)[0]), -1)


@pytest.mark.parametrize("fallback", [None, "eager"])
def test_probabilities_of_as_many_classes_as_tokens_are_not_taken_for_weights(fallback: Any) -> None:
    """They were refused as attention, and under fallback="eager" they became a head."""
    model = Tagger().eval()
    with (
        torch.no_grad(),
        pytest.warns(AttentionUnheard, match="may be attention"),
        hw.watch(model, fallback=fallback) as heads,
    ):
        model(torch.randn(B, 11, E))
    assert heads.paths == ["attention"]


def test_a_gate_is_not_taken_for_weights() -> None:
    """PatchTSMixer's gates, a softmax over features, became heads under fallback="eager"."""
    import transformers

    config = transformers.PatchTSMixerConfig(
        context_length=16, patch_length=4, patch_stride=4, num_input_channels=2, d_model=8, num_layers=1,
        gated_attn=True,
    )  # fmt: skip
    model = transformers.PatchTSMixerModel(config).eval()
    with (
        torch.no_grad(),
        pytest.raises(AttentionBypassed, match="may be a gate"),
        hw.watch(model, fallback="eager"),
    ):
        model(past_values=torch.randn(B, 16, 2))


def test_a_mask_is_not_taken_for_the_positions_of_a_layer() -> None:
    """LongT5 fills blocks of 128 queries up, and its mask has as many rows: padding counted as queries."""
    import transformers

    config = transformers.LongT5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=40, num_layers=1, num_heads=4)
    model = transformers.LongT5Model(config).eval()
    with (
        torch.no_grad(),
        pytest.warns(AttentionUnheard, match="LocalSelfAttention"),
        hw.watch(model, fallback="eager") as heads,
    ):
        model(input_ids=torch.randint(3, 61, (B, 11)), decoder_input_ids=torch.randint(3, 61, (B, 5)))
    assert not any("LocalSelfAttention" in path for path in heads.paths)


class Quantised(nn.Module):
    """Janus encodes an image in blocks of attention that are not called so, beside a Transformer."""

    def __init__(self) -> None:
        import transformers

        super().__init__()
        self.vq = transformers.JanusVQVAE(
            transformers.JanusVQVAEConfig(
                embed_dim=32, num_embeddings=40, latent_channels=32, num_patches=8, base_channels=32,
                channel_multiplier=[1, 1], num_res_blocks=1, projection_dim=32, image_token_embed_dim=32,
            )
        )  # fmt: skip
        self.seeing = transformers.ViTModel(transformers.ViTConfig(**SEEING))

    def forward(self, image: Tensor) -> Any:
        return self.vq.encode(image), self.seeing(image[..., :16, :16])


def test_blocks_of_a_quantiser_are_counted_or_read() -> None:
    """Those of Chameleon and Janus were missed beside the layers that were heard."""
    model, image = Quantised().eval(), torch.randn(1, 3, 32, 32)
    with (
        pytest.warns(AttentionUnheard, match=r"2 softmax .* 2 layers of JanusVQVAEAttnBlock \(vq\."),
        torch.no_grad(),
        hw.watch(model) as heads,
    ):
        model(image)
    assert len(heads) == 2
    assert [missed.path for missed in heads.unheard] == ["vq.encoder.down.1.attn.0", "vq.encoder.mid.attn_1"]
    with torch.no_grad(), hw.watch(model, fallback="eager") as heads:
        model(image)
    assert heads["vq.encoder.mid.attn_1"].map.shape == (1, 1, 256, 256) and not heads.unheard


# Weights that a model writes to


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_that_are_written_to_after_the_softmax_are_read_as_it_gave_them(mode: Any) -> None:
    """`.statistics`, `.map` and `.table()` raised, with advice for whoever wrote the model."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = scores(q, k).softmax(-1)
        saved.append(weights.clone())
        weights *= 0.5
        return weights @ v

    saved: list[Tensor] = []
    model = nn.Sequential(SelfAttention(attend))
    with mode(), hw.watch(model, fallback="eager") as heads:
        model(x())
    assert torch.equal(heads[0].map.dense(), saved[0])
    torch.testing.assert_close(
        heads[0].entropy, torch.xlogy(saved[0], saved[0]).sum(-1).neg().mean((0, 2)).double()
    )
    assert "Layers without measurements" not in str(heads.table())


# What a model has of layers that can be read, is read


def prophetnet() -> tuple[nn.Module, dict[str, Any], int]:
    import transformers

    config = transformers.ProphetNetConfig(
        vocab_size=61, hidden_size=32, encoder_ffn_dim=40, decoder_ffn_dim=40, num_encoder_layers=2,
        num_encoder_attention_heads=4, num_decoder_layers=2, num_decoder_attention_heads=4,
        max_position_embeddings=40,
    )  # fmt: skip
    return transformers.ProphetNetModel(config), text_and_answer("none"), 4


def groupvit() -> tuple[nn.Module, dict[str, Any], int]:
    import transformers

    config = transformers.GroupViTVisionConfig(
        **SEEING | {"num_hidden_layers": 3}, depths=[1, 1, 1], num_group_tokens=[6, 3, 0],
        num_output_groups=[6, 3, 0],
    )  # fmt: skip
    return transformers.GroupViTVisionModel(config), {"pixel_values": torch.randn(B, 3, 16, 16)}, 5


@pytest.mark.parametrize(
    ("make", "kind", "reason"),
    [
        (prophetnet, "ProphetNetNgramSelfAttention", "2 softmaxes ran in one call"),
        (groupvit, "GroupViTAssignAttention", "the softmax ran over another dimension than the last"),
    ],
)
def test_layers_that_can_be_read_are_read_beside_those_that_cannot(make: Any, kind: str, reason: str) -> None:
    """One layer that could not be read refused the whole model."""
    model, arguments, readable = make()
    model.eval()
    message = (
        rf"{readable} layers of .*, and 2 layers of {kind} .*, where {reason}.*reads the first {readable} "
    )
    with pytest.raises(AttentionBypassed, match=message), torch.no_grad(), hw.watch(model):
        model(**arguments)
    with (
        pytest.warns(AttentionUnheard, match=rf"2 layers of {kind} .*, where {reason}"),
        torch.no_grad(),
        hw.watch(model, fallback="eager") as heads,
    ):
        model(**arguments)
    assert len(heads) == readable
    assert [missed.kind for missed in heads.unheard] == [kind] * 2
    assert all(missed.reason is not None and missed.reason.startswith(reason) for missed in heads.unheard)


def test_what_was_not_heard_is_in_files_and_copies(tmp_path: Path) -> None:
    with pytest.warns(AttentionUnheard):
        heads = watched(beside(Mixer(by_columns)))
    heads.save(tmp_path / "heads.safetensors")
    assert hw.load_heads(tmp_path / "heads.safetensors").unheard == heads.unheard
    assert pickle.loads(pickle.dumps(heads)).unheard == heads.unheard


def test_every_forward_counts_and_one_warning_is_given() -> None:
    def three_times() -> hw.Heads:
        model = beside(Mixer(by_columns))
        with torch.no_grad(), hw.watch(model) as heads:
            for _ in range(3):
                model(x())
        return heads

    with pytest.warns(AttentionUnheard) as arguments:
        heads = three_times()
    assert len(arguments) == 1 and heads.unheard[0].softmaxes == 3
    assert arguments[0].filename == __file__  # the line of whoever watches


def test_heads_of_a_layer_that_cannot_be_read_are_not_ablated_in_silence() -> None:
    twice = SelfAttention(lambda q, k, v: scores(q, k).softmax(-1) @ (scores(q, k).softmax(-1) @ v))
    model = nn.Sequential(twice, SelfAttention(scaled_dot_product_attention))
    with (
        pytest.warns(AttentionUnheard),
        pytest.raises(AttentionBypassed, match=r"0 compute .*'eager'"),
        hw.ablate(model, [(0, 1)], fallback="eager"),
    ):
        model(x())


# The right culprit


def cvt() -> tuple[nn.Module, dict[str, Any]]:
    import transformers

    two = {name: [value, value] for name, value in
           {"mlp_ratio": 2.0, "attention_drop_rate": 0.0, "drop_rate": 0.0, "drop_path_rate": 0.0,
            "qkv_bias": True, "cls_token": False, "qkv_projection_method": "dw_bn", "kernel_qkv": 3,
            "padding_kv": 1, "stride_kv": 2, "padding_q": 1, "stride_q": 1}.items()}  # fmt: skip
    config = transformers.CvtConfig(
        patch_sizes=[4, 3], patch_stride=[2, 2], patch_padding=[2, 1], embed_dim=[16, 32], num_heads=[1, 2],
        depth=[1, 2], **two,
    )  # fmt: skip
    return transformers.CvtModel(config), {"pixel_values": torch.randn(B, 3, 16, 16)}


def neomme() -> tuple[nn.Module, dict[str, Any]]:
    import transformers

    not_before((5, 22), "NeoMME")
    config = transformers.NeoMMEConfig(**GROUPED | {"head_dim": 16})
    return transformers.NeoMMEModel(config), {"input_ids": torch.randint(7, 61, (B, 11))}


def kosmos() -> tuple[nn.Module, dict[str, Any]]:
    import transformers

    config = transformers.Kosmos2_5Config(
        text_config={"vocab_size": 61, "max_position_embeddings": 64, "embed_dim": 32, "layers": 2,
                     "ffn_dim": 40, "attention_heads": 4},
        vision_config={"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                       "intermediate_size": 40, "patch_embed_hidden_size": 48, "head_dim": 8,
                       "max_num_patches": 16, "max_length": 16},
        latent_query_num=4,
    )  # fmt: skip
    patches, at = torch.randn(1, 16, 50), torch.arange(16)
    patches[..., 0], patches[..., 1] = at // 4 + 1, at % 4 + 1
    where = torch.tensor([[0, 1, 1, 1, 1] + [0] * 7])
    ids = torch.randint(3, 61, (1, 12))
    options = {"input_ids": ids, "flattened_patches": patches, "image_embeds_position_mask": where}
    return transformers.Kosmos2_5Model(config), options


def test_a_layer_that_attends_is_named_and_not_a_convolution_inside_it() -> None:
    """CvT's convolutions are called CvtSelfAttentionConvProjection, and were blamed."""
    model, arguments = cvt()
    model.eval()
    with (
        pytest.raises(AttentionBypassed, match=r"3 layers of CvtSelfAttention \(.*fallback='eager'"),
        torch.no_grad(),
        hw.watch(model),
    ):
        model(**arguments)
    with torch.no_grad(), hw.watch(model, fallback="eager") as heads:
        model(**arguments)
    assert len(heads) == 3 and not heads.unheard


def test_a_helper_with_attention_in_its_name_does_not_stand_in_the_way() -> None:
    """NeoMME was refused for `NeoMMEExclusiveSelfAttention`, which subtracts a projection."""
    model, arguments = neomme()
    _draw_wide(model)
    model.eval()
    truth = model(**arguments).last_hidden_state
    with torch.no_grad(), hw.watch(model) as heads:
        actual = model(**arguments).last_hidden_state
    assert len(heads) == 2
    torch.testing.assert_close(actual, truth, rtol=1e-4, atol=1e-4)


def test_a_lookup_that_finds_nothing_leaves_a_layer_to_be_read() -> None:
    """Kosmos-2.5 asks the dispatch by `getattr`, so it always runs its own function, which was not read."""
    model, arguments = kosmos()
    model.eval()
    with (
        pytest.raises(AttentionBypassed, match=r"2 layers of Kosmos2_5VisionAttention .*fallback='eager'"),
        torch.no_grad(),
        hw.watch(model),
    ):
        model(**arguments)
    with torch.no_grad(), hw.watch(model, fallback="eager") as heads:
        model(**arguments)
    assert len(heads) == 5 and not heads.unheard
