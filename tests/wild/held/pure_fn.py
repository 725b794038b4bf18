"""Pure-function attention: parameters are a plain dict, nothing is stored anywhere.

    p = init_attention(torch.Generator().manual_seed(0), width=64, heads=4)
    y = apply_attention(p, x)                          # self
    y = apply_attention(p, x, memory)                  # cross
    y = apply_attention(p, x, bias=causal_bias(T))     # decoder
"""
from typing import Dict, Optional

import torch

Params = Dict[str, torch.Tensor]


def init_attention(gen: torch.Generator, width: int, heads: int, head_dim: Optional[int] = None) -> Params:
    head_dim = head_dim or width // heads
    fan_in, fan_out = width ** -0.5, (heads * head_dim) ** -0.5

    def normal(*shape, std):
        return torch.randn(*shape, generator=gen) * std

    return {
        "q": normal(heads, width, head_dim, std=fan_in),
        "k": normal(heads, width, head_dim, std=fan_in),
        "v": normal(heads, width, head_dim, std=fan_in),
        "o": normal(heads, head_dim, width, std=fan_out),
    }


def causal_bias(t: int, device=None) -> torch.Tensor:
    return torch.full((t, t), float("-inf"), device=device).triu(1)


def padding_bias(keep: torch.Tensor) -> torch.Tensor:
    """keep: bool [B, S], True for real tokens -> additive [B, 1, 1, S]"""
    out = torch.zeros(keep.shape, device=keep.device)
    return out.masked_fill(~keep, float("-inf"))[:, None, None]


def logsumexp_weights(s: torch.Tensor) -> torch.Tensor:
    return (s - s.logsumexp(-1, keepdim=True)).exp()


def apply_attention(
    params: Params,
    x: torch.Tensor,
    memory: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    m = x if memory is None else memory
    d = params["q"].shape[-1]
    # heads first everywhere: [B, H, T, D]
    q = torch.einsum("bte,hed->bhtd", x, params["q"]) * d ** -0.5
    k = torch.einsum("bse,hed->bhsd", m, params["k"])
    v = torch.einsum("bse,hed->bhsd", m, params["v"])
    s = torch.einsum("bhtd,bhsd->bhts", q, k)
    if bias is not None:
        s = s + bias
    w = logsumexp_weights(s)
    # sum over the heads is the concatenation followed by the output matrix
    return torch.einsum("bhts,bhsd,hde->bte", w, v, params["o"])
