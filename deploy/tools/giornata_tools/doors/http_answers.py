"""What the gateway answers, read from its JSON. Pure; fields that it added since are ignored."""

from __future__ import annotations

from pydantic import Base64Bytes, BaseModel, ConfigDict

from giornata.wire.errors import ErrorBody
from giornata_tools.doors.edits import EditProgress, PaintedPicture, Preview


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ProgressData(_Answer):
    """Data of ``image_edit.progress``."""

    job_id: str
    state: str
    attempt: int
    index: int = 0
    step: int = 0
    steps: int = 0

    def told(self) -> EditProgress:
        """The value that both doors tell."""
        return EditProgress(self.state, self.attempt, self.index, self.step, self.steps)


class PartialImage(_Answer):
    """Data of ``image_edit.partial_image``."""

    index: int
    partial_image_index: int
    step: int
    box: tuple[int, int, int, int]
    media_type: str
    b64_json: Base64Bytes

    def preview(self) -> Preview:
        """The value that both doors tell."""
        suffix = f".{self.media_type.removeprefix('image/')}"
        return Preview(self.index, self.partial_image_index, self.step, self.box, suffix, self.b64_json)


class CompletedData(_Answer):
    """Data of ``image_edit.completed``."""

    job_id: str
    index: int
    seed: int
    size: str
    b64_json: Base64Bytes

    def painted(self) -> PaintedPicture:
        """The value that both doors tell."""
        return PaintedPicture(self.index, self.seed, self.b64_json)


class AnsweredError(_Answer):
    """What went wrong."""

    code: str
    message: str
    param: str | None = None
    received: str | None = None
    accepted: str | None = None


class FailedEvent(_Answer):
    """Body of a refusal, and data of ``error``."""

    error: AnsweredError
    index: int | None = None
    """Index of the picture that failed, where others may have succeeded."""

    def body(self, retry_after: str = "") -> ErrorBody:
        """The error as it travels elsewhere; `retry_after` is the header of that name, in seconds."""
        return ErrorBody(
            code=self.error.code,
            message=self.error.message,
            field=self.error.param,
            received=self.error.received,
            accepted=self.error.accepted,
            retry_after_s=float(retry_after) if retry_after.isdecimal() else None,
        )


class JobStateAnswer(_Answer):
    """What is read of a job's status."""

    state: str


EVENTS: dict[str, type[ProgressData | PartialImage | CompletedData | FailedEvent]] = {
    "image_edit.progress": ProgressData,
    "image_edit.partial_image": PartialImage,
    "image_edit.completed": CompletedData,
    "error": FailedEvent,
}
"""Events by type; unknown types of a newer gateway are passed over."""


def read_event(kind: str, data: str) -> ProgressData | PartialImage | CompletedData | FailedEvent | None:
    """An event of an edit's stream, or None for one that this version does not know.

    Raises:
        pydantic.ValidationError: it lacks something.
    """
    known = EVENTS.get(kind)
    return None if known is None else known.model_validate_json(data)
