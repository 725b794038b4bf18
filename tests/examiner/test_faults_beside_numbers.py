"""Faults that one set of sizes, evaluation or one call does not show, each beside its right twin."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwise.examiner import check_file
from headwise.examiner.marking.template import Template
from headwise.examiner.report import Report

GROUPED = """import torch
import torch.nn as nn
import torch.nn.functional as F


class SharedKeys(nn.Module):
    def __init__(self, width=64, num_heads=4, num_kv_heads=2):
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = width // num_heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, num_kv_heads * self.head_dim)
        self.value = nn.Linear(width, num_kv_heads * self.head_dim)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        B, T, E = x.shape
        q = self.query(x).view(B, T, self.num_heads, -1).transpose(1, 2)
        k = self.key(x).view(B, T, self.num_kv_heads, -1).transpose(1, 2)
        v = self.value(x).view(B, T, self.num_kv_heads, -1).transpose(1, 2)
        times = {}
        k, v = k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, E))
"""
DROPPED = """import torch
import torch.nn as nn


class Attention(nn.Module):
    def __init__(self, width, heads, p=0.1):
        super().__init__()
        self.heads, self.d = heads, width // heads
        self.qkv, self.out, self.drop = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(p)

    def forward(self, x):
        B, T, E = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, self.d).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * self.d**-0.5
        weights = {}
        return self.out((weights @ v).transpose(1, 2).reshape(B, T, E))
"""
JOINED = """import torch
import torch.nn as nn


class Decoder(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.d = heads, width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, pad=None):
        B, T, E = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, self.d).permute(2, 0, 3, 1, 4)
        seen = torch.ones(T, T, dtype=torch.bool).tril()
        if pad is not None:  # [B, T], True where there is a word
            seen = seen {} pad[:, None, None, :]
        scores = (q @ k.mT * self.d**-0.5).masked_fill(~seen, -1e9)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, E))
"""
ALIBI = """import torch
import torch.nn as nn


class Alibi(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.d = heads, width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("slopes", 2.0 ** (-8 * torch.arange(1, heads + 1) / heads))

    def forward(self, x):
        B, T, E = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, self.d).permute(2, 0, 3, 1, 4)
        at = torch.arange(T)
        distance = (at[:, None] - at).abs()
        scores = q @ k.mT * self.d**-0.5 {} self.slopes[:, None, None] * distance
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(B, T, E))
"""
LISTED = """import torch
import torch.nn as nn


class OneHead(nn.Module):
    def __init__(self, width, d):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, d) for _ in range(3))

    def forward(self, x):
        scores = self.query(x) @ self.key(x).mT / self.key.out_features**0.5
        return scores.softmax(-1) @ self.value(x)


class Heads(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.heads = nn.ModuleList({})
        self.out = nn.Linear(width, width)

    def forward(self, x):
        return self.out(torch.cat([head(x) for head in self.heads], -1))
"""
IN_PLACE = """import torch


def scaled_dot_product(query, key, value):
    {}
    return torch.softmax(query @ key.transpose(-2, -1), dim=-1) @ value
"""
BLOCK = """import torch.nn as nn


class Block(nn.Module):
    '''x: (batch, seq, width), and the same comes out.'''

    def __init__(self, width=64, heads=4):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads{})
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        y = self.before(x)
        x = x + self.attention(y, y, y)[0]
        return x + self.feed(self.between(x))
"""
BROADCAST = """import torch
import torch.nn as nn


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.d = heads, width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        B, T, E = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, self.d).permute(2, 0, 3, 1, 4)
        weights = (q @ k{}.mT * self.d**-0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(B, T, E))
"""
PAIRS = {
    "groups": (
        GROUPED,
        "self.num_heads // self.num_kv_heads",
        "self.num_kv_heads",
        "groups repeated wrong times",
    ),
    "dropout": (
        DROPPED, "self.drop(scores.softmax(-1))", "self.drop(scores).softmax(-1)", "dropout before softmax",
    ),
    "or": (JOINED, "&", "|", "masks joined with or"),
    "far": (ALIBI, "-", "+", "far keys favoured"),
    "one head": (
        LISTED,
        "[OneHead(width, width // num_heads) for _ in range(num_heads)]",
        "[OneHead(width, width // num_heads)] * num_heads",
        "same head for all",
    ),
    "in place": (
        IN_PLACE,
        "query = query / query.shape[-1] ** 0.5",
        "query /= query.shape[-1] ** 0.5",
        "input modified",
    ),
    "block": (BLOCK, ", batch_first=True", "", "wrong layout"),
    "broadcast": (BROADCAST, "", "[:, :1]", "same head for all"),
}  # fmt: skip


def checked(tmp_path: Path, template: Template, source: str) -> Report:
    path = tmp_path / "attention.py"
    path.write_text(source, "utf-8")
    return check_file(path, template=template)


@pytest.mark.thinned(keep=["in place", "broadcast"])
@pytest.mark.parametrize(("source", "right", "wrong", "fault"), PAIRS.values(), ids=PAIRS)
def test_the_fault_is_named_and_its_twin_passes(
    source: str, right: str, wrong: str, fault: str, tmp_path: Path, one_template: Template
) -> None:
    report = checked(tmp_path, one_template, source.replace("{}", right))
    assert report.verdict == "right", report.summary
    report = checked(tmp_path, one_template, source.replace("{}", wrong))
    assert report.verdict == "wrong"
    assert [named.key for named in report.faults] == [fault]


SET_UP = """import torch
import torch.nn as nn


class Stepwise(nn.Module):
    '''Call start() before the first token.'''

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.d = heads, width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def start(self, batch):
        self.past = torch.zeros(batch, self.heads, 0, self.d)

    def forward(self, x):
        B, T, E = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, self.d).permute(2, 0, 3, 1, 4)
        self.past = torch.cat((self.past, k), 2)
        return self.out((q @ self.past.mT).softmax(-1) @ v)
"""


def test_a_method_that_must_be_called_first_is_nobodys_fault(tmp_path: Path, one_template: Template) -> None:
    report = checked(tmp_path, one_template, SET_UP)
    assert report.verdict == "not judged"
    assert "self.past has no value" in report.summary


# Repairs


def test_a_repair_is_shown_once_the_file_passed_with_it(tmp_path: Path, one_template: Template) -> None:
    report = checked(tmp_path, one_template, DROPPED.replace("{}", "scores.softmax(-2)"))
    named = report.faults[0]
    assert named.key == "softmax over queries"
    assert named.tried is True
    text = str(report)
    assert "weights = scores.softmax(-1)" in " ".join(text.split())
    assert "with this repair the file passes" in " ".join(text.split())
    assert (tmp_path / "attention.py").read_text("utf-8") == DROPPED.replace("{}", "scores.softmax(-2)")


def test_a_repair_that_does_not_help_is_not_shown(tmp_path: Path, one_template: Template) -> None:
    source = GROUPED.replace("{}", "self.num_heads // self.num_kv_heads")
    source = source.replace("k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)",
                            "k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1)")  # fmt: skip
    report = checked(tmp_path, one_template, source)
    assert [named.key for named in report.faults] == ["groups repeated in wrong order"]
    assert report.faults[0].tried is False
    assert "Repair" not in str(report)


# What a hostile reading of these faults found

SWITCH = """import torch
import torch.nn as nn


class Attention(nn.Module):
    def __init__(self, width, heads, {name}=False):
        super().__init__()
        self.heads, self.d, self.{name} = heads, width // heads, {name}
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x{argument}):
        B, T, E = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, self.d).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * self.d**-0.5
        if self.{name}:
            scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).{hidden}, float("-inf"))
        {more}
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, E))
"""
MASKED = 'if mask is not None:\n            scores = scores.masked_fill(mask == 0, float("-inf"))'


def switch(name: str, hidden: str, masked: bool) -> str:
    parts = {"name": name, "hidden": hidden, "argument": ", mask=None" if masked else ""}
    return SWITCH.format(more=MASKED if masked else "pass", **parts)


def test_a_causal_switch_is_tried_beside_a_mask(tmp_path: Path, one_template: Template) -> None:
    assert checked(tmp_path, one_template, switch("causal", "triu(1)", True)).verdict == "right"
    report = checked(tmp_path, one_template, switch("causal", "tril(-1)", True))
    assert [named.key for named in report.faults] == ["causal flipped"]


def test_a_switch_for_the_other_direction_is_no_fault(tmp_path: Path, one_template: Template) -> None:
    assert checked(tmp_path, one_template, switch("reverse", "tril(-1)", False)).verdict == "right"


@pytest.mark.parametrize(
    "line",
    [
        "scores = self.drop(q @ k.mT) * self.d**-0.5; weights = scores.softmax(-1)",
        "scores = self.drop(q @ k.mT * 0.5) * 2 * self.d**-0.5; weights = scores.softmax(-1)",
    ],
)
def test_dropout_on_scores_that_are_scaled_later(line: str, tmp_path: Path, one_template: Template) -> None:
    source = DROPPED.replace("        scores = q @ k.mT * self.d**-0.5\n", "").replace("weights = {}", line)
    report = checked(tmp_path, one_template, source)
    assert [named.key for named in report.faults] == ["dropout before softmax"]


MULTI_QUERY = """import torch
import torch.nn as nn


class OneHead(nn.Module):
    def __init__(self, width, d):
        super().__init__()
        self.query = nn.Linear(width, d)

    def forward(self, x, key, value):
        scores = self.query(x) @ key(x).mT / self.query.out_features**0.5
        return scores.softmax(-1) @ value(x)


class Heads(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.heads = nn.ModuleList([OneHead(width, width // num_heads) for _ in range(num_heads)])
        key, value = (nn.Linear(width, width // num_heads) for _ in range(2))
        self.keys = nn.ModuleList([key] * num_heads)
        self.values = nn.ModuleList([value] * num_heads)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        every = zip(self.heads, self.keys, self.values)
        return self.out(torch.cat([head(x, key, value) for head, key, value in every], -1))
"""


def test_keys_that_heads_share_in_a_list_are_multi_query(tmp_path: Path, one_template: Template) -> None:
    report = checked(tmp_path, one_template, MULTI_QUERY)
    assert report.verdict == "right", report.summary


def test_a_named_multiplier_of_the_output_is_a_choice(tmp_path: Path, one_template: Template) -> None:
    source = BROADCAST.replace("{}", "").replace(
        "nn.Linear(width, width)", "nn.Linear(width, width, bias=False)"
    )
    source = source.replace(
        "def __init__(self, width, heads)", "def __init__(self, width, heads, out_multiplier=0.5)"
    )
    source = source.replace(
        "super().__init__()", "super().__init__()\n        self.out_multiplier = out_multiplier"
    )
    source = source.replace("return self.out(", "return self.out_multiplier * self.out(")
    report = checked(tmp_path, one_template, source)
    assert report.faults == [] and report.verdict == "not judged"


def test_forward_without_gradients_is_said(tmp_path: Path, one_template: Template) -> None:
    source = BROADCAST.replace("{}", "").replace("    def forward", "    @torch.no_grad()\n    def forward")
    report = checked(tmp_path, one_template, source)
    assert any("nothing in it can be trained" in each for each in report.not_judged)


WILD = Path(__file__).parents[1] / "wild" / "open"
BESIDE = {  # files -> their fault, None for right ones
    "causal_drops_padding": "one mask replaces another",
    "flash_without_mask": "mask ignored",
    "talking_heads_causal_first": "mask before heads are mixed",
    "talking_heads": None,
    "cosine_over_heads": "normalised over another axis",
    "value_bias_on_keys": "bias of another projection",
    "memory_never_replaced": "state kept between calls",
    "own_dropout": "dropout not rescaled",
    "own_dropout_rescaled": None,
    "dropkey": None,
    "others_only": None,
    "log_length_scale": None,
    "latents_attend": None,
    "cut_into_windows": None,
}


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("file", "fault"), BESIDE.items(), ids=BESIDE)
def test_behaviour_that_no_plain_call_shows_is_named(
    file: str, fault: str | None, one_template: Template
) -> None:
    """Masks with a switch on, dropout in training, a matrix of the other sign: all were judged wrongly."""
    report = check_file(WILD / f"{file}.py", template=one_template)
    assert [named.key for named in report.faults] == ([] if fault is None else [fault])
    assert report.ok == (fault is None)


def test_heads_mixed_by_rows_of_negative_sums_are_right(tmp_path: Path, one_template: Template) -> None:
    """Negated, such a matrix hides keys in either order: the right order was taken for the wrong one."""
    source = (WILD / "talking_heads.py").read_text("utf-8")
    changed = source.replace(
        "s = self.mix_scores(s.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)",
        's = torch.einsum("bhts,gh->bgts", s, self.P)',
    ).replace(
        "self.mix_scores = nn.Linear(heads, heads, bias=False)",
        "self.P = nn.Parameter(-torch.ones(heads, heads) - torch.rand(heads, heads))",
    )
    assert changed.count("self.P") == 2
    (tmp_path / "negative.py").write_text(changed, "utf-8")
    report = check_file(tmp_path / "negative.py", template=one_template)
    assert not report.faults and report.verdict != "wrong", str(report)
