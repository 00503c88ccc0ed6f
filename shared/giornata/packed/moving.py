"""Tensors on their way from the host to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """`tensor` on `device`; itself where it is there.

    A copy to a GPU leaves from pinned memory, on the current stream: the host waits neither for the copy nor for what
    the stream has to do before. torch keeps the pinned memory until the copy has been made.
    """
    where = torch.device(device)
    if where.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(where, non_blocking=True)
    return tensor.to(where)
