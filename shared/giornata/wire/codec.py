"""Messages as bytes: msgpack maps with string keys and a schema number.

A reader accepts its own schema number and the one before, and names missing fields. It ignores unknown fields of
messages, and keeps those of records (:class:`giornata.wire.values.RecordModel`).
Golden bytes in ``tests/contract`` pin the encoding.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgpack
from pydantic import BaseModel, ValidationError

from giornata.wire.errors import PayloadTooLarge, SchemaMismatch
from giornata.wire.structure import unpack_limits

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

    `limited` holds a stranger's message to :mod:`giornata.wire.structure`.
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
