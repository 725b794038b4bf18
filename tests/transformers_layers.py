"""Single attention layers of transformers, tiny and with random weights, beside ours with the same weights.

Both are held against each other twice over, by errors of plain code alone (`judge.py` says why): ours in
float64 is as close to theirs in float64 as theirs in float32 is, and ours in float32 is within twice the
error of theirs. (Theirs makes angles, norms and softmax in float32 whatever it is given.)

Letters: B batch, T length, E width, H heads, Hk key/value heads, D head_dim.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw
from judge import assert_judged, error, largest

B, T, E, H, Hk, D = 2, 11, 30, 6, 3, 10  # E is a multiple of H, as some configurations demand
SIZES = {"hidden_size": E, "num_attention_heads": H, "num_key_value_heads": Hk, "head_dim": D}
OURS = {"d_model": E, "num_heads": H, "num_kv_heads": Hk, "head_dim": D}
PACKED_SIZES = {"hidden_size": H * D, "num_attention_heads": H}
OURS_PACKED = {"d_model": H * D, "num_heads": H, "num_kv_heads": None, "head_dim": None}
State = dict[str, Tensor]


def rotary(**settings: Any) -> dict[str, Any]:
    """How transformers writes down angles."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, **settings}}


@dataclass(frozen=True)
class Layer:
    """A family's attention layer: its classes by name, its settings, and what ours is made with."""

    family: str  # the module of transformers.models
    classes: str  # what the names of its classes begin with
    theirs: dict[str, Any]
    ours: dict[str, Any] = field(default_factory=dict)
    preset: str = ""
    call: Callable[..., Any] | None = None  # (attention, x, mask, turns) -> output; None: as Llama's
    state: Callable[[State], State] = dict  # their state dict as ours takes it
    causal: bool = True
    window: int | None = None
    config: str = ""
    extra: dict[str, Any] = field(default_factory=dict)  # arguments of their layer
    turned: bool = True  # whether the family has rotary positions
    kind: tuple[str, ...] = ()  # which of a family's kinds of layers this is

    def __repr__(self) -> str:
        return self.preset or self.family

    def build(self) -> tuple[nn.Module, nn.Module | None]:
        """Their attention and what makes its angles; the same weights every time."""
        import transformers

        code = importlib.import_module(f"transformers.models.{self.family}.modeling_{self.family}")
        config = getattr(transformers, self.config or f"{self.classes}Config")(**self.theirs)
        config._attn_implementation = "eager"
        attention = getattr(code, f"{self.classes}Attention")(config, layer_idx=0, **self.extra).eval()
        random = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in attention.parameters():
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=random))
        turns = getattr(code, f"{self.classes}RotaryEmbedding")(config) if self.turned else None
        return attention.requires_grad_(False), turns

    def made(self, weights: State) -> hw.MultiHeadAttention:
        """Ours, from the preset or from the options alone, with the same weights."""
        sizes = (
            OURS_PACKED if "num_key_value_heads" not in self.theirs and "d_model" not in self.theirs else OURS
        )
        options = {**sizes, **self.ours}
        make = hw.MultiHeadAttention if not self.preset else hw.MultiHeadAttention.preset
        named = () if not self.preset else (self.preset,)
        if not self.preset:
            options = {"causal": self.causal, "window": self.window, **options}
        elif self.window is not None:
            options["window"] = self.window
        ours = make(*named, **options).eval().requires_grad_(False)
        ours.load_state_dict(self.state(dict(weights)))
        return ours


def additive(causal: bool, window: int | None, dtype: torch.dtype) -> Tensor:
    """Who may attend to whom, as transformers adds it, [1, 1, T, T]."""
    i, j = torch.arange(T)[:, None], torch.arange(T)
    visible = torch.ones(T, T, dtype=torch.bool)
    if causal:
        visible &= j <= i
    if window is not None:
        visible &= i - j < window
    return torch.zeros(1, 1, T, T, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


def run(layer: Layer, attention: nn.Module, turns: nn.Module | None, x: Tensor) -> Tensor:
    """Their output."""
    mask = additive(layer.causal, layer.window, x.dtype)
    angles = None if turns is None else turns(x, torch.arange(T)[None], *layer.kind)
    if layer.call is not None:
        output: Tensor = layer.call(attention, x, mask, angles)[0]
    else:
        output = attention(hidden_states=x, position_embeddings=angles, attention_mask=mask)[0]
    return output


def judged(layer: Layer) -> None:
    """Ours equals theirs, in float64 and in float32."""
    attention, turns = layer.build()
    ours = layer.made(attention.state_dict())
    x = torch.randn(B, T, ours.d_model, generator=torch.Generator().manual_seed(3))
    theirs32 = run(layer, attention, turns, x)
    theirs64 = run(layer, attention.double(), turns, x.double())
    ours32, ours64 = ours(x)[0], ours.double()(x.double())[0]
    allowed = 2 * (error(theirs32, theirs64) + torch.finfo(torch.float32).eps * largest(theirs64))
    assert error(ours64, theirs64) <= allowed, f"{layer}: {error(ours64, theirs64):.3g} > {allowed:.3g}"
    assert_judged(ours32, theirs32, ours64, dtype=torch.float32, name=repr(layer))


# Their state dicts, where names alone do not say it


def head_by_head(state: State, width: int = D) -> State:
    """q, k and v of the first head, of the second, ..: in order."""
    for end in ("weight", "bias"):
        split = state.pop(f"query_key_value.{end}").unflatten(0, (H, -1)).split(width, 1)
        state[f"in_proj_{end}"] = torch.cat([part.flatten(0, 1) for part in split])
    return state


def in_order(state: State) -> State:
    """All of q, then k, then v already."""
    return {name.replace("query_key_value.", "in_proj_"): value for name, value in state.items()}


def one_more(state: State) -> State:
    """Gemma's norms keep g - 1."""
    return {name: value + 1 if "_norm" in name else value for name, value in state.items()}


def with_gates(state: State) -> State:
    """Qwen3-Next's q_proj makes a head's queries, then its gates."""
    q, gate = state["q_proj.weight"].unflatten(0, (H, 2, D)).unbind(1)
    return one_more(state) | {"q_proj.weight": q.flatten(0, 1), "gate_proj.weight": gate.flatten(0, 1)}


# Their calls, where they are not Llama's


def t5(attention: Any, x: Tensor, mask: Tensor, _: object) -> Any:
    return attention(x, mask=mask)


def bloom(attention: Any, x: Tensor, mask: Tensor, _: object) -> Any:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    alibi = build_alibi_tensor(torch.ones(B, T), H, x.dtype)
    return attention(x, residual=torch.zeros_like(x), alibi=alibi, attention_mask=mask)


def falcon(attention: Any, x: Tensor, mask: Tensor, turns: object) -> Any:
    return attention(x, alibi=None, attention_mask=mask, position_embeddings=turns)
