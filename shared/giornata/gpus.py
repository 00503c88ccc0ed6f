"""``python -m giornata.gpus``: the GPUs that torch sees here, as JSON. Imports torch.

A process that has asked torch for them sees them until it ends. So a service that is to see one of them asks this
program first. A process computes on one GPU and sees no other: events and Triton's launches go to the current device of
their thread, which is the first one.
"""

from __future__ import annotations

import os
import sys
from typing import Final

import torch
from pydantic import TypeAdapter

from giornata.control.networks import device_id
from giornata.wire.errors import Failed
from giornata.wire.workers import HostDevice

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def host_device(device: torch.device) -> HostDevice:
    """A GPU that this process may use, as its host knows it. Asks CUDA, which then sees the same GPUs until the end."""
    return HostDevice(device=f"{device.type}:{device.index or 0}", id=f"GPU-{device_id(device)}")


def visible_alone(device: str, visible: str | None) -> str:
    """The value of :data:`VISIBLE` that shows ``cuda:N`` alone, of the GPUs that the value `visible` shows in order."""
    index = int(device.removeprefix("cuda:"))
    return str(index) if visible is None else "".join(visible.split(",")[index : index + 1]).strip()


def see_alone(device: str) -> str:
    """Have CUDA show this process the GPU ``cuda:N`` alone, before it asks CUDA for any; its name from then on.

    A device without a number is left as it is, and so is a number that no GPU has. Without NVML torch asks CUDA itself
    to count its GPUs, and then sees them until the end: of those ``cuda:0`` needs no restriction, being the first.

    Raises:
        Failed: this process has asked CUDA before, or there is no NVML, and the GPU is not the first that CUDA shows.
    """
    if not device.startswith("cuda:") or (index := int(device[5:])) >= torch.cuda.device_count():
        return device
    own = os.environ[VISIBLE] = visible_alone(device, os.environ.get(VISIBLE))
    first = host_device(torch.device("cuda", 0)).id  # from here on the count is CUDA's own
    if (index and torch.cuda.device_count() != 1) or (own.startswith("GPU-") and not first.startswith(own)):
        message = f"CUDA shows {device} beside other GPUs. Set {VISIBLE} to it, and GIORNATA_DEVICE to cuda."
        raise Failed(message, received=f"{first} in place of {own}", accepted="cuda:0 where there is no NVML")
    return "cuda:0"


if __name__ == "__main__":
    seen = [host_device(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    sys.stdout.buffer.write(TypeAdapter(list[HostDevice]).dump_json(seen))
