# %% mechanistic interpretability exercises, day 1
from dataclasses import dataclass
import torch as t
from torch import Tensor, nn


@dataclass
class Config:
    d_model: int = 48
    n_heads: int = 4
    d_head: int = 12
    init_range: float = 0.2
    debug: bool = False


# %%
class AttnLayer(nn.Module):
    IGNORE: Tensor

    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        self.W_Q = nn.Parameter(t.empty((cfg.n_heads, cfg.d_model, cfg.d_head)))
        self.W_K = nn.Parameter(t.empty((cfg.n_heads, cfg.d_model, cfg.d_head)))
        self.W_V = nn.Parameter(t.empty((cfg.n_heads, cfg.d_model, cfg.d_head)))
        self.W_O = nn.Parameter(t.empty((cfg.n_heads, cfg.d_head, cfg.d_model)))
        self.b_Q = nn.Parameter(t.zeros((cfg.n_heads, cfg.d_head)))
        self.b_K = nn.Parameter(t.zeros((cfg.n_heads, cfg.d_head)))
        self.b_V = nn.Parameter(t.zeros((cfg.n_heads, cfg.d_head)))
        self.b_O = nn.Parameter(t.zeros((cfg.d_model)))
        for w in (self.W_Q, self.W_K, self.W_V, self.W_O):
            nn.init.normal_(w, std=cfg.init_range)
        self.register_buffer("IGNORE", t.tensor(float("-inf")), persistent=False)

    def forward(self, resid: Tensor) -> Tensor:
        # resid: [batch pos d_model]
        if self.cfg.debug:
            print("resid:", resid.shape)

        q = t.einsum("bpm,nmh->bpnh", resid, self.W_Q) + self.b_Q
        k = t.einsum("bpm,nmh->bpnh", resid, self.W_K) + self.b_K
        v = t.einsum("bpm,nmh->bpnh", resid, self.W_V) + self.b_V

        scores = t.einsum("bqnh,bknh->bnqk", q, k) / self.cfg.d_head ** 0.5
        pattern = self.apply_causal_mask(scores).softmax(-1)

        z = t.einsum("bnqk,bqnh->bknh", pattern, v)

        return t.einsum("bpnh,nhm->bpm", z, self.W_O) + self.b_O

    def apply_causal_mask(self, scores: Tensor) -> Tensor:
        """[batch n_heads query_pos key_pos]"""
        ones = t.ones(scores.size(-2), scores.size(-1), device=scores.device)
        mask = t.triu(ones, diagonal=1).bool()
        return scores.masked_fill(mask, self.IGNORE)
