"""What a model predicts for a text or an image: next tokens, words for a mask, or classes.

Letters: V words of a vocabulary, or classes.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any

from torch import Tensor, nn

from ..listeners.model_outputs import MASKED, NEXT, CallShape, comparison_of
from ..models.pretrained import token_name
from ..show.texts import plain
from .model_inputs import ModelInput, Prepared

MOST = 10  # predictions shown
CLASS = "class"
LONGEST = 60  # characters of a name


class Predictor:
    """Reads predictions from the output of one model.

    Attributes:
        kind: "next token", "masked token", "class", or "" until an output with predictions was seen.
    """

    def __init__(self, model: nn.Module, model_input: ModelInput) -> None:
        self.model, self.input = model, model_input
        self.kind = ""
        self._config = getattr(model, "config", None)
        self._mask_id: int | None = getattr(model_input.tokenizer, "mask_token_id", None)

    def shares(self, prepared: Prepared, output: object, calls: Sequence[CallShape]) -> Tensor | None:
        """Return the probability of each word or class, float32 [V] on the CPU, or None."""
        logits = self._class_logits(output)
        if logits is not None:
            self.kind = CLASS
            several = getattr(self._config, "problem_type", None) == "multi_label_classification"
            return logits.sigmoid() if several else logits.softmax(-1)
        if self.input.tokenizer is None:
            return None
        comparison = comparison_of(self.model, prepared.inputs, output, calls, self.input.tokenizer)
        if comparison.of not in (NEXT, MASKED):
            return None
        self.kind = comparison.of
        return comparison.read(output)[0].softmax(-1).float().cpu()

    def _class_logits(self, output: object) -> Tensor | None:
        """Return the logits of a classifier, float32 [V] on the CPU, or None for another model."""
        named = "Classification" in type(self.model).__name__
        if getattr(self._config, "problem_type", None) == "regression":
            return None
        if not named and self.input.kind != "image":
            return None
        tensor = getattr(output, "logits", output)
        if not isinstance(tensor, Tensor) or tensor.ndim != 2 or tensor.shape[0] != 1 or tensor.shape[1] < 2:
            return None
        return tensor[0].detach().float().cpu()

    def predictions(
        self, prepared: Prepared, shares: Tensor | None, before: Tensor | None, *, most: int = MOST
    ) -> list[dict[str, Any]]:
        """Return the most probable words or classes, largest first: `Prediction` of protocol.ts.

        Args:
            before: probabilities with all heads on, where some are changed.
        """
        if shares is None:
            return []
        best = shares.topk(min(most, len(shares)))
        rows = []
        for share, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            name, text = self._named(prepared, place)
            was = None if before is None else float(before[place])
            rows.append({"id": place, "name": name, "text": text, "share": share, "before": was})
        return rows

    def _named(self, prepared: Prepared, place: int) -> tuple[str, str]:
        """Return what readers call a word or class, and what it appends to the text."""
        if self.kind == CLASS:
            names = getattr(self._config, "id2label", None) or {}
            return plain(str(names.get(place, f"class {place}")), LONGEST), ""
        tokenizer = self.input.tokenizer
        assert tokenizer is not None, "only a text has a next token"
        if isinstance(tokenizer, Sized) and place >= len(tokenizer):  # vocabularies are often padded
            return f"token {place}", ""
        if self.kind == MASKED:
            word = token_name(tokenizer, place)
            return plain(word, LONGEST), word
        text = self._appended_text(prepared.ids, place)
        ending = self._text(prepared.ids[-4:])
        if text and not text.strip("\r\n"):
            return "↵", text
        goes_on = text[:1].isalnum() and ending[-1:].isalnum()
        return ("…" if goes_on else "") + plain(token_name(tokenizer, place), LONGEST), text

    def whole_text(self, text: str, prepared: Prepared) -> str:
        """Return a text with what its appended tokens add to it."""
        for place in range(prepared.prompt, prepared.tokens):
            text += self._appended_text(prepared.ids[:place], prepared.ids[place])
        return text

    def _appended_text(self, ids: list[int], token: int) -> str:
        """Return what a token adds to the text before it."""
        tail = ids[-4:]  # some tokenizers drop the space before the first word
        start, whole = self._text(tail), self._text([*tail, token])
        return whole[len(start) :] if whole.startswith(start) else self._text([token])

    def _text(self, ids: list[int]) -> str:
        tokenizer = self.input.tokenizer
        assert tokenizer is not None, "only a text has token ids"
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
