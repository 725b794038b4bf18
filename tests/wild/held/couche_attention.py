# -*- coding: utf-8 -*-
# TP Traduction automatique : la sous-couche d'attention (avec résidu et normalisation à l'intérieur)
import torch
import torch.nn as nn
from einops import rearrange, repeat


class SousCoucheAttention(nn.Module):
    """q, k, v : (lot, temps, dim). `longueurs` : nombre de vrais mots de chaque phrase source (lot,)."""

    def __init__(self, dim, nb_tetes, taux=0.1):
        super(SousCoucheAttention, self).__init__()
        self.nb_tetes = nb_tetes
        self.echelle = (dim // nb_tetes) ** -0.5
        self.lin_q = nn.Linear(dim, dim)
        self.lin_kv = nn.Linear(dim, 2 * dim)
        self.lin_sortie = nn.Linear(dim, dim)
        self.abandon_poids = nn.Dropout(taux)
        self.abandon_sortie = nn.Dropout(taux)
        self.norme = nn.LayerNorm(dim)

    def forward(self, x, memoire=None, longueurs=None, causal=False):
        residu = x
        source = x if memoire is None else memoire
        n, s = x.shape[1], source.shape[1]

        q = rearrange(self.lin_q(x), 'b n (h d) -> b h n d', h=self.nb_tetes)
        k, v = rearrange(self.lin_kv(source), 'b s (deux h d) -> deux b h s d', deux=2, h=self.nb_tetes)

        scores = torch.einsum('b h n d, b h s d -> b h n s', q, k) * self.echelle

        permis = torch.ones(1, 1, n, s, dtype=torch.bool, device=x.device)
        if causal:
            permis = permis.tril()
        if longueurs is not None:
            positions = repeat(torch.arange(s, device=x.device), 's -> b s', b=x.shape[0])
            dans_phrase = positions < longueurs.to(x.device)[:, None]
            permis = permis & rearrange(dans_phrase, 'b s -> b 1 1 s')
        scores = scores.masked_fill(~permis, torch.finfo(scores.dtype).min)

        poids = self.abandon_poids(scores.softmax(dim=-1))
        contexte = rearrange(poids @ v, 'b h n d -> b n (h d)')
        sortie = self.abandon_sortie(self.lin_sortie(contexte))
        # post-norme, comme dans l'article
        return self.norme(residu + sortie)


class CoucheEncodeur(nn.Module):
    def __init__(self, dim, nb_tetes, dim_ff, taux=0.1):
        super(CoucheEncodeur, self).__init__()
        self.attention = SousCoucheAttention(dim, nb_tetes, taux)
        self.ff = nn.Sequential(nn.Linear(dim, dim_ff), nn.ReLU(), nn.Dropout(taux), nn.Linear(dim_ff, dim))
        self.norme = nn.LayerNorm(dim)

    def forward(self, x, longueurs=None):
        x = self.attention(x, longueurs=longueurs)
        return self.norme(x + self.ff(x))
