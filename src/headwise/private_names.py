"""All private or undocumented names of torch and transformers that headwise uses, and their uses.

Each name is looked up once, those of torch when this module is imported, those of transformers when the first
of its models is watched. If one is missing, the error names it, instead of an AttributeError from deep inside
a call. A test reads the source, and fails for a private name that is used and not listed here.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from functools import cache
from typing import Any

from .errors import VersionUnsupported

TESTED = {"torch": ("2.11", "2.15"), "transformers": ("5.5", "5.22")}  # from, to; `make test-versions`

TORCH = {  # name -> what it is used for
    "torch._C.DisableTorchFunction": "comparing numbers without the modes that record operations",
    "torch._C.DisableTorchFunctionSubclass": "reading a tensor that stands in for a mask",
    "torch._C._TorchDispatchModeKey.FUNCTIONAL": "plain operations while AOTAutograd traces a call",
    "torch._C._TorchDispatchModeKey.PROXY": "plain operations while make_fx records a call",
    "torch._C._are_functorch_transforms_active": "leaving vmap, grad and jvp to plain operations",
    "torch._C._current_graph_task_id": "recording a checkpointed layer once",
    "torch._C._functorch.is_batchedtensor": "refusing to watch inside vmap",
    "torch._C._functorch.is_legacy_batchedtensor": "gradients with is_grads_batched",
    "torch._C._get_cudnn_sdp_enabled": "reading a user's switches in every call",
    "torch._C._get_deterministic_algorithms": "reading a user's switches in every call",
    "torch._C._get_flash_sdp_enabled": "reading a user's switches in every call",
    "torch._C._get_mem_efficient_sdp_enabled": "reading a user's switches in every call",
    "torch._C._get_dispatch_mode": "plain operations while make_fx records a call",
    "torch._C._get_tracing_state": "plain operations while torch.jit.trace records a call",
    "torch._C._is_any_autocast_enabled": "checking in every call that autocast is off",
    "torch._C._len_torch_dispatch_stack": "shortcuts without modes and hooks",
    "torch._C._len_torch_function_stack": "shortcuts without modes and hooks",
    "torch._C._nn._parse_to": "moving a tensor that stands in for a mask",
    "torch._assert_async": "a compiled step past the end of its cache",
    "torch._foreach_copy_": "copies of q and k of watched layers",
    "torch._native_multi_head_attention": "torch's class in one operator",
    "torch._nested_tensor_from_mask_left_aligned": "an encoder that skips padding",
    "torch._subclasses.FakeTensor": "not reading the values of a fake mask",
    "torch._transformer_encoder_layer_fwd": "an encoder's layer in one operator",
    "torch.Tensor._make_wrapper_subclass": "a mask that is made when it is read",
    "torch.Tensor._version": "noticing tensors that were written to after a map was made",
    "torch.autograd.forward_ad._current_level": "leaving forward-mode gradients to plain operations",
    "torch.nn.Module._backward_hooks": "shortcuts without modes and hooks",
    "torch.nn.Module._backward_pre_hooks": "shortcuts without modes and hooks",
    "torch.nn.Module._compiled_call_impl": "running a compiled model as it was written",
    "torch.nn.Module._forward_hooks": "shortcuts without modes and hooks",
    "torch.nn.Module._forward_pre_hooks": "shortcuts without modes and hooks",
    "torch.nn.Module._modules": "a module's submodules, without its `__getattr__`",
    "torch.nn.TransformerEncoderLayer._ff_block": "an adopted layer's second half",
    "torch.nn.TransformerEncoderLayer._sa_block": "an adopted layer's first half",
    "torch.nn.modules.dropout._DropoutNd": "switching dropout off in code under examination",
    "torch.nn.modules.linear.NonDynamicallyQuantizableLinear": "the class of torch's out_proj",
    "torch.nn.modules.module._global_backward_hooks": "shortcuts without modes and hooks",
    "torch.nn.modules.module._global_backward_pre_hooks": "shortcuts without modes and hooks",
    "torch.nn.modules.module._global_forward_hooks": "shortcuts without modes and hooks",
    "torch.nn.modules.module._global_forward_pre_hooks": "shortcuts without modes and hooks",
    "torch.nn.modules.transformer._detect_is_causal_mask": "an adopted encoder's hint",
    "torch.nn.modules.transformer._get_seq_len": "an adopted encoder's hint",
    "torch.ops.aten._efficient_attention_forward": "noticing a kernel that a watched model calls",
    "torch.ops.aten._flash_attention_backward": "the backend flash on CUDA",
    "torch.ops.aten._flash_attention_forward": "the backend flash on CUDA",
    "torch.ops.aten._log_softmax": "noticing a softmax of a watched model",
    "torch.ops.aten._safe_softmax": "noticing a softmax of a watched model",
    "torch.ops.aten._scaled_dot_product_attention_math": "noticing a kernel that a watched model calls",
    "torch.ops.aten._scaled_dot_product_cudnn_attention": "the backend cudnn",
    "torch.ops.aten._scaled_dot_product_cudnn_attention_backward": "the backend cudnn",
    "torch.ops.aten._scaled_dot_product_efficient_attention": "the backend efficient",
    "torch.ops.aten._scaled_dot_product_efficient_attention_backward": "the backend efficient",
    "torch.ops.aten._scaled_dot_product_flash_attention": "the backend flash on CUDA",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "the backend flash on CPUs",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": "the backend flash on CPUs",
    "torch.ops.aten._scaled_dot_product_fused_attention_overrideable": "noticing a kernel of another device",
    "torch.ops.aten._softmax_backward_data": "gradients of a few weights",
    "torch.ops.aten._unsafe_view": "an output of a node that may be written to",
    "torch.utils._pytree.register_pytree_node": "maps through torch.compile and torch.export",
    "torch.utils._pytree.tree_leaves": "the parts of a batch in `fit`",
    "torch.utils._pytree.tree_map": "torch's functions of a map",
}
TRANSFORMERS = {
    "transformers.AttentionInterface.__getitem__": "answering a model's lookup of its attention",
    "transformers.AttentionInterface.get_interface": "answering a model's lookup of its attention",
    "transformers.AttentionMaskInterface.__getitem__": "answering a model's lookup of its mask",
    "transformers.PreTrainedModel._supports_sdpa": "whether a model can run with SDPA",
    "transformers.integrations.sdpa_attention.sdpa_attention_forward": "recognising the attention of a model",
    "transformers.masking_utils.causal_mask_function": "masks as rules",
    "transformers.masking_utils.eager_mask": "masks as rules",
    "transformers.masking_utils.sdpa_mask": "masks as rules",
    "transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS": "recognising layers that look their attention up",
}
# Attributes of objects, not of classes: the tests look them up; here an object would have to be created.
OF_OBJECTS = {
    "torch.nn.MultiheadAttention._qkv_same_embed_dim": "which weights torch's class has",
    "torch._dynamo.OptimizedModule._orig_mod": "running a compiled model as it was written",
    "torch.compile()._torchdynamo_orig_callable": "the forward behind a compiled one",
    "torch.compiler.disable()._torchdynamo_disable": "a function that no compiler traces",
    "torch.compiler.disable()._torchdynamo_disable_msg": "a function that no compiler traces",
    "transformers.PretrainedConfig._attn_implementation_internal": "which attention a model runs",
    "accelerate._old_forward": "the forward behind a device map",
}
# With an alternative where they are missing; looking up some of these takes seconds of imports.
REPLACEABLE = {
    "torch._scaled_dot_product_cudnn_attention": "the backend cudnn, some microseconds sooner",
    "torch._scaled_dot_product_efficient_attention": "the backend efficient, some microseconds sooner",
    "torch._scaled_dot_product_flash_attention": "the backend flash on CUDA, some microseconds sooner",
    "torch._scaled_dot_product_flash_attention_for_cpu": "the backend flash on CPUs, a little sooner",
    "torch._dynamo.mark_static_address": "a compiled step as one graph of kernels",
    "torch._C._dynamo.eval_frame._FrameAction": "a function that no compiler traces",
    "torch._C._dynamo.eval_frame._FrameExecStrategy": "a function that no compiler traces",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": "a function that no compiler traces",
}


def check(names: dict[str, str]) -> None:
    """Check that every name exists.

    Raises:
        VersionUnsupported: one is not; the message says which, what for, and what to install.
    """
    for name, purpose in names.items():
        if not can_reach(name):
            library = name.partition(".")[0]
            oldest, newest = TESTED[library]
            raise VersionUnsupported(
                f"{library} must have {name}, used for {purpose}: version "
                f"{importlib.metadata.version(library)} does not; install a version tested with headwise, "
                f'{oldest} to {newest}, such as pip install "{library}=={newest}.*", or update headwise',
                name=name,
            )


def can_reach(name: str) -> bool:
    """Return True if a dotted name can be reached from its library."""
    root, *parts = name.split(".")
    parent: Any = importlib.import_module(root)
    for at, part in enumerate(parts):
        try:
            parent = getattr(parent, part)
        except AttributeError:
            # an attribute that the class annotates; or a module that has not been imported yet
            if part in getattr(parent, "__annotations__", ()):
                return True
            try:
                parent = importlib.import_module(".".join([root, *parts[: at + 1]]))
            except ImportError:
                return False
    return True


@cache
def check_transformers() -> None:
    """Check the names of transformers, once, when the first of its models is watched.

    Raises:
        VersionUnsupported: as `check`.
    """
    check(TRANSFORMERS)


check(TORCH)
