"""The records that a tenant has beside its jobs: registered templates and webhooks."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from giornata.wire.errors import ErrorBody, TemplateMismatch
from giornata.wire.jobs import BlobRef, Inspection, check_version
from giornata.wire.models import ModelCard
from giornata.wire.requests import EditParameters
from giornata.wire.values import RecordModel, WireModel, digest_of

# Registered templates. A template is a picture, kept for its edits, and the recordings that template runs
# left of it.
#
# A registration is a record in JetStream's key-value store, changed by revision, under its tenant's name: a
# request for another tenant's template finds nothing. Its times are Unix times, since it outlives
# processes.


RENEW_SHARE: Final = 0.9
"""A use renews a registration with less than this share of its life left, so that few uses write."""


class TemplateState(StrEnum):
    """The progress of a registered template. Edits may name it in every state: without a recording they compute all."""

    REGISTERED = "registered"
    RECORDING = "recording"
    """A worker was asked to record the template."""
    READY = "ready"
    """The template was recorded. An evicted recording is made again by the next edit on its worker."""
    FAILED = "failed"

    @property
    def settled(self) -> bool:
        """Return whether no worker is recording the template."""
        return self in {TemplateState.READY, TemplateState.FAILED}


class TemplateInputs(WireModel):
    """The inputs of a template run."""

    inspection: Inspection
    empty_text: BlobRef
    """safetensors: the empty prompt."""
    conditioning: BlobRef
    """safetensors: the picture with an empty mask, as a row of an edit."""
    references: BlobRef | None = None
    """As of an :class:`giornata.wire.jobs.Encoding`; a registered template has none."""


class TemplateRecord(RecordModel):
    """The truth about a registered template."""

    template_id: str
    tenant: str
    model: str
    model_digest: str
    size: str
    """Output size of its edits: `auto` or WIDTHxHEIGHT."""
    image: BlobRef
    created_s: int
    expires_s: int
    """A use puts it off."""
    state: TemplateState = TemplateState.REGISTERED
    width: int | None = None
    height: int | None = None
    template_key: str | None = None
    """See :class:`giornata.wire.jobs.Inspection`."""
    worker: str | None = None
    """The instance that records the template, or recorded it last."""
    size_bytes: int = 0
    error: ErrorBody | None = None

    def check_model(self, card: ModelCard) -> None:
        """Raise ServiceUnavailable if `card` is another version of the model than the template was registered for."""
        check_version(self.model, self.model_digest, card)


def template_id(tenant: str, card: ModelCard, size: str, image_sha256: str) -> str:
    """The id of a template: the same for the same picture, model and size."""
    return f"template_{digest_of(tenant, card.name, card.digest, size, image_sha256)}"


def registered_again(record: TemplateRecord, image: BlobRef, expires_s: int) -> TemplateRecord:
    """The record after its picture was sent once more."""
    state = record.state if record.state is TemplateState.READY else TemplateState.REGISTERED
    changes = {"image": record.image.updated(image), "expires_s": expires_s, "state": state, "error": None}
    return record.model_copy(update=changes)


def recording(record: TemplateRecord, worker: str, inspection: Inspection) -> TemplateRecord:
    """The record when `worker` is asked to record the template."""
    measured = inspection.model_dump(include={"width", "height", "template_key"})
    return record.model_copy(
        update=measured | {"state": TemplateState.RECORDING, "worker": worker, "error": None}
    )


def ready(record: TemplateRecord, worker: str, template_key: str, size_bytes: int) -> TemplateRecord:
    """The record after `worker` has recorded the template; a new version of the model has another key."""
    recorded = {"template_key": template_key, "worker": worker, "size_bytes": size_bytes}
    return record.model_copy(update=recorded | {"state": TemplateState.READY, "error": None})


def failed(record: TemplateRecord, worker: str, error: ErrorBody) -> TemplateRecord | None:
    """The record after `worker` could not record the template; None if another worker has it by now."""
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

    TemplateMismatch if the edit names another model or size, or a part of the picture.
    """
    for field, accepted, text in (
        ("model", {None, record.model}, record.model),
        ("size", {"auto", record.size}, record.size),
        ("padding_mask_crop", {None}, "nothing: the whole picture was recorded"),
    ):
        received = getattr(parameters, field)
        if received not in accepted:
            raise TemplateMismatch(field=field, received=received, accepted=text)
    return parameters.model_copy(update={"model": record.model, "size": record.size})


# Webhooks of jobs: what is kept of one until its receiver has taken it.


class WebhookState(StrEnum):
    """The progress of a webhook; one that was taken has no record any more."""

    WAITING = "waiting"
    """Its job has not ended, or it is tried again."""
    DEAD = "dead"


class WebhookRecord(RecordModel):
    """The truth about the webhook of a job."""

    job_id: str
    tenant: str
    url: str
    created_s: int
    state: WebhookState = WebhookState.WAITING
    body: str | None = None
    """What is told, the same at every attempt; None until the job has ended."""
    attempts: int = 0
    next_s: float = 0.0
    """Unix time before which it is not sent again: after a failure, and while a gateway sends it."""
    error: str | None = None
