"""`MultiheadAttention`: torch's class with the same arguments, results and errors, implemented faster.

`forward` tries in this order: torch's own forward for what is not ours; torch's own operator for small
self-attention without gradients (`native`); one step of autograd for plain calls (`in_one_step`); and head by
head (`attend`) between the projections of a `TorchCall` for all others.

Letters are torch's: N batch, L query_len, S key_len, E embed_dim, H num_heads.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention

from ... import budget
from ...arguments import answering, device_type
from ...engines.kernels import MOST_CHANNELS, Kernel
from ...engines.scores import HAS_MKL
from ...errors import ArgumentError
from ...mask_rules import can_read, is_traced
from ..module_call import fx_node
from ..one_step import Parameters, Step, joined, kernel_for, run, weights_of_step
from ..packed_weights import (
    OUT_PROJ,
    PLAIN_TYPES,
    is_plain_call,
    is_unobserved,
    is_untouched,
    parameters_of,
)
from .torch_arguments import as_hidden, check_masks
from .torch_call import FEW, TorchCall, attend, check_budget

TORCHS = nn.MultiheadAttention  # kept here in case torch.nn is patched later
Kind = TypeVar("Kind", bound=nn.Module)

# Limits of torch's own operator. Without MKL a fused kernel takes less time from the first token on; masked
# weights of our own up to a tenth less while there are 128 tokens, and as much more at 256.
# Weights that are returned and masked, or with a float mask: above, the operator's softmax is too slow.
SOME = 2**14 if HAS_MKL else 2**19
# Weights that are neither returned nor masked: here the operator is as fast as a fused kernel.
MORE = 2**18 if HAS_MKL else 0
NEAR = 2**23  # weights, 32 MiB: all of them stay in the last cache, and a mean of them costs no more
ON_A_GPU = 2**26  # weights that are returned or masked: above, our kernels are faster
SQUARE, PADDING, BOTH = 0, 1, 2  # the operator's numbers for [L, L], [N, L], [N, H, L, L]

# Limits of one step, in weights. On a GPU up to MATRIX_ON_A_GPU take less time than the steps around a second
# pass, up to MATRIX than those around a mask that adds numbers. On a CPU, without gradients, tiles are better
# beyond MATRIX_WITHOUT_GRADIENTS, and for outputs a mask that was read beyond READ.
MATRIX, MATRIX_ON_A_GPU = 2**22, 2**26
MATRIX_WITHOUT_GRADIENTS, READ, TINY = 2**20, 2**17, 2**14
SERVES = ("cuda",)  # devices that wait for Python: torch's own function has the least overhead


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention`: its arguments, its masks (True = may *not* attend), its results; faster.

    A subclass of it with the same parameters, state dict and initial weights. Unlike torch's class it gives
    the same results in training and evaluation. It calls `out_proj` as a module, so hooks on it run, and it
    can be replaced. It recognises a causal mask by its content. It averages large weights over heads without
    storing those of every head. Its output is always contiguous; with batch_first torch's is a transposed
    view, except in its fast path.

    Args:
        empty_rows: the result of a query that may attend to no key. "nan": as in torch, NaN if weights are
            requested. "zero": output and weights 0, gradients finite.

    Raises:
        ValueError, AssertionError, RuntimeError: as torch's class does.

    Example:
        >>> ours = MultiheadAttention(64, 4, batch_first=True)
        >>> x = torch.randn(2, 10, 64)
        >>> causal = nn.Transformer.generate_square_subsequent_mask(10)
        >>> output, weights = ours(x, x, x, attn_mask=causal)
        >>> output.shape, weights.shape                       # averaged over heads, as in torch
        (torch.Size([2, 10, 64]), torch.Size([2, 10, 10]))
        >>> isinstance(ours, nn.MultiheadAttention)
        True
    """

    empty_rows = "nan"

    @answering({})  # with torch's exceptions: a TypeError
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        empty_rows: str = "nan",
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device,
            dtype,
        )  # fmt: skip
        if empty_rows not in ("nan", "zero"):
            raise ArgumentError(f"empty_rows must be 'nan' or 'zero': got {empty_rows!r}; torch uses 'nan'")
        if empty_rows != "nan":
            self.empty_rows = empty_rows

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output, weights or None), with torch's arguments.

        Args:
            query: [N, L, E] with batch_first, else [L, N, E]; or [L, E].
            key, value: as query, with S in place of L, of width kdim and vdim.
            key_padding_mask: [N, S] or [S]; bool, True = may not be attended to; or floats that are added to
                the scores.
            need_weights: False returns None in place of the weights.
            attn_mask: [L, S] or [N * H, L, S]; bool, True = may not attend; or floats that are added to the
                scores.
            average_attn_weights: weights [N, L, S] instead of [N, H, L, S].
            is_causal: a hint that attn_mask is causal. On a CPU the mask is read and the hint ignored, if the
                mask has the right shape. Otherwise, if no weights are requested and there is no padding mask,
                the hint is used and the mask is not read, as in torch.
        """
        arguments = (
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal,
        )  # fmt: skip
        if not _is_ours(self, query, key, value, key_padding_mask, attn_mask):
            node: tuple[Tensor, Tensor | None] | None = fx_node(self, *arguments)
            if node is not None:
                return node
            if is_untouched(self.out_proj, OUT_PROJ):
                return super().forward(*arguments)
            joint, weights = TORCHS.forward(changing_nothing(self), *arguments)
            return self.out_proj(joint), weights  # torch would take its weight and not call it
        if query is key and key is value and (attn_mask is not None or not is_causal):
            masks = key_padding_mask, attn_mask
            result = native(self, query, *masks, need_weights, average_attn_weights, is_causal)
            if result is not None:
                return result
        call, zero = TorchCall(self, *arguments), self.empty_rows == "zero"
        result = in_one_step(call, zero)
        if result is not None:
            return result
        q, k, v = call.heads()
        rules = call.rules(q.shape[2], k.shape[2])
        return call.finish(*attend(q, k, v, rules, call.dropout, need_weights, average_attn_weights, zero))

    def __prepare_scriptable__(self) -> nn.MultiheadAttention:
        """Return what `torch.jit.script` compiles: torch's own class, on the same parameters."""
        if not is_untouched(self.out_proj, OUT_PROJ):
            raise ArgumentError(
                "out_proj must be torch's own layer without hooks to be scripted: got "
                f"{type(self.out_proj).__name__}; torch's class reads its weight and does not call it, so "
                "merge all changes into the weight first"
            )
        return scriptable(self, TORCHS)


def _is_ours(module: nn.MultiheadAttention, *tensors: Tensor | None) -> bool:
    """Return True if these are ordinary tensors: not nested, traced or of a subclass, which torch handles."""
    last: Tensor | None = None
    for x in tensors:  # before the parameters, which torch.fx would record
        if x is not None and x is not last and (type(x) not in PLAIN_TYPES or x.is_nested):
            return False
        last = x
    weight = module.in_proj_weight if module._qkv_same_embed_dim else module.q_proj_weight
    for x in (weight, module.in_proj_bias):
        if x is not None and (type(x) not in PLAIN_TYPES or x.is_nested):
            return False
    # a transform that is traced (torch.func.linearize) is ours: torch's kernels have no forward derivative
    return not is_traced() or forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def scriptable(module: nn.Module, kind: type[Kind]) -> Kind:
    """Return torch's own class on the same parts, with its own dict of them: scripting replaces children."""
    twin = kind.__new__(kind)
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_modules"] = dict(module._modules)
    return twin


def changing_nothing(module: nn.MultiheadAttention) -> nn.MultiheadAttention:
    """Return the same attention with an `out_proj` that returns its input, for torch's forward to read."""
    like = module.in_proj_weight if module.in_proj_weight is not None else module.q_proj_weight
    weight = torch.eye(module.embed_dim, dtype=like.dtype, device=like.device)
    last = SimpleNamespace(weight=weight, bias=torch.zeros_like(weight[0]))
    twin = object.__new__(type(module))  # the same class: if parametrised, it reads its weights there
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_modules"] = {**module._modules, "out_proj": last}
    return twin


def native(
    module: MultiheadAttention,
    x: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    need_weights: bool,
    average: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor | None] | None:
    """Compute self-attention by one operator of torch: (output, weights). None: not a call for it.

    It computes all weights, and is used where they are few: at a few tokens the products take less time than
    the steps between them, and the operator does all of them in C++. A call takes 0.64 to 0.79 of its time on
    an H200, 0.89 on a CPU. Calls that the operator gets wrong are excluded: rows that see nothing (on a GPU,
    where masks are not read, its output for them is replaced), odd numbers of heads, odd widths of heads in
    half precision. It takes the weight of `out_proj` without calling it, so `out_proj` must have no hooks.
    """
    fields: dict[str, Any] = module.__dict__  # past nn.Module.__getattr__, which is slow
    masks, masked = (key_padding_mask, attn_mask), key_padding_mask is not None or attn_mask is not None
    if is_causal and not need_weights and key_padding_mask is None and x.is_cuda:
        return None  # on a GPU the hint is trusted, and a kernel skips what it hides
    if not _is_plain(fields, x) or not _is_small(fields, x, masks, need_weights, average):
        return None
    parameters = _parameters_like(module, x)
    if parameters is None:
        return None
    (N, L, E), H = x.shape, fields["num_heads"]
    mask, kind = None, None
    if masked:
        if x.is_cuda and need_weights and module.empty_rows == "zero":
            return None
        mask, kind = (_unread if x.is_cuda else _for_operator)(*masks, N, L, H)
        if mask is None or mask.device != x.device:
            return None
    if need_weights:
        check_budget((N, L, L) if average else (N, H, L, L), x)
    in_weight, in_bias, out_weight, out_bias = parameters
    output, weights = torch._native_multi_head_attention(
        x, x, x, E, H, in_weight, in_bias, out_weight, out_bias, mask, need_weights, average, kind
    )
    if mask is not None and x.is_cuda and not need_weights:
        # NaN of queries that see nothing: their heads are 0, as in every call without weights
        nothing = (mask[:, 0] if kind == BOTH else mask).all(-1, keepdim=True)  # [N, 1], [L, 1] or [N, L, 1]
        output = torch.where(nothing.unsqueeze(2) if kind == PADDING else nothing, out_bias, output)
    return output, weights


def _is_plain(fields: dict[str, Any], x: Tensor) -> bool:
    """Return True if a module of this __dict__ and its input are what the operator takes."""
    if not fields["batch_first"] or not fields["_qkv_same_embed_dim"] or fields["add_zero_attn"]:
        return False
    if x.dim() != 3 or fields["num_heads"] % 2 or (fields["training"] and fields["dropout"]):
        return False
    if x.shape[2] != fields["embed_dim"] or not x.numel() or not is_unobserved(x):
        return False
    return bool(torch.backends.mha.get_fastpath_enabled())


def _is_small(
    fields: dict[str, Any],
    x: Tensor,
    masks: tuple[Tensor | None, Tensor | None],
    need_weights: bool,
    average: bool,
) -> bool:
    """Return True if the operator, which computes all weights, takes less time than a kernel."""
    masked = masks[0] is not None or masks[1] is not None
    count = x.shape[0] * x.shape[1] ** 2 * fields["num_heads"]
    if x.is_cuda:
        many = count > ON_A_GPU or not budget.surely_fits(0)
        return not (fields["head_dim"] % 8 or ((masked or need_weights) and many))
    if not x.is_cpu:
        return False
    if not masked:
        if need_weights and not average:
            return True  # there is nothing to gain
        return bool(count <= (NEAR if need_weights else MORE))
    if need_weights:
        return bool(count <= SOME)
    if not HAS_MKL:  # whatever a bool mask holds: reading it takes as long as it saves
        return bool(masks[1] is not None and masks[1].dtype == torch.bool and count <= 2 * FEW)
    return bool(count <= (FEW if _is_bool(*masks) else SOME))


def _parameters_like(module: MultiheadAttention, x: Tensor) -> list[Tensor] | None:
    """Return weights and biases of both projections; None if one is missing, learns, or differs from x."""
    out_proj = module.__dict__["_modules"]["out_proj"]
    if module.bias_k is not None or module.bias_v is not None or not is_untouched(out_proj, OUT_PROJ):
        return None
    mine = parameters_of(module, "in_proj_weight", "in_proj_bias")
    theirs = parameters_of(out_proj, "weight", "bias")
    learns = torch.is_grad_enabled()
    if mine is None or theirs is None or (learns and x.requires_grad):
        return None
    parameters: list[Tensor] = []
    for parameter in (*mine, *theirs):
        if parameter is None or parameter.dtype is not x.dtype or parameter.device != x.device:
            return None
        if learns and parameter.requires_grad:
            return None
        parameters.append(parameter)
    return parameters if tuple(parameters[2].shape) == (x.shape[2], x.shape[2]) else None


def _is_bool(*masks: Tensor | None) -> bool:
    return all(mask is None or mask.dtype == torch.bool for mask in masks)


def _for_operator(
    padding: Tensor | None, attn_mask: Tensor | None, N: int, L: int, H: int
) -> tuple[Tensor | None, int]:
    """Return (the mask for the operator, its number for that kind); None: the operator does not take it."""
    if padding is not None:
        if attn_mask is not None and attn_mask.dtype != padding.dtype:
            return None, 0  # torch's class warns of that
        padding = as_hidden(padding)
        if padding is None or not leaves_some(padding, N, L):
            return None, 0
    if attn_mask is None:
        return padding, PADDING
    if tuple(attn_mask.shape) != (L, L) or not can_read(attn_mask):
        return None, 0
    attn_mask = as_hidden(attn_mask)
    if attn_mask is None:
        return None, 0
    mask = attn_mask if padding is None else attn_mask | padding[:, None, None]  # [L, L] or [N, 1, L, L]
    if bool(mask.all(-1).any()):
        return None, 0
    return (mask, SQUARE) if padding is None else (mask.expand(N, H, L, L), BOTH)


def _unread(
    padding: Tensor | None, attn_mask: Tensor | None, N: int, L: int, H: int
) -> tuple[Tensor | None, int]:
    """Return the same as `_for_operator` for masks on a GPU, which are not read."""
    if not _is_bool(padding, attn_mask) or (padding is not None and tuple(padding.shape) != (N, L)):
        return None, 0
    if attn_mask is None:
        return padding, PADDING
    if tuple(attn_mask.shape) != (L, L) or (padding is not None and padding.device != attn_mask.device):
        return None, 0
    if padding is None:
        return attn_mask, SQUARE
    return (attn_mask | padding.view(N, 1, 1, L)).expand(N, H, L, L), BOTH


def leaves_some(padding: Tensor, N: int, L: int) -> bool:
    """Return True if every sequence has a key that is not padding."""
    if padding.dtype != torch.bool or not padding.is_cpu or tuple(padding.shape) != (N, L):
        return False
    return not bool(padding.all(1).any())


def in_one_step(call: TorchCall, zero: bool) -> tuple[Tensor, Tensor | None] | None:
    """Compute the call in one step of autograd: (output, weights). None: not a call for it.

    In training a call takes 0.79 to 0.90 of its time on an H200, 0.82 to 0.99 on a CPU.

    Args:
        zero: a query that sees nothing gets 0; else, as in torch, NaN where weights are wanted.
    """
    x, memory, wants = call.query, call.key, call.need_weights
    if not call.batched or call.dropout or not _will_project(call):
        return None
    module, first = call.module, call.first
    N, L, S = x.shape[first], x.shape[1 - first], memory.shape[1 - first]
    H, D = module.num_heads, module.head_dim
    few = N * H * L * S
    if not _is_worth_it(call, few):
        return None
    call.appended = check_masks(call, (N, H, L, D), (memory.shape[first], H, S, D))
    if call.appended or not x.numel() or not memory.numel() or not is_plain_call(x):
        return None
    if wants and not budget.surely_fits(0):  # a budget is set, so weights must be checked
        return None
    parameters = _parameters_of(call)
    if parameters is None:
        return None
    nothing = torch.nan if wants and not zero else 0.0
    masks = _as_they_are(call)
    if masks is not None and wants and few <= (MATRIX_ON_A_GPU if x.is_cuda else MATRIX):
        return _by_matrix(call, parameters, masks, nothing)
    if masks is not None and not wants:
        most = 2 * MATRIX_ON_A_GPU if torch.is_grad_enabled() else MATRIX_ON_A_GPU  # beyond, our kernels
        as_torch = _is_served(call) and not zero and _is_masked(call) and few <= most
        if as_torch or (few <= MATRIX and _adds_numbers(call, few)):
            if as_torch or not torch.is_grad_enabled():
                return _by_torchs_kernel(call, parameters, masks, False), None
            return _by_matrix(call, parameters, masks, nothing)
    return _by_kernel(call, parameters, L, S, nothing)


def _parameters_of(call: TorchCall) -> Parameters | None:
    """Return the parameters of both projections, without the last's if it must be called; None: not plain.

    Where weights are returned, out_proj stays outside the node. If the loss depends on the weights alone, a
    hook on the output must not run, and out_proj.weight may have been written to.
    """
    module, x = call.module, call.query
    out_proj: Any = module.__dict__["_modules"]["out_proj"]
    joins = not (call.need_weights and torch.is_grad_enabled()) and is_untouched(out_proj, OUT_PROJ)
    out_weight, out_bias = (parameters_of(out_proj, "weight", "bias") if joins else None) or (None, None)
    # in_proj_weight is not always a parameter: it may be pruned, parametrised, a replica's
    parameters = Parameters(module.in_proj_weight, module.in_proj_bias, out_weight, out_bias)
    for parameter in parameters[:4]:
        if parameter is not None and (
            type(parameter) not in PLAIN_TYPES
            or parameter.dtype is not x.dtype
            or parameter.device != x.device
        ):
            return None
    return parameters


def _by_matrix(
    call: TorchCall, parameters: Parameters, masks: tuple[Tensor, ...], nothing: float
) -> tuple[Tensor, Tensor | None]:
    """Compute the call by the matrix of weights, with torch's masks as they are."""
    step = _step_of(call, False, nothing, None, call.need_weights)
    y, _, weights, _ = run(call.query, _memory_of(call), parameters, masks, step)
    if not call.need_weights:
        return _finished(call, parameters, y), None
    return _finished(call, parameters, y), weights.mean(1) if call.average else weights


def _by_kernel(
    call: TorchCall, parameters: Parameters, L: int, S: int, nothing: float
) -> tuple[Tensor, Tensor | None] | None:
    """Compute a call by a fused kernel; None if masks hide more than padding and later keys, or none fits."""
    rules, memory = call.rules(L, S), _memory_of(call)
    if rules.hidden is not None or rules.bias is not None:
        return None
    square = L == S or not rules.causal
    if _is_served(call) and rules.padding is None and square and not torch.is_grad_enabled():
        return _by_torchs_kernel(call, parameters, (), rules.causal), None
    kernel = kernel_for(call.query, memory, call.module.num_heads, call.first, rules.causal, rules.padding)
    if kernel is None:
        return None
    step = _step_of(call, rules.causal, nothing, kernel)
    y, projected, lse, added = run(call.query, memory, parameters, rules.padding, step)
    weights = weights_of_step(projected, lse, added, step, call.average) if call.need_weights else None
    return _finished(call, parameters, y), weights


def _step_of(
    call: TorchCall, causal: bool, nothing: float, kernel: Kernel | None, returns_weights: bool = True
) -> Step:
    H, D = call.module.num_heads, call.module.head_dim
    return Step(H, H, D, call.first, causal, nothing, kernel, D**-0.5, returns_weights)


def _memory_of(call: TorchCall) -> Tensor | None:
    """Return what the query attends to; None: itself."""
    return None if call.key is call.query else call.key


def _finished(call: TorchCall, parameters: Parameters, y: Tensor) -> Tensor:
    """Return the output; out_proj is called if it was not part of the step."""
    output: Tensor = call.module.out_proj(y) if parameters.out_weight is None else y
    return output


def _is_served(call: TorchCall) -> bool:
    """Return True if the device waits for Python and torch's function needs no matrix of all weights."""
    return (
        device_type(call.query) in SERVES and not call.need_weights and call.module.head_dim <= MOST_CHANNELS
    )


def _is_worth_it(call: TorchCall, few: int) -> bool:
    """Return True unless `attend` is faster for this many weights, as on a CPU."""
    if call.query.is_cuda or not call.need_weights:
        return True
    return few <= (MATRIX if torch.is_grad_enabled() else MATRIX_WITHOUT_GRADIENTS)


def _is_masked(call: TorchCall) -> bool:
    """Return True if there is a mask to apply; a causal hint without padding takes its place."""
    if call.key_padding_mask is None:
        return call.attn_mask is not None and not call.is_causal
    return True


def _adds_numbers(call: TorchCall, few: int) -> bool:
    """Return True if masks are best added as they are: they add numbers, or are tiny. For outputs alone."""
    if call.is_causal and call.key_padding_mask is None and (call.attn_mask is None or not call.query.is_cpu):
        return False  # the hint decides
    if call.query.is_cpu:
        if torch.is_grad_enabled():
            return few <= TINY
        if few > READ:
            return False
    for mask in (call.attn_mask, call.key_padding_mask):
        if mask is not None and mask.dtype != torch.bool:
            return True
    return False


def _by_torchs_kernel(
    call: TorchCall, parameters: Parameters, masks: tuple[Tensor, ...], causal: bool
) -> Tensor:
    """Return the output by torch's function, with any masks; gradients are torch's own."""
    step = _step_of(call, causal, 0.0, None)
    q, k, v = step.heads(parameters.project(call.query, _memory_of(call)))
    added: Tensor | None = None
    if masks and all(mask.dtype == torch.bool for mask in masks):
        added = ~(masks[0] if len(masks) == 1 else masks[0] | masks[1])  # seen, as torch's function has it
    else:
        for mask in masks:
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, -torch.inf)
            added = mask if added is None else added + mask
        added = None if added is None else added.to(q.dtype)
    if added is not None:
        added = added.expand(*added.shape[:-2], q.shape[2], k.shape[2])
    heads = scaled_dot_product_attention(q, k, v, added, is_causal=causal)
    return _finished(call, parameters, parameters.finish(joined(heads, call.first)))


def _as_they_are(call: TorchCall) -> tuple[Tensor, ...] | None:
    """Return torch's masks like [N, H, L, S]; None if one of them learns."""
    masks = []
    if call.attn_mask is not None:
        flat = call.attn_mask.dim() == 2
        masks.append(call.attn_mask if flat else call.attn_mask.unflatten(0, (-1, call.module.num_heads)))
    if call.key_padding_mask is not None:
        masks.append(call.key_padding_mask[:, None, None])
    for mask in masks:
        if mask.requires_grad:
            return None
    return tuple(masks)


def _will_project(call: TorchCall) -> bool:
    """Return True if at most two projections are needed and none will raise; masks may be checked before."""
    weight, E = call.module.in_proj_weight, call.module.embed_dim
    return (
        call.key is call.value
        and call.module._qkv_same_embed_dim
        and weight is not None
        and tuple(weight.shape) == (3 * E, E)
        and _meets(call.query, weight)
        and (call.query is call.key or _meets(call.key, weight))
    )


def _meets(x: Tensor, weight: Tensor) -> bool:
    return x.shape[-1] == weight.shape[1] and x.dtype is weight.dtype and x.device == weight.device
