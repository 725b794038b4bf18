"""A model whose circuit is known, its weights set by hand; and a tokenizer of few words.

The stream holds blocks: the token, its position, the token before, what is said. In layer 0 a head goes by
position to the token before and brings it along; in layer 1 a head asks with the token for the place whose
token before is the same, and says what it finds there: induction. All other heads are random and quiet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from headwise.models import Transformer, TransformerConfig

VOCABULARY, LENGTH, HEADS = 67, 47, 3
PREVIOUS, INDUCTION = (0, 2), (1, 1)  # (layer, head)
SHARP = 40.0  # how much larger the score of the right key is

TOKEN, AT, BEFORE, WRITTEN = 0, VOCABULARY, VOCABULARY + LENGTH, 2 * VOCABULARY + LENGTH  # where blocks begin


def small_config(**changes: Any) -> TransformerConfig:
    """2 layers of 3 heads of 67, with learned positions."""
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 3 * VOCABULARY + LENGTH, "num_heads": HEADS}
    kinds: dict[str, Any] = {"positions": "learned", "max_length": LENGTH, "norm": "rms", "output": "own"}
    rest: dict[str, Any] = {"num_layers": 2, "d_ff": 5, "head_dim": VOCABULARY, "bias": False}
    return TransformerConfig(**(sizes | kinds | rest | changes))


@torch.no_grad()
def planted() -> Transformer:
    """The circuit, in float32 and eval mode."""
    torch.manual_seed(7)
    model = Transformer(small_config())
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.mul_(0.02)
    for layer in model.decoder.layers:
        layer.feed_forward.down_proj.weight.zero_()
    model.embedding.tokens.weight.zero_()[:, TOKEN : TOKEN + VOCABULARY] = torch.eye(VOCABULARY)
    model.embedding.positions.weight.zero_()[:, AT : AT + LENGTH] = torch.eye(LENGTH)
    by_position = torch.eye(LENGTH)
    one_later = functional.pad(torch.eye(LENGTH - 1), (0, 1, 1, 0))  # the key at j answers to j + 1
    _set(model, PREVIOUS, (AT, by_position), (AT, one_later), (TOKEN, BEFORE))
    same = torch.eye(VOCABULARY)
    _set(model, INDUCTION, (TOKEN, same), (BEFORE, same), (TOKEN, WRITTEN))
    model.output.weight.zero_()[:, WRITTEN : WRITTEN + VOCABULARY] = torch.eye(VOCABULARY)
    return model.eval()


def _set(
    model: Transformer,
    place: tuple[int, int],
    query: tuple[int, Tensor],
    key: tuple[int, Tensor],
    value: tuple[int, int],
) -> None:
    """A head that compares two blocks and copies one into another."""
    layer, head = place
    attention = model.decoder.layers[layer].attention
    rows = slice(head * VOCABULARY, (head + 1) * VOCABULARY)
    for projection, (begin, block) in ((attention.q_proj, query), (attention.k_proj, key)):
        projection.weight[rows] = 0
        projection.weight[rows.start : rows.start + len(block), begin : begin + block.shape[1]] = (
            block * SHARP**0.5
        )
    attention.v_proj.weight[rows] = 0
    attention.v_proj.weight[rows, value[0] : value[0] + VOCABULARY] = torch.eye(VOCABULARY)
    attention.out_proj.weight[:, rows] = 0
    attention.out_proj.weight[value[1] : value[1] + VOCABULARY, rows] = torch.eye(VOCABULARY)


class Letters:
    """A tokenizer whose words are letters; 0 is the start."""

    all_special_ids = (0,)
    bos_token_id: int | None = 0

    def __call__(self, text: str, **options: object) -> dict[str, Tensor]:
        ids = [1 + ord(letter) % (VOCABULARY - 1) for letter in text]
        return {"input_ids": torch.tensor([ids if options.get("add_special_tokens") is False else [0, *ids]])}

    def convert_ids_to_tokens(self, word: int) -> str:
        return "<start>" if word == 0 else chr(word - 1 + VOCABULARY - 1)
