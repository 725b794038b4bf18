"""What a model predicts for a text or an image: next tokens, words for a mask, or classes.

Letters: V words of a vocabulary, or classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..listeners.model_outputs import MASKED, NEXT, CallShape, comparison_of
from ..show.texts import plain
from .model_inputs import ModelInput, Prepared, is_entry, name_of

MOST = 10  # predictions shown
CLASS = "class"
LONGEST = 60  # characters of a name
NOT_FINITE = "The model's output has NaN or infinite numbers, so nothing is predicted."
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # for a part of a letter


class Predictor:
    """Reads predictions from the output of one model.

    Attributes:
        kind: "next token", "masked token", "class", or "" until an output with predictions was seen. For a
            masked language model it is "masked token" from the beginning.
    """

    def __init__(self, model: nn.Module, model_input: ModelInput) -> None:
        self.model, self.input = model, model_input
        self.kind = ""
        self._config = getattr(model, "config", None)
        mask = getattr(model_input.tokenizer, "mask_token_id", None)
        if type(model).__name__.endswith("ForMaskedLM") and mask is not None:
            self.kind = MASKED
        self._finite = True

    @property
    def problem(self) -> str:
        """Return why nothing is predicted from the last output; "" if there is no reason."""
        return "" if self._finite else NOT_FINITE

    def shares(self, prepared: Prepared, output: object, calls: Sequence[CallShape]) -> Tensor | None:
        """Return the probability of each word or class, float32 [V] on the CPU.

        None: the model predicts neither, or its output has NaN or infinite numbers; see `problem`.
        """
        self._finite = True
        logits = self._class_logits(output)
        if logits is not None:
            self.kind = CLASS
            self._finite = _is_finite(logits)
            if not self._finite:
                return None
            several = getattr(self._config, "problem_type", None) == "multi_label_classification"
            return logits.sigmoid() if several else logits.softmax(-1)
        if self.input.tokenizer is None:
            return None
        inputs = {"input_ids": torch.tensor([prepared.ids])}  # whatever the model calls them
        comparison = comparison_of(self.model, inputs, output, calls, self.input.tokenizer)
        if comparison.of not in (NEXT, MASKED):
            return None
        self.kind = comparison.of
        words = comparison.read(output)[0]
        self._finite = _is_finite(words)
        return words.softmax(-1).float().cpu() if self._finite else None

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
        return tensor[0].detach().float().cpu() if named or self._has_classes(tensor.shape[1]) else None

    def _has_classes(self, V: int) -> bool:
        """Return True if a model of images says that it has V classes: other outputs are features."""
        names = getattr(self._config, "id2label", None)
        classes = getattr(self.model, "num_classes", None)
        return (isinstance(names, Mapping) and len(names) == V) or (isinstance(classes, int) and classes == V)

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
        if not is_entry(tokenizer, place):
            return name_of(tokenizer, place), ""
        if self.kind == MASKED:
            word = name_of(tokenizer, place)
            return plain(word, LONGEST), word
        text = self._appended_text(prepared.ids, [place])
        ending = self._text(prepared.ids[-4:])
        if text and not text.strip("\r\n"):
            return "↵", text
        goes_on = text[:1].isalnum() and ending[-1:].isalnum()
        return ("…" if goes_on else "") + plain(name_of(tokenizer, place), LONGEST), text

    def whole_text(self, text: str, prepared: Prepared) -> str:
        """Return a text with what its appended tokens add to it."""
        appended = prepared.ids[prepared.prompt :]
        return text + self._appended_text(prepared.ids[: prepared.prompt], appended) if appended else text

    def _appended_text(self, ids: list[int], appended: list[int]) -> str:
        """Return what tokens add to the text before them; together, as one letter may take several."""
        tail = ids[-4:]  # some tokenizers drop the space before the first word
        start, whole = self._text(tail), self._text([*tail, *appended])
        if not whole.startswith(start):
            start = start.rstrip(REPLACEMENT)  # a part of a letter, which goes on
        return whole[len(start) :] if whole.startswith(start) else self._text(appended)

    def _text(self, ids: list[int]) -> str:
        tokenizer = self.input.tokenizer
        assert tokenizer is not None, "only a text has token ids"
        entries = [token for token in ids if is_entry(tokenizer, token)]
        return str(tokenizer.decode(entries, clean_up_tokenization_spaces=False))


def _is_finite(logits: Tensor) -> bool:
    """Return True if logits have a softmax; some may be minus infinity."""
    return math.isfinite(float(logits.max())) and not bool(logits.isnan().any())
