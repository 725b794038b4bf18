"""One training step with torch's attention class or ours, drawn: inputs, masks, what learns, who calls.

`draw_call` describes a call in words. `made` makes its module and tensors, with the same numbers for either
class. Sizes: N 2, L 5, S 7, E 12, kdim 11, vdim 13.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import headwise as hw
from as_torch_cases import BOTH, Choose, always_in_one_step, as_if_large, slow_path

N, L, S, E = 2, 5, 7, 12
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "kdim": {"kdim": 11, "vdim": 13},
    "bias_k": {"add_bias_kv": True},
    "zero key": {"add_zero_attn": True},
    "dropout": {"dropout": 0.4},
}
INPUTS = ("self", "cross", "three", "positions", "view", "query is value")
STRIDES = ("contiguous", "contiguous", "transposed", "slice")
MASKS = ("none", "bool", "float", "inf", "causal", "learned")
PADDINGS = ("none", "bool", "float", "inf", "learned")
LEARNS = ("all", "none", "query", "key", "value")
FROZEN = ("nothing", "all", "in_proj", "out_proj", "weights", "biases")
# What people train: all of it, a first layer, what comes before, one projection, biases alone.
TRAINED = [
    ("all", "nothing"), ("none", "nothing"), ("all", "all"), ("none", "in_proj"), ("none", "out_proj"),
    ("none", "weights"), *product(LEARNS, FROZEN),
]  # fmt: skip


def seed_all(seed: int) -> None:
    """`torch.manual_seed` for the devices at hand; that one takes 1 ms: it tells every kind of device."""
    torch.default_generator.manual_seed(seed)
    if "cuda" in DEVICES:
        torch.cuda.manual_seed(seed)


@dataclass(frozen=True)
class Call:
    """One call in words."""

    seed: int
    device: str
    dtype: torch.dtype
    num_heads: int
    batch_first: bool
    option: str
    training: bool
    is_adopted: bool  # ours comes from hw.adopt, not from the constructor
    batched: bool
    inputs: str
    strides: str
    learns: str  # which inputs require a gradient
    frozen: str  # which parameters require none
    attn_mask: str
    mask_per_head: bool
    key_padding_mask: str
    is_causal: bool
    weights: str | None  # None, "mean", "heads"
    way: str  # of ours: "own", "large" as for many tokens, "one step" as on a GPU
    lengths: tuple[int, int] = (L, S)

    @property
    def tolerance(self) -> float:
        if self.dtype == torch.float64:
            return 1e-9
        return 2e-4 if self.device == "cpu" else 2e-3


def draw_call(choose: Choose, seed: int, device: str = "cpu", target: str = "") -> Call:
    """A call that torch's class takes; `target`: a tensor that there must be.

    Half of the calls are plain: those take our shortest way, a single node.
    """
    is_plain = choose(BOTH)
    option = choose(_options(target, device, is_plain))
    learns, frozen = choose(choose((TRAINED[:6], TRAINED)))
    masks, paddings = (kinds[:-1] if is_plain else kinds for kinds in (MASKS, PADDINGS))
    mask = choose(masks[1:] if target == "attn_mask" else masks)
    return Call(
        seed=seed,
        device=device,
        dtype=choose((torch.float64, torch.float32)),
        num_heads=choose((3, 2)),
        batch_first=choose((True, False)),
        option=option,
        training=choose((True, False)),
        is_adopted=choose(BOTH),
        batched=is_plain or choose(BOTH),
        inputs="three" if option == "kdim" else choose(INPUTS[:2] if is_plain else INPUTS),
        strides=choose(STRIDES),
        learns=learns,
        frozen=frozen,
        attn_mask=mask,
        mask_per_head=choose(BOTH),
        key_padding_mask=choose(paddings[1:] if target == "key_padding_mask" else paddings),
        # beside appended keys torch reads the hint alone, ours the mask
        is_causal=mask == "causal" and option not in ("bias_k", "zero key") and choose(BOTH),
        weights=choose(("mean", "heads") if target == "weights" else (None, "mean", "heads")),
        way=choose(("own", "large", "one step") if device == "cpu" else ("own",)),
    )


def _options(target: str, device: str, is_plain: bool) -> list[str]:
    """The options of a module that has the target."""
    if target in ("bias_k", "bias_v"):
        return ["bias_k"]
    if target in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        return ["kdim"]
    without = {"no bias"} if "bias" in target else {"kdim"} if target == "in_proj_weight" else set()
    if device != "cpu":
        without |= {"dropout"}  # other numbers are dropped there
    return [name for name in (("plain", "no bias") if is_plain else OPTIONS) if name not in without]


def check_drawn(
    check: Callable[[Call, Choose], None], seeds: Iterable[int], device: str = "cpu", target: str = ""
) -> None:
    """Check a drawn call for each seed; a failure names the call. `Choose` draws whatever else is needed.

    On a GPU, where a call of this size takes several times as long, for one seed in three.
    """
    for seed in list(seeds)[:: 1 if device == "cpu" else 3]:
        choose = Random(f"{seed} {target}").choice
        call = draw_call(choose, seed, device, target)
        try:
            check(call, choose)
        except Exception as error:
            error.add_note(f"{call}")
            raise


@dataclass
class Made:
    """A call's module and tensors."""

    call: Call
    module: nn.MultiheadAttention
    leaves: list[Tensor]  # what inputs and masks were made from
    query: Tensor
    key: Tensor
    value: Tensor
    masks: dict[str, Tensor]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that the caller has, by name."""
        inputs = {"query": self.query, "key": self.key, "value": self.value}
        return {**inputs, **self.masks, **dict(self.module.named_parameters())}

    @property
    def learning(self) -> list[Tensor]:
        """All that requires a gradient."""
        return [x for x in (*self.leaves, *self.module.parameters()) if x.requires_grad]

    def answer(self) -> tuple[Tensor, Tensor | None]:
        """Call the module; dropout draws the same numbers every time."""
        seed_all(self.call.seed + 1)
        actual: tuple[Tensor, Tensor | None] = self.module(
            self.query, self.key, self.value,
            need_weights=self.call.weights is not None,
            average_attn_weights=self.call.weights == "mean",
            is_causal=self.call.is_causal,
            **self.masks,
        )  # fmt: skip
        return actual


@contextmanager
def path(call: Call, ours: bool) -> Iterator[None]:
    """torch's slow path, or the way of ours that the call names.

    On a GPU by torch's plain operations: in backward the fused kernel that it takes there refuses biases and
    lse of odd strides.
    """
    with as_if_large(ours and call.way == "large"), always_in_one_step(ours and call.way == "one step"):
        if ours:
            yield
        else:
            with slow_path(), nullcontext() if call.device == "cpu" else sdpa_kernel(SDPBackend.MATH):
                yield


def module_of(call: Call, ours: bool) -> nn.MultiheadAttention:
    """The module of a call, of torch's class or ours."""
    kind = hw.nn.MultiheadAttention if ours and not call.is_adopted else nn.MultiheadAttention
    where = {"device": call.device, "dtype": call.dtype, "batch_first": call.batch_first}
    seed_all(call.seed)
    module = kind(E, call.num_heads, **OPTIONS[call.option], **where).train(call.training)
    with torch.no_grad():
        for parameter in module.parameters():  # torch starts biases at 0
            parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
    if ours and call.is_adopted:
        hw.adopt(module)
    assert isinstance(module, hw.nn.MultiheadAttention) == ours
    is_frozen: dict[str, Callable[[str], bool]] = {
        "nothing": lambda name: False,
        "all": lambda name: True,
        "in_proj": lambda name: not name.startswith("out_proj"),
        "out_proj": lambda name: name.startswith("out_proj"),
        "weights": lambda name: "weight" in name,
        "biases": lambda name: "bias" in name,
    }
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not is_frozen[call.frozen](name))
    return module


def made(call: Call, ours: bool) -> Made:
    """The module and tensors of a call, the same numbers for both classes."""
    module, leaves = module_of(call, ours), []
    random = torch.Generator().manual_seed(call.seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=call.dtype).to(call.device)

    def sequence(length: int, width: int, name: str) -> Tensor:
        shape = (N, length, width) if call.batch_first else (length, N, width)
        leaf = numbers(*shape if call.batched else (length, width))
        leaves.append(leaf.requires_grad_(call.learns in ("all", name)))
        x = 2 * leaf  # not a leaf, so that it may be written to
        if call.strides == "transposed":
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        if call.strides == "slice":
            return torch.cat([x, x], -1)[..., :width]
        return x

    query_len, key_len = call.lengths
    query = sequence(query_len, E, "query")
    key, value = {
        "self": lambda: (query, query),
        "view": lambda: (query.view_as(query), query),
        "positions": lambda: (query, query),
        "query is value": lambda: (sequence(query_len, E, "key"), query),
        "cross": lambda: (sequence(key_len, E, "key"),) * 2,
        "three": lambda: (sequence(key_len, module.kdim, "key"), sequence(key_len, module.vdim, "value")),
    }[call.inputs]()
    if call.inputs == "positions":
        query = key = query + 1
    length = key.shape[0 if call.batched and not call.batch_first else -2]
    square = (query_len, length)
    if call.mask_per_head:
        square = (call.num_heads * (N if call.batched else 1), *square)
    rows = (N, length) if call.batched else (length,)
    masks = {
        "attn_mask": _mask(call.attn_mask, square, call, leaves, random),
        "key_padding_mask": _mask(call.key_padding_mask, rows, call, leaves, random),
    }
    options = {name: mask for name, mask in masks.items() if mask is not None}
    return Made(call, module, leaves, query, key, value, options)


def _mask(
    kind: str, shape: tuple[int, ...], call: Call, leaves: list[Tensor], random: torch.Generator
) -> Tensor | None:
    """Every query sees the first key."""
    if kind == "none":
        return None
    hidden = torch.rand(shape, generator=random) < 0.3
    if kind == "causal":
        hidden = torch.ones(shape, dtype=torch.bool).triu(1)
    hidden[..., 0] = False
    hidden, numbers = hidden.to(call.device), torch.randn(shape, generator=random, dtype=call.dtype)
    if kind in ("bool", "causal"):
        return hidden
    if kind == "inf":
        return torch.zeros(shape, dtype=call.dtype, device=call.device).masked_fill(hidden, -torch.inf)
    numbers = numbers.to(call.device)
    if kind == "float":
        return numbers
    leaves.append(numbers.requires_grad_())
    return numbers * 1.0


def difference(
    actual: Sequence[Tensor | None], wanted: Sequence[Tensor | None], tolerance: float
) -> str | None:
    """What is wrong with gradients or answers; None: nothing. A gradient of None is one of 0."""
    if len(actual) != len(wanted):
        return f"there are {len(actual)}, not {len(wanted)}"
    sizes = [float(x.detach().abs().max()) for x in wanted if x is not None and x.numel()]
    size = max([1.0, *(size for size in sizes if size < math.inf)])
    for number, (ours, theirs) in enumerate(zip(actual, wanted, strict=True)):
        if ours is None or theirs is None:
            left = theirs if ours is None else ours
            if left is not None and bool(left.any()):
                return f"number {number} is {ours}, not {theirs}"
            continue
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            return (
                f"number {number} is {ours.dtype}{list(ours.shape)}, not {theirs.dtype}{list(theirs.shape)}"
            )
        ours, theirs = ours.detach(), theirs.detach()
        error = float((ours - theirs).masked_fill(ours == theirs, 0).abs().max()) if ours.numel() else 0.0
        if not error <= tolerance * size:
            return f"number {number} is off by {error:.3g}"
    return None
