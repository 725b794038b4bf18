"""Our kernels on a GPU, in Triton: the first pass with every rule, the second over q, k and lse.

    cannot.py      whether these kernels can take a request, and why not in words
    launches.py    block sizes, a small measured table; compiled kernels, looked up by us
    straight_launch.py  a compiled kernel launched without Triton's own way there, where that is known
    request.py     a request as the kernels see it: descriptors, rules, lists of tiles
    tile.py        what every kernel shares: loading, the product, the rules, which tiles a block sees
    lists.py       what is made ready before a walk: lists of tiles, lse as powers of two
    rows.py        sums over each query's keys, and with them a picture of wide cells: one walk
    neighbours.py  the weights around each query, what each key receives, from queries to heads
    pictures.py    pictures of narrow cells; statistics and pictures in as few walks as they need
    dense.py       the weights themselves, and their mean over heads
    heaviest.py    the heaviest keys; the light pass: log-sum-exp alone
    attend.py      the first pass: outputs, lse, row statistics on the way
    attend_backward.py  the way back from it
    single_query.py  the first pass of one query over many keys: a step of generation
    backward.py    the way back to q and k from weights, their mean, or entropy

Nothing here but the first two is imported until a tensor on a GPU asks for it: triton comes with torch there,
and only there. Weights are kept as powers of two: w = 2^x with x = log2(e) (s - lse), so one multiply-add and
one `exp2` make a weight from a product.
"""
