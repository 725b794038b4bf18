"""Engines: from q, k, v and a mask to numbers, as fast as each device allows.

    scores.py              everything that decides one score, any tile of them, their flat form, the way back
    given_weights.py       weights someone else computed, seen as scores
    first_pass.py          the door of the first pass: autograd, torch.compile
    planned.py             plans of calls: one of a kind that came before goes to its kernel at once
    one_query.py           one row of a map, and row statistics of one query
    packed_sequences.py    sequences of several lengths, without padding
    backends.py            the table: who is asked to run a call, and in which order
    backend.py             what a backend is: the call it is given, what it is asked, what it answers
    fused.py               on fused kernels: calls cut into parts they can take, merged by lse
    kernels.py             those kernels, torch's own, an entry each
    decode.py              one query over many keys, on a GPU
    own_kernels.py         every rule in kernels of our own, on a GPU
    wanted.py              row statistics that will be asked for, and what was collected of them
    tiles.py               in plain torch, tile by tile: takes everything, linear memory
    plain.py               as one matrix: any derivative, dropout; quadratic memory
    walk.py                every tile of the weights, block of queries by block
    weights.py             dense weights and their mean over heads: the differentiable part of the second pass
    second_pass.py         pooled pictures, top keys, the way back from entropy
    statistics.py          the statistics: names, formulas, doors
    accumulators.py        the sums they are made of, collected tile by tile
    mass.py                the weight on chosen keys, and how many keys there are to see
    operators.py           the second pass as operators, for torch.compile and torch.export
    gradients.py           the way back from a tile to q, k and what is added; what autograd keeps for it
    gpu/                   both passes in Triton kernels

The first pass gives (output, lse); the second pass needs only q, k and lse.
"""
