"""The edits of a run, few different ones asked for again and again, and what is to be true of their pictures. Pure."""

from __future__ import annotations

import io
import random
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from giornata.wire.jobs import JobState
from giornata.wire.requests import Reuse
from giornata_gateway.jobs.preparation import job_id_of
from giornata_lab.loadgen.pictures import generated, mask, mask_file
from giornata_lab.loadgen.workload import MaskShape

Pixels = NDArray[np.uint8]

WIDTH: Final = 128
HEIGHT: Final = 96
VARIANTS: Final = 12
TENANT: Final = "default"
"""Tenant of requests without an API key."""
NATS_SHARE: Final = 0.25
"""Share of edits that come over NATS."""
TOLERANCE: Final = 2
"""How far, of 255, a picture that was computed in full may be from the same one of a quiet time: other rows of its
batch change the order of sums."""


class Door(StrEnum):
    """How an edit comes."""

    REST = "rest"
    NATS = "nats"


@dataclass(frozen=True)
class EditVariant:
    """A picture, a mask, and what is asked for."""

    image: bytes
    mask: bytes
    original: Pixels
    """(height, width, 3)."""
    repainted: NDArray[np.bool_]
    """(height, width)."""
    fields: dict[str, Any]
    """Fields of the request, which asks for `n` pictures."""

    @property
    def pictures(self) -> int:
        """Return how many are asked for."""
        return int(self.fields["n"])

    @property
    def reproducible(self) -> bool:
        """Return whether the same pixels come whatever was computed before."""
        return Reuse(self.fields["reuse"]) is Reuse.OFF


@dataclass(frozen=True)
class ChaosEdit:
    """One of the run's edits."""

    number: int
    key: str
    """Its idempotency key."""
    door: Door
    variant: int

    @property
    def job_id(self) -> str:
        """Id of the job that its key leads to."""
        return job_id_of(TENANT, self.key)


def variants() -> tuple[EditVariant, ...]:
    """The different edits: steps, masks and numbers of pictures vary, every second one may reuse."""
    made = []
    for i in range(VARIANTS):
        image = generated(WIDTH, HEIGHT, i // 2)
        marked = mask(WIDTH, HEIGHT, 0.05 + 0.04 * i, MaskShape.SQUARE, i)
        fields: dict[str, Any] = {
            "prompt": f"a red hat {i % 4}",
            "num_inference_steps": 4 + 3 * (i % 6),
            "seed": i,
            "n": 2 if i % 6 == 5 else 1,
            "mask_blur": 0,
            "reuse": Reuse.OFF if i % 2 else Reuse.AUTO,
            "output_format": "png",
        }
        made.append(
            EditVariant(image, mask_file(marked), np.asarray(Image.open(io.BytesIO(image))), marked, fields)
        )
    return tuple(made)


def edits(seed: int, n: int) -> list[ChaosEdit]:
    """`n` edits with keys of their own."""
    chance = random.Random(seed)  # noqa: S311 - a workload, no secret
    return [
        ChaosEdit(
            number=i,
            key=f"chaos-{seed}-{i}",
            door=Door.NATS if chance.random() < NATS_SHARE else Door.REST,
            variant=chance.randrange(VARIANTS),
        )
        for i in range(n)
    ]


def flaw(variant: EditVariant, picture: bytes, reference: Pixels | None) -> str | None:
    """Return what is wrong with a picture; None if nothing is.

    Args:
        variant: what was asked for.
        picture: a file.
        reference: the same picture, painted in a quiet time, where it is to be the same.
    """
    try:
        painted = pixels(picture)
    except (UnidentifiedImageError, OSError) as error:
        return f"it is no picture: {error}"
    if painted.shape != variant.original.shape:
        return f"its shape is {painted.shape} and not {variant.original.shape}"
    if not np.array_equal(painted[~variant.repainted], variant.original[~variant.repainted]):
        return "pixels outside the mask changed"
    if reference is not None:
        off = int(np.abs(painted.astype(np.int16) - reference).max())
        if off > TOLERANCE:
            return f"it differs by {off} from the one that was painted in a quiet time"
    return None


def pixels(picture: bytes) -> Pixels:
    """A picture file as (height, width, 3) uint8."""
    with Image.open(io.BytesIO(picture)) as opened:
        return np.asarray(opened)


@dataclass(frozen=True)
class OutcomeRecord:
    """A job's record when it was looked at."""

    revision: int
    state: JobState
    code: str | None
    """Code of the error that ended the job."""
    attempt: int
    pictures: int
    causes: tuple[str, ...] = ()


@dataclass
class Outcome:
    """Grows while the client works."""

    edit: ChaosEdit
    accepted: bool = False
    tries: int = 0
    """Submissions, the accepted one included."""
    again: Counter[str] = field(default_factory=Counter)
    """Why something was asked for again, by code or kind of error."""
    unexpected: list[str] = field(default_factory=list)
    """Answers that no fault excuses."""
    job_ids: set[str] = field(default_factory=set)
    """That the doors have told."""
    record: OutcomeRecord | None = None
    """When the client knew of the end."""
    pictures: list[bytes] = field(default_factory=list)
    flaws: list[str] = field(default_factory=list)
    """What is wrong with its pictures."""
    ends: list[str] = field(default_factory=list)
    """Final events of the stream that told the end, by type; only REST."""
    latency_s: float = 0.0
    """From the first submission until the pictures were there."""
    gave_up: str | None = None
    """What its client was still waiting for at its limit."""

    def summary(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "number": self.edit.number,
            "job": self.edit.job_id,
            "door": self.edit.door,
            "state": self.record.state if self.record else None,
            "code": self.record.code if self.record else None,
            "attempt": self.record.attempt if self.record else None,
            "tries": self.tries,
            "again": dict(self.again),
            "latency_s": round(self.latency_s, 3),
        }
