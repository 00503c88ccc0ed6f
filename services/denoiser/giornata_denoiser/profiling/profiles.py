"""Profile files: read, checked against what this denoiser serves, and written as a whole or not at all."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final

import torch
from pydantic import ValidationError

from giornata.planning.cost_model import Profile
from giornata.wire.errors import Failed
from giornata.wire.models import BlockSpec
from giornata_denoiser.checkpoint import Checkpoint

AGAIN: Final = "measure it again with `giornata profile`, or leave it out"


def read_profile(path: Path, checkpoint: Checkpoint) -> Profile:
    """The profile in `path`, which is one of `checkpoint` where it is now.

    Raises:
        Failed: there is none, it is derived and not measured, or of another model, device or dtype; the error says
            which.
    """
    try:
        profile = Profile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise Failed(f"The profile {path} cannot be read: {error.strerror}; {AGAIN}.") from error
    except ValidationError as error:
        raise Failed(f"{path} is not a profile; {AGAIN}. {error}") from error
    if profile.derived:
        raise Failed(
            f"The profile {path} was not measured, but derived from {profile.derived}; it is for simulations alone: "
            f"{AGAIN}."
        )
    for what, received, accepted in _facts(profile, checkpoint):
        if str(received) != accepted:
            raise Failed(
                f"The profile {path} is of another {what}; {AGAIN}.", received=received, accepted=accepted
            )
    return profile


def write_profile(path: Path, profile: Profile) -> None:
    """Replace `path`, making its folder; OSError where that cannot be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(profile.model_dump_json(indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)


def device_name(device: torch.device) -> str:
    """A GPU's name; the processor's, with the threads that torch computes with."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, threads: {torch.get_num_threads()}"


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name in configurations."""
    return str(dtype).removeprefix("torch.")


def versions() -> dict[str, str]:
    """Versions of what decides how long a step takes."""
    packages = ("giornata-denoiser", "torch", "diffusers")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def _facts(profile: Profile, checkpoint: Checkpoint) -> list[tuple[str, object, str]]:
    """Return what has to be equal: its name, the profile's, the checkpoint's."""
    family, card = checkpoint.family, checkpoint.card
    return [
        ("model", profile.model_digest[:12], card.digest[:12]),
        ("network", _told(profile.blocks), _told(family.operations.specs)),
        ("dtype", profile.dtype, dtype_name(family.dtype)),
        ("device", profile.device, device_name(family.device)),
    ]


def _told(blocks: Sequence[BlockSpec]) -> str:
    """Return how many blocks there are, and how much they multiply for a cell."""
    cell = sum(spec.count * (spec.linear + spec.convolution + spec.across) for spec in blocks)
    return f"{sum(spec.count for spec in blocks)} blocks of {cell:.0f} multiplications a cell"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
