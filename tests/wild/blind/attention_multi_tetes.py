# TP n°4 : attention multi-têtes, version pédagogique (une boucle sur les têtes)
import torch
import torch.nn as nn


class AttentionMultiTetes(nn.Module):
    def __init__(self, dim_modele, nb_tetes):
        super().__init__()
        assert dim_modele % nb_tetes == 0, "la dimension doit être divisible par le nombre de têtes"
        self.nb_tetes = nb_tetes
        self.dim_tete = dim_modele // nb_tetes
        self.lin_q = nn.Linear(dim_modele, dim_modele)
        self.lin_k = nn.Linear(dim_modele, dim_modele)
        self.lin_v = nn.Linear(dim_modele, dim_modele)
        self.lin_sortie = nn.Linear(dim_modele, dim_modele)

    def forward(self, requetes, cles=None, valeurs=None, masque=None, renvoyer_poids=False):
        # si on ne donne que les requêtes : auto-attention
        if cles is None:
            cles = requetes
        if valeurs is None:
            valeurs = cles
        Q = self.lin_q(requetes)
        K = self.lin_k(cles)
        V = self.lin_v(valeurs)

        sorties = []
        poids = []
        for t in range(self.nb_tetes):
            # tranche de colonnes qui appartient à la tête t
            debut, fin = t * self.dim_tete, (t + 1) * self.dim_tete
            q, k, v = Q[:, :, debut:fin], K[:, :, debut:fin], V[:, :, debut:fin]
            score = torch.bmm(q, k.transpose(1, 2)) / (self.dim_tete ** 0.5)
            if masque is not None:
                # masque : (lot, n, m), False = position interdite
                score = score.masked_fill(masque.logical_not(), torch.finfo(score.dtype).min)
            alpha = torch.softmax(score, dim=2)
            poids.append(alpha)
            sorties.append(torch.bmm(alpha, v))

        resultat = self.lin_sortie(torch.cat(sorties, dim=2))
        if renvoyer_poids:
            return resultat, torch.stack(poids, dim=1)
        return resultat
