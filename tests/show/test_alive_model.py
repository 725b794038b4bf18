"""A model packed for a page: what is packed, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from headwise.errors import ArgumentError
from headwise.models import BytePairs, Pretrained, Transformer, TransformerConfig
from headwise.nn import Rope
from headwise.show.heads_page import PATTERN, alive_data

tokenizers = pytest.importorskip("tokenizers")

CONFIG: dict[str, Any] = {
    "vocab_size": 13, "d_model": 24, "num_heads": 3, "num_layers": 2, "d_ff": 40, "max_length": 17,
    "norm": "rms", "bias": False, "rope": Rope(dims=4),
}  # fmt: skip


def tokenizer(**changes: Any) -> BytePairs:
    """Thirteen tokens: the start, ten letters and two merges; changes are those of its tokenizer.json."""
    letters = {letter: number for number, letter in enumerate(["<s>", *"abcdefgĠ,.", "ab", "abc"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(letters, [("a", "b"), ("ab", "c")]))
    made.add_special_tokens(["<s>"])
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    data = json.loads(made.to_str())
    for path, value in changes.items():
        place, _, name = path.rpartition("__")
        (data[place] if place else data)[name] = value
    return BytePairs(tokenizers.Tokenizer.from_str(json.dumps(data)))


def model(**changes: Any) -> Transformer:
    torch.manual_seed(0)
    return Transformer(TransformerConfig(**(CONFIG | changes))).half().float().eval()


class Packed(list[bytes]):
    def pack(self, data: bytes) -> list[int]:
        self.append(data)
        return [len(self) - 1, len(self)]


def test_a_model_is_packed_whole_with_its_tokenizer() -> None:
    packed, mine = Packed(), model()
    data = alive_data(Pretrained(mine, tokenizer(), "small"), packed.pack, "abc")
    assert data["config"] == {
        "vocab_size": 13, "d_model": 24, "num_heads": 3, "num_layers": 2, "d_ff": 40, "max_length": 17,
        "norm_eps": 1e-5, "rope_base": 10000.0, "rope_dims": 4,
    }  # fmt: skip
    assert data["title"] == "small"
    assert data["example"] == "abc"
    assert len(data["tensors"]) == len(mine.state_dict()) == len(packed)
    up = data["tensors"]["layers.1.up"]
    bytes_ = torch.frombuffer(bytearray(packed[up["data"][0]]), dtype=torch.uint8).view(2, -1)
    back = bytes_.T.contiguous().view(torch.float16).view(up["shape"])
    assert mine.decoder is not None
    assert torch.equal(back.float(), mine.state_dict()["decoder.layers.1.feed_forward.up_proj.weight"])
    words = data["tokenizer"]
    assert words["tokens"] == ["<s>", *"abcdefgĠ,.", "ab", "abc"]
    assert words["merges"] == ["a b", "ab c"]
    assert (words["start"], words["special"], words["punctuation"]) == (0, [0], [9, 10])
    assert words["pattern"] == PATTERN
    json.dumps(data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "encoder"}, "kind='encoder'"),
        ({"kind": "encoder-decoder"}, "kind='encoder-decoder'"),
        ({"positions": "sinusoidal"}, "positions='sinusoidal'"),
        ({"token_types": 2}, "token_types=2"),
        ({"embedding_scale": 3.0}, "embedding_scale=3.0"),
        ({"embedding_norm": True}, "embedding_norm=True"),
        ({"activation": "gelu_tanh"}, "activation='gelu_tanh'"),
        ({"gated": True}, "gated=True"),
        ({"norm": "layer"}, "norm='layer'"),
        ({"norm_first": False}, "norm_first=False"),
        ({"final_norm": False}, "final_norm=False"),
        ({"output": "own"}, "output='own'"),
        ({"bias": True}, "bias=True"),
        ({"qkv_bias": True}, "qkv_bias=True"),
        ({"out_bias": True}, "out_bias=True"),
        ({"num_kv_heads": 1}, "num_kv_heads=1"),
        ({"head_dim": 16}, "head_dim=16"),
        ({"scale": 0.5}, "scale=0.5"),
        ({"softcap": 30.0}, "softcap=30.0"),
        ({"sinks": True}, "sinks=True"),
        ({"alibi": True, "rope": None}, "alibi=True"),
        ({"qk_norm": "rms"}, "qk_norm='rms'"),
        ({"gate": "head"}, "gate='head'"),
        ({"windows": (5, None)}, r"windows=\(5, None\)"),
        ({"rope": None}, "rope=None"),
        ({"rope": Rope(interleaved=True)}, "rope=Rope.*interleaved=True"),
        ({"d_model": 39, "rope": Rope(dims=4)}, "d_model=39"),
        ({"d_ff": 37}, "d_ff=37"),
        ({"max_length": None}, "max_length=None"),
    ],
)
def test_what_the_page_cannot_compute_is_refused_by_its_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"it has {message}.*effects="):
        alive_data(Pretrained(model(**changes), tokenizer(), "small"), Packed().pack)


def test_every_field_of_a_config_is_known_or_refused() -> None:
    from dataclasses import fields

    from headwise.show import heads_page as ours

    names = {*ours.SUPPORTED, *ours.BY_ITSELF, *ours.IN_TRAINING}
    assert {each.name for each in fields(TransformerConfig)} == names


def test_sizes_that_say_the_same_in_other_words_are_taken() -> None:
    same = model(num_kv_heads=3, head_dim=8, dropout=0.1)
    assert alive_data(Pretrained(same, tokenizer(), "small"), Packed().pack)["config"]["num_heads"] == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__byte_fallback": True}, "byte_fallback is True"),
        ({"model__ignore_merges": True}, "ignore_merges is True"),
        ({"model__dropout": 0.5}, "dropout is 0.5"),
        ({"model__unk_token": "a"}, "unk_token is 'a'"),
        ({"model__end_of_word_suffix": "ab"}, "end_of_word_suffix is 'ab'"),
        ({"normalizer": {"type": "Lowercase"}}, "normalizer is 'Lowercase'"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre_tokenizer is 'Whitespace'"),
        ({"pre_tokenizer__add_prefix_space": True}, "add_prefix_space is True"),
        ({"pre_tokenizer__use_regex": False}, "use_regex is False"),
        ({"post_processor": None}, "start token is False"),
    ],
)
def test_another_tokenizer_is_refused_by_what_differs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"its {message}.*omit alive="):
        alive_data(Pretrained(model(), tokenizer(**changes), "small"), Packed().pack)


def test_an_added_token_that_swallows_spaces_and_one_too_few_are_refused() -> None:
    tokens = json.loads(tokenizer().to_json())["added_tokens"]
    tokens[0]["lstrip"] = True
    with pytest.raises(ArgumentError, match="added token '<s>' is 'of another kind'"):
        alive_data(Pretrained(model(), tokenizer(added_tokens=tokens), "small"), Packed().pack)
    with pytest.raises(ArgumentError, match="vocab_size is 13, and the page supports 17"):
        alive_data(Pretrained(model(vocab_size=17), tokenizer(), "small"), Packed().pack)


def test_other_models_tokenizers_and_weights_are_refused() -> None:
    small: Any = nn.Linear(2, 3)
    with pytest.raises(ArgumentError, match=r"got Linear.*mini"):
        alive_data(Pretrained(small, tokenizer(), "small"), Packed().pack)
    strange: Any = object()
    with pytest.raises(ArgumentError, match=r"got object.*BytePairs\.of"):
        alive_data(Pretrained(model(), strange, "small"), Packed().pack)
    exact = model()
    with torch.no_grad():
        exact.embedding.tokens.weight[1, 2] = 1 / 3
    with pytest.raises(
        ArgumentError, match=r"1 in embedding are not, such as 0\.333333.*half\(\)\.float\(\)"
    ):
        alive_data(Pretrained(exact, tokenizer(), "small"), Packed().pack)


def test_a_model_that_is_no_longer_as_its_config_says_is_refused() -> None:
    cut: Any = model()
    cut.decoder.layers[1].feed_forward.up_proj = nn.Linear(24, 32, bias=False)
    with pytest.raises(ArgumentError, match=r"up_proj\.weight has shape \[32, 24\] instead of \[40, 24\]"):
        alive_data(Pretrained(cut, tokenizer(), "small"), Packed().pack)
    more: Any = model()
    more.decoder.layers[0].adapter = nn.Linear(3, 5, bias=False)
    with pytest.raises(ArgumentError, match=r"adapter\.weight has shape \[5, 3\] instead of None"):
        alive_data(Pretrained(more, tokenizer(), "small"), Packed().pack)
