"""Attention multi-têtes, écrite d'après la formule de l'article (Vaswani et al., 2017)."""
from math import sqrt

import torch
from torch import nn


def normaliser(scores: torch.Tensor) -> torch.Tensor:
    """exp(s_ij) / somme_j exp(s_ij)"""
    e = torch.exp(scores)
    return e / e.sum(dim=-1, keepdim=True)


class AttentionMultiTetes(nn.Module):
    def __init__(self, dimension: int, tetes: int):
        super().__init__()
        assert dimension % tetes == 0
        self.tetes = tetes
        self.d_k = dimension // tetes
        # une matrice par tête : (tête, entrée, sortie)
        self.W_Q = nn.Parameter(torch.empty(tetes, dimension, self.d_k))
        self.W_K = nn.Parameter(torch.empty(tetes, dimension, self.d_k))
        self.W_V = nn.Parameter(torch.empty(tetes, dimension, self.d_k))
        self.W_O = nn.Parameter(torch.empty(tetes * self.d_k, dimension))
        for W in (self.W_Q, self.W_K, self.W_V, self.W_O):
            nn.init.normal_(W, std=1 / sqrt(dimension))

    def forward(self, requetes, cles, valeurs, interdit=None):
        """interdit : booléen (n, m) ou (lot, n, m), vrai là où il ne faut pas regarder."""
        if interdit is not None and interdit.dim() == 2:
            interdit = interdit.unsqueeze(0)
        sorties = []
        for t in range(self.tetes):
            Q = requetes @ self.W_Q[t]
            K = cles @ self.W_K[t]
            V = valeurs @ self.W_V[t]
            scores = Q @ K.transpose(1, 2) / sqrt(self.d_k)
            if interdit is not None:
                scores = scores.masked_fill(interdit, float("-inf"))
            poids = normaliser(scores)
            sorties.append(poids @ V)
        return torch.cat(sorties, dim=-1) @ self.W_O
