import torch
import torch.nn as nn


class PerceiverCrossAttention(nn.Module):
    """Latents attend to the inputs."""

    def __init__(self, latent_channels, in_channels, num_heads=4, head_dim=None):
        super().__init__()
        self.num_heads = num_heads
        head_dim = head_dim or latent_channels // num_heads
        inner = head_dim * num_heads
        self.scale = head_dim ** -0.5
        self.to_q = nn.Linear(latent_channels, inner, bias=False)
        self.to_kv = nn.Linear(in_channels, 2 * inner, bias=False)
        self.to_out = nn.Linear(inner, latent_channels)

    def forward(self, latents, x):
        b, n, _ = latents.shape
        h = self.num_heads
        q = self.to_q(latents)
        k, v = self.to_kv(x).chunk(2, dim=-1)
        q, k, v = (t.reshape(b, -1, h, t.shape[-1] // h).transpose(1, 2) for t in (q, k, v))
        attn = (q @ k.transpose(-2, -1) * self.scale).softmax(-1)
        return self.to_out((attn @ v).transpose(1, 2).reshape(b, n, -1))
