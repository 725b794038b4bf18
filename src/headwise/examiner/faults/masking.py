"""What a mask does to scores.

A query that is left without any key tells how keys were hidden: NaN (-inf), equal weights (-1e9) or 0
(torch's fused kernels). None of the three is a fault, so each fault that can leave one is tried in all three
ways.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..recipe import RIGHT as RIGHT_STEPS
from ..recipe import State
from .fault import Fault, Way

RIGHT = "scores of hidden keys become -inf before the softmax"
REPAIR = 'scores = scores.masked_fill(mask == 0, float("-inf"))  # before the softmax'
FILLS = (r"masked_fill_?\(", r"torch\.where\(", r"attn_mask\s*=", r"\bmask\b")
CAUSAL = (r"\b(tril|triu)_?\(", r"diagonal\s*=", *FILLS)


def _masks(change: Callable[[State, Tensor], Tensor]) -> tuple[Way, ...]:
    """Another mask, hidden by -inf, by -1e9, and with rows of nothing at 0."""

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
    """Hidden scores become this number."""

    def hide(state: State) -> None:
        state.hidden = state.scaled
        if state.mask is not None:
            state.hidden = state.scaled.masked_fill(~state.mask, number)

    return {"hide": hide}


TOO_SMALL = (1e5, 1e4, 1e3, 1e2, 1e1, 5.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 9.0, 15.0, 20.0, 30.0, 50.0)


def _raised(number: float) -> Way:
    def hide(state: State) -> None:
        state.hidden = state.scaled
        if state.mask is not None:
            state.hidden = state.scaled + ~state.mask * number

    return {"hide": hide}


def _without_padding_queries(state: State, mask: Tensor) -> Tensor:
    """The mask without the rows of queries that stand where a key is hidden from all."""
    if mask.shape[-1] != mask.shape[-2]:
        raise ValueError("queries and keys are not the same tokens")
    return mask & mask.any(-2).unsqueeze(-1)


def _not_a_number(state: State) -> None:
    state.hidden = state.scaled
    if state.mask is not None:
        state.hidden = state.scaled.masked_fill(~state.mask, -torch.inf).masked_fill(state.mask, torch.nan)


def _ignored(state: State) -> None:
    state.hidden = state.scaled


def _added(hides: bool) -> Way:
    def hide(state: State) -> None:
        state.hidden = state.scaled
        if state.mask is not None:
            state.hidden = state.scaled + (~state.mask if hides else state.mask).to(state.scaled.dtype)

    return {"hide": hide}


def _after(state: State) -> None:
    if state.mask is not None:
        state.p = state.p * state.mask


def _filled_after(number: float) -> Way:
    """Weights, not scores, are filled with what hides a score."""

    def drop(state: State) -> None:
        if state.mask is not None:
            state.p = state.p.masked_fill(~state.mask, number)

    return {"hide": _ignored, "drop": drop}


def _inverted(state: State) -> None:
    """From the start, whatever becomes of the mask later: for those who make a second mistake with it."""
    RIGHT_STEPS["inputs"](state)
    if state.inputs.mask is not None:
        state.inputs = state.inputs._replace(mask=~state.inputs.mask)


def _band(diagonal: int, upper: bool = False) -> Callable[[State, Tensor], Tensor]:
    """The causal part of a mask redrawn, its padding kept; other masks as they are."""

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
    """Repeated sample by sample, for scores that lie head by head: [H * B, T, S]."""
    B, H = mask.shape[0], state.num_heads
    return mask[:, 0].repeat_interleave(H, 0).unflatten(0, (H, B)).transpose(0, 1)  # [B, H, T, S]


def _either_allows(state: State, mask: Tensor) -> Tensor:
    """A key is seen where the causal mask or the one that was handed over allows it."""
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    if state.inputs.handed is not None:
        return state.inputs.handed[:, None] | causal
    padding = mask[..., -1:, :]
    both = mask.shape[-1] == mask.shape[-2] and torch.equal(mask, causal & padding)
    return causal | padding if both and not bool(padding.all()) else mask


def _handed_over(state: State, mask: Tensor) -> Tensor:
    """What was handed over, without the mask the code makes itself."""
    if state.inputs.handed is None:
        return mask
    return state.inputs.handed[:, None]


def _one_of_two(causal: bool) -> Callable[[State, Tensor], Tensor]:
    """Of padding and a causal mask at once, only one; other masks as they are."""

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


def _turned(state: State, mask: Tensor) -> Tensor:
    if mask.shape[-1] != mask.shape[-2]:
        raise ValueError("a turned mask needs as many queries as keys")
    return mask.transpose(-2, -1)


FAULTS = [
    Fault(
        "mask ignored",
        "the mask has no effect",
        "softmax(q k^T / sqrt(d_k)) v, every key seen",
        RIGHT,
        (
            "Change a token that should be hidden and see whether the output moves.",
            "Hidden keys get as much weight as if there were no mask.",
            "Fill hidden keys' scores with -inf, and keep what masked_fill returns: it is not in place.",
        ),
        "With a causal model the future leaks into training: the loss looks wonderful, and generation fails.",
        REPAIR,
        "hide",
        ({"hide": _ignored},),
        (r"^\s*\w+\.masked_fill\(", *FILLS, r"def forward\("),
        needs_mask=True,
        common=True,
    ),
    Fault(
        "mask inverted",
        "the mask is read the wrong way round: what should be seen is hidden",
        "scores of the keys that may be seen become -inf",
        RIGHT,
        (
            "What does True, or 1, mean in your mask, and what in the line that uses it?",
            "Hidden keys are the only ones seen.",
            "Turn the condition round: fill where attention is not allowed.",
        ),
        "Two meanings are in use: torch's nn.MultiheadAttention hides where a mask is True, "
        "scaled_dot_product_attention shows.",
        REPAIR,
        "hide",
        (*_masks(lambda state, mask: ~mask), {"inputs": _inverted}),
        (r"masked_fill_?\(", r"attn_mask\s*=", r"torch\.where\("),
        needs_mask=True,
        common=True,
    ),
    Fault(
        "mask after softmax",
        "weights are masked after the softmax and no longer sum to 1",
        "(softmax(scores), then masked) v",
        RIGHT,
        (
            "Sum the weights of a query that has hidden keys.",
            "The share of the hidden keys is cut away, and nobody gets it.",
            "Mask the scores with -inf before the softmax.",
        ),
        "A query that sees one key out of ten gets a tenth of it: outputs shrink where much is hidden.",
        REPAIR,
        "drop",
        (
            {"hide": _ignored, "drop": _after},
            {**filled(0.0), "drop": _after},
            _filled_after(-torch.inf),
            _filled_after(-1e9),
        ),
        (r"(weights?|attn\w*|probs?|scores?|a|w|p)\s*\*=?\s*\(?~?\w*mask", r"masked_fill_?\(", *FILLS),
        needs_mask=True,
        common=True,
    ),
    Fault(
        "fill with zero",
        "hidden scores become 0 instead of -inf",
        "softmax(scores with 0 where hidden) v",
        RIGHT,
        (
            "Look at the number that stands for 'hidden'.",
            "exp(0) is 1: a score of 0 is an ordinary score.",
            "Use -inf (1e-9 is as good as 0, and multiplying by the mask gives 0, too).",
        ),
        "Hidden keys still get weight, often more than those that count.",
        REPAIR,
        "hide",
        (filled(0.0),),
        (r"masked_fill_?\(.*(,\s*0(\.0)?\s*\)|1e-)", r"\*=?\s*\w*mask", *FILLS),
        needs_mask=True,
        common=True,
    ),
    Fault(
        "causal hides itself",
        "the causal mask is off by one: a query cannot see its own position",
        "key j is seen where j < i",
        "key j is seen where j <= i",
        (
            "Look at the first row of the causal mask.",
            "The first position sees nothing at all.",
            "Keep the diagonal: torch.tril(ones), or torch.triu(ones, diagonal=1) for what is hidden.",
        ),
        "The first position has nothing to attend to (NaN with -inf), and every other misses its own token.",
        "hidden = torch.triu(torch.ones(T, T, dtype=torch.bool), diagonal=1)",
        "hide",
        _masks(_band(-1)),
        CAUSAL,
        needs_mask=True,
    ),
    Fault(
        "causal shows the next",
        "the causal mask is off by one: a query sees the next position",
        "key j is seen where j <= i + 1",
        "key j is seen where j <= i",
        (
            "Look at the first row of the causal mask.",
            "The first position sees two keys.",
            "torch.triu(ones, diagonal=1) is what to hide, not diagonal=2.",
        ),
        "The model is shown the token it has to predict: training looks perfect and generation fails.",
        "hidden = torch.triu(torch.ones(T, T, dtype=torch.bool), diagonal=1)",
        "hide",
        _masks(_band(1)),
        CAUSAL,
        needs_mask=True,
    ),
    Fault(
        "causal flipped",
        "the causal mask is flipped: a query sees the future and not the past",
        "key j is seen where j >= i",
        "key j is seen where j <= i",
        (
            "Which half of the matrix is seen: below the diagonal or above?",
            "The last position sees only itself; it should see all.",
            "Use tril for what may be seen, triu for what is hidden.",
        ),
        "The model reads backwards: nothing it learns can be used to generate from left to right.",
        "mask = torch.tril(torch.ones(T, T, dtype=torch.bool))  # True = may attend",
        "hide",
        _masks(_band(0, upper=True)),
        CAUSAL,
        needs_mask=True,
    ),
    Fault(
        "causal inverted",
        "the causal mask is read the wrong way round: only later keys are seen",
        "key j is seen where j > i",
        "key j is seen where j <= i",
        (
            "Does True in your causal mask mean seen or hidden, and for the line that uses it?",
            "A query sees what comes after it, and not even itself.",
            "Turn the condition round, or use tril in place of triu.",
        ),
        "The last position sees nothing at all, and every other only the future.",
        "scores = scores.masked_fill(torch.triu(ones, diagonal=1), float('-inf'))",
        "hide",
        _masks(_band(1, upper=True)),
        CAUSAL,
        needs_mask=True,
    ),
    Fault(
        "mask added",
        "a mask of 0 and 1 is added to the scores",
        "softmax(scores + mask) v",
        RIGHT,
        (
            "Look at how the mask meets the scores.",
            "Adding 1 changes a score a little; it hides nothing.",
            "Add -inf where a key is hidden and 0 elsewhere, or use masked_fill.",
        ),
        "Every key is seen, some a bit more than others: as good as no mask.",
        REPAIR,
        "hide",
        (_added(False), _added(True)),
        (r"\+=?\s*\(?~?\w*mask", *FILLS),
        needs_mask=True,
    ),
    Fault(
        "mask plus 1e9",
        "hidden scores become a large positive number",
        "softmax(scores with +1e9 where hidden) v",
        RIGHT,
        (
            "Look at the sign of the number that stands for 'hidden'.",
            "Hidden keys take all the weight.",
            "It has to be negative: -inf.",
        ),
        "The softmax looks at the hidden keys and at nothing else.",
        REPAIR,
        "hide",
        (filled(1e9), _raised(1e9), _raised(1e10)),
        (r"masked_fill_?\(.*,\s*(float\(.inf.\)|1e\d+|torch\.inf)", *FILLS),
        needs_mask=True,
    ),
    Fault(
        "fill too small",
        "the number that stands for 'hidden' is not low enough",
        "softmax(scores with -1e4 or so where hidden) v",
        RIGHT,
        (
            "How large can a score get?",
            "A score can be lower than the number that hides: then the hidden key shines through.",
            'Use float("-inf"), or torch.finfo(scores.dtype).min.',
        ),
        "It works until scores grow, and then leaks without a word.",
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
        "queries that are padding may see nothing: their outputs are NaN",
        "mask[:, None, None, :] & mask[:, None, :, None], with -inf where hidden",
        "mask[:, None, None, :]: keys that are padding are hidden, queries are not",
        (
            "Look at the rows of queries that are padding.",
            "A row in which every score is -inf becomes NaN in the softmax.",
            "Hide the keys that are padding and leave the queries alone; nobody reads their outputs.",
        ),
        "The next layer multiplies the NaN by a weight of 0, which is NaN again, for every token.",
        "mask = mask[:, None, None, :]  # [B, 1, 1, S]",
        "hide",
        _masks(_without_padding_queries)[:1],
        (r"&", r"unsqueeze\(", *FILLS),
        needs_mask=True,
    ),
    Fault(
        "padding queries hidden",
        "queries that are padding may see nothing; their outputs are finite",
        "mask[:, None, None, :] & mask[:, None, :, None]",
        "mask[:, None, None, :]: keys that are padding are hidden, queries are not",
        (
            "Look at the rows of queries that are padding.",
            "All their keys are hidden, so their weights are equal, or 0.",
            "Nobody reads these rows: hide the keys that are padding, that is enough.",
        ),
        "It changes nothing that is read, as long as the number that hides is finite.",
        "mask = mask[:, None, None, :]  # [B, 1, 1, S]",
        "hide",
        _masks(_without_padding_queries)[1:],
        (r"&", r"unsqueeze\(", *FILLS),
        needs_mask=True,
        design="a mask of queries that are padding",
    ),
    Fault(
        "mask makes NaN",
        "0 is multiplied by -inf where a key may be seen: every score becomes NaN",
        "scores + (1 - mask) * -inf",
        RIGHT,
        (
            "Print the scores after the mask.",
            "0 * -inf is NaN, and one NaN in a row makes the whole row NaN.",
            'Use masked_fill(mask == 0, float("-inf")), or multiply by a finite number such as -1e9.',
        ),
        "Every output is NaN as soon as a mask is given, and NaN spreads to every parameter in training.",
        REPAIR,
        "hide",
        ({"hide": _not_a_number},),
        (r"\*\s*(-\s*)?(float\(.-?inf|torch\.inf|math\.inf|np\.inf)", *FILLS),
        needs_mask=True,
    ),
    Fault(
        "mask on queries",
        "the mask lies on the axis of queries instead of that of keys",
        "queries that are padding are hidden, keys that are padding are seen",
        RIGHT,
        (
            "Which dimension of the scores does the mask run along?",
            "Rows are hidden where columns should be.",
            "A padding mask is [B, 1, 1, S]: mask[:, None, None, :].",
        ),
        "Padding is attended to, and real queries may be left with nothing.",
        "mask = mask[:, None, None, :]  # [B, 1, 1, S]",
        "hide",
        _masks(_turned),
        (r"mask\[\s*:\s*,\s*None\s*,\s*:\s*,\s*None", r"unsqueeze\(", *FILLS),
        needs_mask=True,
    ),
    Fault(
        "mask repeated in wrong order",
        "the masks of a batch are repeated for the heads in the wrong order",
        "mask.repeat(H, 1, 1) for scores [B * H, T, S]",
        "mask.repeat_interleave(H, dim=0)",
        (
            "Which sample's mask does head 1 of sample 0 get?",
            "In [B * H] all heads of sample 0 come first; in [H * B] all samples of head 0.",
            "repeat_interleave for [B * H], repeat for [H * B]; or keep [B, H, T, S] and broadcast.",
        ),
        "Samples are masked with each other's padding; with one sample, or equal lengths, it never shows.",
        "mask = mask.repeat_interleave(self.num_heads, dim=0)  # [B * H, T, S]",
        "hide",
        (*_masks(_wrong_order), *_masks(_heads_first)),
        (r"\.repeat\(", *FILLS),
        mixes_samples=True,
        needs_mask=True,
    ),
    Fault(
        "one mask replaces another",
        "of two masks only one counts: the second is assigned in place of the first",
        "mask = padding where mask = causal & padding",
        "a key is seen where every mask lets it be seen",
        (
            "Hand over both masks and see which of them still works.",
            "Each works alone; together one of them is lost.",
            "Combine them: what may be seen with &, what is hidden with |.",
        ),
        "A decoder with padding sees the future, or one without sees padding: both only in real batches.",
        "mask = causal & padding[:, None, None, :]  # True = may attend",
        "hide",
        (*_masks(_handed_over), *_masks(_one_of_two(False)), *_masks(_one_of_two(True))),
        (r"\bmask\w*\s*=\s*(?!None)", *FILLS),
        needs_mask=True,
    ),
    Fault(
        "masks joined with or",
        "of two masks one is enough to let a key be seen: they are joined with or",
        "causal | padding, True = may attend",
        "causal & padding: a key is seen where both let it be seen",
        (
            "Which keys does a query see that stands before a real token?",
            "A real token in the future is seen, and padding in the past.",
            "Combine what may be seen with &, and what is hidden with |.",
        ),
        "A decoder sees the future as soon as a padding mask is given.",
        "mask = causal & padding[:, None, None, :]  # True = may attend",
        "hide",
        _masks(_either_allows),
        (r"\|", r"logical_or\(", *FILLS),
        needs_mask=True,
    ),
    Fault(
        "first sample's mask for all",
        "every sample is masked with the first sample's mask",
        "mask[0] for the whole batch",
        RIGHT,
        (
            "Give the samples of a batch different lengths, and compare each with a run of its own.",
            "Only the first sample is right.",
            "Keep the dimension of the batch: [B, 1, 1, S], not mask[0].",
        ),
        "Batches of one pass; in a real batch padding is attended to or words are lost.",
        "mask = mask[:, None, None, :]  # [B, 1, 1, S]",
        "hide",
        _masks(lambda state, mask: mask[:1].expand_as(mask)),
        (r"mask\[\s*0", *FILLS),
        needs_mask=True,
    ),
    Fault(
        "mask on first head only",
        "only the first head is masked",
        "mask on scores[:, 0]",
        "mask on the scores of every head",
        (
            "Look at the weights of the second head.",
            "Only the first head's hidden keys have weight 0.",
            "Let the mask broadcast over heads: [B, 1, T, S].",
        ),
        "All heads but one see what they should not.",
        REPAIR,
        "hide",
        _masks(_first_head),
        (r"\[\s*:\s*,\s*0\s*\]", *FILLS),
        needs_mask=True,
    ),
]
