"""The values that messages are made of."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, model_validator


class WireModel(BaseModel):
    """A value on the wire: immutable; fields that a newer version added are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class RecordModel(WireModel):
    """A record, or a part of one: fields that a newer version added are kept, and written back as they came.

    Its instances travel in messages too, since what comes in a message may end in a record.
    """

    model_config = ConfigDict(extra="allow")

    def known(self) -> dict[str, Any]:
        """The fields of this version, by name."""
        return {name: getattr(self, name) for name in type(self).model_fields}

    def updated(self, by: Self) -> Self:
        """This value with the fields of `by` that this version knows."""
        return self.model_copy(update=by.known())


class Intermediate(StrEnum):
    """The files that a job's stages leave for the next ones. A lost one is made again: the error's `field` names it."""

    PREPARED = "prepared"
    ALPHA = "alpha"
    ENCODING = "encoding"
    LATENTS = "latents"


class BlockMode(StrEnum):
    """The treatment of the tokens outside of the compute set by one block."""

    FULL = "full"
    """Computes them too. Needs their hidden state."""
    HIDDEN = "hidden"
    """Projects their keys and values again. Needs their hidden state, which is gone afterwards."""
    KV = "kv"
    """Takes their keys and values from the cache. Their hidden state is gone afterwards."""


Grain: TypeAlias = Annotated[int, Field(ge=1), PlainSerializer(str)]
"""Finest cells a side of one cell: 1 for transformers, whose cells are tokens. Its decimal digits on the wire."""


class CellMap(RecordModel):
    """A bitmap of a picture's cells, the same at every reader.

    With numpy, `bits` is ``packbits(cells).tobytes()`` of `cells` (height, width) bool, and `cells` is
    ``unpackbits(frombuffer(bits, uint8), count=height * width).reshape(height, width)``.
    """

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    height: int = Field(ge=1)
    width: int = Field(ge=1)
    bits: bytes
    """Row-major, the most significant bit first, and 0 after the last cell: ceil(height * width / 8) bytes."""

    @model_validator(mode="after")
    def _holds_every_cell(self) -> Self:
        size_bytes = -(-self.height * self.width // 8)
        if len(self.bits) != size_bytes:
            raise ValueError(
                f"{self.height}x{self.width} cells take {size_bytes} bytes, not {len(self.bits)}"
            )
        if self.bits[-1] & ((1 << (8 * size_bytes - self.height * self.width)) - 1):
            raise ValueError("a bit after the last cell is set")
        return self

    @cached_property
    def count(self) -> int:
        """Cells whose bit is set."""
        return int.from_bytes(self.bits, "big").bit_count()


class StageTimes(RecordModel):
    """Milliseconds that a job spent in each stage, as the router sees them; summed over attempts."""

    prepare: float = 0.0
    """Inspect and encode."""
    queue: float = 0.0
    """Waiting: in the work queue, for a worker, and in the worker for its first step."""
    denoise: float = 0.0
    """From a row's first step to the last row's last."""
    finish: float = 0.0
    """Decode, paste, encode."""


class ComputeTimes(RecordModel):
    """Milliseconds spent computing for a job; the rest of its latency is waiting and overhead."""

    inspect: float = 0.0
    encode: float = 0.0
    denoise: float = 0.0
    """Engine steps with rows of the job, each counted once."""
    decode: float = 0.0
    paste: float = 0.0


def not_blank(text: str) -> str:
    """`text` if it says something; a validator of fields."""
    if not text.strip():
        raise ValueError("must not be blank")
    return text


def digest_of(*parts: object) -> str:
    """32 hexadecimal digits of values with a stable `repr`."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
