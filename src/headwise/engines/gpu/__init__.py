"""The second pass on a GPU: Triton kernels over q, k and lse, nothing quadratic stored.

    cannot.py     whether these kernels can take a request, and why not in words
    tuning.py     block sizes: a small measured table
    request.py    a request as the kernels see it: descriptors, rules, lists of tiles
    tile.py       what every kernel shares: loading, the product, the rules, which tiles a block sees
    lists.py      lists of tiles, for rules kept as tensors
    powers.py     lse as powers of two
    rows.py       sums over each query's keys, and with them a picture of wide cells: one walk
    heads.py      from a value a query to a value a head
    near.py       the weights around each query, and of the first key
    measure.py    statistics and pictures in as few walks as they need
    received.py   sums over each key's queries, key by key: no atomics, the same bits every time
    picture.py    pictures whose cells are narrower than a tile
    dense.py      the weights themselves, and their mean over heads
    top.py        the heaviest keys
    lse.py        the light pass: log-sum-exp alone
    backward.py   the way back to q and k from weights, their mean, or entropy

Nothing here is imported until a tensor on a GPU asks for it: triton comes with torch there, and only there.
Weights are kept as powers of two: w = 2^x with x = log2(e) (s - lse), so one multiply-add and one `exp2` make
a weight from a product.
"""
