"""``python -m giornata.gpus``: the GPUs that torch sees here, as JSON. Imports torch.

A process that has asked torch for them sees them until it ends. So a service that is to see one of them asks this
program first.
"""

from __future__ import annotations

import sys

import torch
from pydantic import TypeAdapter

from giornata.control.devices import device_id
from giornata.wire.devices import HostDevice

ADAPTER = TypeAdapter(list[HostDevice])


def host_device(device: torch.device) -> HostDevice:
    """A GPU that this process may use, as its host knows it. Asks CUDA, which then sees the same GPUs until the end."""
    return HostDevice(device=f"{device.type}:{device.index or 0}", id=f"GPU-{device_id(device)}")


def seen() -> list[HostDevice]:
    """The GPUs that this process may use, in CUDA's order; none on a machine without."""
    return [host_device(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]


if __name__ == "__main__":
    sys.stdout.buffer.write(ADAPTER.dump_json(seen()))
