"""`adopt` and `restore`: torch's attention in a model becomes ours, in place, and back again.

Only the class of a module changes: parameters, hooks, training state and all that refers to the module stay.
Other tools change classes, too: `torch.nn.utils.parametrize` and `fully_shard` put a class of their own, made
at run time, over the existing one. `restore` replaces the class below theirs.

torch's Transformer encoder and its layer are replaced, too. torch's layer turns every mask into a new float
tensor, which later modules cannot recognise, and in evaluation it skips `self_attn` for a native
operator that builds all weights as soon as there is a mask. Our two classes change nothing else: they stand
in for torch's while a model is adopted.

torch's native layer skips the modules of a layer. It is used only if no other code can notice
(`_is_unmodified`); else each part is called as a module, and layers that are not ours get the arguments that
torch passes in training.

Letters: N batch, L length, E width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypedDict, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import transformer as torchs
from torch.nn.utils.parametrize import is_parametrized

from ...engines.plain import transforms_are_active
from ...errors import ArgumentError
from ..module_call import fx_node
from ..packed_weights import OUT_PROJ, PLAIN_TYPES, is_unobserved, is_untouched, parameters_of
from .module import MultiheadAttention, leaves_some, scriptable
from .torch_arguments import check_kinds, content_of
from .torch_call import FEW

TORCHS_LAYER, TORCHS_ENCODER = nn.TransformerEncoderLayer, nn.TransformerEncoder


class LayerArguments(TypedDict):
    """The arguments of a layer, without its input."""

    src_mask: Tensor | None
    src_key_padding_mask: Tensor | None
    is_causal: bool


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer` that calls its `self_attn` whenever there is a mask."""

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Compute the layer, with torch's arguments."""
        if type(src) not in PLAIN_TYPES or src.is_nested:
            node: Tensor | None = fx_node(self, src, src_mask, src_key_padding_mask, is_causal)
            if node is not None:
                return node
            if _is_unmodified(self):
                return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        elif src_mask is None and not is_causal:
            result = _natively(self, src, src_key_padding_mask)
            if result is not None:
                return result
        check_kinds({"src_key_padding_mask": src_key_padding_mask, "src_mask": src_mask})
        if _differ(src_mask, src_key_padding_mask):
            src_mask, src_key_padding_mask = _as_additive(src, src_mask, src_key_padding_mask)
        elif not isinstance(self.self_attn, MultiheadAttention):
            src_mask, src_key_padding_mask = (_added(mask, src) for mask in (src_mask, src_key_padding_mask))
        masks = src_mask, src_key_padding_mask
        if self.norm_first:
            x = src + self._sa_block(self.norm1(src), *masks, is_causal=is_causal)
            return x + self._ff_block(self.norm2(x))
        x = self.norm1(src + self._sa_block(src, *masks, is_causal=is_causal))
        return self.norm2(x + self._ff_block(x))

    def __prepare_scriptable__(self) -> nn.TransformerEncoderLayer:
        return scriptable(self, TORCHS_LAYER)


class TransformerEncoder(nn.TransformerEncoder):
    """`torch.nn.TransformerEncoder` that hands masks on as they came."""

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Compute the encoder, with torch's arguments."""
        ours = [isinstance(layer, TransformerEncoderLayer) for layer in self.layers]
        if type(src) not in PLAIN_TYPES or src.is_nested or not any(ours):
            node: Tensor | None = fx_node(self, src, mask, src_key_padding_mask, is_causal)
            return super().forward(src, mask, src_key_padding_mask, is_causal) if node is None else node
        check_kinds({"src_key_padding_mask": src_key_padding_mask, "mask": mask})
        if _differ(mask, src_key_padding_mask):
            mask, src_key_padding_mask = _as_additive(src, mask, src_key_padding_mask)
        causal, x = is_causal, src
        if causal is None:
            content = None if mask is None else content_of(mask)
            causal = content is not None and content.causal and self._fits(src, mask)
        arguments = LayerArguments(src_mask=mask, src_key_padding_mask=src_key_padding_mask, is_causal=causal)
        theirs = arguments if all(ours) else self._as_torch_asks(src, mask, src_key_padding_mask, is_causal)
        for layer, is_ours in zip(self.layers, ours, strict=True):
            x = layer(x, **(arguments if is_ours else theirs))
        padding = src_key_padding_mask
        nests = mask is None and not is_causal and getattr(self, "use_nested_tensor", False)
        if padding is not None and writes_zero_at_padding(self, src, padding, nests):
            x = x.masked_fill(padding.unsqueeze(-1), 0)
        return x if self.norm is None else self.norm(x)

    def _as_torch_asks(
        self, src: Tensor, mask: Tensor | None, padding: Tensor | None, is_causal: bool | None
    ) -> LayerArguments:
        """Return the arguments that torch's encoder passes to its layers."""
        mask, padding = _added(mask, src), _added(padding, src)
        causal = torchs._detect_is_causal_mask(mask, is_causal, self._length(src))
        return LayerArguments(src_mask=mask, src_key_padding_mask=padding, is_causal=causal)

    def _length(self, src: Tensor) -> int | None:
        first = next(layer for layer in self.layers if isinstance(layer, TransformerEncoderLayer))
        return torchs._get_seq_len(src, first.self_attn.batch_first)

    def _fits(self, src: Tensor, mask: Tensor | None) -> bool:
        """Return True if the mask has this length. A mask of another length is refused later."""
        length = self._length(src)
        return mask is not None and tuple(mask.shape) == (length, length)

    def __prepare_scriptable__(self) -> nn.TransformerEncoder:
        return scriptable(self, TORCHS_ENCODER)


def writes_zero_at_padding(module: nn.TransformerEncoder, src: Tensor, padding: Tensor, nests: bool) -> bool:
    """Return True if an encoder's output is 0 at padding, before its last norm.

    Torch's is, in evaluation, where it goes on with a nested tensor of the real tokens; `nests` is its
    `use_nested_tensor`. Ours is, too, on a CPU, unless its last norm is no LayerNorm over channels alone. On
    a GPU this would have to wait for what the mask holds, and padding keeps what was computed there.
    """
    if not nests or not torch.backends.mha.get_fastpath_enabled():
        return False
    ours = isinstance(module, TransformerEncoder) and any(
        isinstance(layer, TransformerEncoderLayer) for layer in module.layers
    )
    if ours and (not src.is_cpu or padding.dtype != torch.bool or transforms_are_active()):
        return False
    norm = module.norm
    if (
        ours
        and norm is not None
        and not (is_untouched(norm, *LAYER_NORM) and norm.normalized_shape == (src.shape[-1],))
    ):
        return False
    first = module.layers[0]
    if first.training or src.dim() != 3 or src.is_nested or not src.numel() or torch.is_autocast_enabled():
        return False
    if type(src) not in PLAIN_TYPES or src.device.type not in ("cpu", "cuda", "xpu"):
        return False
    if tuple(padding.shape) != tuple(src.shape[:2]) or padding.dtype not in (torch.bool, src.dtype):
        return False
    if torch.is_grad_enabled() and (src.requires_grad or any(p.requires_grad for p in first.parameters())):
        return False
    if not getattr(module, "mask_check", True):
        return True
    if torch.compiler.is_compiling():
        return False
    return bool(torch._nested_tensor_from_mask_left_aligned(src, padding.logical_not()))


def _is_unmodified(layer: nn.Module) -> TypeGuard[TransformerEncoderLayer]:
    """Return True if a layer of ours has torch's own parts, none of them hooked or changed."""
    if not is_untouched(layer, *LAYER) or not layer.__dict__.keys().isdisjoint(BLOCKS):
        return False
    if any(getattr(TORCHS_LAYER, name) is not original for name, original in BLOCKS.items()):
        return False
    parts: dict[str, nn.Module] = layer.__dict__["_modules"]
    if not all(is_untouched(parts.get(name), *original) for name, original in PARTS.items()):
        return False
    attend = parts["self_attn"]
    return is_untouched(attend.__dict__["_modules"].get("out_proj"), OUT_PROJ) and bool(_activation(layer))


def _activation(layer: nn.Module) -> int:
    """Return torch's number of the activation, 1 (ReLU) or 2 (GELU); 0 if unknown or inconsistent."""
    act: object = layer.activation
    kind = 0
    if act is functional.relu or is_untouched(act, *RELU):
        kind = 1
    elif act is functional.gelu or (
        isinstance(act, nn.GELU) and is_untouched(act, *GELU) and act.approximate == "none"
    ):
        kind = 2
    return kind if getattr(layer, "activation_relu_or_gelu", 0) == kind else 0


def _is_at_rest(layer: TransformerEncoderLayer) -> bool:
    """Return True if no dropout is active in the layer or in one of its parts."""
    attend = layer.self_attn
    return not (layer.training or (attend.training and attend.dropout)) and not any(
        part.training and part.p for part in (layer.dropout, layer.dropout1, layer.dropout2)
    )


def _has_plain_attention(layer: TransformerEncoderLayer, E: int) -> bool:
    """Return True if nothing is appended to the keys, and all widths are E."""
    attend, norms = layer.self_attn, (layer.norm1, layer.norm2)
    return (
        attend.batch_first
        and attend._qkv_same_embed_dim
        and attend.embed_dim == E
        and not attend.add_zero_attn
        and attend.bias_k is None
        and attend.bias_v is None
        and all(norm.normalized_shape == (E,) for norm in norms)
    )


def _natively(layer: TransformerEncoderLayer, src: Tensor, padding: Tensor | None) -> Tensor | None:
    """Compute the layer by torch's native operator, without a mask or for a few tokens on a CPU.

    Return None if other steps are faster, if results would differ, or if other code could notice. A layer
    takes 0.83 to 0.88 of its time on an H200, 0.94 on a CPU.
    """
    if layer.training or not is_unobserved(src) or src.dim() != 3 or not src.numel():
        return None
    N, L, E = src.shape
    if not torch.backends.mha.get_fastpath_enabled() or not _is_unmodified(layer):
        return None
    if not _is_at_rest(layer) or not _has_plain_attention(layer, E):
        return None
    attend, H = layer.self_attn, layer.self_attn.num_heads
    if H % 2 or layer.norm1.eps != layer.norm2.eps:
        return None
    if padding is not None and not (src.is_cpu and N * L * L * H <= FEW and leaves_some(padding, N, L)):
        return None
    if not src.is_cpu and attend.head_dim % 8:
        return None
    parameters = parameters_of(attend, "in_proj_weight", "in_proj_bias") or []
    for part in (attend.out_proj, layer.norm1, layer.norm2, layer.linear1, layer.linear2):
        parameters += parameters_of(part, "weight", "bias") or []
    tensors = [t for t in parameters if t is not None]
    if len(tensors) < 12 or any(t.dtype is not src.dtype or t.device != src.device for t in tensors):
        return None
    if torch.is_grad_enabled() and any(t.requires_grad for t in (src, *tensors)):
        return None
    inner = layer.linear1.weight.shape[0]
    shapes = [tuple(t.shape) for t in tensors[::2]]
    if shapes != [(3 * E, E), (E, E), (E,), (E,), (inner, E), (E, inner)]:
        return None
    layer_options = _activation(layer) == 2, layer.norm_first, layer.norm1.eps
    rest: Any = *tensors[:4], *layer_options, *tensors[4:], padding, None if padding is None else 1
    return torch._transformer_encoder_layer_fwd(src, E, H, *rest)


def _differ(mask: Tensor | None, padding: Tensor | None) -> bool:
    """Return True if there are masks of two dtypes. The outermost module warns; its parts get one dtype."""
    return mask is not None and padding is not None and mask.dtype != padding.dtype


def _as_additive(src: Tensor, *masks: Tensor | None) -> Iterator[Tensor | None]:
    """Yield masks as numbers to be added, in the dtype of src."""
    for mask in masks:
        added = _added(mask, src)
        yield None if added is None else added.to(src.dtype)


def _added(mask: Tensor | None, src: Tensor) -> Tensor | None:
    """Return a mask as numbers to be added, as torch passes it on."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=src.dtype).masked_fill_(mask, -torch.inf)


def _class_and_forward(kind: type[nn.Module]) -> tuple[type[nn.Module], Callable[..., object]]:
    return kind, kind.forward


LAYER, LAYER_NORM, RELU, GELU = map(
    _class_and_forward, (TransformerEncoderLayer, nn.LayerNorm, nn.ReLU, nn.GELU)
)
PARTS = {
    "self_attn": _class_and_forward(MultiheadAttention),
    **dict.fromkeys(("linear1", "linear2"), _class_and_forward(nn.Linear)),
    **dict.fromkeys(("norm1", "norm2"), LAYER_NORM),
    **dict.fromkeys(("dropout", "dropout1", "dropout2"), _class_and_forward(nn.Dropout)),
}
BLOCKS = {name: getattr(TORCHS_LAYER, name) for name in ("_sa_block", "_ff_block")}


# Modules that change their class


OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.MultiheadAttention: MultiheadAttention,
    nn.TransformerEncoderLayer: TransformerEncoderLayer,
    nn.TransformerEncoder: TransformerEncoder,
}
THEIRS: dict[type[nn.Module], type[nn.Module]] = {ours: theirs for theirs, ours in OURS.items()}
MARK = "_adopted_by_headwise"  # only what was adopted is restored


@dataclass(frozen=True)
class Adopted:
    """What `adopt` changed, what it left alone, and why; print it."""

    changed: dict[str, str] = field(default_factory=dict)  # name in the model -> torch's class
    left: dict[str, str] = field(default_factory=dict)  # name in the model -> why

    def __str__(self) -> str:
        if not self.changed and not self.left:
            return "Nothing to adopt: there is no torch.nn.MultiheadAttention in this model."
        lines = [f"Adopted {_count(len(self.changed), 'module')}."]
        lines += [f"  {name or 'the model itself'}: {kind}" for name, kind in self.changed.items()]
        if self.left:
            lines.append(f"Left {_count(len(self.left), 'module')} as they were.")
            lines += [f"  {name or 'the model itself'}: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)


def adopt(model: nn.Module) -> Adopted:
    """Replace every `torch.nn.MultiheadAttention` in a model by ours, in place: the same results, faster.

    `torch.nn.TransformerEncoder` and its layers are replaced as well, as their fast path would not call our
    attention. Subclasses of torch's class that other code defines are not replaced, nor are modules that are
    already parametrised or sharded: call adopt first. In training, results are the same, except that the same
    seed may drop other numbers (our output is contiguous, torch's is transposed, and dropout draws in memory
    order). In eval mode, results are those of torch's regular code, even where its fast path differs.
    `torch.ao.quantization.prepare` recognises only torch's own class: call `restore` before it.

    Returns:
        What was changed, what was left, and why.

    Example:
        >>> import torch, headwise as hw
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, num_layers=1)
        >>> print(hw.adopt(model))
        Adopted 3 modules.
          the model itself: TransformerEncoder
          layers.0: TransformerEncoderLayer
          layers.0.self_attn: MultiheadAttention
        >>> hw.restore(model)
        3
    """
    _check_model(model)
    report = Adopted()
    for name, module in model.named_modules():
        kind = type(module)
        if kind in OURS:
            if "forward" in module.__dict__:
                report.left[name] = "it has a forward of its own"
                continue
            module.__class__ = OURS[kind]
            module.__dict__[MARK] = True
            report.changed[name] = kind.__name__
        elif issubclass(kind, tuple(OURS)) and not issubclass(kind, tuple(THEIRS)):
            report.left[name] = _why_not(module)
    return report


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise ArgumentError(f"model must be a torch.nn.Module: got {kind}; pass the model itself")


def _why_not(module: nn.Module) -> str:
    kind = type(module)
    if is_parametrized(module):
        names = ", ".join(module.get_submodule("parametrizations")._modules)
        return f"its {names} is parametrised; call adopt before parametrising"
    if kind.__bases__[0].__module__.startswith("torch.distributed."):
        return f"it is sharded ({kind.__qualname__}); call adopt before sharding"
    return f"{kind.__module__}.{kind.__qualname__} is not torch's class"


def restore(model: nn.Module) -> int:
    """Give every adopted module its own class back; return the number of modules.

    Parametrisations and sharding that were added since `adopt` are kept.

    Raises:
        ArgumentError: after `adopt`, a module was given a class that is built on ours. No module is restored
            then.
    """
    _check_model(model)
    restored: dict[type, type] = {**THEIRS, **{kind: kind for kind in OURS}}
    adopted = []
    for name, module in model.named_modules():
        if MARK in module.__dict__:
            adopted.append((module, _over_torchs(type(module), restored, name)))
    for module, kind in adopted:
        module.__class__ = kind
        del module.__dict__[MARK]
    return len(adopted)


def _over_torchs(kind: type, restored: dict[type, type], name: str) -> type:
    """Return the same class based on torch's instead of ours; `restored` holds the classes made so far."""
    if kind not in restored:
        if not issubclass(kind, tuple(THEIRS)) or any(map(_knows_its_class, vars(kind).values())):
            raise ArgumentError(
                f"model must still have the classes that adopt set: {name or 'the model itself'} is now a "
                f"{kind.__module__}.{kind.__qualname__}; undo the later change of class first"
            )
        bases = tuple(
            _over_torchs(base, restored, name) if issubclass(base, tuple(THEIRS)) else base
            for base in kind.__bases__
        )
        namespace = {
            key: value for key, value in vars(kind).items() if key not in ("__dict__", "__weakref__")
        }
        restored[kind] = type(kind)(kind.__name__, bases, namespace)  # type: ignore[misc]
    return restored[kind]


def _knows_its_class(value: object) -> bool:
    """Return True if this is a method that uses `super()` or `__class__`, and so belongs to one class."""
    for function in (value, getattr(value, "__func__", None), getattr(value, "fget", None)):
        if "__class__" in getattr(getattr(function, "__code__", None), "co_freevars", ()):
            return True
    return False


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
