"""The requests of applications: the parameters of an edit, its references and masks from words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Final, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from giornata.wire.adapters import (
    CONTROL_IMAGE,
    CONTROL_IMAGES,
    MAX_CONTROLNETS,
    MAX_LORAS,
    AskedControl,
    AskedLora,
    LoraWait,
    joined_at,
)
from giornata.wire.errors import GiornataError, InvalidField, UnknownField
from giornata.wire.models import (
    MAX_INTERVAL,
    MAX_ORDER,
    SETTINGS,
    Sampler,
    StepCache,
    Task,
    TaylorSeerSchedule,
    evaluations,
)
from giornata.wire.values import RecordModel, not_blank

T = TypeVar("T")

REFERENCE: Final = "reference"
"""Name of the field."""
MAX_REFERENCES: Final = 15
"""Most that a request may bring beside its image, whatever its model; a model's card tells how many it takes."""


def reference_name(index: int) -> str:
    """The name of a reference's tensor where references travel together."""
    return f"{REFERENCE}_{index}"


def named_references(references: Sequence[T]) -> dict[str, T]:
    """References by name, in their order."""
    return {reference_name(index): reference for index, reference in enumerate(references)}


def named_control_images(images: Sequence[T]) -> dict[str, T]:
    """Control images by the names of their files, in their order; InvalidField where they are more than are taken."""
    if len(images) > MAX_CONTROLNETS:
        raise InvalidField(
            "The request brings too many control images.",
            field=CONTROL_IMAGE,
            received=f"{len(images)} pictures",
            accepted=f"at most {MAX_CONTROLNETS}",
        )
    return dict(zip(CONTROL_IMAGES, images, strict=False))


def check_count(count: int) -> None:
    """Raise InvalidField where a request brings more references than any model takes."""
    if count > MAX_REFERENCES:
        raise InvalidField(
            "The request brings too many references.",
            field=REFERENCE,
            received=f"{count} pictures",
            accepted=f"at most {MAX_REFERENCES}",
        )


def named_once(loras: tuple[AskedLora, ...]) -> tuple[AskedLora, ...]:
    """`loras`, each of which is another one; ValueError names the first that comes twice."""
    twice = [each.id for index, each in enumerate(loras) if each.id in {one.id for one in loras[:index]}]
    if twice:
        raise ValueError(f"names {twice[0]} twice")
    return loras


MAX_WORDS: Final = 200
"""Characters of the words that name what a mask shows."""
MAX_REGIONS: Final = 16
"""Most regions of one mask; also what is taken where a request names no number."""
EACH_REGIONS: Final = 4
"""Regions that are edited one by one, where a request names no number: each costs as much as a picture."""
EACH_PADDING: Final = 32
"""Pixels around each of them, where a request names no number; what A1111 and ADetailer take."""
MASK_PROMPT: Final = "mask_prompt"
"""Name of the field."""


MaskWords = Annotated[str, StringConstraints(min_length=1, max_length=MAX_WORDS), AfterValidator(not_blank)]


class SegmentationFields(RecordModel):
    """Fields of an edit that ask for its mask."""

    mask_prompt: MaskWords | None = Field(
        None,
        description='What to repaint, in words, instead of `mask`: "the left shoe". Every region that the words name '
        "is; `mask_mode=black` repaints everything else.",
    )
    mask_threshold: float | None = Field(
        None,
        gt=0,
        le=1,
        description="How sure the mask model must be of a region of `mask_prompt`; default: the model's own.",
    )
    max_regions: int | None = Field(
        None,
        ge=1,
        le=MAX_REGIONS,
        description=f"How many regions of `mask_prompt` are taken at most, the surest ones; default: {MAX_REGIONS}.",
    )

    auto_edit: bool = Field(
        default=False,
        description="Edit each region of `mask_prompt` by itself, at the model's own resolution around it, and paste "
        f"all into one picture. `padding_mask_crop` is {EACH_PADDING} then by default, `max_regions` {EACH_REGIONS}.",
    )

    @field_validator("mask_threshold", "max_regions")
    @classmethod
    def _is_of_words(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get(MASK_PROMPT, "") is None:
            raise ValueError("needs mask_prompt")
        return value

    @field_validator("auto_edit")
    @classmethod
    def _edits_regions(cls, each: bool, info: ValidationInfo) -> bool:  # noqa: FBT001 - the field's value
        if not each:
            return each
        if info.data.get(MASK_PROMPT, "") is None:
            raise ValueError("needs mask_prompt")
        plain = {"n": 1, "partial_images": 0, "controlnets": ()}
        for name, value in plain.items():
            if info.data.get(name, value) != value:
                raise ValueError(f"makes one picture of several crops, and takes no {name}")
        return each


MAX_STEPS: Final = 200
MAX_IMAGES: Final = 10
MAX_SEED: Final = 2**64 - 1
"""That of torch's generators. The seed after it is 0."""
TOLD: Final = 10
"""Most fields at fault that an error names."""
LORAS: Final = 'LoRAs are named by `loras`: [{"id": "lora_…", "scale": 1.0}]'
CONTROLNETS: Final = 'ControlNets are named by `controlnets`: [{"model": "…", "image": 0}]'
ALIASES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("adapters", "lora", "lora_scale", "lora_scales"), LORAS),
    **dict.fromkeys(("controlnet", "control_image", "controlnet_conditioning_scale"), CONTROLNETS),
}
"""What others call fields → how they are named here."""
REMOVED: Final[Mapping[str, str]] = {
    "approximate": "Every picture begins with its own seed's noise, and none with an earlier picture's latent any more",
    "step_cache_threshold": "The first-block cache that it set is gone; step_cache taylorseer serves better",
}
"""Fields of earlier versions → what holds now."""


class MaskMode(StrEnum):
    """The pixels of the mask that mean "edit"."""

    AUTO = "auto"
    """Transparent pixels where the mask has any, as in OpenAI's API. Otherwise white ones."""
    ALPHA = "alpha"
    """Transparent pixels: an alpha below 128."""
    WHITE = "white"
    """Pixels of luma 128 and above that are not transparent."""
    BLACK = "black"
    """Pixels of luma below 128 that are not transparent."""


class OutputFormat(StrEnum):
    """The encoding of the answer."""

    PNG = "png"
    JPEG = "jpeg"
    WEBP = "webp"


Quality = Literal["auto", "low", "medium", "high", "xhigh", "max", "standard", "hd"]
"""How much is computed for a picture, by OpenAI's names; :mod:`giornata.wire.resolution` tells what each stands for."""
Background = Literal["auto", "opaque", "transparent"]


class Reuse(StrEnum):
    """The parts of a template run that an edit may take."""

    AUTO = "auto"
    """Entries of the nearest noise level."""
    STRICT = "strict"
    """Entries of the edit's own noise levels."""
    OFF = "off"
    """Nothing."""


MODEL_NAME: Final = "[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"
ModelName = Annotated[str, StringConstraints(pattern=f"^{MODEL_NAME}$")]
Prompt = Annotated[str, StringConstraints(min_length=1, max_length=32_000)]
"""As many characters as OpenAI's API takes; how many tokens of it a model reads is the model's."""
NegativePrompt = Annotated[str, StringConstraints(max_length=32_000)]
PROMPT_BYTES: Final = 36_000
"""Most bytes of a prompt and its negative prompt together, so that the jobs that one tenant may have queued fit into
their stream: half of the routers' default limits."""
PROMPTS_FIT: Final = f"`prompt` and `negative_prompt` have at most {PROMPT_BYTES} bytes in UTF-8 together."
OutputSize = Annotated[str, StringConstraints(pattern=r"^(auto|[1-9]\d{1,4}x[1-9]\d{1,4})$")]
"""`auto` or WIDTHxHEIGHT."""
M = TypeVar("M", bound=BaseModel)


class GenerationParameters(RecordModel):
    """A picture from text alone, as asked for. ``None`` means the model's own default.

    Doors make it by :func:`asked`, which refuses unknown fields; the parameters of a job's record keep them.
    :func:`giornata.wire.resolution.resolve` fills in what is None.
    """

    prompt: Prompt = Field(description=f"What the picture shows. {PROMPTS_FIT}")
    model: ModelName | None = Field(
        None, description="Name of the model; default: the only one that is served."
    )
    n: int = Field(1, ge=1, le=MAX_IMAGES, description="How many pictures; picture i uses seed + i.")
    size: OutputSize = Field(
        "auto",
        description="Size of the pictures: `auto` (the model's native one) or WIDTHxHEIGHT in the model's multiples.",
    )
    output_format: OutputFormat = Field(OutputFormat.PNG, description="Encoding of the pictures.")
    output_compression: int | None = Field(
        None,
        ge=0,
        le=100,
        description="Of JPEG and WebP, 100 the best; default 95. HTTP ignores it with PNG.",
    )
    quality: Quality = Field(
        "auto",
        description="Steps and reuse, where the request does not name them: `low` is half of the model's steps; "
        "`medium`, `auto` and `standard` are its own; `high` and `hd` are one and a half times as many, `xhigh` and "
        "`max` twice as many, without reuse.",
    )
    background: Background = Field(
        "auto",
        description="`opaque` has no alpha channel, white where the image is transparent; `transparent` keeps that of "
        "the image, which needs one.",
    )
    num_inference_steps: int | None = Field(None, ge=1, le=MAX_STEPS, description="Denoising steps.")
    guidance_scale: float | None = Field(
        None,
        ge=0,
        le=100,
        description="How strongly the prompt guides, as the model's `guidance` means it; refused where that is `none`.",
    )
    true_cfg_scale: float | None = Field(
        None,
        ge=1,
        le=100,
        description="Classifier-free guidance against `negative_prompt`; refused by models for which `guidance_scale` "
        "is that.",
    )
    negative_prompt: NegativePrompt | None = Field(
        None,
        validate_default=True,
        description=f"What to keep away from; needs classifier-free guidance. {PROMPTS_FIT}",
    )
    sampler: Sampler | None = Field(
        None, description="What computes the steps; `GET /v1/models` tells which ones a model takes."
    )
    seed: int | None = Field(
        None, ge=0, le=MAX_SEED, description="Seed of picture 0; default: random, and reported."
    )
    loras: Annotated[tuple[AskedLora, ...], AfterValidator(named_once)] = Field(
        (),
        max_length=MAX_LORAS,
        description="LoRAs that act on the model, each with a scale: their ids are those of `/v1/loras`.",
    )
    lora_wait: LoraWait = Field(
        LoraWait.EXACT,
        description="`exact`: every step has the LoRAs; `bounded`: the first steps may be made before they are loaded.",
    )
    lora_join: float | None = Field(
        None, ge=0, lt=1, description="Share of the steps after which `loras` join, even if loaded before."
    )
    controlnets: tuple[AskedControl, ...] = Field(
        (),
        max_length=MAX_CONTROLNETS,
        description="ControlNets that the model follows, each with its control image: `GET /v1/models` tells which "
        "ones a model has.",
    )
    partial_images: int = Field(
        0,
        ge=0,
        le=16,
        description="Previews of each picture while it is denoised, spread evenly over its steps; fewer where it "
        "has fewer steps. Needs a stream to travel in.",
    )
    slo_ms: int | None = Field(
        None,
        ge=1,
        le=24 * 3600 * 1000,
        description="Milliseconds in which the job should have ended; the answer and the metrics tell whether it had. "
        "A router with the deadline-aware policy serves by it: the earliest deadline that can still be met first.",
    )
    step_cache: StepCache = Field(
        StepCache.OFF,
        description="By which rule fewer steps are computed: `off`; `taylorseer`, outputs between computed steps are "
        "extrapolated. `GET /v1/models` tells which ones a model takes.",
    )
    step_cache_interval: int | None = Field(
        None, ge=2, le=MAX_INTERVAL, description="Of `taylorseer`: one step in so many is computed."
    )
    step_cache_order: int | None = Field(
        None, ge=0, le=MAX_ORDER, description="Of `taylorseer`: the highest finite difference."
    )
    step_cache_warmup: int | None = Field(
        None, ge=1, le=MAX_STEPS, description="Of `taylorseer`: so many first steps are all computed."
    )
    user: Annotated[str, StringConstraints(max_length=256)] | None = Field(
        None, description="The application's end user; kept in the job's record and log."
    )

    _says_something = field_validator("prompt")(not_blank)

    @field_validator("prompt", "negative_prompt")
    @classmethod
    def _fits_the_queue(cls, text: str | None, info: ValidationInfo) -> str | None:
        together = (info.data.get("prompt") or "") + (text or "")
        if (size_bytes := len(together.encode())) > PROMPT_BYTES:
            raise ValueError(
                f"prompt and negative_prompt have {size_bytes} bytes in UTF-8, and at most {PROMPT_BYTES} are accepted"
            )
        return text

    @field_validator("lora_join")
    @classmethod
    def _joins_loras(cls, share: float | None, info: ValidationInfo) -> float | None:
        return share if share is None else joined_at(share, info.data)

    @field_validator("output_compression")
    @classmethod
    def _has_a_quality(cls, compression: int | None, info: ValidationInfo) -> int | None:
        if compression is not None and info.data.get("output_format") is OutputFormat.PNG:
            raise ValueError("applies to jpeg and webp only")
        return compression

    @field_validator("background")
    @classmethod
    def _is_held_by_the_format(cls, background: Background, info: ValidationInfo) -> Background:
        if background == "transparent" and info.data.get("output_format") is OutputFormat.JPEG:
            raise ValueError("jpeg holds no alpha channel; png and webp do")
        return background

    @field_validator("negative_prompt")
    @classmethod
    def _is_guided_away_from(cls, negative_prompt: str | None, info: ValidationInfo) -> str | None:
        scale = info.data.get("true_cfg_scale")  # where that is a mistake, it alone is told
        if negative_prompt is not None and scale is not None and scale <= 1:
            raise ValueError("needs true_cfg_scale above 1")
        if negative_prompt is None and scale is not None and scale > 1:
            raise ValueError("true_cfg_scale above 1 needs it")
        return negative_prompt

    @field_validator(*SETTINGS)
    @classmethod
    def _sets_the_cache_asked_for(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("step_cache") is StepCache.OFF:
            raise ValueError(f"needs step_cache {StepCache.TAYLORSEER}")
        return value

    @property
    def output_size(self) -> tuple[int, int] | None:
        """(width, height) in pixels, or None for `auto`."""
        if self.size == "auto":
            return None
        width, height = self.size.split("x")
        return int(width), int(height)


class EditParameters(SegmentationFields, GenerationParameters):
    """One edit, as asked for. A generation is carried out as one too: see :mod:`giornata.wire.resolution`."""

    prompt: Prompt = Field(description=f"What belongs into the masked region. {PROMPTS_FIT}")
    size: OutputSize = Field(
        "auto",
        description="Output size: `auto` (that of the image) or WIDTHxHEIGHT of the image's aspect ratio.",
    )
    strength: float | None = Field(
        None, gt=0, le=1, description="How much of the masked region is noised: 1 ignores what was there."
    )
    mask_mode: MaskMode = Field(
        MaskMode.AUTO,
        description="Which pixels of the mask mean edit: `auto`, transparent ones if it has any, otherwise white ones.",
    )
    grow_mask: int = Field(0, ge=0, le=512, description="Pixels of the image by which the mask is dilated.")
    mask_blur: float | None = Field(
        None,
        ge=0,
        le=256,
        description="Feather of the paste, in pixels of the image, outward from the grown mask; 0 is a hard edge. By "
        "default the last pixels inside of the mask are mixed, and none outside of it changes.",
    )
    padding_mask_crop: int | None = Field(
        None,
        ge=0,
        le=4096,
        description="Edit only the mask's surroundings, at the model's own resolution: pixels of the image kept "
        "around the mask's box; default: the whole picture is edited.",
    )
    reuse: Reuse = Field(
        Reuse.AUTO,
        description="Whether what was computed for the picture outside the mask may be taken from earlier edits of it: "
        "`auto`, it is taken where it was recorded; `strict`, only at this edit's own noise levels; `off`, everything "
        "is computed, exactly as diffusers does.",
    )
    halo: int = Field(
        1,
        ge=0,
        le=8,
        description="How far around the mask is computed with it, where the rest is reused, in cells of 16 pixels; "
        "in tokens of models with smaller ones.",
    )

    @field_validator("mask_mode")
    @classmethod
    def _is_one_of_the_mask(cls, mode: MaskMode, info: ValidationInfo) -> MaskMode:
        if mode is MaskMode.ALPHA and info.data.get("mask_prompt") is not None:
            raise ValueError("a mask from words has no alpha channel: white, or black for everything else")
        if mode is MaskMode.BLACK and info.data.get("auto_edit"):
            raise ValueError("auto_edit repaints what the words name, and not everything else")
        return mode

    @field_validator("reuse")
    @classmethod
    def _is_of_the_whole(cls, reuse: Reuse, info: ValidationInfo) -> Reuse:
        if reuse is Reuse.STRICT and info.data.get("auto_edit"):
            raise ValueError("auto_edit computes all of each region's surroundings: off")
        return reuse


FIELDS: Final[Mapping[Task, tuple[str, ...]]] = {
    Task.EDIT: ("image", "mask", REFERENCE, *CONTROL_IMAGES, "template_id", *EditParameters.model_fields),
    Task.GENERATE: (REFERENCE, *CONTROL_IMAGES, *GenerationParameters.model_fields),
}
"""Fields of each task, the same at every door; :mod:`giornata.wire.resolution` tells which ones a model takes."""
EDIT_FIELDS: Final = frozenset(FIELDS[Task.EDIT]).difference(FIELDS[Task.GENERATE])
"""Fields that only edits have."""


def asked(kind: type[M], given: Mapping[str, object]) -> M:
    """Return what an application asks for, as a `kind`.

    Raises:
        InvalidField: fields are wrong, and all are named; or they are of a generation, and only edits have them.
        UnknownField: fields are unknown.
    """
    generates = issubclass(kind, GenerationParameters) and not issubclass(kind, EditParameters)
    if of_edits := sorted(EDIT_FIELDS.intersection(given)) if generates else []:
        raise InvalidField(
            f"A generation begins without a picture: {', '.join(of_edits)} belong to edits.",
            field=of_edits[0],
            received=", ".join(of_edits),
            accepted=f"leave {' and '.join(of_edits)} out, or ask for an edit",
        )
    try:
        return kind.model_validate(given, extra="forbid")
    except ValidationError as error:
        raise request_error(error, kind.model_fields) from error


def evaluations_of(resolved: EditParameters, *, keeps_whole_steps: bool = False) -> int:
    """Return how often the network is evaluated for each picture of `resolved` parameters.

    For `keeps_whole_steps`, by default Flux's, see :func:`giornata.wire.models.evaluations`.
    """
    if resolved.num_inference_steps is None or resolved.strength is None:
        raise ValueError("evaluations_of needs resolved parameters")
    return evaluations(
        resolved.sampler or Sampler.EULER,
        resolved.num_inference_steps,
        resolved.strength,
        keeps_whole_steps=keeps_whole_steps,
    )


def extrapolated_steps(resolved: EditParameters, steps: int) -> int:
    """Return how many of so many steps TaylorSeer extrapolates in a row that begins with them; 0 without it."""
    interval, warmup = resolved.step_cache_interval, resolved.step_cache_warmup
    return 0 if interval is None or warmup is None else TaylorSeerSchedule(interval, warmup).skipped(steps)


def request_error(error: ValidationError, fields: Iterable[str]) -> GiornataError:
    """A pydantic report as one error of the tree that names every field at fault; `fields` are those there are."""
    details = error.errors(include_url=False, include_context=False)
    unknown = [str(d["loc"][0]) for d in details if d["type"] == "extra_forbidden" and len(d["loc"]) == 1]
    others = [name for name in unknown if name in ALIASES]
    if others:
        what, accepted = ALIASES[others[0]].split(": ", maxsplit=1)
        return UnknownField(
            f"Unknown field: {', '.join(others)}. {what}.",
            field=others[0],
            received=", ".join(others),
            accepted=f"{what.split('`')[1]}: {accepted}",
        )
    gone = [name for name in unknown if name in REMOVED]
    if gone:
        return UnknownField(
            f"The field {gone[0]} was removed. {REMOVED[gone[0]]}.",
            field=gone[0],
            received=gone[0],
            accepted=f"leave {gone[0]} out",
        )
    if unknown:
        named = ", ".join(unknown[:TOLD]) + (
            f" and {len(unknown) - TOLD} more" if len(unknown) > TOLD else ""
        )
        return UnknownField(
            f"Unknown field: {named}.",
            field=unknown[0],
            received=named,
            accepted=", ".join(fields),
        )
    sentences = [f"{_field(d['loc'])}: {re.sub(r'^Value error, ', '', d['msg'])}" for d in details[:TOLD]]
    if len(details) > TOLD:
        sentences.append(f"and {len(details) - TOLD} more")
    first = details[0]
    value = first["input"]
    return InvalidField(
        "; ".join(sentences) + ".",
        field=_field(first["loc"]),
        received=value if isinstance(value, str | int | float | bool) else type(value).__name__,
        accepted=first["msg"] if len(details) == 1 else None,
    )


def _field(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location) or "request"
