"""Faults of positions: rotations (RoPE) and distance biases (ALiBi)."""

from __future__ import annotations

from .fault import Fault

RIGHT_ROTATION = "queries and keys are rotated by their position, values are not"
REPAIR = "q, k = rotate(q, cos, sin), rotate(k, cos, sin)  # not v"

FAULTS = [
    Fault(
        "far keys favoured",
        "the distance bias has the wrong sign: it raises the scores of far keys",
        "scores + m |i - j|",
        "scores - m |i - j|, with m > 0 (ALiBi)",
        (
            "Compare the bias of a key ten positions away with that of the next key.",
            "The farther away a key is, the more is added to its score.",
            "Subtract slope times distance from the scores.",
        ),
        "Queries attend mostly to the tokens farthest away, the more so in long texts.",
        "scores = scores - slopes[:, None, None] * distance",
        lines=(r"alibi|slope", r"dist|abs\(|arange"),
    ),
    Fault(
        "rotation of values",
        "the values are rotated by position",
        "softmax((R_i q)(R_j k)^T / sqrt(d_k)) R_j v",
        RIGHT_ROTATION,
        (
            "Which of q, k and v are rotated?",
            "In the product of q and k only the difference of the two rotations remains; for rotated "
            "values nothing cancels.",
            "Rotate q and k only.",
        ),
        "The output depends on the absolute position of each key, and later layers do not undo this.",
        REPAIR,
        lines=(r"\bv\w*\s*=.*(rot|rope|emb)", r"(rot|rope)\w*\(.*\bv\w*\b"),
    ),
    Fault(
        "rotation on one side",
        "only the queries or only the keys are rotated by position",
        "(R_i q) k^T",
        "(R_i q)(R_j k)^T, which depends on i - j only",
        (
            "Which of q, k and v are rotated?",
            "Either the queries or the keys are not rotated.",
            "Rotate both q and k with the same table of angles.",
        ),
        "Scores depend on one absolute position instead of the distance between two positions.",
        REPAIR,
        lines=(r"\b[qk]\w*\s*=.*(rot|rope|emb)", r"(rot|rope)\w*\("),
    ),
    Fault(
        "rotation with mixed pairs",
        "the channels are paired in one way, and the angles are arranged for another",
        "rotate_half(x) with the angles a0, a0, a1, a1, ..",
        "rotate_half(x) with the angles a0, a1, .., a0, a1, ..",
        (
            "Which two channels form a pair, and which angle is used for each?",
            "The two channels of a pair get different angles.",
            "For pairs of one channel from each half, use torch.cat((a, a), -1); for neighbouring "
            "channels, a.repeat_interleave(2, -1).",
        ),
        "The result is not a rotation: lengths change, and scores depend on more than the distance.",
        "angles = torch.cat((angles, angles), dim=-1)  # for rotate_half",
        lines=(r"repeat_interleave\(", r"cat\(\s*[\[(]\s*(\w+)\s*,\s*\1\s*[\])]", r"stack\("),
    ),
    Fault(
        "rotation that stretches",
        "a sine or a sign in the rotation is wrong, so it changes the length of channel pairs",
        "(a cos + b sin, a sin + b cos), for example",
        "(a cos - b sin, a sin + b cos)",
        (
            "Compare the code with the matrix [[cos, -sin], [sin, cos]]. Which of the four entries differs?",
            "A rotation does not change the length of a pair; here the length changes with the position.",
            "Exactly one entry has a minus sign, and sin and cos must use the same angles.",
        ),
        "Scores change with the absolute positions and not only with the distance.",
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
        "the angle of the rotation depends on the head or the sample instead of the position",
        "angles of head 0, 1, 2, ..",
        "angles of position 0, 1, 2, ..",
        (
            "Which axis of q is the table of angles aligned with?",
            "All positions of a head are rotated by the same angle, so the rotation cancels in the scores.",
            "The angles must follow the positions: shape [T, D] for q [B, H, T, D], and [T, 1, D] for q "
            "[B, T, H, D].",
        ),
        "The module does not use positions: another order of the tokens gives the same weights.",
        "cos, sin = cos[:T], sin[:T]  # [T, D], beside q and k [B, H, T, D]",
        lines=(r"shape\[", r"size\(", r"unsqueeze\(", r"\[\s*None"),
    ),
]
