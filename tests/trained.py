"""The built-in model, loaded once a process, and small models with random weights in folders."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from headwise.models.pretrained import Pretrained, load

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}


@cache
def minilm() -> Pretrained:
    return load()


def a_tokenizer(*, special: bool = True) -> Any:
    """A tokenizer of bytes, as GPT-2's without its merges; [CLS] and [SEP] around a text where special."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: number for number, word in enumerate([*words, "[CLS]", "[SEP]"])}
    bare = Tokenizer(models.BPE(vocabulary, []))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    if not special:
        return PreTrainedTokenizerFast(tokenizer_object=bare)
    bare.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    )
    return PreTrainedTokenizerFast(tokenizer_object=bare, cls_token="[CLS]", sep_token="[SEP]")


def a_folder(place: Path, model: Any = None, *, special: bool = True) -> Path:
    """A model and its tokenizer as save_pretrained writes them; by default a small BERT."""
    from transformers import BertConfig, BertModel

    tokenizer = a_tokenizer(special=special)
    model = (
        BertModel(BertConfig(vocab_size=258, max_position_embeddings=40, **SIZES)) if model is None else model
    )
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place
