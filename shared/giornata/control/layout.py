"""Names of ControlNets, what they see, and behind which blocks their samples are added. Free of torch. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from giornata.wire.adapters import ControlInput, ControlKind

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}")
Behind = tuple[int | None, ...]
"""By block of a denoising network: which sample of a ControlNet is added behind it; None for nothing."""


def parse_checkpoints(configured: str) -> dict[str, str]:
    """Checkpoints by name, of ``NAME=CHECKPOINT,NAME=CHECKPOINT``; a checkpoint alone is called as its folder.

    ValueError where a name is given twice, or is none.
    """
    found: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in configured.split(","))):
        name, equals, checkpoint = entry.partition("=")
        if not equals:
            name, checkpoint = Path(entry).resolve().name, entry
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a ControlNet: letters, digits, _ . -")
        if name in found:
            raise ValueError(f"two ControlNets are called {name}")
        found[name] = checkpoint
    return found


class ControlMismatch(ValueError):
    """A ControlNet cannot act on a row: says why."""


def control_input(config: Mapping[str, Any]) -> ControlInput:
    """By a ControlNet's ``config.json``, as the pipelines of diffusers decide it.

    `FluxControlNetInpaintPipeline` encodes no image for a ControlNet with an `input_hint_block`;
    `StableDiffusion3ControlNetPipeline` subtracts no shift where the pooled text is replaced by zeros, and
    `StableDiffusion3ControlNetInpaintingPipeline` gives ControlNets with one extra channel the mask.

    Raises:
        ValueError: it has other extra channels than a mask.
    """
    network = config.get("_class_name")
    if network == "FluxControlNetModel" and config.get("conditioning_embedding_channels") is not None:
        return ControlInput.PIXELS
    if network != "SD3ControlNetModel":
        return ControlInput.USUAL
    match config.get("extra_conditioning_channels") or 0:
        case 0:
            pass
        case 1:
            return ControlInput.MASKED
        case more:
            raise ValueError(f"a ControlNet of SD3 has {more} extra channels; served are 0, or 1 for a mask")
    unshifted = config.get("force_zeros_for_pooled_projection", True)
    return ControlInput.UNSHIFTED if unshifted else ControlInput.USUAL


@dataclass(frozen=True)
class BlockCounts:
    """Numbers of double and single blocks, of a network; or of the samples for each, of a ControlNet."""

    double: int
    single: int


@dataclass(frozen=True)
class ResidualLayout:
    """The layout of what several ControlNets add: their samples, summed where they meet behind one block.

    Diffusers' `Multi` classes sum samples before that, and drop those that the first net does not have.
    """

    behind: Behind
    """By block, which sum is added behind it."""
    parts: tuple[tuple[tuple[int, int], ...], ...]
    """By sum: the ControlNets, by their place, and which sample of each."""
    first: tuple[int, ...]
    """By sum: the first block behind which it is added."""


def flux_layout(base: BlockCounts, samples: BlockCounts, *, repeats: bool = False) -> Behind:
    """As `FluxTransformer2DModel.forward` has it: double blocks first in both.

    So many neighbouring blocks share a sample that all samples serve; for `repeats` (XLabs' ControlNets, with an
    `input_hint_block`) double blocks take them in turns.
    """
    doubles: Behind = (None,) * base.double
    if samples.double:
        shared = -(-base.double // samples.double)
        doubles = tuple(b % samples.double if repeats else b // shared for b in range(base.double))
    singles: Behind = (None,) * base.single
    if samples.single:
        shared = -(-base.single // samples.single)
        singles = tuple(samples.double + b // shared for b in range(base.single))
    return (*doubles, *singles)


def sd3_layout(blocks: int, samples: int) -> Behind:
    """As `SD3Transformer2DModel.forward` has it: nothing is added behind the last block, whose text goes nowhere."""
    interval = blocks / samples
    return (*(int(block / interval) for block in range(blocks - 1)), None)


def sum_residuals(nets: Sequence[Behind]) -> ResidualLayout:
    """The sums of the ControlNets that act on a row in a step; each says what it adds behind every block."""
    behind: list[int | None] = []
    found: dict[tuple[tuple[int, int], ...], int] = {}
    first: list[int] = []
    for block, samples in enumerate(zip(*nets, strict=True)):
        parts = tuple((net, sample) for net, sample in enumerate(samples) if sample is not None)
        if not parts:
            behind.append(None)
            continue
        if parts not in found:
            found[parts] = len(found)
            first.append(block)
        behind.append(found[parts])
    return ResidualLayout(tuple(behind), tuple(found), tuple(first))


def count_sequences(kind: ControlKind, texts: int) -> int:
    """For how many of a row's sequences its ControlNets are computed; `texts` are 2 with classifier-free guidance.

    A negative prompt gets the positive's samples with Flux, as in `FluxControlNetPipeline`.
    """
    return 1 if kind is ControlKind.FLUX else texts
