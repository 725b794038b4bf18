"""Mehrkopf-Aufmerksamkeit zu Fuss, nur mit NumPy (Übungsblatt 7, Aufgabe 2)."""
import numpy as np


def softmax(z):
    z = z - np.max(z, axis=-1, keepdims=True)
    e = np.exp(z)
    return e / e.sum(axis=-1, keepdims=True)


class MehrkopfAufmerksamkeit:
    """
    Gewichte sind gewöhnliche Attribute, damit man sie von Hand setzen kann.

    breite : Länge eines Merkmalsvektors
    koepfe : Anzahl der Köpfe, teilt die Breite
    """

    def __init__(self, breite, koepfe, keim=0):
        if breite % koepfe != 0:
            raise ValueError("Die Breite muss durch die Zahl der Köpfe teilbar sein.")
        zufall = np.random.default_rng(keim)
        self.breite = breite
        self.koepfe = koepfe
        self.kopfbreite = breite // koepfe
        grenze = np.sqrt(3.0 / breite)
        self.W_q = zufall.uniform(-grenze, grenze, (breite, breite)).astype(np.float32)
        self.W_k = zufall.uniform(-grenze, grenze, (breite, breite)).astype(np.float32)
        self.W_v = zufall.uniform(-grenze, grenze, (breite, breite)).astype(np.float32)
        self.W_o = zufall.uniform(-grenze, grenze, (breite, breite)).astype(np.float32)

    def _teile(self, x):
        # (Stapel, Länge, Breite) -> (Stapel, Köpfe, Länge, Kopfbreite)
        s, l, _ = x.shape
        return np.swapaxes(x.reshape(s, l, self.koepfe, self.kopfbreite), 1, 2)

    def __call__(self, anfrage, schluessel=None, wert=None, gesperrt=None):
        """gesperrt: Wahrheitswerte, True = darf nicht angesehen werden;
        Form (L_a, L_s) oder (Stapel, L_s)-Polsterung als (Stapel, 1, 1, L_s)."""
        if schluessel is None:
            schluessel = anfrage
        if wert is None:
            wert = schluessel
        q = self._teile(anfrage @ self.W_q)
        k = self._teile(schluessel @ self.W_k)
        v = self._teile(wert @ self.W_v)
        punkte = np.matmul(q, k.transpose(0, 1, 3, 2)) / np.sqrt(self.kopfbreite).astype(np.float32)
        if gesperrt is not None:
            punkte = np.where(gesperrt, np.float32(-1e9), punkte)
        anteile = softmax(punkte)
        misch = np.swapaxes(np.matmul(anteile, v), 1, 2)
        misch = misch.reshape(anfrage.shape[0], anfrage.shape[1], self.breite)
        return misch @ self.W_o, anteile


if __name__ == "__main__":
    m = MehrkopfAufmerksamkeit(12, 3)
    x = np.random.rand(2, 5, 12).astype(np.float32)
    y, a = m(x)
    print(y.shape, a.shape, a.sum(-1).round(4).min())
