"""Units of A1111's extension for ControlNets (sd-webui-controlnet)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from giornata.wire.adapters import MAX_CONTROLNETS, MAX_SCALE, Annotator
from giornata.wire.errors import GiornataError, InvalidField
from giornata.wire.requests import asked
from giornata_gateway.intake.rules.a1111.models import unlabelled
from giornata_gateway.intake.rules.a1111.neutral import OFF, Values, meant_fields, shown
from giornata_gateway.intake.rules.written import picture

SCRIPTS: Final = "alwayson_scripts"
CONTROLNET: Final = "controlnet"
MODULES: Final[Mapping[str, Annotator | None]] = MappingProxyType(
    {
        "none": None,
        "canny": Annotator.CANNY,
        "soft_edge": Annotator.SOFT_EDGE,
        "tile": Annotator.TILE,
        "tile_resample": Annotator.TILE,
    }
)
"""What makes a control image, by A1111's names and by ours."""
NEUTRAL: Final[Mapping[str, Values]] = MappingProxyType(
    {
        **dict.fromkeys(("mask", "mask_image", "mask_image_fg", "image_fg", "effective_region_mask"), ("",)),
        **dict.fromkeys(("guessmode", "low_vram", "lowvram"), OFF),
        "resize_mode": (0, 1, 2, "Just Resize", "Crop and Resize", "Resize and Fill"),
        "control_mode": (0, "Balanced"),
        "union_control_type": ("Unknown",),
        "processor_res": (-1, 64, 512),
        "threshold_a": (-1, 64, 100),
        "threshold_b": (-1, 64, 200),
    }
)
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
