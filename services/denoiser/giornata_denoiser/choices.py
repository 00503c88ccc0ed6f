"""The values that settings of a denoiser choose between. Free of torch: settings are judged before it loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from giornata.scheduling.degrees.pool import MOST_DEVICES
from giornata.wire.errors import Failed

EXACT: Final = 0
"""No bits: a tensor is kept in the dtype that it was computed in."""
BITS: Final = (EXACT, 8, 4)
"""Bits of recorded values."""


class CacheForm(StrEnum):
    """The form in which a block's output is kept for every token."""

    KV = "kv"
    """Keys, after norm and rotary embedding, and values."""
    HIDDEN = "hidden"
    """The block's input: half the bytes, projected again by every edit."""


class ControlNetExecutor(StrEnum):
    """The process that computes ControlNets."""

    AUTO = "auto"
    """Whoever is predicted to hold up the row's steps the least."""
    LOCAL = "local"
    """This process, where it has them all."""
    SERVICE = "service"
    """An instance of the ControlNet service, where one has them all."""


class WeightQuantization(StrEnum):
    """The number format in which a denoiser keeps the weights of its network's blocks."""

    OFF = "off"
    """In those of the model's dtype."""
    INT8 = "int8"
    """Integers of 8 bits."""
    FLOAT8 = "float8"
    """Floating-point numbers of 8 bits, e4m3."""


VARIABLE: Final = "GIORNATA_DEVICES"
ANY: Final = "cuda"
"""A GPU that is free."""


def parse_devices(text: str) -> tuple[str, ...]:
    """The devices that ``cuda:0,cuda:1`` or ``cpu,cpu`` names, in order; none of an empty text.

    ``cuda,cuda`` are two that the process claims: the only ones that it sees, and so the first two.

    Raises:
        ValueError: one is no device, a GPU comes twice, there are too many, or GPUs and the CPU are mixed.
    """
    devices = _named(text)
    free = devices.count(ANY)
    unknown = [device for device in devices if device not in {"cpu", ANY} and not _is_gpu(device)]
    if unknown:
        raise ValueError(
            f"{VARIABLE} names {', '.join(map(repr, unknown))}; write each device as cpu, as cuda:N, or as cuda for "
            "any that is free, separated by commas"
        )
    twice = sorted(
        device for device, count in Counter(devices).items() if count > 1 and device not in {"cpu", ANY}
    )
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
    if free and free < len(devices):
        raise ValueError(
            f"{VARIABLE} names {free} of {len(devices)} GPUs without a number; number all or none"
        )
    return tuple(f"{ANY}:{index}" for index in range(free)) or devices


def claimed_of(text: str) -> int:
    """Return how many devices of the list are any GPUs that are free."""
    return _named(text).count(ANY)


def check_present(devices: Sequence[str], gpus: int | None = None) -> None:
    """Have devices refused that this machine does not have; it has so many `gpus`, by default those that torch sees.

    Raises:
        Failed: it has fewer GPUs than the pool has ranks on them, or none of such a number.
    """
    import torch  # noqa: PLC0415 - a configuration is judged before torch is loaded

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


def _named(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",")) if text.strip() else ()


def _is_gpu(device: str) -> bool:
    return device.startswith("cuda:") and device.removeprefix("cuda:").isdecimal()
