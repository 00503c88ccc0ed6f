"""Fields of A1111 without a meaning here, sorted by what they would do to a picture.

A1111 is AUTOMATIC1111's stable-diffusion-webui. Its clients send every field, most of them with the default of
`modules/processing.py` there or with their own that asks for as little. A field that would change the picture is
refused by name unless it asks for nothing. Any other field, known or not, is ignored, and the answer tells so.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from giornata.wire.errors import InvalidField

Values = tuple[object, ...]

OFF: Final[Values] = (False,)
NONE: Final[Values] = ("", "None")
ZERO: Final[Values] = (0,)

BOTH: Final[Mapping[str, Values]] = MappingProxyType(
    {
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
    }
)  # fmt: skip
"""Values that ask for nothing, of fields that both requests have."""
TEXT_TO_IMAGE: Final[Mapping[str, Values]] = MappingProxyType(
    {**BOTH, "enable_hr": OFF, "init_images": ([],), "mask": ("",)}
)
IMAGE_TO_IMAGE: Final[Mapping[str, Values]] = MappingProxyType(
    {
        **BOTH,
        "image_cfg_scale": (0, 1.5),
        "initial_noise_multiplier": (1,),
        "include_init_images": OFF,
        "mask_round": (True,),
        "latent_mask": ("",),
    }
)
SETTINGS: Final[Mapping[str, Values]] = MappingProxyType(
    {
        **dict.fromkeys(("sd_vae", "sd_unet"), (*NONE, "Automatic")),
        **dict.fromkeys(("sd_hypernetwork", "refiner_checkpoint"), NONE),
        **dict.fromkeys(("face_restoration", "tiling", "img2img_color_correction", "img2img_fix_steps"), OFF),
        **dict.fromkeys(("token_merging_ratio", "token_merging_ratio_img2img", "img2img_extra_noise"), ZERO),
        **dict.fromkeys(("eta_noise_seed_delta", "eta_ddim", "s_churn", "s_min_uncond", "skip_early_cond"), ZERO),
        **dict.fromkeys(("initial_noise_multiplier", "inpainting_mask_weight", "eta_ancestral", "s_noise"), (1,)),
        "CLIP_stop_at_last_layers": (1,),
        "forge_additional_modules": ([],),
        "samples_format": ("png",),
    }
)  # fmt: skip
"""Values that ask for nothing, of fields of `override_settings`."""
HARMLESS: Final = frozenset(
    {
        "override_settings_restore_afterwards", "comments", "send_images", "save_images", "force_task_id",
        "include_init_images", "low_vram", "lowvram",
    }
)  # fmt: skip
"""Fields that change no picture: they are ignored at any other value."""

UNREAD_BOTH: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("subseed", "seed_enable_extras"), "subseed_strength"),
        **dict.fromkeys(("do_not_save_samples", "do_not_save_grid"), "save_images"),
        "refiner_switch_at": "refiner_checkpoint",
        "script_args": "script_name",
    }
)
"""Fields that A1111 reads only beside another, which does nothing here: their value asks for nothing."""
UNREAD_TEXT_TO_IMAGE: Final[Mapping[str, str]] = MappingProxyType(
    {
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
    }
)  # fmt: skip
UNREAD_SETTINGS: Final[Mapping[str, str]] = MappingProxyType({"sd_checkpoint_hash": "sd_model_checkpoint"})


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
        if value is None or name in unread or any(_same(value, one) for one in accepted):
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


def _same(given: object, neutral: object) -> bool:
    """Whether JSON values are equal; A1111's clients write 0 for false, and no number for a text."""
    return given == neutral and isinstance(given, str) == isinstance(neutral, str)


def schema_of(neutral: Mapping[str, Values], unread: Mapping[str, str]) -> dict[str, Any]:
    """The fields as a form's JSON schema tells them."""
    told: dict[str, Any] = {
        name: {"description": "Ignored."}
        if name in HARMLESS
        else {"enum": [None, *accepted], "description": "Has no other meaning here."}
        for name, accepted in neutral.items()
    }
    return told | {
        name: {"description": f"A1111 reads it only beside `{reader}`, which does nothing here."}
        for name, reader in unread.items()
    }
