"""Circuits: what heads write, and what a model's output owes to them.

residual_stream.py    a forward in which only the residual stream and the norms on it carry a gradient
attribution.py        `attribution`: what each head, MLP and the embedding adds to a logit
lens.py               `logit_lens`: the token that would be predicted after each block
"""
