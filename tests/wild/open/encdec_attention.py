import math
import torch
import torch.nn as nn


class MehrkopfAufmerksamkeit(nn.Module):
    """Aufmerksamkeit zwischen Decoder (Anfrage) und Encoder (Schlüssel, Wert)."""

    def __init__(self, d_modell: int, koepfe: int, dropout: float = 0.0):
        super().__init__()
        assert d_modell % koepfe == 0
        self.koepfe = koepfe
        self.d_kopf = d_modell // koepfe
        self.lin_q = nn.Linear(d_modell, d_modell)
        self.lin_k = nn.Linear(d_modell, d_modell)
        self.lin_v = nn.Linear(d_modell, d_modell)
        self.lin_aus = nn.Linear(d_modell, d_modell)
        self.dropout = nn.Dropout(dropout)

    def _zerlegen(self, x):
        b, n, _ = x.shape
        return x.view(b, n, self.koepfe, self.d_kopf).transpose(1, 2)

    def forward(self, query, key, value, mask=None):
        # mask: (B, 1, 1, S) oder (B, 1, T, S); 0 = verdeckt
        q = self._zerlegen(self.lin_q(query))
        k = self._zerlegen(self.lin_k(key))
        v = self._zerlegen(self.lin_v(key))

        werte = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.d_kopf)
        if mask is not None:
            werte = werte.masked_fill(mask == 0, -1e9)
        gewichte = self.dropout(torch.softmax(werte, dim=-1))

        kontext = torch.matmul(gewichte, v)
        kontext = kontext.transpose(1, 2).flatten(start_dim=2)
        return self.lin_aus(kontext), gewichte


class DecoderSchicht(nn.Module):
    def __init__(self, d_modell, koepfe):
        super().__init__()
        self.selbst = MehrkopfAufmerksamkeit(d_modell, koepfe)
        self.kreuz = MehrkopfAufmerksamkeit(d_modell, koepfe)
        self.n1 = nn.LayerNorm(d_modell)
        self.n2 = nn.LayerNorm(d_modell)

    def forward(self, y, x, y_mask=None, x_mask=None):
        y = self.n1(y + self.selbst(y, y, y, y_mask)[0])
        return self.n2(y + self.kreuz(y, x, x, x_mask)[0])
