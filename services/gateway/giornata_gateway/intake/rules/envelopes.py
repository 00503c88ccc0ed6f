"""The messages of the NATS door before they are believed. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import StringConstraints, ValidationError

from giornata.wire.errors import InvalidField, PayloadTooLarge
from giornata.wire.jobs import BlobRef, Priority
from giornata.wire.messages import INLINE_BYTES
from giornata.wire.requests import EditParameters, request_error
from giornata.wire.values import Wire
from giornata_gateway.intake.rules.forms import check_source

REPLY_MARGIN_BYTES: Final = 64 << 10
"""Room in a reply for everything but the pictures."""

MAX_PARAMETERS: Final = 64
NAME_CHARACTERS: Final = 64

_INBOX = re.compile(r"_INBOX(\.[A-Za-z0-9_-]{1,64}){1,6}\Z")


class EditEnvelope(Wire):
    """An :class:`giornata.wire.messages.EditMessage` whose parameters are still to be validated, field by field."""

    parameters: Any
    """A map; see :func:`read_parameters`, whose errors stay short whatever is in it."""
    image: bytes | BlobRef | None = None
    template_id: Annotated[str, StringConstraints(min_length=1, max_length=96)] | None = None
    mask: bytes | BlobRef | None = None
    remaining_ms: int = 120_000
    priority: Priority = Priority.INTERACTIVE
    progress: str | None = None
    api_key: str | None = None


def read_parameters(envelope: EditEnvelope) -> EditParameters:
    """The parameters, or the error that names the field at fault; what it names is short."""
    given = envelope.parameters
    accepted = f"a map of at most {MAX_PARAMETERS} names, each of at most {NAME_CHARACTERS} characters"
    if not isinstance(given, dict) or len(given) > MAX_PARAMETERS:
        received = f"{len(given)} names" if isinstance(given, dict) else type(given).__name__
        raise InvalidField(
            "The parameters are not such a map.", field="parameters", received=received, accepted=accepted
        )
    strange = [name for name in given if not isinstance(name, str) or len(name) > NAME_CHARACTERS]
    if strange:
        raise InvalidField(
            "A parameter has no such name.", field="parameters", received=strange[0], accepted=accepted
        )
    try:
        parameters = EditParameters.model_validate(given)
    except ValidationError as error:
        raise request_error(error) from error
    if parameters.partial_images and envelope.progress is None:
        raise InvalidField(
            "Partial images are told as progress.",
            field="partial_images",
            received=parameters.partial_images,
            accepted="0, or a subject for the progress",
        )
    return parameters


def checked_picture(
    picture: bytes | BlobRef | None, field: str, tenant: str, limit_bytes: int
) -> bytes | BlobRef | None:
    """`picture` if it may be used by `tenant`.

    Raises:
        InvalidField: the claim check is for somebody else's blob, or the bytes are none.
        PayloadTooLarge: it is larger than `limit_bytes`.
    """
    if isinstance(picture, BlobRef):
        if not picture.key.startswith(f"{tenant}/"):
            raise InvalidField(
                "The claim check is not of this tenant.",
                field=field,
                received=picture.key,
                accepted=f"a key below {tenant}/",
            )
        if picture.size_bytes > limit_bytes:
            raise PayloadTooLarge(
                field=field, received=f"{picture.size_bytes} bytes", accepted=f"at most {limit_bytes} bytes"
            )
    if isinstance(picture, bytes) and not picture:
        raise InvalidField(
            "The picture is empty.", field=field, received="0 bytes", accepted="a PNG, JPEG or WebP file"
        )
    return picture


def check_envelope(
    envelope: EditEnvelope, tenant: str, limit_bytes: int
) -> tuple[bytes | BlobRef | None, bytes | BlobRef | None]:
    """Image and mask of an envelope that is well-formed; no image where it names a template.

    Raises:
        InvalidField, PayloadTooLarge: names the field at fault.
    """
    if envelope.progress is not None and not _INBOX.match(envelope.progress):
        raise InvalidField(
            "Progress goes to the caller's own inbox only.",
            field="progress",
            received=envelope.progress,
            accepted="a subject below _INBOX., without wildcards",
        )
    if envelope.remaining_ms <= 0:
        raise InvalidField(
            "No time is left.", field="remaining_ms", received=envelope.remaining_ms, accepted="above 0"
        )
    inline = inline_bytes(envelope)
    if inline > INLINE_BYTES:
        raise PayloadTooLarge(
            "Image and mask are too large to travel inside the message.",
            field="image",
            received=f"{inline} bytes",
            accepted=f"{INLINE_BYTES} bytes together, or claim checks",
        )
    image = checked_picture(envelope.image, "image", tenant, limit_bytes)
    check_source(image, envelope.template_id)
    return image, checked_picture(envelope.mask, "mask", tenant, limit_bytes)


def inline_bytes(envelope: EditEnvelope) -> int:
    """Bytes of image and mask inside the message."""
    return sum(len(part) for part in (envelope.image, envelope.mask) if isinstance(part, bytes))


def inline_pictures(sizes: Mapping[int, int], room_bytes: int) -> set[int]:
    """Which pictures travel inside a reply, first come first served; the others become claim checks.

    Args:
        sizes: bytes by index.
        room_bytes: what a reply may weigh.
    """
    left = room_bytes - REPLY_MARGIN_BYTES
    chosen: set[int] = set()
    for index, size in sorted(sizes.items()):
        if size <= left:
            chosen.add(index)
            left -= size
    return chosen
