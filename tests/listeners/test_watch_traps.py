"""What once went wrong without a word while a model was watched; each docstring tells the story."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import headwise as hw
from model_families import BART, PLAIN, SEEING, _draw_wide

pytestmark = [
    pytest.mark.usefixtures("_small_models_at_rest"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

LENGTH = 12


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, 60, (2, LENGTH), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def padding() -> Tensor:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, 9:] = 0
    return mask


def wide(model: nn.Module) -> Any:
    _draw_wide(model)
    return model.eval()


def entropy(weights: Tensor, real: Tensor | None = None) -> Tensor:
    """[H], in float64, the mean over real queries."""
    p = weights.double()
    rows = -torch.xlogy(p, p).sum(-1)  # [B, H, T]
    real = torch.ones_like(rows[:, 0]) if real is None else real.double()
    return (rows * real[:, None]).sum((0, 2)) / real.sum()


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=2e-5)


class Fused(nn.Module):
    """Attention by torch's function, called as a test likes."""

    def __init__(self, attend: Callable[..., Tensor] = scaled_dot_product_attention) -> None:
        super().__init__()
        self.qkv, self.num_heads, self.attend = nn.Linear(16, 48), 2, attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.attend(q, k, v).transpose(1, 2).flatten(2)


def test_no_mask_hides_nothing_in_a_model_that_runs_eagerly(ids: Tensor) -> None:
    """Other implementations take a missing mask for causal where the layer says so; eager never does."""
    import transformers

    config = transformers.Kosmos2Config(
        text_config={
            "vocab_size": 61, "max_position_embeddings": 64, "embed_dim": 32, "layers": 2, "ffn_dim": 40,
            "attention_heads": 4,
        },
        vision_config=SEEING,
        latent_query_num=4,
    )  # fmt: skip
    model = wide(transformers.Kosmos2Model(config))
    model.set_attn_implementation("eager")
    where = torch.tensor([[0, 1, 1, 1, 1] + [0] * 7] * 2)
    inputs = {
        "input_ids": ids,
        "pixel_values": torch.randn(2, 3, 16, 16),
        "image_embeds_position_mask": where,
    }
    before = model(**inputs)[0]
    with hw.watch(model):
        inside = model(**inputs)[0]
    torch.testing.assert_close(inside, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("corner", ["causal_lower_right", "causal_upper_left"])
def test_a_causal_bias_is_a_tensor_without_its_numbers(corner: str) -> None:
    """Read as an ordinary mask it hid nothing."""
    from torch.nn.attention import bias as torchs  # brings torch's compiler along

    bias = getattr(torchs, corner)
    model, x = Fused(lambda q, k, v: scaled_dot_product_attention(q, k, v, bias(5, 5))), torch.randn(2, 5, 16)
    before = model(x)
    with hw.watch(model) as heads:
        inside = model(x)
    torch.testing.assert_close(inside, before)
    assert not heads[0].map.dense().triu(1).any()


class MaskedSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.num_heads = nn.Linear(16, 48), 2

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Block(MaskedSelfAttention):
    """The same, in a module nobody would take for attention."""


@pytest.mark.parametrize("kind", [MaskedSelfAttention, Block])
def test_attention_beside_attention_that_is_heard_is_not_left_out(kind: type[nn.Module]) -> None:
    """A name with Mask in it, or no Attention in it, was passed over in silence."""
    model, x = nn.Sequential(kind(), Fused()), torch.randn(2, 5, 16)

    def watched() -> None:
        with hw.watch(model):
            model(x)

    with pytest.raises(hw.errors.AttentionBypassed, match=rf"1 layer of {kind.__name__} \(0\)"):
        watched()
    with hw.watch(model, fallback="eager") as heads:
        model(x)
    assert heads.paths == ["0", "1"] and heads["0"].num_heads == 2


class Ranker(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.cross_encoder = model

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.cross_encoder(**batch)


def test_a_models_name_does_not_make_its_attention_cross(ids: Tensor, padding: Tensor) -> None:
    """A `cross_encoder` was read as cross-attention, and its padded queries counted."""
    import transformers

    model = wide(transformers.BertModel(transformers.BertConfig(**PLAIN)))
    inputs = {"input_ids": ids, "attention_mask": padding}
    with hw.watch(model) as alone:
        model(**inputs)
    ranker = Ranker(model)
    with hw.watch(ranker) as inside:
        ranker(inputs)
    assert inside[0].kind == "self"
    assert torch.equal(inside[0].statistics.entropy, alone[0].statistics.entropy)


def test_padding_is_known_however_it_was_given(ids: Tensor, padding: Tensor) -> None:
    """By position, or inside a batch that a wrapper takes apart, it went unnoticed."""
    import transformers

    model = wide(transformers.MPNetModel(transformers.MPNetConfig(**PLAIN)))
    with hw.watch(model, fallback="eager") as named:
        model(input_ids=ids, attention_mask=padding)
    with hw.watch(model, fallback="eager") as placed:
        model(ids, padding)
    assert torch.equal(named[0].statistics.entropy, placed[0].statistics.entropy)
    bart = wide(transformers.BartModel(transformers.BartConfig(**BART)))
    answer = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    batch = {
        "input_ids": ids, "attention_mask": padding, "decoder_input_ids": ids[:, :5],
        "decoder_attention_mask": answer,
    }  # fmt: skip
    with hw.watch(bart) as alone:
        bart(**batch)
    wrapped = Ranker(bart)
    with hw.watch(wrapped) as inside:
        wrapped(batch)
    for first, other in zip(alone.values(), inside.values(), strict=True):
        assert first.kind == other.kind and torch.equal(first.statistics.entropy, other.statistics.entropy)


@pytest.mark.parametrize("answer", [5, LENGTH])
def test_one_texts_padding_is_not_the_others(ids: Tensor, padding: Tensor, answer: int) -> None:
    """Where question and answer were equally long, the question's padding fell on the answer."""
    import transformers

    model = wide(transformers.MvpModel(transformers.MvpConfig(**BART)))
    inputs = {"input_ids": ids, "attention_mask": padding, "decoder_input_ids": ids[:, :answer]}
    with hw.watch(model, fallback="eager") as heads:
        model(**inputs)
    exact = model(**inputs, output_attentions=True)
    close(heads["decoder.layers.0.self_attn"].statistics.entropy, entropy(exact.decoder_attentions[0]))
    cross = heads["decoder.layers.0.encoder_attn"]
    assert cross.kind == "cross"
    close(cross.statistics.entropy, entropy(exact.cross_attentions[0]))


def test_minus_ten_thousand_is_padding_too(ids: Tensor, padding: Tensor) -> None:
    """Taken for a bias, it hid the keys and left their queries among the counted."""
    import transformers

    model = wide(transformers.MarkupLMModel(transformers.MarkupLMConfig(**PLAIN)))
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    inputs = {"input_ids": ids, "attention_mask": padding}
    with hw.watch(model) as heads:
        model(**inputs)
    weights = eager(**inputs, output_attentions=True).attentions[0]
    close(heads[0].statistics.entropy, entropy(weights, padding))


def test_cross_attention_knows_which_of_its_queries_are_padding() -> None:
    """Only the self-attention beside it is told."""
    model = wide(nn.Transformer(16, 2, 1, 1, 32, batch_first=True))
    padded = torch.zeros(2, 5, dtype=torch.bool)
    padded[1, 3:] = True
    with hw.watch(model) as heads:
        model(torch.randn(2, 7, 16), torch.randn(2, 5, 16), tgt_key_padding_mask=padded)
    cross = heads["decoder.layers.0.multihead_attn"]
    close(cross.statistics.entropy, entropy(cross.map.dense(), ~padded))


def test_an_interrupt_inside_a_forward_leaves_nothing_running(ids: Tensor) -> None:
    """torch tells no hook of it: the next forward went on inside the last, its layers named anew."""
    import transformers

    class Interrupts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    model = wide(transformers.LlamaModel(transformers.LlamaConfig(**PLAIN)))
    watching, own = hw.watch(model), model.layers[1].mlp
    heads = watching.start()
    model.layers[1].mlp = Interrupts()
    with pytest.raises(KeyboardInterrupt):
        model(ids)
    model.layers[1].mlp = own
    model(ids)
    watching.stop()
    assert [len(layer.calls) for layer in heads.values()] == [2, 2] and len(heads) == 2


def test_a_mask_for_all_that_hides_a_key_from_everybody(ids: Tensor) -> None:
    """One row for all sequences was refused as padding of one."""
    import transformers

    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[:, 4] = False
    model = Fused(lambda q, k, v: scaled_dot_product_attention(q, k, v, mask))
    with hw.watch(model) as heads:
        model(torch.randn(2, 5, 16))
    assert heads[0].map.mask.queries is not None and not heads[0].map.dense()[..., 4].any()
    llama = wide(transformers.LlamaModel(transformers.LlamaConfig(**PLAIN)))
    with hw.watch(llama) as heads:
        llama(ids[:, :5], attention_mask=mask[None, None])
    assert len(heads) == 2


def test_threads_that_begin_and_end_together_leave_nothing_behind() -> None:
    """Counting who holds what was no single step: once, compiled code stayed off for good."""
    from torch._dynamo import eval_frame

    models, wrong = [Fused() for _ in range(4)], []
    x = torch.randn(1, 3, 16)

    def work(model: nn.Module) -> None:
        for _ in range(15):
            try:
                with torch.no_grad(), hw.watch(model, pooled=None, statistics="entropy") as heads:
                    model(x)
                assert len(heads) == 1 and len(heads[0].calls) == 1
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and eval_frame._stance.stance == "default"
    assert not any(model._forward_hooks or model._forward_pre_hooks for model in models)


def test_scripted_models_and_layers_taken_out() -> None:
    scripted = torch.jit.script(nn.Linear(3, 3))
    with pytest.raises(hw.errors.ArgumentError, match="model must not be scripted or traced: Sequential"):
        hw.watch(nn.Sequential(scripted)).start()
    model, x = nn.Sequential(Fused(), Fused()), torch.randn(2, 5, 16)
    with hw.watch(model) as heads:
        model(x)
        del model[1]
        model(x)
    assert [len(layer.calls) for layer in heads.values()] == [2, 1]


# What a second hunt found


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q * self.scale, k, v, mask, **more)


@pytest.mark.parametrize(
    ("q", "k", "v", "mask", "more"),
    [
        ((3, 3, 5, 7), (3, 3, 5, 7), (3, 3, 5, 7), (3, 5, 5), {}),
        ((2, 3, 5, 7), (2, 3, 11, 7), (2, 3, 11, 7), (3, 5, 11), {}),
        ((2, 3, 5, 7), (2, 3, 11, 7), (2, 3, 11, 7), (2, 1, 1, 11), {}),
        ((2, 2, 3, 5, 7), (2, 2, 3, 5, 7), (2, 2, 3, 5, 7), (3, 5, 5), {}),
        ((2, 2, 3, 5, 7), (2, 2, 3, 5, 7), (2, 2, 3, 5, 7), (2, 3, 5, 5), {}),
        ((6, 5, 7), (6, 5, 7), (6, 5, 7), (5, 5), {}),
        ((6, 5, 7), (6, 5, 7), (6, 5, 7), (1, 5, 5), {}),
        ((2, 3, 5, 7), (1, 3, 11, 7), (1, 3, 11, 7), None, {}),
        ((2, 4, 5, 7), (2, 2, 11, 7), (2, 1, 11, 7), None, {"enable_gqa": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_and_keys_broadcast_as_torch_broadcasts_them(
    q: Any, k: Any, v: Any, mask: Any, more: dict[str, Any], kind: str
) -> None:
    """A bias [H, T, S] was taken for one a sequence: where B is H, off by 1.83."""
    torch.manual_seed(0)
    arguments = [torch.randn(*shape, dtype=torch.float64) for shape in (q, k, v)]
    rules = None
    if mask is not None:
        rules = torch.randn(*mask, dtype=torch.float64)
        rules = rules if kind == "float" else (rules > -1.0) | (torch.arange(mask[-1]) == 0)
    model = Asks().double()
    wanted = model(*arguments, rules, **more)
    with hw.watch(model) as heads:
        actual = model(*arguments, rules, **more)
    torch.testing.assert_close(actual, wanted)
    assert len(heads) == 1


def test_a_nan_in_a_mask_that_is_else_zero_is_not_lost() -> None:
    model, x, mask = Asks(), torch.randn(1, 2, 5, 7), torch.zeros(5, 5)
    mask[2, 3] = torch.nan
    with hw.watch(model):
        assert bool(model(x, x, x, mask)[0, :, 2].isnan().all())


class GivenMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Asks()

    def forward(self, x: Tensor, attention_mask: Tensor, mask: Tensor | None = None) -> Tensor:
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        actual: Tensor = self.attn(q, q, q, mask)
        return actual


def test_who_attends_to_whom_is_not_read_as_padding() -> None:
    """A causal mask [T, T] with as many sequences as tokens, or zeros to be added: queries went uncounted."""
    torch.manual_seed(0)
    model, x, causal = GivenMask(), torch.randn(5, 5, 8), torch.ones(5, 5).tril().bool()
    for arguments, used in ((causal, causal), (torch.zeros(5, 5), None), (torch.zeros(5, 7)[:, :5], None)):
        with hw.watch(model) as heads:
            model(x, attention_mask=arguments, mask=used)
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        wanted = hw.AttentionMap(q, q, mask=used).statistics("entropy").entropy.mean(0)
        torch.testing.assert_close(heads[0].statistics.entropy, wanted.double())


def test_class_probabilities_are_no_attention() -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.kinds = GivenMask(), nn.Linear(4, 11)

        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(self.kinds(self.body(x, torch.ones(2, 5))), -1)

    model = Detector()
    with hw.watch(model) as heads:
        model(torch.randn(2, 5, 8))
    assert len(heads) == 1


def test_vmap_over_a_watched_model_says_what_to_do() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).eval()
    message = r"torch\.vmap while it is watched: \[1, 2, 5, 4\]"
    with pytest.raises(hw.errors.ArgumentError, match=message), hw.watch(model):
        torch.vmap(lambda y: model(y[None])[0])(torch.randn(3, 5, 8))


def test_a_soft_cap_that_torchs_function_leaves_out_is_left_out_here(
    monkeypatch: pytest.MonkeyPatch, ids: Tensor
) -> None:
    """Before Transformers 5.18 Gemma 2 ran on torch's function, whose wrapper took a soft cap and did nothing
    with it. It was believed to refuse one, and the layers were not heard."""
    from transformers import Gemma2Config, Gemma2Model
    from transformers.integrations import sdpa_attention
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def older(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float = 0.0,
        scaling: Any = None, is_causal: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        causal = attention_mask is None and query.shape[2] > 1
        actual = scaled_dot_product_attention(
            query, key, value, attention_mask, dropout, causal, scale=scaling, enable_gqa=True
        )
        return actual.transpose(1, 2).contiguous(), None

    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", older)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", older)
    monkeypatch.setattr(Gemma2Model, "_supports_sdpa", True)
    settings = PLAIN | {"num_key_value_heads": 2, "head_dim": 8, "attn_logit_softcapping": 2.0}
    model = wide(Gemma2Model(Gemma2Config(**settings, attn_implementation="sdpa"))).double()
    padding = torch.ones_like(ids)
    padding[0, :3] = 0  # on the left
    outside = model(ids, attention_mask=padding).last_hidden_state
    with hw.watch(model) as heads:
        inside = model(ids, attention_mask=padding).last_hidden_state
    assert len(heads.paths) == settings["num_hidden_layers"]
    assert torch.allclose(inside, outside, rtol=0, atol=1e-12)


class Two(nn.Module):
    """One model reads two texts in one forward."""

    def __init__(self, reader: Any) -> None:
        super().__init__()
        self.reader, self.config = reader, reader.config

    def forward(self, tensor: Tensor, other: Tensor, one_real: Tensor, other_real: Tensor) -> Tensor:
        first = self.reader(tensor, attention_mask=one_real).last_hidden_state
        return first.mean(1) - self.reader(other, attention_mask=other_real).last_hidden_state.mean(1)


def test_each_of_two_texts_is_scored_with_its_own_tokens(ids: Tensor, padding: Tensor) -> None:
    """A model that compares two texts of one length was given the first one's tokens for both: tokens were
    matched by their shape alone."""
    from transformers import BertConfig, BertModel

    reader = wide(BertModel(BertConfig(**PLAIN))).double()
    other = ids.clone()
    other[:, 6:] = other[:, :6]
    model = Two(reader).eval()
    with hw.watch(model) as heads:
        model(ids, other, torch.ones_like(ids), padding)
    with hw.watch(reader) as alone:
        reader(other, attention_mask=padding)
    again = [path for path in heads.paths if path.endswith("#1")]
    assert len(again) == len(alone.paths) == PLAIN["num_hidden_layers"]
    for path, own in zip(again, alone.paths, strict=True):
        for name in ("induction", "duplicate_token", "entropy"):
            assert torch.equal(heads[path].statistics[name], alone[own].statistics[name])


def test_an_image_has_none_of_its_captions_tokens() -> None:
    """CLIP with as many tokens as patches: its vision layers were scored for patterns of the caption."""
    from transformers import CLIPConfig, CLIPModel

    settings = CLIPConfig(text_config=PLAIN | {"eos_token_id": 2}, vision_config=SEEING, projection_dim=16)
    model, length = wide(CLIPModel(settings)), 17  # 4 x 4 patches and one more
    caption = torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(0))
    real = torch.ones_like(caption)
    real[0, 12:] = 0
    with hw.watch(model) as heads:
        model(input_ids=caption, attention_mask=real, pixel_values=torch.randn(2, 3, 16, 16))
    assert len(heads.paths) == 4
    for path in heads.paths:
        assert heads[path].calls[0].map.shape[-1] == length
        assert ("induction" in heads[path].statistics) == path.startswith("text")


def test_ids_of_an_encoder_and_a_decoder_stay_apart(ids: Tensor) -> None:
    """The decoder's own ids are called `input_ids` inside of it: there they are the decoder's text."""
    from transformers import BartConfig, BartModel

    model = wide(BartModel(BartConfig(**BART))).double()
    other = ids.clone()
    other[:, 6:] = other[:, :6]
    with hw.watch(model) as heads:
        model(input_ids=ids, decoder_input_ids=other)
    for path in (path for path in heads.paths if path.endswith("self_attn")):
        marks = heads[path].calls[0].marks
        assert marks is not None
        assert torch.equal(marks.ids, other if path.startswith("decoder") else ids)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_decoder_of_ours_reads_the_target(ids: Tensor, wrapped: bool) -> None:
    """With source and target equally long, its self-attention was measured on the source's tokens."""
    config = hw.models.TransformerConfig(
        vocab_size=61, d_model=16, num_heads=2, num_layers=1, kind="encoder-decoder"
    )
    model: nn.Module = hw.models.Transformer(config).eval()
    model = Around(model) if wrapped else model
    other = ids.flip(1)
    with torch.no_grad(), hw.watch(model) as heads:
        model(ids, other)
    marks = {path: heads[path].calls[0].marks for path in heads.paths if "cross" not in path}
    read = {"decoder" in path: expected.ids for path, expected in marks.items() if expected is not None}
    assert torch.equal(read[False], ids) and torch.equal(read[True], other)


class Around(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.inner(source, target)


class Seq2Seq(nn.Module):
    """As in a hundred tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 16)
        self.transformer = nn.Transformer(16, 2, 1, 1, 16, batch_first=True)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        return self.transformer(self.embed(src), self.embed(tgt))


def test_what_a_strangers_decoder_reads_is_unknown(ids: Tensor) -> None:
    """It was measured on the tokens of the source, too."""
    model = Seq2Seq().eval()
    with torch.no_grad(), hw.watch(model) as heads:
        model(ids, ids.flip(1))
    read = {path: heads[path].calls[0].marks is not None for path in heads.paths}
    assert read == {path: ".encoder." in path for path in heads.paths}
