"""Faults of masks.

The output of a query without visible keys depends on how keys are hidden: NaN (-inf), equal weights (-1e9) or
0 (torch's fused kernels). None of the three is a fault, so each fault that can leave such a query is tried in
all three ways.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..recipe import RIGHT as RIGHT_STEPS
from ..recipe import State
from .fault import Fault, Way

RIGHT = "the scores of hidden keys are set to -inf before the softmax"
REPAIR = 'scores = scores.masked_fill(mask == 0, float("-inf"))  # before the softmax'
FILLS = (r"masked_fill_?\(", r"torch\.where\(", r"attn_mask\s*=", r"\bmask\b")
CAUSAL = (r"\b(tril|triu)_?\(", r"diagonal\s*=", *FILLS)


def _masks(change: Callable[[State, Tensor], Tensor]) -> tuple[Way, ...]:
    """Change the mask, and hide keys by -inf, by -1e9, and with weights of 0 in rows without visible keys."""

    def filled(number: float) -> Callable[[State], None]:
        def hide(state: State) -> None:
            state.hidden = state.scaled
            if state.mask is not None:
                state.hidden = state.scaled.masked_fill(~change(state, state.mask), number)

        return hide

    def zero(state: State) -> None:
        state.p = state.p.nan_to_num(0.0)

    return (
        {"hide": filled(-torch.inf)}, {"hide": filled(-1e9)}, {"hide": filled(-torch.inf), "drop": zero},
    )  # fmt: skip


def filled(number: float) -> Way:
    """Set the scores of hidden keys to this number."""

    def hide(state: State) -> None:
        state.hidden = state.scaled
        if state.mask is not None:
            state.hidden = state.scaled.masked_fill(~state.mask, number)

    return {"hide": hide}


def _before_mixing(state: State) -> None:
    """Hide keys by a large negative number before a matrix mixes the scores of all heads."""
    mixers = [design.tensors["before"] for design, before in state.changes
              if "scaled" in before and "before" in design.tensors]  # fmt: skip
    if not mixers or state.mask is None:
        raise ValueError("no mixing matrix is applied to masked scores")
    raised = torch.where(mixers[0].sum(1) < 0, 1e30, -torch.inf)  # [H]: what was low is high
    state.hidden = torch.where(state.mask, state.scaled, raised[:, None, None].expand_as(state.scaled))


BEFORE_MIXING: Way = {"hide": _before_mixing}


TOO_SMALL = (1e5, 1e4, 1e3, 1e2, 1e1, 5.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 9.0, 15.0, 20.0, 30.0, 50.0)


def _raised(number: float) -> Way:
    def hide(state: State) -> None:
        state.hidden = state.scaled
        if state.mask is not None:
            state.hidden = state.scaled + ~state.mask * number

    return {"hide": hide}


def _without_padding_queries(state: State, mask: Tensor) -> Tensor:
    """Hide all keys from the queries at positions whose key is hidden from all queries."""
    if mask.shape[-1] != mask.shape[-2]:
        raise ValueError("queries and keys differ in number")
    return mask & mask.any(-2).unsqueeze(-1)


def _nan_scores(state: State) -> None:
    state.hidden = state.scaled
    if state.mask is not None:
        state.hidden = state.scaled.masked_fill(~state.mask, -torch.inf).masked_fill(state.mask, torch.nan)


def _without_mask(state: State) -> None:
    state.hidden = state.scaled


def _added(hides: bool) -> Way:
    def hide(state: State) -> None:
        state.hidden = state.scaled
        if state.mask is not None:
            state.hidden = state.scaled + (~state.mask if hides else state.mask).to(state.scaled.dtype)

    return {"hide": hide}


def _masked_weights(state: State) -> None:
    if state.mask is not None:
        state.p = state.p * state.mask


def _filled_after(number: float) -> Way:
    """Fill the weights of hidden keys, instead of their scores."""

    def drop(state: State) -> None:
        if state.mask is not None:
            state.p = state.p.masked_fill(~state.mask, number)

    return {"hide": _without_mask, "drop": drop}


def _inverted(state: State) -> None:
    """Invert the mask in the first step, so that a second fault of the mask can follow."""
    RIGHT_STEPS["inputs"](state)
    if state.inputs.mask is not None:
        state.inputs = state.inputs._replace(mask=~state.inputs.mask)


def _redrawn_causal(diagonal: int, upper: bool = False) -> Callable[[State, Tensor], Tensor]:
    """Replace the causal part of a mask and keep its padding; other masks are not changed."""

    def change(state: State, mask: Tensor) -> Tensor:
        T, S = mask.shape[-2:]
        whole = torch.ones(T, S, dtype=torch.bool)
        padding = mask[..., -1:, :]  # what the last query sees: all that is no padding
        if T != S or T < 3 or not torch.equal(mask, whole.tril() & padding):
            return mask
        return (whole.triu(diagonal) if upper else whole.tril(diagonal)) & padding

    return change


def _wrong_order(state: State, mask: Tensor) -> Tensor:
    B, H = mask.shape[0], state.num_heads
    return mask[:, 0].repeat(H, 1, 1).view(B, H, *mask.shape[-2:])  # [B, H, T, S], sample by sample


def _heads_first(state: State, mask: Tensor) -> Tensor:
    """Repeat the masks as for [B * H, T, S] where the scores are [H * B, T, S]."""
    B, H = mask.shape[0], state.num_heads
    return mask[:, 0].repeat_interleave(H, 0).unflatten(0, (H, B)).transpose(0, 1)  # [B, H, T, S]


def _either_allows(state: State, mask: Tensor) -> Tensor:
    """Make a key visible if the causal mask or the mask argument allows it."""
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    if state.inputs.handed is not None:
        return state.inputs.handed[:, None] | causal
    padding = mask[..., -1:, :]
    both = mask.shape[-1] == mask.shape[-2] and torch.equal(mask, causal & padding)
    return causal | padding if both and not bool(padding.all()) else mask


def _argument_only(state: State, mask: Tensor) -> Tensor:
    """Use the mask argument only, without the mask that the code creates."""
    if state.inputs.handed is None:
        return mask
    return state.inputs.handed[:, None]


def _one_of_two(causal: bool) -> Callable[[State, Tensor], Tensor]:
    """Keep only the causal or the padding part of a mask that has both; other masks are not changed."""

    def change(state: State, mask: Tensor) -> Tensor:
        whole = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
        padding = mask[..., -1:, :]
        if mask.shape[-1] != mask.shape[-2] or not torch.equal(mask, whole & padding):
            return mask
        if bool(padding.all()):
            return mask
        return whole.expand_as(mask) if causal else padding.expand_as(mask)

    return change


def _first_head(state: State, mask: Tensor) -> Tensor:
    others = torch.arange(state.num_heads)[:, None, None] > 0  # [H, 1, 1]
    return mask | others


def _transposed(state: State, mask: Tensor) -> Tensor:
    if mask.shape[-1] != mask.shape[-2]:
        raise ValueError("a transposed mask needs as many queries as keys")
    return mask.transpose(-2, -1)


FAULTS = [
    Fault(
        "mask ignored",
        "the mask has no effect",
        "softmax(q k^T / sqrt(d_k)) v over all keys",
        RIGHT,
        (
            "Change a token that should be hidden. Does the output change?",
            "Hidden keys get the same weights as without a mask.",
            "Fill the scores of hidden keys with -inf, and assign the result: masked_fill does not "
            "change its input.",
        ),
        "A causal model is trained with access to later tokens: its training loss is very low, but it "
        "cannot generate text.",
        REPAIR,
        "hide",
        ({"hide": _without_mask},),
        (r"^\s*\w+\.masked_fill\(", *FILLS, r"def forward\("),
        needs_mask=True,
        common=True,
    ),
    Fault(
        "mask inverted",
        "the mask is inverted: the keys that should be visible are hidden",
        "the scores of visible keys are set to -inf",
        RIGHT,
        (
            "Does True (or 1) in your mask mean visible or hidden? What does the line that uses it assume?",
            "Only the hidden keys get weight.",
            "Invert the condition: fill the scores where attention is not allowed.",
        ),
        "Both meanings are in use: in torch, a True in the mask hides a key in nn.MultiheadAttention "
        "and makes it visible in scaled_dot_product_attention.",
        REPAIR,
        "hide",
        (*_masks(lambda state, mask: ~mask), {"inputs": _inverted}),
        (r"masked_fill_?\(", r"attn_mask\s*=", r"torch\.where\("),
        needs_mask=True,
        common=True,
    ),
    Fault(
        "mask after softmax",
        "weights are masked after the softmax, so they do not sum to 1",
        "softmax(scores).masked_fill(hidden, 0) v",
        RIGHT,
        (
            "Sum the weights of a query that has hidden keys.",
            "The weight of the hidden keys is removed, but not given to the other keys.",
            "Set the scores of hidden keys to -inf before the softmax.",
        ),
        "The output is too small where keys are hidden: if only one of ten keys is visible, it gets about a "
        "tenth of the weight instead of all of it.",
        REPAIR,
        "drop",
        (
            {"hide": _without_mask, "drop": _masked_weights},
            {**filled(0.0), "drop": _masked_weights},
            _filled_after(-torch.inf),
            _filled_after(-1e9),
        ),
        (r"(weights?|attn\w*|probs?|scores?|a|w|p)\s*\*=?\s*\(?~?\w*mask", r"masked_fill_?\(", *FILLS),
        needs_mask=True,
        common=True,
    ),
    Fault(
        "fill with zero",
        "the scores of hidden keys are set to 0 instead of -inf",
        "softmax(scores with 0 where hidden) v",
        RIGHT,
        (
            "Look at the number that is used for hidden keys.",
            "exp(0) is 1, so a key with a score of 0 gets weight.",
            "Use -inf. A fill of 1e-9 is practically 0, and multiplying by the mask gives 0, too.",
        ),
        "Hidden keys still get weight, often more than visible keys.",
        REPAIR,
        "hide",
        (filled(0.0),),
        (r"masked_fill_?\(.*(,\s*0(\.0)?\s*\)|1e-)", r"\*=?\s*\w*mask", *FILLS),
        needs_mask=True,
        common=True,
    ),
    Fault(
        "causal hides itself",
        "the causal mask hides the query's own position (off by one)",
        "key j is visible where j < i",
        "key j is visible where j <= i",
        (
            "Look at the first row of the causal mask.",
            "All keys are hidden from the first position.",
            "Make the diagonal visible: torch.tril(ones) for visible keys, torch.triu(ones, diagonal=1) "
            "for hidden keys.",
        ),
        "The first position has no visible key (NaN if the fill is -inf), and all others cannot use "
        "their own token.",
        "hidden = torch.triu(torch.ones(T, T, dtype=torch.bool), diagonal=1)",
        "hide",
        _masks(_redrawn_causal(-1)),
        CAUSAL,
        needs_mask=True,
    ),
    Fault(
        "causal shows the next",
        "the causal mask is off by one: a query attends to the next position",
        "key j is visible where j <= i + 1",
        "key j is visible where j <= i",
        (
            "Look at the first row of the causal mask.",
            "Two keys are visible to the first position.",
            "Hide torch.triu(ones, diagonal=1) instead of diagonal=2.",
        ),
        "The model has access to the token it should predict: its training loss is very low, but it "
        "cannot generate text.",
        "hidden = torch.triu(torch.ones(T, T, dtype=torch.bool), diagonal=1)",
        "hide",
        _masks(_redrawn_causal(1)),
        CAUSAL,
        needs_mask=True,
    ),
    Fault(
        "causal flipped",
        "the causal mask is flipped: a query attends to later positions instead of earlier ones",
        "key j is visible where j >= i",
        "key j is visible where j <= i",
        (
            "Which keys are visible: those below or those above the diagonal of the mask?",
            "The last position can attend to itself only, but it should attend to all positions.",
            "Use tril for visible keys and triu for hidden keys.",
        ),
        "The model learns to use later tokens, which do not exist yet when text is generated.",
        "mask = torch.tril(torch.ones(T, T, dtype=torch.bool))  # True = may attend",
        "hide",
        _masks(_redrawn_causal(0, upper=True)),
        CAUSAL,
        needs_mask=True,
    ),
    Fault(
        "causal inverted",
        "the causal mask is inverted: a query attends to later keys only",
        "key j is visible where j > i",
        "key j is visible where j <= i",
        (
            "Does True in your causal mask mean visible or hidden? What does the line that uses it assume?",
            "A query attends to the positions after it, and not to itself.",
            "Invert the condition, or use tril instead of triu.",
        ),
        "The last position has no visible key, and all others can use later tokens only.",
        "scores = scores.masked_fill(torch.triu(ones, diagonal=1), float('-inf'))",
        "hide",
        _masks(_redrawn_causal(1, upper=True)),
        CAUSAL,
        needs_mask=True,
    ),
    Fault(
        "mask added",
        "a mask of 0 and 1 is added to the scores",
        "softmax(scores + mask) v",
        RIGHT,
        (
            "Look at how the mask is combined with the scores.",
            "Adding 0 or 1 to a score does not hide a key.",
            "Add -inf for hidden keys and 0 for visible keys, or use masked_fill.",
        ),
        "All keys stay visible; the mask only changes their weights a little.",
        REPAIR,
        "hide",
        (_added(False), _added(True)),
        (r"\+=?\s*\(?~?\w*mask", *FILLS),
        needs_mask=True,
    ),
    Fault(
        "mask plus 1e9",
        "the scores of hidden keys are set to a large positive number",
        "softmax(scores with a large positive number where hidden) v",
        RIGHT,
        (
            "Look at the sign of the number that is used for hidden keys.",
            "Hidden keys get all the weight.",
            "It must be negative: -inf.",
        ),
        "Queries attend to the hidden keys only.",
        REPAIR,
        "hide",
        (filled(1e9), _raised(1e9), _raised(1e10)),
        (r"masked_fill_?\(.*,\s*(float\(.inf.\)|1e\d+|torch\.inf)", *FILLS),
        needs_mask=True,
    ),
    Fault(
        "fill too small",
        "the fill for hidden keys is not low enough",
        "softmax(scores with a finite number where hidden) v",
        RIGHT,
        (
            "How low can the score of a visible key be?",
            "If visible keys have scores close to the fill or below it, hidden keys get weight.",
            'Use float("-inf"), or torch.finfo(scores.dtype).min.',
        ),
        "It works while scores are small; for large scores hidden keys get weight, without an error.",
        REPAIR,
        "hide",
        (
            *(filled(-number) for number in TOO_SMALL),
            *(_raised(-number) for number in TOO_SMALL if 2 <= number <= 50),  # Swin adds -100
        ),
        (r"masked_fill_?\(.*-\s*(1e[1-5]\b|\d{2,6}\b)", r"\*\s*-\s*(1e[1-5]\b|\d{2,6}\b)", *FILLS),
        needs_mask=True,
    ),
    Fault(
        "padding becomes NaN",
        "the mask hides all keys from padding queries: their outputs are NaN",
        "mask[:, None, None, :] & mask[:, None, :, None], with -inf where hidden",
        "mask[:, None, None, :], which hides padding keys and leaves queries alone",
        (
            "Look at the rows of the scores that belong to padding queries.",
            "The softmax of a row in which every score is -inf is NaN.",
            "Hide padding keys only. The outputs of padding queries are not used.",
        ),
        "In the next layer, 0 times NaN is NaN: the outputs of all tokens become NaN.",
        "mask = mask[:, None, None, :]  # [B, 1, 1, S]",
        "hide",
        _masks(_without_padding_queries)[:1],
        (r"&", r"unsqueeze\(", *FILLS),
        needs_mask=True,
    ),
    Fault(
        "padding queries hidden",
        "the mask hides all keys from padding queries; their outputs are finite",
        "mask[:, None, None, :] & mask[:, None, :, None]",
        "mask[:, None, None, :], which hides padding keys and leaves queries alone",
        (
            "Look at the rows of the scores that belong to padding queries.",
            "All keys are hidden from them, so their weights are all equal, or 0.",
            "Hiding padding keys is enough: the outputs of padding queries are not used.",
        ),
        "It does not change the outputs of real tokens, as long as the fill is finite.",
        "mask = mask[:, None, None, :]  # [B, 1, 1, S]",
        "hide",
        _masks(_without_padding_queries)[1:],
        (r"&", r"unsqueeze\(", *FILLS),
        needs_mask=True,
        design="a mask of queries that are padding",
    ),
    Fault(
        "mask makes NaN",
        "0 is multiplied by -inf for visible keys, which makes every score NaN",
        "scores + (1 - mask) * -inf",
        RIGHT,
        (
            "Print the scores after the mask is applied.",
            "0 * -inf is NaN, and the softmax of a row with a NaN is NaN.",
            'Use masked_fill(mask == 0, float("-inf")), or multiply by a finite number such as -1e9.',
        ),
        "With a mask every output is NaN, and after one training step so is every parameter.",
        REPAIR,
        "hide",
        ({"hide": _nan_scores},),
        (r"\*\s*(-\s*)?(float\(.-?inf|torch\.inf|math\.inf|np\.inf)", *FILLS),
        needs_mask=True,
    ),
    Fault(
        "mask on queries",
        "the mask is applied along the queries instead of the keys",
        "rows of padding queries are masked, and padding keys are visible",
        RIGHT,
        (
            "Which dimension of the scores is the mask aligned with?",
            "It masks rows (queries) instead of columns (keys).",
            "A padding mask has the shape [B, 1, 1, S]: mask[:, None, None, :].",
        ),
        "Queries attend to padding.",
        "mask = mask[:, None, None, :]  # [B, 1, 1, S]",
        "hide",
        _masks(_transposed),
        (r"mask\[\s*:\s*,\s*None\s*,\s*:\s*,\s*None", r"unsqueeze\(", *FILLS),
        needs_mask=True,
    ),
    Fault(
        "mask repeated in wrong order",
        "the masks of a batch are repeated for the heads in the wrong order",
        "mask.repeat(H, 1, 1) for scores [B * H, T, S]",
        "mask.repeat_interleave(H, dim=0)",
        (
            "Which sample's mask is used for head 1 of sample 0?",
            "In [B * H] all heads of sample 0 come first; in [H * B] all samples of head 0 come first.",
            "Use repeat_interleave for [B * H] and repeat for [H * B], or keep [B, H, T, S] and "
            "broadcast the mask.",
        ),
        "Samples are masked with the padding of other samples. With one sample or equal lengths the "
        "result is correct.",
        "mask = mask.repeat_interleave(self.num_heads, dim=0)  # [B * H, T, S]",
        "hide",
        (*_masks(_wrong_order), *_masks(_heads_first)),
        (r"\.repeat\(", *FILLS),
        mixes_samples=True,
        needs_mask=True,
    ),
    Fault(
        "one mask replaces another",
        "only one of two masks is used: the second replaces the first",
        "attention with only one of the two masks",
        "attention with mask = causal & padding (True = visible)",
        (
            "Pass both masks. Which of them has an effect?",
            "Each mask works alone; if both are passed, one of them has no effect.",
            "Combine masks of visible keys with &, and masks of hidden keys with |.",
        ),
        "In batches with padding, a decoder attends to later tokens or to padding.",
        "mask = causal & padding[:, None, None, :]  # True = may attend",
        "hide",
        (*_masks(_argument_only), *_masks(_one_of_two(False)), *_masks(_one_of_two(True))),
        (r"\bmask\w*\s*=\s*(?!None)", *FILLS),
        needs_mask=True,
    ),
    Fault(
        "masks joined with or",
        "two masks are combined with or: a key is visible if one of them allows it",
        "causal | padding, True = may attend",
        "causal & padding: a key is visible where both allow it",
        (
            "Which keys are visible to the first query of a sequence?",
            "Later tokens are visible if they are not padding, and earlier ones even if they are padding.",
            "Combine masks of visible keys with &, and masks of hidden keys with |.",
        ),
        "With a padding mask, a decoder attends to later tokens.",
        "mask = causal & padding[:, None, None, :]  # True = may attend",
        "hide",
        _masks(_either_allows),
        (r"\|", r"logical_or\(", *FILLS),
        needs_mask=True,
    ),
    Fault(
        "first sample's mask for all",
        "the mask of the first sample is used for all samples",
        "mask[0] for the whole batch",
        RIGHT,
        (
            "Use samples of different lengths, and compare the outputs with those of each sample alone.",
            "Only the output of the first sample is correct.",
            "Keep the batch dimension, [B, 1, 1, S], instead of using mask[0].",
        ),
        "A batch of one sample is correct; in larger batches queries attend to padding, or words are hidden.",
        "mask = mask[:, None, None, :]  # [B, 1, 1, S]",
        "hide",
        _masks(lambda state, mask: mask[:1].expand_as(mask)),
        (r"mask\[\s*0", *FILLS),
        needs_mask=True,
    ),
    Fault(
        "mask before heads are mixed",
        "keys are hidden before a matrix mixes the scores of all heads",
        "softmax(P masked(scores))",
        "softmax(masked(P scores))",
        (
            "Which comes first, the mask or the matrix that mixes the heads?",
            "Negative entries of the matrix turn large negative numbers into large positive ones.",
            "Apply the mask to the mixed scores, immediately before the softmax.",
        ),
        "If a row of the mixing matrix has a negative sum, the large negative scores of hidden keys become "
        "large positive scores, so that head attends to hidden keys only.",
        REPAIR,
        "hide",
        (BEFORE_MIXING,),
        FILLS,
        needs_mask=True,
    ),
    Fault(
        "mask on first head only",
        "only the first head is masked",
        "mask on scores[:, 0]",
        "mask on the scores of every head",
        (
            "Look at the weights of the second head for hidden keys.",
            "Hidden keys have weight 0 in the first head only.",
            "Give the mask the shape [B, 1, T, S], which broadcasts over the heads.",
        ),
        "All other heads attend to hidden keys.",
        REPAIR,
        "hide",
        _masks(_first_head),
        (r"\[\s*:\s*,\s*0\s*\]", *FILLS),
        needs_mask=True,
    ),
]
