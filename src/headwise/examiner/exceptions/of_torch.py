"""Messages of torch in plain words: sizes and axes; dtypes, devices, gradients and memory."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from typing import NamedTuple

from ..source.parsed import Place, dotted

Match = re.Match[str]


class Said(NamedTuple):
    """An exception in plain words."""

    what: str  # what happened and why, as sentences without the last full stop
    do: str  # what to do about it


class Rule(NamedTuple):
    """Which messages it is for, and what it says about one."""

    message: str  # a regular expression
    say: Callable[[Match, Place], Said | None]  # None: it is not this rule's after all
    kind: str = ""  # a regular expression for the exception's class, "" for any


def always(message: str, what: str, do: str, kind: str = "") -> Rule:
    """A rule with the same words every time; {1} stands for the first group of the message."""

    def say(match: Match, place: Place) -> Said:
        groups = (match[0], *match.groups())
        return Said(what.format(*groups), do.format(*groups))

    return Rule(message, say, kind)


def counted(number: int, word: str) -> str:
    """1 axis, 2 axes."""
    plural = {"axis": "axes"}.get(word, word + "s")
    return f"{number} {word if number == 1 else plural}"


def _view(match: Match, place: Place) -> Said:
    if place.matches(r"transpose|permute|\.m?T\b|swapaxes"):
        because = "transpose moves no numbers in memory, it only reads them in another order"
    else:
        because = (
            "the tensor was transposed or permuted earlier, and its numbers no longer lie in order in memory"
        )
    return Said(
        f"view cannot be used here: {because}, and view needs them in order",
        "write .reshape(...) instead of .view(...), or .contiguous() before .view(...)",
    )


def _product(match: Match, place: Place) -> Said:
    rows, given, expected, out = (int(one) for one in match.groups())
    layers = place.layers()
    if len(layers) == 1:
        which = f"self.{layers[0]}{place.where_set(layers[0])}"
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


def _invalid_shape(match: Match, place: Place) -> Said:
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


def _must_match(match: Match, place: Place) -> Said:
    a, b, axis = match.groups()
    if place.matches("mask"):
        return Said(
            f"the mask does not line up with the scores: axis {axis} is {a} on one side and {b} on the other "
            "(axes are lined up from the last one)",
            "give the mask the axes of the scores, [B, H, T, S]: mask[:, None, None, :] for a padding mask "
            "[B, S], mask[:, None] for [B, T, S]",
        )
    if place.matches("matmul|@|bmm") and place.matches(r"transpose\(\s*[0-3]\s*,\s*[0-3]\s*\)"):
        return Said(
            f"in a product all axes but the last two must agree, and axis {axis} is {a} in one and {b} "
            "in the other. The transpose on this line swaps other axes than the last two",
            "write k.transpose(-2, -1), which swaps the last two whatever comes before them",
        )
    if (said := _without_keepdim(place)) is not None:
        return said
    return Said(
        f"two tensors do not line up: axis {axis} is {a} in one and {b} in the other, and neither is 1",
        "print both shapes before this line; a transpose, or a length taken from the wrong tensor, is likely",
    )


REDUCES = re.compile(r"(\w+)\.(sum|mean|max|min|amax|amin|norm|std|var|logsumexp)\(")


def _without_keepdim(place: Place) -> Said | None:
    """A sum or the like beside the tensor it was made of, whose axis is gone."""
    found = REDUCES.search(place.text)
    if found is None or "keepdim" in place.text:
        return None
    shape = place.shapes.get(found[1])
    kept = "" if shape is None else f": {[*shape[:-1], 1]} beside {shape}"
    return Said(
        f"{found[1]}.{found[2]}(..) drops the axis it goes over, so it no longer lines up with {found[1]}",
        f"write {found[1]}.{found[2]}(dim=-1, keepdim=True){kept}",
    )


def _product_of_names(place: Place) -> Said | None:
    """left @ right, where both are variables: which size is wrong, and what it should be."""
    for node in ast.walk(place.statement) if place.statement is not None else ():
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.MatMult):
            continue
        left, right = dotted(node.left), dotted(node.right)
        a, b = place.shapes.get(left), place.shapes.get(right)
        if a is None or b is None or len(a) < 2 or len(b) < 2 or a[-1] == b[-2]:
            continue
        what = f"the last size of {left} must be the last but one of {right}, {b[-2]}, and is {a[-1]}"
        value = place.assigned(left)
        if value is not None and any(_is_elementwise(each) for each in ast.walk(value)):
            return Said(
                what, f"weights [.., T, S] come from q @ k.transpose(-2, -1), line {value.lineno} has *"
            )
        return Said(what, f"make {left} {[*a[:-1], b[-2]]}, where it is assigned")
    return None


def _is_elementwise(node: ast.AST) -> bool:
    """Whether it is `a * b` of two variables."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    return isinstance(node.left, ast.Name) and isinstance(node.right, ast.Name)


def _batch_product(match: Match, place: Place) -> Said:
    expected, got = match[1], match[2]
    if not place.matches(r"(?i)\b(k|key|keys)\b") and (said := _product_of_names(place)) is not None:
        return said
    if place.matches(r"transpose|\.m?T\b|permute|swapaxes") or not place.matches(r"(?i)\b(k|key|keys)\b"):
        why, do = "the axes that are multiplied have different sizes", "print both shapes before this line"
    else:
        why = "the second tensor is multiplied as it is; for scores its last two axes must trade places"
        do = "write q @ k.transpose(-2, -1)"
    what = f"a product of batches: the second tensor should begin [{expected}] and begins [{got}]"
    return Said(f"{what}. {why[0].upper()}{why[1:]}", do)


def _einsum_axes(match: Match, place: Place) -> Said:
    letters, axes, operand = (int(one) for one in match.groups())
    return Said(
        f"einsum: tensor {operand + 1} has {counted(axes, 'axis')}, its letters name {letters}",
        "give it one letter for each axis, or split the heads before this line",
    )


def _einsum_size(match: Match, place: Place) -> Said:
    letter, size, operand, before = match.groups()
    return Said(
        f"einsum: the letter {letter} is {before} in one tensor and {size} in tensor {int(operand) + 1}",
        "one letter is one size: use another letter for another length (queries and keys may differ)",
    )


def _out_of_range(match: Match, place: Place) -> Said:
    low, high, got = (int(one) for one in match.groups())
    return Said(
        f"there is no axis {got}: the tensor has {counted(high + 1, 'axis')}, {low} to {high}",
        "print its shape before this line; were the heads split, [B, T, H, D], before it was transposed?",
    )


def _permute(match: Match, place: Place) -> Said:
    have, named = int(match[1]), int(match[2])
    return Said(
        f"permute names {counted(named, 'axis')}, the tensor has {have}",
        "name each axis once; print the tensor's shape before this line",
    )


OF_SIZES = (
    Rule(r"view size is not compatible", _view),
    Rule(r"mat1 and mat2 shapes cannot be multiplied \((\d+)x(\d+) and (\d+)x(\d+)\)", _product),
    Rule(r"shape '\[(.*?)\]' is invalid for input of size (\d+)", _invalid_shape),
    Rule(
        r"The size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\) at .*dimension (\d+)",
        _must_match,
    ),
    Rule(r"first two dimensions of batch2 tensor to be: \[(.*?)\] but got: \[(.*?)\]", _batch_product),
    always(
        r"batch\d must be a 3D tensor",
        "bmm takes tensors of three axes only",
        "write torch.matmul or @, which take heads as well",
    ),
    Rule(r"subscripts in the equation \((\d+)\) .* dimensions \((\d+)\) for operand (\d+)", _einsum_axes),
    Rule(r"subscript (\w) has size (\d+) for operand (\d+) .* previously seen size (\d+)", _einsum_size),
    always(
        r"output subscript (\w) does not appear",
        "einsum: the letter {1} is in the result and in none of the tensors",
        "split the heads first, or take the letter out of the result",
    ),
    always(
        r"einsum\(\): (.*)",
        "einsum does not understand the equation: {1}",
        'an equation is "letters,letters->letters": one group for each tensor, one letter for each axis',
    ),
    Rule(
        r"Dimension out of range \(expected to be in range of \[(-?\d+), (-?\d+)\], but got (-?\d+)",
        _out_of_range,
    ),
    Rule(r"permute.*input\.dim\(\) = (\d+) is not equal to len\(dims\) = (\d+)", _permute),
    always(
        r"not enough values to unpack \(expected (?:at least )?(\d+), got (\d+)\)",
        "{1} names stand on the left, and there are {2} values on the right",
        "print the shape of what is unpacked: [B, T, E], or [B, T, H, D] where heads are split",
    ),
    always(
        r"too many values to unpack \(expected (\d+)",
        "there are more values on the right than the {1} names on the left",
        "name them all, e.g. batch_size, seq_len, d_model = x.shape, or take x.shape[:2]",
    ),
    always(
        r"index (-?\d+) is out of bounds for dimension (\d+) with size (\d+)",
        "axis {2} has {3} entries, there is no number {1}",
        "count from 0 to size − 1",
    ),
    always(
        r"must match except in dimension (\d+)\. Expected size (\d+) but got size (\d+)",
        "tensors that are joined must agree in every axis but {1}: {2} in one, {3} in another",
        "print their shapes before this line",
    ),
    always(
        r"expanded size of the tensor \((\d+)\) must match the existing size \((\d+)\) at .*?dimension (\d+)",
        "axis {3} has {2} entries and cannot be stretched to {1}: only axes of 1 can",
        "add an axis of 1 first, e.g. mask[:, None], or take the size from the right tensor",
    ),
    always(
        r"only one dimension can be inferred",
        "-1 stands for the one size that follows from the others, and is here twice",
        "write out all sizes but one",
    ),
    always(
        r"Given normalized_shape=\[(.*?)\].* got input of size\s?\[(.*?)\]",
        "LayerNorm was made for a last axis of {1} and was given a tensor [{2}]",
        "make it for the width of what it is given, or join the heads before it",
    ),
    always(
        r"sum exactly to (\d+) .*split_sizes=\[(.*?)\]",
        "the pieces [{2}] do not add up to the axis of {1}",
        "a joint projection holds q, k and v: it is three times the width, nn.Linear(d, 3 * d)",
    ),
    always(
        r"Provided sizes \[(.*?)\] don't multiply up to the size of dim -?\d+ \((\d+)\)",
        "[{1}] does not multiply to the {2} entries of the axis",
        "the head count and head size must multiply to the width; use head_dim = d_model // num_heads",
    ),
)


PLAIN = {"float": "float32", "double": "float64", "half": "float16", "long int": "int64", "long": "int64"}


def _named(dtype: str) -> str:
    return PLAIN.get(dtype.strip().lower(), dtype.strip().lower())


def _half(match: Match, place: Place) -> Said:
    numbers = re.findall(r"-\s?\d[\d_.]*e\d+|-\s?\d{5,}", place.text)
    number = numbers[0] if numbers else "the number"
    return Said(
        f"{number} does not fit into float16, which ends at 65504; in float32 the same line works",
        'fill with float("-inf") or torch.finfo(scores.dtype).min',
    )


def _mask_dtype(match: Match, place: Place) -> Said:
    return Said(
        f"masked_fill takes a mask of True and False and was given {_named(match[1])}",
        "write mask == 0 to fill where the mask is 0, or mask.bool() to fill where it is not",
    )


def _sdpa_mask(match: Match, place: Place) -> Said:
    return Said(
        "scaled_dot_product_attention takes a mask of bool, or numbers of the query's dtype "
        f"({_named(match[2])}), and was given {_named(match[1])}",
        "pass mask.bool(), True = may attend, or a mask to add, in the query's dtype",
    )


def _not_implemented(match: Match, place: Place) -> Said:
    function = "softmax" if "softmax" in match[1] else match[1].partition("_")[0].strip('"')
    return Said(
        f"{function} was given whole numbers ({_named(match[2])}), or a dtype that it does not know",
        "keep the scores in floating point: .float() before it; token numbers go through nn.Embedding first",
    )


def _two_dtypes(match: Match, place: Place) -> Said:
    one, other = _named(match[1]), _named(match[2])
    if "int64" in (one, other) or "bool" in (one, other):
        do = "turn the whole numbers into floating point: .float(), or .to(x.dtype)"
    else:
        do = "make tensors inside forward in the input's dtype, e.g. torch.ones(..., dtype=x.dtype)"
    return Said(
        f"two tensors of different dtypes meet, {one} and {other}; torch does not convert them here", do
    )


def _could_not_infer(match: Match, place: Place) -> Said:
    return Said(
        f"{match[1]} needs floating point and was given {_named(match[2])}", "write .float() before it"
    )


def _must_be_tensor(match: Match, place: Place) -> Said:
    function, got = match[1], match[2]
    if function == "sqrt":
        return Said(
            f"torch.sqrt takes a tensor and was given a plain number ({got})",
            "write math.sqrt(d_k) or d_k ** 0.5",
        )
    return Said(
        f"{function} takes a tensor and was given {got}", "make it a tensor, or use Python's own function"
    )


def _size_is_float(match: Match, place: Place) -> Said:
    set_by = [place.where_set(name) for name in re.findall(r"self\.(\w+)", place.text)]
    divided = next((one for one in set_by if re.search(r"[^/]/[^/]", one)), "")
    return Said(
        f"a size is a fraction, such as 6.0: sizes are whole numbers, and / never gives one{divided}",
        "divide with //: head_dim = d_model // num_heads",
    )


def _memory(match: Match, place: Place) -> Said:
    return Said(
        f"the code asked for {int(match[1]) / 2**30:,.0f} GiB in one tensor",
        "look at the sizes on this line: a length, or the width, is multiplied once too often",
    )


OF_TYPES = (
    Rule(r"value cannot be converted to type (?:c10|at)::(?:Half|BFloat16).* without overflow", _half),
    Rule(r"only supports boolean masks, but got mask with dtype ([\w ]+)", _mask_dtype),
    Rule(
        r"Expected attn_mask dtype .*attn_mask\.dtype: ([\w ]+?) and\s+query\.dtype: ([\w ]+?) instead",
        _sdpa_mask,
    ),
    always(
        r"Explicit attn_mask should not be set when is_causal=True",
        "scaled_dot_product_attention takes attn_mask or is_causal=True, not both",
        "put the causal rule into the mask: mask & torch.ones(T, S, dtype=torch.bool).tril()",
    ),
    always(
        r"~ \(operator\.invert\)|bitwise_not",
        "~ turns True and False round and was given numbers",
        "write ~mask.bool(), or mask == 0",
    ),
    always(
        r"`-` operator, with a bool tensor",
        "- is not defined for a mask of True and False",
        "write ~mask to turn it round, or mask.float() first",
    ),
    Rule(r"(\"\w+\") not implemented for '(\w+)'", _not_implemented),
    Rule(r"expected scalar type (\w+) but found (\w+)", _two_dtypes),
    Rule(r"must have the same dtype,? but got:? (\w+) and (\w+)", _two_dtypes),
    Rule(r"expected .* to have the same dtype, but got: ([\w.]+) != ([\w.]+)", _two_dtypes),
    Rule(r"(\w+)\(\): could not infer output dtype.*Got: (\w+)", _could_not_infer),
    always(
        r"(cat|stack)\(\): argument 'tensors'.* must be tuple of Tensors",
        "{1} takes its tensors in one list",
        "write {1}([a, b], dim=-1)",
    ),
    Rule(r"(\w+)\(\): argument '\w+' \(position \d+\) must be Tensor, not (\w+)", _must_be_tensor),
    Rule(r"must be tuple of ints,\s?but (?:got|found element of type) float", _size_is_float),
    Rule(r"^(?:view|reshape)\(\) received an invalid combination .* got \([^)]*float", _size_is_float),
    Rule(r"'float' object cannot be interpreted as an integer", _size_is_float),
    always(
        r"not on the expected device|all tensors to be on the same device",
        "two tensors lie on different devices: one was made inside the code and stayed where it was made",
        "keep fixed tensors with self.register_buffer(...), and make new ones with device=x.device",
    ),
    always(
        r"not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs|CUDA is not available",
        "the code asks for a GPU, and it is checked on a CPU",
        'use x.device instead of .cuda() or "cuda"',
    ),
    always(
        r"leaf Variable that requires grad is being used in an in-place",
        "a parameter, or an input that wants gradients, is changed in place",
        "make a new tensor: x = x + y rather than x += y",
    ),
    always(
        r"modified by an inplace operation",
        "a tensor that the backward pass still needs was changed in place",
        "make a new tensor: x = x + y rather than x += y, masked_fill rather than masked_fill_",
    ),
    always(
        r"does not require grad and does not have a grad_fn",
        "no gradient reaches the parameters: somewhere the result was cut off from them",
        "look for .detach(), .data, .item(), .numpy(), torch.no_grad(), torch.tensor(...) of a result",
    ),
    always(
        r"backward through the graph a second time",
        "the backward pass went through the same computation twice: a result of an earlier call was kept",
        "compute everything that depends on parameters inside forward; keep no such tensor on self",
    ),
    always(
        r"Can't call numpy\(\) on Tensor",
        "numpy cannot carry gradients",
        "stay with torch's functions inside forward",
    ),
    always(
        r"Boolean value of Tensor with more than one value",
        "`if` needs one True or False and was given a whole tensor of them",
        "write `if mask is not None:` for whether there is a mask",
    ),
    Rule(r"you tried to allocate (\d+) bytes", _memory),
)
