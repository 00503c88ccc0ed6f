"""The denoiser with a model that waits: a step takes a set time and little processor, and faults fall into the middle.

``python -m tests.fakes.paced_denoiser`` is the service's own program; only the checkpoint's transformer is paced.
"""

from __future__ import annotations

import os
import runpy
import time
from typing import Any
from unittest import mock

from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor

STEP_S = "PACED_STEP_S"
"""Environment variable: seconds that a forward of the transformer waits for each picture, beside what it computes."""
PICTURE_TOKENS = 48
"""Tokens of a picture of 128 x 96 pixels."""
MAX_PICTURES = 4
"""The longest wait: larger batches are computed when the service measures itself at its start."""

load = FluxTransformer2DModel.from_pretrained


def load_paced(*args: Any, **options: Any) -> FluxTransformer2DModel:
    """The checkpoint's transformer; each forward embeds the batch's latents once, and waits there.

    Two pictures in one step take twice as long as one, so that a router spreads them.
    """
    wait_s = float(os.environ[STEP_S])
    model: FluxTransformer2DModel = load(*args, **options)

    def wait(_module: Any, inputs: tuple[Tensor]) -> None:
        time.sleep(wait_s * min(MAX_PICTURES, max(1.0, len(inputs[0]) / PICTURE_TOKENS)))

    model.x_embedder.register_forward_pre_hook(wait)
    return model


if __name__ == "__main__":
    with mock.patch.object(FluxTransformer2DModel, "from_pretrained", load_paced):
        runpy.run_module("giornata_denoiser", run_name="__main__", alter_sys=True)
