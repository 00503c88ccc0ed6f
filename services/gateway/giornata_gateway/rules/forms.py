"""The forms of edits, generations, templates and masks as typed values. Pure."""

from __future__ import annotations

import binascii
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationInfo, field_validator

from giornata.wire import resolution
from giornata.wire.adapters import CONTROL_IMAGES
from giornata.wire.codec import read_json
from giornata.wire.errors import InvalidField, NotSupported
from giornata.wire.jobs import Priority
from giornata.wire.messages import MaskParameters
from giornata.wire.models import Task
from giornata.wire.requests import (
    MAX_REFERENCES,
    REFERENCE,
    EditParameters,
    GenerationParameters,
    ModelName,
    OutputFormat,
    OutputSize,
    asked,
    check_count,
    reference_name,
)

LISTS: Final[Mapping[str, str]] = {
    "loras": '[{"id": "lora_…", "scale": 1.0}]',
    "controlnets": '[{"model": "outline", "image": 0}]',
}
"""Fields that are lists, and an example of each."""


def with_lists(values: Mapping[str, object]) -> dict[str, object]:
    """The fields of a form with its lists read; other doors bring lists, which stay.

    InvalidField where the text of a list is not JSON.
    """
    read = dict(values)
    for name in LISTS.keys() & values.keys():
        text = values[name]
        if isinstance(text, str):
            try:
                read[name] = read_json(text)
            except (ValueError, RecursionError) as error:
                raise InvalidField(
                    f"{name} is not JSON: {str(error)[:100]}.",
                    field=name,
                    received=text[:100],
                    accepted=f"JSON such as {LISTS[name]}",
                ) from error
    return read


LoraName = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
TemplateId = Annotated[str, StringConstraints(min_length=1, max_length=96)]


class ResponseFormat(StrEnum):
    """The format in which the pictures of a synchronous answer travel."""

    B64_JSON = "b64_json"
    """Inside the JSON answer."""
    URL = "url"
    """As links, which live as long as the results."""
    IMAGE = "image"
    """The answer's body is the picture itself; `n` must be 1."""


class SyncResponseFields(BaseModel):
    """The format of an answer that a client waits for; fields of the routes below ``/v1/images``."""

    response_format: ResponseFormat = Field(
        ResponseFormat.B64_JSON,
        description="`image` is the default where the Accept header prefers an image type.",
    )
    stream: bool = Field(
        default=False, description="Answer with server-sent events: the pictures, as they come."
    )
    progress: bool = Field(
        default=False,
        description="Have the stream tell every state and step, too, as `image_edit.progress`, which OpenAI's clients "
        "do not know. A job's events always tell them.",
    )

    @field_validator("progress")
    @classmethod
    def _travels_in_a_stream(cls, progress: bool, info: ValidationInfo) -> bool:  # noqa: FBT001 - the field's value
        if progress and not info.data.get("stream", True):
            raise ValueError("needs stream=true")
        return progress

    @field_validator("response_format")
    @classmethod
    def _holds_the_pictures(cls, form: ResponseFormat, info: ValidationInfo) -> ResponseFormat:
        if form is ResponseFormat.IMAGE and info.data.get("n", 1) != 1:
            raise ValueError("image (or Accept: image/*) needs n=1")
        return form

    @field_validator("stream")
    @classmethod
    def _carries_pictures_as_text(cls, stream: bool, info: ValidationInfo) -> bool:  # noqa: FBT001 - the field's value
        form = info.data.get("response_format", ResponseFormat.B64_JSON)
        if stream and form is not ResponseFormat.B64_JSON:
            raise ValueError("needs response_format=b64_json")
        return stream


WITHOUT_EFFECT: Final = "Sent by OpenAI's clients; without effect, as the header X-Giornata-Ignored tells."


class UnreadFields(BaseModel):
    """Fields of OpenAI's that change nothing here. The answer's header tells which of them came."""

    moderation: Literal["auto", "low"] | None = Field(None, description=WITHOUT_EFFECT)
    input_fidelity: Literal["low", "high"] | None = Field(None, description=WITHOUT_EFFECT)
    style: Literal["vivid", "natural"] | None = Field(None, description=WITHOUT_EFFECT)
    complexity: Literal["low", "medium", "high"] | None = Field(None, description=WITHOUT_EFFECT)
    safety_identifier: Annotated[str, StringConstraints(max_length=256)] | None = Field(
        None, description=WITHOUT_EFFECT
    )
    _dropped: tuple[str, ...] = ()

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields of the request that have no effect."""
        unread = tuple(name for name in UnreadFields.model_fields if getattr(self, name) is not None)
        return self._dropped + unread


class EditFields(UnreadFields, EditParameters):
    """Fields of an edit, however its answer travels."""

    model_config = ConfigDict(extra="forbid")

    template_id: TemplateId | None = Field(None, description="A registered template, instead of `image`.")

    task: ClassVar[Task] = Task.EDIT

    def parameters(self) -> EditParameters:
        """The parameters without the fields of this door alone."""
        values = {name: getattr(self, name) for name in EditParameters.model_fields}
        return EditParameters.model_construct(self.model_fields_set & values.keys(), **values)


class EditForm(SyncResponseFields, EditFields):
    """Fields of ``POST /v1/images/edits``."""


class PictureSource(BaseModel):
    """The source of a picture in a JSON body."""

    model_config = ConfigDict(extra="forbid")

    image_url: str | None = Field(
        None,
        description="A data URL of PNG, JPEG or WebP; an https URL where the gateway's configuration allows its host.",
    )
    file_id: str | None = Field(
        None, description="Refused: this server keeps no files of OpenAI's Files API."
    )


NamedSource = tuple[str, PictureSource]
"""A picture and the field that it came in."""


class WrittenPictures(BaseModel):
    """The pictures of an edit in a JSON body."""

    images: list[PictureSource] = Field(
        default_factory=list,
        max_length=1 + MAX_REFERENCES,
        description="The first is edited; the others are references. Left out with `template_id`.",
    )
    mask: PictureSource | None = Field(None, description="What to repaint; see `mask_mode`.")


class WrittenEditForm(EditForm, WrittenPictures):
    """Body of ``POST /v1/images/edits`` as JSON."""


class GenerationFields(UnreadFields, GenerationParameters):
    """Fields of a generation, however its answer travels."""

    model_config = ConfigDict(extra="forbid")

    task: ClassVar[Task] = Task.GENERATE

    def parameters(self) -> EditParameters:
        """The parameters with which the job is carried out, without the fields of this door alone."""
        return resolution.carried_out(self)


class GenerationForm(SyncResponseFields, GenerationFields):
    """Fields of ``POST /v1/images/generations``."""


class UnattendedForm(BaseModel):
    """Fields of a job that no connection is held open for: who is told of its end, and how urgent it is."""

    webhook: str | None = Field(
        None,
        max_length=2000,
        description="URL to which the job's end is posted, signed as Standard Webhooks has it; see the page on HTTP.",
    )
    priority: Priority = Field(
        Priority.BATCH,
        description="`interactive` where a person looks on; `batch` lets all interactive jobs pass.",
    )


class JobForm(UnattendedForm, EditFields):
    """Fields of an edit at ``POST /v1/jobs``."""


class GenerationJobForm(UnattendedForm, GenerationFields):
    """Fields of a generation at ``POST /v1/jobs``."""


class TemplateForm(BaseModel):
    """Fields of ``POST /v1/templates``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelName | None = Field(None, description=EditParameters.model_fields["model"].description)
    size: OutputSize = Field("auto", description=EditParameters.model_fields["size"].description)


class LoraForm(BaseModel):
    """Fields of ``POST /v1/loras``; they come before the file or after it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelName | None = Field(None, description=EditParameters.model_fields["model"].description)
    name: LoraName | None = Field(None, description="What its owner calls it; default: the file's name.")


FILES = {
    "image": "image",
    "image[]": "image",
    "mask": "mask",
    "mask[]": "mask",
    REFERENCE: REFERENCE,
    f"{REFERENCE}[]": REFERENCE,
    **{reference_name(index): REFERENCE for index in range(MAX_REFERENCES)},
    **{name: name for name in CONTROL_IMAGES},
}
"""Names of file parts and what they hold; clients of OpenAI write `image[]`, or `image` again, for each of a list.

The first image is edited, and the others are references.
"""
FREE_TEXTS = frozenset({"prompt", "negative_prompt", "mask_prompt"})
"""Fields that mean something where they are empty; any other is as if left out."""
COMPRESSION: Final = "output_compression"
ONE_FILE = "one PNG, JPEG or WebP file"

Form = EditFields | GenerationFields
"""What a request for pictures says."""
F = TypeVar("F", bound=Form)


@dataclass(frozen=True)
class RequestBody:
    """A request's body, read within the limits."""

    fields: tuple[tuple[str, str], ...]
    image: bytes | None
    mask: bytes | None
    references: tuple[bytes, ...] = ()
    """In the order of their parts."""
    control_images: tuple[bytes, ...] = ()
    """In the order of their numbers."""
    sources: tuple[NamedSource, ...] = ()
    """Where more pictures are: the mask, the image and first references, as far as there are any."""

    @property
    def picture(self) -> bytes:
        """The image; InvalidField without one."""
        if self.image is None:
            raise missing_image()
        return self.image


def check_source(image: object | None, template_id: str | None) -> None:
    """Raise InvalidField where an edit has no picture, or an image and a template."""
    if image is None and template_id is None:
        raise missing_image()
    if image is not None and template_id is not None:
        raise InvalidField(
            "An edit is of an image or of a template.",
            field="template_id",
            received=template_id,
            accepted="one of image and template_id",
        )


def read_form(kind: type[F], fields: Iterable[tuple[str, object]], accept: str = "") -> F:
    """The form in `fields`, names and values; `accept` is the Accept header.

    Raises:
        InvalidField, UnknownField: names the field at fault.
    """
    left_out = kind.model_fields.keys() - FREE_TEXTS  # clients write null as an empty text in a form
    given = once_each(fields)
    values = with_lists({name: value for name, value in given.items() if value != "" or name not in left_out})
    png = values.get("output_format", OutputFormat.PNG) == OutputFormat.PNG
    dropped = (COMPRESSION,) if COMPRESSION in values and png else ()
    if dropped:  # OpenAI's clients send it with any format
        del values[COMPRESSION]
    waiting = issubclass(kind, SyncResponseFields)
    if waiting and prefers_image(accept):
        values.setdefault("response_format", ResponseFormat.IMAGE)
    for name in () if waiting else SyncResponseFields.model_fields:
        if name in values:
            raise InvalidField(
                "A job has no open connection to answer on.",
                field=name,
                received=values[name],
                accepted=f"leave {name} out; see /v1/jobs/{{id}}/events and /image",
            )
    form = asked(kind, values)
    form._dropped = dropped  # noqa: SLF001 - what the form cannot tell from its fields
    streamed: bool = getattr(form, "stream", True)  # a job's events can always be followed
    if form.partial_images and not streamed:
        raise InvalidField(
            "Partial images travel in a stream, and this request has none.",
            field="partial_images",
            received=form.partial_images,
            accepted="0, or stream=true, or POST /v1/jobs and the event stream of the job",
        )
    return form


V = TypeVar("V")


def in_order(named: Mapping[str, V]) -> tuple[V, ...]:
    """Control images in the order of their names, which other names may stand between.

    InvalidField where one is left out between others.
    """
    given = [name for name in CONTROL_IMAGES if name in named]
    missing = [name for name in CONTROL_IMAGES[: len(given)] if name not in named]
    if missing:
        raise InvalidField(
            "The control images are not numbered from 0 on.",
            field=missing[0],
            received=", ".join(given),
            accepted=", ".join(CONTROL_IMAGES[: len(given)]),
        )
    return tuple(named[name] for name in given)


def once_each(fields: Iterable[tuple[str, V]]) -> dict[str, V]:
    """The fields by name; InvalidField where one is given twice."""
    values: dict[str, V] = {}
    for name, value in fields:
        if name in values:
            raise InvalidField(
                "A field is given twice.", field=name, received=value, accepted="each field once"
            )
        values[name] = value
    return values


def prefers_image(accept: str) -> bool:
    """Return whether the first type of an Accept header is an image."""
    return accept.split(",", maxsplit=1)[0].strip().lower().startswith("image/")


def missing_image() -> InvalidField:
    """The refusal of a request without a picture."""
    return InvalidField("An edit needs a picture.", field="image", received="no image", accepted=ONE_FILE)


def check_filled(picture: bytes | bytearray, field: str) -> None:
    """Raise InvalidField where a file has no bytes."""
    if not picture:
        raise InvalidField("The file is empty.", field=field, received="0 bytes", accepted=ONE_FILE)


def read_template_form(upload: RequestBody) -> TemplateForm:
    """The form of a registration; InvalidField or UnknownField names the field at fault."""
    check_alone(
        upload, "A template is a whole picture; its edits bring masks, references and control images."
    )
    return asked(TemplateForm, once_each(upload.fields))


def check_alone(upload: RequestBody, why: str) -> None:
    """Raise InvalidField where a request brings files beside its image."""
    others = {"mask": upload.mask, REFERENCE: upload.references, CONTROL_IMAGES[0]: upload.control_images}
    brought = [name for name, files in others.items() if files]
    if brought:
        raise InvalidField(why, field=brought[0], received="a file", accepted="files: image")


_DATA_URL = re.compile(r"data:image/[a-z]+;base64,")
PIECE_CHARACTERS: Final = 64 << 10
ACCEPTED = "PNG, JPEG or WebP, as base64 or data URL"


def decoded(given: object) -> tuple[bytes, ...]:
    """The files of the field `reference`: one text or a list of them, base64 or data URLs.

    InvalidField where it is something else, or holds too many.
    """
    texts = given if isinstance(given, list) else [given]
    check_count(len(texts))
    return tuple(picture(text, REFERENCE) for text in texts)


def picture(text: object, field: str) -> bytes:
    """The file of a `field`, base64 or a data URL; InvalidField where it is something else."""
    if not isinstance(text, str):
        raise InvalidField(
            "A picture is not a text.", field=field, received=type(text).__name__, accepted=ACCEPTED
        )
    found = _DATA_URL.match(text)
    start = found.end() if found else 0
    try:
        data = b"".join(_pieces(text, start))
    except (binascii.Error, ValueError) as error:
        raise InvalidField(
            "A picture is not base64.",
            field=field,
            received=f"{len(text)} characters ({error})",
            accepted=ACCEPTED,
        ) from error
    check_filled(data, field)
    return data


def _pieces(text: str, start: int) -> Iterator[bytes]:
    """The bytes in base64, piece by piece: one call for all of it would hold up every other thread."""
    for at in range(start, len(text), PIECE_CHARACTERS):
        piece = binascii.a2b_base64(text[at : at + PIECE_CHARACTERS], strict_mode=True)
        if at + PIECE_CHARACTERS < len(text) and len(piece) * 4 != PIECE_CHARACTERS * 3:
            raise ValueError("padding before its end")
        yield piece


class MaskFormat(StrEnum):
    """The format in which the masks of an answer travel."""

    B64_JSON = "b64_json"
    """Inside the JSON answer, with every region's own."""
    IMAGE = "image"
    """The answer's body is the mask of all regions together."""


class MaskForm(MaskParameters):
    """Fields of ``POST /v1/masks``."""

    model_config = ConfigDict(extra="forbid")

    response_format: MaskFormat = Field(
        MaskFormat.B64_JSON,
        description="`image` is the default where the Accept header prefers an image type.",
    )


def read_mask_form(upload: RequestBody, accept: str = "") -> MaskForm:
    """The form of a mask from words; raises as :func:`asked`. `accept` is the Accept header."""
    check_alone(upload, "A mask is made of one picture.")
    values: dict[str, object] = dict(once_each(upload.fields))
    if prefers_image(accept):
        values.setdefault("response_format", MaskFormat.IMAGE)
    return asked(MaskForm, values)


def check_no_key(headers: Container[str], header: str) -> None:
    """Raise NotSupported where a request for a mask has the `header` of an idempotency key."""
    if header in headers:
        raise NotSupported(
            "A mask is no job that a key could lead to.", field=header, accepted="leave it out"
        )
