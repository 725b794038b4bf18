"""Requests of the page and their replies: "headwise serve 1".

`page/src/heads/served/protocol.ts` describes the same messages. A request is JSON. A reply is a header in
JSON, and for maps and outputs of heads an array, packed as in a page of one file. Positions are counted
without padding; a range is [from, to).
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any

from ..errors import ArgumentError

PROTOCOL = "headwise serve 1"
MOST_CHARACTERS = 4_000_000  # of a text
MOST_IMAGE_BYTES = 8 * 2**20
MOST_REQUEST_BYTES = 16 * 2**20
MOST_FACTORS = 4096
MOST_MAPS = 256  # in one request
LARGEST_FACTOR = 100.0
DIGITS = r"[0-9]{1,6}"  # of a layer or a head
HEAD_NAME = re.compile(rf"({DIGITS})\.({DIGITS})")

STATUS = {"refused": 400, "token": 403, "superseded": 409, "gone": 410, "failed": 500, "busy": 503}


class Refusal(Exception):
    """A request that gets an error as its reply; `kind` is a key of `STATUS`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind

    @property
    def reply(self) -> dict[str, str]:
        """Return the header of the reply."""
        return {"error": str(self), "kind": self.kind}


@dataclass(frozen=True)
class Read:
    """Run the model on a text or an image.

    Attributes:
        client: names the page that asks; `number` counts its reads, and a newer one cancels older ones.
        slot: 0 for the text, 1 for the text that it is compared with; each is cancelled separately.
        appended: token ids after the text.
        image: the bytes of an image file; None: a text, or the example.
        factors: (layer, head) -> what the head's output is multiplied by; 0 switches it off.
        maps: (layer, head) of the maps of weights that come with the reply; pooled maps, and heads that the
            text does not have, are left out.
    """

    client: str
    number: int
    slot: int = 0
    text: str = ""
    appended: tuple[int, ...] = ()
    image: bytes | None = None
    factors: dict[tuple[int, int], float] = field(default_factory=dict)
    maps: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Maps:
    """Return the maps of some heads of a reading, one behind the other."""

    reading: str
    heads: tuple[tuple[int, int], ...]  # (layer, head)
    measure: str = "weights"  # or "written"


@dataclass(frozen=True)
class OfHead:
    """Return a region of the map, the output or the strongest pairs of one head of a reading."""

    part: str  # "region", "output" or "pairs"
    reading: str
    layer: int
    head: int
    queries: tuple[int, int] = (0, 0)  # of a region
    keys: tuple[int, int] = (0, 0)
    most: int = 0  # pairs


@dataclass(frozen=True)
class Distances:
    """Return how far the heads of a layer are apart."""

    reading: str
    layer: int


@dataclass(frozen=True)
class Changes:
    """Compare two readings token by token."""

    readings: tuple[str, str]


@dataclass(frozen=True)
class Progress:
    """Return how many layers of the current read are done; it does not wait for the model."""

    client: str


Request = Read | Maps | OfHead | Distances | Changes | Progress


@dataclass(frozen=True)
class Reply:
    """The header of a reply, and the bytes of its array, not yet compressed; None: no array."""

    header: dict[str, Any]
    array: bytes | None = None

    @property
    def packed(self) -> bytes | None:
        """Return the array compressed, as the page reads it."""
        return None if self.array is None else zlib.compress(self.array, 1)

    def to_bytes(self) -> bytes:
        """Return length and text of the header, and the compressed array."""
        header = json.dumps(self.header, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        encoded = header.encode("utf-8", "replace")
        return struct.pack("<I", len(encoded)) + encoded + (self.packed or b"")


def request_of(data: Any) -> Request:
    """Return the request in a decoded JSON value.

    Raises:
        ArgumentError: a field that is missing, of another type, or out of its range.
    """
    if not isinstance(data, dict):
        raise ArgumentError(f"request must be an object: got {type(data).__name__}; reload the page")
    kind = data.get("ask")
    if kind == "read":
        return _read_of(data)
    if kind == "maps":
        return _maps_of(data)
    if kind in ("region", "output", "pairs"):
        return OfHead(
            part=kind,
            reading=_text(data, "reading", 100),
            layer=_count(data, "layer"),
            head=_count(data, "head"),
            queries=_range(data, "queries") if kind == "region" else (0, 0),
            keys=_range(data, "keys") if kind == "region" else (0, 0),
            most=min(_count(data, "most"), 1000) if kind == "pairs" else 0,
        )
    if kind == "distances":
        return Distances(_text(data, "reading", 100), _count(data, "layer"))
    if kind == "changes":
        readings = data.get("readings")
        if not (
            isinstance(readings, list) and len(readings) == 2 and all(isinstance(r, str) for r in readings)
        ):
            raise ArgumentError(f"readings must be two names: got {readings!r:.100}; reload the page")
        return Changes((readings[0], readings[1]))
    if kind == "progress":
        return Progress(_text(data, "client", 100))
    raise ArgumentError(
        f"ask must be read, maps, region, output, pairs, distances, changes or progress: got {kind!r:.100}; "
        "reload the page"
    )


def _read_of(data: dict[str, Any]) -> Read:
    appended = data.get("appended", [])
    if not isinstance(appended, list) or not all(_is_count(token) for token in appended):
        raise ArgumentError(f"appended must be token ids: got {appended!r:.100}; reload the page")
    slot = _count(data, "slot")
    if slot > 1:
        raise ArgumentError(f"slot must be 0 or 1: got {slot}; reload the page")
    return Read(
        client=_text(data, "client", 100),
        number=_count(data, "number"),
        slot=slot,
        text=_text(data, "text", MOST_CHARACTERS),
        appended=tuple(appended),
        image=_image(data.get("image")),
        factors=_factors(data.get("factors", {})),
        maps=_heads(data.get("maps", []), "maps", 0),
    )


def _maps_of(data: dict[str, Any]) -> Maps:
    measure = data.get("measure", "weights")
    if measure not in ("weights", "written"):
        raise ArgumentError(f"measure must be weights or written: got {measure!r:.100}; reload the page")
    return Maps(_text(data, "reading", 100), _heads(data.get("heads"), "heads", 1), measure)


def _heads(pairs: object, name: str, least: int) -> tuple[tuple[int, int], ...]:
    """Return the (layer, head) of a list of pairs."""
    if (
        not isinstance(pairs, list)
        or not least <= len(pairs) <= MOST_MAPS
        or not all(isinstance(pair, list) and len(pair) == 2 and all(map(_is_count, pair)) for pair in pairs)
    ):
        raise ArgumentError(
            f"{name} must be {least} to {MOST_MAPS} pairs [layer, head]: got {pairs!r:.100}; reload the page"
        )
    return tuple((layer, head) for layer, head in pairs)


def _image(encoded: object) -> bytes | None:
    if encoded is None:
        return None
    import base64
    import binascii

    if not isinstance(encoded, str):
        raise ArgumentError(f"image must be base64: got {type(encoded).__name__}; reload the page")
    if len(encoded) * 3 // 4 > MOST_IMAGE_BYTES:
        raise ArgumentError(
            f"image must have at most {MOST_IMAGE_BYTES // 2**20} MiB: got "
            f"{len(encoded) * 3 / 4 / 2**20:.1f} MiB; make it smaller"
        )
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ArgumentError(f"image must be base64: {error}; reload the page") from None


def _factors(data: object) -> dict[tuple[int, int], float]:
    """Return {(layer, head): factor} of {"layer.head": factor}; factors of 1 are left out."""
    if not isinstance(data, dict) or len(data) > MOST_FACTORS:
        raise ArgumentError(
            f"factors must be an object of at most {MOST_FACTORS} heads: got {data!r:.100}; reload the page"
        )
    factors: dict[tuple[int, int], float] = {}
    for name, factor in data.items():
        match = HEAD_NAME.fullmatch(name)
        if match is None:
            raise ArgumentError(f"factors must name heads as layer.head: got {name!r:.100}; try 2.3")
        is_number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        if not is_number or not abs(factor) <= LARGEST_FACTOR:  # so that NaN is refused
            raise ArgumentError(
                f"factors must be between -{LARGEST_FACTOR:g} and {LARGEST_FACTOR:g}: got {factor!r:.100} "
                f"for head {name}; 0 switches a head off"
            )
        if factor != 1:
            factors[int(match[1]), int(match[2])] = float(factor)
    return factors


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _count(data: dict[str, Any], name: str) -> int:
    value = data.get(name)
    if not _is_count(value):
        raise ArgumentError(f"{name} must be a whole number from 0: got {value!r:.100}; reload the page")
    assert isinstance(value, int)
    return value


def _range(data: dict[str, Any], name: str) -> tuple[int, int]:
    value = data.get(name)
    if not isinstance(value, list) or len(value) != 2 or not all(_is_count(each) for each in value):
        raise ArgumentError(f"{name} must be [from, to]: got {value!r:.100}; reload the page")
    start, end = value
    if start >= end:
        raise ArgumentError(f"{name} must hold a position: got {value!r}; reload the page")
    return start, end


def _text(data: dict[str, Any], name: str, most: int) -> str:
    value = data.get(name)
    if not isinstance(value, str):
        raise ArgumentError(f"{name} must be a text: got {type(value).__name__}; reload the page")
    if len(value) > most:
        raise ArgumentError(
            f"{name} must have at most {most:,} characters: got {len(value):,}; make it shorter"
        )
    return value
