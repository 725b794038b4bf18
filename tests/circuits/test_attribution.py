"""Parts of a logit; the judge is a forward in which a part is taken away and norms keep their scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from language_models import FAMILIES, POSITIONS, SIZES, E, V, albert_for_tokens, family, inputs_for, spread
from torch import Tensor, nn

import headwise as hw
from headwise.circuits.attribution import Attribution
from headwise.circuits.residual_stream import blocks_of
from headwise.errors import ArgumentError
from headwise.models import Transformer, TransformerConfig, load
from small_models import albert, bert, hooks_on, hugging_face, ours, torch_encoder


def total_of(parts: Attribution) -> Tensor:
    """The sum of all parts, [B]."""
    parts_by_kind = [parts.embedding[:, None], *parts.heads.values(), *parts.mlps.values(), parts.biases]
    return torch.stack([each.flatten(1).sum(1) if each.ndim > 1 else each for each in parts_by_kind]).sum(0)


class Frozen:
    """A second forward: norms and activations keep the factors of the first, and outputs can be replaced."""

    def __init__(self, model: nn.Module, writers: set[str]) -> None:
        self.model, self.writers = model, writers
        self.clean: dict[str, tuple[Tensor, Tensor]] = {}

    def is_frozen(self, path: str, module: nn.Module) -> bool:
        kind = type(module).__name__
        return "Norm" in kind or kind == "GELUActivation" or path.endswith("gate")

    def run(self, inputs: dict[str, Tensor], removed: dict[str, Tensor]) -> Tensor:
        """The logits, before a cap; what is in `removed` is subtracted from the output of a module."""
        handles, captured = [], []

        def hook(path: str) -> Callable[..., Any]:
            def change(module: nn.Module, args: Any, output: Tensor) -> Any:
                if path in self.writers:
                    values = self.clean.setdefault(path, (output, output))[1]
                    return values - removed.get(path, 0.0)
                if path not in self.clean:
                    self.clean[path] = (args[0], output)
                x, y = self.clean[path]
                if path.endswith("gate"):
                    return y
                moved = args[0] - x
                if "LayerNorm" in type(module).__name__ and "T5" not in type(module).__name__:
                    scale = (x.var(-1, correction=0, keepdim=True) + getattr(module, "eps", 1e-5)).rsqrt()
                    weight = getattr(module, "weight", None)
                    weight = 1.0 if weight is None else weight
                    weight = weight + 1.0 if "1P" in type(module).__name__ else weight
                    return y + (moved - moved.mean(-1, keepdim=True)) * scale * weight
                return y + moved * (y / x)

            return change

        for path, module in self.model.named_modules():
            if path in self.writers or self.is_frozen(path, module):
                handles.append(module.register_forward_hook(hook(path)))
        last: Any = self.model.get_output_embeddings()  # type: ignore[operator]
        handles.append(last.register_forward_hook(lambda module, args, output: captured.append(output)))
        with torch.no_grad():
            logits = self.model(**inputs).logits
        for handle in handles:
            handle.remove()
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return logits if cap is None else captured[-1]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_part_is_what_the_logit_loses_without_it(name: str) -> None:
    model, inputs = family(name), inputs_for(name)
    position = POSITIONS.get(name)
    parts = hw.attribution(model, inputs, 7, against=11, position=position)
    with torch.no_grad(), hw.collect(model) as outputs:
        model(**inputs)
    owners = {path: outputs._projection(path).path for path in parts.heads.paths}
    frozen = Frozen(model, {*owners.values(), *parts.mlps})
    at = -1 if position is None else position

    def difference(removed: dict[str, Tensor]) -> Tensor:
        logits = frozen.run(inputs, removed)[:, at]
        return logits[:, 7] - logits[:, 11]

    before = difference({})
    torch.testing.assert_close(parts.total, before, rtol=1e-6, atol=1e-9)
    for path in parts.heads.paths:
        for head in range(parts.heads[path].shape[1]):
            lost = before - difference({owners[path]: outputs.written(path)[:, head]})
            torch.testing.assert_close(parts.heads[path][:, head], lost, rtol=1e-5, atol=1e-6)
    for path, values in parts.mlps.items():
        lost = before - difference({path: frozen.clean[path][1]})
        torch.testing.assert_close(values, lost, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_parts_sum_to_the_logit(name: str) -> None:
    model, inputs = family(name), inputs_for(name)
    for options in ({}, {"against": 5}, {"by_position": True}):
        parts = hw.attribution(model, inputs, 7, position=POSITIONS.get(name), **options)
        exact = 1e-12 if name in ("GPT2", "OPT", "Phi", "Bert") else 1e-6  # RMS norms compute in float32
        assert bool(((total_of(parts) - parts.total).abs() <= exact * (1 + parts.total.abs())).all())


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_the_parts_of_our_own_model_sum_to_the_logit(kind: Any) -> None:
    config = TransformerConfig(vocab_size=V, d_model=E, num_heads=3, num_layers=3, kind=kind)
    model = spread(Transformer(config))
    ids = inputs_for("GPT2")["input_ids"]
    parts = hw.attribution(model, ids, 7, position=4)
    torch.testing.assert_close(parts.total, model(ids)[:, 4, 7])
    torch.testing.assert_close(total_of(parts), parts.total, rtol=1e-12, atol=1e-12)
    assert len(parts.heads) == len(parts.mlps) == 3


def test_the_total_is_the_logit_before_its_cap() -> None:
    model, inputs = family("Gemma2"), inputs_for("Gemma2")
    parts = hw.attribution(model, inputs, 7)
    capped = model(**inputs).logits[:, -1, 7]
    torch.testing.assert_close(3.0 * torch.tanh(parts.total / 3.0), capped)


def test_a_layer_that_runs_again_has_parts_of_each_run() -> None:
    model = albert_for_tokens()
    parts = hw.attribution(model, inputs_for("Bert"), 7, position=2)
    torch.testing.assert_close(total_of(parts), parts.total, rtol=1e-10, atol=1e-10)
    assert len(parts.heads) == 3 and len(parts.mlps) == 3
    assert [path.partition("#")[2] for path in parts.heads.paths] == ["", "1", "2"]
    assert all(bool((values != 0).any()) for values in parts.heads.values())


def test_torchs_own_layers_have_heads() -> None:
    class Classifier(nn.Module):
        def __init__(self, batch_first: bool) -> None:
            super().__init__()
            self.embedding = nn.Embedding(V, E)
            layer = nn.TransformerEncoderLayer(E, 3, 41, 0.0, batch_first=batch_first)
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.output = nn.Linear(E, 13)

        def forward(self, ids: Tensor) -> Tensor:
            return self.output(self.layers(self.embedding(ids)))

    model, ids = spread(Classifier(True)), inputs_for("GPT2")["input_ids"]
    parts = hw.attribution(model, ids, 7, position=3)
    assert [values.shape for values in parts.heads.values()] == [(2, 3)] * 2 and len(parts.mlps) == 2
    torch.testing.assert_close(parts.total, model(ids)[:, 3, 7])
    torch.testing.assert_close(total_of(parts), parts.total, rtol=1e-12, atol=1e-12)
    with pytest.raises(ArgumentError, match=r"got False in layers\.layers\.0\.self_attn"):
        hw.attribution(spread(Classifier(False)), ids, 7, position=3)


def test_classes_have_parts_through_the_pooler() -> None:
    model = spread(bert())
    inputs = {"input_ids": inputs_for("Bert")["input_ids"] % 29}
    parts = hw.attribution(model, inputs, 2, against=0)
    logits = model(**inputs).logits
    torch.testing.assert_close(parts.total, logits[:, 2] - logits[:, 0])
    torch.testing.assert_close(total_of(parts), parts.total, rtol=1e-10, atol=1e-10)


def test_padding_changes_nothing() -> None:
    model, ids = family("Llama"), inputs_for("Llama", batch=1)["input_ids"]
    alone = hw.attribution(model, {"input_ids": ids}, 7, by_position=True)
    for left, right in ((2, 0), (0, 3)):
        padded = nn.functional.pad(ids, (left, right), value=1)
        mask = nn.functional.pad(torch.ones_like(ids), (left, right))
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        inputs = {"input_ids": padded, "attention_mask": mask, "position_ids": positions}
        parts = hw.attribution(model, inputs, 7, by_position=True)
        real = slice(left, left + ids.shape[1])
        torch.testing.assert_close(parts.total, alone.total, rtol=1e-5, atol=1e-6)
        for layer, values in alone.heads.items():
            torch.testing.assert_close(parts.heads[layer][..., real], values, rtol=1e-4, atol=1e-6)
            assert bool((parts.heads[layer][..., right and real.stop :][..., :right] == 0).all())


def test_the_model_is_as_before() -> None:
    model, inputs = family("Llama"), inputs_for("Llama")
    model.model.embed_tokens.weight.requires_grad_(False)
    before = model(**inputs).logits
    frozen = [parameter.requires_grad for parameter in model.parameters()]
    with torch.no_grad():
        hw.attribution(model, inputs, 7)
    assert torch.equal(model(**inputs).logits, before) and hooks_on(model) == 0
    assert [parameter.requires_grad for parameter in model.parameters()] == frozen
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(ArgumentError, match="target must be from 0 to 52: got 53"):
        hw.attribution(model, inputs, 53)
    assert hooks_on(model) == 0
    assert [parameter.requires_grad for parameter in model.parameters()] == frozen


def test_a_number_for_each_position_sums_to_the_number() -> None:
    model, inputs = family("GPT2"), inputs_for("GPT2")
    whole, split = (hw.attribution(model, inputs, 7, by_position=each) for each in (False, True))
    torch.testing.assert_close(split.embedding.sum(1), whole.embedding)
    for layer, values in whole.heads.items():
        torch.testing.assert_close(split.heads[layer].sum(-1), values)
        assert split.heads[layer].shape == (2, 3, 7)
        assert bool(
            (split.heads[layer][..., :-1] == 0).all()
        )  # of other positions no path leads to the logit


def test_words_ids_and_tensors_are_targets() -> None:
    mini = load("mini")
    ids = mini.tokenizer("The cat sat on the", return_tensors="pt")["input_ids"]
    word = hw.attribution(mini.model, ids, " mat", tokenizer=mini.tokenizer)
    number = int(mini.tokenizer(" mat")["input_ids"][-1])
    for target in (number, [number], torch.tensor([number])):
        assert torch.equal(hw.attribution(mini.model, ids, target).total, word.total)
    with pytest.raises(
        ArgumentError, match="tokenizer must be given for a target in words: got ' mat' without"
    ):
        hw.attribution(mini.model, ids, " mat")
    with pytest.raises(ArgumentError, match="against must be one token: ' mat cat' is 2"):
        hw.attribution(mini.model, ids, 3, against=" mat cat", tokenizer=mini.tokenizer)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (-1, "target must be from 0 to 52: got -1"),
        ([1, 2, 3], "target must have an id for each sequence: got 3 for 2"),
        (torch.tensor(1.5), "target must be ids: got torch.float32"),
        (torch.tensor([[1]]), r"target must be ids: got torch.int64 \[1, 1\]"),
    ],
)
def test_wrong_targets_are_refused(target: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        hw.attribution(family("GPT2"), inputs_for("GPT2"), target)


def test_wrong_positions_are_refused() -> None:
    model, inputs = family("GPT2"), inputs_for("GPT2")
    with pytest.raises(ArgumentError, match="position must be one of the logits: got 7, and they have 7 pos"):
        hw.attribution(model, inputs, 3, position=7)
    with pytest.raises(ArgumentError, match="got 1, and they have no positions"):
        hw.attribution(spread(bert()), {"input_ids": torch.ones(1, 3, dtype=torch.int64)}, 1, position=1)
    with pytest.raises(ArgumentError, match="position must be given: the model returns 5 rows of 20 numbers"):
        hw.attribution(torch_encoder().eval(), torch.randn(2, 5, 20, dtype=torch.float64), 3)


def test_what_is_no_such_sum_is_refused() -> None:
    class Gate(nn.Module):
        """Not a module of the residual stream: its output is no linear function of its input."""

        def forward(self, x: Tensor) -> Tensor:
            return x * x.sigmoid()

    model, inputs = family("GPT2"), inputs_for("GPT2")
    gate = Gate().eval()
    gate.register_module("child", nn.Identity().eval())  # so that it is no plain activation
    model.transformer.ln_f = nn.Sequential(model.transformer.ln_f, gate).eval()
    with pytest.raises(ArgumentError, match=r"model must add what its layers write.*the parts sum to"):
        hw.attribution(model, inputs, 7)
    with pytest.raises(ArgumentError, match="model must have numbered blocks: its attention is at the model"):
        hw.attribution(hw.MultiHeadAttention(8, 2).eval(), torch.randn(1, 3, 8), 0)
    with pytest.raises(ArgumentError, match="model must have attention layers: found 0 in Linear"):
        blocks_of(nn.Linear(3, 2))
    with pytest.raises(ArgumentError, match="model must be in eval mode"):
        hw.attribution(family("GPT2").train(), inputs, 7)


def test_an_unknown_norm_is_named() -> None:
    class OddNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / x.abs().sum(-1, keepdim=True)

    model = family("GPT2")
    model.transformer.ln_f = OddNorm().eval()
    with pytest.raises(ArgumentError, match=r"not known: transformer\.ln_f"):
        hw.attribution(model, inputs_for("GPT2"), 7)


def test_blocks_are_found_by_their_numbers() -> None:
    assert [len(blocks) for blocks in blocks_of(ours()).values()] == [2]
    assert list(blocks_of(family("T5"))) == ["encoder.block", "decoder.block"]
    assert sum(map(len, blocks_of(albert()).values())) == 1


def test_parts_are_shown_as_text_frame_and_picture() -> None:
    pytest.importorskip("matplotlib")
    model, inputs = family("GPT2"), inputs_for("GPT2")
    parts = hw.attribution(model, inputs, 7)
    text = str(parts)
    assert text.startswith("Direct logit attribution, mean over 2 sequences.") and "9 heads" in text
    layer, head, value = parts.ranking()[0]
    assert value == pytest.approx(float(parts.heads[layer][:, head].mean()))
    assert value == pytest.approx(max((x for _, _, x in parts.ranking()), key=abs))
    frame = parts.to_pandas()
    assert list(frame.columns) == ["sequence", "part", "layer", "head", "value"]
    assert frame.groupby("sequence")["value"].sum().tolist() == pytest.approx(parts.total.tolist())
    split = hw.attribution(model, inputs, 7, by_position=True).to_pandas()
    assert split.groupby("sequence")["value"].sum().tolist() == pytest.approx(parts.total.tolist())
    assert set(split["position"]) == {-1, *range(7)}
    figure = parts.plot()
    cells = figure.axes[0].images[0].get_array()
    assert cells.shape == (3, 3) and float(cells[layer, head]) == pytest.approx(value)


def test_half_precision_sums_within_its_rounding() -> None:
    model, inputs = family("Llama").bfloat16(), inputs_for("Llama")
    parts = hw.attribution(model, inputs, 7)
    exact = hw.attribution(model.double(), inputs, 7)
    assert bool(((parts.total - exact.total).abs() < 0.05 * (1 + exact.total.abs())).all())


class Block(nn.Module):
    """Attention and an MLP, each behind a norm; without attention, the MLP alone."""

    def __init__(self, has_attention: bool = True) -> None:
        super().__init__()
        self.attention = hw.MultiHeadAttention(E, 3) if has_attention else None
        self.norm, self.norm_2 = nn.LayerNorm(E), nn.LayerNorm(E)
        self.up, self.down = nn.Linear(E, 41), nn.Linear(41, E)

    def forward(self, x: Tensor) -> Tensor:
        if self.attention is not None:
            x = x + self.attention(self.norm(x))[0]
        return x + self.down(self.up(self.norm_2(x)).relu())


class Model(nn.Module):
    """Blocks in one or two stacks, which may run in another order than they are numbered."""

    def __init__(self, blocks: list[Block], late: list[Block], order: int = 1, head: Any = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, E)
        self.layers, self.late, self.order = nn.ModuleList(blocks), nn.ModuleList(late), order
        self.norm = nn.LayerNorm(E)
        self.head = nn.Identity() if head is None else head
        self.output = nn.Linear(E, V)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in [*list(self.layers)[:: self.order], *self.late]:
            x = block(x)
        return self.output(self.head(self.norm(x)))


def check_heads(model: nn.Module, ids: Tensor, count: int) -> None:
    """Assert that all layers have parts that sum to the logit; heads' are those of a fixed last norm."""
    parts = hw.attribution(model, ids, 7, position=4)
    assert len(parts.heads) == count and all(bool((values != 0).all()) for values in parts.heads.values())
    torch.testing.assert_close(parts.total, model(ids)[:, 4, 7])
    torch.testing.assert_close(total_of(parts), parts.total, rtol=1e-12, atol=1e-12)
    states: list[Tensor] = []
    norm: Any = model.norm
    handle = norm.register_forward_hook(lambda module, args, output: states.append(args[0]))
    with torch.no_grad(), hw.collect(model) as outputs:
        model(ids)
    handle.remove()
    scale = (states[0].var(-1, correction=0) + norm.eps).rsqrt()[:, 4, None]
    weight = model.output.weight[7] * norm.weight  # type: ignore[union-attr,operator]
    for path, values in parts.heads.items():
        written = outputs.written(path)[:, :, 4]  # [B, H, E]
        own = ((written - written.mean(-1, keepdim=True)) * scale[:, None] * weight).sum(-1)
        torch.testing.assert_close(values, own)


def test_stacks_that_follow_each_other_and_blocks_in_any_order_have_all_parts() -> None:
    ids = inputs_for("GPT2")["input_ids"]
    check_heads(spread(Model([Block(), Block()], [Block()])), ids, 3)
    check_heads(spread(Model([Block(), Block(), Block()], [], order=-1)), ids, 3)


def test_blocks_without_attention_are_mlps() -> None:
    ids = inputs_for("GPT2")["input_ids"]
    for places in ((False, True, True), (True, False, True), (True, True, False)):
        model = spread(Model([Block(place) for place in places], []))
        check_heads(model, ids, 2)
        assert list(hw.attribution(model, ids, 7, position=4).mlps) == [f"layers.{n}.down" for n in range(3)]


def test_a_module_behind_the_blocks_that_mixes_channels_is_no_activation() -> None:
    class Own(nn.Module):
        """A linear map that is not nn.Linear."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(E, E))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    model, ids = spread(Model([Block(), Block()], [], head=Own())), inputs_for("GPT2")["input_ids"]
    parts = hw.attribution(model, ids, 7, position=4)
    torch.testing.assert_close(total_of(parts), parts.total, rtol=1e-12, atol=1e-12)
    with torch.no_grad(), hw.collect(model) as outputs:
        model(ids)
    states: list[Tensor] = []
    model.norm.register_forward_hook(lambda module, args, output: states.append(args[0]))
    model(ids)
    scale = (states[0].var(-1, correction=0) + model.norm.eps).rsqrt()[:, 4, None]
    weight = model.norm.weight * (model.head.weight @ model.output.weight[7])
    written = outputs.written(1)[:, :, 4]
    own = ((written - written.mean(-1, keepdim=True)) * scale[:, None] * weight).sum(-1)
    torch.testing.assert_close(parts.heads[1], own.detach())


def test_a_stream_that_layers_project_is_refused() -> None:
    hf = hugging_face()
    sizes = SIZES | {"num_attention_heads": 4, "intra_bottleneck_size": 16, "embedding_size": 16}
    model = spread(hf.MobileBertForMaskedLM(hf.MobileBertConfig(**sizes)))
    with pytest.raises(ArgumentError, match=r"to one residual stream: no path leads from .* to the logits"):
        hw.attribution(model, inputs_for("Bert"), 7, position=2)


def test_a_constant_beside_the_logits_is_refused() -> None:
    hf = hugging_face()
    sizes = {"vocab_size": V, "d_model": E, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 41}
    sizes |= {"encoder_attention_heads": 3, "decoder_attention_heads": 3, "decoder_ffn_dim": 41}
    model = spread(hf.BartForConditionalGeneration(hf.BartConfig(**sizes)))
    inputs = inputs_for("T5")
    parts = hw.attribution(model, inputs, 7)
    torch.testing.assert_close(parts.total, model(**inputs).logits[:, -1, 7])
    model.final_logits_bias += 1.5
    with pytest.raises(ArgumentError, match="the parts sum to"):
        hw.attribution(model, inputs, 7)


def test_a_model_of_inference_mode_is_refused_and_unchanged() -> None:
    with torch.inference_mode():
        model = Model([Block()], [])
    before = [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(ArgumentError, match=r"model must be made outside of torch.inference_mode: Model has"):
        hw.attribution(model.eval(), inputs_for("GPT2")["input_ids"], 7, position=4)
    assert [parameter.requires_grad for parameter in model.parameters()] == before and hooks_on(model) == 0
    model = spread(Model([Block()], []))
    with torch.inference_mode():
        parts = hw.attribution(model, inputs_for("GPT2")["input_ids"], 7, position=4)
    torch.testing.assert_close(total_of(parts), parts.total)


def test_a_forward_without_gradients_is_refused() -> None:
    class Silent(Model):
        @torch.no_grad()
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids)

    with pytest.raises(ArgumentError, match="with gradients: Silent gives none; remove no_grad"):
        hw.attribution(spread(Silent([Block()], [])), inputs_for("GPT2")["input_ids"], 7, position=4)


def test_parts_of_a_position_need_outputs_in_the_order_of_tokens() -> None:
    hf = hugging_face()
    model = spread(hf.BertForMaskedLM(hf.BertConfig(**SIZES, chunk_size_feed_forward=1)))
    inputs = inputs_for("Bert")
    with pytest.raises(
        ArgumentError, match=r"by_position must be False for this model: .* writes 1 of 7 pos"
    ):
        hw.attribution(model, inputs, 7, position=3, by_position=True)
    parts = hw.attribution(model, inputs, 7, position=3)
    torch.testing.assert_close(total_of(parts), parts.total, rtol=1e-10, atol=1e-10)


def test_choices_are_summed_for_each_example() -> None:
    hf = hugging_face()
    model = spread(hf.BertForMultipleChoice(hf.BertConfig(**SIZES)))
    ids = torch.randint(3, V, (2, 3, 7), generator=torch.Generator().manual_seed(1))
    parts = hw.attribution(model, {"input_ids": ids}, 2, against=1)
    logits = model(input_ids=ids).logits
    torch.testing.assert_close(parts.total, logits[:, 2] - logits[:, 1])
    torch.testing.assert_close(total_of(parts), parts.total, rtol=1e-10, atol=1e-10)


def test_states_of_other_shapes_are_refused() -> None:
    class Flat(Model):
        def forward(self, ids: Tensor) -> Tensor:
            return self.output(self.layers[0](self.embedding(ids)[0]))

    with pytest.raises(
        ArgumentError, match=r"model must pass states \[B, T, E\] to its blocks: Block gets none"
    ):
        hw.attribution(spread(Flat([Block()], [])), inputs_for("GPT2")["input_ids"], 7, position=4)


def test_a_gated_layer_is_refused_by_name() -> None:
    model = Model([Block()], [])
    model.layers[0].attention = hw.MultiHeadAttention(E, 3, gate="head")
    with pytest.raises(ArgumentError, match=r"attribution needs a known output projection: .*gate='head'"):
        hw.attribution(spread(model), inputs_for("GPT2")["input_ids"], 7, position=4)


def test_a_head_that_is_switched_off_adds_nothing() -> None:
    model, ids = spread(Model([Block(), Block()], [])), inputs_for("GPT2")["input_ids"]
    with hw.ablate(model, [(0, 1)]):
        parts = hw.attribution(model, ids, 7, position=4)
    assert bool((parts.heads[0][:, 1] == 0).all()) and bool((parts.heads[1] != 0).all())
    torch.testing.assert_close(total_of(parts), parts.total, rtol=1e-12, atol=1e-12)
