"""What each head does; the judge is a copy of the model with the head's part of W_O set to 0, in float64."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.errors import ArgumentError, AttentionBypassed
from headwise.models import Transformer, TransformerConfig
from headwise.models.batches import run
from judge import error
from small_models import (
    VOCABULARY,
    Stack,
    albert,
    bert,
    gpt2,
    hooks_on,
    hugging_face,
    llama,
    numbers,
    ours,
    tokens,
    torch_encoder,
)

EXACT = 1e-10  # of a float64 model


@torch.no_grad()
def divergence(before: Tensor, after: Tensor) -> float:
    """Of next words, from logits [V]."""
    on, off = before.softmax(-1), after.softmax(-1)
    return float((on * (on / off).log()).sum())


def moved(before: Tensor, after: Tensor) -> float:
    """Of an output, [T, E]."""
    shares = [float((b - a).norm() / b.norm()) for a, b in zip(after, before, strict=True)]
    return sum(shares) / len(shares)


def without(model: nn.Module, projection: str, width: int, head: int, across: bool = True) -> nn.Module:
    """A copy whose W_O is deaf to a head; across: W_O is [E, H * Dv], as in nn.Linear."""
    copied = copy.deepcopy(model)
    weight = copied.get_parameter(projection)
    with torch.no_grad():
        part = weight[:, head * width : (head + 1) * width] if across else weight[head * width :][:width]
        part.zero_()
    return copied


def agree(actual: Any, layer: Any, expected: list[float]) -> None:
    truth = torch.tensor(expected, dtype=torch.float64)
    assert error(actual[layer], truth) < EXACT * max(1.0, float(truth.abs().max()))


def small_transformer(**settings: Any) -> Transformer:
    sizes = {"vocab_size": VOCABULARY, "d_model": 35, "num_heads": 5, "num_layers": 2, "max_length": 23}
    torch.manual_seed(0)
    return Transformer(TransformerConfig(**(sizes | settings))).double().eval()


# The next token


def test_the_effect_of_a_head_is_the_divergence_of_the_next_tokens_without_it() -> None:
    model, ids = gpt2(), tokens(1)
    actual = hw.effects(model, ids, progress=False)
    assert (actual.of, actual.unit, actual.sequences) == ("next token", "nats", 1)
    with torch.no_grad():
        before = model(ids).logits[0, -1]
        for layer in range(2):
            name = f"transformer.h.{layer}.attn.c_proj.weight"
            after = [without(model, name, 11, head, across=False)(ids).logits[0, -1] for head in range(3)]
            agree(actual, layer, [divergence(before, each) for each in after])
            for head, logits in enumerate(after):
                words = actual.after(layer, head)
                assert [word for word, _ in words] == [str(i) for i in logits.topk(10).indices.tolist()]
                assert words[0][1] == pytest.approx(float(logits.softmax(-1).max()), rel=EXACT)
    assert actual.before[0][0][1] == pytest.approx(float(before.softmax(-1).max()), rel=EXACT)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing(side: str) -> None:
    model = llama()
    whole = tokens(2, 7)
    short = whole[1:, :5]
    padding = torch.zeros(1, 2, dtype=torch.long)
    ids = torch.cat([short, padding] if side == "right" else [padding, short], 1)
    ids = torch.cat([whole[:1], ids])
    real = (ids != 0).long()  # positions as for the text alone: theirs are rotated in float32
    inputs = {"input_ids": ids, "attention_mask": real, "position_ids": (real.cumsum(1) - 1).clamp(min=0)}
    actual = hw.effects(model, inputs, progress=False)
    alone = [hw.effects(model, {"input_ids": text}, progress=False) for text in (whole[:1], short)]
    for layer in range(2):
        each = torch.stack([result[layer] for result in alone], 1)
        assert error(actual.by_sequence[layer], each) < EXACT
        assert error(actual[layer], each.mean(1)) < EXACT
    assert [words[0][0] for words in actual.before] == [result.before[0][0][0] for result in alone]
    with torch.no_grad():
        before = model(short).logits[0, -1]
        after = without(model, "model.layers.1.self_attn.o_proj.weight", 8, 4)(short).logits[0, -1]
    assert float(actual.by_sequence[1][4, 1]) == pytest.approx(divergence(before, after), rel=1e-8)


def test_a_transformer_of_ours_is_asked_for_its_next_token_up_to_its_lengths() -> None:
    model, ids = small_transformer(kind="decoder"), tokens(2)
    actual = hw.effects(model, {"ids": ids, "lengths": torch.tensor([7, 3])}, progress=False)
    alone = hw.effects(model, ids[1:, :3], progress=False)
    assert actual.of == alone.of == "next token"
    assert error(actual.by_sequence[1][:, 1], alone[1]) < EXACT
    with torch.no_grad(), hw.ablate(model, [(1, 2)]):
        after = model(ids[1:, :3])[0, -1]
    assert float(alone[1][2]) == pytest.approx(divergence(model(ids[1:, :3])[0, -1], after), rel=1e-8)


def test_an_encoder_decoder_is_asked_at_the_last_position_of_its_target() -> None:
    model, source, target = small_transformer(kind="encoder-decoder"), tokens(1, 7), tokens(1, 5, seed=1)
    actual = hw.effects(model, (source, target), progress=False)
    path = actual.paths[-1]
    with torch.no_grad():
        before = model(source, target)[0, -1]
        with hw.ablate(model, [(path, 3)]):
            after = model(source, target)[0, -1]
    assert len(actual.paths) == 6  # of the encoder, and two kinds of the decoder
    assert float(actual[path][3]) == pytest.approx(divergence(before, after), rel=1e-8)


class Words(nn.Module):
    """A model of one's own: tokens in, logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.attention = nn.Embedding(13, 8), hw.MultiHeadAttention(8, 2, causal=True)
        self.output = nn.Linear(8, 13)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.output(x + self.attention(x)[0])


def test_of_a_model_of_ones_own_the_embedding_tells_that_its_answer_is_words() -> None:
    model, ids = Words().double().eval(), torch.tensor([[3, 1, 4]])
    actual = hw.effects(model, ids, top=3)
    assert (actual.of, len(actual.before[0])) == ("next token", 3)
    with torch.no_grad():
        after = without(model, "attention.out_proj.weight", 4, 1)(ids)[0, -1]
    agree(actual, 0, [float(actual[0][0]), divergence(model(ids)[0, -1], after)])


class Named:
    """A tokenizer of 13 tokens, which are numbers, and the fourth a mask."""

    mask_token_id, all_special_ids = 3, [3]

    def __len__(self) -> int:
        return 11

    def __call__(self, text: str, *args: Any, **options: Any) -> dict[str, Any]:
        return {"input_ids": list(map(int, text.split()))}

    def convert_ids_to_tokens(self, ids: int) -> str:
        return f"t{ids}"

    def decode(self, tokens: list[int], *, clean_up_tokenization_spaces: bool) -> str:
        return f" t{tokens[0]}\x1b"


def test_words_have_the_names_of_the_tokenizer_and_beyond_it_their_numbers() -> None:
    actual = hw.effects(Words().eval(), torch.tensor([[3, 1, 4]]), tokenizer=Named(), top=13)
    assert sorted(word for word, _ in actual.before[0]) == sorted(
        [*(f"t{i}\x1b" for i in range(11)), "11", "12"]
    )
    assert "\x1b" not in str(actual)


def test_an_impossible_word_leaves_the_divergence_a_number() -> None:
    class Never(Words):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids).index_fill(-1, torch.tensor([5]), -math.inf)

    actual = hw.effects(Never().eval(), torch.tensor([[3, 1, 4]]))
    assert actual[0].isfinite().all() and (actual[0] > 0).all()


# A masked token


def test_a_model_that_fills_gaps_is_asked_at_the_first_mask() -> None:
    hf = hugging_face()
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 1, "intermediate_size": 7}
    torch.manual_seed(0)
    model = hf.BertForMaskedLM(hf.BertConfig(vocab_size=13, max_position_embeddings=7, **sizes))
    model = model.double().eval()
    ids = torch.tensor([[1, 3, 5, 3, 2], [1, 4, 6, 3, 2]])
    actual = hw.effects(model, {"input_ids": ids}, tokenizer=Named())
    assert actual.of == "masked token"
    name = "bert.encoder.layer.0.attention.output.dense.weight"
    with torch.no_grad():
        before, after = model(ids).logits, [without(model, name, 4, head)(ids).logits for head in range(3)]
    for batch, at in enumerate((1, 3)):
        expected = [divergence(before[batch, at], each[batch, at]) for each in after]
        assert actual.by_sequence[0][:, batch].tolist() == pytest.approx(expected, rel=1e-8)
    unmasked = hw.effects(model, {"input_ids": ids.clamp(min=4)}, tokenizer=Named())
    assert (unmasked.of, unmasked.before) == ("output", None)


# An output


def test_of_an_encoder_it_is_how_far_its_output_moves_at_real_positions() -> None:
    model, x = torch_encoder(), numbers(2, 7, 20)
    padding = torch.arange(7) >= torch.tensor([[7], [5]])
    actual = hw.effects(model, {"src": x, "src_key_padding_mask": padding}, progress=False)
    assert (actual.of, actual.unit, actual.before, actual.after(0, 1)) == (
        "output",
        "of its norm",
        None,
        None,
    )
    with torch.no_grad():
        before = [model(x[:1])[0], model(x[1:, :5])[0]]
        cut = [without(model, "layers.0.self_attn.out_proj.weight", 5, head) for head in range(4)]
        expected = [[moved(before[0], each(x[:1])[0]), moved(before[1], each(x[1:, :5])[0])] for each in cut]
    assert error(actual.by_sequence[0], torch.tensor(expected, dtype=torch.float64)) < EXACT


# Each: the model, its inputs, its last output projection, and the width of a head in it.
MODELS: dict[str, Callable[[], tuple[nn.Module, Any, str, int]]] = {
    "ours": lambda: (ours(), numbers(1, 7, 13), "layers.1.out_proj.weight", 7),
    "one module": lambda: (hw.MultiHeadAttention(12, 3), numbers(1, 5, 12), "out_proj.weight", 4),
    "torch's class": lambda: (nn.MultiheadAttention(12, 3), (numbers(5, 1, 12),) * 3, "out_proj.weight", 4),
    "unbatched": lambda: (nn.MultiheadAttention(12, 3), (numbers(5, 12),) * 3, "out_proj.weight", 4),
    "classes": lambda: (bert(), tokens(1), "bert.encoder.layer.1.attention.output.dense.weight", 7),
    "hidden states": lambda: (
        small_transformer(kind="encoder", output=None),
        tokens(1),
        "encoder.layers.1.attention.out_proj.weight",
        7,
    ),
}


def flat(answer: Any) -> Tensor:
    """[positions, E]"""
    answer = getattr(answer, "logits", answer)
    answer = answer[0] if isinstance(answer, tuple) else answer
    return answer.reshape(-1, answer.shape[-1])


@pytest.mark.parametrize("name", MODELS)
def test_any_models_output_is_compared_position_by_position(name: str) -> None:
    model, inputs, projection, width = MODELS[name]()
    actual = hw.effects(model.double().eval(), inputs, progress=False)
    assert actual.of == "output"
    with torch.no_grad():
        before = flat(run(model, inputs))
        after = [
            flat(run(without(model, projection, width, head), inputs)) for head in range(len(actual[-1]))
        ]
    agree(actual, -1, [moved(before, each) for each in after])


def test_what_is_zero_before_is_left_out_and_all_of_it_is_no_number() -> None:
    model = hw.MultiHeadAttention(6, 2).eval()
    with torch.no_grad():
        model.out_proj.weight.zero_()
    actual = hw.effects(model, torch.randn(1, 3, 6))
    assert actual[0].isnan().all() and "nan" in str(actual)
    with hw.watch(model) as heads:
        model(torch.randn(1, 3, 6))
    assert [row["effect"] for row in actual.to_page(heads)["heads"]] == [None, None]


def test_maps_of_features_are_compared_whole() -> None:
    class Folded(Stack):
        def forward(self, x: Tensor, mask: Any = None) -> Tensor:
            return super().forward(x, mask).unflatten(1, (3, 2))

    model, x = Folded(hw.MultiHeadAttention(8, 2)).double().eval(), numbers(2, 6, 8)
    actual = hw.effects(model, x)
    with torch.no_grad():
        before, after = model(x), without(model, "layers.0.out_proj.weight", 4, 1)(x)
    expected = [float((a - b).norm() / b.norm()) for a, b in zip(after, before, strict=True)]
    assert actual.by_sequence[0][1].tolist() == pytest.approx(expected, rel=1e-8)


# The answer


def test_a_layer_that_runs_again_is_off_each_time_and_every_visit_is_on_the_page() -> None:
    model, ids = albert(), tokens(1)
    actual = hw.effects(model, {"input_ids": ids}, progress=False)
    with hw.watch(model) as heads:
        model(input_ids=ids)
    assert len(actual.paths) == 1 and len(heads.paths) == 3
    assert actual.to_page(heads)["sentence"].endswith(
        " In a layer that runs several times, the head is off every time."
    )
    rows = actual.to_page(heads)["heads"]
    assert [(row["layer"], row["head"]) for row in rows] == [(i, j) for i in range(3) for j in range(5)]
    assert rows[0]["effect"] == rows[5]["effect"] == pytest.approx(float(actual[actual.paths[0]][0]))


def test_the_page_is_given_words_and_numbers_by_layers_as_the_heads_count_them() -> None:
    model, ids = gpt2(), tokens(2)
    actual = hw.effects(model, ids, top=2)
    with hw.watch(model) as heads:
        model(ids[:1])
    data = actual.to_page(heads)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert {name: data[name] for name in ("of", "unit")} == {"of": "next token", "unit": "nats"}
    assert data["before"] == [list(word) for word in actual.before[0]]
    assert data["sentence"].endswith("Averaged over 2 texts. The tokens are those of the first text.")
    (row,) = [row for row in data["heads"] if (row["layer"], row["head"]) == (1, 2)]
    assert row["effect"] == float(actual[1][2]) and len(row["after"]) == 2
    second = actual.to_page(heads, batch=1)
    assert second["before"] == [list(word) for word in actual.before[1]]
    assert second["heads"][5]["effect"] == float(actual.by_sequence[1][2, 1])
    assert "mean" not in second["sentence"]


def test_it_prints_as_a_table_of_layers_and_the_heads_that_do_most() -> None:
    actual = hw.effects(gpt2(), tokens(1))
    lines = str(actual).splitlines()
    assert lines[0] == (
        "Effect of 6 heads on the next token, each switched off alone, over 1 sequence (KL divergence, nats)."
    )
    assert [line.split()[:2] for line in lines[1:3]] == [["layer", "0"], ["layer", "1"]]
    best = actual.ranking()[0]
    assert lines[4].startswith(f"Without layer {best.layer} head {best.head} ({best.score:.3g}): ")
    assert len(lines) == 7


def test_progress_is_told_of_every_head_and_the_model_is_as_it_was() -> None:
    model, message = gpt2(), []
    state, hooks = copy.deepcopy(model.state_dict()), hooks_on(model)
    hw.effects(model, tokens(1), progress=lambda done, of: message.append((done, of)))
    assert message == [(done, 6) for done in range(1, 7)]
    assert hooks_on(model) == hooks and not model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


# What is refused


def test_a_model_in_training_is_refused_with_its_dropout() -> None:
    model = gpt2(attn_pdrop=0.3)
    model.transformer.h[1].attn.train()
    with pytest.raises(ArgumentError, match=r"GPT2LMHeadModel is in training, with dropout 0\.3; use model"):
        hw.effects(model, tokens(1))
    assert not model.training and model.transformer.h[1].attn.training
    with pytest.raises(ArgumentError, match="MultiHeadAttention is in training; use"):
        hw.effects(hw.MultiHeadAttention(8, 2), numbers(1, 3, 8))


def test_what_cannot_be_measured_is_refused_with_its_value() -> None:
    model, ids, two = gpt2(), tokens(1), {"input_ids": tokens(2)}
    empty, short = torch.tensor([[1] * 7, [0] * 7]), torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    for match, inputs, options in (
        ("got 'The cat'; use tokenizer", "The cat", {}),
        *(
            (f"top must be a whole number of at least 1: got {top}", ids, {"top": top})
            for top in (0, 1.5, True)
        ),
        ("tokenizer must name tokens: str has no", ids, {"tokenizer": "gpt2"}),
        ("must not hold a cache: got past_key_values", {"input_ids": ids, "past_key_values": object()}, {}),
        ("fallback must be None, 'eager' or 'skip': got 'all'", ids, {"fallback": "all"}),
        ("sequence 1 holds 0 of 7", two | {"attention_mask": empty}, {}),
        (r"gave \[2, 1\] for padded \[2, 7\]", two | {"attention_mask": short, "logits_to_keep": 1}, {}),
    ):
        with pytest.raises(ArgumentError, match=match):
            hw.effects(model, inputs, **options)
    with pytest.raises(ArgumentError, match=r"must be a .*Module: got str"):
        hw.effects("gpt2", ids)  # type: ignore[arg-type]
    with pytest.raises(AttentionBypassed, match="Linear ran 1 times without any"):
        hw.effects(nn.Linear(3, 3).eval(), torch.zeros(1, 3))


def test_an_answer_without_numbers_is_refused() -> None:
    class Silent(Stack):
        def forward(self, x: Tensor, mask: Any = None) -> Any:
            super().forward(x, mask)
            return self.messages

    model = Silent(hw.MultiHeadAttention(6, 2)).eval()
    for messages, message in ((None, "got NoneType"), ({"loss": torch.zeros(())}, "got dict")):
        model.messages = messages
        with pytest.raises(ArgumentError, match=f"a tensor of at least two dimensions: {message}"):
            hw.effects(model, torch.randn(1, 3, 6))
    model.messages = torch.tensor([[[1.0, math.nan, 3.0]]])
    with pytest.raises(ArgumentError, match="1 of 3 outputs of Silent are NaN or infinite"):
        hw.effects(model, torch.randn(1, 3, 6))


def test_heads_and_sequences_that_are_not_there_are_refused() -> None:
    model, other = gpt2(), hw.MultiHeadAttention(8, 2).eval()
    actual = hw.effects(model, tokens(1))
    with pytest.raises(ArgumentError, match="head must be one of 0 to 2: got 3"):
        actual.after(0, 3)
    with pytest.raises(IndexError, match="one of 1 sequences: got 1"):
        actual.after(0, 2, batch=1)
    with hw.watch(other) as heads:
        other(torch.randn(1, 3, 8))
    with pytest.raises(
        ArgumentError,
        match=r"layers transformer\.h\.0\.attn, transformer\.h\.1\.attn, heads has layers the model",
    ):
        actual.to_page(heads)
    with pytest.raises(IndexError, match="one of 1 sequences: got -2"):
        actual.to_page(heads, batch=-2)
    three = hw.effects(hw.MultiHeadAttention(9, 3).eval(), torch.randn(1, 3, 9))
    with pytest.raises(ArgumentError, match="the model has 2 heads there and 3 in effects"):
        three.to_page(heads)
