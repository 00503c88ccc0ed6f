"""The nodes."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, ClassVar, Final

import torch
from PIL import Image

from . import gateway, pictures

SEEDS: Final = 2**64
"""How many a gateway has, as ComfyUI does."""
OWN: Final = "the model's own"
NONE: Final = "(not set)"
"""First of a list of names: no adapter, or the only model that is served."""
LORAS: Final = "GIORNATA_LORAS"
CONTROLNETS: Final = "GIORNATA_CONTROLNETS"
Inputs = dict[str, Any]


def _number(kind: str, own: float, least: float, most: float, tip: str, **more: Any) -> tuple[str, Inputs]:
    return kind, {"default": own, "min": least, "max": most, "tooltip": tip, **more}


def _choice(names: Iterable[str]) -> tuple[list[str], Inputs]:
    return [NONE, *names], {"default": NONE, "tooltip": "R reads the list again."}


PROMPT: Final[Inputs] = {
    "prompt": (
        "STRING",
        {"multiline": True, "tooltip": "What the picture, or the mask's part of it, shows."},
    ),
    "seed": _number(
        "INT", 0, 0, 2**64 - 1, "Each further picture has the next one.", control_after_generate=True
    ),
}
OPTIONS: Final[Inputs] = {
    "negative_prompt": ("STRING", {"default": "", "multiline": True}),
    "steps": _number("INT", 0, 0, 200, f"0: {OWN}."),
    "guidance_scale": _number("FLOAT", -1.0, -1.0, 100.0, f"-1: {OWN}.", step=0.1),
    "batch_size": _number("INT", 1, 1, 10, "Pictures made of each; the seed counts on."),
}
EDIT_OPTIONS: Final[Inputs] = {
    "strength": _number("FLOAT", 0.0, 0.0, 1.0, f"0: {OWN}.", step=0.01),
    "grow_mask": _number("INT", 0, 0, 512, "Pixels by which the mask grows."),
    "mask_blur": _number("FLOAT", -1.0, -1.0, 256.0, "Feather in pixels; -1: the gateway's own.", step=0.5),
    "padding_mask_crop": _number("INT", -1, -1, 4096, "Pixels around the mask; -1: all is painted."),
    "reuse": (["auto", "strict", "off"], {"default": "auto"}),
}
GUIDES: Final[Inputs] = {
    "loras": (LORAS, {"tooltip": "At most four, one after the other."}),
    "controlnets": (CONTROLNETS, {"tooltip": "At most three, one after the other."}),
    "reference": ("IMAGE", {"tooltip": "Other pictures that the model looks at."}),
}
DEFAULTS: Final = {name: spec[1]["default"] for name, spec in (OPTIONS | EDIT_OPTIONS).items()}
"""Values that leave a request's field to the gateway."""


def _optional(task: str) -> Inputs:
    served = [model["id"] for model in gateway.listed("models") if task in model["tasks"]]
    return {"model": _choice(served), **OPTIONS, **GUIDES}


class _Node:
    CATEGORY: ClassVar = "image/giornata"
    RETURN_TYPES: ClassVar[tuple[str]] = ("IMAGE",)
    FUNCTION: ClassVar = "run"

    @classmethod
    def VALIDATE_INPUTS(cls, model: str = "", lora: str = "", controlnet: str = "") -> bool:  # noqa: ARG003, N802 - ComfyUI's names
        """Leave these names to the gateway, whose lists may have changed since they were read."""
        return True


class GiornataEdit(_Node):
    """Repaints the masked part of pictures as the prompt says; every other pixel stays as it is."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Inputs]:  # noqa: N802 - ComfyUI's name
        """Return what the node takes, as ComfyUI reads it."""
        mask = ("MASK", {"tooltip": "1 is repainted. Without it, transparent pixels are, or all."})
        return {
            "required": {"image": ("IMAGE",), **PROMPT},
            "optional": {"mask": mask, **_optional("edit"), **EDIT_OPTIONS},
        }

    def run(
        self, *, image: torch.Tensor, mask: torch.Tensor | None = None, **asked: Any
    ) -> tuple[torch.Tensor]:
        """Edit every picture of `image` (pictures, height, width, channels).

        `mask` is (pictures, height, width), or one for all of them. EditError says why there is no picture.
        """
        files = [[("image", png)] for png in pictures.files_of(image)]
        if mask is not None:
            asked["mask_mode"] = "white"
            for own, png in zip(files, pictures.masks_of(mask, len(files)), strict=True):
                own.append(("mask", png))
        return (_painted("edits", asked, files),)


class GiornataGenerate(_Node):
    """Paints pictures from text alone."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Inputs]:  # noqa: N802 - ComfyUI's name
        """Return what the node takes, as ComfyUI reads it."""
        side = _number("INT", 0, 0, 16384, f"Pixels; 0: {OWN}.", step=8)
        return {"required": PROMPT, "optional": {"width": side, "height": side, **_optional("generate")}}

    def run(self, *, width: int = 0, height: int = 0, **asked: Any) -> tuple[torch.Tensor]:
        """Paint `batch_size` pictures; EditError says why there are none."""
        if width or height:
            asked["size"] = f"{width or height}x{height or width}"
        return (_painted("generations", asked, [[]]),)


class GiornataMask(_Node):
    """Makes the mask of what words name in pictures."""

    RETURN_TYPES: ClassVar = ("MASK",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Inputs]:  # noqa: N802 - ComfyUI's name
        """Return what the node takes, as ComfyUI reads it."""
        words = ("STRING", {"default": "", "tooltip": "What the mask covers: the left shoe."})
        most = _number(
            "INT", 0, 0, 16, "The surest regions that are taken at most; 0: all that are sure enough."
        )
        return {"required": {"image": ("IMAGE",), "words": words}, "optional": {"max_regions": most}}

    def run(self, *, image: torch.Tensor, words: str, max_regions: int = 0) -> tuple[torch.Tensor]:
        """Make a mask of each picture, (pictures, height, width), 1 where `words` name something."""
        asked = {"prompt": words, "max_regions": max_regions or None}
        made = [gateway.mask(png, asked) for png in pictures.files_of(image)]
        return (pictures.images_of(made)[..., 0],)


class GiornataLora(_Node):
    """Adds a LoRA to those before it."""

    RETURN_TYPES: ClassVar = (LORAS,)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Inputs]:  # noqa: N802 - ComfyUI's name
        """Return what the node takes, as ComfyUI reads it."""
        ready = (one for one in gateway.listed("loras?limit=100") if one["state"] == "ready")
        scale = _number("FLOAT", 1.0, -4.0, 4.0, "How strongly it acts.", step=0.05)
        lora = _choice(f"{one['name']} {one['id']}" for one in ready)
        return {"required": {"lora": lora, "scale": scale}, "optional": {"loras": (LORAS,)}}

    def run(self, *, lora: str, scale: float, loras: Sequence[Inputs] = ()) -> tuple[list[Inputs]]:
        """Add the LoRA; the last word of `lora` is its id."""
        return ([*loras, *({"id": id_, "scale": scale} for id_ in lora.split()[-1:] if lora != NONE)],)


class GiornataControlNet(_Node):
    """Adds a ControlNet and the picture that it sees to those before it."""

    RETURN_TYPES: ClassVar = (CONTROLNETS,)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Inputs]:  # noqa: N802 - ComfyUI's name
        """Return what the node takes, as ComfyUI reads it."""
        served = {net["name"] for model in gateway.listed("models") for net in model["controlnets"]}
        required = {
            "controlnet": _choice(sorted(served)),
            "image": ("IMAGE", {"tooltip": "What it sees: outlines, depth and so on."}),
            "scale": _number("FLOAT", 1.0, 0.0, 4.0, "How strongly it acts.", step=0.05),
            "start": _number(
                "FLOAT", 0.0, 0.0, 1.0, "The share of the steps from which on it acts.", step=0.01
            ),
            "end": _number("FLOAT", 1.0, 0.0, 1.0, "The share of the steps before which it acts.", step=0.01),
        }
        mode = _number("INT", -1, -1, 63, "The kind of picture, for a union ControlNet alone; -1: none.")
        return {"required": required, "optional": {"mode": mode, "controlnets": (CONTROLNETS,)}}

    def run(
        self,
        *,
        controlnet: str,
        image: torch.Tensor,
        mode: int = -1,
        controlnets: Sequence[Inputs] = (),
        **how: Any,
    ) -> tuple[list[Inputs]]:
        """Add the ControlNet, which sees the first picture of `image`."""
        net = {"model": controlnet, "png": pictures.files_of(image)[0], **how}
        return ([*controlnets, *([] if controlnet == NONE else [net if mode < 0 else net | {"mode": mode}])],)


def _painted(task: str, asked: Inputs, files: Sequence[Sequence[tuple[str, bytes]]]) -> torch.Tensor:
    """Pictures of one order for each of `files`, whose fields are what a node was `asked`; seeds count on."""
    reference, nets = asked.pop("reference", None), asked.pop("controlnets", ())
    more = [] if reference is None else [("reference", png) for png in pictures.files_of(reference)]
    more += [(f"control_image_{index}", net["png"]) for index, net in enumerate(nets)]
    asked["controlnets"] = [
        {name: value for name, value in net.items() if name != "png"} | {"image": index}
        for index, net in enumerate(nets)
    ]
    left_out = [{}, [], (), "", NONE]
    given = {
        gateway.FIELDS.get(name, name): value
        for name, value in asked.items()
        if value not in left_out and value != DEFAULTS.get(name)
    }
    each, seed = given.get("n", 1), asked["seed"]
    orders = [
        gateway.GatewayRequest(task, {**given, "seed": (seed + number * each) % SEEDS}, [*own, *more])
        for number, own in enumerate(files)
    ]
    return pictures.images_of(gateway.pictures(orders, _Progress(len(files) * each)))


class _Progress:
    """ComfyUI's bar, previews and button to stop for so many pictures. Elsewhere nobody looks on."""

    def __init__(self, count: int) -> None:
        self._count, self._shares = count, dict[tuple[int, int], float]()
        try:
            utils, self._host = import_module("comfy.utils"), import_module("comfy.model_management")
            self._bar = utils.ProgressBar(100)
        except ModuleNotFoundError:
            self._bar = None

    def __call__(self, news: gateway.PictureProgress | None) -> None:
        """Show `news`; raises what ComfyUI raises where its user stops the workflow."""
        if self._bar is None:
            return
        self._host.throw_exception_if_processing_interrupted()
        if news is not None and news.index >= 0:
            self._shares[news.order, news.index] = news.share
            jpeg = news.preview and ("JPEG", Image.open(io.BytesIO(news.preview)), 512)
            self._bar.update_absolute(round(100 * sum(self._shares.values()) / self._count), 100, jpeg)


_NODES: Final = (GiornataEdit, GiornataGenerate, GiornataMask, GiornataLora, GiornataControlNet)
NODE_CLASS_MAPPINGS: Final = {kind.__name__: kind for kind in _NODES}
NODE_DISPLAY_NAME_MAPPINGS: Final = {name: f"Giornata {name[8:]}" for name in NODE_CLASS_MAPPINGS}
