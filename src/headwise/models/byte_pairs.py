"""`BytePairs`: a tokenizer in one file, of the library tokenizers, called as those of transformers are.

    text -- pieces of it that the vocabulary has --> ids [T], special tokens put around them

It is made for byte-level byte pair encoding, where no text is unknown, and shows any other tokenizer.json
that the library reads. Roles of special tokens are found, not asked for: the start is the special token that
is put in front of a text, the end the one after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from ..errors import ArgumentError, needed

if TYPE_CHECKING:
    import tokenizers

VOCABULARY = "tokenizer.json"
UNLIMITED = 1 << 24  # tokens: no limit; other tokenizers say 10^30
SPACE = "␣"


class BytePairs:
    """A tokenizer around a `tokenizers.Tokenizer`, which the `tokenizers` library loads and trains.

        tokenizer = BytePairs(tokenizers.Tokenizer.from_file("tokenizer.json"))
        tokenizer("to be or not to be", return_tensors="pt")["input_ids"]         # [1, T]
        tokenizer(["to be", "or not to be"], return_tensors="pt")["lengths"]      # padded on the right

    Args:
        inner: a `tokenizers.Tokenizer`; it is copied, and the copy neither truncates nor pads.
        model_max_length: the largest number of tokens that the model reads; None if unknown.

    Raises:
        ArgumentError: another type.
        PackageMissing: tokenizers is not installed.
    """

    padding_side = "right"

    def __init__(self, inner: tokenizers.Tokenizer, *, model_max_length: int | None = None) -> None:
        library = _library()
        if not isinstance(inner, library.Tokenizer):
            raise ArgumentError(
                f"inner must be a Tokenizer of the library tokenizers: got {type(inner).__name__}; load it "
                "with tokenizers.Tokenizer.from_file"
            )
        padding = inner.padding
        self._inner: tokenizers.Tokenizer = library.Tokenizer.from_str(inner.to_str())
        self._inner.no_truncation()  # a call decides about truncation and padding, not the tokenizer
        self._inner.no_padding()
        self.model_max_length = UNLIMITED if model_max_length is None else model_max_length
        self._special = {
            number: token.content
            for number, token in sorted(self._inner.get_added_tokens_decoder().items())
            if token.special
        }
        self._size = 1 + max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1)
        self.bos_token_id, self.eos_token_id = self._find_ends()
        self.pad_token_id: int | None = padding["pad_id"] if padding else None
        unknown = getattr(self._inner.model, "unk_token", None)
        self.unk_token_id: int | None = None if unknown is None else self._inner.token_to_id(unknown)
        if isinstance(self._inner.model, library.models.Unigram):  # the id is only in the file
            self.unk_token_id = json.loads(self._inner.to_str())["model"]["unk_id"]

    def _find_ends(self) -> tuple[int | None, int | None]:
        """Find the tokens that are put before a text and after it, by encoding an example."""
        entries = (self._inner.decode([number]) for number in range(min(self._size, 512)))
        for text in ("a", *entries):
            try:
                inside = self._inner.encode(text, add_special_tokens=False).ids
            except Exception:  # of the library itself: not in the vocabulary, and there is no unknown token
                continue
            if inside:
                around = self._inner.encode(text).ids
                before = next((at for at in range(len(around)) if around[at : at + len(inside)] == inside), 0)
                after = len(around) - before - len(inside)
                return around[0] if before else None, around[-1] if after else None
        return None, None

    @classmethod
    def of(cls, tokenizer: object) -> BytePairs:
        """Return a `BytePairs` made from a `tokenizers.Tokenizer` or from a fast tokenizer of transformers.

        Raises:
            ArgumentError: another type of tokenizer.
            PackageMissing: tokenizers is not installed.
        """
        if isinstance(tokenizer, BytePairs):
            return tokenizer
        inner: Any = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not isinstance(inner, _library().Tokenizer):
            raise ArgumentError(
                f"tokenizer must be of the library tokenizers: got {type(tokenizer).__name__}; use a fast "
                "tokenizer, which can be saved as tokenizer.json"
            )
        return cls(inner)

    @classmethod
    def from_file(cls, file: Path, *, model_max_length: int | None = None) -> BytePairs:
        """Load a tokenizer from a tokenizer.json.

        Raises:
            ArgumentError: a file that the library cannot read.
            PackageMissing: tokenizers is not installed.
        """
        library = _library()
        try:
            inner = library.Tokenizer.from_str(file.read_text("utf-8"))
        except Exception as error:  # the library raises Exception itself
            reason = str(error).strip().partition("\n")[0]
            raise ArgumentError(
                f"tokenizer must be a valid tokenizer.json: {str(file)!r} cannot be read ({reason}); save it "
                "again"
            ) from error
        return cls(inner, model_max_length=model_max_length)

    def to_json(self) -> str:
        """Return the tokenizer as the text of a tokenizer.json."""
        return self._inner.to_str()

    # From text to ids

    def __call__(
        self,
        text: str | Sequence[str],
        /,
        *,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
        padding: bool | str | None = None,
        return_tensors: str | None = None,
        return_offsets_mapping: bool = False,
        verbose: bool = True,
    ) -> dict[str, Any]:
        """Return texts as input_ids and attention_mask; as tensors also lengths, int64 [B].

        Args:
            add_special_tokens: those in front of a text and after it.
            truncation: whether a text is cut after max_length tokens, special ones included.
            max_length: with truncation. Default `model_max_length`.
            padding: True, or "longest": texts of a list are filled up on the right to the longest, with
                attention_mask 0. Default where tensors are asked for.
            return_tensors: "pt": tensors [B, T], of one text [1, T].
            return_offsets_mapping: offset_mapping, where in the text each token begins and ends.
            verbose: ignored; there are no warnings.

        Raises:
            ArgumentError: what is no text; a max_length without truncation, or without room for a token;
                texts of different lengths as tensors with padding=False.
        """
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, (list, tuple)) or not all(isinstance(each, str) for each in texts):
            raise ArgumentError(f"text must be a string or a list of strings: got {_kind(text)}; use str()")
        if return_tensors not in (None, "pt"):
            raise ArgumentError(f"return_tensors must be 'pt' or None: got {return_tensors!r}; use 'pt'")
        if padding not in (None, True, False, "longest"):
            raise ArgumentError(f"padding must be True, False or 'longest': got {padding!r}; use True")
        most = self._text_limit(truncation, max_length, add_special_tokens)
        encoded = [self._encode(each, add_special_tokens, most) for each in texts]
        lengths = [len(each.ids) for each in encoded]
        tensors = return_tensors == "pt"
        longest = max(lengths, default=0)
        if tensors and padding is False and lengths.count(longest) < len(lengths):
            raise ArgumentError(
                f"padding must be True for tensors of texts of lengths {lengths}: got False; leave it out"
            )
        fill = next((i for i in (self.pad_token_id, self.bos_token_id) if i is not None), 0)
        columns: dict[str, tuple[list[Any], Any]] = {  # of every text, and what it is filled up with
            "input_ids": ([each.ids for each in encoded], fill),
            "attention_mask": ([[1] * length for length in lengths], 0),
        }
        if return_offsets_mapping:
            columns["offset_mapping"] = ([each.offsets for each in encoded], (0, 0))
        is_padded = padding or (tensors and padding is None)
        result: dict[str, Any] = {
            name: [row + [end] * (longest - len(row)) for row in rows] if is_padded else rows
            for name, (rows, end) in columns.items()
        }
        if tensors:
            for name, rows in result.items():
                shape = (len(texts), longest, 2) if name == "offset_mapping" else (len(texts), longest)
                result[name] = torch.tensor(rows, dtype=torch.int64).reshape(shape)
            result["lengths"] = torch.tensor(lengths, dtype=torch.int64)
        elif isinstance(text, str):
            result = {name: rows[0] for name, rows in result.items()}
        return result

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of one text."""
        ids: list[int] = self(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def _text_limit(self, truncation: bool, max_length: int | None, special: bool) -> int | None:
        """Return how many tokens of a text there may be, special ones aside; None: all."""
        if not isinstance(truncation, bool):
            raise ArgumentError(f"truncation must be True or False: got {truncation!r}; True cuts the end")
        if not truncation:
            if max_length is not None:
                raise ArgumentError(
                    f"max_length must be given with truncation=True: got {max_length} without it; give both"
                )
            return None
        most = self.model_max_length if max_length is None else max_length
        around = self._inner.num_special_tokens_to_add(False) if special else 0
        if isinstance(most, bool) or not isinstance(most, int) or most <= around:
            raise ArgumentError(
                f"max_length must be above {around}, the number of special tokens: got {most!r}; try 512"
            )
        return most - around

    def _encode(self, text: str, special: bool, most: int | None) -> tokenizers.Encoding:
        check_letters(text)
        try:
            if most is None:
                return self._inner.encode(text, add_special_tokens=special)
            bare = self._inner.encode(text, add_special_tokens=False)
        except Exception as error:  # of the library itself
            raise ArgumentError(
                f"text must contain only words of the tokenizer: got {text[:40]!r} ({error}); use the "
                "model's own tokenizer"
            ) from error
        bare.truncate(most)
        return self._inner.post_process(bare, None, special)

    # And back

    def decode(
        self,
        tokens: int | Iterable[int] | Tensor,
        /,
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        """Return the text of token ids: a list, or a tensor of one sequence.

        Raises:
            ArgumentError: unknown ids; clean_up_tokenization_spaces=True, which would change the text.
        """
        if clean_up_tokenization_spaces:
            raise ArgumentError(
                "clean_up_tokenization_spaces must be False: got True, which would change the text; leave it "
                "out"
            )
        ids = self._ids(tokens)
        return self._inner.decode(ids, skip_special_tokens=skip_special_tokens)

    @overload
    def convert_ids_to_tokens(self, ids: int, /) -> str: ...

    @overload
    def convert_ids_to_tokens(self, ids: Iterable[int] | Tensor, /) -> list[str]: ...

    def convert_ids_to_tokens(self, ids: int | Iterable[int] | Tensor, /) -> str | list[str]:
        """Return readable tokens: no leading space, ␣ for a space alone, <C3> for a part of a letter."""
        if isinstance(ids, int):
            return self._shown(self._ids(ids)[0])
        return [self._shown(token) for token in self._ids(ids)]

    def _shown(self, token: int) -> str:
        if token in self._special:
            return self._special[token]
        text: str = self._inner.decode([token], skip_special_tokens=False)
        if "\N{REPLACEMENT CHARACTER}" in text:
            return shown_bytes(self._inner.id_to_token(token) or "") or text
        return text.strip(" ") or SPACE

    def _ids(self, tokens: int | Iterable[int] | Tensor) -> list[int]:
        if isinstance(tokens, Tensor):
            if tokens.ndim > 1:
                raise ArgumentError(
                    f"tokens must be one sequence: got a tensor {list(tokens.shape)}; pass one row of it"
                )
            tokens = tokens.tolist()
        ids = [tokens] if isinstance(tokens, int) else list(tokens)
        for token in ids:
            if not hasattr(token, "__index__"):
                raise ArgumentError(
                    f"tokens must be whole numbers: got {token!r}; pass the ids that encode returns"
                )
            if not 0 <= token < self._size:
                raise ArgumentError(
                    f"tokens must be ids below {self.vocab_size}: got {token}; use the tokenizer that "
                    "made the ids"
                )
        return ids

    # Properties

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, special tokens included."""
        return self._size

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of special tokens, which stand for no text."""
        return list(self._special)

    def __repr__(self) -> str:
        special = ", ".join(f"{token}={name!r}" for token, name in self._special.items())
        return f"BytePairs({self.vocab_size} tokens{', ' * bool(special)}{special})"


def check_letters(text: str) -> None:
    """Raise `ArgumentError` for surrogates, which a command line contains for bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = text[error.start]
        raise ArgumentError(
            f"text must be valid Unicode: got a lone surrogate, {surrogate!r}; write the text in UTF-8"
        ) from error


def _library() -> Any:
    with needed("tokenizers", "a model's own tokenizer needs tokenizers"):
        import tokenizers

    return tokenizers


def _kind(text: object) -> str:
    if isinstance(text, (list, tuple)):
        other = next(each for each in text if not isinstance(each, str))
        return f"a {type(text).__name__} with a {type(other).__name__} in it"
    return type(text).__name__


# The letters that stand for bytes in byte-level vocabularies: themselves where they can be seen, else those
# from 256 on, in order. Radford 2019.
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_HIDDEN = [byte for byte in range(256) if byte not in _PRINTABLE]
LETTERS = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + at): byte for at, byte in enumerate(_HIDDEN)}


def shown_bytes(entry: str) -> str:
    """Return the text of an entry of a byte-level vocabulary without spaces around it: letters, and bytes
    as <C3> where no letter is whole.

    Example:
        >>> shown_bytes("ĠcafÃ©"), shown_bytes("Ã")
        ('café', '<C3>')
    """
    data = bytes(LETTERS[letter] for letter in entry if letter in LETTERS)
    text = data.decode("utf-8", "surrogateescape").strip(" ")  # a byte that is no letter: 0xDC00 and the byte
    return re.sub("[\udc80-\udcff]", lambda match: f"<{ord(match[0]) - 0xDC00:02X}>", text)
