"""The bodies of A1111's ``txt2img`` and ``img2img`` as typed values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from giornata.wire.models import Task
from giornata.wire.requests import MAX_IMAGES, MAX_SEED, MAX_STEPS, PROMPTS_FIT, NegativePrompt, Prompt, asked
from giornata_gateway.intake.rules.a1111 import neutral
from giornata_gateway.intake.rules.a1111.neutral import EffectiveFields, Values, meant_fields, schema_of
from giornata_gateway.intake.rules.a1111.prompts import Emphasis

ORIGINAL = 1
"""The `inpainting_fill` by which the masked part begins with what was there."""
STRENGTH = 0.75
"""A1111's default of `denoising_strength`."""

OVERRIDE = "override_settings"

Name = Annotated[str, StringConstraints(max_length=200)]
Side = Annotated[int, Field(ge=10, le=99_999)]


class Settings(BaseModel):
    """`override_settings`, and the body of ``POST /sdapi/v1/options``."""

    model_config = ConfigDict(
        json_schema_extra=lambda schema: _with_neutral(schema, neutral.SETTINGS, neutral.UNREAD_SETTINGS)
    )

    sd_model_checkpoint: Name | None = Field(
        None,
        description="The model: its title, its name or its hash, as `GET /sdapi/v1/sd-models` tells them.",
    )
    emphasis: Emphasis = Field(
        Emphasis.ORIGINAL,
        description="How brackets of prompts are read. `Ignore`: words without their weights. `None`: as characters.",
    )


class TextToImage(BaseModel):
    """Body of ``POST /sdapi/v1/txt2img``; what is left out or null is the model's own default."""

    model_config = ConfigDict(
        protected_namespaces=(),
        json_schema_extra=lambda schema: _with_neutral(
            schema, neutral.TEXT_TO_IMAGE, neutral.UNREAD_TEXT_TO_IMAGE
        ),
    )

    prompt: Prompt = Field(
        description=rf"Its words, LoRAs as `<lora:NAME:WEIGHT>`, and brackets as `\(`. {PROMPTS_FIT}"
    )
    negative_prompt: NegativePrompt = Field(
        "", description=f"What to keep away from; of models that take it. {PROMPTS_FIT}"
    )
    seed: int = Field(-1, ge=-1, le=MAX_SEED, description="-1: random. Picture i uses seed + i.")
    batch_size: int = Field(1, ge=1, le=MAX_IMAGES, description=f"Times `n_iter`, at most {MAX_IMAGES}.")
    n_iter: int = Field(1, ge=1, le=MAX_IMAGES, description="Pictures are made side by side in any case.")
    steps: int | None = Field(None, ge=1, le=MAX_STEPS)
    cfg_scale: float | None = Field(
        None,
        ge=0,
        le=100,
        description="Classifier-free guidance. A model without it accepts 1, and 7, which clients always send.",
    )
    distilled_cfg_scale: float | None = Field(
        None, ge=0, le=100, description="Forge's name for the scale that networks such as Flux embed."
    )
    width: Side | None = None
    height: Side | None = None
    sampler_name: Name | None = Field(None, description="As `GET /sdapi/v1/samplers` tells them.")
    sampler_index: Name | None = Field(None, description="Older name; read where there is no `sampler_name`.")
    scheduler: Name | None = Field(None, description="As `GET /sdapi/v1/schedulers` tells them.")
    override_settings: Settings = Settings()
    alwayson_scripts: dict[str, Any] = Field(
        {}, description="`controlnet` with its units; others switched off."
    )

    task: ClassVar[Task] = Task.GENERATE
    asks_nothing: ClassVar[Mapping[str, Values]] = neutral.TEXT_TO_IMAGE
    unread: ClassVar[Mapping[str, str]] = neutral.UNREAD_TEXT_TO_IMAGE

    @property
    def pictures(self) -> int:
        """How many pictures are asked for."""
        return self.batch_size * self.n_iter

    @property
    def sampler(self) -> str | None:
        """The name of the sampler, as A1111 chooses it of two fields."""
        return self.sampler_name or self.sampler_index or None

    @property
    def size(self) -> str:
        """`auto` where neither side is named."""
        return "auto" if self.width is None else f"{self.width}x{self.height}"

    @model_validator(mode="after")
    def _has_both_sides(self) -> Self:
        if (self.width is None) != (self.height is None):
            raise ValueError("width and height come together")
        if self.pictures > MAX_IMAGES:
            raise ValueError(f"batch_size times n_iter is {self.pictures}, and at most {MAX_IMAGES}")
        return self


class ImageToImage(TextToImage):
    """Body of ``POST /sdapi/v1/img2img``; what is left out or null is the model's own default."""

    model_config = ConfigDict(
        json_schema_extra=lambda schema: _with_neutral(schema, neutral.IMAGE_TO_IMAGE, neutral.UNREAD_BOTH)
    )

    init_images: list[str] = Field(
        min_length=1, max_length=1, description="The picture, base64 or a data URL: PNG, JPEG or WebP."
    )
    mask: str = Field("", description="White is repainted; without it the whole picture is.")
    denoising_strength: float = Field(STRENGTH, gt=0, le=1)
    mask_blur: float | None = Field(None, ge=0, le=256)
    mask_blur_x: float | None = Field(None, ge=0, le=256, description="As `mask_blur_y`.")
    mask_blur_y: float | None = Field(None, ge=0, le=256, description="As `mask_blur_x`.")
    inpainting_fill: Literal[0, 1, 2, 3] = Field(
        0, description="1: the masked part begins with what was there; 0, 2, 3: with noise alone."
    )
    inpaint_full_res: bool = Field(
        default=True, description="With a mask: paint its surroundings alone, at the model's own size."
    )
    inpaint_full_res_padding: int = Field(0, ge=0, le=4096)
    inpainting_mask_invert: Literal[0, 1] = Field(0, description="1: black is repainted.")
    resize_mode: Literal[0, 1, 2] = Field(
        0, description="The size has the picture's aspect ratio in any case."
    )

    task: ClassVar[Task] = Task.EDIT
    asks_nothing: ClassVar[Mapping[str, Values]] = neutral.IMAGE_TO_IMAGE
    unread: ClassVar[Mapping[str, str]] = neutral.UNREAD_BOTH

    @property
    def blur(self) -> float | None:
        """Pixels by which the mask is feathered, of two or one of three fields."""
        return self.mask_blur_x if self.mask_blur is None else self.mask_blur

    @model_validator(mode="after")
    def _blurs_alike(self) -> Self:
        if self.mask_blur is None and self.mask_blur_x != self.mask_blur_y:
            raise ValueError("mask_blur_x and mask_blur_y are one: name mask_blur")
        return self


K = TypeVar("K", bound=TextToImage)


def read(kind: type[K], given: Mapping[str, object]) -> tuple[K, tuple[str, ...]]:
    """The form in the fields of a body, and the names of those that were ignored.

    InvalidField names the field at fault, with what is accepted.
    """
    meant, ignored = meant_fields(given, kind.model_fields, kind.asks_nothing, kind.unread)
    settings = meant.get(OVERRIDE)
    if isinstance(settings, Mapping):
        meant[OVERRIDE], more = _settings(settings, f"{OVERRIDE}.")
        ignored += more
    return asked(kind, meant), ignored


def read_settings(given: Mapping[str, object]) -> tuple[Settings, tuple[str, ...]]:
    """The settings in the fields of a body, and those that were ignored; raises as :func:`read`."""
    meant, ignored = _settings(given, "")
    return asked(Settings, meant), ignored


def _settings(given: Mapping[str, object], within: str) -> EffectiveFields:
    return meant_fields(given, Settings.model_fields, neutral.SETTINGS, neutral.UNREAD_SETTINGS, within)


def _with_neutral(schema: dict[str, Any], accepted: Mapping[str, Values], unread: Mapping[str, str]) -> None:
    schema["properties"] = schema["properties"] | schema_of(accepted, unread)
