"""The denoiser with a model that waits: a step takes a set time and little processor, and faults fall into the middle.

``python -m tests.fakes.paced_denoiser`` is the service's own program; only the checkpoint's transformer is paced.
"""

from __future__ import annotations

import os
import runpy
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor

from giornata.planning import cost_model
from giornata.planning.cost_model import Profile
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.profiling import fitting
from tests.fakes.profiles import PROFILE, Steady

STEP_S = "PACED_STEP_S"
"""Environment variable: seconds that a forward of the transformer waits for each picture, beside what it computes.

Without it forwards do not wait, and costs are settled: whether an edit reuses does not depend on the machine.
"""
STEP_FILE = "PACED_STEP_FILE"
"""Environment variable: a file that holds other seconds while it is there. It may come and go, also while a step waits.

Without the variable this is the plain denoiser: while a worker's shared stack stands, each stack that its tests start
has this program in the denoiser's place.
"""
LOOK_S = 0.05
"""How often a step that waits looks at the file."""
PICTURE_TOKENS = 48
"""Tokens of a picture of 128 x 96 pixels."""
MAX_PICTURES = 4
"""The longest wait: larger batches are computed when the service measures itself at its start."""


def step_s() -> float:
    """Seconds that a picture is to take now."""
    with suppress(FileNotFoundError):
        return float(Path(os.environ[STEP_FILE]).read_text(encoding="utf-8"))
    return float(os.environ.get(STEP_S, "0"))


load = FluxTransformer2DModel.from_pretrained


def load_paced(*args: Any, **options: Any) -> FluxTransformer2DModel:
    """The checkpoint's transformer; each forward embeds the batch's latents once, and waits there.

    Two pictures in one step take twice as long as one, so that a router spreads them.
    """
    model: FluxTransformer2DModel = load(*args, **options)

    def wait(_module: Any, inputs: tuple[Tensor]) -> None:
        began_s, pictures = time.monotonic(), min(MAX_PICTURES, max(1.0, len(inputs[0]) / PICTURE_TOKENS))
        while (left_s := began_s + step_s() * pictures - time.monotonic()) > 0:
            time.sleep(min(left_s, LOOK_S))

    model.x_embedder.register_forward_pre_hook(wait)
    return model


def settled(checkpoint: Checkpoint, _bits: int) -> Profile:
    """Costs that nobody has measured, in place of the first steps'."""
    card = checkpoint.card
    return PROFILE.model_copy(update={"model": card.name, "model_digest": card.digest})


if __name__ == "__main__":
    with ExitStack() as patched:
        if STEP_FILE in os.environ:
            patched.enter_context(mock.patch.object(FluxTransformer2DModel, "from_pretrained", load_paced))
        if STEP_FILE in os.environ and STEP_S not in os.environ:
            patched.enter_context(mock.patch.object(fitting, "calibrate", settled))
            patched.enter_context(mock.patch.object(cost_model, "CostModel", Steady))
        runpy.run_module("giornata_denoiser", run_name="__main__", alter_sys=True)
