"""Engines: from q, k, v and a mask to numbers, as fast as each device allows.

    scores.py       everything that decides one score, and any tile of them
    gradients.py    the way back from a tile to q, k, bias and slopes
    given.py        weights someone else computed, seen as scores
    kernels.py      torch's fused kernels, each as a forward and a backward
    parts.py        cutting a request into pieces a fused kernel can take
    fused.py        running those pieces: the first pass
    tiles.py        the same in plain torch, tile by tile: takes everything, linear memory
    plain.py        the same as one matrix: any derivative, dropout; quadratic memory
    table.py        who can run what, and why not
    churn.py        a guard: shapes that keep changing are not for cuDNN
    express.py      the plainest call on a CPU, with nothing in its way
    attend.py       the door of the first pass: autograd, torch.compile
    walk.py         every tile of the weights, block of queries by block
    weights.py      dense weights and their mean over heads: the differentiable part of the second pass
    second_pass.py  pooled pictures, top keys
    statistics.py   the statistics: names, formulas, accumulators

The first pass gives (output, lse); the second pass needs only q, k and lse.
"""
