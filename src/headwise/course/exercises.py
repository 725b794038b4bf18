"""Exercises: code to write, or code to repair that has one planted fault.

A plant names a fault of the examiner's library and the changes to right code that cause it. Its hints and
explanation come from that library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import ArgumentError
from .lesson import Lesson

__all__ = ["PLANTS", "Exercise", "Plant", "exercise_of", "file_text", "repair_of"]

Edits = dict[str, str]  # text in right code -> its replacement


@dataclass(frozen=True)
class Exercise:
    """The code that a learner starts from, its solution, and the name of the class or function to check."""

    kind: Literal["write", "repair"]
    name: str  # of the class or function to check
    start: str
    solution: str
    without: tuple[str, ...] = ()  # functions that the learner's code must not call
    hints: tuple[str, ...] = ()  # in Markdown, in the order of HINTS; a repair has none
    trial: str = ""  # the end of the learner's file: calls the code if Python runs the file


@dataclass(frozen=True)
class Plant:
    """Right code, the class or function in it to check, and the edits that plant a fault."""

    code: str
    name: str
    edits: Edits


def exercise_of(lesson: Lesson) -> Exercise:
    """Return the exercise of a lesson."""
    exercise = next((cell for cell in lesson.cells if cell.kind == "exercise"), None)
    if exercise is None:
        raise ArgumentError(
            f"lesson must have an exercise: lesson {lesson.number} has none; "
            f"try headwise learn read {lesson.number}"
        )
    solution = next((cell.text for cell in lesson.cells if cell.kind == "solution"), "")
    call = next((cell.text for cell in lesson.cells if cell.kind == "try"), "")
    return Exercise(
        "write",
        exercise.about,
        f"{exercise.text}\n",
        f"{solution}\n",
        lesson.without,
        lesson.hints,
        _trial(call, has_torch="import torch\n" in exercise.text) if call else "",
    )


def _trial(call: str, has_torch: bool) -> str:
    """Return a block that runs the lines if Python runs the file; nothing that imports the file runs it."""
    lines = ["# Try your code: python runs these lines, headwise learn check does not.", *call.splitlines()]
    lines[1:1] = [] if has_torch else ["import torch", ""]
    indented = "\n".join(f"    {line}" if line else "" for line in lines)
    return f'if __name__ == "__main__":\n{indented}\n'


def repair_of(fault: str) -> Exercise:
    """Return the exercise of finding and repairing this fault."""
    if fault not in PLANTS:
        raise ArgumentError(
            f"fault must be one of the repairs: got {fault!r}; choose from {', '.join(PLANTS)}"
        )
    plant = PLANTS[fault]
    start = plant.code
    for old, new in plant.edits.items():
        assert start.count(old) == 1, (fault, old)
        start = start.replace(old, new)
    return Exercise("repair", plant.name, start, plant.code)


def file_text(exercise: Exercise, title: str, command: str) -> str:
    """Return the text of the learner's file: comments with the task, then the code to start from."""
    if exercise.kind == "write":
        task = f"Write {exercise.name}: replace each `raise NotImplementedError` with your code."
    else:
        task = f"{exercise.name} has one mistake. Find and repair it."
    end = f"\n\n{exercise.trial}" if exercise.trial else ""
    return f"# {title}\n# {task}\n# Then: {command}\n\n{exercise.start}{end}"


MODULE = '''"""Multi-head attention."""

import torch
from torch import Tensor, nn


class MultiHeadAttention(nn.Module):
    """mask: [B, 1, T, S] or [B, H, T, S], True where a query may attend to a key."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.w_q = nn.Linear(d_model, d_model)
        self.w_k = nn.Linear(d_model, d_model)
        self.w_v = nn.Linear(d_model, d_model)
        self.w_o = nn.Linear(d_model, d_model)

    def split(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        return x.view(B, T, self.num_heads, self.d_k).transpose(1, 2)  # [B, H, T, D]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        B, T, d_model = query.shape
        q = self.split(self.w_q(query))
        k = self.split(self.w_k(key))
        v = self.split(self.w_v(value))
        scores = q @ k.transpose(-2, -1) / self.d_k**0.5  # [B, H, T, S]
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        weights = scores.softmax(dim=-1)
        heads = weights @ v  # [B, H, T, D]
        merged = heads.transpose(1, 2).reshape(B, T, d_model)
        return self.w_o(merged)
'''

CAUSAL = '''"""Causal self-attention: a position attends to itself and to earlier positions."""

import torch
from torch import Tensor, nn


class CausalSelfAttention(nn.Module):
    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        B, T, d_model = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)  # 3 x [B, H, T, D]
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5  # [B, H, T, T]
        future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(diagonal=1)
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        heads = weights @ v  # [B, H, T, D]
        return self.out(heads.transpose(1, 2).reshape(B, T, d_model))
'''

SOFTMAX = '''"""Softmax."""

import torch
from torch import Tensor


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Weights that sum to 1 along `dim`."""
    powers = (x - x.amax(dim=dim, keepdim=True)).exp()
    return powers / powers.sum(dim=dim, keepdim=True)
'''

SPLIT = '''"""Split the channels into heads."""

import torch
from torch import Tensor


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, T, E] -> [B, H, T, D]: head i gets channels i * D to (i + 1) * D."""
    B, T, E = x.shape
    return x.view(B, T, num_heads, E // num_heads).transpose(1, 2)
'''

MERGE = '''"""Merge heads."""

import torch
from torch import Tensor


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, T, D] -> [B, T, E]: the heads of a position side by side."""
    B, H, T, D = x.shape
    return x.transpose(1, 2).reshape(B, T, H * D)
'''

BLOCK = '''"""A Transformer block with pre-norm."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attention = nn.MultiheadAttention(d_model, num_heads, batch_first=True)
        self.linear1, self.linear2 = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, E] -> [B, T, E]"""
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.linear2(self.linear1(self.norm2(x)).relu())
'''

_SPLIT_LINE = "x.view(B, T, self.num_heads, self.d_k).transpose(1, 2)"
_MERGE_LINE = "heads.transpose(1, 2).reshape(B, T, d_model)"
_HIDE = 'scores = scores.masked_fill(~mask, float("-inf"))'
_IF = "        if mask is not None:\n            "
_WEIGHTS = "        weights = scores.softmax(dim=-1)\n"
_SPLIT_HEADS = "x.view(B, T, num_heads, E // num_heads).transpose(1, 2)"
_MERGE_HEADS = "x.transpose(1, 2).reshape(B, T, H * D)"
_FAULTS: dict[tuple[str, str], dict[str, Edits]] = {  # of code, and a class or function in it
    (MODULE, "MultiHeadAttention"): {
        "no scale": {" / self.d_k**0.5": ""},
        "scale by d_model": {"self.d_k**0.5": "d_model**0.5"},
        "scale by d_k": {"/ self.d_k**0.5": "/ self.d_k"},
        "multiply by sqrt d_k": {"/ self.d_k**0.5": "* self.d_k**0.5"},
        "scale by sqrt H": {"self.d_k**0.5": "self.num_heads**0.5"},
        "scale by sqrt T": {"self.d_k**0.5": "T**0.5"},
        "split by view": {_SPLIT_LINE: "x.view(B, self.num_heads, T, self.d_k)"},
        "heads interleaved": {_SPLIT_LINE: "x.view(B, T, self.d_k, self.num_heads).permute(0, 3, 1, 2)"},
        "merge without transpose": {_MERGE_LINE: "heads.reshape(B, T, d_model)"},
        "merge interleaved": {_MERGE_LINE: "heads.permute(0, 2, 3, 1).reshape(B, T, d_model)"},
        "heads reversed": {_MERGE_LINE: "heads.flip(1).transpose(1, 2).reshape(B, T, d_model)"},
        "view after transpose": {_MERGE_LINE: "heads.transpose(1, 2).view(B, T, d_model)"},
        "softmax over queries": {"softmax(dim=-1)": "softmax(dim=-2)"},
        "softmax over heads": {"softmax(dim=-1)": "softmax(dim=1)"},
        "softmax over batch": {"softmax(dim=-1)": "softmax(dim=0)"},
        "softmax twice": {"softmax(dim=-1)": "softmax(dim=-1).softmax(dim=-1)"},
        "sigmoid": {"scores.softmax(dim=-1)": "scores.sigmoid()"},
        "no softmax": {"scores.softmax(dim=-1)": "scores"},
        "log softmax": {"scores.softmax(dim=-1)": "scores.log_softmax(dim=-1)"},
        "mask inverted": {"masked_fill(~mask": "masked_fill(mask"},
        "mask ignored": {_HIDE: 'scores.masked_fill(~mask, float("-inf"))'},
        "fill with zero": {'float("-inf")': "1e-9"},
        "mask plus 1e9": {'float("-inf")': "1e9"},
        "mask added": {_HIDE: "scores = scores + mask"},
        "mask after softmax": {
            f"{_IF}{_HIDE}\n{_WEIGHTS}": f"{_WEIGHTS}{_IF}weights = weights.masked_fill(~mask, 0.0)\n",
        },
        "no output projection": {"return self.w_o(merged)": "return merged"},
        "output projection twice": {"self.w_o(merged)": "self.w_o(self.w_o(merged))"},
        "weights transposed before v": {"heads = weights @ v": "heads = weights.transpose(-2, -1) @ v"},
        "keys and values swapped": {"self.w_k(key)": "self.w_k(value)", "self.w_v(value)": "self.w_v(key)"},
        "value from key": {"self.w_v(value)": "self.w_v(key)"},
        "key from value": {"self.w_k(key)": "self.w_k(value)"},
        "self-attention only": {"self.w_k(key)": "self.w_k(query)", "self.w_v(value)": "self.w_v(query)"},
        "keys through w_q": {"self.w_k(key)": "self.w_q(key)"},
        "values through w_k": {"self.w_v(value)": "self.w_k(value)"},
        "shared projection": {"self.w_k(key)": "self.w_q(key)", "self.w_v(value)": "self.w_q(value)"},
        "no v projection": {"self.split(self.w_v(value))": "self.split(value)"},
        "relu on projections": {
            "self.w_q(query)": "self.w_q(query).relu()",
            "self.w_k(key)": "self.w_k(key).relu()",
            "self.w_v(value)": "self.w_v(value).relu()",
        },
        "dropout in eval": {"scores.softmax(dim=-1)": "nn.functional.dropout(scores.softmax(dim=-1), 0.1)"},
    },
    (CAUSAL, "CausalSelfAttention"): {
        "causal hides itself": {"triu(diagonal=1)": "triu(diagonal=0)"},
        "causal shows the next": {"triu(diagonal=1)": "triu(diagonal=2)"},
        "causal flipped": {"triu(diagonal=1)": "tril(diagonal=-1)"},
        "causal only in training": {
            "scores.masked_fill(future": "(scores.masked_fill(future",
            '("-inf")).softmax': '("-inf")) if self.training else scores).softmax',
        },
    },
    (SOFTMAX, "softmax"): {
        "own softmax ignores its axis": {
            "x.amax(dim=dim": "x.amax(dim=-1",
            "powers.sum(dim=dim": "powers.sum(dim=-1",
        },
        "own softmax over everything": {
            "x.amax(dim=dim, keepdim=True)": "x.amax()",
            "powers.sum(dim=dim, keepdim=True)": "powers.sum()",
        },
        "own softmax overflows": {"(x - x.amax(dim=dim, keepdim=True)).exp()": "x.exp()"},
    },
    (SPLIT, "split_heads"): {
        "heads split by view": {_SPLIT_HEADS: "x.view(B, num_heads, T, E // num_heads)"},
        "channels dealt out in turn": {
            _SPLIT_HEADS: "x.view(B, T, E // num_heads, num_heads).permute(0, 3, 1, 2)"
        },
    },
    (MERGE, "merge_heads"): {
        "heads merged without a transpose": {_MERGE_HEADS: "x.reshape(B, T, H * D)"},
        "heads merged interleaved": {_MERGE_HEADS: "x.permute(0, 2, 3, 1).reshape(B, T, H * D)"},
    },
    (BLOCK, "Block"): {
        "no residual around attention": {"x = x + self.attention": "x = self.attention"},
        "no residual around feed-forward": {"return x + self.linear2": "return self.linear2"},
        "feed-forward without activation": {".relu())": ")"},
    },
}
PLANTS: dict[str, Plant] = {
    fault: Plant(code, name, edits)
    for (code, name), faults in _FAULTS.items()
    for fault, edits in faults.items()
}
