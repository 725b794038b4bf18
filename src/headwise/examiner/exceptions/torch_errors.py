"""Explain the exceptions of torch: sizes and dimensions; dtypes, devices, gradients and memory."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from typing import NamedTuple

from ..source.parsed import Place, dotted, nodes

Match = re.Match[str]


class Explanation(NamedTuple):
    """The explanation of an exception."""

    reason: str  # what happened and why, without the last full stop
    advice: str  # what to do


class Rule(NamedTuple):
    """The explanation of the exceptions whose message matches a regular expression."""

    message: str  # a regular expression
    explain: Callable[[Match, Place], Explanation | None]  # None if the rule does not apply after all
    kind: str = ""  # a regular expression for the exception's class, "" for any


def always(message: str, reason: str, advice: str, kind: str = "") -> Rule:
    """Return a rule with a fixed explanation, in which {1} is the first group of the regular expression."""

    def explain(match: Match, place: Place) -> Explanation:
        groups = (match[0], *match.groups())
        return Explanation(reason.format(*groups), advice.format(*groups))

    return Rule(message, explain, kind)


def counted(number: int, word: str) -> str:
    """Return "1 dimension" or "2 dimensions"."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _view(match: Match, place: Place) -> Explanation:
    if place.matches(r"transpose|permute|\.m?T\b|swapaxes"):
        because = "a transpose does not move numbers in memory"
    else:
        because = "the tensor was transposed or permuted before, which does not move numbers in memory"
    return Explanation(
        f"view cannot be used here: {because}, and view needs them in order",
        "write .reshape(...) instead of .view(...), or .contiguous() before .view(...)",
    )


def _product(match: Match, place: Place) -> Explanation:
    rows, size, expected, out = (int(group) for group in match.groups())
    layers = place.layers()
    if len(layers) == 1:
        which = f"self.{layers[0]}{place.where_set(layers[0])}"
    elif layers:
        which = "one of " + ", ".join(f"self.{layer}" for layer in layers)
    else:
        return Explanation(
            f"a matrix of {rows} × {size} cannot be multiplied by one of {expected} × {out}: "
            f"the inner sizes, {size} and {expected}, must be equal",
            "print the shapes of both before this line; one of them may need a transpose",
        )
    heads = ""
    if size != expected and (expected % size == 0 or size % expected == 0):
        many = max(size, expected) // min(size, expected)
        heads = (
            f". {max(size, expected)} is {many} times {min(size, expected)}: "
            "a split or merge of the heads may be missing"
        )
        if expected > size and place.matches(r"\bcat\([^()]*,\s*(dim\s*=\s*)?1\s*\)"):
            return Explanation(
                f"{which} takes inputs with {expected} features, but gets {size}. {expected} is {many} times "
                f"{size}: torch.cat along dimension 1 joins the heads along the sequence",
                "concatenate the heads along the last dimension: torch.cat(heads, dim=-1)",
            )
    return Explanation(
        f"{which} takes inputs with {expected} features, but gets {size}{heads}",
        "set its first argument to the width of its input, or merge the heads before it",
    )


def _invalid_shape(match: Match, place: Place) -> Explanation:
    sizes = [int(number) for number in re.findall(r"-?\d+", match[1])]
    held, product = int(match[2]), math.prod(size for size in sizes if size >= 0)
    if -1 in sizes:
        wrong = f"the product of the sizes other than -1 is {product}, which does not divide {held}"
    else:
        wrong = f"the shape [{match[1]}] has {product} elements, but the tensor has {held}"
        less, more = sorted((held, product))
        if less and more % less == 0:
            wrong += f", {more // less} times as many" if product < held else f", 1/{more // less} as many"
    return Explanation(
        f"{wrong}. One of the sizes is wrong: num_heads * head_dim must equal d_model, and queries and keys "
        "may have different lengths",
        "take each length from its own tensor, such as k.size(1) for k, or write -1 for it; "
        "print the shape of the tensor before this line",
    )


def _must_match(match: Match, place: Place) -> Explanation:
    a, b, axis = match.groups()
    if place.matches("mask"):
        return Explanation(
            f"the shapes of the mask and the scores do not match: dimension {axis} has the sizes {a} and {b} "
            "(dimensions are aligned from the last one)",
            "give the mask the dimensions of the scores, [B, H, T, S]: mask[:, None, None, :] for a padding "
            "mask [B, S], mask[:, None] for [B, T, S]",
        )
    if place.matches("matmul|@|bmm") and place.matches(r"transpose\(\s*[0-3]\s*,\s*[0-3]\s*\)"):
        return Explanation(
            "in a matrix product all dimensions but the last two must be equal, and dimension "
            f"{axis} has the sizes {a} and {b}. The transpose on this line swaps other dimensions",
            "write k.transpose(-2, -1), which always swaps the last two",
        )
    if (explanation := _without_keepdim(place)) is not None:
        return explanation
    return Explanation(
        f"the shapes of two tensors do not match: dimension {axis} has the sizes {a} and {b}",
        "print both shapes before this line; check its transposes, and where its lengths come from",
    )


REDUCES = re.compile(r"(\w+)\.(sum|mean|max|min|amax|amin|norm|std|var|logsumexp)\(")


def _without_keepdim(place: Place) -> Explanation | None:
    """Explain a tensor that is combined with its own sum, maximum or the like without keepdim."""
    reduction = REDUCES.search(place.text)
    if reduction is None or "keepdim" in place.text:
        return None
    shape = place.shapes.get(reduction[1])
    shapes = "" if shape is None else f", which has the shape {[*shape[:-1], 1]} instead of {shape[:-1]}"
    return Explanation(
        f"{reduction[1]}.{reduction[2]}(..) removes a dimension and does not match {reduction[1]}",
        f"write {reduction[1]}.{reduction[2]}(dim=-1, keepdim=True){shapes}",
    )


def _product_of_names(place: Place) -> Explanation | None:
    """Explain a product left @ right of two variables: which size is wrong, and what it should be."""
    for node in nodes(place.statement, ast.BinOp) if place.statement is not None else ():
        if not isinstance(node.op, ast.MatMult):
            continue
        left, right = dotted(node.left), dotted(node.right)
        a, b = place.shapes.get(left), place.shapes.get(right)
        if a is None or b is None or len(a) < 2 or len(b) < 2 or a[-1] == b[-2]:
            continue
        reason = f"the last size of {left} must equal the last but one of {right}: {a[-1]} is not {b[-2]}"
        value = place.assigned(left)
        if value is not None and any(_is_elementwise(product) for product in nodes(value, ast.BinOp)):
            return Explanation(
                reason, f"use the matrix product q @ k.transpose(-2, -1) instead of * on line {value.lineno}"
            )
        return Explanation(reason, f"check where {left} is assigned: its shape should be {[*a[:-1], b[-2]]}")
    return None


def _is_elementwise(node: ast.BinOp) -> bool:
    """Return True for `a * b` of two variables."""
    variables = isinstance(node.left, ast.Name) and isinstance(node.right, ast.Name)
    return variables and isinstance(node.op, ast.Mult)


def _batch_product(match: Match, place: Place) -> Explanation:
    expected, got = match[1], match[2]
    if not place.matches(r"(?i)\b(k|key|keys)\b") and (explanation := _product_of_names(place)) is not None:
        return explanation
    if place.matches(r"transpose|\.m?T\b|permute|swapaxes") or not place.matches(r"(?i)\b(k|key|keys)\b"):
        reason, advice = "Sizes that must be equal differ", "print both shapes before this line"
    else:
        reason, advice = "The second tensor is not transposed", "write q @ k.transpose(-2, -1)"
    sizes = f"the shape of the second tensor of the product should begin with [{expected}], not [{got}]"
    return Explanation(f"{sizes}. {reason}", advice)


def _einsum_axes(match: Match, place: Place) -> Explanation:
    letters, axes, operand = (int(group) for group in match.groups())
    return Explanation(
        f"einsum: tensor {operand + 1} has {counted(axes, 'dimension')}, but the equation has "
        f"{counted(letters, 'letter')} for it",
        "use one letter for each dimension, or split the heads before this line",
    )


def _einsum_size(match: Match, place: Place) -> Explanation:
    letter, size, operand, before = match.groups()
    return Explanation(
        f"einsum: the letter {letter} stands for a size of {before} in one tensor and {size} in tensor "
        f"{int(operand) + 1}",
        "use different letters for different lengths (the numbers of queries and keys may differ)",
    )


def _out_of_range(match: Match, place: Place) -> Explanation:
    low, high, got = (int(group) for group in match.groups())
    return Explanation(
        f"there is no dimension {got}: the tensor has {counted(high + 1, 'dimension')}, {low} to {high}",
        "print its shape before this line; check that the heads are split before the transpose",
    )


def _permute(match: Match, place: Place) -> Explanation:
    have, named = int(match[1]), int(match[2])
    return Explanation(
        f"permute gets {counted(named, 'dimension')}, but the tensor has {have}",
        "pass each dimension once; print the shape of the tensor before this line",
    )


SIZES = (
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
        "bmm takes tensors of three dimensions only",
        "use torch.matmul or @, which take more dimensions",
    ),
    Rule(r"subscripts in the equation \((\d+)\) .* dimensions \((\d+)\) for operand (\d+)", _einsum_axes),
    Rule(r"subscript (\w) has size (\d+) for operand (\d+) .* previously seen size (\d+)", _einsum_size),
    always(
        r"output subscript (\w) does not appear",
        "einsum: the letter {1} is in the result, but in none of the tensors",
        "split the heads first, or remove the letter from the result",
    ),
    always(
        r"einsum\(\): (.*)",
        "the equation of einsum is not valid: {1}",
        'write "letters,letters->letters", with a group for each tensor and a letter for each dimension',
    ),
    Rule(
        r"Dimension out of range \(expected to be in range of \[(-?\d+), (-?\d+)\], but got (-?\d+)",
        _out_of_range,
    ),
    Rule(r"permute.*input\.dim\(\) = (\d+) is not equal to len\(dims\) = (\d+)", _permute),
    always(
        r"not enough values to unpack \(expected (?:at least )?(\d+), got (\d+)\)",
        "there are {1} names on the left, but {2} values on the right",
        "print the shape that is unpacked: [B, T, E], or [B, T, H, D] after the heads are split",
    ),
    always(
        r"too many values to unpack \(expected (\d+)",
        "there are more values on the right than the {1} names on the left",
        "write a name for each value, batch_size, seq_len, d_model = x.shape, or use x.shape[:2]",
    ),
    always(
        r"index (-?\d+) is out of bounds for dimension (\d+) with size (\d+)",
        "dimension {2} has {3} entries, so the index {1} does not exist",
        "use indices from 0 to size - 1",
    ),
    always(
        r"must match except in dimension (\d+)\. Expected size (\d+) but got size (\d+)",
        "concatenated tensors must have equal sizes except in dimension {1}: got {2} and {3}",
        "print their shapes before this line",
    ),
    always(
        r"expanded size of the tensor \((\d+)\) must match the existing size \((\d+)\) at .*?dimension (\d+)",
        "dimension {3} has {2} entries and cannot be expanded to {1}: only dimensions of size 1 can",
        "add a dimension of size 1 first, such as mask[:, None], or take the size from the correct tensor",
    ),
    always(
        r"only one dimension can be inferred",
        "-1 is used for more than one size, but only one can follow from the others",
        "write all sizes but one as numbers",
    ),
    always(
        r"Given normalized_shape=\[(.*?)\].* got input of size\s?\[(.*?)\]",
        "LayerNorm was created for a last dimension of {1}, but its input has the shape [{2}]",
        "create it for the width of its input, or merge the heads before it",
    ),
    always(
        r"sum exactly to (\d+) .*split_sizes=\[(.*?)\]",
        "the sizes [{2}] of the pieces do not add up to the size {1} of the dimension",
        "make the fused projection of q, k and v three times the width: nn.Linear(d, 3 * d)",
    ),
    always(
        r"Provided sizes \[(.*?)\] don't multiply up to the size of dim -?\d+ \((\d+)\)",
        "the product of [{1}] is not {2}, the size of the dimension",
        "num_heads * head_dim must equal d_model: head_dim = d_model // num_heads",
    ),
)


PLAIN = {"float": "float32", "double": "float64", "half": "float16", "long int": "int64", "long": "int64"}


def _named(dtype: str) -> str:
    return PLAIN.get(dtype.strip().lower(), dtype.strip().lower())


def _half(match: Match, place: Place) -> Explanation:
    numbers = re.findall(r"-\s?\d[\d_.]*e\d+|-\s?\d{5,}", place.text)
    number = numbers[0] if numbers else "the number"
    return Explanation(
        f"{number} is out of the range of float16, whose lowest number is -65504; in float32 the line works",
        'fill with float("-inf") or torch.finfo(scores.dtype).min',
    )


def _mask_dtype(match: Match, place: Place) -> Explanation:
    return Explanation(
        f"masked_fill takes a mask of dtype bool, but the mask has the dtype {_named(match[1])}",
        "write mask == 0 to fill where the mask is 0, or mask.bool() to fill where it is not 0",
    )


def _sdpa_mask(match: Match, place: Place) -> Explanation:
    return Explanation(
        "scaled_dot_product_attention takes a mask of dtype bool or of the dtype of the query "
        f"({_named(match[2])}), but the mask has the dtype {_named(match[1])}",
        "pass mask.bool(), where True means visible, or a mask to add, in the dtype of the query",
    )


def _not_implemented(match: Match, place: Place) -> Explanation:
    function = "softmax" if "softmax" in match[1] else match[1].partition("_")[0].strip('"')
    return Explanation(
        f"{function} does not support the dtype {_named(match[2])}",
        "convert the scores with .float() before it; apply nn.Embedding to token ids first",
    )


def _two_dtypes(match: Match, place: Place) -> Explanation:
    first, second = _named(match[1]), _named(match[2])
    if "int64" in (first, second) or "bool" in (first, second):
        advice = "convert the integers with .float() or .to(x.dtype)"
    else:
        advice = "create tensors in forward with the dtype of the input: torch.ones(..., dtype=x.dtype)"
    return Explanation(
        f"two tensors of different dtypes meet, {first} and {second}; torch does not convert them here",
        advice,
    )


def _could_not_infer(match: Match, place: Place) -> Explanation:
    return Explanation(
        f"{match[1]} needs floating-point numbers, but got {_named(match[2])}", "call .float() first"
    )


def _must_be_tensor(match: Match, place: Place) -> Explanation:
    function, got = match[1], match[2]
    if function == "sqrt":
        return Explanation(
            f"torch.sqrt needs a tensor, but got a Python number ({got})",
            "write math.sqrt(d_k) or d_k ** 0.5",
        )
    if got == "ellipsis":
        assigned = nodes(place.function, ast.Assign) if place.function is not None else ()
        lines = [node.lineno for node in assigned if ast.unparse(node.value) == "..."]
        where = f" (line {lines[0]})" if lines else ""
        reason = f"{function} needs a tensor, but its argument is `...`{where}"
        return Explanation(reason, "write your code instead of `...`")
    return Explanation(
        f"{function} needs a tensor, but got {got}",
        "convert the argument to a tensor, or use a Python function, such as math.exp for torch.exp",
    )


def _size_is_float(match: Match, place: Place) -> Explanation:
    set_by = [place.where_set(name) for name in re.findall(r"self\.(\w+)", place.text)]
    divided = next((place_set for place_set in set_by if re.search(r"[^/]/[^/]", place_set)), "")
    return Explanation(
        f"a size is a float, such as 6.0: sizes must be integers, and / always gives a float{divided}",
        "divide with //: head_dim = d_model // num_heads",
    )


def _memory(match: Match, place: Place) -> Explanation:
    return Explanation(
        f"the code tried to allocate a tensor of {int(match[1]) / 2**30:,.0f} GiB",
        "check the sizes on this line: a length or the width may be multiplied once too often",
    )


TYPES = (
    Rule(r"value cannot be converted to type (?:c10|at)::(?:Half|BFloat16).* without overflow", _half),
    Rule(r"only supports boolean masks, but got mask with dtype ([\w ]+)", _mask_dtype),
    Rule(
        r"Expected attn_mask dtype .*attn_mask\.dtype: ([\w ]+?) and\s+query\.dtype: ([\w ]+?) instead",
        _sdpa_mask,
    ),
    always(
        r"Explicit attn_mask should not be set when is_causal=True",
        "scaled_dot_product_attention takes attn_mask or is_causal=True, not both",
        "add the causal mask to the mask: mask & torch.ones(T, S, dtype=torch.bool).tril()",
    ),
    always(
        r"~ \(operator\.invert\)|bitwise_not",
        "~ inverts masks of dtype bool, but this mask has numbers",
        "write ~mask.bool(), or mask == 0",
    ),
    always(
        r"`-` operator, with a bool tensor",
        "- is not defined for a mask of dtype bool",
        "write ~mask to invert the mask, or call mask.float() first",
    ),
    Rule(r"(\"\w+\") not implemented for '(\w+)'", _not_implemented),
    Rule(r"expected scalar type (\w+) but found (\w+)", _two_dtypes),
    Rule(r"must have the same dtype,? but got:? (\w+) and (\w+)", _two_dtypes),
    Rule(r"expected .* to have the same dtype, but got: ([\w.]+) != ([\w.]+)", _two_dtypes),
    Rule(r"(\w+)\(\): could not infer output dtype.*Got: (\w+)", _could_not_infer),
    always(
        r"(cat|stack)\(\): argument 'tensors'.* must be tuple of Tensors",
        "{1} takes its tensors as a list",
        "write {1}([a, b], dim=-1)",
    ),
    Rule(r"(\w+)\(\): argument '\w+' \(position \d+\) must be Tensor, not (\w+)", _must_be_tensor),
    Rule(r"must be tuple of ints,\s?but (?:got|found element of type) float", _size_is_float),
    Rule(r"^(?:view|reshape)\(\) received an invalid combination .* got \([^)]*float", _size_is_float),
    Rule(r"'float' object cannot be interpreted as an integer", _size_is_float),
    always(
        r"not on the expected device|all tensors to be on the same device",
        "two tensors are on different devices: a tensor that the code creates is not on that of the input",
        "store constant tensors with self.register_buffer(...), and create new ones with device=x.device",
    ),
    always(
        r"not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs|CUDA is not available",
        "the code needs a GPU, but it is checked on a CPU",
        'use x.device instead of .cuda() or "cuda"',
    ),
    always(
        r"leaf Variable that requires grad is being used in an in-place",
        "a parameter, or an input that requires gradients, is changed in place",
        "create a new tensor: x = x + y instead of x += y",
    ),
    always(
        r"modified by an inplace operation",
        "a tensor that the backward pass needs was changed in place",
        "create a new tensor: x = x + y instead of x += y, masked_fill instead of masked_fill_",
    ),
    always(
        r"does not require grad and does not have a grad_fn",
        "the output has no gradient: an operation detaches it from the parameters",
        "look for .detach(), .data, .item(), .numpy(), torch.no_grad() and torch.tensor(...) of a result",
    ),
    always(
        r"backward through the graph a second time",
        "a second backward pass uses the result of an earlier call, which was stored",
        "compute everything that depends on parameters in forward, and do not store it on self",
    ),
    always(
        r"Can't call numpy\(\) on Tensor",
        "NumPy does not support gradients",
        "use the functions of torch in forward",
    ),
    always(
        r"Boolean value of Tensor with more than one value",
        "`if` needs a single True or False, but got a tensor with several",
        "write `if mask is not None:` to test whether there is a mask",
    ),
    Rule(r"you tried to allocate (\d+) bytes", _memory),
)
