"""Faults of positions, which the examination recognises: rotations (RoPE), a bias by distance (ALiBi)."""

from __future__ import annotations

from .fault import Fault

RIGHT_ROTATION = "queries and keys are rotated by their position, values are not"
REPAIR = "q, k = rotate(q, cos, sin), rotate(k, cos, sin)  # not v"

FAULTS = [
    Fault(
        "far keys favoured",
        "the bias by distance has the wrong sign: far keys are favoured",
        "scores + m |i - j|",
        "scores - m |i - j|, with m > 0 (ALiBi)",
        (
            "What does a key get that is ten positions away, and what does the neighbour get?",
            "The farther a key is away, the higher its score becomes.",
            "Subtract the distance times the slope.",
        ),
        "Attention runs away from the query, and the more so the longer the text.",
        "scores = scores - slopes[:, None, None] * distance",
        lines=(r"alibi|slope", r"dist|abs\(|arange"),
    ),
    Fault(
        "rotation of values",
        "the values are rotated by position, too",
        "softmax((R_i q)(R_j k)^T / sqrt(d_k)) R_j v",
        RIGHT_ROTATION,
        (
            "Which of q, k and v are rotated?",
            "The rotation cancels in the product of q and k, and in nothing else.",
            "Rotate q and k; leave v as it is.",
        ),
        "Outputs depend on the absolute position of each key, and no later layer undoes that.",
        REPAIR,
        lines=(r"\bv\w*\s*=.*(rot|rope|emb)", r"(rot|rope)\w*\(.*\bv\w*\b"),
    ),
    Fault(
        "rotation on one side",
        "only the queries or only the keys are rotated by position",
        "(R_i q) k^T",
        "(R_i q)(R_j k)^T, which depends on i - j alone",
        (
            "Which of q, k and v are rotated?",
            "One of queries and keys is rotated, the other is not.",
            "Rotate both by the same table of angles.",
        ),
        "Scores then depend on one absolute position instead of the distance between two.",
        REPAIR,
        lines=(r"\b[qk]\w*\s*=.*(rot|rope|emb)", r"(rot|rope)\w*\("),
    ),
    Fault(
        "rotation with mixed pairs",
        "channels are paired one way and the angles are laid out for the other",
        "rotate_half(x) with the angles a0, a0, a1, a1, ..",
        "rotate_half(x) with the angles a0, a1, .., a0, a1, ..",
        (
            "Which two channels are turned together, and which angle does each get?",
            "The two channels of a pair get different angles.",
            "Halves go with torch.cat((a, a), -1), neighbours with a.repeat_interleave(2, -1).",
        ),
        "It is no rotation any more: lengths change, and scores do not depend on the distance alone.",
        "angles = torch.cat((angles, angles), dim=-1)  # for rotate_half",
        lines=(r"repeat_interleave\(", r"cat\(\s*[\[(]\s*(\w+)\s*,\s*\1\s*[\])]", r"stack\("),
    ),
    Fault(
        "rotation that stretches",
        "pairs of channels are multiplied by a matrix that is no rotation: a sine or a sign in it is wrong",
        "(a cos + b sin, a sin + b cos), or with cos in place of sin",
        "(a cos - b sin, a sin + b cos)",
        (
            "Write down the matrix [[cos, -sin], [sin, cos]]: which of its four entries differs in the code?",
            "A rotation keeps the length of each pair; here lengths change with the position.",
            "One entry has a minus sign, and the sines are the sines of the same angles.",
        ),
        "Scores grow or shrink with the positions and do not depend on their distance alone.",
        "x = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)",
        lines=(
            r"\bsin\w*\s*=.*\bcos",
            r"cat\(\s*[\[(]\s*\w*2\w*\s*,\s*\w*1",
            r"cat\(\s*[\[(]\s*-.*,\s*-",
            r"\*\s*cos\w*\s*\+\s*\w+\s*\*\s*sin",
        ),
    ),
    Fault(
        "rotation over another axis",
        "the rotation goes by the number of the head or of the sample, not by position",
        "angles of head 0, 1, 2, ..",
        "angles of position 0, 1, 2, ..",
        (
            "Which axis of q does the table of angles run along?",
            "All positions of a head are turned by the same angle, so the rotation cancels in the scores.",
            "Angles run along positions: [T, D] beside q [B, H, T, D], [T, 1, D] beside q [B, T, H, D].",
        ),
        "The module knows nothing of positions: any order of the tokens gives the same outputs.",
        "cos, sin = cos[:T], sin[:T]  # [T, D], beside q and k [B, H, T, D]",
        lines=(r"shape\[", r"size\(", r"unsqueeze\(", r"\[\s*None"),
    ),
]
