"""Small models of every kind that a live page shows, with random weights; a server for tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from headwise.models import Pretrained
from headwise.server.live_model import LiveModel
from headwise.server.web_app import application, bound_socket, web_server
from small_models import hugging_face
from trained import a_tokenizer, mini, minilm

TOKEN = "letmein12"
TEXT = "The cat that I saw yesterday ran away"
SMALL = {"hidden_size": 36, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 41}


def _drawn(kind: Any, config: Any) -> Any:
    torch.manual_seed(7)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)  # so that heads differ
    return model


def llama(**settings: Any) -> Pretrained:
    """3 layers of 6 heads over 3 key/value heads, which predict the next token."""
    hf, tokenizer = hugging_face(), a_tokenizer(special=False)
    sizes = SMALL | {"vocab_size": len(tokenizer), "num_key_value_heads": 3, "max_position_embeddings": 32768}
    config = hf.LlamaConfig(**(sizes | settings))
    return Pretrained(_drawn(hf.LlamaForCausalLM, config), tokenizer, "tiny Llama")


def bert() -> Pretrained:
    """3 layers of 6 heads, which fill in a mask."""
    hf, tokenizer = hugging_face(), a_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    config = hf.BertConfig(**SMALL, vocab_size=len(tokenizer), max_position_embeddings=64)
    return Pretrained(_drawn(hf.BertForMaskedLM, config), tokenizer, "tiny BERT")


def classifier() -> Pretrained:
    """3 layers of 6 heads, and 3 classes of a text."""
    hf, tokenizer = hugging_face(), a_tokenizer()
    names = dict(enumerate(["good", "bad", "<b>neither</b>"]))
    config = hf.BertConfig(**SMALL, vocab_size=len(tokenizer), max_position_embeddings=64, id2label=names)
    return Pretrained(_drawn(hf.BertForSequenceClassification, config), tokenizer, "tiny classifier")


def vit() -> Pretrained:
    """3 layers of 6 heads over 16 patches of an image, and 5 classes."""
    hf = hugging_face()
    config = hf.ViTConfig(**SMALL, image_size=32, patch_size=8, num_labels=5)

    def processor(image: Any) -> Tensor:
        small = image.resize((32, 32))
        pixels = torch.tensor(list(small.tobytes()), dtype=torch.float32).view(32, 32, 3)
        return pixels.permute(2, 0, 1) / 255

    return Pretrained(_drawn(hf.ViTForImageClassification, config), processor, "tiny ViT")


MODELS = {
    "mini": mini,
    "minilm": minilm,
    "llama": llama,
    "bert": bert,
    "classifier": classifier,
    "vit": vit,
}


@cache
def live(name: str) -> LiveModel:
    """One of these models, ready to answer; shared by the tests of a process."""
    return LiveModel(*MODELS[name]())


@contextmanager
def server(model: LiveModel, token: str = TOKEN, port: int = 0) -> Iterator[str]:
    """Serve a model on a free port of this machine; yields "http://127.0.0.1:PORT"."""
    bound = bound_socket("127.0.0.1", port)
    app = application(model, token)
    running = web_server(app)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [bound]}, daemon=True)
    address = f"http://127.0.0.1:{bound.getsockname()[1]}"
    thread.start()
    try:
        yield address
    finally:
        running.should_exit = True
        thread.join(10)
        bound.close()
        app.app.state.thread.stop()  # type: ignore[attr-defined]


def with_end_token() -> Pretrained:
    """The small Llama, whose tokenizer adds [CLS] and [SEP] around a text."""
    tokenizer = a_tokenizer()
    return Pretrained(llama(vocab_size=len(tokenizer)).model, tokenizer, "Llama with an end token")


class OwnModel(nn.Module):
    """A model of one layer of 3 heads of 6, of the kind that users write: its inputs have other names."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.table = nn.Embedding(vocab_size, 18)
        self.layer = nn.MultiheadAttention(18, 3, batch_first=True)
        self.words = nn.Linear(18, vocab_size)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.table(idx)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.words(x + self.layer(x, x, x, attn_mask=hidden)[0])


class OwnModelWithMask(OwnModel):
    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        assert attention_mask is not None and attention_mask.shape == tokens.shape
        return super().forward(tokens)


class OwnImageModel(nn.Module):
    """Features [1, 36] of 16 patches of an image; classes where `num_classes` is 36."""

    def __init__(self, num_classes: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.patches = nn.Conv2d(3, 36, 8, stride=8)
        self.layer = nn.MultiheadAttention(36, 3, batch_first=True)
        if num_classes is not None:
            self.num_classes = num_classes

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        return (x + self.layer(x, x, x)[0]).mean(1)
