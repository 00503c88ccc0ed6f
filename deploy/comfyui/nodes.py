"""The nodes."""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar, Final

import torch

from . import gateway, pictures

MAX_SEED: Final = 2**32 - 1
OWN: Final = "the model's own"


class GiornataEdit:
    """Repaints the masked part of pictures as the prompt says; every other pixel stays as it is."""

    CATEGORY: ClassVar = "image/giornata"
    DESCRIPTION: ClassVar = (
        "Have Giornata repaint the masked part of pictures. GIORNATA_URL names the gateway."
    )
    FUNCTION: ClassVar = "edit"
    RETURN_TYPES: ClassVar = ("IMAGE",)
    RETURN_NAMES: ClassVar = ("image",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, Any]]:  # noqa: N802 - ComfyUI's name
        """What the node takes, as ComfyUI reads it."""
        return {
            "required": {
                "image": ("IMAGE",),
                "mask": ("MASK",),
                "prompt": ("STRING", {"multiline": True, "tooltip": "What belongs into the mask."}),
                "seed": ("INT", {"default": 0, "min": 0, "max": MAX_SEED, "control_after_generate": True}),
            },
            "optional": {
                "negative_prompt": ("STRING", {"default": "", "multiline": True}),
                "model": ("STRING", {"default": "", "tooltip": "Needed where several are served."}),
                "steps": ("INT", {"default": 0, "min": 0, "max": 200, "tooltip": f"0: {OWN}."}),
                "strength": (
                    "FLOAT",
                    {"default": 0.0, "min": 0.0, "max": 1.0, "step": 0.01, "tooltip": f"0: {OWN}."},
                ),
                "guidance_scale": (
                    "FLOAT",
                    {"default": -1.0, "min": -1.0, "max": 100.0, "step": 0.1, "tooltip": f"-1: {OWN}."},
                ),
                "grow_mask": ("INT", {"default": 0, "min": 0, "max": 512}),
                "mask_blur": ("FLOAT", {"default": 4.0, "min": 0.0, "max": 256.0, "step": 0.5}),
                "padding_mask_crop": (
                    "INT",
                    {"default": -1, "min": -1, "max": 4096, "tooltip": "-1: the whole picture is painted."},
                ),
                "reuse": (["auto", "strict", "off"],),
            },
        }

    def edit(
        self,
        *,
        image: torch.Tensor,
        mask: torch.Tensor,
        prompt: str,
        seed: int,
        negative_prompt: str = "",
        model: str = "",
        steps: int = 0,
        strength: float = 0.0,
        guidance_scale: float = -1.0,
        grow_mask: int = 0,
        mask_blur: float = 4.0,
        padding_mask_crop: int = -1,
        reuse: str = "auto",
    ) -> tuple[torch.Tensor]:
        """Edit every picture of `image` (pictures, height, width, channels); picture i with `seed` + i.

        `mask` is (pictures, height, width), or one for all of them. EditError says why there is no picture.
        """
        fields = {
            "prompt": prompt,
            "negative_prompt": negative_prompt or None,
            "model": model or None,
            "num_inference_steps": steps or None,
            "strength": strength or None,
            "guidance_scale": None if guidance_scale < 0 else guidance_scale,
            "grow_mask": grow_mask,
            "mask_blur": mask_blur,
            "mask_mode": "white",
            "padding_mask_crop": None if padding_mask_crop < 0 else padding_mask_crop,
            "reuse": reuse,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        files = pictures.files_of(image)
        progress = _Progress(len(files))
        edited = []
        for index, (file, masked) in enumerate(zip(files, pictures.masks_of(mask, len(files)), strict=True)):
            told = given | {"seed": (seed + index) % (MAX_SEED + 1)}
            edited.append(gateway.edit(file, masked, told, progress.of(index)))
        return (pictures.images_of(edited),)


class _Progress:
    """ComfyUI's bar and its button to stop. Elsewhere nobody looks on."""

    PARTS: Final = 100
    """Parts of the bar, for each picture."""

    def __init__(self, count: int) -> None:
        self._bar: Any = None
        try:
            utils, self._host = import_module("comfy.utils"), import_module("comfy.model_management")
        except ModuleNotFoundError:
            return
        self._bar = utils.ProgressBar(count * self.PARTS)

    def of(self, index: int) -> gateway.Told:
        """What is told of the picture `index`; raises what ComfyUI raises where its user stops the workflow."""

        def told(done: int, steps: int) -> None:
            if self._bar is None:
                return
            self._host.throw_exception_if_processing_interrupted()
            self._bar.update_absolute(round(self.PARTS * (index + (done / steps if steps else 0))))

        return told


NODE_CLASS_MAPPINGS: Final = {"GiornataEdit": GiornataEdit}
NODE_DISPLAY_NAME_MAPPINGS: Final = {"GiornataEdit": "Giornata Edit"}
