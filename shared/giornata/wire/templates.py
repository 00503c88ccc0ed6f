"""Registered templates: pictures that are kept for their edits, and what has been recorded of them. Pure.

A registration is a record in JetStream's key-value store, changed by revision, under its tenant's name: whoever asks
for another tenant's finds nothing. Its times are Unix times, since it outlives processes.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Final

from giornata.wire.errors import ErrorBody, TemplateMismatch
from giornata.wire.jobs import BlobRef, Inspection, check_version
from giornata.wire.models import ModelCard
from giornata.wire.requests import EditParameters
from giornata.wire.values import Wire

RENEW_SHARE: Final = 0.9
"""A use renews a registration that has less than this share of its life left, so that few uses write."""


class TemplateState(StrEnum):
    """How far a registered template is. Edits may name it in every state: what is not recorded is computed."""

    REGISTERED = "registered"
    """Its picture is kept."""
    RECORDING = "recording"
    """A worker was asked to record it."""
    READY = "ready"
    """It was recorded; what a worker has evicted since is recorded again when it is next edited there."""
    FAILED = "failed"
    """It could not be recorded."""

    @property
    def settled(self) -> bool:
        """Whether nobody is recording it."""
        return self in {TemplateState.READY, TemplateState.FAILED}


class TemplateInputs(Wire):
    """What a template run is computed from."""

    inspection: Inspection
    empty_text: BlobRef
    """safetensors: the empty prompt."""
    conditioning: BlobRef
    """safetensors: the picture with an empty mask, as a row of an edit."""


class TemplateRecord(Wire):
    """The truth about a registered template."""

    template_id: str
    tenant: str
    model: str
    model_digest: str
    size: str
    """Output size of its edits: `auto` or WIDTHxHEIGHT."""
    image: BlobRef
    """The file as it was sent."""
    created_s: int
    """Unix time in seconds."""
    expires_s: int
    """Unix time in seconds; a use puts it off."""
    state: TemplateState = TemplateState.REGISTERED
    width: int | None = None
    """Of the upright original, in pixels."""
    height: int | None = None
    template_key: str | None = None
    """As in :class:`giornata.wire.jobs.Inspection`."""
    worker: str | None = None
    """Instance that records it, or recorded it last."""
    size_bytes: int = 0
    """Of what was recorded."""
    error: ErrorBody | None = None
    """Why it could not be recorded."""

    def check_model(self, card: ModelCard) -> None:
        """ServiceUnavailable where `card` is another version of the model than the template was registered for."""
        check_version(self.model, self.model_digest, card)


def template_id(tenant: str, card: ModelCard, size: str, image_sha256: str) -> str:
    """The same picture, registered again for the same model and size, is the same template."""
    parts = (tenant, card.name, card.digest, size, image_sha256)
    return f"template_{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"


def registered_again(record: TemplateRecord, image: BlobRef, expires_s: int) -> TemplateRecord:
    """Its picture was sent once more."""
    state = record.state if record.state is TemplateState.READY else TemplateState.REGISTERED
    changes = {"image": image, "expires_s": expires_s, "state": state, "error": None}
    return record.model_copy(update=changes)


def recording(record: TemplateRecord, worker: str, inspection: Inspection) -> TemplateRecord:
    """`worker` is asked to record it."""
    return record.model_copy(
        update={
            "state": TemplateState.RECORDING,
            "width": inspection.width,
            "height": inspection.height,
            "template_key": inspection.template_key,
            "worker": worker,
            "error": None,
        }
    )


def ready(record: TemplateRecord, worker: str, template_key: str, size_bytes: int) -> TemplateRecord:
    """`worker` has recorded it. The key is another one than before where the model's version has changed."""
    return record.model_copy(
        update={
            "state": TemplateState.READY,
            "template_key": template_key,
            "worker": worker,
            "size_bytes": size_bytes,
            "error": None,
        }
    )


def failed(record: TemplateRecord, worker: str, error: ErrorBody) -> TemplateRecord | None:
    """`worker` could not record it; None where another worker has it by now."""
    if record.state is TemplateState.READY or record.worker not in {None, worker}:
        return None
    return record.model_copy(update={"state": TemplateState.FAILED, "worker": worker, "error": error})


def renewed(record: TemplateRecord, now_s: float, life_s: int) -> TemplateRecord | None:
    """The record after a use; None while it has nearly its whole life ahead."""
    if record.expires_s - now_s >= RENEW_SHARE * life_s:
        return None
    return record.model_copy(update={"expires_s": int(now_s) + life_s})


def applied(record: TemplateRecord, parameters: EditParameters) -> EditParameters:
    """The parameters of an edit of a template: model and size are the template's.

    Raises:
        TemplateMismatch: the edit names another model or size, or a part of the picture.
    """
    mismatches = (
        ("model", parameters.model, {None, record.model}, record.model),
        ("size", parameters.size, {"auto", record.size}, record.size),
        (
            "padding_mask_crop",
            parameters.padding_mask_crop,
            {None},
            "nothing: the whole picture was recorded",
        ),
    )
    for field, received, accepted, text in mismatches:
        if received not in accepted:
            raise TemplateMismatch(field=field, received=received, accepted=text)
    return parameters.model_copy(update={"model": record.model, "size": record.size})


def picture_id(tenant: str, template_key: str) -> str:
    """What the ids of all recordings of one picture of one tenant begin with.

    Args:
        tenant: who may take from them.
        template_key: of the inspection: model and pixels.
    """
    return digest_of(tenant, template_key)


def digest_of(*parts: object) -> str:
    """32 hexadecimal digits of values with a stable `repr`."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
