"""What the gateway answers, read from its JSON. Pure; fields that it added since are ignored."""

from __future__ import annotations

from pydantic import Base64Bytes, BaseModel, ConfigDict

from giornata.wire.errors import ErrorBody
from giornata_tools.doors.edits import Painted, Preview, Told


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Progress(_Answer):
    """Data of ``image_edit.progress``."""

    job_id: str
    state: str
    attempt: int
    index: int = 0
    step: int = 0
    steps: int = 0

    def told(self) -> Told:
        """As both doors tell it."""
        return Told(self.state, self.attempt, self.index, self.step, self.steps)


class PartialImage(_Answer):
    """Data of ``image_edit.partial_image``."""

    index: int
    partial_image_index: int
    step: int
    box: tuple[int, int, int, int]
    media_type: str
    b64_json: Base64Bytes

    def preview(self) -> Preview:
        """As both doors tell it."""
        suffix = f".{self.media_type.removeprefix('image/')}"
        return Preview(self.index, self.partial_image_index, self.step, self.box, suffix, self.b64_json)


class Completed(_Answer):
    """Data of ``image_edit.completed``."""

    job_id: str
    index: int
    seed: int
    size: str
    b64_json: Base64Bytes

    def painted(self) -> Painted:
        """As both doors tell it."""
        return Painted(self.index, self.seed, self.b64_json)


class ErrorDetail(_Answer):
    """What went wrong."""

    code: str
    message: str
    param: str | None = None
    received: str | None = None
    accepted: str | None = None


class Failed(_Answer):
    """Body of a refusal, and data of ``error``."""

    error: ErrorDetail
    index: int | None = None
    """Of the picture that failed, where others may have succeeded."""

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


class JobStatus(_Answer):
    """What is read of a job's status."""

    state: str


EVENTS: dict[str, type[Progress | PartialImage | Completed | Failed]] = {
    "image_edit.progress": Progress,
    "image_edit.partial_image": PartialImage,
    "image_edit.completed": Completed,
    "error": Failed,
}
"""By type; those of a newer gateway are passed over."""


def read_event(kind: str, data: str) -> Progress | PartialImage | Completed | Failed | None:
    """An event of an edit's stream, or None for one that this version does not know.

    Raises:
        pydantic.ValidationError: it lacks something.
    """
    known = EVENTS.get(kind)
    return None if known is None else known.model_validate_json(data)
