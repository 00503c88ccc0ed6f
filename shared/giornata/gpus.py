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


def seen() -> list[HostDevice]:
    """The GPUs that this process may use, in CUDA's order; none on a machine without."""
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return [HostDevice(device=device, id=f"GPU-{device_id(torch.device(device))}") for device in devices]


if __name__ == "__main__":
    sys.stdout.buffer.write(ADAPTER.dump_json(seen()))
