"""Messages about sizes and axes, in plain words."""

from __future__ import annotations

import math
import re

from .about import About, Rule, Said, counted

Match = re.Match[str]


def _view(match: Match, about: About) -> Said:
    if about.says(r"transpose|permute|\.m?T\b|swapaxes"):
        because = "transpose moves no numbers in memory, it only reads them in another order"
    else:
        because = (
            "the tensor was transposed or permuted earlier, and its numbers no longer lie in order in memory"
        )
    return Said(
        f"view cannot be used here: {because}, and view needs them in order",
        "write .reshape(...) instead of .view(...), or .contiguous() before .view(...)",
    )


def _product(match: Match, about: About) -> Said:
    rows, given, expected, out = (int(one) for one in match.groups())
    layers = about.layers()
    if len(layers) == 1:
        which = f"self.{layers[0]}{about.where_set(layers[0])}"
    elif layers:
        which = "one of " + ", ".join(f"self.{one}" for one in layers)
    else:
        return Said(
            f"a matrix of {rows} × {given} cannot be multiplied by one of {expected} × {out}: "
            f"the inner sizes, {given} and {expected}, must be equal",
            "print the shapes of both before this line; one of them may need a transpose",
        )
    heads = ""
    if given != expected and (expected % given == 0 or given % expected == 0):
        many = max(given, expected) // min(given, expected)
        heads = f". One is {many} times the other: heads split, or joined, on one side only?"
    return Said(
        f"{which} takes vectors of {expected} numbers and was given vectors of {given}{heads.rstrip('.')}",
        "make its first argument the width of what it is given, or join the heads before it",
    )


def _invalid_shape(match: Match, about: About) -> Said:
    sizes = [int(one) for one in re.findall(r"-?\d+", match[1])]
    held, product = int(match[2]), math.prod(size for size in sizes if size >= 0)
    if -1 in sizes:
        wrong = f"the sizes beside -1 multiply to {product}, and {held} is no multiple of that"
    else:
        wrong = f"[{match[1]}] has room for {product} numbers, the tensor holds {held}"
        less, more = sorted((held, product))
        if less and more % less == 0:
            wrong += f", {more // less} times {'less' if held < product else 'more'}"
    return Said(
        f"{wrong}. A size is wrong: the head count and head size must multiply to the width, "
        "and queries and keys may differ in length",
        "take each length from its own tensor, e.g. k.size(1) for k, or write -1 for it; "
        "print the tensor's shape before this line",
    )


def _must_match(match: Match, about: About) -> Said:
    a, b, axis = match.groups()
    if about.says("mask"):
        return Said(
            f"the mask does not line up with the scores: axis {axis} is {a} on one side and {b} on the other "
            "(axes are lined up from the last one)",
            "give the mask the axes of the scores, [B, H, T, S]: mask[:, None, None, :] for a padding mask "
            "[B, S], mask[:, None] for [B, T, S]",
        )
    if about.says("matmul|@|bmm") and about.says(r"transpose\(\s*[0-3]\s*,\s*[0-3]\s*\)"):
        return Said(
            f"in a product all axes but the last two must agree, and axis {axis} is {a} in one and {b} "
            "in the other. The transpose on this line swaps other axes than the last two",
            "write k.transpose(-2, -1), which swaps the last two whatever comes before them",
        )
    return Said(
        f"two tensors do not line up: axis {axis} is {a} in one and {b} in the other, and neither is 1",
        "print both shapes before this line; a transpose, or a length taken from the wrong tensor, is likely",
    )


def _batch_product(match: Match, about: About) -> Said:
    expected, got = match[1], match[2]
    if about.says(r"transpose|\.m?T\b|permute|swapaxes") or not about.says(r"(?i)\b(k|key|keys)\b"):
        why, do = "the axes that are multiplied have different sizes", "print both shapes before this line"
    else:
        why = "the second tensor is multiplied as it is; for scores its last two axes must trade places"
        do = "write q @ k.transpose(-2, -1)"
    what = f"a product of batches: the second tensor should begin [{expected}] and begins [{got}]"
    return Said(f"{what}. {why[0].upper()}{why[1:]}", do)


def _not_3d(match: Match, about: About) -> Said:
    return Said("bmm takes tensors of three axes only", "write torch.matmul or @, which take heads as well")


def _einsum_axes(match: Match, about: About) -> Said:
    letters, axes, operand = (int(one) for one in match.groups())
    return Said(
        f"einsum: tensor {operand + 1} has {counted(axes, 'axis')}, its letters name {letters}",
        "give it one letter for each axis, or split the heads before this line",
    )


def _einsum_size(match: Match, about: About) -> Said:
    letter, size, operand, before = match.groups()
    return Said(
        f"einsum: the letter {letter} is {before} in one tensor and {size} in tensor {int(operand) + 1}",
        "one letter is one size: use another letter for another length (queries and keys may differ)",
    )


def _einsum_output(match: Match, about: About) -> Said:
    return Said(
        f"einsum: the letter {match[1]} is in the result and in none of the tensors",
        "split the heads first, or take the letter out of the result",
    )


def _einsum_other(match: Match, about: About) -> Said:
    return Said(
        f"einsum does not understand the equation: {match[1]}",
        'an equation is "letters,letters->letters": one group for each tensor, one letter for each axis',
    )


def _out_of_range(match: Match, about: About) -> Said:
    low, high, got = (int(one) for one in match.groups())
    return Said(
        f"there is no axis {got}: the tensor has {counted(high + 1, 'axis')}, {low} to {high}",
        "print its shape before this line; were the heads split, [B, T, H, D], before it was transposed?",
    )


def _permute(match: Match, about: About) -> Said:
    have, named = int(match[1]), int(match[2])
    return Said(
        f"permute names {counted(named, 'axis')}, the tensor has {have}",
        "name each axis once; print the tensor's shape before this line",
    )


def _too_few_sizes(match: Match, about: About) -> Said:
    wanted, got = match[1], match[2]
    return Said(
        f"{wanted} names stand on the left, and there are {got} values on the right",
        "print the shape of what is unpacked: [B, T, E], or [B, T, H, D] where heads are split",
    )


def _too_many_values(match: Match, about: About) -> Said:
    return Said(
        f"there are more values on the right than the {match[1]} names on the left",
        "name them all, e.g. batch_size, seq_len, d_model = x.shape, or take x.shape[:2]",
    )


def _index(match: Match, about: About) -> Said:
    index, axis, size = match.groups()
    return Said(f"axis {axis} has {size} entries, there is no number {index}", "count from 0 to size − 1")


def _cat(match: Match, about: About) -> Said:
    axis, expected, got = match.groups()
    return Said(
        f"tensors that are joined must agree in every axis but {axis}: {expected} in one, {got} in another",
        "print their shapes before this line",
    )


def _expand(match: Match, about: About) -> Said:
    wanted, have, axis = match.groups()
    return Said(
        f"axis {axis} has {have} entries and cannot be stretched to {wanted}: only axes of 1 can",
        "add an axis of 1 first, e.g. mask[:, None], or take the size from the right tensor",
    )


def _one_inferred(match: Match, about: About) -> Said:
    what = "-1 stands for the one size that follows from the others, and is here twice"
    return Said(what, "write out all sizes but one")


def _norm(match: Match, about: About) -> Said:
    return Said(
        f"LayerNorm was made for a last axis of {match[1]} and was given a tensor [{match[2]}]",
        "make it for the width of what it is given, or join the heads before it",
    )


def _split_sizes(match: Match, about: About) -> Said:
    return Said(
        f"the pieces [{match[2]}] do not add up to the axis of {match[1]}",
        "a joint projection holds q, k and v: it is three times the width, nn.Linear(d, 3 * d)",
    )


def _unflatten(match: Match, about: About) -> Said:
    return Said(
        f"[{match[1]}] does not multiply to the {match[2]} entries of the axis",
        "the head count and head size must multiply to the width; use head_dim = d_model // num_heads",
    )


RULES = (
    Rule(r"view size is not compatible", _view),
    Rule(r"mat1 and mat2 shapes cannot be multiplied \((\d+)x(\d+) and (\d+)x(\d+)\)", _product),
    Rule(r"shape '\[(.*?)\]' is invalid for input of size (\d+)", _invalid_shape),
    Rule(
        r"The size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\) at .*dimension (\d+)",
        _must_match,
    ),
    Rule(r"first two dimensions of batch2 tensor to be: \[(.*?)\] but got: \[(.*?)\]", _batch_product),
    Rule(r"batch\d must be a 3D tensor", _not_3d),
    Rule(r"subscripts in the equation \((\d+)\) .* dimensions \((\d+)\) for operand (\d+)", _einsum_axes),
    Rule(r"subscript (\w) has size (\d+) for operand (\d+) .* previously seen size (\d+)", _einsum_size),
    Rule(r"output subscript (\w) does not appear", _einsum_output),
    Rule(r"einsum\(\): (.*)", _einsum_other),
    Rule(
        r"Dimension out of range \(expected to be in range of \[(-?\d+), (-?\d+)\], but got (-?\d+)",
        _out_of_range,
    ),
    Rule(r"permute.*input\.dim\(\) = (\d+) is not equal to len\(dims\) = (\d+)", _permute),
    Rule(r"not enough values to unpack \(expected (?:at least )?(\d+), got (\d+)\)", _too_few_sizes),
    Rule(r"too many values to unpack \(expected (\d+)", _too_many_values),
    Rule(r"index (-?\d+) is out of bounds for dimension (\d+) with size (\d+)", _index),
    Rule(r"must match except in dimension (\d+)\. Expected size (\d+) but got size (\d+)", _cat),
    Rule(
        r"expanded size of the tensor \((\d+)\) must match the existing size \((\d+)\) at .*?dimension (\d+)",
        _expand,
    ),
    Rule(r"only one dimension can be inferred", _one_inferred),
    Rule(r"Given normalized_shape=\[(.*?)\].* got input of size\s?\[(.*?)\]", _norm),
    Rule(r"sum exactly to (\d+) .*split_sizes=\[(.*?)\]", _split_sizes),
    Rule(r"Provided sizes \[(.*?)\] don't multiply up to the size of dim -?\d+ \((\d+)\)", _unflatten),
)
