"""From A1111's fields to the parameters of a job."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

from giornata.wire import generations
from giornata.wire.adapters import AskedLora
from giornata.wire.errors import GiornataError, InvalidField
from giornata.wire.models import Guidance, ModelCard
from giornata.wire.requests import EditParameters, GenerationParameters, MaskMode, asked
from giornata_gateway.intake.rules.a1111.forms import ORIGINAL, STRENGTH, ImageToImage, TextToImage
from giornata_gateway.intake.rules.a1111.samplers import sampler_of
from giornata_gateway.intake.rules.a1111.units import CONTROLNET, SCRIPTS, RequestedControlNets

CLIENTS_CFG: Final = 7.0
CLIENTS_DISTILLED_CFG: Final = 3.5
"""What clients send whose user chose nothing."""
CLIENTS_SIDE: Final = 512
"""A1111's default of `width` and `height`."""
THEIRS: Final = MappingProxyType(
    {
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
)
"""A1111's names of our fields, for errors."""


def rename_field(error: GiornataError) -> None:
    """Have an error of a job tell A1111's name of the field at fault."""
    if error.field is not None:
        error.field = THEIRS.get(error.field.partition(".")[0], error.field)


def parameters_of(
    form: TextToImage, card: ModelCard, loras: tuple[AskedLora, ...], controls: RequestedControlNets
) -> EditParameters:
    """What a job of the model `card` is asked to do by a form whose prompts are words alone.

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
        return generations.carried_out(asked(GenerationParameters, shared | {"size": form.size}))
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
    """How much of the masked part is noised. Any fill but the original leaves nothing of what was there."""
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
