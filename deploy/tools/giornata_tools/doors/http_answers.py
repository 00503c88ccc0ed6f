"""What the gateway answers, read from its JSON. Pure; fields that it added since are ignored."""

from __future__ import annotations

from pydantic import Base64Bytes, BaseModel, Field

from giornata.wire.errors import ErrorBody
from giornata_tools.doors.edits import EditProgress, PaintedPicture, Preview


class ProgressData(BaseModel):
    """Data of ``image_edit.progress``; events of a generation have the same data."""

    job_id: str
    state: str
    attempt: int
    index: int = 0
    step: int = 0
    steps: int = 0

    def told(self) -> EditProgress:
        """The value that both doors tell."""
        return EditProgress(self.state, self.attempt, self.index, self.step, self.steps)


class PartialImage(BaseModel):
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


class CompletedData(BaseModel):
    """Data of ``image_edit.completed``."""

    job_id: str
    index: int
    seed: int
    size: str
    b64_json: Base64Bytes

    def painted(self) -> PaintedPicture:
        """The value that both doors tell."""
        return PaintedPicture(self.index, self.seed, self.b64_json)


class AnsweredError(ErrorBody):
    """What went wrong, under the names of HTTP."""

    field: str | None = Field(None, alias="param")


class FailedEvent(BaseModel):
    """Body of a refusal, and data of ``error``."""

    error: AnsweredError
    index: int | None = None
    """Index of the picture that failed, where others may have succeeded."""

    def body(self, retry_after: str = "") -> ErrorBody:
        """The error as it travels elsewhere; `retry_after` is the header of that name, in seconds."""
        again_s = float(retry_after) if retry_after.isdecimal() else None
        return self.error.model_copy(update={"retry_after_s": again_s})


class JobStateAnswer(BaseModel):
    """What is read of a job's status."""

    state: str


Event = ProgressData | PartialImage | CompletedData | FailedEvent

EVENTS: dict[str, type[Event]] = {
    f"{task}.{name}": kind
    for task in ("image_edit", "image_generation")
    for name, kind in (
        ("progress", ProgressData),
        ("partial_image", PartialImage),
        ("completed", CompletedData),
    )
} | {"error": FailedEvent}
"""Events by type; unknown types of a newer gateway are passed over."""


def read_event(kind: str, data: str) -> Event | None:
    """An event of an edit's stream, or None for one that this version does not know.

    Raises:
        pydantic.ValidationError: it lacks something.
    """
    known = EVENTS.get(kind)
    return None if known is None else known.model_validate_json(data)
