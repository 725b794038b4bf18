"""Our kernels on a GPU, in Triton: the first pass with every rule, the second over q, k and lse.

    launches.py         whether kernels can take a request; block sizes, launches
    straight_launch.py  a compiled kernel launched without Triton's dispatch, for known versions of Triton
    request.py          a request as the kernels see it: descriptors, rules, lists of tiles
    tile.py             what every kernel shares: loading, the product, the rules, which tiles a block sees
    lists.py            what is made ready before a walk: lists of tiles, lse as powers of two
    attend.py           the first pass: outputs, lse, row statistics on the way
    attend_backward.py  its backward
    single_query.py     the first pass of one query over many keys: a step of generation
    rows.py             sums over each query's keys, and with them a picture of wide cells; lse alone
    measurements.py     around each query, what each key receives, narrow pictures; all of it in few walks
    dense.py            the weights themselves, their mean over heads, the heaviest keys
    backward.py         gradients of q and k from weights, their mean, or entropy

Nothing here but the first is imported until a tensor on a GPU asks for it: triton comes with torch there,
and only there. Weights are kept as powers of two: w = 2^x with x = log2(e) (s - lse), so one multiply-add and
one `exp2` make a weight from a product.
"""
