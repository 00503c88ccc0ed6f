"""The messages of the NATS door before they are validated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from pydantic import ConfigDict

from giornata.api_keys import Tenant as TenantName
from giornata.wire import resolution
from giornata.wire.adapters import check_control_images, named_control_images
from giornata.wire.errors import InvalidField, PayloadTooLarge
from giornata.wire.jobs import BlobRef
from giornata.wire.messages import (
    IDEMPOTENCY_HEADER,
    INLINE_BYTES,
    EditMessage,
    GenerateMessage,
    MaskMessage,
    MaskParameters,
)
from giornata.wire.requests import REFERENCE, EditParameters, GenerationParameters, asked, check_count
from giornata_gateway.rules.addresses import FIELD as WEBHOOK
from giornata_gateway.rules.forms import TemplateId, check_filled, check_source
from giornata_gateway.rules.idempotency import HEADER as IDEMPOTENCY_KEY
from giornata_gateway.rules.tenants import Tenant

REPLY_MARGIN_BYTES: Final = 64 << 10
"""Room in a reply for everything but the pictures."""

MAX_PARAMETERS: Final = 64
NAME_CHARACTERS: Final = 64
KEY_NAMES: Final = frozenset({"idempotency_key", IDEMPOTENCY_HEADER, IDEMPOTENCY_KEY})
"""What callers may take for the name of an idempotency key."""

_TOKENS = re.compile(r"(\.[A-Za-z0-9_-]{1,64}){1,6}\Z")


class GenerateEnvelope(GenerateMessage):
    """A generation's message whose parameters are still to be validated, field by field."""

    model_config = ConfigDict(extra="allow")  # for _check_places; a name that means nothing here is ignored

    parameters: Any
    """A map; :func:`read_parameters` validates it, and its errors are short."""
    webhook: Any = None
    """Named to be refused."""


class EditEnvelope(EditMessage):
    """An edit's message whose parameters are still to be validated, field by field."""

    model_config = ConfigDict(extra="allow")  # as a generation's

    parameters: Any
    """A map; :func:`read_parameters` validates it, and its errors are short."""
    template_id: TemplateId | None = None
    webhook: Any = None
    """As a generation's."""


class ProbeEnvelope(EditEnvelope):
    """The message of a :class:`~giornata.wire.messages.ProbeMessage` whose parameters are still to be validated."""

    tenant: TenantName


class MaskEnvelope(MaskMessage):
    """The message of a mask from words whose parameters are still to be validated, field by field."""

    parameters: Any
    """A map; :func:`read_mask` validates it, and its errors are short."""


Envelope = EditEnvelope | GenerateEnvelope


def read_parameters(envelope: Envelope) -> EditParameters:
    """The parameters with which a job is carried out; an error names the field at fault, with at most a short value."""
    edits = isinstance(envelope, EditEnvelope)
    given = _named(envelope.parameters)
    webhook = envelope.webhook if envelope.webhook is not None else given.get(WEBHOOK)
    if webhook is not None:
        raise InvalidField(
            "The answer to this message tells the end, so there is no webhook of it.",
            field=WEBHOOK,
            received=webhook if isinstance(webhook, str) else type(webhook).__name__,
            accepted="no webhook; a job of POST /v1/jobs may have one",
        )
    _check_places(envelope)
    parameters = asked(EditParameters if edits else GenerationParameters, given)
    if parameters.partial_images and envelope.progress is None:
        raise InvalidField(
            "Partial images are told as progress.",
            field="partial_images",
            received=parameters.partial_images,
            accepted="0, or a subject for the progress",
        )
    return parameters if isinstance(parameters, EditParameters) else resolution.carried_out(parameters)


def read_mask(envelope: MaskEnvelope) -> MaskParameters:
    """Return what a mask is to show; raises as :func:`read_parameters`."""
    return asked(MaskParameters, _named(envelope.parameters))


def _named(given: object) -> dict[str, Any]:
    """The parameters of a message by name; InvalidField where they are no such map."""
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
    return given


def _check_places(envelope: Envelope) -> None:
    """Refuse what has a meaning elsewhere in a message, and would be ignored where it stands.

    Names that no version knows are ignored, as in every message: see :class:`giornata.wire.values.WireModel`.
    """
    for name in envelope.model_extra or ():
        if name in KEY_NAMES:
            accepted = f"the key as the header {IDEMPOTENCY_HEADER}"
        elif name in EditParameters.model_fields:
            accepted = f"{name} within parameters, where the message takes it"
        elif name in EditMessage.model_fields:
            accepted = f"no {name}: pictures from text are made of none"
        else:
            continue
        raise InvalidField(
            "A field stands where it is not read.", field=name, received=name, accepted=accepted
        )


def check_reply(reply: str, tenant: Tenant) -> None:
    """Check that the answer goes to the application that asks; an empty `reply` asks for none.

    The InvalidField goes to that `reply`, and so repeats nothing of the request.
    """
    if reply and not _is_below(tenant.inbox, reply):
        raise InvalidField(
            "The answer goes to the inbox of the application to which the API key belongs, and nowhere else.",
            field="reply",
            accepted=f"a subject below {tenant.inbox}. (the client's inbox prefix)",
        )


def _is_below(inbox: str, subject: str) -> bool:
    """Return whether `subject` lies in the inbox, and is no pattern."""
    return subject.startswith(inbox) and _TOKENS.match(subject, len(inbox)) is not None


def check_envelope(envelope: Envelope, tenant: Tenant, limit_bytes: int) -> None:
    """Check what `tenant` sends beside parameters, pictures of at most `limit_bytes` each among it.

    InvalidField or PayloadTooLarge names the field at fault.
    """
    if envelope.progress is not None and not _is_below(tenant.inbox, envelope.progress):
        raise InvalidField(
            "Progress goes to the caller's own inbox only.",
            field="progress",
            received=envelope.progress,
            accepted=f"a subject below {tenant.inbox}., without wildcards",
        )
    check_time(envelope.remaining_ms)
    _check_inline(inline_bytes(envelope), "image" if isinstance(envelope, EditEnvelope) else REFERENCE)
    if isinstance(envelope, EditEnvelope):
        _check_picture(envelope.image, "image", tenant.name, limit_bytes)
        check_source(envelope.image, envelope.template_id)
        _check_picture(envelope.mask, "mask", tenant.name, limit_bytes)
    check_count(len(envelope.reference))
    for reference in envelope.reference:
        _check_picture(reference, REFERENCE, tenant.name, limit_bytes)
    check_control_images(len(envelope.control_image))
    for name, picture in named_control_images(envelope.control_image).items():
        _check_picture(picture, name, tenant.name, limit_bytes)


def check_time(remaining_ms: int) -> None:
    """Raise InvalidField where a message allows no time for its answer."""
    if remaining_ms <= 0:
        raise InvalidField(
            "No time is left.", field="remaining_ms", received=remaining_ms, accepted="above 0"
        )


def check_mask_image(envelope: MaskEnvelope, tenant: Tenant, limit_bytes: int) -> None:
    """Check the picture in which words are looked for; raises as :func:`check_envelope`."""
    _check_inline(inline_bytes(envelope), "image")
    _check_picture(envelope.image, "image", tenant.name, limit_bytes)


def _check_inline(inline: int, field: str) -> None:
    if inline > INLINE_BYTES:
        raise PayloadTooLarge(
            "The pictures are too large to travel inside the message.",
            field=field,
            received=f"{inline} bytes",
            accepted=f"{INLINE_BYTES} bytes together, or claim checks",
        )


def _check_picture(picture: bytes | BlobRef | None, field: str, tenant: str, limit_bytes: int) -> None:
    if isinstance(picture, bytes):
        check_filled(picture, field)
    elif picture is not None and not picture.key.startswith(f"{tenant}/"):
        raise InvalidField(
            "The claim check is not of this tenant.",
            field=field,
            received=picture.key,
            accepted=f"a key below {tenant}/",
        )
    elif picture is not None and picture.size_bytes > limit_bytes:
        raise PayloadTooLarge(
            field=field, received=f"{picture.size_bytes} bytes", accepted=f"at most {limit_bytes} bytes"
        )


def inline_bytes(envelope: Envelope | MaskEnvelope) -> int:
    """Bytes of pictures inside the message."""
    if isinstance(envelope, MaskEnvelope):
        return len(envelope.image) if isinstance(envelope.image, bytes) else 0
    pictures = (envelope.image, envelope.mask) if isinstance(envelope, EditEnvelope) else ()
    listed = (*envelope.reference, *envelope.control_image)
    return sum(len(part) for part in (*pictures, *listed) if isinstance(part, bytes))


def inline_pictures(sizes: Mapping[int, int], room_bytes: int) -> set[int]:
    """Indices of the pictures that travel inside a reply of at most `room_bytes`; the others become claim checks.

    `sizes` are bytes by index; the pictures are taken in order.
    """
    left = room_bytes - REPLY_MARGIN_BYTES
    chosen: set[int] = set()
    for index, size in sorted(sizes.items()):
        if size <= left:
            chosen.add(index)
            left -= size
    return chosen
