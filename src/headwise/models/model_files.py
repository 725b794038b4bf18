"""A `Transformer` in a folder: config.json, model.safetensors and, where there is one, tokenizer.json.

What is read back is exactly what was written: every field of the config, every weight by its name, in the
dtype that the model had. Unknown and missing fields and weights raise errors. Weights may be stored in
fewer bits than the model computes in. Only JSON and safetensors are read, so no file can run code.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import REMEDIES, ArgumentError, HeadwiseError, needed
from ..nn.options import Buckets, QKNorm
from ..nn.rotary import Linear, Llama3, Ntk, Rope, Scaling, Yarn
from ..whole_files import whole_file
from .byte_pairs import VOCABULARY, BytePairs
from .transformer_config import TransformerConfig

if TYPE_CHECKING:
    from .transformer import Transformer

FORMAT, VERSION = "headwise", 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"
HEADER = ("format", "version", "title", "dtype", "stored", "config")
DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
DRAWS = {"normal_", "uniform_", "kaiming_uniform_", "xavier_uniform_"}  # of tensors, and of torch.nn.init
RECORDS = {"rope": Rope, "qk_norm": QKNorm, "relative_bias": Buckets}  # fields that hold a record
SCALINGS = {kind.__name__: kind for kind in (Linear, Ntk, Llama3, Yarn)}

Plain = dict[str, Any]  # what JSON holds


def save(
    self: Transformer,
    folder: str | os.PathLike[str],
    tokenizer: object = None,
    *,
    title: str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the model to a folder that `headwise.models.load(folder)` reads; no partial result is left.

        model.save("mine", tokenizer, dtype=torch.float16)
        model, tokenizer, title = headwise.models.load("mine")

    Args:
        folder: it is created if it does not exist; a model saved in it before is overwritten.
        tokenizer: a `BytePairs`, a Tokenizer of the library tokenizers, or a fast one of transformers; it is
            written to tokenizer.json.
        title: the name of the model; by default the folder's name.
        dtype: the dtype of the stored weights, by default the model's; torch.float16 halves the size of a
            float32 model. A loaded model always has the dtype that this model has now.

    Raises:
        ArgumentError: a folder with other content, or one that cannot be written to; a tokenizer that cannot
            be written or does not fit the model; a model that its config does not describe, for example after
            `headwise.prune`; weights outside the range of dtype.
        PackageMissing: safetensors or numpy is not installed.
    """
    with needed("safetensors", "saving a model needs safetensors"):
        import numpy  # noqa: F401 - safetensors saves by it, and does not bring it
        from safetensors.torch import save as to_bytes
    if title is not None and not isinstance(title, str):
        raise ArgumentError(
            f"title must be a string: got {type(title).__name__}; leave it out for the folder's name"
        )
    vocabulary = None if tokenizer is None else BytePairs.of(tokenizer)
    if vocabulary is not None:
        _check_fit(vocabulary, self.config)
    own = _own_dtype(self)
    stored = own if dtype is None else dtype
    if stored not in DTYPES.values():
        raise ArgumentError(f"dtype must be one of {', '.join(DTYPES)}: got {stored}; try torch.float16")
    header = (FORMAT, VERSION, title, _name_of(own), _name_of(stored), plain_config(self.config))
    config = json.dumps(dict(zip(HEADER, header, strict=True)), indent=1) + "\n"
    weights = to_bytes(_stored(self, stored), metadata={"format": "pt"})
    place = _place_for(folder, vocabulary is not None)
    contents = {WEIGHTS: weights, CONFIG: config.encode()}
    if vocabulary is not None:
        contents[VOCABULARY] = vocabulary.to_json().encode()
    for name in contents:
        if (place / name).is_dir():  # other files would be written before the error
            raise ArgumentError(
                f"folder must not contain a folder named {name}: got {str(place / name)!r}; choose another "
                "folder"
            )
    with ExitStack() as files:  # all files are complete before the first is renamed
        for name, content in contents.items():
            files.enter_context(whole_file(place / name, "folder")).write_bytes(content)


def _place_for(folder: str | os.PathLike[str], with_tokenizer: bool) -> Path:
    """Return the folder; create it if needed."""
    try:
        place = Path(folder).expanduser().resolve()
    except (TypeError, ValueError, RuntimeError) as error:  # a number; a null byte; a user without a home
        raise ArgumentError(f"folder must be a path: got {folder!r} ({error}); try 'mine'") from error
    if not place.parent.is_dir():
        raise ArgumentError(
            f"folder must be inside an existing folder: there is no {str(place.parent)!r}; create it first"
        )
    try:
        place.mkdir(exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            f"folder must be writable: {str(folder)!r} cannot be created ({error.strerror}); choose another"
        ) from error
    if (place / CONFIG).exists() and not is_ours(place):
        raise ArgumentError(
            f"folder must be empty or written by Transformer.save: {str(folder)!r} has another "
            f"{CONFIG}; choose another folder"
        )
    if not with_tokenizer and os.path.lexists(place / VOCABULARY):
        raise ArgumentError(
            f"tokenizer must be given if the folder contains one: {str(folder)!r} has a {VOCABULARY}; "
            "give it, or choose another folder"
        )
    return place


def _own_dtype(model: Transformer) -> torch.dtype:
    kinds = sorted({_name_of(parameter.dtype) for parameter in model.parameters()})
    if len(kinds) != 1 or kinds[0] not in DTYPES:
        raise ArgumentError(
            f"model must have one dtype of {', '.join(DTYPES)}: got {' and '.join(kinds)}; use model.float()"
        )
    return DTYPES[kinds[0]]


def _stored(model: Transformer, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights for the file by name, each once."""
    state: dict[str, Tensor] = model.state_dict()
    over = next((name for name, weight in state.items() if type(weight).__name__ == "DTensor"), None)
    if over is not None:
        raise ArgumentError(
            f"model must not be sharded to be saved: {over!r} {list(state[over].shape)} is a DTensor; use "
            "torch.distributed.checkpoint, or load its full state dict into a model in one process"
        )
    _check_described(model, state)
    tensors = {}
    for name in dict.fromkeys(_firsts(model).values()):
        weight = state[name]
        tensors[name] = weight.detach().to("cpu", dtype, copy=True).contiguous()
        if not torch.equal(tensors[name].isfinite(), weight.isfinite().cpu()):
            raise ArgumentError(
                f"dtype must hold every weight: {name!r} has {weight.abs().max().item():.3g}, above "
                f"the largest {_name_of(dtype)}, {torch.finfo(dtype).max:.3g}; use torch.bfloat16"
            )
    return tensors


def _check_described(model: Transformer, state: Mapping[str, Tensor]) -> None:
    """Raise unless the config makes a model with these very weights."""
    kind = type(model)
    if nn.Module not in kind.__bases__:  # a subclass; Transformer itself imports this file
        raise ArgumentError(
            f"model must be a plain Transformer: got the subclass {kind.__name__}; use torch.save"
        )
    with Undrawn():
        made = kind(model.config, device="meta")
    for name, shape, expected in _other_shapes(state, made.state_dict()):
        raise ArgumentError(
            f"model must match its config: {name!r} is {shape}, not {expected}; use torch.save for a model "
            "that was pruned or changed by hand"
        )
    meant = _firsts(made)
    for name, first in _firsts(model).items():
        if first != meant[name]:
            raise ArgumentError(
                f"model must share weights as its config does: {name!r} is {first!r}, not {meant[name]!r}; "
                "change the config, for example to output='tied'"
            )


def _firsts(model: Transformer) -> dict[str, str]:
    """Map every weight's name to the first name that it has: layers may share one."""
    names: dict[int, str] = {}
    weights = model.named_parameters(remove_duplicate=False)
    return {name: names.setdefault(id(weight), name) for name, weight in weights}


def _other_shapes(
    weights: Mapping[str, Tensor], wanted: Mapping[str, Tensor]
) -> Iterator[tuple[str, str, str]]:
    """Yield name and both shapes of each weight whose shapes differ; "absent" for a missing weight."""
    for name in dict.fromkeys((*wanted, *weights)):
        shape, expected = (str(list(x[name].shape)) if name in x else "absent" for x in (weights, wanted))
        if shape != expected:
            yield name, shape, expected


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# A config as JSON


def plain_config(record: Any, name: str = "config") -> Plain:
    """Return every field of a config, or of a record in it, as JSON holds it."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    plain = {field: _plain(f"{name}.{field}", value) for field, value in values.items()}
    _check_kinds(name, type(record), values)
    return {"name": type(record).__name__, **plain} if type(record) in SCALINGS.values() else plain


def _plain(name: str, value: object) -> object:
    if isinstance(value, tuple(RECORDS.values())) or type(value) in SCALINGS.values():
        return plain_config(value, name)
    if isinstance(value, tuple):
        return [_plain(name, each) for each in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise ArgumentError(
        f"config must hold only numbers, strings and settings of headwise.nn to be saved: {name} is "
        f"{value!r}; replace it"
    )


def config_of(plain: object, name: str = "config", kind: Any = TransformerConfig) -> Any:
    """Return the config, or the record of a kind in it, that was written."""
    values = dict(_checked_fields(name, plain, [field.name for field in fields(kind)]))
    for field, value in values.items():
        inner = f"{name}.{field}"
        if isinstance(value, list):
            values[field] = tuple(tuple(each) if isinstance(each, list) else each for each in value)
        elif isinstance(value, dict) and field in RECORDS:
            values[field] = config_of(value, inner, RECORDS[field])
        elif isinstance(value, dict) and field == "scaling":
            scaling = value.pop("name", None)
            if scaling not in SCALINGS:
                raise ArgumentError(
                    f"{inner} must be one of {', '.join(SCALINGS)}: got {scaling!r}; update headwise"
                )
            values[field] = config_of(value, inner, SCALINGS[scaling])
    _check_kinds(name, kind, values)
    return kind(**values)


def _check_kinds(name: str, kind: type, values: Mapping[str, object]) -> None:
    """Raise for a value of another type than its field, since a JSON file may hold any type."""
    for field, hint in get_type_hints(kind).items():
        if field in values and not _fits(values[field], hint):
            raise ArgumentError(
                f"{name}.{field} must be {hint if get_args(hint) else hint.__name__}: got {values[field]!r}; "
                "create the config again"
            )


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(
            isinstance(each, tuple) or _fits(each, int | None) for each in value
        )
    if get_args(hint):
        return any(_fits(value, each) for each in get_args(hint))
    if hint is Scaling:
        return type(value) in SCALINGS.values()
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _checked_fields(name: str, plain: object, names: Sequence[str]) -> Plain:
    """Return the fields; raise for the first that is unknown or missing."""
    if not isinstance(plain, dict):
        raise ArgumentError(f"{name} must be a JSON object: got {type(plain).__name__}; save the model again")
    for field in plain:
        if field not in names:
            raise ArgumentError(
                f"{name} must contain only fields that headwise knows: got {field!r}; update headwise"
            )
    for field in names:
        if field not in plain:
            raise ArgumentError(
                f"{name} must have all its fields: {field!r} is missing; save the model again"
            )
    return plain


# Reading


class Undrawn(TorchFunctionMode):
    """Skip random initialisation on the meta device, for which torch would load a slow library."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Plain | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in DRAWS:
            weight = args[0] if args else (kwargs or {})["tensor"]
            if weight.is_meta:
                return weight
        return func(*args, **(kwargs or {}))


def is_ours(folder: Path) -> bool:
    """Return True if a folder's config.json is one of `Transformer.save`."""
    try:
        text = (folder / CONFIG).read_text("utf-8")
        header = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return f'"format": "{FORMAT}"' in text  # damaged: `read` raises the error
    except (OSError, ValueError):
        return False
    return isinstance(header, dict) and header.get("format") == FORMAT


def read(folder: Path, kind: type[Transformer]) -> tuple[Transformer, str | None]:
    """Return the model that `save` has put there, in eval mode and main memory, and its title.

    Args:
        kind: `Transformer`, which imports this file.
    """
    header, tensors = _read_header(folder), _read_tensors(folder)
    try:
        config: TransformerConfig = config_of(header["config"])
        too_deep = config.num_layers > len(tensors)  # do not create that many layers
        with Undrawn():
            model = None if too_deep else kind(config, device="meta")
    except (HeadwiseError, TypeError, RuntimeError) as error:  # sizes that overflow in torch
        reason = str(error).partition("\n")[0]
        raise ArgumentError(
            f"model must have a valid config: {str(folder)!r} has none ({reason}); save the model again"
        ) from error
    if model is None:
        raise ArgumentError(
            f"weights must fit the config: {len(tensors)} tensors for num_layers = {config.num_layers} in "
            f"{str(folder)!r}; save the model again"
        )
    model.load_state_dict(_weights(folder, model, header, tensors), assign=True)
    return model.eval(), header["title"]


def read_tokenizer(folder: Path, config: TransformerConfig) -> BytePairs | None:
    """Return the tokenizer that was saved with a model of this config, or None."""
    if not (folder / VOCABULARY).is_file():
        return None
    tokenizer = BytePairs.from_file(folder / VOCABULARY, model_max_length=config.max_length)
    _check_fit(tokenizer, config)
    return tokenizer


def _read_header(folder: Path) -> Plain:
    try:
        plain = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(
            f"model must have a readable {CONFIG}: {str(folder)!r} has none ({error}); save the model again"
        ) from error
    is_object = isinstance(plain, dict)
    version = [plain.get("format"), plain.get("version")] if is_object else type(plain).__name__
    if version != [FORMAT, VERSION]:
        raise ArgumentError(
            f"model must be saved as format {FORMAT!r}, version {VERSION}: {str(folder)!r} is {version}; "
            "update headwise"
        )
    header = _checked_fields(CONFIG, plain, HEADER)
    for name in ("dtype", "stored"):
        if not isinstance(header[name], str) or header[name] not in DTYPES:
            raise ArgumentError(
                f"{name} must be one of {', '.join(DTYPES)}: {CONFIG} has {header[name]!r}; save again"
            )
    if not isinstance(header["title"], str | None):
        raise ArgumentError(f"title must be a string: {CONFIG} has {header['title']!r}; save the model again")
    return header


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    with needed("safetensors", "weights in files need safetensors", REMEDIES["tokenizers"]):
        from safetensors import SafetensorError, safe_open
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
    except (OSError, SafetensorError) as error:
        raise ArgumentError(
            f"model must have readable weights: {WEIGHTS} in {str(folder)!r} is not ({error}); save the "
            "model again"
        ) from error


def _weights(
    folder: Path, model: Transformer, header: Plain, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return every weight of the model by its name, in its dtype."""
    own, firsts = DTYPES[header["dtype"]], _firsts(model)
    wanted = {name: weight for name, weight in model.state_dict().items() if firsts[name] == name}
    for name, shape, expected in _other_shapes(tensors, wanted):
        raise ArgumentError(
            f"weights must fit the config: {name!r} is {shape}, not {expected}, in {str(folder)!r}; save "
            "the model again"
        )
    for name, weight in tensors.items():
        if _name_of(weight.dtype) != header["stored"]:
            raise ArgumentError(
                f"weights must have the dtype in {CONFIG}: {name!r} is {_name_of(weight.dtype)}, not "
                f"{header['stored']}; save the model again"
            )
    weights = {name: weight.to(own, copy=True) for name, weight in tensors.items()}
    return {name: weights[first] for name, first in firsts.items()}


def _check_fit(tokenizer: BytePairs, config: TransformerConfig) -> None:
    if tokenizer.vocab_size > config.vocab_size:
        raise ArgumentError(
            f"tokenizer must fit the model: {tokenizer.vocab_size} entries for a vocabulary of "
            f"{config.vocab_size}; use the model's own tokenizer"
        )
