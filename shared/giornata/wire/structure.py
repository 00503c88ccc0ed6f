"""Limits on the structure of what strangers send: values, names and depth, held before Python makes objects of it.

Bytes bound neither time nor memory: a mebibyte of empty lists takes Python a hundred mebibytes, and time in which no
other request is answered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from giornata.wire.errors import PayloadTooLarge

VALUES: Final = 16_384
"""Most values of one message. A request for pictures has about a hundred."""
NAMES: Final = 256
"""Most names of one map, and most items of one list in msgpack."""
DEPTH: Final = 32
NUMBER_CHARACTERS: Final = 64
TEXT_BYTES: Final = 128 << 10
"""Longest text in msgpack, a prompt of 32,000 characters; pictures are binary there."""
ESCAPES: Final = 64 << 10
"""Escapes of such a prompt in JSON that is ASCII alone: two for a character outside of the basic plane."""
ESCAPE_EVERY: Final = 32
"""In JSON one byte in so many may begin an escape, beside :data:`ESCAPES`: PHP writes base64's ``/`` with one."""


class JsonLimits:
    """Counts what JSON text can become, piece by piece as the text arrives.

    The count includes the punctuation inside of texts, which is cheap, and never too few.
    """

    def __init__(self) -> None:
        self._size_bytes = self._values = self._escapes = 0

    def take(self, piece: bytes) -> None:
        """Count the next piece; PayloadTooLarge where the text holds too much."""
        self._size_bytes += len(piece)
        self._values += sum(map(piece.count, b"[{:,"))
        self._escapes += piece.count(b"\\")
        if self._values > VALUES or self._escapes > ESCAPES + self._size_bytes // ESCAPE_EVERY:
            raise PayloadTooLarge(
                "The JSON holds too many values.",
                received=f"more in its first {self._size_bytes} bytes",
                accepted=f"at most {VALUES} commas, colons and brackets, and {ESCAPES} escapes",
            )


def read_json(text: str, named: Callable[[Sequence[tuple[str, Any]]], dict[str, Any]] = dict) -> Any:
    """The value in JSON that :class:`JsonLimits` has let through; ValueError or RecursionError where it is refused.

    `named` makes a map of names and values, and may refuse it.
    """

    def few(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        if len(pairs) > NAMES:
            raise ValueError(f"an object has {len(pairs)} names, and at most {NAMES} are accepted")
        return named(pairs)

    numbers: dict[str, Any] = {"parse_int": _integer, "parse_float": _number, "parse_constant": _no_number}
    return within_depth(json.loads(text, object_pairs_hook=few, **numbers))


def within_depth(value: Any) -> Any:
    """`value`; ValueError where lists and maps lie within each other more than :data:`DEPTH` deep."""
    layer = [value]
    for _ in range(DEPTH):
        inner = [
            part.values() if isinstance(part, dict) else part
            for part in layer
            if isinstance(part, dict | list)
        ]
        layer = [one for part in inner for one in part]
    if layer:
        raise ValueError(f"it is more than {DEPTH} levels deep")
    return value


def unpack_limits() -> dict[str, Any]:
    """Options for msgpack's unpacker that let one message through where it holds no more than the limits."""
    left = VALUES

    def counted(part: Sequence[Any]) -> Sequence[Any]:
        nonlocal left
        left -= 1 + len(part)
        if left < 0:
            raise ValueError(f"it holds more than {VALUES} values")
        return part

    return {
        "list_hook": counted,
        "object_hook": counted,
        "max_array_len": NAMES,
        "max_map_len": NAMES,
        "max_str_len": TEXT_BYTES,
        "max_ext_len": NUMBER_CHARACTERS,
    }


def _integer(digits: str) -> int:
    return int(_short(digits))


def _number(digits: str) -> float:
    return float(_short(digits))


def _short(digits: str) -> str:
    if len(digits) > NUMBER_CHARACTERS:
        raise ValueError(f"a number has {len(digits)} characters")
    return digits


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")
