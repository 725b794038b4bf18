"""`headwise.watch` on a CUDA device, and on vision Transformers that are installed only there.

`make test` runs a few of the cases, `make test-gpu` all of them.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from model_families import FAMILIES
from on_gpu import NEEDS_CUDA, few_are_quick, judged

pytestmark = [NEEDS_CUDA, pytest.mark.usefixtures("_small_models")]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
NAMES = ("entropy", "distance", "first", "previous")  # a kernel is compiled for each kind of mask: no more
# vit-mae draws which patches it hides, on each device others; in the other three a rounding picks other keys
DRAWN_ANEW = ("vit-mae", "deepseek v3.2", "glm-moe-dsa", "hy v4")
EXACT = {
    family.name: family
    for family in FAMILIES
    if family.route == "hook" and family.finest is torch.float64 and family.name not in DRAWN_ANEW
}


def on_gpu(x: Any) -> Any:
    return x.cuda() if isinstance(x, Tensor) else x


def watched(model: nn.Module, inputs: dict[str, Any]) -> hw.Heads:
    torch.manual_seed(0)
    with torch.no_grad(), hw.watch(model, statistics=NAMES, pooled=None) as heads:
        model(**inputs)
    return heads


@few_are_quick("llama", "bert")
@pytest.mark.parametrize("name", EXACT)
def test_families_say_on_a_gpu_what_they_say_in_float64_on_a_cpu(
    name: str, request: pytest.FixtureRequest
) -> None:
    family = EXACT[name]
    side = "left" if "left" in family.sides else family.sides[-1]
    model = family.build(torch.float64)
    exact = watched(model, family.feed(side, torch.float64))
    heads = watched(model.float().cuda(), {key: on_gpu(x) for key, x in family.feed(side).items()})
    assert heads.paths == exact.paths
    for path in exact.paths:
        for key in NAMES:
            actual, expected = heads[path].statistics[key], exact[path].statistics[key]
            far = ((actual - expected).abs() / (1 + expected.abs())).nan_to_num().max()
            assert far <= 2e-3, (path, key, actual, expected)
            assert torch.equal(actual.isnan(), expected.isnan()), (path, key)
    judged(request, "families watched")


def test_low_precision_is_near_the_truth() -> None:
    family = next(member for member in FAMILIES if member.name == "llama")
    for side in family.sides:
        exact = watched(family.build(torch.float64), family.feed(side, torch.float64))
        inputs = {name: on_gpu(x) for name, x in family.feed(side).items()}
        heads = watched(family.build(torch.bfloat16).cuda(), inputs)
        for path in exact.paths:
            far = (heads[path].statistics.entropy - exact[path].statistics.entropy).abs().max()
            assert far < 0.05, (side, path, far)


def test_generation_is_the_same_with_every_cache() -> None:
    import transformers

    family = next(member for member in FAMILIES if member.name == "llama")
    torch.manual_seed(0)
    model = family.build()
    whole: Any = transformers.LlamaForCausalLM(model.config).cuda().eval()
    ids = torch.randint(3, 61, (2, 11), device="cuda")
    for cache in ("dynamic", "static"):
        options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
        options["disable_compile"] = True
        before = whole.generate(ids, **options)
        with hw.watch(whole, statistics=NAMES, pooled=None) as heads:
            inside = whole.generate(ids, **options)
        assert torch.equal(before, inside), cache
        sizes = [call.shape[2:] for call in heads[0].calls]
        assert sizes[:3] == [(11, 11), (1, 12), (1, 13)], sizes


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_timms_vision_transformers() -> None:
    timm = pytest.importorskip("timm", reason="by design: only here, where it does not bring CUDA along")
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


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_torchvisions_vision_transformer() -> None:
    torchvision = pytest.importorskip("torchvision", reason="by design: a CPU has no build of it here")
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

    family = next(member for member in FAMILIES if member.name == "llama")
    exact = watched(family.build(), family.feed("left"))
    placed = {"embed_tokens": "cpu", "rotary_emb": "cpu", "layers.0": "cpu", "layers.1": 0, "norm": 0}
    model = accelerate.dispatch_model(family.build(), placed)
    heads = watched(model, family.feed("left"))
    for path in exact.paths:
        assert (heads[path].statistics.entropy - exact[path].statistics.entropy).abs().max() < 1e-4


@pytest.mark.gpu
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
