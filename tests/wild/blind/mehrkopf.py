import torch
from torch import nn


class MehrkopfAufmerksamkeit(nn.Module):
    """Mehrkopf-Aufmerksamkeit für den Encoder (Masterarbeit, Kapitel 3).

    breite: Breite des Modells, koepfe: Anzahl der Köpfe.
    """

    def __init__(self, breite: int, koepfe: int, p: float = 0.0):
        super().__init__()
        if breite % koepfe != 0:
            raise ValueError("breite muss durch koepfe teilbar sein")
        self.koepfe = koepfe
        self.kopfbreite = breite // koepfe
        self.anfrage = nn.Linear(breite, breite)
        self.schluessel = nn.Linear(breite, breite)
        self.wert = nn.Linear(breite, breite)
        self.ausgang = nn.Linear(breite, breite)
        self.aussetzen = nn.Dropout(p)

    def aufteilen(self, t):
        n, l, _ = t.shape
        return t.view(n, l, self.koepfe, self.kopfbreite).transpose(1, 2)

    def forward(self, x, gedaechtnis=None, polster=None):
        # polster: (Stapel, Länge), True = Füllzeichen
        quelle = x if gedaechtnis is None else gedaechtnis
        a = self.aufteilen(self.anfrage(x))
        s = self.aufteilen(self.schluessel(quelle))
        w = self.aufteilen(self.wert(quelle))

        punkte = a @ s.transpose(-1, -2) * self.kopfbreite ** -0.5
        if polster is not None:
            punkte = punkte.masked_fill(polster[:, None, None, :], float("-inf"))
        gewichte = self.aussetzen(punkte.softmax(dim=-1))

        y = gewichte @ w                       # (Stapel, Köpfe, Länge, Kopfbreite)
        y = y.contiguous().view(x.shape)       # Köpfe wieder zusammenfügen
        return self.ausgang(y)
