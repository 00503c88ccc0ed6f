"""What every error has, and how one travels. The tree itself is in :mod:`giornata.wire.errors`."""

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
