"""Every way an edit can fail: one tree, a stable code and an HTTP status on each leaf.

::

    GiornataError
    ├── BadRequest                      400  the caller can mend it
    │   ├── InvalidField, UnknownField, NotSupported, MalformedMessage
    │   ├── ImageUnreadable, UnsupportedImageFormat, MaskRejected, MaskEmpty, MaskSizeMismatch, SizeMismatch
    │   ├── TemplateMismatch
    │   ├── PayloadTooLarge, TooManyPixels                    413
    │   ├── Unauthorized                                      401
    │   ├── CrossSite                                         403
    │   ├── JobNotFound, ModelNotFound, TemplateNotFound      404
    │   ├── JobNotFinished, JobCancelled, TemplateLimit       409
    │   ├── ResultExpired                                     410
    │   └── IdempotencyKeyReused                              422
    ├── Overloaded                      429/503  try again later
    │   ├── TooManyRequests, RateLimited, ConcurrencyLimited  429
    │   └── QueueFull, BlobStoreFull, ServiceUnavailable      503
    └── Failed                          5xx  it was accepted and could not be done
        ├── InputLost, RowPoisoned, AttemptsExhausted, ImageTimeout, SchemaMismatch, InternalError, NotPermitted
        └── DeadlineExceeded                                  504

A leaf's docstring is its default message. An error travels as an :class:`ErrorBody` and is raised again as the
same class on the other side (:func:`from_body`).
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict

MESSAGE_CHARS = 2000
VALUE_CHARS = 200
"""Texts are cut to these lengths: whatever a request holds, its error fits into a message and into the job's record."""


class ErrorBody(BaseModel):
    """An error as it travels: over NATS, into the job record, and as the body of an HTTP answer."""

    model_config = ConfigDict(frozen=True)

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

    def __init__(
        self,
        message: str | None = None,
        *,
        field: str | None = None,
        received: object = None,
        accepted: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        self.message = (message or type(self).__doc__ or "").strip()[:MESSAGE_CHARS]
        self.field = None if field is None else field[:VALUE_CHARS]
        self.received = None if received is None else str(received)[:VALUE_CHARS]
        self.accepted = None if accepted is None else accepted[:MESSAGE_CHARS]
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
        return ErrorBody(
            code=self.code,
            message=self.message,
            field=self.field,
            received=self.received,
            accepted=self.accepted,
            retry_after_s=self.retry_after_s,
        )


class BadRequest(GiornataError):
    """The request cannot be carried out as it is."""

    code = "bad_request"
    status = 400


class InvalidField(BadRequest):
    """A field has a value that is not accepted."""

    code = "invalid_field"


class UnknownField(BadRequest):
    """The request names a field that does not exist."""

    code = "unknown_field"


class NotSupported(BadRequest):
    """This is not supported yet."""

    code = "not_supported"


class ImageUnreadable(BadRequest):
    """The image could not be decoded; it may be truncated or damaged."""

    code = "image_unreadable"


class UnsupportedImageFormat(BadRequest):
    """The bytes are not an image of an accepted format."""

    code = "unsupported_image_format"


class MaskRejected(BadRequest):
    """The mask cannot be read in the requested mask_mode."""

    code = "mask_rejected"


class MaskEmpty(BadRequest):
    """The mask selects no pixel, so there is nothing to edit."""

    code = "mask_empty"


class MaskSizeMismatch(BadRequest):
    """The mask's aspect ratio differs from the image's."""

    code = "mask_size_mismatch"


class SizeMismatch(BadRequest):
    """The requested output size does not have the image's aspect ratio."""

    code = "size_mismatch"


class TemplateMismatch(BadRequest):
    """The edit asks for something else than its template was registered for."""

    code = "template_mismatch"


class PayloadTooLarge(BadRequest):
    """The request is larger than this server accepts."""

    code = "payload_too_large"
    status = 413


class TooManyPixels(BadRequest):
    """The image has more pixels than this server accepts."""

    code = "too_many_pixels"
    status = 413


class Unauthorized(BadRequest):
    """The API key is missing or unknown."""

    code = "unauthorized"
    status = 401


class CrossSite(BadRequest):
    """The request comes from a page of another web site, and this gateway asks nobody for an API key."""

    code = "cross_site"
    status = 403


class MalformedMessage(BadRequest):
    """A request over NATS is not the message that its subject takes."""

    code = "malformed_message"


class JobNotFound(BadRequest):
    """There is no job with this id."""

    code = "job_not_found"
    status = 404


class ModelNotFound(BadRequest):
    """No running worker serves this model."""

    code = "model_not_found"
    status = 404


class TemplateNotFound(BadRequest):
    """There is no template with this id."""

    code = "template_not_found"
    status = 404


class ResultExpired(BadRequest):
    """The result was kept for its time and is gone."""

    code = "result_expired"
    status = 410


class JobNotFinished(BadRequest):
    """The job has no picture yet."""

    code = "job_not_finished"
    status = 409


class JobCancelled(BadRequest):
    """The job was cancelled."""

    code = "job_cancelled"
    status = 409


class TemplateLimit(BadRequest):
    """The tenant has as many registered templates as it may have."""

    code = "template_limit"
    status = 409


class IdempotencyKeyReused(BadRequest):
    """The idempotency key belongs to another edit."""

    code = "idempotency_key_reused"
    status = 422


class Overloaded(GiornataError):
    """The system is busy; try again later."""

    code = "overloaded"
    status = 503
    retryable = True


class TooManyRequests(Overloaded):
    """Too many edits are in progress at this gateway; try again later."""

    code = "too_many_requests"
    status = 429


class QueueTooLong(TooManyRequests):
    """An edit that came now would wait for longer than it may; try again later."""

    code = "queue_too_long"


class RateLimited(Overloaded):
    """The tenant has asked for as many pictures as it may in a minute; try again later."""

    code = "rate_limit_exceeded"
    status = 429


class ConcurrencyLimited(Overloaded):
    """The tenant has as many pictures in progress as it may have; try again later."""

    code = "concurrency_limit_exceeded"
    status = 429


class QueueFull(Overloaded):
    """The work queue holds as many jobs as it may; try again later."""

    code = "queue_full"


class BlobStoreFull(Overloaded):
    """The blob store is full; try again when results have expired."""

    code = "blob_store_full"


class ServiceUnavailable(Overloaded):
    """A service that this needs does not answer."""

    code = "service_unavailable"


class Failed(GiornataError):
    """The edit was accepted and could not be done."""

    code = "failed"


class DeadlineExceeded(Failed):
    """The time allowed for this edit is over."""

    code = "deadline_exceeded"
    status = 504


class InputLost(Failed):
    """An input or an intermediate result is no longer in the blob store."""

    code = "input_lost"


class RowPoisoned(Failed):
    """The denoiser could not compute this picture: its values are not finite."""

    code = "row_poisoned"


class AttemptsExhausted(Failed):
    """Every attempt at this edit failed."""

    code = "attempts_exhausted"


class ImageTimeout(Failed):
    """The image took too long to process."""

    code = "image_timeout"


class SchemaMismatch(Failed):
    """A message has a schema number or a shape that this version does not read."""

    code = "schema_mismatch"


class InternalError(Failed):
    """An unexpected error; the log of the service has the details."""

    code = "internal_error"
    retryable = True


class NotPermitted(Failed):
    """The NATS server does not let this user do that."""

    code = "not_permitted"


def _leaves(root: type[GiornataError]) -> dict[str, type[GiornataError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _leaves(child)
    return found


BY_CODE: dict[str, type[GiornataError]] = _leaves(GiornataError)
"""Every error class by its stable code."""


def from_body(body: ErrorBody) -> GiornataError:
    """Raise-able error from its travelling form; a code of a newer version becomes :class:`Failed`."""
    return BY_CODE.get(body.code, Failed)(
        body.message,
        field=body.field,
        received=body.received,
        accepted=body.accepted,
        retry_after_s=body.retry_after_s,
    )
