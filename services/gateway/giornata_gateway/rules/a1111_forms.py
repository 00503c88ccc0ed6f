"""The bodies of A1111's ``txt2img`` and ``img2img`` as typed values. Pure."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from math import isfinite
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from giornata.wire.adapters import MAX_SCALE, AskedLora
from giornata.wire.errors import InvalidField, LoraNotFound
from giornata.wire.loras import LoraRecord, LoraState
from giornata.wire.models import ModelCard, Task
from giornata.wire.requests import MAX_IMAGES, MAX_SEED, MAX_STEPS, PROMPTS_FIT, NegativePrompt, Prompt, asked

# Fields of A1111 without a meaning here, sorted by what they would do to a picture.
#
# A1111 is AUTOMATIC1111's stable-diffusion-webui. Its clients send every field, most of them with the
# default of `modules/processing.py` there or with their own that asks for as little. A field that would
# change the picture is refused by name unless it asks for nothing. Any other field, known or not, is
# ignored, and the answer tells so.


Values = tuple[object, ...]

OFF: Final[Values] = (False,)
NONE: Final[Values] = ("", "None")
ZERO: Final[Values] = (0,)

BOTH: Final[Mapping[str, Values]] = {
    **dict.fromkeys(("restore_faces", "tiling", "disable_extra_networks", "save_images"), OFF),
    **dict.fromkeys(("subseed_strength", "token_merging_ratio", "s_min_uncond"), ZERO),
    **dict.fromkeys(("s_churn", "s_tmax", "s_tmin"), ZERO),
    **dict.fromkeys(("refiner_checkpoint", "script_name"), NONE),
    **dict.fromkeys(("force_task_id", "infotext", "firstpass_image"), ("",)),
    **dict.fromkeys(("override_settings_restore_afterwards", "send_images"), (True,)),
    **dict.fromkeys(("seed_resize_from_h", "seed_resize_from_w"), (-1, 0)),
    "styles": ([],),
    "eta": (0, 1),
    "s_noise": (1,),
    "clip_skip": (0, 1),
    "comments": ({},),
}  # fmt: skip
"""Values that ask for nothing, of fields that both requests have."""
TEXT_TO_IMAGE: Final[Mapping[str, Values]] = {**BOTH, "enable_hr": OFF, "init_images": ([],), "mask": ("",)}
IMAGE_TO_IMAGE: Final[Mapping[str, Values]] = {
    **BOTH,
    "image_cfg_scale": (0, 1.5),
    "initial_noise_multiplier": (1,),
    "include_init_images": OFF,
    "mask_round": (True,),
    "latent_mask": ("",),
}
SETTINGS: Final[Mapping[str, Values]] = {
    **dict.fromkeys(("sd_vae", "sd_unet"), (*NONE, "Automatic")),
    **dict.fromkeys(("sd_hypernetwork", "refiner_checkpoint"), NONE),
    **dict.fromkeys(("face_restoration", "tiling", "img2img_color_correction", "img2img_fix_steps"), OFF),
    **dict.fromkeys(("token_merging_ratio", "token_merging_ratio_img2img", "img2img_extra_noise"), ZERO),
    **dict.fromkeys(("eta_noise_seed_delta", "eta_ddim", "s_churn", "s_min_uncond", "skip_early_cond"), ZERO),
    **dict.fromkeys(("initial_noise_multiplier", "inpainting_mask_weight", "eta_ancestral", "s_noise"), (1,)),
    "CLIP_stop_at_last_layers": (1,),
    "forge_additional_modules": ([],),
    "samples_format": ("png",),
}  # fmt: skip
"""Values that ask for nothing, of fields of `override_settings`."""
HARMLESS: Final = frozenset(
    {
        "override_settings_restore_afterwards", "comments", "send_images", "save_images", "force_task_id",
        "include_init_images", "low_vram", "lowvram",
    }
)  # fmt: skip
"""Fields that change no picture: they are ignored at any other value."""

UNREAD_BOTH: Final[Mapping[str, str]] = {
    **dict.fromkeys(("subseed", "seed_enable_extras"), "subseed_strength"),
    **dict.fromkeys(("do_not_save_samples", "do_not_save_grid"), "save_images"),
    "refiner_switch_at": "refiner_checkpoint",
    "script_args": "script_name",
}
"""Fields that A1111 reads only beside another, which does nothing here: their value asks for nothing."""
UNREAD_TEXT_TO_IMAGE: Final[Mapping[str, str]] = {
    **UNREAD_BOTH,
    **dict.fromkeys(
        (
            "denoising_strength", "firstphase_width", "firstphase_height", "token_merging_ratio_hr", "hr_scale",
            "hr_upscaler", "hr_second_pass_steps", "hr_resize_x", "hr_resize_y", "hr_checkpoint_name",
            "hr_additional_modules", "hr_sampler_name", "hr_scheduler", "hr_prompt", "hr_negative_prompt",
            "hr_cfg", "hr_distilled_cfg",
        ),
        "enable_hr",
    ),
}  # fmt: skip
UNREAD_SETTINGS: Final[Mapping[str, str]] = {"sd_checkpoint_hash": "sd_model_checkpoint"}


class EffectiveFields(NamedTuple):
    """The fields of a body that ask for something, and the names of those that were ignored."""

    fields: dict[str, object]
    ignored: tuple[str, ...]


def meant_fields(
    given: Mapping[str, object],
    known: Collection[str],
    neutral: Mapping[str, Values],
    unread: Collection[str],
    within: str = "",
) -> EffectiveFields:
    """The `known` ones of the `given` fields; null asks for nothing. `within` stands before names.

    InvalidField names the first `neutral` field that asks for something and would change the picture.
    """
    meant: dict[str, object] = {}
    ignored: list[str] = []
    for name, value in given.items():
        accepted = neutral.get(name, ())
        # values are equal as in JSON; A1111's clients write 0 for false, and no number for a text
        nothing = (value == one and isinstance(value, str) == isinstance(one, str) for one in accepted)
        if value is None or name in unread or any(nothing):
            continue
        if name in known:
            meant[name] = value
        elif name in neutral and name not in HARMLESS:
            raise InvalidField(
                f"{name} of A1111 has no meaning here.",
                field=within + name,
                received=shown(value),
                accepted=f"leave {name} out, or {' or '.join(json.dumps(one) for one in accepted)}",
            )
        else:
            ignored.append(within + name)
    return EffectiveFields(meant, tuple(ignored))


def shown(given: object) -> str:
    """A value of a body as errors show it, however large it is."""
    return reprlib.repr(given) if isinstance(given, str | list | dict) else json.dumps(given)


HASH_CHARACTERS: Final = 10
_LABEL: Final = re.compile(r"(?P<name>.*?)(?:\.(?:safetensors|ckpt|pt|pth))?(?:\s*\[[0-9A-Fa-f]*\])?")


def title_of(card: ModelCard) -> str:
    """Return what A1111's clients list and send back."""
    return f"{card.name} [{hash_of(card)}]"


def hash_of(card: ModelCard) -> str:
    """The short hash in a title: the first characters of the model's digest."""
    return card.digest[:HASH_CHARACTERS]


def unlabelled(label: str) -> str:
    """The name in a title, without suffix and hash."""
    found = _LABEL.fullmatch(label.strip())
    return label if found is None else found["name"]


def model_of(label: str, cards: Mapping[str, ModelCard]) -> str:
    """The name of the model that a title, a name or a hash means; what means none stays as it is."""
    by_hash = {known: card.name for card in cards.values() for known in (hash_of(card), card.digest)}
    return by_hash.get(label.strip(), unlabelled(label))


_TAG: Final = re.compile(r"<(\w+):([^<>]*)>")
_JOINED: Final = re.compile(r"\b(?:AND|BREAK)\b")
_TOKENS: Final = re.compile(
    r"\\[()\[\]\\]|[(\[|]|:\s*([-+]?[.\d]+)\s*[)\]]|[)\]]|[^\\()\[\]|:]+|.", re.DOTALL
)
"""A1111's `re_attention`, with what ends or divides the brackets of a change between steps."""
_OPENING: Final = {")": "(", "]": "["}
ACCEPTED: Final = "<lora:NAME> or <lora:NAME:WEIGHT>"
SUFFIX: Final = ".safetensors"


class Emphasis(StrEnum):
    """The reading of brackets, as A1111's setting `emphasis` has it."""

    ORIGINAL = "Original"
    NO_NORM = "No norm"
    """As ORIGINAL, they weight words: refused, unless the weight is 1."""
    IGNORE = "Ignore"
    """They are taken away, and the words in them stay."""
    NONE = "None"
    """They are characters like any others."""


class LoraTag(NamedTuple):
    """A LoRA that a prompt names."""

    name: str
    scale: float


def split(prompt: str, field: str, emphasis: Emphasis = Emphasis.ORIGINAL) -> tuple[str, list[LoraTag]]:
    """The words of a prompt without its escapes, and its LoRAs.

    InvalidField names the `field` where the prompt holds weights, changes between steps, AND, BREAK, other networks,
    or a tag that cannot be read.
    """
    tags = [_tag(found, field) for found in _TAG.finditer(prompt)]
    words = " ".join(_TAG.sub(" ", prompt).split()) if tags else prompt
    if found := _JOINED.search(words):
        word = found.group()
        what = "joins several prompts" if word == "AND" else "begins another part of the prompt"
        accepted = f"one prompt; the word itself in small letters: {word.lower()}"
        raise InvalidField(f"{word} {what}.", field=field, received=word, accepted=accepted)
    plain = _plain(words, field, emphasis)
    return (words if emphasis is Emphasis.NONE else plain), tags


def _plain(prompt: str, field: str, emphasis: Emphasis) -> str:
    """The prompt without the brackets that A1111 reads, and with those that are escaped."""
    kept: list[str] = []
    opened: dict[str, list[int]] = {"(": [], "[": []}
    divided: set[int] = set()
    weighted = emphasis in {Emphasis.ORIGINAL, Emphasis.NO_NORM}
    for found in _TOKENS.finditer(prompt):
        part, number = found[0], found[1]
        if part in opened:
            opened[part].append(found.start())
        elif part[0] == "\\" and len(part) > 1:
            kept.append(part[1])
        elif starts := opened.get(_OPENING.get(part[-1], "")):
            start = starts.pop()
            if part[-1] == "]" and (number or start in divided):
                raise _refused("changes its words between steps", field, prompt[start : found.end()])
            if weighted and _number(number or "") != 1 and prompt[start + 1 : found.start()].strip():
                raise _refused("weights some of its words", field, prompt[start : found.end()])
        else:
            if part == "|" and opened["["][-1:] > opened["("][-1:]:
                divided.add(opened["["][-1])
            kept.append(part)
    starts = sorted(opened["("] + opened["["])
    if weighted and starts and prompt[starts[0] + 1 :].strip():
        raise _refused("weights all words after a bracket", field, prompt[starts[0] :])
    return "".join(kept)


def _refused(what: str, field: str, received: str) -> InvalidField:
    return InvalidField(
        f"The prompt {what}, and models read its words as they stand.",
        field=field,
        received=received,
        accepted=r"words without such brackets, \( \) \[ \] for brackets as characters, or for weights "
        'override_settings.emphasis "Ignore" (words without their weights) or "None" (brackets as characters)',
    )


def named(tags: Sequence[LoraTag], records: Iterable[LoraRecord], card: ModelCard) -> tuple[AskedLora, ...]:
    """The LoRAs that `tags` name by their name or their id, among a tenant's `records`, the newest first.

    Of several with one name for the model `card`, the newest is meant. LoraNotFound names those that there are.
    """
    usable = [record for record in records if record.model == card.name and record.state is LoraState.READY]
    found = {name: record.lora_id for record in reversed(usable) for name in names_of(record)}
    for tag in tags:
        if tag.name not in found:
            raise LoraNotFound(
                f"The model {card.name} has no LoRA of this name.",
                field="prompt",
                received=tag.name,
                accepted=", ".join(sorted({names_of(record)[0] for record in usable}))
                or "no LoRA; none is ready for the model",
            )
    return tuple(AskedLora(id=found[tag.name], scale=tag.scale) for tag in tags)


def names_of(record: LoraRecord) -> list[str]:
    """What a prompt may call a LoRA, the shortest first: its owner's name without the file's suffix, and its id."""
    own = [] if record.name is None else [record.name.removesuffix(SUFFIX), record.name]
    return [*dict.fromkeys(own), record.lora_id]


def _tag(found: re.Match[str], field: str) -> LoraTag:
    kind, text = found.groups()
    name, *weights = text.split(":")
    scale = _number(weights[0]) if weights else 1.0
    if kind != "lora" or not name or len(weights) > 1 or scale is None or abs(scale) > MAX_SCALE:
        raise InvalidField(
            "A tag of the prompt is not accepted.",
            field=field,
            received=found.group(),
            accepted=f"{ACCEPTED}, a weight of {-MAX_SCALE:g} to {MAX_SCALE:g}",
        )
    return LoraTag(name, scale)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None


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
        json_schema_extra=lambda schema: _with_neutral(schema, SETTINGS, UNREAD_SETTINGS)
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
        json_schema_extra=lambda schema: _with_neutral(schema, TEXT_TO_IMAGE, UNREAD_TEXT_TO_IMAGE),
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
    asks_nothing: ClassVar[Mapping[str, Values]] = TEXT_TO_IMAGE
    unread: ClassVar[Mapping[str, str]] = UNREAD_TEXT_TO_IMAGE

    @property
    def pictures(self) -> int:
        """Return how many pictures are asked for."""
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
        json_schema_extra=lambda schema: _with_neutral(schema, IMAGE_TO_IMAGE, UNREAD_BOTH)
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
    asks_nothing: ClassVar[Mapping[str, Values]] = IMAGE_TO_IMAGE
    unread: ClassVar[Mapping[str, str]] = UNREAD_BOTH

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
    return meant_fields(given, Settings.model_fields, SETTINGS, UNREAD_SETTINGS, within)


def _with_neutral(schema: dict[str, Any], neutral: Mapping[str, Values], unread: Mapping[str, str]) -> None:
    """Have a form's JSON schema tell of the fields without a meaning, too."""
    schema["properties"] |= {
        name: {"description": "Ignored."}
        if name in HARMLESS
        else {"enum": [None, *accepted], "description": "Has no other meaning here."}
        for name, accepted in neutral.items()
    }
    schema["properties"] |= {
        name: {"description": f"A1111 reads it only beside `{reader}`, which does nothing here."}
        for name, reader in unread.items()
    }
