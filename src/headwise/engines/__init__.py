"""Engines: from q, k, v and a mask to numbers, as fast as each device allows.

    scores.py       everything that decides one score; any tile of them, and the way back to q and k
    kernels.py      torch's fused kernels, each as a forward and a backward
    parts.py        cutting a request into pieces a fused kernel can take
    fused.py        running those pieces: the first pass
    tiles.py        the same in plain torch, tile by tile: takes everything, linear memory
    plain.py        the same as one matrix: any derivative, dropout; quadratic memory
    table.py        who can run what, and why not
    operator.py     the one operator autograd and torch.compile see
    second_pass.py  any weights, their mean, pooled pictures, top keys, from q, k and lse
    statistics.py   the statistics: names, formulas, accumulators

The first pass gives (output, lse); the second pass needs only q, k and lse.
"""
