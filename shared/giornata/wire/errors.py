"""Every way an edit can fail: one tree, a stable code and an HTTP status on each leaf."""

from __future__ import annotations

from typing import ClassVar, Final

from giornata.wire.values import RecordModel

MESSAGE_CHARS = 2000
VALUE_CHARS = 200
"""Texts are cut to these lengths, so that every error fits into a message and into the job's record."""


class ErrorBody(RecordModel):
    """An error as it travels: over NATS, into the job record, and as the body of an HTTP answer."""

    code: str
    message: str
    field: str | None = None
    received: str | None = None
    accepted: str | None = None
    retry_after_s: float | None = None


class GiornataError(Exception):
    """Something went wrong."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    """Whether the router may try the same work again, elsewhere or later."""

    def __init_subclass__(
        cls, code: str, status: int | None = None, *, retryable: bool | None = None
    ) -> None:
        cls.code = code
        cls.status = cls.status if status is None else status
        cls.retryable = cls.retryable if retryable is None else retryable
        BY_CODE[code] = cls

    def __init__(
        self,
        message: str | None = None,
        *,
        field: str | None = None,
        received: object = None,
        accepted: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        self.message = _text((message or type(self).__doc__ or "").strip(), MESSAGE_CHARS)
        self.field = None if field is None else _text(field, VALUE_CHARS)
        self.received = None if received is None else _text(str(received), VALUE_CHARS)
        self.accepted = None if accepted is None else _text(accepted, MESSAGE_CHARS)
        self.retry_after_s = retry_after_s
        super().__init__(self.message)

    def __str__(self) -> str:
        parts = [self.message]
        if self.received is not None:
            parts.append(f"Received: {self.received}.")
        if self.accepted is not None:
            parts.append(f"Accepted: {self.accepted}.")
        return " ".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        """Cross the boundary of the image processes with every field intact."""
        return from_body, (self.body(),)

    def body(self) -> ErrorBody:
        """The error as it travels."""
        return ErrorBody.model_validate({**vars(self), "code": self.code})


def _text(text: str, most: int) -> str:
    """`text`, cut; what is no Unicode, as bytes in a header may be, is written as an escape, so that it can be told."""
    return text[:most].encode(errors="backslashreplace").decode()[:most]


BY_CODE: Final[dict[str, type[GiornataError]]] = {GiornataError.code: GiornataError}
"""Every error that is defined, by its code."""


def from_body(body: ErrorBody) -> GiornataError:
    """Raise-able error from its travelling form; a code of a newer version becomes `failed`."""
    fields = body.known()
    return BY_CODE.get(fields.pop("code"), BY_CODE["failed"])(**fields)


# The tree: BadRequest (400-422: the caller can mend it), Overloaded (429, 503: try again later) and Failed (500, 504:
# it was accepted and could not be done).
#
# A leaf's docstring is its default message; its HTTP status and whether it is worth a retry are its
# branch's unless it names its own. An error travels as an `ErrorBody` and is raised again as the same class
# on the other side (`from_body`).


class BadRequest(GiornataError, code="bad_request", status=400):
    """The request cannot be carried out as it is."""


class InvalidField(BadRequest, code="invalid_field"):
    """A field has a value that is not accepted."""


class UnknownField(BadRequest, code="unknown_field"):
    """The request names a field that does not exist."""


class NotSupported(BadRequest, code="not_supported"):
    """This is not supported yet."""


class ImageUnreadable(BadRequest, code="image_unreadable"):
    """The image could not be decoded; it may be truncated or damaged."""


class ImageTimeout(BadRequest, code="image_timeout", status=422):
    """The image takes too long to process; a smaller one, or less grow_mask and mask_blur, is accepted."""


class UnsupportedImageFormat(BadRequest, code="unsupported_image_format"):
    """The bytes are not an image of an accepted format."""


class MaskRejected(BadRequest, code="mask_rejected"):
    """The mask cannot be read in the requested mask_mode."""


class MaskEmpty(BadRequest, code="mask_empty"):
    """The mask selects no pixel, so there is nothing to edit."""


class MasksNotServed(BadRequest, code="masks_not_served"):
    """Nothing that is running makes masks from words."""


class NothingFound(BadRequest, code="nothing_found", status=422):
    """The words name nothing in the picture, as far as the segmenter sees."""


class MaskSizeMismatch(BadRequest, code="mask_size_mismatch"):
    """The mask's aspect ratio differs from the image's."""


class TaskNotSupported(BadRequest, code="task_not_supported"):
    """The model does not do what is asked of it."""


class SizeMismatch(BadRequest, code="size_mismatch"):
    """The requested size does not have the image's aspect ratio, or is none that the model makes."""


class TemplateMismatch(BadRequest, code="template_mismatch"):
    """The edit asks for something else than its template was registered for."""


class PayloadTooLarge(BadRequest, code="payload_too_large", status=413):
    """The request is larger than this server accepts."""


class TooManyPixels(BadRequest, code="too_many_pixels", status=413):
    """The image has more pixels than this server accepts."""


class RequestTimeout(BadRequest, code="request_timeout", status=408):
    """The request did not come in time."""


class Unauthorized(BadRequest, code="unauthorized", status=401):
    """The API key is missing or unknown."""


class CrossSite(BadRequest, code="cross_site", status=403):
    """The request comes from a page of another web site, and this gateway asks for no API key."""


class MalformedMessage(BadRequest, code="malformed_message"):
    """A request over NATS is not the message that its subject takes."""


class JobNotFound(BadRequest, code="job_not_found", status=404):
    """There is no job with this id."""


class ModelNotFound(BadRequest, code="model_not_found", status=404):
    """No running worker serves this model."""


class TemplateNotFound(BadRequest, code="template_not_found", status=404):
    """There is no template with this id."""


class LoraNotFound(BadRequest, code="lora_not_found", status=404):
    """There is no LoRA with this id."""


class LoraNotReady(BadRequest, code="lora_not_ready", status=409):
    """The LoRA cannot be used now."""


class ControlNetNotFound(BadRequest, code="controlnet_not_found", status=404):
    """No running worker has a ControlNet of this name for this model."""


class ControlNetMismatch(BadRequest, code="controlnet_mismatch"):
    """The ControlNet does not fit the model, or what it is to see."""


class ResultExpired(BadRequest, code="result_expired", status=410):
    """The result was kept for its time and is gone."""


class JobNotFinished(BadRequest, code="job_not_finished", status=409):
    """The job has no picture yet."""


class JobCancelled(BadRequest, code="job_cancelled", status=409):
    """The job was cancelled."""


class TemplateLimit(BadRequest, code="template_limit", status=409):
    """The tenant has as many registered templates as it may have."""


class WebhookNotFound(BadRequest, code="webhook_not_found", status=404):
    """The tenant has no webhook of this job that was not taken yet."""


class WebhookLimit(BadRequest, code="webhook_limit", status=409):
    """The tenant has as many webhooks that were not taken as it may have."""


class LoraLimit(BadRequest, code="lora_limit", status=409):
    """The tenant has as many LoRAs as it may have."""


class LoraPinsFull(BadRequest, code="lora_pins_full", status=409):
    """The pinned LoRAs would not fit into a host tier."""


class LoraUnreadable(BadRequest, code="lora_unreadable"):
    """The file is not whole safetensors."""


class LoraNotSupported(BadRequest, code="lora_not_supported"):
    """The file holds something else than a LoRA of a known form."""


class LoraTooLarge(BadRequest, code="lora_too_large", status=413):
    """The LoRA is larger than this server accepts."""


class LoraMismatch(BadRequest, code="lora_mismatch"):
    """The LoRA does not fit the model."""


class LoraNotFinite(BadRequest, code="lora_not_finite"):
    """The LoRA has values that are not finite."""


class IdempotencyKeyReused(BadRequest, code="idempotency_key_reused", status=422):
    """The idempotency key belongs to another edit."""


class Overloaded(GiornataError, code="overloaded", status=503, retryable=True):
    """The system is busy; try again later."""


class TooManyRequests(Overloaded, code="too_many_requests", status=429):
    """Too many edits are in progress at this gateway; try again later."""


class QueueTooLong(TooManyRequests, code="queue_too_long"):
    """An edit that came now would wait for longer than it may; try again later."""


class TooManyStreams(Overloaded, code="too_many_streams", status=429):
    """Too many event streams are open at this gateway; look on later, or ask for the status instead."""


class TooManyConnections(Overloaded, code="too_many_connections"):
    """This gateway has as many connections as it may have; try again later."""


class RateLimited(Overloaded, code="rate_limit_exceeded", status=429):
    """The tenant has asked for as many pictures as it may in a minute; try again later."""


class ConcurrencyLimited(Overloaded, code="concurrency_limit_exceeded", status=429):
    """The tenant has as many pictures in progress as it may have; try again later."""


class QueueFull(Overloaded, code="queue_full", status=429):
    """The work queue holds as many jobs as it may; try again later."""


class InteractiveQueueFull(QueueFull, code="interactive_queue_full"):
    """As many interactive jobs are unfinished as may be; try again later."""


class BatchQueueFull(QueueFull, code="batch_queue_full"):
    """As many batch jobs are unfinished as may be; try again later."""


class TenantQueueFull(QueueFull, code="tenant_queue_full"):
    """As many jobs of the tenant are unfinished as one tenant may have; try again later."""


class BlobStoreFull(Overloaded, code="blob_store_full"):
    """The blob store is full; try again when results have expired."""


class LoraStoreFull(Overloaded, code="lora_store_full"):
    """The LoRA store has no room for another file; try again when LoRAs were deleted."""


class StoreFull(Overloaded, code="store_full"):
    """There is no room for another record; try again when records of ended edits have expired."""


class ServiceUnavailable(Overloaded, code="service_unavailable"):
    """A service that this needs does not answer."""


class StorageFull(ServiceUnavailable, code="storage_full"):
    """A store cannot write to its disk, which is full; try again when an operator has made room."""


class ControlNetUnavailable(ServiceUnavailable, code="controlnet_unavailable"):
    """No instance computes the ControlNet now; try again later."""


class Failed(GiornataError, code="failed"):
    """The edit was accepted and could not be done."""


class DeadlineExceeded(Failed, code="deadline_exceeded", status=504):
    """The time allowed for this edit is over."""


class InputLost(Failed, code="input_lost"):
    """The image or the mask is no longer in the blob store."""


class IntermediateLost(Failed, code="intermediate_lost"):
    """The output of a stage of this edit was lost from the blob store, again and again."""


class RowPoisoned(Failed, code="row_poisoned"):
    """The denoiser could not compute this picture: its values are not finite."""


class AttemptsExhausted(Failed, code="attempts_exhausted"):
    """Every attempt at this edit failed."""


class SchemaMismatch(Failed, code="schema_mismatch"):
    """A message has a schema number or a shape that this version does not read."""


class NoFreeDevice(Failed, code="no_free_device"):
    """Other instances of the service have the GPUs of this host."""


class InternalError(Failed, code="internal_error", retryable=True):
    """An unexpected error; the log of the service has the details."""


class NotPermitted(Failed, code="not_permitted"):
    """The NATS server does not let this user do that."""
