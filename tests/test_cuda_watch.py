"""`headwise.watch` on a CUDA device, and on vision Transformers that are installed only there.

PYTHONPATH=src:tests python tests/test_cuda_watch.py
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw
from model_families import FAMILIES, Family, is_since
from on_gpu import run_all

try:
    import pytest

    pytestmark = pytest.mark.skipif(
        not torch.cuda.is_available(), reason="by design: these need a CUDA device, which CI has not"
    )
except ImportError:  # a bare GPU machine
    pass

os.environ.setdefault("HF_HUB_OFFLINE", "1")
NAMES = ("entropy", "distance", "first", "previous")  # a kernel is compiled for each kind of mask: no more
SECONDS = 110  # for families, the core ones first


def on_gpu(x: Any) -> Any:
    return x.cuda() if isinstance(x, Tensor) else x


def watched(model: nn.Module, inputs: dict[str, Any]) -> hw.Heads:
    torch.manual_seed(0)
    with torch.no_grad(), hw.watch(model, statistics=NAMES, pooled=None) as heads:
        model(**inputs)
    return heads


def test_families_say_on_a_gpu_what_they_say_in_float64_on_a_cpu() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    wrong, count, start = [], 0, time.monotonic()
    for family in sorted(FAMILIES, key=lambda one: not one.core):
        if family.route != "hook" or family.finest is not torch.float64 or time.monotonic() - start > SECONDS:
            continue
        if not is_since(family.since):
            continue
        if family.name == "vit-mae":  # draws which patches it hides, on each device others
            continue
        if family.name in ("deepseek v3.2", "glm-moe-dsa", "hy v4"):  # a rounding picks other keys
            continue
        side = "left" if "left" in family.sides else family.sides[-1]
        found = complaint(family, side)
        count += 1
        if found is not None:
            wrong.append(f"{family} {side}: {found}")
    print(f"   transformers {transformers.__version__}: {count} cases, {len(wrong)} wrong")
    assert not wrong, "\n".join(wrong)


def complaint(family: Family, side: str) -> str | None:
    """What is wrong with a family, in words."""
    try:
        model = family.build(torch.float64)
    except Exception as raised:  # a family this version has otherwise or not at all
        return None if isinstance(raised, AttributeError) else f"cannot be built: {raised!r:.200}"
    try:
        exact = watched(model, family.feed(side, torch.float64))
        model = model.float().cuda()
        heads = watched(model, {name: on_gpu(x) for name, x in family.feed(side).items()})
    except Exception as raised:
        return f"{raised!r:.300}"
    if heads.paths != exact.paths:
        return f"layers {heads.paths} instead of {exact.paths}"
    for path in exact.paths:
        for name in NAMES:
            one, other = heads[path].statistics[name], exact[path].statistics[name]
            far = ((one - other).abs() / (1 + other.abs())).nan_to_num().max()
            if far > 2e-3 or not torch.equal(one.isnan(), other.isnan()):
                return f"{path} {name}: {one.tolist()} instead of {other.tolist()}"
    return None


def test_low_precision_is_near_the_truth() -> None:
    family = next(one for one in FAMILIES if one.name == "llama")
    for side in family.sides:
        exact = watched(family.build(torch.float64), family.feed(side, torch.float64))
        inputs = {name: on_gpu(x) for name, x in family.feed(side).items()}
        heads = watched(family.build(torch.bfloat16).cuda(), inputs)
        for path in exact.paths:
            far = (heads[path].statistics.entropy - exact[path].statistics.entropy).abs().max()
            assert far < 0.05, (side, path, far)


def test_generation_is_the_same_with_every_cache() -> None:
    import transformers

    family = next(one for one in FAMILIES if one.name == "llama")
    torch.manual_seed(0)
    model = family.build()
    whole: Any = transformers.LlamaForCausalLM(model.config).cuda().eval()
    ids = torch.randint(3, 61, (2, 11), device="cuda")
    for cache in ("dynamic", "static"):
        asked = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
        asked["disable_compile"] = True
        before = whole.generate(ids, **asked)
        with hw.watch(whole, statistics=NAMES, pooled=None) as heads:
            inside = whole.generate(ids, **asked)
        assert torch.equal(before, inside), cache
        sizes = [call.shape[2:] for call in heads[0].calls]
        assert sizes[:3] == [(11, 11), (1, 12), (1, 13)], sizes


def test_timms_vision_transformers() -> None:
    import timm

    for kind in ("vit_tiny_patch16", "deit3_small_patch16", "eva02_tiny_patch14", "beit_base_patch16"):
        name = f"{kind}_224"
        torch.manual_seed(0)
        model = timm.create_model(name, num_classes=0).cuda().eval()
        image = torch.randn(2, 3, 224, 224, device="cuda")
        flags = [m.fused_attn for m in model.modules() if hasattr(m, "fused_attn")]
        with torch.no_grad():
            before = model(image)
            for fused in (True, False):
                for m in model.modules():
                    if hasattr(m, "fused_attn"):
                        m.fused_attn = fused
                with hw.watch(model, statistics=NAMES, pooled=None) as heads:
                    inside = model(image)
                assert len(heads) == len(model.blocks), name
                assert all(m.fused_attn is fused for m in model.modules() if hasattr(m, "fused_attn"))
                assert (inside - before).abs().max() < 1e-3 * before.abs().max(), name
        assert flags
        layer = heads[0]
        sums = layer.map.dense().sum(-1)
        assert torch.allclose(sums, torch.ones_like(sums), atol=1e-4)
    block = timm.create_model("vit_tiny_patch16_224", num_classes=0).cuda().eval().blocks[0].attn
    x = torch.randn(2, 197, 192, device="cuda")
    with torch.no_grad(), hw.watch(block, statistics=NAMES, pooled=None) as heads:
        block(x)
    B, T, _ = x.shape
    q, k, _ = block.qkv(x).reshape(B, T, 3, block.num_heads, -1).permute(2, 0, 3, 1, 4).double().unbind(0)
    expected = torch.softmax(q @ k.mT * block.scale, -1)
    assert (heads[0].map.dense().double() - expected).abs().max() < 1e-4


def test_torchvisions_vision_transformer() -> None:
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.vit_b_16(weights=None).cuda().eval()
    image = torch.randn(2, 3, 224, 224, device="cuda")
    with torch.no_grad():
        before = model(image)
        with hw.watch(model, statistics=NAMES, pooled=None) as heads:
            inside = model(image)
        assert len(heads) == 12 and heads[0].num_heads == 12
        assert (inside - before).abs().max() < 1e-3 * before.abs().max().clamp(min=1)
        assert torch.equal(model(image), before)
    swin = torchvision.models.swin_t(weights=None).cuda().eval()
    message = ""
    try:
        with torch.no_grad(), hw.watch(swin):
            swin(image)
    except hw.errors.AttentionBypassed as error:  # it computes its own weights, window by window
        message = str(error)
    assert "ShiftedWindowAttention" in message and "fallback='eager'" in message
    with torch.no_grad(), hw.watch(swin, fallback="eager") as heads:
        swin(image)
    assert len(heads) == 12


def test_a_model_spread_over_cpu_and_gpu() -> None:
    import accelerate

    family = next(one for one in FAMILIES if one.name == "llama")
    exact = watched(family.build(), family.feed("left"))
    placed = {"embed_tokens": "cpu", "rotary_emb": "cpu", "layers.0": "cpu", "layers.1": 0, "norm": 0}
    model = accelerate.dispatch_model(family.build(), placed)
    heads = watched(model, family.feed("left"))
    for path in exact.paths:
        assert (heads[path].statistics.entropy - exact[path].statistics.entropy).abs().max() < 1e-4


def test_a_monitor_with_alarms_says_on_a_gpu_what_it_says_on_a_cpu() -> None:
    torch.manual_seed(0)
    layer = hw.MultiHeadAttention(30, 5, num_kv_heads=1)
    x, bias = torch.randn(2, 67, 30), torch.zeros(2, 1, 67, 67)
    bias[1, ..., 41:] = torch.finfo(torch.float32).min
    for options in ({}, {"mask": hw.Mask.causal()}, {"mask": hw.Mask.padding([31, 67])}, {"bias": bias}):
        numbers = []
        for device in ("cpu", "cuda"):
            monitor = hw.Monitor(layer.to(device), alarms=hw.Alarms())
            with monitor.step():
                layer(x.to(device), **{name: value.to(device) for name, value in options.items()})
            numbers.append(monitor.latest)
        assert numbers[0].keys() == numbers[1].keys() and "layers/0/entropy_share" in numbers[0]
        assert all(abs(value - numbers[1][name]) < 1e-3 for name, value in numbers[0].items())


TESTS: tuple[Callable[[], None], ...] = (
    test_torchvisions_vision_transformer,
    test_timms_vision_transformers,
    test_generation_is_the_same_with_every_cache,
    test_a_model_spread_over_cpu_and_gpu,
    test_a_monitor_with_alarms_says_on_a_gpu_what_it_says_on_a_cpu,
    test_low_precision_is_near_the_truth,
    test_families_say_on_a_gpu_what_they_say_in_float64_on_a_cpu,
)

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(run_all(TESTS))
