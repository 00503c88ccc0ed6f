"""Fields of A1111 without a meaning here: they are accepted where they ask for nothing, and refused by name elsewhere.

A1111 is AUTOMATIC1111's stable-diffusion-webui. Its clients send every field, most of them with the default of
`modules/processing.py` there or with their own that asks for as little.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Final

from giornata.wire.errors import InvalidField

Values = tuple[object, ...]

OFF: Final[Values] = (False,)
NONE: Final[Values] = ("", "None")
ZERO: Final[Values] = (0,)

BOTH: Final[Mapping[str, Values]] = MappingProxyType(
    {
        "styles": ([],),
        "subseed_strength": ZERO,
        "seed_resize_from_h": (-1, 0),
        "seed_resize_from_w": (-1, 0),
        "restore_faces": OFF,
        "tiling": OFF,
        "eta": (0, 1),
        "s_min_uncond": ZERO,
        "s_churn": ZERO,
        "s_tmax": ZERO,
        "s_tmin": ZERO,
        "s_noise": (1,),
        "override_settings_restore_afterwards": (True,),
        "refiner_checkpoint": NONE,
        "token_merging_ratio": ZERO,
        "disable_extra_networks": OFF,
        "comments": ({},),
        "script_name": NONE,
        "send_images": (True,),
        "save_images": OFF,
        "force_task_id": ("",),
        "infotext": ("",),
    }
)
"""Values that ask for nothing, of fields that both requests have."""
TEXT_TO_IMAGE: Final[Mapping[str, Values]] = MappingProxyType({**BOTH, "enable_hr": OFF})
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
        "CLIP_stop_at_last_layers": (1,),
        "sd_vae": ("", "None", "Automatic"),
        "eta_noise_seed_delta": ZERO,
        "samples_format": ("png",),
    }
)
"""Values that ask for nothing, of fields of `override_settings`."""

UNREAD_BOTH: Final[Mapping[str, str]] = MappingProxyType(
    {
        "subseed": "subseed_strength",
        "refiner_switch_at": "refiner_checkpoint",
        "script_args": "script_name",
        "do_not_save_samples": "save_images",
        "do_not_save_grid": "save_images",
    }
)
"""Fields that A1111 reads only beside another, which is refused here: their value asks for nothing."""
UNREAD_TEXT_TO_IMAGE: Final[Mapping[str, str]] = MappingProxyType(
    {
        **UNREAD_BOTH,
        **dict.fromkeys(
            (
                "denoising_strength",
                "firstphase_width",
                "firstphase_height",
                "hr_scale",
                "hr_upscaler",
                "hr_second_pass_steps",
                "hr_resize_x",
                "hr_resize_y",
                "hr_checkpoint_name",
                "hr_sampler_name",
                "hr_scheduler",
                "hr_prompt",
                "hr_negative_prompt",
                "token_merging_ratio_hr",
            ),
            "enable_hr",
        ),
    }
)


def without_neutral(
    fields: Mapping[str, object], neutral: Mapping[str, Values], unread: Collection[str], within: str = ""
) -> dict[str, object]:
    """`fields` without those that ask for nothing; null asks for nothing.

    InvalidField names the first of them that asks for something; `within` stands before its name.
    """
    for name, accepted in neutral.items():
        given = fields.get(name)
        if given is not None and not any(_same(given, value) for value in accepted):
            raise InvalidField(
                f"{name} of A1111 has no meaning here.",
                field=within + name,
                received=shown(given),
                accepted=f"leave {name} out, or {' or '.join(json.dumps(value) for value in accepted)}",
            )
    return {
        name: value
        for name, value in fields.items()
        if value is not None and name not in neutral and name not in unread
    }


def shown(given: object) -> str:
    """A value of a body as errors show it, however large it is."""
    return reprlib.repr(given) if isinstance(given, str | list | dict) else json.dumps(given)


def _same(given: object, neutral: object) -> bool:
    """Whether JSON values are equal; A1111's clients write 0 for false, and no number for a text."""
    return given == neutral and isinstance(given, str) == isinstance(neutral, str)


def schema_of(neutral: Mapping[str, Values], unread: Mapping[str, str]) -> dict[str, Any]:
    """The fields as a form's JSON schema tells them."""
    told: dict[str, Any] = {
        name: {"enum": [None, *accepted], "description": "Has no other meaning here."}
        for name, accepted in neutral.items()
    }
    return told | {
        name: {"description": f"A1111 reads it only beside `{reader}`, which is refused."}
        for name, reader in unread.items()
    }
