"""`headwise.parallel.attention`: one call of attention with its sequence over a group of ranks.

Letters: B batch, T query_len, S key_len, H num_heads, Hk num_kv_heads, D head_dim, Dv value_dim; t, s this
rank's of T, S.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..arguments import OF_ATTENTION, check_tensors, refuse, rules_and_scoring, under_autocast
from ..engines.first_pass import call_of
from ..engines.scores import Scores
from ..errors import ArgumentError, HeadwiseError, ShapeError
from ..masks import NOTHING_HIDDEN, Mask
from ..scoring import Bias, Scoring
from .ring import Mesh, Ring
from .ring_attention import attend
from .sequence import Layout, check_order, fingerprint, not_split, split_error
from .shard import Shard
from .sharded_map import ShardedMap

__all__ = ["attend_laid_out", "attention", "laid_out"]

NAMES = ("batch", "num_heads", "num_kv_heads", "head_dim", "value_dim", "bytes a number")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Bias | None = None,
    sinks: Tensor | None = None,
    *,
    mesh: Mesh = None,
    axis: str | None = None,
    order: str = "zigzag",
    length: int | tuple[int, int] | None = None,
    **wrong: object,
) -> tuple[Tensor, ShardedMap]:
    """`headwise.attention` with the tokens over several ranks, each with its own queries, keys and values.

    Masks and biases are those of the whole sequence, the same on every rank, as one process would be given
    them. A learned bias, slopes and sinks get the gradient of this rank's queries: add it up over ranks
    (`sum_gradients`), as that of any parameter.

    Args:
        q: [B, H, t, D], this rank's queries, as `split` gives them.
        k: [B, Hk, s, D], this rank's keys; v: [B, Hk, s, Dv], their values.
        mask, causal, window, scale, softcap, bias, sinks: as in `headwise.attention`.
        mesh: a `DeviceMesh`, a group, or None for all ranks; axis: of a mesh of several dimensions, which.
        order: how tokens lie over ranks: "zigzag", or "in order"; as in `split`.
        length: T = S, or (T, S), where it is known beforehand. Without it ranks tell each other how many
            tokens they have, and that their arguments are right: a small message, and on a GPU a wait.

    Returns:
        output [B, H, t, Dv] of this rank's queries, and the map of the whole, [B, H, T, S].

    Raises:
        ShapeError, ArgumentError, MaskError: as `headwise.attention`; tokens that are not the rank's own, not
            split, or split in another order; a function transform or a forward-mode derivative.
        HeadwiseError: another rank raised one of these.
    """
    if wrong:
        refuse("attention", wrong, OF_ATTENTION, attention)
    ring = Ring.of(mesh, axis)
    error: HeadwiseError | TypeError | None = None
    given = (q, k, v)  # autocast makes others, without the mark of `split`
    try:
        check_order(order)
        q, k, v = under_autocast(q, k, v)
        check_tensors(q, k, v)
        for tokens in given:
            wrong_order = split_error(tokens, ring, order, dim=2)
            if wrong_order is not None:
                raise wrong_order
    except (HeadwiseError, TypeError) as refused:
        error = refused
    queries, keys = laid_out(ring, order, length, q, k, v, error, given)
    shape = (q.shape[0], q.shape[1], queries.length, keys.length)
    rules = rules_and_scoring(q, shape, mask, causal, window, scale, softcap, bias, sinks)
    return attend_laid_out(Shard(ring, q, k, *rules, queries, keys), v)


def attend_laid_out(shard: Shard, v: Tensor) -> tuple[Tensor, ShardedMap]:
    """(output, map) of a shard whose every argument is right.

    Raises:
        ArgumentError: a function transform (torch.func) or a forward-mode derivative is wanted.
    """
    alone = Scores(shard.q, shard.k, NOTHING_HIDDEN, Scoring(shard.scoring.scale))
    reason = call_of(alone, v).plain_because
    if reason is not None:
        raise ArgumentError(
            f"attention must run plainly over {shard.ring.size} ranks: {reason}; use one process"
        )
    output, lse = attend(shard, v)
    return output, ShardedMap(shard, lse)


def laid_out(
    ring: Ring,
    order: str,
    length: int | tuple[int, int] | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    error: BaseException | None = None,
    tokens: Sequence[Tensor] = (),
) -> tuple[Layout, Layout]:
    """How queries [B, H, t, D] and keys lie over the ranks; all ranks agree, or all raise.

    Args:
        length: of the whole, where it is known: then nobody is asked.
        error: what this rank would raise.
        tokens: what ranks compare, to refuse what is the same on all of them; the same number on each.
    """
    if length is None:
        if error is not None:
            q = k = v = torch.empty(0, 0, 0, 0, device=getattr(q, "device", None))
        device = q.device
        mine = [q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype.itemsize]
        prints = [0.0 if error is not None else fingerprint(each) for each in tokens]
        told = ring.agree([*prints, q.shape[2], k.shape[2], *mine], error, device)
        sizes = [[int(n) for n in numbers[len(tokens) :]] for numbers in told]
        if not mine[0]:
            raise ShapeError(
                f"batch must not be empty over {ring.size} ranks: got 0 sequences; skip the call"
            )
        for rank, (_, _, *theirs) in enumerate(sizes):
            for name, a, b in zip(NAMES, mine, theirs, strict=True):
                if a != b:
                    raise ShapeError(
                        f"ranks must agree in {name}: {a} on rank {ring.rank}, {b} on rank {rank}; only the "
                        "sequence lies over ranks"
                    )
        for at, each in enumerate(tokens):
            same = not_split([numbers[at] for numbers in told], each, order)
            if same is not None:
                raise same
        rows, columns = ({rank: numbers[i] for rank, numbers in enumerate(sizes)} for i in (0, 1))
        T, S = sum(rows.values()), sum(columns.values())
    else:
        if error is not None:
            raise error
        T, S = length if isinstance(length, tuple) else (length, length)
        rows, columns = ({ring.rank: x.shape[2]} for x in (q, k))
    queries, keys = Layout(T, ring.size, order), Layout(S, ring.size, order)
    queries.check(rows, "queries")
    keys.check(columns, "keys")
    return queries, keys
