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

STEP_S = "PACED_STEP_S"
"""Environment variable: seconds that every forward of the transformer waits, beside what it computes."""

load = FluxTransformer2DModel.from_pretrained


def load_paced(*args: Any, **options: Any) -> FluxTransformer2DModel:
    """The checkpoint's transformer; each forward embeds the batch's latents once, and waits there."""
    wait_s = float(os.environ[STEP_S])
    model: FluxTransformer2DModel = load(*args, **options)
    model.x_embedder.register_forward_pre_hook(lambda _module, _inputs: time.sleep(wait_s))
    return model


if __name__ == "__main__":
    with mock.patch.object(FluxTransformer2DModel, "from_pretrained", load_paced):
        runpy.run_module("giornata_denoiser", run_name="__main__", alter_sys=True)
