# Atención multi-cabeza para el proyecto final
import math
import torch
from torch import nn
import torch.nn.functional as F


class AtencionMultiCabeza(nn.Module):
    def __init__(self, d_modelo, n_cabezas, p_dropout=0.1):
        super().__init__()
        self.n_cabezas = n_cabezas
        self.d_cabeza = d_modelo // n_cabezas
        self.p_dropout = p_dropout
        self.W = nn.ModuleDict({
            'q': nn.Linear(d_modelo, d_modelo),
            'k': nn.Linear(d_modelo, d_modelo),
            'v': nn.Linear(d_modelo, d_modelo),
            'o': nn.Linear(d_modelo, d_modelo),
        })

    def forward(self, x, mascara=None):
        """
        x: (lote, largo, d_modelo)
        mascara: (lote, largo, largo) booleana; True donde SÍ se puede mirar
        """
        lote, largo, d = x.shape
        dims = (lote, largo, self.n_cabezas, self.d_cabeza)

        x = self.W['q'](x)
        q = x.view(dims).transpose(1, 2)
        k = self.W['k'](x).view(dims).transpose(1, 2)
        v = self.W['v'](x).view(dims).transpose(1, 2)

        puntajes = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.d_cabeza)
        if mascara is not None:
            puntajes = puntajes.masked_fill(~mascara.unsqueeze(1), -1e9)
        pesos = F.softmax(puntajes, dim=-1)
        pesos = F.dropout(pesos, self.p_dropout)

        salida = torch.matmul(pesos, v).transpose(1, 2).contiguous().view(lote, largo, d)
        return self.W['o'](salida)
