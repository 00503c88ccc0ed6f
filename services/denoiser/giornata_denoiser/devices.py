"""Which devices a pool may have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import torch

from giornata.scheduling.degrees.subsets import MOST_DEVICES
from giornata.wire.errors import Failed

VARIABLE: Final = "GIORNATA_DEVICES"


def parsed(text: str) -> tuple[str, ...]:
    """The devices that ``cuda:0,cuda:1`` or ``cpu,cpu`` names, in order; none of an empty text.

    Raises:
        ValueError: one is no device, a GPU comes twice, there are too many, or GPUs and the CPU are mixed.
    """
    devices = tuple(part.strip() for part in text.split(",")) if text.strip() else ()
    unknown = [device for device in devices if device != "cpu" and not _is_gpu(device)]
    if unknown:
        raise ValueError(
            f"{VARIABLE} names {', '.join(map(repr, unknown))}; write each device as cpu or cuda:N, separated by commas"
        )
    twice = sorted(device for device, count in Counter(devices).items() if count > 1 and device != "cpu")
    if twice:
        raise ValueError(
            f"{VARIABLE} names {', '.join(twice)} twice; name every GPU once, the CPU as often as it has ranks"
        )
    if len(devices) > MOST_DEVICES:
        raise ValueError(
            f"{VARIABLE} names {len(devices)} devices; a pool has at most {MOST_DEVICES}: "
            "start another denoiser for the rest"
        )
    if len({device == "cpu" for device in devices}) > 1:
        raise ValueError(f"{VARIABLE} names the CPU beside GPUs; name devices of one kind")
    return devices


def check_present(devices: Sequence[str], gpus: int | None = None) -> None:
    """Have devices refused that this machine does not have; it has so many `gpus`, by default those that torch sees.

    Raises:
        Failed: it has fewer GPUs than the pool has ranks on them, or none of such a number.
    """
    here = torch.cuda.device_count() if gpus is None else gpus
    wanted = [int(device.removeprefix("cuda:")) for device in devices if device != "cpu"]
    if wanted and max(wanted) >= here:
        there = "none" if not here else ", ".join(f"cuda:{index}" for index in range(here))
        raise Failed(
            f"{VARIABLE} names devices that this machine does not have; leave them out, or start the denoiser where "
            "they are.",
            received=", ".join(devices),
            accepted=there,
        )


def _is_gpu(device: str) -> bool:
    return device.startswith("cuda:") and device.removeprefix("cuda:").isdecimal()
