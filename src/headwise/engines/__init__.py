"""Engines: from q, k, v and a mask to numbers, as fast as each device allows.

    scores.py              everything that determines a score, tiles of scores, their flat form
    first_pass.py          the first pass: the choice of a backend, autograd, the log-sum-exp
    plans.py               how calls were run, stored for the next call of the same shapes and options
    backends.py            the table of backends, in order; our own kernels, on a GPU
    backend.py             the interface of backends
    fused.py               on fused kernels: calls cut into parts they can take, merged by lse
    kernels.py             those kernels, torch's own, an entry each
    plain.py               in plain torch: tile by tile, in linear memory; as one matrix, with any derivative
    packed_sequences.py    sequences of several lengths, without padding
    walk.py                every tile of the weights, block of queries by block; weights computed elsewhere
    weights.py             what has a gradient: weights, their mean over heads, entropy
    second_pass.py         statistics, pooled maps, the heaviest keys, mass on chosen keys
    statistics.py          the statistics, an entry each, and the sums they are made of
    one_query.py           one row of a map, and row statistics of one query
    operators.py           both passes as operators, for torch.compile and torch.export
    gradients.py           gradients of tiles for q, k and what is added; what autograd saves of a call
    gpu/                   both passes in Triton kernels

The first pass gives (output, lse); the second pass needs only q, k and lse.
"""
