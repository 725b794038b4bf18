"""Messages about dtypes, devices, gradients and memory, in plain words."""

from __future__ import annotations

import re

from .about import About, Rule, Said

Match = re.Match[str]
PLAIN = {"float": "float32", "double": "float64", "half": "float16", "long int": "int64", "long": "int64"}


def _named(dtype: str) -> str:
    return PLAIN.get(dtype.strip().lower(), dtype.strip().lower())


def _half(match: Match, about: About) -> Said:
    numbers = re.findall(r"-\s?\d[\d_.]*e\d+|-\s?\d{5,}", about.text)
    number = numbers[0] if numbers else "the number"
    return Said(
        f"{number} does not fit into float16, which ends at 65504; in float32 the same line works",
        'fill with float("-inf") or torch.finfo(scores.dtype).min',
    )


def _mask_dtype(match: Match, about: About) -> Said:
    return Said(
        f"masked_fill takes a mask of True and False and was given {_named(match[1])}",
        "write mask == 0 to fill where the mask is 0, or mask.bool() to fill where it is not",
    )


def _sdpa_mask(match: Match, about: About) -> Said:
    return Said(
        "scaled_dot_product_attention takes a mask of bool, or numbers of the query's dtype "
        f"({_named(match[2])}), and was given {_named(match[1])}",
        "pass mask.bool(), True = may attend, or a mask to add, in the query's dtype",
    )


def _sdpa_both(match: Match, about: About) -> Said:
    return Said(
        "scaled_dot_product_attention takes attn_mask or is_causal=True, not both",
        "put the causal rule into the mask: mask & torch.ones(T, S, dtype=torch.bool).tril()",
    )


def _invert(match: Match, about: About) -> Said:
    return Said("~ turns True and False round and was given numbers", "write ~mask.bool(), or mask == 0")


def _bool_minus(match: Match, about: About) -> Said:
    do = "write ~mask to turn it round, or mask.float() first"
    return Said("- is not defined for a mask of True and False", do)


def _not_implemented(match: Match, about: About) -> Said:
    function = "softmax" if "softmax" in match[1] else match[1].partition("_")[0].strip('"')
    return Said(
        f"{function} was given whole numbers ({_named(match[2])}), or a dtype that it does not know",
        "keep the scores in floating point: .float() before it; token numbers go through nn.Embedding first",
    )


def _two_dtypes(match: Match, about: About) -> Said:
    one, other = _named(match[1]), _named(match[2])
    if "int64" in (one, other) or "bool" in (one, other):
        do = "turn the whole numbers into floating point: .float(), or .to(x.dtype)"
    else:
        do = "make tensors inside forward in the input's dtype, e.g. torch.ones(..., dtype=x.dtype)"
    return Said(
        f"two tensors of different dtypes meet, {one} and {other}; torch does not convert them here", do
    )


def _could_not_infer(match: Match, about: About) -> Said:
    return Said(
        f"{match[1]} needs floating point and was given {_named(match[2])}", "write .float() before it"
    )


def _must_be_tensor(match: Match, about: About) -> Said:
    function, got = match[1], match[2]
    if function == "sqrt":
        return Said(
            f"torch.sqrt takes a tensor and was given a plain number ({got})",
            "write math.sqrt(d_k) or d_k ** 0.5",
        )
    return Said(
        f"{function} takes a tensor and was given {got}", "make it a tensor, or use Python's own function"
    )


def _tuple_of_tensors(match: Match, about: About) -> Said:
    return Said(f"{match[1]} takes its tensors in one list", f"write {match[1]}([a, b], dim=-1)")


def _size_is_float(match: Match, about: About) -> Said:
    set_by = [about.where_set(name) for name in re.findall(r"self\.(\w+)", about.text)]
    divided = next((one for one in set_by if re.search(r"[^/]/[^/]", one)), "")
    return Said(
        f"a size is a fraction, such as 6.0: sizes are whole numbers, and / never gives one{divided}",
        "divide with //: head_dim = d_model // num_heads",
    )


def _device(match: Match, about: About) -> Said:
    return Said(
        "two tensors lie on different devices: one was made inside the code and stayed where it was made",
        "keep fixed tensors with self.register_buffer(...), and make new ones with device=x.device",
    )


def _no_cuda(match: Match, about: About) -> Said:
    do = 'use x.device instead of .cuda() or "cuda"'
    return Said("the code asks for a GPU, and it is checked on a CPU", do)


def _leaf(match: Match, about: About) -> Said:
    return Said(
        "a parameter, or an input that wants gradients, is changed in place",
        "make a new tensor: x = x + y rather than x += y",
    )


def _in_place(match: Match, about: About) -> Said:
    return Said(
        "a tensor that the backward pass still needs was changed in place",
        "make a new tensor: x = x + y rather than x += y, masked_fill rather than masked_fill_",
    )


def _no_grad(match: Match, about: About) -> Said:
    return Said(
        "no gradient reaches the parameters: somewhere the result was cut off from them",
        "look for .detach(), .data, .item(), .numpy(), torch.no_grad(), torch.tensor(...) of a result",
    )


def _second_time(match: Match, about: About) -> Said:
    return Said(
        "the backward pass went through the same computation twice: a result of an earlier call was kept",
        "compute everything that depends on parameters inside forward; keep no such tensor on self",
    )


def _numpy(match: Match, about: About) -> Said:
    return Said("numpy cannot carry gradients", "stay with torch's functions inside forward")


def _truth(match: Match, about: About) -> Said:
    return Said(
        "`if` needs one True or False and was given a whole tensor of them",
        "write `if mask is not None:` for whether there is a mask",
    )


def _memory(match: Match, about: About) -> Said:
    return Said(
        f"the code asked for {int(match[1]) / 2**30:,.0f} GiB in one tensor",
        "look at the sizes on this line: a length, or the width, is multiplied once too often",
    )


RULES = (
    Rule(r"value cannot be converted to type (?:c10|at)::(?:Half|BFloat16).* without overflow", _half),
    Rule(r"only supports boolean masks, but got mask with dtype ([\w ]+)", _mask_dtype),
    Rule(
        r"Expected attn_mask dtype .*attn_mask\.dtype: ([\w ]+?) and\s+query\.dtype: ([\w ]+?) instead",
        _sdpa_mask,
    ),
    Rule(r"Explicit attn_mask should not be set when is_causal=True", _sdpa_both),
    Rule(r"~ \(operator\.invert\)|bitwise_not", _invert),
    Rule(r"`-` operator, with a bool tensor", _bool_minus),
    Rule(r"(\"\w+\") not implemented for '(\w+)'", _not_implemented),
    Rule(r"expected scalar type (\w+) but found (\w+)", _two_dtypes),
    Rule(r"must have the same dtype,? but got:? (\w+) and (\w+)", _two_dtypes),
    Rule(r"expected .* to have the same dtype, but got: ([\w.]+) != ([\w.]+)", _two_dtypes),
    Rule(r"(\w+)\(\): could not infer output dtype.*Got: (\w+)", _could_not_infer),
    Rule(r"(cat|stack)\(\): argument 'tensors'.* must be tuple of Tensors", _tuple_of_tensors),
    Rule(r"(\w+)\(\): argument '\w+' \(position \d+\) must be Tensor, not (\w+)", _must_be_tensor),
    Rule(r"must be tuple of ints,\s?but (?:got|found element of type) float", _size_is_float),
    Rule(r"^(?:view|reshape)\(\) received an invalid combination .* got \([^)]*float", _size_is_float),
    Rule(r"'float' object cannot be interpreted as an integer", _size_is_float),
    Rule(r"not on the expected device|all tensors to be on the same device", _device),
    Rule(r"not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs|CUDA is not available", _no_cuda),
    Rule(r"leaf Variable that requires grad is being used in an in-place", _leaf),
    Rule(r"modified by an inplace operation", _in_place),
    Rule(r"does not require grad and does not have a grad_fn", _no_grad),
    Rule(r"backward through the graph a second time", _second_time),
    Rule(r"Can't call numpy\(\) on Tensor", _numpy),
    Rule(r"Boolean value of Tensor with more than one value", _truth),
    Rule(r"you tried to allocate (\d+) bytes", _memory),
)
