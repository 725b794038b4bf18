# Atenção com várias cabeças, passo a passo (aula 7)
import torch
import torch.nn as nn
import torch.nn.functional as F


class Cabeca(nn.Module):
    """Uma única cabeça de atenção."""

    def __init__(self, d_modelo, d_cabeca):
        super().__init__()
        self.consulta = nn.Linear(d_modelo, d_cabeca, bias=False)
        self.chave = nn.Linear(d_modelo, d_cabeca, bias=False)
        self.valor = nn.Linear(d_modelo, d_cabeca, bias=False)

    def forward(self, x, mascara=None):
        q, k, v = self.consulta(x), self.chave(x), self.valor(x)
        # produto escalar entre consultas e chaves
        pontos = q @ k.transpose(-2, -1) / (k.shape[-1] ** 0.5)
        if mascara is not None:
            # mascara: True onde NÃO se pode olhar
            pontos = pontos.masked_fill(mascara, float('-inf'))
        pesos = F.softmax(pontos, dim=-1)
        return pesos @ v


class AtencaoMultiCabeca(nn.Module):
    def __init__(self, d_modelo, n_cabecas):
        super().__init__()
        assert d_modelo % n_cabecas == 0
        d_cabeca = d_modelo // n_cabecas
        self.cabecas = [Cabeca(d_modelo, d_cabeca) for _ in range(n_cabecas)]
        self.saida = nn.Linear(d_modelo, d_modelo)

    def forward(self, x, mascara=None):
        # concatena a saída de todas as cabeças na última dimensão
        junto = torch.cat([c(x, mascara) for c in self.cabecas], dim=-1)
        return self.saida(junto)


def mascara_causal(n):
    return torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=1)


if __name__ == '__main__':
    torch.manual_seed(0)
    x = torch.randn(1, 6, 24)
    at = AtencaoMultiCabeca(24, 3)
    print(at(x, mascara_causal(6)).shape)
