"""What the demo measured, and whether it is good enough. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from giornata.wire.values import StageTimes
from giornata.wire.workers import InstanceView

Pixels: TypeAlias = npt.NDArray[np.uint8]
"""(height, width, 3) uint8."""

ORACLE_LIMIT: Final = 2 / 255
"""The service rounds to 8 bits where diffusers does; a value on the edge may fall to either side."""


class ServiceReport(BaseModel):
    """One service of the fleet that made the edit."""

    instances: int
    version: str


class EditReport(BaseModel):
    """One edit of the demo."""

    name: str
    job_id: str
    prompt: str
    seed: int
    steps: int
    width: int
    height: int
    mask_ratio: float
    """Share of the image tokens that the mask touches."""
    latency_s: float
    """Seconds from sending the request to having the picture."""
    stage_ms: StageTimes
    outside_mask_max_abs_diff: float
    """Output against input where the effective alpha is 0."""
    inside_mask_mean_abs_diff: float
    """Output against input where it is not."""
    oracle: str | None
    """The diffusers pipeline compared with; None where the comparison was switched off."""
    oracle_max_abs_diff: float | None


class DemoReport(BaseModel):
    """``out/demo/report.json``."""

    model: str
    edits: tuple[EditReport, ...]
    diff_unit: Literal["1.0 is the full range of a channel, one 8-bit step is 1/255"] = (
        "1.0 is the full range of a channel, one 8-bit step is 1/255"
    )
    services: dict[str, ServiceReport]
    versions: dict[str, str]
    machine: dict[str, str | int]


def services_of(fleet: Sequence[InstanceView]) -> dict[str, ServiceReport]:
    """Ready instances per service, and their versions."""
    ready = [instance for instance in fleet if instance.ready]
    counts = Counter(instance.service for instance in ready)
    return {
        name: ServiceReport(
            instances=n, version=", ".join(sorted({i.version for i in ready if i.service == name}))
        )
        for name, n in sorted(counts.items())
    }


def max_abs_diff(one: Pixels, other: Pixels, where: npt.NDArray[np.bool_] | None = None) -> float:
    """Largest difference in 0..1, over the pixels of `where` (height, width); 0 where there are none."""
    gaps = _gaps(one, other)
    return float(np.max(gaps if where is None else gaps[where], initial=0.0))


def mean_abs_diff(one: Pixels, other: Pixels, where: npt.NDArray[np.bool_]) -> float:
    """Mean difference in 0..1 over the pixels of `where`, which must mark one at least."""
    return float(_gaps(one, other)[where].mean())


def failings(report: DemoReport) -> list[str]:
    """What is wrong with the edits, a sentence each; empty when all are as they should be."""
    return [f"{edit.name}: {sentence}" for edit in report.edits for sentence in _failings(edit)]


def _failings(edit: EditReport) -> list[str]:
    found = []
    if edit.outside_mask_max_abs_diff != 0:
        found.append(
            f"Pixels outside the mask changed by up to {_steps(edit.outside_mask_max_abs_diff)}; none may."
        )
    if edit.inside_mask_mean_abs_diff == 0:
        found.append("Nothing changed inside the mask.")
    if edit.oracle_max_abs_diff is not None and edit.oracle_max_abs_diff > ORACLE_LIMIT:
        found.append(
            f"The picture differs from {edit.oracle} by up to {_steps(edit.oracle_max_abs_diff)}; "
            f"at most {_steps(ORACLE_LIMIT)} is accepted."
        )
    return found


def _steps(difference: float) -> str:
    return f"{round(difference * 255)}/255"


def _gaps(one: Pixels, other: Pixels) -> npt.NDArray[np.float64]:
    """Differences per pixel and channel in 0..1; in float64, so that k/255 stays below a limit of k/255."""
    if one.shape != other.shape:
        raise ValueError(f"two pictures of one shape are needed, received {one.shape} and {other.shape}")
    gaps: npt.NDArray[np.float64] = np.abs(one.astype(np.int16) - other.astype(np.int16)) / 255
    return gaps
