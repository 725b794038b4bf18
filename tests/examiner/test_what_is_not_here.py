"""Code that wants what is not here, and computes the same without: type checkers, Lightning, a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headwise.examiner import check_file
from headwise.examiner.examine.rotations import ADDED, TABLES, rotation_table, rotation_word
from headwise.examiner.marking.template import Template
from headwise.examiner.sandbox.stand_ins import (
    WORDS,
    Annotation,
    LightningModule,
    OnCPU,
    asks_for_gpu,
    decorate,
    has_no_effect,
    named_in,
)
from headwise.examiner.source.likely_classes import other_framework
from headwise.examiner.source.names import names_under_main

ATTENTION = """{top}import torch
from torch import nn


class MultiHeadAttention({base}):
    def __init__(self, d_model, num_heads{more}):
        super().__init__()
        self.heads, self.width = num_heads, d_model // num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))
        {made}

    {decorated}
    def forward(self, query{kind}, key{kind}, value{kind}){kind_out}:
        B = len(query)
        q, k, v = (
            layer(x).view(B, -1, self.heads, self.width).transpose(1, 2)
            for layer, x in ((self.q, query), (self.k, key), (self.v, value))
        )
        weights = (q @ k.mT / {scale}).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))
"""
PLAIN = dict.fromkeys(("top", "more", "decorated", "kind", "kind_out"), "") | {
    "base": "nn.Module", "made": "pass", "scale": "self.width**0.5",
}  # fmt: skip
NEEDS = {
    "jaxtyping": {"top": "from jaxtyping import Float\n", "kind": ': Float[torch.Tensor, "b t e"]'},
    "jaxtyping checked": {
        "top": "from beartype import beartype as typechecker\nfrom jaxtyping import Float, jaxtyped\n",
        "decorated": "@jaxtyped(typechecker=typechecker)",
        "kind": ': Float[torch.Tensor, "b t e"] | None',
        "kind_out": ' -> Float[torch.Tensor, "b t e"]',
    },
    "typeguard": {
        "top": "from torchtyping import TensorType\nfrom typeguard import typechecked\n",
        "decorated": "@typechecked",
        "kind": ': TensorType["b", "t", "e"]',
    },
    "Lightning": {
        "top": "import pytorch_lightning as pl\n",
        "base": "pl.LightningModule",
        "made": "self.save_hyperparameters()",
        "scale": '(self.hparams.d_model // self.hparams["num_heads"]) ** 0.5',
    },
    "Lightning by its new name": {"top": "import lightning as L\n", "base": "L.LightningModule"},
    "a GPU by default": {"more": ', device="cuda"', "made": "self.to(device)"},
    "a GPU": {"made": "self.cuda()"},
    "a GPU in forward": {"scale": 'torch.tensor(self.width, device="cuda:0").cuda().sqrt()'},
    "a GPU by its number": {"scale": "torch.tensor(self.width).to(0).sqrt()"},
}


@pytest.mark.thinned(keep=["a GPU in forward", "Lightning"])
@pytest.mark.parametrize("need", NEEDS)
def test_what_is_right_without_it_passes_and_what_is_wrong_does_not(
    need: str, tmp_path: Path, one_template: Template
) -> None:
    file = tmp_path / "mha.py"
    source = ATTENTION.format(**PLAIN | NEEDS[need])
    file.write_text(source)
    report = check_file(file, template=one_template)
    assert report.ok, report
    if "GPU" in need:
        assert WORDS in report.conventions.words
    file.write_text(source.replace("weights = (q @ k.mT", "weights = (q @ k.mT / 2"))
    assert check_file(file, template=one_template).verdict == "wrong"


def test_a_crash_is_the_file_s_own_where_the_package_had_no_effect(
    tmp_path: Path, one_template: Template
) -> None:
    file = tmp_path / "mha.py"
    crash = ATTENTION.format(**PLAIN | NEEDS["jaxtyping"]).replace(
        "transpose(1, 2).flatten", "view(-1)).flatten"
    )
    file.write_text(crash.replace("self.o((", "self.o("))
    assert check_file(file, template=one_template).verdict == "wrong"


def test_annotations_are_the_types_they_annotate() -> None:
    assert Annotation[torch.Tensor, "b t"] is torch.Tensor and Annotation["b", "t"] is torch.Tensor
    assert decorate(len) is len and decorate(typechecker=decorate)(len) is len
    with decorate("context"):
        assert named_in("jaxtyping", "Float") is Annotation and named_in("numpy", "Float") is None
    assert has_no_effect("lightning.pytorch") and not has_no_effect("numpy")


def test_hyperparameters_are_kept_as_they_are_named() -> None:
    class Module(LightningModule):
        def __init__(self, width: int, heads: int = 2, **more: int) -> None:
            super().__init__()
            self.save_hyperparameters(ignore="heads")
            self.log("loss", 0.0)

    assert Module(8, depth=3).hparams == {"width": 8, "depth": 3}


def test_devices_that_are_not_here_are_the_cpu() -> None:
    assert asks_for_gpu("x.cuda()") and not asks_for_gpu("x = 1")
    with OnCPU() as mode:
        assert torch.zeros(2, device="cuda").to(torch.device("cuda", 1)).cuda().to(0).device.type == "cpu"
        assert mode.used and torch.nn.Linear(2, 2, device="cuda").to("cuda").weight.device.type == "cpu"
        assert torch.zeros(2, device="meta").device.type == "meta"


# What the rest of a file wants: data, a network, a tokenizer, time to train, a registry

SKIPPED = {
    "a text": ("with open('input.txt') as file:\n    text = file.read()\nwords = sorted(set(text))\n", ""),
    "a download": ("import urllib.request\nurllib.request.urlretrieve('https://a.org/b', 'b')\n", ""),
    "a tokenizer": (
        "import notiktoken\nencoder = notiktoken.get_encoding('gpt2')\nprint(1 + encoder.n_vocab)\n", ""
    ),
    "training": ("", "\nwhile True:\n    MultiHeadAttention(8, 2)(*torch.ones(3, 1, 2, 8)).sum().backward()"),
    "arguments": (
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('data')\n"
        "arguments = parser.parse_args()\n", ""
    ),
}  # fmt: skip


@pytest.mark.thinned(keep=["a text", "training"])
@pytest.mark.parametrize("package", SKIPPED)
def test_statements_that_cannot_run_here_are_skipped_and_told(
    package: str, tmp_path: Path, one_template: Template
) -> None:
    top, bottom = SKIPPED[package]
    source = f"import math\n{top}" + ATTENTION.format(**PLAIN) + bottom
    file = tmp_path / "mha.py"
    file.write_text(source)
    report = check_file(file, template=one_template)
    assert report.ok and "import and were skipped: line" in " ".join(report.conventions.words), report
    file.write_text(source.replace(" / self.width**0.5", ""))
    assert [fault.key for fault in check_file(file, template=one_template).faults] == ["no scale"]


def test_a_name_that_a_skipped_statement_binds_accuses_nobody(tmp_path: Path, one_template: Template) -> None:
    file = tmp_path / "mha.py"
    source = ATTENTION.format(**PLAIN).replace("nn.Linear(d_model, d_model)", "nn.Linear(d_model, len(text))")
    file.write_text("text = open('input.txt').read()\n" + source)
    assert check_file(file, template=one_template).verdict == "not judged"


def test_a_registry_a_device_and_star_imports_are_stood_in_for(
    tmp_path: Path, one_template: Template
) -> None:
    source = ATTENTION.format(
        **PLAIN | {"base": "BaseModule", "decorated": "@force_fp32(apply_to=('query',))"}
    )
    source = source.replace("import torch\nfrom torch import nn\n", "from ours.layers import *\n")
    source = source.replace("class", "@MODELS.register_module()\nclass").replace("(2))", "(2)).to(device)")
    file = tmp_path / "mha.py"
    file.write_text(
        "from ours.registry import MODELS, force_fp32\nfrom ours.constants import device\n"
        "from ours import BaseModule\n" + source
    )
    report = check_file(file, template=one_template)
    assert report.ok, report
    file.write_text(file.read_text().replace(" / self.width**0.5", ""))
    assert [fault.key for fault in check_file(file, template=one_template).faults] == ["no scale"]


def test_a_class_whose_method_is_called_step_is_examined(tmp_path: Path, one_template: Template) -> None:
    file = tmp_path / "mha.py"
    file.write_text(ATTENTION.format(**PLAIN).replace("def forward", "def step"))
    assert check_file(file, template=one_template).ok


# Names that only a script sets, other frameworks, tables of a rotation

UNDER_MAIN = """

if __name__ == "__main__":
    D_MODEL, HEADS = 32, 4
    print(MultiHeadAttention())
"""


def test_sizes_set_under_main_are_set_before_it_is_built(tmp_path: Path, one_template: Template) -> None:
    source = ATTENTION.format(**PLAIN).replace("self, d_model, num_heads", "self")
    source = source.replace(
        "super().__init__()", "super().__init__()\n        d_model, num_heads = D_MODEL, HEADS"
    )
    file = tmp_path / "mha.py"
    file.write_text(source + UNDER_MAIN)
    report = check_file(file, template=one_template)
    assert report.ok and "only under __main__" in " ".join(report.conventions.words), report
    file.write_text(source + UNDER_MAIN.replace("32, 4", "map(int, input().split())"))
    assert check_file(file, template=one_template).verdict == "not judged"
    file.write_text(source)
    assert [fault.key for fault in check_file(file, template=one_template).faults] == ["undefined name"] * 2


def test_what_only_a_script_binds() -> None:
    source = "A = 1\nif __name__ == '__main__':\n    A = 2\n    for B in range(3):\n        import os\n"
    assert names_under_main(source) == {"B", "os"} and names_under_main("not (python") == set()


OTHER_FRAMEWORKS = {
    "TensorFlow": "import tensorflow as tf\nclass Attention(tf.keras.layers.Layer): ...\n",
    "JAX": "from flax import linen as nn\nclass Attention(nn.Module): ...\n",
    "Paddle": "import paddle.nn as nn\nclass Attention(nn.Layer): ...\n",
}


@pytest.mark.parametrize("name", OTHER_FRAMEWORKS)
def test_code_for_another_framework_is_not_judged_in_one_sentence(
    name: str, tmp_path: Path, one_template: Template
) -> None:
    file = tmp_path / "mha.py"
    file.write_text(OTHER_FRAMEWORKS[name])
    report = check_file(file, template=one_template)
    assert report.verdict == "not judged" and not report.counsel_for_files
    assert report.summary == f"headwise check judges PyTorch code; this file uses {name}"
    assert other_framework("import torch\n" + OTHER_FRAMEWORKS[name]) is None


ROPE = {
    "cos, sin": (
        "        q, k = q * cos + half(q) * sin, k * cos + half(k) * sin\n",
        "a correct variant",
    ),
    "position_embeddings": (
        "        cos, sin = (one.unsqueeze(1) for one in position_embeddings)\n"
        "        q, k = q * cos + half(q) * sin, k * cos + half(k) * sin\n",
        "a correct variant",
    ),
    "freqs_cis": ("        q, k = turn(q, freqs_cis), turn(k, freqs_cis)\n", "a correct variant"),
    "cos, sin, ": ("        q, k = q * cos + pairs(q) * sin, k * cos + pairs(k) * sin\n", "the same as"),
}
TURNS = """def half(x):
    one, two = x.chunk(2, -1)
    return torch.cat((-two, one), -1)


def pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def turn(x, by):
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * by).flatten(-2)


class"""


@pytest.mark.thinned(keep=["freqs_cis"])
@pytest.mark.parametrize("arguments", ROPE)
def test_tables_of_a_rotation_are_given(arguments: str, tmp_path: Path, one_template: Template) -> None:
    turning, words = ROPE[arguments]
    source = (
        ATTENTION.format(**PLAIN)
        .replace("class", TURNS, 1)
        .replace("query, key, value):", f"x, {arguments}):")
    )
    source = source.replace("(query)", "(x)").replace(
        "self.q, query), (self.k, key), (self.v, value", "self.q, x), (self.k, x), (self.v, x"
    )
    source = source.replace("        weights = (q", f"{turning}        weights = (q")
    file = tmp_path / "mha.py"
    file.write_text(source)
    report = check_file(file, template=one_template)
    assert report.ok and words in report.summary, report
    assert ("was not judged" in " ".join(report.conventions.words)) == (words == "the same as")
    file.write_text(source.replace(" / self.width**0.5", ""))
    assert "no scale" in [fault.key for fault in check_file(file, template=one_template).faults]


def test_tables_in_every_shape() -> None:
    words = {
        "cos": "cos",
        "freqs_sin": "sin",
        "rotary_cos": "cos",
        "freqs_cis": "turns",
        "position_embeddings": "cos and sin",
    }
    assert {name: rotation_word(name) for name in (*words, "x", "cosine_scores")} == words | {
        "x": None,
        "cosine_scores": None,
    }
    for shape in TABLES:
        tables = rotation_table(
            "cos and sin", shape, False, torch.zeros(2, 5, 24), 6, (4, 2, 1), torch.float64
        )
        if shape == ADDED:  # one that is added to the input: it adds nothing
            assert tables.shape == (2, 5, 24) and not tables.any()
            continue
        cos, sin = tables
        assert torch.allclose(cos**2 + sin**2, torch.ones_like(cos)) and cos.shape[-1] in (3, 6)
    for slot in ("cos", "sin"):  # one angle for every position and pair
        still = rotation_table(slot, "[T, D]", True, torch.zeros(2, 5, 24), 6, (4, 2, 1), torch.float64)
        assert 0.1 < still[0, 0] < 0.9 and (still == still[0, 0]).all()
