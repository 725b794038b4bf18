"""Hugging Face's masks read back as rules, against the dense tensors transformers makes of the same calls."""

from __future__ import annotations

import copy
import os
import pickle
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from headwise import Mask, budget
from headwise.errors import BudgetExceeded
from headwise.listeners.adapters.huggingface_masks import CompactMask, compact_mask, rules_of

os.environ.setdefault("HF_HUB_OFFLINE", "1")
utils: Any = None  # transformers.masking_utils, imported once a test runs: that takes seconds

BATCH = 2
LEFT = torch.tensor([2, 0])  # padding before the text, a sequence


@pytest.fixture(autouse=True, scope="module")
def _masks_of_transformers() -> None:
    global utils
    utils = pytest.importorskip("transformers.masking_utils")


def padding(side: str, length: int) -> Tensor | None:
    """bool [B, length]: three places of the first sequence are padding."""
    if side == "none":
        return None
    mask = torch.ones(BATCH, length, dtype=torch.bool)
    mask[0, :3] = side != "left"
    mask[0, length - 3 :] = side != "right"
    return mask


def packed(length: int) -> Tensor:
    """Documents of three tokens, as found in position_ids that start again."""
    positions = (torch.arange(length) % 3).expand(BATCH, -1)
    actual = utils.find_packed_sequence_indices(positions)
    assert actual is not None
    return actual


PREDICATES: dict[str, Any] = {
    "causal": lambda S: utils.causal_mask_function,
    "bidirectional": lambda S: utils.bidirectional_mask_function,
    "window": lambda S: utils.sliding_window_causal_mask_function(4),
    "window of one": lambda S: utils.sliding_window_causal_mask_function(1),
    "band": lambda S: utils.sliding_window_bidirectional_mask_function(2),
    "chunks": lambda S: utils.chunked_causal_mask_function(4, LEFT),
    "packed": lambda S: utils.and_masks(
        utils.causal_mask_function, utils.packed_sequence_mask_function(packed(S))
    ),
    "packed windows": lambda S: utils.and_masks(
        utils.sliding_window_causal_mask_function(2), utils.packed_sequence_mask_function(packed(S))
    ),
    "padded by a function": lambda S: utils.and_masks(
        utils.causal_mask_function, utils.padding_mask_function(torch.arange(S).expand(BATCH, -1) > 1)
    ),
}


def both(T: int, S: int, predicate: Any, mask: Tensor | None, **offsets: int) -> tuple[Tensor, CompactMask]:
    """(what transformers makes, what we keep) of one call."""
    call = {
        "batch_size": BATCH,
        "q_length": T,
        "kv_length": S,
        "mask_function": predicate,
        "attention_mask": mask,
    }
    never = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    standing = compact_mask(utils.sdpa_mask, **call, **offsets, **never)
    return utils.sdpa_mask(**call, **offsets, **never), standing.compact


def same(rules: Mask, bias: Tensor | None, used: int, dense: Tensor) -> None:
    """The rules allow what the dense mask does; what is cut off is hidden from everyone."""
    B, _, T, S = dense.shape
    assert bias is None
    assert torch.equal(rules.full(T, used, B).expand(B, 1, T, used), dense[..., :used])
    assert not dense[..., used:].any()


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("kind", list(PREDICATES))
def test_whole_texts(kind: str, side: str) -> None:
    dense, compact = both(11, 11, PREDICATES[kind](11), padding(side, 11))
    assert compact.rules is not None
    assert compact.rules.allowed is None, "nothing quadratic"
    rules, bias, used = rules_of(compact, 11, 11, itself=True)
    same(rules, bias, used, dense)
    assert used == 11
    counted = rules.counted(11)
    expected = padding(side, 11)
    if expected is not None:
        assert counted is not None and torch.equal(counted, expected)
    else:
        assert counted is None
    assert torch.equal(compact.dense, dense)


@pytest.mark.parametrize("kind", ["causal", "window", "chunks"])
def test_keys_of_a_sliding_cache_start_later(kind: str) -> None:
    dense, compact = both(1, 4, PREDICATES[kind](16), padding("left", 12), q_offset=11, kv_offset=8)
    same(*rules_of(compact, 1, 4, itself=True), dense)
    dense, compact = both(3, 6, PREDICATES[kind](16), padding("left", 12), q_offset=9, kv_offset=6)
    same(*rules_of(compact, 3, 6, itself=True), dense)


def test_a_tensor_as_offset() -> None:
    dense, compact = both(1, 16, utils.causal_mask_function, padding("left", 8), q_offset=torch.tensor(7))  # type: ignore[arg-type]
    rules, bias, used = rules_of(compact, 1, 16, itself=True)
    same(rules, bias, used, dense)
    assert used == 8


def test_a_mask_read_late_is_the_one_that_was_asked_for() -> None:
    """A static cache handed over its own count of tokens and went on counting: DeepSeek V3.2, which reads its
    mask after that, saw a token too many, and answered otherwise while it was watched."""
    count, real, documents = torch.tensor([7]), padding("left", 11), packed(11)
    assert real is not None
    predicate = utils.or_masks(
        utils.and_masks(utils.causal_mask_function, utils.packed_sequence_mask_function(documents)), is_even
    )
    dense, compact = both(3, 11, predicate, real, q_offset=count)  # type: ignore[arg-type]
    count += 3
    documents.zero_()
    real.logical_not_()
    assert compact.rules is None and torch.equal(compact.dense, dense)
    dense, compact = both(3, 11, utils.causal_mask_function, real, q_offset=count - 3)  # type: ignore[arg-type]
    real.logical_not_()
    same(*rules_of(compact, 3, 11, itself=True), dense)


def is_even(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (query + key) % 2 == 0


@pytest.mark.parametrize("join", ["and_masks", "or_masks"])
def test_a_predicate_nobody_knows_is_made_dense(join: str) -> None:
    predicate = getattr(utils, join)(utils.causal_mask_function, is_even)
    dense, compact = both(11, 11, predicate, padding("right", 11))
    assert compact.rules is None
    same(*rules_of(compact, 11, 11, itself=True), dense)


def test_a_dense_mask_must_fit_the_budget() -> None:
    _, compact = both(64, 64, is_even, None)
    with budget.limit("1 KiB"), pytest.raises(BudgetExceeded, match="dense mask"):
        rules_of(compact, 64, 64, itself=True)
    _, expected = both(64, 64, utils.causal_mask_function, padding("left", 64))
    with budget.limit("1 KiB"):
        rules_of(expected, 64, 64, itself=True)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float64])
def test_masks_that_users_give(dtype: torch.dtype) -> None:
    dense, _ = both(11, 11, utils.causal_mask_function, padding("left", 11))
    arguments = dense if dtype == torch.bool else torch.zeros(dense.shape, dtype=dtype).masked_fill(
        ~dense, torch.finfo(dtype).min
    )  # fmt: skip
    rules, bias, used = rules_of(arguments, 11, 11, itself=True)
    same(rules, bias, used, dense)
    counted, expected = rules.counted(11), padding("left", 11)
    assert counted is not None and expected is not None and torch.equal(counted, expected)


def test_what_users_add_besides_hiding_is_a_bias() -> None:
    arguments = torch.randn(BATCH, 1, 5, 7)
    arguments[..., 6] = torch.finfo(torch.float32).min
    rules, bias, _ = rules_of(arguments, 5, 7, itself=False)
    assert bias is not None and torch.equal(bias[..., :6], arguments[..., :6])
    assert not rules.full(5, 7, BATCH)[..., 6].any()


CALL: dict[str, Any] = {"batch_size": BATCH, "q_length": 5, "kv_length": 5, "allow_is_causal_skip": False}


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_a_mask_unread_is_a_tensor_to_a_model(name: str) -> None:
    """Models ask whether a mask is a tensor, and of which dtype; it was none, and they went another way."""
    own = getattr(utils, f"{name}_mask")
    call = CALL | {"attention_mask": padding("right", 5), "dtype": torch.float64}
    dense, mask = own(**call), compact_mask(own, **call)
    assert isinstance(mask, Tensor) and mask.shape == dense.shape and mask.ndim == 4
    assert (mask.dtype, mask.device) == (dense.dtype, dense.device)
    assert mask.to("cpu") is mask and mask.to(device="cpu", dtype=dense.dtype) is mask
    assert mask.contiguous() is mask and mask.numbers is None, "nothing was made so far"
    assert torch.equal(mask[:, :, 2], dense[:, :, 2])
    assert torch.equal(torch.cat([mask, mask], -1), torch.cat([dense, dense], -1))
    assert torch.equal(mask == dense, dense == dense) and torch.equal(mask.to(torch.int64), dense.long())
    assert type(copy.deepcopy(mask)) is type(pickle.loads(pickle.dumps(mask))) is Tensor
    assert mask.meaning is mask.compact, "it was read, and is as it was"


@pytest.mark.parametrize("inference", [False, True])
def test_a_mask_that_a_model_writes_to_means_what_it_says_now(inference: bool) -> None:
    """What a model wrote into its mask was lost, for the rules it was made of had no part in that."""
    with torch.inference_mode(inference):
        dense, mask = utils.eager_mask(**CALL), compact_mask(utils.eager_mask, **CALL)
        for each in (dense, mask):
            each[:, :, :, 0] = torch.finfo(torch.float32).min
        rules, _, _ = rules_of(mask.meaning, 5, 5, itself=False)
    assert torch.equal(rules.full(5, 5, BATCH).expand(BATCH, 1, 5, 5), dense == 0)


def test_no_mask_where_transformers_makes_none() -> None:
    """What a model does without a mask is its own matter: PaliGemma then hides what is ahead, else not."""
    plain = {**CALL, "mask_function": utils.causal_mask_function, "allow_is_causal_skip": True}
    every = torch.ones(BATCH, 5, dtype=torch.bool)
    for call in (plain, plain | {"attention_mask": every}, plain | {"attention_mask": padding("left", 5)}):
        assert (compact_mask(utils.sdpa_mask, **call) is None) == (utils.sdpa_mask(**call) is None)
    assert compact_mask(utils.sdpa_mask, **plain) is None
    assert compact_mask(utils.eager_mask, **plain) is not None


def test_a_mask_function_of_somebody_else_is_left_alone() -> None:
    def own(**call: Any) -> Any:
        return call

    assert compact_mask(own, **CALL) == CALL


@settings(max_examples=60)
@given(
    st.sampled_from(list(PREDICATES)),
    st.sampled_from(["none", "left", "right"]),
    st.integers(1, 9),
    st.integers(0, 9),
    st.integers(0, 5),
)
@example("band", "none", 5, 0, 3)  # its queries see keys behind them: no places to cut off
def test_any_call(kind: str, side: str, T: int, before: int, empty: int) -> None:
    """T queries after `before` tokens, in a cache with `empty` places behind them."""
    filled = max(before + T, 4)
    S = filled + empty
    dense, compact = both(T, S, PREDICATES[kind](S), padding(side, filled), q_offset=filled - T)
    rules, bias, used = rules_of(compact, T, S, itself=True)
    same(rules, bias, used, dense)
    if compact.is_causal:
        assert used == filled
    real = padding(side, filled)
    if rules.queries is not None:
        assert real is not None and torch.equal(rules.queries, real[:, filled - T :])
