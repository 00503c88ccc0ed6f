"""Messages as bytes: msgpack maps with string keys and a schema number, and limits on what strangers send."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import msgpack
from pydantic import BaseModel, ValidationError

from giornata.wire.errors import PayloadTooLarge, SchemaMismatch

# Limits on the structure of what strangers send: values, names and depth, held before Python makes objects
# of it.
#
# Bytes bound neither time nor memory: a mebibyte of empty lists takes Python a hundred mebibytes, and time
# in which no other request is answered.


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

    numbers: dict[str, Any] = {
        "parse_int": lambda digits: int(_short(digits)),
        "parse_float": lambda digits: float(_short(digits)),
        "parse_constant": _no_number,
    }
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


def _short(digits: str) -> str:
    if len(digits) > NUMBER_CHARACTERS:
        raise ValueError(f"a number has {len(digits)} characters")
    return digits


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


# Messages as bytes: msgpack maps with string keys and a schema number.
#
# A reader accepts its own schema number and the one before, and names missing fields. It ignores unknown
# fields of messages, and keeps those of records (`giornata.wire.values.RecordModel`). Golden bytes in
# ``tests/contract`` pin the encoding.


SCHEMA = 1
"""Raised whenever an older reader would misunderstand a message."""
ACCEPTED_SCHEMAS = frozenset({SCHEMA - 1, SCHEMA} - {0})
MAX_CONTROL_BYTES = 256 * 1024
"""Control messages stay small; pictures and tensors travel as claim checks."""
TOLD = 10
"""Most fields at fault that an error names."""

M = TypeVar("M", bound=BaseModel)


def encode(message: BaseModel, *, limit_bytes: int = MAX_CONTROL_BYTES) -> bytes:
    """`message` as msgpack, with the schema number and without None fields; PayloadTooLarge above `limit_bytes`."""
    fields = message.model_dump(mode="python", exclude_none=True)
    packed: bytes = msgpack.packb({"schema": SCHEMA, **fields}, use_bin_type=True)
    if len(packed) > limit_bytes:
        raise PayloadTooLarge(
            f"A {type(message).__name__} message is too large.",
            received=f"{len(packed)} bytes",
            accepted=f"at most {limit_bytes} bytes",
        )
    return packed


def decode(kind: type[M], data: bytes) -> M:
    """The `kind` in msgpack bytes; SchemaMismatch names a wrong schema, and all fields that are missing or wrong."""
    return validated(kind, fields_of(kind, data))


def fields_of(kind: type[BaseModel], data: bytes, *, limited: bool = False) -> dict[str, Any]:
    """The fields of a `kind` in msgpack bytes, not validated; SchemaMismatch if this version cannot read them.

    `limited` holds a stranger's message to :mod:`giornata.wire.codec`.
    """
    fields = unpack(data, limited=limited)
    schema = fields.pop("schema", None)
    if not isinstance(schema, int) or schema not in ACCEPTED_SCHEMAS:
        raise SchemaMismatch(
            f"A {kind.__name__} message has an unreadable schema number.",
            received=schema if isinstance(schema, int) else type(schema).__name__,
            accepted=" or ".join(str(number) for number in sorted(ACCEPTED_SCHEMAS)),
        )
    return fields


def validated(kind: type[M], fields: dict[str, Any]) -> M:
    """The `kind` with these fields; SchemaMismatch names all that are missing or wrong."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        told = error.errors(include_input=False, include_context=False, include_url=False)
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in told[:TOLD])
        if len(told) > TOLD:
            wrong += f"; and {len(told) - TOLD} more"
        raise SchemaMismatch(f"A {kind.__name__} message is malformed: {wrong}.") from error


def unpack(data: bytes, *, limited: bool = False) -> dict[str, Any]:
    """The map in `data`; SchemaMismatch if it is not one map, or is beyond the limits where it is `limited`."""
    options = unpack_limits() if limited else {}
    try:
        fields = msgpack.unpackb(data, raw=False, strict_map_key=True, **options)
    except (ValueError, msgpack.UnpackException) as error:
        why = f" ({error})" if limited and str(error) else ""
        raise SchemaMismatch("The message is not msgpack.", received=f"{len(data)} bytes{why}") from error
    if not isinstance(fields, dict):
        raise SchemaMismatch("The message is not a msgpack map.", received=type(fields).__name__)
    return fields
