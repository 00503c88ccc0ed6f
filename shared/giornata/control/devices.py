"""What tells two processes that they compute on one device."""

from __future__ import annotations

import torch

CPU = "cpu"


def device_id(device: torch.device) -> str:
    """``cpu``, or what names a GPU on its host."""
    return CPU if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)
