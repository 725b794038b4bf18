"""`headwise.nn.MultiheadAttention` and `adopt` on a CUDA device: values, no waiting, graphs.

`make test` runs a few of the cases, `make test-gpu` all of them; HEADWISE_SEED=7 draws others.
"""

from __future__ import annotations

import os
import random
import warnings

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from as_torch_cases import difference, draw_case
from headwise.nn.as_torch import torch_arguments
from judge import error, largest
from on_gpu import NEEDS_CUDA, few_are_quick, judged

pytestmark = NEEDS_CUDA

SEED = int(os.environ.get("HEADWISE_SEED", "0"))
DRAWN = 160  # calls a test


@few_are_quick("0")
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
@pytest.mark.parametrize("block", range(14))
def test_drawn_calls_answer_as_torchs_class_does(block: int, request: pytest.FixtureRequest) -> None:
    wrong = []
    for seed in range(SEED * 10**6 + block * DRAWN, SEED * 10**6 + (block + 1) * DRAWN):
        case = draw_case(random.Random(seed).choice, seed)
        try:
            actual = difference(case, torch.device("cuda"))
        except Exception as raised:
            actual = repr(raised)
        if actual is not None:
            wrong.append(f"seed {seed}: {actual}\n  {case}")
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:20])
    judged(request, "drawn calls of torch's class", DRAWN)


def test_low_precision_is_as_exact_as_torchs() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        theirs = nn.MultiheadAttention(96, 4, batch_first=True, device="cuda", dtype=dtype)
        ours = hw.nn.MultiheadAttention(96, 4, batch_first=True, device="cuda", dtype=dtype)
        ours.load_state_dict(theirs.state_dict())
        exact = nn.MultiheadAttention(96, 4, batch_first=True, device="cuda", dtype=torch.float64)
        exact.load_state_dict(theirs.state_dict())
        x = torch.randn(3, 131, 96, device="cuda", dtype=dtype)
        padding = torch.arange(131, device="cuda") >= torch.tensor([[131], [60], [7]], device="cuda")
        hidden = torch.ones(131, 131, dtype=torch.bool, device="cuda").triu(1)
        for masks in ({}, {"key_padding_mask": padding}, {"attn_mask": hidden}):
            for average in (True, False, None):
                options = {
                    "need_weights": average is not None,
                    "average_attn_weights": bool(average),
                    **masks,
                }
                y = x.double()
                for truth, plain, actual in zip(
                    exact(y, y, y, **options),
                    theirs(x, x, x, **options),
                    ours(x, x, x, **options),
                    strict=True,
                ):
                    if truth is not None:
                        allowed = 2 * error(plain, truth) + 8 * torch.finfo(dtype).eps * largest(truth)
                        assert error(actual, truth) <= allowed, (dtype, list(masks), average)


@pytest.mark.gpu
def test_gradients_in_low_precision_are_as_exact_as_torchs() -> None:
    """Weights looked at or not, used in the loss or not; queries that see nothing, with empty_rows="zero"."""
    N, L, E, H = 3, 131, 96, 4
    spots = torch.arange(L, device="cuda")
    right = spots >= torch.tensor([[L], [60], [7]], device="cuda")
    left = spots < torch.tensor([[0], [60], [L]], device="cuda")  # the last sequence is nothing but padding
    hidden = torch.ones(L, L, dtype=torch.bool, device="cuda").triu(1)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        theirs = nn.MultiheadAttention(E, H, batch_first=True, device="cuda", dtype=dtype)
        ours = hw.nn.MultiheadAttention(E, H, batch_first=True, device="cuda", dtype=dtype, empty_rows="zero")
        exact = hw.nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64, empty_rows="zero")
        for module in (ours, exact):
            module.load_state_dict(theirs.state_dict())
        x = torch.randn(N, L, E, device="cuda", dtype=dtype)
        pull = torch.randn(N, L, E, device="cuda", dtype=dtype)
        for masks in (
            {}, {"attn_mask": hidden}, {"key_padding_mask": right},
            {"key_padding_mask": right, "attn_mask": hidden}, {"key_padding_mask": left, "attn_mask": hidden},
        ):  # fmt: skip
            for wanted in (None, "mean", "heads", "mean used", "heads used"):
                sees = masks.get("key_padding_mask") is not left  # else torch's are all NaN
                plain = _gradients(theirs, x, pull, masks, wanted) if sees else None
                truth = _gradients(exact, x.cpu().double(), pull.cpu().double(), masks, wanted)
                actual = _gradients(ours, x, pull, masks, wanted)
                for name, true in truth.items():
                    near = 0.0 if plain is None else error(plain[name].cpu(), true)
                    allowed = 3 * near + 16 * torch.finfo(dtype).eps * largest(true)
                    off = error(actual[name].cpu(), true)
                    assert off <= allowed, (dtype, list(masks), wanted, name, off, allowed)


def _gradients(
    module: nn.MultiheadAttention, x: Tensor, pull: Tensor, masks: dict[str, Tensor], wanted: str | None
) -> dict[str, Tensor]:
    """Of a call on the device and in the dtype of x."""
    x = x.detach().requires_grad_()
    listed = {name: mask.to(x.device) for name, mask in masks.items()}
    kind = {"need_weights": wanted is not None, "average_attn_weights": "mean" in (wanted or "")}
    output, weights = module(x, x, x, **listed, **kind)
    loss = (output * pull).sum()
    if wanted is not None and wanted.endswith("used"):
        loss = loss + weights.square().sum()
    named = {"x": x, **dict(module.named_parameters())}
    return dict(zip(named, torch.autograd.grad(loss, [*named.values()]), strict=True))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_the_steady_state_never_waits_for_the_gpu() -> None:
    attend = hw.nn.MultiheadAttention(64, 4, batch_first=True, device="cuda")
    x = torch.randn(2, 33, 64, device="cuda")
    padding = torch.arange(33, device="cuda") >= torch.tensor([[33], [9]], device="cuda")
    hidden = torch.ones(40, 40, dtype=torch.bool, device="cuda").triu(1)

    def calls() -> None:
        for weights in (False, True):
            for average in (False, True):
                options = {"need_weights": weights, "average_attn_weights": average}
                attend(x, x, x, **options)
                attend(x, x, x, attn_mask=hidden[:33, :33], **options)
                attend(x, x, x, key_padding_mask=padding.clone(), **options)
                out, _ = attend(
                    x, x, x, attn_mask=hidden[:33, :33], key_padding_mask=padding.clone(), **options
                )
                out.sum().backward()

    calls()
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_masks_are_never_read_and_never_remembered() -> None:
    """What was read once of a mask on a GPU was believed until its version changed: `.data` changes none."""
    attend = hw.nn.MultiheadAttention(64, 4, batch_first=True, device="cuda")
    x = torch.randn(2, 33, 64, device="cuda")
    causal = torch.ones(33, 33, dtype=torch.bool, device="cuda").triu(1)
    mask = torch.zeros_like(causal)
    assert torch_arguments.content_of(mask) is None
    for content in (mask.clone(), causal, mask.clone(), causal):
        mask.data.copy_(content)
        fresh = content.clone()
        actual, wanted = (attend(x, x, x, attn_mask=m, need_weights=False)[0] for m in (mask, fresh))
        assert torch.equal(actual, wanted)


def test_a_captured_graph_gives_the_same() -> None:
    attend = hw.nn.MultiheadAttention(64, 4, batch_first=True, device="cuda").eval()
    x = torch.randn(2, 33, 64, device="cuda")
    hidden = torch.ones(33, 33, dtype=torch.bool, device="cuda").triu(1)
    with torch.no_grad():
        wanted = attend(x, x, x, attn_mask=hidden, need_weights=False)[0]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                attend(x, x, x, attn_mask=hidden, need_weights=False)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = attend(x, x, x, attn_mask=hidden, need_weights=False)[0]
        graph.replay()
    assert error(actual, wanted) < 1e-5


def test_adopted_models_say_the_same() -> None:
    torch.manual_seed(SEED)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2).cuda()
    x = torch.randn(3, 17, 64, device="cuda")
    padding = torch.arange(17, device="cuda") >= torch.tensor([[17], [9], [4]], device="cuda")
    hidden = torch.ones(17, 17, dtype=torch.bool, device="cuda").triu(1)
    real = ~padding[..., None]
    both = {"mask": hidden, "src_key_padding_mask": padding}
    for masks in ({}, {"src_key_padding_mask": padding}, {"mask": hidden}, both):
        for training in (False, True):
            model.train(training)
            with torch.set_grad_enabled(training), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                before = model(x, **masks) * real
                hw.adopt(model)
                after = model(x, **masks) * real
                hw.restore(model)
            assert error(after, before) < 2e-3 * largest(before), (list(masks), training)
