"""What `check` says of a source without running it, and of what it raises when it runs."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import sysconfig
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from headwise.examiner.evidence import Problem
from headwise.examiner.exceptions import explain
from headwise.examiner.faults.fault import Fault
from headwise.examiner.source.likely_classes import candidates
from headwise.examiner.source.lines import line_of
from headwise.examiner.source.names import Undefined, undefined_names
from headwise.examiner.source.parsed import find_source, nodes, segment, source_of_definition

PAGE_ONE = '''
import torch
import torch.nn as nn

class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        assert d_model % num_heads == 0

        self.d_model = d_model
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def split_heads(self, x):
        """Split into multiple heads"""
        batch_size, seq_len, d_model = x.size()
        return x.view(batch_size, seq_len, self.num_heads, self.d_k).transpose(1, 2)

    def forward(self, x, mask=None):
        Q = self.split_heads(self.W_q(x))
        K = self.split_heads(self.W_k(x))
        V = self.split_heads(self.W_v(x))
        scores = torch.matmul(Q, K.transpose(-2, -1)) / self.d_k ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        attention = F.softmax(scores, dim=-1)
        output = torch.matmul(attention, V)
        output = output.transpose(1, 2).contiguous().view(batch_size, seq_len, self.d_model)
        return self.W_o(output), attention
'''


def names(source: str) -> list[str]:
    return [undefined.name for undefined in undefined_names(source)]


def test_both_faults_of_the_course_page_are_found_with_their_lines_and_what_to_do() -> None:
    undefined = {name.name: name for name in undefined_names(PAGE_ONE)}
    assert list(undefined) == ["F", "batch_size", "seq_len"]
    assert undefined["F"].suggestion == "import torch.nn.functional as F"
    assert undefined["F"].text == "attention = F.softmax(scores, dim=-1)"
    assert PAGE_ONE.splitlines()[undefined["batch_size"].line - 1].strip() == undefined["batch_size"].text
    assert undefined["batch_size"].suggestion.startswith("assign it first, e.g. batch_size = x.size(0)")
    assert "split_heads" in undefined["batch_size"].suggestion
    assert "seq_len = x.size(1)" in undefined["seq_len"].suggestion
    assert "add at the top: import torch.nn.functional as F" in undefined["F"].words


UNDEFINED = {
    "module level": ("print(a)", "a"),
    "in a class body": ("class C:\n    x = a", "a"),
    "a class's name is not seen in its methods": (
        "class C:\n    a = 1\n    def f(self):\n        return a",
        "a",
    ),
    "in a nested function": ("def f():\n    def g():\n        return a\n    return g", "a"),
    "in a lambda": ("f = lambda x: x + a", "a"),
    "in a comprehension": ("y = [x + a for x in range(3)]", "a"),
    "the comprehension's own name, outside": ("y = [x for x in range(3)]\nprint(x)", "x"),
    "a class's own name, in its comprehension": ("class C:\n    a = 3\n    y = [a for x in range(3)]", "a"),
    "in the comprehension of a dict": (
        "y = {\n    'é': (lambda z: z + a)  # for all\n    for x in range(3)\n}",
        "a",
    ),
    "first iterable of a comprehension in a class": ("class C:\n    y = [x for x in a]", "a"),
    "in a decorator": ("@a\ndef f(): ...", "a"),
    "in a default": ("def f(x=a): ...", "a"),
    "as a base class": ("class C(a.Module): ...", "a"),
    "in an annotation": ("def f(x: Optional[int]): ...", "Optional"),
    "in what it returns": ("def f(x) -> Tensor: ...", "Tensor"),
    "in a class's annotation": ("class C:\n    x: Tensor = 1", "Tensor"),
    "in an f-string": ('print(f"{a}")', "a"),
    "in a match": ("def f(x):\n    match x:\n        case [y, *_]:\n            return y + a", "a"),
    "as a subject": ("match a:\n    case 1: pass", "a"),
    "global without anyone to bind it": ("def f():\n    global a\n    return a", "a"),
    "caught, but as something else": ("try:\n    a\nexcept ValueError:\n    pass", "a"),
    "in an async function": ("async def f():\n    return await a()", "a"),
    "beside an import that may fail": (
        "try:\n    import b\nexcept ImportError:\n    b = None\nprint(a)",
        "a",
    ),
    # used before it is assigned
    "in a function": ("def f(x):\n    y = x + z\n    z = 1\n    return y", "z"),
    "counted up from nothing": ("def f(x):\n    total += x\n    return total", "total"),
    "in a branch": ("def f(x):\n    if x:\n        print(z)\n    z = 1", "z"),
    "a class used above itself": ("m = C()\nclass C: ...", "C"),
    "its own value": ("def f():\n    z = z + 1", "z"),
    "inside a loop, bound after it": ("def f(x):\n    for i in x:\n        print(z)\n    z = 1", "z"),
}


@pytest.mark.parametrize(("source", "name"), UNDEFINED.values(), ids=UNDEFINED)
def test_undefined(source: str, name: str) -> None:
    assert names(source) == [name]


DEFINED = {
    "builtins": "print(len(__name__), __file__, NotImplemented)",
    "a parameter": "def f(a, *b, c=1, **d):\n    return a, b, c, d",
    "later in the module": "def f():\n    return a\na = 1",
    "through global": "def f():\n    global a\n    a = 1\ndef g():\n    return a",
    "through nonlocal": "def f():\n    a = 1\n    def g():\n        nonlocal a\n        a += 1\n    return g",
    "imports": "import torch.nn as nn\nimport os.path\nfrom x import y as z\nnn, os, z",
    "one of two imports": "try:\n    import a\nexcept ImportError:\n    a = None\nprint(a)",
    "an import on a condition": "import sys\nif sys.argv:\n    import a\nprint(a)",
    "a star import says nothing": "from torch import *\nprint(zeros, anything)",
    "globals() says nothing": "globals()['a'] = 1\nprint(a)",
    "exec says nothing": "exec('a = 1')\nprint(a)",
    "vars() says nothing": "vars()['a'] = 1\nprint(a)",
    "builtins that are assigned": "import builtins\nbuiltins.a = 1\nprint(a)",
    "the walrus": "if (n := 3) > 2:\n    print(n)",
    "the walrus in a comprehension": "y = [z := x for x in range(3)]\nprint(z)",
    "a comprehension in a string": "y = f'{ {x: [z for z in range(x)] for x in range(3)} }'",
    "comprehensions in comprehensions": "y = [[a * b for a in range(b)] for b in range(3)]",
    "captures of match": "def f(x):\n    match x:\n        case {'k': v, **rest}:\n"
    "            return v, rest\n"
    "        case [a, *b] | (a, *b):\n            return a, b\n        case int() as n:\n"
    "            return n",
    "with, for, except": "with open('x') as f:\n    for a, (b, *c) in f:\n        print(a, b, c)\n"
    "try:\n    pass\nexcept OSError as e:\n    print(e)",
    "__class__": "class C:\n    def f(self):\n        return __class__, super().f()",
    "__qualname__ in a class": "class C:\n    x = __qualname__ + __module__",
    "its own name": "class C:\n    def f(self):\n        return C",
    "annotations that nobody evaluates": "from __future__ import annotations\n"
    "def f(x: Tensor) -> Tensor: ...",
    "annotations as strings": "def f(x: 'Tensor') -> 'Tensor': ...",
    "annotations of locals": "def f():\n    x: Tensor = 1\n    return x",
    "a type only for checkers": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
    "    from a import b\ndef f(x: 'b'): ...",
    "asked for": "try:\n    unicode\nexcept NameError:\n    unicode = str",
    "asked for, in passing": "try:\n    a\nexcept Exception:\n    pass",
    "for another Python": "import sys\nif sys.version_info[0] == 2:\n    text = unicode\n",
    "never run": "if False:\n    print(a)",
    "marked as known": "print(a)  # noqa: F821",
    "deleted": "a = 1\ndel a",
    "a function called top": "def top(self, which):\n    return self, which",
    "two lambdas on a line": "f, g = lambda x: x, lambda y: y",
    "notebooks": "display(3)\nget_ipython()",
    "mangled": "class C:\n    __a = 1\n    def f(self, __b):\n        return __b",
    "no Python at all": "this is (not",
    "a class cut out of a function": "    class C:\n        def f(self):\n            return self\n",
    # not certainly used before it is assigned
    "bound by an earlier round": "def f(x):\n    for i in x:\n        if i:\n            print(z)\n"
    "        z = i",
    "round a while": "def f(x):\n    while x:\n        if x > 1:\n            print(z)\n"
    "        z = x = x - 1",
    "only in a function called later": "def f():\n    return z\nz = 1\nf()",
    "a builtin that is shadowed": "print(input)\ninput = 3",
    "the test of an expression comes first": "def f(x):\n    return y if (y := x) else 0",
    "with, in order": "def f(a):\n    with a as b, b.c as d:\n        return d",
    "a function's inner function": "def f():\n    def g():\n        return z\n    z = 1\n    return g()",
    "in a comprehension": "def f(x):\n    return [z for z in x]",
    "by a handler": "def f():\n    try:\n        import a\n    except ImportError:\n        a = None\n"
    "    return a",
    "asked for, then assigned": "def f():\n    try:\n        print(z)\n    except NameError:\n        z = 1",
    "nonlocal": "def f():\n    def g():\n        nonlocal z\n        z = 1\n    g()\n    print(z)\n    z = 2",
    "class bodies look outside": "def f(x):\n    class C:\n        x = x\n    return C",
}


@pytest.mark.parametrize("source", DEFINED.values(), ids=DEFINED)
def test_defined(source: str) -> None:
    assert undefined_names(source) == []


def test_the_base_of_a_class_must_be_defined() -> None:
    assert names("class C(nn.Module): ...") == ["nn"]


def test_the_line_that_assigns_it_is_named() -> None:
    (undefined,) = undefined_names("def f(x):\n    y = x + z\n    z = 1\n    return y")
    assert (undefined.line, undefined.suggestion) == (
        2,
        "it is assigned only later, on line 3: move that above",
    )


IN_CLASS = (
    "import torch\nclass C:\n    def __init__(self, dim, rate):\n        self.d_k = dim\n"
    "        self.go = 1\n"
)
SUGGESTED = {
    "nn": ("class C(nn.Module): ...", "import torch.nn as nn"),
    "torch": ("torch.ones(3)", "import torch"),
    "math": ("math.sqrt(3)", "import math"),
    "np": ("np.ones(3)", "import numpy as np"),
    "rearrange": ("rearrange(3)", "from einops import rearrange"),
    "einsum": ("einsum(3)", "from einops import einsum"),
    "Tuple": ("Tuple[int]", "from typing import Tuple"),
    "Tensor": ("def f(x: Tensor): ...", "from torch import Tensor"),
    "Linear": ("Linear(3, 3)", "from torch.nn import Linear"),
    "a slip": ("def f(scores):\n    return scroes", "did you mean scores?"),
    "capitals": ("def f(q, k):\n    return q @ K", "did you mean k?"),
    "self, misspelt": (IN_CLASS + "    def f(self):\n        return slef.d_k", "did you mean self?"),
    "without self": (
        IN_CLASS + "    def f(x):\n        return self.d_k",
        "make it the first parameter: def f(self, ...)",
    ),
    "kept on self": (IN_CLASS + "    def f(self):\n        return d_k", "did you mean self.d_k?"),
    "a method": (IN_CLASS + "    def f(self):\n        return f(3)", "did you mean self.f?"),
    "an argument of __init__": (
        IN_CLASS + "    def f(self, x):\n        return rate",
        "it is an argument of __init__ only: store it there, self.rate = rate, and use self.rate here",
    ),
    "a size": (
        "def forward(self, query, key, value):\n    return query.view(batch_size, -1)",
        "assign it first, e.g. batch_size = query.size(0)",
    ),
    "a length of the keys": (
        "def forward(self, query, key, value):\n    return query.view(1, key_len)",
        "assign it first, e.g. key_len = key.size(1)",
    ),
    "of old": ("xrange(3)", "Python 3 calls it range"),
    "nothing like it": ("zebra(3)", "assign or import it before this line"),
}


@pytest.mark.parametrize(("source", "suggestion"), SUGGESTED.values(), ids=SUGGESTED)
def test_suggestions(source: str, suggestion: str) -> None:
    (undefined,) = undefined_names(source)
    assert undefined.suggestion == suggestion


TORCH = Path(torch.__file__).parent
STANDARD = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


def reported(files: list[Path]) -> list[tuple[str, list[Undefined]]]:
    reports = [(path.name, undefined_names(path.read_text("utf-8", "replace"))) for path in files]
    return [(name, names) for name, names in reports if names]


@pytest.mark.slow
def test_nothing_is_reported_in_torch_and_the_standard_library() -> None:
    assert reported([*(TORCH / "nn").rglob("*.py"), *(TORCH / "optim").glob("*.py")]) == []
    assert reported(STANDARD) == []


# The line of a fault


def fault(*lines: str, key: str = "", step: str = "") -> Fault:
    """All that line_of looks at."""
    return cast("Fault", SimpleNamespace(key=key, lines=lines, step=step))


SCALED = '''
import torch

def attend(q, k, v):
    # scores / self.d_model ** 0.5 in a comment
    """divides: scores / d_model"""
    return torch.softmax(q @ k.mT / 3, dim=-2) @ v

def unused(scores, d_model):
    return scores / d_model

class A(torch.nn.Module):
    """scores / d_model in a docstring"""

    def __init__(self, d_model, h):
        super().__init__()
        self.d_model = d_model
        assert d_model % h == 0, "scores / d_model must be whole"
        self.other = h / d_model

    def forward(self, x):
        q = self.W_q(x).view(1, 2, 3)
        k = self.W_k(x).view(1, 2, 3)
        v = self.W_v(x).view(1, 2, 3)
        scores = (
            q @ k.mT  # the product
            / self.d_model**0.5
        )
        scores=scores.masked_fill(q == 0, float("-inf"))
        first = scores.view(3, 1)
        second = scores.view(1, 3)
        return attend(q, k, v)
'''
FIRST = SCALED.splitlines().index("class A(torch.nn.Module):") + 1


def at(text: str) -> int:
    return next(number for number, line in enumerate(SCALED.splitlines(), 1) if text in line)


def test_a_fault_is_found_in_code_alone_and_joined_lines() -> None:
    line = line_of(fault(r"/ \(?self\.d_model"), SCALED, FIRST, None)
    assert line == (at("scores = ("), "scores = (q @ k.mT / self.d_model**0.5)")
    assert line_of(fault(r"/ d_model"), SCALED, FIRST, None) == (at("self.other"), "self.other = h / d_model")


def test_spaces_do_not_matter_and_strings_that_compute_are_kept() -> None:
    line = at("masked_fill"), 'scores=scores.masked_fill(q == 0, float("-inf"))'
    assert line_of(fault(r"scores = .*masked_fill"), SCALED, FIRST) == line
    assert line_of(fault(r"float\(['\"]-inf"), SCALED, FIRST) == line
    assert line_of(fault(r"must be whole"), SCALED, FIRST) is None


def test_functions_that_it_calls_count_and_others_do_not() -> None:
    assert line_of(fault(r"dim=-2"), SCALED, FIRST) == (at("dim=-2"), text_at(at("dim=-2")))
    assert line_of(fault(r"return scores"), SCALED, FIRST) is None
    assert line_of(fault(r"return scores"), SCALED) == (at("return scores"), "return scores / d_model")


def text_at(line: int) -> str:
    return SCALED.splitlines()[line - 1].strip()


def test_the_three_projections_are_one_meaning_and_two_meanings_are_none() -> None:
    assert line_of(fault(r"self\.W_.*view\("), SCALED, FIRST) == (at("self.W_q"), text_at(at("self.W_q")))
    assert line_of(fault(r"scores\.view\("), SCALED, FIRST) is None
    assert line_of(fault(r"scores\.view\(", r"view\(1, 3\)"), SCALED, FIRST) == (
        at("second"),
        text_at(at("second")),
    )
    assert (
        line_of(fault(r"scores\.view\(", r"softmax"), SCALED, FIRST) is None
    )  # no way from one to the other


def test_of_lines_that_mean_the_same_the_one_that_the_fault_names() -> None:
    assert line_of(fault(r"self\.W_.*view\(", key="no v bias"), SCALED, FIRST) == (
        at("self.W_v"),
        text_at(at("self.W_v")),
    )
    source = "def f(x, k, v):\n    q = w(x)\n    k = w(k)\n    v = v\n"
    assert line_of(fault(r"w\(", key="no v projection"), source, 1) is None


def test_a_fault_of_one_projection_is_never_shown_at_anothers_line() -> None:
    source = "def f(self, x, k, v):\n    q = self.W_q(x)\n    k = self.W_q(k)\n    v = v\n"
    assert line_of(fault(r"W_q\(", key="keys through w_q", step="project"), source, 1) == (
        3,
        "k = self.W_q(k)",
    )
    assert line_of(fault(r"W_q\(", key="no v projection", step="project"), source, 1) == (4, "v = v")
    assert line_of(fault(r"W_q\(", key="no v bias", step="project"), source, 1) is None


def test_methods_that_a_class_replaces_do_not_run() -> None:
    source = "class A:\n    def f(self):\n        return x / 2\n    def g(self):\n        return x * 3\n"
    source += (
        "class B(A):\n    def f(self):\n        return x / 4\n    def g(self):\n        return super().g()\n"
    )
    assert line_of(fault(r"x / "), source, 6) == (8, "return x / 4")
    assert line_of(fault(r"x / 2"), source, 6) is None
    assert line_of(fault(r"x \* 3"), source, 6) == (5, "return x * 3")


def test_forward_comes_first() -> None:
    assert line_of(fault(r"self\.d_model\b"), SCALED, FIRST) == line_of(
        fault(r"/ self\.d_model"), SCALED, FIRST
    )
    assert line_of(fault(r"nowhere", r"softmax"), SCALED, FIRST) is not None
    assert line_of(fault(), SCALED, FIRST) is None
    assert line_of(fault("x"), "not (python", None) is None


def test_a_long_statement_is_quoted_by_its_own_line() -> None:
    source = "def f(q, k):\n    return torch.softmax(\n" + "        first_long_name + second_long_name,\n" * 4
    source += "        dim=-2,\n    )\n"
    assert line_of(fault(r"dim=-2"), source, 1) == (7, "dim=-2,")


# Which class is meant


def test_the_class_is_chosen_by_name_and_by_what_it_does() -> None:
    source = (
        PAGE_ONE
        + """
def scaled_dot_product_attention(q, k, v):
    return (q @ k.mT).softmax(-1) @ v

class Head(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q = nn.Linear(d, d)
    def forward(self, x):
        return (self.q(x) @ x.mT).softmax(-1) @ x

class FeedForward(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.a = nn.Linear(d, d)
    def forward(self, x):
        return self.a(x)

class TransformerBlock(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.attention, self.feed = MultiHeadAttention(d, heads), FeedForward(d)
    def forward(self, x):
        return self.feed(self.attention(x)[0])

def test_attention():
    assert MultiHeadAttention(8, 2)(torch.zeros(1, 2, 8)).softmax(-1) is not None
"""
    )
    classes = candidates(source)
    assert classes[0][:2] == ("MultiHeadAttention", "class")
    assert source.splitlines()[classes[0].first_line - 1].startswith("class MultiHeadAttention")
    assert source.splitlines()[classes[0].last_line - 1].strip().startswith("return self.W_o")
    others = [candidate.name for candidate in classes]
    assert "FeedForward" not in others and "test_attention" not in others
    assert [candidate.score for candidate in classes] == sorted(
        (candidate.score for candidate in classes), reverse=True
    )


BY_DEEDS = """
class {}(nn.Module):
    def __init__(self, d, k):
        super().__init__()
        self.k = k
        self.a, self.b, self.c, self.e = (nn.Linear(d, d) for _ in range(4))
    def forward(self, x):
        B, T, d = x.shape
        a, b, c = (one(x).view(B, T, self.k, -1).transpose(1, 2) for one in (self.a, self.b, self.c))
        return self.e(((a @ b.mT).softmax(-1) @ c).transpose(1, 2).reshape(B, T, d))
"""
BEST = {
    "a plain name": "class Mystery(nn.Module):\n    def __init__(self, d, heads):\n"
    "        self.qkv = nn.Linear(d, 3 * d)\n"
    "    def forward(self, x):\n        q, k, v = self.qkv(x).chunk(3, -1)\n"
    "        return (q @ k.mT).softmax(-1) @ v\n"
    "class Other(nn.Module):\n    def forward(self, x):\n        return x\n|Mystery",
    "a function": "def multi_head_attention(q, k, v, w_q, w_k, w_v, w_o, num_heads):\n"
    "    return F.softmax(q @ k.mT, -1) @ v\ndef softmax(x):\n    return x.exp() / x.exp().sum()\n"
    "|multi_head_attention",
    "heads of a class of their own": "class Head(nn.Module):\n    def __init__(self, d):\n"
    "        self.k = nn.Linear(d, d)\n"
    "    def forward(self, x):\n        return F.softmax(self.k(x) @ x.mT, -1) @ x\n"
    "class MultiHead(nn.Module):\n    def __init__(self, n_head):\n"
    "        self.heads = nn.ModuleList([Head(3)])\n"
    "    def forward(self, x):\n        return torch.cat([h(x) for h in self.heads], -1)\n|MultiHead",
    "of two attempts the later": "class SelfAttentionV1(nn.Module):\n    def forward(self, x):\n"
    "        return (x @ x.mT).softmax(-1) @ x\n"
    "class SelfAttentionV2(nn.Module):\n    def forward(self, x):\n"
    "        return (x @ x.mT).softmax(-1) @ x\n|SelfAttentionV2",
    "torch's own function": "class CausalSelfAttention(nn.Module):\n    def forward(self, x):\n"
    "        return F.scaled_dot_product_attention(x, x, x)\nclass GPT(nn.Module):\n"
    "    def __init__(self, n_head):\n"
    "        self.a = CausalSelfAttention()\n    def forward(self, x):\n"
    "        return F.softmax(self.a(x) @ x, -1)\n"
    "|CausalSelfAttention",
    "a helper of the class": "def attention(query, key, value):\n    scores = torch.matmul(query, key.mT)\n"
    "    return scores.softmax(-1) @ value\nclass MultiHeadedAttention(nn.Module):\n"
    "    def __init__(self, h, d_model):\n"
    "        self.linears = clones(nn.Linear(d_model, d_model), 4)\n"
    "    def forward(self, query, key, value):\n"
    "        return attention(query, key, value)\n|MultiHeadedAttention",
    "a helper with weights of attention": "class ScaledDotProductAttention(nn.Module):\n"
    "    def forward(self, q, k, v):\n        weights = (q @ k.mT).softmax(-1)\n"
    "        self.weights = weights\n        return weights @ v, weights\n"
    "class MultiHeadAttention(nn.Module):\n    def __init__(self, d, heads):\n"
    "        self.q, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)\n"
    "        self.inner = ScaledDotProductAttention()\n"
    "    def forward(self, x):\n        q, k, v = self.q(x).chunk(3, -1)\n"
    "        return self.o(self.inner(q, k, v)[0])\n|MultiHeadAttention",
    "weights in a dict": "def init_attention(heads):\n    return {k: torch.randn(8, 8) for k in 'qkvo'}\n"
    "def weighted(s):\n    return s.exp() / s.exp().sum(-1)\n"
    "def apply_attention(params, x):\n    q, k, v = (x @ params['q'], x @ params['k'], x @ params['v'])\n"
    "    w = weighted(q @ k.mT)\n    return w @ v @ params['o']\n|apply_attention",
    "mended below": PAGE_ONE + "\nclass MHA(MultiHeadAttention):\n    pass\n|MHA",
    "names in another language": BY_DEEDS.format("注意力") + "class 编码器层(nn.Module):\n"
    "    def __init__(self, d, k):\n        self.a, self.n = 注意力(d, k), nn.LayerNorm(d)\n"
    "    def forward(self, x):\n        return self.n(x + self.a(x))\n"
    "class 模型(nn.Module):\n    def __init__(self, d, k):\n"
    "        self.all = nn.ModuleList([编码器层(d, k) for _ in range(3)])\n"
    "    def forward(self, x):\n        return torch.cat([each(x) for each in self.all], -1)\n|注意力",
    "heads side by side, in NumPy, no module": "def glatt(z):\n    e = np.exp(z)\n    return e / e.sum(-1)\n"
    "class Kopf:\n    def __init__(self, d):\n        self.A, self.B = np.random.randn(2, d, d)\n"
    "    def __call__(self, x):\n        return glatt((x @ self.A) @ (x @ self.B).T) @ x\n"
    "class Viele:\n    def __init__(self, d, k):\n        self.alle = [Kopf(d) for _ in range(k)]\n"
    "    def __call__(self, x):\n        return np.concatenate([k(x) for k in self.alle], -1)\n|Viele",
    "functions by what they do": "def split(x, n):\n    return x.view(2, 3, n, -1).transpose(1, 2)\n"
    "def core(q, k, v):\n    return (q @ k.mT).softmax(-1) @ v\n"
    "def mix(x, wq, wk, wv, wo, n):\n"
    "    return core(split(x @ wq, n), split(x @ wk, n), split(x @ wv, n)).flatten(2) @ wo\n"
    "def causal_mask(n):\n    return torch.ones(n, n).tril()\n|mix",
    "the class that holds the weights of a function": "def multihead_attention(x, w_in, w_out, n_heads):\n"
    "    q, k, v = F.linear(x, w_in).chunk(3, -1)\n    return F.linear((q @ k.mT).softmax(-1) @ v, w_out)\n"
    "class Att(nn.Module):\n    def __init__(self, d, heads):\n"
    "        self.a, self.b = nn.Parameter(d), nn.Parameter(d)\n"
    "    def forward(self, x):\n        return multihead_attention(x, self.a, self.b, 2)\n|Att",
    "a block where no attention stands": "class Layer(nn.Module):\n    def __init__(self, d, heads):\n"
    "        self.a, self.n = nn.MultiheadAttention(d, heads), nn.LayerNorm(d)\n"
    "    def forward(self, x):\n        return self.n(x + self.a(x, x, x)[0])\n"
    "class Model(nn.Module):\n    def __init__(self, d):\n        self.all = [Layer(d, 2)]\n"
    "    def forward(self, x):\n        return self.all[0](x)\n|Layer",
    "under an if": "if True:\n    class Attention(nn.Module):\n        def forward(self, x):\n"
    "            return (x @ x.mT).softmax(-1) @ x\n"
    "if __name__ == '__main__':\n    class MultiHeadAttention(nn.Module):\n        def forward(self, x):\n"
    "            return (x @ x.mT).softmax(-1) @ x\n|Attention",
    "a single step where nothing more stands": "def split_heads(x, h):\n    return x.unflatten(-1, (h, -1))\n"
    "def area(r):\n    return 3.14 * r\n|split_heads",
}


@pytest.mark.parametrize("case", BEST.values(), ids=BEST)
def test_the_best_candidate(case: str) -> None:
    source, _, name = case.rpartition("|")
    assert candidates(source)[0].name == name


def test_no_candidate() -> None:
    classifier = (
        "class Net(nn.Module):\n    def forward(self, x):\n        return F.softmax(self.fc(x), -1)\n"
    )
    assert candidates(classifier) == []
    assert candidates("x = 1") == [] and candidates("not (python") == []


# Exceptions


def raised(source: str, call: str) -> Problem:
    """What a learner's file raises when `call` runs, at the last of their lines."""
    space: dict[str, Any] = {}
    try:
        exec(compile(source, "learner.py", "exec"), space)
        exec(compile(call, "call", "exec"), space)
    except Exception as error:
        lines = [
            each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == "learner.py"
        ]
        return Problem("call", type(error).__name__, str(error), lines[-1] if lines else None)
    raise AssertionError("nothing was raised")


MODULE = """import torch
import torch.nn as nn
import torch.nn.functional as F

class A(nn.Module):
    def __init__(self, d=24, h=4):
        super().__init__()
        self.h = h
        self.W_q = nn.Linear(6, 24)
        self.linear = nn.Linear(24, 24)

    def forward(self, x, mask=None):
        B, T, E = x.shape
        return {}
"""
X = "A()(torch.zeros(3, 7, 24))"
RAISED = {
    "view after transpose": (
        "x.view(B, T, 4, 6).transpose(1, 2).view(B, T, E)",
        ("a transpose does not move numbers", "reshape"),
    ),
    "view later": ("x.narrow(2, 0, 5).view(B, -1)", ("view cannot", ".contiguous()")),
    "a layer of the wrong width": (
        "self.W_q(x)",
        ("self.W_q (line 9: `self.W_q = nn.Linear(6, 24)`)", "6 features", "24"),
    ),
    "a product": ("x[0] @ x[1]", ("7 × 24", "inner sizes")),
    "sizes that do not multiply": ("x.view(B, T, 5, 6)", ("has 630 elements", "the tensor has 504")),
    "sizes beside -1": ("x.view(B, -1, 5, 7)", ("does not divide 504", "504")),
    "a mask that does not line up": (
        "x.masked_fill(torch.ones(3, 5, 24) > 0, 0)",
        ("shapes of the mask and the scores do not match", "None, None"),
    ),
    "two tensors that do not line up": ("x + torch.ones(3, 5, 24)", ("dimension 1 has the sizes 7 and 5",)),
    "scores without a transpose": (
        "x.matmul(x) if (k := x) is None else torch.bmm(x, k)",
        ("is not transposed", "k.transpose(-2, -1)"),
    ),
    "einsum, axes": ("torch.einsum('bqhd,bkhd->bhqk', x, x)", ("3 dimensions", "has 4 letters for it")),
    "einsum, sizes": (
        "torch.einsum('bqd,bkd->bqk', x, x[..., :5])",
        ("letter d stands for a size of 24", "5 in tensor 2"),
    ),
    "einsum, output": ("torch.einsum('bqd->bhq', x)", ("letter h",)),
    "dtypes": ("self.linear(x.double())", ("float64 and float32",)),
    "whole numbers": ("self.linear(x.long())", ("int64", ".float()")),
    "half": ("x.half().masked_fill(x > 0, -1e9)", ("-1e9 is out of the range of float16", "finfo")),
    "a mask of numbers": ("x.masked_fill(torch.ones(3, 7, 24), 0)", ("of dtype bool", "mask == 0")),
    "a mask of whole numbers": ("x.masked_fill(torch.ones(3, 7, 24).long(), 0)", ("int64", "mask.bool()")),
    "~ of numbers": ("~x", ("~", "mask == 0")),
    "softmax of whole numbers": ("x.long().softmax(-1)", ("softmax", "int64")),
    "an axis too far": ("x.transpose(1, 3)", ("no dimension 3", "3 dimensions")),
    "torch.sqrt of a number": ("torch.sqrt(24)", ("a Python number", "math.sqrt")),
    "a fraction as size": ("x.view(B, T, 4, E / 4)", ("//",)),
    "unpacking": ("[a for a, b, c, d in [x.shape]]", ("4 names", "3 values")),
    "an attribute misspelt": ("self.linaer(x)", ("A has no self.linaer", "Did you mean self.linear?")),
    "an attribute of nothing": ("self.zebra(x)", ("assign it in __init__", "self.zebra")),
    "a method of tensors misspelt": ("x.contigous()", ("Did you mean .contiguous?",)),
    "a function of torch misspelt": ("torch.softmx(x)", ("Did you mean torch.softmax?",)),
    "None": ("x.masked_fill(mask == 0, 0) + mask", ("mask is None, and None == 0", "if mask is not None")),
    "None's attribute": ("mask.bool()", ("None", "is not None")),
    "a tuple": ("(x, x).transpose(1, 2)", ("a tuple", "output, weights")),
    "in place": ("self.linear.weight.add_(1)", ("in place", "x = x + y")),
    "in place, seen backward": (
        "(y := self.linear(x).exp()).add_(1).sum().backward()",
        ("that the backward pass needs",),
    ),
    "cut off": ("self.linear(x).detach().sum().backward()", ("no gradient", ".detach()")),
    "another device": ("x + torch.ones(3, 7, 24, device='meta')", ("devices", "register_buffer")),
    "a name": ("Q.softmax(-1)", ("Q is not defined",)),
    "a package": ("__import__('zebras')", ("zebras is not installed", "pip install zebras")),
    "a package misspelt": ("__import__('einopps')", ("Did you mean einops?",)),
    "the wrong axes swapped": (
        "(k := x.view(B, T, 4, 6)) @ k.transpose(0, 1)",
        ("all dimensions but the last two", "-2, -1"),
    ),
    # every argument given: Python 3.13 before 3.13.8 never ends a call that leaves some to their defaults
    "itself": ("self.forward(x, mask)", ("forward calls itself",)),
    "an unknown argument": ("F.softmax(x, axis=-1)", ("Did you mean dim?",)),
    "if of a tensor": ("1 if x > 0 else 2", ("is not None",)),
    "both masks": (
        "F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(7, 7).bool(), is_causal=True)",
        ("not both",),
    ),
}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.slow if "meta" in case[0] else ())  # imports much
        for name, case in RAISED.items()
    ],
)
def test_exceptions_are_explained_at_the_learners_line(line: str, words: tuple[str, ...]) -> None:
    source = MODULE.format(line)
    problem = raised(source, X)
    explanation = explain(problem, source)
    assert explanation.startswith(f"Line 14, `return {line}`: "), explanation
    assert problem.message not in explanation or problem.kind not in explanation, explanation
    for word in words:
        assert word.lower() in explanation.lower(), explanation


BUILT = {
    "super().__init__() forgotten": (
        "        super().__init__()\n",
        "",
        "A()",
        ("super().__init__()", "Line 8"),
    ),
    "no forward": ("def forward", "def forwrad", X, ("has no method forward", "forwrad")),
    "__init__ misspelt": ("__init__", "__int__", "A(3)", ("has no __init__", "instead of __int__?")),
    "a fraction, where it comes from": (
        "self.h = h",
        "self.h = d / 4",
        "A()(torch.zeros(3, 7, 24)).view(A().h)",
        ("//",),
    ),
    "no self": (
        "def forward(self, x, mask=None)",
        "def forward(x)",
        X,
        ("has no parameter self", "def forward(self"),
    ),
    "missing argument": ("", "", "A()()", ("A.forward was called without 'x'",)),
    "one too many": ("", "", "A()(1, 2, 3)", ("takes 3 arguments", "given 4")),
    "unknown argument": ("", "", "A()(1, masks=2)", ("no argument called masks", "Did you mean mask?")),
    "divisible": ("self.h = h", "assert d % h == 0", "A(24, 5)", ("not divisible", "assert d % h == 0")),
    "own assert": (
        "self.h = h",
        "assert h > 5, 'too few'",
        "A()",
        ("an assert of yours", "too few", "`h > 5` is not true"),
    ),
    "bare assert": ("self.h = h", "assert h > 5", "A()", ("an assert of yours failed:",)),
    "never imported": (
        "import torch.nn.functional as F\n",
        "\n",
        X,
        ("add at the top: import torch.nn.functional as F",),
    ),
    "used too early": ("B, T, E = x.shape", "x = y; y = x", X, ("y has no value when this line runs",)),
}


@pytest.mark.parametrize(("old", "new", "call", "words"), BUILT.values(), ids=BUILT)
def test_exceptions_of_building_and_calling(old: str, new: str, call: str, words: tuple[str, ...]) -> None:
    source = MODULE.format("F.softmax(x, -1)").replace(old, new, 1) if old else MODULE.format("x")
    explanation = explain(raised(source, call), source)
    for word in words:
        assert word.lower() in explanation.lower(), explanation


def test_what_is_no_python() -> None:
    def described(source: str, line: int) -> str:
        return explain(Problem("import", "SyntaxError", "invalid syntax", line), source)

    assert "notebook command" in described("import torch\n!pip install einops\n", 2)
    assert "marks a code block" in described("```python\nimport torch\n", 1)
    assert described("x = (1\ny = 2\n", 2) == (
        "Line 2, `y = 2`: Python cannot read the file: invalid syntax. Check the brackets, colons and "
        "indentation of this line and the one before it."
    )


def test_what_is_not_known_is_quoted_and_limits_are_words_already() -> None:
    unknown = Problem("call", "ValueError", "the moon\n  is full", 2, "causal")
    assert (
        explain(unknown, "a = 1\nb = 2\n")
        == "Line 2, `b = 2` (test input: causal): ValueError: the moon is full."
    )
    assert explain(Problem("build", "ValueError", "no"), None) == "During construction: ValueError: no."
    assert explain(Problem("limits", "timeout", "it took more than 60 seconds"), None) == (
        "While it ran: it took more than 60 seconds."
    )


def test_statements_over_several_lines_are_quoted_whole() -> None:
    source = (
        "import torch\ndef f(x):\n    return torch.softmax(\n        x.long(),  # here\n"
        "        dim=-1,\n    )\n"
    )
    explanation = explain(raised(source, "f(torch.ones(3))"), source)
    assert "`return torch.softmax(x.long(), dim=-1)`" in explanation


# Where a class is in its file

NESTED = """
import functools


class Plain:
    class Inner:
        a = "é"; b = (1,
            2)


@functools.cache
class Decorated:
    pass


def made():
    try:
        class Local:
            pass
    except ValueError as error:
        class Handler(ValueError):
            pass
        raise
    return Local


if True:
    class Twice:
        first = 1
else:
    class Twice:
        second = 2
"""


def test_a_class_is_found_where_inspect_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nested_classes.py").write_text(NESTED, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("nested_classes")
    monkeypatch.delitem(sys.modules, "nested_classes")
    monkeypatch.setitem(sys.modules, "nested_classes", module)
    decorated = module.Decorated.__wrapped__
    for owner in (module.Plain, module.Plain.Inner, decorated, module.made(), module.Twice, module.made):
        assert find_source(owner) == inspect.findsource(owner)
        assert source_of_definition(owner) == inspect.getsource(owner)
    assert find_source(module.Plain.Inner)[1] == 5
    with pytest.raises(OSError, match=r"class definition|source code"):
        find_source(type("Made", (), {"__module__": "nested_classes"}))
    with pytest.raises(TypeError, match="built-in"):
        find_source(int)


def test_nodes_are_those_of_ast_in_its_order() -> None:
    tree = ast.parse(NESTED)
    every = list(ast.walk(tree))
    for kind in (ast.ClassDef, (ast.FunctionDef, ast.ClassDef), ast.Assign, ast.stmt):
        assert list(nodes(tree, kind)) == [node for node in every if isinstance(node, kind)]
    for node in every:
        if isinstance(node, (ast.stmt, ast.expr)):
            assert segment(NESTED, node) == ast.get_source_segment(NESTED, node)
