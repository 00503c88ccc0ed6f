"""Messages of the data path as bytes: four bytes of length, little-endian, and msgpack."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from types import MappingProxyType, UnionType
from typing import Any, Final, TypeVar, get_args

from pydantic import BaseModel

from giornata.wire import codec
from giornata.wire.control_steps import FromDenoiser, FromInstance, LinkMessage
from giornata.wire.errors import SchemaMismatch

LENGTH: Final = struct.Struct("<I")
MAX_OPENING_BYTES: Final = 8 << 10
"""Most bytes of a message from a denoiser that is not yet admitted."""
MAX_MESSAGE_BYTES: Final = 64 << 10


class MalformedFrame(ValueError):
    """What came is no message of the data path."""


M = TypeVar("M", bound=BaseModel)


def framed(message: BaseModel) -> bytes:
    """`message` with its length before it."""
    data = codec.encode(message, limit_bytes=MAX_MESSAGE_BYTES)
    return LENGTH.pack(len(data)) + data


def length_of(head: bytes | bytearray, limit_bytes: int) -> int:
    """Bytes of the message behind these four.

    Raises:
        Malformed: an empty message, or one of more than `limit_bytes`.
    """
    (length,) = LENGTH.unpack(head)
    if not 1 <= length <= limit_bytes:
        raise MalformedFrame(f"a message of {length} bytes; accepted: 1 to {limit_bytes}")
    return int(length)


def read_from_denoiser(data: bytes) -> FromDenoiser:
    """A message to an instance; Malformed where it is none."""
    message: FromDenoiser = _read(_FROM_DENOISER, data)
    return message


def read_from_instance(data: bytes) -> FromInstance:
    """A message to a denoiser; Malformed where it is none."""
    message: FromInstance = _read(_FROM_INSTANCE, data)
    return message


def _by_kind(union: UnionType) -> Mapping[str, type[BaseModel]]:
    kinds: tuple[type[BaseModel], ...] = get_args(union)
    return MappingProxyType({kind.model_fields["kind"].default: kind for kind in kinds})


_FROM_DENOISER: Final = _by_kind(FromDenoiser)
_FROM_INSTANCE: Final = _by_kind(FromInstance)


def _read(kinds: Mapping[str, type[BaseModel]], data: bytes) -> Any:
    try:
        fields = codec.fields_of(LinkMessage, data)
        name = fields.get("kind")
        if not isinstance(name, str) or name not in kinds:
            raise MalformedFrame(f"a message of kind {str(name)[:50]!r}; accepted: {', '.join(kinds)}")
        return codec.validated(kinds[name], fields)
    except SchemaMismatch as error:
        raise MalformedFrame(str(error)) from error
