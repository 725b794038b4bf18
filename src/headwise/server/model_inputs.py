"""What a page sends, a text or an image, as the input of a model; and the MODEL argument as a model.

A text is read as in `headwise look`: from its beginning, as far as the model and the limit allow. Token ids
that the page appended follow the text.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import io
import os
import re
import sys
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, needed
from ..models.pretrained import (
    Pretrained,
    Tokenizer,
    load_with_head,
    most_tokens,
    read,
    token_name,
)
from ..models.transformer import Transformer
from .protocol import Read

EXAMPLE = "The cat that I saw yesterday ran away"
MASKED_EXAMPLE = "The cat sat on the {mask} because it was tired."
MOST_PIXELS = 50_000_000  # of an image file
MOST_ASPECT = 20  # the longer side by the shorter one
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
PREDICT_NEXT = ("ForCausalLM", "LMHeadModel")  # ends of names of classes
OTHER_KINDS = re.compile(r"(ForMaskedLM|ForPreTraining)$|Classification")
SIDE = 224  # of the example image, in pixels
FUNCTION = re.compile(r"(?P<module>[\w.]+|.+\.py):(?P<function>[A-Za-z_]\w*)")


@dataclass(frozen=True, eq=False)
class Prepared:
    """The input of one forward.

    Attributes:
        inputs: the arguments of the model's forward.
        ids: token ids of the text, without a batch; empty for an image.
        names: what readers call the tokens; None for an image.
        prompt: how many of the tokens come from the text; the others were appended.
        all_tokens: of the whole text, with what was left out.
        pixels: an image as the model reads it, [H, W, 3] from 0 to 1.
        key: equal for equal inputs.
    """

    inputs: dict[str, Any]
    ids: list[int]
    names: list[str] | None
    prompt: int
    all_tokens: int
    pixels: Tensor | None
    key: tuple[Any, ...]

    @property
    def tokens(self) -> int:
        """Return the number of tokens that the model reads; 0 for an image."""
        return len(self.ids)


class ModelInput(Protocol):
    """Turns what a page sends into the input of a model."""

    @property
    def kind(self) -> str:
        """Return "text" or "image"."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def example(self) -> str:
        """Return the text that is read first."""

    @property
    def max_tokens(self) -> int:
        """Return the longest text that is read in full; 0 for images."""

    def prepare(self, request: Read) -> Prepared:
        """Return the input of a forward, or raise `ArgumentError`."""


class TextInput:
    """Texts, for models with a tokenizer."""

    kind = "text"

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, max_tokens: int, example: str | None = None
    ) -> None:
        if max_tokens < 2:
            raise ArgumentError(f"max_tokens must be at least 2: got {max_tokens}; try 4096")
        self.model, self.tokenizer = model, tokenizer
        limit = most_tokens(model, tokenizer)
        self.max_tokens = max_tokens if limit is None else min(limit, max_tokens)
        self.mask_token: str | None = None
        if type(model).__name__.endswith(("ForMaskedLM", "ForPreTraining")):
            self.mask_token = getattr(tokenizer, "mask_token", None)
        masked = EXAMPLE if self.mask_token is None else MASKED_EXAMPLE.format(mask=self.mask_token)
        self.example = masked if example is None else example
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        parameters = inspect.signature(model.forward).parameters
        # without a cache of keys, and without logits of all positions: both grow with the text
        self._options: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters else {}
        if "logits_to_keep" in parameters:
            self._options["logits_to_keep"] = 1
        if isinstance(model, Transformer) and "last" in parameters:
            self._options["last"] = model.config.kind == "decoder" and model.config.output is not None
        embedded = getattr(model, "get_input_embeddings", lambda: None)()
        tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
        self._vocab_size: int | None = (
            model.config.vocab_size
            if isinstance(model, Transformer)
            else getattr(embedded, "num_embeddings", max(tables, default=None))
        )
        self._special_end: int | None = None

    def prepare(self, request: Read) -> Prepared:
        """Return the tokens of a text, and those appended to it."""
        if request.image is not None:
            raise ArgumentError("image must be left out for a model that reads text: got one; type a text")
        reading = read(request.text, self.model, self.tokenizer, most=self.max_tokens)
        inputs = dict(reading.inputs)
        appended = list(request.appended)
        name = next(name for name in ("ids", "input_ids", *inputs) if name in inputs)
        all_ids = inputs[name][0].tolist()
        T = len(all_ids)
        if self._goes_on(appended):  # the next token is that of the text, not the one after its end token
            T -= min(self._special_tokens_at_end(all_ids), self._added_at_end(), T - 1)
            inputs = {key: value[:, :T] for key, value in inputs.items()}
        if appended:
            self._check_appended(appended, T)
            inputs = {key: self._longer(key, value, appended, key == name) for key, value in inputs.items()}
        ids: list[int] = inputs[name][0].tolist()
        names = reading.tokens[:T] + [name_of(self.tokenizer, token) for token in appended]
        return Prepared(
            inputs={key: value.to(self._device) for key, value in inputs.items()} | self._options,
            ids=ids,
            names=names,
            prompt=T,
            all_tokens=reading.total - (len(all_ids) - T) + len(appended),
            pixels=None,
            key=("text", request.text, request.appended),
        )

    def _goes_on(self, appended: list[int]) -> bool:
        """Return True if the model continues the text."""
        if isinstance(self.model, Transformer):
            return self.model.config.kind == "decoder"
        name = type(self.model).__name__
        return name.endswith(PREDICT_NEXT) or (bool(appended) and OTHER_KINDS.search(name) is None)

    def _added_at_end(self) -> int:
        """Return how many special tokens the tokenizer adds behind a text; others are in the text."""
        if self._special_end is None:
            self._special_end = self._special_tokens_at_end(list(map(int, self.tokenizer("a")["input_ids"])))
        return self._special_end

    def _special_tokens_at_end(self, ids: list[int]) -> int:
        special = set(self.tokenizer.all_special_ids)
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        if unknown != getattr(self.tokenizer, "eos_token_id", None):  # GPT-2 has a single token for both
            special.discard(unknown)
        return next((n for n, token in enumerate(reversed(ids)) if token not in special), len(ids))

    def _check_appended(self, appended: list[int], prompt: int) -> None:
        if prompt + len(appended) > self.max_tokens:
            raise ArgumentError(
                f"text must have at most {self.max_tokens:,} tokens: got {prompt + len(appended):,} with "
                "those appended; shorten it"
            )
        if self._vocab_size is not None and max(appended) >= self._vocab_size:
            raise ArgumentError(
                f"appended must be ids of the vocabulary: got {max(appended)} of {self._vocab_size}; reload "
                "the page"
            )

    @staticmethod
    def _longer(name: str, value: Tensor, appended: list[int], are_ids: bool) -> Tensor:
        """Return an input with the appended tokens: their ids, or the last value, as in a mask."""
        if are_ids:
            more = torch.tensor([appended], dtype=value.dtype)
        else:
            more = value[:, -1:].expand(-1, len(appended))
        return torch.cat([value, more], dim=1)


def is_entry(tokenizer: Tokenizer, token: int) -> bool:
    """Return False for an id beyond the tokenizer: vocabularies of models are often padded."""
    return not isinstance(tokenizer, Sized) or token < len(tokenizer)


def name_of(tokenizer: Tokenizer, token: int) -> str:
    """Return what readers call a token, also one beyond the tokenizer."""
    return token_name(tokenizer, token) if is_entry(tokenizer, token) else f"token {token}"


class ImageInput:
    """Images, for models with an image processor: a function of a PIL image."""

    kind, example, max_tokens = "image", "", 0
    tokenizer = None

    def __init__(self, model: nn.Module, processor: Any) -> None:
        if not callable(processor):
            raise ArgumentError(
                f"tokenizer must be a tokenizer, or a function of an image: got {type(processor).__name__}; "
                "pass the model's own"
            )
        with needed("PIL", "images need pillow", "pip install pillow"):
            from PIL import Image  # noqa: F401, images are opened later
        self.model, self.processor = model, processor
        first = next(model.parameters(), torch.empty(0))
        self._device, self._dtype = first.device, first.dtype
        try:
            self._named = "images" in inspect.signature(processor).parameters
        except (TypeError, ValueError):
            self._named = True

    def prepare(self, request: Read) -> Prepared:
        """Return the pixels of an image file, or of the example, as the model takes them."""
        image = _example_image() if request.image is None else _opened(request.image)
        made = self.processor(images=image, return_tensors="pt") if self._named else self.processor(image)
        if isinstance(made, Tensor):
            made = {self._first_argument: made}
        if not isinstance(made, Mapping):
            raise ArgumentError(
                f"tokenizer must return a tensor or a mapping of tensors: got {type(made).__name__}; return "
                "[3, H, W]"
            )
        inputs = {name: self._batched(value) for name, value in made.items() if isinstance(value, Tensor)}
        pixels = next((value for value in inputs.values() if value.ndim == 4), None)
        digest = hashlib.sha256(request.image or b"").hexdigest()
        return Prepared(inputs, [], None, 0, 0, _shown(pixels), ("image", digest))

    @property
    def _first_argument(self) -> str:
        return next(iter(inspect.signature(self.model.forward).parameters))

    def _batched(self, value: Tensor) -> Tensor:
        value = value[None] if value.ndim == 3 else value
        return value.to(self._device, self._dtype if value.is_floating_point() else value.dtype)


def _opened(data: bytes) -> Any:
    """Return the image in a file, in RGB, upright, and on white where it is transparent."""
    from PIL import Image, ImageOps

    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height > MOST_PIXELS:
            raise ArgumentError(
                f"image must have at most {MOST_PIXELS:,} pixels: got {width} x {height} = "
                f"{width * height:,}; make it smaller"
            )
        if max(width, height) > MOST_ASPECT * min(width, height):
            raise ArgumentError(
                f"image must be at most {MOST_ASPECT} times as long as it is wide: got {width} x {height}; "
                "cut it"
            )
        return _in_colours(ImageOps.exif_transpose(image))
    except ArgumentError:
        raise
    except Exception as error:  # damaged files raise many classes
        reason = str(error).partition("\n")[0]
        raise ArgumentError(
            f"image must be a PNG, JPEG or another image file: {reason}; choose another"
        ) from None


def _in_colours(image: Any) -> Any:
    """Return an image in RGB, its numbers scaled to 8 bits, and on white where it is transparent."""
    from PIL import Image

    if image.mode == "I" or image.mode.startswith("I;16"):
        image = image.convert("I")
        scale = 255 / max(65535, image.getextrema()[1])
        image = image.point(lambda value: value * scale + 0.5).convert("L")
        image.info.pop("transparency", None)
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _example_image() -> Any:
    """Return a picture with a few shapes, drawn here."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE, SIDE), "#8fb8de")
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 150, SIDE, SIDE), fill="#5d9b58")
    draw.ellipse((150, 20, 200, 70), fill="#ffd84d")
    draw.rectangle((40, 90, 110, 170), fill="#b5523b")
    draw.polygon(((30, 90), (120, 90), (75, 45)), fill="#6b3a2e")
    return image


def _shown(pixels: Tensor | None) -> Tensor | None:
    """Return the pixels of the first image as colours from 0 to 1, [H, W, 3]; None if they are none."""
    if pixels is None or pixels.shape[1] not in (1, 3):
        return None
    image = pixels[0].detach().float().cpu().permute(1, 2, 0)
    low, high = image.amin(), image.amax()
    image = (image - low) / (high - low).clamp(min=1e-6)
    return image.expand(-1, -1, 3) if image.shape[2] == 1 else image


# The MODEL argument


def load_model(name: str) -> Pretrained:
    """Return the model of `headwise serve MODEL`, with its output layer.

    Args:
        name: mini, minilm, a folder, a name on the Hugging Face hub, or MODULE:FUNCTION or FILE.py:FUNCTION,
            a function without arguments that returns (model, tokenizer), or (model, tokenizer, title).

    Raises:
        ArgumentError: no such model, module, file or function; a function that returns something else.
    """
    match = FUNCTION.fullmatch(name)
    if match is None or Path(os.path.expanduser(name)).exists():
        return load_with_head(name)
    try:
        made = _function(match["module"], match["function"])()
    except ArgumentError:
        raise
    except Exception as error:  # of the user's code
        reason = str(error).strip().partition("\n")[0]
        raise ArgumentError(
            f"MODEL must run without an error: {name} raised {type(error).__name__}: {reason:.300}; run it "
            "by itself to see where"
        ) from error
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise ArgumentError(
            f"{name} must return (model, tokenizer): got {_described(made)}; return a torch.nn.Module and "
            "its tokenizer"
        )
    model, tokenizer, *title = made
    return Pretrained(model.eval(), tokenizer, str(title[0]) if title else type(model).__name__)


def _described(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(each).__name__ for each in value)})"
    return type(value).__name__


def _function(module_name: str, function_name: str) -> Any:
    """Import a module by its name, or a file by its path, and return one of its functions."""
    if module_name.endswith(".py"):
        path = Path(os.path.expanduser(module_name)).resolve()
        if not path.is_file():
            raise ArgumentError(
                f"MODEL must name a file that exists: there is no {module_name!r}; check the name"
            )
        module = _module_of(path)
    else:
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as `python -m` does
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            raise ArgumentError(
                f"MODEL must name a module that can be imported: there is no {module_name!r}; run the "
                "command in the folder of the module, or pass FILE.py:FUNCTION"
            ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ArgumentError(
            f"MODEL must name a function: {module_name} has no function {function_name!r}; check the name"
        )
    return function


def _module_of(path: Path) -> ModuleType:
    """Import a file, also a second time; a module of the same name stays what it is."""
    name = path.stem
    before = sys.modules.get(name)
    if before is not None and getattr(before, "__file__", None) != str(path):
        name = f"{name}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:12]}"
        before = sys.modules.get(name)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a file that ends in .py has a spec"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:  # from the source: bytecode of a file that changed within a second would be taken for its own
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    except BaseException:
        if before is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = before
        raise
    return module
