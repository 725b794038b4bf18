"""The Transformer built of our attention: as transformers' models with their weights, in every layer; its
cache, its tools, and what it refuses."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import headwise as hw
from headwise.errors import ArgumentError, MaskError, PackageMissing, ShapeError
from headwise.models import Transformer, TransformerConfig, layers, load
from headwise.models.transformer_config import WORDS
from headwise.nn import Buckets, Rope
from judge import assert_judged
from small_models import SIZES, _finished, bert, gpt2, hugging_face, llama, tokens

LENGTHS = [7, 5, 2]


def ours(seed: int = 0, **changes: Any) -> Transformer:
    """2 layers of 3 heads of 8 in 13 channels, 47 tokens, in float64 and evaluation mode."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 47, "d_model": 13, "num_heads": 3, "head_dim": 8, "num_layers": 2, "d_ff": 17}
    return _finished(Transformer(TransformerConfig(**(sizes | changes))))


def translator(**changes: Any) -> Transformer:
    return ours(kind="encoder-decoder", positions="sinusoidal", norm_first=False, **changes)


# As transformers' models


def _kin(name: str, **settings: Any) -> Any:
    """Like Llama: 2 layers of 6 heads of 8 over 3."""
    hf = hugging_face()
    sizes = SIZES | {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = getattr(hf, f"{name}Config")(**(sizes | ends | settings))
    return _finished(getattr(hf, f"{name}ForCausalLM")(config))


KINDS = ["full_attention", "sliding_attention"]
MODELS = {
    "gpt2": gpt2,
    "bert": lambda: bert().bert,
    "llama": llama,
    "llama, biased": lambda: llama(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "mistral": lambda: _kin("Mistral", sliding_window=3),
    "qwen2": lambda: _kin("Qwen2", use_sliding_window=True, sliding_window=3, layer_types=KINDS),
    "qwen3": lambda: _kin("Qwen3"),
}


class Models(dict[str, Any]):
    """One model of each family, float64, made when it is asked for."""

    def __missing__(self, name: str) -> Any:
        return self.setdefault(name, MODELS[name]())


@pytest.fixture(scope="module")
def theirs() -> Models:
    return Models()


def plainly(model: Any, ids: Tensor) -> list[Tensor]:
    """What a Llama or its kin makes of ids, step by step in the weights' own dtype: every layer, then logits.

    transformers' own goes by way of float32 in norms and rotary tables.
    """
    c, w = model.config, dict(model.named_parameters())
    D, T, dtype = c.head_dim, ids.shape[1], w["model.norm.weight"].dtype
    base = (getattr(c, "rope_parameters", None) or {}).get("rope_theta") or c.rope_theta
    angles = torch.arange(T)[:, None] * base ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)
    cos, sin = angles.cos().to(dtype).repeat(1, 2), angles.sin().to(dtype).repeat(1, 2)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    kinds = getattr(c, "layer_types", None) or ["sliding_attention"] * c.num_hidden_layers

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + c.rms_norm_eps).rsqrt() * w[name]

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    x = functional.embedding(ids, w["model.embed_tokens.weight"])
    states = [x]
    for number, kind in enumerate(kinds):
        at = f"model.layers.{number}."
        size = getattr(c, "sliding_window", None) if kind == "sliding_attention" else None
        visible = (distance >= 0) & (distance < (size or T))

        def linear(x: Tensor, name: str, at: str = at) -> Tensor:
            return functional.linear(x, w[f"{at}{name}.weight"], w.get(f"{at}{name}.bias"))

        y = norm(x, f"{at}input_layernorm.weight")
        q, k, v = (linear(y, f"self_attn.{n}_proj").unflatten(-1, (-1, D)) for n in "qkv")  # [B, T, H, D]
        if f"{at}self_attn.q_norm.weight" in w:
            q, k = (norm(z, f"{at}self_attn.{n}_norm.weight") for z, n in ((q, "q"), (k, "k")))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        k, v = (z.repeat_interleave(q.shape[1] // z.shape[1], 1) for z in (k, v))
        scores = (turned(q) @ turned(k).transpose(-2, -1) / D**0.5).masked_fill(~visible, -torch.inf)
        x = x + linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), "self_attn.o_proj")
        y = norm(x, f"{at}post_attention_layernorm.weight")
        x = x + linear(
            functional.silu(linear(y, "mlp.gate_proj")) * linear(y, "mlp.up_proj"), "mlp.down_proj"
        )
        states.append(x)
    states[-1] = norm(x, "model.norm.weight")
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return [*states, functional.linear(states[-1], head)]


def their_states(model: Any, ids: Tensor) -> list[Tensor]:
    """Hidden states of every layer, and what comes out at the end."""
    message = model(ids, output_hidden_states=True)
    return [*message.hidden_states, message.logits if "logits" in message else message.last_hidden_state]


@pytest.mark.thinned(99, keep=["gpt2", "bert", "llama"])
@pytest.mark.parametrize("name", MODELS)
def test_every_layer_is_as_in_the_model_whose_weights_were_loaded(name: str, theirs: Any) -> None:
    model, ids = theirs[name], tokens()
    new = load(model)
    with torch.no_grad():
        truth = their_states(model, ids) if name in ("gpt2", "bert") else plainly(model, ids)
        for dtype in (torch.float64, torch.float32):
            actual = [*new.to(dtype).hidden(ids, every=True), new(ids)]
            plain = their_states(copy.deepcopy(model).to(dtype), ids)
            size = max(float(x.abs().max()) for x in truth)
            for at, (a, b, c) in enumerate(zip(actual, plain, truth, strict=True)):
                assert_judged(a, b, c, dtype=dtype, size=size, name=f"{name} {dtype} state {at}")


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_padded_sequences_are_as_they_are_alone(name: str, theirs: Any) -> None:
    new, ids = load(theirs[name]), tokens()
    with torch.no_grad():
        together = new(ids, lengths=LENGTHS)
        for row, length in enumerate(LENGTHS):
            alone = new(ids[row : row + 1, :length])
            torch.testing.assert_close(together[row : row + 1, :length], alone)
        masked = new(ids, mask=hw.Mask.padding(torch.tensor(LENGTHS)))
        torch.testing.assert_close(masked[2, :2], together[2, :2])


def test_a_model_without_a_head_ends_with_hidden_states(theirs: Any) -> None:
    ids = tokens()
    new = load(theirs["gpt2"].transformer)
    assert new.config.output is None
    torch.testing.assert_close(new(ids), theirs["gpt2"].transformer(ids).last_hidden_state)


def test_weights_are_copies_that_train_where_theirs_do(theirs: Any) -> None:
    model = copy.deepcopy(theirs["gpt2"]).train()
    model.transformer.wte.requires_grad_(False)
    new = load(model)
    assert new.training and not new.embedding.tokens.weight.requires_grad
    assert new.decoder.layers[0].attention.q_proj.weight.requires_grad
    before = new.embedding.tokens.weight.clone()
    model.transformer.wte.weight.data.zero_()
    assert torch.equal(new.embedding.tokens.weight, before)


# Files


@pytest.fixture(scope="module")
def folders(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("families")
    for name in ("gpt2", "bert", "llama"):
        theirs[name].save_pretrained(place / name, max_shard_size="20kB" if name == "llama" else "1GB")
    return place


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_a_folder_gives_the_same_model_as_the_object(name: str, folders: Path, theirs: Any) -> None:
    model, tokenizer, title = load(folders / name, ours=True)
    assert title == name and not model.training and isinstance(model, Transformer)
    assert (len(list((folders / name).glob("*.safetensors"))) > 1) == (name == "llama")
    expected = load(theirs[name]).state_dict()
    actual = model.state_dict()
    assert actual.keys() == expected.keys() and all(torch.equal(actual[k], expected[k]) for k in actual)
    with pytest.raises(ArgumentError, match=f"tokenizer must be in the model's folder: '{name}' has none"):
        tokenizer("to be")


def test_files_are_read_without_transformers(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    model, tokenizer, _ = load(folders / "gpt2", ours=True)
    assert model.config.num_layers == 2
    for use in (lambda: tokenizer("to be"), lambda: tokenizer.all_special_ids):
        with pytest.raises(PackageMissing, match="the tokenizer of 'gpt2' needs transformers; install"):
            use()
    assert "needs transformers" in repr(tokenizer)


@pytest.fixture
def spoiled(folders: Path, tmp_path: Path) -> Any:
    """A copy of the GPT-2 with other weights or another config."""
    from safetensors.torch import load_file, save_file

    def spoil(change: Any = None, **fields: Any) -> Path:
        place = Path(shutil.copytree(folders / "gpt2", tmp_path / "copy"))
        config = json.loads((place / "config.json").read_text("utf-8"))
        (place / "config.json").write_text(json.dumps(config | fields), "utf-8")
        if change is not None:
            state = load_file(place / "model.safetensors")
            change(state)
            save_file(state, place / "model.safetensors")
        return place

    return spoil


@pytest.mark.parametrize(
    ("name", "weight", "message"),
    [
        (
            "transformer.h.1.ln_2.bias",
            None,
            "1 of 36 are missing, .* 'decoder.layers.1.feed_forward_norm.b",
        ),
        ("extra", torch.ones(5), r"must belong to the family of the config: got 'extra' \[5\]"),
        (
            "transformer.h.2.ln_1.bias",
            torch.ones(3),
            r"it has no 'decoder.layers.2.attention_norm.bias' \[3\]",
        ),
        ("transformer.ln_f.weight", torch.ones(11), r"'decoder.norm.weight' is \[11\], not \[33\]"),
        ("transformer.ln_f.bias", torch.ones(33).int(), "is torch.int32; load quantised"),
        ("lm_head.weight", torch.ones(47, 33), "lm_head must equal the embedding .*: got other numbers"),
    ],
    ids=["missing", "unknown", "a layer too many", "shape", "quantised", "not tied"],
)
def test_every_weight_has_its_place_or_is_named(name: str, weight: Any, message: str, spoiled: Any) -> None:
    def change(state: dict[str, Tensor]) -> None:
        state[name] = weight
        if weight is None:
            del state[name]

    with pytest.raises(ArgumentError, match=message):
        load(spoiled(change), ours=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation_function": "mish"}, r"activation_function='mish' in gpt2 \(supported are relu"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True in gpt2"),
        ({"attention_sorcery": 3}, "attention_sorcery=3 in gpt2 .this field is unknown"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config=\{'bits': 4\} in gpt2"),
        ({"vocab_size": None}, r"got vocab_size=None in gpt2 \(this field is required\)"),
        ({"model_type": "mamba"}, "got 'mamba', not one of gpt2, bert, llama, mistral, qwen2, qwen3"),
    ],
)
def test_a_config_that_cannot_be_followed_is_refused_by_its_field(
    fields: Any, message: str, spoiled: Any
) -> None:
    with pytest.raises(ArgumentError, match=message):
        load(spoiled(**fields), ours=True)


def test_a_file_that_cannot_be_read_is_named(spoiled: Any) -> None:
    place = spoiled()
    (place / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ArgumentError, match=r"readable files: 'model.safetensors' is not"):
        load(place, ours=True)


def test_what_is_no_model_we_know_is_refused(theirs: Any) -> None:
    with pytest.raises(ArgumentError, match="one of BertModel: got BertForSequenceClassification"):
        load(bert())
    with pytest.raises(ArgumentError, match="or a model of transformers: got Linear"):
        load(nn.Linear(2, 3))
    with pytest.raises(
        ArgumentError, match="ours must be True for a loaded model: got False with a BertModel"
    ):
        load(theirs["bert"], ours=False)


# Encoder-decoder


def step_by_step(model: Transformer, ids: Tensor, target: Tensor) -> Tensor:
    """The paper's model in plain torch, with these weights: norms after, ReLU-like activation, sinusoids."""
    w, c = dict(model.named_parameters()), model.config

    def embedded(ids: Tensor) -> Tensor:
        x = w["embedding.tokens.weight"][ids] * c.embedding_scale
        for p in range(ids.shape[1]):
            for i in range(c.d_model):
                angle = torch.tensor(p / 10_000 ** (2 * (i // 2) / c.d_model), dtype=x.dtype)
                x[:, p, i] += angle.cos() if i % 2 else angle.sin()
        return x

    def attended(at: str, x: Tensor, y: Tensor, causal: bool) -> Tensor:
        q, k, v = (
            functional.linear(z, w[f"{at}.{n}_proj.weight"], w[f"{at}.{n}_proj.bias"])
            .unflatten(-1, (c.num_heads, -1))
            .transpose(1, 2)
            for z, n in ((x, "q"), (y, "k"), (y, "v"))
        )
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        heads = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return functional.linear(heads, w[f"{at}.out_proj.weight"], w[f"{at}.out_proj.bias"])

    def normed(at: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        spread = (centred.square().mean(-1, keepdim=True) + c.norm_eps).sqrt()
        return centred / spread * w[f"{at}.weight"] + w[f"{at}.bias"]

    def fed(at: str, x: Tensor) -> Tensor:
        up = functional.linear(x, w[f"{at}.up_proj.weight"], w[f"{at}.up_proj.bias"]).relu()
        return functional.linear(up, w[f"{at}.down_proj.weight"], w[f"{at}.down_proj.bias"])

    x, y = embedded(ids), embedded(target)
    for number in range(c.num_layers):
        at = f"encoder.layers.{number}"
        x = normed(f"{at}.attention_norm", x + attended(f"{at}.attention", x, x, False))
        x = normed(f"{at}.feed_forward_norm", x + fed(f"{at}.feed_forward", x))
    for number in range(c.num_layers):
        at = f"decoder.layers.{number}"
        y = normed(f"{at}.attention_norm", y + attended(f"{at}.attention", y, y, True))
        y = normed(f"{at}.cross_norm", y + attended(f"{at}.cross_attention", y, x, False))
        y = normed(f"{at}.feed_forward_norm", y + fed(f"{at}.feed_forward", y))
    return y @ w["embedding.tokens.weight"].T


@torch.no_grad()
def test_an_encoder_decoder_is_the_paper_step_by_step() -> None:
    model = translator(activation="relu", embedding_scale=13**0.5)
    ids, target = tokens(), tokens(length=5, seed=1)
    truth = step_by_step(model, ids, target)
    assert_judged(model(ids, target), truth, truth, dtype=torch.float64, size=10.0)
    plain = step_by_step(copy.deepcopy(model).float(), ids, target)
    assert_judged(model.float()(ids, target), plain, truth, dtype=torch.float32, size=10.0)
    assert len(model.hidden(ids, target, every=True)) == 3 and model.encode(ids).shape == (3, 7, 13)


@torch.no_grad()
def test_hidden_source_tokens_are_hidden_from_both_halves() -> None:
    model, ids, target = translator(), tokens(), tokens(length=5, seed=1)
    real = (torch.arange(7) < torch.tensor(LENGTHS)[:, None])[:, None, None]
    message = model(ids, target, lengths=LENGTHS, target_lengths=[5, 4, 3])
    torch.testing.assert_close(message[2, :3], model(ids[2:, :2], target[2:])[0, :3])
    masked = model(ids, target, mask=real)
    torch.testing.assert_close(masked[1], model(ids[1:2, :5], target[1:2])[0])
    with pytest.raises(MaskError, match="mask must only hide source tokens in an encoder-decoder: got right"):
        model(ids, target, mask=hw.Mask.causal())


# The cache


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {"rope": Rope(), "gated": True, "activation": "silu", "norm": "rms", "bias": False},
        {"positions": "learned", "max_length": 23, "windows": (3, None), "activation": "gelu_tanh"},
        {"alibi": True, "output": "own", "num_kv_heads": 1},
        {"positions": "sinusoidal", "qk_norm": "rms", "gate": "head", "sinks": True, "softcap": 5.0},
        {"relative_bias": Buckets(8, 16, both_ways=False), "scale": 1.0},
    ],
    ids=["rope", "learned", "alibi", "sinusoidal", "relative"],
)
def test_token_by_token_is_as_all_at_once(options: Any) -> None:
    model, ids = ours(**options), tokens()
    whole = model(ids)
    for cache in (model.cache(), model.cache(3, 11)):
        steps = [
            model(ids[:, :4], cache=cache),
            *(model(ids[:, i : i + 1], cache=cache) for i in range(4, 7)),
        ]
        torch.testing.assert_close(torch.cat(steps, 1), whole)
        assert cache.length == 7 and cache.batch == 3
        cache.crop(5)
        torch.testing.assert_close(model(ids[:, 5:], cache=cache, last=True), whole[:, -1:])
        cache.reset()
        assert cache.length == 0


@torch.no_grad()
def test_prompts_of_different_lengths_go_on_from_their_own_ends() -> None:
    for options in ({"rope": Rope()}, {"positions": "learned", "max_length": 23}):
        model, ids, more = ours(**options), tokens(), tokens(length=2, seed=1)
        cache = model.cache()
        ends = model(ids, lengths=LENGTHS, cache=cache, last=True)
        assert ends.shape == (3, 1, 47)
        cache.reorder([2, 0])
        message = model(more[:2], cache=cache)
        for row, was in enumerate((2, 0)):
            alone = torch.cat((ids[was, : LENGTHS[was]], more[row]))[None]
            truth = model(alone)
            torch.testing.assert_close(ends[was], truth[0, -3][None])
            torch.testing.assert_close(message[row], truth[0, -2:])


@torch.no_grad()
def test_the_source_is_read_once() -> None:
    model, ids, target = translator(), tokens(), tokens(length=5, seed=1)
    whole, cache = model(ids, target, lengths=LENGTHS), model.cache()
    first = model(ids, target[:, :3], lengths=LENGTHS, cache=cache)
    assert "and the source" in repr(cache)
    rest = model(None, target[:, 3:], cache=cache)
    torch.testing.assert_close(torch.cat((first, rest), 1), whole)
    cache.crop(3)
    cache.reorder(torch.tensor([1]))
    torch.testing.assert_close(model(None, target[1:2, 3:], cache=cache), whole[1:2, 3:])
    cache.reset()
    with pytest.raises(ArgumentError, match="ids must be given until a cache holds the source: got None"):
        model(None, target, cache=cache)


# Tools, and what modules go through


def test_heads_are_heard_ablated_weighed_and_pruned_without_an_adapter() -> None:
    model, ids = ours(rope=Rope()), tokens()
    with torch.no_grad(), hw.watch(model) as heads:
        whole = model(ids)
    assert list(heads) == [0, 1] and heads.paths[1] == "decoder.layers.1.attention"
    assert heads[1].entropy.shape == (3,)
    with torch.no_grad(), hw.ablate(model, [(1, 2)]):
        without = model(ids)
    assert not torch.allclose(without, whole)

    def loss(model: Any, batch: Tensor) -> Tensor:
        return functional.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    scores = hw.importance(model, [ids], loss, progress=False)
    assert list(scores) == [0, 1] and scores[0].shape == (3,)
    curve = hw.robustness(model, [ids], loss, scores=scores, repeats=1, points=[1], progress=False)
    assert curve.removed == [0, 1]
    monitor = hw.Monitor(model, every=1)
    with monitor.step():
        loss(model, ids).backward()
    assert "heads/1/2/entropy" in monitor.latest
    hw.prune(model, [(1, 2)])
    with torch.no_grad():
        torch.testing.assert_close(model(ids), without)


def test_both_halves_and_the_way_between_are_heard() -> None:
    model = translator()
    with torch.no_grad(), hw.watch(model) as heads:
        model(tokens(), tokens(length=5), lengths=LENGTHS)
    assert set(heads.stacks) == {
        f"{half}.layers.*.{part}"
        for half, part in (("encoder", "attention"), ("decoder", "attention"), ("decoder", "cross_attention"))
    }


GATED = {"gated": True, "activation": "silu", "norm": "rms", "rope": Rope(), "windows": (5, None)}


COMPILED = {"gated": GATED, "encoder": {"kind": "encoder", "token_types": 2, "embedding_norm": True}}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_a_model_is_compiled_whole(name: str) -> None:
    model, ids = ours(**COMPILED[name]), tokens()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids), model(ids))
    torch.testing.assert_close(compiled(tokens(2, 5)), model(tokens(2, 5)))


def test_weights_are_loaded_copied_cast_and_moved() -> None:
    model, ids = ours(**GATED), tokens()
    message = model(ids)
    new = ours(seed=1, **GATED)
    new.load_state_dict(model.state_dict())
    for other in (new, copy.deepcopy(model), copy.deepcopy(model).float().double().to("cpu")):
        assert other.decoder.layers[0].feed_forward._packed is not None
        assert (other(ids) - message).abs().max() <= 1e-5 * message.abs().max()
    half = copy.deepcopy(model).bfloat16()
    assert (
        half(ids).dtype == torch.bfloat16 and (half(ids) - message).abs().mean() < 0.1 * message.abs().mean()
    )


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_gate_and_up_are_one_product_until_somebody_listens(activation: str) -> None:
    feed = ours(**GATED | {"activation": activation}).decoder.layers[0].feed_forward
    x = torch.randn(2, 3, 13, dtype=torch.float64)
    with torch.no_grad():
        together = feed(x)
        gate, up = feed.gate_proj(x), feed.up_proj(x)
        acts = {"relu": gate.relu(), "gelu": gate * 0.5 * (1 + torch.erf(gate / 2**0.5))}
        acts["gelu_tanh"] = 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
        acts["silu"] = gate * gate.sigmoid()
        torch.testing.assert_close(together, feed.down_proj(acts[activation] * up))
    calls: list[Tensor] = []
    feed.up_proj.register_forward_hook(lambda module, arguments, message: calls.append(message))
    feed(x)
    torch.testing.assert_close(calls[0], up)


def test_one_relative_bias_is_shared_by_all_layers_of_a_half() -> None:
    model = ours(kind="encoder", relative_bias=Buckets(8, 16), num_layers=3)
    assert len({id(layer.attention.relative_bias) for layer in model.encoder.layers}) == 1
    assert len([name for name, _ in model.named_parameters() if "relative_bias" in name]) == 1


def test_windows_go_round() -> None:
    model = ours(num_layers=5, windows=(3, None, (2, 0)))
    windows = [layer.attention.window for layer in model.decoder.layers]
    assert windows == [3, None, (2, 0), 3, None]


def test_dropout_is_for_training() -> None:
    model, ids = ours(dropout=0.5), tokens()
    assert torch.equal(model(ids), model(ids))
    model.train()
    assert not torch.equal(model(ids), model(ids))
    attention = model.decoder.layers[0].attention
    assert attention.dropout == 0.5 and model.embedding.dropout == 0.5
    assert ours(dropout=0.5, attention_dropout=0.25, embedding_dropout=0.0).embedding.dropout == 0.0


def test_hidden_takes_no_other_words_than_a_call() -> None:
    """Words that layers know reached them past the model's own checks."""
    model = ours()
    for word in ("bias", "documents", "caches", "memories", "memory", "key"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{word}'"):
            model.hidden(tokens(), **{word: None})


def test_first_weights_keep_the_stream_at_its_size() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "d_model": 64, "num_heads": 4, "num_layers": 11}
    model = Transformer(TransformerConfig(**sizes, rope=Rope()))
    states = model.hidden(torch.randint(61, (3, 19)), every=True)
    assert states[-2].std() < 30 * states[0].std()
    assert functional.cross_entropy(model(torch.arange(61)[None])[0], torch.arange(61)) < 6


def test_types_and_positions_are_taken_as_given() -> None:
    model, ids = ours(kind="encoder", token_types=2, positions="learned", max_length=23), tokens()
    types = torch.tensor([0, 0, 0, 1, 1, 1, 1]).expand(3, -1)
    assert torch.equal(model(ids), model(ids, token_types=torch.zeros_like(ids)))
    assert not torch.allclose(model(ids), model(ids, token_types=types))
    order = torch.randperm(7)
    torch.testing.assert_close(model(ids[:, order], positions=order), model(ids)[:, order])


# What is refused


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"kind": "decorder"}, ArgumentError, "kind must be a known choice: got 'decorder'; did you mean"),
        *[({name: "other"}, ArgumentError, f"{name} must be .* got 'other'") for name in list(WORDS)[1:]],
        ({"positions": "learned"}, ArgumentError, "max_length must be given with positions='learned'"),
        ({"windows": [3]}, ArgumentError, r"windows must be a tuple of one entry or more: got \[3\]"),
        ({"windows": (0,)}, MaskError, "window must be at least 1: got 0"),
        (
            {"alibi": True, "relative_bias": Buckets()},
            ArgumentError,
            "alibi must be False with relative_bias: got True and Buckets",
        ),
        ({"num_layers": 0}, ShapeError, "num_layers must be a whole number of at least 1: got 0"),
        ({"vocab_size": 4.0}, ShapeError, "vocab_size must be .* got 4.0"),
        ({"d_ff": -3}, ShapeError, "d_ff must be .* got -3"),
        ({"max_length": 0}, ShapeError, "max_length must be .* got 0"),
        ({"num_heads": 3, "head_dim": None}, ShapeError, "num_heads must divide d_model"),
        ({"dropout": 1.5}, ArgumentError, "1.5"),
        ({"rope": Rope(dims=12)}, ShapeError, "12 of 8"),
    ],
)
def test_a_config_is_checked_when_it_is_made(options: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        ours(**options)


ENCODER, BOTH = {"kind": "encoder"}, {"kind": "encoder-decoder"}
LEARNED = {"positions": "learned", "max_length": 5}
CALLS: list[tuple[dict[str, Any], Any, type[Exception], str]] = [
    ({}, lambda m: m([[1, 2]]), ArgumentError, "ids must be a tensor of whole numbers: got list"),
    ({}, lambda m: m(torch.ones(2, 3)), ArgumentError, "whole numbers: got torch.float32"),
    ({}, lambda m: m(torch.ones(3).long()), ShapeError, r"ids must be \[B, T\], not empty: got \[3\]"),
    ({}, lambda m: m(tokens(), tokens()), ArgumentError, "target_ids must .* got a decoder"),
    ({}, lambda m: m(tokens(), target_lengths=[1]), ArgumentError, "target_lengths must .* a decoder"),
    ({}, lambda m: m(tokens(), token_types=tokens()), ArgumentError, "config.token_types=0"),
    (
        {},
        lambda m: m(tokens(), positions=torch.arange(7)),
        ArgumentError,
        r"positions must be None .* got int64 \[7\]",
    ),
    ({}, lambda m: m.encode(tokens()), ArgumentError, "encode must .* got a decoder"),
    (ENCODER, lambda m: m.cache(), ArgumentError, "cache must .* got an encoder"),
    (ENCODER, lambda m: m(tokens(), cache=ours().cache()), ArgumentError, "cache must .* got an encoder"),
    (LEARNED, lambda m: m(tokens()), ShapeError, r"ids must fit the model's max_length: 0 \+ 7 > 5"),
    (
        BOTH | {"token_types": 2},
        lambda m: m(tokens(), tokens(), token_types=tokens()),
        ArgumentError,
        r"token_types must be None .* got int64 \[3, 7\]",
    ),
    (BOTH, lambda m: m(tokens()), ArgumentError, "target_ids must be .* got NoneType"),
]


@pytest.mark.parametrize(("options", "call", "kind", "message"), CALLS)
def test_a_call_that_a_model_cannot_answer_is_refused(
    options: Any, call: Any, kind: Any, message: str
) -> None:
    with pytest.raises(kind, match=message):
        call(ours(**options))


STEPS = {"rope": {**GATED, "windows": (None,)}, "learned": {"positions": "learned", "max_length": 23}}


@torch.no_grad()
@pytest.mark.parametrize("name", STEPS)
def test_one_token_takes_the_shortest_way_unless_somebody_listens(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = ours(**STEPS[name]), tokens()
    truth = model(ids)[:, -1:]
    removed: list[int] = []
    shortest = layers.one_token
    monkeypatch.setattr(layers, "one_token", lambda *arguments: removed.append(1) or shortest(*arguments))

    def step() -> Tensor:
        cache = model.cache()
        model(ids[:, :-1], cache=cache)
        removed.clear()
        return model(ids[:, -1:], cache=cache)

    torch.testing.assert_close(step(), truth)
    assert removed
    calls: list[str] = []
    inside = {n: m for n, m in model.decoder.layers[1].named_modules() if not isinstance(m, nn.ModuleList)}
    for path, module in inside.items():
        hook = module.register_forward_hook(lambda *arguments, path=path: calls.append(path))
        torch.testing.assert_close(step(), truth)
        assert calls.pop() == path and not removed, path
        calls.clear()
        hook.remove()
    with hw.watch(model) as heads:
        torch.testing.assert_close(step(), truth)
    assert list(heads) == [0, 1] and not removed
    model.train()
    assert step() is not None and removed  # nothing is dropped in this one
    model.decoder.layers[1].feed_forward_norm = nn.Identity()
    assert not torch.allclose(step(), truth) and not removed
    model.decoder.layers[1].feed_forward = nn.Identity()
    assert step() is not None and not removed


def test_a_cache_in_which_a_step_was_interrupted_is_not_gone_on_with() -> None:
    model, ids = ours(rope=Rope()), torch.randint(47, (2, 6))
    cache = model.cache()
    with torch.no_grad():
        model(ids[:, :4], cache=cache)
        broken = model.decoder.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids[:, 4:5], cache=cache)
        broken.remove()
        with pytest.raises(ArgumentError, match=r"5 and 4, since a step .* use cache.crop\(4\)"):
            model(ids[:, 4:5], cache=cache)
        cache.crop(4)
        torch.testing.assert_close(model(ids[:, 4:], cache=cache), model(ids)[:, 4:])


def test_a_cache_of_something_else_is_refused() -> None:
    model, ids = ours(rope=Rope()), torch.randint(47, (2, 6))
    with pytest.raises(ShapeError, match="as many layers as the model: 3 and 2"):
        model(ids, cache=ours(rope=Rope(), num_layers=3).cache())
    with pytest.raises(ArgumentError, match="cache must be a ModelCache: got KVCache"):
        model(ids, cache=model.cache().layers[0])
    for other in (ours(seed=1, rope=Rope()), copy.deepcopy(model)):
        cache = other.cache()
        other(ids[:, :5], cache=cache)
        with pytest.raises(ArgumentError, match="got MultiHeadAttention and a cache of another"):
            model(ids[:, 5:], cache=cache)


def test_the_words_of_transformers_are_answered_with_ours() -> None:
    model = Transformer(TransformerConfig(vocab_size=11, d_model=8, num_heads=2, num_layers=1))
    arguments: Any
    for name, arguments, answer in (
        ("input_ids", torch.zeros(1, 3, dtype=torch.long), r"int64 \[1, 3\]; its name is ids here"),
        ("attention_mask", torch.ones(2, 3), r"\[2, 3\]; .*lengths=attention_mask.sum\(1\)"),
        ("past_key_values", None, r"None; create cache = model.cache\(\)"),
        ("labels", torch.ones(2), r"\[2\]; pass the logits"),
        ("token_type_ids", 7, "7; its name is token_types here"),
        ("output_attentions", True, "True; call the model inside `with headwise.watch"),
    ):
        with pytest.raises(ArgumentError, match=f"{name} .* {answer}"):
            model(**{name: arguments})
    with pytest.raises(TypeError, match="no argument 'lenghts': did you mean 'lengths'"):
        model(torch.zeros(1, 3, dtype=torch.long), lenghts=[3])
    with pytest.raises(TypeError, match="ids must be given: got none"):
        model()
