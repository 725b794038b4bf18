import torch


class MultiQueryAttention(torch.nn.Module):
    """Shazeer 2019, "Fast Transformer Decoding: One Write-Head is All You Need".

    Many query heads, a single key head and a single value head. Letters as in the paper:
    b batch, n query positions, m memory positions, d model, h heads, k key size, v value size.
    """

    def __init__(self, d, h, k=None, v=None):
        super().__init__()
        k = k or d // h
        v = v or d // h
        self.P_q = torch.nn.Parameter(torch.empty(h, d, k))
        self.P_k = torch.nn.Parameter(torch.empty(d, k))
        self.P_v = torch.nn.Parameter(torch.empty(d, v))
        self.P_o = torch.nn.Parameter(torch.empty(h, d, v))
        self.reset_parameters()

    def reset_parameters(self):
        d = self.P_k.shape[0]
        for p in (self.P_q, self.P_k, self.P_v):
            torch.nn.init.normal_(p, std=d ** -0.5)
        h, _, v = self.P_o.shape
        torch.nn.init.normal_(self.P_o, std=(h * v) ** -0.5)

    def forward(self, X, M=None, mask=None):
        """X: [b, n, d], M: [b, m, d] (X when omitted), mask: added to the logits, [b, h, n, m] or broadcastable
        (0 where allowed, -inf or a large negative number where not)."""
        if M is None:
            M = X
        Q = torch.einsum("bnd,hdk->bhnk", X, self.P_q)
        K = torch.einsum("bmd,dk->bmk", M, self.P_k)
        V = torch.einsum("bmd,dv->bmv", M, self.P_v)
        logits = torch.einsum("bhnk,bmk->bhnm", Q, K) / Q.shape[-1] ** 0.5
        if mask is not None:
            logits = logits + mask
        weights = logits.softmax(-1)
        O = torch.einsum("bhnm,bmv->bhnv", weights, V)
        return torch.einsum("bhnv,hdv->bnd", O, self.P_o)
