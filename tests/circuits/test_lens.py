"""The logit lens; the judge is a model cut off after a block."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from language_models import FAMILIES, POSITIONS, E, V, albert_for_tokens, family, inputs_for, spread
from torch import Tensor, nn

import headwise as hw
from headwise.errors import ArgumentError
from headwise.models import Transformer, TransformerConfig, load
from small_models import bert, hooks_on

LAYERS = {
    "GPT2": "transformer.h", "OPT": "model.decoder.layers", "Bert": "bert.encoder.layer",
    "T5": "decoder.block", "Falcon": "transformer.h",
}  # fmt: skip


def layers_of(name: str) -> str:
    """The path of a family's stack."""
    return LAYERS.get(name, "model.layers")


def cut(model: Any, name: str, count: int) -> Any:
    """The model with only its first blocks."""
    short = copy.deepcopy(model)
    parent, _, attribute = layers_of(name).rpartition(".")
    setattr(short.get_submodule(parent), attribute, short.get_submodule(layers_of(name))[:count])
    return short


@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_predicts_what_the_model_predicts_that_ends_there(name: str) -> None:
    model, inputs = family(name), inputs_for(name)
    position = POSITIONS.get(name)
    lens = hw.logit_lens(model, inputs, position=position)
    count = len(model.get_submodule(layers_of(name)))
    assert lens.log_probs.shape == (2, count + 1, V) and len(lens.blocks) == count
    for layers in range(1, count + 1):
        with torch.no_grad():
            logits = cut(model, name, layers)(**inputs).logits[:, -1 if position is None else position]
        expected = logits.float().log_softmax(-1)
        torch.testing.assert_close(lens.log_probs[:, layers], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("output", ["own", "tied"])
def test_our_own_model_ends_with_its_own_logits(output: Any) -> None:
    config = TransformerConfig(vocab_size=V, d_model=E, num_heads=3, num_layers=3, output=output)
    model, ids = spread(Transformer(config)), inputs_for("GPT2")["input_ids"]
    lens = hw.logit_lens(model, ids)
    with torch.no_grad():
        states = model.hidden(ids, every=True)
        logits = model(ids)[:, -1].float().log_softmax(-1)
    torch.testing.assert_close(lens.log_probs[:, -1], logits)
    assert len(states) == lens.log_probs.shape[1] == 4


def test_the_lens_shows_words_ranks_and_a_frame() -> None:
    mini = load("mini")
    ids = mini.tokenizer("The captain read the letter. Then the captain read the", return_tensors="pt")[
        "input_ids"
    ]
    lens = hw.logit_lens(mini.model, ids, tokenizer=mini.tokenizer)
    token, share = lens.top(1)[-1][0]
    with torch.no_grad():
        shares = mini.model(ids)[0, -1].softmax(-1)
    assert token.strip() == "letter" and share == pytest.approx(float(shares.max()), rel=1e-4)
    ranks = lens.rank(" letter")
    assert ranks.shape == (1, 9) and int(ranks[0, -1]) == 0 and int(ranks[0, 0]) > 0
    assert int(lens.rank(int(shares.argmin()))[0, -1]) == len(shares) - 1
    text = str(lens)
    assert text.startswith("Logit lens of sequence 0 of 1.") and text.count("\n") == 9 and "layer 7" in text
    frame = lens.to_pandas(2)
    assert len(frame) == 18 and frame["layer"].tolist()[:3] == [-1, -1, 0]
    with pytest.raises(ArgumentError, match="count must be from 1 to 8192: got 0"):
        lens.top(0)
    with pytest.raises(IndexError, match="batch must be one of 1 sequences: got 1"):
        lens.top(1, batch=1)
    assert hooks_on(mini.model) == 0


def test_padding_does_not_matter() -> None:
    model, ids = family("Llama"), inputs_for("Llama", batch=1)["input_ids"]
    alone = hw.logit_lens(model, {"input_ids": ids})
    padded = nn.functional.pad(ids, (0, 3), value=1)
    mask = nn.functional.pad(torch.ones_like(ids), (0, 3))
    lens = hw.logit_lens(model, {"input_ids": padded, "attention_mask": mask})
    torch.testing.assert_close(lens.log_probs, alone.log_probs, rtol=1e-4, atol=1e-4)


def test_what_has_no_lens_is_refused() -> None:
    model, inputs = family("GPT2"), inputs_for("GPT2")
    with pytest.raises(ArgumentError, match="position must be one of the logits: got 7, and they have 7"):
        hw.logit_lens(model, inputs, position=7)
    with pytest.raises(ArgumentError, match=r"model must return logits for each position: got \[1, 3\]"):
        hw.logit_lens(spread(bert()), {"input_ids": torch.ones(1, 3, dtype=torch.int64)})
    with pytest.raises(ArgumentError, match="position must be given: the model returns 7 rows of 53 numbers"):
        hw.logit_lens(family("Bert"), inputs)
    with pytest.raises(ArgumentError, match=r"model must run each block once: .* ran again"):
        hw.logit_lens(albert_for_tokens(), inputs, position=2)
    with pytest.raises(ArgumentError, match="model must be in eval mode"):
        hw.logit_lens(family("GPT2").train(), inputs)

    class Mixed(nn.Module):
        """Its output at a position depends on the others."""

        def forward(self, x: Tensor) -> Tensor:
            return x.mean(1, keepdim=True).expand_as(x)

    model.transformer.ln_f = Mixed().eval()
    with pytest.raises(ArgumentError, match=r"can be applied to one position: their logits are .* from the"):
        hw.logit_lens(model, inputs)
    model.transformer.ln_f = nn.Linear(E, E, bias=False).double().eval()
    model.transformer.ln_f.register_forward_pre_hook(lambda module, args: (args[0][:, :7],))
    hw.logit_lens(model, inputs)  # a hook that changes nothing for one position
    assert hooks_on(model) == 1


def test_an_error_of_the_last_modules_is_told() -> None:
    class Exact(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] != 7:
                raise ValueError(f"length is {x.shape[1]}")
            return x

    model = family("GPT2")
    model.transformer.ln_f = Exact().eval()
    with pytest.raises(ArgumentError, match="can be applied to one position: length is 4"):
        hw.logit_lens(model, inputs_for("GPT2"))
