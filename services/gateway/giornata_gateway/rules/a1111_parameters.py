"""From A1111's fields, samplers and ControlNet units to the parameters of a job, and back to its answer. Pure."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from giornata import __version__
from giornata.wire import resolution
from giornata.wire.adapters import MAX_CONTROLNETS, MAX_SCALE, Annotator, AskedLora
from giornata.wire.errors import GiornataError, InvalidField
from giornata.wire.jobs import JobRecord, PromptTokens
from giornata.wire.models import WITH_LIGHTNING, Guidance, ModelCard, Sampler
from giornata.wire.requests import EditParameters, GenerationParameters, MaskMode, asked
from giornata_gateway.rules.a1111_forms import (
    OFF,
    ORIGINAL,
    STRENGTH,
    ImageToImage,
    TextToImage,
    Values,
    meant_fields,
    shown,
    unlabelled,
)
from giornata_gateway.rules.forms import picture
from giornata_gateway.views.jobs import PictureError, View, picture_errors, usage_of

AUTOMATIC: Final = "automatic"
KARRAS: Final = "karras"
UNIFORM: Final = "uniform"


class A1111SamplerName(NamedTuple):
    """A1111's name of a sampler, and the noise levels that it takes."""

    name: str
    scheduler: str
    automatic: bool = True
    """Whether the scheduler `automatic` stands for these noise levels: Karras' where there are several, as in A1111."""


NAMES: Final[Mapping[Sampler, A1111SamplerName]] = {
    Sampler.EULER: A1111SamplerName("Euler", UNIFORM),
    Sampler.EULER_ANCESTRAL: A1111SamplerName("Euler a", UNIFORM),
    Sampler.DDIM: A1111SamplerName("DDIM", UNIFORM),
    Sampler.DDPM: A1111SamplerName("DDPM", UNIFORM),
    Sampler.PNDM: A1111SamplerName("PLMS", UNIFORM),
    Sampler.DPMPP_2M: A1111SamplerName("DPM++ 2M", UNIFORM, automatic=False),
    Sampler.DPMPP_2M_KARRAS: A1111SamplerName("DPM++ 2M", KARRAS),
    Sampler.DPMPP_2M_SDE: A1111SamplerName("DPM++ 2M SDE", UNIFORM, automatic=False),
    Sampler.DPMPP_2M_SDE_KARRAS: A1111SamplerName("DPM++ 2M SDE", KARRAS),
    Sampler.DPMPP_3M: A1111SamplerName("DPM++ 3M", UNIFORM, automatic=False),
    Sampler.DPMPP_3M_KARRAS: A1111SamplerName("DPM++ 3M", KARRAS),
    Sampler.UNIPC: A1111SamplerName("UniPC", UNIFORM),
    Sampler.DEIS: A1111SamplerName("DEIS", UNIFORM),
    Sampler.HEUN: A1111SamplerName("Heun", UNIFORM),
    Sampler.LCM: A1111SamplerName("LCM", UNIFORM),
    Sampler.EULER_LIGHTNING: A1111SamplerName("Euler", "lightning", automatic=False),
}
NORMAL, SIMPLE = "normal", "simple"
"""Two names of the levels `uniform`: `normal`, and of models that predict a velocity `simple`, which Forge sends."""
DEFAULTS: Final = frozenset({"euler", "euler a", "ddim"})
"""What clients send whose user chose nothing: a model that does not take it computes by its own sampler."""
_BY_NAME: Final = {
    (named.name.lower(), scheduler): sampler
    for sampler, named in NAMES.items()
    for scheduler in (named.scheduler, *([AUTOMATIC] if named.automatic else []))
}


def sampler_of(name: str | None, scheduler: str | None, card: ModelCard) -> Sampler | None:
    """The sampler of a request for the model `card`; None: the model's own.

    InvalidField where the model does not take the two together.
    """
    wanted, levels = (name or "").strip().lower(), (scheduler or AUTOMATIC).strip().lower()
    if wanted.endswith(f" {KARRAS}"):  # as A1111 named them before it had schedulers
        wanted, levels = wanted.removesuffix(f" {KARRAS}"), KARRAS
    flows = set(card.samplers) <= set(WITH_LIGHTNING)
    if levels == NORMAL or (flows and levels == SIMPLE):
        levels = UNIFORM
    if not wanted:
        if levels == AUTOMATIC:
            return None
        wanted = NAMES[Sampler(card.default_sampler)].name.lower()
    if name is not None and wanted in card.samplers and levels == AUTOMATIC:
        return Sampler(wanted)
    sampler = _BY_NAME.get((wanted, levels))
    if sampler in card.samplers:
        return sampler
    if wanted in DEFAULTS and (levels == AUTOMATIC or (flows and levels == UNIFORM)):
        return None
    raise InvalidField(
        f"The model {card.name} ({card.family}) does not take this sampler with this scheduler.",
        field="sampler_name",
        received=f"{name or 'none'} with the scheduler {scheduler or AUTOMATIC}",
        accepted=", ".join(f"{told.name} with {told.scheduler}" for told in taken(card)),
    )


def taken(card: ModelCard) -> list[A1111SamplerName]:
    """A1111's names of what a model takes."""
    return [NAMES[Sampler(sampler)] for sampler in card.samplers]


SCRIPTS: Final = "alwayson_scripts"
CONTROLNET: Final = "controlnet"
MODULES: Final[Mapping[str, Annotator | None]] = {
    "none": None,
    "canny": Annotator.CANNY,
    "soft_edge": Annotator.SOFT_EDGE,
    "tile": Annotator.TILE,
    "tile_resample": Annotator.TILE,
}
"""What makes a control image, by A1111's names and by ours."""
NEUTRAL: Final[Mapping[str, Values]] = {
    **dict.fromkeys(("mask", "mask_image", "mask_image_fg", "image_fg", "effective_region_mask"), ("",)),
    **dict.fromkeys(("guessmode", "low_vram", "lowvram"), OFF),
    "resize_mode": (0, 1, 2, "Just Resize", "Crop and Resize", "Resize and Fill"),
    "control_mode": (0, "Balanced"),
    "union_control_type": ("Unknown",),
    "processor_res": (-1, 64, 512),
    "threshold_a": (-1, 64, 100),
    "threshold_b": (-1, 64, 200),
}
"""What asks for nothing, and the defaults of the extension (-1; 64 and 512 before) and of clients, which come unasked.

A control image has the frame of its picture, so that the modes of resizing are one. Annotators work at the picture's
size, which is what `pixel_perfect` means, and `canny` has 100 and 200. Answers hold no control images either way.
"""
UNREAD: Final = (
    "pixel_perfect", "save_detected_map", "hr_option", "input_mode", "use_preview_as_input", "generated_image",
    "batch_image_dir", "batch_mask_dir", "batch_input_gallery", "batch_mask_gallery",
)  # fmt: skip
"""Fields of a unit that mean nothing here at any value, the last ones of A1111's own page alone."""
PAGE_SCRIPTS: Final = frozenset({"seed", "sampler", "refiner"})
"""Scripts that A1111 runs for its own page alone (`setup_for_ui_only`): the API has fields for what they set."""


class ControlNetUnitForm(BaseModel):
    """One ControlNet of a request."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool = True
    model: str = Field(max_length=200)
    module: str = Field("none", max_length=64)
    image: str = ""
    input_image: str = ""
    """What older clients call `image`."""
    weight: float = Field(1.0, ge=0, le=MAX_SCALE)
    guidance_start: float = Field(0.0, ge=0, lt=1)
    guidance_end: float = Field(1.0, gt=0, le=1)


class RequestedControlNets(NamedTuple):
    """ControlNets as :class:`giornata.wire.adapters.AskedControl` takes them, and their control images."""

    asked: tuple[dict[str, Any], ...] = ()
    images: tuple[bytes, ...] = ()
    ignored: tuple[str, ...] = ()
    """Fields of units that were ignored."""


def controls_of(scripts: Mapping[str, object]) -> RequestedControlNets:
    """The ControlNets in the `alwayson_scripts` of a request.

    InvalidField where another script is to run, or a unit asks for what has no meaning here.
    """
    units: list[ControlNetUnitForm] = []
    ignored: list[str] = []
    for name, script in scripts.items():
        arguments = script.get("args") if isinstance(script, Mapping) else script
        if name.lower() == CONTROLNET:
            for index, given in enumerate(_units(name, arguments)):
                unit, names = _unit(index, given)
                units.append(unit)
                ignored += names
        elif name.lower() not in PAGE_SCRIPTS and not _is_off(arguments):
            raise InvalidField(
                "No script of this name runs here.",
                field=f"{SCRIPTS}.{name}",
                received=shown(arguments),
                accepted=f"{CONTROLNET}; other scripts without args, or whose first one is false",
            )
    controls: list[dict[str, Any]] = []
    images: list[bytes] = []
    for index, unit in enumerate(units):
        written = unit.image or unit.input_image
        control: dict[str, Any] = {
            "model": unlabelled(unit.model),
            "annotator": _annotator(unit, index),
            "scale": unit.weight,
            "start": unit.guidance_start,
            "end": unit.guidance_end,
        }
        if written:
            control["image"] = len(images)
            images.append(picture(written, _field(index, "image")))
        controls.append(control)
    return RequestedControlNets(tuple(controls), tuple(images), tuple(ignored))


def _is_off(arguments: object) -> bool:
    """Whether the arguments of another script ask for nothing: there are none, or the first one, the switch, is off."""
    return arguments in (None, [], [{}]) or (isinstance(arguments, list) and arguments[0] is False)


def _units(name: str, arguments: object) -> list[dict[str, object]]:
    """The units that are switched on."""
    if not isinstance(arguments, list) or not all(isinstance(unit, dict) for unit in arguments):
        raise InvalidField(
            "The units are no list of objects.",
            field=f"{SCRIPTS}.{name}.args",
            received=type(arguments).__name__,
            accepted='[{"model": "…", "image": "base64"}]',
        )
    wanted = [unit for unit in arguments if unit and unit.get("enabled", True)]
    if len(wanted) > MAX_CONTROLNETS:
        raise InvalidField(
            "The request has too many ControlNets.",
            field=f"{SCRIPTS}.{name}.args",
            received=len(wanted),
            accepted=f"at most {MAX_CONTROLNETS}",
        )
    return wanted


def _unit(index: int, given: Mapping[str, object]) -> tuple[ControlNetUnitForm, list[str]]:
    try:
        meant, ignored = meant_fields(given, ControlNetUnitForm.model_fields, NEUTRAL, UNREAD)
        return asked(ControlNetUnitForm, meant), [_field(index, name) for name in ignored]
    except GiornataError as error:
        error.field = _field(index, error.field or "")
        raise


def _annotator(unit: ControlNetUnitForm, index: int) -> Annotator | None:
    module = unit.module.strip().lower() or "none"
    if module not in MODULES:
        raise InvalidField(
            "No preprocessor of this name makes control images here.",
            field=_field(index, "module"),
            received=unit.module,
            accepted=", ".join(MODULES),
        )
    return MODULES[module]


def _field(index: int, name: str) -> str:
    return f"{SCRIPTS}.{CONTROLNET}.args.{index}.{name}"


CLIENTS_CFG: Final = 7.0
CLIENTS_DISTILLED_CFG: Final = 3.5
"""What clients send whose user chose nothing."""
CLIENTS_SIDE: Final = 512
"""A1111's default of `width` and `height`."""
THEIRS: Final = {
    "image": "init_images",
    "size": "width",
    "n": "batch_size",
    "num_inference_steps": "steps",
    "strength": "denoising_strength",
    "guidance_scale": "cfg_scale",
    "true_cfg_scale": "cfg_scale",
    "sampler": "sampler_name",
    "model": "override_settings.sd_model_checkpoint",
    "mask_mode": "inpainting_mask_invert",
    "padding_mask_crop": "inpaint_full_res_padding",
    "loras": "prompt",
    "controlnets": f"{SCRIPTS}.{CONTROLNET}",
}
"""A1111's names of our fields, for errors."""


def rename_field(error: GiornataError) -> None:
    """Have an error of a job tell A1111's name of the field at fault."""
    if error.field is not None:
        error.field = THEIRS.get(error.field.partition(".")[0], error.field)


def parameters_of(
    form: TextToImage, card: ModelCard, loras: tuple[AskedLora, ...], controls: RequestedControlNets
) -> EditParameters:
    """Return what a job of the model `card` is asked to do by a form whose prompts are words alone.

    InvalidField names A1111's field that asks for what the model does not do.
    """
    shared: dict[str, Any] = {
        "prompt": form.prompt,
        "model": card.name,
        "n": form.pictures,
        "seed": None if form.seed < 0 else form.seed,
        "num_inference_steps": form.steps,
        "sampler": sampler_of(form.sampler, form.scheduler, card),
        "loras": loras,
        "controlnets": controls.asked,
        **_guidance(form, card),
    }
    try:
        if isinstance(form, ImageToImage):
            return asked(EditParameters, shared | _edited(form, card))
        return resolution.carried_out(asked(GenerationParameters, shared | {"size": form.size}))
    except GiornataError as error:
        rename_field(error)
        raise


def unused_fields(form: TextToImage, card: ModelCard, parameters: EditParameters) -> list[str]:
    """Fields that clients always send, and that changed nothing in the `parameters` made of the form."""
    guided = card.guidance is Guidance.CLASSIFIER_FREE or parameters.true_cfg_scale is not None
    edited = isinstance(form, ImageToImage) and form.denoising_strength != parameters.strength
    unused = {
        "cfg_scale": form.cfg_scale not in {None, 1.0} and not guided,
        "distilled_cfg_scale": form.distilled_cfg_scale is not None
        and card.guidance is not Guidance.EMBEDDED,
        "sampler_name": form.sampler is not None and parameters.sampler is None,
        "denoising_strength": edited and "denoising_strength" in form.model_fields_set,
        "width": form.width is not None and parameters.size == "auto",
        "height": form.height is not None and parameters.size == "auto",
    }
    return [name for name, told in unused.items() if told]


def _edited(form: ImageToImage, card: ModelCard) -> dict[str, Any]:
    if not form.mask:
        return {"size": form.size, "strength": form.denoising_strength}
    told: dict[str, Any] = {
        "strength": _strength(form),
        "mask_mode": MaskMode.BLACK if form.inpainting_mask_invert else MaskMode.WHITE,
    }
    if form.blur is not None:
        told["mask_blur"] = form.blur
    if not form.inpaint_full_res:
        return told | {"size": form.size}
    own = {CLIENTS_SIDE, card.native_size}
    if form.width is not None and (form.width != form.height or form.width not in own):
        raise InvalidField(
            f"With inpaint_full_res, {card.name} paints the mask's surroundings at its own size.",
            field="width",
            received=form.size,
            accepted=f"{' or '.join(f'{side}x{side}' for side in sorted(own))}, no width and height, or "
            "inpaint_full_res=false",
        )
    return told | {"padding_mask_crop": form.inpaint_full_res_padding}


def _strength(form: ImageToImage) -> float:
    """Return how much of the masked part is noised. Any fill but the original leaves nothing of what was there."""
    if form.inpainting_fill == ORIGINAL:
        return form.denoising_strength
    if form.denoising_strength not in {STRENGTH, 1.0}:
        raise InvalidField(
            f"With inpainting_fill {form.inpainting_fill} the masked part begins with noise alone.",
            field="denoising_strength",
            received=f"{form.denoising_strength:g}",
            accepted=f"1, A1111's default {STRENGTH:g}, which then is 1, or inpainting_fill {ORIGINAL} (original)",
        )
    return 1.0


def _guidance(form: TextToImage, card: ModelCard) -> dict[str, Any]:
    negative = form.negative_prompt if form.negative_prompt.strip() else None
    told: dict[str, Any] = {} if negative is None else {"negative_prompt": negative}
    if card.guidance is Guidance.EMBEDDED and form.distilled_cfg_scale is not None:
        told["guidance_scale"] = form.distilled_cfg_scale
    elif form.distilled_cfg_scale not in {None, CLIENTS_DISTILLED_CFG}:
        raise _refused("distilled_cfg_scale", form.distilled_cfg_scale, card, f"{CLIENTS_DISTILLED_CFG:g}")
    scale = form.cfg_scale
    if scale is None:
        return told
    if card.guidance is Guidance.CLASSIFIER_FREE:
        return told | {"guidance_scale": scale}
    if card.takes_true_cfg and negative is not None:
        if scale <= 1:
            raise _refused("cfg_scale", scale, card, "above 1 with a negative prompt")
        return told | {"true_cfg_scale": scale}
    if scale not in {1.0, CLIENTS_CFG}:
        with_one = ", or any above 1 with a negative_prompt" if card.takes_true_cfg else ""
        raise _refused("cfg_scale", scale, card, f"1 or {CLIENTS_CFG:g}, which change nothing{with_one}")
    return told


def _refused(field: str, received: float | None, card: ModelCard, accepted: str) -> InvalidField:
    return InvalidField(
        f"The model {card.name} ({card.family}) does not take this {field}.",
        field=field,
        received=f"{received:g}",
        accepted=f"{accepted}, or leave {field} out",
    )


class PaintedAnswer(View):
    """Answer of ``txt2img`` and ``img2img``."""

    images: list[str]
    """PNG as base64."""
    parameters: dict[str, Any]
    """The request without its pictures."""
    info: str
    """JSON: :class:`PaintedInfo`."""


class PaintedInfo(View):
    """The parameters with which pictures were made, in A1111's names."""

    prompt: str
    all_prompts: list[str]
    negative_prompt: str
    all_negative_prompts: list[str]
    seed: int
    all_seeds: list[int]
    width: int
    height: int
    sampler_name: str
    cfg_scale: float
    steps: int
    batch_size: int
    sd_model_name: str
    sd_model_hash: str
    denoising_strength: float | None
    index_of_first_image: Literal[0] = 0
    infotexts: list[str]
    job_timestamp: str
    version: str
    job_id: str
    """The job's id in Giornata: `/v1/jobs` tells more of it."""
    errors: list[PictureError]
    """Why pictures are missing, where others were made."""
    prompt_tokens: PromptTokens | None
    negative_prompt_tokens: PromptTokens | None
    """How many tokens the prompts have, and how many were read; null where that is not known."""


def painted(
    record: JobRecord, pictures: Sequence[bytes], parameters: Mapping[str, Any], created: float
) -> PaintedAnswer:
    """The answer of a completed job: its pictures, encoded; `created` is the Unix time in seconds."""
    return PaintedAnswer(
        images=[base64.b64encode(picture).decode() for picture in pictures],
        parameters=dict(parameters),
        info=_info(record, created).model_dump_json(),
    )


def _info(record: JobRecord, created: float) -> PaintedInfo:
    job, asked = record.job, record.job.parameters
    seeds = [row.seed for row in record.images]
    prompts, negative = [asked.prompt] * len(seeds), asked.negative_prompt or ""
    width, height = (
        (record.inspection.output_width, record.inspection.output_height) if record.inspection else (0, 0)
    )
    tokens = usage_of(record, 0).input_tokens_details
    scales = (job.cfg_scale, asked.guidance_scale)
    scale = next((scale for scale in scales if scale is not None), 1.0)
    info = PaintedInfo(
        prompt=asked.prompt,
        all_prompts=prompts,
        negative_prompt=negative,
        all_negative_prompts=[negative] * len(seeds),
        seed=seeds[0],
        all_seeds=seeds,
        width=width,
        height=height,
        sampler_name=NAMES[asked.sampler or Sampler.EULER].name,
        cfg_scale=scale,
        steps=asked.num_inference_steps or job.denoising_steps,
        batch_size=asked.n,
        sd_model_name=job.model,
        sd_model_hash=job.model_digest[:10],
        denoising_strength=asked.strength if job.image is not None else None,
        infotexts=[],
        job_timestamp=stamp(created),
        version=f"giornata {__version__}",
        job_id=job.job_id,
        errors=picture_errors(record),
        prompt_tokens=tokens.prompt_tokens,
        negative_prompt_tokens=tokens.negative_prompt_tokens,
    )
    return info.model_copy(update={"infotexts": [_infotext(info, seed) for seed in seeds]})


def _infotext(info: PaintedInfo, seed: int) -> str:
    """A picture's parameters in the lines that A1111 writes into its files."""
    negative = f"\nNegative prompt: {info.negative_prompt}" if info.negative_prompt else ""
    shown = {
        "Steps": info.steps,
        "Sampler": info.sampler_name,
        "CFG scale": f"{info.cfg_scale:g}",
        "Seed": seed,
        "Size": f"{info.width}x{info.height}",
        "Model hash": info.sd_model_hash,
        "Model": info.sd_model_name,
        "Denoising strength": info.denoising_strength,
    }
    return f"{info.prompt}{negative}\n" + ", ".join(
        f"{name}: {value}" for name, value in shown.items() if value is not None
    )


def stamp(seconds: float) -> str:
    """A Unix time in seconds as A1111 writes it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y%m%d%H%M%S")
