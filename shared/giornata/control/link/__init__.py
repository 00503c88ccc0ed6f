"""The data path of steps: a denoiser asks a ControlNet instance for samples, which arrive in its own memory.

`client` is the denoiser's end, `server` the instance's, `slabs` the memory between them. Here are their messages as
bytes, and what a denoiser hears instead of a sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, UnionType
from typing import Any, Final, get_args

from pydantic import BaseModel

from giornata.frames import MalformedFrame, framed
from giornata.wire import codec
from giornata.wire.controlnets import FromDenoiser, FromInstance, LinkMessage
from giornata.wire.errors import SchemaMismatch


class LinkLost(ConnectionError):
    """The data path to the instance is closed or broken: the rows have to be opened elsewhere."""


class LinkLate(TimeoutError):
    """An answer has not come in time; the link is up."""


class ControlFailed(Exception):
    """The instance refused a step, or failed in it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        """Stable."""
        self.message = message


MAX_OPENING_BYTES: Final = 8 << 10
"""Most bytes of a message from a denoiser that is not yet admitted."""
MAX_MESSAGE_BYTES: Final = 64 << 10


def encode_frame(message: BaseModel) -> bytes:
    """`message` with its length before it."""
    return framed(codec.encode(message, limit_bytes=MAX_MESSAGE_BYTES))


def read_from_denoiser(data: bytes) -> FromDenoiser:
    """A message to an instance; MalformedFrame where it is none."""
    message: FromDenoiser = _read(_FROM_DENOISER, data)
    return message


def read_from_instance(data: bytes) -> FromInstance:
    """A message to a denoiser; MalformedFrame where it is none."""
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
